"""Distillation from K entries of a teacher per token, against float64 definitions over the whole
vocabulary."""

import math
import warnings

import oracle
import pytest
import torch
import torch.nn.functional as F
from collectives import counted_collectives
from ranks import on_ranks
from topk_oracle import BETA, column, definition

import tp_headloss as hl
from tp_headloss.head_loss.distillation_terms import TOPK_DISTILLATIONS
from tp_headloss.statistics import TOPK_TEACHER

V, N, K = 200, 10, 12  # of 256 padded columns
# as for whole teachers
TEMPERATURES = {"one": (1.0, None, 1.0), "apart": (2.0, 3.0, 0.7), "tokens": (True, True, True)}


def rows(k=K):
    """Student, labels, and entries: random ids with duplicates, sentinels, masked ones, all on one
    shard, none."""
    generator = torch.Generator().manual_seed(7)
    x = 2 * torch.randn(N, V, generator=generator)
    labels = torch.randint(0, V, (N,), generator=generator)
    log_q = (2 * torch.randn(N, V, generator=generator)).log_softmax(-1)
    ids = torch.rand(N, V, generator=generator).argsort(-1)[:, :k]
    log_probs = log_q.gather(1, ids)
    mask = torch.ones(N, k, dtype=torch.bool)
    labels[2] = -100
    x[4] += 200.0  # a shift that the differences do not see
    if k >= K:
        ids[3, 1:4] = ids[3, 0]  # one id, four times
        ids[5, 2:], log_probs[5, 3:5] = -1, -torch.inf
        mask[6, ::2] = False
        ids[6, 0] = 0  # padding that looks like an id
        # at few entries on one rank, whatever the number of ranks
        ids[7] = torch.arange(k) + 10 * (k < V)
        mask[8] = False  # nothing to learn
        x[9, ids[9, 0]] = 25.0  # nearly all of the student's probability
        labels[7] = 15  # an entry, too
    return (
        x,
        labels,
        ids,
        log_probs,
        mask,
        [torch.rand(N, generator=generator) + 0.7 for _ in range(3)],
    )


def settings(kind, support, device="cpu"):
    drawn = zip(TEMPERATURES[kind], rows()[-1])
    of_teacher, of_student, rest = (
        value.to(device) if given is True else given for given, value in drawn
    )
    if support == "tail":  # no temperature of the teacher without renormalisation
        return dict(
            of_teacher=1.0, of_student=1.0 if of_student is None else of_student, renormalize=False
        ), rest
    return dict(of_teacher=of_teacher, of_student=of_student, renormalize=True), rest


def beta_of(divergence):
    return BETA if divergence == "jsd" else None


def run(group, device, kind, divergence, support, backend, k=K, with_tail=False):
    x, labels, ids, log_probs, mask, _ = (
        v.to(device) if isinstance(v, torch.Tensor) else v for v in rows(k)
    )
    options, rest = settings(kind, support, device)
    shard = hl.VocabShard.from_group(group, V, 256)
    local = F.pad(x, (0, 56), value=40.0)[:, shard.start : shard.stop].clone().requires_grad_()
    teacher = hl.TopKTeacher(
        ids, log_probs, mask, temperature=options["of_teacher"], student_temperature=options["of_student"],
        renormalize=options["renormalize"], beta=beta_of(divergence),
        tail_log_prob=torch.linspace(-3, -1, N, device=device) if with_tail else None,
    )  # fmt: skip
    term = hl.TopKDistillation(0.7, divergence, support, temperature_squared=kind == "apart")
    options = hl.Options(backend=backend, transport="gather")
    head = hl.HeadLoss(
        [hl.CrossEntropy(0.5), hl.Entropy(0.01), term], reduction="none", options=options
    )
    with counted_collectives() as forward:
        out = head(
            local,
            labels,
            shard=shard,
            inputs={"teacher": teacher},
            transform=hl.Transform(temperature=rest),
        )
    with counted_collectives() as backward:
        (out.loss * torch.linspace(-1, 2, N, device=device)).sum().backward()
    return (
        out.loss.detach().cpu(),
        local.grad.cpu(),
        (sum(forward.values()), sum(backward.values())),
    )


