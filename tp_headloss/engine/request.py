"""One call as one value: `Request` holds its tensors, static facts, layout of rows, and order of
tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..ranks.shard import VocabShard
from ..statistics import Layout, MaybeNone, layout_of


class Facts(NamedTuple):
    """Everything static about a call: plain numbers and names, in the order of the registered
    operators' schema."""

    start: int  # first vocabulary id of the shard
    valid_width: int  # columns of the shard that are true ids; the rest is padding
    vocab_size: int
    chunk_size: int
    chunks: int  # packets that this rank sends
    world_size: int
    group_name: str
    want: tuple[str, ...]  # names of optional statistics, in the order of `statistics.FAMILIES`
    scale: float
    softcap: float  # 0: none
    temperature: float
    ignore_index: int
    backend: str
    transport: str
    teacher_scale: float = 1.0  # factor of the teacher's logits
    # factor of the student's transformed logits where they meet the teacher's
    student_scale: float = 1.0
    beta: float = 0.5  # the teacher's share of the Jensen-Shannon mixture

    @property
    def packets(self) -> int:
        """Packets of all ranks."""
        return self.chunks * self.world_size


def without_gaps(x: Any) -> Any:
    """A contiguous tensor, or None."""
    return x if x is None else x.contiguous()


def place_of(x: torch.Tensor) -> tuple:
    """Strides and alignment, which Triton compiles in, of a tensor whose shape and dtype are
    known."""
    return x.stride(), x.data_ptr() % 16


class Tensors(NamedTuple):
    """Tensors that the backends read, by rows [N, ..] of one rank; an absent tensor switches its
    part off."""

    logits: torch.Tensor  # [N, width]
    labels: torch.Tensor | MaybeNone = None  # [N]
    bias: torch.Tensor | MaybeNone = None  # [width]
    temperatures: torch.Tensor | MaybeNone = None  # [N], instead of the facts' number
    column_weight: torch.Tensor | MaybeNone = None  # [width]
    teacher: torch.Tensor | MaybeNone = None  # [N, width]
    # [2, N], instead of the facts' teacher_scale and student_scale
    scales: torch.Tensor | MaybeNone = None
    # [N, K] int32 of a top-K teacher: distinct, ascending, the largest: none
    entries: torch.Tensor | MaybeNone = None
    entry_log_probs: torch.Tensor | MaybeNone = None  # [N, K] fp32, -inf where there is none
    # [all] int32 ids of all tokens' sets, each once, negative: none
    sets: torch.Tensor | MaybeNone = None
    set_spans: torch.Tensor | MaybeNone = None  # [N, 2] int64 bounds of each token's set among them
    # [N] z of the labels, which `passes.with_label_logits` finds
    label_logits: torch.Tensor | MaybeNone = None
    # [N, K] int32 whose log-probs are asked for, see `statistics.at_ids`
    ids: torch.Tensor | MaybeNone = None

    @classmethod
    def saved(cls, *tensors) -> Tensors:
        """Tensors that autograd saved, as kernels take them: all but logits and a teacher without
        gaps, whatever hooks of saved tensors, as offloading has them, made of their strides."""
        strided = cls._fields.index("logits"), cls._fields.index("teacher")
        found: list[Any] = [
            x if x is None or i in strided else x.contiguous() for i, x in enumerate(tensors)
        ]
        return cls(*found)


def places_of(tensors: Tensors) -> tuple:
    """Return the place of each tensor, None for those that are absent."""
    return tuple([x if x is None else place_of(x) for x in tensors])


PER_TOKEN = (
    "labels",
    "temperatures",
    "teacher",
    "entries",
    "entry_log_probs",
    "set_spans",
    "label_logits",
    "ids",
)
PER_COLUMN = "bias", "column_weight", "teacher"


class TeacherOperands(NamedTuple):
    """The head of a teacher whose logits a linear head makes by blocks; none by default."""

    teacher_hidden: torch.Tensor | MaybeNone = None  # [N, H_t] (or [N/P, H_t])
    teacher_weight: torch.Tensor | MaybeNone = None  # [width, H_t]
    teacher_bias: torch.Tensor | MaybeNone = None  # [width]
    operand_dtype: torch.dtype = torch.float32  # of the GEMMs' operands
    cap: float = 0.0  # the factor inside of the softcap's tanh, 0 without a softcap
    teacher_rounded: bool = True  # False: unrounded logits are asked for

    @property
    def block_dtype(self) -> torch.dtype:
        """dtype of a block of logits: unrounded where that is asked for, or something is still to be
        done to them."""
        exact = not self.teacher_rounded or self.cap or self.teacher_bias is not None
        return accumulation_dtype(self.operand_dtype) if exact else self.operand_dtype


