"""verl's functions, values and gradients, against float64 log_softmax of the gathered logits."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from trainer_problem import (
    DTYPES,
    EVEN,
    PADDED,
    UNEVEN,
    WEIGHTS,
    B,
    S,
    V,
    close,
    close_grads,
    cut,
    data,
    dtype_name,
    head,
    truth,
)

from tp_headloss import Linear, VocabShard
from tp_headloss.integrations import sampling_masks, verl


def processed(group, device, dtype, boundaries):
    logits, label = data(dtype)
    temperature = torch.linspace(0.5, 2.0, B * S).view(B, S)
    label[0, 1], temperature[1, 2] = -100, 0.0
    x, label, temperature = (
        cut(logits, group, boundaries).to(device),
        label.to(device),
        temperature.to(device),
    )
    x, before = x.detach().requires_grad_(), x.detach().clone()
    bounds = [0, PADDED] if group is None else boundaries
    given = {"padded_size": PADDED} if boundaries == EVEN else {"boundaries": bounds}
    process = verl.logits_processor(group, V, **given, sum_pi_squared=True)
    out = process(x, label=label, temperature=temperature)
    upstream = WEIGHTS.clone().to(device)
    upstream[:, 1, 2] = 0  # the row of padding
    squares = upstream.sum(0) * out["sum_pi_squared"]
    (upstream[0] * out["log_probs"] + upstream[1] * out["entropy"] + squares).sum().backward()
    assert torch.equal(x.detach(), before) and float(temperature[1, 2]) == 0
    return {name: value.detach() for name, value in out.items()} | {"grad": x.grad}


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("ranks", "boundaries"), [(1, EVEN), (2, EVEN), (2, UNEVEN)])
def test_verl_logits_processor(ranks, boundaries, dtype):
    results = on_ranks(ranks, processed, dtype, boundaries)
    logits, label = data(dtype)
    temperature = torch.linspace(0.5, 2.0, B * S, dtype=torch.float32).view(B, S).double()
    used = torch.ones(B, S, dtype=torch.bool)
    used[0, 1] = used[1, 2] = False  # ignored; padding
    log_prob, entropy, squares, leaf = truth(logits, label, temperature.unsqueeze(-1))
    (
        (WEIGHTS[0] * log_prob + WEIGHTS[1] * entropy + WEIGHTS.sum(0) * squares) * used
    ).sum().backward()
    for out in results:
        assert all(
            out[name].dtype == torch.float32 for name in ("log_probs", "entropy", "sum_pi_squared")
        )
        close(out["log_probs"].cpu()[used], log_prob[used])
        close(out["entropy"].cpu()[used], entropy[used])
        close(out["sum_pi_squared"].cpu()[used], squares[used])
        assert float(out["log_probs"][0, 1]) == float(out["entropy"][0, 1]) == 0  # -100
        assert torch.equal(out["log_probs"], results[0]["log_probs"])
        assert out["log_probs"].isfinite().all()
    close_grads([out["grad"] for out in results], leaf.grad, dtype)


def test_verl_label_mask_temperature_and_what_is_wanted():
    logits, label = data()
    mask = torch.rand(B, S) < 0.5
    # verl leaves position ids there, beyond a small vocabulary, too
    label = torch.where(mask, label, 10 * V)
    x = logits[..., :V].clone().requires_grad_()
    out = verl.logits_processor(None, V, temperature=0.7)(x, label=label, label_mask=mask)
    log_prob, entropy, _, _ = truth(logits, label, 0.7)
    close(out["log_probs"], log_prob * mask)
    close(out["entropy"], entropy * mask)
    sum(out.values()).sum().backward()
    assert (x.grad[~mask] == 0).all() and (x.grad[mask] != 0).any()

    process = verl.logits_processor(None, V, entropy=False, temperature=0.7)
    assert list(process(x, label, label_mask=mask)) == ["log_probs"]
    # the call's wins
    close(process(x, label, 1.3, mask)["log_probs"], truth(logits, label, 1.3)[0] * mask)
    # without a mask they are bad labels
    assert not process(x, label)["log_probs"][~mask].isfinite().any()
    for wrong in (mask[0], mask[:, :1]):
        with pytest.raises(
            ValueError, match=r"label_mask must have shape \[2, 6\] to fit label, got"
        ):
            process(x, label, label_mask=wrong)
    with pytest.raises(ValueError, match="padded_size=104"):
        verl.logits_processor(None, V, padded_size=PADDED, boundaries=[0, PADDED])


def fused(group, device, reduction, hidden_grad, boundaries):
    (hidden, weight), (_, labels) = head(), data()
    labels[0, 1] = -100
    hidden = hidden.to(device).requires_grad_()
    rows = cut(weight, group, boundaries or EVEN, 0).detach().to(device).requires_grad_()
    if boundaries is None:  # verl's own signature: even shards, every row counts
        options = (0.7, reduction, group)
        shard = {}
    else:
        shard = {
            "shard": VocabShard.from_boundaries(
                [0, PADDED] if group is None else boundaries, V, group
            )
        }
        options = (torch.full((B, S), 0.7, device=device), reduction)
    if hidden_grad is not None:
        shard["linear"] = Linear(hidden_grad=hidden_grad)
    log_probs, entropy = verl.linear_cross_entropy(
        hidden, rows, labels.to(device), *options, **shard
    )
    upstream = WEIGHTS.view(2, -1).to(device)
    ((upstream[0] if reduction == "none" else 1) * log_probs).sum().add(
        (upstream[1] * entropy).sum()
    ).backward()
    return log_probs.detach(), entropy.detach(), hidden.grad, rows.grad


@pytest.mark.parametrize(
    ("ranks", "reduction", "hidden_grad", "boundaries"),
    [
        (1, "none", None, None),
        (2, "none", None, None),
        (2, "sum", "all_reduce", None),
        (2, "mean", None, UNEVEN),
        (1, "mean", None, UNEVEN),
    ],
)
def test_verl_linear_cross_entropy(ranks, reduction, hidden_grad, boundaries):
    results = on_ranks(ranks, fused, reduction, hidden_grad, boundaries)
    (hidden, weight), (_, labels) = head(), data()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_prob, entropy, _, leaf = truth(
        hidden.detach() @ weight.detach().t(), labels, 0.7, V if boundaries else PADDED
    )
    used = torch.ones(B, S)
    used[0, 1] = 0
    log_prob, entropy = log_prob * used, entropy * used
    reduced = {
        "none": log_prob.flatten(),
        "sum": log_prob.sum(),
        "mean": log_prob.sum() / used.sum(),
    }[reduction]
    loss = (WEIGHTS[0].flatten() * reduced).sum() if reduction == "none" else reduced
    (loss + (WEIGHTS[1] * entropy).sum()).backward()
    of_hidden, of_weight = (
        leaf.grad @ weight.detach(),
        leaf.grad.flatten(0, 1).t() @ hidden.detach().flatten(0, 1),
    )
    for got, of_entropy, _, _ in results:
        assert got.dtype == torch.float32 and got.shape == reduced.shape
        close(got, reduced, rtol=1e-5, atol=1e-5)
        close(of_entropy, entropy.flatten(), atol=1e-5)
    parts = [result[2].double().cpu() for result in results]
    if hidden_grad == "all_reduce":
        assert all(torch.equal(part, parts[0]) for part in parts)
        close(parts[0], of_hidden, atol=1e-5)
    else:  # each rank has its part, and the caller adds them up
        close(sum(parts), of_hidden, atol=1e-5)
        assert ranks == 1 or not torch.allclose(parts[0], of_hidden, atol=1e-3)
    close(torch.cat([result[3].cpu() for result in results]), of_weight, atol=1e-5)


def test_verl_linear_cross_entropy_refuses_what_it_would_ignore():
    hidden, weight = head()
    labels = data()[1]
    shard, other = VocabShard(0, PADDED, V), dist.ProcessGroup(0, 1)
    with pytest.raises(ValueError, match="dist_process_group"):
        verl.linear_cross_entropy(hidden, weight, labels, 1.0, "none", other, shard=shard)
    rows, turned = hidden.flatten(0, -2)[:6].view(2, 3, -1), labels.flatten()[:6].view(3, 2)
    with pytest.raises(
        ValueError, match=r"labels must be of tokens \[2, 3\], or these flat, got \[3, 2\]"
    ):
        verl.linear_cross_entropy(rows, weight, turned)
    with pytest.raises(
        ValueError, match=r"temperature must be of tokens \[2, 3\], or these flat, got \[3, 2\]"
    ):
        verl.linear_cross_entropy(rows, weight, turned.view(2, 3), torch.ones(3, 2))
    per_row = torch.tensor([0.5, 2.0])
    with pytest.raises(ValueError, match=r"got \[2\]: pass its \[:, None\]\.expand\(2, 3\)"):
        verl.linear_cross_entropy(rows, weight, turned.view(2, 3), per_row)
    with pytest.raises(ValueError, match=r"labels must be of tokens \[2, 3\], .*, got \[3\]$"):
        verl.linear_cross_entropy(rows, weight, turned.view(6)[:3])
    found, expected = (verl.linear_cross_entropy(rows[:1], weight, y, t)[0] for y, t in (
        (turned.view(1, 6)[:, :3], torch.ones(3)), (turned.view(6)[:3], 1.0)))  # fmt: skip
    assert torch.equal(found, expected)


def test_a_temperature_that_is_not_positive_is_verls_lowest():
    logits, labels = torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([0])
    for temperature in (0, 0.0, torch.zeros(1)):
        assert (
            float(verl.logits_processor(None, 3)(logits, labels, temperature)["log_probs"]) == 0.0
        )


def over_sets(group, device, linear):
    """log-probs and entropy over sets, and their gradient, from logits or from hidden states."""
    (logits, label), (hidden, weight) = data(), head()
    label[0, 1] = -100
    lists = [
        sorted({int(y.clamp(min=0)), (7 * i) % V, (11 * i) % V})
        for i, y in enumerate(label.flatten())
    ]
    sets = sampling_masks.from_vllm([lists[:4], lists[4:]]).to(device)
    assert sets.spans.shape == (B * S, 2)
    label, temperature = label.to(device), torch.linspace(0.5, 2.0, B * S).view(B, S)
    if linear:
        x = hidden.to(device).requires_grad_()
        rows = cut(weight, group, EVEN, 0).detach().to(device)
        out = verl.linear_cross_entropy(
            x, rows, label, temperature.to(device), shard=VocabShard.from_group(group, V, PADDED), sets=sets,
            linear=Linear(hidden_grad="all_reduce"),
        )  # fmt: skip
        logits = hidden.double() @ weight.double().t()
    else:
        x = cut(logits, group).detach().to(device).requires_grad_()
        process = verl.logits_processor(group, V, padded_size=PADDED, sum_pi_squared=True)
        found = process(x, label=label, temperature=temperature.to(device), sets=sets)
        out = found["log_probs"].flatten(), found["entropy"].flatten()
        _, _, squares, _ = truth(logits, label.cpu(), temperature.unsqueeze(-1))
        close(found["sum_pi_squared"][1], squares[1])
    (
        out[0] * WEIGHTS[0].flatten().to(device) + out[1] * WEIGHTS[1].flatten().to(device)
    ).sum().backward()
    kept = torch.full((B * S, V), -torch.inf).double()
    for row, ids in zip(kept, lists, strict=True):
        row[ids] = 0.0
    leaf = logits.double().detach().requires_grad_()
    z = (leaf / temperature.unsqueeze(-1))[..., :V].flatten(0, 1)
    log_p = (z + kept).log_softmax(-1)
    entropy = -torch.where(kept == 0, log_p.exp() * log_p.masked_fill(kept < 0, 0.0), 0.0).sum(-1)
    used = label.cpu().flatten() != -100
    expected = (
        log_p.gather(-1, label.cpu().clamp(min=0).view(-1, 1))[:, 0].masked_fill(~used, 0.0),
        entropy * used,
    )
    (expected[0] * WEIGHTS[0].flatten() + expected[1] * WEIGHTS[1].flatten()).sum().backward()
    gradient = leaf.grad @ weight.double() if linear else leaf.grad
    return [x.detach() for x in out], x.grad, [x.detach() for x in expected], gradient


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_verl_over_the_sets_of_a_rollout(ranks, linear):
    results = on_ranks(ranks, over_sets, linear)
    for (log_probs, entropy), grad, expected, gradient in results:
        close(log_probs, expected[0], atol=1e-5)
        close(entropy, expected[1], atol=1e-5)
        if linear:
            close(grad, gradient, rtol=1e-5, atol=1e-5)
    if not linear:
        close_grads([grad for _, grad, *_ in results], results[0][3], torch.float32)
