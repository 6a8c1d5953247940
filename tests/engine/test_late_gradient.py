"""What the backward of one read adds to its forward: the gradient where that was not foreseen, and
what is foreseen."""

import contextlib
import dataclasses
import functools
import itertools
import math
import random
import struct
from types import SimpleNamespace

import pytest
import torch
from one_read_problem import entries_beside

import tp_headloss as hl
from tp_headloss.engine import passes
from tp_headloss.engine.one_read import launch as one_read_launch
from tp_headloss.engine.one_read.late_gradient_triton import LateGradient
from tp_headloss.engine.one_read.params import TERMS
from tp_headloss.engine.reductions import StatisticValue
from tp_headloss.head_loss.reduction import fused_reduction

ROWS, WIDTH = 6, 40
UPSTREAM = 1.0, 0.0, -0.0, 1e-30, 0.25, -3.0, 65536.0, math.inf, math.nan
# beside a number that a forward wrote the gradient for
WRITTEN = math.nan, 1.0, 0.0, -3.0, math.inf
EVERY = list(itertools.product(UPSTREAM, WRITTEN))
# each of both in some pair, and pairs of equal ones
SOME = [*zip(UPSTREAM, itertools.cycle(WRITTEN)), (1.0, 1.0), (-3.0, -3.0), (-0.0, 0.0)]
LOSSES = {
    "cross-entropy": ([hl.CrossEntropy()], ()),
    "squares": ([hl.CrossEntropy(), hl.ZLoss(0.1)], ()),
    "entropy": ([hl.CrossEntropy(0.5), hl.Entropy(0.2)], ("accuracy",)),
    "total": ([hl.CrossEntropy(), hl.Term("own", StatisticValue("total"), 1e-2)], ("entropy",)),
    "entries": ([hl.CrossEntropy(0.5), hl.TopKDistillation(support="vocabulary")], ()),
    "a tail": (
        [hl.Term("own", StatisticValue("tail_log_mass"), inputs=("teacher",))],
        ("entropy",),
    ),
}


def forward(
    device,
    terms,
    metrics,
    weighted=False,
    width=WIDTH,
    valid=WIDTH,
    dtype=torch.bfloat16,
    transform=None,
    without_label=False,
):
    """What a forward of one read saves, by the general way, and the gradient of the loss for an
    upstream gradient. without_label: the first token's has no probability."""
    generator = torch.Generator().manual_seed(width)
    logits = (3 * torch.randn(ROWS, width, generator=generator)).to(device, dtype)
    labels = torch.randint(valid, (ROWS,), generator=generator).to(device)
    labels[1] = -100
    weight = torch.rand(ROWS, generator=generator).to(device) if weighted else None
    if without_label:
        logits[0, labels[0]] = -math.inf
    shard = hl.VocabShard(0, width, valid)
    inputs = {}
    if any("teacher" in term.inputs for term in terms):
        teacher = hl.TopKTeacher(*entries_beside(logits[:, :valid], 5), renormalize=False)
        inputs = {"teacher": teacher}
    given = {"shard": shard, "token_weight": weight, "transform": transform, "inputs": inputs}
    head = hl.HeadLoss(terms, metrics=metrics, options=hl.Options(backend="triton"))

    x = logits.clone().requires_grad_()
    loss = head(x, labels, **given).loss

    @functools.cache
    def expected(upstream):
        return torch.autograd.grad(upstream * loss, x, retain_graph=True)[0]

    what = head._given(logits, labels, shard, transform)._replace(teacher=inputs.get("teacher"))
    call, request = head._checked(what, weight, None, inputs)
    reduction = fused_reduction(call, logits, "triton")
    merged, outputs, reduced = passes.reduced_statistics(request, reduction)
    by_name = dict(zip(request.layout.outputs, outputs))
    values = [
        by_name[name] for name in reduction.plan.statistics[: len(reduction.plan.coefficients)]
    ]
    return request, reduction, merged, values, reduced.inverse, expected


def bits(number):
    return struct.unpack("<i", struct.pack("<f", number))[0] ^ 0x3F800000


def record(device, number=1.0, streak=0, patience=0):
    return torch.tensor([bits(number), streak, patience, 0], dtype=torch.int32, device=device)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "weighted, width, valid", [(False, 40, 40), (True, 40, 33), (False, 33, 33)]
)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_gradient_that_was_not_foreseen_is_written(loss, weighted, width, valid, device):
    request, reduction, merged, values, inverse, expected = forward(
        device, *LOSSES[loss], weighted, width, valid
    )
    logits = request.tensors.logits
    strides = torch.empty_like(logits).stride()
    late = LateGradient(request, reduction.plan, False, reduction.weight, strides)
    for given, written_for in EVERY if loss == "squares" else SOME:
        pair = torch.stack([inverse, torch.tensor(written_for, dtype=torch.float64, device=device)])
        gradient = torch.full_like(logits, 7.0)  # which a forward would not write
        loss_gradient = torch.tensor(given, device=device)
        late(
            gradient,
            record(device),
            request.tensors,
            merged,
            reduction.weight,
            pair,
            values,
            loss_gradient,
        )
        if struct.pack("<f", given) == struct.pack("<f", written_for) and not math.isnan(given):
            assert gradient.eq(7.0).all()
        else:
            assert torch.equal(gradient.isnan(), (right := expected(given)).isnan())
            assert torch.equal(gradient.nan_to_num(), right.nan_to_num())


