"""`Sequences`: sums and means over the tokens of each sequence, their values per token, and weights
of reductions.

All results are deterministic (one fixed order, float64 accumulators), need no host synchronisation
and can be captured in a CUDA graph. Words: B sequences, [..] the tokens' shape, N_i the number of
counted tokens of sequence i.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, get_args

import torch

from ..ranks.comm import group_size, sum_over_ranks
from ..ranks.groups import Group
from ..ranks.shard import has_vocab_shard
from ..spec import Count, Labels, PositiveFp32, TensorLine, TokenMask, checked, sizes_of
from .made_whole import MadeWhole

VALUES = TensorLine("real numbers or bool")
Starts: TypeAlias = Annotated[torch.Tensor, TensorLine("int64 or int32", ("B + 1",))]
SequenceReduction: TypeAlias = Literal[
    "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
SEQUENCE_REDUCTIONS: tuple[SequenceReduction, ...] = get_args(SequenceReduction)


class Sequences(MadeWhole):
    """The sequences of a batch of tokens, padded `[B, S]` (`from_mask`) or packed
    (`from_cu_seqlens`, `from_ids`).

    Only tokens in ``mask`` are counted, so the mask should be ``labels != ignore_index`` or a part
    of it: an ignored token in the mask counts in N_i, and its loss is 0. A sequence without counted
    tokens does not count as a sequence.

    With a ``group`` each of its ranks holds a part of every sequence (context parallelism):
    sequence i is the same on all ranks, though its tokens differ, and B is (ranks with another B
    abort or hang, as in any collective). It is never the data-parallel group: sequence i of all its
    ranks would be taken for one, silently. ``Options(validate="full")`` compares over the group
    what `HeadLoss` gets per sequence, such as advantages [B] or [B, 1]; of values per token it
    cannot know.

    Every sum over sequences of a ``group`` takes one more small collective, and so does the
    construction, unless ``lengths`` is given: all ranks make as many, in the same order. Where one
    has another number of batches, the sums of different batches are added up, silently, and the
    last ones abort or hang. Then leave ``group`` out, add up the sums of each rank's batches, and
    all-reduce this [B] once at the end. The group that shares the vocabulary, whose ranks hold the
    same tokens, is a ValueError. In a larger group such ranks count once each, which `HeadLoss`
    refuses and `sum` does not see.

    Invalid bounds (out of order, outside of the tokens, or lengths that add up to the tokens) and
    invalid lengths (negative, or not finite) are a ValueError on CPUs. On GPUs nothing waits for
    their values: nothing outside of the tokens is read, and every result is NaN. `check` (or
    ``Options(check=True)``) waits for the device, and raises there, too. It also raises for tokens
    in the mask that belong to no sequence (without a group, cu_seqlens that leave some out do so on
    CPUs at once) and, without a group, for lengths below a sequence's counted tokens, and
    ``Options(check=True)`` for tokens whose label is ignored.

    They are of the tokens of one call: each of several mini-batches of a rollout has its own, of
    its part of the mask. The mask is copied: make them after filtering. A sequence is whole in its
    call: the parts of one that is split over micro-batches are taken for a sequence each, silently,
    with a length, a mean and a ratio of their own. ``lengths`` of the whole sequences make losses
    over a ``denominator`` right again, but not ratios of sequences (GSPO, GMPO, VESPO) and not
    `mean_metrics`.

    Attributes are read, not assigned nor changed in place: a loss has taken its weights from them.
    So copy ``count`` before an all_reduce, ``denominator = sequences.count.clone()``.

    Attributes:
        lengths: [B] fp32, N_i over the whole group.
        count: scalar fp32, the number of sequences that have counted tokens.
        token_share: [..] fp32, 1 / N_i for a token of sequence i, 0 outside of the mask; summed
            over the group: count.

    Examples:
        >>> sequences = Sequences.from_mask(torch.tensor([[True, True, False], [True, False, False]]))
        >>> sequences.lengths.tolist(), sequences.count.item()
        ([2.0, 1.0], 2.0)
        >>> values = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
        >>> sequences.sum(values).tolist(), sequences.mean(values).tolist()
        ([3.0, 4.0], [1.5, 4.0])
    """

    remedy = ": a loss takes them as inputs={'sequences': ..} of the call"
    of_tensor = ": write Sequences.from_mask(mask), with mask such as labels != -100"
    made_anew = "Sequences.from_mask(mask[..])"
    of_tokens = ": make it of a mask in the labels' shape, such as labels != -100"

    _offsets: Any

    @checked
    def __init__(
        self,
        mask: TokenMask,
        ids: Labels | None,
        order: Annotated[torch.Tensor, TensorLine("int64 or int32", ("T",))] | None,
        offsets: Starts | None,
        *,
        bounds: Starts | None = None,
        lengths: Annotated[torch.Tensor, TensorLine("real numbers", ("B",))] | None = None,
        horizon: PositiveFp32 | None = None,
        group: Group = None,
    ):
        """Use `from_mask`, `from_cu_seqlens` or `from_ids`, which call this.

        Args:
            ids: sequence of each token; None: each row of the mask is a sequence.
            order: permutation that brings the tokens of a sequence together.
            offsets: start of each sequence among the ordered tokens; None for rows.
            bounds: the offsets as the caller gave them.
            lengths, horizon, group: as in `from_mask`.
        """
        if group is not None and has_vocab_shard(group.group_name):
            raise ValueError(
                "sequences must be split over a context-parallel group or none, got the group of a "
                "VocabShard, whose ranks hold the same tokens: leave group= out"
            )
        mask = mask.clone()  # the caller's may be changed before the backward
        self.mask, self.horizon, self.group = mask, horizon, group
        self._order, self._offsets, self._bounds = order, offsets, bounds
        # [] bool; None: nothing can be invalid
        self._invalid = (
            None if bounds is None else _invalid_bounds(bounds, self._offsets, mask.numel())
        )
        if ids is None:
            self._ids, self.counted = None, mask
        else:
            known = (ids >= 0) & (ids < len(self._offsets) - 1)
            self._ids, self.counted = torch.where(known, ids, 0), mask & known
        if lengths is not None:
            if len(lengths) != len(self):
                raise ValueError(
                    f"lengths must be [{len(self)}], one per sequence, got {list(lengths.shape)}"
                )
            lengths = lengths.detach().float()
            invalid = ~((lengths >= 0) & (lengths < float("inf"))).all()
            self._invalid = invalid if self._invalid is None else self._invalid | invalid
        else:
            lengths = self.sum(torch.ones_like(mask, dtype=torch.float32))
            if group is not None:  # invalid bounds on one rank have made the lengths NaN on all
                self._invalid = lengths.isnan().any()
        if mask.device.type == "cpu" and not torch.compiler.is_compiling():
            self._expect_valid()
            if bounds is not None and group is None:  # where no rank raises alone
                self._expect_owned()
        self.lengths = self._poisoned(lengths.float())
        self.count = self._poisoned((self.lengths > 0).sum(dtype=torch.float32))
        self.ranks = group_size(group)
        self.token_share = self._local_spread(1 / self.lengths.clamp(min=1))

    def __len__(self) -> int:
        """Return B, sequences without counted tokens included."""
        return self.mask.shape[0] if self._offsets is None else len(self._offsets) - 1

    @property
    def tokens_like(self) -> torch.Tensor:
        """A tensor of the tokens' shape [..] and device."""
        return self.mask

    @property
    def ids(self) -> torch.Tensor | None:
        """Sequence [..] of each token, -1 for none; None: each row of the mask is one."""
        return None if self._ids is None else torch.where(self.counted, self._ids, -1)

    def __getstate__(self):
        if self.group is not None:
            raise TypeError(
                "Sequences hold a process group, which cannot be pickled: make them anew in each "
                "process"
            )
        return self.__dict__

    @classmethod
    @checked
    def from_mask(
        cls, mask: Annotated[torch.Tensor, TensorLine("bool", ("B", "S"))], **options
    ) -> Sequences:
        """Return the sequences of padded tokens: each row of the mask is one.

        Args:
            mask: for example ``labels != -100``.
            options: for all three constructors: ``lengths`` [B], N_i over the whole group, if it is
                known; ``horizon``, the constant length of the reduction "seq-mean-token-sum-norm";
                ``group``, the context-parallel group, whose ranks hold pieces of the same
                sequences; never the data-parallel one, whose sequences i would be taken for one.
        """
        return cls(mask, None, None, None, **options)

    @classmethod
    @checked
    def from_cu_seqlens(
        cls, cu_seqlens: Starts, mask: TokenMask | None = None, **options
    ) -> Sequences:
        """Return the sequences of packed tokens: sequence i is tokens [cu_seqlens[i], cu_seqlens[i
        + 1]).

        Args:
            cu_seqlens: ascending in [0, tokens], as variable-length attention takes it. Tokens
                before its first and beyond its last entry belong to no sequence, and must not be in
                the mask.
            mask: cu_seqlens counts its flattened tokens. None: all tokens [T] up to the last bound,
                for which a GPU is waited for.
            options: as in `from_mask`.

        Examples:
            >>> packed = torch.tensor([True, True, True, False])
            >>> Sequences.from_cu_seqlens(torch.tensor([0, 2, 4]), packed).lengths
            tensor([2., 1.])
        """
        if not len(cu_seqlens):
            raise ValueError("cu_seqlens must be [B + 1], got none")
        if mask is None:
            mask = torch.ones(
                max(int(cu_seqlens[-1]), 0), dtype=torch.bool, device=cu_seqlens.device
            )
        bounds, tokens = cu_seqlens.long(), mask.numel()
        # so that nothing outside of the tokens is read
        offsets = bounds.clamp(0, tokens).cummax(0).values
        ids = torch.searchsorted(offsets, torch.arange(tokens, device=mask.device), right=True) - 1
        return cls(mask, ids.view(mask.shape), None, offsets, bounds=bounds, **options)

    @classmethod
    @checked
    def from_ids(cls, ids: Labels, count: Count, mask: TokenMask, **options) -> Sequences:
        """Return the sequences of tokens in any order.

        Args:
            ids: each token's sequence in [0, count); a token with another id belongs to none.
            options: as in `from_mask`.
        """
        flat, order = ids.flatten().long().sort(stable=True)
        offsets = torch.searchsorted(flat, torch.arange(int(count) + 1, device=ids.device))
        return cls(mask, ids.long(), order, offsets, **options)

    def check(self):
        """Raise ValueError for invalid bounds or lengths, and for counted tokens that no sequence
        has.

        Waits for a GPU. ``Options(check=True)`` calls it.
        """
        self._expect_valid()
        self._expect_owned()
        counted = self._local_sum(torch.ones_like(self.mask, dtype=torch.float32))
        few = (self.lengths < 0.99 * counted).nonzero()  # they may have been rounded
        if self.group is None and len(few):
            i = int(few[0])
            raise ValueError(
                f"the length of sequence {i} must be at least its {int(counted[i])} counted "
                f"tokens, got {float(self.lengths[i]):g}"
            )

    def _expect_valid(self):
        if self._invalid is None or not bool(self._invalid):
            return
        if self._bounds is not None and bool(
            _invalid_bounds(self._bounds, self._offsets, self.mask.numel())
        ):
            first, tokens = self._bounds[:16].tolist(), self.mask.numel()
            lengths = int(self._bounds.sum()) == tokens
            said = (
                ": lengths? Pass torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"
                if lengths
                else ""
            )
            raise ValueError(
                f"cu_seqlens must be ascending in [0, {tokens}], the mask's tokens, got "
                f"{first}{said}"
            )
        raise ValueError(
            "lengths must be finite and at least 0, and bounds right on every rank, got others"
        )

    def _expect_owned(self):
        if lost := int((self.mask & ~self.counted).sum()):
            bounds, tokens = self._bounds, self.mask.numel()
            said = ""
            if bounds is not None:
                said = f": cu_seqlens are {bounds[0]} to {bounds[-1]}, tokens 0 to {tokens}"
                if bounds[0] > 0 and bool(self.mask.flatten()[: bounds[0]].any()):
                    said += (
                        "; the first sequence begins with 0: pass "
                        "torch.nn.functional.pad(cu_seqlens, (1, 0))"
                    )
            raise ValueError(
                f"every token in the mask must belong to a sequence, got {lost} that belong to "
                f"none{said}"
            )

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum [B] fp32 of each sequence's values [..] over the whole group,
        differentiable.

        Replicated over the group; every rank must compute the same from it: a token's gradient is
        its sequence's.
        """
        VALUES.check("values", values, sizes_of("the mask", self.mask, self.mask.shape))
        return _SumTokens.apply(values, self)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean [B] fp32 of each sequence's values [..]: `sum` / N_i, 0 for a sequence
        without tokens."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def spread(self, per_sequence: torch.Tensor) -> torch.Tensor:
        """Return for each token [..] its sequence's value of per_sequence [B], 0 outside of the
        mask.

        Differentiable: a sequence's gradient is the sum of its tokens'. Backward: a collective with
        a group, else none.
        """
        sizes = sizes_of("the sequences", self.mask, self.mask.shape, B=len(self))
        TensorLine(VALUES.kind, ("B",)).check("per_sequence", per_sequence, sizes)
        return _SpreadToTokens.apply(per_sequence, self)

    @checked
    def aggregate(self, reduction: SequenceReduction) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights per token [..] and a scalar denominator, with which a weighted token sum
        is the reduction.

        The denominator G is `count`; for the global batch, use your own number of sequences.

        Args:
            reduction: "seq-mean-token-sum": 1/G sum_i sum_t. "seq-mean-token-mean": 1/G sum_i 1/N_i
                sum_t. "seq-mean-token-sum-norm": 1/G sum_i 1/horizon sum_t (Dr. GRPO,
                arXiv:2503.20783).
        """
        if reduction == "seq-mean-token-mean":
            return self.token_share.clone(), self.count
        if reduction == "seq-mean-token-sum":
            return self.counted.float(), self.count
        if self.horizon is None:
            raise ValueError(
                "reduction 'seq-mean-token-sum-norm' needs a horizon, got None: write "
                "Sequences.from_mask(mask, horizon=L)"
            )
        return self.counted.float() / self.horizon, self.count

    def _poisoned(self, values):
        """Values unchanged, or all NaN if bounds or lengths are invalid."""
        return values if self._invalid is None else torch.where(self._invalid, torch.nan, values)

    def _local_sum(self, values):
        """Sum [B] of each sequence's tokens on this rank, in float64."""
        values = torch.where(self.counted, values, 0.0)
        if self._offsets is None:
            return values.sum(-1, dtype=torch.float64)
        flat = values.flatten().double()
        if self._order is not None:
            flat = flat[self._order]
        return torch.segment_reduce(flat, "sum", offsets=self._offsets, initial=0, unsafe=True)

    def _local_spread(self, per_sequence):
        """Each token's value [..] of per_sequence [B], 0 outside of the mask."""
        if self._ids is None:
            tokens = per_sequence.unsqueeze(-1)
        else:  # an empty per_sequence cannot be indexed
            tokens = (
                per_sequence[self._ids] if len(self) else per_sequence.new_zeros(self.mask.shape)
            )
        return self._poisoned(torch.where(self.counted, tokens, 0.0))


