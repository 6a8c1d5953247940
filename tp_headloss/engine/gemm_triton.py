"""Kernels of a linear head whose logits exist only as accumulators: a GEMM with the families' hooks
as its epilogue.

A tile [ROWS, COLUMNS] of hidden @ weight^T is one partial packet of each of its tokens. Tiles end
at the borders of chunks, and the sum over H has one order, so a partial packet depends on its token
and its chunk alone: not on the batch, the shard or the number of ranks. Hooks see per-row numbers
as [ROWS, 1] and columns as [1, COLUMNS]. Rows that the last tile has beyond the tokens repeat the
last token's numbers, and nobody reads their results.
"""

import triton
import triton.language as tl

from ..statistics import softmax_triton as softmax
from ..statistics.family_triton import columns_of_row, find_label, read, size_of_chunk, transform
from ..statistics.numerics_triton import INTERPRETED, lane_sum, rounded
from ..statistics.records_triton import Core, Lists, Packet, Tile, Token
from .gradient_triton import tile_gradient
from .kernels import add_to_states, start_states
from .merge_triton import add_packet, peaks


@triton.jit
def _place(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Row and column of a tile, GROUP rows of tiles at a time, which share columns of the weight in
    the cache."""
    first = tile // (GROUP * column_tiles) * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    return first + tile % size, (tile % (GROUP * column_tiles)) // size


@triton.jit
def _multiply(acc, hidden, weight, row, column, k):
    """acc += hidden @ weight^T of one step over H."""
    a = hidden.load([row, k])
    b = weight.load([column, k])
    # whose dot multiplies bf16 wrongly, and rounds a row differently at another place in the tile
    if INTERPRETED:
        return acc + tl.sum(a.to(tl.float32)[:, None, :] * b.to(tl.float32)[None, :, :], axis=2)
    return tl.dot(a, b.T, acc)


@triton.jit
def _chunk_of_rows(
    inputs, row, first, offset, n_rows, start, valid_width, ignore_index, COLUMNS: tl.constexpr
):
    """The part of a chunk that is one tile; `target` is where a label's column is among the
    chunk's, or -1."""
    # of ignored tokens, too: nobody reads it
    size = size_of_chunk(inputs, first, valid_width)
    end = tl.minimum(offset + COLUMNS, size)
    target, owned, ignored = find_label(inputs, row, first, offset, end, start, ignore_index)
    return columns_of_row(inputs, row, first, size, n_rows, start, target, owned, ignored)


@triton.jit
def _strips(x, COLUMNS: tl.constexpr):
    """A tile as strips of COLUMNS columns, which need few registers at a time."""
    strips = (x,)
    for i in tl.static_range(8):
        if (x.shape[1] >> i) > COLUMNS:
            halves = ()
            for k in tl.static_range(len(strips)):
                strip = strips[k]
                pair = tl.reshape(strip, [strip.shape[0], 2, strip.shape[1] // 2])
                left, right = tl.split(tl.permute(pair, [0, 2, 1]))
                halves += (left, right)
            strips = halves
    return strips


@triton.jit
def _store_packet(raw, out, n, offset, chunk, inputs, families, rows, STRIP: tl.constexpr):
    """Store the partial packet of a tile's strips of raw logits.

    There is no branch, although few tiles have a label or end their chunk: one that changes
    accumulators, or many registers, makes the compiler wait for each multiplication before the next
    (a third more time).
    """
    lanes = tl.arange(0, STRIP)[None, :]
    least = -float("inf")
    zeros = tl.zeros_like(raw[0])
    m = zeros + least
    found = zeros
    strips = ()
    for i in tl.static_range(len(raw)):
        inside = offset + i * STRIP + lanes
        v, _ = transform(raw[i], chunk.first + inside, inputs, chunk.pre, chunk.post)
        v = tl.where(inside < chunk.size, v, least)
        if inputs.labels is not None:
            found = tl.where(inside == chunk.target, v, found)
            v = tl.where(inside == chunk.target, least, v)
        m = tl.maximum(m, v)
        strips += (v,)
    at_target = lane_sum(found)
    m = tl.maximum(tl.max(m, axis=1, keep_dims=True), least)  # NaN is no maximum
    sums = zeros
    student = zeros
    states = start_states(families, zeros, chunk, inputs)
    for i in tl.static_range(len(raw)):
        inside = offset + i * STRIP + lanes
        v = strips[i]
        tile = Tile(v, v, 0, chunk.first + inside, offset + i * STRIP, True)
        terms = softmax.tile_softmax(m, least, m, v)
        student = softmax.add_student(student, terms, chunk, inputs)
        sums += terms.p
        states = add_to_states(families, states, tile, terms, chunk, inputs, rows)
    # the label as one more strip: comparing columns twice spills registers
    if inputs.labels is not None:
        v = zeros + least
        z = tl.where((lanes == 0) & chunk.owned, at_target, v)
        tile = Tile(z, v, 0, chunk.first + tl.maximum(chunk.target, 0) + lanes * 0, offset, True)
        states = add_to_states(
            families, states, tile, softmax.tile_softmax(m, least, m, v), chunk, inputs, rows
        )
    core = Core(m, sums)
    softmax.store_sums(out, n, core, student, inputs, rows)
    if inputs.labels is not None:
        softmax.store_target(out, n, at_target, chunk, rows)
    for i in tl.static_range(len(families)):
        families[i].store(out, n, states[i], core, chunk, inputs, rows)


@triton.jit(do_not_specialize=["n_rows", "start", "valid_width", "chunks", "ignore_index", "depth"])
def linear_statistics_kernel(
    partials_ptr,  # [chunks * tiles of a chunk, K, tokens in whole tiles] fp32 out
    hidden,  # [T, H] descriptor
    weight,  # [width, H] descriptor
    inputs,  # Inputs without x
    families,  # their STATISTICS
    rows,  # numbers of the packets' rows by name
    n_rows,
    start,
    valid_width,
    chunks,
    ignore_index,
    depth,
    ROUND: tl.constexpr,  # whether logits are rounded to the operands' dtype
    TILE: tl.constexpr,  # rows, columns, steps over H, columns of a strip, rows of tiles in a group
):
    """One program: every so many-th tile of the logits, each of which becomes a partial packet."""
    ROWS: tl.constexpr = TILE[0]
    COLUMNS: tl.constexpr = TILE[1]
    DEPTH: tl.constexpr = TILE[2]
    row_tiles = tl.cdiv(n_rows, ROWS)
    per_chunk = tl.cdiv(inputs.chunk_size, COLUMNS)
    n = (row_tiles * ROWS).to(tl.int64)
    steps = tl.cdiv(depth, DEPTH)
    tl.assume(steps > 0)
    for number in tl.range(
        tl.program_id(0), row_tiles * chunks * per_chunk, tl.num_programs(0), flatten=True
    ):
        i, j = _place(number, row_tiles, chunks * per_chunk, TILE[4])
        first = j // per_chunk * inputs.chunk_size
        offset = j % per_chunk * COLUMNS
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(steps):
            acc = _multiply(acc, hidden, weight, i * ROWS, first + offset, k * DEPTH)
        if ROUND:
            acc = rounded(acc, hidden.dtype)
        at = (i * ROWS + tl.arange(0, ROWS))[:, None]
        row = tl.minimum(at, n_rows - 1).to(tl.int64)
        chunk = _chunk_of_rows(
            inputs, row, first, offset, n_rows, start, valid_width, ignore_index, COLUMNS
        )
        out = partials_ptr + j * (rows.height * n) + at
        _store_packet(_strips(acc, TILE[3]), out, n, offset, chunk, inputs, families, rows, TILE[3])


@triton.jit(do_not_specialize=["n_rows", "n_padded", "parts"])
def fold_kernel(
    packets_ptr,  # [chunks, K, T] fp32 out
    partials_ptr,  # [chunks * parts, K, n_padded] fp32
    inputs,  # Inputs: the student's scale
    families,  # their MERGE
    rows,  # numbers of the packets' rows by name
    n_rows,
    n_padded,
    parts,
    BLOCK: tl.constexpr,
):
    """One program: the partial packets of one chunk of BLOCK tokens, merged in their order, in
    float64."""
    blocks = tl.cdiv(n_rows, BLOCK)
    index = (tl.program_id(0) // blocks).to(tl.int64)
    token = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = token < n_rows
    n = n_padded.to(tl.int64)
    size = rows.height * n
    at = partials_ptr + index * parts * size + token
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    core = softmax.start_merge(BLOCK)
    states = ()
    for i in tl.static_range(len(families)):
        states += (families[i].start(BLOCK),)
    for part in tl.range(0, parts, num_stages=8):
        packet = Packet(at + part * size, n, here)
        peak = tl.maximum(peak, read(packet, rows.max, 0.0))
        states = peaks(families, states, packet, rows)
    scale = 1.0
    if inputs.student_scale is not None:
        scale = inputs.student_scale
        if inputs.scales is not None:
            scale = tl.load(inputs.scales + n_rows.to(tl.int64) + token, mask=here, other=1.0)
    for part in tl.range(0, parts, num_stages=8):
        packet = Packet(at + part * size, n, here)
        terms = softmax.packet_softmax(packet, peak, scale, rows)
        core = softmax.add_packet(core, packet, terms, rows)
        states = add_packet(families, states, packet, terms, rows)
    whole = Packet(packets_ptr + index * rows.height * n_rows + token, n_rows.to(tl.int64), here)
    softmax.fold(core, peak, whole, rows, parts)
    for i in tl.static_range(len(families)):
        families[i].fold(states[i], whole, rows)


@triton.jit(do_not_specialize=["n_rows", "start", "valid_width", "depth"])
def linear_gradient_kernel(
    out,  # [T, width] descriptor
    hidden,  # [T, H] descriptor
    weight,  # [width, H] descriptor
    inputs,  # Inputs without x
    merged_ptr,  # [R, T] fp32
    grads,  # upstream gradients [T] fp32 by name, None where absent
    families,  # their GRADIENT
    rows,  # numbers of the merged rows by name
    n_rows,
    start,
    valid_width,
    depth,
    ROUND: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,  # rows, columns, steps over H, columns of a strip, rows of tiles in a group
):
    """One program: every so many-th tile of the logits' gradient."""
    ROWS: tl.constexpr = TILE[0]
    COLUMNS: tl.constexpr = TILE[1]
    DEPTH: tl.constexpr = TILE[2]
    STRIP: tl.constexpr = out.block_shape[1]
    row_tiles = tl.cdiv(n_rows, ROWS)
    column_tiles = tl.cdiv(inputs.width, COLUMNS)
    n = n_rows.to(tl.int64)
    steps = tl.cdiv(depth, DEPTH)
    tl.assume(steps > 0)
    for number in tl.range(
        tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True
    ):
        i, j = _place(number, row_tiles, column_tiles, TILE[4])
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(steps):
            acc = _multiply(acc, hidden, weight, i * ROWS, j * COLUMNS, k * DEPTH)
        row = tl.minimum((i * ROWS + tl.arange(0, ROWS))[:, None], n_rows - 1).to(tl.int64)
        whole = tl.load(merged_ptr + rows.sum * n + row)
        ignored = whole == 0.0
        chunk = columns_of_row(inputs, row, 0, valid_width, n_rows, start, -1, False, ignored)
        strips = _strips(acc, STRIP)
        for k in tl.static_range(len(strips)):
            first = j * COLUMNS + k * STRIP
            columns = first + tl.arange(0, STRIP)[None, :]
            written = columns < inputs.width
            token = Token(
                row,
                n,
                merged_ptr + row,
                whole,
                ignored,
                chunk.student_scale,
                Lists(start, start, start),
                start,
                written,
                written,
                0,
            )
            x = rounded(strips[k], hidden.dtype) if ROUND else strips[k]
            dz = tile_gradient(
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
                PADDED,
                STRIP,
            )
            out.store([i * ROWS, first], dz.to(out.dtype))
