"""Forward and backward over materialised logits, including the exchanges. Used by the operators and
the linear head.

A forward is: every rank reads its logits and writes packets, a few numbers for each token; the
transport brings all ranks' packets to every rank; a merge joins them in one order. It is the only
exchange of most calls. Two statistics need more. A rank that is counted compares logits with the
label's, which one rank has: a sum over ranks, before. And a divergence from a mixture of two
distributions needs both of their normalisers first: a second exchange of packets, after.
"""

from typing import NamedTuple

import torch

from ..ranks.comm import gather_parts, reduce_in_place
from ..statistics import AT_IDS, MaybeNone
from ..statistics.at_ids import gradients_of_log_probs_at
from .backend import load_backend
from .request import Request, accumulation_dtype
from .transports import resolve_transport


def statistics(request: Request, launches=None) -> list[torch.Tensor]:
    """Return [merged rows [R, N], values [K, N], *flags [N]] in the layout's order; one exchange,
    or up to three.

    launches: what has the functions `local_statistics` and `merge_packets`; None: the backend.
    """
    transport, request = resolve_transport(request), with_label_logits(request)
    outputs = transport.merge(transport.write(request, launches), request, launches)
    if request.layout.second:
        second_exchange(second_packets(request, outputs[0]), outputs, request)
    return outputs


def with_label_logits(request: Request) -> Request:
    """Return the request with the labels' transformed logits [N] if a statistic compares others
    with them: an exchange of one number per token, which is 0 on every rank but the one that has
    the label."""
    if not request.layout.needs_label_logits:
        return request
    facts, logits = request.facts, request.tensors.logits
    found = logits.new_empty(logits.shape[0], dtype=accumulation_dtype(logits.dtype))
    load_backend(facts.backend).label_logits(found, request)
    found = reduce_in_place(found, facts.world_size, facts.group_name)
    return request._replace(tensors=request.tensors._replace(label_logits=found))


class Reduced(NamedTuple):
    """A reduction over the values of statistics, as `head_loss.reduction` defines it."""

    loss: torch.Tensor  # [] fp32
    sums: torch.Tensor  # [S + 1] fp32: of each value, then the count
    # [] fp64: 1 / what the loss was divided by; [2] of one read, with the upstream gradient that
    # its gradient is for
    inverse: torch.Tensor
    # [6, N] derivatives of the undivided loss by `one_read.params.TERMS`; None where the loss is a
    # sum of statistics
    slopes: torch.Tensor | MaybeNone = None


def reduced_statistics(request: Request, reduction) -> tuple[torch.Tensor, tuple, Reduced]:
    """Merged rows, the layout's outputs, and a reduction of them. For the triton backend."""
    merged, values, *flags = statistics(request)
    by_output = *values.unbind(0), *flags
    named = dict(zip(request.layout.outputs, by_output))
    summed = tuple([named[name] for name in reduction.plan.statistics])
    return (
        merged,
        by_output,
        Reduced(*load_backend("triton").token_sums(summed, named["valid"], reduction)),
    )


def second_packets(request: Request, merged: torch.Tensor) -> torch.Tensor:
    """Return this rank's packets of the second exchange, which needs the merged sums of the
    first."""
    packets = merged.new_empty((request.facts.chunks, len(request.layout.second), merged.shape[1]))
    load_backend(request.facts.backend).second_statistics(packets, request, merged)
    return packets


def second_exchange(packets: torch.Tensor, outputs: list[torch.Tensor], request: Request) -> None:
    """Merge the packets of the second exchange into the last rows of merged rows and values among
    the outputs."""
    packets = gather_parts(packets, request.facts.world_size, request.facts.group_name)
    load_backend(request.facts.backend).merge_second(packets, outputs, request.layout)


def write_gradient(
    out: torch.Tensor, request: Request, merged: torch.Tensor, grads: dict, *loss
) -> None:
    """Write d loss / d logits into `out`, which may be the logits; grads: upstream gradients [N] by
    name, or None.

    loss: nothing, or for the triton backend the gradient [] of a reduced loss, 1 / its divisor []
    and token weights; then grads are coefficients (c,) of the loss, or (c, value) where the
    statistic's value [N] is squared.
    """
    if not loss:
        grads = {name: g.contiguous() for name, g in grads.items() if g is not None}
    load_backend(request.facts.backend).logits_gradient(out, request, merged, grads, *loss)


def linear_packets(hidden, weight, request: Request, rounded: bool, budget: int) -> torch.Tensor:
    """This rank's packets [chunks, rows, N] of logits that are never stored."""
    packets = hidden.new_empty(
        (request.facts.chunks, len(request.layout.packet), hidden.shape[0]), dtype=torch.float32
    )
    load_backend(request.facts.backend).linear_statistics(
        packets, hidden, weight, request, rounded, budget
    )
    return packets


def kernel_gradients(upstream: dict, ids: torch.Tensor | None = None) -> dict:
    """Convert upstream gradients to what backends take: target_logit is log_prob + lse, log-probs
    of given ids are logits - lse."""
    grads = {name: g for name, g in upstream.items() if g is not None}
    for name in AT_IDS:
        if name in grads and ids is not None:
            grads[name], lse = gradients_of_log_probs_at(grads[name], ids)
            grads["lse"] = lse if "lse" not in grads else grads["lse"] + lse
    if (target_logit := grads.pop("target_logit", None)) is not None:
        for name in ("lse", "log_prob"):
            grads[name] = target_logit if name not in grads else grads[name] + target_logit
    return grads
