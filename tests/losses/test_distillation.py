"""Divergences from a teacher's whole distribution, in the same pass as everything else, against
float64."""

import pytest
import torch
import torch.nn.functional as F
from collectives import counted_collectives
from oracle import divergences
from ranks import on_ranks
from topk_oracle import BETA, column

import tp_headloss as hl
from tp_headloss.statistics import FULL_TEACHER

WANT = ("forward_kl", "reverse_kl", "teacher_entropy")
V, N = 200, 9  # of 256 padded columns
TEMPERATURES = {  # of the teacher, of the student, of the other losses
    "one": (1.0, None, 1.0),
    "shared": (2.0, None, 2.0),
    "apart": (2.0, 3.0, 0.7),
    "tokens": (True, 1.7, 1.0),
    "all tokens": (True, True, True),
}


def rows():
    generator = torch.Generator().manual_seed(4)
    x, t = (2 * torch.randn(N, V, generator=generator) for _ in range(2))
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[2] = -100
    x[3, labels[3]] = 30.0  # far above the rest, which is all that the running maximum knows
    t[4] = x[4]  # nothing to learn
    x[5, 7] = t[5, 7] = -torch.inf  # 0 log 0
    t[6, ::2] = -torch.inf
    return x, t, labels, [torch.rand(N, generator=generator) + 0.7 for _ in range(3)]


def temperatures(kind, device="cpu"):
    drawn = [value.to(device) for value in rows()[3]]
    return [value if given is True else given for given, value in zip(TEMPERATURES[kind], drawn)]


def objective(values):
    """What is differentiated of values by name, per token: none of the total variation and the
    overlap where p = q, as the sign is rounding, and none of a reverse KL that is infinite."""
    g = torch.linspace(-1, 2, N).to(values["forward_kl"])
    row = torch.arange(N, device=g.device)
    reverse = values["reverse_kl"].masked_fill(row == 6, 0.0)
    variation = values["total_variation"].masked_fill(row == 4, 0.0)
    overlap = values["overlap"].masked_fill(row == 4, 0.0)
    shares = g * values["forward_kl"] + g.flip(0) * reverse + values["jsd"] - g * variation
    shares = shares + g.flip(0) * overlap
    return shares + 0.3 * values["entropy"] + 0.5 * values.get("log_prob", 0.0)


def truth(z, t, kind, labels=None):
    """Values by name in float64, and d / dz of the objective's sum over valid tokens."""
    of_teacher, of_student, rest = map(column, temperatures(kind))
    student, teacher = z / (of_teacher if of_student is None else of_student), t / of_teacher
    values = divergences(student, teacher, BETA)
    log_p = (z / rest).log_softmax(-1)
    log_p = torch.where(log_p == -torch.inf, -1e9, log_p)
    others = {"entropy": -(log_p.exp() * log_p).sum(-1)}
    valid = torch.ones(N, dtype=torch.bool) if labels is None else labels != -100
    if labels is not None:
        others["log_prob"] = log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    finite = divergences(student, teacher.index_fill(0, torch.tensor(6), 0.0), BETA)["reverse_kl"]
    (grad,) = torch.autograd.grad(
        torch.where(valid, objective(values | others | {"reverse_kl": finite}), 0.0).sum(), z
    )
    return {name: torch.where(valid, x.detach(), 0.0) for name, x in values.items()}, grad


def statistics_run(group, device, kind, with_labels, backend):
    x, t, labels, _ = rows()
    of_teacher, of_student, rest = temperatures(kind, device)
    shard = hl.VocabShard.from_group(group, V, 256)
    local, teacher = (
        F.pad(z, (0, 56), value=40.0)[:, shard.start : shard.stop].clone().to(device)
        for z in (x, t)
    )
    local.requires_grad_()
    with counted_collectives() as events:
        stats = hl.vocab_statistics(
            local, labels.to(device) if with_labels else None, shard=shard, want=(*FULL_TEACHER, "entropy"),
            transform=hl.Transform(temperature=rest), teacher=hl.Teacher(teacher, of_teacher, of_student, BETA),
            options=hl.Options(backend=backend, transport="gather"),
        )  # fmt: skip
    values = {
        name: x
        for name, x in stats._asdict().items()
        if name in (*FULL_TEACHER, "entropy", "log_prob")
    }
    values = {name: x for name, x in values.items() if x is not None}
    grad = torch.autograd.grad(objective(values).sum(), local)[0]
    return [values[name].detach() for name in FULL_TEACHER], grad, sum(events.values())


@pytest.mark.parametrize("kind", TEMPERATURES)
@pytest.mark.parametrize(
    "world_size, with_labels", [(1, True), (1, False), (2, True), (3, True), (4, True)]
)
def test_divergences_and_gradients_equal_float64(world_size, kind, with_labels, backend):
    x, t, labels, _ = rows()
    want, grad = truth(
        x.double().requires_grad_(), t.double(), kind, labels if with_labels else None
    )
    results = on_ranks(world_size, statistics_run, kind, with_labels, backend)
    for values, _, collectives in results:
        # the second one of the JSD and the total variation
        assert collectives == (2 if world_size > 1 else 0)
        for name, value, first in zip(FULL_TEACHER, values, results[0][0]):
            assert torch.equal(value, first) and (value >= 0).all(), name
            torch.testing.assert_close(value.double(), want[name], rtol=3e-6, atol=3e-6, msg=name)
    assert want["reverse_kl"][6] == torch.inf  # the student has what the teacher rules out
    assert (want["forward_kl"][4] < 3e-6) == (TEMPERATURES[kind][1] is None)
    got = torch.cat([grad for _, grad, _ in results], 1)
    assert grad.isfinite().all() and grad.abs().max() > 0.1
    torch.testing.assert_close(got[:, :V].double(), grad, rtol=3e-5, atol=3e-7)
    assert not got[:, V:].any()
    # shards of whole chunks: the same bits at every size
    if backend == "triton" and world_size in (2, 4):
        values, alone, _ = on_ranks(1, statistics_run, kind, with_labels, backend)[0]
        assert all(map(torch.equal, values, results[0][0])) and torch.equal(got, alone)


