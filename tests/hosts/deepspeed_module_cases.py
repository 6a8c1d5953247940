"""A model with this package's head under ZeRO of DeepSpeed, two replicas of two ranks of the
vocabulary, against the same model whole with torch's cross-entropy."""

import os
import sys
from functools import partial
from types import SimpleNamespace

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch._inductor.compile_fx  # once: DeepSpeed imports it in each rank, for 3 s
import torch.distributed as dist
from cases import relative_errors
from deepspeed.utils import logger

from tp_headloss import Init, VocabParallelHead, VocabShard

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # which compiles C++
logger.setLevel("ERROR")
V, H, LEARNING_RATE, MICROBATCHES = 64, 16, 0.5, 2


class Model(torch.nn.Module):
    def __init__(self, shard):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(H, H)
        self.head = VocabParallelHead(H, shard, init=Init(std=0.5, seed=1))

    def forward(self, x, labels, denominator):
        return self.head(self.body(x), labels, denominator=denominator).loss


def batches():
    """[replica][micro-batch] of hidden states and labels, of unequal numbers of tokens."""
    generator = torch.Generator().manual_seed(3)
    counts = ((5, 9), (12, 3))
    return [
        [
            (torch.randn(n, H, generator=generator), torch.randint(0, V, (n,), generator=generator))
            for n in row
        ]
        for row in counts
    ]


def groups_of():
    """DeepSpeed's `mpu`: ranks 0, 1 and 2, 3 share a vocabulary."""
    model, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    data, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    facts = {}
    for name, group in (("model", model), ("data", data)):
        facts |= {f"get_{name}_parallel_group": lambda group=group: group}
        facts |= {f"get_{name}_parallel_world_size": lambda group=group: dist.get_world_size(group)}
        facts |= {f"get_{name}_parallel_rank": lambda group=group: dist.get_rank(group)}
    return SimpleNamespace(**facts)


def expected():
    """Weights of the whole model after one step on the mean over all tokens."""
    whole = Model(VocabShard.from_group(None, V))
    every = [batch for row in batches() for batch in row]
    x, labels = torch.cat([x for x, _ in every]), torch.cat([labels for _, labels in every])
    torch.nn.functional.cross_entropy(whole.body(x) @ whole.head.weight.t(), labels).backward()
    return {n: (p.detach().clone(), LEARNING_RATE * p.grad) for n, p in whole.named_parameters()}


def zero(group, stage):
    mpu, accumulate = groups_of(), MICROBATCHES
    shard = VocabShard.from_group(mpu.get_model_parallel_group(), V)
    model = Model(shard)
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulate,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0,
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)[0]
    dp, tokens = (
        mpu.get_data_parallel_world_size(),
        sum(len(y) for row in batches() for _, y in row),
    )
    for x, labels in batches()[mpu.get_data_parallel_rank()]:
        engine.backward(dp * accumulate * engine(x, labels, tokens))
        engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        found = {n: p.detach().clone() for n, p in model.named_parameters()}
    errors, wrong = {}, {}
    for name, (before, step) in expected().items():
        rows = slice(shard.start, shard.stop) if name == "head.weight" else slice(None)
        updates = {name: found[name] - before[rows]}, {name: -step[rows]}
        errors |= relative_errors(*updates)
        wrong[name] = float((0.99 * updates[0][name] + step[rows]).norm() / step[rows].norm())
    return {"updates": max(errors.values()), "mutant": min(wrong.values())}


CASES = {f"stage{stage}": partial(zero, stage=stage) for stage in range(4)}
