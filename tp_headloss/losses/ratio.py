"""Ratios of probabilities, from log-probs, that neither overflow nor hide a NaN."""

from __future__ import annotations

import math

import torch

LOG_RATIO_CLAMP = 20.0  # verl's; exp(20) is 4.9e8, and its square still fits fp32


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, low, high):
        held = x.clamp(low, high)
        ctx.save_for_backward(x, held)
        return held

    @staticmethod
    def backward(ctx, grad):
        x, held = ctx.saved_tensors
        return torch.where(x == held, grad, held * 0 * grad), None, None  # 0, or NaN of either


def bounded(x: torch.Tensor, low: float = -math.inf, high: float = math.inf) -> torch.Tensor:
    """x [..] clamped to [low, high], with zero gradient beyond the bounds. NaN stays NaN in value and gradient, where
    torch.clamp gives a NaN no gradient at all and so hides it from whoever watches gradients."""
    return _Bounded.apply(x, low, high)


def log_ratio(log_prob: torch.Tensor, other: torch.Tensor, clamp: float | None = LOG_RATIO_CLAMP) -> torch.Tensor:
    """log_prob - other [..], clamped to +-clamp (None: not at all), with zero gradient beyond it; NaN stays NaN."""
    if clamp is not None and not clamp > 0:
        raise ValueError(f"a clamp must be a positive number or None, got {clamp}")
    limit = math.inf if clamp is None else clamp
    return bounded(log_prob - other, -limit, limit)


def scaled(factor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """factor * values [..], where 0 times an infinity is 0; NaN stays NaN."""
    return torch.where((factor == 0) & values.isinf(), 0.0, factor * values)


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, source):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return None, grad


def with_gradient_of(value: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`value` [..] forward, the gradient of `source` [..] backward: value + source - source.detach(), for infinities
    too."""
    return _WithGradientOf.apply(value.detach(), source)
