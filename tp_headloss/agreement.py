"""`Options(validate="full")`: before anything is exchanged, ranks compare what they are about to do.

Without it a mistake on one rank alone (a weight of the wrong width, a missing main_grad, other options) leaves the
others in the collective until the communication library's timeout, and labels that differ show as NaN at best.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import types
import zlib

import torch

from .comm import from_every_rank
from .sequences import Sequences
from .shard import VocabShard

VALIDATIONS = ("metadata", "full", "checksums")
# name of a fact -> the dimension that ranks do not share
SHARDED = {
    **{"logits": -1, "teacher.logits": -1, "inputs.teacher.logits": -1},
    **{"weight": 0, "bias": 0, "transform.bias": 0, "total_weight": 0},
}
COSTLY = ("hidden",)  # replicated, but compared by their bits only on request: they are as large as a layer's output
# What an exception of another rank becomes here: names come from that rank, so nothing else is looked up.
RAISED = {kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError)}


class Agreement:
    """A block without collectives in which a call is checked; at its end every rank of the group knows of all others.

        with Agreement(options, shard) as agreement:
            agreement.on("vocab_statistics", shard, labels=labels, want=want)  # as soon as the shard is known
            ...  # what may raise

    An exception on any rank is raised on all, with the builtin type and the message of the first rank that has one.
    An exception that is none of `RAISED` becomes a RuntimeError that names it. Facts that differ between ranks, and
    shards that do not cover the vocabulary once, are a ValueError on all. Tensors among the facts are compared by their
    bits, those of `SHARDED` by dtype and by the dimensions that ranks share, and hidden states by their bits only with
    validate="checksums". Functions are compared by their code, their constants and what they close over, objects by
    their numbers and strings, modules by their type. A function that holds something of its rank alone, a shard of the
    logits or a rank's number, is reported as different.

    The price is a small all-gather of objects and host synchronisations; with validate="metadata", and on one rank,
    nothing happens. The objects are plain strings and numbers, but they travel as pickles, as all of torch's object
    collectives do: a group's ranks must trust each other.
    """

    def __init__(self, options, shard=None):
        self.validate = "metadata" if options is None else options.validate
        if self.validate != "metadata" and torch.compiler.is_compiling():
            raise ValueError(f"validate={self.validate!r} is for eager: it asks the other ranks")
        self.group = None if self.validate == "metadata" else getattr(shard, "group", None)
        self.facts = {}

    def on(self, call: str, shard, **facts):
        if self.validate == "metadata" or shard.world_size == 1:
            return
        self.group = shard.group
        facts = {"call": call, "vocab_size": shard.vocab_size, "grad_enabled": torch.is_grad_enabled(), **facts}
        for name, value in facts.items():
            if name in COSTLY and isinstance(value, torch.Tensor) and self.validate != "checksums":
                value = list(value.shape), str(value.dtype)
            _describe(name, value, self.facts, {})
        self.facts["bounds"] = shard.start, shard.start + shard.valid_width, shard.tp_invariant

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if self.group is None or not (error is None or isinstance(error, Exception)):
            return
        facts, errors = zip(*from_every_rank((self.facts, error and (kind.__name__, str(error))), self.group))
        failed = [rank for rank, of_rank in enumerate(errors) if of_rank]
        if not failed:
            _compare(facts)
        elif set(errors) != {errors[0]}:  # else each raises its own
            name, message = errors[failed[0]]
            message = message if name in RAISED else f"{name}: {message}"
            raise RAISED.get(name, RuntimeError)(f"on rank {failed[0]} of the group: {message}") from error


PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


def _describe(name: str, value, out: dict, seen: dict):
    """Add to `out`, by name, what to call a value and a checksum of its bits, then the same of its parts.

    Modules, classes, shards and process groups are called by their type: what they hold may be this rank's alone. Of
    other objects only plain attributes count.
    """
    if isinstance(value, PLAIN):
        out[name] = repr(value), 0
        return
    if id(value) in seen:  # functions may refer to each other
        out[name] = f"the same object as {seen[id(value)][0]}", 0
        return
    seen[id(value)] = name, value  # the value, so that its id stays its own
    checksum, parts = 0, ()
    if isinstance(value, torch.Tensor):
        text, checksum = _describe_tensor(value, SHARDED.get(name))
    elif isinstance(value, (torch.nn.Module, VocabShard, types.ModuleType, type)):
        text = getattr(value, "__name__", type(value).__name__)
    elif isinstance(value, Sequences):
        text, parts = "Sequences", (("mask", value.mask), ("lengths", value.lengths), ("horizon", value.horizon))
    elif isinstance(value, functools.partial):
        text, parts = "partial", (("function", value.func), ("arguments", value.args), ("keywords", value.keywords))
    elif dataclasses.is_dataclass(value):
        text, parts = type(value).__name__, ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    elif isinstance(value, dict):
        parts = sorted(((_key(key), part) for key, part in value.items()), key=lambda item: item[0])
        text = repr([key for key, _ in parts])
    elif isinstance(value, (set, frozenset)):
        text = repr(sorted(map(_key, value)))
    elif isinstance(value, (list, tuple)):
        plain = all(isinstance(part, PLAIN) for part in value)
        text, parts = repr(value) if plain else f"{len(value)} values", () if plain else enumerate(value)
    elif isinstance(value, types.CodeType):
        text, checksum = value.co_name, zlib.crc32(value.co_code)
        parts = ("constants", value.co_consts), ("names", value.co_names)
    elif isinstance(value, types.FunctionType):
        text, parts = value.__qualname__, _closed_over(value)
    elif isinstance(value, types.MethodType):
        text, parts = value.__qualname__, (("self", value.__self__), ("function", value.__func__))
    elif hasattr(value, "tobytes"):  # an array or a number of NumPy
        text, checksum = f"{value.dtype} {list(value.shape)}", zlib.crc32(value.tobytes())
    else:
        text = getattr(value, "__qualname__", type(value).__qualname__)
        attributes = dict(getattr(value, "__dict__", {}))
        attributes |= {n: getattr(value, n, None) for n in getattr(type(value), "__slots__", ()) if n[:2] != "__"}
        parts = ((n, part) for n, part in attributes.items() if isinstance(part, PLAIN))
    out[name] = text, checksum
    for key, part in parts:
        _describe(f"{name}.{key}", part, out, seen)


def _key(key) -> str:
    """A key or an element without the address that the repr of an object holds."""
    if isinstance(key, str):
        return key
    return repr(key) if isinstance(key, PLAIN) else getattr(key, "__qualname__", type(key).__qualname__)


def _closed_over(function):
    """The parts of a function that decide what it computes: code, defaults, and variables from around it."""
    yield "code", function.__code__
    yield "defaults", (function.__defaults__, function.__kwdefaults__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            yield name, None
    names = {i.argval for i in dis.get_instructions(function.__code__) if i.opname == "LOAD_GLOBAL"}
    for name in sorted(names & set(function.__globals__)):
        if isinstance(value := function.__globals__[name], (*PLAIN, tuple, torch.Tensor)):
            yield name, value


def _describe_tensor(tensor, vocabulary: int | None) -> tuple[str, int]:
    if vocabulary is not None:
        shape = [size for d, size in enumerate(tensor.shape) if d != vocabulary % tensor.dim()]
        return f"{tensor.dtype} {shape} and the vocabulary", 0
    if tensor.layout != torch.strided or tensor.is_meta or hasattr(tensor, "placements"):
        return f"{tensor.layout} {tensor.dtype} {list(tensor.shape)}", 0
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {list(tensor.shape)}", zlib.crc32(data.numpy())


def _compare(facts: tuple[dict, ...]):
    """A ValueError, the same on all ranks, for whatever is not the same."""
    bounds, first = [of_rank.pop("bounds") for of_rank in facts], facts[0]
    for rank, other in enumerate(facts):
        for name in dict.fromkeys((*first, *other)):
            (a, checksum), (b, other_checksum) = (x.get(name, ("nothing", 0)) for x in (first, other))
            if a != b or checksum != other_checksum:
                b = b if a != b else "other values"
                raise ValueError(f"ranks must agree on {name}: rank 0 of the group has {a}, got {b} on rank {rank}")
    vocab_size, covered = first["vocab_size"][0], 0
    for start, stop, _ in sorted(bound for bound in bounds if bound[0] < bound[1]):
        covered = stop if start == covered else -1
    if str(covered) != vocab_size:
        owned = [list(bound[:2]) for bound in bounds]
        raise ValueError(f"the shards of the group must cover [0, {vocab_size}) once, got {owned}")
    alike = {whole: [rank for rank, bound in enumerate(bounds) if bound[2] == whole] for whole in (True, False)}
    if alike[True] and alike[False]:
        raise ValueError(
            "ranks must make their shards alike (all by from_group, say), got whole chunks of the vocabulary, with "
            f"known bounds of the others, on ranks {alike[True]} of the group, and bounds alone on ranks {alike[False]}"
        )
