"""The contract with autograd: inputs unmodified, a pure backward, first derivatives only, checkpointing, autocast."""

import pytest
import torch
from logits_problem import WANT, N, V, rows
from torch.utils.checkpoint import checkpoint

from tp_headloss import CrossEntropy, HeadLoss, Linear, Options, Teacher, Transform, ZLoss, vocab_statistics
from tp_headloss.engine.backend import load_backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_never_written(dtype, backend, device):
    x, labels = rows(device, dtype=dtype)
    bias, temperature, weight = (
        torch.randn(V, device=device),
        torch.rand(N, device=device) + 0.5,
        torch.rand(V, device=device),
    )
    upstream = torch.randn(N, device=device)
    tensors = (x, labels, bias, temperature, weight, upstream)
    before = [t.clone() for t in tensors]
    x.requires_grad_()
    stats = vocab_statistics(
        x, labels, want=WANT, transform=Transform(bias, 1.5, 4.0, temperature), total_weight=weight,
        options=Options(backend=backend),
    )  # fmt: skip
    for value in (stats.log_prob, stats.entropy, stats.total):
        value.backward(upstream, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before))
    assert x._version == 0


def test_backward_is_pure(backend, device):
    """Thrice with other gradients in between, bit for bit; a sum of gradients, not an overwritten buffer."""
    x, labels = rows(device)
    x.requires_grad_()
    stats = vocab_statistics(x, labels, want=("entropy",), options=Options(backend=backend))
    g = torch.randn(N, device=device)
    first, *_ = torch.autograd.grad(stats.log_prob, x, g, retain_graph=True)
    kept = first.clone()
    torch.autograd.grad([stats.entropy, stats.lse], x, [g, -g], retain_graph=True)
    second, *_ = torch.autograd.grad(stats.log_prob, x, g, retain_graph=True)
    assert torch.equal(first, kept) and torch.equal(second, kept)
    stats.log_prob.backward(g, retain_graph=True)
    stats.log_prob.backward(g)
    torch.testing.assert_close(x.grad, 2 * kept)
    with pytest.raises(RuntimeError, match="second time"):
        stats.log_prob.backward(g)


def test_a_statistic_that_no_loss_used_is_not_differentiated(monkeypatch, backend, device):
    module, seen = load_backend(backend), []
    original = module.logits_gradient

    def spy(*args):
        seen.append(list(args[-1]))
        original(*args)

    monkeypatch.setattr(module, "logits_gradient", spy)
    x, labels = rows(device)
    stats = vocab_statistics(x.requires_grad_(), labels, want=WANT, options=Options(backend=backend))
    stats.log_prob.sum().backward()
    assert seen == [["log_prob"]]


def test_the_gradients_of_statistics_alone_add_up_to_that_of_their_sum(backend, device):
    x, labels = rows(device)
    names, teacher = ("entropy", "collision", "total", "jsd"), Teacher(torch.randn_like(x))
    stats = vocab_statistics(x.requires_grad_(), labels, want=names, teacher=teacher, options=Options(backend=backend))
    values = [getattr(stats, name).sum() for name in ("lse", "log_prob", *names)]
    parts = [torch.autograd.grad(value, x, retain_graph=True)[0] for value in values]
    torch.testing.assert_close(torch.autograd.grad(sum(values), x)[0], sum(parts))
    assert all(part.any() for part in parts)


@pytest.mark.parametrize("name", ["total", "jsd"])
def test_a_bad_label_is_nan_in_gradients_that_have_no_factor_of_the_softmax(name, backend, device):
    x, labels = rows(device)
    labels[0] = V
    teacher = Teacher(torch.randn_like(x)) if name == "jsd" else None
    options = Options(backend=backend)
    stats = vocab_statistics(x.requires_grad_(), labels, want=(name,), teacher=teacher, options=options)
    (gradient,) = torch.autograd.grad(getattr(stats, name).sum(), x)
    assert gradient[0].isnan().all() and not gradient[1:].isnan().any()


def test_no_grad_saves_nothing(backend, device):
    x, labels = rows(device)
    with torch.no_grad():
        assert not vocab_statistics(x.requires_grad_(), labels).lse.requires_grad
    stats = vocab_statistics(x, labels, want=WANT, options=Options(backend=backend))
    assert not stats.argmax.requires_grad and stats.entropy.requires_grad
    assert vocab_statistics(x.detach(), labels).lse.grad_fn is None
    with torch.inference_mode():
        vocab_statistics(x.detach().clone(), labels, options=Options(backend=backend))


SECOND = {  # name -> what differentiates a gradient of loss(w) again
    "a penalty": lambda loss, w: torch.autograd.grad(loss(w) + first(loss, w).square().sum(), w),
    "inputs of backward": lambda loss, w: (loss(w) + first(loss, w).square().sum()).backward(inputs=[w]),
    "backward": lambda loss, w: first(loss, w).sum().backward(),
    "hessian": torch.autograd.functional.hessian,
    "hvp": lambda loss, w: torch.autograd.functional.hvp(loss, w, torch.ones_like(w)),
}


def first(loss, w):
    """The gradient, to be differentiated."""
    return torch.autograd.grad(loss(w), w, create_graph=True)[0]


@pytest.mark.parametrize("head", ["logits", "recompute", "one_sweep"])
@pytest.mark.parametrize("how", SECOND)
def test_a_second_derivative_is_refused_however_it_is_asked_for(how, head, device):
    torch.manual_seed(0)
    backend = "triton" if how == "a penalty" else "torch"  # it is refused above both
    hidden, labels = torch.randn(5, 6, device=device), torch.tensor([1, 2, 3, 4, -100], device=device)
    head_loss = HeadLoss([CrossEntropy(), ZLoss(0.1)], options=Options(backend=backend))

    def loss(w):
        if head == "logits":
            return head_loss(hidden @ w.t(), labels).loss
        return head_loss.linear(hidden, w, labels, linear=Linear(head)).loss

    w = torch.randn(9, 6, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="has first derivatives only"):
        SECOND[how](loss, w)
    if head != "one_sweep":  # which does not know what its gradients depend on, and refuses create_graph itself
        assert torch.equal(first(loss, w), torch.autograd.grad(loss(w), w)[0])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_bits(use_reentrant, backend, device):
    x, labels = rows(device)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    head = HeadLoss([CrossEntropy(), ZLoss(1e-2)], options=Options(backend=backend))
    head(a, labels).loss.backward()
    checkpoint(lambda t: head(t * 1.0, labels).loss, b, use_reentrant=use_reentrant).backward()
    assert torch.equal(a.grad, b.grad)


def test_autocast_changes_nothing(backend, device):
    x, labels = rows(device)
    head = HeadLoss([CrossEntropy(), ZLoss(1e-2)], options=Options(backend=backend))
    plain = head(x, labels).loss
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        assert torch.equal(head(x, labels).loss, plain) and plain.dtype == torch.float32


def test_a_failure_after_the_kernel_leaves_no_gradient_for_a_second_backward(backend, device, monkeypatch):
    """With inplace=True the logits are no longer the logits then."""
    module, (x, labels) = load_backend(backend), rows(device)
    original = module.logits_gradient

    def failing(*args):
        original(*args)
        raise MemoryError

    monkeypatch.setattr(module, "logits_gradient", failing)
    local = x.clone().requires_grad_()
    loss = vocab_statistics(local * 1.0, labels, options=Options(backend=backend, inplace=True)).log_prob.sum()
    with pytest.raises(MemoryError):
        loss.backward(retain_graph=True)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="so that there is one backward"):
        loss.backward()
