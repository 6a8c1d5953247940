"""Extreme ratios, NaN, ignored tokens and garbage in policy gradients: nothing leaks, nothing
hides."""

import math

import pytest
import torch
from policy_problem import B, S, needed, problem

import tp_headloss as hl
from tp_headloss.head_loss.policy_terms import OBJECTIVES as OBJECTIVES_BY_NAME


@pytest.mark.parametrize(
    "objective", ["reinforce", "ppo_clip", "cispo", "sapo", "gspo", "gmpo", "vespo"]
)
def test_extreme_ratios_are_finite_and_an_advantage_of_0_is_0(objective):
    log_prob = torch.tensor([[-200.0, -1.0], [-1e-3, -torch.inf], [-0.5, -0.5]], requires_grad=True)
    old = torch.tensor([[-1.0, -201.0], [-200.0, -1.0], [-torch.inf, -0.5]])
    sequences = hl.Sequences.from_mask(torch.ones(3, 2, dtype=torch.bool))
    function = getattr(hl.losses, objective)
    inputs = {} if objective == "reinforce" else {"old_log_prob": old}
    inputs |= {"sequences": sequences} if objective in ("gspo", "gmpo", "vespo") else {}
    loss = function(log_prob, advantages=torch.zeros(3, 2), **inputs)
    (grad,) = torch.autograd.grad(loss.sum(), log_prob)
    assert not loss.any() and not grad.any()
    some = torch.tensor([[1.0, -1.0], [-1.0, 1.0], [1.0, -1.0]])
    loss = function(log_prob, advantages=some, **inputs)
    (grad,) = torch.autograd.grad(loss[loss.isfinite()].sum(), log_prob)
    assert not grad.isnan().any() and (loss.isfinite() | (log_prob == -torch.inf)).all()


def test_the_gradient_is_zero_beyond_the_clamp_and_not_within():
    log_prob = torch.tensor([-1.0, -1.0, -25.0], requires_grad=True)
    old = torch.tensor([-22.0, -10.0, -1.0])  # log-ratios 21, 9, -24
    loss = hl.losses.ppo_clip(log_prob, advantages=torch.full((3,), -1.0), old_log_prob=old)
    (grad,) = torch.autograd.grad(loss.sum(), log_prob)
    assert grad[0] == 0 and grad[1] > 8000 and grad[2] == 0
    ratio = hl.losses.log_ratio(log_prob, old)
    assert ratio.tolist() == [20, 9, -20] and torch.autograd.grad(ratio.sum(), log_prob)[
        0
    ].tolist() == [0, 1, 0]


def test_no_valid_token_gives_0_and_neutral_metrics(options, device):
    x, _, _, inputs = problem()
    x, labels = x.to(device).requires_grad_(), torch.full((B, S), -100, device=device)
    head = hl.HeadLoss(
        [hl.PolicyGradient("clip")],
        metrics=(hl.PolicyMetrics(),),
        reduction="seq-mean-token-mean",
        options=options,
    )
    out = head(x, labels, inputs=needed(head, inputs, labels >= 0, device))
    out.loss.backward()
    assert out.loss == 0 and not x.grad.any() and out.count == 0
    assert out.metrics["max_ratio"] == -torch.inf and out.metrics["min_advantage"] == torch.inf
    assert out.metrics["ratio"] == 0 and out.sequence_metrics["num_sequences"] == 0


# an objective is PyTorch on statistics, the same ones for all of them
@pytest.mark.interpreted_only(objective=("clip", "gspo"))
@pytest.mark.parametrize(
    "objective", ["reinforce", "clip", "cispo", "sapo", "gspo", "gmpo", "vespo", "kl-cov"]
)
def test_garbage_outside_of_the_sequences_reaches_neither_loss_nor_gradient(
    objective, options, device
):
    """NaN in every input, in the logits, and a bad label: all at tokens that only the sequences'
    mask excludes."""
    x, labels, mask, inputs = problem()
    head = hl.HeadLoss(
        [
            hl.PolicyGradient(objective, rollout_weight=True),
            hl.KLToReference(0.1, importance_weight="old"),
        ],
        metrics=("entropy", hl.PolicyMetrics(reference=True), hl.GeneratorMetrics()),
        options=options,
    )
    inputs["rollout_weight"] = torch.tensor(0.5)
    inputs, outs = {name: torch.where(mask, value, torch.nan) for name, value in inputs.items()}, []
    for garbage in (False, True):
        local = (
            torch.where(mask[..., None] | (not garbage), x, torch.nan).to(device).requires_grad_()
        )
        targets = torch.where(mask, labels, -1 if garbage else -100).to(device)
        out = head(local, targets, inputs=needed(head, inputs, mask, device))
        out.loss.backward()
        outs.append((out.loss.detach(), local.grad, out.metrics, out.sequence_metrics))
    torch.testing.assert_close(*outs, rtol=0, atol=0)
    assert outs[0][0].isfinite() and outs[0][1].any() and not outs[0][1][~mask].any()
    assert all(value.isfinite() for metrics in outs[0][2:] for value in metrics.values())


PER_TOKEN = {
    name: function for name, (function, _) in OBJECTIVES_BY_NAME.items() if name != "positive-nll"
}


