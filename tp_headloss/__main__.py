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


def environment() -> list[str]:
    """Return lines on versions, GPUs and hosts of this process."""
    lines = [
        f"tp_headloss {__version__}, Python {platform.python_version()}, {platform.platform()}"
    ]
    for name, oldest in NEEDED.items():
        version = torch.__version__ if name == "torch" else installed_version(name)
        lines.append(f"{name} {version or 'not installed'} (>= {oldest})")
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


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m tp_headloss", None, __doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"tp_headloss {__version__}")
    plan.add_command(parser.add_subparsers(dest="command"))
    given = parser.parse_args()
    if given.command is not None:
        return plan.run(given)
    ranks, local_rank = (
        int(os.environ.get("WORLD_SIZE", "1")),
        int(os.environ.get("LOCAL_RANK", "0")),
    )
    gpus = torch.cuda.device_count()
    if ranks == 1:
        lines, passed = report(
            [torch.device("cpu"), *(torch.device("cuda", i) for i in range(gpus))], None
        )
    else:
        use_gpus = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        device = torch.device("cuda", local_rank) if use_gpus else torch.device("cpu")
        if use_gpus:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if use_gpus else "gloo")
        lines, passed = report([device], dist.group.WORLD)
        dist.destroy_process_group()
    if int(os.environ.get("RANK", "0")) == 0:
        print("\n".join(lines), flush=True)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
