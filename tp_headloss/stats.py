"""The specification: what is computed from a row of logits, how partial results merge, and what is differentiated.

Words: x raw logit, z transformed logit (`Transform`), y label, M = max z, S = sum exp(z - M), p = softmax(z),
u = sum over j != y, "others". The target column is kept out of every partial sum and joined at the end, so that
confident tokens keep full relative accuracy: log p_y = -log1p(u) where y is the maximum, and p_y - 1 = -u / S.

| statistic    | partial of a chunk, target apart           | merge (f = exp(max - M))      | d/dz_j                |
|--------------|--------------------------------------------|-------------------------------|-----------------------|
| lse          | max = max z, sum = sum exp(z - max)        | sum of f sum                  | p_j                   |
| log_prob     | target = z_y, owner = 1 if owned           | sum (one owner, or NaN)       | [j = y] - p_j         |
| target_logit | target                                     | sum                           | [j = y]               |
| entropy      | moment = sum exp(z - max)(z - max)         | f (moment + (max - M) sum)    | -p_j (log p_j + H)    |
| total        | total = sum w_j z_j, z_j > -inf, with z_y  | sum                           | w_j where z_j > -inf  |
| mass         | mass = sum w_j, z_j > -inf                 | sum                           | none                  |
| argmax       | index of max, lowest on ties               | index of the largest max      | none                  |

With a teacher of logits t (`api.Teacher`), q = softmax(u), u = t / its temperature, and the student at the teacher's
side, p' = softmax(z'), z' = a z (a: ratio of the temperatures; S' and M' = a M are its sum and shift):

| statistic       | partial of a chunk                                  | merge         | d/dz_j                     |
|-----------------|-----------------------------------------------------|---------------|----------------------------|
| (all three)     | teacher_max = max u, teacher_sum = sum exp(u - max) | like max, sum | none: a teacher is fixed   |
|                 | student_sum = sum exp(z' - max z'), target apart    | like sum      | p'_j, used below           |
| forward_kl      | cross = sum exp(u - max u)(u - z')                  | f cross       | a (p'_j - q_j)             |
| reverse_kl      | gap = sum exp(z' - max z')(z' - u), target apart;   | f gap         | a p'_j (z'_j - u_j - mean) |
|                 | teacher_target = u_y                                | sum           | (mean = sum p' (z' - u))   |
| teacher_entropy | teacher_moment = sum exp(u - max)(u - max)          | like moment   | none                       |

forward_kl = KL(q || p'), reverse_kl = KL(p' || q), 0 log 0 = 0: what has no probability adds nothing.

These two need the sums of all ranks before their own, hence a second exchange, of two numbers per chunk (the value and
the mean that its gradient subtracts), merged by adding. m = beta q + (1 - beta) p', d = p' - q,
v_j = (1 - beta) p'_j log(p'_j / m_j), w_j = beta q_j log(q_j / m_j):

| statistic       | value            | mean                   | d/dz_j                        |
|-----------------|------------------|------------------------|-------------------------------|
| jsd             | sum v_j + w_j    | sum v_j                | a (v_j - p'_j mean)           |
| total_variation | sum abs(d_j) / 2 | sum p'_j sign(d_j) / 2 | a p'_j (sign(d_j) / 2 - mean) |

With a teacher of K entries (`api.TopKTeacher`), tau_k their probabilities, which sum to W: s = softmax of z' over the
entries, r = softmax of z' over all else, P and R the student's probability of either; y_k = a (z_k - topk_max):

| statistic       | of a chunk, over its entries                | value                  | d/dz'_k; elsewhere       |
|-----------------|---------------------------------------------|------------------------|--------------------------|
| (all of these)  | topk_max = max z_k, topk_sum = sum exp(y_k) |                        |                          |
| teacher_mass    | topk_mass = sum tau_k                       | W                      | none                     |
| topk_forward_kl | topk_cross = sum tau_k (log tau_k - y_k)    | sum tau log(tau / s)   | W s_k - tau_k; 0         |
| topk_reverse_kl | topk_gap = sum exp(y_k) (y_k - log tau_k)   | sum s log(s / tau) = G | s_k (log(s_k/tau_k) - G) |
| topk_log_mass   | student_sum, or those of the tail           | log P                  | R s_k; -R r_j            |
| tail_log_mass   | tail_max = max z, tail_sum = sum exp        | log R                  | -P s_k; P r_j            |
| tail_entropy    | tail_moment, all three as max, sum, moment  | -sum r log r = H       | 0; -r_j (log r_j + H)    |
| topk_jsd        | second exchange, p' = s, q = tau            | sum v_k + w_k          | v_k - s_k sum v; 0       |
| vocab_jsd       | second exchange, p' = P s, q = tau          | sum v_k + w_k          | v_k; at all: -p'_j sum v |

A *packet* is the partial of one chunk: `packet_rows` fp32 numbers per token. The merge is done in float64 and rounded
once (`topk_log_mass` without a tail twice, by the kernels); `merge` and `finish` here are its definition (and the eager
backend's code), the merge kernels their twins.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

PACKET_ROWS = {
    "entropy": ("moment",),
    "total": ("total", "mass"),
    "forward_kl": ("cross",),
    "reverse_kl": ("gap",),
    "teacher_entropy": ("teacher_moment",),
    "argmax": ("index",),
}
OF_PAIR = ("forward_kl", "reverse_kl", "teacher_entropy")  # of a teacher, in the first exchange
PAIR_LATER, TOPK_LATER = ("jsd", "total_variation"), ("topk_jsd", "vocab_jsd")  # in the second
LATER = (*PAIR_LATER, *TOPK_LATER)
OF_TEACHER = (*OF_PAIR, *PAIR_LATER)
TAIL = ("tail_log_mass", "tail_entropy")
TOPK_FIRST = ("topk_forward_kl", "topk_reverse_kl", "topk_log_mass", *TAIL)
OF_TOPK = (*TOPK_FIRST, *TOPK_LATER)
OPTIONAL = (*PACKET_ROWS, *PAIR_LATER, *OF_TOPK)
TOPK_ROWS = ("topk_max", "topk_sum", "topk_mass", "topk_cross", "topk_gap")
IGNORED = 2.0  # the owner flag of every packet of an ignored token, so that ranks whose labels differ find out


class HeadSpec(NamedTuple):
    """Everything static about one pass: plain numbers and names, in the order of the registered operators' schema."""

    start: int  # first vocabulary id of the shard
    valid_width: int  # columns of the shard that are true ids; the rest is padding
    vocab_size: int
    chunk_size: int
    chunks: int
    world_size: int
    want: tuple[str, ...]  # of OPTIONAL
    scale: float
    softcap: float  # 0: none
    temperature: float
    ignore_index: int
    backend: str
    transport: str
    group_name: str
    teacher_scale: float = 1.0  # u = teacher_scale t
    student_scale: float = 1.0  # z' = student_scale z
    beta: float = 0.5  # of the Jensen-Shannon divergences

    @property
    def packets(self) -> int:
        return self.chunks * self.world_size


