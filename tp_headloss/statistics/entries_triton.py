"""The kernels over a top-K teacher's entries: which they are, their packet rows, their second exchange, their gradient.

Names as in `family_triton`; E entries per token, tau their probabilities, s = softmax of z' over the entries.
"""

import triton
import triton.language as tl

from ..symmetric_memory_triton import slot_to_write
from .family_triton import row_factors, teacher_scales, transform
from .numerics_triton import LOG2_E, LOG_2, exp, fixed_sum, log2, relative_information
from .topk_triton import NONE


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
def _load_entries(inputs, row, k, start, first, size, pre, post):
    """Entries k of a row in its columns [first, first + size): x, z (-inf elsewhere), log tau, which of them are."""
    at = row * inputs.n_entries + k
    ids = tl.load(inputs.entries + at, mask=k < inputs.n_entries, other=NONE)
    columns = ids - start
    here = (columns >= first) & (columns < first + size)
    x = tl.load(inputs.x + row * inputs.x_row + columns.to(tl.int64) * inputs.x_column, mask=here, other=0.0)
    z, _ = transform(x.to(tl.float32), tl.where(here, columns, inputs.width), inputs, pre, post)
    log_tau = tl.load(inputs.entry_log_probs + at, mask=here, other=float("-inf"))
    return x, tl.where(here, z, float("-inf")), log_tau, here


