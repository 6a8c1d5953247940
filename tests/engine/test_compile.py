"""torch.compile: no graph breaks, the values of eager, consistent operators. What is traced is the same
for every backend, so that few cases meet the interpreted one."""

import copy
import os
import sys

import pytest
import torch
from logits_problem import WANT, N, V, policy_head, policy_inputs, rows
from ranks import on_ranks
from torch._dynamo.testing import CompileCounter
from torch._inductor.exc import InductorError
from torch.distributed.device_mesh import init_device_mesh

import tp_headloss as hl
from tp_headloss.statistics import AT_IDS, FULL_TEACHER, OVER_SETS, TOPK_TEACHER


def compiled_run(group, device, backend):
    """By the fraction of tokens that are ignored, of a step that is compiled once: what is eager,
    and what is not. Of several ranks the last one compiles."""
    shard = hl.VocabShard.from_group(group, V)
    x, own = rows(device)
    terms = [hl.CrossEntropy(label_smoothing=0.1), hl.ZLoss(1e-3), hl.Entropy(0.1)]
    head = hl.HeadLoss(terms, metrics=("accuracy",), options=hl.Options(backend=backend))
    temperature = torch.linspace(0.5, 2, N, device=device)

    def step(logits, labels):
        out = head(
            logits * 1.0, labels, shard=shard, transform=hl.Transform(temperature=temperature)
        )
        return out.loss, out.metrics["accuracy"], out.stats.entropy

    is_last = group is None or group.rank() == group.size() - 1
    # the others' collectives are the same, compiled or not
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager") if is_last else step
    results = []
    for fraction in (0.0, 0.25, 1.0):
        labels = torch.where(torch.arange(N, device=device) < fraction * N, -100, own)
        for function in (step, compiled):
            local = x[:, shard.start : shard.stop].clone().requires_grad_()
            loss, accuracy, entropy = function(local, labels)
            loss.backward()
            results.append([t.detach().cpu() for t in (loss, accuracy, entropy, local.grad)])
    torch._dynamo.reset()
    return zip(results[::2], results[1::2])


@pytest.mark.interpreted_only(world_size=(1,))
@pytest.mark.parametrize("world_size", [1, 2])
def test_compiled_without_graph_breaks_equals_eager(world_size, backend):
    for found in on_ranks(world_size, compiled_run, backend):
        for eager, compiled in found:
            # the statistics; sums are added up in another order
            assert torch.equal(eager[2], compiled[2])
            torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-7)


def compiled_means(group, device):
    """Loss and means of a step on 2 by 2 ranks of data and tensor parallelism, eager and compiled,
    which the last rank is."""
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    shard, head = hl.VocabShard.from_mesh(mesh, V, "tp"), hl.HeadLoss(metrics="accuracy")
    x, labels = (part[mesh.get_local_rank("dp") :: 2] for part in rows(device))

    def step(logits, over):
        out = head(logits, labels, shard=shard)
        return out.loss, out.means(), hl.mean_metrics(out, mesh.get_group(over))

    local = x[:, shard.start : shard.stop]
    eager = step(local, "dp")
    if group.rank() != 3:  # whose collectives are the same, compiled or not
        return eager, step(local, "dp")
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = eager, compiled(local, "dp")
    # while it is traced, before there is a collective
    with pytest.raises(Exception, match="different tokens, got the group of a VocabShard"):
        compiled(local, "tp")
    torch._dynamo.reset()
    return results


def test_means_compile_without_graph_breaks():
    for eager, compiled in on_ranks(4, compiled_means):
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=0)
        assert eager[1] != eager[2]


def test_a_loss_of_own_functions_made_in_a_compiled_function_equals_eager(device):
    x, labels = rows(device)

    def step(x):
        own = hl.Term("own", lambda stats, scale: -scale * stats.log_prob, inputs=("scale",))
        head = hl.HeadLoss(
            [own, hl.ZLoss(0.1)], metrics=hl.Metric(lambda stats: {"lse": stats.lse})
        )
        out = head(x, labels, inputs={"scale": x.detach()[:, 0]})
        return out.loss, out.metrics["lse"]

    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(x), step(x))
    torch._dynamo.reset()


