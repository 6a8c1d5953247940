"""The contract of a family of statistics: what it sends, how its sums merge, what it reports, and
its gradient.

A family is a monoid, written once. Its *packet rows* are partial sums over some columns relative to
their maximum; `rescale` moves them to a larger maximum, and adding rescaled rows merges them,
whether they come from two tiles, two chunks or two ranks. Carriers (the kernels and the eager loops
in `engine`) know families by this contract only.

A family has two files: `x.py`, a subclass of `Family` in plain torch, which is the definition; and
`x_triton.py`, its device functions, apart because importing the package loads no Triton (see
`device`).

Words: x raw logit, z transformed logit, y label, M = max z, S = sum exp(z - M), p = softmax(z). The
column of the label (the target) stays out of every sum and is joined at the end, so that confident
tokens keep full relative accuracy.
"""

import importlib
from typing import Any, NamedTuple, TypeAlias

import torch

from .fields import documented_fields

# A "torch.Tensor | MaybeNone" is None if the call has no such thing. It is not a "torch.Tensor |
# None", because whoever reads it has asked for it, and would have to say so again in each line.
MaybeNone: TypeAlias = Any


@documented_fields
class Wanted(NamedTuple):
    """The facts of a call that decide which rows a family has.

    Attributes:
        has_labels: whether the call has labels.
        want: names of the optional statistics that the call asks for.
        student_sum: True where some family normalises the student at the teacher's temperature,
            too.
    """

    has_labels: bool
    want: tuple[str, ...]
    student_sum: bool = False

    def any_of(self, names) -> bool:
        return any(name in self.want for name in names)


@documented_fields
class Tile(NamedTuple):
    """One block of n rows (tokens) and w columns (ids), in float32 or float64, with the inputs that
    belong to it.

    Attributes:
        z: [n, w] transformed logits, -inf where there is no such id.
        slope: dz/dx, [n, w], [n, 1] or a number; x is the logit before temperature, scale and
            softcap.
        target: [n] column of the label, below 0 or at least w where another tile has it; None
            without labels.
        column_weight: [w] weights of the statistic "total"; None if the call has none.
        teacher: [n, w] the teacher's logits, divided by its temperature; None without a `Teacher`.
        scale: factor of z where it is compared with a teacher, [n, 1] or a number.
        entries: [n, K] columns of a `TopKTeacher`'s entries, w where another tile has the entry;
            None without one.
        entry_log_probs: [n, K] the teacher's log-probs of the entries; None without a
            `TopKTeacher`.
        members: [n, w] bool, the columns in each token's set; None without `IdSets`.
        first_id: vocabulary id of the first column.
        label_logits: [n] z of the labels, whichever tile has them; None but in `local` of a family
            with needs_label_logits.
        ids: [n, K] columns of given ids, w where another tile has the id; None if the call has
            none.
    """

    z: torch.Tensor
    slope: torch.Tensor | float
    target: torch.Tensor | MaybeNone
    column_weight: torch.Tensor | MaybeNone
    teacher: torch.Tensor | MaybeNone
    scale: torch.Tensor | float
    entries: torch.Tensor | MaybeNone
    entry_log_probs: torch.Tensor | MaybeNone
    members: torch.Tensor | MaybeNone
    first_id: int
    label_logits: torch.Tensor | MaybeNone = None
    ids: torch.Tensor | MaybeNone = None


@documented_fields
class Softmax(NamedTuple):
    """The softmax of one tile without its target column, the label's.

    Attributes:
        z: [n, w] logits, -inf at the target.
        peak: [n] their maximum.
        shifted: [n, w] z - peak.
        exp: [n, w] exp(shifted).
        owned: [n] bool, the target is in this tile; None without labels.
        column: [n, 1] column of the target, clamped into the tile; None without labels.
    """

    z: torch.Tensor
    peak: torch.Tensor
    shifted: torch.Tensor
    exp: torch.Tensor
    owned: torch.Tensor | MaybeNone
    column: torch.Tensor | MaybeNone


@documented_fields
class Merging(NamedTuple):
    """The maxima of all packets, in float64.

    Attributes:
        peak: [packets, N] the maximum of each.
        shift: [N] the largest of them.
        drop: [packets, N] peak - shift, 0 for an empty packet.
        factor: [packets, N] exp(drop), 0 for an empty packet.
        scale: as in `Tile`.
    """

    peak: torch.Tensor
    shift: torch.Tensor
    drop: torch.Tensor
    factor: torch.Tensor
    scale: torch.Tensor | float


