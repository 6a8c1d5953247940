"""Distillation from a teacher, whole or with K entries per token: statistics -> per-token divergence [..] fp32.

Words: p the student's probabilities, q the teacher's; a top-K teacher has K entries tau per token, and its tail is the
probability of all other ids.
"""

from __future__ import annotations

import math

import torch

from ..statistics import VocabStatistics

SUPPORTS = ("topk", "vocabulary", "tail")


def soft_cross_entropy(stats: VocabStatistics) -> torch.Tensor:
    """Return -sum q log p = KL(q || p) + H(q), whose gradient is that of KL(q || p). Needs the statistics "forward_kl"
    and "teacher_entropy"."""
    return stats.forward_kl + stats.teacher_entropy


def times_temperature_squared(values: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
    """Return T^2 times the values [..], because the gradients of soft targets shrink with 1 / T^2 (Hinton, Vinyals,
    Dean, arXiv:1503.02531, section 2). The temperature T is the student's, a number or [..]."""
    return temperature**2 * values


def _times_mass(mass, value):
    """mass * value, and 0 where the mass is 0, whatever the value."""
    return mass * torch.where(mass == 0, 0.0, value)


def _zero_without_entries(stats, value):
    """The value, and 0 for tokens whose teacher has no entries, because a mask took them out."""
    return torch.where(stats.teacher_mass == 0, 0.0, value)


def log_tail(
    stats: VocabStatistics, tail_log_prob: torch.Tensor | None = None, min_probability: float = 0.0
) -> torch.Tensor:
    """Return the log [..] of a top-K teacher's probability outside of its entries.

    Args:
        tail_log_prob: [..] the log, if it is known; None: the log of 1 - the sum of the entries' probabilities.
        min_probability: replaces a computed tail below 1e-6, which is the rounding error of fp32 log-probs: 0, or a
            positive number that keeps a reverse KL finite.
    """
    if tail_log_prob is not None:
        return tail_log_prob.detach().to(stats.teacher_mass.dtype)
    rest = 1 - stats.teacher_mass
    return torch.where(rest < 1e-6, min_probability, rest).log()


def topk_forward_kl(stats: VocabStatistics, support: str, log_tail: torch.Tensor | None = None) -> torch.Tensor:
    """Return sum tau (log tau - log p) [..] over a top-K teacher's entries, plus the tail's summand if support="tail".

    As in Megatron's topk_kl_div, whose ghost token is the tail. Needs the statistic "topk_forward_kl"; with
    support="vocabulary" also "topk_log_mass"; with support="tail" also "topk_log_mass" and "tail_log_mass".

    Args:
        support: ids over which the student is normalised: "topk" the entries, "vocabulary" all ids, "tail" the entries
            and one more for the sum of all other ids.
        log_tail: [..] `log_tail` of the teacher, for support="tail".
    """
    value = stats.topk_forward_kl
    if support != "topk":
        value = value - _times_mass(stats.teacher_mass, stats.topk_log_mass)
    if support == "tail":
        assert log_tail is not None
        value = value + _times_mass(log_tail.exp(), log_tail - stats.tail_log_mass)
    return value


def topk_reverse_kl(
    stats: VocabStatistics, support: str, log_tail: torch.Tensor | None = None, outside_log_prob: float = -100.0
) -> torch.Tensor:
    """Return sum p (log p - log tau) [..], normalised as in `topk_forward_kl`.

    Needs the statistic "topk_reverse_kl"; with support="tail" also "topk_log_mass" and "tail_log_mass"; with
    support="vocabulary" also these two and "tail_entropy".

    Args:
        support, log_tail: as in `topk_forward_kl`.
        outside_log_prob: for support="vocabulary", the teacher's log-prob of each id that is no entry; the log of 0
            would make the divergence infinite (NeMo-RL's zero_outside_topk takes -100).
    """
    if support == "topk":
        return stats.topk_reverse_kl
    tail = stats.tail_log_mass
    inside = _times_mass(stats.topk_log_mass.exp(), stats.topk_reverse_kl + stats.topk_log_mass)
    if support == "tail":
        assert log_tail is not None
        return inside + _times_mass(tail.exp(), tail - log_tail)
    value = inside + _times_mass(tail.exp(), tail - stats.tail_entropy - outside_log_prob)
    return _zero_without_entries(stats, value)


def topk_jsd(
    stats: VocabStatistics, support: str, log_tail: torch.Tensor | None = None, beta: float = 0.5
) -> torch.Tensor:
    """Return beta KL(tau || m) + (1 - beta) KL(p || m) [..] with m = beta tau + (1 - beta) p (GKD, arXiv:2306.13649,
    section 2), normalised as in `topk_forward_kl`. With support="vocabulary" the teacher's probability outside of its
    entries is 0.

    Needs the statistic "topk_jsd" for support="topk", else "vocab_jsd" with "topk_log_mass" ("vocabulary") or
    "tail_log_mass" ("tail").

    Args:
        support, log_tail: as in `topk_forward_kl`.
        beta: weight of the teacher in (0, 1).
    """
    if support == "topk":
        return stats.topk_jsd
    if support == "vocabulary":
        return _zero_without_entries(
            stats, stats.vocab_jsd + (1 - beta) * math.log(1 - beta) * torch.expm1(stats.topk_log_mass)
        )
    assert log_tail is not None
    q, p = log_tail.exp(), stats.tail_log_mass.exp()
    m = beta * q + (1 - beta) * p
    log_m = torch.where(m == 0, 1.0, m).log()
    parts = beta * _times_mass(q, log_tail - log_m) + (1 - beta) * _times_mass(p, stats.tail_log_mass - log_m)
    return stats.vocab_jsd + parts
