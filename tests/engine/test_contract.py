"""The rules that hold everywhere: collectives, kernels, autograd, compile, in place, validation."""

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from collectives import counted_collectives
from ranks import on_ranks
from torch.utils.checkpoint import checkpoint

from tp_headloss import (
    CrossEntropy,
    Entropy,
    GeneratorMetrics,
    HeadLoss,
    KLToReference,
    Linear,
    Options,
    PolicyGradient,
    PolicyMetrics,
    Sequences,
    Teacher,
    Term,
    TopKTeacher,
    Transform,
    VocabShard,
    ZLoss,
    combine_metrics,
    reduce_metrics,
    vocab_statistics,
)
from tp_headloss.autograd import GRADS
from tp_headloss.backends import load_backend
from tp_headloss.stats import OF_TEACHER, OF_TOPK

WANT = ("entropy", "total", "argmax")
V, N = 1000, 8


def rows(device, **kwargs):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, V, generator=generator) * 2
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[3] = -100
    return x.to(device, **kwargs), labels.to(device)


def collectives_run(group, device, transport, requires_grad, backend):
    shard = VocabShard.from_group(group, V)
    x, labels = rows(device)
    local = x[:, shard.start : shard.stop].clone().requires_grad_(requires_grad)
    head = HeadLoss(
        [CrossEntropy(label_smoothing=0.1), ZLoss(1e-4), Entropy(0.01)],
        metrics=("entropy",),
        options=Options(backend=backend, transport=transport),
    )
    with counted_collectives() as forward:
        out = head(local, labels, shard=shard)
    with counted_collectives() as backward:
        if requires_grad:
            out.loss.backward()
    return forward, backward


def policy_inputs(labels):
    generator = torch.Generator().manual_seed(1)
    names = ("old_log_prob", "reference_log_prob", "generator_log_prob", "advantages")
    inputs = {name: torch.randn(labels.shape, generator=generator).to(labels.device) for name in names}
    return inputs | {"sequences": Sequences.from_mask((labels != -100).view(2, -1))}


def policy_head(**options):
    """GRPO's kind of everything."""
    terms = [PolicyGradient("gspo"), KLToReference(0.1), Entropy(0.01), CrossEntropy(0.1), ZLoss(1e-4)]
    metrics = ("entropy", "accuracy", PolicyMetrics(reference=True), GeneratorMetrics())
    return HeadLoss(terms, metrics=metrics, reduction="seq-mean-token-mean", **options)


def policy_collectives_run(group, device, backend):
    shard = VocabShard.from_group(group, V)
    x, labels = rows(device)
    local, labels = x[:, shard.start : shard.stop].clone().view(2, -1, shard.width).requires_grad_(), labels.view(2, -1)
    inputs, head = policy_inputs(labels), policy_head(options=Options(backend=backend, transport="gather"))
    module, calls = load_backend(backend), Counter()
    kept = {name: getattr(module, name) for name in ("local_statistics", "merge_packets", "logits_gradient")}
    try:
        for name, function in kept.items():
            setattr(module, name, lambda *a, f=function, n=name: (calls.update([n]), f(*a))[1])
        with counted_collectives() as forward:
            out = head(local, labels, shard=shard, inputs=inputs)
        with counted_collectives() as backward:
            out.loss.backward()
    finally:
        for name, function in kept.items():
            setattr(module, name, function)
    return sum(forward.values()), sum(backward.values()), dict(calls)


def test_policy_gradients_with_every_metric_cost_one_collective_and_the_same_kernels(backend):
    once = {"local_statistics": 1, "merge_packets": 1, "logits_gradient": 1}
    assert on_ranks(2, policy_collectives_run, backend) == [(1, 0, once)] * 2


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("transport", ["gather", "sum"])
def test_one_collective_forward_and_none_backward(transport, requires_grad, backend):
    for forward, backward in on_ranks(2, collectives_run, transport, requires_grad, backend):
        assert sum(forward.values()) == 1 and not backward, (forward, backward)
        assert ("gather" if transport == "gather" else "reduce") in next(iter(forward))


class CountingKernels:
    """Stands for a module of kernels and counts launches."""

    def __init__(self, kernels, launches):
        self.kernels, self.launches = kernels, launches

    def __getattr__(self, name):
        self.launches[name] += 1
        return getattr(self.kernels, name)


