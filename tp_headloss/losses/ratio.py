"""Ratios of probabilities from log-probs, computed so that they neither overflow nor hide a NaN."""

from __future__ import annotations

import math
from typing import Any

import torch

LOG_RATIO_CLAMP = 20.0  # verl's; exp(20) is 4.9e8, and its square still fits fp32


class _Bounded(torch.autograd.Function):
    """Clamp whose gradient is NaN, and not 0, for NaN."""

    @staticmethod
    def forward(ctx, x, low, high):
        clamped = x.clamp(low, high)
        ctx.save_for_backward(x, clamped)
        return clamped

    @staticmethod
    def backward(ctx, grad):
        x, clamped = ctx.saved_tensors
        return torch.where(x == clamped, grad, clamped * 0 * grad), None, None  # 0, or NaN if either factor is NaN


def bounded(x: torch.Tensor, low: Any = -math.inf, high: Any = math.inf) -> torch.Tensor:
    """Return x [..] clamped to [low, high], two numbers or two tensors like x, with zero gradient beyond the bounds.

    NaN stays NaN in value and gradient; torch.clamp gives a NaN the gradient 0, and hides it from checks of gradients.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x.clamp(low, high)
    return _Bounded.apply(x, low, high)


def expect_broadcast(name: str, x: Any, values: torch.Tensor):
    """Raise ValueError unless x is a scalar or broadcasts to values [..] with as many dimensions, as the inputs of a
    `HeadLoss` do: [B] beside [B, S] would be one value per column."""
    if not isinstance(x, torch.Tensor) or x.dim() == 0:
        return
    if x.dim() != values.dim() or any(a not in (1, b) for a, b in zip(x.shape, values.shape)):
        raise ValueError(
            f"{name} must broadcast to the tokens {list(values.shape)} with as many dimensions, got {list(x.shape)}: a "
            "value per row is [B, 1]"
        )


def log_ratio(log_prob: torch.Tensor, other: torch.Tensor, clamp: float | None = LOG_RATIO_CLAMP) -> torch.Tensor:
    """Return log_prob - other, clamped to +-clamp with zero gradient beyond; NaN stays NaN.

    Args:
        log_prob, other: [..] fp32, nats.
        clamp: bound of the result; None: not clamped.

    Returns:
        [..] fp32.

    Raises:
        ValueError: a clamp that is not positive, or `other` of another shape.

    Examples:
        >>> losses.log_ratio(torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -90.0]))
        tensor([ 0.5000, 20.0000])
    """
    expect_broadcast("the log-probs of another policy", other, log_prob)
    if clamp is not None and not clamp > 0:
        raise ValueError(f"a clamp must be a positive number or None, got {clamp}")
    limit = math.inf if clamp is None else clamp
    return bounded(log_prob - other, -limit, limit)


def scaled(factor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return factor * values [..], where 0 times an infinity is 0; NaN stays NaN."""
    expect_broadcast("a factor", factor, values)
    return torch.where((factor == 0) & values.isinf(), 0.0, factor * values)


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, source):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return None, grad


def with_gradient_of(value: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return `value` [..] with the gradient of `source` [..]: value + source - source.detach(), also for infinities."""
    return _WithGradientOf.apply(value.detach(), source)
