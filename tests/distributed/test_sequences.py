"""Sequences, padded, packed and split over context-parallel ranks; metrics over data-parallel
ranks."""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from collectives import counted_collectives
from ranks import on_ranks

import tp_headloss as hl
from tp_headloss.arguments.sequences import SEQUENCE_REDUCTIONS
from tp_headloss.ranks.comm import _agreed, _checksum

V, B, S = 40, 4, 6
LENGTHS = (6, 1, 0, 4)


def padded():
    """Logits [B, S, V], labels, mask, inputs."""
    generator = torch.Generator().manual_seed(1)
    x = 2 * torch.randn(B, S, V, generator=generator)
    mask = torch.arange(S) < torch.tensor(LENGTHS)[:, None]
    labels = torch.where(mask, torch.randint(0, V, (B, S), generator=generator), -100)
    log_prob = x.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    inputs = {
        name: log_prob + torch.randn(B, S, generator=generator)
        for name in ("old_log_prob", "reference_log_prob")
    }
    inputs["advantages"] = torch.tensor([1.3, -0.7, 0.4, -1.1])[:, None].expand(B, S).contiguous()
    return x, labels, mask, inputs


def layouts():
    """name -> (order of the padded tokens in the layout, constructor of (mask in that order))."""
    whole = torch.arange(B * S)
    rows = [whole[i * S : i * S + n] for i, n in enumerate(LENGTHS)]
    packed = torch.cat([*rows, torch.tensor([S + 1])])  # and padding
    offsets = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    shuffled = torch.randperm(B * S, generator=torch.Generator().manual_seed(0))
    ids = shuffled // S
    return {
        "padded": (whole.view(B, S), hl.Sequences.from_mask),
        "packed": (
            packed,
            lambda mask, **o: hl.Sequences.from_cu_seqlens(offsets.to(mask.device), mask, **o),
        ),
        "ids": (
            shuffled,
            lambda mask, **o: hl.Sequences.from_ids(ids.to(mask.device), B, mask, **o),
        ),
    }


@pytest.mark.parametrize("layout", ["padded", "packed", "ids"])
def test_sums_means_and_shares_equal_loops_in_every_layout(layout, device):
    _, _, mask, _ = padded()
    mask[0, 3] = False  # not the end of its sequence
    order, make = layouts()[layout]
    values = torch.randn(B, S)
    poisoned = torch.where(mask, values, torch.nan).flatten()[order].to(device).requires_grad_()
    sequences = make(mask.flatten()[order].to(device), horizon=5)
    lengths = mask.sum(1)
    assert len(sequences) == B and sequences.lengths.tolist() == lengths.tolist() == [5, 1, 0, 4]
    assert sequences.count == 3
    want = torch.stack([values[i][mask[i]].sum() for i in range(B)])
    torch.testing.assert_close(sequences.sum(poisoned).cpu(), want)
    torch.testing.assert_close(sequences.mean(poisoned).cpu(), want / lengths.clamp(min=1))
    weight = torch.randn(B, device=device)
    (grad,) = torch.autograd.grad(sequences.sum(poisoned) @ weight, poisoned)
    expected = torch.where(mask, weight.cpu()[:, None], 0.0).flatten()[order]
    torch.testing.assert_close(grad.cpu(), expected)
    torch.testing.assert_close(sequences.spread(weight).cpu(), expected)
    (grad,) = torch.autograd.grad(sequences.spread(weight.requires_grad_()).sum(), weight)
    assert grad.tolist() == lengths.tolist()
    share = (mask / lengths.clamp(min=1)[:, None]).flatten()[order]
    torch.testing.assert_close(sequences.token_share.cpu(), share)
    for reduction, (w, denominator) in {
        "seq-mean-token-sum": (mask.flatten()[order].float(), 3),
        "seq-mean-token-mean": (share, 3),
        "seq-mean-token-sum-norm": (mask.flatten()[order] / 5, 3),
    }.items():
        got = sequences.aggregate(reduction)
        torch.testing.assert_close(got[0].cpu(), w)
        assert got[1] == denominator


