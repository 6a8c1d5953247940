"""A loss whose forward writes the gradient, in one launch that reads each logit once: 4 bytes of
memory traffic for a logit of 2 bytes, where a forward and a backward of their own move 6 (for one
of 4 bytes 8 and 12); with a teacher's logits beside it 6 and 10. The kernel is
`one_read/one_read.cu`.

On several ranks the exchange is inside of that launch: ranks write packets to each other's
symmetric memory and wait for them there, so a rank that does not come is noticed on the device. Its
peers' results are NaN from then on, and their next call raises. Results have equal bits on all
ranks, and on 1, 2, 4 or 8 of them; those of two launches may differ in the last bit, because sums
are added up in another order.

Whether a call takes this way depends on facts that its ranks share alone: they must all take the
same.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ..backend import load_backend
from ..one_read import launch as one_read_launch
from ..one_read.cuts import (
    PACKETS,
    columns_of,
    columns_of_vector,
    cuts_of,
    cuts_of_call,
    has_entries,
    obstacle_to_rows,
    obstacle_to_teacher,
    teacher_vectors,
)
from ..one_read.launch import Upstream, memory_of
from ..one_read.params import ENTRIES, FLAGS, RANKS, SECOND_ROUNDS, TERMS, VALUES
from ..passes import Reduced
from ..reductions import FusedReduction
from ..request import Facts, Request, Tensors, without_gaps
from .way import Case, Found, Loss, Way

SUMMED = {*TERMS, "target_logit", "hits", "teacher_mass", "teacher_entropy"}
ALIGNED = 32  # columns of which a multiple has no gaps between the rows of a block
# of GPUs, logits of a rank, and columns of one rank and of one of several where it was faster
CAPABILITY, FEWEST, NARROWEST_ALONE, NARROWEST = (9, 0), 1 << 22, 2048, 4096
FEWEST_OF_TEACHER = 1 << 23  # logits of a rank beside as many of a teacher
NARROWEST_OF_ENTRIES = 16384  # columns of one rank beside a top-K teacher

UNDERFLOWS = (
    "bfloat16 logits beside inplace=True: a float16 gradient that is written for an upstream "
    "gradient of 1 underflows"
)
GONE = (
    "Options(inplace=True, gradient='forward') wrote the gradient of the loss over the logits, so "
    "that there is one backward, from the loss alone"
)


class OneRead(Way):
    """The forward writes the gradient in the launch that reads the logits: 4 bytes of memory
    traffic for a logit of 2 bytes, 6 with a teacher's.

    The first backward of the loss alone hands it over; others find theirs as in `Way`.
    """

    name = "one read"
    not_ready = (
        "a kernel and memory, which cannot be had here (see the log), or not while a graph is "
        "captured"
    )

    def __init__(self, inplace: bool, record: int):
        """record: of the upstream gradients that forwards foresee, see `one_read.kernel.Memory`."""
        super().__init__(inplace)
        self.upstream = Upstream(record=None if inplace else record)  # over the logits: for 1

    @staticmethod
    def obstacle(case: Case) -> str | None:
        if case.gradient == "backward":
            return "gradient='auto' or 'forward'"
        if not case.needs_gradient:
            return "logits that require a gradient, and grad mode"
        if case.inplace and case.request.tensors.logits.dtype == torch.float16:
            return UNDERFLOWS
        if not OneRead.is_demanded(case):
            if case.inplace:
                return "gradient='forward' beside inplace=True: the logits are gone before the backward"
            if found := obstacle_to_logits(case.request) or _obstacle_to_speed(case.request):
                return found
        reduction = case.loss.in_one_read
        if reduction is None:
            return case.loss.needs_in_one_read()
        return obstacle_to_loss(case.request, reduction, case.inplace)

    @classmethod
    def of_kind(cls, case: Case) -> OneRead:
        return cls(case.inplace, case.record)

    @staticmethod
    def is_demanded(case: Case) -> bool:
        return case.gradient == "forward" and case.needs_gradient

    def is_ready(self, request: Request) -> bool:
        return has_memory(request)

    def reduction(self, loss: Loss) -> FusedReduction | None:
        return loss.in_one_read

    def forward(self, request: Request, reduction) -> Found:
        assert reduction is not None
        outputs, reduced, gradient, late = one_read_launch.statistics_and_gradient(
            request, reduction, self.inplace, self.upstream
        )
        merged, values, *flags = outputs
        return Found(merged, (*values.unbind(0), *flags), Reduced(*reduced), gradient, late)

    def gradient_of_loss(self, ctx, saved, loss):
        if ctx.is_taken:
            return None
        *others, gradient = saved
        if self.inplace:  # written for an upstream gradient of 1
            gradient = without_gaps(gradient)
            load_backend(ctx.request.facts.backend).gradient_for(gradient, loss)
        else:
            gradient = gradient.clone() if ctx.has_hooks else gradient
            count = len(ctx.needs_input_grad) - 3
            tensors = Tensors(*others[:count])
            if not ctx.completion.complete(gradient, loss, tensors, others[count:]):
                return None
        ctx.is_taken = True  # only the first backward has the gradient that the forward wrote
        # which may be written to: autograd does not take that for a change of what it saved
        return gradient.data

    def gradient(self, ctx, request, merged, grads, *loss):
        if self.inplace:
            raise RuntimeError(GONE)
        return super().gradient(ctx, request, merged, grads, *loss)


class OneReadBlocks(NamedTuple):
    """Blocks of a linear head's logits whose statistics and gradient one launch has, where that is
    faster."""

    reduction: FusedReduction  # of all tokens, in rows
    upstream: torch.Tensor  # [] fp32 gradient of the loss that the gradients are for

    def found(
        self, request: Request, here: slice
    ) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
        """Write the gradient over a block's logits, and return its values [K, n] and flags; None:
        not by this way.

        here: the block's tokens.
        """
        if not self._serves(request):
            return None
        upstream, reduction = Upstream(self.upstream), self.reduction.of_rows(here)
        outputs, *_ = one_read_launch.statistics_and_gradient(request, reduction, True, upstream)
        _merged, values, *flags = outputs
        return values, flags

    def _serves(self, request: Request) -> bool:
        """Whether it is faster, and all ranks' blocks are without gaps."""
        obstacle = obstacle_to_logits(request) or _obstacle_to_speed(request)
        if obstacle or columns_of(request) % ALIGNED:
            return False
        return obstacle_to_loss(request, self.reduction, True) is None and has_memory(request)


