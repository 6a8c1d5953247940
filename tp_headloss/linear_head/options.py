"""`Linear`: the options of a linear head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..comm import HIDDEN_GRADS

MODES = ("auto", "one_sweep", "recompute")
ENGINES = ("auto", "epilogue", "blocks")
LOGITS = (None, "float32", "operands")
MIN_SWEEP_TOKENS = 512  # tokens of a block below which summing dW costs more than making the logits again


@dataclass(frozen=True)
class Linear:
    """Options of a linear head.

    The hidden states' gradient is, by ``hidden_grad``: "all_reduce" (default: hidden states replicated over the shard's
    group, their gradient summed over it and replicated), "reduce_scatter" (sequence parallelism: each rank passes its
    [S/P, ..] of the first dimension, gathered here, and gets that part of the sum; labels and statistics are of all S)
    or "none" (this rank's part alone: the caller adds them up).

    These collectives depend on nothing else: with a group, "all_reduce" and "reduce_scatter" compute and reduce dH in
    every backward (of one sweep: in the forward, if gradients are enabled), even where this rank's hidden states need
    no gradient; for frozen ones say "none" on every rank, and no dH is computed. dW is not computed for a weight that
    requires no gradient.

    mode: "recompute" makes the logits twice, for any loss and any use of the statistics (four GEMMs); "one_sweep"
    computes gradients in the forward (three; `HeadLoss.linear` only, where its conditions are; an exchange per block);
    "auto" (default): one sweep where it is possible and the budget has room for blocks of 512 tokens, else recompute.
    Which one it was is logged (logger "tp_headloss", INFO).

    budget: bytes beyond inputs, dH and dW: a block of logits and, where sums over blocks are not what is returned, fp32
    memory for them (of dH or dW if these are of half precision). None: 128 MiB for a block and, in half precision, fp32
    memory for the smaller of dH and dW ("one_sweep": for dW), or what is needed at least. A rank whose shard is larger
    than an even share takes accordingly more; what autocast converts and "reduce_scatter" gathers is not counted.

    main_grad: add dW to ``weight.main_grad`` (fp32, Megatron's) instead of returning it, and set Megatron's flags.
    upstream: the gradient that will arrive at the loss of a one-sweep head (a number or a scalar tensor), where that is
    known (a loss scale, say): it is in the gradients before they are rounded, and with main_grad dW goes there during
    the forward, without memory in between; one backward must follow. Another gradient than that makes dH NaN.

    engine: how recompute makes logits. "epilogue": statistics and the logits' gradient are epilogues of the GEMM, and
    logits exist only as its fp32 accumulators (Triton, compute capability >= 9.0, bfloat16 or float16 operands whose
    rows are multiples of 16 bytes, no teacher; ValueError otherwise). "blocks": blocks of logits that cuBLAS makes.
    "auto" (default): blocks, unless logits="float32" is asked for where epilogues serve it. With epilogues,
    the statistics, losses made of them and the logits' gradients have the same bits at 1, 2, 4 and 8 ranks (see
    `VocabShard.tp_invariant`), in any batch and from run to run; dH and dW, products by cuBLAS, need not have. One
    sweep has blocks; with "epilogue", mode "auto" takes recompute.

    logits: what statistics are made of: "float32", unrounded sums of products, or "operands", rounded to the operands'
    dtype, as by torch.nn.functional.linear. None: "float32" with engine="epilogue", else "operands". One sweep has
    "operands"; with "float32", mode "auto" takes recompute, and a logit in a block takes 6 bytes instead of 2.

    max_valid_tokens: tokens that are not ignored, or a bound on them, where the caller knows it: all others are dropped
    before the GEMMs, without a host synchronisation. If there are more, the rest of them become NaN, and so do losses.
    """

    mode: str = "auto"
    budget: int | None = None
    hidden_grad: str = "all_reduce"
    main_grad: bool = False
    upstream: float | torch.Tensor | None = None
    max_valid_tokens: int | None = None
    engine: str = "auto"
    logits: str | None = None

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {self.mode!r}")
        if self.engine not in ENGINES:
            raise ValueError(f"engine must be one of {ENGINES}, got {self.engine!r}")
        if self.logits not in LOGITS:
            raise ValueError(f"logits must be one of {LOGITS}, got {self.logits!r}")
        if self.hidden_grad not in HIDDEN_GRADS:
            raise ValueError(f"hidden_grad must be one of {HIDDEN_GRADS}, got {self.hidden_grad!r}")
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"budget must be a positive number of bytes or None, got {self.budget}")
        if self.max_valid_tokens is not None and self.max_valid_tokens < 0:
            raise ValueError(f"max_valid_tokens must be at least 0, got {self.max_valid_tokens}")
        if self.max_valid_tokens is not None and self.hidden_grad == "reduce_scatter":
            raise ValueError(
                "max_valid_tokens picks from hidden states of all tokens, got hidden_grad='reduce_scatter', where each "
                "rank has its own: gather them first"
            )
