"""Device functions of the statistics over sets of ids. Names as in `family_triton`."""

import triton
import triton.language as tl

from .distinct_triton import NO_ENTRY, places_of
from .entries_triton import AT_ONCE, load_at_ids
from .family_triton import (
    Gradient,
    Merge,
    Statistics,
    not_rescaled,
    nothing_folded,
    read,
    report,
    upstream,
)
from .numerics_triton import decay, exp, fixed_sum, weigh
from .softmax_triton import join_target

# of a chunk that are summed at once: of 1024 ids 128 are in one of 8, or some more
MEMBERS = tl.constexpr(256)


@triton.jit
def members_between(inputs, row, first, end):
    """Number of the first id, and how many ids, of a part of a row's set that has all of the ids
    first .. end - 1; a set's ids ascend, and AT_ONCE of them tell where the part is."""
    begin = tl.load(inputs.set_spans + 2 * row)
    count = (tl.load(inputs.set_spans + 2 * row + 1) - begin).to(tl.int32)
    if count > AT_ONCE:
        apart = tl.cdiv(count, AT_ONCE)
        place = tl.arange(0, AT_ONCE) * apart
        ids = tl.load(inputs.sets + begin + place, mask=place < count, other=NO_ENTRY)
        skipped = tl.maximum(tl.sum((ids < first).to(tl.int32), axis=0) - 1, 0) * apart
        count = tl.minimum(tl.sum((ids < end).to(tl.int32), axis=0) * apart, count) - skipped
        begin += skipped
        count = tl.maximum(count, 0)
    return begin, count


@triton.jit
def are_members(inputs, row, ids):
    """Whether each of some ids is in a row's set, which ascends."""
    begin = tl.load(inputs.set_spans + 2 * row)
    count = (tl.load(inputs.set_spans + 2 * row + 1) - begin).to(tl.int32)
    place = places_of(ids, inputs.sets + begin, count)
    return tl.load(inputs.sets + begin + place, mask=place < count, other=-1) == ids


@triton.jit
def start(zeros, chunk, inputs):
    return (0,)


@triton.jit
def add(state, tile, softmax, chunk, inputs, rows):
    return state


@triton.jit
def store(out, n, state, core, chunk, inputs, rows):
    """Store the sums over the members of a token's set that are in this chunk."""
    m = -float("inf")
    s = tl.zeros([MEMBERS], tl.float32)
    moment = tl.zeros([MEMBERS], tl.float32)
    owner = tl.zeros([MEMBERS], tl.float32)
    first_id = chunk.start + chunk.first
    begin, count = members_between(inputs, chunk.row, first_id, first_id + chunk.size)
    lanes = tl.arange(0, MEMBERS)
    for k in range(0, count, MEMBERS):
        live = k + lanes < count
        columns, z, here = load_at_ids(inputs.sets, inputs, chunk, begin + k + lanes, live)
        if inputs.labels is not None:  # the target is joined by the merge
            is_target = here & (columns - chunk.first == chunk.target)
            owner += is_target.to(tl.float32)
            z = tl.where(is_target, float("-inf"), z)
        peak = tl.maximum(m, tl.max(z, axis=0))
        drop = tl.where(m == float("-inf"), 0.0, m - peak)
        factor = tl.where(m == float("-inf"), 0.0, exp(drop))
        shifted = z - tl.where(peak == float("-inf"), 0.0, peak)
        p = exp(shifted)
        moment = tl.fma(p, tl.maximum(shifted, -1e30), factor * tl.fma(drop, s, moment))
        s = tl.fma(factor, s, p)
        m = peak
    tl.store(out + rows.set_max * n, m + 0.0)
    tl.store(out + rows.set_sum * n, fixed_sum(s, MEMBERS))
    if rows.set_moment is not None:
        tl.store(out + rows.set_moment * n, fixed_sum(moment, MEMBERS))
    if inputs.labels is not None:
        tl.store(out + rows.set_owner * n, fixed_sum(owner, MEMBERS))


@triton.jit
def start_merge(BLOCK: tl.constexpr):
    """The maximum; sums of p, of the moment, of the owners' flags."""
    zeros = tl.zeros([BLOCK], tl.float64)
    return tl.full([BLOCK], -float("inf"), tl.float32), zeros, zeros, tl.zeros([BLOCK], tl.float32)


@triton.jit
def peak(state, packet, rows):
    return tl.maximum(state[0], read(packet, rows.set_max, 0.0)), state[1], state[2], state[3]