def test_one_kernel_reads_the_logits_forward_and_one_backward(monkeypatch, device):
    module, launches = load_backend("triton"), Counter()
    for name in ("kernels", "sums_kernels", "topk_kernels"):
        monkeypatch.setattr(module, name, CountingKernels(getattr(module, name), launches))
    x, labels = rows(device)
    x.requires_grad_()
    head = HeadLoss([CrossEntropy(label_smoothing=0.1), ZLoss(1e-4), Entropy(0.01)], metrics=("accuracy",),
                    options=Options(backend="triton"))  # fmt: skip
    loss = head(x, labels).loss
    forward = {"statistics_kernel": 1, "merge_kernel": 1, "sums_kernel": 1}
    assert launches == forward
    loss.backward()
    assert launches == {**forward, "sums_gradient_kernel": 1, "gradient_kernel": 1}


def mixed_run(group, device):
    """Rank 0 trains, rank 1 does not; the collectives must still meet."""
    shard = VocabShard.from_group(group, V)
    x, labels = rows(device)
    local = x[:, shard.start : shard.stop].clone().requires_grad_(dist.get_rank(group) == 0)
    stats = vocab_statistics(local, labels, shard=shard)
    if local.requires_grad:
        stats.log_prob.sum().backward()
    return stats.lse.detach().cpu()


def test_ranks_with_different_requires_grad_do_not_hang():
    a, b = on_ranks(2, mixed_run)
    assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_never_written(dtype, backend, device):
    x, labels = rows(device, dtype=dtype)
    bias, temperature, weight = (
        torch.randn(V, device=device),
        torch.rand(N, device=device) + 0.5,
        torch.rand(V, device=device),
    )
    upstream = torch.randn(N, device=device)
    tensors = (x, labels, bias, temperature, weight, upstream)
    before = [t.clone() for t in tensors]
    x.requires_grad_()
    stats = vocab_statistics(
        x, labels, want=WANT, transform=Transform(bias, 1.5, 4.0, temperature), total_weight=weight,
        options=Options(backend=backend),
    )  # fmt: skip
    for value in (stats.log_prob, stats.entropy, stats.total):
        value.backward(upstream, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before))
    assert x._version == 0


def test_backward_is_pure(backend, device):
    """Thrice with other gradients in between, bit for bit; a sum of gradients, not an overwritten buffer."""
    x, labels = rows(device)
    x.requires_grad_()
    stats = vocab_statistics(x, labels, want=("entropy",), options=Options(backend=backend))
    g = torch.randn(N, device=device)
    first, *_ = torch.autograd.grad(stats.log_prob, x, g, retain_graph=True)
    kept = first.clone()
    torch.autograd.grad([stats.entropy, stats.lse], x, [g, -g], retain_graph=True)
    second, *_ = torch.autograd.grad(stats.log_prob, x, g, retain_graph=True)
    assert torch.equal(first, kept) and torch.equal(second, kept)
    stats.log_prob.backward(g, retain_graph=True)
    stats.log_prob.backward(g)
    torch.testing.assert_close(x.grad, 2 * kept)
    with pytest.raises(RuntimeError, match="second time"):
        stats.log_prob.backward(g)


def test_a_statistic_that_no_loss_used_is_not_differentiated(monkeypatch, backend, device):
    module, seen = load_backend(backend), []
    original = module.logits_gradient

    def spy(*args):
        seen.append(list(args[-2]))
        original(*args)

    monkeypatch.setattr(module, "logits_gradient", spy)
    x, labels = rows(device)
    stats = vocab_statistics(x.requires_grad_(), labels, want=WANT, options=Options(backend=backend))
    stats.log_prob.sum().backward()
    assert seen == [["log_prob"]]


def test_no_grad_saves_nothing(backend, device):
    x, labels = rows(device)
    with torch.no_grad():
        assert not vocab_statistics(x.requires_grad_(), labels).lse.requires_grad
    stats = vocab_statistics(x, labels, want=WANT, options=Options(backend=backend))
    assert not stats.argmax.requires_grad and stats.entropy.requires_grad
    assert vocab_statistics(x.detach(), labels).lse.grad_fn is None
    with torch.inference_mode():
        vocab_statistics(x.detach().clone(), labels, options=Options(backend=backend))


SECOND = {  # name -> what differentiates a gradient of loss(w) again
    "a penalty": lambda loss, w: torch.autograd.grad(loss(w) + first(loss, w).square().sum(), w),
    "inputs of backward": lambda loss, w: (loss(w) + first(loss, w).square().sum()).backward(inputs=[w]),
    "backward": lambda loss, w: first(loss, w).sum().backward(),
    "hessian": torch.autograd.functional.hessian,
    "hvp": lambda loss, w: torch.autograd.functional.hvp(loss, w, torch.ones_like(w)),
}


