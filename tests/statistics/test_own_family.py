"""A statistic is added without touching a carrier: `energy` is a family of its own, outside of the package."""

from pathlib import Path
from unittest import mock

import energy
import pytest
import torch
from ranks import on_ranks

from tp_headloss import Linear, Options, Transform, VocabShard, statistics
from tp_headloss.call.given import Given
from tp_headloss.call.request_of import build_request
from tp_headloss.engine.autograd import Statistics
from tp_headloss.linear_head.call import LinearCall

V, N, H = 300, 7, 8
OWN = energy.Energy()


def problem():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator) for shape in ((N, H), (V, H)))
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[2] = -100
    return hidden, weight, labels


def outputs_of(group, device, backend, transport, linear):
    """energy, entropy and log_prob of logits or of hidden states, and this rank's gradient."""
    fields = *statistics.VocabStatistics._fields, "energy"
    with (
        mock.patch.object(statistics, "FAMILIES", (*statistics.FAMILIES, OWN)),
        mock.patch.object(statistics.VocabStatistics, "_fields", fields),
    ):
        return _outputs_of(group, device, backend, transport, linear)


def _outputs_of(group, device, backend, transport, linear):
    hidden, weight, labels = (x.to(device) for x in problem())
    shard = VocabShard(0, V, V) if group is None else VocabShard.from_group(group, V)
    weight = weight[shard.start : shard.stop]
    options, want = Options(backend=backend, transport=transport), ("energy", "entropy")
    leaf = (weight if linear else hidden @ weight.t()).clone().requires_grad_()
    if linear:
        given = Given(None, labels, shard, want, options=options, hidden=hidden, weight=leaf)
        call = LinearCall.checked(given._replace(linear=Linear("recompute")))
        names, found = call.request.layout.outputs, call.recompute_outputs()
    else:
        request = build_request(Given(leaf, labels, shard, want, Transform(softcap=5.0), options=options))
        names, found = request.layout.outputs, Statistics.apply(*request.tensors, request, False, None)
    found = dict(zip(names, found))
    (found["energy"] + found["entropy"] - found["log_prob"]).sum().backward()
    return found["energy"].detach().cpu(), leaf.grad.cpu()


@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden states"])
@pytest.mark.parametrize(("ranks", "transport"), [(1, "gather"), (2, "gather"), (2, "sum")])
def test_a_family_outside_of_the_package_passes_through_every_carrier(ranks, transport, linear, backend):
    hidden, weight, labels = problem()
    leaf = (weight if linear else hidden @ weight.t()).double().requires_grad_()
    z = hidden.double() @ leaf.t() if linear else 5 * torch.tanh(leaf / 5)
    valid, log_p = labels >= 0, z.log_softmax(-1)
    truth = torch.where(valid, z.square().sum(-1), 0.0)
    entropy = -(log_p.exp() * log_p).sum(-1)
    log_prob = log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    (truth + torch.where(valid, entropy - log_prob, 0.0)).sum().backward()
    results = on_ranks(ranks, outputs_of, backend, transport, linear)
    for found, _ in results:
        torch.testing.assert_close(found.double(), truth.detach(), rtol=1e-5, atol=1e-5)
    grad = torch.cat([grad for _, grad in results], 0 if linear else 1).double()
    torch.testing.assert_close(grad, leaf.grad, rtol=1e-4, atol=1e-4)


def test_a_family_takes_at_most_fifty_lines():
    assert len([line for line in Path(energy.__file__).read_text().splitlines() if line.strip()]) <= 50
