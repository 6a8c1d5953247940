"""Every way has the losses and the gradients of the general one."""

from functools import partial

import pytest
import torch

import tp_headloss as hl
from tp_headloss.engine import ways
from tp_headloss.engine.reductions import StatisticValue
from tp_headloss.head_loss import linear_ways

N, V, H = 6, 256, 16
# dtype of the logits -> how far the gradients of two ways may be apart, as a part of the largest
NOISE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
DTYPES = pytest.mark.parametrize("dtype", NOISE, ids=str)


def focal(stats, advantages):
    return -advantages * (1 - stats.log_prob.exp()) ** 2 * stats.log_prob


FOCAL = hl.Term("focal", focal, inputs=("advantages",), tokenwise=True, pointwise=True)
POLICY = (hl.PolicyGradient(), hl.KLToReference(0.1), hl.Entropy(-0.1))
SMOOTHED = (hl.CrossEntropy(label_smoothing=0.1), hl.ZLoss(0.01))
MEAN = hl.Term("own", lambda stats: stats.lse * stats.lse.mean())
CASES = {
    "cross-entropy": ((hl.CrossEntropy(),), {}),
    "sum": ((hl.CrossEntropy(),), {"reduction": "sum"}),
    "squares": ((hl.CrossEntropy(), hl.ZLoss(0.01)), {"metrics": ("entropy", "accuracy")}),
    "label smoothing": (SMOOTHED, {}),
    "policy": (POLICY, {"metrics": ("entropy",)}),
    "own arithmetic": ((FOCAL,), {}),
    "own PyTorch": ((MEAN,), {}),
    "a loss per token": ((hl.CrossEntropy(),), {"reduction": "none"}),
    "class weights": (
        (hl.CrossEntropy(),),
        {"class_weight": torch.linspace(0.0, 2, V), "metrics": ("entropy", "accuracy")},
    ),
    "class weights beside a term": (
        (hl.CrossEntropy(), hl.ZLoss(0.01)),
        {"class_weight": torch.linspace(0.5, 2, V)},
    ),
    "a temperature per token": ((hl.CrossEntropy(),), {"transform": True}),
}
# Cases that the quicker ways serve; the others are the general one's and that of blocks.
OF_STATISTICS = {"cross-entropy", "sum", "squares"}
SERVED = {
    "one read": OF_STATISTICS
    | {"label smoothing", "policy", "own arithmetic", "a temperature per token", "class weights"},
    "prepared": OF_STATISTICS,
    "one sweep": CASES.keys() - {"own PyTorch", "a loss per token", "class weights beside a term"},
    "epilogues": CASES.keys(),
    "fp8 sweep": OF_STATISTICS
    | {"own arithmetic", "a temperature per token", "label smoothing", "class weights"},
}


def inputs_of(terms, generator, device):
    names = dict.fromkeys(name for term in terms for name in term.inputs)
    return {name: torch.randn(N, generator=generator).to(device) for name in names}


def head_of(case, device, options):
    terms, given = CASES[case]
    if "class_weight" in given:
        weighted = hl.CrossEntropy(class_weight=given["class_weight"].to(device))
        terms = (weighted, *terms[1:])
    others = {name: given[name] for name in ("metrics", "reduction") if name in given}
    return hl.HeadLoss(terms, options=options, **others)


def problem(case, device):
    """Random numbers, labels and the other arguments of a call."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(V, (N,), generator=generator)
    labels[::5] = -100
    terms, given = CASES[case]
    arguments = {"labels": labels.to(device), "inputs": inputs_of(terms, generator, device)}
    if "transform" in given:
        temperature = 0.5 + torch.rand(N, generator=generator).to(device)
        arguments["transform"] = hl.Transform(temperature=temperature)
    return generator, arguments


def results(call, *leaves):
    """The loss, the metrics, and the gradients."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = call(*leaves)
    out.loss.sum().backward()
    return out.loss.detach(), out.metrics, [leaf.grad for leaf in leaves]


