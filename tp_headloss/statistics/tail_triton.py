"""Device functions of a top-K teacher's tail: sums over all columns but the entries.

While logits stream by, nobody asks which columns are entries: a lane adds up every BLOCK-th column of a chunk, and the
few lanes that have an entry, or the target, are added up again without it. So nothing is subtracted, and no digits are
lost.
"""

import triton
import triton.language as tl

from .entries_triton import AT_ONCE, NONE
from .family_triton import load_logits
from .numerics_triton import exp, fixed_sum, lane_sum
from .teacher_triton import add_softmax

AGAIN, TILES = tl.constexpr(16), tl.constexpr(8)  # lanes that are added up again at once, in this many tiles
# A tail with less than this part of its chunk's largest exponential is summed relative to its own maximum: far below
# another one exp loses digits, and at last underflows.
LEAST = tl.constexpr(2.0**-24)


@triton.jit
def start(zeros, chunk, inputs):
    """Lane sums of exp(a (v - m)), which are the softmax's own where a is 1, and of the same times a (v - m)."""
    return zeros, zeros


@triton.jit
def rescale(state, move, chunk, inputs, rows):
    s = state[0]
    moment = state[1]
    if rows.tail_max is not None:
        drop = move.drop
        factor = move.factor
        before = move.sum
        if inputs.student_scale is not None:
            drop *= chunk.student_scale
            factor = tl.where(move.before == float("-inf"), 0.0, exp(drop))
            before = s
            s *= factor
        if rows.tail_moment is not None:
            moment = factor * tl.fma(drop, before, moment)
    return s, moment


@triton.jit
def add(state, tile, softmax, chunk, inputs, rows):
    s = state[0]
    moment = state[1]
    if rows.tail_max is not None:
        shifted = softmax.shifted
        p = softmax.p
        if inputs.student_scale is not None:
            shifted *= chunk.student_scale
            p = exp(shifted)
            s += p
        if rows.tail_moment is not None:
            moment = tl.fma(p, tl.maximum(shifted, -1e30), moment)
    return s, moment


@triton.jit
def _entries_of(chunk, inputs):
    """Pointer to a row's entries, which ascend; numbers of the first that is in the chunk, and behind its last."""
    entries = inputs.entries + chunk.row * inputs.n_entries
    first = chunk.start + chunk.first
    begin = 0
    end = 0
    for k in range(0, inputs.n_entries, AT_ONCE):
        place = k + tl.arange(0, AT_ONCE)
        ids = tl.load(entries + place, mask=place < inputs.n_entries, other=NONE)
        begin += tl.sum((ids < first).to(tl.int32), axis=0)
        end += tl.sum((ids < first + chunk.size).to(tl.int32), axis=0)
    return entries, begin, end


@triton.jit
def _without_entries(s, moment, m, entries, begin, end, chunk, inputs, rows):
    """Sum and moment of a chunk without its entries, from the lane sums of all columns but the target; and whether the
    target belongs to them and is above m, which leaves it out."""
    BLOCK: tl.constexpr = s.shape[0]
    lanes = tl.arange(0, BLOCK)
    first = chunk.start + chunk.first
    sums = tl.zeros([AGAIN * TILES], tl.float32)
    moments = tl.zeros([AGAIN * TILES], tl.float32)
    above = False
    shift = tl.where(m == float("-inf"), 0.0, m)
    at_target = lanes == tl.where(chunk.target < 0, -1, chunk.target % BLOCK)
    s = tl.where(at_target, 0.0, s)
    moment = tl.where(at_target, 0.0, moment)
    for k in range(begin, end + 1, AGAIN):
        number = k + tl.arange(0, AGAIN)
        column = tl.load(entries + number, mask=number < end, other=0) - first
        column = tl.where(number < end, column, tl.where(number == end, chunk.target, -1))
        lane = column % BLOCK
        owner = column >= 0  # whether it is the first in its lane
        others = tl.zeros_like(owner)  # whether there are others
        for j in range(begin, end):
            taken = (tl.load(entries + j) - first) % BLOCK
            s = tl.where(lanes == taken, 0.0, s)
            if rows.tail_moment is not None:
                moment = tl.where(lanes == taken, 0.0, moment)
            owner = owner & ((taken != lane) | (j >= number))
            others = others | ((taken == lane) & (j != number))
        is_alone = tl.max(others.to(tl.int32), axis=0) == 0
        for o in tl.range(0, chunk.size, BLOCK * TILES, num_stages=1):
            inside = o + lane[:, None] + BLOCK * tl.arange(0, TILES)[None, :]
            here = (inside < chunk.size) & owner[:, None] & ((inside != column[:, None]) | (number == end)[:, None])
            if not is_alone:
                for j in range(begin, end):
                    here = here & (inside != tl.load(entries + j) - first)
            z = load_logits(inputs, chunk, chunk.first + inside, here)
            above = above | (tl.max((here & (z > m)).to(tl.int32)) > 0)
            shifted = tl.where(here, tl.where(z > shift, 0.0, z - shift), float("-inf"))
            if inputs.student_scale is not None:
                shifted *= chunk.student_scale
            p = exp(shifted)
            sums += tl.reshape(p, [AGAIN * TILES])
            if rows.tail_moment is not None:
                moments += tl.reshape(p * tl.maximum(shifted, -1e30), [AGAIN * TILES])
    s = lane_sum(s) + fixed_sum(sums, AGAIN * TILES)
    moment = lane_sum(moment) + fixed_sum(moments, AGAIN * TILES)
    return s, moment, above


@triton.jit
def _by_itself(zeros, entries, entry, chunk, inputs, rows):
    """Maximum, lane sums and moment of a chunk's columns that are no entries, which begin at number `entry`."""
    BLOCK: tl.constexpr = zeros.shape[0]
    m = -float("inf")
    s = zeros
    moment = zeros
    for o in tl.range(0, chunk.size, BLOCK, num_stages=1):
        inside = o + tl.arange(0, BLOCK)
        columns = chunk.first + inside
        z = tl.where(inside < chunk.size, load_logits(inputs, chunk, columns, inside < chunk.size), float("-inf"))
        found = tl.load(entries + entry, mask=entry < inputs.n_entries, other=NONE)
        while found < chunk.start + chunk.first + o + BLOCK:
            z = tl.where(chunk.start + columns == found, float("-inf"), z)
            entry += 1
            found = tl.load(entries + entry, mask=entry < inputs.n_entries, other=NONE)
        m, s, moment, _, _ = add_softmax(
            m, s, moment, moment, z, chunk.student_scale, inputs.student_scale is not None,
            rows.tail_moment is not None, False,
        )  # fmt: skip
    return m, lane_sum(s), lane_sum(moment)


@triton.jit
def store(out, n, state, core, chunk, inputs, rows):
    if rows.tail_max is not None:
        lanes = core.sum
        if inputs.student_scale is not None:
            lanes = state[0]
        entries, begin, end = _entries_of(chunk, inputs)
        m = core.max
        s, moment, above = _without_entries(lanes, state[1], m, entries, begin, end, chunk, inputs, rows)
        if above | ~(s >= LEAST):
            m, s, moment = _by_itself(tl.zeros_like(lanes), entries, begin, chunk, inputs, rows)
        tl.store(out + rows.tail_max * n, m + 0.0)
        tl.store(out + rows.tail_sum * n, s)
        if rows.tail_moment is not None:
            tl.store(out + rows.tail_moment * n, moment)
