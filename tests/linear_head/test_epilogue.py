"""A linear head whose statistics and gradient are epilogues of its GEMMs: values, equal bits, and
what it refuses."""

import pytest
import torch
import torch.nn.functional as F
from linear_problem import H, N, V, a_teacher, joined, relative, small_blocks, tensors, terms
from ranks import on_ranks

from tp_headloss import (
    CrossEntropy,
    HeadLoss,
    Linear,
    Options,
    Transform,
    VocabShard,
    linear_vocab_statistics,
)
from tp_headloss import vocab_statistics as statistics_of_logits
from tp_headloss.call.given import Given
from tp_headloss.call.request_of import build_request
from tp_headloss.engine.backend import load_backend
from tp_headloss.linear_head import epilogue
from tp_headloss.statistics import layout_of

TRITON, EPILOGUE = Options(backend="triton"), Linear(exact_logits=True)
WANT = ("entropy", "collision", "total", "argmax")
TRANSFORMS = {
    "plain": {}, "scale": {"scale": -0.7, "temperature": 1.7}, "softcap": {"softcap": 4.0, "scale": 1.3},
    "tokens": {"softcap": 6.0, "temperature": "per token"},
}  # fmt: skip
# of the gradient of the logits, and of dH and dW
ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 5e-4}


def transform_of(name, device):
    keywords = dict(TRANSFORMS[name])
    if "temperature" in keywords and name == "tokens":
        keywords["temperature"] = torch.linspace(0.5, 2, N, device=device)
    return Transform(**keywords)


def weighted_sum(stats, names):
    values = torch.stack([getattr(stats, name) for name in names])
    weights = torch.linspace(
        -1, 1, values.numel(), device=values.device, dtype=values.dtype
    ).view_as(values)
    return (weights * values).sum()


