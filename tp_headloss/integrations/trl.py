"""TRL: the log-probs of its trainers from a sharded output layer, which TRL's own fused head would gather."""

from __future__ import annotations

import inspect

import torch

from ..api import Transform
from ..linear import Linear, linear_vocab_statistics
from ..shard import VocabShard
from . import check_type, require
from .transformers import (
    arguments,
    call_shard,
    check_path,
    checked_transform,
    head_shard,
    install,
    output_layer,
    quiet,
    refuse_columns,
    refuse_logits_to_keep,
    replicated,
    run_body,
    shifted,
    stock_forward,
    uninstall,
)

require("trl")
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head  # noqa: E402

IGNORED = -100  # TRL's
STATISTICS = {"log_probs": (), "entropy": ("entropy",), "mean_logits": ("total",), "is_top1": ("argmax",)}
SETTINGS = ("temperature", "cast_lm_head_to_fp32", "outputs")


def fuse_log_probs(
    model,
    temperature: float | None = None,
    cast_lm_head_to_fp32: bool | None = None,
    outputs: tuple[str, ...] | None = None,
    *,
    linear: Linear | None = None,
    shard: VocabShard | None = None,
    transform: Transform | None = None,
) -> FusedLogProbs:
    """TRL's ``add_fused_lm_head`` for an output layer whose weight stays sharded: ``model(..., labels=labels,
    fused_lm_head=True)`` gives TRL's FusedCausalLMOutput from hidden states [B, S, H] and weight [V/P, H]. dH is
    summed over the group here (one all-reduce), because the model's body expects a whole gradient.

        trainer = GRPOTrainer(model, ...)  # installs TRL's own
        fused = fuse_log_probs(trainer.model)  # replaces it, with its settings; .remove() puts it back

    Fields are [B, S - 1], or [B, S] with ``shift_labels``, replicated, 0 where the label is -100: log_probs and entropy
    are differentiable, mean_logits and is_top1 are not. Without ``fused_lm_head=True`` the forward is the model's own,
    so that generate() works; ValueError for a call without labels that gives this rank's columns of the logits alone
    (`transformers.colwise_plan`). On a model without TRL's head, settings left out are TRL's defaults: 1.0, False,
    ("log_probs",). cast_lm_head_to_fp32 makes an fp32 copy of this rank's rows if the weight is of another dtype.

    linear, shard, transform, the check (all ranks of the group install together) and what is refused: as in
    `transformers.fuse_head`. ValueError, too, for the output "log_sum_sq_probs", which no statistic here gives, and
    for an auxiliary loss of a router.
    """
    output_layer(model)
    before, settings = of_trl(model)
    given = {"temperature": temperature, "cast_lm_head_to_fp32": cast_lm_head_to_fp32, "outputs": outputs}
    settings |= {name: value for name, value in given.items() if value is not None}
    check_type("temperature", settings["temperature"], int, float)
    check_type("outputs", settings["outputs"], tuple, list)
    if unknown := set(settings["outputs"]) - set(STATISTICS):
        raise ValueError(f"outputs must be of {sorted(STATISTICS)}, got {sorted(unknown)}: keep TRL's head for these")
    if not settings["temperature"] > 0:
        raise ValueError(f"temperature must be positive, got {settings['temperature']}")
    return FusedLogProbs(model, before, settings, linear, shard, transform)


def of_trl(model):
    """-> the forward that TRL installed on this model, or None, and its settings, or the defaults."""
    own = vars(model).get("forward")
    code = getattr(getattr(own, "__func__", None), "__code__", None)
    if code is None or code.co_filename != add_fused_lm_head.__code__.co_filename:
        defaults = inspect.signature(add_fused_lm_head).parameters
        return None, {name: defaults[name].default for name in SETTINGS}
    closure = inspect.getclosurevars(own.__func__).nonlocals
    return own, {name: closure[name] for name in SETTINGS}


class FusedLogProbs:
    """An installed fused head with TRL's contract; see `fuse_log_probs`."""

    def __init__(self, model, before, settings, linear, shard, transform):
        self.model, self.before, self.bound, self.shard, self.calls = model, before, None, shard, 0
        self.linear, self.settings = replicated(linear), {**settings, "temperature": 1.0}  # to compare with the model
        if before is not None:
            del model.forward
        try:
            self.stock = stock_forward(model)
            self.transform, self.rows = checked_transform(model, transform), head_shard(model, shard)
            found = check_path(model, self.stock, self.transform, self.rows)
            self.bound = install(model, self.stock, self._forward)
            with quiet(model):
                out = model(input_ids=found.ids, labels=found.labels, fused_lm_head=True)
            if not self.calls:
                raise ValueError("the fused forward was installed, and the model does not call it")
            found.expect(out.loss)
        except BaseException:
            if self.bound is not None:
                del model.forward
            if before is not None:
                model.forward = before
            raise
        self.settings = settings

    def _forward(self, model, args, kwargs):
        kwargs = dict(kwargs)
        if not kwargs.pop("fused_lm_head", False):
            outputs = self.stock(model, *args, **kwargs)
            if arguments(self.stock, model, args, kwargs).get("labels") is None:
                refuse_columns(outputs, self.rows)
            return outputs
        self.calls += 1
        given = arguments(self.stock, model, args, kwargs) | {"use_cache": False}
        refuse_logits_to_keep(given)
        hidden, layer = run_body(model, given).last_hidden_state, output_layer(model)
        labels = shifted(given.get("labels"), given.get("shift_labels"), IGNORED).to(hidden.device)
        weight, bias, cast = layer.weight, layer.bias, self.settings["cast_lm_head_to_fp32"]
        if cast:
            hidden, weight = hidden.float(), weight.float()
        autocast = torch.is_autocast_enabled(hidden.device.type) and not cast
        with torch.autocast(hidden.device.type, enabled=autocast):
            stats = linear_vocab_statistics(
                hidden,
                weight,
                labels,
                bias=bias,
                shard=call_shard(model, self.shard, self.linear, hidden),
                want=tuple(want for name in self.settings["outputs"] for want in STATISTICS[name]),
                transform=self._tempered(),
                linear=self.linear,
            )
        return self._output(stats, labels, given)

    def _tempered(self) -> Transform:
        return Transform(
            scale=self.transform.scale, softcap=self.transform.softcap, temperature=self.settings["temperature"]
        )

    def _output(self, stats, labels, given):
        mask = labels != IGNORED
        fields = {"log_probs": stats.log_prob}
        if "entropy" in self.settings["outputs"]:
            fields["entropy"] = stats.entropy
        if "mean_logits" in self.settings["outputs"]:
            fields["mean_logits"] = stats.total.detach() / stats.vocab_size
        if "is_top1" in self.settings["outputs"]:
            fields["is_top1"] = stats.correct
        if given.get("shift_labels") is None:  # the last position has no label
            mask = mask[:, :-1]
            fields = {name: x[:, :-1] for name, x in fields.items()}
        fields = {name: x.masked_fill(~mask, 0) for name, x in fields.items()}
        tokens = given.get("num_items_in_batch")
        loss = -fields["log_probs"].sum() / (mask.sum().clamp(min=1) if tokens is None else tokens)
        return FusedCausalLMOutput(loss=loss, label_mask=mask, **fields)

    def remove(self):
        """What was there before: the model's own forward, or TRL's. An error if something was installed on top."""
        uninstall(self.model, self.bound, self.before)

    def __enter__(self) -> FusedLogProbs:
        return self

    def __exit__(self, *_):
        self.remove()
