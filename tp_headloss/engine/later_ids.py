"""Ids at which a family's statistics differ from those at the first ids, as far as its attributes and
the variables that its functions read say.

A table with a number for each id may begin with equal numbers: a mask of special tokens, say. Methods
that forget `tile.first_id`, or the label, agree at its first ids, and are wrong at later ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from typing import Any

import torch

from ..statistics import Family
from ..statistics.members import attributes_of, functions_of, names_in, numbers_in, variables_of

# integers above may be anything
LARGEST_ID = 1 << 20
MOST_OF_CODE = 1 << 17  # of numbers in code, which may be anything as well
DEPTH = 3  # of containers in containers
MOST_IDS = 24  # each of which takes two tries


def ids_that_differ(family: Family, width: int) -> list[int]:
    """Return the ids, above 0, at which tables of a family change first, the first one of ids that
    it has itself, and numbers of its code that may be ids.

    width: tables are longer than this.
    """
    found = set()
    for _, x in _tensors(family):
        for dim, length in enumerate(x.shape):
            if length > width:
                found.add(_first_change(x, dim))
        if not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool:
            found.update(x[(x > 0) & (x < LARGEST_ID)].flatten()[:1].tolist())
    for function in functions_of(family):
        numbers = numbers_in(function.__code__)
        found |= {x for x in numbers if width <= x < MOST_OF_CODE}
    return sorted(found - {0})[:MOST_IDS]


def tables(family: Family, width: int) -> list[tuple[str, torch.Tensor, int]]:
    """Return names, tensors and dimensions of what may have a number for each id: those that are
    longer than `width`."""
    return [
        (name, x, dim)
        for name, x in _tensors(family)
        for dim, length in enumerate(x.shape)
        if length > width
    ]


def _first_change(x: torch.Tensor, dim: int) -> int:
    """Return the first place along a dimension that differs from the one before, 0 if all are
    equal."""
    rows = x.movedim(dim, 0).reshape(x.shape[dim], -1)
    changed = (rows[1:] != rows[:-1]).any(1).nonzero()
    return int(changed[0]) + 1 if len(changed) else 0


def reads_ids_without_a_table(family: Family, width: int) -> bool:
    """True if a family's functions read the ids of a tile, and nothing says at which ids its numbers
    change."""
    names = [names_in(function.__code__) for function in functions_of(family)]
    reads_ids = any("first_id" in found for found in names)
    return reads_ids and not ids_that_differ(family, width) and not tables(family, width)


def tensors_in(name: str, value: Any, depth: int = DEPTH) -> list[tuple[str, torch.Tensor]]:
    """Return the numbers in a value as tensors, with names: those of a value that is numbers, and
    those in a dict, list, tuple or record, which may hold others."""
    x = _tensor(value)
    found = [] if x is None else [(name, x)]
    if depth == 0 or (x is not None and not isinstance(value, dict)):
        return found
    for key, part in _parts(value):
        found += tensors_in(f"{name}{key}", part, depth - 1)
    return found


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return the parts of a container, with what is written behind its name to reach them."""
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    is_record = dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace)
    if is_record and not isinstance(value, type):
        return [(f".{key}", part) for key, part in vars(value).items()]
    return []


def _tensors(family: Family) -> list[tuple[str, torch.Tensor]]:
    """Return the numbers that a family reads, with names: of its attributes, and of variables of its
    functions."""
    held = list(attributes_of(family).items())
    for function in functions_of(family):
        held += variables_of(function).items()
    found = {}
    for name, value in held:
        for called, x in tensors_in(name, value):
            # two functions may read one variable
            found[called, id(value)] = x
    return [(called, x) for (called, _), x in found.items()]


def _tensor(value: Any) -> torch.Tensor | None:
    """Return numbers as a tensor [..]: of a tensor, an array, a list or a set, the first of a range,
    an integer, or integers that are the keys of a dict; None for anything else."""
    if isinstance(value, dict) and value and all(type(key) is int for key in value):
        value = list(value)
    if isinstance(value, (set, frozenset)):
        value = list(value)
    if isinstance(value, range):  # which may be long
        value = [*value[:1]]
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    numbers = int, float, list, tuple
    is_list = isinstance(value, (list, tuple)) and all(isinstance(x, numbers) for x in value)
    if not is_list and not hasattr(value, "__array__"):
        return None
    with contextlib.suppress(Exception):  # of no numbers
        x = torch.as_tensor(value)
        is_plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided
        return x if is_plain and x.dim() and not x.is_meta else None
    return None
