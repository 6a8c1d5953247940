"""The collective calls of the package.

Elsewhere only these communicate: rendezvous and barrier of symmetric memory
(`engine/transports/symmetric_memory`), `full_tensor` of a checkpoint's DTensors
(`modules/vocab_rows`), and `redistribute` (`integrations/nemo_automodel`, as that host does).
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Annotated, Literal, TypeAlias
from uuid import uuid4

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    PrefixStore,
    ProcessGroup,
    Store,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed.distributed_c10d import _get_default_store as _default_store
from torch.distributed.distributed_c10d import _get_process_group_store as _store_of

from ..spec import CheckedBy, TensorLine, TupleOf, checked
from ..spec.words import type_name
from .compiler import constant_for_compile
from .groups import Group, expect_live, live_group
from .shard import holds_sharing_ranks


def _expect_sums(name: str, value):
    """Raise TypeError unless these are sums by name, with what to write for an output that has
    them."""
    if not isinstance(value, dict):
        said = ": pass its .metrics" * hasattr(value, "sequence_metrics")
        raise TypeError(f"{name} must be a dict, got {type_name(value, said)}")


METRICS = CheckedBy("`dict`", _expect_sums)
# of the errors for means in the place of sums
OF_MEANS = (
    ", whose sum is none: pass the outputs, mean_metrics(outputs, group), or out.metrics to "
    "combine_metrics and reduce_metrics"
)
Metrics: TypeAlias = Annotated[dict[str, torch.Tensor], METRICS, "Scalars by name"]

# torch 2.13 renamed it
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_parts(x: torch.Tensor, world_size: int, group_name: str) -> torch.Tensor:
    """Gather the part [n, ..] of each rank: [n * P, ..], in group-rank order; one all-gather."""
    if world_size == 1 or x.numel() == 0:
        return x
    gathered = x.new_empty(world_size * x.shape[0], *x.shape[1:])
    # flat, because gloo takes no other output shape
    group = live_group(group_name, world_size)
    _all_gather(gathered.view(-1), x.contiguous().view(-1), group=group)
    return gathered


HiddenGrad: TypeAlias = Literal["all_reduce", "reduce_scatter", "none"]
# Clock cycles that what follows waits, so that the reduction's kernel begins before the next GEMM
# takes every SM. On four H200, a GEMM of 831 us and an all-reduce of 8192 x 4096 in bf16, 342 us
# alone, took 1200 us one after the other and as much issued at once; with 4000 cycles between them
# 990, 8000: 1047, 16000: 1100
HEAD_START = 4000


def reduce_hidden(
    grad: torch.Tensor, how: str, world_size: int, group_name: str
) -> Callable[[], torch.Tensor]:
    """Begin to add up every rank's part [N, H] of the hidden states' gradient.

    The result of the call that ends it is [N, H] ("all_reduce", in place; "none": this rank's part)
    or this rank's [N/P, H] ("reduce_scatter").
    """
    if world_size == 1 or how == "none" or grad.numel() == 0:
        return lambda: grad
    group = live_group(group_name, world_size)
    if how == "all_reduce":
        total = grad
        work = dist.all_reduce(grad, group=group, async_op=True)
    else:
        total = grad.new_empty(grad.shape[0] // world_size, *grad.shape[1:])
        work = _reduce_scatter(total, grad, group=group, async_op=True)

    if grad.is_cuda:
        torch.cuda._sleep(HEAD_START)

    assert work is not None  # as in a group that this rank is not in

    def end():
        work.wait()
        return total

    return end


def reduce_in_place(
    x: torch.Tensor, world_size: int, group_name: str, largest: bool = False
) -> torch.Tensor:
    """Sum x over the group, in place; one all-reduce.

    Args:
        x: float64, integers, or rows that are 0 on all ranks but one.
        largest: take the maximum instead, which may drop a NaN.
    """
    if world_size > 1 and x.numel() > 0:
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        dist.all_reduce(x, op, group=live_group(group_name, world_size))
    return x


def gather_objects(value, group) -> list:
    """Gather an object of each rank: a list of all of them, in group-rank order."""
    values = [None] * group.size()
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(
                "this rank waited for the others of its group: all of them make this call, or wait "
                "until the group's timeout for one that does not"
            )
        raise
    return values


def job_size() -> int:
    """Number of ranks of the job; 1 before `init_process_group`."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def texts_of_job(text: str, seconds: float) -> list[str] | None:
    """Exchange a text with all ranks of the job over its store, which is no collective.

    None if a rank does not come in time; it is waited for once, and no rank of the job waits again.
    """
    store = _default_store()
    rank = dist.get_rank()
    call = store.add(f"tp_headloss/calls of rank {rank}", 1)
    keys = [f"tp_headloss/call {call} of rank {r}" for r in range(dist.get_world_size())]
    store.set(keys[rank], text)
    try:
        if store.check(["tp_headloss/absent"]):
            return None
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError:  # DistStoreError
        store.set("tp_headloss/absent", "")
        return None
    texts = [store.get(key).decode() for key in keys]
    store.set(f"{keys[rank]} has read", "")
    if rank == 0:  # whose process may hold the store, which ends with it
        with contextlib.suppress(RuntimeError):
            store.wait([f"{key} has read" for key in keys], timedelta(seconds=seconds))
    for end in ("", " has read"):  # which all have read
        store.delete_key(f"tp_headloss/call {call - 1} of rank {rank}{end}")
    return texts


def _presence(rank: int) -> str:
    return f"tp_headloss/rank {rank} is there"


def say_presence() -> None:
    """Tell the ranks that ask for `silent_ranks` that this one is there."""
    _default_store().set(_presence(dist.get_rank()), "")


def silent_ranks(seconds: float) -> list[int]:
    """Return the ranks of the job that do not say within so many seconds that they are there.

    By way of the job's store, which is no collective.
    """
    say_presence()
    store = _default_store()
    keys = [_presence(rank) for rank in range(dist.get_world_size())]
    with contextlib.suppress(RuntimeError):  # DistStoreError
        store.wait(keys, timedelta(seconds=seconds))
    return [rank for rank, key in enumerate(keys) if not store.check([key])]


def group_size(group) -> int:
    """Number of ranks of a group; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def gather_from_ranks(x: torch.Tensor, group) -> torch.Tensor:
    """Gather [..] of each rank: [P, ..], in rank order; one all-gather.

    There is none for a group of None or of one rank.
    """
    expect_live(group)
    size = group_size(group)
    if size == 1:
        return x.unsqueeze(0)
    gathered = x.new_empty(size * x.numel())  # flat, because gloo takes no other output shape
    _all_gather(gathered, x.contiguous().view(-1), group=group)
    return gathered.view(size, *x.shape)


def sum_over_ranks(x: torch.Tensor, group) -> torch.Tensor:
    """Sum [..] over the ranks, added in rank order: equal bits on every rank.

    One small all-gather.
    """
    parts = gather_from_ranks(x, group).unbind(0)
    return sum(parts[1:], start=parts[0])


@checked
def combine_metrics(
    parts: Annotated[Sequence[dict[str, torch.Tensor]], TupleOf(METRICS)],
) -> Metrics:
    """Combine the scalars by name of several batches (micro-batches, updates). No communication.

    Names in "max_" and "min_" are maximised and minimised, all others added in order; results are
    float64. A sum "perplexity" is one of log-probs: divide it by the count, negate, and take exp,
    as `mean_metrics` does.

    Args:
        parts: dicts of sums with the same names in the same order, such as ``out.metrics``. Means
            are no sums: those of `mean_metrics` are a ValueError, and in a plain dict "loss" beside
            a name that begins with "loss/", and a "perplexity" above 0 on a CPU. Other means in a
            dict of your own are added up, silently.

    Examples:
        >>> first = {"loss": torch.tensor(1.0), "max_ratio": torch.tensor(2.0)}
        >>> combine_metrics([first, {"loss": torch.tensor(0.5), "max_ratio": torch.tensor(3.0)}])
        {'loss': tensor(1.5000, dtype=torch.float64), 'max_ratio': tensor(3., dtype=torch.float64)}
    """
    if not parts:
        return {}
    names = [list(part) for part in parts]
    if any(own != names[0] for own in names):
        raise ValueError(f"metrics must have the same names in the same order, got {names}")
    if not parts[0]:
        return {}
    return _combine(parts[0], torch.stack([_stack(part) for part in parts]))


def _stack(metrics):
    if getattr(type(metrics), "are_means", False):
        raise ValueError(f"metrics must be sums by name, got means{OF_MEANS}")
    terms = [name for name in metrics if str(name).startswith("loss/")]
    if "loss" in metrics and terms:  # of mean_metrics, in a plain dict
        raise ValueError(
            f"metrics must be sums by name, got 'loss' beside {terms[0]!r}, which are the names of "
            f"means{OF_MEANS}; sums of your own need other names"
        )
    perplexity = metrics.get("perplexity")
    is_known = isinstance(perplexity, torch.Tensor) and perplexity.device.type == "cpu"
    if is_known and not torch.compiler.is_compiling() and bool((perplexity > 0).any()):
        raise ValueError(
            "metrics must be sums by name, got a 'perplexity' above 0, where the sum is one of "
            f"log-probs: it is a mean{OF_MEANS}"
        )
    for name, value in metrics.items():
        TensorLine("real numbers or bool", ()).check(f"metric {name!r}", value, {})
    return torch.stack([value.detach().double() for value in metrics.values()])


def _combine(names, parts):
    """Return the scalars by name of [parts, names] float64."""
    out = {}
    for name, column in zip(names, parts.unbind(1)):
        if name.startswith("max_"):
            out[name] = column.amax(0)
        elif name.startswith("min_"):
            out[name] = column.amin(0)
        else:
            values = column.unbind(0)
            out[name] = sum(values[1:], start=values[0])
    return out


@constant_for_compile
def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())


# Checksums of the names of metrics that a group is known to agree on. torch holds a group until it is
# destroyed.
_agreed: weakref.WeakKeyDictionary[ProcessGroup, set[int]] = weakref.WeakKeyDictionary()
PACKET = 64  # numbers that each rank sends, or a multiple, so that ranks with other metrics meet


def _expect_same_names(names: list[str], group: Group, checksum: int, found: torch.Tensor):
    """Raise ValueError unless the checksums [P] of all ranks are equal. Looks at them, and waits for
    the device, where the names are new to the group."""
    if torch.compiler.is_compiling() or group is None or checksum in _agreed.get(group, ()):
        return
    if found.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    others = [rank for rank, other in enumerate(found.tolist()) if other != checksum]
    if others:
        raise ValueError(
            "all ranks of the group must have metrics of the same names in the same order, got "
            f"{names} on rank {group.rank()} of the group, and others on ranks {others}"
        )
    _agreed.setdefault(group, set()).add(checksum)


@checked
def reduce_metrics(metrics: Metrics, group: Group) -> Metrics:
    """Reduce the scalars by name of each rank to those of the group; one small all-gather.

    Results have equal bits on every rank. As `combine_metrics`: "max_" and "min_" names are extrema
    (neutral: -inf and inf), all others sums (neutral: 0) in float64, so reduce sums and counts
    first and divide afterwards (for "perplexity": divide, negate, exp). The same names in the same
    order on every rank; float64 on the tensors' device. A rank compares names with those of the
    others where they are new to it in the group, and waits for its device. Where it does not (later,
    in a compiled function, in a CUDA graph), other names on one rank make all its results NaN.

    Args:
        group: data- and context-parallel ranks, which hold different tokens; None is one rank.
            Ranks that share a vocabulary have the same tokens and the same metrics, which a sum
            would count P times: a group with several ranks of a `VocabShard` that exists, such as
            its own or WORLD, is a ValueError.

    Raises:
        TypeError, ValueError: anything but a dict of scalars, means as in `combine_metrics`, other names
            on another rank, or a group of which some ranks share a vocabulary.

    Examples:
        >>> sums = reduce_metrics(
        ...     {"accuracy": torch.tensor(3.0), "count": torch.tensor(4.0)}, group=None
        ... )
        >>> sums["accuracy"] / sums["count"]
        tensor(0.7500, dtype=torch.float64)
    """
    if group is not None and holds_sharing_ranks(group.group_name):
        raise ValueError(
            "group must be the data- and context-parallel ranks, which hold different tokens, got "
            "the group of a VocabShard, or another one with several of its ranks, which have the "
            "same metrics already and would count several times: pass the group of ranks that have "
            "this rank's part of the vocabulary; those of other tokens are reduced when no "
            "VocabShard of these ranks exists"
        )
    if not metrics:
        return {}
    values, names = _stack(metrics), list(metrics)
    checksum = _checksum(repr(names))
    rest = -(len(names) + 1) % PACKET
    packet = torch.cat([values, values.new_full((1,), checksum), values.new_zeros(rest)])
    values, found, _ = gather_from_ranks(packet, group).split([len(names), 1, rest], 1)
    _expect_same_names(names, group, checksum, found[:, 0])
    return _combine(metrics, torch.where((found == checksum).all(), values, torch.nan))


class NumberedStore(Store):
    """A store of a group that numbers exchanges of addresses as the ranks make them.

    The n-th has the number n on every rank. torch numbers exchanges by process, so ranks of which
    one had met others in a smaller group would look for each other under different keys
    (pytorch/pytorch#196082). The keys are of this object alone: a group that is made again may have
    the name and the store of the one before.
    """

    def __init__(self, group):
        super().__init__()
        self.store = PrefixStore(gather_objects(uuid4().hex, group)[0], _store_of(group))
        self.numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        exchange, _, rank = key.rpartition("/")
        return f"{self.numbers.setdefault(exchange, len(self.numbers))}/{rank}"

    def set(self, key, value):
        self.store.set(self._key(key), value)

    def get(self, key):
        return self.store.get(self._key(key))

    def wait(self, keys, *timeout):
        self.store.wait([self._key(key) for key in keys], *timeout)

    @contextlib.contextmanager
    def in_place_of_store(self, group, device: torch.device):
        """Return a context in which torch finds this store by the group's name.

        A group's own store cannot be changed.
        """
        stand_in = ProcessGroup(self, group.rank(), group.size())
        stand_in._register_backend(
            device, ProcessGroup.BackendType.CUSTOM, group._get_backend(device)
        )
        try:
            _unregister_process_group(group.group_name)
            _register_process_group(group.group_name, stand_in)
            yield
        finally:
            _unregister_process_group(group.group_name)
            _register_process_group(group.group_name, group)
