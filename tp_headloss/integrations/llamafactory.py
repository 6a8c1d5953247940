"""LLaMA-Factory: a callback that computes the loss of supervised training by
`transformers.fuse_head`, without logits. Nothing of LLaMA-Factory is imported.

LLaMA-Factory makes the model and the Trainer itself, and takes callbacks of transformers. This one
is for any such host.
"""

from __future__ import annotations

from typing import Any

from . import require

require("transformers")  # before it is imported: an error that says which versions are supported

# ruff: noqa: E402
from transformers import TrainerCallback

from ..head_loss import HeadLoss
from .transformers import FusedHead, fuse_head


class HeadLossCallback(TrainerCallback):
    """Installs `transformers.fuse_head` on the model of a Trainer that is being made, before the
    model is wrapped.

        run_exp(callbacks=[HeadLossCallback()])  # of llamafactory.train.tuner

    Args:
        head_loss: with a scalar loss; default cross-entropy.

    Attributes:
        fused: the installed head, whose ``.last`` has the metrics of the last call; None before
            there is a Trainer.

    Raises:
        TypeError, ValueError: while the Trainer is made, as `transformers.fuse_head`.
    """

    def __init__(self, head_loss: HeadLoss | None = None):
        self.head_loss = head_loss
        self.fused: FusedHead | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any):
        """Install the head. Called by the Trainer.

        Args:
            model: a causal language model of transformers, or PEFT's wrapper of one.
        """
        self.fused = fuse_head(model, self.head_loss)
