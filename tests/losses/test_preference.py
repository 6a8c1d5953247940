"""DPO and its relatives on summed log-probs, against float64 autograd down to the logits."""

import math

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks

from tp_headloss import (
    CrossEntropy,
    HeadLoss,
    Options,
    Sequences,
    VocabShard,
    losses,
    vocab_statistics,
)

V, B, S = 50, 6, 5  # 3 pairs: chosen completions first
REFERENCE = torch.tensor([-9.0, -3.0, -11.0, -10.0, -4.0, -8.0])
KL = torch.tensor(0.7)


def rows():
    generator = torch.Generator().manual_seed(2)
    x = 1.5 * torch.randn(B, S, V, generator=generator)
    labels = torch.randint(0, V, (B, S), generator=generator)
    labels[torch.arange(S) >= torch.tensor([5, 1, 3, 4, 2, 5])[:, None]] = -100
    return x, labels


def objective(name, total, mean, own):
    """[pairs] or [completions]; `own`: our functions, or the definitions in plain torch."""
    c, r, rc, rr = *total.chunk(2), *REFERENCE.to(total).chunk(2)
    mc, mr = mean.chunk(2)
    h = (c - r) - (rc - rr)
    desirable = torch.tensor([True, True, False, True, False, False], device=total.device)
    kl = KL.to(total)
    if own:
        return {
            "dpo": lambda: losses.dpo(c, r, rc, rr, beta=0.3),
            "cdpo": lambda: losses.dpo(c, r, rc, rr, beta=0.3, label_smoothing=0.2),
            "ipo": lambda: losses.ipo(c, r, rc, rr, beta=0.2),
            "simpo": lambda: losses.simpo(mc, mr, beta=2.5, margin=0.5),
            "orpo": lambda: losses.orpo(mc, mr),
            "kto": lambda: losses.kto(total, REFERENCE.to(total), desirable=desirable, kl=kl, beta=0.3,
                                      desirable_weight=1.2, undesirable_weight=0.7),
        }[name]()  # fmt: skip
    gap = total - REFERENCE.to(total)
    odds = [m.exp() / (1 - m.exp()) for m in (mc, mr)]
    return {
        "dpo": lambda: -torch.sigmoid(0.3 * h).log(),
        "cdpo": lambda: -0.8 * torch.sigmoid(0.3 * h).log() - 0.2 * torch.sigmoid(-0.3 * h).log(),
        "ipo": lambda: (h - 2.5) ** 2,
        "simpo": lambda: -torch.sigmoid(2.5 * (mc - mr) - 0.5).log(),
        "orpo": lambda: -torch.sigmoid((odds[0] / odds[1]).log()).log(),
        "kto": lambda: torch.where(
            desirable,
            1.2 * (1 - torch.sigmoid(0.3 * (gap - kl))),
            0.7 * (1 - torch.sigmoid(0.3 * (kl - gap))),
        ),
    }[name]()


def preference_run(group, device, name, backend):
    x, labels = rows()
    shard = VocabShard.from_group(group, V, 64)
    local = F.pad(x, (0, 64 - V))[..., shard.start : shard.stop].clone().to(device).requires_grad_()
    labels = labels.to(device)
    stats = vocab_statistics(local, labels, shard=shard, options=Options(backend=backend))
    sequences = Sequences.from_mask(labels != -100)
    loss = objective(name, sequences.sum(stats.log_prob), sequences.mean(stats.log_prob), own=True)
    weight = torch.linspace(0.5, 1.5, len(loss), device=device)
    (loss @ weight).backward()
    return loss.detach(), local.grad


