"""Policy-gradient objectives of single tokens: log-probs and advantages -> per-token loss [..]
fp32.

Words: l = log_prob [..] of the policy being trained; A = advantages [..], constants, of sizes that
are its or 1; r = exp(l - old_log_prob), the importance ratio, whose logarithm is clamped to +-20
with zero gradient beyond. ``clip`` = (low, high) bounds the ratio to [1 - low, 1 + high]; unequal
bounds are DAPO's (arXiv:2503.14476). A ratio on the bound still passes its gradient. Nothing is
masked or averaged.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from ..spec import ConstantPerToken, Positive, PositivePair, TokenLoss, checked
from .ratio import (
    LOG_RATIO_CLAMP,
    Advantages,
    Clip,
    ClipOfConvention,
    LogProb,
    OldLogProb,
    bounded,
    log_ratio,
    scaled,
)

CLIP = (0.2, 0.2)


@checked
def reinforce(log_prob: LogProb, *, advantages: Advantages) -> TokenLoss:
    """Return -A l, the plain policy gradient.

    Examples:
        >>> l, old = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.5, -2.5])
        >>> advantages = torch.tensor([1.0, 1.0, -1.0])
        >>> losses.reinforce(l, advantages=advantages)
        tensor([ 1.,  2., -3.])

    Source: REINFORCE (Williams 1992), GPG (arXiv:2504.02546).
    """
    return -scaled(advantages, log_prob)


def expect_distances(clip, most: float = math.inf, logs: bool = False):
    """Raise ValueError for a clip (low, high) below 0, with low above `most`, or of bounds of a
    ratio in the place of its distances from 1 (with `logs` those of its logarithm from 0)."""
    low, high = clip
    if not (0 <= low <= most and high >= 0):
        raise ValueError(
            f"clip must be (low, high) with 0 <= low <= {most} and high >= 0, got {clip}"
        )
    if 0.5 <= low < 1 < high:
        of, low, high = (
            ("log r from 0", -math.log(low), math.log(high))
            if logs
            else ("r from 1", 1 - low, high - 1)
        )
        raise ValueError(
            f"clip must be (low, high), distances of {of}, got {clip}, which look like bounds of "
            f"the ratio r: clip=({low:.4g}, {high:.4g})"
        )


def ratio_bounds(clip, dual_clip) -> tuple[float, float]:
    """Return the bounds 1 - low and 1 + high of a ratio. ValueError for a clip that cannot be."""
    expect_distances(clip, most=1)
    low, high = 1 - clip[0], 1 + clip[1]
    if dual_clip is not None and not dual_clip >= high:
        said = ": a KL's weight is kl= of a whole loss, as PPO(kl=..)" if dual_clip < 1 else ""
        raise ValueError(
            f"dual_clip must be at least 1 + {clip[1]}, where the clip ends, got {dual_clip}{said}"
        )
    return low, high


def clipped_objective(ratio, advantages, clip, dual_clip):
    """-min(r A, clip(r) A) [..] for the ratio r of a token or a sequence, as in `ppo_clip`."""
    low, high = ratio_bounds(clip, dual_clip)
    # min(r A, clip(r) A) bounds r from above where A >= 0, from below elsewhere
    positive = advantages >= 0
    lowest = torch.full_like(ratio, low).masked_fill_(positive, -math.inf)
    highest = torch.full_like(ratio, math.inf if dual_clip is None else dual_clip).masked_fill_(
        positive, high
    )
    return -advantages * bounded(ratio, lowest, highest)


@checked
def ppo_clip(
    log_prob: LogProb,
    *,
    advantages: Advantages,
    old_log_prob: OldLogProb,
    clip: Clip = CLIP,
    dual_clip: Positive | None = None,
    log_ratio_clamp: Positive | None = LOG_RATIO_CLAMP,
) -> TokenLoss:
    """Return -min(r A, clip(r) A), the clipped objective of PPO, GRPO and DAPO.

    Args:
        dual_clip: c >= 1 + high bounds the loss to -c A where A < 0 (arXiv:1912.09729; verl's
            default is 3). This is the two-sided clip -min(min(r, delta) A, clip(r) A) of
            INTELLECT-2 (arXiv:2505.07291) with delta = c.
        log_ratio_clamp: bound of abs(log r); None: no bound.

    Examples:
        >>> l, old = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.5, -2.5])
        >>> advantages = torch.tensor([1.0, 1.0, -1.0])
        >>> losses.ppo_clip(l, advantages=advantages, old_log_prob=old, clip=(0.2, 0.28))
        tensor([-1.0000, -1.2800,  0.8000])

    Source: PPO (arXiv:1707.06347, equation 7), GRPO (arXiv:2402.03300), DAPO (arXiv:2503.14476).
    """
    return clipped_objective(
        log_ratio(log_prob, old_log_prob, log_ratio_clamp).exp(), advantages, clip, dual_clip
    )


@checked
def cispo(
    log_prob: LogProb,
    *,
    advantages: Advantages,
    old_log_prob: OldLogProb,
    clip: ClipOfConvention = CLIP,
    convention: Literal["offset", "bound"] = "offset",
) -> TokenLoss:
    """Return -stop_gradient(clip(r)) A l. No token loses its gradient.

    Args:
        convention: meaning of ``clip``. "offset" (verl, NeMo-RL): r in [1 - low, 1 + high]. "bound"
            (Liger, TRL): r at most ``high`` itself, such as 5.0 and at least 1, and ``low`` is not
            used.

    Examples:
        >>> l, old = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.5, -2.5])
        >>> advantages = torch.tensor([1.0, 1.0, -1.0])
        >>> losses.cispo(l, advantages=advantages, old_log_prob=old)
        tensor([ 1.0000,  2.4000, -2.4000])

    Source: CISPO (MiniMax-M1, arXiv:2506.13585).
    """
    if convention == "offset":
        expect_distances(clip)
    elif not clip[1] >= 1:
        raise ValueError(
            f"clip must be (low, high) with high at least 1 for convention='bound', got {clip}"
        )
    ratio = log_ratio(log_prob.detach(), old_log_prob).exp()
    ratio = (
        ratio.clamp(1 - clip[0], 1 + clip[1])
        if convention == "offset"
        else ratio.clamp(max=clip[1])
    )
    return -scaled(ratio * advantages, log_prob)


@checked
def sapo(
    log_prob: LogProb,
    *,
    advantages: Advantages,
    old_log_prob: OldLogProb,
    temperatures: PositivePair = (1.0, 1.05),
) -> TokenLoss:
    """Return -A sigmoid(tau (r - 1)) 4 / tau, a soft gate instead of the clip.

    Args:
        temperatures: tau where A > 0, and elsewhere. At r = 1 the gradient equals REINFORCE's.

    Examples:
        >>> l, old = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.5, -2.5])
        >>> advantages = torch.tensor([1.0, 1.0, -1.0])
        >>> losses.sapo(l, advantages=advantages, old_log_prob=old)
        tensor([-2.0000, -2.6269,  1.5168])

    Source: SAPO (arXiv:2511.20347).
    """
    ratio = log_ratio(log_prob, old_log_prob).exp()
    tau = torch.full_like(ratio, temperatures[1]).masked_fill(advantages > 0, temperatures[0])
    return -advantages * torch.sigmoid(tau * (ratio - 1)) * (4 / tau)


@checked
def positive_nll(log_prob: LogProb, *, rewards: ConstantPerToken) -> TokenLoss:
    """Return -l where the reward is positive, else 0: imitation of what succeeded.

    As a term of a `HeadLoss`, its mean is over the tokens with a positive reward.

    Args:
        rewards: NaN makes its token NaN.

    Examples:
        >>> losses.positive_nll(torch.tensor([-1.0, -2.0]), rewards=torch.tensor([1.0, 0.0]))
        tensor([1., 0.])

    Source: VAPO (arXiv:2504.05118).
    """
    return -scaled(
        torch.where(rewards.isnan(), torch.nan, (rewards > 0).to(log_prob.dtype)), log_prob
    )
