"""Sets of ids per token, `IdSets` or a `SamplingRule` that makes them: their checks, and what the kernels take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from .engine.operators import known_sets
from .options import Options, TopKTeacher
from .request import Facts, Request, TokenOrder
from .sampling_rule import SamplingRule, kept_sets
from .statistics import AT_IDS, OVER_SETS
from .statistics.at_ids import known_ids
from .statistics.sets import rows_and_places
from .validation import expect_ids, expect_tensor


@dataclass(frozen=True)
class IdSets:
    """A set of ids per token, such as those that a sampler kept, over which the student is renormalised.

    A negative id is none, and an id that is there several times counts once. Sets of different sizes take less memory
    by `from_csr`. A set that is empty, that holds an id at or beyond the vocabulary or lacks its token's label makes
    the statistics over sets of that token NaN (``Options.check`` raises instead). Ascending ids are quick; any others
    are compared with all before them in their set. For the statistic "log_probs_at" they are ids whose log-probs are
    asked for, each.

    Args:
        ids: [.., K] int64 or int32, global, replicated, in any order.
        mask: [.., K] bool, False for entries that are none; None: all count.
        spans: [.., 2] bounds of each token's set in flat ids; `from_csr` makes them.

    Examples:
        >>> kept = IdSets(torch.tensor([[0, 2, -1]]))  # a sampler kept the ids 0 and 2
        >>> want = "set_log_prob", "set_log_mass"
        >>> stats = vocab_statistics(torch.zeros(1, 4), torch.tensor([2]), want=want, sets=kept)
        >>> stats.set_log_prob, stats.set_log_mass  # log 1/2, log 2/4
        (tensor([-0.6931]), tensor([-0.6931]))
    """

    ids: torch.Tensor
    mask: torch.Tensor | None = None
    spans: torch.Tensor | None = None  # [.., 2] bounds of each token's set in flat ids, see `from_csr`

    @classmethod
    def from_csr(cls, ids: torch.Tensor, offsets: torch.Tensor) -> IdSets:
        """Return sets of any sizes, as vLLM exports them: token i has ids[offsets[i] : offsets[i + 1]].

        Args:
            ids: [all] int64 or int32, the sets one after the other, in the order of flattened labels.
            offsets: [N + 1] int64 or int32. Where they descend or leave [0, all] the set is empty.

        Raises:
            TypeError, ValueError: of another dtype or shape.
        """
        for name, x in (("ids", ids), ("offsets", offsets)):
            expect_ids(f"sets: {name}", x)
            if x.dim() != 1:
                raise ValueError(f"sets: {name} must have one dimension, got {list(x.shape)}")
        if not len(offsets):
            raise ValueError("sets: offsets must be [N + 1] for N tokens, got none")
        offsets = offsets.long()
        begin, end = offsets[:-1], offsets[1:]
        # sets that overlap could not be worked on at the same time
        sound = (begin >= offsets.cummax(0).values[:-1]) & (begin >= 0) & (end >= begin) & (end <= len(ids))
        return cls(ids, None, torch.where(sound[:, None], torch.stack([begin, end], 1), 0))

    def map_tokens(self, lead: Sequence[int], function: Callable[[torch.Tensor], torch.Tensor]) -> IdSets:
        """The sets with function(x) in place of each tensor [*lead, *] of tokens."""
        if self.spans is not None:
            return replace(self, spans=function(self.spans.reshape(*lead, 2)))
        return replace(self, ids=function(self.ids), mask=None if self.mask is None else function(self.mask))


def validate_sets(sets: IdSets | SamplingRule | None, labels, want, teacher, logits, vocab_size: int):
    """Raise TypeError or ValueError, from metadata, unless the sets fit the call. logits: [.., width]."""
    wanted = [name for name in (*OVER_SETS, *AT_IDS) if name in want]
    if sets is not None and not isinstance(sets, (IdSets, SamplingRule)):
        got = type(sets).__name__ if isinstance(sets, torch.Tensor) else repr(sets)
        raise TypeError(f"sets must be IdSets(..), a SamplingRule(..) or None, got {got}")
    if sets is None:
        if wanted:
            raise ValueError(f"{wanted} need sets of ids, got none: sets=IdSets(ids)")
        return
    if not wanted:
        raise ValueError(f"sets serve the statistics {OVER_SETS + AT_IDS}, got none of them in want")
    if len(wanted) > 1 and AT_IDS[0] in wanted:
        raise ValueError(f"log_probs_at and statistics over sets are for separate calls, got {wanted} in want")
    if AT_IDS[0] in wanted and (isinstance(sets, SamplingRule) or sets.spans is not None):
        got = "a SamplingRule" if isinstance(sets, SamplingRule) else "sets from_csr"
        raise ValueError(f"log_probs_at is [.., K] of ids [.., K], got {got}")
    if isinstance(teacher, TopKTeacher):
        raise ValueError("sets and a TopKTeacher are for separate calls, got both in one")
    if "set_log_prob" in want and labels is None:
        raise ValueError("set_log_prob is the log-prob of a label, got no labels")
    lead, device = logits.shape[:-1], logits.device
    if isinstance(sets, SamplingRule):
        return sets.expect_tokens(lead, device, vocab_size)
    expect_ids("sets.ids", sets.ids)
    if sets.spans is not None:
        if sets.spans.numel() != 2 * math.prod(lead):
            raise ValueError(f"sets must be of {math.prod(lead)} tokens, got offsets for {sets.spans.numel() // 2}")
        expect_tensor("sets.ids", sets.ids, device=device)
        expect_tensor("the sets' offsets", sets.spans, device=device)
        return
    if sets.ids.dim() != len(lead) + 1:
        raise ValueError(f"sets.ids must be [.., K] for tokens {list(lead)}, got {list(sets.ids.shape)}")
    shape = (*lead, sets.ids.shape[-1])
    expect_tensor("sets.ids", sets.ids, shape, device)
    if sets.mask is not None:
        expect_tensor("sets.mask", sets.mask, shape, device)
        if sets.mask.dtype != torch.bool:
            raise TypeError(f"sets.mask must be bool, got {sets.mask.dtype}")


def _masked(sets: IdSets) -> torch.Tensor:
    """The ids [.., K], negative where there is none."""
    return sets.ids if sets.mask is None else torch.where(sets.mask, sets.ids, -1)


def _flat(sets: IdSets, flatten) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of all sets [all], and the bounds [N, 2] of each token's; flatten: [.., *] -> [N, *]."""
    if sets.spans is not None:
        return sets.ids.contiguous(), flatten(sets.spans).contiguous()
    ids = flatten(_masked(sets))
    begin = torch.arange(ids.shape[0], device=ids.device) * ids.shape[1]
    return ids.reshape(-1), torch.stack([begin, begin + ids.shape[1]], 1)