def head_of(name, **options):
    terms = [hl.PolicyGradient(name), hl.KLToReference(0.2), hl.CrossEntropy(0.1)]
    return hl.HeadLoss(terms, metrics=("log_prob", hl.PolicyMetrics(reference=True)), **options)


@pytest.mark.parametrize("reduction", ["mean", *SEQUENCE_REDUCTIONS])
@pytest.mark.parametrize("name", ["clip", "gspo", "gmpo", "vespo"])
def test_packed_and_shuffled_tokens_give_the_padded_loss_and_gradient(name, reduction, device):
    x, labels, mask, inputs = padded()
    results = []
    for order, make in layouts().values():
        valid = mask.flatten()[order].to(device)
        local = x.flatten(0, 1)[order].to(device).requires_grad_()
        given = {key: value.flatten()[order].to(device) for key, value in inputs.items()}
        out = head_of(name, reduction=reduction)(
            local,
            labels.flatten()[order].to(device),
            inputs=given | {"sequences": make(valid, horizon=9)},
        )
        out.loss.backward()
        grad = torch.zeros(B * S, V).index_add(0, order.flatten(), local.grad.flatten(0, -2).cpu())
        results.append((out.loss, grad, out.metrics, out.sequence_metrics))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=2e-6, atol=1e-6)
    assert results[0][1].abs().max() > 1e-3 and results[0][3]["num_sequences"] == 3


def test_a_sequence_with_a_nan_poisons_itself_alone():
    _, _, mask, _ = padded()
    values = torch.zeros(B, S)
    values[0, 2] = torch.nan
    for order, make in layouts().values():
        sums = make(mask.flatten()[order]).sum(values.flatten()[order])
        assert sums.isnan().tolist() == [True, False, False, False]


def test_no_sequences_and_no_tokens():
    empty = torch.zeros(0, 5, dtype=torch.bool)
    nothing = hl.Sequences.from_cu_seqlens(torch.tensor([0]), torch.zeros(0, dtype=torch.bool))
    for sequences in (hl.Sequences.from_mask(empty), nothing):
        assert len(sequences) == 0 and sequences.count == 0
        assert sequences.sum(torch.zeros(sequences.mask.shape)).shape == (0,)
    assert hl.Sequences.from_mask(torch.zeros(3, 0, dtype=torch.bool)).lengths.tolist() == [0, 0, 0]


def test_wrong_shapes_are_refused():
    mask = torch.ones(2, 3, dtype=torch.bool)
    sequences = hl.Sequences.from_mask(mask)
    for call in (
        lambda: hl.Sequences.from_mask(mask[0]),
        lambda: hl.Sequences.from_mask(mask, lengths=torch.ones(3)),
        lambda: hl.Sequences.from_ids(torch.zeros(2, dtype=torch.int64), 1, mask),
        lambda: hl.Sequences.from_cu_seqlens(torch.zeros(2, 2, dtype=torch.int64), mask),
        lambda: sequences.sum(torch.ones(2, 2)),
        lambda: sequences.spread(torch.ones(3)),
        lambda: sequences.aggregate("seq-mean-token-sum-norm"),
    ):
        with pytest.raises(ValueError, match="got"):
            call()


# Context parallelism


