"""Device functions of the softmax core, which carriers call by name, because all families build on
it."""

import triton
import triton.language as tl

from .family_triton import put, read, report, row_factors, transform, write
from .numerics_triton import decay, exp, lane_sum, log1p
from .records_triton import Chunk, Joined, Move, PacketSoftmax, SoftmaxTile

IGNORED = tl.constexpr(2.0)  # as `softmax.IGNORED`


@triton.jit
def rescale_student(student, move, chunk, inputs):
    """Move the lane sums of exp(a (v - m)) to another maximum; they exist only where a is not 1."""
    if inputs.student_scale is not None:
        student *= tl.where(move.before == float("-inf"), 0.0, exp(move.drop * chunk.student_scale))
    return student


@triton.jit
def move_to(m, s, peak):
    """The step from a maximum to a larger one."""
    first = m == float("-inf")
    drop = tl.where(first, 0.0, m - peak)
    return Move(m, drop, tl.where(first, 0.0, exp(drop)), s)


@triton.jit
def tile_softmax(m, before, peak, v):
    """The softmax of a tile relative to the maximum m so far."""
    shifted = v - tl.where(m == float("-inf"), 0.0, m)
    return SoftmaxTile(before, peak, shifted, exp(shifted))


@triton.jit
def add_student(student, softmax, chunk, inputs):
    """Add a tile's exp(a (v - m))."""
    if inputs.student_scale is not None:
        student += exp(softmax.shifted * chunk.student_scale)
    return student


@triton.jit
def store_sums(out, n, core, student, inputs, rows):
    """Store the maximum and the sums of exponentials."""
    tl.store(out + rows.max * n, core.max + 0.0)
    tl.store(out + rows.sum * n, lane_sum(core.sum))
    if rows.student_sum is not None:
        sums = student if inputs.student_scale is not None else core.sum
        tl.store(out + rows.student_sum * n, lane_sum(sums))


@triton.jit
def load_target(chunk, inputs):
    """The label's transformed logit where the chunk owns it."""
    column = tl.where(chunk.owned, chunk.first + chunk.target, 0)
    at = inputs.x + chunk.row * inputs.x_row + column.to(tl.int64) * inputs.x_column
    x = tl.load(at, mask=chunk.owned, other=0.0).to(tl.float32)
    z, _ = transform(x, column, inputs, chunk.pre, chunk.post)
    return z


