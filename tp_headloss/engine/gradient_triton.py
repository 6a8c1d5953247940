"""The gradient of a tile of logits, for any tuple of families, and the gradient at a token's entries.

At the entries of a top-K teacher or of a set the whole gradient is computed in a kernel of its own, before the logits
may be overwritten, and put into its place by the program that wrote these columns: while they are in the cache, a
scattered element costs no access of memory.
"""

import triton
import triton.language as tl

from ..statistics.entries_triton import entries_between, entry_range
from ..statistics.family_triton import load_teacher, loss_of_row, row_factors, teacher_scales, transform, upstream
from ..statistics.numerics_triton import exp, widen
from ..statistics.records_triton import Chunk, Tile, Token
from ..statistics.topk_triton import store_everywhere


@triton.jit
def _with_target(dz, target, common, columns, token, states, families, grads, rows):
    """The gradient with the label's column, which is one fp32 expression."""
    offset = tl.load(token.merged + rows.target * token.n)
    for i in tl.static_range(len(families)):
        common = families[i].at_target(common, states[i], offset, token)
    at_target = tl.exp(offset) * common / token.whole
    if grads.log_prob is not None:
        at_target += tl.load(token.merged + rows.others * token.n) * upstream(grads.log_prob, token)
    return tl.where(columns == target.to(tl.int32), tl.where(token.ignored, 0.0, at_target), dz)


@triton.jit
def _softmax_gradient(z, columns, first, token, states, families, grads, inputs, rows, start, BLOCK: tl.constexpr):
    """p times its coefficients, and the label's column."""
    common = 0.0  # coefficient of p at every column
    if grads.lse is not None:
        common += upstream(grads.lse, token)
    away = common  # and at columns other than the target
    if grads.log_prob is not None:
        away -= upstream(grads.log_prob, token)
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


@triton.jit(do_not_specialize=["n_rows", "start", "valid_width"])
def entries_gradient_kernel(
    exact_ptr,  # like the entries, out: the gradient at those of this shard, undefined at others
    everywhere_ptr,  # [4, T] or [1, T] fp32 out, or None: see `store_everywhere`
    inputs,  # Inputs
    merged_ptr,  # [R, T] fp32
    grads,  # upstream gradients by name, see `upstream`
    loss,  # LossGradient
    families,  # their GRADIENT
    rows,  # numbers of the merged rows by name
    n_rows, start, valid_width,
    HAS_TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the gradient at the entries of one row."""
    row = tl.program_id(0).to(tl.int64)
    n = n_rows.to(tl.int64)
    merged = merged_ptr + row
    whole = tl.load(merged + rows.sum * n)
    ignored = whole == 0.0
    pre, post = row_factors(inputs, row)
    teacher_scale, a = teacher_scales(inputs, row, n_rows)
    chunk = Chunk(row, 0, valid_width, start, -1, False, ignored, pre, post, teacher_scale, a)
    of_loss = loss_of_row(loss, row)
    begin, count = entry_range(inputs, row)
    for k in range(0, count, BLOCK):
        place = k + tl.arange(0, BLOCK)
        columns = tl.load(inputs.entries + begin + place, mask=place < count, other=-1) - start
        written = (columns >= 0) & (columns < valid_width)
        columns = tl.where(written, columns, inputs.width)
        readable = written & (columns < tl.where(ignored, 0, valid_width))
        x = tl.load(inputs.x + row * inputs.x_row + columns.to(tl.int64) * inputs.x_column, mask=readable, other=0.0)
        token = Token(row, n, merged, whole, ignored, a, begin + place, start, written, readable, of_loss)
        dz = tile_gradient(
            widen(x), columns, 0, chunk, token, grads, families, inputs, rows, start, valid_width, False, BLOCK
        )
        tl.store(exact_ptr + begin + place, dz.to(exact_ptr.dtype.element_ty), mask=written)
    if everywhere_ptr is not None:
        token = Token(row, n, merged, whole, ignored, a, 0, start, False, False, of_loss)
        store_everywhere(everywhere_ptr, token, grads, inputs, rows, HAS_TAIL)


@triton.jit
def put_entries(dx, dx_column, at_entries, row, first, end, start, BLOCK: tl.constexpr):
    """Copy the gradient at those of a row's entries that are columns first .. end - 1; dx: pointer to the row."""
    begin, count = entries_between(at_entries, row, start + first, start + end)
    for k in range(0, count, BLOCK):
        place = k + tl.arange(0, BLOCK)
        columns = tl.load(at_entries.entries + begin + place, mask=place < count, other=-1) - start
        here = (columns >= first) & (columns < end)
        gradient = tl.load(at_entries.gradient + begin + place, mask=here, other=0.0)
        tl.store(dx + columns.to(tl.int64) * dx_column, gradient, mask=here)
