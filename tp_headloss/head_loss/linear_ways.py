"""The ways of `HeadLoss.linear`: hidden states and a weight in the place of logits.

Logits of all tokens would be the largest tensor of a training step, so that no way stores them.
Recompute (epilogues, blocks) keeps a few numbers for each token and makes the logits again in the
backward: four matrix products, and any loss. One sweep has each block's gradient before it makes
the next block, three products; for that the loss must be a sum over tokens whose upstream gradient
is one number, which is multiplied in afterwards.

All ranks of a group must take the same way, since each exchanges something else. So ways are chosen
from facts that ranks share, and `linear_way_of` is the only place that chooses. What can only be
found out while it runs, a term that is not what it said, ends a sweep on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..arguments.linear import MIN_SWEEP_TOKENS, Linear
from ..arguments.options import DEFAULTS
from ..call.statistics import assembled
from ..engine.reductions import StatisticValue
from ..engine.request import Request
from ..engine.ways import Explanation
from ..linear_head import epilogue, fp8
from ..linear_head import one_sweep as sweep
from ..linear_head.fp8 import Fp8Products
from ..linear_head.request import LinearRequest, free_share, log_mode
from ..linear_head.sweeps import Products, Sweep
from ..linear_head.teacher import map_teacher_tensors, without_logits
from ..linear_head.valid_tokens import ValidTokens
from ..statistics import UNIFORM, VocabStatistics
from .checks import Call, trained_constants
from .evaluation import note_block
from .output import HeadLossOutput, make_output
from .reduction import CallLoss, reduce_tokens, valid_weight
from .value_gradients import value_gradients


class LinearWay:
    """A way of a linear head's loss; as `engine.ways.Way` for logits. `linear_way_of` chooses
    it."""

    name: str

    @staticmethod
    def obstacle(call: Call, head: LinearRequest) -> str | None:
        """Return the reason why a call cannot take this way, or None. Uses only facts that are
        equal on all ranks."""
        return None

    @classmethod
    def of_kind(cls, call: Call, head: LinearRequest) -> LinearWay:
        """Return the way of calls of this kind, to which there is no obstacle."""
        return cls()

    def output(self, call: Call, head: LinearRequest, evaluate: Callable) -> HeadLossOutput:
        """Compute the results of a call."""
        check = (call.definition.options or DEFAULTS).check
        stats = assembled(
            head.recompute_outputs(),
            head.request,
            call.labels,
            check,
            head.operands if check else None,
        )
        facts = head.request.facts
        loss_of_call = CallLoss(call, stats.lse, facts.backend, facts.vocab_size)
        return make_output(call, stats, evaluate, loss_of_call.fused)


class Epilogues(LinearWay):
    """Recompute: the backward makes the logits again, four GEMMs, and the logits are never
    stored.

    Statistics remain differentiable. Both passes are epilogues of the GEMMs that make the logits.
    """

    name = "epilogues"

    @staticmethod
    def obstacle(call, head):
        if head.facts.epilogue:
            return None
        return epilogue.obstacle(
            head.hidden, head.weight, head.facts.dtype, head.request, head.linear
        )


class Blocks(LinearWay):
    """Recompute in blocks of logits, for whatever has no epilogue."""

    name = "blocks"


class OneSweep(LinearWay):
    """The forward computes the gradients of its loss, block by block, so that the logits are made
    once: three GEMMs."""

    name = "one sweep"
    products: type = Products

    def __init__(self, tokens: int):
        """tokens: of a block."""
        self.tokens = tokens

    @staticmethod
    def obstacle(call, head):
        if not torch.is_grad_enabled():
            return "there is no gradient in torch.no_grad"
        if head.linear.mode == "recompute":
            return "mode='recompute' was asked for"
        if reason := _obstacle_to_one_sweep(call, head):
            return reason
        least = min(MIN_SWEEP_TOKENS, head.request.tensors.labels.numel())
        if head.linear.mode == "auto" and head.one_sweep_tokens() < least:
            return f"the budget has no room for blocks of {least} tokens"
        return None

    @classmethod
    def of_kind(cls, call, head):
        return cls(max(head.one_sweep_tokens(), 1))

    def output(self, call, head, evaluate):
        call = _with_denominator(call)
        facts, options = head.request.facts, call.definition.options or DEFAULTS
        loss_of_call = CallLoss(call, head.request.tensors.labels, facts.backend, facts.vocab_size)
        reduction, in_one_read = loss_of_call.fused, None
        if self.products is Products and options.gradient != "backward":
            in_one_read = loss_of_call.in_one_read
        gradients_of = value_gradients(call, head.request, reduction)
        if gradients_of is None:
            gradients_of = partial(
                sweep.loss_gradients, head, _block_loss(call, head.request, evaluate)
            )
        how = Sweep(self.tokens, products=self.products, name=self.name)
        stats, gradients = sweep.sweep_statistics(
            head, how, call.labels, options, gradients_of, in_one_read
        )
        with torch.no_grad():
            out = make_output(call, stats, evaluate, reduction)
        loss, stats = sweep.attach_gradients(head, out.loss, stats, gradients)
        return out._replace(loss=loss, stats=stats)


class Fp8Sweep(OneSweep):
    """One sweep whose gradient products are in fp8, but for the large entries of each token."""

    name = "fp8 sweep"
    products = Fp8Products

    @staticmethod
    def obstacle(call, head):
        if head.linear.gradients != "fp8":
            return "gradients='fp8' was not asked for"
        if not torch.is_grad_enabled():
            return "there is no gradient in torch.no_grad"
        if head.linear.mode == "recompute":
            return "mode='recompute' was asked for"
        others = {
            term.name: term.want for term in call.definition.terms if set(term.want) - {*UNIFORM}
        }
        if others:
            return f"terms must be of log-probs, lse and total alone, got terms of {others}"
        return fp8.obstacle(head) or _obstacle_to_one_sweep(call, head)

    @classmethod
    def of_kind(cls, call, head):
        return cls(fp8.sweep_tokens(head))


# of one sweep's calls whose logits would fit; measured in docs/benchmarks.md
WHOLE_LOGITS = (
    "a linear head makes none; {mebibytes:.0f} MiB of them would fit, and torch's products with a "
    "HeadLoss on these logits were measured to take 3 to 5 % less time"
)
LINEAR_WAYS: tuple[type[LinearWay], ...] = (Fp8Sweep, OneSweep, Epilogues, Blocks)


def linear_way_of(call: Call, head: LinearRequest) -> LinearWay:
    """Return the first way without an obstacle. Raises ValueError where one sweep is asked for and
    impossible."""
    for kind in LINEAR_WAYS:
        obstacle = kind.obstacle(call, head)
        if obstacle is None:
            return kind.of_kind(call, head)
        if kind is OneSweep and torch.is_grad_enabled():
            _refuse_what_one_sweep_alone_has(head.linear, obstacle)
        if kind is Fp8Sweep and head.linear.gradients == "fp8" and torch.is_grad_enabled():
            raise ValueError(f"gradients='fp8' is not possible: {obstacle}; leave gradients out")
    raise AssertionError("blocks serve every call")


def explained_linear(call: Call, head: LinearRequest) -> Explanation:
    """Explain which way a call takes, from its metadata alone. Raises as `linear_way_of`."""
    linear_way_of(call, head)
    found = Explanation.of(LINEAR_WAYS, "{}", call, head)
    logits = head.request.tensors.labels.numel() * head.weight.shape[0] * head.facts.dtype.itemsize
    if found.way != OneSweep.name or logits > free_share(head.hidden.device):
        return found
    text = WHOLE_LOGITS.format(mebibytes=logits / 2**20)
    return found._replace(obstacles={"whole logits": text, **found.obstacles})


def _refuse_what_one_sweep_alone_has(linear: Linear, obstacle: str):
    if linear.mode == "one_sweep":
        raise ValueError(f"mode='one_sweep' is not possible: {obstacle}; use 'recompute'")
    if linear.upstream is not None:
        reason = "leave it out, or take 'one_sweep'" if linear.mode == "recompute" else obstacle
        raise ValueError(f"upstream is for one sweep, got mode={linear.mode!r}: {reason}")


def linear_output(
    call: Call, head: LinearRequest, way: LinearWay, evaluate: Callable
) -> HeadLossOutput:
    """Results of a way, or of another one where one sweep turns out to be impossible."""
    try:
        out = way.output(call, head, evaluate)
        order = head.request.order
        return known_output(out, order) if isinstance(order, ValidTokens) else out
    except sweep.OneSweepObstacle as obstacle:
        log_mode(f"no one sweep, because {obstacle}")
        call.definition.plan.obstacles.append(str(obstacle))
        call.definition.plan.checked.clear()  # in which it was decided otherwise
        if obstacle.in_main_grad:
            raise ValueError(
                f"one sweep is not possible: {obstacle}; main_grad has the gradients of the first "
                "blocks by now: set it to what it was, and leave upstream out"
            ) from None
    return linear_output(call, head, linear_way_of(call, head), evaluate)


def known_output(out: HeadLossOutput, order: ValidTokens) -> HeadLossOutput:
    """Return the output with losses, sums and count of NaN, if more tokens are valid than
    `Linear.max_valid_tokens`."""
    known = torch.ones_like(out.count).masked_fill(order.missing, torch.nan)

    def as_known(x: torch.Tensor) -> torch.Tensor:
        return x * known.to(x.dtype)

    sums: dict[str, Any] = {
        field: {name: as_known(x) for name, x in getattr(out, field).items()}
        for field in ("terms", "metrics", "sequence_metrics", "term_counts")
    }
    return out._replace(loss=as_known(out.loss), count=as_known(out.count), **sums)


def _obstacle_to_one_sweep(call: Call, head: LinearRequest) -> str | None:
    """Reason why one sweep is impossible, or None. Uses only facts that are equal on all ranks."""
    linear = head.linear
    if call.definition.plan.obstacles:
        return call.definition.plan.obstacles[0]
    if linear.exact_logits and linear.mode == "auto" and linear.gradients is None:
        return "exact_logits=True takes recompute, unless mode='one_sweep' is asked for"
    if torch.compiler.is_compiling():
        return "torch.compile takes one operator each way"
    if found := _obstacle_of_terms(call):
        return found
    if trained_constants(call.definition, call.loss_weight, call.denominator, call.inputs):
        return "weights, denominator or inputs require a gradient"
    if head.request.tensors.logits.dtype == torch.float16 and linear.upstream is None:
        return (
            "float16 gradients underflow before they are scaled, unless the upstream is declared "
            "(the loss scale)"
        )
    return None


def _obstacle_of_terms(call: Call) -> str | None:
    """Reason why the terms need all tokens at once, or None."""
    terms, reduction = call.definition.terms, call.definition.reduction
    if reduction == "none":
        return "a loss per token has no scalar upstream gradient"
    undeclared = [term.name for term in terms if not _is_tokenwise(term)]
    if undeclared:
        return (
            f"the terms {undeclared} are not declared tokenwise (tokenwise=True where a token's value "
            "depends on that token alone)"
        )
    own = [term.name for term in terms if term.token_weight is not None]
    by_label = call.definition.plan.label_weight is not None
    if own and not by_label and call.denominator is None and reduction == "mean":
        return f"the terms {own} have denominators of their own: pass denominator"
    return None


def _is_tokenwise(term) -> bool:
    return term.tokenwise or term.pointwise or isinstance(term.function, StatisticValue)


def _with_denominator(call: Call) -> Call:
    """Return the call with the denominator of its mean, which every block's gradient needs."""
    if call.denominator is not None or call.definition.reduction != "mean":
        return call
    total = valid_weight(call.labels != call.definition.ignore_index, call.loss_weight)
    return call._replace(denominator=total.clamp(min=1) if call.loss_weight is None else total)


