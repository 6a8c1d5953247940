"""A statistic is added without touching a carrier: `energy` is a family of its own, outside of the
package."""

import re
from pathlib import Path
from unittest import mock

import energy_statistic
import pytest
import torch
from ranks import on_ranks

import tp_headloss as hl

V, N, H = 300, 7, 8


def problem():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator) for shape in ((N, H), (V, H)))
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[2] = -100
    return hidden, weight, labels


def outputs_of(group, device, backend, transport, mode):
    """energy, and this rank's gradient of a loss of it, entropy and log_prob, from logits or hidden
    states."""
    with mock.patch.object(hl.statistics, "FAMILIES", hl.statistics.FAMILIES):
        hl.register_statistic(energy_statistic.Energy())
        return _outputs_of(group, device, backend, transport, mode)


def _loss(stats):
    return stats.energy + stats.entropy - stats.log_prob


def _outputs_of(group, device, backend, transport, mode):
    hidden, weight, labels = (x.to(device) for x in problem())
    shard = hl.VocabShard(0, V, V) if group is None else hl.VocabShard.from_group(group, V)
    weight = weight[shard.start : shard.stop]
    given = {"shard": shard, "options": hl.Options(backend=backend, transport=transport)}
    leaf = (weight if mode else hidden @ weight.t()).clone().requires_grad_()
    want = "energy", "entropy"
    if mode == "one_sweep":
        term = hl.Term("own", _loss, want=want, tokenwise=True)
        metric = hl.Metric(lambda stats: {"energy": stats.energy}, want=("energy",))
        head = hl.HeadLoss(term, metrics=metric, reduction="sum", options=given["options"])
        out = head.linear(hidden, leaf, labels, shard=shard, linear=hl.Linear(mode))
        loss, found = out.loss, out.stats.energy
        torch.testing.assert_close(out.metrics["energy"], found.sum())
    else:
        if mode:
            stats = hl.linear_vocab_statistics(
                hidden, leaf, labels, want=want, linear=hl.Linear(mode), **given
            )
        else:
            stats = hl.vocab_statistics(
                leaf, labels, want=want, transform=hl.Transform(softcap=5.0), **given
            )
        loss, found = _loss(stats).sum(), stats.energy
    loss.backward()
    return found.detach().cpu(), leaf.grad.cpu()


@pytest.mark.parametrize("mode", [None, "recompute", "one_sweep"])
@pytest.mark.parametrize(("ranks", "transport"), [(1, "gather"), (2, "gather"), (2, "sum")])
def test_a_family_outside_of_the_package_passes_through_every_carrier(
    ranks, transport, mode, backend
):
    hidden, weight, labels = problem()
    leaf = (weight if mode else hidden @ weight.t()).double().requires_grad_()
    z = hidden.double() @ leaf.t() if mode else 5 * torch.tanh(leaf / 5)
    valid, log_p = labels >= 0, z.log_softmax(-1)
    truth = torch.where(valid, z.square().sum(-1), 0.0)
    entropy = -(log_p.exp() * log_p).sum(-1)
    log_prob = log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    (truth + torch.where(valid, entropy - log_prob, 0.0)).sum().backward()
    results = on_ranks(ranks, outputs_of, backend, transport, mode)
    for found, _ in results:
        torch.testing.assert_close(found.double(), truth.detach(), rtol=1e-5, atol=1e-5)
    grad = torch.cat([grad for _, grad in results], 0 if mode else 1).double()
    torch.testing.assert_close(grad, leaf.grad, rtol=1e-4, atol=1e-4)


def test_a_family_takes_at_most_fifty_lines():
    assert (
        len(
            [
                line
                for line in Path(energy_statistic.__file__).read_text().splitlines()
                if line.strip()
            ]
        )
        <= 50
    )


# method -> what it returns in a wrong shape, and the words of the error about four tokens
SHAPES = {
    "local": (lambda self, tile, softmax, rows: {"energy": tile.z}, "[4], got [4, 6]"),
    "coefficient": (lambda self, c, z, p, merged, grads: c[:, 0], "[4, 3] or [4, 1], got [4]"),
    "direct": (
        lambda self, dz, tile, merged, grads: grads["energy"][..., None] * tile.z,
        "[4, 3], got [4, 4, 3]",
    ),
    "scaled": (lambda self, total, tile, *others: tile.z[:, :1], "[4, 3], got [4, 1]"),
}


@pytest.mark.parametrize("method", SHAPES)
def test_a_wrong_shape_is_an_error_that_names_family_and_method(method):
    function, words = SHAPES[method]
    with mock.patch.object(hl.statistics, "FAMILIES", hl.statistics.FAMILIES):
        with pytest.raises(ValueError, match=re.escape(f"Own.{method} must return {words}")):
            hl.register_statistic(type("Own", (energy_statistic.Energy,), {method: function})())
        assert "energy" not in hl.statistics.known_statistics()


def test_what_cannot_be_registered_is_an_error():
    with mock.patch.object(hl.statistics, "FAMILIES", hl.statistics.FAMILIES):
        with pytest.raises(TypeError, match="family must be a Family, got"):
            hl.register_statistic(energy_statistic.Energy)
        incomplete = type(
            "Own", (hl.statistics.Family,), {"statistics": ("own",), "gradients": ("own",)}
        )
        with pytest.raises(
            ValueError,
            match=r"family Own must .* got no finish, no coefficient or direct or scaled",
        ):
            hl.register_statistic(incomplete())
        empty = type(
            "Empty", (energy_statistic.Energy,), {"finish": lambda self, sums, joined: ({}, {})}
        )
        words = r"Empty.finish must return \['energy'\], got no \['energy'\]"
        with pytest.raises(ValueError, match=words):
            hl.register_statistic(empty())
    with mock.patch.object(hl.statistics, "FAMILIES", hl.statistics.FAMILIES):
        hl.register_statistic(energy_statistic.Energy())
        with pytest.raises(ValueError, match=r"of which .'energy'. are taken"):
            hl.register_statistic(energy_statistic.Energy())
        stats = hl.vocab_statistics(torch.ones(1, 3), want=("energy",))
        assert torch.equal(stats.energy, stats.registered["energy"])
        compiled = torch.compile(
            lambda x: hl.vocab_statistics(x, want=("energy",)).energy, fullgraph=True
        )
        assert torch.equal(compiled(torch.ones(1, 3)), stats.energy)
    with pytest.raises(AttributeError, match="VocabStatistics have no 'energy'"):
        _ = hl.vocab_statistics(torch.ones(1, 3)).energy
