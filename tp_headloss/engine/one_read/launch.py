"""The launch of `one_read.cu`: its arguments, and what calls of one kind share.

A launch has more than fifty arguments, most of them the same for all calls of a kind. `Kind` works
these out once; a call copies the struct and fills in addresses. All outputs are allocated before
the launch, whose programs write to them while others still read logits: nothing can be allocated,
or decided on the host, between the statistics and the gradient.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any, NamedTuple

import torch

from ...statistics import MaybeNone
from ..backend import load_backend
from ..reductions import FusedReduction
from ..request import Facts, Request, Tensors, places_of
from ..transports.symmetric_memory import find_symmetric_memory
from .cuts import (
    columns_of,
    columns_of_vector,
    cuts_of_call,
    obstacle_to_rows,
    obstacle_to_teacher,
    teacher_vectors,
    whole_vectors,
)
from .kernel import Memory, kernel_of, turns_on
from .params import (
    ADDRESSES,
    GIVENS,
    OF_TEACHER,
    OUTPUTS,
    TERMS,
    VALUES,
    Cuts,
    Params,
    words_of,
)

_log = logging.getLogger("tp_headloss")


def has_teacher(facts: Facts) -> bool:
    """Whether a call compares with a teacher."""
    return not {*facts.want}.isdisjoint(OF_TEACHER)


def _copy(logits: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """A copy that the kernel can read, for a rank whose peers' logits may need none. dtype: of the
    student's logits."""
    n_rows, width = logits.shape
    width = min(width, columns)
    copy = logits.new_zeros((n_rows, whole_vectors(width, dtype)))
    copy[:, :width] = logits[:, :width]
    return copy


# of a device: all of them, because graphs may hold the oldest; None where it has no kernel
_alone: dict[int, list[Memory] | None] = {}


def memory_of(request: Request, cuts: Cuts) -> Memory | None:
    """Memory for the packets of a call, or None where the group has no symmetric memory, or there
    is no kernel."""
    facts, logits = request.facts, request.tensors.logits
    device, tempered = logits.device, is_tempered(facts, request.tensors.scales is not None)
    stores = words_of(facts.want, tempered, logits.dtype == torch.float32)
    numel = 4 * logits.shape[0] * cuts.pieces * facts.world_size * stores
    if facts.world_size > 1:
        found = find_symmetric_memory(request, numel, of_one_read=True)
        return None if found is None else found.one_read
    known = _alone.setdefault(device.index, [])
    if known and known[-1].half * 4 >= numel:
        return known[-1]
    if known is None or torch.cuda.is_current_stream_capturing():
        return None
    elements = 2 << max(numel - 1, 1 << 16).bit_length()
    buffer = torch.zeros(elements, dtype=torch.float32, device=device)
    try:
        known.append(Memory(buffer, [buffer.data_ptr()], 0, 60_000))
    except (OSError, AttributeError, RuntimeError) as error:
        _log.warning("no launch that reads each logit once, two launches instead: %s", error)
        _alone[device.index] = known or None
        return None
    return known[-1]


class Rows(NamedTuple):
    """Facts of logits [N, width], of their gradient and of a teacher that calls of one kind
    share."""

    n_rows: int
    width: int
    stride: int  # of rows, in elements
    gradient_stride: int
    teacher_stride: int
    teacher_vectors: int  # see `teacher_vectors`
    has_scales: bool  # temperatures beside a teacher are per token
    n_entries: int  # of a top-K teacher, 0 without
    dtype: torch.dtype
    device: torch.device
    wide_labels: bool  # int64

    @classmethod
    def of(cls, request: Request, logits: torch.Tensor, gradient: torch.Tensor) -> Rows:
        x = request.tensors
        n_rows, width = logits.shape
        return cls(
            n_rows,
            width,
            logits.stride(0),
            gradient.stride(0),
            0 if x.teacher is None else x.teacher.stride(0),
            teacher_vectors(x._replace(logits=logits)),
            x.scales is not None,
            0 if x.entries is None else x.entries.shape[1],
            logits.dtype,
            logits.device,
            x.labels.dtype == torch.int64,
        )


