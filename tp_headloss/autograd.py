"""The bridge from logits to statistics: two registered operators and one autograd.Function around them.

Both operators take plain tensors, numbers and strings (the fields of `HeadSpec`), so that `torch.compile` sees opaque,
shape-inferable calls and CUDA graphs capture exactly what eager runs.
"""

from __future__ import annotations

import math

import torch

from . import comm
from .backends import load_backend
from .stats import (
    OF_TOPK,
    HeadSpec,
    Inputs,
    empty_outputs,
    finish,
    finish_later,
    flag_names,
    from_lanes,
    later_rows,
    packet_rows,
    to_lanes,
    value_rows,
)

# What has an upstream gradient in the kernels: target_logit's is lse's and log_prob's.
GRADS = ("lse", "log_prob", "entropy", "total", "forward_kl", "reverse_kl", "jsd", "total_variation", *OF_TOPK)
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
torch.library.define(
    "tp_headloss::entries",
    "(Tensor ids, Tensor log_probs, Tensor? mask, Tensor? scales, float scale, bool renormalize, int vocab_size, "
    "str backend) -> (Tensor, Tensor)",
)


def _float_type(logits) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _statistics(*args):
    *inputs, spec = args
    inputs = Inputs(*inputs)
    outputs = _first_exchange(inputs, spec)
    if rows := later_rows(spec.want):
        merged, values, *_ = outputs
        packets = values.new_empty((spec.chunks, len(rows), values.shape[1]))
        load_backend(spec.backend).later_statistics(packets, inputs, merged, spec)
        finish_later(comm.gather_packets(packets, spec.world_size, spec.group_name), merged, values)
    return outputs


def _first_exchange(inputs: Inputs, spec: HeadSpec):
    backend, logits, has_labels = load_backend(spec.backend), inputs.logits, inputs.labels is not None
    shape = (spec.chunks, len(packet_rows(has_labels, spec.want)), logits.shape[0])
    if spec.transport in ("auto", "symm_mem") and spec.world_size > 1 and backend.shares_memory(logits):
        memory = comm.symmetric_memory(spec.transport, spec.group_name, math.prod(shape), logits.device)
        if memory is not None:
            packets = memory.packets(shape)
            try:
                backend.local_statistics(packets, inputs, spec, memory)
                memory.barrier()
                return backend.merge_packets(packets, inputs, spec, memory)
            except BaseException:
                memory.interrupted = True
                raise
    packets = logits.new_empty(shape, dtype=_float_type(logits))
    backend.local_statistics(packets, inputs, spec)
    if spec.transport == "sum":
        lanes = comm.sum_lanes(to_lanes(packets, has_labels, spec), spec.world_size, spec.group_name)
        return finish(from_lanes(lanes, has_labels, spec), inputs.labels, spec, packets.dtype)
    packets = comm.gather_packets(packets, spec.world_size, spec.group_name)
    return backend.merge_packets(packets, inputs, spec)


def _statistics_fake(logits, labels, *rest):
    return empty_outputs(logits, logits.shape[0], labels is not None, rest[-1].want, _float_type(logits))


def _write_gradient(out, inputs: Inputs, merged, grads, spec: HeadSpec):
    grads = {name: g.contiguous() for name, g in zip(GRADS, grads) if g is not None}
    load_backend(spec.backend).logits_gradient(out, inputs, merged, grads, spec)


def _logits_gradient(*args):
    *inputs, merged, grads, spec = args
    out = torch.empty_like(inputs[0])
    _write_gradient(out, Inputs(*inputs), merged, grads, spec)
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
torch.library.impl("tp_headloss::entries", "default", _entries)
torch.library.register_fake("tp_headloss::entries", _entries_fake)


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
    def forward(ctx, *args):
        *inputs, spec, inplace, reduction = args
        has_labels = inputs[1] is not None
        if runs_here(inputs[0]):
            merged, values, *flags = _statistics(*inputs, spec)
        else:
            merged, values, *flags = torch.ops.tp_headloss.statistics(*inputs, *_fields(spec))
        ctx.spec, ctx.inplace = spec, inplace
        ctx.set_materialize_grads(False)
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
        if (target_logit := upstream["target_logit"]) is not None:  # z_y = log_prob + lse
            for name in ("lse", "log_prob"):
                upstream[name] = target_logit if upstream[name] is None else upstream[name] + target_logit
        grads = [upstream[name] for name in GRADS]
        if all(g is None for g in grads):
            return (None,) * (INPUTS + 3)
        if ctx.inplace:
            logits = inputs[0].detach()
            _write_gradient(logits, Inputs(*inputs), merged, grads, ctx.spec)
            torch.autograd.graph.increment_version(inputs[0])
        elif runs_here(merged):
            logits = torch.empty_like(inputs[0])
            _write_gradient(logits, Inputs(*inputs), merged, grads, ctx.spec)
        else:
            logits = torch.ops.tp_headloss.logits_gradient(*inputs, merged, grads, *_fields(ctx.spec))
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