@pytest.mark.parametrize("made", ["before", "within"])
def test_compile_of_the_terms_is_left_to_an_outer_compilation(made, device):
    """Also with a weight that is a tensor, whose value of the call an output holds."""
    x, labels = rows(device)
    weight = torch.tensor(1.0, device=device)
    terms = [hl.CrossEntropy(weight, label_smoothing=0.1), hl.ZLoss(0.1)]

    def head_of(compile):
        return hl.HeadLoss(terms, metrics=hl.TopKAccuracy(2), compile=compile)

    eager, smoothed = head_of(False), head_of(True)

    def step(x):
        out = (head_of(True) if made == "within" else smoothed)(x, labels)
        return out.loss, out.means()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for value in (1.0, 0.5):
        weight.fill_(value)
        expected = eager(x, labels)
        torch.testing.assert_close(compiled(x), (expected.loss, expected.means()))
    torch._dynamo.reset()


def test_inductor_compiles_the_loss_of_changing_batch_sizes(device):
    head = hl.HeadLoss([hl.CrossEntropy(), hl.ZLoss(1e-3)])
    compiled = torch.compile(lambda x, y: head(x, y).loss, fullgraph=True, dynamic=True)
    for n in (5, 8, 13):
        x, y = (
            torch.randn(n, 64, device=device, requires_grad=True),
            torch.randint(0, 64, (n,), device=device),
        )
        (grad,) = torch.autograd.grad(compiled(x, y), x)
        (expected,) = torch.autograd.grad(head(x, y).loss, x)
        torch.testing.assert_close(grad, expected)
    torch._dynamo.reset()


def test_sets_of_any_size_take_one_graph(device):
    x, _ = rows(device)
    frames = CompileCounter()

    @torch.compile(fullgraph=True, dynamic=True, backend=frames)
    def mass(x, ids):
        return hl.vocab_statistics(x, want=("set_log_mass",), sets=hl.IdSets(ids)).set_log_mass

    for size in (3, 5, 9, 17):
        ids = torch.randint(0, V, (N, size), device=device)
        eager = hl.vocab_statistics(x, want=("set_log_mass",), sets=hl.IdSets(ids)).set_log_mass
        torch.testing.assert_close(mass(x, ids), eager)
    assert frames.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.interpreted_only(made=("entries",))
@pytest.mark.parametrize("made", ["sets", "entries"])
def test_sets_and_teachers_made_in_a_compiled_function_equal_eager(made, options, device):
    x, labels = (part[:3] for part in rows(device))
    ids = torch.stack([labels, labels.roll(1), torch.full_like(labels, 7)], 1)
    offsets, log_probs = (
        torch.tensor([0, 3, 5, 9], device=device),
        torch.full((3, 3), -1.5, device=device),
    )
    terms = [
        hl.CrossEntropy(),
        hl.TopKDistillation(0.5, "jsd", "vocabulary"),
        hl.TopKDistillation(0.5),
    ]
    head = hl.HeadLoss(terms, metrics=("topk_log_mass",), options=options)

    def step(x, ids, offsets, log_probs):
        if made == "entries":
            teacher = hl.TopKTeacher(ids, log_probs, ids != 7, temperature=2.0)
            return head(x * 1.0, labels, inputs={"teacher": teacher}).loss
        sets = hl.IdSets.from_csr(ids.flatten(), offsets)
        stats = hl.vocab_statistics(x * 1.0, labels, want=OVER_SETS, sets=sets, options=options)
        return torch.stack([getattr(stats, name) for name in OVER_SETS])

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        local = x.clone().requires_grad_()
        value = function(local, ids, offsets, log_probs)
        results.append((value.detach(), torch.autograd.grad(value.nan_to_num().sum(), local)[0]))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)
    torch._dynamo.reset()


