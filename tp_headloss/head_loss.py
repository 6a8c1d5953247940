"""HeadLoss: weighted terms, one pass over the logits, one denominator."""

from __future__ import annotations

import math
import numbers
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from .agreement import Agreement
from .api import Options, Teacher, Transform, run_statistics
from .autograd import TokenSums, runs_here
from .backends import resolve_backend
from .dtensor import local, local_head, local_logits
from .linear import FEWEST, Head, Linear, Picked, hidden_fact, of_teacher
from .reduce import REDUCTIONS, Monomial, Reduction, SumsPlan, expect_per_token, masked, metric_sums, nonzero
from .sequences import SEQUENCE_REDUCTIONS, Sequences
from .shard import VocabShard
from .stats import OF_TEACHER, OF_TOPK, OPTIONAL, VocabStatistics
from .terms import METRICS, CrossEntropy, Metric, Term
from .validation import expect_ids, expect_instance, expect_int, expect_tensor, fits_fp32

# What a `Monomial` may be of -> the optional statistic that brings it.
MONOMIALS = {
    "lse": "", "log_prob": "", "target_logit": "", "entropy": "entropy", "total": "total", "mass": "total",
    "hits": "argmax", **{name: name for name in (*OF_TEACHER, *OF_TOPK)},
}  # fmt: skip

# The named metrics as a `Metric` has them.
NAMED_METRICS = {name: lambda stats, name=name, value=METRICS[name][0]: {name: value(stats)} for name in METRICS}


class HeadLossOutput(NamedTuple):
    """What one call returns; everything is replicated over the group and nothing was synchronised with the host."""

    loss: torch.Tensor  # scalar fp32, or [..] for reduction="none"
    # scalar, what a mean divides by: valid tokens (the sum of their weights if token weights were given), or sequences;
    # over data- and context-parallel ranks it adds up
    count: torch.Tensor
    # sums over valid tokens, times the weights of the reduction if there are any, detached; over count: a mean
    terms: dict[str, torch.Tensor]  # per term, without the term's weight
    # per metric: sums over valid tokens, times the token weights; extrema of them for "max_" and "min_" names; with
    # sequences also "num_tokens", what to divide these sums by
    metrics: dict[str, torch.Tensor]
    stats: VocabStatistics
    # with sequences and any metrics: the same metrics as sums over sequences of their means, and "num_sequences"
    sequence_metrics: dict[str, torch.Tensor]


class _Part(NamedTuple):
    """A function of the statistics that `_evaluate` calls, what messages call it, and the names of its inputs."""

    owner: str
    function: Callable
    inputs: tuple[str, ...] = ()


class _Call(NamedTuple):
    """The checked arguments of one call, and what follows from them."""

    labels: torch.Tensor  # ignored outside of sequences
    token_weight: torch.Tensor | None
    weight: torch.Tensor | None  # of the reduction, the token weights in it
    denominator: torch.Tensor | float | None
    count: torch.Tensor | None
    inputs: dict[str, Any]
    sequences: Sequences | None
    functions: list[_Part]


