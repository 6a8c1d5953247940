"""Regularizers on the normaliser and on the entropy: statistics -> per-token value [..] fp32."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from ..spec import Instance, TokenLoss, checked
from ..statistics import VocabStatistics

WithEntropy: TypeAlias = Annotated[VocabStatistics, Instance(VocabStatistics, ("entropy",))]


@checked
def z_loss(stats: VocabStatistics) -> TokenLoss:
    """Return lse^2, which keeps the logits' normaliser near 1.

    Examples:
        >>> stats = vocab_statistics(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]))
        >>> losses.z_loss(stats)
        tensor([5.7966])

    Source: PaLM (arXiv:2204.02311, section 5), with the weight 1e-4.
    """
    return stats.lse**2


@checked
def entropy_bonus(stats: WithEntropy) -> TokenLoss:
    """Return -entropy, so that a positive weight rewards entropy.

    Examples:
        >>> stats = vocab_statistics(
        ...     torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), want=("entropy",)
        ... )
        >>> losses.entropy_bonus(stats)
        tensor([-0.8324])
    """
    return -stats.entropy
