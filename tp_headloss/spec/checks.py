"""Checks that are no lines of arguments.

They are of transforms of torch.func, dtypes of a GEMM, and what kernels can multiply by.
"""

import numbers
from collections.abc import Callable
from typing import TypeGuard

import torch
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor  # pyright: ignore[reportMissingImports]  # in C

FP32_MAX = torch.finfo(torch.float32).max


def expect_dense(name: str, x: torch.Tensor):
    """Raise TypeError for a sparse or nested tensor."""
    if x.layout != torch.strided or x.is_nested:
        found = f"a nested one{_hint_of_nested(x)}" if x.is_nested else x.layout
        raise TypeError(f"{name} must be a dense tensor, got {found}")


def _hint_of_nested(x: torch.Tensor) -> str:
    """Return what to write for a nested tensor: packed tokens, where its memory has them, or padded
    ones, which no label counts."""
    if x.layout != torch.jagged:
        return ": pad it, to_padded_tensor(0.0), of labels to_padded_tensor(-100)"
    if not x.is_contiguous():
        return ": it shows a part of its memory, make it .contiguous() first"
    return (
        ": packed, pass the .values() of all nested arguments, with "
        "Sequences.from_cu_seqlens(labels.offsets()) where sequences are needed; or padded, their "
        ".to_padded_tensor(0.0), of labels .to_padded_tensor(-100)"
    )


def refuse_transforms():
    """Raise RuntimeError within a transform of torch.func; torch's own error would name neither."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "tp_headloss does not support transforms of torch.func (grad, vmap, jacrev, ..): use "
            "loss.backward() or torch.autograd.grad"
        )


def refuse_export(*tensors):
    """Raise RuntimeError if torch.export would record a loss of tensors that require a gradient."""
    # not is_exporting(), which is True for torch.compile, too, as Dynamo of torch 2.11 traces it
    if torch.compiler._is_exporting_flag and torch.is_grad_enabled():
        expect_no_gradient(*tensors)


def expect_no_gradient(*tensors):
    """Raise RuntimeError if one of the tensors, or None, requires a gradient.

    A program of torch.export has no backward.
    """
    if any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors):
        raise RuntimeError(
            "a program of torch.export holds the forward of tp_headloss and not its backward, so "
            "nothing of it may require a gradient: export after model.requires_grad_(False), or "
            "export and run it under torch.no_grad(). To train, use the model itself, with "
            "torch.compile or without"
        )


def refuse_batches(gradients):
    """Raise RuntimeError for upstream gradients that are a batch.

    torch's own error would not say so.
    """
    if torch.compiler.is_compiling():
        return
    for gradient in gradients:
        if gradient is None:
            continue
        if is_legacy_batchedtensor(gradient) or is_batchedtensor(gradient):
            raise RuntimeError(
                "tp_headloss does not support is_grads_batched=True, nor jacobian(vectorize=True): "
                "call torch.autograd.grad once for each gradient"
            )


def refuse_tokens(
    bad: torch.Tensor,
    message: Callable[[int], str],
    hint: str | Callable[[int], str] = "",
):
    """Raise ValueError with message(flat index) about the first of the bad tokens [..], if any.

    Waits for a GPU. hint: what to do, or a function of the flat index, too.
    """
    if len(tokens := bad.flatten().nonzero()):
        first = int(tokens[0])
        said = hint if isinstance(hint, str) else hint(first)
        raise ValueError(f"{message(first)}; {len(tokens)} such tokens{said}")


# for the end of an error about labels that ranks do not agree on
OTHER_BATCHES = (
    ": do they hold other batches? Then shard= has the data-parallel group in the place of the "
    "tensor-parallel one"
)


def hint_of_label(label: int, ignore_index: int) -> str:
    """Return what to write for a label that is no id, if the caller may mean that it is ignored."""
    is_none = label < 0 and label != ignore_index
    return f": is it ignored? Then ignore_index={label}" if is_none else ""


def refuse_float_labels(x, labels):
    """Raise TypeError for labels that are logits or probabilities; their line refuses others.

    Args:
        x: logits or hidden states.
    """
    if not isinstance(labels, torch.Tensor) or not labels.is_floating_point():
        return
    said = "" if x.is_floating_point() else " (are logits and labels swapped?)"
    if not said and labels.dim() == x.dim() and labels.shape[:-1] == x.shape[:-1]:
        said = (
            ": probabilities q are for the term Distillation, inputs={'teacher': Teacher(q.log())}"
        )
    if said:
        raise TypeError(f"labels must be int64 or int32, got {labels.dtype}{said}")


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return the dtype of torch.autocast on a type of device, None where it is off."""
    # torch.compile knows the devices that it compiles for, and torch 2.11 cannot trace the question
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    is_on = known and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


def operand_dtype(hidden: torch.Tensor, weight: torch.Tensor, owner: str = "") -> torch.dtype:
    """Return the dtype of a GEMM's operands, as torch.nn.functional.linear chooses it.

    TypeError if they do not go together.
    """
    kind = hidden.device.type
    of_autocast = autocast_dtype(kind)
    if of_autocast is not None and torch.float64 not in (hidden.dtype, weight.dtype):
        return of_autocast
    if hidden.dtype != weight.dtype:
        autocast = f", or call under torch.autocast({kind!r})"
        autocast *= torch.float64 not in (hidden.dtype, weight.dtype)
        raise TypeError(
            f"{owner}hidden states and weight must have one dtype, got {hidden.dtype} and "
            f"{weight.dtype}: pass hidden.to(weight.dtype){autocast}"
        )
    return hidden.dtype


def is_number(value) -> TypeGuard[float]:
    """Return True for a real number of any library, which computes as a float does.

    True and False are none.
    """
    # first what is quick
    return isinstance(value, (float, int, numbers.Real)) and not isinstance(value, bool)


def fits_fp32(number: float) -> bool:
    """Return True if a number other than 0, and its inverse, are normal numbers in fp32."""
    limits = torch.finfo(torch.float32)
    return limits.tiny <= abs(number) <= 1 / limits.tiny


def expect_number(name: str, number, positive: bool = True):
    """Raise ValueError unless kernels can multiply and divide by a number."""
    if not fits_fp32(number) or (positive and number < 0):
        wanted = "positive" if positive else "other than 0"
        raise ValueError(f"{name} must be {wanted} and finite in fp32, got {number}")
