"""The gradient of a loss whose forward was one read, for an upstream gradient that the forward has
not foreseen."""

from __future__ import annotations

import torch

from ...statistics.records_triton import Inputs, LossGradient
from ..device_inputs import inputs_of, room_at_lists
from ..kernels import COLUMNS
from ..launch import LATE_PROGRAMS, PreparedLaunch, ceil_div, dtype_key, gradient_launch, int_key
from ..request import Request, Tensors, places_of
from .late_kernel_triton import late_gradient_kernel
from .params import TERMS


class LateGradient:
    """The backward of calls of one kind: it writes the gradient from logits and merged rows, in one
    rounding, unless the forward has written it for the upstream gradient of the loss that came."""

    def __init__(
        self,
        request: Request,
        plan,
        has_slopes: bool,
        weight: torch.Tensor | None,
        strides: tuple[int, ...],
    ):
        """has_slopes: the loss is a row function's, whose derivatives [6, N] by `TERMS` the forward
        has found. strides: of the gradient."""
        logits, layout, facts = request.tensors.logits, request.layout, request.facts
        (_, prepared), (n_rows, width) = inputs_of(request), logits.shape
        self.places = places_of(request.tensors)
        self.numbers, self.rows = prepared.numbers, prepared.rows
        if has_slopes:  # half of the derivative of a square whose value is the slope
            terms = [(name, 0.5, True) for name in TERMS]
        else:
            terms = plan.gradients
        self.terms = [
            (i, *term) for i, term in enumerate(terms) if term[0] in layout.differentiable
        ]
        names = tuple([name for _, name, *_ in self.terms])
        hooks, padded, how = (
            self.rows.gradient_hooks(names),
            facts.valid_width < width,
            gradient_launch(width, names),
        )
        self.strides = strides
        kinds = tuple([(name, squared) for _, name, _, squared in self.terms])
        variant = (
            logits.device,
            prepared.variant,
            kinds,
            padded,
            dtype_key(weight),
            *map(int_key, strides),
        )
        self.lists = self.rows.gradient_lists(names)
        columns = COLUMNS.value if self.lists else how.block
        programs = min(LATE_PROGRAMS, n_rows * ceil_div(width, columns))
        self.launch = PreparedLaunch(late_gradient_kernel, programs, variant, how)
        self.families, self.last = (
            (hooks, self.rows.merged),
            (n_rows, facts.start, facts.valid_width, padded),
        )

    def serves(self, gradient: torch.Tensor, tensors: Tensors, *others: torch.Tensor) -> bool:
        """True for saved tensors that lie as those of the forward did, the others without gaps."""
        return (
            self.places == places_of(tensors)
            and self.strides == gradient.stride()
            and gradient.data_ptr() % 16 == 0
            and False not in map(torch.Tensor.is_contiguous, others)
        )

    def __call__(self, gradient, forecast, tensors, merged, weight, inverse, values, loss):
        """Complete a gradient [N, width] that the forward may have written. values: of the terms
        [N], or slopes."""
        grads = {name: (c, values[i]) if squared else (c,) for i, name, c, squared in self.terms}
        upstream = self.rows.grads(*map(grads.get, self.rows.grads._fields))
        inputs, loss = Inputs(*tensors, *self.numbers), LossGradient(loss, inverse, weight)
        exact = room_at_lists(self.lists, inputs, gradient.dtype)
        self.launch(
            gradient,
            *self.strides,
            inputs,
            merged,
            upstream,
            loss,
            exact,
            self.families,
            forecast,
            *self.last,
        )
