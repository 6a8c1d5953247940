"""Heads for verl's engine, on logits or on hidden states: statistics of tokens [b, s], and the
student's top-K ids."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...arguments.options import Options, Transform
from ...call.statistics import vocab_statistics
from ...linear_head import Linear, linear_vocab_statistics
from ...ranks.shard import VocabShard
from ...search.topk import topk_log_probs
from ...statistics import VocabStatistics
from ..megatron.layer import layer_shard, linear_options, logits_transform, refuse_options
from ..token_counts import agreed_count
from .functions import IGNORED_LABEL


@dataclass
class LogitsHead:
    """A head on this rank's columns of the logits.

    Args:
        logits: [b, s, v/P] sharded on V.
        shard, options: as in `vocab_statistics`.
        temperature: [b, s] replicated.
    """

    logits: torch.Tensor
    shard: VocabShard
    temperature: torch.Tensor
    options: Options | None

    def statistics(
        self, labels, want: tuple[str, ...], ids, valid_only=False
    ) -> dict[str, torch.Tensor]:
        """Return log_prob (with labels [b, s]) and the statistics in `want`, [b, s] fp32 replicated
        and differentiable; log_probs_at, [b, s, K], is at the ids [b, s, K] int64. valid_only:
        tokens whose label is -100 may be left out."""
        stats = vocab_statistics(self.logits, labels, want=want, ids=ids, **self._common)
        return _named(stats, labels, want)

    def topk_ids(self, k: int) -> torch.Tensor:
        """Return the k likeliest ids [b, s, k] int64, replicated."""
        return topk_log_probs(self.logits, k, **self._common).ids

    @property
    def _common(self):
        transform = Transform(temperature=self.temperature)
        return {"shard": self.shard, "transform": transform, "options": self.options}


class HiddenHead:
    """A head on the hidden states and the weight of an output layer, whose logits are never there
    as a whole.

    Args:
        hidden: [s, b, h] replicated, or [s/P, b, h] under sequence parallelism.
        weight: [v/P, h] sharded on V; None: the layer's own.
        model: Megatron's GPTModel, with the output layer and its config.
        temperature: [b, s] replicated.
        vocab_size, linear, options: as in `install`.
    """

    def __init__(
        self,
        hidden,
        weight,
        model,
        temperature,
        vocab_size,
        linear: Linear,
        options: Options | None,
    ):
        layer = model.output_layer
        refuse_options(model.config, layer)
        self.hidden, self.weight = hidden, layer.weight if weight is None else weight
        self.bias = None if layer.skip_bias_add else layer.bias
        self.group, self.sequence_parallel = layer.tp_group, layer.sequence_parallel
        # no logits to overwrite
        self.options = None if options is None else replace(options, inplace=False)
        self.shard = layer_shard(layer.tp_group, self.weight.shape[0], vocab_size)
        self.linear = linear_options(linear, layer, self.weight, "recompute")
        self.transform = logits_transform(model.config, temperature.transpose(0, 1))

    def statistics(
        self, labels, want: tuple[str, ...], ids, valid_only=False
    ) -> dict[str, torch.Tensor]:
        """Return what `LogitsHead.statistics` returns."""
        labels, ids = (None if x is None else x.transpose(0, 1) for x in (labels, ids))
        hidden, linear = self.hidden, self.linear
        if valid_only:
            if self.sequence_parallel:  # whose backward sums and scatters dH
                hidden, linear = self._gathered(hidden), replace(linear, hidden_grad="none")
            linear = replace(
                linear, max_valid_tokens=agreed_count(labels, IGNORED_LABEL, self.shard)
            )
        stats = linear_vocab_statistics(
            hidden,
            self.weight,
            labels,
            bias=self.bias,
            shard=self.shard,
            want=want,
            transform=self.transform,
            ids=ids,
            options=self.options,
            linear=linear,
        )
        return {name: x.transpose(0, 1) for name, x in _named(stats, labels, want).items()}

    def topk_ids(self, k: int) -> torch.Tensor:
        """Return what `LogitsHead.topk_ids` returns."""
        hidden, transform = self.hidden.detach(), replace(self.transform, bias=self.bias)
        if self.sequence_parallel:
            hidden = self._gathered(hidden)
        top = topk_log_probs(
            hidden,
            k,
            weight=self.weight,
            shard=self.shard,
            transform=transform,
            options=self.options,
        )
        return top.ids.transpose(0, 1)

    def _gathered(self, hidden: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        return gather_from_sequence_parallel_region(hidden, group=self.group)


def _named(stats: VocabStatistics, labels, want: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {
        name: getattr(stats, name) for name in (*want, *(() if labels is None else ("log_prob",)))
    }


def topk_distillation(
    log_probs_at, teacher_log_probs, teacher_ids, student_ids, lowest
) -> dict[str, torch.Tensor]:
    """Return what verl's `compute_forward_kl_topk` returns for each token [b, s]: forward KL over
    the teacher's K ids, both masses, and how many of the ids are among the student's K likeliest,
    with their mean -KL.

    The KL alone is differentiable. Ids below 0 are none.

    Args:
        log_probs_at: [b, s, K] log-probs of the student at the teacher's ids, differentiable.
        teacher_log_probs, teacher_ids: [b, s, K] replicated.
        student_ids: [b, s, K].
        lowest: verl's ``log_prob_min_clamp``, below which no log-prob counts and the student's get
            no gradient, or None.
    """
    student, teacher = log_probs_at, teacher_log_probs.float()
    if lowest is not None:
        student, teacher = student.clamp_min(lowest), teacher.clamp_min(lowest)
    known = teacher_ids >= 0
    mass = teacher.exp()
    kl = torch.where(known, mass * (teacher - student), 0.0)
    overlap = (teacher_ids.unsqueeze(-1) == student_ids.unsqueeze(-2)).any(-1)
    count = overlap.sum(-1)
    return {
        "distillation_losses": kl.sum(-1),
        "student_mass": torch.where(known, student.detach().exp(), 0.0).sum(-1),
        "teacher_mass": mass.sum(-1),
        "overlap_count": count,
        "overlap_token_advantage": (-kl.detach() * overlap).sum(-1) / count.clamp(min=1),
    }