def is_tempered(facts: Facts, has_scales: bool) -> bool:
    """Whether the student has another temperature beside its teacher.

    has_scales: there is one for each token.
    """
    return has_teacher(facts) and (has_scales or facts.student_scale != 1.0)


def flags_of(facts: Facts, plan, function, rows: Rows) -> list[str]:
    """Return the flags that a kernel is compiled with, see `numbers.cuh`. function: a `RowFunction`
    or None."""
    has_entropy_term = function is not None and function.has_entropy
    if function is None:
        has_entropy_term = "entropy" in [name for name, *_ in plan.gradients or ()]
    more = {
        "ENTROPY_TERM": has_entropy_term,
        "HALF": rows.dtype == torch.float16,
        "FLOAT32": rows.dtype == torch.float32,
        "TEACHER_FLOAT32": rows.teacher_vectors > 1,
        "SOFTCAP": facts.softcap != 0.0,
        "TEMPERED": is_tempered(facts, rows.has_scales),
    }
    flags = [*map(str.upper, facts.want), *[name for name, wanted in more.items() if wanted]]
    if rows.n_entries:
        flags.append(f"LISTED={-(-rows.n_entries // 32)}")
    return flags


class Kind:
    """Everything that calls of one kind share: kernel, its argument but for addresses, and the
    tensors it writes."""

    def __init__(self, facts: Facts, layout, plan, function, cuts: Cuts, rows: Rows, number: float):
        """function: a `RowFunction` or None. number: the divisor of the loss; 0: it is the count,
        or in memory."""
        self.params = _params(facts, plan, cuts, rows, number)
        self.items, self.shared = rows.n_rows * cuts.pieces, cuts.slots * cuts.slot_bytes
        flags = flags_of(facts, plan, function, rows)
        self.kernel = kernel_of(rows.device, function and function.source, *flags)
        self.n_outputs = 2 + len(layout.flags)
        self.allocated = self._outputs(layout, plan, function, rows)
        self.places = self._places(layout, plan, function, rows.n_rows)
        # from which row of the last output on they are
        self.slopes = function.n_terms if function else None
        # `LateGradient`s by the places of what they read, of which there are few: strides and
        # alignments of this shape
        self.late: dict[tuple, Any] = {}

    def _outputs(self, layout, plan, function, rows: Rows) -> list[torch.Tensor]:
        """The kind of each output, for `empty_like`, the quickest way to allocate; expanded, so
        that they take no memory."""
        like = torch.empty((), dtype=torch.float32, device=rows.device)
        outputs = layout.empty_outputs(like, rows.n_rows, torch.float32)
        outputs += [like, like.new_empty(len(plan.statistics) + 1), like.new_empty(2).double()]
        if function:
            outputs.append(like.new_empty((function.n_terms + len(TERMS), rows.n_rows)))
        return [x.new_empty(()).expand(x.shape) for x in outputs]

    def _places(self, layout, plan, function, n_rows: int) -> list[tuple[int, int] | None]:
        """Where `OUTPUTS` and what stands after them lie: in which output, how many bytes from its
        start; None: nowhere."""
        names = *layout.flags, "loss", "sums", "inverse", "found"
        at = {name: (i, 0) for i, name in enumerate(names, 2)}
        for i, rows in enumerate((layout.merged, layout.values)):
            at |= {name: (i, 4 * n_rows * k) for k, name in enumerate(rows)}
        missing = {*layout.merged, *layout.values, *layout.flags} - {*OUTPUTS}
        assert not missing, f"the kernel writes no {sorted(missing)}"
        twice = {*layout.merged} & {*layout.values}
        assert not twice, f"{sorted(twice)} are names of merged rows and of values"
        places = [at.get(name) for name in OUTPUTS]
        for i, name in enumerate(plan.statistics):  # no name: of a term of the row function
            places.append(at[name] if name else (at["found"][0], 4 * n_rows * i))
        places += [None] * (VALUES - len(plan.statistics))
        return [*places, at["found"] if function else None]

    def argument(
        self, memory: Memory, calls: list[int], allocated: list[torch.Tensor], given: list[int]
    ) -> Params:
        """The kernel's argument. calls, given: addresses."""
        params, starts = Params.from_buffer_copy(self.params), [x.data_ptr() for x in allocated]
        places = [0 if place is None else starts[place[0]] + place[1] for place in self.places]
        ADDRESSES.pack_into(params, 0, *calls, *places, *given, *[0] * (GIVENS - len(given)))
        params.memory, params.half, params.rank = memory.addresses, memory.half, memory.rank
        params.timeout = memory.timeout_ms * 1_000_000
        return params


