"""The ids that a `SamplingRule` keeps of each token, found exactly without gathering the vocabulary.

Every rule keeps a prefix of a token's ids in the order (descending logit, ascending id). Each rank sends its largest
logits, the candidates, and a floor: above the floors of all ranks the candidates are all that there is. The prefix of
nearly every token ends there, and each rank finds the end by itself. Masses are integers, so their sums are exact in
any order, and the sets are the same for every group size.

The logits are read twice for this. First come the maxima of groups of columns: the n-th largest of them is a bound that
at least n logits reach, and few more do, because neighbours are in different groups. Then come these logits and the
mass of all. Other tokens, those of a flat distribution, are sorted on each rank, and the end is found by radix
selection: in the bits of logit and id, `DIGIT` at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ..arguments.sampling_rule import SamplingRule
from ..engine import eager
from ..engine.request import Request, Tensors
from ..ranks.comm import gather_from_ranks, sum_in_place
from ..ranks.shard import VocabShard
from .keys import LOW, decode_keys, ordered_bits
from .race import masses, race_of

# Logits of a rank, if all had as many, in a block. On a CPU a block's temporaries are a dozen times as large. On a GPU
# a call is a hundred small kernels per block and a few per tile, and those of a tile are a few times as large.
BLOCK_ELEMENTS, GPU_BLOCK_ELEMENTS, TILE_ELEMENTS = 1 << 21, 1 << 27, 1 << 25
MOST_TOKENS = 2048  # of a block, for the candidates
# Each rank sends at least so many of a token's logits: its part of CANDIDATES, but not fewer than FEWEST.
CANDIDATES, FEWEST = 768, 256
SPARE = 64
GROUPS = 4096  # at least, of a rank's columns, so that few tokens occupy a whole GPU; and four for each candidate
DIGIT = 10  # bits of logit and id per exchange
# the largest keys of logits of -inf and of inf
BITS = ordered_bits(torch.tensor([-torch.inf, torch.inf], dtype=torch.float32, device="cpu")).tolist()
NOTHING, EVERYTHING = [(bits << 32) | LOW for bits in BITS]


class Kept(NamedTuple):
    """The ids that a rule keeps of n tokens.

    Attributes:
        z: [n, M] fp32, candidates' logits, -inf where not kept; equal on every rank, as are their ids.
        ids: [n, M] int64.
        others: tokens [m] that keep more than candidates, with bool [m, w], this rank's columns that they keep.
    """

    z: torch.Tensor
    ids: torch.Tensor
    others: list[tuple[torch.Tensor, torch.Tensor]]


def _elements_per_token(shard: VocabShard) -> int:
    return max(64, -(-shard.vocab_size // shard.world_size))


def tokens_per_block(shard: VocabShard, device: torch.device) -> int:
    """Tokens of a block, the same on all ranks, however uneven their shards are."""
    elements = BLOCK_ELEMENTS if device.type == "cpu" else GPU_BLOCK_ELEMENTS
    return max(1, min(MOST_TOKENS, elements // _elements_per_token(shard)))


def tiles(request: Request) -> list[slice]:
    """Rows of a request, `TILE_ELEMENTS` logits at a time; an empty tile of none."""
    n_rows, width = request.tensors.logits.shape
    step = max(1, TILE_ELEMENTS // max(1, width))
    return [slice(first, first + step) for first in range(0, max(1, n_rows), step)]


def transformed_logits(request: Request, rows: slice | torch.Tensor) -> torch.Tensor:
    """Logits [n, valid width] of some rows after the transform: the given ones, or in fp32."""
    given, facts = request.tensors, request.facts
    if (
        given.bias is None
        and given.temperatures is None
        and not facts.softcap
        and facts.scale == facts.temperature == 1
    ):
        return given.logits[rows, : facts.valid_width]
    tensors = Tensors(given.logits, bias=given.bias, temperatures=given.temperatures)
    return eager.tile_of(tensors, rows, slice(0, facts.valid_width), facts).z.float()


def find_kept(request: Request, rule: SamplingRule) -> Kept:
    """The ids that the rule, whose tensors are [n], keeps of each row of a request; none of a row with NaN or +inf, or
    nothing above -inf. Waits for a GPU.

    One all-gather, with top_p, unless top_k is a number below the vocabulary's size, another one; then those of
    `_kept_columns` for tokens that keep more than the candidates.
    """
    shard = request.shard
    keys, floor, peak, total = _candidates(request, rule)
    z, ids = decode_keys(keys)
    whole = (floor == NOTHING) | ~peak.isfinite()  # whether what the rule keeps so far is among the candidates
    kept, drop, lowest = (keys > floor) & peak.isfinite(), z.double() - peak, _lowest(rule, peak)
    if lowest is not None:
        kept &= drop >= lowest
        whole |= ~(decode_keys(floor)[0].double() - peak >= lowest)
    size, place = kept.sum(1, keepdim=True), torch.arange(keys.shape[1], device=z.device)
    if rule.top_k is not None:
        k = _column(rule.top_k, z, torch.int64)
        whole = whole | (size >= k)
        size = size.minimum(k)
    if rule.top_p is not None:
        mass = torch.where(place < size, masses(drop, _unit(shard)), 0)
        reached, p = mass.cumsum(1), _column(rule.top_p, z, torch.float64)
        total = reached[:, -1:] if total is None else torch.where(whole, reached[:, -1:], total)
        target = _share(p, total)
        is_everything = True if rule.top_k is None else k >= shard.vocab_size  # what top-p chooses from
        whole = whole | ((reached[:, -1:] >= target) & ~(p >= 1) & is_everything)
        size = size.minimum((reached - mass < target).sum(1, keepdim=True))
    others = []
    for tokens in (~whole[:, 0]).nonzero()[:, 0].split(max(1, TILE_ELEMENTS // 2 // _elements_per_token(shard))):
        if len(tokens):
            own = rule.map_tokens(lambda x: x[tokens])  # noqa: B023 (called at once)
            others.append((tokens, _kept_columns(transformed_logits(request, tokens), peak[tokens], own, shard)))
    return Kept(torch.where(whole & (place < size), z, -torch.inf), ids, others)


def _candidates(request: Request, rule: SamplingRule):
    """Keys [n, M] of the largest logits of all ranks, descending, and, for each token [n, 1]:

    a key, so that all logits above -inf with a larger one are among them; the peak, fp32, inf where a logit is NaN; and
    for top-p the mass of all ids that min-p keeps, or None. One all-gather, and before it for such a mass another one.
    """
    shard, backend, parts = request.shard, race_of(request.facts.backend), tiles(request)
    count = min(shard.vocab_size, max(FEWEST, CANDIDATES // shard.world_size))
    is_short = isinstance(rule.top_k, int) and rule.top_k < shard.vocab_size
    if isinstance(rule.top_k, int):
        count = min(count, rule.top_k)
    most = count + count // 2 + SPARE  # for logits that equal the least one, or share a group with a larger one
    peak, bound = _peak_and_bound(request, count, most)
    with_mass = rule.top_p is not None and not is_short
    if with_mass:
        peak = gather_from_ranks(peak, shard.group).amax(0)
    lowest = _lowest(rule, peak)
    lowest = peak.new_full((1, 1), -torch.inf, dtype=torch.float64) if lowest is None else lowest
    lowest = lowest[:, 0].expand_as(peak).contiguous()
    found = []
    for at in parts:
        masses_of = (peak[at], lowest[at], _unit(shard)) if with_mass else ()
        found.append(backend.largest_logits(transformed_logits(request, at), bound[at], most, shard.start, *masses_of))
    keys, size = (torch.cat(part) for part in list(zip(*found))[:2])
    mass = torch.cat([mass for *_, mass in found]) if with_mass else torch.zeros_like(size)
    # below all keys of the bound; above all keys where any were left out
    floor = ((ordered_bits(bound) << 32) - 1).clamp(min=NOTHING).masked_fill(size > most, EVERYTHING)
    own = torch.cat([torch.stack([floor, peak.view(torch.int32).long(), mass], 1), keys], 1)
    received = gather_from_ranks(own, shard.group)
    floor, peaks, mass = received[:, :, :3].unbind(2)
    keys = received[:, :, 3:].transpose(0, 1).flatten(1).sort(1, descending=True).values
    peak = peaks.int().view(torch.float32).amax(0)
    return keys, floor.amax(0)[:, None], peak[:, None], mass.sum(0)[:, None] if with_mass else None


def _peak_and_bound(request: Request, count: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit [n] of this rank, and a bound [n] that at least `count` reach: -inf for at most `most`."""
    width, backend = request.facts.valid_width, race_of(request.facts.backend)
    groups = min(max(GROUPS, 4 * count), max(1, width))
    maxima = torch.cat([backend.group_maxima(transformed_logits(request, at), groups) for at in tiles(request)])
    if width <= most:
        return maxima.amax(1), maxima.new_full(maxima.shape[:1], -torch.inf)
    largest = maxima.topk(count, sorted=False).values
    return largest.amax(1), largest.amin(1)


