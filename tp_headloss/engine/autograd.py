"""The autograd bridges from logits to statistics, and between ranks.

`Statistics` is one node for all statistics of a call and for its loss. It has to be one, because a
single kernel writes the gradient of all of them; autograd alone would add up one gradient of the
logits' size for each. Its backward is called once, with the upstream gradients of whatever was
used. If that is the loss alone, the way of the call may know a quicker gradient; otherwise the
upstream gradients of the statistics are found here, and the general kernel multiplies by them.

Nothing is exchanged in a backward: each rank's part of the gradient needs its own logits and the
merged rows, which all ranks have after the forward.
"""

from collections.abc import Callable, Iterable

import torch

from ..spec.checks import refuse_batches
from . import operators
from .backend import load_backend
from .one_read.params import TERMS
from .passes import kernel_gradients
from .request import Request, Tensors, accumulation_dtype, without_gaps
from .ways.way import ONCE


class _FirstDerivative(torch.autograd.Function):
    """Pass a gradient through; raise RuntimeError when the gradient is differentiated again."""

    @staticmethod
    def forward(ctx, gradient, *depends_on):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError(
            "tp_headloss has first derivatives only, and a gradient of its statistics was "
            "differentiated again (create_graph=True, a gradient penalty, hessian or hvp): use "
            "plain torch on gathered logits for that"
        )


def first_derivative_only(backward):
    """Decorate backward(ctx, saved tensors, *upstream): its gradients can be used, and
    differentiating them raises.

    torch's own `once_differentiable` ties the error to the upstream gradients alone. The gradients
    depend on the saved inputs, too: a second derivative with respect to these would be left out
    without a word.
    """

    def wrapper(ctx, *upstream):
        refuse_batches(upstream)
        try:
            saved = ctx.saved_tensors  # once: a checkpoint computes them again for each look
        except RuntimeError as error:
            if not getattr(getattr(ctx, "way", None), "inplace", False):
                raise
            raise RuntimeError(ONCE) from error
        if not torch.is_grad_enabled():
            return backward(ctx, saved, *upstream)
        with torch.no_grad():
            gradients = backward(ctx, saved, *upstream)
        depends_on = [x for x in (*saved, *upstream) if x is not None and x.requires_grad]
        return tuple(
            None if g is None else _FirstDerivative.apply(g, *depends_on) for g in gradients
        )

    return wrapper


# (False) -> the hooks of saved tensors that are set, or None. They may hand out memory of their own
# in the backward, to which nobody else may write.
hooks_of_saved_tensors: Callable = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]


class Statistics(torch.autograd.Function):
    """logits [N, width] sharded on V -> statistics of `layout.outputs`, with a `FusedReduction` its
    loss [] and sums.

    The `Way` of the call computes them. Saves the inputs and O(N) merged rows, never probabilities.
    Backward: no communication.
    """

    @staticmethod
    def forward(ctx, *args):
        *tensors, request, way, reduction = args
        if request.tensors.logits is not tensors[0]:
            request = request._replace(tensors=Tensors(*tensors))
        found = way.forward(request, reduction)
        layout = request.layout
        ctx.way, ctx.is_taken, ctx.completion = way, False, found.completion
        ctx.request = Request(None, request.facts, layout)
        ctx.plan = None if reduction is None else reduction.plan
        ctx.set_materialize_grads(False)
        loss = sums = None
        fixed = [found.outputs[i] for i in layout.fixed]
        saved = [found.merged]
        if found.reduced is not None:
            # the caller may write to the sums, so they are not among what is saved
            loss, sums, *_ = found.reduced
            fixed.append(sums)
            saved += _saved_of_loss(found, reduction, layout)
        if found.gradient is not None:
            saved.append(found.gradient)
            if way.inplace:  # the logits are gone
                torch.autograd.graph.increment_version(tensors[0])
                tensors[0] = found.gradient
        ctx.writes_gradient = found.gradient is not None
        ctx.has_hooks = ctx.writes_gradient and hooks_of_saved_tensors(False) is not None
        ctx.mark_non_differentiable(*fixed)
        ctx.save_for_backward(*tensors, *saved)
        return *found.outputs, loss, sums

    @staticmethod
    @first_derivative_only
    def backward(ctx, saved, *upstream):
        *others, loss, _sums = upstream
        if loss is not None and not [g for g in others if g is not None]:
            gradient = ctx.way.gradient_of_loss(ctx, saved, loss)
            if gradient is not None:
                return (gradient, *[None] * (len(ctx.needs_input_grad) - 1))
        return _statistics_gradients(ctx, saved, upstream)


def _saved_of_loss(found, reduction, layout) -> tuple:
    """Return the tensors that the gradient of a reduced loss needs."""
    by_name = dict(zip(layout.outputs, found.outputs))
    _loss, _sums, inverse, slopes = found.reduced
    if slopes is not None:
        return by_name["valid"], reduction.weight, inverse, slopes
    plan = reduction.plan
    terms = [by_name[name] for name in plan.statistics[: len(plan.coefficients)]]
    return by_name["valid"], reduction.weight, inverse, *terms


