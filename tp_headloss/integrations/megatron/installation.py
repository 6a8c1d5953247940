"""`install`: put a `MegatronHead` into one model, after checks of the model and a comparison with
its own losses."""

from __future__ import annotations

import contextlib
import inspect
import types
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch.nn import functional as F

from ...arguments.options import Options
from ...call.agreement import Agreement
from ...head_loss import HeadLoss
from ...ranks.shard import VocabShard
from ...spec import AnyOf, CheckedBy, Instance, checked
from .. import require
from ..hooks import is_from
from ..replacement import Counted, evaluating, expect_close, normal, replaced
from .head import MegatronHead, megatron_head
from .layer import (
    LOSSES_OF,
    expect_rows,
    expect_weight,
    group_of_any,
    layer_shard,
    refuse_ignored,
    refuse_options,
    refuse_other_methods,
)
from .postprocess import MegatronHeadMixin, postprocess

# heads that differ between ranks would make them wait for each other, or lose the loss silently
ALIKE = Options(validate="full")
# of output layers
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Installed(Counted):
    """The methods that `install` has put into a model; `remove` takes them out again.

    As a context manager it removes them at the end of the block, and raises RuntimeError if they
    computed no loss in it, or were removed before it.

    Attributes:
        calls: number of forwards with labels that the head has computed losses of; with fused=False
            number of losses, those of depths among them. To see that it is not 0.
    """

    def __init__(self, model, head: MegatronHead, *names: str):
        super().__init__(vars(model), *names)
        self.model, self._head, self.calls = model, head, 0

    @property
    def head(self) -> MegatronHead:
        """The installed head. For another one, `remove` this, and call `install` again."""
        return self._head

    @head.setter
    def head(self, head):
        raise AttributeError("for another head call remove(), and install(model, head) again")

    @property
    def last(self):
        """`HeadLossOutput` of the head's last call, without graph and statistics, for metrics; None
        before it."""
        return self.head.last

    def uses(self) -> int:
        return self.calls

    def expect_use(self, uses: int):
        if not uses:
            raise RuntimeError(
                "no loss came through the installed head: is this the model that is trained?"
            )


@checked
def install(
    model: Annotated[Any, CheckedBy("a model")],
    head: Annotated[MegatronHead | HeadLoss, CheckedBy("a `MegatronHead` or a `HeadLoss`")],
    *,
    fused: bool = True,
) -> Installed:
    """Put a head into one model, and compare its losses with the model's own.

    All ranks of the output layer's group call this together. They compare their heads (of functions
    the names), and all raise if one of them has other settings or an error. A check call with
    random hidden states follows: the losses must come from the head and have the right shape, and, if the head computes
    what the model does (no terms of its own, no vocab_size), be equal to the model's own losses.
    After an error the model is as it was before. A fused head makes no logits: hooks of the output
    layer (a softcap, a scale), those that torch runs for all modules
    (register_module_forward_hook), a forward put into the layer and another
    compute_language_model_loss or _scale_logits are a ValueError, here and in later calls with
    labels. Hooks of
    Megatron, Transformer Engine, torch.distributed and torch.utils, which gather parameters or
    count, may be there. With fused=False the layer and its hooks run as ever.

    Args:
        model: GPTModel or HybridModel, or with fused=False any LanguageModule; wrappers such as DDP
            are seen through.
        head: `MegatronHead`, or a `HeadLoss` of reduction "none", or "mean", which Megatron then
            computes itself: over tokens, also of a term with class weights. Of a HeadLoss one is
            made here, so that what changes in it later has no effect.
        fused: True: from hidden states, without logits. False: from this rank's logits; another
            compute_language_model_loss that is put in later is then not noticed but at the end of
            a ``with`` block in which no loss came through.

    Raises:
        TypeError: `model` is no model, `head` no head, the output layer is not Megatron's own, or
            its weight is not fp32, bf16 or fp16.
        ValueError: the model has no output layer (it is not the last chunk of the last pipeline
            stage), its loss is replaced already, its output layer gathers logits
            (parallel_output=False), its config asks that layer for something that the head does not
            do, a fused head would ignore hooks or a forward of that layer, its weight is on the
            device "meta", or ranks have other heads or weights of other dtypes.
        RuntimeError: the check failed, or the model's own losses are not finite.
    """
    require("megatron-core")
    with Agreement(ALIKE, _part_of(group_of_any(model))) as agreement:
        model, owner = _checked_model(model, fused)
        # gets hidden states and labels
        entry = "_postprocess" if hasattr(owner, "_postprocess") else "forward"
        _refuse_layer(model, fused)
        used = megatron_head("head", head)
        assert used is not None
        used.refuse_unused(model.config, fused)
        _refuse_replaced(model, fused and (entry, owner))
        if fused:
            refuse_other_methods(model)
        shard = layer_shard(_group(model), _weight(model).shape[0], used.vocab_size)
        dtype = _weight(model).dtype
        agreement.record("install", shard, fused=fused, weight_dtype=dtype, **used.facts())
    stock: Any = getattr(owner, entry, None)

    def compute_language_model_loss(self, labels, logits):
        installed.calls += 1
        return used.losses_from_logits(logits, labels, self.output_layer)

    def fused_entry(self, *args, **kwargs):
        original = types.MethodType(stock, self)
        bound = inspect.signature(original).bind(*args, **kwargs).arguments
        installed.calls += bound.get("labels") is not None
        return postprocess(self, used, original, **bound)

    functions = {"compute_language_model_loss": compute_language_model_loss}
    functions |= {entry: fused_entry} if fused else {}
    stock_losses = _check_call(model, used, fused)
    installed, calls_before = Installed(model, used, *functions), used.calls
    # any number of tokens, which nobody observes
    checks = {"observe": None, "linear": replace(used.linear, max_valid_tokens=None)}
    try:
        # a term or metric that fails on one rank alone
        with Agreement(ALIKE, shard) as agreement, replaced(used, **checks):
            agreement.record("the check call of install", shard)
            # bound methods, so that a copy of the model calls them with itself
            installed.install(
                {name: types.MethodType(function, model) for name, function in functions.items()}
            )
            _compare(_check_call(model, used, fused), stock_losses, used, calls_before)
    except BaseException:
        installed.undo()
        raise
    finally:
        used.last, used.calls = None, calls_before
    installed.calls = 0
    return installed


