"""Preference objectives: log-probs of whole completions -> loss per pair (or per completion) [pairs] fp32.

A completion's log-prob is the sum of its tokens' (`tp_headloss.Sequences.sum` of ``stats.log_prob``), or their mean
where a docstring says so. ``chosen`` and ``rejected`` are the policy's and get gradients, ``reference_*`` another
model's. Write the total as you like: the gradients of all meet in the one backward kernel of the statistics.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import logsigmoid

from .ratio import bounded


def dpo(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """-log sigmoid(beta h), h = (chosen - rejected) - (reference_chosen - reference_rejected): DPO (arXiv:2305.18290).

    label_smoothing e: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h) (conservative DPO).
    """
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
    """(h - 1 / (2 beta))^2 with h as in `dpo`: IPO (arXiv:2310.12036). TRL passes mean log-probs."""
    h = (chosen - rejected) - (reference_chosen - reference_rejected)
    return (h - 1 / (2 * beta)) ** 2


def simpo(chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float = 2.0, margin: float = 1.0) -> torch.Tensor:
    """-log sigmoid(beta (chosen - rejected) - margin) of *mean* log-probs: SimPO (arXiv:2405.14734)."""
    return -logsigmoid(beta * (chosen - rejected) - margin)


def _log_odds(log_prob):
    """log(p / (1 - p)) of log p <= 0, exact at both ends, finite at 0."""
    # p = 1 has no gradient, instead of an infinite one
    log_prob = bounded(log_prob, high=-torch.finfo(log_prob.dtype).tiny)
    near_one = log_prob > -math.log(2)
    below = torch.where(near_one, -1.0, log_prob)  # or the gradient of the branch not taken would be NaN
    return log_prob - torch.where(near_one, (-torch.expm1(log_prob)).log(), torch.log1p(-below.exp()))


def orpo(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """-log sigmoid(log odds(chosen) - log odds(rejected)) of *mean* log-probs: the odds-ratio term of ORPO
    (arXiv:2403.07691); its weighted sum with the chosen completion's cross-entropy is the objective."""
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
    """Per completion: weight * (1 - sigmoid(beta (h - z))) if desirable, weight * (1 - sigmoid(beta (z - h))) if not,
    h = log_prob - reference_log_prob: KTO (arXiv:2402.01306).

    desirable: bool [completions]. kl: scalar, the mean of h over mismatched prompts and completions of the global
    batch; z is it, at least 0 and detached.
    """
    h = log_prob - reference_log_prob
    z = kl.detach().clamp(min=0)
    good = desirable_weight * torch.sigmoid(beta * (z - h))  # 1 - sigmoid(a) = sigmoid(-a)
    bad = undesirable_weight * torch.sigmoid(beta * (h - z))
    return torch.where(desirable, good, bad)
