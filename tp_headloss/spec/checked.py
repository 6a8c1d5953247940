"""`checked` and `described`: public functions and classes whose annotations are lines."""

import dataclasses
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar, Union

import torch

from .aliases import KEYWORDS, synonym
from .calls import TOO_MANY, arities_of, names_of, refuse_call
from .lines import PLAIN, AnyOf, Instance, Line, OneOf
from .tensor_line import Sizes, TensorLine

F = TypeVar("F", bound=Callable[..., Any])


def line_of(annotation: Any) -> Line | None:
    """Return the line that a resolved annotation is, or None if it says too little."""
    if typing.get_origin(annotation) is Annotated:
        said = next((x for x in annotation.__metadata__ if not isinstance(x, str)), None)
        return line_of(annotation.__origin__) if said is None else said
    if typing.get_origin(annotation) is Literal:
        names = typing.get_args(annotation)
        # synonyms are there for type checkers: a call never gets so far with one
        return OneOf(tuple(x for x in names if synonym(x, [y for y in names if y != x]) == x))
    if typing.get_origin(annotation) in (Union, types.UnionType):
        members = typing.get_args(annotation)
        lines = [line_of(member) for member in members if member is not type(None)]
        known = tuple(line for line in lines if line is not None)
        optional = type(None) in members
        return AnyOf(known, optional) if len(known) == len(lines) else None
    plain = PLAIN.get(typing.get_origin(annotation) or annotation)
    says_enough = annotation not in (torch.Tensor, tuple, dict, list)
    if plain is None and isinstance(annotation, type) and says_enough:
        return Instance(annotation)
    return plain


def _hints(function: Any) -> dict[str, Any]:
    """Return the annotations of a function, resolved.

    Those of a dataclass or named tuple are of its fields, those of another class of its
    constructor.
    """
    if dataclasses.is_dataclass(function) or hasattr(function, "_fields"):
        return typing.get_type_hints(function, include_extras=True)
    target = vars(function)["__init__"] if isinstance(function, type) else function
    plain: Any = inspect.unwrap(target)
    # the result may be of a class to come
    known = {name: hint for name, hint in plain.__annotations__.items() if name != "return"}
    annotated = types.SimpleNamespace(__annotations__=known)
    return typing.get_type_hints(annotated, plain.__globals__, include_extras=True)


def lines_of(function: Callable[..., Any]) -> dict[str, Line]:
    """Return the lines of a function's or class's parameters by name.

    TypeError for an annotation that is no line.
    """
    hints = _hints(function)
    lines = {}
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


def called_as(forward: F) -> Callable[[Callable[..., Any]], F]:
    """For type checkers alone: decorate the ``__call__`` of a module, which takes what forward takes.

    nn.Module's own takes and returns anything, so that a wrong keyword is not found.
    """
    return lambda _: forward


def described(function: F) -> F:
    """Decorate a public function whose call checks its arguments itself.

    It does so after ranks can tell each other of an error. It gets the lines, its docstring an
    entry for each argument, an unknown keyword an error that says what to write, and one that is
    missing an error that says what it is.
    """
    parameters = inspect.signature(function).parameters
    lines = lines_of(function)
    handed_on = frozenset().union(*filter(None, _keywords_handed_on(parameters.values(), lines)))
    KEYWORDS[function.__qualname__] = handed_on.union(names_of(parameters.values()))
    arities = arities_of(parameters.values(), handed_on)

    @functools.wraps(function)
    def call(*args, **kwargs):
        if not torch.compiler.is_compiling():
            needed, allowed = arities.get(len(args), TOO_MANY)
            if not needed <= kwargs.keys() <= allowed:
                refuse_call(function, arities, lines, args, kwargs)
        return function(*args, **kwargs)

    result: Any = call
    result.lines = lines
    result.arities = arities
    result.__doc__ = _with_arguments(function, result.lines)
    return result


_WRITTEN: dict[str, dict[str, str]] = {}  # by function, what is written about its arguments
# by module and name; torch.compile takes no closure of lines
_LINES: dict[str, dict[str, Line]] = {}
# in the same way, names of the arguments that are constants
_DETACHED: dict[str, frozenset[str]] = {}


def checked(function: F) -> F:
    """Decorate a public function or class whose arguments are checked by their lines.

    An error names the argument, and an argument is detached where its line says so. The docstring
    gets an entry for each argument, a dataclass `tensors`: fields that may hold one -> sharded
    dimension.
    """
    key = f"{function.__module__}.{function.__qualname__}"
    lines = _LINES[key] = lines_of(function)
    _DETACHED[key] = frozenset(name for name, line in lines.items() if _is_detached(line))
    if isinstance(function, type):
        result: Any = function
        result.__init__ = _checking(function, result.__init__, key)
        if dataclasses.is_dataclass(function):
            result.tensors = _sharded_dims(function)
    else:
        result = _checking(function, function, key)
    result.lines = lines
    result.__doc__ = _with_arguments(function, lines)
    return result


def _checking(function: Any, target: Any, key: str) -> Any:
    """Return the target, a function or the constructor of a class, with checks of its arguments."""
    is_class = isinstance(function, type)
    owner = getattr(function, "called", "")
    parameters = inspect.signature(target).parameters
    names = tuple(parameters)
    others = _keywords_handed_on(parameters.values(), _LINES[key])
    handed_on = frozenset().union(*filter(None, others))
    KEYWORDS[function.__qualname__] = handed_on.union(names_of(parameters.values()))
    arities = arities_of(parameters.values(), handed_on)

    @functools.wraps(target)
    def call(*args, **kwargs):
        # torch.compile cannot look at the lines within a constructor
        if is_class and torch.compiler.is_compiling():
            return target(*args, **kwargs)
        given: dict[str, Any] = {**dict(zip(names, args)), **kwargs}
        if not torch.compiler.is_compiling():
            needed, allowed = arities.get(len(args), TOO_MANY)
            if not needed <= kwargs.keys() <= allowed:
                refuse_call(function, arities, _LINES[key], args, kwargs, None in others)
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
            try:
                line.check(owner + name, value, sizes)
            except TypeError as error:
                if place := _place_of(value, _LINES[key]):
                    raise TypeError(f"{error}: write {place}={value!r}") from None
                raise
        return target(*args, **kwargs)

    return call


