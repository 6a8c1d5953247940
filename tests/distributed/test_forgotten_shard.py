"""A shard that is forgotten on several ranks: one line in the log, and with `Options(check=True,
validate="full")` an error on every rank, which names `shard=`. Data-parallel ranks go on."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from ranks import Failure, on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor, Shard

import tp_headloss as hl
from tp_headloss import HeadLoss, Options, VocabShard, vocab_statistics
from tp_headloss.call import agreement
from tp_headloss.integrations import specforge
from tp_headloss.ranks import comm

V, N, H = 1000, 4, 8
DEBUGGING = Options(check=True, validate="full")


class Lines(logging.Handler):
    """Levels and texts of what was logged."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.levelname, record.getMessage()))


def logged(function):
    """Lines of the package's logger while a function runs, as in a process that has logged nothing
    yet; without those that say which way a call takes."""
    log, handler = logging.getLogger("tp_headloss"), Lines()
    level = log.level
    agreement._logged.clear()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        function()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return [line for line in handler.lines if not line[1].startswith("loss of logits: the way is")]


def problem(device, part):
    """Logits, hidden states, weight and labels of which a rank has the columns, or the tokens,
    `part`; or a copy."""
    generator = torch.Generator().manual_seed(0)
    x, hidden, weight = (
        torch.randn(*size, generator=generator) for size in ((N, V), (N, H), (V, H))
    )
    # on every rank's columns
    labels, rank = torch.randint(0, V // 4, (N,), generator=generator), dist.get_rank()
    half = slice(rank * V // dist.get_world_size(), (rank + 1) * V // dist.get_world_size())
    if part == "columns":
        x, weight = x[:, half], weight[half]
    elif part == "uneven columns":
        x, weight = x[:, : V - 100 * rank], weight[: V - 100 * rank]
    elif part == "tokens":
        x, hidden, labels = x + rank, hidden + rank, labels + rank
    elif part == "ignored tokens":
        x, hidden, labels = x + rank, hidden + rank, torch.full_like(labels, -100)
    return (x + 0).to(device), hidden.to(device), weight.to(device), labels.to(device)


def run(group, device, part, way, options=DEBUGGING, shard=None):
    x, hidden, weight, labels = problem(device, part)
    if way == "statistics":
        return float(vocab_statistics(x, labels, options=options, shard=shard).lse.sum())
    head_loss = HeadLoss(options=options)
    if way == "logits":
        return float(head_loss(x, labels, shard=shard).loss)
    return float(head_loss.linear(hidden, weight, labels, shard=shard).loss)


WAYS = pytest.mark.parametrize("way", ["logits", "hidden states", "statistics"])


@WAYS
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("part", ["columns", "uneven columns"])
def test_a_forgotten_shard_is_an_error_on_every_rank(world_size, part, way):
    results = on_ranks(world_size, run, part, way, failures=True)
    assert {r.kind for r in results if isinstance(r, Failure)} == {"ValueError"}
    assert all(
        "ranks 0 and 1 of the job have equal labels" in r.message and "shard=" in r.message
        for r in results
    )


@WAYS
@pytest.mark.parametrize("part", ["tokens", "ignored tokens", "copy"])
def test_data_parallel_ranks_and_copies_are_no_error(part, way):
    first, second = on_ranks(2, run, part, way)
    assert (first == second) == (part != "tokens")


def explicit(group, device):
    return run(group, device, "columns", "logits", shard=VocabShard.from_group(None, V // 2))


def test_a_shard_of_one_rank_is_not_compared():
    first, second = on_ranks(2, explicit)
    assert first != second


def lines_of_two_calls(group, device, check):
    options = Options(check=check)
    return logged(lambda: [run(group, device, "columns", "logits", options) for _ in range(2)])


@pytest.mark.parametrize("check", [False, True])
def test_ranks_without_a_shard_say_so_once(check):
    for lines in on_ranks(2, lines_of_two_calls, check):
        ((level, text),) = lines
        assert level == ("WARNING" if check else "INFO") and "no shard= on a job of 2 ranks" in text


def lines_of_an_acceptance_rate(group, device):
    x, p = (
        torch.zeros(1, 4, V // 2, device=device),
        torch.full((1, 4, V // 2), 1 / V, device=device),
    )
    mask = torch.ones(1, 4, 1, device=device)
    rate = specforge.compute_acceptance_rate
    return logged(lambda: rate(logits=x, target_probs=p, position_mask=mask))


def test_a_function_of_a_host_without_a_shard_says_so_too():
    for ((level, text),) in on_ranks(2, lines_of_an_acceptance_rate):
        assert level == "INFO" and "no shard= on a job of 2 ranks" in text


def lines_of_an_unchecked_call_and_a_checked_one(group, device):
    every = [Options(check=check) for check in (False, True, True)]
    return logged(lambda: [run(group, device, "columns", "logits", x) for x in every])


def test_a_call_without_a_check_does_not_use_up_the_warning():
    for lines in on_ranks(2, lines_of_an_unchecked_call_and_a_checked_one):
        assert [level for level, _ in lines] == ["INFO", "WARNING"]


def with_its_shard(group, device):
    x, _, _, labels = problem(device, "columns")
    return logged(
        lambda: HeadLoss(options=DEBUGGING)(x, labels, shard=VocabShard.from_group(group, V))
    )


def with_a_dtensor(group, device):
    x, _, _, labels = problem(device, "columns")
    mesh = init_device_mesh(device.type, (group.size(),))
    return logged(
        lambda: HeadLoss(options=DEBUGGING)(DTensor.from_local(x, mesh, [Shard(-1)]), labels)
    )


@pytest.mark.parametrize("call", [with_its_shard, with_a_dtensor])
def test_ranks_with_a_shard_and_one_rank_say_nothing(call):
    assert on_ranks(2, call) == [[], []]
    assert logged(lambda: HeadLoss()(torch.zeros(1, 4), torch.tensor([0]))) == []


def alone(group, device):
    """Only rank 0 calls, as the last stage of a pipeline does; then all ranks call."""
    agreement.JOB_WAIT, before = 0.1, agreement.JOB_WAIT
    try:
        lines = logged(lambda: run(group, device, "columns", "logits")) if group.rank() == 0 else []
        dist.barrier()
        return lines, run(group, device, "columns", "logits")
    finally:
        agreement.JOB_WAIT = before
        dist.barrier()
        for key in ("absent", f"calls of rank {group.rank()}"):  # for the tests that follow
            _get_default_store().delete_key(f"tp_headloss/{key}")
        dist.barrier()


def test_a_rank_that_calls_alone_goes_on_and_nobody_waits_again():
    (lines, first), (_, second) = on_ranks(2, alone)
    assert [level for level, _ in lines] == [
        "WARNING",
        "WARNING",
    ]
    assert "made no such call in 0.1 s" in lines[1][1] and "this rank forgot its own" in lines[1][1]
    assert first != second  # the mistake is not seen any more


def spoiled(group, device):
    x, _, _, labels = problem(device, "columns")
    inputs = {"unknown": labels} if group.rank() == 1 else None
    return float(HeadLoss(options=DEBUGGING)(x, labels, inputs=inputs).loss)


def test_an_error_of_one_rank_does_not_keep_the_others_waiting():
    first, second = on_ranks(2, spoiled, failures=True)
    assert "shard=" in first.message and "unused ['unknown']" in second.message


def rows_of_a_module(group, device):
    """Calls of a module's weight without its shard."""
    shard = hl.VocabShard.from_group(group, 64)
    modules = hl.VocabParallelHead(8, shard, device=device), hl.VocabParallelEmbedding(8, shard)
    hidden, labels = torch.ones(3, 8, device=device), torch.arange(3, device=device)
    for weight in (module.to(device).weight for module in modules):
        for call in (
            lambda w: hl.HeadLoss().linear(hidden, w, labels),
            lambda w: hl.linear_vocab_statistics(hidden, w),
            lambda w: hl.topk_log_probs(hidden, 2, weight=w),
            lambda w: hl.sample(hidden, weight=w, seed=1, positions=labels),
            lambda w: hl.select_rows(w, labels),
        ):
            with pytest.raises(
                ValueError, match=r"one rank's rows of .*, got no shard: pass shard="
            ):
                call(weight)
            call(weight.detach())  # says nothing
    return True


def test_the_rows_of_a_module_say_that_they_are_a_shard():
    assert on_ranks(2, rows_of_a_module) == [True] * 2


def selected(group, device, case):
    """Rows of ids 2 and 1 of six, of which each of two ranks has three, or a bias of them."""
    whole, rank = torch.arange(12.0, device=device).view(6, 2), group.rank()
    to, ids = VocabShard.from_group(group, 2), torch.tensor([2, 1], device=device)
    shard, rows = None, whole[3 * rank : 3 * rank + 3]
    if case == "bias":
        rows = rows[:, 0]
    elif case == "uneven":
        rows, ids = whole[4 * rank : 4 * rank + 4], ids - 1
    elif case == "ids beyond the rows of one rank":
        rows, ids = whole[4 * rank : 4 * rank + 4], ids + 1
    elif case == "other ids":
        rows, ids = whole, ids + rank
    elif case == "whole":
        rows = whole
    elif case == "whole with padding":
        shard = VocabShard.from_group(None, 6, padded_size=8)
        rows = torch.cat([whole, torch.full((2, 2), rank + 0.5, device=device)])
    elif case == "on rank 0":
        shard = VocabShard.from_boundaries([0, 6, 6], 6, group)
        rows = whole if rank == 0 else whole.new_empty(0, 2)
    elif case == "for a student on rank 0":
        shard, to = VocabShard.from_group(group, 6), VocabShard.from_group(None, 2)
    return hl.select_rows(rows, ids, shard=shard, to=to).tolist()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("weight", "agree on weight, whole on each rank without shard="),
        ("bias", "agree on weight, whole on each rank without shard="),
        ("uneven", "agree on weight, whole on each rank without shard="),
        (
            "ids beyond the rows of one rank",
            "rank 1 of the group: ids must be in [0, 2), got [2, 3]",
        ),
        ("other ids", "agree on ids"),
    ],
)
def test_rows_of_a_forgotten_shard_for_several_ranks_are_an_error_on_every_rank(case, words):
    results = on_ranks(2, selected, case, failures=True)
    assert all(r.kind == "ValueError" and words in r.message for r in results), results


@pytest.mark.parametrize("case", ["whole", "whole with padding", "on rank 0"])
def test_rows_of_whole_weights_and_of_one_rank_are_selected(case):
    assert on_ranks(2, selected, case) == [[[4.0, 5.0]], [[2.0, 3.0]]]


def test_each_rank_may_have_all_rows_that_are_selected():
    assert on_ranks(2, selected, "for a student on rank 0") == [[[4.0, 5.0], [2.0, 3.0]]] * 2


def test_the_rank_that_holds_the_store_leaves_when_all_have_read_it(monkeypatch):
    """Its error may end its process, and the store of ranks that torchrun has not started."""
    store, order, left, thread = dist.HashStore(), [], threading.Event(), threading.local()

    class ReadLate:
        def __getattr__(self, name):
            return getattr(store, name)

        def get(self, key):
            left.wait(0.5)  # by when a rank 0 that waits for nobody has left
            order.append("read")
            return store.get(key)

    def exchange(rank):
        thread.rank = rank
        texts = comm.texts_of_job(f"text {rank}", 60.0)
        if rank == 0:
            order.append("left")
            left.set()
        return texts

    monkeypatch.setattr(comm, "_default_store", lambda: ReadLate() if thread.rank else store)
    monkeypatch.setattr(dist, "get_rank", lambda: thread.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(exchange, (0, 1))) == [["text 0", "text 1"]] * 2
    assert order == ["read", "read", "left"]
