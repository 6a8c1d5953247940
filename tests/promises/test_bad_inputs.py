"""Every odd input of docs/limits.md in fp32, bf16 and fp16 at one, two and four ranks: right, or
the same exception on every rank. Nothing silent, no hang. The inputs are in `odd_inputs`; Triton's
turn is `test_bad_inputs_triton.py`.
"""

import re

import pytest
from odd_case import DTYPES
from odd_inputs import CASES, lines
from odd_outcome import MATRIX, holds
from pages import section


@pytest.mark.parametrize("name, world_size", MATRIX)
def test_odd_inputs_are_right_or_refused_on_every_rank(name, world_size):
    holds(name, world_size, "torch")


def test_every_line_of_the_table_has_cases_and_every_case_a_line():
    text = section("limits.md", "## Semantics of every odd input")
    table = dict(re.findall(r"^\| (.*?) \| (.*) \|$", text, re.M)[1:])  # without its head
    assert table.keys() == lines(DTYPES[0]).keys()
    for line, cases in lines(DTYPES[0]).items():
        for name, case in cases.items():
            promised = case.raises.split(":")[0] or (
                "NaN" if case.nan else "0" if case.zero else ""
            )
            assert promised in table[line], f"{name} is {promised}: {table[line]}"
        raised = {case.raises.split(":")[0] for case in cases.values()} - {""}
        assert raised == set(re.findall(r"\w+Error", table[line])), line
    # no name twice
    assert sum(len(cases) for cases in lines(DTYPES[0]).values()) == len(CASES) >= 200
