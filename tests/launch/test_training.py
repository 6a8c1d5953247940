"""The training run, at toy size on CPU: sharded equals unsharded, an interrupted or killed run goes
on bit for bit."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest
from launcher import ROOT, run_script

TINY = (
    "--device cpu --vocab 307 --pad-to 4 --corpus-mb 1 --layers 1 --width 32 --heads 2 --length 32"
)
TINY += " --lr 1e-2 --warmup 4"
STEPS = ("--steps", 24, "--validate-every", 6, "--checkpoint-every", 6)


def run_sharded(out, cache, *options):
    """The same without torchrun."""
    run_script(
        "launch/train.py",
        "--tp",
        2,
        *TINY.split(),
        "--out",
        out,
        "--data-cache",
        cache,
        *options,
        ranks=2,
    )


def losses(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        (row["split"], row["step"]): (row["loss"], row["accuracy"], row["entropy"]) for row in rows
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """A run that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole")
    run_sharded(out, cache, *STEPS)
    return out


def test_sharded_training_equals_unsharded(tmp_path, cache, whole):
    baseline = (
        "--baseline",
        *TINY.split(),
        *STEPS,
        "--out",
        tmp_path / "baseline",
        "--data-cache",
        cache,
    )
    run_script("launch/train.py", *baseline)
    sharded, plain = losses(whole), losses(tmp_path / "baseline")
    assert sharded.keys() == plain.keys() and len(sharded) >= 24
    assert max(abs(sharded[key][0] - plain[key][0]) for key in sharded) < 2e-5
    assert sharded["train", 24][0] < sharded["train", 1][0] - 0.3  # it learns
    assert (whole / "curves.png").stat().st_size > 10_000


def test_a_run_goes_on_with_other_numbers_of_shards_and_replicas(tmp_path, cache, whole):
    """Two replicas of two shards, then one process, then four shards."""
    command = *TINY.split(), *STEPS, "--out", tmp_path, "--data-cache", cache
    for ranks, tp, stop in ((4, 2, 5), (1, 1, 9), (4, 4, 24)):
        resume = ["--resume"] * (stop > 5)
        run_script(
            "launch/train.py", *command, "--tp", tp, "--stop-after", stop, *resume, ranks=ranks
        )
    found, expected = losses(tmp_path), losses(whole)
    assert found.keys() == expected.keys()
    assert max(abs(found[key][0] - expected[key][0]) for key in found) < 2e-5


def test_a_run_that_is_killed_and_then_terminated_goes_on_bit_for_bit(tmp_path, cache, whole):
    """After SIGKILL from the newest whole checkpoint; after SIGTERM, which torchrun passes on, from
    where it was."""
    out = shutil.copytree(whole, tmp_path / "out")  # which the new run replaces, once
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
    ]
    command = [
        sys.executable,
        *torchrun,
        "tests/helpers/killed.py",
        "--tp",
        2,
        *TINY.split(),
        *STEPS,
        "--overwrite",
    ]
    command += ["--out", out, "--data-cache", cache]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(list(map(str, command)), cwd=ROOT, env=env, capture_output=True, text=True)
    assert [ran.stdout.count(f"continues after step {step} of 24") for step in (6, 12)] == [1, 0], (
        ran.stderr[-3000:]
    )
    assert "stopped after step 15 of 24 and saved" in ran.stdout, ran.stderr[-3000:]
    run_sharded(out, cache, *STEPS, "--resume")
    assert losses(out) == losses(whole)
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == [
        "job",
        "latest",
        "step-00000024",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "",
            "is from an older run: continue it (--resume), replace it (--overwrite) or choose another --out",
        ),
        (
            "--overwrite --corpus nowhere",
            "nowhere holds 0 text files; at least 20 are needed (--corpus DIR)",
        ),
        ("--overwrite --batch 3", "--batch 3 is no multiple of replicas x micro-batches = 2"),
        (
            "--overwrite --vocab 200",
            "--vocab must be at least 257, all bytes and the end of a text, got 200",
        ),
        ("--overwrite --length 1000000", "tokens, too few for --length 1000000"),
        ("--resume --lr 1", "was written by another configuration (lr: 0.01 -> 1.0)"),
        ("--resume --out {damaged}", "/__1_0.distcp is damaged: expected checksum "),
    ],
)
def test_a_mistake_ends_every_rank_and_leaves_an_older_run_alone(
    tmp_path, cache, whole, options, message
):
    out, damaged = (
        shutil.copytree(whole, tmp_path / "out"),
        shutil.copytree(whole, tmp_path / "damaged"),
    )
    (shard,) = damaged.glob("checkpoints/*/__1_0.distcp")
    os.truncate(shard, 100)
    before = contents(tmp_path)
    command = ["--tp", 2, *TINY.split(), *STEPS, "--data-cache", cache, "--out", out]
    said = run_script(
        "launch/train.py", *command, *options.format(damaged=damaged).split(), ranks=2, code=1
    )
    lines = [line for line in said.splitlines() if message in line]
    assert len(lines) == 2 and lines[0] == lines[1] and "Traceback" not in said, said
    assert contents(tmp_path) == before


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_older_run_is_replaced_when_that_is_asked_for(tmp_path, cache, whole):
    out = shutil.copytree(whole, tmp_path / "out")
    options = (
        "--tp",
        2,
        *TINY.split(),
        "--steps",
        2,
        "--data-cache",
        cache,
        "--out",
        out,
        "--overwrite",
    )
    run_script("launch/train.py", *options, ranks=2)
    assert max(losses(out))[1] == 2 and [path.name for path in out.glob("checkpoints/step-*")] == [
        "step-00000002"
    ]


def command(folder, name, text):
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def reachable(port):
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def test_a_run_that_loses_a_node_goes_on_without_it(tmp_path, cache, whole):
    """launch/slurm.sbatch, with two agents on this machine."""
    # Slurm's part: the name of the first node, and a task on this one.
    command(tmp_path, "scontrol", "echo localhost")
    command(tmp_path, "srun", 'shift; exec "$@"')
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    slurm = {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NNODES": "2",
        "MIN_NODES": "1",
    }
    # a node counts as lost 8 seconds after its last sign: no busy machine keeps a live one from it
    # for so long
    quick = {
        "PET_RDZV_CONF": "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=8",
        "PORT": str(port),
    }
    env = {**os.environ, **slurm, **quick, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    options = [*TINY.split(), *STEPS, "--out", tmp_path / "out", "--data-cache", cache]
    program = ["bash", "launch/slurm.sbatch", "tests/helpers/killed.py", *map(str, options)]
    nodes, logs = [], [tmp_path / "first", tmp_path / "second"]
    try:
        # the first one has the rendezvous, either may have rank 0
        for lost, log in enumerate(logs):
            env["LOSE_NODE"] = str(lost)
            with log.open("w") as file:
                nodes.append(
                    subprocess.Popen(
                        program, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT
                    )
                )
            while not reachable(port) and nodes[0].poll() is None:
                time.sleep(0.1)
        codes = [node.wait(300) for node in nodes]
    finally:
        for node in nodes:
            node.terminate()
    said = logs[0].read_text()
    assert codes == [0, 137], (codes, said[-3000:])
    # Two replicas until the node is lost, then one.
    assert said.count("continues after step 6 of 24") == said.count("continues after step") == 1, (
        said[-3000:]
    )
    found, expected = losses(tmp_path / "out"), losses(whole)
    assert found.keys() == expected.keys()
    assert max(abs(found[key][0] - expected[key][0]) for key in found) < 2e-5
