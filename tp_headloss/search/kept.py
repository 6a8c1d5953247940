"""The ids that a `SamplingRule` keeps of each token, found exactly.

Every rule keeps a prefix of a token's ids in the order (descending logit, ascending id). Each rank
sends its largest logits, the candidates, and a floor: above the floors of all ranks the candidates
are all that there is. The prefix of nearly every token ends there, and each rank finds the end by
itself. Masses are integers, whose sums are exact.

The logits are read twice for this. First come the maxima of groups of columns: the n-th largest of
them is a bound that at least n logits reach, and few more do, because neighbours are in different
groups. Then come these logits and the mass of all. The logits of other tokens, those of a flat
distribution, are gathered, some tokens at a time, and sorted.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ..arguments.sampling_rule import SamplingRule
from ..engine import eager
from ..engine.request import Request, Tensors
from ..ranks.comm import gather_from_ranks
from ..ranks.shard import VocabShard
from .keys import LOW, decode_keys, ordered_bits
from .race import masses, race_of

# Logits of a rank, if all had as many, in a block, whose temporaries are a dozen times as large.
BLOCK_ELEMENTS = 1 << 21
# On a GPU a call is a hundred small kernels per block and a few per tile, and temporaries of a tile
# are a few times as large.
GPU_BLOCK_ELEMENTS = 1 << 27
TILE_ELEMENTS = 1 << 25
MOST_TOKENS = 2048  # of a block, for the candidates
# Logits of the whole vocabulary that are gathered at a time, 16 MiB in fp32; temporaries are a
# dozen times as large.
FLAT_ELEMENTS = 1 << 22
# Each rank sends at least so many of a token's logits: its part of CANDIDATES, but not fewer than
# FEWEST.
CANDIDATES, FEWEST = 768, 256
SPARE = 64
# at least, of a rank's columns, so that few tokens occupy a whole GPU; and four for each candidate
GROUPS = 4096
# the largest keys of logits of -inf and of inf
BITS = ordered_bits(
    torch.tensor([-torch.inf, torch.inf], dtype=torch.float32, device="cpu")
).tolist()
NOTHING, EVERYTHING = [(bits << 32) | LOW for bits in BITS]


class Kept(NamedTuple):
    """The ids that a rule keeps of n tokens, equal on every rank.

    Attributes:
        tokens: [n] int64, their places.
        z: [n, M] fp32, their largest logits, or all of them; -inf where not kept.
        ids: [n, M] int64.
    """

    tokens: torch.Tensor
    z: torch.Tensor
    ids: torch.Tensor


class Known(NamedTuple):
    """Facts of n tokens besides their largest logits, [n, 1] or [1, 1].

    Attributes:
        floor: a key: all logits above -inf with a larger one are among the largest ones.
        peak: the largest logit of all ranks, fp32; inf where one is NaN.
        total: for top-p the mass of all ids that min-p keeps; None: the largest ones are all.
    """

    floor: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor | None


def tokens_per_block(shard: VocabShard, device: torch.device) -> int:
    """Tokens of a block, the same on all ranks, however uneven their shards are."""
    elements = BLOCK_ELEMENTS if device.type == "cpu" else GPU_BLOCK_ELEMENTS
    width = max(64, -(-shard.vocab_size // shard.world_size))
    return max(1, min(MOST_TOKENS, elements // width))


def tiles(request: Request) -> list[slice]:
    """Rows of a request, `TILE_ELEMENTS` logits at a time; an empty tile of none."""
    n_rows, width = request.tensors.logits.shape
    step = max(1, TILE_ELEMENTS // max(1, width))
    begins = range(0, max(1, n_rows), step)
    return [slice(first, first + step) for first in begins]


def transformed_logits(request: Request, rows: slice | torch.Tensor) -> torch.Tensor:
    """Logits [n, valid width] of some rows after the transform: the given ones, or in fp32."""
    given, facts = request.tensors, request.facts
    is_scaled = facts.softcap or not facts.scale == facts.temperature == 1
    if given.bias is None and given.temperatures is None and not is_scaled:
        return given.logits[rows, : facts.valid_width]
    tensors = Tensors(given.logits, bias=given.bias, temperatures=given.temperatures)
    return eager.tile_of(tensors, rows, slice(0, facts.valid_width), facts).z.float()


def find_kept(request: Request, rule: SamplingRule) -> Iterator[Kept]:
    """Yield what the rule (tensors [n]) keeps of each row; nothing of one with NaN, inf or -inf
    alone. Waits for a GPU.

    First comes a `Kept` of all rows, from one all-gather of the largest logits; with top_p, unless
    top_k is a number below the vocabulary's size, from another one. It keeps nothing of the rows
    whose ids are not all among these. Those follow, `FLAT_ELEMENTS` logits at a time, with an
    all-gather each, and one of a few bytes before the first.
    """
    shard = request.shard
    keys, known = _candidates(request, rule)
    z, ids = decode_keys(keys)
    kept, whole = _kept_places(z, keys > known.floor, known, rule, shard)
    every = torch.arange(len(z), device=z.device)
    yield Kept(every, z.where(kept & whole, -torch.inf), ids)
    flat = (~whole[:, 0]).nonzero()[:, 0]
    if not len(flat):
        return
    own = torch.tensor([shard.start, request.facts.valid_width], device=z.device)
    bounds = gather_from_ranks(own, shard.group).tolist()
    no_floor = known.floor.new_full((1, 1), NOTHING)
    at_once = max(1, FLAT_ELEMENTS // shard.vocab_size)
    for tokens in flat.split(at_once):
        gathered = _gathered_logits(request, tokens, bounds)
        z, ids = gathered.sort(dim=1, descending=True, stable=True)
        own_rule = rule.map_tokens(lambda x: x[tokens])  # noqa: B023 (called at once)
        of_all = Known(no_floor, known.peak[tokens], None)
        kept, _ = _kept_places(z, z > -torch.inf, of_all, own_rule, shard)
        yield Kept(tokens, z.where(kept, -torch.inf), ids)


def _kept_places(z, is_known, known: Known, rule: SamplingRule, shard: VocabShard):
    """bool [n, M], which of the logits z [n, M], descending, the rule keeps, if it keeps nothing
    but those that `is_known` marks; and bool [n, 1], whether it does."""
    has_peak = known.peak.isfinite()
    whole = (known.floor == NOTHING) | ~has_peak
    kept = is_known & has_peak
    drop = z.double() - known.peak
    lowest = _lowest(rule, known.peak)
    if lowest is not None:
        kept &= drop >= lowest
        drop_of_floor = decode_keys(known.floor)[0].double() - known.peak
        whole = whole | ~(drop_of_floor >= lowest)
    size = kept.sum(1, keepdim=True)
    place = torch.arange(z.shape[1], device=z.device)
    if rule.top_k is not None:
        k = _column(rule.top_k, z, torch.int64)
        whole = whole | (size >= k)
        size = size.minimum(k)
    if rule.top_p is not None:
        mass = torch.where(place < size, masses(drop, _unit(shard)), 0)
        reached = mass.cumsum(1)
        of_known = reached[:, -1:]
        total = of_known
        if known.total is not None:
            total = torch.where(whole, of_known, known.total)
        p = _column(rule.top_p, z, torch.float64)
        target = _target_mass(p, total)
        # what top-p chooses from
        is_everything = True if rule.top_k is None else k >= shard.vocab_size
        is_reached = (of_known >= target) & ~(p >= 1)
        whole = whole | (is_reached & is_everything)
        chosen = (reached - mass < target).sum(1, keepdim=True)
        size = size.minimum(chosen)
    return place < size, whole


def _target_mass(p, total):
    """The mass at which top-p ends, int64, of all that it chooses from."""
    part = p.nan_to_num(0.0) * total.double()
    target = part.ceil().long()
    return torch.where(p >= 1, total, target)


def _gathered_logits(request: Request, rows: torch.Tensor, bounds: list[list[int]]) -> torch.Tensor:
    """Logits [n, V] fp32 of some rows, of which each rank has those of its start and width; one
    all-gather."""
    own = transformed_logits(request, rows)
    widest = max(width for _, width in bounds)
    own = pad(own, (0, widest - own.shape[1]))
    gathered = gather_from_ranks(own, request.shard.group)
    parts = zip(bounds, gathered)
    in_order = sorted(parts, key=lambda part: part[0])
    columns = [part[:, :width] for (_, width), part in in_order]
    return torch.cat(columns, 1).float() + 0.0  # -0.0 is 0.0


def _candidates(request: Request, rule: SamplingRule) -> tuple[torch.Tensor, Known]:
    """Keys [n, M] of the largest logits of all ranks, descending, and what is known of the others.

    One all-gather; and if top-p needs the mass of all ids, another one before it.
    """
    shard = request.shard
    is_short = isinstance(rule.top_k, int) and rule.top_k < shard.vocab_size
    needs_mass = rule.top_p is not None and not is_short
    count = _count(rule, shard)
    # for logits that equal the least one, or share a group with a larger one
    most = count + count // 2 + SPARE
    peak, bound = _peak_and_bound(request, count, most)
    if needs_mass:
        peak = gather_from_ranks(peak, shard.group).amax(0)
    keys, size, mass = _largest(request, rule, bound, most, peak if needs_mass else None)
    # below all keys of the bound; above all keys where any were left out
    floor = ((ordered_bits(bound) << 32) - 1).clamp(min=NOTHING)
    floor = floor.masked_fill(size > most, EVERYTHING)

    peak_bits = peak.view(torch.int32).long()
    of_token = torch.stack([floor, peak_bits, mass], 1)
    sent = torch.cat([of_token, keys], 1)
    received = gather_from_ranks(sent, shard.group)
    floors, peaks, masses_of_ranks = received[:, :, :3].unbind(2)
    keys = received[:, :, 3:].transpose(0, 1).flatten(1)
    keys = keys.sort(1, descending=True).values
    peak = peaks.int().view(torch.float32).amax(0)
    total = masses_of_ranks.sum(0)[:, None] if needs_mass else None
    return keys, Known(floors.amax(0)[:, None], peak[:, None], total)


def _count(rule: SamplingRule, shard: VocabShard) -> int:
    """How many of a token's logits each rank sends, at least."""
    wanted = max(FEWEST, CANDIDATES // shard.world_size)
    if isinstance(rule.top_k, int):
        wanted = min(wanted, rule.top_k)
    return min(shard.vocab_size, wanted)


def _largest(request: Request, rule: SamplingRule, bound, most: int, peak):
    """Keys [n, most] of this rank's logits from `bound` on, their number [n], and the mass [n] of
    all that min-p keeps below a peak; 0 without a peak."""
    backend, shard = race_of(request.facts.backend), request.shard
    found = []
    if peak is not None:
        lowest = _lowest(rule, peak)
        if lowest is None:
            lowest = peak.new_full((1, 1), -torch.inf, dtype=torch.float64)
        lowest = lowest[:, 0].expand_as(peak).contiguous()
    for at in tiles(request):
        z = transformed_logits(request, at)
        masses_of = () if peak is None else (peak[at], lowest[at], _unit(shard))
        found.append(backend.largest_logits(z, bound[at], most, shard.start, *masses_of))
    keys, sizes, sums = zip(*found)
    size = torch.cat(sizes)
    mass = torch.zeros_like(size) if peak is None else torch.cat(sums)
    return torch.cat(keys), size, mass


def _peak_and_bound(request: Request, count: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit [n] of this rank, and a bound [n] that at least `count` reach: -inf for at
    most `most`."""
    width = request.facts.valid_width
    backend = race_of(request.facts.backend)
    wanted = max(GROUPS, 4 * count)
    groups = min(wanted, max(1, width))
    # one tile at a time
    of_tiles = (transformed_logits(request, at) for at in tiles(request))
    maxima = torch.cat([backend.group_maxima(z, groups) for z in of_tiles])
    if width <= most:
        no_bound = maxima.new_full(maxima.shape[:1], -torch.inf)
        return maxima.amax(1), no_bound
    largest = maxima.topk(count, sorted=False).values
    return largest.amax(1), largest.amin(1)


def _column(value, z, dtype):
    """A value, or one per token [n], as [1, 1] or [n, 1]."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype).reshape(-1, 1)
    return torch.full((1, 1), value, dtype=dtype, device=z.device)


def _lowest(rule: SamplingRule, z):
    """The least z - peak that min-p keeps, float64 [1, 1] or [n, 1], or None."""
    if rule.min_p is None:
        return None
    least = _column(rule.min_p, z, torch.float64)
    return least.log()


def _unit(shard: VocabShard) -> float:
    """The mass of the likeliest id; the sum over the vocabulary stays below 2^62."""
    bits = shard.vocab_size.bit_length()
    return 2.0 ** (62 - bits)


def ids_and_counts(kept: Kept) -> tuple[torch.Tensor, torch.Tensor]:
    """Kept ids [all] int32 of one token after the other, ascending, and their counts [n]. Waits for
    a GPU."""
    inside = kept.z > -torch.inf
    row, place = inside.nonzero(as_tuple=True)
    ids = kept.ids[row, place]
    keys = (row << 32) + ids
    in_order = keys.sort().values
    return (in_order & LOW).int(), inside.sum(1)


def join_tokens(parts) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [all] of one token after the other and their counts [n], from (tokens [m], ids, counts
    [m]) of some tokens each; the first part has all tokens, and a token has ids in one part."""
    if len(parts) == 1:
        return parts[0][1:]
    sizes = torch.zeros_like(parts[0][0])
    for tokens, _, counts in parts:
        sizes[tokens] += counts
    begin = sizes.cumsum(0) - sizes
    n_ids = sum(len(ids) for _, ids, _ in parts)
    out = parts[0][1].new_empty(n_ids)
    for tokens, ids, counts in parts:
        before = counts.cumsum(0) - counts  # in this part
        moved = begin[tokens] - before
        moved = moved.repeat_interleave(counts, output_size=len(ids))
        place = torch.arange(len(ids), device=ids.device)
        out[moved + place] = ids
    return out, sizes
