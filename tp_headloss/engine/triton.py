"""The Triton backend: CUDA, or any device through Triton's interpreter. See `backend` for the contract."""

from __future__ import annotations

import torch

from .. import statistics
from ..request import Request
from ..statistics import entries_triton
from ..statistics.divergence_triton import divergence_kernel
from ..statistics.entries import distinct_entries
from ..statistics.records_triton import Inputs
from ..symmetric_memory_triton import SharedMemory
from . import kernels
from .device_inputs import inputs_key, inputs_of
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
from .linear_triton import linear_gradient, linear_statistics  # noqa: F401 (part of the contract)
from .sums_triton import scale, token_sums, token_sums_gradient  # noqa: F401 (part of the contract)

FUSED_SUMS = True
MOST_ENTRIES = 1024  # that one program compares with each other


def shares_memory(logits) -> bool:
    """Whether packets may meet in symmetric memory."""
    return logits.is_cuda and logits.shape[0] > 0


NOT_SHARED = SharedMemory()


def _shared(memory) -> SharedMemory:
    return NOT_SHARED if memory is None else SharedMemory(memory.turns, memory.slot, memory.peers)


def local_statistics(packets, request: Request, memory=None):
    """Write this rank's packets [chunks, rows, N] fp32, into `memory`'s slot if there is one."""
    n_rows, facts = packets.shape[-1], request.facts
    if n_rows == 0:
        return
    (inputs, prepared), shared, device = inputs_of(request), _shared(memory), packets.device
    rows, streamed, variant = prepared.rows, inputs, (device, prepared.variant, shared.slot)
    how = statistics_launch(facts.chunk_size, inputs.teacher is not None or rows.has_tail)
    if inputs.entries is not None:
        streamed = inputs._replace(entry_log_probs=None)
        streamed = streamed if rows.has_tail else streamed._replace(entries=None, n_entries=None)
    launch(
        kernels.statistics_kernel, n_rows * facts.chunks, variant, how,
        packets, streamed, shared, rows.statistics, rows.packet, n_rows, *prepared.bounds,
    )  # fmt: skip
    if inputs.entries is not None:
        launch(
            entries_triton.entry_statistics_kernel, n_rows * facts.chunks, variant, entries_launch(inputs.n_entries),
            packets, inputs, shared, rows.packet, n_rows, *prepared.bounds,
        )  # fmt: skip


def merge_packets(packets, request: Request, memory=None) -> list[torch.Tensor]:
    """Packets of all ranks (this rank's, whose peers' lie in `memory`) -> [merged rows, values, *flags]."""
    facts, x, n_rows = request.facts, request.tensors, packets.shape[-1]
    outputs = request.layout.empty_outputs(packets, n_rows, torch.float32)
    if n_rows == 0:
        return outputs
    rows, shared, counts = device_layout(request.layout), _shared(memory), (facts.packets, facts.chunks)
    inputs = Inputs(labels=x.labels)
    if x.scales is not None or facts.student_scale != 1.0 or facts.teacher_scale != 1.0:
        inputs = inputs._replace(scales=x.scales, student_scale=facts.student_scale)
    keys = pointer_key(x.labels), pointer_key(x.scales), inputs.student_scale is None
    launch(
        kernels.merge_kernel, ceil_div(n_rows, MERGE.block), (packets.device, rows, *counts, shared.slot, *keys), MERGE,
        rows.outputs(outputs), packets, inputs, shared, rows.merge, rows.merge_rows, n_rows, *counts,
    )  # fmt: skip
    return outputs


def second_statistics(packets, request: Request, merged):
    """Write this rank's packets [chunks, rows, N] of the second exchange."""
    facts, rows, n_rows = request.facts, device_layout(request.layout), request.tensors.logits.shape[0]
    if n_rows == 0:
        return
    inputs, prepared = inputs_of(request)
    inputs, variant = inputs._replace(labels=None, column_weight=None), (packets.device, prepared.variant)
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
    inputs, prepared = inputs_of(request)
    if inputs.entries is not None:
        inputs = inputs._replace(entry_log_probs=None, entries=None, n_entries=None)
    if grads.keys().isdisjoint(statistics.TOPK_TEACHER):
        _gradient(out, request, inputs, prepared.variant, merged, grads)
        return
    # at the entries everything is computed once more, and rounded once
    at_entries, picked, everywhere = _gradient_at_entries(request, merged, grads)
    others = {name: g for name, g in grads.items() if name not in statistics.TOPK_TEACHER}
    elsewhere = others
    if everywhere is not None:
        elsewhere = {**others, "lse" if len(everywhere) == 1 else "everywhere": everywhere}
    _gradient(out, request, inputs, prepared.variant, merged, elsewhere)
    entries = request.tensors.entries
    inputs = inputs._replace(x=picked, x_row=picked.stride(0), x_column=1, entries=entries, n_entries=entries.shape[1])
    _gradient(out, request, inputs, inputs_key(inputs), merged, {**others, "at_entries": at_entries})


def _gradient(out, request: Request, inputs: Inputs, variant, merged, grads: dict):
    """The gradient of everything, or with inputs.entries of these ids alone; variant: of these inputs."""
    (n_rows, width), strides, facts, rows = out.shape, out.stride(), request.facts, device_layout(request.layout)
    names = tuple(grads)
    hooks = rows.gradient_hooks(names)
    how = gradient_launch(width, names) if inputs.entries is None else entries_launch(inputs.n_entries)
    upstream = rows.grads(*map(grads.get, rows.grads._fields))
    padded = facts.valid_width < width
    variant = (
        out.device, rows, hooks, padded, pointer_key(out), int_key(strides[0]), int_key(strides[1]), variant, names,
        pointer_key(upstream.everywhere),
    )  # fmt: skip
    launch(
        kernels.gradient_kernel, n_rows * ceil_div(inputs.n_entries or width, how.block), variant, how,
        out, *strides, inputs, merged, upstream, hooks, rows.merged,
        n_rows, facts.start, facts.valid_width, padded,
    )  # fmt: skip


def _gradient_at_entries(request: Request, merged, grads: dict):
    """Compute what the entries add to the gradient at their ids [N, E], read their logits [N, E], and collect [4, N] of
    what they add at all other ids, or [1, N] if that is nothing but an upstream gradient of lse."""
    facts, rows, inputs = request.facts, device_layout(request.layout), inputs_of(request)[0]._replace(labels=None)
    n_rows = request.tensors.logits.shape[0]
    at_entries = merged.new_empty((n_rows, inputs.n_entries))
    picked = request.tensors.logits.new_empty((n_rows, inputs.n_entries))
    everywhere = None
    if any(name in grads for name in ("topk_log_mass", "tail_log_mass", "tail_entropy", "vocab_jsd")):
        as_lse = inputs.student_scale is None and not rows.has_tail
        everywhere = merged.new_empty((1 if as_lse else 4, n_rows))
    upstream = rows.grads(**{name: g for name, g in grads.items() if name in (*statistics.TOPK_TEACHER, "lse")})
    variant = (
        merged.device, rows, everywhere is None, inputs_key(inputs), tuple(map(dtype_key, upstream)),
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
