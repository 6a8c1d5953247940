"""Costs of a linear head: sweeps, collectives, memory, and nothing for what is frozen or
ignored."""

import collections
import logging
import random
import types

import pytest
import torch
from collectives import counted_collectives
from linear_problem import BOTH, H, Largest, N, V, relative, small_blocks, tensors, terms
from ranks import on_ranks

from tp_headloss import (
    CrossEntropy,
    HeadLoss,
    Linear,
    Options,
    Sequences,
    Term,
    VocabShard,
    linear_vocab_statistics,
)
from tp_headloss.engine import operators
from tp_headloss.head_loss import linear_ways
from tp_headloss.linear_head import autograd, blocks, sweeps
from tp_headloss.linear_head import request as linear_request


def frozen_run(group, device, needs, how, mode):
    """What each rank's operands require -> gradients, collectives, shapes of the products."""
    rank = 0 if group is None else group.rank()
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors())
    shard = VocabShard.from_group(group, V)
    operands = [
        x.clone().requires_grad_(need)
        for x, need in zip((hidden, weight[shard.start : shard.stop]), needs[rank])
    ]
    products, multiply = [], sweeps.multiply

    def counted(out, a, b, add=False):
        products.append(tuple(out.shape))
        multiply(out, a, b, add)

    sweeps.multiply = counted
    try:
        with counted_collectives() as collectives:
            head = HeadLoss([CrossEntropy()], options=Options(transport="gather"))
            head.linear(
                *operands, labels, shard=shard, linear=Linear(mode, hidden_grad=how)
            ).loss.backward()
    finally:
        sweeps.multiply = multiply
    return [None if x.grad is None else x.grad.cpu() for x in operands], dict(collectives), products


@BOTH
@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)])
def test_what_is_frozen_costs_nothing(needs, mode):
    grads, _, products = on_ranks(1, frozen_run, [needs], "all_reduce", mode)[0]
    made = products.count((N, V))
    assert [g is not None for g in grads] == list(needs)
    assert made == (2 if mode == "recompute" else 1) and len(products) == made + sum(needs)


@BOTH
def test_collectives_do_not_depend_on_what_requires_grad(mode):
    """Rank 1's hidden states are frozen, and rank 0's weight; rank 0's dH is the sum of both parts
    all the same."""
    everything = on_ranks(2, frozen_run, [(True, True)] * 2, "all_reduce", mode)
    mixed = on_ranks(2, frozen_run, [(True, False), (False, True)], "all_reduce", mode)
    assert mixed[0][1] == mixed[1][1] == everything[0][1]
    if on_cpu():
        assert everything[0][1] == {"gloo:all_gather": 1, "gloo:all_reduce": 1}
    assert torch.equal(mixed[0][0][0], everything[0][0][0]) and mixed[1][0][0] is None
    assert mixed[0][0][1] is None and torch.equal(mixed[1][0][1], everything[1][0][1])
    partial = on_ranks(2, frozen_run, [(False, True)] * 2, "none", mode)
    assert not any("reduce" in name for name in partial[0][1])
    assert len(partial[0][2]) == (3 if mode == "recompute" else 2)


def on_cpu():
    """Where there are GPUs, packets may go through symmetric memory, which the profiler does not
    count."""
    return not torch.cuda.is_available()


def exchanges_run(group, device, mode, how):
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors())
    shard = VocabShard.from_group(group, V)
    hidden = hidden.chunk(2)[group.rank()] if how == "reduce_scatter" else hidden
    operands = [x.clone().requires_grad_() for x in (hidden, weight[shard.start : shard.stop])]
    linear = Linear(mode=mode, hidden_grad=how, budget=16 * 128 * 4)
    with small_blocks(), counted_collectives() as forward:
        loss = HeadLoss(terms()).linear(*operands, labels, shard=shard, linear=linear).loss
    with small_blocks(), counted_collectives() as backward:
        loss.backward()
    return {k.split(":")[1]: v for k, v in forward.items()}, {
        k.split(":")[1]: v for k, v in backward.items()
    }


