"""Device functions of `total` and `mass`."""

import triton
import triton.language as tl

from .family_triton import (
    Gradient,
    Merge,
    Statistics,
    no_peak,
    not_rescaled,
    put,
    read,
    report,
    upstream,
)
from .numerics_triton import lane_sum


@triton.jit
def start(zeros, chunk, inputs):
    return zeros, zeros


@triton.jit
def add(state, tile, softmax, chunk, inputs, rows):
    w = 1.0
    if inputs.column_weight is not None:
        w = tl.load(
            inputs.column_weight + tile.columns, mask=tile.columns < inputs.width, other=0.0
        )
    absent = tile.z == float("-inf")
    return state[0] + tl.where(absent, 0.0, tile.z * w), state[1] + tl.where(absent, 0.0, w)


@triton.jit
def store(out, n, state, core, chunk, inputs, rows):
    tl.store(out + rows.total * n, lane_sum(state[0]))
    tl.store(out + rows.mass * n, lane_sum(state[1]))


@triton.jit
def start_merge(BLOCK: tl.constexpr):
    return tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)


@triton.jit
def add_packet(state, packet, softmax, rows):
    total = state[0] + read(packet, rows.total, 0.0).to(tl.float64)
    return total, state[1] + read(packet, rows.mass, 0.0).to(tl.float64)


@triton.jit
def fold(state, packet, rows):
    put(packet, rows.total, state[0])
    put(packet, rows.mass, state[1])


@triton.jit
def finish(state, joined, out, inputs, rows):
    report(out.value, joined, rows.value.total, state[0], joined.bad)
    report(out.value, joined, rows.value.mass, state[1], joined.bad)


@triton.jit
def load(grads, token, inputs, rows):
    return (upstream(grads.total, token),)


@triton.jit
def direct(dz, state, tile, token, grads, inputs, rows):
    w = tl.where(token.ignored, 0.0, state[0])
    if inputs.column_weight is not None:
        w *= tl.load(inputs.column_weight + tile.columns, mask=token.written, other=0.0)
    return dz + tl.where(tile.z == float("-inf"), 0.0, w)


STATISTICS = Statistics(start, not_rescaled, add, store)
MERGE = Merge(start_merge, no_peak, add_packet, fold, finish)
GRADIENT = Gradient(load, direct=direct)
