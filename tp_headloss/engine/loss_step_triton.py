"""The launches of a loss of statistics on one rank, with everything worked out once that steps of one kind share.

A step computes what `triton.local_statistics`, `merge_packets` and `logits_gradient` compute, by the same kernels. Only
the host's part is shorter, which is what small steps wait for.
"""

from __future__ import annotations

import torch

from ..statistics.records_triton import Inputs, Lists, LossGradient
from . import kernels
from .device_inputs import inputs_of
from .launch import MERGE, SUMS, PreparedLaunch, ceil_div, gradient_launch, int_key, statistics_launch
from .request import Request
from .sums_triton import divided_by, sums_kernel, sums_key
from .transports.symmetric_memory_triton import SharedMemory

NOT_SHARED = SharedMemory()


def place_of(x: torch.Tensor) -> tuple:
    """Strides and alignment, which Triton compiles in, of a tensor whose shape and dtype are known."""
    return x.stride(), x.data_ptr() % 16


def loss_step(request: Request, reduction) -> LossStep | None:
    """The step of a call with logits and labels alone, which has no weights; None where the general way is needed."""
    layout, gradients = request.layout, reduction.plan.gradients
    has_rows = len(request.tensors.logits) > 0
    if request.facts.world_size > 1 or layout.second or layout.per_id or layout.needs_label_logits or not has_rows:
        return None
    if gradients is None or not all(name in layout.differentiable for name, *_ in gradients):
        return None
    return LossStep(request, reduction)


class LossStep:
    """Forward and backward of calls of one kind: logits [N, width], labels [N], and a loss that is a weighted sum of
    statistics, or squares of them, over a denominator of one kind, a number or a tensor."""

    def __init__(self, request: Request, reduction):
        self.loss_plan = plan = reduction.plan
        gradients = plan.gradients
        tensors, facts, layout = request.tensors, request.facts, request.layout
        inputs, prepared = inputs_of(request)
        rows, (n_rows, width), device = prepared.rows, tensors.logits.shape, tensors.logits.device
        self.index, self.places = device.index, (*place_of(tensors.logits), *place_of(tensors.labels))
        self.request = Request(None, facts, layout)
        # places among the outputs: of those without a gradient, of the terms' statistics and of the flag
        self.fixed, self.valid = layout.fixed, layout.outputs.index("valid")
        self.summed = [layout.outputs.index(name) for name, *_ in gradients]
        self.added = [layout.outputs.index(name) for name in plan.statistics]
        self.inputs, self.outputs = inputs[2:], rows.outputs
        packets = tensors.logits.new_empty((), dtype=torch.float32).expand(request.packets_shape)
        outputs = layout.empty_outputs(packets, n_rows, torch.float32)
        # for `empty_like`, the quickest way to allocate; expanded, so that they take no memory
        reduced = packets.new_empty(len(plan.statistics) + 1), packets.new_empty(()), packets.new_empty(()).double()
        self.like = [x.new_empty(()).expand(x.shape) for x in (packets, *outputs, *reduced)]
        variant = device, prepared.variant, facts.chunks
        self.write = PreparedLaunch(
            kernels.statistics_kernel, n_rows * facts.chunks, variant, statistics_launch(facts.chunk_size)
        )
        self.write_last = rows.statistics, rows.packet, n_rows, *prepared.bounds
        self.merge = PreparedLaunch(kernels.merge_kernel, ceil_div(n_rows, MERGE.block), variant, MERGE)
        self.merge_last = rows.merge, rows.merge_rows, n_rows, facts.packets, facts.chunks
        by_output = self._by_output(outputs)
        key = sums_key([by_output[i] for i in self.added], by_output[self.valid], reduction)
        self.add_up = PreparedLaunch(sums_kernel, 1, key, SUMS)
        self.add_up_last = plan.squares, plan.negatives, reduction.denominator is None
        self.gradients, self.grads_type = gradients, rows.grads
        self.grads = None if any(squared for *_, squared in gradients) else self._upstream([None] * len(gradients))
        names, padded = tuple([name for name, *_ in gradients]), facts.valid_width < width
        hooks, is_transformed = rows.gradient_hooks(names), inputs.pre is not None
        how = gradient_launch(width, names, facts.softcap != 0.0, is_transformed)
        columns = kernels.gradient_columns(how.block, inputs, hooks)
        # where logits have gaps between their elements, the strides of the gradient are of another kind than theirs
        strides = map(int_key, torch.empty_like(tensors.logits, device="meta").stride())
        self.write_gradient = PreparedLaunch(
            kernels.gradient_kernel, n_rows * ceil_div(width, columns), (*variant, gradients, padded, *strides), how
        )
        self.gradient_last = Lists(), hooks, rows.merged, n_rows, facts.start, facts.valid_width, padded

    def is_on_current_device(self) -> bool:
        """True where a kernel can be launched without a switch of devices."""
        return self.index is None or self.index == torch._C._cuda_getDevice()

    def serves(self, logits, labels, *others) -> bool:
        """True for tensors that lie as those of the first call did, without gaps in others, on the current device."""
        alike = self.places == (*place_of(logits), *place_of(labels)) and all(x.is_contiguous() for x in others)
        return alike and self.is_on_current_device()

    @staticmethod
    def _by_output(outputs) -> tuple[torch.Tensor, ...]:
        """[merged rows, values, *flags] -> the outputs of the layout."""
        _merged, values, *flags = outputs
        return *values.unbind(0), *flags

    def statistics(self, logits, labels, denominator) -> tuple:
        """Return the merged rows, the layout's outputs, the loss, its sums and 1 / its divisor."""
        packets, *outputs, sums, loss, inverse = map(torch.empty_like, self.like)
        inputs, (given, number) = Inputs(logits, labels, *self.inputs), divided_by(denominator)
        self.write(packets, inputs, NOT_SHARED, *self.write_last)
        self.merge(self.outputs(outputs), packets, inputs, NOT_SHARED, *self.merge_last)
        by_output, coefficients = self._by_output(outputs), self.loss_plan.coefficients
        self.add_up(
            sums, inverse, loss, tuple([by_output[i] for i in self.added]), by_output[self.valid], None, given,
            coefficients, number, len(labels), *self.add_up_last,
        )  # fmt: skip
        return outputs[0], by_output, loss, sums, inverse

    def _upstream(self, values):
        """Upstream gradients of the statistics, whose values [N] are read where the loss has their squares."""
        given = zip(self.gradients, values)
        grads = {name: (c, value) if squared else (c,) for (name, c, squared), value in given}
        return self.grads_type(*map(grads.get, self.grads_type._fields))

    def gradient(self, logits, labels, merged, loss, inverse, values) -> torch.Tensor:
        """d loss / d logits for this upstream gradient of the loss; values: of its statistics."""
        out, grads = torch.empty_like(logits), self.grads or self._upstream(values)
        inputs, loss = Inputs(logits, labels, *self.inputs), LossGradient(loss, inverse, None)
        self.write_gradient(out, *out.stride(), inputs, merged, grads, loss, *self.gradient_last)
        return out
