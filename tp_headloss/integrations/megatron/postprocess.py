"""The place in a model's forward where the head takes over from Megatron's output layer and loss."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from .head import MegatronHead
from .methods import replaced

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
else:
    GPTModel = object  # the class that it is mixed into has Megatron's


class MegatronHeadMixin(GPTModel):
    """The fused head for a subclass of GPTModel, ``class Model(MegatronHeadMixin, GPTModel)``, without `install`.

    Set ``model.megatron_head`` to a `MegatronHead`. While it is None, the model is Megatron's own.
    """

    megatron_head: MegatronHead | None = None

    def _postprocess(self, *args, **kwargs):
        original = super()._postprocess
        bound = inspect.signature(original).bind(*args, **kwargs).arguments
        return postprocess(self, self.megatron_head, original, **bound)

    def compute_language_model_loss(self, labels, logits):
        if self.megatron_head is None:
            return super().compute_language_model_loss(labels, logits)
        return self.megatron_head.losses_from_logits(logits, labels, self.output_layer)


def postprocess(model, head: MegatronHead | None, original, *, labels=None, **rest):
    """Run `original`, which is GPTModel._postprocess or HybridModel.forward, with the head in place of the output layer
    and the loss. Without labels or head, and at inference, `original` runs unchanged."""
    rest = {"labels": labels, **rest}
    infers = rest.get("inference_context") is not None and not model.training
    if head is None or labels is None or infers or not model.post_process:
        return original(**rest)
    if "output_processor" in inspect.signature(original).parameters:
        if rest.get("output_processor") is None:
            rest["output_processor"] = head
        return original(**rest)
    # A HybridModel, or Megatron before 0.18: Megatron's own code runs, with hidden states in place of the logits
    given_weight, layer, depths = None, model.output_layer, getattr(model.config, "mtp_num_layers", None) or 0

    def keep_hidden(hidden, weight=None, runtime_gather_output=None):
        nonlocal given_weight
        given_weight = weight
        return hidden, None

    def loss(labels, hidden):
        return head.losses_from_hidden(hidden, given_weight, layer, labels, model.config, rest.get("loss_mask"), depths)

    def keep_scale(hidden):  # 0.17 would scale the hidden states as it scales logits: the head's transform does that
        return hidden

    model_methods = {"compute_language_model_loss": loss, "_scale_logits": keep_scale}
    with replaced(layer, forward=keep_hidden), replaced(model, **model_methods):
        return original(**rest)
