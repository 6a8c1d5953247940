"""Which calls of a linear head have epilogues, also under torch.compile, and that all of them round
alike."""

import pytest
import torch
from linear_problem import H, V, tensors

from tp_headloss import HeadLoss, Linear, Options, VocabShard
from tp_headloss.call.given import Given
from tp_headloss.engine import passes
from tp_headloss.linear_head import epilogue
from tp_headloss.linear_head.request import LinearRequest

TRITON = Options(backend="triton")
GPUS = {"9.0": ((9, 0), True, True), "10.0": ((10, 0), False, True), "8.0": ((8, 0), False, False)}


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU. Nothing computes with it."""

    device, is_cuda = torch.device("cuda", 0), True


class OnCpu(torch.Tensor):
    device, is_cuda = torch.device("cpu"), False


@pytest.mark.parametrize("capability, default, asked", GPUS.values(), ids=GPUS)
def test_epilogues_are_the_default_where_they_were_measured(
    capability, default, asked, device, monkeypatch
):
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors(torch.bfloat16))
    shard = VocabShard(0, V, V)
    given = Given(
        None, labels, shard, options=TRITON, hidden=hidden, weight=weight, linear=Linear()
    )
    request = LinearRequest.checked(given).request
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    def takes(place=OnGpu, dtype=torch.bfloat16, **options):
        return (
            epilogue.obstacle(hidden.as_subclass(place), weight, dtype, request, Linear(**options))
            is None
        )

    assert (takes(), takes(exact_logits=True)) == (default, asked)
    assert not takes(dtype=torch.float32) and not takes(OnCpu)


def test_the_default_says_why_recompute_takes_blocks(device, monkeypatch, caplog):
    monkeypatch.setattr(epilogue, "is_default", lambda device: True)
    caplog.set_level("DEBUG", "tp_headloss")
    hidden, weight, _, labels, _ = (
        x.to(device).requires_grad_(x.is_floating_point()) for x in tensors(torch.float32)
    )

    def modes(**linear):
        caplog.clear()
        HeadLoss(options=TRITON).linear(hidden, weight, labels, linear=Linear(**linear))
        return caplog.messages

    (message,) = modes(mode="recompute")
    assert message.startswith(
        "linear head: recompute by blocks of logits, because the operands are neither bfloat16"
    )
    assert modes(mode="one_sweep") == ["linear head: one sweep"]


def test_a_weight_anywhere_in_memory_is_compiled(device):
    """Where it is, is known only when the compiled call runs: it is copied unless that is a
    multiple of 16 bytes."""
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors(torch.bfloat16))
    head = HeadLoss(options=TRITON)

    def step(hidden, weight):
        return head.linear(hidden, weight, labels, linear=Linear(exact_logits=True)).loss

    compiled, results = torch.compile(step, fullgraph=True, backend="aot_eager"), []
    memory = torch.empty(weight.numel() + 8, dtype=weight.dtype, device=device)
    for first in (0, 1):
        operands = [
            hidden.clone(),
            memory[first : first + weight.numel()].view_as(weight).copy_(weight),
        ]
        operands = [x.detach().requires_grad_() for x in operands]
        loss = compiled(*operands)
        results.append([loss, *torch.autograd.grad(loss, operands)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_an_epilogues_operands_may_be_unpacked_elsewhere_in_memory(device):
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors(torch.bfloat16))
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def gradients(unpack):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            loss = (
                HeadLoss(options=TRITON)
                .linear(*leaves, labels, linear=Linear(exact_logits=True))
                .loss
            )
            return torch.autograd.grad(loss, leaves)

    expected = gradients(lambda x: x)
    for unpack in (
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: torch.cat([x.view(-1)[:1], x.view(-1)])[1:].view(x.shape),
    ):
        torch.testing.assert_close(gradients(unpack), expected, rtol=0, atol=0)


def test_every_way_to_a_loss_has_equally_rounded_logits(device, monkeypatch):
    """Products of small numbers are exact, so that each GEMM has the bits of another."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randint(-9, 9, (n, H), generator=generator) / 4 for n in (16, V))
    hidden, weight = (
        hidden.to(device, torch.bfloat16).requires_grad_(),
        weight.to(device, torch.bfloat16),
    )
    labels = torch.randint(V, (16,), generator=generator).to(device)

    def log_probs(epilogues, **linear):
        monkeypatch.setattr(epilogue, "is_default", lambda device: epilogues)
        return (
            HeadLoss(options=TRITON)
            .linear(hidden, weight, labels, linear=Linear(**linear))
            .stats.log_prob.detach()
        )

    expected = log_probs(False, mode="one_sweep")
    found = [log_probs(epilogues, mode="recompute") for epilogues in (True, False)]
    with torch.no_grad():
        found += [log_probs(True), log_probs(True, mode="one_sweep")]
    for ours in found:
        torch.testing.assert_close(ours, expected, rtol=2e-6, atol=2e-6)
    exact = log_probs(True, exact_logits=True)
    assert (exact - expected).abs().max() > 1e-3


@pytest.mark.cuda
def test_the_default_has_epilogues_and_is_compiled(device, monkeypatch):
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors(torch.bfloat16))
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("elsewhere the default is blocks of logits")

    def run(wrap=lambda function: function):
        def loss_of(hidden, weight):
            return HeadLoss().linear(hidden, weight, labels, linear=Linear("recompute")).loss

        loss = wrap(loss_of)(hidden, weight)
        return loss, *torch.autograd.grad(loss, (hidden, weight))

    default, compiled = (
        run(),
        run(wrap=lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")),
    )
    assert all(torch.equal(a, b) for a, b in zip(default, compiled))
    monkeypatch.setattr(passes, "linear_packets", None)  # of epilogues
    with pytest.raises(TypeError, match="not callable"):
        run()
