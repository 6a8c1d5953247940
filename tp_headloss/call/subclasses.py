"""Subclasses of a tensor, whose memory need not be the values that they stand for.

Kernels read memory.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(x) -> TypeGuard[DTensor]:
    """Return True for a DTensor, without importing torch.distributed.tensor."""
    return type(x) is not torch.Tensor and isinstance(x, torch.Tensor) and hasattr(x, "placements")


def refuse_dtensor(name: str, x):
    """Raise TypeError for a DTensor in the place of what is the same on every rank."""
    if is_dtensor(x):
        raise TypeError(
            f"{name} must be the same plain tensor on every rank, got a DTensor: pass its "
            ".full_tensor()"
        )


class _Waited(torch.autograd.Function):
    """The result of a functional collective of torch, once it is there."""

    @staticmethod
    def forward(ctx, x):
        return x.wait()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def _operations_of(kind: Any) -> list[Any]:
    """Return the functions by which a class of tensors has operations of its own."""
    methods = kind.__torch_dispatch__, kind.__torch_function__
    return [getattr(method, "__func__", method) for method in methods]


def plain(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds its values.

    That is x itself, a DTensor, too; what a quantised tensor stands for; the result of a
    collective. TypeError for other subclasses with own operations, and quantised tensors with
    gradients.
    """
    base: Any = torch.Tensor
    kind: Any = type(x)
    if kind in (base, torch.nn.Parameter) or is_dtensor(x):
        return x
    known = [*_operations_of(base), torch._C._disabled_torch_function_impl]
    ordinary = all(function in known for function in _operations_of(kind))
    if ordinary or kind.__name__ in ("FakeTensor", "FunctionalTensor"):
        return x
    if kind.__name__ == "AsyncCollectiveTensor":
        return _Waited.apply(x)
    if kind.dequantize is not base.dequantize and not x.requires_grad:
        with contextlib.suppress(TypeError, NotImplementedError):  # a dequantize of another meaning
            found = x.dequantize()
            if type(found) is base and found.shape == x.shape and found.is_floating_point():
                return found
    raise TypeError(
        f"{name} must be a torch.Tensor, a DTensor or a quantised tensor that requires no "
        f"gradient, got a {kind.__module__}.{kind.__name__}: pass the plain tensor that it stands "
        "for"
    )
