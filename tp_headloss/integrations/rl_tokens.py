"""The four parts of the functions of several RL stacks: the shard of a call, the order of its
tokens, a scorer (labels in, log-probs out), and the place of each log-prob in the result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, TypeAlias

import torch

from ..arguments.options import Transform
from ..call.dtensor import local_logits
from ..call.subclasses import is_dtensor
from ..linear_head import Linear, linear_vocab_statistics
from ..ranks.comm import gather_from_ranks, group_size, sum_over_ranks
from ..ranks.groups import Group
from ..ranks.shard import VocabShard
from ..spec import Ids, IntLine, Size, TensorLine

IGNORED_LABEL = -100
UNREDUCED_HIDDEN_GRAD = Linear(hidden_grad="none")
TpGroup: TypeAlias = Annotated[Group, "That shares the vocabulary; None: one rank has all of it"]
CpGroup: TypeAlias = Annotated[Group, "Whose ranks hold parts of every sequence"]
InferenceOnly: TypeAlias = Annotated[
    bool, "True: nothing is saved for a backward, and the result has no gradient"
]
TokensNotShifted: TypeAlias = Annotated[Ids, "[B, S] replicated, not shifted"]
VocabSize: TypeAlias = Annotated[
    Size,
    "Number of ids of the tokenizer, not the padded number of columns: columns at or beyond it are "
    "padding, and do not enter the softmax. None, or the padded number: all columns do, as in the "
    "host",
]
# labels of this rank -> their log-probs, of the same shape
Score = Callable[[torch.Tensor], torch.Tensor]


def even_shard(logits, group, vocab_size: int | None) -> tuple[torch.Tensor, VocabShard]:
    """Return this rank's plain logits and its shard: an even one of the group, a DTensor's, or the
    whole vocabulary.

    vocab_size: ids of the tokenizer; columns at or beyond it are padding. None: none are.
    """
    if is_dtensor(logits):
        if group_size(group) > 1:
            raise ValueError("a DTensor has its own group: pass None as the group, got both")
        group = None
    columns = logits.shape[-1] * group_size(group)  # a DTensor's are those of all ranks
    if group is not None:
        return local_logits(logits, shard_of_columns(columns, group, vocab_size))
    logits, shard = local_logits(logits, None)
    return logits, shard_of_columns(columns, shard.group, vocab_size)


def shard_of_columns(columns: int, group, vocab_size: int | None) -> VocabShard:
    """Return this rank's even shard of the columns of all ranks, of which those beyond vocab_size
    are padding."""
    if vocab_size is not None and columns < vocab_size:
        alone = ": one rank's columns? Pass its group (vocab_parallel_group=, tp_group=)"
        raise ValueError(
            f"logits must have at least vocab_size = {vocab_size} columns on all ranks of the group "
            f"together, got {columns}{alone * (group_size(group) == 1)}"
        )
    return VocabShard.from_group(group, columns if vocab_size is None else vocab_size, columns)


def even_shard_of_rank(logits, rank, group, vocab_size) -> tuple[torch.Tensor, VocabShard]:
    """Return the same as `even_shard`, and raise ValueError unless rank is this one of the
    group."""
    if (rank is None) != (group is None):
        raise ValueError(
            f"vocab_parallel_rank and vocab_parallel_group belong together, got {rank} and "
            f"{group!r}"
        )
    width = logits.shape[-1]
    logits, shard = even_shard(logits, group, vocab_size)
    if rank is not None and shard.start != rank * width:
        raise ValueError(
            f"vocab_parallel_rank must be this rank of vocab_parallel_group, got {rank}"
        )
    return logits, shard


def bounded_shard(
    size: int | None, start: int, end: int, group, vocab_size: int | None, *, device=None
) -> VocabShard:
    """Return the shard of the ids [start, end), which may be uneven.

    size: of this rank's part of the vocabulary, which must be that of the bounds; None: not known.
    device: where to gather the end of the vocabulary from all ranks, for calls in which every rank
    needs the same vocab_size (sets of ids, linear heads); the host waits for it. None: do not
    gather.
    """
    if size is not None:
        _expect_size(size, start, end, vocab_size)
    if vocab_size is None:
        # it only says where padding begins, so the end of this shard will do, except for ids of the
        # whole vocabulary
        vocab_size = max(end, 1)
        if device is not None and group is not None:
            vocab_size = int(gather_from_ranks(torch.tensor([end], device=device), group).max())
    return VocabShard(start, end, vocab_size, group)


def own_size(part: torch.Tensor, dim: int) -> int | None:
    """Return the size of a dimension of logits or of a weight; None for a DTensor, of which it is
    that of all ranks."""
    return None if is_dtensor(part) else part.shape[dim]


def _expect_size(size: int, start: int, end: int, vocab_size: int | None):
    """Raise ValueError unless a rank's part of the vocabulary has the size of its bounds."""
    if size == end - start:
        return
    said = "the bounds are this rank's alone"
    if size > end - start:
        known = end if vocab_size is None else vocab_size
        said = (
            f"with padding, vocab_end_index={start + size}, and vocab_size={known}, if that is the "
            "tokenizer's number of ids"
        )
    raise ValueError(
        f"vocab_start_index and vocab_end_index must be bounds of this rank's {size} columns of "
        f"logits, or rows of the weight, got [{start}, {end}): {said}"
    )


