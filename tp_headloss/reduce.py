"""Token mask, token weights and denominator: the one definition of "mean"."""

from __future__ import annotations

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
