"""Comparison of a call's arguments between ranks, of `Options(validate="full")`.

It comes before any other exchange. Without it a mistake on one rank alone (a weight of the wrong
width, a missing main_grad, other options) leaves the other ranks in the collective until the
communication library's timeout, and labels that differ show as NaN at best.
"""

import dataclasses
import functools
import json
import logging
import types
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .. import statistics
from ..arguments.sequences import Sequences
from ..ranks.comm import gather_objects, job_size, texts_of_job
from ..ranks.shard import VocabShard
from ..spec.checks import autocast_dtype
from ..statistics.members import closure_of, function_of, members_of_classes, variables_of
from ..version import __version__
from .compile import inference_tensors
from .differences import compare_calls, compare_sequences
from .own_ids import checksums_of_own_ids

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
_logged: set[str | int] = set()


class Agreement:
    """A block in which a call is checked.

    At its end the group's ranks exchange facts and errors: all go on, or raise.

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
    validate="checksums". Equal rows of a weight on two ranks, as an initialisation from one seed
    gives them, are an error, too, and so are equal columns of logits, the student's or a teacher's,
    see `own_ids`. Functions are compared by name, and by which tensors they read that require a
    gradient, a `functools.partial` with its arguments, other objects by their type. What functions
    return is compared afterwards, see `equal_results`.

    The exchange is a small all-gather of objects, with host synchronisations. With
    validate="metadata", and on one rank, nothing is exchanged. Without a shard,
    `Options(check=True)` has the ranks of the job compare over its store (see `_compare_job`). The
    objects are plain strings and numbers, but they travel as pickles, as in all of torch's object
    collectives: a group's ranks must trust each other.

    Sequences with a group of their own are compared over that group, too, after the shard's: their
    number, and what is given one per sequence (see `_facts_of_sequences`).

    Args:
        inputs: those of the call, which may have "sequences".
    """

    def __init__(self, options, shard=None, inputs=None):
        self.validate = "metadata" if options is None else options.validate
        # one rank, also that of a group of its own, has nobody to compare with
        compares = self.validate != "metadata" and getattr(shard, "world_size", 1) > 1
        self.group = getattr(shard, "group", None) if compares else None
        self.facts: dict[str, Any] = {}
        self.sequences = _split_sequences(inputs) if self.validate != "metadata" else None
        self.inputs = inputs
        self.is_checked = options is not None and options.check
        # the shard may be forgotten, or the whole vocabulary be meant
        self.forgotten = shard is None and not torch.compiler.is_compiling() and job_size() > 1
        self.of_job: list[Any] = []  # labels and logits, for ranks that compare without a shard

    def record(self, call: str, shard, **facts):
        """Record the arguments of a call for the comparison at the end of the block.

        `shard` is the resolved one.
        """
        self.forgotten = self.forgotten and shard.group is None
        if self.forgotten:
            self._record_for_job(facts)
        if self.validate == "metadata" or shard.world_size == 1:
            return
        self.group = shard.group
        self.facts["version"] = __version__
        # hidden states are as large as a layer's output, and some ranks have their own part of them
        own_part = getattr(facts.get("linear"), "hidden_grad", "") == "reduce_scatter"
        compare_hidden = self.validate == "checksums" and not own_part
        facts = {
            "call": call,
            "vocab_size": shard.vocab_size,
            "grad_enabled": torch.is_grad_enabled(),
            # first, because ranks whose labels differ were given other batches
            **({"labels": facts["labels"]} if "labels" in facts else {}),
            **facts,
            "families": families_wanted(facts.get("want", ())),
        }
        # of logits it decides how they are exchanged, see `one_read`
        for name in ("logits", "hidden", "weight"):
            if isinstance(x := facts.get(name), torch.Tensor):
                facts[f"{name}.requires_grad"] = x.requires_grad
        if isinstance(hidden := facts.get("hidden"), torch.Tensor):
            # the dtype of its GEMMs, see `operand_dtype`
            facts["autocast"] = autocast_dtype(hidden.device.type)
        if facts["grad_enabled"]:
            # what autograd cannot save is an error after this comparison, on this rank alone
            facts["tensors of torch.inference_mode()"] = ", ".join(inference_tensors("", facts))
        for name, value in facts.items():
            _describe(name, value, self.facts, compare_hidden, SHARDED_DIM.get(name))
        self.facts["bounds"] = shard.start, shard.start + shard.valid_width, shard.tp_invariant
        # `select_rows`, which nobody asked to compare, also takes rows of an experiment's one seed
        own = {} if call == "select_rows" else facts
        self.facts["own"] = checksums_of_own_ids(own, shard.valid_width)

    def _record_for_job(self, facts: dict[str, Any]):
        """Record labels and logits (or weight) for the ranks of the job.

        That there is no shard is logged once at each level.
        """
        level = logging.WARNING if self.is_checked else logging.INFO
        if level not in _logged:  # a call without check=True does not use up the warning
            _logged.add(level)
            _log.log(
                level,
                "no shard= on a job of %d ranks: logits are taken for the whole vocabulary, which "
                "is right for data "
                'parallelism; Options(check=True, validate="full") has the ranks compare '
                "calls that have labels",
                job_size(),
            )
        labels = facts.get("labels")
        x = facts.get("weight", facts.get("logits"))
        if not self._compares_job:
            return
        if not (isinstance(labels, torch.Tensor) and isinstance(x, torch.Tensor)):
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
        if not (error is None or isinstance(error, Exception)):
            return
        found: Exception | None = error
        if self.group is not None:
            found = outcome(self.facts, found, self.group, compare_calls)
        if self.sequences is not None:  # whose other ranks wait for this one's error, too
            own = _facts_of_sequences(self.sequences, self.inputs) if found is None else {}
            found = outcome(own, found, self.sequences.group, compare_sequences)
        if found is not None and found is not error:
            raise found from error


