"""The place in a model's forward where the head takes over from Megatron's output layer and
loss."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..replacement import replaced
from .head import MegatronHead, megatron_head
from .layer import computing_instead, refuse_other_methods
from .soft_targets import main_states_of

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
else:
    GPTModel = object  # the class that it is mixed into has Megatron's


ENTRY = "_postprocess"  # GPTModel's method between its last layer and its loss


class MegatronHeadMixin(GPTModel):
    """The fused head for a subclass of GPTModel, ``class Model(MegatronHeadMixin, GPTModel)``,
    without `install`.

    Set ``model.megatron_head`` to a `MegatronHead`, or to a `HeadLoss`, of which one is made. While
    it is None, the model is Megatron's own. Set it on the model itself, before it is wrapped: on a
    wrapper (DistributedDataParallel, Float16Module) it is an attribute that nobody reads, and the
    model trains with Megatron's own loss, silently. `install` sees through wrappers, but takes
    classes without this mixin. No check call follows, and ranks do not compare their heads.

    A call with labels raises ValueError for hooks or a forward of the output layer, and for another
    compute_language_model_loss or _scale_logits, of the model or any of its classes, all of which
    the fused head would ignore.

    Raises:
        TypeError: of the class statement, if the mixin stands behind GPTModel, whose methods would
            win, or before another LanguageModule, without ``_postprocess``; of the assignment, for
            anything else than a head.
        ValueError: of the assignment, for options and depth_terms that `install` refuses, and
            before ``super().__init__``.
    """

    megatron_head: MegatronHead | None = None

    def __init_subclass__(cls, **keywords):
        super().__init_subclass__(**keywords)
        place = cls.__mro__.index(MegatronHeadMixin)
        first = [x for x in cls.__mro__[:place] if not issubclass(x, MegatronHeadMixin)]
        if hiding := _with_a_loss(first):
            raise TypeError(
                f"{cls.__name__} must name MegatronHeadMixin first, got {hiding} before it, whose "
                f"methods win: write class {cls.__name__}(MegatronHeadMixin, {hiding})"
            )
        others = cls.__mro__[place + 1 :]
        if (other := _with_a_loss(others)) and not hasattr(super(), ENTRY):
            raise TypeError(
                f"MegatronHeadMixin must be mixed into a GPTModel, got {other}, which has no "
                f"{ENTRY}: use install(model, head)"
            )
        if "megatron_head" in vars(cls):
            cls.megatron_head = megatron_head("megatron_head", cls.megatron_head, optional=True)

    def __setattr__(self, name, value):
        # also because torch keeps a module, as a HeadLoss is, where the class's None hides it
        if name == "megatron_head":
            value = self._checked_head(value)
        elif isinstance(value, MegatronHead):
            raise AttributeError(f"a MegatronHead is the model's megatron_head, got it as {name!r}")
        super().__setattr__(name, value)

    def _checked_head(self, value) -> MegatronHead | None:
        head = megatron_head("megatron_head", value, optional=True)
        if head is not None:
            if "config" not in vars(self):
                raise ValueError(
                    "megatron_head must be set after super().__init__(..), got it before: the "
                    "model has no config yet"
                )
            head.refuse_unused(self.config, fused=True)
        return head

    def _postprocess(self, *args, **kwargs):
        original = super()._postprocess
        bound = inspect.signature(original).bind(*args, **kwargs).arguments
        return postprocess(self, self.megatron_head, original, **bound)

    def compute_language_model_loss(self, labels, logits):
        if self.megatron_head is None:
            return super().compute_language_model_loss(labels, logits)
        return self.megatron_head.losses_from_logits(logits, labels, self.output_layer)


def _with_a_loss(classes) -> str:
    """Return the name of the first of these classes with an entry or a loss of its own, "" if none
    has."""
    methods = ENTRY, "compute_language_model_loss"
    return next((x.__name__ for x in classes if any(m in vars(x) for m in methods)), "")


def postprocess(model, head: MegatronHead | None, original, *, labels=None, **rest):
    """Run `original`, which is GPTModel._postprocess or HybridModel.forward, with the head in place
    of the output layer and the losses. Without labels or head, and at inference, `original` runs
    unchanged."""
    rest = {"labels": labels, **rest}
    infers = rest.get("inference_context") is not None and not model.training
    if head is None or labels is None or infers or not model.post_process:
        return original(**rest)
    refuse_other_methods(model)
    has_hook = "output_processor" in inspect.signature(original).parameters
    if has_hook and rest.get("output_processor") is not None:
        raise ValueError(
            "a model that has a head must be called without output_processor=, got one beside "
            "labels: leave it out, or remove() the head first"
        )
    if has_hook and not getattr(model.config, "mtp_num_layers", None):
        return original(**{**rest, "output_processor": head})
    # Megatron's own code runs, with hidden states in place of the logits of all depths
    layer, config = model.output_layer, model.config
    counted = model.training and counts_accepted_tokens()

    def loss(given, hidden):
        if given is labels:
            return head.losses_from_hidden(
                hidden, taken.weight, layer, given, config, rest.get("loss_mask")
            )
        main_hidden = main_states.moved() if head.learns_from_main_head else None
        losses, taken.correct = head.depth_losses_from_hidden(
            hidden, taken.weight, layer, given, config, main_hidden=main_hidden, counted=counted
        )
        return losses

    taking = hidden_in_place_of_logits(model, compute_language_model_loss=loss)
    main = main_states_of(model, rest.get("hidden_states"), rest.get("packed_seq_params"))
    with main as main_states, taking as taken, acceptance_counts_of(taken):
        return original(**rest)


def counts_accepted_tokens() -> bool:
    """True if this version of Megatron counts the accepted tokens of depths in training (from 0.19
    on)."""
    from megatron.core.transformer import multi_token_prediction

    return hasattr(multi_token_prediction, "_compute_mtp_acceptance_counts")


@contextmanager
def acceptance_counts_of(taken: TakenHidden):
    """Make Megatron (from 0.19 on) count the accepted tokens of a depth of multi-token prediction
    by what its loss has found, for the duration of the block: it would look for the likeliest ids
    in logits."""
    from megatron.core.transformer import multi_token_prediction

    def counts(logits, labels, loss_mask, *_, **__):
        counted = loss_mask.bool()
        return (taken.correct & counted).sum().float(), counted.sum().float()

    with replaced(multi_token_prediction, _compute_mtp_acceptance_counts=counts):
        yield


@dataclass
class TakenHidden:
    """Hidden states and weight of the last call of a model's output layer, which computed no logits
    from them.

    Attributes:
        hidden: [s, b, h], [s/P, b, h] under sequence parallelism; None before the first call.
        weight: [v/P, h] of tied embeddings, or None: the layer's own.
        correct: bool [b, s], the last depth's likeliest id is the label; None where Megatron does
            not count these.
    """

    hidden: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    correct: torch.Tensor | None = None


@contextmanager
def hidden_in_place_of_logits(model, **methods):
    """Make the output layer return its input for the duration of the block -> `TakenHidden`, as
    `computing_instead` does; methods: more methods of the model to replace."""
    taken = TakenHidden()

    def forward(hidden, weight=None, runtime_gather_output=None):
        taken.hidden, taken.weight = hidden, weight
        return hidden, None

    # Megatron would scale hidden states as it scales logits: the head's transform does that
    methods |= {"_scale_logits": lambda hidden: hidden}
    with computing_instead(model.output_layer, forward), replaced(model, **methods):
        yield taken
