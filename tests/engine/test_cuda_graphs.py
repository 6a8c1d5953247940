"""CUDA graphs replay what eager computes, and nothing waits on the host. Deselected without a
GPU."""

import pytest
import torch
from cuda_problem import N, V, captured, replays
from ranks import on_ranks

import tp_headloss as hl
from tp_headloss.statistics import AT_IDS

pytestmark = pytest.mark.cuda


def head(transport="auto"):
    terms = [hl.CrossEntropy(label_smoothing=0.1), hl.ZLoss(1e-4), hl.Entropy(0.01)]
    return hl.HeadLoss(terms, metrics=("accuracy",), options=hl.Options(transport=transport))


def graph_run(group, device, transport):
    """Capture one step, replay it 100 times on fresh inputs, compare with eager bit for bit."""
    shard = hl.VocabShard.from_group(group, V)
    logits = torch.randn(N, shard.width, device=device, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, V, (N,), device=device)
    loss_of = head(transport)

    def step():
        out = loss_of(logits, labels, shard=shard)
        return out.loss, out.metrics["accuracy"], torch.autograd.grad(out.loss, logits)[0]

    graph, outputs = captured(step)
    equal = 0
    for seed in range(100):
        generator = torch.Generator(device).manual_seed(seed)
        new_labels = torch.randint(0, V, (N,), device=device, generator=generator)
        new_labels[torch.rand(N, device=device, generator=generator) < 0.1] = -100
        with torch.no_grad():
            logits.copy_(torch.randn(logits.shape, device=device, generator=generator) * 3)
            labels.copy_(new_labels)
        equal += replays(graph, outputs, step)[1]
    return equal


