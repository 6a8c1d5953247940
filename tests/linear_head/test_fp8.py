"""Linear(gradients="fp8"): the gradient of logits in two parts, and what is made of them."""

import contextlib
import functools
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks

from tp_headloss import (
    CrossEntropy,
    Entropy,
    HeadLoss,
    Linear,
    Options,
    PolicyGradient,
    Term,
    Transform,
    VocabShard,
    ZLoss,
    linear_vocab_statistics,
)
from tp_headloss.engine import fp8, fp8_products_triton, passes
from tp_headloss.engine.backend import load_backend
from tp_headloss.linear_head import fp8 as sweep
from tp_headloss.linear_head.blocks import Sizes, row_stride, tokens_that_fit

N, V, H = 27, 272, 32
FP8 = Linear(gradients="fp8")
TERMS = {
    "cross-entropy": [CrossEntropy()],
    "z-loss": [CrossEntropy(), ZLoss(1e-2)],
    "policy": [PolicyGradient()],
    "smoothing": [CrossEntropy(label_smoothing=0.2)],
}
TRANSFORMS = {
    "none": Transform(),
    "temperature": Transform(temperature=0.6, scale=-1.0),
    "temperatures": Transform(temperature=torch.linspace(0.5, 2.0, N)),
}


@contextlib.contextmanager
def few_programs():
    """On CPUs programs run one after the other, so that a few of them take all ids in turn."""
    given = fp8_products_triton.FP8_ENTRIES
    few = given if torch.cuda.is_available() else [(how, 3) for how, _programs in given]
    with mock.patch.object(fp8_products_triton, "FP8_ENTRIES", few):
        yield


@pytest.fixture(autouse=True)
def _few_programs():
    with few_programs():
        yield


