"""Comparison of a call's arguments between ranks, before any other exchange:
`Options(validate="full")`.

Without it a mistake on one rank alone (a weight of the wrong width, a missing main_grad, other
options) leaves the other ranks in the collective until the communication library's timeout, and
labels that differ show as NaN at best.
"""

import dataclasses
import functools
import json
import logging
import zlib
from collections.abc import Iterable
from typing import Any

import torch

from .. import statistics
from ..arguments.sequences import Sequences
from ..ranks.comm import gather_objects, job_size, texts_of_job
from ..ranks.shard import VocabShard

# argument -> its dimension that is sharded on the vocabulary, where ranks differ; of fields their
# class says it
SHARDED_DIM = {"logits": -1, "weight": 0, "bias": 0, "total_weight": 0}
# Name -> type that another rank's error is raised as. Names come from that rank: no other type is
# looked up.
EXCEPTION_TYPES = {
    kind.__name__: kind
    for kind in (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError)
}

JOB_WAIT = 60.0  # seconds that a call without a shard waits for the other ranks of the job

_log = logging.getLogger("tp_headloss")
_logged: set[str] = set()


class Agreement:
    """A block in which a call is checked. At its end the group's ranks exchange facts and errors:
    all go on, or raise.

        with Agreement(options, shard) as agreement:
            # as soon as the shard is known
            agreement.record("vocab_statistics", shard, labels=labels, want=want)
            ...  # checks that may raise, and no collectives

    An exception on any rank is raised on all, with the message of the first rank that has one, and
    with its type if that is in `EXCEPTION_TYPES`; any other exception becomes a RuntimeError that
    names it. Facts that differ between ranks, and shards that do not cover the vocabulary once, are
    a ValueError on all ranks.

    Tensors are compared by their bits, except that those sharded on the vocabulary are compared by
    dtype and by the sizes that ranks share, and hidden states by shape and dtype unless
    validate="checksums". Functions are compared by name, a `functools.partial` with its arguments,
    other objects by their type.

    The exchange is a small all-gather of objects, with host synchronisations. With
    validate="metadata", and on one rank, nothing is exchanged. Without a shard,
    `Options(check=True)` has the ranks of the job compare over its store (see `_compare_job`). The
    objects are plain strings and numbers, but they travel as pickles, as in all of torch's object
    collectives: a group's ranks must trust each other.
    """

    def __init__(self, options, shard=None):
        self.validate = "metadata" if options is None else options.validate
        # one rank, also that of a group of its own, has nobody to compare with
        compares = self.validate != "metadata" and getattr(shard, "world_size", 1) > 1
        self.group = getattr(shard, "group", None) if compares else None
        self.facts, self.is_checked = {}, options is not None and options.check
        # maybe
        self.forgotten = shard is None and not torch.compiler.is_compiling() and job_size() > 1
        self.of_job: list[Any] = []  # labels and logits, for ranks that compare without a shard

    def record(self, call: str, shard, **facts):
        """Record the arguments of a call for the comparison at the end of the block. `shard` is the
        resolved one."""
        self.forgotten = self.forgotten and shard.group is None
        if self.forgotten:
            self._record_for_job(facts)
        if self.validate == "metadata" or shard.world_size == 1:
            return
        self.group = shard.group
        # hidden states are as large as a layer's output, and some ranks have their own part of them
        own_part = getattr(facts.get("linear"), "hidden_grad", "") == "reduce_scatter"
        compare_hidden = self.validate == "checksums" and not own_part
        facts = {
            "call": call,
            "vocab_size": shard.vocab_size,
            "grad_enabled": torch.is_grad_enabled(),
            **facts,
            "families": families_wanted(facts.get("want", ())),
        }
        if isinstance(logits := facts.get("logits"), torch.Tensor):
            # which decides how they are exchanged, see `one_read`
            facts["logits.requires_grad"] = logits.requires_grad
        for name, value in facts.items():
            _describe(name, value, self.facts, compare_hidden, SHARDED_DIM.get(name))
        self.facts["bounds"] = shard.start, shard.start + shard.valid_width, shard.tp_invariant

    def _record_for_job(self, facts: dict[str, Any]):
        """Log once that there is no shard, and record labels and logits (or weight) for the ranks
        of the job."""
        if "shard" not in _logged:
            _logged.add("shard")
            _log.log(
                logging.WARNING if self.is_checked else logging.INFO,
                "no shard= on a job of %d ranks: logits are taken for the whole vocabulary, which "
                "is right for data "
                'parallelism; Options(check=True, validate="full") has the ranks compare',
                job_size(),
            )
        labels, x = facts.get("labels"), facts.get("weight", facts.get("logits"))
        if (
            not self._compares_job
            or not isinstance(labels, torch.Tensor)
            or not isinstance(x, torch.Tensor)
        ):
            return
        if torch.ne(labels, facts.get("ignore_index", -100)).any():
            # so many tell shards of a vocabulary apart
            rows = x.flatten(0, -2)[:1024] if x.dim() > 1 else x
            self.of_job = [
                _describe_tensor(labels, None, True),
                list(x.shape),
                _describe_tensor(rows, None, True),
            ]

    @property
    def _compares_job(self) -> bool:
        return self.forgotten and self.is_checked and self.validate != "metadata"

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if self._compares_job:
            _compare_job(texts_of_job(json.dumps(self.of_job), JOB_WAIT), error)
        if self.group is None or not (error is None or isinstance(error, Exception)):
            return
        facts, errors = zip(
            *gather_objects((self.facts, error and (kind.__name__, str(error))), self.group)
        )
        failed = [rank for rank, rank_error in enumerate(errors) if rank_error]
        if not failed:
            _compare(facts)
        elif set(errors) != {errors[0]}:  # else each rank raises its own, equal one
            name, message = errors[failed[0]]
            message = message if name in EXCEPTION_TYPES else f"{name}: {message}"
            raise EXCEPTION_TYPES.get(name, RuntimeError)(
                f"on rank {failed[0]} of the group: {message}"
            ) from error


