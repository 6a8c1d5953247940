"""The fused linear head: against float64, against materialised logits, and its promises about memory and exchanges."""

import contextlib
import logging
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from collectives import counted_collectives
from ranks import on_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tp_headloss import (
    CrossEntropy,
    Distillation,
    Entropy,
    HeadLoss,
    Linear,
    Options,
    PolicyGradient,
    Sequences,
    Teacher,
    Term,
    TopKDistillation,
    TopKTeacher,
    Transform,
    VocabShard,
    ZLoss,
    autograd,
    linear_vocab_statistics,
    sweeps,
    vocab_statistics,
)
from tp_headloss.autograd import GRADS, LinearSpec
from tp_headloss.stats import OF_TEACHER, OF_TOPK

V, H, N = 200, 24, 44  # no multiple of the blocks below
SOFTCAP = 8.0
UNEVEN = {1: [0, 200], 2: [0, 130, 200], 4: [0, 30, 30, 131, 200], 3: [0, 70, 130, 200]}
BOTH = pytest.mark.parametrize("mode", ["recompute", "one_sweep"])


@contextlib.contextmanager
def small_blocks(tile=16):
    """Blocks of this many tokens and ids, so that small shapes have several."""
    planners, before = (sweeps.recompute_blocks, sweeps.one_sweep_tokens), sweeps.TILE
    sweeps.TILE = tile
    for planner in planners:
        planner.cache_clear()
    try:
        yield
    finally:
        sweeps.TILE = before
        for planner in planners:
            planner.cache_clear()


def tensors(dtype=torch.float32):
    """hidden [N, H], weight [V, H], bias [V], labels [N], token weights [N]"""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    labels = torch.randint(0, V, (N,), generator=generator)
    labels[3::11] = -100
    return draw(N, H).to(dtype), (0.4 * draw(V, H)).to(dtype), draw(V).to(dtype), labels, draw(N).abs()


def terms():
    return [CrossEntropy(label_smoothing=0.1), ZLoss(0.01), Entropy(0.1)]


def plain_loss(logits, labels, weights):
    """The definition of `terms`, in the logits' type; z after bias and softcap."""
    z = SOFTCAP * torch.tanh(logits / SOFTCAP)
    log_p = z.log_softmax(-1)
    nll = -log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    per_token = 0.9 * nll - 0.1 * log_p.mean(-1) + 0.01 * z.logsumexp(-1) ** 2 - 0.1 * entropy
    weights = torch.where(labels != -100, weights.to(z.dtype), 0.0)
    return (weights * per_token).sum() / weights.sum()


def truth():
    """float64 loss, and gradients of hidden states, weight and bias."""
    *operands, labels, weights = tensors()
    return plain(tuple(x.double() for x in operands), labels, weights)


def plain(operands, labels, weights):
    hidden, weight, bias = (x.clone().requires_grad_() for x in operands)
    logits = F.linear(hidden, weight)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) + bias
    loss = plain_loss(wide, labels, weights)
    return loss, *torch.autograd.grad(loss, (hidden, weight, bias))


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def head_run(group, device, boundaries, dtype, backend, linear):
    """Loss (times 3 on its way back), and gradients of hidden states, weight shard and bias shard."""
    hidden, weight, bias, labels, weights = (x.to(device) for x in tensors(dtype))
    shard = VocabShard.from_boundaries(boundaries, V - 3, group) if boundaries else VocabShard(0, V, V)
    local = slice(shard.start, shard.stop)
    rank = 0 if group is None else group.rank()
    if linear.hidden_grad == "reduce_scatter":
        hidden = hidden.chunk(shard.world_size)[rank]
    hidden, weight, bias = (x.clone().requires_grad_() for x in (hidden, weight[local], bias[local]))
    with small_blocks():
        out = HeadLoss(terms(), metrics=("accuracy",), options=Options(backend=backend)).linear(
            hidden, weight, labels, bias=bias, shard=shard, token_weight=weights, transform=Transform(softcap=SOFTCAP),
            linear=linear,
        )  # fmt: skip
        grads = torch.autograd.grad(3 * out.loss, (hidden, weight, bias), retain_graph=True)
        again = torch.autograd.grad(3 * out.loss, (hidden, weight, bias))
    assert all(torch.equal(a, b) for a, b in zip(grads, again))
    return out.loss.detach(), *(g.cpu() / 3 for g in grads)


def joined(results, how):
    """Of all ranks -> loss, dH, dW and the bias's gradient of the whole."""
    loss, of_hidden, *_ = results[0]
    if how == "reduce_scatter":
        of_hidden = torch.cat([result[1] for result in results])
    elif how == "none":
        of_hidden = sum(result[1].double() for result in results)
    else:
        assert all(torch.equal(result[1], of_hidden) for result in results)
    return loss.cpu(), of_hidden, *(torch.cat([result[i] for result in results]) for i in (2, 3))


def masked_truth():
    """The last three ids of the vocabulary are padding in `head_run`."""
    *operands, labels, weights = tensors()
    hidden, weight, bias = (x.double() for x in operands)
    known = torch.where(labels < V - 3, labels, -100)
    assert torch.equal(known, labels)
    loss, of_hidden, of_weight, of_bias = plain((hidden, weight[: V - 3], bias[: V - 3]), labels, weights)
    return loss, of_hidden, F.pad(of_weight, (0, 0, 0, 3)), F.pad(of_bias, (0, 3))


