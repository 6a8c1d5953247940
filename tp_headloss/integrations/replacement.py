"""Entries of this package in the place of a host's own, for the duration of a block or until
`Replacement.remove`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .hooks import location


class Replacement:
    """Entries of a dict (methods of one model object, engines of a registry) that stand in the
    place of the host's own; `remove` puts those back. As a context manager it removes itself at the
    end of the block, and raises RuntimeError if it was removed before the block began.

    `Counted` ones also say whether anything went through them.

    Attributes:
        entries: what was installed, by name; nothing after `remove`.
    """

    # what has to be removed first if other entries are in place
    on_top = "what was installed on top"

    def __init__(self, place: dict[str, Any], *names: str):
        self.place, self.names = place, names
        self.entries: dict[str, Any] = {}
        self._before = {name: place[name] for name in names if name in place}

    def install(self, entries: Mapping[str, Any]):
        """Put entries of these names in place."""
        self.entries = dict(entries)
        self.place.update(entries)

    def undo(self):
        """Put back what was in place before, whatever is there now."""
        for name in self.names:
            if name in self._before:
                self.place[name] = self._before[name]
            else:
                self.place.pop(name, None)
        self.entries = {}

    def remove(self):
        """Put back what was in place before, on all ranks of the shard's group: one that does it
        alone makes the others wait, in the next call, until the group's timeout. RuntimeError if
        something else was installed on top of this. An entry that was deleted is not put back."""
        for name, entry in self.entries.items():
            found = self.place.get(name, entry)
            if found != entry:  # not by identity: accelerate puts an equal method back
                raise RuntimeError(
                    f"remove {self.on_top} first: {name} must be the one that this installed, got "
                    f"{location(found)}"
                )
        if self.entries:
            self.undo()

    def __enter__(self):
        if not self.entries:
            raise RuntimeError(
                "with needs what is installed, got what was removed already: install it anew"
            )
        return self

    def __exit__(self, kind, *_):
        self.remove()


class Counted(Replacement):
    """Entries that count their uses: a block in which there was none ends in a RuntimeError."""

    _uses_before = 0

    def uses(self) -> int:
        """Return how often something went through the entries."""
        raise NotImplementedError

    def expect_use(self, uses: int):
        """Raise RuntimeError if nothing went through the entries in a block that has ended.

        uses: how often something did within the block.
        """
        raise NotImplementedError

    def __enter__(self):
        super().__enter__()
        self._uses_before = self.uses()
        return self

    def __exit__(self, kind, *_):
        super().__exit__(kind)
        if kind is None:
            self.expect_use(self.uses() - self._uses_before)


@contextmanager
def evaluating(model: torch.nn.Module):
    """Evaluation mode without gradients for the duration of the block; then each module returns to
    its own mode."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return random numbers of a CPU generator, whatever torch's default dtype and device are."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def expect_close(
    name: str, found: torch.Tensor, expected: torch.Tensor, compares: bool, hint: str = ""
):
    """Raise RuntimeError unless a check call's result is fp32 of the host's shape and, if it
    `compares`, close, and if the host's own is not finite.

    hint: what to look at, for the end of the error.
    """
    if found.shape != expected.shape or found.dtype != torch.float32:
        raise RuntimeError(
            f"{name} must be fp32 {list(expected.shape)}, got {found.dtype} {list(found.shape)}"
        )
    if not expected.isfinite().all():
        raise RuntimeError(
            f"{name} must be finite as the host's own head computes it, got {float(expected.sum())}: "
            "look for NaN or infinity in the weights that were loaded"
        )
    if compares and not torch.allclose(found, expected.float(), rtol=2e-2, atol=2e-2):
        raise RuntimeError(
            f"{name} differs from the host's own by {float((found - expected).abs().max()):.3g}{hint}"
        )


@contextmanager
def replaced(owner, **attributes):
    """Replace methods, or other attributes, of one object for the duration of the block."""
    replacement = Replacement(vars(owner), *attributes)
    try:
        replacement.install(attributes)
        yield
    finally:
        replacement.undo()
