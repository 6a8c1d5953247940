"""Everything static about a linear head: how its logits are made, in which blocks, and from which
operands."""

import functools
from typing import NamedTuple

import torch

from ..engine.request import Facts, Request
from ..ranks import comm
from . import blocks
from .epilogue import has_wide_rows


class LinearFacts(NamedTuple):
    """Static facts of a linear head besides `Facts`."""

    dtype: torch.dtype  # of the GEMMs' operands, and the logits' gradient
    budget: int  # 0: the default
    weight_sums: bool  # dW is returned in half precision
    epilogue: bool  # whether recompute's logits are never stored
    rounded: bool  # whether its logits are rounded to dtype
    logits_dtype: torch.dtype  # of blocks of them, fp32 where they are not rounded
    # of `comm.HiddenGrad`; "none" on one rank; "reduce_scatter": the hidden states are gathered
    hidden_grad: str
    teacher_bytes: int  # of a logit that is made here of a teacher's head; 0: there is none

    def sizes(self, shape: torch.Size, dtype: torch.dtype, facts: Facts) -> blocks.Sizes:
        """Sizes for hidden states of this shape and dtype, with an even share of the vocabulary:
        all ranks agree."""
        width = -(-facts.vocab_size // facts.world_size)
        exact_bytes = 0 if self.logits_dtype == self.dtype else self.logits_dtype.itemsize
        logit_bytes = self.dtype.itemsize + exact_bytes + self.teacher_bytes
        tokens = max(1, self.token_count(shape[0], facts))
        return blocks.Sizes(
            tokens, width, shape[1], logit_bytes, dtype.itemsize == 2, self.weight_sums
        )

    def operands(
        self, hidden, weight, request: Request
    ) -> tuple[torch.Tensor, torch.Tensor, Request]:
        """The GEMMs' hidden states and weight, aligned to 16 bytes for epilogues, and the request
        with a teacher's."""
        weight, head, facts = weight.to(self.dtype), request.teacher_head, request.facts
        if self.epilogue and (weight.data_ptr() % 16 or not has_wide_rows(weight)):
            weight = weight.clone(memory_format=torch.contiguous_format)
        given = [hidden.to(self.dtype)]
        if head.teacher_hidden is not None:
            given.append(head.teacher_hidden.to(head.operand_dtype))
        if self.hidden_grad == "reduce_scatter":
            given = [comm.gather_parts(x, facts.world_size, facts.group_name) for x in given]
        if head.teacher_hidden is not None:
            head = head._replace(
                teacher_hidden=given[1], teacher_weight=head.teacher_weight.to(head.operand_dtype)
            )
            request = request._replace(teacher_head=head)
        return given[0], weight, request

    def token_count(self, tokens: int, facts: Facts) -> int:
        """Tokens of all ranks whose hidden states are gathered."""
        return tokens * (facts.world_size if self.hidden_grad == "reduce_scatter" else 1)


@functools.lru_cache(maxsize=256)
def recompute_blocks(
    linear: LinearFacts, facts: Facts, shape: torch.Size, dtype: torch.dtype
) -> blocks.Blocks:
    """The blocks of recompute for hidden states of this shape and dtype. Raises ValueError for too
    small a budget."""
    planner, sizes = blocks.recompute_blocks, linear.sizes(shape, dtype, facts)
    found = blocks.planned(planner, sizes, linear.budget or None)
    if found is None:
        raise ValueError(blocks.refusal(planner, sizes, linear.budget))
    return found
