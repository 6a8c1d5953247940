"""`Options(validate="full")`: before anything is exchanged, ranks compare what they are about to do.

Without it a mistake on one rank alone (a weight of the wrong width, a missing main_grad, other options) leaves the
others in the collective until the communication library's timeout, and labels that differ show as NaN at best.
"""

from __future__ import annotations

import dataclasses
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
    validate="checksums". Functions are compared by their code, their constants and what they close over.

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
            _describe(name, value, self.facts)
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


def _describe(name: str, value, out: dict):
    """Add to `out`, for whatever a call takes, by name: what to call it, and a checksum."""
    if name.count(".") > 12:  # an object that holds itself
        return
    text, checksum, parts = None, 0, ()
    if isinstance(value, (torch.nn.Module, VocabShard)):
        text = type(value).__name__  # what they hold may be this rank's alone
    elif isinstance(value, torch.Tensor):
        text, checksum = _describe_tensor(value, SHARDED.get(name))
    elif isinstance(value, Sequences):
        text, parts = "Sequences", (("mask", value.mask), ("lengths", value.lengths), ("horizon", value.horizon))
    elif isinstance(value, functools.partial):
        text, parts = "partial", (("function", value.func), ("arguments", value.args), ("keywords", value.keywords))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        text, parts = type(value).__name__, ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    elif isinstance(value, dict):
        text, parts = repr(list(value)), value.items()
    elif isinstance(value, types.CodeType):
        text, checksum = value.co_name, zlib.crc32(value.co_code)
        parts = ("constants", value.co_consts), ("names", value.co_names)
    elif isinstance(value, (list, tuple)) and not all(isinstance(part, (int, str)) for part in value):
        text, parts = f"{len(value)} values", enumerate(value)
    elif isinstance(value, types.FunctionType):
        text, parts = value.__qualname__, _closed_over(value)
    elif isinstance(value, types.MethodType):
        text, parts = value.__qualname__, (("self", value.__self__), ("function", value.__func__))
    elif callable(value):
        text, parts = getattr(value, "__qualname__", type(value).__qualname__), getattr(value, "__dict__", {}).items()
        parts = () if isinstance(value, type) else parts
    elif not isinstance(value, (int, float, str, bytes, list, tuple, torch.dtype, torch.device, type(None))):
        text = type(value).__qualname__  # a repr may hold an address
    out[name] = repr(value) if text is None else text, checksum
    for key, part in parts:
        _describe(f"{name}.{key}", part, out)


def _closed_over(function):
    """The parts of a function that decide what it computes: code, defaults, and variables from around it."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    yield "code", function.__code__
    yield "defaults", (function.__defaults__, function.__kwdefaults__)
    for name, cell in cells:
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            yield name, None
    for name in function.__code__.co_names:  # module-level numbers, say
        if isinstance(value := function.__globals__.get(name), (int, float, str, tuple, torch.Tensor)):
            yield name, value


def _describe_tensor(tensor, vocabulary: int | None) -> tuple[str, int]:
    if vocabulary is not None:
        shape = [size for d, size in enumerate(tensor.shape) if d != vocabulary % tensor.dim()]
        return f"{tensor.dtype} {shape} and the vocabulary", 0
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