def test_one_exchange_for_all_blocks():
    if not on_cpu():
        pytest.skip("counts gloo's collectives")
    for how, gathers, reduction in (
        ("all_reduce", 0, {"all_reduce": 1}),
        ("reduce_scatter", 1, None),
        ("none", 0, {}),
    ):
        for forward, backward in on_ranks(2, exchanges_run, "recompute", how):
            assert forward == {"all_gather": 1 + gathers}
            backward.pop("all_gather", None)
            assert backward == reduction if reduction is not None else len(backward) == 1
    # three blocks of 16 tokens
    for forward, backward in on_ranks(2, exchanges_run, "one_sweep", "all_reduce"):
        assert forward == {"all_gather": 3, "all_reduce": 1} and backward == {}


def test_ignored_tokens_are_dropped_by_their_count():
    hidden, weight, _, labels, weights = tensors()
    hidden[labels == -100] = torch.nan  # never looked at
    count, head = int((labels != -100).sum()), HeadLoss(terms(), metrics=("accuracy",))
    clean = torch.where((labels == -100)[:, None], 0.0, hidden)

    def run(hidden, linear, head=head, **kw):
        operands = [x.clone().requires_grad_() for x in (hidden.view(2, -1, H), weight)]
        out = head.linear(
            *operands, labels.view(2, -1), token_weight=weights.view(2, -1), linear=linear, **kw
        )
        return out, torch.autograd.grad(out.loss.sum(), operands)

    expected, expected_grads = run(clean, Linear())
    for mode in ("recompute", "one_sweep"):
        for most in (count, count + 3):
            out, grads = run(
                hidden if most == count else clean, Linear(mode=mode, max_valid_tokens=most)
            )
            torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=0)
            torch.testing.assert_close(out.metrics, expected.metrics)
            torch.testing.assert_close(
                out.stats.log_prob, expected.stats.log_prob, rtol=1e-5, atol=1e-6
            )
            assert torch.equal(out.stats.valid, expected.stats.valid)
            assert torch.equal(out.stats.labels, labels.view(2, -1))
            assert all(relative(a, b) < 2e-6 for a, b in zip(grads, expected_grads))
    few, _ = run(clean, Linear(max_valid_tokens=count - 1))
    assert (
        few.loss.isnan()
        and few.stats.log_prob.isnan().sum() == 1
        and few.stats.log_prob.flatten()[-1].isnan()
    )
    # in memory another is the last
    turned = clean.view(2, -1, H).transpose(0, 1).contiguous().transpose(0, 1)
    stats = linear_vocab_statistics(
        turned, weight, labels.view(2, -1), linear=Linear(max_valid_tokens=count - 1)
    )
    assert torch.equal(stats.log_prob.isnan(), few.stats.log_prob.isnan())
    none = HeadLoss(terms(), reduction="none")
    per_token, _ = run(hidden, Linear(max_valid_tokens=count), none)
    torch.testing.assert_close(
        per_token.loss, run(clean, Linear(), none)[0].loss, rtol=1e-5, atol=1e-6
    )
    few, grads = run(clean, Linear(max_valid_tokens=count - 1), none)
    assert few.loss.isnan().all() and grads[1].isnan().all()  # those of tokens alone, too
    assert few.count.isnan() and all(x.isnan() for x in few.means().values())
    stats = linear_vocab_statistics(
        hidden, weight, labels, linear=Linear(max_valid_tokens=count), want=("argmax",)
    )
    assert (stats.argmax == -1).sum() == N - count and (stats.lse == 0).sum() == N - count


@pytest.mark.parametrize("reduction", ["mean", "seq-mean-token-mean"])
def test_sequences_may_have_dropped_tokens(reduction):
    hidden, weight, _, labels, _ = tensors()
    sequences = Sequences.from_mask((labels != -100).view(4, 11))
    head = HeadLoss(terms(), reduction=reduction, metrics=("entropy",))
    outputs = []
    for linear in (Linear(), Linear(max_valid_tokens=int((labels != -100).sum()))):
        x = hidden.clone().requires_grad_()
        out = head.linear(
            x.view(4, 11, H),
            weight,
            labels.view(4, 11),
            inputs={"sequences": sequences},
            linear=linear,
        )
        outputs.append(
            (out.loss, out.metrics, out.sequence_metrics, *torch.autograd.grad(out.loss, x))
        )
    torch.testing.assert_close(outputs[1], outputs[0], rtol=2e-6, atol=1e-7)
    few = head.linear(
        hidden.view(4, 11, H), weight, labels.view(4, 11), inputs={"sequences": sequences},
        linear=Linear(max_valid_tokens=3),
    )  # fmt: skip
    assert all(x.isnan() for x in (few.loss, *few.metrics.values(), *few.sequence_metrics.values()))