# an objective is PyTorch on statistics, the same ones for all of them
@pytest.mark.interpreted_only(name=("dpo", "simpo"))
@pytest.mark.parametrize("name", ["dpo", "cdpo", "ipo", "simpo", "orpo", "kto"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_preference_objectives_equal_float64(world_size, name, backend):
    x, labels = rows()
    x = x.double().requires_grad_()
    log_prob = x.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    mask = labels != -100
    total = torch.where(mask, log_prob, 0.0).sum(1)
    want = objective(name, total, total / mask.sum(1), own=False)
    (grad,) = torch.autograd.grad(
        want @ torch.linspace(0.5, 1.5, len(want), dtype=torch.float64), x
    )
    results = on_ranks(world_size, preference_run, name, backend)
    for loss, _ in results:
        torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-7)
    got = torch.cat([g for _, g in results], -1)
    torch.testing.assert_close(got[..., :V].double(), grad, rtol=1e-4, atol=1e-7)
    assert grad.abs().max() > 1e-3


def test_preferences_and_a_head_loss_share_one_backward(options, device):
    """DPO plus an SFT term: gradients of both meet in one gradient of the logits."""
    x, labels = (t.to(device) for t in rows())
    sequences = Sequences.from_mask(labels != -100)
    reference = REFERENCE.to(device).chunk(2)

    def step(local, terms):
        out = HeadLoss([CrossEntropy(0.3)], options=options)(local, labels)
        dpo = losses.dpo(*sequences.sum(out.stats.log_prob).chunk(2), *reference).mean()
        return torch.autograd.grad(sum(t for t, on in zip((out.loss, dpo), terms) if on), local)[0]

    both, sft, dpo = (step(x.clone().requires_grad_(), on) for on in ((1, 1), (1, 0), (0, 1)))
    torch.testing.assert_close(both, sft + dpo, rtol=1e-5, atol=1e-7)
    assert sft.abs().max() > 1e-3 and dpo.abs().max() > 1e-4


def test_far_and_near_ends_are_exact():
    """Where sigmoid or 1 - p rounds to 0 or 1 in fp32."""
    far = torch.tensor([300.0, -300.0], requires_grad=True)
    loss = losses.dpo(far, torch.zeros(2), torch.zeros(2), torch.zeros(2), beta=1.0)
    torch.testing.assert_close(loss.detach(), torch.tensor([0.0, 300.0]))
    assert torch.autograd.grad(loss.sum(), far)[0].tolist() == [0.0, -1.0]
    mean = torch.tensor([-1e-6, -0.5, -50.0, -200.0], requires_grad=True)
    loss = losses.orpo(mean, torch.full((4,), -math.log(2)))  # whose odds are 1
    truth = mean.detach().double().requires_grad_()
    odds = truth - (-torch.expm1(truth)).log()
    want = F.softplus(-odds)
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
    a, b = (
        torch.autograd.grad(loss.sum(), mean)[0].double(),
        torch.autograd.grad(want.sum(), truth)[0],
    )
    torch.testing.assert_close(a, b, rtol=1e-5, atol=0)
    certain = torch.zeros(2, requires_grad=True)  # p = 1, against p = 1/2
    loss = losses.orpo(certain, torch.full((2,), -0.5)) + losses.orpo(
        torch.full((2,), -0.5), certain
    )
    assert loss.isfinite().all() and torch.autograd.grad(loss.sum(), certain)[0].tolist() == [
        0.0,
        0.0,
    ]


def test_kto_has_no_gradient_to_its_kl_which_is_at_least_0():
    kl, log_prob = torch.tensor(-3.0, requires_grad=True), torch.zeros(2, requires_grad=True)
    loss = losses.kto(log_prob, torch.zeros(2), desirable=torch.tensor([True, False]), kl=kl)
    torch.testing.assert_close(loss.detach(), torch.tensor([0.5, 0.5]))
    loss.sum().backward()
    assert kl.grad is None and log_prob.grad[0] < 0 < log_prob.grad[1]


def test_dpo_of_an_impossible_completion_is_a_limit_and_not_nan():
    chosen = torch.tensor([-1.0], requires_grad=True)
    loss = losses.dpo(
        chosen, torch.tensor([-torch.inf]), torch.tensor([-1.0]), torch.tensor([-2.0])
    )
    loss.sum().backward()
    assert loss.item() == 0.0 and chosen.grad.item() == 0.0
