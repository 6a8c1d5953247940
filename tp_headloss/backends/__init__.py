"""A backend is a module with local_statistics, merge_packets, logits_gradient and shares_memory.

Triton's also has token_sums and token_sums_gradient, which elsewhere are plain torch (`HeadLoss._reduce`).
"""

from __future__ import annotations

import functools
import importlib
import os

BACKENDS = ("torch", "triton")


def version_numbers(version: str) -> tuple[int, int]:
    """Major and minor of a version such as "2.11.0a0+cu130"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def resolve_backend(name: str | None, device) -> str:
    """The backend for a device: "triton" on CUDA, "torch" elsewhere, or the one that was asked for, never another."""
    if name is None:
        return "triton" if device.type == "cuda" else "torch"
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS} or None (by device), got {name!r}")
    if name == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"backend='triton' needs CUDA tensors (or TRITON_INTERPRET=1), got {device.type}")
    return name


@functools.cache
def load_backend(name: str):
    """Import on first use: importing the package needs neither CUDA nor Triton."""
    return importlib.import_module(f".{'eager' if name == 'torch' else name}", __package__)
