"""`select_rows`: some rows of a sharded vocabulary matrix, for a model over a subset of it."""

from __future__ import annotations

from typing import Annotated

import torch

from ..arguments.options import Options
from ..call.agreement import Agreement
from ..call.dtensor import local_rows
from ..call.statistics import hint_alone
from ..ranks.comm import reduce_in_place
from ..ranks.shard import VocabShard
from ..spec import Rows, TensorLine, described, lines_within

SENT_ROWS = 1024  # rows of a matrix that ranks exchange at once
IDS = TensorLine("int64 or int32", ("V_d",), hint=": the order is select_rows(weight, ids)")
# what ranks compare, as an error says it
WHOLE_WEIGHT = "weight, whole on each rank without shard= (of sharded rows, pass their shard=)"


def _expect_distinct(ids: torch.Tensor, shard: VocabShard):
    """Raise ValueError for ids outside of the vocabulary, or more than once."""
    vocab_size = shard.vocab_size
    ordered = ids.sort().values
    is_outside = (ordered < 0) | (ordered >= vocab_size)
    is_again = torch.zeros_like(is_outside)
    is_again[1:] = ordered[1:] == ordered[:-1]
    # of both at once, because it waits for a GPU
    if not len(wrong := ordered[is_outside | is_again]):
        return
    if outside := [i for i in wrong.tolist() if not 0 <= i < vocab_size]:
        is_beyond = outside[-1] >= vocab_size
        said = hint_alone(shard, "is the weight one rank's rows?") * is_beyond
        raise ValueError(f"ids must be in [0, {vocab_size}), got {outside[:8]}{said}")
    again = list(dict.fromkeys(wrong.tolist()))
    raise ValueError(
        f"ids must be distinct, got {again[:8]} more than once: torch.unique(ids), or of a draft's "
        "d2t, which are offsets, d2t + torch.arange(len(d2t))"
    )


def _hint_of_other_ids(given: int, expected: int) -> str:
    """Return what to pass where `to` shards another number of ids than were given."""
    if given > expected:
        return f": pass those of `to`, torch.arange({expected}) if they are the first"
    return f": of these it is VocabShard.from_group(group, {given})"


@torch.no_grad()
@described
def select_rows(
    weight: Rows,
    ids: Annotated[torch.Tensor, IDS],
    *,
    shard: VocabShard | None = None,
    to: VocabShard | None = None,
) -> torch.Tensor:
    """Return the rows of some ids of a sharded vocabulary matrix, sharded over the same ranks, or
    over those of another group.

    For a draft model over a subset of the vocabulary (EAGLE-3), whose teacher is then the target
    model's head at these ids: ``TeacherHead(hidden, select_rows(weight, ids, shard=shard))``,
    selected once from a frozen weight. All ranks of both groups call it; the ids' rows travel to
    every rank, by blocks, and the arguments are compared between ranks. Rows that lie on one rank
    alone are those of ``VocabShard.from_boundaries([0, V, V], V, group)``, and the other rank has
    ``weight.new_empty(0, H)``.

    Args:
        weight: [width, ..] this rank's rows, or a DTensor; a bias [width] is such a matrix, too.
        ids: in [0, V), distinct, replicated: id i of the subset is ids[i]. A softmax over the
            subset would count an id that is there twice twice. A draft's "d2t" are offsets: the ids
            are ``d2t + torch.arange(len(d2t))``.
        shard: of the weight. None: not sharded, or the DTensor's layout. With `to` of several ranks
            a whole weight must have equal bits on all of them, so that a forgotten ``shard=`` is
            found; without `to` it is not, and each rank's own rows are taken for ids from 0.
        to: of the subset, of V_d ids; by default ``VocabShard.from_group(shard.group, len(ids))``.
            Its group may be another one, such as the student's, whose ranks are all in a group of
            the weight's shard. For a student on one rank alone each rank gives
            ``VocabShard.from_group(None, len(ids))``, and the others throw the result away. A
            ``shard=`` or ``to=`` that one rank alone leaves out makes the ranks wait for each other.

    Returns:
        [to.width, ..] new memory, without gradient; rows of padding are 0.

    Raises:
        TypeError, ValueError: arguments that do not fit or differ between ranks; ids outside of the
            vocabulary, or more than once.

    Examples:
        >>> weight, ids = torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([3, 1])
        >>> select_rows(weight, ids)
        tensor([[3.],
                [1.]])
        >>> draft_id = torch.full((4,), -100).index_copy(
        ...     0, ids, torch.arange(2)
        ... )  # of each id; -100: not in the subset
        >>> labels = torch.tensor([1, 2, 3, -100])
        >>> known = draft_id[labels.clamp(min=0)]  # draft_id[-100] counts from the end
        >>> torch.where(labels < 0, -100, known)
        tensor([   1, -100,    0, -100])
    """
    full = Options(validate="full")
    with Agreement(full, to) as of_subset, Agreement(full, shard) as of_weight:
        weight, shard = local_rows("weight", weight, shard)
        shard.expect_width("weight", weight.shape[0], "rows")
        for name, x in (("ids", ids), ("to", to)):
            lines_within(select_rows)[name].check(name, x, {})
        if not len(ids):
            raise ValueError("ids must be [V_d] with V_d > 0, got none")
        is_given = to is not None  # else its group is that of the weight
        to = to or VocabShard.from_group(shard.group, len(ids))
        if to.vocab_size != len(ids):
            raise ValueError(
                f"`to` must shard the {len(ids)} ids, got a shard of {to.vocab_size}"
                f"{_hint_of_other_ids(len(ids), to.vocab_size)}"
            )
        if weight.is_meta or ids.is_meta:
            raise ValueError("weight and ids must have values, got tensors on meta")
        ids = ids.to(weight.device, torch.int64)
        _expect_distinct(ids, shard)
        of_weight.record("select_rows", shard, weight=weight, ids=ids)
        # each rank takes rows of its own where there is one rank of the weight
        whole = {WHOLE_WEIGHT: weight[: shard.valid_width]} if shard.world_size == 1 else {}
        if is_given:
            of_subset.record("select_rows", to, ids=ids, **whole)
    out = weight.new_zeros(to.width, *weight.shape[1:])
    for first in range(0, len(ids), SENT_ROWS):
        here = ids[first : first + SENT_ROWS] - shard.start
        owned = (here >= 0) & (here < shard.valid_width)
        block = weight.new_zeros(len(here), *weight.shape[1:])
        block[owned] = weight[here[owned]]
        reduce_in_place(block, shard.world_size, shard.group_name)
        low = max(first, to.start)
        high = min(first + len(here), to.start + to.valid_width)
        if low < high:
            out[low - to.start : high - to.start] = block[low - first : high - first]
    return out