@functools.cache
def two_by_two():
    """On 4 ranks: this rank's vocabulary group (0 1, 2 3) and its context group (0 2, 1 3)."""
    groups = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))]
    rank = dist.get_rank()
    return groups[rank // 2], groups[2 + rank % 2]


def context_run(group, device, name, reduction, lengths_given, backend):
    tp, cp = (None, group) if dist.get_world_size() == 2 else two_by_two()
    part = dist.get_rank(cp)
    x, labels, mask, inputs = padded()
    columns = slice(part, None, 2)  # every second token of each sequence
    shard = hl.VocabShard.from_group(tp, V, 64)
    local = (
        F.pad(x, (0, 64 - V))[:, columns, shard.start : shard.stop]
        .clone()
        .to(device)
        .requires_grad_()
    )
    given = {key: value[:, columns].to(device) for key, value in inputs.items()}
    lengths = torch.tensor(LENGTHS, device=device) if lengths_given else None
    head = head_of(
        name, reduction=reduction, options=hl.Options(backend=backend, transport="gather")
    )
    with counted_collectives() as made:
        sequences = hl.Sequences.from_mask(
            mask[:, columns].to(device), lengths=lengths, horizon=9, group=cp
        )
    with counted_collectives() as forward:
        out = head(
            local,
            labels[:, columns].to(device),
            shard=shard,
            inputs=given | {"sequences": sequences},
        )
    with counted_collectives() as backward:
        out.loss.backward()
    metrics = hl.reduce_metrics({"count": out.count, **out.metrics}, cp)
    by_sequence = hl.reduce_metrics(out.sequence_metrics, cp)
    counts = [sum(events.values()) for events in (made, forward, backward)]
    return out.loss.detach(), local.grad, metrics, by_sequence, counts, part


@pytest.mark.parametrize("lengths_given", [False, True])
@pytest.mark.parametrize("reduction", SEQUENCE_REDUCTIONS)
@pytest.mark.parametrize(
    ("world_size", "name"), [(2, "clip"), (2, "gmpo"), (4, "gspo"), (4, "vespo")]
)
def test_sequences_split_over_context_parallel_ranks_are_whole_sequences(
    world_size, name, reduction, lengths_given, backend
):
    results = on_ranks(world_size, context_run, name, reduction, lengths_given, backend)
    x, labels, mask, inputs = padded()
    x.requires_grad_()
    head = head_of(name, reduction=reduction)
    whole = head(x, labels, inputs=inputs | {"sequences": hl.Sequences.from_mask(mask, horizon=9)})
    whole.loss.backward()
    tp = world_size // 2
    parts = [results[0], results[tp]]  # the two context ranks; their losses are parts of one sum
    # of terms of 1
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole.loss.detach(), rtol=2e-6, atol=5e-6)
    for part in range(2):
        grads = torch.cat([r[1] for r in results if r[5] == part], -1)[..., :V]
        torch.testing.assert_close(grads, x.grad[:, part::2], rtol=3e-5, atol=1e-7)
    for result in results:
        for got, want in (
            (result[2], {"count": whole.count, **whole.metrics}),
            (result[3], whole.sequence_metrics),
        ):
            assert list(got) == list(want)
            for key, value in want.items():
                torch.testing.assert_close(got[key].float(), value, rtol=3e-6, atol=3e-6, msg=key)
        sums = {"clip": 0, "gspo": 1, "gmpo": 2, "vespo": 1}[name]  # of sequences, in the objective
        assert result[4] == [int(not lengths_given), sums + (tp > 1), 0]


def wrong_group_run(group, device, other):
    x, labels, mask, inputs = (t.to(device) if isinstance(t, torch.Tensor) else t for t in padded())
    shard = hl.VocabShard.from_group(group, V)
    if other:  # of the same ranks
        group = dist.new_group(list(range(group.size())))
    sequences = hl.Sequences.from_mask(mask, lengths=mask.sum(1), group=group)
    given = {name: value.to(device) for name, value in inputs.items()} | {"sequences": sequences}
    head_of("clip")(x[..., shard.start : shard.stop], labels, shard=shard, inputs=given)


@pytest.mark.parametrize("other", [False, True])
def test_a_group_that_shares_the_vocabulary_is_refused_for_sequences(other):
    for failure in on_ranks(2, wrong_group_run, other, failures=True):
        assert failure.kind == "ValueError" and "context-parallel group or none" in failure.message


