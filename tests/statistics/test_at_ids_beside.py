"""Log-probs of given ids, alone and in one call with statistics over sets, of a top-K teacher, or
both, in float64: values, gradients, every carrier, equal bits at any number of ranks."""

import oracle
import pytest
import torch
import torch.nn.functional as F
from collectives import counted_collectives
from ranks import on_ranks
from sets_problem import NAMES, N, V, gradient, padded, ragged, rows, truth
from topk_oracle import BETA

from tp_headloss import (
    HeadLoss,
    IdSets,
    Linear,
    Options,
    Term,
    TopKTeacher,
    Transform,
    VocabShard,
    vocab_statistics,
)

K, H = 7, 12
TOPK = ("topk_forward_kl", "topk_reverse_kl", "topk_jsd")
WHOLE = ("topk_log_mass", "vocab_jsd")
TAIL = ("tail_log_mass", "tail_entropy")
# beside what: statistics, and fields of the teacher
BESIDE = {
    "nothing": ((), None), "sets": (NAMES, None), "a softmax": (("set_log_prob", "set_entropy"), None),
    "entries": (TOPK, {}), "entries and vocabulary": ((*TOPK, *WHOLE), {}),
    "entries and vocabulary, at a temperature": ((*TOPK, *WHOLE), {"temperature": 1.7, "student_temperature": 0.6}),
    "a tail": ((*TOPK, *TAIL), {"renormalize": False, "student_temperature": 1.4}),
    "sets and entries": ((*NAMES, *TOPK, *WHOLE), {}),
    "a softmax and a tail": ((*NAMES[:2], *TOPK, *TAIL), {"renormalize": False, "student_temperature": 1.4}),
}  # fmt: skip


def problem():
    """Logits, labels, sets and ids: members, the label, others, each several times, and none."""
    x, labels, sets = rows()
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, V, (N, K), generator=generator)
    ids[:, 0] = ids[:, 4] = torch.tensor([members[0] for members in sets])  # twice
    ids[:, 1] = torch.where(labels >= 0, labels, 3)
    ids[1, 2], ids[4, 5], ids[6, 6] = -1, -7, ids[6, 3]
    x.masked_fill_(x == -torch.inf, -9.0)
    return x, labels, sets, ids


def entries():
    """Ids [N, 5] of a teacher, the first two given ids, and their log-probs."""
    _, _, _, ids = problem()
    generator = torch.Generator().manual_seed(9)
    own = torch.stack([torch.randperm(V, generator=generator)[:5] for _ in range(N)])
    for i in range(N):
        own[i, :2] = ids[i, [0, 3]] if ids[i, 0] != ids[i, 3] else own[i, :2]
        assert own[i].unique().numel() == 5
    return own, 0.9 * torch.randn(N, 5, generator=generator).log_softmax(-1) - 0.3


def upstream(names):
    """Gradients by name: [N], those of log_probs_at [N, K]."""
    generator = torch.Generator().manual_seed(3)
    out = {name: torch.randn(N, generator=generator) for name in (*names, "log_prob", "entropy")}
    return out | {"log_probs_at": torch.randn(N, K, generator=generator)}


def run(
    group,
    device,
    backend,
    beside,
    form="csr",
    dtype=torch.float32,
    transformed=False,
    inplace=False,
):
    (names, fields), (x, labels, sets, ids) = BESIDE[beside], problem()
    ids = ids.int() if form == "padded" else ids
    shard = VocabShard.from_group(group, V, 256)
    here = slice(shard.start, shard.stop)
    leaf = F.pad(x, (0, 56), value=40.0)[:, here].to(device, dtype).clone().requires_grad_()
    local = leaf * 1.0 if inplace else leaf
    given = (
        {"sets": (ragged(sets) if form == "csr" else padded(sets)).to(device)}
        if {*names} & {*NAMES}
        else {}
    )
    if fields is not None:
        given["teacher"] = TopKTeacher(
            *(part.to(device) for part in entries()), beta=BETA, **fields
        )
    transform = (
        Transform(F.pad(bias_of(), (0, 56))[here].to(device), 1.3, 9.0, 1.1)
        if transformed
        else None
    )
    with counted_collectives() as events:
        stats = vocab_statistics(
            local, labels.to(device), shard=shard, want=(*names, "entropy", "log_probs_at"), ids=ids.to(device),
            transform=transform, options=Options(backend=backend, transport="gather", inplace=inplace), **given,
        )  # fmt: skip
    grads = upstream(names)
    torch.autograd.backward(
        [getattr(stats, name) for name in grads], [g.to(device) for g in grads.values()]
    )
    values = {name: getattr(stats, name).detach().cpu() for name in grads}
    return values, leaf.grad.cpu(), sum(events.values())


