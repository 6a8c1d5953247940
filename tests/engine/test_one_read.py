"""Options(gradient="forward"): the loss and its gradient from one launch that reads each logit
once."""

import dataclasses
import functools
import itertools
import math
import os
import random
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda_problem import captured, replays
from one_read_model import Rank, run, take_turns
from ranks import on_ranks

import tp_headloss as hl
from tp_headloss.engine.one_read import kernel as one_read_kernel
from tp_headloss.engine.one_read import launch as one_read_launch
from tp_headloss.engine.one_read import params as one_read_params
from tp_headloss.engine.one_read import rows as row_functions
from tp_headloss.engine.one_read.rows import row_function
from tp_headloss.engine.reductions import StatisticValue
from tp_headloss.engine.sums_triton import gradient_for
from tp_headloss.engine.transports import symmetric_memory
from tp_headloss.engine.ways import one_read
from tp_headloss.ranks.shard import canonical_chunk_size
from tp_headloss.statistics import layout_of

FULL = bool(os.environ.get("TP_HEADLOSS_FULL"))
IGNORED, N, V = -100, 6, 704
IN_FORWARD, IN_BACKWARD = (
    hl.Options(backend="triton", gradient=name) for name in ("forward", "backward")
)
TERMS = hl.CrossEntropy(), hl.ZLoss(0.01)
on_hopper = pytest.mark.cuda  # the GPU tests run where the kernel does


def problem(device, width=V, n_rows=N, seed=3):
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(n_rows, width, generator=generator)).to(device, torch.bfloat16)
    labels = torch.randint(width, (n_rows,), generator=generator).to(device)
    labels[1] = IGNORED
    logits[1] = torch.nan  # nobody reads it
    return logits, labels


def steps(
    options, logits, labels, upstream=1.0, terms=TERMS, metrics=(), reduction="mean", **given
):
    """-> the output, and the gradients of a first and a second backward."""
    head = hl.HeadLoss(list(terms), metrics=metrics, reduction=reduction, options=options)
    logits = logits.clone().requires_grad_()
    out = head(logits, labels, **given)
    return out, *(
        torch.autograd.grad(upstream * out.loss, logits, retain_graph=True)[0] for _ in range(2)
    )


def expect_alike(one, two, noise=1e-30):
    """The results of both ways differ by rounding alone. noise: a number or [N, width], where parts
    cancel."""
    assert torch.allclose(one[0].loss, two[0].loss, rtol=1e-6, atol=1e-6, equal_nan=True)
    for name, metric in one[0].metrics.items():
        assert torch.allclose(metric, two[0].metrics[name], rtol=1e-6, atol=1e-5, equal_nan=True)
    for name, a, b in zip(one[0].stats._fields, one[0].stats, two[0].stats):
        if isinstance(a, torch.Tensor):
            # of parts that cancel
            noise_of_sum = 1e-7 * one[1].shape[1] if name == "total" else 0.0
            assert torch.allclose(
                a.double(), b.double(), rtol=1e-6, atol=2e-6 + noise_of_sum, equal_nan=True
            )
    for a, b in zip(one[1:], two[1:]):
        a, b = a.float(), b.float()
        assert (
            torch.equal(a.isnan(), b.isnan())
            and not ((a - b).abs() > 2**-7 * b.abs() + noise).any()
        )


def _focal(stats, advantages):
    return (
        -advantages * (1 - stats.log_prob.exp()) ** 2 * stats.log_prob
        + stats.lse.sigmoid()
        - stats.entropy.abs()
    )


def _two_sequences(device):
    ids = torch.tensor([0, 0, 0, 1, 1, 1], device=device)
    return hl.Sequences.from_ids(ids, 2, ids.new_tensor([1, 0, 1, 1, 1, 1]).bool())


ADVANTAGES = {"advantages": torch.tensor([1.0, 0.5, -2.0, 1.5, -1.0, 0.0])}
POLICY = {
    **ADVANTAGES,
    "old_log_prob": torch.tensor([-9.0, -8.0, -12.0, -11.0, -10.5, -9.5]),
    "reference_log_prob": torch.tensor([-9.5, -8.5, -11.0, -12.0, -10.0, -9.0]),
}
CASES = {
    "mean": {},
    "denominator": {"denominator": 5.0},
    "nothing": {"denominator": 0.0},
    "tensor": {"denominator": torch.tensor(5.0)},
    "weights": {"token_weight": torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0, 0.25])},
    "squares": {"terms": (hl.ZLoss(0.3), hl.Term("own", StatisticValue("log_prob", square=True)))},
    "cross-entropy": {"terms": (hl.CrossEntropy(),)},
    "log-sum-exp": {"terms": (hl.Term("own", StatisticValue("lse"), -0.3),)},
    "upstream": {"upstream": 0.3},
    "metrics": {"metrics": ("accuracy", "entropy", "lse")},
    "accuracy": {"metrics": ("accuracy",), "terms": (hl.CrossEntropy(),)},
    "smoothing": {"terms": (hl.CrossEntropy(label_smoothing=0.1), hl.ZLoss(0.01))},
    "smoothing and metrics": {
        "terms": (
            hl.CrossEntropy(0.5, 0.2, "megatron"),
            hl.Entropy(-0.1),
            hl.Term("own", StatisticValue("total"), 1e-4),
        ),
        "metrics": ("accuracy", "entropy"),
        "token_weight": torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0, 0.25]),
        "upstream": 0.3,
    },
    "totals": {
        "terms": (hl.CrossEntropy(), hl.Term("own", StatisticValue("total", square=True), 1e-6))
    },
    "entropies": {"terms": (hl.CrossEntropy(), hl.Entropy(-0.1)), "metrics": ("accuracy",)},
    "GRPO": {
        "terms": (hl.PolicyGradient("clip", clip=(0.2, 0.28)), hl.KLToReference(0.05)),
        "metrics": ("entropy", hl.PolicyMetrics(reference=True)),
        "inputs": POLICY,
    },
    "entropies in a policy": {
        "terms": (
            hl.PolicyGradient("cispo", 2.0),
            hl.Entropy(0.1),
            hl.ZLoss(0.01),
            hl.CrossEntropy(0.2),
        ),
        "metrics": ("accuracy",),
        "inputs": {name: POLICY[name] for name in ("advantages", "old_log_prob")},
        "token_weight": torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0, 0.25]),
        "upstream": 0.3,
    },
    "an own term": {
        "terms": (
            hl.Term("own", _focal, 0.5, ("entropy",), inputs=("advantages",), pointwise=True),
        ),
        "inputs": ADVANTAGES,
    },
    "one statistic twice": {
        "terms": (hl.CrossEntropy(), hl.Term("own", StatisticValue("log_prob", square=True)))
    },
    "sequences": {
        "terms": (hl.PolicyGradient(),),
        "metrics": ("entropy",),
        "reduction": "seq-mean-token-mean",
        "inputs": {
            **{name: POLICY[name] for name in ("advantages", "old_log_prob")},
            "sequences": _two_sequences,
        },
    },
    "squared entropies": {
        "terms": (hl.Term("own", StatisticValue("entropy", square=True), 0.2), hl.ZLoss(0.01))
    },
    "a temperature": {
        "transform": hl.Transform(temperature=0.7),
        "metrics": ("accuracy", "entropy", "lse"),
    },
    "a scale": {
        "terms": (hl.CrossEntropy(label_smoothing=0.1), hl.ZLoss(0.01), hl.Entropy(-0.1)),
        "transform": hl.Transform(scale=0.0625),
    },
    "temperatures": {
        "terms": (hl.CrossEntropy(), hl.Entropy(-0.1)),
        "transform": hl.Transform(temperature=torch.tensor([0.7, math.nan, 1.0, 1.3, 0.2, 3.0])),
        "metrics": ("accuracy",),
    },
    "a softcap": {
        "transform": hl.Transform(softcap=30.0, scale=1.5),
        "metrics": ("accuracy", "entropy", "lse"),
    },
    "a softcap and smoothing": {
        "terms": (hl.CrossEntropy(label_smoothing=0.1), hl.ZLoss(0.01), hl.Entropy(-0.1)),
        "transform": hl.Transform(softcap=4.0, temperature=0.7),
    },
    "a softcap and temperatures": {
        "terms": (hl.CrossEntropy(label_smoothing=0.1), hl.Entropy(-0.1)),
        "transform": hl.Transform(
            softcap=15.0, temperature=torch.tensor([0.7, 1.0, 1.0, 1.3, 0.2, 3.0])
        ),
    },
    "GRPO at temperatures": {
        "terms": (hl.PolicyGradient("clip", clip=(0.2, 0.28)), hl.KLToReference(0.05)),
        "metrics": ("entropy", hl.PolicyMetrics(reference=True)),
        "inputs": POLICY,
        "transform": hl.Transform(
            scale=1.5, temperature=torch.tensor([0.7, 1.0, 1.0, 1.3, 0.2, 3.0])
        ),
    },
}