class HeadLoss(nn.Module):
    """Weighted terms over one set of statistics: one pass over the logits, one collective, one backward kernel.

        head_loss = HeadLoss([CrossEntropy(label_smoothing=0.1), ZLoss(1e-4)], metrics=("accuracy", "entropy"))
        out = head_loss(logits, labels, shard=shard, denominator=tokens_in_the_global_batch)
        out.loss.backward()

    metrics: names of `terms.METRICS`, and `Metric`s such as ``PolicyMetrics()``.

    reduction: "mean" divides every term by the number of valid tokens (by the sum of the token weights, and of the
    labels' class weights, where there are any), "sum" by nothing, "none" returns the per-token loss. Those of
    `Sequences.aggregate` ("seq-mean-token-mean", ...) weigh tokens by their sequence, with ``inputs["sequences"]``.
    The caller's ``denominator`` wins. Zero valid tokens, or a zero denominator, give 0 and zero gradient.

    compile: evaluate the terms' and metrics' own PyTorch through torch.compile, as one kernel each way instead of one
    per operation. What is a `reduce.Monomial` needs none. torch recompiles for new kinds of inputs, up to its limit
    (torch._dynamo.config.recompile_limit) for each HeadLoss, and then goes on in eager.
    """

    def __init__(
        self,
        terms: Sequence[Term] | None = None,
        *,
        metrics: Sequence[str | Metric] = (),
        reduction: str = "mean",
        ignore_index: int = -100,
        options: Options | None = None,
        compile: bool = False,
    ):
        super().__init__()
        expect_instance("options", options, Options)
        self.terms = _expect_all("terms", [CrossEntropy()] if terms is None else terms, Term)
        metrics = _expect_all("metrics", metrics, (str, Metric))
        names = [term.name for term in self.terms]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"terms must be at least one, with distinct names, got {names}")
        ignore_index = expect_int("ignore_index", ignore_index)
        self.metrics = tuple(name for name in metrics if isinstance(name, str))
        self.token_metrics = tuple(metric for metric in metrics if not isinstance(metric, str))
        if unknown := set(self.metrics) - set(METRICS):
            raise ValueError(f"metrics must be of {sorted(METRICS)}, got {sorted(unknown)}")
        if reduction not in REDUCTIONS + SEQUENCE_REDUCTIONS:
            raise ValueError(f"reduction must be one of {REDUCTIONS + SEQUENCE_REDUCTIONS}, got {reduction!r}")
        weighted = [t.class_weight for t in self.terms if t.class_weight is not None and "total" in t.want]
        if weighted and sum("total" in term.want for term in self.terms) > 1:
            raise ValueError("class weights with smoothing weight the statistic 'total': only one term can use it")
        self.total_weight = weighted[0] if weighted else None
        self.reduction, self.ignore_index, self.options = reduction, ignore_index, options
        named = set(SumsPlan.of([part.function for part in self._functions()], []).statistics) - {""}
        if unknown := named - set(MONOMIALS):
            raise ValueError(f"a Monomial must be of one of {sorted(MONOMIALS)}, got {sorted(unknown)}")
        wanted = {name for part in (*self.terms, *self.token_metrics) for name in part.want}
        wanted |= {METRICS[name][1] for name in self.metrics} | {MONOMIALS[name] for name in named}
        self.want = tuple(sorted(wanted - {""}))
        self.compile_terms, self._evaluate = compile, None

    def forward(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        *,
        shard: VocabShard | None = None,
        token_weight: torch.Tensor | None = None,
        denominator: torch.Tensor | float | None = None,
        transform: Transform | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> HeadLossOutput:
        """logits [.., width] sharded on V, labels [..] replicated -> `HeadLossOutput`, replicated.

        token_weight: [..], multiplies every term (a loss mask of zeros and ones, say). A token of weight 0 counts as
        ignored, whatever its logits or its loss are, unless the weights require a gradient; with the input "sequences"
        its own loss is left out, and its sequence's sums and ratios still have it, as the sequences' mask says. The
        mean divides by the sum of the weights, so weights of both signs want a denominator of their own.
        denominator: the caller's, a number or a scalar tensor; with gradient accumulation or data parallelism, the
        global count of tokens (or sequences).
        inputs: what terms and metrics take besides the statistics, by name, replicated: tensors of as many dimensions
        as [..] that broadcast to it (of its own shape: per token), scalars, or, with sequences, a value for each of
        them [B]; "sequences" a `Sequences` of the same [..] (tokens outside of its mask are ignored); "teacher" a
        `Teacher` or a `TopKTeacher`.
        One collective forward; backward: no communication. Errors as in `vocab_statistics`.
        """
        with Agreement(self.options, shard) as agreement:
            logits, shard = local_logits(logits, shard)
            labels, token_weight, transform, inputs = _local(shard, labels, token_weight, transform, inputs)
            agreement.on("HeadLoss", shard, **self._facts(labels, token_weight, denominator, inputs))
            call = self._call(labels, shard, logits.device, token_weight, denominator, inputs)
        reduction = self._reduction(call.functions, logits, call.weight, call.denominator)
        fused = reduction is not None and "" not in reduction.plan.statistics and call.sequences is None
        stats, loss, sums = run_statistics(
            logits,
            call.labels,
            shard,
            self.want,
            transform,
            call.inputs.get("teacher"),
            self._local_total_weight(shard),
            self.ignore_index,
            self.options,
            reduction if fused else None,
        )
        return self._output(call, stats, loss, sums, reduction)

    def linear(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        shard: VocabShard | None = None,
        token_weight: torch.Tensor | None = None,
        denominator: torch.Tensor | float | None = None,
        transform: Transform | None = None,
        inputs: Mapping[str, Any] | None = None,
        linear: Linear | None = None,
    ) -> HeadLossOutput:
        """The same of logits hidden @ weight^T + bias, which never exist as a whole; see `linear_vocab_statistics` for
        hidden [.., H], weight [width, H], bias [width], and `Linear` for how dH is reduced, and for modes and memory.

        One sweep needs: a reduction other than "none"; terms whose functions are `Term.tokenwise` (monomials and the
        built-in ones but for those that take "sequences" or look at all tokens); a denominator that is known before the
        logits are (for terms with a `Term.token_weight`, class weights say, the caller's); no gradient of weights,
        denominator or inputs; a declared `Linear.upstream` (the loss scale) in float16; and gradients to be wanted at
        all (torch.is_grad_enabled()); not torch.compile. The statistics of its output cannot be differentiated: who
        tries hears so.
        """
        expect_instance("linear", linear, Linear)
        linear = linear or Linear()
        with Agreement(self.options, shard) as agreement:
            hidden, weight, bias, shard = local_head(hidden, weight, bias, shard, linear.hidden_grad)
            labels, token_weight, transform, inputs = _local(shard, labels, token_weight, transform, inputs)
            facts = self._facts(labels, token_weight, denominator, inputs)
            facts |= {"hidden": hidden_fact(hidden, linear), "transform": transform, "linear": linear}
            agreement.on("HeadLoss.linear", shard, weight=weight, bias=bias, **facts)
            call = self._call(labels, shard, hidden.device, token_weight, denominator, inputs)
            if linear.max_valid_tokens is None:
                head = Head.of(
                    hidden, weight, call.labels, bias, shard, self.want, transform, call.inputs.get("teacher"),
                    self._local_total_weight(shard), self.ignore_index, self.options, linear,
                )  # fmt: skip
                one_sweep = self._one_sweep(call, head)
        if linear.max_valid_tokens is not None:
            return self._of_valid_tokens(call, hidden, weight, bias, shard, transform, linear)
        if not one_sweep:
            stats = head.recompute(call.labels, self.options)
            return self._output(call, stats, reduction=self._reduction_of(call, stats))
        if call.denominator is None and self.reduction == "mean":
            valid = call.labels != self.ignore_index
            weights = valid if call.weight is None else masked(call.weight, valid)
            total = weights.sum(dtype=torch.float64)  # in fp32 it may be infinite where the mean is not
            call = call._replace(denominator=total.clamp(min=1) if call.weight is None else total)
        stats, found = head.one_sweep(call.labels, self.options, self._loss_of_block(call, head.rows))
        with torch.no_grad():
            out = self._output(call, stats, reduction=self._reduction_of(call, stats))
        loss, stats = head.attached(out.loss, stats, found)
        return out._replace(loss=loss, stats=stats)

    def _one_sweep(self, call: _Call, head: Head) -> bool:
        """Whether it is to be one sweep; a ValueError if it is to be and cannot."""
        linear, obstacle, one_sweep = head.linear, self._why_not_one_sweep(call, head), False
        if linear.mode == "one_sweep" and obstacle is not None and torch.is_grad_enabled():
            raise ValueError(f"mode='one_sweep' is not possible: {obstacle}; use 'recompute'")
        if linear.mode != "recompute" and obstacle is None:
            tokens = head.one_sweep_tokens()
            one_sweep = linear.mode == "one_sweep" or tokens >= min(FEWEST, call.labels.numel())
        if not one_sweep and linear.upstream is not None and torch.is_grad_enabled():
            raise ValueError(f"upstream is for one sweep, got mode={linear.mode!r}: {obstacle or 'no budget for it'}")
        return one_sweep

    def _facts(self, labels, token_weight, denominator, inputs) -> dict[str, Any]:
        """What must be the same on all ranks of the group, `Agreement.on`, beside the logits."""
        return {
            "labels": labels, "token_weight": token_weight, "denominator": denominator, "inputs": inputs,
            "terms": self.terms, "metrics": self.metrics, "token_metrics": self.token_metrics,
            "reduction": self.reduction, "ignore_index": self.ignore_index, "options": self.options,
        }  # fmt: skip

    def _loss_of_block(self, call: _Call, rows):
        """-> function(statistics of some tokens [n], their slice of the order of `rows`): what they add to the loss."""

        def flat(x, _=None):
            return rows.flatten(x) if isinstance(x, torch.Tensor) and x.dim() else x

        inputs = {name: flat(x) for name, x in call.inputs.items() if name not in ("sequences", "teacher")}
        weight, teacher = flat(call.weight), call.inputs.get("teacher")
        if isinstance(teacher, Teacher):
            teacher = replace(teacher, logits=None)  # terms are functions of statistics
        teacher = teacher and of_teacher(teacher, flat)
        functions = call.functions[: len(self.terms)]
        evaluate = self._evaluate or self._own_evaluate()

        def loss_of(stats, here: slice) -> torch.Tensor:
            def part(x, _=None):
                return x[here] if isinstance(x, torch.Tensor) and x.dim() else x

            of_block = {name: part(x) for name, x in inputs.items()}
            if teacher is not None:
                of_block["teacher"] = of_teacher(teacher, part)
            block = call._replace(inputs=of_block, weight=part(weight), functions=functions, sequences=None)
            values, *_ = evaluate(functions, [], stats, of_block, None)
            return self._sums(block, stats, values, self._reduction_of(block, stats))[0]

        return loss_of

    def _of_valid_tokens(self, call: _Call, hidden, weight, bias, shard, transform, linear) -> HeadLossOutput:
        if call.sequences is not None:
            raise ValueError("max_valid_tokens drops tokens of sequences, got the input 'sequences'")
        picked = Picked(call.labels, self.ignore_index, linear.max_valid_tokens, self.options, shard.vocab_size)
        inputs = {name: picked(x, name) for name, x in call.inputs.items() if name != "teacher"}
        if "teacher" in call.inputs:
            inputs["teacher"] = picked.teacher(call.inputs["teacher"])
        out = self.linear(
            picked(hidden, "hidden states"), weight, picked(call.labels, "labels"), bias=bias, shard=shard,
            token_weight=picked(call.token_weight, "token_weight"),
            denominator=call.denominator, transform=picked.transform(transform), inputs=inputs,
            linear=replace(linear, max_valid_tokens=None),
        )  # fmt: skip
        unknown = torch.where(picked.missing, torch.nan, 1.0)
        loss = picked.spread_one(out.loss, 0.0, torch.nan) if self.reduction == "none" else out.loss * unknown
        terms, metrics = ({name: x * unknown for name, x in sums.items()} for sums in (out.terms, out.metrics))
        stats = picked.spread(out.stats, call.labels)
        return out._replace(loss=loss, count=out.count * unknown, terms=terms, metrics=metrics, stats=stats)

    def _why_not_one_sweep(self, call: _Call, head: Head) -> str | None:
        """From what all ranks know."""
        loose = [t.name for t in self.terms if not t.tokenwise and not isinstance(t.function, Monomial)]
        own = [term.name for term in self.terms if term.token_weight is not None]
        constants = [call.weight, call.denominator, *call.inputs.values(), *(term.weight for term in self.terms)]
        if not torch.is_grad_enabled():
            return "no gradient is wanted"
        if torch.compiler.is_compiling():
            return "torch.compile takes one operator each way"
        if self.reduction == "none":
            return "a loss per token has no scalar upstream gradient"
        if loose:
            return f"the terms {loose} are not declared tokenwise"
        if own and call.denominator is None and self.reduction == "mean":
            return f"the terms {own} have denominators of their own, and the caller gave none"
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in constants):
            return "weights, denominator or inputs require a gradient"
        if head.inputs.logits.dtype == torch.float16 and head.linear.upstream is None:
            return (
                "float16 gradients underflow before they are scaled, unless the upstream is declared (the loss scale)"
            )
        return None

    def _call(self, labels, shard, device, token_weight, denominator, inputs) -> _Call:
        if labels is None:
            raise ValueError("labels are needed, got None: without them, use vocab_statistics")
        expect_ids("labels", labels)
        if token_weight is not None:
            expect_tensor("token_weight", token_weight, labels.shape, device)
        if denominator is not None and self.reduction in ("none", "sum"):
            raise ValueError(f"a denominator goes with a mean, got reduction={self.reduction!r}")
        _expect_denominator(denominator)
        inputs = inputs or {}
        sequences = self._expect_sequences(inputs, labels)
        inputs = self._checked(inputs, labels, sequences)
        weight, count = token_weight, None
        # A weight of 0 is a loss mask, unless it is trained. In a sequence its token keeps its part in the sequence's
        # sums, and only its own loss is left out. Labels are of int64 then, which holds any ignore_index.
        if token_weight is not None and sequences is None and not token_weight.requires_grad:
            labels = torch.where(token_weight == 0, self.ignore_index, labels.long())
        if sequences is not None:
            if shard.group is not None and sequences.group is shard.group:
                raise ValueError(
                    "sequences must be split over a context-parallel group or none, got the group that shares the "
                    "vocabulary, whose ranks hold the same tokens"
                )
            labels = torch.where(sequences.mask, labels.long(), self.ignore_index)
        for of_classes in (term.class_weight for term in self.terms if term.class_weight is not None):
            if of_classes.shape != (shard.vocab_size,) or of_classes.device != device:
                raise ValueError(
                    f"class_weight must have shape [{shard.vocab_size}] on {device}, "
                    f"got {list(of_classes.shape)} on {of_classes.device}"
                )
        if self.reduction in SEQUENCE_REDUCTIONS:
            weight, total = sequences.aggregate(self.reduction)
            weight = weight if token_weight is None else weight * token_weight
            denominator = total if denominator is None else denominator
            count = total / sequences.ranks
        return _Call(labels, token_weight, weight, denominator, count, inputs, sequences, self._functions(sequences))

    def _reduction_of(self, call: _Call, stats) -> Reduction | None:
        return self._reduction(call.functions, stats.lse, call.weight, call.denominator)

    def _output(self, call: _Call, stats, loss=None, sums=None, reduction=None) -> HeadLossOutput:
        """What is not known yet of loss and sums, and the metrics."""
        values, metrics, by_sequence = None, {}, {}
        if loss is None or self.token_metrics:
            evaluate = self._evaluate or self._own_evaluate()
            parts = call.functions, self._metrics(call.sequences), stats, call.inputs, call.token_weight
            values, metrics, by_sequence = evaluate(*parts)
        if loss is None:
            loss, sums = self._sums(call, stats, values, reduction)
        *sums, total = sums
        terms = {term.name: part for term, part in zip(self.terms, sums)}
        named = dict(zip(self.metrics, sums[len(terms) :]))
        if clash := set(named) & set(metrics):
            raise ValueError(f"metrics must have distinct names, got {sorted(clash)} twice")
        metrics = named | metrics
        count = total if call.count is None else call.count
        return HeadLossOutput(loss, count, terms, metrics, stats, by_sequence)

    def _sums(self, call: _Call, stats, values, reduction):
        """-> loss and sums."""
        loss = sums = None
        if reduction is not None:
            loss, sums = self._sum(call.functions, values, stats, reduction)
        if loss is None:
            loss, sums = self._reduce(call.functions, values, stats, call.inputs, call.weight, call.denominator)
        return loss, sums

    def _own_evaluate(self):
        """`_evaluate`, or a compiled copy: torch counts recompilations per code object, so each head has its own."""
        self._evaluate = _evaluate
        if self.compile_terms:
            own = types.FunctionType(_evaluate.__code__.replace(), globals(), _evaluate.__name__)
            self._evaluate = torch.compile(own)
        return self._evaluate

    def __getstate__(self):
        return {**self.__dict__, "_evaluate": None}  # what is compiled can be neither copied nor saved

    def _functions(self, sequences=None) -> list[_Part]:
        """What is summed like the terms: these and the named metrics, which with sequences are summed in two ways and
        apart."""
        named = [_Part(f"metric {name!r}", METRICS[name][0]) for name in self.metrics] if sequences is None else []
        return [_Part(f"term {term.name!r}", term.function, term.inputs) for term in self.terms] + named

    def _metrics(self, sequences) -> list[_Part]:
        """What is summed apart: functions that return values by name."""
        named = [_Part(f"metric {n!r}", NAMED_METRICS[n]) for n in self.metrics] if sequences is not None else []
        return named + [_Part("a metric", metric.function, metric.inputs) for metric in self.token_metrics]

    def _expect_sequences(self, inputs, labels) -> Sequences | None:
        """The input "sequences", checked against the labels."""
        if "sequences" not in inputs:
            if self.reduction in SEQUENCE_REDUCTIONS:
                raise ValueError(
                    f"reduction {self.reduction!r} needs the input 'sequences', "
                    f"inputs={{'sequences': Sequences.from_mask(..)}}, got inputs {sorted(inputs)}"
                )
            return None
        sequences = inputs["sequences"]
        if not isinstance(sequences, Sequences):
            raise TypeError(f"the input 'sequences' must be a Sequences, got {type(sequences).__name__}")
        if sequences.mask.shape != labels.shape:
            raise ValueError(f"sequences must be of tokens {list(labels.shape)}, got {list(sequences.mask.shape)}")
        if self.options is not None and self.options.check:
            sequences.check()
        return sequences

    def _checked(self, inputs, labels, sequences) -> dict[str, Any]:
        """The inputs, each tensor expanded to the labels' shape."""
        needed = {name for part in (*self.terms, *self.token_metrics) for name in part.inputs}
        needed |= {"sequences"} if self.reduction in SEQUENCE_REDUCTIONS else set()
        needed |= {"teacher"} if set(self.want) & {*OF_TEACHER, *OF_TOPK} else set()
        missing, unused = needed - set(inputs), set(inputs) - needed - {"sequences"}
        if missing or unused:
            wrong = [f"missing {sorted(missing)}"] * bool(missing)
            wrong += [f"unused {sorted(unused)}, which none of them takes"] * bool(unused)
            raise ValueError(
                f"inputs must be {sorted(needed)} for these terms and metrics, got {sorted(inputs)}: {'; '.join(wrong)}"
            )
        out = {}
        for name, value in inputs.items():  # `vocab_statistics` checks the teacher
            out[name] = value if name in ("sequences", "teacher") else _per_token(name, value, labels, sequences)
        return out

    def _reduction(self, functions, logits, weight, denominator) -> Reduction | None:
        """Masks, weights and sums in one kernel; None where plain torch is needed, see `_reduce`."""
        device = logits.device
        given = [x for x in (weight, denominator) if isinstance(x, torch.Tensor)]
        if (
            self.reduction == "none"
            or not runs_here(logits)
            or resolve_backend(self.options and self.options.backend, device) != "triton"
            or any(term.token_weight is not None or isinstance(term.weight, torch.Tensor) for term in self.terms)
            or any(x.requires_grad or x.device != device for x in given)
        ):
            return None
        if self.reduction == "sum":
            denominator = 1.0
        elif isinstance(denominator, torch.Tensor):
            denominator = denominator.double()
        coefficients = [float(term.weight) for term in self.terms]
        return Reduction(SumsPlan.of([part.function for part in functions], coefficients), weight, denominator)

    def _sum(self, functions, values, stats, reduction):
        """-> loss and sums, or None and None if a term's values are not fp32."""
        values = [
            getattr(stats, part.function.statistic) if isinstance(part.function, Monomial) else value
            for part, value in zip(functions, values)
        ]
        kinds = (torch.float32, torch.bool)
        if not all(value.dtype in kinds for value in values):
            return None, None
        if reduction.weight is not None:
            reduction = reduction._replace(weight=reduction.weight.float().contiguous())
        return TokenSums.apply(reduction, stats.valid.contiguous(), *(value.contiguous() for value in values))

    def _reduce(self, functions, values, stats, inputs, weight, denominator):
        """The definition, in plain torch: -> loss, and the sums of the functions' values with the count at the end."""
        valid = stats.valid
        values = [
            masked(part.function(stats) if isinstance(part.function, Monomial) else value, valid, weight)
            for part, value in zip(functions, values)
        ]
        sums = [value.sum(dtype=torch.float64) for value in values]
        weights = valid if weight is None else masked(weight, valid)
        count = weights.sum(dtype=torch.float64)
        if self.reduction == "none":
            parts = values
        elif self.reduction == "sum":
            parts = sums
        else:
            parts = [
                total / self._denominator(term, stats, inputs, weight, count, denominator)
                for term, total in zip(self.terms, sums)
            ]
        parts = [part if term.weight == 1 else term.weight * part for term, part in zip(self.terms, parts)]
        rounded = [x.to(stats.lse.dtype) for x in (sum(parts[1:], start=parts[0]), *(x.detach() for x in sums))]
        return rounded[0], [*rounded[1:], count.float()]

    def _denominator(self, term, stats, inputs, weight, count, denominator):
        if denominator is not None:
            return nonzero(denominator)
        if term.token_weight is not None:
            own = term.token_weight(stats, **{name: inputs[name] for name in term.inputs})
            expect_per_token(f"the token_weight of term {term.name!r}", own, stats.lse.shape)
            return nonzero(masked(own, stats.valid, weight).sum(dtype=torch.float64))
        return count.clamp(min=1) if weight is None else nonzero(count)  # of 0 tokens the sum is 0 anyway

    def _local_total_weight(self, shard):
        if self.total_weight is None:
            return None
        local = self.total_weight[shard.start : shard.stop]
        return torch.nn.functional.pad(local, (0, shard.width - local.shape[0]))


