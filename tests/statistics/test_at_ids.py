"""Log-probs of given ids against float64: values, gradients, every carrier, equal bits at any number of ranks."""

import re

import pytest
import torch
import torch.nn.functional as F
from collectives import counted_collectives
from ranks import on_ranks

from tp_headloss import (
    HeadLoss,
    Linear,
    Options,
    Term,
    Transform,
    VocabShard,
    linear_vocab_statistics,
    log_probs,
    vocab_statistics,
)

V, N, K, H = 200, 9, 5, 12


def problem():
    """Logits, labels and ids: in any order, several times, none, the label and a confident one."""
    generator = torch.Generator().manual_seed(7)
    x = 3 * torch.randn(N, V, generator=generator)
    labels = torch.randint(0, V, (N,), generator=generator)
    ids = torch.randint(0, V, (N, K), generator=generator)
    labels[2] = -100
    ids[0, 1] = ids[0, 3] = ids[0, 0]  # one id three times
    ids[1, 2], ids[1, 4] = -1, labels[1]  # none; the label
    x[3, ids[3, 0]] += 30.0
    x[4] += 200.0
    x[5, ids[5, 2]] = -torch.inf
    return x, labels, ids


def upstream(device="cpu"):
    generator = torch.Generator().manual_seed(1)
    g, of_label = torch.randn(N, K, generator=generator), torch.randn(N, generator=generator)
    g[5, 2] = 0.0  # of -inf
    return g.to(device), of_label.to(device)


def truth(x, labels, ids, transform=lambda x: x):
    """Log-probs at the ids [N, K] and the gradient [N, V] in float64."""
    x = x.double().requires_grad_()
    log_p = transform(x).log_softmax(-1)
    at, valid = log_p.gather(1, ids.clamp(min=0)), labels != -100
    known = (ids >= 0) & valid[:, None]
    of_label = torch.where(valid, log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0], 0.0)
    g, g_label = upstream()
    loss = torch.where(known & (g != 0), at * g, 0.0).sum() + (of_label * g_label).sum()
    return torch.where(known, at, 0.0).detach(), torch.autograd.grad(loss, x)[0]


def run(group, device, backend, dtype=torch.float32, ids_dtype=torch.int64):
    x, labels, ids = problem()
    shard = VocabShard.from_group(group, V, 256)
    local = F.pad(x, (0, 56), value=40.0)[:, shard.start : shard.stop].to(device, dtype).clone().requires_grad_()
    with counted_collectives() as events:
        stats = vocab_statistics(
            local, labels.to(device), shard=shard, want=("log_probs_at", "entropy"),
            ids=ids.to(device, ids_dtype), options=Options(backend=backend, transport="gather"),
        )  # fmt: skip
    g, g_label = upstream(device)
    torch.autograd.backward([stats.log_probs_at, stats.log_prob], [g, g_label])
    return stats.log_probs_at.detach().cpu(), local.grad.cpu(), sum(events.values())


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_equal_float64(world_size, dtype, backend):
    if backend == "triton" and (world_size == 2) != (dtype == torch.bfloat16):
        world_size = 1
    x, labels, ids = problem()
    results = on_ranks(world_size, run, backend, dtype, torch.int32 if world_size == 2 else torch.int64)
    values, dx = truth(x.to(dtype), labels, ids)
    for got, _, collectives in results:
        assert collectives == int(world_size > 1) and torch.equal(got, results[0][0])
        torch.testing.assert_close(got.double(), values, rtol=1e-6, atol=1e-6)
    grad = torch.cat([grad for _, grad, _ in results], 1)
    rtol, atol = (2e-5, 2e-6) if dtype == torch.float32 else (2.0**-8, 1e-6)
    torch.testing.assert_close(grad[:, :V].double(), dx, rtol=rtol, atol=atol)
    assert not grad[:, V:].any() and not grad[2].any()


def test_the_bits_are_those_of_one_rank(backend, device):
    values, grad, _ = run(None, device, backend)
    results = on_ranks(2, run, backend)
    assert torch.equal(results[0][0], values) and torch.equal(torch.cat([r[1] for r in results], 1), grad)