def problem(device, scale=3.0):
    """Hidden states, weight and labels, among them those that the model is sure of and ignored
    ones; the same in all tests."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=generator).bfloat16().to(device)
    weight = (torch.randn(V, H, generator=generator) * scale / H**0.5).bfloat16().to(device)
    labels = torch.randint(V, (N,), generator=generator).to(device)
    labels[::3] = (hidden @ weight.t())[::3].argmax(1)
    labels[5::7] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def inputs_of(terms, device):
    if terms != "policy":
        return {}
    old = torch.full((N,), -4.0, device=device)
    return {"advantages": torch.randn(N, device=device), "old_log_prob": old}


def gradients(terms, hidden, weight, labels, backend, linear, **given):
    hidden.grad = weight.grad = None
    out = HeadLoss(TERMS[terms], options=Options(backend=backend)).linear(
        hidden, weight, labels, linear=linear, **given
    )
    out.loss.backward()
    return out.loss.detach(), hidden.grad, weight.grad


@functools.lru_cache
def of_problem(terms, backend, device):
    """Loss and gradients of the problem by products in fp8."""
    return gradients(terms, *problem(device), backend, FP8)


def assert_close(found, expected):
    """As close as results that are rounded to bf16 in other places."""
    assert (found.float() - expected.float()).norm() < 2**-8 * expected.float().norm()


def moved(transform, device):
    given = transform.temperature
    if not isinstance(given, torch.Tensor):
        return transform
    return Transform(temperature=given.to(device))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("terms", TERMS)
def test_its_gradients_are_close_to_those_of_products_in_bf16(terms, transform, backend, device):
    """Within the errors of fp8 below the limit; the loss is the same."""
    hidden, weight, labels = problem(device)
    given = {"transform": moved(TRANSFORMS[transform], device), "inputs": inputs_of(terms, device)}
    exact, *of_bf16 = gradients(
        terms, hidden, weight, labels, backend, Linear("one_sweep"), **given
    )
    loss, *of_fp8 = gradients(terms, hidden, weight, labels, backend, FP8, **given)
    assert torch.equal(loss, exact)
    for found, expected in zip(of_fp8, of_bf16):
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        assert 0 < error < 6e-3
    ignored = labels == -100
    assert (of_fp8[0][ignored] == 0).all()


def test_ids_that_all_tokens_list(backend, device):
    """Each id has more entries than a program takes at once, and all of them are exact."""
    tokens, ids = 140, 48
    hidden = torch.randn(tokens, H, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(ids, H, device=device) / 100).bfloat16().requires_grad_()
    labels = torch.randint(ids, (tokens,), device=device)
    found = [
        gradients("cross-entropy", hidden, weight, labels, backend, linear)
        for linear in (Linear("one_sweep"), FP8)
    ]
    for of_bf16, of_fp8 in list(zip(*found))[1:]:
        assert_close(of_fp8, of_bf16)


def test_what_is_uniform_is_exact(backend, device):
    """Of a model that is sure of its labels, all but the uniform parts of other ids vanish."""
    hidden = F.one_hot(torch.arange(N, device=device) % H, H).bfloat16().requires_grad_()
    weight = torch.zeros(V, H, device=device)
    weight[:H] = 40 * torch.eye(H, device=device)
    weight = weight.bfloat16().requires_grad_()
    labels = torch.arange(N, device=device) % H
    p = (hidden @ weight.t()).detach().double().softmax(1)
    d = (p - 0.8 * F.one_hot(labels, V) - 0.2 / V) / N
    exact = d @ weight.detach().double(), d.t() @ hidden.detach().double()
    _, *found = gradients("smoothing", hidden, weight, labels, backend, FP8)
    for a, b in zip(found, exact):
        assert_close(a, b)
    assert_close(found[1][H:], exact[1][H:])


@pytest.mark.interpreted_only(terms=["smoothing"])
@pytest.mark.parametrize("terms", ["cross-entropy", "smoothing"])
def test_ids_of_padding_take_no_part(terms, backend, device):
    hidden, weight, labels = problem(device)
    rows = torch.cat([weight.detach(), torch.full((13, H), math.nan, device=device).bfloat16()])
    shard = VocabShard.from_group(None, vocab_size=V, padded_size=V + 13)
    wide = rows.requires_grad_()
    _, of_hidden, of_weight = of_problem(terms, backend, device)
    _, again, of_rows = gradients(terms, hidden, wide, labels, backend, FP8, shard=shard)
    assert_close(again, of_hidden)
    assert_close(of_rows[:V], of_weight)
    assert (of_rows[V:] == 0).all()


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_what_is_frozen_gets_no_gradient(frozen, backend, device):
    hidden, weight, labels = problem(device)
    _, *both = of_problem("cross-entropy", backend, device)
    head = HeadLoss([CrossEntropy()], options=Options(backend=backend))
    hidden.grad = weight.grad = None
    operands = hidden, weight
    detached = [
        x.detach() if frozen in (name, "both") else x for name, x in zip(("hidden", "weight"), operands)
    ]  # fmt: skip
    loss = head.linear(*detached, labels, linear=FP8).loss
    if loss.requires_grad:
        loss.backward()
    for name, x, expected in zip(("hidden", "weight"), operands, both):
        assert x.grad is None if frozen in (name, "both") else torch.equal(x.grad, expected)


def test_main_grad_gets_it_in_fp32(backend, device):
    hidden, weight, labels = problem(device)
    _, _, expected = of_problem("cross-entropy", backend, device)
    owner = torch.nn.Parameter(weight.detach().clone())
    owner.main_grad = torch.ones(V, H, device=device)
    for upstream in (None, 1.0):
        owner.main_grad.fill_(1)
        linear = Linear(gradients="fp8", main_grad=True, upstream=upstream)
        head = HeadLoss([CrossEntropy()], options=Options(backend=backend))
        head.linear(hidden, owner, labels, linear=linear).loss.backward()
        assert_close(owner.main_grad - 1, expected)


@pytest.mark.interpreted_only(terms=["smoothing"])
@pytest.mark.parametrize("terms", ["z-loss", "smoothing"])
def test_blocks_have_the_results_of_one_block(terms, backend, device, monkeypatch):
    hidden, weight, labels = problem(device)
    _, *whole = of_problem(terms, backend, device)
    monkeypatch.setattr(sweep, "tokens_that_fit", lambda tokens, each, budget: 32)
    monkeypatch.setattr(sweep, "FEWEST", 0)
    _, *blocks = gradients(terms, hidden, weight, labels, backend, FP8)
    for a, b in zip(whole, blocks):
        assert_close(b, a)


def test_it_reads_no_memory_that_it_has_not_written(backend, device, monkeypatch):
    hidden, weight, labels = problem(device)
    _, *expected = of_problem("cross-entropy", backend, device)
    make = torch.Tensor.new_empty

    def full_of_nan(*args, **kwargs):
        memory = make(*args, **kwargs)
        memory.reshape(-1).view(torch.uint8).fill_(255)
        return memory

    monkeypatch.setattr(torch.Tensor, "new_empty", full_of_nan)
    _, *found = gradients("cross-entropy", hidden, weight, labels, backend, FP8)
    for a, b in zip(found, expected):
        assert torch.equal(a, b)


def test_no_tokens_and_all_ignored(backend, device):
    hidden, weight, labels = problem(device)
    _, of_hidden, of_weight = gradients(
        "cross-entropy", hidden.detach()[:0].requires_grad_(), weight, labels[:0], backend, FP8
    )
    assert of_hidden.shape == (0, H) and (of_weight == 0).all()
    _, of_hidden, of_weight = gradients(
        "cross-entropy", hidden, weight, torch.full_like(labels, -100), backend, FP8
    )
    assert (of_hidden == 0).all() and (of_weight == 0).all()


def test_a_label_that_no_rank_owns_is_nan_not_wrong(backend, device):
    hidden, weight, labels = problem(device)
    labels[1] = V + 3
    _, of_hidden, _ = gradients("cross-entropy", hidden, weight, labels, backend, FP8)
    assert of_hidden[1].isnan().all()


@torch.no_grad()
def split(logits, labels, backend, grads=None, units=None, start=0):
    """The two parts of the gradient of a sum of losses, the gradient, and the tokens' units.

    start: columns before these, of other shards."""
    n, columns = logits.shape
    block = logits.new_full((n, row_stride(columns)), math.nan)
    logits = block[:, :columns].copy_(logits)
    head = HeadLoss([CrossEntropy()], reduction="sum", options=Options(backend=backend))
    _, request = head._checked(head._given(logits, labels, None, None), None, None, None)
    merged, *_ = passes.statistics(request)
    of_shard = request.tensors._replace(labels=torch.where(labels >= 0, labels + start, labels))
    request = request._replace(tensors=of_shard, facts=request.facts._replace(start=start))
    known = grads or {"log_prob": torch.full(labels.shape, -1.0, device=logits.device)}
    units = units or load_backend(backend).units_of(request, merged, known)
    width = fp8.padded(columns)
    rows = torch.empty((n, width), dtype=fp8.GRADIENT, device=logits.device)
    turned = torch.empty((width, fp8.padded(n)), dtype=fp8.GRADIENT, device=logits.device)
    out = fp8.Fp8Gradient(units.unit, rows, turned, fp8.LargeEntries.none(n, logits.device), None)
    load_backend(backend).split_gradient(out, request, merged, known, units)
    gradient = torch.empty(logits.shape, device=logits.device)
    load_backend(backend).logits_gradient(gradient, request, merged, known)
    return out, gradient, units


def rebuilt(out, width):
    """The gradient that the two parts add up to."""
    found = out.rows.float()[:, :width] * out.unit[:, None]
    large = out.large
    for token, count in enumerate(large.counts.tolist()):
        columns = large.columns[token, :count].long()
        assert (columns.diff() > 0).all() and (found[token, columns] == 0).all()
        found[token, columns] = large.gradients[token, :count]
    return found


ROWS = {
    "flat": lambda width: torch.zeros(8, width),
    "few alike": lambda width: torch.where(torch.arange(width) < 127, 9.0, -9.0).expand(8, width),
    "as many as there may be": lambda width: torch.where(torch.arange(width) < 254, 20.0, -20.0).expand(8, width),
    "one-hot": lambda width: torch.where(torch.arange(width) == 3, 60.0, -60.0).expand(8, width),
    "steep": lambda width: -torch.arange(width).expand(8, width) / 3.0,
    "random": lambda width: 4 * torch.randn(8, width),
    "huge": lambda width: 1000 * torch.randn(8, width),
    "out of reach": lambda width: torch.where(torch.arange(width) % 2 == 0, -math.inf, 0.0).expand(8, width),
}  # fmt: skip


@pytest.mark.parametrize("width", [256, 301])
@pytest.mark.parametrize("case", ROWS)
def test_the_two_parts_are_the_gradient(case, width, backend, device):
    """Each entry is exact where it is large, else off by a quarter of itself, or where fp8 ends."""
    logits = ROWS[case](width).clone().to(device)
    labels = torch.tensor([0, 1, 3, 7, width - 2, 11, 200, -100], device=device)
    out, gradient, _units = split(logits, labels, backend)
    found, limit = rebuilt(out, width), out.unit[:, None].abs() * fp8.LARGEST_GRADIENT
    assert (out.rows.float()[:, width:] == 0).all()
    assert torch.equal(out.turned.float()[:, : len(logits)], out.rows.float().t())
    error, smallest = (found - gradient).abs(), out.unit[:, None].abs() * 2.0**-16
    assert (error <= gradient.abs() / 4 + 1.01 * smallest).all()
    is_large = gradient.abs() > limit
    assert (error <= 1e-5 * gradient.abs() + 1.01 * smallest)[is_large].all()
    assert out.large.counts.max() <= fp8.MOST - 2 and out.large.counts[-1] == 0
    at_label = gradient[:-1].gather(1, labels[:-1, None])
    others = gradient.abs().sum(1)[:-1, None] - at_label.abs()
    assert (limit[:-1] <= 2.01 * (fp8.SHARE * others + fp8.SMALLEST)).all()
    assert torch.allclose(found[:-1].gather(1, labels[:-1, None]), at_label, rtol=1e-5)


# more tokens than a program of the list has marks of four, too
@pytest.mark.parametrize(
    ("start", "tokens", "width"),
    [(0, 37, 403), (6, 37, 403), (403, 37, 403), (0, 261, 70)],
)
def test_kernel_and_definition_agree(start, tokens, width, device):
    logits = 5 * torch.randn(tokens, width, device=device)
    labels = torch.randint(width, (tokens,), device=device)
    known = {name: torch.randn(tokens, device=device) for name in ("lse", "log_prob")}
    # of the same units, whose last bits decide how entries are rounded
    a, _gradient, units = split(logits, labels, "triton", known, start=start)
    b, *_ = split(logits, labels, "torch", known, units, start=start)
    assert torch.equal(a.large.counts, b.large.counts)
    far = (a.rows.view(torch.uint8).int() - b.rows.view(torch.uint8).int()).abs()
    assert far.max() <= 1 and (far > 0).float().mean() < 1e-2  # ties of rounding
    assert torch.allclose(rebuilt(a, width), rebuilt(b, width), rtol=0.26)


@pytest.mark.parametrize(
    ("given", "start"), [(("lse",), 0), (("log_prob",), 6), (("lse", "log_prob"), 6)]
)
def test_units_of_kernel_and_definition_agree(given, start, device):
    logits = 5 * torch.randn(37, 403, device=device)
    logits[3, 5] = math.nan
    labels = torch.randint(-20, 403, (37,), device=device)
    labels[labels < 0] = -100
    labels[3] = 7
    known = {name: torch.randn(37, device=device) for name in given}
    *_, units = split(logits, labels, "triton", known, start=start)
    *_, expected = split(logits, labels, "torch", known, start=start)
    for name, x, y in zip(units._fields, units, expected):
        if name != "seed":  # of all bits of the sums
            assert torch.allclose(x, y, rtol=1e-5, atol=1e-5, equal_nan=True), name
    assert units.unit[3].isnan() and (units.power[labels == -100] == -math.inf).all()


@few_programs()
def of_ranks(group, hidden, weight, labels, backend):
    shard = VocabShard.from_group(group, V)
    rows = weight[shard.start : shard.stop].clone().requires_grad_()
    x = hidden.clone().requires_grad_()
    head = HeadLoss([CrossEntropy(), ZLoss(1e-2)], options=Options(backend=backend))
    loss = head.linear(x, rows, labels, shard=shard, linear=FP8).loss
    loss.backward()
    return loss.detach(), x.grad, rows.grad


@few_programs()
def with_empty_shards(group, device, backend, boundaries, vocab_size):
    hidden, weight, labels = problem(device)
    shard = VocabShard.from_boundaries(boundaries, vocab_size, group)
    rows = torch.cat([weight.detach(), torch.full((V, H), math.nan).bfloat16().to(device)])
    rows = rows[shard.start : shard.start + shard.width].clone().requires_grad_()
    head = HeadLoss([CrossEntropy()], options=Options(backend=backend))
    head.linear(hidden, rows, labels, shard=shard, linear=FP8).loss.backward()
    return hidden.grad.cpu(), rows.grad.cpu()


@pytest.mark.parametrize("boundaries", [[0, V, V], [0, V + 16, 2 * V]], ids=["empty", "padding"])
def test_a_rank_without_ids_has_no_part(boundaries, backend):
    (of_hidden, rows), (again, nothing) = on_ranks(2, with_empty_shards, backend, boundaries, V)
    assert torch.equal(of_hidden, again) and of_hidden.isfinite().all()
    assert rows.isfinite().all() and rows.abs().max() > 0 and (nothing == 0).all()


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_have_the_results_of_one(world_size, backend, device):
    hidden, weight, labels = problem(device)
    loss, of_hidden, of_weight = of_problem("z-loss", backend, device)
    given = [x.detach().cpu() for x in (hidden, weight, labels)]
    found = on_ranks(world_size, moved_to_rank, *given, backend)
    for other, x, _rows in found:
        assert torch.allclose(other, loss.cpu(), rtol=1e-5)
        # a rank's part of dH is rounded before it is added
        assert (x.float() - of_hidden.cpu().float()).norm() < 5e-3 * of_hidden.float().norm()
    rows = torch.cat([rows for _, _, rows in found])
    assert_close(rows, of_weight.cpu())


def moved_to_rank(group, device, hidden, weight, labels, backend):
    found = of_ranks(group, *(x.to(device) for x in (hidden, weight, labels)), backend)
    return [x.cpu() for x in found]


def refused(
    match, terms=None, linear=FP8, hidden_size=16, dtype=torch.bfloat16, reduction="mean", **given
):
    hidden, weight = (
        torch.ones(rows, hidden_size, dtype=dtype, requires_grad=True) for rows in (4, 8)
    )
    head = HeadLoss(terms or [CrossEntropy()], reduction=reduction)
    with pytest.raises(ValueError, match=match):
        head.linear(hidden, weight, torch.tensor([1, 2, 3, -100]), linear=linear, **given)


def test_a_loss_without_entries_but_the_label_s(backend, device):
    """Of the target logit: upstream gradients of lse and log-prob cancel."""
    hidden, weight, labels = problem(device)
    own = Term("own", lambda stats: -stats.target_logit, tokenwise=True)
    head = HeadLoss([own], options=Options(backend=backend))
    found = []
    for linear in (Linear("one_sweep"), FP8):
        hidden.grad = weight.grad = None
        head.linear(hidden, weight, labels, linear=linear).loss.backward()
        found.append((hidden.grad, weight.grad))
    for expected, x in zip(*found):
        assert expected.abs().max() > 0
        # in bf16 one number stands for all labels' entries, and is rounded alike in all
        assert (x.float() - expected.float()).norm() < 2**-7 * expected.float().norm()


def test_an_ignored_token_is_ignored_whatever_its_temperature_is(backend, device):
    hidden, weight, labels = problem(device)
    ignored = (labels == -100).nonzero()[:, 0]
    found = []
    for wrong in ([1.0], [0.0, -1.0, math.nan, math.inf]):
        temperatures = torch.ones(N, device=device)
        temperatures[ignored] = torch.tensor(wrong, device=device).repeat(N)[: len(ignored)]
        transform = Transform(temperature=temperatures)
        found.append(gradients("z-loss", hidden, weight, labels, backend, FP8, transform=transform))
    assert len(ignored) >= 4
    for a, b in zip(*found):
        assert torch.equal(a, b)


@pytest.mark.parametrize("where", ["weight", "hidden"])
def test_an_infinite_operand_is_not_silent(where, backend, device):
    """All others would vanish beside it in fp8."""
    hidden, weight, labels = problem(device)
    with torch.no_grad():
        # of an id whose logits are all -inf, so that the loss is finite
        weight[7, 3] = math.inf if where == "weight" else weight[7, 3]
        hidden[:, 3] = -hidden[:, 3].abs() - 1
        hidden[2, 3] = -math.inf if where == "hidden" else hidden[2, 3]
        weight[:, 3] = weight[:, 3].abs()
    labels[labels == 7] = 8
    _, of_hidden, of_weight = gradients("cross-entropy", hidden, weight, labels, backend, FP8)
    assert of_hidden.isnan().any() if where == "weight" else of_weight.isnan().any()


@pytest.mark.interpreted_only(ids=[3660])
@pytest.mark.parametrize("ids", [3660, 7200])
def test_flat_distributions_have_no_error_in_one_direction(ids, backend, device):
    """All probabilities but the label's are equal, at sizes that are worst for 3 bits."""
    tokens, depth = 64, 32
    hidden = (0.02 * (torch.randn(tokens, depth, device=device) + 1)).bfloat16()
    weight = (0.02 * (torch.randn(ids, depth, device=device) + 1)).bfloat16()
    labels = torch.randint(ids // 2, (tokens,), device=device)
    p = (hidden @ weight.t()).double().softmax(1)
    d = (p - F.one_hot(labels, ids)) / tokens
    of_others = (d.t() @ hidden.double())[ids // 2 :]
    _, of_hidden, of_weight = gradients(
        "cross-entropy", hidden.requires_grad_(), weight.requires_grad_(), labels, backend, FP8
    )
    exact = d @ weight.detach().double()
    assert (of_hidden.double() - exact).norm() < 1e-2 * exact.norm()
    # rounding to the nearest moves all by 7 and by 10 % here
    others = of_weight[ids // 2 :].double()
    assert abs((others * of_others).sum() / (of_others**2).sum() - 1) < 1e-2


def test_operands_are_rounded_in_another_way_in_each_batch(backend, device):
    """So the errors of many batches do not add up; the same batch has the same bits."""
    hidden, weight, labels = problem(device)
    others = labels.clone()
    others[-1] = (labels[-1] + 1) % V
    first, again, changed = (
        gradients("cross-entropy", hidden, weight, y, backend, FP8)[1][:-1]
        for y in (labels, labels, others)
    )
    assert torch.equal(first, again) and not torch.equal(first, changed)
    x, one = torch.randn(48, 64, device=device), torch.ones((), device=device)
    errors = []
    for i in range(16):
        out = torch.empty((64, 48), dtype=fp8.OPERAND, device=device)
        seed = fp8.seed_of_call(labels + i)
        load_backend(backend).turn_to_fp8(out, x, one, 0, seed)
        errors.append(out.float().t() - x)
    # of independent errors 1/4
    assert torch.stack(errors).mean(0).norm() < 0.3 * errors[0].norm()


@pytest.mark.interpreted_only(mean=[1.06])
@pytest.mark.parametrize("mean", [0.3, 1.06, 1.19])
def test_means_of_operands_do_not_move(mean, backend, device):
    """1.06 and 1.19 lie between two numbers of e4m3, which rounding to the nearest would take for
    all elements of a weight, or of hidden states, with such a mean."""
    tokens, ids, depth = 128, 800, 32
    around = (mean + 0.02 * torch.randn(ids, depth, device=device)).bfloat16()
    labels = torch.randint(ids // 2, (tokens,), device=device)
    hidden = torch.randn(tokens, depth, device=device).bfloat16()

    def gradients_of(x, w):
        d = ((x @ w.t()).double().softmax(1) - F.one_hot(labels, ids)) / tokens
        operands = [operand.clone().requires_grad_() for operand in (x, w)]
        return d, *gradients("cross-entropy", *operands, labels, backend, FP8)[1:]

    d, of_hidden, _ = gradients_of(hidden, around)
    exact = d @ around.double()
    assert (of_hidden.double() - exact).norm() < 0.4 * exact.norm()
    d, _, of_weight = gradients_of(around[:tokens], (around - mean).bfloat16())
    others, of_others = (
        of_weight[ids // 2 :].double(),
        (d.t() @ around[:tokens].double())[ids // 2 :],
    )
    assert abs((others * of_others).sum() / (of_others**2).sum() - 1) < 6e-3


def test_what_it_cannot_do_is_said():
    refused("operands must be torch.bfloat16, got torch.float32", dtype=torch.float32)
    refused("multiple of 16, got 20", hidden_size=20)
    refused("the gradient of a bias", bias=torch.zeros(8))
    refused("with a softcap", transform=Transform(softcap=30.0))
    refused("got terms of {'entropy': ", terms=[CrossEntropy(), Entropy(0.1)])
    weighted = CrossEntropy(label_smoothing=0.1, class_weight=torch.ones(8))
    refused("class weights with label smoothing", terms=[weighted], reduction="sum")
    refused("mode='recompute' was asked for", linear=Linear("recompute", gradients="fp8"))
    refused("budget must be at least", linear=Linear(gradients="fp8", budget=1000))
    with pytest.raises(ValueError, match="gradients='fp8' is for a HeadLoss"):
        operands = torch.ones(4, 16).bfloat16(), torch.ones(8, 16).bfloat16()
        linear_vocab_statistics(*operands, torch.tensor([1, 2, 3, 4]), linear=FP8)
    with pytest.raises(ValueError, match="gradients must be"):
        Linear(gradients="fp16")


def test_without_gradients_it_is_not_asked_for(device):
    hidden, weight, labels = problem(device)
    with torch.no_grad():
        loss = HeadLoss().linear(hidden, weight, labels, linear=FP8).loss
        assert torch.equal(loss, HeadLoss().linear(hidden, weight, labels).loss)


def test_explain_names_it(device):
    hidden, weight, labels = problem(device)
    found = HeadLoss().explain_linear(hidden, weight, labels)
    assert found.obstacles["fp8 sweep"] == "gradients='fp8' was not asked for"
    assert HeadLoss().explain_linear(hidden, weight, labels, linear=FP8).way == "fp8 sweep"


@pytest.mark.parametrize("tokens", [1, 100, 8192])
def test_a_budget_holds_what_is_kept_and_a_block(tokens):
    sizes = Sizes(tokens, 4000, 64, 2, True, True)
    least = next(b for b in range(0, 1 << 31, 1 << 12) if sweep._tokens(sizes, b))
    assert least >= 4000 * 64 + tokens * 4000
    assert sweep._tokens(sizes, 1 << 40) == tokens
    assert tokens_that_fit(tokens, 8, 7) is None


@pytest.mark.parametrize("entropy", [4.0, 1.0, 0.3])
def test_errors_are_those_of_bf16_products(entropy, device):
    """Of hidden states whose logits have such an entropy in nats, against float64 of the same
    logits: dH, and the rows of dW of ids that are labels."""
    tokens, ids, depth = 512, 4096, 64
    hidden, weight = (
        torch.randn(tokens, depth, device=device),
        torch.randn(ids, depth, device=device),
    )
    low, high = 0.0, 8.0
    for _ in range(30):
        scale = (low + high) / 2
        logits = (hidden * scale / depth**0.5).bfloat16() @ weight.bfloat16().t()
        log_p = logits.float().log_softmax(1)
        is_flat = -(log_p.exp() * log_p).sum(1).mean() > entropy
        low, high = (scale, high) if is_flat else (low, scale)
    hidden = (hidden * scale / depth**0.5).bfloat16().requires_grad_()
    weight = weight.bfloat16().requires_grad_()
    labels = torch.multinomial(log_p.exp(), 1)[:, 0]
    p = (hidden @ weight.t()).detach().double().softmax(1)
    d = (p - F.one_hot(labels, ids)) / tokens
    exact = d @ weight.detach().double(), d.t() @ hidden.detach().double()
    errors = {}
    for name, linear in (("bf16", Linear("one_sweep")), ("fp8", FP8)):
        hidden.grad = weight.grad = None
        HeadLoss().linear(hidden, weight, labels, linear=linear).loss.backward()
        of_labels = exact[1][labels], weight.grad[labels].double()
        errors[name] = [
            ((a - b).norm() / a.norm()).item()
            for a, b in ((exact[0], hidden.grad.double()), of_labels)
        ]
    for of_fp8, of_bf16 in zip(errors["fp8"], errors["bf16"]):
        assert of_fp8 < 1.6 * of_bf16
