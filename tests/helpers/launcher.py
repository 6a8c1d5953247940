"""Run a script as `python` or `torchrun` would, in processes that are forked from one that has
imported torch: seconds less for each of them. Torchrun itself is in test_training."""

import gc
import os
import runpy
import sys
import tempfile
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import start_context

ROOT = Path(__file__).parents[2]


def _process(script, arguments, environment, log):
    with open(log, "a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    gc.freeze()  # what was imported, so that no collection of garbage looks through it
    torch.set_num_threads(1)
    os.chdir(ROOT)
    os.environ.update(environment)
    sys.argv[:] = [script, *arguments]
    sys.path[:0] = [str(Path(script).parent), str(ROOT)]
    runpy.run_path(script, run_name="__main__")


def run_script(script, *arguments, ranks: int = 1, code: int = 0) -> str:
    """script: its path from the project's root. -> what all ranks wrote; one that ends with another
    exit code than `code` ends the others, and is an AssertionError with the end of it."""
    if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, has {torch.cuda.device_count()}")
    context = start_context(False)
    # As torchrun does it: the store is here, on a port that the system chose and that is taken from
    # then on.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with tempfile.NamedTemporaryFile("r") as log:
        processes = []
        for rank in range(ranks):
            of_rank = (
                environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            )
            call = str(ROOT / script), list(map(str, arguments)), of_rank, log.name
            processes.append(context.Process(target=_process, args=call, daemon=True))
        for process in processes:
            process.start()
        try:
            while None in (codes := [process.exitcode for process in processes]) and set(codes) <= {
                None,
                code,
            }:
                # of these codes: all may have ended since, and a wait for none of them has no end
                wait(
                    [process.sentinel for process, ended in zip(processes, codes) if ended is None]
                )
        finally:
            for process in processes:
                process.kill()
                process.join()
        said = log.read()
    codes = [process.exitcode for process in processes]
    assert codes == [code] * ranks, (
        f"{script}: exit codes {codes}, expected {code} of each rank\n{said[-4000:]}"
    )
    return said
