"""The contract in plain torch, for any device: read it as the definition of what the kernels compute.

Works through blocks of rows and chunks of columns, so that no vocabulary-sized temporary ever exists. float64 logits
are accepted here (all of it runs in float64 then), which is what gradient checks need.
"""

from __future__ import annotations

import torch

from ..stats import IGNORED, HeadSpec, finish, merge, merged_rows, packet_rows

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


def _teacher_scales(scales, block, dtype, spec):
    """Factors of the teacher's and of the student's logits, numbers or [n, 1]."""
    if scales is None:
        return spec.teacher_scale, spec.student_scale
    return scales[:, block, None].to(dtype).unbind(0)


def local_statistics(packets, logits, labels, bias, temperature, total_weight, teacher, scales, spec: HeadSpec):
    """Logits [N, width], labels [N] -> packets [chunks, rows, N] of this rank, fp32 (float64 for float64)."""
    names = packet_rows(labels is not None, spec.want)
    packets.zero_()
    for c in range(spec.chunks):
        columns = slice(c * spec.chunk_size, min((c + 1) * spec.chunk_size, spec.valid_width))
        width = max(0, columns.stop - columns.start)
        row = dict(zip(names, packets[c].unbind(0)))
        row["max"].fill_(-torch.inf)
        if teacher is not None:
            row["teacher_max"].fill_(-torch.inf)
        if width:
            for block in _row_blocks(logits.shape[0], width):
                out = {name: value[block] for name, value in row.items()}
                _chunk_statistics(
                    out,
                    transform(
                        logits[block, columns],
                        None if bias is None else bias[columns],
                        None if temperature is None else temperature[block],
                        spec,
                    )[0],
                    None if labels is None else labels[block].long() - spec.start - columns.start,
                    None if total_weight is None else total_weight[columns],
                    spec.start + columns.start,
                    None if teacher is None else teacher[block, columns],
                    _teacher_scales(scales, block, packets.dtype, spec),
                )
        if labels is not None:
            ignored = labels.long() == spec.ignore_index
            packets[c, :, ignored] = 0.0
            row["max"].masked_fill_(ignored, -torch.inf)
            row["owner"].masked_fill_(ignored, IGNORED)
            if teacher is not None:
                row["teacher_max"].masked_fill_(ignored, -torch.inf)


def _chunk_statistics(out, z, target, total_weight, first_id, teacher, scales):
    """One block of one chunk: z [n, w], target column [n] (outside [0, w) if elsewhere), the teacher's logits [n, w]
    and the scales of both -> `out` rows [n]."""
    whole = z
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
    shifted = z - torch.where(peak == -torch.inf, 0.0, peak)[:, None]
    weight = shifted.exp()
    out["max"].copy_(peak)
    out["sum"].copy_(weight.sum(-1, dtype=torch.float64))
    if "moment" in out:
        out["moment"].copy_(torch.where(shifted == -torch.inf, 0.0, weight * shifted).sum(-1, dtype=torch.float64))
    if teacher is not None:
        _chunk_of_teacher(out, whole, shifted, target, teacher.to(z.dtype) * scales[0], scales[1])


