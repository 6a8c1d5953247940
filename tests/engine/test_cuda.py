"""What only a GPU can show: graphs, streams, synchronisation, memory, sizes beyond 2^31. Deselected without one."""

import logging

import pytest
import torch
from ranks import Pool, on_ranks

from tp_headloss import (
    CrossEntropy,
    Distillation,
    Entropy,
    GeneratorMetrics,
    HeadLoss,
    KLToReference,
    Linear,
    Options,
    PolicyGradient,
    PolicyMetrics,
    Sequences,
    Teacher,
    TopKDistillation,
    TopKTeacher,
    VocabShard,
    ZLoss,
    comm,
    vocab_statistics,
)

pytestmark = pytest.mark.cuda
V, N = 32000, 512


def head(transport="auto"):
    terms = [CrossEntropy(label_smoothing=0.1), ZLoss(1e-4), Entropy(0.01)]
    return HeadLoss(terms, metrics=("accuracy",), options=Options(transport=transport))


def graph_run(group, device, transport):
    """Capture one step, replay it 100 times on fresh inputs, compare with eager bit for bit."""
    shard = VocabShard.from_group(group, V)
    logits = torch.randn(N, shard.width, device=device, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, V, (N,), device=device)
    loss_of = head(transport)

    def step():
        out = loss_of(logits, labels, shard=shard)
        return out.loss, out.metrics["accuracy"], torch.autograd.grad(out.loss, logits)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    equal = 0
    for seed in range(100):
        generator = torch.Generator(device).manual_seed(seed)
        new_labels = torch.randint(0, V, (N,), device=device, generator=generator)
        new_labels[torch.rand(N, device=device, generator=generator) < 0.1] = -100
        with torch.no_grad():
            logits.copy_(torch.randn(logits.shape, device=device, generator=generator) * 3)
            labels.copy_(new_labels)
        graph.replay()
        replayed = [t.clone() for t in captured]
        equal += all(torch.equal(a, b) for a, b in zip(replayed, step()))
    return equal


