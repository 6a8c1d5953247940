"""Sweeps over logits that never exist as a whole: hidden states [N, H] and a weight [W, H], one
block after the other.

Two ways, told apart by where the softmax's denominator comes from:

* `statistics` and `gradient` (recompute): blocks of tokens forward, of which O(N) statistics remain
  after one exchange; backward the logits are made again, by blocks of the vocabulary (and of
  tokens, if memory is short). Four GEMMs.
* `sweep_blocks`: each block of tokens has its exchange, its gradient and its share of dH and dW
  before the next. Three.

dH and dW are the gradients of the hidden states and of the weight. A block's logits are those of
torch.nn.functional.linear: of the operands' dtype, and their gradient overwrites them; or they are
fp32. With epilogues, recompute has no logits: they are accumulators of its GEMMs, and only their
gradient is a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..engine import passes
from ..engine.backend import load_backend
from ..engine.request import Request, accumulation_dtype
from ..engine.transports import TRANSPORTS
from ..ranks import comm
from .blocks import DEFAULT_BLOCK, TILE, Blocks, row_stride
from .facts import LinearFacts


@functools.cache
def autocast_type(device: torch.device) -> str:
    """The type of device that torch.autocast is told. Some have no autocast, meta among them."""
    return device.type if torch.amp.is_autocast_available(device.type) else "cpu"


def multiply(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool = False) -> None:
    """out (+)= a @ b. An fp32 `out` of half-precision operands holds fp32 sums of their exact
    products."""
    if a.shape[1] == 0:
        if not add:
            out.zero_()
    elif out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif a.is_cuda and out.dtype == torch.float32:
        torch.addmm(out, a, b, out.dtype, out=out) if add else torch.mm(a, b, out.dtype, out=out)
    elif out.dtype.itemsize == 2:  # of another half precision
        exact = out.to(torch.float32)
        multiply(exact, a, b, add)
        out.copy_(exact)
    else:
        multiply(out, a.to(out.dtype), b.to(out.dtype), add)


class _Rows:
    """Rows of a weight that are ids of the true vocabulary, the first `valid` ones, for products
    over them. Rows of padding may hold anything, and 0 * NaN is NaN, so they take no part.

    On GPUs a GEMM over a number of ids that is no multiple of 8 takes up to six times as long
    (H100, bf16), so those after the last whole tile have one of their own, with zeros for padding.
    """

    def __init__(self, weight: torch.Tensor, valid: int):
        valid = max(0, min(valid, weight.shape[0]))
        self.whole, self.rest = weight, None
        if valid < weight.shape[0]:
            self.whole = weight[: valid // TILE * TILE]
            if len(self.whole) < valid:
                self.rest = torch.zeros_like(weight[len(self.whole) : len(self.whole) + TILE])
                self.rest[: valid - len(self.whole)] = weight[len(self.whole) : valid]

    def multiply(self, out: torch.Tensor, gradient: torch.Tensor, add: bool = False) -> None:
        """out (+)= gradient @ weight. The rest comes first, because it may be rounded before the
        whole is added."""
        n = len(self.whole)
        if self.rest is not None:
            multiply(out, gradient[:, n : n + len(self.rest)], self.rest, add)
        if n or self.rest is None:
            multiply(out, gradient[:, :n], self.whole, add or self.rest is not None)


@functools.lru_cache(maxsize=256)
def _slices(total: int, size: int) -> tuple[slice, ...]:
    """Cut [0, total) into slices; at least one, so that empty shards and batches take the same
    way."""
    return tuple([slice(i, min(i + size, total)) for i in range(0, total, max(size, 1))]) or (
        slice(0, 0),
    )


def _block(memory: torch.Tensor, tokens: int, columns: int) -> torch.Tensor:
    """A block [tokens, columns] in memory that is written again and again."""
    stride = row_stride(columns)
    rows = memory[: tokens * stride].view(tokens, stride)
    # on CPUs with AMX a GEMM multiplies what is between the rows by 0, and NaN stays NaN
    if not rows.is_cuda:
        rows[:, columns:] = 0
    return rows[:, :columns]


class _Buffers:
    """The memory of one block of a call's logits, of one of their gradient, and of one of a
    teacher's logits."""

    def __init__(
        self, hidden, weight, request: Request, tokens: int, columns: int, linear: LinearFacts
    ):
        self.hidden, self.weight, self.whole, self.linear = hidden, weight, request, linear
        size, head = tokens * row_stride(columns), request.teacher_head
        self.teacher, self.memory = None, hidden.new_empty(size)
        self.logits = self.memory
        if linear.logits_dtype != linear.dtype:
            self.logits = hidden.new_empty(size, dtype=linear.logits_dtype)
        if head.teacher_hidden is not None:
            self.teacher = head.teacher_hidden.new_empty(size, dtype=head.block_dtype)

    def request(self, tokens: slice, ids: slice | None = None) -> Request:
        """The request of a block with its logits, and a teacher's (but for `Facts`' factors). ids:
        None for all."""
        rows = slice(None) if ids is None else ids
        hidden, weight, head = self.hidden[tokens], self.weight[rows], self.whole.teacher_head
        logits = _block(self.logits, hidden.shape[0], weight.shape[0])
        multiply(logits, hidden, weight.t())
        part = self.whole.rows(tokens, logits)
        part = part if ids is None else part.columns(ids)
        if self.teacher is None:
            return part
        x = _block(self.teacher, *logits.shape)
        multiply(x, head.teacher_hidden[tokens], head.teacher_weight[rows].t())
        if head.teacher_bias is not None:
            x += head.teacher_bias[rows]
        if head.cap:
            x.mul_(head.cap).tanh_()
        return part._replace(tensors=part.tensors._replace(teacher=x))

    def gradient(self, tokens: slice, ids: slice, merged, grads: dict) -> torch.Tensor:
        """The gradient of some logits, in the operands' dtype; merged rows and upstream gradients
        are of `tokens`."""
        if not self.linear.epilogue:
            return self.gradient_of(self.request(tokens, ids), merged, grads)
        hidden, weight = self.hidden[tokens], self.weight[ids]
        out = _block(self.memory, hidden.shape[0], weight.shape[0])
        part = self.whole.rows(tokens, out).columns(ids)
        load_backend(part.facts.backend).linear_gradient(
            out, hidden, weight, part, merged, grads, self.linear.rounded
        )
        return out

    def gradient_of(self, part: Request, merged, grads: dict) -> torch.Tensor:
        """The gradient of a block's logits in the operands' dtype: in their place, or beside fp32
        ones."""
        out = part.tensors.logits
        if self.logits is not self.memory:
            out = _block(self.memory, *out.shape)
        passes.write_gradient(out, part, merged, grads)
        return out


