"""Token mask, token weights and denominator: the one definition of "mean"."""

from __future__ import annotations

from typing import NamedTuple

import torch

REDUCTIONS = ("none", "sum", "mean")  # of all tokens; those by sequence are in `sequences`


def masked(values: torch.Tensor, valid: torch.Tensor | None, weight: torch.Tensor | None = None) -> torch.Tensor:
    """values [.., tokens] * weight where valid, 0 elsewhere whatever stands there (selected, not multiplied).

    With a weight the result is float64, so that large weights do not overflow before something divides them; where the
    weight is 0 it is 0, too, unless the weight requires a gradient.
    """
    if weight is not None:
        values = values.double() * weight
        valid = valid if weight.requires_grad else valid & (weight != 0)
    return values if valid is None else torch.where(valid, values, 0.0)


def nonzero(denominator: torch.Tensor | float) -> torch.Tensor | float:
    """The denominator, and inf for 0: what it divides is then 0, with zero gradient."""
    if not isinstance(denominator, torch.Tensor):
        return denominator or float("inf")
    return denominator.double().masked_fill(denominator == 0, float("inf"))


class Monomial(NamedTuple):
    """A per-token value that the reduction evaluates itself, without kernels of its own: [-] a statistic [squared]."""

    statistic: str  # a field of VocabStatistics
    square: bool = False
    negative: bool = False

    def __call__(self, stats) -> torch.Tensor:
        values = getattr(stats, self.statistic)
        values = values if values.is_floating_point() else values.float()
        values = values**2 if self.square else values
        return -values if self.negative else values


class SumsPlan(NamedTuple):
    """What one reduction kernel computes: sums of values and loss = sum of coefficient_i sum_i / divisor.

    The divisor is the caller's denominator, or the count of valid tokens (the sum of their weights); `nonzero` of it.
    """

    coefficients: tuple[float, ...]  # of the terms, the first values; the other values are metrics
    statistics: tuple[str, ...]  # what the values are, "" for a tensor that somebody computed from them
    squares: int  # bit i: value i is squared
    negatives: int  # bit i: sum i is negated

    @classmethod
    def of(cls, functions, coefficients) -> SumsPlan:
        """Of what HeadLoss sums: monomials, and functions whose values are summed as they are."""
        as_it_is = Monomial("")
        monomials = [f if isinstance(f, Monomial) else as_it_is for f in functions]
        return cls(
            tuple(coefficients),
            tuple(m.statistic for m in monomials),
            sum(m.square << i for i, m in enumerate(monomials)),
            sum(m.negative << i for i, m in enumerate(monomials)),
        )


class Reduction(NamedTuple):
    """A reduction that runs with the statistics, where all its values are monomials of them."""

    plan: SumsPlan
    weight: torch.Tensor | None  # per token, no gradient
    denominator: torch.Tensor | float | None  # None: by count


def expect_per_token(owner: str, value, shape: torch.Size):
    """Raise TypeError or ValueError for a function's result that is not a real number for each token."""
    if not isinstance(value, torch.Tensor) or value.is_complex():
        got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(f"{owner} must return a real tensor with a value per token, got {got}")
    if value.shape != shape:
        hint = ", and HeadLoss averages: do not average there" if value.dim() == 0 else ""
        raise ValueError(f"{owner} must return a value per token, {list(shape)}, got {list(value.shape)}{hint}")


def metric_sums(
    values: dict[str, torch.Tensor], valid: torch.Tensor, weight: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Per-token values [..] by name -> scalars by name, fp32.

    "max_" and "min_" names are extrema over valid tokens whose weight is not 0 (-inf and inf without any), all others
    sums of weight * value over these tokens, in float64.
    """
    counted = valid if weight is None else valid & (weight != 0)
    signs = {name: {"max_": 1.0, "min_": -1.0}.get(name[:4]) for name in values}
    out = {}
    # all rows at once, because a small operation costs the same for one row as for twenty
    if summed := [name for name, sign in signs.items() if sign is None]:
        rows = torch.stack([values[name].float() for name in summed])
        rows = torch.where(counted, rows if weight is None else rows * weight, 0.0)
        out.update(zip(summed, rows.reshape(len(rows), -1).sum(1, dtype=torch.float64).float().unbind(0)))
    if peaked := [name for name, sign in signs.items() if sign is not None]:
        rows = torch.stack([signs[name] * values[name].float() for name in peaked])
        rows = torch.where(counted, rows, -torch.inf).reshape(len(rows), -1)
        tops = torch.nn.functional.pad(rows, (0, 1), value=-torch.inf).amax(1)  # of no tokens, too
        out.update((name, signs[name] * top) for name, top in zip(peaked, tops.unbind(0)))
    return {name: out[name] for name in values}
