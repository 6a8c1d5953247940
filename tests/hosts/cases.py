"""Cases that run inside a host's own environment, on two or more ranks: `launch` starts them,
`main` is what they do.

A file of cases ends with ``main(CASES)``. A case is a function (group) -> a dict of numbers,
JSON's, called once on each rank; of a number the worst of the ranks is kept. One process serves all
cases of a file and all numbers of ranks, because importing a host takes seconds.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).parents[2]
# every case with every number of ranks, where one of each is enough
FULL = bool(os.environ.get("TP_HEADLOSS_FULL"))
# scripts/check/versions.sh: a folder with an environment per host
NEWEST = os.environ.get("TP_HEADLOSS_NEWEST")
TIMEOUT = 600  # seconds: a collective that waits longer fails; none does, on the busiest machine


def python_of(host: str) -> Path:
    folder = ROOT / ".hosts" / host if NEWEST is None else ROOT / NEWEST / host.rsplit("-", 1)[0]
    return folder / "bin" / "python"


# An older version of a host runs what its code decides: signatures, its own plans and classes, one
# training. Its schedules are in verl's engine, which brings it. All cases with FULL.
OLDER = {
    ("transformers-5.17.0", "transformers_cases.py"): (
        *("loss_function-plain", "loss_function-tied", "loss_function-bf16"),
        *("fused-plain", "fused-tied", "fused-uneven", "fused-Gemma2"),
        *("fused-plain-auto", "fused-tied-auto", "fused-uneven-auto"),
        *("stock", "without labels", "vision", "vision-parallel", "refusals", "newer", "trainer"),
        *("failures", "documented"),
    ),
    ("megatron-0.16.1", "megatron_schedule_cases.py"): (),
}


# Numbers of ranks, of what runs with several.
NUMBERS = {
    ("transformers-5.24.0", "trainer_cases.py"): (2, 4),
    ("torchtitan-0.3.0", "torchtitan_trainer_cases.py"): (2, 4),
    ("nemo_automodel-0.7.0", "nemo_automodel_cases.py"): (2, 4),
    ("transformers-5.24.0", "hub_cases.py"): (1, 2),
    ("deepspeed-0.19.8", "deepspeed_cases.py"): (2, 4),
    ("megatron-0.19.2", "megatron_soft_target_cases.py"): (2, 4),
    ("megatron-0.16.1", "megatron_soft_target_cases.py"): (2, 4) if FULL else (2,),
}


def number_of_ranks() -> int:
    """Within a case."""
    return int(os.environ["WORLD_SIZE"])


def runs(host: str, script: str, case: str) -> bool:
    """Whether a case is one of those that run with this version of the host."""
    return FULL or case in OLDER.get((host, script), (case,))


@functools.lru_cache
def launch(host: str, script: str, numbers: tuple[int, ...] = (2,)) -> dict[int, dict]:
    """Runs tests/hosts/`script` with the host's Python on each of these numbers of ranks ->
    results by number and name of the case; an "error" of one is its traceback."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        for number in numbers:
            (Path(folder) / f"{number}").mkdir()
        env |= {"CASES_STORE": f"{folder}/{numbers[0]}/store", "CASES_RANKS": json.dumps(numbers)}
        env |= {
            "OMP_NUM_THREADS": "1",
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(numbers[0]),
            "PYTHONPATH": f"{ROOT}:{ROOT}/tests/helpers",
        }
        env |= {
            "CASES_HOST": host,
            "CASES_TORCH": importlib.metadata.version("torch"),
            "CUDA_VISIBLE_DEVICES": "",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        command = [str(python_of(host)), "-W", "ignore", str(ROOT / "tests/hosts" / script)]
        with log.open("w") as said:
            options = {"env": env, "stdout": said, "stderr": subprocess.STDOUT, "cwd": ROOT}
            first = subprocess.Popen(command, **options, start_new_session=True)
            try:
                code = first.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(first.pid, signal.SIGKILL)
        assert not code, without_leaks(log.read_text())[-8000:]
        return {n: json.loads((Path(folder) / f"{n}/results.json").read_text()) for n in numbers}


def without_leaks(said: str) -> str:
    """What a process said, without triton's lists of what it leaks when it ends early."""
    lines = said.splitlines(keepends=True)
    return "".join(line for line in lines if "leaked" not in line and "nanobind" not in line)


def results(host: str, script: str, ranks: int = 2) -> dict[str, dict]:
    """Of this number of ranks, for a test, which is skipped where there is no such environment."""
    import pytest  # which hosts' environments lack

    if not python_of(host).exists():
        pytest.skip(f"no .hosts/{host}: bash scripts/hosts.sh {host}")
    return launch(host, script, NUMBERS.get((host, script), (ranks,)))[ranks]


def result(host: str, script: str, case: str, ranks: int = 2) -> dict:
    """The result of one case, which must not have failed."""
    found = results(host, script, ranks)[case]
    assert "error" not in found, found["error"]
    return found


def refuses_what_its_lines_rule_out(function, **given):
    """A function refuses each value that the line of an argument rules out, in an error that names
    the argument."""
    # of the helpers; the process of the tests itself needs no lines
    from lines import OF_OTHERS, wrong

    for name, line in function.lines.items():
        for what, value in wrong(line).items():
            if what not in OF_OTHERS:
                refused(lambda: function(**given | {name: value}), name, (TypeError, ValueError))  # noqa: B023


def refused(function, match, kind=ValueError):
    """Call a function, which must raise an error of this kind with these words."""
    try:
        function()
    except kind as error:
        assert match in str(error), str(error)
    else:
        raise AssertionError(f"not refused: {match}")


def main(cases: dict, before=None) -> None:
    """cases: by name; or by number of ranks, then by name. before: a function (group), called
    once. All ranks are forked from the process that has imported the host."""
    import torch
    from gloo import share_one_device

    torch.set_num_threads(1)
    share_one_device()
    assert torch.__version__ == os.environ["CASES_TORCH"], "the host has brought a torch of its own"
    gc.freeze()  # what was imported: trainers collect garbage, and would look through all of it
    *others, last = json.loads(os.environ["CASES_RANKS"])
    for number in others:
        first = os.fork()
        if not first:
            _run(number, cases.get(number, cases), before)
        if os.waitpid(first, 0)[1]:
            os._exit(1)
    _run(last, cases.get(last, cases), before)


def _run(ranks: int, cases: dict, before) -> None:
    """Rank 0, which forks the others."""
    import torch
    import torch.distributed as dist

    rank = next((r for r in range(1, ranks) if not os.fork()), 0)
    store = Path(os.environ["CASES_STORE"]).parents[1] / f"{ranks}/store"
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ["CASES_STORE"] = str(store)
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=TIMEOUT),
        )
    if before is not None:
        before(dist.group.WORLD)
    results, here = {}, (os.environ["CASES_HOST"], Path(sys.argv[0]).name)
    for name, case in cases.items():
        if not runs(*here, name):
            continue
        torch.manual_seed(0)
        try:
            results[name] = case(dist.group.WORLD)
        except Exception:
            results[name] = {"error": f"rank {rank}: {traceback.format_exc()}"}
        both = [None] * ranks  # an error on the other rank counts, too
        dist.all_gather_object(both, results[name])
        results[name] = next((r for r in both if "error" in r), None) or worst(both)
    dist.barrier()
    codes = []
    if rank == 0:
        codes = [os.wait()[1] for _ in range(1, ranks)]
        store.with_name("results.json").write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit(any(codes))  # hosts leave threads behind that would wait for each other


