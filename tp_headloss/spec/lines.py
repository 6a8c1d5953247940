"""Lines: what an argument may be. They read metadata and numbers, never a tensor's values."""

import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from .aliases import hint
from .checks import FP32_MAX, expect_dense, is_number
from .words import shown, type_name, with_article

# symbol of a shape -> its size, and the name of the argument that set it
Sizes: TypeAlias = dict[str, tuple[Any, str]]


def sizes_of(name: str, x: torch.Tensor, lead: Sequence[int], **others: int) -> Sizes:
    """Sizes that the tokens [*lead] of a tensor set, its device, and others by their symbols."""
    known: Sizes = {"..": (tuple(lead), name), "device": (x.device, name)}
    return known | {symbol: (size, name) for symbol, size in others.items()}


DTYPES: dict[str, Callable[[torch.dtype], bool]] = {
    "floating point": lambda dtype: dtype.is_floating_point,
    "int64 or int32": lambda dtype: dtype in (torch.int64, torch.int32),
    "bool": lambda dtype: dtype == torch.bool,
    "bool or integers": lambda dtype: not dtype.is_floating_point and not dtype.is_complex,
    "real numbers or bool": lambda dtype: not dtype.is_complex,
    "real numbers": lambda dtype: not dtype.is_complex and dtype != torch.bool,
}

CASTS = {"bool": ".bool()", "int64 or int32": ".long()", "real numbers": ".float()"}


@dataclass(frozen=True)
class TensorLine:
    """A tensor.

    Args:
        kind: name in `DTYPES`.
        shape: symbols, set by the first argument with one, and numbers; "..": any dimensions. None:
            not checked here.
        broadcasts: sizes of 1, or no dimension at all, will do.
        sharded: the dimension that is sharded on the vocabulary; None: replicated.
        constant: it gets no gradient, so that one that requires it is an error.
        detached: it is a constant to the function, whose call detaches it.
        hint: of the error for anything but a tensor.
    """

    kind: str
    shape: tuple[str | int, ...] | None = ("..",)
    broadcasts: bool = False
    sharded: int | None = None
    constant: bool = False
    detached: bool = False
    hint: str = ""

    @property
    def says(self) -> str:
        """Words for a table: shape, dtype and sharding, and whether it is detached."""
        if self.shape is None:
            shape = "a tensor of "
        elif self.shape == ():
            shape = "a scalar tensor of "
        else:
            shape = f"[{', '.join(map(str, self.shape))}] "
        constant = "constant " * self.detached
        sharded = " sharded on V" * (self.sharded is not None)
        broadcasts = ", or sizes of 1" * self.broadcasts
        return f"{constant}{shape}{self.kind}{sharded}{broadcasts}"

    def check(self, name: str, x: Any, sizes: Sizes):
        """Raise TypeError or ValueError unless x is such a tensor."""
        if not isinstance(x, torch.Tensor):
            raise TypeError(
                f"{name} must be a tensor, got {type(x).__name__}{self._object_hint(x)}"
            )
        expect_dense(name, x)
        if not DTYPES[self.kind](x.dtype):
            raise TypeError(f"{name} must be {self.kind}, got {x.dtype}{self._dtype_hint(x)}")
        if self.constant and x.requires_grad:
            raise ValueError(f"{name} gets no gradient: pass {name}.detach()")
        if self.shape is not None:
            self._check_shape(name, x, sizes)
        # torch takes other scalars of the CPU
        if x.dim() or x.is_meta or (self.shape and not self.broadcasts):
            self._check_device(name, x, sizes)

    def _object_hint(self, x) -> str:
        """Return what to pass in the place of an object that is no tensor."""
        for part in ("weight", "log_prob"):
            if hasattr(x, part):
                return f": pass its .{part}"
        return self.hint

    def _dtype_hint(self, x) -> str:
        """Return what to pass in the place of a tensor of another dtype."""
        if x.dtype == torch.bool and self.kind == "int64 or int32":
            return ": ids, not a mask (torch.where(mask, labels, -100), or mask.nonzero()[:, 0])"
        has_cast = self.kind in CASTS and not x.is_complex()
        return f": pass its {CASTS[self.kind]}" if has_cast else ""

    def _check_device(self, name, x, sizes):
        """Raise ValueError for another device, or for meta beside values if no shape says more."""
        if self.shape is not None:
            _check_alike(name, "device", x.device, sizes)
        else:
            kind = "meta" if x.is_meta else "a device with values"
            _check_alike(name, "kind of device", kind, sizes)

    def _check_shape(self, name, x, sizes):
        """Raise ValueError unless x has the sizes that are known; note those that it sets."""
        assert self.shape is not None
        setters = dict.fromkeys(sizes[symbol][1] for symbol in self.shape if symbol in sizes)
        tail = self._tail
        own_lead = tuple(x.shape[: max(x.dim() - len(tail), 0)])
        own_tail = dict(zip(tail, x.shape[len(own_lead) :]))
        lead = sizes.setdefault("..", (own_lead, name))[0] if ".." in self.shape else ()
        known = {symbol: sizes[symbol][0] for symbol in tail if symbol in sizes}
        numbers = {size: size for size in tail if isinstance(size, int)}
        values = own_tail | known | numbers
        expected = (*lead, *(values.get(symbol) for symbol in tail))
        if not self._fits(x.shape, expected):
            if self.broadcasts:
                raise ValueError(
                    f"{name} must broadcast to the tokens {list(expected)} with as many "
                    f"dimensions, got {list(x.shape)}: a value per row is [B, 1]"
                )
            shape = ", ".join(str(known.get(symbol, symbol)) for symbol in (*lead, *tail))
            of = " of " * bool(setters) + " and ".join(setters)
            said = self._shape_hint(x, lead, expected)
            raise ValueError(f"{name} must have shape [{shape}]{of}, got {list(x.shape)}{said}")
        for symbol, size in own_tail.items():
            if isinstance(symbol, str):
                sizes.setdefault(symbol, (size, name))

    @property
    def _tail(self) -> tuple[str | int, ...]:
        """Symbols and numbers of the dimensions after those of the tokens."""
        return tuple(size for size in self.shape or () if size != "..")

    def _fits(self, shape, expected) -> bool:
        """Return True for the expected sizes, or, where it broadcasts, sizes of 1 or none."""
        if self.broadcasts and len(shape) == 0:
            return True
        if len(shape) != len(expected):
            return False
        return all(n == e or (self.broadcasts and n == 1) for n, e in zip(shape, expected))

    def _shape_hint(self, x, lead, expected) -> str:
        """Return what to pass in the place of a tensor of another shape, if that is likely."""
        as_many = x.dim() == len(expected)
        if self.sharded is not None and as_many and x.shape[self.sharded] > expected[self.sharded]:
            place = "..., " * (self.sharded == -1)
            return f": of the whole vocabulary? Pass its [{place}shard.start:shard.stop]"
        if lead != expected or not lead:
            return ""
        sizes = ", ".join(map(str, lead))
        if x.dim() == 0 or (as_many and all(n in (1, e) for n, e in zip(x.shape, lead))):
            return f": pass its .expand({sizes})"
        same = [n for n in x.shape if n != 1] == [n for n in lead if n != 1]
        is_flat = x.dim() == 1 and len(x) == math.prod(lead)
        return f": pass its .reshape({sizes})" * (same or is_flat)