def _place_of(value: Any, lines: dict[str, Line]) -> str | None:
    """Return the argument that takes this string, which was given as another one."""
    if not isinstance(value, str):
        return None
    takes = [name for name, x in lines.items() if isinstance(x, OneOf) and value in x.names]
    return takes[0] if len(takes) == 1 else None


def _keywords_handed_on(parameters: Iterable[inspect.Parameter], lines: dict[str, Line]) -> list:
    """Return the names that a parameter ** takes, if there is one; None in the list: any names."""
    names = [x.name for x in parameters if x.kind == x.VAR_KEYWORD]
    return [getattr(lines.get(name), "names", None) for name in names]


def _tensor_line(line: Line | None) -> TensorLine | None:
    """Return the line of a tensor in a line, None if there is none."""
    return next((x for x in getattr(line, "lines", (line,)) if isinstance(x, TensorLine)), None)


def _is_detached(line: Line) -> bool:
    return getattr(_tensor_line(line), "detached", False)


def _sharded_dims(dataclass: Any) -> dict[str, int | None]:
    """Return the fields of a dataclass that may hold tensors, with their sharded dimension."""
    lines = {name: _tensor_line(line_of(hint)) for name, hint in _hints(dataclass).items()}
    return {name: line.sharded for name, line in lines.items() if line is not None}


def meaning_of(annotation: Any) -> str:
    """Return the words of a resolved annotation about what the argument means."""
    if typing.get_origin(annotation) is Annotated:
        return " ".join(x for x in annotation.__metadata__ if isinstance(x, str))
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return " ".join(filter(None, map(meaning_of, typing.get_args(annotation))))
    return ""


def _with_arguments(function, lines: dict[str, Line]) -> str:
    """Return a function's docstring with sections "Args" and "Returns".

    "Args" has an entry for each argument: its line, what it means, and the entry that is written
    there, or in the function of "as in `function`". "Returns", if it is not written, is what the
    annotation of the result says.
    """
    doc = inspect.cleandoc(function.__doc__ or "") + "\n"
    hints = _hints(function)
    section = re.search(r"^Args:\n((?: {4}.*\n)*)", doc, re.M)
    written = {} if section is None else _entries_of(section[1], function.__qualname__)
    _WRITTEN[function.__name__] = written
    entries = ""
    for name in dict.fromkeys((*lines, *written)):
        said = (lines[name].says, meaning_of(hints[name])) if name in lines else ()
        text = written.get(name, "")
        # what the text says itself is said once
        news = [part for part in said if part and not text.lower().startswith(part.lower())]
        words = "".join(f"{part}. " for part in news) + _sentence(text)
        entry = f"{name}: {' '.join(words.split())}"
        filled = textwrap.fill(entry, 108, initial_indent="    ", subsequent_indent=" " * 8)
        entries += f"{filled}\n"
    sections = f"Args:\n{entries}" * bool(entries)
    result = "" if re.search("^Returns:", doc, re.M) else _result_of(function)
    sections += f"\nReturns:\n    {result}.\n" * bool(result)
    sections = sections.lstrip("\n")
    if section is not None:
        return doc[: section.start()] + sections + doc[section.end() :].rstrip()
    following = re.search(r"^(Returns|Raises|Examples|Source):", doc, re.M)
    end = len(doc) if following is None else following.start()
    return doc[:end] + sections + "\n" + doc[end:].rstrip()


def _entries_of(section: str, owner: str) -> dict[str, str]:
    """Return the text about each argument that a section "Args" has, "as in" another's included.

    Raises TypeError for a line that belongs to no argument. owner: of the error.
    """
    entry = r"^ {4}([\w, ]+): ((?:.*\n)(?: {8}.*\n)*)"
    if rest := re.sub(entry, "", section, flags=re.M).strip():
        raise TypeError(
            f"{owner}: lines of an argument must be indented below its name, got {rest[:60]!r}"
        )
    found = re.findall(entry, section, re.M)
    written = {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}
    for name, text in written.items():
        same = re.match(r"as in `(\w+)`[.;]? ?", text)
        meant = _WRITTEN.get(same[1], {}) if same else {}
        if same and name in meant:
            more = _sentence(text[same.end() :])
            written[name] = f"{meant[name].removesuffix('.')}. {more}".rstrip()
    return written


def _result_of(function) -> str:
    """Return the words of an annotation about a function's result, "" if it says too little."""
    plain = inspect.unwrap(function)
    # a class has no globals
    said = getattr(plain, "__globals__", {}).get(plain.__annotations__.get("return"))
    return meaning_of(said) or getattr(line_of(said), "says", "")


def lines_within(function: Any) -> dict[str, Line]:
    """Return the lines of a checked function, or of the one that a partial hands on.

    Other functions have none.
    """
    if isinstance(function, functools.partial):
        return next(filter(None, map(lines_within, (function.func, *function.args))), {})
    return getattr(function, "lines", {})


def _sentence(text: str) -> str:
    """The text with a capital letter, unless it begins with a symbol of one letter."""
    return text if text[1:2] == " " else text[:1].upper() + text[1:]
