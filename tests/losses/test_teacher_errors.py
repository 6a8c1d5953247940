"""Errors about teachers name the teacher, and say what to write."""

import itertools
import math

import pytest
import torch
from ranks import on_ranks

import tp_headloss as hl
from tp_headloss.engine.reductions import StatisticValue
from tp_headloss.statistics import FULL_TEACHER, TOPK_TEACHER

N, V = 4, 8
LOGITS, LABELS = torch.randn(N, V), torch.arange(N)
SEVERAL = [hl.Teacher(LOGITS), hl.Teacher(LOGITS)]


@pytest.mark.parametrize("several", [SEVERAL, tuple(SEVERAL), SEVERAL * 2, []])
def test_several_teachers_of_a_call_are_an_error_that_says_two_ways(several):
    with pytest.raises(
        TypeError, match=f"one teacher, got {len(several)}: make a call for each, or"
    ):
        hl.HeadLoss([hl.Distillation()])(LOGITS, LABELS, inputs={"teacher": several})


@pytest.mark.parametrize(("whole", "topk"), [*itertools.product(FULL_TEACHER, TOPK_TEACHER)])
def test_a_loss_that_needs_two_kinds_of_teachers_is_not_made(whole, topk):
    terms = [hl.Term(x, StatisticValue(x), want=(x,), inputs=("teacher",)) for x in (whole, topk)]
    as_metrics = (terms[:1], [topk]), (None, [whole, topk])
    for arguments in ((terms, ()), *as_metrics):
        with pytest.raises(ValueError, match=r"must need one teacher.* make a HeadLoss for each"):
            hl.HeadLoss(arguments[0], metrics=arguments[1])
    hl.HeadLoss(terms[:1])


def test_terms_of_one_name_are_told_that_they_take_a_name():
    with pytest.raises(
        ValueError, match=r"\['forward_kl', 'forward_kl'\].* Distillation and .* take name="
    ):
        hl.HeadLoss([hl.Distillation(0.5), hl.Distillation(0.5)])


def test_a_tail_in_the_place_of_the_mask_is_told_its_name():
    with pytest.raises(TypeError, match=r"teacher.mask must be bool.* a tail as tail_log_prob="):
        hl.TopKTeacher(LABELS[:, None], LOGITS[:, :1], LOGITS[:, 0])


TOP = hl.topk_log_probs(LOGITS, 2)
ROWS = torch.randn(V, 3)
HIDDEN = torch.randn(N, 3)


def distilled(teacher, *terms, **given):
    head = hl.HeadLoss(list(terms) or [hl.Distillation()])
    return head(LOGITS, LABELS, inputs={"teacher": teacher}, **given)


def from_hidden(teacher):
    head = hl.HeadLoss([hl.Distillation()])
    return head.linear(HIDDEN, ROWS, LABELS, inputs={"teacher": teacher})


