"""Options(gradient="forward"): the loss and its gradient from one launch that reads each logit
once."""

import math
import random

import pytest
import torch
from cuda_problem import captured
from one_read_problem import (
    ADVANTAGES,
    IGNORED,
    IN_BACKWARD,
    IN_FORWARD,
    POLICY,
    TERMS,
    N,
    V,
    expect_alike,
    focal,
    moved,
    problem,
    steps,
    two_sequences,
)
from torch_defaults import torch_defaults

import tp_headloss as hl
from tp_headloss.engine.one_read import kernel as one_read_kernel
from tp_headloss.engine.one_read import launch as one_read_launch
from tp_headloss.engine.one_read.rows import row_function
from tp_headloss.engine.reductions import StatisticValue
from tp_headloss.engine.sums_triton import gradient_for

on_hopper = pytest.mark.cuda  # the GPU tests run where the kernel does
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
            hl.Term("own", focal, 0.5, ("entropy",), inputs=("advantages",), pointwise=True),
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
            "sequences": two_sequences,
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


# each compiles kernels of both ways again
MANY = "mean", "weights", "smoothing and metrics", "entropies", "GRPO", "a softcap and temperatures"
WIDTHS = [(case, width) for case in CASES for width in (704, 32064)]
WIDTHS += [(case, width) for case in MANY for width in (8, 128, 1000, 16384, 50304, 151936)]


@on_hopper
@pytest.mark.parametrize("case, width", WIDTHS)
def test_losses_and_gradients_are_those_of_two_launches(case, width, device):
    logits, labels = problem(device, width)
    labels[2:4] = torch.tensor([0, width - 1])
    logits[0, labels[0]] += 20  # so that the others' sum decides its gradient
    logits[4, ::3] = -math.inf
    given = {name: moved(x, device) for name, x in CASES[case].items()}
    noise = 1e-30
    cancels = "entropies", "smoothing", "a scale", "temperatures", "totals"
    if [name for name in cancels if name in case]:
        noise = 1e-6 * (logits.float().softmax(-1).nan_to_num() + 1 / width)
    # each dtype compiles all kernels again, so that a narrow and a wide row are enough
    more = (torch.float16, torch.float32) if width in (704, 32064) else ()
    for dtype in (torch.bfloat16, *more):
        logits = logits.to(dtype)
        expect_alike(
            steps(IN_FORWARD, logits, labels, **given),
            steps(IN_BACKWARD, logits, labels, **given),
            noise + 2**-24 if dtype == torch.float16 else noise,
        )


