"""Hugging Face transformers: a causal language model whose output layer is sharded on the vocabulary.

`causal_lm_loss` takes the place of ``model.loss_function``, `fuse_head` that of ``model.forward`` and makes no logits.
Both are installed on one model, by its owner; importing this module changes nothing.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..api import Transform
from ..dtensor import is_dtensor, local_head
from ..head_loss import HeadLoss, HeadLossOutput
from ..linear import Linear
from ..shard import VocabShard
from . import check_type, require

require("transformers")
from transformers import PreTrainedConfig, PreTrainedModel  # noqa: E402
from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: E402

# What `forward` takes and the body of the model does not.
OF_HEAD = (
    *("labels", "shift_labels", "num_items_in_batch", "ignore_index"),
    *("logits_to_keep", "return_dict", "head_inputs"),
)


def colwise_plan(model_class: type[PreTrainedModel], config) -> dict[str, str]:
    """The tp_plan that `causal_lm_loss` needs: the model's own, but with its output layer "colwise", so that each rank
    keeps its columns of the logits. It is the whole plan, because `DistributedConfig` adds such a dict to the model's
    own plan from transformers 5.23 on and replaces the model's own plan by it before.

    Not for `fuse_head`, which works with the model's own plan (tp_plan="auto"). With this plan there are no whole
    logits: once `causal_lm_loss` is the model's loss_function, generate() and any other call without labels raise.

    model_class: the class of the model itself, such as LlamaForCausalLM; TypeError for AutoModelForCausalLM and for a
    model, ValueError for a class without a plan for an output layer called "lm_head".
    """
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        got = model_class.__name__ if isinstance(model_class, type) else f"a {type(model_class).__name__}"
        raise TypeError(
            "model_class must be the model's own class, a subclass of PreTrainedModel such as LlamaForCausalLM: "
            f"type(model), or AutoModelForCausalLM._model_mapping[type(config)]; got {got}"
        )
    check_type("config", config, model_class.config_class or PreTrainedConfig)
    if "lm_head" not in (model_class._tp_plan or {}):
        raise ValueError(
            f"{model_class.__name__} must have a tensor-parallel plan for its output layer 'lm_head', got the plan "
            f"{model_class._tp_plan}"
        )
    body = {f"{model_class.base_model_prefix}.{name}": how for name, how in (config.base_model_tp_plan or {}).items()}
    return {**body, **(model_class._tp_plan or {}), "lm_head": "colwise"}


def causal_lm_loss(model: PreTrainedModel, head_loss: HeadLoss | None = None, *, shard: VocabShard | None = None):
    """-> what to put into ``model.loss_function`` of a model whose plan keeps the output layer "colwise".

        model.loss_function = causal_lm_loss(model, HeadLoss([CrossEntropy(), ZLoss(1e-4)]))

    logits [B, S, V/P] sharded on V (plain, or DTensor), labels [B, S] replicated -> loss [], replicated: one collective
    forward, none backward. The logits' gradient is this rank's; the model's own output layer reduces dH.

    The function has the host's signature. ``num_items_in_batch`` is the denominator; ignore_index=None is that of the
    head_loss; ``head_inputs``, a keyword of the model's forward, is the ``inputs`` of the head_loss, of the positions
    of the logits. ``.last`` of it is the `HeadLossOutput` of the last call, without graph and statistics, for metrics.
    shard: None takes bounds and group from the output layer's weight (a DTensor; a plain one is not sharded).
    ValueError for gathered logits, and for a weight that is sharded by something else than tensor parallelism.

    A forward hook of the model, which does nothing while something else is its loss_function, raises ValueError on
    every rank for a call without labels that returned this rank's columns (generate() would sample from them), and for
    one in training, whose labels a Trainer took away. Use `fuse_head` and tp_plan="auto" to generate.
    """
    loss = CausalLMShardLoss(head_loss, head_shard(model, shard))
    if _check_call not in model._forward_hooks.values():
        model.register_forward_hook(_check_call, with_kwargs=True)
    return loss


def _check_call(model, args, kwargs, outputs) -> None:
    """The forward hook of `causal_lm_loss`."""
    loss = model.loss_function
    if isinstance(loss, CausalLMShardLoss):
        given = arguments(type(model).forward, model, args, kwargs)
        if given.get("labels") is None:
            refuse_lost_labels(model, given)
            refuse_columns(outputs, loss.shard)


class CausalLMShardLoss:
    """See `causal_lm_loss`."""

    def __init__(self, head_loss: HeadLoss | None, shard: VocabShard):
        self.head_loss, self.shard, self.last = _scalar(head_loss), shard, None

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int | None = None,  # the host's, not read: the shard knows it
        num_items_in_batch: torch.Tensor | float | None = None,
        ignore_index: int | None = None,
        shift_labels: torch.Tensor | None = None,
        head_inputs: Mapping[str, Any] | None = None,
        **kwargs,  # the host's, of its attention and the like
    ) -> torch.Tensor:
        if not is_dtensor(logits) and logits.shape[-1] != self.shard.width:
            raise ValueError(
                f"logits must be this rank's {self.shard.width} columns [{self.shard.start}, {self.shard.stop}) of "
                f"{self.shard.vocab_size}, got {logits.shape[-1]}: keep the output layer sharded, 'colwise' in the "
                "tp_plan instead of 'colwise_gather_output' (or 'colwise_rep')"
            )
        head_loss = _with_ignore_index(self.head_loss, ignore_index)
        labels = shifted(labels, shift_labels, head_loss.ignore_index).to(logits.device)
        denominator = _scalar_number(num_items_in_batch, logits.device)
        out = head_loss(logits, labels, shard=self.shard, denominator=denominator, inputs=head_inputs)
        self.last = _for_metrics(out)
        return out.loss


def fuse_head(
    model: PreTrainedModel,
    head_loss: HeadLoss | None = None,
    *,
    linear: Linear | None = None,
    shard: VocabShard | None = None,
    transform: Transform | None = None,
) -> FusedHead:
    """Replaces ``forward`` of this model: with labels, hidden states [B, S, H] and the output layer's weight [V/P, H]
    give the loss, and logits never exist. dH is summed over the group here (one all-reduce, as `Linear` says), because
    the hidden states of a transformers model are plain and replicated, and the body expects a whole gradient.

        fused = fuse_head(model, HeadLoss([CrossEntropy(), ZLoss(1e-4)]))
        model(input_ids=ids, labels=labels, num_items_in_batch=tokens).loss.backward()
        fused.remove()  # or with fuse_head(model): ...

    With labels the model returns its own output class, its ``logits`` None. Without, the forward is the model's own, so
    that generate() works; the model's own plan (tp_plan="auto") gathers the logits there. A call without labels raises
    ValueError in training, where a Trainer took the labels away, and where it gives this rank's columns of the logits
    alone (`colwise_plan`).

    Keywords as in `causal_lm_loss`, shard and ``.last``, too. Weights may be tied, have a bias, and be of a model that
    is not distributed. What the model does to its logits (softcapping, a scale) is read from its config, or given as
    transform. All ranks of the group install together: three forward passes over eight tokens check that the model
    does nothing else on this way and that the loss is its own.

    Raises TypeError or ValueError, with the model as it was before: for a forward or loss function that somebody
    else (or this function) has replaced, a body or output layer that is not what it seems (adapters, quantization), a
    router's auxiliary loss, and anything that the check finds. Later, for ``logits_to_keep`` with labels.
    """
    output_layer(model)
    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"the model's loss must be transformers' ForCausalLMLoss, got {model.loss_function}: a fused head would "
            "silently win over a loss_function"
        )
    return FusedHead(model, head_loss, linear, shard, transform)


class FusedHead:
    """An installed fused head; see `fuse_head`."""

    def __init__(self, model, head_loss, linear, shard, transform):
        wanted = _scalar(head_loss), replicated(linear)
        self.model, self.stock, self.shard, self.last, self.rows = model, stock_forward(model), shard, None, None
        self.head_loss = HeadLoss(options=wanted[0].options)
        self.linear = dataclasses.replace(wanted[1], max_valid_tokens=None)
        self.transform, rows = checked_transform(model, transform), head_shard(model, shard)
        found = check_path(model, self.stock, self.transform, rows)
        self.output_class = found.output_class
        self.bound = install(model, self.stock, self._forward)
        try:
            with quiet(model):
                out = model(input_ids=found.ids, labels=found.labels)
            if self.last is None or out.logits is not None:
                raise ValueError("the fused forward was installed, and the model does not call it")
            found.expect(out.loss)
        except BaseException:
            self.remove()
            raise
        self.head_loss, self.linear, self.last, self.rows = *wanted, None, rows

    def _forward(self, model, args, kwargs):
        """The forward of `model`, which is this model or a copy of it."""
        given = arguments(self.stock, model, args, kwargs)
        if given.get("labels") is None:
            refuse_lost_labels(model, given)
            outputs = self.stock(model, *args, **{k: v for k, v in kwargs.items() if k != "head_inputs"})
            if self.rows is not None:  # else this is the check, which says that the labels did not arrive
                refuse_columns(outputs, self.rows)
            return outputs
        refuse_logits_to_keep(given)
        outputs = run_body(model, given)
        hidden, layer = outputs.last_hidden_state, output_layer(model)
        head_loss = _with_ignore_index(self.head_loss, given.get("ignore_index"))
        labels = shifted(given["labels"], given.get("shift_labels"), head_loss.ignore_index)
        out = head_loss.linear(
            hidden,
            layer.weight,
            labels.to(hidden.device),
            bias=layer.bias,
            shard=call_shard(model, self.shard, self.linear, hidden),
            denominator=_scalar_number(given.get("num_items_in_batch"), hidden.device),
            transform=self.transform,
            inputs=given.get("head_inputs"),
            linear=self.linear,
        )
        self.last = _for_metrics(out)
        fields = {f.name: getattr(outputs, f.name, None) for f in dataclasses.fields(self.output_class)}
        result = self.output_class(**{**fields, "loss": out.loss, "logits": None})
        return_dict = given.get("return_dict")
        whole = model.config.return_dict if return_dict is None else return_dict
        return result if whole else result.to_tuple()

    def remove(self):
        """The model's own forward again; an error if something was installed on top of this."""
        uninstall(self.model, self.bound)

    def __enter__(self) -> FusedHead:
        return self

    def __exit__(self, *_):
        self.remove()


