"""Results by name, and what to write for a name that is not among them."""

from __future__ import annotations

import functools
import re

import torch
from torch.utils import _pytree

from ..ranks.comm import OF_MEANS
from ..spec.aliases import hint
from ..statistics import known_statistics
from .policy_terms import GeneratorMetrics, PolicyMetrics, call_with_one_token
from .terms import METRICS, AcceptanceRate, BitsPerByte


@functools.cache
def makers_of_metrics() -> dict[str, str]:
    """Return what to write for each name of a metric that a function of this package makes."""
    made = {
        "PolicyMetrics(..)": PolicyMetrics(),
        "PolicyMetrics(.., dual_clip=..)": PolicyMetrics(dual_clip=3.0),
        "PolicyMetrics(.., reference=True)": PolicyMetrics(reference=True),
        "GeneratorMetrics(..)": GeneratorMetrics(),
        "BitsPerByte()": BitsPerByte(),
        "AcceptanceRate()": AcceptanceRate(),
    }
    found: dict[str, str] = {}
    for written, metric in made.items():
        for name in call_with_one_token(metric.function, metric.inputs):
            found.setdefault(name, written)
    return found


def maker_of_metric(name: str) -> str:
    """Return what ``metrics=`` of a `HeadLoss` must be so that outputs have a metric, "" if nobody
    knows."""
    if name in METRICS:
        return repr(name)
    if top := re.fullmatch(r"top(\d+)_accuracy", name):
        return f"TopKAccuracy({top[1]})"
    return makers_of_metrics().get(name, "")


def advice_on_metric(name) -> str:
    """Return what to write for a metric that a `HeadLoss`, or its output, does not have.

    It is for the end of an error, "" if nobody knows.
    """
    if not isinstance(name, str):
        return ""
    said = hint(name, (*METRICS, *makers_of_metrics()), "metric")
    if said.startswith(": write"):
        return said
    if made := maker_of_metric(name):
        return f": write metrics={made} of the HeadLoss"
    if name in known_statistics():
        return f": write Metric(lambda stats: {{{name!r}: stats.{name}}}, want=({name!r},))"
    return said


class Named(dict[str, torch.Tensor]):
    """Tensors by name, whose error for another name says which there are."""

    called = ""

    def __float__(self):
        first = next(iter(self), "name")
        raise TypeError(
            f"one number is expected, got {self.called}s by name, {list(self)}: take one, such as "
            f"[{first!r}]"
        )

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else repr(self)

    def __missing__(self, name):
        raise KeyError(f"no {self.called} {name!r}, there are {list(self)}{self.advice(name)}")

    def advice(self, name) -> str:
        """Return what to write for a name that is not there."""
        return advice_on_metric(name) or ": others come with metrics= of the HeadLoss"


class Sums(Named):
    """Sums by name."""

    # in errors about misplaced ones
    remedy = (
        ", sums by name: mean_metrics takes the outputs themselves, combine_metrics a list of sums"
    )


class TermSums(Sums):
    """`HeadLossOutput.terms`."""

    called = "term"

    def advice(self, name) -> str:
        """Terms have names of their own, and metrics are elsewhere."""
        if maker_of_metric(str(name)):
            return ": metrics are in out.metrics and out.means()"
        return ": a term has the name of its objective, or its name="


class MetricSums(Sums):
    """`HeadLossOutput.metrics`."""

    called = "metric"


class SequenceSums(Sums):
    """`HeadLossOutput.sequence_metrics`."""

    called = "sequence metric"

    def advice(self, name) -> str:
        """There are none without sequences."""
        if not self:
            return ": they are those of metrics= in calls with the input 'sequences'"
        return super().advice(name)


class Means(Named):
    """Result of `mean_metrics`."""

    called = "mean"
    are_means = True
    remedy = OF_MEANS


def _children(found: Named) -> tuple[list, list]:
    return list(found.values()), list(found)


def _children_with_keys(found: Named) -> tuple[list, list]:
    return [(_pytree.MappingKey(name), x) for name, x in found.items()], list(found)


def _register(kind: type[Named]):
    """Have torch map over the tensors of such a dict, as over those of a dict."""

    def again(values, names) -> Named:
        return kind(zip(names, values))

    _pytree.register_pytree_node(kind, _children, again, flatten_with_keys_fn=_children_with_keys)


for kind in (TermSums, MetricSums, SequenceSums, Means):
    _register(kind)


def refused_attribute(name: str, argument: str) -> property:
    """Return a property for an attribute that torch's CrossEntropyLoss has and a `HeadLoss` has not.

    Its assignment raises AttributeError, and there is nothing to read. argument: of `CrossEntropy`.
    """
    write = f"assign terms that have it, head_loss.terms = [CrossEntropy({argument}=..), ..]"
    return _refused(name, write, f"{argument} is of `CrossEntropy`")


# arguments of a call, which a `HeadLoss` does not keep
OF_CALL = "transform", "shard", "inputs", "token_weight", "denominator"


def refused_argument(name: str) -> property:
    """Return a property for an argument of a call, which a `HeadLoss` does not keep; as
    `refused_attribute`."""
    return _refused(name, f"it is an argument of a call, head_loss(.., {name}=..)", "of a call")


def _refused(name: str, write: str, of: str) -> property:
    def refuse(self, value):
        raise AttributeError(f"a HeadLoss has no {name} of its own: {write}")

    return property(None, refuse, doc=f"Cannot be assigned: {of}.")
