"""The Triton kernels for a teacher of K entries per token; `stats` is their specification, `eager` their definition.

Names: as in `kernels`; E entries per token, tau their probabilities, s = softmax of z' over the entries.
"""

import triton
import triton.language as tl

from .kernels import (
    LOG2_E,
    LOG_2,
    _apart,
    _decay,
    _exp,
    _fixed_sum,
    _log1p,
    _log2,
    _packet,
    _row_factors,
    _settle,
    _student_scale,
    _transform,
    _weigh,
)

NONE = tl.constexpr(2147483647)  # the id of what is no entry


@triton.jit
def _given(ids_ptr, log_probs_ptr, mask_ptr, row, k, n_entries, vocab_size):
    """Entries k as they were given: ids, log-probs, whether each is one, and whether it is unknown."""
    ids = tl.load(ids_ptr + row + k, mask=k < n_entries, other=-1).to(tl.int64)
    log_probs = tl.load(log_probs_ptr + row + k, mask=k < n_entries, other=float("-inf")).to(tl.float32)
    live = (ids >= 0) & (log_probs != float("-inf"))
    if mask_ptr is not None:
        live = live & (tl.load(mask_ptr + row + k, mask=k < n_entries, other=0) != 0)
    unknown = live & ((ids >= vocab_size) | (log_probs != log_probs) | (log_probs == float("inf")))
    return tl.minimum(ids, NONE).to(tl.int32), log_probs, live, unknown


