"""In the place of ray, which verl imports and hosts' environments lack: import this first."""

import importlib.machinery
import sys
import types
from unittest import mock


class EmptyRay(types.ModuleType):
    """A module whose every attribute exists."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock() if name[0].islower() else type(name, (), {})


class RayFinder:
    def find_spec(self, name, path=None, target=None):
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if name.split(".")[0] == "ray"
            else None
        )

    def create_module(self, spec):
        return EmptyRay(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, RayFinder())
