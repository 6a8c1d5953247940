"""Symmetric memory carries the bits of the gather. Deselected without GPUs."""

import logging

import pytest
import torch
from cuda_problem import V, results
from ranks import on_ranks

from tp_headloss import VocabShard
from tp_headloss.engine.transports import symmetric_memory

pytestmark = pytest.mark.cuda


def symmetric_run(group, device):
    """Growing and shrinking batches, on two streams that take turns, with one rank far behind the
    other."""
    shard, other = VocabShard.from_group(group, V), torch.cuda.Stream(device)
    equal, log = 0, []
    for i, n in enumerate([8, 300, 64, 1, 2048, 2047, 16, 0, 512, 4096] * 3):
        generator = torch.Generator(device).manual_seed(i)
        x = torch.randn(n, shard.width, device=device, generator=generator).bfloat16()
        labels = torch.randint(0, V, (n,), device=device, generator=generator)
        expected = results(x, labels, shard, "gather")
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other if i % 3 == 1 else torch.cuda.current_stream()):
            if torch.distributed.get_rank(group) == i % 2:
                torch.cuda._sleep(2_000_000)
            log = [results(x, labels, shard, "symm_mem") for _ in range(4)]
        torch.cuda.current_stream().wait_stream(other)
        equal += all(torch.equal(a, b) for result in log for a, b in zip(expected, result))
    known = symmetric_memory._groups[group.group_name]
    return equal, known.obstacle, len(known.memories[False])


@pytest.mark.parametrize("world_size", [2, 4])
def test_symmetric_memory_carries_the_same_bits_as_the_gather(world_size):
    for equal, obstacle, memories in on_ranks(world_size, symmetric_run):
        assert equal == 30
        assert obstacle is None and memories > 1  # it was used, and grew


def two_groups_run(group, device):
    """A group of all ranks and one of each half, interleaved without waiting."""
    import torch.distributed as dist

    size = dist.get_world_size(group) // 2
    halves = [dist.new_group([*range(first, first + size)]) for first in (0, size)]
    groups = [group, halves[dist.get_rank(group) // size]]
    equal = 0
    for i in range(10):
        runs = []
        for each in groups:
            shard = VocabShard.from_group(each, V)
            x = torch.randn(
                64, shard.width, device=device, generator=torch.Generator(device).manual_seed(i)
            )
            labels = torch.randint(
                0, V, (64,), device=device, generator=torch.Generator(device).manual_seed(i)
            )
            runs.append(
                [results(x, labels, shard, transport) for transport in ("symm_mem", "gather")]
            )
        equal += all(torch.equal(a, b) for run in runs for a, b in zip(*run))
    return equal


@pytest.mark.parametrize("world_size", [4, 8])
def test_symmetric_memory_of_overlapping_groups_is_separate(world_size):
    assert on_ranks(world_size, two_groups_run) == [10] * world_size


def met_before_run(group, device):
    """A new group, of which one rank has made symmetric memory without the others."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size(group))][
        dist.get_rank(group)
    ]
    if dist.get_rank(group) == 0:
        symm_mem.rendezvous(symm_mem.empty(64, device=device), alone)
    shard = VocabShard.from_group(dist.new_group(), V)
    x, labels = torch.randn(8, shard.width, device=device), torch.randint(0, V, (8,), device=device)
    same = [
        torch.equal(*pair)
        for pair in zip(*(results(x, labels, shard, way) for way in ("symm_mem", "gather")))
    ]
    return all(same), symmetric_memory.obstacle(shard.group_name)


def test_ranks_meet_whatever_memory_each_had_before():
    assert on_ranks(2, met_before_run) == [(True, None)] * 2


def fallback_run(group, device):
    """One rank cannot: all gather, and say so once."""
    symmetric_memory._groups.pop(group.group_name, None)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    symmetric_memory._log.addHandler(handler)
    broken = symmetric_memory.SymmetricMemory.__init__
    if torch.distributed.get_rank(group) == 1:
        symmetric_memory.SymmetricMemory.__init__ = lambda *_: (_ for _ in ()).throw(
            RuntimeError("no peer access")
        )
    shard = VocabShard.from_group(group, V)
    x, labels = torch.randn(8, shard.width, device=device), torch.randint(0, V, (8,), device=device)
    try:
        pairs = [
            zip(results(x, labels, shard, "symm_mem"), results(x, labels, shard, "gather"))
            for _ in range(3)
        ]
    finally:
        symmetric_memory.SymmetricMemory.__init__ = broken
        symmetric_memory._log.removeHandler(handler)
        symmetric_memory._groups.pop(group.group_name)
    return all(torch.equal(a, b) for pair in pairs for a, b in pair), lines


def test_a_rank_without_symmetric_memory_makes_all_gather_with_one_log_line():
    for equal, lines in on_ranks(2, fallback_run):
        assert equal and len(lines) == 1 and "no peer access" in lines[0]
