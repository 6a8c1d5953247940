"""A family with a number for each id is tried where these numbers differ, and where there are
none."""

import dataclasses
import os
import re
import types
import warnings

import numpy
import pytest
import torch
from own_families import registered

import tp_headloss as hl
from tp_headloss.statistics.family import Family, row_sum
from tp_headloss.statistics.members import variables_of


class Share(Family):
    """The sum of p times a number of each id."""

    statistics = gradients = packet = ("share",)
    merged = ("share", "share_lse")

    def __init__(self, table):
        self.table = table

    def of_ids(self, ids):
        return torch.as_tensor(self.table)[ids]

    def of_columns(self, tile):
        stop = tile.first_id + tile.z.shape[1]
        if stop > len(self.table):
            raise ValueError("the table is too short")
        return self.of_ids(torch.arange(tile.first_id, stop)).to(tile.z)

    def local(self, tile, softmax, rows):
        return {"share": row_sum(softmax.exp * self.of_columns(tile))}

    def rescale(self, rows, drop, factor):
        return {"share": factor * rows["share"]}

    def join(self, sums, joined):
        if joined.labels is None:
            return sums
        of_label = self.of_ids(joined.labels.clamp(0, len(self.table) - 1))
        return {"share": joined.factor * sums["share"] + joined.p_target * of_label}

    def finish(self, sums, joined):
        share = sums["share"] / joined.whole
        return {"share": share}, {"share": share, "share_lse": joined.top + joined.log_sum}

    def direct(self, dz, tile, merged, grads):
        if "share" not in grads:
            return dz
        p = (tile.z - merged["share_lse"]).exp()
        return dz + grads["share"] * p * (self.of_columns(tile) - merged["share"])


class OfIds(Share):
    """The probability of some ids, which are no table."""

    def __init__(self, ids):
        self.ids = ids
        self.length = 0

    table = property(lambda self: range(1 << 30))

    def of_ids(self, ids):
        return torch.isin(ids, torch.tensor(list(self.ids))).double()


def first_ids(self, tile):
    """A wrong `of_columns`: the numbers of the first ids, whichever the tile has."""
    return self.of_ids(torch.arange(tile.z.shape[1])).to(tile.z)


WRONG = {
    "local": lambda self, tile, softmax, rows: {
        "share": row_sum(softmax.exp * first_ids(self, tile))
    },
    "join": lambda self, sums, joined: (
        sums if joined.labels is None else {"share": joined.factor * sums["share"]}
    ),
    "direct": lambda self, dz, tile, merged, grads: dz,
}
FAULTS = [(name,) for name in WRONG] + [tuple(WRONG)]


def mask(kind, first, length):
    table = torch.zeros(length)
    table[first : first + 1 if kind == "one" else None] = 1
    return 1 - table if kind == "all others" else table


KINDS = "one", "from", "all others"
PLACES = [*((9, first) for first in (1, 3, 5, 6, 7, 8)), (300, 150), (300, 299)]
CHANGES = [(kind, *place) for kind in KINDS for place in PLACES]
if not os.environ.get("TP_HEADLOSS_FULL"):  # each place, and each kind at some of them
    CHANGES = [(KINDS[i % len(KINDS)], *place) for i, place in enumerate(PLACES)]


@pytest.mark.parametrize("kind, length, first", CHANGES)
def test_methods_that_forget_ids_are_found_wherever_the_table_changes(kind, first, length):
    table = mask(kind, first, length)
    with registered(Share(table)):
        pass
    for names in FAULTS:
        wrong = type("Wrong", (Share,), {name: WRONG[name] for name in names})(table)
        with pytest.raises(ValueError, match="Wrong must agree"), registered(wrong):
            pass
    with_labels = {"wanted": lambda self, call: call.has_labels and Share.wanted(self, call)}
    for methods in ({"of_columns": first_ids}, with_labels | WRONG):
        wrong = type("Wrong", (Share,), methods)(table)
        with pytest.raises(ValueError, match="Wrong must agree"), registered(wrong):
            pass