@documented_fields
class Joined(NamedTuple):
    """The softmax of whole rows [N] in float64, the target column (the label's) included. lse is
    top + log_sum.

    Attributes:
        shift: maximum of z over all columns but the target, to which merged sums are relative.
        top: maximum of z over all columns.
        drop: shift - top, 0 without labels.
        factor: exp(drop), which makes merged sums relative to top.
        target: z of the label; None without labels.
        offset: target - top; None without labels.
        p_target: exp(offset), a probability once it is divided by whole; None without labels.
        whole: sum of exp(z - top).
        log_sum: log(whole).
        student_sum: sum of exp(scale (z - top)); None unless a family needs it.
        at_target: exp(scale offset); None without student_sum or labels.
        student_factor: exp(scale drop); None without student_sum or labels.
        ignored: bool, the label is the ignore_index: results are 0.
        bad: bool, results are NaN, for a bad label or logits without a softmax.
        labels: vocabulary ids, int64 or int32, the ignore_index and bad ones among them; None
            without labels.
        scale: as in `Tile`.
    """

    shift: torch.Tensor
    top: torch.Tensor
    drop: torch.Tensor
    factor: torch.Tensor
    target: torch.Tensor | MaybeNone
    offset: torch.Tensor | MaybeNone
    p_target: torch.Tensor | MaybeNone
    whole: torch.Tensor
    log_sum: torch.Tensor
    student_sum: torch.Tensor | MaybeNone
    at_target: torch.Tensor | MaybeNone
    student_factor: torch.Tensor | MaybeNone
    ignored: torch.Tensor
    bad: torch.Tensor
    labels: torch.Tensor | MaybeNone
    scale: torch.Tensor | float


