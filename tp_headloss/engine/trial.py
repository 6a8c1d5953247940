"""One try of a new family on a few numbers in float64, small ones and larger ones, because a wrong
method raises nothing in a call.

A family says the same thing several times: `rescale` and `target` repeat what `local` sums up, and
the gradient repeats all of them. Each check compares two ways to one result, and its error names
the methods that only one of them takes. The order of the checks matters: each relies on what those
before it found.

A try takes some hundredths of a second, on the CPU and without other ranks. One of a family that
depends on ids looks at later ones, too (`later_ids`), which takes longer. It cannot tell whether the
statistic is the one that was meant, and it looks at the methods in plain torch alone.
"""

from __future__ import annotations

import contextlib
from typing import TypeAlias

import torch

from ..statistics import Family, Layout
from . import eager, passes
from .finite_differences import LARGER_TOLERANCE, LEAST, finite_differences
from .later_ids import ids_that_differ, tables
from .request import Facts, Request, Tensors

# Four tokens and six ids. The maximum is in either half of the ids, and the label is the maximum of
# two tokens.
LOGITS = (
    (1.327, -0.713, 0.438, -1.891, 0.862, -0.247),
    (-0.384, 0.279, -1.163, 0.617, 2.142, -0.859),
    (0.271, 1.743, -0.932, 0.586, -1.428, 1.119),
    (-1.217, 0.341, 0.768, 1.936, 0.164, -0.553),
)
TEACHER = (0.372, -0.618, 1.124, 0.281, -0.947, 0.739)
LABELS = (0, 4, 2, 5)
IDS = (1, 3)  # of a top-K teacher, and those whose log-probs are asked for
MEMBERS = (0, 2, 4, 5)  # of each token's set, all labels among them
COLUMNS = (0, 1, 2, 3, 4, 5)
WIDTH = len(COLUMNS)
TEMPERATURE = 0.8
LOWER = 5.0  # what makes all of the logits negative
ABSENT = 1  # columns of -inf after the six
Labels: TypeAlias = tuple[int, ...] | None
# Both are relative to the largest number. A family may sum up in fp32, and finite differences have
# errors.
VALUE_TOLERANCE = 1e-5
SLOPE_TOLERANCE = 1e-4
# Factors of the logits with which a family is tried again, because it may be flat among small ones.
# Rounding grows with numbers, so that the tolerance is larger.
LARGER = 10.0, 100.0

GRADIENT = ("coefficient", "direct", "scaled")
SUMS = ("local", "merge", "join")


@torch.no_grad()
def try_family(trial: Trial) -> None:
    """Raise ValueError that names the method that is wrong, unless a family's methods say one
    thing."""
    trial.check_sums()
    trial.check_ignored_label()
    if trial.has_values_without_labels():
        trial.check_label()
        trial.check_gradient(None)
    trial.check_gradient(LABELS)


@torch.no_grad()
def try_later_ids(trial: Trial) -> None:
    """Raise ValueError unless the methods of a family agree at those ids where its attributes have
    other numbers than at the first ones, and past the end of its tables."""
    family, families = trial.family, trial.families
    for first in ids_that_differ(family, WIDTH):
        # a family that takes every tile for the first ids is right in one part alone
        if first >= WIDTH:
            from_0 = Trial(family, families, 0, (0, 1, 2, first - 2, first - 1, first))
            if not from_0.is_an_error():
                from_0.check_sums()
                from_0.check_label()
        column_of_label = max(y for y in LABELS if y <= first)
        at_id = Trial(family, families, first - column_of_label)
        if not at_id.is_an_error():
            try_family(at_id)
            trial.moving |= at_id.moving
    labels = None if trial.has_values_without_labels() else LABELS
    for name, table, dim in tables(family, WIDTH):
        length = table.shape[dim]
        # one column of six has an id that the table has, too
        Trial(family, families, length - 1).expect_error(name, length, labels)


