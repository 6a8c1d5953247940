"""DTensors everywhere: logits Shard(-1) and weights Shard(0), 1-D and 2-D meshes, against torch's
own loss parallel."""

import contextlib
import re

import pytest
import torch
import torch.nn.functional as F
from pages import marked_block
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

import tp_headloss as hl
from tp_headloss.arguments.id_sets import ragged

H = 24


def meshed(device, dp, tp):
    """A mesh of tokens x vocabulary, 1-D without replicas."""
    if dp == 1:
        return init_device_mesh(device.type, (tp,), mesh_dim_names=("tp",))
    return init_device_mesh(device.type, (dp, tp), mesh_dim_names=("dp", "tp"))


def model_of(device, mesh, vocab, bias):
    """hidden @ body, then the head; the head's parameters are DTensors on the whole mesh."""
    torch.manual_seed(1)
    body, head = nn.Linear(H, H, bias=False), nn.Linear(H, vocab, bias=bias)
    model = nn.ModuleDict({"body": body, "head": head}).to(device)
    others = [Replicate()] * (mesh.ndim - 1)
    for module, last in ((model.body, Replicate()), (model.head, Shard(0))):
        for name, p in list(module.named_parameters()):
            module.register_parameter(
                name, nn.Parameter(distribute_tensor(p.detach(), mesh, [*others, last]))
            )
    return model


def tokens(device, mesh, vocab):
    """Hidden states [8, H] and labels [8], sharded over the replicas; one label is ignored."""
    generator = torch.Generator().manual_seed(5)
    x, y = (
        torch.randn(8, H, generator=generator),
        torch.randint(0, vocab, (8,), generator=generator),
    )
    y[2] = -100
    split = [Shard(0)] * (mesh.ndim - 1) + [Replicate()]
    return [distribute_tensor(z.to(device), mesh, split) for z in (x, y)]


def gradients(model):
    return [
        p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()
    ]


def worst(ours, theirs):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def against_loss_parallel(group, device, dp, tp, vocab, how):
    mesh = meshed(device, dp, tp)
    stock, model = (
        model_of(device, mesh, vocab, how == "bias"),
        model_of(device, mesh, vocab, how == "bias"),
    )
    hidden, labels = tokens(device, mesh, vocab)
    with loss_parallel() if dp == 1 else contextlib.nullcontext():
        logits = stock.head(stock.body(hidden))
        if dp > 1:  # loss_parallel is for one dimension, before torch 2.13
            logits = logits.redistribute(placements=labels.placements)
        theirs = F.cross_entropy(logits, labels, reduction="sum")
        theirs.backward()
        theirs = theirs.full_tensor()
    states = model.body(hidden)
    head_loss = hl.HeadLoss(reduction="sum")
    if how == "logits":
        out = head_loss(model.head(states), labels)
    else:
        mode = "recompute" if how == "recompute" else "auto"
        out = head_loss.linear(
            states, model.head.weight, labels, bias=model.head.bias, linear=hl.Linear(mode=mode)
        )
    out.loss.backward()
    assert type(out.loss) is torch.Tensor and type(out.stats.log_prob) is torch.Tensor
    loss = out.loss.detach().clone()
    if dp > 1:  # a plain loss is of this rank's tokens
        torch.distributed.all_reduce(loss, group=mesh.get_group("dp"))
    ours, reference = gradients(model), gradients(stock)
    wrong = [*ours]
    wrong[1] = 1.01 * wrong[1]
    return float(abs(loss - theirs) / theirs), worst(ours, reference), worst(wrong, reference)


@pytest.mark.parametrize("dp, tp", [(1, 2), (2, 2)])
@pytest.mark.parametrize(
    "how, vocab", [("logits", 61), ("logits", 64), ("recompute", 61), ("linear", 61), ("bias", 64)]
)
def test_losses_and_all_gradients_equal_those_of_loss_parallel(dp, tp, how, vocab):
    for loss, grads, mutant in on_ranks(dp * tp, against_loss_parallel, dp, tp, vocab, how):
        assert loss < 1e-6 and grads < 1e-6
        assert mutant > 5e-3  # one percent of dW would be seen


