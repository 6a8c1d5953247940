"""Command lines of scripts: --help makes nothing, and what is written wrongly is refused before
anything is made."""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# gpu_check.sh hands --help to its Python
SHELL = [
    str(path.relative_to(ROOT))
    for folder in ("scripts", "launch")
    for path in sorted((ROOT / folder).rglob("*.sh"))
    if path.read_text().startswith("#!") and path.name != "gpu_check.sh"
]


@pytest.fixture
def checkout(tmp_path):
    """A copy of what the shell scripts read, with no environment."""
    copy = tmp_path / "checkout"
    left_out = shutil.ignore_patterns("__pycache__")
    for name in ("scripts", "launch", "tp_headloss"):
        shutil.copytree(ROOT / name, copy / name, ignore=left_out)
    for name in ("setup.cfg", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy)
    return copy


def run(checkout, script, *arguments, python=sys.executable):
    """-> the finished process, which began in another folder, and the files that are new."""
    before = set(checkout.parent.rglob("*"))
    here = checkout.parent / "here"
    here.mkdir()
    command = ["bash", str(checkout / script), *arguments]
    environment = {**os.environ, "PYTHON": str(python), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=here, env=environment)
    new = set(checkout.parent.rglob("*")) - before - {here}
    return done, {str(path.relative_to(checkout.parent)) for path in new}


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("script", SHELL)
def test_help_is_the_head_of_the_script_and_makes_nothing(checkout, script, option):
    done, new = run(checkout, script, option)
    assert (done.returncode, done.stderr, new) == (0, "", set())
    head = []
    for line in (ROOT / script).read_text().splitlines()[1:]:
        if not line.startswith("#"):
            break
        head.append(line[2:])
    assert head and done.stdout.splitlines() == head


@pytest.mark.parametrize("script, arguments, says", [
    ("scripts/setup.sh", ["test", "foo"], "setup: there is no foo; expected names of these: all "),
    ("scripts/hosts.sh", ["foo-1.0"], "hosts: there is no foo-1.0; expected names of these: megatron-"),
    ("scripts/check/versions.sh", ["2.13.0", "foo"], "versions: expected a version of torch such as"),
    ("scripts/check/four_and_eight.sh", ["OUT", "foo"], "four_and_eight: there is no foo; expected"),
    ("scripts/hub.sh", [], "hub: where to?"),
    ("scripts/docs.sh", ["foo"], "docs: there is no foo; expected names of these: serve"),
    ("scripts/test.sh", ["foo"], "test: expected options and tests of pytest, got foo, which is not here"),
    ("scripts/hosts_gpu/all.sh", ["OUT", "foo"], "all: expected one FOLDER, got OUT foo"),
    ("launch/quickstart.sh", ["foo"], "quickstart: expected options of launch/train.py, such as --steps 50, got foo"),
])  # fmt: skip
def test_an_unknown_name_is_refused_before_anything_is_made(checkout, script, arguments, says):
    done, new = run(checkout, script, *arguments)
    assert (done.returncode, done.stdout, new) == (2, "", set())
    assert done.stderr.startswith(says)


def test_an_unknown_host_on_gpus_is_refused(checkout, monkeypatch):
    monkeypatch.setenv("ONLY", "trl foo")
    done, new = run(checkout, "scripts/hosts_gpu/all.sh", "OUT")
    assert (done.returncode, new) == (2, set())
    says = "all: there is no foo; expected names of these: "
    assert done.stderr.startswith(says)
    hosts = done.stderr.removeprefix(says).split()
    assert len(hosts) == 14 and {"trl", "trl_grpo", "torchtitan", "megatron"} < {*hosts}


@pytest.mark.parametrize("arguments", [["gpu_check.sh", "--help"], ["four_and_eight.sh", "OUT"]])
def test_a_python_without_torch_is_told_the_setup(checkout, arguments, tmp_path):
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')  # without site-packages
    bare.chmod(0o755)
    script, *rest = arguments
    done, new = run(checkout, f"scripts/check/{script}", *rest, python=bare)
    says = f"{script[:-3]}: {bare} has no torch, triton; first: bash scripts/setup.sh test train\n"
    assert (done.returncode, done.stdout, done.stderr, new) == (1, "", says, set())


def test_the_help_of_a_python_program_is_its_own(checkout):
    done, _ = run(checkout, "scripts/check/gpu_check.sh", "--help")
    assert done.returncode == 0 and "--report" in done.stdout, done.stderr


def test_a_batch_script_outside_of_slurm_says_how_it_is_started(checkout):
    done, _ = run(checkout, "launch/slurm.sbatch")
    assert done.returncode != 0 and "start with sbatch" in done.stderr


def test_a_folder_of_results_is_in_the_callers_folder(checkout):
    done, new = run(checkout, "scripts/hub.sh", "kernels/mine")
    assert done.returncode == 0, done.stderr
    assert "here/kernels/mine/build/torch-cpu/metadata.json" in new
    assert all(name.startswith("here/kernels") for name in new)


def test_no_parser_takes_a_part_of_an_option():
    """An abbreviation may mean another option in the next version."""
    found, makers = 0, ("ArgumentParser", "add_parser")
    for folder in ("tp_headloss", "launch", "scripts", "examples", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if not any(name in text for name in makers):
                continue
            for node in ast.walk(ast.parse(text)):
                if not isinstance(node, ast.Call):
                    continue
                if ast.unparse(node.func).split(".")[-1] in makers:
                    given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                    assert given.get("allow_abbrev") == "False", f"{path}:{node.lineno}"
                    found += 1
    assert found > 20


@pytest.fixture
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts/check/gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_check_of_gpus_writes_over_no_page_that_it_was_not_asked_for(gpu_check):
    report = gpu_check.parser_of_options().get_default("report")
    assert f"{report.parts[0]}/" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_report_of_gpus_says_how_long_it_took(gpu_check, monkeypatch):
    monkeypatch.setattr(gpu_check, "facts", dict)
    steps = [gpu_check.Step(name, True, 50.0, "") for name in ("test_one", "test_two")]
    assert "2 of 2 passed, in 61 seconds in all." in gpu_check.report(steps, "--jobs 2", 61.2)
