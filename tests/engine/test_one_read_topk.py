"""One read beside a top-K teacher: divergences over its entries, all ids or with the tail, and their
gradients."""

import math

import pytest
import torch
from one_read_problem import (
    IGNORED,
    IN_BACKWARD,
    IN_FORWARD,
    entries_beside,
    expect_alike,
    moved,
    problem,
    steps,
)

import tp_headloss as hl
from tp_headloss.engine.reductions import StatisticValue

on_hopper = pytest.mark.cuda  # the GPU tests run where the kernel does
KL = hl.TopKDistillation
SUPPORTS = "topk", "vocabulary", "tail"
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0, 0.25])
TAUGHT = {
    **{support: {"terms": (KL(1.0, support=support),)} for support in SUPPORTS},
    "cross-entropy": {
        "terms": (hl.CrossEntropy(0.5), KL(0.5, support="vocabulary")),
        "metrics": ("accuracy",),
    },
    "all": {
        "terms": (
            hl.CrossEntropy(0.5, 0.1),
            hl.Entropy(-0.1),
            hl.ZLoss(0.01),
            KL(0.5, support="tail"),
        ),
        "metrics": ("accuracy", "entropy"),
        "token_weight": WEIGHTS,
        "upstream": 0.3,
    },
    "two supports": {"terms": (KL(0.3), KL(0.7, support="tail", name="other"))},
    "squared": {"terms": (hl.Term("own", StatisticValue("vocab_forward_kl", square=True), 0.2),)},
    "a squared tail": {"terms": (hl.Term("own", StatisticValue("tail_log_mass", square=True)),)},
    "metrics": {
        "terms": (hl.CrossEntropy(),),
        "metrics": ("topk_forward_kl", "vocab_forward_kl", "tail_log_mass"),
    },
    "a softcap": {
        "terms": (hl.CrossEntropy(), KL(0.5, support="tail")),
        "transform": hl.Transform(softcap=9.0, scale=1.5),
    },
    "a temperature squared": {
        "terms": (hl.CrossEntropy(), KL(0.5, support="vocabulary", temperature_squared=True)),
        "transform": hl.Transform(temperature=2.0),
        "student_temperature": 2.0,
    },
}


def taught(case, device, logits, n_entries, **fields):
    """The arguments of a case with a top-K teacher."""
    given = {name: moved(x, device) for name, x in TAUGHT[case].items()}
    fields |= {"student_temperature": given.pop("student_temperature", None)}
    teacher = hl.TopKTeacher(*entries_beside(logits, n_entries), renormalize=False, **fields)
    return given | {"inputs": {"teacher": teacher}}


def noise_of(logits):
    """Roundings of parts of the gradient [N, width] that may cancel."""
    return 4e-6 * (logits.float().softmax(-1).nan_to_num().amax(-1, keepdim=True) + 1e-3)


# each compiles kernels of both ways again
MANY = "vocabulary", "tail", "all", "a softcap"
SHAPES = [(case, 704, 5) for case in TAUGHT]
SHAPES += [(case, width, k) for case in MANY for width, k in ((8, 3), (1000, 128), (704, 33))]
SHAPES += [(case, width, 64) for case in ("vocabulary", "all") for width in (32064, 128256)]
DTYPES = {32064: torch.float32, 1000: torch.float16}


@on_hopper
@pytest.mark.parametrize("case, width, n_entries", SHAPES)
def test_entries_are_read_beside_the_student(case, width, n_entries, device):
    logits, labels = problem(device, width)
    logits = logits.to(DTYPES.get(width, torch.bfloat16))
    logits[4, 1::3] = -30
    given = taught(case, device, logits, n_entries)
    noise = noise_of(logits) + (2**-24 if logits.dtype == torch.float16 else 0)
    one, two = (steps(options, logits, labels, **given) for options in (IN_FORWARD, IN_BACKWARD))
    expect_alike(one, two, noise)


@on_hopper
@pytest.mark.parametrize("support", SUPPORTS)
def test_a_label_is_an_entry_or_in_the_tail(support, device):
    """Of a row each; the others are ignored, alone in the tail, or one of all ids."""
    logits, labels = problem(device, 64)
    ids, log_probs = entries_beside(logits, 60)
    labels[:3] = torch.stack([ids[0, 7], ids[1, 59], ids[2, 0]])
    missing = [set(range(64)) - set(row.tolist()) for row in ids]
    labels[4:] = torch.tensor([min(missing[4]), max(missing[5])])
    teacher = hl.TopKTeacher(ids, log_probs, renormalize=False)
    given = {"terms": (hl.CrossEntropy(0.5), KL(support=support)), "inputs": {"teacher": teacher}}
    one, two = (steps(options, logits, labels, **given) for options in (IN_FORWARD, IN_BACKWARD))
    expect_alike(one, two, noise_of(logits))


