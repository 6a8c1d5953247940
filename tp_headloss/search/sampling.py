"""Samples of a sharded vocabulary, and the ids that a sampler keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Annotated, NamedTuple, TypeAlias

import torch

from ..arguments.id_sets import IdSets, ragged
from ..arguments.options import DEFAULTS, Options, Transform
from ..arguments.sampling_rule import SamplingRule
from ..arguments.teachers import TeacherHead
from ..call.agreement import Agreement
from ..call.compile import uncompiled
from ..call.dtensor import local_part
from ..call.given import Given
from ..call.request_of import build_request
from ..call.statistics import vocab_statistics
from ..engine.request import Request
from ..ranks.comm import gather_from_ranks
from ..ranks.shard import VocabShard
from ..spec import IntLine, Logits, Rows, TensorLine, described, lines_within, sizes_of
from ..statistics import MaybeNone, documented_fields, without_arithmetic
from ..statistics.sets import spans_of
from .kept import (
    find_kept,
    ids_and_counts,
    join_tokens,
    tiles,
    tokens_per_block,
    transformed_logits,
)
from .race import LAST, race_of
from .topk import check_operands, local_operands, token_blocks

# an .expand of fewer positions would draw equal noise for several tokens, silently
EACH_DRAW = (
    ": one number for each token that no other draw with this seed has, in a first one "
    "torch.arange(B * S).view(B, S) for tokens [B, S]"
)
SEED = ": one number for all draws, equal on all ranks of the group"
POSITIONS = TensorLine("int64 or int32", hint=EACH_DRAW, per_token=EACH_DRAW)
Positions: TypeAlias = Annotated[torch.Tensor, POSITIONS]
SIZES_FROM_VALUES = "the sets that a rule keeps have sizes that only the logits' values tell"


@without_arithmetic
@documented_fields
class Sample(NamedTuple):
    """A sampled id per token [..] with its log-probs; equal bits on every rank.

    Attributes:
        ids: [..] int64 global ids, -1 where a token has NaN or +inf in its logits, or nothing above
            -inf, where a tensor of the rule keeps nothing (a top_p of 0), or where one of temperatures
            is not positive.
        log_probs: [..] fp32, of the distribution that was sampled: over the ids that the rule kept.
            NaN where -1.
        full_log_probs: [..] fp32, over the whole vocabulary, of the transformed logits; equal to
            log_probs without a rule. NaN where -1.
        sets: `IdSets` that the rule kept, empty where -1; None without a rule.

    It is a tuple, so an index is that of a field: of some tokens cut the fields, ``drawn.ids[:2]``
    and ``drawn.sets[:2]``.

    Examples:
        >>> logits, rule = torch.tensor([[2.0, 1.0, 0.0, -9.0]]), SamplingRule(top_k=2)
        >>> drawn = sample(logits, seed=0, positions=torch.tensor([7]), rule=rule)
        >>> drawn.log_probs, drawn.full_log_probs  # of id 1, among ids 0 and 1, and among all
        (tensor([-1.3133]), tensor([-1.4076]))
    """

    ids: torch.Tensor
    log_probs: torch.Tensor
    full_log_probs: torch.Tensor
    sets: IdSets | MaybeNone


# in the place of one of its fields; a NamedTuple has fields alone
Sample.remedy = (  # type: ignore[attr-defined] # pyright: ignore
    ": pass .ids of it for labels, .sets for sets, .full_log_probs for log-probs, or with "
    "over='sets' its .log_probs"
)


@uncompiled(SIZES_FROM_VALUES)
@torch.no_grad()
@described
def kept_ids(
    logits: Logits | TeacherHead,
    rule: SamplingRule,
    *,
    weight: Rows | None = None,
    shard: VocabShard | None = None,
    transform: Transform | None = None,
    options: Options | None = None,
) -> IdSets:
    """The ids that a sampler with this rule keeps of each token: logits [.., width] sharded on V ->
    sets, replicated.

    The sets are exact, ids ascending in int32, equal on every rank and, from equal logits, at every
    group size and cut. A token with NaN or +inf in its logits, or nothing above -inf, has an empty
    set. Waits for a GPU.

    Blocks of tokens bound the memory. For a block each rank reads its logits twice, and the ranks
    gather their largest ones, 8 bytes each: per token the 768 largest of all ranks, and at least
    256 of a rank (or k, if top_k is a number k for which that is less), with room for half as many
    and 64 more, for those that are equal. With top_p, but for such a k, they gather another number
    per token. That is all for a token whose set is among these logits. Larger sets, as those of
    flat distributions, take all logits of their tokens, gathered 2^22 at a time and sorted.

    A collective call: all ranks of the group make it, and their rule and transform must be equal;
    ``Options(validate="full")`` finds what differs.

    Args:
        logits: fp32, bf16 or fp16 (float64 with the torch backend), any leading shape and strides,
            never written; hidden states [.., H] with a ``weight``; or a `TeacherHead`, which has
            both.
        rule: of numbers or of tensors [..] on the logits' device.
        weight: [width, H] of this rank; logits are made (as by torch.nn.functional.linear) by
            blocks of tokens. Where neither it nor a shard is given, nothing tells hidden states
            from logits of H ids.
        shard: as in `vocab_statistics`.
        transform: as in `vocab_statistics`; it has the temperature, and a weight's bias. A loss over
            the sets takes the same: at another temperature top_p and min_p keep other ids, which
            nothing can tell from the sets.
        options: as in `vocab_statistics`.

    Returns:
        `IdSets` of tokens [..], bounds in flat ids as those of `IdSets.from_csr`, on the logits'
        device.

    Raises:
        TypeError, ValueError: those of `vocab_statistics`, and a rule whose tensors do not fit the
            tokens.

    Examples:
        >>> kept_ids(
        ...     torch.tensor([[2.0, 1.0, 0.0, -9.0]]), SamplingRule(top_p=0.9)
        ... ).ids  # 0.67 + 0.24 reach 0.9
        tensor([0, 1], dtype=torch.int32)
    """
    found, lead = [], torch.Size()
    for block in _blocks(kept_ids, logits, rule, weight, shard, transform, options):
        found.append(_kept(block)[1])
        lead = block.lead
    return _joined_sets(found, lead)


@uncompiled(SIZES_FROM_VALUES)
@torch.no_grad()
@described
def sample(
    logits: Logits | TeacherHead,
    rule: SamplingRule | None = None,
    *,
    seed: Annotated[int, IntLine(0, (1 << 64) - 1, SEED)],
    positions: Positions,
    weight: Rows | None = None,
    shard: VocabShard | None = None,
    transform: Transform | None = None,
    options: Options | None = None,
) -> Sample:
    """Sample an id per token: logits [.., width] sharded on V -> `Sample`, replicated.

    The largest logit plus Gumbel noise among the ids that the rule keeps. The noise of an id is a
    function of (seed, position, id), Philox4x32-10 of Salmon et al. (SC 2011), so that equal logits
    give equal ids at every group size, in every batch and in every order of calls. Log-probs are
    those of `vocab_statistics`, with its collective. Without a rule each rank draws the noise of
    its own columns, and one small exchange finds the winner. With one, exchanges are those of
    `kept_ids`. Memory, odd rows and errors are those of `kept_ids`.

    Seed, positions, rule and transform (its temperature) must be equal on all ranks of the group:
    else ids are of no single distribution, silently. ``Options(validate="full")`` finds it.

    Args:
        positions: of any value, replicated, a number that no other draw with this seed
            has, such as sequence number x longest length + step. Equal positions have equal noise.
        rule: None: the whole vocabulary.
        logits, weight, shard, transform, options: as in `kept_ids`.

    Raises:
        TypeError, ValueError: those of `kept_ids`, and a seed or positions of another type, shape
            or range.

    Examples:
        >>> logits, positions = torch.tensor([[2.0, 1.0, 0.0, -9.0]]).expand(3, 4), torch.arange(3)
        >>> sample(logits, seed=0, positions=positions).ids
        tensor([2, 0, 0])
    """
    ids, log_probs, full, found = [], [], [], []
    lead = torch.Size()
    for block in _blocks(
        sample, logits, rule, weight, shard, transform, options, seed=seed, positions=positions
    ):
        lead = block.lead
        want: tuple[str, ...] = ()
        sets = None
        if rule is None:
            ids.append(_draw(block, seed))
        else:
            drawn, kept = _kept(block, seed)
            ids.append(drawn)
            found.append(kept)
            want, sets = ("set_log_prob",), _joined_sets([kept], drawn.shape)
        # the call was compared and checked as a whole
        inner = replace(options or DEFAULTS, validate="metadata", check=False)
        stats = vocab_statistics(
            block.logits,
            ids[-1],
            shard=block.shard,
            want=want,
            transform=block.transform,
            sets=sets,
            options=inner,
        )
        full.append(stats.log_prob)
        log_probs.append(stats.log_prob if rule is None else stats.set_log_prob)
    sets = None if rule is None else _joined_sets(found, lead)
    drawn, of_rule, of_all = (torch.cat(parts).view(lead) for parts in (ids, log_probs, full))
    return Sample(drawn, of_rule, of_all, sets)


class _Block(NamedTuple):
    """Some tokens of a call."""

    logits: torch.Tensor  # [n, width]
    lead: torch.Size  # shape of all tokens of the call
    transform: Transform
    shard: VocabShard
    positions: torch.Tensor  # int64 [n], empty without a draw
    request: Request
    rule: SamplingRule | None  # of these tokens


def _blocks(function, logits, rule, weight, shard, transform, options, **draw) -> Iterator[_Block]:
    """Check a call, then yield its blocks of tokens, the same ones on every rank. draw: seed and
    positions, if any."""
    options = Given.checked(None, None, None, (), transform, options).options
    tokens = logits.hidden if isinstance(logits, TeacherHead) else logits
    with Agreement(options, shard) as agreement:
        states, weight, transform, shard = local_operands(logits, weight, transform, shard)
        rule = local_part(rule, shard, tokens=tokens)
        draw = {name: local_part(x, shard, tokens=tokens) for name, x in draw.items()}
        sharded = {"logits": states} if weight is None else {"hidden": states, "weight": weight}
        agreement.record(
            function.__name__,
            shard,
            rule=rule,
            transform=transform,
            options=options,
            **draw,
            **sharded,
        )
        lead = states.shape[:-1]
        sizes = sizes_of("logits", states, lead)
        for name, x in {"rule": rule, **draw}.items():
            lines_within(function)[name].check(name, x, sizes)
        if rule is not None:
            rule.expect_tokens(sizes, shard.vocab_size)
            if options.check:
                rule.expect_in_range()
        step = tokens_per_block(shard, states.device)
        parts = token_blocks(states, weight, transform, step)
        first = next(parts)
        _request(*first[1:], shard, options)
    check_operands(states, weight, transform, shard, options)
    for here, x, block_transform in chain([first], parts):
        request = _request(x, block_transform, shard, options)
        positions = draw.get("positions", x.new_empty(0))
        positions = positions.reshape(-1)[here].long()
        own_rule = rule and rule.map_tokens(lambda values: values.reshape(-1)[here])  # noqa: B023 (called at once)
        yield _Block(x, lead, block_transform, shard, positions, request, own_rule)


def _request(logits, transform, shard, options) -> Request:
    return build_request(Given(logits, shard=shard, transform=transform, options=options))


def _kept(
    block: _Block, seed: int | None = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Sampled ids [n], -1 without a seed or a kept id, and what the rule keeps: ids [all] and
    counts [n]."""
    assert block.rule is not None
    race = race_of(block.request.facts.backend).best_scores
    logits = block.logits
    drawn = torch.full((len(logits),), -1, device=logits.device)
    parts = []
    for kept in find_kept(block.request, block.rule):
        parts.append((kept.tokens, *ids_and_counts(kept)))
        if seed is not None:
            best, ids = race(kept.z, block.positions[kept.tokens], seed, 0, kept.ids)
            drawn[kept.tokens] = torch.where(best.isfinite(), ids, -1)
    return drawn, join_tokens(parts)


def _draw(block: _Block, seed: int) -> torch.Tensor:
    """Sampled ids [n]: the id of largest z - log(exponential variate); -1 without any. One small
    all-gather."""
    request, positions, start = block.request, block.positions, block.shard.start
    race = race_of(request.facts.backend).best_scores
    drawn = [
        race(transformed_logits(request, rows), positions[rows], seed, start)
        for rows in tiles(request)
    ]
    best, ids = map(torch.cat, zip(*drawn))  # of this rank
    own = torch.stack([best.view(torch.int64), ids])
    scores, ids = gather_from_ranks(own, block.shard.group).unbind(1)
    scores = scores.view(torch.float64)
    best = scores.amax(0)
    winner = torch.where(scores == best, ids, LAST).amin(0)
    return torch.where(best.isfinite(), winner, -1)


def _joined_sets(found, lead) -> IdSets:
    """The sets of blocks of tokens, each ids [all] and counts [n], as those of tokens [*lead]."""
    ids, counts = zip(*found)
    spans = spans_of(torch.cat(counts))
    return ragged(torch.cat(ids), spans.view(*lead, 2))
