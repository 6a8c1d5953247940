"""A new family whose methods are watched while it is tried: what they return, and that they change
nothing.

Methods of all families get the same tensors, so that one that changes them in place makes the values
of others wrong.
"""

from __future__ import annotations

import copy
import functools
import inspect
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..statistics import Family, owners_of_rows
from .trial import has_own

A_DICT, TWO_DICTS = "a dict of tensors by name", "two dicts of tensors by name (values, merged)"
A_TENSOR, TWO_TENSORS = "a tensor", "two tensors"
RETURNED = {
    "local": A_DICT,
    "rescale": A_DICT,
    "merge": A_DICT,
    "target": A_DICT,
    "join": A_DICT,
    "finish": TWO_DICTS,
    "second": TWO_TENSORS,
    "coefficient": A_TENSOR,
    "direct": A_TENSOR,
    "scaled": A_TENSOR,
}
# methods whose first argument nothing else reads any more
ACCUMULATING = ("direct", "scaled")
# fields of what methods get that are None in calls without labels
OF_LABELS = {"target", "offset", "p_target", "at_target", "labels", "owned", "column"}
# name of a dict that methods get -> what to write where it has no such row, by family and row
MISSING = {
    "rows": "name it in {family}.packet and return it from local, and from a merge of your own",
    "sums": "name it in {family}.packet and return it from local, and from a merge of your own",
    "merged": "name it in {family}.merged and return it from finish",
    "grads": "a loss need not use every statistic, so ask whether an upstream gradient is there, "
    "`if {row!r} in grads`",
}
# names of what each method gets
PARAMETERS = {
    method: tuple(inspect.signature(getattr(Family, method)).parameters)[1:] for method in RETURNED
}


class MissingRow(KeyError, ValueError):
    """A method read a row that is not there. A KeyError, which the method may handle."""

    def __str__(self):
        return str(self.args[0])  # without the quotes of a key


class Rows(dict):
    """Rows by name, which say what to write where a method reads one that is not there."""

    def __init__(self, called: str, name: str, family: Family, rows: dict[str, Any]):
        super().__init__(rows)
        self.called, self.name, self.family = called, name, family

    def __missing__(self, row):
        family = self.family
        advice = MISSING[self.name].format(family=type(family).__name__, row=row)
        own = {*family.statistics, *family.packet}
        if self.name == "merged" and row not in own:
            advice += f", by a name of its own such as '{family.statistics[0]}_{row}'"
        raise MissingRow(
            f"{self.called} reads {self.name}[{row!r}], but {self.name} has no row {row!r}: {advice}"
        )


def watched(family: Family) -> Family:
    """Return a copy of a family whose methods raise ValueError where they return something else than
    they must, or change what they get."""
    found = copy.copy(family)
    # bound to the copy, so that a method that calls another one calls a watched one
    plain = {method: getattr(found, method) for method in RETURNED}
    for method, function in plain.items():
        object.__setattr__(found, method, _watched_method(found, method, function))
    return found


def _watched_method(family: Family, method: str, function: Callable) -> Callable[..., Any]:
    called = f"{type(family).__name__}.{method}"

    names = PARAMETERS[method]

    def known(name: str, value):
        is_rows = name in MISSING and isinstance(value, dict)
        return Rows(called, name, family, value) if is_rows else value

    @functools.wraps(function)
    def call(*given, **by_name):
        given = (*map(known, names, given), *given[len(names) :])
        by_name = {name: known(name, value) for name, value in by_name.items()}
        everything: dict[str, Any] = dict(zip(names, given)) | by_name
        read = dict(everything)
        if method in ACCUMULATING:
            read.pop(names[0], None)
        before = dict(_states(read))
        try:
            with torch.enable_grad():  # so that a result says whether it depends on a parameter
                result = function(*given, **by_name)
        except Exception as error:
            if isinstance(error, (TypeError, AttributeError)):
                _refuse_absent(called, family, everything, error)
            if isinstance(error, RuntimeError):
                _refuse_other_shape(called, error)
            _add_note(error, called, everything)
            raise
        after = dict(_states(read))
        changed = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
        if changed:
            raise ValueError(
                f"{called} must not change what it gets, which other families read as well (write "
                f"x = x * 2, not x *= 2), got a change of {', '.join(changed)}"
            )
        if not _is(RETURNED[method], result, is_optional=method == "scaled"):
            raise ValueError(f"{called} must return {RETURNED[method]}, got {_described(result)}")
        _expect_constant(called, result)
        if method == "local":
            _expect_rows(called, family, result)
        if method == "finish":
            _expect_per_token(called, family, result, everything["joined"].whole.shape)
        return result

    return call


def _add_note(error: Exception, called: str, given: dict[str, Any]) -> None:
    """Add a note to an error of a method that names the method, and what it got."""
    if not hasattr(error, "add_note"):  # before Python 3.11
        return
    fields = {
        f"{owner}.{field}": x
        for owner, value in given.items()
        for field, x in getattr(value, "_asdict", dict)().items()
        if field in ("z", "target", "whole")
    }
    tensors = {name: x for name, x in (given | fields).items() if isinstance(x, torch.Tensor)}
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())
    absent = [name for name, x in fields.items() if x is None]
    without = f" (without labels, so that {absent[0]} is None)" if absent else ""
    if "must match the size of tensor" in str(error) and "tile" in given:
        without += (
            "; a table of all ids, whole on every rank, is read as "
            "table[tile.first_id : tile.first_id + tile.z.shape[1]]"
        )
    error.add_note(
        f"in {called}({', '.join(given)}), which register_statistic tries with {shapes or 'rows'}"
        f"{without}"
    )


