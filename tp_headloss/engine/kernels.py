"""The carriers among the kernels: they stream logits, merge packets and write gradients for any
tuple of families.

`statistics.family_triton` is the families' contract, and explains the names; `eager` is the
definition in plain torch. Families arrive as a plain tuple of their hooks, so that an edit of one
changes the compiled kernel's key.
"""

import triton
import triton.language as tl

from ..statistics import softmax_triton as softmax
from ..statistics.family_triton import (
    columns_of_row,
    load_logits,
    load_teacher,
    loss_of_row,
    open_chunk,
)
from ..statistics.numerics_triton import largest, widen
from ..statistics.records_triton import Core, Lists, Tile, Token
from .gradient_triton import put_lists, store_exact, tile_gradient
from .merge_triton import merge_tokens
from .transports.symmetric_memory_triton import slot_to_write

# Columns of the gradient in a program that puts that at ids of lists into its place. An H200, 8192
# x 128256, microseconds of the backward of sets of 1024 ids, of 64, of a top-K teacher, with its
# tail: 4096 1243, 1030, 1100, 1186; 8192 1295, 1045, 1034, 1084; 16384 1530, 1082, -, -: what the
# programs at work write has to stay in the cache
# stay in the cache
COLUMNS = tl.constexpr(8192)
# Tiles in a program of a softcap's gradient, which has some 200 instructions besides theirs; 32064:
# 1 344, 4 309, 8 295
SOFTCAP_TILES = tl.constexpr(8)
PUT = tl.constexpr(128)  # ids of a list that it reads at once


@triton.jit
def start_states(families, zeros, chunk, inputs):
    states = ()
    for i in tl.static_range(len(families)):
        states += (families[i].start(zeros, chunk, inputs),)
    return states


@triton.jit
def rescale_states(families, states, move, chunk, inputs, rows):
    rescaled = ()
    for i in tl.static_range(len(families)):
        rescaled += (families[i].rescale(states[i], move, chunk, inputs, rows),)
    return rescaled


@triton.jit
def add_to_states(families, states, tile, terms, chunk, inputs, rows):
    added = ()
    for i in tl.static_range(len(families)):
        added += (families[i].add(states[i], tile, terms, chunk, inputs, rows),)
    return added


@triton.jit
def _add_tile(m, s, student, states, families, tile, chunk, inputs, rows):
    """Add a tile to the maximum m, the lane sums s of exp(v - m), those at the teacher's side, and
    all states."""
    peak = largest(tile.v, inputs.x.dtype.element_ty.primitive_bitwidth)
    before = m
    if peak > m:
        move = softmax.move_to(m, s, peak)
        states = rescale_states(families, states, move, chunk, inputs, rows)
        if rows.student_sum is not None:
            student = softmax.rescale_student(student, move, chunk, inputs)
        s *= move.factor
    m = tl.maximum(m, peak)
    terms = softmax.tile_softmax(m, before, peak, tile.v)
    added = add_to_states(families, states, tile, terms, chunk, inputs, rows)
    if rows.student_sum is not None:
        student = softmax.add_student(student, terms, chunk, inputs)
    return m, s + terms.p, student, added


