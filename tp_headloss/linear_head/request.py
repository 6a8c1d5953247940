"""One validated call of a linear head, and its two ways: recompute, and one sweep."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..arguments.linear import Linear, expect_sequence
from ..arguments.teachers import TeacherHead
from ..call.given import Given
from ..call.request_of import build_request, expect_not_swapped
from ..engine.request import Request, Tensors
from ..ranks.compiler import constant_for_compile
from ..ranks.shard import VocabShard
from ..spec.checks import operand_dtype, refuse_export
from . import blocks, epilogue
from .autograd import LinearStatistics, MainGrad
from .facts import LinearFacts
from .teacher import expect_teacher_head, stand_in, teacher_operands
from .valid_tokens import picked_rows

_log = logging.getLogger("tp_headloss")


class LinearRequest(NamedTuple):
    """A validated call, as the sweeps take it, in one order of the tokens."""

    hidden: torch.Tensor  # [N, H], or [N/P, H]
    weight: torch.Tensor
    request: Request  # its logits: an expanded scalar that has their shape and dtype
    linear: Linear
    facts: LinearFacts

    @classmethod
    def checked(cls, given: Given) -> LinearRequest:
        """Validate a call and bring its tensors into rows."""
        hidden, weight, linear, teacher = given.hidden, given.weight, given.linear, given.teacher
        _expect_options_of_a_linear_head(given)
        dtype = operand_dtype(hidden, weight)
        if given.bias is not None:
            given = given._replace(transform=replace(given.transform, bias=given.bias))
        is_scattered = linear.hidden_grad == "reduce_scatter"
        if is_scattered:
            hidden = hidden.contiguous()  # ranks agree on the order of the tokens they gather
        logits = hidden.new_empty((), dtype=dtype).expand(*given.tokens_shape, given.shard.width)
        if isinstance(teacher, TeacherHead):
            expect_teacher_head(teacher, hidden, logits, given.shard, is_scattered)
            expect_not_swapped(teacher.hidden, (hidden, weight, given.transform.bias))
        given = given._replace(logits=logits, teacher=stand_in(teacher, logits))
        # the first valid tokens are kept
        is_in_order = is_scattered or linear.max_valid_tokens is not None
        request = build_request(given, logits if is_in_order else hidden)
        if isinstance(teacher, TeacherHead):
            operands = teacher_operands(
                teacher, request.order, is_scattered, not linear.exact_logits
            )
            tensors = request.tensors._replace(teacher=None)
            request = request._replace(tensors=tensors, teacher_head=operands)
        if is_scattered:
            flat = hidden.reshape(-1, hidden.shape[-1])
        else:
            flat = request.order.flatten(hidden)
        if linear.max_valid_tokens is not None:
            flat, request = picked_rows(flat, request, linear.max_valid_tokens, given.options.check)
        has_epilogue = epilogue.obstacle(hidden, weight, dtype, request, linear) is None
        facts = _linear_facts(dtype, weight, linear, request, has_epilogue)
        return cls(flat, weight, request, linear, facts)

    def without_tensors(self, has_shard: bool) -> LinearRequest:
        """Return what `again` needs of a call, without its tensors, nor the shard if a caller gives
        it each time."""
        standin = Tensors(self.request.tensors.logits)
        request = self.request._replace(
            tensors=standin, shard=None if has_shard else self.request.shard
        )
        absent: Any = None
        return self._replace(hidden=absent, weight=absent, request=request)

    def again(self, hidden, weight, labels, shard: VocabShard | None) -> LinearRequest:
        """Return a call of the same kind with other tensors."""
        if self.linear.main_grad:
            expect_main_grad(weight)
        known = self.request
        scattered = self.linear.hidden_grad == "reduce_scatter"
        flat = (
            hidden.contiguous().reshape(-1, hidden.shape[-1])
            if scattered
            else known.order.flatten(hidden)
        )
        tensors = known.tensors._replace(labels=known.order.flatten(labels).contiguous())
        return self._replace(
            hidden=flat,
            weight=weight,
            request=known._replace(tensors=tensors, shard=shard or known.shard),
        )

    @property
    def operands(self) -> dict[str, torch.Tensor]:
        """Hidden states and weight, by the names that messages give them."""
        return {"hidden states": self.hidden, "weight": self.weight}

    def recompute_outputs(self) -> tuple[torch.Tensor, ...]:
        """The statistics [N] in the order of `layout.outputs`, any function of which can be
        differentiated."""
        if torch.compiler.is_exporting():
            refuse_export(self.hidden, self.weight, *self.request.tensors[1:])
        log_mode(self._recompute_mode())
        main_grad, grad_anchor = MainGrad(self.weight) if self.linear.main_grad else None, None
        if (
            self.facts.hidden_grad != "none"
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        ):
            grad_anchor = self.hidden.new_empty(0).requires_grad_()
        teacher = self.request.teacher_head
        without_tensors = teacher._replace(
            teacher_hidden=None, teacher_weight=None, teacher_bias=None
        )
        shard = None if torch.compiler.is_compiling() else self.request.shard
        return LinearStatistics.apply(
            self.hidden,
            self.weight,
            *self.request.tensors[1:],
            *(teacher.teacher_hidden, teacher.teacher_weight, teacher.teacher_bias),
            main_grad,
            grad_anchor,
            self.request._replace(
                tensors=None, order=None, shard=shard, teacher_head=without_tensors
            ),
            self.facts,
        )

    def _recompute_mode(self) -> str:
        """The mode as its log line says it."""
        if self.facts.epilogue:
            return "recompute with epilogues"
        reason = epilogue.obstacle(
            self.hidden, self.weight, self.facts.dtype, self.request, self.linear
        )
        return (
            "recompute"
            if reason == epilogue.NOT_MEASURED
            else f"recompute by blocks of logits, because {reason}"
        )

    def one_sweep_tokens(self) -> int:
        """Tokens of a block, the same on all ranks; 0 if the budget has no room (a ValueError if
        mode says so)."""
        linear, request = self.linear, self.request
        sizes = self.facts.sizes(self.hidden.shape, self.hidden.dtype, request.facts)
        planner = blocks.one_sweep_tokens
        weight_bytes, forced = 4 * sizes.width * sizes.hidden, linear.mode == "one_sweep"
        own = weight_bytes if linear.main_grad and linear.upstream is None else 0
        min_sums = weight_bytes if forced and (own or sizes.weight_sums) else 0
        tokens = blocks.planned(planner, sizes, linear.budget, min_sums, own)
        if tokens is None and forced:
            raise ValueError(blocks.refusal(planner, sizes, linear.budget, own))
        if linear.mode == "auto" and linear.budget is None:
            of_share = blocks.planned(planner, sizes, free_share(self.hidden.device), 0, own)
            return max(tokens or 0, of_share or 0)
        return tokens or 0


@constant_for_compile
@functools.cache
def free_share(device: torch.device) -> int:
    """Return the bytes that mode "auto" takes without asking: a sixteenth of a GPU's memory, which
    is rounded down to a power of two before, so that all GPUs of one kind, and so all ranks, have
    the same. CPUs: none, because nobody knows who else is there."""
    if device.type != "cuda":
        return 0
    total = torch.cuda.get_device_properties(device).total_memory
    return 1 << total.bit_length() - 1 >> 4


def _expect_options_of_a_linear_head(given: Given):
    """Raise ValueError for options that need logits, or another layout of the arguments."""
    linear, options = given.linear, given.options
    if options.inplace:
        raise ValueError(
            "inplace=True overwrites logits, and a linear head has none of the caller's"
        )
    if options.gradient == "forward":
        raise ValueError(
            "gradient='forward' is for logits; the gradients of hidden states come from one sweep"
        )
    operand_dtype(given.hidden, given.weight)
    if linear.main_grad:
        expect_main_grad(given.weight)
    if given.bias is not None and given.transform.bias is not None:
        raise ValueError("bias was given twice, and in the transform")
    expect_sequence(given.hidden, linear.hidden_grad)


def _linear_facts(
    dtype: torch.dtype, weight, linear: Linear, request: Request, has_epilogue: bool
) -> LinearFacts:
    """Everything static about a call besides its request's facts. dtype: of the operands."""
    head = request.teacher_head
    is_rounded = not linear.exact_logits
    in_operands_dtype = is_rounded or has_epilogue or dtype.itemsize != 2
    return LinearFacts(
        dtype=dtype,
        budget=linear.budget or 0,
        weight_sums=weight.dtype.itemsize == 2 and not linear.main_grad,
        epilogue=has_epilogue,
        rounded=is_rounded,
        logits_dtype=dtype if in_operands_dtype else torch.float32,
        hidden_grad=linear.hidden_grad if request.facts.world_size > 1 else "none",
        teacher_bytes=0 if head.teacher_hidden is None else head.block_dtype.itemsize,
    )


def expect_main_grad(weight):
    """Raise ValueError unless a weight that requires a gradient has Megatron's memory for it."""
    main_grad, got, strides = getattr(weight, "main_grad", None), None, ()
    if main_grad is not None:
        got, strides = (
            (main_grad.dtype, list(main_grad.shape), main_grad.device),
            main_grad.stride(),
        )
    fits = main_grad is not None and main_grad.is_contiguous()
    fits = fits and got == (torch.float32, list(weight.shape), weight.device)
    if weight.requires_grad and not fits:
        raise ValueError(
            f"main_grad=True needs weight.main_grad, fp32, contiguous, {list(weight.shape)} on "
            f"{weight.device}, got {got}, strides {strides}"
        )


_logged_modes: set[str] = set()


def log_mode(mode: str):
    """Log the mode of a call, the first time at INFO, then at DEBUG."""
    if not torch.compiler.is_compiling():
        _log.log(logging.DEBUG if mode in _logged_modes else logging.INFO, "linear head: %s", mode)
        _logged_modes.add(mode)
