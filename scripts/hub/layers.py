"""Layers that `kernels` puts into the place of a model's: they have no state."""

import functools

import torch
from torch import nn

from . import HeadLoss, VocabShard
from .call.placements import layout, sharded_dim, used_mesh_dims
from .call.subclasses import is_dtensor


@functools.cache
def head_loss(ignore_index: int) -> HeadLoss:
    """The cross-entropy, whose calls of one kind are checked once."""
    return HeadLoss(ignore_index=ignore_index)


class ForCausalLMLoss(nn.Module):
    """The layer of that name of transformers: cross-entropy against the next tokens.

    From logits [B, S, V], or from hidden_states [B, S, H], lm_head_weight [V, H] and lm_head_bias
    [V], whose logits never exist as a whole. labels [B, S] are unshifted; shift_labels [B, S] are
    the next tokens, where they are known. num_items_in_batch: what the sum is divided by, instead
    of the number of valid tokens. -> the loss, fp32 [].

    Tensor parallelism: logits, or weight and bias, are DTensors sharded on V, and the loss is that
    of the whole vocabulary, replicated. Plain hidden states are then those of all ranks of the
    mesh's dimension "tp". Plain operands must have all vocab_size ids, as the gathered logits of
    transformers' own plan do.
    """

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        logits: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        hidden_states: torch.Tensor | None = None,
        lm_head_weight: torch.Tensor | None = None,
        lm_head_bias: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        is_linear = hidden_states is not None
        if is_linear == (logits is not None) or is_linear != (lm_head_weight is not None):
            given = dict(logits=logits, hidden_states=hidden_states, lm_head_weight=lm_head_weight)
            names = [name for name, x in given.items() if x is not None]
            raise ValueError(f"logits, or hidden_states and lm_head_weight are needed, got {names}")
        if is_linear:
            operand, size = hidden_states, lm_head_weight.shape[0]
            expect_whole("lm_head_weight", lm_head_weight, size, vocab_size)
        else:
            operand, size = logits, logits.shape[-1]
            expect_whole("logits", logits, size, vocab_size)
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(operand.device)
        head = head_loss(ignore_index)
        labels, given = shift_labels.to(operand.device), {"denominator": num_items_in_batch}
        if not is_linear:
            return head(logits, labels, **given).loss
        given["shard"] = shard_of(lm_head_weight, hidden_states)
        return head.linear(hidden_states, lm_head_weight, labels, bias=lm_head_bias, **given).loss


def expect_whole(name: str, operand: torch.Tensor, size: int, vocab_size: int | None):
    """Raise ValueError unless logits or a weight have all vocab_size ids, as a DTensor says it."""
    if vocab_size is None and not is_dtensor(operand) and several_ranks():
        raise ValueError(
            f"vocab_size is needed where there are several ranks, to tell whole {name} from one "
            f"rank's part: pass vocab_size={size} if these are whole"
        )
    if vocab_size not in (None, size):
        raise ValueError(
            f"vocab_size must be {size}, as {name} have it, got {vocab_size}. Is this one rank's "
            f"part? Pass the DTensor that it is of, or gather it (tp_plan='auto' gathers logits)"
        )


def several_ranks() -> bool:
    """Whether this process is one of several."""
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def shard_of(weight: torch.Tensor, hidden: torch.Tensor) -> VocabShard | None:
    """Return the shard of a DTensor's rows beside plain hidden states; None: `linear` knows it."""
    if not is_dtensor(weight) or is_dtensor(hidden):
        return None
    mesh = weight.device_mesh
    dims = [dim for dim in used_mesh_dims(weight) if sharded_dim(weight, dim) == 0]
    if not dims:
        return None
    names = [mesh.mesh_dim_names[dim] for dim in dims] if mesh.mesh_dim_names else dims
    if names != ["tp"]:
        raise ValueError(
            "lm_head_weight must be sharded over the mesh's dimension 'tp', whose ranks hold the "
            f"same tokens, got {layout(weight)} over {names}. If they hold the same ones, pass "
            "DTensor.from_local(hidden_states, mesh, [Replicate()]); if they do not (FSDP), call "
            "this within the forward of the module that FSDP manages"
        )
    return VocabShard.from_mesh(mesh, weight.shape[0], "tp")