def _statistics_gradients(ctx, saved, upstream) -> tuple:
    """The gradients of the arguments of `Statistics`, from what it saved and upstream gradients of
    what it returned."""
    layout = ctx.request.layout
    count = len(ctx.needs_input_grad) - 3  # absent tensors at the end are left out
    request = Request(Tensors.saved(*saved[:count]), ctx.request.facts, layout)
    others = saved[count:-1] if ctx.writes_gradient else saved[count:]
    merged, *reduced = [without_gaps(x) for x in others]
    grads = {
        name: g
        for name, g in zip(layout.outputs, upstream)
        if g is not None and name in layout.differentiable
    }
    grads, of_loss = _with_loss(ctx, grads, upstream[-2], merged, reduced)
    grads = kernel_gradients(grads, request.tensors.ids)
    if not grads:
        return (None,) * (count + 3)
    return _gradients(ctx, request, ctx.way.gradient(ctx, request, merged, grads, *of_loss))


def _with_loss(ctx, grads: dict, loss, merged, reduced) -> tuple[dict, tuple]:
    """Upstream gradients of statistics with those of a reduced loss, and its factors where the
    kernel multiplies."""
    if loss is None:
        return grads, ()
    if grads or ctx.plan.gradients is None or not operators.can_skip_dispatch(merged):
        _add_loss_gradient(grads, loss, reduced, ctx.plan, ctx.request)
        return grads, ()
    _valid, weight, inverse, *values = reduced
    grads = {
        name: (coefficient, value) if squared else (coefficient,)
        for (name, coefficient, squared), value in zip(ctx.plan.gradients, values)
        if name in ctx.request.layout.differentiable
    }
    return grads, ((loss, inverse, weight),)


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
        names, rows = (
            plan.statistics,
            backend.token_sums_gradient(loss, tuple(summed), valid, weight, inverse, plan),
        )
    else:  # terms of a row function, whose derivatives are known
        names, factor = TERMS, loss.double() * inverse[0] * (1.0 if weight is None else weight)
        rows = torch.where(valid & (factor != 0), factor * summed[0], 0.0).float()
    for name, row in zip(names, rows.unbind(0)):
        if name in request.layout.differentiable:
            grads[name] = row if name not in grads else grads[name] + row


class TokenSums(torch.autograd.Function):
    """Per-token values (any shape, contiguous) -> loss [] and sums over valid tokens, in one
    kernel.

    Differentiable in the values of the terms, the first ``len(plan.coefficients)``. For the triton
    backend.
    """

    @staticmethod
    def forward(ctx, reduction, valid, *values):
        loss, sums, inverse = load_backend("triton").token_sums(values, valid, reduction)
        ctx.save_for_backward(
            valid, reduction.weight, inverse, *values[: len(reduction.plan.coefficients)]
        )
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
        rows = load_backend("triton").token_sums_gradient(
            loss, tuple(values), valid, weight, inverse, ctx.plan
        )
        grads = [
            (row if value.dim() == 1 else row.view(value.shape)) if need else None
            for row, value, need in zip(rows.unbind(0), values, needed)
        ]
        return (None,) * 2 + tuple(grads) + (None,) * (len(needed) - len(grads))


class ToShards(torch.autograd.Function):
    """Values that ranks share -> values for each rank's own shard; backward: the ranks' parts of
    the gradient added up.

    x [..] replicated ("all_reduce", "none") or [S/P, ..] of this rank ("reduce_scatter") -> [..] or
    [S, ..]. The collective comes on every rank, whatever requires a gradient there. The shard, whose
    group has to live, is None where torch.compile traces: it is no argument of a graph.
    """

    @staticmethod
    def forward(ctx, x, how, world_size, group_name, shard, grad_anchor=None):
        ctx.reduction = how, world_size, group_name, shard
        if shard is not None:
            shard.expect_live_group()
        if how == "reduce_scatter":
            return operators.OPS.gather_tokens(x, world_size, group_name)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return FromShards.apply(grad, *ctx.reduction), None, None, None, None, None


class FromShards(torch.autograd.Function):
    """The ranks' parts -> their sum, "all_reduce" [..] replicated, "reduce_scatter" [S/P, ..] of
    [S, ..]."""

    @staticmethod
    def forward(ctx, x, how, world_size, group_name, shard, grad_anchor=None):
        ctx.reduction = how, world_size, group_name, shard
        if shard is not None:
            shard.expect_live_group()
        return operators.OPS.reduce_tokens(x, how, world_size, group_name)

    @staticmethod
    def backward(ctx, grad):
        return ToShards.apply(grad, *ctx.reduction), None, None, None, None, None


def reduction_over(shard, how: str) -> tuple:
    """Return the arguments of `ToShards` and `FromShards` between values and anchor."""
    whose = None if torch.compiler.is_compiling() else shard
    return how, shard.world_size, shard.group_name, whose


def grad_anchor(x: torch.Tensor, how: str, world_size: int) -> torch.Tensor | None:
    """Return a dummy that requires grad, or None if there is no collective.

    With it autograd runs a backward, and its collective, on every rank, even where the shard is
    empty or the parameters are frozen.
    """
    if how == "none" or world_size == 1 or torch.compiler.is_compiling():
        return None
    return x.new_empty(0).requires_grad_()


def has_other_leaves(x: torch.Tensor, tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if the graph of x has leaves to which none of the tensors leads."""
    leaves, seen = set(), set()
    for tensor in tensors:
        leaves.add(id(tensor))
        seen.add(tensor.grad_fn)
    todo = [x.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in leaves:
            return True
        todo += [after for after, _ in node.next_functions]
    return False
