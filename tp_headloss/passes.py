"""A pass over logits that exist: forward with its exchanges, and backward. What operators and sweeps are made of."""

from __future__ import annotations

import math

import torch

from . import comm
from .backends import load_backend
from .stats import (
    OF_TOPK,
    HeadSpec,
    Inputs,
    finish,
    finish_later,
    from_lanes,
    later_rows,
    packet_rows,
    to_lanes,
)

# What has an upstream gradient in the kernels: target_logit's is lse's and log_prob's.
GRADS = ("lse", "log_prob", "entropy", "total", "forward_kl", "reverse_kl", "jsd", "total_variation", *OF_TOPK)


def float_type(logits_dtype: torch.dtype) -> torch.dtype:
    """Of everything per token."""
    return torch.float64 if logits_dtype == torch.float64 else torch.float32


def statistics(inputs: Inputs, spec: HeadSpec) -> list[torch.Tensor]:
    """-> [merged rows [R, N], values [K, N], *flags [N]], named in `stats`; one exchange, or two."""
    outputs = _first_exchange(inputs, spec)
    if later_rows(spec.want):
        merged, values, *_ = outputs
        second_exchange(later_packets(inputs, merged, spec), merged, values, spec)
    return outputs


def _first_exchange(inputs: Inputs, spec: HeadSpec):
    backend, logits = load_backend(spec.backend), inputs.logits
    if spec.transport in ("auto", "symm_mem") and spec.world_size > 1 and backend.shares_memory(logits):
        shape = _packets_shape(inputs, spec)
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
    return exchange(local_packets(inputs, spec), inputs, spec)


def _packets_shape(inputs: Inputs, spec: HeadSpec):
    return spec.chunks, len(packet_rows(inputs.labels is not None, spec.want)), inputs.logits.shape[0]


def local_packets(inputs: Inputs, spec: HeadSpec) -> torch.Tensor:
    """This rank's packets [chunks, rows, N]."""
    packets = inputs.logits.new_empty(_packets_shape(inputs, spec), dtype=float_type(inputs.logits.dtype))
    load_backend(spec.backend).local_statistics(packets, inputs, spec)
    return packets


def exchange(packets: torch.Tensor, inputs: Inputs, spec: HeadSpec) -> list[torch.Tensor]:
    """This rank's packets of all tokens -> what `statistics` returns; logits are not looked at."""
    if spec.transport == "sum":
        has_labels = inputs.labels is not None
        lanes = comm.sum_lanes(to_lanes(packets, has_labels, spec), spec.world_size, spec.group_name)
        return finish(from_lanes(lanes, has_labels, spec), inputs.labels, spec, packets.dtype)
    packets = comm.gather_packets(packets, spec.world_size, spec.group_name)
    return load_backend(spec.backend).merge_packets(packets, inputs, spec)


def later_packets(inputs: Inputs, merged: torch.Tensor, spec: HeadSpec) -> torch.Tensor:
    """The packets of the second exchange, which need what the first one merged."""
    packets = merged.new_empty((spec.chunks, len(later_rows(spec.want)), merged.shape[1]))
    load_backend(spec.backend).later_statistics(packets, inputs, merged, spec)
    return packets


def second_exchange(packets, merged, values, spec: HeadSpec) -> None:
    """Writes the last rows of both."""
    finish_later(comm.gather_packets(packets, spec.world_size, spec.group_name), merged, values)


def write_gradient(out: torch.Tensor, inputs: Inputs, merged: torch.Tensor, grads, spec: HeadSpec) -> None:
    """d loss / d logits -> `out`, which may be the logits; grads: per name of `GRADS`, [N] or None."""
    grads = {name: g.contiguous() for name, g in zip(GRADS, grads) if g is not None}
    load_backend(spec.backend).logits_gradient(out, inputs, merged, grads, spec)
