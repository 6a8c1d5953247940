"""The bridge from logits to statistics: two registered operators and one autograd.Function around them.

Both operators take plain tensors, numbers and strings (the fields of `HeadSpec`), so that `torch.compile` sees opaque,
shape-inferable calls and CUDA graphs capture exactly what eager runs.
"""

from __future__ import annotations

import torch

from . import comm
from .backends import load_backend
from .stats import HeadSpec, finish, from_lanes, merged_rows, output_names, to_lanes

_SPEC = (
    "int start, int valid_width, int vocab_size, int chunk_size, int chunks, int world_size, str[] want, "
    "float scale, float softcap, float temperature, int ignore_index, str backend, str transport, str group_name"
)
_INPUTS = "Tensor logits, Tensor? labels, Tensor? bias, Tensor? temperatures, Tensor? total_weight"
_GRADS = "Tensor merged, Tensor? lse, Tensor? log_prob, Tensor? entropy, Tensor? total"
torch.library.define("tp_headloss::statistics", f"({_INPUTS}, {_SPEC}) -> Tensor[]")
torch.library.define("tp_headloss::logits_gradient", f"({_INPUTS}, {_GRADS}, {_SPEC}) -> Tensor")


def _statistics(logits, labels, bias, temperatures, total_weight, *spec):
    spec = HeadSpec(*spec)
    backend = load_backend(spec.backend)
    packets = backend.local_statistics(logits, labels, bias, temperatures, total_weight, spec)
    if spec.transport == "sum":
        lanes = comm.sum_lanes(to_lanes(packets, labels is not None, spec), spec.world_size, spec.group_name)
        return finish(from_lanes(lanes, labels is not None, spec), labels, spec, packets.dtype)
    return backend.merge_packets(comm.gather_packets(packets, spec.world_size, spec.group_name), labels, spec)


def _statistics_fake(logits, labels, bias, temperatures, total_weight, *spec):
    spec, n_rows = HeadSpec(*spec), logits.shape[0]
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    merged = logits.new_empty((len(merged_rows(labels is not None, spec.want)), n_rows), dtype=dtype)
    names = output_names(labels is not None, spec.want)
    return [merged] + [logits.new_empty(n_rows, dtype=torch.int64 if n == "argmax" else dtype) for n in names]


def _logits_gradient(logits, labels, bias, temperatures, total_weight, merged, lse, log_prob, entropy, total, *spec):
    grads = [None if g is None else g.contiguous() for g in (lse, log_prob, entropy, total)]
    out = torch.empty_like(logits)
    inputs = (logits, labels, bias, temperatures, total_weight, merged)
    load_backend(HeadSpec(*spec).backend).logits_gradient(out, *inputs, grads, HeadSpec(*spec))
    return out


def _logits_gradient_fake(logits, *_):
    return torch.empty_like(logits)


for _name, _real, _fake in (
    ("tp_headloss::statistics", _statistics, _statistics_fake),
    ("tp_headloss::logits_gradient", _logits_gradient, _logits_gradient_fake),
):
    torch.library.impl(_name, "default", _real)
    torch.library.register_fake(_name, _fake)


OUTPUTS = ("lse", "log_prob", "target_logit", "owners", "entropy", "total", "argmax", "mass")


class Statistics(torch.autograd.Function):
    """logits [N, width] sharded on V -> the statistics named in `OUTPUTS`, None where off.

    Saves the inputs and O(N) merged rows, never probabilities. Backward: no communication.
    """

    @staticmethod
    def forward(ctx, logits, labels, bias, temperatures, total_weight, spec, inplace):
        merged, *values = torch.ops.tp_headloss.statistics(logits, labels, bias, temperatures, total_weight, *spec)
        ctx.save_for_backward(logits, labels, bias, temperatures, total_weight, merged)
        ctx.spec, ctx.inplace = spec, inplace
        ctx.set_materialize_grads(False)
        out = dict(zip(output_names(labels is not None, spec.want), values))
        ctx.mark_non_differentiable(*(out[name] for name in ("owners", "argmax", "mass") if name in out))
        return tuple(out.get(name) for name in OUTPUTS)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, lse, log_prob, target_logit, _owners, entropy, total, _argmax, _mass):
        *inputs, merged = ctx.saved_tensors
        if target_logit is not None:  # z_y = log_prob + lse
            lse = target_logit if lse is None else lse + target_logit
            log_prob = target_logit if log_prob is None else log_prob + target_logit
        grads = (lse, log_prob, entropy, total)
        if all(g is None for g in grads):
            return (None,) * 7
        if ctx.inplace:
            logits = inputs[0].detach()
            spec = HeadSpec(*ctx.spec)
            grads = [None if g is None else g.contiguous() for g in grads]
            load_backend(spec.backend).logits_gradient(logits, *inputs, merged, grads, spec)
            torch.autograd.graph.increment_version(inputs[0])
        else:
            logits = torch.ops.tp_headloss.logits_gradient(*inputs, merged, *grads, *ctx.spec)
        bias = logits.sum(0, dtype=merged.dtype).to(inputs[2].dtype) if ctx.needs_input_grad[2] else None
        return logits, None, bias, None, None, None, None
