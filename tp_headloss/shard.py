"""Which contiguous vocabulary ids a rank owns, and with whom it shares the rest.

The global vocabulary, padded to a multiple of 128, is cut into 8 equal chunks. A shard made of whole chunks sends one
packet of statistics per chunk, so that the same 8 packets meet in the same order at 1, 2, 4 and 8 ranks and every
result has the same bits. Any other shard sends one packet and is merely deterministic.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from .validation import expect_int

CHUNKS = 8
CHUNK_ALIGNMENT = 16  # elements: chunks start at vectorisable addresses


_sharing: weakref.WeakValueDictionary[int, VocabShard] = weakref.WeakValueDictionary()  # shards of several ranks


def shares_vocabulary(group) -> bool:
    """Whether a VocabShard of this process group exists."""

    def found():
        return any(shard.group is group for shard in list(_sharing.values()))

    if found():
        gc.collect()  # one that only a cycle still holds is gone
    return found()


def exists(group, name: str) -> bool:
    """Whether the process group that had this name when it was made is still the one of this name."""
    try:
        return _resolve_process_group(name) is group
    except (LookupError, RuntimeError, ValueError):
        return False


def canonical_chunk_size(vocab_size: int) -> int:
    """Columns per canonical chunk: an eighth of the vocabulary padded to a multiple of 128."""
    return -(-vocab_size // (CHUNKS * CHUNK_ALIGNMENT)) * CHUNK_ALIGNMENT


def _rank_and_size(group) -> tuple[int, int]:
    if group is None:
        return 0, 1
    if type(group).__name__ == "DeviceMesh":
        raise TypeError("a shard needs a process group, got a DeviceMesh: use VocabShard.from_mesh")
    rank = dist.get_rank(group) if isinstance(group, dist.ProcessGroup) else -1  # a sentinel stands for "not a member"
    if rank < 0:
        raise ValueError(f"this rank is not a member of the shard's process group, got {group!r}")
    return rank, dist.get_world_size(group)


class ShardFacts(NamedTuple):
    """The plain values of a shard that a pass needs."""

    start: int
    valid_width: int
    vocab_size: int
    chunk_size: int
    chunks: int
    world_size: int
    group_name: str


@dataclass(frozen=True)
class VocabShard:
    """The contiguous vocabulary ids ``[start, stop)`` of this rank; ids at or beyond ``vocab_size`` are padding.

    ``VocabShard(start, stop, vocab_size, group)`` takes explicit bounds: uneven and empty shards are fine, and the
    shards of the group, in any rank order, must cover ``[0, vocab_size)`` once (a token whose label has no owner, or
    two, becomes NaN on every rank). It needs no communication, and because a rank then knows nothing of the others'
    bounds its results are deterministic but not bitwise equal across group sizes; `from_group`, `from_mesh` and
    `from_boundaries` know every bound and are, where the shards are whole chunks (see `tp_invariant`).

    ``group=None`` means not sharded: no process group is ever looked up implicitly. Raises ValueError for bounds that
    cannot work.
    """

    start: int
    stop: int
    vocab_size: int
    group: dist.ProcessGroup | None = None
    # every shard of the group is made of 8 / P whole chunks: results have the same bits at any such P
    tp_invariant: bool = field(init=False)
    chunks: int = field(init=False)  # packets this rank sends
    chunk_size: int = field(init=False)
    padded_size: int | None = field(init=False)  # rows of all shards together, if they are cut as torch.chunk cuts
    world_size: int = field(init=False)
    group_name: str = field(init=False)
    facts: ShardFacts = field(init=False, compare=False, repr=False)

    def __post_init__(self):
        for name in ("start", "stop", "vocab_size"):
            object.__setattr__(self, name, expect_int(name, getattr(self, name)))
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"a shard needs 0 <= start <= stop, got [{self.start}, {self.stop})")
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {self.vocab_size}")
        world_size = _rank_and_size(self.group)[1]
        if world_size == 1 and (self.start > 0 or self.stop < self.vocab_size):
            raise ValueError(
                f"one rank alone must own the whole vocabulary [0, {self.vocab_size}), got [{self.start}, {self.stop});"
                " give the process group that owns the rest"
            )
        fill = object.__setattr__  # frozen: the derived fields are written once, here
        if world_size > 1 and not torch.compiler.is_compiling():
            _sharing[id(self)] = self
        fill(self, "world_size", world_size)
        fill(self, "padded_size", self.stop if world_size == 1 else None)
        fill(self, "group_name", "" if world_size == 1 else self.group.group_name)
        self._cut(whole=world_size == 1)

    def __deepcopy__(self, memo):
        return self  # it never changes, and its group cannot be copied

    def __copy__(self):
        return self

    def __getstate__(self):
        if self.group is not None:
            raise TypeError(
                "a VocabShard holds a process group, which cannot be pickled, and so does a VocabParallelHead or "
                "VocabParallelEmbedding: make shards anew in each process, and save the state_dict of modules"
            )
        return self.__dict__

    def expect_live_group(self):
        """Raise ValueError if the process group was destroyed. Its name may be another group's by now."""
        if self.world_size > 1 and not exists(self.group, self.group_name):
            raise ValueError(
                f"the shard's process group {self.group_name!r} was destroyed: make a VocabShard of a group that exists"
            )

    def _cut(self, whole: bool):
        fill = object.__setattr__
        fill(self, "tp_invariant", whole)
        fill(self, "chunks", CHUNKS // self.world_size if whole else 1)
        fill(self, "chunk_size", canonical_chunk_size(self.vocab_size) if whole else max(self.width, 1))
        known = {name: getattr(self, name) for name in ShardFacts._fields}
        fill(self, "facts", ShardFacts(**known))

    @classmethod
    def from_group(cls, group, vocab_size: int, padded_size: int | None = None) -> VocabShard:
        """Equal shards of ``ceil(padded_size / P)`` ids in group-rank order (the last ones shorter or empty), the split
        of `torch.chunk` and of a DTensor's ``Shard``. ``padded_size`` (default ``vocab_size``) counts padding rows."""
        vocab_size = expect_int("vocab_size", vocab_size)
        padded_size = vocab_size if padded_size is None else expect_int("padded_size", padded_size)
        if padded_size < vocab_size:
            raise ValueError(f"padded_size must be at least vocab_size = {vocab_size}, got {padded_size}")
        world_size = _rank_and_size(group)[1]
        step = -(-padded_size // world_size)
        return cls.from_boundaries([min(r * step, padded_size) for r in range(world_size + 1)], vocab_size, group)

    @classmethod
    def from_mesh(cls, mesh, vocab_size: int, dim: str | int | None = None, padded_size: int | None = None):
        """`from_group` for the group of one dimension of a `torch.distributed.DeviceMesh` (the only one if 1-D)."""
        if dim is None and mesh.ndim != 1:
            raise ValueError(f"the mesh has dimensions {mesh.mesh_dim_names or mesh.ndim}: name the one that shards V")
        return cls.from_group(mesh.get_group(dim), vocab_size, padded_size)

    @classmethod
    def from_boundaries(cls, boundaries, vocab_size: int, group=None) -> VocabShard:
        """Group rank r owns ``[boundaries[r], boundaries[r + 1])``; the same list on every rank."""
        rank, world_size = _rank_and_size(group)
        ordered = len(boundaries) == world_size + 1 and all(a <= b for a, b in zip(boundaries, boundaries[1:]))
        if not ordered or boundaries[0] != 0 or boundaries[-1] < vocab_size:
            raise ValueError(
                f"boundaries must be {world_size + 1} ascending ids from 0 to at least {vocab_size}, got {boundaries}"
            )
        whole = CHUNKS % world_size == 0 and all(
            b == r * canonical_chunk_size(vocab_size) * CHUNKS // world_size for r, b in enumerate(boundaries[:-1])
        )
        shard = cls(boundaries[rank], boundaries[rank + 1], vocab_size, group)
        shard._cut(whole)
        total, step = boundaries[-1], -(-boundaries[-1] // world_size)
        even = all(b == min(r * step, total) for r, b in enumerate(boundaries))
        object.__setattr__(shard, "padded_size", total if even else None)
        return shard

    @property
    def width(self) -> int:
        """Columns of this rank's logits, padding included."""
        return self.stop - self.start

    @property
    def valid_width(self) -> int:
        """Columns of this rank's logits that are ids of the true vocabulary."""
        return max(0, min(self.stop, self.vocab_size) - self.start)
