"""Device functions of `collision`."""

import triton
import triton.language as tl

from .family_triton import (
    Gradient,
    Merge,
    Statistics,
    no_peak,
    one_lane_sum,
    one_sum,
    put,
    read,
    report,
    upstream,
)
from .numerics_triton import lane_sum


@triton.jit
def rescale(state, move, chunk, inputs, rows):
    return (move.factor * (move.factor * state[0]),)


@triton.jit
def add(state, tile, softmax, chunk, inputs, rows):
    return (tl.fma(softmax.p, softmax.p, state[0]),)


@triton.jit
def store(out, n, state, core, chunk, inputs, rows):
    tl.store(out + rows.squares * n, lane_sum(state[0]))


@triton.jit
def add_packet(state, packet, softmax, rows):
    squares = read(packet, rows.squares, 0.0).to(tl.float64)
    return (tl.fma(softmax.factor * softmax.factor, squares, state[0]),)


@triton.jit
def fold(state, packet, rows):
    put(packet, rows.squares, state[0])


@triton.jit
def finish(state, joined, out, inputs, rows):
    squares = state[0]
    if rows.packet.owner is not None:
        squares = joined.factor * joined.factor * squares + joined.p_target * joined.p_target
    collision = squares / joined.whole / joined.whole
    report(out.merged, joined, rows.merged.collision, collision, joined.bad)
    report(out.value, joined, rows.value.collision, collision, joined.bad)


@triton.jit
def load(grads, token, inputs, rows):
    return 2.0 * upstream(grads.collision, token), tl.load(token.merged + rows.collision * token.n)


@triton.jit
def coefficient(away, state, shifted, p, token):
    per_sum = tl.where(token.ignored, 0.0, 1.0 / token.whole)
    return away + state[0] * per_sum * (p * per_sum - state[1])


@triton.jit
def at_target(common, state, offset, token):
    return common + state[0] * (tl.exp(offset) / token.whole - state[1])


STATISTICS = Statistics(one_lane_sum, rescale, add, store)
MERGE = Merge(one_sum, no_peak, add_packet, fold, finish)
GRADIENT = Gradient(load, coefficient, at_target)
