"""Teachers that are heads: the statistics of materialised teacher logits, without them."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from collectives import counted_collectives
from linear_problem import BOTH, H, Largest, N, V, joined, relative, small_blocks, tensors
from oracle import divergences
from oracle import transform as transformed
from ranks import on_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import tp_headloss as hl
from tp_headloss.engine import operators
from tp_headloss.engine.reductions import StatisticValue
from tp_headloss.linear_head import autograd
from tp_headloss.modules import selected_rows
from tp_headloss.statistics import FULL_TEACHER

H_T, TRUE_V = 17, V - 3  # the teacher's hidden size; the last three ids are padding
UNEVEN = {1: None, 2: [0, 130, 200], 4: [0, 30, 30, 131, 200]}
CAPPED = {"scale": 0.6, "softcap": 4.0}


def teacher_tensors(dtype=torch.float32):
    """hidden [N, H_T], weight [V, H_T], bias [V], temperatures [N]"""
    generator = torch.Generator().manual_seed(11)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((N, H_T), (V, H_T), (V,))
    )
    return (
        hidden.to(dtype),
        (0.4 * weight).to(dtype),
        bias.to(dtype),
        torch.rand(N, generator=generator) + 0.7,
    )


def head_run(group, device, boundaries, backend, mode, how):
    """Loss and statistics, and gradients of hidden states and weight shard; a teacher that requires
    gradients."""
    hidden, weight, bias, labels, _ = (x.to(device) for x in tensors())
    teacher_hidden, teacher_weight, teacher_bias, temperatures = (
        x.to(device) for x in teacher_tensors()
    )
    shard = hl.VocabShard.from_boundaries(boundaries or [0, V], TRUE_V, group)
    local, rank = slice(shard.start, shard.stop), 0 if group is None else group.rank()
    if how == "reduce_scatter":
        hidden, teacher_hidden = (x.chunk(shard.world_size)[rank] for x in (hidden, teacher_hidden))
    operands = [x.clone().requires_grad_() for x in (hidden, weight[local], bias[local])]
    frozen = [x.clone().requires_grad_() for x in (teacher_hidden, teacher_weight[local])]
    teacher = hl.TeacherHead(
        *frozen,
        teacher_bias[local],
        hl.Transform(**CAPPED),
        temperatures,
        student_temperature=1.4,
        beta=0.3,
    )
    names = "forward_kl", "reverse_kl", "total_variation", "cross_entropy"
    terms = [hl.CrossEntropy(), hl.Distillation(0.5, "jsd", temperature_squared=True)]
    terms += [hl.Distillation(0.5, name) for name in names]
    terms.append(hl.Term("overlap", StatisticValue("overlap"), 0.25))
    head = hl.HeadLoss(terms, options=hl.Options(backend=backend), reduction="sum")
    with small_blocks():
        out = head.linear(
            *operands[:2], labels, bias=operands[2], shard=shard, inputs={"teacher": teacher},
            linear=hl.Linear(mode=mode, budget=32 * 8 * 256 // shard.world_size, hidden_grad=how),
        )  # fmt: skip
        out.loss.backward()
    assert all(x.grad is None for x in frozen)
    return (
        out.loss.detach(),
        *(x.grad.cpu() for x in operands),
        [getattr(out.stats, n).detach() for n in FULL_TEACHER],
    )


def truth():
    """Of `head_run`, in float64."""
    hidden, weight, bias, labels, _ = tensors()
    teacher_hidden, teacher_weight, teacher_bias, temperatures = teacher_tensors()
    operands = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    z = (F.linear(*operands) / 1.0)[:, :TRUE_V]
    u, _ = transformed(
        F.linear(teacher_hidden.double(), teacher_weight.double()),
        teacher_bias,
        temperature=temperatures,
        **CAPPED,
    )
    found = divergences(z / 1.4, u[:, :TRUE_V], 0.3)
    loss = F.cross_entropy(z, labels, reduction="none")
    loss = loss + 0.5 * (
        found["forward_kl"] + found["reverse_kl"] + found["total_variation"] + 1.4**2 * found["jsd"]
    )
    loss = loss + 0.5 * (found["forward_kl"] + found["teacher_entropy"]) + 0.25 * found["overlap"]
    valid = labels != -100
    total = torch.where(valid, loss, 0.0).sum()
    values = [torch.where(valid, found[name], 0.0).detach() for name in FULL_TEACHER]
    return total.detach(), *torch.autograd.grad(total, operands), values


@BOTH
@pytest.mark.parametrize(
    "world_size, how, backend",
    [
        (1, "all_reduce", "torch"), (1, "all_reduce", "triton"), (2, "all_reduce", "triton"),
        (2, "reduce_scatter", "torch"), (4, "all_reduce", "torch"), (4, "reduce_scatter", "torch"),
    ],
)  # fmt: skip
def test_losses_and_gradients_equal_float64(world_size, how, backend, mode):
    """Uneven, empty and padded shards, bias, softcap, temperatures per token, several blocks of
    tokens and ids."""
    results = on_ranks(world_size, head_run, UNEVEN[world_size], backend, mode, how)
    loss, *grads, values = truth()
    for result in results:
        assert relative(result[0].cpu(), loss) < 2e-6
        for name, ours, expected in zip(FULL_TEACHER, result[4], values):
            torch.testing.assert_close(
                ours.double().cpu(), expected, rtol=5e-6, atol=5e-6, msg=name
            )
            assert torch.equal(ours.cpu(), results[0][4][FULL_TEACHER.index(name)].cpu())
    for got, expected in zip(joined(results, how)[1:], grads):
        assert relative(got, expected) < 5e-6


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_head_has_the_bits_of_its_materialised_logits(mode, dtype, backend, device):
    """In one block, where the GEMM is the same; also of a teacher in another dtype than the
    student's."""
    n, v = (12, 72) if backend == "triton" else (N, V)
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors())
    hidden, weight, labels = hidden[:n], weight[:v], labels[:n] % v
    teacher_hidden, teacher_weight = (
        x[:k].to(device) for x, k in zip(teacher_tensors(dtype), (n, v))
    )
    names = "forward_kl", "reverse_kl", "jsd", "total_variation"
    terms = [hl.CrossEntropy(), *(hl.Distillation(1.0, name) for name in names)]
    head = hl.HeadLoss(
        terms, metrics=("teacher_entropy", "overlap"), options=hl.Options(backend=backend)
    )
    results = []
    for teacher in (
        hl.Teacher(F.linear(teacher_hidden, teacher_weight), 1.7, 2.0),
        hl.TeacherHead(teacher_hidden, teacher_weight, temperature=1.7, student_temperature=2.0),
    ):
        operands = [x.clone().requires_grad_() for x in (hidden, weight)]
        out = head.linear(
            *operands, labels, inputs={"teacher": teacher}, linear=hl.Linear(mode=mode)
        )
        values = [getattr(out.stats, name) for name in FULL_TEACHER]
        results.append((out.loss, *torch.autograd.grad(out.loss, operands), *values))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_half_precision_students_and_autocast():
    """A teacher in fp32 under autocast has the logits that torch.nn.functional.linear gives it."""
    hidden, weight, _, labels, _ = tensors(torch.bfloat16)
    teacher_hidden, teacher_weight = teacher_tensors()[:2]
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(teacher_hidden, teacher_weight)
        assert logits.dtype == torch.bfloat16
        both = [
            hl.linear_vocab_statistics(hidden, weight, labels, teacher=teacher, want=FULL_TEACHER)
            for teacher in (hl.Teacher(logits), hl.TeacherHead(teacher_hidden, teacher_weight))
        ]
    for name in FULL_TEACHER:
        assert torch.equal(getattr(both[0], name), getattr(both[1], name))
    mixed = hl.TeacherHead(teacher_hidden, teacher_weight.bfloat16())
    with pytest.raises(
        TypeError,
        match=r"teacher: hidden states and weight must have one dtype, got torch\.float32",
    ):
        hl.linear_vocab_statistics(hidden, weight, labels, teacher=mixed, want=FULL_TEACHER)


