"""The backend in plain torch, for any device: read it, and the families, as the definition of the
kernels' results.

Works through blocks of rows and chunks of columns, so that no vocabulary-sized temporary ever
exists. float64 logits are accepted here (all of it runs in float64 then), which is what gradient
checks need.
"""

import torch

from ..statistics import IGNORED, SOFTMAX, Layout
from ..statistics.at_ids import log_probs_at, logits_at
from ..statistics.family import Family, Tile
from ..statistics.sets import known_sets, members  # noqa: F401 (the first is part of the contract)
from ..statistics.topk import distinct_entries as entries  # noqa: F401 (part of the contract)
from .fp8 import units_of  # noqa: F401 (part of the contract)
from .fp8_eager import add_to_weight, finish_hidden, split, turn_to_fp8  # noqa: F401 (part of the contract)
from .request import Facts, Request, Tensors

BLOCK_ELEMENTS = 1 << 19  # per temporary: a few MiB, whatever N and V are


def shares_memory(_logits) -> bool:
    """False: plain torch does not read its peers' memory."""
    return False


def transform(x, bias, temperature, facts: Facts):
    """Raw logits [n, w] -> z and dz/dx (a tensor, or a number where it is one)."""
    x = x if x.dtype == torch.float64 else x.float()
    if bias is not None:
        x = x + bias.to(x.dtype)
    inverse = (
        1.0 / facts.temperature if temperature is None else (1.0 / temperature.to(x.dtype))[:, None]
    )
    if not facts.softcap:
        factor = facts.scale * inverse
        return x if temperature is None and factor == 1 else x * factor, factor
    bounded = torch.tanh(x * (facts.scale / facts.softcap))
    # 1 - tanh^2 without its cancellation
    slope = torch.cosh(x * (facts.scale / facts.softcap)) ** -2
    return bounded * (facts.softcap * inverse), slope * (facts.scale * inverse)


def tile_of(tensors: Tensors, block: slice | torch.Tensor, columns: slice, facts: Facts) -> Tile:
    """Some rows, a slice or their numbers, of some columns."""

    def part(x, *index):
        return None if x is None else x[index]

    bias, temperatures = part(tensors.bias, columns), part(tensors.temperatures, block)
    z, slope = transform(tensors.logits[block, columns], bias, temperatures, facts)
    teacher_scale: torch.Tensor | float = facts.teacher_scale
    scale: torch.Tensor | float = facts.student_scale
    if tensors.scales is not None:
        teacher_scale, scale = tensors.scales[:, block, None].to(z.dtype).unbind(0)
    first_id = facts.start + columns.start
    target, kept = part(tensors.labels, block), None
    if target is not None:
        target = target.long() - first_id
    if tensors.sets is not None:
        kept = members(tensors.sets, tensors.set_spans[block], first_id, z.shape[1])
    at_entries, at_ids = (
        None if ids is None else _columns_of(ids[block], first_id, z.shape[1])
        for ids in (tensors.entries, tensors.ids)
    )
    teacher = part(tensors.teacher, block, columns)
    teacher = None if teacher is None else teacher.to(z.dtype) * teacher_scale
    weight, log_probs = part(tensors.column_weight, columns), part(tensors.entry_log_probs, block)
    label_logits = part(tensors.label_logits, block)
    return Tile(
        z,
        slope,
        target,
        weight,
        teacher,
        scale,
        at_entries,
        log_probs,
        kept,
        first_id,
        label_logits,
        at_ids,
    )


def _columns_of(ids, first_id: int, width: int):
    """Vocabulary ids -> columns of a tile, its width for those that are elsewhere."""
    columns = ids.long() - first_id
    return torch.where((columns >= 0) & (columns < width), columns, width)


