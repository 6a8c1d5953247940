"""`SamplingRule` and the ids that it keeps, found exactly without gathering or sorting the vocabulary.

Every rule keeps a prefix of a token's ids in the order (descending logit, ascending id). A 64-bit key per id sorts like
that order, and no two ids have the same key, so a prefix is "all keys from a border on". The border is found by radix
selection: a pass per 6 bits of the key sums a weight per id (1 for top-k, its mass for top-p) into 64 bins, adds up
the bins of all ranks, and goes on in the bin in which the sum reaches its target. Masses are integers, so these sums
are exact in any order, and the border is the same on every rank and for every group size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from .comm import gather_from_ranks, sum_lanes
from .engine import eager
from .request import Request, Tensors
from .shard import VocabShard
from .validation import expect_ids, expect_int, expect_real, expect_tensor

BLOCK_ELEMENTS = 1 << 21  # logits of a rank, if all had as many: a block's temporaries are a dozen times as large
DIGIT = 6  # bits of a key per pass
MOST_IDS = 1 << 24  # so that a key and a border beyond all keys fit int64


@dataclass(frozen=True)
class SamplingRule:
    """Which ids of a token a sampler keeps, in vLLM's order: min-p, then top-k of these, then top-p of those.

    Each is a number, or a tensor [..] of one per token, or None for no such rule. Without any, all ids above -inf stay.

    Args:
        min_p: keep ids of probability at least min_p times the largest one, in [0, 1].
        top_k: keep the k likeliest of what remains, at least 1; of equal logits the lowest ids, so k of them exactly.
        top_p: keep the likeliest of what remains, renormalised over it, until their probability reaches top_p, in
            (0, 1]; the likeliest always.

    Values in tensors are not looked at: a top_k below 1, a top_p that is NaN or not positive, and a min_p that is NaN,
    negative or above 1 keep nothing.

    Raises:
        TypeError, ValueError: numbers of another type or out of range.

    Examples:
        >>> SamplingRule(top_k=50, top_p=0.9)
        SamplingRule(top_k=50, top_p=0.9, min_p=None)
    """

    top_k: int | torch.Tensor | None = None
    top_p: float | torch.Tensor | None = None
    min_p: float | torch.Tensor | None = None

    def __post_init__(self):
        if self.top_k is not None and not isinstance(self.top_k, torch.Tensor):
            object.__setattr__(self, "top_k", k := expect_int("top_k", self.top_k))
            if k < 1:
                raise ValueError(f"top_k must be at least 1, got {k}")
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if value is None or isinstance(value, torch.Tensor):
                continue
            expect_real(name, value, "a number or a tensor")
            if not 0 <= value <= 1 or (name == "top_p" and value == 0):
                raise ValueError(f"{name} must be in {'(' if name == 'top_p' else '['}0, 1], got {value}")

    def expect_tokens(self, lead: Sequence[int], device: torch.device, vocab_size: int):
        """Raise TypeError or ValueError unless the tensors have a value for each token [*lead]."""
        if vocab_size > MOST_IDS:
            raise ValueError(f"a SamplingRule needs a vocabulary of at most 2^24 ids, got {vocab_size}")
        for name in ("top_k", "top_p", "min_p"):
            if isinstance(value := getattr(self, name), torch.Tensor):
                expect_tensor(name, value, lead, device)
                if name == "top_k":
                    expect_ids(name, value)
                elif not value.is_floating_point():
                    raise TypeError(f"{name} must be floating point, got {value.dtype}")

    def map_tokens(self, lead: Sequence[int], function: Callable[[torch.Tensor], torch.Tensor]) -> SamplingRule:
        """The rule with function(x) in place of each tensor [*lead] of values per token."""
        given = {name: getattr(self, name) for name in ("top_k", "top_p", "min_p")}
        return replace(self, **{k: function(x) for k, x in given.items() if isinstance(x, torch.Tensor)})


def tokens_per_block(shard: VocabShard) -> int:
    """Tokens of a block, the same on all ranks, however uneven their shards are."""
    return max(1, BLOCK_ELEMENTS // max(1 << DIGIT, -(-shard.vocab_size // shard.world_size)))


def transformed_logits(request: Request, rows: slice) -> torch.Tensor:
    """Logits [n, valid width] of some rows after the transform, in fp32."""
    given, facts = request.tensors, request.facts
    tensors = Tensors(given.logits, bias=given.bias, temperatures=given.temperatures)
    return eager.tile_of(tensors, rows, slice(0, facts.valid_width), facts).z.float()


def ordered_bits(z: torch.Tensor) -> torch.Tensor:
    """int64 in the order of the fp32 numbers z, in [-2^31, 2^31); -0.0 is 0.0."""
    bits = (z + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def kept_columns(z: torch.Tensor, rule: SamplingRule, shard: VocabShard) -> torch.Tensor:
    """bool [n, w]: this rank's columns that the rule keeps; none of a token with NaN or +inf, or nothing above -inf.

    z: [n, w] fp32, transformed logits of the ids from ``shard.start`` on.
    """
    peak = gather_from_ranks(row_maximum(z), shard.group).amax(0)[:, None]  # NaN if a rank's is
    kept, drop = (z > -torch.inf) & peak.isfinite(), z.double() - peak
    if rule.min_p is not None:
        kept &= drop >= _column(rule.min_p, z, torch.float64).log()
    if rule.top_k is None and rule.top_p is None:
        return kept
    ids = torch.arange(shard.start, shard.start + z.shape[1], device=z.device)
    id_bits = (shard.vocab_size - 1).bit_length()
    keys = ((ordered_bits(z) + (1 << 31)) << id_bits) + (shard.vocab_size - 1 - ids)
    bits = 32 + id_bits
    if rule.top_k is not None:
        k = _column(rule.top_k, z, torch.int64)
        kept &= keys >= _border(keys, kept.long(), lambda total: torch.minimum(k, total), bits, shard)
    if rule.top_p is not None:
        p = _column(rule.top_p, z, torch.float64).nan_to_num(0.0)

        def share(total):
            return torch.where(p >= 1, total, (p * total.double()).ceil().long())

        # rounded up, so that no id above -inf has a mass of 0; the sum over the vocabulary stays below 2^62
        unit = 2.0 ** (62 - shard.vocab_size.bit_length())
        mass = torch.where(kept, (drop.exp() * unit).ceil().clamp(min=1), 0.0).long()
        kept &= keys >= _border(keys, mass, share, bits, shard)
    return kept


def row_maximum(x: torch.Tensor) -> torch.Tensor:
    """Maximum [n] of each row, -inf without columns."""
    return x.amax(1) if x.shape[1] else x.new_full(x.shape[:1], -torch.inf)


def _column(value, z, dtype):
    """A value, or one per token [n], as [1, 1] or [n, 1]."""
    return torch.as_tensor(value, dtype=dtype, device=z.device).reshape(-1, 1)


def _border(keys, weight, target_of, bits: int, shard: VocabShard) -> torch.Tensor:
    """Key [n, 1] at which the weights of all ranks, added up by descending key, reach target_of(their sum [n, 1])."""
    border = target = None
    for shift in reversed(range(0, bits, DIGIT)):
        digit = (keys >> shift) & ((1 << DIGIT) - 1)
        bins = keys.new_zeros(keys.shape[0], 1 << DIGIT).scatter_add_(1, digit, weight)
        bins = sum_lanes(bins, shard.world_size, shard.group_name)
        from_top = torch.nn.functional.pad(bins.flip(1).cumsum(1), (1, 0))
        target = target_of(from_top[:, -1:]) if target is None else target
        skipped = (from_top[:, 1:] < target).sum(1, keepdim=True)  # bins above the one in which the target is reached
        target = target - from_top.gather(1, skipped)
        chosen = (1 << DIGIT) - 1 - skipped
        weight = torch.where(digit == chosen, weight, 0)
        border = chosen if border is None else (border << DIGIT) | chosen
    assert border is not None
    return border


def gathered_ids(kept: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Kept columns [n, w] of each rank -> ids [all] int32 of one token after the other, ascending, and their counts
    [n]; equal on every rank. Two all-gathers. Waits for a GPU."""
    row, column = kept.nonzero(as_tuple=True)
    entries = (row << 32) + (column + shard.start)
    if shard.world_size > 1:
        sizes = gather_from_ranks(torch.tensor(len(entries), device=kept.device), shard.group).tolist()
        sent = torch.nn.functional.pad(entries, (0, max(sizes) - len(entries)))
        received = gather_from_ranks(sent, shard.group)
        entries = torch.cat([part[:size] for part, size in zip(received, sizes)]).sort().values
    return (entries & 0xFFFFFFFF).int(), torch.bincount(entries >> 32, minlength=kept.shape[0])


def spans_of(counts: torch.Tensor) -> torch.Tensor:
    """Bounds [N, 2] of sets of these sizes [N], one after the other."""
    end = counts.cumsum(0)
    return torch.stack([end - counts, end], 1)


@torch.no_grad()
def kept_sets(request: Request, rule: SamplingRule) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids [all] int32 that a rule keeps of each row of a request, and their bounds [N, 2]; equal on every rank.

    The tensors of the rule have a value per row [N].
    """
    n_rows, step = request.tensors.logits.shape[0], tokens_per_block(request.shard)
    ids, counts = [], []
    for first in range(0, max(1, n_rows), step):
        rows = slice(first, first + step)
        here = rule.map_tokens((n_rows,), lambda x: x[rows])  # noqa: B023 (called at once)
        found = gathered_ids(kept_columns(transformed_logits(request, rows), here, request.shard), request.shard)
        ids.append(found[0])
        counts.append(found[1])
    return torch.cat(ids), spans_of(torch.cat(counts))
