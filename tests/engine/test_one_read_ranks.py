"""One read on several ranks: equal bits, random steps, linear heads, graphs, ranks that are absent."""

import dataclasses
import functools
import math
import os
import random
import time

import pytest
import torch
from cuda_problem import captured, replays
from one_read_problem import (
    IGNORED,
    IN_BACKWARD,
    IN_FORWARD,
    POLICY,
    TERMS,
    entries_beside,
    moved,
    problem,
    steps,
    teacher_beside,
)
from ranks import on_ranks

import tp_headloss as hl
from tp_headloss.engine.one_read import launch as one_read_launch
from tp_headloss.engine.transports import symmetric_memory
from tp_headloss.engine.ways import one_read
from tp_headloss.ranks.shard import canonical_chunk_size

FULL = bool(os.environ.get("TP_HEADLOSS_FULL"))
on_hopper = pytest.mark.cuda  # the GPU tests run where the kernel does


def _shard(group, logits, vocab_size):
    """This rank's shard of logits, all of them without a group."""
    if group is None:
        return None, logits
    shard = hl.VocabShard.from_group(group, vocab_size)
    return shard, logits[:, shard.start : shard.stop].contiguous()


def _sharded(group, device, vocab_size, metrics=(), transposed=False, kind="plain"):
    logits, labels = problem(device, vocab_size, 40)
    shard, x = _shard(group, logits, vocab_size)
    if (
        transposed and group is not None and group.rank() == 0
    ):  # a rank whose logits the kernel cannot read where they are
        x = x.t().contiguous().t()
    given = {"terms": (hl.CrossEntropy(label_smoothing=0.1),)} if kind == "smoothing" else {}
    if kind == "transformed":
        temperature = 0.5 + torch.arange(40.0, device=device) / 40
        given = {"transform": hl.Transform(softcap=9.0, temperature=temperature)}
        x = x.half()
    if kind == "teacher":
        whole = teacher_beside(logits)
        whole[2] = logits[3]  # of which none is -inf: a reverse KL would be infinite
        _, teacher = _shard(group, whole, vocab_size)
        both = hl.Distillation(0.3), hl.Distillation(0.2, "reverse_kl")
        given = {"terms": (hl.CrossEntropy(0.5), *both)}
        given["inputs"] = {"teacher": hl.Teacher(teacher, temperature=2.0)}
    if kind == "mixture":
        _, teacher = _shard(group, teacher_beside(logits), vocab_size)
        both = hl.Distillation(0.5, "jsd"), hl.Distillation(0.2, "cross_entropy")
        given = {"terms": (hl.CrossEntropy(0.5), *both)}
        given["inputs"] = {"teacher": hl.Teacher(teacher, temperature=2.0)}
    if kind == "top-K":
        teacher = hl.TopKTeacher(*entries_beside(logits, 50), renormalize=False)
        both = hl.TopKDistillation(0.3), hl.TopKDistillation(0.2, support="tail", name="other")
        given = {"terms": (hl.CrossEntropy(0.5), *both), "inputs": {"teacher": teacher}}
    if kind == "policy":
        old, reference = (
            -torch.arange(40.0, device=device) / 4,
            -torch.arange(40.0, device=device) / 3,
        )
        inputs = {
            "advantages": (reference + 7).sign(),
            "old_log_prob": old,
            "reference_log_prob": reference,
        }
        given = {"terms": (hl.PolicyGradient(), hl.KLToReference(0.1)), "inputs": inputs}
    out, first, second = steps(IN_FORWARD, x, labels, shard=shard, metrics=metrics, **given)
    found = out.loss, *out.metrics.values(), out.stats.log_prob, out.stats.lse
    return [x.detach().cpu() for x in (first, second, *found)]


