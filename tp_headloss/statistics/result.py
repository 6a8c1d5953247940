"""The statistics of a call, as callers get them."""

from __future__ import annotations

import difflib
from typing import NamedTuple

import torch

from .family import MaybeNone
from .fields import Results, documented_fields

# what to write for the names of metrics
OF_METRICS = {
    "accuracy": "with want=('argmax',) they have .correct",
    "perplexity": "HeadLoss(metrics='perplexity') has it in out.means()",
}
OF_LABELS = {"log_prob", "target_logit", "labels", "valid"}  # statistics that labels bring


def without_arithmetic(results: type[Results]) -> type[Results]:
    """Have arithmetic of a NamedTuple, of which + and * are a tuple's, and float() of it, say that one
    of its fields is meant."""

    def refuse(self, *_others):
        raise TypeError(
            f"{results.__name__} are several tensors, got arithmetic of all of them: write it of "
            f"one, such as .{results._fields[0]}"  # type: ignore[attr-defined] # pyright: ignore
        )

    names = "add", "radd", "mul", "rmul", "sub", "rsub", "truediv", "rtruediv", "neg", "float"
    for name in names:
        setattr(results, f"__{name}__", refuse)
    return results


class MissingStatistics(ValueError):
    """A loss needs statistics that nothing asked for."""


