"""The place in a model's forward where the head takes over from Megatron's output layer and loss."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

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
    layer, depths = model.output_layer, getattr(model.config, "mtp_num_layers", None) or 0

    def loss(labels, hidden):
        return head.losses_from_hidden(hidden, taken.weight, layer, labels, model.config, rest.get("loss_mask"), depths)

    with hidden_in_place_of_logits(model, compute_language_model_loss=loss) as taken:
        return original(**rest)


@dataclass
class TakenHidden:
    """Hidden states and weight of the last call of a model's output layer, which computed no logits from them.

    Attributes:
        hidden: [s, b, h], [s/P, b, h] under sequence parallelism; None before the first call.
        weight: [v/P, h] of tied embeddings, or None: the layer's own.
    """

    hidden: torch.Tensor | None = None
    weight: torch.Tensor | None = None


@contextmanager
def hidden_in_place_of_logits(model, **methods):
    """Make the output layer return its input for the duration of the block -> `TakenHidden`. The layer is still called
    as a module, because hooks on it gather its parameters; methods: more methods of the model to replace."""
    taken = TakenHidden()

    def forward(hidden, weight=None, runtime_gather_output=None):
        taken.hidden, taken.weight = hidden, weight
        return hidden, None

    def keep_scale(hidden):  # Megatron would scale hidden states as it scales logits: the head's transform does that
        return hidden

    with replaced(model.output_layer, forward=forward), replaced(model, _scale_logits=keep_scale, **methods):
        yield taken
