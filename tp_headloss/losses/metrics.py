"""What RL trainers watch: log-probs -> per-token values [..] by name. Nothing here has a gradient.

A name that begins with "max_" or "min_" is meant as an extremum over valid tokens, every other as a sum of them.
"""

from __future__ import annotations

import torch

from .kl import kl_estimate
from .policy import CLIP, sequence_log_ratio
from .ratio import log_ratio


@torch.no_grad()
def policy_metrics(
    log_prob: torch.Tensor,
    *,
    advantages: torch.Tensor,
    old_log_prob: torch.Tensor,
    reference_log_prob: torch.Tensor | None = None,
    sequences=None,
    clip: tuple[float, float] = CLIP,
    dual_clip: float | None = None,
) -> dict[str, torch.Tensor]:
    """Of the importance ratio r = exp(log_prob - old_log_prob), clamped as in the objectives, and A = advantages:

    * "new_log_prob", "old_log_prob", "advantage" with "max_advantage", "min_advantage", "num_tokens" (ones);
    * "ratio", "ratio_squared", "ratio_clamped" (into 1 - low, 1 + high), and "max_", "min_" of ratio, ratio_clamped;
    * "kl_old": r - log r - 1, "approx_kl": -log r, two estimates of KL(old || new);
    * "clip_fraction": r is outside of the clip; "pg_clip_fraction": and on the side of A's sign, so that the gradient
      is zero; with dual_clip, "pg_clip_fraction_lower": A < 0 and r > dual_clip;
    * with reference_log_prob, "kl_reference": k3 of `kl_estimate`, without the output clamp that the loss has, so one
      token that the reference finds impossible can dominate it.

    With ``sequences``, r is the sequence's (GSPO), the same at each of its tokens.
    """
    x = (
        log_ratio(log_prob, old_log_prob)
        if sequences is None
        else sequence_log_ratio(log_prob, old_log_prob, sequences)
    )
    ratio, low, high = x.exp(), 1 - clip[0], 1 + clip[1]
    advantages = advantages.expand_as(ratio)
    below, above, clamped = ratio < low, ratio > high, ratio.clamp(low, high)
    out = {
        "new_log_prob": log_prob,
        "old_log_prob": old_log_prob,
        "ratio": ratio,
        "ratio_squared": ratio**2,
        "ratio_clamped": clamped,
        "kl_old": torch.expm1(x) - x,
        "approx_kl": -x,
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
        out["kl_reference"] = kl_estimate(log_prob, reference_log_prob=reference_log_prob, output_clamp=None)
    return out


@torch.no_grad()
def generator_metrics(
    log_prob: torch.Tensor,
    *,
    old_log_prob: torch.Tensor,
    generator_log_prob: torch.Tensor,
    bounds: tuple[float, float] = (0.5, 2.0),
) -> dict[str, torch.Tensor]:
    """How far the program that sampled is from the trainer: old_log_prob is the trainer's at sampling time, d =
    old_log_prob - generator_log_prob, exponentials clamped as in the objectives. NeMo-RL's names, of each token and
    before any truncation (NeMo-RL averages "sampling_importance_ratio" after it):

    * "token_mult_prob_error": exp |d|; "sampling_importance_ratio": exp d; "is_oob_ratio": exp d is outside ``bounds``;
    * "gen_kl_error", "policy_kl_error": k3 of KL(generator || trainer) and of KL(trainer || generator) at these
      tokens; "js_divergence_error": mean of k3 of KL(mixture || each of the two);
    * "approx_entropy": -exp(log_prob - generator_log_prob) log_prob;
    * "logprob_diff": |log_prob - generator_log_prob|, with "max_logprob_diff"; "tokens_different": they differ at all.
    """

    def k3(of, other):
        return kl_estimate(of, reference_log_prob=other, output_clamp=None)

    d = log_ratio(old_log_prob, generator_log_prob)
    weight, apart = d.exp(), (log_prob - generator_log_prob).abs()
    mixture = torch.logaddexp(old_log_prob, generator_log_prob) - 0.6931471805599453
    return {
        "token_mult_prob_error": d.abs().exp(),
        "sampling_importance_ratio": weight,
        "is_oob_ratio": (weight < bounds[0]) | (weight > bounds[1]),
        "gen_kl_error": k3(generator_log_prob, old_log_prob),
        "policy_kl_error": k3(old_log_prob, generator_log_prob),
        "js_divergence_error": (k3(mixture, old_log_prob) + k3(mixture, generator_log_prob)) / 2,
        "approx_entropy": -log_ratio(log_prob, generator_log_prob).exp() * log_prob,
        "logprob_diff": apart,
        "max_logprob_diff": apart,
        "tokens_different": apart != 0,
    }