def worst(results: list[dict]) -> dict:
    """The largest of each number (smallest of "mutant"), whether all are true, else what the first
    says."""

    def of(name, values):
        if all(isinstance(v, bool) for v in values):
            return all(values)
        if all(isinstance(v, (int, float)) for v in values):
            return min(values) if name == "mutant" else max(values)
        return values[0]

    return {name: of(name, [r[name] for r in results]) for name in results[0]}


def relative_errors(ours: dict, theirs: dict) -> dict[str, float]:
    """By name, of tensors of the same names: |ours - theirs| / |theirs|; inf for NaN, which a
    maximum may not see."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()

    def error(a, b) -> float:
        if not bool((a != b).any()):
            return 0.0  # both may be 0; NaN is no equal of NaN
        found = float((a.double() - b.double()).norm() / b.double().norm())
        return math.inf if math.isnan(found) else found

    return {name: error(ours[name], theirs[name]) for name in theirs}


def compared(loss, grads, host_loss, host_grads, head: str) -> dict[str, float]:
    """What a test looks at: the relative error of the losses, the worst of the gradients, and what
    that would be if the gradient of the parameter `head` were 1 % too large. Gradients by name,
    whole or this rank's."""
    found = max(relative_errors(grads, host_grads).items(), key=lambda item: item[1])
    wrong = {**grads, head: 1.01 * grads[head]}
    return {
        "loss": relative_errors({"": loss}, {"": host_loss})[""],
        "grads": found[1],
        "worst": found[0],
        "mutant": max(relative_errors(wrong, host_grads).values()),
    }


