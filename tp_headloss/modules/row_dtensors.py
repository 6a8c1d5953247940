"""One rank's rows of a vocabulary matrix as a DTensor, and what its mesh must be."""

from __future__ import annotations

import torch
import torch.distributed as dist

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
    ranks, expected = mesh.mesh.flatten().tolist(), _ranks_of(shard)
    if len(ranks) != shard.world_size or expected not in (None, ranks):
        raise ValueError(
            f"mesh must have the ranks of the shard's group, {expected or 1}, got {ranks}"
            f" (dimension {names[0]!r})"
        )


def _ranks_of(shard: VocabShard) -> list[int] | None:
    return None if shard.group is None else dist.get_process_group_ranks(shard.group)


def expect_sharded_over(shard: VocabShard, x, what: str):
    """Raise ValueError for a DTensor that is not sharded over the shard's group: `fully_shard` has
    taken its rows for all of the matrix."""
    mesh, expected = x.device_mesh, _ranks_of(shard)
    if expected is None:
        return
    found = [dist.get_process_group_ranks(mesh.get_group(i)) for i in range(mesh.ndim)]
    if expected not in found:
        raise ValueError(
            f"{what}: must be sharded over the ranks {expected} of the shard's group, got a DTensor "
            f"over {found}: call to_dtensor(mesh['tp']) before fully_shard(.., mesh=mesh['dp'])"
        )


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