MISPLACED = {
    "a term": (lambda: hl.HeadLoss([hl.Teacher(LOGITS)]), "inputs={'teacher': ..}"),
    "a weight": (lambda: hl.Distillation(hl.Teacher(LOGITS)), "inputs={'teacher': ..}"),
    "to export": (
        lambda: hl.topk_log_probs(hl.Teacher(LOGITS, 2.0), 2),
        "its .logits, with transform=Transform(temperature=..)",
    ),
    "in a teacher": (lambda: hl.Teacher(hl.TeacherHead(HIDDEN, ROWS)), "inputs={'teacher': ..}"),
    "hidden states": (lambda: hl.Teacher(HIDDEN, ROWS), "TeacherHead(hidden, weight)"),
    "swapped": (lambda: from_hidden(hl.TeacherHead(ROWS, HIDDEN)), "TeacherHead(hidden, weight)"),
    "a temperature": (lambda: hl.TeacherHead(HIDDEN, ROWS, 2.0), "temperature= of"),
    "an export": (lambda: hl.TopKTeacher(TOP), "TopKTeacher(top.ids, top.log_probs)"),
    "its fields": (lambda: hl.TopKTeacher(*TOP), "TopKTeacher(top.ids, top.log_probs)"),
    "one column": (lambda: hl.Teacher(LOGITS, torch.full((N, 1), 2.0)), "pass its .reshape(4)"),
    "of no token": (lambda: hl.Teacher(LOGITS[0], torch.full((1,), 2.0)), "pass its .reshape(())"),
    "transposed": (lambda: distilled(hl.Teacher(LOGITS.T)), "transposed? Pass its .T"),
    "sequences transposed": (
        lambda: hl.HeadLoss([hl.Distillation()])(
            LOGITS[None], LABELS[None], inputs={"teacher": hl.Teacher(LOGITS.T[None])}
        ),
        "transposed? Pass its .transpose(-1, -2)",
    ),
    "entries": (
        lambda: distilled(hl.TopKTeacher(TOP.ids.T, TOP.log_probs.T), hl.TopKDistillation()),
        "transposed? Pass its .T",
    ),
    "hidden states for logits": (
        lambda: from_hidden(hl.Teacher(HIDDEN)),
        "to fit hidden states, got [4, 3]: hidden states of the teacher? Pass TeacherHead(hidden, w",
    ),
    "hidden states beside logits": (
        lambda: distilled(hl.Teacher(HIDDEN)),
        "to fit logits, got [4, 3]: hidden states of the teacher? Pass Teacher(F.linear(hidden, its",
    ),
    "a tail that nobody has": (
        lambda: distilled(
            hl.TopKTeacher(TOP.ids, TOP.log_probs, tail_log_prob=LOGITS[:, 0]),
            hl.TopKDistillation(support="tail"),
        ),
        "leaves no tail, got a tail_log_prob: pass renormalize=False with it",
    ),
    "no tail": (
        lambda: distilled(
            hl.TopKTeacher(TOP.ids, TOP.log_probs), hl.TopKDistillation(support="tail")
        ),
        "write TopKTeacher(.., tail_log_prob=.., renormalize=False)",
    ),
    "alone": (
        lambda: hl.HeadLoss([hl.Distillation()])(LOGITS, LABELS, inputs=hl.Teacher(LOGITS)),
        "a dict of inputs by name, or None, got Teacher: a loss takes it as inputs={'teacher': ..}",
    ),
    "sequences alone": (
        lambda: hl.HeadLoss()(LOGITS, LABELS, inputs=hl.Sequences.from_mask(LABELS[None] >= 0)),
        "or None, got Sequences: a loss takes them as inputs={'sequences': ..}",
    ),
    "sets alone": (
        lambda: hl.HeadLoss()(LOGITS, LABELS, inputs=hl.IdSets(LABELS[:, None])),
        "or None, got IdSets: a loss takes them as inputs={'sets': ..}",
    ),
    "losses for logits": (
        lambda: hl.HeadLoss()(LOGITS[:, 0], LABELS),
        "logits must be [*[4], V] for these labels, got [4]: of losses, or log-probs of the ",
    ),
    "fewer ids": (lambda: distilled(hl.Teacher(LOGITS[:, 1:])), "F.pad(.., (0, 1), value=-torch"),
    "saved": (lambda: hl.TopKTeacher(**TOP._asdict()), 'TopKTeacher(d["ids"], d["log_probs"], ..)'),
    "float64": (lambda: distilled(hl.Teacher(LOGITS.double())), "float64: pass its .float()"),
    "an array": (lambda: hl.Teacher(LOGITS.numpy()), "got ndarray: pass torch.from_numpy(..)"),
    "arrays": (
        lambda: hl.TopKTeacher(TOP.ids.numpy(), TOP.log_probs.numpy()),
        "got ndarray: pass torch.from_numpy(..)",
    ),
    "an array of temperatures": (
        lambda: hl.Teacher(LOGITS, LOGITS[:, 0].numpy()),
        "got ndarray: pass torch.from_numpy(..)",
    ),
    "of the call": (
        lambda: distilled(hl.Teacher(LOGITS), temperature=2.0),
        "Teacher(.., temperature=..)",
    ),
}


