"""The launches of a loss of statistics, with everything worked out once that calls of one kind
share.

A step computes what `triton.local_statistics`, `merge_packets`, `token_sums` and `logits_gradient`
compute, by the same kernels. Only the host's part is shorter, which is what small steps wait for.
"""

from __future__ import annotations

from typing import Any

import torch

from ...statistics.records_triton import Inputs, Lists, LossGradient
from .. import kernels
from ..device_inputs import inputs_of
from ..launch import (
    MERGE,
    SUMS,
    PreparedLaunch,
    ceil_div,
    gradient_launch,
    int_key,
    statistics_launch,
)
from ..operators import can_skip_dispatch
from ..passes import Reduced, statistics
from ..request import Request, place_of
from ..sums_triton import divided_by, sums_kernel, sums_key
from ..transports.symmetric_memory_triton import NOT_SHARED, shared_memory
from .prepared import Prepared
from .way import Found


class PreparedLaunches(Prepared):
    """Forward and backward of calls of one kind: logits [N, width], labels [N], no weights, and a
    loss that is a weighted sum of statistics, or squares of them, over a denominator of one kind, a
    number or a tensor."""

    def __init__(self, request: Request, reduction, inplace: bool):
        super().__init__(inplace)
        tensors, facts, layout, plan = (
            request.tensors,
            request.facts,
            request.layout,
            reduction.plan,
        )
        (inputs, prepared), gradients = inputs_of(request), plan.gradients
        rows, (n_rows, width), device = prepared.rows, tensors.logits.shape, tensors.logits.device
        self.facts, self.plan, self.rows, self.n_rows = facts, plan, rows, n_rows
        self.index, self.places = (
            device.index,
            (*place_of(tensors.logits), *place_of(tensors.labels)),
        )
        # places among the outputs: of the values that are summed and of the flag
        self.added, self.valid = (
            [layout.outputs.index(name) for name in plan.statistics],
            layout.outputs.index("valid"),
        )
        self.inputs, self.bounds = inputs[2:], prepared.bounds
        packets = tensors.logits.new_empty((), dtype=torch.float32).expand(request.packets_shape)
        outputs = layout.empty_outputs(packets, n_rows, torch.float32)
        # for `empty_like`, the quickest way to allocate; expanded, so that they take no memory
        self.packets, self.outputs = packets, [x.new_empty(()).expand(x.shape) for x in outputs]
        scalar = packets.new_empty(())
        self.reduced = scalar, scalar.expand(len(plan.statistics) + 1), scalar.double()
        self.variant = device, prepared.variant, facts.chunks, facts.packets
        self.launches: dict[Any, tuple[PreparedLaunch, PreparedLaunch]] = {}
        _merged, values, *flags = outputs
        by_output = *values.unbind(0), *flags
        key = sums_key([by_output[i] for i in self.added], by_output[self.valid], reduction)
        self.add_up = PreparedLaunch(sums_kernel, 1, key, SUMS)
        self.add_up_last = plan.squares, plan.negatives, reduction.denominator is None
        self.gradients, self.grads_type = gradients, rows.grads
        self.grads = (
            None
            if any(squared for *_, squared in gradients)
            else self._upstream([None] * len(gradients))
        )
        names, padded = tuple([name for name, *_ in gradients]), facts.valid_width < width
        hooks, is_transformed = rows.gradient_hooks(names), inputs.pre is not None
        how = gradient_launch(width, names, facts.softcap != 0.0, is_transformed)
        columns = kernels.gradient_columns(how.block, inputs, hooks)
        # where logits have gaps between their elements, the strides of the gradient are of another
        # kind than theirs
        strides = map(int_key, torch.empty_like(tensors.logits, device="meta").stride())
        variant = *self.variant, gradients, padded, *strides
        self.write_gradient = PreparedLaunch(
            kernels.gradient_kernel, n_rows * ceil_div(width, columns), variant, how
        )
        self.gradient_last = (
            Lists(),
            hooks,
            rows.merged,
            n_rows,
            facts.start,
            facts.valid_width,
            padded,
        )

    def is_ready(self, request: Request) -> bool:
        """Return True where a kernel can be launched without a switch of devices."""
        return self.index is None or self.index == torch._C._cuda_getDevice()

    def _serves(self, request: Request, saved) -> bool:
        """True for saved tensors that lie as the first call's did, the others without gaps, on the
        current device."""
        logits, labels, merged, _valid, _weight, _inverse, *values = saved
        alike = self.places == (*place_of(logits), *place_of(labels)) and can_skip_dispatch(merged)
        return (
            alike
            and False not in map(torch.Tensor.is_contiguous, (merged, *values))
            and self.is_ready(request)
        )

    def _prepared(self, slot) -> tuple[PreparedLaunch, PreparedLaunch]:
        """The launches of the statistics and of their merge, for shared memory whose slots have so
        many elements."""
        how, variant = statistics_launch(self.facts.chunk_size), (*self.variant, slot)
        self.launches[slot] = (
            PreparedLaunch(
                kernels.statistics_kernel, self.n_rows * self.facts.chunks, variant, how
            ),
            PreparedLaunch(
                kernels.merge_kernel, ceil_div(self.n_rows, MERGE.block), variant, MERGE
            ),
        )
        return self.launches[slot]

    def local_statistics(self, packets, request: Request, memory=None) -> None:
        """`triton.local_statistics`."""
        inputs, rows, shared = (
            Inputs(*request.tensors[:2], *self.inputs),
            self.rows,
            NOT_SHARED if memory is None else shared_memory(memory),
        )
        launch, _ = self.launches.get(shared.slot) or self._prepared(shared.slot)
        launch(packets, inputs, shared, rows.statistics, rows.packet, self.n_rows, *self.bounds)

    def merge_packets(self, packets, request: Request, memory=None) -> list[torch.Tensor]:
        """`triton.merge_packets`."""
        shared = NOT_SHARED if memory is None else shared_memory(memory)
        # as there: compiled once
        inputs, rows, facts = Inputs(labels=request.tensors.labels), self.rows, self.facts
        outputs = [*map(torch.empty_like, self.outputs)]
        _, launch = self.launches.get(shared.slot) or self._prepared(shared.slot)
        launch(
            rows.outputs(outputs),
            packets,
            inputs,
            shared,
            rows.merge,
            rows.merge_rows,
            self.n_rows,
            facts.chunks * facts.world_size,
            facts.chunks,
        )
        return outputs

    def forward(self, request: Request, reduction) -> Found:
        """As `Way.forward` does, with launches that are prepared."""
        if self.facts.world_size == 1:
            packets = torch.empty_like(self.packets)
            self.local_statistics(packets, request)
            merged, values, *flags = self.merge_packets(packets, request)
        else:
            merged, values, *flags = statistics(request, self)
        outputs, (loss, sums, inverse) = (
            (*values.unbind(0), *flags),
            map(torch.empty_like, self.reduced),
        )
        given, number = divided_by(reduction.denominator)
        self.add_up(
            sums,
            inverse,
            loss,
            tuple([outputs[i] for i in self.added]),
            outputs[self.valid],
            None,
            given,
            self.plan.coefficients,
            number,
            self.n_rows,
            *self.add_up_last,
        )
        return Found(merged, outputs, Reduced(loss, sums, inverse))

    def _upstream(self, values):
        """Upstream gradients of the statistics, whose values [N] are read where the loss has their
        squares."""
        given = zip(self.gradients, values)
        grads = {name: (c, value) if squared else (c,) for (name, c, squared), value in given}
        return self.grads_type(*map(grads.get, self.grads_type._fields))

    def gradient_of_loss(self, ctx, saved, loss) -> torch.Tensor | None:
        """Return d loss / d logits by the prepared launch, or None where what the forward saved
        lies otherwise."""
        if self.inplace or not self._serves(ctx.request, saved):
            return None
        logits, labels, merged, _valid, _weight, inverse, *values = saved
        out, grads = torch.empty_like(logits), self.grads or self._upstream(values)
        inputs, loss = Inputs(logits, labels, *self.inputs), LossGradient(loss, inverse, None)
        self.write_gradient(out, *out.stride(), inputs, merged, grads, loss, *self.gradient_last)
        return out
