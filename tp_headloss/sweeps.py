"""Sweeps over logits that never exist as a whole: hidden states [N, H] and a weight [W, H], one block after the other.

Two ways, told apart by where the softmax's denominator comes from:

* `statistics` and `gradient` (recompute): blocks of tokens forward, of which O(N) statistics remain after one exchange;
  backward the logits are made again, by blocks of the vocabulary (and of tokens, if memory is short). Four GEMMs.
* `one_sweep`: each block of tokens has its exchange, its gradient and its share of dH and dW before the next. Three.

A block's logits are those of torch.nn.functional.linear: of the operands' type, and its gradient overwrites them.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from . import comm, passes
from .stats import HeadSpec, Inputs, later_rows

TILE = 128  # tokens, ids: what a block is a multiple of, for the GEMMs' sake


class Sizes(NamedTuple):
    """What blocks are planned from."""

    tokens: int  # at least 1
    width: int
    hidden: int
    bytes: int  # of an element of the operands
    sums: bool  # whether these add up in half precision, so that sums over blocks need fp32 memory of their own
    weight_sums: bool  # the same of what dW is written to

    def row(self, columns: int) -> int:
        """Bytes of so many logits of one token."""
        return _stride(columns) * self.bytes


class Blocks(NamedTuple):
    """How the logits are cut: forward by tokens, backward by tokens and ids."""

    forward: int
    tokens: int
    columns: int


def _stride(width: int) -> int:
    """Rows that GEMMs read and write well."""
    return -(-width // 64) * 64


def _even(total: int, most: int) -> int:
    """The size of the fewest even blocks that are no larger than `most`, a multiple of the tile."""
    if most >= total:
        return total
    return min(most, -(-total // -(-total // most) // TILE) * TILE)


def _most(n_bytes: int, each: int) -> int:
    """Rows (or columns) of so many bytes each that fit, in tiles."""
    return n_bytes // max(each, 1) // TILE * TILE


def _tokens_that_fit(sizes: Sizes, budget: int) -> int | None:
    if sizes.tokens * sizes.row(sizes.width) <= budget:
        return sizes.tokens
    most = _most(budget, sizes.row(sizes.width))
    return _even(sizes.tokens, most) if most else None


@functools.lru_cache(maxsize=256)
def one_sweep_tokens(sizes: Sizes, budget: int) -> int | None:
    """Tokens of a block whose logits, and an fp32 dW if it has to be summed in memory of its own, fit in the budget."""
    whole = _tokens_that_fit(sizes, budget)
    if whole == sizes.tokens or not sizes.weight_sums:
        return whole
    return _tokens_that_fit(sizes, max(0, budget - 4 * sizes.width * sizes.hidden))


@functools.lru_cache(maxsize=256)
def recompute_blocks(sizes: Sizes, budget: int) -> Blocks | None:
    """The blocks that fit in the budget and move the fewest bytes: dW is read and written once more per block of
    tokens, dH once per block of ids, and sums in half precision need fp32 memory while they last."""
    forward, best = _tokens_that_fit(sizes, budget), None
    n, width = sizes.tokens, sizes.width
    for parts in range(1, -(-n // TILE) + 1):
        tokens = n if parts == 1 else _even(n, -(-n // parts // TILE) * TILE)
        left = budget - (4 * width * sizes.hidden if parts > 1 and sizes.weight_sums else 0)
        whole = tokens * sizes.row(width) <= left
        columns = width
        if not whole:
            left -= 4 * tokens * sizes.hidden if sizes.sums else 0
            most = _most(left, tokens * sizes.bytes)
            if most < TILE:
                continue
            columns = _even(width, most)
        moved = (parts > 1) / tokens + (not whole) / columns
        if best is None or moved < best[0]:
            best = moved, tokens, columns
        if whole:  # fewer tokens only cost more
            break
    return None if forward is None or best is None else Blocks(forward, *best[1:])


def least_budget(planned, sizes: Sizes) -> int:
    """Bytes that `planned`, one of the two above, gets by with, to 1/64."""
    low, high = 0, 1 << 12
    while planned(sizes, high) is None:
        low, high = high, 2 * high
    while high - low > high // 64:
        middle = (low + high) // 2
        low, high = (low, middle) if planned(sizes, middle) is not None else (middle, high)
    return high


DEFAULT_BLOCK = 128 << 20  # bytes


def planned(planner, sizes: Sizes, budget: int | None, least: int = 0, reserved: int = 0):
    """What `planner` makes of a budget, None if that is too small. Without one: room for a block and, in half
    precision, the smaller of the sums in fp32, at least `least` bytes. reserved: what somebody else holds."""
    if budget is not None:
        return planner(sizes, max(0, budget - reserved))
    smaller = 4 * sizes.hidden * min(sizes.tokens, sizes.width) if sizes.sums else 0
    default = DEFAULT_BLOCK + max(smaller, least) - reserved
    return planner(sizes, max(0, default)) or planner(sizes, least_budget(planner, sizes))


def refusal(planner, sizes: Sizes, budget: int, reserved: int = 0) -> str:
    least = reserved + least_budget(planner, sizes)
    return f"budget must be at least {least} bytes for blocks of {TILE} tokens, got {budget}"


def multiply(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool = False) -> None:
    """out (+)= a @ b. An fp32 `out` of half-precision operands holds fp32 sums of their exact products."""
    if a.shape[1] == 0:
        if not add:
            out.zero_()
    elif out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif a.is_cuda and out.dtype == torch.float32:
        dtype = {"out_dtype": out.dtype, "out": out}
        torch.addmm(out, a, b, **dtype) if add else torch.mm(a, b, **dtype)
    elif out.dtype.itemsize == 2:  # of another half precision
        exact = out.to(torch.float32)
        multiply(exact, a, b, add)
        out.copy_(exact)
    else:
        multiply(out, a.to(out.dtype), b.to(out.dtype), add)


def _of_tokens(inputs: Inputs, here: slice, logits: torch.Tensor) -> Inputs:
    per_token = {
        name: None if (x := getattr(inputs, name)) is None else x[here]
        for name in ("labels", "temperatures", "teacher", "entries", "entry_log_probs")
    }
    scales = None if inputs.scales is None else inputs.scales[:, here].contiguous()
    return inputs._replace(logits=logits, scales=scales, **per_token)


def _of_columns(inputs: Inputs, spec: HeadSpec, here: slice) -> tuple[Inputs, HeadSpec]:
    per_column = {
        name: None if (x := getattr(inputs, name)) is None else x[..., here]
        for name in ("bias", "total_weight", "teacher")
    }
    valid = min(max(spec.valid_width - here.start, 0), here.stop - here.start)
    return inputs._replace(**per_column), spec._replace(start=spec.start + here.start, valid_width=valid)


def _slices(total: int, size: int) -> list[slice]:
    """At least one, so that empty shards and batches take the same way."""
    return [slice(i, min(i + size, total)) for i in range(0, total, max(size, 1))] or [slice(0, 0)]


class _Buffer:
    """The memory of one block of logits, written again and again."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, tokens: int, columns: int):
        self.memory = hidden.new_empty(tokens * _stride(columns))
        self.hidden, self.weight = hidden, weight

    def logits(self, tokens: slice, ids: slice = slice(None)) -> torch.Tensor:
        hidden, weight = self.hidden[tokens], self.weight[ids]
        shape = hidden.shape[0], _stride(weight.shape[0])
        rows = self.memory[: math.prod(shape)].view(shape)
        out = rows[:, : weight.shape[0]]
        if not out.is_cuda:  # on CPUs with AMX a GEMM multiplies what is between the rows by 0, and NaN stays NaN
            rows[:, weight.shape[0] :] = 0
        multiply(out, hidden, weight.t())
        return out


