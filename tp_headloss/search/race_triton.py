"""The kernels of sampling, and how they are launched; their definition in plain torch is `race`.

z: transformed logits of any type, rows contiguous; a program has a part of a row, so that few rows
occupy a whole GPU.
"""

import torch
import triton
import triton.language as tl

from ..engine.launch import LARGEST, MAXIMA, RACE, ceil_div, int_key, launch, pointer_key
from .keys import NO_KEY

LAST: tl.constexpr = tl.constexpr(0x7FFFFFFFFFFFFFFF)
LOW: tl.constexpr = tl.constexpr(0xFFFFFFFF)  # `logit_keys.LOW`
PROGRAMS = 1024  # at least, but for few columns: 2048 take 1 % longer for 262 rows, 4096 10 %


@triton.jit(do_not_specialize=["seed", "start", "n_rows"])
def race_kernel(
    best_ptr,  # [S, T] float64 out: largest score of a program's columns, inf where one is NaN
    winner_ptr,  # [S, T] int64 out: the lowest id that has it
    z_ptr,  # [T, W]
    ids_ptr,  # [T, W] int64, contiguous, or None for the ids from `start` on
    positions_ptr,  # [T] int64
    seed: tl.uint64,
    start,
    n_rows,
    row_stride,
    width,
    step,
    BLOCK: tl.constexpr,
):
    """One program: the largest z - log(variate) of `step` columns of a row.

    variate = -log(1 - u) >= u, so that z - log(u) is no less than the score. Tiles in which this
    fp32 bound is below the best score so far, nearly all of them, need no logarithms in float64.
    """
    row = (tl.program_id(0) % n_rows).to(tl.int64)
    begin = tl.program_id(0) // n_rows * step
    end = tl.minimum(begin + step, width)
    position = tl.load(positions_ptr + row)
    position_low, position_high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    best = tl.full([BLOCK], -float("inf"), tl.float64)
    winner = tl.full([BLOCK], LAST, tl.int64)
    bound = -float("inf")
    for first in range(begin, end, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + row * row_stride + columns, mask=columns < end, other=-float("inf")).to(
            tl.float32
        )
        if ids_ptr is None:
            ids = (start + columns).to(tl.int64)
        else:
            ids = tl.load(ids_ptr + row * width + columns, mask=columns < end, other=0)
        high, low, _, _ = tl.philox(
            seed, position_low, position_high, ids.to(tl.uint32), position_low * 0
        )
        # 1e-4: far more than rounding takes away
        reach = z + (1e-4 - tl.log(high.to(tl.float32) * 2.0**-32))
        if tl.max((reach < bound).to(tl.int32) ^ 1, axis=0) > 0:
            bits = (high.to(tl.int64) << 20) | (low.to(tl.int64) >> 12)
            uniform = (bits.to(tl.float64) + 0.5) * 2.0**-52
            score = z.to(tl.float64) - tl.log(-tl.log(1.0 - uniform))
            score = tl.where(score == score, score, float("inf"))
            better = (score > best) | ((score == best) & (ids < winner))
            best, winner = tl.where(better, score, best), tl.where(better, ids, winner)
            bound = tl.max(best, axis=0).to(tl.float32)
    top = tl.max(best, axis=0)
    tl.store(best_ptr + tl.program_id(0), top)
    tl.store(winner_ptr + tl.program_id(0), tl.min(tl.where(best == top, winner, LAST), axis=0))


@triton.jit(do_not_specialize=["n_rows"])
def maxima_kernel(
    maxima_ptr,  # [T, G] fp32 out
    z_ptr,  # [T, W]
    n_rows,
    row_stride,
    width,
    groups,
    BLOCK: tl.constexpr,
):
    """One program: the largest logits of BLOCK of a row's groups, inf for NaN."""
    row = (tl.program_id(0) % n_rows).to(tl.int64)
    group = tl.program_id(0) // n_rows * BLOCK + tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, width, groups):
        columns = first + group
        here = (group < groups) & (columns < width)
        z = tl.load(z_ptr + row * row_stride + columns, mask=here, other=-float("inf")).to(
            tl.float32
        )
        largest = tl.maximum(largest, tl.where(z == z, z, float("inf")))
    tl.store(maxima_ptr + row * groups + group, largest, mask=group < groups)


