"""Policy-gradient objectives: log-probs and advantages -> per-token loss [..] fp32, neither masked nor averaged.

Words: l = log_prob [..] of the policy being trained; A = advantages [..], constants of any shape that broadcasts;
r = exp(l - old_log_prob), the importance ratio, whose logarithm is clamped to +-20 with zero gradient beyond.
``clip`` = (low, high) bounds the ratio to [1 - low, 1 + high]; unequal bounds are DAPO's (arXiv:2503.14476). A ratio on
the bound still passes its gradient. Sequence-level objectives need ``sequences``, a `tp_headloss.Sequences`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..validation import expect_pair
from .ratio import LOG_RATIO_CLAMP, bounded, log_ratio, scaled, with_gradient_of

if TYPE_CHECKING:
    from ..sequences import Sequences

CLIP = (0.2, 0.2)


def reinforce(log_prob: torch.Tensor, *, advantages: torch.Tensor) -> torch.Tensor:
    """Return -A l: REINFORCE (Williams 1992), GPG (arXiv:2504.02546)."""
    return -scaled(advantages, log_prob)


def _clipped_objective(ratio, advantages, clip, dual_clip):
    """-min(r A, clip(r) A) [..] for the ratio r of a token or a sequence, as in `ppo_clip`."""
    expect_pair("clip", clip)
    low, high = 1 - clip[0], 1 + clip[1]
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"clip must be (low, high) with 0 <= low <= 1 and high >= 0, got {clip}")
    if dual_clip is not None and not dual_clip >= high:
        raise ValueError(f"dual_clip must be at least 1 + {clip[1]}, where the clip ends, got {dual_clip}")
    # min(r A, clip(r) A) bounds r from above where A >= 0, from below elsewhere
    highest = math.inf if dual_clip is None else dual_clip
    clipped_ratio = torch.where(advantages >= 0, bounded(ratio, high=high), bounded(ratio, low, highest))
    return -advantages * clipped_ratio


def ppo_clip(
    log_prob: torch.Tensor,
    *,
    advantages: torch.Tensor,
    old_log_prob: torch.Tensor,
    clip: tuple[float, float] = CLIP,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = LOG_RATIO_CLAMP,
) -> torch.Tensor:
    """Return -min(r A, clip(r) A): PPO (arXiv:1707.06347, equation 7), GRPO (arXiv:2402.03300), DAPO.

    Args:
        log_prob, old_log_prob: [..] of the policy being trained, and of the policy that sampled.
        advantages: [..], or a shape that broadcasts.
        clip: (low, high).
        dual_clip: c >= 1 + high bounds the loss to -c A where A < 0 (arXiv:1912.09729; verl's default is 3). This is
            the two-sided clip -min(min(r, delta) A, clip(r) A) of INTELLECT-2 (arXiv:2505.07291) with delta = c.
        log_ratio_clamp: bound of abs(log r); None: no bound.
    """
    return _clipped_objective(log_ratio(log_prob, old_log_prob, log_ratio_clamp).exp(), advantages, clip, dual_clip)


def cispo(
    log_prob: torch.Tensor,
    *,
    advantages: torch.Tensor,
    old_log_prob: torch.Tensor,
    clip: tuple[float, float] = CLIP,
    convention: str = "offset",
) -> torch.Tensor:
    """Return -stop_gradient(clip(r)) A l: CISPO (MiniMax-M1, arXiv:2506.13585). No token loses its gradient.

    Args:
        convention: meaning of ``clip``. "offset" (verl, NeMo-RL): r in [1 - low, 1 + high]. "bound" (Liger, TRL): r at
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
    """Return -A sigmoid(tau (r - 1)) 4 / tau: a soft gate instead of the clip (SAPO, arXiv:2511.20347). tau is
    ``temperatures[0]`` where A > 0, and ``temperatures[1]`` elsewhere. At r = 1 the gradient equals REINFORCE's."""
    ratio = log_ratio(log_prob, old_log_prob).exp()
    tau = torch.full_like(ratio, temperatures[1]).masked_fill(advantages > 0, temperatures[0])
    return -advantages * torch.sigmoid(tau * (ratio - 1)) * (4 / tau)


def sequence_log_ratio(log_prob: torch.Tensor, old_log_prob: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """Return for each token the mean [..] of l - old_log_prob over its sequence, clamped to +-20 (verl: at most 10).

    The gradient of each token's mean goes to the token's own l alone: it is 1, and 0 beyond the clamp.
    """
    mean = sequences.spread(sequences.mean((log_prob - old_log_prob).detach()))
    return bounded(with_gradient_of(mean, log_prob), -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def gspo(
    log_prob: torch.Tensor,
    *,
    advantages: torch.Tensor,
    old_log_prob: torch.Tensor,
    sequences: Sequences,
    clip: tuple[float, float] = CLIP,
    dual_clip: float | None = None,
) -> torch.Tensor:
    """Return the clipped objective of the sequence's ratio s = exp(mean of log r): GSPO (arXiv:2507.18071).

    With reduction="seq-mean-token-mean" the loss is the paper's, -1/G sum_i min(s_i A_i, clip(s_i) A_i). Advantages may
    differ per token; the gradient then is that of GSPO-token, with s_i and its clip from the sequence.
    """
    return _clipped_objective(sequence_log_ratio(log_prob, old_log_prob, sequences).exp(), advantages, clip, dual_clip)


def gspo_length_weighted(
    log_prob: torch.Tensor,
    *,
    advantages: torch.Tensor,
    old_log_prob: torch.Tensor,
    sequences: Sequences,
    clip: tuple[float, float] = CLIP,
) -> torch.Tensor:
    """Return GSPO as Fast-LLM weights it: A is averaged over its sequence, and each sequence counts once per token.

    With reduction="seq-mean-token-mean": 1/G sum_i N_i gspo_i for sequences of N_i tokens.
    """
    advantages = sequences.spread(sequences.mean(advantages.expand_as(log_prob)))
    per_token = gspo(log_prob, advantages=advantages, old_log_prob=old_log_prob, sequences=sequences, clip=clip)
    return sequences.spread(sequences.lengths) * per_token


def gmpo(
    log_prob: torch.Tensor,
    *,
    advantages: torch.Tensor,
    old_log_prob: torch.Tensor,
    sequences: Sequences,
    clip: tuple[float, float] = (0.4, 0.4),
) -> torch.Tensor:
    """Return -A R with R = exp(mean over the sequence of each token's clipped log r), the geometric mean of the ratios
    (GMPO, arXiv:2507.20673), and A averaged over its sequence. For reduction="seq-mean-token-mean": -1/G sum_i A_i R_i.

    ``clip`` bounds log r to [-low, high], on the side where A would push it further. Where A is 0, log r counts as 0,
    as in verl. A rollout weight multiplies each token's loss; verl multiplies by the geometric mean of the weights.
    """
    expect_pair("clip", clip)
    log_r = log_ratio(log_prob, old_log_prob)
    clamped = torch.where(advantages < 0, bounded(log_r, low=-clip[0]), bounded(log_r, high=clip[1]))
    clamped = torch.where(advantages == 0, log_r * 0, clamped)  # 0, or NaN
    mean = sequences.spread(sequences.mean(clamped.detach()))
    advantage = sequences.spread(sequences.mean(advantages.expand_as(log_prob)))
    return -advantage * with_gradient_of(mean, clamped).exp()


def vespo(
    log_prob: torch.Tensor,
    *,
    advantages: torch.Tensor,
    old_log_prob: torch.Tensor,
    sequences: Sequences,
    shape: tuple[tuple[float, float], tuple[float, float]] = ((2.0, 3.0), (3.0, 2.0)),
    rollout_log_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return -stop_gradient(phi) A l with phi = exp(lambda + k log w - lambda w): VESPO as in Liger. w is the *product*
    of the ratios of a sequence's tokens, and log w is clamped to [log 1e-8, 20].

    Args:
        shape: (k, lambda) for A >= 0, and (k, lambda) for A < 0.
        rollout_log_weight: [..] added to the log-ratios: the log of the rollout's importance weights.
    """
    log_r = log_ratio(log_prob.detach(), old_log_prob)
    if rollout_log_weight is not None:
        log_r = log_r + rollout_log_weight
    log_w = sequences.spread(sequences.sum(log_r)).clamp(math.log(1e-8), LOG_RATIO_CLAMP)
    (k_positive, lambda_positive), (k_negative, lambda_negative) = shape
    positive = advantages >= 0
    k, lambda_ = torch.where(positive, k_positive, k_negative), torch.where(positive, lambda_positive, lambda_negative)
    phi = (lambda_ + k * log_w - lambda_ * log_w.exp()).exp()
    return -scaled(phi * advantages, log_prob)


def _covariance(log_prob, advantages, mask):
    """(A - mean A)(l - mean l) [..] with means over the mask, and -inf outside of it."""
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
    """Return the clipped objective, but 0 at a few random tokens with a high covariance of A and l (Clip-Cov,
    arXiv:2505.22617).

    Candidates are the tokens that the clip does not affect and whose covariance is strictly within ``bounds``. The
    max(1, fraction * tokens) candidates with the largest noise lose their loss.

    Args:
        mask: bool [..], the valid tokens.
        noise: [..] uniform in [0, 1), equal on every rank that shares the vocabulary.
    """
    ratio = log_ratio(log_prob, old_log_prob).exp()
    clipped_away = (advantages < 0) & (ratio < 1 - clip[0]) | (advantages > 0) & (ratio > 1 + clip[1])
    covariance = _covariance(log_prob, advantages, mask)
    candidates = mask & ~clipped_away & (covariance > bounds[0]) & (covariance < bounds[1])
    count = (fraction * mask.sum()).floor().clamp(min=1)
    dropped = candidates & _largest(torch.where(candidates, noise, -1.0), count)
    return torch.where(dropped, 0.0, _clipped_objective(ratio, advantages, clip, None))


def kl_cov(
    log_prob: torch.Tensor,
    *,
    advantages: torch.Tensor,
    old_log_prob: torch.Tensor,
    mask: torch.Tensor,
    fraction: float = 0.0002,
    coefficient: float = 1.0,
) -> torch.Tensor:
    """Return -r A, plus coefficient * abs(log r) at the max(1, fraction * tokens) tokens with the largest covariance of
    A and l (KL-Cov, arXiv:2505.22617). mask: bool [..], the valid tokens."""
    log_r = log_ratio(log_prob, old_log_prob)
    count = (fraction * mask.sum()).floor().clamp(min=1)
    penalised = mask & _largest(_covariance(log_prob, advantages, mask), count)
    return -advantages * log_r.exp() + torch.where(penalised, coefficient * log_r.abs(), 0.0)


def positive_nll(log_prob: torch.Tensor, *, rewards: torch.Tensor) -> torch.Tensor:
    """Return -l where the reward is positive, else 0: the imitation term of VAPO (arXiv:2504.05118). As a term of a
    `HeadLoss`, its mean is over the tokens with a positive reward."""
    return -scaled(torch.where(rewards.isnan(), torch.nan, (rewards > 0).to(log_prob.dtype)), log_prob)