# ---- what a model is


def output_layer(model) -> nn.Linear:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a transformers.PreTrainedModel, got {type(model).__name__}: take it before it is wrapped"
        )
    layer = model.get_output_embeddings()
    if type(layer) is not nn.Linear:
        raise TypeError(
            "the output layer must be a plain torch.nn.Linear (no adapter, no quantization), got "
            f"{type(layer).__name__}"
        )
    return layer


def head_shard(model, shard: VocabShard | None = None) -> VocabShard:
    """The ids of this rank's rows of the output layer's weight."""
    check_type("shard", shard, VocabShard, None)
    layer = output_layer(model)
    found = local_head(None, layer.weight, layer.bias, shard, "all_reduce")[3]
    if shard is None and found.world_size > 1 and (model.tp_size or 1) == 1:
        raise ValueError(
            "the output layer's weight is sharded, but the model is not tensor parallel, so ranks hold different "
            "tokens (FSDP?): if they hold the same ones, say so with shard="
        )
    return found


def replicated(linear: Linear | None) -> Linear:
    check_type("linear", linear, Linear, None)
    if linear is not None and linear.hidden_grad == "reduce_scatter":
        raise ValueError("the hidden states of a transformers model are replicated, got hidden_grad='reduce_scatter'")
    return linear or Linear()


