"""Device functions of jsd, total_variation and overlap, and the kernel of the second exchange."""

import triton
import triton.language as tl

from .family_triton import (
    Gradient,
    load_logits,
    load_teacher,
    nothing_loaded,
    open_second,
    upstream,
)
from .numerics_triton import (
    LOG2_E,
    LOG_2,
    exp2,
    fixed_sum,
    half_sign,
    log2_mixture,
    relative_information,
)


@triton.jit
def _add(state, log2_p, log2_q, inputs, rows):
    """Add a tile of log2-probabilities to lane sums: p log2(p / m), q log2(q / m), |p - q| / 2, p
    sign(p - q) / 2, min(p, q), p (1 - sign(p - q)) / 2."""
    student = state[0]
    teacher = state[1]
    variation = state[2]
    variation_mean = state[3]
    overlap = state[4]
    overlap_mean = state[5]
    p = exp2(log2_p)
    q = exp2(log2_q)
    if rows.jsd is not None:
        m = log2_mixture(p, q, inputs.beta)
        student += relative_information(p, log2_p, m)
        teacher += relative_information(q, log2_q, m)
    if rows.total_variation is not None:
        sign = half_sign(p - q)
        variation += sign * (p - q)
        variation_mean += sign * p
    if rows.overlap is not None:
        # tl.minimum would take the other one in the place of NaN
        below = 0.5 - half_sign(p - q)
        overlap += below * p + (1.0 - below) * q
        overlap_mean += below * p
    return student, teacher, variation, variation_mean, overlap, overlap_mean


@triton.jit
def _store(out, n, state, inputs, rows, BLOCK: tl.constexpr):
    if rows.jsd is not None:
        mean = (1.0 - inputs.beta) * LOG_2 * fixed_sum(state[0], BLOCK)
        tl.store(out + rows.jsd * n, mean + inputs.beta * LOG_2 * fixed_sum(state[1], BLOCK))
        tl.store(out + rows.jsd_mean * n, mean)
    if rows.total_variation is not None:
        tl.store(out + rows.total_variation * n, fixed_sum(state[2], BLOCK))
        tl.store(out + rows.total_variation_mean * n, fixed_sum(state[3], BLOCK))
    if rows.overlap is not None:
        tl.store(out + rows.overlap * n, fixed_sum(state[4], BLOCK))
        tl.store(out + rows.overlap_mean * n, fixed_sum(state[5], BLOCK))


@triton.jit(do_not_specialize=["n_rows", "start", "valid_width", "chunks"])
def divergence_kernel(
    packets_ptr,  # [chunks, K, T] fp32 out
    inputs,  # Inputs
    merged_ptr,  # [R, T] fp32
    merged,  # numbers of merged rows by name
    rows,  # numbers of the packets' rows by name
    n_rows,
    start,
    valid_width,
    chunks,
    BLOCK: tl.constexpr,
):
    """One program: the packet of the second exchange of one chunk of one row; p and q are
    probabilities by now."""
    chunk, out, at, n = open_second(
        packets_ptr, inputs, merged_ptr, merged, rows, n_rows, start, valid_width, chunks
    )
    shift = tl.load(at + merged.shift * n)
    log2_student = tl.log2(tl.load(at + merged.student_sum * n))
    teacher_shift = tl.load(at + merged.teacher_shift * n)
    log2_teacher = tl.log2(tl.load(at + merged.teacher_sum * n))
    a = chunk.student_scale * LOG2_E
    lanes = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], tl.float32)
    state = (zeros, zeros, zeros, zeros, zeros, zeros)
    whole = chunk.size // BLOCK * BLOCK
    for o in tl.range(0, whole, BLOCK, num_stages=4):
        columns = chunk.first + o + lanes
        z = load_logits(inputs, chunk, columns, None)
        u = load_teacher(inputs, chunk, columns, None)
        log2_p = (z - shift) * a - log2_student
        state = _add(state, log2_p, (u - teacher_shift) * LOG2_E - log2_teacher, inputs, rows)
    for o in range(whole, chunk.size, BLOCK):
        inside = o + lanes
        columns = chunk.first + inside
        reading = (inside < inputs.chunk_size) & (columns < inputs.width)
        z = load_logits(inputs, chunk, columns, reading)
        u = load_teacher(inputs, chunk, columns, reading)
        log2_p = tl.where(inside < chunk.size, (z - shift) * a - log2_student, float("-inf"))
        log2_q = tl.where(
            inside < chunk.size, (u - teacher_shift) * LOG2_E - log2_teacher, float("-inf")
        )
        state = _add(state, log2_p, log2_q, inputs, rows)
    _store(out, n, state, inputs, rows, BLOCK)


@triton.jit
def direct(dz, state, tile, token, grads, inputs, rows):
    log2_student = tl.log2(tl.load(token.merged + rows.student_sum * token.n))
    log2_teacher = tl.log2(tl.load(token.merged + rows.teacher_sum * token.n))
    shifted = tile.z - tl.load(token.merged + rows.shift * token.n)
    log2_p = shifted * (token.student_scale * LOG2_E) - log2_student
    log2_q = (tile.u - tl.load(token.merged + rows.teacher_shift * token.n)) * LOG2_E - log2_teacher
    p = exp2(log2_p)
    q = exp2(log2_q)
    if grads.jsd is not None:
        g = token.student_scale * upstream(grads.jsd, token)
        mean = tl.load(token.merged + rows.jsd_mean * token.n)
        information = tl.maximum(log2_p, -1e30) - log2_mixture(p, q, inputs.beta)
        dz += p * ((g * (1.0 - inputs.beta) * LOG_2) * information - g * mean)
    if grads.total_variation is not None:
        g = token.student_scale * upstream(grads.total_variation, token)
        mean = tl.load(token.merged + rows.total_variation_mean * token.n)
        dz += p * (g * half_sign(p - q) - g * mean)
    if grads.overlap is not None:
        g = token.student_scale * upstream(grads.overlap, token)
        mean = tl.load(token.merged + rows.overlap_mean * token.n)
        dz += p * (g * (0.5 - half_sign(p - q)) - g * mean)
    return dz


STATISTICS = MERGE = None
GRADIENT = Gradient(nothing_loaded, direct=direct)
SECOND = divergence_kernel
