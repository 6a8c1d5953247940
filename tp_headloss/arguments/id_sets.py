"""`IdSets`: sets of ids per token, how they are written, joined and cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeAlias

import torch

from ..spec import CheckedBy, TensorLine, checked
from ..statistics.sets import rows_and_places, spans_of
from .teachers import TopKTeacher


def _expect_sets(name: str, parts):
    """Raise TypeError or ValueError unless these are sets to join."""
    if not isinstance(parts, (tuple, list)) or any(not isinstance(part, IdSets) for part in parts):
        kinds = (
            [type(part).__name__ for part in parts]
            if isinstance(parts, (tuple, list))
            else type(parts).__name__
        )
        raise TypeError(f"{name} must be a list of IdSets, got {kinds}")
    if not parts:
        raise ValueError(f"{name} must be at least one IdSets, got none")


Parts: TypeAlias = Annotated[
    Sequence[Any], CheckedBy("a list of `IdSets`, at least one", _expect_sets)
]


FROM_LISTS = "integrations.sampling_masks.from_vllm([lists])"
OF_LISTS = (
    f": write torch.tensor(..), of lists of different lengths, one for each token, {FROM_LISTS}"
)
OF_VOCABULARY_MASK = (
    ": of a mask [.., V] write IdSets.from_csr(mask.nonzero()[:, -1], "
    "torch.nn.functional.pad(mask.sum(-1).flatten().cumsum(0), (1, 0)))"
)
OF_UNEVEN_LISTS = f": write {FROM_LISTS}"


def _line_of_ids(shape: tuple[str, ...]) -> TensorLine:
    return TensorLine(
        "int64 or int32",
        shape,
        of_list=OF_LISTS,
        of_uneven_lists=OF_UNEVEN_LISTS,
        of_mask=OF_VOCABULARY_MASK,
    )


SET_IDS = _line_of_ids(("..", "K"))
FLAT_IDS = _line_of_ids(("all",))
OFFSETS = TensorLine("int64 or int32", ("N + 1",), of_list=": write torch.tensor(..)")


@checked
@dataclass(frozen=True, eq=False)
class IdSets:
    """A set of ids per token, such as those that a sampler kept, over which the student is
    renormalised.

    A negative id is none, and an id that is there several times counts once. So pad with -1: a
    padding of 0 is the id 0, which counts. Sets of different sizes take less memory by `from_csr`.
    The tensors are not copied: leave them as they are. A set that is empty, that holds an id at or
    beyond the vocabulary or lacks its token's label makes the statistics over sets of that token
    NaN (``Options.check`` raises instead).

    Args:
        ids: global, replicated, in any order; ascending ones are a little quicker.
        mask: False for entries that are none; None: all count.

    Attributes:
        spans: None, or [.., 2] int64 bounds of each token's set in flat ids [all]; `from_csr` makes
            them.

    Examples:
        >>> kept = IdSets(torch.tensor([[0, 2, -1]]))  # a sampler kept the ids 0 and 2
        >>> want = "set_log_prob", "set_log_mass"
        >>> stats = vocab_statistics(torch.zeros(1, 4), torch.tensor([2]), want=want, sets=kept)
        >>> stats.set_log_prob, stats.set_log_mass  # log 1/2, log 2/4
        (tensor([-0.6931]), tensor([-0.6931]))
    """

    called = "sets."  # in messages
    remedy = ": a loss takes them as inputs={'sets': ..} of the call, vocab_statistics as sets="
    of_tensor = ": write IdSets(ids)"
    of_list = f": write IdSets(torch.tensor(..)), or of lists of different lengths {FROM_LISTS}"
    ids: Annotated[torch.Tensor, SET_IDS]
    mask: Annotated[torch.Tensor, TensorLine("bool", ("..", "K"))] | None = None
    # disjoint, within the ids
    spans: Annotated[torch.Tensor, TensorLine("int64 or int32", ("..", 2))] | None = field(
        default=None, init=False
    )

    @classmethod
    @checked
    def from_csr(
        cls,
        ids: Annotated[torch.Tensor, FLAT_IDS],
        offsets: Annotated[torch.Tensor, OFFSETS],
    ) -> IdSets:
        """Return sets of any sizes, as vLLM exports them: token i has ids[offsets[i] : offsets[i +
        1]].

        Args:
            ids: the sets one after the other, in the order of flattened labels.
            offsets: ascending from 0 to all. Others are a ValueError on CPUs. On GPUs nothing
                waits for their values: where they descend or leave the ids, the set is empty, and
                ids outside of them are in no set.

        Raises:
            ValueError: no offsets, or on CPUs others than such.
        """
        if not len(offsets):
            raise ValueError("offsets must be [N + 1] for N tokens, got none")
        offsets = offsets.long()
        if offsets.device.type == "cpu" and not torch.compiler.is_compiling():
            expect_offsets(offsets, len(ids))
        begin, end = offsets[:-1], offsets[1:]
        # sets that overlap could not be worked on at the same time
        sound = (
            (begin >= offsets.cummax(0).values[:-1])
            & (begin >= 0)
            & (end >= begin)
            & (end <= len(ids))
        )
        return ragged(ids, torch.where(sound[:, None], torch.stack([begin, end], 1), 0))

    @classmethod
    @checked
    def cat(cls, parts: Parts, dim: int = 0) -> IdSets:
        """Join sets along a dimension of their tokens, as torch.cat does. Those `from_csr` have one
        dimension.

        Examples:
            >>> ragged = IdSets.from_csr(torch.tensor([5, 2, 4]), torch.tensor([0, 1, 3]))
            >>> joined = IdSets.cat([ragged, IdSets(torch.tensor([[7, -1]]))])
            >>> joined.ids, joined.spans
            (tensor([ 5,  2,  4,  7, -1]), tensor([[0, 1],
                    [1, 3],
                    [3, 5]]))
        """
        return cls._join(torch.cat, parts, dim, 0)

    @classmethod
    @checked
    def stack(cls, parts: Parts, dim: int = 0) -> IdSets:
        """Join sets of equally many tokens along a new dimension, as torch.stack does.

        Examples:
            >>> steps = [
            ...     IdSets(torch.tensor([[5], [6]])),
            ...     IdSets(torch.tensor([[2, 4], [3, 8]])),
            ... ]  # two sequences
            >>> IdSets.stack(steps, dim=1).ids  # [sequence, step, K]
            tensor([[[ 5, -1],
                     [ 2,  4]],
            <BLANKLINE>
                    [[ 6, -1],
                     [ 3,  8]]])
        """
        return cls._join(torch.stack, parts, dim, 1)

    @classmethod
    def _join(cls, function, parts: Sequence[IdSets], dim: int, new_dims: int) -> IdSets:
        leads = [list(part._token_tensor.shape[:-1]) for part in parts]
        dims = len(leads[0]) + new_dims
        if any(len(lead) != len(leads[0]) for lead in leads) or (
            new_dims and any(lead != leads[0] for lead in leads)
        ):
            raise ValueError(f"sets to join must be of tokens of matching shapes, got {leads}")
        if not -dims <= dim < dims:
            raise IndexError(
                f"dim must be in [{-dims}, {dims}) for sets of tokens {leads[0]}, got {dim}"
            )
        dim %= dims
        if not new_dims:
            _expect_equal_but(dim, leads)
        if all(part.spans is None for part in parts):
            most = max(part.ids.shape[-1] for part in parts)
            missing = [(0, most - part.ids.shape[-1]) for part in parts]
            padded = [
                torch.nn.functional.pad(masked_ids(part), n, value=-1)
                for part, n in zip(parts, missing)
            ]
            return cls(function(padded, dim))
        ids, spans, first = [], [], 0
        for part in parts:
            flat, bounds = flat_ids(part, lambda x: x)
            ids.append(flat)
            spans.append(bounds + first)
            first += len(flat)
        return ragged(torch.cat(ids), function(spans, dim))

    def __len__(self) -> int:
        """Return the size of the tokens' first dimension."""
        if self._token_tensor.dim() < 2:
            raise TypeError("sets of one token have no length")
        return self._token_tensor.shape[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __contains__(self, _value):
        raise TypeError("sets are of many tokens: write sets.contains(labels), or sets.tolist()")

    def __eq__(self, other):
        if isinstance(other, IdSets):
            raise TypeError("sets have no ==: compare their .tolist()")
        return NotImplemented

    __hash__ = object.__hash__

    def __getattr__(self, name: str):
        said = ": they have .ids and .spans, and .tolist()" * hasattr(torch.Tensor, name)
        if name in ("cuda", "cpu"):
            said = f": write .to({name!r})"
        raise AttributeError(f"IdSets have no {name!r}{said}")

    def __getitem__(self, index) -> IdSets:
        """Return the sets of some tokens, by an index, slice, mask or tensor of indices as those of
        a tensor.

        Of sets `from_csr`, which keep all of their ids, only the bounds are cut. Indices, of which
        one may be there several times, copy the ids of the tokens, for which the host waits for a
        GPU.

        Examples:
            >>> sets = IdSets.from_csr(torch.tensor([5, 2, 4, 7]), torch.tensor([0, 1, 3, 4]))
            >>> sets[1:].spans, len(sets[torch.tensor([True, False, True])])
            (tensor([[1, 3],
                    [3, 4]]), 2)
        """
        key = index if isinstance(index, tuple) else (index,)
        found = self._map(lambda x: x[(*key, slice(None))])
        plain = int, slice, type(None), type(...)
        once = all(isinstance(k, plain) or getattr(k, "dtype", 0) == torch.bool for k in key)
        return found if once or found.spans is None else _apart(found.ids, found.spans)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> IdSets:
        """Return the sets on another device."""
        if isinstance(device, torch.dtype):
            raise TypeError(f"sets move to a device, got the dtype {device}")
        fields = {
            name: x for name in ("ids", "mask", "spans") if (x := getattr(self, name)) is not None
        }
        return replaced(
            self, **{name: x.to(device, non_blocking=non_blocking) for name, x in fields.items()}
        )

    def scatter(self, where: torch.Tensor) -> IdSets:
        """Return sets of the tokens of a mask: those of this object in order where it is True,
        empty ones elsewhere.

        The inverse of ``sets[where]``: the sets of completions become those of labels with prompts
        and padding.

        Args:
            where: [..] bool with as many True as there are sets. Waits for a GPU.

        Raises:
            ValueError: another number of True.

        Examples:
            >>> kept = IdSets(torch.tensor([[5, 6], [7, -1]]))  # of two sampled tokens
            >>> kept.scatter(torch.tensor([False, True, True, False])).ids
            tensor([[-1, -1],
                    [ 5,  6],
                    [ 7, -1],
                    [-1, -1]])
        """
        TensorLine("bool").check("where", where, {})
        lead = self._token_tensor.shape[:-1]
        if (count := int(where.sum())) != math.prod(lead):
            raise ValueError(
                f"where must be True for as many tokens as there are sets, {math.prod(lead)}, got "
                f"{count}"
            )

        def spread(x, empty):
            out = x.new_full((*where.shape, x.shape[-1]), empty)
            out[where] = x.reshape(math.prod(lead), x.shape[-1])
            return out

        if self.spans is not None:
            return ragged(self.ids, spread(self.spans, 0))
        return IdSets(spread(masked_ids(self), -1))

    def contains(self, labels: torch.Tensor) -> torch.Tensor:
        """Return whether each token's set holds its label [..], as bool [..]. A negative label is
        in none.

        Examples:
            >>> IdSets(torch.tensor([[5, 6], [7, -1]])).contains(torch.tensor([6, 6]))
            tensor([ True, False])
        """
        TensorLine("int64 or int32").check(
            "labels", labels, {"..": (self._token_tensor.shape[:-1], "the sets")}
        )
        if self.spans is None:
            return ((masked_ids(self) == labels[..., None]) & (labels[..., None] >= 0)).any(-1)
        ids, spans = flat_ids(self, lambda x: x.reshape(-1, 2))
        row, place = rows_and_places(spans)
        found, flat = (
            torch.zeros(len(spans), dtype=torch.bool, device=ids.device),
            labels.reshape(-1),
        )
        found[row[(ids[place] == flat[row]) & (flat[row] >= 0)]] = True
        return found.view(labels.shape)

    def tolist(self) -> list[list[int]]:
        """Return the ids of each token, tokens flat, as they were given but for those that are
        none. Waits for a GPU.

        Examples:
            >>> IdSets(torch.tensor([[5, 6], [7, -1]])).tolist()
            [[5, 6], [7]]
        """
        ids, spans = flat_ids(self, lambda x: x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))
        known = ids.tolist()
        return [[i for i in known[begin:end] if i >= 0] for begin, end in spans.tolist()]

    @property
    def _token_tensor(self) -> torch.Tensor:
        """The tensor [.., *] whose dimensions but the last are those of the tokens."""
        return self.ids if self.spans is None else self.spans

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> IdSets:
        if self.spans is not None:
            return ragged(self.ids, function(self.spans))
        return IdSets(function(self.ids), None if self.mask is None else function(self.mask))

    def expect_tokens(self, lead: Sequence[int]):
        """Raise ValueError unless these are sets of tokens of this shape, or of as many flat
        ones."""
        own = self._token_tensor.shape[:-1]
        if own not in (torch.Size(lead), (math.prod(lead),)):
            raise ValueError(f"sets must be of tokens {list(lead)}, or these flat, got {list(own)}")

    def map_tokens(
        self, lead: Sequence[int], function: Callable[[torch.Tensor], torch.Tensor]
    ) -> IdSets:
        """The sets with function(x) in place of each tensor [*lead, *] of tokens."""
        self.expect_tokens(lead)
        sets = self if self.spans is None else ragged(self.ids, self.spans.reshape(*lead, 2))
        return sets._map(function)


