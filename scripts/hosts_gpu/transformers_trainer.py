"""Transformers' Trainer on one GPU, or tensor parallel by the model's own plan, with its own loss and
with `fuse_head`.

torchrun --standalone --nproc-per-node 2 scripts/hosts_gpu/transformers_trainer.py --json transformers.json
"""

import llama
from measure import FP8, OURS, Run, Train, main
from transformers import Trainer, TrainingArguments

from tp_headloss import Linear
from tp_headloss.integrations.transformers import fuse_head


def build(run: Run, linear: Linear | None) -> Train:
    """linear: of our head, or None for the host's own."""
    model = llama.tensor_parallel(run)
    if linear is not None:
        fuse_head(model, linear=linear)

    def train(rows, steps, meter):
        texts = [row for step in range(steps) for row in run.rows(rows, step)[:, :-1]]
        arguments = TrainingArguments(**llama.arguments(run, rows, steps))
        trainer = Trainer(
            model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in texts]
        )
        llama.train(trainer, meter)

    return train


if __name__ == "__main__":
    main(
        "transformers",
        {
            "Transformers": lambda run: build(run, None),
            OURS: lambda run: build(run, Linear()),
            FP8: lambda run: build(run, Linear(gradients="fp8")),
        },
    )
