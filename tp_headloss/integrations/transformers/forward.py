"""The forward of one model, and the arguments of a call by name."""

from __future__ import annotations

import inspect
from typing import Any

# attribute of a forward that computes its own loss, also behind the wrappers of others: the name of
# its class
FUSED = "_is_fused_head"


def stock_forward(model):
    """Return the forward of the model's class. ValueError if it, or this model's own forward, was
    replaced."""
    owner = next(cls for cls in type(model).__mro__ if "forward" in vars(cls))
    stock = vars(owner)["forward"]
    own = vars(model).get("forward")
    if "_hf_hook" in vars(model):
        raise ValueError(
            "accelerate's hooks (device_map=, dispatch_model, cpu_offload) move the weights of "
            "this model and of its output layer between devices for each call, which a fused head "
            "does not: load the model on one device, or "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True), or use causal_lm_loss"
        )
    if own is not None or stock.__module__ != owner.__module__:
        other = stock if own is None else own
        raise ValueError(
            f"{type(model).__name__}.forward was replaced already, by "
            f"{getattr(other, FUSED, location(other))}: only one can be in the path, so remove "
            "the other one (a fused head: its .remove()) or install this one first"
        )
    return stock


def location(function) -> str:
    """File and line of a function's code."""
    function = getattr(function, "__func__", function)
    # the function's own names may be those that wraps() gave it
    code = getattr(function, "__code__", None)
    return (
        function.__module__ if code is None else f"{code.co_filename}, line {code.co_firstlineno}"
    )


def named_arguments(stock, model, args, kwargs) -> dict[str, Any]:
    """Return the arguments of a call of the forward `stock` by name, without defaults."""
    bound = inspect.signature(stock).bind(model, *args, **kwargs).arguments
    rest = next(
        (p.name for p in inspect.signature(stock).parameters.values() if p.kind is p.VAR_KEYWORD),
        None,
    )
    given = {name: value for name, value in bound.items() if name not in ("self", rest)}
    return given if rest is None else given | bound.get(rest, {})
