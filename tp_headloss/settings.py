"""Settings that a process may begin with: what they are, and a context without those of torch."""

import contextlib
import os
from collections.abc import Iterator

import torch


def matmul_precision() -> str:
    """Return torch's precision of products in fp32."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # of programs that also set that of a backend by itself
        return "set for a backend"


def changed_settings() -> list[str]:
    """Return those of torch's settings that are not torch's defaults, and change what losses
    compute, or whether."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    device, dtype, precision = (
        torch.get_default_device(),
        torch.get_default_dtype(),
        matmul_precision(),
    )
    settings = {
        "gradients off": not torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
        "inference mode on": torch.is_inference_mode_enabled(),
        f"autocast on for {' and '.join(kinds)}": bool(kinds),
        f"default device {device}": device.type != "cpu",
        f"default dtype {dtype}": dtype != torch.float32,
        f"float32 matmul precision {precision}": precision != "highest",
    }
    return [name for name, is_changed in settings.items() if is_changed]


def expect_interpreter_setting() -> None:
    """Raise ValueError for a TRITON_INTERPRET that Triton and this package would take for different
    things."""
    value = os.environ.get("TRITON_INTERPRET", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"TRITON_INTERPRET must be 1, or not set, got {value}")


@contextlib.contextmanager
def torch_defaults() -> Iterator[None]:
    """Return a context in which torch's settings are its defaults, whatever the program, or a
    sitecustomize, has set."""
    dtype, precision = torch.get_default_dtype(), matmul_precision()
    with contextlib.ExitStack() as within:
        within.enter_context(torch.inference_mode(False))  # turns gradients on, too
        for kind in ("cpu", "cuda"):
            within.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            within.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            if precision in ("high", "medium"):
                torch.set_float32_matmul_precision(precision)


def warnings_of_settings(of_ranks: list[list[str]]) -> Iterator[str]:
    """Yield a line for each set of changed settings with which processes start.

    of_ranks: those of each rank; of one process alone its own.
    """
    ranks_with: dict[str, list[str]] = {}
    for rank, changed in enumerate(of_ranks):
        ranks_with.setdefault(", ".join(changed), []).append(str(rank))
    ranks_with.pop("", None)
    for settings, ranks in ranks_with.items():
        who = "this process" if len(of_ranks) == 1 else f"rank {', '.join(ranks)}"
        yield (
            f"warning: {who} starts with {settings}, maybe of a sitecustomize.py: losses were "
            "checked with torch's defaults, and a training run is not"
        )
