"""The training run, at toy size on CPU: sharded equals unsharded, and an interrupted run goes on bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TINY = "--device cpu --vocab 307 --pad-to 4 --corpus-mb 1 --layers 1 --width 32 --heads 2 --length 32"
TINY += " --lr 1e-2 --warmup 4"


def start(out, cache, *options, processes=2):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    tp = ["--tp", "2"] if processes else ["--baseline"]
    command = [sys.executable, *launcher, "launch/train.py", *tp, *TINY.split(), "--out", str(out)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    command += ["--data-cache", str(cache), *map(str, options)]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def run(*args, **kwargs):
    process = start(*args, **kwargs)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output[-3000:]


def losses(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {(row["split"], row["step"]): (row["loss"], row["accuracy"], row["entropy"]) for row in rows}


def test_sharded_training_equals_unsharded_and_resumes_bit_for_bit(tmp_path):
    cache, whole = tmp_path / "data", tmp_path / "whole"
    options = ("--steps", 24, "--validate-every", 6, "--checkpoint-every", 6)
    run(whole, cache, *options)
    run(tmp_path / "baseline", cache, *options, processes=0)
    sharded, plain = losses(whole), losses(tmp_path / "baseline")
    assert sharded.keys() == plain.keys() and len(sharded) >= 24
    assert max(abs(sharded[key][0] - plain[key][0]) for key in sharded) < 2e-5
    assert sharded["train", 24][0] < sharded["train", 1][0] - 0.3  # it learns
    assert (whole / "curves.png").stat().st_size > 10_000

    parts = tmp_path / "parts"
    run(parts, cache, *options, "--stop-after", 5)
    run(parts, cache, *options, "--resume")
    assert losses(parts) == sharded


def test_a_terminated_run_saves_and_goes_on(tmp_path):
    cache, out, options = tmp_path / "data", tmp_path / "out", ("--steps", 4000, "--log-every", 1)
    process = start(out, cache, *options)
    deadline = time.monotonic() + 120
    while not ((out / "metrics.jsonl").exists() and losses(out)) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)  # torchrun passes it on to the ranks, and reports it by its own exit code
    output, _ = process.communicate(timeout=120)
    assert "saved" in output, output[-3000:]
    reached = max(step for _, step in losses(out))
    run(out, cache, *options, "--resume", "--stop-after", reached + 3)
    steps = sorted(step for split, step in losses(out) if split == "train")
    assert steps == list(range(1, reached + 4))