def expected(kind, divergence, support, k=K, tail=None):
    x, labels, ids, log_probs, mask, _ = rows(k)
    options, rest = settings(kind, support)
    z = x.double().requires_grad_()
    value = definition(z, ids, log_probs, mask, divergence, support, tail=tail, **options)
    value = value * (
        9.0 if kind == "apart" and not isinstance(options["of_student"], torch.Tensor) else 1.0
    )
    log_p = (z / column(rest)).log_softmax(-1)
    ce = -log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    loss = torch.where(
        labels != -100, 0.5 * ce + 0.01 * (log_p.exp() * log_p).sum(-1) + 0.7 * value, 0.0
    )
    return loss.detach(), torch.autograd.grad((loss * torch.linspace(-1, 2, N).double()).sum(), z)[
        0
    ]


def check(results, loss, grad, world_size, collectives):
    for ours, _, counts in results:
        assert torch.equal(ours, results[0][0])
        torch.testing.assert_close(ours.double(), loss, rtol=2e-6, atol=2e-6)
        assert counts == (collectives if world_size > 1 else 0, 0)
    got = torch.cat([grad for _, grad, _ in results], 1)
    torch.testing.assert_close(got[:, :V].double(), grad, rtol=2e-5, atol=4e-7)
    assert not got[:, V:].any() and grad.abs().max() > 0.1


SOME = [("forward_kl", "tail"), ("reverse_kl", "vocabulary"), ("jsd", "vocabulary")]


@pytest.mark.parametrize(("kind", "largest"), [("one", 2), ("apart", 4), ("tokens", 3)])
@pytest.mark.parametrize(("divergence", "support"), TOPK_DISTILLATIONS)
def test_values_and_gradients_equal_float64(kind, largest, divergence, support, backend):
    loss, grad = expected(kind, divergence, support)
    for world_size in (1, largest) if backend == "torch" else (largest,):
        results = on_ranks(world_size, run, kind, divergence, support, backend)
        check(results, loss, grad, world_size, 2 if divergence == "jsd" else 1)


@pytest.mark.each_argument
@pytest.mark.parametrize(
    ("divergence", "support", "k"),
    [
        *(("forward_kl", "vocabulary", k) for k in (1, 3, 190, V)),
        *(case for k in (1, 3, V) for case in (("reverse_kl", "topk", k), ("jsd", "tail", k))),
    ],
)
def test_one_entry_nearly_all_and_all_of_the_vocabulary(k, divergence, support, backend, device):
    loss, grad = expected("one", divergence, support, k=k)
    check([run(None, device, "one", divergence, support, backend, k)], loss, grad, 1, 0)