def _expect_equal_but(dim: int, leads: list[list[int]]):
    """Raise ValueError unless the tokens' shapes are equal but for this dimension."""
    others = [lead[:dim] + lead[dim + 1 :] for lead in leads]
    if all(other == others[0] for other in others):
        return
    shape = ", ".join(map(str, leads[0]))
    raise ValueError(
        f"sets to join must be of tokens of equal shapes but for dim {dim}, got {leads}: pad the "
        f"shorter ones with empty sets, or flatten each, those of tokens {leads[0]} by "
        f"sets[torch.ones({shape}, dtype=torch.bool)]"
    )


def expect_offsets(offsets: torch.Tensor, count: int):
    """Raise ValueError unless offsets ascend from 0 to the number of ids. Reads their values."""
    ascend = not bool((offsets.diff() < 0).any())
    first, last = offsets[[0, -1]].tolist()
    if ascend and (first, last) == (0, count):
        return
    may_be_counts = int(offsets.sum()) == count and int(offsets.min()) >= 0
    are_of_a_part = ascend and 0 <= first <= last <= count
    advice = []
    if may_be_counts:
        advice.append("counts? Pass torch.nn.functional.pad(counts.cumsum(0), (1, 0))")
    if ascend and last == count:
        advice.append("ends alone? Pass torch.nn.functional.pad(ends, (1, 0))")
    elif are_of_a_part:
        advice.append(f"of a part of the ids? Pass ids[{first}:{last}] and offsets - {first}")
    said = ": " * bool(advice) + "; ".join(advice)
    raise ValueError(
        f"offsets must be ascending from 0 to {count}, so that each id is in one set, got "
        f"{offsets[:16].tolist()}{said}"
    )


