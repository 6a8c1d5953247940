"""Calls that torch.compile leaves alone because their options are for eager."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a public call before which torch.compile breaks its graph; with fullgraph=True it raises the reason."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        disabled: Any = torch.compiler.disable(function, reason=reason)
        return disabled

    return decorate


def uncompiled_where_needed(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public call with keywords `options` and `linear`, or of a module with `.options`.

    Where an option is for eager, torch.compile breaks its graph before the call, and compiles nothing inside of it;
    with fullgraph=True it raises the reason.
    """
    uncompiled: dict[str, Any] = {
        name: torch.compiler.disable(function, reason=f"{name} is for eager: {reason}")
        for name, reason in {
            "gradient='forward'": "it keeps the upstream gradient of the step before",
            "inplace=True": "torch.compile plans memory itself and may not see it overwritten",
            "check=True": "it looks at the labels' values",
            "validate='full'": "it asks the other ranks",
            "validate='checksums'": "it asks the other ranks",
            "main_grad=True": "under torch.compile, let dW be returned",
            "mode='one_sweep'": "torch.compile takes one operator each way",
        }.items()
    }

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            module = args[0] if len(args) > 0 else None  # a HeadLoss
            options = module.options if isinstance(module, torch.nn.Module) else kwargs.get("options")
            found = _eager_only(options, kwargs.get("linear"))
            if found is not None:
                return uncompiled[found](*args, **kwargs)
        return function(*args, **kwargs)

    return call


def _eager_only(options: Any, linear: Any) -> str | None:
    """The first option that is for eager."""
    if options is not None and options.inplace:
        return "inplace=True"
    if options is not None and options.gradient == "forward":
        return "gradient='forward'"
    if options is not None and options.check:
        return "check=True"
    if options is not None and options.validate != "metadata":
        return f"validate={options.validate!r}"
    if linear is not None and linear.main_grad:
        return "main_grad=True"
    if linear is not None and linear.mode == "one_sweep":
        return "mode='one_sweep'"
    return None
