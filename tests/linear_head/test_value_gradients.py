"""Blocks of one sweep whose terms are plain statistics: no autograd, and its bits."""

import pytest
import torch
from linear_problem import H, N, V, a_teacher, small_blocks, tensors

from tp_headloss import (
    CrossEntropy,
    Distillation,
    Entropy,
    HeadLoss,
    Linear,
    Options,
    Sequences,
    Term,
    ZLoss,
)
from tp_headloss.head_loss import linear_ways
from tp_headloss.head_loss.terms import METRICS
from tp_headloss.linear_head import one_sweep

StatisticValue = type(METRICS["lse"])
TERMS = {
    "a statistic": [CrossEntropy(0.7)],
    "squares": [CrossEntropy(0.3), ZLoss(0.01), Entropy(0.1)],
    "one statistic in several terms": [
        ZLoss(0.01), Term("lse", StatisticValue("lse"), 0.2),
        Term("target", StatisticValue("target_logit", True, True), -0.7), CrossEntropy(),
    ],
    "divergences": [Distillation(0.3), CrossEntropy(), Distillation(0.2, "jsd")],
}  # fmt: skip
REDUCTIONS = {  # reduction, denominator, dtype of token weights
    "sum": ("sum", None, None), "mean": ("mean", None, None), "number": ("mean", 17.3, torch.float32),
    "tensor": ("mean", torch.tensor(13.7), None), "double": ("mean", None, torch.float64),
    "half": ("mean", None, torch.bfloat16), "nothing": ("mean", 0.0, None),
    "sequences": ("seq-mean-token-mean", None, torch.float32),
}  # fmt: skip


def step(terms, how, backend, device="cpu"):
    """Loss, dH and dW of one sweep over three blocks, with some weights of 0 and one bad label."""
    reduction, denominator, weight_dtype = REDUCTIONS[how]
    hidden, weight, _, labels, weights = (x.to(device) for x in tensors())
    n, v = (40, 72) if backend == "triton" else (N, V)
    labels = (labels % v).masked_fill(labels == -100, -100)[:n]
    operands = [x.clone().requires_grad_() for x in (hidden[:n].view(4, -1, H), weight[:v])]
    inputs = (
        {"teacher": a_teacher("logits", device, n, v)} if any(term.inputs for term in terms) else {}
    )
    if inputs:
        fields = {
            k: x.view(4, -1, *x.shape[1:])
            for k, x in vars(inputs["teacher"]).items()
            if torch.is_tensor(x)
        }
        inputs["teacher"] = type(inputs["teacher"])(**{**vars(inputs["teacher"]), **fields})
    if how == "sequences":
        inputs["sequences"] = Sequences.from_mask((labels != -100).view(4, -1))
    if weight_dtype is not None:
        weights = (
            weights[:n]
            .to(weight_dtype)
            .index_fill(0, torch.tensor([1, 20], device=device), 0)
            .view(4, -1)
        )
    if isinstance(denominator, torch.Tensor):
        denominator = denominator.to(device)
    with small_blocks():
        out = HeadLoss(terms, reduction=reduction, metrics=("accuracy",), options=Options(backend=backend)).linear(
            *operands, labels.view(4, -1), inputs=inputs, denominator=denominator,
            token_weight=None if weight_dtype is None else weights,
            linear=Linear(mode="one_sweep", budget=16 * 256 * 4, upstream=3.7),
        )  # fmt: skip
        return out.loss.detach(), *torch.autograd.grad(3.7 * out.loss, operands)


@pytest.mark.parametrize("name", TERMS)
def test_gradients_have_the_bits_of_autograd(name, backend, device, monkeypatch):
    ways = list(REDUCTIONS) if backend == "torch" else ["half"]
    ours = {how: step(TERMS[name], how, backend, device) for how in ways}
    monkeypatch.setattr(linear_ways, "value_gradients", lambda *_: None)
    for how, found in ours.items():
        assert all(
            torch.equal(a, b) for a, b in zip(found, step(TERMS[name], how, backend, device))
        ), how
        assert found[1].any() == (how != "nothing")


def test_autograd_is_for_terms_that_are_more_than_statistics(monkeypatch):
    def refused(*_):
        raise AssertionError("autograd")

    monkeypatch.setattr(one_sweep, "loss_gradients", refused)
    for terms in TERMS.values():
        step(terms, "mean", "torch")
    metric = Term("hits", StatisticValue("hits"))
    for terms in (
        [CrossEntropy(label_smoothing=0.1)],
        [ZLoss(torch.tensor(0.1))],
        [metric, CrossEntropy()],
    ):
        with pytest.raises(AssertionError, match="autograd"):
            step(terms, "mean", "torch")
