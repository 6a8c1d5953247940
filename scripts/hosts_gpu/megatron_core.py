"""Megatron-Core's schedule, data-parallel wrapper and optimizer by launch/megatron_pretrain.py,
tensor parallel, with its own losses and with `install`; and whether two runs in its deterministic
mode have equal bits.

torchrun --standalone --nproc-per-node 2 scripts/hosts_gpu/megatron_core.py --json megatron.json
"""

import functools
import os
import statistics

# as Megatron's trainer sets it in its deterministic mode
os.environ.setdefault("NCCL_ALGO", "Ring")
import torch
from measure import FP8, OURS, Run, Train, clean, main

import megatron_pretrain

HEADS = {
    "Megatron-Core": "stock",
    "Megatron-Core, fused": "stock-fused",
    OURS: "head",
    f"{OURS}, one sweep": "head-one-sweep",
    FP8: "head-fp8",
    f"{OURS}, loss of logits": "logits",
}


@functools.cache
def start(run: Run) -> None:
    from megatron.core import parallel_state

    if not run.cuda:
        import megatron_cpu

        megatron_cpu.pretend()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=run.ranks.world)


def trained(run: Run, loss: str, rows: int, steps: int, *more: str) -> dict:
    start(run)
    options = {"tp": run.ranks.world, "batch": rows, "steps": steps, "lr": 1e-4}
    options |= {
        name: getattr(run.shape, name) for name in ("vocab", "layers", "hidden", "heads", "length")
    }
    args = megatron_pretrain.parse(
        [*more, *(f"--{name}={value}" for name, value in options.items())]
    )
    return megatron_pretrain.train(
        args, loss, "none", run.ranks, lambda step, number: run.batch(rows, step)
    )


def build(run: Run, loss: str) -> Train:
    def train(rows, steps, meter):
        found = trained(run, loss, rows, steps)
        meter.losses = found["loss"]
        for name in ("step", "head"):
            meter.known[f"{name}_ms"] = 1e3 * statistics.median(
                found[f"{name}_seconds"][steps // 5 :]
            )
        if run.cuda:
            meter.known["peak_gib"] = found["step_mib"] / 2**10

    return train


def deterministic(run: Run) -> dict:
    """Whether two runs of each of our heads in Megatron's deterministic mode have equal losses,
    gradient norms and weights. As in Megatron's trainer, torch refuses operations that are not
    deterministic."""
    torch.use_deterministic_algorithms(True)
    equal = []
    for loss in (HEADS[OURS], HEADS[f"{OURS}, one sweep"]):
        first, again = (
            trained(run, loss, run.shape.batch, min(10, run.shape.steps), "--deterministic") for _ in range(2)
        )  # fmt: skip
        equal += [first[name] == again[name] for name in ("loss", "grad_norm", "weights")]
        clean()
    torch.use_deterministic_algorithms(False)
    return {"equal_bits": all(run.ranks.gather(all(equal)))}


if __name__ == "__main__":
    main(
        "megatron-core",
        {n: functools.partial(build, loss=loss) for n, loss in HEADS.items()},
        deterministic,
    )
