"""Host frameworks, a module for each, which imports its host only when it is used.

`SUPPORTED` says what the tests run with: from the first version to below the second.
"""

from __future__ import annotations

import importlib
import importlib.metadata

SUPPORTED = {  # distribution -> (first, below), extra of this package
    "megatron-core": (("0.16.1", "0.20"), "megatron"),
    "torchtitan": (("0.3.0", "0.4"), "torchtitan"),
    "transformers": (("5.17.0", "6"), "transformers"),
    "trl": (("1.16.0", "2"), "trl"),
}


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("+")[0].split("."):
        digits = part[: next((i for i, c in enumerate(part) if not c.isdigit()), len(part))]
        parts.append(int(digits or 0))
    return tuple(parts)


def _version_of_sources(distribution: str) -> str | None:
    """Of a checkout on the path, as Megatron is often used."""
    try:
        return importlib.import_module(distribution.replace("-", ".")).__version__
    except (ImportError, AttributeError):
        return None


def require(distribution: str) -> tuple[int, ...]:
    """The installed version of a host, as numbers. ImportError if there is none, or one that is not supported."""
    (first, below), extra = SUPPORTED[distribution]
    wanted = f"{distribution} >= {first}, < {below} (pip install 'tp_headloss[{extra}]')"
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = _version_of_sources(distribution)
    if version is None:
        raise ImportError(f"this needs {wanted}, and there is none")
    if not _numbers(first) <= _numbers(version) < _numbers(below):
        raise ImportError(f"this needs {wanted}, got {version}")
    return _numbers(version)


def check_type(name: str, value, *kinds: type) -> None:
    """TypeError with expected and actual unless `value` is an instance of one of `kinds` (None as a kind: or None)."""
    classes = tuple(kind for kind in kinds if kind is not None)
    if isinstance(value, classes) or (value is None and None in kinds):
        return
    expected = " or ".join("None" if kind is None else kind.__name__ for kind in kinds)
    got = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    raise TypeError(f"{name} must be of type {expected}, got {got}")
