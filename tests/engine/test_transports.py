"""A transport is two methods and a line of the table, and symmetric memory is not used after a
failure."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from tp_headloss import CrossEntropy, HeadLoss, Linear, Options, vocab_statistics
from tp_headloss.call.given import Given
from tp_headloss.call.request_of import build_request
from tp_headloss.engine.transports import TRANSPORTS, Choice, symmetric_memory
from tp_headloss.engine.transports.gather import Gather
from tp_headloss.ranks import comm
from tp_headloss.ranks.groups import resolve_process_group
from tp_headloss.ranks.shard import VocabShard


class Interrupt(BaseException):
    """Stands for what may end an exchange at any place, such as a KeyboardInterrupt."""


class Recorder(Gather):
    """The gather, which notes its calls."""

    def __init__(self):
        self.calls = []

    def write(self, request, launches=None):
        self.calls.append("write")
        return super().write(request, launches)

    def merge(self, packets, request, launches=None):
        self.calls.append("merge")
        return super().merge(packets, request, launches)


def test_a_transport_outside_of_the_package_carries_logits_and_hidden_states(backend, device):
    hidden, weight = torch.randn(5, 8, device=device), torch.randn(40, 8, device=device)
    labels = torch.arange(5, device=device)
    default, shared = Recorder(), Recorder()
    with mock.patch.dict(TRANSPORTS, recorded=Choice(default, lambda request: shared)):
        options = Options(backend=backend, transport="recorded")
        stats = vocab_statistics(hidden @ weight.t(), labels, options=options)
        assert (shared.calls, default.calls) == (["write", "merge"], [])
        HeadLoss([CrossEntropy()], options=options).linear(
            hidden, weight, labels, linear=Linear("recompute")
        )
        assert (shared.calls, default.calls) == (["write", "merge"], ["write", "merge"])
    expected = vocab_statistics(
        hidden @ weight.t(), labels, options=Options(backend=backend, transport="gather")
    )
    assert torch.equal(stats.log_prob, expected.log_prob)
    with pytest.raises(ValueError, match="transport must be one of"):
        Options(transport="recorded")


@pytest.mark.parametrize("failing", ["local_statistics", "merge_packets", "barrier", None])
def test_symmetric_memory_is_refused_after_an_exchange_that_failed(failing, monkeypatch):
    """On CPU, with a group of one that is said to be of two."""
    request = build_request(Given(torch.randn(3, 16), shard=VocabShard(0, 16, 16)))
    request = request._replace(
        facts=request.facts._replace(world_size=2, group_name="pair", transport="symm_mem")
    )

    def step(name, result=None):
        def run(*args, **kwargs):
            if name == failing:
                raise Interrupt
            return result

        return run

    names = "local_statistics", "merge_packets"
    backend = SimpleNamespace(
        shares_memory=lambda _: True, **{name: step(name, name) for name in names}
    )
    memory = object.__new__(symmetric_memory.SymmetricMemory)
    memory.slot, memory.buffer, memory.in_exchange = 1024, torch.zeros(2048), False
    memory.handle, memory.timeout_ms = SimpleNamespace(barrier=step("barrier")), 1
    group = symmetric_memory._Group("pair", "group")
    group.memories = {False: [memory]}
    monkeypatch.setattr(memory, "_take_turns", lambda: None)
    monkeypatch.setattr(symmetric_memory, "load_backend", lambda _: backend)
    monkeypatch.setattr(symmetric_memory, "resolve_process_group", lambda _: "group")
    monkeypatch.setitem(symmetric_memory._groups, "pair", group)

    def exchange():
        transport = symmetric_memory.find_symmetric_memory(request)
        assert transport is memory
        return transport.merge(transport.write(request), request)

    if failing is None:
        assert [exchange(), exchange()] == ["merge_packets"] * 2
        return
    with pytest.raises(Interrupt):
        exchange()
    with pytest.raises(
        RuntimeError, match="an earlier exchange of group pair failed on this rank in the middle"
    ):
        exchange()


@pytest.mark.parametrize(
    "order", [("auto", "symm_mem", "symm_mem"), ("symm_mem", "auto", "symm_mem")]
)
def test_symmetric_memory_that_was_asked_for_and_is_not_there_is_told_once(
    order, monkeypatch, caplog
):
    """On CPU, with a group of one that is said to be of two."""
    request = build_request(Given(torch.randn(3, 16), shard=VocabShard(0, 16, 16)))
    monkeypatch.setattr(
        symmetric_memory, "load_backend", lambda _: SimpleNamespace(shares_memory=lambda _: True)
    )
    monkeypatch.setattr(symmetric_memory, "resolve_process_group", lambda _: "group")
    monkeypatch.setattr(
        symmetric_memory, "_obstacle_and_capability", lambda *_: ("no peer access", (9, 0))
    )
    monkeypatch.setattr(symmetric_memory, "_groups", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    told = []
    for transport in order:
        facts = request.facts._replace(world_size=2, group_name="pair", transport=transport)
        assert symmetric_memory.find_symmetric_memory(request._replace(facts=facts)) is None
        told.append(len(caplog.records))
    assert told == [int("symm_mem" in order[: i + 1]) for i in range(3)]
    assert "group pair, packets are gathered: no peer access" in caplog.text


def exchanges_run(group, device):
    """Two exchanges, as torch makes them, in processes that have made 3 and 7 before -> what a peer
    set in each; whether a later store of the group begins without them; whether the group is itself
    again."""
    rank, store, seen = dist.get_rank(group), comm.NumberedStore(group), []
    with store.in_place_of_store(group, device):
        # in C++
        found = dist.PrefixStore("torch", resolve_process_group(group.group_name).get_group_store())
        for exchange in range(2):
            key = f"{exchange + (3, 7)[rank]}/%d"
            found.set(key % rank, f"{exchange} of {rank}")
            found.wait([key % (1 - rank)])
            seen.append(found.get(key % (1 - rank)).decode())
    later = comm.NumberedStore(group)
    return seen, later.store.check(["0/0"]), resolve_process_group(group.group_name) is group


def test_exchanges_have_the_numbers_of_their_group():
    seen = [[f"{exchange} of {rank}" for exchange in range(2)] for rank in (1, 0)]
    assert on_ranks(2, exchanges_run) == [(each, False, True) for each in seen]
