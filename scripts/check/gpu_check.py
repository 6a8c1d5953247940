"""The whole test suite on the GPUs of this machine, what every kernel takes, and compute-sanitizer:
one report.

bash scripts/check/gpu_check.sh                               # the report is runs/gpu_check.md
bash scripts/check/gpu_check.sh --report docs/gpu_check.md    # the page of the documentation anew

Test files run several at a time (`--jobs`), each in a process of its own, with as many ranks as
there are GPUs, of which each file has another one as its first: bits at every group size from saved
outputs, graph replays, 2^31 + 4096 elements, 131,072 tokens, 1,000 repeats under noise and all else
in `test_cuda*.py` are among them. Every step is shown when it ends. The exit status is 1 if
anything failed; what could not run is listed.
"""

import argparse
import collections
import concurrent.futures
import datetime
import functools
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

import torch
import triton

ROOT = Path(__file__).parents[2]
VERDICT = {True: "passed", False: "**failed**", None: "not run"}
# What takes longest begins first, after the kernels' resources.
LONG = (
    "test_one_read", "test_one_read_topk", "test_one_read_teacher", "test_one_read_second_round",
    "test_one_read_ranks", "test_call_sequences",
    "test_structure", "test_generated", "test_faults", "test_compile",
    "test_topk_distillation", "test_training",
    "test_cuda_graphs", "test_bad_inputs_triton", "test_cuda",
)  # fmt: skip
RUNNING: set[int] = set()  # sessions of the steps that run now


class Case(NamedTuple):
    file: str
    name: str
    ranks: int
    outcome: str  # "passed", "failed", or why it was skipped


class Step(NamedTuple):
    name: str
    passed: bool | None  # None: it could not run
    seconds: float
    text: str
    cases: tuple[Case, ...] = ()