def statistics(hidden, weight, inputs: Inputs, spec: HeadSpec, tokens: int) -> list[torch.Tensor]:
    """`passes.statistics` of hidden @ weight^T, `tokens` at a time; inputs without logits. One exchange, or two."""
    buffer = _Buffer(hidden, weight, tokens, weight.shape[0])
    slices = _slices(hidden.shape[0], tokens)
    packets = [passes.local_packets(_of_tokens(inputs, here, buffer.logits(here)), spec) for here in slices]
    outputs = passes.exchange(torch.cat(packets, -1), inputs, spec)
    if later_rows(spec.want):
        merged, values, *_ = outputs
        packets = [
            passes.later_packets(_of_tokens(inputs, here, buffer.logits(here)), merged[:, here].contiguous(), spec)
            for here in slices
        ]
        passes.second_exchange(torch.cat(packets, -1), merged, values, spec)
    return outputs


class Gradients(NamedTuple):
    """Whose are wanted, and of which types; None where not. A main_grad is added to."""

    hidden: torch.dtype | None
    weight: torch.dtype | None
    bias: torch.dtype | None
    main_grad: torch.Tensor | None = None


class _Weight:
    """Where dW and the bias's gradient are summed, over blocks of tokens one after the other."""

    def __init__(self, weight: torch.Tensor, wanted: Gradients, blocks: int):
        self.wanted, self.sum, self.bias = wanted, None, None
        if wanted.weight is not None:
            self.sum = wanted.main_grad
            if self.sum is None:
                exact = wanted.weight if blocks == 1 else passes.float_type(wanted.weight)
                self.sum = weight.new_empty(weight.shape, dtype=exact)
        if wanted.bias is not None:
            self.bias = weight.new_zeros(weight.shape[0], dtype=passes.float_type(wanted.bias))

    def add(self, first: bool, ids: slice, gradient: torch.Tensor, hidden: torch.Tensor):
        """gradient [tokens, ids] of the block's logits."""
        if self.sum is not None:
            multiply(self.sum[ids], gradient.t(), hidden, add=not first or self.wanted.main_grad is not None)
        if self.bias is not None:
            self.bias[ids] += gradient.sum(0, dtype=self.bias.dtype)


