"""The autograd bridges from logits to statistics, and between ranks."""

import torch

from ..validation import refuse_batches
from . import operators, passes
from .backend import load_backend
from .one_read_launch import TERMS
from .passes import kernel_gradients
from .request import Request, Tensors, accumulation_dtype, without_gaps

ONCE = (
    "Options(inplace=True) writes the gradient over the logits, so that there is one backward, and nothing else may "
    "have written to the logits before it"
)
GONE = (
    "Options(inplace=True, gradient='forward') wrote the gradient of the loss over the logits, so that there is one "
    "backward, from the loss alone"
)


class _FirstDerivative(torch.autograd.Function):
    """Pass a gradient through; raise RuntimeError when the gradient is differentiated again."""

    @staticmethod
    def forward(ctx, gradient, *depends_on):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError(
            "tp_headloss has first derivatives only, and a gradient of its statistics was differentiated again "
            "(create_graph=True, a gradient penalty, hessian or hvp): use plain torch on gathered logits for that"
        )


def first_derivative_only(backward):
    """Decorate backward(ctx, saved tensors, *upstream): its gradients can be used, and differentiating them raises.

    torch's own `once_differentiable` ties the error to the upstream gradients alone. The gradients depend on the saved
    inputs, too: a second derivative with respect to these would be left out without a word.
    """

    def wrapper(ctx, *upstream):
        refuse_batches(upstream)
        try:
            saved = ctx.saved_tensors  # once: a checkpoint computes them again for each look
        except RuntimeError as error:
            if not getattr(ctx, "inplace", False):
                raise
            raise RuntimeError(ONCE) from error
        if not torch.is_grad_enabled():
            return backward(ctx, saved, *upstream)
        with torch.no_grad():
            gradients = backward(ctx, saved, *upstream)
        depends_on = [x for x in (*saved, *upstream) if x is not None and x.requires_grad]
        return tuple(None if g is None else _FirstDerivative.apply(g, *depends_on) for g in gradients)

    return wrapper


class Statistics(torch.autograd.Function):
    """logits [N, width] sharded on V -> statistics of `layout.outputs`, with a `FusedReduction` its loss [] and sums.

    Saves the inputs and O(N) merged rows, never probabilities. Backward: no communication.
    """

    @staticmethod
    def forward(ctx, *args):
        *tensors, request, inplace, reduction = args
        facts, layout = request.facts, request.layout
        if request.tensors.logits is not tensors[0]:
            request = request._replace(tensors=Tensors(*tensors))
        ctx.in_forward = reduction is not None and reduction.in_forward is not None
        ctx.step = None if reduction is None else load_backend(facts.backend).loss_step(request, reduction)
        in_forward: list[torch.Tensor] = []
        reduced = None
        if reduction is None:
            merged, values, *flags = operators.statistics(request)
            outputs = *values.unbind(0), *flags
        elif ctx.step is not None:
            merged, outputs, reduced = ctx.step.statistics(request, reduction.denominator)
        elif not ctx.in_forward:
            merged, outputs, reduced = passes.reduced_statistics(request, reduction)
        else:
            merged, outputs, reduced, gradient, ctx.late = passes.statistics_and_gradient(request, reduction, inplace)
            in_forward, ctx.taken = [gradient], False
            if inplace:  # the logits are gone
                torch.autograd.graph.increment_version(tensors[0])
                tensors[0] = in_forward[0]
        ctx.request, ctx.inplace, ctx.is_spent = Request(None, facts, layout), inplace, False
        ctx.plan = None if reduction is None else reduction.plan
        ctx.set_materialize_grads(False)
        loss = sums = None
        saved, fixed = (), [outputs[i] for i in layout.fixed]
        if reduction is not None and reduced is not None:
            by_name, plan = dict(zip(layout.outputs, outputs)), reduction.plan
            # the caller may write to the sums, so they are not among what is saved
            loss, sums, inverse, slopes = reduced
            terms = [slopes]
            if slopes is None:
                terms = [by_name[name] for name in plan.statistics[: len(plan.coefficients)]]
            saved = by_name["valid"], reduction.weight, inverse, *terms
            fixed.append(sums)
        ctx.mark_non_differentiable(*fixed)
        ctx.save_for_backward(*tensors, *in_forward, merged, *saved)
        return *outputs, loss, sums

    @staticmethod
    @first_derivative_only
    def backward(ctx, saved, *upstream):
        return _statistics_gradients(ctx, saved, upstream)


