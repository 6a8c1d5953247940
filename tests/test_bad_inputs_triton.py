"""The odd inputs of `test_bad_inputs.py` on the Triton backend.

Interpreted kernels are slow, and at one rank there are eight chunks: on CPUs each name meets one of the three dtypes at
each of two group sizes (what is refused, before any kernel, at one), in turn. GPUs run them all.
"""

import pytest
import torch
from odd_inputs import CASES, DTYPES, MATRIX, case_of, holds

TURN = {name: number for number, name in enumerate(CASES)}


def in_turn(name, world_size):
    case, left_out = case_of(name, DTYPES[0]), (TURN[name] + world_size // 2) % 3
    return torch.cuda.is_available() or len(case.sizes) < 3 or (left_out == 1 if case.raises else left_out != 0)


@pytest.mark.parametrize("name, world_size", [(name, size) for name, size in MATRIX if in_turn(name, size)])
def test_odd_inputs_are_right_or_refused_on_every_rank(name, world_size):
    turn = (TURN[name] // 3 + world_size // 2) % len(DTYPES)
    holds(name, world_size, "triton", DTYPES if torch.cuda.is_available() else DTYPES[turn : turn + 1])
