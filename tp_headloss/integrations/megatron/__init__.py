"""Megatron-Core: the losses of a GPTModel from its hidden states, or from its logits shard.

    head = MegatronHead(ignore_index=-100)
    with install(model, head):              # or model(..., output_processor=head), Megatron-Core >= 0.18
        losses = model(ids, positions, mask, labels=labels)

`install` replaces two methods of one model object, makes a check call to see that the model uses them, and puts
Megatron's own methods back in the end. With fused=True the head never makes logits, and it reduces the gradient of the
hidden states over the group of the model's output layer, in the way of that layer: by an all-reduce, or by a
reduce-scatter under sequence parallelism. With fused=False only `compute_language_model_loss` changes, which works for
any LanguageModule. Losses of multi-token prediction take the same path.
"""

from .head import IGNORED_LABEL, MegatronHead
from .installation import Installed, install
from .layer import REFUSED_OPTIONS
from .postprocess import MegatronHeadMixin

__all__ = [
    "IGNORED_LABEL",
    "REFUSED_OPTIONS",
    "Installed",
    "MegatronHead",
    "MegatronHeadMixin",
    "install",
]
