"""Log-probs of given ids: which ids there may be. Values and gradients are in
test_at_ids_beside.py."""

import re

import pytest
import torch

from tp_headloss import HeadLoss, Options, Term, vocab_statistics

V, N, K, H = 200, 9, 5, 12


def problem():
    """Logits, labels and ids: in any order, several times, none, the label and a confident one."""
    generator = torch.Generator().manual_seed(7)
    x = 3 * torch.randn(N, V, generator=generator)
    labels = torch.randint(0, V, (N,), generator=generator)
    ids = torch.randint(0, V, (N, K), generator=generator)
    labels[2] = -100
    ids[0, 1] = ids[0, 3] = ids[0, 0]  # one id three times
    ids[1, 2], ids[1, 4] = -1, labels[1]  # none; the label
    x[3, ids[3, 0]] += 30.0
    x[4] += 200.0
    x[5, ids[5, 2]] = -torch.inf
    return x, labels, ids


def _of_ids(stats, weights):
    return -(weights * stats.log_probs_at).sum(-1)


@pytest.mark.parametrize("columns", [1, 2])
def test_values_of_other_ids_than_those_asked_for_are_refused(columns):
    """[.., 1] would broadcast without a word."""
    term = Term("soft", _of_ids, want=("log_probs_at",), inputs=("weights",))
    given = {"ids": torch.zeros(2, 3, 4, dtype=torch.int64), "weights": torch.ones(2, 3, columns)}
    with pytest.raises(
        ValueError,
        match=rf"each of a token's 4 ids, or one per token \[2, 3\], got \[2, 3, {columns}\]",
    ):
        HeadLoss([term])(torch.zeros(2, 3, V), torch.zeros(2, 3, dtype=torch.int64), inputs=given)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3), (3, 2, 4)])
def test_ids_that_are_not_of_the_tokens_are_named(shape):
    head = HeadLoss([Term("soft", _of_ids, want=("log_probs_at",), inputs=("weights",))])
    given = {"ids": torch.zeros(shape, dtype=torch.int64), "weights": torch.ones(2, 3)}
    with pytest.raises(
        ValueError,
        match=re.escape(f"ids must have shape [2, 3, K] to fit logits, got {list(shape)}"),
    ):
        head(torch.zeros(2, 3, V), torch.zeros(2, 3, dtype=torch.int64), inputs=given)


def test_an_id_outside_of_the_vocabulary_is_nan_and_so_is_its_tokens_gradient(backend, device):
    x, labels, ids = problem()
    ids[6, 1], ids[7, 0] = V, 1 << 40
    ids[2, 1] = V  # of an ignored token
    local = x.to(device).requires_grad_()
    labels, given = labels.to(device), {"want": ("log_probs_at",), "ids": ids.to(device)}
    stats = vocab_statistics(local, labels, options=Options(backend=backend), **given)
    nan = stats.log_probs_at.isnan().nonzero().tolist()
    assert nan == [[6, 1], [7, 0]]
    (grad,) = torch.autograd.grad(stats.log_probs_at[:7].sum(), local)
    assert grad[6].isnan().all() and not grad[[0, 1, 2, 3, 4, 7, 8]].isnan().any()
    with pytest.raises(ValueError, match=r"ids of token 6 .flat index. must be below 200"):
        vocab_statistics(local, labels, options=Options(backend=backend, check=True), **given)


def test_no_ids_at_all(options, device):
    x = torch.randn(3, 9, device=device, requires_grad=True)
    none = torch.zeros(3, 0, dtype=torch.int64, device=device)
    stats = vocab_statistics(x, want=("log_probs_at",), ids=none, options=options)
    assert stats.log_probs_at.shape == (3, 0)
    (grad,) = torch.autograd.grad(stats.log_probs_at.sum() + stats.lse.sum(), x)
    torch.testing.assert_close(grad, x.detach().softmax(-1))
