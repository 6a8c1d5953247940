"""Samples and the sets that a sampler keeps: against float64, at every group size and cut, in any
batch."""

import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from collectives import counted_collectives
from ranks import on_ranks

from tp_headloss import (
    Options,
    SamplingRule,
    TeacherHead,
    Transform,
    VocabShard,
    kept_ids,
    sample,
    vocab_statistics,
)
from tp_headloss.call.given import Given
from tp_headloss.call.request_of import build_request
from tp_headloss.search import kept as finder
from tp_headloss.search import race as gumbel
from tp_headloss.search.keys import NO_KEY
from tp_headloss.search.philox import exponential, philox4x32

V = 150  # of 256 padded columns: the last shard of four is all padding
BAD = (8, 9, 10)
RULES = [
    SamplingRule(), SamplingRule(top_k=1), SamplingRule(top_k=17), SamplingRule(top_k=110), SamplingRule(top_k=V + 9),
    SamplingRule(top_p=0.6), SamplingRule(top_p=1e-9), SamplingRule(top_p=1), SamplingRule(min_p=0.05),
    SamplingRule(min_p=1.0), SamplingRule(top_k=9, top_p=0.7), SamplingRule(top_k=40, top_p=0.9, min_p=0.02),
]  # fmt: skip


def rows(dtype=torch.float32):
    x = 2 * torch.randn(11, V, generator=torch.Generator().manual_seed(5))
    x[1] = x[1].round()  # many ties, across shards and at the borders
    x[2, 10:] = -torch.inf
    x[3] = 0.0  # uniform
    x[4, ::3], x[4, 1::3] = -0.0, 0.0  # equal
    x[5] += 300.0
    x[6], x[6, 77] = -torch.inf, 1.0  # one id
    x[7] = 0.01 * x[7] - 20  # in bf16 a few values
    x[8, 3], x[9, 140], x[10] = torch.nan, torch.inf, -torch.inf
    return x.to(dtype)


def prefix_sizes(z, rule, slack):
    """How many ids of z [N, V] float64, by (descending logit, ascending id), the rule keeps; top_p
    + slack."""
    order = z.sort(dim=-1, descending=True, stable=True)
    drop, place = order.values - order.values[:, :1], torch.arange(z.shape[1])
    kept = drop > -torch.inf
    if rule.min_p is not None:
        kept &= drop.exp() >= rule.min_p
    if rule.top_k is not None:
        kept &= place < rule.top_k
    if rule.top_p is not None and rule.top_p < 1:
        p = torch.where(kept, drop.exp(), 0.0)
        p /= p.sum(-1, keepdim=True)
        kept &= (p.cumsum(-1) - p < rule.top_p + slack) | (place == 0)
    return kept.sum(-1), order.indices


def as_lists(sets):
    return [sets.ids[a:b].tolist() for a, b in sets.spans.view(-1, 2).tolist()]


def expect_kept(x, rule, sets, temperature=1.0):
    good = x.isfinite().any(-1) & ~(x.isnan() | (x == torch.inf)).any(-1)
    z = torch.where(good[:, None], (x.float() / temperature).double(), 0.0) + 0.0
    fewest, order = prefix_sizes(z, rule, -1e-12)
    # a sum that is top_p to rounding may fall on either side
    most, _ = prefix_sizes(z, rule, 1e-12)
    assert (most - fewest).max() <= 1
    for i, ids in enumerate(as_lists(sets)):
        assert ids == sorted(order[i, : len(ids)].tolist())
        assert fewest[i] <= len(ids) <= most[i] if good[i] else not ids


def run(group, device, dtype=torch.float32, boundaries=None):
    shard = VocabShard.from_group(group, V, 256)
    if boundaries:
        shard = VocabShard.from_boundaries(boundaries, V, group)
    x = F.pad(rows(dtype), (0, 256 - V), value=90.0)[:, shard.start : shard.stop].to(device)
    positions = torch.arange(len(x), device=device) + (1 << 40)
    transform = Transform(temperature=0.7)
    sets = [kept_ids(x, rule, shard=shard, transform=transform) for rule in RULES]
    draws = [sample(x, seed=3, positions=positions, rule=rule, shard=shard, transform=transform)
             for rule in (None, *RULES[-2:])]  # fmt: skip
    with counted_collectives() as events:
        sample(x, seed=3, positions=positions, shard=shard, options=Options(transport="gather"))
    return sets, draws, sum(events.values())