@pytest.mark.parametrize("labels", [True, False], ids=["labels", "no labels"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_statistics_and_gradients_equal_float64(dtype, transform, labels, device):
    """Every family, a bias, ignored tokens, padding; logits are not rounded."""
    hidden, weight, bias, y, _ = (x.to(device) for x in tensors(dtype))
    y, shard = (y % (V - 3) if labels else None), VocabShard(0, V, V - 3)
    weight[V - 3 :], bias[V - 3 :] = torch.nan, torch.nan  # padding holds anything
    if labels:
        y[3::11] = -100
    keywords = {"want": WANT, "shard": shard}
    names = [
        name for name in ("lse", "log_prob", *WANT) if name in layout_of(labels, WANT).gradients
    ]
    operands = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    with small_blocks():
        linear = Linear(exact_logits=True, budget=64 * 4 * 64)
        got = linear_vocab_statistics(
            *operands[:2], y, bias=operands[2], transform=transform_of(transform, device), options=TRITON,
            linear=linear, **keywords,
        )  # fmt: skip
        grads = torch.autograd.grad(weighted_sum(got, names), operands)
    exact = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    logits = F.linear(exact[0], exact[1].nan_to_num()) + exact[2].nan_to_num()
    keywords["options"] = Options(backend="torch")  # which takes float64 anywhere
    wanted = statistics_of_logits(logits, y, transform=transform_of(transform, device), **keywords)
    exact_grads = torch.autograd.grad(weighted_sum(wanted, names), exact)
    for name in layout_of(labels, WANT).outputs:
        if isinstance(value := getattr(wanted, name, None), torch.Tensor):
            torch.testing.assert_close(
                getattr(got, name).to(value.dtype), value, rtol=2e-5, atol=2e-5, msg=name
            )
    assert all(relative(a, b) < 1.5 * ROUNDING[dtype] for a, b in zip(grads, exact_grads))


@pytest.mark.parametrize("engine", ["epilogue", "blocks"])
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize(
    "dtype, most", [(torch.bfloat16, 9), (torch.float16, 99)], ids=["bf16", "fp16"]
)
def test_logits_are_rounded_or_not(engine, backend, dtype, most, device, monkeypatch):
    """Products of small numbers are exact, so that an engine's GEMM has the bits of another."""
    if backend == "torch" and engine == "epilogue":
        return
    monkeypatch.setattr(epilogue, "is_default", lambda device: True)
    if engine == "blocks":
        monkeypatch.setattr(epilogue, "obstacle", lambda *args: "the test asks for blocks")
    generator = torch.Generator().manual_seed(0)
    step = 4 if dtype == torch.bfloat16 else 32
    hidden = (torch.randint(-most, most, (20, H), generator=generator) / step).to(device, dtype)
    weight = (torch.randint(-most, most, (V, H), generator=generator) / step).to(device, dtype)
    labels = torch.randint(V, (20,), generator=generator).to(device)
    for exact, x in (
        (True, hidden.float() @ weight.float().t()),
        (False, F.linear(hidden, weight)),
    ):
        expected = statistics_of_logits(x, labels, want=WANT, options=Options(backend=backend))
        linear, operands = Linear(exact_logits=exact), [hidden.clone().requires_grad_(), weight]
        options = Options(backend=backend)
        got = linear_vocab_statistics(*operands, labels, want=WANT, options=options, linear=linear)
        assert torch.equal(got.target_logit, expected.target_logit) and torch.equal(
            got.argmax, expected.argmax
        )
        for name in ("lse", "log_prob", "entropy", "collision", "total"):
            torch.testing.assert_close(
                getattr(got, name), getattr(expected, name), rtol=2e-6, atol=2e-6
            )
        (grad,) = torch.autograd.grad(got.log_prob.sum(), operands[:1])
        leaf = x.float().requires_grad_()
        found = torch.autograd.grad(F.log_softmax(leaf, -1).gather(1, labels[:, None]).sum(), leaf)[
            0
        ]
        assert relative(grad, found @ weight.float()) < 6e-3


def packets_of(hidden, weight, labels, shard, want=WANT, budget=1 << 27):
    logits = hidden.new_empty(()).expand(hidden.shape[0], weight.shape[0])
    request = build_request(Given(logits, labels, shard, want, options=TRITON), hidden)
    packets = torch.full(
        (shard.chunks, len(request.layout.packet), hidden.shape[0]), torch.nan, device=hidden.device
    )
    load_backend("triton").linear_statistics(packets, hidden, weight, request, False, budget)
    return packets, request


def part_of(shard, ranks, rank):
    """A shard of whole chunks, without a group: its facts alone."""
    chunks = shard.chunks // ranks
    part = object.__new__(VocabShard)
    start, width = rank * chunks * shard.chunk_size, chunks * shard.chunk_size
    facts = shard.facts._replace(
        start=start, chunks=chunks, valid_width=max(0, min(width, shard.vocab_size - start))
    )
    for name, value in {**shard.__dict__, "chunks": chunks, "facts": facts, "start": start}.items():
        object.__setattr__(part, name, value)
    object.__setattr__(part, "stop", start + width)
    return part


def equal_but_ignored(a, b, ignored):
    return torch.equal(a[..., ~ignored], b[..., ~ignored])


def test_bits_depend_on_no_shard_batch_or_memory(device):
    """Packets, and the gradient of the logits."""
    vocab, tokens = 250, 70  # of a padded 256
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(tokens, H, generator=generator).to(device, torch.bfloat16)
    weight = torch.randn(256, H, generator=generator).to(device, torch.bfloat16)
    labels = torch.randint(vocab, (tokens,), generator=generator).to(device)
    labels[::9] = -100
    whole, ignored = VocabShard(0, 256, vocab), labels == -100
    expected, request = packets_of(hidden, weight, labels, whole)
    assert not expected[..., ~ignored].isnan().any()
    backend = load_backend("triton")
    merged, *_ = backend.merge_packets(expected, request)
    grads = {
        name: torch.randn(tokens, generator=generator).to(device)
        for name in ("log_prob", "entropy", "total")
    }

    def gradient(rows, columns, request):
        out = torch.full((tokens, 256), torch.nan, device=device, dtype=torch.bfloat16)[
            rows, columns
        ]
        block = request.rows(rows, out).columns(columns)
        here = {name: g[rows].contiguous() for name, g in grads.items()}
        state = merged[:, rows].contiguous()
        backend.linear_gradient(out, hidden[rows], weight[columns], block, state, here, False)
        return out

    exact = gradient(slice(0, tokens), slice(0, 256), request)
    assert (
        not exact.isnan().any()
        and not exact[:, vocab:].any()
        and not exact[ignored].any()
        and exact.any()
    )
    for ranks in (2, 4, 8):
        width = 256 // ranks
        for rank in range(ranks):
            shard = part_of(whole, ranks, rank)
            found, _ = packets_of(hidden, weight[rank * width : (rank + 1) * width], labels, shard)
            chunks = slice(rank * shard.chunks, (rank + 1) * shard.chunks)
            assert equal_but_ignored(found, expected[chunks], ignored), (ranks, rank)
            columns = slice(rank * width, (rank + 1) * width)
            assert torch.equal(gradient(slice(0, tokens), columns, request), exact[:, columns])
    for rows in (slice(0, 1), slice(33, 70), slice(7, 40)):
        found, _ = packets_of(hidden[rows].contiguous(), weight, labels[rows], whole)
        assert equal_but_ignored(found, expected[..., rows], ignored[rows])
        assert torch.equal(gradient(rows, slice(0, 256), request), exact[rows])
    found, _ = packets_of(hidden, weight, labels, whole, budget=1)  # one tile of tokens at a time
    assert equal_but_ignored(found, expected, ignored)


def sharded_run(group, device, boundaries, linear, dtype, transport="auto"):
    """Loss, dH, and this rank's dW and bias gradient."""
    hidden, weight, bias, labels, weights = (x.to(device) for x in tensors(dtype))
    hidden[labels == -100] = torch.nan  # garbage at padding tokens
    shard = VocabShard.from_boundaries(boundaries, V - 3, group)
    rank, local = (0 if group is None else group.rank()), slice(shard.start, shard.stop)
    if linear.hidden_grad == "reduce_scatter":
        hidden = hidden.chunk(shard.world_size)[rank]
    hidden, weight, bias = (
        x.clone().requires_grad_() for x in (hidden, weight[local], bias[local])
    )
    with small_blocks():
        head = HeadLoss(
            terms(), metrics=("entropy",), options=Options(backend="triton", transport=transport)
        )
        given = {"token_weight": weights, "transform": Transform(softcap=8.0), "linear": linear}
        out = head.linear(hidden, weight, labels, bias=bias, shard=shard, **given)
        grads = torch.autograd.grad(out.loss, (hidden, weight, bias))
    return out.loss.detach().cpu(), *(g.cpu() for g in grads)


@pytest.mark.parametrize(
    "boundaries, how, transport",
    [
        ([0, 104, 200], "all_reduce", "auto"), ([0, 200, 200], "reduce_scatter", "gather"),
        ([0, 52, 104, 156, 200], "none", "gather"), ([0, 30, 200], "all_reduce", "sum"),
    ],
    ids=["uneven", "empty", "four", "sum"],
)  # fmt: skip
def test_losses_and_gradients_of_several_ranks(boundaries, how, transport):
    """Uneven, empty and padded shards; hidden states of ignored tokens are NaN."""
    linear = Linear(exact_logits=True, hidden_grad=how, budget=64 * 4 * 64)
    results = on_ranks(
        len(boundaries) - 1, sharded_run, boundaries, linear, torch.bfloat16, transport
    )
    *operands, labels, weights = tensors(torch.bfloat16)
    hidden, weight, bias = (x.double().requires_grad_() for x in operands)
    given = {
        "token_weight": weights,
        "transform": Transform(softcap=8.0),
        "shard": VocabShard(0, V, V - 3),
    }
    loss = HeadLoss(terms()).linear(hidden, weight, labels, bias=bias, **given).loss
    of_hidden, of_bias = torch.autograd.grad(loss, (hidden, bias))
    our_loss, dh, _, db = joined(results, how)  # dW has NaN of ignored tokens times 0
    torch.testing.assert_close(our_loss.double(), loss.detach(), rtol=1e-5, atol=0)
    valid = labels != -100
    assert relative(dh[valid], of_hidden[valid]) < 8e-3 and relative(db, of_bias) < 5e-3


def test_odd_rows_are_theirs_alone(device):
    """NaN and infinite hidden states, bad labels; no token at all."""
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors(torch.bfloat16))
    good = torch.arange(N, device=device) > 4
    usual = linear_vocab_statistics(
        hidden, weight, labels, want=WANT, options=TRITON, linear=EPILOGUE
    )
    odd, bad = hidden.clone(), labels.clone()
    odd[0], odd[1, 0], odd[2] = torch.nan, torch.inf, -torch.inf
    bad[4] = V
    got = linear_vocab_statistics(
        odd.requires_grad_(), weight, bad, want=WANT, options=TRITON, linear=EPILOGUE
    )
    for name in ("log_prob", "lse", "entropy", "collision", "total", "argmax"):
        a, b = getattr(got, name), getattr(usual, name)
        assert torch.equal(a[good], b[good]) and torch.equal(a[3], b[3])
        assert (a[[0, 1, 2]] == -1 if name == "argmax" else a[[0, 1, 2]].isnan()).all(), name
    assert got.log_prob[4].isnan()
    (grad,) = torch.autograd.grad(got.log_prob.sum(), odd)
    assert not grad[good].isnan().any() and grad[[0, 4]].isnan().all()
    none = hidden[:0].clone().requires_grad_()
    loss = HeadLoss(options=TRITON).linear(none, weight, labels[:0], linear=EPILOGUE).loss
    assert loss == 0 and torch.autograd.grad(loss, none)[0].shape == (0, H)


def test_main_grad(device):
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors(torch.bfloat16))
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    expected = torch.autograd.grad(F.cross_entropy(F.linear(*exact), labels), exact[1])[0]
    weight = torch.nn.Parameter(weight)
    weight.main_grad = torch.full((V, H), 1 / 64, device=device)
    head = HeadLoss([CrossEntropy()], options=TRITON)
    head.linear(
        hidden, weight, labels, linear=Linear(exact_logits=True, main_grad=True)
    ).loss.backward()
    assert relative(weight.main_grad - 1 / 64, expected) < 6e-3


