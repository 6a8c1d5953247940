"""Launches of the kernels that compute statistics and the gradient of a loss together; see `one_launch`."""

from __future__ import annotations

import torch

from ..statistics.records_triton import LossGradient
from . import rows_triton
from .assumed_loss_triton import ROWS_DONE, assume_kernel
from .device_inputs import inputs_of
from .launch import (
    ASSUME,
    GRADIENT_AGAIN,
    MERGE,
    Launch,
    ceil_div,
    dtype_key,
    launch,
    may_begin_early,
    pointer_key,
    rows_launch,
    statistics_launch,
)
from .request import Request
from .rows_triton import AssumedLoss, Plan
from .sums_triton import divided_by


def statistics_and_gradient(packets, gradient, request: Request, reduction):
    """Write the packets [chunks, rows, N] of a call, and the gradient [N, width] of its reduced loss for the expected
    upstream gradient -> [merged rows, values, *flags] as `merge_packets`, and a note for `gradient_again`."""
    facts, (inputs, prepared) = request.facts, inputs_of(request)
    n_rows, width = gradient.shape
    block, rows, how = statistics_launch(facts.chunk_size).block, prepared.rows, rows_launch(width, gradient.itemsize)
    parts, padded = ceil_div(block, 512 // gradient.itemsize), facts.valid_width < width
    early = may_begin_early(packets.device)
    plan = Plan(facts.chunks, MERGE.block, parts, how.block, padded, early)
    grads = {name: (c, True) if squared else (c,) for name, c, squared in reduction.plan.gradients}
    outputs = request.layout.empty_outputs(packets, n_rows, torch.float32)
    loss = AssumedLoss(_assumed(request, reduction), reduction.weight)
    launch(
        rows_triton.packets_and_gradient_kernel, n_rows,
        (
            packets.device, prepared.variant, plan, pointer_key(gradient), tuple(grads),
            *(len(g) for g in grads.values()), dtype_key(loss.weight),
        ),
        Launch(block, how.warps, early=early),
        rows.outputs(outputs), packets, gradient, inputs, rows.grads(*map(grads.get, rows.grads._fields)), loss,
        rows.statistics, rows.merge, rows.merge_rows, n_rows, facts.valid_width, facts.ignore_index, plan,
    )  # fmt: skip
    return outputs, loss.assumed


def gradient_again(gradient, request: Request, merged, grads: dict, loss, assumed, expected, again: bool):
    """Write the gradient again if it was written for another upstream gradient of the loss than this one, or with
    `again` in any case. assumed: what the forward wrote it for; expected: what the next forward will assume, written
    here. grads, loss: as in `logits_gradient`."""
    facts, (inputs, prepared) = request.facts, inputs_of(request)
    n_rows, width = gradient.shape
    padded, rows, loss = facts.valid_width < width, prepared.rows, LossGradient(*loss)
    how = rows_launch(width, 4 * gradient.itemsize)  # narrower, because a bias would spill registers
    kinds = tuple(grads), *(len(g) for g in grads.values()), dtype_key(loss.weight), pointer_key(loss.upstream)
    launch(
        rows_triton.gradient_again_kernel, min(n_rows, GRADIENT_AGAIN),
        (gradient.device, prepared.variant, again, padded, pointer_key(gradient), kinds), how,
        gradient, assumed, expected, inputs, merged, rows.grads(*map(grads.get, rows.grads._fields)), loss, rows.merged,
        n_rows, facts.valid_width, again, padded,
    )  # fmt: skip


def _assumed(request: Request, reduction) -> torch.Tensor:
    """Return what a loss's gradient is written for before the loss is known, see `AssumedLoss`."""
    _plan, weight, denominator, expected = reduction
    labels, ignore_index = request.tensors.labels, request.facts.ignore_index
    given, number = divided_by(denominator)
    groups = ceil_div(labels.numel(), MERGE.block)
    assumed = labels.new_empty(ROWS_DONE.value + ceil_div(groups, 2), dtype=torch.float64)
    by_count = denominator is None
    variant = inputs_of(request)[1].variant, dtype_key(weight), pointer_key(given), by_count
    launch(
        assume_kernel, 1, (labels.device, *variant), ASSUME,
        assumed, expected, labels, weight, given, number, labels.numel(), ignore_index,
        by_count, MERGE.block, may_begin_early(labels.device),
    )  # fmt: skip
    return assumed
