"""Policy-gradient objectives: log-probs and advantages -> per-token loss [..] fp32. They neither mask nor average.

Words: l log_prob [..] of the policy being trained, A advantages [..] (constants; anything that broadcasts), r = exp(l -
old_log_prob) the importance ratio, its logarithm clamped to +-20 with zero gradient beyond. ``clip`` = (low, high)
bounds the ratio to [1 - low, 1 + high]; unequal ones are DAPO's (arXiv:2503.14476). A ratio on the bound
still passes its gradient. Sequence-level objectives need ``sequences``, a `tp_headloss.Sequences`.
"""

from __future__ import annotations

import math

import torch

from ..validation import expect_pair
from .ratio import LOG_RATIO_CLAMP, bounded, log_ratio, scaled, with_gradient_of

CLIP = (0.2, 0.2)


def reinforce(log_prob: torch.Tensor, *, advantages: torch.Tensor) -> torch.Tensor:
    """-A l: REINFORCE (Williams 1992), GPG (arXiv:2504.02546)."""
    return -scaled(advantages, log_prob)


def _clipped(ratio, advantages, clip, dual_clip):
    expect_pair("clip", clip)
    low, high = 1 - clip[0], 1 + clip[1]
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"clip must be (low, high) with 0 <= low <= 1 and high >= 0, got {clip}")
    if dual_clip is not None and not dual_clip >= high:
        raise ValueError(f"dual_clip must be at least 1 + {clip[1]}, where the clip ends, got {dual_clip}")
    # min(r A, clip(r) A), one sign of A at a time
    most = math.inf if dual_clip is None else dual_clip
    held = torch.where(advantages >= 0, bounded(ratio, high=high), bounded(ratio, low, most))
    return -advantages * held


def clipped(
    log_prob: torch.Tensor,
    *,
    advantages: torch.Tensor,
    old_log_prob: torch.Tensor,
    clip: tuple[float, float] = CLIP,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = LOG_RATIO_CLAMP,
) -> torch.Tensor:
    """-min(r A, clip(r) A): PPO (arXiv:1707.06347, equation 7), GRPO (arXiv:2402.03300), DAPO.

    dual_clip c: where A < 0, no more than -c A (arXiv:1912.09729; verl's default is 3). It equals the
    two-sided clip -min(min(r, delta) A, clip(r) A) of INTELLECT-2 (arXiv:2505.07291) with delta = c >= 1 + high.
    """
    return _clipped(log_ratio(log_prob, old_log_prob, log_ratio_clamp).exp(), advantages, clip, dual_clip)


def cispo(
    log_prob: torch.Tensor,
    *,
    advantages: torch.Tensor,
    old_log_prob: torch.Tensor,
    clip: tuple[float, float] = CLIP,
    convention: str = "offset",
) -> torch.Tensor:
    """-stop_gradient(clip(r)) A l: CISPO (MiniMax-M1, arXiv:2506.13585). No token loses its gradient.

    convention: what ``clip`` means. "offset" (verl, NeMo-RL): r in [1 - low, 1 + high]. "bound" (Liger, TRL): r at
    most ``high`` itself, such as 5.0, and ``low`` is not used.
    """
    expect_pair("clip", clip)
    ratio = log_ratio(log_prob.detach(), old_log_prob).exp()
    if convention == "offset":
        ratio = ratio.clamp(1 - clip[0], 1 + clip[1])
    elif convention == "bound":
        ratio = ratio.clamp(max=clip[1])
    else:
        raise ValueError(f"convention must be 'offset' or 'bound', got {convention!r}")
    return -scaled(ratio * advantages, log_prob)


