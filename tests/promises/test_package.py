"""The package as others get it: what is in sdist and wheel, that both run, and what the hosting
site reads."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import tp_headloss

ROOT = Path(__file__).parents[2]
LEFT_OUT = ".*", "__pycache__", "*.egg-info", "build", "dist", "runs"


def run(*command, cwd, **env):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | env
    result = subprocess.run(
        [sys.executable, "-m", *map(str, command)], capture_output=True, text=True, cwd=cwd, env=env
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder with an sdist and the wheel that was made of it, from a copy, because a build writes
    beside its source."""
    for tool in ("build", "twine"):
        pytest.importorskip(tool, reason=f"no {tool}: bash scripts/setup.sh dev")
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*LEFT_OUT))
    shutil.copytree(ROOT / ".github", folder / "source/.github")
    run("build", "--no-isolation", "--outdir", folder / "dist", cwd=folder / "source")
    return folder / "dist"


def test_an_index_accepts_what_is_built(built):
    assert len(list(built.iterdir())) == 2
    assert run("twine", "check", "--strict", *built.iterdir(), cwd=built).count("PASSED") == 2


def test_the_wheel_holds_the_package_alone_and_reports(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
        names = archive.namelist()
    sources = {
        str(path.relative_to(ROOT))
        for pattern in ("*.py", "*.cu", "*.cuh")
        for path in (ROOT / "tp_headloss").rglob(pattern)
    }
    assert any(name.endswith(".cuh") for name in sources)
    assert {name for name in names if ".dist-info/" not in name} == {
        *sources, "tp_headloss/py.typed",
    }  # fmt: skip
    assert "ok: cpu: linear head" in run("tp_headloss", cwd=tmp_path, PYTHONPATH=str(tmp_path))


def test_the_tests_of_the_sdist_run(built, tmp_path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    tops = {path for path in ROOT.iterdir() if not path.match(".*") and path.name not in LEFT_OUT}
    everything = {
        file
        for top in tops
        for file in ([top] if top.is_file() else top.rglob("*"))
        if file.is_file()
    }
    given = {
        str(path.relative_to(ROOT))
        for path in everything
        if not {"__pycache__", "build", ".hypothesis"} & {*path.parts}
    }
    given = {
        name
        for name in given
        if ".egg-info" not in name and not name.startswith((".", "runs/", "dist/"))
    }
    assert given <= {str(path.relative_to(root)) for path in root.rglob("*")}
    tests = "tests/losses/test_kl.py"
    assert "passed" in run("pytest", "-q", "-p", "no:cacheprovider", tests, cwd=root)


def test_a_module_that_is_gone_is_not_in_a_wheel_from_the_same_folder(tmp_path):
    pytest.importorskip("build", reason="no build: bash scripts/setup.sh dev")
    source, gone = tmp_path / "source", "tp_headloss/gone.py"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*LEFT_OUT, "tests", "docs"))
    (source / "build/lib/tp_headloss").mkdir(parents=True)
    (source / "build/lib" / gone).write_text("")  # of the build before
    run("build", "--wheel", "--no-isolation", "--outdir", tmp_path, cwd=source)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "tp_headloss/plan.py" in names and gone not in names
    assert (source / "tp_headloss/plan.py").exists()


def test_the_extra_all_holds_every_host():
    """But verl, NeMo-Automodel and axolotl, which need another transformers each."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = {
        name: set(value.strip().splitlines())
        for name, value in config["options.extras_require"].items()
    }
    assert extras["all"] == set().union(
        *(
            extras[name]
            for name in extras.keys()
            - {"all", "dev", "docs", "test", "train", "verl", "nemo-automodel", "axolotl"}
        )
    )


def test_a_change_is_listed_once():
    text = (ROOT / "CHANGELOG.md").read_text()
    entries = re.findall(r"^\* .*(?:\n  .*)*", text, re.M)
    found = [entry for entry in entries if len(entry) > 40]
    twice = [entry for entry in found if found.count(entry) > 1]
    assert len(found) > 100 and not twice, twice


def test_what_the_hosting_site_reads_is_well_formed():
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    commands = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    for command in commands:
        for word in command.split():
            assert not word.startswith("scripts/") or (ROOT / word).exists(), word
    assert "bash scripts/test.sh" in commands
    template = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    assert any("python -m tp_headloss" in part["attributes"]["label"] for part in template["body"])
    cited = f"version {tp_headloss.__version__}, "
    assert cited in (ROOT / "README.md").read_text()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (
        citation["authors"] == [{"name": "tp_headloss contributors"}]
        and citation["license"] == "Apache-2.0"
    )
