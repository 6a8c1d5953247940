"""Distillation from a teacher, whole or of K entries per token: statistics -> per-token divergence [..] fp32."""

from __future__ import annotations

import math

import torch

from ..stats import VocabStatistics

OVER = ("topk", "vocabulary", "tail")


def soft_cross_entropy(stats: VocabStatistics) -> torch.Tensor:
    """-sum q log p = KL(q || p) + H(q), with the gradient of the former; needs "forward_kl" and "teacher_entropy"."""
    return stats.forward_kl + stats.teacher_entropy


def temperature_squared(values: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
    """T^2 times value and gradient alike (Hinton, Vinyals, Dean, arXiv:1503.02531, section 2), because the gradients of
    soft targets shrink with 1 / T^2. temperature: the student's, a number or [..]."""
    return temperature**2 * values


def _weighed(mass, value):
    """mass * value, where a mass of 0 leaves nothing of any value."""
    return mass * torch.where(mass == 0, 0.0, value)


def _known(stats, value):
    """The value, 0 for a token whose teacher has no entries (one that a mask takes out): nothing is known of it."""
    return torch.where(stats.teacher_mass == 0, 0.0, value)


def log_tail(stats: VocabStatistics, tail_log_prob: torch.Tensor | None = None, least: float = 0.0) -> torch.Tensor:
    """Log of the teacher's probability outside of its entries: as given, or of 1 - their sum, whose error is that of
    fp32 log-probs, so that less than 1e-6 counts as ``least``: nothing, or what keeps a reverse KL finite."""
    if tail_log_prob is not None:
        return tail_log_prob.detach().to(stats.teacher_mass.dtype)
    rest = 1 - stats.teacher_mass
    return torch.where(rest < 1e-6, least, rest).log()


def topk_forward_kl(stats: VocabStatistics, over: str, log_tail: torch.Tensor | None = None) -> torch.Tensor:
    """sum tau (log tau - log p) over a top-K teacher's entries, with one more for the tail if over it.

    over: what the student is normalised over: "topk" the entries, "vocabulary", or "tail" the entries and the sum of
    everything else. As in Megatron's topk_kl_div (whose ghost token is the tail); needs "topk_forward_kl", but for
    "topk" also "topk_log_mass", for "tail" also "tail_log_mass"."""
    value = stats.topk_forward_kl
    if over != "topk":
        value = value - _weighed(stats.teacher_mass, stats.topk_log_mass)
    if over == "tail":
        value = value + _weighed(log_tail.exp(), log_tail - stats.tail_log_mass)
    return value


def topk_reverse_kl(
    stats: VocabStatistics, over: str, log_tail: torch.Tensor | None = None, outside: float = -100.0
) -> torch.Tensor:
    """sum p (log p - log tau), as `topk_forward_kl`. Over the vocabulary the teacher's log-prob of every other id is
    ``outside``, because 0 would make it infinite (NeMo-RL's zero_outside_topk has -100).

    Needs "topk_reverse_kl", but for "topk" "topk_log_mass" and "tail_log_mass", for "vocabulary" "tail_entropy"."""
    if over == "topk":
        return stats.topk_reverse_kl
    tail = stats.tail_log_mass
    inside = _weighed(stats.topk_log_mass.exp(), stats.topk_reverse_kl + stats.topk_log_mass)
    apart = tail - log_tail if over == "tail" else tail - stats.tail_entropy - outside
    value = inside + _weighed(tail.exp(), apart)
    return value if over == "tail" else _known(stats, value)


def topk_jsd(
    stats: VocabStatistics, over: str, log_tail: torch.Tensor | None = None, beta: float = 0.5
) -> torch.Tensor:
    """beta KL(tau || m) + (1 - beta) KL(p || m), m = beta tau + (1 - beta) p (GKD, arXiv:2306.13649, section 2), as
    `topk_forward_kl`; over the vocabulary the teacher has nothing outside of its entries.

    Needs "topk_jsd" for "topk", else "vocab_jsd", with "topk_log_mass" for "vocabulary", "tail_log_mass" for "tail"."""
    if over == "topk":
        return stats.topk_jsd
    if over == "vocabulary":
        return _known(stats, stats.vocab_jsd + (1 - beta) * math.log(1 - beta) * torch.expm1(stats.topk_log_mass))
    q, p = log_tail.exp(), stats.tail_log_mass.exp()
    m = beta * q + (1 - beta) * p
    log_m = torch.where(m == 0, 1.0, m).log()
    parts = beta * _weighed(q, log_tail - log_m) + (1 - beta) * _weighed(p, stats.tail_log_mass - log_m)
    return stats.vocab_jsd + parts