def bias_of():
    return torch.linspace(-1, 1, V)


def expected(beside, dtype=torch.float32, transformed=False):
    """Values by name, and d/dx [N, V]."""
    (names, fields), (x, labels, sets, ids) = BESIDE[beside], problem()
    options = (bias_of(), 1.3, 9.0, 1.1) if transformed else ()
    z, slope = oracle.transform(x.to(dtype), *options)
    slope = slope if isinstance(slope, torch.Tensor) else torch.full_like(z, slope)
    valid, safe, grads = labels != -100, labels.clamp(min=0), upstream(names)
    grads = {name: g.double() for name, g in grads.items()}
    known, log_p = ids >= 0, z.log_softmax(-1)
    values = oracle.statistics(z, safe) | {
        "log_probs_at": torch.where(known, log_p.gather(1, ids.clamp(min=0)), 0.0)
    }
    softmax = {name: grads[name] for name in ("log_prob", "entropy")}
    at = torch.where(known, grads["log_probs_at"], 0.0)
    dz = (
        torch.zeros_like(z).scatter_add(1, ids.clamp(min=0), at)
        - at.sum(1, keepdim=True) * log_p.exp()
    )
    dx = dz * slope + oracle.gradient(z, slope, safe, softmax)
    of_sets, of_entries = (
        {name: grads[name] for name in names if (name in NAMES) == own} for own in (True, False)
    )
    if of_sets:
        values |= truth(z, safe, sets)
        dx += gradient(z, slope, safe, sets, of_sets)
    if of_entries:
        over, dz = of_teacher(z, 1.1 if transformed else 1.0, fields, of_entries)
        values, dx = values | over, dx + dz * slope
    values = {
        name: torch.where(valid if x.dim() == 1 else valid[:, None], x, 0.0)
        for name, x in values.items()
    }
    return values, torch.where(valid[:, None], dx, 0.0)


def of_teacher(z, temperature, fields, grads):
    """Statistics of the teacher of these fields, and d/dz; temperature: that z was divided by."""
    own, log_probs = entries()
    tau = torch.zeros_like(z).scatter(1, own, log_probs.double().exp())
    tau = tau ** (1 / fields.get("temperature", 1.0))
    if fields.get("renormalize", True):
        tau = tau / tau.sum(-1, keepdim=True)
    z = z.detach().requires_grad_()
    side = z * temperature / fields.get("student_temperature", fields.get("temperature", 1.0))
    values, *_ = oracle.of_entries(side, tau, BETA)
    (dz,) = torch.autograd.grad([values[name] for name in grads], z, list(grads.values()))
    return {name: values[name].detach() for name in grads}, dz


def check(results, beside, dtype=torch.float32, transformed=False):
    values, dx = expected(beside, dtype, transformed)
    for got, _, collectives in results:
        # that one has a second exchange
        assert collectives == int(len(results) > 1) * (2 if "topk_jsd" in got else 1)
        for name, found in got.items():
            assert torch.equal(found, results[0][0][name])
            torch.testing.assert_close(found.double(), values[name], rtol=4e-6, atol=4e-6)
    grad = torch.cat([grad for _, grad, _ in results], 1)
    rtol, atol = (3e-5, 3e-6) if dtype == torch.float32 else (2.0**-8, 2e-6)  # of one rounding
    torch.testing.assert_close(grad[:, :V].double(), dx, rtol=rtol, atol=atol)
    assert not grad[:, V:].any() and not grad[2].any() and dx.abs().max() > 0.1


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("beside", BESIDE)
def test_values_and_gradients_equal_float64(world_size, beside, backend):
    check(on_ranks(world_size, run, backend, beside), beside)


