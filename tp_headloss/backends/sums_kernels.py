"""The Triton kernels of the reduction over tokens: masks, weights, sums, and their gradient; see `reduce`."""

import triton
import triton.language as tl


@triton.jit
def _sign(i: tl.constexpr, NEGATIVES: tl.constexpr):
    return 1.0 - 2.0 * ((NEGATIVES >> i) & 1)


@triton.jit(do_not_specialize=["value_ptrs", "valid_ptr", "weight_ptr", "n_rows"])
def sums_kernel(
    sums_ptr,  # [S + 1] fp32 out: a sum over valid tokens per value, and the count
    divisor_ptr,  # [] fp64 out: what the loss was divided by
    loss_ptr,  # [] fp32 out: the sum of c_i sums_i over the divisor
    value_ptrs,  # S per-token values [T], fp32 or bool
    valid_ptr,  # [T] bool
    weight_ptr,  # [T] fp32 token weights or None
    denominator_ptr,  # [] fp64 or None: then `denominator`, or the count
    coefficients,  # floats c_i of the first values
    denominator, n_rows,
    SQUARES: tl.constexpr, NEGATIVES: tl.constexpr,  # bits: which values are squared, which sums negated
    BY_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The only program: sums over all tokens, in float64 and one order, each rounded once."""
    n = n_rows.to(tl.int64)
    count = tl.zeros([BLOCK], tl.float64)
    totals = ()
    for _ in tl.static_range(len(value_ptrs)):
        totals += (tl.zeros([BLOCK], tl.float64),)
    for first in range(0, n, BLOCK):
        token = first + tl.arange(0, BLOCK)
        valid = tl.load(valid_ptr + token, mask=token < n, other=0) != 0
        weight = valid.to(tl.float64)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + token, mask=valid, other=0.0).to(tl.float64)
            valid = valid & (weight != 0.0)  # a loss mask, whatever the values are
        count += weight
        grown = ()
        for i in tl.static_range(len(value_ptrs)):
            value = tl.load(value_ptrs[i] + token, mask=valid, other=0).to(tl.float64)
            if (SQUARES >> i) & 1:
                value *= value
            grown += (tl.fma(value, weight, totals[i]),)
        totals = grown

    loss = 0.0
    for i in tl.static_range(len(value_ptrs)):
        total = tl.sum(totals[i], axis=0) * _sign(i, NEGATIVES)
        tl.store(sums_ptr + i, total)
        if i < len(coefficients):  # the others are metrics
            loss += coefficients[i] * total
    tokens = tl.sum(count, axis=0)  # in fp32 it may be infinite where the mean is not
    divisor = tl.full((), 1.0, tl.float64) * denominator
    if denominator_ptr is not None:
        divisor = tl.load(denominator_ptr).to(tl.float64)
    elif BY_COUNT:
        divisor = tokens
    divisor = tl.where(divisor == 0.0, float("inf"), divisor)  # the loss of nothing is 0
    tl.store(sums_ptr + len(value_ptrs), tokens)
    tl.store(divisor_ptr, divisor)
    tl.store(loss_ptr, loss / divisor)


@triton.jit(do_not_specialize=["value_ptrs", "valid_ptr", "weight_ptr", "n_rows"])
def sums_gradient_kernel(
    g_ptr,  # [S, T] fp32 out: d loss / d value where valid, 0 elsewhere
    upstream_ptr,  # [] fp32: gradient of the loss
    value_ptrs, valid_ptr, weight_ptr,  # as in `sums_kernel`
    divisor_ptr,  # [] fp64 of `sums_kernel`
    coefficients, n_rows,
    SQUARES: tl.constexpr, NEGATIVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the gradients of BLOCK tokens."""
    n = n_rows.to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = tl.load(valid_ptr + token, mask=token < n, other=0) != 0
    factor = tl.load(upstream_ptr) / tl.load(divisor_ptr)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + token, mask=valid, other=0.0)
        valid = valid & (weight != 0.0)
        factor *= weight
    for i in tl.static_range(len(value_ptrs)):
        g = factor * (coefficients[i] * _sign(i, NEGATIVES))
        if (SQUARES >> i) & 1:
            g *= 2.0 * tl.load(value_ptrs[i] + token, mask=valid, other=0.0)
        tl.store(g_ptr + i * n + token, tl.where(valid, g, 0.0), mask=token < n)


@triton.jit
def scale_kernel(
    out_ptr,  # [n] out
    x_ptr,  # [n]
    factor_ptr,  # [] fp32
    n,
    ADD: tl.constexpr,  # to what is there
    BLOCK: tl.constexpr,
):
    """One program: BLOCK elements of x * factor, rounded once."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    out = tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32) * tl.load(factor_ptr)
    if ADD:
        out += tl.load(out_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, out.to(out_ptr.dtype.element_ty), mask=i < n)
