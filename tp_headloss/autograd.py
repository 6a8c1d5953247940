"""The bridges from logits, or hidden states and a weight, to statistics: registered operators, and autograd.Functions
around them.

Both operators take plain tensors, numbers and strings (the fields of `HeadSpec`), so that `torch.compile` sees opaque,
shape-inferable calls and CUDA graphs capture exactly what eager runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import comm, passes, sweeps
from .backends import load_backend
from .passes import GRADS
from .stats import HeadSpec, Inputs, empty_outputs, flag_names, value_rows

DIFFERENTIABLE = ("target_logit", *GRADS)
OUTPUTS = (*DIFFERENTIABLE, "teacher_entropy", "teacher_mass", "owners", "mass", "argmax", "valid", "hits")

_SPEC = (
    "int start, int valid_width, int vocab_size, int chunk_size, int chunks, int world_size, str[] want, "
    "float scale, float softcap, float temperature, int ignore_index, str backend, str transport, str group_name, "
    "float teacher_scale, float student_scale, float beta"
)
_INPUTS = "Tensor logits, " + ", ".join(f"Tensor? {name}" for name in Inputs._fields[1:])
INPUTS = len(Inputs._fields)
torch.library.define("tp_headloss::statistics", f"({_INPUTS}, {_SPEC}) -> Tensor[]")
torch.library.define("tp_headloss::logits_gradient", f"({_INPUTS}, Tensor merged, Tensor?[] grads, {_SPEC}) -> Tensor")
_OPERANDS = _INPUTS.replace("Tensor logits", "Tensor hidden, Tensor weight")
_LINEAR = "ScalarType dtype, int budget, bool weight_sums, str hidden_grad"
torch.library.define("tp_headloss::linear_statistics", f"({_OPERANDS}, {_SPEC}, {_LINEAR}) -> Tensor[]")
torch.library.define(
    "tp_headloss::linear_gradient",
    f"({_OPERANDS}, Tensor merged, Tensor?[] grads, bool[] wanted, {_SPEC}, {_LINEAR}) -> Tensor[]",
)
torch.library.define("tp_headloss::gather_tokens", "(Tensor x, int world_size, str group_name) -> Tensor")
torch.library.define("tp_headloss::reduce_tokens", "(Tensor x, str how, int world_size, str group_name) -> Tensor")
torch.library.define(
    "tp_headloss::entries",
    "(Tensor ids, Tensor log_probs, Tensor? mask, Tensor? scales, float scale, bool renormalize, int vocab_size, "
    "str backend) -> (Tensor, Tensor)",
)


def _statistics(*args):
    *inputs, spec = args
    return passes.statistics(Inputs(*inputs), spec)


def _statistics_fake(logits, labels, *rest):
    return empty_outputs(logits, logits.shape[0], labels is not None, rest[-1].want, passes.float_type(logits.dtype))


def _logits_gradient(*args):
    *inputs, merged, grads, spec = args
    out = torch.empty_like(inputs[0])
    passes.write_gradient(out, Inputs(*inputs), merged, grads, spec)
    return out


def _logits_gradient_fake(logits, *_):
    return torch.empty_like(logits)


def _entries(ids, log_probs, mask, scales, scale, renormalize, vocab_size, backend):
    scale = scale if scales is None else scales
    return load_backend(backend).entries(ids, log_probs, mask, scale, renormalize, vocab_size)


def _entries_fake(ids, log_probs, *_):
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    return torch.empty_like(ids, dtype=torch.int32), torch.empty_like(log_probs, dtype=dtype)


def top_entries(*args):
    """What a top-K teacher's entries are, [N, K] each; see `backends.eager.entries`."""
    return _entries(*args) if runs_here(args[1]) else torch.ops.tp_headloss.entries(*args)


