"""The launch programs refuse wrong numbers, older runs, broken checkpoints and odd files before they touch anything."""

import argparse
import importlib
import os

import pytest
from launcher import ROOT

PROGRAMS = "train", "distill", "grpo", "megatron_pretrain"
MAY_BE_ZERO = ["warmup", "seed", "weight_decay", "z_weight", "kl_weight", "entropy_weight", "kd_weight"]


@pytest.fixture
def launch(monkeypatch):
    """The modules of launch/ by name."""
    monkeypatch.syspath_prepend(str(ROOT / "launch"))
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # or an import would set it for all tests
    return importlib.import_module


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_number_on_the_command_line_is_checked(launch, program, monkeypatch, capsys):
    module, actions = launch(program), []
    parse_args = argparse.ArgumentParser.parse_args

    def keep_and_parse(parser):
        actions[:] = parser._actions
        return parse_args(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", keep_and_parse)
    monkeypatch.setattr("sys.argv", [program])
    module.parse()
    numbers = [a for a in actions if a.type is not None or (isinstance(a.default, (int, float)) and a.nargs != 0)]
    assert len(numbers) >= 10
    for action in numbers:
        for value in ("nan", "inf", "1e400", "-1", "9" * 30, "x", "", *([] if action.dest in MAY_BE_ZERO else "0")):
            monkeypatch.setattr("sys.argv", [program, f"{action.option_strings[0]}={value}"])
            with pytest.raises(SystemExit) as error:
                module.parse()
            said = capsys.readouterr().err.splitlines()[-1]
            expected = f"{program}: error: argument {action.option_strings[0]}: must be a "
            assert error.value.code == 2 and said.startswith(expected) and said.endswith(f"got {value!r}"), said


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        ("train", "--width 12 --heads 4", "--width: must be a multiple of 2 x --heads = 8, got 12"),
        ("distill", "--width 63", "--width: must be a multiple of 2 x --heads = 4, got 63"),
        ("grpo", "--width 2", "--width: must be a multiple of 2 x --heads = 8, got 2"),
        ("grpo", "--shortest 4", "--shortest: must be at most --longest = 3, got 4"),
        ("grpo", "--vocab 12", "--vocab: must be at least --symbols + 3 = 13, got 12"),
        ("grpo", "--group 1", "--group: must be a whole number from 2 to 2147483647, got '1'"),
        ("megatron_pretrain", "--hidden 30", "--hidden: must be a multiple of --heads = 4, got 30"),
        ("megatron_pretrain", "--vocab 101", "--vocab: must be a multiple of --tp = 2, got 101"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(launch, program, options, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [program, *options.split()])
    with pytest.raises(SystemExit):
        launch(program).parse()
    assert capsys.readouterr().err.splitlines()[-1] == f"{program}: error: argument {message}"
