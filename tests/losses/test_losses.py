"""Losses, reductions and HeadLoss against torch in float64, unsharded and sharded."""

import pytest
import torch
import torch.nn.functional as F
from loss_problem import N, V, rows
from ranks import on_ranks

from tp_headloss import (
    CausalLMLoss,
    CrossEntropy,
    Entropy,
    HeadLoss,
    Options,
    Sequences,
    Term,
    VocabShard,
    ZLoss,
    multi_token_targets,
    vocab_statistics,
)


def megatron_smoothed(x, labels, smoothing):
    """Mass 1 - s on the label, s / (V - 1) on every other id: from the definition, not from our formula."""
    q = torch.full_like(x, smoothing / (x.shape[1] - 1)).scatter(1, labels.clamp(min=0)[:, None], 1 - smoothing)
    return torch.where(labels >= 0, -(q * x.log_softmax(-1)).sum(-1), 0.0)


def head_run(group, device, kind, backend):
    x, labels, class_weight, token_weight = rows()
    shard = VocabShard.from_group(group, V, 128)
    local = F.pad(x, (0, 28), value=50.0)[:, shard.start : shard.stop].clone().to(device).requires_grad_()
    labels, options = labels.to(device), Options(backend=backend)
    class_weight, token_weight = class_weight.to(device), token_weight.to(device)
    terms, kwargs, call = [CrossEntropy()], {}, {}
    if kind.startswith("smoothing"):
        terms = [CrossEntropy(label_smoothing=0.1, smoothing_formula=kind.split()[1])]
    elif kind == "class weights":
        terms = [CrossEntropy(class_weight=class_weight)]
    elif kind == "class weights and smoothing":
        terms = [CrossEntropy(class_weight=class_weight, label_smoothing=0.2)]
    elif kind == "token weights":
        call = {"token_weight": token_weight}
    elif kind in ("sum", "none"):
        kwargs = {"reduction": kind}
    elif kind == "denominator":
        call = {"denominator": torch.tensor(37.0, device=device)}
    elif kind == "number":
        call = {"denominator": 37}
    elif kind == "everything":
        own = Term("tsallis", lambda stats: 1 - (2 * stats.log_prob).exp(), weight=0.3)
        terms = [CrossEntropy(0.9, label_smoothing=0.1), ZLoss(1e-2), Entropy(0.05), own]
        kwargs = {"metrics": ("accuracy", "entropy", "log_prob", "lse")}
    out = HeadLoss(terms, options=options, **kwargs)(local, labels, shard=shard, **call)
    upstream = torch.linspace(0.5, 1.5, N, device=device) if kind == "none" else torch.tensor(0.37, device=device)
    out.loss.backward(upstream)
    facts = {**{f"term {k}": v for k, v in out.terms.items()}, **out.metrics}
    return out.loss.detach(), out.count, local.grad, {k: v.detach() for k, v in facts.items()}


def reference(kind):
    x, labels, class_weight, token_weight = rows(torch.float64)
    class_weight, token_weight = class_weight.double(), token_weight.double()
    x.requires_grad_()
    valid = labels >= 0
    nll = F.cross_entropy(x, labels, reduction="none")
    count, facts = valid.sum(), {"term cross_entropy": nll.sum()}
    if kind == "smoothing torch":
        loss = F.cross_entropy(x, labels, label_smoothing=0.1)
    elif kind == "smoothing megatron":
        loss = megatron_smoothed(x, labels, 0.1).sum() / count
    elif kind == "class weights":
        loss = F.cross_entropy(x, labels, weight=class_weight)
    elif kind == "class weights and smoothing":
        loss = F.cross_entropy(x, labels, weight=class_weight, label_smoothing=0.2)
    elif kind == "token weights":
        count = token_weight[valid].sum()
        loss = (token_weight * nll).sum() / count
    elif kind in ("sum", "none"):
        loss = nll.sum() if kind == "sum" else nll
    elif kind in ("denominator", "number"):
        loss = nll.sum() / 37
    elif kind == "everything":
        log_p = x.log_softmax(-1)
        lse, entropy = x.logsumexp(-1), -(log_p.exp() * log_p).sum(-1)
        smooth = F.cross_entropy(x, labels, label_smoothing=0.1, reduction="none")
        own = 1 - (-2 * nll).exp()
        per_token = {"cross_entropy": smooth, "z_loss": lse**2, "entropy": -entropy, "tsallis": own}
        weights = (0.9, 1e-2, 0.05, 0.3)
        loss = sum(w * v[valid].sum() for w, v in zip(weights, per_token.values())) / count
        facts = {f"term {k}": v[valid].sum() for k, v in per_token.items()}
        facts |= {"accuracy": (x.argmax(-1) == labels)[valid].sum(), "entropy": entropy[valid].sum(),
                  "log_prob": -nll.sum(), "lse": lse[valid].sum()}  # fmt: skip
    else:
        loss = nll.sum() / count
    upstream = torch.linspace(0.5, 1.5, N).double() if kind == "none" else torch.tensor(0.37, dtype=torch.float64)
    (grad,) = torch.autograd.grad(loss, x, upstream)
    if kind.startswith(("smoothing", "class", "token")):
        facts = {}
    return loss.detach(), count, grad, {k: v.detach() for k, v in facts.items()}


