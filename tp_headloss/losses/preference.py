"""Preference objectives: log-probs of whole completions -> loss per pair (or per completion)
[pairs].

The log-prob of a completion is the sum over its tokens (`tp_headloss.Sequences.sum` of
``stats.log_prob``), or the mean where a docstring says so. ``chosen`` and ``rejected`` are the
policy's log-probs and get gradients; ``reference_*`` are another model's. Sum losses as you like:
the one backward kernel of the statistics takes the gradients of all of them.

A completion without tokens has the log-prob 0, as sum and as mean: it counts as one of probability
1. Leave its pair out of the mean, ``loss[(first.lengths > 0) & (second.lengths > 0)]`` with the
   `Sequences` of
the chosen and of the rejected completions.
"""

from __future__ import annotations

import math
from typing import Annotated, TypeAlias

import torch
from torch.nn.functional import logsigmoid

from ..spec import Finite, NotNegativeFp32, PositiveFp32, Share, TensorLine, checked
from .ratio import bounded

Pairs: TypeAlias = Annotated[
    torch.Tensor,
    TensorLine("floating point", ("pairs",)),
    "Summed log-probs of the policy being trained, nats, best in fp32",
]
Means: TypeAlias = Annotated[
    torch.Tensor,
    TensorLine("floating point", ("pairs",)),
    "*Mean* log-probs over a completion's tokens, nats, best in fp32",
]
ReferencePairs: TypeAlias = Annotated[
    torch.Tensor,
    TensorLine("floating point", ("pairs",), detached=True),
    "Summed log-probs of the reference, nats, best in fp32",
]
PairLoss: TypeAlias = Annotated[
    torch.Tensor, "[pairs], loss per pair, or per completion, in the log-probs' dtype"
]
Beta: TypeAlias = Annotated[PositiveFp32, "Weight of the reference"]


@checked
def dpo(
    chosen: Pairs,
    rejected: Pairs,
    reference_chosen: ReferencePairs,
    reference_rejected: ReferencePairs,
    *,
    beta: Beta = 0.1,
    label_smoothing: Share = 0.0,
) -> PairLoss:
    """Return -log sigmoid(beta h) with h = (chosen - rejected) - (reference_chosen -
    reference_rejected).

    A completion without tokens counts as one of probability 1: leave its pair out, see
    `Sequences.lengths`.

    Args:
        label_smoothing: e gives -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), conservative
            DPO.

    Examples:
        >>> chosen, rejected = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.5])
        >>> losses.dpo(chosen, rejected, chosen - 1, rejected + 1, beta=0.5)
        tensor([0.3133, 0.3133])

    Source: DPO (arXiv:2305.18290).
    """
    h = beta * ((chosen - rejected) - (reference_chosen - reference_rejected))
    if not label_smoothing:  # 0 times infinity would be NaN
        return -logsigmoid(h)
    return -(1 - label_smoothing) * logsigmoid(h) - label_smoothing * logsigmoid(-h)


@checked
def ipo(
    chosen: Pairs,
    rejected: Pairs,
    reference_chosen: ReferencePairs,
    reference_rejected: ReferencePairs,
    *,
    beta: Beta = 0.1,
) -> PairLoss:
    """Return (h - 1 / (2 beta))^2 with h as in `dpo`.

    Args:
        chosen: TRL passes means.

    Examples:
        >>> chosen, rejected = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.5])
        >>> losses.ipo(chosen, rejected, chosen - 1, rejected + 1, beta=0.5)
        tensor([1., 1.])

    Source: IPO (arXiv:2310.12036).
    """
    h = (chosen - rejected) - (reference_chosen - reference_rejected)
    return (h - 1 / (2 * beta)) ** 2


@checked
def simpo(chosen: Means, rejected: Means, *, beta: Beta = 2.0, margin: Finite = 1.0) -> PairLoss:
    """Return -log sigmoid(beta (chosen - rejected) - margin), without a reference.

    A completion without tokens counts as one of probability 1: leave its pair out, see
    `Sequences.lengths`.

    Examples:
        >>> chosen, rejected = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.5])
        >>> losses.simpo(chosen, rejected)
        tensor([0.3133, 2.1269])

    Source: SimPO (arXiv:2405.14734).
    """
    return -logsigmoid(beta * (chosen - rejected) - margin)


def _log_odds(log_prob):
    """log(p / (1 - p)) for log p <= 0, accurate for p near 0 and near 1, and finite at log p =
    0."""
    # p = 1 has no gradient, instead of an infinite one
    log_prob = bounded(log_prob, high=-torch.finfo(log_prob.dtype).tiny)
    near_one = log_prob > -math.log(2)
    # else the unused branch of the select would make the gradient NaN
    below = torch.where(near_one, -1.0, log_prob)
    return log_prob - torch.where(
        near_one, (-torch.expm1(log_prob)).log(), torch.log1p(-below.exp())
    )


@checked
def orpo(chosen: Means, rejected: Means) -> PairLoss:
    """Return -log sigmoid(log odds(chosen) - log odds(rejected)), the odds-ratio term alone.

    ORPO's objective is a weighted sum of this and the cross-entropy of the chosen completions.

    A completion without tokens counts as one of probability 1: leave its pair out, see
    `Sequences.lengths`.

    Examples:
        >>> chosen, rejected = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.5])
        >>> losses.orpo(chosen, rejected)
        tensor([0.2382, 1.0421])

    Source: ORPO (arXiv:2403.07691).
    """
    return -logsigmoid(_log_odds(chosen) - _log_odds(rejected))


@checked
def kto(
    log_prob: Pairs,
    reference_log_prob: ReferencePairs,
    *,
    desirable: Annotated[torch.Tensor, TensorLine("bool", ("pairs",))],
    kl: Annotated[torch.Tensor, TensorLine("real numbers", (), detached=True)],
    beta: Beta = 0.1,
    desirable_weight: NotNegativeFp32 = 1.0,
    undesirable_weight: NotNegativeFp32 = 1.0,
) -> PairLoss:
    """Return weight * (1 - sigmoid(beta (h - z))) for desirable completions, with z - h for the
    others.

    h = log_prob - reference_log_prob, and z = max(kl, 0).

    Args:
        kl: the mean of h over mismatched prompts and completions of the global batch.

    Examples:
        >>> log_prob, good = torch.tensor([-1.0, -2.0]), torch.tensor([True, False])
        >>> losses.kto(log_prob, log_prob - 1, desirable=good, kl=torch.tensor(0.5))
        tensor([0.4875, 0.5125])

    Source: KTO (arXiv:2402.01306).
    """
    h = log_prob - reference_log_prob
    z = kl.clamp(min=0)
    good = desirable_weight * torch.sigmoid(beta * (z - h))  # 1 - sigmoid(a) = sigmoid(-a)
    bad = undesirable_weight * torch.sigmoid(beta * (h - z))
    return torch.where(desirable, good, bad)