class Trial:
    """Small calls of a family.

    Args:
        families: all that its calls have, itself among them.
        start: the vocabulary id of the first column.
        columns: those of the six logits. The columns between them are -inf.
        factor: of `LOGITS`.
        has_ties: the label's logit is that of the largest other column.

    Attributes:
        moving: names of the statistics that were seen to change with the logits.
    """

    def __init__(
        self,
        family: Family,
        families: tuple[Family, ...],
        start: int = 0,
        columns: tuple[int, ...] = COLUMNS,
        factor: float = 1.0,
        has_ties: bool = False,
    ):
        self.family, self.families = family, families
        self.logits = factor * torch.tensor(LOGITS, dtype=torch.float64)
        if has_ties:
            at_label = torch.tensor(LABELS)[:, None]
            others = self.logits.scatter(1, at_label, -torch.inf)
            self.logits.scatter_(1, at_label, others.amax(1, keepdim=True))
        self.has_ties = has_ties
        self.factor = factor
        self.moving: set[str] = set()
        self.start, self.columns = start, torch.tensor(columns)
        self.width = columns[-1] + 1
        # a table of the family may end with the last of later ids
        self.absent = ABSENT if self._is_of_first_ids() else 0

    @property
    def is_larger(self) -> bool:
        return self.factor > 1

    def _is_of_first_ids(self) -> bool:
        return self.start == 0 and self.width == WIDTH

    def is_an_error(self) -> bool:
        """True if a call with these ids raises an error, whatever is wrong."""
        try:
            self.values(self.request(LABELS))
        except Exception:
            return True
        return False

    def is_finite(self) -> bool:
        """True if all values of the family are finite."""
        values = self.values(self.request(LABELS)).values()
        return all(bool(x.isfinite().all()) for x in values)

    def expect_error(self, name: str, length: int, labels: Labels) -> None:
        """Raise ValueError if a call with ids that a table does not have gives values that depend
        on how the ids are cut."""
        try:
            whole = self.values(self.request(labels))
        except Exception:
            return
        try:
            cut = self.values(self.request(labels, parts=2))
            self.compare(cut, whole, "cut in two", "whole", SUMS)
        except Exception as error:
            raise ValueError(
                f"family {type(self.family).__name__} must raise an error for ids that its {name} "
                f"[{length}] does not have, got a value where a tile has the last id and some "
                f"beyond: write `if tile.first_id + tile.z.shape[1] > {length}: raise ValueError(..)` "
                f"with the length of {name}"
            ) from error

    def has_values_without_labels(self) -> bool:
        """True if a call without labels reports statistics. Statistics about the label need not."""
        return bool(self.values(self.request(None)))

    def request(self, labels: Labels, parts: int = 1, absent: int = 0) -> Request:
        """Return the call of the four tokens, in parts, with some columns of -inf behind."""
        return self.rows_request(self.logits, torch.arange(len(LOGITS)), labels, parts, absent)

    def rows_request(
        self, logits, tokens, labels: Labels, parts: int = 1, absent: int = 0
    ) -> Request:
        """Return the call of rows of six logits, with every input that a family can read.

        tokens: the number of each row's token, which has the row's label.
        """
        n, width = len(logits), self.width + absent
        chunk_size = width if parts == 1 else -(-self.width // parts)
        ids_of_columns = (self.start + self.columns).int()
        logits = self.spread(logits, absent)
        teacher = self.spread(logits.new_tensor(TEACHER), absent)
        ids = ids_of_columns[torch.tensor(IDS)].repeat(n, 1)
        set_ends = len(MEMBERS) * torch.arange(1, n + 1)
        labels_of_rows = None
        if labels is not None:
            labels_of_rows = ids_of_columns[torch.tensor(labels)].long()[tokens]
        tensors = Tensors(
            logits,
            labels=labels_of_rows,
            column_weight=torch.arange(1.0, width + 1),
            teacher=teacher.repeat(n, 1),
            entries=ids,
            entry_log_probs=logits.new_full(ids.shape, 0.3).log(),
            sets=ids_of_columns[torch.tensor(MEMBERS)].repeat(n),
            set_spans=torch.stack([set_ends - len(MEMBERS), set_ends], 1),
            ids=ids,
        )
        want, chunks = self.family.statistics, -(-width // chunk_size)
        one_rank = Facts(
            start=self.start,
            valid_width=width,
            vocab_size=self.start + width,
            chunk_size=chunk_size,
            chunks=chunks,
            world_size=1,
            group_name="",
            want=want,
            scale=1.0,
            softcap=0.0,
            temperature=TEMPERATURE,
            ignore_index=-100,
            backend="torch",
            transport="gather",
        )
        layout = Layout(labels is not None, want, self.families, len(IDS))
        return passes.with_label_logits(Request(tensors, one_rank, layout))

    def spread(self, six: torch.Tensor, absent: int = 0) -> torch.Tensor:
        """Return six logits [.., 6] in their columns, and -inf in all others."""
        spread = six.new_full((*six.shape[:-1], self.width + absent), -torch.inf)
        spread[..., self.columns] = six
        return spread

    def values(self, request: Request, outputs: list | None = None) -> dict[str, torch.Tensor]:
        """Return the family's values [N] by name, of these outputs or of a call."""
        outputs = passes.statistics(request) if outputs is None else outputs
        layout = request.layout
        family = self.family
        own = {*family.value_rows(layout.call), *family.second_rows(layout.call)}
        return {name: x for name, x in zip(layout.values, outputs[1]) if name in own}

    def check_sums(self) -> None:
        """Compare values of one chunk with those of two and three, of ranks that add up, with
        columns of -inf, and of half of the tokens."""
        whole = self.values(self.request(LABELS))
        for half in torch.arange(len(LOGITS)).chunk(2):
            found = self.values(self.rows_request(self.logits[half], half, LABELS))
            expected = {name: value[half] for name, value in whole.items()}
            here = "of half of the tokens (each must be computed by itself)"
            self.compare(found, expected, here, "of all", ("finish", *SUMS))
        absent = self.values(self.request(LABELS, absent=self.absent))
        self.compare(absent, whole, "with an id more, whose logit is -inf,", "without", ("local",))
        # the third chunk has nothing but -inf
        cut = self.request(LABELS, 2, self.absent)
        in_three = self.request(LABELS, 3)
        of_merge = ""
        if self._is_of_first_ids() and not has_own(self.family, "merge"):
            of_merge = ", and rows that are no sums, as a maximum, need a merge of their own"
        for request, words in ((cut, "cut in two"), (in_three, "cut in three")):
            found = self.values(request)
            methods = "rescale", "merge", "local"
            self.compare(found, whole, words, "whole", methods, advice=of_merge)
        self.check_empty_part()
        if self.family.adds_up:
            words = 'with the sums of ranks added up (transport="sum"; or adds_up = False)'
            self.compare(self.added_up(cut), whole, words, "whole", ("merge",))

    def check_empty_part(self) -> None:
        """Compare values with a packet that has no ids, as a shard may be, and without.

        Logits are below 0, so that a maximum which is 0 in such a packet shows.
        """
        logits = self.logits - LOWER * self.factor
        request = self.rows_request(logits, torch.arange(len(LOGITS)), LABELS)
        facts = request.facts._replace(chunks=request.facts.chunks + 1)
        words = "with a part that has no ids", "without"
        found = self.values(request._replace(facts=facts))
        self.compare(
            found,
            self.values(request),
            *words,
            ("merge", "local"),
            advice=", and at the names of packet rows: that of a maximum ends in max",
        )

    def added_up(self, request: Request) -> dict[str, torch.Tensor]:
        """Return the values that need one exchange, by the transport "sum", with a rank for each
        chunk."""
        packets = torch.zeros(request.packets_shape, dtype=torch.float64)
        eager.local_statistics(packets, request)
        # a packet without columns, which makes the sums of all ranks relative to its maxima
        maxima = torch.zeros_like(packets[:1])
        for i, name in enumerate(request.layout.packet):
            if name.endswith("max"):
                maxima[0, i] = packets[:, i].amax(0)
        ranks = [torch.cat([packet, maxima]) for packet in packets.split(1)]
        (shift, sums), *others = [eager.merged_sums(packet, request.layout) for packet in ranks]
        for _, added in others:
            sums |= {
                name: sums[name] + x for name, x in added.items() if not name.endswith("shift")
            }
        values = self.values(request, eager.finish(shift, sums, request, torch.float64))
        return {name: x for name, x in values.items() if name not in request.layout.second}

    def check_label(self) -> None:
        """Compare values with labels and without, where both calls report them."""
        found = self.values(self.request(LABELS, 2))
        expected = self.values(self.request(None))
        words = "with a label", "without (a statistic about the label is `wanted` with labels only)"
        self.compare(found, expected, *words, ("target", "rescale", *SUMS))

    def check_ignored_label(self) -> None:
        """Raise ValueError if a label that is ignored, and is no id, is an error."""
        whole = self.request(LABELS)
        tensors = whole.tensors
        labels = tensors.labels.clone()
        labels[0] = whole.facts.ignore_index
        request = whole._replace(tensors=tensors._replace(labels=labels, label_logits=None))
        try:
            self.values(passes.with_label_logits(request))
        except Exception as error:
            raise ValueError(
                f"the methods of family {type(self.family).__name__} must take labels that are "
                f"ignored, such as {whole.facts.ignore_index}, got {type(error).__name__}: "
                f"{error}; look such a label up as labels.clamp(min=0)"
            ) from error

    def check_gradient(self, labels: Labels) -> None:
        """Compare the gradient of each statistic with finite differences, and the gradient of none
        with 0."""
        request = self.request(labels, 2, self.absent)
        merged = passes.statistics(request)[0]
        request = as_in_a_backward(request)
        of_lse = (request.tensors.logits / TEMPERATURE).softmax(-1) / TEMPERATURE
        slopes = finite_differences(self, labels)
        least = LARGER_TOLERANCE if self.is_larger else SLOPE_TOLERANCE
        self.moving |= {name for name, x in slopes.items() if bool((x.abs() > least).any())}
        upstream = torch.linspace(0.5, 2.0, len(LOGITS), dtype=torch.float64)
        self.expect_named_gradients(request, merged, of_lse)
        for name in (*self.family.gradients, None):
            found = torch.zeros_like(request.tensors.logits)
            # there is the gradient of lse besides, to which the methods add
            expected = of_lse.clone()
            grads = {"lse": torch.ones_like(upstream)}
            if name in slopes:
                grads[name] = grads.get(name, 0.0) + upstream
                expected[:, self.columns] += upstream[:, None] * slopes[name]
            passes.write_gradient(found, request, merged, grads)
            # where finite differences say nothing
            may_be_unknown = self.is_larger or self.has_ties
            expected = torch.where(expected.isnan() & may_be_unknown, found, expected)
            words = "by these methods", "by finite differences"
            if name is None:
                words = (
                    "where a loss has lse alone",
                    "by a softmax (methods return what they get, or add to it)",
                )
            told = f"the gradient of lse + {name}" if name else "the gradient of lse"
            self.expect_no_gradient(found, request.tensors.logits == -torch.inf, told)
            named = {told: found}, {told: expected}
            self.compare(*named, *words, (*GRADIENT, "finish", *SUMS), SLOPE_TOLERANCE)

    def expect_no_gradient(self, found, absent, told: str) -> None:
        """Raise ValueError unless a gradient is 0 in columns that are no ids."""
        of_absent = found[absent]
        wrong = of_absent[of_absent != 0]
        if len(wrong):
            raise ValueError(
                f"the methods of family {type(self.family).__name__} must leave the gradient 0 "
                f"where a logit is -inf, got {told} = {float(wrong[0]):.6g} there: what direct and "
                "coefficient add must be 0 in such a column, torch.where(tile.z > -torch.inf, .., 0) "
                "in direct and torch.where(shifted > -torch.inf, .., 0) in coefficient"
            )

    def expect_named_gradients(self, request: Request, merged, of_lse) -> None:
        """Raise ValueError if the methods have the gradient of a statistic that `gradients` does not
        name, so that no call would ask for it."""
        for name in self.values(request):
            if name in self.family.gradients:
                continue
            found = torch.zeros_like(of_lse)
            one = torch.ones(len(LOGITS), dtype=torch.float64)
            with contextlib.suppress(Exception):  # no method knows it
                passes.write_gradient(found, request, merged, {"lse": one, name: one})
                if not torch.allclose(found, of_lse, rtol=0, atol=VALUE_TOLERANCE):
                    break
        else:
            return
        owner = type(self.family).__name__
        raise ValueError(
            f"{owner}.gradients must name the statistics of which methods have the gradient, got "
            f"{self.family.gradients!r}, but {name!r} has one: gradients = "
            f"{(*self.family.gradients, name)!r}"
        )

    def compare(
        self, found, expected, here, there, methods, tolerance=VALUE_TOLERANCE, advice=""
    ) -> None:
        """Raise ValueError that names the methods, unless the numbers that are in both are equal.

        advice: what the error says besides.
        """
        tolerance = LARGER_TOLERANCE if self.is_larger else tolerance
        for name in found.keys() & expected.keys():
            a, b = found[name], expected[name]
            largest = float(torch.where(b.isfinite(), b.abs(), 0.0).max())
            if torch.allclose(a, b, rtol=0, atol=tolerance * (largest + LEAST), equal_nan=True):
                continue
            apart = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(torch.inf)
            at = int(apart.argmax())
            first, second = float(a.flatten()[at]), float(b.flatten()[at])
            named = [described(self.family, x) for x in methods if concerns(self.family, x)]
            raise ValueError(
                f"the methods of family {type(self.family).__name__} must agree, got {name} = "
                f"{first:.6g} {here} and {second:.6g} {there}{self._place()}: look at "
                f"{', '.join(named)}{advice}"
            )

    def _place(self) -> str:
        """Words for ties, larger logits and later ids, "" for the first try."""
        if self.has_ties:
            return " where the label's logit equals the largest other one"
        if self.is_larger:
            return f" with |z| up to {float(self.logits.abs().max()) / TEMPERATURE:.0f}"
        if self._is_of_first_ids():
            return ""
        ids = (self.start + self.columns).tolist()
        return f" at the ids {', '.join(map(str, ids))} (`tile.first_id` is that of a tile's first)"


def as_in_a_backward(request: Request) -> Request:
    """The request without logits of labels, which a backward has not."""
    return request._replace(tensors=request.tensors._replace(label_logits=None))


def concerns(family: Family, method: str) -> bool:
    """True if a method can be wrong: it is the family's own, or one that most families need."""
    return has_own(family, method) or method in ("rescale", "target", "coefficient", "direct")


def described(family: Family, method: str) -> str:
    """Name of a method, and whether the family has none of its own."""
    return method if has_own(family, method) else f"{method} (it has none of its own)"


def has_own(family: Family, method: str) -> bool:
    """True if a family has a method of its own in the place of that of `Family`."""
    return getattr(type(family), method) is not getattr(Family, method)