@dataclass(frozen=True)
class NumberLine:
    """A number in [low, high], of Python or numpy; NaN is in no range.

    Args:
        hint: of the error for one out of range.
        in_fp32: tensors in fp32 are compared with it, so that a finite number is one in fp32.
    """

    low: float = -math.inf
    high: float = math.inf
    says: str = "a number"
    hint: str = ""
    in_fp32: bool = False

    def check(self, name: str, value: Any, sizes: Sizes):
        """Raise TypeError for anything but a number, and ValueError for one out of range."""
        if not is_number(value):
            raise TypeError(f"{name} must be a number, got {shown(value)}")
        if not isinstance(value, int):  # which may be too large for a float
            value = float(value)  # NumPy would round the bounds to the value's type
        if not self.low <= value <= self.high:
            raise ValueError(f"{name} must be {self.says}, got {value}{self.hint}")
        if self.in_fp32 and FP32_MAX < abs(value) < math.inf:
            raise ValueError(
                f"{name} must be {self.says}, of at most {FP32_MAX:.4g} or infinite, got {value}"
            )


@dataclass(frozen=True)
class TupleOf:
    """A tuple or list of values of one line.

    Args:
        count: how many; None: any number.
        ordered: the first number is the lowest.
    """

    line: Any
    count: int | None = None
    ordered: bool = False

    @property
    def says(self) -> str:
        """Words for a table."""
        if self.ordered:
            return "(lowest, highest)"
        if self.count is None:
            return f"a tuple or list, each {self.line.says}"
        each = "" if self.line.says == "a number" else f", each {self.line.says}"
        return f"{self.count} numbers{each}"

    def check(self, name: str, value: Any, sizes: Sizes):
        """Raise TypeError or ValueError unless the value is such a tuple."""
        if not isinstance(value, (tuple, list)) or len(value) != (self.count or len(value)):
            if self.count is None:
                raise TypeError(f"{name} must be a tuple or list, got {type(value).__name__}")
            both = f": for both, ({value}, {value})" if self.count == 2 and is_number(value) else ""
            raise TypeError(
                f"{name} must be {self.count} {_PLURALS[type(self.line)]}, got {shown(value)}{both}"
            )
        for part in value:
            self.line.check(f"each of {name}", part, sizes)
        if self.ordered and not value[0] <= value[1]:
            raise ValueError(f"{name} must be (lowest, highest), got {value}")


