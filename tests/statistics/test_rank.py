"""The label's rank against sorted logits: ties, every transport and carrier, its costs."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from collectives import counted_collectives
from ranks import on_ranks

import tp_headloss as hl
from tp_headloss.engine.backend import load_backend

V, N = 200, 12


def problem(v=V):
    """Few distinct logits, so that most are tied; -0, -inf, the likeliest and the least likely
    label."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-6, 6, (N, v), generator=generator) / 2
    x[:, ::3] *= -1
    labels = torch.randint(0, v, (N,), generator=generator)
    labels[2] = -100
    x[3, labels[3]], x[4, labels[4]], x[5, labels[5]] = 9.0, -9.0, -torch.inf
    x[5, :20] = -torch.inf
    labels[6], x[6] = 150, 1.0
    x[7, labels[7]] = -0.0
    return x, labels


def truth(x, labels):
    """1 for the likeliest id, by a stable sort."""
    place = torch.argsort(-x, dim=-1, stable=True).argsort(-1)
    return torch.where(labels >= 0, place.gather(1, labels.clamp(min=0)[:, None])[:, 0] + 1.0, 0.0)


def run(group, device, v, backend, transport, dtype):
    x, labels = problem(v)
    shard = hl.VocabShard.from_group(group, v, v + 56)
    local = F.pad(x, (0, 56), value=40.0)[:, shard.start : shard.stop].to(device, dtype)
    bias, temperature = (
        torch.full((shard.width,), 0.25, device=device),
        torch.linspace(0.5, 2.0, N, device=device),
    )
    transform = hl.Transform(bias=bias, softcap=5.0, temperature=temperature)
    with counted_collectives() as events:
        stats = hl.vocab_statistics(
            local, labels.to(device), shard=shard, want=("rank", "entropy"), transform=transform,
            options=hl.Options(backend=backend, transport=transport),
        )  # fmt: skip
    return stats.rank.cpu(), sum(events.values())


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("transport", "dtype"), [("gather", torch.float32), ("sum", torch.bfloat16)]
)
@pytest.mark.parametrize("v", [V, 8008])  # chunks of a part of a tile, and of several tiles
def test_ranks_are_those_of_a_stable_sort(world_size, transport, dtype, v, backend):
    expected = 0 if world_size == 1 else 3 if transport == "sum" else 2
    for rank, collectives in on_ranks(world_size, run, v, backend, transport, dtype):
        assert torch.equal(rank, truth(*problem(v))) and collectives == expected


def test_one_kernel_reads_all_logits(monkeypatch, device):
    module, launches = load_backend("triton"), Counter()

    def counted(kernel, *args, launch=module.launch):
        launches[kernel.__name__] += 1
        launch(kernel, *args)

    monkeypatch.setattr(module, "launch", counted)
    x, labels = (part.to(device) for part in problem())
    hl.vocab_statistics(x, labels, want=("rank",), options=hl.Options(backend="triton"))
    assert launches == {"label_logits_kernel": 1, "statistics_kernel": 1, "merge_kernel": 1}


@pytest.mark.parametrize("linear", [None, hl.Linear(budget=300_000), hl.Linear(max_valid_tokens=N)])
def test_from_hidden_states(linear, options, device):
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randint(-2, 3, (n, 4), generator=generator).float() for n in (N, V))
    labels = problem()[1]
    stats = hl.linear_vocab_statistics(
        hidden.to(device), weight.to(device), labels.to(device), want=("rank",), linear=linear,
        options=options,
    )  # fmt: skip
    assert torch.equal(stats.rank.cpu(), truth(hidden @ weight.t(), labels))


def run_linear(group, device):
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randint(-2, 3, (n, 4), generator=generator).float() for n in (300, V))
    labels, shard = (
        torch.randint(0, V, (300,), generator=generator),
        hl.VocabShard.from_group(group, V),
    )
    with counted_collectives() as events:
        stats = hl.linear_vocab_statistics(
            hidden.to(device), weight[shard.start : shard.stop].to(device), labels.to(device), shard=shard,
            want=("rank",), linear=hl.Linear(budget=100_000), options=hl.Options(backend="torch"),
        )  # fmt: skip
    return torch.equal(stats.rank.cpu(), truth(hidden @ weight.t(), labels)), sum(events.values())


def test_each_block_of_logits_has_an_exchange_of_its_labels():
    # three blocks, and the packets of all of them
    assert on_ranks(2, run_linear) == [(True, 4)] * 2


def test_as_a_metric_with_a_loss_that_has_a_gradient(options, device):
    x, labels = problem()
    x[5] = 0.0
    local = x.to(device).requires_grad_()
    out = hl.HeadLoss([hl.CrossEntropy()], metrics=("rank",), options=options)(
        local, labels.to(device)
    )
    out.loss.backward()
    assert local.grad.any() and not out.stats.rank.requires_grad
    torch.testing.assert_close(
        hl.mean_metrics(out)["rank"].cpu().double(), truth(x, labels).double().sum() / (N - 1)
    )
