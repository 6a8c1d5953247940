"""Meshes that `to_dtensor` refuses, and rows that `fully_shard` has taken for replicated."""

from functools import partial

import pytest
import torch
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tp_headloss import VocabParallelEmbedding, VocabParallelHead, VocabShard

MODULES = VocabParallelHead, VocabParallelEmbedding


def refused(kind, match, call):
    with pytest.raises(kind, match=match):
        call()


def wrong_meshes(group, device):
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    shard = VocabShard.from_mesh(mesh, 61, "tp", 64)
    for Module in MODULES:
        module = Module(16, shard)
        for given, kind, match in (
            (group, TypeError, "must be a DeviceMesh, .*got ProcessGroup"),
            (mesh, ValueError, r"must have one dimension.*\('dp', 'tp'\)"),
            (mesh["dp"], ValueError, "the ranks of the shard's group.*'dp'"),
            (init_device_mesh(device.type, (4,)), ValueError, "the ranks of the shard's group"),
        ):
            refused(kind, match, partial(module.to_dtensor, given))
        assert type(module.weight.data) is torch.Tensor  # it lost nothing
        assert module.to_dtensor(mesh["tp"]).weight.full_tensor().shape == (64, 16)
    return True


def sharded_too_early(group, device):
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    shard = VocabShard.from_mesh(mesh, 61, "tp", 64)
    for Module in MODULES:
        module = Module(16, shard)
        fully_shard(module, mesh=mesh["dp"])
        for call in (partial(module.to_dtensor, mesh["tp"]), module.state_dict):
            refused(ValueError, r"call to_dtensor\(mesh\['tp'\]\) before fully_shard", call)
        module = Module(16, shard).to_dtensor(mesh["tp"])
        fully_shard(module, mesh=mesh["dp"])
        assert module.to_dtensor(mesh["tp"]).state_dict()["weight"].shape == (64, 16)
    return True


def test_to_dtensor_takes_the_mesh_of_the_group_alone():
    assert all(on_ranks(4, wrong_meshes))


def test_rows_that_were_fully_sharded_before_are_no_matrix():
    assert all(on_ranks(4, sharded_too_early))
