"""Device functions of a top-K teacher's statistics: the tail, the merge, the gradient.

What is read at the entries alone forward is in `entries_triton`.
"""

import triton
import triton.language as tl

from . import tail_triton
from .entries_triton import (
    entries_in_chunk,
    entry_divergence_kernel,
    entry_softmax,
    jensen_shannon_parts,
    store_entry_sums,
)
from .family_triton import Gradient, Merge, Statistics, nothing_folded, read, report, upstream
from .numerics_triton import decay, exp, log1p, settle, weigh


@triton.jit
def store(out, n, state, core, chunk, inputs, rows):
    begin, count = entries_in_chunk(chunk, inputs)
    store_entry_sums(out, n, begin, count, chunk, inputs, rows)
    tail_triton.store(out, n, begin, count, state, core, chunk, inputs, rows)


@triton.jit
def start_merge(BLOCK: tl.constexpr):
    """Maxima of the entries and of the tail; sums of s, tau, cross, gap; of the tail, of its
    moment."""
    least = tl.full([BLOCK], -float("inf"), tl.float32)
    zeros = tl.zeros([BLOCK], tl.float64)
    return least, least, zeros, zeros, zeros, zeros, zeros, zeros


@triton.jit
def peak(state, packet, rows):
    tail = state[1]
    if rows.tail_max is not None:
        tail = tl.maximum(tail, read(packet, rows.tail_max, 0.0))
    entries = tl.maximum(state[0], read(packet, rows.topk_max, 0.0))
    return entries, tail, state[2], state[3], state[4], state[5], state[6], state[7]


@triton.jit
def _shrink(m, shift, a):
    """a (m - shift) and its exp for m <= shift, where m = -inf is the empty sum: 0 and 0."""
    drop, _ = decay(m.to(tl.float64), shift.to(tl.float64))
    return a * drop, tl.where(m == float("-inf"), 0.0, tl.exp(a * drop))


@triton.jit
def add_packet(state, packet, softmax, rows):
    tail_sum = state[6]
    tail_moment = state[7]
    drop, factor = _shrink(read(packet, rows.topk_max, 0.0), state[0], softmax.scale)
    s = read(packet, rows.topk_sum, 1.0).to(tl.float64)
    tau = read(packet, rows.topk_mass, 1.0).to(tl.float64)
    total = tl.fma(factor, s, state[2])
    cross = state[4] + (read(packet, rows.topk_cross, 0.0).to(tl.float64) - weigh(tau, drop))
    gap = state[5] + weigh(factor, read(packet, rows.topk_gap, 0.0) + drop * s)
    if rows.tail_max is not None:
        drop, factor = _shrink(read(packet, rows.tail_max, 0.0), state[1], softmax.scale)
        s = read(packet, rows.tail_sum, 1.0).to(tl.float64)
        tail_sum = tl.fma(factor, s, tail_sum)
        if rows.tail_moment is not None:
            e = read(packet, rows.tail_moment, 0.0).to(tl.float64)
            tail_moment = tl.fma(factor, tl.fma(drop, s, e), tail_moment)
    return state[0], state[1], total, state[3] + tau, cross, gap, tail_sum, tail_moment


@triton.jit
def _at_entries(value, minimum, nowhere, nothing):
    """Return a divergence over the entries, which is at least `minimum`: infinite where the student
    has no probability there, 0 where there are none."""
    value = tl.where(value < minimum, minimum, value)
    return tl.where(nothing, 0.0, tl.where(nowhere, float("inf"), value))