@pytest.mark.parametrize(
    ("divergence", "support"), [("reverse_kl", "vocabulary"), ("forward_kl", "tail")]
)
def test_entries_in_several_tiles_of_a_chunk(divergence, support, options, device):
    """4200 ids: a chunk is two tiles and a part of one. The label's tile is read after those behind
    it, and entries are looked for in all of them."""
    v, generator = 4200, torch.Generator().manual_seed(8)
    x = 2 * torch.randn(4, v, generator=generator)
    x[:2] += 4 * (torch.arange(v) % 528 // 256)  # the maximum moves from tile to tile
    ids = torch.rand(4, v, generator=generator).argsort(-1)[:, :60]
    ids[:, :6] = torch.tensor([0, 5, 255, 256, 511, 512])  # the edges of tiles
    ids[:, 6:] = torch.where(ids[:, 6:] < 528, ids[:, 6:] + 528, ids[:, 6:])
    x[torch.arange(4)[:, None], ids[:, :6]] += 6  # where a missed one is seen
    log_probs = torch.randn(4, 60, generator=generator).log_softmax(-1) - 0.2
    labels = torch.tensor([3, 300, 4000, 514])
    expect_those_of_float64(x, labels, ids, log_probs, divergence, support, options, device)


@pytest.mark.parametrize(
    ("divergence", "support"),
    [("forward_kl", "vocabulary"), ("forward_kl", "tail"), ("jsd", "topk")],
)
def test_entries_that_all_lie_in_one_chunk(divergence, support, options, device):
    """More than are summed at once, and their maximum grows from block to block."""
    v, k, generator = 4200, 100, torch.Generator().manual_seed(9)
    x = torch.randn(3, v, generator=generator)
    x[:, :k] += torch.arange(k) / 10
    ids = torch.arange(k).repeat(3, 1)
    log_probs = torch.randn(3, k, generator=generator).log_softmax(-1) - 0.2
    labels = torch.tensor([3, 300, 4000])
    expect_those_of_float64(x, labels, ids, log_probs, divergence, support, options, device)


def expect_those_of_float64(x, labels, ids, log_probs, divergence, support, options, device):
    """Losses of a student at temperature 1.5, and their gradients."""
    settings = dict(of_teacher=1.0, of_student=1.5, renormalize=False)
    z, mask = x.double().requires_grad_(), torch.ones_like(ids, dtype=torch.bool)
    loss = definition(z, ids, log_probs, mask, divergence, support, **settings)
    teacher = hl.TopKTeacher(
        ids.to(device),
        log_probs.to(device),
        student_temperature=1.5,
        renormalize=False,
        beta=beta_of(divergence),
    )
    head = hl.HeadLoss(
        [hl.TopKDistillation(1.0, divergence, support)], reduction="none", options=options
    )
    logits = x.to(device).requires_grad_()
    ours = head(logits, labels.to(device), inputs={"teacher": teacher}).loss
    torch.testing.assert_close(ours.double().cpu(), loss.detach(), rtol=3e-6, atol=3e-6)
    ours.sum().backward()
    (expected,) = torch.autograd.grad(loss.sum(), z)
    torch.testing.assert_close(logits.grad.double().cpu(), expected, rtol=1e-4, atol=1e-6)


def test_a_given_tail_is_used_and_an_inferred_one_follows_from_the_entries(backend):
    tail = torch.linspace(-3, -1, N)
    for divergence in ("forward_kl", "reverse_kl", "jsd"):
        loss, grad = expected("one", divergence, "tail", tail=tail)
        results = on_ranks(2, run, "one", divergence, "tail", backend, K, True)
        check(results, loss, grad, 2, 2 if divergence == "jsd" else 1)
        assert not torch.allclose(loss, expected("one", divergence, "tail")[0])


# which has two exchanges, and with them all that merges
@pytest.mark.interpreted_only(divergence=("jsd",))
@pytest.mark.parametrize(("divergence", "support"), SOME)
def test_bits_are_the_same_at_every_group_size(divergence, support, backend):
    (loss, grad, _), *_ = on_ranks(1, run, "one", divergence, support, backend)
    for world_size in (2, 4):
        results = on_ranks(world_size, run, "one", divergence, support, backend)
        assert all(torch.equal(ours, loss) for ours, *_ in results)
        if backend == "triton":
            assert torch.equal(torch.cat([part for _, part, _ in results], 1), grad)


def round_trip_run(group, device, backend):
    """Export of a sharded teacher, then distillation from what was exported."""
    generator = torch.Generator().manual_seed(3)
    x, t = (torch.randn(2, 3, V, generator=generator) * 2 for _ in range(2))
    shard = hl.VocabShard.from_group(group, V, 256)
    local, teacher = (
        F.pad(z, (0, 56))[..., shard.start : shard.stop].clone().to(device) for z in (x, t)
    )
    local.requires_grad_()
    options = hl.Options(backend=backend)
    exported = hl.topk_log_probs(teacher, V, shard=shard, ids_dtype=torch.int32, options=options)
    few = hl.topk_log_probs(
        teacher, 20, top_p=0.5, shard=shard, dtype=torch.float16, options=options
    )
    labels = torch.zeros(2, 3, dtype=torch.long, device=device)
    out = []
    for term, given in (
        (hl.Distillation(), hl.Teacher(teacher)),
        (
            hl.TopKDistillation(support="vocabulary"),
            hl.TopKTeacher(exported.ids, exported.log_probs),
        ),
        (hl.TopKDistillation(support="vocabulary"), hl.TopKTeacher(few.ids, few.log_probs)),
    ):
        head = hl.HeadLoss([term], reduction="none", options=options)
        loss = head(local, labels, shard=shard, inputs={"teacher": given}).loss
        out.append((loss.detach(), torch.autograd.grad(loss.sum(), local)[0]))
    return out, few, t, x


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_a_teacher_exports_its_student_learns(world_size, backend):
    """All V entries are the whole teacher; the nucleus in half precision is the definition on what
    was exported."""
    for (whole, all_entries, nucleus), few, _, x in on_ranks(world_size, round_trip_run, backend):
        torch.testing.assert_close(all_entries, whole, rtol=1e-5, atol=1e-6)
        assert (few.ids == -1).any() and few.log_probs.dtype == torch.float16
        flat = (v.flatten(0, 1) for v in (x.double(), few.ids, few.log_probs.float(), few.ids >= 0))
        defined = definition(*flat, "forward_kl", "vocabulary")
        torch.testing.assert_close(nucleus[0].double().flatten(), defined, rtol=2e-6, atol=2e-6)


def confident_run(group, device, dtype, divergence, backend):
    """Distillation with the exported tail of a teacher whose few entries are nearly everything."""
    x, teacher = (v.float() for v in confident_rows())
    shard = hl.VocabShard.from_group(group, V, 256)
    local, teacher = (
        F.pad(z, (0, 56))[:, shard.start : shard.stop].clone().to(device) for z in (x, teacher)
    )
    options = hl.Options(backend=backend)
    top = hl.topk_log_probs(teacher, 4, shard=shard, dtype=dtype, options=options)
    given = hl.TopKTeacher(
        top.ids, top.log_probs, tail_log_prob=top.tail_log_prob, renormalize=False
    )
    head = hl.HeadLoss(
        [hl.TopKDistillation(1.0, divergence, "tail")], reduction="none", options=options
    )
    labels = torch.zeros(len(x), dtype=torch.long, device=device)
    local.requires_grad_()
    loss = head(local, labels, shard=shard, inputs={"teacher": given}).loss
    loss.sum().backward()
    return loss.detach(), local.grad, top.tail_log_prob


def confident_rows():
    """Student and teacher, float64; the teacher gives 1e-2 to 1e-8 to all but four ids."""
    generator = torch.Generator().manual_seed(12)
    x, teacher = torch.randn(2, 7, V, generator=generator, dtype=torch.float64)
    first = torch.rand(7, V, generator=generator).argsort(-1)[:, :4]
    gap = torch.linspace(7, 20, 7, dtype=torch.float64)[:, None]
    likely = teacher.scatter(1, first, gap + torch.tensor([3.0, 2.0, 1.0, 0.5]).double())
    return x, likely


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_exported_tail_of_a_confident_teacher_is_exact(world_size, divergence, dtype, backend):
    """The tail of 1 - the entries' would be rounding: for half precision losses are 2 % to 50 % off."""
    x, teacher = confident_rows()
    z = x.float().double().requires_grad_()
    log_q, log_p = teacher.float().double().log_softmax(-1), z.log_softmax(-1)
    ids = log_q.topk(4).indices
    log_q, log_p = (
        torch.cat([v.gather(1, ids), v.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)], 1)
        for v in (log_q, log_p)
    )
    gap = log_q - log_p
    loss = (log_q.exp() * gap if divergence == "forward_kl" else -log_p.exp() * gap).sum(-1)
    (grad,) = torch.autograd.grad(loss.sum(), z)
    bound = 2 * torch.finfo(dtype).eps + 2e-6
    results = on_ranks(world_size, confident_run, dtype, divergence, backend)
    for ours, _, tail in results:
        torch.testing.assert_close(tail.double(), log_q[:, -1], rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(ours.double(), loss, rtol=bound, atol=bound)
    got = torch.cat([part for _, part, _ in results], 1)[:, :V].double()
    torch.testing.assert_close(got, grad, rtol=0, atol=10 * bound)


def test_odd_entries(options, device):
    """An id beyond the vocabulary or a NaN makes its token's distillation NaN, and nothing else."""
    x, labels, ids, log_probs, mask, _ = (
        v.to(device) if isinstance(v, torch.Tensor) else v for v in rows()
    )
    want = ("topk_forward_kl", "topk_reverse_kl", "topk_log_mass", "topk_jsd", "entropy")
    good = hl.vocab_statistics(
        x, labels, want=want, teacher=hl.TopKTeacher(ids, log_probs, mask), options=options
    )
    ids, log_probs, x = ids.clone(), log_probs.clone(), x.clone()
    ids[0, 3], log_probs[1, 5], log_probs[3, 7] = V, torch.nan, torch.inf
    x[4, ids[4, 2]] = -torch.inf  # the student rules out an entry
    x[6, ids[6, 1::2]] = -torch.inf  # and here all of them
    stats = hl.vocab_statistics(
        x, labels, want=want, teacher=hl.TopKTeacher(ids, log_probs, mask), options=options
    )
    for name in want[:-1]:
        value = getattr(stats, name)
        assert value[[0, 1, 3]].isnan().all() and value[2] == 0, name
        torch.testing.assert_close(
            value[[5, 7, 8, 9]], getattr(good, name)[[5, 7, 8, 9]], rtol=0, atol=0
        )
    assert (
        stats.entropy.isfinite().all()
        and stats.teacher_mass[8] == 0
        and stats.topk_log_mass[8] == -torch.inf
    )
    assert stats.topk_forward_kl[4] == torch.inf and stats.topk_reverse_kl[4].isfinite()
    assert stats.topk_forward_kl[6] == torch.inf == stats.topk_reverse_kl[6]


def test_extreme_entries_keep_what_is_theirs(options, device):
    """A log-prob of -120 at temperature 4; a teacher with nothing but its entry; a denormal
    probability."""

    def made(ids, log_probs, **more):
        return hl.TopKTeacher(
            torch.tensor([ids], device=device), torch.tensor([log_probs], device=device), **more
        )

    x = torch.zeros(1, 8, device=device, requires_grad=True)
    teacher = made([0, 1], [0.0, -120.0], temperature=4.0)
    stats = hl.vocab_statistics(x, want=("topk_reverse_kl",), teacher=teacher, options=options)
    assert stats.topk_reverse_kl.item() == pytest.approx(15 - math.log(2), rel=1e-6)
    assert torch.autograd.grad(stats.topk_reverse_kl.sum(), x)[0].isfinite().all()
    duplicated = made([3, 1, 3, 3], [-2.0, -0.5, -200.0, -2.0])
    stats = hl.vocab_statistics(x, want=("topk_forward_kl",), teacher=duplicated, options=options)
    tau = torch.tensor([2 * math.exp(-2), math.exp(-0.5)]).double()
    tau /= tau.sum()
    assert stats.topk_forward_kl.item() == pytest.approx(
        (tau * (2 * tau).log()).sum().item(), rel=1e-5
    )
    labels = torch.zeros(1, dtype=torch.long, device=device)
    for divergence in ("forward_kl", "reverse_kl", "jsd"):
        head = hl.HeadLoss([hl.TopKDistillation(1.0, divergence, "tail")], options=options)
        loss = head(x, labels, inputs={"teacher": made([2], [-5e-7], renormalize=False)}).loss
        assert loss.isfinite() and torch.autograd.grad(loss, x)[0].isfinite().all(), divergence
    z, t = torch.tensor(
        [[[0.0, -103.6, -102.0, -50.0]], [[0.0, -200.0, -200.0, -300.0]]], device=device
    )
    jsd = hl.vocab_statistics(z, want=("jsd",), teacher=hl.Teacher(t), options=options).jsd
    assert 0 <= jsd.item() < 1e-6


def test_a_bad_label_is_nan_even_without_entries(options, device):
    x, none = torch.zeros(1, 8, device=device), torch.full((1, 2), -1, device=device)
    labels, teacher = (
        torch.tensor([99], device=device),
        hl.TopKTeacher(none, torch.zeros(1, 2, device=device)),
    )
    stats = hl.vocab_statistics(x, labels, want=TOPK_TEACHER, options=options, teacher=teacher)
    assert all(
        getattr(stats, name).isnan().all() for name in ("lse", "teacher_mass", *TOPK_TEACHER)
    )


def test_a_distant_tail_is_summed_directly(options, device):
    """The student's probability outside of the entries is 1e-17, which 1 - that of the entries
    knows nothing of."""
    x = torch.zeros(1, V, device=device)
    x[0, :2] = 45.0
    log_probs = torch.log(torch.tensor([[0.5, 0.4]], device=device))
    teacher = hl.TopKTeacher(torch.tensor([[0, 1]], device=device), log_probs, renormalize=False)
    stats = hl.vocab_statistics(x, want=("tail_log_mass",), teacher=teacher, options=options)
    assert stats.tail_log_mass.item() == pytest.approx(math.log(V - 2) - math.log(2) - 45, rel=1e-6)


def test_what_cannot_work_is_refused():
    """What tests/helpers/odd_inputs.py has not."""
    x, ids, log_probs = torch.randn(3, 8), torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 2)
    wrong = {
        r"a Teacher serves the statistics .* got \['topk_forward_kl'\]": {"teacher": hl.Teacher(x)},
        r"a TopKTeacher serves the statistics .* got \['jsd'\].*: Distillation takes a Teacher, Top": {
            "want": ("jsd",)
        },
        "teacher.mask must have shape": {
            "teacher": lambda: hl.TopKTeacher(ids, log_probs, ids[:2] == 0)
        },
        "teacher.log_probs must be one of": {
            "teacher": hl.TopKTeacher(ids, log_probs.to(torch.float8_e5m2))
        },
    }
    for message, change in wrong.items():
        given = {"want": ("topk_forward_kl",), "teacher": hl.TopKTeacher(ids, log_probs)} | change
        with pytest.raises((TypeError, ValueError), match=message):
            hl.vocab_statistics(x, **{name: v() if callable(v) else v for name, v in given.items()})
    labels = torch.zeros(3, dtype=torch.long)
    with pytest.raises(
        ValueError, match="support='tail' needs a TopKTeacher with renormalize=False"
    ):
        head = hl.HeadLoss([hl.TopKDistillation(support="tail")])
        head(x, labels, inputs={"teacher": hl.TopKTeacher(ids, log_probs)})


