"""`checked` and `described`: public functions and classes whose annotations are lines."""

import dataclasses
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, Union

import torch

from .aliases import KEYWORDS, refuse_keywords, synonym
from .lines import PLAIN, AnyOf, Instance, Line, OneOf, Sizes, TensorLine

F = TypeVar("F", bound=Callable[..., Any])


def line_of(annotation: Any) -> Line | None:
    """Return the line that a resolved annotation is, or None if it says too little."""
    if typing.get_origin(annotation) is Annotated:
        said = next((x for x in annotation.__metadata__ if not isinstance(x, str)), None)
        return line_of(annotation.__origin__) if said is None else said
    if typing.get_origin(annotation) in (Union, types.UnionType):
        members = typing.get_args(annotation)
        lines = [line_of(member) for member in members if member is not type(None)]
        known = tuple(line for line in lines if line is not None)
        optional = type(None) in members
        return AnyOf(known, optional) if len(known) == len(lines) else None
    plain = PLAIN.get(typing.get_origin(annotation) or annotation)
    if (
        plain is None
        and isinstance(annotation, type)
        and annotation not in (torch.Tensor, tuple, dict, list)
    ):
        return Instance(annotation)
    return plain


def _hints(function: Any) -> dict[str, Any]:
    """Annotations of a function, of a dataclass's or named tuple's fields or of a class's
    constructor, resolved."""
    if dataclasses.is_dataclass(function) or hasattr(function, "_fields"):
        return typing.get_type_hints(function, include_extras=True)
    plain: Any = inspect.unwrap(
        vars(function)["__init__"] if isinstance(function, type) else function
    )
    # maybe a class to come
    known = {name: hint for name, hint in plain.__annotations__.items() if name != "return"}
    return typing.get_type_hints(
        types.SimpleNamespace(__annotations__=known), plain.__globals__, include_extras=True
    )


def lines_of(function: Callable[..., Any]) -> dict[str, Line]:
    """Return the lines of a function's or class's parameters by name. TypeError for an annotation
    that is no line."""
    hints, lines = _hints(function), {}
    for name, parameter in inspect.signature(function).parameters.items():
        line = line_of(hints.get(name))
        if line is not None:
            lines[name] = line
        elif name not in ("cls", "self") and parameter.kind is not parameter.VAR_KEYWORD:
            raise TypeError(
                f"{function.__qualname__}: the annotation of {name} must be a line, got "
                f"{hints.get(name)}"
            )
    return lines


def described(function: F) -> F:
    """Decorate a public function whose call checks its arguments itself, after ranks can tell each
    other of an error.

    It gets the lines, its docstring an entry for each argument, an unknown keyword an error that
    says what to write.
    """
    names = KEYWORDS[function.__qualname__] = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args, **kwargs):
        if not torch.compiler.is_compiling() and not kwargs.keys() <= names:
            refuse_keywords(function, kwargs.keys() - names, False)
        return function(*args, **kwargs)

    result: Any = call
    result.lines, result.names = lines_of(function), names
    result.__doc__ = _with_arguments(function, result.lines)
    return result


_WRITTEN: dict[str, dict[str, str]] = {}  # by function, what is written about its arguments
# by module and name; torch.compile takes no closure of lines
_LINES: dict[str, dict[str, Line]] = {}
# in the same way, names of the arguments that are constants
_DETACHED: dict[str, frozenset[str]] = {}


