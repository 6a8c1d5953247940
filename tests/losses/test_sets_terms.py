"""Losses over what a sampler kept: from logits and from hidden states, in every mode, and what is
refused."""

import pytest
import torch
import torch.nn.functional as F
from collectives import counted_collectives
from ranks import on_ranks
from sets_problem import NAMES, N, V, masked, padded, ragged, rows

import tp_headloss as hl

H = 12
INPUTS = ("advantages", "old_log_prob", "reference_log_prob", "generator_log_prob")
METRICS = (
    hl.PolicyMetrics(reference=True, over="sets"),
    hl.GeneratorMetrics(over="sets"),
    "set_log_mass",
)


def terms(over="sets"):
    policy = hl.PolicyGradient("clip", clip=(0.2, 0.28), over=over)
    return [policy, hl.KLToReference(0.1, "k2", over=over), hl.Entropy(0.05, over)]


def tensors():
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (
        torch.randn(N, H, generator=generator),
        torch.randn(V, H, generator=generator) / 2,
    )
    _, labels, sets = rows()
    return hidden, weight, labels, sets, dict(zip(INPUTS, -torch.rand(4, N, generator=generator)))


def run(group, device, backend, mode, form=ragged):
    hidden, weight, labels, sets, inputs = (
        {k: v.to(device) for k, v in x.items()}
        if isinstance(x, dict)
        else x.to(device)
        if hasattr(x, "to")
        else x
        for x in tensors()
    )
    shard = hl.VocabShard.from_group(group, V, 256)
    local = F.pad(weight, (0, 0, 0, 56))[shard.start : shard.stop].clone().requires_grad_()
    hidden = hidden.requires_grad_()
    given = {"shard": shard, "inputs": inputs | {"sets": form(sets).to(device)}, "denominator": 7.0}
    head = hl.HeadLoss(
        terms(), metrics=METRICS, options=hl.Options(backend=backend, check=mode == "check")
    )
    with counted_collectives() as events:
        if mode in ("logits", "check"):
            out = head(hidden @ local.t(), labels, **given)
        else:
            out = head.linear(hidden, local, labels, linear=MODES[mode], **given)
    forward = sum(events.values())
    out.loss.backward()
    metrics = {name: value.detach().cpu() for name, value in out.metrics.items()}
    return out.loss.detach().cpu(), hidden.grad.cpu(), local.grad.cpu(), metrics, forward


MODES = {
    "recompute": hl.Linear(mode="recompute"), "exact logits": hl.Linear(mode="recompute", exact_logits=True),
    "one sweep": hl.Linear(mode="one_sweep"), "small blocks": hl.Linear(mode="one_sweep", budget=1 << 18),
    "valid tokens": hl.Linear(mode="recompute", max_valid_tokens=N),
}  # fmt: skip


def expected():
    """The same terms over the vocabulary, of float64 logits that are -inf outside of the sets."""
    hidden, weight, labels, sets, inputs = tensors()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    head = hl.HeadLoss(terms("vocabulary"), options=hl.Options(backend="torch"))
    del inputs["generator_log_prob"]
    loss = head(masked(hidden @ weight.t(), sets), labels, inputs=inputs, denominator=7.0).loss
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


def check(results, whole_hidden=True):
    loss, hidden, weight = expected()
    for got, hidden_grad, _, metrics, forward in results:
        torch.testing.assert_close(got.double(), loss, rtol=1e-5, atol=1e-6)
        assert torch.equal(got, results[0][0])
        assert all(torch.equal(value, results[0][3][name]) for name, value in metrics.items())
        if whole_hidden:
            torch.testing.assert_close(hidden_grad.double(), hidden, rtol=1e-4, atol=1e-5)
        if len(results) > 1:
            assert forward == 1
    got = torch.cat([weight_grad for _, _, weight_grad, *_ in results])
    torch.testing.assert_close(got[:V].double(), weight, rtol=1e-4, atol=1e-5)
    assert not got[V:].any() and results[0][3]["set_log_mass"] < 0


@pytest.mark.parametrize("mode", ["logits", *MODES])
def test_a_loss_over_sets_equals_that_of_masked_logits(mode, backend, device):
    if backend == "triton" and mode in ("float32 logits", "small blocks"):
        mode = "one sweep"  # interpreted kernels are slow; the blocks are the same
    check([run(None, device, backend, mode)])


@pytest.mark.parametrize("mode", ["logits", "recompute", "valid tokens"])
def test_one_collective_whatever_the_number_of_ranks(mode):
    check(on_ranks(2, run, "torch", mode, padded), whole_hidden=mode != "logits")


@pytest.mark.parametrize("form", [padded, ragged])
def test_check_names_the_first_token_whose_set_lacks_its_label(form, backend, device):
    hidden, weight, labels, sets, _ = tensors()
    del sets[2][-2:]
    x = (hidden @ weight.t()).to(device)
    options = hl.Options(backend=backend, check=True)
    want = {"want": ("set_log_prob",), "options": options}
    hl.vocab_statistics(x, labels.to(device), sets=form(sets).to(device), **want)
    sets[5].remove(int(labels[5]))
    sets[7] = [int(labels[7]), V]
    message = rf"set of token 5 \(flat index\) must hold ids below 200 and its label {labels[5]}, got .*; 2 such tokens"
    with pytest.raises(ValueError, match=message):
        hl.vocab_statistics(x, labels.to(device), sets=form(sets).to(device), **want)


def test_what_does_not_go_together_is_refused(device):
    """What tests/helpers/odd_inputs.py has not."""
    hidden, weight, labels, sets, _ = (x.to(device) if hasattr(x, "to") else x for x in tensors())
    x, kept = hidden @ weight.t(), ragged(sets).to(device)
    for match, arguments in {
        "set_log_prob is the log-prob of a label": {"sets": kept, "labels": None},
        r"sets must be of tokens \[9\], or these flat, got \[3, 3\]": {
            "sets": hl.IdSets.stack([kept[:3], kept[3:6], kept[6:]])
        },
        r"got SamplingRule: pass kept_ids\(logits, rule, ..\)": {"sets": hl.SamplingRule(top_k=2)},
    }.items():
        with pytest.raises((TypeError, ValueError), match=match):
            hl.vocab_statistics(x, **{"labels": labels, "want": NAMES} | arguments)
    turned = hl.IdSets.stack([kept[:3], kept[3:6]])  # of tokens [2, 3]
    with pytest.raises(
        ValueError, match=r"sets must be of tokens \[3, 2\], or these flat, got \[2, 3\]"
    ):
        rows, few = hidden[:6].view(3, 2, -1), hl.Linear(max_valid_tokens=4)
        hl.linear_vocab_statistics(
            rows, weight, labels[:6].view(3, 2), want=NAMES, sets=turned, linear=few
        )
    with pytest.raises(ValueError, match=r"missing \['sets'\]"):
        hl.HeadLoss([hl.Entropy(0.1, over="sets")])(x, labels)
