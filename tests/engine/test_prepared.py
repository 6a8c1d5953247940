"""Steps whose launches are prepared have the bits of the first ones, which are not, and serve
nothing else."""

import pytest
import torch
from logits_problem import N, V, rows
from ranks import on_ranks

from tp_headloss import CrossEntropy, Entropy, HeadLoss, Metric, Options, VocabShard, ZLoss
from tp_headloss.engine.ways.prepared_triton import PreparedLaunches

TRITON = Options(backend="triton")
TERMS = {
    "cross-entropy": ([CrossEntropy()], ()),
    "squares": ([ZLoss(0.3), CrossEntropy(), Entropy(0.01)], ("accuracy", "entropy")),
}
DENOMINATORS = {"count": None, "number": 5.0, "tensor": torch.tensor(3.0)}


@pytest.fixture
def steps(monkeypatch):
    """How often prepared launches ran: forward and backward."""
    counts = {"statistics": 0, "gradient": 0}
    for name, of_way in {"statistics": "forward", "gradient": "gradient_of_loss"}.items():
        method = getattr(PreparedLaunches, of_way)

        def counted(self, *args, name=name, method=method):
            found = method(self, *args)
            counts[name] += found is not None
            return found

        monkeypatch.setattr(PreparedLaunches, of_way, counted)
    return counts


def step(head, x, labels, upstream=1.0, also=None, **given):
    """The output of a step, and the gradient of the logits."""
    x = x.detach().requires_grad_()
    out = head(x, labels, **given)
    (upstream * out.loss + (0.0 if also is None else also(out.stats))).backward()
    return out, x.grad


def assert_equal(one, two):
    (out, gradient), (again, gradient_again) = one, two
    assert torch.equal(gradient, gradient_again) and torch.equal(out.loss, again.loss)
    assert (
        torch.equal(out.count, again.count)
        and out.terms == again.terms
        and out.metrics == again.metrics
    )
    assert not any(total.requires_grad for total in again.terms.values())
    for a, b in zip(out.stats, again.stats):
        assert not isinstance(a, torch.Tensor) or torch.equal(a, b)


@pytest.mark.interpreted
@pytest.mark.parametrize("layout", ["plain", "transposed", "padded", "int32"])
@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("terms", TERMS)
def test_prepared_steps_have_the_bits_of_the_first(terms, denominator, layout, steps, device):
    x, labels = rows(device)
    x = x.T.contiguous().T if layout == "transposed" else x
    labels = labels.int() if layout == "int32" else labels
    given = (
        {"shard": VocabShard.from_group(None, vocab_size=V - 7, padded_size=V)}
        if layout == "padded"
        else {}
    )
    labels = labels.clamp(max=V - 8) if layout == "padded" else labels
    divisor = DENOMINATORS[denominator]
    given["denominator"] = divisor.to(device) if isinstance(divisor, torch.Tensor) else divisor
    head = HeadLoss(TERMS[terms][0], metrics=TERMS[terms][1], options=TRITON)
    first = step(head, x, labels, 2.0, **given)
    assert steps == {"statistics": 0, "gradient": 0}
    later = step(head, x, labels, 2.0, **given)
    assert steps == {"statistics": 1, "gradient": 1}
    assert_equal(first, later)
    other = step(head, x.flip(0), labels.flip(0), 2.0, **given)  # other values of the same kind
    assert steps == {"statistics": 2, "gradient": 2}
    assert_equal(step(HeadLoss(*TERMS[terms][:1], metrics=TERMS[terms][1], options=TRITON), x.flip(0), labels.flip(0),
                      2.0, **given), other)  # fmt: skip


def test_denominators_of_another_kind_are_prepared_apart(steps, device):
    x, labels = rows(device)
    head, divisors = HeadLoss(options=TRITON), (None, 5.0, torch.tensor(5.0, device=device))
    for given in 3 * [{"denominator": divisor} for divisor in divisors]:
        assert_equal(
            step(head, x, labels, **given), step(HeadLoss(options=TRITON), x, labels, **given)
        )
    # from the second call of a kind on, which numbers and tensors are together
    assert steps == {"statistics": 7, "gradient": 7}


def test_gradients_of_statistics_take_the_general_way(steps, device):
    x, labels = rows(device)
    head = HeadLoss([CrossEntropy(), ZLoss(0.3)], options=TRITON)
    found = [
        step(head, x, labels, also=lambda stats: (stats.log_prob * 0.5).sum()) for _ in range(3)
    ]
    assert steps == {"statistics": 2, "gradient": 0}
    assert_equal(found[0], found[2])


def test_what_is_saved_may_come_back_elsewhere(steps, device):
    """Hooks that pack saved tensors, as offloading does, may return them at another place."""
    x, labels = rows(device)
    head = HeadLoss(options=TRITON)

    def moved(tensor):
        return torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])[1:].view(tensor.shape)

    found = []
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, moved):
            found.append(step(head, x, labels))
    assert steps == {"statistics": 2, "gradient": 0}
    assert_equal(found[0], found[2])


