"""Device functions of `entropy`."""

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
    return (move.factor * tl.fma(move.drop, move.sum, state[0]),)


@triton.jit
def add(state, tile, softmax, chunk, inputs, rows):
    return (tl.fma(softmax.p, tl.maximum(softmax.shifted, -1e30), state[0]),)  # 0 * -inf is 0 here


@triton.jit
def store(out, n, state, core, chunk, inputs, rows):
    tl.store(out + rows.moment * n, lane_sum(state[0]))


@triton.jit
def add_packet(state, packet, softmax, rows):
    moment = read(packet, rows.moment, 0.0).to(tl.float64)
    return (tl.fma(softmax.factor, tl.fma(softmax.drop, softmax.sum, moment), state[0]),)


@triton.jit
def fold(state, packet, rows):
    put(packet, rows.moment, state[0])


@triton.jit
def finish(state, joined, out, inputs, rows):
    moment = state[0]
    if rows.packet.owner is not None:
        at_target = tl.where(joined.p_target == 0.0, 0.0, joined.p_target * joined.offset)
        moment = joined.factor * tl.fma(joined.drop, joined.others, moment) + at_target
    mean = moment / joined.whole
    report(out.merged, joined, rows.merged.mean, mean, joined.bad)
    report(out.value, joined, rows.value.entropy, joined.log_sum - mean, joined.bad)


@triton.jit
def load(grads, token, inputs, rows):
    return upstream(grads.entropy, token), tl.load(token.merged + rows.mean * token.n)


@triton.jit
def coefficient(away, state, shifted, p, token):
    g = tl.where(token.ignored, 0.0, state[0] / token.whole)
    # where p underflows the factor stays finite, so that their product is 0
    return away - g * (tl.maximum(shifted, -200.0) - state[1])


@triton.jit
def at_target(common, state, offset, token):
    return common - state[0] * tl.where(offset == float("-inf"), 0.0, offset - state[1])


STATISTICS = Statistics(one_lane_sum, rescale, add, store)
MERGE = Merge(one_sum, no_peak, add_packet, fold, finish)
GRADIENT = Gradient(load, coefficient, at_target)
