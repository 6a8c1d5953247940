"""Claims that only a GPU can test: bits, memory, sizes beyond 2^31, compilation. Deselected without
one."""

import pytest
import torch
from cuda_problem import N, V, results
from ranks import Pool, on_ranks

import tp_headloss as hl
from tp_headloss.statistics import FULL_TEACHER, OVER_SETS, TOPK_TEACHER

pytestmark = pytest.mark.cuda


def saved_run(group, device):
    shard = hl.VocabShard.from_group(group, V)
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(N, V, device=device, generator=generator).mul_(3).bfloat16()
    labels = torch.randint(0, V, (N,), device=device, generator=generator)
    *stats, grad = results(x[:, shard.start : shard.stop], labels, shard, "auto")
    return [t.cpu() for t in stats], grad.cpu(), shard.start


def test_bits_are_the_same_at_every_group_size(tmp_path):
    """Statistics and gradient of one GPU, saved, against those of every larger group that there are
    GPUs for."""
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


@pytest.mark.parametrize("inplace", [False, True])
def test_memory_above_the_inputs_is_one_gradient_or_none(inplace):
    logits = torch.randn(4096, V, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, V, (4096,), device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        stats = hl.vocab_statistics(
            logits, labels, want=("entropy",), options=hl.Options(inplace=inplace)
        )
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
    stats = hl.vocab_statistics(logits, labels, want=("entropy",))
    g = torch.randn(n, device="cuda")
    stats.log_prob.backward(g)
    for row in (0, n // 2, n - 2, n - 1):
        x = logits.detach()[row].double()
        log_p = x.log_softmax(-1)
        torch.testing.assert_close(
            stats.log_prob[row].double(), log_p[labels[row]], rtol=1e-6, atol=1e-6
        )
        torch.testing.assert_close(
            stats.entropy[row].double(), -(log_p.exp() * log_p).sum(), rtol=1e-6, atol=1e-6
        )
        expected = -log_p.exp() * g[row].double()
        expected[labels[row]] += g[row].double()
        torch.testing.assert_close(logits.grad[row].double(), expected, rtol=2.0**-8, atol=1e-12)


@pytest.mark.parametrize("n", [65_536, 131_072])
def test_many_tokens_pass_every_grid_limit(n):
    logits = torch.randn(n, 130, device="cuda", requires_grad=True)
    labels = torch.randint(0, 130, (n,), device="cuda")
    stats = hl.vocab_statistics(logits, labels)
    stats.log_prob.sum().backward()
    expected = logits.detach().log_softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(stats.log_prob, expected, rtol=1e-5, atol=1e-5)
    assert logits.grad[-1].any()


def repeated_run(group, device, transport):
    """1,000 calls on two streams in turn, while noise keeps the GPU, its allocator and the group
    busy: equal bits."""
    shard = hl.VocabShard.from_group(group, V)
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(N, V, device=device, generator=generator)[
        :, shard.start : shard.stop
    ].bfloat16()
    labels = torch.randint(0, V, (N,), device=device, generator=generator)
    side, noise, main = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()
    first, differing, squares = (
        None,
        torch.zeros((), dtype=torch.int64, device=device),
        torch.randn(2, 1024, 1024),
    )
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
    shard = hl.VocabShard.from_group(None, V)
    *whole, grad = results(x, labels, shard, "auto")
    for n in (1, 3, 64):
        order = torch.randperm(8192, device="cuda")[:n]
        *part, part_grad = results(x[order], labels[order], shard, "auto")
        assert all(torch.equal(a[order], b) for a, b in zip(whole, part)) and torch.equal(
            grad[order], part_grad
        )


def everything(backend):
    """Values and gradients of calls that take every family, both modes of a head, and what is never
    differentiated."""
    generator = torch.Generator("cuda").manual_seed(4)
    logits, other = (torch.randn(64, 1000, device="cuda", generator=generator) for _ in range(2))
    hidden, weight = (
        torch.randn(n, 64, device="cuda", generator=generator).bfloat16() for n in (64, 1000)
    )
    labels = torch.arange(64, device="cuda") * 15
    options, ids = hl.Options(backend=backend), torch.stack([labels, labels, labels // 2], 1)
    top = hl.topk_log_probs(other, 9, top_p=0.9, options=options)
    rule = hl.SamplingRule(top_k=40, top_p=0.9)
    drawn = hl.sample(logits, seed=1, positions=labels, rule=rule, options=options)
    sets = hl.kept_ids(logits, rule, options=options)
    found = [*top, *drawn[:3], sets.ids]
    for given in (
        {"want": ("entropy", "collision", "total", "rank", "argmax")},
        {"want": FULL_TEACHER, "teacher": hl.Teacher(other)},
        {
            "want": TOPK_TEACHER,
            "teacher": hl.TopKTeacher(top.ids, top.log_probs, renormalize=False),
        },
        {"want": OVER_SETS, "sets": hl.IdSets(torch.cat([ids, ids + 1], 1))},
        {"want": ("log_probs_at",), "ids": ids},
    ):
        x = logits.clone().requires_grad_()
        stats = hl.vocab_statistics(x, labels, options=options, **given)
        values = [v for v in stats if isinstance(v, torch.Tensor) and v.requires_grad]
        torch.autograd.backward([v.sum() for v in values])
        found += [*(v.detach() for v in values), x.grad]
    for mode in ("recompute", "one_sweep"):
        operands = [x.clone().requires_grad_() for x in (hidden, weight)]
        hl.HeadLoss([hl.CrossEntropy(label_smoothing=0.1), hl.ZLoss(0.1)], options=options).linear(
            *operands, labels, linear=hl.Linear(mode)
        ).loss.backward()
        found += [x.grad for x in operands]
    return found


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_deterministic_algorithms_suffice_and_give_the_same_bits(backend, monkeypatch):
    """In torch's deterministic mode, which raises for any other operation, and fills new memory
    with NaN."""
    expected = everything(backend)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        for found in (everything(backend), everything(backend)):
            assert all(torch.equal(a, b) for a, b in zip(found[:-4], expected[:-4], strict=True))
        first = found
        assert all(torch.equal(a, b) for a, b in zip(first, everything(backend), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_another_process_gets_the_same_bits():
    ours = saved_run(None, torch.device("cuda"))
    pool = Pool(1)
    ((stats, grad, _),) = pool.call(saved_run, (), failures=False)
    pool.close()
    assert torch.equal(grad, ours[1]) and all(torch.equal(a, b) for a, b in zip(stats, ours[0]))


def test_two_hundred_batch_sizes_compile_once():
    from tp_headloss.engine import kernels, launch, sums_triton

    labels = torch.randint(0, 1000, (4096,), device="cuda")
    logits = torch.randn(4096, 1000, device="cuda", dtype=torch.bfloat16)
    loss_of = hl.HeadLoss([hl.CrossEntropy(), hl.ZLoss(1e-4)])
    jits = [getattr(kernels, f"{name}_kernel") for name in ("statistics", "merge", "gradient")]
    jits.append(sums_triton.sums_kernel)
    counts = set()
    # a size that comes again
    for i, n in enumerate([7, 7] + torch.randint(1, 4096, (200,)).tolist() + [1, 16, 32]):
        x = logits[:n].clone().requires_grad_()
        loss_of(x, labels[:n]).loss.backward()
        if i > 1:
            compiled = [len(jit.device_caches[torch.cuda.current_device()][0]) for jit in jits]
            counts.add((*compiled, len(launch._compiled)))
    assert len(counts) == 1, counts


def device_run(group, device):
    """Tensors on this rank's GPU while another GPU is the current one."""
    other = (device.index + 1) % torch.cuda.device_count()
    x = torch.randn(4, 100, device=device, requires_grad=True)
    labels = torch.randint(0, 100, (4,), device=device)
    with torch.cuda.device(other):
        log_prob = hl.vocab_statistics(x, labels).log_prob
        log_prob.sum().backward()
    expected = x.detach().log_softmax(-1).gather(1, labels[:, None])[:, 0]
    return (log_prob.detach() - expected).abs().max().item(), bool(x.grad.isfinite().all())


def test_tensors_off_the_current_device_work():
    for error, finite in on_ranks(2, device_run):
        assert error < 1e-5 and finite
