"""Output layers that FSDP2 (`fully_shard`) manages: between calls, a weight is sharded over data
parallelism, too."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def unwrapped_class(layer: nn.Module) -> type:
    """Return the class that a module had before `fully_shard` replaced it."""
    return type(layer).__bases__[-1] if isinstance(layer, FSDPModule) else type(layer)


@contextlib.contextmanager
def unsharded(*modules: nn.Module):
    """Gather the parameters of those modules that FSDP manages over its ranks for the block. FSDP
    frees them after the backward; where no backward will follow, they are freed at the end of the
    block."""
    managed = [module for module in modules if isinstance(module, FSDPModule)]
    for module in managed:
        module.unshard()
    try:
        yield
    finally:
        for module in managed if not torch.is_grad_enabled() else ():
            module.reshard()
