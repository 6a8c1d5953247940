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
    moved,
    problem,
    steps,
    teacher_beside,
)

import tp_headloss as hl
from tp_headloss.engine.reductions import StatisticValue

on_hopper = pytest.mark.cuda  # the GPU tests run where the kernel does
KL = hl.Distillation
DIVERGENCES = "forward_kl", "reverse_kl", "jsd", "total_variation"
OF_TEACHER = *DIVERGENCES, "teacher_entropy"
TEMPERATURES = torch.tensor([0.7, 1.0, 2.0, 1.3, 0.5, 3.0])
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
    "JSD and cross-entropy to it": {"terms": (KL(0.3, "cross_entropy"), KL(0.7, "jsd"))},
    "JSD": {"terms": (KL(1.0, "jsd"),)},
    "JSD and all": {
        "terms": (hl.CrossEntropy(0.5, 0.1), hl.Entropy(-0.1), KL(0.5, "jsd")),
        "metrics": ("accuracy", "entropy", "forward_kl"),
        "token_weight": torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0, 0.25]),
        "upstream": 0.3,
    },
    "JSD and both": {"terms": (KL(0.3), KL(0.7, "reverse_kl"), KL(0.5, "jsd"))},
    "JSD squared": {"terms": (hl.Term("own", StatisticValue("jsd", square=True), 0.2),)},
    "JSD, a metric": {"terms": (hl.CrossEntropy(),), "metrics": ("jsd",)},
    "JSD in a function": {
        "terms": (
            hl.PolicyGradient("clip", clip=(0.2, 0.28)),
            hl.Term("own", lambda stats: stats.jsd.sqrt(), want=("jsd",), pointwise=True),
        ),
        "inputs": {name: POLICY[name] for name in ("advantages", "old_log_prob")},
    },
    "JSD at another temperature": {
        "terms": (hl.CrossEntropy(), KL(0.5, "jsd", temperature_squared=True)),
        "transform": hl.Transform(softcap=9.0),
        "temperature": 2.0,
    },
    "JSD at temperatures": {
        "terms": (KL(1.0, "jsd"),),
        "transform": hl.Transform(temperature=TEMPERATURES),
        "temperature": TEMPERATURES,
    },
    "total variation": {
        "terms": (hl.CrossEntropy(0.5), KL(0.5, "total_variation")),
        "metrics": ("accuracy",),
    },
    "total variation at another temperature": {
        "terms": (KL(1.0, "total_variation"),),
        "temperature": 2.0,
    },
}


def taught(case, device, logits, dtype=None):
    """The arguments of a case with a teacher, whose logits have the dtype, or the student's."""
    given = {name: moved(x, device) for name, x in TAUGHT[case].items()}
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


# each compiles kernels of both ways again
MANY = (
    *("all", "reverse KL", "another temperature, both", "temperatures beside it"),
    *("JSD", "JSD and all", "JSD at another temperature", "total variation"),
    "cross-entropy to it at another temperature",
)
WIDTHS = [(case, width) for case in TAUGHT for width in (704, 1000)]
WIDTHS += [(case, width) for case in MANY for width in (8, 32064, 128256)]
DTYPES = {  # of student and teacher
    8: (torch.float16, torch.float16),
    704: (torch.bfloat16, torch.bfloat16),
    1000: (torch.float16, torch.float32),
    32064: (torch.float32, torch.float32),
    128256: (torch.bfloat16, torch.float32),
}


@on_hopper
@pytest.mark.parametrize("case, width", WIDTHS)
def test_a_teacher_is_read_beside_the_student(case, width, device):
    dtype, of_teacher = DTYPES[width]
    logits, labels = problem(device, width)
    logits, labels[4] = logits.to(dtype), 0
    logits[4, 1::3] = -30
    given = taught(case, device, logits, of_teacher)
    noise = taught_noise(logits, given) + (2**-24 if dtype == torch.float16 else 0)
    one, two = (steps(options, logits, labels, **given) for options in (IN_FORWARD, IN_BACKWARD))
    expect_alike(one, two, noise)


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