@without_arithmetic
@documented_fields
class VocabStatistics(NamedTuple):
    """Per-token statistics of the whole vocabulary: fp32, the logits' leading shape, equal bits on
    every rank.

    Fields that were not asked for are None, and those of a label (log_prob, target_logit, labels,
    valid, rank) in a call without labels; a registered statistic that was not asked for is an
    AttributeError. An ignored token has 0 everywhere (argmax -1) and zero
    gradient; a token with a bad label, or whose logits hold +inf or NaN or nothing above -inf, has
    NaN everywhere (argmax -1).

    Attributes:
        lse: log sum exp z.
        log_prob: z_y - lse, never above 0.
        target_logit: z_y.
        entropy: -sum p log p, nats.
        total: sum of z (of w z if weighted) over columns above -inf.
        argmax: int64 vocabulary id, the lowest on ties; not differentiable.
        mass: with total, the number (weighted: sum of w) of columns above -inf; not differentiable.
        labels: this rank's plain labels, the ignore_index among them: a table of ids is read at
            labels.clamp(min=0). A `HeadLoss` ignores tokens of weight 0, too: their label is then
            the ignore_index (unless the weights require a gradient).
        valid: bool, the label is not the ignore_index.
        hits: bool, see `correct`.
        forward_kl: KL(teacher || student), nats, at the temperatures of the `Teacher`.
        reverse_kl: KL(student || teacher).
        teacher_entropy: -sum q log q; not differentiable. forward_kl + teacher_entropy is the soft
            cross-entropy.
        jsd: beta KL(teacher || m) + (1 - beta) KL(student || m), m their mixture.
        total_variation: sum of abs(student - teacher) / 2.
        overlap: sum of min(student, teacher), which is 1 - total_variation with its own digits near
            0: the probability that a token drawn from the student is accepted for the teacher.
        teacher_mass: probability of a top-K teacher's entries; not differentiable.
        topk_forward_kl: over its entries, where the student is normalised: see `statistics.topk`.
        vocab_forward_kl: the same, the student normalised over the vocabulary.
        topk_reverse_kl: as topk_forward_kl.
        topk_log_mass: log of the student's probability of the entries.
        tail_log_mass: log of the student's probability of everything else, summed directly.
        tail_entropy: entropy of the student renormalised over everything else.
        topk_jsd: over the entries, where the student is normalised.
        vocab_jsd: the entries' terms of the JSD, the student normalised over the vocabulary.
        set_log_prob: log p of the label, renormalised over the token's set (`IdSets`); never above
            0.
        set_entropy: entropy of p renormalised over the set.
        set_log_mass: log of the probability of the set.
        log_probs_at: [.., K] log p of each of the token's given ids; 0 where it is none. Rounded as
            z - lse is: 0 above -6e-8 (see `vocab_statistics` for what is accurate there).
        rank: of the label in the vocabulary, 1 for the likeliest id, the lower id first on ties;
            not differentiable.
        collision: sum p^2, the probability that two draws agree.
        vocab_size: V, a number.
        registered: by name, the statistics of `register_statistic`, which are attributes, too.

    Examples:
        >>> stats = vocab_statistics(
        ...     torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), want=("argmax",)
        ... )
        >>> stats.target_logit, stats.argmax, stats.correct, stats.entropy
        (tensor([2.]), tensor([0]), tensor([True]), None)
    """

    lse: torch.Tensor
    log_prob: torch.Tensor | MaybeNone
    target_logit: torch.Tensor | MaybeNone
    entropy: torch.Tensor | MaybeNone
    total: torch.Tensor | MaybeNone
    argmax: torch.Tensor | MaybeNone
    mass: torch.Tensor | MaybeNone
    labels: torch.Tensor | MaybeNone
    valid: torch.Tensor | MaybeNone
    hits: torch.Tensor | MaybeNone
    forward_kl: torch.Tensor | MaybeNone
    reverse_kl: torch.Tensor | MaybeNone
    teacher_entropy: torch.Tensor | MaybeNone
    jsd: torch.Tensor | MaybeNone
    total_variation: torch.Tensor | MaybeNone
    overlap: torch.Tensor | MaybeNone
    teacher_mass: torch.Tensor | MaybeNone
    topk_forward_kl: torch.Tensor | MaybeNone
    vocab_forward_kl: torch.Tensor | MaybeNone
    topk_reverse_kl: torch.Tensor | MaybeNone
    topk_log_mass: torch.Tensor | MaybeNone
    tail_log_mass: torch.Tensor | MaybeNone
    tail_entropy: torch.Tensor | MaybeNone
    topk_jsd: torch.Tensor | MaybeNone
    vocab_jsd: torch.Tensor | MaybeNone
    set_log_prob: torch.Tensor | MaybeNone
    set_entropy: torch.Tensor | MaybeNone
    set_log_mass: torch.Tensor | MaybeNone
    log_probs_at: torch.Tensor | MaybeNone
    rank: torch.Tensor | MaybeNone
    collision: torch.Tensor | MaybeNone
    vocab_size: int
    registered: dict[str, torch.Tensor] | MaybeNone = None

    def __getattr__(self, name: str) -> torch.Tensor:
        # torch.compile looks at one without fields
        registered = self.registered if len(self) else None
        if isinstance(registered, dict) and name in registered:
            return registered[name]
        said = OF_METRICS.get(name) or self._without_field(name)
        if close := difflib.get_close_matches(name, self._fields, 1, 0.8):
            said = f"did you mean .{close[0]}?"
        elif hasattr(torch.Tensor, name):
            said = f"they are several tensors, write it of one, such as .lse.{name}"
        raise AttributeError(f"VocabStatistics have no {name!r}: {said}")

    def _without_field(self, name: str) -> str:
        """Return what to write for a name that no field has: one of a registered statistic, or of
        none."""
        from . import UNHEARD, known_statistics  # which need this module

        if name in known_statistics():
            return f"a registered statistic needs want=({name!r},)"
        # by place, because an error watches what is read by name
        there = [f".{field}" for field, x in zip(self._fields, tuple(self)) if x is not None]
        return f"these have {', '.join(there)}, and others by want=(..){UNHEARD}"

    def updated(self, values: dict) -> VocabStatistics:
        """Return a copy of the statistics with those of `values` in the place of theirs, by
        name."""
        own = {name: x for name, x in values.items() if name not in self._fields}
        new = self._replace(**{name: x for name, x in values.items() if name not in own})
        return new._replace(registered={**(self.registered or {}), **own}) if own else new

    def expect(self, owner: str, names: tuple[str, ...]):
        """Raise MissingStatistics, with what to write, if one of these statistics is None."""
        missing = [name for name in names if getattr(self, name) is None]
        if not missing:
            return
        remedy = f"give want={tuple(missing)}, those of a HeadLoss by its terms and metrics"
        if {*missing} & OF_LABELS:
            remedy = "give labels"
        elif "teacher_mass" in missing:
            remedy = "give a TopKTeacher, and a statistic of it in want"
        said = f"{owner} must have the statistics {missing}, got None for them: {remedy}"
        raise MissingStatistics(said)

    @property
    def tokens_like(self) -> torch.Tensor:
        """A tensor of the tokens' shape [..] and device."""
        return self.lse

    @property
    def correct(self) -> torch.Tensor:
        """bool: the label is the argmax (False where ignored)."""
        if self.hits is None:
            missing = [name for name in ("argmax", "labels") if getattr(self, name) is None]
            raise ValueError(
                f'`correct` needs labels and want=("argmax",), got no {" and no ".join(missing)}'
            )
        return self.hits
