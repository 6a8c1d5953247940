"""Operands of a linear head, small enough for several blocks, and the definition of its loss."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tp_headloss import CrossEntropy, Entropy, Teacher, TopKTeacher, ZLoss
from tp_headloss.linear_head import blocks

V, H, N = 200, 24, 44  # no multiple of the blocks below
BOTH = pytest.mark.parametrize("mode", ["recompute", "one_sweep"])


@contextlib.contextmanager
def small_blocks(tile=16):
    """Blocks of this many tokens and ids, so that small shapes have several."""
    planners, before = (blocks.recompute_blocks, blocks.one_sweep_tokens), blocks.TILE
    blocks.TILE = tile
    for planner in planners:
        planner.cache_clear()
    try:
        yield
    finally:
        blocks.TILE = before
        for planner in planners:
            planner.cache_clear()


def tensors(dtype=torch.float32):
    """hidden [N, H], weight [V, H], bias [V], labels [N], token weights [N]"""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    labels = torch.randint(0, V, (N,), generator=generator)
    labels[3::11] = -100
    return (
        draw(N, H).to(dtype),
        (0.4 * draw(V, H)).to(dtype),
        draw(V).to(dtype),
        labels,
        draw(N).abs(),
    )


def terms():
    return [CrossEntropy(label_smoothing=0.1), ZLoss(0.01), Entropy(0.1)]


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def joined(results, how):
    """Of all ranks -> loss, dH, dW and the bias's gradient of the whole."""
    loss, of_hidden, *_ = results[0]
    if how == "reduce_scatter":
        of_hidden = torch.cat([result[1] for result in results])
    elif how == "none":
        of_hidden = sum(result[1].double() for result in results)
    else:
        assert all(torch.equal(result[1], of_hidden) for result in results)
    return loss.cpu(), of_hidden, *(torch.cat([result[i] for result in results]) for i in (2, 3))


def a_teacher(kind, device, n=N, v=V):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(n, v, generator=generator)
    if kind == "logits":
        return Teacher(logits.to(device), 1.7, torch.linspace(0.5, 2, n, device=device))
    top = logits.log_softmax(-1).topk(5)
    ids, log_probs = top.indices.to(device), top.values.to(device)
    return kind and TopKTeacher(ids, log_probs, renormalize=False)


class Largest(TorchDispatchMode):
    """Bytes of the largest memory that any operation makes or hands on."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out
