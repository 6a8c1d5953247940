"""Device functions of a top-K teacher's tail: sums over all columns but the entries.

While logits stream by, nobody asks which columns are entries: a lane adds up every BLOCK-th column
of a chunk, and the few lanes that have an entry, or the target, are added up again without it: no
digits are lost by subtraction.
"""

import triton
import triton.language as tl

from .distinct_triton import NO_ENTRY
from .family_triton import load_logits
from .numerics_triton import exp, fixed_sum, lane_sum, neighbours_sum
from .softmax_triton import load_target
from .teacher_triton import add_softmax

# lanes that are added up again at once, in this many tiles
AGAIN, TILES = tl.constexpr(16), tl.constexpr(8)
MOST_AGAIN = tl.constexpr(32)  # entries of a chunk; with more its tail is summed by itself
# A tail with less than this part of its chunk's largest exponential is summed relative to its own
# maximum: far below another one exp loses digits, and at last underflows.
LEAST_TAIL = tl.constexpr(2.0**-24)


@triton.jit
def start(zeros, chunk, inputs):
    """Lane sums of exp(a (v - m)), which are the softmax's own where a is 1, and of the same times
    a (v - m)."""
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
def _marked_lanes(entries, begin, end, target, first, BLOCK: tl.constexpr):
    """Return a chunk's lanes that have an entry or the target, those with several, and the target's
    column (entry: -1).

    Lanes are bits [32]: a number for each thread of the warp, with a bit for each of its WIDE lanes
    side by side."""
    tl.static_assert((BLOCK >= 32) & (BLOCK <= 1024))
    WIDE: tl.constexpr = min(8, BLOCK // 32)
    threads = tl.arange(0, 32).to(tl.uint32)
    marked = tl.zeros([32], tl.uint32)
    again = tl.zeros([32], tl.uint32)
    for j in range(begin, end + 1):
        column = target
        if j < end:
            column = tl.load(entries + j) - first
            target = tl.where(column == target, -1, target)
        lane = column.to(tl.uint32) % BLOCK  # unsigned, so that divisions are shifts
        bit = tl.full([32], 1, tl.uint32) << (lane // (32 * WIDE) * WIDE + lane % WIDE)
        bit = tl.where((threads == lane // WIDE % 32) & (column >= 0), bit, tl.zeros_like(bit))
        again |= marked & bit
        marked |= bit
    return marked, again, target


@triton.jit
def _without(x, marked):
    """Lane sums without those of marked lanes, see `_marked_lanes`."""
    BLOCK: tl.constexpr = x.shape[0]
    WIDE: tl.constexpr = min(8, BLOCK // 32)
    bit = (
        WIDE * tl.arange(0, BLOCK // (32 * WIDE))[:, None, None] + tl.arange(0, WIDE)[None, None, :]
    )
    x = tl.reshape(x, [BLOCK // (32 * WIDE), 32, WIDE])
    return tl.reshape(tl.where(((marked[None, :, None] >> bit) & 1) != 0, 0.0, x), [BLOCK])


@triton.jit
def _without_entries(s, moment, m, entries, begin, end, chunk, inputs, rows):
    """Sum and moment of a chunk without its entries, from the lane sums of all columns but the
    target; and whether the target belongs to them and is above m, which leaves it out."""
    BLOCK: tl.constexpr = s.shape[0]
    first = chunk.start + chunk.first
    sums = tl.zeros([AGAIN * TILES], tl.float32)
    moments = tl.zeros([AGAIN * TILES], tl.float32)
    shift = tl.where(m == float("-inf"), 0.0, m)
    marked, again, target = _marked_lanes(entries, begin, end, chunk.target, first, BLOCK)
    above = (target >= 0) & (load_target(chunk, inputs) > m)
    is_alone = tl.max(again, axis=0) == 0
    for k in range(begin, end + 1, AGAIN):
        number = k + tl.arange(0, AGAIN)
        entry = tl.load(entries + number, mask=number < end, other=0) - first
        entry = tl.where(number < end, entry, -1)
        column = tl.where(number == end, target, entry)
        lane = tl.where(column >= 0, column % BLOCK, chunk.size)
        if not is_alone:  # the first in a lane adds it up
            for j in range(begin, end):
                taken = (tl.load(entries + j) - first) % BLOCK
                lane = tl.where((taken == lane) & (j < number), chunk.size, lane)
        for o in tl.range(0, chunk.size, BLOCK * TILES, num_stages=1):
            inside = o + lane[:, None] + BLOCK * tl.arange(0, TILES)[None, :]
            here = (inside < chunk.size) & (inside != entry[:, None])
            if not is_alone:
                for j in range(begin, end):
                    here = here & (inside != tl.load(entries + j) - first)
            z = load_logits(inputs, chunk, chunk.first + inside, here)
            shifted = tl.where(here, z - shift, float("-inf"))
            if inputs.student_scale is not None:
                shifted *= chunk.student_scale
            p = exp(shifted)
            sums += tl.reshape(p, [AGAIN * TILES])
            if rows.tail_moment is not None:
                moments += tl.reshape(p * tl.maximum(shifted, -1e30), [AGAIN * TILES])
    sum_of_moments = 0.0
    if rows.tail_moment is not None:
        sum_of_moments = neighbours_sum(_without(moment, marked), BLOCK) + fixed_sum(
            moments, AGAIN * TILES
        )
    s = neighbours_sum(_without(s, marked), BLOCK) + fixed_sum(sums, AGAIN * TILES)
    return s, sum_of_moments, above


@triton.jit
def _by_itself(zeros, entries, entry, chunk, inputs, rows):
    """Maximum, lane sums and moment of a chunk's columns that are no entries, which begin at number
    `entry`."""
    BLOCK: tl.constexpr = zeros.shape[0]
    m = -float("inf")
    s = zeros
    moment = zeros
    for o in tl.range(0, chunk.size, BLOCK, num_stages=1):
        inside = o + tl.arange(0, BLOCK)
        columns = chunk.first + inside
        z = tl.where(
            inside < chunk.size,
            load_logits(inputs, chunk, columns, inside < chunk.size),
            float("-inf"),
        )
        found = tl.load(entries + entry, mask=entry < inputs.n_entries, other=NO_ENTRY)
        while found < chunk.start + chunk.first + o + BLOCK:
            z = tl.where(chunk.start + columns == found, float("-inf"), z)
            entry += 1
            found = tl.load(entries + entry, mask=entry < inputs.n_entries, other=NO_ENTRY)
        m, s, moment, _, _ = add_softmax(
            m,
            s,
            moment,
            moment,
            z,
            chunk.student_scale,
            inputs.student_scale is not None,
            rows.tail_moment is not None,
            False,
        )
    return m, lane_sum(s), lane_sum(moment)


@triton.jit
def store(out, n, begin, count, state, core, chunk, inputs, rows):
    """Store the packet rows; begin, count: of the chunk's entries, see `entries_in_chunk`."""
    if rows.tail_max is not None:
        lanes = core.sum
        if inputs.student_scale is not None:
            lanes = state[0]
        entries = inputs.entries + chunk.row * inputs.n_entries
        m = core.max
        s = 0.0
        moment = 0.0
        above = count > MOST_AGAIN
        if not above:
            s, moment, above = _without_entries(
                lanes, state[1], m, entries, begin, begin + count, chunk, inputs, rows
            )
        if above | ~(s >= LEAST_TAIL):
            m, s, moment = _by_itself(tl.zeros_like(lanes), entries, begin, chunk, inputs, rows)
        tl.store(out + rows.tail_max * n, m + 0.0)
        tl.store(out + rows.tail_sum * n, s)
        if rows.tail_moment is not None:
            tl.store(out + rows.tail_moment * n, moment)
