"""The Triton backend: CUDA, or any device through Triton's interpreter. See `backend` for the contract."""

from __future__ import annotations

import torch

from .. import statistics
from ..request import Request
from ..statistics import entries_triton
from ..statistics.divergence_triton import divergence_kernel
from ..statistics.entries import distinct_entries
from ..statistics.records_triton import Inputs, Outputs
from ..symmetric_memory_triton import SharedMemory
from . import kernels
from .device_layout import device_layout
from .launch import (
    INTERPRETED,
    MERGE,
    Launch,
    ceil_div,
    dtype_key,
    entries_launch,
    gradient_launch,
    int_key,
    launch,
    next_power_of_2,
    pointer_key,
    statistics_launch,
)
from .sums_triton import scale, token_sums, token_sums_gradient  # noqa: F401 (part of the contract)

FUSED_SUMS = True
MOST_ENTRIES = 1024  # that one program compares with each other


def shares_memory(logits) -> bool:
    """Whether packets may meet in symmetric memory."""
    return logits.is_cuda and logits.shape[0] > 0


def _factors(request: Request) -> tuple[float | None, float | None]:
    """The factors before and after the softcap; None where nothing is multiplied."""
    facts = request.facts
    if facts.softcap:
        return facts.scale / facts.softcap, facts.softcap / facts.temperature
    before = facts.scale / facts.temperature
    return (before, None) if before != 1.0 or request.tensors.temperatures is not None else (None, None)


NOTHING = Inputs(*(None,) * len(Inputs._fields))


def _is_scaled(request: Request) -> bool:
    """Whether teacher or student are multiplied by anything where they meet."""
    facts = request.facts
    return request.tensors.scales is not None or facts.teacher_scale != 1.0 or facts.student_scale != 1.0


def inputs_of(request: Request) -> Inputs:
    """The tensors and numbers of a call as kernels take them."""
    x, facts = request.tensors, request.facts
    row, column = x.logits.stride()
    teacher_row, teacher_column = (None, None) if x.teacher is None else x.teacher.stride()
    scales = (facts.teacher_scale, facts.student_scale) if _is_scaled(request) else (None, None)
    return Inputs(
        x.logits, row, column, x.labels, x.bias, x.temperatures, x.column_weight, x.teacher, teacher_row,
        teacher_column, x.scales, *scales, x.entries, x.entry_log_probs,
        None if x.entries is None else x.entries.shape[1], x.logits.shape[1], facts.chunk_size, *_factors(request),
        facts.beta,
    )  # fmt: skip


def _inputs_key(inputs: Inputs) -> tuple:
    """What Triton compiles into a kernel about the inputs."""
    pointers = (
        inputs.x, inputs.labels, inputs.bias, inputs.temperature, inputs.column_weight, inputs.teacher, inputs.scales,
        inputs.entries, inputs.entry_log_probs,
    )  # fmt: skip
    strides = [int_key(inputs.x_row), int_key(inputs.x_column)]
    if inputs.teacher is not None:
        strides += int_key(inputs.teacher_row), int_key(inputs.teacher_column)
    sizes = inputs.n_entries, inputs.width, inputs.chunk_size
    switches = inputs.pre is None, inputs.post is None, inputs.student_scale is None
    return *[x if x is None else (x.dtype, x.data_ptr() % 16) for x in pointers], *strides, *sizes, *switches


def _shared(memory) -> SharedMemory:
    return SharedMemory() if memory is None else SharedMemory(memory.turns, memory.slot, memory.peers)