def everywhere(group, device):
    mesh = meshed(device, 1, 2)
    torch.manual_seed(3)
    whole, teacher, x, w = (
        torch.randn(6, 61),
        torch.randn(6, 61),
        torch.randn(6, H),
        torch.randn(61, H),
    )
    whole, teacher, x, w = (z.to(device) for z in (whole, teacher, x, w))
    labels, bias = torch.arange(6, device=device) * 10, torch.randn(61, device=device)
    logits, of_teacher, w_shard, b_shard = (
        distribute_tensor(z, mesh, [Shard(d)])
        for z, d in ((whole, 1), (teacher, 1), (w, 0), (bias, 0))
    )
    shared, states = (distribute_tensor(z, mesh, [Replicate()]) for z in (labels, x))
    pairs = {
        "statistics": lambda z, y, _, b: (
            hl.vocab_statistics(z, y, want=("entropy",), transform=hl.Transform(b)).entropy
        ),
        "log_probs": lambda z, y, *_: hl.log_probs(z, y).log_prob,
        "topk": lambda z, *_: hl.topk_log_probs(z, 5).log_probs,
        "distilled": lambda z, y, t, _: (
            hl.HeadLoss([hl.Distillation()])(z, y, inputs={"teacher": hl.Teacher(t)}).loss
        ),
    }
    errors = {}
    for name, function in pairs.items():
        ours = function(logits, shared, of_teacher, b_shard)
        errors[name] = float((ours - function(whole, labels, teacher, bias)).abs().max())
    # which of the two says that both ranks hold these tokens
    for name, given, shard in (
        ("hidden", states, None),
        ("shard", x, hl.VocabShard.from_mesh(mesh, 61)),
    ):
        lse = hl.linear_vocab_statistics(given, w_shard, shared, shard=shard).lse
        errors[f"linear, {name}"] = float((lse - (x @ w.T).logsumexp(-1)).abs().max())
        top, expected = (
            hl.topk_log_probs(given, 5, weight=w_shard, shard=shard),
            hl.topk_log_probs(x, 5, weight=w),
        )
        errors[f"topk, {name}"] = float((top.log_probs - expected.log_probs).abs().max())
    numbers = [
        distribute_tensor(torch.tensor(z, device=device), mesh, [Replicate()]) for z in (7.0, 0.5)
    ]
    total_weight = distribute_tensor(bias, mesh, [Shard(0)])
    total = hl.vocab_statistics(logits, shared, want=("total",), total_weight=total_weight).total
    errors["total"] = float((total - whole @ bias).abs().max())
    states, linear = states.requires_grad_(), hl.Linear(upstream=numbers[1])
    of_logits = hl.HeadLoss()(logits, shared, denominator=numbers[0]).loss
    of_states = (
        hl.HeadLoss().linear(states, w_shard, shared, denominator=numbers[0], linear=linear).loss
    )
    for name, z, loss in (("denominator", whole, of_logits), ("upstream", x @ w.T, of_states)):
        assert type(loss) is torch.Tensor
        errors[name] = float(abs(loss - hl.HeadLoss()(z, labels, denominator=7.0).loss))
    return errors


def test_every_entry_takes_dtensors():
    for errors in on_ranks(2, everywhere):
        assert max(errors.values()) < 1e-5, errors


