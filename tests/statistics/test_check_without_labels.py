"""`Options(check=True)` in calls without labels looks at everything else that they have."""

import pytest
import torch
from ranks import on_ranks

import tp_headloss as hl

RULE = hl.SamplingRule(top_k=2)
CHECK = hl.Options(check=True)
N, V, H = 6, 32, 16
POSITIONS = torch.arange(N)
IDS = torch.arange(3).repeat(N, 1)


def statistics(x, **given):
    return hl.vocab_statistics(x, options=CHECK, **given)


def linear_statistics(x, **given):
    return hl.linear_vocab_statistics(x, torch.ones(V, x.shape[-1]), options=CHECK, **given)


def sample(x, **given):
    return hl.sample(x, seed=0, positions=POSITIONS, options=CHECK, **given)


def kept_ids(x, rule=RULE, **given):
    return hl.kept_ids(x, rule, options=CHECK, **given)


def topk(x, **given):
    return hl.topk_log_probs(x, 3, options=CHECK, **given)


CALLS = {f.__name__: f for f in (statistics, linear_statistics, sample, kept_ids, topk)}
SEARCHES = {f.__name__: f for f in (sample, kept_ids, topk)}


@pytest.mark.parametrize("call", CALLS)
def test_right_arguments_are_taken(call):
    CALLS[call](torch.randn(N, V))


@pytest.mark.parametrize("call", CALLS)
def test_a_nan_is_named(call):
    x = torch.randn(N, V)
    x[3, 7] = torch.nan
    words = "(logits|hidden states) of token 3 hold NaN in column 7 of rank 0"
    with pytest.raises(ValueError, match=words):
        CALLS[call](x)


@pytest.mark.parametrize("call", SEARCHES)
def test_a_nan_of_hidden_states_and_weights_is_named(call):
    hidden, weight = torch.randn(N, H), torch.randn(V, H)
    SEARCHES[call](hidden, weight=weight)
    with pytest.raises(ValueError, match="weight of id 5 holds NaN"):
        SEARCHES[call](hidden, weight=weight.index_fill(0, torch.tensor(5), torch.nan))
    with pytest.raises(ValueError, match="hidden states of token 2 hold NaN"):
        SEARCHES[call](hidden.index_fill(0, torch.tensor(2), torch.nan), weight=weight)


@pytest.mark.parametrize("call", CALLS)
def test_a_temperature_that_is_not_positive_is_named(call):
    temperature = torch.ones(N).index_fill(0, torch.tensor(4), 0.0)
    with pytest.raises(ValueError, match="temperature of token 4 must be positive"):
        CALLS[call](torch.randn(N, V), transform=hl.Transform(temperature=temperature))


@pytest.mark.parametrize("call", ["statistics", "linear_statistics"])
def test_ids_sets_and_teachers_are_checked(call):
    function, x = CALLS[call], torch.randn(N, V)
    bad = IDS.clone()
    bad[2, 1] = V
    function(x, ids=IDS, want=("log_probs_at",))
    with pytest.raises(ValueError, match=f"ids of token 2 .* must be below {V}"):
        function(x, ids=bad, want=("log_probs_at",))
    function(x, sets=hl.IdSets(IDS), want=("set_log_mass",))
    with pytest.raises(ValueError, match=f"the set of token 2 .* must hold ids below {V}, one at"):
        function(x, sets=hl.IdSets(bad), want=("set_log_mass",))
    bad[2] = -1
    with pytest.raises(ValueError, match=r"the set of token 2 .* one at least, got"):
        function(x, sets=hl.IdSets(bad), want=("set_log_mass",))
    mass = torch.full(IDS.shape, 0.3)
    function(x, teacher=hl.TopKTeacher(IDS, mass.log()), want=("topk_forward_kl",))
    with pytest.raises(ValueError, match=r"teacher.log_probs of token 0 .* must be log-probs"):
        function(x, teacher=hl.TopKTeacher(IDS, mass), want=("topk_forward_kl",))
    q = torch.randn(N, V)
    q[1, 3] = torch.nan
    with pytest.raises(ValueError, match="logits of the teacher of token 1 hold NaN"):
        function(x, teacher=hl.Teacher(q), want=("forward_kl",))


VALUES = {
    "top_k": (torch.tensor([0, -1]), 5, "at least 1"),
    "top_p": (torch.tensor([0.0, 90.0, -0.1, torch.nan]), 0.9, r"in \(0, 1\]"),
    "min_p": (torch.tensor([-0.1, 1.5, torch.nan]), 0.1, r"in \[0, 1\]"),
}


@pytest.mark.parametrize("call", ["sample", "kept_ids"])
@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_a_rule_that_is_out_of_range_is_named(name, call):
    bad, good, words = VALUES[name]
    x = torch.randn(N, V)
    right = torch.full((N,), good)
    CALLS[call](x, rule=hl.SamplingRule(**{name: right}))
    for value in bad:
        rule = hl.SamplingRule(**{name: right.index_fill(0, torch.tensor(4), value)})
        with pytest.raises(ValueError, match=f"{name} of token 4 .* must be {words}, got"):
            CALLS[call](x, rule=rule)
        # without the check it is looked at by no one
        hl.kept_ids(x, rule)


def errors_of_ranks(group, device):
    shard = hl.VocabShard.from_group(group, V)
    x = torch.zeros(N, shard.width, device=device)
    if group.rank() == 1:
        x[3, 0] = torch.nan
    found = []
    for call in (statistics, sample, kept_ids, topk):
        try:
            call(x, shard=shard) if call is not sample else hl.sample(
                x, seed=0, positions=POSITIONS.to(device), shard=shard, options=CHECK
            )
        except ValueError as error:
            found.append(str(error))
    return found


def test_every_rank_gets_the_same_error():
    first, second = on_ranks(2, errors_of_ranks)
    assert first == second and len(first) == 4
    assert all("logits of token 3 hold NaN in column 16 of rank 1" in error for error in first)
