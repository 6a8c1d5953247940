"""Losses, reductions and HeadLoss against torch in float64, unsharded and sharded."""

import pytest
import torch
import torch.nn.functional as F
from loss_problem import V, rows
from ranks import on_ranks

import tp_headloss as hl

TSALLIS = hl.Term("tsallis", lambda stats: 1 - (2 * stats.log_prob).exp(), weight=0.3)
EVERYTHING = [hl.CrossEntropy(0.9, label_smoothing=0.1), hl.ZLoss(1e-2), hl.Entropy(0.05), TSALLIS]
METRICS = ("accuracy", "entropy", "log_prob", "lse")


def mean_of_everything(x, labels, *_):
    """The loss, and what is reported of it."""
    nll, valid = F.cross_entropy(x, labels, reduction="none"), labels >= 0
    log_p, lse = x.log_softmax(-1), x.logsumexp(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    smooth = F.cross_entropy(x, labels, label_smoothing=0.1, reduction="none")
    per_token = {
        "cross_entropy": smooth,
        "z_loss": lse**2,
        "entropy": -entropy,
        "tsallis": 1 - (-2 * nll).exp(),
    }
    sums = {name: values[valid].sum() for name, values in per_token.items()}
    facts = {f"term {name}": total for name, total in sums.items()}
    facts |= {"accuracy": (x.argmax(-1) == labels)[valid].sum(), "entropy": entropy[valid].sum(),
              "log_prob": -nll.sum(), "lse": lse[valid].sum()}  # fmt: skip
    return sum(
        w * total for w, total in zip((0.9, 1e-2, 0.05, 0.3), sums.values())
    ) / valid.sum(), facts


def sum_of(x, labels):
    return F.cross_entropy(x, labels, reduction="sum")


# name -> terms of (class weights), settings of the head, arguments of the call (None: the token
# weights), definition of (logits, labels, class weights, token weights); others are in
# tests/promises/test_generated.py
KINDS = {
    "mean": (None, {}, {}, lambda x, y, c, t: F.cross_entropy(x, y)),
    "denominator": (None, {}, {"denominator": torch.tensor(37.0)}, lambda x, y, c, t: sum_of(x, y) / 37),
    "class weights and smoothing": (lambda c: hl.CrossEntropy(class_weight=c, label_smoothing=0.2), {}, {},
                                    lambda x, y, c, t: F.cross_entropy(x, y, weight=c, label_smoothing=0.2)),
    "token weights": (None, {}, {"token_weight": None},
                      lambda x, y, c, t: (t * F.cross_entropy(x, y, reduction="none")).sum() / t[y >= 0].sum()),
    "everything": (lambda c: EVERYTHING, {"metrics": METRICS}, {}, mean_of_everything),
}  # fmt: skip


def head_run(group, device, kind, backend):
    x, labels, class_weight, token_weight = rows()
    shard = hl.VocabShard.from_group(group, V, 128)
    local = (
        F.pad(x, (0, 28), value=50.0)[:, shard.start : shard.stop]
        .clone()
        .to(device)
        .requires_grad_()
    )
    terms, settings, call, _ = KINDS[kind]
    terms = [hl.CrossEntropy()] if terms is None else terms(class_weight.to(device))
    call = {name: token_weight if value is None else value for name, value in call.items()}
    call = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in call.items()
    }
    head = hl.HeadLoss(terms, options=hl.Options(backend=backend), **settings)
    out = head(local, labels.to(device), shard=shard, **call)
    out.loss.backward(torch.tensor(0.37, device=device))
    facts = {**{f"term {k}": v for k, v in out.terms.items()}, **out.metrics}
    return out.loss.detach(), out.count, local.grad, {k: v.detach() for k, v in facts.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_losses_and_reductions_equal_torch_at_every_group_size(world_size, kind, backend):
    results = on_ranks(world_size, head_run, kind, backend)
    x, labels, class_weight, token_weight = rows(torch.float64)
    loss = KINDS[kind][-1](x.requires_grad_(), labels, class_weight.double(), token_weight.double())
    facts = {} if kind.startswith(("class", "token")) else {"term cross_entropy": sum_of(x, labels)}
    loss, facts = loss if isinstance(loss, tuple) else (loss, facts)
    (grad,) = torch.autograd.grad(loss, x, torch.tensor(0.37).double())
    count = token_weight[labels >= 0].sum() if kind == "token weights" else (labels >= 0).sum()
    for ours, our_count, _, our_facts in results:
        assert torch.equal(ours, results[0][0])
        torch.testing.assert_close(ours.double(), loss.detach(), rtol=2e-6, atol=1e-7)
        torch.testing.assert_close(our_count.double(), count.double(), rtol=1e-6, atol=0)
        for name, value in facts.items():
            torch.testing.assert_close(
                our_facts[name].double(), value.detach().double(), rtol=3e-6, atol=1e-5
            )
    got = torch.cat([r[2] for r in results], 1)
    torch.testing.assert_close(got[:, :V].double(), grad, rtol=3e-5, atol=1e-8)
    assert grad.abs().max() > 1e-3 and not got[:, V:].any()


def test_causal_lm_loss_shifts_the_labels_itself():
    x = torch.randn(3, 8, V, requires_grad=True)
    labels = torch.randint(0, V, (3, 8))
    labels[1, :4] = -100
    out = hl.CausalLMLoss(hl.HeadLoss([hl.CrossEntropy()], metrics=("accuracy",)))(x, labels)
    expected = F.cross_entropy(x[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))
    torch.testing.assert_close(out.loss, expected)
    assert out.count == (labels[:, 1:] != -100).sum()
    (grad,) = torch.autograd.grad(out.loss, x)
    assert not grad[:, -1].any()
    weight = torch.rand(3, 8)  # of the labels, shifted with them
    out = hl.CausalLMLoss()(x, labels, token_weight=weight)
    per_label = F.cross_entropy(x[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    counted = weight[:, 1:] * (labels[:, 1:] != -100)
    torch.testing.assert_close(out.loss, (per_label * counted).sum() / counted.sum())
    torch.testing.assert_close(grad, torch.autograd.grad(expected, x)[0])
    count = torch.randint(1, 9, (3, 8))  # bytes of the labels
    found = hl.CausalLMLoss(hl.HeadLoss(metrics=hl.BitsPerByte()))(
        x, labels, inputs={"num_bytes": count}
    ).means()
    scored = labels[:, 1:] != -100
    bits = (per_label * scored).sum() / torch.log(torch.tensor(2.0)) / (count[:, 1:] * scored).sum()
    torch.testing.assert_close(found["bits_per_byte"].float(), bits)


@pytest.mark.parametrize("shape", [(2, 6), (1, 6), (6,)])
def test_inputs_over_positions_are_refused_by_the_shifted_loss(shape):
    loss = hl.CausalLMLoss(hl.HeadLoss([hl.PolicyGradient("reinforce")]))
    with pytest.raises(ValueError, match="inputs per token must be 'num_bytes'"):
        loss(
            torch.randn(2, 6, V),
            torch.zeros(2, 6, dtype=torch.int64),
            inputs={"advantages": torch.ones(shape)},
        )


@pytest.mark.parametrize("size", [3, 6])  # the second as many ids as positions
def test_inputs_with_dimensions_besides_positions_stay_where_they_are(size):
    x, labels, ids = (
        torch.randn(2, 6, V),
        torch.zeros(2, 6, dtype=torch.int64),
        torch.randint(V, (2, 6, size)),
    )
    term = hl.Term("own", lambda stats: stats.log_probs_at.sum(-1), want=("log_probs_at",))
    loss = hl.CausalLMLoss(hl.HeadLoss([term], reduction="sum"))(
        x, labels, inputs={"ids": ids}
    ).loss
    torch.testing.assert_close(loss, x.log_softmax(-1).gather(2, ids)[:, :-1].sum())
    # of a sequence, whatever the length
    one = hl.CausalLMLoss(hl.HeadLoss([hl.PolicyGradient("reinforce")]))
    for length in (1, 6):
        assert one(
            x[:, :length], labels[:, :length], inputs={"advantages": torch.ones(2, 1)}
        ).loss.isfinite()


@pytest.mark.parametrize("sequences", [False, True])
def test_int32_labels_go_with_any_ignore_index(sequences, device):
    """Tokens that a weight or a mask takes out get it, and int32 does not hold it."""
    x, labels = (
        torch.randn(2, 3, V, device=device),
        torch.randint(0, V, (2, 3), dtype=torch.int32, device=device),
    )
    mask = torch.tensor([[True, False, True], [True, True, False]], device=device)
    taken = (
        {"inputs": {"sequences": hl.Sequences.from_mask(mask)}}
        if sequences
        else {"token_weight": mask.float()}
    )
    loss = hl.HeadLoss(ignore_index=1 << 40)(x, labels, **taken).loss
    expected = F.cross_entropy(x[mask], labels[mask].long())
    torch.testing.assert_close(loss, expected)
    labels, ignored = labels.view(1, 6), 1 << 40  # neither do the labels that have no next token
    rows_of_depths, _ = hl.multi_token_targets(labels, 2, ignore_index=ignored)
    assert rows_of_depths[2, 0].tolist() == [*labels[0, 2:].tolist(), ignored, ignored]
    loss = hl.CausalLMLoss(hl.HeadLoss(ignore_index=ignored))(x.view(1, 6, V), labels).loss
    torch.testing.assert_close(loss, F.cross_entropy(x.view(6, V)[:-1], labels[0, 1:].long()))