@on_hopper
@pytest.mark.parametrize("width", [8, 704, 32064])
def test_a_softcap_is_exact_at_small_temperatures(width, device):
    """Values near 0 beside large ones; a row's scale is 1500."""
    logits, labels = problem(device, width)
    logits = (0.1 * logits).clamp(max=0.5)
    logits[:, ::5] = -40
    transform = hl.Transform(softcap=15.0, temperature=0.01)
    given = {"transform": transform, "terms": [hl.CrossEntropy(), hl.Entropy(-0.1)]}
    out, *_ = steps(IN_FORWARD, logits, labels, **given)
    z = 1500 * (logits.double() / 15).tanh()
    valid = labels != IGNORED
    # two roundings of a value of at most 0.5, and those of z
    noise = 1500 * (0.5 / 15) * 3 * 2**-24
    for found, exact in [
        (out.stats.lse, z.logsumexp(-1)),
        (out.stats.entropy, (z.softmax(-1) * -z.log_softmax(-1)).sum(-1)),
    ]:
        assert ((found - exact).abs()[valid] < 4 * noise + 1e-6 * exact.abs()[valid]).all()


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
def test_class_weights_are_those_of_each_calls_labels(device):
    """A kind of call is remembered, the weights of its labels are not."""
    classes = torch.linspace(0.0, 2.0, V, device=device)
    terms, metrics = [hl.CrossEntropy(class_weight=classes)], ("accuracy", "entropy")
    heads = [hl.HeadLoss(terms, metrics=metrics, options=x) for x in (IN_FORWARD, IN_BACKWARD)]
    for seed in range(3):
        logits, labels = problem(device, seed=seed)
        found = []
        for head in heads:
            leaf = logits.clone().requires_grad_()
            out = head(leaf, labels)
            out.loss.backward()
            found.append((out, leaf.grad))
        assert heads[0].explain(leaf, labels).way == "one read"
        expect_alike(*found)
        valid = labels != IGNORED
        assert torch.allclose(out.term_counts["cross_entropy"], classes[labels[valid]].sum())
        assert (found[0][0].count == valid.sum()) and out.count == valid.sum()


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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", ["smoothing and metrics", "an own term"])
def test_torchs_defaults_change_neither_memory_nor_results(case, dtype, device, monkeypatch):
    monkeypatch.setattr(one_read_launch, "_alone", {})
    logits, labels = problem(device)
    given = {name: moved(x, device) for name, x in CASES[case].items()}
    with torch_defaults(dtype):
        found = steps(IN_FORWARD, logits, labels, **given)
    (memory,) = one_read_launch._alone[logits.device.index]
    assert memory.buffer.dtype == torch.float32
    expected = steps(IN_BACKWARD, logits, labels, **given)
    assert found[0].loss.dtype == expected[0].loss.dtype
    expect_alike(found, expected)


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
    "a metric": (dict(metrics=("rank",)), "no statistics but .* got .'rank'."),
    "many sums": (
        dict(metrics=("lse", "entropy", "accuracy", "log_prob"), terms=(*TERMS, hl.Entropy(0.1))),
        "at most 6 sums of terms and metrics, got .*.hits.",
    ),
    "a label's logit": (
        dict(terms=(hl.Term("own", StatisticValue("target_logit")),)),
        "got terms of .'target_logit'",
    ),
    "an own function": (
        dict(terms=(hl.Term("own", lambda stats: stats.lse),)),
        "Term.pointwise.*got .'own'",
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
                "sequences": two_sequences,
            },
        ),
        "Term.pointwise.*got .'gspo'",
    ),
    "a sum over tokens": (
        dict(terms=(hl.Term("own", lambda stats: stats.lse / stats.lse.sum(), pointwise=True),)),
        "arithmetic .* got aten.sum.default",
    ),
    "a teacher of another dtype": (
        dict(terms=(hl.Distillation(),), inputs={"teacher": hl.Teacher(torch.zeros(N, V).half())}),
        "a teacher of the student's dtype or float32, torch.bfloat16, got torch.float16",
    ),
    "two mixtures": (
        dict(
            terms=(hl.Distillation(1.0, "jsd"), hl.Distillation(1.0, "total_variation")),
            inputs={"teacher": hl.Teacher(torch.zeros(N, V).bfloat16())},
        ),
        ".'jsd'. or .'total_variation', 'overlap'., .* got",
    ),
    "no reduction": (dict(reduction="none"), "a reduction .* got reduction='none'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case, device):
    given, message = REFUSED[case]
    given = {name: moved(x, device) for name, x in given.items()}
    logits, labels = problem(device)
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


@on_hopper
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("ENTROPY",),
        ("ARGMAX",),
        ("ENTROPY", "ARGMAX", "TOTAL", "ENTROPY_TERM"),
        ("HALF",),
        ("FLOAT32",),
    ],
)
def test_the_kernel_compiles_for_gpus_that_are_not_here(flags, architecture, device):
    library = one_read_kernel.kernel_of(torch.device(device, 0)).library
    policy = row_function([hl.PolicyGradient(), hl.KLToReference(0.1), hl.Entropy(0.1)]).source
    for rows in (None, policy):
        assert bytes(one_read_kernel.compiled(library, architecture, rows, *flags)[1:4]) == b"ELF"


@on_hopper
def test_memory_that_hooks_of_saved_tensors_hand_out_is_not_written_to(device):
    """As that of a pool of an offloading trainer, which serves one call after the other."""
    labels, pool = torch.randint(4096, (64,), device=device), {}
    head = hl.HeadLoss(options=hl.Options(gradient="forward"))
    parts = [torch.randn(64, 4096, device=device).bfloat16().requires_grad_() for _ in range(2)]

    def unpack(x):
        memory = pool.setdefault((x.shape, x.dtype), torch.empty_like(x))
        return memory.copy_(x)

    with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
        losses = [head(x, labels).loss for x in parts]
    for loss in losses:
        loss.backward()
    for x in parts:
        (expected,) = torch.autograd.grad(head(x, labels).loss, x)
        assert torch.allclose(x.grad, expected, rtol=2**-7, atol=0)
