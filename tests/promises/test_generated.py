"""Random cases, random merges and random sequences of calls: the same promises as everywhere, on
inputs nobody chose.

All examples follow from TP_HEADLOSS_SEED (0). A failure names the shrunk example, and how to run it
alone.
"""

import contextlib
import importlib
import os

import bounds
import oracle
import pytest
import torch
from generated import check
from generated_case import bits_equal, run_case
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st
from ranks import on_ranks
from strategies import DRAWN, Case, cases
from torch.utils.checkpoint import checkpoint

from tp_headloss import (
    CrossEntropy,
    Entropy,
    HeadLoss,
    Linear,
    Options,
    VocabShard,
    ZLoss,
    vocab_statistics,
)
from tp_headloss.engine import eager
from tp_headloss.engine.request import Facts, Request, Tensors
from tp_headloss.statistics import known_statistics

SEED = int(os.environ.get("TP_HEADLOSS_SEED", "0"))
# without TP_HEADLOSS_FULL a sixth of the cases, and a half of the merges and sequences
FULL = bool(os.environ.get("TP_HEADLOSS_FULL"))
SHARE, SHARE_OF_OTHERS = (1, 1) if FULL else (6, 2)


def examples(count):
    def decorate(function):
        run = settings(
            max_examples=count,
            database=None,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        )
        return seed(SEED)(run(function))

    return decorate


@contextlib.contextmanager
def reproducible(drawn):
    """Every failure says how to see it again."""
    try:
        yield
    except Exception as error:
        again = f"TP_HEADLOSS_SEED={SEED} python -m pytest tests/promises/test_generated.py"
        if isinstance(drawn, Case):
            again += f'\n  this example alone: python scripts/check/soak.py --case "{drawn}"'
        raise AssertionError(
            f"{type(error).__name__}: {error}\n  example: {drawn}\n  again: {again}"
        ) from error


def check_cases(world_size, backend, count):
    """Each example is one round trip to the ranks, so that Hypothesis shrinks what fails."""

    @examples(count)
    @given(cases(world_size, backend))
    def run(case):
        with reproducible(case):
            check(case, on_ranks(world_size, run_case, case))

    run()


@pytest.mark.parametrize(
    "world_size, backend, count",
    [
        (1, "torch", 1080),
        (2, "torch", 720),
        (4, "torch", 140),
        (1, "triton", 21),
        (2, "triton", 42),
        (4, "triton", 21),
    ],
)
def test_cases_are_right_within_their_bounds(world_size, backend, count):
    check_cases(world_size, backend, count // SHARE)


def test_every_statistic_is_drawn():
    """And what is drawn needs a formula in the oracle, see `check`."""
    assert {*known_statistics()} == DRAWN


def test_examples_follow_from_the_seed_whatever_modules_are_loaded(tmp_path, monkeypatch):
    def drawn():
        found = []

        @examples(100)
        @given(cases(2, "torch"))
        def run(case):
            found.append(case)

        run()
        return found

    first = drawn()
    (tmp_path / "numbers_in_source.py").write_text(f"NUMBERS = {list(range(1, 300))}\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("numbers_in_source")
    assert drawn() == first


class Merge:
    """Packets of any pieces of the vocabulary, and what the merge makes of them."""

    def __init__(self, data):
        self.v, self.n = data["vocab_size"], 3
        generator = torch.Generator().manual_seed(data["seed"])
        self.x = torch.randn(self.n, self.v, generator=generator) * data["spread"]
        self.t = torch.randn(self.n, self.v, generator=generator)
        for row, column in data["empty"]:
            self.x[row, column % self.v :: 2] = -torch.inf
        if not data["labelled"]:
            self.labels = None
        else:
            self.labels = torch.randint(0, self.v, (self.n,), generator=generator)
        self.want = ("entropy", "total", "argmax") + ("forward_kl", "reverse_kl") * data["teacher"]

    def request(self, start, stop, packets=1, transport="gather", x=None):
        x, width = self.x if x is None else x, stop - start
        facts = Facts(
            start=start, valid_width=width, vocab_size=self.v, chunk_size=max(width, 1), chunks=1, world_size=packets,
            want=self.want, scale=1.0, softcap=0.0, temperature=1.0, ignore_index=-100, backend="torch",
            transport=transport, group_name="",
        )  # fmt: skip
        teacher = self.t[:, start:stop] if "forward_kl" in self.want else None
        return Request.of(Tensors(x[:, start:stop], self.labels, teacher=teacher), facts)

    def packet(self, start, stop, x=None):
        request = self.request(start, stop, x=x)
        packets = torch.full((1, len(request.layout.packet), self.n), torch.nan)
        eager.local_statistics(packets, request)
        return packets

    def packets(self, cuts, x=None):
        return torch.cat([self.packet(a, b, x) for a, b in zip(cuts, cuts[1:])])

    def state(self, packets):
        """The merged float64 sums by name, and their shift."""
        shift, sums = eager.merged_sums(packets, self.request(0, self.v).layout)
        return {"shift": shift} | sums

    def values(self, packets):
        request = self.request(0, self.v, len(packets))
        _, values, *flags = eager.merge_packets(packets, request)
        return dict(zip(request.layout.values, values)), flags


MERGES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 999),
        "vocab_size": st.integers(1, 40),
        "spread": st.sampled_from([1.0, 0.01, 10.0, 100.0]),
        "empty": st.lists(st.tuples(st.integers(0, 2), st.integers(0, 39)), max_size=2),
        "labelled": st.booleans(),
        "teacher": st.booleans(),
        "cuts": st.lists(st.integers(0, 40), max_size=6),
        "at": st.integers(0, 99),
        "what": st.sampled_from([torch.nan, torch.inf]),
    }
)


