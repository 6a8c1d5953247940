"""Rollout correction: detached weights [..] for tokens that another program sampled (an inference engine, say).

The generator's log-probs differ from the trainer's own of the same weights; w = exp(log_prob - generator_log_prob),
clamped to exp(+-20) first, corrects for it. log_prob is the trainer's at sampling time (``old_log_prob``). Pass the
result as ``rollout_weight``. level: "token", or "sequence" for the product over the token's sequence.
"""

from __future__ import annotations

import torch

from .ratio import LOG_RATIO_CLAMP, log_ratio


def _log_weight(log_prob, generator_log_prob, level, sequences):
    ratio = log_ratio(log_prob.detach(), generator_log_prob.detach())
    if level == "token":
        return ratio
    if level != "sequence":
        raise ValueError(f"level must be 'token' or 'sequence', got {level!r}")
    if sequences is None:
        raise ValueError("level='sequence' needs sequences, got None")
    return sequences.spread(sequences.sum(ratio)).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def truncated_importance_weight(
    log_prob: torch.Tensor,
    generator_log_prob: torch.Tensor,
    *,
    bounds: tuple[float, float] = (0.0, 2.0),
    level: str = "token",
    sequences=None,
) -> torch.Tensor:
    """w clamped to ``bounds``: truncated importance sampling (TIS; verl truncates at 2)."""
    return _log_weight(log_prob, generator_log_prob, level, sequences).exp().clamp(*bounds)


def icepop(
    log_prob: torch.Tensor,
    generator_log_prob: torch.Tensor,
    *,
    bounds: tuple[float, float] = (0.5, 5.0),
    level: str = "token",
    sequences=None,
) -> torch.Tensor:
    """w within ``bounds``, 0 outside of them (IcePop, arXiv:2510.18855)."""
    weight = _log_weight(log_prob, generator_log_prob, level, sequences).exp()
    return torch.where((weight < bounds[0]) | (weight > bounds[1]), 0.0, weight)


def sequence_mask(
    log_prob: torch.Tensor,
    generator_log_prob: torch.Tensor,
    *,
    sequences,
    bounds: tuple[float, float] = (0.999, 1.002),
) -> torch.Tensor:
    """w of each token, 0 for whole sequences whose geometric mean of w is outside ``bounds`` (NeMo-RL's
    seq-mask-tis)."""
    ratio = log_ratio(log_prob.detach(), generator_log_prob.detach())
    mean = sequences.spread(sequences.mean(ratio)).exp()
    kept = torch.where(mean.isnan(), torch.nan, ratio.exp())  # a sequence with a NaN is NaN
    return torch.where((mean < bounds[0]) | (mean > bounds[1]), 0.0, kept)
