"""NeMo-Automodel's losses, called as its recipes call them, of Transformers' Llama in torch's tensor parallelism, with
its MaskedCrossEntropy and with ours.

torchrun --standalone --nproc-per-node 2 scripts/hosts_gpu/nemo_automodel_loss.py --json nemo_automodel.json
"""

import functools

import llama
import torch
from measure import FP8, OURS, Run, Train, main
from nemo_automodel.components.loss.linear_ce_base import LinearCrossEntropy
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.components.loss.utils import calculate_loss
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tp_headloss import Linear
from tp_headloss.integrations.nemo_automodel import FusedHeadLoss, LogitsLoss


def build(run: Run, loss_of) -> Train:
    model, loss_fn = llama.unsharded(run), loss_of()
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    plan = {f"model.layers.*.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.*.{name}": RowwiseParallel() for name in ("o_proj", "down_proj")}
    plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, run.ranks.mesh["tp"], plan)

    def train(rows, steps, meter):
        # one parameter at a time: some are DTensors, some are not
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, foreach=False)
        meter.watch(model.model.norm)

        def step(ids, labels):
            hidden = model.model(ids).last_hidden_state
            logits = None if isinstance(loss_fn, LinearCrossEntropy) else model.lm_head(hidden)
            given = {"model": model, "hidden_states": hidden, "num_label_tokens": labels.numel()}
            loss = calculate_loss(loss_fn, logits=logits, labels=labels, **given)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        try:
            run.loop(rows, steps, meter, step)
        finally:
            model.zero_grad()

    return train


if __name__ == "__main__":
    losses = {
        "NeMo-Automodel": MaskedCrossEntropy,
        f"{OURS}, loss of logits": LogitsLoss,
        OURS: FusedHeadLoss,
        FP8: lambda: FusedHeadLoss(linear=Linear(gradients="fp8")),
    }
    main(
        "nemo_automodel",
        {name: functools.partial(build, loss_of=loss) for name, loss in losses.items()},
    )
