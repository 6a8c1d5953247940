"""Ranks of a data-parallel x tensor-parallel job, and every collective the trainer itself makes."""

import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

OF_TORCHRUN = "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"


@dataclass(frozen=True)
class Ranks:
    """Where this process stands. A group is None where it would hold this process alone."""

    device: torch.device
    rank: int = 0
    world: int = 1
    dp_rank: int = 0
    dp: int = 1
    tp_rank: int = 0
    tp: int = 1
    dp_group: dist.ProcessGroup | None = None
    tp_group: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None  # dimensions "dp" and "tp"; None in a single process

    def agree(self, tokens: int, stop: bool) -> tuple[int, bool]:
        """The token count over all data-parallel ranks, and whether any rank wants to stop. Host
        numbers, no GPU."""
        if self.world == 1:
            return tokens, stop
        both = torch.tensor([tokens, stop], dtype=torch.int64)
        dist.all_reduce(both)
        # The ranks of one tensor-parallel group count the same tokens.
        return int(both[0]) // self.tp, bool(both[1])

    def meet(self) -> None:
        self.agree(0, False)

    def gather(self, value) -> list:
        """The small picklable values of all ranks, in their order."""
        if self.world == 1:
            return [value]
        values = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    @contextmanager
    def together(self):
        """Run a block that may fail on some ranks only: an error on one rank ends all of them, with
        its message."""
        error = message = None
        try:
            yield
        except (Exception, SystemExit) as caught:
            error = caught
            message = (
                str(error)
                if isinstance(error, (SystemExit, OSError))
                else f"{type(error).__name__}: {error}"
            )
        messages = [text for text in self.gather(message) if text is not None]
        if error is not None and not isinstance(error, (SystemExit, OSError)):
            raise error  # a bug, with its traceback
        if messages:
            raise SystemExit(messages[0])

    def first(self, make: Callable[[], Any]):
        """The result of `make()`, which rank 0 calls; all ranks get it, or its error."""
        result = None
        with self.together():
            if self.rank == 0:
                result = make()
        return self.gather(result)[0]

    def sum_over_data(self, x: torch.Tensor) -> torch.Tensor:
        if self.dp_group is not None:
            dist.all_reduce(x, group=self.dp_group)
        return x


def restarts() -> int:
    """How often this host's torchrun has started its processes again, because one of them had
    died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def job() -> str | None:
    """A name of this job that its restarts share and no other job has; None without torchrun's
    --rdzv-id or agent.

    No count of restarts: hosts' counts differ, and one that has joined later may have rank 0."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run in (None, "none"):  # none: torchrun's default
        return (
            f"agent {os.getppid()}"
            if run and os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
            else None
        )
    return run


def sizes(tp: int | None, alone: bool) -> tuple[int, int]:
    """Numbers of data-parallel and of tensor-parallel ranks.

    tp: None for all processes of the job. alone: whether one process may run without torchrun.
    """
    world = processes(alone)
    tp = tp or world
    if world % tp:
        raise SystemExit(f"tp = {tp} does not divide the {world} process(es) of this job")
    return world // tp, tp


def processes(alone: bool) -> int:
    """Number of processes of the job; SystemExit where they need torchrun and it has not started
    them."""
    if alone and os.environ.get("WORLD_SIZE", "1") == "1":
        return 1
    missing = [name for name in OF_TORCHRUN if not os.environ.get(name)]
    if missing:
        raise SystemExit(
            f"expected the variables of torchrun, got no {', '.join(missing)}. Start it with "
            f"torchrun: torchrun --standalone --nproc-per-node 2 {sys.argv[0]} .."
        )
    return int(os.environ["WORLD_SIZE"])


def start(tp: int | None, device: str, alone: bool = True) -> Ranks:
    """Join the job that torchrun started, see `sizes`; without torchrun this process is the whole
    job."""
    dp, tp = sizes(tp, alone)
    world, local_rank = dp * tp, int(os.environ.get("LOCAL_RANK", 0))
    gpus, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device == "auto":
        device = "cuda" if gpus >= processes else "cpu"
    if device == "cuda":
        # on all ranks of the host, or those that have a GPU would wait for the others
        if gpus < processes:
            raise SystemExit(
                f"--device cuda needs one GPU per process: {processes} process(es), {gpus} GPU(s)"
            )
        torch.cuda.set_device(local_rank)
        where = torch.device("cuda", local_rank)
    else:
        where = torch.device("cpu")
    if world == 1:
        return Ranks(where)
    timeout = timedelta(minutes=10)
    store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":  # of torchrun, one host
        # torchrun keeps its store over restarts, with the addresses of the dead. (With several
        # hosts, whose counts of restarts differ, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes it
        # begin a new one.)
        store = dist.PrefixStore(f"attempt-{restarts()}", store)
    # gloo beside NCCL: counts and flags are host numbers and never wait for the GPU.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp"))
    return Ranks(
        where, rank=dist.get_rank(), world=world, dp_rank=mesh["dp"].get_local_rank(), dp=dp,
        tp_rank=mesh["tp"].get_local_rank(), tp=tp, dp_group=mesh["dp"].get_group() if dp > 1 else None,
        tp_group=mesh["tp"].get_group() if tp > 1 else None, mesh=mesh,
    )  # fmt: skip