def _checked_model(model, fused):
    """Return the model without wrappers, and its Megatron class. TypeError or ValueError if no head
    can be put in."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    if isinstance(model, (list, tuple)):
        raise TypeError(
            f"model must be one model chunk, got a {type(model).__name__} of {len(model)}: pass "
            "the chunk that has the output layer, model[-1] on the last pipeline stage"
        )
    if hasattr(model, "_orig_mod"):
        raise TypeError(
            f"model must not be compiled before, got {type(model).__name__}: install on its "
            "._orig_mod, and compile it afterwards"
        )
    while not isinstance(model, LanguageModule) and isinstance(
        getattr(model, "module", None), torch.nn.Module
    ):
        model = model.module
    classes = _fused_classes() if fused else (LanguageModule,)
    AnyOf(tuple(map(Instance, classes)), False).check("model", model, {})
    if getattr(model, "output_layer", None) is None:
        raise ValueError(
            "this model has no output layer: install on the last pipeline stage alone, in its last "
            "chunk"
        )
    return model, next(cls for cls in classes if isinstance(model, cls))


def _group(model):
    """Return the process group of a model's output layer, or None if the layer knows none."""
    return getattr(model.output_layer, "tp_group", None)


def _part_of(group) -> VocabShard | None:
    """Return a shard of one id on each rank of a group, to compare what ranks have."""
    return None if group is None else layer_shard(group, 1, None)


def _weight(model) -> torch.Tensor:
    """Return the weight [v/P, h] of a model's output layer, which may be that of its embedding."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return expect_weight(model.output_layer.weight)


def _refuse_weight(weight: torch.Tensor):
    """Raise ValueError or TypeError for a weight of which no head makes a loss."""
    if weight.is_meta:
        raise ValueError(
            "the output layer's weight must have been loaded, got one on the device 'meta': "
            "install after the model is materialised"
        )
    if weight.dtype not in DTYPES:
        raise TypeError(
            f"the output layer's weight must be fp32, bf16 or fp16, got {weight.dtype}: convert "
            "the model first, or call .double() after the installation"
        )


def _refuse_layer(model, fused: bool):
    """Raise ValueError or TypeError if the output layer computes something else than the head."""
    layer = model.output_layer
    if getattr(layer, "gather_output", False) and layer.tp_group.size() > 1:
        raise ValueError(
            "the model must have parallel_output=True, got False: its output layer gathers the "
            "logits of all ranks, for which Megatron's own loss is wrong"
        )
    _refuse_weight(_weight(model))
    if not fused:
        return
    refuse_options(model.config, layer)
    refuse_ignored(layer)
    expect_rows(layer, _weight(model))


def _fused_classes() -> tuple[type, ...]:
    """Megatron's model classes that the fused head supports, as far as this version has them."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ImportError:  # an older version
        return (GPTModel,)
    return GPTModel, HybridModel


