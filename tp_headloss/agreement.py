"""`Options(validate="full")`: before anything is exchanged, ranks compare what they are about to do.

Without it a mistake on one rank alone (a weight of the wrong width, a missing main_grad, other options) leaves the
others in the collective until the communication library's timeout, and labels that differ show as NaN at best.
"""

from __future__ import annotations

import builtins
import dataclasses
import zlib

import torch

from .comm import from_every_rank
from .sequences import Sequences

VALIDATIONS = ("metadata", "full")
# name of a fact -> the dimension that ranks do not share
SHARDED = {
    **{"logits": -1, "teacher.logits": -1, "inputs.teacher.logits": -1},
    **{"weight": 0, "bias": 0, "transform.bias": 0, "total_weight": 0},
}


class Agreement:
    """A block without collectives in which a call is checked; at its end every rank of the group knows of all others.

        with Agreement(options, shard) as agreement:
            agreement.on("vocab_statistics", shard, labels=labels, want=want)  # as soon as the shard is known
            ...  # what may raise

    An exception on any rank is raised on all, with the builtin type and the message of the first rank that has one.
    Facts that are not the same on all ranks, and shards that do not cover the vocabulary once, are a ValueError on all.
    Tensors among the facts are compared by their bits, those of `SHARDED` by dtype and by the dimensions that ranks
    share. The price is a small all-gather of objects and host synchronisations; with validate="metadata", and on one
    rank, nothing happens.
    """

    def __init__(self, options, shard=None):
        self.validate = "metadata" if options is None else options.validate
        if self.validate not in VALIDATIONS:
            raise ValueError(f"validate must be one of {VALIDATIONS}, got {self.validate!r}")
        if self.validate == "full" and torch.compiler.is_compiling():
            raise ValueError("validate='full' is for eager: it asks the other ranks")
        self.group = None if self.validate == "metadata" else getattr(shard, "group", None)
        self.facts = {}

    def on(self, call: str, shard, **facts):
        if self.validate == "metadata" or shard.world_size == 1:
            return
        self.group = shard.group
        facts = {"call": call, "vocab_size": shard.vocab_size, "grad_enabled": torch.is_grad_enabled(), **facts}
        for name, value in facts.items():
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
            raise getattr(builtins, name, RuntimeError)(f"on rank {failed[0]} of the group: {message}") from error


def _describe(name: str, value, out: dict):
    """Whatever a call takes -> by name: what to call it, and a checksum."""
    text, checksum, parts = None, 0, ()
    if isinstance(value, torch.Tensor):
        text, checksum = _describe_tensor(value, SHARDED.get(name))
    elif isinstance(value, Sequences):
        text, parts = "Sequences", (("mask", value.mask), ("lengths", value.lengths), ("horizon", value.horizon))
    elif dataclasses.is_dataclass(value):
        text, parts = type(value).__name__, ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    elif isinstance(value, dict):
        text, parts = repr(list(value)), value.items()
    elif isinstance(value, (list, tuple)) and not all(isinstance(part, (int, str)) for part in value):
        text, parts = f"{len(value)} values", enumerate(value)
    elif callable(value):
        text = getattr(value, "__qualname__", type(value).__qualname__)
    out[name] = repr(value) if text is None else text, checksum
    for key, part in parts:
        _describe(f"{name}.{key}", part, out)


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
