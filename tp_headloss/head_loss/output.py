"""Results of a `HeadLoss` call, and how statistics become them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch

from ..arguments.sequences import SEQUENCE_REDUCTIONS
from ..call.equal_results import EqualResults
from ..engine.reductions import FusedReduction
from ..ranks.comm import combine_metrics, reduce_metrics
from ..ranks.groups import Group
from ..ranks.shard import VocabShard
from ..spec import Instance, TupleOf, checked
from ..statistics import MaybeNone, VocabStatistics, documented_fields
from .checks import Call
from .evaluation import expect_distinct_names
from .named import (
    Means,
    MetricSums,
    SequenceSums,
    TermSums,
    advice_on_metric,
    maker_of_metric,
)
from .reduction import reduce_tokens, valid_weight
from .values import expect_known_terms


@documented_fields
class HeadLossOutput(NamedTuple):
    """Results of one `HeadLoss` call, replicated over the group; making them never waits for the
    device.

    Sums in `terms` and `metrics` are detached and run over valid tokens; `means()` makes means of
    them. `backward()` and arithmetic (``0.5 * out + other``, a tensor) are the loss's own,
    ``float(out)`` and ``f"{out:.3f}"`` its value. What takes tensors alone takes ``out.loss``:
    ``scaler.scale(out.loss)`` of `torch.amp.GradScaler`, `torch.autograd.grad`, and the result of a
    function under ``torch.utils.checkpoint.checkpoint(.., use_reentrant=True)``.

    Attributes:
        loss: scalar, or [..] for reduction="none"; fp32, and float64 for float64 logits.
        count: scalar, fp32, what the mean divides by without a ``denominator``: valid tokens (the
            sum of their weights, if there are token weights), or sequences. Counts of data- and
            context-parallel ranks add up. Copy them, and all sums, before an all_reduce in place:
            `means` and `mean_metrics` read them again.
        terms: sum of each term's values times the reduction's token weights, without the term's own
            weight, by name.
        metrics: sum of each metric's values times the token weights, the extremum for names in
            "max_" and "min_"; of a `Metric` of your own fp32, whatever the logits are. With
            sequences also "num_tokens", the divisor of these sums. That of "perplexity" is the sum
            of log-probs, below 0; `means` makes a perplexity of it.
        stats: `VocabStatistics` of the call.
        sequence_metrics: with sequences and metrics, sum over sequences of each metric's mean, and
            "num_sequences".
        term_counts: what the means of terms with token weights of their own (class weights, say)
            divide by in the place of ``count``: the sum of these weights, by the term's name.
        weights: of the terms, by name.
        reduction: of the `HeadLoss`.

    Examples:
        >>> out = HeadLoss([CrossEntropy(), ZLoss(0.5)], metrics="accuracy")(
        ...     torch.zeros(2, 4), torch.tensor([0, -100])
        ... )
        >>> out.loss, out.count, out.terms, out.metrics["accuracy"] / out.count
        (tensor(2.3472), tensor(1.), {'cross_entropy': tensor(1.3863), 'z_loss': tensor(1.9218)}, tensor(1.))
        >>> out
        HeadLossOutput(loss=2.3472, count=1, terms=[cross_entropy, z_loss], metrics=[accuracy], stats=[2])
        >>> {name: round(float(mean), 2) for name, mean in out.means().items()}
        {'loss': 2.35, 'loss/cross_entropy': 1.39, 'loss/z_loss': 1.92, 'weighted/z_loss': 0.96, 'accuracy': 1.0}
    """

    loss: torch.Tensor
    count: torch.Tensor  # type: ignore[assignment]  # hides tuple.count
    terms: dict[str, torch.Tensor]
    metrics: dict[str, torch.Tensor]
    stats: VocabStatistics | MaybeNone
    sequence_metrics: dict[str, torch.Tensor]
    term_counts: dict[str, torch.Tensor]
    weights: dict[str, float | torch.Tensor]
    reduction: str

    def means(self) -> dict[str, torch.Tensor]:
        """Return `mean_metrics` of this output alone: detached, for a log. What has a gradient is
        ``loss``."""
        return mean_metrics(self)

    def backward(self, **keywords):
        """Call ``loss.backward`` with these keywords. RuntimeError for a loss per token without a
        ``gradient``."""
        if keywords.get("gradient") is None:
            _expect_scalar(self.loss)
        self.loss.backward(**keywords)

    def __getattr__(self, name: str):
        # torch.compile looks at one that holds no tensors, or no fields
        if torch.compiler.is_compiling() or name.startswith("__") or not len(self):
            raise AttributeError(name)
        said = "its loss is the tensor out.loss"
        if name in self.metrics or name in self.terms:
            key = name if name in self.metrics else f"loss/{name}"
            said = f"write out.means()[{key!r}]"
        elif name in VocabStatistics._fields and self.stats is not None:
            said = f"write out.stats.{name}"
            if getattr(self.stats, name) is None:
                said = f"it was not wanted{advice_on_metric(name)}"
        elif made := maker_of_metric(name):
            said = f"HeadLoss(.., metrics={made}) has it in out.means()"
        raise AttributeError(f"a HeadLossOutput has no {name!r}: {said}")

    # arithmetic of a tuple is something else, which type checkers and users would take this for
    def __add__(self, other: Any) -> torch.Tensor:  # type: ignore[override]
        return self.loss + other

    def __sub__(self, other: Any) -> torch.Tensor:
        return self.loss - other

    def __mul__(self, other: Any) -> torch.Tensor:  # type: ignore[override]
        return self.loss * other

    def __truediv__(self, other: Any) -> torch.Tensor:
        return self.loss / other

    def __pow__(self, other: Any) -> torch.Tensor:
        return self.loss**other

    def __radd__(self, other: Any) -> torch.Tensor:
        return other + self.loss

    def __rsub__(self, other: Any) -> torch.Tensor:
        return other - self.loss

    def __rmul__(self, other: Any) -> torch.Tensor:  # type: ignore[override]
        return other * self.loss

    def __rtruediv__(self, other: Any) -> torch.Tensor:
        return other / self.loss

    def __rpow__(self, other: Any) -> torch.Tensor:
        return other**self.loss

    def __lt__(self, other: Any) -> torch.Tensor:  # type: ignore[override]
        return self.loss < other

    def __le__(self, other: Any) -> torch.Tensor:  # type: ignore[override]
        return self.loss <= other

    def __gt__(self, other: Any) -> torch.Tensor:  # type: ignore[override]
        return self.loss > other

    def __ge__(self, other: Any) -> torch.Tensor:  # type: ignore[override]
        return self.loss >= other

    def __neg__(self) -> torch.Tensor:
        return -self.loss

    def __float__(self) -> float:
        _expect_scalar(self.loss)
        return self.loss.item()

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else repr(self)

    def __repr__(self) -> str:
        loss, count = (_number_or_shape(x) for x in (self.loss, self.count))
        terms, metrics = (", ".join(names) for names in (self.terms, self.metrics))
        stats = None if self.stats is None else list(self.stats.lse.shape)
        return f"HeadLossOutput(loss={loss}, count={count}, terms=[{terms}], metrics=[{metrics}], stats={stats})"


# for errors about a tensor in its place; a NamedTuple has fields alone
setattr(HeadLossOutput, "of_tensor", ": pass the output itself, not its .loss")  # noqa: B010


def _expect_scalar(loss: torch.Tensor):
    """Raise RuntimeError for a loss per token."""
    if loss.numel() != 1:
        raise RuntimeError(
            f"the loss must be a scalar, got a loss per token, {list(loss.shape)}, of "
            "reduction='none': reduce it first, (out.loss * mask).sum()"
        )


def _number_or_shape(x: torch.Tensor) -> str:
    return f"{x.item():.6g}" if x.dim() == 0 and not x.is_meta else str(list(x.shape))


Outputs: TypeAlias = Annotated[Sequence[HeadLossOutput], TupleOf(Instance(HeadLossOutput))]


class Observed:
    """Record of the calls of a `HeadLoss`, which a host's adapter keeps.

    Attributes:
        observe: function that is called with the `last` of each call, or None.
        last: `HeadLossOutput` of the last call, without graph and statistics, so that keeping it
            keeps no activations; None before the first.
        calls: number of calls.
    """

    observe: Callable[[HeadLossOutput], None] | None = None
    last: HeadLossOutput | None = None
    calls = 0

    def observed(self, out: HeadLossOutput) -> HeadLossOutput:
        """Return the output of a call, which is counted, kept and shown."""
        self.last, self.calls = out._replace(loss=out.loss.detach(), stats=None), self.calls + 1
        if self.observe is not None:
            self.observe(self.last)
        return out


@checked
def mean_metrics(outputs: HeadLossOutput | Outputs, group: Group = None) -> dict[str, torch.Tensor]:
    """Return the means of all terms and metrics over the valid tokens of one or several outputs, as
    a log shows them.

    Args:
        outputs: the output of a call, or those of all micro-batches of a step, with the same terms
            and metrics, and the same reduction if one is by sequence; at least one on each rank of
            the group, whose others wait for it: a rank without tokens makes a call of empty
            tensors.
        group: data- and context-parallel ranks, which hold other tokens; one small all-gather.
            None: this rank alone.

    Returns:
        float64 scalars by name, equal on all ranks and detached: ``out.loss`` has the gradient.
        "loss" is the sum of the weighted terms, divided by the outputs' count and not by a
        ``denominator`` that was given to the calls. A term
        without its weight is "loss/" and its name, divided by the count or, with token weights of
        its own, by their sum; with its weight (a number 1 excepted), "weighted/" and its name. A
        metric "x" has its own name. It is divided by the metric "count/x" if there is one. Else it
        is divided by "num_tokens" if that is among the metrics, as with sequences, and otherwise by
        the count; "num_tokens" itself stays a sum. Names that begin with "max_" and "min_" are
        extrema, "perplexity" is exp of the mean of -log p. A mean of no tokens is NaN.

    Raises:
        TypeError, ValueError: no outputs, outputs of other names or of another reduction by
            sequence, here or on another rank (see `reduce_metrics`), or a group of which some
            ranks share a vocabulary (WORLD, say), which is noticed as long as their `VocabShard`
            exists.

    Examples:
        >>> out = HeadLoss(metrics=("accuracy", "entropy"))(torch.zeros(2, 4), torch.tensor([0, 3]))
        >>> {name: round(float(value), 4) for name, value in mean_metrics(out).items()}
        {'loss': 1.3863, 'loss/cross_entropy': 1.3863, 'accuracy': 0.5, 'entropy': 1.3863}
    """
    outputs = [outputs] if isinstance(outputs, HeadLossOutput) else outputs
    sums = reduce_metrics(combine_metrics(_checked_sums(outputs)), group)
    count = sums.pop(_name_of_count(outputs[0]))
    tokens = sums.get("num_tokens", count)

    def mean(name: str) -> torch.Tensor:
        if name == "num_tokens" or name.startswith(("max_", "min_")):
            return sums[name]
        kind, _, term = name.partition("/")
        if kind in ("loss", "weighted"):
            return sums[name] / sums.get(f"count/loss/{term}", count)
        found = sums[name] / sums.get(f"count/{name}", tokens)
        return (-found).exp() if name == "perplexity" else found

    divisors = {f"count/{name}" for name in sums}
    means = {name: mean(name) for name in sums if name not in divisors}
    weighted = [f"weighted/{name}" for name in outputs[0].terms]
    loss = torch.stack([means[name] for name in weighted]).sum()
    same = [f"weighted/{name}" for name in outputs[0].terms if _has_weight_1(outputs, name)]
    found = {"loss": loss} | {name: x for name, x in means.items() if name not in same}
    # a class of ours would break a graph
    return found if torch.compiler.is_compiling() else Means(found)


def _checked_sums(outputs: Outputs) -> list[dict[str, torch.Tensor]]:
    """Return the sums of each output by name, and its count. ValueError unless all have the same."""
    if not outputs:
        raise ValueError(
            "outputs must be at least one HeadLossOutput, got an empty list: a rank without batches "
            "passes that of a call with no tokens, head_loss(torch.zeros(0, V/P, device=..), "
            "torch.zeros(0, dtype=torch.int64, device=..)), whose inputs per token are empty, too"
        )
    parts = [_sums_by_name(out) for out in outputs]
    names = [list(part) for part in parts]
    if any(other != names[0] for other in names):
        raise ValueError(
            f"outputs must have the same terms and metrics in the same order, got {names}"
        )
    counts = [_name_of_count(out) for out in outputs]
    if any(other != counts[0] for other in counts):
        reductions = [out.reduction for out in outputs]
        raise ValueError(
            "outputs must have one reduction where one of them is by sequence, whose sums are "
            f"others than those over tokens, got {reductions}: write mean_metrics for each"
        )
    return [{**part, counts[0]: out.count} for part, out in zip(parts, outputs)]


def _name_of_count(out: HeadLossOutput) -> str:
    """Return the name of the count among the sums, which ranks compare as they do all names."""
    unit = out.reduction if out.reduction in SEQUENCE_REDUCTIONS else "tokens"
    return f"count of {unit}"


def _has_weight_1(outputs: Outputs, name: str) -> bool:
    """Whether a term's weighted mean is its mean."""
    weights = [out.weights[name] for out in outputs]
    return all(not torch.is_tensor(x) and x == 1 for x in weights)