@triton.jit(do_not_specialize=["n_rows", "start", "valid_width", "chunks", "ignore_index"])
def entry_statistics_kernel(
    packets_ptr,  # [chunks, K, T] fp32 out: the entries' rows
    inputs,  # Inputs
    memory,  # SharedMemory
    rows,  # numbers of the packets' rows by name
    n_rows, start, valid_width, chunks, ignore_index,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the entries of one chunk of one row."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    first = chunk * inputs.chunk_size
    size = tl.maximum(tl.minimum(inputs.chunk_size, valid_width - first), 0)
    n = n_rows.to(tl.int64)
    pre, post = row_factors(inputs, row)
    a = teacher_scales(inputs, row, n_rows)[1]
    packets_ptr = slot_to_write(packets_ptr, memory)
    if inputs.labels is not None:
        size = tl.where(tl.load(inputs.labels + row).to(tl.int64) == ignore_index, 0, size)
    m = -float("inf")
    s = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    cross = tl.zeros([BLOCK], tl.float32)
    gap = tl.zeros([BLOCK], tl.float32)
    for k in range(0, inputs.n_entries, BLOCK):
        _x, z, log_tau, _here = _load_entries(inputs, row, k + tl.arange(0, BLOCK), start, first, size, pre, post)
        peak = tl.maximum(m, tl.max(z, axis=0))
        drop = tl.where(m == float("-inf"), 0.0, m - peak)
        shifted = z - tl.where(peak == float("-inf"), 0.0, peak)
        if inputs.student_scale is not None:
            drop *= a
            shifted *= a
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
    out = packets_ptr + chunk.to(tl.int64) * rows.height * n + row
    tl.store(out + rows.topk_max * n, m + 0.0)
    tl.store(out + rows.topk_sum * n, fixed_sum(s, BLOCK))
    tl.store(out + rows.topk_mass * n, fixed_sum(mass, BLOCK))
    tl.store(out + rows.topk_cross * n, fixed_sum(cross, BLOCK))
    tl.store(out + rows.topk_gap * n, fixed_sum(gap, BLOCK))


@triton.jit
def _softmax(z, at, n, a, merged, inputs):
    """The student's softmax over the entries, and y = a (z - topk_shift); at: the token's first merged row."""
    shifted = z - tl.load(at + merged.topk_shift * n)
    if inputs.student_scale is not None:
        shifted *= a
    return tl.where(z == float("-inf"), 0.0, exp(shifted) / tl.load(at + merged.topk_sum * n)), shifted


@triton.jit
def _jensen_shannon_parts(p, q, log_q, beta):
    """(1 - beta) p log(p / m) and beta q log(q / m), m = beta q + (1 - beta) p."""
    log2_m = log2(beta * q + (1.0 - beta) * p)
    student = (1.0 - beta) * LOG_2 * relative_information(p, log2(p), log2_m)
    return student, beta * LOG_2 * relative_information(q, log_q * LOG2_E, log2_m)


@triton.jit(do_not_specialize=["n_rows", "start", "valid_width", "chunks"])
def entry_divergence_kernel(
    packets_ptr,  # [chunks, K, T] fp32 out
    inputs,  # Inputs
    merged_ptr,  # [R, T] fp32
    merged,  # numbers of merged rows by name
    rows,  # numbers of the packets' rows by name
    n_rows, start, valid_width, chunks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the entries' packet of the second exchange of one chunk of one row."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    first = chunk * inputs.chunk_size
    n = n_rows.to(tl.int64)
    pre, post = row_factors(inputs, row)
    a = teacher_scales(inputs, row, n_rows)[1]
    at = merged_ptr + row
    ignored = tl.load(at + merged.sum * n) == 0.0
    size = tl.where(ignored, 0, tl.maximum(tl.minimum(inputs.chunk_size, valid_width - first), 0))
    topk = tl.zeros([BLOCK], tl.float32)
    topk_mean = tl.zeros([BLOCK], tl.float32)
    vocab = tl.zeros([BLOCK], tl.float32)
    vocab_mean = tl.zeros([BLOCK], tl.float32)
    for k in range(0, inputs.n_entries, BLOCK):
        _x, z, log_tau, here = _load_entries(inputs, row, k + tl.arange(0, BLOCK), start, first, size, pre, post)
        p, _shifted = _softmax(z, at, n, a, merged, inputs)
        q = tl.exp(log_tau)
        if rows.topk_jsd is not None:
            student, teacher = _jensen_shannon_parts(p, q, log_tau, inputs.beta)
            topk += tl.where(here, student + teacher, 0.0)
            topk_mean += tl.where(here, student, 0.0)
        if rows.vocab_jsd is not None:
            p *= tl.load(at + merged.inside * n)
            student, teacher = _jensen_shannon_parts(p, q, log_tau, inputs.beta)
            vocab += tl.where(here, student + teacher, 0.0)
            vocab_mean += tl.where(here, student, 0.0)
    out = packets_ptr + chunk.to(tl.int64) * rows.height * n + row
    if rows.topk_jsd is not None:
        tl.store(out + rows.topk_jsd * n, fixed_sum(topk, BLOCK))
        tl.store(out + rows.topk_jsd_mean * n, fixed_sum(topk_mean, BLOCK))
    if rows.vocab_jsd is not None:
        tl.store(out + rows.vocab_jsd * n, fixed_sum(vocab, BLOCK))
        tl.store(out + rows.vocab_jsd_mean * n, fixed_sum(vocab_mean, BLOCK))


@triton.jit
def _upstream(grad_ptr, row):
    """An upstream gradient, 0 where there is none."""
    g = 0.0
    if grad_ptr is not None:
        g = tl.load(grad_ptr + row)
    return g


@triton.jit
def _store_everywhere(everywhere_ptr, at, n, row, a, ignored, grads, inputs, merged, HAS_TAIL: tl.constexpr):
    """The coefficients of what every column of a row gets, its entries excepted."""
    inside = tl.load(at + merged.inside * n)
    outside = tl.load(at + merged.outside * n)
    common = -_upstream(grads.topk_log_mass, row)
    if grads.vocab_jsd is not None:
        common -= tl.load(grads.vocab_jsd + row) * tl.load(at + merged.vocab_jsd_mean * n)
    if not HAS_TAIL and inputs.student_scale is None:  # nothing but an upstream gradient of lse
        tl.store(everywhere_ptr + row, common + _upstream(grads.lse, row))
    else:
        if HAS_TAIL:
            common = outside * common + inside * _upstream(grads.tail_log_mass, row)
        whole = tl.load(at + merged.rest_sum * n)
        per_rest = tl.where(ignored | (whole == 0.0), 0.0, a / whole)
        shift = tl.load(at + merged.rest_shift * n)
        tl.store(everywhere_ptr + row, common * per_rest)
        tl.store(everywhere_ptr + n + row, tl.where(shift == float("-inf"), 0.0, shift))
        tl.store(everywhere_ptr + 2 * n + row, -_upstream(grads.tail_entropy, row) * per_rest)
        tl.store(everywhere_ptr + 3 * n + row, tl.load(at + merged.rest_mean * n))


@triton.jit(do_not_specialize=["n_rows", "start", "valid_width"])
def entry_gradient_kernel(
    at_entries_ptr,  # [T, E] fp32 out: d loss / dz' times a at the entries of this shard, undefined at others
    picked_ptr,  # [T, E] out: x of these entries, as x may be overwritten before they are needed
    # [4, T] fp32 out, or None: c, shift, e, mean of exp(y) (c + e (y - mean)), y = a (z - shift), at all ids; [1, T] if
    # it is nothing but an upstream gradient of lse
    everywhere_ptr,
    inputs,  # Inputs
    merged_ptr,  # [R, T] fp32
    grads,  # upstream gradients [T] fp32 by name
    merged,  # numbers of merged rows by name
    n_rows, start, valid_width,
    HAS_TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the entries of one row, and the coefficients of what its other columns get."""
    row = tl.program_id(0).to(tl.int64)
    n = n_rows.to(tl.int64)
    pre, post = row_factors(inputs, row)
    a = teacher_scales(inputs, row, n_rows)[1]
    at = merged_ptr + row
    ignored = tl.load(at + merged.sum * n) == 0.0
    mass = tl.load(at + merged.topk_mass * n)
    mean = tl.load(at + merged.topk_gap * n)
    inside = tl.load(at + merged.inside * n)
    g_forward = _upstream(grads.topk_forward_kl, row)
    g_reverse = _upstream(grads.topk_reverse_kl, row)
    g_mass = _upstream(grads.topk_log_mass, row) * tl.load(at + merged.outside * n)
    g_mass = g_mass - _upstream(grads.tail_log_mass, row) * inside
    for k in range(0, inputs.n_entries, BLOCK):
        entry = k + tl.arange(0, BLOCK)
        size = tl.where(ignored, 0, valid_width)
        x, z, log_tau, here = _load_entries(inputs, row, entry, start, 0, size, pre, post)
        s, shifted = _softmax(z, at, n, a, merged, inputs)
        q = tl.exp(log_tau)
        dz = g_forward * (mass * s - q) + g_mass * s
        if grads.topk_reverse_kl is not None:
            apart = tl.where(s == 0.0, 0.0, s * (shifted - log_tau - mean))
            dz += tl.where(g_reverse == 0.0, 0.0, g_reverse * apart)
        if grads.topk_jsd is not None:
            student, _teacher = _jensen_shannon_parts(s, q, log_tau, inputs.beta)
            dz += tl.load(grads.topk_jsd + row) * (student - s * tl.load(at + merged.topk_jsd_mean * n))
        if grads.vocab_jsd is not None:
            p = s * inside
            student, _teacher = _jensen_shannon_parts(p, q, log_tau, inputs.beta)
            dz += tl.load(grads.vocab_jsd + row) * (student - p * tl.load(at + merged.vocab_jsd_mean * n))
        tl.store(at_entries_ptr + row * inputs.n_entries + entry, a * dz, mask=here)
        tl.store(picked_ptr + row * inputs.n_entries + entry, x, mask=here)
    if everywhere_ptr is not None:
        _store_everywhere(everywhere_ptr, at, n, row, a, ignored, grads, inputs, merged, HAS_TAIL)
