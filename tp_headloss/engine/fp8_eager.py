"""The definition of `fp8` in plain torch; see `backend` for the contract."""

import torch

from .fp8 import (
    LARGEST_OPERAND,
    OPERAND,
    Fp8Gradient,
    LargeEntries,
    Units,
    dithered_gradient,
    dithered_operand,
)


def split(out: Fp8Gradient, gradient: torch.Tensor, units: Units, start: int):
    """Write a gradient [n, width] fp32 in its two parts. start: the shard's first column."""
    width = gradient.shape[1]
    of_label = units.column[:, None] == torch.arange(width, device=gradient.device)
    rest = gradient / units.unit[:, None]
    is_large = of_label | (rest > units.limit[:, None])
    rest = dithered_gradient(torch.where(is_large, 0.0, rest), units.seed, start)
    if out.rows is not None:
        out.rows.zero_()
        out.rows[:, :width] = rest
    if out.turned is not None:
        out.turned.zero_()
        out.turned[:width, : len(rest)] = rest.t()
    tokens, found = is_large.nonzero(as_tuple=True)
    places = (is_large.cumsum(1) - 1)[tokens, found]
    out.large.columns[tokens, places] = found.to(torch.int32)
    out.large.gradients[tokens, places] = gradient[tokens, found]
    out.large.counts.copy_(is_large.sum(1))


def turn_to_fp8(out, x, factors: torch.Tensor, first: int, seed: torch.Tensor):
    """Write x [R, C] times factors [R] or [] into out [C, at least R], e4m3, with 0 beyond.

    first, seed: for `dithered_operand`.
    """
    factors = factors[:, None] if factors.dim() else factors
    rounded = dithered_operand(x.float() * factors, first, seed)
    out.zero_()
    out[:, : x.shape[0]] = rounded.clamp(-LARGEST_OPERAND, LARGEST_OPERAND).to(OPERAND).t()


def _dense(large: LargeEntries, width: int) -> torch.Tensor:
    """Large entries as a matrix [N, width] fp32."""
    dense = large.gradients.new_zeros(large.columns.shape[0], width + 1)
    columns = large.columns.clamp(max=width).to(torch.int64)  # those that are none: the last
    return dense.scatter_add_(1, columns, large.gradients)[:, :width]


def finish_hidden(out, product, gradient: Fp8Gradient, weight, row_sum):
    """out [n, H] = product [n, H] times units [n] + large entries @ weight, and uniform parts [n]
    times row_sum [H], the sum of the weight's rows, where a token has them."""
    exact = _dense(gradient.large, weight.shape[0]) @ weight.float()
    if gradient.uniform is not None:
        exact += gradient.uniform[:, None] * row_sum
    out.copy_(product.float() * gradient.unit[:, None] + exact)


def add_to_weight(out, large: LargeEntries, hidden):
    """out [width, H] += large entries^T @ hidden [N, H]."""
    exact = _dense(large, out.shape[0]).t() @ hidden.float()
    out.copy_(out.float() + exact)