@pytest.mark.parametrize("case", MISPLACED)
def test_what_is_no_teacher_or_in_the_wrong_place_is_told_what_to_write(case):
    call, write = MISPLACED[case]
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert write in str(error.value)


def test_columns_without_a_shards_padding_are_no_hidden_states():
    """Even where most of the shard is padding: 3 columns of 8."""
    shard = hl.VocabShard.from_group(None, 3, padded_size=8)
    head, teacher = hl.HeadLoss([hl.Distillation()]), hl.Teacher(LOGITS[:, :3])
    with pytest.raises(ValueError, match=r"without the shard's padding\? Pass F.pad"):
        head(LOGITS, LABELS.clamp(max=2), shard=shard, inputs={"teacher": teacher})


def teacher_of_the_whole_sequence(group, device):
    shard = hl.VocabShard.from_group(group, V)
    hidden, labels = torch.randn(2, 3), torch.arange(4)  # of 4 tokens, 2 on each rank
    rows = torch.randn(shard.width, 3)
    linear = hl.Linear(hidden_grad="reduce_scatter")
    inputs = {"teacher": hl.TeacherHead(torch.randn(4, 3), rows)}
    head = hl.HeadLoss([hl.Distillation()])
    with pytest.raises(ValueError) as error:
        head.linear(hidden, rows, labels, shard=shard, linear=linear, inputs=inputs)
    return str(error.value)


def test_a_teachers_whole_sequence_beside_parts_of_the_students_is_told_to_pass_a_part():
    for said in on_ranks(2, teacher_of_the_whole_sequence):
        assert said == (
            "teacher.hidden must be this rank's part [2, H_t], got [4, 3]: with "
            "hidden_grad='reduce_scatter' pass this rank's part of its first dimension"
        )


def own_share(stats, teacher):
    return stats.lse * (teacher.beta or 0.5)


READS_BETA = {
    "jsd": (hl.Distillation(1.0, "jsd"), False),
    "a metric": (hl.Distillation(), hl.Metric(lambda stats: {"js": stats.jsd}, want=("jsd",))),
    "a function of one's own": (
        hl.Term("own", own_share, want=("forward_kl",), inputs=("teacher",)),
        False,
    ),
    "topk_jsd": (hl.TopKDistillation(1.0, "jsd"), False),
    "vocab_jsd": (hl.TopKDistillation(1.0, "jsd", "vocabulary"), False),
}
IGNORES_BETA = {
    "forward_kl": hl.Distillation(),
    "squared": hl.Distillation(1.0, "reverse_kl", temperature_squared=True),
    "cross_entropy": hl.Distillation(1.0, "cross_entropy"),
    "total_variation": hl.Distillation(1.0, "total_variation"),
    "a draft": hl.LKLoss(),
    "entries": hl.TopKDistillation(),
    "entries, reverse": hl.TopKDistillation(1.0, "reverse_kl", "vocabulary"),
}


def teacher_for(term, beta):
    if any(name in TOPK_TEACHER for name in term.want):
        return hl.TopKTeacher(TOP.ids, TOP.log_probs, beta=beta)
    return hl.Teacher(LOGITS, beta=beta)


@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize("name", IGNORES_BETA)
def test_a_beta_that_nothing_reads_is_an_error(name, beta):
    term = IGNORES_BETA[name]
    assert distilled(teacher_for(term, None), term).loss.isfinite()
    with pytest.raises(ValueError, match=rf"beta is read by .*'jsd'.* got beta={beta} and none"):
        distilled(teacher_for(term, beta), term)


@pytest.mark.parametrize("name", READS_BETA)
def test_a_beta_is_a_half_by_default_where_something_reads_it(name):
    term, metric = READS_BETA[name]
    student = torch.randn(N, V, generator=torch.Generator().manual_seed(2))
    head = hl.HeadLoss([term], metrics=metric or ())
    losses = []
    for beta in (None, 0.5, 0.1):
        given = {"teacher": teacher_for(term, beta)}
        losses.append(float(head(student, LABELS, inputs=given).loss))
    assert losses[0] == losses[1]
    assert (losses[1] == losses[2]) == bool(metric)