@on_hopper
@pytest.mark.parametrize("width", [8, 128, 704, 1000, 16384, 32064, 50304, 151936])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_two_launches(case, width, device):
    logits, labels = problem(device, width)
    labels[2:4] = torch.tensor([0, width - 1])
    logits[0, labels[0]] += 20  # so that the others' sum decides its gradient
    logits[4, ::3] = -math.inf
    given = {name: moved(x, device) for name, x in CASES[case].items()}
    noise = 1e-30
    cancels = "entropies", "smoothing", "a scale", "temperatures"
    if [name for name in cancels if name in case]:
        noise = 1e-6 * (logits.float().softmax(-1).nan_to_num() + 1 / width)
    for dtype in (torch.bfloat16, torch.float16):
        logits = logits.to(dtype)
        expect_alike(
            steps(IN_FORWARD, logits, labels, **given),
            steps(IN_BACKWARD, logits, labels, **given),
            noise if dtype == torch.bfloat16 else noise + 2**-24,
        )


@on_hopper
@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, 1e-38, 1e38])
def test_a_bad_temperature_makes_its_row_nan_alone(temperature, device):
    logits, labels = problem(device)
    temperatures = torch.ones(N, device=device)
    temperatures[3] = temperature
    given = {"transform": hl.Transform(temperature=temperatures)}
    one, two = (steps(options, logits, labels, **given) for options in (IN_FORWARD, IN_BACKWARD))
    assert torch.equal(one[1].isnan().all(1), two[1].isnan().all(1))
    others = [0, 1, 2, 4, 5]
    assert torch.allclose(one[1][others].float(), two[1][others].float(), rtol=2**-7, atol=1e-30)


@on_hopper
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("width, stride", [(700, 704), (701, 704), (8, 16), (1, 8), (50257, 50304)])
def test_rows_may_have_gaps(width, stride, inplace, device):
    """The gradient has the logits' shape, and nothing is written into the gaps."""
    wide, labels = problem(device, stride)
    labels = torch.where(labels == IGNORED, IGNORED, labels % width)
    wide[:, width:] = math.nan
    logits = wide[:, :width]
    if inplace:
        options = hl.Options(gradient="forward", inplace=True)
        with pytest.raises(ValueError, match="needs contiguous logits"):
            hl.HeadLoss(options=options)(logits.requires_grad_(), labels)
        return
    head = hl.HeadLoss(options=IN_FORWARD)
    for _ in range(2):
        leaf = wide.clone().requires_grad_()
        out = head(leaf[:, :width], labels)
        out.loss.backward()
        expected = steps(IN_BACKWARD, logits.contiguous(), labels, terms=[hl.CrossEntropy()])
        assert not leaf.grad[:, width:].any()
        expect_alike((out, leaf.grad[:, :width]), expected[:2])


@on_hopper
@pytest.mark.parametrize("upstream", [1.0, 0.5, 0.0])
def test_late_gradients_know_temperatures_and_gaps(upstream, device):
    """Upstream gradients that no forward foresees."""
    wide, labels = problem(device, 1024)
    labels = torch.where(labels == IGNORED, IGNORED, labels % 701)
    heads = [hl.HeadLoss(options=options) for options in (IN_FORWARD, IN_BACKWARD)]
    for seed in range(3):  # each call has temperatures of its own
        temperature = 0.5 + torch.rand(N, generator=torch.Generator().manual_seed(seed)).to(device)
        transform = hl.Transform(temperature=temperature)
        found = []
        for head in heads:
            leaf = wide.clone().requires_grad_()
            out = head(leaf[:, :701], labels, transform=transform)
            ((upstream + seed) * out.loss).backward()
            found.append((out, leaf.grad))
        expect_alike(*found)


@on_hopper
def test_bad_rows_are_nan_alone(device):
    logits, labels = problem(device, n_rows=9)
    labels[2], labels[3] = V + 3, -7
    logits[4, 5] = torch.inf
    logits[5, :-1], labels[5] = -torch.inf, V - 1
    logits[6], logits[7, 0], logits[8] = -torch.inf, torch.nan, -3e38
    one, two = steps(IN_FORWARD, logits, labels), steps(IN_BACKWARD, logits, labels)
    assert one[1].isnan().all(1).tolist() == [
        False,
        False,
        True,
        True,
        True,
        False,
        True,
        True,
        False,
    ]
    assert torch.equal(one[0].stats.log_prob.isnan(), two[0].stats.log_prob.isnan())
    good = [0, 1, 5]
    assert torch.allclose(one[1][good].float(), two[1][good].float(), rtol=2**-7, atol=1e-30)


