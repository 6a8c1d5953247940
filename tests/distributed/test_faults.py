"""A rank that dies, stops, raises or disagrees: the others say so in time, and no process is left.

In time is the process group's timeout + 5 s. Who notices raises torch.distributed's error, which
names a closed connection or a timeout; under NCCL its watchdog may end the process instead, with an
exit code that is not 0.
"""

import re
import signal
import time

import pytest
import torch
from faults import GRACE, TIMEOUT, Ranks

from tp_headloss import Options, Transform, VocabShard, linear_vocab_statistics, vocab_statistics

V, N, H = 64, 6, 8
INSIDE = 0.5  # seconds after which a rank that was told to begin waits in its collective
CLEAR = r"Connection (closed|reset)|Broken pipe|[Tt]imed out|timeout|CUDA error"
# After its timeout the watchdog prints the stack of the collective, which takes it seconds to look
# up, and waits four times as long as the last of these, a minute by default, for dumps of all
# ranks, before it ends the process.
# the process.
NCCL = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "50",
}  # fmt: skip
kept = {}  # of this process, from one job to the next


def rows(n=N):
    x = torch.randn(n, V, generator=torch.Generator().manual_seed(0)) * 2
    return x, torch.tensor([1, 40, 31, 32, 0, 63, 7, 33, 5][:n])


def forward(group, device, change="", transport="gather", validate="metadata"):
    """log_prob of the rows above; `change`: what this rank does in another way than the others."""
    x, labels = rows(9 if change == "tokens" else N)
    shard = VocabShard.from_group(group, V)
    if change == "bounds":
        shard = VocabShard(shard.start, shard.stop - 1, V, group)
    if change == "call":
        return linear_forward(group, device, validate)
    labels[2] = {"labels": 50, "ignored": -100, "labels within a shard": 30}.get(change, labels[2])
    labels = labels.float() if change == "float labels" else labels
    x = x[:, shard.start + (change == "width") : shard.stop]
    dtype = {"bf16": torch.bfloat16, "fp64": torch.float64, "integers": torch.int64}.get(
        change, torch.float32
    )
    kept["x"] = x = x.to(device, dtype).requires_grad_(dtype.is_floating_point)
    kept["stats"] = vocab_statistics(
        x, labels.to(device), shard=shard, want=("entropy",) if change == "want" else (),
        transform=Transform(temperature=2.0 if change == "temperature" else 1.0),
        ignore_index=-1 if change == "ignore_index" else -100,
        options=Options(transport="sum" if change == "transport" else transport, validate=validate),
    )  # fmt: skip
    return kept["stats"].log_prob.tolist()


def linear_forward(group, device, validate="metadata"):
    shard, labels = VocabShard.from_group(group, V), rows()[1].to(device)
    kept["x"] = hidden = torch.ones(N, H, device=device, requires_grad=True)
    weight = torch.ones(shard.width, H, device=device, requires_grad=True)
    kept["stats"] = linear_vocab_statistics(
        hidden, weight, labels, shard=shard, options=Options(validate=validate)
    )
    return kept["stats"].log_prob.tolist()


def backward(group, device):
    kept["stats"].log_prob.sum().backward()
    return kept["x"].grad.tolist()


def assert_work(ranks, *args, **kwargs):
    """A call that nothing disturbs; the first one sets up connections and memory."""
    x, labels = rows()
    for outcome in ranks.everywhere(forward, "", *args, **kwargs):
        assert outcome.kind == "returned", outcome
        torch.testing.assert_close(torch.tensor(outcome.what), x.log_softmax(-1)[range(N), labels])


def assert_raises_in_time(ranks, survivors, since, at_least=0.0):
    """Every survivor's job ends with a clear error, and its process, told to leave, with a
    failure."""
    for rank in survivors:
        outcome = ranks.result(rank)
        assert at_least <= outcome.ended - since < TIMEOUT + GRACE, outcome
        if ranks.nccl and outcome.kind == "died":  # by the watchdog
            assert outcome.what not in (0, None, -signal.SIGKILL), outcome
            continue
        assert outcome.kind in ("RuntimeError", "DistBackendError", "AcceleratorError"), outcome
        assert re.search(CLEAR, outcome.what), outcome
        assert ranks.leave(rank) not in (0, None)


