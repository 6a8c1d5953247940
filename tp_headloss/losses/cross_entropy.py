"""Cross-entropy and its label-smoothed forms: statistics -> per-token loss [..] fp32, neither
masked nor averaged."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import torch

from ..spec import ClassWeight, Instance, Share, TokenLoss, checked
from ..statistics import VocabStatistics

Scored: TypeAlias = Annotated[VocabStatistics, Instance(VocabStatistics, ("log_prob",))]
Labelled: TypeAlias = Annotated[VocabStatistics, Instance(VocabStatistics, ("labels",))]
WithTotal: TypeAlias = Annotated[VocabStatistics, Instance(VocabStatistics, ("log_prob", "total"))]


@checked
def cross_entropy(stats: Scored) -> TokenLoss:
    """Return -log p_y, the cross-entropy of each token with its label.

    Examples:
        >>> stats = vocab_statistics(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]))
        >>> losses.cross_entropy(stats)
        tensor([0.4076])
    """
    return -stats.log_prob


@checked
def smoothed_cross_entropy(
    stats: WithTotal,
    smoothing: Share,
    formula: Literal["torch", "megatron"] = "torch",
    class_weight: ClassWeight | None = None,
) -> TokenLoss:
    """Return the cross-entropy with labels smoothed over the true global vocabulary.

    Args:
        smoothing: the share a of the formula.
        formula: "torch" (torch.nn.functional.cross_entropy): probability (1 - a) + a / V at the
            label and a / V elsewhere, so (1 - a) (lse - z_y) + a (lse - mean z). "megatron" (NeMo,
            Megatron-LM): 1 - a at the label and a / (V - 1) elsewhere, which is torch's formula
            with a V / (V - 1) for a.
        class_weight: w, as in torch: w_y on the first part, and a / V sum_j w_j (lse - z_j) as the
            second, for which "total" must have been weighted by this rank's w. Columns at -inf are
            left out (in torch: inf).

    Examples:
        >>> stats = vocab_statistics(
        ...     torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), want=("total",)
        ... )
        >>> losses.smoothed_cross_entropy(stats, 0.1)
        tensor([0.5076])

    Source: Szegedy et al., arXiv:1512.00567, section 7.
    """
    if formula == "megatron" and stats.vocab_size < 2:
        raise ValueError(
            "Megatron's smoothing spreads over V - 1 other ids: V must be at least 2, got "
            f"{stats.vocab_size}"
        )
    alpha = (
        smoothing if formula == "torch" else smoothing * stats.vocab_size / (stats.vocab_size - 1)
    )
    nll = cross_entropy(stats)
    if class_weight is not None:
        nll = label_weight(stats, class_weight) * nll
    spread = (stats.mass * stats.lse - stats.total) / stats.vocab_size
    return (1 - alpha) * nll + alpha * spread


@checked
def label_weight(stats: Labelled, class_weight: ClassWeight) -> torch.Tensor:
    """Return the class weight w_y of each label, 0 where it is ignored (or invalid: its loss is NaN
    anyway).

    Returns:
        [..] fp32, weight per token, neither masked nor averaged.

    Examples:
        >>> stats = vocab_statistics(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]))
        >>> losses.label_weight(stats, torch.tensor([0.5, 1.0, 2.0]))
        tensor([0.5000])
    """
    if class_weight.shape[0] != stats.vocab_size:
        raise ValueError(
            f"class_weight must have shape [{stats.vocab_size}], got {list(class_weight.shape)}"
        )
    known = stats.valid & (stats.labels >= 0) & (stats.labels < stats.vocab_size)
    return torch.where(known, class_weight[torch.where(known, stats.labels, 0)], 0.0)