def local_statistics(packets, request: Request, memory=None):
    """Write this rank's packets [chunks, rows, N] fp32, into `memory`'s slot if there is one."""
    facts, rows = request.facts, device_layout(request.layout)
    n_rows = request.tensors.logits.shape[0]
    if n_rows == 0:
        return
    has_entries = request.tensors.entries is not None
    inputs = inputs_of(request)
    streamed = inputs
    if has_entries:
        streamed = inputs._replace(entry_log_probs=None)
        streamed = streamed if rows.has_tail else streamed._replace(entries=None, n_entries=None)
    how = statistics_launch(facts.chunk_size, inputs.teacher is not None or rows.has_tail)
    numbers = n_rows, facts.start, facts.valid_width, facts.chunks, facts.ignore_index
    shared, device = _shared(memory), packets.device
    launch(
        kernels.statistics_kernel, n_rows * facts.chunks, (device, rows, shared.slot, _inputs_key(streamed)), how,
        packets, streamed, shared, rows.statistics, rows.packet, *numbers,
    )  # fmt: skip
    if has_entries:
        launch(
            entries_triton.entry_statistics_kernel, n_rows * facts.chunks,
            (device, rows, shared.slot, _inputs_key(inputs)), entries_launch(inputs.n_entries),
            packets, inputs, shared, rows.packet, *numbers,
        )  # fmt: skip


def merge_packets(packets, request: Request, memory=None) -> list[torch.Tensor]:
    """Packets of all ranks (this rank's, whose peers' lie in `memory`) -> [merged rows, values, *flags]."""
    layout, facts, n_rows = request.layout, request.facts, packets.shape[-1]
    outputs = layout.empty_outputs(packets, n_rows, torch.float32)
    if n_rows == 0:
        return outputs
    rows, shared = device_layout(layout), _shared(memory)
    flags = dict(zip(layout.flags, outputs[2:]))
    out = Outputs(*outputs[:2], *(flags.get(name) for name in ("valid", "argmax", "hits")))
    student_scale = facts.student_scale if _is_scaled(request) else None
    inputs = NOTHING._replace(labels=request.tensors.labels, scales=request.tensors.scales, student_scale=student_scale)
    variant = packets.device, rows, facts.packets, facts.chunks, shared.slot, _inputs_key_of_merge(inputs)
    launch(
        kernels.merge_kernel, ceil_div(n_rows, MERGE.block), variant, MERGE,
        out, packets, inputs, shared, rows.merge, rows.merge_rows, n_rows, facts.packets, facts.chunks,
    )  # fmt: skip
    return outputs


def _inputs_key_of_merge(inputs: Inputs) -> tuple:
    return pointer_key(inputs.labels), pointer_key(inputs.scales), inputs.student_scale is None


def second_statistics(packets, request: Request, merged):
    """Write this rank's packets [chunks, rows, N] of the second exchange."""
    facts, rows, n_rows = request.facts, device_layout(request.layout), request.tensors.logits.shape[0]
    if n_rows == 0:
        return
    inputs = inputs_of(request)._replace(labels=None, column_weight=None)
    variant = packets.device, rows, _inputs_key(inputs)
    if inputs.entries is None:
        launch(
            divergence_kernel, n_rows * facts.chunks, variant, statistics_launch(facts.chunk_size, True),
            packets, inputs, merged, rows.merged, rows.second, n_rows, facts.valid_width, facts.chunks,
        )  # fmt: skip
        return
    launch(
        entries_triton.entry_divergence_kernel, n_rows * facts.chunks, variant, entries_launch(inputs.n_entries),
        packets, inputs, merged, rows.merged, rows.second, n_rows, facts.start, facts.valid_width, facts.chunks,
    )  # fmt: skip


def logits_gradient(out, request: Request, merged, grads: dict):
    """Write d loss / d logits into `out` [N, width], which may be the logits; grads: upstream gradients [N] by name."""
    if request.tensors.logits.numel() == 0:
        return
    if INTERPRETED and out.dtype == torch.bfloat16:  # the interpreter truncates to bf16, hardware rounds
        exact = torch.empty_like(out, dtype=torch.float32)
        logits_gradient(exact, request, merged, grads)
        out.copy_(exact)
        return
    inputs = inputs_of(request)
    if inputs.entries is not None:
        inputs = inputs._replace(entry_log_probs=None, entries=None, n_entries=None)
    if not any(name in grads for name in statistics.TOPK_TEACHER):
        _gradient(out, request, inputs, merged, grads)
        return
    # at the entries everything is computed once more, and rounded once
    at_entries, picked, everywhere = _gradient_at_entries(request, merged, grads)
    others = {name: g for name, g in grads.items() if name not in statistics.TOPK_TEACHER}
    elsewhere = others
    if everywhere is not None:
        elsewhere = {**others, "lse" if len(everywhere) == 1 else "everywhere": everywhere}
    _gradient(out, request, inputs, merged, elsewhere)
    entries = request.tensors.entries
    inputs = inputs._replace(x=picked, x_row=picked.stride(0), x_column=1, entries=entries, n_entries=entries.shape[1])
    _gradient(out, request, inputs, merged, {**others, "at_entries": at_entries})


