"""Cross-entropy and its label-smoothed forms: statistics -> per-token loss [..] fp32, neither masked nor averaged."""

from __future__ import annotations

import torch

from ..statistics import VocabStatistics


def cross_entropy(stats: VocabStatistics) -> torch.Tensor:
    """Return -log p_y [..], the cross-entropy of each token with its label."""
    return -stats.log_prob


def smoothed_cross_entropy(
    stats: VocabStatistics, smoothing: float, formula: str = "torch", class_weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the cross-entropy [..] with labels smoothed over the true global vocabulary; needs the statistic "total".

    Args:
        smoothing: a in [0, 1].
        formula: "torch" (torch.nn.functional.cross_entropy): probability (1 - a) + a / V at the label and a / V
            elsewhere, so (1 - a) (lse - z_y) + a (lse - mean z). "megatron" (NeMo, Megatron-LM): 1 - a at the label and
            a / (V - 1) elsewhere, which is torch's formula with a V / (V - 1) for a.
        class_weight: w [V], as in torch: w_y on the first part, and a / V sum_j w_j (lse - z_j) as the second, for
            which "total" must have been weighted by this rank's w. Columns at -inf do not enter that sum (torch's is
            infinite there).
    """
    if formula == "megatron" and stats.vocab_size < 2:
        raise ValueError(
            f"Megatron's smoothing spreads over V - 1 other ids: V must be at least 2, got {stats.vocab_size}"
        )
    alpha = smoothing if formula == "torch" else smoothing * stats.vocab_size / (stats.vocab_size - 1)
    nll = cross_entropy(stats)
    if class_weight is not None:
        nll = label_weight(stats, class_weight) * nll
    spread = (stats.mass * stats.lse - stats.total) / stats.vocab_size
    return (1 - alpha) * nll + alpha * spread


def label_weight(stats: VocabStatistics, class_weight: torch.Tensor) -> torch.Tensor:
    """Return w_y [..] for class weights w [V], 0 where the label is ignored (or invalid: its loss is NaN anyway)."""
    known = stats.valid & (stats.labels >= 0) & (stats.labels < stats.vocab_size)
    return torch.where(known, class_weight[torch.where(known, stats.labels, 0)], 0.0)