@BOTH
@pytest.mark.parametrize(
    "world_size, how, backend",
    [
        (1, "all_reduce", "torch"), (1, "all_reduce", "triton"), (2, "all_reduce", "torch"), (2, "none", "torch"),
        (2, "reduce_scatter", "torch"), (2, "all_reduce", "triton"), (4, "all_reduce", "torch"), (4, "none", "torch"),
        (4, "reduce_scatter", "torch"),
    ],
)  # fmt: skip
def test_losses_and_gradients_equal_float64(world_size, how, backend, mode):
    """Uneven shards (one of them empty), padding, bias, softcap, weights; several blocks, the last one smaller."""
    linear = Linear(mode=mode, hidden_grad=how, budget=64 * 4 * 64)
    results = on_ranks(world_size, head_run, UNEVEN[world_size], torch.float32, backend, linear)
    for got, expected in zip(joined(results, how), masked_truth()):
        assert relative(got, expected) < 2e-6


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_half_precision_is_at_most_twice_as_wrong_as_materialised_logits(world_size, dtype, mode):
    *operands, labels, weights = tensors(dtype)
    boundaries = [0, V] if world_size == 1 else [0, 130, V]

    def of_shards(operands):
        hidden, weight, bias = operands
        if world_size == 1:
            return plain(operands, labels, weights)
        # what a sharded model does: each rank's dH is rounded before they are added up
        hidden, weight, bias = (x.clone().requires_grad_() for x in (hidden, weight, bias))
        copies = [hidden.detach().clone().requires_grad_() for _ in range(2)]
        parts = [F.linear(copy, weight[a:b]) for copy, a, b in zip(copies, boundaries, boundaries[1:])]
        loss = plain_loss(torch.cat(parts, 1).float() + bias, labels, weights)
        *of_hidden, of_weight, of_bias = torch.autograd.grad(loss, (*copies, weight, bias))
        return loss, of_hidden[0] + of_hidden[1], of_weight, of_bias

    exact = plain(tuple(x.double() for x in operands), labels, weights)
    usual = of_shards(operands)
    upstream = 64.0 if mode == "one_sweep" and dtype == torch.float16 else None
    linear = Linear(mode=mode, budget=4 * V * H + 64 * 4 * 64, upstream=upstream)
    results = on_ranks(world_size, whole_run, boundaries, dtype, "torch", linear)
    for got, other, expected in zip(joined(results, "all_reduce"), usual, exact):
        assert got.dtype == other.dtype
        assert relative(got, expected) <= 2 * relative(other, expected) + 1e-6


def whole_run(group, device, boundaries, dtype, backend, linear):
    hidden, weight, bias, labels, weights = (x.to(device) for x in tensors(dtype))
    shard = VocabShard.from_boundaries(boundaries, V, group)
    local = slice(shard.start, shard.stop)
    operands = [x.clone().requires_grad_() for x in (hidden, weight[local], bias[local])]
    with small_blocks():
        out = HeadLoss(terms(), options=Options(backend=backend)).linear(
            *operands[:2], labels, bias=operands[2], shard=shard, token_weight=weights,
            transform=Transform(softcap=SOFTCAP), linear=linear,
        )  # fmt: skip
        upstream = linear.upstream or 1.0
        grads = torch.autograd.grad(upstream * out.loss, operands)
    return out.loss.detach(), *(g.cpu() / upstream for g in grads)


STATISTICS = {  # wanted statistics, and the teacher
    "plain": (("entropy", "total", "argmax"), None),
    "teacher": (OF_TEACHER, "logits"),
    "entries": (OF_TOPK, "entries"),
}


def a_teacher(kind, device, n=N, v=V):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(n, v, generator=generator)
    if kind == "logits":
        return Teacher(logits.to(device), 1.7, torch.linspace(0.5, 2, n, device=device))
    top = logits.log_softmax(-1).topk(5)
    ids, log_probs = top.indices.to(device), top.values.to(device)
    return kind and TopKTeacher(ids, log_probs, renormalize=False)


@pytest.mark.parametrize("kind", STATISTICS)
def test_every_statistic_equals_that_of_materialised_logits(kind, backend, device, monkeypatch):
    """Values and gradients, per-token temperatures and several blocks of tokens and ids each way."""
    want, teacher = STATISTICS[kind]
    n, v = (12, 72) if backend == "triton" and device == "cpu" else (N, V)
    hidden, weight, _, labels, temperature = (x.to(device) for x in tensors())
    hidden, weight, labels, temperature = hidden[:n], weight[:v], labels[:n] % v, temperature[:n] + 0.5
    teacher = a_teacher(teacher, device, n, v)
    keywords = {"want": want, "teacher": teacher, "transform": Transform(temperature=temperature)}
    keywords["options"] = Options(backend=backend)

    def of(function, *operands):
        stats = function(*operands, labels, **keywords)
        names = [name for name in ("lse", "log_prob", *want) if name in GRADS]
        values = torch.stack([getattr(stats, name) for name in names])
        weights = torch.linspace(-1, 1, values.numel(), device=device).view_as(values)
        return stats, (weights * values).sum()

    materialised = [x.clone().requires_grad_() for x in (hidden, weight)]
    expected, loss = of(vocab_statistics, F.linear(*materialised))
    expected_grads = torch.autograd.grad(loss, materialised)
    operands = [x.clone().requires_grad_() for x in (hidden, weight)]
    monkeypatch.setattr(sweeps, "recompute_blocks", lambda *_: sweeps.Blocks(7, 9, 40))
    got, loss = of(linear_vocab_statistics, *operands)
    grads = torch.autograd.grad(loss, operands)
    for name, value in expected._asdict().items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(getattr(got, name), value, rtol=2e-5, atol=2e-5)
    for a, b in zip(grads, expected_grads):
        assert relative(a, b) < 1e-5