def test_operators_are_registered_consistently(device):
    """Schema, fake implementation and real outputs agree (torch.library.opcheck)."""
    x, labels = rows(device)
    checks, operators = {"test_utils": ("test_schema", "test_faketensor")}, torch.ops.tp_headloss
    ids, log_probs = torch.randint(0, V, (N, 5), device=device), torch.randn(N, 5, device=device)
    of_entries = (ids, log_probs, None, 1.0, True, V, "torch")
    torch.library.opcheck(operators.entries.default, of_entries, **checks)
    scales = torch.rand(2, N, device=device) + 0.5
    spans = torch.arange(2 * N, device=device).view(N, 2) * 2
    of_sets = (ids.flatten(), spans, V, None, "torch")
    torch.library.opcheck(operators.known_sets.default, of_sets, **checks)
    in_sets = *[None] * 4, *operators.known_sets(*of_sets), None
    teacher, sets = hl.TopKTeacher(ids, log_probs), {"sets": hl.IdSets(ids)}
    for given, names, rest in (
        (
            {"teacher": hl.Teacher(torch.randn_like(x))},
            FULL_TEACHER,
            (torch.randn_like(x), scales, *[None] * 6),
        ),
        (
            {"teacher": teacher},
            TOPK_TEACHER,
            (None, scales, *operators.entries(*of_entries), *[None] * 4),
        ),
        (sets, OVER_SETS, (*in_sets, None)),
        ({"ids": ids}, AT_IDS, (*[None] * 7, ids.int())),
        (sets | {"ids": ids}, (*OVER_SETS, *AT_IDS), (*in_sets, ids.int())),
    ):
        local, options = x.clone().requires_grad_(), hl.Options(backend="torch")
        stats = hl.vocab_statistics(local, labels, want=(*WANT, *names), options=options, **given)
        request, inputs = stats.lse.grad_fn.request, (x, labels, None, None, None, *rest)
        torch.library.opcheck(operators.statistics.default, (*inputs, *request.facts), **checks)
        merged = operators.statistics(*inputs, *request.facts)[0]
        upstream = [name in ("log_prob", *names) for name in request.layout.gradients]
        shapes = [(N, 5) if name in AT_IDS else (N,) for name in request.layout.gradients]
        grads = [
            torch.randn(shape, device=device) if given else None
            for shape, given in zip(shapes, upstream)
        ]
        torch.library.opcheck(
            operators.logits_gradient.default, (*inputs, merged, grads, *request.facts), **checks
        )


def policy_step(head, x, labels, inputs):
    local = x.view(2, -1, V).clone().requires_grad_()
    out = head(local, labels.view(2, -1), inputs=inputs)
    (grad,) = torch.autograd.grad(out.loss, local)
    return out.loss.detach(), grad, out.terms, out.metrics, out.sequence_metrics


# What is compiled begins behind the statistics, and is the same whatever computed them. On CPUs
# Inductor, which calls a C++ compiler, has its turn with TP_HEADLOSS_FULL; it compiles every objective
# below.
COMPILERS = [("aot_eager", "triton")]
if torch.cuda.is_available() or os.environ.get("TP_HEADLOSS_FULL"):
    COMPILERS.append(("inductor", "torch"))


@pytest.mark.parametrize(("compiler", "backend"), COMPILERS)
def test_compiled_terms_equal_eager_ones(compiler, options, device, monkeypatch):
    """Of another shape, too; aot_eager runs the same operations, so only their sums' order could
    differ."""
    if compiler == "aot_eager":
        compile = torch.compile
        monkeypatch.setattr(torch, "compile", lambda f: compile(f, backend="aot_eager"))
    eager, compiled = policy_head(options=options), policy_head(options=options, compile=True)
    x, labels = rows(device)
    for part in (slice(0, 8), slice(2, 8)):
        inputs = policy_inputs(labels[part].view(2, -1))
        a, b = (policy_step(head, x[part], labels[part], inputs) for head in (eager, compiled))
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)


