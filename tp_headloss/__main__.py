"""Environment report and self-check, for an issue or a new machine; on one process, or on all ranks
of torchrun:

    python -m tp_headloss
    torchrun --standalone --nproc-per-node 2 -m tp_headloss

The check compares three losses and their gradients with plain torch in float64, on the CPU and on
each GPU; on several ranks, with the vocabulary sharded over all of them. It takes seconds, and the
exit code is 1 if something differs.

    python -m tp_headloss plan --tokens 8192 --vocab 128256 --hidden 4096 --tp 2 --from hidden

prints the peak memory and the floor time of every way to a loss of these sizes, and which call to
write.
"""

import argparse
import os
import platform
import sys
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import CrossEntropy, Distillation, HeadLoss, Teacher, VocabShard, ZLoss, __version__, plan
from .engine.transports.symmetric_memory import obstacle
from .integrations import TESTED, installed_version, standing
from .ranks.comm import gather_objects, group_size

NEEDED = {"torch": "2.11", "triton": "3.6"}  # oldest versions
TOKENS, VOCAB, HIDDEN = 24, 1000, 32
TOLERANCE = 1e-5  # of fp32, relative to the largest element
# how long ranks wait for each other where variables that are left over may have made them wait
JOIN = timedelta(minutes=1)
START = (
    "write torchrun --standalone --nproc-per-node N -m tp_headloss, or unset WORLD_SIZE to check "
    "one process"
)


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all ranks."""
    return {
        "tp_headloss": __version__,
        "torch": str(torch.__version__),
        "triton": installed_version("triton") or "not installed",
        "Python": platform.python_version(),
    }


def different_versions(found: list[dict[str, str]]) -> list[str]:
    """Return a line for each name whose version is not the same on all ranks."""
    lines = []
    for name in found[0]:
        ranks_with: dict[str, list[str]] = {}
        for rank, of_rank in enumerate(found):
            ranks_with.setdefault(of_rank[name], []).append(str(rank))
        told = (f"{version} on rank {', '.join(ranks)}" for version, ranks in ranks_with.items())
        if len(ranks_with) > 1:
            lines.append(f"FAILED: {name} must have one version on all ranks: {'; '.join(told)}")
    return lines


def environment() -> list[str]:
    """Return lines on versions, GPUs and hosts of this process."""
    these = versions()
    lines = [
        f"tp_headloss {__version__} in {Path(__file__).parent}, Python {these['Python']}, "
        f"{platform.platform()}"
    ]
    for name, oldest in NEEDED.items():
        lines.append(f"{name} {these[name]} (>= {oldest})")
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
    lines, passed = environment(), True
    if group is not None and (different := different_versions(gather_objects(versions(), group))):
        return [*lines, *different], False
    for device in devices:
        where = str(device) if group is None else f"{device.type}, {group_size(group)} ranks"
        try:
            # In this thread: autograd's own may still drop its last tensors when the program ends,
            # for which torch 2.11 on Python 3.12 aborts the process.
            with torch.autograd.set_multithreading_enabled(False):
                found = self_check(device, group)
        except Exception as error:
            if group is not None:
                raise  # torchrun ends the other ranks, which wait
            lines.append(f"FAILED: {where}: {type(error).__name__}: {error}")
            passed = False
            continue
        results = [found] if group is None else gather_objects(found, group)
        for name in found:
            # NaN is the worst
            worst = max((result[name] for result in results), key=lambda x: (x != x, x))
            passed &= worst <= TOLERANCE
            lines.append(
                f"{'ok' if worst <= TOLERANCE else 'FAILED'}: {where}: {name}, error {worst:.1e}"
            )
    return [*lines, symmetric_memory(devices[-1], group)], passed


class Job(NamedTuple):
    """The ranks of a check, and which of them this process is."""

    ranks: int = 1
    rank: int = 0
    local_rank: int = 0
    local_ranks: int = 1  # on this host
    address: str = ""  # where they meet


def job() -> Job:
    """Return what torchrun's variables say; ValueError that names one which is missing or wrong."""
    if "WORLD_SIZE" not in os.environ:
        return Job()
    ranks = number_of("WORLD_SIZE", 1, 2**31 - 1)
    if ranks == 1:
        return Job()
    host = os.environ.get("MASTER_ADDR")
    if not host:
        raise ValueError(f"MASTER_ADDR must be the host of rank 0, got nothing: {START}")
    local_ranks = ranks
    if "LOCAL_WORLD_SIZE" in os.environ:
        local_ranks = number_of("LOCAL_WORLD_SIZE", 1, ranks)
    return Job(
        ranks,
        rank=number_of("RANK", 0, ranks - 1),
        local_rank=number_of("LOCAL_RANK", 0, local_ranks - 1),
        local_ranks=local_ranks,
        address=f"{host}:{number_of('MASTER_PORT', 1, 2**16 - 1)}",
    )


def number_of(name: str, least: int, most: int) -> int:
    """Return the number in a variable of the environment; ValueError unless it is in the range."""
    text = os.environ.get(name, "")
    if text.isdecimal() and least <= int(text) <= most:
        return int(text)
    raise ValueError(
        f"{name} must be a whole number from {least} to {most}, got {text or 'nothing'}: {START}"
    )


def join(given: Job, backend: str) -> None:
    """Begin the process group, or exit where its ranks do not come in time."""
    if given.local_rank == 0:
        print(
            f"waiting for {given.ranks} ranks at {given.address}; to check one process, unset "
            "WORLD_SIZE",
            flush=True,
        )
    timeout = None if "TORCHELASTIC_RUN_ID" in os.environ else JOIN
    try:
        dist.init_process_group(backend, timeout=timeout)
    except RuntimeError as error:
        (reason, *_) = str(error).splitlines() or [""]
        sys.exit(
            f"expected {given.ranks} ranks at {given.address}, got "
            f"{type(error).__name__}: {reason}\n{START}"
        )


def report_of_job(given: Job) -> tuple[list[str], bool]:
    """Return the report of one process on all its devices, or of all ranks on one device each."""
    gpus = torch.cuda.device_count()
    if given.ranks == 1:
        return report([torch.device("cpu"), *(torch.device("cuda", i) for i in range(gpus))], None)
    use_gpus = gpus >= given.local_ranks
    device = torch.device("cuda", given.local_rank) if use_gpus else torch.device("cpu")
    if use_gpus:
        torch.cuda.set_device(device)
    join(given, "nccl" if use_gpus else "gloo")
    lines, passed = report([device], dist.group.WORLD)
    dist.destroy_process_group()
    return lines, passed


def main() -> None:
    parser = argparse.ArgumentParser(
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
        return plan.run(given, plan_parser)
    try:
        this = job()
    except ValueError as error:
        parser.error(str(error))
    lines, passed = report_of_job(this)
    if this.rank == 0:
        print("\n".join(lines), flush=True)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
