"""Losses as plain functions refuse shapes that mean something else, unknown names, and numbers out
of range."""

import functools
import inspect
import math

import numpy as np
import pytest
import torch

import tp_headloss
from tp_headloss import (
    CISPO,
    GRPO,
    Distillation,
    HeadLoss,
    Linear,
    PolicyGradient,
    SamplingRule,
    Sequences,
    Teacher,
    Term,
    TopKTeacher,
    Transform,
    VocabParallelHead,
    VocabShard,
    kept_ids,
    linear_vocab_statistics,
    log_probs,
    losses,
    sample,
    topk_log_probs,
    vocab_statistics,
)
from tp_headloss.head_loss.policy_terms import OBJECTIVES
from tp_headloss.spec import lines_within

B, S = 2, 3
TEACHER = TopKTeacher(torch.tensor([[2, 1]]), torch.tensor([[-0.4, -1.4]]), renormalize=False)
STATS = vocab_statistics(
    torch.tensor([[2.0, 1.0, 0.0]]),
    torch.tensor([0]),
    want=(
        "total",
        "topk_forward_kl",
        "topk_reverse_kl",
        "topk_jsd",
        "topk_log_mass",
        "tail_log_mass",
    ),
    teacher=TEACHER,
)
ZEROS = torch.zeros(B, S)
OLD = {"log_prob": ZEROS, "advantages": torch.ones(B, S), "old_log_prob": ZEROS}

