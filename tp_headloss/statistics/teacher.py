"""forward_kl, reverse_kl and teacher_entropy: the student compared with a teacher's logits t (`Teacher`).

u = t / the teacher's temperature, q = softmax(u); the student at its own temperature there: z' = scale z, p' = softmax.

| statistic       | packet rows                                         | merge         | d/dz'_j                  |
|-----------------|-----------------------------------------------------|---------------|--------------------------|
| (all three)     | teacher_max = max u, teacher_sum = sum exp(u - max) | like max, sum | none: a teacher is fixed |
| forward_kl      | cross = sum exp(u - max u)(u - z')                  | f cross       | p'_j - q_j               |
| reverse_kl      | gap = sum exp(z' - max z')(z' - u), target apart;   | f gap         | p'_j (z'_j - u_j - mean) |
|                 | teacher_target = u_y                                | sum           | (mean = sum p' (z' - u)) |
| teacher_entropy | teacher_moment = sum exp(u - max)(u - max)          | like moment   | none                     |

forward_kl = KL(q || p'), reverse_kl = KL(p' || q), 0 log 0 = 0: a column without probability adds nothing.
"""

import torch

from .family import (
    Family,
    Joined,
    Merging,
    Softmax,
    Tile,
    Wanted,
    decay,
    finite_shift,
    row_sum,
    weigh,
)
from .softmax import student_factor

DIVERGENCES = ("jsd", "total_variation", "overlap")


class TeacherFamily(Family):
    statistics = ("forward_kl", "reverse_kl", "teacher_entropy")
    gradients = narrow_gradients = ("forward_kl", "reverse_kl")
    in_one_read = ("forward_kl", "reverse_kl", "teacher_entropy")
    # maximum and sum of the teacher; the mean of z' - u, 0 if not wanted
    merged = ("teacher_shift", "teacher_sum", "gap")

    def wanted(self, call: Wanted) -> bool:
        return call.any_of(self.statistics + DIVERGENCES)

    def needs_student_sum(self, call: Wanted) -> bool:
        return True

    def packet_rows(self, call: Wanted) -> tuple[str, ...]:
        optional = {"cross": "forward_kl", "gap": "reverse_kl", "teacher_moment": "teacher_entropy"}
        rows = ["teacher_max", "teacher_sum"] + (["teacher_target"] if call.has_labels else [])
        return (*rows, *(row for row, name in optional.items() if name in call.want))

    def local(self, tile: Tile, softmax: Softmax, rows) -> dict[str, torch.Tensor]:
        u, z = tile.teacher, tile.z
        peak = u.amax(-1)
        fall = u - finite_shift(peak)
        q, p = fall.exp(), (tile.scale * softmax.shifted).exp()
        out = {"teacher_max": peak, "teacher_sum": row_sum(q)}
        if "cross" in rows:
            out["cross"] = row_sum(weigh(q, u - tile.scale * z))
        if "gap" in rows:
            out["gap"] = row_sum(weigh(p, tile.scale * z - u))
        if "teacher_moment" in rows:
            out["teacher_moment"] = row_sum(weigh(q, fall))
        if softmax.owned is not None:
            out["teacher_target"] = torch.where(
                softmax.owned, u.gather(1, softmax.column)[:, 0], 0.0
            )
        return out

    def merge(self, rows: dict, merging: Merging) -> dict[str, torch.Tensor]:
        shift = rows["teacher_max"].amax(0)
        drop, factor = decay(rows["teacher_max"], shift)
        sums = {"teacher_shift": shift, "teacher_sum": (factor * rows["teacher_sum"]).sum(0)}
        if "cross" in rows:
            sums["cross"] = weigh(factor, rows["cross"]).sum(0)
        if "gap" in rows:
            sums["gap"] = weigh(student_factor(merging), rows["gap"]).sum(0)
        if "teacher_moment" in rows:
            sums["teacher_moment"] = (
                factor * (rows["teacher_moment"] + drop * rows["teacher_sum"])
            ).sum(0)
        if "teacher_target" in rows:
            sums["teacher_target"] = torch.where(
                rows["owner"] == 1, rows["teacher_target"], 0.0
            ).sum(0)
        return sums

    def join(self, sums: dict, joined: Joined) -> dict[str, torch.Tensor]:
        if joined.target is None or "gap" not in sums:
            return sums
        gap = weigh(joined.student_factor, sums["gap"])
        gap = gap + weigh(joined.at_target, joined.scale * joined.target - sums["teacher_target"])
        return sums | {"gap": gap}

    def finish(self, sums: dict, joined: Joined) -> tuple[dict, dict]:
        whole, teacher_sum = joined.student_sum, sums["teacher_sum"]
        # difference of the log-normalisers
        apart = (
            sums["teacher_shift"] + teacher_sum.log() - (joined.scale * joined.top + whole.log())
        )
        mean = sums["gap"] / whole if "gap" in sums else torch.zeros_like(whole)
        values, rows = (
            {},
            {"teacher_shift": sums["teacher_shift"], "teacher_sum": teacher_sum, "gap": mean},
        )
        if "cross" in sums:
            values["forward_kl"] = (sums["cross"] / teacher_sum - apart).clamp(min=0)
        if "gap" in sums:
            values["reverse_kl"] = (mean + apart).clamp(min=0)
        if "teacher_moment" in sums:
            values["teacher_entropy"] = teacher_sum.log() - sums["teacher_moment"] / teacher_sum
        unknown = ~(teacher_sum > 0) & ~joined.ignored
        rows["student_sum"] = whole
        values, rows = (
            {key: torch.where(unknown, torch.nan, x) for key, x in part.items()}
            for part in (values, rows)
        )
        return values, rows

    def scaled(
        self, total, tile: Tile, merged: dict, grads: dict, beta: float, want: tuple[str, ...]
    ):
        if not any(name in grads for name in (*self.gradients, *DIVERGENCES)):
            return total
        p, q = probabilities(tile, merged)
        total = torch.zeros_like(tile.z)
        if "forward_kl" in grads:
            total = total + grads["forward_kl"] * (p - q)
        if "reverse_kl" in grads:
            g = grads["reverse_kl"]  # where it is 0, an infinite divergence has no gradient
            apart = p * (tile.scale * tile.z - tile.teacher - merged["gap"])
            total = total + g * torch.where((p == 0) | (g == 0), 0.0, apart)
        return total


def probabilities(tile: Tile, merged: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [n, w] of student and teacher."""
    p = (tile.scale * (tile.z - merged["shift"])).exp() / merged["student_sum"]
    return p, (tile.teacher - merged["teacher_shift"]).exp() / merged["teacher_sum"]
