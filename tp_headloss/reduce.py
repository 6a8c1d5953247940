"""Token mask, token weights and denominator: the one definition of "mean"."""

from __future__ import annotations

from typing import NamedTuple

import torch

REDUCTIONS = ("none", "sum", "mean")


def masked(values: torch.Tensor, valid: torch.Tensor | None, weight: torch.Tensor | None = None) -> torch.Tensor:
    """values [.., tokens] * weight where valid, 0 elsewhere whatever stands there (selected, not multiplied)."""
    values = values if weight is None else values * weight
    return values if valid is None else torch.where(valid, values, 0.0)


def nonzero(denominator: torch.Tensor | float) -> torch.Tensor | float:
    """The denominator, and inf for 0: what it divides is then 0, with zero gradient."""
    if not isinstance(denominator, torch.Tensor):
        return denominator or float("inf")
    return denominator.float().masked_fill(denominator == 0, float("inf"))


class Scaled(NamedTuple):
    """A per-token value that the reduction evaluates itself, instead of kernels of its own: [-] values [squared]."""

    values: torch.Tensor
    square: bool = False
    negative: bool = False

    def evaluate(self) -> torch.Tensor:
        values = self.values if self.values.is_floating_point() else self.values.float()
        values = values**2 if self.square else values
        return -values if self.negative else values


class SumsPlan(NamedTuple):
    """What one reduction kernel computes: sums of values and loss = sum of coefficient_i sum_i / divisor.

    The divisor is the caller's denominator, or the count of valid tokens (the sum of their weights); `nonzero` of it.
    """

    coefficients: tuple[float, ...]  # of the terms, the first values; the other values are metrics
    squares: int  # bit i: value i is squared
    negatives: int  # bit i: sum i is negated


def plan_of(values: list[Scaled], coefficients) -> SumsPlan:
    squares = sum(value.square << i for i, value in enumerate(values))
    return SumsPlan(tuple(coefficients), squares, sum(value.negative << i for i, value in enumerate(values)))
