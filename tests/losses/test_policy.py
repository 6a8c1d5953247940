"""Policy-gradient objectives, KL, aggregations and metrics against float64 autograd, at every TP size."""

import math

import policy_oracle as oracle
import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks

from tp_headloss import (
    Entropy,
    GeneratorMetrics,
    HeadLoss,
    KLToReference,
    Metric,
    Options,
    PolicyGradient,
    PolicyMetrics,
    Sequences,
    Term,
    VocabShard,
    log_probs,
    losses,
)
from tp_headloss.reduce import metric_sums
from tp_headloss.terms import OBJECTIVES as OBJECTIVES_BY_NAME

V, B, S = 60, 4, 7  # 60 of 128 padded columns
LENGTHS = (7, 1, 0, 4)  # one token, none, and part of the row


def problem(dtype=torch.float32):
    """Logits, labels and inputs; log-ratios of about +-1.5, far from 0, and garbage where a token is ignored."""
    generator = torch.Generator().manual_seed(3)
    x = (2 * torch.randn(B, S, V, generator=generator)).to(dtype)
    labels = torch.randint(0, V, (B, S), generator=generator)
    mask = torch.arange(S) < torch.tensor(LENGTHS)[:, None]
    mask[0, 2] = False  # a hole, such as a tool's output
    labels[0, 1] = x[0, 1].argmax()  # one hit
    labels = torch.where(mask, labels, -100)
    log_prob = x.double().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]

    def near(scale):
        return (log_prob + scale * torch.randn(B, S, generator=generator)).to(dtype)

    inputs = {"old_log_prob": near(1.0), "reference_log_prob": near(1.0), "generator_log_prob": near(0.7)}
    inputs = {name: torch.where(mask, value, torch.nan) for name, value in inputs.items()}
    inputs["advantages"] = torch.tensor([1.3, -0.7, 0.4, -1.1], dtype=dtype)[:, None].expand(B, S)
    inputs["noise"] = torch.rand(B, S, generator=generator).to(dtype)  # equal in both dtypes
    inputs["rewards"] = torch.tensor([1.0, 0.0, 1.0, -1.0], dtype=dtype)[:, None]
    return x, labels, mask, inputs


def mean_of_rewarded(values, mask):
    """Values whose mean over all tokens is the mean over those with a positive reward."""
    good = mask & (problem()[3]["rewards"] > 0)
    return torch.where(good, values * (mask.sum() / good.sum()), 0.0)


# name -> (objective, options, oracle, reduction)
OBJECTIVES = {
    "reinforce": ("reinforce", {}, oracle.reinforce, "mean"),
    "clip": ("clip", {}, oracle.ppo, "mean"),
    "dapo": ("clip", {"clip": (0.2, 0.28)}, lambda *x: oracle.ppo(*x, 0.2, 0.28), "mean"),
    "dual clip": ("clip", {"dual_clip": 1.5}, lambda *x: oracle.dual_clip(*x, 0.2, 0.2, 1.5), "mean"),
    "cispo": ("cispo", {"clip": (0.3, 0.4)}, lambda *x: oracle.cispo(*x, 0.3, 0.4), "mean"),
    "cispo bound": ("cispo", {"clip": (0, 1.6), "convention": "bound"}, lambda *x: oracle.cispo_bound(*x, 1.6), "mean"),
    "sapo": ("sapo", {}, oracle.sapo, "mean"),
    "gspo": ("gspo", {"clip": (0.3, 0.4)}, lambda *x: oracle.gspo(*x, 0.3, 0.4), "seq-mean-token-mean"),
    "gspo, length-weighted": (
        "gspo-length-weighted",
        {"clip": (0.3, 0.4)},
        lambda *x: oracle.gspo_length_weighted(*x, 0.3, 0.4),
        "seq-mean-token-mean",
    ),
    "gmpo": ("gmpo", {"clip": (0.3, 0.5)}, lambda *x: oracle.gmpo(*x, 0.3, 0.5), "seq-mean-token-mean"),
    "vespo": ("vespo", {}, oracle.vespo, "mean"),
    "clip-cov": (
        "clip-cov",
        {"fraction": 0.3, "bounds": (-1.0, 5.0)},
        lambda *x: oracle.clip_cov(*x, problem(torch.float64)[3]["noise"], 0.3, (-1.0, 5.0))[0],
        "mean",
    ),
    "positive-nll": (
        "positive-nll",
        {},
        lambda lp, a, old, mask: mean_of_rewarded(-lp, mask),
        "mean",
    ),
    "kl-cov": ("kl-cov", {"fraction": 0.3, "coefficient": 0.7}, lambda *x: oracle.kl_cov(*x, 0.3, 0.7), "mean"),
}


def needed(head, inputs, mask, device, **options):
    names = {name for part in (*head.terms, *head.token_metrics) for name in part.inputs}
    out = {name: value.to(device) for name, value in inputs.items() if name in names}
    return out | {"sequences": Sequences.from_mask(mask.to(device), **options)}


def shard_of(x, group, device):
    shard = VocabShard.from_group(group, V, 128)
    return shard, F.pad(x, (0, 128 - V), value=50.0)[..., shard.start : shard.stop].clone().to(device).requires_grad_()


def policy_run(group, device, name, reduction, backend, weights=(1.0, 0.3, 0.05)):
    objective, options, _, default = OBJECTIVES[name]
    x, labels, mask, inputs = problem()
    shard, local = shard_of(x, group, device)
    terms = [PolicyGradient(objective, weights[0], **options)]
    if weights[1]:
        terms += [KLToReference(weights[1], "k3", output_clamp=None), Entropy(weights[2])]
    head = HeadLoss(terms, reduction=reduction or default, options=Options(backend=backend))
    inputs = needed(head, inputs, mask, device, horizon=9)
    out = head(local, labels.to(device), shard=shard, inputs=inputs)
    out.loss.backward(torch.tensor(0.37, device=device))
    return out.loss.detach(), local.grad, out.terms, out.count


