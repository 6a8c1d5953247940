"""Policy-gradient objectives and aggregations against float64 autograd and theory, at every TP
size."""

import policy_oracle as oracle
import pytest
import torch
from policy_problem import B, S, V, needed, problem, shard_of
from ranks import on_ranks

import tp_headloss as hl


def mean_of_rewarded(values, mask):
    """Values whose mean over all tokens is the mean over those with a positive reward."""
    good = mask & (problem()[3]["rewards"] > 0)
    return torch.where(good, values * (mask.sum() / good.sum()), 0.0)


def clip_cov_of(fraction):
    return lambda *x: oracle.clip_cov(*x, problem(torch.float64)[3]["noise"], fraction, (-1.0, 5.0))


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
    "gspo, length-weighted": ("gspo-length-weighted", {"clip": (0.3, 0.4)},
                              lambda *x: oracle.gspo_length_weighted(*x, 0.3, 0.4), "seq-mean-token-mean"),
    "gmpo": ("gmpo", {"clip": (0.3, 0.5)}, lambda *x: oracle.gmpo(*x, 0.3, 0.5), "seq-mean-token-mean"),
    "vespo": ("vespo", {}, oracle.vespo, "mean"),
    "clip-cov": ("clip-cov", {"fraction": 0.3, "bounds": (-1.0, 5.0)}, clip_cov_of(0.3), "mean"),
    "clip-cov, one": ("clip-cov", {"fraction": 0.0, "bounds": (-1.0, 5.0)}, clip_cov_of(0.0), "mean"),
    "positive-nll": ("positive-nll", {}, lambda lp, a, old, mask: mean_of_rewarded(-lp, mask), "mean"),
    "kl-cov": ("kl-cov", {"fraction": 0.3, "coefficient": 0.7}, lambda *x: oracle.kl_cov(*x, 0.3, 0.7), "mean"),
}  # fmt: skip


def policy_run(group, device, name, reduction, backend, weights=(1.0, 0.3, 0.05)):
    objective, options, _, default = OBJECTIVES[name]
    x, labels, mask, inputs = problem()
    shard, local = shard_of(x, group, device)
    terms = [hl.PolicyGradient(objective, weights[0], **options)]
    if weights[1]:
        terms += [hl.KLToReference(weights[1], "k3", output_clamp=None), hl.Entropy(weights[2])]
    head = hl.HeadLoss(terms, reduction=reduction or default, options=hl.Options(backend=backend))
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


# an objective is PyTorch on statistics, the same ones for all of them
@pytest.mark.interpreted_only(name=("clip", "gspo", "kl-cov"))
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_objectives_with_kl_and_entropy_equal_float64(world_size, name, backend):
    compare(on_ranks(world_size, policy_run, name, None, backend), *expected(name, None))