@on_hopper
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("vocab_size", [1024, 32768, 50304, 128256])
@pytest.mark.parametrize(
    "metrics, kind",
    [
        ((), "plain"),
        (("accuracy", "entropy"), "plain"),
        (("entropy",), "policy"),
        (("accuracy",), "smoothing"),
        (("accuracy", "entropy"), "transformed"),
        (("accuracy",), "teacher"),
        (("accuracy", "entropy"), "mixture"),
        (("accuracy", "entropy"), "top-K"),
    ],
)
def test_any_number_of_ranks_has_the_same_bits(metrics, kind, vocab_size, world_size):
    given = vocab_size, metrics, False, kind
    parts, (alone,) = on_ranks(world_size, _sharded, *given), on_ranks(1, _sharded, *given)
    for part in parts:
        assert all(torch.equal(a, b) for a, b in zip(part[2:], alone[2:]))
    assert torch.equal(torch.cat([part[0] for part in parts], 1), alone[0])


def _padded(group, device, vocab_size, padding):
    """The loss, and this rank's gradient, where the last rank has columns beyond all chunks."""
    chunks, n_ranks = 8 * canonical_chunk_size(vocab_size), 1 if group is None else group.size()
    bounds = [*(chunks * rank // n_ranks for rank in range(n_ranks)), chunks + padding]
    shard = hl.VocabShard.from_boundaries(bounds, vocab_size, group)
    logits, labels = problem(device, vocab_size, 40)
    logits = torch.nn.functional.pad(logits, (0, bounds[-1] - vocab_size), value=math.nan)
    out, gradient, _ = steps(
        IN_FORWARD, logits[:, shard.start : shard.stop].contiguous(), labels, shard=shard
    )
    return [x.detach().cpu() for x in (gradient, out.loss, out.stats.lse)]


@on_hopper
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("vocab_size, padding", [(1000, 8), (1000, 1), (50257, 256)])
def test_padding_on_the_last_rank_has_no_part(vocab_size, padding, world_size):
    parts = on_ranks(world_size, _padded, vocab_size, padding)
    (alone,) = on_ranks(1, _padded, vocab_size, 0)
    for part in parts:
        assert all(torch.equal(a, b) for a, b in zip(part[1:], alone[1:]))
    joined = torch.cat([part[0] for part in parts], 1)
    assert torch.equal(joined[:, :vocab_size], alone[0][:, :vocab_size])
    assert not joined[:, vocab_size:].any()


@on_hopper
@pytest.mark.parametrize("kind", ["plain", "teacher"])
def test_ranks_take_one_way_whatever_the_memory_of_their_logits(kind):
    for plain, transposed in zip(
        on_ranks(2, _sharded, 32064, (), False, kind), on_ranks(2, _sharded, 32064, (), True, kind)
    ):
        assert all(torch.equal(a, b) for a, b in zip(plain, transposed))


def _repeated(group, device, vocab_size, n_rows, repeats):
    """Steps beside collectives in opposite orders and noise, on two streams in turn: equal bits
    every time."""
    logits, labels = problem(device, vocab_size, n_rows)
    labels[labels % 3 == 0] = IGNORED  # so that some warps have nothing to do, others much
    shard, x = _shard(group, logits, vocab_size)
    x.requires_grad_()
    head, side, noise = (
        hl.HeadLoss(list(TERMS), options=IN_FORWARD),
        torch.cuda.Stream(),
        torch.cuda.Stream(),
    )
    squares, big = torch.randn(2, 2048, 2048, device=device), torch.ones(1 << 22, device=device)
    rank = 0 if group is None else group.rank()

    def step():
        out = head(x, labels, shard=shard)
        return [out.loss.detach(), out.stats.log_prob.detach(), torch.autograd.grad(out.loss, x)[0]]

    def beside():
        with torch.cuda.stream(noise):
            torch.mm(squares[0], squares[1])
            if group is not None:
                torch.distributed.all_reduce(big, op=torch.distributed.ReduceOp.MAX, group=group)

    expected, same = step(), True
    for i in range(repeats):
        if (i + rank) % 2:
            beside()
        stream = side if i % 3 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = step()
        if not (i + rank) % 2:
            beside()
        torch.cuda.current_stream().wait_stream(stream)
        same &= all(torch.equal(a, b) for a, b in zip(found, expected))
    return same


@on_hopper
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_steps_beside_other_work_have_the_same_bits(world_size):
    assert (
        on_ranks(world_size, _repeated, 32000, 1500, 1000 if FULL else 100) == [True] * world_size
    )


def _random_steps(group, device, repeats):
    """Steps of random shapes, losses and denominators, in one launch and in two: how many
    differ."""
    choices, wrong = random.Random(5), torch.zeros((), device=device)
    policy, smoothed = (
        (hl.PolicyGradient(), hl.KLToReference(0.1)),
        (hl.CrossEntropy(label_smoothing=0.1),),
    )
    head_of = functools.cache(
        lambda terms, metrics, options: hl.HeadLoss(terms, metrics=metrics, options=options)
    )
    for step in range(repeats):
        vocab_size, n_rows = (
            choices.choice([1024, 4096, 32000, 50304, 128256]),
            choices.randrange(1, 200),
        )
        terms = choices.choice(
            [(hl.CrossEntropy(),), TERMS, policy, smoothed, (hl.CrossEntropy(), hl.Entropy(0.1))]
        )
        logits = torch.randn(
            n_rows, vocab_size, device=device, generator=torch.Generator(device).manual_seed(step)
        )
        labels = (logits[:, 0].abs() * 1000).long() % vocab_size
        # nothing is summed of most rows, or of some
        labels[logits[:, 1] < choices.choice([-9, -1, 1])] = IGNORED
        old = {
            name: logits[:, i] - 8 for i, name in enumerate(("old_log_prob", "reference_log_prob"))
        }
        inputs = {"advantages": logits[:, 3], **old} if terms is policy else None
        metrics = choices.choice([(), ("entropy",), ("accuracy", "entropy")])
        shard, x = _shard(group, logits.bfloat16(), vocab_size)
        x.requires_grad_()
        given = {"shard": shard, "inputs": inputs, "denominator": choices.choice([None, 7.0])}
        found = []
        for options in (IN_FORWARD, IN_BACKWARD):
            out = head_of(terms, metrics, options)(x, labels, **given)
            found.append((out.loss.detach(), torch.autograd.grad(out.loss, x)[0].float()))
        (one, grad), (two, expected) = found
        wrong += ((one - two).abs() > 1e-5 * two.abs() + 1e-6) | (
            (grad - expected).norm() > 2**-7 * expected.norm()
        )
    return int(wrong)


@on_hopper
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_random_steps_agree_with_two_launches(world_size):
    assert on_ranks(world_size, _random_steps, 10_000 if FULL else 100) == [0] * world_size


def _policy_in_float64(log_prob, advantages, old_log_prob, reference_log_prob):
    ratio, rest = (log_prob - old_log_prob).exp(), reference_log_prob - log_prob
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return 0.1 * (rest.exp() - rest - 1) - clipped


def _kl(teacher, log_p):
    log_q = teacher.log_softmax(-1)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def _topk(log_p, ids, log_tau):
    """0.3 of the forward KL over all ids, and 0.2 of that with the tail."""
    ids, tau = ids.long(), log_tau.exp()
    vocab = (tau * (log_tau - log_p.gather(-1, ids))).sum(-1)
    tail, of_teacher = log_p.scatter(-1, ids, -math.inf).logsumexp(-1), 1 - tau.sum(-1)
    return 0.3 * vocab + 0.2 * (vocab + of_teacher * (of_teacher.log() - tail))


def _mixed(teacher, log_p):
    """The Jensen-Shannon divergence of a mixture of both halves."""
    log_q = teacher.log_softmax(-1)
    log_m = torch.stack([log_p, log_q]).logsumexp(0) - math.log(2)
    parts = [log.exp() * (log - log_m).where(log > -math.inf, 0.0) for log in (log_p, log_q)]
    return sum(parts).sum(-1) / 2


K3 = hl.KLToReference(0.1, input_clamp=None, output_clamp=None)
# terms, and their sum by float64 log-probs of all ids [N, V], of labels [N], lse [N] and inputs
LOSSES = {
    "cross-entropy": ((hl.CrossEntropy(),), lambda log_p, log_prob, lse, inputs: -log_prob),
    "z-loss": (TERMS, lambda log_p, log_prob, lse, inputs: 0.01 * lse**2 - log_prob),
    "smoothing": (
        (hl.CrossEntropy(label_smoothing=0.1),),
        lambda log_p, log_prob, lse, inputs: -0.9 * log_prob - 0.1 * log_p.mean(-1),
    ),
    "entropy": (
        (hl.CrossEntropy(), hl.Entropy(0.1)),
        lambda log_p, log_prob, lse, inputs: 0.1 * (log_p.exp() * log_p).sum(-1) - log_prob,
    ),
    "policy": (
        (hl.PolicyGradient("clip", clip=(0.2, 0.2)), K3),
        lambda log_p, log_prob, lse, inputs: _policy_in_float64(log_prob, **inputs),
    ),
    "teacher": (
        (hl.CrossEntropy(0.5), hl.Distillation(0.5)),
        lambda log_p, log_prob, lse, inputs: 0.5 * (_kl(inputs["teacher"], log_p) - log_prob),
    ),
    "mixture": (
        (hl.CrossEntropy(0.5), hl.Distillation(0.5, "jsd")),
        lambda log_p, log_prob, lse, inputs: 0.5 * (_mixed(inputs["teacher"], log_p) - log_prob),
    ),
    "top-K": (
        (
            hl.CrossEntropy(0.5),
            hl.TopKDistillation(0.3, support="vocabulary"),
            hl.TopKDistillation(0.2, support="tail", name="other"),
        ),
        lambda log_p, log_prob, lse, inputs: _topk(log_p, **inputs) - 0.5 * log_prob,
    ),
}


def _float64_loss(kind, logits, labels, inputs, denominator):
    """In float64 and plain torch, of whole logits [N, V]: a loss, the mean size of its tokens'
    parts, its gradient."""
    z = logits.double().requires_grad_()
    valid = labels != IGNORED
    log_p = z.log_softmax(-1)
    log_prob = log_p.gather(-1, labels.where(valid, 0)[:, None])[:, 0]
    inputs = {name: x.double() for name, x in inputs.items()}
    loss = LOSSES[kind][1](log_p, log_prob, z.logsumexp(-1), inputs).where(valid, 0.0)
    divisor = max(int(valid.sum()), 1) if denominator is None else denominator
    total, size = loss.sum() / divisor, loss.detach().abs().sum() / divisor
    return total.detach(), size, torch.autograd.grad(total, z)[0]


def _random_logits(choices, device, vocab_size, n_rows, seed):
    """Logits [N, V] of a random dtype, spread and shift, labels, and inputs of a policy."""
    generator = torch.Generator(device).manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, device=device, generator=generator)  # noqa: E731
    spread, shift = choices.choice([0.3, 1.0, 4.0]), choices.choice([-200.0, 0.0, 30.0])
    dtype = choices.choice([torch.bfloat16, torch.float32])
    logits = (spread * draw(n_rows, vocab_size) + shift).to(dtype)
    labels = torch.randint(vocab_size, (n_rows,), device=device, generator=generator)
    labels[draw(n_rows) < choices.choice([-9.0, 0.0])] = IGNORED
    inputs = {
        "advantages": draw(n_rows),
        "old_log_prob": draw(n_rows) - 8,
        "reference_log_prob": draw(n_rows) - 8,
    }
    return logits, labels, inputs


def _random_steps_against_float64(group, device, repeats):
    """Steps of one read whose loss or gradient is further from float64's than rounding explains."""
    choices, wrong = random.Random(7), []
    for step in range(repeats):
        vocab_size, n_rows = (
            choices.choice([1024, 4096, 32000, 50304, 128256]),
            choices.randrange(1, 150),
        )
        kind, denominator = choices.choice(list(LOSSES)), choices.choice([None, 7.0])
        logits, labels, inputs = _random_logits(choices, device, vocab_size, n_rows, 1000 + step)
        if kind in ("teacher", "mixture"):
            inputs = {
                "teacher": teacher_beside(logits.roll(1, 0)) if n_rows > 2 else logits.flip(0)
            }
            if choices.random() < 0.5:
                inputs = {"teacher": inputs["teacher"].float() * 1.01}
        if kind == "top-K":
            entries = entries_beside(logits, choices.choice([1, 20, 64, 128]), step)
            inputs = dict(zip(("ids", "log_tau"), entries))
        expected, size, whole = _float64_loss(kind, logits, labels, inputs, denominator)
        shard, x = _shard(group, logits, vocab_size)
        head, x = hl.HeadLoss(list(LOSSES[kind][0]), options=IN_FORWARD), x.requires_grad_()
        given = {"inputs": inputs} if kind == "policy" else {}
        if kind in ("teacher", "mixture"):
            given = {
                "inputs": {"teacher": hl.Teacher(_shard(group, inputs["teacher"], vocab_size)[1])}
            }
        if kind == "top-K":
            given = {"inputs": {"teacher": hl.TopKTeacher(*inputs.values(), renormalize=False)}}
        out = head(x, labels, shard=shard, denominator=denominator, **given)
        (found,) = torch.autograd.grad(out.loss, x)
        mine = whole if shard is None else whole[:, shard.start : shard.stop]
        rounding = (mine.to(x.dtype).double() - mine).norm()
        error, noise = (found.double() - mine).norm(), 1e-5 * mine.norm() + 1e-12
        far = abs(out.loss.double() - expected) > 1e-5 * size + 1e-6
        if bool(far) or not bool(error <= 1.1 * rounding + noise):
            wrong.append(
                (step, kind, vocab_size, n_rows, float(out.loss), float(expected), float(error))
            )
    return wrong


@on_hopper
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_random_steps_agree_with_float64(world_size):
    assert on_ranks(world_size, _random_steps_against_float64, 200) == [[]] * world_size


def _halves_at_once(group, device, steps):
    """Two groups of half of the ranks, each with a vocabulary of its own, which take steps of one
    read at once."""
    size, rank = group.size() // 2, group.rank()
    halves = [torch.distributed.new_group([*range(first, first + size)]) for first in (0, size)]
    mine, vocab_size = halves[rank // size], (32768, 50304)[rank // size]
    logits, labels = problem(device, vocab_size, 300, seed=rank // size)
    shard, x = _shard(mine, logits, vocab_size)
    head, x = hl.HeadLoss(list(TERMS), options=IN_FORWARD), x.requires_grad_()
    found = [torch.autograd.grad(head(x, labels, shard=shard).loss, x)[0] for _ in range(steps)]
    alone = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(
        hl.HeadLoss(list(TERMS), options=IN_FORWARD)(alone, labels).loss, alone
    )
    torch.distributed.barrier(group)
    return all(torch.equal(gradient, expected[:, shard.start : shard.stop]) for gradient in found)


@on_hopper
@pytest.mark.parametrize("world_size", [4, 8])
def test_two_groups_take_steps_at_once(world_size):
    assert on_ranks(world_size, _halves_at_once, 200) == [True] * world_size


BLOCKS = {
    "plain": {"terms": TERMS},
    "smoothing": {"terms": (hl.CrossEntropy(label_smoothing=0.1),), "metrics": ("accuracy",)},
    "GRPO": {
        "terms": (hl.PolicyGradient("clip", clip=(0.2, 0.28)), hl.KLToReference(0.05)),
        "metrics": ("entropy",),
        "inputs": POLICY,
        "token_weight": torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0, 0.25]),
    },
    "transformed": {
        "terms": TERMS,
        "transform": hl.Transform(
            softcap=9.0, temperature=torch.tensor([0.7, 1.0, 0.5, 1.3, 0.8, 3.0])
        ),
    },
    "entries": {"terms": (hl.CrossEntropy(), hl.TopKDistillation(0.5, support="tail"))},
}


def _blocks(group, device, case):
    """Loss, metrics, dH and dW of one sweep over blocks of tokens, in one launch each and in two;
    and how many."""
    given, launches = dict(BLOCKS[case]), []
    definition = {"terms": list(given.pop("terms")), "metrics": given.pop("metrics", ())}
    generator, width = torch.Generator().manual_seed(3), 1024
    hidden, weight = (
        torch.randn(n, 64, generator=generator).to(device, torch.bfloat16) / 4 for n in (384, width)
    )
    labels = torch.randint(width, (384,), generator=generator).to(device)
    labels[::7] = IGNORED
    shard, columns = _shard(group, weight.t(), width)
    columns, results = columns.t().contiguous(), []

    def repeated(x):
        if isinstance(x, torch.Tensor):
            return x.repeat(64)
        if isinstance(x, hl.Transform):
            return dataclasses.replace(x, temperature=repeated(x.temperature))
        return {k: repeated(v) for k, v in x.items()}

    given = {name: moved(repeated(x), device) for name, x in given.items()}
    if case == "entries":
        entries = entries_beside(hidden @ weight.t(), 7)
        given["inputs"] = {"teacher": hl.TopKTeacher(*entries, renormalize=False)}
    # blocks of 128 tokens
    linear = hl.Linear("one_sweep", budget=128 * 2 * len(columns) + 4 * columns.numel())
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FEWEST", "NARROWEST_ALONE", "NARROWEST", "NARROWEST_OF_ENTRIES"):
            patch.setattr(one_read, name, 0)
        launch = one_read_launch.statistics_and_gradient
        counted = lambda *args, **kwargs: launches.append(1) or launch(*args, **kwargs)  # noqa: E731
        patch.setattr(one_read_launch, "statistics_and_gradient", counted)
        for options in (hl.Options(backend="triton"), IN_BACKWARD):
            h, w = hidden.clone().requires_grad_(), columns.clone().requires_grad_()
            head = hl.HeadLoss(**definition, options=options)
            out = head.linear(h, w, labels, shard=shard, linear=linear, **given)
            out.loss.backward()
            results.append(
                [
                    x.detach().float().cpu()
                    for x in (out.loss, *out.metrics.values(), h.grad, w.grad)
                ]
            )
    return len(launches), *results


@on_hopper
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("case", BLOCKS)
def test_blocks_of_a_linear_head_take_one_launch_each(case, world_size):
    for launches, one, two in on_ranks(world_size, _blocks, case):
        assert launches == 3
        for a, b in zip(one, two):
            assert (a - b).norm() <= 4e-3 * b.norm() + 1e-6


def _replayed(group, device):
    logits, labels = problem(device, 32000, 64)
    shard, x = _shard(group, logits, 32000)
    x.requires_grad_()
    head = hl.HeadLoss(list(TERMS), options=IN_FORWARD)

    def step():
        out = head(x, labels, shard=shard)
        return out.loss, torch.autograd.grad(out.loss, x)[0]

    graph, outputs = captured(step)
    same = True
    for seed in range(20):
        generator = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn(x.shape, device=device, generator=generator))
        same &= replays(graph, outputs, step)[1]
    return same


