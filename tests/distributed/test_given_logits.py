"""`Options(check=True)` looks at the values of logits, a teacher's and the student's: some that are
probabilities, or that each rank has normalised over its own columns."""

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks

import tp_headloss as hl

V, N, NAN, INF = 40, 6, torch.nan, torch.inf
CHECK = hl.Options(check=True)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LABELS = torch.tensor([0, 7, 14, 21, -100, 35])

# what logits may be taken for -> its logits [N, V] and a shard -> this rank's part
WHOLE = {
    "softmax": lambda x: x.softmax(-1),
    "softmax of a padded width": lambda x: torch.cat([x, x + 1], 1).softmax(-1)[:, :V],
    "probabilities of a nucleus": lambda x: x.softmax(-1) * (x > 0.5),
}
OWN = {
    "log_softmax": lambda x: x.log_softmax(-1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax at a temperature": lambda x: (x / 4).log_softmax(-1),
}
MASKS = {
    "no mask": lambda x: x,
    "a token of zeros": lambda x: x * (torch.arange(N, device=x.device) != 2).unsqueeze(1),
    "NaN where the label is ignored": lambda x: x.where(LABELS.to(x.device)[:, None] >= 0, NAN),
}
RIGHT = {
    "logits": lambda x: x,
    "log-probs": lambda x: x.log_softmax(-1),
    "log-probs of one id": lambda x: torch.where(torch.arange(V, device=x.device) == 3, 0.0, -INF) + 0 * x,
    "zeros": lambda x: 0 * x,
    "ones": lambda x: 0 * x + 1,
    "small logits": lambda x: x / 1e4,
}  # fmt: skip
# a change of probabilities at one token, by column, after which they are none
CHANGES = [{-1: -1.0, -2: 1.0}, {0: -1.0, 1: 1.0}, {0: 0.5}]


def loss_of(group, device, of_whole, of_own, dtype, options, bounds=None, way="loss", padding=0.0):
    """Loss of a student with a teacher that is a function of logits, whole ones, then a rank's with
    its padding; by way "student" of a student alone that is.

    `bounds` may be a padded size, too.
    """
    shard = hl.VocabShard.from_group(group, V, padded_size=bounds if type(bounds) is int else None)
    if isinstance(bounds, list):
        shard = hl.VocabShard.from_boundaries(bounds, V, group)
    both = torch.randn(2, N, V, generator=torch.Generator().manual_seed(5)).to(device)
    cut = slice(shard.start, shard.start + shard.valid_width)

    def padded(x):
        return F.pad(x, (0, shard.width - x.shape[1]), value=padding)

    logits = of_own(padded(of_whole(2 * both[0])[:, cut])).to(dtype)
    if way == "student":
        return float(hl.HeadLoss(options=options)(logits, LABELS.to(device), shard=shard).loss)
    teacher = hl.Teacher(logits)
    given = {"shard": shard, "inputs": {"teacher": teacher}}
    head_loss = hl.HeadLoss([hl.Distillation()], options=options)
    labels = LABELS.to(device)
    if way == "linear":
        weight = padded(both[1][:, cut]).t().contiguous()
        return float(head_loss.linear(torch.eye(N, device=device), weight, labels, **given).loss)
    return float(head_loss(padded(both[1][:, cut]), labels, **given).loss)


def of_whole(group, device, kind, mask, *rest):
    return loss_of(group, device, lambda x: MASKS[mask](WHOLE[kind](x)), lambda x: x, *rest)


def of_own(group, device, kind, mask, *rest):
    return loss_of(group, device, lambda x: x, lambda x: MASKS[mask](OWN[kind](x)), *rest)


def right(group, device, kind, *rest):
    return loss_of(group, device, RIGHT[kind], lambda x: x, *rest)


def changed(group, device, change):
    def teacher(x):
        q = x.softmax(-1)
        for column, value in CHANGES[change].items():
            q[2, column] += value
        return q

    return loss_of(group, device, teacher, lambda x: x, torch.float32, CHECK)


def expect_refused(results, said):
    ((kind, message),) = {(result.kind, result.message) for result in results}
    assert kind == "ValueError" and said in message, message


@pytest.mark.parametrize("way", ["loss", "linear", "student"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("world_size", [1, 2])
def test_check_knows_probabilities_from_logits(world_size, kind, mask, dtype, way):
    call = kind, mask, dtype
    results = on_ranks(world_size, of_whole, *call, CHECK, None, way, failures=True)
    tokens = 4 if mask == "a token of zeros" else 5
    expect_refused(
        results, f"got probabilities, not negative and with a sum of at most 1 at each of {tokens}"
    )
    assert results[0].message.startswith("logits" if way == "student" else "teacher.logits")
    assert all(x > 0 for x in on_ranks(world_size, of_whole, *call, None, None, way)), "as logits"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("bounds", [None, [0, 9, V], [0, 9, 9, V]])
@pytest.mark.parametrize("way", ["loss", "student"])
def test_check_knows_logits_that_are_normalised_over_a_ranks_own_columns(
    way, bounds, kind, mask, dtype
):
    world_size = 2 if bounds is None else len(bounds) - 1
    call = of_own, kind, mask, dtype, CHECK, bounds, way
    results = on_ranks(world_size, *call, failures=True)
    expect_refused(results, "normalised over a rank's own columns")


@pytest.mark.parametrize("padding", [0.0, 0.5, -9.0, -INF])
@pytest.mark.parametrize("padded_size", [42, 44, 60])
@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("way", ["loss", "linear", "student"])
def test_check_knows_logits_that_are_normalised_with_a_ranks_own_padding(
    way, kind, padded_size, padding
):
    for dtype in DTYPES:
        call = of_own, kind, "no mask", dtype, CHECK, padded_size, way, padding
        results = on_ranks(2, *call, failures=True)
        expect_refused(results, "normalised over a rank's own columns")


@pytest.mark.parametrize("bounds", [None, [0, V, V], [0, 1, V], 41, 44])
@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("way", ["loss", "student"])
def test_check_takes_logits_that_say_nothing_wrong(way, kind, bounds):
    for dtype in DTYPES:
        call = right, kind, dtype
        assert on_ranks(2, *call, CHECK, bounds, way) == on_ranks(2, *call, None, bounds, way)


@pytest.mark.parametrize("mask", MASKS)
def test_check_takes_log_probs_of_the_one_rank_that_has_ids(mask):
    call = of_own, "log_softmax", mask, torch.float32
    assert on_ranks(2, *call, CHECK, [0, V, V]) == on_ranks(2, *call, None, [0, V, V])


@pytest.mark.parametrize("change", range(len(CHANGES)))
@pytest.mark.parametrize("world_size", [1, 2])
def test_check_takes_logits_that_are_no_probabilities_at_one_token(change, world_size):
    assert all(x > 0 for x in on_ranks(world_size, changed, change))
