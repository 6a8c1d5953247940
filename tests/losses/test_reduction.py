"""The reduction over tokens: its kernel against plain torch, weights, denominators, what may change
before backward."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from loss_problem import V, rows

import tp_headloss as hl
from tp_headloss.engine import sums_triton
from tp_headloss.engine import triton as triton_backend
from tp_headloss.engine.launch import Launch
from tp_headloss.head_loss import StatisticValue


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "kind", ["plain", "sum", "weights", "number", "tensor", "zero", "all ignored", "transposed"]
)
@pytest.mark.parametrize("terms", ["functions", "statistic values"])
def test_the_reduction_kernel_equals_plain_torch(terms, kind, device, monkeypatch):
    """Terms and metrics of every sort, their gradients included; a NaN at an ignored token stays
    out."""
    x, labels, _, token_weight = (t.to(device) for t in rows())
    # 1 / 0 where ignored
    own = hl.Term("own", lambda stats: (stats.log_prob.exp() + 2.0) / stats.valid, weight=-0.3)
    terms = {
        "functions": [
            hl.CrossEntropy(0.9, label_smoothing=0.1),
            hl.ZLoss(1e-2),
            hl.Entropy(0.05),
            own,
        ],
        "statistic values": [hl.CrossEntropy(0.9), hl.ZLoss(1e-2), hl.Entropy(0.05)],
    }[terms]
    head = hl.HeadLoss(
        terms,
        metrics=("accuracy", "entropy", "log_prob", "lse"),
        reduction="sum" if kind == "sum" else "mean",
        options=hl.Options(backend="triton"),
    )
    call = {
        "weights": {"token_weight": token_weight - 0.5},
        "number": {"denominator": 37},
        "tensor": {"denominator": torch.tensor(37.0, device=device)},
        "zero": {"denominator": 0.0},
    }.get(kind, {})
    if kind == "all ignored":
        labels = torch.full_like(labels, -100)
    if kind == "transposed":  # [sequence, batch] logits in memory, [batch, sequence] to the caller
        x, labels = x.view(4, 3, V).transpose(0, 1), labels.view(4, 3).transpose(0, 1)
    outputs = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(
                "tp_headloss.head_loss.reduction.fused_reduction", lambda *_: "all of it"
            )
        logits = x.clone().requires_grad_()
        out = head(logits, labels, **call)
        # and upstream of their own
        (3 * out.loss + (out.stats.log_prob + 0.1 * out.stats.entropy).sum()).backward()
        outputs.append(
            [out.loss, out.count, *out.terms.values(), *out.metrics.values(), logits.grad]
        )
    one_kernel = "TokenSumsBackward" if own in head.terms else "StatisticsBackward"
    assert [one_kernel in str(out[0].grad_fn) for out in outputs] == [True, False]
    for a, b in zip(*outputs):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6)
        assert a.isfinite().all()


def test_a_statistic_value_says_what_it_needs(options, device):
    x, labels, *_ = (t.to(device) for t in rows())
    x.requires_grad_()
    squares = hl.Term("squares", StatisticValue("total", square=True), 0.1)
    hits = hl.Term("hits", StatisticValue("hits"))  # has no gradient
    terms = [hl.Term("confidence", StatisticValue("entropy")), squares, hits]
    out = hl.HeadLoss(terms, options=options)(x, labels)
    out.loss.backward()
    z = x.detach().double().requires_grad_()
    log_p, valid = z.log_softmax(-1), labels >= 0
    per_token = -(log_p.exp() * log_p).sum(-1) + 0.1 * z.sum(-1) ** 2 + (z.argmax(-1) == labels)
    expected = per_token[valid].mean()
    expected.backward()
    torch.testing.assert_close(out.loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), z.grad, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="StatisticValue must be of"):
        hl.HeadLoss([hl.Term("wrong", StatisticValue("labels"))])


@pytest.mark.parametrize("own", [True, False])
def test_weights_that_changed_before_backward_are_noticed(own, device):
    x, labels, _, weight = (t.to(device) for t in rows())
    terms = (
        [hl.CrossEntropy(), hl.Term("own", lambda stats: stats.lse.exp())]
        if own
        else [hl.CrossEntropy()]
    )
    out = hl.HeadLoss(terms, options=hl.Options(backend="triton"))(
        x.requires_grad_(), labels, token_weight=weight
    )
    weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


def test_sums_may_be_written_before_backward_and_terms_changed(options, device):
    x, labels, *_ = (t.to(device) for t in rows())
    head = hl.HeadLoss([hl.CrossEntropy(), hl.ZLoss(1.0)], metrics=("accuracy",), options=options)
    small = head(x.requires_grad_(), labels).loss.item()
    head.terms = (hl.CrossEntropy(), hl.ZLoss(10.0))
    out = head(x, labels)
    out.metrics["accuracy"].div_(out.count)
    out.loss.backward()
    assert out.loss.item() > 5 * small


@pytest.mark.parametrize("name, argument", [("weight", "class_weight"), ("label_smoothing",) * 2])
def test_an_attribute_of_torchs_loss_is_not_assigned_in_vain(name, argument):
    head = hl.HeadLoss()
    given = {"weight": torch.ones(V), "label_smoothing": 0.5}[name]
    with pytest.raises(AttributeError, match=rf"head_loss.terms = \[CrossEntropy\({argument}=..\)"):
        setattr(head, name, given)
    assert not hasattr(head, name) and name not in head.state_dict()
    head.terms = [hl.CrossEntropy(**{argument: given})]


def test_arguments_that_are_replaced_are_checked_and_used_whole(options, device):
    x, labels, *_ = (t.to(device) for t in rows())
    weights = torch.rand(V, device=device)
    new = [hl.CrossEntropy(label_smoothing=0.2, class_weight=weights)]
    expected = hl.HeadLoss(new, metrics=("entropy",), options=options)(x, labels)
    head = hl.HeadLoss([hl.CrossEntropy(label_smoothing=0.2)], options=options)
    head(x, labels)
    head.terms, head.metrics = new, ["entropy"]
    out = head(x, labels)
    assert torch.equal(out.loss, expected.loss) and torch.equal(
        out.metrics["entropy"], expected.metrics["entropy"]
    )
    new.append(hl.ZLoss(1.0))  # a list of the caller's, which the head does not share
    assert torch.equal(head(x, labels).loss, expected.loss)
    head.metrics = (*head.metrics, hl.Metric(lambda stats: {"largest": stats.lse}))
    assert set(head(x, labels).metrics) == {"entropy", "largest"}
    wrong = {
        "reduction": "sums",
        "terms": (hl.CrossEntropy(), hl.CrossEntropy()),
        "metrics": "unknown",
    }
    for name, bad in wrong.items():
        with pytest.raises((TypeError, ValueError), match=name):
            setattr(head, name, bad)
    head = hl.HeadLoss(new[:1])
    assert torch.equal(pickle.loads(pickle.dumps(head))(x, labels).loss, head(x, labels).loss)


def test_an_ignored_row_has_no_gradient_whatever_bias_and_temperature_hold(options, device):
    x, labels, *_ = (t.to(device) for t in rows())
    bias = torch.zeros(V, device=device)
    bias[3] = 100.0
    temperature = torch.where(labels < 0, 0.0, 1.0)
    x.requires_grad_(), bias.requires_grad_()
    transform = hl.Transform(bias=bias, temperature=temperature)
    hl.HeadLoss(options=options)(x, labels, transform=transform).loss.backward()
    assert (
        (x.grad[labels < 0] == 0).all() and x.grad.isfinite().all() and bias.grad.isfinite().all()
    )


def test_weights_that_overflow_fp32_together_give_the_mean(options, device):
    x, labels, *_ = (t.to(device) for t in rows())
    head, results = hl.HeadLoss([hl.CrossEntropy(), hl.ZLoss(0.1)], options=options), []
    for weight in (1.0, 2.0**126):  # whose sum is beyond fp32
        local = x.clone().requires_grad_()
        loss = head(
            local, labels, token_weight=torch.full(labels.shape, weight, device=device)
        ).loss
        loss.backward()
        results.append((loss.detach(), local.grad))
    for small, large in zip(*results):
        torch.testing.assert_close(small, large, rtol=1e-6, atol=1e-9)
    with pytest.raises(
        ValueError, match="denominator must be at least 0 and a number that fp32 holds"
    ):
        head(x, labels, denominator=1e39)


@pytest.mark.parametrize("mode", ["recompute", "one_sweep"])
def test_large_weights_give_the_mean_from_hidden_states_too(mode, options, device):
    torch.manual_seed(0)
    weight, labels = (
        torch.randn(V, 4, device=device, requires_grad=True),
        torch.randint(0, V, (12,), device=device),
    )
    hidden, results = torch.randn(12, 4, device=device), []
    for scale in (1.0, 2.0**126):
        token_weight = torch.full((12,), scale, device=device)
        head = hl.HeadLoss(options=options)
        loss = head.linear(
            hidden, weight, labels, token_weight=token_weight, linear=hl.Linear(mode)
        ).loss
        results.append((loss.detach(), torch.autograd.grad(loss, weight)[0]))
    for small, large in zip(*results):
        torch.testing.assert_close(small, large, rtol=1e-5, atol=1e-7)


def test_a_trained_weight_has_a_gradient_where_it_is_0(device):
    x, labels = torch.randn(3, V, device=device), torch.tensor([1, 2, 3], device=device)
    weight = torch.tensor([1.0, 0.0, 2.0], device=device, requires_grad=True)
    hl.HeadLoss(reduction="sum")(x, labels, token_weight=weight).loss.backward()
    torch.testing.assert_close(weight.grad, F.cross_entropy(x, labels, reduction="none"))


@pytest.mark.parametrize("objective", ["gspo", "gmpo", "vespo", "gspo-length-weighted"])
def test_a_weight_of_0_leaves_its_token_in_the_ratio_of_its_sequence(objective, backend, device):
    """The sequences' mask says what a sequence is; the weight masks the loss alone."""
    x, labels = torch.randn(2, 4, V, device=device), torch.randint(0, V, (2, 4), device=device)
    given = {"advantages": torch.tensor([[1.0], [-1.0]], device=device)}
    given["old_log_prob"] = torch.full((2, 4), -4.0, device=device)
    given["sequences"] = hl.Sequences.from_mask(labels >= 0)
    weight = torch.ones(2, 4, device=device)
    weight[0, 1] = 0.0
    options = {"reduction": "none", "options": hl.Options(backend=backend)}
    head, x = hl.HeadLoss([hl.PolicyGradient(objective)], **options), x.requires_grad_()
    whole, masked = (
        head(x, labels, inputs=given).loss,
        head(x, labels, token_weight=weight, inputs=given).loss,
    )
    torch.testing.assert_close(masked, whole * weight)
    mean = hl.HeadLoss(
        [hl.PolicyGradient(objective)], reduction="seq-mean-token-mean", options=options["options"]
    )
    loss = mean(x, labels, token_weight=weight, inputs=given).loss
    torch.testing.assert_close(loss, (whole * weight).sum() / 8)


