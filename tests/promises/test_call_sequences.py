"""A call's result depends on its arguments alone: random calls in other orders, in processes of
their own, are alike.

What outlives a call (known calls, prepared launches, obstacles, forecasts of upstream gradients,
memory that kernels share, compile caches) is met by calls of all kinds there, in an order that no
other process has.
"""

import os
import random
from collections import Counter

import pytest
import torch
from call_sequence import alike, in_order, random_calls
from ranks import _from_bytes, _to_bytes, on_ranks, start_context

FULL = bool(os.environ.get("TP_HEADLOSS_FULL"))
COUNT = 40
MODES = "grad", "grad", "grad", "no_grad", "inference", "autocast", "stream"
CUDA = torch.cuda.is_available()
OF_A_TERM = "ArithmeticError: a user's term"
# one read and two launches may differ in the last bit of bf16, and which of both writes a gradient
# depends on before
TOLERANCE = 2**-7 if CUDA else 0.0


def orders(seed: int, count: int) -> list[list[int]]:
    """Three orders of the calls: theirs, the opposite, and a random one with some calls twice."""
    choices, order = random.Random(seed), list(range(count))
    shuffled = choices.sample(order, count)
    return [order, order[::-1], [i for i in shuffled for _ in range(choices.choice([1, 1, 2]))]]


def _in_a_process(pipe, calls, order):
    if not CUDA:
        from interpreter import patch_interpreter

        patch_interpreter()
        torch.set_num_threads(1)
    pipe.send_bytes(
        _to_bytes(in_order(None, torch.device("cuda" if CUDA else "cpu"), calls, order))
    )


def in_fresh_processes(calls, all_orders) -> list[list]:
    """What the calls give in each order, each in a process that has made no call before."""
    context, found = start_context(CUDA), []
    for order in all_orders:
        parent, child = context.Pipe()
        process = context.Process(target=_in_a_process, args=(child, calls, order))
        process.start()
        child.close()
        found.append(_from_bytes(parent.recv_bytes()))
        process.join()
    return found


def expect_alike(calls, results):
    for call, *found in zip(calls, *results):
        for other in found[1:]:
            assert alike(found[0], other, TOLERANCE), (call, found[0], other)


@pytest.mark.parametrize("seed", range(2 if FULL else 1))
@pytest.mark.parametrize(
    "backends, modes", [(("torch",), (*MODES, "thread")), (("torch", "triton", "triton"), MODES)]
)
def test_calls_in_any_order_give_the_same(seed, backends, modes):
    count = COUNT if backends == ("torch",) or CUDA else COUNT // 2  # the interpreter is slow
    calls = random_calls(seed, count, backends, modes)
    results = in_fresh_processes(calls, orders(seed, count))
    errors = Counter(result for result in results[0] if isinstance(result, str))
    del errors[OF_A_TERM]  # the calls ask for these
    assert errors.total() < count // 2, errors
    expect_alike(calls, results)


@pytest.mark.parametrize("world_size", [2, 4])
def test_calls_of_a_group_in_any_order_give_the_same(world_size):
    """In the processes of all tests, which have made calls before."""
    calls = random_calls(world_size, COUNT // 2, ("torch",), MODES)
    by_order = [
        on_ranks(world_size, in_order, calls, order) for order in orders(world_size, len(calls))
    ]
    for of_rank in zip(*by_order):
        expect_alike(calls, of_rank)
