"""The kernels that split a gradient for `fp8`, and their launches; `fp8` and `fp8_eager` have the
definition."""

import torch
import triton
import triton.language as tl

from ..statistics.family_triton import row_factors, transform
from ..statistics.numerics_triton import LOG2_E, PTX, exp2, widen
from .device_inputs import inputs_of
from .fp8 import (
    FIRST,
    LARGEST_GRADIENT,
    MOST,
    SECOND,
    SHARE,
    SMALLEST,
    STATISTICS,
    Fp8Gradient,
    Units,
)
from .launch import FP8_GRADIENT, FP8_LIST, FP8_MARKS, FP8_UNITS, ceil_div, launch, pointer_key
from .request import Request

FACTOR, LAST, CAPACITY = map(tl.constexpr, (FIRST, SECOND, MOST))
LARGE, LEAST, MOST_OF_GRADIENT = map(tl.constexpr, (SHARE, SMALLEST, LARGEST_GRADIENT))


@triton.jit
def mixed(x):
    """`fp8._mixed` of uint32 numbers."""
    x = x * FACTOR
    x = (x ^ (x >> 15)) * LAST
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["scale", "n_rows", "start", "valid_width"])
def units_kernel(
    units,  # Units out
    merged,  # (shift, sum, others, target), [T] fp32 each
    grads,  # (of lse, of log_prob), [T] fp32 each, or None
    labels_ptr,  # [T]
    temperatures_ptr,  # [T] fp32, or None
    scale,  # of logits, over the temperature that all have
    n_rows,
    start,
    valid_width,
    BLOCK: tl.constexpr,
):
    """`fp8.units_of` of some tokens."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = token < n_rows
    shift = tl.load(merged[0] + token, mask=here, other=0.0)
    whole = tl.load(merged[1] + token, mask=here, other=0.0)
    others = tl.load(merged[2] + token, mask=here, other=0.0)
    target = tl.load(merged[3] + token, mask=here, other=0.0)
    label = tl.load(labels_ptr + token, mask=here, other=0)
    of_lse = tl.zeros_like(whole)
    if grads[0] is not None:
        of_lse = tl.load(grads[0] + token, mask=here, other=0.0)
    of_log_prob = tl.zeros_like(whole)
    if grads[1] is not None:
        of_log_prob = tl.load(grads[1] + token, mask=here, other=0.0)
    slope = tl.zeros_like(whole) + scale
    if temperatures_ptr is not None:
        slope = scale / tl.load(temperatures_ptr + token, mask=here, other=1.0)
    ignored = whole == 0
    slope = tl.where(ignored, 0.0, slope)
    common = (of_lse - of_log_prob) * slope
    size = tl.abs(common)
    bound = tl.where(ignored, 0.0, size * others)
    limit = tl.maximum(LARGE * bound, LEAST * tl.maximum(size, 1.0))
    bits = (limit / MOST_OF_GRADIENT).to(tl.int32, bitcast=True) & 0x7F800000
    unit = 2 * bits.to(tl.float32, bitcast=True)
    unit = tl.where(bound < float("inf"), unit, float("nan"))  # of NaN, too
    power = tl.where(ignored, float("-inf"), tl.log2(size / whole / unit))
    column = label.to(tl.int64) - start
    is_here = (whole != 0) & (column >= 0) & (column < valid_width)
    seed = mixed(label.to(tl.uint32))
    seed = mixed(seed + shift.to(tl.uint32, bitcast=True))
    seed = mixed(seed + whole.to(tl.uint32, bitcast=True)) + (start // 4).to(tl.uint32)
    at_label = exp2(target * LOG2_E) / whole * of_lse + others * of_log_prob
    tl.store(units.unit + token, tl.where(common < 0, -unit, unit), mask=here)
    tl.store(units.seed + token, seed.to(tl.int32, bitcast=True), mask=here)
    tl.store(units.limit + token, limit / unit, mask=here)
    tl.store(units.power + token, power, mask=here)
    tl.store(units.column + token, tl.where(is_here, column, -1).to(tl.int32), mask=here)
    tl.store(units.at_label + token, at_label * slope, mask=here)


@triton.jit
def _halves(a, b):
    """Two numbers as fp16, the first in the low half of an int32."""
    if PTX:
        y = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = a.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
        y = low | b.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32) << 16
    return y


@triton.jit
def _bytes(a, b, WHICH: tl.constexpr):
    """Four of the bytes of two numbers, 0 to 3 of the first and 4 to 7 of the second: each digit of
    WHICH names one, the last digit the lowest byte."""
    if PTX:
        y = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [a, b, tl.full(a.shape, WHICH, tl.int32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        y = tl.zeros_like(a)
        for i in tl.static_range(4):
            byte: tl.constexpr = WHICH >> 4 * i & 7
            number = a if byte < 4 else b
            y |= (number >> 8 * (byte % 4) & 0xFF) << 8 * i
    return y


@triton.jit
def _in_units(lane, columns, units, inputs, shift_ptr, n_rows, valid_width):
    """Entries of some tokens in units: 0 of a token without entries, anything in columns that do
    not exist or of a token whose loss is NaN."""
    token = tl.minimum(lane, n_rows - 1).to(tl.int64)
    power = tl.where(lane < n_rows, tl.load(units.power + token), float("-inf"))
    has_entries = power != float("-inf")
    at = token * inputs.x_row + columns.to(tl.int64) * inputs.x_column
    stored = tl.cdiv(valid_width, 4) * 4  # rows have so many; a thread loads four at once
    x = tl.load(inputs.x + at, mask=has_entries & (columns < stored), other=0.0)
    pre, post = row_factors(inputs, token)
    z, _slope = transform(widen(x), columns, inputs, pre, post)
    shift = tl.where(has_entries, tl.load(shift_ptr + token), 0.0)
    entry = exp2((z - shift) * LOG2_E + power)
    if inputs.temperature is not None:
        entry = tl.where(has_entries, entry, 0.0)  # whatever the temperature is
    return entry


@triton.jit
def _noise(seed, fours, SKIPPED: tl.constexpr):
    """Bytes of four columns, see `fp8.dithered_gradient`; SKIPPED: columns of the first four that
    are another shard's."""
    noise = mixed((seed + fours).to(tl.uint32, bitcast=True))
    if SKIPPED:
        more = mixed((seed + fours + 1).to(tl.uint32, bitcast=True))
        noise = (noise >> 8 * SKIPPED) | (more << 32 - 8 * SKIPPED)
    return noise.to(tl.int32, bitcast=True)