def _statistics_gradients(ctx, saved, upstream) -> tuple:
    """The gradients of the arguments of `Statistics`, from what it saved and upstream gradients of what it returned."""
    loss = upstream[-2]
    alone = loss is not None and not [g for g in upstream[:-2] if g is not None]
    count = len(ctx.needs_input_grad) - 3  # absent tensors at the end are left out
    if alone and ctx.step is not None and not ctx.inplace and ctx.step.serves(saved):
        return (ctx.step.gradient(loss, saved), *[None] * (count + 2))
    if alone and ctx.in_forward and not ctx.taken and (gradient := _completed(ctx, saved, count, loss)) is not None:
        ctx.taken = True  # only the first backward has the gradient that the forward wrote
        # .data, which may be written to: autograd does not take that for a change of what it saved
        return (gradient.data, *[None] * (count + 2))
    layout = ctx.request.layout
    request = Request(Tensors.saved(*saved[:count]), ctx.request.facts, layout)
    others = [without_gaps(x) for x in saved[count:]]
    in_forward = others[:1] if ctx.in_forward else []
    merged, *reduced = others[len(in_forward) :]
    grads = {name: g for name, g in zip(layout.outputs, upstream) if g is not None and name in layout.differentiable}
    loss_factors: tuple = ()
    if loss is not None and not grads and ctx.plan.gradients is not None and operators.can_skip_dispatch(merged):
        _valid, weight, inverse, *values = reduced
        grads = {
            name: (coefficient, value) if squared else (coefficient,)
            for (name, coefficient, squared), value in zip(ctx.plan.gradients, values)
            if name in layout.differentiable
        }
        loss_factors = ((loss, inverse, weight),)
    elif loss is not None:
        _add_loss_gradient(grads, loss, reduced, ctx.plan, request)
    grads = kernel_gradients(grads, request.tensors.ids)
    if not grads:
        return (None,) * (count + 3)
    logits = request.tensors.logits
    if in_forward and ctx.inplace:
        raise RuntimeError(GONE)
    if ctx.inplace:
        if ctx.is_spent:  # where hooks of saved tensors gave the logits, torch did not notice
            raise RuntimeError(ONCE)
        ctx.is_spent = True
        torch.autograd.graph.increment_version(logits)  # first: what a failed kernel left is not read again
        gradient = logits.detach()
        passes.write_gradient(gradient, request, merged, grads, *loss_factors)
    else:
        gradient = operators.logits_gradient(request, merged, grads, *loss_factors)
    return _gradients(ctx, request, gradient)


def _completed(ctx, saved, count: int, loss) -> torch.Tensor | None:
    """The gradient that the forward wrote, made that for this upstream gradient of the loss; None where hooks of saved
    tensors have laid something out in another way. count: tensors before it."""
    gradient, merged, _valid, weight, inverse, *values = saved[count:]
    if ctx.inplace:  # written for an upstream gradient of 1
        gradient = without_gaps(gradient)
        load_backend(ctx.request.facts.backend).gradient_for(gradient, loss)
        return gradient
    if not ctx.late.gradient.serves(gradient, *saved[:2], merged, inverse, *values):
        return None
    is_slopes = values[0].dim() == 2  # of a row function
    ctx.late.complete(gradient, loss, *saved[:2], merged, weight, inverse, values[0] if is_slopes else values)
    return gradient


