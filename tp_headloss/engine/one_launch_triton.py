"""Launches of the kernels that write packets and the gradient of a loss together; see `one_launch`."""

from __future__ import annotations

import torch

from ..request import Request
from ..statistics.records_triton import LossGradient, MergedSums
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
from .rows_triton import ExpectedLoss, Plan
from .sums_triton import divided_by, token_count


def statistics_and_gradient(
    packets, gradient, written_for, request: Request, reduction, sums: MergedSums | None
) -> None:
    """Write the packets [chunks, rows, N] of a call, the gradient [N, width] of its reduced loss for the expected
    upstream gradient, and that into `written_for` [N] fp32; sums: of the merge that follows."""
    facts, (inputs, prepared) = request.facts, inputs_of(request)
    n_rows, width = gradient.shape
    block, rows, how = statistics_launch(facts.chunk_size).block, prepared.rows, rows_launch(width, gradient.itemsize)
    parts, padded = ceil_div(block, 512 // gradient.itemsize), facts.valid_width < width
    plan = Plan(facts.chunks, parts, how.block, padded)
    grads = {name: (c, True) if squared else (c,) for name, c, squared in reduction.plan.gradients}
    loss, out = _expected_loss(request, reduction, sums), _exact(gradient)
    launch(
        rows_triton.packets_and_gradient_kernel, n_rows,
        (
            packets.device, prepared.variant, plan, pointer_key(out), *(len(g) for g in grads.values()), tuple(grads),
            pointer_key(loss.denominator_ptr), dtype_key(loss.weight), sums is None,
        ),
        Launch(block, how.warps),
        packets, out, written_for, inputs, rows.grads(*map(grads.get, rows.grads._fields)), loss,
        rows.statistics, rows.packet, n_rows, facts.valid_width, facts.ignore_index, plan,
    )  # fmt: skip
    if out is not gradient:
        gradient.data.copy_(out)


def gradient_again(gradient, request: Request, merged, grads: dict, loss, written_for, expected, again: bool) -> None:
    """Write the rows of the gradient that were written for another upstream gradient of the loss than this one, or with
    `again` all of them; the next forward expects this one. grads, loss: as in `logits_gradient`."""
    facts, (inputs, prepared) = request.facts, inputs_of(request)
    n_rows, width = gradient.shape
    padded, rows, loss, out = facts.valid_width < width, prepared.rows, LossGradient(*loss), _exact(gradient)
    how = rows_launch(width, 4 * gradient.itemsize)  # narrower, because a bias would spill registers
    kinds = tuple(grads), *(len(g) for g in grads.values()), dtype_key(loss.weight), pointer_key(loss.upstream)
    launch(
        rows_triton.gradient_again_kernel, min(n_rows, GRADIENT_AGAIN),
        (gradient.device, prepared.variant, again, padded, pointer_key(out), kinds), how,
        out, written_for, expected, inputs, merged, rows.grads(*map(grads.get, rows.grads._fields)), loss, rows.merged,
        n_rows, facts.valid_width, again, padded,
    )  # fmt: skip
    if out is not gradient:
        gradient.data.copy_(out)


def _exact(gradient):
    """Return the gradient, or for the interpreter, which truncates to bf16 where hardware rounds, fp32 in its place."""
    return gradient.float() if INTERPRETED and gradient.dtype == torch.bfloat16 else gradient


def _expected_loss(request: Request, reduction, sums) -> ExpectedLoss:
    _plan, weight, denominator, expected = reduction
    if denominator is None:
        denominator = token_count(request.tensors.labels, weight, request.facts.ignore_index)
    return ExpectedLoss(expected, weight, *divided_by(denominator), None if sums is None else sums.parts)
