"""A teacher's head of several ranks: its arguments are compared between ranks, and its tensors may
be DTensors."""

from dataclasses import replace

import pytest
import torch
from ranks import on_ranks

import tp_headloss as hl

V, N, H, H_T = 64, 8, 12, 5


def drawn(device):
    generator = torch.Generator().manual_seed(3)
    shapes = (N, H), (V, H), (N, H_T), (V, H_T), (V,)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


MISTAKES = {  # what the last rank does otherwise -> the fact that the message names
    "nothing": (lambda t: t, None),
    "the teacher's temperature": (lambda t: replace(t, temperature=2.0), "inputs.teacher.temperature"),
    "the bias's dtype": (
        lambda t: replace(t, transform=hl.Transform(t.transform.bias.half())), "inputs.teacher.transform.bias"),
    "the weight's hidden size": (
        lambda t: replace(t, hidden=t.hidden[:, 1:], weight=t.weight[:, 1:]), "inputs.teacher.hidden"),
    "no bias": (lambda t: replace(t, transform=None), "inputs.teacher.transform"),
    "the hidden states' bits": (lambda t: replace(t, hidden=2 * t.hidden), "inputs.teacher.hidden"),
}  # fmt: skip


def agreement_run(group, device, name, how):
    hidden, weight, teacher_hidden, teacher_weight, bias = drawn(device)
    shard = hl.VocabShard.from_group(group, V)
    local, last = slice(shard.start, shard.stop), group.rank() == group.size() - 1
    if how == "reduce_scatter":
        hidden, teacher_hidden = (
            x.chunk(group.size())[group.rank()] for x in (hidden, teacher_hidden)
        )
    head = hl.TeacherHead(
        teacher_hidden, teacher_weight[local], transform=hl.Transform(bias=bias[local])
    )
    teacher = MISTAKES[name][0](head) if last else head
    head_loss = hl.HeadLoss([hl.Distillation()], options=hl.Options(validate="checksums"))
    labels, inputs = torch.zeros(N, dtype=torch.long, device=device), {"teacher": teacher}
    linear = hl.Linear(hidden_grad=how)
    return head_loss.linear(
        hidden, weight[local], labels, shard=shard, inputs=inputs, linear=linear
    ).loss.cpu()


@pytest.mark.parametrize("name", MISTAKES)
def test_ranks_compare_their_teachers(name):
    fact = MISTAKES[name][1]
    if fact is None:
        first, second = on_ranks(2, agreement_run, name, "all_reduce")
        assert torch.equal(first, second)
        assert all(loss.isfinite() for loss in on_ranks(2, agreement_run, name, "reduce_scatter"))
        return
    for failure in on_ranks(2, agreement_run, name, "all_reduce", failures=True):
        assert failure.kind == "ValueError" and f"ranks must agree on {fact}" in failure.message, (
            failure
        )


def calls_of_own_ids(group, device, given, dtype=torch.float32, vocab_size=8):
    """Return what full validation says of calls with these columns, "" if it says nothing.

    Args:
        given: by the name of a part, a function of it (whole [N, 8], this rank's columns [N, 4]) ->
            the columns that this rank gives.
    """
    drawn = torch.randn(4, N, 8, generator=torch.Generator().manual_seed(5))
    shard = hl.VocabShard.from_group(group, vocab_size, padded_size=8)
    names = "logits", "teacher.logits", "weight", "teacher.weight"
    parts = {}
    for name, whole in zip(names, drawn.to(device, dtype)):
        columns = whole[:, shard.start : shard.stop]
        change = given.get(name)
        columns = columns if change is None else change(whole, columns)
        parts[name] = columns.T.contiguous() if name.endswith("weight") else columns
    hidden = torch.ones(N, N, device=device, dtype=dtype)
    options = hl.Options(validate="full")
    head_loss = hl.HeadLoss([hl.Distillation()], options=options)
    labels = torch.zeros(N, dtype=torch.int64, device=device)
    teacher = hl.Teacher(parts["teacher.logits"])
    head = hl.TeacherHead(hidden, parts["teacher.weight"])
    where = {"shard": shard}
    checked = {"shard": shard, "options": options}
    wanted = {"want": ("forward_kl",), **checked}
    weight = parts["weight"]
    calls = [
        lambda: head_loss(parts["logits"], labels, inputs={"teacher": teacher}, **where),
        lambda: head_loss.linear(hidden, weight, labels, inputs={"teacher": head}, **where),
        lambda: hl.vocab_statistics(parts["logits"], teacher=teacher, **wanted),
        lambda: hl.linear_vocab_statistics(hidden, weight, teacher=head, **wanted),
        lambda: hl.topk_log_probs(parts["logits"], 2, **checked),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def of_first_rank(whole, columns):
    return whole[:, : columns.shape[1]]


def masked(whole, columns):
    """Columns that are equal on all ranks: one number at each token, and NaN at the first."""
    same = whole[:, :1].clone()
    same[0] = torch.nan
    return same.expand_as(columns)


ROWS_OF = "each rank must have its own rows of "
COLUMNS_OF = "each rank must have its own columns of "


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "logits",
            [COLUMNS_OF + "logits", None, COLUMNS_OF + "logits", None, COLUMNS_OF + "logits"],
        ),
        ("teacher.logits", [COLUMNS_OF + "teacher.logits", None] * 2 + [None]),
        ("weight", [None, ROWS_OF + "the weight"] * 2 + [None]),
        ("teacher.weight", [None, ROWS_OF + "teacher.weight"] * 2 + [None]),
    ],
)
def test_equal_ids_on_two_ranks_are_an_error_of_full_validation(name, words, dtype):
    for said in on_ranks(2, calls_of_own_ids, {name: of_first_rank}, dtype):
        for found, expected in zip(said, words, strict=True):
            if expected is None:
                assert found == ""
            else:
                assert found.startswith(f"{expected}, got equal ones on ranks 0 and 1"), found


