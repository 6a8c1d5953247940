"""Policy-gradient objectives that treat a few tokens of high covariance of advantage and log-prob apart: per-token loss
[..] fp32. Words as in `policy`."""

from __future__ import annotations

import torch

from ..validation import expect_bounds, expect_mask, expect_share
from .policy import CLIP, clipped_objective
from .ratio import expect_broadcast, log_ratio


def _covariance(log_prob, advantages, mask):
    """(A - mean A)(l - mean l) [..] with means over the mask, and -inf outside of it."""
    expect_broadcast("advantages", advantages, log_prob)
    expect_mask("mask", mask, log_prob.shape)
    count = mask.sum().clamp(min=1)
    advantages, log_prob = advantages.expand_as(log_prob), log_prob.detach()

    def centred(x):
        x = torch.where(mask, x, 0.0)
        return x - x.sum() / count

    return torch.where(mask, centred(advantages) * centred(log_prob), -torch.inf)


def _largest(keys, count):
    """bool [..], True at the `count` largest keys, of equal keys at the first; count is a tensor, so nothing waits."""
    order = keys.flatten().sort(descending=True, stable=True).indices
    return (order.argsort() < count).view_as(keys)  # the inverse permutation: each key's rank


def clip_cov(
    log_prob: torch.Tensor,
    *,
    advantages: torch.Tensor,
    old_log_prob: torch.Tensor,
    mask: torch.Tensor,
    noise: torch.Tensor,
    clip: tuple[float, float] = CLIP,
    fraction: float = 0.0002,
    bounds: tuple[float, float] = (1.0, 5.0),
) -> torch.Tensor:
    """Return the clipped objective, but 0 at a few random tokens with a high covariance of A and l.

    Candidates are the tokens that the clip does not affect and whose covariance is strictly within ``bounds``. The
    max(1, fraction * tokens) candidates with the largest noise lose their loss.

    Args:
        log_prob: [..] fp32 of the policy being trained, nats.
        advantages: [..], or with sizes of 1 that broadcast to it; constants.
        old_log_prob: [..] of the policy that sampled the tokens; a constant.
        mask: bool [..], the valid tokens.
        noise: [..] uniform in [0, 1), equal on every rank that shares the vocabulary.
        clip: as in `ppo_clip`.
        fraction: share of the valid tokens that lose their loss.
        bounds: range of the covariance of candidates.

    Returns:
        [..] fp32, loss per token, neither masked nor averaged.

    Raises:
        TypeError, ValueError: a clip, bounds or fraction that cannot be, a mask of another kind, or inputs that do not
            broadcast to log_prob with as many dimensions.

    Examples:
        >>> l, old = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.5, -2.5])
        >>> advantages = torch.tensor([1.0, 1.0, -1.0])
        >>> options = {"old_log_prob": old, "mask": l < 0, "noise": torch.tensor([0.1, 0.9, 0.5])}
        >>> losses.clip_cov(l, advantages=advantages, **options, bounds=(0.0, 5.0))
        tensor([ 0.0000, -1.2000,  0.8000])

    Source:
        Clip-Cov (arXiv:2505.22617).
    """
    expect_broadcast("noise", noise, log_prob)
    expect_bounds("bounds", bounds)
    expect_share("fraction", fraction)
    ratio = log_ratio(log_prob, old_log_prob).exp()
    clipped_away = (advantages < 0) & (ratio < 1 - clip[0]) | (advantages > 0) & (ratio > 1 + clip[1])
    covariance = _covariance(log_prob, advantages, mask)
    candidates = mask & ~clipped_away & (covariance > bounds[0]) & (covariance < bounds[1])
    count = (fraction * mask.sum()).floor().clamp(min=1)
    dropped = candidates & _largest(torch.where(candidates, noise, -1.0), count)
    return torch.where(dropped, 0.0, clipped_objective(ratio, advantages, clip, None))


def kl_cov(
    log_prob: torch.Tensor,
    *,
    advantages: torch.Tensor,
    old_log_prob: torch.Tensor,
    mask: torch.Tensor,
    fraction: float = 0.0002,
    coefficient: float = 1.0,
) -> torch.Tensor:
    """Return -r A, plus a penalty at a few tokens with the largest covariance of A and l.

    The penalty is coefficient * abs(log r), at max(1, fraction * tokens) tokens.

    Args:
        log_prob: [..] fp32 of the policy being trained, nats.
        advantages: [..], or with sizes of 1 that broadcast to it; constants.
        old_log_prob: [..] of the policy that sampled the tokens; a constant.
        mask: bool [..], the valid tokens.
        fraction: share of the valid tokens that are penalised.
        coefficient: factor of the penalty.

    Returns:
        [..] fp32, loss per token, neither masked nor averaged.

    Raises:
        TypeError, ValueError: a fraction outside of [0, 1], a mask of another kind, or inputs that do not broadcast to
            log_prob with as many dimensions.

    Examples:
        >>> l, old = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.5, -2.5])
        >>> advantages = torch.tensor([1.0, 1.0, -1.0])
        >>> losses.kl_cov(l, advantages=advantages, old_log_prob=old, mask=l < 0)
        tensor([-1.0000, -1.6487,  1.1065])

    Source:
        KL-Cov (arXiv:2505.22617).
    """
    expect_share("fraction", fraction)
    log_r = log_ratio(log_prob, old_log_prob)
    count = (fraction * mask.sum()).floor().clamp(min=1)
    penalised = mask & _largest(_covariance(log_prob, advantages, mask), count)
    return -advantages * log_r.exp() + torch.where(penalised, coefficient * log_r.abs(), 0.0)
