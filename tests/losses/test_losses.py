"""Losses, reductions and HeadLoss against torch in float64, unsharded and sharded."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks

from tp_headloss import (
    CausalLMLoss,
    CrossEntropy,
    Distillation,
    Entropy,
    GeneratorMetrics,
    HeadLoss,
    KLToReference,
    Linear,
    Metric,
    Options,
    PolicyGradient,
    PolicyMetrics,
    Sequences,
    Teacher,
    Term,
    TopKDistillation,
    TopKTeacher,
    Transform,
    VocabShard,
    ZLoss,
    vocab_statistics,
)
from tp_headloss.reduce import Monomial

V, N = 100, 12  # 100 of 128 padded columns


def rows(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(N, V, generator=generator) * 2).to(dtype)
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[[2, 7]] = -100
    return x, labels, torch.rand(V, generator=generator) + 0.1, torch.rand(N, generator=generator)


def megatron_smoothed(x, labels, smoothing):
    """Mass 1 - s on the label, s / (V - 1) on every other id: from the definition, not from our formula."""
    q = torch.full_like(x, smoothing / (x.shape[1] - 1)).scatter(1, labels.clamp(min=0)[:, None], 1 - smoothing)
    return torch.where(labels >= 0, -(q * x.log_softmax(-1)).sum(-1), 0.0)


def head_run(group, device, kind, backend):
    x, labels, class_weight, token_weight = rows()
    shard = VocabShard.from_group(group, V, 128)
    local = F.pad(x, (0, 28), value=50.0)[:, shard.start : shard.stop].clone().to(device).requires_grad_()
    labels, options = labels.to(device), Options(backend=backend)
    class_weight, token_weight = class_weight.to(device), token_weight.to(device)
    terms, kwargs, call = [CrossEntropy()], {}, {}
    if kind.startswith("smoothing"):
        terms = [CrossEntropy(label_smoothing=0.1, smoothing_formula=kind.split()[1])]
    elif kind == "class weights":
        terms = [CrossEntropy(class_weight=class_weight)]
    elif kind == "class weights and smoothing":
        terms = [CrossEntropy(class_weight=class_weight, label_smoothing=0.2)]
    elif kind == "token weights":
        call = {"token_weight": token_weight}
    elif kind in ("sum", "none"):
        kwargs = {"reduction": kind}
    elif kind == "denominator":
        call = {"denominator": torch.tensor(37.0, device=device)}
    elif kind == "number":
        call = {"denominator": 37}
    elif kind == "everything":
        own = Term("tsallis", lambda stats: 1 - (2 * stats.log_prob).exp(), weight=0.3)
        terms = [CrossEntropy(0.9, label_smoothing=0.1), ZLoss(1e-2), Entropy(0.05), own]
        kwargs = {"metrics": ("accuracy", "entropy", "log_prob", "lse")}
    out = HeadLoss(terms, options=options, **kwargs)(local, labels, shard=shard, **call)
    upstream = torch.linspace(0.5, 1.5, N, device=device) if kind == "none" else torch.tensor(0.37, device=device)
    out.loss.backward(upstream)
    facts = {**{f"term {k}": v for k, v in out.terms.items()}, **out.metrics}
    return out.loss.detach(), out.count, local.grad, {k: v.detach() for k, v in facts.items()}


def reference(kind):
    x, labels, class_weight, token_weight = rows(torch.float64)
    class_weight, token_weight = class_weight.double(), token_weight.double()
    x.requires_grad_()
    valid = labels >= 0
    nll = F.cross_entropy(x, labels, reduction="none")
    count, facts = valid.sum(), {"term cross_entropy": nll.sum()}
    if kind == "smoothing torch":
        loss = F.cross_entropy(x, labels, label_smoothing=0.1)
    elif kind == "smoothing megatron":
        loss = megatron_smoothed(x, labels, 0.1).sum() / count
    elif kind == "class weights":
        loss = F.cross_entropy(x, labels, weight=class_weight)
    elif kind == "class weights and smoothing":
        loss = F.cross_entropy(x, labels, weight=class_weight, label_smoothing=0.2)
    elif kind == "token weights":
        count = token_weight[valid].sum()
        loss = (token_weight * nll).sum() / count
    elif kind in ("sum", "none"):
        loss = nll.sum() if kind == "sum" else nll
    elif kind in ("denominator", "number"):
        loss = nll.sum() / 37
    elif kind == "everything":
        log_p = x.log_softmax(-1)
        lse, entropy = x.logsumexp(-1), -(log_p.exp() * log_p).sum(-1)
        smooth = F.cross_entropy(x, labels, label_smoothing=0.1, reduction="none")
        own = 1 - (-2 * nll).exp()
        per_token = {"cross_entropy": smooth, "z_loss": lse**2, "entropy": -entropy, "tsallis": own}
        weights = (0.9, 1e-2, 0.05, 0.3)
        loss = sum(w * v[valid].sum() for w, v in zip(weights, per_token.values())) / count
        facts = {f"term {k}": v[valid].sum() for k, v in per_token.items()}
        facts |= {"accuracy": (x.argmax(-1) == labels)[valid].sum(), "entropy": entropy[valid].sum(),
                  "log_prob": -nll.sum(), "lse": lse[valid].sum()}  # fmt: skip
    else:
        loss = nll.sum() / count
    upstream = torch.linspace(0.5, 1.5, N).double() if kind == "none" else torch.tensor(0.37, dtype=torch.float64)
    (grad,) = torch.autograd.grad(loss, x, upstream)
    if kind.startswith(("smoothing", "class", "token")):
        facts = {}
    return loss.detach(), count, grad, {k: v.detach() for k, v in facts.items()}


KINDS = ["mean", "sum", "none", "denominator", "number", "smoothing torch", "smoothing megatron", "class weights",
         "class weights and smoothing", "token weights", "everything"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_losses_and_reductions_equal_torch_at_every_group_size(world_size, kind, backend):
    results = on_ranks(world_size, head_run, kind, backend)
    loss, count, grad, facts = reference(kind)
    for ours, our_count, _, our_facts in results:
        assert torch.equal(ours, results[0][0])
        torch.testing.assert_close(ours.double(), loss, rtol=2e-6, atol=1e-7)
        torch.testing.assert_close(our_count.double(), count.double(), rtol=1e-6, atol=0)
        for name, value in facts.items():
            torch.testing.assert_close(our_facts[name].double(), value.double(), rtol=3e-6, atol=1e-5)
    got = torch.cat([r[2] for r in results], 1)
    torch.testing.assert_close(got[:, :V].double(), grad, rtol=3e-5, atol=1e-8)
    assert grad.abs().max() > 1e-3 and not got[:, V:].any()


def test_the_two_smoothing_formulas_are_one_identity():
    """megatron(a) = torch(a V / (V - 1)), and the two differ."""
    x, labels, *_ = rows()
    a = HeadLoss([CrossEntropy(label_smoothing=0.1, smoothing_formula="megatron")])(x, labels).loss
    b = HeadLoss([CrossEntropy(label_smoothing=0.1 * V / (V - 1))])(x, labels).loss
    c = HeadLoss([CrossEntropy(label_smoothing=0.1)])(x, labels).loss
    torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    assert (a - c).abs() > 1e-5  # 1.6e-5 here


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_zero_valid_tokens_give_zero_and_zero_gradient(reduction, backend, device):
    x = rows()[0].to(device).requires_grad_()
    head = HeadLoss([CrossEntropy(), ZLoss(1e-4), Entropy(0.1)], reduction=reduction, options=Options(backend=backend))
    out = head(x, torch.full((N,), -100, device=device))
    out.loss.sum().backward()
    assert out.count == 0 and not out.loss.any() and not x.grad.any() and x.grad.isfinite().all()


@pytest.mark.parametrize("denominator", [0, 0.0, torch.tensor(0.0)])
def test_a_zero_denominator_gives_zero(denominator):
    x, labels, *_ = rows()
    x.requires_grad_()
    loss = HeadLoss()(x, labels, denominator=denominator).loss
    loss.backward()
    assert loss == 0 and not x.grad.any()


def test_one_valid_token_among_many_keeps_its_gradient():
    x = torch.randn(512, V, requires_grad=True)
    labels = torch.full((512,), -100)
    labels[377] = 5
    HeadLoss()(x, labels).loss.backward()
    expected = x.detach()[377].softmax(-1)
    expected[5] -= 1
    torch.testing.assert_close(x.grad[377], expected)
    assert x.grad.abs().sum(-1).nonzero().flatten().tolist() == [377]


def test_micro_batches_with_a_global_denominator_add_up_to_the_whole():
    """Gradient accumulation over micro-batches of unequal token counts is the gradient of the whole batch."""
    x, labels, *_ = rows()
    labels[:5] = -100
    head, whole, parts = HeadLoss([CrossEntropy(), ZLoss(1e-2)]), x.clone().requires_grad_(), x.clone().requires_grad_()
    head(whole, labels).loss.backward()
    count = (labels != -100).sum()
    for part, y in zip(parts.split(6), labels.split(6)):
        head(part, y, denominator=count).loss.backward()
    torch.testing.assert_close(parts.grad, whole.grad)


def test_token_weights_of_zero_and_one_are_a_mask():
    x, labels, *_ = rows()
    mask = torch.arange(N) % 3 != 0
    a = HeadLoss([CrossEntropy(), ZLoss(0.1)])(x, labels, token_weight=mask.float())
    b = HeadLoss([CrossEntropy(), ZLoss(0.1)])(x, torch.where(mask, labels, -100))
    assert a.count == b.count
    torch.testing.assert_close(a.loss, b.loss)


def test_a_poisoned_ignored_token_leaks_nowhere():
    x, labels, *_ = rows()
    x[2] = float("nan")
    x.requires_grad_()
    out = HeadLoss([CrossEntropy(label_smoothing=0.1), ZLoss(1e-2), Entropy(0.1)], metrics=("entropy", "accuracy"))(
        x, labels
    )
    out.loss.backward()
    assert out.loss.isfinite() and x.grad.isfinite().all() and out.metrics["entropy"].isfinite()


def test_causal_lm_loss_shifts_the_labels_itself():
    x = torch.randn(3, 8, V, requires_grad=True)
    labels = torch.randint(0, V, (3, 8))
    labels[1, :4] = -100
    out = CausalLMLoss(HeadLoss([CrossEntropy()], metrics=("accuracy",)))(x, labels)
    expected = F.cross_entropy(x[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))
    torch.testing.assert_close(out.loss, expected)
    assert out.count == (labels[:, 1:] != -100).sum()
    (grad,) = torch.autograd.grad(out.loss, x)
    assert not grad[:, -1].any()
    weight = torch.rand(3, 8)  # of the labels, shifted with them
    out = CausalLMLoss()(x, labels, token_weight=weight)
    per_label = F.cross_entropy(x[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    counted = weight[:, 1:] * (labels[:, 1:] != -100)
    torch.testing.assert_close(out.loss, (per_label * counted).sum() / counted.sum())
    torch.testing.assert_close(grad, torch.autograd.grad(expected, x)[0])


def test_a_users_own_function_of_the_statistics_needs_no_kernel(backend, device):
    """Focal loss and a squared-entropy penalty, with gradients through log_prob, entropy and lse at once."""
    x, labels, *_ = (t.to(device) for t in rows())
    labels = labels.clamp(min=0)

    def own(log_prob, entropy, lse):
        return (-((1 - log_prob.exp()) ** 2) * log_prob + 0.1 * entropy**2 + 0.01 * lse.abs()).mean()

    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    stats = vocab_statistics(a, labels, want=("entropy",), options=Options(backend=backend))
    own(stats.log_prob, stats.entropy, stats.lse).backward()
    log_p = b.log_softmax(-1)
    own(log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), b.logsumexp(-1)).backward()
    torch.testing.assert_close(a.grad.double(), b.grad, rtol=3e-5, atol=1e-7)


def test_head_loss_refuses_what_it_cannot_mean():
    x, labels, class_weight, _ = rows()
    smoothed = CrossEntropy(class_weight=class_weight, label_smoothing=0.1)
    other = Term("other", lambda stats: stats.total, want=("total",))
    for build, words in (
        (lambda: HeadLoss([]), "at least one"),
        (lambda: HeadLoss([ZLoss(1.0), ZLoss(2.0)]), "distinct names"),
        (lambda: HeadLoss(metrics=("perplexity",)), "perplexity"),
        (lambda: HeadLoss(reduction="avg"), "avg"),
        (lambda: HeadLoss([smoothed, other]), "only one term"),
        (lambda: CrossEntropy(smoothing_formula="nemo"), "nemo"),
        (lambda: CrossEntropy(label_smoothing=1.5), "1.5"),
        (lambda: HeadLoss()(x, None), "labels are needed"),
        (lambda: HeadLoss([Term("hits", lambda stats: stats.correct.float())])(x, labels), "correct"),
        (lambda: HeadLoss()(x, labels, token_weight=torch.ones(3)), "token_weight"),
        (lambda: HeadLoss(reduction="sum")(x, labels, denominator=3), "denominator"),
        (lambda: HeadLoss([CrossEntropy(class_weight=torch.ones(3), label_smoothing=0.1)])(x, labels), "class_weight"),
        (lambda: HeadLoss([CrossEntropy(class_weight=torch.ones(3))])(x, labels), "class_weight"),
    ):
        with pytest.raises(ValueError, match=words):
            build()


@pytest.mark.parametrize("kind", ["plain", "sum", "weights", "number", "tensor", "zero", "all ignored", "transposed"])
@pytest.mark.parametrize("terms", ["functions", "monomials"])
def test_the_reduction_kernel_equals_plain_torch(terms, kind, device, monkeypatch):
    """Terms and metrics of every sort, their gradients included; a NaN at an ignored token stays out."""
    x, labels, _, token_weight = (t.to(device) for t in rows())
    own = Term("own", lambda stats: (stats.log_prob.exp() + 2.0) / stats.valid, weight=-0.3)  # 1 / 0 where ignored
    terms = {
        "functions": [CrossEntropy(0.9, label_smoothing=0.1), ZLoss(1e-2), Entropy(0.05), own],
        "monomials": [CrossEntropy(0.9), ZLoss(1e-2), Entropy(0.05)],
    }[terms]
    head = HeadLoss(
        terms,
        metrics=("accuracy", "entropy", "log_prob", "lse"),
        reduction="sum" if kind == "sum" else "mean",
        options=Options(backend="triton"),
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
            monkeypatch.setattr(HeadLoss, "_reduction", lambda *_: None)
        logits = x.clone().requires_grad_()
        out = head(logits, labels, **call)
        (3 * out.loss + (out.stats.log_prob + 0.1 * out.stats.entropy).sum()).backward()  # and upstream of their own
        outputs.append([out.loss, out.count, *out.terms.values(), *out.metrics.values(), logits.grad])
    one_kernel = "TokenSumsBackward" if own in head.terms else "StatisticsBackward"
    assert [one_kernel in str(out[0].grad_fn) for out in outputs] == [True, False]
    for a, b in zip(*outputs):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6)
        assert a.isfinite().all()


def test_a_monomial_says_what_it_needs(backend, device):
    x, labels, *_ = (t.to(device) for t in rows())
    x.requires_grad_()
    options = Options(backend=backend)
    terms = [Term("confidence", Monomial("entropy")), Term("squares", Monomial("total", square=True), 0.1)]
    out = HeadLoss([*terms, Term("hits", Monomial("hits"))], options=options)(x, labels)  # one has no gradient
    out.loss.backward()
    z = x.detach().double().requires_grad_()
    log_p, valid = z.log_softmax(-1), labels >= 0
    per_token = -(log_p.exp() * log_p).sum(-1) + 0.1 * z.sum(-1) ** 2 + (z.argmax(-1) == labels)
    expected = per_token[valid].mean()
    expected.backward()
    torch.testing.assert_close(out.loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), z.grad, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="Monomial must be of"):
        HeadLoss([Term("wrong", Monomial("labels"))])


@pytest.mark.parametrize("own", [True, False])
def test_weights_that_changed_before_backward_are_noticed(own, device):
    x, labels, _, weight = (t.to(device) for t in rows())
    terms = [CrossEntropy(), Term("own", lambda stats: stats.lse.exp())] if own else [CrossEntropy()]
    out = HeadLoss(terms, options=Options(backend="triton"))(x.requires_grad_(), labels, token_weight=weight)
    weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


def test_sums_may_be_written_before_backward_and_terms_changed(backend, device):
    x, labels, *_ = (t.to(device) for t in rows())
    head = HeadLoss([CrossEntropy(), ZLoss(1.0)], metrics=("accuracy",), options=Options(backend=backend))
    small = head(x.requires_grad_(), labels).loss.item()
    head.terms = (CrossEntropy(), ZLoss(10.0))
    out = head(x, labels)
    out.metrics["accuracy"].div_(out.count)
    out.loss.backward()
    assert out.loss.item() > 5 * small


def test_an_ignored_row_has_no_gradient_whatever_bias_and_temperature_hold(backend, device):
    x, labels, *_ = (t.to(device) for t in rows())
    bias = torch.zeros(V, device=device)
    bias[3] = 100.0
    temperature = torch.where(labels < 0, 0.0, 1.0)
    x.requires_grad_(), bias.requires_grad_()
    transform = Transform(bias=bias, temperature=temperature)
    HeadLoss(options=Options(backend=backend))(x, labels, transform=transform).loss.backward()
    assert (x.grad[labels < 0] == 0).all() and x.grad.isfinite().all() and bias.grad.isfinite().all()


SHAPES = {"a mean": lambda s: -s.log_prob.mean(), "a row too many": lambda s: s.lse.expand(2, *s.lse.shape)}


@pytest.mark.parametrize("name", SHAPES)
def test_a_term_that_is_not_per_token_is_refused(name, backend, device):
    x, labels, *_ = (t.to(device) for t in rows())
    term = Term("mine", SHAPES[name], tokenwise=True)
    options, words = Options(backend=backend), r"term 'mine' must return a value per token"
    for reduction in ("mean", "sum", "none"):
        with pytest.raises(ValueError, match=words):
            HeadLoss([term], reduction=reduction, options=options)(x, labels)
    with pytest.raises(ValueError, match=words):
        hidden, weight = torch.randn(*labels.shape, 4, device=device), torch.randn(V, 4, device=device)
        HeadLoss([term], options=options).linear(hidden, weight.requires_grad_(), labels, linear=Linear("one_sweep"))
    with pytest.raises(TypeError, match="got float"):
        HeadLoss([Term("mine", lambda s: 1.0)], options=options)(x, labels)
    with pytest.raises(ValueError, match="metric 'mine' must return a value per token"):
        HeadLoss(metrics=[Metric(lambda s: {"mine": s.lse.sum()})], options=options)(x, labels)
    with pytest.raises(ValueError, match="token_weight of term 'mine'"):
        weighted = Term("mine", lambda s: s.lse, token_weight=lambda s: s.lse.sum())
        HeadLoss([weighted], options=options)(x, labels)


def test_a_statistic_that_nobody_wants_is_named_where_a_term_uses_it():
    x, labels, *_ = rows()
    with pytest.raises(ValueError, match=r"term 'mine' uses the statistics \['entropy'\].* want=\('entropy',\)"):
        HeadLoss([Term("mine", lambda s: -s.log_prob - 0.1 * s.entropy)])(x, labels)
    for weight in (float("nan"), 1e39):
        with pytest.raises(ValueError, match="term 'mine': weight must be finite in fp32"):
            Term("mine", lambda s: s.lse, weight)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_token_of_weight_0_is_excluded_whatever_its_logits_are(poison, reduction, backend, device):
    x, labels, *_ = (t.to(device) for t in rows())
    flat = x.view(-1, V).clone()
    at = int((labels.flatten() >= 0).nonzero()[1])
    weight = torch.ones(labels.numel(), device=device)
    weight[at] = 0.0
    terms, options = [CrossEntropy(), ZLoss(0.1)], Options(backend=backend)
    head, results = HeadLoss(terms, metrics=("entropy",), reduction=reduction, options=options), []
    for value in (0.5, poison):
        flat[at, 3] = value
        local = flat.clone().requires_grad_()
        out = head(local, labels.flatten(), token_weight=weight)
        out.loss.sum().backward()
        results.append((out.loss.detach(), out.count, out.metrics["entropy"], *out.terms.values(), local.grad))
        assert (local.grad[at] == 0).all()
    for clean, poisoned in zip(*results):
        assert torch.equal(clean, poisoned)


def test_weights_that_overflow_fp32_together_give_the_mean(backend, device):
    x, labels, *_ = (t.to(device) for t in rows())
    head, results = HeadLoss([CrossEntropy(), ZLoss(0.1)], options=Options(backend=backend)), []
    for weight in (1.0, 2.0**126):  # whose sum is beyond fp32
        local = x.clone().requires_grad_()
        loss = head(local, labels, token_weight=torch.full(labels.shape, weight, device=device)).loss
        loss.backward()
        results.append((loss.detach(), local.grad))
    for small, large in zip(*results):
        torch.testing.assert_close(small, large, rtol=1e-6, atol=1e-9)
    with pytest.raises(ValueError, match="denominator must be a number that fp32 holds"):
        head(x, labels, denominator=1e39)


def test_an_input_per_sequence_is_spread_and_an_ambiguous_one_refused(device):
    """[B] beside labels [B, S] would align with S."""
    x, labels = torch.randn(4, 4, V, device=device), torch.randint(0, V, (4, 4), device=device)
    advantages, head = torch.tensor([1.0, -2.0, 3.0, 0.5], device=device), HeadLoss([PolicyGradient("reinforce")])
    with pytest.raises(ValueError, match=r"input 'advantages' .* got \[4\]: a value per row is \[B, 1\]"):
        head(x, labels, inputs={"advantages": advantages})
    expected = head(x, labels, inputs={"advantages": advantages[:, None]}).loss
    sequences = Sequences.from_mask(labels >= 0)
    spread = head(x, labels, inputs={"advantages": advantages, "sequences": sequences})
    assert torch.equal(spread.loss, expected)
    packed = Sequences.from_cu_seqlens(torch.arange(0, 17, 4, device=device), labels.flatten() >= 0)
    flat = head(x.flatten(0, 1), labels.flatten(), inputs={"advantages": advantages, "sequences": packed})
    torch.testing.assert_close(flat.loss, expected)


EVERY_TERM = {
    "smoothing": CrossEntropy(label_smoothing=0.1), "classes": CrossEntropy(class_weight=torch.rand(V)),
    "both": CrossEntropy(label_smoothing=0.1, class_weight=torch.rand(V)), "z": ZLoss(0.1), "entropy": Entropy(0.1),
    "distillation": Distillation(1.0, "cross_entropy", temperature_squared=True),
    "top-K": TopKDistillation(1.0, "jsd", over="vocabulary"), "clip": PolicyGradient("clip", clip=(0.1, 0.3)),
    "positive": PolicyGradient("positive-nll"), "kl": KLToReference(0.1, "k1", importance_weight="old"),
}  # fmt: skip


@pytest.mark.parametrize("name", EVERY_TERM)
def test_terms_and_heads_are_pickled_and_compute_the_same(name):
    head = HeadLoss(
        [EVERY_TERM[name]], metrics=("accuracy", PolicyMetrics(), GeneratorMetrics()), options=Options(check=True)
    )
    again = pickle.loads(pickle.dumps(head))
    x, labels, *_ = rows()
    shape, generator = labels.shape, torch.Generator().manual_seed(0)
    inputs = {key: torch.randn(shape, generator=generator) for key in
              ("advantages", "old_log_prob", "generator_log_prob", "reference_log_prob", "rewards")}  # fmt: skip
    inputs["teacher"] = Teacher(torch.randn(x.shape, generator=generator), 2.0)
    if name == "top-K":
        ids = torch.randint(0, V, (*shape, 3), generator=generator)
        inputs["teacher"] = TopKTeacher(ids, -torch.rand(ids.shape, generator=generator))
    needed = {key for part in (*head.terms, *head.token_metrics) for key in part.inputs}
    inputs = {key: pickle.loads(pickle.dumps(inputs[key])) for key in needed}
    one, other = (h(x, labels, inputs=inputs) for h in (head, again))
    assert torch.equal(one.loss, other.loss) and one.loss.isfinite()
    assert all(torch.equal(one.metrics[key], other.metrics[key]) for key in one.metrics)


@pytest.mark.parametrize("sequences", [False, True])
def test_int32_labels_go_with_any_ignore_index(sequences, device):
    """Tokens that a weight or a mask takes out get it, and int32 does not hold it."""
    x, labels = torch.randn(2, 3, V, device=device), torch.randint(0, V, (2, 3), dtype=torch.int32, device=device)
    mask = torch.tensor([[True, False, True], [True, True, False]], device=device)
    taken = {"inputs": {"sequences": Sequences.from_mask(mask)}} if sequences else {"token_weight": mask.float()}
    loss = HeadLoss(ignore_index=1 << 40)(x, labels, **taken).loss
    expected = F.cross_entropy(x[mask], labels[mask].long())
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("mode", ["recompute", "one_sweep"])
def test_large_weights_give_the_mean_from_hidden_states_too(mode, backend, device):
    torch.manual_seed(0)
    weight, labels = torch.randn(V, 4, device=device, requires_grad=True), torch.randint(0, V, (12,), device=device)
    hidden, results = torch.randn(12, 4, device=device), []
    for scale in (1.0, 2.0**126):
        token_weight = torch.full((12,), scale, device=device)
        head = HeadLoss(options=Options(backend=backend))
        loss = head.linear(hidden, weight, labels, token_weight=token_weight, linear=Linear(mode)).loss
        results.append((loss.detach(), torch.autograd.grad(loss, weight)[0]))
    for small, large in zip(*results):
        torch.testing.assert_close(small, large, rtol=1e-5, atol=1e-7)


def test_a_trained_weight_has_a_gradient_where_it_is_0(device):
    x, labels = torch.randn(3, V, device=device), torch.tensor([1, 2, 3], device=device)
    weight = torch.tensor([1.0, 0.0, 2.0], device=device, requires_grad=True)
    HeadLoss(reduction="sum")(x, labels, token_weight=weight).loss.backward()
    torch.testing.assert_close(weight.grad, F.cross_entropy(x, labels, reduction="none"))


@pytest.mark.parametrize("objective", ["gspo", "gmpo", "vespo", "gspo-length-weighted"])
def test_a_weight_of_0_leaves_its_token_in_the_ratio_of_its_sequence(objective, backend, device):
    """The sequences' mask says what a sequence is; the weight masks the loss alone."""
    x, labels = torch.randn(2, 4, V, device=device), torch.randint(0, V, (2, 4), device=device)
    given = {"advantages": torch.tensor([[1.0], [-1.0]], device=device)}
    given["old_log_prob"] = torch.full((2, 4), -4.0, device=device)
    given["sequences"] = Sequences.from_mask(labels >= 0)
    weight = torch.ones(2, 4, device=device)
    weight[0, 1] = 0.0
    options = {"reduction": "none", "options": Options(backend=backend)}
    head, x = HeadLoss([PolicyGradient(objective)], **options), x.requires_grad_()
    whole, masked = head(x, labels, inputs=given).loss, head(x, labels, token_weight=weight, inputs=given).loss
    torch.testing.assert_close(masked, whole * weight)
    mean = HeadLoss([PolicyGradient(objective)], reduction="seq-mean-token-mean", options=options["options"])
    loss = mean(x, labels, token_weight=weight, inputs=given).loss
    torch.testing.assert_close(loss, (whole * weight).sum() / 8)