def _row_blocks(n_rows: int, width: int) -> list[slice]:
    step = max(1, BLOCK_ELEMENTS // max(1, width))
    return [slice(i, min(i + step, n_rows)) for i in range(0, n_rows, step)]


def _chunk_tiles(request: Request):
    """The shard's chunks that have columns, as (chunk, block of rows, tile)."""
    tensors, facts = request.tensors, request.facts
    for chunk in range(facts.chunks):
        columns = slice(
            chunk * facts.chunk_size, min((chunk + 1) * facts.chunk_size, facts.valid_width)
        )
        if columns.stop > columns.start:
            for block in _row_blocks(tensors.logits.shape[0], columns.stop - columns.start):
                yield chunk, block, tile_of(tensors, block, columns, facts)


def label_logits(out, request: Request):
    """Write the transformed logits [N] of the labels in this shard, and 0 where they are in
    another."""
    out.zero_()
    for _, block, tile in _chunk_tiles(request):
        column = tile.target.clamp(0, tile.z.shape[1] - 1)
        at_label = tile.z.gather(1, column[:, None])[:, 0]
        out[block] = torch.where(column == tile.target, at_label, out[block])


def local_statistics(packets, request: Request, memory=None):
    """Write this rank's packets [chunks, rows, N], fp32 (float64 for float64 logits)."""
    layout, facts, labels = request.layout, request.facts, request.tensors.labels
    rows = dict(zip(layout.packet, packets.unbind(1)))
    packets.zero_()
    for chunk, block, tile in _chunk_tiles(request):
        softmax = SOFTMAX.tile_softmax(tile)
        for family in layout.families:
            for name, value in family.local(tile, softmax, layout.packet).items():
                if name in rows:
                    rows[name][chunk, block].copy_(
                        _checked(value, family, "local", (tile.z.shape[0],))
                    )
        if layout.n_ids:
            packets[chunk, len(rows) :, block] = logits_at(tile).t()
    empty = torch.zeros_like(packets[0, 0], dtype=torch.bool)
    if labels is not None:
        empty = labels.long() == facts.ignore_index
        packets.masked_fill_(empty, 0.0)
        rows["owner"].masked_fill_(empty, IGNORED)
    for name in rows:
        if name.endswith("max"):
            rows[name].masked_fill_(empty, -torch.inf)
            # chunks without columns
            rows[name][max(0, -(-facts.valid_width // facts.chunk_size)) :] = -torch.inf


def student_scale(request: Request):
    """Factor of z where it meets a teacher's logits: a number, or float64 [N]."""
    scales = request.tensors.scales
    return request.facts.student_scale if scales is None else scales[1].double()


def merged_sums(packets, layout: Layout, scale: torch.Tensor | float = 1.0):
    """Packets [chunks of all ranks in vocabulary order, rows, N] -> the largest maximum, and sums
    relative to it."""
    packets = packets.double()
    rows = dict(zip(layout.packet, packets.unbind(1)))
    merging = SOFTMAX.merging(rows, scale)
    sums = {"logits_at": packets[:, len(rows) :].sum(0)}  # [K, N] of given ids
    for family in layout.families:
        sums |= family.merge(rows, merging)
    return merging.shift, sums


def finish(shift, sums: dict, request: Request, dtype) -> list[torch.Tensor]:
    """Join the target column: merged sums -> [merged rows [R, N], values [K, N], *flags [N]] in the
    layout's order."""
    layout, facts, labels = request.layout, request.facts, request.tensors.labels
    joined, values, rows = SOFTMAX.joined(
        shift, sums, labels, facts.packets, student_scale(request)
    )
    for family in layout.families[1:]:
        found = family.finish(family.join(sums, joined), joined)
        values |= found[0]
        rows |= found[1]

    def settled(names, found):
        _expect_returned(layout, names, found)
        every = torch.stack([found[name] for name in names])
        return torch.where(joined.ignored, 0.0, torch.where(joined.bad, torch.nan, every)).to(dtype)

    # written by `finish_second`
    later = dict.fromkeys(layout.second, torch.zeros_like(joined.whole))
    values, rows = values | later, rows | later
    merged, found = settled(layout.merged, rows), settled(layout.values, values)
    if "owners" in values:
        found[layout.values.index("owners")] = values["owners"]
    outputs = [merged, found, *[values[name] for name in layout.flags]]
    if layout.per_id:
        known = dict(zip(layout.merged, merged.unbind(0)))
        outputs.append(
            log_probs_at(sums["logits_at"], request.tensors.ids, known["shift"], known["sum"])
        )
    return outputs


def _expect_returned(layout: Layout, names: tuple[str, ...], found: dict):
    """Raise ValueError that names the family whose `finish` left out one of its rows or values."""
    for family in layout.families:
        own = {*family.merged_rows(layout.call), *family.value_rows(layout.call)} & {*names}
        if missing := own - found.keys():
            raise ValueError(
                f"{type(family).__name__}.finish must return {sorted(own)}, got no {sorted(missing)}"
            )


def merge_packets(packets, request: Request, memory=None) -> list[torch.Tensor]:
    """Packets of all ranks -> [merged rows, values, *flags]."""
    shift, sums = merged_sums(packets, request.layout, student_scale(request))
    return finish(shift, sums, request, packets.dtype)


def second_statistics(packets, request: Request, merged):
    """Write this rank's packets [chunks, rows, N] of the second exchange."""
    packets.zero_()
    merged_row = dict(zip(request.layout.merged, merged.unbind(0)))
    rows = dict(zip(request.layout.second, packets.unbind(1)))
    for chunk, block, tile in _chunk_tiles(request):
        here = {name: value[block, None] for name, value in merged_row.items()}
        ignored = here["sum"][:, 0] == 0
        for family in request.layout.families:
            for name in family.second_rows(request.layout.call):
                parts = family.second(name, tile, here, request.facts.beta)
                for row, part in zip((name, f"{name}_mean"), parts):
                    rows[row][chunk, block] = torch.where(ignored, 0.0, part).to(packets.dtype)


def merge_second(packets, outputs, layout: Layout):
    """Packets of the second exchange of all ranks -> the last rows of the outputs' first two, in
    place."""
    merged, values, *_ = outputs
    whole = merged[layout.merged.index("sum")]
    sums = torch.where(whole.isnan(), torch.nan, packets.sum(0, dtype=torch.float64))
    values[-len(sums) // 2 :] = sums[::2].clamp(min=0)
    merged[-len(sums) // 2 :] = sums[1::2]


def logits_gradient(out, request: Request, merged, grads: dict):
    """Write d loss / d logits into `out` [N, width], which may be the logits; grads: upstream
    gradients [N] by name.

    Per element, before the one rounding: dz_j = p_j (g_lse - g_log_prob + coefficients) + direct
    parts, and at the target p_y (g_lse + coefficients) + (1 - p_y) g_log_prob + direct parts; the
    tables of the families say which.
    """
    tensors, facts = request.tensors, request.facts
    out[:, facts.valid_width :] = 0
    merged_row = dict(zip(request.layout.merged, merged.unbind(0)))
    n_rows, chunk = tensors.logits.shape[0], max(1, min(facts.chunk_size, facts.valid_width))
    for first in range(0, facts.valid_width, chunk):
        columns = slice(first, min(first + chunk, facts.valid_width))
        for block in _row_blocks(n_rows, chunk):
            tile = tile_of(tensors, block, columns, facts)
            here = {name: value[block, None] for name, value in merged_row.items()}
            upstream = {name: g[block].reshape(tile.z.shape[0], -1) for name, g in grads.items()}
            dz = _tile_gradient(tile, here, upstream, request)
            out[block, columns] = torch.where(here["sum"] == 0, 0.0, dz * tile.slope).to(out.dtype)


def split_gradient(out, request: Request, merged, grads: dict, units):
    """Write d loss / d logits in the two parts of `fp8`; arguments as of `logits_gradient`."""
    gradient = merged.new_empty(request.tensors.logits.shape)
    logits_gradient(gradient, request, merged, grads)
    split(out, gradient, units, request.facts.start)


def _tile_gradient(tile: Tile, merged: dict, grads: dict, request: Request):
    families = request.layout.families
    shifted = tile.z - merged["shift"]
    weight = shifted.exp() / merged["sum"]
    coefficient = grads.get("lse", torch.zeros_like(merged["sum"]))
    shape, column = tile.z.shape, merged["sum"].shape
    for family in families:
        coefficient = family.coefficient(coefficient, shifted, weight, merged, grads)
        _checked(coefficient, family, "coefficient", shape, column)
    away = coefficient - grads["log_prob"] if "log_prob" in grads else coefficient
    dz = weight * away
    if tile.target is not None:
        at = tile.target[:, None] == torch.arange(tile.z.shape[1], device=tile.z.device)
        at_target = weight * coefficient + (
            merged["others"] * grads["log_prob"] if "log_prob" in grads else 0.0
        )
        dz = torch.where(at, at_target, dz)
    scaled = None
    for family in families:
        dz = _checked(family.direct(dz, tile, merged, grads), family, "direct", shape)
        scaled = family.scaled(scaled, tile, merged, grads, request.facts.beta, request.facts.want)
        _checked(dz if scaled is None else scaled, family, "scaled", shape)
    return dz if scaled is None else dz + tile.scale * scaled


def _checked(
    found: torch.Tensor, family: Family, method: str, *shapes: tuple[int, ...]
) -> torch.Tensor:
    """Return what a family's method returned. Raises ValueError unless it has one of the shapes."""
    if found.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(
            f"{type(family).__name__}.{method} must return {expected}, got {list(found.shape)}"
        )
    return found


def gradient_for(gradient, upstream):
    """Make a gradient that is for an upstream gradient of 1 that of another one, in place."""
    gradient.mul_(upstream)


def scale(out, x, factor, add: bool = False):
    """out (+)= x * factor, a scalar tensor, rounded once."""
    if add:
        out.addcmul_(x.to(out.dtype), factor)
    else:
        torch.mul(x, factor, out=out)