class Inputs(NamedTuple):
    """What the backends read, by rows [N, ..] of one rank; what is None is off."""

    logits: torch.Tensor  # [N, width]
    labels: torch.Tensor | None = None  # [N]
    bias: torch.Tensor | None = None  # [width]
    temperatures: torch.Tensor | None = None  # [N], instead of the spec's number
    total_weight: torch.Tensor | None = None  # [width]
    teacher: torch.Tensor | None = None  # [N, width]
    scales: torch.Tensor | None = None  # [2, N], instead of the spec's teacher_scale and student_scale
    entries: torch.Tensor | None = None  # [N, K] int32 ids of a top-K teacher: distinct, ascending, the largest: none
    entry_log_probs: torch.Tensor | None = None  # [N, K] fp32, -inf where there is none


class VocabStatistics(NamedTuple):
    """Per-token statistics of the whole vocabulary: fp32, the logits' leading shape, equal bits on every rank.

    Fields that were not asked for are None. An ignored token has 0 everywhere (argmax -1) and zero gradient; a token
    with a bad label, or whose logits hold +inf or NaN or nothing above -inf, has NaN everywhere (argmax -1).
    """

    lse: torch.Tensor  # log sum exp z
    log_prob: torch.Tensor | None  # z_y - lse, never above 0
    target_logit: torch.Tensor | None  # z_y
    entropy: torch.Tensor | None  # -sum p log p, nats
    total: torch.Tensor | None  # sum of z (of w z if weighted) over columns above -inf
    argmax: torch.Tensor | None  # int64 vocabulary id, lowest on ties; not differentiable
    mass: torch.Tensor | None  # with total: number (weighted: sum of w) of columns above -inf; not differentiable
    labels: torch.Tensor | None
    valid: torch.Tensor | None  # bool: label is not ignore_index
    hits: torch.Tensor | None  # what `correct` returns
    forward_kl: torch.Tensor | None  # KL(teacher || student), nats, at the teacher's side's temperatures
    reverse_kl: torch.Tensor | None  # KL(student || teacher)
    teacher_entropy: torch.Tensor | None  # -sum q log q; not differentiable. forward_kl + it: soft cross-entropy
    jsd: torch.Tensor | None  # beta KL(teacher || m) + (1 - beta) KL(student || m), m their mixture
    total_variation: torch.Tensor | None  # sum of abs(student - teacher) / 2
    teacher_mass: torch.Tensor | None  # probability of a top-K teacher's entries; not differentiable
    topk_forward_kl: torch.Tensor | None  # over its entries, where the student is normalised: see the table above
    topk_reverse_kl: torch.Tensor | None
    topk_log_mass: torch.Tensor | None  # log of the student's probability of the entries
    tail_log_mass: torch.Tensor | None  # and of everything else, summed directly
    tail_entropy: torch.Tensor | None  # of the student over everything else
    topk_jsd: torch.Tensor | None  # over the entries, where the student is normalised
    vocab_jsd: torch.Tensor | None  # the entries' part, the student normalised over the vocabulary
    vocab_size: int

    @property
    def correct(self) -> torch.Tensor:
        """bool: the label is the argmax (False where ignored)."""
        if self.hits is None:
            missing = [name for name in ("argmax", "labels") if getattr(self, name) is None]
            raise ValueError(f'`correct` needs labels and want=("argmax",), got no {" and no ".join(missing)}')
        return self.hits


