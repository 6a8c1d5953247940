"""One rank's rows of a vocabulary matrix as a DTensor, and what its mesh must be."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..call.subclasses import is_dtensor
from ..ranks.groups import resolve_process_group
from ..ranks.shard import VocabShard


def expect_mesh_of(shard: VocabShard, mesh):
    """Raise TypeError or ValueError for anything but a mesh of one dimension, of the shard's ranks."""
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, such as mesh['tp'], got {type(mesh).__name__}")
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh must have one dimension, that of the shard's group, got {names}: pass mesh['tp'] "
            "or what it is called"
        )
    ranks, expected = mesh.mesh.flatten().tolist(), ranks_of(shard)
    if len(ranks) != shard.world_size or (expected and expected != ranks):
        raise ValueError(
            f"mesh must have the ranks of the shard's group, {expected or 1}, got {ranks}"
            f" (dimension {names[0]!r})"
        )


def ranks_of(shard: VocabShard) -> list[int]:
    """Return the ranks of the shard's group, none if the vocabulary is not sharded.

    ValueError if the group was destroyed.
    """
    shard.expect_live_group()
    return [] if shard.group is None else dist.get_process_group_ranks(shard.group)


def expect_sharded_over(shard: VocabShard, x, what: str):
    """Raise ValueError for a DTensor that is not the matrix, sharded over the shard's group:
    `fully_shard` has taken its rows for all of the matrix."""
    if shard.world_size > 1 and not _is_matrix(shard, x):
        raise ValueError(f"{what}: {_why_no_matrix(shard, x)}")


def expect_no_rows_of_other_ids(shard: VocabShard, x, name: str):
    """Raise ValueError for a DTensor whose parts come from ranks that share the vocabulary, unless
    it is the matrix. Plain tensors and None are not looked at.

    `fully_shard` makes such a parameter over its default mesh, of all ranks: it takes the rows of
    each rank for the same ones, and gathers and averages rows of different ids. Ranks of other
    shards, those of data parallelism, have the same rows.
    """
    if not is_dtensor(x) or shard.world_size == 1 or _is_matrix(shard, x):
        return
    if len({*_mesh_ranks(x)} & {*ranks_of(shard)}) > 1:
        raise ValueError(
            f"{name} {_why_no_matrix(shard, x)}; without data-parallel ranks leave the module out, "
            "fully_shard(.., ignored_params={*module.parameters()})"
        )


def is_over_group(x, group_name: str) -> bool:
    """Return True if the ranks of one dimension of a DTensor's mesh are those of a group."""
    ranks = dist.get_process_group_ranks(resolve_process_group(group_name))
    return ranks in _dimension_ranks(x)


def _is_matrix(shard: VocabShard, x) -> bool:
    """Return True for a DTensor of all rows, one dimension of whose mesh has the shard's ranks."""
    return x.shape[0] == shard.padded_size and is_over_group(x, shard.group_name)


def _why_no_matrix(shard: VocabShard, x) -> str:
    return (
        f"must be sharded over the ranks {ranks_of(shard)} of the shard's group, "
        f"{shard.padded_size or shard.vocab_size} rows in all, got a DTensor of {x.shape[0]} rows "
        f"over the ranks {_mesh_ranks(x)}: call to_dtensor(mesh['tp']) before "
        "fully_shard(.., mesh=mesh['dp'])"
    )


def _mesh_ranks(x) -> list[int]:
    return x.device_mesh.mesh.flatten().tolist()


def _dimension_ranks(x) -> list[list[int]]:
    """Return the ranks of this rank's group of each dimension of a DTensor's mesh."""
    mesh = x.device_mesh
    return [dist.get_process_group_ranks(mesh.get_group(dim)) for dim in range(mesh.ndim)]


def as_dtensor(rows: torch.Tensor, shard: VocabShard, mesh=None):
    """Return a DTensor of the whole matrix whose local part is this rank's rows [width, ..].

    There is no communication and no copy.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    if shard.padded_size is None:
        raise ValueError(
            "only even cuts, those of VocabShard.from_group, can be a DTensor, got "
            f"[{shard.start}, {shard.stop}): save the rows of each rank, module.weight, by "
            "themselves"
        )
    if mesh is None:
        assert shard.group is not None  # without one, the rows are the matrix
        mesh = DeviceMesh.from_group(shard.group, rows.device.type)
    shape = torch.Size([shard.padded_size, *rows.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        rows.contiguous(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
    )