@triton.jit(do_not_specialize=["n_rows", "start", "valid_width", "chunks", "ignore_index"])
def statistics_kernel(
    packets_ptr,  # [chunks, K, T] fp32 out
    inputs,  # Inputs
    memory,  # SharedMemory
    families,  # their STATISTICS
    rows,  # numbers of the packets' rows by name
    n_rows,
    start,
    valid_width,
    chunks,
    ignore_index,
    BLOCK: tl.constexpr,
):
    """One program: the packet of one chunk of one row, a function of that chunk's columns only."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    index = tl.program_id(0) % chunks
    chunk = open_chunk(inputs, row, index, n_rows, start, valid_width, ignore_index)
    packets_ptr = slot_to_write(packets_ptr, memory)
    lanes = tl.arange(0, BLOCK)
    m = -float("inf")
    s = tl.zeros([BLOCK], tl.float32)
    student = tl.zeros([BLOCK], tl.float32)
    states = start_states(families, student, chunk, inputs)
    whole = chunk.size // BLOCK * BLOCK
    # the tile of the target waits, so that the loop need not look for it: one masked tile for it,
    # one for the tail
    waiting = tl.where(chunk.target < 0, whole, chunk.target // BLOCK * BLOCK)
    for i in tl.range(0, whole - tl.where(waiting < whole, BLOCK, 0), BLOCK, num_stages=4):
        o = tl.where(i < waiting, i, i + BLOCK)
        columns = chunk.first + o + lanes
        z = load_logits(inputs, chunk, columns, None)
        u = 0
        if inputs.teacher is not None:
            u = load_teacher(inputs, chunk, columns, None)
        tile = Tile(z, z, u, columns, o, False)
        m, s, student, states = _add_tile(
            m, s, student, states, families, tile, chunk, inputs, rows
        )
    for o in range(waiting, chunk.size, tl.maximum(whole - waiting, BLOCK)):
        inside = o + lanes
        columns = chunk.first + inside
        # two masks that are known to be aligned, so that the load stays wide; what is valid is
        # selected afterwards
        reading = (inside < inputs.chunk_size) & (columns < inputs.width)
        z = tl.where(
            inside < chunk.size, load_logits(inputs, chunk, columns, reading), float("-inf")
        )
        v = tl.where(inside == chunk.target, float("-inf"), z)
        u = 0
        if inputs.teacher is not None:
            u = tl.where(
                inside < chunk.size, load_teacher(inputs, chunk, columns, reading), float("-inf")
            )
        tile = Tile(z, v, u, columns, o, True)
        m, s, student, states = _add_tile(
            m, s, student, states, families, tile, chunk, inputs, rows
        )
    n = n_rows.to(tl.int64)
    out = packets_ptr + index.to(tl.int64) * rows.height * n + chunk.row
    core = Core(m, s)
    softmax.store_sums(out, n, core, student, inputs, rows)
    if inputs.labels is not None:
        softmax.store_target(out, n, softmax.load_target(chunk, inputs), chunk, rows)
    for i in tl.static_range(len(families)):
        families[i].store(out, n, states[i], core, chunk, inputs, rows)


@triton.jit(do_not_specialize=["n_rows"])
def merge_kernel(
    out,  # Outputs
    packets_ptr,  # [packets, K, T] fp32
    inputs,  # Inputs: labels and the student's scale
    memory,  # SharedMemory
    families,  # their MERGE
    rows,  # numbers of rows by name: packet, merged, value
    n_rows,
    PACKETS: tl.constexpr,
    CHUNKS: tl.constexpr,  # of the group, of a rank
    BLOCK: tl.constexpr,
):
    """One program: the merge of BLOCK tokens."""
    merge_tokens(
        out,
        packets_ptr,
        inputs,
        memory,
        families,
        rows,
        n_rows,
        tl.program_id(0),
        PACKETS,
        CHUNKS,
        BLOCK,
    )


@triton.jit
def _store_gradient(
    dx_ptr,
    dx_row,
    dx_column,
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
    """Store one tile of the gradient of a row."""
    columns = first + tl.arange(0, BLOCK)
    written = columns < inputs.width
    readable = columns < tl.where(token.ignored, 0, inputs.width)
    x = tl.load(
        inputs.x + token.row * inputs.x_row + columns.to(tl.int64) * inputs.x_column,
        mask=readable,
        other=0.0,
    )
    token = Token(
        token.row,
        token.n,
        token.merged,
        token.whole,
        token.ignored,
        token.student_scale,
        token.places,
        start,
        written,
        readable,
        token.loss,
    )
    dz = tile_gradient(
        widen(x),
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
        BLOCK,
    )
    # its place is computed here: what is known before takes registers all along
    dx = dx_ptr + token.row * dx_row + columns.to(tl.int64) * dx_column
    tl.store(dx, dz.to(dx_ptr.dtype.element_ty), mask=written)


@triton.jit
def _store_lists(exact, first, end, chunk, token, grads, families, inputs, rows, valid_width):
    """Store the gradient at the ids of each list that are columns first .. end - 1, and return the
    ids' places."""
    # by name: Triton 3.6 loses the fields of records in a tuple that grows
    ids = store_exact(
        exact, first, end, chunk, token, grads, families, inputs, rows, valid_width, 0, PUT
    )
    sets = store_exact(
        exact, first, end, chunk, token, grads, families, inputs, rows, valid_width, 1, PUT
    )
    entries = store_exact(
        exact, first, end, chunk, token, grads, families, inputs, rows, valid_width, 2, PUT
    )
    return ids, sets, entries


