"""Whatever the package has is tested and documented: a new statistic or host fails here until it
is, and the message says what is missing."""

import ast
import re

import bounds
import oracle
import pytest
import sets_problem
import torch
from generated_truth import Truth
from known import PLAIN, PLAIN_VALUES, STATISTICS, TRAINED, hosts
from pages import ROOT, section, tables

from tp_headloss.engine.ways import one_read
from tp_headloss.statistics import FAMILIES, VocabStatistics, layout_of

LOGITS = torch.tensor([[0.5, -1.0, 2.0, 0.25], [1.5, 0.75, -0.5, 1.0]]).double()
LABELS = torch.tensor([2, 1])
ONES = torch.ones(2, dtype=torch.float64)
ROUNDING = bounds.rounding(torch.float32, "torch", False, LOGITS, None, 1.0, None, 1.0)
# statistics whose formula and bound need more of a case than its logits
OF_CASES = {"log_probs_at": Truth._at_ids, "rank": Truth.ranks}


def formulas() -> set[str]:
    """The statistics that have a formula in float64."""
    teacher = LOGITS.flip(1)
    entries = torch.tensor([[0.0, 0.25, 0.5, 0.0]]).double().expand(2, -1)
    sets = [[0, 2], [1, 3]]
    return {
        *oracle.statistics(LOGITS, LABELS),
        *oracle.divergences(LOGITS, teacher, 0.5),
        *oracle.of_entries(LOGITS, entries, 0.5)[0],
        *sets_problem.truth(LOGITS, LABELS, sets),
        *OF_CASES,
    }


def test_every_statistic_has_a_formula_in_float64():
    missing = [name for name in STATISTICS if name not in formulas()]
    assert not missing, f"no formula of {missing} in tests/helpers/oracle.py"


def test_every_value_of_logits_has_a_bound():
    truth = oracle.statistics(LOGITS, LABELS)
    bounded = bounds.values(LOGITS, LABELS, None, truth, ROUNDING)
    missing = [name for name in PLAIN_VALUES if name not in bounded]
    assert not missing, f"no bound of {missing} in tests/helpers/bounds.py, `values`"


@pytest.mark.parametrize("name", TRAINED)
def test_every_gradient_of_logits_has_a_formula_and_a_bound(name):
    slope = torch.ones_like(LOGITS)
    gradient = oracle.gradient(LOGITS, slope, LABELS, {name: ONES})
    assert gradient.any(), f"no gradient of {name} in tests/helpers/oracle.py, `gradient`"
    error = bounds.gradient(LOGITS, LABELS, None, {name: ONES}, {}, ROUNDING)
    # what may be flushed to 0 is smaller
    assert (error > 1e-12).any(), f"no bound of {name} in tests/helpers/bounds.py, `gradient`"


def test_every_statistic_is_a_row_of_the_documentation():
    (table,) = tables(section("statistics.md", "## Statistics"))
    documented = {name for row in table for name in re.findall(r"`(\w+)`", row[0])}
    values = [name for name in layout_of(True, STATISTICS).values if name != "owners"]
    missing = [name for name in dict.fromkeys((*STATISTICS, *values)) if name not in documented]
    assert not missing, f"no row of {missing} in the table of docs/statistics.md"


def test_every_statistic_is_a_field_that_says_what_it_is():
    missing = [name for name in STATISTICS if name not in VocabStatistics._fields]
    assert not missing, f"no field of {missing} in `VocabStatistics`"
    fields = {name: getattr(VocabStatistics, name).__doc__ for name in VocabStatistics._fields}
    silent = [name for name, text in fields.items() if text.startswith("Alias for field")]
    assert not silent, f"no line of {silent} among the attributes of `VocabStatistics`"


def test_every_family_has_a_table_of_its_statistics():
    for family in FAMILIES:
        page = __import__(type(family).__module__, fromlist=["__doc__"]).__doc__ or ""
        missing = [name for name in family.statistics if not re.search(rf"\b{name}\b", page)]
        assert not missing, f"{type(family).__module__} begins without a word about {missing}"


def test_the_engine_names_no_statistic():
    """Families state what it has to know. One read has a kernel of its own, and ways that ask it."""
    for path in sorted((ROOT / "tp_headloss/engine").glob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        words = {node.value for node in nodes if isinstance(node, ast.Constant)}
        assert not words & {*STATISTICS}, f"{path.name} names {sorted(words & {*STATISTICS})}"


def test_one_read_adds_up_the_families_that_say_so():
    stated = {name for family in FAMILIES for name in family.in_one_read}
    assert stated == {*one_read.FLAGS}


def test_plain_statistics_are_those_that_need_logits_and_labels():
    """The lists that other tests take from `known` are not empty by mistake."""
    assert {"entropy", "collision", "total", "argmax"} <= {*PLAIN}
    assert TRAINED[:3] == ("lse", "log_prob", "target_logit") and "argmax" not in TRAINED


def mentions(text: str, host: str) -> bool:
    """True if a text imports an adapter, or names it as an attribute of a package."""
    names = r"(?:[^\n(]*|\([^)]*)"  # of one line, or in brackets
    by_name = rf"(integrations|`)\.{host}\b|integrations import {names}\b{host}\b"
    return re.search(by_name, text) is not None


@pytest.mark.parametrize("host", hosts())
def test_every_host_has_a_guide_and_tests(host):
    guides = ROOT / "docs/guides"
    pages = "\n".join(page.read_text() for page in guides.glob("*.md"))
    has_guide = (guides / f"{host}.md").exists() or mentions(pages, host)
    assert has_guide, f"no docs/guides/{host}.md, and no guide names integrations.{host}"
    tests = ROOT / "tests/hosts"
    files = "\n".join(path.read_text() for path in tests.glob("*.py"))
    has_tests = (tests / f"test_{host}.py").exists() or mentions(files, host)
    assert has_tests, (
        f"no tests/hosts/test_{host}.py, and no file there imports integrations.{host}"
    )


def test_hosts_are_found():
    assert {"deepspeed", "megatron", "nemo_rl", "slime", "transformers", "verl"} <= {*hosts()}
    assert not {"rl_tokens", "replacement", "fsdp"} & {*hosts()}
