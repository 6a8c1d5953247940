"""How much of the package runs in a repeated call: what depends on the kind of a call alone is
worked out once."""

import contextlib
import functools
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from ranks import on_ranks

import tp_headloss
from tp_headloss import CrossEntropy, HeadLoss, Linear, Options, VocabShard
from tp_headloss.engine import launch, sums_triton, triton
from tp_headloss.engine.one_read.kernel import Kernel

PACKAGE = str(Path(tp_headloss.__file__).parent)
# the torch backend's own arithmetic is no work of the host
ARITHMETIC = (f"{PACKAGE}/engine/eager.py", f"{PACKAGE}/statistics/")
# call, backend -> functions of the package that run: forward on one rank, on two; backward
LIMITS = {
    ("logits", "triton"): (40, 55, 12),
    ("logits", "torch"): (50, 53, 18),
    ("recompute", "torch"): (56, 59, 48),
    ("one_sweep", "torch"): (86, 92, 6),
}


def functions_run(call):
    """What a call returns, and the functions of the package that run in it."""
    found = []

    def note(frame, event, _):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE) and not path.startswith(ARITHMETIC):
            found.append(f"{path[len(PACKAGE) :]} {frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        return call(), found
    finally:
        sys.setprofile(None)


def third_call(group, device, kind, backend):
    """Functions that run in the third call of a kind, forward and backward. No kernel is
    launched."""
    shard = None if group is None else VocabShard.from_group(group, 32)
    rows = torch.randn(64, 32, device=device, requires_grad=True)  # logits, or hidden states
    logits = (
        rows
        if shard is None
        else rows.detach()[:, shard.start : shard.stop].clone().requires_grad_()
    )
    weight = torch.randn(logits.shape[1], 32, device=device, requires_grad=True)
    head, call = HeadLoss([CrossEntropy()], options=Options(backend=backend)), (logits,)
    labels = torch.zeros(64, dtype=torch.int64, device=device)
    if kind != "logits":
        head, call = functools.partial(head.linear, linear=Linear(kind)), (rows, weight)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        for module in (launch, triton, sums_triton):
            stack.enter_context(mock.patch.object(module, "launch", lambda *_: None))
        for _ in range(2):
            head(*call, labels, shard=shard).loss.backward()
        out, forward = functions_run(lambda: head(*call, labels, shard=shard))
        return forward, functions_run(out.loss.backward)[1]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("kind", "backend"), LIMITS)
def test_a_repeated_call_runs_few_functions(kind, backend, world_size):
    *forward, backward = LIMITS[kind, backend]
    for limit, ran in zip(
        (forward[world_size - 1], backward), on_ranks(world_size, third_call, kind, backend)[0]
    ):
        assert 0 < len(ran) <= limit, "\n".join(ran)


FRAMES = 6  # of the package, from a repeated call to any of its launches


def frames():
    """Functions of the package that wait for this one, the outermost first."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            found.insert(0, frame.f_code.co_name)
        frame = frame.f_back
    return found


@pytest.mark.parametrize("gradient", ["backward", pytest.param("forward", marks=pytest.mark.cuda)])
def test_few_functions_stand_between_a_call_and_its_launch(gradient, device, monkeypatch):
    logits = torch.randn(64, 4096, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(64, dtype=torch.int64, device=device)
    head = HeadLoss(options=Options(backend="triton", gradient=gradient))
    for _ in range(2):
        head(logits, labels).loss.backward()
    found = []
    note = lambda *_: found.append(frames())  # noqa: E731
    for module in (launch, triton, sums_triton):
        monkeypatch.setattr(module, "launch", note)
    monkeypatch.setattr(launch.PreparedLaunch, "__call__", note)
    monkeypatch.setattr(Kernel, "launch", note)
    head(logits, labels)
    assert found
    for names in found:
        assert len(names) <= FRAMES, names
