"""Ids at which a family's statistics differ from those at the first ids, as far as its attributes
say.

A table with a number for each id may begin with equal numbers: a mask of special tokens, say. Methods
that forget `tile.first_id`, or the label, agree at its first ids, and are wrong at later ones.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ..statistics import Family

# integers above may be anything
LARGEST_ID = 1 << 20


def ids_that_differ(family: Family, width: int) -> list[int]:
    """Return the ids, above 0, at which tables of a family change first, and the first one of ids
    that it has itself.

    width: tables are longer than this.
    """
    found = set()
    for x in _tensors(family).values():
        for dim, length in enumerate(x.shape):
            if length > width:
                found.add(_first_change(x, dim))
        if not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool:
            found.update(x[(x > 0) & (x < LARGEST_ID)].flatten()[:1].tolist())
    return sorted(found - {0})


def lengths(family: Family, width: int) -> list[tuple[str, int]]:
    """Return the names of tables with the number of ids that they have, above `width`."""
    return [
        (name, length)
        for name, x in _tensors(family).items()
        for length in x.shape
        if length > width
    ]


def _first_change(x: torch.Tensor, dim: int) -> int:
    """Return the first place along a dimension that differs from the one before, 0 if all are
    equal."""
    rows = x.movedim(dim, 0).reshape(x.shape[dim], -1)
    changed = (rows[1:] != rows[:-1]).any(1).nonzero()
    return int(changed[0]) + 1 if len(changed) else 0


def _tensors(family: Family) -> dict[str, torch.Tensor]:
    """Return a family's attributes of numbers by name, as tensors: its own, and its class's."""
    attributes: dict[str, Any] = {}
    for owner in (*reversed(type(family).__mro__), family):
        if owner not in (Family, object):
            attributes |= vars(owner)
    found = {name: _tensor(x) for name, x in attributes.items() if not name.startswith("__")}
    return {name: x for name, x in found.items() if x is not None}


def _tensor(value: Any) -> torch.Tensor | None:
    """Return a tensor, numbers of an array or of a list or set, or an integer as a tensor [..]; None
    for anything else."""
    if isinstance(value, (set, frozenset)):
        value = list(value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    is_list = isinstance(value, (list, tuple)) and all(isinstance(x, (int, float)) for x in value)
    if not is_list and not hasattr(value, "__array__"):
        return None
    with contextlib.suppress(Exception):  # of no numbers
        x = torch.as_tensor(value)
        is_plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided
        return x if is_plain and x.dim() and not x.is_meta else None
    return None
