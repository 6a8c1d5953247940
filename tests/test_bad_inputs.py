"""Odd inputs at one and two ranks: the right answer, or the same exception on every rank. Nothing silent, no hang.

The reference is torch.nn.functional.cross_entropy in float64 on the whole rows. Where this library promises something
else (an ignored row is 0 whatever it holds; a bad label is NaN) the case says so in `expected`.
"""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from ranks import Failure, on_ranks

from tp_headloss import CrossEntropy, HeadLoss, Options, VocabShard, vocab_statistics

V, HALF, N = 64, 32, 6
INF, NAN = float("inf"), float("nan")


class Case(NamedTuple):
    x: torch.Tensor
    labels: torch.Tensor
    nan_rows: tuple = ()  # rows that must be NaN, in loss and gradient
    zero_rows: tuple = ()  # rows that must be 0, in loss and gradient
    ignore_index: int = -100
    upstream: str = "random"
    layout: str = "contiguous"
    smoothing: float = 0.0
    backwards: int = 1
    entropy: bool = False
    raises: str = ""


def rows(**edits):
    """Six random rows, labels in both halves; `edits` replace fields of the case."""
    x = torch.randn(N, V, generator=torch.Generator().manual_seed(3)) * 2
    labels = torch.tensor([1, 40, 31, 32, 0, 63])
    return Case(x, labels)._replace(**edits)


def edited(row, columns, value, **fields):
    case = rows(**fields)
    x = case.x.clone()
    x[row, columns] = value
    return case._replace(x=x)


def relabelled(row, label, **fields):
    case = rows(**fields)
    labels = case.labels.clone()
    labels[row] = label
    return case._replace(labels=labels)


LEFT, RIGHT, ALL = slice(0, HALF), slice(HALF, V), slice(None)
CASES = {
    "random": rows(),
    "targets on shard edges": rows(labels=torch.tensor([0, 31, 32, 63, 31, 32])),
    "first shard all -inf": edited(1, LEFT, -INF),
    "second shard all -inf": edited(0, RIGHT, -INF),
    "first shard all -inf, every row": edited(ALL, LEFT, -INF, labels=torch.tensor([33, 40, 50, 32, 60, 63])),
    "row all -inf": edited(2, ALL, -INF, nan_rows=(2,)),
    "target -inf": edited(2, 31, -INF),
    "all but the target -inf": edited(2, [c for c in range(V) if c != 31], -INF),
    "+inf": edited(3, 5, INF, nan_rows=(3,)),
    "+inf at the target": edited(3, 32, INF, nan_rows=(3,)),
    "NaN on rank 0": edited(3, 5, NAN, nan_rows=(3,)),
    "NaN on rank 1": edited(3, 50, NAN, nan_rows=(3,)),
    "NaN at the target": edited(2, 31, NAN, nan_rows=(2,)),
    "NaN and -inf only": rows(x=torch.full((N, V), -INF).index_fill(1, torch.tensor(7), NAN), nan_rows=tuple(range(N))),
    "logits x 1e4": rows(x=rows().x * 1e4),
    "+-3e38": rows(x=rows().x.sign() * 3e38),
    "shift of -1e4": rows(x=(rows().x * 8).round() / 8 - 1e4),
    "margin of 40": edited(2, 31, 45.0),
    "some ignored": relabelled(2, -100, zero_rows=(2,)),
    "all ignored": rows(labels=torch.full((N,), -100), zero_rows=tuple(range(N))),
    "NaN in an ignored row": edited(2, 5, NAN, zero_rows=(2,), labels=torch.tensor([1, 40, -100, 32, 0, 63])),
    "label V": relabelled(2, V, nan_rows=(2,)),
    "label -1": relabelled(2, -1, nan_rows=(2,)),
    "label 2^40": relabelled(2, 1 << 40, nan_rows=(2,)),
    "label -2^40": relabelled(2, -(1 << 40), nan_rows=(2,)),
    "ignore_index is a valid id": rows(ignore_index=31, zero_rows=(2,)),
    "ignore_index is -1": relabelled(2, -1, ignore_index=-1, zero_rows=(2,)),
    "ignore_index is V": relabelled(2, V, ignore_index=V, zero_rows=(2,)),
    "int32 labels": rows(labels=rows().labels.int()),
    "empty batch": rows(x=rows().x[:0], labels=rows().labels[:0]),
    "V = 65": rows(x=F.pad(rows().x, (1, 0), value=0.5), labels=torch.tensor([0, 32, 33, 64, 1, 63])),
    "V = 1": rows(x=torch.linspace(-3, 3, N)[:, None], labels=torch.zeros(N, dtype=torch.long)),
    "transposed logits": rows(layout="transposed"),
    "column-strided logits": rows(layout="columns"),
    "sliced rows": rows(layout="sliced"),
    "broadcast rows": rows(x=rows().x[:1].expand(N, V), layout="expanded"),
    "misaligned": rows(layout="misaligned"),
    "stride-0 upstream": rows(upstream="expanded"),
    "strided upstream": rows(upstream="strided"),
    "NaN upstream on an ignored row": relabelled(2, -100, zero_rows=(2,), upstream="nan at 2"),
    "zero upstream": rows(upstream="zero"),
    "two backwards": rows(backwards=2),
    "bf16": rows(x=rows().x.bfloat16()),
    "fp16": rows(x=rows().x.half()),
    "fp16 gradient overflow": rows(x=rows().x.half(), upstream="huge"),
    "fp64": rows(x=rows().x.double()),
    "label smoothing": rows(smoothing=0.1),
    "label smoothing and -inf columns": edited(1, LEFT, -INF, smoothing=0.1),
    "label smoothing, -inf columns and a shift": edited(1, LEFT, -INF, smoothing=0.1)._replace(
        x=(edited(1, LEFT, -INF).x * 8).round() / 8 + 100.0),
    "int32 labels, ignore_index beyond int32": rows(labels=rows().labels.int(), ignore_index=1 << 40),
    "entropy across the whole range": rows(x=rows().x.sign() * 3e38, entropy=True),
    "float labels": rows(labels=rows().labels.float(), raises="TypeError"),
    "int8 labels": rows(labels=rows().labels.char(), raises="TypeError"),
    "integer logits": rows(x=rows().x.long(), raises="TypeError"),
    "one label too few": rows(labels=rows().labels[1:], raises="ValueError"),
    "labels of another shape": rows(labels=rows().labels.view(2, 3), raises="ValueError"),
}  # fmt: skip


