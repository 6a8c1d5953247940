"""One read of a teacher beside the student: divergences and their gradients."""

import math

import pytest
import torch
from one_read_problem import (
    IGNORED,
    IN_BACKWARD,
    IN_FORWARD,
    POLICY,
    expect_alike,
    problem,
    steps,
    teacher_beside,
)
from teacher_problem import (
    KL,
    TEMPERATURES,
    expect_a_teacher_read_beside_the_student,
    taught_noise,
)

import tp_headloss as hl
from tp_headloss.engine.reductions import StatisticValue

on_hopper = pytest.mark.cuda  # the GPU tests run where the kernel does
DIVERGENCES = "forward_kl", "reverse_kl", "jsd", "total_variation"
OF_TEACHER = *DIVERGENCES, "teacher_entropy"
TAUGHT = {
    "forward KL": {"terms": (KL(),)},
    "cross-entropy": {"terms": (hl.CrossEntropy(0.5), KL(0.5)), "metrics": ("accuracy",)},
    "all": {
        "terms": (hl.CrossEntropy(0.5, 0.1), hl.Entropy(-0.1), KL(0.5)),
        "metrics": ("accuracy", "entropy"),
        "token_weight": torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0, 0.25]),
        "upstream": 0.3,
    },
    "squared": {"terms": (hl.Term("own", StatisticValue("forward_kl", square=True), 0.2),)},
    "a metric": {"terms": (hl.CrossEntropy(),), "metrics": ("forward_kl",)},
    "a metric of a policy": {
        "terms": (hl.PolicyGradient("clip", clip=(0.2, 0.28)),),
        "metrics": ("forward_kl",),
        "inputs": {name: POLICY[name] for name in ("advantages", "old_log_prob")},
    },
    "reverse KL": {"terms": (KL(1.0, "reverse_kl"),)},
    "reverse KL and all": {
        "terms": (hl.CrossEntropy(0.5, 0.1), KL(0.5, "reverse_kl")),
        "metrics": ("accuracy", "entropy", "forward_kl"),
        "token_weight": torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0, 0.25]),
        "upstream": 0.3,
    },
    "both": {"terms": (KL(0.3), KL(0.7, "reverse_kl")), "metrics": ("accuracy",)},
    "another temperature": {"terms": (hl.CrossEntropy(), KL()), "temperature": 2.0},
    "another temperature, reverse KL": {"terms": (KL(1.0, "reverse_kl"),), "temperature": 0.7},
    "another temperature, both": {
        "terms": (hl.CrossEntropy(), KL(0.3), KL(0.7, "reverse_kl"), hl.Entropy(-0.1)),
        "transform": hl.Transform(softcap=9.0),
        "temperature": 3.0,
    },
    "temperatures beside it": {
        "terms": (hl.CrossEntropy(), KL(0.3), KL(0.7, "reverse_kl")),
        "transform": hl.Transform(temperature=TEMPERATURES),
        "temperature": 2.0,
    },
    "temperatures of both": {
        "terms": (KL(),),
        "transform": hl.Transform(temperature=TEMPERATURES),
        "temperature": TEMPERATURES,
    },
    "squared temperatures": {
        "terms": (hl.CrossEntropy(), KL(0.5, temperature_squared=True)),
        "temperature": 2.0,
    },
    "squared temperatures per token": {
        "terms": (hl.CrossEntropy(), KL(0.5, "reverse_kl", temperature_squared=True)),
        "temperature": TEMPERATURES,
    },
    "a temperature": {
        "terms": (KL(),),
        "transform": hl.Transform(temperature=2.0),
        "temperature": 2.0,
    },
    "temperatures of the student": {
        "terms": (KL(),),
        "transform": hl.Transform(temperature=2.0, scale=1.5),
        "temperature": 0.5,
    },
    "a scale": {"terms": (KL(), hl.ZLoss(0.01)), "transform": hl.Transform(scale=0.5)},
    "a softcap": {"terms": (KL(), hl.ZLoss(0.01)), "transform": hl.Transform(softcap=9.0)},
    "cross-entropy to it": {"terms": (hl.CrossEntropy(0.5), KL(0.5, "cross_entropy"))},
    "cross-entropy to it at another temperature": {
        "terms": (KL(0.5, "cross_entropy", temperature_squared=True), KL(0.5, "reverse_kl")),
        "transform": hl.Transform(softcap=9.0),
        "temperature": 2.0,
    },
    "its entropy, a metric": {"terms": (hl.CrossEntropy(),), "metrics": ("teacher_entropy",)},
}
# each compiles kernels of both ways again
MANY = (
    *("all", "reverse KL", "another temperature, both", "temperatures beside it"),
    "cross-entropy to it at another temperature",
)
WIDTHS = [(case, width) for case in TAUGHT for width in (704, 1000)]
WIDTHS += [(case, width) for case in MANY for width in (8, 32064, 128256)]


