"""One sweep: the gradients of a declared loss from the same sweep as the loss."""

from typing import NamedTuple

import torch

from ..call.statistics import assembled
from ..engine.autograd import has_other_leaves
from ..engine.passes import kernel_gradients
from ..engine.request import Tensors
from ..engine.ways.one_read import OneReadBlocks
from ..statistics import VocabStatistics
from . import sweeps
from .autograd import MainGrad, OneSweep
from .request import LinearRequest, log_mode
from .valid_tokens import check_range


class OneSweepObstacle(Exception):
    """Reason why one sweep is impossible that only one of its blocks shows.

    in_main_grad: the blocks before it have added their gradients to a main_grad.
    """

    def __init__(self, reason: str, in_main_grad: bool):
        super().__init__(reason)
        self.in_main_grad = in_main_grad


class OneSweepGradients(NamedTuple):
    """Gradients that one sweep computed besides the statistics."""

    gradients: tuple  # of hidden states, weight and bias, None where not wanted or in a main_grad
    declared: torch.Tensor | None  # the upstream gradient that is in them


def sweep_statistics(
    call: LinearRequest, sweep: sweeps.Sweep, labels, options, objective_of, in_one_read=None
) -> tuple[VocabStatistics, OneSweepGradients]:
    """Compute statistics without gradients, and the gradients of hidden states, weight and bias.

    sweep: but for its one read. objective_of(upstream gradient of the loss) -> a function of the
    values [n] and flags of a block by name, and of its slice of the flat order, that returns
    upstream gradients [n] of the values by name. in_one_read: the `FusedReduction` of the same loss
    for a launch that reads each logit of a block once, or None.
    """
    linear, request, check = call.linear, call.request, options.check
    facts, upstream = request.facts, _declared_upstream(call)
    if check:  # before anything is added to a main_grad
        check_range(labels, facts.ignore_index, facts.vocab_size, request.shard.group)
    wanted = _wanted_gradients(call)
    if wanted.main_grad is not None:
        _refuse_checkpoints()
    objective = _objective(call, objective_of(upstream))
    is_exact = call.facts.logits_dtype != call.facts.dtype
    if in_one_read is not None and not is_exact:  # whose gradients have another dtype
        one_read = OneReadBlocks(in_one_read.in_rows(request.order), upstream.float())
        sweep = sweep._replace(one_read=one_read)
    device_type = sweeps.autocast_type(call.hidden.device)
    with torch.no_grad(), torch.autocast(device_type, enabled=False):
        plain = request._replace(
            tensors=Tensors._make([None if x is None else x.detach() for x in request.tensors])
        )
        operands = call.facts.operands(call.hidden.detach(), call.weight.detach(), plain)
        values, flags, hidden_grad, sums = sweeps.sweep_blocks(
            *operands, sweep, objective, wanted, call.facts
        )
    log_mode(sweep.name)
    stats = assembled(
        (*values.unbind(0), *flags), request, labels, check, call.operands if check else None
    )
    weight_grad = None if wanted.main_grad is not None else sums.sum
    declared = None if linear.upstream is None else upstream
    return stats, OneSweepGradients((hidden_grad, weight_grad, sums.bias), declared)


def _wanted_gradients(call: LinearRequest) -> sweeps.Gradients:
    """Return which gradients a call needs, and in which dtypes."""
    linear, weight, bias = call.linear, call.weight, call.request.tensors.bias
    hidden = weight_sums = of_bias = main_grad = None
    if call.hidden.requires_grad or call.facts.hidden_grad != "none":
        hidden = call.hidden.dtype
    if weight.requires_grad:
        weight_sums = torch.float32 if linear.main_grad else weight.dtype
    if weight.requires_grad and linear.main_grad and linear.upstream is not None:
        main_grad = MainGrad(weight).main_grad
    if bias is not None and bias.requires_grad:
        of_bias = bias.dtype
    return sweeps.Gradients(hidden, weight_sums, of_bias, main_grad)


def _refuse_checkpoints():
    """Raise RuntimeError within a checkpoint, which would add to a main_grad twice."""
    message = (
        "a declared upstream with main_grad adds to it in the forward: this head cannot be "
        "checkpointed"
    )
    with torch.autograd.graph.disable_saved_tensors_hooks(message):  # raises if there are any
        pass


def _declared_upstream(call: LinearRequest) -> torch.Tensor:
    """The gradient that will arrive at the loss, 1 if nothing was declared."""
    upstream = call.linear.upstream
    if isinstance(upstream, torch.Tensor):
        return upstream.detach().clone()  # the caller may change it
    # filled there, where a copy would wait for the device; float64, as a loss may be
    value = 1.0 if upstream is None else upstream
    return torch.full((), value, dtype=torch.float64, device=call.hidden.device)


def _objective(call: LinearRequest, gradients_of):
    """A function: values and flags of some tokens -> gradients of the values that backends take, by
    name."""
    layout, ids = call.request.layout, call.request.tensors.ids

    def objective(values, flags, here):
        found = gradients_of(dict(zip(layout.outputs, (*values, *flags))), here)
        found = kernel_gradients(found, None if ids is None else ids[here])
        return found or {"lse": torch.zeros_like(values[0])}

    return objective


def loss_gradients(call: LinearRequest, loss_of, upstream):
    """Make the argument of `sweep_statistics` for any loss, which autograd differentiates in every
    block.

    loss_of(statistics of some tokens [n], their slice of the flat order) -> that part of the loss
    [].
    """
    request = call.request
    layout, labels = request.layout, request.tensors.labels

    def gradients_of(found, here):
        names = [name for name in found if name in layout.differentiable]
        leaves = {name: found[name].detach().requires_grad_() for name in names}
        # a checkpoint around the head must not see this graph, or it would compute everything again
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
            known = (
                found | leaves | {"labels": labels[here], "vocab_size": request.facts.vocab_size}
            )
            loss = loss_of(
                VocabStatistics(*map(known.get, VocabStatistics._fields)).updated(leaves), here
            )
        if not loss.requires_grad:
            return {}
        if has_other_leaves(loss, leaves.values()):  # each block has a graph of its own
            in_main_grad = (
                here.start > 0 and call.linear.main_grad and call.linear.upstream is not None
            )
            reason = "a tokenwise term depends on something else that requires a gradient"
            raise OneSweepObstacle(reason, in_main_grad)
        grads = torch.autograd.grad(
            loss, list(leaves.values()), upstream.to(loss.dtype), allow_unused=True
        )
        return dict(zip(names, grads))

    return gradients_of


def attach_gradients(
    call: LinearRequest, loss: torch.Tensor, stats: VocabStatistics, found: OneSweepGradients
):
    """Attach the gradients that were found to a loss [] and the statistics of
    `sweep_statistics`."""
    names, count = call.request.layout.reported
    main_grad = MainGrad(call.weight) if call.linear.main_grad else None
    loss, *passed = OneSweep.apply(
        call.hidden,
        call.weight,
        call.request.tensors.bias,
        loss,
        found.gradients,
        main_grad,
        found.declared,
        call.request.facts.backend,
        count,
        *[getattr(stats, name) for name in names],
    )
    return loss, stats.updated(dict(zip(names, passed)))


def _same(x):
    return x
