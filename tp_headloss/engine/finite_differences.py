"""The gradient of a new family's statistics by finite differences of their values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .trial import Labels, Trial

# Each step is taken once and twice. Rounding grows with logits, so that larger ones have a wider
# step.
STEP, LARGER_STEP = 4e-3, 4e-2
# Relative to the largest slope: how far apart those of two steps, or of both sides, may be
LARGER_TOLERANCE = 1e-2
KINK_TOLERANCE = 0.1
LEAST = 1e-3


def finite_differences(trial: Trial, labels: Labels) -> dict[str, torch.Tensor]:
    """Return the slopes [N, columns] of a family's values with respect to the logits.

    Those of two steps together, (4 near - far) / 3, leave an error of STEP^4. They are NaN beside a
    kink or a jump: at larger logits where the slopes of both steps disagree, at ties where those of
    both sides do.
    """
    step = LARGER_STEP if trial.is_larger else STEP
    tokens, columns = trial.logits.shape
    unit = torch.eye(columns, dtype=torch.float64)
    logits = trial.logits[:, None]
    lengths = step, -step, 2 * step, -2 * step, 0.0
    moved = [logits + length * unit for length in lengths]
    rows = torch.cat(moved).flatten(0, 1)
    of_tokens = torch.arange(tokens).repeat_interleave(columns).repeat(len(lengths))
    values = trial.values(trial.rows_request(rows, of_tokens, labels))
    found = {}
    for name, value in values.items():
        by_length = value.view(len(lengths), tokens, columns)
        up, down, far_up, far_down, here = by_length.unbind()
        near = (up - down) / (2 * step)
        far = (far_up - far_down) / (4 * step)
        slopes = (4 * near - far) / 3
        if trial.is_larger:
            slopes = _where_alike(slopes, near, far, LARGER_TOLERANCE)
        if trial.has_ties:
            above, below = (up - here) / step, (here - down) / step
            slopes = _where_alike(slopes, above, below, KINK_TOLERANCE)
        found[name] = slopes
    return found


def _where_alike(slopes, first, second, tolerance: float) -> torch.Tensor:
    """Return slopes where two ways to them agree, else NaN."""
    most = tolerance * (float(first.abs().max()) + LEAST)
    return torch.where((first - second).abs() <= most, slopes, torch.nan)