@pytest.mark.parametrize("transport", ["gather", "symm_mem"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_hundred_graph_replays_equal_eager(world_size, transport):
    assert on_ranks(world_size, graph_run, transport) == [100] * world_size


def policy_step(group, device, layout, compile, objective="gspo"):
    """-> inputs to change, and a step that builds its sequences anew and computes loss, metrics and
    gradient."""
    shard = hl.VocabShard.from_group(group, V)
    logits = torch.randn(N, shard.width, device=device, dtype=torch.bfloat16).requires_grad_()
    names = (
        "advantages",
        "old_log_prob",
        "reference_log_prob",
        "generator_log_prob",
        "rollout_weight",
        "noise",
    )
    state = {name: torch.zeros(N, device=device) for name in names}
    state["labels"] = torch.randint(
        0, V, (N,), device=device, generator=torch.Generator(device).manual_seed(0)
    )
    cuts = torch.tensor([0, 100, 101, 101, 400, N], device=device, dtype=torch.int32)
    ids = torch.randint(0, 9, (N,), device=device, generator=torch.Generator(device).manual_seed(0))
    terms = [
        hl.PolicyGradient(objective, rollout_weight=True),
        hl.KLToReference(0.1),
        hl.Entropy(0.01),
    ]
    metrics = ("accuracy", hl.PolicyMetrics(reference=True), hl.GeneratorMetrics())
    loss_of = hl.HeadLoss(terms, metrics=metrics, reduction="seq-mean-token-mean", compile=compile)
    wanted = loss_of.input_names

    def step():
        mask = state["labels"] != -100
        sequences = (
            hl.Sequences.from_ids(ids, 9, mask)
            if layout == "ids"
            else hl.Sequences.from_cu_seqlens(cuts, mask)
        )
        inputs = {name: value for name, value in state.items() if name in wanted} | {
            "sequences": sequences
        }
        out = loss_of(logits, state["labels"], shard=shard, inputs=inputs)
        grad = torch.autograd.grad(out.loss, logits)[0]
        return [out.loss, grad, *out.metrics.values(), *out.sequence_metrics.values()]

    return logits, state, step


def policy_graph_run(group, device, layout, compile, objective="gspo"):
    logits, state, step = policy_step(group, device, layout, compile, objective)
    graph, outputs = captured(step)
    equal = 0
    for seed in range(20):
        generator = torch.Generator(device).manual_seed(seed)
        labels = torch.randint(0, V, (N,), device=device, generator=generator)
        labels[torch.rand(N, device=device, generator=generator) < 0.1] = -100
        with torch.no_grad():
            logits.copy_(torch.randn(logits.shape, device=device, generator=generator) * 2)
            for name, value in state.items():
                value.copy_(
                    labels
                    if name == "labels"
                    else torch.randn(N, device=device, generator=generator) - 10
                )
        replayed, same = replays(graph, outputs, step)
        equal += same
    return equal, bool(replayed[0].isfinite()), bool(replayed[1].any())


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("layout", ["packed", "ids"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_sequence_objectives_wait_for_nothing_and_replay_from_a_graph(world_size, layout, compile):
    for result in on_ranks(world_size, policy_graph_run, layout, compile):
        assert result == (20, True, True)


@pytest.mark.parametrize(
    "objective",
    ["clip", "cispo", "sapo", "gspo-length-weighted", "gmpo", "vespo", "clip-cov", "kl-cov"],
)
def test_every_objective_waits_for_nothing_and_replays_from_a_graph(objective):
    assert policy_graph_run(None, torch.device("cuda"), "packed", False, objective) == (
        20,
        True,
        True,
    )


DISTILLATIONS = {  # name -> terms, and whether their teacher is whole
    "whole": (
        [hl.Distillation(0.5), hl.Distillation(0.2, "reverse_kl", temperature_squared=True)],
        True,
    ),
    "whole, later": ([hl.Distillation(0.5, "jsd"), hl.Distillation(0.5, "total_variation")], True),
    "entries": ([hl.TopKDistillation(0.5), hl.TopKDistillation(0.5, "reverse_kl")], False),
    "vocabulary": (
        [
            hl.TopKDistillation(0.5, support="vocabulary"),
            hl.TopKDistillation(0.5, "jsd", "vocabulary"),
        ],
        False,
    ),
    "tail": (
        [hl.TopKDistillation(0.5, support="tail"), hl.TopKDistillation(0.5, "reverse_kl", "tail")],
        False,
    ),
    "given ids": (
        [
            hl.TopKDistillation(0.5),
            hl.Term("at", lambda stats: -stats.log_probs_at.mean(-1), want=AT_IDS),
        ],
        False,
    ),
}


def distillation_graph_run(group, device, name):
    terms, whole = DISTILLATIONS[name]
    shard, loss_of = (
        hl.VocabShard.from_group(group, V),
        hl.HeadLoss([hl.CrossEntropy(), *terms], metrics=("accuracy",)),
    )
    logits = torch.randn(N, shard.width, device=device, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(
        0, V, (N,), device=device, generator=torch.Generator(device).manual_seed(0)
    )
    scores, teacher_logits = torch.zeros(N, 64, device=device), torch.zeros_like(logits)
    ids = torch.zeros(N, 64, device=device, dtype=torch.long)

    def step():
        entries = hl.TopKTeacher(ids, scores, student_temperature=2.0, renormalize=name != "tail")
        teacher = hl.Teacher(teacher_logits, 2.0) if whole else entries
        inputs = {"teacher": teacher} | ({"ids": ids} if name == "given ids" else {})
        out = loss_of(logits, labels, shard=shard, inputs=inputs)
        return [out.loss, torch.autograd.grad(out.loss, logits)[0], *out.terms.values()]

    graph, outputs = captured(step)
    equal = 0
    for seed in range(20):
        generator = torch.Generator(device).manual_seed(seed)  # of what all ranks know
        ids.copy_(torch.randint(0, V, ids.shape, device=device, generator=generator))
        scores.copy_(
            torch.randn(scores.shape, device=device, generator=generator).log_softmax(-1) - 0.2
        )
        with torch.no_grad():
            for x in (logits, teacher_logits):
                x.copy_(torch.randn(x.shape, device=device, generator=generator) * 2)
        replayed, same = replays(graph, outputs, step)
        equal += same
    return equal, bool(replayed[0].isfinite()), bool(replayed[1].any())


@pytest.mark.parametrize("name", DISTILLATIONS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_distillation_waits_for_nothing_and_replays_from_a_graph(world_size, name):
    for result in on_ranks(world_size, distillation_graph_run, name):
        assert result == (20, True, True)


def sync_run(group, device):
    shard = hl.VocabShard.from_group(group, V)
    logits = torch.randn(N, shard.width, device=device, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(
        0, V, (N,), device=device, generator=torch.Generator(device).manual_seed(0)
    )
    loss_of = head()
    loss_of(logits, labels, shard=shard).loss.backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss_of(logits, labels, shard=shard).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_nothing_waits_on_the_host(world_size):
    assert all(on_ranks(world_size, sync_run))
