"""Adapters for host frameworks, one module or package per host; none is imported before it is used.

`SUPPORTED` has the versions of each host that the tests run with: from the first to below the second.
"""

from __future__ import annotations

import importlib
import importlib.metadata

SUPPORTED = {  # distribution -> (first, below), extra of this package
    "deepspeed": (("0.19.8", "0.20"), "deepspeed"),
    "megatron-core": (("0.16.1", "0.20"), "megatron"),
    "nemo_automodel": (("0.7.0", "0.8"), "nemo-automodel"),
    "torchtitan": (("0.3.0", "0.4"), "torchtitan"),
    "transformers": (("5.17.0", "6"), "transformers"),
    "trl": (("1.16.0", "2"), "trl"),
    "verl": (("0.9.1", "0.10"), "verl"),
}


def _release(version: str) -> tuple[int, ...]:
    """Numbers of a version string: "0.19.2rc1+cu13" -> (0, 19, 2)."""
    parts = []
    for part in version.split("+")[0].split("."):
        digits = part[: next((i for i, c in enumerate(part) if not c.isdigit()), len(part))]
        parts.append(int(digits or 0))
    return tuple(parts)


def installed_version(distribution: str) -> str | None:
    """Return the version of a host that is installed, or on the path as a checkout, as Megatron often is; else None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        return importlib.import_module(distribution.replace("-", ".")).__version__
    except (ImportError, AttributeError):
        return None


def is_supported(distribution: str, version: str) -> bool:
    """Return True for a version that the tests run with."""
    first, below = SUPPORTED[distribution][0]
    return _release(first) <= _release(version) < _release(below)


def require(distribution: str) -> tuple[int, ...]:
    """Return the version of an installed host as numbers. ImportError if it is not installed or not supported."""
    (first, below), extra = SUPPORTED[distribution]
    wanted = f"{distribution} >= {first}, < {below} (pip install 'tp_headloss[{extra}]')"
    version = installed_version(distribution)
    if version is None:
        raise ImportError(f"this needs {wanted}, and there is none")
    if not is_supported(distribution, version):
        raise ImportError(f"this needs {wanted}, got {version}")
    return _release(version)
