"""Packets and the gradient of a loss in one launch, where one rank has the whole vocabulary.

A program reads its row from memory for the packets of all chunks, and once more, for the gradient, from the L2 cache.
The packets have the bits of `kernels.statistics_kernel`, and are merged by the kernel that merges all packets. The
gradient does not wait for that: its softmax is merged in fp32 from the same sums.

Logits are transformed by a bias at most: a compiler may fuse a factor with the next subtraction in one kernel and not
in the other.

The upstream gradient of the loss is not known yet: a row is written for the one that is expected, and written again by
`gradient_again_kernel` where another one came. Both have the same bits for the same upstream gradient.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..statistics import softmax_triton as softmax
from ..statistics.family_triton import open_chunk, transform
from ..statistics.numerics_triton import exp, fixed_sums, log1p, times, widen
from ..statistics.records_triton import Core, Tile
from .kernels import add_to_states, rescale_states, start_states
from .merged_sums_triton import start_sums
from .sums_triton import divisor_of

# Stages of the loops' pipelines.
PACKET_STAGES, GRADIENT_STAGES = tl.constexpr(4), tl.constexpr(3)


class LossTerms(NamedTuple):
    """A loss: the sum of coefficient * value * weight over terms and tokens, over a divisor; as in `sums_triton`."""

    coefficients: tuple  # floats
    weight: Any  # [T] fp32 or None
    denominator_ptr: Any  # [] fp64, or None: then the number
    denominator: Any
    expected: Any  # [] fp32 upstream gradient
    parts: Any  # of the merge's sums, see `merged_sums_triton`, or None


class TermBits(NamedTuple):
    """Sets of terms as bits: those with this statistic as their value, those that are squared, and negated."""

    lse: int
    log_prob: int
    target_logit: int
    squares: int
    negatives: int


@triton.jit
def _offset_of(i, whole, waiting, BLOCK: tl.constexpr):
    """Where the tile is that comes at i in each chunk: the target's comes after all other whole ones."""
    later = tl.where(i + BLOCK == whole, waiting, i + BLOCK)
    return tl.where((i >= waiting) & (i < whole), later, i)


