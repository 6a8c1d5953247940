"""Losses of draft models, and the recipes of docs/guides/draft_heads.md, against their formulas in
float64: sum min(p, q), and gradients by autograd."""

import functools

import pytest
import torch
from pages import ROOT, blocks, names_of
from ranks import on_ranks

import tp_headloss as hl

B, S, K, V, H, H_T = 2, 5, 3, 37, 8, 6
WANT = ("forward_kl", "total_variation", "overlap")


@functools.cache
def recipes():
    return names_of(ROOT / "docs/guides/draft_heads.md")


def problem(dtype=torch.float64):
    """Hidden states and heads of draft and target [B, S, K, ..], and labels, some ignored."""
    generator = torch.Generator().manual_seed(5)
    shapes = (B, S, K, H), (V, H), (B, S, K, H_T), (V, H_T)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    labels = torch.randint(V, (B, S, K), generator=generator)
    return tensors, labels.masked_fill(torch.rand(B, S, K, generator=generator) < 0.3, -100)


def acceptance(draft, target):
    return torch.minimum(draft.softmax(-1), target.softmax(-1)).sum(-1)


def kl(draft, target):
    p = target.log_softmax(-1)
    return (p.exp() * (p - draft.log_softmax(-1))).sum(-1)


def lk_lambda(draft, target, eta=3.0):
    rate = acceptance(draft, target)
    share = (-eta * rate.detach()).exp()
    return share * kl(draft, target) + (1 - share) * (1 - rate)


def lk_alpha(draft, target):
    return -acceptance(draft, target).log()


LOSSES = {
    "lambda": (hl.LKLoss(0.5), lk_lambda),
    "lambda, eta": (hl.LKLoss(0.5, eta=0.7), functools.partial(lk_lambda, eta=0.7)),
    "alpha": (hl.LKLoss(0.5, "alpha"), lk_alpha),
}


def mean(values, labels):
    return torch.where(labels >= 0, values, 0.0).sum() / (labels >= 0).sum()


def call(group, device, kind, from_hidden):
    tensors, labels = problem(torch.float32)
    hidden, weight, target_hidden, target_weight = (x.to(device) for x in tensors)
    shard = hl.VocabShard.from_group(group, V)
    own = slice(shard.start, min(shard.stop, V))
    weight, target_weight = (
        torch.nn.functional.pad(x[own], (0, 0, 0, shard.width - shard.valid_width))
        for x in (weight, target_weight)
    )
    head_loss = hl.HeadLoss(LOSSES[kind][0], metrics=hl.AcceptanceRate())
    hidden.requires_grad_()
    if from_hidden:
        teacher = hl.TeacherHead(target_hidden, target_weight)
        given = {"shard": shard, "inputs": {"teacher": teacher}}
        out = head_loss.linear(hidden, weight, labels.to(device), **given)
    else:
        given = {"shard": shard, "inputs": {"teacher": hl.Teacher(target_hidden @ target_weight.T)}}
        out = head_loss(hidden @ weight.T, labels.to(device), **given)
    out.loss.backward()
    grad = hidden.grad
    if group is not None and not from_hidden:  # logits of one's own
        torch.distributed.all_reduce(grad, group=group)
    return out.loss.detach(), out.means()["acceptance_rate"], grad


@pytest.mark.parametrize("from_hidden", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", LOSSES)
def test_lk_losses_and_the_acceptance_rate(kind, ranks, from_hidden):
    (hidden, weight, target_hidden, target_weight), labels = problem()
    hidden.requires_grad_()
    draft, target = hidden @ weight.T, target_hidden @ target_weight.T
    expected = 0.5 * mean(LOSSES[kind][1](draft, target), labels)
    expected.backward()
    rate = mean(acceptance(draft, target), labels)
    assert 0.1 < rate < 0.9 and hidden.grad.abs().max() > 1e-3
    for loss, found, grad in on_ranks(ranks, call, kind, from_hidden):
        torch.testing.assert_close(loss.cpu().double(), expected.detach(), rtol=3e-6, atol=0)
        torch.testing.assert_close(found.cpu(), rate.detach(), rtol=3e-6, atol=0)
        # Terms of both signs cancel in a product with the weight: a part of the largest one is lost.
        bound = 2e-5 * float(hidden.grad.abs().max())
        torch.testing.assert_close(grad.cpu().double(), hidden.grad, rtol=1e-4, atol=bound)


def call_apart(group, device, backend):
    """Loss and gradients of drafts that have little in common with the target."""
    generator = torch.Generator().manual_seed(2)
    draft, target = torch.randn(6, V, generator=generator), torch.randn(6, V, generator=generator)
    target[torch.arange(6), torch.arange(6)] += torch.tensor([0.0, 4.0, 8.0, 12.0, 14.0, 16.0])
    draft[torch.arange(6), torch.arange(6)] -= torch.tensor([0.0, 3.0, 3.0, 4.0, 5.0, 6.0])
    shard = hl.VocabShard.from_group(group, V)
    own = slice(shard.start, min(shard.stop, V))
    pad = shard.width - shard.valid_width
    mine, theirs = (torch.nn.functional.pad(x[:, own], (0, pad)) for x in (draft, target))
    mine = mine.to(device).requires_grad_()
    head_loss = hl.HeadLoss(
        hl.LKLoss(1.0, "alpha"), reduction="none", options=hl.Options(backend=backend)
    )
    labels = torch.zeros(6, dtype=torch.int64, device=device)
    loss = head_loss(
        mine, labels, shard=shard, inputs={"teacher": hl.Teacher(theirs.to(device))}
    ).loss
    loss.sum().backward()
    draft = draft.double().requires_grad_()
    expected = lk_alpha(draft, target.double())
    expected.sum().backward()
    grad = mine.grad[:, : shard.valid_width].cpu().double()
    return loss.detach().cpu().double(), expected.detach(), grad, draft.grad, own


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_small_acceptance_rate_has_its_digits(ranks, backend):
    """One of 1e-4 is 1 minus a total variation that has four of them."""
    for loss, expected, grad, whole, own in on_ranks(ranks, call_apart, backend):
        assert (-expected).exp().amin() < 1e-4
        torch.testing.assert_close(loss, expected, rtol=3e-7, atol=3e-7)
        largest = whole.abs().amax(1, keepdim=True)
        assert ((grad - whole[:, own]).abs() / largest).max() < 2e-6


def test_a_draft_without_a_common_id_has_a_finite_loss_and_no_gradient():
    draft = torch.tensor([[200.0, 0.0]], requires_grad=True)
    stats = hl.vocab_statistics(draft, want=WANT, teacher=hl.Teacher(-draft.detach()))
    loss = hl.losses.lk_alpha(stats)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), -torch.tensor([1e-5]).log())
    assert not draft.grad.any()


