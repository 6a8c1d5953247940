"""The kernels of products in fp8, and their launches: operands, and what is added to the results;
`fp8_eager` has the definition."""

import torch
import triton
import triton.language as tl

from .fp8 import LARGEST_OPERAND, MOST, ROUNDED_OPERAND, ROWS_APART, Fp8Gradient, LargeEntries
from .fp8_triton import mixed
from .launch import (
    FP8_ENTRIES,
    FP8_FEW,
    FP8_ROW,
    FP8_TURN,
    ceil_div,
    launch,
    pointer_key,
)

APART, CAPACITY, OPERAND = map(tl.constexpr, (ROWS_APART, MOST, ROUNDED_OPERAND))
MOST_OF_OPERAND = tl.constexpr(LARGEST_OPERAND)


@triton.jit
def _dithered(x, seeds):
    """x as `fp8.dithered_operand` rounds it. seeds: uint32 of its elements."""
    bits = x.to(tl.uint32, bitcast=True) + (mixed(seeds) >> (32 - OPERAND))
    return tl.where(x != x, x, ((bits >> OPERAND) << OPERAND).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["first"])
def turn_to_fp8_kernel(
    out_ptr,  # [C, at least R] e4m3 out
    out_row,  # its stride
    x_ptr,  # [R, C]
    x_row,
    x_column,
    factors_ptr,  # [R] or [] fp32
    first,  # number of the first row
    seed_ptr,  # [] int32
    n_rows,
    n_columns,
    ROWWISE: tl.constexpr,
    TILE: tl.constexpr,  # rows, columns
):
    """One program: a tile of x times its factors, turned; 0 in rows that x does not have."""
    ROWS: tl.constexpr = TILE[0]
    COLUMNS: tl.constexpr = TILE[1]
    column_tiles = tl.cdiv(n_columns, COLUMNS)
    i = tl.program_id(0) // column_tiles * ROWS
    j = tl.program_id(0) % column_tiles * COLUMNS
    row = i + tl.arange(0, ROWS)[:, None]
    column = j + tl.arange(0, COLUMNS)[None, :]
    at = row.to(tl.int64) * x_row + column.to(tl.int64) * x_column
    is_read = (row < n_rows) & (column < n_columns)
    x = tl.load(x_ptr + at, mask=is_read, other=0.0).to(tl.float32)
    if ROWWISE:
        factor = tl.load(factors_ptr + row, mask=row < n_rows, other=0.0)
    else:
        factor = tl.load(factors_ptr)
    seeds = (row + first).to(tl.uint32) * APART + column.to(tl.uint32)
    seeds += tl.load(seed_ptr).to(tl.uint32, bitcast=True)
    x = tl.clamp(_dithered(x * factor, seeds), -MOST_OF_OPERAND, MOST_OF_OPERAND)
    turned = tl.trans(x.to(out_ptr.dtype.element_ty))
    row = i + tl.arange(0, ROWS)[None, :]
    column = j + tl.arange(0, COLUMNS)[:, None]
    is_written = (row < out_row) & (column < n_columns)
    tl.store(out_ptr + column.to(tl.int64) * out_row + row, turned, mask=is_written)