def _local(shard, labels, token_weight, transform, inputs):
    """What may be DTensors, of this rank."""
    inputs = {name: local(x, shard) for name, x in (inputs or {}).items()}
    return local(labels, shard), local(token_weight, shard), local(transform, shard), inputs


def _expect_all(name, given, kinds) -> tuple:
    """The given parts of a HeadLoss; a TypeError that says how to mend what they are not."""
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{name} must be a list, {name}=[..], got {_called(given)}")
    given = tuple(given)
    for part in given:
        if not isinstance(part, kinds):
            hint = f": call it, {part.__name__}(..)" if callable(part) and hasattr(part, "__name__") else ""
            raise TypeError(f"{name} must be {_names(kinds)}, got {_called(part)}{hint}")
    return given


def _called(part) -> str:
    return getattr(part, "__name__", None) or (repr(part) if isinstance(part, str) else type(part).__name__)


def _names(kinds) -> str:
    return "Terms" if kinds is Term else "names or Metrics"


def _expect_denominator(denominator):
    if denominator is None:
        return
    if isinstance(denominator, torch.Tensor):
        if denominator.dim():
            raise ValueError(f"denominator must be a number or a scalar tensor, got shape {list(denominator.shape)}")
        expect_tensor("denominator", denominator)
    elif not isinstance(denominator, numbers.Real):
        raise TypeError(f"denominator must be a number or a scalar tensor, got {denominator!r}")
    elif denominator and math.isfinite(denominator) and not fits_fp32(denominator):
        raise ValueError(f"denominator must be a number that fp32 holds, got {denominator}")


