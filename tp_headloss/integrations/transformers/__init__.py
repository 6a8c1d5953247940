"""Hugging Face transformers: a causal language model whose output layer is sharded on the
vocabulary.

`causal_lm_loss` takes the place of ``model.loss_function``, and `fuse_head` that of
``model.forward``, without logits. Both are installed on one model by its owner; importing this
package changes nothing.
"""

from .. import require

require("transformers")  # before it is imported: an error that says which versions are supported

# ruff: noqa: E402
from .fused_head import FusedHead, fuse_head
from .loss_function import CausalLMShardLoss, causal_lm_loss, colwise_plan

__all__ = ["CausalLMShardLoss", "FusedHead", "causal_lm_loss", "colwise_plan", "fuse_head"]