def cuts_of(m, data):
    return [0, *sorted(min(c, m.v) for c in data["cuts"]), m.v]


def assert_within_bounds(m, values):
    keep = (m.x > -torch.inf).any(-1)
    x, labels = m.x.double()[keep], None if m.labels is None else m.labels[keep]
    truth = oracle.statistics(x, labels)
    r = bounds.rounding(torch.float32, "torch", False, x, None, 1.0, None, 1.0)
    # a chunk's row was rounded to fp32 before the merge, and every value once after it
    errors = bounds.values(x, labels, None, truth, r)
    for name in values.keys() & truth.keys():
        got = values[name]
        assert got[~keep].isnan().all(), name
        same = got[keep].double() == truth[name]
        allowed = errors[name] + oracle.ulp(truth[name].nan_to_num())
        assert (same | ((got[keep].double() - truth[name]).abs() <= allowed)).all(), (
            name,
            got[keep],
            truth[name],
        )


def assert_close_in_float64(a, b, packets, m):
    """Sums of the same terms in another order: each addition rounds once, by the sum of the terms'
    absolute values."""
    rows = dict(zip(m.request(0, m.v).layout.packet, packets.double().unbind(1)))
    assert a.keys() == b.keys()
    for name, x in a.items():
        y = b[name]
        # of one sign, but for these; the merge's factors are at most 1
        size = rows[name].abs().sum(0) if name in ("total", "cross", "gap", "target") else x.abs()
        same = (x == y) | (x.isnan() & y.isnan())
        assert (same | ((x - y).abs() <= (len(packets) + 2) * 2.0**-52 * size)).all(), (name, x, y)