def set_tensors(sets: IdSets | SamplingRule | None, lead, order: TokenOrder, facts: Facts) -> dict[str, torch.Tensor]:
    """The tensors of sets as a request has them; none of a rule, see `with_kept_sets`. lead: shape of the tokens."""
    if not isinstance(sets, IdSets):
        return {}
    if AT_IDS[0] in facts.want:
        return {"entries": known_ids(order.flatten(_masked(sets)), facts.vocab_size).contiguous()}
    ids, spans = _flat(sets, lambda x: order.flatten(x.reshape(*lead, x.shape[-1])))
    return dict(zip(("entries", "entry_spans"), known_sets(ids, spans, facts.vocab_size, facts.backend)))


@torch.compiler.disable(reason="a SamplingRule in place of sets makes tensors of a size that only their values tell")
def with_kept_sets(request: Request, rule: SamplingRule, labels, options: Options) -> Request:
    """The request with the sets that a rule keeps of its logits. Collectives, and a wait for the GPU."""
    order = request.order
    ids, spans = kept_sets(request, rule.map_tokens(order.shape, order.flatten))
    if options.check:
        sets = IdSets(ids, None, order.unflatten(spans))
        check_sets(sets, labels, request.facts.want, request.facts.ignore_index, request.facts.vocab_size)
    return request._replace(tensors=request.tensors._replace(entries=ids, entry_spans=spans))


def check_sets(sets: IdSets, labels, want, ignore_index: int, vocab_size: int):
    """Raise ValueError with the first token, if any, whose set holds an unknown id or lacks a label that it needs."""
    ids, spans = _flat(sets, lambda x: x.reshape(-1, x.shape[-1]))
    row, place = rows_and_places(spans)
    labels, unknown = labels.reshape(-1), torch.zeros(len(spans), dtype=torch.bool, device=ids.device)
    known = torch.full_like(unknown, AT_IDS[0] in want)  # these need no label
    known[row[ids[place] == labels[row]]] = True
    unknown[row[ids[place] >= vocab_size]] = True
    bad = ((labels != ignore_index) & (unknown | ~known)).nonzero()
    if len(bad):
        token = int(bad[0])
        begin, end = spans[token].tolist()
        needed = f"ids below {vocab_size}"
        if AT_IDS[0] not in want:
            needed += f" and its label {int(labels[token])}"
        raise ValueError(
            f"the set of token {token} (flat index) must hold {needed}, got {ids[begin:end].tolist()[:20]}; "
            f"{len(bad)} such tokens"
        )
