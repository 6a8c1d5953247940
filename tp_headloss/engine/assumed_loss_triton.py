"""Kernel that stores the upstream gradient and divisor for which `rows_triton` writes a gradient before its loss."""

import triton
import triton.language as tl

from .sums_triton import divisor_of

ASSUMED_UPSTREAM, ROWS_DONE = tl.constexpr(1), tl.constexpr(2)  # places in what `assume_kernel` writes


@triton.jit
def rows_done(assumed_ptr):
    """Pointer to the numbers of rows that are done in each group, which are behind `assume_kernel`'s two others."""
    return (assumed_ptr + ROWS_DONE).to(tl.pointer_type(tl.int32))


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def assume_kernel(
    # fp64 out: the factor of the loss's gradient, as in `loss_of_row`; the upstream gradient that it is for; and 0 rows
    # of each group that are done, int32
    assumed_ptr,
    upstream_ptr,  # [] fp32: upstream gradient of the loss that is assumed
    labels_ptr,  # [T]
    weight_ptr,  # [T] fp32 or None
    denominator_ptr,  # [] fp64 or None: then `denominator`, or the count
    denominator, n_rows, ignore_index,
    BY_COUNT: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The only program: what a gradient is written for before its loss is known, see `rows_triton`."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.zeros([BLOCK], tl.float64)
    for first in range(0, n_rows, BLOCK):
        group = first // GROUP + tl.arange(0, BLOCK // GROUP)
        tl.store(rows_done(assumed_ptr) + group, 0, mask=group * GROUP < n_rows)
        if BY_COUNT:
            token = first + tl.arange(0, BLOCK)
            y = tl.load(labels_ptr + token, mask=token < n_rows, other=0).to(tl.int64)
            valid = (token < n_rows) & (y != ignore_index)
            if weight_ptr is not None:
                count += tl.load(weight_ptr + token, mask=valid, other=0.0)
            else:
                count += valid.to(tl.float64)
    upstream = tl.load(upstream_ptr)
    divisor = divisor_of(denominator_ptr, tl.sum(count, axis=0) if BY_COUNT else denominator)
    tl.store(assumed_ptr, upstream * (1.0 / divisor))
    tl.store(assumed_ptr + ASSUMED_UPSTREAM, upstream.to(tl.float64))
