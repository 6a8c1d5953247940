"""Divergences from a teacher's whole distribution, in the same pass as everything else, against float64."""

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


def rows(dtype=torch.float32):
    generator = torch.Generator().manual_seed(4)
    x = (2 * torch.randn(N, V, generator=generator)).to(dtype)
    t = (2 * torch.randn(N, V, generator=generator)).to(dtype)
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
    """What is differentiated of values by name, per token: none of the total variation where p = q, as its sign is
    rounding, and none of a reverse KL that is infinite."""
    g = torch.linspace(-1, 2, N).to(values["forward_kl"])
    row = torch.arange(N, device=g.device)
    reverse = values["reverse_kl"].masked_fill(row == 6, 0.0)
    variation = values["total_variation"].masked_fill(row == 4, 0.0)
    shares = g * values["forward_kl"] + g.flip(0) * reverse + values["jsd"] - g * variation
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
    (grad,) = torch.autograd.grad(torch.where(valid, objective(values | others | {"reverse_kl": finite}), 0.0).sum(), z)
    return {name: torch.where(valid, x.detach(), 0.0) for name, x in values.items()}, grad


def statistics_run(group, device, kind, dtype, with_labels, backend):
    x, t, labels, _ = rows(dtype)
    of_teacher, of_student, rest = temperatures(kind, device)
    shard = hl.VocabShard.from_group(group, V, 256)
    local, teacher = (F.pad(z, (0, 56), value=40.0)[:, shard.start : shard.stop].clone().to(device) for z in (x, t))
    local.requires_grad_()
    with counted_collectives() as events:
        stats = hl.vocab_statistics(
            local, labels.to(device) if with_labels else None, shard=shard, want=(*FULL_TEACHER, "entropy"),
            transform=hl.Transform(temperature=rest), teacher=hl.Teacher(teacher, of_teacher, of_student, BETA),
            options=hl.Options(backend=backend, transport="gather"),
        )  # fmt: skip
    values = {name: x for name, x in stats._asdict().items() if name in (*FULL_TEACHER, "entropy", "log_prob")}
    values = {name: x for name, x in values.items() if x is not None}
    grad = torch.autograd.grad(objective(values).sum(), local)[0]
    return [values[name].detach() for name in FULL_TEACHER], grad, sum(events.values())


@pytest.mark.parametrize("kind", TEMPERATURES)
@pytest.mark.parametrize("world_size, with_labels", [(1, True), (1, False), (2, True), (3, True), (4, True)])
def test_divergences_and_gradients_equal_float64(world_size, kind, with_labels, backend):
    x, t, labels, _ = rows()
    want, grad = truth(x.double().requires_grad_(), t.double(), kind, labels if with_labels else None)
    results = on_ranks(world_size, statistics_run, kind, torch.float32, with_labels, backend)
    for values, _, collectives in results:
        assert collectives == (2 if world_size > 1 else 0)  # the second one of the JSD and the total variation
        for name, value, first in zip(FULL_TEACHER, values, results[0][0]):
            assert torch.equal(value, first) and (value >= 0).all(), name
            torch.testing.assert_close(value.double(), want[name], rtol=3e-6, atol=3e-6, msg=name)
    assert want["reverse_kl"][6] == torch.inf  # the student has what the teacher rules out
    assert (want["forward_kl"][4] < 3e-6) == (TEMPERATURES[kind][1] is None)
    got = torch.cat([grad for _, grad, _ in results], 1)
    assert grad.isfinite().all() and grad.abs().max() > 0.1
    torch.testing.assert_close(got[:, :V].double(), grad, rtol=3e-5, atol=3e-7)
    assert not got[:, V:].any()
    if backend == "triton" and world_size in (2, 4):  # shards of whole chunks: the same bits at every size
        values, alone, _ = on_ranks(1, statistics_run, kind, torch.float32, with_labels, backend)[0]
        assert all(map(torch.equal, values, results[0][0])) and torch.equal(got, alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_lose_only_their_own_rounding(dtype, backend, device):
    x, t, _, _ = rows(dtype)
    want, expected = truth(x.double().requires_grad_(), t.double(), "apart")
    values, grad, _ = statistics_run(None, device, "apart", dtype, False, backend)
    for name, value in zip(FULL_TEACHER, values):
        torch.testing.assert_close(value.double().cpu(), want[name], rtol=3e-6, atol=3e-6)
    rounded = expected.to(dtype).double()
    torch.testing.assert_close(grad[:, :V].double().cpu(), rounded, rtol=2.0**-7, atol=2.0**-22)


def test_gradcheck_of_the_float64_path():
    x, t, labels, _ = rows(torch.float64)
    keep = [0, 1, 4]
    t, labels = t[keep], labels[keep]
    teacher = hl.Teacher(t, 2.0, torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64))

    def values(z):
        stats = hl.vocab_statistics(z, labels, want=WANT, teacher=teacher, options=hl.Options(backend="torch"))
        return stats.forward_kl, stats.reverse_kl, stats.log_prob

    assert torch.autograd.gradcheck(values, x[keep].requires_grad_(), rtol=1e-5, atol=1e-7)