REFUSED = {
    r"class_weight must have shape \[3\], got \[4\]": lambda: losses.label_weight(
        STATS, torch.ones(4)
    ),
    "0 <= low <= inf and high >= 0, got": lambda: losses.cispo(**OLD, clip=(-0.2, 0.2)),
    "high at least 1 for convention='bound', got": lambda: losses.cispo(
        **OLD, clip=(0, 0.28), convention="bound"
    ),
    "level='sequence' needs sequences": lambda: losses.icepop(
        ZEROS, generator_log_prob=ZEROS, level="sequence"
    ),
    **{
        f"sequences go with level='sequence', got level='token'{' ' * i}": functools.partial(
            weight,
            ZEROS,
            generator_log_prob=ZEROS,
            sequences=Sequences.from_mask(torch.ones(B, S, dtype=torch.bool)),
        )
        for i, weight in enumerate((losses.icepop, losses.truncated_importance_weight))
    },
    "bounds must be around 1, which equal log-probs have": lambda: losses.icepop(
        ZEROS, generator_log_prob=ZEROS, bounds=(0.2, 0.28)
    ),
    "V must be at least 2, got 1": lambda: losses.smoothed_cross_entropy(
        STATS._replace(vocab_size=1), 0.1, "megatron"
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_loss_cannot_mean_is_refused(words):
    with pytest.raises((TypeError, ValueError), match=words.strip()):
        REFUSED[words]()


@pytest.mark.parametrize(
    "function", [losses.topk_forward_kl, losses.topk_reverse_kl, losses.topk_jsd]
)
def test_a_tail_is_given_where_it_is_needed(function):
    with pytest.raises(ValueError, match=r"support='tail' needs log_tail.* got None"):
        function(STATS, "tail")


TERMS = {
    name: function
    for name, function in vars(tp_headloss).items()
    if inspect.isfunction(function)
    and "weight" in lines_within(function)
    and function.__annotations__.get("return") == "Term"
}
# whose weight may have either sign: a loss of labels or rewards, and the entropy
SIGNED = {"CrossEntropy", "Entropy", "PolicyGradient"}


@pytest.mark.parametrize("name", TERMS)
def test_a_weight_that_rewards_what_a_term_penalises_is_refused(name):
    assert len(TERMS) > len(SIGNED) and set(TERMS) > SIGNED
    make = (
        functools.partial(TERMS[name], objective="clip")
        if name == "PolicyGradient"
        else TERMS[name]
    )
    for weight in (0.0, 0.5, torch.tensor(-0.1)):  # values of tensors are not looked at
        assert make(weight=weight).weight is weight
    for weight in (-0.1, -1, np.float32(-1e-9), -math.inf, math.nan):
        if name in SIGNED and math.isfinite(weight):
            assert make(weight=weight).weight is weight
        elif name not in SIGNED:
            with pytest.raises(
                ValueError, match=r"weight must be at least 0 .*rewards what the te"
            ):
                make(weight=weight)
    own = Term("own", TERMS[name](weight=1.0).function, -0.5) if name == "ZLoss" else None
    assert own is None or own.weight == -0.5


def test_log_probs_per_token_after_the_first_are_given_by_name():
    """Swapped, they would be taken silently. A difference is written in its order, and pairs of
    completions are in the order of their papers."""
    count = 0
    for name in losses.__all__:
        function = getattr(losses, name)
        parameters = inspect.signature(function).parameters if callable(function) else {}
        by_position = [
            x
            for x, parameter in parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            and getattr(function.lines[x], "kind", "") == "floating point"
            and function.lines[x].shape == ("..",)
        ]
        assert len(by_position) < 2 or name == "log_ratio", (name, by_position)
        count += bool(by_position)
    assert count > 10


CLIPPED = [name for name, (function, _) in OBJECTIVES.items() if "clip" in function.lines]


@pytest.mark.parametrize("name", CLIPPED)
def test_bounds_of_a_ratio_are_no_distances_for_any_objective(name):
    for clip in ((0.8, 1.2), (0.67, 1.5), (0.8, 5.0), (0.5, 2)):
        with pytest.raises(
            ValueError, match=r"distances of .* which look like bounds of the ratio r: clip="
        ):
            PolicyGradient(name, clip=clip)
    with pytest.raises(ValueError, match=r"clip must be .low, high."):
        PolicyGradient(name, clip=(-0.2, 0.2))
    wide = [(10, 0.28)] * (name in ("cispo", "gmpo"))
    for clip in ((0.2, 0.28), (3e-4, 4e-4), (0.0, 5.0), (1, 5), (0.8, 0.8), *wide):
        PolicyGradient(name, clip=clip)


def test_what_a_message_advises_for_a_bound_is_the_bound():
    words = {
        "cispo": "of r from 1.*clip=.0.2, 0.2.",
        "gmpo": "of log r from 0.*clip=.0.2231, 0.1823.",
    }
    for name, said in words.items():
        with pytest.raises(ValueError, match=said):
            PolicyGradient(name, clip=(0.8, 1.2))
    ratio, given = (
        torch.tensor([9.0]),
        {"advantages": torch.ones(1), "old_log_prob": torch.zeros(1)},
    )
    with pytest.raises(TypeError, match="epsilon_high") as error:
        CISPO(epsilon_high=5.0)
    advice = eval(f"dict({str(error.value).rpartition('write ')[2]})", {"epsilon_high": 5.0})
    assert losses.cispo(ratio.log(), **given, **advice) == -5 * ratio.log()  # as TRL clips


def test_cispos_lower_bound_is_not_looked_at_where_it_is_not_used():
    assert losses.cispo(**OLD, clip=(-1, 5.0), convention="bound").shape == (B, S)


def test_a_budget_in_floating_point_is_that_many_bytes():
    assert Linear(budget=1.5e6) == Linear(budget=1_500_000) and isinstance(
        Linear(budget=1.5e6).budget, int
    )
    hidden, weight = torch.ones(4, 8, requires_grad=True), torch.ones(16, 8, requires_grad=True)
    HeadLoss().linear(
        hidden, weight, torch.zeros(4).long(), linear=Linear("recompute", budget=1e6)
    ).loss.backward()


X, IDS, MASK = torch.zeros(B, S, 4), torch.zeros(B, S).long(), torch.ones(B, S)
SHARD, TERM = (
    VocabShard(0, 4, 4),
    Term("own", lambda stats: stats.set_log_prob, want=("set_log_prob",)),
)
REMEDIES = {
    r"temperature must have shape \[2, 3\] to fit logits, got \[\]: pass its .expand\(2, 3\)": lambda: (
        HeadLoss()(X, IDS, transform=Transform(temperature=torch.tensor(2.0)))
    ),
    r"temperature must have shape \[2, 3\] to fit logits, got \[6\]: pass its .reshape\(2, 3\)": lambda: (
        HeadLoss()(X, IDS, transform=Transform(temperature=torch.ones(B * S)))
    ),
    r"temperature must have shape \[2, 3\] to fit logits, got \[2, 3, 1\]: pass its .reshape": lambda: (
        HeadLoss()(X, IDS, transform=Transform(temperature=torch.ones(B, S, 1)))
    ),
    r"temperature must have shape \[2, 3\] to fit logits, got \[2, 1\]: pass its .expand\(2, 3\)": lambda: (
        HeadLoss()(X, IDS, transform=Transform(temperature=torch.ones(B, 1)))
    ),
    "mask must be bool, got torch.float32: of a mask of 0 and 1 pass mask != 0$": lambda: (
        Sequences.from_mask(MASK)
    ),
    r"input 'mask' must be real numbers, got torch.bool: pass its .float\(\)": lambda: HeadLoss(
        [Term("own", lambda stats, mask: stats.lse * mask, inputs=("mask",))]
    )(X, IDS, inputs={"mask": IDS > 0}),
    "mask must be bool, got torch.int64: of a mask of 0 and 1 pass mask != 0, of labels labels != -100$": lambda: (
        Sequences.from_mask(MASK.long())
    ),
    r"'sequences' must be a Sequences, got Tensor: write Sequences.from_mask\(mask\), with mask such as": lambda: (
        HeadLoss(reduction="seq-mean-token-mean")(X, IDS, inputs={"sequences": MASK})
    ),
    # entries and ids are no labels
    "mask must be bool, got torch.int64: of a mask of 0 and 1 pass mask != 0$": lambda: (
        tp_headloss.IdSets(IDS[..., None], IDS[..., None])
    ),
    r"denominator must be real numbers, got torch.bool: one number, of a mask its .sum\(\)": lambda: (
        HeadLoss()(X, IDS, denominator=MASK > 0)
    ),
    r"denominator must have shape \[\], got \[2, 3\]: one number, of a mask its .sum\(\)": lambda: (
        HeadLoss()(X, IDS, denominator=MASK)
    ),
    r"got 2 that belong to none: .* pass torch.nn.functional.pad\(cu_seqlens, \(1, 0\)\)": lambda: (
        Sequences.from_cu_seqlens(torch.tensor([2, 5, 6]))
    ),
    r"got 1 that belong to none: cu_seqlens are 0 to 5, tokens 0 to 6$": lambda: (
        Sequences.from_cu_seqlens(torch.tensor([0, 5]), MASK.flatten() > 0)
    ),
    r"got 2 that belong to none: cu_seqlens are 1 to 4, tokens 0 to 6$": lambda: (
        Sequences.from_cu_seqlens(torch.tensor([1, 4]), torch.arange(B * S) > 0)
    ),
    r"sets.* got Tensor: write IdSets\(ids\)": lambda: HeadLoss([TERM])(
        X, IDS, inputs={"sets": IDS[..., None]}
    ),
    r'got .mean_tokens.: write reduction="mean"': lambda: HeadLoss(reduction="mean_tokens"),
    "'gamma': write margin=gamma": lambda: losses.simpo(ZEROS[0], ZEROS[0], gamma=1.0),
    r'write linear=Linear\(hidden_grad="reduce_scatter"\)': lambda: VocabParallelHead(
        6, SHARD, sequence_parallel=True
    ),
    r"teacher.logits must .* got \[2, 3, 6\]: of more ids\? .*\[..., :4\], if these are the": lambda: (
        HeadLoss([Distillation()])(X, IDS, inputs={"teacher": Teacher(torch.zeros(B, S, 6))})
    ),
}


@pytest.mark.parametrize("words", REMEDIES)
def test_an_error_names_what_to_write(words):
    with pytest.raises((TypeError, ValueError), match=words):
        REMEDIES[words]()


PER_TOKEN = {
    "temperature": lambda x: HeadLoss()(X, IDS, transform=Transform(temperature=x)),
    "temperature of a sample": lambda x: sample(
        X, seed=0, positions=IDS, transform=Transform(temperature=x)
    ),
    "temperature of hidden states": lambda x: HeadLoss().linear(
        X, torch.zeros(4, 4), IDS, transform=Transform(temperature=x)
    ),
    "token_weight": lambda x: HeadLoss()(X, IDS, token_weight=x),
    **{
        name: lambda x, name=name: kept_ids(X, SamplingRule(**{name: x}))
        for name in ("top_p", "min_p")
    },
    "top_k": lambda x: kept_ids(X, SamplingRule(top_k=x.long())),
}


@pytest.mark.parametrize("name", PER_TOKEN)
def test_what_is_one_per_row_names_the_line_that_spreads_it(name):
    for x in (torch.ones(B), torch.ones(S), torch.ones(1)):
        with pytest.raises(ValueError, match=r"pass its .*expand\(2, 3\)") as error:
            PER_TOKEN[name](x)
        spread = str(error.value).rpartition("pass its ")[2]
        PER_TOKEN[name](eval(f"x{spread}", {"x": x}))
    with pytest.raises(ValueError, match=r"shape \[2, 3\]") as error:
        PER_TOKEN[name](torch.ones(5))
    assert "pass its" not in str(error.value)


def test_what_is_one_per_packed_sequence_names_the_line_that_spreads_it():
    x, labels = torch.zeros(1, 6, 4), torch.zeros(1, 6).long()
    with pytest.raises(ValueError, match=r"packed sequence\? Pass its .repeat_interleave\(len"):
        HeadLoss()(x, labels, transform=Transform(temperature=torch.ones(2)))


@pytest.mark.parametrize("shape", [(B, S, 1), (B * S,), (B,), (S, B), ()])
@pytest.mark.parametrize("way", ["logits", "hidden", "weighted"])
def test_labels_of_other_tokens_are_named_before_what_is_compared_with_them(shape, way):
    inputs = {"advantages": MASK, "old_log_prob": ZEROS, "sequences": Sequences.from_mask(MASK > 0)}
    head, labels = GRPO(kl=0.1), torch.zeros(shape).long()
    call, given, of = head, (X, labels), "logits"
    if way == "hidden":
        call, given, of = head.linear, (X, torch.zeros(4, 4), labels), "hidden states"
    weight = MASK if way == "weighted" else None
    with pytest.raises(ValueError, match=rf"^labels must have shape \[2, 3\] to fit {of}, got"):
        call(*given, inputs=inputs | {"reference_log_prob": ZEROS}, token_weight=weight)


def test_the_width_of_logits_is_named_before_labels_and_mentions_hidden_states():
    for call in (log_probs, HeadLoss(), lambda x, _: sample(x, seed=0, positions=IDS, shard=SHARD)):
        given = {} if not isinstance(call, HeadLoss) and call is not log_probs else {"shard": SHARD}
        with pytest.raises(
            ValueError, match=r"^logits must have the shard's 4 .*weight= of sample"
        ):
            call(torch.zeros(B, S, 3), IDS[..., None] if given else IDS, **given)


def test_sequences_of_the_same_tokens_in_another_shape_name_the_remedy():
    packed = Sequences.from_cu_seqlens(torch.tensor([0, 4, 6]), torch.ones(6) > 0)
    x, labels = torch.zeros(1, 6, 4), torch.zeros(1, 6).long()
    head = HeadLoss(reduction="seq-mean-token-mean")
    with pytest.raises(ValueError, match=r"got \[6\]: make it of a mask in the labels' shape"):
        head(x, labels, inputs={"sequences": packed})
    packed = Sequences.from_cu_seqlens(torch.tensor([0, 4, 6]), labels != -100)
    head(x, labels, inputs={"sequences": packed})


def test_a_padded_size_below_the_vocabulary_is_never_advised():
    with pytest.raises(ValueError, match="got 2") as error:
        VocabShard(0, 10, 10).expect_width("logits", 2, "columns")
    assert "padded_size" not in str(error.value)
    shard = VocabShard(0, 10, 10)
    object.__setattr__(shard, "world_size", 4)
    object.__setattr__(shard, "stop", 1)  # the last of tensor_split's ranks
    with pytest.raises(ValueError, match="is vocab_size=10 right") as error:
        shard.expect_width("logits", 2, "columns")
    assert "padded_size" not in str(error.value)


def test_bounds_without_a_mask_are_of_all_tokens():
    bounds = torch.tensor([0, 2, 5])
    found, whole = (
        Sequences.from_cu_seqlens(bounds, *mask)
        for mask in ((), (torch.ones(5, dtype=torch.bool),))
    )
    assert found.lengths.tolist() == [2, 3] and torch.equal(found.ids, whole.ids)


RESULTS = {
    "log_prob": lambda: log_probs(X, IDS),
    "lse": lambda: vocab_statistics(X),
    "ids": lambda: sample(X, seed=0, positions=IDS),
    "ids, too": lambda: topk_log_probs(X, 2),
}


@pytest.mark.parametrize("field", RESULTS)
def test_arithmetic_of_several_tensors_names_one_of_them(field):
    found = RESULTS[field]()
    for compute in (
        lambda x: x + 1, lambda x: 1 + x, lambda x: 2 * x, lambda x: x * 2, lambda x: x - x,
        lambda x: 1 - x, lambda x: x / 2, lambda x: 1 / x, lambda x: -x, lambda x: x + (1,),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=rf"such as \.{field.partition(',')[0]}$"):
            compute(found)
    assert found[:2] == found[:2] and len(tuple(found)) == len(found)  # it is a tuple


def test_a_mean_that_is_not_there_names_those_that_are():
    means = HeadLoss(metrics="entropy")(X, IDS).means()
    with pytest.raises(KeyError, match=r"'clip_fraction', there are \['loss', .*'entropy'\].*Poli"):
        means["clip_fraction"]
    assert means.get("clip_fraction") is None and "clip_fraction" not in means


def test_what_other_calls_take_is_named_by_those_that_do_not():
    for call, keyword, words in (
        (log_probs, "weight", r"write linear_vocab_statistics\(hidden, weight, labels, ..\).log_p"),
        (linear_vocab_statistics, "differentiable", r"write with torch.no_grad\(\): around the"),
        (sample, "temperature", r"write transform=Transform\(temperature=..\)"),
    ):
        with pytest.raises(TypeError, match=words):
            call(X, IDS, **{keyword: 1.0})
