"""The gradient of a tile of logits, for any tuple of families, and the gradient at the ids of a
token's lists.

At the ids of a list (`Lists`: given ids, a set, the entries of a top-K teacher) the whole gradient
is computed apart, by the program of their columns before it may overwrite the logits, and put into
its place when it has written the columns: while they are in the cache, a scattered element costs no
access of memory. The gradient at an id of several lists is that of the last one, whose tiles look
for their ids in the lists before it.
"""

import triton
import triton.language as tl

from ..statistics.family_triton import load_teacher, same_coefficient, transform, upstream
from ..statistics.numerics_triton import exp, widen
from ..statistics.records_triton import Lists, Places, Tile, Token
from ..statistics.sets_triton import members_between


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
def _softmax_gradient(
    z, columns, first, token, states, families, grads, inputs, rows, start, BLOCK: tl.constexpr
):
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
        if (
            len(token.places.ids.shape)
            + len(token.places.sets.shape)
            + len(token.places.entries.shape)
            == 0
        ):
            here = (target >= first) & (target < first + BLOCK)
        else:
            here = target >= 0
        if len(z.shape) == 2:  # several tokens, some of whose labels are here
            target = tl.where(here, target, -1)
            dz = _with_target(dz, target, common, columns, token, states, families, grads, rows)
        else:
            if here:
                dz = _with_target(dz, target, common, columns, token, states, families, grads, rows)
    return dz


@triton.jit
def tile_gradient(
    x,
    columns,
    first,
    chunk,
    token,
    grads,
    families,
    inputs,
    rows,
    start,
    valid_width,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of raw logits x in fp32: a tile [BLOCK] of one row, or [ROWS, BLOCK] whose rows'
    numbers are [ROWS, 1]; `eager.logits_gradient` states the formula."""
    z, slope = transform(x, columns, inputs, chunk.pre, chunk.post)
    u = 0
    if inputs.teacher is not None:
        u = load_teacher(inputs, chunk, columns, token.readable)
    tile = Tile(z, z, u, columns, first, True)
    states = ()
    factors = ()  # those of p
    if grads.lse is not None or grads.log_prob is not None:
        factors += (0,)
    for i in tl.static_range(len(families)):
        states += (families[i].load(grads, token, inputs, rows),)
        if families[i].coefficient is not same_coefficient:
            factors += (0,)
    if len(factors) > 0:
        dz = _softmax_gradient(
            z, columns, first, token, states, families, grads, inputs, rows, start, BLOCK
        )
    else:
        dz = tl.zeros_like(z) + 0.0 * token.whole  # NaN of a bad token
    for i in tl.static_range(len(families)):
        dz = families[i].direct(dz, states[i], tile, token, grads, inputs, rows)
    if inputs.pre is not None:
        dz *= slope
    dz = tl.where(token.ignored, 0.0, dz)  # whatever a bias, a temperature or a weight did to it
    if PADDED:
        dz = tl.where(columns < valid_width, dz, 0.0)
    return dz


@triton.jit
def _places_in_list(exact, inputs, row, first, end, LIST: tl.constexpr):
    """Places of a row's ids in a list, by its number in `Lists`, among them all of the ids first ..
    end - 1."""
    if LIST == 0:
        ids, begin, count = inputs.ids, row * inputs.n_ids, inputs.n_ids
    elif LIST == 1:
        begin, count = members_between(inputs, row, first, end)
        ids = inputs.sets
    else:
        ids, begin, count = inputs.entries, row * inputs.n_entries, inputs.n_entries
    return Places(ids, exact[LIST], begin, count)


@triton.jit
def _columns_of(places, k, start, BLOCK: tl.constexpr):
    """Columns of the ids from number k on, negative where there is none."""
    place = k + tl.arange(0, BLOCK)
    return tl.load(places.ids + places.begin + place, mask=place < places.count, other=-1) - start


@triton.jit
def store_exact(
    exact,
    first,
    end,
    chunk,
    token,
    grads,
    families,
    inputs,
    rows,
    valid_width,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the gradient at those of a row's ids in list number LIST of `Lists` that are columns
    first .. end - 1, and return the ids' places; 0 where there is no memory for the list."""
    start = token.start
    places = 0
    if exact[LIST] is not None:
        places = _places_in_list(exact, inputs, token.row, start + first, start + end, LIST)
        for k in range(0, places.count, BLOCK):
            columns = _columns_of(places, k, start, BLOCK)
            written = (columns >= first) & (columns < end)
            columns = tl.where(written, columns, inputs.width)
            readable = written & (columns < tl.where(token.ignored, 0, end))
            x = tl.load(
                inputs.x + token.row * inputs.x_row + columns.to(tl.int64) * inputs.x_column,
                mask=readable,
                other=0.0,
            )
            place = places.begin + k + tl.arange(0, BLOCK)
            at = Token(
                token.row,
                token.n,
                token.merged,
                token.whole,
                token.ignored,
                token.student_scale,
                Lists(
                    place if LIST == 0 else start,
                    place if LIST == 1 else start,
                    place if LIST == 2 else start,
                ),
                start,
                written,
                readable,
                token.loss,
            )
            dz = tile_gradient(
                widen(x),
                columns,
                0,
                chunk,
                at,
                grads,
                families,
                inputs,
                rows,
                start,
                valid_width,
                False,
                BLOCK,
            )
            tl.store(places.exact + place, dz.to(places.exact.dtype.element_ty), mask=written)
    return places


@triton.jit
def put_exact(dx, dx_column, places, first, end, start, BLOCK: tl.constexpr):
    """Copy what `store_exact` stored to its columns; dx: pointer to the row."""
    for k in range(0, places.count, BLOCK):
        columns = _columns_of(places, k, start, BLOCK)
        here = (columns >= first) & (columns < end)
        gradient = tl.load(
            places.exact + places.begin + k + tl.arange(0, BLOCK), mask=here, other=0.0
        )
        tl.store(dx + columns.to(tl.int64) * dx_column, gradient, mask=here)


@triton.jit
def put_lists(dx, dx_column, exact, ids, sets, entries, first, end, start, BLOCK: tl.constexpr):
    """`put_exact` of the lists in turn: at ids of several lists only the last has the parts of all.
    Before each one the columns, and those of the lists before, are written."""
    if exact.ids is not None:
        tl.debug_barrier()
        put_exact(dx, dx_column, ids, first, end, start, BLOCK)
    if exact.sets is not None:
        tl.debug_barrier()
        put_exact(dx, dx_column, sets, first, end, start, BLOCK)
    if exact.entries is not None:
        tl.debug_barrier()
        put_exact(dx, dx_column, entries, first, end, start, BLOCK)
