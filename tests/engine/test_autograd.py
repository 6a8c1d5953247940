"""The contract with autograd: nothing for what no loss used, first derivatives only, hooks,
autocast. Repeated backwards and checkpointing are in tests/promises/test_generated.py."""

import pytest
import torch
from logits_problem import WANT, V, rows

import tp_headloss as hl
from tp_headloss.engine.backend import load_backend


def test_a_statistic_that_no_loss_used_is_not_differentiated(monkeypatch, backend, device):
    module, seen = load_backend(backend), []
    original = module.logits_gradient

    def spy(*args):
        seen.append(list(args[-1]))
        original(*args)

    monkeypatch.setattr(module, "logits_gradient", spy)
    x, labels = rows(device)
    stats = hl.vocab_statistics(
        x.requires_grad_(), labels, want=WANT, options=hl.Options(backend=backend)
    )
    stats.log_prob.sum().backward()
    assert seen == [["log_prob"]]


def test_the_gradients_of_statistics_alone_add_up_to_that_of_their_sum(options, device):
    x, labels = rows(device)
    names, teacher = ("entropy", "collision", "total", "jsd"), hl.Teacher(torch.randn_like(x))
    stats = hl.vocab_statistics(
        x.requires_grad_(), labels, want=names, teacher=teacher, options=options
    )
    values = [getattr(stats, name).sum() for name in ("lse", "log_prob", *names)]
    parts = [torch.autograd.grad(value, x, retain_graph=True)[0] for value in values]
    torch.testing.assert_close(torch.autograd.grad(sum(values), x)[0], sum(parts))
    assert all(part.any() for part in parts)


@pytest.mark.parametrize("name", ["total", "jsd"])
def test_a_bad_label_is_nan_in_gradients_that_have_no_factor_of_the_softmax(name, options, device):
    x, labels = rows(device)
    labels[0] = V
    teacher = hl.Teacher(torch.randn_like(x)) if name == "jsd" else None
    stats = hl.vocab_statistics(
        x.requires_grad_(), labels, want=(name,), teacher=teacher, options=options
    )
    (gradient,) = torch.autograd.grad(getattr(stats, name).sum(), x)
    assert gradient[0].isnan().all() and not gradient[1:].isnan().any()


def test_no_grad_saves_nothing(options, device):
    x, labels = rows(device)
    with torch.no_grad():
        assert not hl.vocab_statistics(x.requires_grad_(), labels).lse.requires_grad
    stats = hl.vocab_statistics(x, labels, want=WANT, options=options)
    assert not stats.argmax.requires_grad and stats.entropy.requires_grad
    assert hl.vocab_statistics(x.detach(), labels).lse.grad_fn is None
    with torch.inference_mode():
        hl.vocab_statistics(x.detach().clone(), labels, options=options)


