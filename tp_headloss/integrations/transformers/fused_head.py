"""`fuse_head`: a model's forward from hidden states to the loss, without logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from ...arguments.options import Transform
from ...head_loss import HeadLoss, HeadLossOutput
from ...head_loss.checks import replicated_facts
from ...head_loss.output import Observed
from ...linear_head import Linear
from ...ranks.shard import VocabShard
from ...spec import described, lines_within
from . import model_parts
from .check import InstalledForward
from .forward import named_arguments
from .model_facts import (
    MaybeAdapted,
    call_shard,
    checked_linear,
    gathered_head,
    head_operands,
    output_layer,
    without_wrapper,
)
from .words import refuse_unread


@described
def fuse_head(
    model: MaybeAdapted,
    head_loss: HeadLoss | None = None,
    *,
    linear: Linear | None = None,
    shard: VocabShard | None = None,
    transform: Transform | None = None,
    observe: Callable[[HeadLossOutput], None] | None = None,
    skip_logits: bool | None = None,
) -> FusedHead:
    """Replace ``forward`` of this model: with labels, hidden states [B, S, H] replicated and the
    output layer's weight [V/P, H] sharded on V give the loss [], and in training logits never
    exist.

        fused = fuse_head(model, HeadLoss([CrossEntropy(), ZLoss(1e-4)]))
        model(input_ids=ids, labels=labels, num_items_in_batch=tokens).loss.backward()
        fused.remove()  # or with fuse_head(model): ...

    dH, the gradient of the hidden states, is summed over the group here (one all-reduce, as
    `Linear` says), because the body of a transformers model expects a whole gradient. Weights may
    be tied, have a bias, be sharded by FSDP2, too, and belong to a model that is not distributed,
    or to the model of a DeepSpeed engine (`integrations.deepspeed`). The model may see images, if
    its body does (Llava, Qwen2-VL, Gemma 3). An output layer that is not sharded may have
    PEFT's LoRA, or be in its modules_to_save. Of PEFT's wrapper the model within it gets the head.

    With labels the model returns its own output class, whose ``logits`` are None in training.
    Without labels the forward is the model's own, so generate() works; the model's own plan
    (tp_plan="auto") gathers the logits there. A call without labels and shift_labels raises
    ValueError in training, where a Trainer took the labels away, and where it would return this
    rank's columns alone (`colwise_plan`). ``.last`` is None before the first call; it and other
    arguments are as in `causal_lm_loss`. There, too, a rank with another ``num_items_in_batch`` has
    another loss, and no error, unless the head_loss has ``Options(validate="full")``.

    ``head_inputs`` [B, S], too: entry t belongs to label t + 1. So a mask is made of the labels as
    they are scored, ``F.pad(labels[:, 1:], (0, 1), value=-100) != -100``. That of the labels as
    they are given is another loss, and no error: no value is read.

    All ranks of the group install together: they compare these arguments (except observe), and
    three forward passes over eight tokens check that the model does nothing else between its body
    and its loss, and that the loss is the model's own.

    Args:
        head_loss, observe: as in `causal_lm_loss`.
        shard: as in `causal_lm_loss`, of all ids of the output layer.
        linear: `Linear`, except hidden_grad="reduce_scatter".
        transform: what the model does to its logits (softcapping, a scale); None reads it from the
            model's config.
        skip_logits: False makes logits in calls with labels, too, True never does. None (default):
            those in eval() and torch.no_grad() have them, because a Trainer's compute_metrics reads
            them; under a `colwise_plan` an all-reduce makes them. Say True to save their memory
            where nobody reads them: compute_metrics then gets empty predictions. Under a
            `colwise_plan` False is an error in other calls.

    Raises:
        TypeError, ValueError: the forward or the loss function is replaced already (also by a
            Module), the model has no weights yet, or a loss that is not finite, the body or the
            output layer is not what it seems (other adapters, quantization, hooks that the head
            would not run), a router has an auxiliary loss, ranks gave other arguments, or the check
            found something; the model is as it was before. In a call with labels:
            ``logits_to_keep``; another loss_function, transform of the config, or new hook of the
            output layer than when the head was installed; keywords and ``num_items_in_batch`` as
            in `causal_lm_loss`.
    """
    given = {
        "head_loss": head_loss,
        "linear": linear,
        "transform": transform,
        "observe": observe,
        "skip_logits": skip_logits,
    }
    return FusedHead(without_wrapper(model), shard, given)


class FusedHead(InstalledForward, Observed):
    """An installed fused head, as `fuse_head` returns it; a context manager that removes itself.

    Attributes:
        calls: how often this head has computed a loss: 0 after a training that did not use it.
    """

    skip_logits: bool | None

    def __init__(self, model, shard, given):
        super().__init__(model, shard, lines_within(fuse_head), given)
        self.last = None  # forgets the check's
        self.head_loss, self.linear = vars(self).pop("wanted")
        self.skip_logits, self.observe = given["skip_logits"], given["observe"]

    def _checked_arguments(self, given):
        head_loss = model_parts.scalar_head_loss(given["head_loss"])
        linear = checked_linear(given["linear"])
        self.wanted = head_loss, linear
        # until the check has passed: plain cross-entropy of any number of tokens, and never logits
        self.head_loss = HeadLoss(options=head_loss.options)
        self.linear = dataclasses.replace(linear, max_valid_tokens=None)
        self.skip_logits = True
        return replicated_facts(head_loss._definition, None, None, None) | {
            "ignore_index": head_loss.ignore_index,
            "options": head_loss.options,
            "linear": linear,
            "skip_logits": given["skip_logits"],
        }

    def __repr__(self) -> str:
        ids, name = self.checked_shard.vocab_size, type(self.model).__name__
        return f"FusedHead({name}, {ids} ids, {self.head_loss}); remove() undoes it"

    def _forward(self, model, args, kwargs):
        given = named_arguments(self.stock_forward, model, args, kwargs)
        refuse_unread("fuse_head", self.stock_forward, model_parts.HEAD_ARGUMENTS, given)
        if given.get("labels") is None and given.get("shift_labels") is None:
            if given.get("num_items_in_batch") is not None or model_parts.is_training(model):
                raise ValueError(model_parts.LOST_LABELS)
            outputs = self.stock_forward(
                model, *args, **{k: v for k, v in kwargs.items() if k != "head_inputs"}
            )
            if self.checked:  # during the check, the check itself says that no labels arrived
                model_parts.refuse_columns(outputs, self.checked_shard)
            return outputs
        outputs = self._run_body(model, given)
        hidden, layer = outputs.last_hidden_state, output_layer(model)
        head_loss = model_parts.with_ignore_index(self.head_loss, given.get("ignore_index"))
        labels = model_parts.next_token_labels(
            given.get("labels"), given.get("shift_labels"), head_loss.ignore_index
        )
        logits = None
        with gathered_head(model):
            skips = self.skip_logits
            if skips is None:
                skips = not model_parts.is_evaluating(model)
            if not skips:
                logits = self._logits(model, layer(hidden))
            features, weight = head_operands(layer, hidden)
            out = head_loss.linear(
                features,
                weight,
                labels.to(hidden.device),
                bias=layer.bias,
                shard=call_shard(model, self.shard, self.linear, hidden),
                denominator=model_parts.denominator_of(
                    head_loss, given.get("num_items_in_batch"), hidden.device
                ),
                transform=self.transform,
                inputs=given.get("head_inputs"),
                linear=self.linear,
            )
        self.observed(out)
        fields = {
            f.name: getattr(outputs, f.name, None) for f in dataclasses.fields(self.output_class)
        }
        result = self.output_class(**{**fields, "loss": out.loss, "logits": logits})
        return_dict = given.get("return_dict")
        as_dict = model.config.return_dict if return_dict is None else return_dict
        return result if as_dict else result.to_tuple()

    def _logits(self, model, logits):
        """The model's logits [.., V] of its output layer's. ValueError where these are this rank's
        columns, and a gradient may be wanted of them."""
        shard, scale, softcap = self.checked_shard, self.transform.scale, self.transform.softcap
        if model_parts.is_evaluating(model):
            logits = model_parts.whole_logits(logits, shard)
        model_parts.refuse_columns((logits,), shard)
        logits = logits if scale == 1 else logits * scale
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)