def head_run(group, device, backend, transport):
    x, t, labels, _ = rows()
    shard = hl.VocabShard.from_group(group, V, 256)
    local, teacher = (F.pad(z, (0, 56))[:, shard.start : shard.stop].clone().to(device) for z in (x, t))
    local.requires_grad_()
    head = hl.HeadLoss(
        [hl.CrossEntropy(0.5), hl.ZLoss(1e-3), hl.Entropy(0.01), hl.Distillation(0.7, temperature_squared=True),
         hl.Distillation(0.2, "cross_entropy")],
        metrics=("accuracy", "forward_kl", "teacher_entropy"),
        options=hl.Options(backend=backend, transport=transport),
    )  # fmt: skip
    with counted_collectives() as forward:
        out = head(local, labels.to(device), shard=shard, inputs={"teacher": hl.Teacher(teacher, 2.0)})
    with counted_collectives() as backward:
        out.loss.backward()
    counts = sum(forward.values()), sum(backward.values())
    return out.loss.detach(), local.grad, out.terms, out.metrics, counts


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_mix_of_terms_with_distillation_costs_one_collective(world_size, backend):
    x, t, labels, _ = rows(torch.float64)
    z = x.requires_grad_()
    forward, _, teacher_entropy, *_ = divergences(z / 2, t / 2, BETA).values()
    log_p, valid = z.log_softmax(-1), labels != -100
    finite = torch.where(log_p == -torch.inf, -1e9, log_p)
    entropy = -(finite.exp() * finite).sum(-1)
    parts = {
        "cross_entropy": -log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0],
        "z_loss": z.logsumexp(-1) ** 2,
        "entropy": -entropy,
        "forward_kl": 4 * forward,
        "teacher_cross_entropy": forward + teacher_entropy,
    }
    parts = {name: value[valid].sum() for name, value in parts.items()}
    loss = sum(w * value for w, value in zip((0.5, 1e-3, 0.01, 0.7, 0.2), parts.values())) / valid.sum()
    (grad,) = torch.autograd.grad(loss, z)
    results = on_ranks(world_size, head_run, backend, "gather")
    for ours, _, terms, metrics, counts in results:
        torch.testing.assert_close(ours.double(), loss.detach(), rtol=3e-6, atol=0)
        for name, value in parts.items():
            torch.testing.assert_close(terms[name].double(), value.detach(), rtol=3e-6, atol=1e-5, msg=name)
        torch.testing.assert_close(metrics["forward_kl"].double(), forward[valid].sum().detach(), rtol=3e-6, atol=0)
        torch.testing.assert_close(metrics["teacher_entropy"].double(), teacher_entropy[valid].sum(), rtol=3e-6, atol=0)
        assert counts == (int(world_size > 1), 0)
    got = torch.cat([result[1] for result in results], 1)
    torch.testing.assert_close(got[:, :V].double(), grad, rtol=3e-5, atol=1e-7)


def test_chunks_of_several_tiles_follow_their_maxima(backend, device):
    """4200 ids: a chunk is two tiles and a part of one; the maxima move from tile to tile, the label's tile waits."""
    v, generator = 4200, torch.Generator().manual_seed(6)
    x, t = (2 * torch.randn(5, v, generator=generator) for _ in range(2))
    ramp = (torch.arange(v) % 528 // 256).float()  # rises by 4 from tile to tile of a chunk, or falls
    x += 4 * ramp * torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0])[:, None]
    t += 4 * ramp * torch.tensor([1.0, -1.0, -1.0, 1.0, 0.0])[:, None]
    labels = torch.tensor([5, 300, 4199, 1056, 528])
    z = x.double().requires_grad_()
    want = divergences(z / 3, t.double() / 2, 0.5)
    logits = x.to(device).requires_grad_()
    stats = hl.vocab_statistics(
        logits, labels.to(device), want=tuple(want), teacher=hl.Teacher(t.to(device), 2.0, 3.0),
        options=hl.Options(backend=backend),
    )  # fmt: skip
    for name, truth in want.items():
        torch.testing.assert_close(getattr(stats, name).double().cpu(), truth.detach(), rtol=3e-6, atol=3e-6, msg=name)
    for name in ("forward_kl", "reverse_kl", "jsd", "total_variation"):
        (grad,) = torch.autograd.grad(getattr(stats, name).sum(), logits, retain_graph=True)
        (expected,) = torch.autograd.grad(want[name].sum(), z, retain_graph=True)
        torch.testing.assert_close(grad.double().cpu(), expected, rtol=1e-4, atol=3e-7, msg=name)