def call_shard(model, shard: VocabShard | None, linear: Linear, hidden: torch.Tensor) -> VocabShard:
    """The same in a call, where others may have gathered or replaced the weight."""
    found = head_shard(model, shard)
    if linear.hidden_grad == "none" and found.world_size > 1 and hidden.requires_grad:
        raise ValueError("hidden_grad='none' leaves a part of dH to a body that requires it whole: use 'all_reduce'")
    return found


def checked_transform(model, transform: Transform | None) -> Transform:
    check_type("transform", transform, Transform, None)
    return transform_of(model.config) if transform is None else transform


def transform_of(config) -> Transform:
    """What the config says that a model does to its logits; `check_path` compares it with what it does."""
    softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):  # Cohere, Muse Glimmer, Falcon-H1
        scale *= 1.0 if getattr(config, name, None) is None else getattr(config, name)
    if (scaling := getattr(config, "logits_scaling", None)) is not None:  # of Granite; HyperCLOVA X multiplies by it
        scale *= scaling if config.model_type == "hyperclovax" else 1 / scaling
    return Transform(scale=scale, softcap=softcap)


def stock_forward(model):
    """The forward of the model's class; ValueError if it, or this model's, was replaced."""
    owner = next(cls for cls in type(model).__mro__ if "forward" in vars(cls))
    stock = vars(owner)["forward"]
    own = vars(model).get("forward")
    if own is not None or stock.__module__ != owner.__module__:
        raise ValueError(
            f"{type(model).__name__}.forward was replaced already, by {_where(stock if own is None else own)}: only "
            "one can be in the path, so remove the other one (a fused head: its .remove()) or install this one first"
        )
    return stock


