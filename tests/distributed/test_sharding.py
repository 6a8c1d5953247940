"""Sharded equals unsharded: every layout of shards, and the same bits at every group size where
that is promised."""

import copy
import dataclasses
import gc
import json
import os
import pickle
import signal
from types import SimpleNamespace
from typing import NamedTuple

import oracle
import pytest
import torch
import torch.distributed as dist
from known import TRAINED
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh

import tp_headloss as hl
from tp_headloss.engine.backend import load_backend
from tp_headloss.engine.reductions import FusedReduction, StatisticValue, SumsPlan
from tp_headloss.engine.request import Facts, Request, Tensors
from tp_headloss.engine.transports.symmetric_memory import SymmetricMemory
from tp_headloss.engine.ways.prepared_triton import PreparedLaunches
from tp_headloss.statistics import layout_of

WANT = ("entropy", "total", "argmax")
WORLDS = [2, 3, 4, 8]


class Case(NamedTuple):
    vocab_size: int
    cuts: list[int]  # of the padded vocabulary, one more than ranks
    dtype: torch.dtype = torch.float32
    backend: str = "triton"
    transport: str = "gather"
    want: tuple = WANT
    # labels sit on both sides of these (default: of the shards' cuts)
    label_cuts: list[int] | None = None


def layout_case(layout, world_size, **kwargs):
    if layout == "empty":  # the second shard and, but for two ranks, the last one
        cuts = [0, 301, 301, *(301 + 31 * r for r in range(1, world_size - 2)), 523, 523]
        return Case(523, cuts[:world_size] + [523], **kwargs)
    sizes = {"even": (1024, 1024), "padded": (1000, 1024), "uneven": (1003, 1003), "tiny": (17, 17)}
    vocab_size, padded = sizes[layout]
    step = -(-padded // world_size)
    return Case(vocab_size, [min(r * step, padded) for r in range(world_size + 1)], **kwargs)


def problem(case):
    """Logits and labels: on shard edges, ignored, confident, and on a row whose upper half is
    -inf."""
    edges = {
        min(max(e, 0), case.vocab_size - 1)
        for c in case.label_cuts or case.cuts
        for e in (c - 1, c)
    }
    labels = torch.tensor([*sorted(edges), -100, case.vocab_size // 2, 0])
    x = torch.randn(len(labels), case.vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    x[-1, 0] = 40.0
    x[0, case.vocab_size // 2 :] = -torch.inf
    return x.to(case.dtype), labels


def shard_run(group, device, case):
    cuts = case.cuts if group is not None else [0, case.cuts[-1]]
    shard = hl.VocabShard.from_boundaries(cuts, case.vocab_size, group)
    x, labels = problem(case)
    # padding holds rubbish
    padded = torch.nn.functional.pad(x, (0, cuts[-1] - case.vocab_size), value=123.0)
    local = padded[:, shard.start : shard.stop].contiguous().to(device).requires_grad_()
    stats = hl.vocab_statistics(
        local, labels.to(device), shard=shard, want=case.want,
        transform=hl.Transform(scale=1.25, temperature=torch.linspace(0.5, 1.5, len(labels)).to(device)),
        options=hl.Options(backend=case.backend, transport=case.transport),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    names = [name for name in TRAINED if getattr(stats, name) is not None]
    upstream = {name: torch.randn(len(labels), generator=generator) for name in names}
    sum((getattr(stats, name) * upstream[name].to(device)).sum() for name in names).backward()
    values = {
        name: getattr(stats, name).detach().cpu()
        for name in names + ["argmax"] * ("argmax" in case.want)
    }
    return values, local.grad.cpu(), shard.tp_invariant, upstream


def bits(x):
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def assert_truth(case, results):
    (values, _, _, upstream), grad = results[0], torch.cat([result[1] for result in results], 1)
    x, labels = problem(case)
    keep = labels != -100
    z, slope = oracle.transform(
        x[keep], scale=1.25, temperature=torch.linspace(0.5, 1.5, len(labels))[keep]
    )
    truth = oracle.statistics(z, labels[keep])
    for name in values:
        assert (values[name][~keep] == (-1 if name == "argmax" else 0)).all()
        torch.testing.assert_close(
            values[name][keep].double(), truth[name].double(), rtol=2e-6, atol=2e-5
        )
    expected = torch.zeros(len(labels), case.cuts[-1], dtype=torch.float64)
    upstream = {name: g[keep] for name, g in upstream.items()}
    expected[keep, : case.vocab_size] = oracle.gradient(z, slope, labels[keep], upstream)
    rtol = {torch.float32: 3e-5, torch.bfloat16: 2.0**-8}[case.dtype]
    torch.testing.assert_close(grad.double(), expected, rtol=rtol, atol=2e-6)
    assert not grad[:, case.vocab_size :].any()


def assert_same_bits(results, others):
    """Every rank of both has the same statistics, and the concatenated gradients are equal, bit for
    bit."""
    for values, *_ in results:
        for other, *_ in others:
            assert all(torch.equal(bits(values[name]), bits(other[name])) for name in values)
    a, b = (torch.cat([result[1] for result in r], 1) for r in (results, others))
    assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize(
    "layout, dtype",
    [("even", torch.bfloat16), ("padded", torch.float32), ("tiny", torch.bfloat16), ("uneven", torch.float32),
     ("uneven", torch.bfloat16), ("empty", torch.float32)],
)  # fmt: skip
@pytest.mark.parametrize("world_size", WORLDS)
def test_sharded_equals_unsharded(world_size, layout, dtype, backend):
    case = layout_case(layout, world_size, dtype=dtype, backend=backend)
    results = on_ranks(world_size, shard_run, case)
    assert_same_bits(results, results)  # between ranks, always
    assert_truth(case, results)
    invariant = results[0][2]
    assert invariant == (layout in ("even", "padded") and world_size != 3)
    if invariant and backend == "triton":
        assert_same_bits(results, on_ranks(1, shard_run, case))


def test_six_ranks_with_uneven_and_empty_shards():
    for layout in ("uneven", "empty"):
        case = layout_case(layout, 6, dtype=torch.float32, backend="torch")
        results = on_ranks(6, shard_run, case)
        assert_same_bits(results, results)
        assert_truth(case, results)


REALISTIC = [32000, 50304] + [128256, 151936, 152064, 262144] * torch.cuda.is_available()


@pytest.mark.parametrize("vocab_size", REALISTIC)
def test_same_bits_at_tp_1_2_4_8(vocab_size):
    """Loss, every statistic and the gradient of the triton backend, at realistic sizes."""
    eighths = [r * vocab_size // 8 for r in range(9)]
    for dtype, want in ((torch.float32, ("entropy",)), (torch.bfloat16, ())):
        case = Case(vocab_size, eighths, dtype, want=want, label_cuts=eighths[::4])
        alone = on_ranks(1, shard_run, case)
        for world_size in (2, 4, 8):
            if not torch.cuda.is_available() or torch.cuda.device_count() >= world_size:
                cut = case._replace(cuts=eighths[:: 8 // world_size])
                assert_same_bits(on_ranks(world_size, shard_run, cut), alone)


def far_run(group, device, transport, backend):
    shard = hl.VocabShard.from_group(group, 16)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)) + torch.tensor(
        [[0.0], [7e3], [-7e3]]
    )
    local = x[:, shard.start : shard.stop].to(device).requires_grad_()
    labels = torch.tensor([3, 3, 12], device=device)
    want = "collision", "set_entropy", "reverse_kl", "jsd", "log_probs_at"
    of_ids = torch.stack([labels, labels - 1], 1)
    stats = hl.vocab_statistics(
        local, labels, shard=shard, want=want, teacher=hl.Teacher(-local.detach()), sets=hl.IdSets(of_ids), ids=of_ids,
        options=hl.Options(transport=transport, backend=backend),
    )  # fmt: skip
    values = [getattr(stats, name) for name in ("lse", "log_prob", *want)]
    return [*values, *torch.autograd.grad(sum(x.sum() for x in values), local)]


def test_the_sum_transport_has_every_statistic_of_logits_of_any_size(backend):
    summed, gathered = (on_ranks(2, far_run, transport, backend) for transport in ("sum", "gather"))
    torch.testing.assert_close(summed, gathered, rtol=1e-6, atol=1e-6)
    assert all(x.isfinite().all() for x in summed[0])


def mesh_run(group, device):
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    shard = hl.VocabShard.from_mesh(mesh, 100, "tp", padded_size=128)
    by_group = hl.VocabShard.from_group(mesh.get_group("tp"), 100, 128)
    with pytest.raises(ValueError, match="dp"):
        hl.VocabShard.from_mesh(mesh, 100)
    for wrong in ("pp", 2, True):
        with pytest.raises((TypeError, ValueError), match=r"dim must be a .*got"):
            hl.VocabShard.from_mesh(mesh, 100, wrong)
    mesh._flatten("all")
    assert hl.VocabShard.from_mesh(mesh, 100, "all").world_size == 4
    replica = mesh.get_local_rank("dp")
    x = torch.randn(5, 100, generator=torch.Generator().manual_seed(replica))
    labels = torch.arange(5) * 20 + replica
    padded = torch.nn.functional.pad(x, (0, 28))[:, shard.start : shard.stop].to(device)
    stats = hl.vocab_statistics(padded, labels.to(device), shard=shard)
    expected = x.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    return (shard.start, shard.stop, shard == by_group), stats.log_prob.cpu(), expected


def test_mesh_dimensions_and_concurrent_groups():
    """2 x 2: each data-parallel replica has its own tensor-parallel group and its own tokens."""
    for rank, (facts, log_prob, expected) in enumerate(on_ranks(4, mesh_run)):
        assert facts == (64 * (rank % 2), 64 * (rank % 2) + 64, True)
        torch.testing.assert_close(log_prob, expected)


def subgroup_run(group, device):
    sub = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        try:
            return hl.VocabShard.from_group(sub, 30)
        except ValueError as error:
            return str(error)
    shard = hl.VocabShard.from_group(sub, 30)
    x = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 10, 29, 15])
    stats = hl.vocab_statistics(
        x[:, shard.start : shard.stop].to(device), labels.to(device), shard=shard
    )
    return stats.log_prob.cpu(), x.log_softmax(-1).gather(1, labels[:, None])[:, 0]


def test_subgroups_use_their_own_ranks_and_outsiders_are_refused():
    results = on_ranks(4, subgroup_run)
    assert "must be a member" in results[0] and "must be a member" in results[2]
    for log_prob, expected in results[1::2]:
        torch.testing.assert_close(log_prob, expected)


def test_invariance_is_derived_from_the_cuts_never_claimed():
    shard = hl.VocabShard.from_group(None, 256)
    assert shard.tp_invariant and dataclasses.replace(shard, stop=300).tp_invariant
    with pytest.raises(TypeError):
        hl.VocabShard(0, 256, 256, None, True)


@pytest.mark.parametrize(
    "want", [("entropy",), ("entropy", "prepared"), ("topk_forward_kl", "tail_log_mass")]
)
@pytest.mark.parametrize("turn", [0, 1, 7])
def test_packets_in_memory_of_their_ranks_merge_to_the_same_bits(turn, want, device):
    """Symmetric memory without its group: slots by turn, peers by address, turns handed over."""
    is_prepared, want = "prepared" in want, tuple(name for name in want if name != "prepared")
    backend, world_size, slot, rows = (
        load_backend("triton"),
        4,
        1024,
        len(layout_of(True, want).packet),
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 256, generator=generator).to(device)
    labels = torch.tensor([0, 70, 130, 255, -100, 31], device=device)
    entries = (None, None)
    if "entropy" not in want:
        ids = torch.randint(0, 256, (6, 9), generator=generator).to(device)
        entries = backend.entries(
            ids, torch.randn(6, 9, generator=generator).to(device) - 3, None, 1.0, False, 256
        )
    buffers = [torch.full((2 * slot,), torch.nan, device=device) for _ in range(world_size)]
    peers = torch.tensor([b.data_ptr() for b in buffers], device=device)
    turns = [torch.tensor([turn, -5], dtype=torch.int32, device=device) for _ in range(world_size)]
    gathered, size, memories, requests = (
        torch.empty(8, rows, 6, device=device),
        2 * rows * 6,
        [],
        [],
    )
    for rank in range(world_size):
        facts = Facts(
            64 * rank, 64, 256, 32, 2, 4, "", want, 1.0, 0.0, 1.0, -100, "triton", "gather"
        )
        memory = object.__new__(SymmetricMemory)
        memory.slot, memory.buffer, memory.peers, memory.turns = (
            slot,
            buffers[rank],
            peers,
            turns[rank],
        )
        memory.handle, memory.timeout_ms = SimpleNamespace(barrier=lambda **_: None), 1
        memory._take_turns = lambda: None
        memories.append(memory)
        given = Tensors(
            x[:, 64 * rank : 64 * rank + 64], labels, entries=entries[0], entry_log_probs=entries[1]
        )
        request, launches = Request.of(given, facts), None
        backend.local_statistics(gathered[2 * rank : 2 * rank + 2], request)
        if is_prepared:
            plan = SumsPlan.from_functions([StatisticValue("log_prob", negative=True)], [1.0])
            launches = PreparedLaunches(request, FusedReduction(plan, None, None), inplace=False)
        requests.append((request, launches))
        packets = memory.write(request, launches)
        assert packets.shape == (2, rows, 6) and packets.data_ptr() == buffers[rank].data_ptr()
        used = buffers[rank].view(2, slot)[turn % 2, :size]
        assert torch.equal(used, gathered[2 * rank : 2 * rank + 2].flatten())
        assert buffers[rank].isnan().sum() == 2 * slot - size
    expected = backend.merge_packets(gathered, request)
    for rank, memory in enumerate(memories):
        merged = memory.merge(buffers[rank][:size].view(2, rows, 6), *requests[rank])
        assert all(torch.equal(a, b) for a, b in zip(expected, merged))
        assert turns[rank].tolist() == [turn + 1, turn]


def mixed_layouts_run(group, device):
    """[2, 3, V] of which the ranks differ in memory: transposed, contiguous, empty."""
    rank = dist.get_rank(group)
    shard = hl.VocabShard.from_boundaries([0, 40, 100, 100, 100], 100, group)
    x = torch.randn(2, 3, 100, generator=torch.Generator().manual_seed(2))
    labels = torch.arange(6).view(2, 3) * 19
    local = x[..., shard.start : shard.stop].to(device)
    local = local.transpose(0, 1).contiguous().transpose(0, 1) if rank % 2 else local.contiguous()
    local.requires_grad_()
    stats = hl.vocab_statistics(local, labels.to(device), shard=shard)
    (stats.log_prob * torch.arange(6, device=device).view(2, 3)).sum().backward()
    return stats.log_prob.detach().cpu(), local.grad.cpu()


def test_ranks_whose_logits_lie_differently_in_memory_have_the_same_tokens():
    results = on_ranks(4, mixed_layouts_run)
    x = torch.randn(2, 3, 100, generator=torch.Generator().manual_seed(2)).requires_grad_()
    expected = x.log_softmax(-1).gather(-1, torch.arange(6).view(2, 3, 1) * 19)[..., 0]
    (expected * torch.arange(6).view(2, 3)).sum().backward()
    for log_prob, _ in results:
        torch.testing.assert_close(log_prob, expected.detach())
    torch.testing.assert_close(torch.cat([grad for _, grad in results], -1), x.grad)


def later_calls(group, device):
    """Calls that find a shard's group, each after something was made with it: name -> call."""
    shard = hl.VocabShard.from_group(group, 64)
    x, labels = torch.zeros(2, shard.width, device=device), torch.tensor([1, 2], device=device)
    hidden = torch.zeros(2, 3, device=device, requires_grad=True)
    weight = torch.zeros(shard.width, 3, device=device)
    embedding = hl.VocabParallelEmbedding(4, shard, device=device)
    scattered = hl.VocabParallelEmbedding(4, shard, device=device, sequence_parallel=True)
    # one sweep reduces in its forward
    loss, recompute = hl.HeadLoss(), hl.Linear("recompute")
    head = hl.VocabParallelHead(3, shard, device=device, linear=recompute)
    out = loss.linear(hidden, weight, labels, shard=shard, linear=recompute)
    head_out = head(hidden, labels)
    head_logits, rows = head(hidden), scattered(labels)
    statistics = head.statistics(hidden, labels)
    head.weight.grad = torch.zeros_like(head.weight)
    marked = torch.nn.Parameter(torch.zeros(2, device=device))
    marked.grad, marked.tensor_model_parallel = torch.zeros_like(marked), True
    mask = torch.ones(2, 2, dtype=torch.bool, device=device)
    by_name = torch.ops.tp_headloss.gather_tokens.default
    number, name = shard.world_size, shard.group_name
    mesh = init_device_mesh(device.type, (number,))
    transport = hl.Options(transport="sum")
    return {
        "statistics": lambda: hl.vocab_statistics(x, labels, shard=shard, options=transport),
        "loss": lambda: loss(x, labels, shard=shard),
        "linear": lambda: loss.linear(hidden, weight, labels, shard=shard),
        "topk": lambda: hl.topk_log_probs(x, 2, shard=shard),
        "embedding": lambda: embedding(labels),
        "head": lambda: head(hidden, labels),
        "logits of a head": lambda: head(hidden),
        "backward of a linear loss": out.loss.backward,
        "backward of a head": head_out.loss.backward,
        "backward of a head's logits": head_logits.sum().backward,
        "backward of a head's statistics": statistics.log_prob.sum().backward,
        "backward of an embedding": rows.sum().backward,
        "clip": lambda: hl.clip_grad_norm_(head.parameters(), 1.0),
        "clip, group": lambda: hl.clip_grad_norm_([marked], 1.0, tensor_parallel_group=group),
        "state_dict": head.state_dict,
        "to_dtensor": lambda: head.to_dtensor(mesh),
        "mean_metrics": lambda: hl.mean_metrics(out, group),
        "sequences": lambda: hl.Sequences.from_mask(mask, group=group),
        "another shard": lambda: hl.VocabShard.from_group(group, 64),
        "a program's operator": lambda: by_name(x, number + 1, name),
    }


def messages_of(calls):
    """What each call raises, by name."""
    messages = {}
    for name, call in calls.items():
        try:
            call()
            messages[name] = "returned"
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def destroyed_run(group, device, replaced):
    """Messages of calls whose group is gone, and another has its name if `replaced`."""
    ranks = list(range(dist.get_world_size(group)))
    own = dist.new_group(ranks)
    name, calls = own.group_name, later_calls(own, device)
    dist.barrier(group)  # a rank that is still joining would lose its peer
    dist.destroy_process_group(own)
    if replaced:
        names, other = dist.distributed_c10d._world.pg_names, dist.new_group(ranks)
        torch._C._distributed_c10d._unregister_process_group(other.group_name)
        names[other] = name  # what a world that is made anew does with its counter of names
        torch._C._distributed_c10d._register_process_group(name, other)
    messages = messages_of(calls)
    if replaced:
        torch._C._distributed_c10d._unregister_process_group(name)
        names[other] = other_name = "released"
        torch._C._distributed_c10d._register_process_group(other_name, other)
        dist.barrier(group)
        dist.destroy_process_group(other)
    return messages


@pytest.mark.parametrize("replaced", [True, False])
def test_a_destroyed_group_is_refused_by_whatever_finds_it_later_even_if_its_name_lives_on(
    replaced,
):
    for messages in on_ranks(2, destroyed_run, replaced):
        for call, message in messages.items():
            assert message.startswith("ValueError") and "was destroyed" in message, (call, message)
            assert "exist" in message, (call, message)  # what to pass in its place


def forked_run(group, device):
    """Messages of calls in a forked child, with a group that the parent has; and of one in the
    parent after it."""
    calls = later_calls(group, device)
    ours, its = os.pipe()
    if not os.fork():
        signal.alarm(60)  # of calls that wait, because no rank answers
        os.write(its, json.dumps(messages_of(calls)).encode())
        os._exit(0)
    os.close(its)
    with os.fdopen(ours) as pipe:
        text = pipe.read()
    os.wait()
    calls["statistics"]()
    return json.loads(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a forked child cannot use CUDA")
def test_a_child_that_was_forked_is_refused_its_parents_group():
    for messages in on_ranks(2, forked_run):
        for call, message in messages.items():
            assert message.startswith("ValueError") and "forked" in message, (call, message)


def leaking_run(group, device):
    """Open files after groups have been used and destroyed."""
    ranks, counts = list(range(dist.get_world_size(group))), []
    for _ in range(4):
        own = dist.new_group(ranks)
        shard = hl.VocabShard.from_group(own, 64)
        x = torch.zeros(2, shard.width, device=device, requires_grad=True)
        hl.HeadLoss()(x, torch.tensor([1, 2], device=device), shard=shard).loss.backward()
        hl.VocabParallelHead(4, shard).state_dict()
        dist.destroy_process_group(own)
        del own, shard, x
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_a_destroyed_group_is_freed():
    for counts in on_ranks(2, leaking_run):
        assert counts[-1] <= counts[0], counts


def pickle_run(group, device):
    shard, messages = hl.VocabShard.from_group(group, 64), []
    for value in (shard, hl.VocabParallelHead(4, shard), hl.VocabParallelEmbedding(4, shard)):
        try:
            pickle.dumps(value)
        except TypeError as error:
            messages.append(str(error))
    copies = copy.deepcopy(hl.VocabParallelHead(4, shard)).shard, copy.copy(shard)
    return messages, [c is shard for c in copies]


def test_what_holds_a_process_group_says_so_when_it_is_pickled():
    for messages, same in on_ranks(2, pickle_run):
        assert len(messages) == 3 and all(
            "VocabShard holds a process group" in message for message in messages
        )
        assert same == [True, True]
    whole = hl.VocabShard(0, 8, 8)
    assert pickle.loads(pickle.dumps(whole)) == whole


WANTS = {  # what a merge kernel has variants for
    "entropy": ("entropy", "total", "argmax"), "teacher": ("forward_kl", "reverse_kl", "teacher_entropy", "entropy"),
    "tail": ("topk_forward_kl", "topk_reverse_kl", "topk_log_mass", "tail_log_mass", "tail_entropy"),
    "entries": ("topk_forward_kl", "topk_log_mass"),
}  # fmt: skip


def packets_of(name, group_size, width, device):
    """Packets of so many ranks, one each, of which those beyond the vocabulary are empty; and what
    merges them."""
    backend, want, generator = load_backend("torch"), WANTS[name], torch.Generator().manual_seed(0)
    x, t = (3 * torch.randn(9, 256, generator=generator).to(device) for _ in range(2))
    labels = torch.tensor([0, 70, 130, 255, -100, 31, 64, 63, 300], device=device)
    ids = torch.randint(0, 256, (9, 5), generator=generator).to(device)
    entries = backend.entries(
        ids, torch.randn(9, 5, generator=generator).to(device) - 3, None, 1.0, False, 256
    )
    packets = []
    for rank in range(group_size):
        columns = slice(min(rank * width, 256), min(rank * width + width, 256))
        size = columns.stop - columns.start
        static = 1, group_size, "", want, 1.0, 0.0, 1.0, -100, "triton", "gather"
        facts = Facts(columns.start, size, 256, width, *static)
        given = Tensors(x[:, columns], labels, teacher=t[:, columns] if name == "teacher" else None)
        if name in ("tail", "entries"):
            given = given._replace(entries=entries[0], entry_log_probs=entries[1])
        request = Request.of(given, facts)
        packets.append(torch.empty(1, len(request.layout.packet), 9, device=device))
        backend.local_statistics(packets[-1], request)
    return torch.cat(packets), request


@pytest.mark.parametrize("group_size", [9])
@pytest.mark.parametrize("name", WANTS)
def test_a_loop_over_the_packets_of_many_ranks_gives_the_same_bits(name, group_size, device):
    """Eight ranks' packets are merged without a loop; empty ones of more ranks must not change a
    bit."""
    few = load_backend("triton").merge_packets(*packets_of(name, 8, 32, device))
    many = load_backend("triton").merge_packets(*packets_of(name, group_size, 32, device))
    # an ignored token has one flag per packet
    owners = [a.clone() for a in (few[1][3], many[1][3])]
    assert torch.equal(owners[0] == 1, owners[1] == 1)
    few[1][3], many[1][3] = 0.0, 0.0
    assert all(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in zip(few, many))


@pytest.mark.parametrize("name", WANTS)
def test_many_packets_with_columns_merge_as_plain_torch_does(name, device):
    packets, request = packets_of(name, 64, 4, device)
    ours = load_backend("triton").merge_packets(packets, request)
    for a, b in zip(ours, load_backend("torch").merge_packets(packets, request)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)


def padded_width_run(group, device):
    """Hints of widths around what a vocabulary may be padded to -> (columns of all ranks, hint)."""
    shard, found = hl.VocabShard.from_group(group, 61), []
    gathered = shard.vocab_size, shard.padded_size  # which have a hint of their own
    for size in {*range(shard.width + 1, 140), 512, 4096} - {*gathered}:
        try:
            shard.expect_width("logits", size, "columns")
        except ValueError as error:
            found.append((size * shard.world_size, "a padded vocabulary?" in str(error)))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_padded_vocabulary_is_suggested_where_it_may_be_one(world_size):
    """Trainers pad each rank's part to a multiple of 128 at most; a hidden size is no padding."""
    for found in on_ranks(world_size, padded_width_run):
        assert {padded for _, padded in found} == {True, False}
        for total, padded in found:
            assert padded == (61 < total <= 128 * world_size)


def alone_run(group, device):
    """Errors of calls whose shard's group has one rank, though others have columns."""
    ranks = range(dist.get_world_size(group))
    own = [dist.new_group([rank]) for rank in ranks][dist.get_rank(group)]
    logits, labels = torch.zeros(2, 32, device=device), torch.tensor([3, 40], device=device)
    head, messages = hl.HeadLoss(options=hl.Options(check=True)), []
    for shard, x in (
        (hl.VocabShard.from_group(own, 32), logits),
        (hl.VocabShard.from_group(own, 64), logits),
    ):
        try:
            head(x, labels, shard=shard)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_shard_whose_group_has_one_rank_says_so_where_columns_or_labels_do_not_fit():
    for messages in on_ranks(2, alone_run):
        assert "got 40" in messages[0] and "got 32" in messages[1], messages
        for message in messages:
            assert "the shard's group has 1 rank: if others have the rest" in message


def test_a_transposed_weight_is_named():
    shard, hidden = hl.VocabShard.from_group(None, 64), torch.zeros(2, 128)
    with pytest.raises(ValueError, match=r"got 128 \(transposed\? .* pass its \.t\(\)\)"):
        hl.HeadLoss().linear(hidden, torch.zeros(128, 64), torch.tensor([1, 2]), shard=shard)