@triton.jit
def gradient_part(
    program,
    dx_ptr,
    dx_row,
    dx_column,
    inputs,
    merged_ptr,
    grads,
    loss,
    exact,
    families,
    rows,
    n_rows,
    start,
    valid_width,
    STEP: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """STEP columns of one row of the gradient, by their number."""
    PLAIN: tl.constexpr = exact.ids is None and exact.sets is None and exact.entries is None
    steps = tl.cdiv(inputs.width, STEP)
    row = (program // steps).to(tl.int64)
    first = program % steps * STEP
    n, merged = n_rows.to(tl.int64), merged_ptr + row
    whole = tl.load(merged + rows.sum * n)
    ignored = whole == 0.0
    chunk = columns_of_row(inputs, row, 0, valid_width, n_rows, start, -1, False, ignored)
    token = Token(
        row,
        n,
        merged,
        whole,
        ignored,
        chunk.student_scale,
        Lists(start, start, start),
        start,
        False,
        False,
        loss_of_row(loss, row),
    )
    end = tl.minimum(first + STEP, inputs.width)
    if not PLAIN:
        valid_end = tl.minimum(end, valid_width)
        ids, sets, entries = _store_lists(
            exact, first, valid_end, chunk, token, grads, families, inputs, rows, valid_width
        )
        tl.debug_barrier()  # the logits there are read
    if STEP == BLOCK:
        _store_gradient(
            dx_ptr,
            dx_row,
            dx_column,
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
            BLOCK,
        )
    else:
        BYTES: tl.constexpr = BLOCK * inputs.x.dtype.element_ty.primitive_bitwidth // 8
        # stages of a teacher's and a bias's tiles, too, fit into 48 KiB
        STAGES: tl.constexpr = 3 if BYTES <= 4096 else (2 if BYTES <= 8192 else 1)
        for at in tl.range(first, end, BLOCK, num_stages=STAGES):
            _store_gradient(
                dx_ptr,
                dx_row,
                dx_column,
                at,
                chunk,
                token,
                grads,
                families,
                inputs,
                rows,
                start,
                valid_width,
                PADDED,
                BLOCK,
            )
    if not PLAIN:
        dx = dx_ptr + row * dx_row
        put_lists(dx, dx_column, exact, ids, sets, entries, first, valid_end, start, PUT)


@triton.jit(do_not_specialize=["n_rows", "start", "valid_width"])
def gradient_kernel(
    dx_ptr,
    dx_row,
    dx_column,  # [T, width] out; may be x itself
    inputs,  # Inputs
    merged_ptr,  # [R, T] fp32
    grads,  # upstream gradients by name, see `upstream`
    loss,  # LossGradient
    exact,  # Lists: memory for the gradient at their ids, None: it is not computed apart
    families,  # their GRADIENT
    rows,  # numbers of the merged rows by name
    n_rows,
    start,
    valid_width,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one tile of one row of the gradient, or some, or COLUMNS and the gradient at the
    ids of lists there.

    Rows run from the last to the first: what the forward read last is still in the L2 cache.
    """
    PLAIN: tl.constexpr = exact.ids is None and exact.sets is None and exact.entries is None
    TILES: tl.constexpr = SOFTCAP_TILES if inputs.post is not None and len(families) == 0 else 1
    STEP: tl.constexpr = TILES * BLOCK if PLAIN else COLUMNS  # as `gradient_columns` says
    gradient_part(
        tl.num_programs(0) - 1 - tl.program_id(0),
        dx_ptr,
        dx_row,
        dx_column,
        inputs,
        merged_ptr,
        grads,
        loss,
        exact,
        families,
        rows,
        n_rows,
        start,
        valid_width,
        STEP,
        PADDED,
        BLOCK,
    )


def gradient_columns(block: int, inputs, families: tuple, apart: bool = False) -> int:
    """Columns of a program of `gradient_kernel`; apart: it computes some of them apart."""
    tiles = 1 if inputs.post is None or families else SOFTCAP_TILES.value
    return COLUMNS.value if apart else tiles * block
