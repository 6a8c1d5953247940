"""The forward that accelerate puts around a model's own for training in bf16 or fp16.

``Accelerator.prepare`` keeps the forward that it finds as ``model._original_forward``, and puts one
in its place that calls it under autocast and returns outputs in fp32. A trainer of TRL prepares its
ref_model as it is made, and its model as training begins. So a head that is installed later, or
removed later, belongs below that forward: there is no other time for it.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

# entry of a model that accelerate prepared: the forward that it found
ORIGINAL = "_original_forward"
FORWARDS = (types.FunctionType, types.MethodType)
# what a reader must know who takes a forward off
AUTOCAST_GOES_TOO = (
    "a model that accelerate has prepared for bf16 or fp16 loses its autocast, too: load it again"
)


@contextmanager
def below_mixed_precision(model):
    """A block in which a model has the forward that accelerate's own is around. Accelerate's is put
    around what the block leaves there; a model without one is as it is."""
    autocast = _autocast_of(model)
    if autocast is None:
        yield
        return
    entries = vars(model)
    wrapper, original = entries.pop("forward"), entries.pop(ORIGINAL)
    if original.__func__ is not type(model).forward:
        entries["forward"] = original
    try:
        yield
    finally:
        if model.forward != original:
            original = model.forward
            wrapper = _wrapped(original, autocast)
        entries |= {"forward": wrapper, ORIGINAL: original}


def _autocast_of(model) -> torch.autocast | None:
    """Return the autocast of the forward that accelerate put on a model; None where it put none, or
    where something else is on top of it."""
    entries, accelerate = vars(model), _operations()
    original = entries.get(ORIGINAL)
    converting = getattr(entries.get("forward"), "__wrapped__", None)
    if accelerate is None or not isinstance(original, types.MethodType):
        return None
    if not isinstance(converting, accelerate.ConvertOutputsToFp32):
        return None
    casting = converting.model_forward
    if getattr(casting, "__wrapped__", None) is not original.__func__:
        return None
    return inspect.getclosurevars(casting).nonlocals.get("autocast_instance")


def _wrapped(forward: types.MethodType, autocast: torch.autocast) -> types.MethodType:
    """Return what accelerate's ``prepare_model`` would put around a forward."""
    casting = autocast(forward.__func__)
    return types.MethodType(_operations().convert_outputs_to_fp32(casting), forward.__self__)


def _operations() -> Any:
    """Return accelerate's module of these functions, None where nobody has imported it."""
    return sys.modules.get("accelerate.utils.operations")


def functions_below(forward) -> Iterator[Any]:
    """Yield a forward and the functions that it leads to.

    What wraps a forward holds it as ``__wrapped__``, or in a variable of its closure.
    """
    waiting, seen = [forward], set()
    while waiting:
        function = waiting.pop()
        function = getattr(function, "__func__", function)
        if id(function) in seen:
            continue
        seen.add(id(function))
        yield function
        inner = [getattr(function, "__wrapped__", None)]
        for cell in getattr(function, "__closure__", None) or ():
            with suppress(ValueError):  # of a cell that is empty
                inner.append(cell.cell_contents)
        waiting += [x for x in inner if isinstance(x, FORWARDS) or hasattr(x, "__wrapped__")]


def expect_autocast(model, forward):
    """Raise ValueError for a model whose forward was deleted after accelerate prepared it.

    forward: the one that the model has of its own now, which may lie on accelerate's; or None.
    """
    accelerate = _operations()
    if ORIGINAL not in vars(model) or accelerate is None:
        return
    if any(isinstance(x, accelerate.ConvertOutputsToFp32) for x in functions_below(forward)):
        return
    raise ValueError(
        f"the forward of this {type(model).__name__} must be the one with which accelerate prepared "
        "it for bf16 or fp16, got another: del model.forward took its autocast off, with all that was "
        "below it, such as TRL's head and its temperature. Load the model and make the trainer "
        f"again, or if it is to be without, del model.{ORIGINAL}"
    )
