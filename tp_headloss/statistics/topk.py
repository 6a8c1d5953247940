"""Statistics of a teacher of K entries per token (`TopKTeacher`), whose probabilities are tau_k and sum to W.

s = softmax of z' over the entries, r = softmax of z' over all else (the tail), P and R the student's probability of
either; y_k = scale (z_k - topk_max):

| statistic        | packet rows, over the chunk's entries       | value                  | d/dz'_k; elsewhere       |
|------------------|---------------------------------------------|------------------------|--------------------------|
| (all of these)   | topk_max = max z_k, topk_sum = sum exp(y_k) |                        |                          |
| teacher_mass     | topk_mass = sum tau_k                       | W                      | none                     |
| topk_forward_kl  | topk_cross = sum tau_k (log tau_k - y_k)    | sum tau log(tau / s)   | W s_k - tau_k; 0         |
| vocab_forward_kl | as topk_forward_kl and topk_log_mass        | sum tau log(tau / p)   | W P s_k - tau_k; W R r_j |
| topk_reverse_kl  | topk_gap = sum exp(y_k) (y_k - log tau_k)   | sum s log(s / tau) = G | s_k (log(s_k/tau_k) - G) |
| topk_log_mass    | student_sum, or those of the tail           | log P                  | R s_k; -R r_j            |
| tail_log_mass    | tail_max = max z, tail_sum = sum exp        | log R                  | -P s_k; P r_j            |
| tail_entropy     | tail_moment, all three as max, sum, moment  | -sum r log r = H       | 0; -r_j (log r_j + H)    |
| topk_jsd         | second exchange, p' = s, q = tau            | sum v_k + w_k          | v_k - s_k sum v; 0       |
| vocab_jsd        | second exchange, p' = P s, q = tau          | sum v_k + w_k          | v_k; at all: -p'_j sum v |

v and w as in `divergence`.
"""

import torch

from .divergence import jensen_shannon_parts
from .family import (
    Family,
    Joined,
    Merging,
    Softmax,
    Tile,
    Wanted,
    decay,
    finite_shift,
    row_sum,
    weigh,
)

TAIL = ("tail_log_mass", "tail_entropy")
FIRST = ("topk_forward_kl", "vocab_forward_kl", "topk_reverse_kl", "topk_log_mass", *TAIL)
SECOND = ("topk_jsd", "vocab_jsd")
REST = ("rest_shift", "rest_sum", "rest_mean", "inside", "outside")


def has_tail(want) -> bool:
    """True if the columns that are no entries are summed by themselves."""
    return any(name in want for name in TAIL)


