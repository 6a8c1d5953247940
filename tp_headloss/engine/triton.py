"""The Triton backend: CUDA, or any device through Triton's interpreter. See `backend` for the
contract."""

import torch

from ..statistics import Layout, distinct_triton, softmax_triton
from ..statistics.records_triton import Inputs, LossGradient
from ..statistics.topk import distinct_entries
from . import at_ids_triton, kernels
from .device_inputs import inputs_of, room_at_lists
from .device_layout import DeviceLayout, device_layout
from .fp8_products_triton import add_to_weight, finish_hidden, turn_to_fp8  # noqa: F401 (part of the contract)
from .fp8_triton import split_gradient, units_of  # noqa: F401 (part of the contract)
from .launch import (
    AT_IDS,
    LABELS,
    MERGE,
    SETS,
    SETS_PROGRAMS,
    Launch,
    ceil_div,
    dtype_key,
    gradient_launch,
    int_key,
    launch,
    list_launch,
    next_power_of_2,
    pointer_key,
    small_sets_launch,
    statistics_launch,
)
from .linear_triton import linear_gradient, linear_statistics  # noqa: F401 (part of the contract)
from .merge_triton import second_merge_kernel
from .one_read.late_gradient_triton import LateGradient  # noqa: F401 (part of the contract)
from .request import Request
from .sums_triton import gradient_for, scale, token_sums, token_sums_gradient  # noqa: F401 (part of the contract)
from .transports.symmetric_memory_triton import shared_memory
from .ways.prepared_triton import PreparedLaunches  # noqa: F401 (part of the contract)

MOST_ENTRIES = 1024  # that one program sorts


def shares_memory(logits) -> bool:
    """Whether packets may meet in symmetric memory."""
    return logits.is_cuda and logits.shape[0] > 0


NO_LOSS = LossGradient()


def label_logits(out, request: Request):
    """Write the transformed logits [N] of the labels in this shard, and 0 where they are in
    another."""
    n_rows, facts, (inputs, prepared) = out.shape[0], request.facts, inputs_of(request)
    if n_rows:
        launch(
            softmax_triton.label_logits_kernel,
            ceil_div(n_rows, LABELS.block),
            (out.device, prepared.variant),
            LABELS,
            out,
            inputs,
            n_rows,
            facts.start,
            facts.valid_width,
        )


def local_statistics(packets, request: Request, memory=None):
    """Write this rank's packets [chunks, rows, N] fp32, into `memory`'s slot if there is one."""
    n_rows, facts = packets.shape[-1], request.facts
    if n_rows == 0:
        return
    (inputs, prepared), shared, device = inputs_of(request), shared_memory(memory), packets.device
    rows, variant = prepared.rows, (device, prepared.variant, shared.slot)
    is_plain = inputs.pre is None and inputs.bias is None and inputs.student_scale is None
    if request.layout.per_id:
        launch(
            at_ids_triton.at_ids_statistics_kernel,
            at_ids_programs(n_rows, inputs.n_ids),
            variant,
            AT_IDS,
            packets,
            inputs,
            shared,
            rows.packet,
            n_rows,
            *prepared.bounds,
        )
    launch(
        kernels.statistics_kernel,
        n_rows * facts.chunks,
        variant,
        statistics_launch(facts.chunk_size, inputs.teacher is not None, rows.is_lean and is_plain),
        packets,
        inputs,
        shared,
        rows.statistics,
        rows.packet,
        n_rows,
        *prepared.bounds,
    )


def at_ids_programs(n_rows: int, n_ids: int) -> int:
    """Tiles of the ids of all tokens."""
    return ceil_div(n_rows, at_ids_triton.TOKENS.value) * ceil_div(n_ids, AT_IDS.block)