@BOTH
def test_no_tensor_is_as_large_as_the_logits(mode, monkeypatch):
    """Whatever the number of tokens: beyond them [N, H] and the weight, only blocks within the
    budget."""
    for module in (operators, autograd):  # what an operator does would not be seen
        monkeypatch.setattr(module, "can_skip_dispatch", lambda _: True)
    width, hidden_size, budget = 512, 4, 32 * 512 * 4
    for tokens in (256, 1024):
        hidden = torch.randn(tokens, hidden_size).requires_grad_()
        weight = torch.randn(width, hidden_size).requires_grad_()
        labels = torch.randint(width, (tokens,))
        with small_blocks(), Largest() as largest:
            HeadLoss(terms()).linear(
                hidden, weight, labels, linear=Linear(mode=mode, budget=budget)
            ).loss.backward()
        per_token = 8 * 64  # packets of 8 chunks in float64
        assert budget // 2 <= largest.bytes <= max(budget, tokens * per_token) < 4 * tokens * width


def test_the_budget_is_kept_and_named():
    Sizes = blocks.Sizes
    for sizes in (Sizes(8192, 32064, 4096, 2, True, False), Sizes(8192, 32064, 4096, 2, True, True),
                  Sizes(1000, 50257, 768, 4, False, False), Sizes(100_000, 999, 64, 2, True, True)):  # fmt: skip
        n, width, hidden = sizes[:3]
        for planner in (blocks.recompute_blocks, blocks.one_sweep_tokens):
            minimum = blocks.minimum_budget(planner, sizes)
            assert (
                planner(sizes, minimum) is not None and planner(sizes, minimum * 15 // 16) is None
            )
            for budget in (minimum, 2 * minimum, 20 * minimum):
                plan = planner(sizes, budget)
                forward, tokens, columns = plan if isinstance(plan, tuple) else (plan, plan, width)
                assert forward * sizes.row(width) <= budget
                held = tokens * sizes.row(columns)
                held += 4 * width * hidden if sizes.weight_sums and tokens < n else 0
                held += 4 * tokens * hidden if sizes.sums and columns < width else 0
                assert held <= budget and tokens <= n and columns <= width
    hidden, weight, _, labels, _ = tensors()
    with pytest.raises(ValueError, match="budget must be at least"):
        linear_vocab_statistics(hidden, weight, labels, linear=Linear(budget=1000))
    with pytest.raises(ValueError, match="budget must be at least"):
        HeadLoss().linear(
            hidden.requires_grad_(), weight, labels, linear=Linear(mode="one_sweep", budget=1000)
        )


# (tokens, H, ids, whether dW goes into a main_grad) -> tokens and ids of a block: time over four
# GEMMs, H200, in turns
MEASURED_PLANS = {
    (8192, 4096, 16032, True): {(8192, 3072): 1.148, (4096, 16032): 1.078, (1024, 16032): 1.24, (1536, 2304): 1.397},
    (8192, 4096, 32064, True): {(2048, 6016): 1.171, (2048, 7808): 1.146, (8192, 3072): 1.073, (4096, 16128): 1.061,
                                (8192, 7168): 1.061, (4096, 32064): 1.05},
    (8192, 4096, 32064, False): {(8192, 3072): 1.088, (8192, 3968): 1.088, (8192, 8192): 1.02},
    (8192, 4096, 128256, True): {(8192, 7168): 0.985, (4096, 18944): 1.011, (8192, 14592): 0.987},
    (8192, 5120, 19008, True): {(1408, 3072): 1.351, (1024, 19008): 1.185, (8192, 4096): 1.053, (4096, 19008): 1.085},
    (8192, 5120, 19008, False): {(8192, 1536): 1.188, (8192, 2304): 1.138},
    (8192, 8192, 32064, True): {(8192, 3584): 1.073, (4096, 32064): 1.021, (8192, 7680): 1.045},
    (2048, 4096, 32064, True): {(2048, 3968): 1.257, (1024, 16128): 1.234, (2048, 6144): 1.13, (2048, 7936): 1.158},
}  # fmt: skip


def test_plans_of_least_cost_are_nearly_the_fastest():
    """Of the measured plans that fit in a budget, the one with the least cost takes at most 3.5 %
    longer than any."""
    for (n, hidden, width, main_grad), plans in MEASURED_PLANS.items():
        sizes = blocks.Sizes(n, width, hidden, 2, True, not main_grad)
        held = {(t, c): t * sizes.row(c) + 4 * t * hidden * (c < width) for t, c in plans}
        for budget in held.values():
            fitting = [plan for plan in plans if held[plan] <= budget]
            best = min(fitting, key=lambda plan: blocks._backward_cost(sizes, *plan))
            assert plans[best] <= min(plans[plan] for plan in fitting) + 0.035, (
                n,
                hidden,
                width,
                main_grad,
                best,
            )


def test_half_of_a_round_that_leaves_multiprocessors_idle_is_counted():
    tile, one_round = (
        blocks.GEMM_TILE[0] * blocks.GEMM_TILE[1],
        blocks.PROCESSORS * blocks.GEMM_TILE[0],
    )
    assert blocks._elements(one_round, blocks.GEMM_TILE[1]) == tile
    assert blocks._elements(one_round + 1, blocks.GEMM_TILE[1]) == pytest.approx(
        1.5 * tile, rel=1e-3
    )


def random_sizes(count):
    choices = random.Random(0)
    for _ in range(count):
        n = choices.randint(1, choices.choice((300, 20_000, 131_072)))
        width, hidden = choices.randint(8, 40_000), choices.choice((512, 2048, 4096))
        flags = choices.random() < 0.5, choices.random() < 0.5
        yield blocks.Sizes(n, width, hidden, choices.choice((2, 4, 6)), *flags)


def test_no_plan_is_left_out_that_takes_less(monkeypatch):
    """A search over every number of blocks finds the same plans."""

    def plans():
        return [
            blocks.planned(blocks.recompute_blocks, sizes, budget)
            for sizes in random_sizes(60)
            for budget in (None, 1 << 28, 1 << 30, 1 << 32)
        ]

    found = plans()
    blocks.recompute_blocks.cache_clear()
    monkeypatch.setattr(blocks, "_least_cost", lambda *_: 0.0)
    assert found == plans()
    blocks.recompute_blocks.cache_clear()


@pytest.mark.parametrize("tokens", [131_072, 1 << 20])
def test_a_plan_of_many_tokens_looks_at_few_others(tokens, monkeypatch):
    """Each new number of tokens is planned once, and a step waits for it."""
    counts, cost = collections.Counter(), blocks._backward_cost
    monkeypatch.setattr(
        blocks, "_backward_cost", lambda *args: counts.update(["plans"]) or cost(*args)
    )
    blocks.recompute_blocks.cache_clear()
    sizes = blocks.Sizes(tokens, 128256, 4096, 2, True, True)
    assert blocks.planned(blocks.recompute_blocks, sizes, None) is not None
    assert 0 < counts["plans"] < 5000


def test_a_main_grad_is_counted_in_every_plan():
    """The only block of tokens reads and writes it, too: then two are as good as one, where each
    sums dH less often."""
    budget = 8192 * 32064 * 2 // 8 + 4 * 8192 * 4096  # an eighth of the logits, and sums of dH
    returned, added = (
        blocks.recompute_blocks(blocks.Sizes(8192, 32064, 4096, 2, True, weight_sums), budget)
        for weight_sums in (True, False)
    )
    assert returned.tokens == 8192 and added.tokens == 4096 and added.columns > 3 * returned.columns


def test_auto_says_what_it_does(caplog, monkeypatch):
    monkeypatch.setattr(linear_request, "_logged_modes", set())
    hidden, weight, _, labels, _ = tensors()
    hidden.requires_grad_()
    with caplog.at_level(logging.INFO, "tp_headloss"):
        for head in (
            HeadLoss(),
            HeadLoss(reduction="none"),
            HeadLoss([Term("own", lambda s: s.lse)]),
        ):
            head.linear(hidden, weight, labels)
        with torch.no_grad():
            HeadLoss().linear(hidden, weight, labels)
    assert [record.message for record in caplog.records] == [
        "linear head: one sweep",
        "linear head: recompute",
    ]
    with caplog.at_level(logging.DEBUG, "tp_headloss"):
        HeadLoss().linear(hidden, weight, labels)
        # blocks that are too small to be fast
        monkeypatch.setattr(blocks, "one_sweep_tokens", lambda *_: 40)
        HeadLoss().linear(hidden, weight, labels)
    assert [record.message for record in caplog.records[2:]] == [
        "linear head: one sweep",
        "linear head: recompute",
    ]


@pytest.mark.parametrize("main_grad", [False, True])
def test_auto_takes_one_sweep_where_it_is_a_small_share_of_a_gpu(main_grad, monkeypatch):
    """Of half precision, whose dW is summed in fp32; in a budget of the caller's, it is his."""
    n, hidden_size, width = 1000, 128, 100_000
    hidden = torch.zeros(n, hidden_size, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(width, hidden_size, dtype=torch.bfloat16, requires_grad=True)
    weight.main_grad = torch.zeros(width, hidden_size)
    labels = torch.zeros(n, dtype=torch.long)
    needed = 2 * 512 * width + 4 * width * hidden_size  # a block and dW in fp32
    for share, budget, way in (
        (needed, None, "one sweep"),
        (needed - 1, None, "blocks"),
        (needed, 1 << 20, "blocks"),
    ):
        monkeypatch.setattr(linear_request, "free_share", lambda _, share=share: share)
        linear = Linear(main_grad=main_grad, budget=budget)
        assert HeadLoss().explain_linear(hidden, weight, labels, linear=linear).way == way


@pytest.mark.parametrize("room, is_named", [(2 * 600 * 100, True), (2 * 600 * 100 - 1, False)])
def test_explain_names_whole_logits_where_they_fit(room, is_named, monkeypatch):
    """Which take less time than one sweep."""
    hidden = torch.zeros(600, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(100, 16, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(600, dtype=torch.long)
    monkeypatch.setattr(linear_ways, "free_share", lambda _: room)
    head, recompute = HeadLoss(), Linear("recompute")
    found = head.explain_linear(hidden, weight, labels, linear=Linear("one_sweep"))
    assert found.way == "one sweep" and ("whole logits" in found.obstacles) == is_named
    found = head.explain_linear(hidden, weight, labels, linear=recompute)
    assert "whole logits" not in found.obstacles  # who asks for recompute has no room


@pytest.mark.parametrize(
    "gib, share", [(79.1, 4), (79.6, 4), (80.0, 4), (139.8, 8), (39.4, 2), (23.6, 1)]
)
def test_the_share_is_that_of_a_kind_of_gpu(gib, share, monkeypatch):
    facts = types.SimpleNamespace(total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    linear_request.free_share.cache_clear()
    assert linear_request.free_share(torch.device("cuda", 0)) == share << 30
    linear_request.free_share.cache_clear()
    assert linear_request.free_share(torch.device("cpu")) == 0


def test_the_mode_of_a_repeated_call_follows_gradients(caplog):
    hidden, weight, _, labels, _ = tensors()
    head, divisor = HeadLoss(), torch.tensor(5.0)
    trained = divisor.clone().requires_grad_()
    cases = [
        (True, divisor, "one sweep"),
        (False, divisor, "recompute"),
        (True, trained, "recompute"),
    ]
    with caplog.at_level(logging.DEBUG, "tp_headloss"):
        for enabled, denominator, _ in 2 * cases:
            with torch.set_grad_enabled(enabled):
                head.linear(hidden.requires_grad_(), weight, labels, denominator=denominator)
    assert [record.message for record in caplog.records] == [
        f"linear head: {mode}" for *_, mode in 2 * cases
    ]


def trainable_run(group, device, needs, mode):
    hidden, weight, _, labels, _ = (x.to(device) for x in tensors())
    shard = VocabShard.from_group(group, V)
    hidden.requires_grad_(needs[group.rank()])
    weight = weight[shard.start : shard.stop]
    loss = HeadLoss().linear(hidden, weight, labels, shard=shard, linear=Linear(mode=mode)).loss
    if mode == "recompute" or loss.requires_grad:
        loss.backward()
    return hidden.grad


@BOTH
def test_a_rank_where_nothing_requires_a_gradient_takes_part(mode):
    both = on_ranks(2, trainable_run, (True, True), mode)
    one = on_ranks(2, trainable_run, (True, False), mode)
    assert torch.equal(one[0], both[0]) and one[1] is None