@triton.jit
def finish_hidden_kernel(
    out_ptr,  # [T, H] out
    product_ptr,  # [T, H]
    units_ptr,  # [T] fp32
    uniform_ptr,  # [T] fp32, or None
    row_sum_ptr,  # [H] fp32, or None
    large,  # LargeEntries
    weight_ptr,  # [V, H]
    weight_row,
    weight_column,
    n_columns,
    TILE: tl.constexpr,  # entries at once, columns of H
):
    """One program: some columns of a token's row."""
    ENTRIES: tl.constexpr = TILE[0]
    BLOCK: tl.constexpr = TILE[1]
    blocks = tl.cdiv(n_columns, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    here = column < n_columns
    count = tl.minimum(tl.load(large.counts + token), CAPACITY)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, ENTRIES):
        place = first + tl.arange(0, ENTRIES)
        on_list = place < count
        row = tl.load(large.columns + token * CAPACITY + place, mask=on_list, other=0)
        gradient = tl.load(large.gradients + token * CAPACITY + place, mask=on_list, other=0.0)
        at = row.to(tl.int64)[:, None] * weight_row + column[None, :].to(tl.int64) * weight_column
        w = tl.load(weight_ptr + at, mask=on_list[:, None] & here[None, :], other=0.0)
        sums += tl.sum(gradient[:, None] * w.to(tl.float32), axis=0)
    at = token * n_columns + column
    product = tl.load(product_ptr + at, mask=here, other=0.0).to(tl.float32)
    total = product * tl.load(units_ptr + token) + sums
    if uniform_ptr is not None:
        row_sum = tl.load(row_sum_ptr + column, mask=here, other=0.0)
        total += tl.load(uniform_ptr + token) * row_sum
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def add_to_weight_kernel(
    out_ptr,  # [V, H]
    out_row,
    ids_ptr,  # [V] int64, those with the most entries first
    starts_ptr,  # [V + 1] int64, of an id's entries among all
    places_ptr,  # [E] int64, where the entries are, by ids and then tokens
    gradients_ptr,  # [E] fp32 in those places
    first_ptr,  # [] int64, of some of the ids
    last_ptr,  # [] int64, behind them
    hidden_ptr,  # [T, H]
    hidden_row,
    hidden_column,
    n_columns,
    TILE: tl.constexpr,  # entries at once, columns of H
):
    """One program: some columns of H of every so many-th id, with its entries in the order of
    their tokens."""
    ENTRIES: tl.constexpr = TILE[0]
    BLOCK: tl.constexpr = TILE[1]
    blocks = tl.cdiv(n_columns, BLOCK)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    here = column < n_columns
    first_id = tl.load(first_ptr) + tl.program_id(0) // blocks
    for i in range(first_id, tl.load(last_ptr), tl.num_programs(0) // blocks):
        row = tl.load(ids_ptr + i)
        begin, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
        at = row * out_row + column
        sums = tl.load(out_ptr + at, mask=here, other=0.0).to(tl.float32)
        for first in range(begin, end, ENTRIES):
            entry = first + tl.arange(0, ENTRIES)
            place = tl.load(places_ptr + entry, mask=entry < end, other=0)
            gradient = tl.load(gradients_ptr + place, mask=entry < end, other=0.0)
            token = place // CAPACITY
            offset = token[:, None] * hidden_row + column[None, :].to(tl.int64) * hidden_column
            is_read = (entry < end)[:, None] & here[None, :]
            h = tl.load(hidden_ptr + offset, mask=is_read, other=0.0).to(tl.float32)
            sums += tl.sum(gradient[:, None] * h, axis=0)
        tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=here)


def turn_to_fp8(out, x, factors: torch.Tensor, first: int, seed: torch.Tensor):
    """Write x [R, C] times factors [R] or [] into out [C, at least R], e4m3, with 0 beyond."""
    (n_columns, n_rows), rowwise = out.shape, factors.dim() == 1
    if n_rows == 0:
        return
    tiles = ceil_div(n_rows, FP8_TURN.block[0]) * ceil_div(n_columns, FP8_TURN.block[1])
    sizes = n_rows, *x.stride(), *x.shape
    keys = rowwise, *[number % 16 == 0 for number in sizes], *[number == 1 for number in sizes]
    launch(
        turn_to_fp8_kernel,
        tiles,
        (out.device, keys, *map(pointer_key, (out, x))),
        FP8_TURN,
        out,
        n_rows,
        x,
        *x.stride(),
        factors,
        first,
        seed,
        *x.shape,
        rowwise,
    )


def finish_hidden(out, product, gradient: Fp8Gradient, weight, row_sum):
    """Write dH, see `fp8_eager.finish_hidden`."""
    n_rows, n_columns = out.shape
    if n_rows == 0:
        return
    keys = *weight.stride(), n_columns
    launch(
        finish_hidden_kernel,
        n_rows * ceil_div(n_columns, FP8_ROW.block[1]),
        (out.device, *keys, *map(pointer_key, (out, product, gradient.uniform, row_sum, weight))),
        FP8_ROW,
        out,
        product,
        gradient.unit,
        gradient.uniform,
        row_sum,
        gradient.large,
        weight,
        *weight.stride(),
        n_columns,
    )


def add_to_weight(out, large: LargeEntries, hidden):
    """out [width, H] += large entries^T @ hidden [N, H]."""
    if not large.columns.numel():
        return
    width = out.shape[0]
    columns, places = large.columns.flatten().sort(stable=True)
    starts = torch.searchsorted(
        columns, torch.arange(width + 1, dtype=torch.int32, device=out.device)
    )
    entries, ids = starts.diff().to(torch.int32).sort(descending=True)
    many, some = (entries > FP8_FEW).sum(), (entries > 0).sum()
    nothing = torch.zeros_like(many)
    # of ids that have many entries, and of those that have few
    for first, last, (how, programs) in zip((nothing, many), (many, some), FP8_ENTRIES):
        blocks = ceil_div(hidden.shape[1], how.block[1])
        launch(
            add_to_weight_kernel,
            programs * blocks,
            (out.device, out.stride(), hidden.stride(), *map(pointer_key, (out, hidden))),
            how,
            out,
            out.stride(0),
            ids,
            starts,
            places,
            large.gradients,
            first,
            last,
            hidden,
            *hidden.stride(),
            hidden.shape[1],
        )
