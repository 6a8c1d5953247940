"""`VocabShard`: the contiguous vocabulary ids that a rank owns, and the group that owns the others.

The global vocabulary, padded to a multiple of 128, is cut into 8 equal chunks. A shard made of
whole chunks sends one packet of statistics (a few numbers per token) for each chunk, so that the
same 8 packets are merged in the same order at 1, 2, 4 and 8 ranks, with the same bits. Any other
shard sends one packet, and results depend on the group's size.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from ..spec import CheckedBy, Count, IntLine, Size, TupleOf, checked
from .compiler import constant_for_compile
from .groups import (
    Group,
    expect_group,
    gone,
    have_common_ranks,
    is_live_group,
    remember,
    resolve_process_group,
)

CHUNKS = 8
PADDING_UNIT = 128  # rows: what trainers pad each rank's part of a vocabulary to
CHUNK_ALIGNMENT = 16  # elements: chunks start at vectorisable addresses
# of several ranks, by id
_shared_shards: weakref.WeakValueDictionary[int, VocabShard] = weakref.WeakValueDictionary()


@constant_for_compile
def has_vocab_shard(group_name: str) -> bool:
    """Return True if a VocabShard of this process group exists, or of another group of the same
    ranks, several of them."""
    group = resolve_process_group(group_name)
    if _is_shared(group):
        gc.collect()  # a shard that only a reference cycle holds does not count
    return _is_shared(group)


@constant_for_compile
def holds_sharing_ranks(group_name: str) -> bool:
    """Return True if a VocabShard exists whose group has this rank and another one in common with
    this process group."""

    def is_found() -> bool:
        return any(have_common_ranks(group_name, shard.group_name) for shard in _live_shards())

    if is_found():
        gc.collect()  # as above
    return is_found()


def refuse_group_of_other_ranks(name: str, group: dist.ProcessGroup):
    """Raise ValueError if VocabShards over several ranks exist, and this process group holds other
    tokens: it is the whole job, or shares one rank alone with each shard's group."""
    if _is_shared(group) or not _live_shards():
        return
    gc.collect()  # as above
    ranks = {*dist.get_process_group_ranks(group)}
    owners = [{*dist.get_process_group_ranks(shard.group)} for shard in _live_shards()]
    is_of_data = all(len(ranks & own) < 2 for own in owners)
    if owners and (is_of_data or len(ranks) == dist.get_world_size()):
        raise ValueError(
            f"{name} must be the ranks that hold the other parts of a parameter, as those of a "
            f"VocabShard do, got the ranks {dist.get_process_group_ranks(group)}, over which there "
            "is no VocabShard: pass shard.group, not WORLD nor the data-parallel group; parameters "
            "over other ranks are DTensors"
        )


def _is_shared(group: dist.ProcessGroup) -> bool:
    """Return True if a VocabShard is of this process group, or of another one of its ranks."""
    ranks = {*dist.get_process_group_ranks(group)}
    for shard in list(_shared_shards.values()):
        if shard.group is group:
            return True
        is_known = len(ranks) == shard.world_size > 1 and is_live_group(
            shard.group, shard.group_name
        )
        if is_known and ranks == {*dist.get_process_group_ranks(shard.group)}:
            return True
    return False


def _live_shards() -> list[VocabShard]:
    """Return the shards of several ranks whose process group is live."""
    shards = list(_shared_shards.values())
    return [shard for shard in shards if is_live_group(shard.group, shard.group_name)]


