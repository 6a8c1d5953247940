"""A try of a new family at larger numbers than those of `trial`, and warnings of what no try has
seen."""

from __future__ import annotations

import warnings

import torch

from ..statistics import Family
from .later_ids import reads_ids_without_a_table
from .trial import LABELS, LARGER, LOGITS, TEMPERATURE, WIDTH, Trial


@torch.no_grad()
def try_larger(trial: Trial) -> None:
    """Raise ValueError unless a family's methods agree at larger logits, too.

    Logits at which the family raises an error, or is not finite, tell nothing.
    """
    for factor in LARGER:
        larger = Trial(trial.family, trial.families, factor=factor)
        if not larger.is_an_error() and larger.is_finite():
            larger.check_sums()
            if larger.has_values_without_labels():
                larger.check_label()
            larger.check_gradient(LABELS)
            trial.moving |= larger.moving


def warn_of_untried(family: Family, moving: set[str]) -> None:
    """Warn of what a try cannot see: statistics that were constant, and ids at which none was made.

    moving: names of the statistics that changed with the logits.
    """
    owner = type(family).__name__
    if constant := [name for name in family.gradients if name not in moving]:
        largest = max(LARGER) * max(abs(x) for token in LOGITS for x in token) / TEMPERATURE
        warnings.warn(
            f"the statistics {constant} of family {owner} were constant on all numbers that were "
            f"tried (|z| up to {largest:.0f}): their gradients were not tried, so compare them "
            "with finite differences of your own",
            stacklevel=4,
        )
    if reads_ids_without_a_table(family, WIDTH):
        warnings.warn(
            f"family {owner} reads tile.first_id, but has no table or ids that a try could find, in "
            f"attributes or in variables of its methods: it was tried at the ids 0 to {WIDTH - 1} "
            "alone, where a label or a tile's first id that is forgotten may not show",
            stacklevel=4,
        )