def _kept_columns(z, peak, rule: SamplingRule, shard: VocabShard) -> torch.Tensor:
    """bool [m, w]: this rank's columns that the rule keeps of tokens with a finite peak [m, 1].

    5 all-reduces of 8 KiB per token for top-k, and as many for top-p (4 for at most 2^8 ids, 6 beyond 2^18).
    """
    values, columns = (z.float() + 0.0).sort(dim=1, descending=True, stable=True)
    drop, lowest = values.double() - peak, _lowest(rule, peak)
    kept = values > -torch.inf
    if lowest is not None:
        kept &= drop >= lowest
    size = kept.sum(1, keepdim=True)
    if rule.top_k is not None:
        k = _column(rule.top_k, z, torch.int64)
        counts = torch.arange(z.shape[1] + 1, device=z.device).expand(len(z), -1)
        size = _prefix(values, columns, counts, size, k.minimum, shard)
    if rule.top_p is not None:
        p = _column(rule.top_p, z, torch.float64)
        sums = pad(masses(drop, _unit(shard)).cumsum(1), (1, 0))
        size = _prefix(values, columns, sums, size, lambda total: _share(p, total), shard)
    return torch.zeros_like(kept).scatter_(1, columns, torch.arange(z.shape[1], device=z.device) < size)