CUTS = [(1, None), (2, None), (4, [0, 5, 5, 149, 200])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sets_and_samples_are_the_same_at_every_group_size_and_equal_float64(dtype):
    for world_size, cut in CUTS if dtype == torch.float32 else CUTS[:2]:
        results = on_ranks(world_size, run, dtype, cut)
        if world_size == 1:
            first = results[0]
            for rule, sets in zip(RULES, first[0], strict=True):
                expect_kept(rows(dtype), rule, sets, 0.7)
        for sets, draws, collectives in results:
            assert collectives == (2 if world_size > 1 else 0)  # race, log-probs
            for a, b in zip(sets, first[0], strict=True):
                assert torch.equal(a.ids, b.ids) and torch.equal(a.spans, b.spans)
            for a, b in zip(draws, first[1], strict=True):
                assert torch.equal(a.ids, b.ids)
                for name in ("log_probs", "full_log_probs"):
                    ours, alone = getattr(a, name), getattr(b, name)
                    if cut:  # not whole chunks: the order of sums is another
                        torch.testing.assert_close(
                            ours, alone, equal_nan=True, rtol=1e-6, atol=1e-6
                        )
                    else:
                        assert torch.equal(ours.nan_to_num(9.0), alone.nan_to_num(9.0))
    for draw in first[1]:
        bad = torch.isin(torch.arange(11), torch.tensor(BAD))
        assert torch.equal(draw.ids == -1, bad) and torch.equal(draw.log_probs.isnan(), bad)
        assert torch.equal(draw.full_log_probs.isnan(), bad)


def candidates(number):
    """Let every rank send so many candidates per token, half as many more, and none to spare; small
    groups; and let the ranks gather two other tokens at a time."""
    return mock.patch.multiple(
        finder, CANDIDATES=number, FEWEST=number, SPARE=0, GROUPS=1, FLAT_ELEMENTS=2 * V
    )


def few_run(group, device, number, boundaries):
    if boundaries == "reversed":
        start, stop = (100, V) if group.rank() == 0 else (0, 100)
        shard = VocabShard(start, stop, V, group)
    else:
        shard = (
            VocabShard.from_boundaries(boundaries, V, group)
            if boundaries
            else VocabShard.from_group(group, V, 256)
        )
    x = F.pad(rows(), (0, 256 - V), value=90.0)[:, shard.start : shard.stop].to(device)
    positions = torch.arange(len(x), device=device)
    p, k = (torch.linspace(a, b, len(x), device=device) for a, b in ((0.2, 1.0), (1, V + 20)))
    rules = [
        *RULES,
        SamplingRule(top_p=p),
        SamplingRule(k.long()),
        SamplingRule(k.long(), p, 1 - p),
    ]
    with candidates(number):
        return [sample(x, seed=6, positions=positions, rule=rule, shard=shard) for rule in rules]


@pytest.mark.parametrize("number", [1, 2, 9, 40])
def test_sets_and_samples_are_the_same_with_few_candidates(number):
    """Fewer than most sets have, as many as a set has, more than a shard has columns; ties at the
    borders."""
    (whole,) = on_ranks(1, few_run, V, None)
    for world_size, cut in (CUTS[0], CUTS[2], (2, "reversed")):
        for draws in on_ranks(world_size, few_run, number, cut):
            for a, b in zip(draws, whole, strict=True):
                assert torch.equal(a.ids, b.ids)
                assert torch.equal(a.sets.ids, b.sets.ids) and torch.equal(
                    a.sets.spans, b.sets.spans
                )


def test_backends_agree_on_any_layout_of_the_logits(device):
    x, positions = rows()[:, 1:].to(device), torch.arange(11, device=device)
    kinds = x, x.t().contiguous().t(), x.repeat(1, 2)[:, : V - 1]
    places = positions, positions.repeat_interleave(2)[::2]
    p = torch.linspace(0.5, 0.9, 11, device=device)
    rules = (
        None,
        SamplingRule(top_p=0.8),
        SamplingRule(top_k=5),
        SamplingRule(top_p=p.repeat_interleave(2)[::2]),
    )
    # each rule with each layout, and the positions' two with each of both
    for i, rule in enumerate(rules):
        draws = [sample(y, seed=2, positions=places[(i + j) % 2], rule=rule, options=Options(backend=backend))
                 for j, y in enumerate(kinds) for backend in ("torch", "triton")]  # fmt: skip
        for draw in draws[1:]:
            assert torch.equal(draw.ids, draws[0].ids)
            assert rule is None or as_lists(draw.sets) == as_lists(draws[0].sets)


def others_of(z, rule, number):
    """Tokens that keep more than so many candidates, of which those that equal the last one are
    dropped."""
    request = build_request(Given(z, shard=VocabShard.from_group(None, z.shape[1])))
    with candidates(number):
        _, *others = finder.find_kept(request, rule)
    return [token for kept in others for token in kept.tokens.tolist()]


def test_a_set_may_end_with_the_last_known_candidate(device):
    p = torch.tensor(
        [[0.4, 0.2, 0.1, 0.1, 0.1, 0.1], [0.3, 0.3, 0.3, 0.06, 0.03, 0.01]], device=device
    )
    z = p.log()
    # the bound is the n-th largest, and one that more than n + n // 2 reach, as the third of row 0,
    # is of no use
    assert (
        others_of(z, SamplingRule(top_k=2), 1) == [0, 1]
        and others_of(z, SamplingRule(top_k=2), 2) == []
    )
    assert (
        others_of(z, SamplingRule(top_k=4), 3) == [0, 1]
        and others_of(z, SamplingRule(top_k=4), 4) == []
    )
    assert others_of(z, SamplingRule(top_p=0.59), 2) == [] and others_of(
        z, SamplingRule(top_p=0.61), 2
    ) == [0]
    assert (
        others_of(z, SamplingRule(top_p=0.59), 3) == [0]
        and others_of(z, SamplingRule(top_p=0.61), 4) == []
    )
    assert others_of(z, SamplingRule(min_p=0.6), 2) == [1] and others_of(
        z, SamplingRule(min_p=0.4), 2
    ) == [0, 1]
    assert (
        others_of(z, SamplingRule(top_p=1), 3) == [0, 1]
        and others_of(z, SamplingRule(top_p=1), 4) == []
    )
    no_k = torch.tensor([2, 6], device=device)  # top-k of all ids is none
    assert others_of(z, SamplingRule(no_k, 0.85), 4) == []
    assert as_lists(kept_ids(z, SamplingRule(no_k, 0.85))) == [[0, 1], [0, 1, 2]]


def count_run(group, device):
    """Collectives of `kept_ids`."""
    shard, x = VocabShard.from_group(group, V), rows()[:1].to(device)
    counts = []
    for rule, number in [
        (SamplingRule(top_k=9), 30),
        (SamplingRule(top_p=0.6), 30),
        (SamplingRule(top_k=40), 9),
    ]:
        with candidates(number), counted_collectives() as events:
            kept_ids(x[:, shard.start : shard.stop], rule, shard=shard)
        counts.append(sum(events.values()))
    return counts


def test_a_short_set_takes_one_exchange_for_top_k_and_two_for_top_p():
    assert on_ranks(2, count_run) == [[1, 2, 1 + 2]] * 2  # a long one: widths, and its logits


@pytest.mark.parametrize(
    "shape, programs", [((1, 3000), 1024), ((4, 3000), 1), ((9, 129), 1024), ((25, 3), 10)]
)
def test_the_kernels_are_their_definitions(shape, programs, device, monkeypatch):
    from tp_headloss.search import race_triton as gumbel_triton

    # a program of several tiles leaves some out
    monkeypatch.setattr(gumbel_triton, "PROGRAMS", programs)
    z = 0.5 * torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
    z[0] = z[0].round()
    z[:, ::3] = -torch.inf
    if len(z) > 2:
        z[1], z[2, 1] = -torch.inf, torch.nan
    positions = torch.arange(len(z), device=device) - (1 << 33)
    ids = torch.arange(z.numel(), device=device).view(shape) * 7919 % (1 << 31)
    for given in (None, ids, ids.t().contiguous().t()):
        best, winner = gumbel.best_scores(z, positions, 2**64 - 3, 77, given)
        ours, id_ = gumbel_triton.best_scores(z, positions, 2**64 - 3, 77, given)
        # the logarithm of the interpreter is numpy's
        torch.testing.assert_close(ours, best, rtol=1e-15, atol=1e-15)
        assert torch.equal(id_[best.isfinite()], winner[best.isfinite()])
    for part in (gumbel, gumbel_triton):  # a shard without columns: no id is lower
        assert (part.best_scores(z[:, :0], positions, 3, 77)[1] == gumbel.LAST).all()
    peak = z.nan_to_num(-torch.inf).amax(1).clamp(min=-9.0)
    lowest = torch.full((len(z),), -torch.inf, dtype=torch.float64, device=device)
    lowest[1::2] = -1.0
    for groups in (1, 7, 200):
        assert torch.equal(gumbel.group_maxima(z, groups), gumbel_triton.group_maxima(z, groups))
    bound = torch.linspace(-1.0, 1.0, len(z), device=device)
    bound[0], most = -torch.inf, min(100, z.shape[1])
    bound[1::2] = z[1::2].nan_to_num(0.0).amax(1)  # which the largest logit reaches
    given = z, bound, most, 77, peak, lowest, 2.0**40
    (keys, count, mass), (ours, own, sums) = (
        part.largest_logits(*given) for part in (gumbel, gumbel_triton)
    )
    assert torch.equal(count, own) and count.max() > 0
    whole = count <= most  # any are left out of more
    assert (
        torch.equal(keys[whole].sort().values, ours[whole].sort().values)
        and (ours[~whole] > NO_KEY).all()
    )
    assert (mass - sums).abs().max() <= z.shape[1]  # an exponential may round to the integer above
    assert gumbel_triton.largest_logits(*given[:4])[2] is None


def test_half_of_a_uniform_distribution_is_half_of_its_ids():
    sets = kept_ids(torch.full((1, 8), 2.5), SamplingRule(top_p=0.5))
    assert sets.ids.tolist() == [0, 1, 2, 3]
    sets = kept_ids(torch.full((1, 8), 2.5), SamplingRule(top_k=6, top_p=0.5))
    assert sets.ids.tolist() == [0, 1, 2]  # renormalised over the six
    tail = torch.tensor([[0.0, -900.0, -torch.inf]])  # probabilities of 1, 0 and 0 in float64
    assert kept_ids(tail, SamplingRule(top_p=1.0)).ids.tolist() == [0, 1]


# counter, key, expected: kat_vectors of Random123, the authors' own implementation
KNOWN_ANSWERS = """
00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1
"""


def test_the_generator_gives_its_published_answers(device):
    for line in KNOWN_ANSWERS.strip().splitlines():
        words = [int(word, 16) for word in line.split()]
        counter = tuple(torch.tensor([word], device=device) for word in words[:4])
        assert [int(word) for word in philox4x32(counter, tuple(words[4:6]))] == words[6:]
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    uniform = ((0x6627E8D5E169C58D >> 12) + 0.5) / 2**52  # the first two words of the first line
    assert float(exponential(0, zero, zero)) == pytest.approx(-math.log1p(-uniform), rel=1e-15)


@pytest.mark.parametrize(
    "number, rule, kept",
    [(1_000_000, None, [0, 1, 2, 3, 4]), (100_000, SamplingRule(top_p=0.75), [0, 1, 2])],
)
def test_many_draws_follow_the_distribution(number, rule, kept, device):
    p, positions = torch.tensor([0.42, 0.3, 0.2, 0.079, 0.001]), torch.arange(number, device=device)
    draws = sample(
        p.log().to(device).expand(number, 5), seed=2**63 + 11, positions=positions, rule=rule
    )
    share = torch.zeros(5).double().index_fill(0, torch.tensor(kept), 1.0) * p.double()
    share /= share.sum()
    counts = draws.ids.cpu().bincount(minlength=5).double()
    assert not counts[share == 0].any()
    expected = number * share[kept]
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    # exceeded with a probability below 0.001 at len(kept) - 1 degrees
    assert chi_square < 3 * len(kept) + 5
    torch.testing.assert_close(
        draws.log_probs.cpu().double(), share.log()[draws.ids.cpu()], rtol=1e-5, atol=1e-6
    )


def test_a_token_has_one_sample_in_every_batch_and_block(monkeypatch, device):
    x = rows()[:8].to(device)
    positions = torch.arange(8, device=device) * 1000 - 3
    rule = SamplingRule(top_k=30, top_p=0.95)
    for given in (None, rule):
        whole = sample(x, seed=1, positions=positions, rule=given)
        order = torch.tensor([5, 0, 7, 2], device=device)
        part = sample(
            x[order].view(2, 2, V), seed=1, positions=positions[order].view(2, 2).int(), rule=given
        )
        assert torch.equal(part.ids, whole.ids[order].view(2, 2))
        assert torch.equal(part.log_probs, whole.log_probs[order].view(2, 2))
    assert as_lists(part.sets) == [as_lists(whole.sets)[i] for i in order.tolist()]
    assert not torch.equal(
        sample(x, seed=2, positions=positions).ids, sample(x, seed=1, positions=positions).ids
    )
    for name in ("BLOCK_ELEMENTS", "GPU_BLOCK_ELEMENTS", "TILE_ELEMENTS"):
        monkeypatch.setattr(finder, name, 3 * V)
    blocks = sample(x, seed=1, positions=positions, rule=rule)
    assert torch.equal(blocks.ids, whole.ids) and as_lists(blocks.sets) == as_lists(whole.sets)


def test_log_probs_are_those_of_the_statistics_over_the_sets(options, device):
    x = rows()[:3].to(device)
    draw = sample(
        x, seed=9, positions=torch.arange(3, device=device), rule=RULES[-1], options=options
    )
    stats = vocab_statistics(x, draw.ids, want=("set_log_prob",), sets=draw.sets, options=options)
    assert torch.equal(draw.log_probs, stats.set_log_prob) and torch.equal(
        draw.full_log_probs, stats.log_prob
    )
    assert all(int(i) in ids for i, ids in zip(draw.ids, as_lists(draw.sets), strict=True))


def test_every_token_may_have_a_rule_of_its_own(device):
    x = rows()[:4].view(2, 2, V).to(device)
    k = torch.tensor([[3, V], [0, 5]], device=device)
    p = torch.tensor([[0.9, 0.5], [0.9, torch.nan]], device=device)
    m = torch.tensor([[0.0, 0.1], [0.0, 0.0]], device=device)
    found = as_lists(kept_ids(x, SamplingRule(k, p, m)))
    assert found[2] == found[3] == []
    for i in (0, 1):
        rule = SamplingRule(int(k[0, i]), float(p[0, i]), float(m[0, i]))
        assert as_lists(kept_ids(x[0, i : i + 1], rule)) == [found[i]]


def hidden_run(group, device):
    generator = torch.Generator().manual_seed(8)
    hidden, weight = (
        torch.randn(2, 5, 16, generator=generator),
        torch.randn(V, 16, generator=generator),
    )
    shard = VocabShard.from_group(group, V, 256)
    part = F.pad(weight, (0, 0, 0, 256 - V))[shard.start : shard.stop].to(device)
    temperature = torch.linspace(0.5, 2, 10).view(2, 5).to(device)
    positions, hidden, rule = (
        torch.arange(10, device=device).view(2, 5),
        hidden.to(device),
        SamplingRule(top_k=6),
    )
    transform = Transform(temperature=temperature)
    draw = sample(
        hidden,
        seed=4,
        positions=positions,
        rule=rule,
        weight=part,
        shard=shard,
        transform=transform,
    )
    head = TeacherHead(hidden, part, temperature=temperature)
    assert torch.equal(
        sample(head, seed=4, positions=positions, rule=rule, shard=shard).ids, draw.ids
    )
    return (
        as_lists(kept_ids(head, rule, shard=shard)),
        draw,
        (hidden @ weight.to(device).T) / temperature[..., None],
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_hidden_states_and_a_weight_are_as_good_as_logits(world_size):
    for sets, draw, z in on_ranks(world_size, hidden_run):
        assert sets == as_lists(draw.sets) == z.view(10, V).topk(6).indices.sort().values.tolist()
        log_p = z.double().log_softmax(-1).gather(-1, draw.ids[..., None])[..., 0]
        torch.testing.assert_close(draw.full_log_probs.double(), log_p, rtol=1e-5, atol=1e-5)


def no_tokens_run(group, device):
    shard = VocabShard.from_group(group, V)
    x, positions = torch.zeros(0, shard.width, device=device), torch.zeros(0, device=device).long()
    draw = sample(x, seed=0, positions=positions, rule=SamplingRule(top_p=0.5), shard=shard)
    return [list(x.shape) for x in (*draw[:3], draw.sets.ids, draw.sets.spans)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_tokens_have_no_samples(world_size):
    assert on_ranks(world_size, no_tokens_run) == [[[0], [0], [0], [0], [0, 2]]] * world_size


X, POSITIONS = torch.zeros(2, 5), torch.arange(2)
WRONG = {  # others are in tests/helpers/odd_inputs.py and tests/promises/test_spec.py
    r"top_k must have shape \[2\] to fit logits, got \[3\]": lambda: kept_ids(
        X, SamplingRule(top_k=torch.ones(3).long())
    ),
    "top_k must be int64 or int32": lambda: kept_ids(X, SamplingRule(top_k=torch.ones(2))),
    "top_p must be floating point, got torch.int64": lambda: kept_ids(
        X, SamplingRule(top_p=POSITIONS)
    ),
    r"positions must have shape \[2\] to fit logits, got \[1\]": lambda: sample(
        X, seed=0, positions=POSITIONS[:1]
    ),
    "must have the shard's 6 columns": lambda: kept_ids(
        X, SamplingRule(), shard=VocabShard(0, 6, 6)
    ),
    r"at most 2\^24 ids, got 33554432": lambda: kept_ids(
        torch.zeros(0, 1 << 25), SamplingRule(top_k=1)
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_be_is_refused(words):
    with pytest.raises((ValueError, TypeError), match=words):
        WRONG[words]()