@triton.jit
def add_packet(state, packet, softmax, rows):
    moment = state[2]
    owner = state[3]
    drop, factor = decay(read(packet, rows.set_max, 0.0).to(tl.float64), state[0].to(tl.float64))
    s = read(packet, rows.set_sum, 1.0).to(tl.float64)
    if rows.set_moment is not None:
        moment = tl.fma(
            factor, tl.fma(drop, s, read(packet, rows.set_moment, 0.0).to(tl.float64)), moment
        )
    if rows.set_owner is not None:
        owner += read(packet, rows.set_owner, 0.0)
    return state[0], tl.fma(factor, s, state[1]), moment, owner


@triton.jit
def finish(state, joined, out, inputs, rows):
    top = state[0].to(tl.float64)
    whole = state[1]
    moment = state[2]
    log_sum = tl.log(whole)
    bad = joined.bad | ~(whole > 0.0)
    value: tl.constexpr = rows.value
    merged: tl.constexpr = rows.merged
    if rows.packet.set_owner is not None:
        top, drop, factor, offset, p_target, others, whole, log_sum, log_prob = join_target(
            top, whole, joined.target
        )
        moment = factor * tl.fma(drop, state[1], moment) + weigh(p_target, offset)
        bad = joined.bad | ~(whole > 0.0) | (state[3] != 1.0)
        report(out.merged, joined, merged.set_others, others / whole, bad)
        report(out.value, joined, value.set_log_prob, log_prob, bad)
    mean = moment / whole
    log_mass = tl.minimum(top + log_sum - joined.top - joined.log_sum, 0.0)
    report(out.merged, joined, merged.set_shift, top, bad)
    report(out.merged, joined, merged.set_sum, whole, bad)
    report(out.merged, joined, merged.set_mean, mean, bad)
    report(out.value, joined, value.set_entropy, log_sum - mean, bad)
    report(out.value, joined, value.set_log_mass, log_mass, bad)
    report(out.merged, joined, merged.set_outside, 1.0 - tl.exp(log_mass), bad)


@triton.jit
def load(grads, token, inputs, rows):
    """Load what the gradient with respect to lse gets, NaN for a bad set, and which entries of a
    tile are members."""
    whole = tl.load(token.merged + rows.set_sum * token.n)
    common = tl.where(whole == whole, 0.0, whole)
    members = 0
    if len(token.places.entries.shape) == 1:
        entries = tl.load(inputs.entries + token.places.entries, mask=token.written, other=-1)
        members = are_members(inputs, token.row, entries)
    if len(token.places.sets.shape) != 1 and grads.set_log_mass is not None:
        elsewhere = common - upstream(grads.set_log_mass, token)
        common = (
            tl.where(members, common, elsewhere)
            if len(token.places.entries.shape) == 1
            else elsewhere
        )
    return common, members


@triton.jit
def coefficient(away, state, shifted, p, token):
    return away + tl.where(token.ignored, 0.0, state[0] / token.whole)


@triton.jit
def at_target(common, state, offset, token):
    return common + state[0]


@triton.jit
def direct(dz, state, tile, token, grads, inputs, rows):
    """Add the members' own part, by the table of `sets`."""
    elsewhere = dz
    if len(token.places.sets.shape) + len(token.places.entries.shape) == 1:
        at = token.merged
        shifted = tile.z - tl.load(at + rows.set_shift * token.n)
        s = exp(shifted) / tl.load(at + rows.set_sum * token.n)
        if grads.set_log_prob is not None:
            target = tl.load(inputs.labels + token.row).to(tl.int64) - token.start
            own = tl.where(
                tile.columns.to(tl.int64) == target, tl.load(at + rows.set_others * token.n), -s
            )
            dz += upstream(grads.set_log_prob, token) * own
        if grads.set_entropy is not None:
            apart = tl.maximum(shifted, -200.0) - tl.load(at + rows.set_mean * token.n)
            dz -= upstream(grads.set_entropy, token) * s * apart
        if grads.set_log_mass is not None:
            dz += upstream(grads.set_log_mass, token) * tl.load(at + rows.set_outside * token.n) * s
    return tl.where(state[1], dz, elsewhere) if len(token.places.entries.shape) == 1 else dz


STATISTICS = Statistics(start, not_rescaled, add, store)
MERGE = Merge(start_merge, peak, add_packet, nothing_folded, finish)
GRADIENT = Gradient(load, coefficient, at_target, direct)
