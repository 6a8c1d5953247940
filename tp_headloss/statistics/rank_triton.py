"""The kernel of the label's rank: it counts ids, once the label's logit is known."""

import triton
import triton.language as tl

from .family_triton import (
    Merge,
    load_logits,
    no_merge,
    no_peak,
    nothing_added,
    nothing_folded,
    open_chunk_again,
    write,
)
from .numerics_triton import settle


@triton.jit
def _comes_before(z, z_label, columns, label):
    """Which columns of a chunk come before the label, or are it."""
    return (z > z_label) | ((z == z_label) & (columns < label)) | (columns == label)


@triton.jit(do_not_specialize=["n_rows", "start", "valid_width", "chunks"])
def rank_kernel(
    packets_ptr,  # [chunks, K, T] fp32 out
    inputs,  # Inputs
    merged_ptr,  # [R, T] fp32
    merged,  # numbers of merged rows by name
    rows,  # numbers of the packets' rows by name
    n_rows, start, valid_width, chunks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the ids of one chunk that come before the label of one row, and the label."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    index = tl.program_id(0) % chunks
    n = n_rows.to(tl.int64)
    chunk = open_chunk_again(inputs, merged_ptr, merged, row, index, n_rows, start, valid_width)
    z_label = tl.load(merged_ptr + merged.rank_target * n + row)
    label = tl.load(inputs.labels + row).to(tl.int64) - start - chunk.first
    label = tl.minimum(tl.maximum(label, -1), inputs.chunk_size).to(tl.int32)  # or a column outside of the chunk
    count = tl.zeros([BLOCK], tl.int32)
    whole = chunk.size // BLOCK * BLOCK
    for o in tl.range(0, whole, BLOCK, num_stages=4):
        inside = o + tl.arange(0, BLOCK)
        z = load_logits(inputs, chunk, chunk.first + inside, None)
        count += _comes_before(z, z_label, inside, label).to(tl.int32)
    if whole < chunk.size:
        inside = whole + tl.arange(0, BLOCK)
        z = load_logits(inputs, chunk, chunk.first + inside, inside < chunk.size)
        count += ((inside < chunk.size) & _comes_before(z, z_label, inside, label)).to(tl.int32)
    out = packets_ptr + index.to(tl.int64) * rows.height * n + row
    tl.store(out + rows.rank * n, tl.sum(count, axis=0).to(tl.float32))
    tl.store(out + rows.rank_mean * n, 0.0)


@triton.jit
def finish(state, joined, out, inputs, rows):
    write(out.merged, joined, rows.merged.rank_target, settle(joined.target, joined.bad, joined.ignored))


STATISTICS = GRADIENT = None
MERGE = Merge(no_merge, no_peak, nothing_added, nothing_folded, finish)
