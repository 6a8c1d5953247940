"""Per-token values simple enough for the reduction kernel to compute itself, and the plan of such a
kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from ..statistics import documented_fields


@documented_fields
class StatisticValue(NamedTuple):
    """Per-token function [-] statistic [squared], which the reduction evaluates without a kernel of
    its own.

    Attributes:
        statistic: a field of `VocabStatistics`, or a registered statistic.
        square: True squares it.
        negative: True negates it, after the square.

    Examples:
        >>> term = Term("z_loss", StatisticValue("lse", square=True))
        >>> HeadLoss(term)(torch.zeros(2, 4), torch.tensor([0, 1])).loss  # (log 4)^2
        tensor(1.9218)
    """

    statistic: str
    square: bool = False
    negative: bool = False

    def __call__(self, stats) -> torch.Tensor:
        """Evaluate on a VocabStatistics -> [..], in its floating-point type."""
        values = getattr(stats, self.statistic)
        values = values if values.is_floating_point() else values.float()
        values = values**2 if self.square else values
        return -values if self.negative else values


PerToken: TypeAlias = Callable[..., torch.Tensor] | StatisticValue


class SumsPlan(NamedTuple):
    """Static facts of a reduction kernel: which values it sums, and loss = sum of coefficient_i *
    sum_i / divisor.

    The divisor is the caller's denominator, or the sum of the valid tokens' weights, and infinity
    in place of 0.
    """

    # weights of the terms, whose values come first; all further values are metrics
    coefficients: tuple[float, ...]
    # the statistic that a value is, "" for a tensor that was computed from statistics
    statistics: tuple[str, ...]
    squares: int  # bit i: value i is squared
    negatives: int  # bit i: sum i is negated
    # of each term its statistic, d (loss * divisor) / d value, whether it is squared; None unless
    # each is one statistic
    gradients: tuple[tuple[str, float, bool], ...] | None

    @classmethod
    def from_functions(
        cls, functions: Sequence[PerToken], coefficients: Sequence[float]
    ) -> SumsPlan:
        """Plan for sums of these functions' values; those that are no `StatisticValue` are summed
        as given."""
        as_given = StatisticValue("")
        plain = [f if isinstance(f, StatisticValue) else as_given for f in functions]
        terms = plain[: len(coefficients)]
        gradients = [
            (f.statistic, -float(c) if f.negative else float(c), f.square)
            for f, c in zip(terms, coefficients)
        ]
        names = {f.statistic for f in terms}
        apart = len(names) == len(terms) and not names & {"", "target_logit"}
        return cls(
            tuple(coefficients),
            tuple(m.statistic for m in plain),
            sum(m.square << i for i, m in enumerate(plain)),
            sum(m.negative << i for i, m in enumerate(plain)),
            tuple(gradients) if apart else None,
        )


class FusedReduction(NamedTuple):
    """Arguments of the reduction kernel besides the values: its plan, token weights and
    denominator."""

    plan: SumsPlan
    weight: torch.Tensor | None  # [..] token weights that need no gradient
    denominator: torch.Tensor | float | None  # None: the sum of the valid tokens' weights
    # the terms' `RowFunction`; None: each is a statistic, or a value that was computed before
    rows: Any = None
    given: tuple[torch.Tensor, ...] = ()  # its inputs [..]

    def in_rows(self, order) -> FusedReduction:
        """The reduction of tokens in rows, fp32 and contiguous."""
        return self._each(lambda x: order.flatten(x).float().contiguous())

    def of_rows(self, here: slice) -> FusedReduction:
        """The reduction of some rows."""
        return self._each(lambda x: x[here])

    def _each(self, function) -> FusedReduction:
        weight = None if self.weight is None else function(self.weight)
        return self._replace(weight=weight, given=tuple(map(function, self.given)))