@pytest.mark.parametrize(
    "made", [list, tuple, numpy.asarray, torch.as_tensor, lambda x: torch.as_tensor(x).bool()]
)
def test_tables_of_other_types_and_those_of_a_class_are_read_too(made):
    table = made([0] * 40 + [1] * 20)
    wrong = type("Wrong", (Share,), {"of_columns": first_ids})
    for family in (wrong(table), type("Wrong", (wrong,), {"numbers": table, "table": table})):
        family = family if isinstance(family, Family) else family.__new__(family)
        words = r"at the ids 0, 1, 2, 38, 39, 40 \(`tile.first_id`"
        with pytest.raises(ValueError, match=words), registered(family):
            pass


@pytest.mark.parametrize("ids", [[70], (70, 90), {70}, range(70, 90), torch.tensor([70, 90])])
def test_ids_of_a_family_itself_are_looked_at(ids):
    with registered(OfIds(ids)):
        pass
    wrong = type("Wrong", (OfIds,), {"join": WRONG["join"]})(ids)
    with pytest.raises(ValueError, match="Wrong must agree, got share"), registered(wrong):
        pass


def test_tables_of_something_else_than_ids_are_no_obstacle():
    class Other(Share):
        levels = torch.arange(11.0)
        features = torch.zeros(50, 4000).index_fill_(1, torch.tensor([3900]), 1.0)
        seed = 1 << 40

    with registered(Other(mask("from", 20, 50))):
        pass


def too_short(self, tile):
    stop = tile.first_id + tile.z.shape[1]
    return self.table[tile.first_id : stop].to(tile.z)


@pytest.mark.parametrize("labelled", [True, False])
def test_a_table_that_is_too_short_must_be_an_error(labelled):
    table = torch.linspace(-1, 2, 40)
    methods = {"of_columns": too_short}
    if labelled:
        methods["wanted"] = lambda self, call: call.has_labels and Share.wanted(self, call)
    words = re.escape("must raise an error for ids that its table [40] does not have")
    with pytest.raises(ValueError, match=words), registered(type("S", (Share,), methods)(table)):
        pass
    options = hl.Options(backend="torch")
    with registered(Share(table)):
        want = {"want": ("share",), "options": options}
        assert hl.vocab_statistics(torch.zeros(1, 40), **want).share.isfinite().all()
        with pytest.raises(ValueError, match="the table is too short"):
            hl.vocab_statistics(torch.zeros(1, 41), **want)


def test_a_default_for_ids_beyond_the_table_is_no_error():
    def padded(self, tile):
        ids = torch.arange(tile.first_id, tile.first_id + tile.z.shape[1])
        return self.of_ids(ids).to(tile.z)

    def of_ids(self, ids):
        known = ids < len(self.table)
        return torch.where(known, self.table[ids.clamp(max=len(self.table) - 1)], 0.0)

    def join(self, sums, joined):
        if joined.labels is None:
            return sums
        of_label = self.of_ids(joined.labels.clamp(min=0))
        return {"share": joined.factor * sums["share"] + joined.p_target * of_label}

    methods = {"of_columns": padded, "of_ids": of_ids, "join": join}
    with registered(type("Padded", (Share,), methods)(torch.linspace(-1, 2, 40))):
        pass


@dataclasses.dataclass
class Record:
    numbers: torch.Tensor


OF_MODULE = {"numbers": mask("one", 20, 60)}


def numbers_of_module():
    return OF_MODULE["numbers"]


class Held(Share):
    """Its numbers are in a container, or are no attribute at all."""

    def __init__(self, held, read):
        self.held, self.read = held, read

    table = property(lambda self: self.read(self.held))


class Bare(Share):
    """It has no attribute."""

    def __init__(self):
        pass


class OfModule(Bare):
    table = property(lambda self: numbers_of_module())


def closed_over(**methods):
    table = mask("one", 20, 60)

    class Closed(Bare):
        table = property(lambda self: table)

    return type("Wrong", (Closed,), methods)()


def with_default(**methods):
    class Default(Bare):
        def of_ids(self, ids, numbers=mask("one", 20, 60)):  # noqa: B008
            return numbers[ids]

        table = property(lambda self: range(60))

    return type("Wrong", (Default,), methods)()


def held_in(make, read):
    def made(**methods):
        return type("Wrong", (Held,), methods)(make(mask("one", 20, 60)), read)

    return made


