"""Rows of a vocabulary that DistributedDataParallel takes for replicas."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..ranks.shard import VocabShard


def expect_no_replicas(module: nn.Module, shard: VocabShard):
    """Raise ValueError within the forward of a DDP that has this module's parameters, and ranks
    that share the vocabulary: it gave all of them one rank's rows, and would average the gradients
    of different ids. Ranks of other shards, those of data parallelism, have the same rows.
    """
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is None or shard.group is None:
        return
    own = dist.get_process_group_ranks(shard.group)
    ranks = dist.get_process_group_ranks(ddp.process_group)
    if len({*own} & {*ranks}) < 2:
        return
    parameters = {*module.parameters(recurse=False)}
    taken = [
        name
        for name, p in ddp.module.named_parameters()
        if p in parameters and name not in ddp.parameters_to_ignore
    ]
    if taken:
        raise ValueError(
            f"{taken} must be replicated by DDP over data-parallel ranks alone, got the ranks {ranks}, "
            f"of which {own} share the vocabulary, so that DDP gave all of them one rank's rows: "
            "build the model anew, and DistributedDataParallel(model, process_group=dp_group); "
            "without data-parallel ranks use no DDP"
        )