def ragged(ids: torch.Tensor, spans: torch.Tensor) -> IdSets:
    """The sets with these bounds [.., 2] in flat ids [all]. No two may share a place: kernels work
    on all at once."""
    sets = IdSets(ids)
    object.__setattr__(sets, "spans", spans)
    return sets


def replaced(x, **fields):
    """dataclasses.replace, of sets `from_csr`, too, whose bounds are no argument."""
    if isinstance(x, IdSets) and x.spans is not None:
        return ragged(fields.get("ids", x.ids), fields.get("spans", x.spans))
    return replace(x, **fields)


def _apart(ids, spans) -> IdSets:
    """Sets whose bounds [.., 2] may share places, each with ids of its own."""
    flat = spans.reshape(-1, 2)
    _row, place = rows_and_places(flat)
    return ragged(ids[place], spans_of(flat[:, 1] - flat[:, 0]).view(spans.shape))


def masked_ids(given: IdSets | TopKTeacher) -> torch.Tensor:
    """The ids [.., K], negative where there is none."""
    return given.ids if given.mask is None else torch.where(given.mask, given.ids, -1)


def flat_ids(sets: IdSets, flatten) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of all sets [all], and bounds [.., 2] of each token's; flatten: [.., *] -> [.., *],
    such as [N, *]."""
    if sets.spans is not None:
        return sets.ids.contiguous(), flatten(sets.spans).contiguous()
    ids = flatten(masked_ids(sets))
    *lead, size = ids.shape
    bounds = size * torch.arange(math.prod(lead) + 1, device=ids.device)
    return ids.reshape(-1).contiguous(), torch.stack([bounds[:-1], bounds[1:]], -1).view(*lead, 2)
