"""SpecForge's losses of EAGLE-3 draft models and the probabilities that their target teaches, with
its names and signatures and a shard of the vocabulary. Nothing of SpecForge is imported.

A draft knows a subset of the target's ids, and SpecForge has two distributions of the target over
this subset: target_p sums to 1 and is that of the KL; target_p_on_draft are the target's own
probabilities, which sum to less, and of these is the acceptance rate sum min(p, q), because a draft
never proposes any other id. All other ids are one more column here, which the target has and the
draft has not: then the acceptance rate is 1 - the total variation.

Tensors of the draft's vocabulary are sharded alike, [B, S, V_d/P], all others are replicated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

import torch
import torch.nn.functional as F

from .. import losses
from ..arguments.teachers import Teacher
from ..call.statistics import vocab_statistics
from ..linear_head import linear_vocab_statistics
from ..modules.selected_rows import select_rows
from ..ranks.comm import sum_over_ranks
from ..ranks.shard import VocabShard
from ..spec import (
    Callables,
    CheckedBy,
    Count,
    Finite,
    NotNegative,
    Positive,
    Size,
    TensorLine,
    checked,
)
from ..statistics import VocabStatistics

__all__ = [
    "acc_and_loss",
    "compute_acceptance_rate",
    "compute_loss_and_acceptance_rate",
    "compute_target_p_padded_from_hidden",
]

LARGEST_MASS = 1.01  # sum of probabilities that were rounded before they came here

Shard: TypeAlias = Annotated[VocabShard, "Of the draft's vocabulary; None: this rank has all of it"]
DraftLogits: TypeAlias = Annotated[
    torch.Tensor, TensorLine("floating point", ("B", "S", "width"), sharded=-1), "Of the draft"
]
TargetP: TypeAlias = Annotated[
    torch.Tensor,
    TensorLine("floating point", ("B", "S", "width"), sharded=-1, constant=True),
    "The target's probabilities of the draft's ids, which sum to 1",
]
TargetPOnDraft: TypeAlias = Annotated[
    torch.Tensor,
    TensorLine("floating point", ("B", "S", "width"), sharded=-1, constant=True),
    "The target's probabilities of the draft's ids, among all of its ids",
]
PositionMask: TypeAlias = Annotated[
    torch.Tensor, TensorLine("real numbers or bool", ("B", "S", 1)), "Weights of tokens"
]
TargetIds: TypeAlias = Annotated[
    torch.Tensor, TensorLine("int64 or int32", ("B", "S")), "The target's likeliest ids"
]
DraftIds: TypeAlias = Annotated[
    torch.Tensor, TensorLine("bool", ("V",)), "True for each of the target's ids that the draft has"
]
TargetHidden: TypeAlias = Annotated[torch.Tensor, TensorLine("floating point", ("B", "S", "H_t"))]
TargetWeight: TypeAlias = Annotated[
    torch.Tensor, TensorLine("floating point", ("width", "H_t"), sharded=0)
]
DraftRows: TypeAlias = Annotated[
    torch.Tensor,
    TensorLine("floating point", ("draft_width", "H_t"), sharded=0),
    "The target's rows of the draft's ids, see `select_rows`; None: selected in this call",
]
LKLossType: TypeAlias = Literal["lambda", "alpha"]
Reduce: TypeAlias = Annotated[Callable[..., Any], Callables()]
Model: TypeAlias = Annotated[Any, CheckedBy("a model of SpecForge")]
Adapter: TypeAlias = Annotated[Any, CheckedBy("an adapter of SpecForge")]


@checked
def compute_acceptance_rate(
    *,
    logits: DraftLogits,
    target_probs: TargetPOnDraft,
    position_mask: PositionMask,
    eps: Positive = 1e-8,
    reduce_fn: Reduce | None = None,
    shard: Shard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean acceptance rate of the tokens, and the mean of its logarithm.

    A rate below 1e-5 has the logarithm of 1e-5 and no gradient. The logits of the rank with the last
    id are copied, for one more column, and of the probabilities the logarithms are made. The forward
    has a collective of the probabilities' sums, and the two of a total variation.

    Args:
        target_probs: probabilities, not their logs, nor per cent. A sum of up to 1.01, of
            rounding, counts as 1; with a larger one, or with logits or log-probs in their place,
            both means are NaN.
        shard: A forgotten one is silently wrong: another rate on each rank, because probabilities
            of some ids may sum to less than 1.
        eps: least divisor of the means.
        reduce_fn: called with local_correct, a sum, and local_denom, its divisor; returns both summed
            over the ranks of other tokens. None: this rank has all tokens.

    Raises:
        TypeError, ValueError: tensors that do not fit together or the shard.

    Examples:
        >>> rate, log_rate = compute_acceptance_rate(
        ...     logits=torch.zeros(1, 1, 2),
        ...     target_probs=torch.tensor([[[0.7, 0.1]]]),  # 0.2 of other ids
        ...     position_mask=torch.ones(1, 1, 1),
        ... )
        >>> rate
        tensor(0.6000)
    """
    stats = _statistics_of_all_ids(logits, target_probs, shard)
    return _mean_rates(stats, position_mask, eps, reduce_fn)