def expected(name, reduction, weights=(1.0, 0.3, 0.05)):
    *_, function, default = OBJECTIVES[name]
    reduction = reduction or default
    x, labels, mask, inputs = problem(torch.float64)
    x.requires_grad_()
    log_p = x.log_softmax(-1)
    log_prob = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    inputs = {name: value.nan_to_num() for name, value in inputs.items()}
    parts = [function(log_prob, inputs["advantages"], inputs["old_log_prob"], mask)]
    parts += [oracle.k3(log_prob, inputs["reference_log_prob"]), (log_p.exp() * log_p).sum(-1)]
    loss = sum(w * oracle.aggregate(part, mask, reduction, 9) for w, part in zip(weights, parts))
    (grad,) = torch.autograd.grad(loss, x, torch.tensor(0.37, dtype=torch.float64))
    return loss.detach(), grad


def compare(results, loss, grad):
    for result in results:
        assert torch.equal(result[0], results[0][0])
        # the sum has terms of up to 10, of both signs
        torch.testing.assert_close(result[0].double(), loss, rtol=3e-6, atol=2e-6)
    got = torch.cat([result[1] for result in results], -1)
    torch.testing.assert_close(got[..., :V].double(), grad, rtol=3e-5, atol=1e-7)
    assert grad.abs().max() > 1e-3 and not got[..., V:].any()


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_objectives_with_kl_and_entropy_equal_float64(world_size, name, backend):
    compare(on_ranks(world_size, policy_run, name, None, backend), *expected(name, None))


@pytest.mark.parametrize("reduction", ["sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_aggregations_equal_their_definition_by_loops(world_size, reduction, backend):
    results = on_ranks(world_size, policy_run, "clip", reduction, backend)
    compare(results, *expected("clip", reduction))
    count = 11 if reduction == "sum" else 3  # three sequences have tokens
    assert all(result[3] == count for result in results)
    policy = expected("clip", reduction, (1.0, 0.0, 0.0))[0] * (1 if reduction == "sum" else count)
    torch.testing.assert_close(results[0][2]["clip"].double(), policy, rtol=3e-6, atol=1e-7)


def test_clip_cov_drops_the_loudest_of_the_candidates():
    x, labels, mask, inputs = problem(torch.float64)
    inputs = {name: value.nan_to_num() for name, value in inputs.items()}
    log_prob = x.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0].requires_grad_()
    arguments = {name: inputs[name] for name in ("advantages", "old_log_prob", "noise")}
    for fraction, dropped in ((0.0, 1), (0.3, 3)):
        options = {"fraction": fraction, "bounds": (-1.0, 5.0)}
        ours = losses.clip_cov(log_prob, **arguments, mask=mask, **options)
        want, n = oracle.clip_cov(
            log_prob, arguments["advantages"], arguments["old_log_prob"], mask, arguments["noise"], *options.values()
        )
        assert n == dropped
        torch.testing.assert_close(ours[mask], want[mask])
        (a,), (b,) = (torch.autograd.grad(v[mask].sum(), log_prob) for v in (ours, want))
        torch.testing.assert_close(a, b)


def test_positive_nll_imitates_rewarded_tokens_only():
    _, _, _, inputs = problem()
    log_prob = torch.full((B, S), -0.5, requires_grad=True)
    loss = losses.positive_nll(log_prob, rewards=inputs["rewards"].expand(B, S))
    assert loss[0].eq(0.5).all() and loss[2].eq(0.5).all() and not loss[1].any() and not loss[3].any()


# What theory says

LOG_PROB = torch.linspace(-3.0, -0.1, 40, dtype=torch.float64)
ADVANTAGES = torch.tensor([1.5, -0.5, 0.0, -2.0], dtype=torch.float64).repeat(10)


def gradient(function, *args, **kwargs):
    log_prob = LOG_PROB.clone().requires_grad_()
    value = function(log_prob, *args, **kwargs)
    return value.detach(), torch.autograd.grad(value.sum(), log_prob)[0]


@pytest.mark.parametrize("name", ["clipped", "cispo", "sapo", "kl_cov", "gspo", "gmpo"])
def test_at_ratio_one_the_gradient_is_that_of_reinforce(name):
    one = Sequences.from_ids(torch.arange(40), 40, torch.ones(40, dtype=torch.bool))  # a sequence per token
    extra = {
        "kl_cov": {"mask": torch.ones(40, dtype=torch.bool)},
        "gspo": {"sequences": one},
        "gmpo": {"sequences": one},
    }
    options = {"advantages": ADVANTAGES, "old_log_prob": LOG_PROB, **extra.get(name, {})}
    _, got = gradient(getattr(losses, name), **options)
    want = gradient(losses.reinforce, advantages=ADVANTAGES)[1]
    if name == "kl_cov":  # sgn(0) = 0: the penalty has no gradient there
        want = want + 0.0
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)


def test_two_sided_delta_is_the_dual_clip():
    old = LOG_PROB + torch.linspace(-1.5, 1.5, 40, dtype=torch.float64).flip(0)
    ours = gradient(losses.clipped, advantages=ADVANTAGES, old_log_prob=old, dual_clip=2.0)
    for want in (oracle.dual_clip, oracle.two_sided):
        value, grad = gradient(lambda lp, f=want: f(lp, ADVANTAGES, old, None, 0.2, 0.2, 2.0))
        torch.testing.assert_close(ours[0], value)
        torch.testing.assert_close(ours[1], grad)
    plain = gradient(losses.clipped, advantages=ADVANTAGES, old_log_prob=old)
    assert not torch.equal(plain[0], ours[0]) and not torch.equal(plain[1], ours[1])


