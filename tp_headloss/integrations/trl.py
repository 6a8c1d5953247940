"""TRL: the log-probs of its trainers from a sharded output layer, which TRL's own fused head would
gather."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import nn

from ..arguments.options import Transform
from ..head_loss import HeadLoss
from ..linear_head import Linear, linear_vocab_statistics
from ..ranks.shard import VocabShard
from ..spec import TINY, CheckedBy, Names, NumberLine, described, lines_within
from ..spec.words import shown, type_name
from . import require
from .token_counts import agreed_count
from .transformers.check import InstalledForward
from .transformers.forward import head_below, is_of_trl, named_arguments, without_head_below
from .transformers.model_facts import (
    call_shard,
    checked_linear,
    gathered_head,
    head_operands,
    output_layer,
    without_wrapper,
)
from .transformers.model_parts import denominator_of, next_token_labels, refuse_columns
from .transformers.words import OF_TRL, refuse_unread

require("trl")
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head  # noqa: E402

IGNORED_LABEL = -100  # TRL's label of tokens that have no log-prob
OUTPUTS = {  # of TRL's head -> the statistics that it needs in want, and its value [B, S]
    "log_probs": ((), lambda stats: stats.log_prob),
    "entropy": (("entropy",), lambda stats: stats.entropy),
    "log_sum_sq_probs": (("collision",), lambda stats: stats.collision.detach().log()),
    "mean_logits": (("total",), lambda stats: stats.total.detach() / stats.vocab_size),
    "is_top1": (("argmax",), lambda stats: stats.correct),
}
SETTINGS = ("temperature", "cast_lm_head_to_fp32", "outputs")
# keywords of a call that this head reads
READ = (
    *("labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "return_dict"),
    OF_TRL,
)


@dataclass(frozen=True)
class Temperature(NumberLine):
    """A positive number, in whose place by position others of these functions take a HeadLoss."""

    def check(self, name, value, sizes):
        """Raise TypeError for anything but a number, and ValueError for one that is not positive."""
        if isinstance(value, (HeadLoss, *HeadLoss.made_of)):
            raise TypeError(
                f"{name} must be a number, got {type_name(value)}, which fuse_log_probs does not "
                "take, because the loss is the trainer's: write fuse_head(model, HeadLoss(..))"
            )
        super().check(name, value, sizes)


def _expect_model(name, value):
    """Raise TypeError for anything but a model, such as the None that a trainer without a ref_model
    has in its place."""
    if isinstance(value, nn.Module):
        return
    said = ""
    if value is None:
        said = (
            ": this trainer has no ref_model (with PEFT, or where no KL penalty needs one), so "
            "there is nothing to install"
        )
    elif isinstance(getattr(value, "model", None), nn.Module):
        said = ", a trainer: pass its .model, and of a reference its .ref_model"
    raise TypeError(f"{name} must be a model, got {shown(value)}{said}")


@described
def fuse_log_probs(
    model: Annotated[nn.Module, CheckedBy("a model, or PEFT's wrapper of one", _expect_model)],
    temperature: Annotated[float, Temperature(TINY, 1 / TINY, "positive and finite in fp32")]
    | None = None,
    cast_lm_head_to_fp32: bool | None = None,
    outputs: Annotated[tuple[str, ...], Names(lambda: sorted(OUTPUTS), of="value")] | None = None,
    *,
    linear: Linear | None = None,
    shard: VocabShard | None = None,
    transform: Transform | None = None,
) -> FusedLogProbs:
    """Install TRL's ``add_fused_lm_head`` for an output layer whose weight stays sharded: ``model(..., labels=labels,
    fused_lm_head=True)`` gives TRL's FusedCausalLMOutput from hidden states [B, S, H] and weight [V/P, H].

        trainer = GRPOTrainer(model, ...)  # installs TRL's own
        fused = fuse_log_probs(trainer.model)  # replaces it, with its settings; .remove() puts it back

    Fields are [B, S - 1], or [B, S] with ``shift_labels``, replicated, and 0 where the label is -100. log_probs and
    entropy are differentiable, the others are not. dH, the gradient of the hidden states, is summed
    over the group here (one all-reduce), because the model's body expects a whole gradient. Without
    ``fused_lm_head=True`` the forward is the model's own, so that generate() works. All ranks of
    the group install together, and compare their settings: one that does it alone, under
    ``if rank == 0``, waits until the group's timeout. Where None, a setting is that of TRL's head
    on this model, or without one TRL's default: a temperature of 1.0 then comes with a UserWarning.
    Below the autocast that accelerate puts around the forward for bf16 or fp16 it is installed and
    removed at any time.

    Tokens without a label are dropped before the head, by each rank for itself. So each call begins
    with one small all-gather, before the model's body, in which ranks that share a vocabulary compare
    their labels. A rank that calls it without ``fused_lm_head=True`` makes the others wait until the
    group's timeout. Labels that differ, in shape or in value, or that one rank has not, are a
    ValueError on every rank, unless `Linear` has max_valid_tokens: then nothing is compared. Another
    ``num_items_in_batch`` on one rank is never noticed, and gives that rank another ``loss``. A label
    outside of [0, V) other than -100 gives NaN at its token, and a ``loss`` of NaN.

    Args:
        temperature: divides the logits; TRL's default is 1.0.
        cast_lm_head_to_fp32: True computes in fp32, from a copy of the rows if they are of another dtype; TRL's default
            is False.
        outputs: fields of the output besides log_probs; TRL's default is ("log_probs",). The mean of
            "mean_logits" leaves out logits of -inf. Those of
            TRL's head on this model must be among them, because its trainer reads them.
        linear: as in `transformers.fuse_head`.
        shard: as in `transformers.fuse_head`.
        transform: as in `transformers.fuse_head`, without the temperature.

    Raises:
        TypeError, ValueError: as in `transformers.fuse_head`; None, as of a trainer without a
            ref_model; an output that TRL's head does not have, or one that it has on this model and
            outputs leave out; a head of this package below TRL's; an auxiliary loss of a router; a
            temperature in the transform; a loss_function that TRL would not call; a forward that
            was deleted after accelerate prepared the model for bf16 or fp16. In a call: keywords
            and ``num_items_in_batch`` as in `transformers.fuse_head`; labels that differ between
            ranks. In a call without labels: logits of this rank's columns
            (`transformers.colwise_plan`).
    """
    _expect_model("model", model)
    given = {
        "temperature": temperature,
        "cast_lm_head_to_fp32": cast_lm_head_to_fp32,
        "outputs": outputs,
        "linear": linear,
        "transform": transform,
    }
    return FusedLogProbs(without_wrapper(model), shard, given)


def _settings_of(trl_forward) -> dict[str, Any]:
    """Return the settings of the head that TRL installed on a model; None: TRL's defaults."""
    if trl_forward is None:
        defaults = inspect.signature(add_fused_lm_head).parameters
        return {name: defaults[name].default for name in SETTINGS}
    closure = inspect.getclosurevars(trl_forward.__func__).nonlocals
    return {name: closure[name] for name in SETTINGS}