def merge_packets(packets, request: Request, memory=None) -> list[torch.Tensor]:
    """Packets of all ranks (this rank's, whose peers' lie in `memory`) -> [merged rows, values,
    *flags]."""
    facts, x, n_rows = request.facts, request.tensors, packets.shape[-1]
    outputs = request.layout.empty_outputs(packets, n_rows, torch.float32)
    if n_rows == 0:
        return outputs
    rows, shared, counts = (
        device_layout(request.layout),
        shared_memory(memory),
        (facts.packets, facts.chunks),
    )
    inputs = Inputs(labels=x.labels)
    if x.scales is not None or facts.student_scale != 1.0 or facts.teacher_scale != 1.0:
        inputs = inputs._replace(scales=x.scales, student_scale=facts.student_scale)
    keys = pointer_key(x.labels), pointer_key(x.scales), inputs.student_scale is None
    launch(
        kernels.merge_kernel,
        ceil_div(n_rows, MERGE.block),
        (packets.device, rows, *counts, shared.slot, *keys),
        MERGE,
        rows.outputs(outputs),
        packets,
        inputs,
        shared,
        rows.merge,
        rows.merge_rows,
        n_rows,
        *counts,
    )
    # reads this turn's packets, too: no rank writes them again before the next barrier
    if request.layout.n_ids:
        launch(
            at_ids_triton.at_ids_merge_kernel,
            at_ids_programs(n_rows, request.layout.n_ids),
            (packets.device, rows, *counts, shared.slot, pointer_key(x.ids)),
            AT_IDS,
            outputs[-1],
            packets,
            Inputs(ids=x.ids),
            shared,
            outputs[0],
            rows.merged,
            rows.packet,
            n_rows,
            *counts,
        )
    return outputs


def second_statistics(packets, request: Request, merged):
    """Write this rank's packets [chunks, rows, N] of the second exchange."""
    facts, rows, n_rows = (
        request.facts,
        device_layout(request.layout),
        request.tensors.logits.shape[0],
    )
    if n_rows == 0:
        return
    inputs, prepared = inputs_of(request)
    programs, variant = n_rows * facts.chunks, (packets.device, prepared.variant)
    inputs = inputs._replace(labels=None, column_weight=None)
    bounds = n_rows, facts.start, facts.valid_width, facts.chunks
    given = packets, inputs, merged, rows.merged, rows.second, *bounds
    for kernel, id_list in rows.second_kernels:
        columns = statistics_launch(facts.chunk_size, True)
        how = columns if id_list is None else list_launch(getattr(inputs, id_list).shape[1])
        launch(kernel, programs, variant, how, *given)


def merge_second(packets, outputs: list[torch.Tensor], layout: Layout):
    """Packets of the second exchange of all ranks -> the last rows of the outputs' first two, in
    place."""
    (n_packets, height, n_rows), (merged, values, *_) = packets.shape, outputs
    if n_rows == 0:
        return
    sizes = (
        layout.merged.index("sum"),
        len(merged) - height // 2,
        len(values) - height // 2,
        height // 2,
        n_packets,
    )
    rows = device_layout(layout)
    launch(
        second_merge_kernel,
        ceil_div(n_rows, MERGE.block),
        (packets.device, rows, *sizes, pointer_key(packets)),
        MERGE,
        rows.outputs(outputs),
        packets,
        n_rows,
        *sizes,
    )


def logits_gradient(out, request: Request, merged, grads: dict, loss=None):
    """Write d loss / d logits into `out` [N, width], maybe the logits; grads, loss: see
    `passes.write_gradient`."""
    if request.tensors.logits.numel() == 0:
        return
    (n_rows, width), strides, facts, names = out.shape, out.stride(), request.facts, tuple(grads)
    (inputs, prepared), rows = inputs_of(request), device_layout(request.layout)
    lists = rows.gradient_lists(names)
    exact = room_at_lists(lists, inputs, out.dtype)
    for name in rows.per_id:
        if name in grads:
            grads = grads | {name: _sums_at_ids(grads[name], inputs.ids)}
    is_transformed = inputs.pre is not None or inputs.bias is not None
    hooks, how = (
        rows.gradient_hooks(names),
        gradient_launch(width, names, facts.softcap != 0.0, is_transformed),
    )
    upstream, loss, kinds = _upstream(rows, grads, loss)
    padded = facts.valid_width < width
    columns = kernels.gradient_columns(how.block, inputs, hooks, bool(lists))
    variant = (
        out.device,
        rows,
        hooks,
        padded,
        pointer_key(out),
        *map(int_key, strides),
        prepared.variant,
        kinds,
    )
    launch(
        kernels.gradient_kernel,
        n_rows * ceil_div(width, columns),
        variant,
        how,
        out,
        *strides,
        inputs,
        merged,
        upstream,
        loss,
        exact,
        hooks,
        rows.merged,
        n_rows,
        facts.start,
        facts.valid_width,
        padded,
    )


