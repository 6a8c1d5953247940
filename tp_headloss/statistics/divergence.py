"""jsd, total_variation and overlap: sums whose terms need both normalisers, hence a second, small
exchange.

Its packets hold a value and the mean that the gradient subtracts, merged by adding. With p' and q
as in `teacher`, m = beta q + (1 - beta) p', d = p' - q, v_j = (1 - beta) p'_j log(p'_j / m_j), w_j
= beta q_j log(q_j / m_j), l_j = (1 - sign(d_j)) / 2:

| statistic       | value            | mean                   | d/dz'_j                     |
|-----------------|------------------|------------------------|-----------------------------|
| jsd             | sum v_j + w_j    | sum v_j                | v_j - p'_j mean             |
| total_variation | sum abs(d_j) / 2 | sum p'_j sign(d_j) / 2 | p'_j (sign(d_j) / 2 - mean) |
| overlap         | sum min(p'_j, q_j) | sum p'_j l_j         | p'_j (l_j - mean)           |

The overlap is 1 - total_variation, of which neither keeps its digits where the other is near 1: an overlap
of 1e-5 has two in 1 - total_variation, and so has its gradient.
"""

import torch

from .family import Family, Tile, Wanted, row_sum
from .teacher import DIVERGENCES, probabilities


class DivergenceFamily(Family):
    statistics = gradients = DIVERGENCES
    wide_gradients, narrow_gradients = ("jsd",), ("total_variation", "overlap")
    values = ()
    in_one_read = DIVERGENCES

    def second_rows(self, call: Wanted) -> tuple[str, ...]:
        return tuple(name for name in self.statistics if name in call.want)

    def second(
        self, name: str, tile: Tile, merged: dict, beta: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        p, q = probabilities(tile, merged)
        if name == "jsd":
            student, teacher = jensen_shannon_parts(p, q, beta)
            return row_sum(student + teacher), row_sum(student)
        if name == "overlap":
            return row_sum(torch.minimum(p, q)), row_sum(p * share_below(p, q))
        return row_sum(0.5 * (p - q).abs()), row_sum(0.5 * p * (p - q).sign())

    def scaled(
        self, total, tile: Tile, merged: dict, grads: dict, beta: float, want: tuple[str, ...]
    ):
        if not any(name in grads for name in self.statistics):
            return total
        p, q = probabilities(tile, merged)
        if "jsd" in grads:
            total = total + grads["jsd"] * (
                jensen_shannon_parts(p, q, beta)[0] - p * merged["jsd_mean"]
            )
        if "total_variation" in grads:
            total = total + grads["total_variation"] * p * (
                0.5 * (p - q).sign() - merged["total_variation_mean"]
            )
        if "overlap" in grads:
            total = total + grads["overlap"] * p * (share_below(p, q) - merged["overlap_mean"])
        return total


def share_below(p, q) -> torch.Tensor:
    """Derivative of min(p, q) by p: 1 where p is below q, 1/2 where they are equal, else 0."""
    return 0.5 - 0.5 * (p - q).sign()


def jensen_shannon_parts(p, q, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(1 - beta) p log(p / m) and beta q log(q / m), m = beta q + (1 - beta) p."""
    m = beta * q + (1 - beta) * p
    m = torch.where(m == 0, 1.0, m)  # where products of denormals vanish
    student = torch.where(p == 0, 0.0, (1 - beta) * p * (p / m).log())
    return student, torch.where(q == 0, 0.0, beta * q * (q / m).log())