def has_memory(request: Request) -> bool:
    """Return True if there is a kernel, and memory for the packets of its launches."""
    return memory_of(request, cuts_of_call(request)) is not None


def _obstacle_to_speed(request: Request) -> str | None:
    """Return the obstacle of a call that is smaller than those that were measured to be faster."""
    rows, columns = request.tensors.logits.shape[0], columns_of(request)
    narrowest = NARROWEST_ALONE if request.facts.world_size == 1 else NARROWEST
    if has_entries(request.facts):
        narrowest = NARROWEST_OF_ENTRIES
    fewest = FEWEST if request.tensors.teacher is None else FEWEST_OF_TEACHER
    for name, least, got in (
        ("columns", narrowest, columns),
        ("logits", fewest, rows * columns),
    ):
        if got < least:
            measured = "from which it was measured to be faster"
            return f"at least {least} {name} on each rank, {measured}, got {got}"
    return None


def obstacle_to_logits(request: Request) -> str | None:
    """Return what logits lack for one read."""
    device = request.tensors.logits.device
    if device.type != "cuda":
        return f"logits on a GPU, got {device.type}"
    if torch.version.hip is not None or _capability(device) != CAPABILITY:
        return "an NVIDIA GPU of compute capability {}.{}".format(*CAPABILITY)
    return None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def obstacle_to_loss(request: Request, reduction: FusedReduction, inplace: bool) -> str | None:
    """Return what a call lacks for a forward that writes the gradient. inplace: over the logits."""
    facts, x = request.facts, request.tensors
    vectors = Vectors(columns_of_vector(x.logits.dtype), teacher_vectors(x))
    if x.bias is not None:
        return "logits without a bias"
    in_rows = reduction.rows is not None
    found = (
        _obstacle_of_kind(facts, reduction.plan, in_rows, columns_of(request), vectors)
        or _obstacle_to_teacher(request)
        or _obstacle_to_entries(request)
        or obstacle_to_logits(request)
    )
    if found:
        return found
    known = x._replace(
        temperatures=None, teacher=None, scales=None, entries=None, entry_log_probs=None
    )
    others = known[2:]  # beside logits and labels
    if request.ways is None and any(tensor is not None for tensor in others):
        return "a call without class weights beside label smoothing, sets, given ids or ranks"
    return obstacle_to_rows(x.logits, inplace) if facts.world_size == 1 else None


