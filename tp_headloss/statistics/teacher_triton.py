"""Device functions of the statistics of a whole teacher.

The state: lane sums of p (z' - u); the running maximum of the teacher, lane sums of q = exp(u -
maximum), of q (u - z') and of q (u - maximum). A column without probability adds nothing, whatever
its logits are.
"""

import triton
import triton.language as tl

from .family_triton import Gradient, Merge, Statistics, nothing_loaded, put, read, report, upstream
from .numerics_triton import decay, exp, lane_sum, weigh


@triton.jit
def add_softmax(
    # running maximum, lane sums of exp(a (u - m)), of it times a (u - m), and one rescaled alike
    m,
    s,
    moment,
    cross,
    u,
    a,
    SCALED: tl.constexpr,
    WANT_MOMENT: tl.constexpr,
    WANT_CROSS: tl.constexpr,
):
    """Add a tile of any logits u to a softmax with a maximum of its own; the tile's exponentials
    come last."""
    peak = tl.max(u, axis=0)
    if peak > m:
        drop = tl.where(m == float("-inf"), 0.0, m - peak)
        if SCALED:
            drop *= a
        factor = tl.where(m == float("-inf"), 0.0, exp(drop))
        if WANT_MOMENT:
            moment = factor * tl.fma(drop, s, moment)
        s *= factor
        if WANT_CROSS:
            cross = tl.where(factor == 0.0, 0.0, factor * cross)
    m = tl.maximum(m, peak)
    fall = u - tl.where(m == float("-inf"), 0.0, m)
    if SCALED:
        fall *= a
    q = exp(fall)
    s += q
    if WANT_MOMENT:
        moment = tl.fma(q, tl.maximum(fall, -1e30), moment)
    return m, s, moment, cross, q


@triton.jit
def start(zeros, chunk, inputs):
    return zeros, -float("inf"), zeros, zeros, zeros


@triton.jit
def rescale(state, move, chunk, inputs, rows):
    gap = state[0]
    if rows.gap is not None:
        drop = move.drop
        if inputs.student_scale is not None:
            drop *= chunk.student_scale
        factor = tl.where(move.before == float("-inf"), 0.0, exp(drop))
        gap = tl.where(factor == 0.0, 0.0, factor * gap)
    return gap, state[1], state[2], state[3], state[4]


@triton.jit
def add(state, tile, softmax, chunk, inputs, rows):
    gap = state[0]
    cross = state[3]
    z = tile.z
    shifted = softmax.shifted
    if inputs.student_scale is not None:
        z *= chunk.student_scale
        shifted *= chunk.student_scale
    m, s, moment, cross, q = add_softmax(
        state[1],
        state[2],
        state[4],
        cross,
        tile.u,
        1.0,
        False,
        rows.teacher_moment is not None,
        rows.cross is not None,
    )
    if rows.cross is not None:
        cross += tl.where(q == 0.0, 0.0, q * (tile.u - z))
    if rows.gap is not None:
        p = exp(shifted)
        gap += tl.where(p == 0.0, 0.0, p * (z - tile.u))
    return gap, m, s, cross, moment


@triton.jit
def store(out, n, state, core, chunk, inputs, rows):
    tl.store(out + rows.teacher_max * n, state[1] + 0.0)
    tl.store(out + rows.teacher_sum * n, lane_sum(state[2]))
    if rows.teacher_target is not None:
        column = tl.where(chunk.owned, chunk.first + chunk.target, 0)
        at = (
            inputs.teacher
            + chunk.row * inputs.teacher_row
            + column.to(tl.int64) * inputs.teacher_column
        )
        t = tl.load(at, mask=chunk.owned, other=0.0).to(tl.float32)
        if inputs.student_scale is not None:
            t *= chunk.teacher_scale
        tl.store(out + rows.teacher_target * n, tl.where(chunk.owned, t, 0.0))
    if rows.gap is not None:
        tl.store(out + rows.gap * n, lane_sum(state[0]))
    if rows.cross is not None:
        tl.store(out + rows.cross * n, lane_sum(state[3]))
    if rows.teacher_moment is not None:
        tl.store(out + rows.teacher_moment * n, lane_sum(state[4]))


@triton.jit
def start_merge(BLOCK: tl.constexpr):
    """Maximum; sums of q, of cross, of gap, of the moment, of the target's u."""
    zeros = tl.zeros([BLOCK], tl.float64)
    return tl.full([BLOCK], -float("inf"), tl.float32), zeros, zeros, zeros, zeros, zeros


