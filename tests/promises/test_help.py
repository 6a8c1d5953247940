"""`help()` of what is public: each thing is said once."""

import inspect
import re

import pytest

import tp_headloss as hl

PARTS = re.compile(r"^(?:Args|Attributes|Returns|Raises|Examples|Source):", re.M)
ENTRY = re.compile(r"^ {4}(\w+): ((?:.*\n?)(?: {8}.*\n?)*)", re.M)


def public() -> dict[str, object]:
    """All public names, and the public methods of classes that are written here."""
    names = {name: getattr(hl, name) for name in hl.__all__}
    names |= {f"losses.{name}": getattr(hl.losses, name) for name in hl.losses.__all__}
    found = dict(names)
    for name, x in names.items():
        if inspect.isclass(x):
            methods = {m: getattr(x, m) for m in vars(x) if not m.startswith("_")}
            found |= {f"{name}.{m}": f for m, f in methods.items() if inspect.isroutine(f)}
    return found


PUBLIC = {name: inspect.getdoc(x) or "" for name, x in public().items()}


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.;])\s+", " ".join(text.split()))


def said_again(text: str) -> list[str]:
    """What an entry of an argument says twice: a sentence, the kind of the argument, or None."""
    found = [x for x in sentences(text) if sentences(text).count(x) > 1]
    found += re.findall(r"`(\w+)`[^.]*\. `(?=\1`)", text)
    return found + re.findall(r"or None\. (None\b(?!:)[^.]*)", text)


@pytest.mark.parametrize("name", PUBLIC)
def test_help_says_each_thing_once(name):
    doc = PUBLIC[name]
    prose = [x for x in sentences(PARTS.split(doc)[0]) if len(x) > 20]
    assert len(prose) == len({*prose}), "a sentence twice"
    again = {entry: found for entry, text in ENTRY.findall(doc) if (found := said_again(text))}
    assert not again


def test_what_is_said_again_is_found():
    assert len(PUBLIC) > 120 and sum(map(len, map(ENTRY.findall, PUBLIC.values()))) > 400
    for text in (
        "`Linear`, or None. `Linear`.",
        "`HeadLoss`, or None. `HeadLoss`; default cross-entropy.",
        "[.., K] bool, or None. None for all entries.",
        "a number. Of the teacher. Of the teacher.",
    ):
        assert said_again(text)
    for text in (
        "`SamplingRule`, or None. None: the whole vocabulary.",
        "`Linear`, or None. The mode.",
    ):
        assert not said_again(text)


CONTRACT = [x for x in vars(hl.statistics.family).values() if hasattr(x, "_fields")]


@pytest.mark.parametrize("record", CONTRACT, ids=lambda record: record.__name__)
def test_what_a_familys_methods_get_says_what_its_fields_are(record):
    assert not [x for x in record._fields if "Alias" in getattr(record, x).__doc__]
    doc = inspect.getdoc(record)
    assert {name for name, _ in ENTRY.findall(doc)} == {*record._fields}


def test_attributes_of_a_family_that_a_package_sets_are_those_of_its_docstring():
    said = {name for name, _ in ENTRY.findall(inspect.getdoc(hl.statistics.Family))}
    own = {name for name, x in vars(hl.statistics.Family).items() if not callable(x)}
    own = {name for name in own if not name.startswith("__")}
    launches = {"wide_gradients", "narrow_gradients", "lean_gradients"}
    assert said == own - launches - {"in_one_read", "id_list"}