def outcome(facts: dict, error, group, compare: Callable) -> Exception | None:
    """Exchange facts and errors with a group -> the exception that this rank raises, or None.

    It is the rank's own error where all have an equal one, else that of the first rank that has
    one, else what `compare` raises of the facts of all ranks.
    """
    own_error = error and (type(error).__name__, str(error))
    all_facts, errors = zip(*_gathered((facts, own_error), group))
    failed = [rank for rank, rank_error in enumerate(errors) if rank_error]
    if not failed:
        try:
            compare(all_facts)
        except ValueError as difference:
            return difference
    elif set(errors) != {errors[0]}:  # else each rank raises its own, equal one
        name, message = errors[failed[0]]
        message = message if name in EXCEPTION_TYPES else f"{name}: {message}"
        message = f"on rank {failed[0]} of the group: {message}"
        return EXCEPTION_TYPES.get(name, RuntimeError)(message)
    return error


def _gathered(own: tuple[dict, Any], group) -> list[tuple[dict, Any]]:
    """Gather facts and errors of all ranks. RuntimeError for what another exchange of a rank
    sent."""
    found = gather_objects(own, group)
    for rank, x in enumerate(found):
        if not isinstance(x, tuple) or len(x) != len(own) or not isinstance(x[0], dict):
            raise RuntimeError(
                "all ranks of the group must make this call, got an object of another exchange, "
                f"{type(x).__name__}, of rank {rank}: it left this call out, or makes an exchange of "
                "its own first"
            )
    return found


def _split_sequences(inputs) -> Sequences | None:
    """Return the sequences of a call that are split over several ranks; None if there are none."""
    found = inputs.get("sequences") if isinstance(inputs, Mapping) else None
    return found if isinstance(found, Sequences) and found.ranks > 1 else None


def _facts_of_sequences(sequences: Sequences, inputs) -> dict[str, tuple[str, int]]:
    """Return what is equal on all ranks that hold pieces of the same sequences.

    These are the number of sequences, their lengths, the horizon, and inputs with a value per
    sequence: [B], and for rows of a mask [B, 1], but not in the shape of the tokens.
    """
    count = len(sequences)
    facts: dict[str, tuple[str, int]] = {}
    _describe("the number of sequences", count, facts, False)
    _describe("the lengths of sequences", sequences.lengths, facts, True)
    _describe("the horizon of sequences", sequences.horizon, facts, False)
    shapes = [(count,)] + [(count, 1)] * (sequences.ids is None)
    for name, x in inputs.items():
        is_per_sequence = isinstance(x, torch.Tensor) and tuple(x.shape) in shapes
        if is_per_sequence and x.shape != sequences.mask.shape:
            _describe(f"the values per sequence of {name!r}", x, facts, True)
    return facts


