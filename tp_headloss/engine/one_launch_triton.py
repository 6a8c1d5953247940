"""Launches of the kernels that write packets and the gradient of a loss together; see `one_launch`."""

from __future__ import annotations

import torch

from ..request import Request
from . import rows_triton
from .device_inputs import inputs_of
from .launch import (
    GRADIENT_AGAIN,
    INTERPRETED,
    Launch,
    ceil_div,
    dtype_key,
    launch,
    pointer_key,
    rows_launch,
    statistics_launch,
)
from .rows_triton import LossTerms, TermBits
from .sums_triton import divided_by, token_count


def statistics_and_gradient(packets, gradient, kept, request: Request, reduction, sums=None) -> None:
    """Write the packets [chunks, rows, N] of a call, the gradient [N, width] of its reduced loss for the expected
    upstream gradient, and into `kept` [4, N] fp32 what `gradient_again` reads; sums: of the merge that follows."""
    facts, (inputs, prepared) = request.facts, inputs_of(request)
    n_rows, width = gradient.shape
    block, rows = statistics_launch(facts.chunk_size).block, prepared.rows
    how = rows_launch(width, gradient.element_size())
    loss, terms = _loss_terms(request, reduction, sums), _term_bits(reduction.plan)
    padded = facts.valid_width < width
    plan = facts.chunks, ceil_div(block, 512 // gradient.element_size()), how.block, padded
    out = _exact(gradient)
    launch(
        rows_triton.packets_and_gradient_kernel, n_rows,
        (
            packets.device, prepared.variant, plan, terms, pointer_key(out), len(loss.coefficients),
            pointer_key(loss.denominator_ptr), dtype_key(loss.weight), sums is None,
        ),
        Launch(block, how.warps),
        packets, out, kept, inputs, loss, rows.statistics, rows.packet, n_rows, facts.valid_width, facts.ignore_index,
        plan, terms,
    )  # fmt: skip
    if out is not gradient:
        gradient.data.copy_(out)


def gradient_again(gradient, request: Request, kept, upstream, expected, again: bool) -> None:
    """Write the rows of the gradient that were written for another upstream gradient of the loss than this one, or with
    `again` all of them; the next forward expects this one."""
    facts, (inputs, prepared) = request.facts, inputs_of(request)
    n_rows, width = gradient.shape
    padded, how = facts.valid_width < width, rows_launch(width, gradient.element_size())
    out = _exact(gradient)
    launch(
        rows_triton.gradient_again_kernel, min(n_rows, GRADIENT_AGAIN),
        (gradient.device, prepared.variant, again, padded, pointer_key(out), pointer_key(upstream)), how,
        out, kept, upstream, expected, inputs, n_rows, facts.valid_width, facts.ignore_index, again, padded,
    )  # fmt: skip
    if out is not gradient:
        gradient.data.copy_(out)


def _exact(gradient):
    """Return the gradient, or for the interpreter, which truncates to bf16 where hardware rounds, fp32 in its place."""
    return gradient.float() if INTERPRETED and gradient.dtype == torch.bfloat16 else gradient


def _loss_terms(request: Request, reduction, sums) -> LossTerms:
    plan, weight, denominator, expected = reduction
    if denominator is None:
        denominator = token_count(request.tensors.labels, weight, request.facts.ignore_index)
    parts = None if sums is None else sums.parts
    return LossTerms(plan.coefficients, weight, *divided_by(denominator), expected, parts)


def _term_bits(plan) -> TermBits:
    names = plan.statistics[: len(plan.coefficients)]
    statistics = (sum(1 << i for i, name in enumerate(names) if name == kind) for kind in TermBits._fields[:3])
    return TermBits(*statistics, plan.squares, plan.negatives)