def _sums_by_name(out: HeadLossOutput) -> dict[str, torch.Tensor]:
    """Sums: terms in "loss/" and "weighted/", their divisors in "count/loss/", and metrics."""
    terms = {f"loss/{name}": x for name, x in out.terms.items()}
    terms |= {f"weighted/{name}": x * out.weights[name] for name, x in out.terms.items()}
    return terms | {f"count/loss/{name}": x for name, x in out.term_counts.items()} | out.metrics


def compared_output(
    shard: VocabShard | MaybeNone, make: Callable[[], HeadLossOutput]
) -> HeadLossOutput:
    """Make an output, whose terms and metrics the ranks of a shard compare, and their errors."""
    with EqualResults(shard) as results:
        out = make()
        sums = {f"term {name!r}": x for name, x in out.terms.items()}
        sums |= {f"metric {name!r}": x for name, x in out.metrics.items()}
        results.record(out.stats.lse.numel(), sums)
    return out


def make_output(
    call: Call,
    stats: VocabStatistics,
    evaluate: Callable,
    reduction: FusedReduction | None,
    loss: torch.Tensor | MaybeNone = None,
    sums: torch.Tensor | list[torch.Tensor] | MaybeNone = None,
) -> HeadLossOutput:
    """Evaluate and reduce what is not known yet, and name the results.

    evaluate: like `evaluation.evaluate`. loss, sums: of a reduction that ran with the statistics,
    or None.
    """
    definition, has_sequences = call.definition, call.sequences is not None
    values: list[torch.Tensor | MaybeNone] = [None] * len(call.functions)
    other_metrics: dict[str, torch.Tensor] = {}
    sequence_metrics: dict[str, torch.Tensor] = {}
    if definition.plan.evaluated[int(has_sequences)]:
        functions = (
            call.functions if loss is None else [],
            definition.plan.apart[int(has_sequences)],
        )
        values, other_metrics, sequence_metrics = evaluate(
            *functions, stats, call.inputs, call.token_weight
        )
    is_checked = definition.options is not None and definition.options.check
    if is_checked and not torch.compiler.is_compiling():
        expect_known_terms(call.functions, values, stats, call.token_weight)
    if loss is None:
        loss, sums = reduce_tokens(call, stats, values, reduction)
    *sums, total = sums.unbind(0) if isinstance(sums, torch.Tensor) else sums
    terms = dict(zip(definition.plan.names, sums))
    by_label = definition.plan.label_weight is not None
    named = () if has_sequences else definition.metrics
    metrics = dict(zip(named, sums[len(terms) :]))
    own_counts = [total] if by_label else sums[len(terms) + len(named) :]
    by_sequence = call.count is not None  # whose weights are the reduction's alone
    term_counts = {} if by_sequence else dict(zip(definition.plan.weighted, own_counts))
    if other_metrics:
        expect_distinct_names(metrics, other_metrics)
        metrics |= other_metrics
    if by_label:
        total = valid_weight(stats.valid, call.token_weight).float()
    count = total if call.count is None else call.count
    weights = definition.plan.weights
    for name, weight in weights.items():
        if isinstance(weight, torch.Tensor):  # which may change after this call
            weights = weights | {name: weight.detach().clone()}
    if not torch.compiler.is_compiling():  # classes of ours would break a graph
        terms = TermSums(terms)
        metrics = MetricSums(metrics)
        sequence_metrics = SequenceSums(sequence_metrics)
    return HeadLossOutput(
        loss,
        count,
        terms,
        metrics,
        stats,
        sequence_metrics,
        term_counts,
        weights,
        definition.reduction,
    )