KINDS = ["mean", "sum", "none", "denominator", "number", "smoothing torch", "smoothing megatron", "class weights",
         "class weights and smoothing", "token weights", "everything"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_losses_and_reductions_equal_torch_at_every_group_size(world_size, kind, backend):
    results = on_ranks(world_size, head_run, kind, backend)
    loss, count, grad, facts = reference(kind)
    for ours, our_count, _, our_facts in results:
        assert torch.equal(ours, results[0][0])
        torch.testing.assert_close(ours.double(), loss, rtol=2e-6, atol=1e-7)
        torch.testing.assert_close(our_count.double(), count.double(), rtol=1e-6, atol=0)
        for name, value in facts.items():
            torch.testing.assert_close(our_facts[name].double(), value.double(), rtol=3e-6, atol=1e-5)
    got = torch.cat([r[2] for r in results], 1)
    torch.testing.assert_close(got[:, :V].double(), grad, rtol=3e-5, atol=1e-8)
    assert grad.abs().max() > 1e-3 and not got[:, V:].any()


def test_the_two_smoothing_formulas_are_one_identity():
    """megatron(a) = torch(a V / (V - 1)), and the two differ."""
    x, labels, *_ = rows()
    a = HeadLoss([CrossEntropy(label_smoothing=0.1, smoothing_formula="megatron")])(x, labels).loss
    b = HeadLoss([CrossEntropy(label_smoothing=0.1 * V / (V - 1))])(x, labels).loss
    c = HeadLoss([CrossEntropy(label_smoothing=0.1)])(x, labels).loss
    torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    assert (a - c).abs() > 1e-5  # 1.6e-5 here


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_zero_valid_tokens_give_zero_and_zero_gradient(reduction, backend, device):
    x = rows()[0].to(device).requires_grad_()
    head = HeadLoss([CrossEntropy(), ZLoss(1e-4), Entropy(0.1)], reduction=reduction, options=Options(backend=backend))
    out = head(x, torch.full((N,), -100, device=device))
    out.loss.sum().backward()
    assert out.count == 0 and not out.loss.any() and not x.grad.any() and x.grad.isfinite().all()


@pytest.mark.parametrize("denominator", [0, 0.0, torch.tensor(0.0)])
def test_a_zero_denominator_gives_zero(denominator):
    x, labels, *_ = rows()
    x.requires_grad_()
    loss = HeadLoss()(x, labels, denominator=denominator).loss
    loss.backward()
    assert loss == 0 and not x.grad.any()


def test_one_valid_token_among_many_keeps_its_gradient():
    x = torch.randn(512, V, requires_grad=True)
    labels = torch.full((512,), -100)
    labels[377] = 5
    HeadLoss()(x, labels).loss.backward()
    expected = x.detach()[377].softmax(-1)
    expected[5] -= 1
    torch.testing.assert_close(x.grad[377], expected)
    assert x.grad.abs().sum(-1).nonzero().flatten().tolist() == [377]


def test_micro_batches_with_a_global_denominator_add_up_to_the_whole():
    """Gradient accumulation over micro-batches of unequal token counts is the gradient of the whole batch."""
    x, labels, *_ = rows()
    labels[:5] = -100
    head, whole, parts = HeadLoss([CrossEntropy(), ZLoss(1e-2)]), x.clone().requires_grad_(), x.clone().requires_grad_()
    head(whole, labels).loss.backward()
    count = (labels != -100).sum()
    for part, y in zip(parts.split(6), labels.split(6)):
        head(part, y, denominator=count).loss.backward()
    torch.testing.assert_close(parts.grad, whole.grad)


def test_token_weights_of_zero_and_one_are_a_mask():
    x, labels, *_ = rows()
    mask = torch.arange(N) % 3 != 0
    a = HeadLoss([CrossEntropy(), ZLoss(0.1)])(x, labels, token_weight=mask.float())
    b = HeadLoss([CrossEntropy(), ZLoss(0.1)])(x, torch.where(mask, labels, -100))
    assert a.count == b.count
    torch.testing.assert_close(a.loss, b.loss)


def test_a_poisoned_ignored_token_leaks_nowhere():
    x, labels, *_ = rows()
    x[2] = float("nan")
    x.requires_grad_()
    out = HeadLoss([CrossEntropy(label_smoothing=0.1), ZLoss(1e-2), Entropy(0.1)], metrics=("entropy", "accuracy"))(
        x, labels
    )
    out.loss.backward()
    assert out.loss.isfinite() and x.grad.isfinite().all() and out.metrics["entropy"].isfinite()


def test_causal_lm_loss_shifts_the_labels_itself():
    x = torch.randn(3, 8, V, requires_grad=True)
    labels = torch.randint(0, V, (3, 8))
    labels[1, :4] = -100
    out = CausalLMLoss(HeadLoss([CrossEntropy()], metrics=("accuracy",)))(x, labels)
    expected = F.cross_entropy(x[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))
    torch.testing.assert_close(out.loss, expected)
    assert out.count == (labels[:, 1:] != -100).sum()
    (grad,) = torch.autograd.grad(out.loss, x)
    assert not grad[:, -1].any()
    weight = torch.rand(3, 8)  # of the labels, shifted with them
    out = CausalLMLoss()(x, labels, token_weight=weight)
    per_label = F.cross_entropy(x[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    counted = weight[:, 1:] * (labels[:, 1:] != -100)
    torch.testing.assert_close(out.loss, (per_label * counted).sum() / counted.sum())
    torch.testing.assert_close(grad, torch.autograd.grad(expected, x)[0])


def test_a_users_own_function_of_the_statistics_needs_no_kernel(backend, device):
    """Focal loss and a squared-entropy penalty, with gradients through log_prob, entropy and lse at once."""
    x, labels, *_ = (t.to(device) for t in rows())
    labels = labels.clamp(min=0)

    def own(log_prob, entropy, lse):
        return (-((1 - log_prob.exp()) ** 2) * log_prob + 0.1 * entropy**2 + 0.01 * lse.abs()).mean()

    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    stats = vocab_statistics(a, labels, want=("entropy",), options=Options(backend=backend))
    own(stats.log_prob, stats.entropy, stats.lse).backward()
    log_p = b.log_softmax(-1)
    own(log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), b.logsumexp(-1)).backward()
    torch.testing.assert_close(a.grad.double(), b.grad, rtol=3e-5, atol=1e-7)


@pytest.mark.parametrize("sequences", [False, True])
def test_int32_labels_go_with_any_ignore_index(sequences, device):
    """Tokens that a weight or a mask takes out get it, and int32 does not hold it."""
    x, labels = torch.randn(2, 3, V, device=device), torch.randint(0, V, (2, 3), dtype=torch.int32, device=device)
    mask = torch.tensor([[True, False, True], [True, True, False]], device=device)
    taken = {"inputs": {"sequences": Sequences.from_mask(mask)}} if sequences else {"token_weight": mask.float()}
    loss = HeadLoss(ignore_index=1 << 40)(x, labels, **taken).loss
    expected = F.cross_entropy(x[mask], labels[mask].long())
    torch.testing.assert_close(loss, expected)
    labels, ignored = labels.view(1, 6), 1 << 40  # neither do the labels that have no next token
    rows_of_depths, _ = multi_token_targets(labels, 2, ignore_index=ignored)
    assert rows_of_depths[2, 0].tolist() == [*labels[0, 2:].tolist(), ignored, ignored]
    loss = CausalLMLoss(HeadLoss(ignore_index=ignored))(x.view(1, 6, V), labels).loss
    torch.testing.assert_close(loss, F.cross_entropy(x.view(6, V)[:-1], labels[0, 1:].long()))
