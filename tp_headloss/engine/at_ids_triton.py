"""The kernels of the log-probs of given ids.

Names as in `family_triton`; K ids for each token, in any order and more than once.
"""

import triton
import triton.language as tl

from ..statistics.family_triton import row_factors, transform
from ..statistics.numerics_triton import widen
from .transports.symmetric_memory_triton import packet_pointer, slot_to_write, turn_to_read

# of a tile, whose rows are read along the ids and written along the tokens
TOKENS = tl.constexpr(32)
UNKNOWN = tl.constexpr(2**31 - 1)


@triton.jit
def _tile(ids_ptr, n_rows, n_ids, BLOCK: tl.constexpr):
    """The rows [TOKENS, 1] and places [1, BLOCK] of this program, which of them exist, and their
    ids."""
    tiles = tl.cdiv(n_ids, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    place = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = (row < n_rows) & (place < n_ids)
    return row, place, live, tl.load(ids_ptr + row * n_ids + place, mask=live, other=-1)


@triton.jit(do_not_specialize=["n_rows", "start", "valid_width", "chunks", "ignore_index"])
def at_ids_statistics_kernel(
    packets_ptr,  # [chunks, K, T] fp32 out: the ids' rows, the last ones
    inputs,  # Inputs
    memory,  # SharedMemory
    rows,  # numbers of the packets' rows by name
    n_rows,
    start,
    valid_width,
    chunks,
    ignore_index,
    BLOCK: tl.constexpr,
):
    """One program: some ids of some tokens in all chunks."""
    row, place, live, ids = _tile(inputs.ids, n_rows, inputs.n_ids, BLOCK)
    n = n_rows.to(tl.int64)
    columns = ids - start
    here = live & (ids >= 0) & (columns >= 0) & (columns < valid_width)
    if inputs.labels is not None:
        labels = tl.load(inputs.labels + row, mask=row < n, other=ignore_index).to(tl.int64)
        here = here & (labels != ignore_index)
    safe = tl.where(row < n, row, 0)
    pre, post = row_factors(inputs, safe)
    x = tl.load(
        inputs.x + row * inputs.x_row + columns.to(tl.int64) * inputs.x_column, mask=here, other=0.0
    )
    z, _ = transform(widen(x), tl.where(here, columns, inputs.width), inputs, pre, post)
    at = slot_to_write(packets_ptr, memory) + (rows.height - rows.ids + place) * n + row
    for chunk in range(0, chunks):
        owned = here & (columns // inputs.chunk_size == chunk)
        tl.store(at + chunk * (rows.height * n), tl.where(owned, z, 0.0), mask=live)


@triton.jit(do_not_specialize=["n_rows"])
def at_ids_merge_kernel(
    out_ptr,  # [T, K] fp32 out
    packets_ptr,  # [packets, K, T] fp32
    inputs,  # Inputs: the ids
    memory,  # SharedMemory
    merged_ptr,  # [R, T] fp32
    merged,  # numbers of merged rows by name
    rows,  # numbers of the packets' rows by name
    n_rows,
    PACKETS: tl.constexpr,
    CHUNKS: tl.constexpr,  # of the group, of a rank
    BLOCK: tl.constexpr,
):
    """One program: the log-probs of some ids of some tokens."""
    row, place, live, ids = _tile(inputs.ids, n_rows, rows.ids, BLOCK)
    n = n_rows.to(tl.int64)
    turn = turn_to_read(memory)
    z = tl.zeros([TOKENS, BLOCK], tl.float32)
    for k in range(0, PACKETS):
        packet = packet_pointer(packets_ptr, memory, turn, k, rows.height * n, CHUNKS)
        z += tl.load(packet + (rows.height - rows.ids + place) * n + row, mask=live, other=0.0)
    shift = tl.load(merged_ptr + merged.shift * n + row, mask=row < n, other=0.0)
    whole = tl.load(merged_ptr + merged.sum * n + row, mask=row < n, other=1.0)
    log_probs = z.to(tl.float64) - shift.to(tl.float64) - tl.log(whole.to(tl.float64))
    log_probs = tl.where(log_probs > 0.0, 0.0, log_probs)
    log_probs = tl.where(ids == UNKNOWN, float("nan"), log_probs)
    log_probs = tl.where((ids < 0) | (whole == 0.0), 0.0, log_probs)
    tl.store(out_ptr + row * rows.ids + place, log_probs.to(tl.float32), mask=live)


@triton.jit(do_not_specialize=["n_rows"])
def at_ids_sums_kernel(
    # [T, K] fp32 out: at each id, the sum of the upstream gradients of all ids of the token that
    # equal it
    out_ptr,
    upstream_ptr,  # [T, K] fp32
    ids_ptr,  # [T, K] int32
    n_rows,
    IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: some ids of some tokens."""
    row, place, live, ids = _tile(ids_ptr, n_rows, IDS, BLOCK)
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for k in range(0, IDS):
        other = tl.load(ids_ptr + row * IDS + k, mask=row < n_rows, other=-1)
        g = tl.load(upstream_ptr + row * IDS + k, mask=row < n_rows, other=0.0)
        total += tl.where(ids == other, g, 0.0)
    tl.store(out_ptr + row * IDS + place, total, mask=live)