def statistics(
    hidden, weight, request: Request, tokens: int, linear: LinearFacts
) -> list[torch.Tensor]:
    """`passes.statistics` of hidden @ weight^T, `tokens` at a time; a request without logits. One
    exchange, or two, and one per block for statistics that compare logits with the label's."""
    transport = TRANSPORTS[request.facts.transport].default
    if linear.epilogue:
        budget = linear.budget or DEFAULT_BLOCK
        return transport.merge(
            passes.linear_packets(hidden, weight, request, linear.rounded, budget), request
        )
    buffers = _Buffers(hidden, weight, request, tokens, weight.shape[0], linear)
    slices, first = _slices(hidden.shape[0], tokens), []
    for here in slices:
        first.append(transport.write(passes.with_label_logits(buffers.request(here))))
    outputs = transport.merge(first[0] if len(first) == 1 else torch.cat(first, -1), request)
    if request.layout.second:
        second = [
            passes.second_packets(buffers.request(here), outputs[0][:, here].contiguous())
            for here in slices
        ]
        passes.second_exchange(torch.cat(second, -1), outputs, request)
    return outputs


class Gradients(NamedTuple):
    """dtypes of the gradients to compute; None for those not wanted. A main_grad is added to."""

    hidden: torch.dtype | None
    weight: torch.dtype | None
    bias: torch.dtype | None
    main_grad: torch.Tensor | None = None