@pytest.mark.parametrize("inplace", [False, True])
def test_two_backwards_and_in_place_gradients(inplace, steps, device):
    x, labels = rows(device)
    head = HeadLoss(options=Options(backend="triton", inplace=inplace))
    expected = step(HeadLoss(options=TRITON), x, labels)[1]
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        out = head(leaf * 1.0, labels)
        out.loss.backward(retain_graph=not inplace)
    if not inplace:
        out.loss.backward()
    assert torch.equal(leaf.grad, expected if inplace else 2 * expected)
    assert steps == {"statistics": 1, "gradient": 0 if inplace else 2}


def test_a_way_that_was_not_ready_is_taken_when_it_is(steps, device, monkeypatch):
    x, labels = rows(device)
    head = HeadLoss(options=TRITON)
    first = step(head, x, labels)
    with monkeypatch.context() as patch:
        patch.setattr(PreparedLaunches, "is_ready", lambda *_: False)
        second = step(head, x, labels)
    assert steps == {"statistics": 0, "gradient": 0}
    third = step(head, x, labels)
    assert steps == {"statistics": 1, "gradient": 1}
    assert_equal(first, second)
    assert_equal(first, third)


def test_a_kind_that_comes_once_prepares_nothing(steps, device):
    x, labels = rows(device)
    head = HeadLoss(options=TRITON)
    for n in range(1, N):
        step(head, x[:n], labels[:n])
    assert steps == {"statistics": 0, "gradient": 0}


def test_others_are_not_prepared(steps, device):
    """What the prepared launches do not know: own losses, weights, values that are no statistics,
    one launch."""
    x, labels = rows(device)
    weights = torch.rand(N, generator=torch.Generator().manual_seed(2)).to(device)
    trained = torch.tensor(3.0, device=device, requires_grad=True)
    for head, given in (
        (HeadLoss(CrossEntropy(label_smoothing=0.1), options=TRITON), {}),
        (HeadLoss(options=TRITON), {"token_weight": weights}),
        (HeadLoss(options=TRITON), {"denominator": trained}),
        (HeadLoss(options=Options(backend="torch")), {}),
    ):
        found = [step(head, x, labels, **given) for _ in range(3)]
        assert_equal(found[0], found[2])
    assert steps == {"statistics": 0, "gradient": 0}


def test_a_sum_a_denominator_in_double_precision_and_checks_are_prepared(steps, device):
    x, labels = rows(device)
    for head, given in (
        (HeadLoss(reduction="sum", options=TRITON), {}),
        (HeadLoss(options=TRITON), {"denominator": torch.tensor(7, device=device)}),
        (HeadLoss(options=Options(backend="triton", check=True)), {}),
    ):
        found = [step(head, x, labels, **given) for _ in range(2)]
        assert_equal(found[0], found[1])
    assert steps == {"statistics": 3, "gradient": 3}
    with pytest.raises(ValueError, match="label of token 0"):
        head(x, torch.full_like(labels, V))
    assert steps["statistics"] == 4


def test_metrics_of_ones_own_go_with_prepared_launches(steps, device):
    x, labels = rows(device)
    own = Metric(lambda stats: {"confidence": stats.log_prob.exp(), "max_lse": stats.lse})
    head = HeadLoss(metrics=own, options=TRITON)
    found = [step(head, x, labels) for _ in range(2)]
    assert set(found[1][0].metrics) == {"confidence", "max_lse"} and steps == {
        "statistics": 1,
        "gradient": 1,
    }
    assert_equal(found[0], found[1])


def test_transforms_are_refused_as_in_a_first_call(device):
    x, labels = rows(device)
    head = HeadLoss(options=TRITON)
    for _ in range(4):
        with pytest.raises(RuntimeError, match="transforms of torch"):
            torch.func.grad(lambda x: head(x, labels).loss)(x)
        step(head, x, labels)


def ranks_run(group, device, transport):
    """Losses of three steps on this rank, in turn with other values of the same kind."""
    shard = VocabShard.from_group(group, V, padded_size=1024)
    x, labels = rows(device)
    local = torch.nn.functional.pad(x, (0, 1024 - V))[:, shard.start : shard.stop].contiguous()
    head = HeadLoss(
        [CrossEntropy(), ZLoss(0.3)], options=Options(backend="triton", transport=transport)
    )
    found = [step(head, x, labels, shard=shard) for x in (local, 2 * local, local)]
    (known,) = head._definition.plan.checked.values()
    assert [[type(way) for way in ways] for ways in known.ways.values()] == [[PreparedLaunches]]
    return [(out.loss.item(), gradient.cpu()) for out, gradient in found]


@pytest.mark.parametrize("transport", ["gather", "sum"])
def test_several_ranks_exchange_in_every_step(transport, device):
    first, second = on_ranks(2, ranks_run, transport)
    (a, gradient), (b, _), (again, gradient_again) = first
    assert a == again != b and torch.equal(gradient, gradient_again)
    assert [loss for loss, _ in second] == [a, b, a]
    alone = step(HeadLoss([CrossEntropy(), ZLoss(0.3)], options=TRITON), *rows(device))[0].loss
    assert a == pytest.approx(alone.item(), rel=1e-6)
