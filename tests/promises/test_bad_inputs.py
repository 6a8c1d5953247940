"""Every odd input of docs/limits.md in fp32, bf16 and fp16 at one, two and four ranks: right, or
the same exception on every rank. Nothing silent, no hang. Each type at one number of ranks, at all
of them with TP_HEADLOSS_FULL=1. The inputs are in `odd_inputs`; Triton's turn is
`test_bad_inputs_triton.py`.
"""

import itertools
import re

import pytest
import torch
from odd_case import DTYPES
from odd_inputs import CASES, lines
from odd_outcome import MATRIX, dtypes_of, holds
from pages import section

import tp_headloss as hl


@pytest.mark.parametrize("name, world_size", MATRIX)
def test_odd_inputs_are_right_or_refused_on_every_rank(name, world_size):
    holds(name, world_size, "torch", dtypes_of(name, world_size))


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


LAYOUTS = {
    "coo": torch.Tensor.to_sparse,
    "csr": lambda x: x.reshape(2, -1).to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[1]]),
    "jagged": lambda x: torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged),
    "mkldnn": lambda x: x.to_mkldnn(),
}
GIVEN = "logits", "labels", "token_weight", "advantages", "hidden", "weight", "linear labels"


@pytest.mark.parametrize("given, layout", list(itertools.product(GIVEN, LAYOUTS)))
def test_other_layouts_are_refused_in_a_first_and_in_a_later_call(given, layout, device):
    arguments = {
        "logits": torch.randn(4, 8),
        "hidden": torch.randn(4, 6),
        "weight": torch.randn(8, 6),
        "labels": torch.arange(4),
        "token_weight": torch.rand(4),
        "advantages": torch.randn(4),
    }
    arguments = {name: x.to(device) for name, x in arguments.items()}
    if layout == "mkldnn" and (device != "cpu" or "labels" in given):
        return
    head = hl.HeadLoss([hl.CrossEntropy(), hl.PolicyGradient("reinforce")])

    def call(logits, hidden, weight, labels, advantages, token_weight):
        others = {"inputs": {"advantages": advantages}}
        if given == "token_weight":
            others["token_weight"] = token_weight
        if given in ("hidden", "weight", "linear labels"):
            return head.linear(hidden, weight, labels, **others)
        return head(logits, labels, **others)

    name = given.removeprefix("linear ")
    other = arguments | {name: LAYOUTS[layout](arguments[name])}
    for _ in range(2):
        with pytest.raises(TypeError, match=r"must be a (dense tensor|torch\.Tensor)"):
            call(**other)
        for _ in range(2):
            call(**arguments)