def _gradients(ctx, request: Request, gradient):
    """The gradients of the arguments of `Statistics` that follow from that of the logits."""
    others: list[torch.Tensor | None] = [None] * (len(ctx.needs_input_grad) - 1)
    at, bias = Tensors._fields.index("bias"), request.tensors.bias
    if bias is not None and ctx.needs_input_grad[at]:
        others[at - 1] = gradient.sum(0, dtype=accumulation_dtype(gradient.dtype)).to(bias.dtype)
    return gradient, *others


def _add_loss_gradient(grads: dict, loss, reduced, plan, request: Request):
    """Add the gradients of a reduced loss to those of the statistics that it sums."""
    valid, weight, inverse, *summed = reduced
    if plan.statistics[0]:
        backend = load_backend(request.facts.backend)
        names, rows = plan.statistics, backend.token_sums_gradient(loss, tuple(summed), valid, weight, inverse, plan)
    else:  # terms of a row function, whose derivatives are known
        names, factor = TERMS, loss.double() * inverse[0] * (1.0 if weight is None else weight)
        rows = torch.where(valid & (factor != 0), factor * summed[0], 0.0).float()
    for name, row in zip(names, rows.unbind(0)):
        if name in request.layout.differentiable:
            grads[name] = row if name not in grads else grads[name] + row


class TokenSums(torch.autograd.Function):
    """Per-token values (any shape, contiguous) -> loss [] and sums over valid tokens, in one kernel.

    Differentiable in the values of the terms, the first ``len(plan.coefficients)``. For the triton backend.
    """

    @staticmethod
    def forward(ctx, reduction, valid, *values):
        loss, sums, inverse = load_backend("triton").token_sums(values, valid, reduction)
        ctx.save_for_backward(valid, reduction.weight, inverse, *values[: len(reduction.plan.coefficients)])
        ctx.plan = reduction.plan
        ctx.mark_non_differentiable(sums)
        ctx.set_materialize_grads(False)
        return loss, sums

    @staticmethod
    @first_derivative_only
    def backward(ctx, saved, loss, _sums):
        valid, weight, inverse, *values = map(without_gaps, saved)
        needed = ctx.needs_input_grad[2:]
        if loss is None:
            return (None,) * (2 + len(needed))
        rows = load_backend("triton").token_sums_gradient(loss, tuple(values), valid, weight, inverse, ctx.plan)
        grads = [
            (row if value.dim() == 1 else row.view(value.shape)) if need else None
            for row, value, need in zip(rows.unbind(0), values, needed)
        ]
        return (None,) * 2 + tuple(grads) + (None,) * (len(needed) - len(grads))


class ToShards(torch.autograd.Function):
    """Values that ranks share -> values for each rank's own shard; backward: the ranks' parts of the gradient added up.

    x [..] replicated ("all_reduce", "none") or [S/P, ..] of this rank ("reduce_scatter") -> [..] or [S, ..]. The
    collective comes on every rank, whatever requires a gradient there.
    """

    @staticmethod
    def forward(ctx, x, how, world_size, group_name, grad_anchor=None):
        ctx.reduction = how, world_size, group_name
        if how == "reduce_scatter":
            return torch.ops.tp_headloss.gather_tokens(x, world_size, group_name)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return FromShards.apply(grad, *ctx.reduction), None, None, None, None


class FromShards(torch.autograd.Function):
    """The ranks' parts -> their sum, "all_reduce" [..] replicated, "reduce_scatter" [S/P, ..] of [S, ..]."""

    @staticmethod
    def forward(ctx, x, how, world_size, group_name, grad_anchor=None):
        ctx.reduction = how, world_size, group_name
        return torch.ops.tp_headloss.reduce_tokens(x, *ctx.reduction)

    @staticmethod
    def backward(ctx, grad):
        return ToShards.apply(grad, *ctx.reduction), None, None, None, None