def test_columns_that_may_rightly_be_equal_are_no_error():
    names = "logits", "teacher.logits", "weight", "teacher.weight"
    assert on_ranks(2, calls_of_own_ids, {}) == [[""] * 5] * 2
    assert on_ranks(2, calls_of_own_ids, dict.fromkeys(names, masked)) == [[""] * 5] * 2
    # of which the last rank has padding alone
    all_alike = dict.fromkeys(names, of_first_rank)
    assert on_ranks(2, calls_of_own_ids, all_alike, torch.float32, 4) == [[""] * 5] * 2


def dtensor_run(group, device, how):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(device.type, (group.size(),), mesh_dim_names=("tp",))
    tokens = Shard(0) if how == "reduce_scatter" else Replicate()
    places = tokens, Shard(0), tokens, Shard(0), Shard(0)
    sharded = [distribute_tensor(x, mesh, [place]) for x, place in zip(drawn(device), places)]
    found = []
    for operands in (sharded, drawn(device)):
        hidden, weight, teacher_hidden, teacher_weight, bias = operands
        head = hl.TeacherHead(
            teacher_hidden, teacher_weight, transform=hl.Transform(bias=bias, softcap=3.0)
        )
        where = hl.Linear(hidden_grad=how) if operands is sharded else None
        stats = hl.linear_vocab_statistics(
            hidden, weight, teacher=head, want=("forward_kl",), linear=where
        )
        found.append(stats.forward_kl.cpu())
        found.append(
            hl.topk_log_probs(head, 3).log_probs.cpu() if how == "all_reduce" else torch.zeros(())
        )
    return found


@pytest.mark.parametrize("how", ["all_reduce", "reduce_scatter"])
def test_a_teacher_of_dtensors(how):
    for found in on_ranks(2, dtensor_run, how):
        for ours, whole in zip(found[:2], found[2:]):
            torch.testing.assert_close(ours, whole, rtol=1e-5, atol=1e-6)


def cut_rows_run(group, device):
    """A teacher whose hidden states are cut along H_T."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(device.type, (group.size(),), mesh_dim_names=("tp",))
    hidden, weight, teacher_hidden, teacher_weight, _ = drawn(device)
    cut, rows = (
        distribute_tensor(teacher_hidden, mesh, [Shard(1)]),
        distribute_tensor(weight, mesh, [Shard(0)]),
    )
    shard, teacher = hl.VocabShard.from_mesh(mesh, len(weight)), hl.TeacherHead(cut, teacher_weight)
    hl.linear_vocab_statistics(hidden, rows, shard=shard, teacher=teacher, want=("forward_kl",))


def test_a_teacher_of_cut_rows_is_refused():
    for failure in on_ranks(2, cut_rows_run, failures=True):
        assert (
            failure.kind == "ValueError" and "hidden states must be whole rows" in failure.message
        ), failure