def _where(function) -> str:
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)  # names of the function are those that wraps() gave it
    return function.__module__ if code is None else f"{code.co_filename}, line {code.co_firstlineno}"


# ---- a forward of one model


def install(model, stock, forward) -> types.MethodType:
    """forward(model, args, kwargs) as the model's, with the signature of its own, which generate() and Trainer read."""

    @functools.wraps(stock)
    def fused_forward(self, *args, **kwargs):
        return forward(self, args, kwargs)

    model.forward = types.MethodType(fused_forward, model)
    return model.forward


def uninstall(model, bound: types.MethodType, before=None):
    if vars(model).get("forward") is not bound:
        raise RuntimeError("this fused head is not the model's forward (any more): remove what was installed on top")
    del model.forward
    if before is not None:
        model.forward = before


def arguments(stock, model, args, kwargs) -> dict[str, Any]:
    """By name, only what was given."""
    bound = inspect.signature(stock).bind(model, *args, **kwargs).arguments
    rest = next((p.name for p in inspect.signature(stock).parameters.values() if p.kind is p.VAR_KEYWORD), None)
    given = {name: value for name, value in bound.items() if name not in ("self", rest)}
    return given | bound.get(rest, {})


def refuse_logits_to_keep(given):
    keep = given.get("logits_to_keep", 0)
    if isinstance(keep, torch.Tensor) or keep != 0:
        raise ValueError("labels score every position: logits_to_keep goes with a call without labels")


def refuse_lost_labels(model, given):
    """ValueError for a call without labels that was meant to train, or to evaluate, the head's loss."""
    if given.get("num_items_in_batch") is not None or (model.training and torch.is_grad_enabled()):
        raise ValueError(
            "a training call must have labels, got none, so the HeadLoss would not be computed: transformers' Trainer "
            "takes them away for label_smoothing_factor (use HeadLoss([CrossEntropy(label_smoothing=...)]) instead) "
            "and for compute_loss_func (leave it out); for logits, use eval() or torch.no_grad()"
        )


def refuse_columns(outputs, shard: VocabShard):
    """ValueError if the logits of a call without labels are this rank's columns: a caller takes them for all."""
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    if shard.world_size > 1 and logits.shape[-1] == shard.width:
        raise ValueError(
            f"a call without labels must return all {shard.vocab_size} columns of the logits, got this rank's "
            f"{shard.width}, [{shard.start}, {shard.stop}): for logits and generate(), load the model with its own "
            "plan (tp_plan='auto' instead of colwise_plan) and use fuse_head"
        )


def run_body(model, given: Mapping[str, Any]):
    """The outputs of the model's body, for the given arguments of its forward."""
    if given.get("output_router_logits") or getattr(model.config, "output_router_logits", False):
        raise ValueError(
            "output_router_logits adds the router's auxiliary loss, which a fused head does not compute: compute it "
            "from the model's body, or use causal_lm_loss"
        )
    body = {name: value for name, value in given.items() if name not in OF_HEAD}
    return model.base_model(**body, return_dict=True)


def shifted(labels, shift_labels, ignore_index: int) -> torch.Tensor:
    """Labels [B, S] of the logits' positions."""
    if shift_labels is not None:
        return shift_labels
    if labels is None:
        raise ValueError("a loss needs labels or shift_labels, got neither")
    return nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


# ---- checking