def expect_alike(found, expected, noise):
    loss, metrics, gradients = found
    assert torch.allclose(loss, expected[0], rtol=1e-5, atol=1e-6)
    assert metrics.keys() == expected[1].keys()
    for name, value in metrics.items():
        assert torch.allclose(value, expected[1][name], rtol=1e-5, atol=1e-6), name
    for gradient, other in zip(gradients, expected[2]):
        largest = other.abs().max().item()
        assert largest > 0
        assert torch.allclose(gradient, other, rtol=noise, atol=noise * largest)


@DTYPES
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ways.WAYS[:-1], ids=lambda kind: kind.name)
def test_every_way_of_logits_has_the_results_of_the_general_one(
    kind, case, dtype, device, monkeypatch
):
    generator, arguments = problem(case, device)
    logits = (3 * torch.randn(N, V, generator=generator)).to(device, dtype)
    is_here = kind is not ways.OneRead or (logits.is_cuda and dtype == torch.bfloat16)
    is_served = is_here and case in SERVED[kind.name]
    is_demanded = kind is ways.OneRead and is_served
    found = {}
    for taken, gradient in (kind, "forward" if is_demanded else "backward"), (ways.Way, "backward"):
        monkeypatch.setattr(ways, "WAYS", (taken, ways.Way))
        head = head_of(case, device, hl.Options(backend="triton", gradient=gradient))
        explained = head.explain(logits.requires_grad_(), **arguments)
        assert (explained.way == taken.name) == (is_served or taken is ways.Way), explained
        if not is_served:
            return
        found[taken] = results(lambda x, head=head: head(x, **arguments), logits)
    expect_alike(found[kind], found[ways.Way], NOISE[dtype])