class Family:
    """A group of statistics that share their sums. Subclasses override what differs from adding
    sums up.

    A family outside of this package sets the attributes below, of its class or in its constructor,
    before it is registered, and none of the others, which tell the package's own kernels apart.

    Attributes:
        statistics: names for `want`; at least one.
        gradients: those of them that have a gradient; others are constants.
        packet: names of the rows that `local` returns and ranks exchange. Rows of all families are
            told apart by their names, and the package's own are called "squares", "moment" or
            "mass": begin yours with the name of the statistic.
        merged: names of the rows that `finish` keeps for the gradient.
        values: names of what is reported; None: the statistics that are wanted.
        needs_label_logits: True: `local` gets `tile.label_logits`.
        adds_up: False: merged sums of ranks cannot be added up, as transport="sum" does.
        device: the module of the methods as Triton functions, for GPUs. It is an attribute of the
            class, or a property, and not set by a constructor.
    """

    statistics: tuple[str, ...] = ()  # names for `want` that this family serves
    gradients: tuple[str, ...] = ()  # those among its values that have a gradient
    # what the three methods of these names return, where it is the same for each call; a row has a
    # name that no other family has, and that of a maximum ends in "max" (merged: "shift")
    packet: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    values: tuple[str, ...] | None = None  # None: the statistics that are wanted
    # whether logits are compared with that of the label, which is then found before they stream by
    needs_label_logits = False
    # whether merged sums of ranks can be added up, which transport="sum" does
    adds_up = True
    # those of its statistics that the kernel of `engine/one_read` has
    in_one_read: tuple[str, ...] = ()
    # the list of ids, a field of `records_triton.Lists`, at which the gradient is another one than
    # at other columns, and which the second exchange reads; None: both read all columns alike
    id_list: str | None = None
    # How the gradient's kernel is launched, see `engine.launch`: the names of the gradients that
    # are quickest in wide tiles and in narrow ones, and of those that fit into few registers, so
    # that more programs run at once.
    wide_gradients: tuple[str, ...] = ()
    narrow_gradients: tuple[str, ...] = ()
    lean_gradients: tuple[str, ...] = ()

    def wanted(self, call: Wanted) -> bool:
        return call.any_of(self.statistics)

    def needs_student_sum(self, call: Wanted) -> bool:
        """True if `finish` needs sum exp(scale z) over the vocabulary."""
        return False

    def is_lean(self, call: Wanted) -> bool:
        """True if a forward that adds up this family alone fits into few registers, so that more
        programs run at once."""
        return False

    def packet_rows(self, call: Wanted) -> tuple[str, ...]:
        """Names of the partial sums of a chunk."""
        return self.packet

    def merged_rows(self, call: Wanted) -> tuple[str, ...]:
        """Names of what the gradient needs per token besides logits and upstream gradients."""
        return self.merged

    def value_rows(self, call: Wanted) -> tuple[str, ...]:
        """Names of the reported fp32 statistics."""
        return (
            tuple(name for name in self.statistics if name in call.want)
            if self.values is None
            else self.values
        )

    def flags(self, call: Wanted) -> dict[str, torch.dtype]:
        """Names and dtypes of reported statistics that are no fp32 numbers."""
        return {}

    def per_id(self, call: Wanted) -> tuple[str, ...]:
        """Names of the reported fp32 statistics [N, K] of K given ids, each a packet row without a
        name."""
        return ()

    def second_rows(self, call: Wanted) -> tuple[str, ...]:
        """Names of the values of the second exchange, which needs the merged sums of the first."""
        return ()

    def local(self, tile: Tile, softmax: Softmax, rows) -> dict[str, torch.Tensor]:
        """The packet rows [n] of one tile; rows: the names that are wanted."""
        return {}

    def rescale(
        self, rows: dict, drop: torch.Tensor, factor: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Rows relative to a maximum that is larger by -drop; factor = exp(drop). By default no row
        is relative."""
        # sums of a `merge` of the family's own may have other names
        return {name: rows[name] for name in self.packet if name in rows}

    def merge(self, rows: dict, merging: Merging) -> dict[str, torch.Tensor]:
        """Rows [packets, N] -> sums [N]."""
        return {
            name: x.sum(0) for name, x in self.rescale(rows, merging.drop, merging.factor).items()
        }

    def target(self, p: torch.Tensor, offset: torch.Tensor) -> dict[str, torch.Tensor]:
        """The rows of the target column alone, p = exp(offset)."""
        return {}

    def join(self, sums: dict, joined: Joined) -> dict[str, torch.Tensor]:
        """Sums without the target column -> with it."""
        if joined.target is None:
            return sums
        target = self.target(joined.p_target, joined.offset)
        rescaled = self.rescale(sums, joined.drop, joined.factor)
        return sums | {
            name: x + target[name] if name in target else x for name, x in rescaled.items()
        }

    def finish(self, sums: dict, joined: Joined) -> tuple[dict, dict]:
        """Joined sums [N] -> values (and flags) by name, merged rows by name; float64. Each token by
        itself: a call may have some of them at a time. sums has the rows of other families, too,
        which are not returned."""
        return {}, {}

    def second(
        self, name: str, tile: Tile, merged: dict, beta: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One tile's part [n] of a statistic of the second exchange, and of the mean that its
        gradient subtracts."""
        raise NotImplementedError

    def coefficient(self, coefficient, shifted, weight, merged: dict, grads: dict):
        """Add to the factor [n, w] that multiplies p in the gradient with respect to z. shifted: z - M, weight: p."""
        return coefficient

    def direct(self, dz, tile: Tile, merged: dict, grads: dict):
        """Add to the gradient [n, w] with respect to z.

        z is that of `local` but for rounding, where a linear head makes logits twice: a column is
        found by its id, and not by a value that equals a merged one.
        """
        return dz

    def scaled(
        self, total, tile: Tile, merged: dict, grads: dict, beta: float, want: tuple[str, ...]
    ):
        """Add to the gradient [n, w] with respect to scale z (None: nothing yet)."""
        return total

    @property
    def device(self):
        """The module of this family's device functions: STATISTICS, MERGE and GRADIENT, None where
        it has none of a kind, and with `second_rows` SECOND, the kernel of the second exchange."""
        name = f"{type(self).__module__}_triton"
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise NotImplementedError(
                f"family {type(self).__name__} ({', '.join(self.statistics)}) must have `device`, "
                f"its methods as Triton functions, for backend 'triton', got no module {name!r}: "
                'give it `device` (see the guide "Your own loss"), or pass '
                "Options(backend='torch')"
            ) from None


def decay(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a - b and exp(a - b) for a <= b, where a = -inf is the empty sum: 0 and 0, also if b =
    -inf."""
    empty = a == -torch.inf
    difference = torch.where(empty, 0.0, a - b)
    return difference, torch.where(empty, 0.0, difference.exp())


def weigh(factor, value):
    """factor * value, where a factor of 0 leaves nothing of any value."""
    return torch.where(factor == 0, 0.0, factor * value)


def row_sum(x) -> torch.Tensor:
    """[n, w] -> [n] in float64."""
    return x.sum(-1, dtype=torch.float64)


def finite_shift(peak) -> torch.Tensor:
    """A maximum [n] as [n, 1] that may be subtracted: 0 where it is -inf."""
    return torch.where(peak == -torch.inf, 0.0, peak)[:, None]
