"""Results of a `HeadLoss` call, and how statistics become them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..statistics import VocabStatistics
from .call import Call
from .evaluation import expect_distinct_names
from .reduction import reduce_tokens
from .statistic_value import FusedReduction


class HeadLossOutput(NamedTuple):
    """Results of one `HeadLoss` call, replicated over the group; making them never waits for the device.

    Sums in `terms` and `metrics` are detached and run over valid tokens; divided by `count` they are means.
    """

    loss: torch.Tensor  # scalar fp32, or [..] for reduction="none"
    # scalar, what the mean divides by: valid tokens (the sum of their weights, if there are token weights), or
    # sequences; counts of data- and context-parallel ranks add up
    count: torch.Tensor
    # sum of each term's values times the reduction's token weights, without the term's own weight
    terms: dict[str, torch.Tensor]
    # sum of each metric's values times the token weights, extremum for names in "max_" and "min_"; with sequences
    # also "num_tokens", the divisor of these sums
    metrics: dict[str, torch.Tensor]
    stats: VocabStatistics
    # with sequences and metrics: sum over sequences of each metric's mean, and "num_sequences"
    sequence_metrics: dict[str, torch.Tensor]


def make_output(
    call: Call, stats: VocabStatistics, evaluate: Callable, reduction: FusedReduction | None, loss=None, sums=None
) -> HeadLossOutput:
    """Evaluate and reduce what is not known yet, and name the results.

    evaluate: `evaluation.evaluate`, or a function of its kind. loss, sums: of a reduction that ran with the statistics,
    or None.
    """
    definition, has_sequences = call.definition, call.sequences is not None
    values, other_metrics, sequence_metrics = None, {}, {}
    if loss is None or definition.token_metrics:
        functions = call.functions, definition.plan.apart[int(has_sequences)]
        values, other_metrics, sequence_metrics = evaluate(*functions, stats, call.inputs, call.token_weight)
    if loss is None:
        loss, sums = reduce_tokens(call, stats, values, reduction)
    *sums, total = sums.unbind(0) if isinstance(sums, torch.Tensor) else sums
    terms = {term.name: value for term, value in zip(definition.terms, sums)}
    metrics = dict(zip(definition.metrics, sums[len(terms) :]))
    if other_metrics:
        expect_distinct_names(metrics, other_metrics)
        metrics |= other_metrics
    count = total if call.count is None else call.count
    return HeadLossOutput(loss, count, terms, metrics, stats, sequence_metrics)
