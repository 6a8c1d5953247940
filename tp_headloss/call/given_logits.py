"""`Options(check=True)`: a ValueError on every rank about logits, of the student or of a teacher, that
are probabilities, or normalised over the columns of one rank.

Both give losses that look right. What tells them is a sum over columns, so ranks exchange five
numbers per token.
"""

import math
from typing import NamedTuple

import torch

from ..engine.request import Request
from ..ranks.comm import gather_from_ranks

BLOCK_ELEMENTS = 1 << 22  # that are float64 at a time
SUM_ROUNDING = 1e-2  # of probabilities in any dtype


class _Columns(NamedTuple):
    """Facts about the columns of each rank, [P, n] of n tokens."""

    width: torch.Tensor
    least: torch.Tensor
    largest: torch.Tensor
    total: torch.Tensor
    lse: torch.Tensor


def expect_logits(request: Request, valid: torch.Tensor, have_own: bool):
    """Raise ValueError, equal on all ranks of the group, unless logits can be logits.

    Of the valid tokens [..] those count whose columns differ: logits that are all equal, as those
    of a masked teacher or of a new model are, may be anything.

    Args:
        have_own: the request's own logits are there, as the caller gave them.
    """
    if not valid.numel():
        return
    if have_own:
        _expect_logits("logits", request.tensors.logits, "the logits as they are", request, valid)
    if request.tensors.teacher is not None:
        _expect_logits("teacher.logits", request.tensors.teacher, "Teacher(logits)", request, valid)


def _expect_logits(name: str, logits: torch.Tensor, remedy: str, request: Request, valid):
    own = _described(logits[:, : request.facts.valid_width])
    ranks = gather_from_ranks(own, request.shard.group)[:, :, request.order.flatten(valid)]
    known = _Columns(*ranks.unbind(1))
    differ = known.least.amin(0) < known.largest.amax(0)  # False beside a NaN, too
    known = _Columns(*(x[:, differ] for x in known))
    tokens = int(differ.sum())
    if tokens == 0:
        return
    if _are_of_own_columns(known, torch.finfo(logits.dtype).eps):
        raise ValueError(
            f"{name} must be logits, or log-probs of the whole vocabulary, got some that are "
            f"normalised over a rank's own columns at each of {tokens} valid tokens: pass {remedy}"
        )
    if _are_probabilities(known):
        raise ValueError(
            f"{name} must be logits or log-probs, got probabilities, not negative and with a sum of "
            f"at most 1 at each of {tokens} valid tokens: pass {remedy}, or the probabilities' log()"
        )


def _described(columns: torch.Tensor) -> torch.Tensor:
    """Return the `_Columns` of this rank's columns [N, width]: [5, N] float64."""
    width = columns.shape[1]
    if width == 0:
        nothing = columns.new_tensor([0, math.inf, -math.inf, 0, -math.inf], dtype=torch.float64)
        return nothing[:, None].expand(-1, len(columns))
    found = []
    for part in columns.split(max(1, BLOCK_ELEMENTS // width)):
        x = part.double()
        total = x.sum(1)
        row = torch.full_like(total, width), x.amin(1), x.amax(1), total, x.logsumexp(1)
        found.append(torch.stack(row))
    return torch.cat(found, 1)


def _are_of_own_columns(known: _Columns, eps: float) -> bool:
    """Return True if each of several ranks has a softmax or a log-softmax of its own columns."""
    has_columns = known.width[:, 0] > 0
    if int(has_columns.sum()) < 2:
        return False
    least, total, lse = [x[has_columns] for x in (known.least, known.total, known.lse)]
    are_probabilities = (least >= 0) & ((total - 1).abs() <= SUM_ROUNDING)
    are_log_probs = lse.abs() <= 1e-3 + 8 * eps  # log-probs to -16 are rounded by up to 8 eps
    return bool(are_probabilities.all() or are_log_probs.all())


def _are_probabilities(known: _Columns) -> bool:
    """Return True if the columns of all ranks are not negative and add up to at most 1, which those
    of a softmax with padding do."""
    total = known.total.sum(0)
    return bool(((known.least.amin(0) >= 0) & (total <= 1 + SUM_ROUNDING)).all())
