"""The specification: what is computed from a row of logits, how partial results merge, and what is differentiated.

One family per file, see `family` for the contract and `FAMILIES`. `Layout` alone numbers the rows of a call's buffers.

A *packet* is the partial result of one chunk of the vocabulary: some fp32 numbers per token. Packets of all ranks are
merged in float64, in vocabulary order, and results are rounded once (by the kernels twice: `topk_log_mass` and
`vocab_forward_kl` without a tail).
"""

from __future__ import annotations

import functools
import operator
from typing import Annotated

import torch

from ..spec import Instance, checked
from .argmax import ArgmaxFamily
from .at_ids import AtIdsFamily
from .collision import CollisionFamily
from .divergence import DivergenceFamily
from .entropy import EntropyFamily
from .family import Family, Wanted
from .family import MaybeNone as MaybeNone
from .rank import RankFamily
from .result import VocabStatistics
from .result import documented_fields as documented_fields
from .sets import SetsFamily
from .softmax import IGNORED as IGNORED
from .softmax import SoftmaxFamily
from .teacher import TeacherFamily
from .topk import TopKFamily
from .total import TotalFamily

SOFTMAX = SoftmaxFamily()
# Their order is the order of rows in packets and of additions to the gradient.
FAMILIES: tuple[Family, ...] = (
    SOFTMAX,
    EntropyFamily(),
    CollisionFamily(),
    TotalFamily(),
    ArgmaxFamily(),
    TeacherFamily(),
    DivergenceFamily(),
    TopKFamily(),
    SetsFamily(),
    AtIdsFamily(),
    RankFamily(),
)
FULL_TEACHER = (*TeacherFamily.statistics, *DivergenceFamily.statistics)  # statistics that need a `Teacher`
TOPK_TEACHER = TopKFamily.statistics  # statistics that need a `TopKTeacher`
OVER_SETS = SetsFamily.statistics  # statistics that need `IdSets`
AT_IDS = AtIdsFamily.statistics  # statistics that need ids


def known_statistics() -> tuple[str, ...]:
    """Every name that `want` may hold."""
    return tuple(name for family in FAMILIES for name in family.statistics)


@checked
def register_statistic(family: Annotated[Family, Instance(Family)]) -> None:
    """Make statistics of one's own known, as names for `want`, on logits and hidden states and with both backends.

    Their values are attributes of `VocabStatistics`. Ranks register the same families in the same order.

    Args:
        family: what is summed over the vocabulary, how sums merge and what is differentiated, in plain torch, and the
            same as device functions for Triton (`device`); `statistics.family` has the contract.

    Returns:
        None.

    Raises:
        TypeError: no `Family`.
        ValueError: a name that a statistic has already, or a family without methods that its rows need.

    Examples:
        >>> from energy_statistic import Energy  # examples/energy_statistic
        >>> register_statistic(Energy())
        >>> vocab_statistics(torch.tensor([[1.0, 2.0]]), want=("energy",)).energy
        tensor([5.])
    """
    global FAMILIES
    taken = {*known_statistics(), *VocabStatistics._fields}
    if not family.statistics or taken & set(family.statistics):
        raise ValueError(
            f"family must have statistics with names of their own, got {list(family.statistics)}, of which "
            f"{sorted(taken & set(family.statistics))} are taken: in one process, register a family once, and start "
            "another to change it"
        )
    own = {name for name in dir(Family) if getattr(type(family), name) is not getattr(Family, name)}
    gradient = {"coefficient", "direct", "scaled"}
    needed = ({"finish"}, True), ({"local"}, family.packet), (gradient, family.gradients)
    if missing := [" or ".join(sorted(names)) for names, used in needed if used and not own & names]:
        raise ValueError(f"family {type(family).__name__} must have methods of its own, got no {', no '.join(missing)}")
    FAMILIES += (family,)


class Layout:
    """The rows of one kind of call by name: packets, what the backward keeps, and what is reported."""

    def __init__(self, has_labels: bool, want: tuple[str, ...], families: tuple[Family, ...], n_ids: int = 0):
        call = Wanted(has_labels, want)
        self.families = tuple(family for family in families if family.wanted(call))
        student_sum = any(family.needs_student_sum(call) for family in self.families)
        self.call = call = call._replace(student_sum=student_sum)
        self.has_labels, self.want = has_labels, want
        second = [row for family in self.families for row in family.second_rows(call)]
        self.second = tuple(row for name in second for row in (name, f"{name}_mean"))
        self.needs_label_logits = any(family.needs_label_logits for family in self.families)
        self.packet = self._rows("packet_rows")
        self.merged = (*self._rows("merged_rows"), *self.second[1::2])
        self.values = (*self._rows("value_rows"), *self.second[::2])
        self.flags = {name: dtype for family in self.families for name, dtype in family.flags(call).items()}
        self.per_id = self._rows("per_id")  # of [N, K] ids each
        self.n_ids = n_ids if self.per_id else 0
        self.packet_height = len(self.packet) + self.n_ids  # the rows of the ids, which have no names, come last
        gradients = [name for family in self.families for name in family.gradients]
        self.gradients = tuple(name for name in gradients if name in self.values or name in self.per_id)
        self.outputs = (*self.values, *self.flags, *self.per_id)
        # target_logit's upstream gradient is lse's and log_prob's
        self.differentiable = frozenset((*self.gradients, "target_logit"))
        passing = [name for name in self.outputs if name in self.differentiable]
        others = [name for name in self.outputs if name not in self.differentiable and name != "owners"]
        self.reported = (*passing, *others), len(passing)  # fields of `VocabStatistics`, differentiable ones first
        self.fixed = tuple(i for i, name in enumerate(self.outputs) if name not in self.differentiable)
        known = {name: i for i, name in enumerate((*self.outputs, "labels", "vocab_size"))}
        self.registered = tuple(name for name in known if name not in (*VocabStatistics._fields, "owners"))
        # (*outputs, labels, vocab_size, None) -> the fields of `VocabStatistics`
        self.fields = operator.itemgetter(*(known.get(name, -1) for name in VocabStatistics._fields))

    def _rows(self, kind: str) -> tuple[str, ...]:
        return tuple(row for family in self.families for row in getattr(family, kind)(self.call))

    def empty_outputs(self, like: torch.Tensor, n_rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Uninitialised [merged rows [R, N], values [K, N], *flags [N], *statistics of ids [N, ids]]."""
        merged = like.new_empty((len(self.merged), n_rows), dtype=dtype)
        values = like.new_empty((len(self.values), n_rows), dtype=dtype)
        flags = [like.new_empty(n_rows, dtype=kind) for kind in self.flags.values()]
        return [merged, values, *flags, *(like.new_empty((n_rows, self.n_ids), dtype=dtype) for _ in self.per_id)]


def layout_of(has_labels: bool, want: tuple[str, ...], ids: torch.Tensor | None = None) -> Layout:
    """The layout of a call; ids: [N, K] whose log-probs are asked for. One object for equal arguments."""
    n_ids = 0 if ids is None else ids.shape[1]
    make = Layout if torch.compiler.is_compiling() else _layout  # torch.compile cannot trace a cached class
    return make(has_labels, want, FAMILIES, n_ids)


_layout = functools.lru_cache(maxsize=1024)(Layout)
