"""Which tokens form a sequence: sums and means over each, spread back to its tokens, and per-token weights.

Everything is deterministic (one fixed order, float64 accumulators), runs without host synchronisation and can be
captured in a CUDA graph. Words: B sequences, [..] the tokens' shape, N_i the valid tokens of sequence i.
"""

from __future__ import annotations

import torch

from .comm import group_size, sum_over_ranks

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
    """

    def __init__(self, mask, ids, order, offsets, *, lengths=None, horizon=None, group=None):
        """For the constructors below. ids: [..] sequence of each token, or None for rows; order: [T] permutation that
        brings the tokens of a sequence together, or None; offsets: [B + 1] into the ordered tokens, None for rows."""
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be bool, got {mask.dtype}")
        self.mask, self.horizon, self.group = mask, horizon, group
        self._order, self._offsets = order, offsets
        if ids is None:
            self._ids, self._known = None, mask
        else:
            known = (ids >= 0) & (ids < len(offsets) - 1)
            self._ids, self._known = torch.where(known, ids, 0), mask & known
        if lengths is None:
            lengths = self.sum(torch.ones_like(mask, dtype=torch.float32))
        elif lengths.shape != (len(self),):
            raise ValueError(f"lengths must have shape [{len(self)}], got {list(lengths.shape)}")
        self.lengths = lengths.float()
        self.count = (self.lengths > 0).sum(dtype=torch.float32)
        self.ranks = group_size(group)
        self.token_share = self._local_spread(1 / self.lengths.clamp(min=1))

    def __len__(self) -> int:
        """B, sequences without tokens included."""
        return self.mask.shape[0] if self._offsets is None else len(self._offsets) - 1

    @classmethod
    def from_mask(cls, mask: torch.Tensor, **options) -> Sequences:
        """mask [B, S] bool (``labels != -100``, say): a sequence per row. Options for all three constructors:

        lengths: [B], N_i over the whole group, if it is known. horizon: the constant length of the reduction
        "seq-mean-token-sum-norm". group: context-parallel process group.
        """
        if mask.dim() != 2:
            raise ValueError(f"mask must be [B, S], a sequence per row, got {list(mask.shape)}")
        return cls(mask, None, None, None, **options)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: torch.Tensor, mask: torch.Tensor, **options) -> Sequences:
        """Packed tokens: sequence i is tokens [cu_seqlens[i], cu_seqlens[i + 1]) of the flattened mask [..].

        cu_seqlens: [B + 1] ascending int32 or int64, as variable-length attention takes it; tokens beyond its last
        entry belong to no sequence.
        """
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1:
            raise ValueError(f"cu_seqlens must be [B + 1], got {list(cu_seqlens.shape)}")
        offsets = cu_seqlens.long()
        tokens = torch.arange(mask.numel(), device=mask.device)
        ids = torch.searchsorted(offsets, tokens, right=True) - 1
        return cls(mask, ids.view(mask.shape), None, offsets, **options)

    @classmethod
    def from_ids(cls, ids: torch.Tensor, count: int, mask: torch.Tensor, **options) -> Sequences:
        """Tokens in any order: ids [..] in [0, count) names each one's sequence; other ids belong to none."""
        if ids.shape != mask.shape:
            raise ValueError(f"ids must have the mask's shape {list(mask.shape)}, got {list(ids.shape)}")
        flat, order = ids.flatten().long().sort(stable=True)
        offsets = torch.searchsorted(flat, torch.arange(count + 1, device=ids.device))
        return cls(mask, ids.long(), order, offsets, **options)

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
        return sum_over_ranks(self._local_sum(values), self.group).float()

    def _local_spread(self, per_sequence):
        tokens = per_sequence.unsqueeze(-1) if self._ids is None else per_sequence[self._ids]
        return torch.where(self._known, tokens, 0.0)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, sequences):
        ctx.sequences, ctx.dtype = sequences, values.dtype
        return sequences._global_sum(values)

    @staticmethod
    def backward(ctx, grad):
        return ctx.sequences._local_spread(grad).to(ctx.dtype), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, per_sequence, sequences):
        ctx.sequences = sequences
        return sequences._local_spread(per_sequence)

    @staticmethod
    def backward(ctx, grad):
        return ctx.sequences._global_sum(grad), None
