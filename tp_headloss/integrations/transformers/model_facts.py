"""Facts that a model's output layer and config state: its weight's shard, and the transform of its
logits."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ...arguments.options import Transform
from ...call.dtensor import local_head
from ...linear_head import Linear
from ...ranks.shard import VocabShard
from ...spec import CheckedBy
from ..fsdp import unsharded, unwrapped_class
from ..hooks import names_of

OWN_LOSS_AGAIN = "from transformers.loss.loss_utils import ForCausalLMLoss; model.loss_function = ForCausalLMLoss"
Model: TypeAlias = Annotated[PreTrainedModel, CheckedBy("a model")]
MaybeAdapted: TypeAlias = Annotated[nn.Module, CheckedBy("a model, or PEFT's wrapper of one")]


def deepspeed_facts(layer):
    """Return `integrations.deepspeed` for an output layer that DeepSpeed's AutoTP shards, and None
    for any other."""
    if not type(layer).__module__.startswith("deepspeed."):
        return None
    from .. import deepspeed  # raises ImportError for a version that is not supported

    return deepspeed if deepspeed.is_sharded_on_vocabulary(layer) else None


def without_wrapper(model) -> Any:
    """Return the model within PEFT's wrapper of one, or the model itself. ValueError for a wrapper
    with a loss_function, which the model within never calls."""
    is_adapted = hasattr(model, "get_base_model")
    if is_adapted and "loss_function" in {*vars(model), *getattr(model, "_modules", ())}:
        raise ValueError(
            f"{type(model).__name__}.loss_function is not called, because the model within the "
            "wrapper has its own: del model.loss_function, and write base = model.get_base_model(); "
            "base.loss_function = causal_lm_loss(base, ..)"
        )
    return model.get_base_model() if is_adapted else model


def refuse_module_as_loss(model):
    """Raise ValueError for a module that was set as model.loss_function: torch files it under the
    model's parts, and the model keeps its own loss."""
    if "loss_function" in getattr(model, "_modules", ()):
        name = type(model._modules["loss_function"]).__name__
        raise ValueError(
            f"model.loss_function must be a function, got a {name}, which is a Module: torch makes "
            "it a part of the model, and the model calls its own loss. del model.loss_function, and "
            "write model.loss_function = causal_lm_loss(model, HeadLoss(..)), or "
            "fuse_head(model, HeadLoss(..))"
        )


def expect_own_loss(model):
    """Raise ValueError for a loss_function of somebody else, over which a fused head would silently
    win."""
    deepspeed = deepspeed_facts(output_layer(model))
    own = deepspeed is not None and isinstance(
        model.loss_function, deepspeed.VocabParallelCausalLMLoss
    )
    if own or model.loss_function is ForCausalLMLoss:
        return
    if "_loss_function" not in vars(model):  # the model's class has this one
        raise ValueError(
            "the model must be a causal one, whose own loss is ForCausalLMLoss, got a "
            f"{type(model).__name__}, whose own is {names_of([model.loss_function])[0]}: compute "
            "the loss of its logits, HeadLoss(..)(logits, labels), where label t is of logits t"
        )
    raise ValueError(
        "the model's loss_function must be transformers' ForCausalLMLoss, or DeepSpeed's "
        f"VocabParallelCausalLMLoss for its output layer, got {model.loss_function}, which a "
        f"fused head would not call: {OWN_LOSS_AGAIN}, and give a HeadLoss to fuse_head "
        "(fuse_log_probs takes none), or .remove() a fused head"
    )


def output_layer(model) -> nn.Linear:
    """Return the output layer of a model, in PEFT's modules_to_save the one that is called.
    TypeError if it is neither a plain nn.Linear, nor one with PEFT's LoRA, nor AutoTP's, all of
    which have the same attributes. ValueError if a module was set as the model's loss_function."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a transformers.PreTrainedModel, got {type(model).__name__}: give the "
            "one within it (a Trainer: trainer.model, DDP and DataParallel: model.module, "
            "DeepSpeed: engine.module, torch.compile: compiled._orig_mod, PEFT: base = model.get_base_model(), then "
            "base.loss_function = causal_lm_loss(base, ..) or fuse_head(base, ..))"
        )
    refuse_module_as_loss(model)
    layer = model.get_output_embeddings()
    if layer is None:
        said = "use a ..ForCausalLM, or HeadLoss(..)(logits, labels)"
        raise TypeError(f"{type(model).__name__} has no language-model head: {said}")
    if "modules_to_save" in getattr(layer, "_modules", ()):
        saved, active = layer.modules_to_save, "".join(layer.active_adapters[:1])
        layer = (
            layer.original_module
            if layer.disable_adapters or active not in saved
            else saved[active]
        )
    adapted = _has_lora(layer)
    if adapted and (model.tp_size or 1) > 1:
        name = next(name for name, module in model.named_modules() if module is layer)
        kind = f"{type(layer).__module__}.{type(layer).__name__}"
        raise TypeError(
            f"the output layer of a tensor-parallel model must have no LoRA, got {kind}: leave "
            f"{name!r} out of target_modules, or train in one process"
        )
    if unwrapped_class(layer) is not nn.Linear and not adapted and deepspeed_facts(layer) is None:
        raise TypeError(
            "the output layer must be a plain torch.nn.Linear (no quantization, no adapter but "
            "PEFT's LoRA without variants and bias) or DeepSpeed's LinearLayer "
            f"or VocabParallelLinear, got {type(layer).__module__}.{type(layer).__name__}: use "
            "HeadLoss(..)(logits, labels) on its logits, in a Trainer compute_loss_func=lambda out, "
            "labels, num_items_in_batch=None: head_loss(out.logits[:, :-1], labels[:, 1:], "
            "denominator=num_items_in_batch).loss"
        )
    return layer


def _has_lora(layer) -> bool:
    """Return True for an nn.Linear with PEFT's LoRA, whose forward adds scaling *
    B(A(dropout(hidden)))."""
    return (
        f"{type(layer).__module__}.{type(layer).__name__}" == "peft.tuners.lora.layer.Linear"
        and unwrapped_class(layer.base_layer) is nn.Linear
        and not layer.lora_variant
        and all(up.bias is None for up in layer.lora_B.values())
    )


def head_operands(layer, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states [.., H] and a weight [W, H] whose product is the output layer's, without
    its bias. LoRA of rank r appends scaling * A(hidden) to the former and B to the latter, [.., H +
    r] and [W, H + r]."""
    weight = layer.weight
    if not _has_lora(layer) or layer.disable_adapters or layer.merged:
        return hidden, weight
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    inputs = [
        layer.lora_dropout[name](hidden.to(layer.lora_A[name].weight.dtype)) for name in names
    ]
    down = [
        (layer.lora_A[name](x) * layer.scaling[name]).to(hidden.dtype)
        for name, x in zip(names, inputs)
    ]
    up = [layer.lora_B[name].weight.to(weight.dtype) for name in names]
    return torch.cat([hidden, *down], -1), torch.cat([weight, *up], -1)


