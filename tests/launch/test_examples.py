"""The two smallest programs of launch/: any number of ranks and micro-batches is the same training."""

import importlib
import re

import pytest
import torch
from launcher import ROOT, run_script

from tp_headloss import HeadLoss, VocabShard


def rows(said: str) -> list[dict[str, float]]:
    """The numbers that a run printed, a dict per logged step."""
    lines = [line for line in said.splitlines() if line.startswith("step ")]
    return [{name: float(value) for name, value in re.findall(r"(?:loss/)?([\w/]+) ([\d.]+)", line)} for line in lines]


@pytest.mark.parametrize(("ranks", "tp", "accumulate"), [(2, 1, 2), (2, 2, 1), (4, 2, 2)])
def test_an_own_loss_trains_alike_on_any_ranks(ranks, tp, accumulate):
    options = "--steps", 20, "--log-every", 10, "--device", "cpu"
    alone = rows(run_script("launch/own_loss.py", *options, "--accumulate", 1))
    found = rows(run_script("launch/own_loss.py", *options, "--tp", tp, "--accumulate", accumulate, ranks=ranks))
    names = ["step", "loss", "cross_entropy", "focal", "weighted/focal", "accuracy"]
    assert [sorted(row) for row in found] == 2 * [sorted(names)]
    assert alone[1]["cross_entropy"] < alone[0]["cross_entropy"] < 4.6
    for ours, one in zip(found, alone):
        assert ours == pytest.approx(one, rel=2e-3, abs=2e-3)


def trained_in_one_process(own_loss, steps: int) -> float:
    """The last loss of the task of launch/fsdp_tp.py, trained by plain torch on a whole vocabulary."""
    model = own_loss.Model(VocabShard.from_group(None, own_loss.VOCAB, padded_size=128), HeadLoss(), "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(steps):
        ids, labels = own_loss.batch(step, 32, "cpu")
        loss = model(ids, labels, None).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize(("ranks", "tp"), [(4, 2), (2, 1)])
def test_fsdp_and_shards_of_the_vocabulary_train_as_one_process(ranks, tp, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "launch"))
    expected = trained_in_one_process(importlib.import_module("own_loss"), 20)
    found = rows(run_script("launch/fsdp_tp.py", "--steps", 20, "--tp", tp, ranks=ranks))
    assert found == [{"step": 20, "loss": pytest.approx(expected, rel=1e-3)}] and expected < 4.5
