"""The planted bugs of scripts/check/mutants.py fit the package, and what no longer fits is
explained."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = '''
class Shard:
    def width(self, size):
        """Columns of this rank."""
        step = -(-size // self.ranks)  # rounded up
        check(size)
        return max(0,
                   step)

    def label(self):
        return f"{self.ranks + 1}"


def total(values):
    values = sorted(values, reverse=True)
    return sum(values, start=0.0) + sum(values, start=0.0)
'''

CUDA = """
struct Sum {
  float total;  // of { all
  DEVICE float mean(int n) const { return total / n; }
};
struct Largest : Sum {
  DEVICE float mean(int) const { return total; }
};
// join(a, b) {
DEVICE Sum join(Sum a, Sum b, float (&parts)[2]) {
  if (finite(b.total)) {
    a.total +=
        b.total;  // }
  }
  return Sum{a.total};
}
DEVICE float total_of(Sum a, Sum b) {
  float parts[2];
  return join(a, b, parts).total + join(b, a, parts).total;
}
"""


@pytest.fixture
def mutants(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts/check"))
    import mutants

    return mutants


@pytest.fixture
def problem(mutants, tmp_path):
    """problem(module, function, find, becomes): why this cannot be planted into SOURCE or CUDA."""
    (tmp_path / "shard.py").write_text(SOURCE)
    (tmp_path / "sum.cuh").write_text(CUDA)
    (tmp_path / "open.cuh").write_text(CUDA.replace("return Sum{a.total};\n}", ""))
    return lambda *change: mutants.problem(mutants.Bug(0, "test_shard", *change), tmp_path)


def test_every_planted_bug_is_in_the_package_exactly_once(mutants):
    bugs = mutants.all_bugs()
    outdated = [f"{bug}\n    {reason}" for bug in bugs if (reason := mutants.problem(bug))]
    assert not outdated, "\n".join(outdated)
    assert len(bugs) >= 110 and all(
        mutants.test_files(ROOT, x) for x in {bug.tests for bug in bugs}
    )


@pytest.mark.parametrize(
    ("function", "find", "becomes", "line"),
    [
        (
            "Shard.width",
            "-( -size//self.ranks )",
            "size // self.ranks",
            "step = (size // self.ranks)  # rounded up",
        ),
        ("Shard.width", "check(size)", "pass", "        pass\n"),
        (
            "Shard.width",
            "return max(0, step)",
            "step += 1\nreturn step",
            "        step += 1\n        return step\n",
        ),
        ("Shard.label", 'f"{self.ranks + 1}"', '""', 'return ("")'),
        ("total", "reverse=True", "reverse=False", "sorted(values, reverse=False)"),
        ("", "sorted(values, reverse=True)", "values", "values = (values)"),
    ],
)
def test_a_bug_replaces_the_code_that_means_the_same_and_nothing_else(
    mutants, function, find, becomes, line
):
    after = mutants.mutated(
        mutants.Bug(0, "test_shard", "shard.py", function, find, becomes), SOURCE
    )
    assert line in after
    lines = set(after.splitlines())
    assert len([kept for kept in SOURCE.splitlines() if kept not in lines]) <= 2


@pytest.mark.parametrize(
    ("function", "find", "becomes", "words"),
    [
        (
            "total",
            "sum(values, start=0.0)",
            "0.0",
            "2 times in total, lines 16, 16: quote more of one of them",
        ),
        ("total", "sum(values)", "0.0", "not in total\n    alike: sum(values, start=0.0)"),
        (
            "total",
            "check(size)",
            "pass",
            'not in total\n    it is in ("shard.py", "Shard.width", ..)',
        ),
        (
            "width",
            "check(size)",
            "pass",
            'no function width\n    alike: Shard.width\n    it is in ("shard.py"',
        ),
        ("Shard.width", "max(0, step)", "pass", "'pass' cannot stand there"),
        ("Shard.width", "check(size)", "check((size))", "changes nothing"),
    ],
)
def test_a_bug_that_does_not_fit_says_why_and_what_would(problem, function, find, becomes, words):
    assert words in problem("shard.py", function, find, becomes)


def test_a_bug_of_a_module_that_moved_says_where_its_code_is(problem):
    said = 'Outdated: there is no module sharding.py\n    it is in ("shard.py", "Shard.width", ..)'
    assert problem("sharding.py", "Shard.width", "check(size)", "pass") == said


@pytest.mark.parametrize(
    ("function", "find", "becomes", "before", "after"),
    [
        ("join", "return Sum{a.total};", "return b;", "return Sum{a.total};", "return b;"),
        ("join", "+= b.total", "= 0", "+=\n        b.total", "= 0"),
        ("Sum", "float total;", "int total;", "float total;", "int total;"),
        ("Largest.mean", "total", "0", "return total;", "return 0;"),
        ("total_of", "join(a, b, parts).total +", "", "join(a, b, parts).total +", ""),
        ("", "total / n", "total", "total / n", "total"),
    ],
)
def test_a_bug_in_a_cuda_part_replaces_its_code_and_nothing_else(
    mutants, function, find, becomes, before, after
):
    assert CUDA.count(before) == 1
    bug = mutants.Bug(0, "test_sum", "sum.cuh", function, find, becomes)
    assert mutants.mutated(bug, CUDA) == CUDA.replace(before, after)


@pytest.mark.parametrize(
    ("module", "function", "find", "words"),
    [
        ("sum.cuh", "join", "c.total", "Outdated: not in join"),
        ("sum.cuh", "join", "float parts[2];", "Outdated: not in join"),
        ("sum.cuh", "join", "total", "4 times in join, lines 11, 12, 13, 15"),
        ("sum.cuh", "Sum", "of", "not in Sum"),
        ("sum.cuh", "meet", "total", "function or struct meet: not in sum.cuh"),
        ("sum.cuh", "mean", "total", "function or struct mean: 2 times in sum.cuh, lines 4, 7"),
        ("sum.cuh", "Largest.join", "total", "function or struct join: not in Largest"),
        ("sum.cuh", "Largest.mean", "return pass", "not in mean"),
        ("sum.cuh", "Sum.mean", "return total  / n", "changes nothing"),
        ("open.cuh", "join", "total", "the block that begins in line 10 does not end"),
        ("total.cuh", "join", "a.total +", "there is no module total.cuh"),
    ],
)
def test_a_bug_that_does_not_fit_a_cuda_part_says_why(problem, module, function, find, words):
    assert words in problem(module, function, find, "return total / n")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_bugs_in_cuda_parts_compile(mutants, tmp_path):
    """Or else their tests fail because of that."""
    folder = mutants.PACKAGE / "engine/one_read"
    parts = [folder / f"{name}.cuh" for name in ("numbers", "params", "statistics", "node")]
    bugs = [bug for bug in mutants.all_bugs() if mutants.PACKAGE / bug.module in parts]
    assert len(bugs) >= 40
    source = (ROOT / "tests/helpers/one_read_on_host/ptx.cuh").read_text()
    for bug in bugs:
        texts = {path: path.read_text() for path in parts}
        path = mutants.PACKAGE / bug.module
        texts[path] = mutants.mutated(bug, texts[path])
        code = re.sub("#(include|pragma once).*", "", "".join(texts.values()))
        source += f"namespace bug_{bug.number} {{\n{code}\n}}\n"
    (tmp_path / "bugs.cpp").write_text(source)
    flags = "-DENTROPY", "-DARGMAX", "-DTOTAL", "-DENTROPY_TERM"
    command = "g++", "-std=c++20", "-w", "-fsyntax-only", *flags, "bugs.cpp"
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert not found.stderr


def test_bugs_are_chosen_by_number_or_by_word(mutants):
    bugs = mutants.all_bugs()
    assert [bug.number for bug in mutants.chosen(bugs, ["3", "5"])] == [3, 5]
    assert {bug.module for bug in mutants.chosen(bugs, ["sequences.py"])} == {
        "arguments/sequences.py"
    }
    assert mutants.chosen(bugs, None) == bugs
