"""One read without a GPU: its arguments, the places of its results, its flags, and a model of its
protocol."""

import functools
import itertools
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from one_read_model import Rank, run
from one_read_problem import N, entries_beside, moved
from one_read_ring import Ring

import tp_headloss as hl
from tp_headloss.engine.one_read import cuts as one_read_cuts
from tp_headloss.engine.one_read import kernel as one_read_kernel
from tp_headloss.engine.one_read import launch as one_read_launch
from tp_headloss.engine.one_read import params as one_read_params
from tp_headloss.engine.one_read import rows as row_functions
from tp_headloss.engine.request import Tensors
from tp_headloss.engine.ways import one_read
from tp_headloss.ranks.shard import canonical_chunk_size
from tp_headloss.statistics import layout_of

SOURCE = Path(one_read_launch.__file__).parent / "roles.cuh"


@functools.cache
def kernel_numbers():
    """The kernel's named integers, in calls without a second round."""
    source = SOURCE.with_name("numbers.cuh").read_text()
    return {
        name: int(x) for name, x in re.findall(r"(\w+) = (?:HAS_MIXTURE.*: )?(\d+)[,;]", source)
    }


@functools.cache
def numbers_of_two_rounds():
    """How many warps of a role, or teams of them, there are in calls with a second round."""
    source = SOURCE.with_name("numbers.cuh").read_text()
    return {name: int(x) for name, x in re.findall(r"(\w+) = HAS_MIXTURE \? (\d+) :", source)}


