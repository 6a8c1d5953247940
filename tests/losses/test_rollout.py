"""Weights that correct for another policy's rollout."""

import math

import pytest
import torch
from policy_problem import B, S, problem

from tp_headloss import HeadLoss, KLToReference, Options, PolicyGradient, Sequences, losses


def test_rollout_weights_equal_loops():
    _, _, mask, inputs = problem(torch.float64)
    old, generator = (inputs[name].nan_to_num() for name in ("old_log_prob", "generator_log_prob"))
    sequences = Sequences.from_mask(mask)
    w = (old - generator).exp()
    product = torch.stack(
        [w[i][mask[i]].prod() if mask[i].any() else torch.tensor(1.0) for i in range(B)]
    )[:, None]
    geometric = torch.stack(
        [w[i][mask[i]].log().mean().exp() if mask[i].any() else torch.ones(()) for i in range(B)]
    )

    def within(weight, low, high):
        return (weight >= low) & (weight <= high)

    cases = [
        (
            losses.truncated_importance_weight(
                old, generator_log_prob=generator, bounds=(0.5, 1.5)
            ),
            w.clamp(0.5, 1.5),
        ),
        (losses.truncated_importance_weight(old, generator_log_prob=generator), w.clamp(0, 2)),
        (
            losses.truncated_importance_weight(
                old,
                generator_log_prob=generator,
                level="sequence",
                sequences=sequences,
                bounds=(0, 5),
            ),
            product.expand(B, S).clamp(0, 5),
        ),
        (
            losses.icepop(old, generator_log_prob=generator, bounds=(0.6, 1.5)),
            w * within(w, 0.6, 1.5),
        ),
        (
            losses.sequence_masked_importance_weight(
                old, generator_log_prob=generator, sequences=sequences, bounds=(0.6, 3.0)
            ),
            w * within(geometric[:, None], 0.6, 3.0),  # the first stays
        ),
    ]
    for ours, want in cases:
        torch.testing.assert_close(ours[mask].double(), want[mask].double(), rtol=1e-6, atol=1e-8)
        assert not torch.equal(want[mask], w[mask])  # the bounds bite


def test_a_rollout_weight_scales_the_policy_loss_alone(options, device):
    x, labels, _, inputs = problem()
    inputs = {name: value.to(device) for name, value in inputs.items()}
    weight = torch.rand(B, S, device=device).requires_grad_()  # detached by the term
    out = {}
    for flag in (False, True):
        terms = [PolicyGradient("clip", rollout_weight=flag), KLToReference(0.1)]
        head = HeadLoss(terms, reduction="sum", options=options)
        given = {
            name: inputs[name] for name in ("advantages", "old_log_prob", "reference_log_prob")
        }
        given |= {"rollout_weight": weight} if flag else {}
        local = x.clone().to(device).requires_grad_()
        out[flag] = head(local, labels.to(device), inputs=given)
        out[flag].loss.backward()
    assert weight.grad is None and torch.equal(out[True].terms["kl"], out[False].terms["kl"])
    stats = out[False].stats
    per_token = losses.ppo_clip(
        stats.log_prob, advantages=inputs["advantages"], old_log_prob=inputs["old_log_prob"]
    )
    want = torch.where(stats.valid, per_token * weight, 0.0).sum()
    torch.testing.assert_close(out[True].terms["clip"], want.detach())


def test_a_rollout_mask_of_a_sequence_with_a_nan_is_nan():
    sequences = Sequences.from_mask(torch.ones(2, 3, dtype=torch.bool))
    generator_log_prob = torch.zeros(2, 3)
    generator_log_prob[0, 1] = math.nan
    weight = losses.sequence_masked_importance_weight(
        torch.zeros(2, 3), generator_log_prob=generator_log_prob, sequences=sequences
    )
    assert weight.isnan().tolist() == [[True] * 3, [False] * 3]


def test_check_names_log_weights_in_the_place_of_rollout_weights():
    head = HeadLoss([PolicyGradient(rollout_weight=True)], options=Options(check=True))
    logits, labels = torch.zeros(1, 3, 4), torch.tensor([[0, -100, 1]])
    zeros = torch.zeros(1, 3)
    given = {"advantages": zeros, "old_log_prob": zeros - 1}
    weight = torch.tensor([[0.0, -1.0, 0.5]])  # negative where it is ignored
    head(logits, labels, inputs=given | {"rollout_weight": weight})
    with pytest.raises(ValueError, match=r"'rollout_weight' of token 2 .* got -0.5; .*their exp"):
        head(logits, labels, inputs=given | {"rollout_weight": torch.tensor([[0.0, 1.0, -0.5]])})