def test_logits_are_transformed_first_and_tokens_may_have_any_order(backend, device):
    x, labels, ids = (part[1:] for part in problem())
    bias, temperature = torch.linspace(-1, 1, V), torch.linspace(0.6, 2, 8)
    stored = x.view(2, 4, V).transpose(0, 1).contiguous().to(device).requires_grad_()
    transform = Transform(bias.to(device), 1.3, 9.0, temperature.view(2, 4).to(device))
    stats = vocab_statistics(
        stored.transpose(0, 1), labels.view(2, 4).to(device), want=("log_probs_at",), transform=transform,
        ids=ids.view(2, 4, K).to(device),
        options=Options(backend=backend),
    )  # fmt: skip
    assert stats.log_probs_at.shape == (2, 4, K)
    g, g_label = (part[1:] for part in upstream(device))
    found = [stats.log_probs_at, stats.log_prob]
    (grad,) = torch.autograd.grad(found, stored, [g.view(2, 4, K), g_label.view(2, 4)])

    def transformed(z):
        bounded = torch.tanh((z + bias.double()) * 1.3 / 9.0)
        return 9.0 * bounded / F.pad(temperature, (1, 0), value=1.0).double()[:, None]

    values, dx = truth(*problem(), transformed)
    got = stats.log_probs_at.detach().reshape(8, K).cpu().double()
    torch.testing.assert_close(got, values[1:], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(grad.transpose(0, 1).reshape(8, V).cpu().double(), dx[1:], rtol=2e-5, atol=2e-6)


def tokens_from_hidden(n):
    """Hidden states [n, H], a weight, ids [n, K], labels and a weight for each id."""
    generator = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(n, H, generator=generator), torch.randn(V, H, generator=generator)
    ids, labels = torch.randint(0, V, (n, K), generator=generator), torch.arange(n) % V
    ids[::5, 1], labels[3] = -1, -100
    return hidden, weight, ids, labels, torch.arange(1.0 * n * K).view(n, K) / n


def from_hidden(group, device, backend, mode, n, budget):
    """A soft cross-entropy over given ids, from hidden states: loss, dH, dW."""
    hidden, weight, ids, labels, weights = (x.to(device) for x in tokens_from_hidden(n))
    shard = VocabShard.from_group(group, V)
    local = weight[shard.start : shard.stop].clone().requires_grad_()
    hidden.requires_grad_()
    term = Term("soft", _of_ids, want=("log_probs_at",), inputs=("weights",), tokenwise=True)
    head = HeadLoss([term], options=Options(backend=backend))
    given = {"ids": ids, "weights": weights}
    options = {"valid": {"max_valid_tokens": 5}}.get(mode, {"mode": mode})
    out = head.linear(hidden, local, labels, shard=shard, inputs=given, linear=Linear(budget=budget, **options))
    out.loss.backward()
    return out.loss.detach().cpu(), hidden.grad.cpu(), local.grad.cpu()


def _of_ids(stats, weights):
    return -(weights * stats.log_probs_at).sum(-1)


@pytest.mark.parametrize("columns", [1, 2])
def test_values_of_other_ids_than_those_asked_for_are_refused(columns):
    """[.., 1] would broadcast without a word."""
    term = Term("soft", _of_ids, want=("log_probs_at",), inputs=("weights",))
    given = {"ids": torch.zeros(2, 3, 4, dtype=torch.int64), "weights": torch.ones(2, 3, columns)}
    with pytest.raises(
        ValueError, match=rf"each of a token's 4 ids, or one per token \[2, 3\], got \[2, 3, {columns}\]"
    ):
        HeadLoss([term])(torch.zeros(2, 3, V), torch.zeros(2, 3, dtype=torch.int64), inputs=given)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3), (3, 2, 4)])
def test_ids_that_are_not_of_the_tokens_are_named(shape):
    head = HeadLoss([Term("soft", _of_ids, want=("log_probs_at",), inputs=("weights",))])
    given = {"ids": torch.zeros(shape, dtype=torch.int64), "weights": torch.ones(2, 3)}
    wanted = "have shape [2, 3, 4]" if len(shape) == 3 else "be [.., K] for tokens [2, 3]"
    with pytest.raises(ValueError, match=re.escape(f"ids must {wanted}, got {list(shape)}")):
        head(torch.zeros(2, 3, V), torch.zeros(2, 3, dtype=torch.int64), inputs=given)


@pytest.mark.parametrize("mode", ["recompute", "one_sweep", "valid"])
def test_a_loss_over_given_ids_from_hidden_states(mode, backend):
    """In plain torch by several blocks of tokens."""
    n, budget = (6, 200_000) if mode == "valid" or backend == "triton" else (300, 140_000)
    results = on_ranks(2 if backend == "torch" else 1, from_hidden, backend, mode, n, budget)
    hidden, weight, ids, labels, weights = tokens_from_hidden(n)
    hidden, weight = (x.double().requires_grad_() for x in (hidden, weight))
    at = (hidden @ weight.t()).log_softmax(-1).gather(1, ids.clamp(min=0)) * (ids >= 0)
    loss = -(at * weights).sum(-1)[labels != -100].mean()
    dh, dw = torch.autograd.grad(loss, (hidden, weight))
    for got, grad, _ in results:
        torch.testing.assert_close(got.double(), loss.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad.double(), dh, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([r[2] for r in results]).double(), dw, rtol=1e-4, atol=1e-5)


