"""The bridges from hidden states and a weight to statistics: registered operators and
autograd.Functions."""

from typing import Any, NamedTuple

import torch

from ..engine.autograd import first_derivative_only, hooks_of_saved_tensors
from ..engine.backend import load_backend
from ..engine.operators import OPS, can_skip_dispatch, fields_of, register, schema_of
from ..engine.passes import kernel_gradients
from ..engine.request import (
    Facts,
    Request,
    TeacherOperands,
    Tensors,
    accumulation_dtype,
    without_gaps,
)
from ..spec.checks import refuse_batches
from . import sweeps
from .facts import LinearFacts, recompute_blocks


def _statistics(hidden, weight, request: Request, linear: LinearFacts):
    found = recompute_blocks(linear, request.facts, hidden.shape, hidden.dtype)
    with torch.autocast(sweeps.autocast_type(hidden.device), enabled=False):
        return sweeps.statistics(*linear.operands(hidden, weight, request), found.forward, linear)


def _statistics_operator(hidden, weight, *args):
    *tensors, teacher, facts, linear = args
    return _statistics(
        hidden, weight, Request.of((None, *tensors), facts)._replace(teacher_head=teacher), linear
    )


def _statistics_fake(hidden, weight, *args):
    *tensors, _, facts, linear = args
    layout, n_rows = (
        Request.of((None, *tensors), facts).layout,
        linear.token_count(hidden.shape[0], facts),
    )
    return layout.empty_outputs(hidden, n_rows, accumulation_dtype(linear.dtype))


def _gradient(
    hidden,
    weight,
    request: Request,
    merged,
    grads: dict,
    wanted,
    linear: LinearFacts,
    main_grad=None,
):
    """Gradients of hidden states, weight and bias, None where not wanted."""
    operands = hidden, weight, request.tensors.bias
    hidden_dtype, weight_dtype, bias_dtype = [
        x.dtype if want else None for x, want in zip(operands, wanted)
    ]
    wanted = sweeps.Gradients(hidden_dtype, weight_dtype, bias_dtype, main_grad)
    found = recompute_blocks(linear, request.facts, hidden.shape, hidden.dtype)
    with torch.autocast(sweeps.autocast_type(hidden.device), enabled=False):
        operands = linear.operands(hidden, weight, request)
        hidden_grad, sums = sweeps.gradient(*operands, merged, grads, found, wanted, linear)
    return hidden_grad, *sums.gradients()


def _gradient_operator(hidden, weight, *args):
    *tensors, merged, grads, wanted, teacher, facts, linear = args
    request = Request.of((None, *tensors), facts)._replace(teacher_head=teacher)
    found = _gradient(
        hidden, weight, request, merged, dict(zip(request.layout.gradients, grads)), wanted, linear
    )
    return [hidden.new_empty(0) if g is None else g for g in found]


def _gradient_fake(hidden, weight, *args):
    wanted, operands = args[-4], (hidden, weight, args[_BIAS - 1])
    return [
        x.new_empty(x.shape) if want else hidden.new_empty(0) for x, want in zip(operands, wanted)
    ]


_BIAS = Tensors._fields.index("bias")
_OPERANDS = f"Tensor hidden, Tensor weight, {schema_of(Tensors, leave_out=('logits',))}"
register(
    "linear_statistics",
    _OPERANDS,
    "Tensor[]",
    _statistics_operator,
    _statistics_fake,
    TeacherOperands,
    Facts,
    LinearFacts,
)
register(
    "linear_gradient",
    f"{_OPERANDS}, Tensor merged, Tensor?[] grads, bool[] wanted",
    "Tensor[]",
    _gradient_operator,
    _gradient_fake,
    TeacherOperands,
    Facts,
    LinearFacts,
)


def _with_tensors(request: Request, tensors) -> Request:
    """A request with its tensors besides the logits, and then those of a teacher's head."""
    count = len(Tensors._fields) - 1
    hidden, weight, bias = tensors[count:]
    head = request.teacher_head._replace(
        teacher_hidden=hidden, teacher_weight=weight, teacher_bias=bias
    )
    return request._replace(tensors=Tensors._make((None, *tensors[:count])), teacher_head=head)


