"""NeMo-Automodel: losses for ``loss_fn._target_`` and ``kd_loss_fn._target_``, of what stays
sharded over "tp".

None has the name of the loss that it replaces: NeMo-Automodel builds its own class for any class
that is called MaskedCrossEntropy, TEParallelCrossEntropy, ChunkedCrossEntropy,
FusedLinearCrossEntropy or KDLoss, wherever it is from. Losses are fp32, equal on all ranks of "tp".
Unlike in NeMo-Automodel, a mean of no tokens is 0, a bad label's loss NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..arguments.options import Transform
from ..arguments.teachers import Teacher
from ..call.subclasses import is_dtensor
from ..head_loss import Distillation, HeadLoss, Term
from ..head_loss.distillation_terms import Divergence
from ..linear_head import Linear
from ..ranks.shard import VocabShard
from . import require

require("nemo_automodel")  # before it is imported: an error that says which versions are supported

# ruff: noqa: E402
from nemo_automodel.components.loss.linear_ce_base import LinearCrossEntropy
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy

IGNORED_LABEL = -100  # of NeMo-Automodel's datasets, whatever the ignore_index is


class LogitsLoss(MaskedCrossEntropy):
    """A `HeadLoss` of logits in the place of MaskedCrossEntropy, which gathers the logits of all
    ranks, and of TEParallelCrossEntropy. Forward: one collective; backward: none.

    It is a MaskedCrossEntropy because recipes replace any other loss of models without
    ``logits_to_keep`` by one.

    Args:
        terms: as in `HeadLoss`; default cross-entropy. YAML cannot say them: let it name a function
            for the loss.
        fp32_upcast: accepted because configurations name it; sums are fp32 always.
        ignore_index: label of tokens that have no loss.
        reduction: "sum", "mean" over the valid tokens, or "none".
        tp_group: for plain logits, the group that shares the vocabulary in even shards. A DTensor
            states its own.
    """

    def __init__(
        self,
        terms: Sequence[Term] | Term | None = None,
        *,
        fp32_upcast: bool = True,
        ignore_index: int = IGNORED_LABEL,
        reduction: str = "sum",
        tp_group=None,
    ):
        super().__init__(fp32_upcast, ignore_index, reduction)
        self.head_loss, self.tp_group = _head_loss(terms, ignore_index, reduction), tp_group

    def forward(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        mask: torch.Tensor | None = None,
        num_label_tokens: int | None = None,
        loss_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the loss, a scalar fp32, or [B S] for reduction="none", replicated.

        Args:
            logits: [B, S, V] sharded on V over "tp", as a DTensor, plain [B, S, V/P] of tp_group,
                or [B, S, V] whole.
            labels: [B, S] or [B S], replicated, shifted already.
            mask: as labels, 0 for tokens that have no loss.
            num_label_tokens: divides the sum; the valid tokens of the global batch.
            loss_weights: as labels, factors of the tokens' losses in the sum.

        Raises:
            ValueError: num_label_tokens or loss_weights with another reduction than "sum"; as
                `HeadLoss`.
        """
        labels = _labels(labels, logits, self.ignore_index)
        if mask is not None:
            labels = labels.masked_fill(_shaped(mask, logits) == 0, self.ignore_index)
        options = _options(self.reduction, logits, num_label_tokens, loss_weights)
        loss = self.head_loss(logits, labels, shard=_shard(logits, self.tp_group), **options).loss
        return loss if loss.dim() == 0 else loss.flatten()


