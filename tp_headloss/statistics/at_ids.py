"""Log-probs of given ids, K for each token: for scoring, for teachers on disk, for speculative decoding.

| statistic    | packet rows, one for each id  | value               | d/dz_j, g upstream           |
|--------------|-------------------------------|---------------------|------------------------------|
| log_probs_at | z in its chunk, 0 in others   | log p_k = z_k - lse | sum_k g_k ([j = id_k] - p_j) |

They are the last rows of a packet and have no names: as many as there are ids. A number and zeros have the same sum in
any order. A negative id is none: 0, and no gradient. An id at or beyond the vocabulary makes its value NaN, and the
gradient of its token, if there is an upstream one.
"""

import torch

from .family import Family, Tile, Wanted

NONE, UNKNOWN = -1, torch.iinfo(torch.int32).max  # ids as backends take them


class AtIdsFamily(Family):
    statistics = gradients = lean_gradients = ("log_probs_at",)
    values = ()
    id_list = "ids"

    def per_id(self, call: Wanted) -> tuple[str, ...]:
        return self.statistics

    def direct(self, dz, tile: Tile, merged: dict, grads: dict):
        if "log_probs_at" not in grads:
            return dz
        at = dz.new_zeros(dz.shape[0], dz.shape[1] + 1)
        return dz + at.scatter_add(1, tile.ids, grads["log_probs_at"].to(dz.dtype))[:, :-1]


def known_ids(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Convert ids [N, K] to int32: `NONE` for negative ones, `UNKNOWN` for those at or beyond the
    vocabulary."""
    return torch.where(ids >= vocab_size, UNKNOWN, ids.clamp(min=NONE)).int()


def logits_at(tile: Tile) -> torch.Tensor:
    """Return the logits [n, K] of the ids that are in this tile, 0 at all others."""
    here = tile.ids < tile.z.shape[1]
    return torch.where(here, tile.z.gather(1, tile.ids.clamp(max=tile.z.shape[1] - 1)), 0.0)


def log_probs_at(
    logits: torch.Tensor, ids: torch.Tensor, shift: torch.Tensor, whole: torch.Tensor
) -> torch.Tensor:
    """Logits [K, N] of the ids in float64, merged shift and sum [N] -> log-probs [N, K]."""
    log_probs = (logits - shift.double() - whole.double().log()).clamp(max=0).t()
    log_probs = torch.where(ids == UNKNOWN, torch.nan, log_probs)
    return torch.where((ids == NONE) | (whole == 0)[:, None], 0.0, log_probs).to(shift.dtype)


def gradients_of_log_probs_at(
    upstream: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert upstream gradients [N, K] to those of the logits at the ids [N, K] and of lse [N]."""
    at = torch.where(ids == UNKNOWN, torch.where(upstream == 0, upstream, torch.nan), upstream)
    at = torch.where(ids == NONE, 0.0, at)
    return at, -at.sum(1)