class WeightSums:
    """dW and the bias's gradient, summed over blocks of tokens one after the other."""

    def __init__(self, weight: torch.Tensor, wanted: Gradients, blocks: int):
        self.wanted, self.sum, self.bias = wanted, None, None
        if wanted.weight is not None:
            self.sum = wanted.main_grad
            if self.sum is None:
                exact = wanted.weight if blocks == 1 else accumulation_dtype(wanted.weight)
                self.sum = weight.new_empty(weight.shape, dtype=exact)
        if wanted.bias is not None:
            self.bias = weight.new_zeros(weight.shape[0], dtype=accumulation_dtype(wanted.bias))

    def add(self, first: bool, ids: slice, gradient: torch.Tensor, hidden: torch.Tensor):
        """Add a block; gradient: [tokens, ids] of the block's logits."""
        if self.sum is not None:
            multiply(
                self.sum[ids],
                gradient.t(),
                hidden,
                add=not first or self.wanted.main_grad is not None,
            )
        if self.bias is not None:
            self.bias[ids] += gradient.sum(0, dtype=self.bias.dtype)

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """dW (None if it went into a main_grad) and the bias's gradient, rounded to the wanted
        dtypes."""
        wanted = self.wanted
        weight = (
            None if self.sum is None or wanted.main_grad is not None else self.sum.to(wanted.weight)
        )
        return weight, None if self.bias is None else self.bias.to(wanted.bias)


