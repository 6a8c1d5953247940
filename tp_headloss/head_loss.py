"""HeadLoss: weighted terms, one pass over the logits, one denominator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from . import losses
from .api import Options, Transform, resolve_shard, run_statistics
from .autograd import TokenSums, runs_here
from .backends import resolve_backend
from .reduce import REDUCTIONS, Monomial, Reduction, SumsPlan, masked, nonzero
from .shard import VocabShard
from .stats import VocabStatistics

METRICS: dict[str, tuple[Callable[[VocabStatistics], torch.Tensor], tuple[str, ...]]] = {
    "accuracy": (Monomial("hits"), ("argmax",)),
    "entropy": (Monomial("entropy"), ("entropy",)),
    "log_prob": (Monomial("log_prob"), ()),
    "lse": (Monomial("lse"), ()),
}


# What a `Monomial` may be of -> the optional statistic that brings it.
MONOMIALS = {
    "lse": "", "log_prob": "", "target_logit": "", "entropy": "entropy", "total": "total", "mass": "total",
    "hits": "argmax",
}  # fmt: skip


@dataclass(frozen=True)
class Term:
    """A weighted per-token loss: ``function(stats) -> [..] fp32``, and the optional statistics that it needs.

    A `reduce.Monomial` as the function, such as ``Monomial("lse", square=True)``, needs no kernels of its own.

    ``token_weight(stats) -> [..]``, if given, is what this term's mean divides by the sum of (class weights).
    """

    name: str
    function: Callable[[VocabStatistics], torch.Tensor]
    weight: float = 1.0
    want: tuple[str, ...] = ()
    token_weight: Callable[[VocabStatistics], torch.Tensor] | None = None
    class_weight: torch.Tensor | None = None  # [V] replicated: the weights of the statistic "total"


def CrossEntropy(
    weight: float = 1.0,
    label_smoothing: float = 0.0,
    smoothing_formula: str = "torch",
    class_weight: torch.Tensor | None = None,
) -> Term:
    """Cross-entropy as torch.nn.functional.cross_entropy computes it; formulas in `losses.smoothed_cross_entropy`.

    class_weight: [V] fp32, replicated; the mean then divides by the sum of the labels' weights, as in torch.
    """
    if smoothing_formula not in ("torch", "megatron"):
        raise ValueError(f"smoothing_formula must be 'torch' or 'megatron', got {smoothing_formula!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")

    class_weight = None if class_weight is None else class_weight.detach().float()

    def token_weight(stats):
        return losses.label_weight(stats, class_weight)

    def function(stats):
        if label_smoothing:
            return losses.smoothed_cross_entropy(stats, label_smoothing, smoothing_formula, class_weight)
        return token_weight(stats) * losses.cross_entropy(stats)

    if not label_smoothing and class_weight is None:
        return Term("cross_entropy", Monomial("log_prob", negative=True), weight)
    want = ("total",) if label_smoothing else ()
    weighted = class_weight is not None
    return Term("cross_entropy", function, weight, want, token_weight if weighted else None, class_weight)


def ZLoss(weight: float) -> Term:
    """weight * lse^2."""
    return Term("z_loss", Monomial("lse", square=True), weight)


def Entropy(weight: float) -> Term:
    """An entropy bonus: weight * -entropy, with its gradient."""
    return Term("entropy", Monomial("entropy", negative=True), weight, ("entropy",))


class HeadLossOutput(NamedTuple):
    """What one call returns; everything is replicated over the group and nothing was synchronised with the host."""

    loss: torch.Tensor  # scalar fp32, or [..] for reduction="none"
    count: torch.Tensor  # scalar: number of valid tokens (sum of their weights if token weights were given)
    # sums over valid tokens, times the token weights if given, detached; divide by the count for a mean
    terms: dict[str, torch.Tensor]  # per term, without the term's weight
    metrics: dict[str, torch.Tensor]  # per metric
    stats: VocabStatistics


class HeadLoss(nn.Module):
    """Weighted terms over one set of statistics: one pass over the logits, one collective, one backward kernel.

        head_loss = HeadLoss([CrossEntropy(label_smoothing=0.1), ZLoss(1e-4)], metrics=("accuracy", "entropy"))
        out = head_loss(logits, labels, shard=shard, denominator=tokens_in_the_global_batch)
        out.loss.backward()

    reduction: "mean" divides every term by the number of valid tokens (by the sum of the token weights, and of the
    labels' class weights, where there are any), "sum" by nothing, "none" returns the per-token loss. The caller's
    ``denominator`` wins over "mean". Zero valid tokens, or a zero denominator, give 0 and zero gradient.
    """

    def __init__(
        self,
        terms: Sequence[Term] | None = None,
        *,
        metrics: Sequence[str] = (),
        reduction: str = "mean",
        ignore_index: int = -100,
        options: Options | None = None,
    ):
        super().__init__()
        self.terms = tuple([CrossEntropy()] if terms is None else terms)
        names = [term.name for term in self.terms]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"terms must be at least one, with distinct names, got {names}")
        if unknown := set(metrics) - set(METRICS):
            raise ValueError(f"metrics must be of {sorted(METRICS)}, got {sorted(unknown)}")
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
        weighted = [t.class_weight for t in self.terms if t.class_weight is not None and "total" in t.want]
        if weighted and sum("total" in term.want for term in self.terms) > 1:
            raise ValueError("class weights with smoothing weight the statistic 'total': only one term can use it")
        self.total_weight = weighted[0] if weighted else None
        self.metrics, self.reduction, self.ignore_index, self.options = tuple(metrics), reduction, ignore_index, options
        functions = [term.function for term in self.terms] + [METRICS[name][0] for name in self.metrics]
        named = set(SumsPlan.of(functions, []).statistics) - {""}
        if unknown := named - set(MONOMIALS):
            raise ValueError(f"a Monomial must be of one of {sorted(MONOMIALS)}, got {sorted(unknown)}")
        wanted = {name for t in self.terms for name in t.want} | {n for m in metrics for n in METRICS[m][1]}
        self.want = tuple(wanted | {MONOMIALS[name] for name in named} - {""})

    def forward(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        *,
        shard: VocabShard | None = None,
        token_weight: torch.Tensor | None = None,
        denominator: torch.Tensor | float | None = None,
        transform: Transform | None = None,
    ) -> HeadLossOutput:
        """logits [.., width] sharded on V, labels [..] replicated -> `HeadLossOutput`, replicated.

        token_weight: [..], multiplies every term (a loss mask of zeros and ones, say); the mean divides by their sum,
        so weights of both signs (advantages) want a denominator of their own. denominator: the caller's,
        a number or a scalar tensor; with gradient accumulation or data parallelism, the global token count.
        One collective forward; backward: no communication. Errors as in `vocab_statistics`.
        """
        if labels is None:
            raise ValueError("labels are needed, got None: without them, use vocab_statistics")
        if token_weight is not None and token_weight.shape != labels.shape:
            raise ValueError(f"token_weight must have shape {list(labels.shape)}, got {list(token_weight.shape)}")
        if denominator is not None and self.reduction != "mean":
            raise ValueError(f"a denominator goes with reduction='mean', got {self.reduction!r}")
        shard = resolve_shard(logits, shard)
        for weight in (term.class_weight for term in self.terms if term.class_weight is not None):
            if weight.shape != (shard.vocab_size,) or weight.device != logits.device:
                raise ValueError(
                    f"class_weight must have shape [{shard.vocab_size}] on {logits.device}, "
                    f"got {list(weight.shape)} on {weight.device}"
                )
        reduction = self._reduction(logits, token_weight, denominator)
        given = reduction if reduction is not None and "" not in reduction.plan.statistics else None
        stats, loss, sums = run_statistics(
            logits,
            labels,
            shard,
            self.want,
            transform,
            self._local_total_weight(shard),
            self.ignore_index,
            self.options,
            given,
        )
        if given is None and reduction is not None:  # values of other functions are summed apart
            loss, sums = self._sum(stats, reduction)
        if loss is None:
            return self._reduce(stats, token_weight, denominator)
        *sums, count = sums.unbind(0)
        terms = {term.name: total for term, total in zip(self.terms, sums)}
        return HeadLossOutput(loss, count, terms, dict(zip(self.metrics, sums[len(terms) :])), stats)

    def _reduction(self, logits, weight, denominator) -> Reduction | None:
        """Masks, weights and sums in one kernel; None where plain torch is needed, see `_reduce`."""
        device = logits.device
        given = [x for x in (weight, denominator) if isinstance(x, torch.Tensor)]
        if (
            self.reduction == "none"
            or not runs_here(logits)
            or resolve_backend(self.options and self.options.backend, device) != "triton"
            or any(term.token_weight is not None or isinstance(term.weight, torch.Tensor) for term in self.terms)
            or any(x.requires_grad or x.device != device for x in given)
            or (isinstance(denominator, torch.Tensor) and denominator.dim() != 0)
        ):
            return None
        if self.reduction == "sum":
            denominator = 1.0
        elif isinstance(denominator, torch.Tensor):
            denominator = denominator.float()
        functions = [term.function for term in self.terms] + [METRICS[name][0] for name in self.metrics]
        return Reduction(SumsPlan.of(functions, [float(t.weight) for t in self.terms]), weight, denominator)

    def _sum(self, stats, reduction):
        """-> loss and sums, or None and None if a term's values are no fp32 numbers per token."""
        functions = [term.function for term in self.terms] + [METRICS[name][0] for name in self.metrics]
        values = [getattr(stats, f.statistic) if isinstance(f, Monomial) else f(stats) for f in functions]
        kinds = (torch.float32, torch.bool)
        if not all(isinstance(v, torch.Tensor) and v.shape == stats.lse.shape and v.dtype in kinds for v in values):
            return None, None
        if reduction.weight is not None:
            reduction = reduction._replace(weight=reduction.weight.float().contiguous())
        return TokenSums.apply(reduction, stats.valid.contiguous(), *(value.contiguous() for value in values))

    def _reduce(self, stats, token_weight, denominator):
        """The definition, in plain torch."""
        values = [masked(term.function(stats), stats.valid, token_weight) for term in self.terms]
        metrics = [masked(METRICS[name][0](stats).detach(), stats.valid, token_weight).sum() for name in self.metrics]
        sums = [value.sum() for value in values]
        weights = stats.valid if token_weight is None else masked(token_weight, stats.valid)
        count = weights.sum(dtype=torch.float32)
        if self.reduction == "none":
            parts = values
        elif self.reduction == "sum":
            parts = sums
        else:
            parts = [
                total / self._denominator(term, stats, token_weight, count, denominator)
                for term, total in zip(self.terms, sums)
            ]
        parts = [part if term.weight == 1 else term.weight * part for term, part in zip(self.terms, parts)]
        terms = {term.name: total.detach() for term, total in zip(self.terms, sums)}
        return HeadLossOutput(sum(parts[1:], start=parts[0]), count, terms, dict(zip(self.metrics, metrics)), stats)

    def _denominator(self, term, stats, token_weight, count, denominator):
        if denominator is not None:
            return nonzero(denominator)
        if term.token_weight is not None:
            return nonzero(masked(term.token_weight(stats), stats.valid, token_weight).sum())
        return count.clamp(min=1) if token_weight is None else nonzero(count)  # of 0 tokens the sum is 0 anyway

    def _local_total_weight(self, shard):
        if self.total_weight is None:
            return None
        local = self.total_weight[shard.start : shard.stop]
        return torch.nn.functional.pad(local, (0, shard.width - local.shape[0]))


class CausalLMLoss(nn.Module):
    """A HeadLoss for logits and *unshifted* labels [B, S]: position t is scored against label t + 1, the last ignored.

    The labels are shifted, not the logits, so the logits are neither sliced nor copied. Packed documents: put
    ``ignore_index`` on each document's first label.
    """

    def __init__(self, head_loss: HeadLoss | None = None):
        super().__init__()
        self.head_loss = HeadLoss() if head_loss is None else head_loss

    def forward(self, logits, labels, *, token_weight: torch.Tensor | None = None, **kwargs) -> HeadLossOutput:
        """logits [.., S, width] sharded on V; labels and token_weight [.., S], both unshifted: a weight belongs to its
        label. Other keywords as in `HeadLoss.forward`; a per-token temperature belongs to its logits."""
        last = torch.full_like(labels[..., :1], self.head_loss.ignore_index)
        if token_weight is not None:
            token_weight = torch.cat([token_weight[..., 1:], torch.zeros_like(token_weight[..., :1])], -1)
        return self.head_loss(logits, torch.cat([labels[..., 1:], last], -1), token_weight=token_weight, **kwargs)
