"""The kernels of `fp8`, and their launches; `fp8_eager` is the definition."""

import torch
import triton
import triton.language as tl

from ..statistics.family_triton import row_factors, transform
from ..statistics.numerics_triton import LOG2_E, PTX, exp2, widen
from .device_inputs import inputs_of
from .fp8 import (
    FIRST,
    LARGEST_OPERAND,
    MOST,
    NOWHERE,
    ROUNDED,
    ROUNDED_OPERAND,
    ROWS_APART,
    SECOND,
    Fp8Gradient,
    LargeEntries,
    Units,
)
from .launch import (
    FP8_ENTRIES,
    FP8_GRADIENT,
    FP8_PROGRAMS,
    FP8_ROW,
    FP8_TURN,
    ceil_div,
    launch,
    next_power_of_2,
    pointer_key,
)
from .request import Request

NONE, KEPT = tl.constexpr(NOWHERE), tl.constexpr(ROUNDED)
FACTOR, LAST, APART = tl.constexpr(FIRST), tl.constexpr(SECOND), tl.constexpr(ROWS_APART)
OPERAND, MOST_OF_OPERAND = tl.constexpr(ROUNDED_OPERAND), tl.constexpr(LARGEST_OPERAND)
CAPACITY, PLACES = tl.constexpr(MOST), tl.constexpr(next_power_of_2(MOST))


