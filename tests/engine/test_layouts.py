"""Logits and vectors of any layout, rows of any batch: the same numbers, the same bits."""

import torch
from logits_problem import WANT, N, V, rows

from tp_headloss import Options, Transform, vocab_statistics


def test_transposed_logits_are_read_where_they_lie(options, device):
    """[S, B, V] seen as [B, S, V]. Values and gradients are in tests/helpers/odd_inputs.py."""
    x = torch.randn(4, 3, 50, device=device).transpose(0, 1).requires_grad_()
    stats = vocab_statistics(x, torch.randint(0, 50, (3, 4), device=device), options=options)
    saved = stats.lse.grad_fn
    while not hasattr(saved, "saved_tensors"):
        saved = saved.next_functions[0][0]
    assert saved.saved_tensors[0].data_ptr() == x.data_ptr()  # no copy was made


def test_vectors_of_any_stride_are_read_right(options, device):
    x, labels = rows(device)
    bias, weight, temperature = torch.randn(V), torch.rand(V), torch.rand(N) + 0.5
    vectors = {"labels": labels, "bias": bias, "temperature": temperature, "weight": weight}
    vectors = {name: vector.to(device) for name, vector in vectors.items()}
    results = []
    for strided in (False, True):
        v = {name: t.repeat_interleave(2)[::2] if strided else t for name, t in vectors.items()}
        stats = vocab_statistics(
            x, v["labels"], want=WANT, transform=Transform(bias=v["bias"], temperature=v["temperature"]),
            total_weight=v["weight"], options=options,
        )  # fmt: skip
        results.append(stats[:6])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_rows_do_not_depend_on_their_batch(backend, device):
    """Row i has the same bits alone, in any order, and in any batch (the triton backend; torch to
    rounding)."""
    x, labels = rows(device)
    order = torch.randperm(N, device=device)
    options = Options(backend=backend)
    whole = vocab_statistics(x, labels, want=WANT, options=options)
    shuffled = vocab_statistics(x[order], labels[order], want=WANT, options=options)
    alone = vocab_statistics(x[5:6], labels[5:6], want=WANT, options=options)
    for a, b, c in zip(whole[:6], shuffled[:6], alone[:6]):
        if backend == "triton":
            assert torch.equal(a[order], b) and torch.equal(a[5:6], c)
        torch.testing.assert_close(a[order], b)
        torch.testing.assert_close(a[5:6], c)
