"""Reductions of sampling over all columns, in plain torch: the definition of what the kernels of
`race_triton` do."""

import importlib

import torch

from .keys import NO_KEY, keys_of
from .philox import exponential

LAST = torch.iinfo(torch.int64).max  # id where there is no column


def race_of(backend: str):
    """Return the module of these functions for a backend: this one, or that of the kernels."""
    return importlib.import_module(f"{__name__}_triton" if backend == "triton" else __name__)


def with_column(x: torch.Tensor, value) -> torch.Tensor:
    """x [n, w] with a last column of the value. (torch's pad takes it through a float, which not
    all int64 fit.)"""
    column = x.new_full((len(x), 1), value)
    return torch.cat([x, column], 1)


def best_scores(z, positions, seed: int, start: int, ids=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Race of a token's columns: z [n, w] -> the largest z - log(variate) [n] float64, and the
    lowest id [n] of it.

    The score is inf where a logit is NaN or +inf, and -inf where all are -inf.

    Args:
        positions: [n] int64. The variate of a column is that of (seed, position, id), see
            `philox.exponential`.
        ids: [n, w] int64, or None for the ids from `start` on.
    """
    if ids is None:
        own = torch.arange(start, start + z.shape[1], device=z.device)
        ids = own.expand_as(z)
    z = z.float()
    row, column = (z != -torch.inf).nonzero(as_tuple=True)
    position = positions[row]
    variate = exponential(seed, position, ids[row, column])
    score = torch.full_like(z, -torch.inf, dtype=torch.float64)
    found = z[row, column].double() - variate.log()
    score[row, column] = found.nan_to_num(torch.inf, torch.inf)
    # for shards without columns
    score = with_column(score, -torch.inf)
    ids = with_column(ids, LAST)
    best = score.amax(1)
    winners = torch.where(score == best[:, None], ids, LAST)
    return best, winners.amin(1)


def masses(drop, unit: float) -> torch.Tensor:
    """exp(drop) in units of 1 / unit, int64; rounded up, so that no id above -inf has a mass of
    0."""
    return (drop.exp() * unit).ceil().clamp(min=1).long()


def group_maxima(z, groups: int) -> torch.Tensor:
    """The largest logit [n, groups] fp32 of every groups-th column of z [n, w] from each of the
    first ones on.

    inf where one is NaN, -inf for groups without columns.
    """
    z = torch.where(z.isnan(), torch.inf, z.float())
    width = z.shape[1]
    rows = max(1, -(-width // groups))
    missing = rows * groups - width
    z = torch.nn.functional.pad(z, (0, missing), value=-torch.inf)
    return z.view(len(z), rows, groups).amax(1)


def largest_logits(z, bound, most: int, start: int, peak=None, lowest=None, unit: float = 0.0):
    """Keys [n, most] of logits z [n, w] at least `bound` [n] fp32, above -inf, in any order, then
    `NO_KEY`; NaN is inf.

    Also their number [n], which may be larger than `most`: then any are left out. And with a peak
    [n] fp32 the sum [n] int64 of the masses of columns above -inf and at least `lowest` [n] float64
    above a finite peak; else None.

    Args:
        start: id of the first column.
    """
    z = torch.where(z.isnan(), torch.inf, z.float())
    width = z.shape[1]
    is_there = z > -torch.inf
    found = (z >= bound[:, None]) & is_there
    ids = torch.arange(start, start + width, device=z.device)
    keys = torch.where(found, keys_of(z, ids), NO_KEY)
    missing = max(0, most - width)
    keys = torch.nn.functional.pad(keys, (0, missing), value=NO_KEY)
    keys = keys.topk(most).values
    if peak is None:
        return keys, found.sum(1), None
    assert lowest is not None
    drop = z.double() - peak[:, None]
    counted = is_there & (drop >= lowest[:, None])
    mass = torch.where(counted, masses(drop, unit), 0)
    return keys, found.sum(1), mass.sum(1)
