"""For the documentation: docstrings of functions with the arguments that `spec` writes into
them."""

import contextlib
import functools
import importlib
import inspect

import griffe


class LinesOfArguments(griffe.Extension):
    """Take the docstring of each function or class whose annotations are lines from the imported
    package."""

    def on_object(self, *, obj, **kwargs):
        """Replace the docstring that griffe read in the source."""
        if any(
            str(decorator.value) in ("checked", "described")
            for decorator in getattr(obj, "decorators", ())
        ):
            # of a class and its method, too
            names = obj.path.removeprefix(f"{obj.module.path}.").split(".")
            # an adapter of a host that is not here keeps its source's
            with contextlib.suppress(ImportError):
                found = functools.reduce(getattr, names, importlib.import_module(obj.module.path))
                obj.docstring.value = inspect.getdoc(found)