@triton.jit
def _two_bytes(a, b):
    """Two numbers as e5m2, the first in the low byte of an int32."""
    if PTX:
        y = tl.inline_asm_elementwise(
            "{ .reg .b16 h; cvt.rn.satfinite.e5m2x2.f32 h, $2, $1; cvt.u32.u16 $0, h; }",
            "=r,f,f",
            [a, b],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        low = a.to(tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
        y = low | b.to(tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32) << 8
    return y


@triton.jit
def _in_units(lane, columns, units, inputs, shift_ptr, n_rows, valid_width):
    """Entries of some tokens in units; whether they are labels, and whether they are large."""
    token = tl.minimum(lane, n_rows - 1).to(tl.int64)
    power = tl.load(units.power + token)
    exists = (lane < n_rows) & (columns < valid_width)
    is_read = exists & (power != float("-inf"))
    at = token * inputs.x_row + columns.to(tl.int64) * inputs.x_column
    x = widen(tl.load(inputs.x + at, mask=is_read, other=0.0))
    pre, post = row_factors(inputs, token)
    z, _slope = transform(x, columns, inputs, pre, post)
    entry = exp2((z - tl.load(shift_ptr + token)) * LOG2_E + power)  # NaN of a bad token
    entry = tl.where(is_read, entry, 0.0)
    of_label = exists & (columns == tl.load(units.column + token))
    is_large = of_label | (entry > tl.load(units.limit + token))
    return entry, of_label, is_large


@triton.jit
def _dithered(x, seeds, BITS: tl.constexpr):
    """x as `fp8.dithered` rounds it. seeds: uint32 of its elements."""
    noise = seeds * FACTOR
    noise = (noise ^ (noise >> 15)) * LAST
    noise = (noise ^ (noise >> 16)) >> (32 - BITS)
    bits = x.to(tl.uint32, bitcast=True) + noise
    return tl.where(x != x, x, ((bits >> BITS) << BITS).to(tl.float32, bitcast=True))


@triton.jit
def _rounded(entry, is_large, lane, columns, units, n_rows):
    """Entries as e5m2 has them, 0 where they are large."""
    seed = tl.load(units.seed + tl.minimum(lane, n_rows - 1))
    seeds = (seed + columns).to(tl.uint32, bitcast=True)
    return _dithered(tl.where(is_large, 0.0, entry), seeds, KEPT)


@triton.jit
def _store_large(lane, columns, entry, of_label, is_large, units, large):
    """Put entries on the lists of their tokens."""
    token = lane.to(tl.int64)
    counts = large.counts + token + tl.zeros_like(columns)
    place = tl.atomic_add(counts, 1, mask=is_large, sem="relaxed")
    at_label = tl.load(units.at_label + token, mask=is_large, other=0.0)
    value = tl.load(units.unit + token, mask=is_large, other=0.0) * entry
    at = token * CAPACITY + place
    is_stored = is_large & (place < CAPACITY)
    tl.store(large.columns + at, tl.zeros_like(place) + columns, mask=is_stored)
    tl.store(large.gradients + at, tl.where(of_label, at_label, value), mask=is_stored)


@triton.jit(do_not_specialize=["n_rows", "valid_width"])
def split_gradient_kernel(
    out_ptr,  # [T, padded width] bytes of e5m2 out, or None
    out_row,  # its stride
    turned_ptr,  # [padded width, T / 4] int32 out, four bytes each, or None
    turned_row,
    marks_ptr,  # [programs] uint8, 0 before: whether a tile has large entries
    units,  # Units
    inputs,  # Inputs
    shift_ptr,  # [T] fp32
    n_rows,
    padded_width,
    valid_width,
    TILE: tl.constexpr,  # groups of 4 rows, columns
):
    """One program: a tile of the gradient, as rows and as columns, with 0 at large entries.

    A thread has the same column of 4 tokens, whose bytes are turned as one number.
    """
    GROUPS: tl.constexpr = TILE[0]
    COLUMNS: tl.constexpr = TILE[1]
    row_tiles = tl.cdiv(n_rows, 4 * GROUPS)
    first = tl.program_id(0) // row_tiles * COLUMNS
    group = tl.program_id(0) % row_tiles * GROUPS
    columns = first + tl.arange(0, COLUMNS)[None, :]
    lane = 4 * (group + tl.arange(0, GROUPS)[:, None])
    given = (columns, units, inputs, shift_ptr, n_rows, valid_width)
    a, _, large_a = _in_units(lane, *given)
    b, _, large_b = _in_units(lane + 1, *given)
    c, _, large_c = _in_units(lane + 2, *given)
    d, _, large_d = _in_units(lane + 3, *given)
    mark = marks_ptr + tl.program_id(0) + tl.zeros_like(columns + lane)
    tl.store(mark, 1, mask=large_a | large_b | large_c | large_d)
    a = _rounded(a, large_a, lane, columns, units, n_rows)
    b = _rounded(b, large_b, lane + 1, columns, units, n_rows)
    c = _rounded(c, large_c, lane + 2, columns, units, n_rows)
    d = _rounded(d, large_d, lane + 3, columns, units, n_rows)
    low, high = _two_bytes(a, b), _two_bytes(c, d)
    if out_ptr is not None:
        at = lane.to(tl.int64) * out_row + columns
        inside = columns < padded_width
        tl.store(out_ptr + at, low.to(tl.uint8), mask=inside & (lane < n_rows))
        at += out_row
        tl.store(out_ptr + at, (low >> 8).to(tl.uint8), mask=inside & (lane + 1 < n_rows))
        at += out_row
        tl.store(out_ptr + at, high.to(tl.uint8), mask=inside & (lane + 2 < n_rows))
        at += out_row
        tl.store(out_ptr + at, (high >> 8).to(tl.uint8), mask=inside & (lane + 3 < n_rows))
    if turned_ptr is not None:
        columns = first + tl.arange(0, COLUMNS)[:, None]
        groups = group + tl.arange(0, GROUPS)[None, :]
        at = columns.to(tl.int64) * turned_row + groups
        is_written = (4 * groups < n_rows) & (columns < padded_width)
        tl.store(turned_ptr + at, tl.trans(low | (high << 16)), mask=is_written)


@triton.jit(do_not_specialize=["n_rows", "valid_width"])
def list_large_kernel(
    large,  # LargeEntries, whose counts are 0 before
    marks_ptr,
    units,
    inputs,
    shift_ptr,
    n_rows,
    valid_width,
    TILE: tl.constexpr,  # of `split_gradient_kernel`
):
    """One program: the large entries in one tile, if it has any."""
    if tl.load(marks_ptr + tl.program_id(0)) != 0:
        row_tiles = tl.cdiv(n_rows, 4 * TILE[0])
        first = tl.program_id(0) // row_tiles * TILE[1]
        columns = first + tl.arange(0, TILE[1])[None, :]
        group = tl.program_id(0) % row_tiles * TILE[0]
        for k in range(4):
            lane = 4 * (group + tl.arange(0, TILE[0])[:, None]) + k
            found = _in_units(lane, columns, units, inputs, shift_ptr, n_rows, valid_width)
            _store_large(lane, columns, *found, units, large)


@triton.jit(do_not_specialize=["first"])
def turn_to_fp8_kernel(
    out_ptr,  # [C, at least R] e4m3 out
    out_row,  # its stride
    x_ptr,  # [R, C]
    x_row,
    x_column,
    factors_ptr,  # [R] or [] fp32
    first,  # number of the first row
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
    x = tl.clamp(_dithered(x * factor, seeds, OPERAND), -MOST_OF_OPERAND, MOST_OF_OPERAND)
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
    large,  # LargeEntries
    weight_ptr,  # [V, H]
    weight_row,
    weight_column,
    n_columns,
    BLOCK: tl.constexpr,
):
    """One program: some columns of a token's row. Large entries come by ascending column, whatever
    their order on the list."""
    blocks = tl.cdiv(n_columns, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    here = column < n_columns
    place = token * CAPACITY + tl.arange(0, PLACES)
    count = tl.minimum(tl.load(large.counts + token), CAPACITY)
    on_list = tl.arange(0, PLACES) < count
    rows = tl.load(large.columns + place, mask=on_list, other=NONE)
    gradients = tl.load(large.gradients + place, mask=on_list, other=0.0)
    sums = tl.zeros([BLOCK], tl.float32)
    last = -1
    for _ in range(count):
        row = tl.min(tl.where(rows > last, rows, NONE), axis=0)
        gradient = tl.sum(tl.where(rows == row, gradients, 0.0), axis=0)
        at = row.to(tl.int64) * weight_row + column.to(tl.int64) * weight_column
        w = tl.load(weight_ptr + at, mask=here, other=0.0)
        sums += gradient * w.to(tl.float32)
        last = row
    at = token * n_columns + column
    product = tl.load(product_ptr + at, mask=here, other=0.0).to(tl.float32)
    total = product * tl.load(units_ptr + token) + sums
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def add_to_weight_kernel(
    out_ptr,  # [V, H]
    out_row,
    columns_ptr,  # [E] int32 of all entries, ascending
    places_ptr,  # [E] int64, where they were before
    gradients_ptr,  # [E] fp32 in those places
    count_ptr,  # [] int64: entries that are any
    hidden_ptr,  # [T, H]
    hidden_row,
    hidden_column,
    n_columns,
    TILE: tl.constexpr,  # entries at once, columns of H
):
    """One program: some columns of H of every so many-th entry, if it is the first of its column,
    with all others of that column, in the order of the tokens."""
    ENTRIES: tl.constexpr = TILE[0]
    BLOCK: tl.constexpr = TILE[1]
    blocks = tl.cdiv(n_columns, BLOCK)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    here = column < n_columns
    count = tl.load(count_ptr)
    for begin in range(tl.program_id(0) // blocks, count, tl.num_programs(0) // blocks):
        row = tl.load(columns_ptr + begin)
        before = tl.load(columns_ptr + begin - 1, mask=begin > 0, other=-1)
        if row != before:
            at = row.to(tl.int64) * out_row + column
            sums = tl.load(out_ptr + at, mask=here, other=0.0).to(tl.float32)
            done = 0
            is_on = 1
            while is_on != 0:
                entry = begin + done + tl.arange(0, ENTRIES)
                is_same = tl.load(columns_ptr + entry, mask=entry < count, other=-1) == row
                place = tl.load(places_ptr + entry, mask=is_same, other=0)
                gradient = tl.load(gradients_ptr + place, mask=is_same, other=0.0)
                token = place // CAPACITY
                offset = token[:, None] * hidden_row + column[None, :].to(tl.int64) * hidden_column
                is_read = is_same[:, None] & here[None, :]
                h = tl.load(hidden_ptr + offset, mask=is_read, other=0.0).to(tl.float32)
                sums += tl.sum(gradient[:, None] * h, axis=0)
                done += ENTRIES
                is_on = tl.sum(is_same.to(tl.int32), axis=0) // ENTRIES
            tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=here)


def split_gradient(
    out: Fp8Gradient, request: Request, merged: torch.Tensor, grads: dict, units: Units
):
    """Write the gradient of logits in its two parts."""
    n_rows = request.tensors.logits.shape[0]
    if n_rows == 0:
        return
    inputs, prepared = inputs_of(request)
    rows = None if out.rows is None else out.rows.view(torch.uint8)
    turned = None if out.turned is None else out.turned.view(torch.int32)  # of 4 tokens
    strides = [0 if x is None else x.stride(0) for x in (rows, turned)]
    padded_width = out.rows.shape[1] if out.rows is not None else out.turned.shape[0]
    shift = merged[request.layout.merged.index("shift")]
    groups, columns = FP8_GRADIENT.block
    tiles = ceil_div(n_rows, 4 * groups) * ceil_div(padded_width, columns)
    marks = torch.zeros(tiles, dtype=torch.uint8, device=merged.device)
    keys = *[s % 16 == 0 for s in strides], *map(pointer_key, (rows, turned, shift))
    variant, facts = (merged.device, prepared.variant, padded_width % 16 == 0, *keys), request.facts
    known = units, inputs, shift, n_rows
    launch(
        split_gradient_kernel,
        tiles,
        variant,
        FP8_GRADIENT,
        rows,
        strides[0],
        turned,
        strides[1],
        marks,
        *known,
        padded_width,
        facts.valid_width,
    )
    launch(
        list_large_kernel,
        tiles,
        variant,
        FP8_GRADIENT,
        out.large,
        marks,
        *known,
        facts.valid_width,
    )


def turn_to_fp8(out: torch.Tensor, x: torch.Tensor, factors: torch.Tensor, first: int):
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
        *x.shape,
        rowwise,
    )


def finish_hidden(out, product, unit, large: LargeEntries, weight):
    """out [n, H] = product [n, H] times unit [n] + large entries @ weight."""
    n_rows, n_columns = out.shape
    if n_rows == 0:
        return
    launch(
        finish_hidden_kernel,
        n_rows * ceil_div(n_columns, FP8_ROW.block),
        (out.device, *weight.stride(), n_columns, *map(pointer_key, (out, product, weight))),
        FP8_ROW,
        out,
        product,
        unit,
        large,
        weight,
        *weight.stride(),
        n_columns,
    )


def add_to_weight(out, large: LargeEntries, hidden):
    """out [width, H] += large entries^T @ hidden [N, H]."""
    if not large.columns.numel():
        return
    columns, places = large.columns.flatten().sort(stable=True)
    blocks = ceil_div(hidden.shape[1], FP8_ENTRIES.block[1])
    launch(
        add_to_weight_kernel,
        FP8_PROGRAMS * blocks,
        (out.device, out.stride(), hidden.stride(), *map(pointer_key, (out, hidden))),
        FP8_ENTRIES,
        out,
        out.stride(0),
        columns,
        places,
        large.gradients,
        large.counts.clamp(max=MOST).sum(),
        hidden,
        *hidden.stride(),
        hidden.shape[1],
    )
