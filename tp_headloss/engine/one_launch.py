"""Losses whose forward can write the gradient, in the launch that reads the logits.

A row of logits is then read twice within microseconds, the second time from the GPU's L2 cache: 4 bytes of memory
traffic per logit of 2 bytes, where a forward and a backward of their own move 6. Statistics, losses and gradients have
the same bits either way.
"""

from __future__ import annotations

import torch

from .request import Request

GRADIENTS = ("forward", "backward")  # values of `Options.gradient`
OF_SOFTMAX = frozenset(("lse", "log_prob"))  # statistics of such a loss


def gradient_in_forward(request: Request, reduction, options) -> bool:
    """Return True if the forward of this loss writes the gradient: with `Options(gradient="forward")` and in grad mode,
    for logits that require a gradient.

    Raises ValueError where that option was chosen for a call that one launch cannot serve.
    """
    logits = request.tensors.logits
    if options.gradient == "backward" or not (torch.is_grad_enabled() and logits.requires_grad and len(logits)):
        return False
    if obstacle := _obstacle(request, reduction):
        raise ValueError(f"gradient='forward' needs {obstacle}; gradient='backward' needs none of it")
    return True


def _obstacle(request: Request, reduction) -> str | None:
    """Return what a call lacks for a forward that writes the gradient, as words of an error message, or None."""
    facts, x = request.facts, request.tensors
    if facts.world_size > 1:
        return f"the whole vocabulary on one rank, got a group of {facts.world_size}"
    if reduction is None:
        return (
            "the triton backend, a reduction over tokens, weights and denominators without a gradient, and terms that "
            "are statistics, or squares of them, as a cross-entropy without smoothing and class weights is"
        )
    statistics = reduction.plan.statistics[: len(reduction.plan.coefficients)]
    if len(set(statistics)) < len(statistics) or not OF_SOFTMAX.issuperset(statistics):
        return f"at most one term of each of {sorted(OF_SOFTMAX)}, got terms of {list(statistics)}"
    if (facts.scale, facts.softcap, facts.temperature) != (1.0, 0.0, 1.0) or x.temperatures is not None:
        return "logits without a scale, softcap or temperature"
    has_others = any(tensor is not None for tensor in (x.teacher, x.entries, x.sets, x.ids))
    if has_others or request.layout.second or request.layout.needs_label_logits:
        return "a call without a teacher, sets, given ids or ranks"
    return None


def expecting(reduction, expected: dict[torch.device, torch.Tensor], device: torch.device):
    """Return the reduction with the upstream gradient of the loss that the device saw last, at first 1: the forward
    writes the gradient for it."""
    if device not in expected:
        expected[device] = torch.ones((), device=device)
    return reduction._replace(expected=expected[device])
