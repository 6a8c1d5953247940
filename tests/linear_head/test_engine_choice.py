"""Which calls of a linear head have epilogues if they ask for neither engine, also under torch.compile."""

from types import SimpleNamespace

import pytest
import torch
from linear_problem import V, tensors

from tp_headloss import HeadLoss, Linear, Options, Term, VocabShard
from tp_headloss.integrations.megatron.head import linear_options
from tp_headloss.linear_head import call
from tp_headloss.linear_head.call import LinearCall, _takes_epilogue

TRITON = Options(backend="triton")
GPUS = {"9.0": ((9, 0), True, True), "10.0": ((10, 0), False, True), "8.0": ((8, 0), False, False)}


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU. Nothing computes with it."""

    device, is_cuda = torch.device("cuda", 0), True


class OnCpu(torch.Tensor):
    device, is_cuda = torch.device("cpu"), False


@pytest.mark.parametrize("capability, default, asked", GPUS.values(), ids=GPUS)
def test_epilogues_are_the_default_where_they_were_measured(capability, default, asked, device, monkeypatch):
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors(torch.bfloat16))
    shard = VocabShard(0, V, V)
    request = LinearCall.checked(
        hidden, weight, labels, None, shard, (), None, None, None, -100, TRITON, Linear()
    ).request  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    def takes(place=OnGpu, dtype=torch.bfloat16, **options):
        return _takes_epilogue(hidden.as_subclass(place), weight, dtype, request, Linear(**options))[0]

    assert (takes(), takes(logits="float32")) == (default, asked)
    assert not takes(logits="operands") and not takes(engine="blocks") and not takes(engine="blocks", logits="float32")
    assert not takes(dtype=torch.float32) and not takes(OnCpu)


def test_the_default_says_why_recompute_takes_blocks(device, monkeypatch, caplog):
    monkeypatch.setattr(call, "is_default", lambda device: True)
    caplog.set_level("DEBUG", "tp_headloss")
    hidden, weight, _, labels, _ = (x.to(device).requires_grad_(x.is_floating_point()) for x in tensors(torch.float32))

    def modes(**linear):
        caplog.clear()
        HeadLoss(options=TRITON).linear(hidden, weight, labels, linear=Linear(**linear))
        return caplog.messages

    (message,) = modes(mode="recompute")
    assert message.startswith("linear head: recompute by blocks of logits, because the operands are neither bfloat16")
    assert modes(mode="recompute", engine="blocks") == ["linear head: recompute"]
    assert modes(mode="one_sweep") == ["linear head: one sweep"]


def test_a_weight_anywhere_in_memory_is_compiled(device):
    """Where it is, is known only when the compiled call runs: it is copied unless that is a multiple of 16 bytes."""
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors(torch.bfloat16))
    head = HeadLoss(options=TRITON)

    def step(hidden, weight):
        return head.linear(hidden, weight, labels, linear=Linear(engine="epilogue")).loss

    compiled, results = torch.compile(step, fullgraph=True, backend="aot_eager"), []
    memory = torch.empty(weight.numel() + 8, dtype=weight.dtype, device=device)
    for first in (0, 1):
        operands = [hidden.clone(), memory[first : first + weight.numel()].view_as(weight).copy_(weight)]
        operands = [x.detach().requires_grad_() for x in operands]
        loss = compiled(*operands)
        results.append([loss, *torch.autograd.grad(loss, operands)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_an_epilogues_operands_may_be_unpacked_elsewhere_in_memory(device):
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors(torch.bfloat16))
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def gradients(unpack):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            loss = HeadLoss(options=TRITON).linear(*leaves, labels, linear=Linear(engine="epilogue")).loss
            return torch.autograd.grad(loss, leaves)

    expected = gradients(lambda x: x)
    for unpack in (
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: torch.cat([x.view(-1)[:1], x.view(-1)])[1:].view(x.shape),
    ):
        torch.testing.assert_close(gradients(unpack), expected, rtol=0, atol=0)


def test_a_loss_without_gradients_is_rounded_like_that_of_a_training_step(device, monkeypatch):
    monkeypatch.setattr(call, "is_default", lambda device: True)
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors(torch.bfloat16))
    hidden.requires_grad_()

    def loss(terms=None, **linear):
        return HeadLoss(terms, options=TRITON).linear(hidden, weight, labels, linear=Linear(**linear)).loss.detach()

    def own(stats):  # not declared tokenwise, so that there is no one sweep
        return -stats.log_prob

    rounded = loss(logits="operands")
    with torch.no_grad():
        assert torch.equal(loss(), rounded) and torch.equal(loss(mode="one_sweep"), rounded)
        unrounded = loss(mode="recompute")
        assert not torch.equal(unrounded, rounded)
        assert torch.equal(loss(engine="epilogue"), unrounded) and torch.equal(loss([Term("own", own)]), unrounded)
    assert torch.equal(loss(), rounded) and torch.equal(loss([Term("own", own)]), unrounded)


def test_megatrons_losses_without_gradients_are_rounded_like_those_of_one_sweep():
    """There they are no sum, and so recompute's."""
    layer = SimpleNamespace(
        tp_group=SimpleNamespace(size=lambda: 1),
        sequence_parallel=False,
        allreduce_dgrad=False,
        gradient_accumulation_fusion=False,
    )

    def logits(**linear):
        return linear_options(Linear(**linear), layer, torch.ones(4, 8), "recompute").logits

    assert logits(mode="one_sweep") == "operands" and logits() is None and logits(logits="float32") == "float32"
    assert logits(mode="one_sweep", engine="epilogue") is None


@pytest.mark.cuda
def test_the_default_has_the_bits_of_epilogues_and_is_compiled(device):
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors(torch.bfloat16))
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("elsewhere the default is blocks of logits")

    def run(engine="auto", wrap=lambda function: function):
        def loss_of(hidden, weight):
            return HeadLoss().linear(hidden, weight, labels, linear=Linear("recompute", engine=engine)).loss

        loss = wrap(loss_of)(hidden, weight)
        return loss, *torch.autograd.grad(loss, (hidden, weight))

    default, compiled = run(), run(wrap=lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"))
    assert all(torch.equal(a, b) for other in (compiled, run("epilogue")) for a, b in zip(default, other))
    assert not torch.equal(default[0], run("blocks")[0])
