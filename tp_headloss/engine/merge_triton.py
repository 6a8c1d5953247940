"""The merge of packets for any tuple of families, a launch of its own or the end of one that writes
all packets; and that of the second exchange, for statistics that are known only then."""

import triton
import triton.language as tl

from ..statistics import softmax_triton as softmax
from ..statistics.family_triton import read
from ..statistics.numerics_triton import settle
from ..statistics.records_triton import Packet
from .transports.symmetric_memory_triton import end_turn, packet_pointer, turn_to_read


@triton.jit
def peaks(families, states, packet, rows):
    after = ()
    for i in tl.static_range(len(families)):
        after += (families[i].peak(states[i], packet, rows),)
    return after


@triton.jit
def add_packet(families, states, packet, terms, rows):
    added = ()
    for i in tl.static_range(len(families)):
        added += (families[i].add(states[i], packet, terms, rows),)
    return added


@triton.jit
def merge_tokens(
    out,
    packets_ptr,
    inputs,
    memory,
    families,
    rows,
    n_rows,
    group,
    PACKETS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge all packets of a group of BLOCK tokens in chunk order, in float64, and the target
    column."""
    # Packets that are read at once: more spill registers, and more than 8 compile for minutes.
    WIDE: tl.constexpr = PACKETS * (rows.packet.height - rows.packet.ids) > 96
    STEP: tl.constexpr = (4 if PACKETS == 8 else 1) if WIDE or PACKETS > 8 else PACKETS
    n = n_rows.to(tl.int64)
    token = group.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = token < n
    turn = turn_to_read(memory)
    size = rows.packet.height * n
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    core = softmax.start_merge(BLOCK)
    states = ()
    for i in tl.static_range(len(families)):
        states += (families[i].start(BLOCK),)
    for first in range(0, PACKETS, STEP):
        for k in tl.static_range(STEP):
            packet = Packet(
                packet_pointer(packets_ptr, memory, turn, first + k, size, CHUNKS) + token, n, here
            )
            peak = tl.maximum(peak, read(packet, rows.packet.max, 0.0))
            states = peaks(families, states, packet, rows.packet)
    scale = 1.0
    if inputs.student_scale is not None:
        scale = inputs.student_scale
        if inputs.scales is not None:
            scale = tl.load(inputs.scales + n + token, mask=here, other=1.0)
    for first in range(0, PACKETS, STEP):
        for k in tl.static_range(STEP):
            packet = Packet(
                packet_pointer(packets_ptr, memory, turn, first + k, size, CHUNKS) + token, n, here
            )
            terms = softmax.packet_softmax(packet, peak, scale, rows.packet)
            core = softmax.add_packet(core, packet, terms, rows.packet)
            states = add_packet(families, states, packet, terms, rows.packet)
    if rows.packet.owner is not None:
        joined = softmax.with_target(core, peak, scale, token, here, n, rows.packet, PACKETS)
    else:
        joined = softmax.without_target(core, peak, scale, token, here, n, rows.packet)
    softmax.finish(core, joined, out, rows)
    for i in tl.static_range(len(families)):
        families[i].finish(states[i], joined, out, inputs, rows)
    end_turn(memory, turn)


@triton.jit(do_not_specialize=["n_rows"])
def second_merge_kernel(
    out,  # Outputs: the last S rows of its merged rows [R, T] and values [K, T] are written
    packets_ptr,  # [packets, 2 S, T] fp32
    n_rows,
    SUM: tl.constexpr,  # number of the merged row of that name
    MERGED: tl.constexpr,
    VALUES: tl.constexpr,  # R - S, K - S
    STATISTICS: tl.constexpr,
    PACKETS: tl.constexpr,
    BLOCK: tl.constexpr,  # S
):
    """One program: the merge of the second exchange's packets of BLOCK tokens, in their order and
    in float64."""
    STEP: tl.constexpr = 8 if PACKETS % 8 == 0 else 1  # packets that are read at once
    n = n_rows.to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = token < n
    whole = tl.load(out.merged + SUM * n + token, mask=here, other=1.0)
    for i in tl.static_range(STATISTICS):
        value = tl.zeros([BLOCK], tl.float64)
        mean = tl.zeros([BLOCK], tl.float64)
        for first in range(0, PACKETS, STEP):
            for k in tl.static_range(STEP):
                at = packets_ptr + ((first + k) * STATISTICS + i) * 2 * n + token
                value += tl.load(at, mask=here, other=0.0).to(tl.float64)
                mean += tl.load(at + n, mask=here, other=0.0).to(tl.float64)
        value = tl.where(value < 0.0, 0.0, value)  # NaN stays
        bad = whole != whole
        tl.store(out.value + (VALUES + i) * n + token, settle(value, bad, False), mask=here)
        tl.store(out.merged + (MERGED + i) * n + token, settle(mean, bad, False), mask=here)