def _per_token(name, value, labels, sequences) -> torch.Tensor:
    """An input as [..]: broadcast, or spread from a value per sequence [B]."""
    expect_tensor(f"input {name!r}", value, device=labels.device)
    if sequences is not None and value.shape == (len(sequences),) != labels.shape:
        return sequences.spread(value)
    if value.dim() not in (0, labels.dim()):
        raise ValueError(
            f"input {name!r} must have as many dimensions as the labels {list(labels.shape)}, or one value for each of "
            f"the input 'sequences', got {list(value.shape)}: a value per row is [B, 1]"
        )
    try:
        return value.expand(labels.shape)
    except RuntimeError:
        shapes = f"{list(labels.shape)}, got {list(value.shape)}"
        raise ValueError(f"input {name!r} must broadcast to the labels' shape {shapes}") from None


def _call_part(part: _Part, stats, inputs):
    """A function's values. A statistic that it uses and nobody wanted is a ValueError that says so."""
    try:
        return part.function(stats, **{name: inputs[name] for name in part.inputs})
    except (TypeError, AttributeError) as error:
        code = getattr(part.function, "__code__", None)
        absent = [name for name in OPTIONAL if code and name in code.co_names and getattr(stats, name) is None]
        if not absent:
            raise
        raise ValueError(
            f"{part.owner} uses the statistics {absent}, which nothing wants: give it want={tuple(absent)}"
        ) from error