class TopKFamily(Family):
    statistics = gradients = FIRST + SECOND
    in_one_read = "topk_forward_kl", "vocab_forward_kl", "tail_log_mass"
    id_list = "entries"
    narrow_gradients = TAIL
    lean_gradients = tuple(name for name in FIRST if name != "tail_entropy")

    def needs_student_sum(self, call: Wanted) -> bool:
        return not has_tail(call.want) and call.any_of(
            ("topk_log_mass", "vocab_forward_kl", "vocab_jsd")
        )

    def is_lean(self, call: Wanted) -> bool:
        return has_tail(call.want) and "tail_entropy" not in call.want

    def packet_rows(self, call: Wanted) -> tuple[str, ...]:
        rows = ("tail_max", "tail_sum") if has_tail(call.want) else ()
        rows = (*rows, "tail_moment") if "tail_entropy" in call.want else rows
        return (*rows, "topk_max", "topk_sum", "topk_mass", "topk_cross", "topk_gap")

    def merged_rows(self, call: Wanted) -> tuple[str, ...]:
        """Maximum, sum and W of the entries, the mean of y - log tau; maximum and sum of the tail
        (of the whole vocabulary if no tail is wanted), P and R; the mean of y of a tail."""
        rows = (
            "topk_shift",
            "topk_sum",
            "topk_mass",
            "topk_gap",
            "rest_shift",
            "rest_sum",
            "inside",
            "outside",
        )
        return (*rows, "rest_mean") if has_tail(call.want) else rows

    def value_rows(self, call: Wanted) -> tuple[str, ...]:
        return ("teacher_mass", *(name for name in FIRST if name in call.want))

    def second_rows(self, call: Wanted) -> tuple[str, ...]:
        return tuple(name for name in SECOND if name in call.want)

    def local(self, tile: Tile, softmax: Softmax, rows) -> dict[str, torch.Tensor]:
        z, log_tau = entry_logits(tile)
        peak = z.amax(-1)
        shifted = tile.scale * (z - finite_shift(peak))
        tau, weight = log_tau.exp(), shifted.exp()
        out = {"topk_max": peak, "topk_sum": row_sum(weight), "topk_mass": row_sum(tau)}
        out["topk_cross"] = row_sum(weigh(tau, log_tau - shifted))
        out["topk_gap"] = row_sum(weigh(weight, shifted - log_tau))
        return out | tail_sums(tile) if "tail_max" in rows else out

    def merge(self, rows: dict, merging: Merging) -> dict[str, torch.Tensor]:
        sums = merge_subset(rows, "topk", merging.scale)
        return sums | merge_subset(rows, "tail", merging.scale) if "tail_max" in rows else sums

    def finish(self, sums: dict, joined: Joined) -> tuple[dict, dict]:
        log_sum, mass = sums["topk_sum"].log(), sums["topk_mass"]
        nothing = mass == 0
        # entries to which the student gives no probability
        nowhere = (sums["topk_sum"] == 0) & ~nothing

        def settled(x, minimum):
            # smaller values are rounding
            x = torch.where(nowhere, torch.inf, torch.maximum(x, minimum))
            return torch.where(nothing, 0.0, x)

        gap = torch.where(sums["topk_sum"] == 0, 0.0, sums["topk_gap"] / sums["topk_sum"])
        values = {"teacher_mass": mass}
        least = torch.xlogy(mass, mass)
        values["topk_forward_kl"] = settled(sums["topk_cross"] + mass * log_sum, least)
        values["topk_reverse_kl"] = settled(gap - log_sum, -mass.log())
        rest_values, rest = self._rest(sums, joined)
        values |= rest_values
        if "topk_log_mass" in values:
            cross = sums["topk_cross"] + mass * (log_sum - values["topk_log_mass"])
            values["vocab_forward_kl"] = settled(cross, least)
        unknown = mass.isnan()
        values = {name: torch.where(unknown, torch.nan, x) for name, x in values.items()}
        rows = {
            "topk_shift": sums["topk_shift"],
            "topk_sum": sums["topk_sum"],
            "topk_mass": mass,
            "topk_gap": gap,
        }
        return values, rows | dict(zip(REST, rest))

    def _rest(self, sums: dict, joined: Joined) -> tuple[dict, tuple]:
        """The student's probability of the entries and of everything else: values, and the merged
        rows `REST`."""
        zero, scale = torch.zeros_like(sums["topk_sum"]), joined.scale
        log_sum = sums["topk_sum"].log()
        if "tail_sum" in sums:
            shift, whole = sums["tail_shift"], sums["tail_sum"]
            mean = (
                zero
                if "tail_moment" not in sums
                else torch.where(whole == 0, 0.0, sums["tail_moment"] / whole)
            )
            # of the logs of both probabilities
            apart = scale * (sums["topk_shift"] - shift) + log_sum - whole.log()
            less = apart.abs().neg().exp().log1p()
            inside, outside = -(less + (-apart).clamp(min=0)), -(less + apart.clamp(min=0))
            entropy = torch.where(whole == 0, 0.0, whole.log() - mean)
            values = {"topk_log_mass": inside, "tail_log_mass": outside, "tail_entropy": entropy}
            return values, (shift, whole, mean, inside.exp(), outside.exp())
        if joined.student_sum is not None:
            top, whole = joined.top, joined.student_sum
            inside = (scale * (sums["topk_shift"] - top) + log_sum - whole.log()).clamp(max=0)
            return {"topk_log_mass": inside}, (top, whole, zero, inside.exp(), -torch.expm1(inside))
        return {}, (zero,) * len(REST)

    def second(
        self, name: str, tile: Tile, merged: dict, beta: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        student, teacher = jensen_shannon_parts(*entry_probabilities(name, tile, merged), beta)
        return row_sum(student + teacher), row_sum(student)

    def scaled(
        self, total, tile: Tile, merged: dict, grads: dict, beta: float, want: tuple[str, ...]
    ):
        if not any(name in grads for name in self.statistics):
            return total
        none = torch.zeros_like(merged["sum"])
        forward, vocab, reverse, inside, outside, entropy = (
            grads.get(name, none) for name in FIRST
        )
        forward, inside = forward + vocab, inside - vocab * merged["topk_mass"]
        z, log_tau = entry_logits(tile)
        shifted = tile.scale * (z - merged["topk_shift"])
        s = torch.where(z == -torch.inf, 0.0, shifted.exp() / merged["topk_sum"])
        at = forward * (merged["topk_mass"] * s - log_tau.exp())
        at = at + torch.where(
            (s == 0) | (reverse == 0), 0.0, reverse * s * (shifted - log_tau - merged["topk_gap"])
        )
        at = at + (inside * merged["outside"] - outside * merged["inside"]) * s
        common = -inside
        for name in SECOND:
            if name in grads:
                p, q = entry_probabilities(name, tile, merged)
                at = at + grads[name] * (
                    jensen_shannon_parts(p, q, beta)[0] - p * merged[f"{name}_mean"]
                )
        if "vocab_jsd" in grads:
            common = common - grads["vocab_jsd"] * merged["vocab_jsd_mean"]
        if has_tail(want):
            common = merged["outside"] * common + outside * merged["inside"]
        shifted = tile.scale * (tile.z - merged["rest_shift"])
        rest = torch.where(
            (tile.z == -torch.inf) | (merged["rest_sum"] == 0),
            0.0,
            shifted.exp() / merged["rest_sum"],
        )
        dz = torch.where(
            rest == 0, 0.0, rest * (common - entropy * (shifted - merged.get("rest_mean", 0.0)))
        )
        return fill_entries(dz, tile.entries, at)


def merge_subset(rows: dict, name: str, scale) -> dict[str, torch.Tensor]:
    """The merged sums of a subset of the columns, the entries ("topk") or all others ("tail")."""
    peak = rows[f"{name}_max"]
    shift = peak.amax(0)
    drop = scale * decay(peak, shift)[0]
    factor = torch.where(peak == -torch.inf, 0.0, drop.exp())
    own = {row.removeprefix(f"{name}_"): x for row, x in rows.items() if row.startswith(f"{name}_")}
    parts = {"sum": factor * own["sum"]}
    if "mass" in own:
        parts["mass"], parts["cross"] = own["mass"], own["cross"] - weigh(own["mass"], drop)
        parts["gap"] = weigh(factor, own["gap"] + drop * own["sum"])
    if "moment" in own:
        parts["moment"] = factor * (own["moment"] + drop * own["sum"])
    return {f"{name}_shift": shift} | {f"{name}_{key}": part.sum(0) for key, part in parts.items()}


def entry_logits(tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
    """z of the entries [n, K], -inf where another tile has them, and their log tau, where it is
    -inf, too."""
    here = tile.entries < tile.z.shape[1]
    z = tile.z.gather(1, tile.entries.clamp(max=tile.z.shape[1] - 1))
    return torch.where(here, z, -torch.inf), torch.where(
        here, tile.entry_log_probs.to(z.dtype), -torch.inf
    )


def fill_entries(x, columns, value) -> torch.Tensor:
    """x [n, w] with `value` at the columns [n, K]; w stands for none."""
    return torch.nn.functional.pad(x, (0, 1)).scatter(1, columns, value)[:, :-1]


def tail_sums(tile: Tile) -> dict[str, torch.Tensor]:
    """The packet rows of the columns that are no entries."""
    rest = fill_entries(tile.z, tile.entries, -torch.inf)
    peak = rest.amax(-1)
    shifted = tile.scale * (rest - finite_shift(peak))
    weight = shifted.exp()
    return {
        "tail_max": peak,
        "tail_sum": row_sum(weight),
        "tail_moment": row_sum(weigh(weight, shifted)),
    }


def entry_probabilities(name: str, tile: Tile, merged: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [n, K] of student and teacher at the entries; vocab_jsd: normalised over the
    vocabulary."""
    z, log_tau = entry_logits(tile)
    p = (tile.scale * (z - merged["topk_shift"])).exp() / merged["topk_sum"]
    p = torch.where(z == -torch.inf, 0.0, p)
    return (p * merged["inside"] if name == "vocab_jsd" else p), log_tau.exp()


def distinct_entries(ids, log_probs, scales, scale, renormalize, vocab_size):
    """A top-K teacher's ids and log-probs [N, K] -> its distinct entries: ids [N, K] int32
    ascending, those that are none at the end as the largest int32, and log tau [N, K] of its
    temperature 1 / scales [N], or 1 / scale.

    Duplicates of an id add up. A row with an id beyond the vocabulary, or NaN, has NaN for its
    first entry.
    """
    none = torch.iinfo(torch.int32).max
    live = (ids >= 0) & (log_probs != -torch.inf)
    log_probs = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
    bad = (live & ((ids >= vocab_size) | log_probs.isnan() | (log_probs == torch.inf))).any(-1)
    ids, order = torch.where(live, ids.long(), none).sort(dim=-1, stable=True)
    log_probs = torch.where(live, log_probs, -torch.inf).gather(1, order)
    new = torch.ones_like(ids, dtype=torch.bool)
    new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    place = new.cumsum(1) - 1
    # relative to the largest of the same id, so that one that occurs once stays what it is
    top = torch.full_like(log_probs, -torch.inf).scatter_reduce(1, place, log_probs, "amax")
    _, weight = decay(log_probs, top.gather(1, place))
    log_tau = top + torch.zeros_like(log_probs).scatter_add(1, place, weight).clamp(min=1).log()
    ids = torch.full_like(ids, none).scatter(1, place, ids)
    log_tau = log_tau * (scale if scales is None else scales[:, None].to(log_tau.dtype))
    if renormalize:
        log_tau = log_tau - finite_shift(log_tau.logsumexp(-1))
    first = torch.zeros_like(new)
    first[:, :1] = bad[:, None]
    ids = torch.where(bad[:, None], none, ids).masked_fill(first, 0)
    return ids.int(), torch.where(bad[:, None], -torch.inf, log_tau).masked_fill(first, torch.nan)
