"""Replacing the forward of one model, and the arguments of a call by name."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

FUSED = "_is_fused_head"  # attribute of a forward that computes its own loss, also behind the wrappers of others


def stock_forward(model):
    """Return the forward of the model's class. ValueError if it, or this model's own forward, was replaced."""
    owner = next(cls for cls in type(model).__mro__ if "forward" in vars(cls))
    stock = vars(owner)["forward"]
    own = vars(model).get("forward")
    if own is not None or stock.__module__ != owner.__module__:
        raise ValueError(
            f"{type(model).__name__}.forward was replaced already, by {_location(stock if own is None else own)}: only "
            "one can be in the path, so remove the other one (a fused head: its .remove()) or install this one first"
        )
    return stock


def _location(function) -> str:
    """File and line of a function's code."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)  # the function's own names may be those that wraps() gave it
    return function.__module__ if code is None else f"{code.co_filename}, line {code.co_firstlineno}"


def install(model, stock, forward) -> types.MethodType:
    """Make forward(model, args, kwargs) the model's forward, and return the new method, which has the signature of
    `stock`, the forward of the model's class, because generate() and Trainer read it."""

    @functools.wraps(stock)
    def fused_forward(self, *args, **kwargs):
        return forward(self, args, kwargs)

    # accelerate's unwrap_model follows __wrapped__, which leads past this head to the model's own forward
    del fused_forward.__wrapped__
    vars(fused_forward).update({"__signature__": inspect.signature(stock), FUSED: True})
    model.forward = types.MethodType(fused_forward, model)
    return model.forward


def uninstall(model, fused_forward: types.MethodType, before=None):
    """Remove the forward that `install` returned, and put back the one that the model had `before`. RuntimeError if the
    model has another one by now."""
    if vars(model).get("forward") != fused_forward:  # accelerate puts an equal method back
        raise RuntimeError(
            "this fused head is not the model's forward (any more): remove what was installed on top (what accelerate "
            "did, by unwrap_model(model, keep_fp32_wrapper=False))"
        )
    del model.forward
    if before is not None:
        model.forward = before


def named_arguments(stock, model, args, kwargs) -> dict[str, Any]:
    """Return the arguments of a call of the forward `stock` by name, without defaults."""
    bound = inspect.signature(stock).bind(model, *args, **kwargs).arguments
    rest = next((p.name for p in inspect.signature(stock).parameters.values() if p.kind is p.VAR_KEYWORD), None)
    given = {name: value for name, value in bound.items() if name not in ("self", rest)}
    return given if rest is None else given | bound.get(rest, {})
