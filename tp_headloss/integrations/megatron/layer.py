"""Megatron's output layer and config: what a fused head reads from them, and what it refuses."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from ...arguments.linear import Mode
from ...arguments.options import Transform
from ...linear_head import Linear
from ...ranks.comm import HiddenGrad
from ...ranks.shard import VocabShard
from ..hooks import hooks_of, hooks_of_all_modules, is_from, names_of
from ..replacement import replaced

# options of a config that change what the output layer computes -> why the fused head lacks them
REFUSED_OPTIONS = {
    "defer_embedding_wgrad_compute": "dW is computed in the backward",
    "fp8_output_proj": "logits are computed in the type of the weight; fused=False keeps Megatron's MXFP8 output layer",
}
# whose hooks gather parameters, or only watch the modules: they may be at an output layer
HOOKS_OF = ("megatron", "megatron_fsdp", "transformer_engine", "torch.distributed", "torch.utils")
# methods of a model that make or take logits, of which a fused head has none
NOT_CALLED = ("compute_language_model_loss", "_scale_logits")
# whose functions are Megatron's own loss
LOSSES_OF = ("megatron", "transformer_engine", "torch")


def group_of_any(model):
    """Return the tensor-parallel group of whatever was given as a model, None where it has none:
    that of its output layer, or else that of all of Megatron, which ranks with a model have."""
    from megatron.core import parallel_state

    while not hasattr(model, "output_layer") and hasattr(model, "module"):
        model = model.module
    group = getattr(getattr(model, "output_layer", None), "tp_group", None)
    if not isinstance(group, dist.ProcessGroup):
        group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    return group


def layer_shard(group, width: int, vocab_size: int | None) -> VocabShard:
    """Return this rank's shard of an output layer of `width` rows a rank; those at or beyond
    vocab_size are padding."""
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"the output layer must know its tensor-parallel group, got {group!r}")
    padded = width * group.size()
    if vocab_size is not None and vocab_size > padded:
        raise ValueError(
            f"vocab_size must be at most the {padded} rows of the output layer, got {vocab_size}"
        )
    return VocabShard.from_group(group, padded if vocab_size is None else vocab_size, padded)


def expect_weight(weight: torch.Tensor | None) -> torch.Tensor:
    """Return the weight of an output layer; ValueError where there is none."""
    if weight is None:
        raise ValueError(
            "an output layer without a weight of its own must have share_embeddings_and_output_"
            "weights=True of its model, got False"
        )
    return weight


def expect_rows(layer, weight: torch.Tensor):
    """Raise ValueError unless the ranks of an output layer's group share its rows."""
    rows, size, ranks = weight.shape[0], layer.output_size, layer.tp_group.size()
    if rows * ranks != size:
        raise ValueError(
            f"the output layer's group must have the ranks that share its {size} rows, of which "
            f"this one has {rows}, got a group of {ranks}"
        )


def linear_options(linear: Linear, layer, weight: torch.Tensor, mode: Mode) -> Linear:
    """Return `Linear` options that reduce dH and store dW as the output layer would."""
    # without allreduce_dgrad the layer's forward copies its input, whose backward adds up, unless
    # disable_grad_reduce leaves that to others
    reduces = layer.allreduce_dgrad or not layer.disable_grad_reduce
    partial = layer.tp_group.size() > 1 and not layer.sequence_parallel and not reduces
    how: HiddenGrad = (
        "reduce_scatter" if layer.sequence_parallel else "none" if partial else "all_reduce"
    )
    # dW goes to an fp32 main_grad if it can be added there; otherwise it is returned, and DDP's
    # hook adds it
    fused = layer.gradient_accumulation_fusion and weight.requires_grad and torch.is_grad_enabled()
    main_grad = (
        fused and getattr(getattr(weight, "main_grad", None), "dtype", None) == torch.float32
    )
    return replace(linear, mode=mode, hidden_grad=how, main_grad=main_grad)


def logits_transform(config, temperature: float | torch.Tensor = 1.0) -> Transform:
    """Return the transform that a TransformerConfig asks for: the scale of MuP or none, then a
    temperature."""
    scale = config.mup_output_mult if getattr(config, "use_mup", False) else 1.0
    return Transform(scale=scale, temperature=temperature)


def refuse_options(config, layer):
    """Raise ValueError or TypeError for whatever makes the output layer compute something else than
    the fused head."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    for name, reason in REFUSED_OPTIONS.items():
        if getattr(config, name, False):
            raise ValueError(f"{name}=True is not supported: {reason}")
    if getattr(type(layer), "forward", None) is not ColumnParallelLinear.forward:
        raise TypeError(
            "the output layer must be Megatron's ColumnParallelLinear without a forward of its "
            f"own, got {type(layer).__name__}: use fused=False, which calls it"
        )
    dtype = getattr(layer, "output_dtype", None)  # of newer versions
    if dtype not in (None, config.params_dtype):
        raise ValueError(
            "the output layer's output_dtype (--output-logit-dtype) must be the model's "
            f"{config.params_dtype}, got {dtype}: use fused=False, which keeps the logits of that "
            "type"
        )
    if getattr(layer, "gtp_remat_size", 1) > 1:
        raise ValueError(
            "the output layer's weight must be sharded over its tensor-parallel group alone, got "
            f"gtp_remat_size={layer.gtp_remat_size}: use fused=False"
        )
    of_layer, of_config = layer.sequence_parallel, config.sequence_parallel
    if layer.tp_group.size() > 1 and of_layer != of_config:
        raise ValueError(
            "sequence_parallel of the output layer and of the model's config must be equal, got "
            f"{of_layer} and {of_config}"
        )


def refuse_ignored(layer):
    """Raise ValueError for hooks of an output layer, or of all modules, and for a forward that
    somebody has put into it: they would change logits, which a fused head does not make."""
    found = (hooks_of(layer) | hooks_of_all_modules()).values()
    others = names_of(hook for hook in found if not is_from(hook, *HOOKS_OF))
    if "forward" in vars(layer):
        others.append("a forward of its own")
    if others:
        raise ValueError(
            "a fused head makes no logits, so it needs an output layer without hooks, of its own or "
            f"of all modules, and with Megatron's forward, got {others}: remove them, or use "
            "install(model, head, fused=False), which computes from the layer's logits"
        )


def refuse_other_methods(model):
    """Raise ValueError unless the methods of a model that a fused head takes the place of are
    Megatron's, or a head's, in the model itself and in each of its classes."""
    places = [vars(model), *map(vars, type(model).__mro__)]
    for name in NOT_CALLED:
        refuse_others(name, *[place[name] for place in places if name in place])


def refuse_others(name: str, *methods):
    """Raise ValueError unless methods of this name are Megatron's or a head's."""
    others = [method for method in methods if not is_from(method, *LOSSES_OF, __package__)]
    if others:
        said = "write what it computes as terms= of the head"
        if name != "compute_language_model_loss":  # which the other way takes the place of, too
            said = "use install(model, head, fused=False), which computes from the model's logits"
        raise ValueError(
            f"a fused head takes the place of {name} and would ignore another one, got "
            f"{names_of(others)}: put Megatron's own back (del model.{name} of one that was put "
            f"into the model), or {said}"
        )


@contextmanager
def computing_instead(layer, forward):
    """Make an output layer compute something else for the duration of the block. It is still called
    as a module, because hooks on it gather its parameters. ValueError for what `refuse_ignored`
    refuses."""
    refuse_ignored(layer)
    with replaced(layer, forward=forward):
        yield
