"""Reduction over tokens: from per-token values to the loss and its sums, by one kernel or in plain
torch."""

import torch

from ..arguments.teachers import TopKTeacher
from ..engine.autograd import TokenSums
from ..engine.one_read.rows import NotArithmetic, RowFunction, row_function
from ..engine.operators import can_skip_dispatch
from ..engine.reductions import FusedReduction, StatisticValue, SumsPlan
from ..statistics import MaybeNone, VocabStatistics
from .checks import Call
from .token_sums import expect_per_token, masked, nonzero


class CallLoss:
    """The loss of a call in the forms in which a kernel reduces it, each worked out when it is
    first asked for."""

    def __init__(self, call: Call, example: torch.Tensor, backend: str, vocab_size: int):
        """example: logits or statistics of the call, for their device. backend: of the
        statistics."""
        self.call, self.vocab_size = call, vocab_size
        self.denominator = call.denominator
        found = fused_reduction(call, example, backend)
        self.obstacle = found if isinstance(found, str) else None
        self.fused = None if isinstance(found, str) else found

    @property
    def of_statistics(self) -> FusedReduction | None:
        """The reduction, if it is of statistics alone, so that it takes no PyTorch between it and
        them."""
        alone = (
            self.fused is not None
            and "" not in self.fused.plan.statistics
            and self.call.sequences is None
        )
        return self.fused if alone else None

    def needs_of_statistics(self) -> str:
        """Return what the loss lacks where `of_statistics` is None, and what it has instead."""
        if self.obstacle:
            return self.obstacle
        if self.call.sequences is not None:
            return "a call without the input 'sequences'"
        others = [
            f.owner for f in self.call.functions if not isinstance(f.function, StatisticValue)
        ]
        return f"terms and metrics that are statistics, got {', '.join(others)}"

    @property
    def in_one_read(self) -> FusedReduction | None:
        """The reduction in the launch that reads the logits: of statistics, where it names each
        once, else of a `RowFunction`, if there is one."""
        of_statistics = self.of_statistics
        if self.fused is None or (
            of_statistics is not None and of_statistics.plan.gradients is not None
        ):
            return of_statistics
        if self._obstacle_to_inputs():
            return of_statistics
        rows = self._rows()
        if isinstance(rows, str):
            return of_statistics
        values = [StatisticValue("")] * len(self.call.definition.terms)
        metrics = [f.function for f in self.call.functions[len(values) :]]
        plan = SumsPlan.from_functions([*values, *metrics], self.fused.plan.coefficients)
        given = tuple([self._per_token(name) for name in rows.inputs])
        return self.fused._replace(plan=plan, rows=rows, given=given)

    def needs_in_one_read(self) -> str:
        """Return what the loss lacks where `in_one_read` is None, and what it has instead."""
        if self.obstacle:
            return self.obstacle
        return self._obstacle_to_inputs() or str(self._rows())

    def _obstacle_to_inputs(self) -> str | None:
        """Return what the inputs lack for a row function, which reads numbers alone."""
        inputs = self.call.inputs
        trained = [k for k, x in inputs.items() if isinstance(x, torch.Tensor) and x.requires_grad]
        if trained:
            return f"inputs without a gradient, got {trained}"
        teacher = inputs.get("teacher")
        if not isinstance(teacher, TopKTeacher) or "tail_log_mass" not in self.call.definition.want:
            return None
        if teacher.renormalize or teacher.tail_log_prob is not None:
            return "a teacher whose tail is what its entries leave, no tail_log_prob"
        return None

    def _rows(self) -> RowFunction | str:
        """The terms' function of a token, or what they lack for one."""
        definition = self.call.definition
        known = definition.plan.rows
        if self.vocab_size not in known:
            try:
                known[self.vocab_size] = row_function(
                    definition.terms, self.vocab_size, definition.want
                )
            except NotArithmetic as error:
                known[self.vocab_size] = str(error)
        return known[self.vocab_size]

    def _per_token(self, name: str) -> torch.Tensor:
        """An input [..] of a row function; that of a teacher is the student's temperature."""
        x, labels = self.call.inputs[name], self.call.labels
        if isinstance(x, torch.Tensor):
            return x
        temperature = x.student_temperature_or_default
        if isinstance(temperature, torch.Tensor):
            return temperature.detach().expand(labels.shape)
        return torch.full(labels.shape, temperature, dtype=torch.float32, device=labels.device)


