"""Replacing methods of one model object: for the duration of a block, or until `Installed.remove`."""

from __future__ import annotations

import types
from contextlib import contextmanager


class Installed:
    """The methods that `install` has put into a model; `remove` takes them out again.

    As a context manager it removes the methods at the end of the block, and raises RuntimeError if no loss was computed
    by them.

    Attributes:
        head: the `MegatronHead`.
    """

    def __init__(self, model, head, functions: dict):
        self.model, self.head, self.calls = model, head, 0
        # bound methods, so that a copy of the model calls them with itself
        self.methods = {name: types.MethodType(function, model) for name, function in functions.items()}
        model.__dict__.update(self.methods)

    @property
    def last(self):
        """`HeadLossOutput` of the head's last call, without graph and statistics, for metrics."""
        return self.head.last

    def remove(self):
        """Give the model its own methods back. RuntimeError if something replaced them after this installation."""
        for name, method in self.methods.items():
            if self.model.__dict__.get(name) is not method:
                raise RuntimeError(f"{type(self.model).__name__}.{name} was replaced after this: remove that one first")
        for name in self.methods:
            del self.model.__dict__[name]
        self.methods = {}

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self.methods:
            self.remove()
        if kind is None and not self.calls:
            raise RuntimeError("no loss came through the installed head: is this the model that is trained?")


@contextmanager
def replaced(module, **methods):
    """Replace methods of one object for the duration of the block."""
    before = {name: module.__dict__[name] for name in methods if name in module.__dict__}
    module.__dict__.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del module.__dict__[name]
        module.__dict__.update(before)
