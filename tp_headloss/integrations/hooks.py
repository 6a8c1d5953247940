"""Hooks of a module that a head takes the place of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn.modules import module as of_torch


def hooks_of(module) -> dict[int, Any]:
    """Return a module's hooks by their ids."""
    return {
        **module._forward_pre_hooks,
        **module._forward_hooks,
        **module._backward_pre_hooks,
        **module._backward_hooks,
    }


def hooks_of_all_modules() -> dict[int, Any]:
    """Return the hooks that torch runs for every module (register_module_forward_hook and others)
    by their ids."""
    return {
        **of_torch._global_forward_pre_hooks,
        **of_torch._global_forward_hooks,
        **of_torch._global_backward_pre_hooks,
        **of_torch._global_backward_hooks,
    }


def is_from(function, *packages: str) -> bool:
    """Return True if a function is one of these packages."""
    return f"{function.__module__}.".startswith(tuple(f"{package}." for package in packages))


def location(function) -> str:
    """Return file and line of a function's code, or the name of what has none."""
    function = getattr(function, "__func__", function)
    # the function's own names may be those that wraps() gave it
    code = getattr(function, "__code__", None)
    if code is None:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        return f"{function.__module__}.{name}"
    return f"{code.co_filename}, line {code.co_firstlineno}"


def names_of(functions: Iterable[Any]) -> list[str]:
    """Return the names of functions, sorted, for an error that is equal on all ranks."""
    return sorted(
        {getattr(function, "__qualname__", type(function).__qualname__) for function in functions}
    )
