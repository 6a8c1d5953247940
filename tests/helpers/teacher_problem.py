"""Calls with a whole teacher's logits beside the student's, for one read and two launches."""

import torch
from one_read_problem import (
    IN_BACKWARD,
    IN_FORWARD,
    expect_alike,
    moved,
    problem,
    steps,
    teacher_beside,
)

import tp_headloss as hl

KL = hl.Distillation
TEMPERATURES = torch.tensor([0.7, 1.0, 2.0, 1.3, 0.5, 3.0])
DTYPES = {  # of student and teacher
    8: (torch.float16, torch.float16),
    704: (torch.bfloat16, torch.bfloat16),
    1000: (torch.float16, torch.float32),
    32064: (torch.float32, torch.float32),
    128256: (torch.bfloat16, torch.float32),
}


def taught(case, device, logits, dtype=None):
    """The arguments of a case with a teacher, whose logits have the dtype, or the student's."""
    given = {name: moved(x, device) for name, x in case.items()}
    beside = teacher_beside(logits) if dtype is None else teacher_beside(logits.to(dtype))
    teacher = hl.Teacher(beside, given.pop("temperature", 1.0))
    return given | {"inputs": {"teacher": teacher} | given.get("inputs", {})}


def taught_noise(logits, given):
    """Roundings of the probabilities [N, width] whose differences may cancel: of the student, of it
    beside the teacher, and of the teacher."""
    teacher, transform = given["inputs"]["teacher"], given.get("transform", hl.Transform())
    z = logits.float() * transform.scale
    if transform.softcap:
        z = transform.softcap * (z / transform.softcap).tanh()
    own, other = (
        torch.as_tensor(t, device=z.device) for t in (transform.temperature, teacher.temperature)
    )
    own, other = (t.reshape(-1, 1) for t in (own, other))
    parts = z / own, z / other, teacher.logits.float() / other
    p = sum(x.softmax(-1).nan_to_num() for x in parts)
    return 2e-6 * (p + 1 / z.shape[1]) * transform.scale / min(own.min(), other.min())


def expect_a_teacher_read_beside_the_student(case, width, device):
    """The case's results by one read are those of two launches."""
    dtype, of_teacher = DTYPES[width]
    logits, labels = problem(device, width)
    logits, labels[4] = logits.to(dtype), 0
    logits[4, 1::3] = -30
    given = taught(case, device, logits, of_teacher)
    noise = taught_noise(logits, given) + (2**-24 if dtype == torch.float16 else 0)
    one, two = (steps(options, logits, labels, **given) for options in (IN_FORWARD, IN_BACKWARD))
    expect_alike(one, two, noise)
