"""Statistics and the gradient of a loss in one launch, where one rank has the whole vocabulary.

A program reads its row from memory for the packets of all chunks, merges its softmax, and reads the row once more, for
the gradient, from the L2 cache. The last program of a group of rows merges their packets for all that the merge stores.
Packets, merged sums and gradient have the bits of `kernels`: the same device functions compute them, and sums are added
up in the same order.

Logits are transformed by a bias at most: a compiler may fuse a factor with the next subtraction in one kernel and not
in the other. The upstream gradient of the loss is not known yet: the gradient is written for the one that is expected,
and written again by `gradient_again_kernel` where another one came.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..statistics import softmax_triton as softmax
from ..statistics.family_triton import loss_gradient, loss_of_row, open_chunk, read, transform, upstream, weigh_token
from ..statistics.numerics_triton import exp, fixed_sums, settle, times, widen
from ..statistics.records_triton import Core, Lists, Packet, Tile, Token
from .assumed_loss_triton import ASSUMED_UPSTREAM, rows_done
from .kernels import add_to_states, rescale_states, start_states
from .merge_triton import merge_tokens
from .transports.symmetric_memory_triton import SharedMemory

# Stages of the loops' pipelines.
PACKET_STAGES, MASKED_STAGES, GRADIENT_STAGES = tl.constexpr(4), tl.constexpr(3), tl.constexpr(3)


class AssumedLoss(NamedTuple):
    """Factors of a reduced loss's gradient before the loss is known."""

    assumed: Any  # of `assume_kernel`
    weight: Any  # [T] fp32 or None


class RowSoftmax(NamedTuple):
    """The merged rows of one row's softmax."""

    shift: Any  # maximum
    whole: Any  # sum of exp(z - shift)
    others: Any  # p of all columns but the label's
    target: Any  # the label's logit, relative to the maximum


class Plan(NamedTuple):
    """Sizes of a program."""

    chunks: int
    group: int  # rows that are merged together
    parts: int  # of a tile of each chunk
    tile: int  # columns of the gradient
    padded: bool  # whether columns are padding
    early: bool  # whether it begins while `assume_kernel` still runs


@triton.jit
def _offset_of(i, whole, waiting, BLOCK: tl.constexpr):
    """Where the tile is that comes at i in each chunk: the target's comes after all other whole ones."""
    later = tl.where(i + BLOCK == whole, waiting, i + BLOCK)
    # the compiler does not see that it is a multiple, and would load one logit after the other
    return tl.multiple_of(tl.where((i >= waiting) & (i < whole), later, i), [BLOCK, BLOCK])


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
    for k in tl.static_range(len(parts)):
        inside = parts[k][1]
        z, _slope = transform(widen(parts[k][0]), chunk.first + inside, inputs, chunk.pre, chunk.post)
        v = z
        if MASKED:
            z = tl.where(inside < chunk.size, z, float("-inf"))
            v = tl.where(inside == chunk.target, float("-inf"), z)
        tiles += ((z, v),)
    highest = tiles[0][1]  # of all parts, so that the columns are compared once
    for k in tl.static_range(1, len(parts)):
        highest = tl.maximum(highest, tiles[k][1])
    peak = tl.maximum(m, tl.max(highest, axis=1, keep_dims=True))
    grown = ()
    added = ()
    for k in tl.static_range(len(parts)):
        tile = Tile(tiles[k][0], tiles[k][1], 0, chunk.first + parts[k][1], offset, True)
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
    for i in tl.range(plain, tl.where(chunk.ignored, 0, inputs.chunk_size), BLOCK, num_stages=MASKED_STAGES):
        offset = _offset_of(i, whole, waiting, BLOCK)
        parts = _load_parts(inputs, chunk, offset, PARTS, BLOCK, True)
        m, sums, states = _add_tiles(m, sums, states, parts, offset, families, chunk, inputs, rows, BLOCK, True)
    return m, sums, states


