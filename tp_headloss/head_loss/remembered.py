"""Calls of logits, or of hidden states and a weight, labels and inputs per token: checked once per
kind.

The checks of such a call read metadata alone, and take longer on the host than small kernels on the
device. Their result is remembered by that metadata, so that the next call of the same kind begins
with its kernels. What is remembered holds neither a tensor of a call nor a process group, so that
it keeps nothing alive; and it is valid for every later call of its kind, whatever was called
between. A call whose checks read values, or whose tensors are not plain, is never remembered.
"""

import torch

from ..arguments.linear import Linear
from ..arguments.options import Options, Transform
from ..call.request_of import known_temperatures
from ..engine.operators import can_skip_dispatch
from ..engine.request import Request, Tensors
from ..linear_head.request import LinearRequest
from ..ranks.shard import VocabShard
from .checks import Call, expect_denominator, with_label_weight
from .definition import HeadLossDefinition
from .linear_ways import LinearWay

MOST_KINDS = 256  # batches of any size are a kind each
DENOMINATORS = type(None), int, float, torch.Tensor  # a class of its own may do anything


def kind_of_call(
    options: Options | None, logits, labels, shard, denominator, inputs, transform=None
) -> tuple | None:
    """Everything that the checks of a call read, but its denominator's value; None: it must be
    looked at each time."""
    if not can_skip_dispatch(logits) or logits.layout != torch.strided or logits.is_nested:
        return None
    if logits.is_neg() or not _is_plain(labels):
        return None
    if not isinstance(shard, VocabShard | None):
        return None
    if type(denominator) not in DENOMINATORS:
        return None
    if options is not None and _checks_read_values(options, denominator, inputs):
        return None
    of_inputs = () if inputs is None else _facts_of_inputs(inputs, labels)
    of_transform = () if transform is None else _facts_of_transform(transform)
    if of_inputs is None or of_transform is None:
        return None
    of_shard = None if shard is None else (shard.facts, shard.stop)
    of_logits = logits.shape, logits.dtype, logits.stride(), logits.device
    of_labels = labels.dtype, labels.shape, labels.device
    of_denominator = denominator is None, getattr(denominator, "requires_grad", False)
    return *of_logits, *of_labels, of_inputs, of_transform, *of_denominator, of_shard


def _checks_read_values(options: Options, denominator, inputs) -> bool:
    """Whether ranks compare arguments, or values are looked at besides those of the logits."""
    has_values = bool(inputs) or isinstance(denominator, torch.Tensor)
    return options.validate != "metadata" or (options.check and has_values)


def _facts_of_inputs(inputs, labels) -> tuple | None:
    """Return the facts of inputs that the checks read, or None: not all are a number per token."""
    if type(inputs) is not dict:
        return None
    if any(not _is_plain(x) or x.shape != labels.shape for x in inputs.values()):
        return None
    return tuple([(name, x.dtype, x.device, x.requires_grad) for name, x in inputs.items()])


def _facts_of_transform(transform) -> tuple | None:
    """Return the facts of a transform that the checks read, or None: it has another tensor than
    temperatures."""
    if type(transform) is not Transform or transform.bias is not None:
        return None
    x = transform.temperature
    if not isinstance(x, torch.Tensor):
        return transform.scale, transform.softcap, x
    if not _is_plain(x):
        return None
    return transform.scale, transform.softcap, x.shape, x.dtype, x.device, x.requires_grad


def _is_plain(x) -> bool:
    """Whether x is a tensor of torch's own class with elements at strides."""
    return type(x) is torch.Tensor and x.layout == torch.strided and not x.is_nested


def kind_of_linear_call(
    options: Options | None, hidden, weight, labels, shard, denominator, inputs, linear: Linear
) -> tuple | None:
    """`kind_of_call` of hidden states and the weight of a linear head, with what decides its
    mode."""
    kind = kind_of_call(options, hidden, labels, shard, denominator, inputs)
    if kind is None or type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.is_neg():
        return None
    # no memory, or none of its own
    if hidden.is_meta or weight.layout != torch.strided or weight.is_nested:
        return None
    if (
        type(linear) is not Linear
        or linear.max_valid_tokens is not None
        or isinstance(linear.upstream, torch.Tensor)
    ):
        return None
    place = (
        weight.shape,
        weight.dtype,
        weight.stride(),
        weight.device,
        weight.data_ptr() % 16,
        hidden.data_ptr() % 16,
    )
    device = hidden.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return linear, autocast, torch.is_grad_enabled(), *place, *kind


def checked_before(
    definition: HeadLossDefinition,
    kind: tuple,
    logits,
    labels,
    shard,
    denominator,
    inputs,
    transform,
):
    """Return the call and its request if this kind was checked before, else None."""
    known = definition.plan.checked.get(kind)
    if known is None:
        return None
    call = _call_again(definition, labels, shard, denominator, inputs)
    flatten = known.order.flatten
    tensors = Tensors(flatten(logits), flatten(labels).contiguous())
    if transform is not None and isinstance(transform.temperature, torch.Tensor):
        temperatures = known_temperatures(transform.temperature, logits)
        tensors = tensors._replace(temperatures=flatten(temperatures).contiguous())
    return call, known._replace(tensors=tensors, shard=shard or known.shard)


def linear_checked_before(
    definition: HeadLossDefinition, kind: tuple, hidden, weight, labels, shard, denominator, inputs
):
    """Return the call, its linear head's and its way if this kind was checked before, else None."""
    known = definition.plan.checked.get(kind)
    if known is None:
        return None
    head, way = known
    call = _call_again(definition, labels, shard, denominator, inputs)
    return call, head.again(hidden, weight, labels, shard), way


def _call_again(definition: HeadLossDefinition, labels, shard, denominator, inputs) -> Call:
    """Return a call of a kind that was checked before."""
    if shard is not None:
        shard.expect_live_group()
    expect_denominator(denominator, definition.reduction, labels.device)
    return Call(
        definition,
        labels,
        None,
        None
        if definition.plan.label_weight is None
        else with_label_weight(definition, labels, None),
        None,
        denominator,
        None,
        inputs or {},
        None,
        definition.plan.summed[0],
    )


def remember(kind: tuple | None, call: Call, request: Request):
    """Keep what the checks of a call found, unless it is of no kind."""
    if kind is None or call.total_weight is not None:
        return
    if not _checks_weights(call.definition):
        _room(call)[kind] = request._replace(
            tensors=None, shard=None if kind[-1] else request.shard, ways={}
        )


def _checks_weights(definition: HeadLossDefinition) -> bool:
    """Whether each call looks at the values of terms' weights, which change between calls."""
    options = definition.options
    has_check = options is not None and options.check
    return has_check and any(isinstance(term.weight, torch.Tensor) for term in definition.terms)


def remember_linear(kind: tuple | None, call: Call, head: LinearRequest, way: LinearWay):
    """Keep what the checks of a linear head's call found, and its way, unless it is of no kind."""
    if kind is None or call.total_weight is not None:
        return
    # a tensor may require a gradient in the next call, which rules out one sweep
    if not any(isinstance(term.weight, torch.Tensor) for term in call.definition.terms):
        _room(call)[kind] = head.without_tensors(kind[-1] is not None), way


def _room(call: Call) -> dict:
    """The kinds that are known, without all of them if there are too many."""
    checked = call.definition.plan.checked
    if len(checked) >= MOST_KINDS:
        checked.clear()
    return checked