def drawn(group, device, dp):
    """Ids, sets and log-probs over them, of DTensors and of plain tensors."""
    mesh = meshed(device, dp, 2)
    torch.manual_seed(3)
    x, top_p = torch.randn(2, 4, 61).to(device), torch.rand(2, 4).to(device)
    positions, rule = (
        torch.arange(8, device=device).view(2, 4),
        hl.SamplingRule(top_k=7, top_p=top_p),
    )
    expected = hl.sample(x, seed=1, positions=positions, rule=rule)
    here = (
        slice(None) if dp == 1 else slice(mesh.get_local_rank("dp"), mesh.get_local_rank("dp") + 1)
    )
    replicas = [Shard(0)] * (dp > 1)
    tokens = [*replicas, Replicate()]
    logits = distribute_tensor(x, mesh, [*replicas, Shard(-1)])
    rule = hl.SamplingRule(top_k=7, top_p=distribute_tensor(top_p, mesh, tokens))
    draw = hl.sample(
        logits, seed=1, positions=distribute_tensor(positions, mesh, tokens), rule=rule
    )
    found = (
        draw.ids,
        hl.kept_ids(logits, rule).contains(expected.ids[here]),
        draw.sets.contains(expected.ids[here]),
    )
    sets = ragged(draw.sets.ids, distribute_tensor(expected.sets.spans, mesh, tokens))
    if dp > 1:  # bounds are of the ids that these ranks have
        sets = draw.sets
    labels = distribute_tensor(expected.ids, mesh, tokens)
    over = hl.vocab_statistics(logits, labels, want=("set_log_prob",), sets=sets).set_log_prob
    sizes = [kept.spans.diff(dim=-1) for kept in (draw.sets, expected.sets[here])]
    same = (
        torch.equal(found[0], expected.ids[here])
        and bool(found[1].all() & found[2].all())
        and torch.equal(*sizes)
    )
    return same, float(
        torch.stack([over, draw.log_probs]).sub(expected.log_probs[here]).abs().max()
    )


@pytest.mark.parametrize("dp", [1, 2])
def test_draws_and_sets_are_those_of_plain_tensors(dp):
    for same, error in on_ranks(2 * dp, drawn, dp):
        assert same and error < 1e-6


def data_parallel(group, device):
    """Tokens are sharded and the vocabulary is not: logits of other tokens, and a replicated
    weight."""
    mesh = meshed(device, 1, 2)
    torch.manual_seed(4)
    x, w, labels = (
        torch.randn(8, H, device=device),
        torch.randn(61, H, device=device),
        torch.arange(8, device=device),
    )
    exact = [z.clone().requires_grad_() for z in (x, w)]
    hl.HeadLoss(reduction="sum")(exact[0] @ exact[1].T, labels).loss.backward()
    states, ids = (distribute_tensor(z, mesh, [Shard(0)]) for z in (x, labels))
    found = []
    for from_logits in (True, False):
        operands = [
            z.detach().requires_grad_() for z in (states, distribute_tensor(w, mesh, [Replicate()]))
        ]
        head_loss = hl.HeadLoss(reduction="sum")
        out = (
            head_loss(operands[0] @ operands[1].T, ids)
            if from_logits
            else head_loss.linear(*operands, ids)
        )
        assert out.stats.log_prob.shape == (4,)
        out.loss.backward()
        found.append(worst([z.grad.full_tensor() for z in operands], [z.grad for z in exact]))
    return found


def test_tokens_may_be_sharded_alone():
    assert max(max(errors) for errors in on_ranks(2, data_parallel)) < 1e-6


def other_tokens(group, device, argument):
    """Labels, weights, inputs or teachers whose local shapes fit, and which are of other tokens
    than the logits."""
    mesh, placed = init_device_mesh(device.type, (2, 2)), {}
    for name in ("hidden", "labels", "weight", "advantages", "teacher", "top_p"):
        torch.manual_seed(1)
        sizes = {"labels": (), "weight": (), "advantages": (), "top_p": ()}.get(name, (6,))
        x = torch.rand(4, 4, *sizes, device=device)
        if name == "labels":
            x = torch.arange(16, device=device).view(4, 4) % 6
        placed[name] = distribute_tensor(
            x, mesh, [Shard(1), Shard(0)] if name == argument else [Shard(0), Shard(1)]
        )
    weight = distribute_tensor(torch.randn(6, 6, device=device), mesh, [Replicate()] * 2)
    inputs = {
        "advantages": placed["advantages"],
        "teacher": hl.TeacherHead(placed["teacher"], weight.to_local()),
    }
    terms = [
        hl.Term(
            "reinforce",
            lambda stats, advantages: -advantages * stats.log_prob,
            inputs=("advantages",),
        )
    ]
    hl.HeadLoss([*terms, hl.Distillation()]).linear(
        placed["hidden"], weight, placed["labels"], token_weight=placed["weight"], inputs=inputs
    )
    hl.kept_ids(placed["hidden"], hl.SamplingRule(top_p=placed["top_p"]))


