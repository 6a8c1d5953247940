"""Device functions of `argmax`: the loop over tiles finds the tile of the maximum, its column is
looked up once.

Lanes of tiles with several rows keep its columns: their maximum is that of the whole chunk.
"""

import triton
import triton.language as tl

from .family_triton import Merge, Statistics, load_logits, no_peak, not_rescaled, put, read

NO_COLUMN = tl.constexpr(2147483647)


@triton.jit
def start(zeros, chunk, inputs):
    if len(zeros.shape) == 2:
        found = tl.full(zeros.shape, NO_COLUMN, tl.int32)
    else:
        found = 0
    return (found,)


@triton.jit
def add(state, tile, softmax, chunk, inputs, rows):
    if len(tile.v.shape) == 2:
        found = tl.minimum(state[0], tl.where(tile.v == softmax.peak, tile.columns, NO_COLUMN))
    else:
        larger = softmax.peak > softmax.before
        tied = (softmax.peak == softmax.before) & (tile.offset < state[0])
        found = tl.where(larger | tied, tile.offset, state[0])
    return (found,)


@triton.jit
def store(out, n, state, core, chunk, inputs, rows):
    if len(core.sum.shape) == 2:
        index = tl.min(state[0], axis=1, keep_dims=True)
    else:
        inside = state[0] + tl.arange(0, core.sum.shape[0])
        columns = chunk.first + inside
        z = load_logits(
            inputs, chunk, columns, (inside < inputs.chunk_size) & (columns < inputs.width)
        )
        v = tl.where((inside < chunk.size) & (inside != chunk.target), z, float("-inf"))
        index = tl.min(tl.where(v == tl.max(v, axis=0), columns, NO_COLUMN), axis=0)
    tl.store(out + rows.index * n, (chunk.start + index).to(tl.float32))


@triton.jit
def start_merge(BLOCK: tl.constexpr):
    return (tl.full([BLOCK], float("inf"), tl.float32),)


@triton.jit
def add_packet(state, packet, softmax, rows):
    column = read(packet, rows.index, 0.0)
    return (tl.where(softmax.max == softmax.peak, tl.minimum(state[0], column), state[0]),)


@triton.jit
def fold(state, packet, rows):
    put(packet, rows.index, state[0])


@triton.jit
def finish(state, joined, out, inputs, rows):
    best = state[0].to(tl.int64)
    if rows.packet.owner is not None:
        y = tl.load(inputs.labels + joined.token, mask=joined.here, other=0).to(tl.int64)
        tied = (joined.target == joined.shift) & (y < best)
        best = tl.where((joined.target > joined.shift) | tied, y, best)
        tl.store(
            out.hits + joined.token, (best == y) & ~joined.bad & ~joined.ignored, mask=joined.here
        )
    tl.store(
        out.argmax + joined.token, tl.where(joined.bad | joined.ignored, -1, best), mask=joined.here
    )


STATISTICS = Statistics(start, not_rescaled, add, store)
MERGE = Merge(start_merge, no_peak, add_packet, fold, finish)
GRADIENT = None
