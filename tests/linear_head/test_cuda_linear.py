"""A linear head on a GPU: flat memory, graphs, IEEE fp32. Deselected without one."""

import pytest
import torch
from cuda_problem import V, captured, replays
from ranks import on_ranks

from tp_headloss import CrossEntropy, Entropy, HeadLoss, Linear, VocabShard, ZLoss

pytestmark = pytest.mark.cuda


def linear_problem(tokens, device, dtype=torch.bfloat16, shard=None, hidden_size=256):
    shard = shard or VocabShard(0, V, V)
    generator = torch.Generator(device).manual_seed(5)
    hidden = torch.randn(
        tokens, hidden_size, device=device, dtype=dtype, generator=generator
    ).requires_grad_()
    weight = torch.randn(V, hidden_size, device=device, dtype=dtype, generator=generator)[
        shard.start : shard.stop
    ]
    labels = torch.randint(0, V, (tokens,), device=device, generator=generator)
    return hidden, (0.1 * weight).requires_grad_(), labels


@pytest.mark.parametrize("mode", ["recompute", "one_sweep"])
def test_memory_of_a_linear_head_is_flat_in_the_tokens(device, mode):
    """Beyond hidden states, dH and dW, with dW summed in a main_grad."""
    budget, extra = 64 << 20, []
    for tokens in (4096, 16384):
        hidden, weight, labels = linear_problem(tokens, device)
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        linear = Linear(
            mode=mode, budget=budget, main_grad=True, upstream=1.0 if mode == "one_sweep" else None
        )

        def step(hidden=hidden, weight=weight, labels=labels, linear=linear):
            loss = HeadLoss().linear(hidden, weight, labels, linear=linear).loss
            return torch.autograd.grad(loss, (hidden, weight), allow_unused=True)

        step()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        extra.append(torch.cuda.max_memory_allocated() - before - hidden.nbytes)
        # of one sweep, dH and its multiple by the upstream gradient are there at once, when no
        # block is
        assert extra[-1] <= budget + (4 << 20) + 128 * tokens
    assert abs(extra[1] - extra[0]) < budget // 4


def linear_graph_run(group, device, mode, how):
    """A captured step, and whether anything waits for the host."""
    shard = VocabShard.from_group(group, V)
    hidden, weight, labels = linear_problem(512, device, shard=shard)
    if how == "reduce_scatter" and group is not None:
        hidden = hidden.detach().chunk(group.size())[group.rank()].clone().requires_grad_()
    head = HeadLoss([CrossEntropy(), ZLoss(1e-4), Entropy(0.01)], metrics=("accuracy",))
    linear = Linear(mode=mode, hidden_grad=how, budget=256 * V * 2 + 4 * V * 256)

    def step():
        out = head.linear(hidden, weight, labels, shard=shard, linear=linear)
        return out.loss.detach(), *torch.autograd.grad(out.loss, (hidden, weight))

    graph, outputs = captured(step)
    equal = True
    for seed in range(10):
        with torch.no_grad():
            hidden.copy_(
                torch.randn(
                    hidden.shape, device=device, generator=torch.Generator(device).manual_seed(seed)
                )
            )
        equal &= replays(graph, outputs, step)[1]
    return equal


@pytest.mark.parametrize("how", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("mode", ["recompute", "one_sweep"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_linear_head_is_captured(world_size, mode, how):
    assert all(on_ranks(world_size, linear_graph_run, mode, how))


@pytest.mark.parametrize("mode", ["recompute", "one_sweep"])
def test_a_linear_head_computes_in_ieee_fp32_unless_tf32_is_allowed(device, mode):
    hidden, weight, labels = linear_problem(300, device, torch.float32)
    z = torch.nn.functional.linear(
        *(exact := [x.double().requires_grad_() for x in (hidden, weight)])
    )
    exact = torch.autograd.grad(torch.nn.functional.cross_entropy(z, labels), exact)

    def errors():
        grads = torch.autograd.grad(
            HeadLoss().linear(hidden, weight, labels, linear=Linear(mode=mode)).loss,
            (hidden, weight),
        )
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(grads, exact)]

    assert max(errors()) < 3e-6
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert min(errors()) > 2e-5
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
