"""Meshes that `to_dtensor` refuses, and rows that `fully_shard` or DDP has taken for replicated."""

from functools import partial

import pytest
import torch
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tp_headloss import Init, VocabParallelEmbedding, VocabParallelHead, VocabShard, clip_grad_norm_

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


def loss_of(module, kind=None):
    """A number that depends on every row of the vocabulary, of a module or of a wrapper of that
    kind of module."""
    if kind is VocabParallelHead or isinstance(module, VocabParallelHead):
        hidden = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
        return module(hidden, torch.arange(8)).loss
    return module(torch.arange(61)).square().mean()


def made(Module, shard):
    return Module(16, shard, init=Init(1.0, seed=1), device="cpu")


def sharded_over_the_vocabulary(group, device):
    """Meshes with ranks that share the vocabulary, of which `fully_shard` makes a DTensor without
    being told. The module stays as it was."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    everybody = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    cases = [(both, "tp", x) for x in (None, everybody, both, both["tp"])]
    cases += [(everybody, "all", x) for x in (None, everybody, both, both["dp"], both["tp"])]
    for mesh, dim, wrong in cases:
        shard = VocabShard.from_mesh(mesh, 61, dim, 64)
        for Module in MODULES:
            expected = loss_of(made(Module, VocabShard.from_group(None, 61, 64)))
            for is_wrapped in (False, True):
                module = made(Module, shard)
                outer = torch.nn.Sequential(module) if is_wrapped else module
                match = r"must be sharded over the ranks .* call to_dtensor\(mesh\['tp'\]\) before"
                refused(ValueError, match, partial(fully_shard, outer, mesh=wrong))
                torch.testing.assert_close(loss_of(module), expected)
    return True


@pytest.mark.skipif(torch.cuda.is_available(), reason="the meshes are of CPUs")
def test_rows_of_other_ids_are_never_fully_sharded_as_if_they_were_one_matrix():
    assert on_ranks(4, sharded_over_the_vocabulary) == [True] * 4


def replicated_over_the_vocabulary(group, device):
    """Groups of DDP with ranks that share the vocabulary, of which it makes replicas without being
    told; and those of data parallelism, or parameters that it leaves alone, with which it is right."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shard = VocabShard.from_mesh(mesh, 61, "tp", 64)
    calls = [(Module, partial(loss_of, kind=Module)) for Module in MODULES]
    calls.append((VocabParallelHead, lambda head: head(torch.ones(2, 16)).sum()))
    for Module, call in calls:
        expected = call(made(Module, shard))
        for wrong in (None, mesh.get_group("tp")):
            wrapped = DistributedDataParallel(made(Module, shard), process_group=wrong)
            match = r"\['weight'\] must be replicated by DDP over data-parallel ranks alone"
            refused(ValueError, match, partial(call, wrapped))
        right = DistributedDataParallel(made(Module, shard), process_group=mesh.get_group("dp"))
        torch.testing.assert_close(call(right), expected)
        model = torch.nn.Sequential(made(Module, shard), torch.nn.Linear(1, 1))
        model.forward = model[0].forward
        model._ddp_params_and_buffers_to_ignore = ["0.weight"]
        torch.testing.assert_close(call(DistributedDataParallel(model)), expected)
    return True


@pytest.mark.skipif(torch.cuda.is_available(), reason="the meshes are of CPUs")
def test_rows_of_other_ids_are_never_replicated():
    assert on_ranks(4, replicated_over_the_vocabulary) == [True] * 4


def norms(group, device):
    """The gradients' norm of a head that FSDP2 cuts over data-parallel ranks, told of the others or
    not; its forward leaves the parameters gathered or not."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shard, found = VocabShard.from_mesh(mesh, 61, "tp", 64), []
    for is_told in (True, False):
        for reshard in (True, False):
            module = made(VocabParallelHead, shard)
            module = module.to_dtensor(mesh["tp"]) if is_told else module
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=reshard)
            loss_of(module).backward()
            found.append(float(clip_grad_norm_(module.parameters(), 1e9)))
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="the meshes are of CPUs")
def test_the_norm_of_rows_that_are_fully_sharded_is_that_of_the_matrix():
    module = made(VocabParallelHead, VocabShard.from_group(None, 61, 64))
    loss_of(module).backward()
    expected = float(clip_grad_norm_(module.parameters(), 1e9))
    assert on_ranks(4, norms) == [pytest.approx([expected] * 4)] * 4
