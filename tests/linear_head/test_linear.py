"""The fused linear head gives the values of float64 and of materialised logits."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from linear_problem import BOTH, H, N, V, a_teacher, joined, relative, small_blocks, tensors, terms
from ranks import on_ranks

import tp_headloss as hl
from tp_headloss.engine.backend import load_backend
from tp_headloss.linear_head import blocks
from tp_headloss.statistics import FULL_TEACHER, TOPK_TEACHER, layout_of

SOFTCAP = 8.0
UNEVEN = {1: [0, 200], 2: [0, 130, 200], 4: [0, 30, 30, 131, 200], 3: [0, 70, 130, 200]}


def plain_loss(logits, labels, weights):
    """The definition of `terms`, in the logits' type; z after bias and softcap."""
    z = SOFTCAP * torch.tanh(logits / SOFTCAP)
    log_p = z.log_softmax(-1)
    nll = -log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    per_token = 0.9 * nll - 0.1 * log_p.mean(-1) + 0.01 * z.logsumexp(-1) ** 2 - 0.1 * entropy
    weights = torch.where(labels != -100, weights.to(z.dtype), 0.0)
    return (weights * per_token).sum() / weights.sum()


def plain(operands, labels, weights):
    hidden, weight, bias = (x.clone().requires_grad_() for x in operands)
    logits = F.linear(hidden, weight)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) + bias
    loss = plain_loss(wide, labels, weights)
    return loss, *torch.autograd.grad(loss, (hidden, weight, bias))


def head_run(group, device, boundaries, dtype, backend, linear, padding=3, upstream=3.0):
    """Loss, and gradients of hidden states, weight shard and bias shard; so many ids at the end are
    padding."""
    hidden, weight, bias, labels, weights = (x.to(device) for x in tensors(dtype))
    shard = hl.VocabShard.from_boundaries(boundaries, V - padding, group)
    local = slice(shard.start, shard.stop)
    # padding holds anything
    weight[shard.vocab_size :], bias[shard.vocab_size :] = torch.nan, torch.inf
    rank = 0 if group is None else group.rank()
    if linear.hidden_grad == "reduce_scatter":
        hidden = hidden.chunk(shard.world_size)[rank]
    hidden, weight, bias = (
        x.clone().requires_grad_() for x in (hidden, weight[local], bias[local])
    )
    with small_blocks():
        out = hl.HeadLoss(terms(), metrics=("accuracy",), options=hl.Options(backend=backend)).linear(
            hidden, weight, labels, bias=bias, shard=shard, token_weight=weights, linear=linear,
            transform=hl.Transform(softcap=SOFTCAP),
        )  # fmt: skip
        grads = torch.autograd.grad(upstream * out.loss, (hidden, weight, bias), retain_graph=True)
        if linear.upstream is None:  # else there is one backward
            again = torch.autograd.grad(upstream * out.loss, (hidden, weight, bias))
            assert all(torch.equal(a, b) for a, b in zip(grads, again))
    return out.loss.detach(), *(g.cpu() / upstream for g in grads)


def masked_truth():
    """The last three ids of the vocabulary are padding in `head_run`."""
    *operands, labels, weights = tensors()
    hidden, weight, bias = (x.double() for x in operands)
    known = torch.where(labels < V - 3, labels, -100)
    assert torch.equal(known, labels)
    loss, of_hidden, of_weight, of_bias = plain(
        (hidden, weight[: V - 3], bias[: V - 3]), labels, weights
    )
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
    """Uneven shards (one of them empty), padding, bias, softcap, weights; several blocks, the last
    one smaller."""
    linear = hl.Linear(mode=mode, hidden_grad=how, budget=64 * 4 * 64)
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
        parts = [
            F.linear(copy, weight[a:b]) for copy, a, b in zip(copies, boundaries, boundaries[1:])
        ]
        loss = plain_loss(torch.cat(parts, 1).float() + bias, labels, weights)
        *of_hidden, of_weight, of_bias = torch.autograd.grad(loss, (*copies, weight, bias))
        return loss, of_hidden[0] + of_hidden[1], of_weight, of_bias

    exact = plain(tuple(x.double() for x in operands), labels, weights)
    usual = of_shards(operands)
    upstream = 64.0 if mode == "one_sweep" and dtype == torch.float16 else None
    linear = hl.Linear(mode=mode, budget=4 * V * H + 64 * 4 * 64, upstream=upstream)
    results = on_ranks(world_size, head_run, boundaries, dtype, "torch", linear, 0, upstream or 1.0)
    for got, other, expected in zip(joined(results, "all_reduce"), usual, exact):
        assert got.dtype == other.dtype
        assert relative(got, expected) <= 2 * relative(other, expected) + 1e-6