def _refuse_replaced(model, entry):
    """Raise ValueError if the model's loss, or its entry (name, class), is not Megatron's own any
    more."""
    from megatron.core.models.common.language_module import language_module as functions

    methods = [("compute_language_model_loss", functions.LanguageModule)] + (
        [entry] if entry else []
    )
    if isinstance(model, MegatronHeadMixin):
        raise ValueError(
            f"{type(model).__name__} has MegatronHeadMixin, which needs no install: set "
            "model.megatron_head = head"
        )
    for name, owner in methods:
        own = getattr(owner, name)
        is_own = getattr(type(model), name) is own
        if name in model.__dict__ or not is_own or not is_from(own, *LOSSES_OF):
            raise ValueError(
                f"{type(model).__name__}.{name} is replaced already: one at a time; remove that "
                f"one{_for_subclasses(name)}"
            )
    names = ("fused_vocab_parallel_cross_entropy", "te_parallel_cross_entropy")
    losses = {name: getattr(functions, name, None) for name in names}
    losses["vocab_parallel_cross_entropy"] = functions.tensor_parallel.vocab_parallel_cross_entropy
    for name, function in losses.items():
        if function is not None and not is_from(function, *LOSSES_OF):
            raise ValueError(
                f"{function.__module__} has replaced Megatron's {name}: remove that first"
            )


def _for_subclasses(name: str) -> str:
    """Return what to do about a method of this name that a subclass of a model has."""
    if name == "compute_language_model_loss":
        return ", and write what a subclass of yours computes as terms= of the head"
    return ", or, for a subclass of yours, use MegatronHeadMixin"


def _check_call(model, head, fused) -> torch.Tensor:
    """Losses [1, s] of random hidden states or logits, equal on all ranks, as the model computes
    them now."""
    layer, group, weight = model.output_layer, model.output_layer.tp_group, _weight(model)
    generator, count = torch.Generator().manual_seed(0), 2 * group.size()
    depths = 1 + (getattr(model.config, "mtp_num_layers", None) or 0)
    rows = weight.shape[0] * group.size()
    most = min(rows, head.vocab_size or rows) - 1
    labels = torch.randint(0, max(most, 1), (1, count), generator=generator, device="cpu")
    labels = labels.to(weight.device)
    # ignore_index may be an id, and would have no loss
    labels = labels + (labels == head.ignore_index)
    hidden = normal((depths * count, 1, weight.shape[1]), generator).to(weight)
    if fused and layer.sequence_parallel:
        hidden = hidden.view(depths, group.size(), -1, *hidden.shape[1:])[:, group.rank()].flatten(
            0, 1
        )
    with evaluating(model):
        if not fused:
            return model.compute_language_model_loss(labels, F.linear(hidden[:count], weight))
        if not hasattr(model, "_postprocess"):
            with contextlib.ExitStack() as stack:
                for block in (model.decoder, *([model.mtp] if model.mtp_process else [])):
                    stack.enter_context(replaced(block, forward=lambda *args, **kwargs: hidden))
                return model.forward(None, None, None, decoder_input=hidden, labels=labels)
        names = inspect.signature(type(model)._postprocess).parameters
        required = {
            n: None
            for n, p in names.items()
            if n != "self" and p.default is inspect.Parameter.empty
        }
        return model._postprocess(**{**required, "hidden_states": hidden, "labels": labels})


def _compare(losses, stock_losses, head, calls_before):
    """Raise RuntimeError unless the head computed these losses, and they agree with the model's
    own."""
    if head.calls == calls_before:
        raise RuntimeError(
            "the check call did not come through the head: this model computes its loss elsewhere"
        )
    hint = (
        ": look for what changes this model's logits or loss, such as a patched "
        "ColumnParallelLinear, _scale_logits or cross-entropy of Megatron, and undo it or write it "
        "as terms="
    )
    compares = head.computes_megatron_loss
    expect_close("the loss of the check call", losses, stock_losses, compares, hint)
