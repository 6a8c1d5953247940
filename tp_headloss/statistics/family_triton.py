"""The contract of a family's device functions, and what they share; `family` is their definition.

A family's module has up to three tuples of functions, which carriers call in the order of the
families:

* STATISTICS, for streaming logits: `start` a state, `rescale` it when the maximum moves, `add` a
  tile, `store` rows.
* MERGE, of packets: `start` a state, take a packet's `peak` (families with a maximum of their own),
  `add` its rows; then `fold` the state into one packet again, or `finish`: join the target, and
  store merged rows and values.
* GRADIENT: `load` per-token numbers, add to p's `coefficient` off the target, to that `at_target`,
  or `direct`ly.

A hook that a family does not need is one of the neutral ones below, which return their accumulator:
they cost nothing. Contributions are elementwise, so a tile may have any shape. Names: x raw logit,
z transformed logit, v the same without the target, m maximum, a the student's scale where it meets
a teacher, T tokens.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .numerics_triton import settle, tanh_and_slope, widen
from .records_triton import Chunk


class Statistics(NamedTuple):
    """Hooks for the kernel that streams logits."""

    start: object  # (zeros, chunk, inputs) -> state; zeros: fp32, of a tile's shape
    rescale: object  # (state, move, chunk, inputs, rows) -> state
    add: object  # (state, tile, softmax, chunk, inputs, rows) -> state
    store: object  # (out, n, state, core, chunk, inputs, rows)


class Merge(NamedTuple):
    """Hooks for the merge."""

    start: object  # (BLOCK) -> state
    peak: object  # (state, packet, rows) -> state
    add: object  # (state, packet, softmax, rows) -> state
    fold: object  # (state, packet, rows)
    finish: object  # (state, joined, out, inputs, rows)


@triton.jit
def one_lane_sum(zeros, chunk, inputs):
    """Start the lane sums of one row."""
    return (zeros,)


@triton.jit
def not_rescaled(state, move, chunk, inputs, rows):
    return state


@triton.jit
def one_sum(BLOCK: tl.constexpr):
    """Start the merged sums of one row."""
    return (tl.zeros([BLOCK], tl.float64),)


@triton.jit
def no_peak(state, packet, rows):
    return state


@triton.jit
def nothing_folded(state, packet, rows):
    """Fold nothing, for families whose packets are never made from partial ones."""


@triton.jit
def nothing_loaded(grads, token, inputs, rows):
    return (0,)


@triton.jit
def same_coefficient(away, state, shifted, p, token):
    return away


@triton.jit
def same_at_target(common, state, offset, token):
    return common


@triton.jit
def same_gradient(dz, state, tile, token, grads, inputs, rows):
    return dz


class Gradient(NamedTuple):
    """Hooks for the gradient."""

    # (grads, token, inputs, rows) -> state; grads: upstream gradients by name, see `upstream`
    load: object
    # (away, state, shifted, p, token) -> away, already divided by S
    coefficient: object = same_coefficient
    at_target: object = same_at_target  # (common, state, offset, token) -> common
    direct: object = same_gradient  # (dz, state, tile, token, grads, inputs, rows) -> dz


@triton.jit
def loss_of_row(loss, row):
    """Gradient of the reduced loss for a statistic of a row whose coefficient is 1, in float64; 0
    without a loss."""
    factor = 0.0
    if loss.upstream is not None:
        factor = tl.load(loss.upstream) * tl.load(loss.inverse)
        if loss.weight is not None:
            weight = tl.load(loss.weight + row)
            # 0 for a weight of 0, whatever the factor is
            factor = tl.where(weight == 0.0, 0.0, factor * weight)
    return factor


@triton.jit
def upstream(grad, token):
    """A token's upstream gradient of a statistic: 0 for None, from memory [T], or from the loss by
    its coefficient (c,) or, where the loss has the square of the value [T], by (c, value)."""
    g = 0.0
    if grad is not None:
        if isinstance(grad, tl.tensor):
            g = tl.load(grad + token.row)
        else:
            g = token.loss * grad[0]
            if len(grad) == 2:  # 0 for a loss of no weight, whatever the value is
                g = tl.where(g == 0.0, g, g * (2.0 * tl.load(grad[1] + token.row)))
            g = g.to(tl.float32)
    return g


@triton.jit
def row_factors(inputs, row):
    """The factors before and after the softcap, with the token's temperature in the one that it
    scales."""
    pre = 1.0
    post = 1.0
    if inputs.pre is not None:
        pre = inputs.pre
    if inputs.post is not None:
        post = inputs.post
    if inputs.temperature is not None:
        inverse = 1.0 / tl.load(inputs.temperature + row)
        if inputs.post is not None:
            post = post * inverse
        else:
            pre = pre * inverse
    return pre, post


@triton.jit
def teacher_scales(inputs, row, n_rows):
    """Factors of the teacher's and of the student's logits where they meet."""
    teacher = 1.0
    student = 1.0
    if inputs.student_scale is not None:
        teacher = inputs.teacher_scale
        student = inputs.student_scale
        if inputs.scales is not None:
            teacher = tl.load(inputs.scales + row)
            student = tl.load(inputs.scales + n_rows.to(tl.int64) + row)
    return teacher, student


@triton.jit
def transform(x, columns, inputs, pre, post):
    """z and dz/dx of raw logits in fp32."""
    if inputs.bias is not None:
        x += tl.load(inputs.bias + columns, mask=columns < inputs.width, other=0.0).to(tl.float32)
    if inputs.post is not None:
        bounded, slope = tanh_and_slope(x * pre)
        z = bounded * post
        slope = slope * (pre * post)
    else:
        z = x * pre if inputs.pre is not None else x
        slope = pre
    return z, slope


@triton.jit
def columns_of_row(inputs, row, first, size, n_rows, start, target, owned, ignored):
    """Some columns of a row, or of rows [ROWS, 1], with the factors of their tokens."""
    pre, post = row_factors(inputs, row)
    teacher_scale, student_scale = teacher_scales(inputs, row, n_rows)
    return Chunk(
        row, first, size, start, target, owned, ignored, pre, post, teacher_scale, student_scale
    )


@triton.jit
def size_of_chunk(inputs, first, valid_width):
    """Valid columns of the chunk that begins at a column."""
    return tl.maximum(tl.minimum(inputs.chunk_size, valid_width - first), 0)


@triton.jit
def find_label(inputs, row, first, begin, end, start, ignore_index):
    """Column of the label relative to the first one of a chunk if it is one of begin .. end - 1, or
    -1; whether it is; and whether the token is ignored."""
    target = -1
    owned = False
    ignored = False
    if inputs.labels is not None:
        y = tl.load(inputs.labels + row).to(tl.int64)
        ignored = y == ignore_index
        target = y - start - first
        owned = (target >= begin) & (target < tl.where(ignored, 0, end))
        target = tl.where(owned, target, -1).to(tl.int32)
    return target, owned, ignored


@triton.jit
def open_chunk(inputs, row, index, n_rows, start, valid_width, ignore_index):
    """Chunk number `index` of a row."""
    first = index * inputs.chunk_size
    size = size_of_chunk(inputs, first, valid_width)
    target, owned, ignored = find_label(inputs, row, first, 0, size, start, ignore_index)
    size = tl.where(ignored, 0, size)
    return columns_of_row(inputs, row, first, size, n_rows, start, target, owned, ignored)


@triton.jit
def open_second(packets_ptr, inputs, merged_ptr, merged, rows, n_rows, start, valid_width, chunks):
    """The chunk of this program in the second exchange, where the merged sum says whether the row
    is ignored; pointers to its packet and to its token's first merged row, and elements between
    rows."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    index = tl.program_id(0) % chunks
    n = n_rows.to(tl.int64)
    first = index * inputs.chunk_size
    ignored = tl.load(merged_ptr + merged.sum * n + row) == 0.0
    size = tl.where(ignored, 0, size_of_chunk(inputs, first, valid_width))
    chunk = columns_of_row(inputs, row, first, size, n_rows, start, -1, False, ignored)
    out = packets_ptr + index.to(tl.int64) * rows.height * n + row
    return chunk, out, merged_ptr + row, n


