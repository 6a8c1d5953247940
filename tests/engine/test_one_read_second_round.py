"""One read of a teacher beside the student with a second round: Jensen-Shannon divergence and total
variation."""

import pytest
import torch
from one_read_problem import POLICY
from teacher_problem import KL, TEMPERATURES, expect_a_teacher_read_beside_the_student

import tp_headloss as hl
from tp_headloss.engine.reductions import StatisticValue

on_hopper = pytest.mark.cuda  # the GPU tests run where the kernel does
MIXED = {
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
    "LK": {"terms": (hl.CrossEntropy(0.1), hl.LKLoss(eta=2.0)), "temperature": 2.0},
    "LK and the rate": {"terms": (hl.LKLoss(0.5),), "metrics": (hl.AcceptanceRate(),)},
    "LK, alpha": {"terms": (hl.LKLoss(0.5, "alpha"),), "temperature": 2.0},
    "LK, alpha, and the rate": {
        "terms": (hl.CrossEntropy(), hl.LKLoss(0.5, "alpha")),
        "metrics": (hl.AcceptanceRate(),),
    },
    "overlap, and total variation squared": {
        "terms": (
            hl.Term("overlap", StatisticValue("overlap"), -0.5),
            hl.Term("variation", StatisticValue("total_variation", square=True), 0.2),
        ),
    },
}
# each compiles kernels of both ways again
MANY = "JSD", "JSD and all", "JSD at another temperature", "total variation", "LK, alpha"
WIDTHS = [(case, width) for case in MIXED for width in (704, 1000)]
WIDTHS += [(case, width) for case in MANY for width in (8, 32064, 128256)]


@on_hopper
@pytest.mark.parametrize("case, width", WIDTHS)
def test_a_teacher_is_read_beside_the_student(case, width, device):
    expect_a_teacher_read_beside_the_student(MIXED[case], width, device)
