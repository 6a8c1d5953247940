"""Reductions of sampling over all columns, in plain torch: the definition of what the kernels of `gumbel_triton` do."""

from __future__ import annotations

import torch

from ..philox import exponential

LAST = torch.iinfo(torch.int64).max  # id where there is no column


def best_scores(z, positions, seed: int, start: int, ids=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Race of each token's columns: z [n, w] fp32 -> the largest z - log(variate) [n] float64, and the lowest id [n]
    that has it.

    The score is inf where a logit is NaN or +inf, and -inf where all are -inf.

    Args:
        positions: [n] int64. The variate of a column is that of (seed, position, id), see `philox.exponential`.
        ids: [n, w] int64, or None for the ids from `start` on.
    """
    if ids is None:
        ids = torch.arange(start, start + z.shape[1], device=z.device).expand_as(z)
    row, column = (z != -torch.inf).nonzero(as_tuple=True)
    variate = exponential(seed, positions[row], ids[row, column])
    score = torch.full_like(z, -torch.inf, dtype=torch.float64)
    score[row, column] = (z[row, column].double() - variate.log()).nan_to_num(torch.inf, torch.inf)
    score = torch.nn.functional.pad(score, (0, 1), value=-torch.inf)  # for shards without columns
    best, ids = score.amax(1), torch.nn.functional.pad(ids, (0, 1), value=LAST)
    return best, torch.where(score == best[:, None], ids, LAST).amin(1)


def masses(drop, unit: float) -> torch.Tensor:
    """exp(drop) in units of 1 / unit, int64; rounded up, so that no id above -inf has a mass of 0."""
    return (drop.exp() * unit).ceil().clamp(min=1).long()


def total_mass(z, peak, lowest, unit: float) -> torch.Tensor:
    """Sum [n] int64 of the masses of each token's columns that are above -inf and at least `lowest` [n] float64 above
    the peak [n]; z [n, w] and peak are fp32. Any number where the peak is not finite."""
    drop = z.double() - peak[:, None]
    return torch.where((z > -torch.inf) & (drop >= lowest[:, None]), masses(drop, unit), 0).sum(1)