def test_a_square_has_no_gradient_for_an_upstream_gradient_of_0_whatever_its_value_is(device):
    """Its derivative, twice an infinite value, times 0 would be NaN."""
    terms = [hl.Term("own", StatisticValue("log_prob", square=True))]
    request, reduction, merged, values, inverse, expected = forward(
        device, terms, (), without_label=True
    )
    logits = request.tensors.logits
    late = LateGradient(request, reduction.plan, False, reduction.weight, logits.stride())
    pair = torch.stack([inverse, inverse.new_tensor(math.nan)])
    gradient, upstream = torch.full_like(logits, 7.0), torch.tensor(0.0, device=device)
    rest = merged, reduction.weight, pair, values, upstream
    late(gradient, record(device), request.tensors, *rest)
    assert values[0][0] == -math.inf and not gradient.any()
    assert torch.equal(gradient, expected(0.0))


def test_slopes_of_a_row_function_are_taken(device):
    terms = [hl.CrossEntropy(), hl.Entropy(0.2)]
    request, reduction, merged, _, inverse, expected = forward(device, terms, (), True)
    slopes = torch.zeros(len(TERMS), ROWS, device=device)
    slopes[TERMS.index("log_prob")], slopes[TERMS.index("entropy")] = -1.0, -0.2
    slopes[:, 1] = math.nan  # of the ignored token, which nobody reads
    strides = torch.empty_like(request.tensors.logits).stride()
    late = LateGradient(request, reduction.plan, True, reduction.weight, strides)
    for given in (0.5, 0.0, -2.0):
        pair, upstream = (
            torch.stack([inverse, inverse.new_tensor(math.nan)]),
            torch.tensor(given, device=device),
        )
        gradient = torch.full_like(request.tensors.logits, 7.0)
        late(
            gradient,
            record(device),
            request.tensors,
            merged,
            reduction.weight,
            pair,
            slopes,
            upstream,
        )
        assert torch.allclose(gradient.float(), expected(given).float(), rtol=2**-7, atol=1e-9)


def transforms(device):
    """Of calls that share a kind: with temperatures or without, which lie at other places, too."""
    temperatures = torch.linspace(0.5, 2, ROWS + 1, device=device)
    yield None
    yield hl.Transform(temperature=temperatures[:ROWS])
    yield hl.Transform(temperature=temperatures[1:])
    yield hl.Transform(temperature=temperatures[:ROWS].flip(0))
    yield None


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_calls_of_one_kind_have_their_own_temperatures(scale, device, monkeypatch):
    monkeypatch.setattr(one_read_launch, "turns_on", lambda device: contextlib.nullcontext())
    kind = SimpleNamespace(late={}, slopes=None)
    for transform in transforms(device):
        transform = dataclasses.replace(transform or hl.Transform(), scale=scale)
        request, reduction, merged, values, inverse, expected = forward(
            device, *LOSSES["cross-entropy"], transform=transform
        )
        gradient = torch.full_like(request.tensors.logits, 7.0)
        late = one_read_launch.late_gradient(kind, record(device), request, reduction, gradient)
        pair = torch.stack([inverse, inverse.new_tensor(math.nan)])
        saved = merged, None, reduction.weight, pair, *values
        assert late.complete(gradient, torch.tensor(0.5, device=device), request.tensors, saved)
        assert torch.equal(gradient, expected(0.5))


class Steps:
    """Steps of a loss whose forward writes the gradient where the record says so; the kernel learns
    from each."""

    def __init__(self, device):
        self.request, reduction, self.merged, self.values, self.inverse, _ = forward(
            device, *LOSSES["cross-entropy"]
        )
        self.gradient = torch.empty_like(self.request.tensors.logits)
        strides = self.gradient.stride()
        self.late = LateGradient(self.request, reduction.plan, False, None, strides)
        self.record = record(device)

    def take(self, upstream):
        """-> bytes of a logit that a step moves: 4, 6 as two launches do, or 8."""
        number, streak, patience, _ = self.record.tolist()
        foreseen = struct.unpack("<f", struct.pack("<i", number ^ 0x3F800000))[0]
        is_written = streak >= patience and math.isfinite(foreseen)  # as `foreseen` of the kernel
        pair = torch.stack(
            [self.inverse, self.inverse.new_tensor(foreseen if is_written else math.nan)]
        )
        given, tensors = self.inverse.new_tensor(upstream).float(), self.request.tensors
        self.late(self.gradient, self.record, tensors, self.merged, None, pair, self.values, given)
        return (
            6
            if not is_written
            else 4
            if struct.pack("<f", foreseen) == struct.pack("<f", upstream)
            else 8
        )


def test_an_upstream_gradient_that_stays_is_foreseen_from_its_second_step_on(device):
    steps = Steps(device)
    assert [steps.take(1.0) for _ in range(3)] == [4, 4, 4]
    assert [steps.take(0.25) for _ in range(3)] == [8, 4, 4]
    # twice in vain, so with more patience
    assert [steps.take(x) for x in (0.0, 0.25, 0.25, 0.25)] == [8, 8, 6, 6]
    assert [steps.take(0.25) for _ in range(2)] == [4, 4]


LENGTHS = [[1], [2], [3], [1, 5], [2, 3, 7], [40], [1, 1, 1, 30]]


def repeated(choices):
    """Upstream gradients of which each comes some times in a row, as many each time or not."""
    lengths = choices.choice(LENGTHS)
    numbers = itertools.cycle(choices.sample(UPSTREAM, choices.randrange(2, 4)))
    return [
        x
        for length in itertools.islice(itertools.cycle(lengths), 60)
        for x in [next(numbers)] * length
    ][:120]


@pytest.mark.parametrize("seed", [0, 3, 5, 7])  # which have all lengths
def test_no_sequence_of_upstream_gradients_costs_more_than_two_launches(seed, device):
    """But for ten steps, in which a record learns to be patient."""
    steps, choices = Steps(device), random.Random(seed)
    cost = list(
        itertools.accumulate(steps.take(x) - 6 for x in repeated(choices) + repeated(choices))
    )
    assert max(cost) <= 2 * 10
