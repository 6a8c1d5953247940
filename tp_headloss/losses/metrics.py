"""Metrics of reinforcement learning: log-probs -> per-token values [..] by name, without gradients.

Values whose name begins with "max_" or "min_" are to be reduced by an extremum over valid tokens,
all others by a sum.
"""

from __future__ import annotations

import math
from typing import Annotated, TypeAlias

import torch

from ..arguments.sequences import Sequences
from ..spec import Positive, WeightBounds, checked
from .kl import k3, kl_estimate
from .policy import CLIP, ratio_bounds
from .ratio import (
    Advantages,
    Clip,
    GeneratorLogProb,
    LogProb,
    OldLogProb,
    ReferenceLogProb,
    log_ratio,
)
from .sequence_policy import sequence_log_ratio

TokenMetrics: TypeAlias = Annotated[
    dict[str, torch.Tensor],
    '[..] by name, without gradient; "max_" and "min_" names are for extrema, all others for sums',
]


@checked
@torch.no_grad()
def policy_metrics(
    log_prob: LogProb,
    *,
    advantages: Advantages,
    old_log_prob: OldLogProb,
    reference_log_prob: ReferenceLogProb | None = None,
    sequences: Sequences | None = None,
    clip: Clip = CLIP,
    dual_clip: Positive | None = None,
) -> TokenMetrics:
    """Return metrics [..] of the importance ratio r = exp(log_prob - old_log_prob), clamped as in
    the objectives:

    * "new_log_prob", "old_log_prob", "advantage" with "max_advantage", "min_advantage",
      "num_tokens" (ones);
    * "ratio", "ratio_squared", "ratio_clamped" (into 1 - low, 1 + high), and "max_", "min_" of
      ratio, ratio_clamped;
    * "kl_old": r - log r - 1, "approx_kl": -log r, two estimates of KL(old || new);
    * "clip_fraction": r is outside of the clip; "pg_clip_fraction": r is outside on the side of the
      sign of the advantage A, where the gradient of a clipped objective is zero (CISPO's is not);
      with dual_clip, "pg_clip_fraction_lower": A < 0 and r > dual_clip;
    * with reference_log_prob, "kl_reference": k3 of `kl_estimate` without output clamp, which one
      token may dominate.

    Args:
        clip: distances of r from 1, whatever the objective's own convention.
        sequences: makes r the ratio of the token's sequence (GSPO), equal for its tokens.

    Examples:
        >>> l, old = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.5])
        >>> metrics = losses.policy_metrics(l, advantages=torch.tensor([1.0, 1.0]), old_log_prob=old)
        >>> metrics["ratio"], metrics["clip_fraction"]
        (tensor([1.0000, 1.6487]), tensor([False,  True]))
    """
    low, high = ratio_bounds(clip, dual_clip)
    if sequences is None:
        log_r = log_ratio(log_prob, old_log_prob)
    else:
        log_r = sequence_log_ratio(log_prob, old_log_prob=old_log_prob, sequences=sequences)
    ratio = log_r.exp()
    advantages = advantages.expand_as(ratio)
    below, above, clamped = ratio < low, ratio > high, ratio.clamp(low, high)
    out = {
        "new_log_prob": log_prob.detach(),
        "old_log_prob": old_log_prob,
        "ratio": ratio,
        "ratio_squared": ratio**2,
        "ratio_clamped": clamped,
        "kl_old": torch.expm1(log_r) - log_r,
        "approx_kl": -log_r,
        "clip_fraction": below | above,
        "pg_clip_fraction": (above & (advantages > 0)) | (below & (advantages < 0)),
        "advantage": advantages,
        "num_tokens": torch.ones_like(ratio),
        "max_advantage": advantages,
        "min_advantage": advantages,
        "max_ratio": ratio,
        "min_ratio": ratio,
        "max_ratio_clamped": clamped,
        "min_ratio_clamped": clamped,
    }
    if dual_clip is not None:
        out["pg_clip_fraction_lower"] = (ratio > dual_clip) & (advantages < 0)
    if reference_log_prob is not None:
        out["kl_reference"] = kl_estimate(
            log_prob, reference_log_prob=reference_log_prob, output_clamp=None
        )
    return out


@checked
@torch.no_grad()
def generator_metrics(
    log_prob: LogProb,
    *,
    old_log_prob: OldLogProb,
    generator_log_prob: GeneratorLogProb,
    bounds: WeightBounds = (0.5, 2.0),
) -> TokenMetrics:
    """Return metrics [..] of the distance between the trainer and the generator, the program that
    sampled the tokens.

    With d = old_log_prob - generator_log_prob, exponentials clamped as in the objectives, under
    NeMo-RL's names, per token and before any truncation (NeMo-RL averages
    "sampling_importance_ratio" after it):

    * "token_mult_prob_error": exp |d|; "sampling_importance_ratio": exp d; "is_oob_ratio": exp d is
      outside ``bounds``;
    * "gen_kl_error", "policy_kl_error": k3 of KL(generator || trainer) and of KL(trainer ||
      generator) at these tokens; "js_divergence_error": mean of k3 of KL(mixture || each of the
      two);
    * "approx_entropy": -exp(log_prob - generator_log_prob) log_prob;
    * "logprob_diff": |log_prob - generator_log_prob|, with "max_logprob_diff"; "tokens_different":
      they differ at all.

    Args:
        old_log_prob: the trainer's at sampling time.

    Examples:
        >>> l, old = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.5])
        >>> metrics = losses.generator_metrics(l, old_log_prob=old, generator_log_prob=l)
        >>> metrics["sampling_importance_ratio"], metrics["tokens_different"]
        (tensor([1.0000, 0.6065]), tensor([False, False]))
    """
    d = log_ratio(old_log_prob, generator_log_prob)
    weight, difference = d.exp(), (log_prob - generator_log_prob).abs()
    mixture = torch.logaddexp(old_log_prob, generator_log_prob) - math.log(2)
    return {
        "token_mult_prob_error": d.abs().exp(),
        "sampling_importance_ratio": weight,
        "is_oob_ratio": (weight < bounds[0]) | (weight > bounds[1]),
        "gen_kl_error": torch.expm1(d) - d,
        "policy_kl_error": k3(d),
        "js_divergence_error": (
            k3(log_ratio(mixture, old_log_prob)) + k3(log_ratio(mixture, generator_log_prob))
        )
        / 2,
        "approx_entropy": -log_ratio(log_prob, generator_log_prob).exp() * log_prob,
        "logprob_diff": difference,
        "max_logprob_diff": difference,
        "tokens_different": difference != 0,
    }