@checked
def compute_loss_and_acceptance_rate(
    *,
    logits: DraftLogits,
    target_p: TargetP,
    target_p_on_draft: TargetPOnDraft,
    position_mask: PositionMask,
    lk_loss_type: LKLossType | None,
    kl_scale: Finite,
    kl_decay: NotNegative,
    reduce_metrics_fn: Reduce | None = None,
    reduce_loss_fn: Reduce | None = None,
    shard: Shard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean acceptance rate, without gradient, and the loss of one step.

    SpecForge's "KL" is the cross-entropy -sum target_p log q, over all tokens' number, masked or not.

    Args:
        lk_loss_type: None: the KL; "alpha": -the mean of the acceptance rates' logarithms; "lambda":
            w KL + (1 - w) (1 - rate) with w = kl_scale exp(-kl_decay rate), of the mean rate.
        reduce_metrics_fn: reduce_fn of `compute_acceptance_rate`.
        reduce_loss_fn: called with the KL; None: it stays as it is.

    Raises:
        TypeError, ValueError: as `compute_acceptance_rate`.

    Examples:
        >>> given = {"target_p": torch.tensor([[[0.875, 0.125]]]), "position_mask": torch.ones(1, 1, 1)}
        >>> given |= {"lk_loss_type": "lambda", "kl_scale": 1.0, "kl_decay": 3.0}
        >>> compute_loss_and_acceptance_rate(
        ...     logits=torch.zeros(1, 1, 2),
        ...     target_p_on_draft=torch.tensor([[[0.7, 0.1]]]),
        ...     **given,
        ... )
        (tensor(0.6000), tensor(0.4485))

    Source: SpecForge; LK losses (arXiv:2602.23881).
    """
    rate, loss, _ = _rate_and_loss(
        logits,
        target_p,
        target_p_on_draft,
        position_mask,
        (lk_loss_type, kl_scale, kl_decay),
        (reduce_metrics_fn, reduce_loss_fn),
        shard,
    )
    return rate, loss


@checked
def acc_and_loss(
    model: Model,
    *,
    logits: DraftLogits,
    target_p: TargetP,
    target_p_on_draft: TargetPOnDraft,
    target_token_ids: TargetIds,
    position_mask: PositionMask,
    loss_mask: PositionMask,
    adapter: Adapter,
    shard: Shard | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return accuracy, acceptance rate, loss, correct tokens, tokens, the loss without gradient, and
    what it was divided by, of one step: ``OnlineEagle3Model._acc_and_loss`` of SpecForge.

    The draft's likeliest id is that of all ranks. It comes from the pass that finds the acceptance
    rate.

    Args:
        model: SpecForge's, with ``draft_model.d2t``, ``lk_loss_type``, ``kl_scale`` and
            ``kl_decay``.
        loss_mask: weights of tokens in the accuracy.
        adapter: SpecForge's, with ``reduce_metrics`` and ``reduce_loss``.

    Raises:
        TypeError, ValueError: as `compute_acceptance_rate`.
    """
    rate, loss, likeliest = _rate_and_loss(
        logits,
        target_p,
        target_p_on_draft,
        position_mask,
        (model.lk_loss_type, model.kl_scale, model.kl_decay),
        (adapter.reduce_metrics, adapter.reduce_loss),
        shard,
    )
    found = likeliest + model.draft_model.d2t[likeliest]
    correct, tokens = adapter.reduce_metrics(
        local_correct=((found == target_token_ids) * loss_mask.squeeze(-1)).sum(),
        local_denom=loss_mask.sum().float().clamp_min(1e-6),
    )
    positions = torch.full((), likeliest.numel(), dtype=torch.float32, device=logits.device)
    return correct / tokens, rate, loss, correct, tokens, loss.detach(), positions


@checked
@torch.no_grad()
def compute_target_p_padded_from_hidden(
    *,
    hidden: TargetHidden,
    lm_head_weight: TargetWeight,
    t2d: DraftIds,
    loss_mask: PositionMask,
    length: Count,
    chunk_size: Size = 32768,
    shard: Annotated[VocabShard, "Of the target's vocabulary; None: this rank has all of it"]
    | None = None,
    draft_shard: Annotated[
        VocabShard, "Of the draft's vocabulary, over the same group; None: VocabShard.from_group's"
    ]
    | None = None,
    draft_weight: DraftRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what a target teaches, from its hidden states and its head: target_p and
    target_p_on_draft [B, S + length, V_d/P] fp32 sharded on V_d, its likeliest ids [B, S + length]
    and the position mask [B, S, 1].

    SpecForge needs the whole head on every rank. The logits of the whole vocabulary are made by
    blocks of tokens; those of the draft's ids exist as a whole.

    Args:
        loss_mask: weights of tokens; the position mask is 0, too, where the target's likeliest id is
            none of the draft's.
        length: tokens to append, for the steps after the first one, at which target_p is uniform and
            target_p_on_draft 0.
        chunk_size: accepted, and changes nothing.

    Raises:
        TypeError, ValueError: tensors that do not fit together or a shard.

    Examples:
        >>> target_p, on_draft, ids, mask = compute_target_p_padded_from_hidden(
        ...     hidden=torch.ones(1, 1, 1),
        ...     lm_head_weight=torch.tensor([[0.5], [0.25], [0.25]]).log(),
        ...     t2d=torch.tensor([True, False, True]),
        ...     loss_mask=torch.ones(1, 1, 1),
        ...     length=1,
        ... )
        >>> target_p
        tensor([[[0.6667, 0.3333],
                 [0.5000, 0.5000]]])
        >>> on_draft
        tensor([[[0.5000, 0.2500],
                 [0.0000, 0.0000]]])
    """
    shard = shard or VocabShard.from_group(None, lm_head_weight.shape[0])
    if len(t2d) != shard.vocab_size:
        raise ValueError(f"t2d must have the target's {shard.vocab_size} ids, got {len(t2d)}")
    ids = t2d.nonzero()[:, 0]
    draft_shard = draft_shard or VocabShard.from_group(shard.group, len(ids))
    if draft_weight is None:
        draft_weight = select_rows(lm_head_weight, ids, shard=shard, to=draft_shard)
    if draft_shard.vocab_size != len(ids):
        raise ValueError(
            f"draft_shard must be of the {len(ids)} ids in t2d, got {draft_shard.vocab_size}"
        )
    whole = linear_vocab_statistics(hidden, lm_head_weight, shard=shard, want=("argmax",))
    logits = F.linear(hidden, draft_weight)
    part = vocab_statistics(logits, shard=draft_shard)
    target_p = (logits.float() - part.lse[..., None]).exp()
    on_draft = (logits.float() - whole.lse[..., None]).exp()
    for probabilities in (target_p, on_draft):
        probabilities[..., draft_shard.valid_width :] = 0
    likeliest = whole.argmax
    return (
        F.pad(target_p, (0, 0, 0, length), value=1 / len(ids)),
        F.pad(on_draft, (0, 0, 0, length)),
        F.pad(likeliest, (0, length)),
        t2d[likeliest][..., None].int() * loss_mask,
    )


def _rate_and_loss(logits, target_p, target_p_on_draft, position_mask, lk, reductions, shard):
    """Mean acceptance rate without gradient, loss, and the draft's likeliest ids."""
    lk_loss_type, kl_scale, kl_decay = lk
    reduce_metrics, reduce_loss = reductions
    compared = logits.detach() if lk_loss_type is None else logits
    stats = _statistics_of_all_ids(compared, target_p_on_draft, shard)
    rate, log_rate = _mean_rates(stats, position_mask, 1e-8, reduce_metrics)
    if lk_loss_type == "alpha":
        return rate.detach(), -log_rate, stats.argmax

    loss = _mean_cross_entropy(logits, target_p, position_mask, shard)
    loss = loss if reduce_loss is None else reduce_loss(loss)
    if lk_loss_type == "lambda":
        share = kl_scale * (-kl_decay * rate.detach()).exp()
        loss = share * loss + (1 - share) * (1 - rate)
    return rate.detach(), loss, stats.argmax


def _mean_cross_entropy(logits, target_p, position_mask, shard) -> torch.Tensor:
    """-sum target_p log q, 0 where masked, averaged over all tokens."""
    want = ("forward_kl", "teacher_entropy")
    teacher = Teacher(target_p.log())
    stats = vocab_statistics(logits, shard=shard, want=want, teacher=teacher)
    counts = position_mask[..., 0] != 0
    return torch.where(counts, losses.soft_cross_entropy(stats), 0.0).mean()


def _mean_rates(stats, position_mask, eps, reduce_fn) -> tuple[torch.Tensor, torch.Tensor]:
    """Means of the acceptance rates and of their logarithms, weighted by the mask."""
    weights = position_mask[..., 0].float()
    means = []
    for values in (stats.overlap, -losses.lk_alpha(stats)):
        total, count = (values * weights).sum(), weights.sum().clamp_min(eps)
        if reduce_fn is not None:
            total, count = reduce_fn(local_correct=total, local_denom=count)
        means.append(total / count.clamp_min(eps))
    return means[0], means[1]


def _statistics_of_all_ids(logits, target_probs, shard) -> VocabStatistics:
    """Overlap of draft and target over the draft's ids and one more, which stands for all
    others; and the draft's likeliest id."""
    has_shard = shard is not None
    shard = shard or VocabShard.from_group(None, logits.shape[-1])
    shard.expect_width("logits", logits.shape[-1], "columns")
    log_probs = target_probs.float().log()
    mass = sum_over_ranks(log_probs[..., : shard.valid_width].exp().sum(-1), shard.group)
    mass = torch.where(mass > LARGEST_MASS, torch.nan, mass.clamp(max=1))
    others = (-mass).log1p()

    columns, joined = _with_column(logits, torch.full_like(others, -torch.inf), shard)
    teacher, _ = _with_column(log_probs, others, shard)
    # without a shard the call says so where there are several ranks
    resolved = joined if has_shard else None
    want = ("overlap", "argmax")
    return vocab_statistics(columns, shard=resolved, want=want, teacher=Teacher(teacher))


def _with_column(x, column, shard) -> tuple[torch.Tensor, VocabShard]:
    """Return this rank's columns of a vocabulary with one more id at its end, and their shard.

    Padding is cut off. The rank of the last id gets the new one, too.
    """
    size, group = shard.vocab_size, shard.group
    x = x[..., : shard.valid_width]
    if not shard.start < size <= shard.stop:
        bounds = min(shard.start, size + 1), min(shard.stop, size + 1)
        return x, VocabShard(bounds[0], bounds[0] + x.shape[-1], size + 1, group)
    x = torch.cat([x, column[..., None].to(x.dtype)], -1)
    return x, VocabShard(shard.start, size + 1, size + 1, group)