@pytest.mark.parametrize(
    "beside", ["nothing", "sets and entries", "entries and vocabulary, at a temperature"]
)
def test_logits_are_transformed_first_and_the_gradient_is_rounded_once(beside, backend, device):
    check(
        [run(None, device, backend, beside, "padded", torch.bfloat16, True)],
        beside,
        torch.bfloat16,
        True,
    )


@pytest.mark.parametrize("beside", ["sets", "a tail", "sets and entries"])
def test_the_gradient_may_overwrite_the_logits(beside, backend, device):
    _, grad, _ = run(None, device, backend, beside)
    assert torch.equal(run(None, device, backend, beside, inplace=True)[1], grad)


def test_no_bit_depends_on_what_is_beside_or_on_the_number_of_ranks(device, backend):
    values, grad, _ = run(None, device, backend, "sets")
    x, labels, sets, ids = problem()
    x, labels, ids = x.to(device), labels.to(device), ids.to(device)
    options, sets = Options(backend=backend), ragged(sets).to(device)
    x, given = F.pad(x, (0, 56)), {"shard": VocabShard.from_group(None, V, 256), "options": options}
    apart = vocab_statistics(x, labels, want=NAMES, sets=sets, **given)
    alone = vocab_statistics(x, labels, want=("log_probs_at",), ids=ids, **given)
    assert torch.equal(alone.log_probs_at.cpu(), values["log_probs_at"])
    assert all(torch.equal(getattr(apart, name).cpu(), values[name]) for name in NAMES)
    for world_size in (2, 4) if backend == "torch" else (2,):
        results = on_ranks(world_size, run, backend, "sets")
        assert torch.equal(torch.cat([part for _, part, _ in results], 1), grad)
        assert all(torch.equal(results[0][0][name], value) for name, value in values.items())


def test_a_set_that_is_bad_leaves_given_ids_alone(options, device):
    x, labels, _, ids = (part[:4] for part in problem())
    sets = ragged([[int(labels[0]), 5], [], [7], [V]])  # the second and the last
    leaf, given = x.to(device).requires_grad_(), {"ids": ids.to(device), "options": options}
    want = ("set_log_prob", "log_probs_at")
    stats = vocab_statistics(leaf, labels.to(device), want=want, sets=sets.to(device), **given)
    alone = vocab_statistics(leaf, labels.to(device), want=want[1:], **given)
    assert stats.set_log_prob.isnan().tolist() == [False, True, False, True]
    assert torch.equal(stats.log_probs_at, alone.log_probs_at)
    grads = [
        torch.autograd.grad(found.log_probs_at.exp().sum(), leaf, retain_graph=True)[0]
        for found in (stats, alone)
    ]
    assert torch.equal(*grads) and grads[0].isfinite().all()
    (grad,) = torch.autograd.grad(stats.set_log_prob.sum() + stats.log_probs_at.sum(), leaf)
    assert grad.isnan().any(-1).tolist() == [False, True, False, True]


def test_an_entry_that_is_the_first_id_of_the_next_tokens_set_is_no_member(device):
    x = torch.linspace(-1, 1, 18, device=device).view(2, 9)
    sets, ids = ragged([[2], [5]]).to(device), torch.tensor([[5, 3], [2, 5]], device=device)
    given = {"want": ("set_log_mass", "topk_forward_kl"), "sets": sets}
    given["teacher"] = TopKTeacher(ids, torch.tensor([[0.5, 0.5]] * 2, device=device).log())
    grads = []
    for backend in ("torch", "triton"):
        leaf = x.clone().requires_grad_()
        stats = vocab_statistics(leaf, options=Options(backend=backend), **given)
        grads += torch.autograd.grad((stats.set_log_mass + stats.topk_forward_kl).sum(), leaf)
    torch.testing.assert_close(*grads)


def _at_ids(stats, weights):
    return -(weights * stats.log_probs_at).sum(-1)


def _both(stats, weights):
    return stats.set_entropy + stats.set_log_mass + _at_ids(stats, weights)


def of_tokens(n):
    """Hidden states [n, H], a weight, labels, sets, ids [n, K] and a weight for each id."""
    generator = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(n, H, generator=generator), torch.randn(V, H, generator=generator)
    kept, ids = (torch.randint(0, V, (n, k), generator=generator) for k in (20, K))
    labels = torch.arange(n) % V
    kept[:, 0], ids[:, 0], ids[:, 1], ids[::5, 2], labels[3] = labels, kept[:, 1], labels, -1, -100
    return hidden, weight, labels, kept, ids, torch.arange(1.0 * n * K).view(n, K) / n