SECOND = {  # name -> what differentiates a gradient of loss(w) again
    "a penalty": lambda loss, w: torch.autograd.grad(loss(w) + first(loss, w).square().sum(), w),
    "inputs of backward": lambda loss, w: (loss(w) + first(loss, w).square().sum()).backward(
        inputs=[w]
    ),
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
    hidden, labels = (
        torch.randn(5, 6, device=device),
        torch.tensor([1, 2, 3, 4, -100], device=device),
    )
    head_loss = hl.HeadLoss([hl.CrossEntropy(), hl.ZLoss(0.1)], options=hl.Options(backend=backend))

    def loss(w):
        if head == "logits":
            return head_loss(hidden @ w.t(), labels).loss
        return head_loss.linear(hidden, w, labels, linear=hl.Linear(head)).loss

    w = torch.randn(9, 6, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="has first derivatives only"):
        SECOND[how](loss, w)
    # which does not know what its gradients depend on, and refuses create_graph itself
    if head != "one_sweep":
        assert torch.equal(first(loss, w), torch.autograd.grad(loss(w), w)[0])


TOKENS, IDS = 4, 320  # three chunks


def losses_of_all_kinds(backend, device):
    """Functions of logits [TOKENS, IDS], or of hidden states and a weight, that save tensors of each
    kind."""
    labels = torch.tensor([5, IDS - 1, 17, -100], device=device)
    options = hl.Options(backend=backend)
    teacher = {"teacher": hl.Teacher(torch.randn(TOKENS, IDS, device=device))}
    ids = torch.stack([labels.clamp(min=0), *(torch.full_like(labels, k) for k in (7, 250))], 1)
    entries = {
        "teacher": hl.TopKTeacher(
            ids, torch.rand(TOKENS, 3, device=device).log_softmax(-1) - 0.5, renormalize=False
        )
    }
    transform = hl.Transform(
        torch.randn(IDS, device=device), 1.5, 4.0, torch.rand(TOKENS, device=device) + 0.5
    )
    plain = hl.HeadLoss([hl.CrossEntropy(), hl.ZLoss(0.1)], options=options)
    tail = hl.HeadLoss([hl.CrossEntropy(), hl.TopKDistillation(support="tail")], options=options)
    jsd = hl.HeadLoss(
        [hl.CrossEntropy(label_smoothing=0.1), hl.Distillation(1.0, "jsd"), hl.Entropy(0.1)],
        options=options,
    )

    def of_statistics(x):
        given = {
            "sets": hl.IdSets(ids),
            "ids": ids,
            "want": ("set_entropy", "log_probs_at", "total"),
        }
        stats = hl.vocab_statistics(x, labels, transform=transform, options=options, **given)
        return (
            stats.log_prob.sum()
            + stats.set_entropy.sum()
            + (stats.log_probs_at * ids).sum()
            + stats.total.sum()
        )

    kinds = {
        "statistics": of_statistics,
        "prepared": lambda x: plain(x, labels).loss,
        "jsd": lambda x: jsd(x, labels, inputs=teacher).loss,
        "tail": lambda x: tail(x, labels, inputs=entries).loss,
    }

    def of_hidden(mode):
        return lambda h, w: tail.linear(h, w, labels, inputs=entries, linear=hl.Linear(mode)).loss

    return kinds | {mode: of_hidden(mode) for mode in ("recompute", "one_sweep")}


KINDS = ["statistics", "prepared", "jsd", "tail", "recompute", "one_sweep"]


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_may_change_the_strides_of_what_is_saved(kind, backend, device):
    """As offloading may, which packs tensors and gives them back."""
    loss = losses_of_all_kinds(backend, device)[kind]
    torch.manual_seed(1)
    shapes = [(TOKENS, 16), (IDS, 16)] if kind in ("recompute", "one_sweep") else [(TOKENS, IDS)]
    leaves = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]

    def with_gaps(x):
        return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]

    def transposed(x):
        return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() else x

    def gradients(unpack):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            return torch.autograd.grad(loss(*leaves), leaves)

    def all_but_inputs(x):
        return x if x.shape == (TOKENS, IDS) or not x.is_floating_point() else with_gaps(x)

    expected = torch.autograd.grad(loss(*leaves), leaves)
    for unpack in (lambda x: x, with_gaps, transposed, all_but_inputs) * (
        2 if kind == "prepared" else 1
    ):
        found = gradients(unpack)
        # of a GEMM, or none
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if len(leaves) == 2 else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_upstream_gradients_is_refused(kind, backend, device):
    loss = losses_of_all_kinds(backend, device)[kind]
    shapes = [(TOKENS, 16), (IDS, 16)] if kind in ("recompute", "one_sweep") else [(TOKENS, IDS)]
    leaves = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    upstream = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="does not support is_grads_batched=True"):
        torch.autograd.grad(loss(*leaves), leaves, upstream, is_grads_batched=True)
    value = loss(*leaves)
    with pytest.raises(RuntimeError, match="does not support is_grads_batched=True"):
        torch.func.vmap(lambda g: torch.autograd.grad(value, leaves, g))(upstream)


def test_autocast_changes_nothing(options, device):
    x, labels = rows(device)
    head = hl.HeadLoss([hl.CrossEntropy(), hl.ZLoss(1e-2)], options=options)
    plain = head(x, labels).loss
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        assert torch.equal(head(x, labels).loss, plain) and plain.dtype == torch.float32


def test_a_failure_after_the_kernel_leaves_no_gradient_for_a_second_backward(
    backend, device, monkeypatch
):
    """With inplace=True the logits are no longer the logits then."""
    module, (x, labels) = load_backend(backend), rows(device)
    original = module.logits_gradient

    def failing(*args):
        original(*args)
        raise MemoryError

    monkeypatch.setattr(module, "logits_gradient", failing)
    local = x.clone().requires_grad_()
    loss = hl.vocab_statistics(
        local * 1.0, labels, options=hl.Options(backend=backend, inplace=True)
    ).log_prob.sum()
    with pytest.raises(MemoryError):
        loss.backward(retain_graph=True)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="so that there is one backward"):
        loss.backward()


@pytest.mark.parametrize("name", ["labels", "token_weight", "inputs.teacher.logits"])
def test_what_was_made_in_inference_mode_is_named(name):
    """Where autograd has to save it; a call without gradient takes it."""
    x, labels = torch.randn(3, 5), torch.tensor([0, 1, 2])
    with torch.inference_mode():
        given = {
            "labels": labels + 0,
            "token_weight": torch.ones(3),
            "inputs.teacher.logits": torch.randn(3, 5),
        }[name]
    given = {"inputs": {"teacher": hl.Teacher(given)}} if "teacher" in name else {name: given}
    given, terms = {"labels": labels} | given, [hl.Distillation(1.0)] if "inputs" in given else None
    head = hl.HeadLoss(terms)
    for _ in range(2):  # a call of a known kind, too
        assert head(x, **given).loss.isfinite()
        with pytest.raises(
            ValueError, match=rf"^{name} must be tensors that autograd can save, got .*\.clone\(\)"
        ):
            head(x.requires_grad_(), **given)
        x = x.detach()
