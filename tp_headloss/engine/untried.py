"""Tries of a new family at larger numbers than those of `trial` and at ties, and warnings of what
no try has seen."""

from __future__ import annotations

import warnings

import torch

from . import passes
from .later_ids import reads_ids_without_a_table, tables
from .request import Request
from .trial import (
    LABELS,
    LARGER,
    LOGITS,
    SLOPE_TOLERANCE,
    TEMPERATURE,
    WIDTH,
    Trial,
    as_in_a_backward,
)

SHIFT = 100.0  # beyond where an exponential in fp32 overflows, or vanishes
ROUNDING = 1e-2  # of the largest value
# values that an fp32 result may have
LEAST_IN_FP32, MOST_IN_FP32 = 1e-30, 1e38


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


@torch.no_grad()
def try_ties(trial: Trial) -> None:
    """Raise ValueError unless a family's methods agree where the label's logit is also another's, as
    it often is in bf16."""
    tied = Trial(trial.family, trial.families, has_ties=True)
    if not tied.is_an_error():
        tied.check_sums()
        tied.check_gradient(LABELS)


@torch.no_grad()
def try_another_call(trial: Trial) -> None:
    """Raise ValueError if a family keeps something between the forward of a call and its backward
    elsewhere than in merged rows: another call comes between them, as of an evaluation.

    The loss has one statistic alone.
    """
    request = trial.request(LABELS)
    backward = as_in_a_backward(request)
    tokens = torch.arange(len(LOGITS)).flip(0)
    other = trial.rows_request(trial.logits[tokens], tokens, LABELS)
    for name in trial.family.gradients:
        merged = passes.statistics(request)[0]
        expected = _gradient(backward, merged, name)
        trial.values(other)
        found = _gradient(backward, merged, name)
        if not torch.equal(found.nan_to_num(), expected.nan_to_num()):
            at = int((found - expected).abs().nan_to_num(torch.inf).argmax())
            raise ValueError(
                f"the methods of family {type(trial.family).__name__} must keep nothing between a "
                f"forward and its backward but rows of merged, got the gradient of {name} = "
                f"{float(found.flatten()[at]):.6g} after another call and "
                f"{float(expected.flatten()[at]):.6g} without: return it from finish, by a name "
                "that is in merged, and read it in the gradient's methods"
            )


@torch.no_grad()
def warn_of_rounding(trial: Trial) -> None:
    """Warn of statistics that fp32 logits make infinite or wrong where float64 ones do not.

    All logits are moved by the same number, which changes nothing that is relative to the softmax.
    """
    tokens = torch.arange(len(LOGITS))
    owner = type(trial.family).__name__
    for shift in (0.0, SHIFT, -SHIFT):
        logits = trial.logits + shift
        try:
            exact, rounded = (
                trial.values(trial.rows_request(logits.to(dtype), tokens, LABELS))
                for dtype in (torch.float64, torch.float32)
            )
        except Exception:  # of a family that takes no such numbers
            continue
        for name, expected in exact.items():
            found = rounded[name].double()
            largest = expected.abs().max()
            if not expected.isfinite().all() or not LEAST_IN_FP32 < largest < MOST_IN_FP32:
                continue
            apart = (found - expected).abs().nan_to_num(nan=torch.inf)
            if apart.max() > ROUNDING * largest:
                at = int(apart.argmax())
                warnings.warn(
                    f"the statistic {name!r} of family {owner} is {float(found[at]):.6g} of fp32 "
                    f"logits and {float(expected[at]):.6g} of float64 ones, where all logits were "
                    f"moved by {shift:g}: exponentials overflow and vanish unless they are relative "
                    "to the maximum (softmax.exp in local, with rescale and target)",
                    stacklevel=4,
                )
                return


