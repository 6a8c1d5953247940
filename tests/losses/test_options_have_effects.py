"""An option of a term changes its loss, or is refused by its name: none is ignored in silence."""

import inspect
import itertools

import pytest
import torch

import tp_headloss as hl
from tp_headloss.head_loss.policy_terms import OBJECTIVES
from tp_headloss.spec import OneOf

B, S, V = 2, 6, 16
g = torch.Generator().manual_seed(0)
LOGITS, OTHERS = (2 * torch.randn(B, S, V, generator=g) for _ in range(2))
LABELS = torch.randint(V, (B, S), generator=g)
# signs of sequences: the clip bounds the one from above, the other from below
SIGN = torch.tensor([[1.0], [-1.0]])
ADVANTAGES = torch.randn(B, S, generator=g) + SIGN
NOISE = 3 * torch.randn(B, S, generator=g)
DISTANCES = NOISE - NOISE.mean(1, keepdim=True) + 0.3 * SIGN  # of recorded log-probs
OLD = hl.log_probs(LOGITS, LABELS).log_prob - DISTANCES
INPUTS = {
    "advantages": ADVANTAGES,
    "rewards": ADVANTAGES,
    "noise": torch.rand(B, S, generator=g),
    "sequences": hl.Sequences.from_mask(torch.ones(B, S, dtype=torch.bool)),
    "rollout_weight": 1 + torch.rand(B, S, generator=g),
    "rollout_log_weight": torch.randn(B, S, generator=g),
    **dict.fromkeys(("old_log_prob", "reference_log_prob", "generator_log_prob"), OLD),
    "sets": hl.IdSets(torch.stack([LABELS, (LABELS + 1) % V, (LABELS + 5) % V], -1)),
}
WHOLE = hl.Teacher(OTHERS, temperature=2.0)
ENTRIES = hl.topk_log_probs(OTHERS, 4)


def entries(support):
    given = ENTRIES.ids, ENTRIES.log_probs
    if support == "tail":
        return hl.TopKTeacher(*given, student_temperature=2.0, renormalize=False)
    return hl.TopKTeacher(*given, temperature=2.0)


# another value of each option than its default
OTHER = {
    "eta": 0.7,
    "outside_log_prob": -5.0,
    "temperature_squared": True,
    "label_smoothing": 0.3,
    "class_weight": torch.linspace(0.5, 2.0, V),
    "over": "sets",
    "importance_weight": "old",
    "input_clamp": 0.5,
    "output_clamp": 0.05,
    "rollout_weight": True,
    "rollout_log_weight": True,
    "clip": (0.01, 0.03),
    "dual_clip": 1.25,
    "log_ratio_clamp": 0.05,
    "convention": "bound",
    "temperatures": (0.5, 3.0),
    "shape": ((1.0, 2.0), (2.0, 1.0)),
    "fraction": 0.5,
    "bounds": (-9.0, 0.9),
    "coefficient": 3.0,
}
# options that go with another value of others
TOGETHER = {"convention": {"clip": (0.2, 1.5)}, "smoothing_formula": {"label_smoothing": 0.1}}
TERMS = hl.CrossEntropy, hl.Entropy, hl.Distillation, hl.LKLoss, hl.TopKDistillation
TERMS += hl.KLToReference, hl.PolicyGradient
OF_ALL = "weight", "name", "options"  # of any term


def choices_of(build) -> dict:
    """Options of a term that are one of several names."""
    named = {key: line for key, line in build.lines.items() if isinstance(line, OneOf)}
    return {
        key: line.names
        for key, line in named.items()
        if line.names != (True, False) and key not in OTHER
    }


def options_of(build, choice) -> list[str]:
    """Options of a term beside the choice; of an objective its function's, too."""
    names = [name for name in build.lines if name not in (*choice, *OF_ALL)]
    if build is hl.PolicyGradient:
        loss, inputs = OBJECTIVES[choice["objective"]]
        others = {"log_prob", "mask", *inputs, *OTHER_INPUTS}
        names += [name for name in loss.lines if name not in others]
    if build is hl.KLToReference:
        names += ["input_clamp", "output_clamp"]
    return names


OTHER_INPUTS = {"rollout_log_weight"}
CASES = [
    pytest.param(
        build, dict(zip(named, values)), option, id="-".join((build.__name__, *values, option))
    )
    for build in TERMS
    for named in [choices_of(build)]
    for values in itertools.product(*named.values())
    for option in options_of(build, dict(zip(named, values)))
]


def loss_of(build, choice, **options) -> torch.Tensor:
    required = {"weight": 1.0} if "weight" in inspect.signature(build).parameters else {}
    head = hl.HeadLoss(build(**required | choice | options))
    teacher = entries(choice.get("support")) if build is hl.TopKDistillation else WHOLE
    inputs = {**INPUTS, "teacher": teacher}
    needed = {name: inputs[name] for name in head.input_names}
    return head(LOGITS, LABELS, inputs=needed).loss


@pytest.mark.parametrize(("build", "choice", "option"), CASES)
def test_an_option_changes_the_loss_or_is_refused(build, choice, option):
    beside = TOGETHER.get(option, {})
    try:
        changed = loss_of(build, choice, **{option: OTHER[option]}, **beside)
    except (TypeError, ValueError) as error:
        assert option in str(error) and ", got " in str(error), error
        return
    try:
        usual = loss_of(build, choice, **beside)
    except ValueError as error:  # of what goes with the other value alone
        assert "clip" in str(error), error
        return
    assert changed.isfinite() and not torch.isclose(changed, usual, rtol=1e-5), (changed, usual)


def test_options_are_tried():
    found = {case.id for case in CASES}
    assert {"LKLoss-alpha-eta", "TopKDistillation-jsd-topk-outside_log_prob"} <= found
    assert {"KLToReference-k1-output_clamp", "PolicyGradient-cispo-convention"} <= found
