"""Definition of a `HeadLoss`: its checked terms, metrics and options, and what they need of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..options import Options
from ..sequences import SEQUENCE_REDUCTIONS
from ..statistics import FULL_TEACHER, TOPK_TEACHER
from ..validation import expect_instance, expect_int
from .evaluation import StatisticsFunction
from .statistic_value import StatisticValue, SumsPlan
from .terms import METRICS, CrossEntropy, Metric, Term

REDUCTIONS = ("none", "sum", "mean")  # those that treat all tokens alike; the others are SEQUENCE_REDUCTIONS

# Statistic that a `StatisticValue` may name -> the name in `want` that provides it, "" where every call has it.
PROVIDERS = {
    "lse": "", "log_prob": "", "target_logit": "", "entropy": "entropy", "total": "total", "mass": "total",
    "hits": "argmax", **{name: name for name in (*FULL_TEACHER, *TOPK_TEACHER)},
}  # fmt: skip

# The named metrics as functions that return values by name, as a `Metric`'s function does.
METRIC_FUNCTIONS = {name: lambda stats, name=name: {name: METRICS[name](stats)} for name in METRICS}


class CallPlan(NamedTuple):
    """Facts of a definition that every call needs, worked out once; [0] without, [1] with sequences."""

    needed_inputs: frozenset[str]  # names that the inputs of a call must have
    summed: tuple[list[StatisticsFunction], list[StatisticsFunction]]  # functions summed together with the loss
    apart: tuple[list[StatisticsFunction], list[StatisticsFunction]]  # functions that return metrics by name
    sums: tuple[SumsPlan | None, SumsPlan | None]  # how one kernel sums them, None where plain torch is needed
    checked: dict  # calls that were checked, see `known_calls`


class HeadLossDefinition(NamedTuple):
    """Terms, metrics and options of a `HeadLoss`."""

    terms: tuple[Term, ...]
    metrics: tuple[str, ...]  # names of `METRICS`
    token_metrics: tuple[Metric, ...]
    reduction: str
    ignore_index: int
    options: Options | None
    want: tuple[str, ...]  # optional statistics that terms and metrics need
    total_weight: torch.Tensor | None  # [V] replicated, class weights in the statistic "total"
    plan: CallPlan | None = None

    @classmethod
    def checked(cls, terms, metrics, reduction, ignore_index, options) -> HeadLossDefinition:
        """Build a definition from the arguments of a `HeadLoss`. Raises TypeError or ValueError for wrong ones."""
        expect_instance("options", options, Options)
        terms = _expect_all("terms", [CrossEntropy()] if terms is None else terms, Term)
        metrics = _expect_all("metrics", metrics, (str, Metric))
        names = [term.name for term in terms]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"terms must be at least one, with distinct names, got {names}")
        ignore_index = expect_int("ignore_index", ignore_index)
        named = tuple(metric for metric in metrics if isinstance(metric, str))
        token_metrics = tuple(metric for metric in metrics if not isinstance(metric, str))
        if unknown := set(named) - set(METRICS):
            raise ValueError(f"metrics must be of {sorted(METRICS)}, got {sorted(unknown)}")
        if reduction not in REDUCTIONS + SEQUENCE_REDUCTIONS:
            raise ValueError(f"reduction must be one of {REDUCTIONS + SEQUENCE_REDUCTIONS}, got {reduction!r}")
        total_weight = _class_weight_of_total(terms)
        want = _wanted_statistics(terms, named, token_metrics)
        return cls(terms, named, token_metrics, reduction, ignore_index, options, want, total_weight).planned()

    def arguments(self) -> dict:
        """The arguments of a `HeadLoss` that give this definition."""
        return {
            "terms": self.terms, "metrics": self.metrics + self.token_metrics, "reduction": self.reduction,
            "ignore_index": self.ignore_index, "options": self.options,
        }  # fmt: skip

    def planned(self) -> HeadLossDefinition:
        """The definition with its plan."""
        both = False, True
        summed = tuple(self.summed_functions(has_sequences) for has_sequences in both)
        apart = tuple(self.metric_functions(has_sequences) for has_sequences in both)
        own = any(term.token_weight is not None or isinstance(term.weight, torch.Tensor) for term in self.terms)
        sums = None, None
        if self.reduction != "none" and not own:
            coefficients = [float(term.weight) for term in self.terms]
            sums = tuple(SumsPlan.from_functions([f.function for f in part], coefficients) for part in summed)
        return self._replace(plan=CallPlan(frozenset(self.needed_inputs()), summed, apart, sums, {}))

    def summed_functions(self, has_sequences: bool) -> list[StatisticsFunction]:
        """Functions whose values are summed together with the loss: the terms', then the named metrics'.

        With sequences the named metrics are among `metric_functions` instead, which are summed in two ways.
        """
        named = [] if has_sequences else [StatisticsFunction(f"metric {n!r}", METRICS[n]) for n in self.metrics]
        return [StatisticsFunction(f"term {term.name!r}", term.function, term.inputs) for term in self.terms] + named

    def metric_functions(self, has_sequences: bool) -> list[StatisticsFunction]:
        """Functions that return metrics by name, and are summed apart from the loss."""
        names = self.metrics if has_sequences else ()
        named = [StatisticsFunction(f"metric {name!r}", METRIC_FUNCTIONS[name]) for name in names]
        return named + [StatisticsFunction("a metric", m.function, m.inputs) for m in self.token_metrics]

    def needed_inputs(self) -> set[str]:
        """Names that the inputs of a call must have."""
        needed = {name for part in (*self.terms, *self.token_metrics) for name in part.inputs}
        needed |= {"sequences"} if self.reduction in SEQUENCE_REDUCTIONS else set()
        return needed | ({"teacher"} if set(self.want) & {*FULL_TEACHER, *TOPK_TEACHER} else set())


def _class_weight_of_total(terms) -> torch.Tensor | None:
    """Class weights [V] that the statistic "total" needs. Raises ValueError if other terms use the same statistic."""
    weighted = [t.class_weight for t in terms if t.class_weight is not None and "total" in t.want]
    if weighted and sum("total" in term.want for term in terms) > 1:
        raise ValueError("class weights with smoothing weight the statistic 'total': only one term can use it")
    return weighted[0] if weighted else None


def _wanted_statistics(terms, metrics, token_metrics) -> tuple[str, ...]:
    """Sorted optional statistics that terms and metrics need. ValueError for a StatisticValue of anything else."""
    functions = [*(term.function for term in terms), *(METRICS[name] for name in metrics)]
    named = {f.statistic for f in functions if isinstance(f, StatisticValue)} - {""}
    if unknown := named - set(PROVIDERS):
        raise ValueError(f"a StatisticValue must be of one of {sorted(PROVIDERS)}, got {sorted(unknown)}")
    wanted = {name for part in (*terms, *token_metrics) for name in part.want}
    return tuple(sorted((wanted | {PROVIDERS[name] for name in named}) - {""}))


def _expect_all(name: str, given: Sequence, kinds) -> tuple:
    """Return the given terms or metrics as a tuple. Raises TypeError, with a remedy, if one is of another type."""
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{name} must be a list, {name}=[..], got {_readable(given)}")
    given = tuple(given)
    for part in given:
        if not isinstance(part, kinds):
            expected = "Terms" if kinds is Term else "names or Metrics"
            hint = f": call it, {part.__name__}(..)" if callable(part) and hasattr(part, "__name__") else ""
            raise TypeError(f"{name} must be {expected}, got {_readable(part)}{hint}")
    return given


def _readable(value) -> str:
    """Short name of a value for an error message."""
    return getattr(value, "__name__", None) or (repr(value) if isinstance(value, str) else type(value).__name__)