def first(loss, w):
    """The gradient, to be differentiated."""
    return torch.autograd.grad(loss(w), w, create_graph=True)[0]


@pytest.mark.parametrize("head", ["logits", "recompute", "one_sweep"])
@pytest.mark.parametrize("how", SECOND)
def test_a_second_derivative_is_refused_however_it_is_asked_for(how, head, device):
    torch.manual_seed(0)
    backend = "triton" if how == "a penalty" else "torch"  # it is refused above both
    hidden, labels = torch.randn(5, 6, device=device), torch.tensor([1, 2, 3, 4, -100], device=device)
    head_loss = HeadLoss([CrossEntropy(), ZLoss(0.1)], options=Options(backend=backend))

    def loss(w):
        if head == "logits":
            return head_loss(hidden @ w.t(), labels).loss
        return head_loss.linear(hidden, w, labels, linear=Linear(head)).loss

    w = torch.randn(9, 6, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="has first derivatives only"):
        SECOND[how](loss, w)
    if head != "one_sweep":  # which does not know what its gradients depend on, and refuses create_graph itself
        assert torch.equal(first(loss, w), torch.autograd.grad(loss(w), w)[0])


def test_inplace_writes_the_gradient_over_the_logits_and_says_so(backend, device):
    x, labels = rows(device)
    options = Options(backend=backend, inplace=True)
    expected = x.clone().requires_grad_()
    vocab_statistics(expected, labels, options=Options(backend=backend)).log_prob.sum().backward()
    leaf = x.clone().requires_grad_()
    logits = leaf * 1.0
    seen = []
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    stale = logits**2
    stats = vocab_statistics(logits, labels, options=options)
    stats.log_prob.sum().backward(retain_graph=True)
    assert torch.equal(leaf.grad, expected.grad)
    assert seen == [logits.data_ptr()]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stats.log_prob.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.sum().backward()


@pytest.mark.parametrize("layout", ["transposed", "columns", "sliced"])
def test_inplace_keeps_the_layout(layout, backend, device):
    x, labels = rows(device)
    view = {
        "transposed": lambda t: t.T.contiguous().T,
        "columns": lambda t: t.repeat_interleave(2, 1)[:, ::2],
        "sliced": lambda t: torch.nn.functional.pad(t, (3, 4))[:, 3:-4],
    }[layout]
    grads = []
    for inplace in (False, True):
        leaf = x.clone().requires_grad_()
        options = Options(backend=backend, inplace=inplace)
        vocab_statistics(view(leaf), labels, options=options).log_prob.sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_inplace_refuses_what_it_cannot_overwrite(device):
    x = torch.zeros(2, 3, 5, 8, device=device)
    labels = torch.zeros(2, 3, 5, dtype=torch.long, device=device)
    with pytest.raises(ValueError, match="one row stride"):
        vocab_statistics(x[:, :, 1:3], labels[:, :, 1:3], options=Options(inplace=True))
    flat = torch.zeros(16, device=device)
    for shared in (x[0, 0, :1].expand(5, 8), x[0, 0, :, :1].expand(5, 8), flat.as_strided((5, 8), (1, 1))):
        with pytest.raises(ValueError, match="share memory"):
            vocab_statistics(shared, labels[0, 0], options=Options(inplace=True))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_bits(use_reentrant, backend, device):
    x, labels = rows(device)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    head = HeadLoss([CrossEntropy(), ZLoss(1e-2)], options=Options(backend=backend))
    head(a, labels).loss.backward()
    checkpoint(lambda t: head(t * 1.0, labels).loss, b, use_reentrant=use_reentrant).backward()
    assert torch.equal(a.grad, b.grad)


def test_autocast_changes_nothing(backend, device):
    x, labels = rows(device)
    head = HeadLoss([CrossEntropy(), ZLoss(1e-2)], options=Options(backend=backend))
    plain = head(x, labels).loss
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        assert torch.equal(head(x, labels).loss, plain) and plain.dtype == torch.float32


