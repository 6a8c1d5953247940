"""The statistics of a call, as callers get them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class VocabStatistics(NamedTuple):
    """Per-token statistics of the whole vocabulary: fp32, the logits' leading shape, equal bits on every rank.

    Fields that were not asked for are None. An ignored token has 0 everywhere (argmax -1) and zero gradient; a token
    with a bad label, or whose logits hold +inf or NaN or nothing above -inf, has NaN everywhere (argmax -1).
    """

    lse: torch.Tensor  # log sum exp z
    log_prob: torch.Tensor | None  # z_y - lse, never above 0
    target_logit: torch.Tensor | None  # z_y
    entropy: torch.Tensor | None  # -sum p log p, nats
    total: torch.Tensor | None  # sum of z (of w z if weighted) over columns above -inf
    argmax: torch.Tensor | None  # int64 vocabulary id, lowest on ties; not differentiable
    mass: torch.Tensor | None  # with total: number (weighted: sum of w) of columns above -inf; not differentiable
    labels: torch.Tensor | None
    valid: torch.Tensor | None  # bool: label is not ignore_index
    hits: torch.Tensor | None  # bool: see `correct`
    forward_kl: torch.Tensor | None  # KL(teacher || student), nats, at the temperatures of the `Teacher`
    reverse_kl: torch.Tensor | None  # KL(student || teacher)
    teacher_entropy: torch.Tensor | None  # -sum q log q; not differentiable. forward_kl + it: soft cross-entropy
    jsd: torch.Tensor | None  # beta KL(teacher || m) + (1 - beta) KL(student || m), m their mixture
    total_variation: torch.Tensor | None  # sum of abs(student - teacher) / 2
    teacher_mass: torch.Tensor | None  # probability of a top-K teacher's entries; not differentiable
    topk_forward_kl: torch.Tensor | None  # over its entries, where the student is normalised: see `statistics.topk`
    topk_reverse_kl: torch.Tensor | None
    topk_log_mass: torch.Tensor | None  # log of the student's probability of the entries
    tail_log_mass: torch.Tensor | None  # log of the student's probability of everything else, summed directly
    tail_entropy: torch.Tensor | None  # entropy of the student over everything else
    topk_jsd: torch.Tensor | None  # over the entries, where the student is normalised
    vocab_jsd: torch.Tensor | None  # the entries' part, the student normalised over the vocabulary
    collision: torch.Tensor | None  # sum p^2, the probability that two draws agree
    vocab_size: int

    @property
    def correct(self) -> torch.Tensor:
        """bool: the label is the argmax (False where ignored)."""
        if self.hits is None:
            missing = [name for name in ("argmax", "labels") if getattr(self, name) is None]
            raise ValueError(f'`correct` needs labels and want=("argmax",), got no {" and no ".join(missing)}')
        return self.hits
