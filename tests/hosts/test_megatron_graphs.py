"""Megatron-Core's CUDA graphs on two GPUs, around its own loss and ours: replays give what eager
steps give."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from cases import ROOT

pytestmark = pytest.mark.cuda
LOSSES = ("stock", "logits", "logits-inplace", "head", "head-one-sweep")
STEPS = 8
SHAPE = (
    "--data synthetic --vocab 8192 --hidden 256 --layers 2 --length 256 --batch 2 --accumulate 2"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, has {torch.cuda.device_count()}")
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("needs megatron-core 0.19.2 in this environment")
    out = tmp_path_factory.mktemp("graphs") / "results.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command += [
        str(ROOT / "launch/megatron_pretrain.py"),
        *SHAPE.split(),
        "--deterministic",
        "--out",
        str(out),
    ]
    command += [
        "--steps",
        str(STEPS),
        "--losses",
        *LOSSES,
        "--cuda-graph",
        "none",
        "local",
        "full_iteration",
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not ran.returncode, ran.stderr[-4000:]
    return json.loads(out.read_text())["results"]


@pytest.mark.parametrize("graph", ["local", "full_iteration"])
@pytest.mark.parametrize("loss", LOSSES)
def test_replays_have_the_losses_and_gradient_norms_of_eager_steps(results, loss, graph):
    eager, replayed = results[loss], results[f"{loss}, {graph}"]
    assert len(set(eager["loss"])) == STEPS  # a replay of old inputs would be seen
    assert replayed["loss"] == eager["loss"] and replayed["grad_norm"] == eager["grad_norm"]
