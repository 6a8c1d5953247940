"""The contract in plain torch, for any device: read it as the definition of what the kernels compute.

Works through blocks of rows and chunks of columns, so that no vocabulary-sized temporary ever exists. float64 logits
are accepted here (all of it runs in float64 then), which is what gradient checks need.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..stats import (
    IGNORED,
    OF_TEACHER,
    OF_TOPK,
    TAIL,
    TOPK_FIRST,
    HeadSpec,
    Inputs,
    entries,  # noqa: F401 (the definition is the implementation)
    finish,
    later_rows,
    merge,
    merged_rows,
    packet_rows,
    wants,
)

BLOCK_ELEMENTS = 1 << 19  # per temporary: a few MiB, whatever N and V are


def _row_blocks(n_rows: int, width: int):
    step = max(1, BLOCK_ELEMENTS // max(1, width))
    return [slice(i, min(i + step, n_rows)) for i in range(0, n_rows, step)]


def transform(x, bias, temperature, spec: HeadSpec):
    """Raw logits [n, w] -> z and dz/dx (a tensor, or a number where it is one)."""
    x = x if x.dtype == torch.float64 else x.float()
    if bias is not None:
        x = x + bias.to(x.dtype)
    inverse = 1.0 / spec.temperature if temperature is None else (1.0 / temperature.to(x.dtype))[:, None]
    if not spec.softcap:
        return x * (spec.scale * inverse), spec.scale * inverse
    bounded = torch.tanh(x * (spec.scale / spec.softcap))
    # 1 - tanh^2 without its cancellation
    slope = torch.cosh(x * (spec.scale / spec.softcap)) ** -2
    return bounded * (spec.softcap * inverse), slope * (spec.scale * inverse)


def shares_memory(_logits) -> bool:
    """Whether packets may meet in symmetric memory: the kernels know how, plain torch does not."""
    return False


class Tile(NamedTuple):
    """One block of rows of some columns: z and dz/dx [n, w], and what belongs to them."""

    z: torch.Tensor
    slope: torch.Tensor | float
    target: torch.Tensor | None  # [n] column of the label, outside of [0, w) if it is elsewhere
    weight: torch.Tensor | None  # [w]
    u: torch.Tensor | None  # [n, w] the teacher's logits over its temperature
    scale: torch.Tensor | float  # of z at the teacher's side, [n, 1] or a number
    columns: torch.Tensor | None  # [n, K] columns of a top-K teacher's entries; w where elsewhere
    log_tau: torch.Tensor | None  # [n, K]


def _tile(inputs: Inputs, block, columns, spec: HeadSpec) -> Tile:
    def part(x, *index):
        return None if x is None else x[index]

    z, slope = transform(
        inputs.logits[block, columns], part(inputs.bias, columns), part(inputs.temperatures, block), spec
    )
    teacher_scale, scale = spec.teacher_scale, spec.student_scale
    if inputs.scales is not None:
        teacher_scale, scale = inputs.scales[:, block, None].to(z.dtype).unbind(0)
    target, ids = part(inputs.labels, block), part(inputs.entries, block)
    if target is not None:
        target = target.long() - spec.start - columns.start
    if ids is not None:
        ids = ids.long() - spec.start - columns.start
        ids = torch.where((ids >= 0) & (ids < z.shape[1]), ids, z.shape[1])
    u = part(inputs.teacher, block, columns)
    u = None if u is None else u.to(z.dtype) * teacher_scale
    weight = part(inputs.total_weight, columns)
    return Tile(z, slope, target, weight, u, scale, ids, part(inputs.entry_log_probs, block))


def _chunks(inputs: Inputs, spec: HeadSpec):
    """The chunks of the shard that have columns: their number, and the blocks of rows of each."""
    for c in range(spec.chunks):
        columns = slice(c * spec.chunk_size, min((c + 1) * spec.chunk_size, spec.valid_width))
        if columns.stop > columns.start:
            for block in _row_blocks(inputs.logits.shape[0], columns.stop - columns.start):
                yield c, block, columns


def local_statistics(packets, inputs: Inputs, spec: HeadSpec):
    """Logits [N, width], labels [N] -> packets [chunks, rows, N] of this rank, fp32 (float64 for float64)."""
    rows = dict(zip(packet_rows(inputs.labels is not None, spec.want), packets.unbind(1)))
    packets.zero_()
    for c, block, columns in _chunks(inputs, spec):
        out = {name: value[c, block] for name, value in rows.items()}
        _chunk_statistics(out, _tile(inputs, block, columns, spec), spec.start + columns.start)
    empty = torch.zeros_like(packets[0, 0], dtype=torch.bool)
    if inputs.labels is not None:
        empty = inputs.labels.long() == spec.ignore_index
        packets.masked_fill_(empty, 0.0)
        rows["owner"].masked_fill_(empty, IGNORED)
    for name in rows:
        if name.endswith("max"):
            rows[name].masked_fill_(empty, -torch.inf)
            rows[name][max(0, -(-spec.valid_width // spec.chunk_size)) :] = -torch.inf  # chunks without columns


def _chunk_statistics(out, tile: Tile, first_id):
    """One block of one chunk -> `out` rows [n]."""
    whole = z = tile.z
    target, total_weight = tile.target, tile.weight
    if "total" in out:
        weight = torch.ones_like(z) if total_weight is None else total_weight.to(z.dtype)
        out["total"].copy_(torch.where(z == -torch.inf, 0.0, z * weight).sum(-1, dtype=torch.float64))
        out["mass"].copy_(torch.where(z == -torch.inf, 0.0, weight).sum(-1, dtype=torch.float64))
    if target is not None:
        owned = (target >= 0) & (target < z.shape[1])
        column = target.clamp(0, z.shape[1] - 1)[:, None]
        picked = z.gather(1, column)
        out["target"].copy_(torch.where(owned, picked[:, 0], 0.0))
        out["owner"].copy_(owned)
        z = z.scatter(1, column, torch.where(owned[:, None], -torch.inf, picked))
    if "index" in out:
        peak, index = z.max(-1)
        out["index"].copy_(index + first_id)
    else:
        peak = z.amax(-1)
    shifted = z - _safe(peak)
    weight = shifted.exp()
    out["max"].copy_(peak)
    out["sum"].copy_(weight.sum(-1, dtype=torch.float64))
    if "moment" in out:
        out["moment"].copy_(torch.where(shifted == -torch.inf, 0.0, weight * shifted).sum(-1, dtype=torch.float64))
    if "student_sum" in out:
        out["student_sum"].copy_((tile.scale * shifted).exp().sum(-1, dtype=torch.float64))
    if tile.u is not None:
        _chunk_of_teacher(out, whole, shifted, target, tile.u, tile.scale)
    if tile.columns is not None:
        _chunk_of_topk(out, tile)


def _total(factor, value):
    """Their product's sum, where what has no probability adds nothing, whatever its logits."""
    return torch.where(factor == 0, 0.0, factor * value).sum(-1, dtype=torch.float64)