def _expect_outputs_of_trainer(outputs: tuple[str, ...], of_trainer: tuple[str, ...]):
    """Raise ValueError for outputs that leave out one that the trainer asked its own head for."""
    left_out = sorted({*of_trainer} - {"log_probs", *outputs})
    if left_out:
        every = tuple(dict.fromkeys((*of_trainer, *outputs)))
        raise ValueError(
            f"outputs must have those of the trainer's own head, {of_trainer}, which the trainer "
            f"reads, got {outputs} without {left_out}: write outputs={every}"
        )


class FusedLogProbs(InstalledForward):
    """An installed head that returns TRL's output, see `fuse_log_probs`; a context manager that
    removes itself.

    Attributes:
        calls: how often this head has computed log-probs: 0 after a training that did not use it.
    """

    def __init__(self, model, shard, given):
        super().__init__(model, shard, lines_within(fuse_log_probs), given, fused_lm_head=True)
        self.linear, self.settings = vars(self).pop("wanted")
        if given["temperature"] is None and "forward" not in self._before:
            warnings.warn(
                f"this {type(model).__name__} has no head of a TRL trainer, whose temperature the "
                "new one would have, so its temperature is 1.0: install it after the trainer is "
                "made, or write fuse_log_probs(model, temperature=..)",
                stacklevel=4,
            )

    @property
    def last(self):
        """Not there: AttributeError. The model's own output has the log-probs."""
        raise AttributeError(
            "FusedLogProbs keeps no last output, as the head of fuse_head does: log-probs are in "
            "the model's output, means in the trainer's log"
        )

    def _takes_place_of(self, forward):
        return is_of_trl(forward)

    def _checked_arguments(self, given):
        trl_forward = self._before.get("forward")
        # which TRL's forward would drop without a word
        if (name := head_below(trl_forward)) is not None:
            raise ValueError(without_head_below(name))
        settings = _settings_of(trl_forward)
        if trl_forward is not None and given["outputs"] is not None:
            _expect_outputs_of_trainer(tuple(given["outputs"]), settings["outputs"])
        settings |= {name: given[name] for name in SETTINGS if given[name] is not None}
        if self.transform.temperature != 1:
            raise ValueError(
                "transform must have no temperature, which the trainer's own replaces, got "
                f"{self.transform}: write fuse_log_probs(model, temperature={self.transform.temperature})"
            )
        # which a scale may make too large or too small
        replace(self.transform, temperature=settings["temperature"])
        linear = checked_linear(given["linear"])
        self.wanted = linear, settings
        # at temperature 1 and of any number of tokens until the check has compared the loss with
        # the model's own
        self.linear = replace(linear, max_valid_tokens=None)
        self.settings = {**settings, "temperature": 1.0}
        return {"linear": linear, **settings}

    def __repr__(self) -> str:
        ids, name = self.checked_shard.vocab_size, type(self.model).__name__
        settings = ", ".join(f"{key}={value!r}" for key, value in self.settings.items())
        return (
            f"FusedLogProbs({name}, {ids} ids, {settings}), called {self.calls} times; remove() "
            "undoes it"
        )

    def _forward(self, model, args, kwargs):
        given = named_arguments(self.stock_forward, model, args, kwargs)
        refuse_unread("fuse_log_probs", self.stock_forward, READ, given)
        if not given.pop(OF_TRL, False):
            own = {name: x for name, x in kwargs.items() if name != OF_TRL}
            outputs = self.stock_forward(model, *args, **own)
            if given.get("labels") is None:
                refuse_columns(outputs, self.checked_shard)
            return outputs
        self.calls += 1
        given["use_cache"] = False
        layer, linear = output_layer(model), self.linear
        has_none = given.get("labels") is None and given.get("shift_labels") is None
        if has_none and linear.max_valid_tokens is None and not layer.weight.is_meta:
            # so that ranks with labels are told so, and do not wait
            none = torch.empty(0, dtype=torch.int64, device=layer.weight.device)
            agreed_count(none, IGNORED_LABEL, self.checked_shard)
        labels = next_token_labels(given.get("labels"), given.get("shift_labels"), IGNORED_LABEL)
        # the valid tokens alone, as in TRL's head
        if linear.max_valid_tokens is None:
            # an offloaded weight is on no device, and has an error of its own after the body
            if not layer.weight.is_meta:
                labels = labels.to(layer.weight.device)
            # before the body, whose collectives fail where ranks have batches of other sizes
            count = agreed_count(labels, IGNORED_LABEL, self.checked_shard)
            linear = replace(linear, max_valid_tokens=count)
        hidden = self._run_body(model, given).last_hidden_state
        labels = labels.to(hidden.device)
        cast = self.settings["cast_lm_head_to_fp32"]
        autocast = torch.is_autocast_enabled(hidden.device.type) and not cast
        with gathered_head(model), torch.autocast(hidden.device.type, enabled=autocast):
            shard = call_shard(model, self.shard, linear, hidden)
            features, weight = head_operands(layer, hidden)
            if cast:
                features, weight = features.float(), weight.float()
            stats = linear_vocab_statistics(
                features,
                weight,
                labels,
                bias=layer.bias,
                shard=shard,
                want=tuple(want for name in self.settings["outputs"] for want in OUTPUTS[name][0]),
                transform=replace(self.transform, temperature=self.settings["temperature"]),
                linear=linear,
            )
        return self._output(stats, labels, given)

    def _output(self, stats, labels, given):
        """TRL's output: the requested fields, 0 where ignored, and the mean negative log-prob as
        the loss."""
        mask = labels != IGNORED_LABEL
        fields = {
            name: OUTPUTS[name][1](stats) for name in ("log_probs", *self.settings["outputs"])
        }
        if given.get("shift_labels") is None:  # the last position has no label
            mask = mask[:, :-1]
            fields = {name: x[:, :-1] for name, x in fields.items()}
        fields = {name: x.masked_fill(~mask, 0) for name, x in fields.items()}
        total = fields["log_probs"].sum()
        tokens = denominator_of(None, given.get("num_items_in_batch"), total.device)
        if tokens is None:
            loss = -total / mask.sum().clamp(min=1)
        else:  # as of a HeadLoss, a count of 0 gives 0
            count = total.new_ones(()) * tokens
            loss = (-total / count.masked_fill(count == 0, 1)).masked_fill(count == 0, 0)
        return FusedCausalLMOutput(loss=loss, label_mask=mask, **fields)
