"""A vocabulary sharded over tensor-parallel ranks and pipeline stages (arXiv:2411.05288): its group
has all of them."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from tp_headloss import HeadLoss, VocabShard

V, H, TOKENS = 509, 16, 12


def problem():
    """Weights of two stages and of the output layer, inputs and labels of two microbatches."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, H, generator=generator) / 4 for n in (H, H, V)]
    inputs = torch.randn(2, TOKENS, H, generator=generator)
    return weights, inputs, torch.randint(0, V, (2, TOKENS), generator=generator)


def pipeline(group, device, tp):
    """Two stages of `tp` ranks. The last stage's hidden states go to all ranks, which have V / (2
    tp) rows each; their gradient is summed over all ranks, and goes back through the stages. ->
    this rank's rows, losses, gradients."""
    (first, second, whole), inputs, labels = problem()
    stage, shard = dist.get_rank(group) // tp, VocabShard.from_group(group, V)
    weight = (first, second)[stage].to(device).requires_grad_()
    rows = whole[shard.start : shard.stop].to(device).requires_grad_()
    losses = []
    for x, y in zip(inputs.to(device), labels.to(device)):
        hidden = torch.tanh(x @ weight.t()) if stage == 0 else torch.empty_like(x)
        dist.broadcast(hidden.data, group=group, group_src=0)
        received = hidden.detach().requires_grad_()
        last = torch.tanh(received @ weight.t()) if stage == 1 else torch.empty_like(x)
        dist.broadcast(last.data, group=group, group_src=tp)
        states = last.detach().requires_grad_()
        loss = HeadLoss().linear(states, rows, y, shard=shard, denominator=2 * TOKENS).loss
        loss.backward()
        if stage == 1:
            last.backward(states.grad)
        upstream = received.grad if stage == 1 else torch.empty_like(x)
        dist.broadcast(upstream, group=group, group_src=tp)
        if stage == 0:
            hidden.backward(upstream)
        losses.append(loss.detach())
    return stage, len(rows), torch.stack(losses).cpu(), weight.grad.cpu(), rows.grad.cpu()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_vocabulary_over_tensor_and_pipeline_ranks_is_balanced_and_gives_the_whole_models_gradients(
    tp,
):
    (first, second, whole), inputs, labels = problem()
    weights = [w.double().requires_grad_() for w in (first, second, whole)]
    hidden = inputs.double()
    for w in weights[:2]:
        hidden = torch.tanh(hidden @ w.t())
    expected = torch.nn.functional.cross_entropy(
        (hidden @ weights[2].t()).flatten(0, 1), labels.flatten()
    )
    expected.backward()
    results = on_ranks(2 * tp, pipeline, tp)
    sizes = [size for _, size, *_ in results]
    # on the last stage alone: twice as many, and 0
    assert sum(sizes) == V and max(sizes) == -(-V // (2 * tp))
    for stage, _, losses, grad, _ in results:
        torch.testing.assert_close(losses.sum().double(), expected.detach(), rtol=1e-6, atol=0)
        torch.testing.assert_close(grad.double(), weights[stage].grad, rtol=1e-5, atol=1e-7)
    rows = torch.cat([rows for *_, rows in results])
    torch.testing.assert_close(rows.double(), weights[2].grad, rtol=1e-5, atol=1e-7)
