"""The contract of a backend, stated once, and how one is chosen.

A backend is a module, chosen by device or asked for by name, never as a silent replacement of
another:

    label_logits(out, request)
        logits -> the labels' z [N], 0 where they are not here
    local_statistics(packets, request, memory=None)
        logits -> this rank's packets [chunks, rows, N]
    merge_packets(packets, request, memory=None)
        packets of all ranks -> [merged rows, values, *flags]
    second_statistics(packets, request, merged)
        logits -> packets of the second exchange
    merge_second(packets, outputs, layout)
        those of all ranks -> last rows of merged rows and values
    logits_gradient(out, request, merged, grads)
        upstream gradients by name -> d loss / d logits, in `out`; of "triton" also those of a
        reduced loss, see `passes`
    entries(ids, log_probs, factors, factor, renormalize, vocab_size)
        a top-K teacher's entries, distinct and ascending
    known_sets(ids, spans, vocab_size, most=None)
        the ids of all sets as the backend takes them, and their bounds
    gradient_for(gradient, upstream)
        multiplies a gradient that is for an upstream gradient of 1, in place
    scale(out, x, factor, add=False)
        out (+)= x * factor, a scalar tensor
    units_of(request, merged, grads)
    split_gradient(out, request, merged, grads, units)
    turn_to_fp8(out, x, factors, first, seed)
    finish_hidden(out, product, gradient, weight, row_sum)
    add_to_weight(out, large, hidden)
        the gradient of logits for products in fp8, and what these lack, see `fp8`
    shares_memory(logits)
        whether packets may meet in symmetric memory (`memory`)

"triton" alone has what follows; elsewhere reduced losses are plain torch (see
`head_loss.reduction`):

    token_sums(values, valid, reduction)
        a loss [] and sums over tokens in one kernel
    token_sums_gradient(upstream, values, valid, ..)
        the gradients of the values
    PreparedLaunches(request, reduction, inplace)
        the way `Prepared` of calls of this kind
    LateGradient(request, plan, has_slopes, weight)
        completes a gradient that one read may have written
    linear_statistics(packets, hidden, weight, request, rounded, budget)
    linear_gradient(out, hidden, weight, request, merged, grads, rounded)
        packets of logits hidden @ weight^T that are never stored, and their gradient; where
        `linear_head.epilogue` finds no obstacle

Importing the package needs neither CUDA nor Triton: a backend is imported on first use. Without
CUDA, "triton" runs in Triton's interpreter (TRITON_INTERPRET=1), for debugging: it truncates to
bf16, unless patched as by the tests.
"""

import functools
import importlib
import os
import sys
from typing import Literal, TypeAlias

import torch

from ..ranks.compiler import constant_for_compile

Backend: TypeAlias = Literal["torch", "triton"]


def resolve_backend(name: str | None, device) -> str:
    """The backend for a device: "triton" on NVIDIA GPUs, "torch" elsewhere, or the one that was
    asked for."""
    # on AMD's GPUs, which torch calls "cuda", too, the kernels compile and were never run
    if name is None:
        return "triton" if device.type == "cuda" and torch.version.hip is None else "torch"
    if name == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        _expect_triton()  # which TRITON_INTERPRET=1 would need
        value = os.environ.get("TRITON_INTERPRET")
        said = "" if value is None else f" and TRITON_INTERPRET={value}, which is not taken for 1"
        raise ValueError(
            f"backend='triton' needs CUDA tensors (or TRITON_INTERPRET=1), got {device.type}{said}"
        )
    if name == "triton" and device.type != "cuda":
        _expect_interpreter()
    return name


@constant_for_compile
def _expect_interpreter() -> None:
    """Raise ValueError where Triton was imported without TRITON_INTERPRET: its own functions are
    compiled ones then, which none of an interpreter's kernels can call."""
    language = sys.modules.get("triton.language")
    function = getattr(language, "cdiv", None)
    if type(function).__name__ == "JITFunction":
        raise ValueError(
            "backend='triton' needs TRITON_INTERPRET=1 when Triton is imported, and it was set after "
            "that: set it before Python starts"
        )


def is_not_installed(error: Exception) -> bool:
    """Whether an import of Triton ended in this error because there is none."""
    return isinstance(error, ModuleNotFoundError) and error.name == "triton"


def _expect_triton() -> None:
    """Raise ImportError where Triton is missing, or cannot be imported."""
    try:
        importlib.import_module("triton")  # by itself: an error of it has its name
        importlib.import_module("triton.language")
        return
    except Exception as error:  # a RuntimeError where it finds no driver
        found = f"importing it ends in {type(error).__name__}: {error}"
        if is_not_installed(error):
            found = "there is none"
    raise ImportError(
        f"the triton backend needs Triton >= 3.6, and {found}: pip install 'triton>=3.6', or use "
        "Options(backend='torch')"
    )


@functools.cache
def load_backend(name: str):
    """The backend's module. ImportError where Triton is missing or cannot be imported."""
    if name == "triton":
        _expect_triton()
    return importlib.import_module(f".{'eager' if name == 'torch' else name}", __package__)


@constant_for_compile
def compute_capability(device: torch.device) -> tuple[int, int]:
    """Major and minor of an NVIDIA GPU's compute capability; (0, 0) of AMD's GPUs."""
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


def version_numbers(version: str) -> tuple[int, int]:
    """Major and minor of a version such as "2.11.0a0+cu130"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
