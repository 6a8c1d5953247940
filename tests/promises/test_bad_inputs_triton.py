"""The odd inputs of `test_bad_inputs.py` on the Triton backend.

Interpreted kernels are slow: on CPUs each name meets one of the three dtypes at each group size, all three in turn, and
each pair of dtype and size has a third of the names. GPUs run them all.
"""

import pytest
import torch
from odd_case import DTYPES
from odd_inputs import CASES
from odd_outcome import MATRIX, holds

TURN = {name: number for number, name in enumerate(CASES)}


@pytest.mark.parametrize("name, world_size", MATRIX)
def test_odd_inputs_are_right_or_refused_on_every_rank(name, world_size):
    turn = (TURN[name] + world_size // 2) % len(DTYPES)
    holds(name, world_size, "triton", DTYPES if torch.cuda.is_available() else DTYPES[turn : turn + 1])