class Apart(NamedTuple):
    """Merged float64 sums over some columns at a top-K teacher's side, [N] each, relative to their own `shift`."""

    shift: torch.Tensor  # of z
    sum: torch.Tensor
    mass: torch.Tensor | None = None
    cross: torch.Tensor | None = None
    gap: torch.Tensor | None = None
    moment: torch.Tensor | None = None


class State(NamedTuple):
    """Merged float64 sums over the columns other than the target, [N] each, relative to `shift`."""

    shift: torch.Tensor
    sum: torch.Tensor
    target: torch.Tensor | None = None
    owners: torch.Tensor | None = None
    moment: torch.Tensor | None = None
    total: torch.Tensor | None = None  # this one and the next with the target
    mass: torch.Tensor | None = None
    index: torch.Tensor | None = None
    student_sum: torch.Tensor | None = None
    teacher_shift: torch.Tensor | None = None
    teacher_sum: torch.Tensor | None = None
    teacher_moment: torch.Tensor | None = None
    teacher_target: torch.Tensor | None = None
    cross: torch.Tensor | None = None
    gap: torch.Tensor | None = None
    topk: Apart | None = None
    tail: Apart | None = None


def wants(want, names) -> bool:
    return any(name in want for name in names)


def over_vocabulary(want) -> bool:
    """Whether a top-K teacher's student is normalised over the vocabulary, by the sum over all of it."""
    return wants(want, ("topk_log_mass", "vocab_jsd")) and not wants(want, TAIL)


def packet_rows(has_labels: bool, want) -> list[str]:
    rows = ["max", "sum"] + (["target", "owner"] if has_labels else [])
    if wants(want, OF_TEACHER):
        rows += ["student_sum", "teacher_max", "teacher_sum"] + (["teacher_target"] if has_labels else [])
    rows += ["student_sum"] if over_vocabulary(want) else []
    rows += ["tail_max", "tail_sum"] if wants(want, TAIL) else []
    rows += ["tail_moment"] if "tail_entropy" in want else []
    rows += [row for name in PACKET_ROWS if name in want for row in PACKET_ROWS[name]]
    return rows + (list(TOPK_ROWS) if wants(want, OF_TOPK) else [])


def later_rows(want) -> list[str]:
    """The packets of the second exchange: a value and a mean for each."""
    return [row for name in LATER if name in want for row in (name, f"{name}_mean")]


