"""Distillation from a teacher, whole or with K entries per token: statistics -> per-token
divergence [..] fp32.

Words: p the student's probabilities, q the teacher's; tau the K entries of a top-K teacher, its
tail all other ids.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F

from ..spec import (
    ConstantPerToken,
    Instance,
    LogProb,
    OpenShare,
    PositiveFp32,
    Share,
    TokenLoss,
    TokenValues,
    checked,
)
from ..statistics import VocabStatistics

Support: TypeAlias = Literal["topk", "vocabulary", "tail"]
SUPPORTS: tuple[Support, ...] = get_args(Support)
Tail: TypeAlias = ConstantPerToken | None
Taught: TypeAlias = Annotated[
    VocabStatistics, Instance(VocabStatistics, ("forward_kl", "teacher_entropy"))
]
OfEntries: TypeAlias = Annotated[VocabStatistics, Instance(VocabStatistics, ("teacher_mass",))]
TOPK_DISTILLATIONS = {  # (divergence, support) -> the optional statistics that it needs
    ("forward_kl", "topk"): ("topk_forward_kl",),
    ("forward_kl", "vocabulary"): ("vocab_forward_kl",),
    ("forward_kl", "tail"): ("vocab_forward_kl", "tail_log_mass"),
    ("reverse_kl", "topk"): ("topk_reverse_kl",),
    ("reverse_kl", "vocabulary"): (
        "topk_reverse_kl",
        "topk_log_mass",
        "tail_log_mass",
        "tail_entropy",
    ),
    ("reverse_kl", "tail"): ("topk_reverse_kl", "topk_log_mass", "tail_log_mass"),
    ("jsd", "topk"): ("topk_jsd",),
    ("jsd", "vocabulary"): ("vocab_jsd", "topk_log_mass"),
    ("jsd", "tail"): ("vocab_jsd", "tail_log_mass"),
}


@checked
def soft_cross_entropy(stats: Taught) -> TokenLoss:
    """Return -sum q log p = KL(q || p) + H(q), whose gradient is that of KL(q || p).

    Examples:
        >>> teacher = torch.tensor([[0.0, 1.0, 2.0]])
        >>> want = "forward_kl", "teacher_entropy"
        >>> stats = vocab_statistics(
        ...     torch.tensor([[2.0, 1.0, 0.0]]), want=want, teacher=Teacher(teacher)
        ... )
        >>> losses.soft_cross_entropy(stats)
        tensor([1.9828])
    """
    return stats.forward_kl + stats.teacher_entropy


@checked
def times_temperature_squared(
    values: TokenValues, temperature: PositiveFp32 | ConstantPerToken
) -> TokenValues:
    """Return T^2 times the values, T the student's temperature: gradients of soft targets shrink
    with 1 / T^2.

    Examples:
        >>> losses.times_temperature_squared(torch.tensor([0.5, 1.0]), 2.0)
        tensor([2., 4.])

    Source: Hinton, Vinyals, Dean, arXiv:1503.02531, section 2.
    """
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.to(values.dtype)  # whose own may not hold the square
    return temperature**2 * values


def _times_mass(mass, value):
    """mass * value, and 0 where the mass is 0, whatever the value."""
    # a number would be a kernel of its own
    return mass * torch.where(mass == 0, mass.detach(), value)


def _zero_without_entries(stats, value):
    """The value, and 0 for tokens whose teacher has no entries, because a mask took them out."""
    return torch.where(stats.teacher_mass == 0, 0.0, value)


@checked
def log_tail(
    stats: OfEntries, tail_log_prob: Tail = None, min_probability: Share = 0.0
) -> TokenValues:
    """Return the log of a top-K teacher's probability outside of its entries, in nats.

    Args:
        tail_log_prob: the log, if it is known; None: the log of 1 - the sum of the entries'
            probabilities.
        min_probability: replaces a computed tail of at most 1e-6, rounding error; positive, a
            reverse KL stays finite.

    Examples:
        >>> entries = TopKTeacher(
        ...     torch.tensor([[2, 1]]), torch.tensor([[-0.4, -1.4]]), renormalize=False
        ... )
        >>> stats = vocab_statistics(
        ...     torch.tensor([[2.0, 1.0, 0.0]]), want=("topk_jsd",), teacher=entries
        ... )
        >>> losses.log_tail(stats)
        tensor([-2.4879])
    """
    if tail_log_prob is not None:
        return tail_log_prob.to(stats.teacher_mass.dtype)
    return F.threshold(1 - stats.teacher_mass, 1e-6, min_probability).log()


def _expect_known(stats: VocabStatistics, divergence: str, support: Support, log_tail: Tail):
    """Raise ValueError unless there are the statistics, and the teacher's tail, that a support
    needs."""
    if support == "tail" and log_tail is None:
        raise ValueError(
            "support='tail' needs log_tail, the teacher's, see losses.log_tail, got None"
        )
    stats.expect(f"stats for support={support!r}", TOPK_DISTILLATIONS[divergence, support])


@checked
def topk_forward_kl(stats: VocabStatistics, support: Support, log_tail: Tail = None) -> TokenLoss:
    """Return sum tau (log tau - log p) over a top-K teacher's entries, plus the tail's summand if
    support="tail".

    Args:
        stats: with "topk_forward_kl" for support="topk", else "vocab_forward_kl"; for "tail" also
            "tail_log_mass".
        support: the student is normalised over "topk" the entries, "vocabulary" all ids, "tail"
            entries and the rest.
        log_tail: `log_tail` of the teacher, for support="tail".

    Examples:
        >>> entries = TopKTeacher(
        ...     torch.tensor([[2, 1]]), torch.tensor([[-0.4, -1.4]]), renormalize=False
        ... )
        >>> want = "vocab_forward_kl", "tail_log_mass"
        >>> stats = vocab_statistics(torch.tensor([[2.0, 1.0, 0.0]]), want=want, teacher=entries)
        >>> losses.topk_forward_kl(stats, "tail", losses.log_tail(stats))
        tensor([1.1748])

    Source: Megatron's topk_kl_div, whose ghost token is the tail.
    """
    _expect_known(stats, "forward_kl", support, log_tail)
    if log_tail is None or support != "tail":
        return stats.topk_forward_kl if support == "topk" else stats.vocab_forward_kl
    return stats.vocab_forward_kl + _times_mass(log_tail.exp(), log_tail - stats.tail_log_mass)


@checked
def topk_reverse_kl(
    stats: VocabStatistics,
    support: Support,
    log_tail: Tail = None,
    outside_log_prob: LogProb = -100.0,
) -> TokenLoss:
    """Return sum p (log p - log tau), normalised as in `topk_forward_kl`.

    Args:
        stats: `VocabStatistics` with "topk_reverse_kl"; for support="tail" also "topk_log_mass" and
            "tail_log_mass", for "vocabulary" also these two and "tail_entropy".
        support, log_tail: as in `topk_forward_kl`.
        outside_log_prob: for support="vocabulary", the teacher's log-prob of each id that is no
            entry; the log of 0 would make the divergence infinite (NeMo-RL's zero_outside_topk
            takes -100).

    Examples:
        >>> entries = TopKTeacher(
        ...     torch.tensor([[2, 1]]), torch.tensor([[-0.4, -1.4]]), renormalize=False
        ... )
        >>> want = "topk_forward_kl", "topk_reverse_kl", "topk_jsd", "topk_log_mass", "tail_log_mass"
        >>> stats = vocab_statistics(torch.tensor([[2.0, 1.0, 0.0]]), want=want, teacher=entries)
        >>> losses.topk_reverse_kl(stats, "tail", losses.log_tail(stats))
        tensor([1.2013])
    """
    _expect_known(stats, "reverse_kl", support, log_tail)
    if support == "topk":
        return stats.topk_reverse_kl
    tail = stats.tail_log_mass
    inside = _times_mass(stats.topk_log_mass.exp(), stats.topk_reverse_kl + stats.topk_log_mass)
    if support == "tail" and log_tail is not None:
        return inside + _times_mass(tail.exp(), tail - log_tail)
    value = inside + _times_mass(tail.exp(), tail - stats.tail_entropy - outside_log_prob)
    return _zero_without_entries(stats, value)


@checked
def topk_jsd(
    stats: VocabStatistics, support: Support, log_tail: Tail = None, beta: OpenShare = 0.5
) -> TokenLoss:
    """Return beta KL(tau || m) + (1 - beta) KL(p || m) with m = beta tau + (1 - beta) p.

    Args:
        stats: with "topk_jsd" ("topk"), or "vocab_jsd" and "topk_log_mass" ("vocabulary") or
            "tail_log_mass" ("tail").
        support: as in `topk_forward_kl`.
        log_tail: as in `topk_forward_kl`; "vocabulary" takes a tail of probability 0.

    Examples:
        >>> entries = TopKTeacher(
        ...     torch.tensor([[2, 1]]), torch.tensor([[-0.4, -1.4]]), renormalize=False
        ... )
        >>> stats = vocab_statistics(
        ...     torch.tensor([[2.0, 1.0, 0.0]]), want=("topk_jsd",), teacher=entries
        ... )
        >>> losses.topk_jsd(stats, "topk")
        tensor([0.1070])

    Source: GKD (arXiv:2306.13649, section 2).
    """
    _expect_known(stats, "jsd", support, log_tail)
    if support == "topk":
        return stats.topk_jsd
    if log_tail is None or support == "vocabulary":
        return _zero_without_entries(
            stats,
            stats.vocab_jsd + (1 - beta) * math.log(1 - beta) * torch.expm1(stats.topk_log_mass),
        )
    q, p = log_tail.exp(), stats.tail_log_mass.exp()
    m = beta * q + (1 - beta) * p
    log_m = torch.where(m == 0, 1.0, m).log()
    parts = beta * _times_mass(q, log_tail - log_m) + (1 - beta) * _times_mass(
        p, stats.tail_log_mass - log_m
    )
    return stats.vocab_jsd + parts