def group_of_the_vocabulary_run(group, device):
    _shard = hl.VocabShard.from_group(group, V)
    mask = torch.ones(2, 4, dtype=torch.bool, device=device)
    refused = 0
    for make in (
        lambda: hl.Sequences.from_mask(mask, group=group),
        lambda: hl.Sequences.from_cu_seqlens(
            torch.tensor([0, 4, 8], device=device), mask, group=group
        ),
        lambda: hl.Sequences.from_ids(mask.long(), 2, mask, group=group),
    ):
        with pytest.raises(
            ValueError, match=r"got the group of a VocabShard, .*: leave group= out"
        ):
            make()
        refused += 1
    return refused


def test_sequences_alone_refuse_the_group_of_a_shard():
    """Each of its ranks has the same tokens, which sums would count once per rank."""
    assert on_ranks(2, group_of_the_vocabulary_run) == [3, 3]


def data_parallel_run(group, device, given, validate):
    """Rows of other sequences on each rank, whose group is given as if it were context-parallel."""
    rank = dist.get_rank(group)
    rows = 2 + rank if given == "their number" else 2
    x = torch.randn(rows, 3, V, device=device)
    labels = torch.randint(0, V, (rows, 3), device=device)
    old = hl.log_probs(x, labels, differentiable=False).log_prob
    mask = labels >= 0
    lengths = torch.full((rows,), 3.0, device=device) if given == "their number" else None
    if given == "packed":
        x, labels, old, mask = (each.flatten(0, 1) for each in (x, labels, old, mask))
        bounds = torch.tensor([0, 3, 6], device=device)
        sequences = hl.Sequences.from_cu_seqlens(bounds, mask, group=group)
    else:
        sequences = hl.Sequences.from_mask(mask, lengths=lengths, group=group)
    advantages = torch.arange(rows, device=device) + 1.0
    advantages += rank * (given in ("rows", "packed"))
    if given != "packed":
        advantages = advantages[:, None]
    if given == "an input is missing" and rank == 1:
        old = old[:, :1]
    inputs = {"advantages": advantages, "old_log_prob": old, "sequences": sequences}
    head = hl.HeadLoss(
        hl.PolicyGradient("gspo"),
        reduction="seq-mean-token-mean",
        options=hl.Options(validate=validate),
    )
    return head(x, labels, inputs=inputs).loss.item()


DATA_PARALLEL = {
    "rows": "agree on the values per sequence of 'advantages': rank 0 of the group has torch.float3",
    "packed": "agree on the values per sequence of 'advantages'",
    "their number": "agree on the number of sequences: rank 0 of the group has 2, got 3 on rank 1",
}


@pytest.mark.parametrize("given", DATA_PARALLEL)
def test_full_validation_finds_a_data_parallel_group_of_sequences(given):
    for failure in on_ranks(2, data_parallel_run, given, "full", failures=True):
        assert failure.kind == "ValueError" and DATA_PARALLEL[given] in failure.message, failure
        assert "must be the context-parallel group" in failure.message


def test_an_error_of_one_context_parallel_rank_is_that_of_all():
    failures = on_ranks(2, data_parallel_run, "an input is missing", "full", failures=True)
    assert [failure.kind for failure in failures] == ["ValueError"] * 2
    for failure in failures:
        assert "on rank 1 of the group: input 'old_log_prob' must" in failure.message, failure


def test_right_sequences_of_a_group_agree():
    full, plain = (on_ranks(2, data_parallel_run, "", how) for how in ("full", "metadata"))
    assert full == plain


def one_token_run(group, device):
    """A context-parallel rank has one token of each sequence, whose advantages are per token."""
    x = torch.randn(2, 1, V, device=device)
    labels = torch.ones(2, 1, dtype=torch.long, device=device)
    advantages = torch.full((2, 1), 1.0 + dist.get_rank(group), device=device)
    sequences = hl.Sequences.from_mask(labels >= 0, group=group)
    head = hl.HeadLoss(hl.PolicyGradient("reinforce"), options=hl.Options(validate="full"))
    head(x, labels, inputs={"advantages": advantages, "sequences": sequences})
    return len(sequences)