@examples(250 // SHARE_OF_OTHERS)
@given(MERGES)
def test_cutting_anywhere_leaves_the_values_within_their_bounds(data):
    with reproducible(data):
        m = Merge(data)
        values, flags = m.values(m.packets(cuts_of(m, data)))
        assert_within_bounds(m, values)
        keep = (m.x > -torch.inf).any(-1)
        index = flags[0 if m.labels is None else 1]
        assert torch.equal(index[keep], m.x.argmax(-1)[keep]) and (index[~keep] == -1).all()
        if "forward_kl" in values and not m.x.isinf().any():
            truth = oracle.divergences(m.x.double(), m.t.double(), 0.5)
            x, t = m.x.double(), m.t.double()
            r = bounds.rounding(torch.float32, "torch", False, x, None, 1.0, None, 1.0)
            error, _ = bounds.divergence(x, t, [x.softmax(-1), t.softmax(-1)], r)
            for name in ("forward_kl", "reverse_kl"):
                assert (
                    (values[name].double() - truth[name]).abs() <= error + oracle.ulp(truth[name])
                ).all(), name


@examples(250 // SHARE_OF_OTHERS)
@given(MERGES, st.randoms(use_true_random=False))
def test_the_order_of_shards_leaves_the_float64_sums_within_their_bound(data, random):
    with reproducible(data):
        m = Merge(data)
        packets = m.packets(cuts_of(m, data))
        order = list(range(len(packets)))
        random.shuffle(order)
        a, b = m.state(packets), m.state(packets[order])
        assert torch.equal(a["shift"], b["shift"]) and torch.equal(a["index"], b["index"])
        assert_close_in_float64(a, b, packets, m)
        assert_within_bounds(m, m.values(packets[order])[0])


@examples(250 // SHARE_OF_OTHERS)
@given(MERGES)
def test_parts_without_columns_or_of_minus_infinity_are_the_identity(data):
    with reproducible(data):
        m = Merge(data)
        cuts = cuts_of(m, data)
        packets = m.packets(cuts)
        at = data["at"] % len(packets)
        empty = m.packet(cuts[at], cuts[at])
        more = torch.cat([packets[:at], empty, packets[at:]])
        assert_close_in_float64(m.state(packets), m.state(more), more, m)
        assert all(torch.equal(x, y) for x, y in zip(m.values(packets)[1], m.values(more)[1]))
        # a row whose piece is all -inf: its other columns alone are the same row
        start, stop = cuts[at], cuts[at + 1]
        x = m.x.clone()
        x[0, start:stop] = -torch.inf
        rest = m.packets(cuts, x)
        owned = m.labels is not None and start <= m.labels[0] < stop
        if not owned and "forward_kl" not in m.want:
            without = torch.cat([rest[:at], empty, rest[at + 1 :]])
            one, other = ({name: x[:1] for name, x in m.state(p).items()} for p in (rest, without))
            assert_close_in_float64(one, other, rest[:, :, :1], m)


@examples(250 // SHARE_OF_OTHERS)
@given(MERGES)
def test_a_nan_or_infinity_anywhere_is_its_rows_alone(data):
    with reproducible(data):
        m = Merge(data)
        cuts = cuts_of(m, data)
        clean, clean_flags = m.values(m.packets(cuts))
        x = m.x.clone()
        row, column = data["at"] % m.n, data["at"] % m.v
        x[row, column] = data["what"]
        values, flags = m.values(m.packets(cuts, x))
        others = torch.arange(m.n) != row
        for name, value in values.items():
            if name == "owners":
                continue
            assert value[row].isnan(), (name, value)
            assert bits_equal(value[others], clean[name][others]), name
        for flag, before in zip(flags, clean_flags):
            assert torch.equal(flag[others], before[others])


V, N, H = 40, 5, 7
FRESH = {}
CALLS = (
    "statistics",
    "head",
    "linear",
    "two heads",
    "reentrant",
    "checkpoint",
    "no_grad",
    "inplace",
    "recreate",
)
SEQUENCES = st.lists(
    st.tuples(st.sampled_from(CALLS), st.just(0))
    | st.tuples(st.sampled_from(["backward", "backward and keep"]), st.integers(0, 9)),
    min_size=1,
    max_size=9,
)


def inputs_of(group, device):
    generator = torch.Generator().manual_seed(5)
    shard = VocabShard.from_group(group, V)
    x, hidden = torch.randn(N, V, generator=generator), torch.randn(N, H, generator=generator)
    weight = torch.randn(V, H, generator=generator)[shard.start : shard.stop]
    labels = torch.tensor([0, V - 1, -100, V // 2, 3])
    return shard, *(
        t.to(device) for t in (x[:, shard.start : shard.stop].contiguous(), hidden, weight, labels)
    )


class Session:
    """Calls on the same tensors, each compared in bits with a fresh single call."""

    def __init__(self, group, device, backend):
        self.group, self.options = group, Options(backend=backend)
        self.shard, self.x, self.hidden, self.weight, self.labels = inputs_of(group, device)
        self.leaves = [t.requires_grad_() for t in (self.x, self.hidden, self.weight)]
        self.before = [t.detach().clone() for t in (*self.leaves, self.labels)]
        self.head = HeadLoss(
            [CrossEntropy(label_smoothing=0.1), ZLoss(0.1), Entropy(0.2)], options=self.options
        )
        self.upstream = torch.linspace(-1, 2, N, device=device)
        self.pending = []

    def statistics(self, x=None, options=None):
        x = self.x if x is None else x
        options = options or self.options
        stats = vocab_statistics(
            x, self.labels, shard=self.shard, want=("entropy",), options=options
        )
        return ((stats.log_prob + 0.5 * stats.entropy) * self.upstream).sum()

    def head_loss(self, x):
        return self.head(x, self.labels, shard=self.shard).loss

    def linear(self):
        return self.head.linear(
            self.hidden, self.weight, self.labels, shard=self.shard, linear=Linear(mode="recompute")
        ).loss

    def make(self, call):
        return {
            "statistics": self.statistics,
            "head": lambda: self.head_loss(self.x),
            "linear": self.linear,
        }[call]()

    def backward(self, call, value, keep):
        leaves = [self.hidden, self.weight] if call == "linear" else [self.x]
        return torch.autograd.grad(value, leaves, retain_graph=keep)

    def fresh(self, call):
        """Value and gradients of a single call, which every example may share: the inputs are the
        same."""
        key = call, self.options, self.shard.world_size
        if key not in FRESH:
            value = self.make(call)
            FRESH[key] = value.detach(), *self.backward(call, value, False)
        return FRESH[key]

    def expect(self, call, value, grads=()):
        for got, fresh in zip((value.detach(), *grads), self.fresh(call)):
            assert bits_equal(got, fresh), f"{call}: not what a fresh call gives"

    def run(self, call, number):
        if call in ("statistics", "head", "linear"):
            value = self.make(call)
            self.expect(call, value)
            self.pending.append([call, value, True])
        elif call.startswith("backward"):
            if self.pending:
                self.backward_of(
                    self.pending[number % len(self.pending)], call == "backward and keep"
                )
        elif call == "two heads":
            a, b = self.head_loss(self.x), self.statistics()
            (grad,) = torch.autograd.grad(a + b, self.x)
            assert bits_equal(grad, self.fresh("head")[1] + self.fresh("statistics")[1])
        elif call in ("reentrant", "checkpoint"):
            value = checkpoint(self.head_loss, self.x, use_reentrant=call == "reentrant")
            self.x.grad = None
            value.backward()
            self.expect("head", value, [self.x.grad])
            self.x.grad = None
        elif call == "no_grad":
            with torch.no_grad():
                value = self.statistics()
            assert not value.requires_grad
            self.expect("statistics", value)
        elif call == "inplace":
            self.inplace()
        else:
            old, self.shard = self.shard, VocabShard.from_group(self.group, V)
            assert old == self.shard

    def backward_of(self, pending, keep):
        call, value, alive = pending
        if not alive:
            with pytest.raises(RuntimeError, match="second time"):
                self.backward(call, value, keep)
            return
        self.expect(call, value, self.backward(call, value, keep))
        pending[2] = keep

    def inplace(self):
        """The gradient lies where the logits were, so that nothing may use them again."""
        logits = self.x * 1.0
        stale = logits**2
        value = self.statistics(logits, Options(backend=self.options.backend, inplace=True))
        version = logits._version
        self.expect("statistics", value, torch.autograd.grad(value, self.x, retain_graph=True))
        assert logits._version > version
        with pytest.raises(RuntimeError, match="so that there is one backward"):
            value.backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.sum().backward()

    def assert_inputs_unmodified(self):
        for t, before in zip((*self.leaves, self.labels), self.before):
            assert t._version == 0 and bits_equal(t.detach(), before) and t.grad is None


def sequence_run(group, device, backend, calls):
    session = Session(group, device, backend)
    for call, number in calls:
        session.run(call, number)
    session.assert_inputs_unmodified()


@pytest.mark.parametrize(
    "world_size, backend, count", [(1, "torch", 150), (2, "torch", 60), (1, "triton", 4)]
)
def test_any_sequence_of_calls_gives_what_single_calls_give(world_size, backend, count):
    @examples(count // SHARE_OF_OTHERS)
    @example(
        [("inplace", 0), ("head", 0), ("backward and keep", 0), ("backward", 0), ("backward", 0)]
    )
    @given(SEQUENCES)
    def run(calls):
        with reproducible(calls):
            on_ranks(world_size, sequence_run, backend, calls)

    run()
