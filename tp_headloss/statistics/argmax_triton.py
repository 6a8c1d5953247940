"""Device functions of `argmax`: the loop over tiles finds the tile of the maximum, its column is looked up once."""

import triton
import triton.language as tl

from .family_triton import Merge, Statistics, load_logits, no_peak, no_sums, not_rescaled, read

LARGEST = tl.constexpr(2147483647)


@triton.jit
def add(state, tile, softmax, chunk, inputs, rows):
    larger = softmax.peak > softmax.before
    tied = (softmax.peak == softmax.before) & (tile.offset < state[0])
    return (tl.where(larger | tied, tile.offset, state[0]),)


@triton.jit
def store(out, n, state, core, chunk, inputs, rows, BLOCK: tl.constexpr):
    inside = state[0] + tl.arange(0, BLOCK)
    columns = chunk.first + inside
    z = load_logits(inputs, chunk, columns, (inside < inputs.chunk_size) & (columns < inputs.width))
    v = tl.where((inside < chunk.size) & (inside != chunk.target), z, float("-inf"))
    index = tl.min(tl.where(v == tl.max(v, axis=0), columns, LARGEST), axis=0)
    tl.store(out + rows.index * n, (chunk.start + index).to(tl.float32))


@triton.jit
def start_merge(BLOCK: tl.constexpr):
    return (tl.full([BLOCK], float("inf"), tl.float32),)


@triton.jit
def add_packet(state, packet, softmax, rows):
    column = read(packet, rows.index, 0.0)
    return (tl.where(softmax.max == softmax.peak, tl.minimum(state[0], column), state[0]),)


@triton.jit
def finish(state, joined, out, inputs, rows):
    best = state[0].to(tl.int64)
    if rows.packet.owner is not None:
        y = tl.load(inputs.labels + joined.token, mask=joined.here, other=0).to(tl.int64)
        tied = (joined.target == joined.shift) & (y < best)
        best = tl.where((joined.target > joined.shift) | tied, y, best)
        tl.store(out.hits + joined.token, (best == y) & ~joined.bad & ~joined.ignored, mask=joined.here)
    tl.store(out.argmax + joined.token, tl.where(joined.bad | joined.ignored, -1, best), mask=joined.here)


STATISTICS = Statistics(no_sums, not_rescaled, add, store)
MERGE = Merge(start_merge, no_peak, add_packet, finish)
GRADIENT = None