@pytest.mark.parametrize("argument", ["labels", "weight", "advantages", "teacher", "top_p", None])
def test_all_arguments_are_of_the_same_tokens(argument):
    for failure in on_ranks(4, other_tokens, argument, failures=argument is not None):
        assert argument is None or (
            failure.kind == "ValueError" and "of the same tokens" in failure.message
        )


def fully_sharded(group, device):
    """A head that FSDP2 shards, outside and inside of its own call; each rank has tokens of its
    own."""
    torch.manual_seed(0)
    head = nn.Linear(H, 32, bias=False).to(device)
    whole = head.weight.detach().clone()
    fully_shard(head, mesh=meshed(device, 1, 2))
    torch.manual_seed(torch.distributed.get_rank())
    x, labels = torch.randn(5, H, device=device), torch.randint(0, 32, (5,), device=device)
    with pytest.raises(ValueError, match="after its unshard"):
        hl.HeadLoss().linear(x, head.weight, labels)
    head.unshard()
    return float(
        hl.HeadLoss().linear(x, head.weight, labels).loss - F.cross_entropy(x @ whole.T, labels)
    )


def test_a_weight_that_fsdp_shards_is_refused_until_it_is_whole():
    assert max(map(abs, on_ranks(2, fully_sharded))) < 1e-6


def partial_hidden_gradient(group, device):
    """Sequence parallelism, and a host that adds up dH itself."""
    mesh = meshed(device, 1, 2)
    torch.manual_seed(4)
    x, w = torch.randn(8, H, device=device), torch.randn(61, H, device=device)
    labels = torch.arange(8, device=device)
    plain = x.clone().requires_grad_()
    hl.HeadLoss().linear(plain, w, labels).loss.backward()
    weight, out = distribute_tensor(w, mesh, [Shard(0)]), []
    for placement, how in (
        (Replicate(), "all_reduce"),
        (Replicate(), "none"),
        (Shard(0), "reduce_scatter"),
    ):
        states = distribute_tensor(x, mesh, [placement]).requires_grad_()
        hl.HeadLoss().linear(
            states, weight, labels, linear=hl.Linear(hidden_grad=how)
        ).loss.backward()
        placed = Partial() if how == "none" else placement
        out.append(
            (states.grad.placements[0] == placed, worst([states.grad.full_tensor()], [plain.grad]))
        )
    return out


def test_the_hidden_gradient_says_how_it_is_placed():
    for results in on_ranks(2, partial_hidden_gradient):
        assert all(placed and error < 1e-6 for placed, error in results), results