def _block_loss(call: Call, request: Request, evaluate: Callable) -> Callable:
    """Function that computes the part of the loss that a block of tokens adds.

    Its arguments: statistics of the block [n], and the slice of the block in the order of the
    request.
    """

    def flat(x):
        is_per_token = isinstance(x, torch.Tensor) and x.dim() >= min(call.labels.dim(), 1)
        return request.order.flatten(x) if is_per_token else x

    whole = "sequences", "teacher", "sets"
    inputs = {name: flat(x) for name, x in call.inputs.items() if name not in whole}
    weight, teacher = flat(call.loss_weight), call.inputs.get("teacher")
    teacher = teacher and map_teacher_tensors(without_logits(teacher), flat)
    definition = call.definition._replace(metrics=(), token_metrics=()).planned()
    functions = definition.plan.summed[0]

    def block_loss(stats: VocabStatistics, here: slice) -> torch.Tensor:
        def cut(x):
            return x[here] if isinstance(x, torch.Tensor) and x.dim() else x

        block_inputs = {name: cut(x) for name, x in inputs.items()}
        if teacher is not None:
            block_inputs["teacher"] = map_teacher_tensors(teacher, cut)
        block = call._replace(
            definition=definition,
            inputs=block_inputs,
            loss_weight=cut(weight),
            functions=functions,
            sequences=None,
        )
        try:
            values, *_ = evaluate(functions, [], stats, block_inputs, None)
        except Exception as error:
            note_block(error, len(stats.lse), call.labels.shape)
            raise
        facts = request.facts
        loss_of_block = CallLoss(block, stats.lse, facts.backend, facts.vocab_size)
        loss, _ = reduce_tokens(block, stats, values, loss_of_block.fused)
        return loss

    return block_loss
