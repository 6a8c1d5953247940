"""DeepSpeed AutoTP of Transformers' Llama: gathered logits, DeepSpeed's own vocabulary-parallel
loss, and `fuse_head`.

torchrun --standalone --nproc-per-node 2 scripts/hosts_gpu/deepspeed_autotp.py --json deepspeed.json
"""

import os
import sys

if "--tiny" in sys.argv:
    os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import llama
import torch
from deepspeed.utils import logger
from measure import FP8, OURS, Run, Train, main

from tp_headloss import Linear
from tp_headloss.integrations.transformers import fuse_head

logger.setLevel("ERROR")
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # of CPUs, which compiles C++


def build(run: Run, vocab_parallel: bool = False, linear: Linear | None = None) -> Train:
    """linear: of our head, or None for the host's own."""
    model = llama.unsharded(run)
    config = {
        "train_micro_batch_size_per_gpu": run.shape.batch, "bf16": {"enabled": run.dtype == torch.bfloat16},
        "tensor_parallel": {"autotp_size": run.ranks.world, "vocab_parallel_lm_head": vocab_parallel},
        "zero_optimization": {"stage": 0}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    if linear is not None:
        fuse_head(engine.module, linear=linear)

    def train(rows, steps, meter):
        meter.watch(engine.module.model.norm)

        def step(ids, labels):
            loss = engine(
                input_ids=ids, labels=ids, shift_labels=labels, num_items_in_batch=labels.numel()
            ).loss
            engine.backward(loss)
            engine.step()
            return loss

        try:
            run.loop(rows, steps, meter, step)
        finally:
            engine.zero_grad()

    return train


if __name__ == "__main__":
    main("deepspeed", {
        "DeepSpeed": build,
        "DeepSpeed, vocabulary-parallel": lambda run: build(run, vocab_parallel=True),
        OURS: lambda run: build(run, linear=Linear()),
        FP8: lambda run: build(run, linear=Linear(gradients="fp8")),
    })  # fmt: skip