def test_chunks_of_several_tiles_follow_their_maxima(options, device):
    """4200 ids: a chunk is two tiles and a part of one; the maxima move from tile to tile, the
    label's tile waits."""
    v, generator = 4200, torch.Generator().manual_seed(6)
    x, t = (2 * torch.randn(5, v, generator=generator) for _ in range(2))
    # rises by 4 from tile to tile of a chunk, or falls
    ramp = (torch.arange(v) % 528 // 256).float()
    x += 4 * ramp * torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0])[:, None]
    t += 4 * ramp * torch.tensor([1.0, -1.0, -1.0, 1.0, 0.0])[:, None]
    labels = torch.tensor([5, 300, 4199, 1056, 528])
    z = x.double().requires_grad_()
    want = divergences(z / 3, t.double() / 2, 0.5)
    logits = x.to(device).requires_grad_()
    stats = hl.vocab_statistics(
        logits, labels.to(device), want=tuple(want), teacher=hl.Teacher(t.to(device), 2.0, 3.0),
        options=options,
    )  # fmt: skip
    for name, truth in want.items():
        torch.testing.assert_close(
            getattr(stats, name).double().cpu(), truth.detach(), rtol=3e-6, atol=3e-6, msg=name
        )
    for name in ("forward_kl", "reverse_kl", "jsd", "total_variation"):
        (grad,) = torch.autograd.grad(getattr(stats, name).sum(), logits, retain_graph=True)
        (expected,) = torch.autograd.grad(want[name].sum(), z, retain_graph=True)
        torch.testing.assert_close(grad.double().cpu(), expected, rtol=1e-4, atol=3e-7, msg=name)


def test_shapes_layouts_and_sequences(options, device):
    """[S, B, V] transposed, a teacher of other strides and another dtype, no tokens."""
    torch.manual_seed(1)
    x = torch.randn(5, 3, 64, device=device).transpose(0, 1).requires_grad_()
    t = torch.randn(3, 5, 80, device=device).bfloat16()[..., 8:72]
    stats = hl.vocab_statistics(
        x, want=("forward_kl",), teacher=hl.Teacher(t, 2.0), options=options
    )
    want = divergences(*(z.detach().double().flatten(0, 1) / 2 for z in (x, t)), 0.5)["forward_kl"]
    torch.testing.assert_close(stats.forward_kl.double().flatten(), want, rtol=1e-5, atol=1e-6)
    labels = torch.zeros(3, 5, dtype=torch.long, device=device)
    inputs = {"teacher": hl.Teacher(t, 2.0), "sequences": hl.Sequences.from_mask(labels == 0)}
    out = hl.HeadLoss([hl.Distillation()], reduction="seq-mean-token-mean", options=options)(
        x, labels, inputs=inputs
    )
    torch.testing.assert_close(out.loss.double(), want.mean(), rtol=1e-5, atol=0)
    empty = hl.vocab_statistics(x[:0], want=WANT, teacher=hl.Teacher(t[:0]), options=options)
    assert empty.forward_kl.shape == (0, 5)


def test_what_cannot_work_is_refused():
    """What tests/helpers/odd_inputs.py has not."""
    x, want = torch.randn(3, 8), ("forward_kl",)
    for message, given in {
        "student_temperature must have shape": {"teacher": hl.Teacher(x, 1.0, torch.ones(2))},
        "teacher.logits must be one of": {"teacher": hl.Teacher(x.double())},
        "teacher.logits must have shape": {"teacher": hl.Teacher(x[1:])},
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            hl.vocab_statistics(x, want=want, **given)
    with pytest.raises(ValueError, match=r"missing \['teacher'\]"):
        hl.HeadLoss(metrics=want)(x, torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize("linear", [False, True], ids=["logits", "head"])
def test_a_student_in_the_place_of_its_teacher_is_refused(linear):
    """torch's error would come from the backward: an element without a grad_fn."""
    x, weight, labels = torch.randn(3, 8), torch.randn(8, 8), torch.zeros(3, dtype=torch.long)
    head = hl.HeadLoss([hl.Distillation()])
    call = (
        (lambda z, **given: head.linear(z, weight, labels, **given))
        if linear
        else (lambda z, **given: head(z, labels, **given))
    )
    trained = x.clone().requires_grad_()
    for teacher in (hl.Teacher(trained), *[hl.TeacherHead(trained, weight)] * linear):
        given = {"inputs": {"teacher": teacher}}
        with pytest.raises(ValueError, match=r"are they swapped\? .* Teacher\(logits.detach\(\)\)"):
            call(x, **given)
        with torch.no_grad():
            call(x, **given)
        call(trained, **given).loss.backward()
        assert trained.grad is not None


@pytest.mark.parametrize(
    "made",
    [
        lambda x: hl.Teacher(x),
        lambda x: hl.TopKTeacher(torch.arange(6).view(2, 3), x.log_softmax(-1)),
        lambda x: hl.TeacherHead(x, torch.ones(5, 3)),
    ],
)
def test_teachers_are_equal_to_themselves_alone(made):
    """Tensors of theirs have no one truth, for which torch would raise."""
    first, second = made(torch.ones(2, 3)), made(torch.ones(2, 3))
    assert first == first and first != second and len({first, second, first}) == 2
