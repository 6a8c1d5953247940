"""A call's layout as kernels take it: numbers of rows by name as compile-time constants, and the
families' hooks."""

import collections
import functools
from typing import Any, NamedTuple

import triton.language as tl

from .. import statistics
from ..statistics import Layout
from ..statistics.records_triton import Outputs
from .launch import INTERPRETED


class MergeRows(NamedTuple):
    """Row numbers by name that a merge needs."""

    packet: tuple
    merged: tuple
    value: tuple


class DeviceLayout:
    """A layout as kernels take it: row numbers by name as compile-time constants, and the families'
    hooks."""

    def __init__(self, layout: Layout):
        self.packet = _row_numbers("packet", layout.packet, statistics.FAMILIES, layout.n_ids)
        self.merged = _row_numbers("merged", layout.merged, statistics.FAMILIES)
        self.second = _row_numbers("second", layout.second, statistics.FAMILIES)
        values = _row_numbers("values", layout.values, statistics.FAMILIES)
        self.merge_rows = MergeRows(self.packet, self.merged, values)
        flags = list(layout.flags)
        self._flags = tuple(
            2 + flags.index(name) if name in flags else None for name in Outputs._fields[2:]
        )
        families = layout.families[1:]  # carriers know the softmax by name
        streaming = [family for family in families if family.device.STATISTICS]
        self.statistics = tuple(family.device.STATISTICS for family in streaming)
        # whether the forward, which adds up one family besides the softmax, fits into few registers
        self.is_lean = len(streaming) == 1 and streaming[0].is_lean(layout.call)
        # kernels of the second exchange, and the list of ids that each reads, None: all columns
        self.second_kernels = tuple(
            (family.device.SECOND, family.id_list)
            for family in families
            if family.second_rows(layout.call)
        )
        self.per_id = layout.per_id
        self.merge = tuple(family.device.MERGE for family in families if family.device.MERGE)
        self.grads = _grads_type(statistics.FAMILIES)
        self._gradients = [family for family in families if family.device.GRADIENT]
        self._gradient_hooks: dict[tuple[str, ...], tuple] = {}

    def outputs(self, tensors: list) -> Outputs:
        """The outputs of `Layout.empty_outputs` by name."""
        return Outputs(*tensors[:2], *[None if at is None else tensors[at] for at in self._flags])

    def gradient_lists(self, names: tuple[str, ...]) -> list[str]:
        """The lists, fields of `Lists`, at whose ids one of these gradients is another one than at
        other columns."""
        return [
            family.id_list
            for family in self._gradients
            if family.id_list and not set(family.gradients).isdisjoint(names)
        ]

    def gradient_hooks(self, names: tuple[str, ...]) -> tuple:
        """The GRADIENT of each family that reads one of these upstream gradients."""
        if names not in self._gradient_hooks:
            found = (f for f in self._gradients if any(name in f.gradients for name in names))
            self._gradient_hooks[names] = tuple(family.device.GRADIENT for family in found)
        return self._gradient_hooks[names]


def _row_numbers(kind: str, rows: tuple[str, ...], families, n_ids: int = 0) -> Any:
    """Numbers of this kind's rows by name, None if absent; `ids`: how many without a name follow;
    `height`: all.

    One constant, because Triton's launcher looks at each element of a tuple.
    """
    place = {name: i for i, name in enumerate(rows)}
    make = _rows_type(kind, families)
    numbers = make(*map(place.get, make._fields[:-2]), n_ids, len(rows) + n_ids)
    return numbers if INTERPRETED else tl.constexpr(numbers)


@functools.cache
def _rows_type(kind: str, families):
    everything = statistics.Layout(
        True, tuple(name for family in families for name in family.statistics), families
    )
    names = dict.fromkeys(getattr(everything, kind))
    return collections.namedtuple(f"{kind.title()}Rows", [*names, "ids", "height"])


@functools.cache
def _grads_type(families):
    fields = list(dict.fromkeys(name for family in families for name in family.gradients))
    return collections.namedtuple("Grads", fields, defaults=[None] * len(fields))


@functools.lru_cache(maxsize=1024)
def device_layout(layout: Layout) -> DeviceLayout:
    """The layout as kernels take it; one object for each layout."""
    return DeviceLayout(layout)