def test_transposed_logits_are_read_where_they_lie(backend, device):
    """[S, B, V] seen as [B, S, V], and any strides that do not collapse, equal their contiguous copies."""
    base = torch.randn(4, 3, 50, device=device)
    labels = torch.randint(0, 50, (3, 4), device=device)
    temperature = torch.rand(3, 4, device=device) + 0.5
    views = {"transposed": base.transpose(0, 1), "uncollapsible": torch.randn(3, 7, 50, device=device)[:, 1:5],
             "one token": base.transpose(0, 1)[:1, :1]}  # fmt: skip
    for name, view in views.items():
        y, t = labels[: view.shape[0], : view.shape[1]], temperature[: view.shape[0], : view.shape[1]]
        results = []
        for x in (view.detach(), view.detach().contiguous()):
            x.requires_grad_()
            stats = vocab_statistics(
                x, y, want=WANT, transform=Transform(temperature=t), options=Options(backend=backend)
            )
            g = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape)
            torch.autograd.backward([stats.log_prob, stats.entropy], [g, g])
            results.append((*stats[:6], x.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results)), name
    x = views["transposed"].detach().requires_grad_()
    stats = vocab_statistics(x, labels)
    saved = stats.lse.grad_fn
    while not hasattr(saved, "saved_tensors"):
        saved = saved.next_functions[0][0]
    assert saved.saved_tensors[0].data_ptr() == x.data_ptr()  # no copy was made


def test_vectors_of_any_stride_are_read_right(backend, device):
    x, labels = rows(device)
    bias, weight, temperature = torch.randn(V), torch.rand(V), torch.rand(N) + 0.5
    vectors = {"labels": labels, "bias": bias, "temperature": temperature, "weight": weight}
    vectors = {name: vector.to(device) for name, vector in vectors.items()}
    results = []
    for strided in (False, True):
        v = {name: t.repeat_interleave(2)[::2] if strided else t for name, t in vectors.items()}
        stats = vocab_statistics(
            x, v["labels"], want=WANT, transform=Transform(bias=v["bias"], temperature=v["temperature"]),
            total_weight=v["weight"], options=Options(backend=backend),
        )  # fmt: skip
        results.append(stats[:6])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_one_dimensional_logits_are_one_token(backend, device):
    x, label = torch.randn(50, device=device), torch.tensor(7, device=device)
    stats = vocab_statistics(x, label, options=Options(backend=backend))
    assert stats.log_prob.shape == ()
    torch.testing.assert_close(stats.log_prob, x.log_softmax(-1)[7])


def compiled_run(group, device, fraction, backend):
    shard = VocabShard.from_group(group, V)
    x, labels = rows(device)
    labels[torch.arange(N, device=device) < fraction * N] = -100
    head = HeadLoss([CrossEntropy(label_smoothing=0.1), ZLoss(1e-3), Entropy(0.1)], metrics=("accuracy",),
                    options=Options(backend=backend))  # fmt: skip
    temperature = torch.linspace(0.5, 2, N, device=device)

    def step(logits, labels):
        out = head(logits * 1.0, labels, shard=shard, transform=Transform(temperature=temperature))
        return out.loss, out.metrics["accuracy"], out.stats.entropy

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        local = x[:, shard.start : shard.stop].clone().requires_grad_()
        loss, accuracy, entropy = function(local, labels)
        loss.backward()
        results.append([t.detach().cpu() for t in (loss, accuracy, entropy, local.grad)])
    torch._dynamo.reset()
    return results


@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("world_size", [1, 2])
def test_compiled_without_graph_breaks_equals_eager(world_size, fraction, backend):
    for eager, compiled in on_ranks(world_size, compiled_run, fraction, backend):
        *_, entropy, _ = zip(eager, compiled)
        assert torch.equal(*entropy)  # the statistics; sums are added up in another order
        for a, b in zip(eager, compiled):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_inductor_compiles_the_loss_of_changing_batch_sizes(device):
    head = HeadLoss([CrossEntropy(), ZLoss(1e-3)])
    compiled = torch.compile(lambda x, y: head(x, y).loss, fullgraph=True, dynamic=True)
    for n in (5, 8, 13):
        x, y = torch.randn(n, 64, device=device, requires_grad=True), torch.randint(0, 64, (n,), device=device)
        (grad,) = torch.autograd.grad(compiled(x, y), x)
        (expected,) = torch.autograd.grad(head(x, y).loss, x)
        torch.testing.assert_close(grad, expected)
    torch._dynamo.reset()


