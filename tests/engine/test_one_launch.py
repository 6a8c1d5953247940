"""Options(gradient="forward"): packets and gradient from one launch have the bits of two."""

import pytest
import torch
from cuda_problem import captured, replays

from tp_headloss import (
    CrossEntropy,
    Distillation,
    Entropy,
    HeadLoss,
    Options,
    Sequences,
    Teacher,
    Term,
    Transform,
    VocabShard,
    ZLoss,
    linear_vocab_statistics,
    log_probs,
    vocab_statistics,
)
from tp_headloss.engine import one_launch_triton
from tp_headloss.engine.launch import Launch
from tp_headloss.head_loss.statistic_value import StatisticValue

IGNORED, N, V = -100, 6, 700
IN_FORWARD, IN_BACKWARD = (Options(backend="triton", gradient=name) for name in ("forward", "backward"))
TERMS = CrossEntropy(), ZLoss(0.01)


def problem(device, dtype=torch.float32, width=V):
    generator = torch.Generator().manual_seed(3)
    logits = (4 * torch.randn(N, width, generator=generator)).to(device, dtype)
    labels = torch.randint(V, (N,), generator=generator).to(device)
    labels[1] = IGNORED
    logits[1] = torch.nan  # nobody reads it
    return logits, labels


def run(options, logits, labels, upstream=1.0, terms=TERMS, metrics=(), **given):
    """-> the output and the gradient of a first backward, and of a second one."""
    head = HeadLoss(list(terms), metrics=metrics, options=options)
    logits = logits.clone().requires_grad_()
    out = head(logits, labels, **given)
    gradients = [torch.autograd.grad(upstream * out.loss, logits, retain_graph=True)[0] for _ in range(2)]
    return out, *gradients


CASES = {
    "mean": {},
    "denominator": {"denominator": 5.0},
    "tensor": {"denominator": torch.tensor(5.0)},
    "weights": {"token_weight": torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0, 0.25])},
    "squares": {"terms": (ZLoss(0.3), Term("own", StatisticValue("log_prob", square=True)))},
    "cross-entropy": {"terms": (CrossEntropy(),)},
    "log-sum-exp": {"terms": (Term("own", StatisticValue("lse"), -0.3),)},
    "metrics": {"metrics": ("accuracy", "entropy")},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_have_the_bits_of_two_launches(case, dtype, device):
    logits, labels = problem(device, dtype)
    given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in CASES[case].items()}
    one, gradient, second = run(IN_FORWARD, logits, labels, **given)
    two, expected, _ = run(IN_BACKWARD, logits, labels, **given)
    assert torch.equal(one.loss, two.loss) and torch.equal(gradient, expected) and torch.equal(second, expected)
    for a, b in zip(one.stats, two.stats):
        assert not isinstance(a, torch.Tensor) or torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_of_many_tiles_are_added_up_in_the_same_order(dtype, device):
    logits, labels = problem(device, dtype, width=20_000)
    labels[2:] = torch.tensor([0, 2600, 9_999, 19_999])  # in a first, a second, a middle and a last tile of a chunk
    logits[[0, 2, 3, 4, 5], labels[[0, 2, 3, 4, 5]]] += 20  # so that log-probs show the last bits of the other ids' sum
    metrics = "accuracy", "entropy"
    one, gradient, _ = run(IN_FORWARD, logits, labels, metrics=metrics)
    two, expected, _ = run(IN_BACKWARD, logits, labels, metrics=metrics)
    for a, b in zip(one.stats, two.stats):
        assert not isinstance(a, torch.Tensor) or torch.equal(a, b)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("case", ["mean", "tensor", "weights", "metrics"])
def test_tokens_of_several_groups_are_merged_once_each(case, device, monkeypatch):
    monkeypatch.setattr(one_launch_triton, "ASSUME", Launch(128, 1))  # tokens that are counted at once
    n_tokens, generator = 150, torch.Generator().manual_seed(1)
    logits = torch.randn(n_tokens, 40, generator=generator).to(device)
    labels = torch.randint(40, (n_tokens,), generator=generator).to(device)
    labels[::7] = IGNORED
    given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in CASES[case].items()}
    if case == "weights":
        given["token_weight"] = torch.rand(n_tokens, generator=generator).to(device)
    one, gradient, second = run(IN_FORWARD, logits, labels, **given)
    two, expected, _ = run(IN_BACKWARD, logits, labels, **given)
    assert torch.equal(one.loss, two.loss) and torch.equal(gradient, expected) and torch.equal(second, expected)
    for a, b in zip(one.stats, two.stats):
        assert not isinstance(a, torch.Tensor) or torch.equal(a, b)