@on_hopper
@pytest.mark.parametrize("size", [1e4, 9e5, 2e6, 3e8, 1e12, 1e29, 1e38])
def test_logits_may_have_any_size(size, device):
    logits, labels = problem(device)
    logits *= size / logits.float().nan_to_num().abs().max().item()
    given = {"terms": (hl.CrossEntropy(), hl.Entropy(0.1)), "metrics": ("accuracy",)}
    one, two = (
        steps(IN_FORWARD, logits, labels, **given),
        steps(IN_BACKWARD, logits, labels, **given),
    )
    assert one[1].isfinite().all() and torch.allclose(
        one[1].float(), two[1].float(), rtol=2**-7, atol=1e-30
    )


@on_hopper
@pytest.mark.parametrize(
    "width, size", [(704, 700), (1024, 700), (768, 250), (151936, 151665), (9000, 8), (16384, 1)]
)
def test_padding_has_no_part(width, size, device):
    logits, labels = problem(device, width)
    logits[:, size:] = math.nan
    labels = torch.where(labels == IGNORED, IGNORED, labels % size)
    given = {"shard": hl.VocabShard(0, width, size)}
    one = steps(IN_FORWARD, logits, labels, **given)
    expect_alike(one, steps(IN_BACKWARD, logits, labels, **given))
    assert not one[1][:, size:].any() and not one[1][1].any()


UPSTREAM = 1.0, 0.0, -0.0, 1e-30, 1e-38, 0.25, -3.0, 65536.0, 1e38, math.inf, math.nan
# two launches leave these to autograd, whose products of infinities and zeros come in another order
IN_AUTOGRAD = "an own term", "sequences"
SEQUENCE = "mean", "weights", "metrics", "smoothing and metrics", "GRPO", "squares", *IN_AUTOGRAD


def _same_or_last_bit(one, two, noise=1e-37):
    """Whether gradients are the same numbers but for their rounding to bf16, NaN and infinities in
    the same places. noise: a number or [N, width], where parts cancel."""
    one, two = one.float(), two.float()
    alike = torch.equal(one.isnan(), two.isnan()) and torch.equal(one.isinf(), two.isinf())
    finite = one.isfinite()
    return alike and not ((one - two).abs() > 2**-7 * two.abs() + noise)[finite].any()


def _sequence_of_steps(head, cases, choices, device, width, bare, among=UPSTREAM):
    """Steps with random upstream gradients of the loss -> those whose gradient is not that of two
    launches."""
    two_launches = hl.HeadLoss(
        head.terms, metrics=head.metrics, reduction=head.reduction, options=IN_BACKWARD
    )
    wrong, upstream = [], 1.0
    for step in range(60):
        logits, labels = problem(
            device, width, choices.choice([6, 6, 24]), seed=choices.randrange(3)
        )
        given = cases if len(labels) == N else bare
        if given is None:
            continue
        upstream = choices.choice([upstream, upstream, *among])
        how = choices.choice(["once", "once", "twice", "never", "raises", "no_grad"])
        if how == "no_grad":
            with torch.no_grad():
                head(logits, labels, **given)
            continue
        x, y = (logits.clone().requires_grad_() for _ in range(2))
        cancelling = 1e-6 * (logits.float().softmax(-1).nan_to_num() + 1 / width)
        one, two = head(x, labels, **given), two_launches(y, labels, **given)
        if how == "raises":
            with pytest.raises(RuntimeError, match="hook"):
                handle = x.register_hook(lambda _: (_ for _ in ()).throw(RuntimeError("hook")))
                (upstream * one.loss).backward()
            handle.remove()
        for _ in range({"once": 1, "twice": 2}.get(how, 0)):
            found = [
                torch.autograd.grad(upstream * out.loss, z, retain_graph=True)[0]
                for out, z in ((one, x), (two, y))
            ]
            if not _same_or_last_bit(*found, cancelling * abs(upstream) + 1e-37):
                wrong.append((step, upstream, how))
            upstream = choices.choice([upstream, *among])
    return wrong


@on_hopper
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", SEQUENCE)
def test_any_sequence_of_upstream_gradients_is_right(case, seed, device):
    given = {name: moved(x, device) for name, x in CASES[case].items()}
    given.pop("upstream", None)
    definition = {"metrics": given.pop("metrics", ()), "reduction": given.pop("reduction", "mean")}
    head = hl.HeadLoss(list(given.pop("terms", TERMS)), options=IN_FORWARD, **definition)
    bare = None if given else {}
    among = [x for x in UPSTREAM if abs(x) < 1e30] if case in IN_AUTOGRAD else UPSTREAM
    assert _sequence_of_steps(head, given, random.Random(seed), device, 1000, bare, among) == []


@on_hopper
def test_a_graph_that_outlives_its_head_writes_to_nobodys_memory(device):
    logits, labels = problem(device, 1024)
    x = logits.clone().requires_grad_()

    def make():
        head = hl.HeadLoss(options=IN_FORWARD)
        return captured(lambda: torch.autograd.grad(0.5 * head(x, labels).loss, x)[0].clone())

    graph, gradient = make()
    others = [torch.full((1,), 7.0, device=device) for _ in range(4096)]
    for _ in range(3):
        graph.replay()
    assert torch.cat(others).eq(7.0).all()
    expected = torch.autograd.grad(0.5 * hl.HeadLoss(options=IN_BACKWARD)(x, labels).loss, x)[0]
    assert _same_or_last_bit(gradient, expected)


@on_hopper
def test_a_gradient_that_was_handed_over_may_be_written_to(device):
    logits, labels = problem(device)
    x = logits.clone().requires_grad_()
    loss = hl.HeadLoss(options=IN_FORWARD)(x, labels).loss
    (handed,) = torch.autograd.grad(loss, x, retain_graph=True)
    first = handed.clone()
    handed.zero_()
    assert torch.allclose(torch.autograd.grad(loss, x)[0].float(), first.float(), rtol=2**-7)
    assert not handed.any()  # nor does a later one write to it


@on_hopper
def test_in_place_the_logits_become_the_gradient(device):
    logits, labels = problem(device)
    expected = steps(IN_FORWARD, logits, labels)[1]
    x = logits.clone().requires_grad_()
    y = x * 1
    out = hl.HeadLoss(list(TERMS), options=hl.Options(gradient="forward", inplace=True))(y, labels)
    assert torch.equal(y, expected)
    (gradient,) = torch.autograd.grad(out.loss, y, retain_graph=True)
    assert gradient.data_ptr() == y.data_ptr() and torch.equal(gradient, expected)
    with pytest.raises(RuntimeError, match="one backward, from the loss alone"):
        torch.autograd.grad(out.loss, y)
    z = x * 1
    squared = z * z
    hl.HeadLoss(options=hl.Options(gradient="forward", inplace=True))(z, labels)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