# what cannot work on two ranks -> the fix that the message names, and the call: of `Refused`
REFUSED = {
    "replicated logits": (r"output_layouts=Shard\(-1\).*logits.to_local\(\)|logits.to_local\(\).*output_layouts=",
                          lambda on: hl.HeadLoss()(on.logits(Replicate()), on.labels)),
    # of other tokens on each rank, if FSDP sharded the weight
    "plain hidden states": (r"VocabShard.from_mesh\(mesh, 64, dim\).*module that FSDP manages",
                            lambda on: hl.HeadLoss().linear(on.x, on.weight(), on.labels)),
    "plain hidden states to sample": (r"VocabShard.from_mesh\(mesh, 64, dim\).*module that FSDP manages",
                                      lambda on: hl.topk_log_probs(on.x, 3, weight=on.weight())),
    "replicated weight": ("pass a plain weight",
                          lambda on: hl.HeadLoss().linear(on.x, on.weight(Replicate()), on.labels)),
    "partial denominator": ("denominator must be replicated", lambda on: hl.HeadLoss()(
        on.logits(), on.labels, denominator=DTensor.from_local(torch.tensor(4.0), on.mesh, [Partial()]))),
    "row-wise weight": (r"distribute it with Shard\(0\)",
                        lambda on: hl.HeadLoss().linear(on.x, on.weight(Shard(1)), on.labels)),
    "partial hidden states": (r"redistribute to Replicate\(\)", lambda on: hl.HeadLoss().linear(
        DTensor.from_local(on.x, on.mesh, [Partial()]), on.weight(), on.labels)),
    "hidden states sharded on tokens": ("hidden_grad='reduce_scatter'",
                                        lambda on: hl.HeadLoss().linear(on.states(), on.weight(), on.labels)),
    "another shard": ("VocabShard.from_mesh", lambda on: hl.HeadLoss()(
        on.logits(), on.labels, shard=hl.VocabShard.from_group(on.group, 61, padded_size=72))),
    "another group": ("leave the shard out", lambda on: hl.HeadLoss()(
        on.logits(), on.labels, shard=hl.VocabShard(0, 64, 64))),
    # of rank 0 the bounds are the same
    "another padding": ("leave the shard out", lambda on: hl.HeadLoss()(
        on.logits(), on.labels, shard=hl.VocabShard.from_group(on.group, 63))),
    "uneven tokens": ("even shards", lambda on: hl.linear_vocab_statistics(
        on.states(5), on.weight(), linear=hl.Linear(hidden_grad="reduce_scatter"))),
    "sharded labels": (r"Replicate\(\)", lambda on: hl.HeadLoss()(
        on.logits(), distribute_tensor(on.labels, on.mesh, [Shard(0)]))),
}  # fmt: skip


class Refused:
    """Tensors of a call, and how they are placed on a mesh of two ranks."""

    def __init__(self, group, device):
        self.group, self.mesh = group, meshed(device, 1, 2)
        self.x, self.w, self.z = (
            torch.randn(size, device=device) for size in ((8, H), (64, H), (8, 64))
        )
        self.labels = torch.arange(8, device=device)

    def logits(self, placement=Shard(1)):  # noqa: B008
        return distribute_tensor(self.z, self.mesh, [placement])

    def weight(self, placement=Shard(0)):  # noqa: B008
        return distribute_tensor(self.w, self.mesh, [placement])

    def states(self, tokens=8):
        return distribute_tensor(self.x[:tokens], self.mesh, [Shard(0)])


def refused(group, device, case):
    REFUSED[case][1](Refused(group, device))


@pytest.mark.parametrize("case", REFUSED)
def test_placements_that_cannot_work_are_refused_with_the_fix(case):
    for failure in on_ranks(2, refused, case, failures=True):
        assert failure.kind == "ValueError" and re.search(REFUSED[case][0], failure.message), (
            failure
        )


def on_four(group, device, case):
    """A call on a mesh of 2 x 2."""
    mesh = meshed(device, 2, 2)
    x, labels = torch.randn(8, H, device=device), torch.arange(8, device=device)
    if case == "a weight on both dimensions":  # and plain hidden states: what do the others hold?
        weight, shard = (
            model_of(device, mesh, 64, False).head.weight,
            hl.VocabShard.from_mesh(mesh, 64, "tp"),
        )
        hl.HeadLoss([hl.CrossEntropy()]).linear(x, weight, labels, shard=shard)
    elif case == "hidden states that are partial over another dimension":
        weight = distribute_tensor(torch.randn(64, H, device=device), mesh["tp"], [Shard(0)])
        hidden = DTensor.from_local(x[:4], mesh, [Partial(), Shard(0)])
        hl.HeadLoss().linear(hidden, weight, labels, linear=hl.Linear(hidden_grad="reduce_scatter"))
    elif case == "a shard of another group":  # two of the four ranks hold the same ids in both
        logits = distribute_tensor(torch.randn(8, 64, device=device), mesh, [Replicate(), Shard(1)])
        hl.HeadLoss()(logits, labels, shard=hl.VocabShard.from_mesh(mesh, 64, "dp"))
    else:  # the first dimension shards the vocabulary, and cuts the tokens before the replicas do
        mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("tp", "dp"))
        states = distribute_tensor(x, mesh, [Shard(0), Shard(0)])
        weight = distribute_tensor(torch.randn(64, H, device=device), mesh, [Shard(0), Replicate()])
        labels = distribute_tensor(labels, mesh, [Replicate(), Shard(0)])
        hl.HeadLoss().linear(states, weight, labels, linear=hl.Linear(hidden_grad="reduce_scatter"))


