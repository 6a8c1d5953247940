"""Marks on parameters that hold one rank's rows of a vocabulary, which `clip_grad_norm_` reads.

A mark is two attributes, the name of the group and a number of ours. Both are text, so that they
are saved with the parameter, which a process group cannot be. The numbers' groups are kept here,
because nothing may hold a weak reference to a parameter that torch.utils.swap_tensors exchanges.
"""

from __future__ import annotations

import weakref
from uuid import uuid4

import torch

from ..ranks.groups import fate_of, is_live_group
from ..ranks.shard import VocabShard

# group -> its number, and back for as long as the process runs: what is gone was destroyed, and a
# number that is not there came with a file
_numbers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_groups: dict[str, weakref.ref] = {}


def mark(p: torch.Tensor, shard: VocabShard):
    """Say on a parameter that it is sharded, and over which group."""
    p.sharded_over = shard.group_name  # type: ignore[attr-defined]
    p.sharded_group = _number_of(shard.group)  # type: ignore[attr-defined]


def _number_of(group) -> str:
    number = _numbers.get(group)
    if number is None:
        number = _numbers[group] = uuid4().hex
        _groups[number] = weakref.ref(group)
    return number


def marked_group(p: torch.Tensor) -> str:
    """Return the name of the group over which a parameter's rows are sharded, "" if it has no mark.

    ValueError if the group is not live: another one may have its name by now.
    """
    name = getattr(p, "sharded_over", "")
    known = _groups.get(getattr(p, "sharded_group", ""))
    if known is not None and not is_live_group(known(), name):
        raise ValueError(
            f"the process group {name!r} of a parameter {list(p.shape)} {fate_of(known())}: set "
            "the module's shard to a VocabShard of a group that exists, and call the module, which "
            "marks its parameters"
        )
    return name
