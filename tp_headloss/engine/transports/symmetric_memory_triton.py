"""Device functions of the transport "symm_mem": which slot a kernel writes, and where it reads its
peers' packets."""

from typing import NamedTuple

import triton
import triton.language as tl


class SharedMemory(NamedTuple):
    """Memory that a merge reads packets from, see `engine.transports.symmetric_memory`; all None:
    the packets' own."""

    turns: object = None  # [2] int32
    slot: object = None  # elements of a slot
    peers: object = None  # [P] int64 addresses of every rank's packets


NOT_SHARED = SharedMemory()


def shared_memory(memory) -> SharedMemory:
    """Return a transport's memory as kernels take it. memory: `SymmetricMemory`, or None for the
    packets' own."""
    return NOT_SHARED if memory is None else SharedMemory(memory.turns, memory.slot, memory.peers)


@triton.jit
def slot_to_write(packets_ptr, memory):
    """Return the beginning of this turn's slot. The first program notes the turn for those who
    read."""
    if memory.turns is not None:
        turn = tl.load(memory.turns)
        packets_ptr += (turn & 1).to(tl.int64) * memory.slot
        if tl.program_id(0) == 0:
            tl.store(memory.turns + 1, turn)
    return packets_ptr


@triton.jit
def packet_pointer(packets_ptr, memory, turn, k, size, CHUNKS: tl.constexpr):
    """Return where packet k of the group begins: among gathered ones, or in the memory of the rank
    that wrote it."""
    if memory.peers is None:
        at = packets_ptr + k * size
    else:
        offset = (turn & 1).to(tl.int64) * memory.slot
        at = tl.load(memory.peers + k // CHUNKS).to(tl.pointer_type(tl.float32)) + (
            offset + k % CHUNKS * size
        )
    return at


@triton.jit
def turn_to_read(memory):
    """The turn whose packets are merged."""
    turn = 0
    if memory.turns is not None:
        turn = tl.load(memory.turns + 1)
    return turn


@triton.jit
def end_turn(memory, turn):
    """Let the next exchange take the other slot; last, because a store ends the reuse of what was
    loaded."""
    if memory.turns is not None:  # noqa: SIM102 (the first is decided when the kernel is compiled)
        if tl.program_id(0) == 0:
            tl.store(memory.turns, turn + 1)