def fused_reduction(call: Call, example: torch.Tensor, backend: str) -> FusedReduction | str:
    """Arguments of the kernel that reduces the values of a loss, or what the loss lacks for it and
    has instead, after "needs". Then `reduce_in_torch`, which is the definition, reduces it.

    example: logits or statistics of the call, for their device. backend: of the statistics.
    """
    definition, denominator = call.definition, call.denominator
    plan = definition.plan.sums[int(call.sequences is not None)]
    if backend != "triton":
        return f"the triton backend, got {backend!r}"
    if not can_skip_dispatch(example):
        return "plain tensors, outside of torch.compile"
    if plan is None:
        return _obstacle_to_sums(definition)
    for name, x in (("token_weight", call.loss_weight), ("denominator", denominator)):
        if isinstance(x, torch.Tensor) and x.requires_grad:
            return f"a {name} without a gradient"
        if isinstance(x, torch.Tensor) and x.device != example.device:
            return f"a {name} on {example.device}, got one on {x.device}"
    if definition.reduction == "sum":
        denominator = 1.0
    elif isinstance(denominator, torch.Tensor):
        denominator = denominator.double()
    return FusedReduction(plan, call.loss_weight, denominator)


def _obstacle_to_sums(definition) -> str:
    """Return what a definition without `CallPlan.sums` lacks for a kernel that sums its loss."""
    if definition.reduction == "none":
        return "a reduction over tokens, got reduction='none'"
    if definition.plan.weighted:
        return f"terms without a class_weight or token_weight, got {definition.plan.weighted}"
    trained = [t.name for t in definition.terms if isinstance(t.weight, torch.Tensor)]
    return f"weights of terms that are numbers, got tensors for {trained}"


def reduce_tokens(
    call: Call,
    stats: VocabStatistics,
    values: list[torch.Tensor | MaybeNone],
    reduction: FusedReduction | None,
):
    """Reduce the values of the call's functions over tokens, by the kernel if there is a reduction
    and all are fp32.

    values: [..] each, None for a `StatisticValue`. Returns the loss, and the values' sums followed
    by the count.
    """
    if reduction is not None:
        raw = [
            getattr(stats, function.function.statistic)
            if isinstance(function.function, StatisticValue)
            else value
            for function, value in zip(call.functions, values)
        ]
        if {value.dtype for value in raw} <= {torch.float32, torch.bool}:
            if reduction.weight is not None:
                reduction = reduction._replace(weight=reduction.weight.float().contiguous())
            return TokenSums.apply(
                reduction, stats.valid.contiguous(), *(value.contiguous() for value in raw)
            )
    return reduce_in_torch(call, stats, values)


def reduce_in_torch(call: Call, stats: VocabStatistics, values: list[torch.Tensor | MaybeNone]):
    """Reduce as `reduce_tokens` does, in plain torch: the definition of every reduction."""
    definition, valid, weight = call.definition, stats.valid, call.loss_weight
    values = [
        masked(
            function.function(stats) if isinstance(function.function, StatisticValue) else value,
            valid,
            weight,
        )
        for function, value in zip(call.functions, values)
    ]
    sums = [value.sum(dtype=torch.float64) for value in values]
    count = valid_weight(valid, weight)
    parts, dtype = values if definition.reduction == "none" else sums, stats.lse.dtype
    if definition.reduction not in ("none", "sum"):
        parts = [
            total / _denominator(call, term, stats, count)
            for term, total in zip(definition.terms, sums)
        ]
    loss: torch.Tensor | MaybeNone = None
    for term, part in zip(definition.terms, parts):
        # reading a tensor would wait for the device
        if torch.is_tensor(term.weight) or term.weight != 1:
            part = term.weight * part
        loss = part if loss is None else loss + part
    return loss.to(dtype), [*[x.detach().to(dtype) for x in sums], count.float()]


def valid_weight(valid: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Sum of the valid tokens' weights, or their number, in float64: in fp32 it may be infinite
    where a mean is not."""
    weights = valid if weight is None else masked(weight, valid)
    return weights.sum(dtype=torch.float64)


def _denominator(call: Call, term, stats: VocabStatistics, count: torch.Tensor):
    """Number that a term's sum is divided by: the caller's, the sum of the term's own token
    weights, or the count."""
    if call.denominator is not None:
        return nonzero(call.denominator)
    if term.token_weight is not None and call.definition.plan.label_weight is None:
        own = term.token_weight(stats, **{name: call.inputs[name] for name in term.inputs})
        expect_per_token(f"the token_weight of term {term.name!r}", own, stats.lse)
        return nonzero(masked(own, stats.valid, call.loss_weight).sum(dtype=torch.float64))
    # the sum over 0 tokens is 0 anyway
    return count.clamp(min=1) if call.loss_weight is None else nonzero(count)