@on_hopper
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_one_launch_replays_from_a_graph(world_size):
    assert on_ranks(world_size, _replayed) == [True] * world_size


def _left_alone(group, device):
    """A step that the last rank does not make: its peers' results are NaN after the timeout, their
    next call raises."""
    logits, labels = problem(device, 32000)
    # whose memory nothing uses afterwards
    others = torch.distributed.new_group(list(range(group.size())))
    shard, x = _shard(others, logits, 32000)
    head = hl.HeadLoss(options=IN_FORWARD)
    x.requires_grad_()
    head(x, labels, shard=shard)
    symmetric_memory._groups[others.group_name].memories[True][-1].one_read.timeout_ms = 200
    found = []
    if group.rank() < group.size() - 1:
        started = time.monotonic()
        out = head(x, labels, shard=shard)
        found += [
            bool(out.loss.isnan()),
            bool(torch.autograd.grad(out.loss, x)[0][0].isnan().all()),
        ]
        found.append(time.monotonic() - started < 60)
        with pytest.raises(
            RuntimeError, match=r"waited 0.2 s for a rank of its group that did not come"
        ):
            head(x, labels, shard=shard)
    torch.distributed.barrier(group)
    return found


@on_hopper
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_rank_that_does_not_come_is_an_error(world_size):
    assert on_ranks(world_size, _left_alone) == [[True, True, True]] * (world_size - 1) + [[]]
