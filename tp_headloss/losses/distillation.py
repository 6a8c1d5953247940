"""Distillation from a teacher's whole distribution: statistics -> per-token divergence [..] fp32."""

from __future__ import annotations

import torch

from ..stats import VocabStatistics


def soft_cross_entropy(stats: VocabStatistics) -> torch.Tensor:
    """-sum q log p = KL(q || p) + H(q), with the gradient of the former; needs "forward_kl" and "teacher_entropy"."""
    return stats.forward_kl + stats.teacher_entropy


def temperature_squared(values: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
    """T^2 times value and gradient alike (Hinton, Vinyals, Dean, arXiv:1503.02531, section 2), because the gradients of
    soft targets shrink with 1 / T^2. temperature: the student's, a number or [..]."""
    return temperature**2 * values