def gradient(
    hidden,
    weight,
    request: Request,
    merged,
    grads: dict,
    blocks: Blocks,
    wanted: Gradients,
    linear: LinearFacts,
):
    """Upstream gradients [N] by name -> dH, reduced, and the sums of dW and of the bias's
    gradient."""
    n, width, facts = hidden.shape[0], weight.shape[0], request.facts
    share = -(-facts.vocab_size // facts.world_size)
    # whole means whole, also for a larger shard
    columns = width if blocks.columns >= share else blocks.columns
    tokens, ids = _slices(n, blocks.tokens), _slices(width, columns)
    buffers = _Buffers(hidden, weight, request, min(blocks.tokens, n), min(columns, width), linear)
    valid_rows = [_Rows(weight[v], facts.valid_width - v.start) for v in ids]
    sums = WeightSums(weight, wanted, len(tokens))
    hidden_sums = HiddenSums(hidden, wanted, len(ids), linear, facts)
    for t in tokens:
        of_tokens = {name: g[t].contiguous() for name, g in grads.items() if g is not None}
        merged_rows = merged[:, t].contiguous()
        rows = hidden_sums.rows(t)
        for v, known in zip(ids, valid_rows):
            found = buffers.gradient(t, v, merged_rows, of_tokens)
            # before dW, whose GEMM hides the exchange of the last one
            hidden_sums.add(rows, v is ids[0], found, known)
            if v is ids[-1]:
                hidden_sums.store(rows, t, is_last=t is tokens[-1])
            sums.add(t is tokens[0], v, found, hidden[t])
    return hidden_sums.reduced(), sums


class HiddenSums:
    """dH [N, H], summed over blocks of ids one after the other, and reduced over ranks."""

    def __init__(self, hidden, wanted: Gradients, blocks_of_ids: int, linear: LinearFacts, facts):
        self.linear, self.facts = linear, facts
        self.whole: torch.Tensor | None = None
        self.end: Callable[[], torch.Tensor] | None = None  # of the exchange
        if wanted.hidden is not None:
            self.whole = hidden.new_empty(hidden.shape, dtype=wanted.hidden)
        self.is_exact = blocks_of_ids == 1  # no sum that would be rounded between its parts

    def rows(self, tokens: slice) -> torch.Tensor | None:
        """Return memory for the sum of a block of tokens, or None."""
        if self.whole is None:
            return None
        rows = self.whole[tokens]
        exact = accumulation_dtype(rows.dtype)
        return (
            rows
            if self.is_exact or exact == rows.dtype
            else rows.new_empty(rows.shape, dtype=exact)
        )

    def add(self, rows, is_first: bool, gradient, weight_rows: _Rows):
        """Add a block of ids; gradient: [tokens, ids] of its logits."""
        if rows is not None:
            weight_rows.multiply(rows, gradient, add=not is_first)

    def store(self, rows, tokens: slice, is_last: bool):
        """Round the sum of a block of tokens, and begin to reduce all of them after the last."""
        if self.whole is None:
            return
        if rows.dtype != self.whole.dtype:
            self.whole[tokens] = rows
        if is_last and self.linear.hidden_grad != "none":
            group = self.facts.world_size, self.facts.group_name
            self.end = comm.reduce_hidden(self.whole, self.linear.hidden_grad, *group)

    def reduced(self) -> torch.Tensor | None:
        """Return dH, reduced."""
        return self.whole if self.end is None else self.end()


class Products:
    """The gradient of blocks of tokens, and dH and dW, by products in the operands' dtype."""

    def __init__(self, hidden, weight, request: Request, wanted: Gradients, sweep: Sweep):
        self.hidden, self.one_read = hidden, sweep.one_read
        self.sums = WeightSums(weight, wanted, len(_slices(hidden.shape[0], sweep.tokens)))
        # (out [n, H], gradient of a block): writes its dH
        self.multiply = _Rows(weight, request.facts.valid_width).multiply

    def gradient(self, buffers: _Buffers, part: Request, here: slice, objective):
        """Return a block's values [K, n], flags, and the gradient of its logits."""
        in_one = None if self.one_read is None else self.one_read.found(part, here)
        if in_one is not None:
            return *in_one, part.tensors.logits
        merged, values, *flags = passes.statistics(part)
        return values, flags, buffers.gradient_of(part, merged, objective(values, flags, here))

    def add(self, here: slice, gradient, is_last: bool) -> None:
        """Add a block to dW."""
        self.sums.add(here.start == 0, slice(0, gradient.shape[1]), gradient, self.hidden[here])


class Sweep(NamedTuple):
    """How one sweep computes the gradients of its blocks."""

    tokens: int  # of a block
    one_read: Any = None  # `OneReadBlocks` of its loss, or None
    products: Callable = Products
    name: str = "one sweep"


def sweep_blocks(
    hidden, weight, request: Request, sweep: Sweep, objective, wanted: Gradients, linear
):
    """Statistics, and the gradients of a loss that is a sum over blocks, in one go.

    objective(values [K, n], flags, tokens: slice) -> upstream gradients as in `gradient`, of one
    block.
    -> values [K, N], flags, and what `gradient` returns. An exchange per block, and one for dH.
    """
    facts = request.facts
    buffers = _Buffers(hidden, weight, request, sweep.tokens, weight.shape[0], linear)
    products = sweep.products(hidden, weight, request, wanted, sweep)
    slices = _slices(hidden.shape[0], sweep.tokens)
    hidden_grad = end = None
    if wanted.hidden is not None:
        hidden_grad = hidden.new_empty(hidden.shape, dtype=wanted.hidden)
    parts = []
    for here in slices:
        values, flags, found = products.gradient(buffers, buffers.request(here), here, objective)
        parts.append((values, *flags))
        is_last = here is slices[-1]
        if hidden_grad is not None:
            products.multiply(hidden_grad[here], found)
            if is_last and linear.hidden_grad != "none":
                end = comm.reduce_hidden(
                    hidden_grad, linear.hidden_grad, facts.world_size, facts.group_name
                )
        products.add(here, found, is_last)
    values, *flags = parts[0]
    if len(parts) > 1:
        values, *flags = [
            torch.cat(blocks, 1 if i == 0 else 0) for i, blocks in enumerate(zip(*parts))
        ]
    return values, flags, hidden_grad if end is None else end(), products.sums
