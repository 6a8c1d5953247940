"""One call of a model: calls that are refused, the model's body, its labels, and the numbers of its
loss."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from ...call.subclasses import is_dtensor
from ...head_loss import HeadLoss
from ...head_loss.checks import expect_denominator
from ...ranks.comm import reduce_in_place
from ...ranks.shard import VocabShard
from ...spec import IDS
from ..token_counts import expect_mean_over_tokens

# Arguments of a model's forward that its body does not take
HEAD_ARGUMENTS = (
    "labels",
    "shift_labels",
    "num_items_in_batch",
    "ignore_index",
    "logits_to_keep",
    "return_dict",
    "head_inputs",
)
_TRAINER = (
    "transformers' Trainer takes them away for label_smoothing_factor (use "
    "HeadLoss([CrossEntropy(label_smoothing=...)]) instead) and for compute_loss_func (leave it out)"
)
LOST_LABELS = (
    "a call in training, or with num_items_in_batch, must have labels (or shift_labels), got none, "
    f"so the HeadLoss would not be computed: {_TRAINER}; for logits, use eval() or torch.no_grad()"
)
FORGOTTEN_LOSS = (
    "logits of a call in training, which must have labels or a call of model.loss_function, got a "
    "backward without either, so the HeadLoss was not computed: write model(.., labels=labels), or "
    f"model.loss_function(logits, labels) before the backward. If labels were given, {_TRAINER}"
)


def is_training(model) -> bool:
    """Return True for a call whose outputs are meant to be differentiated."""
    return model.training and torch.is_grad_enabled()


def is_evaluating(model) -> bool:
    """Return True for a call whose logits are for somebody to read, such as a Trainer's
    compute_metrics."""
    return not (model.training or torch.is_grad_enabled())


def whole_logits(logits: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Return logits [.., V] on every rank, without a gradient, of this rank's columns [.., V/P]:
    one all-reduce. Logits of any other width come back as they are."""
    if shard.world_size == 1 or is_dtensor(logits) or logits.shape[-1] != shard.width:
        return logits
    columns = logits.detach()[..., : shard.valid_width]
    whole = columns.new_zeros(*logits.shape[:-1], shard.vocab_size)
    whole[..., shard.start : shard.start + shard.valid_width] = columns
    return reduce_in_place(whole, shard.world_size, shard.group_name)


def refuse_columns(outputs, shard: VocabShard):
    """Raise ValueError if logits of a call without labels are this rank's columns: its caller takes
    them for all."""
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    if shard.world_size > 1 and logits.shape[-1] == shard.width:
        raise ValueError(
            f"a call without labels must return all {shard.vocab_size} columns of the logits, got "
            f"this rank's {shard.width}, [{shard.start}, {shard.stop}): for logits and generate(), "
            "load the model with its own plan (tp_plan='auto' instead of colwise_plan; in "
            "DeepSpeed vocab_parallel_lm_head=false) and use fuse_head"
        )


def refuse_auxiliary_loss(model, given: Mapping[str, Any]):
    """Raise ValueError if the call, or the config, asks for the auxiliary loss of a router."""
    if given.get("output_router_logits") or getattr(
        model.config.get_text_config(), "output_router_logits", False
    ):
        raise ValueError(
            "output_router_logits adds the router's auxiliary loss, which a fused head does not "
            "compute: compute it from the model's body, or use causal_lm_loss"
        )


def body_of(model):
    """Return the module that makes the model's hidden states: its base model, or where the class
    names none (Llama 4) its only part that is a model; the model itself if there is neither."""
    if model.base_model is not model:
        return model.base_model
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    return parts[0] if len(parts) == 1 else model


def run_body(model, given: Mapping[str, Any]):
    """Return the outputs of the model's body for the arguments of a call with labels of the model's
    forward. ValueError if they keep only some logits, or ask for a router's loss."""
    keep = given.get("logits_to_keep", 0)
    if isinstance(keep, torch.Tensor) or keep != 0:
        raise ValueError(
            "labels score every position: logits_to_keep goes with a call without labels"
        )
    refuse_auxiliary_loss(model, given)
    body = body_of(model)
    # of Gemma 3, for its attention to images
    also = {"labels"} & inspect.signature(body.forward).parameters.keys()
    inputs = {
        name: value for name, value in given.items() if name not in HEAD_ARGUMENTS or name in also
    }
    return body(**inputs, return_dict=True)


def next_token_labels(labels, shift_labels, ignore_index: int) -> torch.Tensor:
    """Return the label of each position of the logits [B, S]: shift_labels, or labels shifted by
    one to the left."""
    if shift_labels is not None:
        IDS.check("shift_labels", shift_labels, {})
        return shift_labels
    if labels is None:
        raise ValueError("a loss needs labels or shift_labels, got neither")
    IDS.check("labels", labels, {})
    shifted = labels.long().roll(-1, -1)
    # torch's pad takes it through a float, which not all int64 fit
    shifted[..., -1:] = ignore_index
    return shifted


def scalar_head_loss(head_loss: HeadLoss | None) -> HeadLoss:
    """Return the HeadLoss, or the default one. ValueError if its loss is not a scalar."""
    head_loss = HeadLoss() if head_loss is None else head_loss
    if head_loss.reduction == "none":
        raise ValueError("a model's loss is one number, got a HeadLoss with reduction='none'")
    return head_loss


# HeadLoss -> by ignore_index its definition and a copy, which keeps what it compiled and what it
# knows of calls
_copies: WeakKeyDictionary[HeadLoss, dict] = WeakKeyDictionary()


def with_ignore_index(head_loss: HeadLoss, ignore_index: int | None) -> HeadLoss:
    """Return the HeadLoss with the ignore_index of a call, or with its own if the call has None."""
    if ignore_index is None or ignore_index == head_loss.ignore_index:
        return head_loss
    known, definition = _copies.setdefault(head_loss, {}), head_loss._definition
    source, own = known.get(ignore_index, (None, head_loss))
    if source is not definition or own.compile_terms != head_loss.compile_terms:
        own = copy.copy(head_loss)
        own.ignore_index = ignore_index
        known[ignore_index] = definition, own
    return own.train(head_loss.training)


def denominator_of(head_loss, number, device):
    """Return num_items_in_batch as a number or a scalar tensor; transformers' DataParallel gives
    several equal ones. TypeError or ValueError if it is no count, or one of something else than the
    loss divides by; the value of a tensor on an accelerator is not read.

    head_loss: None is a mean over tokens.
    """
    if number is None:
        return None
    if head_loss is not None:
        expect_mean_over_tokens(
            head_loss,
            "num_items_in_batch",
            "set trainer.model_accepts_loss_kwargs = False, so that a Trainer passes none and "
            "averages its micro-batches",
        )
    value = number
    if isinstance(number, torch.Tensor):
        number = _one_count(number)
        value = number.item() if number.device.type == "cpu" else number
        number = number.to(device)
    expect_denominator(value, "mean", device, "num_items_in_batch")
    return number


def _one_count(numbers: torch.Tensor) -> torch.Tensor:
    """Return the number that a tensor holds, once or several times. ValueError if it holds none, or
    in the memory of the host different ones."""
    flat = numbers.flatten()
    differ = flat.device.type == "cpu" and bool((flat != flat[:1]).any())
    if (differ and not bool(flat.isnan().all())) or not flat.numel():
        raise ValueError(
            f"num_items_in_batch must be one count, that of all tokens, got {flat.tolist()}"
        )
    return flat[0]
