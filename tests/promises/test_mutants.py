"""The planted bugs of scripts/check/mutants.py fit the package, and what no longer fits is
explained."""

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


@pytest.fixture
def mutants(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts/check"))
    import mutants

    return mutants


@pytest.fixture
def problem(mutants, tmp_path):
    """problem(module, function, find, becomes): why this cannot be planted into SOURCE."""
    (tmp_path / "shard.py").write_text(SOURCE)
    return lambda *change: mutants.problem(mutants.Bug(0, "test_shard", *change), tmp_path)


def test_every_planted_bug_is_in_the_package_exactly_once(mutants):
    bugs = mutants.all_bugs()
    outdated = [f"{bug}\n    {reason}" for bug in bugs if (reason := mutants.problem(bug))]
    assert not outdated, "\n".join(outdated)
    assert len(bugs) >= 110 and all(mutants.test_files(ROOT, bug.tests) for bug in bugs)


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


def test_bugs_are_chosen_by_number_or_by_word(mutants):
    bugs = mutants.all_bugs()
    assert [bug.number for bug in mutants.chosen(bugs, ["3", "5"])] == [3, 5]
    assert {bug.module for bug in mutants.chosen(bugs, ["sequences.py"])} == {
        "arguments/sequences.py"
    }
    assert mutants.chosen(bugs, None) == bugs
