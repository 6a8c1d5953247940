"""Rollout correction: detached weights [..] for tokens that another program sampled, such as an
inference engine.

The log-probs of that program, the generator, differ from the trainer's for the same model weights.
The importance weight w = exp(log_prob - generator_log_prob) corrects for the difference; log w is
clamped to +-20. log_prob is the trainer's at sampling time (``old_log_prob``), at the temperature
and over the ids that the generator's is of. Pass the result as ``rollout_weight``. level: "token",
or "sequence" for the product of w over the token's sequence, which needs ``sequences``, a
`tp_headloss.Sequences`.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import torch

from ..arguments.sequences import Sequences
from ..spec import CONSTANT_LOG_PROBS, WeightBounds, checked
from .ratio import LOG_RATIO_CLAMP, NATS, GeneratorLogProb, log_ratio

TrainerLogProb: TypeAlias = Annotated[
    torch.Tensor,
    CONSTANT_LOG_PROBS,
    f"The trainer's at sampling time (``old_log_prob``), at the generator's temperature, {NATS}",
]

WeightLevel: TypeAlias = Annotated[
    Literal["token", "sequence"],
    "Whose w: the token's, or the product of those of its sequence, which needs ``sequences``",
]
RolloutWeight: TypeAlias = Annotated[
    torch.Tensor, '[..] fp32, detached: the input "rollout_weight" of `PolicyGradient`'
]


def _log_weight(log_prob, generator_log_prob, level, sequences):
    """log w [..] of each token, or of its sequence."""
    log_w = log_ratio(log_prob, generator_log_prob)
    if level == "token":
        if sequences is not None:
            raise ValueError("sequences go with level='sequence', got level='token'")
        return log_w
    if sequences is None:
        raise ValueError("level='sequence' needs sequences, got None")
    return sequences.spread(sequences.sum(log_w)).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


@checked
def truncated_importance_weight(
    log_prob: TrainerLogProb,
    *,
    generator_log_prob: GeneratorLogProb,
    bounds: WeightBounds = (0.0, 2.0),
    level: WeightLevel = "token",
    sequences: Sequences | None = None,
) -> RolloutWeight:
    """Return w = exp(log_prob - generator_log_prob) clamped to ``bounds``.

    A generator's log-prob of -inf, of a token that it could not have drawn, has the largest weight:
    the two are misaligned, or it is a fill of tokens that are to be ignored.

    Examples:
        >>> trainer, generator = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -4.0]])
        >>> losses.truncated_importance_weight(trainer, generator_log_prob=generator)
        tensor([[1., 2.]])

    Source: Truncated importance sampling (TIS); verl truncates at 2.
    """
    return _log_weight(log_prob, generator_log_prob, level, sequences).exp().clamp(*bounds)


@checked
def icepop(
    log_prob: TrainerLogProb,
    *,
    generator_log_prob: GeneratorLogProb,
    bounds: WeightBounds = (0.5, 5.0),
    level: WeightLevel = "token",
    sequences: Sequences | None = None,
) -> RolloutWeight:
    """Return w = exp(log_prob - generator_log_prob) where it is within ``bounds``, else 0.

    Examples:
        >>> trainer, generator = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -4.0]])
        >>> losses.icepop(trainer, generator_log_prob=generator)
        tensor([[1., 0.]])

    Source: IcePop (arXiv:2510.18855).
    """
    weight = _log_weight(log_prob, generator_log_prob, level, sequences).exp()
    return torch.where((weight < bounds[0]) | (weight > bounds[1]), 0.0, weight)


@checked
def sequence_masked_importance_weight(
    log_prob: TrainerLogProb,
    *,
    generator_log_prob: GeneratorLogProb,
    sequences: Sequences,
    bounds: WeightBounds = (0.999, 1.002),
) -> RolloutWeight:
    """Return w of each token, but 0 for all tokens of a sequence whose geometric mean of w is
    outside of ``bounds``.

    Examples:
        >>> trainer, generator = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -4.0]])
        >>> sequences = Sequences.from_mask(torch.ones(1, 2, dtype=torch.bool))
        >>> losses.sequence_masked_importance_weight(
        ...     trainer, generator_log_prob=generator, sequences=sequences
        ... )
        tensor([[0., 0.]])

    Source: NeMo-RL's seq-mask-tis.
    """
    log_w = log_ratio(log_prob, generator_log_prob)
    mean = sequences.spread(sequences.mean(log_w)).exp()
    weight = torch.where(mean.isnan(), torch.nan, log_w.exp())  # one NaN makes its sequence NaN
    return torch.where((mean < bounds[0]) | (mean > bounds[1]), 0.0, weight)
