"""Losses of draft models of speculative decoding: statistics -> per-token values [..] fp32.

Words: p the target's probabilities (the teacher), q the draft's (the student). A token that the draft
samples is accepted with probability alpha = sum min(p, q) = 1 - the total variation of p and q
(Leviathan et al., arXiv:2211.17192, section 3).
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import torch

from ..spec import Instance, NotNegative, TokenLoss, TokenValues, checked
from ..statistics import VocabStatistics

Compared: TypeAlias = Annotated[VocabStatistics, Instance(VocabStatistics, ("total_variation",))]
Overlapping: TypeAlias = Annotated[VocabStatistics, Instance(VocabStatistics, ("overlap",))]
ComparedTwice: TypeAlias = Annotated[
    VocabStatistics, Instance(VocabStatistics, ("forward_kl", "total_variation"))
]

MIN_ACCEPTANCE = 1e-5  # as in speculators


@checked
def acceptance_rate(stats: Compared) -> TokenValues:
    """Return alpha = 1 - TV(p, q) = sum min(p, q), the probability that a sampled draft token is
    accepted. A small one has few digits; the statistic "overlap" has them all.

    Examples:
        >>> stats = vocab_statistics(
        ...     torch.tensor([[2.0, 1.0, 0.0]]),
        ...     want=("total_variation",),
        ...     teacher=Teacher(torch.tensor([[0.0, 1.0, 2.0]])),
        ... )
        >>> losses.acceptance_rate(stats)
        tensor([0.4248])

    Source: Leviathan et al. (arXiv:2211.17192, theorem 3.5).
    """
    return 1 - stats.total_variation


@checked
def lk_alpha(stats: Overlapping) -> TokenLoss:
    """Return -log alpha, the negative log of the acceptance rate.

    alpha is the statistic "overlap". The gradient is that of the total variation divided by alpha:
    larger where less is accepted. An alpha below 1e-5 counts as 1e-5 and has no gradient, and an
    ignored token as accepted.

    Examples:
        >>> stats = vocab_statistics(
        ...     torch.tensor([[2.0, 1.0, 0.0]]),
        ...     want=("overlap",),
        ...     teacher=Teacher(torch.tensor([[0.0, 1.0, 2.0]])),
        ... )
        >>> losses.lk_alpha(stats)
        tensor([0.8562])

    Source: LK losses (arXiv:2602.23881), "lk_loss_type=alpha" of SpecForge, "nla" of speculators.
    """
    alpha = stats.overlap.clamp(min=MIN_ACCEPTANCE)
    if stats.valid is not None:
        alpha = torch.where(stats.valid, alpha, 1.0)
    return -alpha.log()


@checked
def lk_lambda(stats: ComparedTwice, eta: NotNegative = 3.0) -> TokenLoss:
    """Return lambda KL(p || q) + (1 - lambda) TV(p, q), with lambda = exp(-eta alpha) of each token.

    A draft that is far from the target learns by the KL, and by the total variation the closer it
    comes. lambda is a constant for the gradient.

    Args:
        eta: how early the total variation takes over; 0: the KL alone.

    Examples:
        >>> stats = vocab_statistics(
        ...     torch.tensor([[2.0, 1.0, 0.0]]),
        ...     want=("forward_kl", "total_variation"),
        ...     teacher=Teacher(torch.tensor([[0.0, 1.0, 2.0]])),
        ... )
        >>> losses.lk_lambda(stats)
        tensor([0.7360])

    Source: LK losses (arXiv:2602.23881), "lk_hybrid" of speculators. SpecForge ("lk_loss_type=lambda")
    has one lambda for all tokens of a step, of their mean alpha.
    """
    share = (-eta * acceptance_rate(stats).detach()).exp()
    return share * stats.forward_kl + (1 - share) * stats.total_variation