@on_hopper
@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("upstream, width", [(1.0, 704), (0.5, 32064), (0.0, 704)])
def test_a_late_gradient_knows_the_entries(upstream, width, support, device):
    logits, labels = problem(device, width)
    heads = [
        hl.HeadLoss([hl.CrossEntropy(), KL(support=support)], options=options)
        for options in (IN_FORWARD, IN_BACKWARD)
    ]
    for seed in range(4):
        entries = entries_beside(logits, 7, seed)
        given = {"inputs": {"teacher": hl.TopKTeacher(*entries, renormalize=False)}}
        found = []
        for head in heads:
            x = logits.clone().requires_grad_()
            out = head(x, labels, **given)
            ((upstream + seed % 2) * out.loss).backward()
            found.append((out, x.grad))
        expect_alike(*found, noise_of(logits))


@on_hopper
@pytest.mark.parametrize("support", SUPPORTS)
def test_a_gradient_is_written_over_the_logits(support, device):
    logits, labels = problem(device, 32064)
    given = {"inputs": {"teacher": hl.TopKTeacher(*entries_beside(logits, 64), renormalize=False)}}
    found = []
    for options in (hl.Options(gradient="forward", inplace=True), IN_BACKWARD):
        x = logits.clone().requires_grad_()
        head = hl.HeadLoss([hl.CrossEntropy(), KL(support=support)], options=options)
        out = head(1 * x, labels, **given)
        out.loss.backward()
        found.append((out, x.grad))
    expect_alike(*found, noise_of(logits))


@on_hopper
@pytest.mark.parametrize("support", SUPPORTS)
def test_odd_entries_are_those_of_two_launches(support, device):
    """Masked ones, duplicates, ids beyond the vocabulary, NaN, logits of -inf."""
    logits, labels = problem(device, n_rows=9)
    ids, log_probs = entries_beside(logits, 6)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0], mask[1, ::2] = False, False
    ids[2, 1], ids[3, 0], log_probs[4, 2] = ids[2, 0], logits.shape[1] + 3, math.nan
    log_probs[5, :3] = -math.inf
    logits[6, ids[6]], logits[7, ids[7, :2]] = -math.inf, -math.inf
    teacher = hl.TopKTeacher(ids, log_probs, mask, renormalize=False)
    given = {"terms": (hl.CrossEntropy(), KL(support=support)), "inputs": {"teacher": teacher}}
    one, two = (steps(options, logits, labels, **given) for options in (IN_FORWARD, IN_BACKWARD))
    for name, a, b in zip(one[0].stats._fields, one[0].stats, two[0].stats):
        if isinstance(a, torch.Tensor):
            assert torch.allclose(a.float(), b.float(), rtol=1e-5, atol=1e-5, equal_nan=True), name
    assert torch.equal(one[1].isnan(), two[1].isnan())
    a, b = one[1].float().nan_to_num(), two[1].float().nan_to_num()
    assert torch.allclose(a, b, rtol=2**-6, atol=1e-5)


@on_hopper
@pytest.mark.parametrize("width, size", [(704, 700), (151936, 151665)])
def test_padding_beside_entries_has_no_part(width, size, device):
    logits, labels = problem(device, width)
    entries = entries_beside(logits[:, :size], 64)
    logits[:, size:] = math.nan
    labels = torch.where(labels == IGNORED, IGNORED, labels % size)
    teacher = hl.TopKTeacher(*entries, renormalize=False)
    given = {"inputs": {"teacher": teacher}, "terms": [hl.CrossEntropy(), KL(support="tail")]}
    given["shard"] = hl.VocabShard(0, width, size)
    one, two = (steps(options, logits, labels, **given) for options in (IN_FORWARD, IN_BACKWARD))
    expect_alike(one, two, noise_of(logits[:, :size]))
    assert not one[1][:, size:].any()


REFUSED = {
    "a reverse KL": ({"terms": [KL(1.0, "reverse_kl")]}, {}, "got terms of .'topk_reverse_kl'"),
    "a JSD with a tail": (
        {"terms": [KL(1.0, "jsd", "tail")]},
        {},
        "no statistics but .*'tail_log_mass'.* got .'vocab_jsd'.",
    ),
    "many entries": ({}, {"n_entries": 129}, "at most 128 entries of a top-K teacher, got 129"),
    "another temperature": ({}, {"student_temperature": 2.0}, "the student keeps its temperature"),
    "a known tail": (
        {"terms": [KL(support="tail")]},
        {"tail_log_prob": -1.0},
        "a teacher whose tail is what its entries leave",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_one_read_lacks_is_said(case, device):
    definition, fields, expected = REFUSED[case]
    definition = {"terms": [KL()]} | definition
    logits, labels = problem(device)
    fields = dict(fields)
    entries = entries_beside(logits, fields.pop("n_entries", 5))
    if "tail_log_prob" in fields:
        fields["tail_log_prob"] = torch.full(labels.shape, -1.0, device=device)
    teacher = hl.TopKTeacher(*entries, renormalize=False, **fields)
    head = hl.HeadLoss(**definition, options=IN_FORWARD)
    with pytest.raises(ValueError, match=expected):
        head(logits.requires_grad_(), labels, inputs={"teacher": teacher})


def test_a_renormalised_teacher_has_no_tail(device):
    logits, labels = problem(device)
    teacher = hl.TopKTeacher(*entries_beside(logits, 5))
    head = hl.HeadLoss([hl.CrossEntropy(), KL(support="tail")])
    with pytest.raises(ValueError, match="renormalize=False, got True"):
        head(logits.requires_grad_(), labels, inputs={"teacher": teacher})
