"""A top-K teacher's entries: their packet rows, their second exchange.

Names as in `family_triton`; E entries per token, tau their probabilities, s = softmax of z' over
the entries.
"""

import triton
import triton.language as tl

from .distinct_triton import NO_ENTRY
from .family_triton import open_second, transform
from .numerics_triton import (
    LOG2_E,
    LOG_2,
    SMALLEST,
    exp,
    fixed_sum,
    log2,
    log2_mixture,
    relative_information,
)

AT_ONCE = tl.constexpr(128)  # entries that the programs of one warp read at once
SUMMED = tl.constexpr(32)  # entries of a chunk that they sum at once


@triton.jit
def entries_in_chunk(chunk, inputs):
    """Number of the first of a row's entries, which ascend, that is in a chunk, and how many
    are."""
    first = chunk.start + chunk.first
    before = 0
    count = 0
    for k in range(0, inputs.n_entries, AT_ONCE):
        place = k + tl.arange(0, AT_ONCE)
        at = inputs.entries + chunk.row * inputs.n_entries + place
        ids = tl.load(at, mask=place < inputs.n_entries, other=NO_ENTRY)
        before += tl.sum((ids < first).to(tl.int32), axis=0)
        count += tl.sum(((ids >= first) & (ids < first + chunk.size)).to(tl.int32), axis=0)
    return before, count


@triton.jit
def load_at_ids(ids, inputs, chunk, at, live):
    """Columns of a row's live ids numbered `at` in a list, z of those in the chunk (-inf else), and
    which these are."""
    columns = tl.load(ids + at, mask=live, other=-1) - chunk.start
    here = (columns >= chunk.first) & (columns < chunk.first + chunk.size)
    x = tl.load(
        inputs.x + chunk.row * inputs.x_row + columns.to(tl.int64) * inputs.x_column,
        mask=here,
        other=0.0,
    )
    z, _ = transform(
        x.to(tl.float32), tl.where(here, columns, inputs.width), inputs, chunk.pre, chunk.post
    )
    return columns, tl.where(here, z, float("-inf")), here


@triton.jit
def store_entry_sums(out, n, begin, count, chunk, inputs, rows):
    """Store the packet rows of one chunk of one row; begin, count: of its entries, see
    `entries_in_chunk`."""
    m = -float("inf")
    s = tl.zeros([SUMMED], tl.float32)
    mass = tl.zeros([SUMMED], tl.float32)
    cross = tl.zeros([SUMMED], tl.float32)
    gap = tl.zeros([SUMMED], tl.float32)
    lanes = tl.arange(0, SUMMED)
    for k in range(0, count, SUMMED):
        at = chunk.row * inputs.n_entries + begin + k + lanes
        _columns, z, here = load_at_ids(inputs.entries, inputs, chunk, at, k + lanes < count)
        log_tau = tl.load(inputs.entry_log_probs + at, mask=here, other=float("-inf"))
        peak = tl.maximum(m, tl.max(z, axis=0))
        drop = tl.where(m == float("-inf"), 0.0, m - peak)
        shifted = z - tl.where(peak == float("-inf"), 0.0, peak)
        if inputs.student_scale is not None:
            drop *= chunk.student_scale
            shifted *= chunk.student_scale
        factor = tl.where(m == float("-inf"), 0.0, exp(drop))
        gap = tl.where(factor == 0.0, 0.0, factor * tl.fma(drop, s, gap))
        s *= factor
        cross -= tl.where(mass == 0.0, 0.0, mass * drop)
        m = peak
        p = exp(shifted)
        tau = tl.exp(log_tau)
        s += p
        mass += tau
        cross += tl.where(tau == 0.0, 0.0, tau * (log_tau - shifted))
        gap += tl.where(p == 0.0, 0.0, p * (shifted - log_tau))
    tl.store(out + rows.topk_max * n, m + 0.0)
    tl.store(out + rows.topk_sum * n, fixed_sum(s, SUMMED))
    tl.store(out + rows.topk_mass * n, fixed_sum(mass, SUMMED))
    tl.store(out + rows.topk_cross * n, fixed_sum(cross, SUMMED))
    tl.store(out + rows.topk_gap * n, fixed_sum(gap, SUMMED))


@triton.jit
def entry_softmax(z, at, n, a, merged, inputs):
    """The student's softmax over the entries, and y = a (z - topk_shift); at: the token's first
    merged row."""
    shifted = z - tl.load(at + merged.topk_shift * n)
    if inputs.student_scale is not None:
        shifted *= a
    return tl.where(
        z == float("-inf"), 0.0, exp(shifted) / tl.load(at + merged.topk_sum * n)
    ), shifted


@triton.jit
def jensen_shannon_parts(p, q, log_q, beta):
    """(1 - beta) p log(p / m) and beta q log(q / m), m = beta q + (1 - beta) p."""
    log2_m = log2_mixture(p, q, beta)
    student = (1.0 - beta) * LOG_2 * relative_information(p, log2(tl.maximum(p, SMALLEST)), log2_m)
    return student, beta * LOG_2 * relative_information(q, log_q * LOG2_E, log2_m)


@triton.jit(do_not_specialize=["n_rows", "start", "valid_width", "chunks"])
def entry_divergence_kernel(
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
    """One program: the entries' packet of the second exchange of one chunk of one row."""
    chunk, out, at, n = open_second(
        packets_ptr, inputs, merged_ptr, merged, rows, n_rows, start, valid_width, chunks
    )
    topk = tl.zeros([BLOCK], tl.float32)
    topk_mean = tl.zeros([BLOCK], tl.float32)
    vocab = tl.zeros([BLOCK], tl.float32)
    vocab_mean = tl.zeros([BLOCK], tl.float32)
    lanes = tl.arange(0, BLOCK)
    for k in range(0, inputs.n_entries, BLOCK):
        place = chunk.row * inputs.n_entries + k + lanes
        _columns, z, here = load_at_ids(
            inputs.entries, inputs, chunk, place, k + lanes < inputs.n_entries
        )
        log_tau = tl.load(inputs.entry_log_probs + place, mask=here, other=float("-inf"))
        p, _shifted = entry_softmax(z, at, n, chunk.student_scale, merged, inputs)
        q = tl.exp(log_tau)
        if rows.topk_jsd is not None:
            student, teacher = jensen_shannon_parts(p, q, log_tau, inputs.beta)
            topk += tl.where(here, student + teacher, 0.0)
            topk_mean += tl.where(here, student, 0.0)
        if rows.vocab_jsd is not None:
            p *= tl.load(at + merged.inside * n)
            student, teacher = jensen_shannon_parts(p, q, log_tau, inputs.beta)
            vocab += tl.where(here, student + teacher, 0.0)
            vocab_mean += tl.where(here, student, 0.0)
    if rows.topk_jsd is not None:
        tl.store(out + rows.topk_jsd * n, fixed_sum(topk, BLOCK))
        tl.store(out + rows.topk_jsd_mean * n, fixed_sum(topk_mean, BLOCK))
    if rows.vocab_jsd is not None:
        tl.store(out + rows.vocab_jsd * n, fixed_sum(vocab, BLOCK))
        tl.store(out + rows.vocab_jsd_mean * n, fixed_sum(vocab_mean, BLOCK))