def test_gradcheck():
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((5, 6), (11, 6), (11,)))
    labels = torch.tensor([3, 0, -100, 10, 7])

    def values(hidden, weight, bias):
        stats = linear_vocab_statistics(hidden, weight, labels, bias=bias, want=("entropy",))
        return stats.lse, stats.log_prob, stats.entropy

    torch.autograd.gradcheck(values, [x.requires_grad_() for x in (hidden, weight, bias)])


@pytest.mark.parametrize(
    "name, terms, inputs",
    [
        ("policy", [PolicyGradient("clip"), Entropy(0.1)], ("advantages", "old_log_prob")),
        ("teacher", [CrossEntropy(), Distillation(1.0, "jsd", temperature_squared=True)], ("teacher",)),
        ("entries", [CrossEntropy(), TopKDistillation(1.0, "forward_kl", "tail")], ("teacher",)),
        ("own", [Term("focal", lambda s: -((1 - s.log_prob.exp()) ** 2) * s.log_prob, tokenwise=True)], ()),
        ("classes", [CrossEntropy(class_weight=torch.rand(V), label_smoothing=0.1)], ()),
    ],
)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_one_sweep_equals_recompute(name, terms, inputs, reduction):
    hidden, weight, _, labels, weights = tensors()
    drawn = {"advantages": torch.randn(N), "old_log_prob": torch.randn(N) - 5}
    drawn["teacher"] = a_teacher("entries" if name == "entries" else "logits", "cpu")
    given = {key: drawn[key].view(2, -1) if key != "teacher" else drawn[key] for key in inputs}
    if "teacher" in given:
        fields = {k: x for k, x in vars(given["teacher"]).items() if isinstance(x, torch.Tensor)}
        given["teacher"] = replace(given["teacher"], **{k: x.view(2, N // 2, *x.shape[1:]) for k, x in fields.items()})
    head = HeadLoss(terms, reduction=reduction, metrics=("accuracy", "entropy"))
    denominator = 17.0 if reduction == "mean" else None
    out, grads = {}, {}
    with small_blocks():
        for mode in ("recompute", "one_sweep"):
            operands = [x.clone().requires_grad_() for x in (hidden.view(2, -1, H), weight)]
            out[mode] = head.linear(
                *operands, labels.view(2, -1), inputs=given, token_weight=weights.view(2, -1), denominator=denominator,
                linear=Linear(mode=mode, budget=16 * 256 * 4),
            )  # fmt: skip
            grads[mode] = torch.autograd.grad(out[mode].loss, operands)
    torch.testing.assert_close(out["one_sweep"].loss, out["recompute"].loss, rtol=1e-6, atol=0)
    for a, b in zip(grads["one_sweep"], grads["recompute"]):
        assert relative(a, b) < 3e-6
    for key, value in out["recompute"].metrics.items():
        torch.testing.assert_close(out["one_sweep"].metrics[key], value)


def test_sequence_reductions_in_one_sweep():
    hidden, weight, _, labels, _ = tensors()
    inputs = {"sequences": Sequences.from_mask(torch.rand(4, N // 4) > 0.3)}
    head = HeadLoss([CrossEntropy()], reduction="seq-mean-token-mean")
    losses = []
    with small_blocks():
        for mode in ("recompute", "one_sweep"):
            operands = [x.clone().requires_grad_() for x in (hidden.view(4, -1, H), weight)]
            linear = Linear(mode=mode, budget=16 * 256 * 4)
            loss = head.linear(*operands, labels.view(4, -1), inputs=inputs, linear=linear).loss
            losses.append((loss, *torch.autograd.grad(loss, operands)))
    for a, b in zip(*losses):
        assert relative(a, b) < 3e-6


BEFORE = 1 / 64


class Megatron(torch.nn.Parameter):
    """A weight as Megatron leaves it to its layers."""


def main_grad_weight(weight, flags=True, shared=False):
    weight = Megatron(weight.clone())
    weight.main_grad = torch.full(weight.shape, BEFORE, device=weight.device)  # of other micro-batches
    if flags:
        weight.grad_added_to_main_grad = False
    if shared:
        weight.zero_out_wgrad = True
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", ["recompute", "one_sweep", "one_sweep, declared"])
def test_main_grad_gets_the_weight_gradient_in_fp32(case, dtype, backend, device):
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors(dtype))
    hidden, weight, labels = hidden[:24], weight[:72], labels[:24] % 72
    exact = F.cross_entropy(F.linear(*(o := [x.double().requires_grad_() for x in (hidden, weight)])), labels)
    exact = torch.autograd.grad(0.5 * exact, o)
    weight = main_grad_weight(weight)
    declared = 0.5 if "declared" in case else None
    linear = Linear(mode=case.split(",")[0], main_grad=True, upstream=declared, budget=4 * 72 * H + 8 * 128 * 4)
    hidden = hidden.requires_grad_()
    with small_blocks(8):
        head = HeadLoss([CrossEntropy()], options=Options(backend=backend))
        loss = head.linear(hidden, weight, labels, linear=linear).loss
        (0.5 * loss).backward()
    assert weight.grad_added_to_main_grad and weight.grad is not None  # a dummy, for hooks
    rounding = {torch.float32: 1e-6, torch.bfloat16: 6e-3}[dtype]  # of the logits and their gradient
    assert relative(weight.main_grad - BEFORE, exact[1]) < rounding and relative(hidden.grad, exact[0]) < rounding


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


def test_a_tied_embedding_gets_both_gradients():
    _, weight, _, labels, _ = tensors()
    tokens, grads = torch.arange(N) % V, []
    for head in (lambda h, w: F.cross_entropy(F.linear(h, w), labels),
                 lambda h, w: HeadLoss([CrossEntropy()]).linear(h, w, labels).loss):  # fmt: skip
        tied = torch.nn.Parameter(weight.clone())
        head(torch.tanh(F.embedding(tokens, tied)), tied).backward()
        grads.append(tied.grad)
    assert relative(grads[1], grads[0]) < 1e-6


def frozen_run(group, device, needs, how, mode):
    """What each rank's operands require -> gradients, collectives, shapes of the products."""
    rank = 0 if group is None else group.rank()
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors())
    shard = VocabShard.from_group(group, V)
    operands = [
        x.clone().requires_grad_(need) for x, need in zip((hidden, weight[shard.start : shard.stop]), needs[rank])
    ]
    products, multiply = [], sweeps.multiply

    def counted(out, a, b, add=False):
        products.append(tuple(out.shape))
        multiply(out, a, b, add)

    sweeps.multiply = counted
    try:
        with counted_collectives() as collectives:
            loss = (
                HeadLoss([CrossEntropy()])
                .linear(*operands, labels, shard=shard, linear=Linear(mode=mode, hidden_grad=how))
                .loss
            )
            loss.backward()
    finally:
        sweeps.multiply = multiply
    return [None if x.grad is None else x.grad.cpu() for x in operands], dict(collectives), products


@BOTH
@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)])
def test_what_is_frozen_costs_nothing(needs, mode):
    grads, _, products = on_ranks(1, frozen_run, [needs], "all_reduce", mode)[0]
    made = products.count((N, V))
    assert [g is not None for g in grads] == list(needs)
    assert made == (2 if mode == "recompute" else 1) and len(products) == made + sum(needs)


@BOTH
def test_collectives_do_not_depend_on_what_requires_grad(mode):
    """Rank 1's hidden states are frozen, and rank 0's weight; rank 0's dH is the sum of both parts all the same."""
    everything = on_ranks(2, frozen_run, [(True, True)] * 2, "all_reduce", mode)
    mixed = on_ranks(2, frozen_run, [(True, False), (False, True)], "all_reduce", mode)
    assert mixed[0][1] == mixed[1][1] == everything[0][1]
    if on_cpu():
        assert everything[0][1] == {"gloo:all_gather": 1, "gloo:all_reduce": 1}
    assert torch.equal(mixed[0][0][0], everything[0][0][0]) and mixed[1][0][0] is None
    assert mixed[0][0][1] is None and torch.equal(mixed[1][0][1], everything[1][0][1])
    partial = on_ranks(2, frozen_run, [(False, True)] * 2, "none", mode)
    assert not any("reduce" in name for name in partial[0][1])
    assert len(partial[0][2]) == (3 if mode == "recompute" else 2)


def on_cpu():
    """Where there are GPUs, packets may go through symmetric memory, which the profiler does not count."""
    return not torch.cuda.is_available()


def exchanges_run(group, device, mode, how):
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors())
    shard = VocabShard.from_group(group, V)
    hidden = hidden.chunk(2)[group.rank()] if how == "reduce_scatter" else hidden
    operands = [x.clone().requires_grad_() for x in (hidden, weight[shard.start : shard.stop])]
    linear = Linear(mode=mode, hidden_grad=how, budget=16 * 128 * 4)
    with small_blocks(), counted_collectives() as forward:
        loss = HeadLoss(terms()).linear(*operands, labels, shard=shard, linear=linear).loss
    with small_blocks(), counted_collectives() as backward:
        loss.backward()
    return {k.split(":")[1]: v for k, v in forward.items()}, {k.split(":")[1]: v for k, v in backward.items()}


