"""lse, log_prob and target_logit: the softmax itself, on which all other families build.

| statistic    | packet rows, target apart                      | merge (f = exp(max - M)) | d/dz_j        |
|--------------|------------------------------------------------|--------------------------|---------------|
| lse          | max = max z, sum = sum exp(z - max)            | f sum                    | p_j           |
| log_prob     | target = z_y, owner = 1 in the chunk that has y | sum (one owner, or NaN)  | [j = y] - p_j |
| target_logit | target                                         | sum                      | [j = y]       |

With u = sum over j != y of exp(z_j - M): log p_y = -log1p(u) where y is the maximum, and p_y - 1 = -u / S. Compared
with a teacher, the student has another temperature: z' = scale z, and student_sum = sum exp(z' - scale max).
"""

from typing import NamedTuple

import torch

from .family import (
    Family,
    Joined,
    MaybeNone,
    Merging,
    Softmax,
    Tile,
    Wanted,
    decay,
    finite_shift,
    row_sum,
)

# Owner flag of an ignored token. Ranks that disagree get a sum that the merge turns into NaN.
IGNORED = 2.0


class SoftmaxFamily(Family):
    """The sums that every call has. Carriers treat it apart, because other families need its maxima
    and sums."""

    gradients = lean_gradients = ("lse", "log_prob")

    def wanted(self, call: Wanted) -> bool:
        return True

    def packet_rows(self, call: Wanted) -> tuple[str, ...]:
        rows = ("max", "sum", "target", "owner") if call.has_labels else ("max", "sum")
        return (*rows, "student_sum") if call.student_sum else rows

    def merged_rows(self, call: Wanted) -> tuple[str, ...]:
        """shift M and sum S (0 where ignored); others u / S, target z_y - M."""
        rows = ("shift", "sum", "others", "target") if call.has_labels else ("shift", "sum")
        return (*rows, "student_sum") if call.student_sum else rows

    def value_rows(self, call: Wanted) -> tuple[str, ...]:
        """ "owners", the number of ranks that claim the label, serves checks."""
        return ("lse", "log_prob", "target_logit", "owners") if call.has_labels else ("lse",)

    def flags(self, call: Wanted) -> dict[str, torch.dtype]:
        return {"valid": torch.bool} if call.has_labels else {}

    def tile_softmax(self, tile: Tile) -> Softmax:
        """The softmax of a tile's columns but the target."""
        z, owned, column = tile.z, None, None
        if tile.target is not None:
            owned = (tile.target >= 0) & (tile.target < z.shape[1])
            column = tile.target.clamp(0, z.shape[1] - 1)[:, None]
            z = z.scatter(1, column, torch.where(owned[:, None], -torch.inf, z.gather(1, column)))
        peak = z.amax(-1)
        shifted = z - finite_shift(peak)
        return Softmax(z, peak, shifted, shifted.exp(), owned, column)

    def local(self, tile: Tile, softmax: Softmax, rows) -> dict[str, torch.Tensor]:
        out = {"max": softmax.peak, "sum": row_sum(softmax.exp)}
        if softmax.owned is not None:
            picked = tile.z.gather(1, softmax.column)[:, 0]
            out |= {"target": torch.where(softmax.owned, picked, 0.0), "owner": softmax.owned}
        if "student_sum" in rows:
            out["student_sum"] = row_sum((tile.scale * softmax.shifted).exp())
        return out

    def merging(self, rows: dict, scale) -> Merging:
        """The maxima of all packets."""
        peak = rows["max"]
        shift = peak.amax(0)
        return Merging(peak, shift, *decay(peak, shift), scale)

    def merge(self, rows: dict, merging: Merging) -> dict[str, torch.Tensor]:
        sums = {"sum": (merging.factor * rows["sum"]).sum(0)}
        if "owner" in rows:  # selected by the flag, never by max, which may drop NaN
            sums["target"] = torch.where(rows["owner"] == 1, rows["target"], 0.0).sum(0)
            sums["owners"] = rows["owner"].sum(0)
        if "student_sum" in rows:
            sums["student_sum"] = (student_factor(merging) * rows["student_sum"]).sum(0)
        return sums

    def joined(self, shift, sums: dict, labels, packets: int, scale) -> tuple[Joined, dict, dict]:
        """Merged sums -> the softmax with its target column, and what `finish` reports."""
        values: dict[str, torch.Tensor] = {}
        rows: dict[str, torch.Tensor | MaybeNone] = {}
        top, others = shift, sums["sum"]
        drop, factor = torch.zeros_like(others), torch.ones_like(others)
        whole, ignored = others, torch.zeros_like(others, dtype=torch.bool)
        target = offset = p_target = at_target = student_factor = None
        student_sum = sums.get("student_sum")
        log_sum = whole.log()
        if labels is not None:
            target, ignored = sums["target"], sums["owners"] == IGNORED * packets
            top, drop, factor, offset, p_target, others, whole, log_sum, log_prob = join_target(
                shift, others, target
            )
            values |= {
                "log_prob": log_prob,
                "target_logit": target,
                "owners": sums["owners"],
                "valid": ~ignored,
            }
            rows |= {"others": others / whole, "target": offset}
            if student_sum is not None:
                student_factor = torch.where(shift == -torch.inf, 0.0, (scale * drop).exp())
                at_target = torch.where(target == -torch.inf, 0.0, (scale * offset).exp())
                student_sum = student_factor * student_sum + at_target
        values["lse"] = top + log_sum
        rows |= {"shift": top, "sum": whole, "student_sum": student_sum}
        bad = ~(whole > 0)
        if labels is not None:
            bad = (bad | (sums["owners"] != 1)) & ~ignored
        joined = Joined(
            shift,
            top,
            drop,
            factor,
            target,
            offset,
            p_target,
            whole,
            log_sum,
            student_sum,
            at_target,
            student_factor,
            ignored,
            bad,
            labels,
            scale,
        )
        return joined, values, rows


def student_factor(merging: Merging) -> torch.Tensor:
    """exp(scale (max - M)), 0 for an empty packet."""
    return torch.where(merging.peak == -torch.inf, 0.0, (merging.scale * merging.drop).exp())


class WithTarget(NamedTuple):
    """A sum of exponentials and its target column together."""

    top: torch.Tensor  # maximum of all
    drop: torch.Tensor  # shift - top
    factor: torch.Tensor  # exp(drop)
    offset: torch.Tensor  # z_y - top
    p_target: torch.Tensor  # exp(offset)
    others: torch.Tensor  # the sum without the target, relative to top
    whole: torch.Tensor
    log_sum: torch.Tensor  # log(whole)
    log_prob: torch.Tensor  # of the target


def join_target(shift, others, target) -> WithTarget:
    """others = sum of exp(z - shift) [N] without the target column, whose logit is z_y."""
    top = torch.fmax(shift, target)  # a NaN still reaches the sum
    drop, factor = decay(shift, top)
    offset, p_target = decay(target, top)
    offset = torch.where(target == -torch.inf, target, offset)
    others = factor * others
    whole = others + p_target
    log_sum = torch.where(target == top, others.log1p(), whole.log())
    log_prob = 0.0 - torch.where(target == top, log_sum, log_sum - offset)
    return WithTarget(top, drop, factor, offset, p_target, others, whole, log_sum, log_prob)