@triton.jit
def entries_kernel(
    ids_out_ptr,  # [T, E] int32 out: distinct ids, ascending, then NONE
    log_tau_ptr,  # [T, E] fp32 out, -inf where there is none
    ids_ptr,  # [T, E] int32 or int64
    log_probs_ptr,  # [T, E]
    mask_ptr,  # [T, E] bool or None
    scale_ptr,  # [T] fp32 or None: then the number
    n_entries, vocab_size, scale,
    RENORMALIZE: tl.constexpr, SLICE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the entries of one row, each compared with every other; E^2 operations, of which E is small."""
    row = tl.program_id(0).to(tl.int64) * n_entries
    i = tl.arange(0, BLOCK)
    inside = i < n_entries
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + tl.program_id(0))
    ids, log_probs, live, unknown = _given(ids_ptr, log_probs_ptr, mask_ptr, row, i, n_entries, vocab_size)
    bad = tl.max(unknown.to(tl.int32), axis=0)  # 1: the row has NaN for its only entry
    live = live.to(tl.int32) > bad
    repeated = tl.zeros([BLOCK], tl.int32)
    place = tl.zeros([BLOCK], tl.int32)
    for first in range(0, n_entries, SLICE):
        j = first + tl.arange(0, SLICE)
        others, _, alive, _ = _given(ids_ptr, log_probs_ptr, mask_ptr, row, j, n_entries, vocab_size)
        others = tl.where(alive, others, NONE)
        same = others[:, None] == ids[None, :]  # [SLICE, BLOCK], so that every lane adds up for itself
        repeated += tl.sum((same & (j[:, None] < i[None, :])).to(tl.int32), axis=0)
        place += tl.sum((others[:, None] < ids[None, :]).to(tl.int32), axis=0)
    kept = live & (repeated == 0)
    log_tau = tl.where(kept, log_probs, float("-inf"))
    if tl.max((live & (repeated > 0)).to(tl.int32), axis=0) > 0:
        # then those before an entry are fewer than counted, and each is the sum of all with its id
        place = tl.zeros([BLOCK], tl.int32)
        total = kept.to(tl.float32)  # each itself
        for k in range(0, n_entries):
            one = (i == k) & live
            same = kept & (ids == tl.max(tl.where(one, ids, -1), axis=0))
            new = tl.where(same, tl.max(tl.where(one, log_probs, float("-inf")), axis=0), float("-inf"))
            peak = tl.maximum(log_tau, new)
            safe = tl.where(peak == float("-inf"), 0.0, peak)
            total = total * tl.exp(log_tau - safe) + tl.where(i == k, 0.0, tl.exp(new - safe))
            log_tau = peak
            place += (ids > tl.min(tl.where((i == k) & kept, ids, NONE), axis=0)).to(tl.int32)
        log_tau += tl.log(tl.where(kept, total, 1.0))
    log_tau *= scale
    if RENORMALIZE:
        peak = tl.max(log_tau, axis=0)
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        whole = tl.sum(tl.exp(log_tau - peak), axis=0)
        log_tau -= peak + tl.log(tl.where(whole == 0.0, 1.0, whole))
    count = tl.sum(kept.to(tl.int32), axis=0)
    tl.store(ids_out_ptr + row + i, tl.where(i < bad, 0, NONE), mask=inside & (i >= count))
    tl.store(log_tau_ptr + row + i, tl.where(i < bad, float("nan"), float("-inf")), mask=inside & (i >= count))
    tl.store(ids_out_ptr + row + place, ids, mask=kept)
    tl.store(log_tau_ptr + row + place, log_tau, mask=kept)


@triton.jit
def _entries(
    x_ptr, x_column, bias_ptr, entries_ptr, log_tau_ptr, k, n_entries, start, first, size, pre, post,
    HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, width,
):  # fmt: skip
    """Entries k of a row in its columns [first, first + size): x, z (-inf elsewhere), log tau, which of them are."""
    id = tl.load(entries_ptr + k, mask=k < n_entries, other=NONE)
    columns = id - start
    here = (columns >= first) & (columns < first + size)
    x = tl.load(x_ptr + columns.to(tl.int64) * x_column, mask=here, other=0.0)
    z, _ = _transform(x.to(tl.float32), tl.where(here, columns, width), bias_ptr, pre, post, HAS_SCALE, HAS_CAP, width)
    log_tau = tl.load(log_tau_ptr + k, mask=here, other=float("-inf"))
    return x, tl.where(here, z, float("-inf")), log_tau, here


@triton.jit(do_not_specialize=["slot", "n_rows", "start", "valid_width", "chunks", "ignore_index", "n_entries"])
def statistics_kernel(
    packets_ptr,  # [chunks, K, T] fp32 out: the last five rows of stats.packet_rows
    x_ptr,  # [T, width]
    labels_ptr, bias_ptr, temperature_ptr, scales_ptr,  # as in `kernels.statistics_kernel`
    entries_ptr, log_tau_ptr,  # [T, E] int32, fp32 of `entries_kernel`
    turns_ptr, slot,
    n_rows, x_row, x_column, start, valid_width, width, chunk_size, chunks, ignore_index, n_entries,
    pre, post, student_scale,
    HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the entries of one chunk of one row."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    first = chunk * chunk_size
    size = tl.maximum(tl.minimum(chunk_size, valid_width - first), 0)
    n = n_rows.to(tl.int64)
    pre, post = _row_factors(temperature_ptr, row, pre, post, HAS_CAP)
    a = _student_scale(scales_ptr, row, n_rows, student_scale)
    if turns_ptr is not None:
        packets_ptr += (tl.load(turns_ptr) & 1).to(tl.int64) * slot
    if labels_ptr is not None:
        size = tl.where(tl.load(labels_ptr + row).to(tl.int64) == ignore_index, 0, size)
    m = -float("inf")
    s = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    cross = tl.zeros([BLOCK], tl.float32)
    gap = tl.zeros([BLOCK], tl.float32)
    for k in range(0, n_entries, BLOCK):
        _, z, log_tau, _ = _entries(
            x_ptr + row * x_row, x_column, bias_ptr, entries_ptr + row * n_entries, log_tau_ptr + row * n_entries,
            k + tl.arange(0, BLOCK), n_entries, start, first, size, pre, post, HAS_SCALE, HAS_CAP, width,
        )  # fmt: skip
        peak = tl.maximum(m, tl.max(z, axis=0))
        drop = tl.where(m == float("-inf"), 0.0, m - peak)
        shifted = z - tl.where(peak == float("-inf"), 0.0, peak)
        if SCALED:
            drop *= a
            shifted *= a
        factor = tl.where(m == float("-inf"), 0.0, _exp(drop))
        gap = tl.where(factor == 0.0, 0.0, factor * tl.fma(drop, s, gap))
        s *= factor
        cross -= tl.where(mass == 0.0, 0.0, mass * drop)
        m = peak
        p = _exp(shifted)
        tau = tl.exp(log_tau)
        s += p
        mass += tau
        cross += tl.where(tau == 0.0, 0.0, tau * (log_tau - shifted))
        gap += tl.where(p == 0.0, 0.0, p * (shifted - log_tau))
    out = packets_ptr + (chunk.to(tl.int64) * ROWS + ROWS - 5) * n + row
    tl.store(out, m + 0.0)
    tl.store(out + n, _fixed_sum(s, BLOCK))
    tl.store(out + 2 * n, _fixed_sum(mass, BLOCK))
    tl.store(out + 3 * n, _fixed_sum(cross, BLOCK))
    tl.store(out + 4 * n, _fixed_sum(gap, BLOCK))


@triton.jit
def _shrink(m, shift, a):
    """a (m - shift) and its exp for m <= shift, where m = -inf is the empty sum: 0 and 0."""
    drop, _ = _decay(m.to(tl.float64), shift)
    return a * drop, tl.where(m == float("-inf"), 0.0, tl.exp(a * drop))


@triton.jit
def _settle_entries(value, least, nowhere, nothing, bad, ignored):
    """Infinite where the student has no probability at the entries, 0 where there are none."""
    value = tl.where(value < least, least, value)
    return _settle(tl.where(nothing, 0.0, tl.where(nowhere, float("inf"), value)), bad, ignored)


@triton.jit(do_not_specialize=["slot", "n_rows"])
def merge_kernel(
    merged_ptr,  # [R, T] fp32 out from row MERGED on, after `kernels.merge_kernel` has written the first ones
    values_ptr,  # [K, T] fp32 out from row VALUES on
    packets_ptr, scales_ptr, peers_ptr, turns_ptr, slot,  # as in `kernels.merge_kernel`
    n_rows, student_scale,
    PACKETS: tl.constexpr, CHUNKS: tl.constexpr,
    ROWS: tl.constexpr, TAIL: tl.constexpr,  # rows of a packet, and the first of the tail's
    MERGED: tl.constexpr, VALUES: tl.constexpr,
    WANT_STUDENT: tl.constexpr, HAS_TAIL: tl.constexpr,
    WANT_FORWARD: tl.constexpr, WANT_REVERSE: tl.constexpr, WANT_INSIDE: tl.constexpr, WANT_OUTSIDE: tl.constexpr,
    WANT_MOMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the merge of BLOCK tokens in chunk order, in float64; `stats.finish` is its definition."""
    STEP: tl.constexpr = PACKETS if PACKETS <= 8 else 1  # as in `kernels.merge_kernel`
    n = n_rows.to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = token < n
    offset = n * 0
    if turns_ptr is not None:
        offset = (tl.load(turns_ptr + 1) & 1).to(tl.int64) * slot
    a = student_scale
    if scales_ptr is not None:
        a = tl.load(scales_ptr + n + token, mask=here, other=1.0).to(tl.float64)
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    peak_r = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, PACKETS, STEP):
        for k in tl.static_range(STEP):
            at = _packet(packets_ptr, peers_ptr, first + k, offset, ROWS * n, CHUNKS) + token
            peak = tl.maximum(peak, tl.load(at + (ROWS - 5) * n, mask=here, other=0.0))
            if HAS_TAIL:
                peak_r = tl.maximum(peak_r, tl.load(at + TAIL * n, mask=here, other=0.0))
    shift = peak.to(tl.float64)
    shift_r = peak_r.to(tl.float64)
    total = tl.zeros([BLOCK], tl.float64)
    mass = tl.zeros([BLOCK], tl.float64)
    cross = tl.zeros([BLOCK], tl.float64)
    gap = tl.zeros([BLOCK], tl.float64)
    rest = tl.zeros([BLOCK], tl.float64)
    moment = tl.zeros([BLOCK], tl.float64)
    for first in range(0, PACKETS, STEP):
        for k in tl.static_range(STEP):
            at = _packet(packets_ptr, peers_ptr, first + k, offset, ROWS * n, CHUNKS) + token
            entry = at + (ROWS - 5) * n
            drop, factor = _shrink(tl.load(entry, mask=here, other=0.0), shift, a)
            s = tl.load(entry + n, mask=here, other=1.0).to(tl.float64)
            w = tl.load(entry + 2 * n, mask=here, other=1.0).to(tl.float64)
            total = tl.fma(factor, s, total)
            mass += w
            cross += tl.load(entry + 3 * n, mask=here, other=0.0).to(tl.float64) - _weigh(w, drop)
            gap += _weigh(factor, tl.load(entry + 4 * n, mask=here, other=0.0) + drop * s)
            if HAS_TAIL:
                drop, factor = _shrink(tl.load(at + TAIL * n, mask=here, other=0.0), shift_r, a)
                s = tl.load(at + (TAIL + 1) * n, mask=here, other=1.0).to(tl.float64)
                rest = tl.fma(factor, s, rest)
                if WANT_MOMENT:
                    e = tl.load(at + (TAIL + 2) * n, mask=here, other=0.0).to(tl.float64)
                    moment = tl.fma(factor, tl.fma(drop, s, e), moment)

    whole = tl.load(merged_ptr + n + token, mask=here, other=1.0)
    ignored = whole == 0.0
    bad = (whole != whole) | ((mass != mass) & ~ignored)
    nothing = mass == 0.0
    nowhere = total == 0.0
    log_total = tl.log(total)
    log_mass = tl.log(tl.where(nothing, 1.0, mass))
    mean = tl.where(nowhere, 0.0, gap / total)
    at = values_ptr + VALUES * n + token
    tl.store(at, _settle(mass, bad, ignored), mask=here)
    at += n
    if WANT_FORWARD:
        value = _settle_entries(cross + mass * log_total, mass * log_mass, nowhere, nothing, bad, ignored)
        tl.store(at, value, mask=here)
        at += n
    if WANT_REVERSE:
        value = _settle_entries(mean - log_total, -log_mass, nowhere, nothing, bad, ignored)
        tl.store(at, value, mask=here)
        at += n
    inside = tl.zeros([BLOCK], tl.float64)
    outside = tl.zeros([BLOCK], tl.float64)
    log_inside = tl.zeros([BLOCK], tl.float64)
    mean_r = tl.zeros([BLOCK], tl.float64)
    if HAS_TAIL:
        empty = rest == 0.0
        apart = a * (shift - shift_r) + log_total - tl.log(rest)
        less = _log1p(tl.exp(-tl.abs(apart)))
        log_inside = -(less + tl.maximum(-apart, 0.0))
        log_outside = -(less + tl.maximum(apart, 0.0))
        inside = tl.exp(log_inside)
        outside = tl.exp(log_outside)
        mean_r = tl.where(empty, 0.0, moment / tl.where(empty, 1.0, rest))
    if WANT_STUDENT:
        shift_r = tl.load(merged_ptr + token, mask=here, other=0.0).to(tl.float64)
        rest = tl.load(merged_ptr + (MERGED - 1) * n + token, mask=here, other=1.0).to(tl.float64)
        log_inside = tl.minimum(a * (shift - shift_r) + log_total - tl.log(rest), 0.0)
        inside = tl.exp(log_inside)
        outside = 1.0 - inside
    if WANT_INSIDE:
        tl.store(at, _settle(log_inside, bad, ignored), mask=here)
        at += n
    if WANT_OUTSIDE:
        tl.store(at, _settle(log_outside, bad, ignored), mask=here)
        at += n
    if WANT_MOMENT:
        tl.store(at, _settle(tl.where(empty, 0.0, tl.log(rest) - mean_r), bad, ignored), mask=here)
    at = merged_ptr + MERGED * n + token
    tl.store(at, _settle(shift, bad, ignored), mask=here)
    tl.store(at + n, _settle(total, bad, ignored), mask=here)
    tl.store(at + 2 * n, _settle(mass, bad, ignored), mask=here)
    tl.store(at + 3 * n, _settle(mean, bad, ignored), mask=here)
    tl.store(at + 4 * n, _settle(shift_r, bad, ignored), mask=here)
    tl.store(at + 5 * n, _settle(rest, bad, ignored), mask=here)
    tl.store(at + 6 * n, _settle(mean_r, bad, ignored), mask=here)
    tl.store(at + 7 * n, _settle(inside, bad, ignored), mask=here)
    tl.store(at + 8 * n, _settle(outside, bad, ignored), mask=here)


