"""Trains one small model in a host, with the host's own head and with ours in turn: losses, times,
memory, and the largest micro-batch that fits. A script of this folder calls `main` with a function
for each head."""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import json
import os
import re
import statistics
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "launch")]
# ruff: noqa: E402
import data
import parallel
from clock import Clock

OURS = "tp_headloss"
FP8 = f"{OURS}, gradients in fp8"
MEMORY = 0.92  # of the card, for this process's tensors: the rest is the driver's and NCCL's


@dataclass(frozen=True)
class Shape:
    """Half the layers of Llama 3.2 1B, with an output layer of its own."""

    layers: int = 8
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 8192
    vocab: int = 128256
    length: int = 4096
    batch: int = 2
    steps: int = 50
    most: int = 256  # rows at which the search for the largest micro-batch ends


TINY = Shape(
    layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=512, length=32, batch=2, steps=3, most=2
)


TURN = 20  # steps of each later turn


class Meter(Clock):
    """Losses, and the time of each step and of its head, from the last norm's output to the
    gradient of that output: on the device, and of the CPU that gives the device its work."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.losses, self.steps, self.heads, self.issued, self.hooks = [], [], [], [], []
        self.known: dict = {}  # what a host's own program has measured
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def watch(self, norm: torch.nn.Module) -> None:
        def hidden(module, args, out):
            if out.requires_grad:
                self.heads.append([self.now()])
                self.issued.append([time.perf_counter()])
                out.register_hook(functools.partial(end, self.heads[-1], self.issued[-1]))

        def end(on_device, issued, _):
            on_device.append(self.now())
            issued.append(time.perf_counter())

        self.hooks.append(norm.register_forward_hook(hidden))

    def begin(self) -> None:
        self.steps.append([self.now()])

    def end(self) -> None:
        self.steps[-1].append(self.now())

    def result(self) -> dict:
        """Medians of all steps but the first fifth, which compile and allocate."""
        if self.cuda:
            torch.cuda.synchronize()
        found = {"loss": [float(loss) for loss in self.losses]}
        for name, spans in {"step_ms": self.steps, "head_ms": self.heads}.items():
            if spans:
                times = [self.seconds(*span) for span in spans]
                found[name] = 1e3 * statistics.median(times[len(times) // 5 :])
        if self.cuda:
            if self.issued:
                times = [end - begin for begin, end in self.issued]
                found["head_issued_ms"] = 1e3 * statistics.median(times[len(times) // 5 :])
            found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return found | self.known


# rows of a micro-batch, steps, where to report -> None; called several times for one model
Train = Callable[[int, int, Meter], None]


class Run:
    """The ranks, the shape and the text of one call of a script."""

    dp = 1  # ranks that have rows of their own

    def __init__(self, args: argparse.Namespace):
        shape = TINY if args.tiny else Shape()
        self.args, self.shape = args, replace(shape, steps=args.steps or shape.steps)
        self.ranks = parallel.start(None, "cpu" if args.tiny else "cuda")
        self.device, self.cuda = self.ranks.device, self.ranks.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        # one limit on all ranks, or one would run out of memory while the others wait for it
        if self.cuda:
            torch.cuda.set_per_process_memory_fraction(MEMORY)
        self.text = torch.tensor(
            word_ids("\n".join(data.documents(None, 1 if args.tiny else 12)), self.shape.vocab)
        )

    def rows(self, count: int, step: int) -> torch.Tensor:
        """ids [count, length + 1] of the step's micro-batch, the same on all ranks."""
        generator, width = torch.Generator().manual_seed(step), self.shape.length + 1
        starts = torch.randint(len(self.text) - width, (count, 1), generator=generator)
        return self.text[starts + torch.arange(width)]

    def batch(self, count: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ids, labels [count, length], shifted, on the device."""
        rows = self.rows(count, step).to(self.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def loop(self, rows: int, steps: int, meter: Meter, step: Callable) -> None:
        """step: ids, labels -> loss, of a host whose users write the loop themselves."""
        for number in range(steps):
            ids, labels = self.batch(rows, number)
            meter.begin()
            meter.losses.append(step(ids, labels).detach())
            meter.end()


def word_ids(text: str, vocab: int) -> list[int]:
    """A word, a space or a sign is a token: its id is a hash of it, between 3 and vocab."""
    return [
        3 + zlib.crc32(word.encode()) % (vocab - 3) for word in re.findall(r"\w+|\s+|[^\w\s]", text)
    ]


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def largest(fits: Callable[[int], bool], start: int, most: int) -> int:
    """The most rows that fit, to a sixteenth: doubled from start, then bisected. 0: not one row;
    most: or more."""
    low, high, rows = 0, None, start
    while True:
        if fits(rows):
            low = rows
        else:
            high = rows
        if low >= most or (high is not None and high - low <= max(1, low // 16)):
            return low
        rows = min(2 * low, most) if high is None else (low + high) // 2


def search(run: Run, train: Train) -> dict:
    def fits(rows: int) -> bool:
        """Whether two steps of this many rows have the memory, on all ranks."""
        meter, enough = Meter(run.device), True
        try:
            train(rows, 2, meter)
        except torch.cuda.OutOfMemoryError as error:
            # or cycles through autograd's graph would keep it
            traceback.clear_frames(error.__traceback__)
            enough = False
        for hook in meter.hooks:
            hook.remove()
        clean()
        return all(run.ranks.gather(enough))

    return {"largest": largest(fits, min(2 * run.shape.batch, run.shape.most), run.shape.most)}


def curve(run: Run, train: Train, steps: int | None = None) -> dict:
    shape, meter = run.shape, Meter(run.device)
    train(shape.batch, steps or shape.steps, meter)
    found = meter.result()
    found["tokens_per_s"] = 1e3 * run.dp * shape.batch * shape.length / found["step_ms"]
    if run.cuda:
        found["peak_gib"] = max(run.ranks.gather(found["peak_gib"]))
    return found


def again(run: Run, train: Train, found: dict) -> dict:
    """A curve's times once more. found: those of its head, of which the median of all turns counts."""
    turn = curve(run, train, min(run.shape.steps, TURN))
    turns = found.get("turns") or {name: [found[name]] for name in TIMES if name in found}
    turns = {name: [*values, turn[name]] for name, values in turns.items()}
    return {name: statistics.median(values) for name, values in turns.items()} | {"turns": turns}


TIMES = "step_ms", "head_ms", "head_issued_ms", "tokens_per_s"
PARTS = "curve", "search", "check"


def main(
    package: str, heads: dict[str, Callable[[Run], Train]], check: Callable | None = None, ways=()
) -> None:
    """package: of the host, for its version. heads: name -> function that builds the model; the
    host's own is first. check: function of a Run, for what else is recorded of the host. ways:
    other ways to train that --ways can name."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument(
        "--json", required=True, help="where the results go, after each part of the run"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on CPUs")
    parser.add_argument(
        "--heads", nargs="+", choices=list(heads), help="default: all; --tiny: not fp8"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ways", nargs="+", choices=ways, default=[])
    parser.add_argument("--steps", type=int, help="of the curve")
    parser.add_argument("--turns", type=int, default=2, help="of the curves of all heads")
    args = parser.parse_args()
    if args.heads is None:  # a tiny model is of fp32, which has no gradients in fp8
        args.heads = [name for name in heads if not (args.tiny and name == FP8)]
    run = Run(args)
    record = {
        "host": package, "own": next(iter(heads)), "ranks": run.ranks.world, "ways": run.args.ways,
        "shape": asdict(run.shape),
        "versions": {name: importlib.metadata.version(name) for name in (package, "torch", "triton")},
        "device": torch.cuda.get_device_name() if run.cuda else "cpu", "memory": MEMORY,
        "heads": {name: {} for name in run.args.heads},
    }  # fmt: skip
    found_of = record["heads"].items()
    curves, searches = (
        [
            (
                f"{part.__name__}, {name}",
                found,
                lambda part=part, name=name: part(run, heads[name](run)),
            )
            for name, found in found_of
        ]
        for part in (curve, search)
    )
    # every other one in the other order: what a step takes on its CPU drifts while the process lives
    turns = [
        (
            f"curve, {name}, again",
            found,
            lambda name=name, found=found: again(run, heads[name](run), found),
        )
        for turn in range(1, args.turns)
        for name, found in list(found_of)[:: -1 if turn % 2 else 1]
        if len(found_of) > 1
    ]
    checks = [] if check is None else [("check", record, lambda: check(run))]
    parts: list = [*curves, *turns, *checks, *searches]
    parts = [part for part in parts if part[0].split(",")[0] in run.args.parts]
    failed = False
    for name, found, measure in parts:
        torch.manual_seed(0)
        try:
            new = measure()
        except Exception as error:  # the other parts are measured all the same
            new, failed = {"error": f"{type(error).__name__}: {error}"[:300]}, True
            traceback.print_exc()
        found |= new
        clean()
        if run.ranks.rank == 0:
            shown = {
                key: f"{x[0]:.4f} to {x[-1]:.4f}" if key == "loss" else x for key, x in new.items()
            }
            held = (
                f", {torch.cuda.memory_allocated() / 2**30:.1f} GiB still held" if run.cuda else ""
            )
            print(f"{package}, {run.ranks.world} rank(s), {name}: {shown}{held}", flush=True)
            Path(run.args.json).write_text(json.dumps(record) + "\n")
    sys.stdout.flush()
    if run.ranks.world > 1:
        dist.barrier()
    os._exit(failed)  # hosts leave threads behind that would wait for each other