@triton.jit
def _load_parts(inputs, chunk, offset, PARTS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Raw logits of a tile of each chunk, in parts that a warp reads at once, and their places in the chunk."""
    parts = ()
    for k in tl.static_range(PARTS):
        inside = offset + (k * (BLOCK // PARTS) + tl.arange(0, BLOCK // PARTS)[None, :])
        columns = chunk.first + inside
        at = inputs.x + chunk.row * inputs.x_row + columns.to(tl.int64) * inputs.x_column
        if MASKED:
            x = tl.load(at, mask=(inside < inputs.chunk_size) & (columns < inputs.width), other=0.0)
        else:
            x = tl.load(at)
        parts += ((x, inside),)
    return parts


@triton.jit
def _add_tiles(
    m, sums, states, parts, offset, families, chunk, inputs, rows, BLOCK: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Add a tile of each chunk to the maxima m [CHUNKS, 1], and to the lane sums and states of each part."""
    tiles = ()
    peak = m
    for k in tl.static_range(len(parts)):
        inside = parts[k][1]
        z, _slope = transform(widen(parts[k][0]), chunk.first + inside, inputs, chunk.pre, chunk.post)
        v = z
        if MASKED:
            z = tl.where(inside < chunk.size, z, float("-inf"))
            v = tl.where(inside == chunk.target, float("-inf"), z)
        peak = tl.maximum(peak, tl.max(v, axis=1, keep_dims=True))
        tiles += ((z, v),)
    grown = ()
    added = ()
    for k in tl.static_range(len(parts)):
        tile = Tile(tiles[k][0], tiles[k][1], 0, chunk.first + parts[k][1], offset, True, BLOCK)
        move = softmax.move_rows_to(m, sums[k], peak)
        state = rescale_states(families, states[k], move, chunk, inputs, rows)
        terms = softmax.tile_softmax(peak, m, peak, tile.v)
        added += (add_to_states(families, state, tile, terms, chunk, inputs, rows),)
        grown += (times(sums[k], move.factor) + terms.p,)
    return peak, grown, added


@triton.jit
def _joined(parts):
    """The lane sums of all parts, added up in `lane_sum`'s order; of integers, which are columns, the least."""
    for _ in tl.static_range(3):
        if len(parts) > 1:
            half = ()
            for k in tl.static_range(len(parts) // 2):
                a = parts[k]
                b = parts[k + len(parts) // 2]
                half += ((a + b) if a.dtype == tl.float32 else tl.minimum(a, b),)
            parts = half
    return fixed_sums(parts[0], parts[0].shape[1]) if parts[0].dtype == tl.float32 else parts[0]


@triton.jit
def _stream(inputs, chunk, families, rows, zeros, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Maxima [CHUNKS, 1] of the chunks of a row, and the lane sums and states of each part."""
    m = tl.full([zeros.shape[0], 1], float("-inf"), tl.float32)
    whole = chunk.size // BLOCK * BLOCK
    waiting = tl.where(chunk.target < 0, whole, chunk.target // BLOCK * BLOCK)
    sums = ()
    states = ()
    for _part in tl.static_range(PARTS):
        sums += (zeros,)
        states += (start_states(families, zeros, chunk, inputs),)
    plain = tl.maximum(tl.min(whole) - BLOCK, 0)  # tiles that are whole and without a target in every chunk
    for i in tl.range(0, plain, BLOCK, num_stages=PACKET_STAGES):
        offset = _offset_of(i, whole, waiting, BLOCK)
        parts = _load_parts(inputs, chunk, offset, PARTS, BLOCK, False)
        m, sums, states = _add_tiles(m, sums, states, parts, offset, families, chunk, inputs, rows, BLOCK, False)
    for i in range(plain, tl.where(chunk.ignored, 0, inputs.chunk_size), BLOCK):
        offset = _offset_of(i, whole, waiting, BLOCK)
        parts = _load_parts(inputs, chunk, offset, PARTS, BLOCK, True)
        m, sums, states = _add_tiles(m, sums, states, parts, offset, families, chunk, inputs, rows, BLOCK, True)
    return m, sums, states


@triton.jit
def _store_packets(
    packets_ptr, inputs, families, rows, row, n_rows, valid_width, ignore_index, CHUNKS: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the packets of all chunks of a row -> their maxima and sums, the label's logit, and whether it is here."""
    index = tl.arange(0, CHUNKS)[:, None]
    chunk = open_chunk(inputs, row, index, n_rows, 0, valid_width, ignore_index)
    zeros = tl.zeros([CHUNKS, BLOCK // PARTS], tl.float32)
    m, sums, states = _stream(inputs, chunk, families, rows, zeros, PARTS, BLOCK)
    n = n_rows.to(tl.int64)
    out = packets_ptr + index.to(tl.int64) * rows.height * n + row
    core = Core(m, _joined(sums))
    softmax.store_sums(out, n, core, 0, inputs, rows)
    target = softmax.load_target(chunk, inputs)
    softmax.store_target(out, n, target, chunk, rows)
    for i in tl.static_range(len(families)):
        state = ()
        for j in tl.static_range(len(states[0][i])):
            parts = ()
            for k in tl.static_range(PARTS):
                parts += (states[k][i][j],)
            state += (_joined(parts),)
        families[i].store(out, n, state, core, chunk, inputs, rows)
    return core, tl.sum(tl.where(chunk.owned, target, 0.0)), tl.max(chunk.owned.to(tl.int32)) > 0


@triton.jit
def _gradients_of_values(loss, row, values, ignored, TERMS: tl.constexpr):
    """Gradients of lse and log_prob for an upstream gradient of 1; values: lse, log_prob and the label's logit."""
    factor = 1.0 / divisor_of(loss.denominator_ptr, loss.denominator)
    if loss.weight is not None:
        factor *= tl.load(loss.weight + row)
    of_lse = 0.0
    of_log_prob = 0.0
    for i in tl.static_range(len(loss.coefficients)):
        g = factor * (loss.coefficients[i] * (1.0 - 2.0 * ((TERMS.negatives >> i) & 1)))
        for k in tl.static_range(3):
            if (TERMS[k] >> i) & 1:
                if (TERMS.squares >> i) & 1:
                    g *= 2.0 * values[k]
                if k != 1:  # the label's logit is log_prob + lse
                    of_lse += g.to(tl.float32)
                if k != 0:
                    of_log_prob += g.to(tl.float32)
    return tl.where(ignored, 0.0, of_lse), tl.where(ignored, 0.0, of_log_prob)


@triton.jit
def _merged(core, target, owned, ignored):
    """The softmax of a row in fp32: its maximum, the label's logit relative to it, the sum without the label's column
    and with it; NaN of a row without a softmax, or without its label."""
    peak = tl.max(core.max)
    target = tl.where(owned, target, float("-inf"))
    top = tl.maximum(peak, target)
    others = tl.sum(tl.where(core.max == float("-inf"), 0.0, core.sum * tl.exp(core.max - top)))
    offset = tl.where(target == float("-inf"), target, target - top)
    whole = others + tl.exp(offset)
    whole = tl.where(owned & (whole > 0.0), whole, float("nan"))
    return tl.where(ignored, 0.0, top), offset, others, tl.where(ignored, 1.0, whole)


@triton.jit
def _store_row(
    dx_ptr, inputs, row, shift, factor, at_label, ignored, ignore_index, valid_width, PADDED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Store the gradient of a row: factor * exp(z - shift), and that of the label's logit."""
    dx = dx_ptr + row * inputs.width
    tiles = tl.cdiv(inputs.width, TILE)
    for i in tl.range(0, tiles, num_stages=GRADIENT_STAGES):
        columns = (tiles - 1 - i) * TILE + tl.arange(0, TILE)  # backwards: what was read last is in the cache
        at = inputs.x + row * inputs.x_row + columns.to(tl.int64) * inputs.x_column
        x = tl.load(at, mask=columns < tl.where(ignored, 0, inputs.width), other=0.0, eviction_policy="evict_first")
        z, _slope = transform(widen(x), columns, inputs, 1.0, 1.0)
        dz = exp(z - shift) * factor
        if inputs.bias is not None:
            dz = tl.where(ignored, 0.0, dz)
        if PADDED:
            dz = tl.where(columns < valid_width, dz, 0.0)
        # not kept in the cache, which the logits of other rows need
        tl.store(dx + columns, dz.to(dx_ptr.dtype.element_ty), mask=columns < inputs.width, cache_modifier=".cs")
    y = tl.load(inputs.labels + row).to(tl.int64)
    here = (y >= 0) & (y < valid_width) & (y != ignore_index)
    tl.debug_barrier()  # after the row's own stores
    tl.store(dx + tl.where(here, y, 0), at_label.to(dx_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["n_rows", "valid_width", "ignore_index"])
def packets_and_gradient_kernel(
    packets_ptr,  # [CHUNKS, K, T] fp32 out
    dx_ptr,  # [T, width] out, contiguous: the gradient for the expected upstream gradient
    kept_ptr,  # [4, T] fp32 out: what `gradient_again_kernel` needs
    inputs,  # Inputs
    loss,  # LossTerms
    families,  # their STATISTICS
    rows,  # numbers of the packets' rows by name
    n_rows, valid_width, ignore_index,
    PLAN: tl.constexpr,  # chunks, parts of a tile of a chunk, tile of the gradient, whether there is padding
    TERMS: tl.constexpr,  # TermBits
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: all packets of one row, and its gradient."""
    row = tl.program_id(0).to(tl.int64)
    n = n_rows.to(tl.int64)
    if loss.parts is not None:
        start_sums(loss.parts)
    core, target, owned = _store_packets(
        packets_ptr, inputs, families, rows, row, n_rows, valid_width, ignore_index, PLAN[0], PLAN[1], BLOCK
    )
    ignored = tl.load(inputs.labels + row).to(tl.int64) == ignore_index
    shift, offset, others, whole = _merged(core, target, owned, ignored)
    log_sum = tl.log(whole)
    log_prob = tl.where(offset == 0.0, -log1p(others.to(tl.float64)).to(tl.float32), offset - log_sum)
    of_lse, of_log_prob = _gradients_of_values(loss, row, (shift + log_sum, log_prob, target), ignored, TERMS)
    factor = (of_lse - of_log_prob) / whole
    at_label = tl.exp(offset) * of_lse / whole + others / whole * of_log_prob
    expected = tl.load(loss.expected)
    tl.store(kept_ptr + row, shift)
    tl.store(kept_ptr + n + row, factor)
    tl.store(kept_ptr + 2 * n + row, at_label)
    tl.store(kept_ptr + 3 * n + row, expected)
    _store_row(
        dx_ptr, inputs, row, shift, factor * expected, at_label * expected, ignored, ignore_index, valid_width,
        PLAN[3], PLAN[2],
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "valid_width", "ignore_index"])
def gradient_again_kernel(
    dx_ptr,  # [T, width] out, contiguous
    kept_ptr,  # [4, T] fp32 of `packets_and_gradient_kernel`
    upstream_ptr,  # [] fp32: gradient of the loss
    expected_ptr,  # [] fp32 out: what to expect next
    inputs,  # Inputs
    n_rows, valid_width, ignore_index,
    AGAIN: tl.constexpr,  # in any case; else only rows that were written for another upstream gradient
    PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the gradient of some rows."""
    n = n_rows.to(tl.int64)
    upstream = tl.load(upstream_ptr)
    if tl.program_id(0) == 0:
        tl.store(expected_ptr, upstream)
    for first in range(0, n_rows, tl.num_programs(0)):
        row = (first + tl.program_id(0)).to(tl.int64)
        kept = kept_ptr + row
        other = row < n
        if not AGAIN:
            other = other & (tl.load(kept + 3 * n, mask=other, other=0.0) != upstream)
        if other:
            ignored = tl.load(inputs.labels + row).to(tl.int64) == ignore_index
            shift, factor, at_label = tl.load(kept), tl.load(kept + n), tl.load(kept + 2 * n)
            _store_row(
                dx_ptr, inputs, row, shift, factor * upstream, at_label * upstream, ignored, ignore_index,
                valid_width, PADDED, BLOCK,
            )  # fmt: skip