def _gradient(out, request: Request, inputs: Inputs, merged, grads: dict):
    """The gradient of everything, or with inputs.entries of these ids alone."""
    (n_rows, width), facts, rows = out.shape, request.facts, device_layout(request.layout)
    hooks = rows.gradient_hooks(tuple(grads))
    how = gradient_launch(width, grads) if inputs.entries is None else entries_launch(inputs.n_entries)
    upstream = rows.grads(*map(grads.get, rows.grads._fields))
    padded = facts.valid_width < width
    variant = (
        out.device, rows, hooks, padded, pointer_key(out), *map(int_key, out.stride()), _inputs_key(inputs),
        tuple(grads), pointer_key(upstream.everywhere),
    )  # fmt: skip
    launch(
        kernels.gradient_kernel, n_rows * ceil_div(inputs.n_entries or width, how.block), variant, how,
        out, *out.stride(), inputs, merged, upstream, hooks, rows.merged,
        n_rows, facts.start, facts.valid_width, padded,
    )  # fmt: skip


def _gradient_at_entries(request: Request, merged, grads: dict):
    """What the entries add at their ids [N, E], their logits [N, E], and [4, N] of what they add at all others, or
    [1, N] if that is nothing but an upstream gradient of lse."""
    facts, rows, inputs = request.facts, device_layout(request.layout), inputs_of(request)._replace(labels=None)
    n_rows = request.tensors.logits.shape[0]
    at_entries = merged.new_empty((n_rows, inputs.n_entries))
    picked = request.tensors.logits.new_empty((n_rows, inputs.n_entries))
    everywhere = None
    if any(name in grads for name in ("topk_log_mass", "tail_log_mass", "tail_entropy", "vocab_jsd")):
        as_lse = inputs.student_scale is None and not rows.has_tail
        everywhere = merged.new_empty((1 if as_lse else 4, n_rows))
    upstream = rows.grads(**{name: g for name, g in grads.items() if name in (*statistics.TOPK_TEACHER, "lse")})
    variant = (
        merged.device, rows, everywhere is None, _inputs_key(inputs), tuple(map(dtype_key, upstream)),
        pointer_key(picked),
    )  # fmt: skip
    launch(
        entries_triton.entry_gradient_kernel, n_rows, variant, entries_launch(inputs.n_entries),
        at_entries, picked, everywhere, inputs, merged, upstream, rows.merged,
        n_rows, facts.start, facts.valid_width, rows.has_tail,
    )  # fmt: skip
    return at_entries, picked, everywhere


def entries(ids, log_probs, mask, factor, renormalize, vocab_size):
    """A top-K teacher's entries, see `statistics.entries`, in one kernel."""
    n_rows, n_entries = ids.shape
    how = Launch(next_power_of_2(n_entries), 1 if n_entries <= 128 else 4)
    if how.block > MOST_ENTRIES or log_probs.dtype == torch.float64:
        return distinct_entries(ids, log_probs, mask, factor, renormalize, vocab_size)
    out = torch.empty_like(ids, dtype=torch.int32), torch.empty_like(log_probs, dtype=torch.float32)
    factors, factor = (factor, 1.0) if isinstance(factor, torch.Tensor) else (None, factor)
    if n_rows:
        vectors = ids, log_probs, mask, factors
        launch(
            entries_triton.entries_kernel, n_rows,
            (ids.device, n_entries, vocab_size, renormalize, factor, *map(pointer_key, vectors)), how,
            *out, *vectors, n_entries, vocab_size, factor, renormalize, min(32, how.block),
        )  # fmt: skip
    return out
