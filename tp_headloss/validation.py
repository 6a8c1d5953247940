"""Checks of metadata that several modules share: types, shapes, devices, ranges of numbers. They read no tensor's
values."""

from __future__ import annotations

import numbers
import operator

import torch


def expect_tensor(name: str, x, shape=None, device: torch.device | None = None):
    """Raise TypeError or ValueError unless x is a real tensor of this shape on this device (None: any)."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if shape is not None and x.shape != torch.Size(shape):
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(x.shape)}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} must be on {device} like the tensors it goes with, got {x.device}")
    if x.is_complex():
        raise TypeError(f"{name} must be real, got {x.dtype}")


def expect_ids(name: str, x):
    """Raise TypeError unless x is a tensor of int64 or int32."""
    expect_tensor(name, x)
    if x.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, got {x.dtype}")


def expect_instance(name: str, value, kind: type):
    """Raise TypeError unless the value is of this class, or None."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be {kind.__name__}(..) or None, got {value!r}")


def fits_fp32(number: float) -> bool:
    """Return True if a number other than 0, and its inverse, are normal numbers in fp32."""
    limits = torch.finfo(torch.float32)
    return limits.tiny <= abs(number) <= 1 / limits.tiny


def expect_number(name: str, number, positive: bool = True):
    """Raise TypeError unless it is a number, and ValueError unless kernels can multiply and divide by it."""
    if not isinstance(number, (int, float, numbers.Real)):
        raise TypeError(f"{name} must be a number, got {number!r}")
    if not fits_fp32(number) or (positive and number < 0):
        wanted = "positive" if positive else "other than 0"
        raise ValueError(f"{name} must be {wanted} and finite in fp32, got {number}")


def expect_pair(name: str, pair):
    """Raise TypeError unless the pair is a tuple or list of two numbers."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(x, numbers.Real) for x in pair):
        raise TypeError(f"{name} must be two numbers, such as (0.2, 0.28), got {pair!r}")


def expect_int(name: str, value) -> int:
    """Return an integer of any library as a Python int. TypeError for anything else, True and False included."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        if isinstance(value, (bool, torch.Tensor)):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None
