"""The version of this package, and a digest of its sources, which tells two states of one version apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__version__ = "0.3.0.dev0"
PACKAGE = __name__.rpartition(".")[0]  # a copy of another name is its own
FOLDER = Path(__file__).parent
SOURCES = (".py", ".cu", ".cuh")
HEADER = 16  # bytes of a compiled file, with the time of its source


def digest_of_sources(folder: Traversable | None = None) -> str:
    """Return 12 hexadecimal digits that depend on the names and the contents of all sources.

    They may be in a zip archive, or compiled files alone. folder: by default this package's.
    """
    digest = hashlib.sha256()
    for name, content in _sources(resources.files(PACKAGE) if folder is None else folder):
        digest.update(f"{name}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def _sources(folder: Traversable) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the sources in a folder and those within, and of compiled files
    that stand in the place of one."""
    entries = {entry.name: entry for entry in folder.iterdir()}
    for _, entry in sorted(entries.items()):
        if entry.is_dir():
            if entry.name != "__pycache__":
                for name, content in _sources(entry):
                    yield f"{entry.name}/{name}", content
        elif entry.name.endswith(SOURCES):
            yield entry.name, entry.read_bytes()
        elif entry.name.endswith(".pyc") and entry.name.removesuffix("c") not in entries:
            yield entry.name, entry.read_bytes()[HEADER:]
