"""Losses as plain functions refuse shapes that mean something else, unknown names, and numbers out of range."""

import inspect
import math

import pytest
import torch

from tp_headloss import HeadLoss, Linear, Sequences, TopKTeacher, losses, vocab_statistics

B, S = 2, 3
MASK = torch.ones(B, S, dtype=torch.bool)
CONSTANTS = {"sequences": Sequences.from_mask(MASK), "mask": MASK}  # other inputs are log-probs or advantages
OPTIONAL = "reference_log_prob", "sampler_log_prob", "rollout_log_weight"


def inputs_of(function) -> dict:
    """A tensor [B, S], or sequences, for each of a function's inputs."""
    needed = [
        name for name, p in inspect.signature(function).parameters.items() if p.default is p.empty or name in OPTIONAL
    ]
    return {name: CONSTANTS.get(name, torch.full((B, S), -0.5)) for name in needed}


PER_TOKEN = {
    name: function
    for name, function in vars(losses).items()
    if inspect.isfunction(function) and "log_prob" in inspect.signature(function).parameters and name != "kto"
}


def test_there_are_functions_of_log_probs():
    assert {"ppo_clip", "cispo", "kl_cov", "policy_metrics", "icepop", "kl_estimate"} <= set(PER_TOKEN)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_value_per_row_beside_rows_of_tokens_is_refused(name):
    function, inputs = PER_TOKEN[name], inputs_of(PER_TOKEN[name])
    function(**inputs)
    for other in set(inputs) - {"log_prob", "sequences"}:
        with pytest.raises(ValueError, match=r"must .*(\[2, 3\].*got \[3\]|\[3\].*got \[2, 3\])"):
            function(**inputs | {other: inputs[other][0]})


PAIRS, WRONG_PAIRS = [torch.zeros(2)] * 4, [torch.zeros(2)] * 2 + [torch.zeros(2, 1)] * 2
GOOD, KL = torch.ones(2).bool(), torch.zeros(())
TEACHER = TopKTeacher(torch.tensor([[2, 1]]), torch.tensor([[-0.4, -1.4]]), renormalize=False)
STATS = vocab_statistics(
    torch.tensor([[2.0, 1.0, 0.0]]),
    torch.tensor([0]),
    want=("total", "topk_forward_kl", "topk_reverse_kl", "topk_jsd", "topk_log_mass", "tail_log_mass"),
    teacher=TEACHER,
)
ZEROS = torch.zeros(B, S)
TOKENS = {"log_prob": ZEROS, "generator_log_prob": ZEROS}
OLD = {"log_prob": ZEROS, "advantages": torch.ones(B, S), "old_log_prob": ZEROS}
COV = OLD | {"mask": MASK, "noise": ZEROS}

REFUSED = {
    "formula must be one of .* got 'pytorch'": lambda: losses.smoothed_cross_entropy(STATS, 0.1, "pytorch"),
    r" smoothing must be in \[0, 1\], got 7.0": lambda: losses.smoothed_cross_entropy(STATS, 7.0),
    r"class_weight must have shape \[3\], got \[4\]": lambda: losses.label_weight(STATS, torch.ones(4)),
    r"label_smoothing must be in \[0, 1\], got 5": lambda: losses.dpo(*PAIRS, label_smoothing=5),
    "beta must be a number, got 'a'": lambda: losses.dpo(*PAIRS, beta="a"),
    "chosen must be a tensor, got list": lambda: losses.dpo([0.0], *PAIRS[1:]),
    r"reference_chosen must have the shape \[2\] of chosen, got \[2, 1\]": lambda: losses.dpo(*WRONG_PAIRS),
    r"reference_chosen must have the shape \[2\] of chosen, got \[2, 1\]$": lambda: losses.ipo(*WRONG_PAIRS),
    "beta must be positive and finite in fp32, got 0": lambda: losses.ipo(*PAIRS, beta=0),
    "beta must be positive and finite in fp32, got -1": lambda: losses.kto(*PAIRS[:2], desirable=GOOD, kl=KL, beta=-1),
    "desirable must be bool, got torch.float32": lambda: losses.kto(*PAIRS[:2], desirable=torch.ones(2), kl=KL),
    r"kl must be a scalar, .*got shape \[2\]": lambda: losses.kto(*PAIRS[:2], desirable=GOOD, kl=torch.zeros(2)),
    r"bounds must be \(lowest, highest\), got \(2, 0.5\)": lambda: losses.icepop(**TOKENS, bounds=(2, 0.5)),
    "bounds must be .*nan": lambda: losses.truncated_importance_weight(**TOKENS, bounds=(math.nan, 1)),
    r"bounds must be .*\(2, 1\)": lambda: losses.sequence_masked_importance_weight(
        **TOKENS, sequences=CONSTANTS["sequences"], bounds=(2, 1)
    ),
    r"bounds must be .*\(3, 1\)": lambda: losses.generator_metrics(**TOKENS, old_log_prob=ZEROS, bounds=(3, 1)),
    r"bounds must be .*\(5, 1\)": lambda: losses.clip_cov(**COV, bounds=(5, 1)),
    "mask must be bool, got torch.int32": lambda: losses.clip_cov(**COV | {"mask": MASK.int()}),
    r"fraction must be in \[0, 1\], got nan": lambda: losses.clip_cov(**COV, fraction=math.nan),
    r"fraction must be in \[0, 1\], got 2": lambda: losses.kl_cov(**OLD, mask=MASK, fraction=2),
    r"temperatures must be positive, got \(-1.0, 1.0\)": lambda: losses.sapo(**OLD, temperatures=(-1.0, 1.0)),
    r"beta must be in \(0, 1\), got 7": lambda: losses.topk_jsd(STATS, "topk", beta=7),
    r"min_probability must be in \[0, 1\], got 2": lambda: losses.log_tail(STATS, min_probability=2),
    "level must be one of": lambda: losses.icepop(**TOKENS, level="batch"),
    "both at least 0, got": lambda: losses.cispo(**OLD, clip=(-0.2, 0.2)),
    r"tail_log_prob must broadcast .*got \[2, 1\]": lambda: losses.log_tail(STATS, torch.zeros(2, 1)),
    "temperature must broadcast": lambda: losses.times_temperature_squared(ZEROS, torch.ones(S)),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_loss_cannot_mean_is_refused(words):
    with pytest.raises((TypeError, ValueError), match=words.strip()):
        REFUSED[words]()


@pytest.mark.parametrize("function", [losses.topk_forward_kl, losses.topk_reverse_kl, losses.topk_jsd])
def test_supports_are_known_and_have_their_tail(function):
    with pytest.raises(ValueError, match=r"support must be one of .* got 'vocab'"):
        function(STATS, "vocab")
    with pytest.raises(ValueError, match=r"support='tail' needs log_tail.* got None"):
        function(STATS, "tail")
    with pytest.raises(ValueError, match="log_tail must broadcast"):
        function(STATS, "tail", torch.zeros(2, 1))


def test_cispos_lower_bound_is_not_looked_at_where_it_is_not_used():
    assert losses.cispo(**OLD, clip=(-1, 5.0), convention="bound").shape == (B, S)


def test_a_budget_in_floating_point_is_that_many_bytes():
    assert Linear(budget=1.5e6) == Linear(budget=1_500_000) and isinstance(Linear(budget=1.5e6).budget, int)
    hidden, weight = torch.ones(4, 8, requires_grad=True), torch.ones(16, 8, requires_grad=True)
    HeadLoss().linear(hidden, weight, torch.zeros(4).long(), linear=Linear("recompute", budget=1e6)).loss.backward()
