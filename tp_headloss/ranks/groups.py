"""Process groups that share a vocabulary: which of them are live."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # pyright: ignore[reportPrivateImportUsage]

from ..spec import CheckedBy
from .compiler import constant_for_compile

# torch has a type of its own for the names of groups
resolve_process_group: Callable[[str], dist.ProcessGroup] = _resolve_process_group  # type: ignore[assignment]


# groups that a VocabShard has had, and those among them that are of the process that this one was
# forked from: no rank answers a child there
_shared: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_of_parent: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def remember(group: dist.ProcessGroup):
    """Note a group that several ranks share, for a child that is forked later."""
    _shared.add(group)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=lambda: _of_parent.update(_shared))


@constant_for_compile
def have_common_ranks(group_name: str, other_name: str) -> bool:
    """Return True if two process groups have a rank besides this one in common."""
    own = dist.get_process_group_ranks(resolve_process_group(group_name))
    other = dist.get_process_group_ranks(resolve_process_group(other_name))
    return len({*own} & {*other}) > 1


def is_live_group(group, name: str) -> bool:
    """Return True if the process group of this name is still `group`.

    It was not destroyed, its name not reused, and it was made by this process.
    """
    try:
        return resolve_process_group(name) is group and group not in _of_parent
    except (LookupError, RuntimeError, ValueError):
        return False


def fate_of(group) -> str:
    """Return why a group is not live, after its name."""
    if group in _of_parent:
        return "is one of the process that this one was forked from, which no rank answers here"
    return "was destroyed"


def gone(whose: str, name: str, group=None) -> str:
    """Return the error about a shard whose group, if it is known, is not live."""
    return f"{whose} {name!r} {fate_of(group)}: make a VocabShard of a group that exists"


def live_group(name: str, world_size: int) -> dist.ProcessGroup:
    """Return the process group of a shard that is known by its name and size alone.

    ValueError if it is not live, which a group of another size that has its name shows, too. One of
    the same size does not: who still has the shard asks `VocabShard.expect_live_group` first.
    """
    try:
        group = resolve_process_group(name)
    except (LookupError, RuntimeError, ValueError) as error:
        raise ValueError(gone("the shard's process group", name)) from error
    if group in _of_parent:
        raise ValueError(gone("the shard's process group", name, group))
    if group.size() != world_size:
        was = f"the shard's process group, of {world_size} ranks, now of {group.size()},"
        raise ValueError(gone(was, name))
    return group


def expect_live(group, name: str = "group"):
    """Raise ValueError if a process group of several ranks was destroyed, or came by a fork."""
    if group is None or group.size() == 1 or torch.compiler.is_compiling():
        return
    if not is_live_group(group, group.group_name):
        raise ValueError(
            f"{name} must be a process group that exists, got {group.group_name!r}, which "
            f"{fate_of(group)}: pass one of those that exist now"
        )


def expect_group(group, name: str = "group"):
    """Raise TypeError or ValueError unless it is None, or a live process group with this rank."""
    if group is None or isinstance(group, dist.ProcessGroup):
        expect_live(group, name)
        return
    if type(group).__name__ == "DeviceMesh":
        raise TypeError(
            f"{name} must be a process group, got a DeviceMesh: pass mesh.get_group(name of a "
            "dimension); a shard is VocabShard.from_mesh(mesh, ..)"
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # what torch gives to ranks that are no members
        raise ValueError(
            f"this rank must be a member of {name}, got torch's GroupMember.NON_GROUP_MEMBER"
        )
    said = ""
    if isinstance(group, (list, tuple)):
        said = ": torch.distributed.new_group(ranks), which every rank of the job calls"
    elif isinstance(group, str):
        said = f": of a mesh's dimension, mesh.get_group({group!r})"
    raise TypeError(f"{name} must be a process group or None, got {group!r}{said}")


Group: TypeAlias = Annotated[
    Any, CheckedBy("a process group, or None", lambda name, x: expect_group(x, name))
]
