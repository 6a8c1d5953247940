"""Lines: what an argument may be. They read metadata and numbers, never a tensor's values."""

import functools
import inspect
import math
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from .aliases import hint, hints
from .checks import FP32_MAX, is_number
from .tensor_line import DTYPES, Sizes, TensorLine, check_alike
from .words import (
    array_hint,
    as_a_list,
    made_of_value,
    shown,
    two_copies,
    type_name,
    with_article,
)


@dataclass(frozen=True)
class NumberLine:
    """A number in [low, high], of Python or numpy; NaN is in no range.

    Args:
        hint: of the error for one out of range.
        of_text: of the error for a string.
        of_pair: of the error for a tuple or list, {} standing for it.
        of_function: of the error for a function.
        in_fp32: tensors in fp32 are compared with it, so that a finite number is one in fp32.
    """

    low: float = -math.inf
    high: float = math.inf
    says: str = "a number"
    hint: str = ""
    in_fp32: bool = False
    of_text: str = ""
    of_pair: str = ""
    of_function: str = ""

    def check(self, name: str, value: Any, sizes: Sizes):
        """Raise TypeError for anything but a number, and ValueError for one out of range."""
        if not is_number(value):
            raise TypeError(
                f"{name} must be a number, got {shown(value)}{self.hint_of_other(value)}"
            )
        if not isinstance(value, int):  # which may be too large for a float
            value = float(value)  # NumPy would round the bounds to the value's type
        if not self.low <= value <= self.high:
            raise ValueError(f"{name} must be {self.says}, got {value}{self.hint}")
        if self.in_fp32 and FP32_MAX < abs(value) < math.inf:
            raise ValueError(
                f"{name} must be {self.says}, of at most {FP32_MAX:.4g} or infinite, got {value}"
            )

    def hint_of_other(self, value: Any) -> str:
        """Return what to write for a value that is no number, "" if nobody knows."""
        if isinstance(value, (tuple, list)):
            return self.of_pair.format(shown(value))
        if inspect.isroutine(value) or isinstance(value, functools.partial):
            return self.of_function
        return self.of_text if isinstance(value, str) else ""


@dataclass(frozen=True)
class TupleOf:
    """A tuple or list of values of one line.

    Args:
        count: how many; None: any number.
        ordered: the first number is the lowest.
        around: a number that must not be outside of ordered ones.
    """

    line: Any
    count: int | None = None
    ordered: bool = False
    around: float | None = None

    @property
    def says(self) -> str:
        """Words for a table."""
        if self.ordered:
            return "(lowest, highest)" + ("" if self.around is None else f" around {self.around:g}")
        if self.count is None:
            return f"a tuple or list, each {self.line.says}"
        each = "" if self.line.says == "a number" else f", each {self.line.says}"
        return f"{self.count} numbers{each}"

    def check(self, name: str, value: Any, sizes: Sizes):
        """Raise TypeError or ValueError unless the value is such a tuple."""
        if not isinstance(value, (tuple, list)) or len(value) != (self.count or len(value)):
            if self.count is None:
                said = type_name(value, as_a_list(value))
                raise TypeError(f"{name} must be a tuple or list, got {said}")
            kind = _ORDERED if self.ordered else _PLURALS[type(self.line)]
            said = self._hint_of_one(value) if self.count == 2 and is_number(value) else ""
            raise TypeError(f"{name} must be {self.count} {kind}, got {shown(value)}{said}")
        for part in value:
            self.line.check(f"each of {name}", part, sizes)
        if self.ordered and not value[0] <= value[1]:
            raise ValueError(f"{name} must be (lowest, highest), got {value}")
        if self.around is not None and not value[0] <= self.around <= value[1]:
            raise ValueError(
                f"{name} must be around {self.around:g}, which equal log-probs have, got {value}"
            )

    def _hint_of_one(self, value) -> str:
        """Return what to write in the place of one number."""
        if not self.ordered:
            return f": for both, ({value}, {value})"
        return f": for at most {value}, (0.0, {value})" if value > 0 else ""


_ORDERED = "numbers, the lowest and the highest, such as (0.0, 2.0)"
_PLURALS = {
    NumberLine: "numbers, such as (0.2, 0.28)",
    TupleOf: "pairs of numbers, such as ((2.0, 3.0), (3.0, 2.0))",
}


