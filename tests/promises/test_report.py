"""`python -m tp_headloss`: what it says on one process and on ranks, and that a wrong result is not
called right."""

import configparser
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

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
    first = result.stdout.splitlines()[0]
    assert first.startswith(f"tp_headloss {__version__} in {ROOT / 'tp_headloss'}, Python ")
    assert f"torch {torch.__version__}" in result.stdout
    for check in CHECKS:
        assert f"ok: cpu: {check}" in result.stdout, result.stdout
    assert "transformers: " in result.stdout and "symmetric memory: " in result.stdout


def report_on_ranks(group, device):
    return __main__.report([device], group)


def test_the_check_runs_over_a_group():
    for lines, passed in on_ranks(2, report_on_ranks):
        assert passed, lines
        assert all(any(f"2 ranks: {check}" in line for line in lines) for check in CHECKS), lines


def report_with_another_triton(group, device):
    other = {**__main__.versions(), "triton": f"3.{group.rank() % 2}"}
    with mock.patch.object(__main__, "versions", lambda: other):
        return __main__.report([device], group)


def test_ranks_with_other_versions_fail_before_they_compute():
    expected = "FAILED: triton must have one version on all ranks: 3.0 on rank 0, 2; 3.1 on rank 1"
    for lines, passed in on_ranks(3, report_with_another_triton):
        assert not passed and lines[-1] == expected


OF_TORCHRUN = {
    "WORLD_SIZE": "2",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def test_a_job_is_what_torchrun_says(monkeypatch):
    for name, value in OF_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert __main__.job() == __main__.Job(2, 1, 1, 2, "localhost:29500")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert __main__.job().local_ranks == 2
    monkeypatch.setenv("WORLD_SIZE", "1")  # the others may be left of an older job
    assert __main__.job() == __main__.Job()
    monkeypatch.delenv("WORLD_SIZE")
    assert __main__.job() == __main__.Job()


WRONG = [(name, value) for name in OF_TORCHRUN for value in ("", "two", "-1", "2147483648")]


@pytest.mark.parametrize(
    ("name", "value"), [case for case in WRONG if case[0] != "MASTER_ADDR"] + [("MASTER_ADDR", "")]
)
def test_a_variable_that_is_missing_or_wrong_is_named(name, value, monkeypatch, capsys):
    for key, right in OF_TORCHRUN.items():
        monkeypatch.setenv(key, right)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["tp_headloss"])
    with pytest.raises(SystemExit) as exit:
        __main__.main()
    said = capsys.readouterr().err
    assert exit.value.code == 2 and f"error: {name} must be " in said
    assert f"got {value or 'nothing'}: write torchrun " in said and "unset WORLD_SIZE" in said


def test_ranks_that_do_not_come_are_waited_for_in_plain_sight(monkeypatch, capsys):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for name, value in {**OF_TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(__main__, "JOIN", timedelta(seconds=1))
    meeting = f"2 ranks at localhost:{port}"
    with pytest.raises(SystemExit, match=f"expected {meeting}, got Dist.*\n.*unset WORLD_SIZE"):
        __main__.join(__main__.job(), "gloo")
    assert capsys.readouterr().out.startswith(f"waiting for {meeting}; to check one process, unset")


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