WIDE, MANY = 34000, 40  # columns, of chunks with more than 8 tiles of 512; entries


def tails():
    """Student logits, labels, entries and log-probs of tokens whose tails are summed in every
    way."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(9, WIDE, generator=generator)
    labels = torch.randint(20000, WIDE, (9,), generator=generator)
    ids = torch.rand(9, 20000, generator=generator).argsort(-1)[:, :MANY]
    ids[0] = torch.arange(MANY) * 7  # all in one chunk
    ids[1, :4] = torch.tensor([3, 515, 1027, 4099])  # of one lane
    x[2, labels[2]] = 60.0  # the label, no entry, above all others
    labels[3] = ids[3, 0]
    x[3, labels[3]] = 60.0  # the label, an entry
    x[4, ids[4, 1]] = 30.0  # a tail far below an entry
    x[5, ids[5, 1]] = 300.0  # and one whose exponentials would all underflow
    x[6, 4250:] = -torch.inf  # chunks with nothing
    ids[6] = torch.arange(MANY)
    labels[6] = 100
    labels[7] = ids[7, 0] + 512 - 1024 * (ids[7, 0] > 10000)  # in the lane of an entry
    x[8, 777] = torch.nan
    return x, labels, ids, torch.full((9, MANY), -6.0)


@pytest.mark.parametrize("temperature", [1.0, 2.0, "tokens"])
@pytest.mark.parametrize("want", [("tail_log_mass",), ("tail_entropy", "tail_log_mass")])
def test_tails_that_share_lanes_chunks_and_maxima_with_entries(want, temperature, options, device):
    x, labels, ids, log_probs = (value.to(device) for value in tails())
    scale = torch.linspace(0.7, 2, 9, device=device) if temperature == "tokens" else temperature
    teacher = hl.TopKTeacher(ids, log_probs, renormalize=False, student_temperature=scale)
    x.requires_grad_()
    stats = hl.vocab_statistics(x, labels, want=want, teacher=teacher, options=options)
    z = x.detach()[:8].cpu().double().requires_grad_()
    tau = torch.zeros_like(z).scatter(1, ids[:8].cpu(), log_probs[:8].double().exp().cpu())
    divisor = scale[:8, None].cpu().double() if temperature == "tokens" else scale
    expected, *_ = oracle.of_entries(z / divisor, tau, BETA)
    upstream = torch.linspace(1, 2, 9)[:8]
    for name in want:
        ours = getattr(stats, name)
        assert ours[8].isnan()
        torch.testing.assert_close(ours[:8].double().cpu(), expected[name], rtol=2e-6, atol=4e-6)
    ours = torch.autograd.grad(
        sum((getattr(stats, name)[:8] * upstream.to(device)).sum() for name in want), x
    )[0]
    (reference,) = torch.autograd.grad(sum((expected[name] * upstream).sum() for name in want), z)
    ours = ours[:8].double().cpu()
    torch.testing.assert_close(ours, reference, rtol=2e-5, atol=1e-7 * float(reference.abs().max()))


def checked_entries(backend="torch", linear=False, max_valid=None, **given):
    """A call with check=True over 4 tokens of 50 ids, the second token ignored. given: parts of the
    teacher."""
    labels = torch.tensor([0, -100, 2, 3])
    teacher = hl.TopKTeacher(
        **{"ids": torch.arange(8).view(4, 2), "log_probs": torch.full((4, 2), 0.5).log()} | given
    )
    options = {
        "want": ("topk_forward_kl",),
        "teacher": teacher,
        "options": hl.Options(backend=backend, check=True),
    }
    if not linear:
        return hl.vocab_statistics(torch.zeros(4, 50), labels, **options)
    options["linear"] = hl.Linear(max_valid_tokens=max_valid)
    return hl.linear_vocab_statistics(torch.zeros(4, 16), torch.zeros(50, 16), labels, **options)


LOGITS_OF_TOKEN_3 = torch.tensor([[-1.0, -1.0], [9.0, 8.0], [-0.7, -0.7], [1.0, -2.0]])
CHECKED = [{}, {"linear": True}, {"linear": True, "max_valid": 3}]


@pytest.mark.parametrize("how", CHECKED)
def test_logits_in_place_of_a_teachers_log_probs_are_found_by_check(how):
    words = (
        r"teacher.log_probs of token 3 .* at most 1, got 2.85.* from \[1.0, -2.0\]; 1 such tokens"
    )
    with pytest.raises(ValueError, match=words):
        checked_entries(log_probs=LOGITS_OF_TOKEN_3, **how)
    with pytest.raises(ValueError, match=r"of token 0 .flat index. holds NaN; 3 such tokens"):
        checked_entries(log_probs=torch.tensor([-1.0, torch.nan]).repeat(4, 1), **how)


@pytest.mark.parametrize(
    ("log_probs", "asked"),
    [
        ([1.0, -2.0], "are these logits[?]$"),
        ([3.0, 2.0], "are these logits, or negated log-probs"),
        ([0.7, 0.2], r"are these probabilities[?] Pass their log\(\)"),
    ],
)
def test_what_is_in_place_of_a_teachers_log_probs_is_asked(log_probs, asked):
    with pytest.raises(ValueError, match=asked):
        checked_entries(log_probs=torch.tensor(log_probs).repeat(4, 1))


def test_entries_less_likely_than_the_likeliest_ids_can_be_are_a_warning():
    """As logits far below 0 are, which are no error."""
    loss = hl.HeadLoss(
        hl.TopKDistillation(1.0, support="vocabulary"), options=hl.Options(check=True)
    )
    student, labels = torch.randn(4, 50), torch.zeros(4, dtype=torch.long)
    top = (torch.randn(4, 50) - 40).topk(8)

    def call(log_probs, **options):
        teacher = hl.TopKTeacher(top.indices, log_probs, **{"renormalize": False, **options})
        loss(student, labels, inputs={"teacher": teacher})

    words = r"of token 0 .* add up to .*e-1.*, and the likeliest ids have at least 0.16"
    with pytest.warns(UserWarning, match=words):
        call(top.values)
    likely = top.values.log_softmax(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(likely)
        call(torch.where(torch.arange(4)[:, None] == 2, likely, top.values))  # of one token
        call(torch.full((4, 8), 0.5 / 50).log())  # of ids that are not the likeliest
        call(top.values, renormalize=True)
        call(top.values, mask=torch.zeros(4, 8, dtype=torch.bool))


@pytest.mark.parametrize("how", CHECKED)
def test_ids_of_a_teacher_beyond_the_vocabulary_are_found_by_check(how):
    ids = torch.tensor([[0, 1], [50, 1], [2, 49], [-1, 50]])
    with pytest.raises(
        ValueError, match=r"teacher.ids of token 3 .flat index. must be below 50, got \[-1, 50\]"
    ):
        checked_entries(ids=ids, **how)
    checked_entries(ids=ids, mask=ids < 50, **how)  # as the documentation says to do


def test_check_allows_log_probs_that_were_rounded_and_entries_that_do_not_count():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        whole = (
            torch.randn(4, 4096, generator=torch.Generator().manual_seed(1))
            .log_softmax(-1)
            .to(dtype)
        )
        top = whole.topk(2048)
        labels, x = torch.arange(4), torch.zeros(4, 4096)
        options = {"want": ("topk_forward_kl",), "options": hl.Options(check=True)}
        hl.vocab_statistics(x, labels, teacher=hl.TopKTeacher(top.indices, top.values), **options)
        hl.vocab_statistics(
            x, labels, teacher=hl.TopKTeacher(torch.arange(4096).expand(4, -1), whole), **options
        )
    ids, other = (
        torch.tensor([[0, -1, 2]]).repeat(4, 1),
        torch.tensor([[-0.1, 9.0, 8.0]]).repeat(4, 1),
    )
    checked_entries(ids=ids, log_probs=other, mask=torch.tensor([[True, True, False]]).repeat(4, 1))
    checked_entries(
        ids=torch.tensor([[0, 50]]).repeat(4, 1),
        log_probs=torch.tensor([[0.0, -torch.inf]]).repeat(4, 1),
    )


TAIL_MISTAKES = {  # log-probs [K] and tail of a token -> wrong ones; -inf is no entry
    "entries of another K": lambda log_p, tail: (log_p.where(torch.arange(20) < 5, -torch.inf), tail),
    "the tail of another temperature": lambda log_p, tail: (log_p, tail * 3),
    "entries of another temperature": lambda log_p, tail: (log_p * 3, tail),
    "another base": lambda log_p, tail: (log_p / math.log(2), tail / math.log(2)),
    "a probability": lambda log_p, tail: (log_p, tail.exp()),
    "another sign": lambda log_p, tail: (log_p, -tail),
    "NaN": lambda log_p, tail: (log_p, tail * torch.nan),
}  # fmt: skip


def loss_with_tail(dtype, options, mistake=None):
    """Loss with a teacher's tail: of the third of four tokens there are no entries, and the fourth
    is ignored. A mistake is made at the second and the fourth."""
    teacher = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    top = hl.topk_log_probs(teacher, 20)
    log_p = top.log_probs
    tail = top.tail_log_prob
    for token in (1, 3):
        if mistake is not None:
            log_p[token], tail[token] = TAIL_MISTAKES[mistake](log_p[token], tail[token])
    log_p[2] = -torch.inf
    given = log_p.to(dtype), None, tail.to(dtype)
    entries = hl.TopKTeacher(top.ids, *given, renormalize=False)
    head = hl.HeadLoss([hl.TopKDistillation(support="tail")], options=options)
    labels = torch.tensor([0, 1, 2, -100])
    return head(torch.zeros(4, 64), labels, inputs={"teacher": entries}).loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_check_knows_a_tail_that_is_not_that_of_the_entries(dtype):
    check = hl.Options(check=True)
    assert torch.equal(loss_with_tail(dtype, check), loss_with_tail(dtype, None))
    for mistake in TAIL_MISTAKES:
        said = r"teacher\.tail_log_prob of token 1 \(flat index\) must be the log-prob of all other"
        with pytest.raises(ValueError, match=said):
            loss_with_tail(dtype, check, mistake)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [1, 64, 4999, 5000])
def test_check_takes_a_tail_in_half_precision(k, dtype):
    """Whose log-probs are rounded by their share, as those of the entries are."""
    for scale in (0.0, 1.0, 4.0):
        logits = scale * torch.randn(4, 5000, generator=torch.Generator().manual_seed(1))
        top = hl.topk_log_probs(logits, k, dtype=dtype)
        entries = hl.TopKTeacher(
            top.ids, top.log_probs, tail_log_prob=top.tail_log_prob.to(dtype), renormalize=False
        )
        head = hl.HeadLoss([hl.TopKDistillation(support="tail")], options=hl.Options(check=True))
        given = torch.zeros(4, 5000), torch.arange(4)
        assert head(*given, inputs={"teacher": entries}).loss.isfinite()


def read_tail(stats, teacher):
    return stats.topk_forward_kl + teacher.tail_log_prob


@pytest.mark.parametrize(("divergence", "support"), TOPK_DISTILLATIONS)
@pytest.mark.parametrize("squared", [False, True])
def test_a_tail_that_no_term_reads_is_an_error(divergence, support, squared):
    """A divergence over the entries from probabilities that do not add up to 1 is none."""
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    top = hl.topk_log_probs(logits, 20)
    given = torch.zeros(4, 64), torch.arange(4)
    entries = {"ids": top.ids, "log_probs": top.log_probs, "renormalize": False}
    without = {"teacher": hl.TopKTeacher(**entries)}
    inputs = {"teacher": hl.TopKTeacher(**entries, tail_log_prob=top.tail_log_prob)}
    term = hl.TopKDistillation(1.0, divergence, support, temperature_squared=squared)
    head = hl.HeadLoss([term])
    assert head(*given, inputs=without).loss.isfinite()
    reader = {"want": ("topk_forward_kl",), "inputs": ("teacher",)}
    metric = hl.Metric(lambda stats, teacher: {"own": read_tail(stats, teacher)}, **reader)
    for also in (
        hl.HeadLoss([term, hl.Term("own", read_tail, **reader)]),
        hl.HeadLoss([term], metrics=[metric]),
    ):
        assert also(*given, inputs=inputs).loss.isfinite()
    if support == "tail":
        assert head(*given, inputs=inputs).loss > 0
        return
    with pytest.raises(
        ValueError, match=r"tail_log_prob is read by TopKDistillation\(support='tail'"
    ):
        head(*given, inputs=inputs)