IDS = 24
SIZES = 20, 24, 28, 32


def as_told(columns, shard):
    """Columns of a teacher after what the error says; None where it depends on what other ranks
    have, or on which ids these are."""
    said = shard.other_columns_hint(len(columns), has_rows=False)
    if ", if " in said or "Gather" in said:
        return None
    assert "Pass its [..., shard.start:shard.stop]" in said
    return columns[shard.start : shard.stop]


def wrong_advice(group, device=None):
    """Layouts of student and teacher in which the advice gives a teacher of other ids, and does not
    say on which ids that depends. A column's value is its id."""
    wrong = []
    for padded, ids, its_padded in itertools.product(SIZES[1:], SIZES, SIZES):
        shard = hl.VocabShard.from_group(group, IDS, padded_size=padded)
        whole = torch.arange(ids).float()
        its = hl.VocabShard.from_group(group, ids, padded_size=max(ids, its_padded))
        own = torch.nn.functional.pad(whole, (0, its.padded_size - ids))[its.start : its.stop]
        right = torch.full((IDS,), -math.inf)
        right[:ids] = whole[:IDS]
        right = right[shard.start : shard.start + shard.valid_width]
        for columns in (whole, own, own[: its.valid_width]):
            has_ids = (
                len(columns) <= its.valid_width or ids >= IDS
            )  # and not padding in their place
            if len(columns) == shard.width or not has_ids:
                continue  # nothing is said, or known
            found = as_told(columns, shard)
            if found is not None and not torch.equal(found[: len(right)], right[: len(found)]):
                wrong.append((padded, ids, its_padded, len(columns)))
    return wrong


def test_columns_of_another_number_are_told_what_is_right_whatever_they_are():
    assert wrong_advice(None) == []
    assert on_ranks(2, wrong_advice) == [[], []]


def test_a_wide_weight_of_a_teacher_is_told_how_to_lay_it_out():
    teacher = hl.TeacherHead(torch.randn(N, 3), torch.randn(V + 8, 3))
    head = hl.HeadLoss([hl.Distillation()])
    with pytest.raises(ValueError, match=r"teacher.weight .*select_rows\(rows, ids, .* to=shard\)"):
        head.linear(torch.randn(N, 3), torch.randn(V, 3), LABELS, inputs={"teacher": teacher})


def sharded(group, device, student, teacher):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(device.type, (2,))
    x = torch.ones(2, N, V, device=device)
    student, teacher = [distribute_tensor(x, mesh, [place]) for place in (student, teacher)]
    labels = torch.zeros(2, N, dtype=torch.int64, device=device)
    if student.placements[0] != Shard(2):
        labels = distribute_tensor(labels, mesh, student.placements)
    head = hl.HeadLoss([hl.Distillation()])
    return float(head(student, labels, inputs={"teacher": hl.Teacher(teacher)}).loss)


def placements():
    from torch.distributed.tensor import Replicate, Shard

    students = Shard(0), Shard(1), Shard(2)
    return list(itertools.product(students, (*students, Replicate())))


@pytest.mark.parametrize(("student", "teacher"), placements(), ids=str)
def test_a_dtensor_teacher_of_other_placements_is_named(student, teacher):
    results = on_ranks(2, sharded, student, teacher, failures=True)
    if student == teacher:
        assert results == [0.0, 0.0]
        return
    for failure in results:
        assert failure.kind == "ValueError", failure
        assert failure.message.startswith(("logits must be of the same", "teacher.logits must be"))
        assert "redistribute" in failure.message and "leave the shard out" not in failure.message


def test_columns_beside_other_tokens_have_no_advice_on_ids():
    teacher = hl.Teacher(LOGITS[:3, :-1])
    with pytest.raises(ValueError, match=r"to fit logits, got \[3, \d+\]$"):
        distilled(teacher)
