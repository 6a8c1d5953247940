"""Results depend on arguments alone, not on torch.set_default_dtype or torch.set_default_device,
which programs set for tensors of their own."""

import copy

import pytest
import torch
from generated_case import bits_equal, run_case
from hypothesis import given
from ranks import on_ranks
from right_calls import CHECKED, arguments_of
from strategies import cases
from test_generated import examples, reproducible
from torch_defaults import torch_defaults

DEFAULTS = {"bf16": (torch.bfloat16, None), "float64 elsewhere": (torch.float64, "meta")}
OTHERS = pytest.mark.parametrize("defaults", DEFAULTS.values(), ids=DEFAULTS)
# whose parameters are new tensors of the caller's, as those of torch.nn.Linear
MODULES = "VocabParallelHead", "VocabParallelEmbedding"
LAYERS = 4  # of records within each other


def tensors(found, layers: int = LAYERS) -> list[torch.Tensor]:
    """The tensors of a result, and of records of the package."""
    if isinstance(found, torch.Tensor):
        return [found.detach()]
    if isinstance(found, dict):
        return tensors(list(found.values()), layers)
    if isinstance(found, (list, tuple)):
        return [x for part in found for x in tensors(part, layers)]
    if layers and hasattr(found, "__dict__") and type(found).__module__.startswith("tp_headloss"):
        return tensors(vars(found), layers - 1)
    return []


def result_of(name: str, defaults) -> list[torch.Tensor]:
    arguments = arguments_of(CHECKED[name])
    if "group" not in arguments:
        arguments = copy.deepcopy(arguments)
    torch.manual_seed(0)
    with torch_defaults(*defaults):
        return tensors(CHECKED[name](**arguments))


@OTHERS
@pytest.mark.parametrize("name", sorted({*CHECKED} - {*MODULES}))
def test_a_function_gives_the_same(name, defaults):
    expected, found = result_of(name, (None, None)), result_of(name, defaults)
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert a.device == b.device and bits_equal(a, b)


@OTHERS
@pytest.mark.parametrize(
    "world_size, backend, linear, count",
    [
        (1, "torch", None, 20),
        (2, "torch", None, 4),
        (1, "torch", "recompute", 6),
        (1, "triton", None, 1),
    ],
)
def test_a_call_and_its_backward_give_the_same(world_size, backend, linear, count, defaults):
    @examples(count)
    @given(cases(world_size, backend))
    def run(case):
        with reproducible(case):
            expected = on_ranks(world_size, run_case, case, linear)
            found = on_ranks(world_size, run_case, case, linear, defaults)
            for one, other in zip(found, expected):
                assert {*one} == {*other}
                assert all(bits_equal(one[name], x) for name, x in other.items())

    run()
