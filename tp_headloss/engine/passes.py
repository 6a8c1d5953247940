"""Forward and backward over materialised logits, including the exchanges. Used by the operators and the linear head."""

from __future__ import annotations

import math

import torch

from .. import comm
from ..request import Request, accumulation_dtype
from ..symmetric_memory import symmetric_memory
from . import sum_transport
from .backend import load_backend


def statistics(request: Request) -> list[torch.Tensor]:
    """[merged rows [R, N], values [K, N], *flags [N]] in the layout's order; one exchange, or two."""
    outputs = _first_exchange(request)
    if request.layout.second:
        merged, values, *_ = outputs
        second_exchange(second_packets(request, merged), merged, values, request)
    return outputs


def _first_exchange(request: Request) -> list[torch.Tensor]:
    facts, logits = request.facts, request.tensors.logits
    backend = load_backend(facts.backend)
    if facts.transport in ("auto", "symm_mem") and facts.world_size > 1 and backend.shares_memory(logits):
        shape = _packets_shape(request)
        memory = symmetric_memory(facts.transport, facts.group_name, math.prod(shape), logits.device)
        if memory is not None:
            packets = memory.packets(shape)
            try:
                backend.local_statistics(packets, request, memory)
                memory.barrier()
                return backend.merge_packets(packets, request, memory)
            except BaseException:
                memory.interrupted = True
                raise
    return exchange(local_packets(request), request)


def _packets_shape(request: Request) -> tuple[int, int, int]:
    return request.facts.chunks, len(request.layout.packet), request.tensors.logits.shape[0]


def local_packets(request: Request) -> torch.Tensor:
    """This rank's packets [chunks, rows, N]."""
    logits = request.tensors.logits
    packets = logits.new_empty(_packets_shape(request), dtype=accumulation_dtype(logits.dtype))
    load_backend(request.facts.backend).local_statistics(packets, request)
    return packets


def exchange(packets: torch.Tensor, request: Request) -> list[torch.Tensor]:
    """This rank's packets of all tokens -> what `statistics` returns; logits are not read."""
    facts = request.facts
    if facts.transport == "sum":
        return sum_transport.exchange(packets, request)
    packets = comm.gather_packets(packets, facts.world_size, facts.group_name)
    return load_backend(facts.backend).merge_packets(packets, request)


def second_packets(request: Request, merged: torch.Tensor) -> torch.Tensor:
    """This rank's packets of the second exchange, which needs the merged sums of the first."""
    packets = merged.new_empty((request.facts.chunks, len(request.layout.second), merged.shape[1]))
    load_backend(request.facts.backend).second_statistics(packets, request, merged)
    return packets


def second_exchange(packets: torch.Tensor, merged: torch.Tensor, values: torch.Tensor, request: Request) -> None:
    """Merge the packets of the second exchange into the last rows of `merged` and `values`."""
    packets = comm.gather_packets(packets, request.facts.world_size, request.facts.group_name)
    whole = merged[request.layout.merged.index("sum")]
    sums = torch.where(whole.isnan(), torch.nan, packets.sum(0, dtype=torch.float64))
    values[-len(sums) // 2 :] = sums[::2].clamp(min=0)
    merged[-len(sums) // 2 :] = sums[1::2]


def write_gradient(out: torch.Tensor, request: Request, merged: torch.Tensor, grads: dict) -> None:
    """d loss / d logits -> `out`, which may be the logits; grads: upstream gradients [N] by name, or None."""
    grads = {name: g.contiguous() for name, g in grads.items() if g is not None}
    load_backend(request.facts.backend).logits_gradient(out, request, merged, grads)


def kernel_gradients(upstream: dict) -> dict:
    """Upstream gradients of the statistics -> those that backends take: target_logit is log_prob + lse."""
    target_logit = upstream.get("target_logit")
    grads = {name: g for name, g in upstream.items() if g is not None and name != "target_logit"}
    if target_logit is not None:
        for name in ("lse", "log_prob"):
            grads[name] = target_logit if name not in grads else grads[name] + target_logit
    return grads
