"""`OwnAttributes`: a module that refuses attributes which it would never read."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..spec.calls import refuse_attribute


class OwnAttributes(nn.Module):
    """Module whose arguments may be replaced by assignment, and others' may not.

    ``head_loss.label_smoothing = 0.1`` would be there and do nothing. Modules, hooks and methods
    that a host puts in are let through, and so are names that are no argument of ours.
    """

    def __setattr__(self, name: str, value: Any):
        if not torch.compiler.is_compiling() and not callable(value):
            refuse_attribute(type(self), name)
        super().__setattr__(name, value)
