"""The odd inputs of `test_bad_inputs.py` on the Triton backend.

Interpreted kernels are slow: on CPUs each name meets one group size and one dtype, all of them in
turn. GPUs run them all.
"""

import pytest
import torch
from odd_case import DTYPES
from odd_inputs import CASES
from odd_outcome import MATRIX, holds

TURN = {name: number for number, name in enumerate(CASES)}
SIZES = {name: [size for other, size in MATRIX if other == name] for name in CASES}


def runs_here(name, world_size):
    sizes = SIZES[name]
    return torch.cuda.is_available() or world_size == sizes[TURN[name] % len(sizes)]


@pytest.mark.parametrize("name, world_size", [place for place in MATRIX if runs_here(*place)])
def test_odd_inputs_are_right_or_refused_on_every_rank(name, world_size):
    turn = TURN[name] // len(SIZES[name]) % len(DTYPES)
    holds(
        name, world_size, "triton", DTYPES if torch.cuda.is_available() else DTYPES[turn : turn + 1]
    )