def merged_rows(has_labels: bool, want) -> list[str]:
    """What the backward needs per token besides the logits: M, S (0 where ignored), u / S, z_y - M, sum p (z - M); with
    a teacher S', the shift and sum of q, and the mean of z' - u (0 if not wanted).

    With a top-K teacher S' (if over the vocabulary); shift, sum and W of the entries, the mean of y - log tau; shift,
    sum and mean of y of the tail (of the whole vocabulary if no tail is wanted), P and R. The means of the second
    exchange come last.
    """
    rows = ["shift", "sum"] + (["others", "target"] if has_labels else []) + (["mean"] if "entropy" in want else [])
    if wants(want, OF_TEACHER):
        rows += ["student_sum", "teacher_shift", "teacher_sum", "gap"]
    rows += ["student_sum"] if over_vocabulary(want) else []
    if wants(want, OF_TOPK):
        rows += ["topk_shift", "topk_sum", "topk_mass", "topk_gap"]
        rows += ["rest_shift", "rest_sum", "rest_mean", "inside", "outside"]
    return rows + later_rows(want)[1::2]


def value_rows(has_labels: bool, want) -> list[str]:
    """The fp32 statistics, in order; "owners" (how many ranks claim the label) serves checks."""
    names = ["lse"] + (["log_prob", "target_logit", "owners"] if has_labels else [])
    names += (["entropy"] if "entropy" in want else []) + (["total", "mass"] if "total" in want else [])
    names += [name for name in OF_PAIR if name in want]
    if wants(want, OF_TOPK):
        names += ["teacher_mass"] + [name for name in TOPK_FIRST if name in want]
    return names + later_rows(want)[::2]


def flag_names(has_labels: bool, want) -> list[str]:
    """The statistics of other types, in order."""
    names = (["valid"] if has_labels else []) + (["argmax"] if "argmax" in want else [])
    return names + (["hits"] if has_labels and "argmax" in want else [])


def empty_outputs(like: torch.Tensor, n_rows: int, has_labels: bool, want, dtype=torch.float32) -> list[torch.Tensor]:
    """Uninitialised [merged rows [R, N], values [K, N], *flags [N]]: what `finish` and the merge kernel return."""
    merged = like.new_empty((len(merged_rows(has_labels, want)), n_rows), dtype=dtype)
    values = like.new_empty((len(value_rows(has_labels, want)), n_rows), dtype=dtype)
    kinds = {"argmax": torch.int64, "valid": torch.bool, "hits": torch.bool}
    return [merged, values, *(like.new_empty(n_rows, dtype=kinds[name]) for name in flag_names(has_labels, want))]