STATISTICS = {  # wanted statistics, and the teacher
    "plain": (("entropy", "total", "argmax"), None),
    "teacher": (FULL_TEACHER, "logits"),
    "entries": (TOPK_TEACHER, "entries"),
}


@pytest.mark.parametrize("kind", STATISTICS)
def test_every_statistic_equals_that_of_materialised_logits(kind, backend, device, monkeypatch):
    """Values and gradients, per-token temperatures and several blocks of tokens and ids each
    way."""
    want, teacher = STATISTICS[kind]
    n, v = (12, 72) if backend == "triton" and device == "cpu" else (N, V)
    hidden, weight, _, labels, temperature = (x.to(device) for x in tensors())
    hidden, weight, labels, temperature = (
        hidden[:n],
        weight[:v],
        labels[:n] % v,
        temperature[:n] + 0.5,
    )
    teacher = a_teacher(teacher, device, n, v)
    keywords = {
        "want": want,
        "teacher": teacher,
        "transform": hl.Transform(temperature=temperature),
    }
    keywords["options"] = hl.Options(backend=backend)

    def of(function, *operands):
        stats = function(*operands, labels, **keywords)
        names = [
            name for name in ("lse", "log_prob", *want) if name in layout_of(True, want).gradients
        ]
        values = torch.stack([getattr(stats, name) for name in names])
        weights = torch.linspace(-1, 1, values.numel(), device=device).view_as(values)
        return stats, (weights * values).sum()

    materialised = [x.clone().requires_grad_() for x in (hidden, weight)]
    expected, loss = of(hl.vocab_statistics, F.linear(*materialised))
    expected_grads = torch.autograd.grad(loss, materialised)
    operands = [x.clone().requires_grad_() for x in (hidden, weight)]
    monkeypatch.setattr(blocks, "recompute_blocks", lambda *_: blocks.Blocks(7, 9, 40))
    got, loss = of(hl.linear_vocab_statistics, *operands)
    grads = torch.autograd.grad(loss, operands)
    for name, value in expected._asdict().items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(getattr(got, name), value, rtol=2e-5, atol=2e-5)
    for a, b in zip(grads, expected_grads):
        assert relative(a, b) < 1e-5


def test_gradcheck():
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(s, generator=generator, dtype=torch.float64) for s in ((5, 6), (11, 6), (11,))
    )
    labels = torch.tensor([3, 0, -100, 10, 7])

    def values(hidden, weight, bias):
        stats = hl.linear_vocab_statistics(hidden, weight, labels, bias=bias, want=("entropy",))
        return stats.lse, stats.log_prob, stats.entropy

    torch.autograd.gradcheck(values, [x.requires_grad_() for x in (hidden, weight, bias)])