def _invalid_bounds(bounds: torch.Tensor, offsets: torch.Tensor, tokens: int) -> torch.Tensor:
    """[] bool: bounds are no offsets, or look like lengths, which begin above 0 and add up to the
    tokens."""
    return (bounds != offsets).any() | ((bounds[0] > 0) & (bounds.sum() == tokens))


class _SumTokens(torch.autograd.Function):
    """Sum [B] over the tokens of each sequence and over the group; the backward spreads the
    gradient to the tokens."""

    @staticmethod
    def forward(ctx, values, sequences):
        ctx.sequences, ctx.dtype = sequences, values.dtype
        # NaN on all ranks if bounds are invalid on one
        return sum_over_ranks(
            sequences._poisoned(sequences._local_sum(values)), sequences.group
        ).float()

    @staticmethod
    def backward(ctx, grad):
        return _SpreadToTokens.apply(grad, ctx.sequences).to(ctx.dtype), None


class _SpreadToTokens(torch.autograd.Function):
    """Value [..] of each token's sequence; the backward sums the gradient over tokens and group."""

    @staticmethod
    def forward(ctx, per_sequence, sequences):
        ctx.sequences = sequences
        return sequences._local_spread(per_sequence)

    @staticmethod
    def backward(ctx, grad):
        return _SumTokens.apply(grad, ctx.sequences), None
