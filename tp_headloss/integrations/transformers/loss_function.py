"""`causal_lm_loss`: a `HeadLoss` as ``model.loss_function``, on this rank's columns of the
logits."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ...call.subclasses import is_dtensor
from ...head_loss import HeadLoss, HeadLossOutput
from ...head_loss.output import Observed
from ...ranks.shard import VocabShard
from ...spec import Instance, checked
from . import model_parts
from .forward import FUSED, is_of_trl, named_arguments
from .mixed_precision import AUTOCAST_GOES_TOO
from .model_facts import OWN_LOSS_AGAIN, Model, installed_shard, refuse_module_as_loss
from .words import refuse_unread


def colwise_plan(model_class: type[PreTrainedModel], config) -> dict[str, str]:
    """Return the tp_plan that `causal_lm_loss` needs: the model's own, but each rank keeps its
    columns of the logits.

    It is the whole plan, because `DistributedConfig` adds such a dict to the model's own plan from
    transformers 5.23 on, and replaces the model's own plan by it in older versions. With this plan
    no rank has whole logits: once `causal_lm_loss` is the model's loss_function, generate() and any
    other call without labels raise. `fuse_head` works with the model's own plan (tp_plan="auto")
    and does not need this one.

    The plan alone leaves nothing of this package in the model, which then takes a rank's columns
    for the whole vocabulary. Without ``model.loss_function = causal_lm_loss(model)`` a call with
    labels ends in torch's error "Expected input batch_size (..) to match target batch_size (..)",
    and generate() samples wrong ids without an error.

    Args:
        model_class: the class of the model itself, such as LlamaForCausalLM.
        config: the config of the model.

    Raises:
        TypeError: model_class is AutoModelForCausalLM or a model, or config is of another class.
        ValueError: the class has no plan for an output layer called "lm_head".
    """
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        got = (
            model_class.__name__
            if isinstance(model_class, type)
            else f"a {type(model_class).__name__}"
        )
        raise TypeError(
            "model_class must be the model's own class, a subclass of PreTrainedModel such as "
            "LlamaForCausalLM: type(model), or AutoModelForCausalLM._model_mapping[type(config)]; "
            f"got {got}"
        )
    Instance(model_class.config_class or PreTrainedConfig).check("config", config, {})
    if "lm_head" not in (model_class._tp_plan or {}):
        raise ValueError(
            f"{model_class.__name__} must have a tensor-parallel plan for its output layer "
            f"'lm_head', got the plan {model_class._tp_plan}"
        )
    body = {
        f"{model_class.base_model_prefix}.{name}": how
        for name, how in (config.base_model_tp_plan or {}).items()
    }
    return {**body, **(model_class._tp_plan or {}), "lm_head": "colwise"}


@checked
def causal_lm_loss(
    model: Model,
    head_loss: HeadLoss | None = None,
    *,
    shard: VocabShard | None = None,
    observe: Callable[[HeadLossOutput], None] | None = None,
) -> CausalLMShardLoss:
    """Return a function for ``model.loss_function`` of a model whose output layer keeps its logits
    sharded: by a plan with the output layer "colwise", or by DeepSpeed's ``vocab_parallel_lm_head``
    (`integrations.deepspeed`).

        model.loss_function = causal_lm_loss(model, HeadLoss([CrossEntropy(), ZLoss(1e-4)]))

    logits [B, S, V/P] sharded on V (plain, or DTensor), labels [B, S] replicated -> loss [],
    replicated; forward: one collective, backward: none. The logits' gradient is this rank's; the
    model's own output layer reduces its input's.

    The function has the signature that transformers expects. ``shift_labels`` win over ``labels``.
    ``num_items_in_batch`` is the denominator, in train() and eval(). All ranks must give the same
    one: a rank with another has another loss, and no error, unless the head_loss has
    ``Options(validate="full")``. ignore_index None means the one of the head_loss.
    ``head_inputs``, a keyword of the model's forward, becomes ``inputs`` of the head_loss, [B, S]
    at the positions of the logits: entry t belongs to label t + 1. ``.last`` is the last
    `HeadLossOutput`, without graph and statistics, or None before it.

    Logits that a call with labels returns are this rank's columns, [B, S, V/P]; in eval() and
    torch.no_grad() all of them, [B, S, V] (one all-reduce of their size), because a Trainer's
    compute_metrics reads them.

    Forward hooks of the model, active while the function is its loss_function, raise ValueError
    on every rank for a call with labels whose model does not call its loss_function (T5, BERT), and
    for a call without labels that returned this rank's columns (generate() would sample from them).
    In training, such logits are for a loop that calls ``model.loss_function`` itself: their
    backward raises if it did not. A call with labels raises if the function is kept elsewhere (on
    PEFT's wrapper, say) and the model calls transformers' loss. To generate, use `fuse_head`, tp_plan="auto".

    Args:
        head_loss: `HeadLoss` with a scalar loss; default cross-entropy.
        shard: ids of this rank; None takes those and the group of the output layer's weight (plain:
            not sharded).
        observe: called with the ``.last`` of each call; say the ``append`` of a list that
            `mean_metrics` reads later.

    Raises:
        TypeError: an argument, or the output layer, is of another class; in a call: a keyword that
            belongs to a HeadLoss's own call (``denominator``, ``token_weight``, ``inputs``, ..),
            another library's name for one, or a misspelt one; a model's output for logits.
        ValueError: model.loss_function is a Module; the weight is sharded by something else than
            tensor parallelism; in a call: gathered logits; ``num_items_in_batch``, which is one
            count of tokens of at least 0, with class weights or a reduction "sum" or over
            sequences, which divide by something else.
    """
    loss = CausalLMShardLoss(head_loss, installed_shard(model, shard), observe)
    _made[model] = weakref.ref(loss)
    if _check_call not in model._forward_hooks.values():
        model.register_forward_pre_hook(_check_loss_function, with_kwargs=True)
        model.register_forward_hook(_check_call, with_kwargs=True)
    return loss


# model -> the function that was made for it last, for as long as somebody keeps that
_made: weakref.WeakKeyDictionary[PreTrainedModel, weakref.ref[CausalLMShardLoss]] = (
    weakref.WeakKeyDictionary()
)


def _check_loss_function(model, args, kwargs):
    """Forward pre-hook: ValueError for a call whose loss the model would compute itself, which of
    this rank's columns ends in an error of torch.

    So it does where a module was set as its loss_function, or where a function was made for it,
    which somebody keeps, and set on a wrapper, which calls none.
    """
    refuse_module_as_loss(model)
    given = named_arguments(type(model).forward, model, args, kwargs)
    if isinstance(model.loss_function, CausalLMShardLoss) or given.get("labels") is None:
        return
    made = _made[model]() if model in _made else None
    has_own = "_loss_function" in vars(model) or hasattr(model.forward, FUSED)
    if made is not None and not made.calls and not has_own:
        raise ValueError(
            f"the function that causal_lm_loss made must be the loss_function of this "
            f"{type(model).__name__}, got {model.loss_function.__name__}: set it on the model "
            "itself, not on a wrapper or a Trainer (PEFT: base = model.get_base_model(); "
            "base.loss_function = causal_lm_loss(base, ..))"
        )


def _check_call(model, args, kwargs, outputs) -> Any:
    """Forward hook that raises an error for calls which cannot mean what their caller expects, and
    returns outputs with whole logits of an evaluation with labels."""
    loss = model.loss_function
    if not isinstance(loss, CausalLMShardLoss):
        return None
    given = named_arguments(type(model).forward, model, args, kwargs)
    if not hasattr(model.forward, FUSED):
        refuse_unread("causal_lm_loss", model.forward, model_parts.HEAD_ARGUMENTS, given)
    if given.get("labels") is not None:
        loss.forwards += 1
        if is_of_trl(model.forward) and given.get("fused_lm_head"):
            raise ValueError(
                f"a trainer of TRL put a forward of its own on this {type(model).__name__}, which "
                "computes TRL's loss and does not call its loss_function: a HeadLoss needs a "
                f"transformers.Trainer, and del model.forward takes TRL's off ({AUTOCAST_GOES_TOO}); "
                f"for TRL's own loss {OWN_LOSS_AGAIN}, and fuse_log_probs(trainer.model)"
            )
        if loss.last is None and not hasattr(model.forward, FUSED):
            raise ValueError(
                f"{type(model).__name__} does not call its loss_function, so the HeadLoss is not "
                "computed: compute it from the logits of a call without labels, "
                "HeadLoss(..)(logits, labels)"
            )
        if model_parts.is_evaluating(model):
            return _with_whole_logits(outputs, loss.shard)
        return None
    if given.get("num_items_in_batch") is not None:
        raise ValueError(model_parts.LOST_LABELS)
    if not model_parts.is_training(model):
        model_parts.refuse_columns(outputs, loss.shard)
        return None
    logits, before = (
        outputs["logits"] if isinstance(outputs, Mapping) else outputs[0],
        loss.forwards - loss.calls,
    )
    loss.forwards += 1

    def expect_loss(gradient):
        if loss.forwards - loss.calls > before:
            raise ValueError(model_parts.FORGOTTEN_LOSS)

    if logits.requires_grad:
        logits.register_hook(expect_loss)
    return None


def _with_whole_logits(outputs, shard: VocabShard):
    """Return the outputs of a call with labels, (loss, logits, ..) or a dict, with whole logits."""
    if not isinstance(outputs, MutableMapping):
        loss, logits, *others = outputs
        return (loss, model_parts.whole_logits(logits, shard), *others)
    if outputs.get("logits") is not None:
        outputs["logits"] = model_parts.whole_logits(outputs["logits"], shard)
    return outputs


class CausalLMShardLoss(Observed):
    """The loss function that `causal_lm_loss` returns."""

    def __init__(
        self,
        head_loss: HeadLoss | None,
        shard: VocabShard,
        observe: Callable[[HeadLossOutput], None] | None = None,
    ):
        self.head_loss, self.shard, self.observe = (
            model_parts.scalar_head_loss(head_loss),
            shard,
            observe,
        )
        self.forwards = 0  # calls of the model that need a loss

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int | None = None,  # given by transformers, and not read: the shard knows it
        num_items_in_batch: torch.Tensor | float | None = None,
        ignore_index: int | None = None,
        shift_labels: torch.Tensor | None = None,
        head_inputs: Mapping[str, Any] | None = None,
        **kwargs,  # given by transformers, for its attention and the like
    ) -> torch.Tensor:
        refuse_unread("causal_lm_loss", type(self).__call__, model_parts.HEAD_ARGUMENTS, kwargs)
        if isinstance(logits, Mapping):
            raise TypeError(
                f"logits must be a tensor, got a {type(logits).__name__}: the function is for "
                "model.loss_function = causal_lm_loss(model, ..), not for a Trainer's "
                "compute_loss_func"
            )
        if not is_dtensor(logits):
            self._expect_columns(logits.shape[-1])
        head_loss = model_parts.with_ignore_index(self.head_loss, ignore_index)
        labels = model_parts.next_token_labels(labels, shift_labels, head_loss.ignore_index).to(
            logits.device
        )
        denominator = model_parts.denominator_of(head_loss, num_items_in_batch, logits.device)
        out = head_loss(
            logits, labels, shard=self.shard, denominator=denominator, inputs=head_inputs
        )
        return self.observed(out).loss

    def _expect_columns(self, columns: int):
        """Raise ValueError, with a likely reason, unless logits have this rank's columns."""
        shard = self.shard
        if columns == shard.width:
            return
        if columns not in (shard.vocab_size, shard.padded_size):
            raise ValueError(
                f"logits must have the {shard.width} columns that the output layer had when "
                f"causal_lm_loss was called, [{shard.start}, {shard.stop}) of {shard.vocab_size}, "
                f"got {columns}: if the vocabulary was resized (resize_token_embeddings), set "
                "model.loss_function = causal_lm_loss(model, ..) again"
            )
        raise ValueError(
            f"logits must be this rank's {shard.width} columns [{shard.start}, {shard.stop}) of "
            f"{shard.vocab_size}, got {columns}: keep the output layer sharded, 'colwise' in the "
            "tp_plan instead of 'colwise_gather_output' (or 'colwise_rep'), or "
            "vocab_parallel_lm_head in DeepSpeed"
        )
