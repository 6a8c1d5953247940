"""Members of a family: attributes of its own and of its classes, its functions, and the variables
that these read.

A registration looks for tables there, and full validation compares them between ranks.
"""

from __future__ import annotations

import dis
import inspect
import types
from typing import Any

from .family import Family


def members_of_classes(kind: type) -> dict[str, list]:
    """Return attributes of a class and of its bases below `Family` by name, with those that others
    replace, which `super` reaches."""
    found: dict[str, list] = {}
    for base in kind.__mro__:
        for name, x in vars(base).items():
            if base not in Family.__mro__ and not name.startswith("__"):
                found.setdefault(name, []).append(x)
    return found


def attributes_of(family: Family) -> dict[str, Any]:
    """Return a family's attributes by name: its own, and those of its classes below `Family`."""
    classes = members_of_classes(type(family))
    return {name: values[0] for name, values in classes.items()} | vars(family)


def function_of(value: Any) -> types.FunctionType | None:
    """Return the function of a method, a property or a static method; None for any other value."""
    function = inspect.unwrap(getattr(value, "fget", value))
    return function if isinstance(function, types.FunctionType) else None


def closure_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables of outer functions that a function reads, by name."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found


def variables_of(function: types.FunctionType) -> dict[str, Any]:
    """Return what a function reads besides its arguments, by name: its closure, its defaults, and
    variables of its module."""
    defaults = inspect.signature(function).parameters.values()
    names = {x for code in codes_in(function.__code__) for x in _variables_in(code)}
    of_module = {name: x for name, x in function.__globals__.items() if name in names}
    of_defaults = {p.name: p.default for p in defaults if p.default is not p.empty}
    return of_module | of_defaults | closure_of(function)


def codes_in(code: types.CodeType) -> list[types.CodeType]:
    """Return code and that of the functions within it."""
    within = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    return [code, *(inner for x in within for inner in codes_in(x))]


def _variables_in(code: types.CodeType) -> set[str]:
    """Return the names of the module's variables that code reads; of attributes, such as the z of
    `tile.z`, none."""
    return {
        x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }


def names_in(code: types.CodeType) -> set[str]:
    """Return the names of attributes and of variables of the module that code reads."""
    return {name for x in codes_in(code) for name in x.co_names}


def numbers_in(code: types.CodeType) -> set[int]:
    """Return the integers that code has in it."""
    constants = (number for x in codes_in(code) for number in x.co_consts)
    return {x for x in constants if isinstance(x, int) and not isinstance(x, bool)}


def functions_of(family: Family) -> list[types.FunctionType]:
    """Return the functions of a family and of its classes, and those of their modules that these
    call."""
    found: list[types.FunctionType] = []
    waiting = [x for values in members_of_classes(type(family)).values() for x in values]
    waiting += vars(family).values()
    while waiting:
        function = function_of(waiting.pop())
        if function is None or function in found:
            continue
        found.append(function)
        read = [x for x in variables_of(function).values() if isinstance(x, types.FunctionType)]
        waiting += [x for x in read if x.__module__ == function.__module__]
    return found
