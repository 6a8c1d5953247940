"""The kernels of sampling, and how they are launched; their definition in plain torch is `gumbel`.

z: transformed logits; a program has some of a row's columns, so that few rows occupy a whole GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import MASS, RACE, ceil_div, int_key, launch, pointer_key

LAST: tl.constexpr = tl.constexpr(0x7FFFFFFFFFFFFFFF)
PROGRAMS = 1024  # at least, but for few columns: 2048 take 1 % longer for 262 rows, 4096 10 %


@triton.jit(do_not_specialize=["seed", "start", "n_rows"])
def race_kernel(
    best_ptr,  # [S, T] float64 out: largest score of a program's columns, inf where one is NaN
    winner_ptr,  # [S, T] int64 out: the lowest id that has it
    z_ptr,  # [T, W] fp32, contiguous
    ids_ptr,  # [T, W] int64, contiguous, or None for the ids from `start` on
    positions_ptr,  # [T] int64
    seed: tl.uint64, start, n_rows, width, step,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the largest z - log(variate) of `step` columns of a row.

    variate = -log(1 - u) >= u, so that z - log(u) is no less than the score. Tiles in which this fp32 bound is below
    the best score so far, nearly all of them, need no logarithms in float64.
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
        z = tl.load(z_ptr + row * width + columns, mask=columns < end, other=-float("inf"))
        if ids_ptr is None:
            ids = (start + columns).to(tl.int64)
        else:
            ids = tl.load(ids_ptr + row * width + columns, mask=columns < end, other=0)
        high, low, _, _ = tl.philox(seed, position_low, position_high, ids.to(tl.uint32), position_low * 0)
        reach = z + (1e-4 - tl.log(high.to(tl.float32) * 2.0**-32))  # 1e-4: far more than rounding takes away
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
def mass_kernel(
    total_ptr,  # [S, T] int64 out
    z_ptr,  # [T, W] fp32, contiguous
    peak_ptr,  # [T] fp32
    lowest_ptr,  # [T] float64
    unit, n_rows, width, step,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the sum of the masses of `step` columns of a row."""
    row = (tl.program_id(0) % n_rows).to(tl.int64)
    begin = tl.program_id(0) // n_rows * step
    end = tl.minimum(begin + step, width)
    peak = tl.load(peak_ptr + row).to(tl.float64)
    lowest = tl.load(lowest_ptr + row)
    total = tl.zeros([BLOCK], tl.int64)
    for first in range(begin, end, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + row * width + columns, mask=columns < end, other=-float("inf"))
        drop = z.to(tl.float64) - peak
        mass = tl.maximum(tl.ceil(tl.exp(drop) * unit), 1.0)
        total += tl.where((z > -float("inf")) & (drop >= lowest), mass, 0.0).to(tl.int64)
    tl.store(total_ptr + tl.program_id(0), tl.sum(total, axis=0))


def _parts(n_rows: int, width: int, block: int) -> tuple[int, int]:
    """Programs of a row, and the columns of each."""
    tiles = ceil_div(width, block)
    step = ceil_div(tiles, min(tiles, ceil_div(PROGRAMS, n_rows))) * block
    return ceil_div(width, step), step


def best_scores(z, positions, seed: int, start: int, ids=None):
    """The largest score and its id per token, see `gumbel.best_scores`."""
    z, (n_rows, width) = z.contiguous(), z.shape
    if z.numel() == 0:
        return z.new_full((n_rows,), -torch.inf, dtype=torch.float64), positions.new_full((n_rows,), LAST.value)
    parts, step = _parts(n_rows, width, RACE.block)
    best = z.new_empty((parts, n_rows), dtype=torch.float64)
    winner = positions.new_empty((parts, n_rows))
    launch(
        race_kernel, parts * n_rows, (z.device, *map(pointer_key, (z, ids)), int_key(width), int_key(step)), RACE,
        best, winner, z, ids, positions, seed, start, n_rows, width, step,
    )  # fmt: skip
    if parts == 1:
        return best[0], winner[0]
    top = best.amax(0)
    return top, torch.where(best == top, winner, LAST.value).amin(0)


def total_mass(z, peak, lowest, unit: float):
    """The sum of the masses of each token's columns, see `gumbel.total_mass`."""
    z, (n_rows, width) = z.contiguous(), z.shape
    if z.numel() == 0:
        return z.new_zeros((n_rows,), dtype=torch.int64)
    parts, step = _parts(n_rows, width, MASS.block)
    total = z.new_empty((parts, n_rows), dtype=torch.int64)
    launch(
        mass_kernel, parts * n_rows, (z.device, pointer_key(z), int_key(width), int_key(step)), MASS,
        total, z, peak, lowest, unit, n_rows, width, step,
    )  # fmt: skip
    return total.sum(0)
