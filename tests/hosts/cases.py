"""Cases that run inside a host's own environment, on two ranks: `launch` starts them, `main` is what the ranks do.

A file of cases ends with ``main(CASES)``. A case is a function (group) -> a dict of numbers, JSON's, called once on
each rank; of a number the worst of the ranks is kept. One start of two ranks serves all cases of a host, because
importing one takes seconds.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).parents[2]
RANKS = 2
TIMEOUT = 60  # seconds: a collective that waits longer fails


def python_of(host: str) -> Path:
    return ROOT / ".hosts" / host / "bin" / "python"


@functools.lru_cache
def launch(host: str, script: str) -> dict[str, dict]:
    """Runs tests/hosts/`script` on two ranks with the host's Python -> results by name of the case; an "error" of one
    is its traceback."""
    with tempfile.TemporaryDirectory() as folder:
        out, store = Path(folder) / "results.json", Path(folder) / "store"
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        env |= {"OMP_NUM_THREADS": "1", "CASES_STORE": str(store), "CASES_OUT": str(out), "WORLD_SIZE": str(RANKS)}
        env |= {
            "CASES_TORCH": importlib.metadata.version("torch"),
            "CUDA_VISIBLE_DEVICES": "",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        command = [str(python_of(host)), "-W", "ignore", str(ROOT / "tests/hosts" / script)]
        logs = [Path(folder) / f"{rank}.log" for rank in range(RANKS)]
        ranks = []
        for rank, path in enumerate(logs):
            with path.open("w") as log:
                env["RANK"] = str(rank)
                ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT))
        try:
            codes = [rank.wait(timeout=600) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        said = "\n".join(path.read_text()[-4000:] for path in logs)
        assert not any(codes) and out.exists(), said
        return json.loads(out.read_text())


def main(cases: dict, before=None) -> None:
    """before: a function (group), called once."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    assert torch.__version__ == os.environ["CASES_TORCH"], "the host has brought a torch of its own"
    rank, store = int(os.environ["RANK"]), os.environ["CASES_STORE"]
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT)
        )
    if before is not None:
        before(dist.group.WORLD)
    results = {}
    for name, case in cases.items():
        torch.manual_seed(0)
        try:
            results[name] = case(dist.group.WORLD)
        except Exception:
            results[name] = {"error": f"rank {rank}: {traceback.format_exc()}"}
        both = [None] * RANKS  # an error on the other rank counts, too
        dist.all_gather_object(both, results[name])
        results[name] = next((r for r in both if "error" in r), None) or _worst(both)
    if rank == 0:
        Path(os.environ["CASES_OUT"]).write_text(json.dumps(results))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # hosts leave threads behind that would wait for each other


def _worst(results: list[dict]) -> dict:
    """Of the ranks: the largest of each number (smallest of "mutant"), whether all are true, else what rank 0 says."""

    def of(name, values):
        if all(isinstance(v, bool) for v in values):
            return all(values)
        if all(isinstance(v, (int, float)) for v in values):
            return min(values) if name == "mutant" else max(values)
        return values[0]

    return {name: of(name, [r[name] for r in results]) for name in results[0]}


def relative_errors(ours: dict, theirs: dict) -> dict[str, float]:
    """By name, of tensors of the same names: |ours - theirs| / |theirs|."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return {n: float((ours[n].double() - theirs[n].double()).norm() / theirs[n].double().norm()) for n in theirs}


def compared(loss, grads, host_loss, host_grads, head: str) -> dict[str, float]:
    """What a test looks at: the relative error of the losses, the worst of the gradients, and what that would be if the
    gradient of the parameter `head` were 1 % too large. Gradients by name, whole or this rank's."""
    found = max(relative_errors(grads, host_grads).items(), key=lambda item: item[1])
    wrong = {**grads, head: 1.01 * grads[head]}
    return {
        "loss": relative_errors({"": loss}, {"": host_loss})[""],
        "grads": found[1],
        "worst": found[0],
        "mutant": max(relative_errors(wrong, host_grads).values()),
    }


def readme_block(mark: str) -> str:
    """The Python of the README's block under the comment <!-- host: MARK -->."""
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(rf"<!-- host: {re.escape(mark)} -->\n```python\n(.*?)```", text, re.S)
    return block
