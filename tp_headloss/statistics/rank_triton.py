"""Device functions of the label's rank: they count the ids ahead of the label.

The state: counts, the label's logit, and how many columns of the chunk come before the label.
"""

import triton
import triton.language as tl

from .family_triton import (
    Merge,
    Statistics,
    no_peak,
    not_rescaled,
    nothing_folded,
    one_sum,
    read,
    report,
)

# Adjacent columns with one count in fp32, which holds it exactly, between them: a thread adds them
# up. An H200, 8192 x 128256, microseconds of the forward with rank: 8 522; all columns 548, with an
# integer 578; without rank 487
# without rank 487
SHARED = tl.constexpr(8)


@triton.jit
def _next_larger(x):
    """The next larger fp32 number; NaN for infinity."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits - 1, bits + 1).to(tl.float32, bitcast=True)


@triton.jit
def start(zeros, chunk, inputs):
    counts = tl.zeros([zeros.shape[0] // SHARED], tl.float32)
    label = tl.load(inputs.labels + chunk.row).to(tl.int64) - chunk.start - chunk.first
    label = tl.minimum(tl.maximum(label, 0), chunk.size).to(tl.int32)
    # without the sign of -0, whose next larger number has other bits
    return counts, tl.load(inputs.label_logits + chunk.row) + 0.0, label


@triton.jit
def add(state, tile, softmax, chunk, inputs, rows):
    z_label = state[1]
    label = state[2]
    if tile.partial:
        inside = tile.columns - chunk.first
        tied = (tile.z == z_label) & (inside < label)
        ahead = (tile.z > z_label) | tied
    else:  # all of it comes before the label or after it, so that one comparison does
        ahead = tile.z >= tl.where(tile.offset < label, z_label, _next_larger(z_label))
    counts = tl.sum(tl.reshape(ahead.to(tl.float32), [tile.z.shape[0] // SHARED, SHARED]), axis=1)
    return state[0] + counts, z_label, label


@triton.jit
def store(out, n, state, core, chunk, inputs, rows):
    tl.store(out + rows.ahead * n, tl.sum(state[0], axis=0))


@triton.jit
def add_packet(state, packet, softmax, rows):
    return (state[0] + read(packet, rows.ahead, 0.0).to(tl.float64),)


@triton.jit
def finish(state, joined, out, inputs, rows):
    report(out.value, joined, rows.value.rank, state[0] + 1.0, joined.bad)


STATISTICS = Statistics(start, not_rescaled, add, store)
MERGE = Merge(one_sum, no_peak, add_packet, nothing_folded, finish)
GRADIENT = None
