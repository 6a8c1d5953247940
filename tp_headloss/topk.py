"""The most likely ids of a sharded vocabulary with their log-probs: what a teacher leaves on disk for its students."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .api import DEFAULTS, NO_TRANSFORM, Options, Transform, flat_inputs, resolve_shard
from .backends import eager, load_backend
from .comm import gather_from_ranks
from .shard import VocabShard
from .stats import finish, merge

BLOCK_ELEMENTS = 1 << 22  # logits per block: its temporaries are all that is ever as wide as the vocabulary
LOWEST = torch.iinfo(torch.int64).min


class TopK(NamedTuple):
    """Per token [..], K entries by descending log-prob, ties by ascending id; equal bits on every rank."""

    ids: torch.Tensor  # [.., K] global ids, -1 where the nucleus cut an entry
    log_probs: torch.Tensor  # [.., K], -inf where cut
    lse: torch.Tensor  # [..] fp32, log sum exp of the transformed logits over the whole vocabulary


@torch.no_grad()
def topk_log_probs(
    logits: torch.Tensor,
    k: int,
    *,
    shard: VocabShard | None = None,
    transform: Transform | None = None,
    top_p: float | None = None,
    dtype: torch.dtype = torch.float32,
    ids_dtype: torch.dtype = torch.int64,
    options: Options | None = None,
) -> TopK:
    """logits [.., width] sharded on V -> the K largest log-probs of the whole vocabulary, replicated; one collective.

    Log-probs are normalised over all of the vocabulary: their exponentials sum to the share that the K entries have.
    top_p: cut an entry if those before it already hold that much (the first stays), a nucleus of at most K. dtype,
    ids_dtype: of what is returned, such as float16 and int32 for the disk.

    Equal logits come by ascending id, exactly, on every device. Nothing is differentiated, and blocks of 2^22 logits
    bound the memory. A token with NaN or +inf in its logits, or nothing above -inf, has NaN log-probs.

    Raises ValueError for a k that is not in [1, vocab_size], and as `vocab_statistics` does.
    """
    shard = resolve_shard(logits, shard)
    if not 1 <= k <= shard.vocab_size:
        raise ValueError(f"k must be in [1, {shard.vocab_size}], got {k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    if ids_dtype not in (torch.int64, torch.int32) or not dtype.is_floating_point:
        raise TypeError(f"ids must be int64 or int32 and log-probs floating point, got {ids_dtype} and {dtype}")
    logits, options = logits.detach(), options or DEFAULTS
    rows, spec, inputs = flat_inputs(logits, None, shard, (), transform or NO_TRANSFORM, None, None, -100, options)
    n_rows = inputs[0].shape[0]
    packets = inputs[0].new_empty((spec.chunks, 2, n_rows), dtype=torch.float32)
    load_backend(spec.backend).local_statistics(packets, *inputs, spec)
    keys = _local_keys(inputs, spec, k)
    # keys travel as the bits of two fp32 numbers each, beside the packets: one all-gather for both
    sent = torch.cat([packets.flatten(), keys.view(torch.float32).flatten()])
    received = gather_from_ranks(sent, shard.group)
    packets, keys = received.split([packets.numel(), 2 * keys.numel()], 1)
    packets = packets.reshape(spec.packets, 2, n_rows)
    keys = keys.contiguous().view(torch.int64).view(shard.world_size, n_rows, k).transpose(0, 1).flatten(1)

    lse = finish(merge(packets, False, spec), None, spec)[1][0]
    values, ids = _decode(keys.topk(k).values)
    log_probs = (values - lse[:, None]).clamp(max=0)
    if top_p is not None:
        before = log_probs.double().exp().cumsum(1) - log_probs.double().exp()
        cut = before >= top_p  # never the first, before which there is exactly 0
        ids, log_probs = ids.masked_fill(cut, -1), log_probs.masked_fill(cut, -torch.inf)
    return TopK(rows.unflatten(ids.to(ids_dtype)), rows.unflatten(log_probs.to(dtype)), rows.unflatten(lse))


def _local_keys(inputs, spec, k):
    """Keys [N, k] of this rank's largest logits: numbers that sort like (logit, -id), so that no two are equal."""
    logits, _, bias, temperatures, *_ = inputs
    keys = torch.full((logits.shape[0], k), LOWEST, device=logits.device)
    width = spec.valid_width
    if width == 0 or logits.shape[0] == 0:
        return keys
    later = (1 << 32) - 1 - torch.arange(spec.start, spec.start + width, device=logits.device)  # the lower id is larger
    step = max(1, BLOCK_ELEMENTS // width)
    for first in range(0, logits.shape[0], step):
        block = slice(first, first + step)
        z, _ = eager.transform(
            logits[block, :width],
            None if bias is None else bias[:width],
            None if temperatures is None else temperatures[block],
            spec,
        )
        bits = (z.float() + 0.0).view(torch.int32)
        ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # integers in the order of the numbers
        local = min(k, width)
        keys[block, :local] = ((ordered << 32) | later).topk(local).values
    return keys


def _decode(keys):
    """-> logits fp32, ids."""
    ordered = (keys >> 32).int()
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32), (1 << 32) - 1 - (keys & 0xFFFFFFFF)