@pytest.mark.parametrize("transport", ["gather", "symm_mem"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_hundred_graph_replays_equal_eager(world_size, transport):
    assert on_ranks(world_size, graph_run, transport) == [100] * world_size


def policy_step(group, device, layout, compile, objective="gspo"):
    """-> inputs to change, and a step that builds its sequences anew and computes loss, metrics and gradient."""
    shard = VocabShard.from_group(group, V)
    logits = torch.randn(N, shard.width, device=device, dtype=torch.bfloat16).requires_grad_()
    names = ("advantages", "old_log_prob", "reference_log_prob", "generator_log_prob", "rollout_weight", "noise")
    state = {name: torch.zeros(N, device=device) for name in names}
    state["labels"] = torch.randint(0, V, (N,), device=device, generator=torch.Generator(device).manual_seed(0))
    cuts = torch.tensor([0, 100, 101, 101, 400, N], device=device, dtype=torch.int32)
    ids = torch.randint(0, 9, (N,), device=device, generator=torch.Generator(device).manual_seed(0))
    terms = [PolicyGradient(objective, rollout_weight=True), KLToReference(0.1), Entropy(0.01)]
    metrics = ("accuracy", PolicyMetrics(reference=True), GeneratorMetrics())
    loss_of = HeadLoss(terms, metrics=metrics, reduction="seq-mean-token-mean", compile=compile)
    wanted = {name for part in (*loss_of.terms, *loss_of.token_metrics) for name in part.inputs}

    def step():
        mask = state["labels"] != -100
        sequences = Sequences.from_ids(ids, 9, mask) if layout == "ids" else Sequences.from_cu_seqlens(cuts, mask)
        inputs = {name: value for name, value in state.items() if name in wanted} | {"sequences": sequences}
        out = loss_of(logits, state["labels"], shard=shard, inputs=inputs)
        grad = torch.autograd.grad(out.loss, logits)[0]
        return [out.loss, grad, *out.metrics.values(), *out.sequence_metrics.values()]

    return logits, state, step


def policy_graph_run(group, device, layout, compile, objective="gspo"):
    logits, state, step = policy_step(group, device, layout, compile, objective)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    equal = 0
    for seed in range(20):
        generator = torch.Generator(device).manual_seed(seed)
        labels = torch.randint(0, V, (N,), device=device, generator=generator)
        labels[torch.rand(N, device=device, generator=generator) < 0.1] = -100
        with torch.no_grad():
            logits.copy_(torch.randn(logits.shape, device=device, generator=generator) * 2)
            for name, value in state.items():
                value.copy_(labels if name == "labels" else torch.randn(N, device=device, generator=generator) - 10)
        graph.replay()
        replayed = [t.clone() for t in captured]
        equal += all(torch.equal(a, b) for a, b in zip(replayed, step()))
    return equal, bool(replayed[0].isfinite()), bool(replayed[1].any())


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("layout", ["packed", "ids"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_sequence_objectives_wait_for_nothing_and_replay_from_a_graph(world_size, layout, compile):
    for result in on_ranks(world_size, policy_graph_run, layout, compile):
        assert result == (20, True, True)


@pytest.mark.parametrize(
    "objective", ["clip", "cispo", "sapo", "gspo-length-weighted", "gmpo", "vespo", "clip-cov", "kl-cov"]
)
def test_every_objective_waits_for_nothing_and_replays_from_a_graph(objective):
    assert policy_graph_run(None, torch.device("cuda"), "packed", False, objective) == (20, True, True)


DISTILLATIONS = {  # name -> terms, and whether their teacher is whole
    "whole": ([Distillation(0.5), Distillation(0.2, "reverse_kl", temperature_squared=True)], True),
    "whole, later": ([Distillation(0.5, "jsd"), Distillation(0.5, "total_variation")], True),
    "entries": ([TopKDistillation(0.5), TopKDistillation(0.5, "reverse_kl")], False),
    "vocabulary": ([TopKDistillation(0.5, over="vocabulary"), TopKDistillation(0.5, "jsd", "vocabulary")], False),
    "tail": ([TopKDistillation(0.5, over="tail"), TopKDistillation(0.5, "reverse_kl", "tail")], False),
}


def distillation_graph_run(group, device, name):
    terms, whole = DISTILLATIONS[name]
    shard, loss_of = VocabShard.from_group(group, V), HeadLoss([CrossEntropy(), *terms], metrics=("accuracy",))
    logits = torch.randn(N, shard.width, device=device, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, V, (N,), device=device, generator=torch.Generator(device).manual_seed(0))
    scores, teacher_logits = torch.zeros(N, 64, device=device), torch.zeros_like(logits)
    ids = torch.zeros(N, 64, device=device, dtype=torch.long)

    def step():
        entries = TopKTeacher(ids, scores, student_temperature=2.0, renormalize=name != "tail")
        teacher = Teacher(teacher_logits, 2.0) if whole else entries
        out = loss_of(logits, labels, shard=shard, inputs={"teacher": teacher})
        return [out.loss, torch.autograd.grad(out.loss, logits)[0], *out.terms.values()]

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    equal = 0
    for seed in range(20):
        generator = torch.Generator(device).manual_seed(seed)  # of what all ranks know
        ids.copy_(torch.randint(0, V, ids.shape, device=device, generator=generator))
        scores.copy_(torch.randn(scores.shape, device=device, generator=generator).log_softmax(-1) - 0.2)
        with torch.no_grad():
            for x in (logits, teacher_logits):
                x.copy_(torch.randn(x.shape, device=device, generator=generator) * 2)
        graph.replay()
        replayed = [t.clone() for t in captured]
        equal += all(torch.equal(a, b) for a, b in zip(replayed, step()))
    return equal, bool(replayed[0].isfinite()), bool(replayed[1].any())


@pytest.mark.parametrize("name", DISTILLATIONS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_distillation_waits_for_nothing_and_replays_from_a_graph(world_size, name):
    for result in on_ranks(world_size, distillation_graph_run, name):
        assert result == (20, True, True)


def results(logits, labels, shard, transport):
    x = logits.clone().requires_grad_()
    stats = vocab_statistics(x, labels, shard=shard, want=("entropy", "argmax"), options=Options(transport=transport))
    (stats.log_prob.sum() + stats.entropy.sum()).backward()
    return stats.lse, stats.log_prob, stats.entropy, stats.argmax, x.grad


def symmetric_run(group, device):
    """Growing and shrinking batches, on two streams that take turns, with one rank far behind the other."""
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
    known = comm._groups[group.group_name]
    return equal, known.why_not, len(known.memories)


@pytest.mark.parametrize("world_size", [2, 4])
def test_symmetric_memory_carries_the_same_bits_as_the_gather(world_size):
    for equal, why_not, memories in on_ranks(world_size, symmetric_run):
        assert equal == 30
        assert why_not is None and memories > 1  # it was used, and grew


def two_groups_run(group, device):
    """A group of all ranks and one of each half, interleaved without waiting."""
    import torch.distributed as dist

    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = [group, halves[dist.get_rank(group) // 2]]
    equal = 0
    for i in range(10):
        runs = []
        for each in groups:
            shard = VocabShard.from_group(each, V)
            x = torch.randn(64, shard.width, device=device, generator=torch.Generator(device).manual_seed(i))
            labels = torch.randint(0, V, (64,), device=device, generator=torch.Generator(device).manual_seed(i))
            runs.append([results(x, labels, shard, transport) for transport in ("symm_mem", "gather")])
        equal += all(torch.equal(a, b) for run in runs for a, b in zip(*run))
    return equal


def test_symmetric_memory_of_overlapping_groups_is_separate():
    assert on_ranks(4, two_groups_run) == [10] * 4


def fallback_run(group, device):
    """One rank cannot: all gather, and say so once."""
    comm._groups.pop(group.group_name, None)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    comm._log.addHandler(handler)
    broken = comm.SymmetricMemory.__init__
    if torch.distributed.get_rank(group) == 1:
        comm.SymmetricMemory.__init__ = lambda *_: (_ for _ in ()).throw(RuntimeError("no peer access"))
    shard = VocabShard.from_group(group, V)
    x, labels = torch.randn(8, shard.width, device=device), torch.randint(0, V, (8,), device=device)
    try:
        pairs = [zip(results(x, labels, shard, "symm_mem"), results(x, labels, shard, "gather")) for _ in range(3)]
    finally:
        comm.SymmetricMemory.__init__ = broken
        comm._log.removeHandler(handler)
        comm._groups.pop(group.group_name)
    return all(torch.equal(a, b) for pair in pairs for a, b in pair), lines


def test_a_rank_without_symmetric_memory_makes_all_gather_with_one_log_line():
    for equal, lines in on_ranks(2, fallback_run):
        assert equal and len(lines) == 1 and "no peer access" in lines[0]


def saved_run(group, device):
    shard = VocabShard.from_group(group, V)
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(N, V, device=device, generator=generator).mul_(3).bfloat16()
    labels = torch.randint(0, V, (N,), device=device, generator=generator)
    *stats, grad = results(x[:, shard.start : shard.stop], labels, shard, "auto")
    return [t.cpu() for t in stats], grad.cpu(), shard.start


def test_bits_are_the_same_at_every_group_size(tmp_path):
    """Statistics and gradient of one GPU, saved, against those of every larger group that there are GPUs for."""
    ((stats, grad, _),) = on_ranks(1, saved_run)
    torch.save((stats, grad), tmp_path / "one.pt")
    stats, grad = torch.load(tmp_path / "one.pt")
    sizes = [p for p in (2, 4, 8) if p <= torch.cuda.device_count()]
    if not sizes:
        pytest.skip("needs 2 GPUs, has 1")
    for size in sizes:
        for others, part, start in on_ranks(size, saved_run):
            assert all(torch.equal(a, b) for a, b in zip(stats, others))
            assert torch.equal(part, grad[:, start : start + part.shape[1]])


def sync_run(group, device):
    shard = VocabShard.from_group(group, V)
    logits = torch.randn(N, shard.width, device=device, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, V, (N,), device=device, generator=torch.Generator(device).manual_seed(0))
    loss_of = head()
    loss_of(logits, labels, shard=shard).loss.backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss_of(logits, labels, shard=shard).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_nothing_waits_on_the_host(world_size):
    assert all(on_ranks(world_size, sync_run))


@pytest.mark.parametrize("inplace", [False, True])
def test_memory_above_the_inputs_is_one_gradient_or_none(inplace):
    logits = torch.randn(4096, V, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, V, (4096,), device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        stats = vocab_statistics(logits, labels, want=("entropy",), options=Options(inplace=inplace))
        forward = torch.cuda.max_memory_allocated() - before
        (grad,) = torch.autograd.grad(stats.log_prob.sum() + stats.entropy.sum(), logits)
        peak = torch.cuda.max_memory_allocated() - before
        del stats, grad
    size = logits.numel() * 2
    assert forward < 4096 * 1024  # a few dozen fp32 numbers per token
    assert peak < 4096 * 1024 + (0 if inplace else size)


@pytest.mark.parametrize("n, v", [(16_385, 131_072), (524_289, 4096)])
def test_sizes_beyond_2_to_the_31_are_right(n, v):
    """The last rows lie beyond every int32 offset; the latter is 2^31 + 4096 elements."""
    logits = torch.empty(n, v, device="cuda", dtype=torch.bfloat16)
    for part in logits.split(2048):
        part.normal_()
    labels = torch.randint(0, v, (n,), device="cuda")
    logits.requires_grad_()
    stats = vocab_statistics(logits, labels, want=("entropy",))
    g = torch.randn(n, device="cuda")
    stats.log_prob.backward(g)
    for row in (0, n // 2, n - 2, n - 1):
        x = logits.detach()[row].double()
        log_p = x.log_softmax(-1)
        torch.testing.assert_close(stats.log_prob[row].double(), log_p[labels[row]], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(stats.entropy[row].double(), -(log_p.exp() * log_p).sum(), rtol=1e-6, atol=1e-6)
        expected = -log_p.exp() * g[row].double()
        expected[labels[row]] += g[row].double()
        torch.testing.assert_close(logits.grad[row].double(), expected, rtol=2.0**-8, atol=1e-12)


@pytest.mark.parametrize("n", [65_536, 131_072])
def test_many_tokens_pass_every_grid_limit(n):
    logits = torch.randn(n, 130, device="cuda", requires_grad=True)
    labels = torch.randint(0, 130, (n,), device="cuda")
    stats = vocab_statistics(logits, labels)
    stats.log_prob.sum().backward()
    expected = logits.detach().log_softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(stats.log_prob, expected, rtol=1e-5, atol=1e-5)
    assert logits.grad[-1].any()


def repeated_run(group, device, transport):
    """1,000 calls on two streams in turn, while noise keeps the GPU, its allocator and the group busy: equal bits."""
    shard = VocabShard.from_group(group, V)
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(N, V, device=device, generator=generator)[:, shard.start : shard.stop].bfloat16()
    labels = torch.randint(0, V, (N,), device=device, generator=generator)
    side, noise, main = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()
    first, differing, squares = None, torch.zeros((), dtype=torch.int64, device=device), torch.randn(2, 1024, 1024)
    squares = squares.to(device)
    for i in range(1000):
        with torch.cuda.stream(noise):
            torch.mm(squares[0], squares[1])
        side.wait_stream(main)
        stream = side if i % 2 else main
        with torch.cuda.stream(stream):
            *stats, grad = results(logits, labels, shard, transport)
            # blocks of other sizes, freed at once: what the next call gets has been somebody else's
            torch.full((1 + i * 4099 % (1 << 22),), torch.nan, device=device)
        main.wait_stream(side)
        values = [x.detach() for x in (*stats, grad)]
        first = first or [x.clone() for x in values]
        differing += sum((a != b).any() for a, b in zip(first, values))
        for x in values:
            x.record_stream(main)
        if i == 500:
            torch.cuda.empty_cache()
    return int(differing), [x.cpu() for x in first]


@pytest.mark.parametrize("transport", ["gather", "auto"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_thousand_repeats_have_the_same_bits_under_noise(world_size, transport):
    for differing, _ in on_ranks(world_size, repeated_run, transport):
        assert differing == 0


def test_rows_have_the_same_bits_in_batches_of_any_size():
    x = torch.randn(8192, V, device="cuda").mul_(3).bfloat16()
    labels = torch.randint(0, V, (8192,), device="cuda")
    shard = VocabShard.from_group(None, V)
    *whole, grad = results(x, labels, shard, "auto")
    for n in (1, 3, 64):
        order = torch.randperm(8192, device="cuda")[:n]
        *part, part_grad = results(x[order], labels[order], shard, "auto")
        assert all(torch.equal(a[order], b) for a, b in zip(whole, part)) and torch.equal(grad[order], part_grad)


def test_another_process_gets_the_same_bits():
    ours = saved_run(None, torch.device("cuda"))
    pool = Pool(1)
    ((stats, grad, _),) = pool.call(saved_run, ())
    pool.close()
    assert torch.equal(grad, ours[1]) and all(torch.equal(a, b) for a, b in zip(stats, ours[0]))


def test_two_hundred_batch_sizes_compile_once():
    from tp_headloss.backends import kernels, sums_kernels, triton

    labels = torch.randint(0, 1000, (4096,), device="cuda")
    logits = torch.randn(4096, 1000, device="cuda", dtype=torch.bfloat16)
    loss_of = HeadLoss([CrossEntropy(), ZLoss(1e-4)])
    jits = [getattr(kernels, f"{name}_kernel") for name in ("statistics", "merge", "gradient")]
    jits += [sums_kernels.sums_kernel, sums_kernels.sums_gradient_kernel]
    counts = set()
    for i, n in enumerate(torch.randint(1, 4096, (200,)).tolist() + [1, 16, 32]):
        x = logits[:n].clone().requires_grad_()
        loss_of(x, labels[:n]).loss.backward()
        if i:
            compiled = [len(jit.device_caches[torch.cuda.current_device()][0]) for jit in jits]
            counts.add((*compiled, len(triton._compiled)))
    assert len(counts) == 1, counts


def device_run(group, device):
    """Tensors on this rank's GPU while another GPU is the current one."""
    other = (device.index + 1) % torch.cuda.device_count()
    x = torch.randn(4, 100, device=device, requires_grad=True)
    labels = torch.randint(0, 100, (4,), device=device)
    with torch.cuda.device(other):
        log_prob = vocab_statistics(x, labels).log_prob
        log_prob.sum().backward()
    expected = x.detach().log_softmax(-1).gather(1, labels[:, None])[:, 0]
    return (log_prob.detach() - expected).abs().max().item(), bool(x.grad.isfinite().all())


def test_tensors_off_the_current_device_work():
    for error, finite in on_ranks(2, device_run):
        assert error < 1e-5 and finite


def linear_problem(tokens, device, dtype=torch.bfloat16, shard=None, hidden_size=256):
    shard = shard or VocabShard(0, V, V)
    generator = torch.Generator(device).manual_seed(5)
    hidden = torch.randn(tokens, hidden_size, device=device, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(V, hidden_size, device=device, dtype=dtype, generator=generator)[shard.start : shard.stop]
    labels = torch.randint(0, V, (tokens,), device=device, generator=generator)
    return hidden, (0.1 * weight).requires_grad_(), labels


@pytest.mark.parametrize("mode", ["recompute", "one_sweep"])
def test_memory_of_a_linear_head_is_flat_in_the_tokens(device, mode):
    """Beyond hidden states, dH and dW, with dW summed in a main_grad."""
    budget, extra = 64 << 20, []
    for tokens in (4096, 16384):
        hidden, weight, labels = linear_problem(tokens, device)
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        linear = Linear(mode=mode, budget=budget, main_grad=True, upstream=1.0 if mode == "one_sweep" else None)

        def step(hidden=hidden, weight=weight, labels=labels, linear=linear):
            loss = HeadLoss().linear(hidden, weight, labels, linear=linear).loss
            return torch.autograd.grad(loss, (hidden, weight), allow_unused=True)

        step()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        extra.append(torch.cuda.max_memory_allocated() - before - hidden.nbytes)
        # of one sweep, dH and its multiple by the upstream gradient are there at once, when no block is
        assert extra[-1] <= budget + (4 << 20) + 128 * tokens
    assert abs(extra[1] - extra[0]) < budget // 4


def linear_graph_run(group, device, mode, how):
    """A captured step, and whether anything waits for the host."""
    shard = VocabShard.from_group(group, V)
    hidden, weight, labels = linear_problem(512, device, shard=shard)
    if how == "reduce_scatter" and group is not None:
        hidden = hidden.detach().chunk(group.size())[group.rank()].clone().requires_grad_()
    head = HeadLoss([CrossEntropy(), ZLoss(1e-4), Entropy(0.01)], metrics=("accuracy",))
    linear = Linear(mode=mode, hidden_grad=how, budget=256 * V * 2 + 4 * V * 256)

    def step():
        out = head.linear(hidden, weight, labels, shard=shard, linear=linear)
        return out.loss.detach(), *torch.autograd.grad(out.loss, (hidden, weight))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = step()
    equal = True
    for seed in range(10):
        with torch.no_grad():
            hidden.copy_(torch.randn(hidden.shape, device=device, generator=torch.Generator(device).manual_seed(seed)))
        graph.replay()
        equal &= all(torch.equal(a, b) for a, b in zip(captured, step()))
    return equal


@pytest.mark.parametrize("how", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("mode", ["recompute", "one_sweep"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_linear_head_is_captured(world_size, mode, how):
    assert all(on_ranks(world_size, linear_graph_run, mode, how))


@pytest.mark.parametrize("mode", ["recompute", "one_sweep"])
def test_a_linear_head_computes_in_ieee_fp32_unless_tf32_is_allowed(device, mode):
    hidden, weight, labels = linear_problem(300, device, torch.float32)
    z = torch.nn.functional.linear(*(exact := [x.double().requires_grad_() for x in (hidden, weight)]))
    exact = torch.autograd.grad(torch.nn.functional.cross_entropy(z, labels), exact)

    def errors():
        grads = torch.autograd.grad(
            HeadLoss().linear(hidden, weight, labels, linear=Linear(mode=mode)).loss, (hidden, weight)
        )
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(grads, exact)]

    assert max(errors()) < 3e-6
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert min(errors()) > 2e-5
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