def _chunk_of_teacher(out, z, shifted, target, u, scale):
    """z [n, w] with the target column, z - max without it, the teacher's scaled logits u [n, w] -> `out` rows [n]."""

    def total(factor, value):  # what has no probability adds nothing, whatever its logits
        return torch.where(factor == 0, 0.0, factor * value).sum(-1, dtype=torch.float64)

    peak = u.amax(-1)
    fall = u - torch.where(peak == -torch.inf, 0.0, peak)[:, None]
    q, p = fall.exp(), (scale * shifted).exp()
    out["teacher_max"].copy_(peak)
    out["teacher_sum"].copy_(q.sum(-1, dtype=torch.float64))
    out["student_sum"].copy_(p.sum(-1, dtype=torch.float64))
    if "cross" in out:
        out["cross"].copy_(total(q, u - scale * z))
    if "gap" in out:
        out["gap"].copy_(total(p, scale * z - u))
    if "teacher_moment" in out:
        out["teacher_moment"].copy_(total(q, fall))
    if target is not None:
        owned = (target >= 0) & (target < z.shape[1])
        picked = u.gather(1, target.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
        out["teacher_target"].copy_(torch.where(owned, picked, 0.0))


def merge_packets(packets, labels, scales, spec: HeadSpec):
    """Packets of all ranks -> [merged rows, values, *flags]."""
    return finish(merge(packets, labels is not None, spec, scales), labels, spec, packets.dtype, scales)


def logits_gradient(
    out, logits, labels, bias, temperature, total_weight, teacher, scales, merged, grads, spec: HeadSpec
):
    """Write d loss / d logits into `out` [N, width], which may be `logits` itself.

    `grads` are the upstream gradients [N] or None of (lse, log_prob, entropy, total, forward_kl, reverse_kl). Per
    element, before the one rounding:
    dz_j = p_j (g_lse - g_log_prob - g_entropy (z_j - M - mean)) + w_j g_total, and at the target column
    p_y (g_lse - g_entropy (z_y - M - mean)) + (1 - p_y) g_log_prob + w_y g_total; a teacher adds at every column
    a g_forward_kl (p'_j - q_j) + a g_reverse_kl p'_j (z'_j - u_j - gap).
    """
    out[:, spec.valid_width :] = 0
    row = dict(zip(merged_rows(labels is not None, spec.want), merged.unbind(0)))
    n_rows, chunk = logits.shape[0], max(1, min(spec.chunk_size, spec.valid_width))
    for first in range(0, spec.valid_width, chunk):
        columns = slice(first, min(first + chunk, spec.valid_width))
        for block in _row_blocks(n_rows, chunk):
            z, slope = transform(
                logits[block, columns],
                None if bias is None else bias[columns],
                None if temperature is None else temperature[block],
                spec,
            )
            here = {name: value[block, None] for name, value in row.items()}
            lse, log_prob, entropy, total, *of_teacher = (None if g is None else g[block, None] for g in grads)
            shifted = z - here["shift"]
            coefficient = torch.zeros_like(here["sum"]) if lse is None else lse
            if entropy is not None:
                log_ratio = torch.where(shifted == -torch.inf, 0.0, shifted - here["mean"])
                coefficient = coefficient - entropy * log_ratio
            away = coefficient if log_prob is None else coefficient - log_prob
            weight = shifted.exp() / here["sum"]
            dz = weight * away
            if labels is not None:
                at = labels[block, None].long() - spec.start - first == torch.arange(z.shape[1], device=z.device)
                at_target = weight * coefficient + (0.0 if log_prob is None else here["others"] * log_prob)
                dz = torch.where(at, at_target, dz)
            if total is not None:
                weighted = total if total_weight is None else total * total_weight[columns].to(total.dtype)
                dz = dz + torch.where(z == -torch.inf, 0.0, weighted)
            if any(g is not None for g in of_teacher):
                factor_t, factor = _teacher_scales(scales, block, z.dtype, spec)
                u = teacher[block, columns].to(z.dtype) * factor_t
                dz = dz + factor * _of_teacher(here, *of_teacher, factor * z, factor * shifted, u)
            out[block, columns] = torch.where(here["sum"] == 0, 0.0, dz * slope).to(out.dtype)


def _of_teacher(here, forward_kl, reverse_kl, z, shifted, u):
    """d/dz' of the divergences, z' and z' - M' [n, w], the teacher's u [n, w]."""
    p = shifted.exp() / here["student_sum"]
    dz = torch.zeros_like(z)
    if forward_kl is not None:
        dz = dz + forward_kl * (p - (u - here["teacher_shift"]).exp() / here["teacher_sum"])
    if reverse_kl is not None:
        # where nobody asks, an infinite divergence has no gradient
        dz = dz + reverse_kl * torch.where((p == 0) | (reverse_kl == 0), 0.0, p * (z - u - here["gap"]))
    return dz