class LinearSpec(NamedTuple):
    """What is static about a linear head besides `HeadSpec`."""

    dtype: torch.dtype  # of the GEMMs' operands, and the logits
    budget: int  # 0: the default
    weight_sums: bool  # dW is returned in half precision
    hidden_grad: str  # of `comm.HIDDEN_GRADS`; "reduce_scatter": the hidden states are gathered

    def sizes(self, hidden, spec: HeadSpec) -> sweeps.Sizes:
        """Of an even share of the vocabulary: what all ranks know of each other's shards, so that they agree."""
        width, half = -(-spec.vocab_size // spec.world_size), hidden.dtype.itemsize == 2
        tokens = max(1, self.tokens_of(hidden, spec))
        return sweeps.Sizes(tokens, width, hidden.shape[-1], self.dtype.itemsize, half, self.weight_sums)

    def blocks(self, hidden, spec: HeadSpec) -> sweeps.Blocks:
        """Of recompute. Here, where the number of tokens is known, also to torch.compile."""
        planner, sizes = sweeps.recompute_blocks, self.sizes(hidden, spec)
        blocks = sweeps.planned(planner, sizes, self.budget or None)
        if blocks is None:
            raise ValueError(sweeps.refusal(planner, sizes, self.budget))
        return blocks

    def operands(self, hidden, weight, spec: HeadSpec):
        """As the GEMMs take them."""
        hidden, weight = hidden.to(self.dtype), weight.to(self.dtype)
        if self.hidden_grad == "reduce_scatter":
            hidden = comm.gather_tokens(hidden, spec.world_size, spec.group_name)
        return hidden, weight

    def tokens_of(self, hidden, spec: HeadSpec) -> int:
        return hidden.shape[0] * (spec.world_size if self.hidden_grad == "reduce_scatter" else 1)


def _linear_statistics(hidden, weight, *args):
    *inputs, spec, linear = args
    blocks = linear.blocks(hidden, spec)
    with torch.autocast(hidden.device.type, enabled=False):
        hidden, weight = linear.operands(hidden, weight, spec)
        return sweeps.statistics(hidden, weight, Inputs(None, *inputs), spec, blocks.forward)


def _linear_statistics_fake(hidden, weight, labels, *rest):
    *_, spec, linear = rest
    n_rows = linear.tokens_of(hidden, spec)
    return empty_outputs(hidden, n_rows, labels is not None, spec.want, passes.float_type(linear.dtype))


def _linear_gradient(hidden, weight, *args, main_grad=None):
    """-> gradients of hidden states, weight and bias, None where not wanted."""
    *inputs, merged, grads, wanted, spec, linear = args
    inputs = Inputs(None, *inputs)
    dtypes = (x.dtype if want else None for x, want in zip((hidden, weight, inputs.bias), wanted))
    wanted = sweeps.Gradients(*dtypes, main_grad)
    blocks = linear.blocks(hidden, spec)
    with torch.autocast(hidden.device.type, enabled=False):
        operands = linear.operands(hidden, weight, spec)
        of_hidden, out = sweeps.gradient(*operands, inputs, merged, grads, spec, blocks, wanted, linear.hidden_grad)
    return of_hidden, *weight_gradients(out)


def weight_gradients(out):
    """What a sweep summed -> the gradients of weight and bias, of their types."""
    wanted = out.wanted
    weight = None if out.sum is None or wanted.main_grad is not None else out.sum.to(wanted.weight)
    return weight, None if out.bias is None else out.bias.to(wanted.bias)


def _linear_gradient_operator(hidden, *args):
    return [hidden.new_empty(0) if g is None else g for g in _linear_gradient(hidden, *args)]


def _linear_gradient_fake(hidden, weight, *args):
    wanted, operands = args[-3], (hidden, weight, args[1])
    return [x.new_empty(x.shape) if want else hidden.new_empty(0) for x, want in zip(operands, wanted)]


def _with_specs(function, *kinds):
    """The function behind an operator, whose schema spells out the fields of these NamedTuples, its last arguments."""

    def operator(*args):
        specs = []
        for kind in reversed(kinds):
            args, fields = args[: -len(kind._fields)], args[-len(kind._fields) :]
            specs.append(kind(*(tuple(field) if isinstance(field, list) else field for field in fields)))
        return function(*args, *reversed(specs))

    return operator


for _name, _kinds, _real, _fake in (
    ("statistics", (HeadSpec,), _statistics, _statistics_fake),
    ("logits_gradient", (HeadSpec,), _logits_gradient, _logits_gradient_fake),
    ("linear_statistics", (HeadSpec, LinearSpec), _linear_statistics, _linear_statistics_fake),
    ("linear_gradient", (HeadSpec, LinearSpec), _linear_gradient_operator, _linear_gradient_fake),
):
    torch.library.impl(f"tp_headloss::{_name}", "default", _with_specs(_real, *_kinds))
    torch.library.register_fake(f"tp_headloss::{_name}", _with_specs(_fake, *_kinds))


def _gather_tokens(x, world_size, group_name):
    gathered = comm.gather_tokens(x, world_size, group_name)
    return x.clone() if gathered is x else gathered


def _reduce_tokens(x, how, world_size, group_name):
    return comm.reduce_hidden(x.clone(memory_format=torch.contiguous_format), how, world_size, group_name)()


def _reduce_tokens_fake(x, how, world_size, group_name):
    return x.new_empty(x.shape[0] // world_size if how == "reduce_scatter" else x.shape[0], *x.shape[1:])


torch.library.impl("tp_headloss::gather_tokens", "default", _gather_tokens)
torch.library.register_fake(
    "tp_headloss::gather_tokens", lambda x, world, name: x.new_empty(world * x.shape[0], *x.shape[1:])
)
torch.library.impl("tp_headloss::reduce_tokens", "default", _reduce_tokens)
torch.library.register_fake("tp_headloss::reduce_tokens", _reduce_tokens_fake)
torch.library.impl("tp_headloss::entries", "default", _entries)
torch.library.register_fake("tp_headloss::entries", _entries_fake)


def runs_here(tensor) -> bool:
    """Eager and unobserved, where the operators' dispatch would only cost host time."""
    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    return plain and not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()


def _fields(spec) -> list:
    return [list(field) if isinstance(field, tuple) else field for field in spec]


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


def _first_derivative_only(backward):
    """Decorate backward(ctx, saved tensors, *upstream): its gradients can be used, and differentiating them raises.

    torch's own `once_differentiable` ties the error to the upstream gradients alone. The gradients depend on the saved
    inputs, too: a second derivative with respect to these would be left out without a word.
    """

    def wrapper(ctx, *upstream):
        saved = ctx.saved_tensors  # once: a checkpoint computes them again for each look
        if not torch.is_grad_enabled():
            return backward(ctx, saved, *upstream)
        with torch.no_grad():
            gradients = backward(ctx, saved, *upstream)
        depends_on = [x for x in (*saved, *upstream) if x is not None and x.requires_grad]
        return tuple(None if g is None else _FirstDerivative.apply(g, *depends_on) for g in gradients)

    return wrapper


def named(values, flags, has_labels: bool, want):
    """Rows [N] -> statistics by name, and those among them that have no gradient."""
    out = dict(zip(value_rows(has_labels, want), values))
    out.update(zip(flag_names(has_labels, want), flags))
    return out, [value for name, value in out.items() if name not in DIFFERENTIABLE]


def kernel_grads(upstream: dict[str, torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Upstream gradients of the statistics -> what the kernels take, in the order of `GRADS`."""
    if (target_logit := upstream.get("target_logit")) is not None:  # z_y = log_prob + lse
        both = {name: upstream.get(name) for name in ("lse", "log_prob")}
        both = {name: target_logit if g is None else g + target_logit for name, g in both.items()}
        upstream = {**upstream, **both}
    return [upstream.get(name) for name in GRADS]


class Statistics(torch.autograd.Function):
    """logits [N, width] sharded on V -> the statistics named in `OUTPUTS`, None where off; with a `Reduction` (Triton
    backend only) also its loss [] and sums, else None.

    Saves the inputs and O(N) merged rows, never probabilities. Backward: no communication.
    """

    @staticmethod
    def forward(ctx, *args):
        *inputs, spec, inplace, reduction = args
        has_labels = inputs[1] is not None
        if runs_here(inputs[0]):
            merged, values, *flags = _statistics(*inputs, spec)
        else:
            merged, values, *flags = torch.ops.tp_headloss.statistics(*inputs, *_fields(spec))
        ctx.spec, ctx.inplace = spec, inplace
        ctx.set_materialize_grads(False)
        out, fixed = named(values.unbind(0), flags, has_labels, spec.want)
        loss = sums = None
        saved = ()
        if reduction is not None:
            summed = tuple(out[name] for name in reduction.plan.statistics)
            # the caller may write to the sums, so they are not among what is saved
            loss, sums, divisor = load_backend(spec.backend).token_sums(summed, out["valid"], reduction)
            saved = out["valid"], reduction.weight, divisor, *summed[: len(reduction.plan.coefficients)]
            ctx.plan = reduction.plan
            fixed.append(sums)
        ctx.mark_non_differentiable(*fixed)
        ctx.save_for_backward(*inputs, merged, *saved)
        return *(out.get(name) for name in OUTPUTS), loss, sums

    @staticmethod
    @_first_derivative_only
    def backward(ctx, saved, *upstream):
        *inputs, merged = saved[: INPUTS + 1]
        loss = upstream[-2]
        upstream = dict(zip(DIFFERENTIABLE, upstream))
        if loss is not None:
            valid, weight, divisor, *summed = saved[INPUTS + 1 :]
            backend = load_backend(ctx.spec.backend)
            rows = backend.token_sums_gradient(loss, tuple(summed), valid, weight, divisor, ctx.plan)
            for name, row in zip(ctx.plan.statistics, rows.unbind(0)):
                if name in upstream:
                    upstream[name] = row if upstream[name] is None else upstream[name] + row
        grads = kernel_grads(upstream)
        if all(g is None for g in grads):
            return (None,) * (INPUTS + 3)
        if ctx.inplace:
            logits = inputs[0].detach()
            torch.autograd.graph.increment_version(inputs[0])  # first: what a failed kernel left is not read again
            passes.write_gradient(logits, Inputs(*inputs), merged, grads, ctx.spec)
        elif runs_here(merged):
            logits = torch.empty_like(inputs[0])
            passes.write_gradient(logits, Inputs(*inputs), merged, grads, ctx.spec)
        else:
            logits = torch.ops.tp_headloss.logits_gradient(*inputs, merged, grads, *_fields(ctx.spec))
        bias = logits.sum(0, dtype=merged.dtype).to(inputs[2].dtype) if ctx.needs_input_grad[2] else None
        return logits, None, bias, *(None,) * INPUTS


class LinearStatistics(torch.autograd.Function):
    """hidden [N, H] (or [N/P, H], gathered here), weight [W, H] sharded on V -> the statistics named in `OUTPUTS`.

    _everywhere: a tensor that requires a gradient, so that a rank where nothing else does takes part in the reduction.
    Saves the inputs and O(N) merged rows, and makes the logits again. Backward: the hidden states' gradient is reduced
    as `LinearSpec.hidden_grad` says, with the same collectives whoever requires a gradient.
    """

    @staticmethod
    def forward(ctx, hidden, weight, *args):
        *inputs, main_grad, _everywhere, spec, linear = args
        static = *inputs, spec, linear
        has_labels = inputs[0] is not None
        if runs_here(hidden):
            merged, values, *flags = _linear_statistics(hidden, weight, *static)
        else:
            fields = *inputs, *_fields(spec), *linear
            merged, values, *flags = torch.ops.tp_headloss.linear_statistics(hidden, weight, *fields)
        ctx.spec, ctx.linear, ctx.main_grad = spec, linear, main_grad
        ctx.set_materialize_grads(False)
        out, fixed = named(values.unbind(0), flags, has_labels, spec.want)
        ctx.mark_non_differentiable(*fixed)
        ctx.save_for_backward(hidden, weight, *inputs, merged)
        return tuple(out.get(name) for name in OUTPUTS)

    @staticmethod
    @_first_derivative_only
    def backward(ctx, saved, *upstream):
        hidden, weight, *inputs, merged = saved
        grads = kernel_grads(dict(zip(DIFFERENTIABLE, upstream)))
        if all(g is None for g in grads):
            return (None,) * (INPUTS + 5)
        spec, linear, bias = ctx.spec, ctx.linear, ctx.needs_input_grad[3]
        reduced = linear.hidden_grad != "none" and spec.world_size > 1
        wanted = [ctx.needs_input_grad[0] or reduced, ctx.needs_input_grad[1], bias]
        args = *inputs, merged, grads, wanted
        target = ctx.main_grad if wanted[1] else None
        if target or runs_here(merged):
            out = _linear_gradient(hidden, weight, *args, spec, linear, main_grad=target and target.main_grad)
            of_weight = target.gradient() if target else out[1]
        else:
            out = torch.ops.tp_headloss.linear_gradient(hidden, weight, *args, *_fields(spec), *linear)
            of_weight = out[1]
        of_hidden, of_weight, of_bias = (
            g if need else None for g, need in zip((out[0], of_weight, out[2]), (*ctx.needs_input_grad[:2], bias))
        )
        return of_hidden, of_weight, None, of_bias, *(None,) * (INPUTS + 1)


class MainGrad(NamedTuple):
    """Megatron's fp32 gradient of a weight, to which the backward adds dW itself."""

    weight: torch.nn.Parameter

    @property
    def main_grad(self) -> torch.Tensor:
        return self.weight.main_grad

    def gradient(self) -> torch.Tensor | None:
        """What autograd gets in dW's place: a dummy, for the hooks of those who set Megatron's flags."""
        weight = self.weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        return make(weight)


class OneSweep(torch.autograd.Function):
    """A loss [] whose gradients were computed with it, for an upstream gradient of 1 -> the same, differentiable.

    The statistics pass through, so that whoever differentiates them hears that nobody computed that.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, loss, found, main_grad, upstream, backend, n_values, *statistics):
        ctx.main_grad, ctx.upstream, ctx.backend, ctx.once = main_grad, upstream, backend, False
        ctx.types = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        ctx.save_for_backward(*found)
        ctx.set_materialize_grads(False)
        statistics = tuple(x.view_as(x) for x in statistics)
        ctx.mark_non_differentiable(*statistics[n_values:])
        return loss.clone(), *statistics

    @staticmethod
    def backward(ctx, upstream, *of_statistics):
        if torch.is_grad_enabled():  # what the gradients depend on is not kept, so there is nothing to tie an error to
            raise RuntimeError(
                "a one-sweep head has first derivatives only, and its loss was differentiated with create_graph=True: "
                "use mode='recompute', whose gradient raises only if it is differentiated itself"
            )
        if any(g is not None for g in of_statistics):
            raise RuntimeError(
                "a one-sweep head computed the gradient of its loss alone, got one of its statistics: use "
                "mode='recompute' to differentiate what you make of them"
            )
        if upstream is None:
            return (None,) * (9 + len(of_statistics))
        main_grad, scale = ctx.main_grad, load_backend(ctx.backend).scale
        upstream = upstream.to(passes.float_type(upstream.dtype))
        if ctx.upstream is not None:  # it is in the gradients; another one makes them NaN instead of wrong
            upstream = torch.where(upstream == ctx.upstream, 1.0, torch.nan).to(upstream.dtype)
            if main_grad is not None and ctx.once:
                raise RuntimeError("with a declared upstream, dW went into main_grad once: there is no second backward")
            ctx.once = True
        out = [None, None, None]
        for i, (gradient, dtype) in enumerate(zip(ctx.saved_tensors, ctx.types)):
            if not ctx.needs_input_grad[i]:
                continue
            if i == 1 and main_grad is not None:
                if gradient is not None:
                    scale(main_grad.main_grad, gradient, upstream, add=True)
                else:
                    main_grad.main_grad.view(-1)[:1].mul_(upstream)
                out[1] = main_grad.gradient()
            else:
                out[i] = torch.empty_like(gradient, dtype=dtype)
                scale(out[i], gradient, upstream)
        return *out, *(None,) * (6 + len(of_statistics))


class TokenSums(torch.autograd.Function):
    """Per-token values (any shape, contiguous) -> loss [] and sums over valid tokens, in one kernel; see `reduce`.

    Differentiable in the values of the terms, the first ``len(plan.coefficients)``. For the Triton backend only;
    elsewhere the same is written in plain torch.
    """

    @staticmethod
    def forward(ctx, reduction, valid, *values):
        loss, sums, divisor = load_backend("triton").token_sums(values, valid, reduction)
        ctx.save_for_backward(valid, reduction.weight, divisor, *values[: len(reduction.plan.coefficients)])
        ctx.plan = reduction.plan
        ctx.mark_non_differentiable(sums)
        ctx.set_materialize_grads(False)
        return loss, sums

    @staticmethod
    @_first_derivative_only
    def backward(ctx, saved, loss, _sums):
        valid, weight, divisor, *values = saved
        needed = ctx.needs_input_grad[2:]
        if loss is None:
            return (None,) * (2 + len(needed))
        rows = load_backend("triton").token_sums_gradient(loss, tuple(values), valid, weight, divisor, ctx.plan)
        grads = [
            (row if value.dim() == 1 else row.view(value.shape)) if need else None
            for row, value, need in zip(rows.unbind(0), values, needed)
        ]
        return (None,) * 2 + tuple(grads) + (None,) * (len(needed) - len(grads))


class ToShards(torch.autograd.Function):
    """x that ranks share, for each to use with its own shard; backward: the ranks' parts of the gradient are added up.

    x [.., ] replicated ("all_reduce", "none") or [S/P, ..] of this rank ("reduce_scatter") -> [.., ] or [S, ..]. The
    collective comes on every rank, whatever requires a gradient there.
    """

    @staticmethod
    def forward(ctx, x, how, world_size, group_name, everywhere=None):
        ctx.reduction = how, world_size, group_name
        if how == "reduce_scatter":
            return torch.ops.tp_headloss.gather_tokens(x, world_size, group_name)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return FromShards.apply(grad, *ctx.reduction), None, None, None, None


class FromShards(torch.autograd.Function):
    """The converse: the ranks' parts added up, "all_reduce" [..] replicated, "reduce_scatter" [S/P, ..] of [S, ..]."""

    @staticmethod
    def forward(ctx, x, how, world_size, group_name, everywhere=None):
        ctx.reduction = how, world_size, group_name
        return torch.ops.tp_headloss.reduce_tokens(x, *ctx.reduction)

    @staticmethod
    def backward(ctx, grad):
        return ToShards.apply(grad, *ctx.reduction), None, None, None, None
