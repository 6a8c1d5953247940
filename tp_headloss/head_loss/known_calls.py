"""Calls of logits, labels and inputs with a value per token, as most training steps make: checked once per kind.

The checks of such a call read metadata alone. Their result is remembered by that metadata, so that the next call of the
same kind begins with its kernels. What is remembered holds neither a tensor nor a process group.
"""

from __future__ import annotations

import torch

from ..engine.operators import can_skip_dispatch
from ..options import Options
from ..request import Request, Tensors
from ..shard import VocabShard
from .call import Call, expect_denominator
from .definition import HeadLossDefinition

MOST_KINDS = 256  # batches of any size are a kind each


def kind_of_call(options: Options | None, logits, labels, shard, inputs) -> tuple | None:
    """Everything that the checks of a call read, besides its denominator; None if it must be looked at each time."""
    if not can_skip_dispatch(logits) or type(labels) is not torch.Tensor or logits.is_neg() or logits.is_nested:
        return None
    if options is not None and options.validate != "metadata":
        return None
    if shard is not None and not isinstance(shard, VocabShard):
        return None
    of_inputs: tuple = ()
    if inputs is not None:
        if type(inputs) is not dict or any(
            type(x) is not torch.Tensor or x.shape != labels.shape for x in inputs.values()
        ):
            return None
        of_inputs = tuple([(name, x.dtype, x.device) for name, x in inputs.items()])
    given = None if shard is None else (shard.facts, shard.stop)
    of_logits, of_labels = (logits.dtype, logits.stride(), logits.device), (labels.dtype, labels.shape, labels.device)
    return logits.shape, *of_logits, *of_labels, of_inputs, given


def checked_before(definition: HeadLossDefinition, kind: tuple, logits, labels, shard, denominator, inputs):
    """The call and the request if a call of this kind was checked before, else None."""
    known = definition.plan.checked.get(kind)
    if known is None:
        return None
    if shard is not None:
        shard.expect_live_group()
    expect_denominator(denominator, definition.reduction, labels.device)
    order = known.order
    tensors = Tensors(order.flatten(logits), order.flatten(labels).contiguous())
    call = Call(definition, labels, None, None, None, denominator, None, inputs or {}, None, definition.plan.summed[0])
    return call, known._replace(tensors=tensors, shard=shard or known.shard)


def remember(kind: tuple, call: Call, request: Request) -> None:
    """Keep what the checks of a call found."""
    checked = call.definition.plan.checked
    if call.total_weight is not None:
        return
    if len(checked) >= MOST_KINDS:
        checked.clear()
    checked[kind] = request._replace(tensors=None, shard=None if kind[-1] else request.shard, kept={})