def test_a_failure_after_the_kernel_leaves_no_gradient_for_a_second_backward(backend, device, monkeypatch):
    """With inplace=True the logits are no longer the logits then."""
    module, (x, labels) = load_backend(backend), rows(device)
    original = module.logits_gradient

    def failing(*args):
        original(*args)
        raise MemoryError

    monkeypatch.setattr(module, "logits_gradient", failing)
    local = x.clone().requires_grad_()
    loss = vocab_statistics(local * 1.0, labels, options=Options(backend=backend, inplace=True)).log_prob.sum()
    with pytest.raises(MemoryError):
        loss.backward(retain_graph=True)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inplace_without_fullgraph_runs_in_eager_and_is_right(device):
    """torch.compile breaks the graph where something is refused, and calls it outside of the graph."""
    x, labels = rows(device)

    def step(t):
        return vocab_statistics(t * 1.0, labels, options=Options(inplace=True)).log_prob.sum()

    grads = [torch.autograd.grad(f(t), t)[0] for f in (step, torch.compile(step, backend="eager"))
             for t in [x.clone().requires_grad_()]]  # fmt: skip
    assert torch.equal(*grads)
    torch._dynamo.reset()


def test_inplace_is_refused_under_compile(device):
    x, labels = rows(device)
    compiled = torch.compile(
        lambda t: vocab_statistics(t, labels, options=Options(inplace=True)).lse, fullgraph=True, backend="eager"
    )
    with pytest.raises(Exception, match="inplace=True is for eager"):
        compiled(x)


def test_operators_are_registered_consistently(device):
    """Schema, fake implementation and real outputs agree (torch.library.opcheck)."""
    x, labels = rows(device)
    checks, operators = {"test_utils": ("test_schema", "test_faketensor")}, torch.ops.tp_headloss
    ids, log_probs = torch.randint(0, V, (N, 5), device=device), torch.randn(N, 5, device=device)
    of_entries = (ids, log_probs, None, None, 1.0, True, V, "torch")
    torch.library.opcheck(operators.entries.default, of_entries, **checks)
    scales = torch.rand(2, N, device=device) + 0.5
    for teacher, names, rest in (
        (Teacher(torch.randn_like(x)), OF_TEACHER, (torch.randn_like(x), scales, None, None)),
        (TopKTeacher(ids, log_probs), OF_TOPK, (None, scales, *operators.entries(*of_entries))),
    ):
        local, options = x.clone().requires_grad_(), Options(backend="torch")
        stats = vocab_statistics(local, labels, want=(*WANT, *names), teacher=teacher, options=options)
        spec, inputs = stats.lse.grad_fn.spec, (x, labels, None, None, None, *rest)
        torch.library.opcheck(operators.statistics.default, (*inputs, *spec), **checks)
        merged = operators.statistics(*inputs, *spec)[0]
        grads = [torch.randn(N, device=device) if name in ("log_prob", *names) else None for name in GRADS]
        torch.library.opcheck(operators.logits_gradient.default, (*inputs, merged, grads, *spec), **checks)


