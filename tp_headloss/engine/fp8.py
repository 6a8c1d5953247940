"""The gradient of logits in two parts, for products in fp8: of each token the few large entries as
they are, and all others as fp8 numbers of a unit of their own.

An entry is large where it is above `SHARE` of what all entries but the label's add up to (an upper
bound of that, which is known from the token's statistics before its logits are read). So no token
has more than 1 / SHARE of them, and its label. The others are e5m2: a power of two times a number
of 3 bits, from the limit down to 2^-32 of it. What is rounded is less than the limit, so the error
of a product is a small part of that of rounding everything to fp8.

They are rounded up or down at random, up as often as makes the mean right: rounding to the nearest
would move equal entries, of which flat distributions are full, all in one direction. What is random
is a hash of the column, the label and the token's statistics. So a token's bytes depend on its own
logits alone: they are the same on any number of ranks, in any batch, and each time.

Weight and hidden states become e4m3, with one power of two for all, and are rounded in the same
way: a mean that many rows share would move with all of them. All tokens of a call meet the same
rounded weight; what is random there is a hash of the call's labels, too, so that the next batch
meets another one, and errors do not add up over steps.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..statistics import MaybeNone
from .request import Request

SHARE = 2.0**-8
MOST = 260  # large entries of a token with its label: 1 / SHARE + 2, and room for rounding
NOWHERE = 1 << 30  # column of an entry that is none
STATISTICS = "lse", "log_prob"  # whose upstream gradients make entries that are p times one number
GRADIENT, OPERAND = torch.float8_e5m2, torch.float8_e4m3fn
LARGEST_GRADIENT, LARGEST_OPERAND = 57344.0, 448.0
SMALLEST, LARGEST = 2.0**-100, 2.0**100  # of limits and scales
ALIGNED = 16  # sizes of a product in fp8 are multiples
# bits of an fp16 number after those that e5m2 keeps, and of an fp32 number after e4m3's
ROUNDED, ROUNDED_OPERAND = 8, 20
# of rows, in the seeds of an operand's elements
ROWS_APART = 0x9E3779B1
# of a hash of 32 bits: factors of C. Wellons' "Hash Prospector"
FIRST, SECOND, BITS = 0x2C1B3C6D, 0x297A2D39, 0xFFFFFFFF


def padded(size: int) -> int:
    """The size of an operand in fp8."""
    return -(-size // ALIGNED) * ALIGNED


class Units(NamedTuple):
    """Numbers [N] that say how the gradients of tokens are split, and what their units are."""

    unit: torch.Tensor  # fp32, what a number 1 of fp8 stands for: a power of two, with a sign
    seed: torch.Tensor  # int32, of how its entries are rounded
    limit: torch.Tensor  # fp32, units above which an entry is large
    power: torch.Tensor  # fp32, log2 of the units of an entry with z = shift; -inf: there are none
    column: torch.Tensor  # int32, of the label, -1 where it is not here
    at_label: torch.Tensor  # fp32, the label's entry


class LargeEntries(NamedTuple):
    """The large entries of tokens, and the labels', by ascending columns."""

    columns: torch.Tensor  # [N, MOST] int32, `NOWHERE` from a token's count on
    gradients: torch.Tensor  # [N, MOST] fp32
    counts: torch.Tensor  # [N] int32

    @classmethod
    def none(cls, tokens: int, device: torch.device) -> LargeEntries:
        """No entries of so many tokens yet."""
        columns = torch.full((tokens, MOST), NOWHERE, dtype=torch.int32, device=device)
        gradients = torch.empty((tokens, MOST), dtype=torch.float32, device=device)
        return cls(columns, gradients, torch.zeros(tokens, dtype=torch.int32, device=device))

    def of_tokens(self, here: slice) -> LargeEntries:
        return LargeEntries._make([x[here] for x in self])


class Fp8Gradient(NamedTuple):
    """The gradient of some tokens' logits [n, width] in its two parts."""

    unit: torch.Tensor  # [n] fp32, see `Units`
    rows: torch.Tensor | MaybeNone  # [n, padded width] e5m2
    turned: torch.Tensor | MaybeNone  # [padded width, padded n] e5m2, the same bytes, 0 beyond
    large: LargeEntries
    uniform: torch.Tensor | MaybeNone  # [n] fp32, what each entry has besides, see `uniform_part`


def _slope(request: Request, ignored: torch.Tensor):
    """d z / d logit of tokens [N], 0 of ignored ones, whatever their temperatures are."""
    facts, temperatures = request.facts, request.tensors.temperatures
    slope = facts.scale / (facts.temperature if temperatures is None else temperatures)
    return torch.where(ignored, 0.0, slope)


