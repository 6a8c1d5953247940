"""Rollout correction: detached weights [..] for tokens that another program sampled, such as an inference engine.

The log-probs of that program, the generator, differ from the trainer's for the same model weights. The importance
weight w = exp(log_prob - generator_log_prob) corrects for the difference; log w is clamped to +-20. log_prob is the
trainer's at sampling time (``old_log_prob``). Pass the result as ``rollout_weight``. level: "token", or "sequence" for
the product of w over the token's sequence, which needs ``sequences``, a `tp_headloss.Sequences`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..validation import expect_bounds, expect_one_of
from .ratio import LOG_RATIO_CLAMP, log_ratio

if TYPE_CHECKING:
    from ..arguments.sequences import Sequences


def _log_weight(log_prob, generator_log_prob, level, sequences):
    """log w [..] of each token, or of its sequence."""
    expect_one_of("level", level, ("token", "sequence"))
    log_w = log_ratio(log_prob.detach(), generator_log_prob.detach())
    if level == "token":
        return log_w
    if sequences is None:
        raise ValueError("level='sequence' needs sequences, got None")
    return sequences.spread(sequences.sum(log_w)).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def truncated_importance_weight(
    log_prob: torch.Tensor,
    generator_log_prob: torch.Tensor,
    *,
    bounds: tuple[float, float] = (0.0, 2.0),
    level: str = "token",
    sequences: Sequences | None = None,
) -> torch.Tensor:
    """Return w = exp(log_prob - generator_log_prob) clamped to ``bounds``.

    Args:
        log_prob: [..] fp32 of the trainer at sampling time (``old_log_prob``), nats.
        generator_log_prob: [..] of the program that sampled the tokens.
        bounds: (lowest, highest) weight.
        level: "token", or "sequence" for the product of w over the token's sequence, log w clamped to +-20.
        sequences: `Sequences` of the tokens, for level="sequence".

    Returns:
        [..] fp32, detached: the input "rollout_weight" of `PolicyGradient`.

    Raises:
        ValueError: another level, "sequence" without sequences, or bounds in another order.

    Examples:
        >>> trainer, generator = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -4.0]])
        >>> losses.truncated_importance_weight(trainer, generator)
        tensor([[1., 2.]])

    Source:
        Truncated importance sampling (TIS); verl truncates at 2.
    """
    expect_bounds("bounds", bounds)
    return _log_weight(log_prob, generator_log_prob, level, sequences).exp().clamp(*bounds)


def icepop(
    log_prob: torch.Tensor,
    generator_log_prob: torch.Tensor,
    *,
    bounds: tuple[float, float] = (0.5, 5.0),
    level: str = "token",
    sequences: Sequences | None = None,
) -> torch.Tensor:
    """Return w = exp(log_prob - generator_log_prob) where it is within ``bounds``, else 0.

    Args:
        log_prob: [..] fp32 of the trainer at sampling time (``old_log_prob``), nats.
        generator_log_prob: [..] of the program that sampled the tokens.
        bounds: (lowest, highest) weight that counts.
        level: "token", or "sequence" for the product of w over the token's sequence, log w clamped to +-20.
        sequences: `Sequences` of the tokens, for level="sequence".

    Returns:
        [..] fp32, detached: the input "rollout_weight" of `PolicyGradient`.

    Raises:
        ValueError: another level, "sequence" without sequences, or bounds in another order.

    Examples:
        >>> trainer, generator = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -4.0]])
        >>> losses.icepop(trainer, generator)
        tensor([[1., 0.]])

    Source:
        IcePop (arXiv:2510.18855).
    """
    expect_bounds("bounds", bounds)
    weight = _log_weight(log_prob, generator_log_prob, level, sequences).exp()
    return torch.where((weight < bounds[0]) | (weight > bounds[1]), 0.0, weight)


def sequence_masked_importance_weight(
    log_prob: torch.Tensor,
    generator_log_prob: torch.Tensor,
    *,
    sequences: Sequences,
    bounds: tuple[float, float] = (0.999, 1.002),
) -> torch.Tensor:
    """Return w of each token, but 0 for all tokens of a sequence whose geometric mean of w is outside of ``bounds``.

    Args:
        log_prob: [..] fp32 of the trainer at sampling time (``old_log_prob``), nats.
        generator_log_prob: [..] of the program that sampled the tokens.
        sequences: `Sequences` of the tokens.
        bounds: (lowest, highest) geometric mean.

    Returns:
        [..] fp32, detached: the input "rollout_weight" of `PolicyGradient`.

    Raises:
        TypeError, ValueError: bounds in another order.

    Examples:
        >>> trainer, generator = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -4.0]])
        >>> sequences = Sequences.from_mask(torch.ones(1, 2, dtype=torch.bool))
        >>> losses.sequence_masked_importance_weight(trainer, generator, sequences=sequences)
        tensor([[0., 0.]])

    Source:
        NeMo-RL's seq-mask-tis.
    """
    expect_bounds("bounds", bounds)
    log_w = log_ratio(log_prob.detach(), generator_log_prob.detach())
    mean = sequences.spread(sequences.mean(log_w)).exp()
    weight = torch.where(mean.isnan(), torch.nan, log_w.exp())  # one NaN makes its sequence NaN
    return torch.where((mean < bounds[0]) | (mean > bounds[1]), 0.0, weight)
