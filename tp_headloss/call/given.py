"""`Given`: the arguments of one call for statistics as one value, as the caller gave them, then this rank's part."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from ..arguments.id_sets import IdSets
from ..arguments.linear import Linear
from ..arguments.options import DEFAULTS, NO_TRANSFORM, Options, Transform
from ..arguments.teachers import Teacher, TeacherHead, TopKTeacher
from ..ranks.shard import VocabShard
from ..statistics import MaybeNone, VocabStatistics, known_statistics
from ..validation import expect_instance, expect_tensor
from .dtensor import local_head, local_logits, local_part


class Given(NamedTuple):
    """Arguments of one call. [..] is the shape of the tokens, width that of the shard."""

    logits: torch.Tensor | MaybeNone  # [.., width]; None: made of hidden states
    labels: torch.Tensor | None = None  # [..]
    shard: VocabShard | MaybeNone = None
    want: tuple[str, ...] = ()
    transform: Transform = NO_TRANSFORM
    teacher: Teacher | TopKTeacher | TeacherHead | None = None
    sets: IdSets | None = None
    ids: torch.Tensor | None = None  # [.., K]
    total_weight: torch.Tensor | None = None  # [width]
    ignore_index: int = -100
    options: Options = DEFAULTS
    hidden: torch.Tensor | MaybeNone = None  # [.., H], or this rank's [S/P, .., H]
    weight: torch.Tensor | MaybeNone = None  # [width, H]
    bias: torch.Tensor | None = None  # [width]
    linear: Linear | MaybeNone = None  # None: a call on logits

    @classmethod
    def checked(cls, logits, labels, shard, want, transform, options) -> Given:
        """Return the arguments with defaults in the place of None. Raises TypeError for options of another type."""
        for name, x, kind in (("options", options, Options), ("transform", transform, Transform)):
            expect_instance(name, x, kind)
        return cls(logits, labels, shard, _names(want), transform or NO_TRANSFORM, options=options or DEFAULTS)

    @property
    def tokens(self) -> Any:
        """The tensor that the tokens are of: logits or hidden states."""
        return self.logits if self.linear is None else self.hidden

    def local(self) -> Given:
        """Return this rank's plain part of the arguments, with the shard that they imply."""
        hidden_grad = "all_reduce" if self.linear is None else self.linear.hidden_grad
        logits, hidden, weight, bias, shard = self.logits, self.hidden, self.weight, self.bias, self.shard
        if self.linear is None:
            logits, shard = local_logits(logits, shard)
        else:
            hidden, weight, bias, shard = local_head(hidden, weight, bias, shard, hidden_grad)
            expect_tensor("hidden states", hidden)
        local = partial(local_part, shard=shard, hidden_grad=hidden_grad, tokens=self.tokens)
        total_weight = local_part(self.total_weight, shard, name="total_weight", sharded=0)
        return Given(
            logits, local(self.labels), shard, self.want, local(self.transform), local(self.teacher), local(self.sets),
            local(self.ids), total_weight, self.ignore_index, self.options, hidden, weight, bias,
            local_part(self.linear, shard),
        )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """Arguments that ranks must agree on, by the names that `Agreement` reports."""
        return {name: x for name, x in self._asdict().items() if name != "shard" and x is not None}


def _names(want) -> tuple[str, ...]:
    """Names of statistics as a tuple. Raises TypeError or ValueError for what `VocabStatistics` cannot hold."""
    if isinstance(want, str):
        raise ValueError(f"want must be of {known_statistics()} in a tuple, such as ('entropy',), got {want!r}")
    if not hasattr(want, "__iter__"):
        raise TypeError(f"want must be a tuple of names, () for none, got {want!r}")
    want = tuple(want)
    if without := [name for name in want if name in known_statistics() and name not in VocabStatistics._fields]:
        raise ValueError(f"VocabStatistics needs a field for each statistic in want, and has none for {without}")
    return want
