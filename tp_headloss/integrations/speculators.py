"""speculators' losses of draft models, and the metrics of its EAGLE-3 models, with its names and
signatures and a shard of the vocabulary. Nothing of speculators is imported.

Draft and target are logits over the draft's vocabulary, both normalised over it, and sharded alike.
Losses are fp32 (float64 of float64 logits) for logits of any dtype, without a copy of them. In the
place of both logits `compute_metrics` takes hidden states and the weights of the heads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch

from .. import losses
from ..arguments.teachers import Teacher, TeacherHead
from ..call.statistics import vocab_statistics
from ..linear_head import linear_vocab_statistics
from ..ranks.shard import VocabShard
from ..spec import (
    WEIGHT,
    CheckedBy,
    Count,
    Positive,
    TensorLine,
    TokenLoss,
    checked,
)
from ..statistics import VocabStatistics

__all__ = [
    "ce_loss",
    "compute_metrics",
    "js_div_loss",
    "kl_div_loss",
    "lk_hybrid_loss",
    "neg_log_acceptance_loss",
    "resolve_loss_config",
    "reverse_kl_div_loss",
    "tv_loss",
]

LOSS_EPS = 1e-5  # which speculators adds to the number of tokens that a loss is divided by

Shard: TypeAlias = Annotated[VocabShard, "Of the draft's vocabulary; None: this rank has all of it"]
DraftLogits: TypeAlias = Annotated[
    torch.Tensor, TensorLine("floating point", ("B", "S", "width"), sharded=-1)
]
TargetLogits: TypeAlias = Annotated[
    torch.Tensor, TensorLine("floating point", ("B", "S", "width"), sharded=-1, constant=True)
]
Drafts: TypeAlias = Annotated[torch.Tensor, TensorLine("floating point", ("B", "S", "X"))]
Targets: TypeAlias = Annotated[
    torch.Tensor, TensorLine("floating point", ("B", "S", "Y"), constant=True)
]
Mask: TypeAlias = Annotated[torch.Tensor, TensorLine("real numbers or bool", ("B", "S"))]
DraftWeight: TypeAlias = Annotated[torch.Tensor, WEIGHT]
TargetWeight: TypeAlias = Annotated[
    torch.Tensor, TensorLine("floating point", ("width", "H_t"), sharded=0)
]
LossConfig: TypeAlias = dict[str, tuple[Callable[..., torch.Tensor], float]]


class _Loss(NamedTuple):
    function: Callable[[VocabStatistics], torch.Tensor]
    want: tuple[str, ...]  # statistics that it reads


def _statistic(name: str) -> _Loss:
    return _Loss(lambda stats: getattr(stats, name), (name,))


_LOSSES = {
    "kl_div": _statistic("forward_kl"),
    "rkl": _statistic("reverse_kl"),
    "jsd": _statistic("jsd"),
    "ce": _Loss(losses.cross_entropy, ()),  # of labels that are the target's likeliest ids
    "tv": _statistic("total_variation"),
    "nla": _Loss(losses.lk_alpha, ("overlap",)),
    "lk_hybrid": _Loss(losses.lk_lambda, ("forward_kl", "total_variation")),
}


@checked
def kl_div_loss(
    logits: DraftLogits, targets: TargetLogits, *, shard: Shard | None = None
) -> TokenLoss:
    """Return KL(target || draft).

    Examples:
        >>> kl_div_loss(torch.zeros(1, 1, 2), torch.tensor([[[1.0, 0.0]]]))
        tensor([[0.1109]])
    """
    return _loss_of_logits("kl_div", logits, targets, shard)


@checked
def reverse_kl_div_loss(
    logits: DraftLogits, targets: TargetLogits, *, shard: Shard | None = None
) -> TokenLoss:
    """Return KL(draft || target).

    Examples:
        >>> reverse_kl_div_loss(torch.zeros(1, 1, 2), torch.tensor([[[1.0, 0.0]]]))
        tensor([[0.1201]])
    """
    return _loss_of_logits("rkl", logits, targets, shard)


@checked
def js_div_loss(
    logits: DraftLogits, targets: TargetLogits, *, shard: Shard | None = None
) -> TokenLoss:
    """Return the Jensen-Shannon divergence of draft and target, with the mean of both.

    Examples:
        >>> js_div_loss(torch.zeros(1, 1, 2), torch.tensor([[[1.0, 0.0]]]))
        tensor([[0.0285]])
    """
    return _loss_of_logits("jsd", logits, targets, shard)


@checked
def ce_loss(logits: DraftLogits, targets: TargetLogits, *, shard: Shard | None = None) -> TokenLoss:
    """Return the cross-entropy of the target's likeliest id, of equal ones the lowest.

    One more pass over the targets, and its collective.

    Examples:
        >>> ce_loss(torch.zeros(1, 1, 2), torch.tensor([[[1.0, 0.0]]]))
        tensor([[0.6931]])
    """
    return _loss_of_logits("ce", logits, targets, shard)


@checked
def tv_loss(logits: DraftLogits, targets: TargetLogits, *, shard: Shard | None = None) -> TokenLoss:
    """Return the total variation of draft and target, 1 - the acceptance rate.

    Examples:
        >>> tv_loss(torch.zeros(1, 1, 2), torch.tensor([[[1.0, 0.0]]]))
        tensor([[0.2311]])
    """
    return _loss_of_logits("tv", logits, targets, shard)


@checked
def neg_log_acceptance_loss(
    logits: DraftLogits, targets: TargetLogits, *, shard: Shard | None = None
) -> TokenLoss:
    """Return -log of the acceptance rate, `losses.lk_alpha`.

    Examples:
        >>> neg_log_acceptance_loss(torch.zeros(1, 1, 2), torch.tensor([[[1.0, 0.0]]]))
        tensor([[0.2627]])
    """
    return _loss_of_logits("nla", logits, targets, shard)


@checked
def lk_hybrid_loss(
    logits: DraftLogits,
    targets: TargetLogits,
    eta: float = 3.0,
    *,
    shard: Shard | None = None,
) -> TokenLoss:
    """Return the mixture of KL and total variation `losses.lk_lambda`.

    Args:
        eta: as in `losses.lk_lambda`.

    Examples:
        >>> lk_hybrid_loss(torch.zeros(1, 1, 2), torch.tensor([[[1.0, 0.0]]]))
        tensor([[0.2191]])
    """
    stats = _statistics_of_logits(_LOSSES["lk_hybrid"].want, logits, targets, shard)
    return losses.lk_lambda(stats, eta)


_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "kl_div": kl_div_loss,
    "rkl": reverse_kl_div_loss,
    "jsd": js_div_loss,
    "ce": ce_loss,
    "tv": tv_loss,
    "nla": neg_log_acceptance_loss,
    "lk_hybrid": lk_hybrid_loss,
}


def resolve_loss_config(
    spec: str, implementation: str = "fused", *, shard: VocabShard | None = None
) -> LossConfig:
    """Return the losses of a specification by name, each with its weight, for speculators'
    ``loss_config``.

    Args:
        spec: "kl_div" (forward KL), "rkl" (reverse KL), "jsd", "ce" (of the target's likeliest id),
            "tv" (total variation), "nla" (-log of the acceptance rate) or "lk_hybrid" (a mixture of KL
            and total variation, `losses.lk_lambda`), or a JSON object of such names and their
            weights.
        implementation: accepted, and changes nothing.
        shard: of the draft's vocabulary, bound to each loss; None: this rank has all of it.

    Raises:
        ValueError: a name that is not one of these, or a weight that is no number.

    Examples:
        >>> config = resolve_loss_config('{"ce": 0.1, "tv": 0.9}')
        >>> loss, weight = config["tv"]
        >>> weight, loss(torch.zeros(1, 1, 2), torch.tensor([[[1.0, 0.0]]]))
        (0.9, tensor([[0.2311]]))
    """
    weights = {spec: 1.0} if spec in _LOSSES else _weights_of(spec)
    _expect_known(weights)
    return {name: (partial(_FUNCTIONS[name], shard=shard), w) for name, w in weights.items()}


def _weights_of(spec: str) -> dict[str, float]:
    try:
        weights = json.loads(spec)
    except (TypeError, json.JSONDecodeError):
        weights = None
    if not isinstance(weights, dict) or not weights:
        raise ValueError(
            f"spec must be of {[*_LOSSES]}, or a JSON object of such names and their weights, got "
            f"{spec!r}"
        )
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise ValueError(f"the weight of {name!r} must be a number, got {weight!r}")
    return {name: float(weight) for name, weight in weights.items()}


def _expect_known(config):
    """Raise ValueError unless all names are those of losses here."""
    if not isinstance(config, dict) or not config or not config.keys() <= _LOSSES.keys():
        raise ValueError(
            f"loss_config must have names of {[*_LOSSES]}, got "
            f"{[*config] if isinstance(config, dict) else config!r}"
        )


@checked
def compute_metrics(
    logits: Drafts,
    targets: Targets,
    loss_mask: Mask | None,
    prev_correct: Mask | None,
    ttt_step: Count,
    ttt_step_loss_decay: Positive,
    loss_config: Annotated[Any, CheckedBy("a dict, or None")] = None,
    *,
    shard: Shard | None = None,
    weight: DraftWeight | None = None,
    target_weight: TargetWeight | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of one step of an EAGLE-3 model and its metrics, as sums and what to divide
    them by.

    The draft at position t of step k is compared with the target at t + k. All losses and metrics
    come from one pass over the drafts, besides one that finds the targets' likeliest ids. Metrics
    have speculators' names, and "accept_rate_<step>" besides, the acceptance rate.

    A loss is normalised as in speculators, by sequence: the sum over its tokens by the mask, divided
    by the mask's sum + 1e-5, and then the mean over the B sequences. So a token of a short sequence
    counts more, and a sequence without tokens counts as one whose loss is 0.

    Args:
        logits: [B, S, V/P] logits of the draft sharded on V; with ``weight`` its hidden states
            [B, S, H], replicated.
        targets: [B, S, V/P] logits of the target at the same ids (probabilities would be taken for
            logits); with ``target_weight`` its hidden
            states [B, S, H_t]. Its logits are then made by blocks, and never exist as a whole.
        loss_mask: weights of the tokens; None: all count.
        prev_correct: True where all steps so far found the target's likeliest id; written. None: not
            known.
        ttt_step: k, from 0.
        ttt_step_loss_decay: factor of the loss to the power of k.
        loss_config: names and weights of the losses, as `resolve_loss_config` returns them; the
            functions in it are not called. None: the KL.
        weight: rows of the draft's head.
        target_weight: rows of the target's head at the draft's ids, see `select_rows`; it needs
            ``weight``.

    Raises:
        ValueError: shapes that do not fit, an unknown loss, or a target_weight without a weight.

    Examples:
        >>> draft, target = torch.zeros(1, 2, 2), torch.tensor([[[0.0, 0.0], [1.0, 0.0]]])
        >>> loss, metrics = compute_metrics(draft, target, None, None, 1, 0.8)
        >>> loss, metrics["accept_rate_1_sum"] / metrics["accept_rate_1_total"]
        (tensor(0.0888), tensor(0.7689))
    """
    config = {"kl_div": (None, 1.0)} if loss_config is None else loss_config
    _expect_known(config)
    if ttt_step >= logits.shape[1]:
        raise ValueError(f"ttt_step must be below the {logits.shape[1]} positions, got {ttt_step}")
    if target_weight is not None and weight is None:
        raise ValueError("target_weight needs weight, the draft's, got None")
    drafts, targets = logits[:, : logits.shape[1] - ttt_step], targets[:, ttt_step:]
    mask = torch.ones(drafts.shape[:2], dtype=torch.float32, device=drafts.device)
    mask = mask if loss_mask is None else loss_mask[:, ttt_step:].to(mask.dtype)

    want = ["argmax", "total_variation", *(x for name in config for x in _LOSSES[name].want)]
    stats = _statistics(tuple(dict.fromkeys(want)), drafts, targets, shard, weight, target_weight)
    decay = ttt_step_loss_decay**ttt_step
    tokens = mask.sum(1) + LOSS_EPS
    of_losses = {
        name: (decay * _LOSSES[name].function(stats) * mask).sum(1).div(tokens).mean()
        for name in config
    }
    loss = torch.stack([share * of_losses[name] for name, (_, share) in config.items()]).sum()

    values: dict[str, tuple[torch.Tensor, Any]] = {"loss": (loss, 1.0)}
    if len(config) > 1:
        values |= {f"{name}_loss": (value, 1.0) for name, value in of_losses.items()}
    values |= _accuracies(stats.correct, mask, prev_correct, drafts.shape[1])
    values["accept_rate"] = (losses.acceptance_rate(stats) * mask).sum(), mask.sum()
    metrics = {}
    for name, (value, total) in values.items():
        metrics[f"{name}_{ttt_step}_sum"] = value.detach().clone()
        metrics[f"{name}_{ttt_step}_total"] = torch.as_tensor(
            total, dtype=torch.float32, device=loss.device
        ).detach()
    return loss, metrics


def _accuracies(correct, mask, prev_correct, positions: int) -> dict[str, tuple]:
    """Tokens that are correct, after correct ones where that is known, and numbers of tokens:
    those of the mask, and those that were correct before."""
    before = torch.full((), correct.numel(), dtype=torch.float32, device=correct.device)
    if prev_correct is not None:
        so_far = prev_correct[:, :positions]
        before = so_far.sum().float()
        correct = correct & so_far.bool()
        so_far.copy_(correct)
    found = (correct & (mask != 0)).sum().float()
    return {"full_acc": (found, (mask != 0).sum().float()), "cond_acc": (found, before)}


def _loss_of_logits(name, logits, targets, shard):
    loss = _LOSSES[name]
    ids = _likeliest_ids(targets, shard, None) if name == "ce" else None
    return loss.function(_statistics_of_logits(loss.want, logits, targets, shard, ids))


def _statistics_of_logits(want, logits, targets, shard, labels=None) -> VocabStatistics:
    teacher = Teacher(targets) if want else None
    return vocab_statistics(logits, labels, shard=shard, want=want, teacher=teacher)


def _statistics(want, drafts, targets, shard, weight, target_weight) -> VocabStatistics:
    """Statistics whose labels are the target's likeliest ids."""
    ids = _likeliest_ids(targets, shard, target_weight)
    if weight is None:
        return _statistics_of_logits(want, drafts, targets, shard, ids)
    teacher = Teacher(targets) if target_weight is None else TeacherHead(targets, target_weight)
    return linear_vocab_statistics(drafts, weight, ids, shard=shard, want=want, teacher=teacher)


@torch.no_grad()
def _likeliest_ids(targets, shard, target_weight) -> torch.Tensor:
    options = {"shard": shard, "want": ("argmax",)}
    if target_weight is None:
        return vocab_statistics(targets, **options).argmax
    return linear_vocab_statistics(targets, target_weight, **options).argmax
