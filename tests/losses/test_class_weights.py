"""Class weights of one cross-entropy are token weights of the loss, by label; metrics and the count
of tokens know nothing of them."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import tp_headloss as hl

N, V = 12, 9
IGNORED = -100


def batch(seed):
    """Logits [3, 4, V] and labels [3, 4], some ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(3, N // 3, V, generator=generator)
    labels = torch.randint(V, (3, N // 3), generator=generator)
    labels[0, :2] = IGNORED
    return logits, labels


def by_torch(logits, labels, classes, tokens, reduction, denominator):
    """The loss in float64: its sum, the sum of the labels' weights, and what it is divided to."""
    flat, labels = logits.double().flatten(0, 1), labels.flatten()
    tokens = torch.ones(N).double() if tokens is None else tokens.double().flatten()
    each = F.cross_entropy(flat, labels, classes.double(), reduction="none", ignore_index=IGNORED)
    total = (tokens * each).sum()
    valid = labels != IGNORED
    weights = (tokens * classes.double()[labels.clamp(min=0)])[valid].sum()
    if reduction == "sum":
        return total, weights, total
    return total, weights, total / (weights if denominator is None else denominator)


SETTINGS = list(
    itertools.product(("mean", "sum"), (False, True), (None, 3.5), ((), ("accuracy", "entropy")))
)


@pytest.mark.parametrize("reduction, has_tokens, denominator, metrics", SETTINGS)
def test_a_loss_with_class_weights_is_torchs(
    reduction, has_tokens, denominator, metrics, options, device
):
    """In a first call, and in a second one with other labels, whose checks are remembered."""
    classes = torch.linspace(0.0, 2.0, V)
    term = hl.CrossEntropy(class_weight=classes.to(device))
    head = hl.HeadLoss(term, metrics=metrics, reduction=reduction, options=options)
    plain = hl.HeadLoss(metrics=metrics, options=options)
    denominator = None if reduction == "sum" else denominator
    for seed in range(2):
        logits, labels = batch(seed)
        tokens = torch.rand(labels.shape) if has_tokens else None
        given = {"token_weight": None if tokens is None else tokens.to(device)}
        if denominator is not None:
            given["denominator"] = denominator
        here = logits.to(device, copy=True).requires_grad_()
        there = logits.double().requires_grad_()
        out = head(here, labels.to(device), **given)
        out.loss.backward()
        total, weights, loss = by_torch(there, labels, classes, tokens, reduction, denominator)
        loss.backward()
        close = {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(out.loss.detach().cpu().double(), loss.detach(), **close)
        torch.testing.assert_close(here.grad.cpu().double(), there.grad, **close)
        torch.testing.assert_close(
            out.terms["cross_entropy"].cpu().double(), total.detach(), **close
        )
        torch.testing.assert_close(
            out.term_counts["cross_entropy"].cpu().double(), weights, **close
        )
        without = plain(logits.to(device), labels.to(device), token_weight=given["token_weight"])
        assert torch.equal(out.count, without.count)
        for name in metrics:
            torch.testing.assert_close(out.metrics[name], without.metrics[name], **close)
        if denominator is None and reduction == "mean":
            torch.testing.assert_close(hl.mean_metrics(out)["loss"].cpu(), loss.detach(), **close)


def test_a_weight_of_0_leaves_a_token_out_and_a_label_without_a_class_is_nan(options, device):
    logits, labels = (x.to(device) for x in batch(0))
    first = labels[1, 0].item()
    classes = torch.ones(V, device=device).index_fill(0, labels[1, :1], 0.0)
    head = hl.HeadLoss(hl.CrossEntropy(class_weight=classes), options=options)
    infinite = logits.clone()
    infinite[1, 0, first] = -torch.inf
    kept = labels.clone()
    kept[labels == first] = IGNORED
    expected = hl.HeadLoss(options=options)(logits, kept).loss
    torch.testing.assert_close(head(infinite, labels).loss, expected, rtol=1e-6, atol=1e-6)
    outside = labels.clone()
    outside[2, 2] = V + 3
    assert head(logits, outside).loss.isnan()


@pytest.mark.parametrize("linear", [hl.Linear("one_sweep"), hl.Linear("recompute")], ids=str)
def test_a_linear_head_needs_no_denominator_for_class_weights(linear, options, device):
    labels = batch(0)[1]
    classes = torch.linspace(0.0, 2.0, V)
    hidden = torch.randn(3, N // 3, 8, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(V, 8, generator=torch.Generator().manual_seed(2))
    head = hl.HeadLoss(
        hl.CrossEntropy(class_weight=classes.to(device)), metrics="accuracy", options=options
    )
    leaves = [x.to(device, copy=True).requires_grad_() for x in (hidden, weight)]
    out = head.linear(*leaves, labels.to(device), linear=linear)
    out.loss.backward()
    expected = [x.double().requires_grad_() for x in (hidden, weight)]
    loss = by_torch(expected[0] @ expected[1].t(), labels, classes, None, "mean", None)[2]
    loss.backward()
    torch.testing.assert_close(
        out.loss.detach().cpu().double(), loss.detach(), rtol=1e-5, atol=1e-6
    )
    for leaf, other in zip(leaves, expected):
        torch.testing.assert_close(leaf.grad.cpu().double(), other.grad, rtol=1e-4, atol=1e-5)
