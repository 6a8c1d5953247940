"""Full validation compares what a family is, and ranks whose families differ find out."""

from unittest import mock

import pytest
import torch
from own_families import Sums, registered
from pages import marked_block
from ranks import on_ranks

import tp_headloss as hl
from tp_headloss.call.agreement import _describe, families_wanted

POWER = ("power", 1.5, 1.0)
ONES = torch.ones(3)


def made(attribute=1.0, closed=2.0, default=3.0, held=(4.0, ONES), base=Sums, **members):
    """A family of a class that each rank makes for itself."""

    class Own(base):
        factor = torch.ones(2)

        def local(self, tile, softmax, rows, share=default):
            return super().local(tile, softmax, rows) | {f"{closed}": share}

        @staticmethod
        def helper(x):
            return x.exp() + 5.0 if x in {0, 8} else None

        @property
        def doubled(self):
            return [2 * x for x in self.packet]

    for name, value in members.items():
        setattr(Own, name, value)
    family = Own("own", (POWER,))
    family.attribute, family.held, family.function = attribute, held, lambda z: z**2
    return family


class Rescaled(Sums):
    """A base class between."""

    def rescale(self, rows, drop, factor):
        return super().rescale(rows, drop, factor)


class RescaledOtherwise(Sums):
    def rescale(self, rows, drop, factor):
        return super().rescale(rows, drop, 1.0 * factor)


RescaledOtherwise.__qualname__ = "Rescaled"
# what one rank's family has of its own -> the fact that differs
OWN = {
    "a number": ({"attribute": 1.5}, "attribute"),
    "a number in a closure": ({"closed": 2.5}, "local.0.variables.closed"),
    "a tensor in a closure": ({"closed": torch.ones(2)}, "local.0.variables.closed"),
    "a default": ({"default": 3.5}, "local.0.defaults.0"),
    "a number in a tuple": ({"held": (4.5, torch.ones(3))}, "held.0"),
    "a tensor in a tuple": ({"held": (4.0, torch.zeros(3))}, "held.1"),
    "a tensor": ({"attribute": torch.ones(2)}, "attribute"),
    "a tensor of the class": ({"factor": 2 * torch.ones(2)}, "factor.0"),
    "an operation": ({"helper": staticmethod(lambda x: x)}, "helper.0.code"),
    "a method of its base": ({"base": RescaledOtherwise}, "rescale.0.code"),
    "a property": ({"doubled": property(lambda self: [3 * x for x in self.packet])}, "doubled.0"),
}


def facts_of(family):
    """What full validation compares of a family."""
    out = {}
    with mock.patch.object(hl.statistics, "FAMILIES", (family,)):
        _describe("families", families_wanted(("own",)), out, True)
    return out


@pytest.mark.parametrize("case", OWN)
def test_full_validation_describes_everything_that_a_family_is(case):
    own, fact = OWN[case]
    given = {"base": Rescaled, "attribute": torch.zeros(2)} if case == "a tensor" else {}
    given = {"base": Rescaled} | given
    first, again, other = (facts_of(made(**x)) for x in (given, given, given | own))
    assert first == again
    differ = [name for name in (first | other) if first.get(name) != other.get(name)]
    assert differ[0].startswith(f"families.own.{fact}"), differ


# methods -> others that differ in one thing
CODE = {
    "a name": ("x.exp()", "x.log()"),
    "a constant": ("x * 2.0", "x * 3.0"),
    "an operation": ("x * 2.0", "x + 2.0"),
    "a constant in an inner function": ("[2 * y for y in x]", "[3 * y for y in x]"),
    "a tuple": ("x in (1, 2)", "x in (1, 3)"),
    "a set": ("x in {1, 2}", "x in {1, 3}"),
}


@pytest.mark.parametrize("case", CODE)
def test_methods_are_compared_by_what_they_do(case):
    first, second = CODE[case]
    methods = [
        eval("\n" * line + f"lambda self, x: {body}")
        for line, body in ((0, first), (5, first), (0, second))
    ]
    facts = [facts_of(made(method=method)) for method in methods]
    assert facts[0] == facts[1] != facts[2]


def test_a_set_in_a_method_has_no_order():
    # whose places in a table of 8 are one
    facts = [facts_of(made(method=eval(f"lambda x: x in {body}"))) for body in ("{0, 8}", "{8, 0}")]
    assert facts[0] == facts[1]


def scope_of_page():
    """Names of the guide's block about costs of ids."""
    scope = {}
    with registered():
        exec(marked_block("run", "renyi"), scope)
        exec(marked_block("run", "cost"), scope)
    return scope


def other_families_on_each_rank(group, device, differs, validate):
    """Message of the error of a call with families of one name, of which the last rank's differs."""
    cost = scope_of_page()["Cost"]
    last = group.rank() == 1
    costs = torch.arange(8.0)
    if last and differs == "costs.":
        costs = 2 * costs
    if last and differs == "finish.0.code":
        right = cost.finish
        cost.finish = lambda self, sums, joined: right(self, sums, joined)
    shard = hl.VocabShard.from_group(group, 8)
    logits = torch.zeros(3, shard.width, device=device)
    options = hl.Options(validate=validate, backend="torch")
    with registered(cost(costs)):
        try:
            hl.vocab_statistics(logits, shard=shard, want=("cost",), options=options)
        except ValueError as error:
            return str(error)
    return None


@pytest.mark.parametrize("differs", ["costs.", "finish.0.code", "nothing"])
def test_ranks_whose_families_differ_find_out(differs):
    assert on_ranks(2, other_families_on_each_rank, differs, "metadata") == [None] * 2
    first, last = on_ranks(2, other_families_on_each_rank, differs, "full")
    assert first == last
    if differs == "nothing":
        assert first is None
    else:
        assert f"agree on families.cost.{differs.strip('.')}" in first