def kill_before(ranks, transport):
    since = ranks.kill(1)
    others = [rank for rank in range(ranks.size) if rank != 1]
    for rank in others:
        ranks.start(rank, forward, "", transport)
    assert_raises_in_time(ranks, others, since)


def kill_inside(ranks, transport):
    """Rank 1 is gone while all others wait for it."""
    ranks.signal(1, signal.SIGSTOP)
    others = [rank for rank in range(ranks.size) if rank != 1]
    for rank in others:
        ranks.start(rank, forward, "", transport)
    time.sleep(INSIDE)
    assert_raises_in_time(ranks, others, ranks.kill(1))


def stop(ranks, transport):
    since = ranks.signal(1, signal.SIGSTOP)
    ranks.start(1, forward, "", transport)
    others = [rank for rank in range(ranks.size) if rank != 1]
    for rank in others:
        ranks.start(rank, forward, "", transport)
    assert_raises_in_time(ranks, others, since, at_least=TIMEOUT - 1)


def raise_alone(ranks, transport, leaves=True):
    """Rank 1 is given what it refuses, from its own metadata, before it communicates."""
    since = time.monotonic()
    ranks.start(0, forward, "", transport)
    ranks.start(1, forward, "width", transport)
    refused = ranks.result(1)
    assert refused.kind == "ValueError" and "columns" in refused.what and refused.took < TIMEOUT, (
        refused
    )
    if leaves:
        assert ranks.leave(1) == 1
    assert_raises_in_time(ranks, [0], since, at_least=0.0 if leaves else TIMEOUT - 1)


SCENARIOS = [kill_before, kill_inside, stop, raise_alone]


@pytest.mark.parametrize("size, transport", [(2, "gather"), (2, "sum"), (3, "gather")])
@pytest.mark.parametrize("scenario", SCENARIOS[:2])
def test_survivors_of_a_killed_rank_raise_in_time(scenario, size, transport):
    with Ranks(size) as ranks:
        assert_work(ranks, transport)
        scenario(ranks, transport)


def test_a_rank_killed_in_its_collective_makes_all_others_raise():
    with Ranks(3) as ranks:
        assert_work(ranks)
        ranks.signal(2, signal.SIGSTOP)  # keeps the others waiting
        for rank in range(3):
            ranks.start(rank, forward)
        time.sleep(INSIDE)
        since = ranks.kill(1)
        ranks.signal(2, signal.SIGCONT)
        assert_raises_in_time(ranks, [0, 2], since)