@pytest.mark.parametrize(
    "case, words",
    {
        "a weight on both dimensions": "submesh of the vocabulary",
        "hidden states that are partial over another dimension": "must be whole",
        "a shard of another group": "leave the shard out",
        "tokens that would be interleaved": "after all others that shard",
    }.items(),
)
def test_meshes_that_cannot_work_are_refused_on_every_rank(case, words):
    for failure in on_ranks(4, on_four, case, failures=True):
        assert failure.kind == "ValueError" and words in failure.message


def vocabulary_of_one_rank(group, device):
    """Replicas, and a vocabulary dimension of one rank."""
    mesh = init_device_mesh(device.type, (2, 1), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(2)
    x, w, labels = (
        torch.randn(8, H, device=device),
        torch.randn(64, H, device=device),
        torch.arange(8, device=device),
    )
    states = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    weight = distribute_tensor(w, mesh, [Replicate(), Shard(0)])
    out = hl.HeadLoss(reduction="sum").linear(
        states, weight, distribute_tensor(labels, mesh, [Shard(0), Replicate()])
    )
    mine = slice(4 * group.rank(), 4 * group.rank() + 4)
    return float(out.loss - hl.HeadLoss(reduction="sum").linear(x[mine], w, labels[mine]).loss)


def test_a_vocabulary_dimension_of_one_rank_is_no_sharding():
    assert max(map(abs, on_ranks(2, vocabulary_of_one_rank))) < 1e-4


def compiled(group, device):
    """In one graph, without breaks, inside a model that is compiled as a whole."""
    mesh = meshed(device, 1, 2)
    torch.manual_seed(3)
    z, labels = torch.randn(6, 64, device=device), torch.arange(6, device=device)
    results = []
    for function in (lambda x: x, lambda x: torch.compile(x, fullgraph=True, backend="aot_eager")):
        logits = distribute_tensor(z, mesh, [Shard(1)]).requires_grad_()
        loss = function(lambda x: hl.HeadLoss()(x * 1.5, labels).loss)(logits)
        loss.backward()
        results.append((loss.detach(), logits.grad.to_local()))
    return worst(*results)


def test_dtensors_compile_without_graph_breaks():
    assert max(on_ranks(2, compiled)) < 1e-6


def documented(group, device):
    scope = {"torch": torch, "mesh": meshed(device, 1, 2)}
    exec(compile(marked_block("host", "dtensor"), "docs", "exec"), scope)
    x, w = (scope[name].detach().full_tensor().requires_grad_() for name in "xw")
    (2 * hl.HeadLoss()(x @ w.T, scope["labels"]).loss).backward()
    found = [scope[name].grad.full_tensor() for name in "xw"]
    return (
        worst(found, [x.grad, w.grad]),
        scope["w"].to_local().shape[0],
        str(scope["w"].grad.placements),
    )


def test_the_block_of_the_documentation_runs():
    if torch.cuda.is_available():
        pytest.skip("it makes its tensors on CPU")
    for (error, rows, placed), expected in zip(on_ranks(2, documented), (255, 254)):
        assert error < 1e-6 and rows == expected and "0" in placed
