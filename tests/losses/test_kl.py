"""KL estimators and the KL term: values, gradients, clamps, importance weights."""

import math

import pytest
import torch
from policy_problem import LOG_PROB, gradient, problem

from tp_headloss import HeadLoss, KLToReference, log_probs, losses


def test_only_k3_is_clamped_in_its_value():
    """A token that strayed far keeps its gradient under the other estimators."""
    log_prob = torch.tensor([-9.0], requires_grad=True)
    for estimator, value, slope in (
        ("k1", -8.0, 1.0),
        ("abs", 8.0, -1.0),
        ("k2", 32.0, -8.0),
        ("k3+", 10.0, -8.0),
    ):
        kl = losses.kl_estimate(
            log_prob, reference_log_prob=torch.tensor([-1.0]), estimator=estimator
        )
        assert kl.item() == value and torch.autograd.grad(kl.sum(), log_prob)[0].item() == slope


@pytest.mark.parametrize("estimator", losses.KL_ESTIMATORS)
def test_kl_estimators_and_their_gradients(estimator):
    reference = LOG_PROB + torch.linspace(-2, 2, 40, dtype=torch.float64)
    x = LOG_PROB - reference
    values = {"k1": x, "abs": x.abs(), "k2": x**2 / 2, "k3": (-x).exp() + x - 1}
    slopes = {"k1": torch.ones_like(x), "abs": x.sign(), "k2": x, "k3": 1 - (-x).exp()}
    value, grad = gradient(losses.kl_estimate, reference_log_prob=reference, estimator=estimator)
    torch.testing.assert_close(value, values[estimator.removesuffix("+")])
    torch.testing.assert_close(grad, slopes["k2" if "+" in estimator else estimator])


def test_weighted_k3_has_the_gradient_w_x():
    reference, sampler = LOG_PROB.flip(0), LOG_PROB - 0.3
    options = {"reference_log_prob": reference, "output_clamp": None}
    for sampled, w in ((LOG_PROB, 1.0), (sampler, math.exp(0.3))):
        value, grad = gradient(losses.kl_estimate, sampler_log_prob=sampled, **options)
        torch.testing.assert_close(grad, w * (LOG_PROB - reference))
        torch.testing.assert_close(value, w * gradient(losses.kl_estimate, **options)[0])


def test_kl_clamps_stop_the_gradient():
    log_prob = torch.tensor([-30.0, -5.0, -4.0], requires_grad=True)
    # x = -29: beyond the input's clamp; -4: k3 = 49.6, beyond the output's
    reference = torch.tensor([-1.0, -1.0, -3.5])
    value = losses.kl_estimate(log_prob, reference_log_prob=reference)
    torch.testing.assert_close(value[:2].detach(), torch.tensor([10.0, 10.0]))
    (grad,) = torch.autograd.grad(value.sum(), log_prob)
    assert grad[:2].tolist() == [0, 0] and grad[2] < 0
    weighted = losses.kl_estimate(
        log_prob, reference_log_prob=reference, sampler_log_prob=log_prob.detach()
    )
    (grad,) = torch.autograd.grad(weighted.sum(), log_prob)
    assert grad[0] == 0 and grad[1] == 10  # the weight passes no gradient beyond the input's clamp


