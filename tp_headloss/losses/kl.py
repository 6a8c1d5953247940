"""KL divergence to a reference policy, estimated at the sampled tokens: log-probs -> per-token
value [..] fp32.

Schulman's estimators (http://joschu.net/blog/kl-approx.html) of KL(policy || reference), with x =
log_prob - reference_log_prob: k1 = x, k2 = x^2 / 2, k3 = exp(-x) + x - 1.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch

from ..spec import Positive, TokenValues, checked
from .ratio import (
    LOG_RATIO_CLAMP,
    GeneratorLogProb,
    LogProb,
    ReferenceLogProb,
    bounded,
    log_ratio,
    with_gradient_of,
)

OUTPUT_CLAMP = 10.0  # verl's
KLEstimator: TypeAlias = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]
KL_ESTIMATORS: tuple[KLEstimator, ...] = get_args(KLEstimator)


def k3(x: torch.Tensor) -> torch.Tensor:
    """Return exp(-x) + x - 1 [..] of the log-ratio x, not clamped."""
    return torch.expm1(-x) + x


# of the log-ratio x, not clamped
ESTIMATES = {"k1": lambda x: x, "abs": lambda x: x.abs(), "k2": lambda x: x**2 / 2, "k3": k3}


@checked
def kl_estimate(
    log_prob: LogProb,
    *,
    reference_log_prob: ReferenceLogProb,
    estimator: Literal[KLEstimator, "low_var_kl"] = "k3",
    input_clamp: Positive | None = LOG_RATIO_CLAMP,
    output_clamp: Positive | None = OUTPUT_CLAMP,
    sampler_log_prob: GeneratorLogProb | None = None,
) -> TokenValues:
    """Return an estimate [..] of KL(policy || reference) at each token. NaN stays NaN.

    Args:
        estimator: "k1", "abs", "k2" or "k3"; a "+" (verl's straight-through forms) gives the value
            the gradient of k2, x, whose mean over the policy's own tokens is the gradient of the
            KL.
        input_clamp: x is clamped to +-input_clamp for any estimator, with zero gradient beyond;
            None: not clamped. 20 is NeMo-RL's default, and verl's for k3, which alone is clamped
            there.
        output_clamp: upper bound of k3, with zero gradient beyond; None: no bound. The default is
            verl's. The other estimators have none, and take no other one than the default.
        sampler_log_prob: multiplies the estimate by the importance weight w = exp(log_prob -
            sampler_log_prob), which is differentiated by log_prob, too, so that the gradient of w
            k3 is w x (bias-corrected KL), except where x is clamped. Pass ``log_prob`` itself for
            own samples (w = 1). A "+" has the gradient w x, with w a constant.

    Examples:
        >>> losses.kl_estimate(
        ...     torch.tensor([-1.0, -2.0]), reference_log_prob=torch.tensor([-1.0, -2.5])
        ... )
        tensor([0.0000, 0.1065])

    Source: Schulman, http://joschu.net/blog/kl-approx.html.
    """
    is_k3 = estimator.startswith("k3")
    if not is_k3 and output_clamp not in (None, OUTPUT_CLAMP):
        raise ValueError(
            f"output_clamp is of the estimators 'k3' and 'k3+', got output_clamp={output_clamp} "
            f"with {estimator!r}"
        )
    x = log_ratio(log_prob, reference_log_prob, input_clamp)
    value = ESTIMATES[estimator.removesuffix("+")](x)
    if output_clamp is not None and is_k3:
        value = bounded(value, high=output_clamp)
    if sampler_log_prob is None:
        return with_gradient_of(value, ESTIMATES["k2"](x)) if estimator.endswith("+") else value
    weight = log_ratio(log_prob, sampler_log_prob).exp()
    if estimator.endswith("+"):
        # The KL's gradient is the policy's mean of x d log_prob, which is the sampler's mean of w x
        # d log_prob. k2 has the x; the gradient of w, which the others need, would add w k2 d
        # log_prob.
        return with_gradient_of(weight * value, weight.detach() * ESTIMATES["k2"](x))
    if input_clamp is not None:
        beyond = (log_prob - reference_log_prob).detach().abs() > input_clamp
        weight = torch.where(beyond, weight.detach(), weight)
    return weight * value