def test_values_per_token_are_not_compared():
    assert on_ranks(2, one_token_run) == [2, 2]


def error_of_one_shard_run(group, device):
    """Four ranks, 2 of the vocabulary times 2 of the context; the last one's labels are wrong."""
    tp, cp = two_by_two()
    shard = hl.VocabShard.from_group(tp, V)
    labels = torch.zeros(2, 3, dtype=torch.long, device=device)
    sequences = hl.Sequences.from_mask(labels >= 0, group=cp)
    if dist.get_rank() == 3:
        labels = labels.float()
    head = hl.HeadLoss(reduction="seq-mean-token-mean", options=hl.Options(validate="full"))
    x = torch.zeros(2, 3, shard.width, device=device)
    head(x, labels, shard=shard, inputs={"sequences": sequences})


def test_an_error_of_one_rank_is_that_of_its_shard_and_of_its_context():
    failures = on_ranks(4, error_of_one_shard_run, failures=True)
    assert [failure.kind for failure in failures] == ["TypeError"] * 4
    assert all("labels must be int64 or int32" in failure.message for failure in failures)


def spread_run(group, device):
    """f(spread(sum)) with a loss that is partial on each rank: the gradient needs the other ranks'
    part."""
    rank = dist.get_rank(group)
    values = torch.arange(1.0, 9.0, device=device).view(2, 4)[:, rank::2].clone().requires_grad_()
    sequences = hl.Sequences.from_mask(torch.ones_like(values, dtype=torch.bool), group=group)
    loss = (sequences.spread(sequences.sum(values)) ** 2 * (1 + rank)).sum()
    loss.backward()
    return values.grad


def test_the_gradient_through_a_spread_sum_crosses_the_context_ranks():
    values = torch.arange(1.0, 9.0).view(2, 4).requires_grad_()
    scale = torch.tensor([1.0, 2.0, 1.0, 2.0])
    (values.sum(1, keepdim=True).expand(2, 4) ** 2 * scale).sum().backward()
    for rank, grad in enumerate(on_ranks(2, spread_run)):
        torch.testing.assert_close(grad, values.grad[:, rank::2])


# Data-parallel metrics


def metrics_run(group, device):
    rank = 0 if group is None else dist.get_rank(group)
    metrics = {
        "ratio": 1.5 + rank,
        "max_ratio": float(rank),
        "min_ratio": -2.0 + rank,
        "count": 2.0**24 + rank,
    }
    if rank == 1:  # no tokens here
        metrics |= {"max_ratio": -torch.inf, "min_ratio": torch.inf}
    metrics = {name: torch.tensor(value, device=device) for name, value in metrics.items()}
    hl.reduce_metrics(metrics, group)  # which compares their names
    with counted_collectives() as events:
        out = hl.reduce_metrics(metrics, group)
    return out, sum(events.values())


def test_metrics_are_reduced_by_what_they_are_in_one_collective():
    for out, collectives in on_ranks(4, metrics_run):
        assert collectives == 1
        assert {name: value.item() for name, value in out.items()} == {
            "ratio": 12.0,
            "max_ratio": 3.0,
            "min_ratio": -2.0,
            # 0 + 0 + 2 + 4, as fp32 rounds them; an fp32 sum would end on a multiple of 8
            "count": 4 * 2.0**24 + 6,
        }
    alone, collectives = metrics_run(None, torch.device("cpu"))
    assert collectives == 0 and alone["ratio"] == 1.5 and hl.reduce_metrics({}, None) == {}


# names of the first rank's metrics -> those of the others
OTHER_NAMES = {
    "another": ("count", "a"),
    "one more": ("count", "count b"),
    "in another order": ("b a", "a b"),
    "many": ("a", " ".join(f"x{i}" for i in range(62))),
}