@pytest.mark.parametrize("width", [3, 40, 520, 700, 704])
def test_vocabularies_of_any_size_and_padding(width, device):
    size = min(width, V) if width != 704 else 700
    logits, labels = problem(device, width=width)
    labels = torch.where(labels == IGNORED, IGNORED, labels % size)
    shard = VocabShard(0, width, size)
    one, gradient, _ = run(IN_FORWARD, logits, labels, shard=shard)
    two, expected, _ = run(IN_BACKWARD, logits, labels, shard=shard)
    assert torch.equal(one.loss, two.loss) and torch.equal(gradient, expected)
    assert not gradient[:, size:].any() and not gradient[1].any()


def test_the_expected_upstream_gradient_leaves_no_trace(device):
    logits, labels = problem(device, torch.bfloat16)
    head = HeadLoss([CrossEntropy()], options=IN_FORWARD)
    found = []
    for upstream in (0.3, 0.3, 1.0, 0.3):
        x = logits.clone().requires_grad_()
        (upstream * head(x, labels).loss).backward()
        found.append(x.grad)
        (expected,) = head._definition.plan.expected.values()
        assert float(expected) == torch.tensor(upstream)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[3])
    assert not torch.equal(found[0], found[2])


def test_a_gradient_that_was_handed_over_may_be_written_to(device):
    logits, labels = problem(device)
    x = logits.clone().requires_grad_()
    loss = HeadLoss(options=IN_FORWARD)(x, labels).loss
    (handed,) = torch.autograd.grad(loss, x, retain_graph=True)
    first = handed.clone()
    handed.zero_()
    assert torch.equal(torch.autograd.grad(loss, x)[0], first)
    assert not handed.any()  # nor does a later one write to it


def test_bad_rows_are_nan_alone(device):
    logits, labels = problem(device)
    labels[2], labels[3] = V + 3, -7
    logits[4, 5] = torch.inf
    logits[5, :-1], labels[5] = -torch.inf, V - 1
    for found, expected in zip(run(IN_FORWARD, logits, labels), run(IN_BACKWARD, logits, labels)):
        if isinstance(found, torch.Tensor):
            assert torch.equal(found.isnan(), expected.isnan())
            assert found.isnan().all(1).tolist() == [False, False, True, True, True, False]
            assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_losses_on_statistics_besides_it_take_the_other_path(device):
    logits, labels = problem(device)
    gradients = []
    for options in (IN_FORWARD, IN_BACKWARD):
        x = logits.clone().requires_grad_()
        out = HeadLoss([CrossEntropy()], options=options)(x, labels)
        (out.loss + out.stats.lse.sum()).backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_a_bias_gets_its_gradient(device):
    logits, labels = problem(device)
    gradients = []
    for options in (IN_FORWARD, IN_BACKWARD):
        bias = torch.linspace(-1, 1, V, device=device).requires_grad_()
        run(options, logits, labels)
        HeadLoss(options=options)(logits.requires_grad_(), labels, transform=Transform(bias=bias)).loss.backward()
        gradients.append(bias.grad)
    assert torch.equal(*gradients)