def canonical_chunk_size(vocab_size: int) -> int:
    """Return the columns per chunk of whole-chunk shards.

    They are an eighth of the vocabulary padded to a multiple of 128.
    """
    return -(-vocab_size // (CHUNKS * CHUNK_ALIGNMENT)) * CHUNK_ALIGNMENT


def _expect_mesh(name: str, mesh):
    if type(mesh).__name__ != "DeviceMesh":  # which is not imported here
        said = ": use VocabShard.from_group" if isinstance(mesh, dist.ProcessGroup) else ""
        kind = type(mesh).__name__ if said else repr(mesh)
        raise TypeError(f"{name} must be a torch.distributed.DeviceMesh, got {kind}{said}")


Mesh: TypeAlias = Annotated[Any, CheckedBy("a `torch.distributed.DeviceMesh`", _expect_mesh)]


def _rank_and_size(group) -> tuple[int, int]:
    """Return (this rank in the group, size of the group), (0, 1) for None.

    ValueError if this rank is not a member.
    """
    expect_group(group)
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


class ShardFacts(NamedTuple):
    """Plain values of a shard, for code that must not see a process group."""

    start: int
    valid_width: int
    vocab_size: int
    chunk_size: int
    chunks: int
    world_size: int
    group_name: str


@checked
@dataclass(frozen=True)
class VocabShard:
    """The contiguous vocabulary ids ``[start, stop)`` of this rank.

    Ids at or beyond ``vocab_size`` are padding. The shards of a group, in any rank order, must
    cover ``[0, vocab_size)`` once; uneven and empty shards are fine. A token whose label has no
    owner, or two, becomes NaN on every rank. The constructor does not communicate, so a rank does
    not know the other ranks' bounds, and results are deterministic but not bitwise equal across
    group sizes. `from_group`, `from_mesh` and `from_boundaries` know every bound: results are
    bitwise equal if `tp_invariant`.

    All ranks make their shards in the same way: equal bounds of the constructor on one rank and of
    `from_group` on another send other numbers of packets. An id in a gap of explicit bounds is left
    out of every sum, and no label shows it where none has that id: ``Options(validate="full")``
    finds it, ``check=True`` does not.

    One thread at a time uses a group, on all ranks in one order; threads that have a group each are
    right. A shard with a group cannot be pickled: each process makes its own, and so does a forked
    child, whose calls with its parent's shard are a ValueError if the group has several ranks.

    Args:
        vocab_size: V, the number of ids of the true vocabulary.
        group: the one that shares the vocabulary. None: not sharded; no group is ever looked up
            implicitly.

    Attributes:
        tp_invariant: every shard of the group is 8 / P whole chunks: results have the same bits at
            any such P.
        chunks: packets of statistics that this rank sends.
        chunk_size: columns of each.
        padded_size: rows of all shards together, if they are cut as by `from_group`, else None.
        world_size: P, the number of ranks of the group.
        group_name: the group's name in torch, "" for one rank.

    Examples:
        >>> shard = VocabShard.from_group(
        ...     None, vocab_size=50257, padded_size=50304
        ... )  # or a process group
        >>> shard.start, shard.stop, shard.width, shard.valid_width, shard.tp_invariant
        (0, 50304, 50304, 50257, True)
    """

    start: Count
    stop: Count
    vocab_size: Size
    group: Group = None
    tp_invariant: bool = field(init=False)
    chunks: int = field(init=False)
    chunk_size: int = field(init=False)
    padded_size: int | None = field(init=False)
    world_size: int = field(init=False)
    group_name: str = field(init=False)
    facts: ShardFacts = field(init=False, compare=False, repr=False)

    def __post_init__(self):
        for name in ("start", "stop", "vocab_size"):
            if not isinstance(bound := getattr(self, name), int):  # numpy's, say
                object.__setattr__(self, name, int(bound))
        if self.start > self.stop:
            raise ValueError(f"a shard needs 0 <= start <= stop, got [{self.start}, {self.stop})")
        world_size = _rank_and_size(self.group)[1]
        if world_size == 1 and (self.start > 0 or self.stop < self.vocab_size):
            raise ValueError(
                f"one rank alone must own the whole vocabulary [0, {self.vocab_size}), got "
                f"[{self.start}, {self.stop}); give the process group that owns the rest"
            )
        fill = object.__setattr__  # frozen: the derived fields are written once, here
        if world_size > 1 and not torch.compiler.is_compiling():
            _shared_shards[id(self)] = self
            remember(self.group)
        fill(self, "world_size", world_size)
        fill(self, "padded_size", self.stop if world_size == 1 else None)
        group = None if world_size == 1 else self.group
        fill(self, "group_name", "" if group is None else group.group_name)
        self._set_chunks(whole=world_size == 1)

    def __deepcopy__(self, memo):
        return self  # immutable, and a process group cannot be copied

    def __copy__(self):
        return self

    def __getstate__(self):
        if self.group is not None:
            raise TypeError(
                "a VocabShard holds a process group, which cannot be pickled, and so does a "
                "VocabParallelHead or VocabParallelEmbedding: make shards anew in each process, "
                "and save the state_dict of modules"
            )
        return self.__dict__

    def expect_live_group(self):
        """Raise ValueError if the process group was destroyed, or is that of a parent process.

        Another group may have its name by now, so whatever finds the group by its name later than
        the call that had the shard (a backward, a mark on a parameter) asks here first. Not while
        torch.compile traces.
        """
        if self.world_size == 1 or torch.compiler.is_compiling():
            return
        if not is_live_group(self.group, self.group_name):
            raise ValueError(gone("the shard's process group", self.group_name, self.group))

    def expect_width(self, name: str, size: int, each: str, other_size: int | None = None):
        """Raise ValueError, with a likely reason, unless there is a column, or row, for each id.

        other_size: of a matrix's other dimension, which may be the one that is meant.
        """
        if size == self.width:
            return
        total = size * self.world_size
        if self.world_size > 1 and size in (self.vocab_size, self.padded_size):
            why = f"these look like gathered {each}; if they are one rank's, vocab_size is that of all ranks, {total}"
        elif size == 0:
            why = "empty: replaced by to_dtensor after another module was tied to it? Tie it later"
        elif other_size == self.width:
            why = f"transposed? It has {self.width} columns: pass its .t()"
        elif size > self.width and self.vocab_size <= total <= self._most_padded():
            made = f"VocabShard.from_group(group, {self.vocab_size}, padded_size={total})"
            why = f"a padded vocabulary? {made}, with vocab_size the ids of all ranks"
        else:
            alone = self.says_alone()
            why = f"is vocab_size={self.vocab_size} right?" + (alone and f"; {alone}")
            if name == "logits":
                why += (
                    "; hidden states need their weight: linear_vocab_statistics, HeadLoss.linear, "
                    "weight= of sample, kept_ids and topk_log_probs"
                )
        bounds = f"{self.width} {each} [{self.start}, {self.stop})"
        raise ValueError(f"{name} must have the shard's {bounds}, got {size} ({why})")

    def other_columns_hint(self, size: int, has_rows: bool, is_vector: bool = False) -> str:
        """Return what to pass in the place of something that lies beside the shard's columns, and
        has another number of them: only what is right whatever these are.

        Args:
            size: the number that it has.
            has_rows: these are rows, of a matrix or, with is_vector, of a vector.
        """
        place = "" if has_rows else "..., "
        of_padding = self.width - self.valid_width
        if self.world_size > 1 and size in (self.vocab_size, self.padded_size):
            said = f": of the whole vocabulary? Pass its [{place}shard.start:shard.stop]"
            return said if has_rows else f"{said}, beside DTensor logits a DTensor"
        if 0 < self.width - size == of_padding:
            pad = f"0, {of_padding}" if is_vector or not has_rows else f"0, 0, 0, {of_padding}"
            ids = f"{self.start} to {self.start + self.valid_width - 1}"
            return f": without the shard's padding? Pass F.pad(.., ({pad})), if its ids are {ids}"
        if is_vector:
            return f": one for each of the shard's ids from {self.start} to {self.stop}"
        if has_rows:
            return (
                ": of other bounds or ids? select_rows(rows, ids, shard=its_shard, to=shard) lays "
                "out those of the student's ids, torch.arange(V) if these are the same"
            )
        if self.world_size > 1:
            return (
                ": cut at other bounds? Gather the columns of all its ranks, and pass their "
                "[..., shard.start:shard.stop]"
            )
        if size > self.width:
            return (
                ": of more ids? Pass the columns of the student's ids, its "
                f"[..., :{self.width}], if these are the first"
            )
        missing = self.width - size
        return (
            f": of fewer ids? Pass F.pad(.., (0, {missing}), value=-torch.inf), if the last are "
            "missing"
        )

    def _most_padded(self) -> int:
        """Return the largest size that a vocabulary of this one is padded to, as Megatron pads it:
        whole multiples of 128 on each rank."""
        unit = PADDING_UNIT * self.world_size
        return -(-self.vocab_size // unit) * unit

    def says_alone(self) -> str:
        """Return words for errors where one rank alone owns the vocabulary, maybe by mistake; ""
        where several share it."""
        if self.world_size > 1:
            return ""
        if self.group is None:
            return (
                "if these are one rank's, make the shard with its group, after init_process_group"
            )
        return (
            "the shard's group has 1 rank: if others have the rest of the vocabulary, make the "
            "shard with the group of them all"
        )

    def _set_chunks(self, whole: bool):
        """Set the fields that depend on whether all shards of the group are of whole chunks."""
        fill = object.__setattr__
        fill(self, "tp_invariant", whole)
        fill(self, "chunks", CHUNKS // self.world_size if whole else 1)
        chunk_size = canonical_chunk_size(self.vocab_size) if whole else max(self.width, 1)
        fill(self, "chunk_size", chunk_size)
        known = {name: getattr(self, name) for name in ShardFacts._fields}
        fill(self, "facts", ShardFacts(**known))

    @classmethod
    @checked
    def from_group(
        cls, group: Group, vocab_size: Size, padded_size: Size | None = None
    ) -> VocabShard:
        """Return this rank's shard of ``ceil(padded_size / P)`` ids in group-rank order.

        They are cut as by `torch.chunk` and by a DTensor's ``Shard``; the last shards may be
        shorter, or empty.

        Args:
            vocab_size: V, the number of ids of the true vocabulary, such as len(tokenizer). The
                padded size here would count padding as ids, silently.
            padded_size: rows of all shards together, padding included; default vocab_size.
            group: after `init_process_group`. Before it ``torch.distributed.group.WORLD`` is None,
                which is one rank that has the whole vocabulary, without a word.

        Examples:
            >>> VocabShard.from_group(None, 1000, padded_size=1024).valid_width
            1000
        """
        padded_size = int(vocab_size if padded_size is None else padded_size)
        if padded_size < vocab_size:
            raise ValueError(
                f"padded_size must be at least vocab_size = {vocab_size}, got {padded_size}"
            )
        world_size = _rank_and_size(group)[1]
        step = -(-padded_size // world_size)
        boundaries = [min(r * step, padded_size) for r in range(world_size + 1)]
        return cls.from_boundaries(boundaries, vocab_size, group)

    @classmethod
    @checked
    def from_mesh(
        cls,
        mesh: Mesh,
        vocab_size: Size,
        dim: str | int | None = None,
        padded_size: Size | None = None,
    ) -> VocabShard:
        """Return `from_group` for the group of one dimension of a device mesh.

        Args:
            vocab_size, padded_size: as in `from_group`.
            dim: name or number of the dimension that shards the vocabulary; a mesh of one dimension
                needs none.
        """
        if dim is None and mesh.ndim != 1:
            raise ValueError(
                f"the mesh has dimensions {mesh.mesh_dim_names or mesh.ndim}: name the one that "
                "shards V"
            )
        try:
            group = mesh.get_group(dim)
        except (KeyError, IndexError, RuntimeError, ValueError) as error:
            known = list(mesh.mesh_dim_names or range(mesh.ndim))
            raise ValueError(
                f"dim must be a dimension of the mesh, {known}, got {dim!r}"
            ) from error
        return cls.from_group(group, vocab_size, padded_size)

    @classmethod
    @checked
    def from_boundaries(
        cls,
        boundaries: Annotated[Sequence[int], TupleOf(IntLine(0))],
        vocab_size: Size,
        group: Group = None,
    ) -> VocabShard:
        """Return this rank's shard where group rank r owns ``[boundaries[r], boundaries[r + 1])``.

        Args:
            boundaries: P + 1 ascending ids from 0 to at least vocab_size, the same list on every
                rank.
            vocab_size, group: as in `from_group`.
        """
        rank, world_size = _rank_and_size(group)
        boundaries = [int(boundary) for boundary in boundaries]
        has_all = len(boundaries) == world_size + 1
        ascend = all(a <= b for a, b in zip(boundaries, boundaries[1:]))
        covers = has_all and boundaries[0] == 0 and boundaries[-1] >= vocab_size
        if not (ascend and covers):
            raise ValueError(
                f"boundaries must be {world_size + 1} ascending ids from 0 to at least "
                f"{vocab_size}, got {boundaries}"
            )
        chunks = canonical_chunk_size(vocab_size) * CHUNKS
        starts = enumerate(boundaries[:-1])
        whole = CHUNKS % world_size == 0 and all(b == r * chunks // world_size for r, b in starts)
        shard = cls(boundaries[rank], boundaries[rank + 1], vocab_size, group)
        shard._set_chunks(whole)
        total = boundaries[-1]
        step = -(-total // world_size)
        even = all(b == min(r * step, total) for r, b in enumerate(boundaries))
        object.__setattr__(shard, "padded_size", total if even else None)
        return shard

    @property
    def width(self) -> int:
        """Number of columns of this rank's logits, padding included."""
        return self.stop - self.start

    @property
    def valid_width(self) -> int:
        """Number of columns of this rank's logits that are ids of the true vocabulary."""
        return max(0, min(self.stop, self.vocab_size) - self.start)