@triton.jit(do_not_specialize=["n_rows", "start"])
def largest_kernel(
    keys_ptr,  # [T, most] int64 out, filled with `NO_KEY`
    count_ptr,  # [T] int64 out, filled with 0
    mass_ptr,  # [T] int64 out, filled with 0
    z_ptr,  # [T, W]
    bound_ptr,  # [T] fp32
    peak_ptr,  # [T] fp32, or None: no masses
    lowest_ptr,  # [T] float64
    unit,
    start,
    n_rows,
    row_stride,
    width,
    step,
    most,
    BLOCK: tl.constexpr,
):
    """One program: the keys of the large logits among `step` columns of a row, and the sum of its
    masses."""
    row = (tl.program_id(0) % n_rows).to(tl.int64)
    begin = tl.program_id(0) // n_rows * step
    end = tl.minimum(begin + step, width)
    bound = tl.load(bound_ptr + row)
    total = tl.zeros([BLOCK], tl.int64)
    for first in range(begin, end, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + row * row_stride + columns, mask=columns < end, other=-float("inf")).to(
            tl.float32
        )
        z = tl.where(z == z, z, float("inf"))
        found = ((z >= bound) & (z > -float("inf"))).to(tl.int32)
        size = tl.sum(found, axis=0)
        if size > 0:
            place = tl.atomic_add(count_ptr + row, size.to(tl.int64)) + tl.cumsum(found, axis=0) - 1
            bits = (z + 0.0).to(tl.int32, bitcast=True)
            bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
            keys = (bits.to(tl.int64) << 32) | (LOW - (start + columns).to(tl.int64))
            tl.store(keys_ptr + row * most + place, keys, mask=(found > 0) & (place < most))
        if peak_ptr is not None:
            drop = z.to(tl.float64) - tl.load(peak_ptr + row).to(tl.float64)
            mass = tl.maximum(tl.ceil(tl.exp(drop) * unit), 1.0)
            counted = (z > -float("inf")) & (drop >= tl.load(lowest_ptr + row))
            total += tl.where(counted, mass, 0.0).to(tl.int64)
    if peak_ptr is not None:
        tl.atomic_add(mass_ptr + row, tl.sum(total, axis=0))


def _with_rows(z):
    """Logits whose rows are contiguous."""
    return z if z.stride(1) == 1 or z.shape[1] == 1 else z.contiguous()


def _parts(n_rows: int, width: int, block: int) -> tuple[int, int]:
    """Programs of a row, and the columns of each."""
    tiles = ceil_div(width, block)
    parts = min(tiles, ceil_div(PROGRAMS, n_rows))
    step = ceil_div(tiles, parts) * block
    return ceil_div(width, step), step


def best_scores(z, positions, seed: int, start: int, ids=None):
    """The largest score and its id per token, see `race.best_scores`."""
    z, (n_rows, width) = _with_rows(z), z.shape
    positions = positions.contiguous()
    ids = ids if ids is None else ids.contiguous()
    if z.numel() == 0:
        nothing = z.new_full((n_rows,), -torch.inf, dtype=torch.float64)
        nobody = positions.new_full((n_rows,), LAST.value)
        return nothing, nobody
    parts, step = _parts(n_rows, width, RACE.block)
    best = z.new_empty((parts, n_rows), dtype=torch.float64)
    winner = positions.new_empty((parts, n_rows))
    sizes = z.stride(0), width, step
    launch(
        race_kernel,
        parts * n_rows,
        (z.device, *map(pointer_key, (z, ids)), *map(int_key, sizes)),
        RACE,
        best,
        winner,
        z,
        ids,
        positions,
        seed,
        start,
        n_rows,
        *sizes,
    )
    if parts == 1:
        return best[0], winner[0]
    top = best.amax(0)
    winners = torch.where(best == top, winner, LAST.value)
    return top, winners.amin(0)


def group_maxima(z, groups: int) -> torch.Tensor:
    """The largest logit of every groups-th column, see `race.group_maxima`."""
    z, (n_rows, width) = _with_rows(z), z.shape
    maxima = z.new_full((n_rows, groups), -torch.inf, dtype=torch.float32)
    if z.numel():
        sizes = z.stride(0), width, groups
        launch(
            maxima_kernel,
            n_rows * ceil_div(groups, MAXIMA.block),
            (z.device, pointer_key(z), *map(int_key, sizes)),
            MAXIMA,
            maxima,
            z,
            n_rows,
            *sizes,
        )
    return maxima


def largest_logits(z, bound, most: int, start: int, peak=None, lowest=None, unit: float = 0.0):
    """Keys of the logits at or above a bound, their number, and masses, see
    `race.largest_logits`."""
    z, (n_rows, width) = _with_rows(z), z.shape
    keys = bound.new_full((n_rows, most), NO_KEY, dtype=torch.int64)
    count = bound.new_zeros(n_rows, dtype=torch.int64)
    mass = torch.zeros_like(count)
    if z.numel():
        parts, step = _parts(n_rows, width, LARGEST.block)
        sizes = z.stride(0), width, step, most
        launch(
            largest_kernel,
            parts * n_rows,
            (z.device, peak is None, pointer_key(z), *map(int_key, sizes)),
            LARGEST,
            keys,
            count,
            mass,
            z,
            bound,
            peak,
            lowest,
            unit,
            start,
            n_rows,
            *sizes,
        )
    return keys, count, None if peak is None else mass