@triton.jit
def _softmax(z, merged_ptr, n, a, SCALED: tl.constexpr):
    """Of the student over the entries, with a (z - topk_shift); merged_ptr points to the token's topk_shift."""
    shifted = z - tl.load(merged_ptr)
    if SCALED:
        shifted *= a
    return tl.where(z == float("-inf"), 0.0, _exp(shifted) / tl.load(merged_ptr + n)), shifted


@triton.jit
def _jsd_parts(p, q, log_q, beta):
    """(1 - beta) p log(p / m) and beta q log(q / m), m = beta q + (1 - beta) p."""
    log2_m = _log2(beta * q + (1.0 - beta) * p)
    log2_q = log_q * LOG2_E
    return (1.0 - beta) * LOG_2 * _apart(p, _log2(p), log2_m), beta * LOG_2 * _apart(q, log2_q, log2_m)


@triton.jit(do_not_specialize=["n_rows", "start", "valid_width", "chunks", "n_entries"])
def divergence_kernel(
    packets_ptr,  # [chunks, K, T] fp32 out; rows in the order of stats.later_rows
    x_ptr, bias_ptr, temperature_ptr, scales_ptr, entries_ptr, log_tau_ptr,  # as in `statistics_kernel`
    merged_ptr,  # [R, T] fp32
    n_rows, x_row, x_column, start, valid_width, width, chunk_size, chunks, n_entries,
    pre, post, student_scale, beta,
    HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, SCALED: tl.constexpr,
    WANT_TOPK: tl.constexpr, WANT_VOCAB: tl.constexpr, MERGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the packet of the second exchange of one chunk of one row."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    first = chunk * chunk_size
    n = n_rows.to(tl.int64)
    pre, post = _row_factors(temperature_ptr, row, pre, post, HAS_CAP)
    a = _student_scale(scales_ptr, row, n_rows, student_scale)
    ignored = tl.load(merged_ptr + n + row) == 0.0
    size = tl.where(ignored, 0, tl.maximum(tl.minimum(chunk_size, valid_width - first), 0))
    at = merged_ptr + MERGED * n + row
    topk = tl.zeros([BLOCK], tl.float32)
    topk_mean = tl.zeros([BLOCK], tl.float32)
    vocab = tl.zeros([BLOCK], tl.float32)
    vocab_mean = tl.zeros([BLOCK], tl.float32)
    for k in range(0, n_entries, BLOCK):
        _, z, log_tau, here = _entries(
            x_ptr + row * x_row, x_column, bias_ptr, entries_ptr + row * n_entries, log_tau_ptr + row * n_entries,
            k + tl.arange(0, BLOCK), n_entries, start, first, size, pre, post, HAS_SCALE, HAS_CAP, width,
        )  # fmt: skip
        p, _ = _softmax(z, at, n, a, SCALED)
        q = tl.exp(log_tau)
        if WANT_TOPK:
            of_student, of_teacher = _jsd_parts(p, q, log_tau, beta)
            topk += tl.where(here, of_student + of_teacher, 0.0)
            topk_mean += tl.where(here, of_student, 0.0)
        if WANT_VOCAB:
            p *= tl.load(at + 7 * n)
            of_student, of_teacher = _jsd_parts(p, q, log_tau, beta)
            vocab += tl.where(here, of_student + of_teacher, 0.0)
            vocab_mean += tl.where(here, of_student, 0.0)
    out = packets_ptr + chunk.to(tl.int64) * 2 * (WANT_TOPK + WANT_VOCAB) * n + row
    if WANT_TOPK:
        tl.store(out, _fixed_sum(topk, BLOCK))
        tl.store(out + n, _fixed_sum(topk_mean, BLOCK))
        out += 2 * n
    if WANT_VOCAB:
        tl.store(out, _fixed_sum(vocab, BLOCK))
        tl.store(out + n, _fixed_sum(vocab_mean, BLOCK))


@triton.jit
def _upstream(grad_ptr, row):
    g = 0.0
    if grad_ptr is not None:
        g = tl.load(grad_ptr + row)
    return g


@triton.jit(do_not_specialize=["grads", "n_rows", "start", "valid_width", "n_entries"])
def gradient_kernel(
    extra_ptr,  # [T, E] fp32 out: d loss / dz' times a at the entries of this shard, undefined at others
    picked_ptr,  # [T, E] out: x of these entries, as x may be overwritten before they are needed
    # [4, T] fp32 out, or None: c, shift, e, mean of exp(y) (c + e (y - mean)), y = a (z - shift), at all ids; with
    # AS_LSE only c, an upstream gradient of lse
    rest_ptr, g_lse_ptr,
    x_ptr, bias_ptr, temperature_ptr, scales_ptr, entries_ptr, log_tau_ptr,  # as in `statistics_kernel`
    merged_ptr,  # [R, T] fp32
    grads,  # upstream gradients [T] fp32 or None, in the order of stats.OF_TOPK
    n_rows, x_row, x_column, start, valid_width, width, n_entries,
    pre, post, student_scale, beta,
    HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, SCALED: tl.constexpr, HAS_TAIL: tl.constexpr, AS_LSE: tl.constexpr,
    MERGED: tl.constexpr, TOPK_JSD: tl.constexpr, VOCAB_JSD: tl.constexpr,  # merged rows: the first here, both means
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the entries of one row, and the coefficients of what its other columns get."""
    row = tl.program_id(0).to(tl.int64)
    n = n_rows.to(tl.int64)
    pre, post = _row_factors(temperature_ptr, row, pre, post, HAS_CAP)
    a = _student_scale(scales_ptr, row, n_rows, student_scale)
    ignored = tl.load(merged_ptr + n + row) == 0.0
    at = merged_ptr + MERGED * n + row
    mass = tl.load(at + 2 * n)
    mean = tl.load(at + 3 * n)
    inside = tl.load(at + 7 * n)
    outside = tl.load(at + 8 * n)
    g_forward = _upstream(grads[0], row)
    g_reverse = _upstream(grads[1], row)
    g_inside = _upstream(grads[2], row)
    g_outside = _upstream(grads[3], row)
    of_mass = g_inside * outside - g_outside * inside
    for k in range(0, n_entries, BLOCK):
        entry = k + tl.arange(0, BLOCK)
        x, z, log_tau, here = _entries(
            x_ptr + row * x_row, x_column, bias_ptr, entries_ptr + row * n_entries, log_tau_ptr + row * n_entries,
            entry, n_entries, start, 0, tl.where(ignored, 0, valid_width), pre, post, HAS_SCALE, HAS_CAP, width,
        )  # fmt: skip
        s, shifted = _softmax(z, at, n, a, SCALED)
        q = tl.exp(log_tau)
        dz = g_forward * (mass * s - q) + of_mass * s
        if grads[1] is not None:
            apart = tl.where(s == 0.0, 0.0, s * (shifted - log_tau - mean))
            dz += tl.where(g_reverse == 0.0, 0.0, g_reverse * apart)
        if grads[5] is not None:
            apart, _ = _jsd_parts(s, q, log_tau, beta)
            dz += tl.load(grads[5] + row) * (apart - s * tl.load(merged_ptr + TOPK_JSD * n + row))
        if grads[6] is not None:
            p = s * inside
            apart, _ = _jsd_parts(p, q, log_tau, beta)
            dz += tl.load(grads[6] + row) * (apart - p * tl.load(merged_ptr + VOCAB_JSD * n + row))
        tl.store(extra_ptr + row * n_entries + entry, a * dz, mask=here)
        tl.store(picked_ptr + row * n_entries + entry, x, mask=here)
    if rest_ptr is not None:
        whole = tl.load(at + 5 * n)
        per_rest = tl.where(ignored | (whole == 0.0), 0.0, a / whole)
        common = -g_inside
        if grads[6] is not None:
            common -= tl.load(grads[6] + row) * tl.load(merged_ptr + VOCAB_JSD * n + row)
        if AS_LSE:
            tl.store(rest_ptr + row, common + _upstream(g_lse_ptr, row))
        else:
            if HAS_TAIL:
                common = outside * common + inside * g_outside
            shift = tl.load(at + 4 * n)
            tl.store(rest_ptr + row, common * per_rest)
            tl.store(rest_ptr + n + row, tl.where(shift == float("-inf"), 0.0, shift))
            tl.store(rest_ptr + 2 * n + row, -_upstream(grads[4], row) * per_rest)
            tl.store(rest_ptr + 3 * n + row, tl.load(at + 6 * n))
