"""Docstrings of the fields of NamedTuples, which help() shows."""

from __future__ import annotations

import inspect
import re
from typing import TypeVar

Results = TypeVar("Results", bound=tuple)


def documented_fields(results: type[Results]) -> type[Results]:
    """Give each field of a NamedTuple the line of its section "Attributes" as docstring, which
    help() shows, and have a name in brackets and one that it does not have say what to write."""
    section = (inspect.getdoc(results) or "").partition("\nAttributes:\n")[2].partition("\n\n")[0]
    for name, text in re.findall(r"^    (\w+): (.*(?:\n     .*)*)", section, re.M):
        getattr(results, name).__doc__ = " ".join(text.split())
    if not hasattr(results, "__getattr__"):
        setattr(results, "__getattr__", _refuse_name)  # noqa: B010, as below
    setattr(results, "__getitem__", _item)  # noqa: B010, for which type checkers have no line
    return results


def _refuse_name(self, name: str):
    """Say which fields a NamedTuple has, for one that it does not."""
    fields = ", ".join(f".{field}" for field in self._fields)
    raise AttributeError(f"{type(self).__name__} has no {name!r}: its fields are {fields}")


def _item(self, place):
    """Return a NamedTuple's field by its place. TypeError, with what to write, for a name."""
    if not isinstance(place, str):
        return tuple.__getitem__(self, place)
    try:
        getattr(self, place)
    except AttributeError as error:
        raise TypeError(str(error)) from None
    raise TypeError(f"a {type(self).__name__} has attributes, no items: write .{place}")