def test_an_ignored_token_is_accepted():
    stats = hl.vocab_statistics(
        torch.zeros(1, 4), torch.tensor([-100]), want=WANT, teacher=hl.Teacher(torch.ones(1, 4))
    )
    assert hl.losses.acceptance_rate(stats) == 1 and hl.losses.lk_alpha(stats) == 0


def drafts():
    """Logits of draft and target [B, S, K, V], and labels."""
    (hidden, weight, target_hidden, target_weight), labels = problem()
    draft = (hidden @ weight.T).requires_grad_()
    return draft, target_hidden @ target_weight.T, labels


def expect_equal(draft, found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    grads = (torch.autograd.grad(x, draft, retain_graph=True)[0] for x in (found, expected))
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-9)


def test_the_total_variation_of_prefixes_and_the_accepted_length():
    draft, target, labels = drafts()
    labels[0, 0] = torch.tensor([3, 4, -100])  # a chain that ends early
    labels[0, 1] = -100
    out = recipes()["prefixes"](draft, labels, inputs={"teacher": hl.Teacher(target)})
    rates = acceptance(draft, target)
    prefixes = torch.where(labels >= 0, rates, 1.0).cumprod(-1)
    expect_equal(draft, out.loss, mean(1 - prefixes, labels))
    lengths = torch.where(labels >= 0, rates, 0.0).cumprod(-1).sum(-1)
    expected = lengths[labels[..., 0] >= 0].mean()
    torch.testing.assert_close(out.means()["accepted_length"], expected.detach(), rtol=1e-6, atol=0)


def test_d_pace():
    draft, _, labels = drafts()
    log_p = draft.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    smooth = (0.5 + 0.5 * log_p.detach().exp()).masked_fill(labels < 0, 1.0)
    expected = torch.zeros_like(log_p)
    for k in range(K):  # the weight of position k: the sum of the prefixes that end there or later
        later = [smooth[..., : end + 1].prod(-1) * (labels[..., end] >= 0) for end in range(k, K)]
        expected[..., k] = -sum(later) * log_p[..., k]
    out = recipes()["blocks"](draft, labels)
    expect_equal(draft, out.loss, mean(expected, labels))


def test_steps_of_eagle_3_are_weighted_means():
    draft, target, labels = drafts()
    weight = 0.8 ** torch.arange(K) / (labels >= 0).sum((0, 1))
    given = {"token_weight": weight.expand(labels.shape), "denominator": 1.0}
    inputs = {"teacher": hl.Teacher(target)}
    out = recipes()["head_loss"](draft, labels, inputs=inputs, **given)
    values = lk_lambda(draft, target)
    steps = [0.8**k * mean(values[..., k], labels[..., k]) for k in range(K)]
    expect_equal(draft, out.loss, sum(steps))


def test_targets_of_later_steps():
    x = torch.arange(4)[None, :, None]
    later = recipes()["at_later_positions"](x, 2)
    assert later[0, :, :, 0].tolist() == [[0, 1], [1, 2], [2, 3], [3, 0]]


def test_the_draft_vocabulary_of_the_page():
    scope = recipes()
    ids, draft_id = scope["draft_ids"], scope["draft_id"]
    assert torch.equal(draft_id[ids], torch.arange(len(ids)))
    assert (draft_id[~scope["t2d"]] == -100).all()
    assert torch.equal(scope["target_rows"], scope["target_weight"][ids])


ON_ONE_RANK = "group = None  # under torchrun"


def rates_of_the_page(group, device):
    """The rates that the page computes when it runs on ranks, and the gradient of this one's."""
    scope = {"group": group}
    with torch.device(device):
        for block in blocks(ROOT / "docs/guides/draft_heads.md"):
            if not block.kind:
                exec(block.code.replace(ON_ONE_RANK, "#"), scope)
    return scope["rate"].detach(), scope["log_rate"].detach(), scope["draft_logits"].grad


def test_the_rates_of_the_page_are_the_same_on_several_ranks():
    code = "".join(block.code for block in blocks(ROOT / "docs/guides/draft_heads.md"))
    assert code.count(ON_ONE_RANK) == 1
    ((rate, log_rate, grad),) = on_ranks(1, rates_of_the_page)
    assert 0.02 < rate < 0.2 and grad.abs().sum() > 0  # a fifth of the ids
    for ranks in (2, 4):
        found = on_ranks(ranks, rates_of_the_page)
        for other in found:
            torch.testing.assert_close(other[0], rate, rtol=1e-5, atol=0)
            torch.testing.assert_close(other[1], log_rate, rtol=1e-5, atol=0)
        grads = torch.cat([other[2] for other in found], -1)
        torch.testing.assert_close(grads, grad, rtol=1e-4, atol=1e-8)