def _safe(peak):
    return torch.where(peak == -torch.inf, 0.0, peak)[:, None]


def _chunk_of_teacher(out, z, shifted, target, u, scale):
    """z [n, w] with the target column, z - max without it, the teacher's scaled logits u [n, w] -> `out` rows [n]."""
    peak = u.amax(-1)
    fall = u - _safe(peak)
    q, p = fall.exp(), (scale * shifted).exp()
    out["teacher_max"].copy_(peak)
    out["teacher_sum"].copy_(q.sum(-1, dtype=torch.float64))
    if "cross" in out:
        out["cross"].copy_(_total(q, u - scale * z))
    if "gap" in out:
        out["gap"].copy_(_total(p, scale * z - u))
    if "teacher_moment" in out:
        out["teacher_moment"].copy_(_total(q, fall))
    if target is not None:
        owned = (target >= 0) & (target < z.shape[1])
        picked = u.gather(1, target.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
        out["teacher_target"].copy_(torch.where(owned, picked, 0.0))


def _entries_of(tile: Tile):
    """z of the entries [n, K], -inf where they are elsewhere, and their log tau, where it is -inf, too."""
    here = tile.columns < tile.z.shape[1]
    z = tile.z.gather(1, tile.columns.clamp(max=tile.z.shape[1] - 1))
    return torch.where(here, z, -torch.inf), torch.where(here, tile.log_tau.to(z.dtype), -torch.inf)


def _fill(x, columns, value):
    """x [n, w] with `value` at the columns [n, K]; w stands for none."""
    return torch.nn.functional.pad(x, (0, 1)).scatter(1, columns, value)[:, :-1]


def _chunk_of_topk(out, tile: Tile):
    """The chunk's entries, and its columns without them -> `out` rows [n]."""
    z, log_tau = _entries_of(tile)
    peak = z.amax(-1)
    shifted = tile.scale * (z - _safe(peak))
    tau, weight = log_tau.exp(), shifted.exp()
    out["topk_max"].copy_(peak)
    out["topk_sum"].copy_(weight.sum(-1, dtype=torch.float64))
    out["topk_mass"].copy_(tau.sum(-1, dtype=torch.float64))
    out["topk_cross"].copy_(_total(tau, log_tau - shifted))
    out["topk_gap"].copy_(_total(weight, shifted - log_tau))
    if "tail_max" in out:
        rest = _fill(tile.z, tile.columns, -torch.inf)
        peak = rest.amax(-1)
        shifted = tile.scale * (rest - _safe(peak))
        out["tail_max"].copy_(peak)
        out["tail_sum"].copy_(shifted.exp().sum(-1, dtype=torch.float64))
        if "tail_moment" in out:
            out["tail_moment"].copy_(_total(shifted.exp(), shifted))


def merge_packets(packets, inputs: Inputs, spec: HeadSpec):
    """Packets of all ranks -> [merged rows, values, *flags]."""
    has_labels = inputs.labels is not None
    return finish(merge(packets, has_labels, spec, inputs.scales), inputs.labels, spec, packets.dtype, inputs.scales)


def later_statistics(packets, inputs: Inputs, merged, spec: HeadSpec):
    """Packets [chunks, rows, N] of the second exchange: what needs the merged sums of the first."""
    packets.zero_()
    row = dict(zip(merged_rows(inputs.labels is not None, spec.want), merged.unbind(0)))
    rows = dict(zip(later_rows(spec.want), packets.unbind(1)))
    for c, block, columns in _chunks(inputs, spec):
        tile, here = _tile(inputs, block, columns, spec), {name: value[block, None] for name, value in row.items()}
        ignored = here["sum"][:, 0] == 0
        for name, value in rows.items():
            total = _later(name.removesuffix("_mean"), name.endswith("_mean"), tile, here, spec)
            value[c, block] = torch.where(ignored, 0.0, total).to(packets.dtype)


def _later(name, mean, tile: Tile, here, spec):
    """A statistic's value, or what its gradient subtracts, of one tile [n]."""
    p, q = _probabilities(name, tile, here)
    if name == "total_variation":
        return (0.5 * p * (p - q).sign() if mean else 0.5 * (p - q).abs()).sum(-1, dtype=torch.float64)
    of_student, of_teacher = _divergence(p, q, spec.beta)
    return (of_student if mean else of_student + of_teacher).sum(-1, dtype=torch.float64)


def _probabilities(name, tile: Tile, here):
    """Of student and teacher, over the columns of the tile or, if the teacher has only some, over its entries."""
    if tile.columns is None:
        p = (tile.scale * (tile.z - here["shift"])).exp() / here["student_sum"]
        return p, (tile.u - here["teacher_shift"]).exp() / here["teacher_sum"]
    z, log_tau = _entries_of(tile)
    p = (tile.scale * (z - here["topk_shift"])).exp() / here["topk_sum"]
    p = torch.where(z == -torch.inf, 0.0, p)
    return (p * here["inside"] if name == "vocab_jsd" else p), log_tau.exp()


def _divergence(p, q, beta):
    """Both parts of the Jensen-Shannon divergence, (1 - beta) p log(p / m) and beta q log(q / m)."""
    m = beta * q + (1 - beta) * p
    m = torch.where(m == 0, 1.0, m)  # of denormals
    of_student = torch.where(p == 0, 0.0, (1 - beta) * p * (p / m).log())
    return of_student, torch.where(q == 0, 0.0, beta * q * (q / m).log())


def logits_gradient(out, inputs: Inputs, merged, grads, spec: HeadSpec):
    """Write d loss / d logits into `out` [N, width], which may be `logits` itself.

    `grads` are the upstream gradients [N] by statistic, as far as there are any. Per element, before the one rounding:
    dz_j = p_j (g_lse - g_log_prob - g_entropy (z_j - M - mean)) + w_j g_total, and at the target column
    p_y (g_lse - g_entropy (z_y - M - mean)) + (1 - p_y) g_log_prob + w_y g_total; a teacher adds what the tables of
    `stats` say.
    """
    out[:, spec.valid_width :] = 0
    row = dict(zip(merged_rows(inputs.labels is not None, spec.want), merged.unbind(0)))
    n_rows, chunk = inputs.logits.shape[0], max(1, min(spec.chunk_size, spec.valid_width))
    for first in range(0, spec.valid_width, chunk):
        columns = slice(first, min(first + chunk, spec.valid_width))
        for block in _row_blocks(n_rows, chunk):
            tile = _tile(inputs, block, columns, spec)
            here = {name: value[block, None] for name, value in row.items()}
            g = {name: value[block, None] for name, value in grads.items()}
            dz = _tile_gradient(tile, here, g)
            if wants(g, OF_TEACHER):
                dz = dz + tile.scale * _of_teacher(tile, here, g, spec.beta)
            if wants(g, OF_TOPK):
                dz = dz + tile.scale * _of_topk(tile, here, g, spec)
            out[block, columns] = torch.where(here["sum"] == 0, 0.0, dz * tile.slope).to(out.dtype)


def _tile_gradient(tile: Tile, here, g):
    shifted = tile.z - here["shift"]
    coefficient = g.get("lse", torch.zeros_like(here["sum"]))
    if "entropy" in g:
        log_ratio = torch.where(shifted == -torch.inf, 0.0, shifted - here["mean"])
        coefficient = coefficient - g["entropy"] * log_ratio
    away = coefficient - g["log_prob"] if "log_prob" in g else coefficient
    weight = shifted.exp() / here["sum"]
    dz = weight * away
    if tile.target is not None:
        at = tile.target[:, None] == torch.arange(tile.z.shape[1], device=tile.z.device)
        at_target = weight * coefficient + (here["others"] * g["log_prob"] if "log_prob" in g else 0.0)
        dz = torch.where(at, at_target, dz)
    if "total" in g:
        weighted = g["total"] if tile.weight is None else g["total"] * tile.weight.to(g["total"].dtype)
        dz = dz + torch.where(tile.z == -torch.inf, 0.0, weighted)
    return dz


def _of_teacher(tile: Tile, here, g, beta):
    """d/dz' of the divergences from a teacher of logits."""
    p, q = _probabilities("", tile, here)
    dz = torch.zeros_like(tile.z)
    if "forward_kl" in g:
        dz = dz + g["forward_kl"] * (p - q)
    if "reverse_kl" in g:
        # where nobody asks, an infinite divergence has no gradient
        apart = p * (tile.scale * tile.z - tile.u - here["gap"])
        dz = dz + g["reverse_kl"] * torch.where((p == 0) | (g["reverse_kl"] == 0), 0.0, apart)
    if "jsd" in g:
        dz = dz + g["jsd"] * (_divergence(p, q, beta)[0] - p * here["jsd_mean"])
    if "total_variation" in g:
        dz = dz + g["total_variation"] * p * (0.5 * (p - q).sign() - here["total_variation_mean"])
    return dz


def _of_topk(tile: Tile, here, g, spec):
    """d/dz' of the statistics of a top-K teacher: at its entries, and at everything else."""
    none = torch.zeros_like(here["sum"])
    forward, reverse, inside, outside, entropy = (g.get(name, none) for name in TOPK_FIRST)
    z, log_tau = _entries_of(tile)
    shifted = tile.scale * (z - here["topk_shift"])
    s = torch.where(z == -torch.inf, 0.0, shifted.exp() / here["topk_sum"])
    at = forward * (here["topk_mass"] * s - log_tau.exp())
    at = at + torch.where((s == 0) | (reverse == 0), 0.0, reverse * s * (shifted - log_tau - here["topk_gap"]))
    at = at + (inside * here["outside"] - outside * here["inside"]) * s
    common = -inside
    for name in ("topk_jsd", "vocab_jsd"):
        if name in g:
            p, q = _probabilities(name, tile, here)
            at = at + g[name] * (_divergence(p, q, spec.beta)[0] - p * here[f"{name}_mean"])
    if "vocab_jsd" in g:
        common = common - g["vocab_jsd"] * here["vocab_jsd_mean"]
    if wants(spec.want, TAIL):
        common = here["outside"] * common + outside * here["inside"]
    shifted = tile.scale * (tile.z - here["rest_shift"])
    rest = torch.where((tile.z == -torch.inf) | (here["rest_sum"] == 0), 0.0, shifted.exp() / here["rest_sum"])
    dz = torch.where(rest == 0, 0.0, rest * (common - entropy * (shifted - here["rest_mean"])))
    return _fill(dz, tile.columns, at)


def scale(out, x, factor, add: bool = False):
    """out (+)= x * factor, a scalar tensor, rounded once."""
    if add:
        out.addcmul_(x.to(out.dtype), factor)
    else:
        torch.mul(x, factor, out=out)