@pytest.mark.parametrize(
    "reduction", ["sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_aggregations_equal_their_definition_by_loops(world_size, reduction, backend):
    results = on_ranks(world_size, policy_run, "clip", reduction, backend)
    compare(results, *expected("clip", reduction))
    count = 11 if reduction == "sum" else 3  # three sequences have tokens
    assert all(result[3] == count for result in results)
    policy = expected("clip", reduction, (1.0, 0.0, 0.0))[0] * (1 if reduction == "sum" else count)
    torch.testing.assert_close(results[0][2]["clip"].double(), policy, rtol=3e-6, atol=1e-7)


def test_on_the_bound_a_ratio_still_passes_its_gradient():
    log_prob = torch.tensor([0.25, -0.25], requires_grad=True)  # exp(0.25) is the bound, to the bit
    advantages, ratio = torch.tensor([1.0, -1.0]), log_prob.detach().exp()
    clip = 1 - ratio[1].item(), ratio[0].item() - 1
    loss = hl.losses.ppo_clip(
        log_prob, advantages=advantages, old_log_prob=torch.zeros(2), clip=clip
    )
    (grad,) = torch.autograd.grad(loss.sum(), log_prob)
    torch.testing.assert_close(grad, -advantages * ratio)


def test_log_probs_returns_three_differentiable_statistics(options, device):
    x, labels, *_ = (t.to(device) for t in problem()[:2])
    out = hl.log_probs(x.requires_grad_(), labels, options=options)
    stats = hl.vocab_statistics(x, labels, want=("entropy",), options=options)
    assert all(
        torch.equal(value, getattr(stats, name)) and value.requires_grad
        for name, value in out._asdict().items()
    )
    frozen = hl.log_probs(x, labels, differentiable=False, entropy=False, options=options)
    assert (
        frozen.entropy is None
        and not frozen.log_prob.requires_grad
        and torch.equal(frozen.log_prob, out.log_prob)
    )


def test_gmpo_counts_a_token_whose_advantage_is_0_as_unchanged(device):
    """verl multiplies the log-ratio by the sign of the advantage, twice."""
    x = torch.tensor([[-1.0, -2.0, -0.5]], device=device)
    old = torch.tensor([[-1.2, -1.9, -1.0]], device=device)
    advantages = torch.tensor([[2.0, 0.0, -1.0]], device=device)  # whose mean is not 0
    sequences, sign = (
        hl.Sequences.from_mask(torch.ones(1, 3, dtype=torch.bool, device=device)),
        advantages.sign(),
    )
    held = sign * torch.minimum(sign * (x - old), sign * (x - old).clamp(-0.4, 0.4))
    loss = hl.losses.gmpo(x, advantages=advantages + 0.0, old_log_prob=old, sequences=sequences)
    torch.testing.assert_close(loss, -(advantages.mean() * held.mean().exp()).expand(1, 3))
    assert held[0, 1] == 0


def test_vespo_takes_the_log_weights_of_the_rollout_with_each_batch(device):
    x, labels, mask, inputs = problem()
    names = "advantages", "old_log_prob", "generator_log_prob"
    inputs = {name: torch.where(mask, inputs[name], 0.0).to(device) for name in names}
    inputs["sequences"] = hl.Sequences.from_mask(mask.to(device))
    rollout = inputs["old_log_prob"] - inputs.pop("generator_log_prob")
    plain = hl.HeadLoss([hl.PolicyGradient("vespo")])
    weighted = hl.HeadLoss([hl.PolicyGradient("vespo", rollout_log_weight=True)])
    x, labels = x.to(device), labels.to(device)
    loss = weighted(x, labels, inputs={**inputs, "rollout_log_weight": rollout}).loss
    own = hl.log_probs(x, labels).log_prob
    keywords = {**inputs, "rollout_log_weight": rollout}
    expected = (
        torch.where(mask.to(device), hl.losses.vespo(own, **keywords), 0.0).sum() / mask.sum()
    )
    torch.testing.assert_close(loss, expected)
    assert not torch.allclose(loss, plain(x, labels, inputs=inputs).loss)
    with pytest.raises(
        ValueError, match="rollout_log_weight is an input of the objective 'vespo', got 'clip'"
    ):
        hl.PolicyGradient("clip", rollout_log_weight=True)


def test_the_log_weight_of_the_rollout_makes_vespos_ratio_that_to_the_generator():
    x, labels, mask, inputs = problem()
    sequences = hl.Sequences.from_mask(mask)
    log_prob = hl.log_probs(x, labels, differentiable=False).log_prob
    generator = inputs["old_log_prob"] - 0.3 * torch.rand(log_prob.shape)
    given = {"advantages": inputs["advantages"], "sequences": sequences}
    weighted = hl.losses.vespo(
        log_prob,
        old_log_prob=inputs["old_log_prob"],
        rollout_log_weight=inputs["old_log_prob"] - generator,
        **given,
    )
    expected = hl.losses.vespo(log_prob, old_log_prob=generator, **given)
    torch.testing.assert_close(weighted[mask], expected[mask], rtol=1e-4, atol=1e-6)


def clamped_kl(stats, reference_log_prob, weight):
    keywords = {"reference_log_prob": reference_log_prob, "input_clamp": None, "output_clamp": None}
    return (weight * hl.losses.kl_estimate(stats.log_prob, **keywords)).clamp(-10, 10)


def test_what_docs_peers_says_gives_the_peers_numbers():
    """The third row of the batch has no token: some divide by it, too."""
    x, labels, mask, inputs = problem()
    inputs = {name: torch.where(mask, value.expand(B, S), 0.0) for name, value in inputs.items()}
    log_prob = torch.where(mask, hl.log_probs(x, labels).log_prob, 0.0)
    per_token = hl.losses.ppo_clip(
        log_prob, advantages=inputs["advantages"], old_log_prob=inputs["old_log_prob"]
    )
    sums, lengths = (per_token * mask).sum(-1), mask.sum(-1)
    given = {name: inputs[name] for name in ("advantages", "old_log_prob")}
    given["sequences"] = hl.Sequences.from_mask(mask, horizon=S)

    def ours(reduction, denominator):
        head = hl.HeadLoss([hl.PolicyGradient("clip")], reduction=reduction)
        return head(x, labels, denominator=denominator, inputs=given).loss

    torch.testing.assert_close(
        ours("seq-mean-token-mean", B), (sums / lengths.clamp(min=1)).sum() / B
    )
    torch.testing.assert_close(ours("seq-mean-token-sum-norm", 1.0), sums.sum() / S)

    far, weight = inputs["reference_log_prob"] - 4.0, torch.full((B, S), 5.0)
    term = hl.Term("kl", clamped_kl, inputs=("reference_log_prob", "weight"))
    loss = hl.HeadLoss([term], reduction="sum")(
        x, labels, inputs={"reference_log_prob": far, "weight": weight}
    ).loss
    d = far - log_prob
    nemo = (weight * (d.exp() - 1 - d)).clamp(-10, 10)
    torch.testing.assert_close(loss, (nemo * mask).sum())
    assert (nemo[mask] == 10).any() and (nemo[mask] < 10).any()

    every = hl.Sequences.from_mask(torch.ones_like(mask))
    old = inputs["old_log_prob"] + 0.1
    unmasked = hl.losses.vespo(
        log_prob, advantages=inputs["advantages"], old_log_prob=old, sequences=every
    )
    given = {"advantages": inputs["advantages"], "old_log_prob": old, "sequences": every}
    head = hl.HeadLoss([hl.PolicyGradient("vespo")], reduction="sum")
    loss = head(x, labels, token_weight=mask.float(), inputs=given).loss
    torch.testing.assert_close(loss, (unmasked * mask).sum())
    given["sequences"] = hl.Sequences.from_mask(mask)
    assert not torch.allclose(loss, head(x, labels, inputs=given).loss)