@torch.no_grad()
def warn_of_last_bits(trial: Trial) -> None:
    """Warn of a gradient that is another where each logit is one bit larger or smaller than in the
    forward, as logits may be that a linear head makes again for its backward."""
    request = trial.request(LABELS)
    merged = passes.statistics(request)[0]
    backward = as_in_a_backward(request)
    tensors = backward.tensors
    for name in trial.family.gradients:
        expected = _gradient(backward, merged, name)
        for end in (torch.inf, -torch.inf):
            logits = torch.nextafter(tensors.logits, tensors.logits.new_tensor(end))
            again = backward._replace(tensors=tensors._replace(logits=logits))
            apart = (_gradient(again, merged, name) - expected).abs().max()
            if apart > SLOPE_TOLERANCE * (1 + expected.abs().max()):
                warnings.warn(
                    f"the gradient of {name!r} of family {type(trial.family).__name__} is another "
                    "where logits differ from those of the forward in the last bit, as they may "
                    'under Linear("recompute"), which makes them again: direct and coefficient '
                    "must find a column by its id, in a merged row, and not by comparing its logit",
                    stacklevel=4,
                )
                return


def _gradient(request: Request, merged, name: str) -> torch.Tensor:
    """The gradient of the sum of one statistic by the logits."""
    found = torch.zeros_like(request.tensors.logits)
    one = found.new_ones(len(found))
    passes.write_gradient(found, request, merged, {name: one})
    return found


def warn_of_untried(trial: Trial) -> None:
    """Warn of what a try cannot see: statistics that were constant, ids at which none was made, and
    ids beyond a table that get its numbers."""
    family = trial.family
    owner = type(family).__name__
    if constant := [name for name in family.gradients if name not in trial.moving]:
        largest = max(LARGER) * max(abs(x) for token in LOGITS for x in token) / TEMPERATURE
        warnings.warn(
            f"the statistics {constant} of family {owner} were constant on all numbers that were "
            f"tried (|z| up to {largest:.0f}): their gradients were not tried, so compare them "
            "with finite differences of your own",
            stacklevel=4,
        )
    for name, x, dim in tables(family, WIDTH):
        if _may_be_changed(x) and _is_read_past_its_end(trial, x, dim):
            length = x.shape[dim]
            warnings.warn(
                f"family {owner} takes ids that its {name} [{length}] does not have for other ids, "
                f"as by % or clamp: unless this is meant, write `if tile.first_id + "
                f"tile.z.shape[1] > {length}: raise ValueError(..)` with the length of {name}",
                stacklevel=4,
            )
    if reads_ids_without_a_table(family, WIDTH):
        warnings.warn(
            f"family {owner} reads tile.first_id, but has no table or ids that a try could find, in "
            f"attributes or in variables of its methods: it was tried at the ids 0 to {WIDTH - 1} "
            "alone, where a label or a tile's first id that is forgotten may not show",
            stacklevel=4,
        )


def _may_be_changed(x: torch.Tensor) -> bool:
    """True for numbers of one's own, which can be changed and restored: no ids, and no memory of
    numpy or of a file."""
    is_number = x.is_floating_point() or x.dtype == torch.bool
    is_own = x.untyped_storage().resizable() and 0 not in x.stride()
    return is_number and is_own and not x.is_inference()


def _is_read_past_its_end(trial: Trial, table: torch.Tensor, dim: int) -> bool:
    """True if a tensor has a number for each id, and values at ids beyond its last depend on it.

    It has one for each id if values at the first ids depend on its first numbers alone.
    """
    at_first_ids = Trial(trial.family, trial.families)
    at_later_ids = Trial(trial.family, trial.families, table.shape[dim])
    if at_later_ids.is_an_error():
        return False
    own_numbers = table.clone()
    later_numbers = table.narrow(dim, WIDTH, table.shape[dim] - WIDTH)
    try:
        has_one_for_each_id = not _changes(at_first_ids, later_numbers)
        return has_one_for_each_id and _changes(at_later_ids, table)
    finally:
        table.copy_(own_numbers)


def _changes(trial: Trial, numbers: torch.Tensor) -> bool:
    """Replace numbers by others, and return whether the values of a family change."""
    before = trial.values(trial.request(LABELS))
    numbers.copy_(~numbers if numbers.dtype == torch.bool else numbers + 1)
    if trial.is_an_error():
        return True
    after = trial.values(trial.request(LABELS))
    return any(not torch.equal(after[name], value) for name, value in before.items())