PLAIN_TYPES = (int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


def families_wanted(want) -> dict[str, dict[str, Any]]:
    """Return what tells the families of wanted statistics apart: their classes, and plain attributes
    of theirs, such as an order."""
    found = {}
    for family in statistics.FAMILIES:
        for name in {*family.statistics} & {*want}:
            plain = {key: x for key, x in vars(family).items() if isinstance(x, PLAIN_TYPES)}
            found[name] = {"class": type(family).__qualname__, **plain}
    return found


def _describe(name: str, value, out: dict, compare_hidden: bool, sharded_dim: int | None = None):
    """Add a description of a value, (text, checksum of its bits), to `out` under its name, and then
    of its parts.

    Modules, shards and process groups are described by their type, because their contents may
    differ between ranks.
    """
    checksum, text = 0, _text(value)
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, torch.Tensor):
        is_hidden = name.split(".")[-1] == "hidden"
        text, checksum = _describe_tensor(value, sharded_dim, compare_hidden or not is_hidden)
    elif isinstance(value, Sequences):
        parts = (
            ("mask", value.mask),
            ("lengths", value.lengths),
            ("horizon", value.horizon),
            ("ids", value.ids),
        )
    elif isinstance(value, functools.partial):
        parts = (("function", value.func), ("arguments", value.args), ("keywords", value.keywords))
    elif isinstance(value, (type, VocabShard)):
        pass  # their contents may differ between ranks
    elif dataclasses.is_dataclass(value):
        parts = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    elif isinstance(value, dict):
        parts = [(key if isinstance(key, str) else _text(key), part) for key, part in value.items()]
        parts.sort(key=lambda item: item[0])
        text = repr([key for key, _ in parts])
    elif isinstance(value, (set, frozenset)):
        text = repr(sorted(map(_text, value)))
    elif isinstance(value, (list, tuple)):
        plain = all(isinstance(part, PLAIN_TYPES) for part in value)
        text, parts = (
            repr(value) if plain else f"{len(value)} values",
            () if plain else enumerate(value),
        )
    elif hasattr(value, "tobytes"):  # an array or a number of NumPy
        text, checksum = f"{value.dtype} {list(value.shape)}", zlib.crc32(value.tobytes())
    out[name] = text, checksum
    for key, part in parts:
        _describe(
            f"{name}.{key}", part, out, compare_hidden, getattr(type(value), "tensors", {}).get(key)
        )