def _params(facts: Facts, plan, cuts: Cuts, rows: Rows, number: float) -> Params:
    """The kernel's argument but for addresses."""
    factors = {
        f"{name}_{'square' if squared else 'factor'}": 2 * c if squared else c
        for name, c, squared in plan.gradients or ()
    }
    columns = columns_of_vector(rows.dtype)
    width = whole_vectors(min(rows.width, facts.chunks * cuts.chunk * columns), rows.dtype)
    return Params(
        coefficients=(ctypes.c_float * VALUES)(*plan.coefficients),
        n_values=len(plan.statistics),
        squares=plan.squares,
        negatives=plan.negatives,
        bools=sum((name == "hits") << i for i, name in enumerate(plan.statistics)),
        start=facts.start,
        ignore_index=facts.ignore_index,
        stride=rows.stride,
        gradient_stride=rows.gradient_stride,
        teacher_stride=rows.teacher_stride,
        number=number,
        **factors,
        before=facts.scale / facts.softcap if facts.softcap else 1.0,
        scale=(facts.softcap or facts.scale) / facts.temperature,
        teacher_scale=facts.teacher_scale,
        student_scale=facts.student_scale,
        beta=facts.beta,
        rows=rows.n_rows,
        width=width,
        valid_width=facts.valid_width,
        padding=(whole_vectors(rows.width, rows.dtype) - width) // columns,
        wide_labels=rows.wide_labels,
        n_entries=rows.n_entries,
        **cuts._asdict(),
        ranks=facts.world_size,
    )


kind_of = functools.lru_cache(maxsize=1024)(Kind)


class Upstream(NamedTuple):
    """Which upstream gradient of the loss a forward writes the gradient for; by default 1."""

    given: torch.Tensor | MaybeNone = None  # [] fp32
    # the one that the record of this number foresees: see `kernel.Memory`
    record: int | MaybeNone = None


def statistics_and_gradient(
    request: Request, reduction: FusedReduction, inplace: bool, upstream: Upstream
):
    """Compute what `merge_packets` and `token_sums` do, and the gradient, in one launch.

    Returns [merged rows, values, *flags]; the loss, its sums, [1 / its divisor, the upstream
    gradient of the loss that the gradient is written for, NaN if it is not], and derivatives [6, N]
    by `TERMS` of a row function's loss, or None; the gradient [N, width]; how the backward
    completes it (`Late`), or None where the upstream gradient is known.
    """
    read = _readable(request, inplace)
    facts, x = read.facts, read.tensors
    cuts = cuts_of_call(read)
    memory = memory_of(read, cuts)
    assert memory is not None
    memory.expect_alive()
    # its own version counter: the gradient is no change of what autograd saves
    over_logits = inplace and read is request
    gradient = x.logits.data if over_logits else _empty_gradient(x.logits)
    plan, weight, denominator, function, inputs = reduction
    number, divisor = 0.0, None  # the divisor is the count
    if isinstance(denominator, torch.Tensor):
        divisor = denominator
    elif denominator is not None:
        number = float(denominator) or float("inf")
    rows = Rows.of(read, x.logits, gradient)
    kind = kind_of(facts, request.layout, plan, function, cuts, rows, number)
    allocated = [*map(torch.empty_like, kind.allocated)]
    forecast = None if upstream.record is None else memory.forecast(upstream.record)
    arguments = (
        *(x.logits, gradient, x.labels, weight, x.temperatures, x.teacher, x.scales),
        *(x.entries, x.entry_log_probs, upstream.given, forecast, divisor),
    )
    calls = [0 if tensor is None else tensor.data_ptr() for tensor in arguments]
    params = kind.argument(memory, calls, allocated, [given.data_ptr() for given in inputs])
    with turns_on(x.logits.device):
        kind.kernel.launch(params, kind.items, kind.shared)
    if read is not request:
        gradient = _laid_out_as(request.tensors.logits, gradient, inplace)
    late = None
    if forecast is not None:
        late = late_gradient(kind, forecast, request, reduction, gradient)
    outputs, reduced = allocated[: kind.n_outputs], allocated[kind.n_outputs :]
    loss, sums, inverse, *found = reduced
    slopes = found[0][kind.slopes :] if found else None
    return outputs, (loss, sums, inverse, slopes), gradient, late


