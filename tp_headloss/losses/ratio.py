"""Ratios of probabilities from log-probs, computed so that they neither overflow nor hide a NaN."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeAlias

import torch

from ..spec import (
    CONSTANT_LOG_PROBS,
    GENERATOR_LOG_PROBS,
    LOG_PROBS,
    OTHER_LOG_PROBS,
    REFERENCE_LOG_PROBS,
    ConstantPerToken,
    Pair,
    Positive,
    TokenMask,
    TokenValues,
    checked,
)

# log-probs, not probabilities: where their values are not read, nothing can tell
IN_FP32 = "best in fp32: bf16 rounds a log-prob of -10 by up to 0.03, and a ratio by as much"
NATS = f"in nats, never above 0, {IN_FP32}"
LogProb: TypeAlias = Annotated[
    torch.Tensor, LOG_PROBS, f"Log-prob of the policy being trained, {NATS}"
]
OldLogProb: TypeAlias = Annotated[
    torch.Tensor, CONSTANT_LOG_PROBS, f"Log-prob of the policy that sampled the tokens, {NATS}"
]
ReferenceLogProb: TypeAlias = Annotated[
    torch.Tensor, REFERENCE_LOG_PROBS, f"Log-prob of the reference, {NATS}"
]
GeneratorLogProb: TypeAlias = Annotated[
    torch.Tensor,
    GENERATOR_LOG_PROBS,
    f"Log-prob of the program that sampled, such as vLLM, {NATS}",
]
OtherLogProb: TypeAlias = Annotated[
    torch.Tensor, OTHER_LOG_PROBS, f"Log-prob to compare with, {NATS}"
]
Advantages: TypeAlias = ConstantPerToken
ValidTokens: TypeAlias = Annotated[TokenMask, "The tokens that count"]
Clip: TypeAlias = Annotated[Pair, "(low, high) bounds the ratio r to [1 - low, 1 + high]"]
SequenceClip: TypeAlias = Annotated[
    Pair, "(low, high) bounds the ratio s of the sequence to [1 - low, 1 + high]"
]
ClipOfConvention: TypeAlias = Annotated[
    Pair, "(low, high) bounds the ratio r as ``convention`` says, by default to [1 - low, 1 + high]"
]
LogClip: TypeAlias = Annotated[Pair, "(low, high) bounds log r to [-low, high]"]
Level: TypeAlias = Annotated[
    Literal["token", "sequence"], "Whose ratio: the token's, or that of its sequence"
]

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
        # 0, or NaN if either factor is NaN
        return torch.where(x == clamped, grad, clamped * 0 * grad), None, None


def bounded(x: torch.Tensor, low: Any = -math.inf, high: Any = math.inf) -> torch.Tensor:
    """Return x [..] clamped to [low, high], two numbers or two tensors like x, with zero gradient
    beyond the bounds.

    NaN stays NaN in value and gradient; torch.clamp gives a NaN the gradient 0, and hides it from
    checks of gradients.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x.clamp(low, high)
    return _Bounded.apply(x, low, high)


@checked
def log_ratio(
    log_prob: LogProb, other: OtherLogProb, clamp: Positive | None = LOG_RATIO_CLAMP
) -> TokenValues:
    """Return log_prob - other, clamped to +-clamp with zero gradient beyond; NaN stays NaN.

    Examples:
        >>> losses.log_ratio(torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -90.0]))
        tensor([ 0.5000, 20.0000])
    """
    limit = math.inf if clamp is None else clamp
    return bounded(log_prob - other, -limit, limit)


def scaled(factor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return factor * values [..], where 0 times an infinity is 0; NaN stays NaN."""
    return torch.where((factor == 0) & values.isinf(), 0.0, factor * values)


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, source):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return None, grad


def with_gradient_of(value: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return `value` [..] with the gradient of `source` [..]: value + source - source.detach(),
    also for infinities."""
    return _WithGradientOf.apply(value.detach(), source)