BAD = {
    "scalar logits": (lambda: dict(logits=torch.tensor(1.0)), "vocabulary dimension"),
    "want": (lambda: dict(want=("entropie",)), "entropie"),
    "backend": (lambda: dict(options=Options(backend="cuda")), "backend must be"),
    "transport": (lambda: dict(options=Options(transport="mpi")), "transport must be"),
    "no GPU": (lambda: dict(options=Options(transport="symm_mem", backend="torch")), "needs the triton backend"),
    "argmax by sum": (lambda: dict(want=("argmax",), options=Options(transport="sum")), "argmax is not a sum"),
    "weight without total": (lambda: dict(total_weight=torch.ones(V)), "not in want"),
    "weight shape": (lambda: dict(total_weight=torch.ones(3), want=("total",)), "total_weight must have shape"),
    "bias shape": (lambda: dict(transform=Transform(bias=torch.ones(3))), "bias must have shape"),
    "scale": (lambda: dict(transform=Transform(scale=0.0)), "scale must be"),
    "softcap": (lambda: dict(transform=Transform(softcap=0.0)), "softcap must be"),
    "temperature": (lambda: dict(transform=Transform(temperature=0.0)), "temperature must be"),
    "temperature below fp32": (lambda: dict(transform=Transform(temperature=1e-38)), "finite in fp32, got 1e-38"),
    "softcap beyond fp32": (lambda: dict(transform=Transform(softcap=1e39)), "finite in fp32, got 1e"),
    "scale beyond fp32": (lambda: dict(transform=Transform(scale=-1e39)), "finite in fp32, got -1e"),
    "a factor beyond fp32": (lambda: dict(transform=Transform(scale=1e30, temperature=1e-30)), "scale / temperature"),
    "a teacher's temperature": (lambda: dict(teacher=Teacher(torch.zeros(N, V), 1e39)), "teacher.temperature must be"),
    "a student's temperature": (
        lambda: dict(want=("forward_kl",), transform=Transform(temperature=1e30),
                     teacher=Teacher(torch.zeros(N, V), student_temperature=1e-30)), "student_temperature must be"),
    "too few columns": (lambda: dict(logits=torch.zeros(N, V - 1), shard=VocabShard(0, V, V)), "is vocab_size=1000 ri"),
    "too many columns": (
        lambda: dict(logits=torch.zeros(N, V + 24), shard=VocabShard(0, V, V)), "padded_size=1024"),
    "temperature shape": (lambda: dict(transform=Transform(temperature=torch.ones(3))), "temperature must have shape"),
    "temperature gradient": (
        lambda: dict(transform=Transform(temperature=torch.ones(N, requires_grad=True))), "no gradient"),
    "check without labels": (lambda: dict(labels=None, options=Options(check=True)), "check=True"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    make, words = BAD[name]
    x, labels = rows("cpu")
    with pytest.raises(ValueError, match=words):
        kwargs = {"logits": x, "labels": labels, **make()}
        vocab_statistics(kwargs.pop("logits"), kwargs.pop("labels"), **kwargs)


WRONG_TYPES = {
    "lists of labels": (lambda x, y: vocab_statistics(x, y.tolist()), "labels must be a tensor, got list"),
    "swapped": (lambda x, y: vocab_statistics(y, x), "are logits and labels swapped"),
    "swapped in a loss": (lambda x, y: HeadLoss()(y, x), "labels must be int64 or int32, got torch.float32"),
    "lists of logits": (lambda x, y: vocab_statistics(x.tolist(), y), "logits must be a tensor, got list"),
    "options": (lambda x, y: vocab_statistics(x, y, options={"check": True}), "options must be Options"),
    "an option": (lambda x, y: Options(check="yes"), "check must be True or False, got 'yes'"),
    "a layer": (lambda x, y: HeadLoss().linear(x, torch.nn.Linear(V, 9), y), "got Linear: pass its .weight"),
    "linear": (lambda x, y: HeadLoss().linear(x, x, y, linear="recompute"), "linear must be Linear"),
    "weights of tokens": (lambda x, y: HeadLoss()(x, y, token_weight=[1.0] * N), "token_weight must be a tensor, got"),
    "one weight": (lambda x, y: HeadLoss()(x, y, token_weight=1.0), "token_weight must be a tensor, got float"),
    "one term": (lambda x, y: HeadLoss(CrossEntropy()), r"terms must be a list, terms=\[..\], got Term"),
    "a term that was not called": (lambda x, y: HeadLoss([CrossEntropy]), r"got CrossEntropy: call it, CrossEntropy\("),
    "one metric": (lambda x, y: HeadLoss(metrics="accuracy"), r"metrics must be a list, .*got 'accuracy'"),
    "a metric that was not called": (lambda x, y: HeadLoss(metrics=(PolicyMetrics,)), "call it, PolicyMetrics"),
    "a clip that is a number": (lambda x, y: PolicyGradient("clip", clip=0.2), "clip must be two numbers, .* got 0.2"),
    "an option of no objective": (
        lambda x, y: PolicyGradient("clip", eps=0.2), r"objective 'clip' takes the options \['clip', 'dual_clip', "),
    "a mesh": (lambda x, y: VocabShard.from_group(DeviceMesh(), V), "got a DeviceMesh: use VocabShard.from_mesh"),
    "a size": (lambda x, y: VocabShard(0, 4.0, 4), "stop must be an int, got 4.0"),
    "metrics of one batch": (lambda x, y: combine_metrics({"a": x}), "must be a list of dicts of metrics, .* got dict"),
    "metrics": (lambda x, y: reduce_metrics([x], None), "metrics must be a dict of scalars by name, got list"),
    "a wanted name": (lambda x, y: Term("mine", lambda s: s.lse, want="entropy"), "want must be a tuple of names"),
}  # fmt: skip


class DeviceMesh:
    """Stands for torch's, which needs a process group."""


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_wrong_types_are_named_and_the_message_says_what_to_do(name):
    call, words = WRONG_TYPES[name]
    with pytest.raises(TypeError, match=words):
        call(*rows("cpu"))


def test_a_label_beyond_the_logits_hints_at_a_forgotten_shard():
    x, labels = rows("cpu")
    with pytest.raises(ValueError, match=r"are these logits one rank's columns\? Then pass shard="):
        vocab_statistics(x[:, :4], labels, options=Options(check=True))


def test_options_are_checked_when_they_are_made():
    for wrong in ({"transport": "nvlink"}, {"backend": "cuda"}, {"validate": "all"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be one of"):
            Options(**wrong)


def test_a_shard_must_be_a_shard():
    with pytest.raises(TypeError, match="VocabShard"):
        vocab_statistics(torch.zeros(2, 4), shard=(0, 4))


def test_every_option_changes_something(backend, device):
    """No argument is accepted and ignored."""
    x, labels = rows(device)
    weight = torch.rand(V, device=device)

    def run(**kwargs):
        kwargs.setdefault("options", Options(backend=backend))
        stats = vocab_statistics(x, kwargs.pop("labels", labels), want=WANT, **kwargs)
        return torch.stack([v.double() for v in stats[:6] if v is not None])

    base = run()
    assert run(labels=None).shape[0] == 4
    for kwargs in (
        dict(ignore_index=int(labels[0])),
        dict(total_weight=weight),
        dict(transform=Transform(bias=weight)),
        dict(transform=Transform(scale=1.1)),
        dict(transform=Transform(softcap=3.0)),
        dict(transform=Transform(temperature=1.1)),
        dict(transform=Transform(temperature=torch.full((N,), 1.1, device=device))),
        dict(shard=VocabShard(0, V, V - 1)),
    ):
        assert not torch.equal(run(**kwargs).nan_to_num(), base.nan_to_num()), kwargs
    a = run(transform=Transform(temperature=torch.full((N,), 1.1, device=device)))
    torch.testing.assert_close(a, run(transform=Transform(temperature=1.1)), rtol=1e-6, atol=1e-5)


def test_rows_do_not_depend_on_their_batch(backend, device):
    """Row i has the same bits alone, in any order, and in any batch (the triton backend; torch to rounding)."""
    x, labels = rows(device)
    order = torch.randperm(N, device=device)
    options = Options(backend=backend)
    whole = vocab_statistics(x, labels, want=WANT, options=options)
    shuffled = vocab_statistics(x[order], labels[order], want=WANT, options=options)
    alone = vocab_statistics(x[5:6], labels[5:6], want=WANT, options=options)
    for a, b, c in zip(whole[:6], shuffled[:6], alone[:6]):
        if backend == "triton":
            assert torch.equal(a[order], b) and torch.equal(a[5:6], c)
        torch.testing.assert_close(a[order], b)
        torch.testing.assert_close(a[5:6], c)


def test_twenty_repeats_have_the_same_bits(backend, device):
    x, labels = (part[:4] for part in rows(device))
    first = None
    for _ in range(20):
        leaf = x.clone().requires_grad_()
        stats = vocab_statistics(leaf, labels, want=WANT, options=Options(backend=backend))
        (stats.log_prob + stats.entropy).nan_to_num().sum().backward()
        values = *(value.detach() for value in stats[:6]), leaf.grad
        first = first or values
        assert all(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in zip(first, values))


def test_a_softcap_bounds_infinite_logits_as_in_torch(backend, device):
    x = torch.tensor([[torch.inf, 1.0, 2.0], [-torch.inf, 1.0, 2.0]], device=device, requires_grad=True)
    labels = torch.tensor([0, 1], device=device)
    stats = vocab_statistics(x, labels, transform=Transform(softcap=3.0), options=Options(backend=backend))
    expected = (3.0 * torch.tanh(x.detach() / 3.0)).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(stats.log_prob, expected)
    (grad,) = torch.autograd.grad(stats.log_prob.sum(), x)
    assert grad.isfinite().all() and not grad[:, 0].any()


def test_argmax_ties_go_to_the_lowest_id(backend, device):
    x = torch.zeros(4, V, device=device)
    x[1, [700, 300]] = 5.0
    x[2, [900, 2]] = 5.0
    labels = torch.tensor([10, 700, 2, 999], device=device)
    for y in (labels, None):
        stats = vocab_statistics(x, y, want=("argmax",), options=Options(backend=backend))
        assert stats.argmax.tolist() == [0, 300, 2, 0]
    large = torch.zeros(2, 20_000, device=device)  # several tiles a chunk, and the label in an early one
    large[1, [100, 1900, 12_345]] = 5.0
    early = torch.tensor([10, 50], device=device)
    stats = vocab_statistics(large, early, want=("argmax",), options=Options(backend=backend))
    assert stats.argmax.tolist() == [0, 100]
    assert vocab_statistics(x, labels, want=("argmax",)).correct.tolist() == [False, False, True, False]


def policy_step(head, x, labels, inputs):
    local = x.view(2, -1, V).clone().requires_grad_()
    out = head(local, labels.view(2, -1), inputs=inputs)
    (grad,) = torch.autograd.grad(out.loss, local)
    return out.loss.detach(), grad, out.terms, out.metrics, out.sequence_metrics


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_terms_equal_eager_ones(compiler, backend, device, monkeypatch):
    """Of another shape, too; aot_eager runs the same operations, so only their sums' order could differ."""
    if compiler == "aot_eager":
        compile = torch.compile
        monkeypatch.setattr(torch, "compile", lambda f: compile(f, backend="aot_eager"))
    options = Options(backend=backend)
    eager, compiled = policy_head(options=options), policy_head(options=options, compile=True)
    x, labels = rows(device)
    for part in (slice(0, 8), slice(2, 8)):
        inputs = policy_inputs(labels[part].view(2, -1))
        a, b = (policy_step(head, x[part], labels[part], inputs) for head in (eager, compiled))
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("objective", ["clip", "cispo", "sapo", "gmpo", "vespo", "clip-cov", "kl-cov"])
def test_every_objective_compiles_to_what_it_is_in_eager(objective, device):
    """With advantages that broadcast, which are views of stride 0."""
    x, labels = rows(device)
    labels = labels.view(2, -1)
    torch.manual_seed(0)
    inputs = policy_inputs(labels) | {"advantages": torch.tensor([[1.0], [-0.5]], device=device)}
    inputs["noise"] = torch.rand(labels.shape, device=device)
    inputs["old_log_prob"] = inputs["old_log_prob"] - 7
    options = {"fraction": 0.3, "bounds": (-9.0, 9.0)} if objective == "clip-cov" else {}
    results = []
    for compile in (False, True):
        head = HeadLoss([PolicyGradient(objective, **options)], compile=compile)
        given = {name: inputs[name] for name in head.terms[0].inputs}
        local = x.view(2, -1, V).clone().requires_grad_()
        loss = head(local, labels, inputs=given).loss
        results.append((loss.detach(), torch.autograd.grad(loss, local)[0]))
    torch.testing.assert_close(*results, rtol=2e-5, atol=1e-6)
    torch._dynamo.reset()


def test_a_compiled_head_can_be_copied_and_saved(tmp_path):
    x, labels = rows("cpu")
    head = HeadLoss([CrossEntropy(label_smoothing=0.1)], metrics=("entropy",), compile=True)
    loss = head(x, labels).loss
    for copied in (copy.deepcopy(head), head):
        torch.testing.assert_close(copied(x, labels).loss, loss)
    state = head.__getstate__()
    assert state["_evaluate"] is None and head._evaluate is not None


def test_a_policy_loss_compiles_without_graph_breaks(device):
    x, labels = rows(device)
    inputs = policy_inputs(labels.view(2, -1))
    head = policy_head()
    eager = policy_step(head, x, labels, inputs)[:2]

    def step(local):
        return head(local, labels.view(2, -1), inputs=inputs).loss

    local = x.view(2, -1, V).clone().requires_grad_()
    loss = torch.compile(step, fullgraph=True, backend="aot_eager")(local)
    torch.testing.assert_close((loss.detach(), *torch.autograd.grad(loss, local)), eager, rtol=2e-5, atol=1e-6)


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    x, labels = rows("cpu")
    shard = VocabShard.from_group(None, numpy.int64(V))
    transform = Transform(temperature=numpy.float32(2.0), scale=numpy.float32(1.0))
    head = HeadLoss([CrossEntropy(numpy.float32(1.0))], ignore_index=numpy.int64(-100))
    ours = head(x, labels, shard=shard, transform=transform, denominator=numpy.int64(4)).loss
    assert torch.equal(ours, HeadLoss()(x, labels, transform=Transform(temperature=2.0), denominator=4).loss)
    with pytest.raises(TypeError, match="vocab_size must be an int, got True"):
        VocabShard(0, 12, True)
    with pytest.raises(TypeError, match=r"vocab_size must be an int, got 12\.0"):
        VocabShard.from_group(None, 12.0)