@triton.jit
def peak(state, packet, rows):
    peak = tl.maximum(state[0], read(packet, rows.teacher_max, 0.0))
    return peak, state[1], state[2], state[3], state[4], state[5]


@triton.jit
def add_packet(state, packet, softmax, rows):
    cross = state[2]
    gap = state[3]
    moment = state[4]
    target = state[5]
    m = read(packet, rows.teacher_max, 0.0).to(tl.float64)
    s = read(packet, rows.teacher_sum, 1.0).to(tl.float64)
    drop, factor = decay(m, state[0].to(tl.float64))
    whole = tl.fma(factor, s, state[1])
    if rows.teacher_target is not None:
        u = read(packet, rows.teacher_target, 0.0)
        target += tl.where(softmax.owner == 1.0, u, 0.0).to(tl.float64)
    if rows.cross is not None:
        cross += weigh(factor, read(packet, rows.cross, 0.0))
    if rows.gap is not None:
        gap += weigh(softmax.student_factor, read(packet, rows.gap, 0.0))
    if rows.teacher_moment is not None:
        moment = tl.fma(
            factor, tl.fma(drop, s, read(packet, rows.teacher_moment, 0.0).to(tl.float64)), moment
        )
    return state[0], whole, cross, gap, moment, target


@triton.jit
def fold(state, packet, rows):
    put(packet, rows.teacher_max, state[0])
    put(packet, rows.teacher_sum, state[1])
    put(packet, rows.teacher_target, state[5])
    put(packet, rows.gap, state[3])
    put(packet, rows.cross, state[2])
    put(packet, rows.teacher_moment, state[4])


@triton.jit
def finish(state, joined, out, inputs, rows):
    shift = state[0].to(tl.float64)
    whole = state[1]
    gap = state[3]
    unknown = joined.bad | (~(whole > 0.0) & ~joined.ignored)
    log_whole = tl.log(whole)
    # difference of the log-normalisers
    apart = shift + log_whole - (joined.scale * joined.top + tl.log(joined.student_sum))
    kl = state[2] / whole - apart
    report(out.value, joined, rows.value.forward_kl, tl.where(kl < 0.0, 0.0, kl), unknown)
    if rows.packet.gap is not None:
        if rows.packet.owner is not None:
            at_target = weigh(joined.at_target, joined.scale * joined.target - state[5])
            gap = weigh(joined.student_factor, gap) + at_target
        gap /= joined.student_sum
        kl = gap + apart
        report(out.value, joined, rows.value.reverse_kl, tl.where(kl < 0.0, 0.0, kl), unknown)
    report(out.value, joined, rows.value.teacher_entropy, log_whole - state[4] / whole, unknown)
    report(out.merged, joined, rows.merged.student_sum, joined.student_sum, unknown)
    report(out.merged, joined, rows.merged.teacher_shift, shift, unknown)
    report(out.merged, joined, rows.merged.teacher_sum, whole, unknown)
    report(out.merged, joined, rows.merged.gap, gap, unknown)


@triton.jit
def direct(dz, state, tile, token, grads, inputs, rows):
    """p and q as exponentials of shifted logits, whose sums divide the upstream gradients."""
    a = token.student_scale
    z = tile.z
    shifted = z - tl.load(token.merged + rows.shift * token.n)
    if inputs.student_scale is not None:
        z *= a
        shifted *= a
    p = exp(shifted)
    student_sum = tl.load(token.merged + rows.student_sum * token.n)
    if grads.forward_kl is not None:
        g = a * upstream(grads.forward_kl, token)
        q = exp(tile.u - tl.load(token.merged + rows.teacher_shift * token.n))
        dz += p * (g / student_sum) - q * (g / tl.load(token.merged + rows.teacher_sum * token.n))
    if grads.reverse_kl is not None:
        gap = tl.load(token.merged + rows.gap * token.n)
        p *= a * upstream(grads.reverse_kl, token) / student_sum
        # without probability, or where nobody asks, an infinite divergence has no gradient
        dz += tl.where(p == 0.0, 0.0, p * (z - tile.u - gap))
    return dz


STATISTICS = Statistics(start, rescale, add, store)
MERGE = Merge(start_merge, peak, add_packet, fold, finish)
GRADIENT = Gradient(nothing_loaded, direct=direct)
