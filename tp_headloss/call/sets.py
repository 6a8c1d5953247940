"""A call's sets and given ids: their checks, and what kernels take. Also the check of a top-K teacher's values."""

from __future__ import annotations

import torch

from ..arguments.id_sets import IdSets, flat_ids, ragged
from ..arguments.sampling_rule import SamplingRule
from ..arguments.teachers import TopKTeacher
from ..engine.operators import known_sets
from ..engine.request import Facts, TokenOrder
from ..statistics import AT_IDS, OVER_SETS
from ..statistics.at_ids import known_ids
from ..statistics.sets import rows_and_places
from ..validation import expect_ids, expect_tensor


def validate_sets(sets: IdSets | None, labels, want, logits):
    """Raise TypeError or ValueError, from metadata, unless the sets fit the call. logits: [.., width]."""
    wanted = [name for name in OVER_SETS if name in want]
    if sets is not None and not isinstance(sets, IdSets):
        hint = ": pass kept_ids(logits, rule, ..)" if isinstance(sets, SamplingRule) else ""
        raise TypeError(f"sets must be IdSets(..) or None, got {type(sets).__name__}{hint}")
    if sets is None:
        if wanted:
            raise ValueError(f"{wanted} need sets of ids, got none: sets=IdSets(ids)")
        return
    if not wanted:
        raise ValueError(f"sets serve the statistics {OVER_SETS}, got none of them in want")
    if "set_log_prob" in want and labels is None:
        raise ValueError("set_log_prob is the log-prob of a label, got no labels")
    lead, device = logits.shape[:-1], logits.device
    expect_ids("sets.ids", sets.ids)
    if sets.spans is not None:
        sets.expect_tokens(lead)
        expect_tensor("sets.ids", sets.ids, device=device)
        expect_tensor("the sets' offsets", sets.spans, device=device)
        return
    if sets.ids.dim() != len(lead) + 1:
        raise ValueError(f"sets.ids must be [.., K] for tokens {list(lead)}, got {list(sets.ids.shape)}")
    shape = (*lead, sets.ids.shape[-1])
    expect_tensor("sets.ids", sets.ids, shape, device)
    if sets.mask is not None:
        expect_tensor("sets.mask", sets.mask, shape, device)


def validate_ids(ids, want, logits):
    """Raise TypeError or ValueError, from metadata, unless the given ids fit the call. logits: [.., width]."""
    if ids is None:
        if AT_IDS[0] in want:
            raise ValueError(f"{[*AT_IDS]} need ids [.., K], got none: ids=ids")
        return
    if AT_IDS[0] not in want:
        raise ValueError(f"ids serve the statistics {AT_IDS}, got none of them in want")
    expect_ids("ids", ids)
    lead = logits.shape[:-1]
    if ids.dim() != len(lead) + 1:
        raise ValueError(f"ids must be [.., K] for tokens {list(lead)}, got {list(ids.shape)}")
    expect_tensor("ids", ids, (*lead, ids.shape[-1]), logits.device)


def id_tensors(ids: torch.Tensor | None, order: TokenOrder, vocab_size: int) -> dict[str, torch.Tensor]:
    """Given ids [.., K] as a request has them."""
    return {} if ids is None else {"ids": known_ids(order.flatten(ids), vocab_size).contiguous()}


def set_tensors(sets: IdSets | None, lead, order: TokenOrder, facts: Facts) -> dict[str, torch.Tensor]:
    """The tensors of sets as a request has them. lead: shape of the tokens."""
    if sets is None:
        return {}
    ids, spans = flat_ids(sets, lambda x: order.flatten(x.reshape(*lead, x.shape[-1])))
    most = None if sets.spans is not None else sets.ids.shape[-1]
    return dict(zip(("sets", "set_spans"), known_sets(ids, spans, facts.vocab_size, most, facts.backend)))


def check_sets(sets: IdSets, labels, ignore_index: int, vocab_size: int):
    """Raise ValueError with the first token, if any, whose set holds an unknown id or lacks its label."""
    ids, spans = flat_ids(sets, lambda x: x.reshape(labels.numel(), x.shape[-1]))
    row, place = rows_and_places(spans)
    labels, unknown = labels.reshape(-1), torch.zeros(len(spans), dtype=torch.bool, device=ids.device)
    unknown[row[ids[place] >= vocab_size]] = True
    unknown |= ~ragged(ids, spans).contains(labels)
    bad = ((labels != ignore_index) & unknown).nonzero()
    if len(bad):
        token = int(bad[0])
        begin, end = spans[token].tolist()
        raise ValueError(
            f"the set of token {token} (flat index) must hold ids below {vocab_size} and its label "
            f"{int(labels[token])}, got {ids[begin:end].tolist()[:20]}; {len(bad)} such tokens"
        )


LARGEST_MASS = 1.01  # of a top-K teacher's entries: its log-probs may have been rounded before they came here


def check_entries(teacher: TopKTeacher, labels, ignore_index: int, vocab_size: int):
    """Raise ValueError with the first token, if any, of whose entries one is at or beyond the vocabulary, or whose
    probabilities, with the tail's, add up to more than 1, as those of logits in place of log-probs mostly do.

    Rounding a log-prob l to a dtype changes its probability by a factor of up to 1 + eps * |l| / 2.
    """
    count = teacher.ids.shape[-1]
    ids, given = teacher.ids.reshape(-1, count), teacher.log_probs.detach().reshape(-1, count)
    known = (ids >= 0) & (given != -torch.inf)
    if teacher.mask is not None:
        known &= teacher.mask.reshape(-1, count)
    valid = labels.reshape(-1) != ignore_index
    bad = (valid & (known & (ids >= vocab_size)).any(1)).nonzero()
    if len(bad):
        token = int(bad[0])
        raise ValueError(
            f"teacher.ids of token {token} (flat index) must be below {vocab_size}, got {ids[token].tolist()[:20]}; "
            f"{len(bad)} such tokens"
        )
    log_probs = given.double().masked_fill(~known, -torch.inf)
    probs = log_probs.exp()
    rounding = torch.finfo(given.dtype).eps * (probs * log_probs.masked_fill(~known, 0.0).abs()).sum(1)
    mass = probs.sum(1)
    if teacher.tail_log_prob is not None:
        mass = mass + teacher.tail_log_prob.detach().reshape(-1).double().exp()
    bad = (valid & ~(mass <= LARGEST_MASS + rounding.clamp(max=0.1))).nonzero()  # NaN is bad, too
    if len(bad):
        token = int(bad[0])
        raise ValueError(
            f"teacher.log_probs of token {token} (flat index) must be log-probs, of probabilities that add up to at "
            f"most 1, got {float(mass[token]):.6g} from {given[token].tolist()[:20]}; {len(bad)} such tokens; are "
            "these logits?"
        )


def check_ids(ids: torch.Tensor, labels, ignore_index: int, vocab_size: int):
    """Raise ValueError with the first token, if any, of whose given ids [.., K] one is at or beyond the vocabulary."""
    ids = ids.reshape(labels.numel(), ids.shape[-1])
    bad = ((labels.reshape(-1) != ignore_index) & (ids >= vocab_size).any(1)).nonzero()
    if len(bad):
        token = int(bad[0])
        raise ValueError(
            f"ids of token {token} (flat index) must be below {vocab_size}, got {ids[token].tolist()[:20]}; "
            f"{len(bad)} such tokens"
        )
