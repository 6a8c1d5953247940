"""One sweep whose gradient products are in fp8, with the large entries of each row apart.

The logits and their statistics are those of one sweep. Then each block's gradient is split
(`engine.fp8`): a list of its large entries and the labels', as they are, and all others as fp8
numbers, which are written twice, by rows for dH and by columns for dW. The products of the fp8
parts run at twice the speed of bf16. What is on the lists is added to their results in a fixed
order, in fp32.

The columns of all tokens are kept, a byte for each logit, so that dW is one product at the end:
summed over blocks, the memory traffic of dW would take the time that fp8 saves.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ..engine import passes
from ..engine.backend import compute_capability, load_backend
from ..engine.fp8 import (
    ALIGNED,
    GRADIENT,
    MOST,
    OPERAND,
    STATISTICS,
    Fp8Gradient,
    LargeEntries,
    operand_scale,
    padded,
    seed_of_call,
    uniform_part,
)
from ..engine.request import Request
from ..statistics import UNIFORM, MaybeNone
from .blocks import Sizes, refusal, tokens_that_fit
from .request import LinearRequest, free_share
from .sweeps import Gradients, Sweep

CAPABILITY = 8, 9  # of GPUs that multiply in fp8
IDS = 1 << 14  # of a part of dW where it cannot be written in its place
TOKENS = 1 << 10  # whose hidden states are fp32 at a time
# bytes of a token's large entries, and while those of all tokens are ordered; of an id, meanwhile
LISTS, ORDERED, IDS_ORDERED = 8 * MOST, 24 * MOST, 48
FEWEST = 2048  # tokens of a block, whatever a default budget is


class WeightGradient(NamedTuple):
    """dW, as `sweeps.WeightSums` has it."""

    sum: torch.Tensor | MaybeNone
    bias: torch.Tensor | MaybeNone


class Fp8Products:
    """The gradient of blocks of tokens, and dH and dW, by products in fp8; as `sweeps.Products`."""

    def __init__(self, hidden, weight, request: Request, wanted: Gradients, sweep: Sweep):
        facts = request.facts
        self.backend = load_backend(facts.backend)
        self.hidden, self.wanted = hidden.resolve_neg(), wanted
        valid = max(0, min(facts.valid_width, weight.shape[0]))
        self.weight = weight[:valid].resolve_neg()
        n, width = hidden.shape[0], padded(weight.shape[0])
        self.width, self.depth = weight.shape
        self.large = LargeEntries.none(n, hidden.device)
        self.unit = torch.ones(n, dtype=torch.float32, device=hidden.device)
        self.seed = seed_of_call(request.tensors.labels)
        # of a block, of all tokens, and of the weight; None where nothing needs it
        self.rows: torch.Tensor | MaybeNone = None
        self.columns: torch.Tensor | MaybeNone = None
        self.turned_weight: torch.Tensor | MaybeNone = None
        self.sums = WeightGradient(None, None)
        # [H] fp32: of the weight's rows, and of hidden states times the uniform parts of their tokens
        self.row_sum: torch.Tensor | MaybeNone = None
        self.of_uniform: torch.Tensor | MaybeNone = None
        if wanted.hidden is not None:
            self.rows = hidden.new_empty((min(sweep.tokens, n), width), dtype=GRADIENT)
            scale = operand_scale(_largest(self.weight))
            self.turned_weight = hidden.new_empty((self.depth, width), dtype=OPERAND)
            self.backend.turn_to_fp8(self.turned_weight, self.weight, scale, facts.start, self.seed)
            self.of_weight = 1.0 / scale
        if wanted.weight is not None:
            self.columns = hidden.new_empty((width, padded(n)), dtype=GRADIENT)
            self.columns[:, n:] = 0

    def gradient(self, buffers, part: Request, here: slice, objective):
        """Return a block's values [K, n], flags, and the gradient of its logits."""
        merged, values, *flags = passes.statistics(part)
        given = objective(values, flags, here)
        grads = {name: given[name].contiguous() for name in STATISTICS if name in given}
        uniform = uniform_part(part, merged, [given[name] for name in UNIFORM if name in given])
        if uniform is not None:
            self._add_uniform(uniform, here)
        units = self.backend.units_of(part, merged, grads)
        n = values.shape[1]
        self.unit[here] = units.unit
        out = Fp8Gradient(
            units.unit,
            None if self.rows is None else self.rows[:n],
            None if self.columns is None else self.columns[:, here.start : here.start + padded(n)],
            self.large.of_tokens(here),
            uniform,
        )
        if self.rows is not None or self.columns is not None:
            self.backend.split_gradient(out, part, merged, grads, units)
        return values, flags, out

    def _add_uniform(self, uniform: torch.Tensor, here: slice) -> None:
        """Prepare what dH and dW have from the uniform parts [n] of a block."""
        if self.wanted.hidden is not None and self.row_sum is None:
            self.row_sum = self.weight.sum(0, dtype=torch.float32)
        if self.wanted.weight is None:
            return
        if self.of_uniform is None:
            self.of_uniform = torch.zeros(self.depth, dtype=torch.float32, device=uniform.device)
        for part, hidden in zip(uniform.split(TOKENS), self.hidden[here].split(TOKENS)):
            self.of_uniform += part @ hidden.float()

    def multiply(self, out: torch.Tensor, gradient: Fp8Gradient) -> None:
        """out [n, H] = dH of a block."""
        product = _product(gradient.rows, self.turned_weight, self.of_weight, torch.bfloat16)
        self.backend.finish_hidden(out, product, gradient, self.weight, self.row_sum)

    def add(self, here: slice, gradient, is_last: bool) -> None:
        """Add all blocks to dW after the last one."""
        if not is_last or self.columns is None:
            return
        sums = self.wanted.main_grad
        if sums is None:
            sums = self.hidden.new_empty((self.width, self.depth), dtype=self.wanted.weight)
        self.sums = WeightGradient(sums, None)
        self._multiply_columns(sums, adds=self.wanted.main_grad is not None)

    def _multiply_columns(self, out: torch.Tensor, adds: bool):
        """Write dW, or add it to what is there."""
        scale = operand_scale(_largest(self.unit * _largest(self.hidden, 1)))
        shape = self.depth, self.columns.shape[1]
        hidden = self.hidden.new_empty(shape, dtype=OPERAND)
        self.backend.turn_to_fp8(hidden, self.hidden, self.unit * scale, 0, self.seed)
        of_hidden, dtype = 1.0 / scale, out.dtype
        if len(self.columns) == self.width and not adds:
            _product(self.columns, hidden, of_hidden, dtype, out)
        else:
            for part, columns in zip(out.split(IDS), self.columns.split(IDS)):
                product = _product(columns, hidden, of_hidden, dtype)[: len(part)]
                part.add_(product) if adds else part.copy_(product)
        if self.of_uniform is not None:
            out[: len(self.weight)] += self.of_uniform
        self.backend.add_to_weight(out, self.large, self.hidden)