def expect_tokens_first(hidden: torch.Tensor, ids: torch.Tensor):
    """Raise ValueError unless hidden states are [tokens, B, H] for ids [B, S]."""
    if ids.dim() != 2 or (hidden.dim() == 3 and hidden.shape[1] == len(ids)):
        return  # of other ids `next_tokens` says what they must be
    are_rows_first = hidden.dim() == 3 and hidden.shape[:2] == ids.shape
    said = ": of [B, S, H]? Pass its .transpose(0, 1)" * are_rows_first
    raise ValueError(
        f"hidden states must be [S, B, H] with B = {len(ids)}, as the ids {list(ids.shape)} have "
        f"it, got {list(hidden.shape)}{said}"
    )


def refuse(**arguments):
    """Raise ValueError for arguments that are not None and would otherwise be ignored."""
    for name, value in arguments.items():
        if value is not None:
            got = type(value).__name__ if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(f"{name} is not supported here: pass None, got {got}")


def head_scorer(hidden, weight, shard: VocabShard, temperature: float, linear: Linear) -> Callable:
    """Return a function of labels [..], or None, that computes `linear_vocab_statistics` of hidden
    [.., H]."""
    transform = Transform(temperature=temperature)
    return functools.partial(
        linear_vocab_statistics,
        hidden.to(weight.dtype),
        weight,
        shard=shard,
        transform=transform,
        linear=linear,
    )


def next_tokens(ids, length: int, device) -> torch.Tensor:
    """Labels [B, length] for all positions, so that no logits are cut: ids [B, S] shifted left by
    one, then -100."""
    if ids.dim() != 2 or not 1 <= ids.shape[1] <= length:
        raise ValueError(
            f"ids must be [B, S] with S from 1 to the {length} positions given, got "
            f"{list(ids.shape)}"
        )
    labels = torch.full((ids.shape[0], length), IGNORED_LABEL, dtype=torch.int64, device=device)
    labels[:, : ids.shape[1] - 1] = ids[:, 1:]
    return labels


