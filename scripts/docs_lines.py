"""For the documentation: docstrings of checked functions with the arguments that `spec` writes into them."""

import importlib
import inspect

import griffe


class LinesOfArguments(griffe.Extension):
    """Take the docstring of each checked function or class from the imported package."""

    def on_object(self, *, obj, **kwargs):
        """Replace the docstring that griffe read in the source."""
        if any(str(decorator.value) == "checked" for decorator in getattr(obj, "decorators", ())):
            found = getattr(importlib.import_module(obj.module.path), obj.name)
            obj.docstring.value = inspect.getdoc(found)