def _obstacle_to_teacher(request: Request) -> str | None:
    """Return what a call with a teacher lacks; None for calls without."""
    facts, x = request.facts, request.tensors
    if x.teacher is None:
        return None
    dtype, wanted = x.teacher.dtype, {x.logits.dtype, torch.float32}
    if dtype not in wanted:
        return f"a teacher of the student's dtype or float32, {x.logits.dtype}, got {dtype}"
    found = obstacle_to_teacher(request) if facts.world_size == 1 else None
    return None if found is None else f"a teacher with {found}"


def _obstacle_to_entries(request: Request) -> str | None:
    """Return what a call with a top-K teacher lacks; None for calls without."""
    facts, entries = request.facts, request.tensors.entries
    if entries is None:
        return None
    if facts.student_scale != 1.0 or request.tensors.scales is not None:
        return "a top-K teacher beside which the student keeps its temperature"
    if entries.shape[1] > ENTRIES:
        return f"at most {ENTRIES} entries of a top-K teacher, got {entries.shape[1]}"
    return None


class Vectors(NamedTuple):
    """How logits fill vectors."""

    columns: int  # of the student's
    of_teacher: int  # beside each of them


@functools.lru_cache(maxsize=1024)
def _obstacle_of_kind(
    facts: Facts, plan, in_rows: bool, columns: int, vectors: Vectors
) -> str | None:
    """`obstacle_to_loss` as far as facts tell it that all ranks share."""
    statistics, n_terms = plan.statistics, len(plan.coefficients)
    terms, summed = statistics[:n_terms], statistics[n_terms * in_rows :]
    if not in_rows and not set(TERMS).issuperset(terms):
        return f"no terms but those of {list(TERMS)}, got terms of {list(terms)}"
    if not in_rows and len(set(terms)) < n_terms:
        return f"one term of a statistic, got terms of {list(terms)}"
    others = [*{*facts.want} - {*FLAGS}, *{*summed} - SUMMED]
    if others:
        return f"no statistics but {sorted({*FLAGS} | SUMMED)}, got {sorted({*others})}"
    rounds = [names for names in SECOND_ROUNDS if not {*names}.isdisjoint(facts.want)]
    if len(rounds) > 1 or (rounds and has_entries(facts)):
        kinds = " or ".join(str([*names]) for names in SECOND_ROUNDS)
        return f"{kinds}, and no top-K teacher beside them, got {list(facts.want)}"
    if len(statistics) > VALUES:
        return f"at most {VALUES} sums of terms and metrics, got {list(statistics)}"
    if facts.scale < 0:
        return f"a positive scale, got {facts.scale}"
    if columns % vectors.columns:
        return (
            f"equal shards of a multiple of {vectors.columns} ids, got {facts.vocab_size} ids on "
            f"{facts.world_size} ranks"
        )
    chunk = columns // vectors.columns // facts.chunks
    cuts = cuts_of(chunk, facts.chunks, vectors.of_teacher, has_entries(facts))
    if cuts.pieces * facts.world_size > PACKETS or facts.world_size > RANKS or cuts.slots < 4:
        return f"a smaller vocabulary, got {facts.vocab_size} ids"
    if facts.world_size > 1 and facts.transport not in ("auto", "symm_mem"):
        return f"symmetric memory, got transport={facts.transport!r}"
    return None