def with_a_nan(name, broken, device, beyond):
    """Loss and gradient of an objective of two sequences, a NaN in an input of token 1 of the
    first; log-ratios within or beyond every clip."""
    function, names = OBJECTIVES_BY_NAME[name]
    mask = torch.ones(2, 4, dtype=torch.bool, device=device)
    x = torch.full((2, 4), -1.0, device=device, requires_grad=True)
    old = torch.tensor(
        [[-1.1, -5.0 if beyond else -1.1, 3.0 if beyond else -1.1, -1.0]] * 2, device=device
    )
    given = {"advantages": torch.tensor([[1.0, 1.0, -1.0, 0.0]] * 2, device=device), "old_log_prob": old, "mask": mask,
             "noise": torch.full((2, 4), 0.5, device=device), "sequences": hl.Sequences.from_mask(mask)}  # fmt: skip
    given[broken] = given[broken].clone()
    given[broken][0, 1] = math.nan
    loss = function(x, **{key: given[key] for key in names})
    loss.sum().backward()
    return loss, x.grad


@pytest.mark.parametrize("beyond", [False, True])
@pytest.mark.parametrize("broken", ["old_log_prob", "advantages"])
@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_nan_input_is_nan_in_the_gradient_too(name, broken, beyond, device):
    if broken == "old_log_prob" and name == "reinforce":
        return
    loss, grad = with_a_nan(name, broken, device, beyond)
    assert loss[0, 1].isnan() and grad[0, 1].isnan()
    # which rank all tokens together
    assert "cov" in name or (loss[1].isfinite().all() and grad[1].isfinite().all())


WEIGHTS_OF_0 = "advantages", "rollout_weight", "both"


def weighted_by_0(name, zero, where, special):
    """Losses [2, 4] of a term, a weight of 0 at token 1 of the first sequence, and there one
    special number."""
    term = hl.PolicyGradient(name, rollout_weight=True)
    mask = torch.ones(2, 4, dtype=torch.bool)
    given = {
        "log_prob": torch.tensor([[-1.0, -1.3, -0.4, -2.0]] * 2),
        "advantages": torch.tensor([[1.0, 0.7, -1.0, 0.5]] * 2),
        "old_log_prob": torch.tensor([[-1.1, -1.0, -0.5, -2.2]] * 2),
        "rollout_weight": torch.full((2, 4), 0.5),
        "noise": torch.full((2, 4), 0.5),
        "rewards": torch.ones(2, 4),
    }
    for weight in ("advantages", "rollout_weight"):
        if zero in (weight, "both"):
            given[weight][0, 1] = 0.0
    given[where][0, 1] = special
    stats = hl.VocabStatistics._make([None] * len(hl.VocabStatistics._fields))
    stats = stats._replace(log_prob=given["log_prob"], valid=mask)
    given["sequences"] = hl.Sequences.from_mask(mask)
    return term.function(stats, **{key: given[key] for key in term.inputs})


@pytest.mark.parametrize("zero", WEIGHTS_OF_0)
@pytest.mark.parametrize("name", OBJECTIVES_BY_NAME)
def test_a_weight_of_0_hides_no_nan(name, zero):
    """Of the log-prob and of every input; an infinite log-prob counts as nothing."""
    inputs = hl.PolicyGradient(name, rollout_weight=True).inputs
    for where in ("log_prob", *inputs):
        if where in ("sequences", "noise"):
            continue
        loss = weighted_by_0(name, zero, where, math.nan)
        assert loss[0, 1].isnan(), where
        assert "cov" in name or loss[1].isfinite().all()  # which rank all tokens together
    if zero != "advantages" or name in ("reinforce", "cispo"):  # others multiply what is finite
        assert weighted_by_0(name, zero, "log_prob", -math.inf)[0, 1] == 0


@pytest.mark.parametrize("estimator", hl.losses.KL_ESTIMATORS)
def test_a_nan_reference_is_nan_in_the_gradient_too(estimator, device):
    x = torch.full((3,), -1.0, device=device, requires_grad=True)
    reference = torch.tensor([-1.5, math.nan, 50.0], device=device)
    value = hl.losses.kl_estimate(x, reference_log_prob=reference, estimator=estimator)
    value.sum().backward()
    assert value.isnan().tolist() == [False, True, False] and x.grad.isnan().tolist() == [
        False,
        True,
        False,
    ]


def test_a_nan_completion_is_nan_in_the_gradient_of_orpo_too():
    chosen = torch.tensor([-1.0, math.nan], requires_grad=True)
    hl.losses.orpo(chosen, torch.tensor([-2.0, -2.0])).sum().backward()
    assert chosen.grad.isnan().tolist() == [False, True]


def test_a_nan_reward_and_a_nan_ratio_of_advantage_0_stay_visible(device):
    x = torch.full((1, 3), -1.0, device=device, requires_grad=True)
    nan = torch.tensor([[1.0, math.nan, 0.0]], device=device)
    loss = hl.losses.positive_nll(x, rewards=nan)
    loss.sum().backward()
    assert (
        loss.isnan().tolist() == x.grad.isnan().tolist() == [[False, True, False]]
        and loss[0, 2] == 0
    )
    y = torch.full((1, 3), -1.0, device=device, requires_grad=True)
    sequences = hl.Sequences.from_mask(torch.ones(1, 3, dtype=torch.bool, device=device))
    advantages = torch.tensor([[1.0, 0.0, 1.0]], device=device)
    loss = hl.losses.gmpo(y, advantages=advantages, old_log_prob=nan, sequences=sequences)
    loss.sum().backward()
    assert loss.isnan().all() and y.grad[0, 1].isnan()