def test_a_rank_killed_after_the_forward_is_missed_in_the_next_one():
    """The backward of logits has no communication."""
    with Ranks(2) as ranks:
        assert_work(ranks)
        since = ranks.kill(1)
        ranks.start(0, backward)
        outcome = ranks.result(0)
        assert outcome.kind == "returned", outcome
        x, labels = rows()
        x.requires_grad_().log_softmax(-1)[range(N), labels].sum().backward()
        torch.testing.assert_close(torch.tensor(outcome.what), x.grad[:, : V // 2])
        ranks.start(0, forward)
        assert_raises_in_time(ranks, [0], since)


def test_a_rank_killed_before_the_backward_of_a_linear_head_is_missed_there():
    with Ranks(2) as ranks:
        for job in (linear_forward, backward, linear_forward):
            assert {outcome.kind for outcome in ranks.everywhere(job)} == {"returned"}
        since = ranks.kill(1)
        ranks.start(0, backward)
        assert_raises_in_time(ranks, [0], since)


@pytest.mark.parametrize("size", [2, 3])
def test_a_stopped_rank_makes_the_others_raise_at_the_timeout_and_raises_when_it_goes_on(size):
    with Ranks(size) as ranks:
        assert_work(ranks)
        stop(ranks, "gather")
        assert_raises_in_time(ranks, [1], ranks.signal(1, signal.SIGCONT))


@pytest.mark.parametrize("leaves", [True, False])
def test_a_rank_that_raises_alone_makes_the_others_raise(leaves):
    with Ranks(2) as ranks:
        assert_work(ranks)
        raise_alone(ranks, "gather", leaves)


@pytest.mark.parametrize("change", ["tokens", "fp64", "want"])
@pytest.mark.parametrize("who", [0, 1])
def test_packets_of_other_sizes_end_a_rank_and_the_next_call_of_the_other(who, change):
    """gloo aborts the process that receives more than it expects; what the other one gets is not
    defined."""
    with Ranks(2) as ranks:
        assert_work(ranks)
        since = time.monotonic()
        smaller, larger = 1 - who, who
        outcomes = ranks.everywhere(forward, **{f"rank{who}": (change,)})
        assert outcomes[smaller].kind == "died" and outcomes[smaller].what == -signal.SIGABRT, (
            outcomes
        )
        assert max(outcome.ended for outcome in outcomes) - since < TIMEOUT + GRACE
        if outcomes[larger].kind == "returned":
            ranks.start(larger, forward)
            assert_raises_in_time(ranks, [larger], since)


def test_ranks_of_different_transports_raise_at_the_timeout():
    with Ranks(2) as ranks:
        assert_work(ranks)
        since = time.monotonic()
        ranks.start(0, forward)
        ranks.start(1, forward, "transport")
        assert_raises_in_time(ranks, [0, 1], since, at_least=TIMEOUT - 1)


# what rank `who` has of its own, where all others have the default
OPTIONS = {"check": Options(check=True), "validate": Options(validate="full"),
           "transport": Options(transport="sum")}  # fmt: skip


def of_whole_chunks(group, device, change=""):
    """log_prob at shards of whole chunks, which send as many packets; `change`: as in `forward`."""
    labels = torch.arange(N, device=device)
    shard = VocabShard.from_group(group, 2 * V, 4 * V if change == "padded_size" else None)
    if change == "constructor":
        shard = VocabShard(shard.start, shard.stop, 2 * V, group)
    x = torch.zeros(N, shard.width, device=device)
    options = OPTIONS.get(change)
    return vocab_statistics(x, labels, shard=shard, options=options).log_prob.tolist()


@pytest.mark.parametrize("change", [*OPTIONS, "padded_size", "constructor"])
@pytest.mark.parametrize("who", [0, 1])
def test_options_or_shards_of_one_ranks_own_end_a_rank_in_time(who, change):
    """gloo aborts a rank, or lets one wait until the timeout; another may have numbers, or NaN."""
    with Ranks(2) as ranks:
        alike = ranks.everywhere(of_whole_chunks)
        assert [outcome.kind for outcome in alike] == ["returned"] * 2, alike
        since = time.monotonic()
        outcomes = ranks.everywhere(of_whole_chunks, **{f"rank{who}": (change,)})
        assert max(outcome.ended for outcome in outcomes) - since < TIMEOUT + GRACE, outcomes
        ended = [outcome for outcome in outcomes if outcome.failed]
        assert ended, outcomes
        for outcome in ended:
            aborted = outcome.kind == "died" and outcome.what == -signal.SIGABRT
            assert aborted or re.search(CLEAR, str(outcome.what)), outcomes


@pytest.mark.parametrize("change", ["labels", "ignored", "bounds"])
def test_ranks_that_disagree_on_who_owns_a_label_see_nan(change):
    with Ranks(2) as ranks:
        outcomes = ranks.everywhere(forward, rank0=(change,))
        assert [outcome.kind for outcome in outcomes] == ["returned"] * 2, outcomes
        for outcome in outcomes:
            assert torch.tensor(outcome.what).isnan().tolist() == [n == 2 for n in range(N)], (
                outcome
            )


@pytest.mark.parametrize("change", ["labels within a shard", "ignore_index", "bf16"])
def test_what_other_ranks_do_not_look_at_is_silent_and_the_same_everywhere(change):
    """Of a label, only the owner's; of the logits, only their packet, which is fp32."""
    with Ranks(2) as ranks:
        outcomes = ranks.everywhere(forward, rank1=(change,))
        assert outcomes[0].kind == outcomes[1].kind == "returned", outcomes
        assert outcomes[0].what == outcomes[1].what
        x, labels = rows()
        rtol = 1e-2 if change == "bf16" else 1e-5
        expected = x.log_softmax(-1)[range(N), labels]
        torch.testing.assert_close(torch.tensor(outcomes[0].what), expected, rtol=rtol, atol=0)


def test_a_temperature_of_ones_own_is_silent_and_gives_numbers_of_no_single_call():
    with Ranks(2) as ranks:
        outcomes = ranks.everywhere(forward, rank1=("temperature",))
        assert (
            outcomes[0].kind == outcomes[1].kind == "returned"
            and outcomes[0].what == outcomes[1].what
        ), outcomes
        x, labels = rows()
        for temperature in (1.0, 2.0):
            one_call = (x / temperature).log_softmax(-1)[range(N), labels]
            assert ((torch.tensor(outcomes[0].what) - one_call).abs() > 1e-2).all()


EVERYWHERE = {
    "width": "ValueError", "float labels": "TypeError", "integers": "TypeError",
    **dict.fromkeys(("tokens", "bf16", "fp64", "labels", "ignored", "labels within a shard", "want", "transport",
                     "ignore_index", "temperature", "bounds", "call"), "ValueError"),
}  # fmt: skip


def assert_all_refused_everywhere(ranks, who, transport="gather"):
    """Rank `who` errs in every way, one after the other; the group stays usable."""
    arguments = transport, "full"
    assert_work(ranks, *arguments)
    for change, kind in EVERYWHERE.items():
        outcomes = ranks.everywhere(forward, "", *arguments, **{f"rank{who}": (change, *arguments)})
        # the Triton backend has no float64
        kind = "TypeError" if ranks.nccl and change == "fp64" else kind
        words = f"rank {who}" if change != "bounds" else "must cover"
        assert {outcome.kind for outcome in outcomes} == {kind}, outcomes
        assert len({outcome.what for outcome in outcomes}) == 1, outcomes
        assert "got" in outcomes[0].what and words in outcomes[0].what, outcomes[0]
        assert max(outcome.took for outcome in outcomes) < TIMEOUT, outcomes
    assert_work(ranks, *arguments)


@pytest.mark.parametrize("size, who", [(2, 0), (2, 1), (4, 2)])
def test_full_validation_raises_the_same_on_every_rank_and_leaves_the_group_usable(size, who):
    with Ranks(size) as ranks:
        assert_all_refused_everywhere(ranks, who)
        assert_work(ranks)


def test_full_validation_misses_a_killed_or_stopped_rank_in_time_too():
    for number in (signal.SIGKILL, signal.SIGSTOP):
        with Ranks(2) as ranks:
            assert_work(ranks, "gather", "full")
            since = ranks.signal(1, number)
            ranks.start(0, forward, "", "gather", "full")
            assert_raises_in_time(ranks, [0], since)


@pytest.mark.cuda
@pytest.mark.parametrize("transport", ["gather", "symm_mem"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_gpus_survivors_raise_or_are_ended_in_time(scenario, transport):
    need_gpus(2)
    with Ranks(2, nccl=True, environment=NCCL) as ranks:
        assert_work(ranks, transport)
        scenario(ranks, transport)


@pytest.mark.cuda
@pytest.mark.parametrize("transport", ["gather", "symm_mem"])
def test_on_gpus_full_validation_raises_the_same_on_every_rank(transport):
    need_gpus(2)
    with Ranks(2, nccl=True) as ranks:
        assert_all_refused_everywhere(ranks, 1, transport)


def need_gpus(number):
    if torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} GPUs, has {torch.cuda.device_count()}")
