"""Triton kernels that reduce per-token values to a loss and sums, as `head_loss.reduction` defines
them.

They come between the merge and the gradient. A loss in plain PyTorch is a chain of kernels on [N]
values, forward and backward, each of which takes longer to launch than to run; these are one each
way. One program sums all tokens, in float64 and in one order: the result does not depend on the
number of programs, and ranks that have equal statistics have equal losses, without an exchange.
"""

import torch
import triton
import triton.language as tl

from .launch import (
    AGAIN,
    AGAIN_PROGRAMS,
    SCALE,
    SUMS,
    SUMS_GRADIENT,
    ceil_div,
    dtype_key,
    int_key,
    launch,
    pointer_key,
)


@triton.jit
def _sign(i: tl.constexpr, NEGATIVES: tl.constexpr):
    """Sign of sum i: -1.0 where its bit is set, else 1.0."""
    return 1.0 - 2.0 * ((NEGATIVES >> i) & 1)


@triton.jit(do_not_specialize=["value_ptrs", "valid_ptr", "weight_ptr", "n_rows"])
def sums_kernel(
    sums_ptr,  # [S + 1] fp32 out: a sum over valid tokens per value, and the count
    inverse_ptr,  # [] fp64 out: 1 / what the loss was divided by
    loss_ptr,  # [] fp32 out: the sum of c_i sums_i over the divisor
    value_ptrs,  # S per-token values [T], fp32 or bool
    valid_ptr,  # [T] bool
    weight_ptr,  # [T] fp32 token weights or None
    denominator_ptr,  # [] fp64 or None: then `denominator`, or the count
    coefficients,  # floats c_i of the first values
    denominator,
    n_rows,
    # bits: which values are squared, which sums negated
    SQUARES: tl.constexpr,
    NEGATIVES: tl.constexpr,
    BY_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum all tokens in a single program, in float64 and a fixed order, and round each sum once."""
    n = n_rows.to(tl.int64)
    count = tl.zeros([BLOCK], tl.float64)
    totals = ()
    for _ in tl.static_range(len(value_ptrs)):
        totals += (tl.zeros([BLOCK], tl.float64),)
    for first in range(0, n, BLOCK):
        token = first + tl.arange(0, BLOCK)
        here = token < n
        valid = tl.load(valid_ptr + token, mask=here, other=0) != 0
        weight = valid.to(tl.float64)
        if weight_ptr is not None:
            weight = tl.where(valid, tl.load(weight_ptr + token, mask=here, other=0.0), 0.0).to(
                tl.float64
            )
            valid = valid & (weight != 0.0)  # a loss mask, whatever the values are
        count += weight
        grown = ()
        for i in tl.static_range(len(value_ptrs)):
            # no load waits for another
            value = tl.where(valid, tl.load(value_ptrs[i] + token, mask=here, other=0), 0).to(
                tl.float64
            )
            if (SQUARES >> i) & 1:
                value *= value
            grown += (tl.fma(value, weight, totals[i]),)
        totals = grown

    loss = 0.0
    for i in tl.static_range(len(value_ptrs)):
        total = tl.sum(totals[i], axis=0) * _sign(i, NEGATIVES)
        tl.store(sums_ptr + i, total)
        if i < len(coefficients):  # of a term; all others are metrics
            loss += coefficients[i] * total
    tokens = tl.sum(count, axis=0)  # in fp32 it may be infinite where the mean is not
    tl.store(sums_ptr + len(value_ptrs), tokens)
    divisor = tl.full((), 1.0, tl.float64) * (tokens if BY_COUNT else denominator)
    if denominator_ptr is not None:
        divisor = tl.load(denominator_ptr).to(tl.float64)
    divisor = tl.where(divisor == 0.0, float("inf"), divisor)  # a loss of no tokens is 0
    tl.store(inverse_ptr, 1.0 / divisor)
    tl.store(loss_ptr, loss / divisor)


@triton.jit(do_not_specialize=["value_ptrs", "valid_ptr", "weight_ptr", "n_rows"])
def sums_gradient_kernel(
    g_ptr,  # [S, T] fp32 out: d loss / d value where valid, 0 elsewhere
    upstream_ptr,  # [] fp32: gradient of the loss
    value_ptrs,
    valid_ptr,
    weight_ptr,  # as in `sums_kernel`
    inverse_ptr,  # [] fp64 of `sums_kernel`
    coefficients,
    n_rows,
    SQUARES: tl.constexpr,
    NEGATIVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of BLOCK tokens with respect to the values of every term."""
    n = n_rows.to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = tl.load(valid_ptr + token, mask=token < n, other=0) != 0
    factor = tl.load(upstream_ptr) * tl.load(inverse_ptr)
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
    ADD: tl.constexpr,  # to the elements of `out`, which are overwritten otherwise
    BLOCK: tl.constexpr,
):
    """Compute BLOCK elements of x * factor, plus `out` if ADD, each rounded once."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    out = tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32) * tl.load(factor_ptr)
    if ADD:
        out += tl.load(out_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, out.to(out_ptr.dtype.element_ty), mask=i < n)


@triton.jit
def gradient_for_kernel(
    gradient_ptr,  # [n] in and out
    upstream_ptr,  # [] fp32
    n,
    BLOCK: tl.constexpr,
):
    """Multiply a gradient by an upstream gradient, if that is not 1."""
    given = tl.load(upstream_ptr)
    n = tl.where(given == 1.0, 0, n.to(tl.int64))
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(gradient_ptr + i, mask=i < n, other=0.0).to(tl.float32) * given
        tl.store(gradient_ptr + i, x.to(gradient_ptr.dtype.element_ty), mask=i < n)


def divided_by(denominator) -> tuple[torch.Tensor | None, float]:
    """A denominator as kernels take it: in memory, or a number."""
    if isinstance(denominator, torch.Tensor):
        return denominator, 1.0
    return None, 1.0 if denominator is None else float(denominator)


def sums_key(values, valid, reduction) -> tuple:
    """Everything about sums that Triton compiles into their kernel."""
    plan, weight, denominator, *_ = reduction
    return (
        valid.device,
        plan.squares,
        plan.negatives,
        len(plan.coefficients),
        denominator is None,
        valid.dtype,
        dtype_key(weight),
        pointer_key(divided_by(denominator)[0]),
        *[value.dtype for value in values],
    )


def token_sums(values, valid, reduction):
    """Values [N] each -> loss [], sums [S + 1] (of each value, then the count), and 1 / the divisor
    [] fp64."""
    plan, weight, denominator, *_ = reduction
    sums = valid.new_empty(len(values) + 1, dtype=torch.float32)
    loss, inverse = (
        valid.new_empty((), dtype=torch.float32),
        valid.new_empty((), dtype=torch.float64),
    )
    given, number = divided_by(denominator)
    launch(
        sums_kernel,
        1,
        sums_key(values, valid, reduction),
        SUMS,
        sums,
        inverse,
        loss,
        values,
        valid,
        weight,
        given,
        plan.coefficients,
        number,
        valid.numel(),
        plan.squares,
        plan.negatives,
        denominator is None,
    )
    return loss, sums, inverse


def token_sums_gradient(upstream, values, valid, weight, inverse, plan):
    """Gradient of the loss -> gradients of the terms' values, [terms, N] fp32."""
    n_rows = valid.numel()
    out = valid.new_empty((len(values), n_rows), dtype=torch.float32)
    if n_rows:
        bits, kinds = (plan.squares, plan.negatives), [value.dtype for value in values]
        variant = valid.device, *bits, pointer_key(upstream), valid.dtype, dtype_key(weight), *kinds
        launch(
            sums_gradient_kernel,
            ceil_div(n_rows, SUMS_GRADIENT.block),
            variant,
            SUMS_GRADIENT,
            out,
            upstream,
            values,
            valid,
            weight,
            inverse,
            plan.coefficients,
            n_rows,
            *bits,
        )
    return out


def scale(out, x, factor, add: bool = False):
    """out (+)= x * factor, contiguous, a scalar tensor; torch's own is slow with a factor that is
    on the device."""
    if out.numel():
        variant = out.device, int_key(out.numel()), add, *map(pointer_key, (out, x, factor))
        launch(
            scale_kernel,
            ceil_div(out.numel(), SCALE.block),
            variant,
            SCALE,
            out,
            x,
            factor,
            out.numel(),
            add,
        )


def gradient_for(gradient, upstream):
    """Make a contiguous gradient that was written for an upstream gradient of 1 of the loss that of
    another one, in place."""
    n = gradient.numel()
    if n:
        programs = min(AGAIN_PROGRAMS, ceil_div(n, AGAIN.block))
        variant = gradient.device, int_key(n), pointer_key(gradient), pointer_key(upstream)
        launch(gradient_for_kernel, programs, variant, AGAIN, gradient, upstream, n)