def test_every_objective_compiles_to_what_it_is_in_eager(device):
    """With advantages that broadcast, which are views of stride 0."""
    x, labels = rows(device)
    labels = labels.view(2, -1)
    torch.manual_seed(0)
    inputs = policy_inputs(labels) | {"advantages": torch.tensor([[1.0], [-0.5]], device=device)}
    inputs["noise"] = torch.rand(labels.shape, device=device)
    inputs["old_log_prob"] = inputs["old_log_prob"] - 7
    terms = [
        hl.PolicyGradient(name) for name in ("clip", "cispo", "sapo", "gmpo", "vespo", "kl-cov")
    ]
    terms.append(hl.PolicyGradient("clip-cov", fraction=0.3, bounds=(-9.0, 9.0)))
    results = []
    for compile in (False, True):
        head = hl.HeadLoss(terms, compile=compile)
        local = x.view(2, -1, V).clone().requires_grad_()
        out = head(local, labels, inputs={name: inputs[name] for name in head.input_names})
        results.append((out.terms, torch.autograd.grad(out.loss, local)[0]))
    torch.testing.assert_close(*results, rtol=2e-5, atol=1e-6)
    torch._dynamo.reset()


def test_a_compiled_head_can_be_copied_and_saved():
    x, labels = rows("cpu")
    head = hl.HeadLoss([hl.CrossEntropy(label_smoothing=0.1)], metrics=("entropy",), compile=True)
    loss = head(x, labels).loss
    for copied in (copy.deepcopy(head), head):
        torch.testing.assert_close(copied(x, labels).loss, loss)
    state = head.__getstate__()
    assert state["_evaluate"] is None and head._evaluate is not None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_a_compiler_that_is_missing_is_told_with_the_option_that_needs_it(monkeypatch):
    def no_compiler(*args):
        raise InductorError(RuntimeError("no working C++ compiler"), None)

    monkeypatch.setattr(torch, "compile", lambda function: no_compiler)
    x, labels = rows("cpu")
    own = hl.Term("own", lambda stats: -stats.log_prob.exp())
    with pytest.raises(InductorError) as found:
        hl.HeadLoss([own], compile=True)(x, labels)
    assert "HeadLoss(compile=True) compiles the PyTorch of terms" in found.value.__notes__[0]


def test_a_policy_loss_compiles_without_graph_breaks(device):
    x, labels = rows(device)
    inputs = policy_inputs(labels.view(2, -1))
    head = policy_head()
    eager = policy_step(head, x, labels, inputs)[:2]

    def step(local):
        return head(local, labels.view(2, -1), inputs=inputs).loss

    local = x.view(2, -1, V).clone().requires_grad_()
    loss = torch.compile(step, fullgraph=True, backend="aot_eager")(local)
    torch.testing.assert_close(
        (loss.detach(), *torch.autograd.grad(loss, local)), eager, rtol=2e-5, atol=1e-6
    )


def drawn(x):
    rule, positions = hl.SamplingRule(top_k=9, top_p=0.9), torch.arange(len(x), device=x.device)
    draw, kept = (
        hl.sample(x * 2.0, seed=3, positions=positions, rule=rule),
        hl.kept_ids(x * 2.0, rule),
    )
    return (
        draw.ids + 1,
        draw.log_probs * 2.0,
        *(t + 1 for t in (draw.sets.ids, draw.sets.spans, kept.ids, kept.spans)),
    )


def test_a_draw_breaks_the_graph_of_what_is_around_it_and_is_the_same(device):
    counter = CompileCounter()
    x, _ = rows(device)
    compiled = torch.compile(drawn, backend=counter)
    for a, b in zip(drawn(x), compiled(x), strict=True):
        assert torch.equal(a, b)
    assert 1 <= counter.frame_count <= 3  # before, between and after the two calls
    with pytest.raises(Exception, match="sizes that only the logits' values tell"):
        torch.compile(drawn, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()
