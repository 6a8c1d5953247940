"""Preference objectives: log-probs of whole completions -> loss per pair (or per completion) [pairs] fp32.

The log-prob of a completion is the sum over its tokens (`tp_headloss.Sequences.sum` of ``stats.log_prob``), or the mean
where a docstring says so. ``chosen`` and ``rejected`` are the policy's log-probs and get gradients; ``reference_*`` are
another model's. Sum losses as you like: the one backward kernel of the statistics takes the gradients of all of them.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import logsigmoid

from ..validation import expect_mask, expect_number, expect_share, expect_tensor
from .ratio import bounded


def _expect_pairs(beta: float = 1.0, **log_probs: torch.Tensor):
    """Raise TypeError or ValueError unless all have the shape of the first, and beta is a positive number."""
    expect_number("beta", beta)
    for name, x in log_probs.items():
        expect_tensor(name, x)
    (first, of), *others = log_probs.items()
    for name, x in others:
        if x.shape != of.shape:
            raise ValueError(f"{name} must have the shape {list(of.shape)} of {first}, got {list(x.shape)}")


def dpo(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return -log sigmoid(beta h) with h = (chosen - rejected) - (reference_chosen - reference_rejected).

    Args:
        chosen, rejected: [pairs] fp32, summed log-probs of the completions under the policy being trained, nats.
        reference_chosen, reference_rejected: [pairs], the same under the reference; constants.
        beta: weight of the reference.
        label_smoothing: e gives -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), conservative DPO.

    Returns:
        [pairs] fp32, loss per pair.

    Raises:
        TypeError, ValueError: log-probs of different shapes, a beta that is not positive, smoothing outside of [0, 1].

    Examples:
        >>> chosen, rejected = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.5])
        >>> losses.dpo(chosen, rejected, chosen - 1, rejected + 1, beta=0.5)
        tensor([0.3133, 0.3133])

    Source:
        DPO (arXiv:2305.18290).
    """
    _expect_pairs(
        beta, chosen=chosen, rejected=rejected, reference_chosen=reference_chosen, reference_rejected=reference_rejected
    )
    expect_share("label_smoothing", label_smoothing)
    h = beta * ((chosen - rejected) - (reference_chosen - reference_rejected))
    if not label_smoothing:  # 0 times infinity would be NaN
        return -logsigmoid(h)
    return -(1 - label_smoothing) * logsigmoid(h) - label_smoothing * logsigmoid(-h)


def ipo(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    *,
    beta: float = 0.1,
) -> torch.Tensor:
    """Return (h - 1 / (2 beta))^2 with h as in `dpo`.

    Args:
        chosen, rejected: [pairs] fp32, summed log-probs of the completions under the policy being trained, nats; TRL
            passes means.
        reference_chosen, reference_rejected: [pairs], the same under the reference; constants.
        beta: weight of the reference.

    Returns:
        [pairs] fp32, loss per pair.

    Raises:
        TypeError, ValueError: log-probs of different shapes, or a beta that is not positive.

    Examples:
        >>> chosen, rejected = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.5])
        >>> losses.ipo(chosen, rejected, chosen - 1, rejected + 1, beta=0.5)
        tensor([1., 1.])

    Source:
        IPO (arXiv:2310.12036).
    """
    _expect_pairs(
        beta, chosen=chosen, rejected=rejected, reference_chosen=reference_chosen, reference_rejected=reference_rejected
    )
    h = (chosen - rejected) - (reference_chosen - reference_rejected)
    return (h - 1 / (2 * beta)) ** 2


def simpo(chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float = 2.0, margin: float = 1.0) -> torch.Tensor:
    """Return -log sigmoid(beta (chosen - rejected) - margin), without a reference.

    Args:
        chosen, rejected: [pairs] fp32, *mean* log-probs of the completions under the policy being trained, nats.
        beta, margin: scale and target of the difference.

    Returns:
        [pairs] fp32, loss per pair.

    Examples:
        >>> chosen, rejected = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.5])
        >>> losses.simpo(chosen, rejected)
        tensor([0.3133, 2.1269])

    Source:
        SimPO (arXiv:2405.14734).
    """
    _expect_pairs(beta, chosen=chosen, rejected=rejected)
    return -logsigmoid(beta * (chosen - rejected) - margin)


def _log_odds(log_prob):
    """log(p / (1 - p)) for log p <= 0, accurate for p near 0 and near 1, and finite at log p = 0."""
    # p = 1 has no gradient, instead of an infinite one
    log_prob = bounded(log_prob, high=-torch.finfo(log_prob.dtype).tiny)
    near_one = log_prob > -math.log(2)
    below = torch.where(near_one, -1.0, log_prob)  # else the unused branch of the select would make the gradient NaN
    return log_prob - torch.where(near_one, (-torch.expm1(log_prob)).log(), torch.log1p(-below.exp()))


def orpo(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Return -log sigmoid(log odds(chosen) - log odds(rejected)), the odds-ratio term alone.

    ORPO's objective is a weighted sum of this and the cross-entropy of the chosen completions.

    Args:
        chosen, rejected: [pairs] fp32, *mean* log-probs of the completions under the policy being trained, nats.

    Returns:
        [pairs] fp32, loss per pair.

    Examples:
        >>> chosen, rejected = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.5])
        >>> losses.orpo(chosen, rejected)
        tensor([0.2382, 1.0421])

    Source:
        ORPO (arXiv:2403.07691).
    """
    _expect_pairs(chosen=chosen, rejected=rejected)
    return -logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def kto(
    log_prob: torch.Tensor,
    reference_log_prob: torch.Tensor,
    *,
    desirable: torch.Tensor,
    kl: torch.Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """Return weight * (1 - sigmoid(beta (h - z))) for desirable completions, with z - h for the others.

    h = log_prob - reference_log_prob, and z = max(kl, 0), detached.

    Args:
        log_prob, reference_log_prob: [completions] fp32, summed log-probs under the policy and the reference, nats.
        desirable: bool [completions].
        kl: scalar, the mean of h over mismatched prompts and completions of the global batch.
        beta: weight of the reference.
        desirable_weight, undesirable_weight: weight of each kind.

    Returns:
        [completions] fp32, loss per completion.

    Raises:
        TypeError, ValueError: log-probs of different shapes, a beta that is not positive, a kl that is no scalar.

    Examples:
        >>> log_prob, good = torch.tensor([-1.0, -2.0]), torch.tensor([True, False])
        >>> losses.kto(log_prob, log_prob - 1, desirable=good, kl=torch.tensor(0.5))
        tensor([0.4875, 0.5125])

    Source:
        KTO (arXiv:2402.01306).
    """
    _expect_pairs(beta, log_prob=log_prob, reference_log_prob=reference_log_prob, desirable=desirable)
    expect_mask("desirable", desirable)
    expect_tensor("kl", kl)
    if kl.numel() != 1:
        raise ValueError(f"kl must be a scalar, the mean over completions, got shape {list(kl.shape)}")
    h = log_prob - reference_log_prob
    z = kl.detach().clamp(min=0)
    good = desirable_weight * torch.sigmoid(beta * (z - h))  # 1 - sigmoid(a) = sigmoid(-a)
    bad = undesirable_weight * torch.sigmoid(beta * (h - z))
    return torch.where(desirable, good, bad)
