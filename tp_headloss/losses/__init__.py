"""Per-token losses: ordinary PyTorch on statistics, log-probs and per-token tensors, without
kernels or ranks."""

from .covariance_policy import clip_cov, kl_cov
from .cross_entropy import cross_entropy, label_weight, smoothed_cross_entropy
from .distillation import (
    SUPPORTS,
    log_tail,
    soft_cross_entropy,
    times_temperature_squared,
    topk_forward_kl,
    topk_jsd,
    topk_reverse_kl,
)
from .draft import acceptance_rate, lk_alpha, lk_lambda
from .kl import KL_ESTIMATORS, kl_estimate
from .metrics import generator_metrics, policy_metrics
from .policy import cispo, positive_nll, ppo_clip, reinforce, sapo
from .preference import dpo, ipo, kto, orpo, simpo
from .ratio import log_ratio
from .regularizers import entropy_bonus, z_loss
from .rollout import icepop, sequence_masked_importance_weight, truncated_importance_weight
from .sequence_policy import gmpo, gspo, gspo_length_weighted, sequence_log_ratio, vespo

__all__ = [
    "KL_ESTIMATORS",
    "SUPPORTS",
    "acceptance_rate",
    "cispo",
    "clip_cov",
    "cross_entropy",
    "dpo",
    "entropy_bonus",
    "generator_metrics",
    "gmpo",
    "gspo",
    "gspo_length_weighted",
    "icepop",
    "ipo",
    "kl_cov",
    "kl_estimate",
    "kto",
    "label_weight",
    "lk_alpha",
    "lk_lambda",
    "log_ratio",
    "log_tail",
    "orpo",
    "policy_metrics",
    "positive_nll",
    "ppo_clip",
    "reinforce",
    "sapo",
    "sequence_log_ratio",
    "sequence_masked_importance_weight",
    "simpo",
    "smoothed_cross_entropy",
    "soft_cross_entropy",
    "times_temperature_squared",
    "topk_forward_kl",
    "topk_jsd",
    "topk_reverse_kl",
    "truncated_importance_weight",
    "vespo",
    "z_loss",
]