def lay_out(x, layout):
    if layout == "transposed":
        return x.T.contiguous().T
    if layout == "columns":
        return torch.repeat_interleave(x, 3, 1)[:, 1::3]
    if layout == "sliced":
        return F.pad(x, (3, 5), value=9.0)[:, 3 : 3 + x.shape[1]]
    if layout == "misaligned":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    if layout == "expanded":
        return x[:1].clone().expand(x.shape)
    return x.contiguous()


def upstream_of(case):
    n = len(case.labels)
    g = torch.randn(n, 2, generator=torch.Generator().manual_seed(5))
    if case.upstream == "expanded":
        return torch.tensor(0.37).expand(n)
    if case.upstream == "strided":
        return g[:, 1]
    if case.upstream == "nan at 2":
        return torch.where(torch.arange(n) == 2, NAN, g[:, 0])
    return {"zero": torch.zeros(n), "huge": torch.full((n,), 1e6), "random": g[:, 0].contiguous()}[case.upstream]


def case_run(group, device, name, backend):
    case = CASES[name]
    shard = VocabShard.from_group(group, case.x.shape[-1])
    local = lay_out(case.x[:, shard.start : shard.stop].to(device), case.layout)
    assert case.layout != "columns" or local.stride(1) == 3 or shard.width == 1
    before = local.clone()
    local.requires_grad_(local.is_floating_point())
    g = upstream_of(case).to(device)
    options = Options(backend=backend)
    if case.smoothing:
        head = HeadLoss([CrossEntropy(label_smoothing=case.smoothing)], reduction="none", options=options)
        loss = head(local, case.labels.to(device), shard=shard).loss
    else:
        stats = vocab_statistics(
            local, case.labels.to(device), shard=shard, ignore_index=case.ignore_index, options=options
        )
        loss = -stats.log_prob
        if case.entropy:
            loss = vocab_statistics(local, want=("entropy",), shard=shard, options=options).entropy
    grads = [torch.autograd.grad(loss, local, g * (i + 1), retain_graph=True)[0] for i in range(case.backwards)]
    assert torch.equal(local.detach().nan_to_num(7.5), before.nan_to_num(7.5)), "the input was written"
    return loss.detach().cpu(), [grad.cpu() for grad in grads]


