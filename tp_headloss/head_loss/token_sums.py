"""Masked and weighted sums of per-token values, in plain torch."""

import torch

from ..spec.tensor_line import check_alike


def masked(
    values: torch.Tensor, valid: torch.Tensor | None, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Return values [..] * weight where valid and 0 elsewhere, even where the value is NaN or
    infinite.

    With a weight the result is float64, so that large weights do not overflow before a division
    makes them small. Tokens of weight 0 give 0, too, unless the weight requires a gradient.
    """
    if weight is not None:
        if valid is not None and weight.requires_grad:
            # where the value is infinite, the gradient of its weight would be NaN
            values = torch.where(valid, values, 0.0)
        values = values.double() * weight
        if valid is not None and not weight.requires_grad:
            valid = valid & (weight != 0)
    return values if valid is None else torch.where(valid, values, 0.0)


def nonzero(denominator: torch.Tensor | float) -> torch.Tensor | float:
    """Return the denominator with infinity in place of 0: a quotient by it is then 0 and has zero
    gradient."""
    if not isinstance(denominator, torch.Tensor):
        return denominator or float("inf")
    return denominator.double().masked_fill(denominator == 0, float("inf"))


def expect_per_token(owner: str, value, like: torch.Tensor, is_loss: bool = False):
    """Raise TypeError or ValueError unless the value is a real tensor with the shape and the device
    of a statistic, one number per token; is_loss: of floating point."""
    if not isinstance(value, torch.Tensor) or value.is_complex():
        got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(f"{owner} must return a real tensor with a value per token, got {got}")
    if is_loss and not value.is_floating_point():
        raise TypeError(
            f"{owner} must return a loss per token, floating point, got {value.dtype}, which has no "
            "gradient: return its .float(), or make it a Metric"
        )
    if value.shape != like.shape:
        hint = ", and HeadLoss averages: do not average there" if value.dim() == 0 else ""
        raise ValueError(
            f"{owner} must return a value per token, {list(like.shape)}, got {list(value.shape)}{hint}"
        )
    check_alike(owner, "device", value.device, {"device": (like.device, "the statistics")})


def metric_sums(
    values: dict[str, torch.Tensor], valid: torch.Tensor, weight: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Reduce per-token values [..] by name to fp32 scalars by name, over valid tokens whose weight
    is not 0.

    Names in "max_" and "min_" give the extremum (-inf, inf without tokens), others the float64 sum
    of weight * value.
    """
    counted = valid if weight is None else valid & (weight != 0)
    neutral = {"max_": -torch.inf, "min_": torch.inf}
    kinds = {name: name[:4] if name[:4] in neutral else "sum" for name in values}
    out: dict[str, torch.Tensor] = {}
    for kind in dict.fromkeys(kinds.values()):
        names = [name for name in values if kinds[name] == kind]
        # all rows at once, because a small operation costs the same for one row as for twenty
        rows = torch.stack([values[name].float() for name in names])
        if kind == "sum" and weight is not None:
            rows = rows * weight
        rows = torch.where(counted, rows, neutral.get(kind, 0.0)).reshape(len(names), valid.numel())
        if kind == "sum":
            found = rows.sum(1, dtype=torch.float64).float()
        elif not valid.numel():
            found = rows.new_full((len(names),), neutral[kind])
        else:
            found = rows.amax(1) if kind == "max_" else rows.amin(1)
        out.update(zip(names, found.unbind(0)))
    return {name: out[name] for name in values}