def checked(function: F) -> F:
    """Decorate a public function or class: each argument of a call is checked by its line, in an
    error that names it, and detached where its line says so.

    The docstring gets an entry for each argument, a dataclass `tensors`: fields that may hold one
    -> sharded dimension.
    """
    is_class, key = isinstance(function, type), f"{function.__module__}.{function.__qualname__}"
    lines = _LINES[key] = lines_of(function)
    _DETACHED[key] = frozenset(
        name for name, line in lines.items() if getattr(_tensor_line(line), "detached", False)
    )
    target: Any = function.__init__ if is_class else function
    parameters, owner = inspect.signature(target).parameters, getattr(function, "called", "")
    others = [
        getattr(lines.get(x.name), "names", None)
        for x in parameters.values()
        if x.kind == x.VAR_KEYWORD
    ]
    names = tuple(parameters)
    known = KEYWORDS[function.__qualname__] = frozenset().union(names, *filter(None, others))

    @functools.wraps(target)
    def call(*args, **kwargs):
        # torch.compile cannot look at the lines within a constructor
        if is_class and torch.compiler.is_compiling():
            return target(*args, **kwargs)
        given: dict[str, Any] = {**dict(zip(names, args)), **kwargs}
        if not torch.compiler.is_compiling() and not kwargs.keys() <= known:
            refuse_keywords(function, kwargs.keys() - known, None in others)
        sizes: Sizes = {}
        for name, line in _LINES[key].items():
            if name not in given:
                continue
            value = given[name]
            if isinstance(line, OneOf) and isinstance(value, str):
                value = synonym(value, line.names)
            elif name in _DETACHED[key] and isinstance(value, torch.Tensor) and value.requires_grad:
                value = value.detach()
            if value is not given[name]:
                given[name] = value
                args, kwargs = (), given
            line.check(owner + name, value, sizes)
        return target(*args, **kwargs)

    result: Any = call
    if isinstance(function, type):
        result = function
        result.__init__ = call
        found = {name: _tensor_line(line_of(hint)) for name, hint in _hints(function).items()}
        if dataclasses.is_dataclass(function):
            result.tensors = {
                name: line.sharded for name, line in found.items() if line is not None
            }
    result.lines = lines
    result.__doc__ = _with_arguments(function, lines)
    return result


def _tensor_line(line: Line | None) -> TensorLine | None:
    """The line of a tensor in a line."""
    return next((x for x in getattr(line, "lines", (line,)) if isinstance(x, TensorLine)), None)


def meaning_of(annotation: Any) -> str:
    """Words of a resolved annotation about what the argument means."""
    if typing.get_origin(annotation) is Annotated:
        return " ".join(x for x in annotation.__metadata__ if isinstance(x, str))
    members = (
        typing.get_args(annotation)
        if typing.get_origin(annotation) in (Union, types.UnionType)
        else ()
    )
    return " ".join(filter(None, map(meaning_of, members)))


def _with_arguments(function, lines: dict[str, Line]) -> str:
    """Return a function's docstring whose section "Args" has an entry for each argument: its line,
    what it means, and the entry that is written there, or in the function of "as in `function`";
    and a section "Returns", where there is none, of what the annotation of the result says."""
    doc, hints = inspect.cleandoc(function.__doc__ or "") + "\n", _hints(function)
    section = re.search(r"^Args:\n((?: {4}.*\n)*)", doc, re.M)
    found = re.findall(
        r"^ {4}([\w, ]+): ((?:.*\n)(?: {8}.*\n)*)", "" if section is None else section[1], re.M
    )
    written = {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}
    for name, text in written.items():
        same = re.match(r"as in `(\w+)`[.;]? ?", text)
        if same and name in (meant := _WRITTEN.get(same[1], {})):
            written[name] = (
                f"{meant[name].removesuffix('.')}. {_sentence(text[same.end() :])}".rstrip()
            )
    _WRITTEN[function.__name__] = written
    entries = ""
    for name in dict.fromkeys((*lines, *written)):
        said = (lines[name].says, meaning_of(hints[name])) if name in lines else ()
        words = "".join(f"{part}. " for part in said if part) + _sentence(written.get(name, ""))
        entry = f"{name}: {' '.join(words.split())}"
        entries += (
            textwrap.fill(entry, 108, initial_indent="    ", subsequent_indent=" " * 8) + "\n"
        )
    following = re.search(r"^(Returns|Raises|Examples|Source):", doc, re.M)
    start, end = (
        section.span() if section else (len(doc) if following is None else following.start(),) * 2
    )
    result = "" if re.search("^Returns:", doc, re.M) else _result_of(function)
    entries = f"Args:\n{entries}" * bool(entries)
    entries += f"\nReturns:\n    {result}.\n" * bool(result)
    return doc[:start] + entries.lstrip("\n") + "\n" * (section is None) + doc[end:].rstrip()


def _result_of(function) -> str:
    """Words of a function's annotation about what it returns, "" if that says too little."""
    plain = inspect.unwrap(function)
    # a class has no globals
    said = getattr(plain, "__globals__", {}).get(plain.__annotations__.get("return"))
    return meaning_of(said) or getattr(line_of(said), "says", "")


def lines_within(function: Any) -> dict[str, Line]:
    """Return the lines of a checked function, or of the one that a partial hands on; none of
    others."""
    if isinstance(function, functools.partial):
        return next(filter(None, map(lines_within, (function.func, *function.args))), {})
    return getattr(function, "lines", {})


def _sentence(text: str) -> str:
    """The text with a capital letter, unless it begins with a symbol of one letter."""
    return text if text[1:2] == " " else text[:1].upper() + text[1:]
