"""Options, clock, CUDA graphs, memory, report: how benchmarks run and measure; `bench.py` says what
numbers mean."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import gc
import importlib.metadata
import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import tp_headloss

ROOT = Path(__file__).parents[2]


def parser_of(
    doc: str, *, tokens: list[int], vocab: int, seconds: float
) -> argparse.ArgumentParser:
    """The options that benchmarks share."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=tokens)
    parser.add_argument("--vocab", type=int, nargs="+", default=[vocab], help="global vocabulary")
    parser.add_argument(
        "--implementations", nargs="+", default=["*"], help="names or patterns such as 'ours*'"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="for one measurement, if 5 repeats fit"
    )
    parser.add_argument(
        "--limit", type=float, default=60.0, help="seconds for anybody's first step, on one rank"
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--json", help="file for the results")
    return parser


def is_wanted(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def versions(packages: Iterable[str] = ()) -> dict[str, str]:
    """Of Python, torch, this package, and those of the others that are installed."""
    out = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "tp_headloss": tp_headloss.__version__,
    }
    if torch.version.cuda:
        out |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    for package in sorted({"triton", "nvidia-cutlass-dsl", *packages} - {"torch"}):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            out[package] = importlib.metadata.version(package)
    return out


def command(file: str, argv: list[str] | None) -> str:
    """How to run this again, without the folders of this machine."""
    arguments = sys.argv[1:] if argv is None else argv
    words = [os.path.basename(word) if os.path.isabs(word) else word for word in arguments]
    ranks = dist.get_world_size() if "RANK" in os.environ else 0
    launcher = f"torchrun --standalone --nproc-per-node {ranks} " if ranks else "python "
    return launcher + shlex.join([str(Path(file).resolve().relative_to(ROOT)), *words])


def join(device: str) -> tuple[torch.device, dist.ProcessGroup | None]:
    """This process's device, and the group if torchrun started several."""
    if "RANK" not in os.environ:
        return torch.device(device), None
    index = int(os.environ["LOCAL_RANK"])
    if device == "cpu":
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
        return torch.device("cpu"), dist.group.WORLD
    torch.cuda.set_device(index)
    dist.init_process_group(
        "nccl", device_id=torch.device("cuda", index), timeout=timedelta(minutes=5)
    )
    return torch.device("cuda", index), dist.group.WORLD


@contextlib.contextmanager
def reported(
    args,
    file: str,
    argv: list[str] | None,
    cells: Callable,
    print_table: Callable,
    packages=(),
    repeats=50,
):
    """Joins the other ranks -> the report of this run. Its table is printed even if the run is cut
    off.

    args: of `parser_of`
    file, argv: the benchmark and its arguments, by which it can be run again
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    device, group = join(args.device)
    machine = Machine(device, group, args.seconds, repeats)
    facts = {
        "device": torch.cuda.get_device_name() if machine.cuda else "CPU",
        "gpus": torch.cuda.device_count() if machine.cuda else 0,
        "tp": 1 if group is None else dist.get_world_size(group),
        "dtype": args.dtype,
        "versions": versions(packages),
        "command": command(file, argv),
    }
    report = Report(machine, cells, args.json, args.limit, **facts)
    try:
        yield report
    finally:
        if report.first:
            print(report.facts)
            print_table(report.rows)
    if dist.is_initialized():
        dist.destroy_process_group()


def reason(error: BaseException) -> str:
    text = (str(error).strip() or "no message").splitlines()[0]
    if "synchronizing CUDA operation" in text:
        return "host synchronisation"
    return f"{type(error).__name__}: {text}"[:160]


class Machine:
    """Clock, CUDA graphs and memory of the device, and the few words that the ranks exchange about
    them."""

    def __init__(self, device: torch.device, group, seconds: float, repeats: int):
        self.device, self.group, self.seconds, self.repeats = device, group, seconds, repeats
        self.cuda = device.type == "cuda"
        if self.cuda:
            # a capture cannot include what ran on the default stream
            torch.cuda.set_stream(torch.cuda.Stream())
            # long enough to issue a replay in
            self.flushed = torch.empty(512 << 20, dtype=torch.uint8, device=device)
        self.token = torch.zeros(1, device=device)

    def synchronize(self):
        if self.cuda:
            torch.cuda.synchronize()

    def mark(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def microseconds(self, start, end):
        return start.elapsed_time(end) * 1e3 if self.cuda else (end - start) * 1e6

    def slowest(self, numbers: list[float]) -> torch.Tensor:
        """The largest of every number over the ranks."""
        out = torch.tensor(numbers, dtype=torch.float64)
        if self.group is None:
            return out
        out = out.to(self.device)
        dist.all_reduce(out, op=dist.ReduceOp.MAX, group=self.group)
        return out.cpu()

    def anywhere(self, flag: bool) -> bool:
        return bool(self.slowest([float(flag)]).item())

    def flush(self):
        if self.cuda:
            self.flushed.zero_()

    def align(self):
        """Lets the devices of all ranks start together, without waiting for the host."""
        if self.group is not None:
            dist.all_reduce(self.token, group=self.group)

    def timed(self, run, prepare=(), steps: int = 1) -> list[float]:
        def once(steps):
            for action in prepare:
                action()
            start = self.mark()
            for _ in range(steps):
                run()
            return start, self.mark()

        def cost(steps):
            self.synchronize()
            start = time.perf_counter()
            once(steps)
            self.synchronize()
            return self.slowest([time.perf_counter() - start]).item()

        once(1)
        steps = max(1, min(steps, int(self.seconds / 5 / cost(1))))
        repeats = max(5, min(self.repeats, int(self.seconds / cost(steps))))
        marks = [once(steps) for _ in range(repeats)]
        self.synchronize()
        times = self.slowest([self.microseconds(*pair) / steps for pair in marks])
        return [
            round(t, 1)
            for t in times.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        ]

    def captured(self, step):
        """The step as a CUDA graph -> its replay. Raises what stands in the way."""
        if not self.cuda:
            raise RuntimeError("no CUDA")
        # a failed capture leaves a mess, so a host synchronisation is found before
        for mode in ("default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread-local: the communication library's watchdog thread queries events meanwhile
        with torch.cuda.graph(
            graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            step()
        self.settle()
        return graph.replay

    def host_time(self, step) -> float:
        times, begin = [], time.perf_counter()
        while self.anywhere(
            len(times) < 5 or (len(times) < 20 and time.perf_counter() - begin < self.seconds)
        ):
            self.synchronize()
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        return round(self.slowest([sorted(times)[len(times) // 2] * 1e6]).item(), 1)

    def extra_memory(self, step) -> float | None:
        """MiB at the peak of a step, above what was there before."""
        if not self.cuda:
            return None
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            peak = torch.cuda.max_memory_allocated() - before
        return round(self.slowest([peak / 2**20]).item(), 1)

    def release(self):
        """Gives unused memory back, so that nobody's peak or out-of-memory is somebody else's."""
        if self.cuda:
            gc.collect()
            torch.cuda.empty_cache()
            self.settle()

    def settle(self):
        """Freed memory, also that of a capture, is cleaned in the background: what runs meanwhile
        is a sixth slower."""
        time.sleep(0.1)

    def copy_bandwidth(self) -> float:
        """Bytes read and written per second."""
        a = torch.empty(
            (2 << 30) if self.cuda else (8 << 20), dtype=torch.uint8, device=self.device
        )
        b = torch.empty_like(a)
        return 2e6 * a.numel() / self.timed(lambda: b.copy_(a))[1]


class TimedOut(BaseException):
    """An implementation that was not set up in time. No `except Exception` on the way swallows
    it."""


class Report:
    """The results of a run: facts about it, and rows, each printed and written as soon as it is
    measured.

    Args:
        machine: its first rank prints and writes
        cells: row -> what is printed of it
        file: for the JSON, or None
        limit: seconds for the set-up of an implementation. Several ranks have none: those that are
            left would wait.
        facts: what the JSON holds beside its rows
    """

    def __init__(
        self,
        machine: Machine,
        cells: Callable[[dict], str],
        file: str | None,
        limit: float,
        **facts,
    ):
        self.machine, self.cells, self.file = machine, cells, file
        self.limit = limit if machine.group is None else 0.0  # 0: no alarm
        self.first = machine.group is None or dist.get_rank(machine.group) == 0
        self.facts, self.rows = facts, []

    @contextlib.contextmanager
    def row(self, name: str, row: dict):
        """Measures one row in its block. The name is printed before, so that the log of a killed
        run ends with it."""
        begin = time.perf_counter()
        self.rows.append(row)
        self.print(f"{name}: ", end="")
        try:
            yield
        except TimedOut:
            row["status"] = f"timed out: not set up in {self.limit:g} s"
        except ImportError as error:
            row["status"] = f"absent: {reason(error)}"
        except Exception as error:
            row["status"] = f"failed: {reason(error)}"
        except BaseException:
            row["status"] = "stopped"
            raise
        finally:
            self.print(
                f"{self.cells(row)} ({time.perf_counter() - begin:.1f} s, set-up {row.get('set_up_s', '-')} s)"
            )
            self.write()

    @contextlib.contextmanager
    def set_up(self, row: dict):
        """Stops the first step of an implementation, which may compile or tune for minutes, at the
        limit.

        A signal is handled in the main thread, between two lines of Python: backward runs in that
        thread here, and what is busy in C is stopped when it returns.
        """

        def stop(*_):
            raise TimedOut

        begin, handler = time.perf_counter(), signal.signal(signal.SIGALRM, stop)
        timer = signal.setitimer(signal.ITIMER_REAL, self.limit)
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
            self.machine.synchronize()
        finally:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, handler)
            row["set_up_s"] = round(time.perf_counter() - begin, 1)

    def print(self, *words, **options):
        if self.first:
            print(*words, **options, flush=True)

    def write(self):
        if self.first and self.file:
            Path(self.file).write_text(json.dumps(self.facts | {"rows": self.rows}, indent=1))


def times(forward, both, machine, prepare, wrap, steps):
    """forward and both, each as the run that `wrap` makes of a step, and their difference."""
    both, forward = (machine.timed(wrap(step), prepare, steps) for step in (both, forward))
    return {
        "both": both,
        "forward": forward,
        "backward": [None, max(0.0, round(both[1] - forward[1], 1)), None],
    }


def measure(function, batch, problem, machine, do_bench=False) -> dict:
    logits = batch.logits

    def forward():
        return function(batch)

    def both():
        torch.autograd.grad(function(batch), logits)

    both()
    out = {"extra_memory_mib": machine.extra_memory(both)}
    restore = []
    if machine.anywhere(not torch.equal(logits, problem.values)):
        restore = [problem.refill]
        problem.refill()
    out["overwrites_logits"] = bool(restore)
    out["eager_us"] = times(
        forward, both, machine, [*restore, machine.align], lambda step: step, 10
    )
    out["host_us"] = machine.host_time(both)
    problem.refill()
    out["graph_us"] = None
    try:
        out["graph_us"] = times(
            forward, both, machine, [*restore, machine.flush, machine.align], machine.captured, 1
        )
    except Exception as error:
        out["graph_failure"] = reason(error)
    # ranks would repeat it unequally often
    if do_bench and out["graph_us"] and not restore and machine.group is None:
        from triton.testing import do_bench_cudagraph

        out["do_bench_us"] = round(1e3 * do_bench_cudagraph(both, return_mode="median"), 1)
    size = torch.linalg.vector_norm(logits, dtype=torch.float32).item()
    if machine.anywhere(not 0 < size < math.inf):
        raise RuntimeError(f"the logits were not sane after the timing: their norm is {size}")
    return out
