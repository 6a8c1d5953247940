"""Marks in the metadata of a state_dict that say which rows its tensors hold.

A DTensor that torch.save wrote is one rank's part, and does not say which: another rank would take
it for its own. So the metadata of a state_dict, which torch.save keeps and
`torch.distributed.checkpoint` does not need, names the rows and the place of the rank that had
them.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.distributed as dist

from ..call.subclasses import is_dtensor
from ..ranks.shard import VocabShard

REMEDY = (
    "torch.save on every rank, each to its own file, or save all rows at once with "
    "torch.distributed.checkpoint or get_model_state_dict(.., "
    "StateDictOptions(full_state_dict=True))"
)
# in the metadata of a module: [start, stop, place of the rank in the mesh]
HELD = "tp_headloss_rows"

_log = logging.getLogger("tp_headloss")


def describe(metadata: dict, shard: VocabShard, weight):
    """Write into a module's metadata which rows its state_dict has. weight: the entry, or None."""
    place = _place(weight.device_mesh) if is_dtensor(weight) else None
    metadata[HELD] = [shard.start, shard.stop, place]


def are_own(metadata: dict, shard: VocabShard, given) -> bool:
    """Return True for a DTensor whose local part is this rank's rows.

    The group with which it was saved may be another one.
    """
    if HELD not in metadata or not is_dtensor(given) or given.device_mesh.ndim > 1:
        return False
    held = tuple(metadata[HELD][:2]) == (shard.start, shard.stop)
    if not held or given.shape[:1] != (shard.padded_size,):
        return False
    return given.to_local().shape[0] == shard.width


def why_not_own(metadata: dict, shard: VocabShard, given) -> str | None:
    """Return why an entry of a state_dict is another rank's part of the matrix.

    None if it is this rank's, or a whole matrix, or does not say.
    """
    if HELD not in metadata:
        return _why_not_here(shard, given) if is_dtensor(given) else None
    start, stop, place = metadata[HELD]
    if is_dtensor(given):
        is_own = place is None or place == _place(given.device_mesh)
    else:
        is_part = given.dim() > 0 and given.shape[0] == stop - start
        is_part = is_part and (start > 0 or stop < shard.vocab_size)
        is_own = not is_part or (start, stop) == (shard.start, shard.stop)
    if is_own:
        return None
    return (
        f"must be the rows [{shard.start}, {shard.stop}) of this rank, got a file of another one, "
        f"which holds [{start}, {stop}) alone: {REMEDY}"
    )


def _why_not_here(shard: VocabShard, given) -> str | None:
    """Return what `why_not_own` does, where a state_dict has lost its metadata.

    A copy to a plain dict has. The DTensor's mesh remembers the place of the process that wrote it.
    """
    mesh = given.device_mesh
    place = _place(mesh)
    written_at = mesh.get_coordinate()
    sharding = [dim for dim, placement in enumerate(given.placements) if placement.is_shard()]
    is_whole = all(mesh.size(dim) == 1 for dim in sharding)
    if is_whole or written_at is None or place == list(written_at):
        return None
    here = "no such mesh runs" if place is None else f"this one is at {place}"
    return (
        f"must be the rows [{shard.start}, {shard.stop}) of this rank, got a file of another one, "
        f"which was at {list(written_at)} of its device mesh of {mesh.size()}, where {here}: "
        f"{REMEDY}"
    )


def _place(mesh) -> list[int] | None:
    """Return where this process stands in a mesh of the processes that run now, or None.

    A mesh that was read from a file says where the process stood that wrote it.
    """
    if not dist.is_initialized() or mesh.size() > dist.get_world_size():
        return None
    if mesh.ndim == 1 and mesh.size() != dist.get_world_size(mesh.get_group()):
        return None
    found = (mesh.mesh == dist.get_rank()).nonzero().tolist()
    return found[0] if found else None


@functools.cache
def say_what_is_not_covered():
    """Log, once in a process, that a state_dict's DTensors do not make those of an optimizer."""
    _log.warning(
        "state_dict describes this rank's rows as DTensors, but the parameters are plain, and so "
        "is the state of an optimizer: torch.distributed.checkpoint would save one rank's moments "
        "for all ranks. Call module.to_dtensor(mesh) before the optimizer is made, or save each "
        "rank's optimizer state in a file of its own"
    )


def with_padding(whole: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Return a whole matrix with the rows of padding that the shards have."""
    assert shard.padded_size is not None
    padded = whole.new_zeros(shard.padded_size, *whole.shape[1:])
    padded[: shard.vocab_size] = whole[: shard.vocab_size]
    return padded