def head_loss(group, device, backend, mode, with_sets, n, budget):
    """Loss, d / d hidden and d / d weight of this rank, and log-probs at the ids."""
    hidden, weight, labels, kept, ids, weights = (x.to(device) for x in of_tokens(n))
    shard = VocabShard.from_group(group, V)
    local = weight[shard.start : shard.stop].clone().requires_grad_()
    hidden.requires_grad_()
    want = ("set_entropy", "set_log_mass", "log_probs_at") if with_sets else ("log_probs_at",)
    term = Term(
        "own", _both if with_sets else _at_ids, want=want, inputs=("weights",), tokenwise=True
    )
    head = HeadLoss([term], options=Options(backend=backend))
    given = {
        "shard": shard,
        "inputs": {"ids": ids, "weights": weights} | ({"sets": IdSets(kept)} if with_sets else {}),
    }
    if mode == "logits":
        out = head(hidden @ local.t(), labels, **given)
    else:
        options = {"max_valid_tokens": n} if mode == "valid" else {"mode": mode}
        out = head.linear(hidden, local, labels, linear=Linear(budget=budget, **options), **given)
    out.loss.backward()
    grad = hidden.grad
    if mode == "logits" and group is not None:  # which the caller sums
        torch.distributed.all_reduce(grad, group=group)
    return (
        out.loss.detach().cpu(),
        grad.cpu(),
        local.grad.cpu(),
        out.stats.log_probs_at.detach().cpu(),
    )


@pytest.mark.parametrize("with_sets", [False, True])
@pytest.mark.parametrize("mode", ["logits", "recompute", "one_sweep", "valid"])
def test_a_term_of_ids_with_and_without_sets(mode, with_sets, backend):
    """In plain torch from hidden states by several blocks of tokens."""
    n, budget = (
        (6, 200_000) if mode in ("valid", "logits") or backend == "triton" else (300, 140_000)
    )
    results = on_ranks(
        2 if backend == "torch" else 1, head_loss, backend, mode, with_sets, n, budget
    )
    hidden, weight, labels, kept, ids, weights = of_tokens(n)
    hidden, weight = (x.double().requires_grad_() for x in (hidden, weight))
    log_p = (hidden @ weight.t()).log_softmax(-1)
    at_ids = log_p.gather(1, ids.clamp(min=0)) * (ids >= 0)
    per_token = -(at_ids * weights).sum(-1)
    if with_sets:
        inside = torch.zeros(n, V, dtype=torch.bool).scatter(1, kept, True)
        over = torch.where(inside, log_p, -torch.inf)
        per_token = per_token - (
            over.softmax(-1) * torch.where(inside, over.log_softmax(-1), 0.0)
        ).sum(-1)
        per_token = per_token + over.logsumexp(-1)
    loss = per_token[labels != -100].mean()
    dh, dw = torch.autograd.grad(loss, (hidden, weight))
    for got, grad, _, found in results:
        torch.testing.assert_close(got.double(), loss.detach(), rtol=1e-5, atol=1e-5)
        expected = torch.where(labels[:, None] != -100, at_ids.detach(), 0.0)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad.double(), dh, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(
        torch.cat([r[2] for r in results]).double(), dw, rtol=1e-4, atol=2e-5
    )


def test_an_input_of_another_term_may_be_named_ids():
    x, labels, ids = torch.zeros(3, V), torch.zeros(3, dtype=torch.int64), torch.ones(3)
    term = Term("own", lambda stats, ids: stats.lse * ids, inputs=("ids",))
    loss = HeadLoss([term])(x, labels, inputs={"ids": ids}).loss
    torch.testing.assert_close(loss, torch.zeros(V).logsumexp(0))


def test_ids_that_are_given_as_sets_are_told_where_they_go():
    with pytest.raises(ValueError, match=r"need ids .* got none: ids=ids"):
        vocab_statistics(torch.zeros(2, V), torch.zeros(2, dtype=torch.int64), want=("log_probs_at",),
                         sets=IdSets(torch.zeros(2, 3, dtype=torch.int64)))  # fmt: skip
