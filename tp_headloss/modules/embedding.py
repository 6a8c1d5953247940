"""The embedding of a sharded vocabulary as a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch
import torch.nn.functional as F

from ..arguments.options import DEFAULTS, Options
from ..call.agreement import Agreement
from ..call.compile import uncompiled
from ..call.subclasses import is_dtensor
from ..engine.autograd import FromShards, grad_anchor, reduction_over
from ..ranks.comm import gather_from_ranks
from ..ranks.shard import VocabShard
from ..spec import IDS, CheckedBy, Ids, Size, called_as, checked, described
from ..spec.checks import refuse_tokens
from .vocab_rows import Init, VocabRows


@checked
class VocabParallelEmbedding(VocabRows):
    """Embedding with a sharded vocabulary.

    ids [..] replicated -> rows [.., H] replicated; forward: one all-reduce, backward: no
    communication. An id outside of [0, vocab_size) gives a row of NaN on every rank; ids that
    differ between ranks give rows that belong to none of them.

    Args:
        init: by default std 1. A loop over a model's parameters with `torch.nn.init` and one seed
            gives all shards equal rows, see `Init`.
        sequence_parallel: True: ids [S, ..] -> this rank's [S/P, .., H]; one reduce-scatter,
            backward one all-gather.
        options: its ``check`` has the ranks compare their ids first, by one all-gather and a host
            synchronisation: the first token whose ids differ, or whose id is unknown, is a
            ValueError on every rank. Its ``validate`` compares the whole call. Both are for eager;
            no other option is for an embedding.

    Examples:
        >>> embedding = VocabParallelEmbedding(4, VocabShard.from_group(None, 10))
        >>> embedding(torch.tensor([[1, 9]])).shape
        torch.Size([1, 2, 4])
    """

    def __init__(
        self,
        hidden_size: Size,
        shard: VocabShard,
        *,
        init: Init | None = None,
        sequence_parallel: bool = False,
        options: Options | None = None,
        device: Annotated[torch.device | str, CheckedBy("a device")] | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(hidden_size, shard, init or Init(std=1.0), device, dtype)
        self.sequence_parallel = sequence_parallel
        self.options = options or DEFAULTS
        used = Options(check=self.options.check, validate=self.options.validate)
        if self.options != used:
            raise ValueError(
                f"options of an embedding must be check and validate, got {self.options}"
            )

    @described
    def forward(self, ids: Ids) -> torch.Tensor:
        """Return the rows [.., H] of ids [..], int32 or int64.

        ValueError if the weight is not this rank's rows, or if ranks cannot share S evenly
        (sequence parallelism).
        """
        if self.options != DEFAULTS:
            self._compare_ranks(ids)
        weight = self._weight_for(ids)
        shard = self.shard
        owned = (ids >= shard.start) & (ids < shard.start + shard.valid_width)
        part = weight.new_zeros(*ids.shape, self.hidden_size)
        if shard.width:
            part = F.embedding((ids - shard.start).masked_fill(~owned, 0), weight)
        unknown = (ids < 0) | (ids >= shard.vocab_size)
        # a select, because a row of NaN times 0 is not 0
        part = torch.where(owned.unsqueeze(-1), part, 0.0)
        part = part.masked_fill(unknown.unsqueeze(-1), torch.nan)
        how = "reduce_scatter" if self.sequence_parallel else "all_reduce"
        anchor = grad_anchor(part, how, shard.world_size)
        return FromShards.apply(part, *reduction_over(shard, how), anchor)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self): ...

    def _weight_for(self, ids: torch.Tensor) -> torch.Tensor:
        """Return this rank's plain rows for ids [..] that a call may have.

        TypeError or ValueError for any others.
        """
        IDS.check("ids", ids, {})
        shard = self.shard
        shard.expect_live_group()
        if not torch.compiler.is_compiling():
            self.begin_eager_call()
        weight = self.weight.to_local() if is_dtensor(self.weight) else self.weight
        shard.expect_width("weight", weight.shape[0], "rows")
        if self.sequence_parallel and (ids.dim() == 0 or ids.shape[0] % shard.world_size):
            raise ValueError(
                f"ids must be [S, ..] with S a multiple of {shard.world_size}, got "
                f"{list(ids.shape)}"
            )
        return weight

    @uncompiled("check=True looks at the ids' values, and validate= asks the other ranks")
    def _compare_ranks(self, ids: torch.Tensor):
        """Raise on every rank what is wrong with the ids, or the call, of any of them."""
        shard = self.shard
        with Agreement(self.options, shard) as agreement:
            how = {"sequence_parallel": self.sequence_parallel, "options": self.options}
            agreement.record("VocabParallelEmbedding", shard, ids=ids, weight=self.weight, **how)
            self._weight_for(ids)
        if self.options.check:
            _expect_known_ids(ids, shard)


def _expect_known_ids(ids: torch.Tensor, shard: VocabShard):
    """Raise ValueError, equal on all ranks, for ids that differ between them or are unknown."""
    if not ids.numel():
        return
    of_ranks = gather_from_ranks(ids.long().flatten(), shard.group)
    differ = of_ranks != of_ranks[0]

    def difference(token: int) -> str:
        rank = int(differ[:, token].nonzero()[0])
        return (
            f"ids must be equal on the ranks that share the vocabulary, got "
            f"{int(of_ranks[0, token])} on rank 0 of the group and {int(of_ranks[rank, token])} on "
            f"rank {rank} for token {token} (flat index)"
        )

    refuse_tokens(differ.any(0), difference)
    refuse_tokens(
        (ids < 0) | (ids >= shard.vocab_size),
        lambda token: (
            f"id of token {token} (flat index) must be in [0, {shard.vocab_size}), got "
            f"{int(of_ranks[0, token])}"
        ),
    )