HELD = {
    "a dict": held_in(lambda x: {"a": x}, lambda held: held["a"]),
    "a list of dicts": held_in(lambda x: [{"a": x}], lambda held: held[0]["a"]),
    "a dict of ids": held_in(lambda x: {1: x}, lambda held: held[1]),
    "a tuple": held_in(lambda x: (1.0, x), lambda held: held[1]),
    "a record": held_in(Record, lambda held: held.numbers),
    "a namespace": held_in(lambda x: types.SimpleNamespace(x=x), lambda held: held.x),
    "a closure": closed_over,
    "a default": with_default,
    "a variable of the module": lambda **methods: type("Wrong", (OfModule,), methods)(),
}


@pytest.mark.parametrize("where", HELD)
def test_a_table_is_found_wherever_it_is(where):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with registered(HELD[where]()):
            pass
    for names in FAULTS:
        wrong = HELD[where](**{name: WRONG[name] for name in names})
        with pytest.raises(ValueError, match="Wrong must agree"), registered(wrong):
            pass


def test_a_part_of_an_attribute_must_not_require_a_gradient():
    family = HELD["a list of dicts"]()
    family.held[0]["a"].requires_grad_()
    words = re.escape("Wrong.held[0]['a'] gets no gradient, so it must not require one")
    with pytest.raises(ValueError, match=words), registered(family):
        pass


class Below100(Share):
    """The share of the ids below a number in its code."""

    table = property(lambda self: range(int("1000000")))

    def __init__(self):
        pass

    def of_columns(self, tile):
        ids = tile.first_id + torch.arange(tile.z.shape[1])
        return (ids < 100).to(tile.z)

    def of_ids(self, ids):
        return (ids < 100).double()


class PositionsBelow100(Below100):
    def of_columns(self, tile):
        return (torch.arange(tile.z.shape[1]) < 100).to(tile.z)


def test_a_number_in_code_may_be_an_id():
    with registered(Below100()):
        pass
    words = "at the ids 0, 1, 2, 98, 99, 100"
    with pytest.raises(ValueError, match=words), registered(PositionsBelow100()):
        pass


z = torch.randn(4, 9)  # of the name of an attribute that methods read


def test_variables_with_the_name_of_an_attribute_are_no_tables():
    found = variables_of(Below100.of_columns)
    assert "z" not in found and found["torch"] is torch


def test_ids_that_nothing_says_where_they_change_are_a_warning():
    class Odd(OfIds):
        def __init__(self):
            pass

        def of_ids(self, ids):
            return (ids % 2).double()

        def of_columns(self, tile):
            return self.of_ids(tile.first_id + torch.arange(tile.z.shape[1])).to(tile.z)

        table = property(lambda self: range(int("60")))

    with (
        pytest.warns(UserWarning, match="family Odd reads tile.first_id, but has no table"),
        registered(Odd()),
    ):
        pass


def repeated(self, tile):
    return self.of_ids(torch.arange(tile.first_id, tile.first_id + tile.z.shape[1])).to(tile.z)


BEYOND = {
    "remainder": lambda self, ids: self.table[ids % len(self.table)],
    "clamp": lambda self, ids: self.table[ids.clamp(max=len(self.table) - 1)],
}
TABLES = {
    "floats": torch.linspace(-1, 2, 40),
    "a mask": torch.arange(40) % 3 == 0,
    "a column": torch.linspace(-1, 2, 40)[:, None].expand(40, 2)[:, 0],
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("how", BEYOND)
def test_ids_beyond_a_table_that_get_its_numbers_are_a_warning(how, table):
    table = TABLES[table].clone()
    kept = table.clone()
    methods = {"of_columns": repeated, "of_ids": BEYOND[how]}
    words = re.escape("Own takes ids that its table [40] does not have for other ids")
    with (
        pytest.warns(UserWarning, match=words),
        registered(type("Own", (Share,), methods)(table)),
    ):
        pass
    assert torch.equal(table, kept)


@pytest.mark.parametrize("kind", ["not of ids", "of numpy"])
def test_numbers_that_are_no_table_of_ones_own_are_no_warning(kind):
    """Numbers that are for no single id, and memory that is not to be written to."""

    class Own(Share):
        def of_ids(self, ids):
            if kind == "not of ids":
                return torch.sin(ids.double()) * self.table.sum()
            return self.table[ids % len(self.table)]

        of_columns = repeated

    table = torch.linspace(-1, 2, 40, dtype=torch.float64)
    if kind == "of numpy":
        read_only = table.numpy().copy()
        read_only.flags.writeable = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            table = torch.as_tensor(read_only)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with registered(Own(table)):
            pass