def sapo(
    log_prob: torch.Tensor,
    *,
    advantages: torch.Tensor,
    old_log_prob: torch.Tensor,
    temperatures: tuple[float, float] = (1.0, 1.05),
) -> torch.Tensor:
    """-A sigmoid(tau (r - 1)) 4 / tau: a soft gate for the clip (SAPO, arXiv:2511.20347); tau is ``temperatures[0]``
    where A > 0 and ``temperatures[1]`` elsewhere. At r = 1 its gradient is REINFORCE's."""
    ratio = log_ratio(log_prob, old_log_prob).exp()
    tau = torch.full_like(ratio, temperatures[1]).masked_fill(advantages > 0, temperatures[0])
    return -advantages * torch.sigmoid(tau * (ratio - 1)) * (4 / tau)


def sequence_log_ratio(log_prob, old_log_prob, sequences) -> torch.Tensor:
    """The mean of l - old_log_prob over each token's sequence [..], clamped to +-20 (verl: at most 10), as if of the
    token's own l: its gradient on l is 1 (0 beyond the clamp)."""
    mean = sequences.spread(sequences.mean((log_prob - old_log_prob).detach()))
    return bounded(with_gradient_of(mean, log_prob), -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def gspo(
    log_prob: torch.Tensor,
    *,
    advantages: torch.Tensor,
    old_log_prob: torch.Tensor,
    sequences,
    clip: tuple[float, float] = CLIP,
    dual_clip: float | None = None,
) -> torch.Tensor:
    """The clipped objective of the sequence's ratio s = exp(mean of log r): GSPO (arXiv:2507.18071).

    The paper's weighting, -1/G sum_i min(s_i A_i, clip(s_i) A_i), is what reduction="seq-mean-token-mean" makes of it.
    A per token is allowed: the gradient then is GSPO-token's, with s_i and its clip from the sequence.
    """
    return _clipped(sequence_log_ratio(log_prob, old_log_prob, sequences).exp(), advantages, clip, dual_clip)


def gspo_length_weighted(
    log_prob: torch.Tensor,
    *,
    advantages: torch.Tensor,
    old_log_prob: torch.Tensor,
    sequences,
    clip: tuple[float, float] = CLIP,
) -> torch.Tensor:
    """GSPO as Fast-LLM weights it: A is averaged over its sequence, and each sequence counts once per token, under
    reduction="seq-mean-token-mean": 1/G sum_i N_i gspo_i for sequences of N_i tokens."""
    advantages = sequences.spread(sequences.mean(advantages.expand_as(log_prob)))
    per_token = gspo(log_prob, advantages=advantages, old_log_prob=old_log_prob, sequences=sequences, clip=clip)
    return sequences.spread(sequences.lengths) * per_token


def gmpo(
    log_prob: torch.Tensor,
    *,
    advantages: torch.Tensor,
    old_log_prob: torch.Tensor,
    sequences,
    clip: tuple[float, float] = (0.4, 0.4),
) -> torch.Tensor:
    """-A exp(mean of the token's clipped log r): the geometric mean of ratios (GMPO, arXiv:2507.20673), with A
    averaged over its sequence. ``clip`` bounds log r to [-low, high], on the side where A would push it further; where
    A is 0, log r counts as 0 (as in verl). (A rollout weight multiplies each token's loss; verl multiplies by its
    geometric mean.)

    For reduction="seq-mean-token-mean": -1/G sum_i A_i R_i.
    """
    expect_pair("clip", clip)
    ratio = log_ratio(log_prob, old_log_prob)
    held = torch.where(advantages < 0, bounded(ratio, low=-clip[0]), bounded(ratio, high=clip[1]))
    held = torch.where(advantages == 0, ratio * 0, held)  # 0, or NaN
    mean = sequences.spread(sequences.mean(held.detach()))
    advantage = sequences.spread(sequences.mean(advantages.expand_as(log_prob)))
    return -advantage * with_gradient_of(mean, held).exp()


def vespo(
    log_prob: torch.Tensor,
    *,
    advantages: torch.Tensor,
    old_log_prob: torch.Tensor,
    sequences,
    shape: tuple[tuple[float, float], tuple[float, float]] = ((2.0, 3.0), (3.0, 2.0)),
    rollout_log_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """-stop_gradient(phi) A l with phi = exp(lambda + k log w - lambda w), w the sequence's ratio, the *product* of
    its tokens', log w in [log 1e-8, 20]: VESPO as in Liger. ``shape`` is (k, lambda) for A >= 0 and for A < 0;
    rollout_log_weight [..] is added to the log-ratios (log of the importance weights of the rollout)."""
    ratios = log_ratio(log_prob.detach(), old_log_prob)
    if rollout_log_weight is not None:
        ratios = ratios + rollout_log_weight
    log_w = sequences.spread(sequences.sum(ratios)).clamp(math.log(1e-8), LOG_RATIO_CLAMP)
    (k_up, lambda_up), (k_down, lambda_down) = shape
    up = advantages >= 0
    k, lambda_ = torch.where(up, k_up, k_down), torch.where(up, lambda_up, lambda_down)
    phi = (lambda_ + k * log_w - lambda_ * log_w.exp()).exp()
    return -scaled(phi * advantages, log_prob)


def _covariance(log_prob, advantages, mask):
    """(A - mean A)(l - mean l) [..], -inf outside of the mask; the means are over the mask."""
    count = mask.sum().clamp(min=1)
    advantages, log_prob = advantages.expand_as(log_prob), log_prob.detach()

    def centred(x):
        x = torch.where(mask, x, 0.0)
        return x - x.sum() / count

    return torch.where(mask, centred(advantages) * centred(log_prob), -torch.inf)


def _largest(keys, count):
    """bool [..]: the ``count`` largest keys, the earlier of equal ones; count is a number on the device."""
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
    """The clipped objective, 0 at a few random tokens of high covariance of A and l (Clip-Cov, arXiv:2505.22617).

    Of the tokens of ``mask`` (bool [..]) that the clip left alone and whose covariance is strictly within ``bounds``,
    the max(1, fraction * tokens) with the largest ``noise`` lose their loss. noise: [..] uniform in [0, 1), equal on
    every rank that shares the vocabulary.
    """
    ratio = log_ratio(log_prob, old_log_prob).exp()
    clipped_away = (advantages < 0) & (ratio < 1 - clip[0]) | (advantages > 0) & (ratio > 1 + clip[1])
    covariance = _covariance(log_prob, advantages, mask)
    candidates = mask & ~clipped_away & (covariance > bounds[0]) & (covariance < bounds[1])
    count = (fraction * mask.sum()).floor().clamp(min=1)
    dropped = candidates & _largest(torch.where(candidates, noise, -1.0), count)
    return torch.where(dropped, 0.0, _clipped(ratio, advantages, clip, None))


def kl_cov(
    log_prob: torch.Tensor,
    *,
    advantages: torch.Tensor,
    old_log_prob: torch.Tensor,
    mask: torch.Tensor,
    fraction: float = 0.0002,
    coefficient: float = 1.0,
) -> torch.Tensor:
    """-r A, plus coefficient * abs(log r) on the max(1, fraction * tokens) tokens of ``mask`` with the largest
    covariance of A and l (KL-Cov, arXiv:2505.22617)."""
    ratio = log_ratio(log_prob, old_log_prob)
    count = (fraction * mask.sum()).floor().clamp(min=1)
    penalised = mask & _largest(_covariance(log_prob, advantages, mask), count)
    return -advantages * ratio.exp() + torch.where(penalised, coefficient * ratio.abs(), 0.0)


def positive_nll(log_prob: torch.Tensor, *, rewards: torch.Tensor) -> torch.Tensor:
    """-l where the reward is positive, 0 elsewhere: the imitation term of VAPO (arXiv:2504.05118). As a term, its mean
    is over the tokens with a positive reward."""
    return -scaled(torch.where(rewards.isnan(), torch.nan, (rewards > 0).to(log_prob.dtype)), log_prob)