def _text(value) -> str:
    """The repr of a plain value, or the name of a function, a class or an object's type, whose repr
    has an address."""
    if isinstance(value, PLAIN_TYPES):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _describe_tensor(tensor, sharded_dim: int | None, bits: bool) -> tuple[str, int]:
    """Text and checksum of a tensor; without checksum if its bits may differ between ranks, or are
    not plain memory."""
    if sharded_dim is not None:
        shape = [size for d, size in enumerate(tensor.shape) if d != sharded_dim % tensor.dim()]
        return f"{tensor.dtype} {shape} and the vocabulary", 0
    if (
        tensor.layout != torch.strided
        or tensor.is_meta
        or hasattr(tensor, "placements")
        or not bits
    ):
        return f"{tensor.layout} {tensor.dtype} {list(tensor.shape)}", 0
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {list(tensor.shape)}", zlib.crc32(data.numpy())


def _compare(facts: tuple[dict, ...]):
    """Raise ValueError on all ranks if their facts, a dict each, differ or shards do not cover the
    vocabulary once."""
    bounds, first = [rank_facts.pop("bounds") for rank_facts in facts], facts[0]
    for rank, other in enumerate(facts):
        for name in dict.fromkeys((*first, *other)):
            (a, checksum), (b, other_checksum) = (
                x.get(name, ("nothing", 0)) for x in (first, other)
            )
            if a != b or checksum != other_checksum:
                b = b if a != b else "other values"
                raise ValueError(
                    f"ranks must agree on {name}: rank 0 of the group has {a}, got {b} on rank "
                    f"{rank}"
                )
    vocab_size, covered = first["vocab_size"][0], 0
    for start, stop, _ in sorted(bound for bound in bounds if bound[0] < bound[1]):
        covered = stop if start == covered else -1
    if str(covered) != vocab_size:
        owned = [list(bound[:2]) for bound in bounds]
        raise ValueError(f"the shards of the group must cover [0, {vocab_size}) once, got {owned}")
    alike = {
        whole: [rank for rank, bound in enumerate(bounds) if bound[2] == whole]
        for whole in (True, False)
    }
    if alike[True] and alike[False]:
        raise ValueError(
            "ranks must make their shards alike (all by from_group, say), got whole chunks of the "
            f"vocabulary, with known bounds of the others, on ranks {alike[True]} of the group, "
            f"and bounds alone on ranks {alike[False]}"
        )


def _compare_job(texts: list[str] | None, error):
    """Raise ValueError, on all ranks that have no error of their own, if two ranks of the job have
    equal labels and other logits (or weights), and no shard: each has its columns of one
    vocabulary. Data-parallel ranks have other labels. A warning if ranks did not come, as those of
    other pipeline stages do not; then nothing is compared."""
    if texts is None and "job" not in _logged:
        _logged.add("job")
        _log.warning(
            "without shard=, the ranks of the job compare nothing: some made no call in %g s",
            JOB_WAIT,
        )
    seen: dict[str, tuple[int, Any]] = {}
    for rank, text in enumerate(texts or ()):
        labels, *x = json.loads(text) or [rank]  # of ranks without labels nothing is equal
        first, other = seen.setdefault(str(labels), (rank, x))
        if other != x and error is None:
            raise ValueError(
                f"ranks {first} and {rank} of the job have equal labels, other logits or weights "
                f"({other[0]} and {x[0]}), and no shard=: if each has its columns of one "
                "vocabulary, pass shard=VocabShard.from_group(group, vocab_size); if each has the "
                "whole vocabulary, shard=VocabShard.from_group(None, vocab_size)"
            )
