"""The forward of one model, and the arguments of a call by name."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from ..hooks import location
from .mixed_precision import AUTOCAST_GOES_TOO, functions_below

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
            f"{getattr(other, FUSED, location(other))}: {_remedy(other)}"
        )
    return stock


def _remedy(forward) -> str:
    """Return what to do about a forward in whose place a head was to be installed."""
    if hasattr(forward, FUSED):
        return (
            "only one can be in the path, so .remove() that one first. Where nobody has its handle, "
            "as of a deepcopy or of what torch.load returned, del model.forward takes it off "
            f"({AUTOCAST_GOES_TOO})"
        )
    if is_of_trl(forward):
        if (name := head_below(forward)) is not None:
            return without_head_below(name)
        return (
            "a trainer of TRL put it there, whose loss is TRL's own: fuse_log_probs(trainer.model) "
            "gives it log-probs from the shard. A HeadLoss needs a transformers.Trainer instead, "
            f"and del model.forward takes TRL's off ({AUTOCAST_GOES_TOO})"
        )
    return "only one can be in the path, so remove the other one or install this one first"


def is_of_trl(forward) -> bool:
    """Return True for a forward that TRL's ``add_fused_lm_head`` made, as its trainers do."""
    trl = sys.modules.get("trl.trainer.utils")
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    if trl is None or code is None:
        return False
    return code.co_filename == trl.add_fused_lm_head.__code__.co_filename


def head_below(forward) -> str | None:
    """Return the name of the head of this package that a forward leads to, or None."""
    names = (getattr(function, FUSED, None) for function in functions_below(forward))
    return next((name for name in names if name is not None), None)


def without_head_below(name: str) -> str:
    """Return what to do about a head, of a class of this name, that TRL put its own on top of."""
    said = ", and fuse_log_probs(trainer.model)"
    if name == "FusedHead":
        said = ", or for the HeadLoss a transformers.Trainer"
    return (
        f"a {name} lies below TRL's head, which never calls it: .remove() it before the trainer is "
        "made. Now del model.forward (PEFT: of its get_base_model()) and then .remove() take both "
        f"off ({AUTOCAST_GOES_TOO}): make the trainer again{said}"
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