class RankedTokens:
    """Which tokens each of C context-parallel ranks holds, balanced for causal attention: every
    sequence is cut into 2 C equal chunks, and rank r holds its chunks r and 2 C - 1 - r, one
    sequence after the other.

    Args:
        x: [B, L, ..] logits or hidden states of the L tokens that a rank holds, the same number on
            each.
        group: the context-parallel group; None or one rank: this rank holds all tokens.
        vocab_group: group that shares the vocabulary, whose ranks hold the same tokens; ValueError
            if it is `group`.
        bounds: [B + 1] int64, the first token of each packed sequence and the end of the last;
            None: B sequences alike.
        sum_gradients: True: the gradient of a value that `join` gives to all ranks is the sum of
            what they send back, as of a loss that is the sum of theirs. False: each rank's own.
    """

    def __init__(
        self,
        x: torch.Tensor,
        group,
        vocab_group,
        bounds: torch.Tensor | None = None,
        *,
        sum_gradients=True,
    ):
        self.group, self.ranks, self.local, self.device = (
            group,
            group_size(group),
            x.shape[1],
            x.device,
        )
        if group is vocab_group and self.ranks > 1:
            raise ValueError(
                "the context-parallel group must be other ranks than those that share the "
                "vocabulary, which hold the same tokens, got the same group twice"
            )
        self.total = self.local * self.ranks
        self.sum_gradients = sum_gradients
        if self.ranks == 1:
            return
        if bounds is None:
            if self.local % 2:
                raise ValueError(
                    "a context-parallel rank must hold an even number of positions, got "
                    f"{self.local}"
                )
            bounds = torch.tensor([0, self.total], device=self.device)
        tokens = torch.arange(self.total, device=self.device)
        sequence = torch.searchsorted(bounds[1:], tokens, right=True).clamp(max=len(bounds) - 2)
        chunk_size = (bounds.diff() // (2 * self.ranks)).clamp(min=1)[sequence]
        chunk = (tokens - bounds[sequence]) // chunk_size
        holder = torch.minimum(chunk, 2 * self.ranks - 1 - chunk)
        # a rank's tokens keep their order, so its lower chunk comes first
        by_rank = holder.argsort(stable=True)
        self.own = by_rank.view(self.ranks, self.local)[group.rank()]  # [T/C] among all T tokens
        self.order = by_rank.argsort()  # [T] place of each token where all ranks' tokens are joined

    def take(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return this rank's part of x [.., T, ..], whose dimension dim is that of tokens."""
        return x if self.ranks == 1 else x.index_select(dim, self.own)

    def join(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return [.., T, ..] of all parts [.., T/C, ..], differentiable: one all-gather, and one to
        sum gradients."""
        return x if self.ranks == 1 else _Join.apply(x, self, dim)

    def next_log_probs(
        self, score: Score, ids: torch.Tensor, inference_only: bool = False
    ) -> torch.Tensor:
        """Return the log-probs [B, S - 1] fp32 of all ranks' next ids [B, S], without a graph if
        inference_only."""
        labels = self.take(next_tokens(ids, self.total, self.device))
        return self.joined_scores(score, labels, inference_only)[:, : ids.shape[1] - 1]

    def joined_scores(
        self, score: Score, labels: torch.Tensor, inference_only: bool
    ) -> torch.Tensor:
        """Return the scores [B, T] of all ranks' labels, of which this rank has [B, T/C]."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            return self.join(score(labels))


class _Join(torch.autograd.Function):
    """`RankedTokens.join`."""

    @staticmethod
    def forward(ctx, x, tokens, dim):
        ctx.tokens, ctx.dim = tokens, dim
        return torch.cat(gather_from_ranks(x, tokens.group).unbind(0), dim).index_select(
            dim, tokens.order
        )

    @staticmethod
    def backward(ctx, grad):
        if ctx.tokens.sum_gradients:
            grad = sum_over_ranks(grad, ctx.tokens.group)
        return ctx.tokens.take(grad, ctx.dim), None, None


class PackedTokens(RankedTokens):
    """Packed sequences of next-token labels, and the place [row, column] of each token in a padded
    result.

    Bounds and lengths that are not those of the packed tokens, or under context parallelism lengths
    that are no multiple of twice its ranks, are a ValueError on CPUs; on GPUs, where nothing waits,
    every result is NaN.

    Args:
        x, group, vocab_group, sum_gradients: as in `RankedTokens`, x with B = 1.
        cu_seqlens: [B + 1] first token of each sequence, padding included, and the end of the last.
        width: columns of the padded result; the last token of a sequence has no label, so one less
            are scored.
    """

    def __init__(self, x, group, vocab_group, cu_seqlens, width: int, *, sum_gradients):
        TensorLine("int64 or int32", ("B + 1",)).check("cu_seqlens_padded", cu_seqlens, {})
        if x.dim() != 3 or len(x) != 1:
            lead = {2: ": pass its [None]", 3: ": pass its .flatten(0, 1)[None]"}
            raise ValueError(
                "logits, or hidden states, of packed sequences must be [1, T, ..], got "
                f"{list(x.shape)}{lead.get(x.dim(), '')}"
            )
        if len(cu_seqlens) < 2:
            raise ValueError(
                f"cu_seqlens_padded must be [B + 1] with B > 0, got {list(cu_seqlens.shape)}"
            )
        bounds = cu_seqlens.to(x.device, torch.int64)
        super().__init__(x, group, vocab_group, bounds, sum_gradients=sum_gradients)
        self.width, self.bounds, total = width, bounds, self.total
        lengths, multiple = bounds.diff(), 2 * self.ranks if self.ranks > 1 else 1
        self.valid = torch.ones((), dtype=torch.bool, device=self.device)
        self._expect(
            (bounds[0] == 0)
            & (bounds[-1] == total)
            & (lengths >= 0).all()
            & (lengths % multiple == 0).all(),
            f"cu_seqlens_padded must ascend from 0 to {total}, the tokens of all ranks, by "
            f"multiples of {multiple}, got {{bounds}}",
            bounds=bounds,
        )
        tokens = torch.arange(total, device=self.device)
        self.sequence = torch.searchsorted(bounds[1:], tokens, right=True).clamp(
            max=len(lengths) - 1
        )
        self.offset = tokens - bounds[self.sequence]
        self.rows, self.row, self.column, self.length = (
            len(lengths),
            self.sequence,
            self.offset,
            lengths,
        )

    def _expect(self, valid, message: str, **shown):
        """Raise ValueError on CPUs unless valid; on GPUs results are NaN. shown: tensors in the
        message, by name."""
        self.valid = self.valid & valid
        if valid.device.type == "cpu" and not bool(valid):
            raise ValueError(message.format(**{name: x[:16].tolist() for name, x in shown.items()}))

    def place(self, attention_mask, sub_seq_lengths):
        """Place tokens where SkyRL does: at the attended columns of a row per sequence, or several
        sequences a row."""
        device = self.device
        if sub_seq_lengths is not None:
            if not all(isinstance(row, (list, tuple)) for row in sub_seq_lengths):
                raise TypeError(
                    "sub_seq_lengths must be a list of lengths for each row, got "
                    f"{sub_seq_lengths!r}"
                )
            counts = [len(row) for row in sub_seq_lengths]
            if sum(counts) != len(self.length):
                raise ValueError(
                    f"sub_seq_lengths must be of {len(self.length)} sequences, got {sum(counts)}"
                )
            counted = torch.tensor(counts, device=device)
            row = torch.arange(len(counts), device=device).repeat_interleave(
                counted, output_size=sum(counts)
            )
            first = (counted.cumsum(0) - counted)[row]  # sequence that begins the row
            self.rows, self.row = len(counts), row[self.sequence]
            self.column = self.offset + (self.bounds[:-1] - self.bounds[first])[self.sequence]
            packed, self.length = (
                self.length,
                torch.tensor([n for row in sub_seq_lengths for n in row], device=device),
            )
            fits = ((self.length >= 0) & (self.length <= packed)).all()
            most = (
                "sub_seq_lengths must be at most the packed sequences' {packed} tokens, got {got}"
            )
            self._expect(fits, most, packed=packed, got=self.length)
        elif attention_mask is not None:
            TensorLine("bool or integers", (self.rows, self.width)).check(
                "attention_mask", attention_mask, {}
            )
            mask = attention_mask.to(device, torch.bool)
            # those of the attended tokens first
            columns = (~mask).to(torch.int8).argsort(dim=1, stable=True)
            self.column = columns[self.row, self.offset.clamp(0, self.width - 1)]
            packed, self.length = self.length, mask.sum(1)
            most = "attention_mask must attend to at most the packed sequences' {packed} tokens, got {got}"
            self._expect((self.length <= packed).all(), most, packed=packed, got=self.length)

    @property
    def scored(self) -> torch.Tensor:
        """bool [T]: tokens whose label is in the same sequence and has a column."""
        last = self.offset >= self.length[self.sequence] - 1
        return ~last & (self.offset >= 0) & (self.column < self.width - 1)

    def log_probs(
        self, score: Score, ids, inference_only: bool = False, labels=None
    ) -> torch.Tensor:
        """Return the log-probs [rows, width - 1] fp32 of tokens in their places, else 0; no graph
        if inference_only.

        Args:
            score: labels [1, T/C] of this rank -> log-probs [1, T/C].
            ids: [1, T] not shifted; not looked at if there are labels.
            labels: [1, T/C] of this rank, or None.
        """
        used = self.scored
        if labels is None:
            TensorLine("int64 or int32", (1, self.total)).check("target", ids, {})
            labels = self.take(ids.to(self.device).roll(-1, 1))
        TensorLine("int64 or int32", (1, self.local)).check("target", labels, {})
        labels = labels.to(self.device).masked_fill(~self.take(used, 0), IGNORED_LABEL)
        values = self.joined_scores(score, labels, inference_only).squeeze(0).where(used, 0.0)
        # tokens without a place share the last column, which is cut off
        padded = values.new_zeros(self.rows, self.width)
        padded = padded.index_put((self.row, self.column.where(used, self.width - 1)), values)[
            :, :-1
        ]
        return torch.where(self.valid, padded, torch.nan)

    def weights(self, num_actions: int, loss_mask, dtype) -> torch.Tensor:
        """Return this rank's weights [T/C]: loss_mask [rows, num_actions], or 1, in the last places
        of rows, else 0."""
        IntLine(1, self.width - 1).check("num_actions", num_actions, {})
        if loss_mask is not None:
            TensorLine("real numbers or bool", (self.rows, num_actions)).check(
                "loss_mask", loss_mask, {}
            )
        padded = torch.zeros(self.rows, self.width, dtype=dtype, device=self.device)
        padded[:, self.width - 1 - num_actions : -1] = (
            1.0 if loss_mask is None else loss_mask.to(padded)
        )
        weights = padded[self.row, self.column.where(self.scored, self.width - 1)]
        return torch.where(self.valid, self.take(weights, 0), torch.nan)
