"""A trainer's log-probs have the bits of a scorer's: the program that shows it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_no_log_prob_differs():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "launch/batch_invariance.py"), "--vocab", "250", "--hidden", "24", "--sequences", "3"]
    result = subprocess.run([*command, "--length", "5"], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "15 tokens, trainer at TP 2, scorer at TP 1 with single sequences: 0 differ with epilogues" in result.stdout
