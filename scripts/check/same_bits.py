"""Compare the bits of this tree's results with those of another revision: a refactoring must not change one.

    .venv/bin/python scripts/check/same_bits.py HEAD~1              # 400 calls with each backend, on the CPU or a GPU
    .venv/bin/python scripts/check/same_bits.py HEAD~3 --calls 2000 --backend torch

The calls are the cases that the tests generate (statistics and losses; sets, given ids, teachers, transforms,
reductions, types and layouts; not one launch), of logits and, every other one, of hidden states, in one process without
a group. Both trees make them from the same numbers. Their statistics, losses, sums and gradients are hashed, call by
call. The exit status is 1 if a call differs; its number and case are printed, and `--only NUMBER` makes it alone. Other
words of an error count as a difference, too.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(1, str(ROOT / "tests/helpers"))


def drawn(count: int, backend: str) -> list[str]:
    """Cases, as text."""
    from hypothesis import HealthCheck, given, seed, settings
    from strategies import cases

    found = []

    @seed(0)
    @settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(cases(1, backend))
    def keep(case):
        found.append(repr(case))

    keep()
    return found


def hashes(cases: dict[str, str]) -> dict[str, str]:
    """The hash of the bits of each call's results, or its error, by this process's tp_headloss."""
    import torch

    if not torch.cuda.is_available():
        import interpreter

        interpreter.patch_interpreter()
    from generated_case import run_case
    from strategies import parse_case

    found, device = {}, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for number, text in cases.items():
        case, linear = parse_case(text), None
        if int(number) % 2:
            has_one_sweep = case.head and case.reduction != "none" and case.dtype != "float16"
            linear = "one_sweep" if has_one_sweep and case.seed % 2 else "recompute"
        digest = hashlib.sha256()
        try:
            for value in run_case(None, device, case, linear).values():
                digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            found[number] = digest.hexdigest()
        except Exception as error:
            found[number] = f"{type(error).__name__}: {error}"
    return found


def run(tree: Path, cases: dict[str, str], jobs: int) -> dict[str, str]:
    """`hashes` in processes that import this tree's package."""
    environment, found, processes = (
        {**os.environ, "PYTHONPATH": str(tree), "PYTHONWARNINGS": "ignore"},
        {},
        [],
    )
    if not Path("/dev/nvidia0").exists():
        environment["TRITON_INTERPRET"] = "1"
    for i in range(jobs):
        with tempfile.TemporaryFile("w+") as file:
            json.dump(dict(list(cases.items())[i::jobs]), file)
            file.seek(0)
            command = [sys.executable, str(Path(__file__).resolve()), "--cases-from-stdin"]
            processes.append(
                subprocess.Popen(
                    command, env=environment, stdin=file, stdout=subprocess.PIPE, text=True
                )
            )
    for process in processes:
        output, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(
                f"a process that imports {tree} ended with status {process.returncode}"
            )
        found.update(json.loads(output))
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "revision", help="what to compare this tree with, or a folder that holds such a tree"
    )
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of calls")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--backend", choices=("torch", "triton"), nargs="*", default=("torch", "triton")
    )
    args = parser.parse_args()
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        other = Path(args.revision)
        if not (other / "tp_headloss").is_dir():
            other = Path(folder)
            command = ["git", "archive", args.revision, "tp_headloss"]
            archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
            subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        for backend in args.backend:
            all_cases = {
                str(number): case for number, case in enumerate(drawn(args.calls, backend))
            }
            cases = {
                number: case
                for number, case in all_cases.items()
                if int(number) in (args.only or range(args.calls))
            }
            ours, theirs = (run(tree, cases, args.jobs) for tree in (ROOT, other))
            failed = [n for n in ours if ":" in ours[n] and ours[n] == theirs[n]]
            changed = [n for n in ours if ours[n] != theirs[n]]
            different += len(changed)
            print(
                f"{backend}: {len(cases)} calls, {len(failed)} of them the same error", flush=True
            )
            for number in changed[:20]:
                print(f"{backend} {number}: {cases[number]}\n  {theirs[number]}\n  {ours[number]}")
    print(f"{different} calls differ from {args.revision}")
    sys.exit(bool(different))


if __name__ == "__main__":
    if sys.argv[1:] == ["--cases-from-stdin"]:
        print(json.dumps(hashes(json.load(sys.stdin))))
    else:
        main()
