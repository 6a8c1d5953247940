"""Objectives that treat a few tokens of high covariance of advantage and log-prob apart; words as
in `policy`."""

from __future__ import annotations

import torch

from ..spec import Bounds, ConstantValues, NotNegative, Share, TokenLoss, checked
from .policy import CLIP, clipped_objective
from .ratio import Advantages, Clip, LogProb, OldLogProb, ValidTokens, log_ratio


def _covariance(log_prob, advantages, mask):
    """(A - mean A)(l - mean l) [..] with means over the mask, and -inf outside of it."""
    count = mask.sum().clamp(min=1)
    advantages, log_prob = advantages.expand_as(log_prob), log_prob.detach()

    def centred(x):
        x = torch.where(mask, x, 0.0)
        return x - x.sum() / count

    return torch.where(mask, centred(advantages) * centred(log_prob), -torch.inf)


def _largest(keys, count):
    """bool [..], True at the `count` largest keys, of equal keys at the first; count is a tensor,
    so nothing waits."""
    order = keys.flatten().sort(descending=True, stable=True).indices
    return (order.argsort() < count).view_as(keys)  # the inverse permutation: each key's rank


@checked
def clip_cov(
    log_prob: LogProb,
    *,
    advantages: Advantages,
    old_log_prob: OldLogProb,
    mask: ValidTokens,
    noise: ConstantValues,
    clip: Clip = CLIP,
    fraction: Share = 0.0002,
    bounds: Bounds = (1.0, 5.0),
) -> TokenLoss:
    """Return the clipped objective, but 0 at a few random tokens with a high covariance of A and l.

    Candidates are the tokens that the clip does not affect and whose covariance is strictly within
    ``bounds``. The max(1, fraction * tokens) candidates with the largest noise lose their loss.

    Args:
        noise: uniform in [0, 1), equal on every rank that shares the vocabulary.

    Examples:
        >>> l, old = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.5, -2.5])
        >>> advantages = torch.tensor([1.0, 1.0, -1.0])
        >>> options = {"old_log_prob": old, "mask": l < 0, "noise": torch.tensor([0.1, 0.9, 0.5])}
        >>> losses.clip_cov(l, advantages=advantages, **options, bounds=(0.0, 5.0))
        tensor([ 0.0000, -1.2000,  0.8000])

    Source: Clip-Cov (arXiv:2505.22617).
    """
    ratio = log_ratio(log_prob, old_log_prob).exp()
    clipped_away = (advantages < 0) & (ratio < 1 - clip[0]) | (advantages > 0) & (
        ratio > 1 + clip[1]
    )
    covariance = _covariance(log_prob, advantages, mask)
    candidates = mask & ~clipped_away & (covariance > bounds[0]) & (covariance < bounds[1])
    count = (fraction * mask.sum()).floor().clamp(min=1)
    dropped = candidates & _largest(torch.where(candidates, noise, -1.0), count)
    return torch.where(dropped, 0.0, clipped_objective(ratio, advantages, clip, None))


@checked
def kl_cov(
    log_prob: LogProb,
    *,
    advantages: Advantages,
    old_log_prob: OldLogProb,
    mask: ValidTokens,
    fraction: Share = 0.0002,
    coefficient: NotNegative = 1.0,
) -> TokenLoss:
    """Return -r A, plus a penalty at a few tokens with the largest covariance of A and l.

    The penalty is coefficient * abs(log r), at max(1, fraction * tokens) tokens.

    Examples:
        >>> l, old = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.5, -2.5])
        >>> advantages = torch.tensor([1.0, 1.0, -1.0])
        >>> losses.kl_cov(l, advantages=advantages, old_log_prob=old, mask=l < 0)
        tensor([-1.0000, -1.6487,  1.1065])

    Source: KL-Cov (arXiv:2505.22617).
    """
    log_r = log_ratio(log_prob, old_log_prob)
    count = (fraction * mask.sum()).floor().clamp(min=1)
    penalised = mask & _largest(_covariance(log_prob, advantages, mask), count)
    return -advantages * log_r.exp() + torch.where(penalised, coefficient * log_r.abs(), 0.0)
