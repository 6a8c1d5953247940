"""Policy-gradient objectives whose ratio is that of a sequence: log-probs and advantages ->
per-token loss [..] fp32.

Words as in `policy`; every objective needs ``sequences``, a `tp_headloss.Sequences`.
"""

from __future__ import annotations

import math
from typing import Annotated, TypeAlias

import torch

from ..arguments.sequences import Sequences
from ..spec import IN_FP32, ConstantPerToken, Positive, TokenLoss, TupleOf, checked
from .policy import CLIP, clipped_objective, expect_distances
from .ratio import (
    LOG_RATIO_CLAMP,
    Advantages,
    LogClip,
    LogProb,
    OldLogProb,
    SequenceClip,
    bounded,
    log_ratio,
    scaled,
    with_gradient_of,
)

PairOfPairs: TypeAlias = Annotated[
    tuple[tuple[float, float], tuple[float, float]], TupleOf(TupleOf(IN_FP32, 2), 2)
]


@checked
def sequence_log_ratio(
    log_prob: LogProb, *, old_log_prob: OldLogProb, sequences: Sequences
) -> torch.Tensor:
    """Return for each token the mean of l - old_log_prob over its sequence, clamped to +-20 (verl:
    at most 10).

    The gradient of each token's mean goes to the token's own l alone: it is 1, and 0 beyond the
    clamp.

    Returns:
        [..] fp32, equal for the tokens of a sequence, 0 outside of the sequences.

    Examples:
        >>> l, old = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.5, -2.5])
        >>> sequences = Sequences.from_mask(torch.ones(1, 3, dtype=torch.bool))
        >>> losses.sequence_log_ratio(l[None], old_log_prob=old[None], sequences=sequences)
        tensor([[0., 0., 0.]])

    Source: GSPO (arXiv:2507.18071).
    """
    mean = sequences.spread(sequences.mean((log_prob - old_log_prob).detach()))
    return bounded(with_gradient_of(mean, log_prob), -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


@checked
def gspo(
    log_prob: LogProb,
    *,
    advantages: Advantages,
    old_log_prob: OldLogProb,
    sequences: Sequences,
    clip: SequenceClip = CLIP,
    dual_clip: Positive | None = None,
) -> TokenLoss:
    """Return the clipped objective of the sequence's ratio s = exp(mean of log r).

    With reduction="seq-mean-token-mean" the loss is the paper's, -1/G sum_i min(s_i A_i, clip(s_i)
    A_i). Advantages may differ per token; the gradient then is that of GSPO-token, with s_i and its
    clip from the sequence.

    Examples:
        >>> l, old = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.5, -2.5])
        >>> advantages = torch.tensor([1.0, 1.0, -1.0])
        >>> sequences = Sequences.from_mask(torch.ones(1, 3, dtype=torch.bool))
        >>> losses.gspo(
        ...     l[None], advantages=advantages[None], old_log_prob=old[None], sequences=sequences
        ... )
        tensor([[-1., -1.,  1.]])

    Source: GSPO (arXiv:2507.18071).
    """
    return clipped_objective(
        sequence_log_ratio(log_prob, old_log_prob=old_log_prob, sequences=sequences).exp(),
        advantages,
        clip,
        dual_clip,
    )


@checked
def gspo_length_weighted(
    log_prob: LogProb,
    *,
    advantages: Advantages,
    old_log_prob: OldLogProb,
    sequences: Sequences,
    clip: SequenceClip = CLIP,
) -> TokenLoss:
    """Return `gspo` as Fast-LLM weights it: A is averaged over its sequence, and each sequence
    counts once per token.

    With reduction="seq-mean-token-mean": 1/G sum_i N_i gspo_i for sequences of N_i tokens.

    Examples:
        >>> l, old = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.5, -2.5])
        >>> advantages = torch.tensor([1.0, 1.0, -1.0])
        >>> sequences = Sequences.from_mask(torch.ones(1, 3, dtype=torch.bool))
        >>> options = {"old_log_prob": old[None], "sequences": sequences}
        >>> losses.gspo_length_weighted(l[None], advantages=advantages[None], **options)
        tensor([[-1., -1., -1.]])

    Source: Fast-LLM's LanguageModelGSPOLoss.
    """
    advantages = sequences.spread(sequences.mean(advantages.expand_as(log_prob)))
    per_token = gspo(
        log_prob, advantages=advantages, old_log_prob=old_log_prob, sequences=sequences, clip=clip
    )
    return sequences.spread(sequences.lengths) * per_token


@checked
def gmpo(
    log_prob: LogProb,
    *,
    advantages: Advantages,
    old_log_prob: OldLogProb,
    sequences: Sequences,
    clip: LogClip = (0.4, 0.4),
) -> TokenLoss:
    """Return -A R with R the geometric mean over the sequence of the clipped ratios, and A averaged
    over its sequence.

    With reduction="seq-mean-token-mean" the loss is -1/G sum_i A_i R_i. Where A is 0, log r counts
    as 0, as in verl. A rollout weight multiplies each token's loss; verl multiplies by the
    geometric mean of the weights.

    Args:
        clip: on the side where A would push it further.

    Examples:
        >>> l, old = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.5, -2.5])
        >>> advantages = torch.tensor([1.0, 1.0, -1.0])
        >>> sequences = Sequences.from_mask(torch.ones(1, 3, dtype=torch.bool))
        >>> losses.gmpo(
        ...     l[None], advantages=advantages[None], old_log_prob=old[None], sequences=sequences
        ... )
        tensor([[-0.3333, -0.3333, -0.3333]])

    Source: GMPO (arXiv:2507.20673).
    """
    expect_distances(clip, logs=True)
    log_r = log_ratio(log_prob, old_log_prob)
    clamped = torch.where(
        advantages < 0, bounded(log_r, low=-clip[0]), bounded(log_r, high=clip[1])
    )
    clamped = torch.where(advantages == 0, log_r * 0, clamped)  # 0, or NaN
    mean = sequences.spread(sequences.mean(clamped.detach()))
    advantage = sequences.spread(sequences.mean(advantages.expand_as(log_prob)))
    return -advantage * with_gradient_of(mean, clamped).exp()


@checked
def vespo(
    log_prob: LogProb,
    *,
    advantages: Advantages,
    old_log_prob: OldLogProb,
    sequences: Sequences,
    shape: PairOfPairs = ((2.0, 3.0), (3.0, 2.0)),
    rollout_log_weight: ConstantPerToken | None = None,
) -> TokenLoss:
    """Return -stop_gradient(phi) A l with phi = exp(lambda + k log w - lambda w).

    w is the *product* of the ratios of a sequence's tokens, and log w is clamped to [log 1e-8, 20].

    Args:
        shape: (k, lambda) for A >= 0, and (k, lambda) for A < 0.
        rollout_log_weight: added to the log-ratios: the log of the rollout's importance weights,
            ``old_log_prob - generator_log_prob`` of each token, which makes w the ratio to the
            generator's policy.

    Examples:
        >>> l, old = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.5, -2.5])
        >>> advantages = torch.tensor([1.0, 1.0, -1.0])
        >>> sequences = Sequences.from_mask(torch.ones(1, 3, dtype=torch.bool))
        >>> losses.vespo(
        ...     l[None], advantages=advantages[None], old_log_prob=old[None], sequences=sequences
        ... )
        tensor([[ 1.,  2., -3.]])

    Source: VESPO, as in Liger.
    """
    log_r = log_ratio(log_prob.detach(), old_log_prob)
    if rollout_log_weight is not None:
        log_r = log_r + rollout_log_weight
    log_w = sequences.spread(sequences.sum(log_r)).clamp(math.log(1e-8), LOG_RATIO_CLAMP)
    (k_positive, lambda_positive), (k_negative, lambda_negative) = shape
    positive = advantages >= 0
    k = torch.full_like(log_w, k_negative).masked_fill(positive, k_positive)
    lambda_ = torch.full_like(log_w, lambda_negative).masked_fill(positive, lambda_positive)
    phi = (lambda_ + k * log_w - lambda_ * log_w.exp()).exp()
    return -scaled(phi * advantages, log_prob)