def transforms(leading, device):
    """Transforms in turn, some of the same kind."""
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        temperature = (0.5 + torch.rand(leading, generator=generator)).to(device)
        yield hl.Transform(temperature=temperature)
        yield hl.Transform(temperature=temperature, softcap=3.0)
        yield hl.Transform(temperature=temperature.double())
        yield hl.Transform(temperature=0.7 + seed)
        yield hl.Transform(softcap=3.0 + seed)
        yield hl.Transform(scale=2.0, bias=torch.arange(V, device=device) * (seed + 1.0) / V)
        yield None


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("leading", [(N,), (3, N // 3)])
def test_a_remembered_call_takes_the_transform_that_it_is_given(leading, backend, device):
    generator, arguments = problem("cross-entropy", device)
    logits = (3 * torch.randn(N, V, generator=generator)).to(device).view(*leading, V)
    labels, options = arguments["labels"].view(leading), hl.Options(backend=backend)
    head = hl.HeadLoss(options=options)

    def alone(x, transform):
        return hl.HeadLoss(options=options)(x, labels, transform=transform)

    def call(x, transform):
        return head(x, labels, transform=transform)

    given = list(transforms(leading, device))
    expected = [results(partial(alone, transform=transform), logits) for transform in given]
    for transform, right in 2 * [*zip(given, expected)]:
        expect_alike(results(partial(call, transform=transform), logits), right, 1e-6)
    with pytest.raises(ValueError, match="temperature"):
        head(logits, labels, transform=hl.Transform(temperature=torch.ones(N + 1, device=device)))


@DTYPES
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", linear_ways.LINEAR_WAYS[:-1], ids=lambda kind: kind.name)
def test_every_way_of_a_linear_head_has_the_results_of_blocks(
    kind, case, dtype, device, monkeypatch
):
    generator, arguments = problem(case, device)
    hidden = torch.randn(N, H, generator=generator).to(device, dtype)
    weight = (0.4 * torch.randn(V, H, generator=generator)).to(device, dtype)
    is_epilogue = kind is linear_ways.Epilogues
    is_fp8 = kind is linear_ways.Fp8Sweep
    linear = hl.Linear(
        mode="recompute" if is_epilogue else "auto",
        exact_logits=is_epilogue and dtype == torch.bfloat16,
        gradients="fp8" if is_fp8 else None,
    )
    of_bf16 = dtype == torch.bfloat16 or not (is_epilogue or is_fp8)
    is_served = case in SERVED[kind.name] and of_bf16
    found = {}
    for taken in (kind, linear_ways.Blocks):
        monkeypatch.setattr(linear_ways, "LINEAR_WAYS", (taken, linear_ways.Blocks))
        head = head_of(case, device, hl.Options(backend="triton"))
        if is_fp8 and not is_served:  # asked for by name
            for call in (head.linear, head.explain_linear):
                with pytest.raises(ValueError, match="gradients='fp8' is not possible"):
                    call(hidden, weight, linear=linear, **arguments)
            return
        explained = head.explain_linear(hidden, weight, linear=linear, **arguments)
        is_taken = is_served or taken is linear_ways.Blocks
        assert (explained.way == taken.name) == is_taken, explained
        if not is_served:
            return
        found[taken] = results(
            lambda h, w, head=head: head.linear(h, w, linear=linear, **arguments), hidden, weight
        )
    expect_alike(found[kind], found[linear_ways.Blocks], 4 * NOISE[dtype])


def own(stats):
    return stats.lse.cumsum(0)


POLICY = {"advantages": torch.ones(N), "old_log_prob": -torch.ones(N)}
TRAINED = {**POLICY, "advantages": torch.ones(N, requires_grad=True)}
WEIGHT = torch.ones(())
# what a loss lacks for a kernel that knows it -> with a word on who it is
LACKS = {
    "reduction='none'": (hl.CrossEntropy(), "none", None),
    "got tensors for ['own']": (hl.Term("own", own, WEIGHT), "mean", None),
    "without a class_weight or token_weight, got ['own']": (
        hl.Term("own", StatisticValue("lse"), token_weight=own),
        "mean",
        None,
    ),
    "(Term.pointwise), got ['own']": (hl.Term("own", own), "mean", None),
    "got aten.cumsum.default": (hl.Term("own", own, pointwise=True), "mean", None),
    "without a gradient, got ['advantages']": (hl.PolicyGradient(), "mean", TRAINED),
}


@pytest.mark.parametrize("word", LACKS)
def test_what_a_loss_lacks_for_one_read_names_who_lacks_it(word, device):
    term, reduction, inputs = LACKS[word]
    head = hl.HeadLoss([term], reduction=reduction, options=hl.Options(backend="triton"))
    logits = torch.randn(N, V, device=device, requires_grad=True)
    labels = torch.zeros(N, dtype=torch.long, device=device)
    inputs = inputs and {
        name: x.to(device).detach().requires_grad_(x.requires_grad) for name, x in inputs.items()
    }
    call, request = head._checked(head._given(logits, labels, None, None), None, None, inputs)
    loss = head._case(call, request).loss
    assert loss.in_one_read is None and word in loss.needs_in_one_read()


@pytest.mark.parametrize(
    "options, linear, said",
    [
        ({"gradient": "forward"}, None, "gradient='forward' needs the triton backend"),
        ({}, hl.Linear("one_sweep"), "mode='one_sweep' is not possible"),
        ({}, hl.Linear(gradients="fp8"), "gradients='fp8' is not possible"),
    ],
    ids=["one read", "one sweep", "fp8"],
)
def test_explain_refuses_what_the_call_refuses(options, linear, said):
    """What is asked for by name, on the CPU and per token, where none of it is possible."""
    head = hl.HeadLoss(reduction="none", options=hl.Options(**options))
    hidden = torch.ones(2, 16, requires_grad=True)
    weight, labels = torch.ones(8, 16, requires_grad=True), torch.tensor([1, 2])
    if linear is None:
        head, given = hl.HeadLoss(options=hl.Options(**options)), (hidden, labels)
        calls = head, head.explain
    else:
        given = (hidden, weight, labels)
        calls = partial(head.linear, linear=linear), partial(head.explain_linear, linear=linear)
    for call in calls:
        with pytest.raises(ValueError, match=said):
            call(*given)