class Request(NamedTuple):
    """A validated call."""

    tensors: Tensors | MaybeNone
    facts: Facts
    layout: Layout
    order: TokenOrder | MaybeNone = None  # how the caller's tokens became rows
    shard: VocabShard | MaybeNone = None
    teacher_head: TeacherOperands = TeacherOperands()
    # those of calls of this kind, see `ways.way_of`; None: it is not remembered
    ways: dict | MaybeNone = None

    @classmethod
    def of(cls, tensors, facts: Facts) -> Request:
        """The request of an operator's arguments."""
        tensors = Tensors(*tensors)
        return cls(tensors, facts, layout_of(tensors.labels is not None, facts.want, tensors.ids))

    @property
    def packets_shape(self) -> tuple[int, int, int]:
        """Shape of this rank's packets: chunks, rows of a packet, tokens."""
        return self.facts.chunks, self.layout.packet_height, self.tensors.logits.shape[0]

    def rows(self, here: slice | torch.Tensor, logits: torch.Tensor) -> Request:
        """The request of some tokens, whose logits are given."""
        tensors = self.tensors
        parts = {name: x[here] for name in PER_TOKEN if (x := getattr(tensors, name)) is not None}
        if tensors.scales is not None:
            parts["scales"] = tensors.scales[:, here].contiguous()
        return self._replace(tensors=tensors._replace(logits=logits, **parts))

    def columns(self, here: slice) -> Request:
        """The request of some columns of the shard; its logits are those columns already."""
        tensors, facts = self.tensors, self.facts
        parts = {
            name: x[..., here] for name in PER_COLUMN if (x := getattr(tensors, name)) is not None
        }
        valid = min(max(facts.valid_width - here.start, 0), here.stop - here.start)
        facts = facts._replace(start=facts.start + here.start, valid_width=valid)
        return self._replace(tensors=tensors._replace(**parts), facts=facts)


def accumulation_dtype(logits_dtype: torch.dtype) -> torch.dtype:
    """dtype of per-token results: float64 for float64 logits, else float32."""
    return torch.float64 if logits_dtype == torch.float64 else torch.float32


class TokenOrder:
    """Tokens in the logits' memory order, so that a transposed [S, B, V] needs no copy: only
    per-token vectors move.

    On several ranks in their logical order: all must have the same, and each sees only its own
    logits' memory.
    """

    def __init__(self, logits: torch.Tensor, inplace: bool, alone: bool):
        lead = logits.dim() - 1
        if lead == 1 and not inplace:  # already a row of tokens
            self.permutation: list[int] | None = None
            self.shape: Sequence[int] = logits.shape[:1]
            self.rows, self.is_plain = logits.shape[0], True
            return
        # by descending stride; by hand, because a traced stride may be compared but not sorted
        order: list[int] = []
        for d in range(lead):
            at = len(order)
            while alone and at > 0 and logits.stride(order[at - 1]) < logits.stride(d):
                at -= 1
            order.insert(at, d)
        self.permutation = None if order == list(range(lead)) else order
        self.shape = [logits.shape[d] for d in order]
        # whether rows are the caller's tokens
        self.rows, self.is_plain = math.prod(self.shape), lead == 1
        if inplace and self.rows and not self._can_be_overwritten(logits, order):
            raise ValueError(
                "inplace=True needs logits whose leading dimensions form one row stride and whose "
                f"elements do not share memory, got shape {list(logits.shape)} with strides "
                f"{list(logits.stride())}"
            )

    def _can_be_overwritten(self, logits, order) -> bool:
        sizes = [(logits.shape[d], logits.stride(d)) for d in order if logits.shape[d] != 1]
        collapses = all(s == n_next * s_next for (_, s), (n_next, s_next) in zip(sizes, sizes[1:]))
        row, column, width = sizes[-1][1] if sizes else 0, logits.stride(-1), logits.shape[-1]
        apart = row > (width - 1) * column or column > (self.rows - 1) * row
        return collapses and (self.rows == 1 or row > 0) and (width <= 1 or column > 0) and apart

    def flatten(self, x: torch.Tensor) -> torch.Tensor:
        """[.., *] -> [N, *]"""
        trailing = x.shape[len(self.shape) :]
        if self.permutation is not None:
            x = x.permute(*self.permutation, *range(len(self.shape), x.dim()))
        return x.reshape(self.rows, *trailing) if len(self.shape) != 1 else x

    def restored(self, outputs, names: tuple[str, ...]) -> list[torch.Tensor]:
        """Statistics [N, *] by rows -> [.., *] of the caller's tokens."""
        return [self.unflatten(x) for x in outputs]

    def unflatten(self, x: torch.Tensor) -> torch.Tensor:
        """[N, *] -> [.., *]"""
        if len(self.shape) == 1:
            return x
        trailing = x.shape[1:]
        x = x.view([*self.shape, *trailing])
        if self.permutation is None:
            return x
        lead = len(self.shape)
        return x.permute(
            *(self.permutation.index(d) for d in range(lead)), *range(lead, lead + len(trailing))
        )
