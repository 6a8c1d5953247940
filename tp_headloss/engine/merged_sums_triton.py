"""Sums over all tokens that a merge makes of the values that it stores: a launch less than `sums_triton.sums_kernel`.

Each group of tokens is added up where it is merged. The one that ends last finds the parts of all others in memory, and
adds them up in the order of the tokens; so the result does not depend on which one it was.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..statistics.records_triton import MergedSums
from .launch import INTERPRETED, MERGE, ceil_div, dtype_key, pointer_key
from .sums_triton import divided_by, divisor_of, store_loss, store_sum


class SumBits(NamedTuple):
    """Which values of BLOCK tokens a merge adds up, and how."""

    values: int  # how many
    rows: int  # byte i: the row of value i among the merge's values, or HITS
    squares: int  # as in `sums_kernel`, and so on
    negatives: int
    by_count: bool


HITS = tl.constexpr(255)
FIRST_PART = tl.constexpr(2)  # place of the first group's parts
ASSUMED_UPSTREAM, ROWS_DONE = tl.constexpr(1), tl.constexpr(2)  # places in what `assume_kernel` writes


@triton.jit
def start_sums(parts_ptr):
    """Note that no group is merged; one program does it, in a kernel before the merge."""
    if tl.program_id(0) == 0:
        tl.store((parts_ptr + 1).to(tl.pointer_type(tl.int32)), 0)


@triton.jit
def rows_done(assumed_ptr):
    """Pointer to the numbers of rows that are done in each group, which are behind `assume_kernel`'s two others."""
    return (assumed_ptr + ROWS_DONE).to(tl.pointer_type(tl.int32))


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def assume_kernel(
    # fp64 out: the factor of the loss's gradient, as in `loss_of_row`; the upstream gradient that it is for; and 0 rows
    # of each group that are done, int32
    assumed_ptr,
    parts_ptr,  # of the merge's sums, or None
    upstream_ptr,  # [] fp32: upstream gradient of the loss that is assumed
    labels_ptr,  # [T]
    weight_ptr,  # [T] fp32 or None
    denominator_ptr,  # [] fp64 or None: then `denominator`, or the count
    denominator, n_rows, ignore_index,
    BY_COUNT: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The only program: what a gradient is written for before its loss is known, see `rows_triton`."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if parts_ptr is not None:
        start_sums(parts_ptr)
    count = tl.zeros([BLOCK], tl.float64)
    for first in range(0, n_rows, BLOCK):
        group = first // GROUP + tl.arange(0, BLOCK // GROUP)
        tl.store(rows_done(assumed_ptr) + group, 0, mask=group * GROUP < n_rows)
        if BY_COUNT:
            token = first + tl.arange(0, BLOCK)
            y = tl.load(labels_ptr + token, mask=token < n_rows, other=0).to(tl.int64)
            valid = (token < n_rows) & (y != ignore_index)
            if weight_ptr is not None:
                count += tl.load(weight_ptr + token, mask=valid, other=0.0)
            else:
                count += valid.to(tl.float64)
    upstream = tl.load(upstream_ptr)
    divisor = divisor_of(denominator_ptr, tl.sum(count, axis=0) if BY_COUNT else denominator)
    tl.store(assumed_ptr, upstream * (1.0 / divisor))
    tl.store(assumed_ptr + ASSUMED_UPSTREAM, upstream.to(tl.float64))


@triton.jit
def _stored_value(out, token, n, valid, ROW: tl.constexpr):
    """A row of the merge's values, or its hits, in float64."""
    if ROW == HITS:
        value = tl.load(out.hits + token, mask=valid, other=0)
    else:
        value = tl.load(out.value + ROW * n + token, mask=valid, other=0.0)
    return value.to(tl.float64)


@triton.jit
def add_up(sums, out, valid, token, n, group, groups, BLOCK: tl.constexpr):
    """Sum the values of a group of tokens that a merge has stored; the group that is merged last adds up the parts of
    all, in the order of the tokens."""
    VALUES: tl.constexpr = sums.plan.values
    ROWS: tl.constexpr = sums.plan.rows
    SQUARES: tl.constexpr = sums.plan.squares
    NEGATIVES: tl.constexpr = sums.plan.negatives
    BY_COUNT: tl.constexpr = sums.plan.by_count
    weight = valid.to(tl.float64)
    if sums.weight is not None:
        weight = tl.load(sums.weight + token, mask=valid, other=0.0).to(tl.float64)
    at = sums.parts + FIRST_PART + group
    tl.debug_barrier()  # the values are stored
    for i in tl.static_range(VALUES):
        value = _stored_value(out, token, n, valid, (ROWS >> (8 * i)) & 255)
        if (SQUARES >> i) & 1:
            value *= value
        tl.store(at + i * groups, tl.sum(value * weight, axis=0))
    tl.store(at + VALUES * groups, tl.sum(weight, axis=0))
    tl.debug_barrier()
    if tl.atomic_add((sums.parts + 1).to(tl.pointer_type(tl.int32)), 1) == groups - 1:
        loss = 0.0
        for i in tl.static_range(VALUES):
            total = _sum_of_parts(sums.parts, i, groups, BLOCK)
            loss = store_sum(sums.sums, i, total, loss, sums.coefficients, NEGATIVES)
        tokens = _sum_of_parts(sums.parts, VALUES, groups, BLOCK)
        tl.store(sums.sums + VALUES, tokens)
        divisor = tokens if BY_COUNT else sums.denominator
        store_loss(sums.loss, sums.parts, loss, sums.denominator_ptr, divisor)


@triton.jit
def _sum_of_parts(parts_ptr, i: tl.constexpr, groups, BLOCK: tl.constexpr):
    """Sum of value i over all groups."""
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, groups, BLOCK):
        group = first + tl.arange(0, BLOCK)
        total += tl.load(parts_ptr + FIRST_PART + i * groups + group, mask=group < groups, other=0.0)
    return tl.sum(total, axis=0)


@functools.lru_cache(maxsize=256)
def _sum_bits(layout, plan, by_count: bool) -> SumBits | None:
    """The plan as a merge takes it; None if it does not have all these values."""
    rows = {name: i for i, name in enumerate(layout.values)} | {"hits": HITS.value}
    places = [rows.get(name) for name in plan.statistics]
    if None in places or len(layout.values) >= HITS.value:
        return None
    bits = SumBits(
        len(places), sum(place << 8 * i for i, place in enumerate(places)), plan.squares, plan.negatives, by_count
    )
    return bits if INTERPRETED else tl.constexpr(bits)


def sums_for_merge(request, reduction) -> MergedSums | None:
    """Memory for the sums that the last merge adds up, and how; None if it does not have all values of the
    reduction."""
    plan, weight, denominator, _ = reduction
    bits, (n_rows, _width) = _sum_bits(request.layout, plan, denominator is None), request.tensors.logits.shape
    if bits is None or n_rows == 0:
        return None
    new, values = request.tensors.logits.new_empty, len(plan.statistics)
    parts = new(FIRST_PART.value + ceil_div(n_rows, MERGE.block) * (values + 1), dtype=torch.float64)
    sums, loss = new(values + 1, dtype=torch.float32), new((), dtype=torch.float32)
    return MergedSums(parts, sums, loss, weight, *divided_by(denominator), plan.coefficients, bits)


def sums_key(sums: MergedSums) -> tuple:
    """Everything about the sums that Triton compiles into a kernel."""
    terms = None if sums.coefficients is None else len(sums.coefficients)
    return terms, dtype_key(sums.weight), pointer_key(sums.denominator_ptr), sums.plan
