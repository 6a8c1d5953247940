"""Regularizers on the normaliser and on the entropy: statistics -> per-token value [..] fp32."""

from __future__ import annotations

import torch

from ..statistics import VocabStatistics


def z_loss(stats: VocabStatistics) -> torch.Tensor:
    """Return lse^2 [..] (PaLM, arXiv:2204.02311, section 5: weight 1e-4)."""
    return stats.lse**2


def entropy_bonus(stats: VocabStatistics) -> torch.Tensor:
    """Return -entropy [..], so that a positive weight rewards entropy. Needs the statistic "entropy"."""
    return -stats.entropy
