"""`CausalLMLoss`: a `HeadLoss` against the next tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ..spec import TENSOR, UNSHIFTED, checked
from .call import expect_labels
from .loss import HeadLoss
from .output import HeadLossOutput


@checked
class CausalLMLoss(nn.Module):
    """A HeadLoss for logits and *unshifted* labels [B, S]: position t is scored against label t + 1, the last ignored.

    The labels are shifted, not the logits, so the logits are neither sliced nor copied. For packed documents, put
    ``ignore_index`` on each document's first label.

    Args:
        head_loss: `HeadLoss`; default cross-entropy.

    Examples:
        >>> logits, tokens = torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]])  # [B, S, V], [B, S]
        >>> CausalLMLoss()(logits, tokens).count  # the last position has no next token
        tensor(2.)
    """

    def __init__(self, head_loss: HeadLoss | None = None):
        super().__init__()
        self.head_loss = HeadLoss() if head_loss is None else head_loss

    def forward(
        self, logits: torch.Tensor, labels: torch.Tensor, *, token_weight: torch.Tensor | None = None, **kwargs
    ) -> HeadLossOutput:
        """Loss of logits [.., S, width] sharded on V against the next labels -> `HeadLossOutput`, replicated.

        labels, token_weight: [.., S], unshifted; a weight belongs to its label. Other keywords as in
        `HeadLoss.forward`. Per-token temperatures and ``inputs`` are not shifted: position t of them belongs to the
        logits at t and label t + 1.
        """
        TENSOR.check("logits", logits, {})
        expect_labels(labels, logits, token_weight)
        UNSHIFTED.check("labels", labels, {})
        labels = labels.long()  # an ignore_index need not fit int32
        last = torch.full_like(labels[..., :1], self.head_loss.ignore_index)
        if token_weight is not None:
            token_weight = torch.cat([token_weight[..., 1:], torch.zeros_like(token_weight[..., :1])], -1)
        return self.head_loss(logits, torch.cat([labels[..., 1:], last], -1), token_weight=token_weight, **kwargs)

    if TYPE_CHECKING:
        __call__ = forward