REFUSED = {
    "a temperature": (dict(transform=Transform(temperature=2.0)), "without a scale, softcap or temperature"),
    "temperatures": (dict(transform=Transform(temperature=torch.ones(N))), "without a scale, softcap or temperature"),
    "an entropy": (dict(terms=(CrossEntropy(), Entropy(0.1))), "term of each of .*'lse'.* got .*'entropy'"),
    "a label's logit": (dict(terms=(Term("own", StatisticValue("target_logit")),)), "got terms of .'target_logit'"),
    "one statistic twice": (
        dict(terms=(CrossEntropy(), Term("own", StatisticValue("log_prob", square=True)))),
        "at most one term of each of .* got terms of .'log_prob', 'log_prob'.",
    ),
    "an own function": (dict(terms=(Term("own", lambda stats: stats.lse),)), "terms that are statistics"),
    "a teacher": (dict(terms=(Distillation(),), inputs={"teacher": Teacher(torch.zeros(N, V))}), "got .*'forward_kl'"),
    "sequences": (dict(inputs={"sequences": Sequences.from_mask(torch.ones(N, 1, dtype=torch.bool))}), "statistics"),
    "no reduction": (dict(reduction="none"), "terms that are statistics"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case, device):
    given, message = REFUSED[case]
    given = dict(given)
    logits, labels = (x[:, None] if case == "sequences" else x for x in problem(device))
    if case == "temperatures":
        given["transform"] = Transform(temperature=torch.ones(N, device=device))
    if case == "a teacher":
        given["inputs"] = {"teacher": Teacher(torch.zeros(N, V, device=device))}
    if case == "sequences":
        mask = torch.ones(N, 1, dtype=torch.bool, device=device)
        given["inputs"] = {"sequences": Sequences.from_mask(mask)}
    terms, reduction = given.pop("terms", [CrossEntropy()]), given.pop("reduction", "mean")
    head = HeadLoss(list(terms), reduction=reduction, options=IN_FORWARD)
    with pytest.raises(ValueError, match=message):
        head(logits.requires_grad_(), labels, **given)
    with torch.no_grad():
        head(logits, labels, **given)  # writes no gradient


def test_options_that_exclude_each_other():
    with pytest.raises(ValueError, match="gradient must be one of"):
        Options(gradient="both")
    with pytest.raises(ValueError, match="inplace=True overwrites logits in the backward"):
        Options(inplace=True, gradient="forward")
    with pytest.raises(ValueError, match="the triton backend"):
        HeadLoss(options=Options(backend="torch", gradient="forward"))(
            torch.zeros(2, 8, requires_grad=True), torch.zeros(2, dtype=torch.int64)
        )


def test_statistics_refuse_a_gradient_from_a_forward_that_knows_no_loss():
    x, labels, options = torch.zeros(2, 8), torch.tensor([0, 1]), Options(gradient="forward")
    for function in (vocab_statistics, log_probs):
        with pytest.raises(ValueError, match="gradient='forward' is for a HeadLoss, whose"):
            function(x.clone().requires_grad_(), labels, options=options)
        function(x, labels, options=options)  # as with a HeadLoss, whose forward writes none where none is asked for
    with pytest.raises(ValueError, match="gradient='forward' is for logits and a HeadLoss"):
        linear_vocab_statistics(x, torch.zeros(4, 8), labels, options=options)


@pytest.mark.cuda
@pytest.mark.parametrize("metrics", [(), ("accuracy", "entropy")])
def test_many_tokens_beside_other_work_have_the_bits_of_two_launches(metrics, device):
    """More tokens than are counted at once, on two streams in turn, while noise takes multiprocessors away."""
    logits = torch.randn(9000, 32_000, device=device).mul_(3).bfloat16().requires_grad_()
    labels = torch.randint(32_000, (9000,), device=device)
    labels[::7] = IGNORED
    noise, side, squares = torch.cuda.Stream(), torch.cuda.Stream(), torch.randn(2, 2048, 2048, device=device)

    def step(options):
        out = HeadLoss(list(TERMS), metrics=metrics, options=options)(logits, labels)
        return [out.loss, out.stats.log_prob, torch.autograd.grad(out.loss, logits)[0], *out.metrics.values()]

    expected = step(IN_BACKWARD)
    for i in range(50):
        with torch.cuda.stream(noise):
            torch.mm(squares[0], squares[1])
        stream = side if i % 2 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = step(IN_FORWARD)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.cuda
def test_one_launch_replays_from_a_graph(device):
    logits, labels = problem(device, torch.bfloat16)
    logits.requires_grad_()
    head = HeadLoss(list(TERMS), options=IN_FORWARD)

    def step():
        out = head(logits, labels)
        return out.loss, torch.autograd.grad(out.loss, logits)[0]

    graph, outputs = captured(step)
    for seed in range(20):
        generator = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            logits.copy_(torch.randn(logits.shape, device=device, generator=generator))
        assert replays(graph, outputs, step)[1]
