"""Losses on vocabulary statistics: `HeadLoss`, the terms and metrics that it is made of, and its
output."""

from ..engine.reductions import StatisticValue
from .causal_lm_loss import CausalLMLoss
from .distillation_terms import Distillation, LKLoss, TopKDistillation
from .loss import HeadLoss
from .output import HeadLossOutput, mean_metrics
from .policy_terms import GeneratorMetrics, KLToReference, PolicyGradient, PolicyMetrics
from .presets import CISPO, DAPO, GRPO, GSPO, PPO, DrGRPO
from .terms import METRICS as METRICS
from .terms import (
    AcceptanceRate,
    BitsPerByte,
    CrossEntropy,
    Entropy,
    Metric,
    Term,
    TopKAccuracy,
    ZLoss,
)

__all__ = [
    "CISPO",
    "DAPO",
    "GRPO",
    "GSPO",
    "PPO",
    "AcceptanceRate",
    "BitsPerByte",
    "CausalLMLoss",
    "CrossEntropy",
    "Distillation",
    "DrGRPO",
    "Entropy",
    "GeneratorMetrics",
    "HeadLoss",
    "HeadLossOutput",
    "KLToReference",
    "LKLoss",
    "Metric",
    "PolicyGradient",
    "PolicyMetrics",
    "StatisticValue",
    "Term",
    "TopKAccuracy",
    "TopKDistillation",
    "ZLoss",
    "mean_metrics",
]