def test_logits_with_a_bias_or_a_softcap_are_not_rounded_in_between():
    hidden, weight, _, labels, _ = tensors()
    half, half_weight, bias, _ = teacher_tensors(torch.bfloat16)
    teacher = hl.TeacherHead(half, half_weight, bias, hl.Transform(**CAPPED))
    exact, _ = transformed(F.linear(half.double(), half_weight.double()), bias, **CAPPED)
    stats = hl.linear_vocab_statistics(
        hidden, weight, labels, teacher=teacher, want=("teacher_entropy",)
    )
    expected = -(exact.softmax(-1) * exact.log_softmax(-1)).sum(-1)
    expected = torch.where(labels == -100, 0.0, expected)
    torch.testing.assert_close(stats.teacher_entropy.double(), expected, rtol=3e-6, atol=0)


def own_head_run(group, device, mode):
    """Two depths of multi-token prediction distilled from the main head, whose hidden states are
    shifted."""
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors())
    shard = hl.VocabShard.from_group(group, V)
    main, depths = (
        hidden.view(4, 11, H),
        torch.stack([hidden, 0.5 * hidden]).view(2, 4, 11, H).requires_grad_(),
    )
    weight = weight[shard.start : shard.stop].clone().requires_grad_()
    targets, _ = hl.multi_token_targets(labels.view(4, 11), 2)
    # what rolls over belongs to ignored tokens
    teacher = torch.stack([main.roll(-depth, 1) for depth in (1, 2)])
    head = hl.HeadLoss(
        [hl.Distillation(1.0, "cross_entropy")], options=hl.Options(transport="gather")
    )
    with counted_collectives() as forward:
        out = head.linear(
            depths, weight, targets[1:], shard=shard, inputs={"teacher": hl.TeacherHead(teacher, weight)},
            linear=hl.Linear(mode=mode, hidden_grad="none"),
        )  # fmt: skip
    out.loss.backward()
    grads = depths.grad.cpu(), weight.grad.cpu()
    return out.loss.detach().cpu(), *grads, sum(forward.values())