def other_names_run(group, device, case, known):
    names = OTHER_NAMES[case][dist.get_rank(group) > 0].split()
    metrics = {f"{name} of {case}": torch.ones((), device=device) for name in names}
    if known and dist.get_rank(group) == 0:  # to this rank alone
        own = {_checksum(repr(list(metrics)))}
        with mock.patch.dict(_agreed, {group: own}):
            return [x.item() for x in hl.reduce_metrics(metrics, group).values()]
    with pytest.raises(ValueError) as caught:
        hl.reduce_metrics(metrics, group)
    return str(caught.value), list(metrics)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("case", OTHER_NAMES)
def test_metrics_of_other_names_are_refused_or_nan_on_every_rank(case, known):
    first, *others = on_ranks(3, other_names_run, case, known)
    for rank, (message, names) in enumerate(others, 1):
        assert f"got {names} on rank {rank} of the group, and others on ranks [0]" in message
    if known:
        assert all(value != value for value in first)
    else:
        assert f"got {first[1]} on rank 0 of the group, and others on ranks [1, 2]" in first[0]


def test_metrics_of_micro_batches_combine_like_those_of_ranks():
    parts = [{"ratio": r, "max_ratio": r, "min_ratio": r} for r in torch.tensor([2.0, -1.0, 4.0])]
    assert hl.combine_metrics(parts) == {"ratio": 5.0, "max_ratio": 4.0, "min_ratio": -1.0}
    assert hl.combine_metrics([]) == hl.combine_metrics([{}]) == {}
    with pytest.raises(ValueError, match="same names in the same order, got"):
        hl.combine_metrics([{"a": torch.ones(())}, {"b": torch.ones(())}])