def reference(case):
    """Per-token loss and gradient [N, V] in float64."""
    x = case.x.double().clone().requires_grad_()
    labels = torch.where(
        torch.tensor([n in case.nan_rows for n in range(len(case.labels))], dtype=torch.bool), 0, case.labels.long()
    )
    loss = F.cross_entropy(x, labels, reduction="none", ignore_index=case.ignore_index)
    if case.smoothing:  # -inf columns take no part in the uniform share
        log_p = x.log_softmax(-1)
        lse = x.logsumexp(-1)
        spread = torch.where(x > -INF, lse[:, None] - x, 0.0).sum(-1) / x.shape[1]
        loss = (1 - case.smoothing) * -log_p.gather(1, labels[:, None])[:, 0] + case.smoothing * spread
    if case.entropy:
        log_p = x.log_softmax(-1)
        loss = -torch.where(log_p > -1000, log_p.exp() * log_p, 0.0).sum(-1)
    (grad,) = torch.autograd.grad(loss, x, upstream_of(case).double().nan_to_num())
    loss = loss.detach()
    for n in case.zero_rows:
        loss[n], grad[n] = 0.0, 0.0
    for n in case.nan_rows:
        loss[n], grad[n] = NAN, NAN
    return loss, grad


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_odd_inputs_are_right_or_refused_on_every_rank(world_size, name, backend):
    case = CASES[name]
    results = on_ranks(world_size, case_run, name, backend, failures=True)
    raises = case.raises or ("TypeError" if case.x.dtype == torch.float64 and backend == "triton" else "")
    if raises:
        assert {r.kind for r in results} == {raises}, results
        assert len({r.message for r in results}) == 1 and "got" in results[0].message
        return
    for r in results:
        assert not isinstance(r, Failure), r.trace
        assert torch.equal(r[0].nan_to_num(7.5), results[0][0].nan_to_num(7.5))
    loss, grad = reference(case)
    dtype = case.x.dtype
    torch.testing.assert_close(results[0][0], loss.to(results[0][0].dtype), rtol=2e-6, atol=1e-6, equal_nan=True)
    rtol = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}.get(dtype, 2e-5)
    for i in range(case.backwards):
        got = torch.cat([r[1][i] for r in results], 1)
        torch.testing.assert_close(got, ((i + 1) * grad).to(dtype), rtol=rtol, atol=1e-6, equal_nan=True)


def disagreeing_run(group, device, what, check):
    """Ranks that were given different labels, or shards that overlap or leave a gap."""
    import torch.distributed as dist

    rank = dist.get_rank(group)
    start, stop = (0, 32) if rank == 0 else (32, 64)
    labels = rows().labels.clone()
    if what == "labels":
        labels[2] = 31 if rank == 0 else 50
    elif what == "ignored on one rank":
        labels[2] = 31 if rank == 0 else -100
    elif what == "overlap":
        start, stop = (0, 40) if rank == 0 else (30, 64)
    elif what == "gap":
        stop = 31 if rank == 0 else stop
    shard = VocabShard(start, stop, V, group)
    x = rows().x[:, start:stop].clone().to(device).requires_grad_()
    stats = vocab_statistics(x, labels.to(device), shard=shard, options=Options(check=check))
    out = HeadLoss()(x.detach(), labels.to(device), shard=shard)
    stats.log_prob.sum().backward()
    return stats.log_prob.detach().cpu(), x.grad.cpu(), out.loss.cpu(), out.count.cpu()


@pytest.mark.parametrize("what", ["labels", "ignored on one rank", "overlap", "gap"])
def test_ranks_that_disagree_see_nan_on_every_rank(what):
    for log_prob, grad, loss, count in on_ranks(2, disagreeing_run, what, False):
        assert loss.isnan() and count == N
        assert log_prob[2].isnan() and not log_prob[[0, 1, 4, 5]].isnan().any()
        assert grad[2].isnan().all() and not grad[[0, 1, 4, 5]].isnan().any()
    failures = on_ranks(2, disagreeing_run, what, True, failures=True)
    assert [f.kind for f in failures] == ["ValueError"] * 2 and all("token 2" in f.message for f in failures)


def checked_run(group, device, label, backend):
    shard = VocabShard.from_group(group, V)
    labels = rows().labels.clone()
    labels[4] = label
    local = rows().x[:, shard.start : shard.stop].to(device)
    return vocab_statistics(
        local, labels.to(device), shard=shard, options=Options(check=True, backend=backend)
    ).lse.cpu()


@pytest.mark.parametrize("world_size", [1, 2])
def test_check_raises_on_every_rank_and_names_the_token(world_size, backend):
    failures = on_ranks(world_size, checked_run, V + 3, backend, failures=True)
    for failure in failures:
        assert failure.kind == "ValueError" and "token 4" in failure.message and f"got {V + 3}" in failure.message
    for lse in on_ranks(world_size, checked_run, -100, backend):  # ignored is not bad
        torch.testing.assert_close(lse[0], rows().x.logsumexp(-1)[0])


def width_run(group, device, width):
    shard = VocabShard.from_group(group, V)
    x = torch.zeros(N, width, device=device)
    return vocab_statistics(x, torch.zeros(N, dtype=torch.long, device=device), shard=shard)


@pytest.mark.parametrize("width, words", [(V, "gathered"), (31, "32 columns"), (0, "32 columns")])
def test_logits_that_do_not_fit_the_shard_are_refused(width, words):
    for failure in on_ranks(2, width_run, width, failures=True):
        assert failure.kind == "ValueError" and words in failure.message