def test_on_the_bound_a_ratio_still_passes_its_gradient():
    log_prob = torch.tensor([0.25, -0.25], requires_grad=True)  # exp(0.25) is the bound, to the bit
    old, advantages = torch.zeros(2), torch.tensor([1.0, -1.0])
    clip = (1 - math.exp(-0.25), math.exp(0.25) - 1)
    ratio = log_prob.detach().exp()
    assert ratio[0] <= 1 + clip[1] + 1e-7
    loss = losses.clipped(
        log_prob, advantages=advantages, old_log_prob=old, clip=(1 - ratio[1].item(), ratio[0].item() - 1)
    )
    (grad,) = torch.autograd.grad(loss.sum(), log_prob)
    torch.testing.assert_close(grad, -advantages * ratio)


def test_gspo_of_single_tokens_is_the_clipped_objective():
    one = Sequences.from_ids(torch.arange(40), 40, torch.ones(40, dtype=torch.bool))
    options = {"advantages": ADVANTAGES, "old_log_prob": LOG_PROB.flip(0)}
    a, b = gradient(losses.gspo, sequences=one, **options), gradient(losses.clipped, **options)
    torch.testing.assert_close(a[0], b[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(a[1], b[1], rtol=1e-6, atol=1e-7)


def test_equal_lengths_make_token_and_sequence_means_one():
    x = torch.randn(3, 5, V)
    labels, a = torch.randint(0, V, (3, 5)), torch.randn(3, 5)
    inputs = {"advantages": a, "sequences": Sequences.from_mask(labels >= 0, horizon=5)}
    out = {}
    for reduction in ("mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        out[reduction] = HeadLoss([PolicyGradient("reinforce")], reduction=reduction)(x, labels, inputs=inputs).loss
    torch.testing.assert_close(out["mean"], out["seq-mean-token-mean"])
    torch.testing.assert_close(5 * out["mean"], out["seq-mean-token-sum"])
    torch.testing.assert_close(out["mean"], out["seq-mean-token-sum-norm"])


# KL


def test_only_k3_is_clamped_in_its_value():
    """A token that strayed far keeps its gradient under the other estimators."""
    log_prob = torch.tensor([-9.0], requires_grad=True)
    for estimator, value, slope in (("k1", -8.0, 1.0), ("abs", 8.0, -1.0), ("k2", 32.0, -8.0), ("k3+", 10.0, -8.0)):
        kl = losses.kl_estimate(log_prob, reference_log_prob=torch.tensor([-1.0]), estimator=estimator)
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
    reference = torch.tensor(
        [-1.0, -1.0, -3.5]
    )  # x = -29: beyond the input's clamp; -4: k3 = 49.6, beyond the output's
    value = losses.kl_estimate(log_prob, reference_log_prob=reference)
    torch.testing.assert_close(value[:2].detach(), torch.tensor([10.0, 10.0]))
    (grad,) = torch.autograd.grad(value.sum(), log_prob)
    assert grad[:2].tolist() == [0, 0] and grad[2] < 0
    weighted = losses.kl_estimate(log_prob, reference_log_prob=reference, sampler_log_prob=log_prob.detach())
    (grad,) = torch.autograd.grad(weighted.sum(), log_prob)
    assert grad[0] == 0 and grad[1] == 10  # the weight passes no gradient beyond the input's clamp


@pytest.mark.parametrize("importance", [None, "on-policy", "old", "generator"])
def test_the_kl_term_takes_the_weight_it_names(importance):
    x, labels, mask, inputs = problem()
    x.requires_grad_()
    term = KLToReference(0.5, "k3", importance_weight=importance, output_clamp=None)
    out = HeadLoss([term], reduction="sum")(x, labels, inputs={name: inputs[name] for name in term.inputs})
    log_prob = log_probs(x, labels).log_prob
    sampler = {None: None, "on-policy": log_prob.detach()}.get(importance, inputs.get(f"{importance}_log_prob"))
    gap = (inputs["reference_log_prob"] - log_prob)[mask]
    want = gap.exp() - gap - 1
    if sampler is not None:
        want = want * (log_prob - sampler)[mask].exp()
    torch.testing.assert_close(out.loss, 0.5 * want.sum(), rtol=1e-5, atol=1e-6)
    a, b = (torch.autograd.grad(v, x, retain_graph=True)[0] for v in (out.loss, 0.5 * want.sum()))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# Odd inputs


@pytest.mark.parametrize("objective", ["reinforce", "clipped", "cispo", "sapo", "gspo", "gmpo", "vespo"])
def test_extreme_ratios_are_finite_and_an_advantage_of_0_is_0(objective):
    log_prob = torch.tensor([[-200.0, -1.0], [-1e-3, -torch.inf], [-0.5, -0.5]], requires_grad=True)
    old = torch.tensor([[-1.0, -201.0], [-200.0, -1.0], [-torch.inf, -0.5]])
    sequences = Sequences.from_mask(torch.ones(3, 2, dtype=torch.bool))
    function = getattr(losses, objective)
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
    loss = losses.clipped(log_prob, advantages=torch.full((3,), -1.0), old_log_prob=old)
    (grad,) = torch.autograd.grad(loss.sum(), log_prob)
    assert grad[0] == 0 and grad[1] > 8000 and grad[2] == 0
    ratio = losses.log_ratio(log_prob, old)
    assert ratio.tolist() == [20, 9, -20] and torch.autograd.grad(ratio.sum(), log_prob)[0].tolist() == [0, 1, 0]


@pytest.mark.parametrize("objective", ["clipped", "cispo", "sapo", "gspo", "gmpo", "vespo", "kl_cov"])
def test_a_nan_stays_visible(objective):
    log_prob, old = torch.full((2, 3), -1.0), torch.full((2, 3), -1.0)
    old[0, 1] = torch.nan
    inputs = {"old_log_prob": old, "advantages": torch.ones(2, 3)}
    if objective in ("gspo", "gmpo", "vespo"):
        inputs["sequences"] = Sequences.from_mask(torch.ones(2, 3, dtype=torch.bool))
    if objective == "kl_cov":
        inputs["mask"] = torch.ones(2, 3, dtype=torch.bool)
    loss = getattr(losses, objective)(log_prob, **inputs)
    assert loss[0, 1].isnan() and loss[1].isfinite().all()
    inputs = {"advantages": torch.tensor([0.0, torch.nan]), "old_log_prob": torch.zeros(2)}
    assert losses.clipped(torch.zeros(2), **inputs).isnan().tolist() == [False, True]


def test_ignored_tokens_leak_nothing(backend, device):
    """`problem` fills them with NaN."""
    x, labels, mask, inputs = (t.to(device) if isinstance(t, torch.Tensor) else t for t in problem())
    inputs = {name: value.to(device) for name, value in inputs.items()}
    x.requires_grad_()
    head = HeadLoss(
        [PolicyGradient("gspo"), KLToReference(0.1, "k3+")],
        metrics=("entropy", PolicyMetrics(reference=True), GeneratorMetrics()),
        options=Options(backend=backend),
    )
    out = head(x, labels, inputs=needed(head, inputs, mask, device))
    out.loss.backward()
    assert out.loss.isfinite() and x.grad.isfinite().all() and not x.grad[~mask].any()
    for name, value in {**out.metrics, **out.sequence_metrics}.items():
        assert value.isfinite(), name


def test_no_valid_token_gives_0_and_neutral_metrics(backend, device):
    x, _, _, inputs = problem()
    x, labels = x.to(device).requires_grad_(), torch.full((B, S), -100, device=device)
    head = HeadLoss(
        [PolicyGradient("clip")],
        metrics=(PolicyMetrics(),),
        reduction="seq-mean-token-mean",
        options=Options(backend=backend),
    )
    out = head(x, labels, inputs=needed(head, inputs, labels >= 0, device))
    out.loss.backward()
    assert out.loss == 0 and not x.grad.any() and out.count == 0
    assert out.metrics["max_ratio"] == -torch.inf and out.metrics["min_advantage"] == torch.inf
    assert out.metrics["ratio"] == 0 and out.sequence_metrics["num_sequences"] == 0


@pytest.mark.parametrize("objective", ["reinforce", "clip", "cispo", "sapo", "gspo", "gmpo", "vespo", "kl-cov"])
def test_garbage_outside_of_the_sequences_reaches_neither_loss_nor_gradient(objective, backend, device):
    """NaN in every input, in the logits, and a bad label: all at tokens that only the sequences' mask excludes."""
    x, labels, mask, inputs = problem()
    head = HeadLoss(
        [PolicyGradient(objective, rollout_weight=True), KLToReference(0.1, importance_weight="old")],
        metrics=(PolicyMetrics(),),
        options=Options(backend=backend),
    )
    inputs = {name: torch.where(mask, value, torch.nan) for name, value in inputs.items()} | {
        "rollout_weight": torch.where(mask, 0.5, torch.nan)
    }
    outs = []
    for garbage in (False, True):
        local = torch.where(mask[..., None] | (not garbage), x, torch.nan).to(device).requires_grad_()
        targets = torch.where(mask, labels, -1 if garbage else -100).to(device)
        out = head(local, targets, inputs=needed(head, inputs, mask, device))
        out.loss.backward()
        outs.append((out.loss.detach(), local.grad, out.metrics))
    torch.testing.assert_close(*outs, rtol=0, atol=0)
    assert outs[0][0].isfinite() and outs[0][1].any()


def test_inputs_are_constants_of_any_kind(backend, device):
    """Not detached, float64, bool: the loss is that of the same fp32 numbers, and only the logits get a gradient."""
    x, labels, _, inputs = problem()
    labels = labels.clamp(min=0).to(device)
    old = inputs["old_log_prob"].nan_to_num()
    head = HeadLoss([PolicyGradient("clip"), KLToReference(0.1)], options=Options(backend=backend))
    results = []
    for kind in (torch.float32, torch.float64, torch.bool):
        local = x.clone().to(device).requires_grad_()
        own = old.to(device).requires_grad_()
        given = {
            "advantages": (inputs["advantages"] > 0).to(device, kind),
            "old_log_prob": own.double() if kind == torch.float64 else own,
            "reference_log_prob": own,
        }
        loss = head(local, labels, inputs=given).loss
        loss.backward()
        assert own.grad is None and loss.dtype == torch.float32
        results.append((loss.detach(), local.grad))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)
    # a ratio to the policy itself is 1, and still has a gradient
    local = x.clone().to(device).requires_grad_()
    given = {"advantages": inputs["advantages"].to(device), "old_log_prob": log_probs(local, labels).log_prob}
    head = HeadLoss([PolicyGradient("clip")], options=Options(backend=backend))
    assert torch.autograd.grad(head(local, labels, inputs=given).loss, local)[0].any()


@pytest.mark.parametrize("reduction", ["mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_the_callers_denominator_replaces_the_count_alone(reduction):
    x, labels, mask, inputs = problem()
    head = HeadLoss([PolicyGradient("clip")], reduction=reduction)
    given = needed(head, inputs, mask, "cpu", horizon=9)
    own = head(x, labels, inputs=given)
    for denominator in (7, 7.0, torch.tensor(7.0), torch.tensor(7)):
        other = head(x, labels, inputs=given, denominator=denominator)
        torch.testing.assert_close(7 * other.loss, own.count * own.loss)
    with pytest.raises(ValueError, match=r"scalar tensor, got shape \[1\]"):
        head(x, labels, inputs=given, denominator=torch.ones(1))


def test_a_single_token_without_dimensions_has_metrics_too():
    head = HeadLoss([PolicyGradient("clip")], metrics=(PolicyMetrics(),))
    inputs = {"advantages": torch.tensor(1.0), "old_log_prob": torch.tensor(-2.0)}
    out = head(torch.zeros(8), torch.tensor(3), inputs=inputs)
    torch.testing.assert_close(out.metrics["max_ratio"], torch.tensor(math.exp(2) / 8))


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="objective must be one of"):
        PolicyGradient("ppo2")
    for wrong in ({"clip": (1.5, 0.2)}, {"dual_clip": 1.1}):
        with pytest.raises(ValueError, match="got"):
            losses.clipped(LOG_PROB, advantages=ADVANTAGES, old_log_prob=LOG_PROB, **wrong)
    with pytest.raises(TypeError, match=r"objective 'clip' takes the options \['clip', .*got \['clip_low'\]"):
        PolicyGradient("clip", clip_low=0.2)
    with pytest.raises(TypeError, match=r"KLToReference takes the options .*got \['clamp'\]"):
        KLToReference(0.1, clamp=3)
    with pytest.raises(ValueError, match="convention must be"):
        losses.cispo(LOG_PROB, advantages=ADVANTAGES, old_log_prob=LOG_PROB, convention="both")
    with pytest.raises(ValueError, match="estimator must be"):
        KLToReference(0.1, "k4")
    with pytest.raises(ValueError, match="importance_weight must be"):
        KLToReference(0.1, importance_weight="new")
    with pytest.raises(ValueError, match="level must be"):
        PolicyMetrics(level="batch")


def test_wrong_inputs_are_refused_with_what_was_expected():
    x, labels, mask, inputs = problem()
    head = HeadLoss([PolicyGradient("gspo")], reduction="seq-mean-token-mean")
    good = needed(head, inputs, mask, "cpu")
    wrong = {
        "missing \\['old_log_prob'\\]": {k: v for k, v in good.items() if k != "old_log_prob"},
        "unused \\['x'\\]": good | {"x": x},
        "dimensions as the labels \\[4, 7\\], .*got \\[5\\]": good | {"advantages": torch.ones(5)},
        "must broadcast to the labels' shape \\[4, 7\\], got \\[5, 1\\]": good | {"advantages": torch.ones(5, 1)},
        "sequences must be of tokens \\[4, 7\\], got \\[4, 6\\]": good
        | {"sequences": Sequences.from_mask(mask[:, 1:])},
    }
    for message, given in wrong.items():
        with pytest.raises(ValueError, match=message):
            head(x, labels, inputs=given)
    for message, given in {
        "must be a Sequences": good | {"sequences": 3},
        "must be a tensor, got float": good | {"advantages": 1.0},
    }.items():
        with pytest.raises(TypeError, match=message):
            head(x, labels, inputs=given)
    with pytest.raises(ValueError, match="horizon"):
        HeadLoss([PolicyGradient("gspo")], reduction="seq-mean-token-sum-norm")(x, labels, inputs=good)


def test_a_sequence_mask_and_token_weights_decide_which_labels_count(backend, device):
    """Labels of all tokens, a mask of the answer's: as if the others were ignored, whatever garbage they hold."""
    x, labels, mask, inputs = problem()
    weight = torch.linspace(0.0, 2.0, B * S).view(B, S)
    every = torch.where(mask, labels, 5)
    head = HeadLoss(
        [PolicyGradient("clip"), KLToReference(0.1)],
        metrics=("entropy", PolicyMetrics()),
        reduction="seq-mean-token-mean",
        options=Options(backend=backend),
    )
    given = needed(head, inputs, mask, device)
    outs = []
    for targets in (labels, every):
        local = x.clone().to(device).requires_grad_()
        out = head(local, targets.to(device), inputs=given, token_weight=weight.to(device))
        out.loss.backward()
        outs.append((out.loss.detach(), local.grad, out.terms, out.metrics, out.sequence_metrics))
    torch.testing.assert_close(*outs)
    log_prob = log_probs(x, labels).log_prob.double()
    per_token = oracle.ppo(log_prob, inputs["advantages"], inputs["old_log_prob"], mask)
    per_token = (per_token + 0.1 * oracle.k3(log_prob, inputs["reference_log_prob"]).clamp(max=10)) * weight
    want = oracle.aggregate(per_token, mask, "seq-mean-token-mean")
    torch.testing.assert_close(outs[0][0].double().cpu(), want, rtol=3e-6, atol=1e-6)


def test_extremes_leave_out_tokens_of_weight_0():
    values = {"max_a": torch.tensor([5.0, 1.0, 2.0, 9.0]), "min_a": torch.tensor([-5.0, 1.0, 2.0, -9.0])}
    valid, weight = torch.tensor([True, True, True, False]), torch.tensor([0.0, 1.0, -2.0, 1.0])
    assert metric_sums(values, valid, weight) == {"max_a": 2.0, "min_a": 1.0}
    assert metric_sums(values, valid, None) == {"max_a": 5.0, "min_a": -5.0}


def test_metrics_of_one_name_are_refused():
    x, labels, mask, inputs = problem()
    head = HeadLoss([PolicyGradient("clip")], metrics=(PolicyMetrics(), PolicyMetrics(level="sequence")))
    with pytest.raises(ValueError, match=r"distinct names, got \['advantage', "):
        head(x, labels, inputs=needed(head, inputs, mask, "cpu"))
    head = HeadLoss(metrics=("entropy", Metric(lambda stats: {"entropy": stats.lse})))
    for given in ({}, {"sequences": Sequences.from_mask(mask)}):
        with pytest.raises(ValueError, match=r"distinct names, got \['entropy'\]"):
            head(x, labels, inputs=given)


# Rollout correction


def test_rollout_weights_equal_loops():
    _, _, mask, inputs = problem(torch.float64)
    old, generator = (inputs[name].nan_to_num() for name in ("old_log_prob", "generator_log_prob"))
    sequences = Sequences.from_mask(mask)
    w = (old - generator).exp()
    product = torch.stack([w[i][mask[i]].prod() if mask[i].any() else torch.tensor(1.0) for i in range(B)])[:, None]
    geometric = torch.stack([w[i][mask[i]].log().mean().exp() if mask[i].any() else torch.ones(()) for i in range(B)])

    def within(weight, low, high):
        return (weight >= low) & (weight <= high)

    cases = [
        (losses.truncated_importance_weight(old, generator, bounds=(0.5, 1.5)), w.clamp(0.5, 1.5)),
        (losses.truncated_importance_weight(old, generator), w.clamp(0, 2)),
        (
            losses.truncated_importance_weight(old, generator, level="sequence", sequences=sequences, bounds=(0, 5)),
            product.expand(B, S).clamp(0, 5),
        ),
        (losses.icepop(old, generator, bounds=(0.6, 1.5)), w * within(w, 0.6, 1.5)),
        (
            losses.sequence_mask(old, generator, sequences=sequences, bounds=(0.6, 3.0)),
            w * within(geometric[:, None], 0.6, 3.0),  # the first stays
        ),
    ]
    for ours, want in cases:
        torch.testing.assert_close(ours[mask].double(), want[mask].double(), rtol=1e-6, atol=1e-8)
        assert not torch.equal(want[mask], w[mask])  # the bounds bite
    with pytest.raises(ValueError, match="sequences"):
        losses.icepop(old, generator, level="sequence")


def test_a_rollout_weight_scales_the_policy_loss_alone(backend, device):
    x, labels, _, inputs = problem()
    inputs = {name: value.to(device) for name, value in inputs.items()}
    weight = torch.rand(B, S, device=device).requires_grad_()  # detached by the term
    out = {}
    for flag in (False, True):
        head = HeadLoss(
            [PolicyGradient("clip", rollout_weight=flag), KLToReference(0.1)],
            reduction="sum",
            options=Options(backend=backend),
        )
        given = {name: inputs[name] for name in ("advantages", "old_log_prob", "reference_log_prob")}
        given |= {"rollout_weight": weight} if flag else {}
        local = x.clone().to(device).requires_grad_()
        out[flag] = head(local, labels.to(device), inputs=given)
        out[flag].loss.backward()
    assert weight.grad is None and torch.equal(out[True].terms["kl"], out[False].terms["kl"])
    stats = out[False].stats
    per_token = losses.clipped(stats.log_prob, advantages=inputs["advantages"], old_log_prob=inputs["old_log_prob"])
    want = torch.where(stats.valid, per_token * weight, 0.0).sum()
    torch.testing.assert_close(out[True].terms["clip"], want.detach())


# Metrics


def metrics_run(group, device, weight, backend):
    x, labels, mask, inputs = problem()
    shard, local = shard_of(x, group, device)
    head = HeadLoss(
        [PolicyGradient("clip")],
        metrics=("entropy", "accuracy", PolicyMetrics((0.2, 0.3), 1.6, reference=True), GeneratorMetrics()),
        options=Options(backend=backend),
    )
    weight = None if weight is None else weight.to(device)
    given = needed(head, inputs, mask, device)
    out = head(local, labels.to(device), shard=shard, inputs=given, token_weight=weight)
    return out.metrics, out.sequence_metrics


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_policy_metrics_equal_loops(world_size, weighted, backend):
    x, labels, mask, inputs = problem()
    weight = torch.linspace(0, 2, B * S).view(B, S) if weighted else torch.ones(B, S)
    results = on_ranks(world_size, metrics_run, weight if weighted else None, backend)
    z = x.double().log_softmax(-1)
    new = z.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    old, ref, gen = (inputs[f"{n}_log_prob"].double() for n in ("old", "reference", "generator"))
    a = inputs["advantages"].double()
    r, w, mix = (new - old).exp(), (old - gen).exp(), (old.exp() / 2 + gen.exp() / 2).log()
    clamped = r.clamp(0.8, 1.3)

    def k3(p, q):
        return (q - p).exp() - (q - p) - 1

    per_token = {
        "entropy": -(z.exp() * z).sum(-1), "accuracy": x.argmax(-1) == labels, "new_log_prob": new, "old_log_prob": old,
        "ratio": r, "ratio_squared": r**2, "ratio_clamped": clamped, "kl_old": r - r.log() - 1, "approx_kl": old - new,
        "clip_fraction": (r < 0.8) | (r > 1.3), "pg_clip_fraction": -a * clamped > -a * r,
        "pg_clip_fraction_lower": (a < 0) & (r > 1.6), "advantage": a, "num_tokens": torch.ones(B, S),
        "kl_reference": k3(new, ref), "token_mult_prob_error": (gen - old).abs().exp(), "sampling_importance_ratio": w,
        "is_oob_ratio": (w < 0.5) | (w > 2), "gen_kl_error": k3(gen, old), "policy_kl_error": k3(old, gen),
        "js_divergence_error": sum((y - mix).exp() - 1 - (y - mix) for y in (old, gen)) / 2,
        "approx_entropy": -(new - gen).exp() * new,
        "logprob_diff": (new - gen).abs(), "tokens_different": new != gen,
    }  # fmt: skip
    extremes = {"advantage": a, "ratio": r, "ratio_clamped": clamped}
    want = {name: (value.double() * weight)[mask].sum() for name, value in per_token.items()}
    counted = mask & (weight != 0)
    want |= {f"max_{name}": value[counted].max() for name, value in extremes.items()}
    want |= {f"min_{name}": value[counted].min() for name, value in extremes.items()}
    want["max_logprob_diff"] = (new - gen).abs()[counted].max()
    means = dict.fromkeys(per_token, 0.0) | {"num_sequences": 3.0}
    for i in range(B):
        for name, value in per_token.items():
            if mask[i].any():
                means[name] += (value[i].double() * weight[i])[mask[i]].sum() / mask[i].sum()
    for metrics, by_sequence in results:
        assert set(metrics) == set(want) == set(by_sequence) - {"num_sequences"}
        for got, truth in ((metrics, want), (by_sequence, want | means)):
            for name, value in truth.items():
                value = torch.as_tensor(value).double()
                torch.testing.assert_close(got[name].double(), value, rtol=1e-5, atol=1e-5, msg=name)
                assert value != 0, name


def test_sequence_level_metrics_are_of_the_sequences_ratio():
    x, labels, mask, inputs = problem()
    head = HeadLoss([PolicyGradient("gspo")], metrics=(PolicyMetrics(level="sequence"),))
    out = head(x, labels, inputs=needed(head, inputs, mask, "cpu"))
    new = log_probs(x, labels).log_prob
    want = sum((new - inputs["old_log_prob"])[i][mask[i]].mean().exp() for i in range(B) if mask[i].any())
    torch.testing.assert_close(out.sequence_metrics["ratio"], want)


def test_metrics_have_no_gradient_and_change_none():
    x, labels, mask, inputs = problem()
    grads = []
    for metrics in ((), ("entropy", PolicyMetrics(reference=True))):
        local = x.clone().requires_grad_()
        head = HeadLoss([PolicyGradient("clip")], metrics=metrics)
        out = head(local, labels, inputs=needed(head, inputs, mask, "cpu"))
        assert not any(value.requires_grad for value in out.metrics.values())
        out.loss.backward()
        grads.append(local.grad)
    assert torch.equal(*grads)


# log_probs


def test_log_probs_returns_three_differentiable_statistics(backend, device):
    x, labels, _, _ = problem()
    labels = labels.clamp(min=0)
    local, truth = x.clone().to(device).requires_grad_(), x.double().requires_grad_()
    out = log_probs(local, labels.to(device), options=Options(backend=backend))
    z = truth.log_softmax(-1)
    want = z.gather(-1, labels[..., None])[..., 0], -(z.exp() * z).sum(-1), truth.logsumexp(-1)
    for a, b in zip(out, want):
        torch.testing.assert_close(a.double().cpu(), b, rtol=1e-6, atol=1e-6)
    sum(w * v.sum() for w, v in zip((1.0, 0.5, 0.2), out)).backward()
    sum(w * v.sum() for w, v in zip((1.0, 0.5, 0.2), want)).backward()
    torch.testing.assert_close(local.grad.double().cpu(), truth.grad, rtol=3e-5, atol=1e-6)
    frozen = log_probs(local, labels.to(device), differentiable=False, entropy=False, options=Options(backend=backend))
    assert frozen.entropy is None and not frozen.log_prob.requires_grad and torch.equal(frozen.log_prob, out.log_prob)


PER_TOKEN = {name: function for name, (function, _) in OBJECTIVES_BY_NAME.items() if name != "positive-nll"}


def with_a_nan(name, broken, device, beyond):
    """Loss and gradient of an objective, a NaN in one input of token 1; log-ratios within or beyond every clip."""
    function, names = OBJECTIVES_BY_NAME[name]
    mask = torch.ones(1, 4, dtype=torch.bool, device=device)
    x = torch.full((1, 4), -1.0, device=device, requires_grad=True)
    old = torch.tensor([[-1.1, -5.0 if beyond else -1.1, 3.0 if beyond else -1.1, -1.0]], device=device)
    given = {"advantages": torch.tensor([[1.0, 1.0, -1.0, 0.0]], device=device), "old_log_prob": old, "mask": mask,
             "noise": torch.full((1, 4), 0.5, device=device), "sequences": Sequences.from_mask(mask)}  # fmt: skip
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


@pytest.mark.parametrize("estimator", losses.KL_ESTIMATORS)
def test_a_nan_reference_is_nan_in_the_gradient_too(estimator, device):
    x = torch.full((3,), -1.0, device=device, requires_grad=True)
    reference = torch.tensor([-1.5, math.nan, 50.0], device=device)
    value = losses.kl_estimate(x, reference_log_prob=reference, estimator=estimator)
    value.sum().backward()
    assert value.isnan().tolist() == [False, True, False] and x.grad.isnan().tolist() == [False, True, False]


def test_a_nan_completion_is_nan_in_the_gradient_of_orpo_too():
    chosen = torch.tensor([-1.0, math.nan], requires_grad=True)
    losses.orpo(chosen, torch.tensor([-2.0, -2.0])).sum().backward()
    assert chosen.grad.isnan().tolist() == [False, True]


def test_a_rollout_mask_of_a_sequence_with_a_nan_is_nan():
    sequences = Sequences.from_mask(torch.ones(2, 3, dtype=torch.bool))
    generator_log_prob = torch.zeros(2, 3)
    generator_log_prob[0, 1] = math.nan
    weight = losses.sequence_mask(torch.zeros(2, 3), generator_log_prob, sequences=sequences)
    assert weight.isnan().tolist() == [[True] * 3, [False] * 3]


def test_gmpo_counts_a_token_whose_advantage_is_0_as_unchanged(device):
    """verl multiplies the log-ratio by the sign of the advantage, twice."""
    x = torch.tensor([[-1.0, -2.0, -0.5]], device=device)
    old = torch.tensor([[-1.2, -1.9, -1.0]], device=device)
    advantages = torch.tensor([[1.0, 0.0, -1.0]], device=device)
    sequences, sign = Sequences.from_mask(torch.ones(1, 3, dtype=torch.bool, device=device)), advantages.sign()
    held = sign * torch.minimum(sign * (x - old), sign * (x - old).clamp(-0.4, 0.4))
    loss = losses.gmpo(x, advantages=advantages + 0.0, old_log_prob=old, sequences=sequences)
    torch.testing.assert_close(loss, -(advantages.mean() * held.mean().exp()).expand(1, 3))
    assert held[0, 1] == 0


def test_vespo_takes_the_log_weights_of_the_rollout_with_each_batch(device):
    x, labels, mask, inputs = problem()
    names = "advantages", "old_log_prob", "generator_log_prob"
    inputs = {name: torch.where(mask, inputs[name], 0.0).to(device) for name in names}
    inputs["sequences"] = Sequences.from_mask(mask.to(device))
    rollout = inputs["old_log_prob"] - inputs.pop("generator_log_prob")
    plain = HeadLoss([PolicyGradient("vespo")])
    weighted = HeadLoss([PolicyGradient("vespo", rollout_log_weight=True)])
    x, labels = x.to(device), labels.to(device)
    loss = weighted(x, labels, inputs={**inputs, "rollout_log_weight": rollout}).loss
    own = log_probs(x, labels).log_prob
    keywords = {**inputs, "rollout_log_weight": rollout}
    expected = torch.where(mask.to(device), losses.vespo(own, **keywords), 0.0).sum() / mask.sum()
    torch.testing.assert_close(loss, expected)
    assert not torch.allclose(loss, plain(x, labels, inputs=inputs).loss)
    with pytest.raises(ValueError, match="rollout_log_weight is an input of the objective 'vespo', got 'clip'"):
        PolicyGradient("clip", rollout_log_weight=True)


def clamped_kl(stats, reference_log_prob, weight):
    keywords = {"reference_log_prob": reference_log_prob, "input_clamp": None, "output_clamp": None}
    return (weight * losses.kl_estimate(stats.log_prob, **keywords)).clamp(-10, 10)


def test_what_docs_peers_says_gives_the_peers_numbers():
    """The third row of the batch has no token: some divide by it, too."""
    x, labels, mask, inputs = problem()
    inputs = {name: torch.where(mask, value.expand(B, S), 0.0) for name, value in inputs.items()}
    log_prob = torch.where(mask, log_probs(x, labels).log_prob, 0.0)
    per_token = losses.clipped(log_prob, advantages=inputs["advantages"], old_log_prob=inputs["old_log_prob"])
    sums, lengths = (per_token * mask).sum(-1), mask.sum(-1)
    given = {name: inputs[name] for name in ("advantages", "old_log_prob")}
    given["sequences"] = Sequences.from_mask(mask, horizon=S)

    def ours(reduction, denominator):
        head = HeadLoss([PolicyGradient("clip")], reduction=reduction)
        return head(x, labels, denominator=denominator, inputs=given).loss

    torch.testing.assert_close(ours("seq-mean-token-mean", B), (sums / lengths.clamp(min=1)).sum() / B)
    torch.testing.assert_close(ours("seq-mean-token-sum-norm", 1.0), sums.sum() / S)

    far, weight = inputs["reference_log_prob"] - 4.0, torch.full((B, S), 5.0)
    term = Term("kl", clamped_kl, inputs=("reference_log_prob", "weight"))
    loss = HeadLoss([term], reduction="sum")(x, labels, inputs={"reference_log_prob": far, "weight": weight}).loss
    d = far - log_prob
    nemo = (weight * (d.exp() - 1 - d)).clamp(-10, 10)
    torch.testing.assert_close(loss, (nemo * mask).sum())
    assert (nemo[mask] == 10).any() and (nemo[mask] < 10).any()

    every = Sequences.from_mask(torch.ones_like(mask))
    old = inputs["old_log_prob"] + 0.1
    unmasked = losses.vespo(log_prob, advantages=inputs["advantages"], old_log_prob=old, sequences=every)
    given = {"advantages": inputs["advantages"], "old_log_prob": old, "sequences": every}
    head = HeadLoss([PolicyGradient("vespo")], reduction="sum")
    loss = head(x, labels, token_weight=mask.float(), inputs=given).loss
    torch.testing.assert_close(loss, (unmasked * mask).sum())
    given["sequences"] = Sequences.from_mask(mask)
    assert not torch.allclose(loss, head(x, labels, inputs=given).loss)


def test_a_nan_reward_and_a_nan_ratio_of_advantage_0_stay_visible(device):
    x = torch.full((1, 3), -1.0, device=device, requires_grad=True)
    nan = torch.tensor([[1.0, math.nan, 0.0]], device=device)
    loss = losses.positive_nll(x, rewards=nan)
    loss.sum().backward()
    assert loss.isnan().tolist() == x.grad.isnan().tolist() == [[False, True, False]] and loss[0, 2] == 0
    y = torch.full((1, 3), -1.0, device=device, requires_grad=True)
    sequences = Sequences.from_mask(torch.ones(1, 3, dtype=torch.bool, device=device))
    advantages = torch.tensor([[1.0, 0.0, 1.0]], device=device)
    loss = losses.gmpo(y, advantages=advantages, old_log_prob=nan, sequences=sequences)
    loss.sum().backward()
    assert loss.isnan().all() and y.grad[0, 1].isnan()


def test_clamps_that_are_no_bounds_are_refused():
    for keywords in ({"input_clamp": -1.0}, {"output_clamp": -5.0}):
        with pytest.raises(ValueError, match="clamp must be a positive number or None"):
            losses.kl_estimate(LOG_PROB, reference_log_prob=LOG_PROB, **keywords)
    with pytest.raises(ValueError, match="dual_clip must be at least"):
        losses.clipped(LOG_PROB, advantages=ADVANTAGES, old_log_prob=LOG_PROB, dual_clip=math.nan)
