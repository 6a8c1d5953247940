"""Layers that `kernels` puts into the place of a model's: they have no state."""

import functools

import torch
from torch import nn

from . import HeadLoss


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
        operand, size = (
            (hidden_states, lm_head_weight.shape[0]) if is_linear else (logits, logits.shape[-1])
        )
        if vocab_size not in (None, size):
            raise ValueError(
                f"vocab_size must be {size}, as the operands have it, got {vocab_size}"
            )
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(operand.device)
        head = head_loss(ignore_index)
        labels, given = shift_labels.to(operand.device), {"denominator": num_items_in_batch}
        if not is_linear:
            return head(logits, labels, **given).loss
        return head.linear(hidden_states, lm_head_weight, labels, bias=lm_head_bias, **given).loss