def call(command, limit, **environment) -> tuple[int, str, float]:
    """-> status (124: killed after `limit` seconds), output, seconds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        # in a session of its own, so that nothing is left of it when it is killed
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        RUNNING.add(process.pid)
        try:
            status, end = process.wait(limit), ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status, end = 124, f"\nkilled after {limit} seconds"
        RUNNING.remove(process.pid)
        file.seek(0)
        output = file.read() + end
    return status, output, time.monotonic() - begin


def gpus_from(first: int) -> str:
    """The GPUs, as CUDA_VISIBLE_DEVICES has them, another one first."""
    gpus = [str(i) for i in range(torch.cuda.device_count())]
    if given := os.environ.get("CUDA_VISIBLE_DEVICES"):
        gpus = given.split(",")
    first %= len(gpus)
    return ",".join(gpus[first:] + gpus[:first])


def tests_of(path: Path, limit, gpus: str) -> Step:
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "results.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-v",
            "--tb=short",
            "--show-capture=no",
            "--disable-warnings",
        ]
        command += ["-p", "no:cacheprovider"]
        command += ["-o", "junit_family=xunit1", f"--junitxml={xml}", str(path)]
        status, output, seconds = call(command, limit, CUDA_VISIBLE_DEVICES=gpus)
        cases = []
        for case in ElementTree.parse(xml).iter("testcase") if xml.exists() else ():
            skipped = case.find("skipped")
            outcome = "passed" if skipped is None else skipped.get("message", "").partition("\n")[0]
            if any(case.find(kind) is not None for kind in ("failure", "error")):
                outcome = "failed"
            ranks = case.find("properties/property[@name='world_size']")
            cases.append(
                Case(
                    path.stem,
                    case.get("name"),
                    1 if ranks is None else int(ranks.get("value")),
                    outcome,
                )
            )
    failures = (
        output[max(output.find("= FAILURES ="), 0) :]
        .replace(str(ROOT), ".")
        .replace(str(xml), xml.name)
    )
    # 5: nothing to run there
    return Step(path.stem, status in (0, 5), seconds, failures[-6000:], tuple(cases))


def kernels(limit) -> Step:
    major, minor = torch.cuda.get_device_capability()
    status, output, seconds = call(
        [sys.executable, "tests/helpers/aot.py", str(10 * major + minor), "--all"], limit
    )
    return Step("kernel resources", status == 0, seconds, output)


def sanitizer(tool: str, limit, gpus: str) -> Step:
    name = f"compute-sanitizer {tool}"
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(found).exists():
        return Step(name, None, 0.0, "there is no compute-sanitizer on this machine")
    command = [found, "--tool", tool, "--error-exitcode", "3", "--launch-timeout", "60"]
    command += [sys.executable, "scripts/bench/small_shapes.py"]
    command += ["--rounds", "1"] if tool == "racecheck" else []
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_VISIBLE_DEVICES": gpus}
    status, output, seconds = call(command, limit, **environment)
    if "Device not supported" in output or "not supported on this" in output:
        return Step(
            name, None, seconds, "compute-sanitizer does not support the device of this machine"
        )
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY.*", output)
    clean = status == 0 and "every kernel ran" in output and bool(summary)
    if tool == "initcheck" and not clean and "every kernel ran" in output:
        # rows of a block of logits are padded, and cuBLAS reads whole vectors across their ends,
        # whose rest it drops
        kernels = re.findall(r"=+     at (.*)", output)
        clean = bool(kernels) and all("gemm" in kernel for kernel in kernels)
        summary.append(
            f"{len(kernels)} reads of the padding between rows by cuBLAS's GEMMs, none by other kernels"
        )
    if not clean:
        return Step(name, False, seconds, output[-6000:])
    status, output, _ = call([*command, f"--plant={tool}"], limit, **environment)
    if status != 3:
        return Step(
            name, False, seconds, f"nothing found where a bug was planted:\n{output[-3000:]}"
        )
    return Step(name, True, seconds, f"{summary[-1]} (and a planted bug found)")


def hash_of_sources() -> str:
    sources = hashlib.sha256()
    for path in sorted((ROOT / "tp_headloss").rglob("*")):
        if path.suffix in (".py", ".cu", ".cuh"):
            sources.update(path.read_bytes())
    return sources.hexdigest()[:16]


def facts() -> dict[str, str]:
    gpus = collections.Counter(
        torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
    )
    return {
        "date": datetime.date.today().isoformat(),
        "GPUs": ", ".join(f"{count} x {name}" for name, count in gpus.items()),
        "driver": call(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 30)[
            1
        ].split("\n")[0],
        "versions": f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}, NCCL "
        + ".".join(map(str, torch.cuda.nccl.version())),
        "sources, as `python scripts/check/gpu_check.py --sources` prints them": hash_of_sources(),
    }


def report(steps: list[Step], options: str, seconds: float) -> str:
    cases = [case for step in steps for case in step.cases]
    lines = [
        "# All that only GPUs can show",
        "",
        f"By `bash scripts/check/gpu_check.sh {options}`.",
        "",
    ]
    lines += [f"* {name}: {value}" for name, value in facts().items()]
    lines += ["", "## Tests", "", "| ranks | passed | failed | skipped |", "|---|---|---|---|"]
    for ranks in sorted({case.ranks for case in cases}):
        outcomes = collections.Counter(case.outcome for case in cases if case.ranks == ranks)
        good, bad = outcomes.pop("passed", 0), outcomes.pop("failed", 0)
        reasons = "; ".join(f"{count}: {reason}" for reason, count in outcomes.most_common()) or "0"
        lines.append(f"| {ranks} | {good} | {bad} | {reasons} |")
    lines += ["", "| of them, `test_cuda*.py` | |", "|---|---|"]
    by_test = collections.defaultdict(list)
    for case in cases:
        if case.file.startswith("test_cuda"):
            by_test[case.name.split("[")[0].removeprefix("test_").replace("_", " ")].append(
                case.outcome
            )
    for name, outcomes in by_test.items():
        counts = collections.Counter(outcomes)
        lines.append(
            f"| {name} | {', '.join(f'{count} {outcome}' for outcome, count in counts.most_common())} |"
        )
    good = [step for step in steps if step.passed]
    longest = sorted(good, key=lambda step: -step.seconds)[:5]
    told = (
        f"{len(good)} of {len(steps)} passed, in {seconds:.0f} seconds in all. Those that took "
        "longest, and those that did not pass:"
    )
    lines += ["", "## Steps", "", told, "", "| step | | seconds |", "|---|---|---|"]
    shown = longest + [step for step in steps if not step.passed]
    lines += [f"| {step.name} | {VERDICT[step.passed]} | {step.seconds:.0f} |" for step in shown]
    sanitized = [step for step in steps if step.name.startswith("compute-sanitizer")]
    lines += ["", "## Sanitizers", ""] if sanitized else []
    lines += [
        f"* {step.name}: {step.text if step.passed is not False else VERDICT[False]}"
        for step in sanitized
    ]
    for step in steps:
        if step.name == "kernel resources" and step.passed:
            lines += [
                "",
                "## Registers, shared memory, spills",
                "",
                "```",
                step.text.strip(),
                "```",
            ]
    for step in steps:
        if step.passed is False:
            told = [
                line[:160]
                for line in step.text.strip().split("\n")
                if not line.startswith("SKIPPED")
            ]
            lines += ["", f"## {step.name}", "", "```", *told, "```"]
    return "\n".join(lines) + "\n"


def parser_of_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--report",
        type=Path,
        default=Path("runs/gpu_check.md"),
        help="the file to write, from the current folder (default: %(default)s)",
    )
    parser.add_argument("--jobs", type=int, default=6, help="files at a time")
    parser.add_argument(
        "--limit", type=int, default=540, help="seconds for each step, which is then killed"
    )
    parser.add_argument(
        "--only", nargs="*", help="test_cuda, .., kernels, memcheck, racecheck, initcheck"
    )
    parser.add_argument(
        "--sources",
        action="store_true",
        help="print a hash of the package's *.py, *.cu and *.cuh, which names the source of a report",
    )
    return parser


def main():
    begin = time.monotonic()
    parser = parser_of_options()
    args = parser.parse_args()
    if args.sources:
        print(hash_of_sources())
        return
    if not torch.cuda.is_available():
        parser.error("no GPU here: bash scripts/test.sh runs everything else")
    files = sorted(
        (ROOT / "tests").rglob("test_*.py"), key=lambda p: (p.stem not in LONG, -p.stat().st_size)
    )
    work = {"kernels": functools.partial(kernels, args.limit)}
    work |= {  # before the tests: nothing runs beside them at the end, and they take minutes
        tool: functools.partial(sanitizer, tool, args.limit, gpus_from(-number))
        for number, tool in enumerate(("memcheck", "racecheck", "initcheck"), 1)
    }
    work |= {
        path.stem: functools.partial(tests_of, path, args.limit, gpus_from(number))
        for number, path in enumerate(files)
    }
    if unknown := set(args.only or ()) - set(work):
        parser.error(f"--only takes {', '.join(work)}; got {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    work = {name: step for name, step in work.items() if name in (args.only or work)}
    options = f"--jobs {args.jobs}" + (f" --only {' '.join(args.only)}" if args.only else "")
    steps: list[Step] = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        left = {pool.submit(step): name for name, step in work.items()}
        try:
            for future in concurrent.futures.as_completed(list(left)):
                del left[future]
                steps.append(step := future.result())
                print(
                    f"{step.name}: {VERDICT[step.passed]}, {len(step.cases)} tests, {step.seconds:.0f} s",
                    flush=True,
                )
                if step.passed is not True:
                    print(step.text[-3000:], flush=True)
        except BaseException:  # Ctrl-C or SIGTERM: no step goes on or begins
            pool.shutdown(wait=False, cancel_futures=True)
            for session in RUNNING.copy():
                os.killpg(session, signal.SIGKILL)
            raise
        finally:
            steps += [Step(name, None, 0.0, "cut off") for name in left.values()]
            args.report.parent.mkdir(parents=True, exist_ok=True)
            seconds = time.monotonic() - begin
            args.report.write_text(report(steps, options, seconds))
            print(f"{len(steps)} steps, {seconds:.0f} s, report in {args.report}", flush=True)
    sys.exit(any(step.passed is False for step in steps))


if __name__ == "__main__":
    main()
