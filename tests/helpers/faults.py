"""Ranks that may die: each does what it is told, one job at a time, and reports what became of it and when.

    with Ranks(2) as ranks:
        ranks.start(0, function, *args)   # function(group, device, *args) on rank 0; returns at once
        ranks.kill(1)
        ranks.result(0)                   # an Outcome, also if the process died

Unlike those of `ranks.on_ranks` these processes serve one test and have a short timeout. Leaving the block kills
whichever is left, by its id, and fails if any is still there then, be it as a zombie. gloo and CPU tensors, also on
machines with GPUs, or NCCL.
"""

import importlib
import os
import signal
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ranks import start_context

TIMEOUT = 5.0  # seconds, of the process group
GRACE = 5.0  # seconds that a survivor may take beyond it


class Outcome(NamedTuple):
    kind: str  # "returned", "died", or the exception's type
    what: Any  # the value, the exit code, or the message
    ended: float  # time.monotonic(), which all processes of a host share
    took: float  # seconds

    @property
    def failed(self) -> bool:
        return self.kind != "returned"


def _rank(rank, size, store, pipe, nccl, environment):
    os.environ.update(environment)
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if nccl else torch.device("cpu")
    if nccl:
        torch.cuda.set_device(device)
    # the jobs' module: beside other work that takes longer than the timeout
    importlib.import_module("test_faults")
    pipe.send(None)  # all meet when the slowest has come so far
    pipe.recv()
    dist.init_process_group(
        "nccl" if nccl else "gloo", init_method=f"file://{store}", rank=rank, world_size=size,
        timeout=timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    failure = None
    while (job := pipe.recv()) is not None:
        function, args, failure = *job, None
        begin = time.monotonic()
        try:
            kind, what = "returned", function(dist.group.WORLD, device, *args)
        except Exception as error:  # reported, and raised again when this process is told to leave
            kind, what, failure = type(error).__name__, str(error), error
        end = time.monotonic()
        pipe.send(Outcome(kind, what, end, end - begin))
    if failure is not None:
        raise failure
    dist.destroy_process_group()


class Ranks:
    def __init__(self, size: int, nccl: bool = False, environment: dict[str, str] | None = None):
        self.size, self.nccl, self.environment = size, nccl, environment or {}
        self.pipes, self.processes = [], []
        self.folder = tempfile.TemporaryDirectory()

    def __enter__(self):
        try:
            self._begin()
        except BaseException:
            self._end()
            raise
        return self

    def _begin(self):
        context = start_context(self.nccl)
        for rank in range(self.size):
            pipe, child = context.Pipe()
            args = rank, self.size, f"{self.folder.name}/store", child, self.nccl, self.environment
            process = context.Process(target=_rank, args=args, daemon=True)
            process.start()
            child.close()  # so that a rank that died is the end of its pipe
            self.pipes.append(pipe)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()
        for pipe in self.pipes:
            pipe.send(None)

    def start(self, rank: int, function, *args) -> None:
        self.pipes[rank].send((function, args))

    def result(self, rank: int, within: float = TIMEOUT + GRACE + 30) -> Outcome:
        """Of the job that was started last; a rank that never answers is an error of the test."""
        pipe, process, begin = self.pipes[rank], self.processes[rank], time.monotonic()
        assert wait([pipe, process.sentinel], within), f"rank {rank} hangs: no answer in {within} s"
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            process.join(10)
            now = time.monotonic()
            return Outcome("died", process.exitcode, now, now - begin)

    def everywhere(self, function, *args, **of_rank) -> list[Outcome]:
        """`of_rank`: rank1=(..), its arguments if they are others."""
        for rank in range(self.size):
            self.start(rank, function, *of_rank.get(f"rank{rank}", args))
        return [self.result(rank) for rank in range(self.size)]

    def signal(self, rank: int, number: int) -> float:
        """-> when, before it can have any effect."""
        now = time.monotonic()
        os.kill(self.processes[rank].pid, number)
        return now

    def kill(self, rank: int) -> float:
        now = self.signal(rank, signal.SIGKILL)
        self.processes[rank].join(10)
        assert self.processes[rank].exitcode == -signal.SIGKILL
        return now

    def leave(self, rank: int) -> int | None:
        """End a rank as its program would, with the exception of its last job if there was one ->
        its exit code."""
        self.pipes[rank].send(None)
        self.processes[rank].join(TIMEOUT + GRACE)
        return self.processes[rank].exitcode

    def _end(self) -> list[int]:
        """-> the ids of processes that are still there."""
        for process in self.processes:
            process.kill()
            process.join(10)
        self.folder.cleanup()
        return [process.pid for process in self.processes if _exists(process.pid)]

    def __exit__(self, kind, *_):
        left = self._end()
        assert kind is not None or not left, f"processes {left} are left"


def _exists(pid):
    """Also as a zombie, which nobody waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
