"""Checks of metadata that several modules share: types, shapes, devices, ranges of numbers. They read no tensor's
values."""

from __future__ import annotations

import numbers
import operator
from typing import TypeGuard

import torch
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor  # pyright: ignore[reportMissingImports]  # in C


def expect_tensor(name: str, x, shape=None, device: torch.device | None = None, hint: str = ""):
    """Raise TypeError or ValueError unless x is a real tensor of this shape on this device (None: any)."""
    if not isinstance(x, torch.Tensor):
        for part in ("weight", "log_prob"):
            hint = hint or (f": pass its .{part}" if hasattr(x, part) else "")
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}{hint}")
    if shape is not None and x.shape != torch.Size(shape):
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(x.shape)}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} must be on {device} like the tensors it goes with, got {x.device}")
    if x.is_complex():
        raise TypeError(f"{name} must be real, got {x.dtype}")


def expect_floating(name: str, x):
    """Raise TypeError unless x is a tensor of floating point."""
    expect_tensor(name, x)
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {x.dtype}")


def expect_mask(name: str, x, shape=None, device: torch.device | None = None):
    """Raise TypeError or ValueError unless x is a bool tensor of this shape on this device (None: any)."""
    expect_tensor(name, x, shape, device)
    if x.dtype != torch.bool:
        raise TypeError(f"{name} must be bool, got {x.dtype}")


def expect_dense(name: str, x: torch.Tensor):
    """Raise TypeError for a sparse or nested tensor."""
    if x.layout != torch.strided or x.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got {'a nested one' if x.is_nested else x.layout}")


def refuse_transforms():
    """Raise RuntimeError within a transform of torch.func; torch's own error would name neither."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "tp_headloss does not support transforms of torch.func (grad, vmap, jacrev, ..): use loss.backward() or "
            "torch.autograd.grad"
        )


def refuse_batches(gradients):
    """Raise RuntimeError for upstream gradients that are a batch; torch's own error would not say so."""
    if torch.compiler.is_compiling():
        return
    for gradient in gradients:
        if gradient is not None and (is_legacy_batchedtensor(gradient) or is_batchedtensor(gradient)):
            raise RuntimeError(
                "tp_headloss does not support is_grads_batched=True, nor jacobian(vectorize=True): call "
                "torch.autograd.grad once for each gradient"
            )


def expect_ids(name: str, x):
    """Raise TypeError unless x is a tensor of int64 or int32."""
    expect_tensor(name, x)
    if x.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, got {x.dtype}")


def expect_instance(name: str, value, kind: type):
    """Raise TypeError unless the value is of this class, or None."""
    if value is not None and not isinstance(value, kind):
        got = type(value).__name__ if isinstance(value, torch.Tensor) else repr(value)  # on all ranks the same
        raise TypeError(f"{name} must be {kind.__name__}(..) or None, got {got}")


def expect_bool(name: str, value):
    """Raise TypeError unless the value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def expect_one_of(name: str, value, known):
    """Raise ValueError unless the value is among the known ones."""
    if value not in tuple(known):  # a list cannot be looked up in a dict or a set
        raise ValueError(f"{name} must be one of {known}, got {value!r}")


def swap_hint(logits, labels) -> str:
    """Return a hint for an error message if logits are integers where labels are none, else an empty string."""
    both = isinstance(logits, torch.Tensor) and isinstance(labels, torch.Tensor)
    swapped = both and labels.is_floating_point() and not logits.is_floating_point()
    return " (are logits and labels swapped?)" if swapped else ""


def expect_hidden_and_weight(hidden: torch.Tensor, weight: torch.Tensor):
    """Raise ValueError unless hidden states [.., H] and a weight [width, H] have one H and one device."""
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        shapes = f"{list(hidden.shape)} and {list(weight.shape)}"
        raise ValueError(f"hidden states and weight must be [.., H] and [width, H], got {shapes}")
    if hidden.device != weight.device:
        raise ValueError(f"weight must be on {hidden.device} like the hidden states, got {weight.device}")


def operand_dtype(hidden: torch.Tensor, weight: torch.Tensor, owner: str = "") -> torch.dtype:
    """dtype of a GEMM's operands, as torch.nn.functional.linear chooses it; TypeError if they do not go together."""
    kind = hidden.device.type
    # torch.compile knows the devices that it compiles for, and torch 2.11 cannot trace the question
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    is_autocast = known and torch.is_autocast_enabled(kind)
    if is_autocast and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(kind)
    if hidden.dtype != weight.dtype:
        raise TypeError(f"{owner}hidden states and weight must have one dtype, got {hidden.dtype} and {weight.dtype}")
    return hidden.dtype


def is_number(value) -> TypeGuard[float]:
    """Return True for a real number of any library, which computes as a float does; True and False are none."""
    return isinstance(value, (float, int, numbers.Real)) and not isinstance(value, bool)  # first what is quick


def fits_fp32(number: float) -> bool:
    """Return True if a number other than 0, and its inverse, are normal numbers in fp32."""
    limits = torch.finfo(torch.float32)
    return limits.tiny <= abs(number) <= 1 / limits.tiny


def expect_real(name: str, number, expected: str = "a number"):
    """Raise TypeError unless it is a real number of any library; inf and NaN are numbers. expected: for the message."""
    if not is_number(number):
        raise TypeError(f"{name} must be {expected}, got {number!r}")


def expect_number(name: str, number, positive: bool = True):
    """Raise TypeError unless it is a number, and ValueError unless kernels can multiply and divide by it."""
    expect_real(name, number)
    if not fits_fp32(number) or (positive and number < 0):
        wanted = "positive" if positive else "other than 0"
        raise ValueError(f"{name} must be {wanted} and finite in fp32, got {number}")


def expect_scalar(name: str, value):
    """Raise TypeError or ValueError unless it is a number or a scalar tensor."""
    if not isinstance(value, torch.Tensor):
        expect_real(name, value, "a number or a scalar tensor")
        return
    expect_tensor(name, value)
    if value.dim():
        raise ValueError(f"{name} must be a number or a scalar tensor, got shape {list(value.shape)}")
    if value.dtype == torch.bool:
        raise TypeError(f"{name} must be a number or a scalar tensor of numbers, got {value.dtype}")


def expect_ignore_index(value) -> int:
    """Return an ignore_index as a Python int. Raises TypeError or ValueError unless it is an integer of int64."""
    ignore_index = expect_int("ignore_index", value)
    if not -(1 << 63) <= ignore_index < 1 << 63:
        raise ValueError(f"ignore_index must be in the range of int64, got {ignore_index}")
    return ignore_index


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