REFUSED = {
    "torch backend": ({"options": Options(backend="torch")}, "no kernels"),
    "fp32": ({"dtype": torch.float32}, "neither bfloat16 nor float16 but torch.float32"),
    "teacher": ({"teacher": "logits"}, "teacher is compared with blocks"),
    "entries": ({"teacher": "entries"}, "teacher is compared with blocks"),
    "odd rows": ({"hidden": 20}, "multiples of 16 bytes"),
    "transposed": ({"transposed": True}, "contiguous multiples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_epilogue_takes_blocks_and_says_why(name, device, caplog):
    given, message = dict(REFUSED[name][0]), REFUSED[name][1]
    hidden, weight, _, labels, _ = (
        x.to(device) for x in tensors(given.pop("dtype", torch.bfloat16))
    )
    width = given.pop("hidden", H)
    hidden, weight = hidden[:8, :width], weight[:, :width].contiguous()
    if given.pop("transposed", False):
        weight = weight.t().contiguous().t()
    keywords = {"options": TRITON, **given}
    if "teacher" in given:
        keywords["teacher"] = a_teacher(given["teacher"], device, 8)
        keywords["want"] = ("forward_kl",) if given["teacher"] == "logits" else ("topk_forward_kl",)
    caplog.set_level("DEBUG", "tp_headloss")
    assert (
        linear_vocab_statistics(hidden, weight, labels[:8], linear=EPILOGUE, **keywords)
        .lse.isfinite()
        .all()
    )
    (said,) = caplog.messages
    assert (
        said.startswith("linear head: recompute by blocks of logits, because") and message in said
    )


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_one_sweep_has_exact_logits_where_it_is_asked_for(backend, device, caplog):
    """Losses of blocks of fp32 logits and their gradients, against float64; "auto" takes
    recompute."""
    hidden, weight, bias, labels, _ = (x.to(device) for x in tensors(torch.bfloat16))
    head, found = HeadLoss(terms(), options=Options(backend=backend)), {}
    for name, linear in {
        "exact": Linear("one_sweep", exact_logits=True, budget=45_000), "rounded": Linear("one_sweep", budget=45_000),
        "auto": EPILOGUE,
    }.items():  # fmt: skip
        operands = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        with small_blocks(), caplog.at_level("DEBUG", logger="tp_headloss"):
            loss = head.linear(*operands[:2], labels, bias=operands[2], linear=linear).loss
            found[name] = loss.detach(), torch.autograd.grad(loss, operands), caplog.messages[-1]
    exact = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    true = (
        HeadLoss(terms(), options=Options(backend="torch"))
        .linear(*exact[:2], labels, bias=exact[2])
        .loss
    )
    (loss, grads, said), (rounded, *_) = found["exact"], found["rounded"]
    assert said == "linear head: one sweep" and "recompute" in found["auto"][2]
    assert relative(loss, true) < 1e-6 < 5e-6 < relative(rounded, true)
    for g, expected in zip(grads, torch.autograd.grad(true, exact)):
        assert relative(g, expected) < ROUNDING[torch.bfloat16]