@dataclass(frozen=True)
class IntLine:
    """An integer in [low, high], of Python or numpy.

    Args:
        hint: of the error for one out of range, and for None.
    """

    low: int = -(1 << 63)
    high: int = (1 << 63) - 1
    hint: str = ""

    @property
    def says(self) -> str:
        """Words for a table."""
        return "an int" if self.low < 0 else f"an int of at least {self.low}"

    def check(self, name: str, value: Any, sizes: Sizes):
        """Raise TypeError or ValueError unless the value is such an integer."""
        try:
            if isinstance(value, (bool, torch.Tensor)):
                raise TypeError
            number = operator.index(value)
        except TypeError:
            said = self._hint_of_other(value)
            raise TypeError(f"{name} must be an int, got {shown(value)}{said}") from None
        if not self.low <= number <= self.high:
            bound = f"at most {self.high}" if number > self.high else f"at least {self.low}"
            expected = "in the range of int64" if self.low < 0 else bound
            raise ValueError(f"{name} must be {expected}, got {number}{self.hint}")

    def _hint_of_other(self, value: Any) -> str:
        """Return what to write for a value that is no int, "" if nobody knows."""
        if isinstance(value, torch.Generator):
            return ": pass its .initial_seed(), an int that no draw changes"
        if isinstance(value, torch.Tensor):
            is_one = value.numel() == 1 and DTYPES["int64 or int32"](value.dtype)
            return ": pass its .item()" * is_one
        return self.hint if value is None else ""


@dataclass(frozen=True)
class OneOf:
    """One of some names, or a flag. A dictionary of names may grow. hint: of the error for anything
    but a string."""

    names: Collection[Any]
    hint: str = ""

    @property
    def says(self) -> str:
        """Words for a table."""
        return " or ".join(map(repr, self.names))

    def check(self, name: str, value: Any, sizes: Sizes):
        """Raise ValueError for anything but one of the names, TypeError for no flag."""
        if self.names == (True, False):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {shown(value)}{self.hint}")
        elif not isinstance(value, str) or value not in self.names:
            meant = repr(value) if isinstance(value, bool) else value
            said = hint(meant, self.names) if isinstance(meant, str) else self.hint
            raise ValueError(f"{name} must be one of {tuple(self.names)}, got {shown(value)}{said}")


@dataclass(frozen=True)
class Instance:
    """An object of a class.

    One that has `tokens_like` must be of the same tokens [..] as other arguments. A class may have
    a `remedy`, for errors about misplaced objects of it, an `of_tensor`, an `of_text`, an
    `of_list`, an `of_int` and an `of_float`, for a tensor, a string, a list and a number in its
    place, and a `made_of`, classes of the parts that its constructor takes, for parts in its place.
    An `of_tokens` is for one of as many tokens in another shape.

    Args:
        fields: those that must not be None, which the object's own `expect` looks at.
    """

    kind: type[Any]
    fields: tuple[str, ...] = ()

    @property
    def says(self) -> str:
        """Words for a table."""
        fields = f" with {' and '.join(self.fields)}" if self.fields else ""
        return f"`{self.kind.__name__}`{fields}"

    def check(self, name: str, value: Any, sizes: Sizes):
        """Raise TypeError unless the value is such an object, ValueError if it has other tokens."""
        if not isinstance(value, self.kind):
            said = made_of_value(self.kind, value) or two_copies(value, self.kind)
            raise TypeError(
                f"{name} must be {with_article(self.kind.__name__)}, got {type_name(value, said)}"
            )
        if self.fields:
            value.expect(name, self.fields)
        tokens = getattr(value, "tokens_like", None)
        if isinstance(tokens, torch.Tensor):
            known, first = sizes.setdefault("..", (tuple(tokens.shape), name))
            if known != tuple(tokens.shape):
                said = f"of tokens {list(known)} like {first}, got {list(tokens.shape)}"
                is_same = math.prod(known) == tokens.numel()
                remedy = getattr(self.kind, "of_tokens", "") * is_same
                raise ValueError(f"{name} must be {said}{remedy}")
            check_alike(name, "device", tokens.device, sizes)


@dataclass(frozen=True)
class Callables:
    """A function, not a class."""

    says = "a function"

    def check(self, name: str, value: Any, sizes: Sizes):
        """Raise TypeError unless the value can be called and is no class."""
        if not callable(value) or isinstance(value, type):
            raise TypeError(f"{name} must be a function, got {shown(value)}")