def gradient(hidden, weight, inputs: Inputs, merged, grads, spec: HeadSpec, blocks: Blocks, wanted: Gradients, how):
    """Upstream gradients of the statistics -> dH (reduced as `how` says), fp32 or final dW (None if it went into the
    main_grad), and the bias's gradient; None where not wanted."""
    n, width = hidden.shape[0], weight.shape[0]
    share = -(-spec.vocab_size // spec.world_size)
    columns = width if blocks.columns >= share else blocks.columns  # whole means whole, also for a larger shard
    tokens, ids = _slices(n, blocks.tokens), _slices(width, columns)
    buffer = _Buffer(hidden, weight, min(blocks.tokens, n), min(columns, width))
    out = _Weight(weight, wanted, len(tokens))
    of_hidden = end = None
    if wanted.hidden is not None:
        of_hidden = hidden.new_empty(hidden.shape, dtype=wanted.hidden)
    for t in tokens:
        of_rows = None if of_hidden is None else of_hidden[t]
        if of_hidden is not None and len(ids) > 1 and (exact := passes.float_type(wanted.hidden)) != wanted.hidden:
            of_rows = of_rows.new_empty(of_rows.shape, dtype=exact)
        of_tokens = merged[:, t].contiguous(), [None if g is None else g[t] for g in grads]
        for v in ids:
            logits = buffer.logits(t, v)
            part, part_spec = _of_columns(_of_tokens(inputs, t, logits), spec, v)
            passes.write_gradient(logits, part, *of_tokens, part_spec)
            if of_hidden is not None:  # before dW, whose GEMM hides the exchange of the last one
                multiply(of_rows, logits, weight[v], add=v is not ids[0])
                if v is ids[-1] and of_rows.dtype != of_hidden.dtype:
                    of_hidden[t] = of_rows
                if v is ids[-1] and t is tokens[-1]:
                    end = comm.reduce_hidden(of_hidden, how, spec.world_size, spec.group_name)
            out.add(t is tokens[0], v, logits, hidden[t])
    return end and end(), out


def one_sweep(hidden, weight, inputs: Inputs, spec: HeadSpec, tokens: int, objective, wanted: Gradients, how):
    """Statistics, and the gradients of a loss that is a sum over blocks, in one go.

    objective(values [K, n], flags, tokens: slice) -> upstream gradients as in `gradient`, of one block.
    -> values [K, N], flags, and what `gradient` returns. An exchange per block, and one for dH.
    """
    buffer = _Buffer(hidden, weight, tokens, weight.shape[0])
    slices = _slices(hidden.shape[0], tokens)
    out = _Weight(weight, wanted, len(slices))
    of_hidden = end = None
    if wanted.hidden is not None:
        of_hidden = hidden.new_empty(hidden.shape, dtype=wanted.hidden)
    parts = []
    for here in slices:
        part = _of_tokens(inputs, here, buffer.logits(here))
        merged, values, *flags = passes.statistics(part, spec)
        parts.append((values, *flags))
        passes.write_gradient(part.logits, part, merged, objective(values, flags, here), spec)
        if of_hidden is not None:
            multiply(of_hidden[here], part.logits, weight)
            if here is slices[-1]:
                end = comm.reduce_hidden(of_hidden, how, spec.world_size, spec.group_name)
        out.add(here is slices[0], slice(0, weight.shape[0]), part.logits, hidden[here])
    values, *flags = (torch.cat(of_blocks, -1) for of_blocks in zip(*parts))
    return values, flags, end and end(), out