def decay(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a - b and exp(a - b) for a <= b, where a = -inf is the empty sum: 0 and 0, also if b = -inf."""
    empty = a == -torch.inf
    difference = torch.where(empty, 0.0, a - b)
    return difference, torch.where(empty, 0.0, difference.exp())


def weigh(factor, value):
    """factor * value, where a factor of 0 leaves nothing of any value."""
    return torch.where(factor == 0, 0.0, factor * value)


def merge(packets: torch.Tensor, has_labels: bool, spec: HeadSpec, scales: torch.Tensor | None = None) -> State:
    """Packets [chunks of all ranks in vocabulary order, rows, N] -> the sums over all of them.

    scales: [2, N] of the teacher and of the student at its side, or None for the spec's."""
    row = dict(zip(packet_rows(has_labels, spec.want), packets.double().unbind(1)))
    peak, state = row["max"], {}
    shift = peak.amax(0)
    drop, factor = decay(peak, shift)
    if has_labels:  # selected by the flag, never by max, which may drop NaN
        state["target"] = torch.where(row["owner"] == 1, row["target"], 0.0).sum(0)
        state["owners"] = row["owner"].sum(0)
    if "moment" in row:
        state["moment"] = (factor * (row["moment"] + drop * row["sum"])).sum(0)
    if "total" in row:
        state["total"], state["mass"] = row["total"].sum(0), row["mass"].sum(0)
    scale = spec.student_scale if scales is None else scales[1].double()
    if "student_sum" in row:
        scaled = torch.where(peak == -torch.inf, 0.0, (scale * drop).exp())
        state["student_sum"] = (scaled * row["student_sum"]).sum(0)
    if "teacher_max" in row:
        state["teacher_shift"] = row["teacher_max"].amax(0)
        fall, factor_t = decay(row["teacher_max"], state["teacher_shift"])
        state["teacher_sum"] = (factor_t * row["teacher_sum"]).sum(0)
        if "cross" in row:
            state["cross"] = weigh(factor_t, row["cross"]).sum(0)
        if "gap" in row:
            state["gap"] = weigh(scaled, row["gap"]).sum(0)
        if "teacher_moment" in row:
            state["teacher_moment"] = (factor_t * (row["teacher_moment"] + fall * row["teacher_sum"])).sum(0)
        if has_labels:
            state["teacher_target"] = torch.where(row["owner"] == 1, row["teacher_target"], 0.0).sum(0)
    for name in ("topk", "tail"):
        if f"{name}_max" in row:
            state[name] = _merge_apart({key: row.get(f"{name}_{key}") for key in ("max", *Apart._fields)}, scale)
    if "index" in row:
        state["index"] = torch.where(peak == shift, row["index"], torch.inf).amin(0)
    return State(shift, (factor * row["sum"]).sum(0), **state)


def _merge_apart(row, scale) -> Apart:
    shift = row["max"].amax(0)
    drop = scale * decay(row["max"], shift)[0]
    factor = torch.where(row["max"] == -torch.inf, 0.0, drop.exp())
    parts = {"sum": factor * row["sum"]}
    if row["mass"] is not None:
        parts["mass"], parts["cross"] = row["mass"], row["cross"] - weigh(row["mass"], drop)
        parts["gap"] = weigh(factor, row["gap"] + drop * row["sum"])
    if row["moment"] is not None:
        parts["moment"] = factor * (row["moment"] + drop * row["sum"])
    return Apart(shift, **{name: part.sum(0) for name, part in parts.items()})


def _finish_topk(topk: Apart, tail: Apart | None, top, whole, scale):
    """Statistics and merged rows by name; whole: sum exp(a (z - top)) over the vocabulary, or None."""
    log_d, teacher_mass, nothing = topk.sum.log(), topk.mass, topk.mass == 0
    nowhere = (topk.sum == 0) & ~nothing  # entries to which the student gives no probability

    def value(x, least):
        x = torch.where(nowhere, torch.inf, torch.maximum(x, least))  # what is below the least is rounding
        return torch.where(nothing, 0.0, x)

    gap = torch.where(topk.sum == 0, 0.0, topk.gap / topk.sum)
    out = {"teacher_mass": teacher_mass}
    out["topk_forward_kl"] = value(topk.cross + teacher_mass * log_d, torch.xlogy(teacher_mass, teacher_mass))
    out["topk_reverse_kl"] = value(gap - log_d, -teacher_mass.log())
    rows = {"topk_shift": topk.shift, "topk_sum": topk.sum, "topk_mass": topk.mass, "topk_gap": gap}
    zero = torch.zeros_like(log_d)
    rest = {"rest_shift": zero, "rest_sum": zero, "rest_mean": zero, "inside": zero, "outside": zero}
    if tail is not None:
        mean = zero if tail.moment is None else torch.where(tail.sum == 0, 0.0, tail.moment / tail.sum)
        apart = scale * (topk.shift - tail.shift) + log_d - tail.sum.log()  # of the logs of both probabilities
        less = apart.abs().neg().exp().log1p()
        out["topk_log_mass"], out["tail_log_mass"] = -(less + (-apart).clamp(min=0)), -(less + apart.clamp(min=0))
        out["tail_entropy"] = torch.where(tail.sum == 0, 0.0, tail.sum.log() - mean)
        rest |= {"rest_shift": tail.shift, "rest_sum": tail.sum, "rest_mean": mean}
        rest |= {"inside": out["topk_log_mass"].exp(), "outside": out["tail_log_mass"].exp()}
    elif whole is not None:
        out["topk_log_mass"] = (scale * (topk.shift - top) + log_d - whole.log()).clamp(max=0)
        rest |= {"rest_shift": top, "rest_sum": whole}
        rest |= {"inside": out["topk_log_mass"].exp(), "outside": -torch.expm1(out["topk_log_mass"])}
    unknown = teacher_mass.isnan()
    out = {name: torch.where(unknown, torch.nan, x) for name, x in out.items()}
    return out, rows | rest


def finish(state: State, labels, spec: HeadSpec, dtype=torch.float32, scales=None) -> list[torch.Tensor]:
    """Join the target column: [merged rows [R, N], values [K, N], *flags [N]], named by the functions above."""
    has_labels = labels is not None
    top, others, rows, out, flags = state.shift, state.sum, {}, {}, {}
    total_sum, ignored = others, torch.zeros_like(others, dtype=torch.bool)
    log_sum = total_sum.log()
    if has_labels:
        target, ignored = state.target, state.owners == IGNORED * spec.packets
        top = torch.fmax(state.shift, target)  # a NaN still reaches the sum
        drop, factor = decay(state.shift, top)
        offset, p_target = decay(target, top)
        offset = torch.where(target == -torch.inf, target, offset)
        others = factor * others
        total_sum = others + p_target
        log_sum = torch.where(target == top, others.log1p(), total_sum.log())
        out = {"log_prob": 0.0 - torch.where(target == top, log_sum, log_sum - offset), "target_logit": target}
        out["owners"] = state.owners
        rows = {"others": others / total_sum, "target": offset}
        flags["valid"] = ~ignored
    out["lse"] = top + log_sum
    rows |= {"shift": top, "sum": total_sum}
    if state.moment is not None:
        moment = state.moment
        if has_labels:
            moment = factor * (moment + drop * state.sum) + torch.where(p_target == 0, 0.0, p_target * offset)
        rows["mean"] = moment / total_sum
        out["entropy"] = log_sum - rows["mean"]
    if state.total is not None:
        out["total"], out["mass"] = state.total, state.mass
    bad = ~(total_sum > 0)
    if has_labels:
        bad = (bad | (state.owners != 1)) & ~ignored
    scale = spec.student_scale if scales is None else scales[1].double()
    whole, gap = state.student_sum, state.gap
    if whole is not None:
        if has_labels:
            scaled = torch.where(state.shift == -torch.inf, 0.0, (scale * drop).exp())
            at_target = torch.where(target == -torch.inf, 0.0, (scale * offset).exp())
            whole = scaled * whole + at_target
            if gap is not None:
                gap = weigh(scaled, gap) + weigh(at_target, scale * target - state.teacher_target)
        rows["student_sum"] = whole
    if state.topk is not None:
        of_topk, rows_of_topk = _finish_topk(state.topk, state.tail, top, whole, scale)
        out, rows = out | of_topk, rows | rows_of_topk
    if state.teacher_sum is not None:
        apart = state.teacher_shift + state.teacher_sum.log() - (scale * top + whole.log())  # log-normalisers
        unknown = ~(state.teacher_sum > 0) & ~ignored
        if state.cross is not None:
            out["forward_kl"] = (state.cross / state.teacher_sum - apart).clamp(min=0)
        if gap is not None:
            out["reverse_kl"] = (gap / whole + apart).clamp(min=0)
        if state.teacher_moment is not None:
            out["teacher_entropy"] = state.teacher_sum.log() - state.teacher_moment / state.teacher_sum
        rows["gap"] = torch.zeros_like(whole) if gap is None else gap / whole
        rows |= {"teacher_shift": state.teacher_shift, "teacher_sum": state.teacher_sum}
        for group, names in ((out, OF_PAIR), (rows, ("student_sum", "teacher_shift", "teacher_sum", "gap"))):
            group.update((name, torch.where(unknown, torch.nan, group[name])) for name in names if name in group)

    def settle(value):
        return torch.where(ignored, 0.0, torch.where(bad, torch.nan, value)).to(dtype)

    if state.index is not None:
        index = state.index
        if has_labels:
            wins = (target > state.shift) | ((target == state.shift) & (labels < index))
            index = torch.where(wins, labels.double(), index)
        flags["argmax"] = torch.where(bad | ignored, -1.0, index).long()
        if has_labels:
            flags["hits"] = (flags["argmax"] == labels) & ~ignored & ~bad
    later = dict.fromkeys(later_rows(spec.want), torch.zeros_like(others))  # written by `finish_later`
    rows, out = rows | later, out | later
    merged = torch.stack([settle(rows[name]) for name in merged_rows(has_labels, spec.want)])
    names = value_rows(has_labels, spec.want)
    values = torch.stack([settle(out[name]) if name != "owners" else out[name].to(dtype) for name in names])
    return [merged, values, *(flags[name] for name in flag_names(has_labels, spec.want))]


def finish_later(packets: torch.Tensor, merged: torch.Tensor, values: torch.Tensor) -> None:
    """Packets [chunks of all ranks, rows of `later_rows`, N] of the second exchange -> the last rows of both."""
    sums = torch.where(merged[1].isnan(), torch.nan, packets.sum(0, dtype=torch.float64))
    values[-len(sums) // 2 :] = sums[::2].clamp(min=0)
    merged[-len(sums) // 2 :] = sums[1::2]


def to_lanes(packets: torch.Tensor, has_labels: bool, spec: HeadSpec) -> torch.Tensor:
    """This rank's packets as float64 lanes [rows, N] whose plain SUM over ranks is the merge (the `sum` transport).

    exp(max) must stay within float64: a token with a shard's maximum beyond +-600 becomes NaN on every rank. The
    argmax is no sum, so it has no lane.
    """
    state = merge(packets, has_labels, spec._replace(world_size=1))
    empty = state.shift == -torch.inf
    shift = torch.where(empty, 0.0, state.shift)
    weight = torch.where(shift.abs() > 600, torch.nan, shift.exp())
    lanes = [weight * state.sum] + ([state.target, state.owners] if has_labels else [])
    if state.moment is not None:
        lanes.append(weight * (state.moment + shift * state.sum))
    if state.total is not None:
        lanes += [state.total, state.mass]
    return torch.stack(lanes)


def from_lanes(lanes: torch.Tensor, has_labels: bool, spec: HeadSpec) -> State:
    """The summed lanes -> the state, relative to the log of the first lane."""
    names = [name for name in packet_rows(has_labels, spec.want) if name != "max"]
    row = dict(zip(names, lanes.unbind(0)))
    shift = row["sum"].log().float().double()  # any reference will do; one that fp32 holds keeps the backward exact
    empty = row["sum"] == 0
    factor = torch.where(empty, 0.0, torch.exp(-shift))
    keys = {"target": "target", "owners": "owner", "total": "total", "mass": "mass"}
    state = {name: row[key] for name, key in keys.items() if key in row}
    if "moment" in row:
        state["moment"] = torch.where(empty, 0.0, factor * (row["moment"] - shift * row["sum"]))
    return State(shift, factor * row["sum"], **state)


def _finite(x):
    return torch.where(x == -torch.inf, 0.0, x)


def entries(ids, log_probs, mask, scale, renormalize, vocab_size):
    """A top-K teacher's ids and log-probs [N, K] -> its distinct entries: ids [N, K] int32 ascending, those that are
    none at the end as the largest int32, and log tau [N, K] of its temperature 1 / scale (a number or [N]).

    Duplicates of an id add up. A row with an id beyond the vocabulary, or NaN, has NaN for its first entry.
    """
    none = torch.iinfo(torch.int32).max
    live = (ids >= 0) & (log_probs != -torch.inf)
    live = live if mask is None else live & mask
    log_probs = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
    bad = (live & ((ids >= vocab_size) | log_probs.isnan() | (log_probs == torch.inf))).any(-1)
    ids, order = torch.where(live, ids.long(), none).sort(dim=-1, stable=True)
    log_probs = torch.where(live, log_probs, -torch.inf).gather(1, order)
    new = torch.ones_like(ids, dtype=torch.bool)
    new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    place = new.cumsum(1) - 1
    # relative to the largest of the same id, so that one that occurs once stays what it is
    top = torch.full_like(log_probs, -torch.inf).scatter_reduce(1, place, log_probs, "amax")
    weight = (log_probs - _finite(top.gather(1, place))).exp()
    log_tau = top + torch.zeros_like(log_probs).scatter_add(1, place, weight).clamp(min=1).log()
    ids = torch.full_like(ids, none).scatter(1, place, ids)
    log_tau = log_tau * (scale if not isinstance(scale, torch.Tensor) else scale[:, None].to(log_tau.dtype))
    if renormalize:
        log_tau = log_tau - _finite(log_tau.logsumexp(-1))[:, None]
    first = torch.zeros_like(new)
    first[:, :1] = bad[:, None]
    ids = torch.where(bad[:, None], none, ids).masked_fill(first, 0)
    return ids.int(), torch.where(bad[:, None], -torch.inf, log_tau).masked_fill(first, torch.nan)