@pytest.mark.parametrize(
    "dtype, of_teacher, has_entries",
    [
        (torch.bfloat16, 0, False),
        (torch.bfloat16, 1, False),
        (torch.float32, 0, False),
        (torch.bfloat16, 0, True),
    ],
)
@pytest.mark.parametrize("vocab_size", [250, 700, 32000, 32064, 50304, 128256, 151936, 262144])
def test_leaves_depend_on_the_vocabulary_alone(vocab_size, dtype, of_teacher, has_entries):
    chunk = canonical_chunk_size(vocab_size) // one_read_cuts.columns_of_vector(dtype)
    matrices = 1 + of_teacher
    given = of_teacher, has_entries
    all_cuts = [one_read_cuts.cuts_of(chunk, 8 // ranks, *given) for ranks in (1, 2, 4, 8)]
    assert len({(cuts.chunk, cuts.cuts) for cuts in all_cuts}) == 1
    for ranks, cuts in zip((1, 2, 4, 8), all_cuts):
        assert (
            cuts.leaves * cuts.pieces * ranks == 8 << cuts.cuts
            and cuts.leaves & (cuts.leaves - 1) == 0
        )
        assert (
            -(-cuts.chunk // (1 << cuts.cuts)) <= one_read_cuts.LEAF
            and cuts.leaves <= kernel_numbers()["SUM"]
        )
        assert (
            4 <= cuts.slots <= one_read_params.SLOTS
            and cuts.slots * cuts.slot_bytes <= one_read_kernel.SHARED
        )
        assert cuts.pieces * ranks <= one_read_cuts.PACKETS
        bytes_of_each, rest = divmod(cuts.slot_bytes, matrices)
        assert rest == 0 and bytes_of_each % 128 == 0
        assert bytes_of_each >= 16 * cuts.chunk * cuts.leaves / (1 << cuts.cuts)


@pytest.mark.parametrize("width, dtype, is_readable", [
    (1008, torch.bfloat16, True), (1004, torch.bfloat16, False), (1008, torch.float32, True),
    (1004, torch.float32, False), (1002, torch.float32, False),
])  # fmt: skip
def test_a_teacher_needs_memory_for_the_rest_of_the_students_vectors(width, dtype, is_readable):
    """Students have rows of 1008 columns in memory."""
    student = torch.zeros(3, 1008, dtype=torch.bfloat16)[:, :width]
    tensors = Tensors(student, teacher=torch.zeros(3, width, dtype=dtype))
    request = SimpleNamespace(tensors=tensors)
    assert one_read_cuts.obstacle_to_rows(student, False) is None
    assert (one_read_cuts.obstacle_to_teacher(request) is None) == is_readable


def test_the_argument_and_its_callers_agree():
    """The compiler checks what stands in CUDA, too: see `params.agreement`."""
    params = one_read_params
    assert params.TERMS == row_functions.SLOPES and params.GIVENS == row_functions.MOST_INPUTS
    addresses = params.N_ADDRESSES + 2  # and `control` and `failed`
    assert sum(params.POINTERS.values()) == addresses


def places_of(layout):
    kind, plan = object.__new__(one_read_launch.Kind), SimpleNamespace(statistics=("log_prob",))
    return dict(zip(one_read_params.OUTPUTS, kind._places(layout, plan, None, N)))


@pytest.mark.parametrize("n_flags", range(4))
def test_every_result_has_a_place_of_its_own(n_flags):
    for want in itertools.combinations(one_read.FLAGS, n_flags):
        layout = layout_of(True, want)
        merged, values, *flags = layout.empty_outputs(torch.empty(()), N, torch.float32)
        rows = {
            **dict(zip(layout.merged, merged)),
            **dict(zip(layout.values, values)),
            **dict(zip(layout.flags, flags)),
        }
        outputs, places = (merged, values, *flags), places_of(layout)
        for name, row in rows.items():
            number, offset = places.pop(name)
            assert outputs[number].data_ptr() + offset == row.data_ptr(), name
        beside = "loss", "sums", "inverse"
        assert {name for name, place in places.items() if place is not None} == {*beside}


def test_a_result_without_a_place_is_an_error():
    layout = SimpleNamespace(merged=("shift",), values=("a sum",), flags=())
    with pytest.raises(AssertionError, match="the kernel writes no"):
        places_of(layout)
    layout.values = ("shift",)
    with pytest.raises(AssertionError, match="names of merged rows and of values"):
        places_of(layout)


FLAGS = {
    "cross-entropy": ([hl.CrossEntropy()], (), {}, []),
    "a metric": ([hl.CrossEntropy()], ("entropy",), {}, ["ENTROPY"]),
    "a bonus": ([hl.CrossEntropy(), hl.Entropy(0.1)], (), {}, ["ENTROPY", "ENTROPY_TERM"]),
    "a policy": ([hl.PolicyGradient(), hl.Entropy(0.1)], (), {}, ["ENTROPY", "ENTROPY_TERM"]),
    "a policy with a metric": ([hl.PolicyGradient()], ("entropy",), {}, ["ENTROPY"]),
    "smoothing": ([hl.CrossEntropy(label_smoothing=0.1)], ("accuracy",), {}, ["ARGMAX", "TOTAL"]),
    "a softcap": ([hl.CrossEntropy()], (), {"softcap": 9.0}, ["SOFTCAP"]),
    "a teacher": ([hl.Distillation()], (), {}, ["FORWARD_KL"]),
    "a mixture": ([hl.Distillation(1.0, "jsd")], ("entropy",), {}, ["JSD", "ENTROPY"]),
    "total variation": ([hl.Distillation(1.0, "total_variation")], (), {}, ["TOTAL_VARIATION"]),
    "another temperature": (
        [hl.Distillation(1.0, "reverse_kl")],
        (),
        {"temperature": 2.0},
        ["REVERSE_KL", "TEMPERED"],
    ),
    "temperatures": (
        [hl.Distillation()],
        (),
        {"temperature": torch.ones(N)},
        ["FORWARD_KL", "TEMPERED"],
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", FLAGS)
def test_a_kernel_is_compiled_with_what_its_loss_needs(case, dtype, device):
    terms, metrics, transform, expected = FLAGS[case]
    head = hl.HeadLoss(terms, metrics=metrics, options=hl.Options(backend="triton"))
    logits = torch.zeros(N, 128, dtype=dtype, device=device, requires_grad=True)
    labels = torch.zeros(N, dtype=torch.int64, device=device)
    names = dict.fromkeys(name for term in terms for name in term.inputs)
    inputs = {name: torch.zeros(N, device=device) for name in names}
    if "teacher" in inputs:
        inputs["teacher"] = hl.Teacher(logits.detach())
    given = head._given(logits, labels, None, moved(hl.Transform(**transform), device))
    given = given._replace(teacher=inputs.get("teacher"))
    expect_flags(head, given, inputs, dtype, expected)
    if "teacher" in inputs and dtype != torch.float32:
        wide = {"teacher": hl.Teacher(logits.detach().float())}
        given = given._replace(teacher=wide["teacher"])
        expect_flags(head, given, inputs | wide, dtype, [*expected, "TEACHER_FLOAT32"])


@pytest.mark.parametrize("n_entries, listed", [(1, 1), (32, 1), (33, 2), (128, 4)])
def test_a_kernel_is_compiled_for_the_length_of_a_top_k_teachers_lists(n_entries, listed, device):
    head = hl.HeadLoss(hl.TopKDistillation(), options=hl.Options(backend="triton"))
    logits = torch.zeros(N, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    labels = torch.zeros(N, dtype=torch.int64, device=device)
    teacher = hl.TopKTeacher(*entries_beside(logits.detach(), n_entries))
    given = head._given(logits, labels, None, None)._replace(teacher=teacher)
    expected = ["TOPK_FORWARD_KL", f"LISTED={listed}"]
    expect_flags(head, given, {"teacher": teacher}, torch.bfloat16, expected)


def expect_flags(head, given, inputs, dtype, expected):
    call, request = head._checked(given, None, None, inputs)
    plan, *_, function, _ = head._case(call, request).loss.in_one_read
    x = request.tensors.logits
    rows = one_read_launch.Rows.of(request, x, x)
    found = one_read_launch.flags_of(request.facts, plan, function, rows)
    of_dtype = {torch.float16: ["HALF"], torch.float32: ["FLOAT32"]}.get(dtype, [])
    assert sorted(found) == sorted(expected + of_dtype)


# Launches of other shapes follow each other in one memory, so that packets of one may lie where
# another's were.
LAUNCHES = [(5, 2), (3, 1), (7, 2), (1, 4), (6, 1)]


def value(rank, row, piece):
    return 1 + rank + 10 * piece + 100 * row


def results(n_ranks, order, **given):
    ranks = [Rank(half=7 * 4 * n_ranks) for _ in range(n_ranks)]
    run(ranks, LAUNCHES, value=value, order=random.Random(order), **given)
    return ranks


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("resident, slots", [(1, 4), (2, 2), (3, 2)])
def test_the_protocol_ends_with_the_same_sums_in_any_order(n_ranks, resident, slots, rounds):
    """As long as the slots of the programs that run at once hold a row's pieces, of which there are
    4."""
    for order in range(30):
        given = {"n_programs": 3, "slots": slots, "resident": resident, "rounds": rounds}
        ranks = results(n_ranks, order, **given)
        for number, (n_rows, pieces) in enumerate(LAUNCHES, 1):
            for row in range(n_rows):
                total = sum(
                    value(rank, row, piece) for rank in range(n_ranks) for piece in range(pieces)
                )
                total *= (pieces * n_ranks) ** (rounds - 1)
                for rank in ranks:
                    assert [rank.results[number, row, piece] for piece in range(pieces)] == [
                        total
                    ] * pieces


@pytest.mark.parametrize("rounds", [1, 2])
def test_slots_that_hold_no_whole_row_wait_for_each_other(rounds):
    (rank,) = results(1, 0, n_programs=3, slots=2, resident=1, rounds=rounds)
    assert math.isnan(rank.results[4, 0, 0])


SLOTS = range(4, one_read_params.SLOTS + 1)
STEP = re.compile(
    r"(?P<call>wait|arrive)\(&s\.(?:of\.second\.)?(?P<barrier>\w+)"
    r"|mbarrier_arrive_expect_tx\(&s\.(?P<expecting>\w+)"
    r"|__syncwarp\(\); +// I[I\d, ]+: (?P<why>.*)"
    r"|(?P<fence>fence_proxy_async\(\))"
    r"|(?P<copy>cp_async_bulk_wait_read\(\))"
)


def step_of(found):
    """A match of `STEP` in the words of the model."""
    if found["why"]:
        return f"syncwarp, {found['why']}"
    if found["fence"]:
        return "fence"
    if found["copy"]:
        return "wait for the copy"
    if found["expecting"]:
        return f"arrive {found['expecting']}"
    return f"{found['call']} {found['barrier']}"


@functools.cache
def steps_of_roles():
    """What each role does at barriers, in the words of the model and as `roles.cuh` has it."""
    _, *parts = re.split(r"^// -- (.*?) -+$", SOURCE.read_text(), flags=re.M)
    steps = []
    for role, text in zip(parts[::2], parts[1::2]):
        steps += [f"{role}: {step_of(found)}" for found in STEP.finditer(text)]
    return sorted(set(steps))


# The sum warps have waited for the copy before they end stat.
NEEDLESS = ["post: wait full"]


def ring(seed, slots, without=None):
    """A launch of one program that has run."""
    order, has_mixture = random.Random(seed), seed % 4 > 1
    numbers = kernel_numbers() | (numbers_of_two_rounds() if has_mixture else {})
    turns = {
        "sum": numbers["TEAMS"],
        "post": numbers["POST"],
        "merge": numbers["MERGE"],
        "grad": 1,
    }
    if has_mixture:
        turns |= {"mix": 1, "tell": numbers["TELL"]}
    n_items = order.choice([0, 1, 3, 12])
    ignored = [n for n in range(n_items) if order.random() < 0.2]
    is_written, has_entries = seed % 3 > 0, not has_mixture and seed % 5 > 1
    kind = is_written, has_entries, has_mixture
    found = Ring(order, slots, n_items, turns, ignored, *kind, without)
    found.run()
    return found


@pytest.mark.parametrize("slots", SLOTS)
def test_barriers_order_what_the_roles_read_and_write(slots):
    steps = set().union(*(ring(seed, slots).steps for seed in range(30)))
    assert sorted(steps) == steps_of_roles()


@pytest.mark.parametrize("step", [step for step in steps_of_roles() if step not in NEEDLESS])
def test_no_step_of_a_role_can_be_left_out(step):
    with pytest.raises(AssertionError, match=r"nothing orders|I[36] of|wait for each|than it"):
        for seed in range(60):
            ring(seed, 5 if seed % 2 else 4, step)


@pytest.mark.parametrize("slots", SLOTS)
def test_teams_wait_for_each_other_where_a_slot_is_both_teams_in_turn(slots):
    seeds = range(60)
    if slots % kernel_numbers()["TEAMS"]:
        with pytest.raises(AssertionError, match="I6 of"):
            for seed in seeds:
                ring(seed, slots, "sum: wait stat")
    else:
        for seed in seeds:
            ring(seed, slots, "sum: wait stat")


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_rank_that_does_not_come_ends_its_peers_with_nan(rounds):
    given = {"n_programs": 2, "slots": 2, "absent": (1,), "patience": 500, "rounds": rounds}
    ranks = results(2, 0, **given)
    assert len(ranks[0].results) == sum(n_rows * pieces for n_rows, pieces in LAUNCHES)
    assert all(math.isnan(total) for total in ranks[0].results.values())
