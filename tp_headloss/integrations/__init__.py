"""Adapters for host frameworks, one module or package per host; none is imported before it is used.

`TESTED` has the versions of each host that the tests run with. An older one raises ImportError. A
newer one warns once: each adapter compares itself with the host when it is installed or called, and
refuses what differs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import re
import warnings
from collections.abc import Callable, Collection
from typing import NoReturn

# distribution -> oldest version, first version that was not tested, extra of this package
TESTED = {
    "axolotl": ("0.19.0", "0.20", "axolotl"),
    "deepspeed": ("0.19.8", "0.20", "deepspeed"),
    "megatron-core": ("0.16.1", "0.20", "megatron"),
    "nemo_automodel": ("0.7.0", "0.8", "nemo-automodel"),
    "torchtitan": ("0.3.0", "0.4", "torchtitan"),
    "transformers": ("5.16.1", "5.25", "transformers"),
    "trl": ("1.16.0", "1.17", "trl"),
    "verl": ("0.9.1", "0.10", "verl"),
}


def refuse_other_names(module: str, names: Collection[str]) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a module with a host's functions, whose AttributeError for
    another name says which there are."""

    def refuse(name: str) -> NoReturn:
        said = ""
        if not name.startswith("__"):
            said = (
                f": it has {', '.join(sorted(names))}, and functions of hosts that are one call of "
                "log_probs or vocab_statistics are written out in docs/guides/rl_functions.md"
            )
        raise AttributeError(f"module {module!r} has no attribute {name!r}{said}")

    return refuse


def _release(version: str) -> tuple[int, ...]:
    """Numbers of a version string: "0.19.2rc1+cu13" -> (0, 19, 2)."""
    return tuple(int(re.split(r"\D", part)[0] or 0) for part in version.split("+")[0].split("."))


def installed_version(distribution: str) -> str | None:
    """Return the version of a host that is installed, or on the path as a checkout, as Megatron
    often is; else None."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    with contextlib.suppress(ImportError, AttributeError):
        return importlib.import_module(distribution.replace("-", ".")).__version__
    return None


def standing(distribution: str, version: str) -> str:
    """Return "too old", "tested" or "newer than tested" for the version of a host."""
    oldest, untested, _ = TESTED[distribution]
    if _release(version) < _release(oldest):
        return "too old"
    return "tested" if _release(version) < _release(untested) else "newer than tested"


def require(distribution: str) -> tuple[int, ...]:
    """Return a host's version as numbers; UserWarning if newer than tested, ImportError if none is
    there or too old."""
    oldest, _, extra = TESTED[distribution]
    wanted = f"{distribution} >= {oldest} (pip install '.[{extra}]' in a checkout of tp_headloss)"
    version = installed_version(distribution)
    if version is None:
        raise ImportError(f"this needs {wanted}, and there is none")
    if standing(distribution, version) == "too old":
        raise ImportError(f"this needs {wanted}, got {version}")
    if standing(distribution, version) == "newer than tested":
        _warn_of_newer(distribution, version)
    return _release(version)


@functools.lru_cache
def _warn_of_newer(distribution: str, version: str) -> None:
    """Warn once in this process: `require` is called again at every installation."""
    untested = TESTED[distribution][1]
    warnings.warn(
        f"{distribution} {version} is newer than the versions that tp_headloss was tested with (< "
        f"{untested}); it is used all the same; an installation that compares its loss with the "
        "host's own refuses one that differs",
        stacklevel=3,
    )