@pytest.mark.parametrize(
    "name, terms, inputs",
    [
        ("policy", [hl.PolicyGradient("clip"), hl.Entropy(0.1)], ("advantages", "old_log_prob")),
        (
            "teacher",
            [hl.CrossEntropy(), hl.Distillation(1.0, "jsd", temperature_squared=True)],
            ("teacher",),
        ),
        (
            "entries",
            [hl.CrossEntropy(), hl.TopKDistillation(1.0, "forward_kl", "tail")],
            ("teacher",),
        ),
        (
            "own",
            [
                hl.Term(
                    "focal", lambda s: -((1 - s.log_prob.exp()) ** 2) * s.log_prob, tokenwise=True
                )
            ],
            (),
        ),
        ("classes", [hl.CrossEntropy(class_weight=torch.rand(V), label_smoothing=0.1)], ()),
        ("sequences", [hl.CrossEntropy(label_smoothing=0.1)], ("sequences",)),
    ],
)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_one_sweep_equals_recompute(name, terms, inputs, reduction):
    hidden, weight, _, labels, weights = tensors()
    drawn = {"advantages": torch.randn(N), "old_log_prob": torch.randn(N) - 5}
    drawn["teacher"] = a_teacher("entries" if name == "entries" else "logits", "cpu")
    drawn = {key: x if key == "teacher" else x.view(2, -1) for key, x in drawn.items()}
    drawn["sequences"] = hl.Sequences.from_mask(torch.rand(2, N // 2) > 0.3)
    given, reduction = (
        {key: drawn[key] for key in inputs},
        "seq-mean-token-mean" if name == "sequences" else reduction,
    )
    if "teacher" in given:
        fields = {k: x for k, x in vars(given["teacher"]).items() if isinstance(x, torch.Tensor)}
        given["teacher"] = replace(
            given["teacher"], **{k: x.view(2, N // 2, *x.shape[1:]) for k, x in fields.items()}
        )
    head = hl.HeadLoss(terms, reduction=reduction, metrics=("accuracy", "entropy"))
    denominator = None if reduction == "sum" else 17.0
    out, grads = {}, {}
    with small_blocks():
        for mode in ("recompute", "one_sweep"):
            operands = [x.clone().requires_grad_() for x in (hidden.view(2, -1, H), weight)]
            out[mode] = head.linear(
                *operands, labels.view(2, -1), inputs=given, token_weight=weights.view(2, -1),
                denominator=denominator,
                linear=hl.Linear(mode=mode, budget=16 * 256 * 4),
            )  # fmt: skip
            grads[mode] = torch.autograd.grad(out[mode].loss, operands)
    torch.testing.assert_close(out["one_sweep"].loss, out["recompute"].loss, rtol=1e-6, atol=0)
    for a, b in zip(grads["one_sweep"], grads["recompute"]):
        assert relative(a, b) < 3e-6
    for key, value in out["recompute"].metrics.items():
        torch.testing.assert_close(out["one_sweep"].metrics[key], value)


def test_dtypes_follow_torch_linear(device):
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors())
    with pytest.raises(TypeError, match=r"one dtype, got torch\.bfloat16 and torch\.float32"):
        hl.linear_vocab_statistics(hidden.bfloat16(), weight, labels)
    for hidden_dtype in (torch.float32, torch.bfloat16):
        for mode in ("recompute", "one_sweep"):
            operands = [hidden.to(hidden_dtype).requires_grad_(), weight.clone().requires_grad_()]
            with torch.autocast(device, torch.bfloat16):
                rounded = hl.Linear(mode=mode)
                out = hl.HeadLoss([hl.CrossEntropy()]).linear(*operands, labels, linear=rounded)
                expected = F.cross_entropy(F.linear(*operands).float(), labels)
            grads = torch.autograd.grad(out.loss, operands)
            assert [g.dtype for g in grads] == [hidden_dtype, torch.float32]
            torch.testing.assert_close(out.loss, expected, rtol=1e-6, atol=0)
            for a, b in zip(grads, torch.autograd.grad(expected, operands)):
                assert relative(a, b) < 6e-3


@BOTH
def test_bad_labels_make_their_token_nan(mode):
    hidden, weight, _, labels, _ = tensors()
    labels[5] = V
    out = hl.HeadLoss(reduction="sum").linear(
        hidden.requires_grad_(), weight, labels, linear=hl.Linear(mode=mode)
    )
    assert out.loss.isnan() and out.stats.log_prob.isnan().nonzero().tolist() == [[5]]
    (grad,) = torch.autograd.grad(out.loss, hidden)
    assert grad[5].isnan().all() and grad.isnan().sum() == H
    with pytest.raises(ValueError, match="label of token 5"):
        hl.HeadLoss(options=hl.Options(check=True)).linear(
            hidden, weight, labels, linear=hl.Linear(mode=mode)
        )


@BOTH
def test_one_token_without_leading_dimensions(mode):
    hidden, weight, _, labels, _ = tensors()
    terms = [
        hl.PolicyGradient("clip"),
        hl.PolicyGradient("positive-nll", name="nll"),
        hl.KLToReference(0.1),
    ]
    head = hl.HeadLoss(terms, reduction="sum")
    values = {"advantages": 1.5, "rewards": 1.0, "old_log_prob": -3.0, "reference_log_prob": -4.0}
    inputs = {name: torch.tensor(value) for name, value in values.items()}
    losses = []
    for shape in ((), (1,)):
        given = {name: x.view(shape) for name, x in inputs.items()}
        one = hidden[0].view(*shape, H).clone().requires_grad_()
        out = head.linear(one, weight, labels[0].view(shape), inputs=given, linear=hl.Linear(mode))
        losses.append((out.loss.detach(), *torch.autograd.grad(out.loss, one)))
    for a, b in zip(*losses):
        assert torch.equal(a, b.view(a.shape))


@BOTH
def test_no_tokens_and_ignored_tokens(mode):
    for labels in (torch.zeros(0, dtype=torch.long), torch.full((3,), -100)):
        operands = [
            torch.randn(len(labels), H, requires_grad=True),
            torch.randn(V, H, requires_grad=True),
        ]
        loss = hl.HeadLoss(terms()).linear(*operands, labels, linear=hl.Linear(mode=mode)).loss
        assert loss == 0 and all(not g.any() for g in torch.autograd.grad(loss, operands))


@BOTH
def test_float16_with_a_loss_scale(mode):
    """Gradients that an upstream of 1 would round to 0."""
    hidden, weight, _, labels, _ = tensors(torch.float16)
    hidden, scale = hidden.repeat(100, 1).requires_grad_(), 2.0**14
    weight, labels = (0.1 * weight).requires_grad_(), labels.repeat(100)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = torch.autograd.grad(F.cross_entropy(F.linear(*exact), labels), exact)
    for linear in (
        hl.Linear(),
        hl.Linear(mode=mode, upstream=scale if mode == "one_sweep" else None),
    ):
        loss = hl.HeadLoss().linear(hidden, weight, labels, linear=linear).loss
        grads = torch.autograd.grad(scale * loss, (hidden, weight))
        assert (
            max(relative(a / scale, b) for a, b in zip([g.double() for g in grads], exact)) < 2e-3
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_are_counted_exactly(dtype):
    hidden, weight, _, labels, _ = tensors()
    hidden, labels = hidden[:1].expand(70_000, H), labels[:1].expand(70_000)
    weights = torch.ones(70_000, dtype=dtype)
    operands = hidden.requires_grad_(), weight[:8], labels % 8
    ways = hl.Linear("recompute"), hl.Linear("one_sweep")
    losses = [
        hl.HeadLoss().linear(*operands, token_weight=weights, linear=linear).loss for linear in ways
    ]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)


@pytest.mark.parametrize("cut", [blocks.Blocks(16, 16, 512), blocks.Blocks(16, 1024, 16), None])
def test_sums_over_many_blocks_are_in_fp32(cut, monkeypatch):
    """Gradients of half precision, of dozens of blocks, as exact as one product would be."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1024, 8, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(512, 8, generator=generator).bfloat16().requires_grad_()
    bias, labels = (
        torch.zeros(512, requires_grad=True),
        torch.randint(512, (1024,), generator=generator),
    )

    def grads():
        loss = (
            hl.HeadLoss()
            .linear(hidden, weight, labels, bias=bias, linear=hl.Linear(mode=mode))
            .loss
        )
        return torch.autograd.grad(loss, (hidden, weight, bias))

    mode = "recompute"
    whole = grads()
    if cut is None:
        mode = "one_sweep"
        monkeypatch.setattr(blocks, "one_sweep_tokens", lambda *_: 16)
    else:
        monkeypatch.setattr(blocks, "recompute_blocks", lambda *_: cut)
    # one number in a few is rounded to its neighbour
    for a, b, most in zip(grads(), whole, (1e-3, 1e-3, 1e-6)):
        assert relative(a, b) < most


def test_the_last_backward_hands_over_what_the_forward_computed(options, device, monkeypatch):
    """Without a copy: nobody asks for it again."""
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors())
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    head = hl.HeadLoss(options=options)
    loss = head.linear(hidden, weight, labels, linear=hl.Linear("one_sweep")).loss
    kept = torch.autograd.grad(3 * loss, (hidden, weight), retain_graph=True)
    before = [x.clone() for x in kept]
    made = []
    backend = load_backend(options.backend)
    monkeypatch.setattr(backend, "scale", lambda *_: made.append("a copy"))
    last = torch.autograd.grad(3 * loss, (hidden, weight))
    assert not made
    for a, b, c in zip(last, kept, before):
        assert torch.equal(a, b) and torch.equal(b, c)


def test_memory_that_hooks_of_saved_tensors_hand_out_is_not_written_to(options, device):
    """As that of a pool of an offloading trainer, which serves one call after the other."""
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors())
    parts = [x.clone().requires_grad_() for x in (hidden, hidden + 1)]
    weight, pool = weight.requires_grad_(), {}
    head, linear = hl.HeadLoss(options=options), hl.Linear("one_sweep")

    def unpack(x):
        memory = pool.setdefault((x.shape, x.dtype), torch.empty_like(x))
        return memory.copy_(x)

    with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
        losses = [head.linear(x, weight, labels, linear=linear).loss for x in parts]
    for loss in losses:
        loss.backward()
    for x in parts:
        (expected,) = torch.autograd.grad(head.linear(x, weight, labels, linear=linear).loss, x)
        assert torch.equal(x.grad, expected)
