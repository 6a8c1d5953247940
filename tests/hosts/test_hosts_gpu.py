"""The scripts of scripts/hosts_gpu on CPUs, with a tiny model: the host's own head and ours have
one loss curve, and what they write becomes a table and a picture. One host; all, and with torchrun
itself, with TP_HEADLOSS_FULL."""

import json
import os
import subprocess
import sys

import pytest
from cases import FULL, ROOT, python_of

FOLDER = ROOT / "scripts/hosts_gpu"
SCRIPTS = {  # name -> environment, script, ranks, its ways
    "transformers": ("transformers-5.24.0", "transformers_trainer", 1),
}
if FULL:
    SCRIPTS |= {
        "megatron": ("megatron-0.19.2", "megatron_core", 2),
        "transformers_2": ("transformers-5.24.0", "transformers_trainer", 2),
        "trl": ("transformers-5.24.0", "trl_trainer", 2),
        "trl_grpo": ("transformers-5.24.0", "trl_trainer", 1, "GRPO"),
        "torchtitan": ("torchtitan-0.3.0", "torchtitan_trainer", 2),
        "torchtitan_fsdp": ("torchtitan-0.3.0", "torchtitan_trainer", 2, "FSDP", "checkpoint"),
        "nemo_automodel": ("nemo_automodel-0.7.0", "nemo_automodel_loss", 2),
        "deepspeed": ("deepspeed-0.19.8", "deepspeed_autotp", 2),
        "verl": ("verl-0.9.1", "verl_engine", 2),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return tmp_path_factory.mktemp("hosts_gpu")


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import measure

    return measure


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_host_learns_the_same_with_its_own_head_and_with_ours(results, name):
    host, script, ranks, *ways = SCRIPTS[name]
    if not python_of(host).exists():
        pytest.skip(f"no .hosts/{host}: bash scripts/hosts.sh {host}")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    start = torchrun if FULL else [ROOT / "tests/helpers/forked.py"]
    start = [*start, str(ranks)] if ranks > 1 else []
    call = [
        f"{FOLDER}/{script}.py",
        "--tiny",
        "--json",
        f"{results}/{name}.json",
        *(["--ways", *ways] if ways else []),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(results),
        "CUDA_VISIBLE_DEVICES": "",
        # hosts compile parts of their own, for half of the time
        "TORCH_COMPILE_DISABLE": "1",
    }
    command = [python_of(host), "-W", "ignore", *start, *call]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    record = json.loads((results / f"{name}.json").read_text())
    own, most, steps = (
        record["heads"][record["own"]],
        record["shape"]["most"],
        record["shape"]["steps"],
    )
    assert (
        record["ranks"] == ranks
        and len(record["heads"]) > 1
        and record.get("equal_bits", name != "megatron")
    )
    for found in record["heads"].values():
        assert len(found["loss"]) == steps == len(set(found["loss"])) and found["largest"] == most
        # one is rounded to bf16
        assert max(abs(a - b) for a, b in zip(found["loss"], own["loss"])) < 2e-5
        assert 0 < found["head_ms"] < found["step_ms"]
        first, second = found["turns"]["step_ms"]
        assert found["step_ms"] == pytest.approx((first + second) / 2)


def test_results_become_a_table_and_a_picture(tmp_path):
    found = {"loss": [6.25, 6.0], "step_ms": 20.0, "head_ms": 5.0, "tokens_per_s": 1000.0}
    shape = {"layers": 2, "hidden": 32, "vocab": 512, "length": 16, "batch": 2, "steps": 2}
    versions = {"host": "1.0", "torch": "2.13.0", "triton": "3.6.0"}
    record = {
        "host": "host",
        "own": "its own",
        "ranks": 2,
        "shape": shape,
        "versions": versions,
        "device": "a GPU",
    }
    record |= {"memory": 0.9, "equal_bits": True, "ways": ["compile"]}
    files = {
        "a": {
            "its own": {**found, "peak_gib": 3.25},
            "tp_headloss": {**found, "loss": [6.25, 6.001]},
        },
        # of the same host
        "b": {"another": {"error": "OutOfMemoryError: of this head"}, "its own": {"largest": 4}},
    }
    for name, heads in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({**record, "heads": heads}))
    command = [
        sys.executable,
        FOLDER / "report.py",
        *sorted(tmp_path.glob("*.json")),
        "--out",
        tmp_path / "hosts.png",
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    own, ours, another = (
        line for line in said.splitlines() if line.startswith("| host 1.0, TP 2, compile |")
    )
    assert (
        own
        == "| host 1.0, TP 2, compile | its own | 20.0 ms | 5.0 ms, 25% | 1000 | 3.2 GiB | 4 rows | 6.2500, 6.0000 |  |"
    )
    assert ours.split(" | ")[1] == "**tp_headloss**" and ours.endswith(
        "| not measured | 6.2500, 6.0010 | 1.0e-03 |"
    )
    assert another.count("not measured") == 7 and "another: OutOfMemoryError: of this head" in said
    assert "equal bits of losses and weights over two runs" in said and "hidden 32, 512 ids" in said
    assert (tmp_path / "hosts.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("limit", [0, 1, 3, 4, 5, 37, 255, 256, 1000])
def test_the_search_finds_the_largest_micro_batch_to_a_sixteenth(measure, limit):
    tried = []
    found = measure.largest(lambda rows: tried.append(rows) or rows <= limit, 4, 256)
    assert found <= limit and len(tried) == len(set(tried)) <= 11 and max(tried) <= 256
    assert found == min(limit, 256) or (limit > 16 and found + max(1, found // 16) > limit)
