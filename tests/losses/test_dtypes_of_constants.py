"""A constant of a loss counts as the numbers that it holds, whatever dtype it holds them in."""

import inspect

import pytest
import torch

from tp_headloss import Distillation, HeadLoss, Sequences, Teacher, losses
from tp_headloss.spec.lines import AnyOf, TensorLine

# numbers that every dtype holds, and whose squares and products few do
NUMBERS = {"log_prob": [-100.0, -1.0, -20.0, -3.0], "temperature": [20.0, 100.0, 12.0, 1.0]}
CONSTANTS = [-20.0, 100.0, -120.0, 12.0]
REAL = torch.int8, torch.int16, torch.bfloat16, torch.float16, torch.float64
FLOATS = torch.bfloat16, torch.float16, torch.float64


def tensor_line(line) -> TensorLine | None:
    """The line of a tensor argument, None for others."""
    if isinstance(line, TensorLine):
        return line
    kinds = line.lines if isinstance(line, AnyOf) else ()
    return next((kind for kind in kinds if isinstance(kind, TensorLine)), None)


def arguments_of(function) -> dict:
    """Arguments in fp32 of a function of tensors of tokens [4] or pairs [4]."""
    given = {}
    defaults = inspect.signature(function).parameters
    for name, line in function.lines.items():
        found = tensor_line(line)
        if name == "sequences" and getattr(defaults.get("level"), "default", None) == "token":
            continue  # of the other level
        if name == "sequences":
            given[name] = Sequences.from_ids(torch.tensor([0, 0, 1, 1]), 2, torch.ones(4).bool())
        elif found is not None and "bool" not in found.kind.split() and found.shape != ():
            given[name] = torch.tensor(NUMBERS.get(name, CONSTANTS))
        elif found is not None and name in ("mask", "desirable"):
            given[name] = torch.tensor([True, True, False, True])
        elif found is not None and defaults[name].default is inspect.Parameter.empty:
            given[name] = torch.tensor(2.0)
    return given


FUNCTIONS = {
    name: function
    for name, function in vars(losses).items()
    if hasattr(function, "lines") and "stats" not in function.lines
}
CASES = [
    (name, argument, dtype)
    for name, function in FUNCTIONS.items()
    for argument, line in list(function.lines.items())[1:]
    if (found := tensor_line(line)) is not None and found.detached
    if "bool" not in found.kind.split()
    for dtype in (FLOATS if found.kind == "floating point" else REAL)
]


def numbers(found) -> list[torch.Tensor]:
    """The tensors of a result."""
    if isinstance(found, torch.Tensor):
        return [found]
    if isinstance(found, dict):
        found = tuple(found.values())
    return [x for part in found for x in numbers(part)] if isinstance(found, tuple) else []


def test_functions_and_arguments_are_found():
    assert len(FUNCTIONS) > 20 and ("times_temperature_squared", "temperature", torch.int8) in CASES


@pytest.mark.parametrize("name, argument, dtype", CASES)
def test_a_constant_counts_as_its_numbers(name, argument, dtype):
    function = FUNCTIONS[name]
    given = arguments_of(function)
    if argument not in given:
        pytest.skip("it has a default, and another shape")
    expected = numbers(function(**given))
    found = numbers(function(**given | {argument: given[argument].to(dtype)}))
    assert expected
    for a, b in zip(found, expected):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", REAL)
def test_a_squared_temperature_counts_as_its_numbers(dtype):
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 4, 32, generator=generator)
    labels, head = torch.arange(4), HeadLoss([Distillation(temperature_squared=True)])
    found = [
        head(logits, labels, inputs={"teacher": Teacher(teacher, temperature)}).loss
        for temperature in (20.0, torch.full((4,), 20.0).to(dtype))
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0)
