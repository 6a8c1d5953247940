"""The tests' generated cases for as long as you like, and whether the ranks leak anything meanwhile.

.venv/bin/python scripts/check/soak.py --examples 50000
.venv/bin/python scripts/check/soak.py --hours 8 --ranks 1 2 4 --seed 7
.venv/bin/python scripts/check/soak.py --case "Case(seed=..)"        # one example, as a failure prints it

A round is `--round` examples for every number of ranks, by the check of tests/promises/test_generated.py, a tenth on
the Triton backend (interpreted where there is no GPU), from a seed of its own: `--seed` is the first round's, the next
one's is one more. Exit status 1 with the seed of the failing round, or if file descriptors or device memory grew after
the first two rounds.
"""

import argparse
import gc
import os
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/promises", "tests/helpers", "tests", ".")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
# of the interpreter, about NaN, in the ranks' processes
os.environ.setdefault("PYTHONWARNINGS", "ignore")

import torch  # noqa: E402

WARM_UP = 2  # rounds
# Bytes on the device: symmetric memory is set up anew for more tokens than ever before, each time
# with 1 KiB of addresses and counters that torch's allocator sees. What a call left behind would be
# thousands of times that
# times that
TOLERATED = 16 << 10


def resources(group, device):
    """Open file descriptors, resident and device memory in bytes, of this rank."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return (
        len(os.listdir("/proc/self/fd")),
        resident,
        torch.cuda.memory_allocated() if device.type == "cuda" else 0,
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--examples", type=int, default=None)
    parser.add_argument("--hours", type=float, default=None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6)
    parser.add_argument(
        "--round", type=int, default=300, help="examples per rank count, then all are looked at"
    )
    parser.add_argument("--case", default=None)
    args = parser.parse_args()
    # not above, because the ranks' processes import this file, too
    import conftest  # noqa: F401  # interprets kernels where there is no GPU
    import test_generated
    from generated_case import run_case
    from ranks import on_ranks
    from strategies import parse_case

    if args.case:
        case = parse_case(args.case)
        test_generated.check(case, on_ranks(len(case.cuts) - 1, run_case, case))
        return print("passes")
    limit = args.examples if args.examples or args.hours else 50_000
    began, total, number = time.monotonic(), 0, args.seed
    before, now = {}, {}

    def elapsed():
        return time.monotonic() - began

    def more():
        return (limit is None or total < limit) and (
            args.hours is None or elapsed() < 3600 * args.hours
        )

    print(f"seed {args.seed}, ranks {args.ranks}, {limit or 'any number of'} examples", flush=True)
    while more():
        test_generated.SEED = number
        for world_size in args.ranks:
            try:
                for backend, count in (
                    ("torch", args.round - args.round // 10),
                    ("triton", args.round // 10),
                ):
                    test_generated.check_cases(world_size, backend, count)
                    total += count
            except Exception as error:
                traceback.print_exception(error)
                print(
                    f"FAILED after {total} examples, {elapsed() / 60:.1f} min, {world_size} ranks: --seed {number}"
                )
                return 1
            now[world_size] = on_ranks(world_size, resources)
        number += 1
        if number - args.seed <= WARM_UP:
            before = dict(now)
        resident = max(r[1] for ranks in now.values() for r in ranks) / 2**20
        rate = total / elapsed()
        print(
            f"seed {number - 1}: {total} examples, {rate:.1f}/s, largest rank {resident:.0f} MiB",
            flush=True,
        )

    leaks = 0
    for world_size in args.ranks:
        for rank, (a, b) in enumerate(zip(before[world_size], now[world_size])):
            fds, resident, device = (y - x for x, y in zip(a, b))
            leaks += fds > 0 or device > TOLERATED
            grown = f"{fds:+d} file descriptors, {resident / 2**20:+.1f} MiB resident, {device:+d} bytes on the device"
            print(f"{world_size} ranks, rank {rank}: {grown} after the first {WARM_UP} rounds")
    print(
        f"{total} examples in {elapsed() / 60:.1f} min, 0 failures, {leaks} leaks; seeds {args.seed} to {number - 1}"
    )
    return 1 if leaks else 0


if __name__ == "__main__":
    sys.exit(main())