def _refuse_absent(called: str, family: Family, given: dict[str, Any], error: Exception) -> None:
    """Raise ValueError for an error of a method that took something for a tensor which this call
    does not have."""
    frames = traceback.walk_tb(error.__traceback__)
    read = {name for frame, _ in frames for name in frame.f_code.co_names}
    fields = {
        f"{owner}.{field}": field
        for owner, value in given.items()
        for field in getattr(value, "_fields", ())
        if field in read and getattr(value, field) is None
    }
    if "NoneType" not in str(error) or not fields:
        return
    names = " and ".join(fields)
    reason = "which this call does not have"
    if "label_logits" in fields.values():
        needed = "" if family.needs_label_logits else "needs needs_label_logits = True, and "
        reason = f"which {needed}`local` alone has"
    elif OF_LABELS & {*fields.values()}:
        reason = (
            f"which are None in calls without labels: ask `if {next(iter(fields))} is None`, or, "
            "for a statistic about the label, write "
            "`def wanted(self, call): return call.has_labels and super().wanted(call)`"
        )
    raise ValueError(
        f"{called} must do without {names}, {reason}; got {type(error).__name__}: {error}"
    ) from error


def _expect_constant(called: str, result: Any) -> None:
    """Raise ValueError for a result that requires a gradient, which nothing would give it."""
    if isinstance(result, (dict, tuple)):
        for part in result.values() if isinstance(result, dict) else result:
            _expect_constant(called, part)
    elif isinstance(result, torch.Tensor) and result.requires_grad:
        raise ValueError(
            f"{called} must return constants, got a result that requires a gradient, which what it "
            "reads (a parameter of a module, say) would not get: detach that, or let the function of "
            "a Term read it"
        )


def _refuse_other_shape(called: str, error: RuntimeError) -> None:
    """Raise ValueError for a change in place that a smaller tensor has no room for."""
    if "doesn't match the broadcast shape" in str(error):
        raise ValueError(
            f"{called} must not change what it gets, which other families read as well, nor what is "
            f"smaller than the result (write x = x + y, not x += y); got RuntimeError: {error}"
        ) from error


def _states(read: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each tensor's name, as the method's author knows it, with what differs after a change in
    place."""
    for owner, value in read.items():
        if isinstance(value, torch.Tensor):
            yield owner, (id(value), value._version)
        elif isinstance(value, dict):
            yield from ((f"{owner}[{name!r}]", (id(x), x._version)) for name, x in value.items())
        elif hasattr(value, "_fields"):
            yield from _states({f"{owner}.{name}": x for name, x in value._asdict().items()})


def _is(expected: str, result: Any, is_optional: bool) -> bool:
    """True for a result of the kind that `RETURNED` names."""
    if expected == A_TENSOR:
        return isinstance(result, torch.Tensor) or (is_optional and result is None)
    if expected == A_DICT:
        return isinstance(result, dict) and all(
            isinstance(name, str) and isinstance(x, torch.Tensor) for name, x in result.items()
        )
    one = A_DICT if expected == TWO_DICTS else A_TENSOR
    is_pair = isinstance(result, (tuple, list)) and len(result) == 2
    return is_pair and all(_is(one, part, False) for part in result)


def _described(result: Any) -> str:
    """Words for what a method returned."""
    if isinstance(result, dict):
        return f"a dict of {', '.join(f'{k!r}: {type(x).__name__}' for k, x in result.items())}"
    if isinstance(result, (tuple, list)):
        return f"{type(result).__name__} of {', '.join(map(_described, result)) or 'nothing'}"
    return "None" if result is None else type(result).__name__


def _expect_rows(called: str, family: Family, found: dict) -> None:
    """Raise ValueError unless `local` returns the rows that the family's packets have."""
    if found and not family.packet and not has_own(family, "packet_rows"):
        raise ValueError(
            f"{type(family).__name__}.packet must name the rows that {called} returns, got (): write "
            f"packet = {tuple(sorted(found))!r}"
        )
    if {*found} != {*family.packet} and family.packet:
        raise ValueError(
            f"{called} must return the rows that packet names, {sorted(family.packet)}, got "
            f"{sorted(found)}"
        )


def _expect_per_token(
    called: str, family: Family, found: tuple[dict, dict], shape: torch.Size
) -> None:
    """Raise ValueError unless each value and merged row of the family has a number per token."""
    kinds = "value_rows", "flags", "merged_rows"
    own = {row for kind in kinds for row in owners_of_rows(kind, (family,))}
    for name, x in (found[0] | found[1]).items():
        if name in own and x.shape != shape:
            raise ValueError(
                f"{called} must return a number per token, {list(shape)}, as {name!r}, got "
                f"{list(x.shape)}"
            )
