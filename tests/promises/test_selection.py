"""Which tests of the Triton backend are left out on CPUs, where its kernels are interpreted."""

import itertools
from types import SimpleNamespace

import conftest
import pytest

SIZES = [(1, "fp32"), (1, "bf16"), (9, "fp32"), (9, "bf16"), (17, "fp16")]


def items(*markers, backend="triton"):
    """Stand-ins for a test's items, with sizes and dtypes that are listed together."""
    marks = {marker.name: marker.mark for marker in markers}
    return [
        SimpleNamespace(
            callspec=SimpleNamespace(
                params={"backend": backend, "ranks": ranks, "size": size, "dtype": dtype},
                _idlist=[backend, str(ranks), f"{size}-{dtype}"],
            ),
            get_closest_marker=marks.get,
        )
        for ranks, (size, dtype) in itertools.product((1, 2, 4), SIZES)
    ]


def kept(found):
    """Parameters of the items that are not redundant."""
    left_out = conftest.redundant(found)
    return [item.callspec.params for item in found if item not in left_out]


def test_parameters_that_are_listed_together_stay_together():
    params = kept(items())
    assert {x["ranks"] for x in params} == {1, 2, 4}
    assert sorted((x["size"], x["dtype"]) for x in params) == sorted(SIZES)


def test_each_argument_has_its_values_and_no_more_items_than_it_needs():
    params = kept(items(pytest.mark.each_argument))
    for name, values in {"ranks": {1, 2, 4}, "size": {1, 9, 17}}.items():
        assert {x[name] for x in params} == values
    assert {x["dtype"] for x in params} == {"fp32", "bf16", "fp16"} and len(params) == 3


def test_values_that_are_not_listed_are_left_out_of_interpreted_tests_alone():
    marker = pytest.mark.interpreted_only(ranks=(1, 2), size=(9,))
    found = items(marker)
    left = [item.callspec.params for item in found if not conftest.is_marked_out(item)]
    assert {(x["ranks"], x["size"]) for x in left} == {(1, 9), (2, 9)}
    assert all(map(conftest.is_interpreted, found))
    assert not any(map(conftest.is_interpreted, items(marker, backend="torch")))


def test_a_marker_that_names_no_parameter_is_an_error():
    (first, *_) = items(pytest.mark.interpreted_only(rank=(1,)))
    with pytest.raises(KeyError, match="rank"):
        conftest.is_marked_out(first)