def _evaluate(functions, metrics, stats, inputs, weight):
    """Per-token values of the functions (None for a `Monomial`), the metrics' sums, and those of sequence means."""
    values = [None if isinstance(part.function, Monomial) else _call_part(part, stats, inputs) for part in functions]
    for part, value in zip(functions, values):
        if not isinstance(part.function, Monomial):
            expect_per_token(part.owner, value, stats.lse.shape)
    with torch.no_grad():
        named, by_sequence = {}, {}
        for part in metrics:
            new = _call_part(part, stats, inputs)
            if not isinstance(new, dict):
                raise TypeError(f"{part.owner} must return values by name, a dict, got {type(new).__name__}")
            for name, value in new.items():
                expect_per_token(f"metric {name!r}", value, stats.lse.shape)
            if clash := set(new) & set(named):
                raise ValueError(f"metrics must have distinct names, got {sorted(clash)} twice")
            named.update(new)
        if named and (sequences := inputs.get("sequences")) is not None:
            named.setdefault("num_tokens", torch.ones_like(stats.lse))
            share = sequences.token_share if weight is None else sequences.token_share * weight
            by_sequence = metric_sums(named, stats.valid, share)
            by_sequence["num_sequences"] = sequences.count / sequences.ranks
        return values, metric_sums(named, stats.valid, weight), by_sequence


class CausalLMLoss(nn.Module):
    """A HeadLoss for logits and *unshifted* labels [B, S]: position t is scored against label t + 1, the last ignored.

    The labels are shifted, not the logits, so the logits are neither sliced nor copied. Packed documents: put
    ``ignore_index`` on each document's first label.
    """

    def __init__(self, head_loss: HeadLoss | None = None):
        super().__init__()
        self.head_loss = HeadLoss() if head_loss is None else head_loss

    def forward(self, logits, labels, *, token_weight: torch.Tensor | None = None, **kwargs) -> HeadLossOutput:
        """logits [.., S, width] sharded on V; labels and token_weight [.., S], both unshifted: a weight belongs to its
        label. Other keywords as in `HeadLoss.forward`; a per-token temperature belongs to its logits, and ``inputs``
        are not shifted either: position t of them is the position of logits t and label t + 1."""
        last = torch.full_like(labels[..., :1], self.head_loss.ignore_index)
        if token_weight is not None:
            token_weight = torch.cat([token_weight[..., 1:], torch.zeros_like(token_weight[..., :1])], -1)
        return self.head_loss(logits, torch.cat([labels[..., 1:], last], -1), token_weight=token_weight, **kwargs)
