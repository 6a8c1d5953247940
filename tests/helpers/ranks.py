"""Run a function on several ranks: persistent worker processes, gloo over a file store (NCCL where there are GPUs).

    results = on_ranks(4, function, *args)      # function(group, device, *args) on every rank, in rank order

A worker that raises reports its exception (`Failure`); one that does not answer in time is killed with its pool, so
nothing hangs and the next call starts afresh.
"""

import atexit
import gc
import io
import multiprocessing
import multiprocessing.connection
import tempfile
import time
import traceback
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from gloo import share_one_device
from interpreter import patch_interpreter

AFTER_A_FAILURE = 60.0  # seconds
TIMEOUT = 600.0  # seconds; a collective that waits longer fails; none does, on the busiest machine


def start_context(cuda):
    """How ranks' processes start: forked from one that has imported torch, 0.1 s instead of 4; with
    CUDA, spawned."""
    if cuda:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # nothing that might begin CUDA
    ours = "triton" if torch.cuda.is_available() else "tp_headloss.engine.triton"
    modules = ["torch", "torch.distributed", "torch._dynamo", ours, "pytest", "hypothesis"]
    modules.append("matplotlib.pyplot")  # a second of each run of launch/
    context.set_forkserver_preload(modules)
    return context


def seed(number):
    """torch.manual_seed, which takes 3 ms without CUDA: it keeps a traceback for each kind of
    device."""
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(number)


class Failure(NamedTuple):
    kind: str
    message: str
    trace: str


def _to_bytes(result):
    buffer = io.BytesIO()  # bytes, because tensors sent through a pipe die with their worker
    torch.save(result, buffer)
    return buffer.getvalue()


def _from_bytes(data):
    # any object, and no less safe than the pipe, which unpickles: it comes from this process's own
    # children
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _worker(rank, world_size, store, pipe):
    gc.freeze()  # what was imported, so that no collection of garbage looks through it
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    else:
        patch_interpreter()
        share_one_device()
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            seed(0)
            result = function(dist.group.WORLD, device, *args)
        except Exception as error:  # reported to the parent, which decides
            result = Failure(type(error).__name__, str(error), traceback.format_exc())
        pipe.send_bytes(_to_bytes(result))
    dist.destroy_process_group()


class Pool:
    def __init__(self, world_size):
        context = start_context(torch.cuda.is_available())
        store = f"{tempfile.mkdtemp()}/store"
        pipes = [context.Pipe() for _ in range(world_size)]
        self.pipes = [parent for parent, _ in pipes]
        self.workers = [
            context.Process(target=_worker, args=(r, world_size, store, child), daemon=True)
            for r, (_, child) in enumerate(pipes)
        ]
        for worker in self.workers:
            worker.start()

    def call(self, function, args, failures):
        """Results in rank order. Where one rank fails, the others may wait for it: AFTER_A_FAILURE,
        then they are killed, and only the failure is told."""
        for pipe in self.pipes:
            pipe.send((function, args))
        results, deadline = {}, time.monotonic() + 2 * TIMEOUT
        while len(results) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in results]
            ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                result = results[self.pipes.index(pipe)] = _from_bytes(pipe.recv_bytes())
                if isinstance(result, Failure) and not failures:
                    deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE)
            if not ready:
                self.kill()
                failed = [
                    f"rank {r}: {x.trace}" for r, x in results.items() if isinstance(x, Failure)
                ]
                ranks = set(range(len(self.pipes))) - set(results)
                raise TimeoutError(
                    "\n".join([f"ranks {ranks} did not answer {function.__name__}{args}", *failed])
                )
        return [results[rank] for rank in range(len(self.pipes))]

    def kill(self):
        for worker in self.workers:
            worker.kill()
        POOLS.pop(len(self.workers), None)

    def close(self):
        for pipe in self.pipes:
            pipe.send(None)
        for worker in self.workers:
            worker.join(10)
        self.kill()


POOLS: dict[int, Pool] = {}


@atexit.register
def _close_pools():
    for pool in list(POOLS.values()):
        pool.close()


def on_ranks(world_size, function, *args, failures=False):
    """Results in rank order; a Failure on any rank raises unless `failures`. One rank runs here,
    without a group."""
    if world_size == 1:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        seed(0)
        try:
            return [_from_bytes(_to_bytes(function(None, device, *args)))]
        except Exception as error:
            if not failures:
                raise
            return [Failure(type(error).__name__, str(error), traceback.format_exc())]
    return _in_groups(world_size, function, args, failures)


def on_a_group_of_one(function, *args):
    """The result of one rank that has a process group, as torchrun with one process has it."""
    (result,) = _in_groups(1, function, args, failures=False)
    return result


def _in_groups(world_size, function, args, failures):
    if torch.cuda.is_available() and torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs, has {torch.cuda.device_count()}")
    pool = POOLS.get(world_size) or POOLS.setdefault(world_size, Pool(world_size))
    results = pool.call(function, args, failures)
    for rank, result in enumerate(results):
        if isinstance(result, Failure) and not failures:
            raise AssertionError(f"rank {rank}: {result.trace}")
    return results