def test_one_exchange_for_all_blocks():
    if not on_cpu():
        pytest.skip("counts gloo's collectives")
    for how, gathers, reduction in (("all_reduce", 0, {"all_reduce": 1}), ("reduce_scatter", 1, None), ("none", 0, {})):
        for forward, backward in on_ranks(2, exchanges_run, "recompute", how):
            assert forward == {"all_gather": 1 + gathers}
            backward.pop("all_gather", None)
            assert backward == reduction if reduction is not None else len(backward) == 1
    for forward, backward in on_ranks(2, exchanges_run, "one_sweep", "all_reduce"):  # three blocks of 16 tokens
        assert forward == {"all_gather": 3, "all_reduce": 1} and backward == {}


def test_ignored_tokens_are_dropped_by_their_count():
    hidden, weight, _, labels, weights = tensors()
    hidden[labels == -100] = torch.nan  # never looked at
    count, head = int((labels != -100).sum()), HeadLoss(terms(), metrics=("accuracy",))
    clean = torch.where((labels == -100)[:, None], 0.0, hidden)

    def run(hidden, linear, head=head, **kw):
        operands = [x.clone().requires_grad_() for x in (hidden.view(2, -1, H), weight)]
        out = head.linear(*operands, labels.view(2, -1), token_weight=weights.view(2, -1), linear=linear, **kw)
        return out, torch.autograd.grad(out.loss.sum(), operands)

    expected, expected_grads = run(clean, Linear())
    for mode in ("recompute", "one_sweep"):
        for most in (count, count + 3):
            out, grads = run(hidden if most == count else clean, Linear(mode=mode, max_valid_tokens=most))
            torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=0)
            torch.testing.assert_close(out.metrics, expected.metrics)
            torch.testing.assert_close(out.stats.log_prob, expected.stats.log_prob, rtol=1e-5, atol=1e-6)
            assert torch.equal(out.stats.valid, expected.stats.valid) and torch.equal(
                out.stats.labels, labels.view(2, -1)
            )
            assert all(relative(a, b) < 2e-6 for a, b in zip(grads, expected_grads))
    few, _ = run(clean, Linear(max_valid_tokens=count - 1))
    assert few.loss.isnan() and few.stats.log_prob.isnan().sum() == 1 and few.stats.log_prob.flatten()[-1].isnan()
    none = HeadLoss(terms(), reduction="none")
    per_token, _ = run(hidden, Linear(max_valid_tokens=count), none)
    torch.testing.assert_close(per_token.loss, run(clean, Linear(), none)[0].loss, rtol=1e-5, atol=1e-6)
    stats = linear_vocab_statistics(hidden, weight, labels, linear=Linear(max_valid_tokens=count), want=("argmax",))
    assert (stats.argmax == -1).sum() == N - count and (stats.lse == 0).sum() == N - count


