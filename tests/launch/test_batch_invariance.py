"""A trainer's log-probs have the bits of a scorer's: the program that shows it."""

import pytest
import torch
from launcher import run_script


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs"
)
def test_no_log_prob_differs():
    options = "--vocab", 250, "--hidden", 24, "--sequences", 3, "--length", 5
    said = run_script("launch/batch_invariance.py", *options, ranks=2)
    assert (
        "15 tokens, trainer at TP 2, scorer at TP 1 with single sequences: 0 differ with epilogues"
        in said
    )