def _prefix(values, columns, sums, size, target_of, shard: VocabShard) -> torch.Tensor:
    """How many [m, 1] of this rank's first `size` ids come before the sum over all ranks reaches target_of(the sum of
    all of these [m, 1]); the id that reaches it is counted.

    values, columns: [m, w] by descending logit, then by id; sums: [m, w + 1], of the weights before each, and of all.
    """
    if shard.world_size == 1:
        return (sums[:, :-1] < target_of(sums.gather(1, size))).sum(1, keepdim=True).minimum(size)
    id_bits = (shard.vocab_size - 1).bit_length()
    keys = (((1 << 31) - 1 - ordered_bits(values)) << id_bits) + columns + shard.start  # ascending, and at least 0
    border, target = size.new_zeros(len(keys), 1), None
    steps = torch.arange(1, (1 << DIGIT) + 1, device=keys.device)
    for shift in reversed(range(0, 32 + id_bits, DIGIT)):
        places = torch.searchsorted(keys, border + (steps << shift) - 1, right=True).minimum(size)
        reached = sum_in_place(sums.gather(1, places), shard.world_size, shard.group_name)
        target = target_of(reached[:, -1:]) if target is None else target
        border = border + ((reached < target).sum(1, keepdim=True) << shift)
    return torch.searchsorted(keys, border, right=True).minimum(size)


def _column(value, z, dtype):
    """A value, or one per token [n], as [1, 1] or [n, 1]."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype).reshape(-1, 1)
    return torch.full((1, 1), value, dtype=dtype, device=z.device)


def _lowest(rule: SamplingRule, z):
    """The least z - peak that min-p keeps, float64 [1, 1] or [n, 1], or None."""
    return None if rule.min_p is None else _column(rule.min_p, z, torch.float64).log()


def _unit(shard: VocabShard) -> float:
    """The mass of the likeliest id; the sum over the vocabulary stays below 2^62."""
    return 2.0 ** (62 - shard.vocab_size.bit_length())


def _share(p, total):
    """The mass at which top-p ends, of a total mass."""
    return torch.where(p >= 1, total, (p.nan_to_num(0.0) * total.double()).ceil().long())


def sets_of(kept: Kept, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [all] int32 of one token after the other, ascending, and their counts [n]; equal on every rank. Two
    all-gathers for each part of `others`. Waits for a GPU."""
    inside = kept.z > -torch.inf
    row, place = inside.nonzero(as_tuple=True)
    ids = (((row << 32) + kept.ids[row, place]).sort().values & LOW).int()
    counts = inside.sum(1)
    if not kept.others:
        return ids, counts
    parts = [(torch.arange(len(counts), device=ids.device), ids, counts)]
    for tokens, columns in kept.others:
        parts += [(tokens, *part) for part in _ids_of_ranks(columns, shard)]
    sizes = torch.zeros_like(counts)
    for tokens, _, counts in parts:
        sizes[tokens] += counts
    begin, out = sizes.cumsum(0) - sizes, ids.new_empty(sum(len(ids) for _, ids, _ in parts))
    for tokens, ids, counts in parts:
        moved = (begin[tokens] + counts - counts.cumsum(0)).repeat_interleave(counts, output_size=len(ids))
        out[moved + torch.arange(len(ids), device=ids.device)] = ids
        begin[tokens] += counts
    return out, sizes


def _ids_of_ranks(kept: torch.Tensor, shard: VocabShard) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Kept columns [m, w] of each rank -> of one rank after the other, flat ids int32 and their counts [m]. Two
    all-gathers."""
    own = torch.arange(shard.start, shard.start + kept.shape[1], device=kept.device, dtype=torch.int32)
    own, counts = own.expand_as(kept)[kept], gather_from_ranks(kept.sum(1), shard.group)
    sizes = counts.sum(1).tolist()
    received = gather_from_ranks(pad(own, (0, max(sizes) - len(own))), shard.group)
    return [(ids[:size], count) for ids, size, count in zip(received, sizes, counts)]


def spans_of(counts: torch.Tensor) -> torch.Tensor:
    """Bounds [N, 2] of sets of these sizes [N], one after the other."""
    end = counts.cumsum(0)
    return torch.stack([end - counts, end], 1)