@triton.jit(do_not_specialize=["n_rows", "start", "valid_width"])
def label_logits_kernel(
    out_ptr,  # [T] fp32 out
    inputs,  # Inputs
    n_rows,
    start,
    valid_width,
    BLOCK: tl.constexpr,
):
    """One program: the transformed logits of the labels of BLOCK tokens, 0 where they are not in
    this shard."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.minimum(token, n_rows - 1)
    target = tl.load(inputs.labels + row).to(tl.int64) - start
    owned = (target >= 0) & (target < valid_width)
    pre, post = row_factors(inputs, row)
    z = load_target(
        Chunk(row, 0, valid_width, start, target, owned, False, pre, post, 1.0, 1.0), inputs
    )
    tl.store(out_ptr + token, tl.where(owned, z, 0.0), mask=token < n_rows)


@triton.jit
def store_target(out, n, z, chunk, rows):
    """Store the label's transformed logit z, if it is here, and the owner's flag."""
    tl.store(out + rows.target * n, tl.where(chunk.owned, z, 0.0))
    tl.store(
        out + rows.owner * n, tl.where(chunk.ignored, IGNORED, tl.where(chunk.owned, 1.0, 0.0))
    )


@triton.jit
def packet_softmax(packet, peak, scale, rows):
    """The softmax of one packet relative to the maximum of all."""
    m = read(packet, rows.max, 0.0)
    s = read(packet, rows.sum, 1.0).to(tl.float64)
    drop, factor = decay(m.to(tl.float64), peak.to(tl.float64))
    student_factor = 0
    owner = 0
    if rows.student_sum is not None:
        student_factor = tl.where(m == float("-inf"), 0.0, tl.exp(scale * drop))
    if rows.owner is not None:
        owner = read(packet, rows.owner, 0.0)
    return PacketSoftmax(m, peak, drop, factor, s, student_factor, owner, scale)


@triton.jit
def start_merge(BLOCK: tl.constexpr):
    """Sums: of p, of the target's logit, of the owners' flags, of the student's p at the teacher's
    side."""
    zeros = tl.zeros([BLOCK], tl.float64)
    return zeros, zeros, tl.zeros([BLOCK], tl.float32), zeros


@triton.jit
def add_packet(state, packet, softmax, rows):
    others = tl.fma(softmax.factor, softmax.sum, state[0])
    target = state[1]
    owners = state[2]
    student = state[3]
    if rows.owner is not None:
        owners += softmax.owner
        # selected by the flag, never by max, which may drop NaN
        target += tl.where(softmax.owner == 1.0, read(packet, rows.target, 0.0), 0.0).to(tl.float64)
    if rows.student_sum is not None:
        student = tl.fma(
            softmax.student_factor, read(packet, rows.student_sum, 1.0).to(tl.float64), student
        )
    return others, target, owners, student


@triton.jit
def without_target(state, peak, scale, token, here, n, rows):
    """The merged sums of a call without labels."""
    shift = peak.to(tl.float64)
    whole = state[0]
    student_sum = 0
    if rows.student_sum is not None:
        student_sum = state[3]
    return Joined(
        shift,
        shift,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        whole,
        whole,
        tl.log(whole),
        student_sum,
        scale,
        ~(whole > 0.0),
        state[2] < 0.0,
        token,
        here,
        n,
    )


@triton.jit
def join_target(shift, others, target):
    """The sum others of exp(z - shift) together with its target column, whose logit is given; as in
    `softmax`."""
    top = tl.maximum(shift, target)
    drop, factor = decay(shift, top)
    p_target = decay(target, top)[1]
    offset = tl.where(target == float("-inf"), target, target - top)
    others = others * factor
    whole = others + p_target
    log_sum = tl.where(target == top, log1p(others), tl.log(whole))
    log_prob = 0.0 - tl.where(target == top, log_sum, log_sum - offset)
    return top, drop, factor, offset, p_target, others, whole, log_sum, log_prob


@triton.jit
def with_target(state, peak, scale, token, here, n, rows, PACKETS: tl.constexpr):
    """The merged sums with the target column."""
    shift = peak.to(tl.float64)
    others = state[0]
    target = state[1]
    owners = state[2]
    ignored = owners == IGNORED * PACKETS
    top, drop, factor, offset, p_target, _others, whole, log_sum, _log_prob = join_target(
        shift, others, target
    )
    student_sum = 0
    student_factor = 0
    at_target = 0
    if rows.student_sum is not None:
        student_factor = tl.where(shift == float("-inf"), 0.0, tl.exp(scale * drop))
        at_target = tl.where(target == float("-inf"), 0.0, tl.exp(scale * offset))
        student_sum = student_factor * state[3] + at_target
    bad = (~(whole > 0.0) | (owners != 1.0)) & ~ignored
    return Joined(
        shift,
        top,
        drop,
        factor,
        target,
        offset,
        p_target,
        student_factor,
        at_target,
        others,
        whole,
        log_sum,
        student_sum,
        scale,
        bad,
        ignored,
        token,
        here,
        n,
    )


@triton.jit
def fold(state, peak, packet, rows, parts):
    """Store the merged sums of some parts of a chunk as one packet."""
    put(packet, rows.max, peak)
    put(packet, rows.sum, state[0])
    if rows.owner is not None:
        put(packet, rows.target, state[1])
        put(packet, rows.owner, tl.where(state[2] == IGNORED * parts, IGNORED, state[2]))
    put(packet, rows.student_sum, state[3])


@triton.jit
def finish(state, joined, out, rows):
    """Store merged rows and values of the softmax."""
    bad = joined.bad
    if rows.packet.owner is not None:
        log_prob = 0.0 - tl.where(
            joined.target == joined.top, joined.log_sum, joined.log_sum - joined.offset
        )
        others = joined.others * joined.factor / joined.whole
        report(out.value, joined, rows.value.log_prob, log_prob, bad)
        report(out.value, joined, rows.value.target_logit, joined.target, bad)
        write(out.value, joined, rows.value.owners, state[2])
        tl.store(out.valid + joined.token, ~joined.ignored, mask=joined.here)
        report(out.merged, joined, rows.merged.others, others, bad)
        report(out.merged, joined, rows.merged.target, joined.offset, bad)
    report(out.value, joined, rows.value.lse, joined.top + joined.log_sum, bad)
    report(out.merged, joined, rows.merged.shift, joined.top, bad)
    report(out.merged, joined, rows.merged.sum, joined.whole, bad)
    report(out.merged, joined, rows.merged.student_sum, joined.student_sum, bad)
