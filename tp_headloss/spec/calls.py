"""Which arguments a call of a public function must have and may have, before each is looked at.

Python's own error for a call without an argument says its name alone. The one here says what the
argument is, too.
"""

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from .alias_table import HOSTS
from .aliases import (
    ALIASES,
    INSTALLATIONS,
    KEYWORDS,
    MADE_BY,
    OF_CALLS,
    OF_HIDDEN_STATES,
    PLACES,
    RECORDS,
    hint,
)


class Arity(NamedTuple):
    """Names of arguments that a call with some number of them by position takes besides."""

    needed: frozenset[str]
    allowed: frozenset[str]


# of more arguments by position than there are: no keywords have a name that is needed
TOO_MANY = Arity(frozenset({""}), frozenset())


def names_of(parameters: Iterable[inspect.Parameter]) -> list[str]:
    """Return the names by which a call gives arguments: the name of a parameter ** is none."""
    return [x.name for x in parameters if x.kind != x.VAR_KEYWORD]


def arities_of(parameters: Iterable[inspect.Parameter], more: Iterable[str] = ()) -> dict:
    """Return the `Arity` of a call by the number of its arguments by position.

    more: names that the function hands on.
    """
    parameters = [x for x in parameters if x.kind != x.VAR_KEYWORD]
    places = [x.name for x in parameters if x.kind == x.POSITIONAL_OR_KEYWORD]
    required = [x.name for x in parameters if x.default is x.empty]
    names = {x.name for x in parameters} | {*more}
    found = {}
    for count in range(len(places) + 1):
        filled = {*places[:count]}
        found[count] = Arity(frozenset(required) - filled, frozenset(names - filled))
    return found


def refuse_call(
    function: Any,
    arities: dict[int, Arity],
    lines: Mapping[str, Any],
    args: tuple,
    kwargs: Mapping[str, Any],
    takes_others: bool = False,
):
    """Raise TypeError, with what is expected and what was given, for a call that its `Arity` does
    not take.

    takes_others: the function hands keywords of any name on.
    """
    known = arities[0]
    most = max(arities)
    left = arities[min(len(args), most)].allowed - kwargs.keys()
    refuse_keywords(function, kwargs.keys() - known.allowed, left, takes_others)
    # in the order of the signature
    names = [x for x in inspect.signature(function).parameters if x in known.allowed]
    names += sorted(known.allowed - {*names})  # which the function hands on
    owner = f"{function.__qualname__.removesuffix('.__init__')}()"
    filled = [name for name in names if name not in arities[min(len(args), most)].allowed]
    if len(args) > most:
        rest = [f"{name}=.." for name in names if name not in filled]
        by_name = f": write {', '.join(rest)} for others" if rest else ""
        places = ", ".join(_own(filled)) or "no argument"
        extra = len(args) - most
        said = _as_one_list(function, args) or _as_linear(function, args) or by_name
        raise TypeError(f"{owner} takes {places} by position, got {extra} more{said}")
    if twice := [name for name in filled if name in kwargs]:
        raise TypeError(f"{owner} must get {twice[0]} once, got it by position and by name")
    if missing := arities[len(args)].needed - kwargs.keys():
        wanted = [f"{name} ({lines[name].says})" for name in names if name in missing]
        given = [*_own(filled), *kwargs]
        got = ", ".join(given) or "no arguments"
        maker = MADE_BY.get(owner.removesuffix("()"))
        values = args[1:] if "self" in filled else args
        remedies = [getattr(type(x), "remedy", "") for x in values]
        if any(isinstance(x, torch.return_types.topk) for x in values):
            remedies = [f": of torch's topk write {owner.removesuffix('()')}(x.indices, x.values)"]
        said = f": write {maker}" if maker else next(filter(None, remedies), "")
        raise TypeError(f"{owner} must have {', '.join(wanted)}, got {got}{said}")


def refuse_keywords(function, unknown: Iterable[str], left: Collection[str], takes_others: bool):
    """Raise TypeError for an unknown keyword, with what to write as far as that is known.

    Args:
        left: names of arguments that the call has not given.
        takes_others: the function hands keywords on, so that only those with known words are wrong.
    """
    name = function.__qualname__
    for keyword in sorted(unknown, key=lambda x: (x not in HOSTS, x)):
        write = next(_where_it_belongs(function, keyword), None)
        if write is None and takes_others:
            continue
        said = f": write {write}" if write else hint(keyword, left, "keyword")
        said = said or _what_there_is(function)
        raise TypeError(f"{name}() got an unexpected keyword argument {keyword!r}{said}")


def _where_it_belongs(function, keyword: str) -> Iterator[str]:
    """Yield what to write for a keyword that a function does not take, the likeliest first."""
    name = function.__qualname__
    result = getattr(function, "__annotations__", {}).get("return")
    yield from (x.ours for x in ALIASES if x.name == keyword and name in x.of.split(", "))
    if {name, result} & OF_CALLS:
        for place, text in PLACES.items():
            if keyword in KEYWORDS.get(place, ()):
                yield text.format(keyword)
    for parameter, record in RECORDS.items():
        if keyword in KEYWORDS.get(record, ()):
            written = f"{parameter}={record}({keyword}=..)"
            yield from _in_a_record({name, result}, KEYWORDS[name], written, parameter)
    if name in INSTALLATIONS:
        for other in INSTALLATIONS:
            if keyword in KEYWORDS.get(other, ()):
                yield f"{other}(model, {keyword}=..)"


def _in_a_record(names: set, own: Iterable[str], written: str, parameter: str) -> Iterator[str]:
    """Yield where a record is written that has the keyword: in this call, or in another part of
    it.

    Args:
        names: of the function and of its result.
        own: the function's arguments.
    """
    if parameter in own:
        yield written
    elif names & OF_CALLS:
        for place, text in PLACES.items():
            if parameter in KEYWORDS[place]:
                yield text.replace("{}=..", written)


def _what_there_is(function) -> str:
    """Return the words of an error about what a function takes, or what makes such an object."""
    name = function.__qualname__
    made = name.removesuffix(".__init__")
    if made != name and made in MADE_BY:
        return f": write {MADE_BY[made]}"
    given = inspect.signature(function).parameters
    known = KEYWORDS[name]
    in_order = [x for x in given if x in known]
    others = sorted({*known} - {*given})  # which the function hands on
    return f": it takes {', '.join(_own(in_order + others)) or 'none'}"


def _as_one_list(function, args: tuple) -> str:
    """Return what to write for the parts of an object that were given one after the other, "" for
    other arguments."""
    classes = getattr(function, "made_of", ())
    parts = args[1:]  # after the object
    is_of_parts = bool(classes) and all(isinstance(part, classes) for part in parts)
    places = ", ".join([".."] * len(parts))
    return f": write one list, {function.__qualname__}([{places}])" * is_of_parts


def _as_linear(function, args: tuple) -> str:
    """Return what to write for hidden states, a weight and labels that a function of logits was
    given, "" for other arguments."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    is_weight = len(tensors) == 3 and tensors[1].is_floating_point() and tensors[1].dim() == 2
    write = OF_HIDDEN_STATES.get(function.__qualname__) if is_weight else None
    return f": of hidden states and a weight write {write}" if write else ""


def _own(names: list[str]) -> list[str]:
    """The names without that of the object whose method is called."""
    return [name for name in names if name not in ("self", "cls")]