BOUNDS = {
    "beyond": [0, 4, 100],
    "far beyond": [0, 4, 1 << 40],
    "negative": [-3, 4, 8],
    "descending": [0, 6, 3, 8],
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_outside_of_the_tokens_are_refused_or_nan(name, device, monkeypatch):
    mask, bounds = (
        torch.ones(8, dtype=torch.bool, device=device),
        torch.tensor(BOUNDS[name], device=device),
    )
    words = r"cu_seqlens must be ascending in \[0, 8\], the mask's tokens, got "
    with pytest.raises(ValueError, match=words):
        hl.Sequences.from_cu_seqlens(bounds, mask).check()
    x = torch.randn(8, V, device=device, requires_grad=True)
    labels = torch.arange(8, device=device)
    head = hl.HeadLoss(reduction="seq-mean-token-mean", options=hl.Options(check=True))
    with pytest.raises(ValueError, match=words):
        head(x, labels, inputs={"sequences": hl.Sequences.from_cu_seqlens(bounds, mask)})
    # as on a GPU, where nobody looks at values: without the check that CPUs make
    monkeypatch.setattr(hl.Sequences, "_expect_valid", lambda self: None)
    sequences = hl.Sequences.from_cu_seqlens(bounds, mask)
    found = (
        sequences.lengths,
        sequences.count,
        sequences.token_share,
        sequences.mean(torch.ones(8, device=device)),
    )
    assert all(values.isnan().all() for values in found)
    loss = hl.HeadLoss(reduction="seq-mean-token-mean")(
        x, labels, inputs={"sequences": sequences}
    ).loss
    loss.backward()
    assert loss.isnan() and x.grad.isnan().all()


@pytest.mark.parametrize("bounds", [[4, 8, 12], [0, 4, 8]])
def test_bounds_that_leave_tokens_of_the_mask_out_are_refused(bounds, device):
    mask, bounds = (
        torch.ones(12, dtype=torch.bool, device=device),
        torch.tensor(bounds, device=device),
    )
    span = f"cu_seqlens are {bounds[0]} to {bounds[-1]}, tokens 0 to 12"
    with pytest.raises(ValueError, match=f"got 4 that belong to none: {span}"):
        sequences = hl.Sequences.from_cu_seqlens(bounds, mask)
        assert device != "cpu", "on CPUs the construction raises"
        sequences.check()
    token = torch.arange(12, device=device)
    outside = (token < bounds[0]) | (token >= bounds[-1])  # such as padding
    assert hl.Sequences.from_cu_seqlens(bounds, mask & ~outside).lengths.tolist() == [4, 4]


def test_what_cannot_describe_sequences_is_refused(device):
    """Wrong values; wrong types are in tests/promises/test_spec.py."""
    mask = torch.ones(2, 4, dtype=torch.bool, device=device)
    for words, given in {
        "horizon must be positive and finite": {"horizon": 0},
        "lengths must be finite and at least 0": {
            "lengths": torch.tensor([9.0, -1.0], device=device)
        },
        "the length of sequence 0 must be at least its . counted tokens, got": {
            "lengths": mask.sum(1) - 1
        },
    }.items():
        with pytest.raises(ValueError, match=words):
            hl.Sequences.from_mask(mask, **given).check()


def test_tokens_of_no_sequence_at_all_weigh_nothing(device):
    mask = torch.ones(2, 4, dtype=torch.bool, device=device)
    sequences = hl.Sequences.from_ids(torch.zeros(2, 4, dtype=torch.int64, device=device), 0, mask)
    assert sequences.count == 0 and len(sequences.lengths) == 0 and not sequences.token_share.any()
    assert not sequences.spread(torch.zeros(0, device=device)).any()


def no_sequence_run(group, device, bad):
    """A context-parallel rank without any sequence, or with bounds that the others do not have."""
    mask, last = (
        torch.ones(8, dtype=torch.bool, device=device),
        dist.get_rank(group) == dist.get_world_size(group) - 1,
    )
    if not bad:
        return len(hl.Sequences.from_mask(mask[:0].view(0, 4), group=group).lengths)
    bounds = torch.tensor([0, 4, 9 if last else 8], device=device)
    hl.Sequences.from_cu_seqlens(bounds, mask, group=group).check()


def test_context_parallel_ranks_have_no_sequence_or_all_refuse_the_bounds_of_one():
    assert on_ranks(2, no_sequence_run, False) == [0, 0]
    failures = on_ranks(2, no_sequence_run, True, failures=True)
    assert [failure.kind for failure in failures] == ["ValueError"] * 2
    assert "right on every rank" in failures[0].message and "got [0, 4, 9]" in failures[1].message


def vocabulary_metrics_run(group, device):
    shard = hl.VocabShard.from_group(group, V)
    metrics = {"a": torch.ones((), device=device)}
    with pytest.raises(ValueError, match=r"got the group of a VocabShard"):
        hl.reduce_metrics(metrics, group)
    cycle = [shard]
    cycle.append(cycle)
    del shard, cycle  # a shard that nobody can use any more is none
    return hl.reduce_metrics(metrics, group)["a"].item()


def test_metrics_are_not_added_up_over_the_ranks_that_share_the_vocabulary():
    assert on_ranks(2, vocabulary_metrics_run) == [2.0, 2.0]


def test_second_derivatives_of_sums_over_sequences_are_right(device):
    mask = torch.tensor([[True, True, False], [True, False, False]], device=device)
    sequences = hl.Sequences.from_mask(mask)
    values = torch.randn(2, 3, device=device, requires_grad=True)
    (first,) = torch.autograd.grad(sequences.sum(values).pow(3).sum(), values, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), values)
    sums = torch.where(mask, values, 0).sum(-1, keepdim=True)
    torch.testing.assert_close(
        second, torch.where(mask, 6 * sums * mask.sum(-1, keepdim=True), 0.0).detach()
    )


def test_what_the_caller_does_to_a_mask_or_to_weights_afterwards_changes_nothing(device):
    mask = torch.tensor([[True, True, False], [True, False, False]], device=device)
    sequences, values = (
        hl.Sequences.from_mask(mask),
        torch.ones(2, 3, device=device, requires_grad=True),
    )
    means = sequences.mean(values)
    mask.fill_(False)
    weights, _count = sequences.aggregate("seq-mean-token-mean")
    weights.zero_()
    means.sum().backward()
    assert (
        values.grad.tolist() == [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]] == sequences.token_share.tolist()
    )
