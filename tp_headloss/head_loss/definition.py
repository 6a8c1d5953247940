"""Definition of a `HeadLoss`: its checked terms, metrics and options, and what they need of a
call."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import torch

from ..arguments.options import Options
from ..arguments.sequences import SEQUENCE_REDUCTIONS
from ..engine.reductions import StatisticValue, SumsPlan
from ..losses import policy_metrics
from ..spec import (
    EACH_TOKEN,
    GENERATOR_LOG_PROBS,
    LOG_PROBS,
    OTHER_LOG_PROBS,
    PER_TOKEN,
    Line,
    lines_within,
)
from ..spec.aliases import hint, join_hints
from ..spec.checks import FP32_MAX, is_number
from ..spec.words import as_a_list, two_copies
from ..statistics import (
    AT_IDS,
    FULL_TEACHER,
    OVER_SETS,
    TOPK_TEACHER,
    MaybeNone,
    known_statistics,
    names_stated,
)
from .evaluation import StatisticsFunction, names_read, warn_without_gradient
from .named import advice_on_metric, maker_of_metric
from .policy_terms import warn_of_another_clip
from .terms import METRICS, CrossEntropy, Metric, Term, is_weighted_by_label, warn_of_defaults

PACKAGE = __name__.partition(".")[0]
RECORDS = itertools.count()  # their numbers, one for each definition
# those that treat all tokens alike; the others are SEQUENCE_REDUCTIONS
Reduction: TypeAlias = Literal["none", "sum", "mean"]

# The named metrics as functions that return values by name, as a `Metric`'s function does.
METRIC_FUNCTIONS = {name: lambda stats, name=name: {name: METRICS[name](stats)} for name in METRICS}


class CallPlan(NamedTuple):
    """Facts of a definition that every call needs, worked out once; [0] without, [1] with
    sequences."""

    names: list[str]  # of the terms
    weighted: list[str]  # of those with token weights of their own
    inputs: dict[str, Line]  # what the inputs of a call must be, by name
    # functions summed together with the loss
    summed: tuple[list[StatisticsFunction], list[StatisticsFunction]]
    # functions that return metrics by name
    apart: tuple[list[StatisticsFunction], list[StatisticsFunction]]
    # whether any of all these functions is more than a `StatisticValue`
    evaluated: tuple[bool, ...]
    # how one kernel sums them, None where plain torch is needed
    sums: tuple[SumsPlan | None, SumsPlan | None]
    checked: dict  # calls that were checked, see `remembered`
    weights: dict[str, float | torch.Tensor]  # of the terms, by name
    # [V] class weights of the only term, which are token weights of the loss, by label
    label_weight: torch.Tensor | MaybeNone
    obstacles: list[str]  # reasons against one sweep that a call has found
    # number of what is remembered of upstream gradients, see `engine.one_read.kernel.Memory`
    record: int
    rows: dict  # size of a vocabulary -> the terms' `RowFunction`, or None


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
    plan: CallPlan | MaybeNone = None  # None in a pickle

    @classmethod
    def checked(cls, terms, metrics, reduction, ignore_index, options) -> HeadLossDefinition:
        """Build a definition from the arguments of a `HeadLoss`, after their lines' checks. Raises
        TypeError or ValueError for terms and metrics that do not exist, or not together."""
        terms = _expect_all("terms", [CrossEntropy()] if terms is None else terms, Term)
        metrics = _expect_all("metrics", metrics, (str, Metric))
        names = [term.name for term in terms]
        if not names or len(set(names)) != len(names):
            said = (
                ": add up the weights of equal ones, or give another name: PolicyGradient, "
                "KLToReference, Distillation and TopKDistillation take name=, and of any other "
                "term dataclasses.replace(term, name=..) has another one"
            )
            said *= bool(names)
            raise ValueError(f"terms must be at least one, with distinct names, got {names}{said}")
        named = tuple(metric for metric in metrics if isinstance(metric, str))
        token_metrics = tuple(metric for metric in metrics if not isinstance(metric, str))
        if len(set(named)) != len(named):
            raise ValueError(f"metrics must have distinct names, got {list(named)}")
        if unknown := set(named) - set(METRICS):
            said = join_hints({name: advice_on_metric(name) for name in sorted(unknown)})
            raise ValueError(f"metrics must be of {sorted(METRICS)}, got {sorted(unknown)}{said}")
        total_weight = _class_weight_of_total(terms, token_metrics)
        _expect_one_over((*terms, *token_metrics))
        want = _wanted_statistics(terms, named, token_metrics)
        _expect_one_teacher(want)
        _warn_of_constants(terms)
        warn_of_another_clip(terms, token_metrics)
        warn_of_defaults((*terms, *token_metrics))
        return cls(
            terms, named, token_metrics, reduction, int(ignore_index), options, want, total_weight
        ).planned()

    def description(self) -> str:
        """Terms with their weights, names of metrics, and options, as `print(HeadLoss(..))` shows
        them."""
        terms = ", ".join(_weighted_name(term) for term in self.terms)
        metrics = ", ".join(
            (*self.metrics, *(_function_name(metric.function) for metric in self.token_metrics))
        )
        parts = [f"terms=[{terms}]", f"metrics=[{metrics}]", f"reduction={self.reduction!r}"]
        parts += [f"ignore_index={self.ignore_index}"] * (self.ignore_index != -100)
        parts += [f"options={self.options}"] * (self.options is not None)
        return ", ".join(parts)

    def arguments(self) -> dict:
        """The arguments of a `HeadLoss` that give this definition."""
        return {
            "terms": self.terms,
            "metrics": self.metrics + self.token_metrics,
            "reduction": self.reduction,
            "ignore_index": self.ignore_index,
            "options": self.options,
        }

    def planned(self) -> HeadLossDefinition:
        """The definition with its plan."""
        label_weight = self._label_weight()
        are_apart = label_weight is not None, True
        summed = self.summed_functions(are_apart[0]), self.summed_functions(True)
        apart = self.metric_functions(are_apart[0]), self.metric_functions(True)
        weighted = [term.name for term in self.terms if term.token_weight is not None]
        sums: tuple[SumsPlan | None, SumsPlan | None] = (None, None)
        trained = any(isinstance(term.weight, torch.Tensor) for term in self.terms)
        has_own_divisors = bool(weighted) and label_weight is None
        if self.reduction != "none" and not has_own_divisors and not trained:
            coefficients = [float(term.weight) for term in self.terms]
            plain, sequences = (
                SumsPlan.from_functions([f.function for f in part], coefficients) for part in summed
            )
            sums = plain, sequences
        evaluated = tuple(
            any(not isinstance(f.function, StatisticValue) for f in [*functions, *metrics])
            for functions, metrics in zip(summed, apart)
        )
        plan = CallPlan(
            names=[term.name for term in self.terms],
            weighted=weighted,
            inputs=self.input_lines(),
            summed=summed,
            apart=apart,
            evaluated=evaluated,
            sums=sums,
            checked={},
            weights={term.name: term.weight for term in self.terms},
            label_weight=label_weight,
            obstacles=[],
            record=0 if torch.compiler.is_compiling() else next(RECORDS),
            rows={},
        )
        # torch 2.11 carries no result of _replace over a broken graph
        return HeadLossDefinition(*self[:-1], plan)

    def _label_weight(self) -> torch.Tensor | None:
        """Class weights of a loss that is one cross-entropy with class weights, averaged over
        tokens or summed. Its tokens are weighed by their labels, as by token weights; those of
        several terms have weights of their own."""
        alone = len(self.terms) == 1 and is_weighted_by_label(self.terms[0])
        return self.terms[0].class_weight if alone and self.reduction in ("mean", "sum") else None

    def summed_functions(self, are_apart: bool) -> list[StatisticsFunction]:
        """Functions that are summed together with the loss: the terms', the named metrics', the
        terms' token weights.

        are_apart: the named metrics are among `metric_functions` instead, because the loss has
        weights of its own: with sequences, for which metrics are summed in two ways, and where
        tokens are weighed by their labels.
        """
        by_label = self._label_weight() is not None
        terms = [
            StatisticsFunction(
                f"term {term.name!r}",
                StatisticValue("log_prob", negative=True) if by_label else term.function,
                term.inputs,
                is_loss=True,
                tokenwise=term.tokenwise or term.pointwise,
            )
            for term in self.terms
        ]
        named = (
            []
            if are_apart
            else [StatisticsFunction(f"metric {n!r}", METRICS[n]) for n in self.metrics]
        )
        weights = [
            StatisticsFunction(
                f"the token_weight of term {term.name!r}",
                term.token_weight,
                term.inputs,
                tokenwise=term.tokenwise or term.pointwise,
            )
            for term in self.terms
            if term.token_weight is not None and not by_label
        ]
        return terms + named + weights

    def metric_functions(self, are_apart: bool) -> list[StatisticsFunction]:
        """Functions that return metrics by name, and are summed apart from the loss."""
        names = self.metrics if are_apart else ()
        named = [
            StatisticsFunction(f"metric {name!r}", METRIC_FUNCTIONS[name], (), (name,))
            for name in names
        ]
        ours = [
            any(x is policy_metrics for x in getattr(m.function, "args", ()))
            for m in self.token_metrics
        ]
        own = zip(self.token_metrics, ours)
        return named + [
            StatisticsFunction("a metric", m.function, m.inputs, ("num_tokens",) * our)
            for m, our in own
        ]

    def input_lines(self) -> dict[str, Line]:
        """Lines of the inputs of a call by name: those of the functions that take them, else a
        number per token."""
        lines: dict[str, Line] = {}
        parts: tuple[Term | Metric, ...] = (*self.terms, *self.token_metrics)
        for part in parts:
            said = lines_within(part.function)
            for name in part.inputs:
                lines[name] = said.get(name) or lines.get(name, _line_by_name(name))
        lines |= dict.fromkeys(["sequences"] * (self.reduction in SEQUENCE_REDUCTIONS), PER_TOKEN)
        for name, statistics in (
            ("teacher", (*FULL_TEACHER, *TOPK_TEACHER)),
            ("sets", OVER_SETS),
            ("ids", AT_IDS),
        ):
            lines |= dict.fromkeys([name] * bool(set(self.want) & {*statistics}), PER_TOKEN)
        return lines


def _line_by_name(name: str) -> Line:
    """Return the line of an input of which no function says more than its name."""
    known = {
        "num_bytes": EACH_TOKEN,
        "log_prob": LOG_PROBS,
        "old_log_prob": LOG_PROBS,
        "generator_log_prob": GENERATOR_LOG_PROBS,
    }
    # log-probs never broadcast
    return known.get(name, OTHER_LOG_PROBS if name.endswith("log_prob") else PER_TOKEN)


def _class_weight_of_total(terms, metrics) -> torch.Tensor | None:
    """Class weights [V] that the statistic "total" needs. Raises ValueError if anything else uses
    that statistic."""
    weighted = [t.class_weight for t in terms if t.class_weight is not None and "total" in t.want]
    users = [
        part
        for part in (*terms, *metrics)
        if {"total", "mass"} & {*part.want, *names_read(part.function)}
    ]
    if weighted and len(users) > 1:
        raise ValueError(
            "class weights that weigh the statistic 'total', as those beside smoothing do, must be "
            "those of all that read it: only one term and no metric"
        )
    return weighted[0] if weighted else None


def _expect_one_teacher(want: tuple[str, ...]):
    """Raise ValueError for statistics of which some need a `Teacher`, some a `TopKTeacher`."""
    whole, topk = [[x for x in want if x in served] for served in (FULL_TEACHER, TOPK_TEACHER)]
    if whole and topk:
        raise ValueError(
            f"terms and metrics must need one teacher, got {whole} of a Teacher and {topk} of a "
            "TopKTeacher: a call has one of them, so make a HeadLoss for each"
        )


def _expect_one_over(parts):
    """Raise ValueError if recorded log-probs are compared with log-probs both over the vocabulary
    and over sets."""
    own = {"log_prob": "vocabulary", "set_log_prob": "sets"}
    read: dict[str, dict[str, str]] = {}
    for part in parts:
        over = [own[name] for name in own.keys() & names_read(part.function)]
        for name in part.inputs:
            if len(over) == 1 and name.endswith("log_prob"):
                read.setdefault(name, {})[over[0]] = getattr(part, "name", None) or _function_name(
                    part.function
                )
    for name, found in read.items():
        if len(found) > 1:
            raise ValueError(
                f"the input {name!r} needs the same over= in all that read it, got {found}"
            )


def _wanted_statistics(terms, metrics, token_metrics) -> tuple[str, ...]:
    """Sorted optional statistics that terms and metrics need. ValueError for a StatisticValue of
    anything else."""
    of_terms = [f for term in terms for f in (term.function, term.token_weight)]
    functions = [*of_terms, *(METRICS[name] for name in metrics)]
    named = {f.statistic for f in functions if isinstance(f, StatisticValue)} - {""}
    # statistics that a StatisticValue may name -> the name in want that gives it, "" where every
    # call has it
    providers = {name: name for name in known_statistics() if name not in ("argmax", *AT_IDS)}
    providers |= {"lse": "", "log_prob": "", "target_logit": "", "mass": "total", "hits": "argmax"}
    if unknown := named - set(providers):
        raise ValueError(
            f"a StatisticValue must be of one of {sorted(providers)}, got {sorted(unknown)}"
        )
    wanted = {name for part in (*terms, *token_metrics) for name in part.want}
    return tuple(sorted((wanted | {providers[name] for name in named}) - {""}))


def _warn_of_constants(terms: tuple[Term, ...]):
    """Warn of terms that are a statistic without a gradient; `evaluate` warns of other functions."""
    if torch.compiler.is_compiling():
        return
    # target_logit's gradient is lse's and log_prob's
    trained = names_stated("gradients") | {"target_logit"}
    for term in terms:
        function = term.function
        if isinstance(function, StatisticValue) and function.statistic not in trained:
            warn_without_gradient(f"term {term.name!r}", f"{function.statistic!r} has none")


def _expect_all(name: str, given, kinds) -> tuple:
    """Return the terms or metrics, or the one, as a tuple; TypeError, with a remedy, if one is of
    another type."""
    given = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    expected = "Terms" if kinds is Term else "names or Metrics"
    for part in given:
        if not isinstance(part, kinds):
            said = two_copies(part, Term if kinds is Term else Metric)
            said = said or (_advice_on_term(part) if kinds is Term else "")
            said = said or getattr(type(part), "remedy", "") or as_a_list(part)
            if isinstance(part, StatisticValue):
                own = f"{part.statistic!r}"
                said = f": wrap it, Term({own}, {part})" if kinds is Term else f": write {own}"
            # of this package
            elif callable(part) and is_own(part):
                called = getattr(part, "__name__", None)  # None: a module
                said = f": call it, {called}(..)" if called else _advice_on_whole_loss(part)
            elif callable(part):
                own = getattr(part, "__name__", "name").replace("<lambda>", "name")
                said = (
                    f": wrap it, Term({own!r}, function)"
                    if kinds is Term
                    else ": wrap it, Metric(function)"
                )
            elif kinds is Term and is_number(part):
                said = _advice_on_number(part)
            elif isinstance(part, (tuple, list)):
                said = ": a term has its weight itself, as CrossEntropy(0.5)" * (kinds is Term)
            elif isinstance(part, dict):
                said = ": write a list of its values, which have names of their own"
            elif isinstance(part, (set, frozenset)):
                said = ": write a list, whose order is the same on all ranks"
            raise TypeError(f"{name} must be {expected}, got {_readable(part)}{said}")
    return given


def _advice_on_term(part) -> str:
    """Return what to write for the name of a term, or of a metric in the place of terms; "" if
    nobody knows."""
    if said := hint(part, (), "term"):
        return said
    if isinstance(part, str) and (made := maker_of_metric(part)):
        return f": a metric, write HeadLoss(metrics={made})"
    return advice_on_metric(part).replace(": write ", ": as a metric (metrics=..) write ", 1)


def _advice_on_whole_loss(loss) -> str:
    """Return what to write for a HeadLoss, or another module of this package, among terms.

    Its reduction and its ignore_index are no part of its terms, and would be lost silently.
    """
    reduction, ignored = getattr(loss, "reduction", None), getattr(loss, "ignore_index", -100)
    if reduction is None:
        return ": it is a whole loss, whose terms go here"
    along = [f"reduction={reduction!r}"] * (reduction != "mean")
    along += [f"ignore_index={ignored}"] * (ignored != -100)
    along += ["options=loss.options"] * (loss.options is not None)
    arguments = ", ".join(["[*loss.terms, ..]", *along])
    return (
        f": it is a whole loss, whose terms go here: write HeadLoss({arguments}), or where it is a "
        "preset such as GRPO(..) its own kl= (of the estimator k3) and entropy="
    )


def _advice_on_number(number: float) -> str:
    """Return the arguments that take a number which was given as a term, "" where none does."""
    smooths, penalises = 0 <= number < 1, 0 <= number <= FP32_MAX
    takes = [f"CrossEntropy(label_smoothing={number})"] * smooths
    takes += [f"ZLoss({number})"] * penalises
    takes += [f"ignore_index={number}"] * isinstance(number, int)
    return f": write {' or '.join(takes)}, whose argument it may be" if takes else ""


def is_own(value) -> bool:
    """Whether a function, class or object is of this package."""
    return (getattr(value, "__module__", None) or "").startswith(f"{PACKAGE}.")


def _weighted_name(term: Term) -> str:
    """A term's name, after its weight if that is not 1: "0.0001 * z_loss"."""
    if isinstance(term.weight, torch.Tensor):
        return f"tensor * {term.name}"
    return term.name if term.weight == 1 else f"{term.weight:g} * {term.name}"


def _function_name(function) -> str:
    """Name of a function, or of the one that a partial hands on."""
    while isinstance(function, partial):
        function = next((x for x in function.args if callable(x)), function.func)
    return _readable(function).lstrip("_")


def _readable(value) -> str:
    """Short name of a value for an error message."""
    return getattr(value, "__name__", None) or (
        repr(value) if isinstance(value, str) else type(value).__name__
    )
