"""Destinations of a linear head's gradients: main_grad, tied embeddings, a declared upstream
gradient."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from linear_problem import H, Largest, N, V, relative, small_blocks, tensors, terms
from torch.utils.checkpoint import checkpoint

from tp_headloss import CrossEntropy, HeadLoss, Linear
from tp_headloss.engine.backend import load_backend
from tp_headloss.linear_head import sweeps

BEFORE = 1 / 64


class Megatron(torch.nn.Parameter):
    """A weight as Megatron leaves it to its layers."""


def main_grad_weight(weight, flags=True, shared=False):
    weight = Megatron(weight.clone())
    # of other micro-batches
    weight.main_grad = torch.full(weight.shape, BEFORE, device=weight.device)
    if flags:
        weight.grad_added_to_main_grad = False
    if shared:
        weight.zero_out_wgrad = True
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", ["recompute", "one_sweep", "one_sweep, declared"])
def test_main_grad_gets_the_weight_gradient_in_fp32(case, dtype, options, device):
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors(dtype))
    hidden, weight, labels = hidden[:24], weight[:72], labels[:24] % 72
    exact = F.cross_entropy(
        F.linear(*(o := [x.double().requires_grad_() for x in (hidden, weight)])), labels
    )
    exact = torch.autograd.grad(0.5 * exact, o)
    weight = main_grad_weight(weight)
    declared = 0.5 if "declared" in case else None
    linear = Linear(
        mode=case.split(",")[0], main_grad=True, upstream=declared, budget=4 * 72 * H + 8 * 128 * 4
    )
    hidden = hidden.requires_grad_()
    with small_blocks(8):
        head = HeadLoss([CrossEntropy()], options=options)
        loss = head.linear(hidden, weight, labels, linear=linear).loss
        (0.5 * loss).backward()
    assert weight.grad_added_to_main_grad and weight.grad is not None  # a dummy, for hooks
    # of the logits and their gradient
    rounding = {torch.float32: 1e-6, torch.bfloat16: 6e-3}[dtype]
    assert (
        relative(weight.main_grad - BEFORE, exact[1]) < rounding
        and relative(hidden.grad, exact[0]) < rounding
    )


def test_main_grad_without_fullgraph_runs_in_eager(device):
    """torch.compile breaks the graph before it, and with fullgraph says why."""
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors())
    head = HeadLoss([CrossEntropy()])

    def step(owner):
        return head.linear(hidden, owner, labels, linear=Linear(main_grad=True)).loss

    owners = main_grad_weight(weight), main_grad_weight(weight)
    for owner, function in zip(owners, (step, torch.compile(step, backend="eager"))):
        function(owner).backward()
    assert torch.equal(*(owner.main_grad for owner in owners))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="main_grad=True is for eager"):
        torch.compile(step, backend="eager", fullgraph=True)(main_grad_weight(weight))


def test_flags_of_main_grad():
    hidden, weight, _, labels, _ = tensors()
    head = HeadLoss([CrossEntropy()])
    for flags, shared in ((True, True), (False, False)):
        owner = main_grad_weight(weight, flags, shared)
        head.linear(hidden, owner, labels, linear=Linear(main_grad=True)).loss.backward()
        if shared:  # the gradient of a tied embedding is added to the dummy
            assert torch.equal(owner.grad, torch.zeros_like(owner))
        else:
            assert owner.grad is None and not hasattr(owner, "grad_added_to_main_grad")


def test_a_declared_upstream_is_kept():
    hidden, weight, _, labels, _ = tensors()
    hidden.requires_grad_()
    weight, head = main_grad_weight(weight), HeadLoss([CrossEntropy()])
    linear = Linear(mode="one_sweep", main_grad=True, upstream=torch.tensor(2.0))
    loss = head.linear(hidden, weight, labels, linear=linear).loss
    (wrong,) = torch.autograd.grad(3 * loss, hidden, retain_graph=True)
    assert wrong.isnan().all()
    with pytest.raises(RuntimeError, match="no second backward"):
        torch.autograd.grad(2 * loss, hidden)
    with pytest.raises(ValueError, match="upstream is for one sweep"):
        head.linear(hidden, weight, labels, linear=replace(linear, mode="recompute"))


@pytest.mark.parametrize("of_loss", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("number", [0.003, 1 / 3, 2.0])
def test_a_declared_upstream_is_that_of_the_losss_dtype(number, dtype, of_loss):
    hidden, weight, _, labels, _ = (
        x.to(of_loss) if x.dtype.is_floating_point else x for x in tensors()
    )
    hidden.requires_grad_()
    declared = number if dtype is None else torch.tensor(number, dtype=dtype)
    linear = Linear(mode="one_sweep", upstream=declared)
    out = HeadLoss().linear(hidden, weight, labels, linear=linear)
    (found,) = torch.autograd.grad(declared * out.loss, hidden)
    (expected,) = torch.autograd.grad(declared * F.cross_entropy(hidden @ weight.T, labels), hidden)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-7)


def test_a_tied_embedding_gets_both_gradients():
    _, weight, _, labels, _ = tensors()
    tokens, grads = torch.arange(N) % V, []
    for head in (lambda h, w: F.cross_entropy(F.linear(h, w), labels),
                 lambda h, w: HeadLoss([CrossEntropy()]).linear(h, w, labels).loss):  # fmt: skip
        tied = torch.nn.Parameter(weight.clone())
        head(torch.tanh(F.embedding(tokens, tied)), tied).backward()
        grads.append(tied.grad)
    assert relative(grads[1], grads[0]) < 1e-6


def test_a_checkpointed_head(monkeypatch):
    """Is computed twice, not once per block; but not if it adds to a main_grad in the forward."""
    hidden, weight, _, labels, _ = tensors()
    sweep, calls = sweeps.sweep_blocks, []
    monkeypatch.setattr(sweeps, "sweep_blocks", lambda *args: calls.append(1) or sweep(*args))
    head, linear = HeadLoss(terms()), Linear(mode="one_sweep", budget=16 * 256 * 4)
    grads = []
    with small_blocks():
        for run in (lambda f, *x: f(*x), lambda f, *x: checkpoint(f, *x, use_reentrant=False)):
            operands = [x.clone().requires_grad_() for x in (hidden, weight)]
            loss = run(lambda h, w: head.linear(h, w, labels, linear=linear).loss, *operands)
            grads.append(torch.autograd.grad(loss, operands))
        owner = main_grad_weight(weight)
        direct = replace(linear, main_grad=True, upstream=1.0)
        with pytest.raises(RuntimeError, match="cannot be checkpointed"):
            checkpoint(
                lambda h: head.linear(h, owner, labels, linear=direct).loss,
                operands[0],
                use_reentrant=False,
            )
    assert len(calls) == 1 + 2 and all(torch.equal(a, b) for a, b in zip(*grads))
    assert (owner.main_grad == BEFORE).all()


def test_main_grad_is_found_by_whoever_watches():
    """Under a dispatch mode, of a frozen weight, with a wrong upstream gradient."""
    hidden, weight, _, labels, _ = tensors()
    owner = main_grad_weight(weight)
    with Largest():
        HeadLoss().linear(
            hidden, owner, labels, linear=Linear(mode="recompute", main_grad=True)
        ).loss.backward()
    assert owner.grad_added_to_main_grad and not (owner.main_grad == BEFORE).all()
    frozen = weight.clone()
    loss = (
        HeadLoss()
        .linear(hidden.requires_grad_(), frozen, labels, linear=Linear(main_grad=True))
        .loss
    )
    assert torch.autograd.grad(loss, hidden)[0].any()
    owner = main_grad_weight(weight)
    declared = torch.tensor(1.0)
    linear = Linear(mode="one_sweep", main_grad=True, upstream=declared)
    loss = HeadLoss().linear(hidden.detach(), owner, labels, linear=linear).loss
    declared.fill_(3.0)  # too late
    (3 * loss).backward()
    assert owner.main_grad.isnan().any()


def test_gradients_are_let_go_with_the_graph():
    hidden, weight, _, labels, _ = tensors()
    loss = (
        HeadLoss()
        .linear(hidden.requires_grad_(), weight, labels, linear=Linear(mode="one_sweep"))
        .loss
    )
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("add", [False, True])
def test_a_scaled_gradient_is_written_or_added(add, backend, device):
    for dtype in (torch.float32, torch.bfloat16):
        out, x = (
            torch.ones(5, dtype=dtype, device=device),
            torch.arange(5.0, device=device).to(dtype),
        )
        load_backend(backend).scale(out, x, torch.tensor(2.0, device=device), add=add)
        assert out.tolist() == [2.0 * i + add for i in range(5)]