def _sums_at_ids(upstream, ids):
    """Upstream gradients [N, K] of ids [N, K] -> at each id, the sum over all ids of its token that
    equal it."""
    (n_rows, n_ids), sums = ids.shape, torch.empty_like(upstream)
    launch(
        at_ids_triton.at_ids_sums_kernel,
        at_ids_programs(n_rows, n_ids),
        (ids.device, n_ids, pointer_key(upstream), pointer_key(ids)),
        AT_IDS,
        sums,
        upstream,
        ids,
        n_rows,
        n_ids,
    )
    return sums


def _upstream(rows: DeviceLayout, grads: dict, loss):
    """The upstream gradients and the reduced loss as kernels take them, and what Triton compiles
    about them."""
    upstream = rows.grads(*map(grads.get, rows.grads._fields))
    kinds = tuple(grads), *[pointer_key(grads.get(name)) for name in rows.per_id]
    if loss is None:
        return upstream, NO_LOSS, kinds
    gradient, _inverse, weight = loss
    coefficients = (len(g) if type(g) is tuple else 0 for g in grads.values())
    return (
        upstream,
        LossGradient(*loss),
        (*kinds, pointer_key(gradient), dtype_key(weight), *coefficients),
    )


def entries(ids, log_probs, factors, factor, renormalize, vocab_size):
    """A top-K teacher's entries, see `statistics.topk.distinct_entries`, in one kernel."""
    n_rows, n_entries = ids.shape
    how = Launch(max(2, next_power_of_2(n_entries)), 1 if n_entries <= 128 else 4)
    if how.block > MOST_ENTRIES or log_probs.dtype == torch.float64:
        return distinct_entries(ids, log_probs, factors, factor, renormalize, vocab_size)
    out = torch.empty_like(ids, dtype=torch.int32), torch.empty_like(log_probs, dtype=torch.float32)
    if n_rows:
        keys = map(pointer_key, (ids, log_probs, factors))
        launch(
            distinct_triton.distinct_ids_kernel,
            n_rows,
            (ids.device, n_entries, vocab_size, renormalize, factor, *keys),
            how,
            out[0],
            None,
            out[1],
            ids,
            None,
            log_probs,
            factors,
            n_entries,
            vocab_size,
            factor,
            renormalize,
        )
    return out


def known_sets(ids, spans, vocab_size, most: int | None = None):
    """The ids of all sets as the kernels take them, see `statistics.sets`; most: ids in a set,
    None: any number."""
    out = torch.empty_like(ids, dtype=torch.int32), torch.empty_like(spans)
    variant = ids.device, vocab_size, *map(pointer_key, (ids, spans))
    if not len(spans):
        return out
    how = small_sets_launch(most)
    launch(
        distinct_triton.distinct_ids_kernel,
        len(spans),
        variant,
        how,
        *out,
        None,
        ids,
        spans,
        None,
        None,
        0,
        vocab_size,
        1.0,
        False,
    )
    if most is None or most > how.block:
        programs = min(len(spans), SETS_PROGRAMS)
        seen = ids.new_zeros((programs, vocab_size // 32 + 1), dtype=torch.int32)
        launch(
            distinct_triton.sets_kernel,
            programs,
            variant,
            SETS,
            *out,
            ids,
            spans,
            seen,
            len(spans),
            vocab_size,
            how.block,
        )
    return out