@on_hopper
@pytest.mark.parametrize("case, width", WIDTHS)
def test_a_teacher_is_read_beside_the_student(case, width, device):
    expect_a_teacher_read_beside_the_student(TAUGHT[case], width, device)


@on_hopper
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("upstream", [1.0, 0.5, 0.0])
def test_a_late_gradient_knows_the_teacher(upstream, divergence, device):
    logits, labels = problem(device)
    terms = [KL(1.0, divergence)]
    heads = [hl.HeadLoss(terms, options=options) for options in (IN_FORWARD, IN_BACKWARD)]
    for seed in range(4):
        teacher = teacher_beside(logits, seed)
        # none is -inf, and no probability that of the student, on whose sign a gradient depends
        teacher[2] = 0.9 * logits[2].roll(seed + 1)
        given = {"inputs": {"teacher": hl.Teacher(teacher, 1.0 + seed % 3)}}
        found = []
        for head in heads:
            x = logits.clone().requires_grad_()
            out = head(x, labels, **given)
            ((upstream + seed % 2) * out.loss).backward()
            found.append((out, x.grad))
        expect_alike(*found, taught_noise(logits, given))


@on_hopper
@pytest.mark.parametrize(
    "divergence, is_metric",
    [*((name, False) for name in DIVERGENCES), *((name, True) for name in OF_TEACHER)],
)
def test_odd_teachers_are_those_of_two_launches(divergence, is_metric, device):
    logits, labels = problem(device, n_rows=9)
    teacher = teacher_beside(logits)
    teacher[0], teacher[3, 5], teacher[4, 7], teacher[5] = -torch.inf, torch.nan, torch.inf, -3e38
    logits[6, :50], logits[7] = -torch.inf, -torch.inf
    terms = [hl.CrossEntropy()] if is_metric else [hl.CrossEntropy(), KL(1.0, divergence)]
    metrics = (divergence,) if is_metric else ()
    given = {"terms": terms, "metrics": metrics, "inputs": {"teacher": hl.Teacher(teacher)}}
    one, two = (steps(options, logits, labels, **given) for options in (IN_FORWARD, IN_BACKWARD))
    for name in (divergence, "log_prob", "lse"):
        a, b = (getattr(out.stats, name) for out in (one[0], two[0]))
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True), name
    assert torch.equal(one[1].isnan(), two[1].isnan())
    both = [2, 8]
    assert torch.allclose(
        one[1][both].float(), two[1][both].float(), rtol=2**-6, atol=1e-5, equal_nan=True
    )


@on_hopper
@pytest.mark.parametrize("width, size", [(704, 700), (1024, 700), (151936, 151665)])
def test_a_teachers_padding_has_no_part(width, size, device):
    logits, labels = problem(device, width)
    teacher = teacher_beside(logits)
    for x in (logits, teacher):
        x[:, size:] = math.nan
    labels = torch.where(labels == IGNORED, IGNORED, labels % size)
    given = {"inputs": {"teacher": hl.Teacher(teacher)}, "terms": [hl.CrossEntropy(), KL()]}
    given["shard"] = hl.VocabShard(0, width, size)
    one, two = (steps(options, logits, labels, **given) for options in (IN_FORWARD, IN_BACKWARD))
    noise = 1e-5 * logits[:, :size].float().softmax(-1).nan_to_num().amax(-1, keepdim=True)
    expect_alike(one, two, noise)
    assert not one[1][:, size:].any()