@pytest.mark.interpreted
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "names",
    [
        ("log_prob",), ("lse", "log_prob", "entropy", "collision", "total"),
        ("forward_kl", "reverse_kl", "jsd", "total_variation"),
        ("topk_forward_kl", "topk_reverse_kl", "topk_jsd", "topk_log_mass", "vocab_jsd"),
        ("tail_log_mass", "tail_entropy"), ("set_log_prob", "set_entropy", "set_log_mass"),
    ],
    ids=lambda names: names[0],
)  # fmt: skip
def test_a_loss_of_statistics_has_the_bits_of_their_own_gradients(names, weighted, device):
    """Its coefficients go to the gradient's kernel as numbers, or as the rows that the reduction's
    backward writes."""
    x, labels, _, token_weight = (t.to(device) for t in rows())
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, V, (len(labels), 4), generator=generator).to(device)
    log_probs = torch.randn(ids.shape, generator=generator).log_softmax(-1).to(device) - 0.5
    inputs: dict = {}
    if names[0].startswith("set"):
        inputs["sets"] = hl.IdSets(torch.cat([ids, labels.clamp(min=0).unsqueeze(-1)], -1))
    elif names[0].startswith("t"):
        inputs["teacher"] = hl.TopKTeacher(ids, log_probs, renormalize=False)
    elif names[0].startswith("forward"):
        inputs["teacher"] = hl.Teacher(torch.randn(x.shape, generator=generator).to(device))
    terms = [
        hl.Term(
            name,
            StatisticValue(name, square=i == 1, negative=i % 2 == 0),
            0.3 + i,
            inputs=tuple(inputs),
        )
        for i, name in enumerate(names)
    ]
    head, found = hl.HeadLoss(terms, options=hl.Options(backend="triton")), []
    for _ in range(2):
        logits = x.clone().requires_grad_()
        loss = head(
            logits, labels, token_weight=token_weight if weighted else None, inputs=inputs
        ).loss
        (1.7 * loss).backward()
        found.append((loss, logits.grad))
        plan = head._definition.plan
        assert (plan.sums[0].gradients is None) == (len(found) == 2)
        by_rows = tuple(sums._replace(gradients=None) for sums in plan.sums)
        head._definition = head._definition._replace(plan=plan._replace(sums=by_rows))
    assert found[0][1].any()
    for a, b in zip(*found):
        assert torch.equal(a, b)