def _readable(request: Request, inplace: bool) -> Request:
    """The request, with copies where the kernel cannot read logits where they are: on several
    ranks, whose logits may lie in other ways, all of them take this launch."""
    logits, teacher = request.tensors.logits, request.tensors.teacher
    if obstacle_to_rows(logits, inplace) is None and obstacle_to_teacher(request) is None:
        return request
    columns = columns_of(request)
    copies = {"logits": _copy(logits, columns, logits.dtype)}
    if teacher is not None:
        copies["teacher"] = _copy(teacher, columns, logits.dtype)
    return request._replace(tensors=request.tensors._replace(**copies))


def _laid_out_as(logits: torch.Tensor, gradient: torch.Tensor, inplace: bool) -> torch.Tensor:
    """The gradient of a copy of the logits, as one of the logits. inplace: over them."""
    result = logits.data if inplace else torch.empty_like(logits)
    read = gradient[:, : logits.shape[1]]
    result.zero_()[:, : read.shape[1]] = read
    return result


def _empty_gradient(logits: torch.Tensor) -> torch.Tensor:
    """Memory for a gradient whose rows have whole vectors."""
    n_rows, width = logits.shape
    whole = whole_vectors(width, logits.dtype)
    if width == whole:
        return torch.empty_like(logits, memory_format=torch.contiguous_format)
    return logits.new_empty((n_rows, whole))[:, :width]


class Late(NamedTuple):
    """How the backward of a call completes the gradient, and the record of upstream gradients that
    it adds to."""

    gradient: Any  # a `LateGradient`
    forecast: torch.Tensor

    def complete(self, gradient: torch.Tensor, loss: torch.Tensor, tensors: Tensors, saved) -> bool:
        """Complete the gradient [N, width] for an upstream gradient of the loss. False, and nothing
        is done, where hooks of saved tensors have laid something out in another way.

        tensors, saved: those of the request, and the others, as `autograd.Statistics` has them.
        """
        merged, _valid, weight, inverse, *values = saved
        if not self.gradient.serves(gradient, tensors, merged, inverse, *values):
            return False
        is_slopes = values[0].dim() == 2  # of a row function
        terms = values[0] if is_slopes else values
        with turns_on(gradient.device):
            self.gradient(gradient, self.forecast, tensors, merged, weight, inverse, terms, loss)
        return True


def late_gradient(
    kind: Kind,
    forecast: torch.Tensor,
    request: Request,
    reduction: FusedReduction,
    gradient: torch.Tensor,
) -> Late:
    """How the backward of this call completes the gradient that its forward may have written.
    forecast: its record of upstream gradients."""
    place = places_of(request.tensors), reduction.weight is None
    if place not in kind.late:
        make = load_backend("triton").LateGradient
        has_slopes, strides = kind.slopes is not None, gradient.stride()
        kind.late[place] = make(request, reduction.plan, has_slopes, reduction.weight, strides)
    return Late(kind.late[place], forecast)