@triton.jit
def load_logits(inputs, chunk, columns, mask):
    """z of some columns of a row, unselected."""
    at = inputs.x + chunk.row * inputs.x_row + columns.to(tl.int64) * inputs.x_column
    if mask is not None:
        x = tl.load(at, mask=mask, other=0.0)
    else:
        x = tl.load(at)
    z, _ = transform(widen(x), columns, inputs, chunk.pre, chunk.post)
    return z


@triton.jit
def load_teacher(inputs, chunk, columns, mask):
    """The teacher's scaled logits at some columns of a row, unselected."""
    at = (
        inputs.teacher
        + chunk.row * inputs.teacher_row
        + columns.to(tl.int64) * inputs.teacher_column
    )
    if mask is not None:
        u = widen(tl.load(at, mask=mask, other=0.0))
    else:
        u = widen(tl.load(at))
    return u * chunk.teacher_scale if inputs.student_scale is not None else u


@triton.jit
def read(packet, row, other: tl.constexpr):
    """One row of a packet."""
    return tl.load(packet.at + row * packet.n, mask=packet.here, other=other)


@triton.jit
def put(packet, row, value):
    """Store one row of a packet, rounded to fp32; no row, nothing."""
    if row is not None:
        tl.store(packet.at + row * packet.n, value.to(tl.float32), mask=packet.here)


@triton.jit
def write(pointer, joined, row, value):
    """Store one row of BLOCK tokens."""
    tl.store(pointer + row * joined.n + joined.token, value, mask=joined.here)


@triton.jit
def report(pointer, joined, row, value, bad):
    """Store one row of BLOCK tokens in fp32, 0 where ignored and NaN where bad; no row, nothing."""
    if row is not None:
        write(pointer, joined, row, settle(value, bad, joined.ignored))
