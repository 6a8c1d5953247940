"""Tokens that are dropped before the GEMMs because their labels are ignored (`Linear.max_valid_tokens`)."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from ..arguments.id_sets import IdSets
from ..arguments.options import Transform
from ..arguments.teachers import Teacher, TeacherHead, TopKTeacher
from ..statistics import VocabStatistics
from ..validation import expect_ids, expect_ignore_index


def check_range(labels: torch.Tensor, ignore_index: int, vocab_size: int):
    """Raise ValueError, with the first of them, if there are labels that are neither ignored nor ids."""
    bad = ((labels != ignore_index) & ((labels < 0) | (labels >= vocab_size))).flatten().nonzero()
    if len(bad):
        token = int(bad[0])
        raise ValueError(
            f"label of token {token} (flat index) must be the ignore_index or in [0, {vocab_size}), got "
            f"{int(labels.flatten()[token])}; {len(bad)} such tokens"
        )


def map_teacher_tensors(teacher, function):
    """Return the teacher with each tensor of tokens replaced by function(tensor, name)."""
    tensors = {f.name: x for f in fields(teacher) if isinstance(x := getattr(teacher, f.name), torch.Tensor)}
    if isinstance(teacher, TeacherHead):
        tensors = {name: x for name, x in tensors.items() if name not in ("weight", "bias")}
    return replace(teacher, **{name: function(x, f"teacher.{name}") for name, x in tensors.items()})


class ValidTokens:
    """Selection of the tokens that are not ignored, at most `count` of them, in their order; then ignored ones."""

    def __init__(self, labels: torch.Tensor | None, ignore_index: int, count: int, options, vocab_size: int):
        if labels is None:
            raise ValueError("max_valid_tokens drops tokens by their labels, got none")
        expect_ids("labels", labels)
        ignore_index = expect_ignore_index(ignore_index)
        if options is not None and options.check:  # here, where a token's place is known
            check_range(labels, ignore_index, vocab_size)
        self.lead, valid = labels.shape, (labels != ignore_index).reshape(-1)
        self.valid = valid
        self.order = torch.sort((~valid).to(torch.uint8), stable=True).indices[:count]
        self.missing = valid.sum() > count  # tokens that should have been picked

    def __call__(self, x, name: str):
        """Select from a per-token tensor: [.., *] -> [count, *]. Anything but a tensor is returned."""
        if not isinstance(x, torch.Tensor):
            return x
        if x.shape[: len(self.lead)] != self.lead:
            raise ValueError(f"{name} must begin with the labels' shape {list(self.lead)}, got {list(x.shape)}")
        return x.reshape(self.lead.numel(), *x.shape[len(self.lead) :]).index_select(0, self.order)

    def transform(self, transform: Transform | None) -> Transform | None:
        """Select from a per-token temperature."""
        return transform and replace(transform, temperature=self(transform.temperature, "temperature"))

    def teacher(self, teacher):
        """Select from the tensors of a top-K teacher or a head. ValueError for a `Teacher`; others are returned."""
        if isinstance(teacher, Teacher):
            raise ValueError("max_valid_tokens would copy the teacher's logits, got a Teacher: drop the tokens before")
        known = isinstance(teacher, (TopKTeacher, TeacherHead))
        return map_teacher_tensors(teacher, self) if known else teacher

    def sets(self, sets):
        """Select the sets of the valid tokens. Anything but `IdSets` is returned."""
        return sets.map_tokens(self.lead, lambda x: self(x, "sets")) if isinstance(sets, IdSets) else sets

    def spread_one(self, x: torch.Tensor, ignored, missing) -> torch.Tensor:
        """Spread a selected tensor over all tokens: [count, *] -> [.., *], others are `ignored` or `missing`."""
        rest = torch.full_like(self.valid, ignored, dtype=x.dtype)
        rest = rest.masked_fill(self.valid, missing)
        if x.dim() > 1:  # [count, K]
            rest = rest[:, None].repeat(1, x.shape[1])
        return rest.index_copy(0, self.order, x).view((*self.lead, *x.shape[1:]))

    def spread(self, stats: VocabStatistics, labels: torch.Tensor | None) -> VocabStatistics:
        """Spread statistics over all tokens: 0 at ignored ones, NaN at valid ones beyond `count`."""
        out: dict[str, Any] = {}
        for name, x in stats._asdict().items():
            if isinstance(x, torch.Tensor) and name != "labels":
                fill = (0.0, torch.nan) if x.is_floating_point() else (-1, -1) if name == "argmax" else (False, False)
                out[name] = self.spread_one(x, *fill)
        return stats._replace(**out | {"labels": labels, "valid": self.valid.view(self.lead)})
