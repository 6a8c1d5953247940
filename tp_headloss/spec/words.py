"""Words of errors for values of any type."""

import inspect
import numbers
from collections.abc import Iterator, MappingView

import torch

from .aliases import KEYWORDS
from .checks import is_number


def shown(value, write: str = "") -> str:
    """Return a value for a message, which must be the same on all ranks: objects by their type.

    write: what to write in its place, else what its type says.
    """
    if type(value) in (list, tuple):
        if all(isinstance(x, (str, float, int)) or type(x) in (list, tuple) for x in value):
            return repr(value) + write
        names = ", ".join(_kind(x) for x in value)
        remedies = [write, *(getattr(type(x), "remedy", "") for x in value)]
        return f"[{names}]" + next(filter(None, remedies), "")
    # an iterator or a function shows its address, which ranks do not share
    has_address = isinstance(value, Iterator) or inspect.isroutine(value)
    is_named = isinstance(value, (type, dict)) or type(value).__module__ != "builtins"
    if has_address or is_named:
        return type_name(value, write)
    return repr(value) + write


def type_name(value, write: str = "") -> str:
    """The name of a value's type, with what to write in its place: as given, or what the type
    says."""
    return _kind(value) + (write or getattr(type(value), "remedy", ""))


def _kind(value) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def made_of_value(kind: type, value) -> str:
    """Return what to write for a tensor, a string, a number, a part or a list of parts in the place
    of an object of this class, "" where the class does not say it; and for a dict of its arguments,
    or another library's dtype."""
    if kind is torch.dtype:
        return _dtype_of_torch(value)
    if value is kind:
        return f": call it, {kind.__name__}(..)"
    if isinstance(value, torch.Tensor):
        return getattr(kind, "of_tensor", "")
    if isinstance(value, str):
        return getattr(kind, "of_text", "").format(value)
    if is_number(value):
        is_int = isinstance(value, numbers.Integral)
        return getattr(kind, "of_int" if is_int else "of_float", "").format(value)
    if isinstance(value, dict) and value and value.keys() <= {*KEYWORDS.get(kind.__qualname__, ())}:
        return f": write {kind.__name__}({', '.join(f'{name}=..' for name in value)})"
    is_list = isinstance(value, (list, tuple))
    parts = value if is_list and value else [value]
    classes = getattr(kind, "made_of", ())
    if all(isinstance(part, classes) for part in parts):
        return f": write {kind.__name__}([..])"
    return getattr(kind, "of_list", "") if is_list else ""


def as_a_list(value) -> str:
    """Return what to pass in the place of an iterator, or of a view of a dict, where a list is
    expected; "" for anything else."""
    return ": pass list(..) of it" if isinstance(value, (Iterator, MappingView)) else ""


def array_hint(value) -> str:
    """Return what to pass in the place of an array of NumPy, "" for anything else."""
    is_array = hasattr(type(value), "__array_interface__") and getattr(value, "ndim", 0) > 0
    return ": pass torch.from_numpy(..)" * is_array


def _dtype_of_torch(value) -> str:
    """Return what to write for a dtype of NumPy, or the name of a dtype, "" for anything else."""
    name = value if isinstance(value, str) else getattr(value, "__name__", None)
    name = str(name or getattr(value, "name", "")).removeprefix("torch.")
    dtype = getattr(torch, name, None)
    # torch.float is another name, and another dtype than NumPy's
    is_same = isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}"
    return f": write torch.{name}" * is_same


def two_copies(value, kind: type) -> str:
    """Return the modules of two classes of one name, for an error about a value of the other one.

    "" where the names differ.
    """
    other = type(value)
    if other is kind or other.__name__ != kind.__name__:
        return ""
    return (
        f" of {other.__module__} in the place of that of {kind.__module__}: two copies of the "
        "package are in this process, use one of them"
    )


def with_article(name: str) -> str:
    """The name of a class with its article."""
    return f"{'an' if name[0] in 'AEIO' else 'a'} {name}"