def test_dtypes_follow_torch_linear(device):
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors())
    with pytest.raises(TypeError, match=r"one dtype, got torch\.bfloat16 and torch\.float32"):
        linear_vocab_statistics(hidden.bfloat16(), weight, labels)
    for hidden_dtype in (torch.float32, torch.bfloat16):
        for mode in ("recompute", "one_sweep"):
            operands = [hidden.to(hidden_dtype).requires_grad_(), weight.clone().requires_grad_()]
            with torch.autocast(device, torch.bfloat16):
                out = HeadLoss([CrossEntropy()]).linear(*operands, labels, linear=Linear(mode=mode))
                expected = F.cross_entropy(F.linear(*operands).float(), labels)
            grads = torch.autograd.grad(out.loss, operands)
            assert [g.dtype for g in grads] == [hidden_dtype, torch.float32]
            torch.testing.assert_close(out.loss, expected, rtol=1e-6, atol=0)
            for a, b in zip(grads, torch.autograd.grad(expected, operands)):
                assert relative(a, b) < 6e-3


class Largest(TorchDispatchMode):
    """Bytes of the largest memory that any operation makes or hands on."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


@BOTH
def test_no_tensor_is_as_large_as_the_logits(mode, monkeypatch):
    """Whatever the number of tokens: beyond them [N, H] and the weight, only blocks within the budget."""
    monkeypatch.setattr(autograd, "runs_here", lambda _: True)  # what an operator does would not be seen
    width, hidden_size, budget = 512, 4, 32 * 512 * 4
    for tokens in (256, 1024):
        hidden = torch.randn(tokens, hidden_size).requires_grad_()
        weight = torch.randn(width, hidden_size).requires_grad_()
        labels = torch.randint(width, (tokens,))
        with small_blocks(), Largest() as largest:
            HeadLoss(terms()).linear(hidden, weight, labels, linear=Linear(mode=mode, budget=budget)).loss.backward()
        per_token = 8 * 64  # packets of 8 chunks in float64
        assert budget // 2 <= largest.bytes <= max(budget, tokens * per_token) < 4 * tokens * width


def test_the_budget_is_kept_and_named():
    Sizes = sweeps.Sizes
    for sizes in (Sizes(8192, 32064, 4096, 2, True, False), Sizes(8192, 32064, 4096, 2, True, True),
                  Sizes(1000, 50257, 768, 4, False, False), Sizes(100_000, 999, 64, 2, True, True)):  # fmt: skip
        n, width, hidden = sizes[:3]
        for planner in (sweeps.recompute_blocks, sweeps.one_sweep_tokens):
            least = sweeps.least_budget(planner, sizes)
            assert planner(sizes, least) is not None and planner(sizes, least * 15 // 16) is None
            for budget in (least, 2 * least, 20 * least):
                plan = planner(sizes, budget)
                forward, tokens, columns = plan if isinstance(plan, tuple) else (plan, plan, width)
                assert forward * sizes.row(width) <= budget
                held = tokens * sizes.row(columns)
                held += 4 * width * hidden if sizes.weight_sums and tokens < n else 0
                held += 4 * tokens * hidden if sizes.sums and columns < width else 0
                assert held <= budget and tokens <= n and columns <= width
    hidden, weight, _, labels, _ = tensors()
    with pytest.raises(ValueError, match="budget must be at least"):
        linear_vocab_statistics(hidden, weight, labels, linear=Linear(budget=1000))
    with pytest.raises(ValueError, match="budget must be at least"):
        HeadLoss().linear(hidden.requires_grad_(), weight, labels, linear=Linear(mode="one_sweep", budget=1000))


def test_auto_says_what_it_does(caplog, monkeypatch):
    from tp_headloss import linear as module

    monkeypatch.setattr(module, "_said", set())
    hidden, weight, _, labels, _ = tensors()
    hidden.requires_grad_()
    with caplog.at_level(logging.INFO, "tp_headloss"):
        for head in (HeadLoss(), HeadLoss(reduction="none"), HeadLoss([Term("own", lambda s: s.lse)])):
            head.linear(hidden, weight, labels)
        with torch.no_grad():
            HeadLoss().linear(hidden, weight, labels)
    assert [record.message for record in caplog.records] == ["linear head: one sweep", "linear head: recompute"]
    with caplog.at_level(logging.DEBUG, "tp_headloss"):
        HeadLoss().linear(hidden, weight, labels)
        monkeypatch.setattr(sweeps, "one_sweep_tokens", lambda *_: 40)  # blocks that are too small to be fast
        HeadLoss().linear(hidden, weight, labels)
    assert [record.message for record in caplog.records[2:]] == ["linear head: one sweep", "linear head: recompute"]


def test_one_sweep_refuses_what_it_cannot_do():
    hidden, weight, _, labels, weights = tensors()
    hidden.requires_grad_()
    one_sweep = Linear(mode="one_sweep")
    for head, kwargs, words in (
        (HeadLoss(reduction="none"), {}, "loss per token"),
        (HeadLoss([Term("own", lambda s: s.lse)]), {}, "declared tokenwise"),
        (HeadLoss([CrossEntropy(class_weight=torch.ones(V))]), {}, "denominators of their own"),
        (HeadLoss(), {"token_weight": weights.clone().requires_grad_()}, "require a gradient"),
        (HeadLoss(), {"hidden": hidden.half(), "weight": weight.half()}, "float16 gradients underflow"),
    ):
        with pytest.raises(ValueError, match=words):
            head.linear(**{"hidden": hidden, "weight": weight, "labels": labels, "linear": one_sweep} | kwargs)
    out = HeadLoss().linear(hidden, weight, labels, linear=one_sweep)
    with pytest.raises(RuntimeError, match="mode='recompute'"):
        (out.loss + out.stats.log_prob.sum()).backward()
    with torch.no_grad():
        assert not HeadLoss().linear(hidden, weight, labels, linear=one_sweep).loss.requires_grad


BAD = {
    "mode": (lambda h, w, y: Linear(mode="fast"), ValueError, "mode must be"),
    "hidden_grad": (lambda h, w, y: Linear(hidden_grad="sum"), ValueError, "hidden_grad must be"),
    "budget": (lambda h, w, y: Linear(budget=0), ValueError, "budget must be"),
    "count": (lambda h, w, y: Linear(max_valid_tokens=-1), ValueError, "max_valid_tokens must be"),
    "count of a part": (
        lambda h, w, y: Linear(max_valid_tokens=3, hidden_grad="reduce_scatter"), ValueError, "gather them first"),
    "count without labels": (
        lambda h, w, y: linear_vocab_statistics(h, w, linear=Linear(max_valid_tokens=3)), ValueError, "got none"),
    "count and teacher": (
        lambda h, w, y: linear_vocab_statistics(
            h, w, y, teacher=a_teacher("logits", "cpu"), want=OF_TEACHER, linear=Linear(max_valid_tokens=3)),
        ValueError, "copy the teacher"),
    "shapes": (lambda h, w, y: linear_vocab_statistics(h, w[:, :5], y), ValueError, r"\[44, 24\] and \[200, 5\]"),
    "rows": (
        lambda h, w, y: linear_vocab_statistics(h, w[:9], y, shard=VocabShard(0, V, V)), ValueError, "200 rows"),
    "labels": (lambda h, w, y: linear_vocab_statistics(h, w, y[:5]), ValueError, "labels must have shape"),
    "bias": (lambda h, w, y: linear_vocab_statistics(h, w, y, bias=w[:5, 0]), ValueError, "bias must have shape"),
    "two biases": (
        lambda h, w, y: linear_vocab_statistics(h, w, y, bias=w[:, 0], transform=Transform(bias=w[:, 0])),
        ValueError, "twice"),
    "inplace": (
        lambda h, w, y: linear_vocab_statistics(h, w, y, options=Options(inplace=True)), ValueError, "inplace"),
    "one sweep of statistics": (
        lambda h, w, y: linear_vocab_statistics(h, w, y, linear=Linear(mode="one_sweep")), ValueError, "HeadLoss"),
    "upstream of statistics": (
        lambda h, w, y: linear_vocab_statistics(h, w, y, linear=Linear(upstream=1.0)), ValueError, "upstream is of"),
    "no main_grad": (
        lambda h, w, y: linear_vocab_statistics(h, w.requires_grad_(), y, linear=Linear(main_grad=True)),
        ValueError, "got None"),
    "one token, scattered": (
        lambda h, w, y: linear_vocab_statistics(h[0], w, y[0], linear=Linear(hidden_grad="reduce_scatter")),
        ValueError, r"got \[H\]"),
    "dropped sequences": (
        lambda h, w, y: HeadLoss(reduction="seq-mean-token-mean").linear(
            h, w, y, inputs={"sequences": Sequences.from_ids(y * 0, 1, y != -100)}, linear=Linear(max_valid_tokens=40)),
        ValueError, "drops tokens of sequences"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    call, kind, words = BAD[name]
    hidden, weight, _, labels, _ = tensors()
    with pytest.raises(kind, match=words):
        call(hidden, weight, labels)


@BOTH
def test_bad_labels_make_their_token_nan(mode):
    hidden, weight, _, labels, _ = tensors()
    labels[5] = V
    out = HeadLoss(reduction="sum").linear(hidden.requires_grad_(), weight, labels, linear=Linear(mode=mode))
    assert out.loss.isnan() and out.stats.log_prob.isnan().nonzero().tolist() == [[5]]
    (grad,) = torch.autograd.grad(out.loss, hidden)
    assert grad[5].isnan().all() and grad.isnan().sum() == H
    with pytest.raises(ValueError, match="label of token 5"):
        HeadLoss(options=Options(check=True)).linear(hidden, weight, labels, linear=Linear(mode=mode))


@BOTH
def test_no_tokens_and_ignored_tokens(mode):
    for labels in (torch.zeros(0, dtype=torch.long), torch.full((3,), -100)):
        operands = [torch.randn(len(labels), H, requires_grad=True), torch.randn(V, H, requires_grad=True)]
        loss = HeadLoss(terms()).linear(*operands, labels, linear=Linear(mode=mode)).loss
        assert loss == 0 and all(not g.any() for g in torch.autograd.grad(loss, operands))


def test_several_hidden_states_are_one_call():
    """Multi-token prediction: depths are rows."""
    hidden, weight, _, labels, _ = tensors()
    labels = torch.stack([labels, labels.roll(-1)])
    both = torch.stack([hidden, 2 * hidden]).requires_grad_()
    stats = linear_vocab_statistics(both, weight, labels)
    for depth in range(2):
        alone = linear_vocab_statistics(both[depth], weight, labels[depth])
        torch.testing.assert_close(stats.log_prob[depth], alone.log_prob)


def test_transposed_hidden_states():
    hidden, weight, _, labels, _ = tensors()
    transposed = hidden.view(4, -1, H).transpose(0, 1)  # [11, 4, H], as Megatron's [s, b, h] seen as [b, s, h]
    stats = linear_vocab_statistics(transposed, weight, labels.view(4, -1).t())
    torch.testing.assert_close(stats.log_prob.t().flatten(), linear_vocab_statistics(hidden, weight, labels).log_prob)


def test_torch_compile_sees_one_graph(device):
    """Of operands in any layout, and of any number of tokens."""
    hidden, weight, bias, labels, _ = (x.to(device) for x in tensors())
    weight = weight.t().contiguous().t()
    head = HeadLoss(terms())

    def loss_of(hidden, weight, bias):
        return head.linear(hidden, weight, labels, bias=bias).loss

    results = []
    for function in (loss_of, torch.compile(loss_of, fullgraph=True, backend="aot_eager")):
        operands = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        loss = function(*operands)
        results.append((loss, *torch.autograd.grad(loss, operands)))
    for a, b in zip(*results):
        assert relative(a, b) < 1e-6
    graphs = []

    def counted(graph, _):
        graphs.append(graph)
        return graph.forward

    statistics = torch.compile(linear_vocab_statistics, fullgraph=True, backend=counted)
    for tokens in (4, 9, 17, 31, 40):
        lse = statistics(hidden[:tokens].detach(), weight, labels[:tokens]).lse
        torch.testing.assert_close(lse, linear_vocab_statistics(hidden[:tokens], weight, labels[:tokens]).lse)
    assert len(graphs) <= 2


def test_operators_are_registered_consistently(device):
    hidden, weight, bias, labels, _ = (x.to(device) for x in tensors())
    hidden = hidden.t().contiguous().t()
    stats = linear_vocab_statistics(hidden.requires_grad_(), weight, labels, bias=bias, want=("entropy",))
    node = stats.lse.grad_fn
    inputs = (labels, bias, *[None] * 6)
    fixed = (*(list(x) if isinstance(x, tuple) else x for x in node.spec), *LinearSpec(*node.linear))
    checks, operators = {"test_utils": ("test_schema", "test_faketensor")}, torch.ops.tp_headloss
    hidden = hidden.detach()
    torch.library.opcheck(operators.linear_statistics.default, (hidden, weight, *inputs, *fixed), **checks)
    merged = operators.linear_statistics(hidden, weight, *inputs, *fixed)[0]
    grads = [torch.randn(N, device=device) if name in ("lse", "entropy") else None for name in GRADS]
    for wanted in ([True, True, True], [False, True, False]):
        args = (hidden, weight, *inputs, merged, grads, wanted, *fixed)
        torch.library.opcheck(operators.linear_gradient.default, args, **checks)


def test_a_checkpointed_head(monkeypatch):
    """Is computed twice, not once per block; but not if it adds to a main_grad in the forward."""
    hidden, weight, _, labels, _ = tensors()
    sweep, calls = sweeps.one_sweep, []
    monkeypatch.setattr(sweeps, "one_sweep", lambda *args: calls.append(1) or sweep(*args))
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
            checkpoint(lambda h: head.linear(h, owner, labels, linear=direct).loss, operands[0], use_reentrant=False)
    assert len(calls) == 1 + 2 and all(torch.equal(a, b) for a, b in zip(*grads))
    assert (owner.main_grad == BEFORE).all()


@BOTH
def test_float16_with_a_loss_scale(mode):
    """Gradients that an upstream of 1 would round to 0."""
    hidden, weight, _, labels, _ = tensors(torch.float16)
    hidden, scale = hidden.repeat(100, 1).requires_grad_(), 2.0**14
    weight, labels = (0.1 * weight).requires_grad_(), labels.repeat(100)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = torch.autograd.grad(F.cross_entropy(F.linear(*exact), labels), exact)
    for linear in (Linear(), Linear(mode=mode, upstream=scale if mode == "one_sweep" else None)):
        loss = HeadLoss().linear(hidden, weight, labels, linear=linear).loss
        grads = torch.autograd.grad(scale * loss, (hidden, weight))
        assert max(relative(a / scale, b) for a, b in zip([g.double() for g in grads], exact)) < 2e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_are_counted_exactly(dtype):
    hidden, weight, _, labels, _ = tensors()
    hidden, labels = hidden[:1].expand(70_000, H), labels[:1].expand(70_000)
    weights = torch.ones(70_000, dtype=dtype)
    losses = [
        HeadLoss()
        .linear(hidden.requires_grad_(), weight[:8], labels % 8, token_weight=weights, linear=Linear(mode=mode))
        .loss
        for mode in ("recompute", "one_sweep")
    ]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)


def test_shapes_are_checked_before_tokens_are_dropped():
    hidden, weight, _, labels, weights = tensors()
    few = Linear(max_valid_tokens=30)
    for call in (
        lambda: HeadLoss().linear(hidden, weight, labels[:5], linear=few),
        lambda: HeadLoss().linear(hidden.view(4, 11, H), weight, labels.view(11, 4), linear=few),
        lambda: linear_vocab_statistics(hidden[:5], weight, labels, linear=few),
        lambda: linear_vocab_statistics(
            hidden.view(4, 11, H),
            weight,
            labels.view(4, 11),
            transform=Transform(temperature=weights.view(11, 4)),
            linear=few,
        ),
    ):
        with pytest.raises(ValueError, match="must begin with the labels' shape"):
            call()
    labels[30] = V
    with pytest.raises(ValueError, match="label of token 30"):
        linear_vocab_statistics(hidden, weight, labels, linear=few, options=Options(check=True))


def test_main_grad_is_found_by_whoever_watches():
    """Under a dispatch mode, of a frozen weight, with a wrong upstream gradient."""
    hidden, weight, _, labels, _ = tensors()
    owner = main_grad_weight(weight)
    with Largest():
        HeadLoss().linear(hidden, owner, labels, linear=Linear(mode="recompute", main_grad=True)).loss.backward()
    assert owner.grad_added_to_main_grad and not (owner.main_grad == BEFORE).all()
    frozen = weight.clone()
    loss = HeadLoss().linear(hidden.requires_grad_(), frozen, labels, linear=Linear(main_grad=True)).loss
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
    loss = HeadLoss().linear(hidden.requires_grad_(), weight, labels, linear=Linear(mode="one_sweep")).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_one_sweep_knows_what_it_cannot_differentiate():
    hidden, weight, _, labels, _ = tensors()
    scale = torch.ones((), requires_grad=True)
    own = Term("own", lambda stats: -scale * stats.log_prob, tokenwise=True)
    with pytest.raises(ValueError, match="depends on something else"):
        HeadLoss([own]).linear(hidden.requires_grad_(), weight, labels)
    constant = HeadLoss([Term("constant", lambda stats: stats.log_prob.detach(), tokenwise=True)])
    loss = constant.linear(hidden, weight, labels).loss
    assert not torch.autograd.grad(loss, hidden)[0].any()


def trainable_run(group, device, needs, mode):
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors())
    shard = VocabShard.from_group(group, V)
    hidden.requires_grad_(needs[group.rank()])
    loss = (
        HeadLoss().linear(hidden, weight[shard.start : shard.stop], labels, shard=shard, linear=Linear(mode=mode)).loss
    )
    if mode == "recompute" or loss.requires_grad:
        loss.backward()
    return hidden.grad


@BOTH
def test_a_rank_where_nothing_requires_a_gradient_takes_part(mode):
    both = on_ranks(2, trainable_run, (True, True), mode)
    one = on_ranks(2, trainable_run, (True, False), mode)
    assert torch.equal(one[0], both[0]) and one[1] is None


@pytest.mark.parametrize("blocks", [sweeps.Blocks(16, 16, 512), sweeps.Blocks(16, 1024, 16), None])
def test_sums_over_many_blocks_are_in_fp32(blocks, monkeypatch):
    """Gradients of half precision, of dozens of blocks, as exact as one product would be."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1024, 8, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(512, 8, generator=generator).bfloat16().requires_grad_()
    bias, labels = torch.zeros(512, requires_grad=True), torch.randint(512, (1024,), generator=generator)

    def grads():
        loss = HeadLoss().linear(hidden, weight, labels, bias=bias, linear=Linear(mode=mode)).loss
        return torch.autograd.grad(loss, (hidden, weight, bias))

    mode = "recompute"
    whole = grads()
    if blocks is None:
        mode = "one_sweep"
        monkeypatch.setattr(sweeps, "one_sweep_tokens", lambda *_: 16)
    else:
        monkeypatch.setattr(sweeps, "recompute_blocks", lambda *_: blocks)
    for a, b, most in zip(grads(), whole, (1e-3, 1e-3, 1e-6)):  # one number in a few is rounded to its neighbour
        assert relative(a, b) < most