def _product(a: torch.Tensor, b: torch.Tensor, factor: torch.Tensor, dtype, out=None):
    """a [M, K] @ b [N, K]^T times factor [], sums in fp32."""
    if not a.numel():
        return (a.new_empty((len(a), len(b)), dtype=dtype) if out is None else out).zero_()
    one = torch.ones_like(factor)
    more = {} if out is None else {"out": out}
    # without sums of few bits, which such products have by default
    multiply: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return multiply(a, b.t(), one, factor, out_dtype=dtype, use_fast_accum=False, **more)


def _largest(x: torch.Tensor, *dim: int) -> torch.Tensor:
    """The largest absolute value of a matrix, or of each of its rows, fp32."""
    if x.numel() == 0:
        return x.new_zeros(x.shape[: len(dim)], dtype=torch.float32)
    return torch.linalg.vector_norm(x, math.inf, dim or None).float()


def _parts(sizes: Sizes) -> tuple[int, int, int, int]:
    """Bytes of what is kept of all tokens and of the weight, of a block's logits and gradient for
    each token, and of what comes and goes: dH of a token before its list is added, and for dW."""
    width = padded(sizes.width)
    kept = padded(sizes.tokens) * (width + LISTS) + width * sizes.hidden
    for_weight = padded(sizes.tokens) * (sizes.hidden + ORDERED) + width * IDS_ORDERED
    for_weight = max(for_weight, min(TOKENS, sizes.tokens) * 4 * sizes.hidden)
    return kept, sizes.row(sizes.width) + width, 2 * sizes.hidden, for_weight


def peak(sizes: Sizes, tokens: int) -> int:
    """Bytes beyond dH and dW of a call in blocks of so many tokens."""
    kept, of_block, of_hidden, for_weight = _parts(sizes)
    return kept + tokens * of_block + max(tokens * of_hidden, for_weight)


def _tokens(sizes: Sizes, budget: int) -> int | None:
    """Tokens of a block whose call fits in the budget."""
    kept, of_block, of_hidden, for_weight = _parts(sizes)
    of_dh = tokens_that_fit(sizes.tokens, of_block + of_hidden, max(0, budget - kept))
    of_dw = tokens_that_fit(sizes.tokens, of_block, max(0, budget - kept - for_weight))
    return None if of_dh is None or of_dw is None else min(of_dh, of_dw)


def planned_tokens(sizes: Sizes, budget: int | None, share: int) -> int | None:
    """Tokens of a block; None: the budget has no room. Without one: in `share` bytes, but not so
    few that products are slow."""
    if budget is not None:
        return _tokens(sizes, budget)
    return max(_tokens(sizes, share) or 0, min(sizes.tokens, FEWEST))


def sweep_tokens(head: LinearRequest) -> int:
    """Tokens of a block, the same on all ranks; 0 if the budget has no room."""
    share = free_share(head.hidden.device)
    return planned_tokens(_sizes(head), head.linear.budget, share) or 0


def _sizes(head: LinearRequest) -> Sizes:
    return head.facts.sizes(head.hidden.shape, head.hidden.dtype, head.request.facts)


def obstacle(head: LinearRequest) -> str | None:
    """Return what operands and device lack for products in fp8, from facts that ranks share."""
    hidden, tensors = head.hidden, head.request.tensors
    if head.facts.dtype != torch.bfloat16:
        return f"operands must be torch.bfloat16, got {head.facts.dtype}"
    if hidden.shape[-1] % ALIGNED:
        return f"the hidden size must be a multiple of {ALIGNED}, got {hidden.shape[-1]}"
    if head.request.facts.softcap:
        return "with a softcap the label's entry may be smaller than what is rounded"
    if tensors.bias is not None:
        return "the gradient of a bias is not made from parts in fp8"
    if tensors.column_weight is not None:
        return "class weights with label smoothing: only what all ids have alike stays out of fp8"
    if head.request.teacher_head.teacher_hidden is not None:
        return "a teacher's gradient is not of this form"
    if hidden.is_cuda and compute_capability(hidden.device) < CAPABILITY:
        return "such products need an NVIDIA GPU of compute capability {}.{}".format(*CAPABILITY)
    if not sweep_tokens(head):
        return refusal(_tokens, _sizes(head), head.linear.budget)
    return None
