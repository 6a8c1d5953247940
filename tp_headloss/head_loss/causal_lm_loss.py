"""`CausalLMLoss`: a `HeadLoss` against the next tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn

from ..spec import COLUMNS, UNSHIFTED, called_as, checked
from .checks import expect_labels
from .loss import HeadLoss
from .output import HeadLossOutput


@checked
class CausalLMLoss(nn.Module):
    """A HeadLoss for logits and *unshifted* labels [B, S]: position t is scored against label t +
    1, the last ignored.

    The labels are shifted, so that no logits are copied. The first label of each row does not
    count, see the ``denominator`` of `forward`. Put ``ignore_index`` on packed documents' first
    labels. From hidden states call `HeadLoss.linear` with labels that you move yourself,
    ``torch.nn.functional.pad(labels[..., 1:], (0, 1), value=-100)``. Not for a Transformers model's
    ``model.loss_function``: it is a Module, which torch files under the model's parts, and the
    model keeps its own loss. Use `integrations.transformers.causal_lm_loss`.

    Args:
        head_loss: by default cross-entropy.

    Examples:
        >>> logits, tokens = torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]])  # [B, S, V], [B, S]
        >>> CausalLMLoss()(logits, tokens).count  # the last position has no next token
        tensor(2.)
    """

    moved = "torch.nn.functional.pad(labels[..., 1:], (0, 1), value=-100)"
    # in errors about a misplaced one
    remedy = f": pass a HeadLoss, and labels that you move yourself, {moved}"
    of_hidden = f": call HeadLoss.linear, with labels that you move yourself, {moved}"

    def __init__(self, head_loss: HeadLoss | None = None):
        super().__init__()
        self.head_loss = HeadLoss() if head_loss is None else head_loss

    def forward(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        *,
        token_weight: torch.Tensor | None = None,
        denominator: torch.Tensor | float | None = None,
        **kwargs,
    ) -> HeadLossOutput:
        """Loss of logits [.., S, width] sharded on V against the next labels -> `HeadLossOutput`,
        replicated.

        Other keywords as in `HeadLoss.forward`. Position t of per-token temperatures, teachers, sets
        and ids belongs to the logits at t and to label t + 1. Inputs [.., S], or that broadcast to
        it, are refused, except "num_bytes", which belongs to its label.

        Args:
            labels: [.., S], unshifted. The last dimension is the sequence: rows that were flattened,
            ``labels.flatten()``, are one of them, and each row's last position is scored against
            the next row's first label, silently. Packed documents may be so, with
            ``ignore_index`` at their first labels.
            token_weight: [.., S], each of its label, and moved with it.
            denominator: as in `HeadLoss.forward`, of the labels that count: not the first of each
                row [S], which no position predicts. Count ``labels[..., 1:] != -100`` (or sum
                ``token_weight[..., 1:]`` over them). The count of all labels makes the loss too
                small, by about 1 / S, silently: a larger count is also that of a larger batch.
        """
        COLUMNS.check("logits", logits, {})
        expect_labels(labels, logits, token_weight)
        UNSHIFTED.check("labels", labels, {})
        if isinstance(inputs := kwargs.get("inputs"), Mapping):
            kwargs["inputs"] = {name: _of_next_token(name, x, labels) for name, x in inputs.items()}
        # an ignore_index need not fit int32
        labels = _next(labels.long(), self.head_loss.ignore_index)
        token_weight = None if token_weight is None else _next(token_weight, 0)
        return self.head_loss(
            logits, labels, token_weight=token_weight, denominator=denominator, **kwargs
        )

    def linear(self, *args: object, **keywords: object) -> NoReturn:
        """Raise TypeError: from hidden states a `HeadLoss` is called, with labels that are moved."""
        raise TypeError(f"CausalLMLoss takes logits, got hidden states{self.of_hidden}")

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self): ...


def _next(x: torch.Tensor, last) -> torch.Tensor:
    """x [.., S] moved to the left by one, with `last` at the end."""
    return torch.cat([x[..., 1:], torch.full_like(x[..., :1], last)], -1)


def _of_next_token(name: str, x, labels: torch.Tensor):
    """An input as a HeadLoss takes it. ValueError for one of which nobody knows to which position
    it belongs."""
    size, dims = labels.shape[-1], labels.dim()
    is_one = isinstance(x, torch.Tensor) and 0 < x.dim() <= dims and x.shape[-1] == size > 1
    per_token = name == "sequences" or is_one
    if per_token and name != "num_bytes":
        raise ValueError(
            "inputs per token must be 'num_bytes', which is moved as the labels are, got "
            f"{name!r}: call HeadLoss with it and with moved labels, "
            "torch.nn.functional.pad(labels[..., 1:], (0, 1), value=-100)"
        )
    return _next(x, 1) if per_token else x
