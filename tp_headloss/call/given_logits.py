"""`Options(check=True)`: a ValueError on every rank about logits, of the student or of a teacher, that
are probabilities, or normalised over the columns of one rank.

Both give losses that look right. What tells them is a sum over columns, so ranks exchange seven
numbers per token. A softmax of a rank's own columns may have had its padding in the sum or not, so
the sums of a rank are there with padding and without.
"""

import math
from typing import NamedTuple

import torch

from ..engine.request import Request
from ..ranks.comm import gather_from_ranks

BLOCK_ELEMENTS = 1 << 22  # that are float64 at a time
SUM_ROUNDING = 1e-2  # of probabilities in any dtype


class _Columns(NamedTuple):
    """Facts about the columns of each rank, [P, n] of n tokens. The last two are with padding."""

    width: torch.Tensor
    least: torch.Tensor
    largest: torch.Tensor
    total: torch.Tensor
    lse: torch.Tensor
    padded_total: torch.Tensor
    padded_lse: torch.Tensor


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
    own = _described(logits, request.facts.valid_width)
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


def _described(logits: torch.Tensor, width: int) -> torch.Tensor:
    """Return the `_Columns` of this rank's logits [N, width and padding]: [7, N] float64."""
    if width == 0:
        inf = math.inf
        nothing = logits.new_tensor([0, inf, -inf, 0, -inf, 0, -inf], dtype=torch.float64)
        return nothing[:, None].expand(-1, len(logits))
    found = []
    for part in logits.split(max(1, BLOCK_ELEMENTS // logits.shape[1])):
        x, padding = part.double().tensor_split([width], 1)
        total, lse = x.sum(1), x.logsumexp(1)
        padded_total = total + padding.sum(1)
        padded_lse = torch.logaddexp(lse, padding.logsumexp(1))
        columns = torch.full_like(total, width)
        row = columns, x.amin(1), x.amax(1), total, lse, padded_total, padded_lse
        found.append(torch.stack(row))
    return torch.cat(found, 1)


def _are_of_own_columns(known: _Columns, eps: float) -> bool:
    """Return True if each of several ranks has a softmax or a log-softmax of its own columns, with
    or without those of padding."""
    has_columns = known.width[:, 0] > 0
    if int(has_columns.sum()) < 2:
        return False
    own = _Columns(*(x[has_columns] for x in known))
    # log-probs to -16 are rounded by up to 8 eps
    is_zero = 1e-3 + 8 * eps
    are_log_probs = (own.lse.abs() <= is_zero) | (own.padded_lse.abs() <= is_zero)
    is_one = (own.total - 1).abs() <= SUM_ROUNDING
    is_one |= (own.padded_total - 1).abs() <= SUM_ROUNDING
    are_probabilities = (own.least >= 0) & is_one
    # else log-probs of the vocabulary, beside padding that holds 0
    is_own = own.lse.logsumexp(0).abs() > is_zero
    return bool(are_probabilities.all() or (are_log_probs.all() and is_own.any()))


def _are_probabilities(known: _Columns) -> bool:
    """Return True if the columns of all ranks are not negative and add up to at most 1, which those
    of a softmax with padding do."""
    total = known.total.sum(0)
    return bool(((known.least.amin(0) >= 0) & (total <= 1 + SUM_ROUNDING)).all())
