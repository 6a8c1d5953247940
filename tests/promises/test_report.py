"""`python -m tp_headloss`: what it says on one process and on ranks, and that a wrong result is not
called right."""

import configparser
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import on_ranks

from tp_headloss import HeadLoss, __main__, __version__

ROOT = Path(__file__).parents[2]
CHECKS = ("cross-entropy and z-loss", "distillation", "linear head")


def test_the_command_reports_versions_and_checks_this_machine():
    result = subprocess.run(
        [sys.executable, "-m", "tp_headloss"], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert (
        f"tp_headloss {__version__}" in result.stdout
        and f"torch {torch.__version__}" in result.stdout
    )
    for check in CHECKS:
        assert f"ok: cpu: {check}" in result.stdout, result.stdout
    assert "transformers: " in result.stdout and "symmetric memory: " in result.stdout


def report_on_ranks(group, device):
    return __main__.report([device], group)


def test_the_check_runs_over_a_group():
    for lines, passed in on_ranks(2, report_on_ranks):
        assert passed, lines
        assert all(any(f"2 ranks: {check}" in line for line in lines) for check in CHECKS), lines


@pytest.mark.parametrize(
    "wrong", [lambda x: x * 1.001, lambda x: x * torch.nan], ids=["value", "nan"]
)
def test_a_wrong_loss_fails_the_check(wrong, monkeypatch):
    def forward(self, *args, **kwargs):
        out = right(self, *args, **kwargs)
        return out._replace(loss=wrong(out.loss))

    right = HeadLoss.forward
    monkeypatch.setattr(HeadLoss, "forward", forward)
    lines, passed = __main__.report([torch.device("cpu")], None)
    assert not passed and any(line.startswith("FAILED: cpu: cross-entropy") for line in lines)


def test_a_check_that_raises_is_reported(monkeypatch):
    monkeypatch.setattr(HeadLoss, "linear", lambda *_, **__: 1 / 0)
    lines, passed = __main__.report([torch.device("cpu")], None)
    assert not passed and any("FAILED: cpu: ZeroDivisionError" in line for line in lines)


def test_the_oldest_versions_are_those_that_are_declared():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for name, oldest in __main__.NEEDED.items():
        assert f"{name}>={oldest}" in config["options"]["install_requires"]
