"""The exported top K of a sharded teacher: values, ties, the nucleus, layouts, one collective."""

import pytest
import torch
import torch.nn.functional as F
from collectives import counted_collectives
from ranks import on_ranks

from tp_headloss import (
    HeadLoss,
    TopKDistillation,
    TopKTeacher,
    Transform,
    VocabShard,
    topk_log_probs,
    vocab_statistics,
)

V, N, K = 150, 6, 12  # of 256 padded columns: the last shard of four is all padding


def rows():
    generator = torch.Generator().manual_seed(5)
    x = 2 * torch.randn(N, V, generator=generator)
    x[1] = x[1].round()  # many ties, across shards and at the K-th place
    x[2, 10:] = -torch.inf  # fewer than K have any probability
    x[3] = 0.0
    x[4, ::3] = -0.0  # equal to 0
    x[4, 1::3] = 0.0
    return x


def expected(x, k, temperature=1.0):
    """By a stable sort, whose equal elements keep their order."""
    log_p = (x.double() / temperature).log_softmax(-1)
    order = (x + 0.0).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    tail = log_p.scatter(1, order, -torch.inf).logsumexp(-1)
    return order, log_p.gather(1, order), (x.double() / temperature).logsumexp(-1), tail


def topk_run(group, device, k, dtype, boundaries=None, **options):
    shard = VocabShard.from_group(group, V, 256)
    if boundaries:
        shard = VocabShard.from_boundaries(boundaries, V, group)
    x = F.pad(rows(), (0, 256 - V), value=90.0)[:, shard.start : shard.stop].to(device, dtype)
    with counted_collectives() as events:
        out = topk_log_probs(x, k, shard=shard, **options)
    return *out, sum(events.values())