@triton.jit
def _rest(state, joined, log_total, rows):
    """Maximum, sum and mean of the columns that are no entries, and log P and log R; 0 where they
    are not known."""
    shift = state[0].to(tl.float64)
    rest_shift = tl.zeros_like(shift)
    rest = tl.zeros_like(shift)
    mean = tl.zeros_like(shift)
    log_inside = tl.zeros_like(shift)
    log_outside = tl.zeros_like(shift)
    inside = tl.zeros_like(shift)
    outside = tl.zeros_like(shift)
    if rows.packet.tail_max is not None:
        rest_shift = state[1].to(tl.float64)
        rest = state[6]
        apart = joined.scale * (shift - rest_shift) + log_total - tl.log(rest)
        less = log1p(tl.exp(-tl.abs(apart)))
        log_inside = -(less + tl.maximum(-apart, 0.0))
        log_outside = -(less + tl.maximum(apart, 0.0))
        inside = tl.exp(log_inside)
        outside = tl.exp(log_outside)
        mean = tl.where(rest == 0.0, 0.0, state[7] / tl.where(rest == 0.0, 1.0, rest))
    elif rows.packet.student_sum is not None:
        # as the merged rows hold them
        rest_shift = settle(joined.top, joined.bad, joined.ignored).to(tl.float64)
        rest = settle(joined.student_sum, joined.bad, joined.ignored).to(tl.float64)
        log_inside = tl.minimum(joined.scale * (shift - rest_shift) + log_total - tl.log(rest), 0.0)
        inside = tl.exp(log_inside)
        outside = 1.0 - inside
    return rest_shift, rest, mean, log_inside, log_outside, inside, outside


@triton.jit
def finish(state, joined, out, inputs, rows):
    total = state[2]
    mass = state[3]
    bad = joined.bad | ((mass != mass) & ~joined.ignored)
    nothing = mass == 0.0
    nowhere = total == 0.0
    log_total = tl.log(total)
    log_mass = tl.log(tl.where(nothing, 1.0, mass))
    mean = tl.where(nowhere, 0.0, state[5] / total)
    rest_shift, rest, rest_mean, log_inside, log_outside, inside, outside = _rest(
        state, joined, log_total, rows
    )
    least = mass * log_mass
    forward = _at_entries(state[4] + mass * log_total, least, nowhere, nothing)
    reverse = _at_entries(mean - log_total, -log_mass, nowhere, nothing)
    vocab = _at_entries(state[4] + mass * (log_total - log_inside), least, nowhere, nothing)
    tail_entropy = tl.where(rest == 0.0, 0.0, tl.log(rest) - rest_mean)
    value: tl.constexpr = rows.value
    report(out.value, joined, value.teacher_mass, mass, bad)
    report(out.value, joined, value.topk_forward_kl, forward, bad)
    report(out.value, joined, value.topk_reverse_kl, reverse, bad)
    report(out.value, joined, value.topk_log_mass, log_inside, bad)
    report(out.value, joined, value.vocab_forward_kl, vocab, bad)
    report(out.value, joined, value.tail_log_mass, log_outside, bad)
    report(out.value, joined, value.tail_entropy, tail_entropy, bad)
    merged: tl.constexpr = rows.merged
    report(out.merged, joined, merged.topk_shift, state[0].to(tl.float64), bad)
    report(out.merged, joined, merged.topk_sum, total, bad)
    report(out.merged, joined, merged.topk_mass, mass, bad)
    report(out.merged, joined, merged.topk_gap, mean, bad)
    report(out.merged, joined, merged.rest_shift, rest_shift, bad)
    report(out.merged, joined, merged.rest_sum, rest, bad)
    report(out.merged, joined, merged.rest_mean, rest_mean, bad)
    report(out.merged, joined, merged.inside, inside, bad)
    report(out.merged, joined, merged.outside, outside, bad)


@triton.jit
def _upstream_of_log_mass(grads, token, rows):
    """Upstream gradient of topk_log_mass, with its part of that of vocab_forward_kl."""
    g = upstream(grads.topk_log_mass, token)
    if grads.vocab_forward_kl is not None:
        g -= upstream(grads.vocab_forward_kl, token) * tl.load(
            token.merged + rows.topk_mass * token.n
        )
    return g


@triton.jit
def _rest_coefficients(common, grads, token, rows):
    """Numbers c, shift and with an entropy e, mean of the gradient of a column that is no entry: c
    exp(y) + e exp(y) (y - mean), where y = a (z - shift)."""
    at = token.merged
    n = token.n
    if rows.rest_mean is not None:
        common = tl.load(at + rows.outside * n) * common
        common += tl.load(at + rows.inside * n) * upstream(grads.tail_log_mass, token)
    whole = tl.load(at + rows.rest_sum * n)
    per_rest = tl.where(token.ignored | (whole == 0.0), 0.0, token.student_scale / whole)
    shift = tl.load(at + rows.rest_shift * n)
    numbers = (common * per_rest, tl.where(shift == float("-inf"), 0.0, shift))
    if grads.tail_entropy is not None:
        numbers += (
            -upstream(grads.tail_entropy, token) * per_rest,
            tl.load(at + rows.rest_mean * n),
        )
    return numbers