@dataclass(frozen=True)
class CheckedBy:
    """A value that a function accepts.

    Args:
        function: raises an error about (name of the argument, value); None: any value will do.
        names: keywords that a parameter ** hands on.
    """

    says: str
    function: Callable[[str, Any], None] | None = None
    names: Collection[str] | None = None

    def check(self, name: str, value: Any, sizes: Sizes):
        """Raise what the function raises."""
        if self.function is not None:
            self.function(name, value)


@dataclass(frozen=True)
class Names:
    """A tuple or list of names.

    Args:
        known: a function that returns the names there are.
        hint: of the error for others.
        unheard: of the error for a name that is like none of them.
        of: what an alias of these names is of.
    """

    says = "a tuple of names"
    known: Callable[[], Any] | None = None
    hint: str = ""
    unheard: str = ""
    of: str = "want"

    def check(self, name: str, value: Any, sizes: Sizes):
        """Raise TypeError for anything but a tuple of strings, ValueError for unknown ones."""
        if not isinstance(value, (tuple, list)) or not all(isinstance(x, str) for x in value):
            said = f": write ({value!r},)" if isinstance(value, str) else as_a_list(value)
            raise TypeError(f"{name} must be a tuple of names, got {shown(value)}{said}")
        if self.known is not None and (unknown := set(value) - set(self.known())):
            said = hints(unknown, self.known(), self.of) or self.unheard
            raise ValueError(
                f"{name} must be of {self.known()}, got {sorted(unknown)}{said}{self.hint}"
            )


@dataclass(frozen=True)
class Text:
    """A string, not empty."""

    says = "a string"

    def check(self, name: str, value: Any, sizes: Sizes):
        """Raise TypeError unless the value is such a string."""
        if not isinstance(value, str) or not value:
            raise TypeError(f"{name} must be a string, not empty, got {shown(value)}")


@dataclass(frozen=True)
class AnyOf:
    """A value that one of some lines takes, or None if it is optional."""

    lines: tuple[Any, ...]
    optional: bool

    @property
    def says(self) -> str:
        """Words for a table."""
        return ", or ".join([line.says for line in self.lines] + ["None"] * self.optional)

    def check(self, name: str, value: Any, sizes: Sizes):
        """Raise what the one line for values of this type raises, or a TypeError."""
        if value is None and self.optional:
            return
        tensors = [line for line in self.lines if isinstance(line, TensorLine)]
        meant = tensors if isinstance(value, torch.Tensor) and len(tensors) == 1 else self.lines
        for line in meant:
            try:
                return line.check(name, value, sizes)
            except TypeError:
                if len(meant) == 1:
                    raise
        said = self._made_of(value)
        said = said or self._of_another_copy(value) or (array_hint(value) if tensors else "")
        numbers = [line for line in self.lines if isinstance(line, NumberLine)]
        said = said or next(filter(None, [line.hint_of_other(value) for line in numbers]), "")
        takes_several = any(isinstance(line, (TupleOf, Names)) for line in self.lines)
        said = said or (as_a_list(value) if takes_several else "")
        raise TypeError(f"{name} must be {self.says}, got {shown(value, said)}")

    def _made_of(self, value) -> str:
        """Return the words of `made_of_value` for what stands in the place of an object, or of the
        first one in a tuple or list."""
        several = [line.line for line in self.lines if isinstance(line, TupleOf)]
        kinds = [line.kind for line in self.lines if isinstance(line, Instance)]
        kinds_of_parts = [line.kind for line in several if isinstance(line, Instance)]
        found = [made_of_value(kind, value) for kind in kinds]
        if type(value) in (tuple, list) and value:
            found += [made_of_value(kind, value[0]) for kind in kinds_of_parts]
        return max(found, default="")

    def _of_another_copy(self, value) -> str:
        """Return the words of `two_copies` for an object, or one in a tuple or list; "" for
        others."""
        lines = [line.line if isinstance(line, TupleOf) else line for line in self.lines]
        kinds = [line.kind for line in lines if isinstance(line, Instance)]
        parts = value if type(value) in (tuple, list) else [value]
        found = (two_copies(part, kind) for part in parts for kind in kinds)
        return next(filter(None, found), "")


Line: TypeAlias = (
    TensorLine
    | NumberLine
    | IntLine
    | OneOf
    | TupleOf
    | Instance
    | Callables
    | CheckedBy
    | Names
    | Text
    | AnyOf
)
PLAIN: dict[Any, Line] = {
    bool: OneOf((True, False)),
    float: NumberLine(),
    int: IntLine(),
    str: Text(),
    Callable: Callables(),
}
