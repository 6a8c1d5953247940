"""Environment report and self-check, for an issue or a new machine; on one process, or on all ranks
of torchrun:

    python -m tp_headloss
    torchrun --standalone --nproc-per-node 2 -m tp_headloss

The check compares three losses and their gradients with plain torch in float64, on the CPU and on
each GPU; on several ranks, with the vocabulary sharded over all of them. It takes seconds; a rank
that does not come, or does not answer, is waited for two minutes. The exit code is 1 if something
differs or a rank is missing, and 2 for wrong options or variables of the environment.

    python -m tp_headloss plan --tokens 8192 --vocab 128256 --hidden 4096 --tp 2 --from hidden

prints the peak memory and the floor time of every way to a loss of these sizes, and which call to
write.
"""

import argparse
import contextlib
import importlib
import os
import platform
import sys
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import CrossEntropy, Distillation, HeadLoss, Teacher, VocabShard, ZLoss, __version__, plan
from .command_line import Parser
from .engine.backend import is_not_installed, version_numbers
from .engine.transports.symmetric_memory import obstacle
from .integrations import TESTED, installed_version, standing
from .meeting import (
    START,
    Job,
    agent_has_store,
    expect_network,
    expect_store,
    job,
    met,
    uses_gpus,
)
from .ranks.comm import gather_objects, group_size, say_presence, silent_ranks
from .settings import (
    changed_settings,
    expect_interpreter_setting,
    torch_defaults,
    warnings_of_settings,
)
from .version import FOLDER, digest_of_sources

NEEDED = {"torch": "2.11", "triton": "3.6"}  # oldest versions
TOKENS, VOCAB, HIDDEN = 24, 1000, 32
TOLERANCE = 1e-5  # of fp32, relative to the largest element
# how long ranks wait for each other, when they meet and in each collective
WAIT = timedelta(minutes=2)
# how long a rank whose collective has ended asks which others are there
ROLL_CALL = 10.0  # seconds
# variables with the number of processes that a launcher other than torchrun started -> the
# launcher, and its command
LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": ("Slurm", "srun"),
    "OMPI_COMM_WORLD_SIZE": ("Open MPI", "mpirun"),
    "PMI_SIZE": ("MPI", "mpirun"),
}
# what gloo says of a collective that waited too long, and of a rank whose process has ended
WAITED = "imed out"
ENDED = "Connection closed by peer", "Connection reset by peer", "Broken pipe"
NO_TRITON = "not installed"
USED = "EADDRINUSE"
OF_A_USED_PORT = (
    "MASTER_PORT is used by another process, one with RANK 0, too, or no rank of this check\n"
)