PLAIN_TYPES = (int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


def families_wanted(want) -> dict[str, dict[str, Any]]:
    """Return what tells the families of wanted statistics apart.

    These are their classes, and attributes of families and of classes below `Family`, methods by
    their code.
    """
    found: dict[str, dict[str, Any]] = {}
    for family in statistics.FAMILIES:
        own = {key: _with_code(x) for key, x in vars(family).items()}
        classes = members_of_classes(type(family))
        of_classes = {key: [_with_code(x) for x in values] for key, values in classes.items()}
        own = {"class": type(family).__qualname__, **of_classes, **own}
        found |= dict.fromkeys({*family.statistics} & {*want}, own)
    return found


def _with_code(value):
    """Return what a function, a property or a static method does, for a comparison; any other value
    as it is.

    Functions that it calls, and what it reads of its module, are compared by name alone.
    """
    function = function_of(value)
    if function is None:
        return value
    text = json.dumps(_code_facts(function.__code__))
    return {
        "code": f"{function.__qualname__} {zlib.crc32(text.encode()):08x}",
        "variables": closure_of(function),
        "defaults": [function.__defaults__, function.__kwdefaults__],
    }


def _code_facts(code: types.CodeType) -> list:
    """Return operations, names and constants of code, without addresses and numbers of lines."""
    return [code.co_code.hex(), code.co_names, [_constant_facts(x) for x in code.co_consts]]


def _constant_facts(value) -> Any:
    """Return a constant of code in a form that is equal on all ranks."""
    if isinstance(value, types.CodeType):
        return _code_facts(value)
    if isinstance(value, frozenset):  # whose order is each process's own
        return sorted(map(repr, value))
    return repr(value)


def _describe(name: str, value, out: dict, compare_hidden: bool, sharded_dim: int | None = None):
    """Add a description of a value to `out` under its name, and then of its parts.

    A description is (text, checksum of the value's bits). Modules, shards and process groups are
    described by their type, because their contents may differ between ranks.
    """
    checksum = 0
    if isinstance(value, torch.Tensor):
        is_hidden = name.split(".")[-1] == "hidden"
        text, checksum = _describe_tensor(value, sharded_dim, compare_hidden or not is_hidden)
    elif isinstance(value, dict):
        text = repr(sorted(map(_key, value)))
    elif isinstance(value, (set, frozenset)):
        text = repr(sorted(map(_text, value)))
    elif isinstance(value, (list, tuple)):
        text = repr(value) if _is_plain(value) else _names_or_number(value)
    elif _is_of_numpy(value):
        text = f"{value.dtype} {list(value.shape)}"
        checksum = zlib.crc32(value.tobytes())
    else:
        text = _text(value)
    out[name] = text, checksum
    sharded_dims = getattr(type(value), "tensors", {})
    for key, part in _parts(value):
        _describe(f"{name}.{key}", part, out, compare_hidden, sharded_dims.get(key))


def _parts(value) -> Iterable[tuple[Any, Any]]:
    """Return the parts of a value that are described by themselves, with their names."""
    if isinstance(value, Sequences):
        return [(name, getattr(value, name)) for name in ("mask", "lengths", "horizon", "ids")]
    if isinstance(value, functools.partial):
        return [("function", value.func), ("arguments", value.args), ("keywords", value.keywords)]
    if isinstance(value, types.FunctionType):
        return [(f"{name}.requires_grad", x) for name, x in _trained(variables_of(value))]
    if isinstance(value, torch.nn.Module):
        parameters = dict(value.named_parameters())
        return [(f"{name}.requires_grad", x) for name, x in _trained(parameters)]
    if isinstance(value, (type, VocabShard)):
        return []  # their contents may differ between ranks
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        return sorted(((_key(key), part) for key, part in value.items()), key=lambda item: item[0])
    if isinstance(value, (list, tuple)) and not _is_plain(value):
        return enumerate(value)
    return []


def _trained(held: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return which of the tensors, and of modules' parameters, require a gradient.

    A linear head's way is chosen by that. Their values may differ between ranks.
    """
    found: list[tuple[str, Any]] = []
    for name, x in held.items():
        if isinstance(x, torch.Tensor):
            found.append((name, x.requires_grad))
        if isinstance(x, torch.nn.Module):
            found.append((name, tuple(p.requires_grad for p in x.parameters())))
    return found


def _key(key) -> str:
    """Return the text of a dictionary's key."""
    return key if isinstance(key, str) else _text(key)


def _is_plain(values) -> bool:
    return all(isinstance(value, PLAIN_TYPES) for value in values)


def _names_or_number(values) -> str:
    """Return the names of values that all have one, such as terms, else their number."""
    names = [getattr(value, "name", None) for value in values]
    is_named = all(isinstance(name, str) for name in names)
    return repr(names) if is_named else f"{len(values)} values"


def _is_of_numpy(value) -> bool:
    """Return True for an array or a number of NumPy."""
    return hasattr(value, "tobytes") and not isinstance(value, type)


def _text(value) -> str:
    """Return the repr of a plain value, or a name.

    The repr of a function or an object has an address, so a function or a class is its name, and
    an object that of its type.
    """
    if isinstance(value, PLAIN_TYPES):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _describe_tensor(tensor, sharded_dim: int | None, bits: bool) -> tuple[str, int]:
    """Return text and checksum of a tensor.

    There is no checksum if its bits may differ between ranks, or are not plain memory.
    """
    if sharded_dim is not None:
        shape = [size for d, size in enumerate(tensor.shape) if d != sharded_dim % tensor.dim()]
        return f"{tensor.dtype} {shape} and the vocabulary", 0
    is_memory = tensor.layout == torch.strided and not tensor.is_meta
    is_dtensor = hasattr(tensor, "placements")
    if not (bits and is_memory) or is_dtensor:
        return f"{tensor.layout} {tensor.dtype} {list(tensor.shape)}", 0
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {list(tensor.shape)}", zlib.crc32(data.numpy())


def _compare_job(texts: list[str] | None, error):
    """Raise ValueError if two ranks of the job have each its columns of one vocabulary.

    Such ranks have equal labels and other logits (or weights), and no shard; data-parallel ranks
    have other labels. All ranks raise that have no error of their own. A warning if ranks did not
    come, as those of other pipeline stages do not; then nothing is compared.
    """
    if texts is None and "job" not in _logged:
        _logged.add("job")
        _log.warning(
            "without shard=, the ranks of the job compare nothing: some made no such call in %g s. "
            "If they have a shard=, this rank forgot its own, and they wait for it: pass "
            "shard=VocabShard.from_group(group, vocab_size)",
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
