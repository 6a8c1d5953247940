"""The kernels that leave each id of a set, or of a top-K teacher's entries (whose masses add up),
once and ascending.

Names as in `family_triton`; tau: probabilities of a teacher.
"""

import triton
import triton.language as tl

NO_ENTRY = tl.constexpr(2147483647)  # the id of a place without an entry


@triton.jit
def places_of(ids, list_ptr, count):
    """How many of a list's `count` ids, which ascend, are less than each of some ids: its place, if
    it is there."""
    place = tl.zeros_like(ids)
    step = 1
    while step < count:
        step *= 2
    while step > 0:
        last = tl.load(list_ptr + place + step - 1, mask=place + step <= count, other=NO_ENTRY)
        place = tl.where(last < ids, place + step, place)
        step //= 2
    return place


@triton.jit
def _stored(at, place, inside, ids):
    """Store ids at their places and return the one before each, -1 before the first."""
    tl.store(at + place, ids, mask=inside)
    tl.debug_barrier()  # all are stored
    before = tl.load(at + place - 1, mask=(place > 0) & inside, other=-1)
    tl.debug_barrier()  # all are read
    return before


@triton.jit
def _store_distinct(at, place, inside, ids):
    """Store the ids of one list that are less than NO_ENTRY once and ascending, and return how
    many."""
    size = tl.sum((ids < NO_ENTRY).to(tl.int32), axis=0)
    before = _stored(at, place, inside, ids)
    if tl.sum(((ids <= before) & (ids < NO_ENTRY)).to(tl.int32), axis=0) > 0:
        # in any order before: this one leaves most exchanges within a thread
        ids = tl.sort(ids)
        before = _stored(at, place, inside, ids)
        kept = ((ids != before) & (ids < NO_ENTRY)).to(tl.int32)
        distinct = tl.sum(kept, axis=0)
        if distinct < size:
            tl.store(at + tl.cumsum(kept, axis=0) - 1, ids, mask=kept != 0)
        size = tl.minimum(size, distinct)
    return size


@triton.jit
def _log_tau(ids, log_probs, live, size, place, n_ids, scale, RENORMALIZE: tl.constexpr):
    """log tau of the live entries of a row that are the first of their id, and which these are."""
    kept = live
    log_tau = tl.where(live, log_probs, float("-inf"))
    if size < tl.sum(live.to(tl.int32), axis=0):  # each is the sum of all with its id
        log_tau = tl.full(place.shape, -float("inf"), tl.float32)
        total = tl.zeros(place.shape, tl.float32)
        for k in range(0, n_ids):
            one = (place == k) & live
            same = live & (ids == tl.max(tl.where(one, ids, -1), axis=0))
            kept = kept & ~(same & (place > k))
            new = tl.where(
                same, tl.max(tl.where(one, log_probs, float("-inf")), axis=0), float("-inf")
            )
            peak = tl.maximum(log_tau, new)
            safe = tl.where(peak == float("-inf"), 0.0, peak)
            total = total * tl.exp(log_tau - safe) + tl.exp(new - safe)
            log_tau = peak
        log_tau = tl.where(kept, log_tau + tl.log(total), float("-inf"))
    log_tau *= scale
    if RENORMALIZE:
        peak = tl.max(log_tau, axis=0)
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        whole = tl.sum(tl.exp(log_tau - peak), axis=0)
        log_tau -= peak + tl.log(tl.where(whole == 0.0, 1.0, whole))
    return log_tau, kept


