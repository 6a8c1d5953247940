"""The Triton kernels; `stats` is their specification, `eager` their definition in plain torch.

Names: x raw logit, z transformed logit in fp32, m running maximum, s = sum exp(z - m), e = sum exp(z - m)(z - m),
y label, T tokens. Every load is cast to fp32 at once (the interpreter computes bf16 wrongly), row offsets are int64,
and a token count is never a compile-time constant.
"""

import triton
import triton.language as tl


@triton.jit
def _tanh_and_slope(a):
    """tanh(a) and 1 - tanh(a)^2, both to a few ulp: near 0 by a polynomial, elsewhere without cancellation."""
    u = tl.exp(-2.0 * tl.abs(a))
    far = (1.0 - u) / (1.0 + u)
    t = a * a
    p = ((-0.00628256006 * t + 0.0210778173) * t - 0.0538538732) * t
    near = a + a * (t * ((p + 0.133326024) * t - 0.333333194))
    tanh = tl.where(tl.abs(a) < 0.55, near, tl.where(a < 0, -far, far))
    return tl.where(a == a, tanh, a), 4.0 * u / ((1.0 + u) * (1.0 + u))


INTERPRETED = tl.constexpr(not isinstance(_tanh_and_slope, triton.JITFunction))


@triton.jit
def _exp(x):
    """exp(x), below 2^-126 flushed to 0: two instructions, where keeping denormals takes five."""
    if INTERPRETED:
        y = tl.exp(x)
    else:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def _exp2(x):
    """The same to the base of 2."""
    if INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def _log2(x):
    """log2(x) to an absolute 2^-22, -126 below 2^-126: two instructions."""
    x = tl.maximum(x, 1.1754943508222875e-38)
    if INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def _widen(x):
    """To fp32; bf16 in one instruction per element, where the compiler needs two for every other one."""
    if x.dtype == tl.bfloat16 and not INTERPRETED:
        y = tl.inline_asm_elementwise(
            "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }",
            "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def _transform(x, columns, bias_ptr, pre, post, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, width):
    """z and dz/dx of raw logits; pre and post are the factors before and after the softcap."""
    if bias_ptr is not None:
        x += tl.load(bias_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    if HAS_CAP:
        bounded, slope = _tanh_and_slope(x * pre)
        z, slope = bounded * post, slope * (pre * post)
    else:
        z = x * pre if HAS_SCALE else x
        slope = pre
    return z, slope


@triton.jit
def _row_factors(temperature_ptr, row, pre, post, HAS_CAP: tl.constexpr):
    """Fold the token's temperature into the factor that it scales."""
    if temperature_ptr is not None:
        inverse = 1.0 / tl.load(temperature_ptr + row)
        if HAS_CAP:
            post *= inverse
        else:
            pre *= inverse
    return pre, post


@triton.jit
def _fixed_sum(x, LANES: tl.constexpr):
    """Sum of a vector by halving: one order of additions, whatever register layout the compiler picked."""
    n: tl.constexpr = LANES
    for i in tl.static_range(20):
        if (n >> i) > 1:
            x = tl.sum(tl.reshape(x, [2, n >> (i + 1)]), axis=0)
    return tl.sum(x, axis=0)


@triton.jit
def _add_tile(
    m, s, e, total, mass, best,  # running maximum, [BLOCK] lane sums, offset of the tile that holds the maximum
    z, v, offset, columns, weight_ptr, width,  # [BLOCK] logits with and without the target, offset of this tile
    WANT_ENTROPY: tl.constexpr, WANT_TOTAL: tl.constexpr, WANT_ARGMAX: tl.constexpr,
):  # fmt: skip
    """Accumulate a tile: each lane sums its own columns, so that only the maximum is reduced inside the loop."""
    if WANT_TOTAL:
        w = 1.0
        if weight_ptr is not None:
            w = tl.load(weight_ptr + columns, mask=columns < width, other=0.0)
        total += tl.where(z == float("-inf"), 0.0, z * w)
        mass += tl.where(z == float("-inf"), 0.0, w)
    peak = tl.max(v, axis=0)
    if WANT_ARGMAX:
        best = tl.where((peak > m) | ((peak == m) & (offset < best)), offset, best)
    if peak > m:
        drop = tl.where(m == float("-inf"), 0.0, m - peak)
        factor = tl.where(m == float("-inf"), 0.0, _exp(drop))
        if WANT_ENTROPY:
            e = factor * tl.fma(drop, s, e)
        s *= factor
    m = tl.maximum(m, peak)
    shifted = v - tl.where(m == float("-inf"), 0.0, m)
    p = _exp(shifted)
    if WANT_ENTROPY:
        e = tl.fma(p, tl.maximum(shifted, -1e30), e)  # 0 * -inf is 0 here
    s += p
    return m, s, e, total, mass, best


@triton.jit
def _student_scale(scales_ptr, row, n_rows, student_scale):
    """What the student's logits are multiplied by at the teacher's side: a number, or [2, T]'s second row."""
    if scales_ptr is not None:
        student_scale = tl.load(scales_ptr + n_rows.to(tl.int64) + row)
    return student_scale


@triton.jit
def _teacher_scales(scales_ptr, row, n_rows, teacher_scale, student_scale):
    """The same of the teacher, and of the student."""
    if scales_ptr is not None:
        teacher_scale = tl.load(scales_ptr + row)
    return teacher_scale, _student_scale(scales_ptr, row, n_rows, student_scale)


@triton.jit
def _add_softmax(
    m, d, h, c,  # running maximum, lane sums of exp(a (u - m)), of it times a (u - m), and another to rescale alike
    u, a, SCALED: tl.constexpr, WANT_MOMENT: tl.constexpr, WANT_CROSS: tl.constexpr,
):  # fmt: skip
    """Accumulate a tile of any logits u; its exponentials come last."""
    peak = tl.max(u, axis=0)
    if peak > m:
        drop = tl.where(m == float("-inf"), 0.0, m - peak)
        if SCALED:
            drop *= a
        factor = tl.where(m == float("-inf"), 0.0, _exp(drop))
        if WANT_MOMENT:
            h = factor * tl.fma(drop, d, h)
        d *= factor
        if WANT_CROSS:
            c = tl.where(factor == 0.0, 0.0, factor * c)
    m = tl.maximum(m, peak)
    fall = u - tl.where(m == float("-inf"), 0.0, m)
    if SCALED:
        fall *= a
    q = _exp(fall)
    d += q
    if WANT_MOMENT:
        h = tl.fma(q, tl.maximum(fall, -1e30), h)
    return m, d, h, c, q


@triton.jit
def _add_student(
    m, s, g,  # running maximum before this tile, lane sums of p = exp(a (z - m)) and one that is rescaled alike
    m_now, v, a, SCALED: tl.constexpr, WANT_REVERSE: tl.constexpr,  # the maximum after it, logits without the target
):  # fmt: skip
    """Accumulate a tile of the student at the teacher's side, relative to the maximum of `_add_tile`; p comes last."""
    if m_now > m:
        factor = tl.where(m == float("-inf"), 0.0, _exp((m - m_now) * a))
        s *= factor
        if WANT_REVERSE:
            g = tl.where(factor == 0.0, 0.0, factor * g)
    shifted = v - tl.where(m_now == float("-inf"), 0.0, m_now)
    if SCALED:
        shifted *= a
    p = _exp(shifted)
    return s + p, g, p


@triton.jit
def _add_teacher(
    m, s, g,  # running maximum of the student before this tile, lane sums of exp(a (z - m)) and of it times (z' - u)
    mt, d, c, h,  # running maximum of the teacher, lane sums of q = exp(u - mt), of q (u - z') and q (u - mt)
    m_now, z, v, t,  # the student's maximum after this tile, logits with and without the target, the teacher's logits
    u_scale, a,
    SCALED: tl.constexpr, WANT_FORWARD: tl.constexpr, WANT_REVERSE: tl.constexpr, WANT_MOMENT: tl.constexpr,
):  # fmt: skip
    """Accumulate a tile of student and teacher; what has no probability adds nothing, whatever its logits."""
    u = t * u_scale if SCALED else t
    if SCALED or WANT_REVERSE:  # else s is what _add_tile sums
        s, g, p = _add_student(m, s, g, m_now, v, a, SCALED, WANT_REVERSE)
    if SCALED:
        z *= a
    mt, d, h, c, q = _add_softmax(mt, d, h, c, u, 1.0, False, WANT_MOMENT, WANT_FORWARD)
    if WANT_FORWARD:
        c += tl.where(q == 0.0, 0.0, q * (u - z))
    if WANT_REVERSE:
        g += tl.where(p == 0.0, 0.0, p * (z - u))
    return s, g, mt, d, c, h


@triton.jit
def _leave_out(z, ids, below, entries_ptr, entry, n_entries):
    """z of the vocabulary ids, with -inf at the entries among them; entries from number `entry` on, which are
    ascending, are looked at as long as they are less than `below`. -> also the number of the next one."""
    found = tl.load(entries_ptr + entry, mask=entry < n_entries, other=2147483647)
    while found < below:
        z = tl.where(ids == found, float("-inf"), z)
        entry += 1
        found = tl.load(entries_ptr + entry, mask=entry < n_entries, other=2147483647)
    return z, entry


@triton.jit(do_not_specialize=["slot", "n_rows", "start", "valid_width", "chunks", "ignore_index"])
def statistics_kernel(
    packets_ptr,  # [chunks, K, T] fp32 out; rows in the order of stats.packet_rows
    x_ptr,  # [T, width]
    labels_ptr,  # [T] int32 or int64, or None
    bias_ptr,  # [width] or None
    temperature_ptr,  # [T] fp32 or None
    weight_ptr,  # [width] fp32 or None: column weights of the total
    teacher_ptr,  # [T, width] or None
    scales_ptr,  # [2, T] fp32 of teacher and student, or None: then the numbers
    entries_ptr,  # [T, E] int32 ascending ids that the tail leaves out, or None
    turns_ptr, slot,  # [2] int32 or None, elements: which slot of symmetric memory, see comm.SymmetricMemory
    n_rows, x_row, x_column, t_row, t_column,
    start, valid_width, width, chunk_size, chunks, ignore_index, n_entries,
    pre, post, teacher_scale, student_scale,
    HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, SCALED: tl.constexpr,
    WANT_STUDENT: tl.constexpr, TOPK_ROWS: tl.constexpr,  # student_sum without a teacher; rows left to another kernel
    WANT_ENTROPY: tl.constexpr, WANT_TOTAL: tl.constexpr, WANT_ARGMAX: tl.constexpr,
    WANT_FORWARD: tl.constexpr, WANT_REVERSE: tl.constexpr, WANT_MOMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the packet of one chunk of one row, a function of that chunk's columns only."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    first = chunk * chunk_size
    size = tl.maximum(tl.minimum(chunk_size, valid_width - first), 0)
    pre, post = _row_factors(temperature_ptr, row, pre, post, HAS_CAP)
    x_ptr += row * x_row
    if teacher_ptr is not None:
        teacher_ptr += row * t_row
    u_scale, a = _teacher_scales(scales_ptr, row, n_rows, teacher_scale, student_scale)
    if turns_ptr is not None:
        turn = tl.load(turns_ptr)
        packets_ptr += (turn & 1).to(tl.int64) * slot
        if tl.program_id(0) == 0:
            tl.store(turns_ptr + 1, turn)

    target = -1
    ignored = False
    owned = False
    if labels_ptr is not None:
        y = tl.load(labels_ptr + row).to(tl.int64)
        ignored = y == ignore_index
        target = y - start - first
        owned = (target >= 0) & (target < size) & (y != ignore_index)
        target = tl.where(owned, target, -1).to(tl.int32)
        size = tl.where(ignored, 0, size)

    lanes = tl.arange(0, BLOCK)
    m = -float("inf")
    s = tl.zeros([BLOCK], tl.float32)
    e = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    best = 0
    ms = tl.zeros([BLOCK], tl.float32)  # of a teacher, see _add_teacher
    mg = tl.zeros([BLOCK], tl.float32)
    mt = -float("inf")
    td = tl.zeros([BLOCK], tl.float32)
    tc = tl.zeros([BLOCK], tl.float32)
    th = tl.zeros([BLOCK], tl.float32)
    entry = 0
    if entries_ptr is not None:
        entries_ptr += row * n_entries
        for k in range(0, n_entries, BLOCK):
            ids = tl.load(entries_ptr + k + lanes, mask=k + lanes < n_entries, other=2147483647)
            entry += tl.sum((ids < start + first).to(tl.int32), axis=0)
    first_entry = entry
    whole = size // BLOCK * BLOCK
    # the tile of the target waits, so that the loop need not look for it: one masked tile for it, one for the tail
    waiting = tl.where(target < 0, whole, target // BLOCK * BLOCK)
    for i in tl.range(0, whole - tl.where(waiting < whole, BLOCK, 0), BLOCK, num_stages=4):
        o = tl.where(i < waiting, i, i + BLOCK)
        columns = first + o + lanes
        x = _widen(tl.load(x_ptr + columns.to(tl.int64) * x_column))
        z, _ = _transform(x, columns, bias_ptr, pre, post, HAS_SCALE, HAS_CAP, width)
        before = m
        m, s, e, total, mass, best = _add_tile(
            m, s, e, total, mass, best, z, z, o, columns, weight_ptr, width, WANT_ENTROPY, WANT_TOTAL, WANT_ARGMAX
        )
        if teacher_ptr is not None:
            t = _widen(tl.load(teacher_ptr + columns.to(tl.int64) * t_column))
            ms, mg, mt, td, tc, th = _add_teacher(
                before, ms, mg, mt, td, tc, th, m, z, z, t, u_scale, a, SCALED, WANT_FORWARD, WANT_REVERSE, WANT_MOMENT
            )
        if WANT_STUDENT and SCALED:
            ms, mg, _ = _add_student(before, ms, mg, m, z, a, SCALED, False)
        if entries_ptr is not None:
            rest, entry = _leave_out(z, start + columns, start + first + o + BLOCK, entries_ptr, entry, n_entries)
            mt, td, th, tc, _ = _add_softmax(mt, td, th, tc, rest, a, SCALED, WANT_MOMENT, False)
    for o in range(waiting, size, tl.maximum(whole - waiting, BLOCK)):
        inside = o + lanes
        columns = first + inside
        # two masks that are known to be aligned, so that the load stays wide; what is valid is selected afterwards
        x = tl.load(x_ptr + columns.to(tl.int64) * x_column, mask=(inside < chunk_size) & (columns < width), other=0.0)
        z, _ = _transform(_widen(x), columns, bias_ptr, pre, post, HAS_SCALE, HAS_CAP, width)
        z = tl.where(inside < size, z, float("-inf"))
        v = tl.where(inside == target, float("-inf"), z)
        before = m
        m, s, e, total, mass, best = _add_tile(
            m, s, e, total, mass, best, z, v, o, columns, weight_ptr, width, WANT_ENTROPY, WANT_TOTAL, WANT_ARGMAX
        )
        if teacher_ptr is not None:
            reading = (inside < chunk_size) & (columns < width)
            t = _widen(tl.load(teacher_ptr + columns.to(tl.int64) * t_column, mask=reading, other=0.0))
            t = tl.where(inside < size, t, float("-inf"))
            ms, mg, mt, td, tc, th = _add_teacher(
                before, ms, mg, mt, td, tc, th, m, z, v, t, u_scale, a, SCALED, WANT_FORWARD, WANT_REVERSE, WANT_MOMENT
            )
        if WANT_STUDENT and SCALED:
            ms, mg, _ = _add_student(before, ms, mg, m, v, a, SCALED, False)
        if entries_ptr is not None:
            rest, _ = _leave_out(z, start + columns, start + first + o + BLOCK, entries_ptr, first_entry, n_entries)
            mt, td, th, tc, _ = _add_softmax(mt, td, th, tc, rest, a, SCALED, WANT_MOMENT, False)

    n = n_rows.to(tl.int64)
    HAS_LABELS: tl.constexpr = labels_ptr is not None
    OF_TEACHER: tl.constexpr = (teacher_ptr is not None) * (3 + HAS_LABELS) + WANT_FORWARD + WANT_REVERSE + WANT_MOMENT
    OF_TOPK: tl.constexpr = WANT_STUDENT + 2 * (entries_ptr is not None) + TOPK_ROWS
    rows: tl.constexpr = 2 + 2 * HAS_LABELS + WANT_ENTROPY + 2 * WANT_TOTAL + OF_TEACHER + OF_TOPK + WANT_ARGMAX
    out = packets_ptr + chunk.to(tl.int64) * rows * n + row
    tl.store(out, m + 0.0)
    tl.store(out + n, _fixed_sum(s, BLOCK))
    out += 2 * n
    if labels_ptr is not None:
        column = tl.where(owned, first + target, 0)
        x = tl.load(x_ptr + column.to(tl.int64) * x_column, mask=owned, other=0.0).to(tl.float32)
        z, _ = _transform(x, column, bias_ptr, pre, post, HAS_SCALE, HAS_CAP, width)
        tl.store(out, tl.where(owned, z, 0.0))
        tl.store(out + n, tl.where(ignored, 2.0, tl.where(owned, 1.0, 0.0)))  # 2: stats.IGNORED
        out += 2 * n
    if teacher_ptr is not None:
        tl.store(out, _fixed_sum(ms if SCALED or WANT_REVERSE else s, BLOCK))
        tl.store(out + n, mt + 0.0)
        tl.store(out + 2 * n, _fixed_sum(td, BLOCK))
        out += 3 * n
        if labels_ptr is not None:
            column = tl.where(owned, first + target, 0)
            t = tl.load(teacher_ptr + column.to(tl.int64) * t_column, mask=owned, other=0.0).to(tl.float32)
            tl.store(out, tl.where(owned, t * u_scale, 0.0))
            out += n
    if WANT_STUDENT:
        tl.store(out, _fixed_sum(ms if SCALED else s, BLOCK))
        out += n
    if entries_ptr is not None:
        tl.store(out, mt + 0.0)
        tl.store(out + n, _fixed_sum(td, BLOCK))
        out += 2 * n
        if WANT_MOMENT:
            tl.store(out, _fixed_sum(th, BLOCK))
            out += n
    if WANT_ENTROPY:
        tl.store(out, _fixed_sum(e, BLOCK))
        out += n
    if WANT_TOTAL:
        tl.store(out, _fixed_sum(total, BLOCK))
        tl.store(out + n, _fixed_sum(mass, BLOCK))
        out += 2 * n
    if WANT_FORWARD:
        tl.store(out, _fixed_sum(tc, BLOCK))
        out += n
    if WANT_REVERSE:
        tl.store(out, _fixed_sum(mg, BLOCK))
        out += n
    if teacher_ptr is not None and WANT_MOMENT:
        tl.store(out, _fixed_sum(th, BLOCK))
        out += n
    if WANT_ARGMAX:  # the loop found the tile; which of its columns is looked up once
        inside = best + lanes
        columns = first + inside
        x = tl.load(x_ptr + columns.to(tl.int64) * x_column, mask=(inside < chunk_size) & (columns < width), other=0.0)
        z, _ = _transform(x.to(tl.float32), columns, bias_ptr, pre, post, HAS_SCALE, HAS_CAP, width)
        v = tl.where((inside < size) & (inside != target), z, float("-inf"))
        index = tl.min(tl.where(v == tl.max(v, axis=0), columns, 2147483647), axis=0)
        tl.store(out, (start + index).to(tl.float32))


@triton.jit
def _decay(a, b):
    """a - b and exp(a - b) for a <= b, where a = -inf is the empty sum: 0 and 0, also if b = -inf."""
    empty = a == float("-inf")
    difference = tl.where(empty, 0.0, a - b)
    return difference, tl.where(empty, 0.0, tl.exp(difference))


@triton.jit
def _log1p(u):
    """log(1 + u) in float64 with full relative accuracy for small u (Higham, Accuracy and Stability, 1.14.1)."""
    w = 1.0 + u
    return tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))


@triton.jit
def _weigh(factor, value):
    """factor * value in float64, where a factor of 0 leaves nothing of any value."""
    return tl.where(factor == 0.0, 0.0, factor * value.to(tl.float64))


@triton.jit
def _settle(value, bad, ignored):
    return tl.where(ignored, 0.0, tl.where(bad, float("nan"), value)).to(tl.float32)


@triton.jit
def _packet(packets_ptr, peers_ptr, k, offset, size, CHUNKS: tl.constexpr):
    """Where packet k of the group begins: in the gathered ones, or in the memory of the rank that wrote it."""
    if peers_ptr is None:
        at = packets_ptr + k * size
    else:
        at = tl.load(peers_ptr + k // CHUNKS).to(tl.pointer_type(tl.float32)) + (offset + k % CHUNKS * size)
    return at


@triton.jit(do_not_specialize=["slot", "n_rows"])
def merge_kernel(
    merged_ptr,  # [R, T] fp32 out; rows in the order of stats.merged_rows
    values_ptr,  # [K, T] fp32 out; rows in the order of stats.value_rows
    valid_ptr,  # [T] bool out, where labels are
    argmax_ptr,  # [T] int64 out, or None
    hits_ptr,  # [T] bool out, where labels and argmax are
    packets_ptr,  # [packets, K, T] fp32
    labels_ptr,  # [T] or None
    scales_ptr,  # [2, T] or None, as in `statistics_kernel`
    peers_ptr,  # [P] int64 addresses of every rank's packets, or None where packets_ptr holds all of them
    turns_ptr, slot,  # as in `statistics_kernel`
    n_rows, student_scale,
    PACKETS: tl.constexpr, CHUNKS: tl.constexpr,  # of the group, of a rank
    HAS_TEACHER: tl.constexpr, WANT_STUDENT: tl.constexpr,
    TAIL_ROWS: tl.constexpr, TOPK_ROWS: tl.constexpr,  # those of the packets that `topk_kernels.merge_kernel` merges
    WANT_ENTROPY: tl.constexpr, WANT_TOTAL: tl.constexpr,
    WANT_FORWARD: tl.constexpr, WANT_REVERSE: tl.constexpr, WANT_MOMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the merge of all packets of BLOCK tokens in chunk order, in float64, and the target column."""
    HAS_LABELS: tl.constexpr = labels_ptr is not None
    WANT_ARGMAX: tl.constexpr = argmax_ptr is not None
    TEACHER: tl.constexpr = 2 + 2 * HAS_LABELS  # where rows of the packets begin
    MOMENT: tl.constexpr = TEACHER + HAS_TEACHER * (3 + HAS_LABELS) + WANT_STUDENT + TAIL_ROWS
    CROSS: tl.constexpr = MOMENT + WANT_ENTROPY + 2 * WANT_TOTAL
    INDEX: tl.constexpr = CROSS + WANT_FORWARD + WANT_REVERSE + WANT_MOMENT
    ROWS: tl.constexpr = INDEX + WANT_ARGMAX + TOPK_ROWS
    MEAN: tl.constexpr = 2 + 2 * HAS_LABELS  # and among the merged ones
    ENTROPY: tl.constexpr = 1 + 3 * HAS_LABELS  # its row among the values
    STEP: tl.constexpr = PACKETS if PACKETS <= 8 else 1  # more at once spill registers and compile for minutes
    n = n_rows.to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = token < n
    slot_offset = n * 0
    if turns_ptr is not None:
        turn = tl.load(turns_ptr + 1)
        slot_offset = (turn & 1).to(tl.int64) * slot
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    peak_t = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, PACKETS, STEP):
        for k in tl.static_range(STEP):
            at = _packet(packets_ptr, peers_ptr, first + k, slot_offset, ROWS * n, CHUNKS) + token
            peak = tl.maximum(peak, tl.load(at, mask=here, other=0.0))
            if HAS_TEACHER:
                peak_t = tl.maximum(peak_t, tl.load(at + (TEACHER + 1) * n, mask=here, other=0.0))
    shift = peak.to(tl.float64)
    shift_t = peak_t.to(tl.float64)
    a = student_scale
    if scales_ptr is not None:
        a = tl.load(scales_ptr + n + token, mask=here, other=1.0)

    others = tl.zeros([BLOCK], tl.float64)
    moment = tl.zeros([BLOCK], tl.float64)
    total = tl.zeros([BLOCK], tl.float64)
    mass = tl.zeros([BLOCK], tl.float64)
    target = tl.zeros([BLOCK], tl.float64)
    owners = tl.zeros([BLOCK], tl.float32)
    index = tl.full([BLOCK], float("inf"), tl.float32)
    student = tl.zeros([BLOCK], tl.float64)
    gap = tl.zeros([BLOCK], tl.float64)
    teacher = tl.zeros([BLOCK], tl.float64)
    cross = tl.zeros([BLOCK], tl.float64)
    moment_t = tl.zeros([BLOCK], tl.float64)
    target_t = tl.zeros([BLOCK], tl.float64)
    for first in range(0, PACKETS, STEP):
        for k in tl.static_range(STEP):
            at = _packet(packets_ptr, peers_ptr, first + k, slot_offset, ROWS * n, CHUNKS) + token
            m = tl.load(at, mask=here, other=0.0)
            s = tl.load(at + n, mask=here, other=1.0).to(tl.float64)
            drop, factor = _decay(m.to(tl.float64), shift)
            others = tl.fma(factor, s, others)
            if HAS_LABELS:
                owner = tl.load(at + 3 * n, mask=here, other=0.0)
                owners += owner
                # selected by the flag, never by max, which may drop NaN
                target += tl.where(owner == 1.0, tl.load(at + 2 * n, mask=here, other=0.0), 0.0).to(tl.float64)
            if WANT_ENTROPY:
                e = tl.load(at + MOMENT * n, mask=here, other=0.0).to(tl.float64)
                moment = tl.fma(factor, tl.fma(drop, s, e), moment)
            if WANT_TOTAL:
                total += tl.load(at + (MOMENT + WANT_ENTROPY) * n, mask=here, other=0.0).to(tl.float64)
                mass += tl.load(at + (MOMENT + WANT_ENTROPY + 1) * n, mask=here, other=0.0).to(tl.float64)
            if HAS_TEACHER or WANT_STUDENT:
                scaled = tl.where(m == float("-inf"), 0.0, tl.exp(a * drop))
                student = tl.fma(scaled, tl.load(at + TEACHER * n, mask=here, other=1.0).to(tl.float64), student)
            if HAS_TEACHER:
                mt = tl.load(at + (TEACHER + 1) * n, mask=here, other=0.0).to(tl.float64)
                d = tl.load(at + (TEACHER + 2) * n, mask=here, other=1.0).to(tl.float64)
                fall, factor_t = _decay(mt, shift_t)
                teacher = tl.fma(factor_t, d, teacher)
                if HAS_LABELS:
                    t = tl.load(at + (TEACHER + 3) * n, mask=here, other=0.0)
                    target_t += tl.where(owner == 1.0, t, 0.0).to(tl.float64)
                if WANT_FORWARD:
                    cross += _weigh(factor_t, tl.load(at + CROSS * n, mask=here, other=0.0))
                if WANT_REVERSE:
                    gap += _weigh(scaled, tl.load(at + (CROSS + WANT_FORWARD) * n, mask=here, other=0.0))
                if WANT_MOMENT:
                    h = tl.load(at + (CROSS + WANT_FORWARD + WANT_REVERSE) * n, mask=here, other=0.0).to(tl.float64)
                    moment_t = tl.fma(factor_t, tl.fma(fall, d, h), moment_t)
            if WANT_ARGMAX:
                column = tl.load(at + INDEX * n, mask=here, other=0.0)
                index = tl.where(m == peak, tl.minimum(index, column), index)

    top = shift
    whole = others
    ignored = owners < 0.0
    if HAS_LABELS:
        ignored = owners == 2.0 * PACKETS
        top = tl.maximum(shift, target)
        drop, factor = _decay(shift, top)
        p_target = _decay(target, top)[1]
        offset = tl.where(target == float("-inf"), target, target - top)
        if HAS_TEACHER or WANT_STUDENT:
            scaled = tl.where(shift == float("-inf"), 0.0, tl.exp(a * drop))
            at_target = tl.where(target == float("-inf"), 0.0, tl.exp(a * offset))
            student = scaled * student + at_target
            if WANT_REVERSE:
                gap = _weigh(scaled, gap) + _weigh(at_target, a * target - target_t)
        if WANT_ENTROPY:
            moment = factor * tl.fma(drop, others, moment) + tl.where(p_target == 0.0, 0.0, p_target * offset)
        others *= factor
        whole = others + p_target
        log_sum = tl.where(target == top, _log1p(others), tl.log(whole))
        bad = (~(whole > 0.0) | (owners != 1.0)) & ~ignored
        log_prob = 0.0 - tl.where(target == top, log_sum, log_sum - offset)
        tl.store(values_ptr + n + token, _settle(log_prob, bad, ignored), mask=here)
        tl.store(values_ptr + 2 * n + token, _settle(target, bad, ignored), mask=here)
        tl.store(values_ptr + 3 * n + token, owners, mask=here)
        tl.store(valid_ptr + token, ~ignored, mask=here)
        tl.store(merged_ptr + 2 * n + token, _settle(others / whole, bad, ignored), mask=here)
        tl.store(merged_ptr + 3 * n + token, _settle(offset, bad, ignored), mask=here)
    else:
        log_sum = tl.log(whole)
        bad = ~(whole > 0.0)
    tl.store(values_ptr + token, _settle(top + log_sum, bad, ignored), mask=here)
    tl.store(merged_ptr + token, _settle(top, bad, ignored), mask=here)
    tl.store(merged_ptr + n + token, _settle(whole, bad, ignored), mask=here)
    if WANT_ENTROPY:
        mean = moment / whole
        tl.store(merged_ptr + MEAN * n + token, _settle(mean, bad, ignored), mask=here)
        tl.store(values_ptr + ENTROPY * n + token, _settle(log_sum - mean, bad, ignored), mask=here)
    if WANT_TOTAL:
        tl.store(values_ptr + (ENTROPY + WANT_ENTROPY) * n + token, _settle(total, bad, ignored), mask=here)
        tl.store(values_ptr + (ENTROPY + WANT_ENTROPY + 1) * n + token, _settle(mass, bad, ignored), mask=here)
    if WANT_STUDENT:
        tl.store(merged_ptr + (MEAN + WANT_ENTROPY) * n + token, _settle(student, bad, ignored), mask=here)
    if HAS_TEACHER:
        unknown = bad | (~(teacher > 0.0) & ~ignored)
        log_t = tl.log(teacher)
        apart = shift_t + log_t - (a * top + tl.log(student))
        at = values_ptr + (ENTROPY + WANT_ENTROPY + 2 * WANT_TOTAL) * n + token
        if WANT_FORWARD:
            kl = cross / teacher - apart
            tl.store(at, _settle(tl.where(kl < 0.0, 0.0, kl), unknown, ignored), mask=here)
            at += n
        if WANT_REVERSE:
            gap /= student
            kl = gap + apart
            tl.store(at, _settle(tl.where(kl < 0.0, 0.0, kl), unknown, ignored), mask=here)
            at += n
        if WANT_MOMENT:
            tl.store(at, _settle(log_t - moment_t / teacher, unknown, ignored), mask=here)
        at = merged_ptr + (MEAN + WANT_ENTROPY) * n + token
        tl.store(at, _settle(student, unknown, ignored), mask=here)
        tl.store(at + n, _settle(shift_t, unknown, ignored), mask=here)
        tl.store(at + 2 * n, _settle(teacher, unknown, ignored), mask=here)
        tl.store(at + 3 * n, _settle(gap, unknown, ignored), mask=here)
    if WANT_ARGMAX:
        best = index.to(tl.int64)
        if HAS_LABELS:
            y = tl.load(labels_ptr + token, mask=here, other=0).to(tl.int64)
            best = tl.where((target > shift) | ((target == shift) & (y < best)), y, best)
            tl.store(hits_ptr + token, (best == y) & ~bad & ~ignored, mask=here)
        tl.store(argmax_ptr + token, tl.where(bad | ignored, -1, best), mask=here)
    if turns_ptr is not None:  # noqa: SIM102 (last, because a store ends the reuse of what was loaded)
        if tl.program_id(0) == 0:
            tl.store(turns_ptr, turn + 1)


@triton.jit
def _half_sign(d):
    """sign(d) / 2."""
    return tl.where(d > 0.0, 0.5, tl.where(d < 0.0, -0.5, 0.0))


LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _apart(p, log2_p, log2_m):
    """p log2(p / m), where what has no probability adds nothing."""
    return p * (tl.maximum(log2_p, -1e30) - log2_m)


@triton.jit
def _add_divergence(
    of_student, of_teacher, variation, variation_mean,  # lane sums: p log2(p / m), q log2(q / m), of `_half_sign`
    z, u, beta, WANT_JSD: tl.constexpr, WANT_VARIATION: tl.constexpr,  # log2 of the probabilities of both
):  # fmt: skip
    p = _exp2(z)
    q = _exp2(u)
    if WANT_JSD:
        m = _log2(beta * q + (1.0 - beta) * p)
        of_student += _apart(p, z, m)
        of_teacher += _apart(q, u, m)
    if WANT_VARIATION:
        sign = _half_sign(p - q)
        variation += sign * (p - q)
        variation_mean += sign * p
    return of_student, of_teacher, variation, variation_mean


@triton.jit(do_not_specialize=["n_rows", "valid_width", "chunks"])
def divergence_kernel(
    packets_ptr,  # [chunks, K, T] fp32 out; rows in the order of stats.later_rows
    x_ptr,  # [T, width]
    bias_ptr, temperature_ptr, teacher_ptr, scales_ptr,  # as in `statistics_kernel`
    merged_ptr,  # [R, T] fp32; rows in the order of stats.merged_rows
    n_rows, x_row, x_column, t_row, t_column, valid_width, width, chunk_size, chunks,
    pre, post, teacher_scale, student_scale, beta,
    HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, SCALED: tl.constexpr,
    WANT_JSD: tl.constexpr, WANT_VARIATION: tl.constexpr,
    TEACHER: tl.constexpr,  # the first merged row that is the teacher's
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the packet of the second exchange of one chunk of one row; p and q are probabilities by now."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    first = chunk * chunk_size
    n = n_rows.to(tl.int64)
    pre, post = _row_factors(temperature_ptr, row, pre, post, HAS_CAP)
    u_scale, a = _teacher_scales(scales_ptr, row, n_rows, teacher_scale, student_scale)
    ignored = tl.load(merged_ptr + n + row) == 0.0
    size = tl.where(ignored, 0, tl.maximum(tl.minimum(chunk_size, valid_width - first), 0))
    shift = tl.load(merged_ptr + row)
    at = merged_ptr + TEACHER * n + row
    log2_student = tl.log2(tl.load(at))
    shift_t = tl.load(at + n)
    log2_teacher = tl.log2(tl.load(at + 2 * n))
    a *= LOG2_E
    lanes = tl.arange(0, BLOCK)
    x_ptr += row * x_row
    teacher_ptr += row * t_row
    of_student = tl.zeros([BLOCK], tl.float32)
    of_teacher = tl.zeros([BLOCK], tl.float32)
    variation = tl.zeros([BLOCK], tl.float32)
    variation_mean = tl.zeros([BLOCK], tl.float32)
    whole = size // BLOCK * BLOCK
    for o in tl.range(0, whole, BLOCK, num_stages=4):
        columns = first + o + lanes
        x = _widen(tl.load(x_ptr + columns.to(tl.int64) * x_column))
        u = _widen(tl.load(teacher_ptr + columns.to(tl.int64) * t_column))
        z, _ = _transform(x, columns, bias_ptr, pre, post, HAS_SCALE, HAS_CAP, width)
        if SCALED:
            u *= u_scale
        of_student, of_teacher, variation, variation_mean = _add_divergence(
            of_student, of_teacher, variation, variation_mean,
            (z - shift) * a - log2_student, (u - shift_t) * LOG2_E - log2_teacher, beta, WANT_JSD, WANT_VARIATION,
        )  # fmt: skip
    for o in range(whole, size, BLOCK):
        inside = o + lanes
        columns = first + inside
        reading = (inside < chunk_size) & (columns < width)
        x = _widen(tl.load(x_ptr + columns.to(tl.int64) * x_column, mask=reading, other=0.0))
        u = _widen(tl.load(teacher_ptr + columns.to(tl.int64) * t_column, mask=reading, other=0.0))
        z, _ = _transform(x, columns, bias_ptr, pre, post, HAS_SCALE, HAS_CAP, width)
        if SCALED:
            u *= u_scale
        z = tl.where(inside < size, (z - shift) * a - log2_student, float("-inf"))
        u = tl.where(inside < size, (u - shift_t) * LOG2_E - log2_teacher, float("-inf"))
        of_student, of_teacher, variation, variation_mean = _add_divergence(
            of_student, of_teacher, variation, variation_mean, z, u, beta, WANT_JSD, WANT_VARIATION
        )
    out = packets_ptr + chunk.to(tl.int64) * 2 * (WANT_JSD + WANT_VARIATION) * n + row
    if WANT_JSD:
        mean = (1.0 - beta) * LOG_2 * _fixed_sum(of_student, BLOCK)
        tl.store(out, mean + beta * LOG_2 * _fixed_sum(of_teacher, BLOCK))
        tl.store(out + n, mean)
        out += 2 * n
    if WANT_VARIATION:
        tl.store(out, _fixed_sum(variation, BLOCK))
        tl.store(out + n, _fixed_sum(variation_mean, BLOCK))


@triton.jit(do_not_specialize=["grads", "n_rows", "start", "valid_width"])
def gradient_kernel(
    dx_ptr,  # [T, width] out; may be x itself
    x_ptr,  # [T, width]
    labels_ptr,  # [T] or None
    bias_ptr,  # [width] or None
    temperature_ptr,  # [T] fp32 or None
    weight_ptr,  # [width] fp32 or None
    teacher_ptr, scales_ptr,  # [T, width], [2, T] or None, as in `statistics_kernel`
    merged_ptr,  # [R, T] fp32; rows in the order of stats.merged_rows
    grads,  # upstream gradients [T] fp32 or None, of lse, log_prob, entropy, total, those of a teacher
    rest_ptr,  # [4, T] fp32 or None: what a top-K teacher adds at every column, see `topk_kernels.gradient_kernel`
    entries_ptr, extra_ptr,  # [T, E] int32, fp32 or None: only these ids, what is added; x is [T, E], too
    n_rows, dx_row, dx_column, x_row, x_column, t_row, t_column,
    start, valid_width, width, n_entries,
    pre, post, teacher_scale, student_scale, beta,
    HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, PADDED: tl.constexpr, SCALED: tl.constexpr,
    TEACHER: tl.constexpr, JSD: tl.constexpr, VARIATION: tl.constexpr,  # merged rows: the teacher's first, both means
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one tile of one row of the gradient; `eager.logits_gradient` states the formula.

    Rows run from the last to the first: what the forward read last is still in the L2 cache.
    """
    g_lse_ptr, g_log_prob_ptr, g_entropy_ptr, g_total_ptr = grads[0], grads[1], grads[2], grads[3]
    g_forward_ptr, g_reverse_ptr, g_jsd_ptr, g_variation_ptr = grads[4], grads[5], grads[6], grads[7]
    SPARSE: tl.constexpr = entries_ptr is not None
    tiles = tl.cdiv(n_entries if SPARSE else width, BLOCK)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    first = program % tiles * BLOCK
    positions = first + tl.arange(0, BLOCK)
    n = n_rows.to(tl.int64)
    shift = tl.load(merged_ptr + row)
    whole = tl.load(merged_ptr + n + row)
    ignored = whole == 0.0
    # nothing is read of an ignored row, its gradient is 0
    if SPARSE:
        columns = tl.load(entries_ptr + row * n_entries + positions, mask=positions < n_entries, other=-1) - start
        written = (columns >= 0) & (columns < valid_width)
        columns = tl.where(written, columns, width)
        readable = written & (columns < tl.where(ignored, 0, valid_width))
    else:
        columns = positions
        written = columns < width
        readable = columns < tl.where(ignored, 0, width)
    pre, post = _row_factors(temperature_ptr, row, pre, post, HAS_CAP)
    x = tl.load(x_ptr + row * x_row + positions.to(tl.int64) * x_column, mask=readable, other=0.0)
    z, slope = _transform(_widen(x), columns, bias_ptr, pre, post, HAS_SCALE, HAS_CAP, width)

    common = 0.0  # coefficient of p at every column
    if g_lse_ptr is not None:
        common += tl.load(g_lse_ptr + row)
    away = common  # and at columns other than the target
    if g_log_prob_ptr is not None:
        away -= tl.load(g_log_prob_ptr + row)
    away = tl.where(ignored, 0.0, away / whole)
    shifted = z - shift
    p = _exp(shifted)
    if g_entropy_ptr is not None:
        g_entropy = tl.load(g_entropy_ptr + row)
        mean = tl.load(merged_ptr + (2 + 2 * (labels_ptr is not None)) * n + row)
        # where p underflows the factor stays finite, so that their product is 0
        dz = p * (away - tl.where(ignored, 0.0, g_entropy / whole) * (tl.maximum(shifted, -200.0) - mean))
    else:
        dz = p * away
    if labels_ptr is not None:
        target = tl.load(labels_ptr + row).to(tl.int64) - start
        if SPARSE:
            here = target >= 0
        else:
            here = (target >= first) & (target < first + BLOCK)
        if here:
            offset = tl.load(merged_ptr + 3 * n + row)
            if g_entropy_ptr is not None:
                common -= g_entropy * tl.where(offset == float("-inf"), 0.0, offset - mean)
            at_target = tl.exp(offset) * common / whole
            if g_log_prob_ptr is not None:
                at_target += tl.load(merged_ptr + 2 * n + row) * tl.load(g_log_prob_ptr + row)
            dz = tl.where(columns == target.to(tl.int32), tl.where(ignored, 0.0, at_target), dz)
    if g_total_ptr is not None:
        w = tl.where(ignored, 0.0, tl.load(g_total_ptr + row))
        if weight_ptr is not None:
            w *= tl.load(weight_ptr + columns, mask=written, other=0.0)
        dz += tl.where(z == float("-inf"), 0.0, w)
    u_scale, a = _teacher_scales(scales_ptr, row, n_rows, teacher_scale, student_scale)
    if teacher_ptr is not None:
        t = tl.load(teacher_ptr + row * t_row + columns.to(tl.int64) * t_column, mask=readable, other=0.0)
        u = _widen(t)
        if SCALED:
            u *= u_scale
            z *= a
            shifted *= a
        at = merged_ptr + TEACHER * n + row
        p = _exp(shifted)
        per_student = tl.where(ignored, 0.0, 1.0 / tl.load(at))
        if g_forward_ptr is not None or g_jsd_ptr is not None or g_variation_ptr is not None:
            q = _exp(u - tl.load(at + n))
            per_teacher = tl.where(ignored, 0.0, 1.0 / tl.load(at + 2 * n))
        if g_forward_ptr is not None:
            g = a * tl.load(g_forward_ptr + row)
            dz += p * (g * per_student) - q * (g * per_teacher)
        if g_reverse_ptr is not None:
            g = a * tl.load(g_reverse_ptr + row) * per_student
            apart = tl.where(p == 0.0, 0.0, p * (z - u - tl.load(at + 3 * n)))
            dz += tl.where(g == 0.0, 0.0, g * apart)  # where nobody asks, an infinite divergence has no gradient
        if g_jsd_ptr is not None or g_variation_ptr is not None:
            p *= per_student
            q *= per_teacher
        if g_jsd_ptr is not None:
            g = a * tl.load(g_jsd_ptr + row)
            log2_p = shifted * LOG2_E + tl.log2(per_student)
            apart = _apart(p, log2_p, _log2(beta * q + (1.0 - beta) * p))
            dz += (g * (1.0 - beta) * LOG_2) * apart - (g * tl.load(merged_ptr + JSD * n + row)) * p
        if g_variation_ptr is not None:
            g = a * tl.load(g_variation_ptr + row)
            dz += g * p * (_half_sign(p - q) - tl.load(merged_ptr + VARIATION * n + row))
    if rest_ptr is not None:
        fall = tl.load(rest_ptr + n + row)
        fall = (z - fall) * a if SCALED else z - fall
        moment = tl.load(rest_ptr + 2 * n + row) * (tl.maximum(fall, -200.0) - tl.load(rest_ptr + 3 * n + row))
        dz += _exp(fall) * (tl.load(rest_ptr + row) + moment)
    if SPARSE:
        dz += tl.load(extra_ptr + row * n_entries + positions, mask=readable, other=0.0)
    if HAS_SCALE:
        dz *= slope
    dz = tl.where(ignored, 0.0, dz)  # whatever a bias, a temperature or a weight did to it
    if PADDED:
        dz = tl.where(columns < valid_width, dz, 0.0)
    tl.store(dx_ptr + row * dx_row + columns.to(tl.int64) * dx_column, dz.to(dx_ptr.dtype.element_ty), mask=written)