def version_of_triton() -> str:
    """Return the version of the Triton that an import finds here, or what stands in its way."""
    try:
        return importlib.import_module("triton").__version__
    except Exception as error:  # a RuntimeError where it finds no driver
        if is_not_installed(error):
            return NO_TRITON
        return f"cannot be imported, {type(error).__name__}: {error}"


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all ranks."""
    return {
        "tp_headloss": f"{__version__} of sources {digest_of_sources()}",
        "torch": str(torch.__version__),
        "triton": version_of_triton(),
        "Python": platform.python_version(),
    }


def different_versions(found: list[tuple[dict[str, str], str]]) -> list[str]:
    """Return a line for each name whose version is not the same on all ranks.

    found: versions of each rank, and the folder of its package.
    """
    lines = []
    for name in found[0][0]:
        ranks_with: dict[str, list[str]] = {}
        for rank, (of_rank, folder) in enumerate(found):
            version = of_rank[name]
            shown = f"{version} in {folder}" if name == "tp_headloss" else version
            ranks_with.setdefault(shown, []).append(str(rank))
        told = (f"{version} on rank {', '.join(ranks)}" for version, ranks in ranks_with.items())
        if len({of_rank[name] for of_rank, _ in found}) > 1:
            lines.append(f"FAILED: {name} must have one version on all ranks: {'; '.join(told)}")
    return lines


def version_line(name: str, found: str) -> str:
    """Return a line on the version of what the package needs."""
    line, oldest = f"{name} {found} (>= {NEEDED[name]})", version_numbers(NEEDED[name])
    if found == NO_TRITON:  # CPUs need none, and the check of a GPU says so
        return line
    if found[0].isdecimal() and version_numbers(found) >= oldest:
        return line
    return f"FAILED: {line}"


def environment() -> list[str]:
    """Return lines on versions, GPUs and hosts of this process."""
    these = versions()
    lines = [
        f"tp_headloss {__version__} in {FOLDER}, Python {these['Python']}, {platform.platform()}",
        f"tp_headloss {these['tp_headloss']}",
    ]
    lines += [version_line(name, these[name]) for name in NEEDED]
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        lines.append(
            f"GPU {i}: {facts.name}, compute capability {facts.major}.{facts.minor}, CUDA "
            f"{torch.version.cuda}"
        )
    if not torch.cuda.is_available():
        lines.append("no GPU: backend 'torch' on the CPU")
    for name, (oldest, untested, extra) in TESTED.items():
        found = installed_version(name)
        state = "not installed" if found is None else f"{found}, {standing(name, found)}"
        lines.append(f"{name}: {state} (tested: >= {oldest}, < {untested}; extra '{extra}')")
    return lines


def symmetric_memory(device: torch.device, group: dist.ProcessGroup | None) -> str:
    """Return a line on symmetric memory in the group, after calls that have looked for it."""
    if group_size(group) == 1:
        return "symmetric memory: not needed by one rank"
    if device.type != "cuda" or group is None:
        return "symmetric memory: no, it needs GPUs"
    reason = obstacle(group.group_name)
    return f"symmetric memory: {'yes' if reason is None else f'no, {reason}'}"


def self_check(device: torch.device, group: dist.ProcessGroup | None) -> dict[str, float]:
    """Return the largest error of each check, relative to the largest element: of the loss and of
    its gradients."""
    shard, generator = VocabShard.from_group(group, VOCAB), torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def local(x: torch.Tensor) -> torch.Tensor:
        """This rank's part of what has a dimension of the vocabulary."""
        if VOCAB not in x.shape:
            return x
        return x.narrow(x.shape.index(VOCAB), shard.start, shard.width)

    def error(ours, expected, *leaves: torch.Tensor) -> float:
        """Compare two losses of the leaves, ours of this rank's parts in fp32."""
        mine = [local(x).to(device, torch.float32).requires_grad_() for x in leaves]
        whole = [x.clone().requires_grad_() for x in leaves]
        found, wanted = ours(*mine), expected(*whole)
        pairs = [
            (found, wanted),
            *zip(torch.autograd.grad(found, mine), torch.autograd.grad(wanted, whole)),
        ]
        errors = [
            (got.cpu().double() - local(want)).abs().max() / want.abs().max() for got, want in pairs
        ]
        return float(torch.stack(errors).detach().max())

    logits, teacher = random(TOKENS, VOCAB), random(TOKENS, VOCAB)
    hidden, weight = random(TOKENS, HIDDEN), random(VOCAB, HIDDEN)
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    here, own_teacher = labels.to(device), Teacher(local(teacher).to(device, torch.float32))
    terms, distilled, linear = (
        HeadLoss([CrossEntropy(), ZLoss(1e-4)]),
        HeadLoss([Distillation()]),
        HeadLoss(),
    )
    return {
        "cross-entropy and z-loss": error(
            lambda x: terms(x, here, shard=shard).loss,
            lambda x: F.cross_entropy(x, labels) + 1e-4 * x.logsumexp(-1).square().mean(),
            logits,
        ),
        "distillation": error(
            lambda x: distilled(x, here, shard=shard, inputs={"teacher": own_teacher}).loss,
            lambda x: F.kl_div(
                x.log_softmax(-1), teacher.log_softmax(-1), reduction="batchmean", log_target=True
            ),
            logits,
        ),
        "linear head": error(
            lambda h, w: linear.linear(h, w, here, shard=shard).loss,
            lambda h, w: F.cross_entropy(h @ w.t(), labels),
            hidden / HIDDEN**0.5,
            weight,
        ),
    }


def report(devices: list[torch.device], group: dist.ProcessGroup | None) -> tuple[list[str], bool]:
    """Return the lines of the report, and whether all checks passed on all ranks of the group."""
    changed = changed_settings()
    with torch_defaults():
        lines, passed = report_within_defaults(devices, group)
        of_ranks = [changed] if group is None or not passed else gather_objects(changed, group)
    return [*lines, *warnings_of_settings(of_ranks)], passed


def report_within_defaults(
    devices: list[torch.device], group: dist.ProcessGroup | None
) -> tuple[list[str], bool]:
    """Return `report` without the settings of torch that it began with."""
    lines = environment()
    passed = not any(line.startswith("FAILED") for line in lines)
    if group is not None:
        found = gather_objects((versions(), str(FOLDER)), group)
        if different := different_versions(found):
            return [*lines, *different], False
    for device in devices:
        where = str(device) if group is None else f"{device.type}, {group_size(group)} ranks"
        try:
            # In this thread: autograd's own may still drop its last tensors when the program ends,
            # for which torch 2.11 on Python 3.12 aborts the process.
            with torch.autograd.set_multithreading_enabled(False):
                errors = self_check(device, group)
        except Exception as error:
            if group is not None:
                raise  # torchrun ends the other ranks, which wait
            lines.append(f"FAILED: {where}: {type(error).__name__}: {error}")
            passed = False
            continue
        results = [errors] if group is None else gather_objects(errors, group)
        for name in errors:
            # NaN is the worst
            worst = max((result[name] for result in results), key=lambda x: (x != x, x))
            passed &= worst <= TOLERANCE
            lines.append(
                f"{'ok' if worst <= TOLERANCE else 'FAILED'}: {where}: {name}, error {worst:.1e}"
            )
    return [*lines, symmetric_memory(devices[-1], group)], passed


