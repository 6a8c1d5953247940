"""Teachers that are heads: their checks, and what a linear head computes with in place of a teacher's logits."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from ..arguments.linear import Linear
from ..arguments.teachers import Teacher, TeacherHead, TeacherHeads
from ..call.request_of import LOGITS_DTYPES
from ..engine.request import TeacherOperands, TokenOrder
from ..validation import expect_tensor, operand_dtype


def heads_of(teacher, hidden, logits) -> tuple[TeacherHead, ...]:
    """The checked heads of a teacher, none for a teacher of another kind.

    hidden: the student's, for the layout of the tokens; logits: a stand-in for the student's [.., width].
    """
    if not isinstance(teacher, (TeacherHead, TeacherHeads)):
        return ()
    if isinstance(teacher, TeacherHead):
        _expect_head("teacher", teacher, hidden, logits)
        return (teacher,)
    expect_tensor("teacher.teacher_of_token", teacher.teacher_of_token, logits.shape[:-1], logits.device)
    for i, head in enumerate(teacher.heads):
        _expect_head(f"teacher.heads[{i}]", head, hidden, logits)
    dtypes = [operand_dtype(head.hidden, head.weight) for head in teacher.heads]
    if len(set(dtypes)) > 1:
        raise TypeError(f"the heads of TeacherHeads must have one dtype, got {[str(dtype) for dtype in dtypes]}")
    return tuple(teacher.heads)


def _expect_head(name: str, head: TeacherHead, hidden, logits):
    if head.weight.dim() != 2 or head.weight.shape[0] != logits.shape[-1]:
        raise ValueError(
            f"{name}.weight must have as many rows as the student's shard, [{logits.shape[-1]}, H], "
            f"got {list(head.weight.shape)}"
        )
    expect_tensor(f"{name}.hidden", head.hidden, (*hidden.shape[:-1], head.weight.shape[1]), logits.device)
    expect_tensor(f"{name}.weight", head.weight, device=logits.device)
    allowed = LOGITS_DTYPES + ((torch.float64,) if logits.dtype == torch.float64 else ())
    if (dtype := operand_dtype(head.hidden, head.weight, f"{name}: ")) not in allowed:
        raise TypeError(f"{name}.weight must be one of {[str(d) for d in allowed]}, got {dtype}")
    if (bias := head.whole_transform.bias) is not None:
        expect_tensor(f"{name}.bias", bias, logits.shape[-1:], logits.device)
    for field in ("temperature", "student_temperature"):
        if isinstance(x := getattr(head, field), torch.Tensor):
            expect_tensor(f"{name}.{field}", x, logits.shape[:-1], logits.device)


def stand_in(teacher, logits):
    """A `Teacher` for the checks and facts of a call, whose logits, an expanded scalar, are made later by blocks; any
    other teacher as it is.

    A block's logits lack the last factor, a softcap or else a scale, so the temperature has it.
    """
    if isinstance(teacher, TeacherHead):
        temperature, student = _effective_temperature(teacher), teacher.student_temperature_or_default
    elif isinstance(teacher, TeacherHeads):
        temperature = teacher.per_token([_effective_temperature(head) for head in teacher.heads], torch.nan)
        student, teacher = teacher.student_temperature_or_default, teacher.heads[0]
    else:
        return teacher
    return Teacher(logits, temperature, student, teacher.beta)


def _effective_temperature(head: TeacherHead):
    transform = head.whole_transform
    factor = transform.softcap or transform.scale
    return head.temperature if factor == 1 else head.temperature / factor


def teacher_operands(teacher, heads: tuple[TeacherHead, ...], order: TokenOrder, scattered: bool) -> TeacherOperands:
    """The heads' tensors by rows, detached. scattered: each rank has its own part of the hidden states."""

    def rows(x):
        x = x.detach()
        return x.reshape(-1, x.shape[-1]) if scattered else order.flatten(x)

    transforms = [head.whole_transform for head in heads]
    return TeacherOperands(
        tuple([rows(head.hidden) for head in heads]),
        tuple([head.weight.detach() for head in heads]),
        tuple([transform.bias for transform in transforms]),
        order.flatten(teacher.teacher_of_token) if isinstance(teacher, TeacherHeads) else None,
        operand_dtype(heads[0].hidden, heads[0].weight),
        tuple([transform.scale / transform.softcap if transform.softcap else 0.0 for transform in transforms]),
    )


def without_logits(teacher):
    """A teacher as terms see it: they read its temperatures, never its logits."""
    absent: Any = None
    if isinstance(teacher, Teacher):
        return replace(teacher, logits=absent)
    if isinstance(teacher, TeacherHead):
        return replace(teacher, hidden=absent)
    if isinstance(teacher, TeacherHeads):
        return replace(teacher, heads=tuple(map(without_logits, teacher.heads)))
    return teacher


def teacher_fact(teacher, linear: Linear, options):
    """Describe a teacher as ranks must agree on it, with hidden states by shape and dtype where these are too
    large to compare (without validate="checksums"), or where each rank has its own part of them."""
    if isinstance(teacher, TeacherHeads):
        heads = tuple(teacher_fact(head, linear, options) for head in teacher.heads)
        return {"type": "TeacherHeads", "heads": heads, "teacher_of_token": teacher.teacher_of_token}
    compared = options is not None and options.validate == "checksums" and linear.hidden_grad != "reduce_scatter"
    if not isinstance(teacher, TeacherHead) or compared or not isinstance(teacher.hidden, torch.Tensor):
        return teacher
    shape = list(teacher.hidden.shape), str(teacher.hidden.dtype)
    return {f.name: getattr(teacher, f.name) for f in fields(teacher)} | {"type": "TeacherHead", "hidden": shape}