@BOTH
@pytest.mark.parametrize("world_size", [1, 2])
def test_multi_token_prediction_learns_from_the_main_head(mode, world_size):
    """The weight is the teacher's, too, and gets the student's gradient alone; one collective for
    all depths."""
    hidden, weight, _, labels, _ = tensors()
    main = F.linear(hidden, weight).double().view(4, 11, V)
    targets, _ = hl.multi_token_targets(labels.view(4, 11), 2)
    operands = [torch.stack([hidden, 0.5 * hidden]).double().view(2, 4, 11, H), weight.double()]
    operands = [x.requires_grad_() for x in operands]
    log_p, valid = F.linear(*operands).log_softmax(-1), targets[1:] != -100
    parts = [
        -(main[:, d:].softmax(-1) * log_p[d - 1, :, :-d]).sum(-1)[valid[d - 1, :, :-d]].sum()
        for d in (1, 2)
    ]
    loss = sum(parts) / valid.sum()
    of_hidden, of_weight = torch.autograd.grad(loss, operands)
    results = on_ranks(world_size, own_head_run, mode)
    for ours, _, _, collectives in results:
        assert relative(ours, loss.detach()) < 2e-6 and (world_size == 1 or collectives <= 1)
    assert relative(sum(r[1].double() for r in results), of_hidden) < 5e-6
    assert relative(torch.cat([r[2] for r in results]), of_weight) < 5e-6


DRAFT = torch.randperm(TRUE_V, generator=torch.Generator().manual_seed(2))[:50]