def open_outputs() -> None:
    """Give this process outputs that nobody reads in the place of those that it was started
    without."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # for as long as the process lives
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


@contextlib.contextmanager
def until_reader_ends() -> Iterator[None]:
    """Return a context in which a reader of the output, such as `head`, may end before it."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # what Python writes when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"the report could not be written: {error}", file=sys.stderr)
            sys.exit(2)


def join(given: Job, backend: str) -> None:
    """Begin the process group, or exit where its ranks do not come in time."""
    if given.local_rank == 0 or not agent_has_store():
        with until_reader_ends():
            print(
                f"waiting for {given.ranks} ranks at {given.address}; to check one process, unset "
                "WORLD_SIZE"
            )
    try:
        if not given.has_store:
            expect_store(given, WAIT.total_seconds())
        store = met(given, WAIT.total_seconds())
        dist.init_process_group(
            backend,
            store=store,
            rank=given.rank,
            world_size=given.ranks,
            timeout=WAIT,  # of its collectives, too
        )
    except (TimeoutError, ValueError) as error:
        sys.exit(f"FAILED: {error}\n{START}")
    except RuntimeError as error:
        (reason, *_) = str(error).splitlines() or [""]
        said = OF_A_USED_PORT if USED in reason else ""
        sys.exit(
            f"FAILED: expected {given.ranks} ranks at {given.address}, got "
            f"{type(error).__name__}: {reason}\n{said}{START}"
        )


def expect_answers(given: Job, error: Exception) -> None:
    """Exit with the ranks that did not answer, where an error says that a collective waited too
    long, or that a rank has ended."""
    with contextlib.suppress(RuntimeError):  # the store has ended with its process
        say_presence()
    (reason, *_) = str(error).splitlines() or [""]
    if not (isinstance(error, RuntimeError) and any(x in reason for x in (WAITED, *ENDED))):
        return
    silent: list[int] = []
    # Rank 0 holds the store where torchrun does not, and a store that has stopped is waited for
    # without end.
    if given.rank == 0 or agent_has_store():
        silent = silent_ranks(ROLL_CALL)
    ranks = f"rank {', '.join(map(str, silent))} does" if silent else "some of them do"
    if WAITED in reason:
        time, why = f" within {WAIT.total_seconds():g} seconds", ""
    else:  # ranks that are connected with none that has ended may wait still
        time, why = "", ", because of a process that has ended"
    sys.exit(
        f"FAILED: expected an answer of all {given.ranks} ranks{time}, and {ranks} not answer "
        f"rank {given.rank}{why}: {reason}"
    )


def report_of_job(given: Job) -> tuple[list[str], bool]:
    """Return the report of one process on all its devices, or of all ranks on one device each."""
    if given.ranks == 1:
        gpus = torch.cuda.device_count()
        return report([torch.device("cpu"), *(torch.device("cuda", i) for i in range(gpus))], None)
    device = torch.device("cuda", given.local_rank) if uses_gpus(given) else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    join(given, "nccl" if device.type == "cuda" else "gloo")
    try:
        lines, passed = report([device], dist.group.WORLD)
    except Exception as error:
        expect_answers(given, error)
        raise
    dist.destroy_process_group()
    return lines, passed


def warn_of_separate_checks(given: Job) -> None:
    """Say where a launcher started several processes that know nothing of each other."""
    if given.ranks > 1 or "WORLD_SIZE" in os.environ:
        return
    for name, (launcher, command) in LAUNCHERS.items():
        tasks = os.environ.get(name, "1")
        if not tasks.isdecimal() or int(tasks) == 1:
            continue
        print(
            f"warning: {launcher} started {tasks} processes, and each checks itself alone, because "
            f"WORLD_SIZE is not set: to check them together, have {command} start one torchrun on "
            "each node",
            file=sys.stderr,
        )
        return


def main() -> None:
    open_outputs()
    parser = Parser(
        "python -m tp_headloss",
        None,
        __doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tp_headloss {__version__}")
    plan_parser = plan.add_command(parser.add_subparsers(dest="command"))
    given = parser.parse_args()
    if given.command is not None:
        with until_reader_ends():
            plan.run(given, plan_parser)
        return
    try:
        expect_interpreter_setting()
        this = job()
        expect_network(this)
    except ValueError as error:
        parser.error(str(error))
    warn_of_separate_checks(this)
    lines, passed = report_of_job(this)
    if this.rank == 0:
        with until_reader_ends():
            print("\n".join(lines))
    sys.exit(not passed)


if __name__ == "__main__":
    main()