class LinearStatistics(torch.autograd.Function):
    """hidden [N, H] (or [N/P, H], gathered here), weight [W, H] sharded on V -> the statistics of
    `layout.outputs`.

    grad_anchor: dummy that requires grad, so that autograd runs this backward, and its collective,
    on every rank. Saves the inputs and O(N) merged rows, and makes the logits again. Backward: the
    hidden states' gradient is reduced as `LinearFacts.hidden_grad` says, with the same collectives
    whoever requires a gradient.
    """

    @staticmethod
    def forward(ctx, hidden, weight, *args):
        *tensors, main_grad, _grad_anchor, request, linear = args
        ctx.request, ctx.linear, ctx.main_grad = request, linear, main_grad
        request = _with_tensors(request, tensors)
        if can_skip_dispatch(hidden):
            merged, values, *flags = _statistics(hidden, weight, request, linear)
        else:
            fields = *request.tensors[1:], *fields_of(request.teacher_head, request.facts, linear)
            merged, values, *flags = OPS.linear_statistics(hidden, weight, *fields)
        ctx.set_materialize_grads(False)
        outputs = (*values.unbind(0), *flags)
        ctx.mark_non_differentiable(*[outputs[i] for i in request.layout.fixed])
        ctx.save_for_backward(hidden, weight, *tensors, merged)
        return outputs

    @staticmethod
    @first_derivative_only
    def backward(ctx, saved, *upstream):
        hidden, weight, *tensors, merged = saved
        linear, count, request = ctx.linear, len(tensors) + 6, _with_tensors(ctx.request, tensors)
        layout, facts, tensors = request.layout, request.facts, Tensors.saved(*request.tensors)
        request = request._replace(tensors=tensors)
        named = {
            name: g for name, g in zip(layout.outputs, upstream) if name in layout.differentiable
        }
        grads = kernel_gradients(named, tensors.ids)
        if not grads:
            return (None,) * count
        if request.shard is not None and linear.hidden_grad != "none":
            request.shard.expect_live_group()
        bias = ctx.needs_input_grad[1 + _BIAS]
        wanted = [
            ctx.needs_input_grad[0] or linear.hidden_grad != "none",
            ctx.needs_input_grad[1],
            bias,
        ]
        target = ctx.main_grad if wanted[1] else None
        if target or can_skip_dispatch(merged):
            out = _gradient(
                hidden, weight, request, merged, grads, wanted, linear, target and target.main_grad
            )
            weight_grad = target.gradient() if target else out[1]
        else:
            args = *tensors[1:], merged, [grads.get(name) for name in layout.gradients], wanted
            fields = fields_of(request.teacher_head, facts, linear)
            out = OPS.linear_gradient(hidden, weight, *args, *fields)
            weight_grad = out[1]
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        found = [
            out[0] if needs_hidden else None,
            weight_grad if needs_weight else None,
            *[None] * (count - 2),
        ]
        found[1 + _BIAS] = out[2] if bias else None
        return tuple(found)


class MainGrad(NamedTuple):
    """Megatron's fp32 gradient of a weight, to which the backward adds dW itself."""

    weight: Any  # torch.nn.Parameter with the attributes that Megatron gives it

    @property
    def main_grad(self) -> torch.Tensor:
        return self.weight.main_grad

    def gradient(self) -> torch.Tensor | None:
        """Placeholder that autograd gets in dW's place, where Megatron's flags are set for the
        hooks; else None."""
        weight = self.weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        return make(weight)


class OneSweep(torch.autograd.Function):
    """A loss [] whose gradients were computed with it, for an upstream gradient of 1 -> the same,
    differentiable.

    The statistics pass through; differentiating them raises RuntimeError.
    """

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, loss, found, main_grad, upstream, backend, n_values, *statistics
    ):
        ctx.main_grad, ctx.upstream, ctx.backend, ctx.once = main_grad, upstream, backend, False
        ctx.types = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.has_hooks = hooks_of_saved_tensors(False) is not None
        ctx.save_for_backward(*found)
        ctx.set_materialize_grads(False)
        statistics = tuple([x.view_as(x) for x in statistics])
        ctx.mark_non_differentiable(*statistics[n_values:])
        return loss.clone(), *statistics

    @staticmethod
    def backward(ctx, upstream, *statistics_grads):
        refuse_batches((upstream, *statistics_grads))
        # what the gradients depend on is not kept, so there is nothing to tie an error to
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a one-sweep head has first derivatives only, and its loss was differentiated with "
                "create_graph=True: use mode='recompute', whose gradient raises only if it is "
                "differentiated itself"
            )
        if [g for g in statistics_grads if g is not None]:
            raise RuntimeError(
                "a one-sweep head computed the gradient of its loss alone, got one of its "
                "statistics: use mode='recompute' to differentiate what you make of them"
            )
        if upstream is None:
            return (None,) * (9 + len(statistics_grads))
        main_grad, scale = ctx.main_grad, load_backend(ctx.backend).scale
        upstream = upstream.to(accumulation_dtype(upstream.dtype))
        # it is in the gradients; another one makes them NaN instead of wrong
        if ctx.upstream is not None:
            is_declared = upstream == ctx.upstream.to(upstream.dtype)
            upstream = torch.ones_like(upstream).masked_fill(~is_declared, torch.nan)
            if main_grad is not None and ctx.once:
                raise RuntimeError(
                    "with a declared upstream, dW went into main_grad once: there is no second "
                    "backward"
                )
            ctx.once = True
        is_last = not torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]
        out: list[torch.Tensor | None] = [None, None, None]
        for i, (gradient, dtype) in enumerate(zip(ctx.saved_tensors, ctx.types)):
            if not ctx.needs_input_grad[i]:
                continue
            gradient = without_gaps(gradient)
            if i == 1 and main_grad is not None:
                if gradient is not None:
                    scale(main_grad.main_grad, gradient, upstream, add=True)
                else:
                    main_grad.main_grad.view(-1)[:1].mul_(upstream)
                out[1] = main_grad.gradient()
            elif is_last and not ctx.has_hooks and gradient.dtype == dtype:
                # nobody asks for it again
                # which may be written to: autograd does not take that for a change of what it saved
                out[i] = gradient.data
                load_backend(ctx.backend).gradient_for(out[i], upstream)
            else:
                out[i] = torch.empty_like(gradient, dtype=dtype)
                scale(out[i], gradient, upstream)
        return *out, *(None,) * (6 + len(statistics_grads))
