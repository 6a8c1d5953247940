"""Statistics of the student over a set of ids per token (`IdSets`), such as those that a sampler kept.

s = softmax of z over the set, M its largest z. The label's column y stays out of the sums and is joined at the end, as
in `softmax`. A set that is empty or lacks the token's label makes its token's statistics here NaN.

| statistic    | packet rows, over the chunk's members but y | value                   | d/dz_k in the set  |
|--------------|---------------------------------------------|-------------------------|--------------------|
| (all)        | set_max = max z, set_sum = sum exp(z - max) |                         |                    |
| set_log_prob | set_owner: whether y is a member, and here  | log s_y                 | [k = y] - s_k      |
| set_entropy  | set_moment = sum exp(z - max) (z - max)     | H = -sum s log s        | -s_k (log s_k + H) |
| set_log_mass |                                             | log P = log of sum of p | (1 - P) s_k        |

At other columns the gradient is 0, and -p_j for set_log_mass.
"""

import torch

from .family import Family, Joined, Merging, Softmax, Tile, Wanted, finite_shift, row_sum, weigh
from .softmax import join_target
from .topk import merge_subset


class SetsFamily(Family):
    statistics = gradients = ("set_log_prob", "set_entropy", "set_log_mass")
    id_list = "sets"

    def packet_rows(self, call: Wanted) -> tuple[str, ...]:
        rows = ("set_max", "set_sum", "set_owner") if call.has_labels else ("set_max", "set_sum")
        return (*rows, "set_moment") if "set_entropy" in call.want else rows

    def merged_rows(self, call: Wanted) -> tuple[str, ...]:
        """M and the sum of exp(z - M); 1 - s_y, the mean of z - M, and 1 - P, where they are
        needed."""
        rows = (
            ("set_shift", "set_sum", "set_others") if call.has_labels else ("set_shift", "set_sum")
        )
        rows = (*rows, "set_mean") if "set_entropy" in call.want else rows
        return (*rows, "set_outside") if "set_log_mass" in call.want else rows

    def value_rows(self, call: Wanted) -> tuple[str, ...]:
        rows = super().value_rows(call)
        return rows if call.has_labels else tuple(x for x in rows if x != "set_log_prob")

    def local(self, tile: Tile, softmax: Softmax, rows) -> dict[str, torch.Tensor]:
        z = torch.where(tile.members, softmax.z, -torch.inf)
        peak = z.amax(-1)
        shifted = z - finite_shift(peak)
        weight = shifted.exp()
        out = {
            "set_max": peak,
            "set_sum": row_sum(weight),
            "set_moment": row_sum(weigh(weight, shifted)),
        }
        if softmax.owned is not None:
            out["set_owner"] = softmax.owned & tile.members.gather(1, softmax.column)[:, 0]
        return out

    def merge(self, rows: dict, merging: Merging) -> dict[str, torch.Tensor]:
        sums = merge_subset(rows, "set", 1.0)
        return sums | {"set_owner": rows["set_owner"].sum(0)} if "set_owner" in rows else sums

    def finish(self, sums: dict, joined: Joined) -> tuple[dict, dict]:
        whole, top, moment = sums["set_sum"], sums["set_shift"], sums.get("set_moment")
        log_sum, values, rows = whole.log(), {}, {}
        bad = ~(whole > 0)
        if "set_owner" in sums:
            own = join_target(top, whole, joined.target)
            if moment is not None:
                moment = own.factor * (moment + own.drop * whole) + weigh(own.p_target, own.offset)
            top, whole, log_sum = own.top, own.whole, own.log_sum
            bad = ~(whole > 0) | (sums["set_owner"] != 1)
            values["set_log_prob"] = own.log_prob
            rows["set_others"] = own.others / whole
        if moment is not None:
            rows["set_mean"] = moment / whole
            values["set_entropy"] = log_sum - rows["set_mean"]
        values["set_log_mass"] = (top + log_sum - joined.top - joined.log_sum).clamp(max=0)
        rows |= {
            "set_shift": top,
            "set_sum": whole,
            "set_outside": -torch.expm1(values["set_log_mass"]),
        }

        def settled(x):
            return torch.where(bad, torch.nan, x)

        return {name: settled(x) for name, x in values.items()}, {
            name: settled(x) for name, x in rows.items()
        }

    def direct(self, dz, tile: Tile, merged: dict, grads: dict):
        if not any(name in grads for name in self.statistics):
            return dz
        shifted = tile.z - merged["set_shift"]
        s = shifted.exp() / merged["set_sum"]
        # NaN of a bad set, for the whole row
        at, elsewhere = torch.zeros_like(dz), 0.0 * merged["set_sum"]
        if "set_log_prob" in grads:
            is_label = tile.target[:, None] == torch.arange(dz.shape[1], device=dz.device)
            at = at + grads["set_log_prob"] * torch.where(is_label, merged["set_others"], -s)
        if "set_entropy" in grads:
            at = at - grads["set_entropy"] * weigh(s, shifted - merged["set_mean"])
        if "set_log_mass" in grads:
            at = at + grads["set_log_mass"] * merged["set_outside"] * s
            p = (tile.z - merged["shift"]).exp() / merged["sum"]
            elsewhere = elsewhere - grads["set_log_mass"] * p
        return dz + torch.where(tile.members, at, elsewhere)


def rows_and_places(spans) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds [n, 2] of sets -> for each member of each set the number of the set and of the id.
    Waits for a GPU."""
    begin, length = spans[:, 0], spans[:, 1] - spans[:, 0]
    row = torch.repeat_interleave(torch.arange(len(spans), device=spans.device), length)
    return row, torch.arange(len(row), device=row.device) + (begin - length.cumsum(0) + length)[row]


def spans_of(counts: torch.Tensor) -> torch.Tensor:
    """Bounds [N, 2] of sets of these sizes [N], one after the other."""
    end = counts.cumsum(0)
    return torch.stack([end - counts, end], 1)


def members(entries, spans, first_id: int, width: int) -> torch.Tensor:
    """bool [n, width]: which of the ids from `first_id` on are in each token's set. Waits for a
    GPU.

    entries: [all] ids of all sets; spans: [n, 2] bounds of each token's set among them.
    """
    row, place = rows_and_places(spans)
    column = entries[place].long() - first_id
    column = torch.where((column >= 0) & (column < width), column, width)
    out = torch.zeros(len(spans), width + 1, dtype=torch.bool, device=entries.device)
    out[row, column] = True
    return out[:, :width]


def known_sets(ids, spans, vocab_size: int, most: int | None = None):
    """The ids of all sets [all] and their bounds [N, 2] -> int32 ids, negative where there is none,
    and the bounds.

    most: the most ids, repeated ones included, that a set can have, for the triton backend; None:
    any number. A set with an id at or beyond the vocabulary becomes empty. Sets must not overlap in
    `ids`. Here a set's ids keep their places; for the kernels, which count an id as often as it is
    there and look for those of a part of the vocabulary, the triton backend leaves each once and
    ascending, as they are in the sets of a `SamplingRule`.
    """
    unknown = torch.nn.functional.pad((ids >= vocab_size).cumsum(0), (1, 0))
    begin, end = spans.unbind(1)
    end = torch.where(unknown[end] > unknown[begin], begin, end)
    return torch.where(ids >= vocab_size, -1, ids).clamp(min=-1).int(), torch.stack([begin, end], 1)