def draft_run(group, device, boundaries, draft_boundaries, as_dtensor):
    """A student over 50 of the teacher's ids, sharded by themselves; all rows and biases that were
    selected."""
    hidden, weight, *_ = (x.to(device) for x in tensors())
    teacher_hidden, teacher_weight, teacher_bias, _ = (x.to(device) for x in teacher_tensors())
    shard = hl.VocabShard.from_boundaries(boundaries or [0, V], TRUE_V, group)
    to = draft_boundaries and hl.VocabShard.from_boundaries(draft_boundaries, 50, group)
    rows = teacher_weight[shard.start : shard.stop].requires_grad_()
    if as_dtensor:
        mesh = DeviceMesh.from_group(group, device.type)
        rows = DTensor.from_local(rows, mesh, [Shard(0)], shape=(V, H_T), stride=(H_T, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selected_rows, "SENT_ROWS", 16)
        selected = hl.select_rows(rows, DRAFT.to(device).int(), shard=shard, to=to)
    bias = hl.select_rows(teacher_bias[shard.start : shard.stop], DRAFT, shard=shard, to=to)
    to = to or hl.VocabShard.from_group(group, 50)
    teacher = hl.TeacherHead(teacher_hidden, selected, bias)
    weight = F.pad(weight[:50], (0, 0, 0, 10))[to.start : to.stop]
    found = hl.linear_vocab_statistics(hidden, weight, shard=to, teacher=teacher, want=FULL_TEACHER)
    here = DRAFT[to.start : to.start + to.valid_width].to(device)
    assert (
        torch.equal(selected[: to.valid_width], teacher_weight[here])
        and not selected[to.valid_width :].any()
    )
    assert selected.shape == (to.width, H_T) and torch.equal(
        bias[: to.valid_width], teacher_bias[here]
    )
    return (found.forward_kl + found.teacher_entropy).double().cpu(), selected.requires_grad


@pytest.mark.parametrize(
    "world_size, boundaries, draft_boundaries, as_dtensor",
    [(1, None, None, False), (2, [0, 130, 200], None, False), (2, [0, 100, 200], [0, 50, 60], True),
     (4, UNEVEN[4], [0, 0, 20, 45, 55], False)],
)  # fmt: skip
def test_a_draft_vocabulary_takes_the_rows_of_its_ids(
    world_size, boundaries, draft_boundaries, as_dtensor
):
    """EAGLE-3: the student's 50 ids are some of the teacher's 200, over which the teacher is
    normalised."""
    hidden, weight, *_ = tensors()
    teacher_hidden, teacher_weight, teacher_bias, _ = teacher_tensors()
    q = F.linear(teacher_hidden, teacher_weight, teacher_bias)[:, DRAFT].double().softmax(-1)
    expected = -(q * F.linear(hidden, weight[:50]).double().log_softmax(-1)).sum(-1)
    for found, needs_gradient in on_ranks(
        world_size, draft_run, boundaries, draft_boundaries, as_dtensor
    ):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)
        assert not needs_gradient


def rows_of_another_group(group, device, of_teacher, of_student):
    """Rows of a teacher on groups of `of_teacher` ranks for a student on groups of `of_student`."""
    rank, size = group.rank(), group.size()

    def shard_over(count, padded_size):
        ranks = [list(range(first, first + count)) for first in range(0, size, count)]
        own = [dist.new_group(part) for part in ranks][rank // count]
        return hl.VocabShard.from_group(own, TRUE_V, padded_size)

    whole = torch.arange(2.0 * V, device=device).view(V, 2)
    its_shard, shard = shard_over(of_teacher, V), shard_over(of_student, TRUE_V + 9)
    rows = whole[its_shard.start : its_shard.stop]
    every_id = torch.arange(TRUE_V, device=device)
    found = hl.select_rows(rows, every_id, shard=its_shard, to=shard)
    expected = F.pad(whole[:TRUE_V], (0, 0, 0, 9))[shard.start : shard.stop]
    return torch.equal(found, expected), its_shard.world_size, shard.world_size


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (4, 1), (1, 4)], ids=str)
def test_rows_of_a_teacher_on_more_or_fewer_ranks_are_cut_as_the_students(sizes):
    assert on_ranks(4, rows_of_another_group, *sizes) == [(True, *sizes)] * 4