@on_hopper
def test_losses_on_statistics_besides_it_take_the_other_path(device):
    logits, labels = problem(device)
    gradients = []
    for options in (IN_FORWARD, IN_BACKWARD):
        x = logits.clone().requires_grad_()
        out = hl.HeadLoss([hl.CrossEntropy()], options=options)(x, labels)
        (out.loss + out.stats.lse.sum()).backward()
        gradients.append(x.grad.float())
    assert torch.allclose(*gradients, rtol=2**-7, atol=1e-30)


REFUSED = {
    "a negative scale": (dict(transform=hl.Transform(scale=-1.0)), "a positive scale, got -1.0"),
    "a bias": (dict(transform=hl.Transform(bias=torch.zeros(V))), "logits without a bias"),
    "a collision": (
        dict(terms=(hl.CrossEntropy(), hl.Term("own", StatisticValue("collision")))),
        "got .*'collision'",
    ),
    "a metric": (dict(metrics=("rank",)), "no statistics but .* got .'log_prob', 'rank'."),
    "many sums": (
        dict(metrics=("lse", "entropy", "accuracy", "log_prob"), terms=(*TERMS, hl.Entropy(0.1))),
        "at most 6 sums of them, got .*.hits.",
    ),
    "a label's logit": (
        dict(terms=(hl.Term("own", StatisticValue("target_logit")),)),
        "got terms of .'target_logit'",
    ),
    "an own function": (
        dict(terms=(hl.Term("own", lambda stats: stats.lse),)),
        "terms that are pointwise",
    ),
    "a trained input": (
        dict(
            terms=(hl.PolicyGradient("reinforce"),),
            inputs={"advantages": torch.ones(N, requires_grad=True)},
        ),
        "inputs without a gradient",
    ),
    "a sequence's ratio": (
        dict(
            terms=(hl.PolicyGradient("gspo"),),
            inputs={
                "advantages": torch.ones(N),
                "old_log_prob": torch.zeros(N),
                "sequences": _two_sequences,
            },
        ),
        "terms that are pointwise",
    ),
    "a sum over tokens": (
        dict(terms=(hl.Term("own", lambda stats: stats.lse / stats.lse.sum(), pointwise=True),)),
        "terms that are pointwise",
    ),
    "a teacher": (
        dict(terms=(hl.Distillation(),), inputs={"teacher": hl.Teacher(torch.zeros(N, V))}),
        "got .*'forward_kl'",
    ),
    "no reduction": (dict(reduction="none"), "terms that are pointwise"),
    "fp32": (
        dict(dtype=torch.float32),
        "bfloat16 or float16 logits on a GPU, got torch.float32 on",
    ),
}


def moved(x, device):
    """A test's argument on the device."""
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {name: moved(value, device) for name, value in x.items()}
    if isinstance(x, hl.Teacher):
        return hl.Teacher(x.logits.to(device))
    if x is _two_sequences:
        return x(device)
    if isinstance(x, hl.Transform):
        tensors = {name: getattr(x, name) for name in ("bias", "temperature")}
        return dataclasses.replace(
            x, **{n: t.to(device) for n, t in tensors.items() if isinstance(t, torch.Tensor)}
        )
    return x


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case, device):
    given, message = REFUSED[case]
    given = {name: moved(x, device) for name, x in given.items()}
    logits, labels = problem(device)
    logits = logits.to(given.pop("dtype", torch.bfloat16))
    arguments = {name: given.pop(name) for name in ("reduction", "metrics") if name in given}
    head = hl.HeadLoss(
        list(given.pop("terms", [hl.CrossEntropy()])), options=IN_FORWARD, **arguments
    )
    with pytest.raises(ValueError, match=message):
        head(logits.requires_grad_(), labels, **given)
    with torch.no_grad():
        head(logits, labels, **given)  # writes no gradient


def test_a_gradient_in_fp16_is_not_written_before_it_is_scaled(device):
    logits, labels = problem(device)
    options = hl.Options(backend="triton", gradient="forward", inplace=True)
    with pytest.raises(
        ValueError, match=r"needs bfloat16 logits beside inplace=True: .* underflows"
    ):
        hl.HeadLoss(options=options)(logits.half().requires_grad_() * 1, labels)


@on_hopper
def test_what_was_found_for_aligned_logits_is_not_taken_for_others(device):
    logits, labels = problem(device)
    head, memory = hl.HeadLoss(options=IN_FORWARD), logits.new_empty(logits.numel() + 1)
    for _ in range(3):
        head(logits.clone().requires_grad_(), labels).loss.backward()
        # of the same kind but for that
        shifted = memory[1:].view_as(logits).copy_(logits).detach().requires_grad_()
        with pytest.raises(ValueError, match="rows that begin at multiples of 16 bytes"):
            head(shifted, labels)


def test_where_one_launch_cannot_be():
    with pytest.raises(ValueError, match="the triton backend"):
        hl.HeadLoss(options=hl.Options(backend="torch", gradient="forward"))(
            torch.zeros(2, 8, requires_grad=True), torch.zeros(2, dtype=torch.int64)
        )
    x, labels, options = torch.zeros(2, 8), torch.tensor([0, 1]), hl.Options(gradient="forward")
    for function in (hl.vocab_statistics, hl.log_probs):
        with pytest.raises(ValueError, match="gradient='forward' is for a HeadLoss, whose"):
            function(x.clone().requires_grad_(), labels, options=options)
        # as with a HeadLoss, whose forward writes none where none is asked for
        function(x, labels, options=options)
    with pytest.raises(ValueError, match="gradient='forward' is for logits"):
        hl.linear_vocab_statistics(x, torch.zeros(4, 8), labels, options=options)


@pytest.mark.parametrize("given", [1.0, 0.5, 3.0, 0.0])
def test_a_gradient_over_the_logits_becomes_that_of_another_upstream_gradient(given, device):
    gradient = torch.randn(70, 120, device=device).bfloat16()
    found = gradient.clone()
    gradient_for(found, torch.tensor(given, device=device))
    assert torch.equal(found, (gradient.float() * given).bfloat16())


