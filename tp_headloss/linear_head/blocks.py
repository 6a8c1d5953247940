"""The memory planner: how logits that never exist as a whole are cut into blocks that fit into a
budget of bytes."""

import functools
from typing import NamedTuple

TILE = 128  # block sizes are multiples of this many tokens and ids, for the GEMMs' sake


class Sizes(NamedTuple):
    """Sizes of a call, from which its blocks are planned."""

    tokens: int  # at least 1
    width: int
    hidden: int
    # of a logit in a block: of the operands' dtype, and 4 more where it is fp32, and a teacher's
    bytes: int
    # True if operands are of half precision, so that sums over blocks need fp32 memory of their own
    sums: bool
    weight_sums: bool  # True if dW is written in half precision

    def row(self, columns: int) -> int:
        """Bytes of so many logits of one token."""
        return row_stride(columns) * self.bytes


class Blocks(NamedTuple):
    """Sizes of the blocks into which the logits are cut: forward by tokens, backward by tokens and
    ids."""

    forward: int
    tokens: int
    columns: int


def row_stride(width: int) -> int:
    """Elements between rows that GEMMs read and write well: a multiple of 32 (with 64, none is
    faster)."""
    return -(-width // 32) * 32


def _even_block_size(total: int, most: int) -> int:
    """The size of the fewest even blocks that are no larger than `most`, a multiple of the tile."""
    if most >= total:
        return total
    return min(most, -(-total // -(-total // most) // TILE) * TILE)


def _rows_that_fit(n_bytes: int, each: int) -> int:
    """Rows (or columns) of so many bytes each that fit, in tiles."""
    return n_bytes // max(each, 1) // TILE * TILE


def _tokens_that_fit(sizes: Sizes, budget: int) -> int | None:
    return tokens_that_fit(sizes.tokens, sizes.row(sizes.width), budget)


def tokens_that_fit(tokens: int, each: int, budget: int) -> int | None:
    """Tokens of the fewest even blocks that fit, of so many bytes a token; None: not one tile."""
    if tokens * each <= budget:
        return tokens
    most = _rows_that_fit(budget, each)
    return _even_block_size(tokens, most) if most else None


@functools.lru_cache(maxsize=256)
def one_sweep_tokens(sizes: Sizes, budget: int) -> int | None:
    """Tokens of a block whose logits, and an fp32 dW if it has to be summed in memory of its own,
    fit in the budget."""
    whole = _tokens_that_fit(sizes, budget)
    if whole == sizes.tokens or not sizes.weight_sums:
        return whole
    return _tokens_that_fit(sizes, max(0, budget - 4 * sizes.width * sizes.hidden))


# Multiplications that one multiprocessor does while a byte of fp32 sums is read or written, and per
# block, while its kernels begin and end: an H200 multiplies 2.6e12 pairs of bf16 a second on each.
# Fitted to plans for 8192 x 4096 and 16032, 32064 and 128256 ids, in turns with four GEMMs. Of
# these and others (`MEASURED_PLANS` of the tests), the plan of the least cost is at most 3 % slower
# than the fastest
PER_BYTE, PER_BLOCK = 0.6, 100e6
PROCESSORS, GEMM_TILE = 132, (128, 256)  # of an H100 or H200: other GPUs get the same blocks


def _elements(rows: int, columns: int) -> float:
    """Elements of a product that each multiprocessor makes: halfway between an even share and whole
    rounds of tiles. Those that idle in the last round leave power to the others, which multiply
    faster."""
    tiles = -(-rows // GEMM_TILE[0]) * -(-columns // GEMM_TILE[1])
    rounds = -(-tiles // PROCESSORS) * GEMM_TILE[0] * GEMM_TILE[1]
    return (rounds + rows * columns / PROCESSORS) / 2


def _backward_cost(sizes: Sizes, tokens: int, columns: int) -> float:
    """Multiplications per multiprocessor that a backward in blocks takes, with everything else in
    the same unit."""
    # a main_grad is added to by the only block, too
    adds_weight = tokens < sizes.tokens or not sizes.weight_sums

    def block(t: int, c: int) -> float:
        gemms = (
            sizes.hidden * _elements(t, c)
            + c * _elements(t, sizes.hidden)
            + t * _elements(c, sizes.hidden)
        )
        # and 4 more, which its GEMM hides
        bytes_of_hidden = 4 * t * sizes.hidden * (columns < sizes.width)
        bytes_of_weight = 8 * c * sizes.hidden * adds_weight
        return gemms + PER_BYTE * (bytes_of_hidden + bytes_of_weight) + PER_BLOCK

    return sum(
        rows * times * block(t, c)
        for t, rows in ((tokens, sizes.tokens // tokens), (sizes.tokens % tokens, 1))
        for c, times in ((columns, sizes.width // columns), (sizes.width % columns, 1))
        if t and c
    )


def _least_cost(sizes: Sizes, blocks_of_tokens: int, blocks_of_ids: int) -> float:
    """A bound of `_backward_cost` for so many blocks, which grows with both numbers."""
    n, width, hidden = sizes.tokens, sizes.width, sizes.hidden
    products = 3 * n * width * hidden / PROCESSORS
    bytes_of_hidden = 4 * n * hidden * blocks_of_ids * (blocks_of_ids > 1)
    bytes_of_weight = 8 * width * hidden * blocks_of_tokens * (blocks_of_tokens > 1)
    n_blocks = blocks_of_tokens * blocks_of_ids
    return products + PER_BYTE * (bytes_of_hidden + bytes_of_weight) + PER_BLOCK * n_blocks


@functools.lru_cache(maxsize=256)
def recompute_blocks(sizes: Sizes, budget: int) -> Blocks | None:
    """The blocks that fit in the budget and take the shortest time: tiles of their products fill
    the multiprocessors, dW is read and written once more per block of tokens, dH per block of ids.
    Half precision takes fp32 sums, too."""
    forward, best = _tokens_that_fit(sizes, budget), None
    n, width = sizes.tokens, sizes.width
    for parts in range(1, -(-n // TILE) + 1):
        tokens = n if parts == 1 else _even_block_size(n, -(-n // parts // TILE) * TILE)
        left = budget - (4 * width * sizes.hidden if parts > 1 and sizes.weight_sums else 0)
        whole = tokens * sizes.row(width) <= left
        candidates = range(width, width + 1)
        if not whole:
            left -= 4 * tokens * sizes.hidden if sizes.sums else 0
            most = min(_rows_that_fit(left, tokens * sizes.bytes), width)
            candidates = range(most, most // 2, -TILE)
        for columns in candidates:
            blocks = -(-n // tokens), -(-width // columns)
            if best is not None and _least_cost(sizes, *blocks) >= best[0]:
                break  # fewer columns only cost more
            cost = _backward_cost(sizes, tokens, columns)
            if best is None or cost < best[0]:
                best = cost, tokens, columns
        if whole:  # fewer tokens only cost more
            break
    return None if forward is None or best is None else Blocks(forward, *best[1:])


def minimum_budget(planner, sizes: Sizes) -> int:
    """Smallest budget in bytes, to 1/64, with which `planner`, one of the two above, finds a
    plan."""
    low, high = 0, 1 << 12
    while planner(sizes, high) is None:
        low, high = high, 2 * high
    while high - low > high // 64:
        middle = (low + high) // 2
        low, high = (low, middle) if planner(sizes, middle) is not None else (middle, high)
    return high


DEFAULT_BLOCK = 128 << 20  # bytes


def planned(planner, sizes: Sizes, budget: int | None, min_sums: int = 0, reserved: int = 0):
    """Return the plan of `planner` for a budget, None if that is too small. Without one: room for a
    block and, in half precision, the smaller of the sums in fp32, at least `min_sums` bytes.
    reserved: bytes that the caller holds."""
    if budget is not None:
        return planner(sizes, max(0, budget - reserved))
    smaller = 4 * sizes.hidden * min(sizes.tokens, sizes.width) if sizes.sums else 0
    default = DEFAULT_BLOCK + max(smaller, min_sums) - reserved
    return planner(sizes, max(0, default)) or planner(sizes, minimum_budget(planner, sizes))


def refusal(planner, sizes: Sizes, budget: int | None, reserved: int = 0) -> str:
    """Message for a budget that is too small, with the smallest one that works."""
    minimum = reserved + minimum_budget(planner, sizes)
    return f"budget must be at least {minimum} bytes for blocks of {min(TILE, sizes.tokens)} tokens, got {budget}"