@contextlib.contextmanager
def quiet(model):
    """Without gradients and dropout."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@dataclasses.dataclass
class Found:
    """What `check_path` learns of a model."""

    output_class: type
    ids: torch.Tensor  # [1, 8]
    labels: torch.Tensor
    logits: torch.Tensor  # [1, 8, V], or this rank's columns
    loss: torch.Tensor

    def expect(self, loss):
        tolerance = 1e-4 if self.logits.dtype in (torch.float32, torch.float64) else 2e-2
        if not abs(float(loss) - float(self.loss)) <= tolerance * abs(float(self.loss)):
            raise ValueError(f"the fused head's loss is {float(loss)}, and the model's own {float(self.loss)}")


def check_path(model, stock, transform: Transform, shard: VocabShard) -> Found:
    """Calls the model's own forward twice, and raises if it does anything between its body and its loss but the output
    layer and the transform. In the first call the output layer gives wide-spread logits, which no transform hides."""
    _check_kind(model)
    layer, body = output_layer(model), model.base_model
    device = model.get_input_embeddings().weight.device
    ids = (torch.arange(8, device=device) * max(shard.vocab_size // 8, 1) % shard.vocab_size)[None]
    labels = ids.clone()
    labels[0, 3] = -100
    seen = {}

    def of_body(module, args, outputs):
        seen["hidden"] = outputs.last_hidden_state

    def of_layer(module, args, logits):
        seen["input"], first = args[0], "spread" not in seen
        if first:
            wide = torch.linspace(-60, 60, logits.shape[-1], device=logits.device, dtype=logits.dtype)
            seen["spread"] = wide.expand(logits.shape)
        return seen["spread"] if first else None

    def loss(logits, labels, vocab_size=None, **kwargs):
        seen["logits"] = logits = logits.to_local() if is_dtensor(logits) else logits
        if logits.shape[-1] == shard.width:
            return CausalLMShardLoss(None, shard)(logits, labels)
        return ForCausalLMLoss(logits, labels, shard.vocab_size)

    hooks, before = [], vars(model).get("_loss_function")
    try:
        hooks.append(body.register_forward_hook(of_body))
        hooks.append(layer.register_forward_hook(of_layer))
        model._loss_function = loss
        with quiet(model):
            stock(model, input_ids=ids, labels=labels)
            got = seen.pop("logits", None)
            own = stock(model, input_ids=ids, labels=labels)
    finally:
        vars(model).pop("_loss_function", None)
        if before is not None:
            model._loss_function = before
        for hook in hooks:
            hook.remove()
    if got is None or "logits" not in seen:
        raise ValueError("the model's forward does not call its loss_function: a fused head does not know its loss")
    if not torch.equal(seen["input"], seen["hidden"].to(seen["input"].dtype)):
        raise ValueError("the output layer's input is not the last_hidden_state of the model's body")
    eps = torch.finfo(seen["spread"].dtype).eps
    if not torch.allclose(got.double(), apply_transform(transform, seen["spread"]), rtol=8 * eps, atol=8 * eps):
        raise ValueError(
            f"what the model does to its logits is not {transform}, which its config says: give it as transform="
        )
    return Found(type(own), ids, labels, seen["logits"], own.loss)


def _check_kind(model):
    config = model.config
    if config.is_encoder_decoder or config.get_text_config() is not config or model.base_model is model:
        raise ValueError(f"the model must be a decoder of text alone with a language-model head, got {type(model)}")
    if getattr(config, "output_router_logits", False):
        run_body(model, {})  # says why not


def apply_transform(transform: Transform, x: torch.Tensor) -> torch.Tensor:
    """In float64, of logits without a bias."""
    x = x.double() * transform.scale
    return x if transform.softcap is None else transform.softcap * torch.tanh(x / transform.softcap)


# ---- numbers


def _scalar(head_loss: HeadLoss | None) -> HeadLoss:
    check_type("head_loss", head_loss, HeadLoss, None)
    head_loss = HeadLoss() if head_loss is None else head_loss
    if head_loss.reduction == "none":
        raise ValueError("a model's loss is one number, got a HeadLoss with reduction='none'")
    return head_loss


def _with_ignore_index(head_loss: HeadLoss, ignore_index: int | None) -> HeadLoss:
    if ignore_index is None or ignore_index == head_loss.ignore_index:
        return head_loss
    head_loss = copy.copy(head_loss)
    head_loss.ignore_index = ignore_index
    return head_loss


def _scalar_number(number, device):
    """transformers' count of tokens: a number, or a tensor of one (of several equal ones under its DataParallel)."""
    return number.to(device).flatten()[0] if isinstance(number, torch.Tensor) else number


def _for_metrics(out: HeadLossOutput) -> HeadLossOutput:
    return out._replace(loss=out.loss.detach(), stats=None)
