"""Host time of one training step of ours beside F.cross_entropy: what Python, dispatch and launches take of the CPU.

    python scripts/bench/host_time.py               # on the GPU, or without one on the CPU with the torch backend
    python scripts/bench/host_time.py --tokens 4096 --vocab 32000 --json host_time.json

A step is forward and backward of the mean cross-entropy of logits [tokens, vocab], by `HeadLoss([CrossEntropy()])` and
by `torch.nn.functional.cross_entropy`, on the same tensors in the same process. Nothing waits for the device within a
step: its time is from the call to the return of `backward()`, when all kernels have been launched. The two take turns
in batches of steps, and the device catches up between batches, so that its queue never fills. Times are medians over
all steps, in microseconds; [10 %, 90 %] beside them say how steady the machine was.

Both are measured twice: in one thread (`torch.autograd.set_multithreading_enabled(False)`), and with the thread that
autograd keeps for each GPU, which runs the backward while the caller waits. On a CPU autograd has no such thread, and
the time of a step includes its arithmetic, in one thread of torch: choose a small shape.
"""

import argparse
import gc
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tp_headloss import CrossEntropy, HeadLoss

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
THREADS = {"one thread": False, "autograd's own threads": True}  # -> multithreading of autograd


def steps_of(
    tokens: int, vocab: int, dtype: torch.dtype, device: str
) -> dict[str, Callable[[], None]]:
    """Name -> one training step: forward and backward, on tensors that both share."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, vocab, generator=generator).to(device, dtype).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=generator).to(device)
    head = HeadLoss([CrossEntropy()])

    def ours():
        logits.grad = None
        head(logits, labels).loss.backward()

    def torchs():
        logits.grad = None
        F.cross_entropy(logits, labels).backward()

    return {"ours": ours, "F.cross_entropy": torchs}


def catch_up(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def host_times(
    steps: dict[str, Callable[[], None]], device: str, batches: int, batch: int
) -> dict[str, list[float]]:
    """Name -> microseconds of each step, in batches that take turns."""
    times = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    try:
        for number in range(batches + 2):  # the first two warm up
            for name, step in steps.items():
                catch_up(device)
                for _ in range(batch):
                    begin = time.perf_counter_ns()
                    step()
                    end = time.perf_counter_ns()
                    if number >= 2:
                        times[name].append((end - begin) / 1000)
    finally:
        gc.enable()
        catch_up(device)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the logits; default: bf16 on a GPU, fp32 on a CPU"
    )
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--batch", type=int, default=20, help="steps until the device catches up")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    dtype = args.dtype or ("bf16" if args.device == "cuda" else "fp32")
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    versions = {package: importlib.metadata.version(package) for package in ("torch", "triton")}
    report = {
        "device": name,
        "dtype": dtype,
        "tokens": args.tokens,
        "vocab": args.vocab,
        "versions": versions,
    }
    print(
        f"{name}, {args.tokens} x {args.vocab} {dtype}, {versions}, {args.batches} x {args.batch} steps"
    )

    steps = steps_of(args.tokens, args.vocab, DTYPES[dtype], args.device)
    for threads, multithreading in THREADS.items():
        with torch.autograd.set_multithreading_enabled(multithreading):
            times = host_times(steps, args.device, args.batches, args.batch)
        deciles = {
            name: statistics.quantiles(found, n=10, method="inclusive")
            for name, found in times.items()
        }
        shown = [
            f"{name} {found[4]:.1f} us [{found[0]:.1f}, {found[8]:.1f}]"
            for name, found in deciles.items()
        ]
        ratio = deciles["ours"][4] / deciles["F.cross_entropy"][4]
        print(f"{threads}: {', '.join(shown)}, ratio {ratio:.2f}", flush=True)
        report[threads] = {
            name: [found[0], found[4], found[8]] for name, found in deciles.items()
        } | {"ratio": ratio}
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
