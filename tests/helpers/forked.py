"""Runs a script as torchrun would, with ranks that are forked from a process that has imported torch:

python tests/helpers/forked.py RANKS SCRIPT ARGUMENTS...

For hosts' environments, where its import takes seconds of each rank, and of torchrun. Within the
process of the tests launcher.py does the same.
"""

import gc
import os
import runpy
import signal
import sys
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist


def is_fork(processes: list[int]) -> bool:
    """Whether this is the process that it made, which the other one adds to them."""
    processes.append(os.fork())
    return processes[-1] == 0


def ended(processes: list[int]) -> bool:
    """Whether all of them ended well; the first that did not ends the others."""
    left = set(processes)
    while left:
        process, status = os.wait()
        left.remove(process)
        if status:
            for other in left:
                os.kill(other, signal.SIGKILL)
            return False
    return True


def main(ranks: int, script: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what was imported, so that no collection of garbage looks through it
    told, tell = os.pipe()
    processes: list[int] = []
    rank = next((r for r in range(ranks) if is_fork(processes)), None)
    if rank is None:
        # after the forks, as it has a thread; on a port that the system chooses
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        os.write(tell, b"%8d" % store.port * ranks)
        sys.exit(not ended(processes))
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": os.read(told, 8).decode().strip(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