def test_log_probs_are_as_good_as_logits_and_the_teacher_is_never_written(backend, device):
    x, t, _, _ = rows()
    x, t = x.to(device), t.to(device).requires_grad_()
    kept = t.detach().clone()
    outs = []
    for teacher in (t, t.detach().log_softmax(-1)):
        local = x.clone().requires_grad_()
        stats = hl.vocab_statistics(
            local, want=("forward_kl",), teacher=hl.Teacher(teacher), options=hl.Options(backend=backend)
        )
        outs.append((stats.forward_kl.detach(), torch.autograd.grad(stats.forward_kl.sum(), local)[0]))
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-6)
    assert t.grad is None and torch.equal(t, kept)


def test_odd_teachers(backend, device):
    """A token whose teacher is NaN, +inf or nowhere is NaN in its divergences alone; other tokens are untouched."""
    x, t, labels, _ = (v.to(device) if isinstance(v, torch.Tensor) else v for v in rows())
    good = hl.vocab_statistics(x, labels, want=WANT, teacher=hl.Teacher(t), options=hl.Options(backend=backend))
    t = t.clone()
    t[0, 3], t[1, 3], t[7] = torch.nan, torch.inf, -torch.inf
    t[2] = torch.nan  # ignored
    x[8, 3], t[8, 3] = -torch.inf, 1.0  # the student rules out what the teacher has
    stats = hl.vocab_statistics(x, labels, want=WANT, teacher=hl.Teacher(t), options=hl.Options(backend=backend))
    for name in WANT:
        value = getattr(stats, name)
        assert value[[0, 1, 7]].isnan().all() and value[2] == 0
        assert torch.equal(value[[3, 4, 5, 6]], getattr(good, name)[[3, 4, 5, 6]])
    assert stats.forward_kl[8] == torch.inf and stats.reverse_kl[8].isfinite()
    assert torch.equal(stats.log_prob[:8], good.log_prob[:8])


def test_shapes_layouts_and_sequences(backend, device):
    """[S, B, V] transposed, a teacher of other strides and another dtype, no tokens."""
    torch.manual_seed(1)
    x = torch.randn(5, 3, 64, device=device).transpose(0, 1).requires_grad_()
    t = torch.randn(3, 5, 80, device=device).bfloat16()[..., 8:72]
    options = hl.Options(backend=backend)
    stats = hl.vocab_statistics(x, want=("forward_kl",), teacher=hl.Teacher(t, 2.0), options=options)
    want = divergences(*(z.detach().double().flatten(0, 1) / 2 for z in (x, t)), 0.5)["forward_kl"]
    torch.testing.assert_close(stats.forward_kl.double().flatten(), want, rtol=1e-5, atol=1e-6)
    labels = torch.zeros(3, 5, dtype=torch.long, device=device)
    inputs = {"teacher": hl.Teacher(t, 2.0), "sequences": hl.Sequences.from_mask(labels == 0)}
    out = hl.HeadLoss([hl.Distillation()], reduction="seq-mean-token-mean", options=options)(x, labels, inputs=inputs)
    torch.testing.assert_close(out.loss.double(), want.mean(), rtol=1e-5, atol=0)
    empty = hl.vocab_statistics(x[:0], want=WANT, teacher=hl.Teacher(t[:0]), options=options)
    assert empty.forward_kl.shape == (0, 5)


def test_what_cannot_work_is_refused():
    """What tests/helpers/odd_inputs.py has not."""
    x, want = torch.randn(3, 8), ("forward_kl",)
    for message, given in {
        "student_temperature must have shape": {"teacher": hl.Teacher(x, 1.0, torch.ones(2))},
        "teacher.logits must be one of": {"teacher": hl.Teacher(x.double())},
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            hl.vocab_statistics(x, want=want, **given)
    with pytest.raises(ValueError, match=r"missing \['teacher'\]"):
        hl.HeadLoss(metrics=want)(x, torch.zeros(3, dtype=torch.long))
