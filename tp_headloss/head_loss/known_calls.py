"""Calls of logits, or of hidden states and a weight, labels and inputs per token: checked once per kind.

The checks of such a call read metadata alone. Their result is remembered by that metadata, so that the next call of the
same kind begins with its kernels. What is remembered holds neither a tensor of a call nor a process group. A loss of
statistics on one rank is prepared in the second call of its kind: the third is little more than its kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from ..arguments.linear import Linear
from ..arguments.options import DEFAULTS, Options
from ..call.statistics import assembled
from ..engine.autograd import PreparedStatistics
from ..engine.backend import load_backend
from ..engine.operators import can_skip_dispatch
from ..engine.request import Request, Tensors
from ..linear_head.call import LinearCall
from ..ranks.shard import VocabShard
from ..validation import refuse_transforms
from .call import Call, expect_denominator
from .definition import HeadLossDefinition
from .output import make_output
from .reduction import is_elsewhere, kernel_denominator
from .statistic_value import FusedReduction

MOST_KINDS = 256  # batches of any size are a kind each


def kind_of_call(options: Options | None, logits, labels, shard, inputs) -> tuple | None:
    """Everything that the checks of a call read, besides its denominator; None if it must be looked at each time."""
    if not can_skip_dispatch(logits) or type(labels) is not torch.Tensor or logits.is_neg() or logits.is_nested:
        return None
    if options is not None and options.validate != "metadata":
        return None
    if shard is not None and not isinstance(shard, VocabShard):
        return None
    input_facts: tuple = ()
    if inputs is not None:
        if type(inputs) is not dict or any(
            type(x) is not torch.Tensor or x.shape != labels.shape for x in inputs.values()
        ):
            return None
        input_facts = tuple([(name, x.dtype, x.device) for name, x in inputs.items()])
    given = None if shard is None else (shard.facts, shard.stop)
    logits_facts = logits.shape, logits.dtype, logits.stride(), logits.device
    return *logits_facts, labels.dtype, labels.shape, labels.device, input_facts, given


def kind_of_linear_call(options: Options | None, hidden, weight, labels, shard, inputs, linear: Linear) -> tuple | None:
    """`kind_of_call` of hidden states and the weight of a linear head."""
    kind = kind_of_call(options, hidden, labels, shard, inputs)
    if kind is None or type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.is_neg():
        return None
    if linear.max_valid_tokens is not None or isinstance(linear.upstream, torch.Tensor):
        return None
    place = weight.shape, weight.dtype, weight.stride(), weight.device, weight.data_ptr() % 16, hidden.data_ptr() % 16
    device = hidden.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return linear, autocast, *place, *kind


def checked_before(definition: HeadLossDefinition, kind: tuple, x, weight, labels, shard, denominator, inputs) -> Any:
    """The call and the request, or the linear head's call if there is a weight, if a call of this kind was checked
    before; else None. x: logits or hidden states."""
    known = definition.plan.checked.get(kind)
    if known is None:
        return None
    if shard is not None:
        shard.expect_live_group()
    expect_denominator(denominator, definition.reduction, labels.device)
    call = _call(definition, labels, denominator, inputs)
    if isinstance(known, LinearCall):
        return call, known.again(x, weight, labels, shard)
    return call, known._replace(tensors=_rows(known, x, labels), shard=shard or known.shard)


def _call(definition: HeadLossDefinition, labels, denominator, inputs) -> Call:
    return Call(definition, labels, None, None, None, denominator, None, inputs or {}, None, definition.plan.summed[0])


def _rows(known: Request, logits, labels) -> Tensors:
    order = known.order
    return Tensors(order.flatten(logits), order.flatten(labels).contiguous())


def _place(tensors: Tensors, denominator) -> tuple:
    """Facts that the launches of a kind still depend on: alignments, and whether the denominator is in memory."""
    divisor = denominator.data_ptr() % 16 if isinstance(denominator, torch.Tensor) else type(denominator)
    return tensors.logits.data_ptr() % 16, tensors.labels.data_ptr() % 16, divisor


def prepared_output(definition: HeadLossDefinition, kind: tuple, logits, labels, denominator, inputs, evaluate):
    """The output of a call whose launches are prepared, else None."""
    known = definition.plan.checked.get(kind)
    if known is None or not known.prepared_steps or is_elsewhere(denominator, logits.device):
        return None
    refuse_transforms()
    expect_denominator(denominator, definition.reduction, labels.device)
    divisor, tensors = kernel_denominator(definition.reduction, denominator), _rows(known, logits, labels)
    step = known.prepared_steps.get(_place(tensors, divisor))
    if not step or not step.is_on_current_device():
        return None
    inplace = (definition.options or DEFAULTS).inplace
    *outputs, loss, sums = PreparedStatistics.apply(*tensors[:2], step, inplace, divisor)
    stats = assembled(outputs, known, labels)
    return make_output(_call(definition, labels, denominator, inputs), stats, evaluate, None, loss, sums)


def prepare(definition: HeadLossDefinition, kind: tuple, request: Request, reduction: FusedReduction):
    """Prepare the launches of a loss of statistics when its kind comes again; many never do.

    `prepared_steps` of the kind has for each place None after the first call, then its `LossStep`, False if there is
    none for it.
    """
    known, options = definition.plan.checked.get(kind), definition.options or DEFAULTS
    if known is None or options.check or options.gradient == "forward":
        return
    place = _place(request.tensors, reduction.denominator)
    if place not in known.prepared_steps:
        known.prepared_steps[place] = None
    elif known.prepared_steps[place] is None:
        known.prepared_steps[place] = load_backend(request.facts.backend).loss_step(request, reduction) or False


def remember(kind: tuple, call: Call, found: Request | LinearCall) -> None:
    """Keep what the checks of a call found."""
    checked = call.definition.plan.checked
    if call.total_weight is not None:
        return
    if len(checked) >= MOST_KINDS:
        checked.clear()
    if isinstance(found, LinearCall):
        checked[kind] = found.without_tensors(kind[-1] is not None)
    else:
        checked[kind] = found._replace(tensors=None, shard=None if kind[-1] else found.shard, prepared_steps={})
