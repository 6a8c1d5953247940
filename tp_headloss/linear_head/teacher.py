"""A teacher that is a head: its checks, and what a linear head computes with in place of a
teacher's logits."""

from dataclasses import fields

import torch

from ..arguments.teachers import Teacher, TeacherHead, with_fields
from ..call.request_of import expect_as_student
from ..engine.request import TeacherOperands, TokenOrder
from ..spec import lines_within, sizes_of
from ..spec.checks import operand_dtype


def expect_teacher_head(head: TeacherHead, hidden, logits, shard, scattered: bool):
    """Raise TypeError or ValueError unless the head fits the student's.

    Args:
        hidden: the student's, for the layout of the tokens.
        logits: a stand-in for the student's [.., width].
        scattered: each rank has its own part of the hidden states.
    """
    if head.hidden.shape[:1] == (shard.width,) != head.weight.shape[:1]:
        raise ValueError(
            f"teacher.weight must have the shard's {shard.width} rows, got "
            f"{list(head.weight.shape)}: the order is TeacherHead(hidden, weight)"
        )
    lead = hidden.shape[:-1]
    if scattered and head.hidden.shape[:-1] == (lead[0] * shard.world_size, *lead[1:]) != lead:
        part = ", ".join(map(str, lead))
        raise ValueError(
            f"teacher.hidden must be this rank's part [{part}, H_t], got "
            f"{list(head.hidden.shape)}: with hidden_grad='reduce_scatter' pass this rank's part of "
            "its first dimension"
        )
    sizes = sizes_of("the student", hidden, lead, width=logits.shape[-1], shard=shard)
    for name, x in (
        ("weight", head.weight),
        ("hidden", head.hidden),
        ("bias", head.whole_transform.bias),
    ):
        lines_within(TeacherHead)[name].check(f"teacher.{name}", x, sizes)
    expect_as_student(
        "teacher.weight", operand_dtype(head.hidden, head.weight, "teacher: "), logits.dtype
    )


def stand_in(teacher, logits):
    """A `Teacher` for a call's checks and facts, whose logits, an expanded scalar, are made later;
    others as they are.

    A block's logits lack the last factor, a softcap or else a scale, so the temperature has it.
    """
    if not isinstance(teacher, TeacherHead):
        return teacher
    transform = teacher.whole_transform
    factor = transform.softcap or transform.scale
    temperature = teacher.temperature if factor == 1 else teacher.temperature / factor
    return Teacher(logits, temperature, teacher.student_temperature_or_default, teacher.beta)


def teacher_operands(
    head: TeacherHead, order: TokenOrder, scattered: bool, rounded: bool
) -> TeacherOperands:
    """The head's tensors by rows, detached.

    Args:
        scattered: each rank has its own part of the hidden states.
        rounded: so are logits, to the dtype of operands of half precision.
    """
    hidden, transform = head.hidden.detach(), head.whole_transform
    return TeacherOperands(
        hidden.reshape(-1, hidden.shape[-1]) if scattered else order.flatten(hidden),
        head.weight.detach(),
        transform.bias,
        operand_dtype(head.hidden, head.weight),
        transform.scale / transform.softcap if transform.softcap else 0.0,
        rounded,
    )


def without_logits(teacher):
    """A teacher as terms see it: they read its temperatures, never its logits."""
    if isinstance(teacher, Teacher):
        return with_fields(teacher, logits=None)
    if isinstance(teacher, TeacherHead):
        return with_fields(teacher, hidden=None)
    return teacher


def map_teacher_tensors(teacher, function):
    """Return the teacher with each tensor of tokens replaced by function(tensor)."""
    tensors = {
        f.name: x
        for f in fields(teacher)
        if isinstance(x := getattr(teacher, f.name), torch.Tensor)
    }
    if isinstance(teacher, TeacherHead):
        tensors = {name: x for name, x in tensors.items() if name not in ("weight", "bias")}
    return with_fields(teacher, **{name: function(x) for name, x in tensors.items()})