@pytest.mark.parametrize("importance", [None, "on-policy", "old", "generator"])
def test_the_kl_term_takes_the_weight_it_names(importance):
    x, labels, mask, inputs = problem()
    x.requires_grad_()
    term = KLToReference(0.5, "k3", importance_weight=importance, output_clamp=None)
    out = HeadLoss([term], reduction="sum")(
        x, labels, inputs={name: inputs[name] for name in term.inputs}
    )
    log_prob = log_probs(x, labels).log_prob
    sampler = {None: None, "on-policy": log_prob.detach()}.get(
        importance, inputs.get(f"{importance}_log_prob")
    )
    gap = (inputs["reference_log_prob"] - log_prob)[mask]
    want = gap.exp() - gap - 1
    if sampler is not None:
        want = want * (log_prob - sampler)[mask].exp()
    torch.testing.assert_close(out.loss, 0.5 * want.sum(), rtol=1e-5, atol=1e-6)
    a, b = (torch.autograd.grad(v, x, retain_graph=True)[0] for v in (out.loss, 0.5 * want.sum()))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def enumerated(estimator, importance, policy, old, reference):
    """The gradient [V] by the logits of a KL term, in the mean over the tokens of one step, all V
    of them with their probability under the policy that sampled, and the term itself."""
    tokens, logits = torch.arange(len(policy)), policy.clone().requires_grad_()
    sampled_by_old = importance in ("old", "generator")
    sampler = old if sampled_by_old else policy.log_softmax(0)
    term = KLToReference(
        1.0, estimator, importance_weight=importance, input_clamp=None, output_clamp=None
    )
    inputs = {"reference_log_prob": reference, "old_log_prob": old, "generator_log_prob": old}
    inputs = {name: inputs[name] for name in term.inputs}
    loss = HeadLoss([term], reduction="sum")
    out = loss(logits.expand(len(policy), -1), tokens, inputs=inputs, token_weight=sampler.exp())
    return torch.autograd.grad(out.loss, logits)[0], out.loss.detach()


def true_mean(estimator, importance, policy, reference):
    """The same from the definition: the derivative of the policy's mean, or of the mean of the
    sampled values."""
    logits = policy.clone().requires_grad_()
    log_p = logits.log_softmax(0)
    x, kind = log_p - reference, estimator.removesuffix("+")
    values = {"k1": x, "abs": x.abs(), "k2": x**2 / 2, "k3": (-x).exp() + x - 1}[kind]
    mean = (log_p.exp() * values).sum()
    source = mean
    if estimator.endswith("+"):
        source = (log_p.exp() * x).sum()  # the KL itself
    elif importance is None:
        source = (log_p.exp().detach() * values).sum()  # tokens are data
    return torch.autograd.grad(source, logits)[0], mean.detach()


@pytest.mark.parametrize("importance", [None, "on-policy", "old", "generator"])
@pytest.mark.parametrize("estimator", losses.KL_ESTIMATORS)
def test_the_mean_over_all_tokens_has_the_true_gradient(estimator, importance):
    """Every estimator with every weight, by enumeration of a small vocabulary."""
    generator = torch.Generator().manual_seed(1)
    policy, old, reference = 1.5 * torch.randn(3, 11, dtype=torch.float64, generator=generator)
    old, reference = old.log_softmax(0), reference.log_softmax(0)
    found = enumerated(estimator, importance, policy, old, reference)
    torch.testing.assert_close(
        found, true_mean(estimator, importance, policy, reference), rtol=1e-6, atol=1e-8
    )
    if (estimator in ("k1", "k3") and importance is not None) or "+" in estimator:
        logits = policy.clone().requires_grad_()
        log_p = logits.log_softmax(0)
        kl = torch.nn.functional.kl_div(reference, log_p, reduction="sum", log_target=True)
        torch.testing.assert_close(
            found[0], torch.autograd.grad(kl, logits)[0], rtol=1e-6, atol=1e-8
        )


@pytest.mark.parametrize("estimator", [name for name in losses.KL_ESTIMATORS if "+" in name])
def test_a_weighted_straight_through_estimate_stops_where_it_does_without_a_weight(estimator):
    log_prob, reference = (
        torch.tensor([-30.0, -5.0, -9.0], requires_grad=True),
        torch.tensor([-1.0, -1.0, -1.0]),
    )
    given = {"reference_log_prob": reference, "estimator": estimator}
    weighted = losses.kl_estimate(
        log_prob, sampler_log_prob=torch.tensor([-30.0, -4.0, -9.5]), **given
    )
    plain = losses.kl_estimate(log_prob, **given)
    w = torch.tensor([0.0, -1.0, 0.5]).exp()
    torch.testing.assert_close(weighted, w * plain)
    grads = [torch.autograd.grad(values.sum(), log_prob)[0] for values in (weighted, plain)]
    torch.testing.assert_close(grads[0], w * grads[1])
    assert grads[0][0] == 0 and (grads[0][1:] != 0).all()
