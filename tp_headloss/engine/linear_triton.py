"""Launches of the kernels of a linear head whose logits exist only as accumulators; see `backend`
for the contract."""

import functools

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..statistics.records_triton import Inputs
from . import gemm_triton
from .device_inputs import inputs_of
from .device_layout import device_layout
from .launch import FOLD, GemmLaunch, ceil_div, gemm_launch, launch, pointer_key
from .request import Request


def _descriptor(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


def _operands(
    hidden: torch.Tensor, weight: torch.Tensor, how: GemmLaunch
) -> tuple[TensorDescriptor, ...]:
    rows, columns, depth, *_ = how.block
    if not hidden.is_contiguous() or hidden.data_ptr() % 16:
        hidden = hidden.clone(memory_format=torch.contiguous_format)
    if weight.shape[0] == 0:  # an empty shard: no column of this is valid
        weight = weight.new_zeros((1, weight.shape[1]))
    return _descriptor(hidden, rows, depth), _descriptor(weight, columns, depth)


@functools.cache
def _processors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 4
    )


@functools.cache
def _major_capability(device: torch.device) -> int:
    """The first number of a GPU's compute capability."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def _without_logits(inputs: Inputs) -> Inputs:
    return inputs._replace(x=None, x_row=None, x_column=None)


def linear_statistics(packets, hidden, weight, request: Request, rounded: bool, budget: int):
    """Write the packets [chunks, rows, N] fp32 of the logits hidden [N, H] @ weight [W, H]^T,
    rounded to the operands' dtype or not; partial packets take at most `budget` bytes, or what one
    tile of tokens needs."""
    facts, n_rows = request.facts, hidden.shape[0]
    how = gemm_launch(facts.chunk_size, _major_capability(hidden.device))
    per_tile = (
        4
        * packets.shape[1]
        * facts.chunks
        * ceil_div(facts.chunk_size, how.block[1])
        * how.block[0]
    )
    tiles = ceil_div(n_rows, how.block[0])
    launches = ceil_div(tiles, max(1, budget // per_tile))
    step = max(1, ceil_div(tiles, max(1, launches))) * how.block[0]
    for first in range(0, n_rows, step):
        here = slice(first, min(first + step, n_rows))
        whole = here.stop - first == n_rows
        logits = hidden.new_empty(()).expand(here.stop - first, weight.shape[0])
        part = request.rows(here, logits)
        out = packets if whole else packets.new_empty((*packets.shape[:2], here.stop - first))
        _packets(out, hidden[here], weight, part, rounded, how)
        if not whole:
            packets[..., here] = out


def _packets(packets, hidden, weight, request: Request, rounded: bool, how: GemmLaunch):
    """The packets of one launch."""
    facts, rows, n_rows = request.facts, device_layout(request.layout), hidden.shape[0]
    row_tiles, parts = ceil_div(n_rows, how.block[0]), ceil_div(facts.chunk_size, how.block[1])
    n_padded = row_tiles * how.block[0]
    partials = packets.new_empty((facts.chunks * parts, packets.shape[1], n_padded))
    given, prepared = inputs_of(request)
    device, tiles = hidden.device, row_tiles * facts.chunks * parts
    launch(
        gemm_triton.linear_statistics_kernel,
        min(tiles, _processors(device)),
        (device, prepared.variant, hidden.dtype, rounded),
        how,
        partials,
        *_operands(hidden, weight, how),
        _without_logits(given),
        rows.statistics,
        rows.packet,
        n_rows,
        facts.start,
        facts.valid_width,
        facts.chunks,
        facts.ignore_index,
        hidden.shape[1],
        rounded,
    )
    inputs = Inputs(scales=given.scales, student_scale=given.student_scale)
    launch(
        gemm_triton.fold_kernel,
        facts.chunks * ceil_div(n_rows, FOLD.block),
        (packets.device, rows, pointer_key(inputs.scales), inputs.student_scale is None),
        FOLD,
        packets,
        partials,
        inputs,
        rows.merge,
        rows.packet,
        n_rows,
        n_padded,
        parts,
    )


def linear_gradient(out, hidden, weight, request: Request, merged, grads: dict, rounded: bool):
    """Write d loss / d logits of hidden [N, H] @ weight [W, H]^T into `out` [N, W], whose rows are
    multiples of 16 bytes; grads: upstream gradients [N] by name."""
    (n_rows, width), facts, rows = out.shape, request.facts, device_layout(request.layout)
    if n_rows == 0 or width == 0:
        return
    how = gemm_launch(facts.chunk_size, _major_capability(hidden.device))
    hooks, upstream = (
        rows.gradient_hooks(tuple(grads)),
        rows.grads(*map(grads.get, rows.grads._fields)),
    )
    tiles = ceil_div(n_rows, how.block[0]) * ceil_div(width, how.block[1])
    (given, prepared), device, padded = inputs_of(request), hidden.device, facts.valid_width < width
    kinds = (
        hidden.dtype,
        out.dtype,
        rounded,
        padded,
        tuple(grads),
        *map(pointer_key, (merged, *grads.values())),
    )
    launch(
        gemm_triton.linear_gradient_kernel,
        min(tiles, _processors(device)),
        (device, prepared.variant, *kinds),
        how,
        _descriptor(out, how.block[0], how.stored),
        *_operands(hidden, weight, how),
        _without_logits(given),
        merged,
        upstream,
        hooks,
        rows.merged,
        n_rows,
        facts.start,
        facts.valid_width,
        hidden.shape[1],
        rounded,
        padded,
    )
