"""The bridge from logits to statistics: two registered operators and one autograd.Function around them.

Both operators take plain tensors, numbers and strings (the fields of `HeadSpec`), so that `torch.compile` sees opaque,
shape-inferable calls and CUDA graphs capture exactly what eager runs.
"""

from __future__ import annotations

import math

import torch

from . import comm
from .backends import load_backend
from .stats import HeadSpec, empty_outputs, finish, flag_names, from_lanes, packet_rows, to_lanes, value_rows

_SPEC = (
    "int start, int valid_width, int vocab_size, int chunk_size, int chunks, int world_size, str[] want, "
    "float scale, float softcap, float temperature, int ignore_index, str backend, str transport, str group_name, "
    "float teacher_scale, float student_scale"
)
_INPUTS = (
    "Tensor logits, Tensor? labels, Tensor? bias, Tensor? temperatures, Tensor? total_weight, Tensor? teacher, "
    "Tensor? scales"
)
_GRADS = (
    "Tensor merged, Tensor? lse, Tensor? log_prob, Tensor? entropy, Tensor? total, Tensor? forward_kl, "
    "Tensor? reverse_kl"
)
INPUTS = _INPUTS.count(",") + 1
torch.library.define("tp_headloss::statistics", f"({_INPUTS}, {_SPEC}) -> Tensor[]")
torch.library.define("tp_headloss::logits_gradient", f"({_INPUTS}, {_GRADS}, {_SPEC}) -> Tensor")


def _float_type(logits) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _statistics(logits, labels, bias, temperatures, total_weight, teacher, scales, spec):
    backend, has_labels = load_backend(spec.backend), labels is not None
    shape = (spec.chunks, len(packet_rows(has_labels, spec.want)), logits.shape[0])
    inputs = logits, labels, bias, temperatures, total_weight, teacher, scales
    if spec.transport in ("auto", "symm_mem") and spec.world_size > 1 and backend.shares_memory(logits):
        memory = comm.symmetric_memory(spec.transport, spec.group_name, math.prod(shape), logits.device)
        if memory is not None:
            packets = memory.packets(shape)
            try:
                backend.local_statistics(packets, *inputs, spec, memory)
                memory.barrier()
                return backend.merge_packets(packets, labels, scales, spec, memory)
            except BaseException:
                memory.interrupted = True
                raise
    packets = logits.new_empty(shape, dtype=_float_type(logits))
    backend.local_statistics(packets, *inputs, spec)
    if spec.transport == "sum":
        lanes = comm.sum_lanes(to_lanes(packets, has_labels, spec), spec.world_size, spec.group_name)
        return finish(from_lanes(lanes, has_labels, spec), labels, spec, packets.dtype)
    packets = comm.gather_packets(packets, spec.world_size, spec.group_name)
    return backend.merge_packets(packets, labels, scales, spec)


def _statistics_fake(logits, labels, bias, temperatures, total_weight, teacher, scales, spec):
    return empty_outputs(logits, logits.shape[0], labels is not None, spec.want, _float_type(logits))


def _write_gradient(out, inputs, merged, grads, spec):
    grads = [None if g is None else g.contiguous() for g in grads]
    load_backend(spec.backend).logits_gradient(out, *inputs, merged, grads, spec)


def _logits_gradient(*args):
    *arguments, spec = args
    inputs, merged, grads = arguments[:INPUTS], arguments[INPUTS], arguments[INPUTS + 1 :]
    out = torch.empty_like(inputs[0])
    _write_gradient(out, inputs, merged, grads, spec)
    return out


def _logits_gradient_fake(logits, *_):
    return torch.empty_like(logits)


def _with_spec(function):
    """The function behind an operator, whose schema spells out the fields of the spec."""

    def operator(*args):
        fields = dict(zip(HeadSpec._fields, args[-len(HeadSpec._fields) :]))
        spec = HeadSpec(**{**fields, "want": tuple(fields["want"])})
        return function(*args[: -len(fields)], spec)

    return operator


for _name, _real, _fake in (
    ("tp_headloss::statistics", _statistics, _statistics_fake),
    ("tp_headloss::logits_gradient", _logits_gradient, _logits_gradient_fake),
):
    torch.library.impl(_name, "default", _with_spec(_real))
    torch.library.register_fake(_name, _with_spec(_fake))


