"""Marks on functions that torch.compile leaves alone or takes for constants.

They are made without importing torch._dynamo. `torch.compiler.disable` and
`assume_constant_result` import it where they decorate: seconds, and a thousand modules, for a
program that compiles nothing. All that they leave on a function are attributes, which a test
compares with these.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def constant_for_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that torch.compile calls while it traces.

    Its result is then a constant.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function


def disabled_for_compile(function: Callable[P, R], reason: str) -> Callable[P, R]:
    """Return the function as torch.compile leaves it alone.

    With fullgraph=True it raises the reason.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)  # nobody compiles, and the import takes seconds
        disabled: Any = torch.compiler.disable(function, reason=reason)
        return disabled(*args, **kwargs)

    marked: Any = call
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = reason
    return call
