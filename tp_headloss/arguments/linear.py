"""`Linear`: the options of a linear head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import torch

from ..ranks.comm import HiddenGrad
from ..spec import FP32_MAX, Count, NumberLine, TensorLine, checked
from ..spec.checks import expect_number

# tokens of a block below which summing dW costs more than making the logits again
MIN_SWEEP_TOKENS = 512


BYTES = NumberLine(
    1, FP32_MAX, "a positive number of bytes", of_text=": bytes, 64 << 20 for 64 MiB"
)
Mode: TypeAlias = Literal["auto", "one_sweep", "recompute"]


@checked
@dataclass(frozen=True)
class Linear:
    """Options of a linear head.

    Recompute makes logits in one of two ways, and logs which one. Epilogues: statistics and the
    logits' gradient are epilogues of the GEMM, and logits exist only as its accumulators, which are
    rounded there or not; statistics, losses made of them and the logits' gradients have the same
    bits at 1, 2, 4 and 8 ranks (see `VocabShard.tp_invariant`), in any batch and from run to run
    (dH and dW, products by cuBLAS, need not have). They need Triton, a compute capability of at
    least 9.0, bfloat16 or float16 operands whose rows are multiples of 16 bytes, and no teacher,
    sets, given ids or ranks. They are taken on GPUs of compute capability 9.0, where they are about
    as fast, and with exact_logits=True wherever they can be. Everything else has blocks of logits
    that cuBLAS makes, and so has one sweep.

    Args:
        mode: "recompute" makes the logits twice, for any loss and any use of the statistics (four
            GEMMs). "one_sweep" computes gradients in the forward (three; `HeadLoss.linear` only,
            where its conditions are; an exchange per block). Without gradients (`torch.no_grad`)
            every mode is recompute. "auto" (default): one sweep where it
            is possible and the budget has room for blocks of 512 tokens, else recompute. Without a
            budget the fastest blocks within a sixteenth of the GPU's memory, which is rounded down
            to a power of two before (4 GiB of 80, 8 of 141; on CPUs none): these are all logits
            where they fit. Which one it was is logged (logger "tp_headloss", INFO).
        budget: bytes beyond inputs, dH and dW (the gradients of hidden states and weight): a block
            of logits and, where sums over blocks are not what is returned, fp32 memory for them (of
            dH or dW if these are of half precision). None: 128 MiB for a block and, in half
            precision, fp32 memory for the smaller of dH and dW (one sweep: for dW), or what is
            needed at least. A rank whose shard is larger than an even share takes accordingly more;
            what autocast converts and "reduce_scatter" gathers, and an epilogue's copy of a weight
            that does not begin at a multiple of 16 bytes, are not counted.
        hidden_grad: how the hidden states' gradient is reduced. "all_reduce" (default): hidden
            states are replicated over the shard's group, their gradient is summed over it and
            replicated. "reduce_scatter" (sequence parallelism): each rank passes its [S/P, ..] of
            the first dimension, gathered here, and gets that part of the sum; labels and statistics
            are of all S. "none": this rank's part alone, which the caller adds up. These
            collectives depend on nothing else: with a group, "all_reduce" and "reduce_scatter"
            compute and reduce dH in every backward (of one sweep: in the forward, if gradients are
            enabled), even where this rank's hidden states need no gradient; for frozen ones say
            "none" on every rank. A frozen weight's dW is not computed.
        main_grad: add dW to ``weight.main_grad`` (fp32, Megatron's) instead of returning it, and
            set Megatron's flags.
        upstream: the gradient that will arrive at the loss of a one-sweep head (a number or a
            scalar tensor), where that is known (a loss scale, say): it is in the gradients before
            they are rounded, and with main_grad dW goes there in the forward without other memory;
            one backward must follow. Another gradient makes dH NaN.
        max_valid_tokens: tokens that are not ignored, or a bound on them, where the caller knows
            it: all others are dropped before the GEMMs, without a host synchronisation. If there
            are more, all losses and their gradients are NaN, and statistics of the tokens that
            found no place. All ranks of the shard's group must ignore the same tokens, which
            validate="full" compares. Not with a `Teacher` of logits or
            hidden_grad="reduce_scatter".
        exact_logits: False (default): logits are rounded to the operands' dtype, as by
            torch.nn.functional.linear, in every mode and on every device. True: statistics are made
            of unrounded fp32 sums of products, a `TeacherHead`'s logits, too, and mode "auto" takes
            recompute; a logit in a block, of "one_sweep", too, takes 6 bytes instead of 2.
        gradients: None: products of dH and dW in the operands' dtype. "fp8"
            (experimental; one sweep alone): the few large entries of each token's
            gradient and its label's exactly, all others in fp8, whose products are twice as fast.
            dH and dW as a whole have about the errors of bfloat16 products; rows of dW without a
            large entry have random errors of some per cent of their own, small gradients. For
            bfloat16 operands without a bias, hidden sizes of multiples of 16, terms of log-probs,
            lse and total alone, no softcap, and GPUs of compute capability 8.9 or more (CPUs
            compute the same, slowly); ValueError elsewhere. Beside a block, each logit takes a
            byte, and each element of the weight.

    Examples:
        >>> hidden, weight, labels = (
        ...     torch.ones(2, 8),
        ...     torch.nn.Parameter(torch.zeros(4, 8)),
        ...     torch.tensor([0, 1]),
        ... )
        >>> HeadLoss().linear(
        ...     hidden, weight, labels, linear=Linear("recompute", budget=64 << 20)
        ... ).loss.detach()
        tensor(1.3863)
    """

    of_text = ": write Linear({!r})"

    mode: Mode = "auto"
    budget: Annotated[int, BYTES] | None = None
    hidden_grad: HiddenGrad = "all_reduce"
    main_grad: bool = False
    upstream: (
        Annotated[float, NumberLine()]
        | Annotated[torch.Tensor, TensorLine("real numbers", ())]
        | None
    ) = None
    max_valid_tokens: Count | None = None
    exact_logits: bool = False
    gradients: Literal["fp8"] | None = None

    def __post_init__(self):
        if self.budget is not None:
            object.__setattr__(self, "budget", int(self.budget))  # 1e9, say
        if self.upstream is not None and not isinstance(self.upstream, torch.Tensor):
            expect_number("upstream", self.upstream, positive=False)
        if self.max_valid_tokens is not None and self.hidden_grad == "reduce_scatter":
            raise ValueError(
                "max_valid_tokens picks from hidden states of all tokens, got "
                "hidden_grad='reduce_scatter', where each rank has its own: gather them first"
            )


def expect_sequence(hidden: torch.Tensor, hidden_grad: str):
    """Raise ValueError for hidden states [H] of sequence parallelism, which has no token to gather."""
    if hidden_grad == "reduce_scatter" and hidden.dim() < 2:
        raise ValueError(
            "hidden_grad='reduce_scatter' needs hidden states [S/P, .., H], got "
            f"{list(hidden.shape)}: unsqueeze(0) is one token of each rank"
        )