def gathered_head(model) -> contextlib.AbstractContextManager[None]:
    """Context in which FSDP has gathered the output layer's weight over the ranks of data
    parallelism. FSDP manages it with the layer, or else with the model or the embedding to which it
    is tied."""
    layer = output_layer(model)
    return (
        unsharded(layer)
        if isinstance(layer, FSDPModule)
        else unsharded(model, model.get_input_embeddings())
    )


def installed_shard(model, shard: VocabShard | None = None) -> VocabShard:
    """Return `head_shard` outside of a call of the model, where FSDP may have the weight
    sharded."""
    with torch.no_grad(), gathered_head(model):
        return head_shard(model, shard)


def head_shard(model, shard: VocabShard | None = None) -> VocabShard:
    """Return the shard of the output layer's weight; ValueError if it is not `shard`, or tokens may
    differ in it."""
    layer = output_layer(model)
    if (deepspeed := deepspeed_facts(layer)) is not None:
        return deepspeed.layer_shard(layer, shard)
    found = local_head(None, layer.weight, layer.bias, shard, "all_reduce")[3]
    if shard is None and found.world_size > 1 and (model.tp_size or 1) == 1:
        raise ValueError(
            "the output layer's weight is sharded, but the model is not tensor parallel, so ranks "
            "hold different tokens (FSDP?): if they hold the same ones, say so with shard="
        )
    return found


def call_shard(model, shard: VocabShard | None, linear: Linear, hidden: torch.Tensor) -> VocabShard:
    """Return `head_shard` for one call, because the weight may have been gathered or replaced since
    the installation. ValueError if nobody would sum dH, if DeepSpeed's ZeRO stage 3 took the
    weight's rows apart, or if accelerate keeps the weight elsewhere."""
    found, layer = head_shard(model, shard), output_layer(model)
    weight = layer.weight
    if hasattr(layer, "_hf_hook") and weight.device != hidden.device:
        raise ValueError(
            "accelerate's hooks (device_map=, dispatch_model, cpu_offload) keep the output "
            f"layer's weight on {weight.device} between the layer's own calls, which a fused head "
            f"does not make, and the hidden states are on {hidden.device}: .remove() the head and "
            "use causal_lm_loss, or load the model on one device"
        )
    if hasattr(weight, "ds_id"):
        raise ValueError(
            f"a fused head needs this rank's {found.width} rows of the output layer, and ZeRO "
            f"stage 3 leaves a weight of shape {list(weight.shape)} outside of the layer's own "
            "calls: use stage 0, 1 or 2, or causal_lm_loss"
        )
    if linear.hidden_grad == "none" and found.world_size > 1 and hidden.requires_grad:
        raise ValueError(
            "hidden_grad='none' leaves a part of dH to a body that requires it whole: use "
            "'all_reduce'"
        )
    return found


def checked_linear(linear: Linear | None) -> Linear:
    """Return the `Linear` options, or the default ones. ValueError for sequence-parallel hidden
    states."""
    if linear is not None and linear.hidden_grad == "reduce_scatter":
        raise ValueError(
            "the hidden states of a transformers model are replicated, got "
            "hidden_grad='reduce_scatter'"
        )
    return linear or Linear()


def config_transform(config) -> Transform:
    """Return the transform of the logits that a config states. `check_forward` compares it with the
    model."""
    softcap = getattr(config, "final_logit_softcapping", None) or getattr(
        config, "logits_soft_cap", None
    )
    scale = 1.0
    # Cohere, Muse Glimmer, Falcon-H1
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        scale *= 1.0 if getattr(config, name, None) is None else getattr(config, name)
    # Granite divides, HyperCLOVA X multiplies
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        scale *= scaling if config.model_type == "hyperclovax" else 1 / scaling
    return Transform(scale=scale, softcap=softcap)
