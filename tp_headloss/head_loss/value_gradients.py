"""Gradients of a loss with respect to the statistics that it sums, without autograd: some
multiplications per block."""

from collections.abc import Callable

import torch

from ..engine.backend import load_backend
from ..engine.reductions import FusedReduction, SumsPlan
from ..engine.request import Request, accumulation_dtype
from .checks import Call
from .token_sums import nonzero


def value_gradients(
    call: Call, request: Request, reduction: FusedReduction | None
) -> Callable | None:
    """Function of the loss's upstream gradient, for `one_sweep`; None unless terms are statistics
    of fixed weights.

    The gradients have the bits of autograd's: they are computed by the kernel that the reduction's
    backward is, or in plain torch by the same operations. (Except on GPUs with a denominator that
    is a number which fp32 does not hold: the reduction's kernel rounds it, this does not.)

    Args:
        call: with a denominator, unless the reduction is a sum.
        request: of the same call, with its tokens in rows.
        reduction: of the same call, None where it is in plain torch.
    """
    plan, layout = call.definition.plan.sums[int(call.sequences is not None)], request.layout
    if plan is None:
        return None
    names = plan.statistics[: len(plan.coefficients)]
    if not names or not set(names) <= layout.differentiable:
        return None
    valid = request.tensors.labels != request.facts.ignore_index
    dtype = accumulation_dtype(request.tensors.logits.dtype)
    weight = None if call.loss_weight is None else request.order.flatten(call.loss_weight)
    if reduction is None:
        rows_of, divisor = _rows_in_torch, nonzero(_divisor(call))
    else:
        rows_of = load_backend("triton").token_sums_gradient
        weight = None if weight is None else weight.float().contiguous()
        divisor = 1.0 / nonzero(_divisor_of_kernel(reduction, valid.device))  # it multiplies

    def gradients_for(upstream):
        upstream, every = upstream.to(dtype), None
        # then no value is read, and all tokens' gradients are known beforehand
        if not plan.squares:
            unread = (torch.empty(valid.shape, dtype=dtype, device=valid.device),) * len(names)
            every = rows_of(upstream, unread, valid, weight, divisor, plan)

        def gradients_of(found, here):
            if every is not None:
                rows = every[:, here]
            else:
                part = None if weight is None else weight[here]
                values = tuple([found[name] for name in names])
                rows = rows_of(upstream, values, valid[here], part, divisor, plan)
            grads: dict[str, torch.Tensor] = {}
            for name, row in zip(names, rows.unbind(0)):
                grads[name] = row if name not in grads else grads[name] + row
            return grads

        return gradients_of

    return gradients_for


def _divisor(call: Call):
    """Return the divisor of a sum over tokens."""
    divisor = 1.0 if call.definition.reduction == "sum" else call.denominator
    assert divisor is not None
    return divisor


def _divisor_of_kernel(reduction: FusedReduction, device) -> torch.Tensor:
    """Return the divisor of a reduction, in memory as the kernel takes it."""
    divisor = reduction.denominator
    if isinstance(divisor, torch.Tensor):
        return divisor
    assert divisor is not None
    return torch.full((), float(divisor), dtype=torch.float64, device=device)


def _rows_in_torch(upstream, values, valid, weight, divisor, plan: SumsPlan) -> torch.Tensor:
    """Gradients [terms, N] of the terms' values: autograd's operations for `reduce_in_torch`, in
    its order."""
    rows = []
    counted = valid if weight is None else valid & (weight != 0)
    for i, (coefficient, value) in enumerate(zip(plan.coefficients, values)):
        factor = upstream.double() * coefficient / divisor
        row = (
            factor.expand(valid.shape)
            if weight is None
            else torch.where(counted, factor, 0.0) * weight
        )
        row = torch.where(counted, row.to(value.dtype), 0.0)
        row = -row if plan.negatives >> i & 1 else row
        rows.append(row * (2 * value) if plan.squares >> i & 1 else row)
    return torch.stack(rows)
