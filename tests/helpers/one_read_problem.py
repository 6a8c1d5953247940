"""Calls of one read, and of two launches beside it."""

import dataclasses
import math

import torch

import tp_headloss as hl

IGNORED, N, V = -100, 6, 704
IN_FORWARD, IN_BACKWARD = (
    hl.Options(backend="triton", gradient=name) for name in ("forward", "backward")
)
TERMS = hl.CrossEntropy(), hl.ZLoss(0.01)


def problem(device, width=V, n_rows=N, seed=3):
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(n_rows, width, generator=generator)).to(device, torch.bfloat16)
    labels = torch.randint(width, (n_rows,), generator=generator).to(device)
    labels[1] = IGNORED
    logits[1] = torch.nan  # nobody reads it
    return logits, labels


def teacher_beside(logits, seed=5):
    """Logits of a teacher: near the student's, some -inf, the label of the last row among them."""
    generator = torch.Generator().manual_seed(seed)
    noise = (2 * torch.randn(logits.shape, generator=generator)).to(logits.device)
    teacher = (logits.float().nan_to_num(neginf=-9.0) + noise).to(logits.dtype)
    teacher[2, ::3] = -torch.inf
    return teacher


def entries_beside(logits, n_entries, seed=0):
    """Ids and log-probs [N, K] of a top-K teacher, whose probabilities add up to 0.9."""
    generator = torch.Generator().manual_seed(seed)
    noise = (2 * torch.randn(logits.shape, generator=generator)).to(logits.device)
    likely = (logits.float().nan_to_num(neginf=-9.0) + noise).topk(n_entries)
    log_probs = likely.values.log_softmax(-1) + math.log(0.9)
    return likely.indices, log_probs


def steps(
    options, logits, labels, upstream=1.0, terms=TERMS, metrics=(), reduction="mean", **given
):
    """-> the output, and the gradients of a first and a second backward."""
    head = hl.HeadLoss(list(terms), metrics=metrics, reduction=reduction, options=options)
    logits = logits.clone().requires_grad_()
    out = head(logits, labels, **given)
    return out, *(
        torch.autograd.grad(upstream * out.loss, logits, retain_graph=True)[0] for _ in range(2)
    )


def expect_alike(one, two, noise=1e-30):
    """The results of both ways differ by rounding alone. noise: a number or [N, width], where parts
    cancel."""
    rounding = 3e-5 if one[1].dtype == torch.float32 else 2**-7
    assert torch.allclose(one[0].loss, two[0].loss, rtol=1e-6, atol=1e-6, equal_nan=True)
    for name, metric in one[0].metrics.items():
        assert torch.allclose(metric, two[0].metrics[name], rtol=1e-6, atol=1e-5, equal_nan=True)
    for name, a, b in zip(one[0].stats._fields, one[0].stats, two[0].stats):
        if isinstance(a, torch.Tensor):
            # of parts that cancel
            noise_of_sum = 1e-7 * one[1].shape[1] if name == "total" else 0.0
            assert torch.allclose(
                a.double(), b.double(), rtol=1e-6, atol=2e-6 + noise_of_sum, equal_nan=True
            )
    for a, b in zip(one[1:], two[1:]):
        a, b = a.float(), b.float()
        assert (
            torch.equal(a.isnan(), b.isnan())
            and not ((a - b).abs() > rounding * b.abs() + noise).any()
        )


def focal(stats, advantages):
    return (
        -advantages * (1 - stats.log_prob.exp()) ** 2 * stats.log_prob
        + stats.lse.sigmoid()
        - stats.entropy.abs()
    )


def two_sequences(device):
    ids = torch.tensor([0, 0, 0, 1, 1, 1], device=device)
    return hl.Sequences.from_ids(ids, 2, ids.new_tensor([1, 0, 1, 1, 1, 1]).bool())


ADVANTAGES = {"advantages": torch.tensor([1.0, 0.5, -2.0, 1.5, -1.0, 0.0])}
POLICY = {
    **ADVANTAGES,
    "old_log_prob": torch.tensor([-9.0, -8.0, -12.0, -11.0, -10.5, -9.5]),
    "reference_log_prob": torch.tensor([-9.5, -8.5, -11.0, -12.0, -10.0, -9.0]),
}


def moved(x, device):
    """A test's argument on the device."""
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {name: moved(value, device) for name, value in x.items()}
    if isinstance(x, hl.Teacher):
        return dataclasses.replace(x, logits=x.logits.to(device))
    if x is two_sequences:
        return x(device)
    if isinstance(x, hl.Transform):
        tensors = {name: getattr(x, name) for name in ("bias", "temperature")}
        return dataclasses.replace(
            x, **{n: t.to(device) for n, t in tensors.items() if isinstance(t, torch.Tensor)}
        )
    return x