@triton.jit
def load(grads, token, inputs, rows):
    """Load what columns that are no entries get: (coefficient of p,), or the numbers of
    `_rest_coefficients`."""
    HAS_TAIL: tl.constexpr = grads.tail_log_mass is not None or grads.tail_entropy is not None
    HAS_MASS: tl.constexpr = grads.topk_log_mass is not None or grads.vocab_forward_kl is not None
    SOMETHING: tl.constexpr = HAS_TAIL or HAS_MASS or grads.vocab_jsd is not None
    IS_SOFTMAX: tl.constexpr = rows.rest_mean is None and inputs.student_scale is None
    state = (0.0,)
    if SOMETHING and len(token.places.entries.shape) != 1:
        common = -_upstream_of_log_mass(grads, token, rows)
        if grads.vocab_jsd is not None:
            common -= upstream(grads.vocab_jsd, token) * tl.load(
                token.merged + rows.vocab_jsd_mean * token.n
            )
        state = (common,) if IS_SOFTMAX else _rest_coefficients(common, grads, token, rows)
    return state


@triton.jit
def coefficient(away, state, shifted, p, token):
    if len(state) == 1:
        away += tl.where(token.ignored, 0.0, state[0] / token.whole)
    return away


@triton.jit
def at_target(common, state, offset, token):
    return common + state[0] if len(state) == 1 else common


@triton.jit
def _entry_gradient(log_tau, tile, token, grads, inputs, rows):
    """d loss / d z' at entries, by the table of `topk`."""
    at = token.merged
    n = token.n
    z = tl.where(token.readable, tile.z, float("-inf"))
    s, shifted = entry_softmax(z, at, n, token.student_scale, rows, inputs)
    q = tl.exp(log_tau)
    inside = tl.load(at + rows.inside * n)
    g_mass = _upstream_of_log_mass(grads, token, rows) * tl.load(at + rows.outside * n)
    g_mass = g_mass - upstream(grads.tail_log_mass, token) * inside
    g_forward = upstream(grads.topk_forward_kl, token) + upstream(grads.vocab_forward_kl, token)
    dz = g_forward * (tl.load(at + rows.topk_mass * n) * s - q) + g_mass * s
    if grads.topk_reverse_kl is not None:
        g = upstream(grads.topk_reverse_kl, token)
        apart = tl.where(s == 0.0, 0.0, s * (shifted - log_tau - tl.load(at + rows.topk_gap * n)))
        dz += tl.where(g == 0.0, 0.0, g * apart)
    if grads.topk_jsd is not None:
        student, _teacher = jensen_shannon_parts(s, q, log_tau, inputs.beta)
        dz += upstream(grads.topk_jsd, token) * (student - s * tl.load(at + rows.topk_jsd_mean * n))
    if grads.vocab_jsd is not None:
        p = s * inside
        student, _teacher = jensen_shannon_parts(p, q, log_tau, inputs.beta)
        dz += upstream(grads.vocab_jsd, token) * (
            student - p * tl.load(at + rows.vocab_jsd_mean * n)
        )
    return dz


@triton.jit
def direct(dz, state, tile, token, grads, inputs, rows):
    """Add at an entry its own part, and at every other column that of the rest."""
    if len(token.places.entries.shape) == 1:
        log_tau = tl.load(
            inputs.entry_log_probs + token.places.entries, mask=token.written, other=float("-inf")
        )
        dz += token.student_scale * _entry_gradient(log_tau, tile, token, grads, inputs, rows)
    elif len(state) > 1:
        fall = tile.z - state[1]
        if inputs.student_scale is not None:
            fall = fall * token.student_scale
        per_column = state[0]
        if len(state) == 4:
            per_column += state[2] * (tl.maximum(fall, -200.0) - state[3])
        dz += exp(fall) * per_column
    return dz


STATISTICS = Statistics(tail_triton.start, tail_triton.rescale, tail_triton.add, store)
MERGE = Merge(start_merge, peak, add_packet, nothing_folded, finish)
GRADIENT = Gradient(load, coefficient, at_target, direct)
SECOND = entry_divergence_kernel
