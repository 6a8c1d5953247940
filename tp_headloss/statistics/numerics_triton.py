"""Numerics of the device functions: everything in fp32 (merges in float64), -inf selected on the
exponential.

Loads are cast to fp32 at once (the interpreter errs with bf16), row offsets are int64, token counts
never constants.
"""

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)
# 2^-126, the smallest number that is not flushed to 0
SMALLEST = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def exp(x):
    """exp(x), on NVIDIA GPUs flushed to 0 below 2^-126: two instructions, where keeping denormals
    takes five."""
    return exp2(x * LOG2_E) if PTX else tl.exp(x)


INTERPRETED = tl.constexpr(not isinstance(exp, triton.JITFunction))
# whether inline assembly is NVIDIA's
PTX = tl.constexpr(not INTERPRETED.value and torch.version.hip is None)


@triton.jit
def reciprocal(x):
    """1 / x to one ulp, for x between 2^-126 and 2^126: on NVIDIA GPUs one instruction."""
    if not PTX:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def largest(x, BITS: tl.constexpr):
    """Maximum of a tile [BLOCK] that was loaded as elements of so many bits. As integers in the
    same order, the numbers of a warp's threads are compared by one instruction."""
    if not PTX or BITS != 16:
        y = tl.max(x, axis=0)
    else:
        WIDE: tl.constexpr = min(8, x.shape[0] // 32)  # elements side by side in a thread
        thread_largest = tl.max(
            tl.max(tl.reshape(x, [x.shape[0] // (32 * WIDE), 32, WIDE]), axis=2), axis=0
        )
        # a NaN would be the largest
        bits = tl.maximum(thread_largest, -float("inf")).to(tl.int32, bitcast=True)
        bits = tl.max(bits ^ ((bits >> 31) & 0x7FFFFFFF), axis=0)
        y = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return y


@triton.jit
def times(x, factor):
    """x * factor, rounded before it is added to anything."""
    if INTERPRETED:
        y = x * factor
    else:
        y = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;" if PTX else "v_mul_f32 $0, $1, $2",
            "=f,f,f" if PTX else "=v,v,v",
            [x, factor],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return y


@triton.jit
def exp2(x):
    """2^x, on NVIDIA GPUs flushed to 0 below 2^-126: one instruction."""
    if not PTX:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def tanh_and_slope(a):
    """tanh(a) and 1 - tanh(a)^2, both to a few ulp: below 0.55 by a polynomial, beyond without
    cancellation.

    Each element has the same bits with any others beside it, and a tile without large ones is done
    sooner."""
    t = a * a
    p = tl.fma(tl.fma(tl.fma(t, -0.00628256006, 0.0210778173), t, -0.0538538732), t, 0.133326024)
    tanh = tl.fma(a * t, tl.fma(p, t, -0.333333194), a)
    slope = tl.fma(-tanh, tanh, 1.0)
    size = tl.abs(a)
    if len(a.shape) == 0 or tl.max(size) >= 0.55:
        u = exp2(size * (-2.0 * LOG2_E))
        r = reciprocal(1.0 + u)
        w = u * r
        far = tl.fma(w, -2.0, 1.0)
        near = size < 0.55
        tanh = tl.where(near, tanh, tl.where(a < 0, -far, far))
        slope = tl.where(near, slope, (4.0 * w) * r)
    return tanh, slope


@triton.jit
def log2(x):
    """log2(x) to an absolute 2^-22, for x from 2^-126: one instruction."""
    if not PTX:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def log2_mixture(p, q, beta):
    """log2 of (1 - beta) p + beta q, to which so little is added that it is finite."""
    return log2(tl.fma(beta, q, tl.fma(1.0 - beta, p, SMALLEST)))


@triton.jit
def widen(x):
    """To fp32; bf16 in one instruction per element, where the compiler needs two for every other
    one."""
    if x.dtype == tl.bfloat16 and PTX:
        y = tl.inline_asm_elementwise(
            "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 rounded to a half precision, in fp32."""
    # in pairs: one by one, the assembler waits for each multiplication of a GEMM
    if PTX and dtype == tl.float16:
        y = tl.inline_asm_elementwise(
            "{ .reg .b32 two; .reg .f16 a, b; cvt.rn.f16x2.f32 two, $3, $2; mov.b32 {a, b}, two;"
            " cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
            "=f,=f,f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        y = widen(x.to(dtype))
    return y


@triton.jit
def fixed_sum(x, LANES: tl.constexpr):
    """Sum of a vector by halving: one order of additions, whatever register layout the compiler
    picked."""
    n: tl.constexpr = LANES
    for i in tl.static_range(20):
        if (n >> i) > 1:
            x = tl.sum(tl.reshape(x, [2, n >> (i + 1)]), axis=0)
    return tl.sum(x, axis=0)


@triton.jit
def neighbours_sum(x, LANES: tl.constexpr):
    """As `fixed_sum`, by adding neighbours: quicker where a thread has several side by side."""
    n: tl.constexpr = LANES
    for i in tl.static_range(20):
        if (n >> i) > 1:
            x = tl.sum(tl.reshape(x, [n >> (i + 1), 2]), axis=1)
    return tl.sum(x, axis=0)


@triton.jit
def lane_sum(x):
    """Sum over the columns: a scalar of lanes [BLOCK], in `fixed_sum`'s order; sums [ROWS, 1] of a
    tile [ROWS, BLOCK], whose register layout a GEMM's accumulators give."""
    if len(x.shape) == 1:
        x = fixed_sum(x, x.shape[0])
    else:
        x = tl.sum(x, axis=1, keep_dims=True)
    return x


@triton.jit
def decay(a, b):
    """a - b and exp(a - b) for a <= b, where a = -inf is the empty sum: 0 and 0, also if b =
    -inf."""
    empty = a == float("-inf")
    difference = tl.where(empty, 0.0, a - b)
    return difference, tl.where(empty, 0.0, tl.exp(difference))


@triton.jit
def log1p(u):
    """log(1 + u) in float64 with full relative accuracy for small u (Higham, Accuracy and
    Stability, 1.14.1)."""
    w = 1.0 + u
    return tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))


@triton.jit
def weigh(factor, value):
    """factor * value in float64, where a factor of 0 leaves nothing of any value."""
    return tl.where(factor == 0.0, 0.0, factor * value.to(tl.float64))


@triton.jit
def settle(value, bad, ignored):
    return tl.where(ignored, 0.0, tl.where(bad, float("nan"), value)).to(tl.float32)


@triton.jit
def half_sign(d):
    """sign(d) / 2."""
    return tl.where(d > 0.0, 0.5, tl.where(d < 0.0, -0.5, 0.0))


@triton.jit
def relative_information(p, log2_p, log2_m):
    """p log2(p / m), where what has no probability adds nothing."""
    return p * (tl.maximum(log2_p, -1e30) - log2_m)
