"""A top-K teacher's entries as the kernels take them: distinct ids, ascending, and their log-probs."""

from __future__ import annotations

import torch


def _finite(x):
    return torch.where(x == -torch.inf, 0.0, x)


def distinct_entries(ids, log_probs, mask, scale, renormalize, vocab_size):
    """A top-K teacher's ids and log-probs [N, K] -> its distinct entries: ids [N, K] int32 ascending, those that are
    none at the end as the largest int32, and log tau [N, K] of its temperature 1 / scale (a number or [N]).

    Duplicates of an id add up. A row with an id beyond the vocabulary, or NaN, has NaN for its first entry.
    """
    none = torch.iinfo(torch.int32).max
    live = (ids >= 0) & (log_probs != -torch.inf)
    live = live if mask is None else live & mask
    log_probs = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
    bad = (live & ((ids >= vocab_size) | log_probs.isnan() | (log_probs == torch.inf))).any(-1)
    ids, order = torch.where(live, ids.long(), none).sort(dim=-1, stable=True)
    log_probs = torch.where(live, log_probs, -torch.inf).gather(1, order)
    new = torch.ones_like(ids, dtype=torch.bool)
    new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    place = new.cumsum(1) - 1
    # relative to the largest of the same id, so that one that occurs once stays what it is
    top = torch.full_like(log_probs, -torch.inf).scatter_reduce(1, place, log_probs, "amax")
    weight = (log_probs - _finite(top.gather(1, place))).exp()
    log_tau = top + torch.zeros_like(log_probs).scatter_add(1, place, weight).clamp(min=1).log()
    ids = torch.full_like(ids, none).scatter(1, place, ids)
    log_tau = log_tau * (scale if not isinstance(scale, torch.Tensor) else scale[:, None].to(log_tau.dtype))
    if renormalize:
        log_tau = log_tau - _finite(log_tau.logsumexp(-1))[:, None]
    first = torch.zeros_like(new)
    first[:, :1] = bad[:, None]
    ids = torch.where(bad[:, None], none, ids).masked_fill(first, 0)
    return ids.int(), torch.where(bad[:, None], -torch.inf, log_tau).masked_fill(first, torch.nan)
