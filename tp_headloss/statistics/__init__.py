"""The specification: what is computed from a row of logits, how partial results merge, and what is
differentiated.

One family per file, see `family` for the contract and `FAMILIES`. `Layout` alone numbers the rows
of a call's buffers.

A *packet* is the partial result of one chunk of the vocabulary: some fp32 numbers per token.
Packets of all ranks are merged in float64, in vocabulary order, and results are rounded once (by
the kernels twice: `topk_log_mass` and `vocab_forward_kl` without a tail).
"""

from __future__ import annotations

import functools
import operator

import torch

from .argmax import ArgmaxFamily
from .at_ids import AtIdsFamily
from .collision import CollisionFamily
from .divergence import DivergenceFamily
from .entropy import EntropyFamily
from .family import Family, Wanted
from .family import MaybeNone as MaybeNone
from .fields import documented_fields as documented_fields
from .rank import RankFamily
from .result import MissingStatistics as MissingStatistics
from .result import VocabStatistics
from .result import without_arithmetic as without_arithmetic
from .sets import SetsFamily
from .softmax import IGNORED as IGNORED
from .softmax import SoftmaxFamily
from .teacher import TeacherFamily
from .topk import TopKFamily
from .total import TotalFamily

SOFTMAX = SoftmaxFamily()
# Their order is the order of rows in packets and of additions to the gradient.
BUILT_IN: tuple[Family, ...] = (
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
FAMILIES = BUILT_IN  # and those of `register_statistic`, as long as the process lives
# statistics that need a `Teacher`
FULL_TEACHER = (*TeacherFamily.statistics, *DivergenceFamily.statistics)
TOPK_TEACHER = TopKFamily.statistics  # statistics that need a `TopKTeacher`
OVER_SETS = SetsFamily.statistics  # statistics that need `IdSets`
AT_IDS = AtIdsFamily.statistics  # statistics that need ids
# statistics whose gradient is one number for all columns, without column weights
UNIFORM = TotalFamily.statistics


# of the error for a name in want that is like none of them
UNHEARD = ": a statistic of your own is known after register_statistic(..), in each process"


def known_statistics() -> tuple[str, ...]:
    """Every name that `want` may hold."""
    return tuple(name for family in FAMILIES for name in family.statistics)


def names_with_beta(want: tuple[str, ...]) -> list[str]:
    """The names among `want` that may read a teacher's beta: Jensen-Shannon divergences, and those
    of a family that was registered."""
    others = [name for family in BUILT_IN for name in family.statistics if "jsd" not in name]
    return [name for name in want if name not in others]


def names_stated(attribute: str) -> frozenset[str]:
    """The names that families state by an attribute, "wide_gradients" say."""
    return frozenset(name for family in FAMILIES for name in getattr(family, attribute))


def names_without_sums(want: tuple[str, ...]) -> list[str]:
    """The names among `want` whose merged sums cannot be added up, as transport="sum" does."""
    return [
        name
        for family in FAMILIES
        if not family.adds_up
        for name in family.statistics
        if name in want
    ]


def names_about_labels(want: tuple[str, ...]) -> list[str]:
    """The names among `want` that calls with labels alone report."""
    with_labels, without = layout_of(True, want).call, layout_of(False, want).call
    return [
        name
        for family in FAMILIES
        if family.wanted(with_labels) and not family.wanted(without)
        for name in family.statistics
        if name in want
    ]


def families_with(family: Family) -> tuple[Family, ...]:
    """The families and a new one. Registered ones are ordered by name, so that all ranks have one
    order of rows."""
    registered = sorted(
        [*FAMILIES[len(BUILT_IN) :], family], key=lambda known: sorted(known.statistics)
    )
    return (*BUILT_IN, *registered)


def add_family(family: Family) -> None:
    """Make the statistics of a family known in this process."""
    global FAMILIES
    FAMILIES = families_with(family)


def owners_of_rows(kind: str, families: tuple[Family, ...]) -> dict[str, Family]:
    """The family of each row of a kind ("packet_rows", say) in calls that want everything, by the
    row's name."""
    want = tuple(name for family in families for name in family.statistics)
    calls = [Wanted(has_labels, want, student_sum=True) for has_labels in (True, False)]
    return {
        row: family for family in families for call in calls for row in getattr(family, kind)(call)
    }


def _without(left_out, names) -> list[str]:
    """The names in their order, but for those that are left out."""
    return [name for name in names if name not in left_out]


class Layout:
    """The rows of one kind of call by name: packets, what the backward keeps, and what is
    reported."""

    def __init__(
        self, has_labels: bool, want: tuple[str, ...], families: tuple[Family, ...], n_ids: int = 0
    ):
        call = Wanted(has_labels, want)
        self.families = tuple(family for family in families if family.wanted(call))
        student_sum = any(family.needs_student_sum(call) for family in self.families)
        self.call = call = call._replace(student_sum=student_sum)
        self.has_labels, self.want = has_labels, want
        second = self._rows("second_rows")
        self.second = tuple([row for name in second for row in (name, f"{name}_mean")])
        self.needs_label_logits = any(family.needs_label_logits for family in self.families)
        self.packet = self._rows("packet_rows")
        self.merged = (*self._rows("merged_rows"), *self.second[1::2])
        self.values = (*self._rows("value_rows"), *self.second[::2])
        self.flags: dict[str, torch.dtype] = {}
        for family in self.families:
            self.flags |= family.flags(call)
        self.per_id = self._rows("per_id")  # of [N, K] ids each
        self.n_ids = n_ids if self.per_id else 0
        # the rows of the ids, which have no names, come last
        self.packet_height = len(self.packet) + self.n_ids
        self._set_outputs()

    def _set_outputs(self):
        """Set what follows from the names of values, flags and statistics of ids."""
        self.outputs = (*self.values, *self.flags, *self.per_id)
        numbers = {*self.values, *self.per_id}
        gradients = [name for family in self.families for name in family.gradients]
        self.gradients = tuple([name for name in gradients if name in numbers])
        # target_logit's upstream gradient is lse's and log_prob's
        self.differentiable = frozenset((*self.gradients, "target_logit"))
        passing = [name for name in self.outputs if name in self.differentiable]
        fixed = _without(self.differentiable, self.outputs)
        # fields of `VocabStatistics`, differentiable ones first
        self.reported = (*passing, *_without({"owners"}, fixed)), len(passing)
        self.fixed = tuple([self.outputs.index(name) for name in fixed])
        known = {name: i for i, name in enumerate((*self.outputs, "labels", "vocab_size"))}
        fields = VocabStatistics._fields
        self.registered = tuple(_without({*fields, "owners"}, known))
        # (*outputs, labels, vocab_size, None) -> the fields of `VocabStatistics`
        self.fields = operator.itemgetter(*[known.get(name, -1) for name in fields])

    def _rows(self, kind: str) -> tuple[str, ...]:
        return tuple(
            row
            for family in self.families
            for row in _in_order(family, getattr(family, kind)(self.call))
        )

    def empty_outputs(
        self, like: torch.Tensor, n_rows: int, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Uninitialised [merged rows [R, N], values [K, N], *flags [N], *statistics of ids [N,
        ids]]."""
        merged = like.new_empty((len(self.merged), n_rows), dtype=dtype)
        values = like.new_empty((len(self.values), n_rows), dtype=dtype)
        flags = [like.new_empty(n_rows, dtype=kind) for kind in self.flags.values()]
        return [
            merged,
            values,
            *flags,
            *(like.new_empty((n_rows, self.n_ids), dtype=dtype) for _ in self.per_id),
        ]


def _in_order(family: Family, rows: tuple[str, ...]) -> list[str] | tuple[str, ...]:
    """The rows of a family in an order that all ranks share, also if they came from a set."""
    return rows if family in BUILT_IN else sorted(rows)


def layout_of(has_labels: bool, want: tuple[str, ...], ids: torch.Tensor | None = None) -> Layout:
    """The layout of a call; ids: [N, K] whose log-probs are asked for. One object for equal
    arguments."""
    n_ids = 0 if ids is None else ids.shape[1]
    # torch.compile cannot trace a cached class
    make = Layout if torch.compiler.is_compiling() else _layout
    return make(has_labels, want, FAMILIES, n_ids)


_layout = functools.lru_cache(maxsize=1024)(Layout)