@pytest.mark.parametrize("vocab_size", [250, 700, 32000, 32064, 50304, 128256, 151936, 262144])
def test_leaves_depend_on_the_vocabulary_alone(vocab_size):
    size = canonical_chunk_size(vocab_size)
    all_cuts = [one_read_launch.cuts_of(size, 8 // ranks) for ranks in (1, 2, 4, 8)]
    assert len({(cuts.chunk, cuts.cuts) for cuts in all_cuts}) == 1
    for ranks, cuts in zip((1, 2, 4, 8), all_cuts):
        assert (
            cuts.leaves * cuts.pieces * ranks == 8 << cuts.cuts
            and cuts.leaves & (cuts.leaves - 1) == 0
        )
        assert (
            -(-cuts.chunk // (1 << cuts.cuts)) <= one_read_launch.LEAF
            and cuts.leaves <= kernel_numbers()["SUM"]
        )
        assert (
            4 <= cuts.slots <= one_read_launch.SLOTS
            and cuts.slots * cuts.slot_bytes <= one_read_kernel.SHARED
        )
        assert cuts.slot_bytes % 128 == 0 and cuts.slot_bytes >= 16 * cuts.chunk * cuts.leaves / (
            1 << cuts.cuts
        )


@on_hopper
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
@pytest.mark.parametrize(
    "flags",
    [(), ("ENTROPY",), ("ARGMAX",), ("ENTROPY", "ARGMAX", "TOTAL", "ENTROPY_TERM"), ("HALF",)],
)
def test_the_kernel_compiles_for_gpus_that_are_not_here(flags, architecture, device):
    library = one_read_kernel.kernel_of(torch.device(device, 0)).library
    policy = row_function([hl.PolicyGradient(), hl.KLToReference(0.1), hl.Entropy(0.1)]).source
    for rows in (None, policy):
        assert bytes(one_read_kernel.compiled(library, architecture, rows, *flags)[1:4]) == b"ELF"


@functools.cache
def kernel_numbers():
    """The kernel's named integers."""
    source = (Path(one_read_launch.__file__).parent / "numbers.cuh").read_text()
    return {name: int(x) for name, x in re.findall(r"(\w+) = (\d+)[,;]", source)}


def test_the_argument_and_its_callers_agree():
    """The compiler checks what stands in CUDA, too: see `params.agreement`."""
    params = one_read_params
    assert params.TERMS == row_functions.SLOPES and params.GIVENS == row_functions.MOST_INPUTS
    addresses = params.N_ADDRESSES + 2  # and `control` and `failed`
    assert sum(params.POINTERS.values()) == addresses


def places_of(layout):
    kind, plan = object.__new__(one_read_launch.Kind), SimpleNamespace(statistics=("log_prob",))
    return dict(zip(one_read_params.OUTPUTS, kind._places(layout, plan, None, N)))


@pytest.mark.parametrize("n_flags", range(4))
def test_every_result_has_a_place_of_its_own(n_flags):
    for want in itertools.combinations(one_read.FLAGS, n_flags):
        layout = layout_of(True, want)
        merged, values, *flags = layout.empty_outputs(torch.empty(()), N, torch.float32)
        rows = {
            **dict(zip(layout.merged, merged)),
            **dict(zip(layout.values, values)),
            **dict(zip(layout.flags, flags)),
        }
        outputs, places = (merged, values, *flags), places_of(layout)
        for name, row in rows.items():
            number, offset = places.pop(name)
            assert outputs[number].data_ptr() + offset == row.data_ptr(), name
        beside = "loss", "sums", "inverse"
        assert {name for name, place in places.items() if place is not None} == {*beside}


def test_a_result_without_a_place_is_an_error():
    layout = SimpleNamespace(merged=("shift",), values=("a sum",), flags=())
    with pytest.raises(AssertionError, match="the kernel writes no"):
        places_of(layout)
    layout.values = ("shift",)
    with pytest.raises(AssertionError, match="names of merged rows and of values"):
        places_of(layout)


FLAGS = {
    "cross-entropy": ([hl.CrossEntropy()], (), {}, []),
    "a metric": ([hl.CrossEntropy()], ("entropy",), {}, ["ENTROPY"]),
    "a bonus": ([hl.CrossEntropy(), hl.Entropy(0.1)], (), {}, ["ENTROPY", "ENTROPY_TERM"]),
    "a policy": ([hl.PolicyGradient(), hl.Entropy(0.1)], (), {}, ["ENTROPY", "ENTROPY_TERM"]),
    "a policy with a metric": ([hl.PolicyGradient()], ("entropy",), {}, ["ENTROPY"]),
    "smoothing": ([hl.CrossEntropy(label_smoothing=0.1)], ("accuracy",), {}, ["ARGMAX", "TOTAL"]),
    "a softcap": ([hl.CrossEntropy()], (), {"softcap": 9.0}, ["SOFTCAP"]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", FLAGS)
def test_a_kernel_is_compiled_with_what_its_loss_needs(case, dtype, device):
    terms, metrics, transform, expected = FLAGS[case]
    head = hl.HeadLoss(terms, metrics=metrics, options=hl.Options(backend="triton"))
    logits = torch.zeros(N, 128, dtype=dtype, device=device, requires_grad=True)
    labels = torch.zeros(N, dtype=torch.int64, device=device)
    names = dict.fromkeys(name for term in terms for name in term.inputs)
    inputs = {name: torch.zeros(N, device=device) for name in names}
    given = head._given(logits, labels, None, hl.Transform(**transform))
    call, request = head._checked(given, None, None, inputs)
    plan, *_, function, _ = head._case(call, request).loss.in_one_read
    found = one_read_launch.flags_of(request.facts, plan, function, dtype)
    assert sorted(found) == sorted(expected + ["HALF"] * (dtype == torch.float16))


# Launches of other shapes follow each other in one memory, so that packets of one may lie where
# another's were.
LAUNCHES = [(5, 2), (3, 1), (7, 2), (1, 4), (6, 1)]


def value(rank, row, piece):
    return 1 + rank + 10 * piece + 100 * row


def results(n_ranks, order, **given):
    ranks = [Rank(half=7 * 4 * n_ranks) for _ in range(n_ranks)]
    run(ranks, LAUNCHES, value=value, order=random.Random(order), **given)
    return ranks


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("resident, slots", [(1, 4), (2, 2), (3, 2)])
def test_the_protocol_ends_with_the_same_sums_in_any_order(n_ranks, resident, slots):
    """As long as the slots of the programs that run at once hold a row's pieces, of which there are
    4."""
    for order in range(30):
        ranks = results(n_ranks, order, n_programs=3, slots=slots, resident=resident)
        for number, (n_rows, pieces) in enumerate(LAUNCHES, 1):
            for row in range(n_rows):
                total = sum(
                    value(rank, row, piece) for rank in range(n_ranks) for piece in range(pieces)
                )
                for rank in ranks:
                    assert [rank.results[number, row, piece] for piece in range(pieces)] == [
                        total
                    ] * pieces


def test_slots_that_hold_no_whole_row_wait_for_each_other():
    (rank,) = results(1, 0, n_programs=3, slots=2, resident=1)
    assert math.isnan(rank.results[4, 0, 0])


@pytest.mark.parametrize("slots", range(4, one_read_launch.SLOTS + 1))
def test_warps_that_take_turns_take_no_barrier_for_another(slots):
    numbers = kernel_numbers()
    turns = {
        "teams": numbers["TEAMS"],
        "post": numbers["POST"],
        "merge": numbers["MERGE"],
        "n_items": 40,
    }
    for i in range(20):
        take_turns(random.Random(i), slots, **turns)
    if slots % numbers["TEAMS"]:  # or else each slot is one team's
        with pytest.raises(AssertionError, match=r"I[357] of"):
            for i in range(20):
                take_turns(random.Random(i), slots, **turns, waits_for_the_team_before=False)


def test_a_rank_that_does_not_come_ends_its_peers_with_nan():
    ranks = results(2, 0, n_programs=2, slots=2, absent=(1,), patience=500)
    assert len(ranks[0].results) == sum(n_rows * pieces for n_rows, pieces in LAUNCHES)
    assert all(math.isnan(total) for total in ranks[0].results.values())


def _shard(group, logits, vocab_size):
    """This rank's shard of logits, all of them without a group."""
    if group is None:
        return None, logits
    shard = hl.VocabShard.from_group(group, vocab_size)
    return shard, logits[:, shard.start : shard.stop].contiguous()


def _sharded(group, device, vocab_size, metrics=(), transposed=False, kind="plain"):
    logits, labels = problem(device, vocab_size, 40)
    shard, x = _shard(group, logits, vocab_size)
    if (
        transposed and group is not None and group.rank() == 0
    ):  # a rank whose logits the kernel cannot read where they are
        x = x.t().contiguous().t()
    given = {"terms": (hl.CrossEntropy(label_smoothing=0.1),)} if kind == "smoothing" else {}
    if kind == "transformed":
        temperature = 0.5 + torch.arange(40.0, device=device) / 40
        given = {"transform": hl.Transform(softcap=9.0, temperature=temperature)}
        x = x.half()
    if kind == "policy":
        old, reference = (
            -torch.arange(40.0, device=device) / 4,
            -torch.arange(40.0, device=device) / 3,
        )
        inputs = {
            "advantages": (reference + 7).sign(),
            "old_log_prob": old,
            "reference_log_prob": reference,
        }
        given = {"terms": (hl.PolicyGradient(), hl.KLToReference(0.1)), "inputs": inputs}
    out, first, second = steps(IN_FORWARD, x, labels, shard=shard, metrics=metrics, **given)
    found = out.loss, *out.metrics.values(), out.stats.log_prob, out.stats.lse
    return [x.detach().cpu() for x in (first, second, *found)]


@on_hopper
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("vocab_size", [1024, 32768, 50304, 128256])
@pytest.mark.parametrize(
    "metrics, kind",
    [
        ((), "plain"),
        (("accuracy", "entropy"), "plain"),
        (("entropy",), "policy"),
        (("accuracy",), "smoothing"),
        (("accuracy", "entropy"), "transformed"),
    ],
)
def test_any_number_of_ranks_has_the_same_bits(metrics, kind, vocab_size, world_size):
    given = vocab_size, metrics, False, kind
    parts, (alone,) = on_ranks(world_size, _sharded, *given), on_ranks(1, _sharded, *given)
    for part in parts:
        assert all(torch.equal(a, b) for a, b in zip(part[2:], alone[2:]))
    assert torch.equal(torch.cat([part[0] for part in parts], 1), alone[0])


def _padded(group, device, vocab_size, padding):
    """The loss, and this rank's gradient, where the last rank has columns beyond all chunks."""
    chunks, n_ranks = 8 * canonical_chunk_size(vocab_size), 1 if group is None else group.size()
    bounds = [*(chunks * rank // n_ranks for rank in range(n_ranks)), chunks + padding]
    shard = hl.VocabShard.from_boundaries(bounds, vocab_size, group)
    logits, labels = problem(device, vocab_size, 40)
    logits = torch.nn.functional.pad(logits, (0, bounds[-1] - vocab_size), value=math.nan)
    out, gradient, _ = steps(
        IN_FORWARD, logits[:, shard.start : shard.stop].contiguous(), labels, shard=shard
    )
    return [x.detach().cpu() for x in (gradient, out.loss, out.stats.lse)]


@on_hopper
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("vocab_size, padding", [(1000, 8), (1000, 1), (50257, 256)])
def test_padding_on_the_last_rank_has_no_part(vocab_size, padding, world_size):
    parts = on_ranks(world_size, _padded, vocab_size, padding)
    (alone,) = on_ranks(1, _padded, vocab_size, 0)
    for part in parts:
        assert all(torch.equal(a, b) for a, b in zip(part[1:], alone[1:]))
    joined = torch.cat([part[0] for part in parts], 1)
    assert torch.equal(joined[:, :vocab_size], alone[0][:, :vocab_size])
    assert not joined[:, vocab_size:].any()


@on_hopper
def test_ranks_take_one_way_whatever_the_memory_of_their_logits():
    for plain, transposed in zip(
        on_ranks(2, _sharded, 32064), on_ranks(2, _sharded, 32064, (), True)
    ):
        assert all(torch.equal(a, b) for a, b in zip(plain, transposed))


def _repeated(group, device, vocab_size, n_rows, repeats):
    """Steps beside collectives in opposite orders and noise, on two streams in turn: equal bits
    every time."""
    logits, labels = problem(device, vocab_size, n_rows)
    labels[labels % 3 == 0] = IGNORED  # so that some warps have nothing to do, others much
    shard, x = _shard(group, logits, vocab_size)
    x.requires_grad_()
    head, side, noise = (
        hl.HeadLoss(list(TERMS), options=IN_FORWARD),
        torch.cuda.Stream(),
        torch.cuda.Stream(),
    )
    squares, big = torch.randn(2, 2048, 2048, device=device), torch.ones(1 << 22, device=device)
    rank = 0 if group is None else group.rank()

    def step():
        out = head(x, labels, shard=shard)
        return [out.loss.detach(), out.stats.log_prob.detach(), torch.autograd.grad(out.loss, x)[0]]

    def beside():
        with torch.cuda.stream(noise):
            torch.mm(squares[0], squares[1])
            if group is not None:
                torch.distributed.all_reduce(big, op=torch.distributed.ReduceOp.MAX, group=group)

    expected, same = step(), True
    for i in range(repeats):
        if (i + rank) % 2:
            beside()
        stream = side if i % 3 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = step()
        if not (i + rank) % 2:
            beside()
        torch.cuda.current_stream().wait_stream(stream)
        same &= all(torch.equal(a, b) for a, b in zip(found, expected))
    return same


@on_hopper
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_steps_beside_other_work_have_the_same_bits(world_size):
    assert (
        on_ranks(world_size, _repeated, 32000, 1500, 1000 if FULL else 100) == [True] * world_size
    )


def _random_steps(group, device, repeats):
    """Steps of random shapes, losses and denominators, in one launch and in two: how many
    differ."""
    choices, wrong = random.Random(5), torch.zeros((), device=device)
    policy, smoothed = (
        (hl.PolicyGradient(), hl.KLToReference(0.1)),
        (hl.CrossEntropy(label_smoothing=0.1),),
    )
    head_of = functools.cache(
        lambda terms, metrics, options: hl.HeadLoss(terms, metrics=metrics, options=options)
    )
    for step in range(repeats):
        vocab_size, n_rows = (
            choices.choice([1024, 4096, 32000, 50304, 128256]),
            choices.randrange(1, 200),
        )
        terms = choices.choice(
            [(hl.CrossEntropy(),), TERMS, policy, smoothed, (hl.CrossEntropy(), hl.Entropy(0.1))]
        )
        logits = torch.randn(
            n_rows, vocab_size, device=device, generator=torch.Generator(device).manual_seed(step)
        )
        labels = (logits[:, 0].abs() * 1000).long() % vocab_size
        # nothing is summed of most rows, or of some
        labels[logits[:, 1] < choices.choice([-9, -1, 1])] = IGNORED
        old = {
            name: logits[:, i] - 8 for i, name in enumerate(("old_log_prob", "reference_log_prob"))
        }
        inputs = {"advantages": logits[:, 3], **old} if terms is policy else None
        metrics = choices.choice([(), ("entropy",), ("accuracy", "entropy")])
        shard, x = _shard(group, logits.bfloat16(), vocab_size)
        x.requires_grad_()
        given = {"shard": shard, "inputs": inputs, "denominator": choices.choice([None, 7.0])}
        found = []
        for options in (IN_FORWARD, IN_BACKWARD):
            out = head_of(terms, metrics, options)(x, labels, **given)
            found.append((out.loss.detach(), torch.autograd.grad(out.loss, x)[0].float()))
        (one, grad), (two, expected) = found
        wrong += ((one - two).abs() > 1e-5 * two.abs() + 1e-6) | (
            (grad - expected).norm() > 2**-7 * expected.norm()
        )
    return int(wrong)


@on_hopper
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_random_steps_agree_with_two_launches(world_size):
    assert on_ranks(world_size, _random_steps, 10_000 if FULL else 100) == [0] * world_size


def _policy_in_float64(log_prob, advantages, old_log_prob, reference_log_prob):
    ratio, rest = (log_prob - old_log_prob).exp(), reference_log_prob - log_prob
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return 0.1 * (rest.exp() - rest - 1) - clipped


K3 = hl.KLToReference(0.1, input_clamp=None, output_clamp=None)
# terms, and their sum by float64 log-probs of all ids [N, V], of labels [N], lse [N] and inputs
LOSSES = {
    "cross-entropy": ((hl.CrossEntropy(),), lambda log_p, log_prob, lse, inputs: -log_prob),
    "z-loss": (TERMS, lambda log_p, log_prob, lse, inputs: 0.01 * lse**2 - log_prob),
    "smoothing": (
        (hl.CrossEntropy(label_smoothing=0.1),),
        lambda log_p, log_prob, lse, inputs: -0.9 * log_prob - 0.1 * log_p.mean(-1),
    ),
    "entropy": (
        (hl.CrossEntropy(), hl.Entropy(0.1)),
        lambda log_p, log_prob, lse, inputs: 0.1 * (log_p.exp() * log_p).sum(-1) - log_prob,
    ),
    "policy": (
        (hl.PolicyGradient("clip", clip=(0.2, 0.2)), K3),
        lambda log_p, log_prob, lse, inputs: _policy_in_float64(log_prob, **inputs),
    ),
}


def _float64_loss(kind, logits, labels, inputs, denominator):
    """In float64 and plain torch, of whole logits [N, V]: a loss, the mean size of its tokens'
    parts, its gradient."""
    z = logits.double().requires_grad_()
    valid = labels != IGNORED
    log_p = z.log_softmax(-1)
    log_prob = log_p.gather(-1, labels.where(valid, 0)[:, None])[:, 0]
    inputs = {name: x.double() for name, x in inputs.items()}
    loss = LOSSES[kind][1](log_p, log_prob, z.logsumexp(-1), inputs).where(valid, 0.0)
    divisor = max(int(valid.sum()), 1) if denominator is None else denominator
    total, size = loss.sum() / divisor, loss.detach().abs().sum() / divisor
    return total.detach(), size, torch.autograd.grad(total, z)[0]


def _random_logits(choices, device, vocab_size, n_rows, seed):
    """Logits [N, V] of a random spread and shift, labels, and inputs of a policy."""
    generator = torch.Generator(device).manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, device=device, generator=generator)  # noqa: E731
    spread, shift = choices.choice([0.3, 1.0, 4.0]), choices.choice([-200.0, 0.0, 30.0])
    logits = (spread * draw(n_rows, vocab_size) + shift).bfloat16()
    labels = torch.randint(vocab_size, (n_rows,), device=device, generator=generator)
    labels[draw(n_rows) < choices.choice([-9.0, 0.0])] = IGNORED
    inputs = {
        "advantages": draw(n_rows),
        "old_log_prob": draw(n_rows) - 8,
        "reference_log_prob": draw(n_rows) - 8,
    }
    return logits, labels, inputs


def _random_steps_against_float64(group, device, repeats):
    """Steps of one read whose loss or gradient is further from float64's than rounding explains."""
    choices, wrong = random.Random(7), []
    for step in range(repeats):
        vocab_size, n_rows = (
            choices.choice([1024, 4096, 32000, 50304, 128256]),
            choices.randrange(1, 150),
        )
        kind, denominator = choices.choice(list(LOSSES)), choices.choice([None, 7.0])
        logits, labels, inputs = _random_logits(choices, device, vocab_size, n_rows, 1000 + step)
        expected, size, whole = _float64_loss(kind, logits, labels, inputs, denominator)
        shard, x = _shard(group, logits, vocab_size)
        head, x = hl.HeadLoss(list(LOSSES[kind][0]), options=IN_FORWARD), x.requires_grad_()
        given = {"inputs": inputs} if kind == "policy" else {}
        out = head(x, labels, shard=shard, denominator=denominator, **given)
        (found,) = torch.autograd.grad(out.loss, x)
        mine = whole if shard is None else whole[:, shard.start : shard.stop]
        rounding = (mine.bfloat16().double() - mine).norm()
        error, noise = (found.double() - mine).norm(), 1e-5 * mine.norm() + 1e-12
        far = abs(out.loss.double() - expected) > 1e-5 * size + 1e-6
        if bool(far) or not bool(error <= 1.1 * rounding + noise):
            wrong.append(
                (step, kind, vocab_size, n_rows, float(out.loss), float(expected), float(error))
            )
    return wrong


@on_hopper
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_random_steps_agree_with_float64(world_size):
    assert on_ranks(world_size, _random_steps_against_float64, 200) == [[]] * world_size


def _halves_at_once(group, device, steps):
    """Two groups of half of the ranks, each with a vocabulary of its own, which take steps of one
    read at once."""
    size, rank = group.size() // 2, group.rank()
    halves = [torch.distributed.new_group([*range(first, first + size)]) for first in (0, size)]
    mine, vocab_size = halves[rank // size], (32768, 50304)[rank // size]
    logits, labels = problem(device, vocab_size, 300, seed=rank // size)
    shard, x = _shard(mine, logits, vocab_size)
    head, x = hl.HeadLoss(list(TERMS), options=IN_FORWARD), x.requires_grad_()
    found = [torch.autograd.grad(head(x, labels, shard=shard).loss, x)[0] for _ in range(steps)]
    alone = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(
        hl.HeadLoss(list(TERMS), options=IN_FORWARD)(alone, labels).loss, alone
    )
    torch.distributed.barrier(group)
    return all(torch.equal(gradient, expected[:, shard.start : shard.stop]) for gradient in found)


@on_hopper
@pytest.mark.parametrize("world_size", [4, 8])
def test_two_groups_take_steps_at_once(world_size):
    assert on_ranks(world_size, _halves_at_once, 200) == [True] * world_size


BLOCKS = {
    "plain": {"terms": TERMS},
    "smoothing": {"terms": (hl.CrossEntropy(label_smoothing=0.1),), "metrics": ("accuracy",)},
    "GRPO": {
        "terms": (hl.PolicyGradient("clip", clip=(0.2, 0.28)), hl.KLToReference(0.05)),
        "metrics": ("entropy",),
        "inputs": POLICY,
        "token_weight": torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0, 0.25]),
    },
}


def _blocks(group, device, case):
    """Loss, metrics, dH and dW of one sweep over blocks of tokens, in one launch each and in two;
    and how many."""
    given, launches = dict(BLOCKS[case]), []
    definition = {"terms": list(given.pop("terms")), "metrics": given.pop("metrics", ())}
    generator, width = torch.Generator().manual_seed(3), 1024
    hidden, weight = (
        torch.randn(n, 64, generator=generator).to(device, torch.bfloat16) / 4 for n in (384, width)
    )
    labels = torch.randint(width, (384,), generator=generator).to(device)
    labels[::7] = IGNORED
    shard, columns = _shard(group, weight.t(), width)
    columns, results = columns.t().contiguous(), []

    def repeated(x):
        if isinstance(x, torch.Tensor):
            return x.repeat(64)
        return {k: repeated(v) for k, v in x.items()}

    given = {name: moved(repeated(x), device) for name, x in given.items()}
    # blocks of 128 tokens
    linear = hl.Linear("one_sweep", budget=128 * 2 * len(columns) + 4 * columns.numel())
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FEWEST", "NARROWEST_ALONE", "NARROWEST"):
            patch.setattr(one_read, name, 0)
        launch = one_read_launch.statistics_and_gradient
        counted = lambda *args, **kwargs: launches.append(1) or launch(*args, **kwargs)  # noqa: E731
        patch.setattr(one_read_launch, "statistics_and_gradient", counted)
        for options in (hl.Options(backend="triton"), IN_BACKWARD):
            h, w = hidden.clone().requires_grad_(), columns.clone().requires_grad_()
            head = hl.HeadLoss(**definition, options=options)
            out = head.linear(h, w, labels, shard=shard, linear=linear, **given)
            out.loss.backward()
            results.append(
                [
                    x.detach().float().cpu()
                    for x in (out.loss, *out.metrics.values(), h.grad, w.grad)
                ]
            )
    return len(launches), *results


@on_hopper
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("case", BLOCKS)
def test_blocks_of_a_linear_head_take_one_launch_each(case, world_size):
    for launches, one, two in on_ranks(world_size, _blocks, case):
        assert launches == 3
        for a, b in zip(one, two):
            assert (a - b).norm() <= 4e-3 * b.norm() + 1e-6


def _replayed(group, device):
    logits, labels = problem(device, 32000, 64)
    shard, x = _shard(group, logits, 32000)
    x.requires_grad_()
    head = hl.HeadLoss(list(TERMS), options=IN_FORWARD)

    def step():
        out = head(x, labels, shard=shard)
        return out.loss, torch.autograd.grad(out.loss, x)[0]

    graph, outputs = captured(step)
    same = True
    for seed in range(20):
        generator = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn(x.shape, device=device, generator=generator))
        same &= replays(graph, outputs, step)[1]
    return same


@on_hopper
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_one_launch_replays_from_a_graph(world_size):
    assert on_ranks(world_size, _replayed) == [True] * world_size


def _left_alone(group, device):
    """A step that the last rank does not make: its peers' results are NaN after the timeout, their
    next call raises."""
    logits, labels = problem(device, 32000)
    # whose memory nothing uses afterwards
    others = torch.distributed.new_group(list(range(group.size())))
    shard, x = _shard(others, logits, 32000)
    head = hl.HeadLoss(options=IN_FORWARD)
    x.requires_grad_()
    head(x, labels, shard=shard)
    symmetric_memory._groups[others.group_name].memories[True][-1].one_read.timeout_ms = 200
    found = []
    if group.rank() < group.size() - 1:
        started = time.monotonic()
        out = head(x, labels, shard=shard)
        found += [
            bool(out.loss.isnan()),
            bool(torch.autograd.grad(out.loss, x)[0][0].isnan().all()),
        ]
        found.append(time.monotonic() - started < 60)
        with pytest.raises(
            RuntimeError, match=r"waited 0.2 s for a rank of its group that did not come"
        ):
            head(x, labels, shard=shard)
    torch.distributed.barrier(group)
    return found


@on_hopper
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_rank_that_does_not_come_is_an_error(world_size):
    assert on_ranks(world_size, _left_alone) == [[True, True, True]] * (world_size - 1) + [[]]