def test_sums_of_more_tokens_than_a_tile_are_those_of_all(device, monkeypatch):
    """Values that programs of 4 tokens merge, and tiles of 4 tokens add up."""
    monkeypatch.setattr(triton_backend, "MERGE", Launch(4, 2))
    monkeypatch.setattr(sums_triton, "SUMS", Launch(4, 1))
    generator = torch.Generator().manual_seed(4)
    logits, labels = (
        torch.randn(50, 60, generator=generator),
        torch.randint(60, (50,), generator=generator),
    )
    labels[::7] = -100
    logits, labels = logits.to(device), labels.to(device)
    terms, metrics = [hl.CrossEntropy(), hl.ZLoss(0.3)], ("accuracy", "entropy")
    heads = [
        hl.HeadLoss(terms, metrics=metrics, options=hl.Options(backend=name))
        for name in ("triton", "torch")
    ]
    out, expected = (
        head(logits, labels, token_weight=torch.linspace(0, 2, 50, device=device)) for head in heads
    )
    torch.testing.assert_close(out.loss, expected.loss)
    torch.testing.assert_close(out.count, expected.count)
    torch.testing.assert_close(out.terms, expected.terms)
    torch.testing.assert_close(out.metrics, expected.metrics)


def test_a_statistic_of_the_second_exchange_is_summed_after_it(device, monkeypatch):
    """Tokens of two programs, some ignored, with weights; a value of each exchange."""
    monkeypatch.setattr(triton_backend, "MERGE", Launch(8, 2))
    generator = torch.Generator().manual_seed(5)
    logits, teacher = torch.randn(2, 10, 60, generator=generator).to(device)
    labels = torch.arange(10, device=device)
    labels[::7] = -100
    terms = [hl.Term("jsd", StatisticValue("jsd"), want=("jsd",)), hl.CrossEntropy(0.5)]
    weight = torch.linspace(0, 2, 10, device=device)
    for given in ({}, {"token_weight": weight}):
        heads = [
            hl.HeadLoss(terms, options=hl.Options(backend=name)) for name in ("triton", "torch")
        ]
        out, expected = (
            head(logits, labels, inputs={"teacher": hl.Teacher(teacher)}, **given) for head in heads
        )
        torch.testing.assert_close(out.loss, expected.loss)
        torch.testing.assert_close(out.terms, expected.terms)
        torch.testing.assert_close(out.count, expected.count)
        assert out.terms["jsd"] > 1
