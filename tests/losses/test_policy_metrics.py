"""Metrics of policies and generators against loops over sequences and tokens."""

from math import inf

import pytest
import torch
from policy_problem import B, S, needed, problem, shard_of
from ranks import on_ranks

from tp_headloss import (
    GeneratorMetrics,
    HeadLoss,
    Metric,
    Options,
    PolicyGradient,
    PolicyMetrics,
    Sequences,
    log_probs,
)
from tp_headloss.head_loss.token_sums import metric_sums


def test_extremes_leave_out_tokens_of_weight_0():
    values = {
        "max_a": torch.tensor([5.0, 1.0, 2.0, 9.0]),
        "min_a": torch.tensor([-5.0, 1.0, 2.0, -9.0]),
    }
    valid, weight = torch.tensor([True, True, True, False]), torch.tensor([0.0, 1.0, -2.0, 1.0])
    assert metric_sums(values, valid, weight) == {"max_a": 2.0, "min_a": 1.0}
    assert metric_sums(values, valid, None) == {"max_a": 5.0, "min_a": -5.0}
    none = {name: torch.zeros(0, 3) for name in ("max_a", "min_a", "a")}
    assert metric_sums(none, torch.ones(0, 3, dtype=torch.bool), None) == {
        "max_a": -inf,
        "min_a": inf,
        "a": 0.0,
    }


def test_metrics_of_one_name_are_refused():
    x, labels, mask, inputs = problem()
    head = HeadLoss(
        [PolicyGradient("clip")], metrics=(PolicyMetrics(), PolicyMetrics(level="sequence"))
    )
    with pytest.raises(ValueError, match=r"distinct names, got \['advantage', "):
        head(x, labels, inputs=needed(head, inputs, mask, "cpu"))
    head = HeadLoss(metrics=("entropy", Metric(lambda stats: {"entropy": stats.lse})))
    for given in ({}, {"sequences": Sequences.from_mask(mask)}):
        with pytest.raises(ValueError, match=r"distinct names, got \['entropy'\]"):
            head(x, labels, inputs=given)


def metrics_run(group, device, weight, backend):
    x, labels, mask, inputs = problem()
    shard, local = shard_of(x, group, device)
    head = HeadLoss(
        [PolicyGradient("clip")],
        metrics=(
            "entropy",
            "accuracy",
            PolicyMetrics((0.2, 0.3), 1.6, reference=True),
            GeneratorMetrics(),
        ),
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
                torch.testing.assert_close(
                    got[name].double(), value, rtol=1e-5, atol=1e-5, msg=name
                )
                assert value != 0, name


def test_sequence_level_metrics_are_of_the_sequences_ratio():
    x, labels, mask, inputs = problem()
    head = HeadLoss([PolicyGradient("gspo")], metrics=(PolicyMetrics(level="sequence"),))
    out = head(x, labels, inputs=needed(head, inputs, mask, "cpu"))
    new = log_probs(x, labels).log_prob
    want = sum(
        (new - inputs["old_log_prob"])[i][mask[i]].mean().exp() for i in range(B) if mask[i].any()
    )
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
