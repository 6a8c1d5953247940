"""Errors of gradients in fp8 on hidden states of a model that has learned something, which it makes
itself."""

import sys

import pytest
import torch
import torch.nn.functional as F
from launcher import ROOT

from tp_headloss import HeadLoss, Linear

ENTROPIES = 3.0, 1.0, 0.3  # nats
WAYS = {
    "bf16": Linear("one_sweep"),
    "fp8": Linear(gradients="fp8"),
    "exact": Linear(gradients="fp8", exact_logits=True),
}


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """Entropy -> what `trained_states.py` keeps there."""
    sys.path.insert(0, str(ROOT / "scripts/bench"))
    import trained_states

    folder = tmp_path_factory.mktemp("states")
    small = ["--hidden", 512, "--ids", 4096, "--tokens", 4096, "--megabytes", 1, "--lr", 1e-3]
    trained_states.main(
        [*map(str, small), "--entropies", *map(str, ENTROPIES), "--out", str(folder)]
    )
    return {entropy: torch.load(folder / f"{entropy}.pt") for entropy in ENTROPIES}


def in_float64(hidden, weight, labels, logits):
    """dH and dW from logits."""
    p = logits.double().softmax(1)
    d = (p - F.one_hot(labels, len(weight))) / len(labels)
    return d @ weight.double(), d.t() @ hidden.double()


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.cuda  # some 2,000 steps of training
@pytest.mark.parametrize("entropy", ENTROPIES)
def test_errors_on_what_a_model_has_learned(entropy, states, device):
    """Of bf16 logits dH, and dW of labels, are as exact as by products in bf16; of unrounded logits
    they are far more exact than anything that rounds them; dW of other ids is right on the
    average."""
    hidden, weight, labels = (
        states[entropy][name].to(device) for name in ("hidden", "weight", "labels")
    )
    exact_logits = hidden.float() @ weight.float().t()
    rounded = in_float64(hidden, weight, labels, exact_logits.bfloat16())
    exact = in_float64(hidden, weight, labels, exact_logits)
    hidden.requires_grad_()
    weight.requires_grad_()
    errors, others = {}, {}
    is_label = torch.zeros(len(weight), dtype=torch.bool, device=device)
    is_label[labels] = True
    for name, linear in WAYS.items():
        hidden.grad = weight.grad = None
        HeadLoss().linear(hidden, weight, labels, linear=linear).loss.backward()
        of_hidden, of_weight = exact if name == "exact" else rounded
        of_labels = weight.grad[is_label], of_weight[is_label]
        errors[name] = [error(hidden.grad, of_hidden), error(*of_labels)]
        found, expected = weight.grad[~is_label].double(), of_weight[~is_label]
        others[name] = ((found * expected).sum() / (expected**2).sum()).item()
    for of_fp8, of_bf16 in zip(errors["fp8"], errors["bf16"]):
        assert of_fp8 < 1.6 * of_bf16
    by_rounding = error(rounded[0], exact[0])
    assert max(errors["exact"]) < 3e-3 and errors["exact"][0] < by_rounding
    assert abs(others["fp8"] - 1) < 1e-2
