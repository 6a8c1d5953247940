"""Which tokens form a sequence: sums and means over each, spread back to its tokens, and per-token weights.

Everything is deterministic (one fixed order, float64 accumulators), runs without host synchronisation and can be
captured in a CUDA graph. Words: B sequences, [..] the tokens' shape, N_i the valid tokens of sequence i.
"""

from __future__ import annotations

import torch

from .comm import group_size, sum_over_ranks
from .validation import expect_ids, expect_int, expect_number, expect_tensor

SEQUENCE_REDUCTIONS = ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


class Sequences:
    """The sequences of a batch of tokens, padded `[B, S]` (`from_mask`) or packed (`from_cu_seqlens`, `from_ids`).

    Only tokens of ``mask`` count, so it should be ``labels != ignore_index`` or less: N_i and B's count are its own. A
    sequence without any is not counted as one. With a ``group`` each rank of it holds
    a part of every sequence (context parallelism): sequence i is the same on all of them, though its tokens differ, and
    every sum over sequences takes one more small collective, as does the construction (not if ``lengths`` is given).
    The group must not be the one that shares the vocabulary, whose ranks hold the same tokens.

    lengths: [B] fp32, N_i over the whole group. count: scalar, the number of sequences with tokens. token_share: [..]
    fp32, 1 / N_i of each token's sequence, 0 outside of the mask, which sums to count over the group.

    Bounds that are out of order or out of the tokens, and lengths that are negative or not finite, are a ValueError on
    CPUs. On GPUs nobody waits for their values: nothing outside of the tokens is read, and every result is NaN. `check`
    (or ``Options(check=True)``) waits, and raises there, too.
    """

    def __init__(self, mask, ids, order, offsets, *, bounds=None, lengths=None, horizon=None, group=None):
        """For the constructors below. ids: [..] sequence of each token, or None for rows; order: [T] permutation that
        brings the tokens of a sequence together, or None; offsets: [B + 1] into the ordered tokens, None for rows;
        bounds: the offsets as they were given, or None."""
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
            raise TypeError(f"mask must be bool, got {getattr(mask, 'dtype', type(mask).__name__)}")
        if horizon is not None:
            expect_number("horizon", horizon)
        self.mask, self.horizon, self.group = mask, horizon, group
        self._order, self._offsets, self._bounds = order, offsets, bounds
        self._bad = None if bounds is None else (bounds != offsets).any()  # [] bool, or None: nothing can be wrong
        if ids is None:
            self._ids, self._known = None, mask
        else:
            known = (ids >= 0) & (ids < len(offsets) - 1)
            self._ids, self._known = torch.where(known, ids, 0), mask & known
        if lengths is not None:
            expect_tensor("lengths", lengths, [len(self)], mask.device)
            lengths = lengths.detach().float()
            wrong = ~((lengths >= 0) & (lengths < float("inf"))).all()
            self._bad = wrong if self._bad is None else self._bad | wrong
        else:
            lengths = self.sum(torch.ones_like(mask, dtype=torch.float32))
            if group is not None:  # bounds that are wrong on one rank made them NaN on all
                self._bad = lengths.isnan().any()
        if mask.device.type == "cpu" and not torch.compiler.is_compiling():
            self.check()
        self.lengths = self._poisoned(lengths.float())
        self.count = self._poisoned((self.lengths > 0).sum(dtype=torch.float32))
        self.ranks = group_size(group)
        self.token_share = self._local_spread(1 / self.lengths.clamp(min=1))

    def __len__(self) -> int:
        """B, sequences without tokens included."""
        return self.mask.shape[0] if self._offsets is None else len(self._offsets) - 1

    def __getstate__(self):
        if self.group is not None:
            raise TypeError("Sequences hold a process group, which cannot be pickled: make them anew in each process")
        return self.__dict__

    @classmethod
    def from_mask(cls, mask: torch.Tensor, **options) -> Sequences:
        """mask [B, S] bool (``labels != -100``, say): a sequence per row. Options for all three constructors:

        lengths: [B], N_i over the whole group, if it is known. horizon: the constant length of the reduction
        "seq-mean-token-sum-norm". group: context-parallel process group.
        """
        expect_tensor("mask", mask)
        if mask.dim() != 2:
            raise ValueError(f"mask must be [B, S], a sequence per row, got {list(mask.shape)}")
        return cls(mask, None, None, None, **options)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: torch.Tensor, mask: torch.Tensor, **options) -> Sequences:
        """Packed tokens: sequence i is tokens [cu_seqlens[i], cu_seqlens[i + 1]) of the flattened mask [..].

        cu_seqlens: [B + 1] int32 or int64, ascending in [0, tokens], as variable-length attention takes it; tokens
        before its first and beyond its last entry belong to no sequence.
        """
        expect_tensor("mask", mask)
        expect_ids("cu_seqlens", cu_seqlens)
        expect_tensor("cu_seqlens", cu_seqlens, device=mask.device)
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1:
            raise ValueError(f"cu_seqlens must be [B + 1], got {list(cu_seqlens.shape)}")
        bounds, tokens = cu_seqlens.long(), mask.numel()
        offsets = bounds.clamp(0, tokens).cummax(0).values  # whatever was given, nothing else is read
        ids = torch.searchsorted(offsets, torch.arange(tokens, device=mask.device), right=True) - 1
        return cls(mask, ids.view(mask.shape), None, offsets, bounds=bounds, **options)

    @classmethod
    def from_ids(cls, ids: torch.Tensor, count: int, mask: torch.Tensor, **options) -> Sequences:
        """Tokens in any order: ids [..] int32 or int64 in [0, count) names each one's sequence; other ids belong to
        none."""
        expect_tensor("mask", mask)
        expect_ids("ids", ids)
        expect_tensor("ids", ids, mask.shape, mask.device)
        count = expect_int("count", count)
        if count < 0:
            raise ValueError(f"count must be at least 0, got {count}")
        flat, order = ids.flatten().long().sort(stable=True)
        offsets = torch.searchsorted(flat, torch.arange(count + 1, device=ids.device))
        return cls(mask, ids.long(), order, offsets, **options)

    def check(self):
        """Raise ValueError for bounds or lengths that cannot be. On GPUs this waits for the device."""
        if self._bad is None or not bool(self._bad):
            return
        if self._bounds is not None and bool((self._bounds != self._offsets).any()):
            first, tokens = self._bounds[:16].tolist(), self.mask.numel()
            raise ValueError(f"cu_seqlens must be ascending in [0, {tokens}], the mask's tokens, got {first}")
        raise ValueError("lengths must be finite and at least 0, and bounds right on every rank, got others")

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """values [..] -> [B] fp32, the sum of each sequence's tokens over the whole group, differentiable.

        The result is replicated over the group, and so should be what is computed of it: the gradient of a token is
        that of its sequence, without communication.
        """
        self._check(values, self.mask.shape)
        return _Sum.apply(values, self)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """values [..] -> [B] fp32: `sum` / N_i, 0 for a sequence without tokens."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def spread(self, per_sequence: torch.Tensor) -> torch.Tensor:
        """[B] -> [..]: each token gets its sequence's value, 0 outside of the mask. Differentiable: the gradient of a
        sequence is the sum of its tokens' (with a group: one collective in the backward)."""
        self._check(per_sequence, (len(self),))
        return _Spread.apply(per_sequence, self)

    def aggregate(self, reduction: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Per-token weights [..] and the denominator (scalar) that make a weighted token sum the reduction.

        "seq-mean-token-sum": 1/G sum_i sum_t. "seq-mean-token-mean": 1/G sum_i 1/N_i sum_t. "seq-mean-token-sum-norm":
        1/G sum_i 1/horizon sum_t (Dr. GRPO, arXiv:2503.20783). The denominator G is `count`; for the global batch, pass
        your own number of sequences.
        """
        if reduction not in SEQUENCE_REDUCTIONS:
            raise ValueError(f"reduction must be one of {SEQUENCE_REDUCTIONS}, got {reduction!r}")
        if reduction == "seq-mean-token-mean":
            return self.token_share, self.count
        if reduction == "seq-mean-token-sum":
            return self._known.float(), self.count
        if self.horizon is None:
            raise ValueError("reduction 'seq-mean-token-sum-norm' needs Sequences(..., horizon=L), got None")
        return self._known / self.horizon, self.count

    def _poisoned(self, values):
        """The values, all NaN where bounds or lengths cannot be."""
        return values if self._bad is None else torch.where(self._bad, torch.nan, values)

    def _check(self, x, shape):
        if x.shape != torch.Size(shape):
            raise ValueError(f"expected shape {list(shape)} of {len(self)} sequences, got {list(x.shape)}")

    def _local_sum(self, values):
        values = torch.where(self._known, values, 0.0)
        if self._offsets is None:
            return values.sum(-1, dtype=torch.float64)
        flat = values.flatten().double()
        if self._order is not None:
            flat = flat[self._order]
        return torch.segment_reduce(flat, "sum", offsets=self._offsets, initial=0, unsafe=True)

    def _global_sum(self, values):
        return sum_over_ranks(self._poisoned(self._local_sum(values)), self.group).float()

    def _local_spread(self, per_sequence):
        if self._ids is None:
            tokens = per_sequence.unsqueeze(-1)
        else:  # of no sequences nothing can be picked
            tokens = per_sequence[self._ids] if len(self) else per_sequence.new_zeros(self.mask.shape)
        return self._poisoned(torch.where(self._known, tokens, 0.0))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, sequences):
        ctx.sequences, ctx.dtype = sequences, values.dtype
        return sequences._global_sum(values)

    @staticmethod
    def backward(ctx, grad):
        return _Spread.apply(grad, ctx.sequences).to(ctx.dtype), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, per_sequence, sequences):
        ctx.sequences = sequences
        return sequences._local_spread(per_sequence)

    @staticmethod
    def backward(ctx, grad):
        return _Sum.apply(grad, ctx.sequences), None