_PLURALS = {
    NumberLine: "numbers, such as (0.2, 0.28)",
    TupleOf: "pairs of numbers, such as ((2.0, 3.0), (3.0, 2.0))",
}


@dataclass(frozen=True)
class IntLine:
    """An integer in [low, high], of Python or numpy. hint: of the error for one out of range."""

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
            raise TypeError(f"{name} must be an int, got {shown(value)}") from None
        if not self.low <= number <= self.high:
            bound = f"at most {self.high}" if number > self.high else f"at least {self.low}"
            expected = "in the range of int64" if self.low < 0 else bound
            raise ValueError(f"{name} must be {expected}, got {number}{self.hint}")


@dataclass(frozen=True)
class OneOf:
    """One of some names, or a flag. A dictionary of names may grow."""

    names: Collection[Any]

    @property
    def says(self) -> str:
        """Words for a table."""
        return " or ".join(map(repr, self.names))

    def check(self, name: str, value: Any, sizes: Sizes):
        """Raise ValueError for anything but one of the names, TypeError for no flag."""
        if self.names == (True, False):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {shown(value)}")
        elif not isinstance(value, str) or value not in self.names:
            raise ValueError(
                f"{name} must be one of {tuple(self.names)}, got "
                f"{shown(value)}{hint(value, self.names)}"
            )


@dataclass(frozen=True)
class Instance:
    """An object of a class.

    One that has `tokens_like` must be of the same tokens [..] as other arguments. A class may have
    a `remedy`, for errors about misplaced objects of it, and an `of_tensor`, for a tensor in its
    place.
    """

    kind: type

    @property
    def says(self) -> str:
        """Words for a table."""
        return f"`{self.kind.__name__}`"

    def check(self, name: str, value: Any, sizes: Sizes):
        """Raise TypeError unless the value is such an object, ValueError if it has other tokens."""
        if not isinstance(value, self.kind):
            said = getattr(self.kind, "of_tensor", "") if isinstance(value, torch.Tensor) else ""
            raise TypeError(
                f"{name} must be {with_article(self.kind.__name__)}, got {type_name(value)}{said}"
            )
        tokens = getattr(value, "tokens_like", None)
        if isinstance(tokens, torch.Tensor):
            known, first = sizes.setdefault("..", (tuple(tokens.shape), name))
            if known != tuple(tokens.shape):
                raise ValueError(
                    f"{name} must be of tokens {list(known)} like {first}, got {list(tokens.shape)}"
                )
            _check_alike(name, "device", tokens.device, sizes)


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
    """

    says = "names"
    known: Callable[[], Any] | None = None
    hint: str = ""

    def check(self, name: str, value: Any, sizes: Sizes):
        """Raise TypeError for anything but a tuple of strings, ValueError for unknown ones."""
        if not isinstance(value, (tuple, list)) or not all(isinstance(x, str) for x in value):
            said = f": write ({value!r},)" if isinstance(value, str) else ""
            raise TypeError(f"{name} must be a tuple of names, got {shown(value)}{said}")
        if self.known is not None and (unknown := set(value) - set(self.known())):
            raise ValueError(f"{name} must be of {self.known()}, got {sorted(unknown)}{self.hint}")


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
        kinds = [line.kind for line in self.lines if isinstance(line, Instance)]
        remedies = [getattr(kind, "of_tensor", "") for kind in kinds]
        said = max(remedies, default="") if isinstance(value, torch.Tensor) else ""
        raise TypeError(f"{name} must be {self.says}, got {shown(value)}{said}")


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


def _check_alike(name: str, symbol: str, device, sizes: Sizes):
    """Raise ValueError unless the device, or the kind of it, is that of the first tensor."""
    expected, first = sizes.setdefault(symbol, (device, name))
    if device != expected:
        kind = getattr(device, "type", device)
        expected_kind = getattr(expected, "type", expected)
        if kind != expected_kind:  # without numbers of devices: the same on all ranks
            device = kind
            expected = expected_kind
        raise ValueError(f"{name} must be on {expected} like {first}, got {device}")
