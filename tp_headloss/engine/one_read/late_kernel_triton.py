"""The kernel of the backward of one read: it completes the gradient, and learns which upstream
gradient comes."""

import triton
import triton.language as tl

from ..kernels import COLUMNS, gradient_part

# so often in a row an upstream gradient must come to be foreseen, at most
MOST = tl.constexpr(1023)


@triton.jit
def _foresee(forecast_ptr, given, is_written, is_missed):
    """Learn from the upstream gradient that came: see `one_read.kernel.Memory`."""
    bits = given.to(tl.int32, bitcast=True) ^ 0x3F800000
    same = tl.load(forecast_ptr) == bits
    streak, patience = tl.load(forecast_ptr + 1), tl.load(forecast_ptr + 2)
    grown, shrunk = tl.minimum(2 * patience + 1, MOST), tl.maximum(patience - 1, 0)
    tl.store(forecast_ptr, bits)
    tl.store(forecast_ptr + 1, tl.where(same, tl.minimum(streak + 1, MOST), 1))
    tl.store(forecast_ptr + 2, tl.where(is_missed, grown, tl.where(is_written, shrunk, patience)))


@triton.jit(do_not_specialize=["n_rows", "start", "valid_width"])
def late_gradient_kernel(
    dx_ptr,
    dx_row,
    dx_column,  # [T, width] in and out
    inputs,
    merged_ptr,
    grads,  # as in `gradient_kernel`
    # LossGradient, whose `inverse` [2] has the upstream gradient that dx was written for, NaN: for
    # none
    loss,
    exact,  # as in `gradient_kernel`
    layout,  # families and rows, as there
    forecast_ptr,  # [4] int32 in and out, a record of `one_read.kernel.Memory`
    n_rows,
    start,
    valid_width,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient, unless the forward has written it for the upstream gradient that came.

    A few programs take all parts in turn, the last one first: programs that find nothing to do take
    time as well.
    """
    given, foreseen = tl.load(loss.upstream), tl.load(loss.inverse + 1).to(tl.float32)
    is_something = foreseen == foreseen
    same_bits = given.to(tl.int32, bitcast=True) == foreseen.to(tl.int32, bitcast=True)
    is_written = is_something & same_bits
    if tl.program_id(0) == 0:
        _foresee(forecast_ptr, given, is_written, is_something & (same_bits == 0))
    PLAIN: tl.constexpr = exact.ids is None and exact.sets is None and exact.entries is None
    STEP: tl.constexpr = BLOCK if PLAIN else COLUMNS
    parts = tl.where(is_written, 0, n_rows * tl.cdiv(inputs.width, STEP))
    for program in range(tl.program_id(0), parts, tl.num_programs(0)):
        gradient_part(
            parts - 1 - program,
            dx_ptr,
            dx_row,
            dx_column,
            inputs,
            merged_ptr,
            grads,
            loss,
            exact,
            layout[0],
            layout[1],
            n_rows,
            start,
            valid_width,
            STEP,
            PADDED,
            BLOCK,
        )