def bad_selection(group, device, wrong):
    """The error of a call whose argument is wrong on rank 1 alone, or on all."""
    shard = hl.VocabShard.from_group(group, V)
    weight, ids, to = torch.zeros(shard.width, 3), DRAFT, None
    last = group.rank() == 1
    if wrong == "ids of a rank":
        ids = DRAFT.flip(0) if last else DRAFT
    elif wrong == "rows":
        weight = weight[last:]
    elif wrong == "beyond":
        ids = torch.tensor([0, V])
    elif wrong == "twice":
        ids = torch.tensor([7, 3, 5, 7, 3])
    elif wrong == "gap":
        to = hl.VocabShard(30 * last, 50 if last else 25, 50, group)
    else:
        to = hl.VocabShard.from_group(group, 49)
    try:
        hl.select_rows(weight, ids, shard=shard, to=to)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    "wrong, expected",
    [
        ("ids of a rank", "ranks must agree on ids"),
        ("rows", r"on rank 1 of the group: weight must have the shard's 100 rows .*, got 99"),
        ("beyond", r"ids must be in \[0, 200\), got \[200\]"),
        ("twice", r"ids must be distinct, got \[3, 7\] more than once: torch.unique\(ids\)"),
        (
            "gap",
            r"the shards of the group must cover \[0, 50\) once, got \[\[0, 25\], \[30, 50\]\]",
        ),
        (
            "shard",
            r"must shard the 50 ids, got a shard of 49: pass those of `to`, torch.arange\(49\) if they",
        ),
    ],
)
def test_a_wrong_selection_of_rows_is_refused_on_all_ranks(wrong, expected):
    for rank, message in enumerate(on_ranks(2, bad_selection, wrong)):
        assert re.search(
            expected.replace("on rank 1 of the group: ", "") if rank else expected, message
        )


@BOTH
def test_ignored_tokens_are_dropped_from_the_teacher_as_well(mode):
    hidden, weight, _, labels, _ = tensors()
    count, nothing = int((labels != -100).sum()), (labels == -100)[:, None]
    teacher_hidden, teacher_weight, bias, temperatures = teacher_tensors()
    teacher = hl.TeacherHead(teacher_hidden, teacher_weight, bias, temperature=temperatures)
    head = hl.HeadLoss([hl.CrossEntropy(), hl.Distillation(temperature_squared=True)])

    def run(teacher, most):
        operands = [x.clone().requires_grad_() for x in (hidden, weight)]
        linear = hl.Linear(mode=mode, max_valid_tokens=most)
        out = head.linear(*operands, labels, inputs={"teacher": teacher}, linear=linear)
        return out, torch.autograd.grad(out.loss, operands)

    expected, expected_grads = run(teacher, None)
    # rows of ignored tokens are never looked at
    out, grads = run(replace(teacher, hidden=teacher_hidden.masked_fill(nothing, torch.nan)), count)
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        out.stats.forward_kl, expected.stats.forward_kl, rtol=1e-5, atol=1e-5
    )
    assert all(relative(a, b) < 3e-6 for a, b in zip(grads, expected_grads))