DIFFERENTIABLE = ("lse", "log_prob", "target_logit", "entropy", "total", "forward_kl", "reverse_kl")
OUTPUTS = (*DIFFERENTIABLE, "teacher_entropy", "owners", "mass", "argmax", "valid", "hits")


def runs_here(tensor) -> bool:
    """Eager and unobserved, where the operators' dispatch would only cost host time."""
    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    return plain and not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()


def _fields(spec: HeadSpec) -> list:
    return [list(field) if isinstance(field, tuple) else field for field in spec]


def _once_differentiable(backward):
    """torch's decorator, without its cost where no graph of the backward is being built."""
    checked = torch.autograd.function.once_differentiable(backward)

    def wrapper(ctx, *grads):
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        # torch refuses the second derivative only where an upstream gradient requires one, and a loss's is a constant
        return checked(ctx, *(g if g is None else g.detach().requires_grad_() for g in grads))

    return wrapper


class Statistics(torch.autograd.Function):
    """logits [N, width] sharded on V -> the statistics named in `OUTPUTS`, None where off; with a `Reduction` (Triton
    backend only) also its loss [] and sums, else None.

    Saves the inputs and O(N) merged rows, never probabilities. Backward: no communication.
    """

    @staticmethod
    def forward(ctx, logits, labels, bias, temperatures, total_weight, teacher, scales, spec, inplace, reduction):
        inputs = logits, labels, bias, temperatures, total_weight, teacher, scales
        if runs_here(logits):
            merged, values, *flags = _statistics(*inputs, spec)
        else:
            merged, values, *flags = torch.ops.tp_headloss.statistics(*inputs, *_fields(spec))
        ctx.spec, ctx.inplace = spec, inplace
        ctx.set_materialize_grads(False)
        has_labels = labels is not None
        out = dict(zip(value_rows(has_labels, spec.want), values.unbind(0)))
        out.update(zip(flag_names(has_labels, spec.want), flags))
        fixed = [value for name, value in out.items() if name not in DIFFERENTIABLE]
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
    @_once_differentiable
    def backward(ctx, *upstream):
        *inputs, merged = (saved := ctx.saved_tensors)[: INPUTS + 1]
        loss = upstream[-2]
        upstream = dict(zip(DIFFERENTIABLE, upstream))
        if loss is not None:
            valid, weight, divisor, *summed = saved[INPUTS + 1 :]
            backend = load_backend(ctx.spec.backend)
            rows = backend.token_sums_gradient(loss, tuple(summed), valid, weight, divisor, ctx.plan)
            for name, row in zip(ctx.plan.statistics, rows.unbind(0)):
                if name in upstream:
                    upstream[name] = row if upstream[name] is None else upstream[name] + row
        lse, log_prob, target_logit, *others = upstream.values()
        if target_logit is not None:  # z_y = log_prob + lse
            lse = target_logit if lse is None else lse + target_logit
            log_prob = target_logit if log_prob is None else log_prob + target_logit
        grads = (lse, log_prob, *others)
        if all(g is None for g in grads):
            return (None,) * (INPUTS + 3)
        if ctx.inplace:
            logits = inputs[0].detach()
            _write_gradient(logits, inputs, merged, grads, ctx.spec)
            torch.autograd.graph.increment_version(inputs[0])
        elif runs_here(merged):
            logits = torch.empty_like(inputs[0])
            _write_gradient(logits, inputs, merged, grads, ctx.spec)
        else:
            logits = torch.ops.tp_headloss.logits_gradient(*inputs, merged, *grads, *_fields(ctx.spec))
        bias = logits.sum(0, dtype=merged.dtype).to(inputs[2].dtype) if ctx.needs_input_grad[2] else None
        return logits, None, bias, *(None,) * INPUTS


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
    @_once_differentiable
    def backward(ctx, loss, _sums):
        valid, weight, divisor, *values = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        if loss is None:
            return (None,) * (2 + len(needed))
        rows = load_backend("triton").token_sums_gradient(loss, tuple(values), valid, weight, divisor, ctx.plan)
        grads = [
            (row if value.dim() == 1 else row.view(value.shape)) if need else None
            for row, value, need in zip(rows.unbind(0), values, needed)
        ]
        return (None,) * 2 + tuple(grads) + (None,) * (len(needed) - len(grads))
