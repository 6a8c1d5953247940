"""Calls that torch.compile leaves alone because their options are for eager."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from ..ranks.compiler import disabled_for_compile
from ..spec.calls import TOO_MANY

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a public call before which torch.compile breaks its graph.

    With fullgraph=True it raises the reason.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        return disabled_for_compile(function, reason)

    return decorate


EAGER_ONLY = (  # option, its value, and why torch.compile leaves the call alone
    ("inplace", True, "torch.compile plans memory itself and may not see it overwritten"),
    ("gradient", "forward", "it remembers upstream gradients of the loss"),
    ("check", True, "it looks at the labels' values"),
    ("validate", "full", "it asks the other ranks"),
    ("validate", "checksums", "it asks the other ranks"),
    ("main_grad", True, "under torch.compile, let dW be returned"),
    ("mode", "one_sweep", "torch.compile takes one operator each way"),
    ("gradients", "fp8", "torch.compile takes one operator each way"),
)


def uncompiled_where_needed(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public call with keywords `options` and `linear`, or of a module with `.options`.

    Where an option is for eager, torch.compile leaves the call alone; with fullgraph=True it raises
    the reason.
    """
    reasons = [f"{name}={value!r} is for eager: {reason}" for name, value, reason in EAGER_ONLY]
    uncompiled: list[Any] = [disabled_for_compile(function, reason) for reason in reasons]

    described: Any = function
    plain = described.__wrapped__
    arities = described.arities

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            module: Any = args[0] if len(args) > 0 else None  # a HeadLoss
            is_module = isinstance(module, torch.nn.Module)
            options = module.options if is_module else kwargs.get("options")
            found = None
            for i, (name, value, _reason) in enumerate(EAGER_ONLY):
                is_of_linear = name in ("main_grad", "mode", "gradients")
                given = getattr(kwargs.get("linear") if is_of_linear else options, name, None)
                if found is None and given is not None and given == value:
                    found = i
            # not in the loop, of which torch.compile would leave the whole function alone
            if found is not None:
                return uncompiled[found](*args, **kwargs)
            return plain(*args, **kwargs)
        needed, allowed = arities.get(len(args), TOO_MANY)
        if not needed <= kwargs.keys() <= allowed:
            return function(*args, **kwargs)  # which says what to write
        try:
            return plain(*args, **kwargs)
        except RuntimeError as error:
            if "Inference tensors" in str(error):
                given = inspect.signature(plain).bind_partial(*args, **kwargs).arguments
                terms = getattr(args[0] if args else None, "terms", ())
                weights = {f"the weight of term {term.name!r}": term.weight for term in terms}
                _refuse_inference_tensors({**given, **weights}, error)
            raise

    return call


def _refuse_inference_tensors(given: dict[str, Any], error: RuntimeError):
    """Raise ValueError with the arguments, if any, that autograd cannot save."""
    made = list(inference_tensors("", given))
    if made:
        said = "tensors of torch.inference_mode(): make them under torch.no_grad(), or pass their .clone()"
        raise ValueError(
            f"{' and '.join(made)} must be tensors that autograd can save, got {said}"
        ) from error


def inference_tensors(name: str, value) -> Iterator[str]:
    """Yield the names of tensors in an argument, or in parts of it, that autograd cannot save."""
    if isinstance(value, torch.Tensor):
        yield from [name] * value.is_inference()
    parts: Any = {}
    if isinstance(value, dict):
        parts = value
    elif dataclasses.is_dataclass(value):
        parts = vars(value)
    for key, part in parts.items():
        yield from inference_tensors(f"{name}.{key}".lstrip("."), part)