def uniform_part(
    request: Request, merged: torch.Tensor, grads: list[torch.Tensor]
) -> torch.Tensor | MaybeNone:
    """Return what each entry of a token has from statistics whose gradient is one number for all
    ids (label smoothing's) [N] fp32: it stays out of fp8. grads: their upstream gradients [N]."""
    if not grads:
        return None
    ignored = merged[request.layout.merged.index("sum")] == 0
    return torch.where(ignored, 0.0, sum(grads) * _slope(request, ignored))


def units_of(request: Request, merged: torch.Tensor, grads: dict) -> Units:
    """The units of tokens, from merged rows and upstream gradients of `STATISTICS`."""
    facts, x = request.facts, request.tensors
    known = dict(zip(request.layout.merged, merged.unbind(0)))
    whole, others, nothing = known["sum"], known["others"], torch.zeros_like(known["sum"])
    of_lse, of_log_prob = (grads.get(name, nothing) for name in STATISTICS)
    ignored = whole == 0
    slope = _slope(request, ignored)
    common = (of_lse - of_log_prob) * slope  # an entry but the label's is p times that
    bound = torch.where(ignored, 0.0, common.abs() * others)
    limit = torch.maximum(SHARE * bound, SMALLEST * common.abs().clamp(min=1.0))
    unit = 2 * power_of_two(limit / LARGEST_GRADIENT)
    unit = torch.where(limit.isfinite(), unit, torch.nan)
    power = torch.where(ignored, -math.inf, (common.abs() / whole / unit).log2())
    column = x.labels.to(torch.int64) - facts.start
    is_here = ~ignored & (column >= 0) & (column < facts.valid_width)
    column = torch.where(is_here, column, -1).to(torch.int32)
    at_label = (known["target"].exp() / whole * of_lse + others * of_log_prob) * slope
    seed = _seeds(x.labels, known["shift"], whole, facts.start)
    return Units(torch.copysign(unit, common), seed, limit / unit, power, column, at_label)


def _seeds(labels, shift, whole, start: int) -> torch.Tensor:
    """Numbers of tokens [N] int32, the same for equal labels and statistics, from which a shard
    counts hashes of four columns: each column of the vocabulary has the same one in any shard."""
    parts = labels, *[x.contiguous().view(torch.int32) for x in (shift, whole)]
    found = torch.zeros_like(labels, dtype=torch.int64)
    for part in parts:
        found = _mixed(found + part)
    return (found + start // 4 << 32 >> 32).to(torch.int32)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """A hash of the low 32 bits of int64 numbers."""
    for factor, shift in ((FIRST, 15), (SECOND, 16)):
        x = (x & BITS) * factor & BITS
        x = x ^ x >> shift
    return x


def dithered_gradient(x: torch.Tensor, seeds: torch.Tensor, start: int) -> torch.Tensor:
    """Numbers [n, width] from 0 up to `LARGEST_GRADIENT` as e5m2: as fp16, whose first byte is
    e5m2, rounded up as often as its last byte says.

    seeds: [n], `Units.seed`. start: the shard's first column. Four columns of the vocabulary share
    one hash, a byte each.
    """
    columns = start % 4 + torch.arange(x.shape[1], device=x.device)
    noise = _mixed(seeds.to(torch.int64)[:, None] + columns // 4) >> 8 * (columns % 4) & 0xFF
    half = x.to(torch.float16).view(torch.int16) + noise.to(torch.int16)
    return (half & -1 << ROUNDED).view(torch.float16).to(GRADIENT)


def seed_of_call(labels: torch.Tensor) -> torch.Tensor:
    """A number [] int32 of the labels [N] of a call, the same on all ranks."""
    places = torch.arange(1, labels.shape[0] + 1, device=labels.device)
    return ((labels * places).sum() << 32 >> 32).to(torch.int32)


def dithered_operand(x: torch.Tensor, first: int, seed: torch.Tensor) -> torch.Tensor:
    """fp32 numbers [rows, width] with the bits that e4m3 keeps, each rounded towards 0 or away from
    it, away as often as the part that is rounded away says.

    first: number of the first row. seed: [], of all.
    """
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape)
    seeds = ((first + rows) * ROWS_APART & BITS)[:, None] + columns + seed
    noise = _mixed(seeds) >> 32 - ROUNDED_OPERAND
    kept = x.contiguous().view(torch.int32) + noise.to(torch.int32) & -1 << ROUNDED_OPERAND
    return torch.where(x.isnan(), x, kept.view(torch.float32))


def power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The largest power of two that is at most x, for positive fp32 numbers without denormals;
    infinity for NaN."""
    return (x.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)


def operand_scale(largest: torch.Tensor) -> torch.Tensor:
    """The power of two that brings numbers up to `largest` [] into e4m3's range; NaN where that is
    infinite or NaN, because all others would vanish."""
    scale = power_of_two((LARGEST_OPERAND / largest).clamp(SMALLEST, LARGEST))
    return torch.where(largest.isfinite(), scale, torch.nan)