@triton.jit
def distinct_ids_kernel(
    # [all] or [T, K] int32 out: each id of a list once, ascending; behind a row's entries NO_ENTRY
    ids_out_ptr,
    # [T, 2] int64 out: bounds of sets, of no ids for a set with an id that is unknown
    spans_out_ptr,
    # [T, K] fp32 out, -inf where there is no entry, NaN for the only entry of a row with an unknown
    # id
    log_tau_ptr,
    ids_ptr,  # as those out, int32 or int64; entries have no spans, and sets no log-probs
    spans_ptr,
    log_probs_ptr,
    scale_ptr,  # [T] fp32 or None: then the number
    n_ids,
    vocab_size,
    scale,
    RENORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the list of one token, if it has at most BLOCK ids. Those that do not ascend are
    sorted."""
    row = tl.program_id(0).to(tl.int64)
    begin = row * n_ids
    count = n_ids
    if spans_ptr is not None:
        begin = tl.load(spans_ptr + 2 * row)
        count = tl.minimum(tl.load(spans_ptr + 2 * row + 1) - begin, BLOCK + 1).to(tl.int32)
    if count <= BLOCK:
        place = tl.arange(0, BLOCK)
        inside = place < count
        ids = tl.load(ids_ptr + begin + place, mask=inside, other=-1).to(tl.int64)
        ids = tl.minimum(tl.maximum(ids, -1), NO_ENTRY).to(tl.int32)
        live = ids >= 0
        unknown = ids >= vocab_size
        log_probs = 0.0
        if log_probs_ptr is not None:
            log_probs = tl.load(log_probs_ptr + begin + place, mask=inside, other=float("-inf")).to(
                tl.float32
            )
            live = live & (log_probs != float("-inf"))
            unknown = live & (unknown | (log_probs != log_probs) | (log_probs == float("inf")))
        bad = tl.max(unknown.to(tl.int32), axis=0)  # 1: none of them counts
        live = live.to(tl.int32) > bad
        ids = tl.where(live, ids, NO_ENTRY)
        at = ids_out_ptr + begin
        size = _store_distinct(at, place, inside, ids)
        if spans_ptr is not None:
            tl.store(spans_out_ptr + 2 * row, begin)
            tl.store(spans_out_ptr + 2 * row + 1, begin + size)
        if log_probs_ptr is not None:
            if scale_ptr is not None:
                scale = tl.load(scale_ptr + row)
            log_tau, kept = _log_tau(ids, log_probs, live, size, place, n_ids, scale, RENORMALIZE)
            tl.debug_barrier()  # the ids are stored
            log_tau_ptr += begin
            tl.store(log_tau_ptr + places_of(ids, at, size), log_tau, mask=kept)
            tl.store(at + place, tl.where(place < bad, 0, NO_ENTRY), mask=inside & (place >= size))
            none = tl.where(place < bad, float("nan"), float("-inf"))
            tl.store(log_tau_ptr + place, none, mask=inside & (place >= size))


@triton.jit
def _ids_at(ids_ptr, begin, place, count):
    """Ids of a set by their places, -1 where there is none."""
    ids = tl.load(ids_ptr + begin + place, mask=(place >= 0) & (place < count), other=-1).to(
        tl.int64
    )
    return tl.maximum(ids, -1)


@triton.jit
def _ones(bits):
    """Number of ones of each uint32."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return (((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _in_order(ids_out_ptr, ids_ptr, seen_ptr, begin, count, words, BLOCK: tl.constexpr):
    """Write each id of a set once and ascending, and return how many; seen: a bit per id, all 0
    before and after."""
    lanes = tl.arange(0, BLOCK)
    for k in range(0, count, BLOCK):
        ids = _ids_at(ids_ptr, begin, k + lanes, count).to(tl.int32)
        bit = tl.full([BLOCK], 1, tl.int32) << (ids & 31)
        # the barrier orders them
        tl.atomic_or(seen_ptr + ids // 32, bit, mask=ids >= 0, sem="relaxed")
    tl.debug_barrier()  # all are marked
    written = 0
    for first in range(0, words, BLOCK):
        word = first + lanes
        bits = tl.load(seen_ptr + word, mask=word < words, other=0, cache_modifier=".cg").to(
            tl.uint32, bitcast=True
        )
        tl.store(seen_ptr + word, tl.zeros([BLOCK], tl.int32), mask=bits != 0)
        ones = _ones(bits).to(tl.int32)
        place = begin + written + tl.cumsum(ones, axis=0) - ones
        written += tl.sum(ones, axis=0)
        for _ in range(tl.max(ones, axis=0)):
            others = bits & (bits - 1)  # all but the lowest
            column = _ones((bits ^ others) - 1).to(tl.int32)
            tl.store(ids_out_ptr + place, 32 * word + column, mask=bits != 0)
            place += 1
            bits = others
    tl.debug_barrier()  # what is 0 again, before the next set marks
    return written


@triton.jit(do_not_specialize=["n_rows"])
def sets_kernel(
    ids_out_ptr,  # [all] int32 out: each id of a set once, ascending
    spans_out_ptr,  # [T, 2] int64 out: their bounds, of no ids for a set with an id that is unknown
    ids_ptr,  # [all] int32 or int64
    spans_ptr,  # [T, 2] int64
    seen_ptr,  # [programs, words] int32, all 0: a bit for each id
    n_rows,
    vocab_size,
    SMALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: sets of more than SMALL ids of some tokens. Ids that do not ascend are marked
    and listed."""
    lanes = tl.arange(0, BLOCK)
    words = vocab_size // 32 + 1
    seen_ptr += tl.program_id(0).to(tl.int64) * words
    for first in range(0, n_rows, tl.num_programs(0)):
        row = (first + tl.program_id(0)).to(tl.int64)
        here = row < n_rows
        begin = tl.load(spans_ptr + 2 * row, mask=here, other=0)
        count = (tl.load(spans_ptr + 2 * row + 1, mask=here, other=0) - begin).to(tl.int32)
        here = count > SMALL
        count = tl.where(here, count, 0)
        unknown = tl.zeros([BLOCK], tl.int32)
        unordered = tl.zeros([BLOCK], tl.int32)
        found = tl.zeros([BLOCK], tl.int32)
        for k in range(0, count, BLOCK):
            place = k + lanes
            ids = _ids_at(ids_ptr, begin, place, count)
            before = _ids_at(ids_ptr, begin, place - 1, count)
            unknown += (ids >= vocab_size).to(tl.int32)
            unordered += ((ids >= 0) & (place > 0) & ((ids <= before) | (before < 0))).to(tl.int32)
            found += (ids >= 0).to(tl.int32)
            tl.store(ids_out_ptr + begin + place, ids.to(tl.int32), mask=ids >= 0)
        size = tl.sum(found, axis=0)
        if tl.sum(unknown, axis=0) > 0:
            size = 0
        elif tl.sum(unordered, axis=0) > 0:
            tl.debug_barrier()  # after the stores above
            size = _in_order(ids_out_ptr, ids_ptr, seen_ptr, begin, count, words, BLOCK)
        tl.store(spans_out_ptr + 2 * row, begin, mask=here)
        tl.store(spans_out_ptr + 2 * row + 1, begin + size, mask=here)