class Injected(Exception):
    """What `fails_cleanly_at_every_step` raises."""


# exceptions that take no time to speak of
FEW = 50
# calls that clean up, and do not fail
UNDOING = ("remove", "undo", "__exit__", "__setattr__", "__delattr__")


def fails_cleanly_at_every_step(install, model) -> int:
    """Calls `install` with an exception in the place of a call that a module of integrations/
    makes; asserts that each leaves `model` as it was. -> the number of exceptions.

    Of every line that calls, the first and the last time. Where these are many, and without FULL,
    the first and the last of those that an exception would leave by the same handler, with the
    model in the same state."""
    install().remove()  # what a host keeps of its first call is there from now on
    before = _state(model)
    # all of them: it succeeds, and what it returns is removed
    calls, met = _calls_of(install, model)
    assert _state(model) == before
    steps = _ends(calls)
    if len(steps) > FEW and not FULL:
        steps = _ends(met)
    for step in steps:
        assert _calls_of(install, model, fails_at=step)[0] == calls[: step + 1]
        assert _state(model) == before, calls[step]
    return len(steps)


def _ends(kinds: list) -> list[int]:
    """Where each kind is the first and the last time."""
    first = {kind: i for i, kind in reversed(list(enumerate(kinds)))}
    last = {kind: i for i, kind in enumerate(kinds)}
    return sorted({*first.values(), *last.values()})


def _calls_of(install, model, fails_at: int | None = None) -> tuple[list[str], list[tuple]]:
    """The calls that modules of integrations/ make in `install`, to the one in whose place there is
    an exception; and of each what an exception would meet: the innermost function there that
    handles any, and the state of the model, by its number."""
    calls, met, states = [], [], []

    def trace(frame, event, _):
        caller, name = frame.f_back, frame.f_code.co_name
        # nobody hears of an error in what is closed
        if caller is None or not _is_ours(caller) or name in (*UNDOING, "<genexpr>"):
            return
        # a callback of a weak reference, as torch's compiler has some: neither does anybody hear of
        # an error there
        if name == "<lambda>" and not _is_ours(frame):
            return
        calls.append(f"{name}, line {caller.f_lineno} of {caller.f_code.co_filename}")
        if fails_at is None:
            state = _state(model)
            if state not in states:
                states.append(state)
            met.append((_handler(caller), states.index(state)))
        elif fails_at == len(calls) - 1:
            sys.settrace(None)
            raise Injected(calls[-1])

    # which hears of fewer events than a profile: of calls of Python's functions alone
    gc.disable()  # whose finalizers would be calls of any line
    sys.settrace(trace)
    try:
        installed = install()
    except Injected:
        return calls, met
    finally:
        sys.settrace(None)
        gc.enable()
    installed.remove()
    return calls, met


def _is_ours(frame) -> bool:
    return "/tp_headloss/integrations/" in frame.f_code.co_filename


def _handler(frame):
    """The function of ours, of those that are running, that has a `try` or a `with` and was called
    last."""
    while frame is not None:
        # before Python 3.11 nothing tells, and each function may be one
        if _is_ours(frame) and getattr(frame.f_code, "co_exceptiontable", True):
            return frame.f_code
        frame = frame.f_back
    return None


def _state(model) -> list:
    """The attributes and hooks of all modules."""
    return [
        (
            {name: id(x) for name, x in vars(m).items()},
            list(m._forward_hooks),
            list(m._forward_pre_hooks),
        )
        for m in model.modules()
    ]
