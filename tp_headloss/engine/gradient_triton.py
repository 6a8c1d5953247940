"""The gradient of a tile of logits, for any tuple of families."""

import triton
import triton.language as tl

from ..statistics.family_triton import load_teacher, transform
from ..statistics.numerics_triton import exp
from ..statistics.records_triton import Tile


@triton.jit
def _with_target(dz, target, common, columns, token, states, families, grads, rows):
    """The gradient with the label's column, which is one fp32 expression."""
    offset = tl.load(token.merged + rows.target * token.n)
    for i in tl.static_range(len(families)):
        common = families[i].at_target(common, states[i], offset, token)
    at_target = tl.exp(offset) * common / token.whole
    if grads.log_prob is not None:
        at_target += tl.load(token.merged + rows.others * token.n) * tl.load(grads.log_prob + token.row)
    return tl.where(columns == target.to(tl.int32), tl.where(token.ignored, 0.0, at_target), dz)


@triton.jit
def _softmax_gradient(z, columns, first, token, states, families, grads, inputs, rows, start, BLOCK: tl.constexpr):
    """p times its coefficients, and the label's column."""
    common = 0.0  # coefficient of p at every column
    if grads.lse is not None:
        common += tl.load(grads.lse + token.row)
    away = common  # and at columns other than the target
    if grads.log_prob is not None:
        away -= tl.load(grads.log_prob + token.row)
    away = tl.where(token.ignored, 0.0, away / token.whole)
    shifted = z - tl.load(token.merged + rows.shift * token.n)
    p = exp(shifted)
    for i in tl.static_range(len(families)):
        away = families[i].coefficient(away, states[i], shifted, p, token)
    dz = p * away
    if inputs.labels is not None:
        target = tl.load(inputs.labels + token.row).to(tl.int64) - start
        if inputs.entries is not None:
            here = target >= 0
        else:
            here = (target >= first) & (target < first + BLOCK)
        if len(z.shape) == 2:  # several tokens, some of whose labels are here
            target = tl.where(here, target, -1)
            dz = _with_target(dz, target, common, columns, token, states, families, grads, rows)
        else:
            if here:
                dz = _with_target(dz, target, common, columns, token, states, families, grads, rows)
    return dz


@triton.jit
def tile_gradient(
    x, columns, first, chunk, token, grads, families, inputs, rows, start, valid_width, PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of raw logits x in fp32: a tile [BLOCK] of one row, or [ROWS, BLOCK] whose rows' numbers are
    [ROWS, 1]; `eager.logits_gradient` states the formula."""
    z, slope = transform(x, columns, inputs, chunk.pre, chunk.post)
    u = 0
    if inputs.teacher is not None:
        u = load_teacher(inputs, chunk, columns, token.readable)
    tile = Tile(z, z, u, columns, first, True, BLOCK)
    states = ()
    for i in tl.static_range(len(families)):
        states += (families[i].load(grads, token, inputs, rows),)
    dz = _softmax_gradient(z, columns, first, token, states, families, grads, inputs, rows, start, BLOCK)
    for i in tl.static_range(len(families)):
        dz = families[i].direct(dz, states[i], tile, token, grads, inputs, rows)
    if inputs.pre is not None:
        dz *= slope
    dz = tl.where(token.ignored, 0.0, dz)  # whatever a bias, a temperature or a weight did to it
    if PADDED:
        dz = tl.where(columns < valid_width, dz, 0.0)
    return dz