@BOTH
def test_no_logits_exist_as_a_whole(mode, monkeypatch):
    """Whatever the number of tokens: blocks of student and teacher fit in the budget together."""
    for module in (operators, autograd):  # what an operator does would not be seen
        monkeypatch.setattr(module, "can_skip_dispatch", lambda _: True)
    width, hidden_size, buffers = 512, 4, 2
    budget = buffers * 16 * 512 * 4
    for tokens in (128, 512):
        hidden, weight = (
            torch.randn(tokens, hidden_size).requires_grad_(),
            torch.randn(width, hidden_size),
        )
        teacher = hl.TeacherHead(torch.randn(tokens, 3), torch.randn(width, 3))
        labels, head = torch.randint(width, (tokens,)), hl.HeadLoss([hl.Distillation()])
        weight.requires_grad_()
        with small_blocks(), Largest() as largest:
            linear = hl.Linear(mode=mode, budget=budget)
            head.linear(
                hidden, weight, labels, inputs={"teacher": teacher}, linear=linear
            ).loss.backward()
        per_token = 8 * 72  # packets of 8 chunks
        assert largest.bytes <= max(budget // buffers, tokens * per_token) < 4 * tokens * width
        if tokens == 128:
            assert largest.bytes >= budget // buffers // 2
    with small_blocks(), pytest.raises(ValueError, match="budget must be at least"):
        linear = hl.Linear(mode=mode, budget=budget // buffers)  # enough for the student alone
        head.linear(
            hidden, weight, labels, inputs={"teacher": teacher}, linear=linear
        ).loss.backward()


def test_torch_compile_sees_one_graph():
    hidden, weight, _, labels, _ = tensors()
    teacher_hidden, teacher_weight, teacher_bias, temperatures = teacher_tensors()
    head = hl.HeadLoss([hl.CrossEntropy(), hl.Distillation(temperature_squared=True)])

    def loss_of(hidden, weight, teacher_hidden, teacher_weight):
        teacher = hl.TeacherHead(
            teacher_hidden, teacher_weight, teacher_bias, hl.Transform(**CAPPED), temperatures
        )
        return head.linear(hidden, weight, labels, inputs={"teacher": teacher}).loss

    results = []
    for function in (loss_of, torch.compile(loss_of, fullgraph=True, backend="aot_eager")):
        operands = [x.clone().requires_grad_() for x in (hidden, weight)]
        loss = function(*operands, teacher_hidden, teacher_weight)
        results.append((loss, *torch.autograd.grad(loss, operands)))
    for a, b in zip(*results):
        assert relative(a, b) < 1e-6


def top_run(group, device):
    teacher_hidden, teacher_weight, bias, temperatures = (x.to(device) for x in teacher_tensors())
    shard = hl.VocabShard.from_boundaries(UNEVEN[2] if group else [0, V], TRUE_V, group)
    local = slice(shard.start, shard.stop)
    head = hl.TeacherHead(
        teacher_hidden.view(4, 11, H_T), teacher_weight[local], bias[local], hl.Transform(**CAPPED),
        temperatures.view(4, 11),
    )  # fmt: skip
    return hl.topk_log_probs(head, 7, shard=shard)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_top_k_of_a_head(world_size):
    teacher_hidden, teacher_weight, bias, temperatures = teacher_tensors()
    u, _ = transformed(
        F.linear(teacher_hidden, teacher_weight), bias, temperature=temperatures, **CAPPED
    )
    expected = u[:, :TRUE_V].log_softmax(-1).topk(7)
    for top in on_ranks(world_size, top_run):
        assert torch.equal(top.ids.view(N, 7).cpu(), expected.indices)
        torch.testing.assert_close(
            top.log_probs.view(N, 7).double().cpu(), expected.values, rtol=2e-6, atol=2e-6
        )
    with pytest.raises(ValueError, match="its own weight, transform and temperature"):
        hl.topk_log_probs(hl.TeacherHead(teacher_hidden, teacher_weight), 7, weight=teacher_weight)


def call_with(h, w, y, t, **fields):
    return hl.linear_vocab_statistics(h, w, y, teacher=replace(t, **fields), want=("forward_kl",))


def test_fewer_ids_than_to_shards_are_told_the_shard_of_theirs():
    to = hl.VocabShard.from_group(None, 9)
    with pytest.raises(ValueError, match=r"of these it is VocabShard.from_group\(group, 8\)"):
        hl.select_rows(torch.zeros(9, 2), torch.arange(8), to=to)


BAD = {  # others are in tests/promises/test_spec.py
    "TeacherHead is for linear heads, got logits: use HeadLoss.linear": lambda h, w, y, t: (
        hl.vocab_statistics(h @ w.t(), y, teacher=t, want=FULL_TEACHER)
    ),
    "use HeadLoss.linear": lambda h, w, y, t: hl.HeadLoss([hl.Distillation()])(
        h @ w.t(), y, inputs={"teacher": t}
    ),
    r"teacher\.weight must have shape \[200, H_t\] to fit the student, got \[9, 17\]": (
        lambda h, w, y, t: call_with(h, w, y, t, weight=t.weight[:9])
    ),
    r"teacher\.weight must have shape \[width, 9\] to fit teacher.hidden": (
        lambda h, w, y, t: call_with(h, w, y, t, hidden=t.hidden[:, :9])
    ),
    r"got \[9, 17\]": lambda h, w, y, t: call_with(h, w, y, t, hidden=t.hidden[:9]),
    r"teacher\.weight must be one of": (
        lambda h, w, y, t: call_with(h, w, y, t, hidden=t.hidden.double(), weight=t.weight.double())
    ),
    "one dtype": lambda h, w, y, t: call_with(h, w, y, t, hidden=t.hidden.half()),
    r"teacher\.bias must have": lambda h, w, y, t: call_with(h, w, y, t, bias=y.float()),
    "serves the statistics": lambda h, w, y, t: hl.linear_vocab_statistics(h, w, y, teacher=t),
    r"teacher\.temperature must have shape \[44\] to fit hidden states, got \[3\]": (
        lambda h, w, y, t: call_with(h, w, y, t, temperature=torch.ones(3))
    ),
    "temperature of a TeacherHead is its own": lambda h, w, y, t: replace(
        t, transform=hl.Transform(temperature=2.0)
    ),
    "twice": lambda h, w, y, t: replace(t, bias=w[:, 0], transform=hl.Transform(bias=w[:, 0])),
    "scale must be pos": lambda h, w, y, t: replace(t, transform=hl.Transform(scale=-1.0)),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_teachers_are_named(words):
    hidden, weight, _, labels, _ = tensors()
    with pytest.raises((TypeError, ValueError), match=words):
        BAD[words](hidden, weight, labels, hl.TeacherHead(*teacher_tensors()[:2]))


@pytest.mark.parametrize("mode", ["recompute", "one_sweep"])
def test_exact_logits_are_the_teachers_too(mode, backend, device):
    """A draft that is its target has a total variation of 0, which rounding of one of both would
    hide; and a teacher's divergence is that of unrounded logits."""
    generator = torch.Generator().manual_seed(5)
    hidden, weight, noise = (
        torch.randn(shape, generator=generator).bfloat16().to(device)
        for shape in ((N, H), (V, H), (N, H))
    )
    labels = torch.zeros(N, dtype=torch.int64, device=device)
    options = hl.Options(backend=backend)

    def loss_of(divergence, teacher):
        head = hl.HeadLoss([hl.Distillation(1.0, divergence)], options=options)
        linear = hl.Linear(mode, exact_logits=True)
        inputs = {"teacher": hl.TeacherHead(teacher, weight)}
        return head.linear(hidden, weight, labels, linear=linear, inputs=inputs).loss.double()

    assert loss_of("total_variation", hidden) < 1e-6
    log_p, log_q = (
        (x.double() @ weight.double().t()).log_softmax(1) for x in (hidden, hidden + noise / 64)
    )
    expected = (log_q.exp() * (log_q - log_p)).sum(1).mean()
    assert relative(loss_of("forward_kl", hidden + noise / 64), expected) < 1e-4