@pytest.mark.parametrize("k", [1, K, V])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_top_k_of_all_shards_equals_a_stable_sort(world_size, dtype, k):
    ids, log_probs, lse, tail = expected(rows().to(dtype).float(), k)
    for our_ids, ours, our_lse, our_tail, collectives in on_ranks(world_size, topk_run, k, dtype):
        assert torch.equal(our_ids, ids) and collectives == int(world_size > 1)
        torch.testing.assert_close(ours.double(), log_probs, rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(our_lse.double(), lse, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(our_tail.double(), tail, rtol=1e-6, atol=2e-6)
        assert (ours <= 0).all() and (our_tail <= 0).all() and our_tail.dtype == torch.float32


def test_uneven_and_empty_shards():
    ids, log_probs, _, tail = expected(rows(), K)
    for our_ids, ours, _, our_tail, _ in on_ranks(
        4, topk_run, K, torch.float32, [0, 5, 5, 149, 200]
    ):
        assert torch.equal(our_ids, ids)
        torch.testing.assert_close(ours.double(), log_probs, rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(our_tail.double(), tail, rtol=1e-6, atol=2e-6)


def test_the_nucleus_keeps_what_it_needs_in_compact_types():
    x = rows()
    ids, log_probs, _, tail = expected(x, K)
    before = log_probs.exp().cumsum(1) - log_probs.exp()
    keep = before < 0.6
    out = topk_log_probs(x, K, top_p=0.6, dtype=torch.float16, ids_dtype=torch.int32)
    assert out.ids.dtype == torch.int32 and out.log_probs.dtype == torch.float16
    assert (
        torch.equal(out.ids.long(), torch.where(keep, ids, -1))
        and (~keep).any()
        and keep[:, 0].all()
    )
    torch.testing.assert_close(
        out.log_probs.double(), torch.where(keep, log_probs, -torch.inf), rtol=1e-3, atol=1e-3
    )
    cut = log_probs.masked_fill(keep, -torch.inf)
    tail = torch.cat([cut, tail[:, None]], 1).logsumexp(1)
    torch.testing.assert_close(out.tail_log_prob.double(), tail, rtol=1e-6, atol=2e-6)


def test_transformations_layouts_and_blocks(monkeypatch, device):
    from tp_headloss.search import topk

    monkeypatch.setattr(topk, "BLOCK_ELEMENTS", 4 * V)
    x, bias = rows(), torch.linspace(-3, 3, V)
    x = x.view(2, 3, V)
    temperature = torch.tensor([[0.5, 1.0, 2.0], [1.0, 3.0, 0.7]])
    transform = Transform(
        bias=bias.to(device), scale=0.8, softcap=5.0, temperature=temperature.to(device)
    )
    out = topk_log_probs(
        x.transpose(0, 1).contiguous().transpose(0, 1).to(device), 5, transform=transform
    )
    z = 5 * torch.tanh((x.double() + bias.double()) * 0.8 / 5) / temperature.double()[..., None]
    values, ids = z.log_softmax(-1).topk(5)
    torch.testing.assert_close(out.log_probs.double().cpu(), values, rtol=1e-5, atol=1e-5)
    distinct = values.diff(dim=-1).abs().amin(-1) > 1e-4  # the others tie, up to rounding
    assert torch.equal(out.ids.cpu()[distinct], ids[distinct]) and distinct.any()
    assert out.lse.shape == (2, 3)


def hidden_run(group, device):
    generator = torch.Generator().manual_seed(8)
    hidden, weight = (
        torch.randn(2, 5, 16, generator=generator),
        torch.randn(V, 16, generator=generator),
    )
    shard = VocabShard.from_group(group, V, 256)
    part = F.pad(weight, (0, 0, 0, 256 - V))[shard.start : shard.stop].to(device)
    temperature = torch.linspace(0.5, 2, 10).view(2, 5)
    transform = Transform(temperature=temperature.to(device))
    with counted_collectives() as events:
        out = topk_log_probs(hidden.to(device), 7, weight=part, shard=shard, transform=transform)
    return *out, (hidden @ weight.T) / temperature[..., None], sum(events.values())


@pytest.mark.parametrize("world_size", [1, 2])
def test_hidden_states_and_a_weight_are_as_good_as_logits(world_size, monkeypatch):
    from tp_headloss.search import topk

    monkeypatch.setattr(topk, "BLOCK_ELEMENTS", 3 * 256)  # several blocks, at one rank
    for ids, log_probs, lse, tail, z, collectives in on_ranks(world_size, hidden_run):
        values, want = z.double().log_softmax(-1).topk(7)
        assert torch.equal(ids, want) and collectives == int(world_size > 1)
        torch.testing.assert_close(log_probs.double(), values, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), z.double().logsumexp(-1), rtol=1e-5, atol=1e-5)
        others = z.double().log_softmax(-1).scatter(-1, want, -torch.inf).logsumexp(-1)
        torch.testing.assert_close(tail.double(), others, rtol=1e-5, atol=1e-5)
    assert topk_log_probs(torch.ones(4), 2, weight=torch.eye(4)).lse.shape == ()
    with pytest.raises(
        ValueError, match=r"weight must have shape \[width, 4\] to fit .*, got \[8, 5\]"
    ):
        topk_log_probs(torch.ones(3, 4), 2, weight=torch.ones(8, 5))


def test_bad_rows_are_nan_and_bad_arguments_refused():
    x = rows()
    x[0, 3], x[5, 2] = torch.nan, torch.inf
    out = topk_log_probs(x, 3)
    assert out.tail_log_prob.isnan().tolist() == [True, *[False] * 4, True]
    assert out.log_probs[[0, 5]].isnan().all() and out.log_probs[1:5].isfinite().all()
    with pytest.raises(TypeError, match="ids_dtype must be int64 or int32"):
        topk_log_probs(x, 3, ids_dtype=torch.int16)
    assert topk_log_probs(x[:0], 3).ids.shape == (0, 3)


def no_tokens_run(group, device):
    shard = VocabShard.from_group(group, V)
    top = topk_log_probs(torch.zeros(0, shard.width, device=device), 3, shard=shard)
    return [list(x.shape) for x in top]


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_tokens_have_no_entries(world_size):
    assert on_ranks(world_size, no_tokens_run) == [[[0, 3], [0, 3], [0], [0]]] * world_size


@pytest.mark.parametrize("shift", [0.0, 200.0, -200.0])
def test_log_probs_have_an_absolute_error_and_ids_say_what_is_greedy(shift):
    """One logit above all others by up to 40: its log-prob is rounded as z - lse is; that of a
    label is not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 1000, generator=generator)
    x[:, 7] = x.amax(1) + torch.linspace(0, 40, 64)
    x += shift
    top = topk_log_probs(x, 5)
    exact = x.double().log_softmax(-1).gather(-1, top.ids)
    bound = (x.gather(-1, top.ids).abs() + top.lse[:, None].abs() + 16) * 2**-24
    assert ((top.log_probs - exact).abs() <= bound).all()
    label = top.ids[:, 0]
    stats = vocab_statistics(x, label, want=("rank",))
    others = x.double().scatter(1, label[:, None], -torch.inf)
    of_label = -(others - x.double().gather(1, label[:, None])).exp().sum(1).log1p()
    torch.testing.assert_close(stats.log_prob.double(), of_label, rtol=1e-5, atol=0)
    assert (stats.rank == 1).all() and (top.log_probs[:, 0] == 0).any()


DTYPES = {x for x in vars(torch).values() if isinstance(x, torch.dtype)}
TAKEN = {torch.float32, torch.bfloat16, torch.float16, torch.float64}


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_log_probs_have_a_dtype_that_a_teacher_takes(dtype):
    logits = torch.randn(3, 8, dtype=torch.float64)
    if dtype not in TAKEN:
        with pytest.raises(TypeError, match="dtype float32, bfloat16, float16 or float64, which"):
            topk_log_probs(logits, 2, dtype=dtype)
        return
    top = topk_log_probs(logits, 2, dtype=dtype)
    entries = {"teacher": TopKTeacher(top.ids, top.log_probs)}
    head = HeadLoss([TopKDistillation()])
    assert head(logits, torch.arange(3), inputs=entries).loss.isfinite()
