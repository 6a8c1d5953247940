"""Costs of a call: one collective and one reading of the logits forward, no collective and one
reading backward."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from collectives import counted_collectives
from logits_problem import V, policy_head, policy_inputs, rows
from ranks import on_ranks

from tp_headloss import (
    CrossEntropy,
    Entropy,
    HeadLoss,
    Options,
    VocabShard,
    ZLoss,
    vocab_statistics,
)
from tp_headloss.engine import sums_triton
from tp_headloss.engine.backend import load_backend


def collectives_run(group, device, transport, requires_grad, backend):
    shard = VocabShard.from_group(group, V)
    x, labels = rows(device)
    local = x[:, shard.start : shard.stop].clone().requires_grad_(requires_grad)
    terms = [CrossEntropy(label_smoothing=0.1), ZLoss(1e-4), Entropy(0.01)]
    head = HeadLoss(
        terms, metrics=("entropy",), options=Options(backend=backend, transport=transport)
    )
    with counted_collectives() as forward:
        out = head(local, labels, shard=shard)
    with counted_collectives() as backward:
        if requires_grad:
            out.loss.backward()
    return forward, backward


def policy_collectives_run(group, device, backend):
    shard = VocabShard.from_group(group, V)
    x, labels = rows(device)
    local, labels = (
        x[:, shard.start : shard.stop].clone().view(2, -1, shard.width).requires_grad_(),
        labels.view(2, -1),
    )
    inputs, head = (
        policy_inputs(labels),
        policy_head(options=Options(backend=backend, transport="gather")),
    )
    module, calls = load_backend(backend), Counter()
    kept = {
        name: getattr(module, name)
        for name in ("local_statistics", "merge_packets", "logits_gradient")
    }
    try:
        for name, function in kept.items():
            setattr(module, name, lambda *a, f=function, n=name: (calls.update([n]), f(*a))[1])
        with counted_collectives() as forward:
            out = head(local, labels, shard=shard, inputs=inputs)
        with counted_collectives() as backward:
            out.loss.backward()
    finally:
        for name, function in kept.items():
            setattr(module, name, function)
    return sum(forward.values()), sum(backward.values()), dict(calls)


def test_policy_gradients_with_every_metric_cost_one_collective_and_the_same_kernels(backend):
    once = {"local_statistics": 1, "merge_packets": 1, "logits_gradient": 1}
    assert on_ranks(2, policy_collectives_run, backend) == [(1, 0, once)] * 2


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("transport", ["gather", "sum"])
def test_one_collective_forward_or_two_sums_and_none_backward(transport, requires_grad, backend):
    for forward, backward in on_ranks(2, collectives_run, transport, requires_grad, backend):
        assert sum(forward.values()) == 1 + (transport == "sum") and not backward, (
            forward,
            backward,
        )
        assert ("gather" if transport == "gather" else "reduce") in next(iter(forward))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_kernel_reads_the_logits_forward_and_one_backward(smoothing, monkeypatch, device):
    module, launches = load_backend("triton"), Counter()
    for launcher in (module, sums_triton):

        def counted(kernel, *args, launch=launcher.launch):
            launches[kernel.__name__] += 1
            launch(kernel, *args)

        monkeypatch.setattr(launcher, "launch", counted)
    x, labels = rows(device)
    x.requires_grad_()
    head = HeadLoss([CrossEntropy(label_smoothing=smoothing), ZLoss(1e-4), Entropy(0.01)], metrics=("accuracy",),
                    options=Options(backend="triton"))  # fmt: skip
    loss = head(x, labels).loss
    forward = {"statistics_kernel": 1, "merge_kernel": 1, "sums_kernel": 1}
    assert launches == forward
    loss.backward()
    of_values = {"sums_gradient_kernel": 1} if smoothing else {}  # of values that are no statistics
    assert launches == {**forward, **of_values, "gradient_kernel": 1}


def mixed_run(group, device):
    """Rank 0 trains, rank 1 does not; the collectives must still meet."""
    shard = VocabShard.from_group(group, V)
    x, labels = rows(device)
    local = x[:, shard.start : shard.stop].clone().requires_grad_(dist.get_rank(group) == 0)
    stats = vocab_statistics(local, labels, shard=shard)
    if local.requires_grad:
        stats.log_prob.sum().backward()
    return stats.lse.detach().cpu()


def test_ranks_with_different_requires_grad_do_not_hang():
    a, b = on_ranks(2, mixed_run)
    assert torch.equal(a, b)