class FusedHeadLoss(LinearCrossEntropy):
    """A `HeadLoss` of hidden states and the output layer's weight, without logits, in the place of
    FusedLinearCrossEntropy and ChunkedCrossEntropy, which refuse a weight that is sharded over
    "tp".

    As with FusedLinearCrossEntropy, neither a bias is seen, nor what a model does to its logits but
    for a soft cap.

    Args:
        terms, ignore_index, reduction: as in `LogitsLoss`.
        logit_softcapping: soft cap of the logits; 0: none.
        linear: `Linear`; default: the hidden states' gradient is summed over "tp" here.
    """

    def __init__(
        self,
        terms: Sequence[Term] | Term | None = None,
        *,
        ignore_index: int = IGNORED_LABEL,
        logit_softcapping: float = 0.0,
        reduction: str = "sum",
        linear: Linear | None = None,
    ):
        super().__init__()
        self.ignore_index, self.reduction, self.linear = ignore_index, reduction, linear
        self.head_loss = _head_loss(terms, ignore_index, reduction)
        self.transform = Transform(softcap=logit_softcapping) if logit_softcapping else None

    @staticmethod
    def materialize_lm_weight(lm_weight: torch.Tensor, *, grad_reduce_group=None) -> torch.Tensor:
        """Return the weight without FSDP's sharding, and with that of "tp". Called by the recipe.

        Args:
            lm_weight: [V, H], plain, or a DTensor on a mesh with or without a dimension "tp".
            grad_reduce_group: the data- and context-parallel ranks, over which a weight that is
                gathered here gets the mean of its gradients. FSDP reduces the gradient of a weight
                that it has gathered itself.

        Raises:
            ValueError: a group whose size is not that of the mesh's other dimensions.
        """
        if not is_dtensor(lm_weight) or "tp" not in (lm_weight.device_mesh.mesh_dim_names or ()):
            return LinearCrossEntropy.materialize_lm_weight(
                lm_weight, grad_reduce_group=grad_reduce_group
            )
        mesh = lm_weight.device_mesh
        return (
            lm_weight
            if mesh.ndim == 1
            else _gathered_but_for_tp(lm_weight, mesh, grad_reduce_group)
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor,
        lm_weight: torch.Tensor,
        num_label_tokens: int | None = None,
        grad_reduce_group=None,
        loss_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the loss, a scalar fp32, or [B, S] for reduction="none", replicated. Collectives:
        `HeadLoss.linear`.

        Args:
            hidden_states: [B, S, H] replicated over "tp"; as a DTensor, it may also be sharded on
                S.
            labels: [B, S] or [B S], replicated, shifted already.
            lm_weight: [V, H] sharded on V over "tp", as a DTensor, or the whole plain weight.
            grad_reduce_group: as in `materialize_lm_weight`.
            num_label_tokens, loss_weights: as in `LogitsLoss`.

        Raises:
            ValueError: as in `LogitsLoss`, and as `HeadLoss.linear`.
        """
        weight = self.materialize_lm_weight(lm_weight, grad_reduce_group=grad_reduce_group)
        if is_dtensor(hidden_states) and any(
            p.is_shard(hidden_states.dim() - 2) for p in hidden_states.placements
        ):
            whole = [
                Replicate() if p.is_shard(hidden_states.dim() - 2) else p
                for p in hidden_states.placements
            ]
            hidden_states = hidden_states.redistribute(placements=whole)
        labels = _labels(labels, hidden_states, self.ignore_index)
        options = _options(self.reduction, hidden_states, num_label_tokens, loss_weights)
        options |= {"transform": self.transform, "linear": self.linear}
        if is_dtensor(weight) and not is_dtensor(hidden_states):
            options["shard"] = VocabShard.from_mesh(weight.device_mesh, weight.shape[0], "tp")
        return self.head_loss.linear(hidden_states, weight, labels, **options).loss


class DistillationLoss(torch.nn.Module):
    """The divergence from a teacher's whole distribution, times the squared temperature, in the
    place of KDLoss. Forward: one collective, two for "jsd" and "total_variation"; backward: none.

    Args:
        ignore_index: label of tokens that have no loss; all other labels are alike.
        temperature: of teacher and student.
        fp32_upcast, chunk_size: accepted because configurations name them; sums are fp32 always,
            without copies.
        tp_group: as in `LogitsLoss`.
        divergence: as in `Distillation`; KDLoss has the forward KL.
    """

    def __init__(
        self,
        ignore_index: int = IGNORED_LABEL,
        temperature: float = 1.0,
        fp32_upcast: bool = True,
        tp_group=None,
        chunk_size: int = 0,
        *,
        divergence: Divergence = "forward_kl",
    ):
        super().__init__()
        self.ignore_index, self.temperature, self.tp_group = ignore_index, temperature, tp_group
        self.head_loss = HeadLoss(
            Distillation(1.0, divergence, temperature_squared=temperature != 1)
        )

    def forward(
        self,
        student_logits: torch.Tensor,
        teacher_logits: torch.Tensor,
        labels: torch.Tensor,
        num_batch_labels: int | None = None,
    ) -> torch.Tensor:
        """Return the loss, a scalar fp32, replicated; 0, with a zero gradient, if no token is
        valid.

        Args:
            student_logits, teacher_logits: [B, S, V] as in `LogitsLoss`; plain teacher columns may
                go with a DTensor.
            labels: [B, S] or [B S], replicated.
            num_batch_labels: divides the sum; None: the mean over the valid tokens.
        """
        ignored = _shaped(labels, student_logits) == self.ignore_index
        # the recipe may replace valid labels by one outside of the vocabulary
        labels = torch.where(ignored, self.head_loss.ignore_index, 0)
        teacher = Teacher(teacher_logits.detach(), self.temperature)
        shard = _shard(student_logits, self.tp_group)
        return self.head_loss(
            student_logits,
            labels,
            shard=shard,
            denominator=num_batch_labels,
            inputs={"teacher": teacher},
        ).loss


def _gathered_but_for_tp(weight, mesh, grad_reduce_group):
    """Return a DTensor [V, H] on "tp" alone. Its gradient is the mean over other ranks: recipes
    multiply the loss."""
    tp, names, others = mesh["tp"], mesh.mesh_dim_names, mesh.size() // mesh["tp"].size()
    given = 1 if grad_reduce_group is None else grad_reduce_group.size()
    rows = weight.placements[names.index("tp")]
    whole = weight.redistribute(
        placements=[rows if name == "tp" else Replicate() for name in names]
    )
    local = whole.to_local(grad_placements=[rows if name == "tp" else Partial() for name in names])
    if local.requires_grad:
        if given != others:
            raise ValueError(
                f"grad_reduce_group must have the {others} ranks of {names} without 'tp', got "
                f"{given}"
            )
        local.register_hook(lambda grad: grad / others)
    return DTensor.from_local(
        local, tp, [rows], run_check=False, shape=weight.shape, stride=weight.stride()
    )


def _head_loss(terms, ignore_index: int, reduction: str) -> HeadLoss:
    """HeadLoss of a reduction of NeMo-Automodel; its sum is a mean over a denominator from the
    caller."""
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(f"reduction must be 'sum', 'mean' or 'none', got {reduction!r}")
    return HeadLoss(
        terms, reduction="none" if reduction == "none" else "mean", ignore_index=ignore_index
    )


def _options(reduction: str, x: torch.Tensor, num_label_tokens, loss_weights) -> dict[str, Any]:
    """Denominator and token weights for the HeadLoss of x [.., width]."""
    if reduction == "sum":
        if loss_weights is not None:
            loss_weights = _shaped(loss_weights.to(torch.float32), x)
        return {
            "denominator": 1 if num_label_tokens is None else num_label_tokens,
            "token_weight": loss_weights,
        }
    if num_label_tokens is not None or loss_weights is not None:
        raise ValueError(
            f"num_label_tokens and loss_weights need reduction='sum', got {reduction!r}"
        )
    return {}


def _shaped(per_token: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return values per token on the device of x [.., width], in its leading shape if flat, as
    packed sequences are."""
    per_token, lead = per_token.to(x.device), x.shape[:-1]
    return (
        per_token.view(lead)
        if per_token.dim() == 1 and per_token.numel() == lead.numel()
        else per_token
    )


def _labels(labels: torch.Tensor, x: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Labels [..] for x [.., width]; the datasets' ignored label becomes ignore_index."""
    labels = _shaped(labels, x)
    return (
        labels
        if ignore_index == IGNORED_LABEL
        else labels.masked_fill(labels == IGNORED_LABEL, ignore_index)
    )


def _shard(logits: torch.Tensor, tp_group) -> VocabShard | None:
    """Shard of plain logits of a group; None where a DTensor states it, or one rank has the whole
    vocabulary."""
    if tp_group is None or is_dtensor(logits):
        return None
    return VocabShard.from_group(tp_group, logits.shape[-1] * tp_group.size())