@triton.jit
def _four_bytes(
    lane,
    first,
    units,
    inputs,
    shift_ptr,
    n_rows,
    valid_width,
    FOURS: tl.constexpr,
    SKIPPED: tl.constexpr,
):
    """Entries of some tokens in e5m2, those of four columns as one number [.., FOURS]; whether any
    of them is large. Bytes of large entries are anything."""
    columns = first + tl.arange(0, 4 * FOURS)[None, :]
    entry = _in_units(lane, columns, units, inputs, shift_ptr, n_rows, valid_width)
    even, odd = tl.split(tl.reshape(entry, [entry.shape[0], FOURS, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    token = tl.minimum(lane, n_rows - 1)
    fours = first // 4 + tl.arange(0, FOURS)[None, :]
    noise = _noise(tl.load(units.seed + token), fours, SKIPPED)
    zero = tl.zeros_like(noise)
    low = _halves(a, b) + _bytes(noise, zero, 0x4140)
    high = _halves(c, d) + _bytes(noise, zero, 0x4342)
    exist = tl.minimum(tl.maximum(valid_width - 4 * fours, 0), 4)
    kept = tl.where(exist < 4, (1 << 8 * exist) - 1, -1)
    largest = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    is_large = (largest > tl.load(units.limit + token)) & (exist > 0)
    return _bytes(low, high, 0x7531) & kept, is_large


@triton.jit(do_not_specialize=["n_rows", "valid_width"])
def split_gradient_kernel(
    out_ptr,  # [T, padded width / 4] int32 out, four bytes of e5m2 each, or None
    out_row,  # its stride
    turned_ptr,  # [padded width, T / 4] int32 out, or None
    turned_row,
    marks_ptr,  # [column tiles, groups of 4 tokens] uint8, 0 before: whether any entry is large
    units,  # Units
    inputs,  # Inputs
    shift_ptr,  # [T] fp32
    n_rows,
    padded_width,
    valid_width,
    SKIPPED: tl.constexpr,  # of `_noise`
    MARKS: tl.constexpr,  # of `list_large_kernel`
    TILE: tl.constexpr,  # groups of 4 rows, and of 4 columns
):
    """One program: a tile of the gradient, as rows and as columns, with anything at large entries.

    A thread has 4 columns of 4 tokens, whose 16 bytes are turned in its registers.
    """
    GROUPS: tl.constexpr = TILE[0]
    FOURS: tl.constexpr = TILE[1]
    row_tiles = tl.cdiv(n_rows, 4 * GROUPS)
    first = tl.program_id(0) // row_tiles * (4 * FOURS)
    group = tl.program_id(0) % row_tiles * GROUPS
    lane = 4 * (group + tl.arange(0, GROUPS)[:, None])
    given = (first, units, inputs, shift_ptr, n_rows, valid_width)
    a, large_a = _four_bytes(lane, *given, FOURS, SKIPPED)
    b, large_b = _four_bytes(lane + 1, *given, FOURS, SKIPPED)
    c, large_c = _four_bytes(lane + 2, *given, FOURS, SKIPPED)
    d, large_d = _four_bytes(lane + 3, *given, FOURS, SKIPPED)
    is_large = large_a | large_b | large_c | large_d
    each: tl.constexpr = MARKS[1] // 4
    marked = tl.max(tl.reshape(is_large.to(tl.int32), [GROUPS, FOURS // each, each]), 2)
    column = first // MARKS[1] + tl.arange(0, FOURS // each)[None, :]
    marks = column * (tl.cdiv(n_rows, 4 * MARKS[0]) * MARKS[0]) + lane // 4
    tl.store(marks_ptr + marks, 1, mask=(marked != 0) & (lane < n_rows))
    fours = first // 4 + tl.arange(0, FOURS)[None, :]
    if out_ptr is not None:
        at = lane.to(tl.int64) * out_row + fours
        inside = 4 * fours < padded_width
        tl.store(out_ptr + at, a, mask=inside & (lane < n_rows))
        at += out_row
        tl.store(out_ptr + at, b, mask=inside & (lane + 1 < n_rows))
        at += out_row
        tl.store(out_ptr + at, c, mask=inside & (lane + 2 < n_rows))
        at += out_row
        tl.store(out_ptr + at, d, mask=inside & (lane + 3 < n_rows))
    if turned_ptr is not None:
        ab, more_ab = _bytes(a, b, 0x5140), _bytes(a, b, 0x7362)
        cd, more_cd = _bytes(c, d, 0x5140), _bytes(c, d, 0x7362)
        even = tl.join(_bytes(ab, cd, 0x5410), _bytes(more_ab, more_cd, 0x5410))
        odd = tl.join(_bytes(ab, cd, 0x7632), _bytes(more_ab, more_cd, 0x7632))
        turned = tl.trans(tl.reshape(tl.join(even, odd), [GROUPS, 4 * FOURS]))
        columns = first + tl.arange(0, 4 * FOURS)[:, None]
        groups = group + tl.arange(0, GROUPS)[None, :]
        at = columns.to(tl.int64) * turned_row + groups
        tl.store(turned_ptr + at, turned, mask=(4 * groups < n_rows) & (columns < padded_width))


@triton.jit
def _put_zero(bytes_ptr, at, mask):
    if bytes_ptr is not None:
        tl.store(bytes_ptr + at, 0, mask=mask)


@triton.jit(do_not_specialize=["n_rows", "valid_width"])
def list_large_kernel(
    large,  # LargeEntries, whose counts are 0 before
    out_ptr,  # [T, padded width] bytes, 0 at large entries after, or None
    out_row,
    turned_ptr,  # [padded width, T] bytes, as well
    turned_row,
    marks_ptr,  # of `split_gradient_kernel`
    units,
    inputs,
    shift_ptr,
    n_rows,
    valid_width,
    MARKS: tl.constexpr,  # marks of a program, columns of each
):
    """One program: the large entries that some marks stand for, but the labels'."""
    first = tl.program_id(0) * MARKS[0]
    marks = tl.load(marks_ptr + first + tl.arange(0, MARKS[0]))
    if tl.max(marks.to(tl.int32)) != 0:
        groups = tl.cdiv(n_rows, 4 * MARKS[0]) * MARKS[0]
        columns = first // groups * MARKS[1] + tl.arange(0, MARKS[1])[None, :]
        for i in range(MARKS[0]):
            if tl.load(marks_ptr + first + i) != 0:
                lane = 4 * (first % groups + i) + tl.arange(0, 4)[:, None]
                entry = _in_units(lane, columns, units, inputs, shift_ptr, n_rows, valid_width)
                token = tl.minimum(lane, n_rows - 1).to(tl.int64)
                is_large = (entry > tl.load(units.limit + token)) & (columns < valid_width)
                is_large &= columns != tl.load(units.column + token)
                counts = large.counts + token + tl.zeros_like(columns)
                place = tl.atomic_add(counts, 1, mask=is_large, sem="relaxed")
                is_stored = is_large & (place < CAPACITY)
                at = token * CAPACITY + place
                tl.store(large.columns + at, tl.zeros_like(place) + columns, mask=is_stored)
                tl.store(large.gradients + at, tl.load(units.unit + token) * entry, mask=is_stored)
                _put_zero(out_ptr, token * out_row + columns, is_large)
                _put_zero(turned_ptr, columns.to(tl.int64) * turned_row + token, is_large)


@triton.jit
def order_large_kernel(
    large,
    out_ptr,  # as in `list_large_kernel`
    out_row,
    turned_ptr,
    turned_row,
    units,
    PLACES: tl.constexpr,
):
    """One program: the list of a token, with its label, in ascending order of the columns."""
    token = tl.program_id(0).to(tl.int64)
    label, at_label = tl.load(units.column + token), tl.load(units.at_label + token)
    has_label = label >= 0
    _put_zero(out_ptr, token * out_row + label, has_label)
    _put_zero(turned_ptr, label.to(tl.int64) * turned_row + token, has_label)
    listed = tl.minimum(tl.load(large.counts + token), CAPACITY - 1)
    count = listed + has_label.to(tl.int32)
    place = tl.arange(0, PLACES)
    at = token * CAPACITY + place
    columns = tl.load(large.columns + at, mask=place < listed, other=label)
    gradients = tl.load(large.gradients + at, mask=place < listed, other=at_label)
    before = (has_label & (label < columns)).to(tl.int32)
    for i in range(listed):
        before += (tl.load(large.columns + token * CAPACITY + i) < columns).to(tl.int32)
    tl.debug_barrier()  # all have read the list
    at = token * CAPACITY + before
    tl.store(large.columns + at, columns, mask=place < count)
    tl.store(large.gradients + at, gradients, mask=place < count)
    tl.store(large.counts + token, count)


def units_of(request: Request, merged: torch.Tensor, grads: dict) -> Units:
    """`fp8.units_of` in one launch."""
    facts, x = request.facts, request.tensors
    n_rows = x.labels.shape[0]
    kinds = torch.float32, torch.int32, torch.float32, torch.float32, torch.int32, torch.float32
    units = Units._make([merged.new_empty(n_rows, dtype=kind) for kind in kinds])
    if n_rows == 0:
        return units
    known = dict(zip(request.layout.merged, merged.unbind(0)))
    rows = tuple(known[name] for name in ("shift", "sum", "others", "target"))
    upstream = tuple(grads.get(name) for name in STATISTICS)
    keys = pointer_key(x.labels), x.temperatures is None, *[g is None for g in upstream]
    launch(
        units_kernel,
        ceil_div(n_rows, FP8_UNITS.block),
        (
            merged.device,
            x.labels.dtype,
            *keys,
            *map(pointer_key, (*rows, *upstream, x.temperatures)),
        ),
        FP8_UNITS,
        units,
        rows,
        upstream,
        x.labels,
        x.temperatures,
        facts.scale if x.temperatures is not None else facts.scale / facts.temperature,
        n_rows,
        facts.start,
        facts.valid_width,
    )
    return units


def split_gradient(
    out: Fp8Gradient, request: Request, merged: torch.Tensor, grads: dict, units: Units
):
    """Write the gradient of logits in its two parts. Their rows are whole groups of 4 columns apart,
    as those of a block are, so that the last one may be read to its end."""
    n_rows, facts = request.tensors.logits.shape[0], request.facts
    padded_width = out.rows.shape[1] if out.rows is not None else out.turned.shape[0]
    if 0 in (n_rows, padded_width):
        return
    assert request.tensors.logits.stride(0) % 4 == 0
    inputs, prepared = inputs_of(request)
    shift = merged[request.layout.merged.index("shift")]
    known = units, inputs, shift, n_rows
    bytes_of = [None if x is None else x.view(torch.uint8) for x in (out.rows, out.turned)]
    strides = [0 if x is None else x.stride(0) for x in bytes_of]
    # four columns of a token, and four tokens of a column, are one number
    numbers = [None if x is None else x.view(torch.int32) for x in bytes_of]
    tile = FP8_GRADIENT[request.tensors.logits.dtype.itemsize]
    groups, fours = tile.block
    tiles = ceil_div(n_rows, 4 * groups) * ceil_div(padded_width, 4 * fours)
    marks_each, columns_each = FP8_MARKS.block
    programs = ceil_div(padded_width, columns_each) * ceil_div(n_rows, 4 * marks_each)
    marks = merged.new_zeros(programs * marks_each, dtype=torch.uint8)
    skipped = facts.start % 4
    keys = *[s % 64 == 0 for s in strides], *map(pointer_key, (*bytes_of, shift))
    variant = merged.device, prepared.variant, padded_width % 16 == 0, skipped, *keys
    launch(
        split_gradient_kernel,
        tiles,
        variant,
        tile,
        numbers[0],
        strides[0] // 4,
        numbers[1],
        strides[1] // 4,
        marks,
        *known,
        padded_width,
        facts.valid_width,
        skipped,
        FP8_MARKS.block,
    )
    places = bytes_of[0], strides[0], bytes_of[1], strides[1]
    launch(
        list_large_kernel,
        programs,
        variant,
        FP8_MARKS,
        out.large,
        *places,
        marks,
        *known,
        facts.valid_width,
    )
    launch(order_large_kernel, n_rows, variant, FP8_LIST, out.large, *places, units)