@triton.jit
def _store_packets(
    packets_ptr, inputs, families, rows, row, n_rows, valid_width, ignore_index, PLAN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store the packets of all chunks of a row."""
    CHUNKS: tl.constexpr = PLAN.chunks
    PARTS: tl.constexpr = PLAN.parts
    index = tl.arange(0, CHUNKS)[:, None]
    chunk = open_chunk(inputs, row, index, n_rows, 0, valid_width, ignore_index)
    target = softmax.load_target(chunk, inputs)  # before the loops, so that nothing waits for it
    zeros = tl.zeros([CHUNKS, BLOCK // PARTS], tl.float32)
    m, sums, states = _stream(inputs, chunk, families, rows, zeros, PARTS, BLOCK)
    n = n_rows.to(tl.int64)
    out = packets_ptr + index.to(tl.int64) * rows.height * n + row
    core = Core(m, _joined(sums))
    softmax.store_sums(out, n, core, 0, inputs, rows)
    softmax.store_target(out, n, target, chunk, rows)
    for i in tl.static_range(len(families)):
        state = ()
        for j in tl.static_range(len(states[0][i])):
            parts = ()
            for k in tl.static_range(PARTS):
                parts += (states[k][i][j],)
            state += (_joined(parts),)
        families[i].store(out, n, state, core, chunk, inputs, rows)


@triton.jit
def _merged_softmax(packets_ptr, rows, row, n, CHUNKS: tl.constexpr):
    """The merged softmax of a row, from the packets that are stored, by the formulas of `merge_triton`."""
    index = tl.arange(0, CHUNKS)
    packet = Packet(packets_ptr + index.to(tl.int64) * rows.height * n + row, n, index < CHUNKS)
    peak = tl.max(read(packet, rows.max, 0.0), axis=0)
    terms = softmax.packet_softmax(packet, peak, 1.0, rows)
    target = tl.where(terms.owner == 1.0, read(packet, rows.target, 0.0), 0.0)
    others = tl.zeros([CHUNKS], tl.float64)  # the same number in all
    for k in tl.static_range(CHUNKS):  # one after the other, as there
        this = tl.full([CHUNKS], k, tl.int32)
        others = tl.fma(tl.gather(terms.factor, this, 0), tl.gather(terms.sum, this, 0), others)
    state = tl.max(others, axis=0), tl.sum(target, axis=0).to(tl.float64), tl.sum(terms.owner, axis=0), 0
    return softmax.with_target(state, peak, 1.0, row, True, n, rows, CHUNKS)


@triton.jit
def _gradients(joined, grads, factor):
    """Gradients of a row's lse and log_prob; factor: `loss_of_row`."""
    grad_lse = 0.0
    grad_log_prob = 0.0
    if grads.lse is not None:
        grad_lse = loss_gradient(grads.lse, factor, settle(joined.top + joined.log_sum, joined.bad, joined.ignored))
    if grads.log_prob is not None:
        grad_log_prob = loss_gradient(grads.log_prob, factor, softmax.merged_log_prob(joined))
    return grad_lse, grad_log_prob


@triton.jit
def _store_gradient(
    dx_ptr, inputs, row, merged, grad_lse, grad_log_prob, valid_width, PADDED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Store the gradient of a row; merged: RowSoftmax. The formulas are those of `gradient_triton`."""
    ignored = merged.whole == 0.0
    factor = tl.where(ignored, 0.0, (grad_lse - grad_log_prob) / merged.whole)
    dx = dx_ptr + row * inputs.width
    tiles = tl.cdiv(inputs.width, TILE)
    for i in tl.range(0, tiles, num_stages=GRADIENT_STAGES):
        columns = (tiles - 1 - i) * TILE + tl.arange(0, TILE)  # backwards: what was read last is in the cache
        at = inputs.x + row * inputs.x_row + columns.to(tl.int64) * inputs.x_column
        x = tl.load(at, mask=columns < tl.where(ignored, 0, inputs.width), other=0.0, eviction_policy="evict_first")
        z, _slope = transform(widen(x), columns, inputs, 1.0, 1.0)
        dz = exp(z - merged.shift) * factor
        if inputs.bias is not None:
            dz = tl.where(ignored, 0.0, dz)
        if PADDED:
            dz = tl.where(columns < valid_width, dz, 0.0)
        # not kept in the cache, which the logits of other rows need
        tl.store(dx + columns, dz.to(dx_ptr.dtype.element_ty), mask=columns < inputs.width, cache_modifier=".cs")
    y = tl.load(inputs.labels + row).to(tl.int64)
    here = (y >= 0) & (y < valid_width) & ~ignored
    at_target = tl.exp(merged.target) * grad_lse / merged.whole
    at_target += merged.others * grad_log_prob
    tl.debug_barrier()  # after the row's own stores
    tl.store(dx + tl.where(here, y, 0), at_target.to(dx_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["n_rows", "valid_width", "ignore_index"])
def packets_and_gradient_kernel(
    out,  # Outputs
    packets_ptr,  # [CHUNKS, K, T] fp32 for the packets
    dx_ptr,  # [T, width] out, contiguous: the gradient for the expected upstream gradient
    inputs,  # Inputs
    grads,  # coefficients of lse and log_prob in the loss, see `loss_gradient`
    loss,  # AssumedLoss
    families, merges,  # their STATISTICS, their MERGE
    rows,  # numbers of rows by name: packet, merged, value
    n_rows, valid_width, ignore_index, PLAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: all packets of one row, and its gradient; the last one of a group of rows merges their packets."""
    row = tl.program_id(0).to(tl.int64)
    _store_packets(packets_ptr, inputs, families, rows.packet, row, n_rows, valid_width, ignore_index, PLAN, BLOCK)
    tl.debug_barrier()  # the packets are stored
    if PLAN.early:
        tl.extra.cuda.gdc_wait()  # for `assume_kernel`
    joined = _merged_softmax(packets_ptr, rows.packet, row, n_rows.to(tl.int64), PLAN.chunks)
    grad_lse, grad_log_prob = _gradients(joined, grads, weigh_token(tl.load(loss.assumed), loss.weight, row))
    shift, whole, others, offset = softmax.merged_rows(joined)
    merged = RowSoftmax(shift, whole, others, offset)
    _store_gradient(dx_ptr, inputs, row, merged, grad_lse, grad_log_prob, valid_width, PLAN.padded, PLAN.tile)
    group = tl.program_id(0) // PLAN.group
    done = tl.atomic_add(rows_done(loss.assumed) + group, 1)
    if done == tl.minimum(n_rows - group * PLAN.group, PLAN.group) - 1:
        merge_tokens(
            out, packets_ptr, inputs, SharedMemory(None, None, None), merges, rows, n_rows, group,
            PLAN.chunks, PLAN.chunks, PLAN.group,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "valid_width"])
def gradient_again_kernel(
    dx_ptr,  # [T, width] out, contiguous
    assumed_ptr,  # of `assume_kernel`
    expected_ptr,  # [] fp32 out: what to expect next
    inputs,  # Inputs
    merged_ptr,  # [R, T] fp32
    grads,  # upstream gradients by name, see `upstream`
    loss,  # LossGradient
    rows,  # numbers of the merged rows by name
    n_rows, valid_width,
    AGAIN: tl.constexpr,  # in any case; else only if another upstream gradient was expected
    PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the gradient of some rows."""
    n = n_rows.to(tl.int64)
    given = tl.load(loss.upstream)
    if tl.program_id(0) == 0:
        tl.store(expected_ptr, given)
    end = n_rows
    if not AGAIN:
        end = tl.where(tl.load(assumed_ptr + ASSUMED_UPSTREAM) == given, 0, n_rows)
    for first in range(0, end, tl.num_programs(0)):
        row = (first + tl.program_id(0)).to(tl.int64)
        if row < n:
            merged = merged_ptr + row
            token = Token(row, n, merged, 0, False, 1.0, Lists(row, row, row), 0, False, False, loss_of_row(loss, row))
            grad_lse, grad_log_prob = upstream(grads.lse, token), upstream(grads.log_prob, token)
            shift, whole = tl.load(merged + rows.shift * n), tl.load(merged + rows.sum * n)
            others, offset = tl.load(merged + rows.others * n), tl.load(merged + rows.target * n)
            _store_gradient(
                dx_ptr, inputs, row, RowSoftmax(shift, whole, others, offset), grad_lse, grad_log_prob, valid_width,
                PADDED, BLOCK,
            )  # fmt: skip