def test_valid_tokens_alone(backend, device):
    generator = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(n, H, generator=generator).to(device) for n in (6, V))
    ids = torch.randint(0, V, (2, 3, K), generator=generator).to(device)
    labels = torch.tensor([[1, 2, -100], [-100, 5, 6]], device=device)
    whole, picked = (
        linear_vocab_statistics(
            hidden.view(2, 3, H), weight, labels, want=("log_probs_at",), ids=ids,
            linear=Linear(max_valid_tokens=count), options=Options(backend=backend),
        ).log_probs_at
        for count in (None, 5)
    )  # fmt: skip
    torch.testing.assert_close(picked, whole, rtol=1e-5, atol=1e-5)
    assert not whole[0, 2].any() and whole.shape == (2, 3, K)


def test_an_id_outside_of_the_vocabulary_is_nan_and_so_is_its_tokens_gradient(backend, device):
    x, labels, ids = problem()
    ids[6, 1], ids[7, 0] = V, 1 << 40
    ids[2, 1] = V  # of an ignored token
    local = x.to(device).requires_grad_()
    stats = vocab_statistics(
        local, labels.to(device), want=("log_probs_at",), ids=ids.to(device), options=Options(backend=backend)
    )
    nan = stats.log_probs_at.isnan().nonzero().tolist()
    assert nan == [[6, 1], [7, 0]]
    (grad,) = torch.autograd.grad(stats.log_probs_at[:7].sum(), local)
    assert grad[6].isnan().all() and not grad[[0, 1, 2, 3, 4, 7, 8]].isnan().any()
    with pytest.raises(ValueError, match=r"ids of token 6 .flat index. must be below 200"):
        vocab_statistics(
            local, labels.to(device), want=("log_probs_at",), ids=ids.to(device),
            options=Options(backend=backend, check=True),
        )  # fmt: skip


@pytest.mark.parametrize(
    "match, arguments",
    {
        r"need ids \[.., K\], got none": {"want": ("log_probs_at",)},
        r"ids serve the statistics \('log_probs_at',\), got none of them": {"ids": torch.zeros(3, 2).long()},
        r"ids must be \[.., K\] for tokens \[3\], got \[3\]": {"want": ("log_probs_at",), "ids": torch.zeros(3).long()},
        r"ids must have shape \[3, 2\], got \[1, 2\]": {"want": ("log_probs_at",), "ids": torch.zeros(1, 2).long()},
    }.items(),
)
def test_ids_that_do_not_fit_are_refused(match, arguments):
    with pytest.raises(ValueError, match=match):
        vocab_statistics(torch.zeros(3, 9), **arguments)


def test_no_ids_at_all(backend, device):
    x = torch.randn(3, 9, device=device, requires_grad=True)
    none = torch.zeros(3, 0, dtype=torch.int64, device=device)
    stats = vocab_statistics(x, want=("log_probs_at",), ids=none, options=Options(backend=backend))
    assert stats.log_probs_at.shape == (3, 0)
    (grad,) = torch.autograd.grad(stats.log_probs_at.sum() + stats.lse.sum(), x)
    torch.testing.assert_close(grad, x.detach().softmax(-1))


def test_gradcheck_in_float64(device):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 9, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    ids = torch.tensor([[1, 1, 8], [0, -1, 3], [2, 4, 6], [8, 7, 0]], device=device)

    def at(x):
        options = Options(backend="torch")
        return vocab_statistics(x, want=("log_probs_at",), ids=ids, options=options).log_probs_at

    assert at(x).shape == (4, 3) and torch.autograd.gradcheck(at, x)


def test_one_id_is_the_label(backend, device):
    """To rounding, the log-prob of a label."""
    x, labels, _ = problem()
    x, labels = x[5:].to(device), labels[5:].to(device)
    options = Options(backend=backend)
    stats = vocab_statistics(x, labels, want=("log_probs_at",), ids=labels[:, None], options=options)
    torch.testing.assert_close(
        stats.log_probs_at[:, 0], log_probs(x, labels, options=options).log_prob, rtol=1e-6, atol=1e-6
    )
