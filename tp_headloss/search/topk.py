"""The most likely ids of a sharded vocabulary with their log-probs: what a teacher leaves on disk
for its students."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, NamedTuple

import torch

from ..arguments.options import NO_TRANSFORM, Options, Transform
from ..arguments.teachers import TeacherHead
from ..call.agreement import Agreement
from ..call.compile import uncompiled
from ..call.dtensor import local_head, local_logits, local_part
from ..call.given import Given
from ..call.request_of import LOGITS_DTYPES, build_request
from ..call.statistics import hint_alone, vocab_statistics
from ..engine import eager
from ..engine.request import TokenOrder
from ..engine.transports import Transport
from ..linear_head import Linear, linear_vocab_statistics
from ..ranks.comm import gather_from_ranks
from ..ranks.shard import VocabShard
from ..spec import (
    HIDDEN,
    LEAST,
    Logits,
    NumberLine,
    Rows,
    Size,
    TensorLine,
    described,
    lines_within,
)
from ..spec.checks import operand_dtype
from ..statistics import documented_fields, without_arithmetic
from .kept import transformed_logits
from .keys import NO_KEY, decode_keys, keys_of

# logits per block: its temporaries are all that is ever as wide as the vocabulary
BLOCK_ELEMENTS = 1 << 22
LOG_PROBS_DTYPES = (*LOGITS_DTYPES, torch.float64)  # of a `TopKTeacher`


@without_arithmetic
@documented_fields
class TopK(NamedTuple):
    """Per token [..], K entries by descending log-prob, ties by ascending id; equal bits on every
    rank.

    A tuple (ids, log_probs, lse, tail_log_prob): ids come first, unlike torch.topk's.

    Attributes:
        ids: [.., K] global ids, -1 where the nucleus cut an entry.
        log_probs: [.., K], -inf where cut.
        lse: [..] fp32, log sum exp of the transformed logits over the whole vocabulary.
        tail_log_prob: [..] fp32, log-prob of all other ids, those that the nucleus cut included:
            their own sum, exact where 1 - the entries' is rounding; -inf if there are none.

    Examples:
        >>> top = topk_log_probs(torch.tensor([[0.0, 2.0, 1.0]]), 2)
        >>> top.ids, top.log_probs.exp(), top.tail_log_prob.exp()
        (tensor([[1, 2]]), tensor([[0.6652, 0.2447]]), tensor([0.0900]))
    """

    ids: torch.Tensor
    log_probs: torch.Tensor
    lse: torch.Tensor
    tail_log_prob: torch.Tensor


# in the place of a teacher; a NamedTuple has fields alone
TopK.remedy = ": TopKTeacher(top.ids, top.log_probs)"  # type: ignore[attr-defined] # pyright: ignore


@uncompiled("it looks for its backend, and has nothing to fuse")
@torch.no_grad()
@described
def topk_log_probs(
    logits: Logits | TeacherHead,
    k: Size,
    *,
    weight: Rows | None = None,
    shard: VocabShard | None = None,
    transform: Transform | None = None,
    top_p: Annotated[float, NumberLine(LEAST, 1, "in (0, 1]")] | None = None,
    dtype: torch.dtype = torch.float32,
    ids_dtype: torch.dtype = torch.int64,
    options: Options | None = None,
) -> TopK:
    """logits [.., width] sharded on V -> the K largest log-probs of the whole vocabulary,
    replicated; one collective.

    The result is a tuple (ids, log_probs, lse, tail_log_prob): torch.topk has its values first.

    Log-probs are normalised over all of the vocabulary: their exponentials sum to the share that
    the K entries have. Each is the fp32 difference z - lse, whose error is absolute: near 0 use
    `log_probs` with the id as the label. Equal logits come by ascending id, exactly, on every
    device. Nothing is differentiated, and blocks of 2^22 logits bound the memory: on CPUs about 40
    bytes for each logit of a block, and from hidden states the block itself.

    A token with NaN or +inf in its logits, or nothing above -inf, has NaN log-probs, and ids that
    look like others and mean nothing; its argmax is -1 and its rank NaN. To find greedy tokens take
    the rank 1 of `vocab_statistics`, or compare ids where ``lse.isfinite()``, never log-probs.

    Every rank of the group calls it, with arguments that are equal where they are not sharded, else
    results are undefined: ``Options(validate="full")`` finds it, and "checksums" hidden states as
    well.

    Args:
        logits: fp32, bf16 or fp16 (float64 with the torch backend), any leading shape and strides,
            never written; hidden states [.., H] with a ``weight``; or a `TeacherHead`, which has
            both, at its temperature: a `TopKTeacher` of the result is not given it again.
        k: entries per token, in [1, vocab_size].
        weight: [width, H] of this rank; logits are made (as by torch.nn.functional.linear) by
            blocks of tokens. Where neither it nor a shard is given, nothing tells hidden states
            from logits of H ids.
        shard: as in `vocab_statistics`. One that was forgotten is an error beside a ``weight`` of
            a `VocabParallelHead`, or a DTensor. Beside others nothing finds it: without labels,
            each rank has the largest of its own columns, with ids from 0.
        transform: as in `vocab_statistics`; the bias of a weight belongs to it.
        options: as in `vocab_statistics`.
        top_p: cut an entry if those before it already hold that much (the first stays), a nucleus
            of at most K.
        dtype: of the log-probs: fp32, bf16 or fp16 (for the disk), or float64; lse and tail are
            fp32.
        ids_dtype: int64, or int32 for the disk.

    Raises:
        TypeError, ValueError: a k outside of [1, vocab_size], and the errors of `vocab_statistics`.

    Examples:
        >>> top = topk_log_probs(
        ...     torch.tensor([[0.0, 2.0, 1.0]]), 2, dtype=torch.float16, ids_dtype=torch.int32
        ... )
        >>> TopKTeacher(top.ids, top.log_probs).ids
        tensor([[1, 2]], dtype=torch.int32)
    """
    options = Given.checked(None, None, None, (), transform, options).options
    with Agreement(options, shard) as agreement:
        states, weight, transform, shard = local_operands(logits, weight, transform, shard)
        facts = {
            "k": k,
            "top_p": top_p,
            "dtype": str(dtype),
            "ids_dtype": str(ids_dtype),
            "options": options,
        }
        sharded = {"logits": states} if weight is None else {"hidden": states, "weight": weight}
        agreement.record("topk_log_probs", shard, transform=transform, **facts, **sharded)
        for name, value in (("k", k), ("top_p", top_p), ("dtype", dtype), ("ids_dtype", ids_dtype)):
            lines_within(topk_log_probs)[name].check(name, value, {})
        k = int(k)
        if k > shard.vocab_size:
            asked = () if weight is None else ("is the weight one rank's rows?",)
            said = hint_alone(shard, *asked)
            raise ValueError(f"k must be in [1, {shard.vocab_size}], got {k}{said}")
        if ids_dtype not in (torch.int64, torch.int32) or dtype not in LOG_PROBS_DTYPES:
            raise TypeError(
                "ids_dtype must be int64 or int32, and dtype float32, bfloat16, float16 or "
                f"float64, which a TopKTeacher takes, got {ids_dtype} and {dtype}"
            )
        if weight is None:
            request, *parts = _local_top(states, k, shard, transform, options)
            order = request.order
        else:
            request, *parts = _local_top_from_hidden(states, weight, k, shard, transform, options)
            # blocks are of tokens in their logical order
            order = TokenOrder(states, inplace=False, alone=False)
    check_operands(states, weight, transform, shard, options)
    lse, keys, rest = _merge_ranks(request, *parts)
    keys = keys.sort(dim=1, descending=True).values
    values, ids = decode_keys(keys[:, :k])
    log_probs = (values - lse[:, None]).clamp(max=0)
    others, _ = decode_keys(keys[:, k:])
    others = others.masked_fill(keys[:, k:] == NO_KEY, -torch.inf)
    if top_p is not None:
        # never the first, before which there is exactly 0
        cut = _sums_before(log_probs.double().exp()) >= top_p
        ids = ids.masked_fill(cut, -1)
        log_probs = log_probs.masked_fill(cut, -torch.inf)
        others = torch.cat([others, values.where(cut, -torch.inf)], 1)
    tail = torch.cat([rest, others], 1).double().logsumexp(1) - lse
    found = ids.to(ids_dtype), log_probs.to(dtype), lse, tail.clamp(max=0).float()
    return TopK(*map(order.unflatten, found))


def check_operands(states, weight, transform: Transform, shard: VocabShard, options: Options):
    """Raise the ValueError of `Options.check`, equal on all ranks, for what makes log-probs NaN.

    That is one more pass over the logits, with the exchanges of a call of its own, so it comes after
    the ranks have agreed. states: logits, or with a weight hidden states.
    """
    if not options.check:
        return
    plain = Options(backend=options.backend, transport=options.transport, check=True)
    if weight is None:
        vocab_statistics(states, shard=shard, transform=transform, options=plain)
    else:
        how = Linear(hidden_grad="none")
        linear_vocab_statistics(
            states, weight, shard=shard, transform=transform, options=plain, linear=how
        )


def local_operands(
    logits: torch.Tensor | TeacherHead,
    weight: torch.Tensor | None,
    transform: Transform | None,
    shard,
) -> tuple[torch.Tensor, torch.Tensor | None, Transform, VocabShard]:
    """Check the operands of a function that takes logits, hidden states with a weight, or a
    TeacherHead, which has both -> this rank's plain logits (or hidden states), weight, transform
    and shard."""
    if isinstance(logits, TeacherHead):
        given = {"weight": weight, "transform": transform}
        if named := [name for name, value in given.items() if value is not None]:
            raise ValueError(
                f"a TeacherHead has its own weight, transform and temperature, got {named}, too: "
                "leave it out"
            )
        tokens, weight, transform = logits.hidden, logits.weight, logits.whole_transform
    else:
        tokens = logits
    if weight is None:
        states, shard = local_logits(tokens, shard)
    else:
        HIDDEN.check("hidden states", tokens, {})
        states, weight, _, shard = local_head(tokens, weight, None, shard, "none")
        operand_dtype(states, weight)
    return states, weight, local_part(transform or NO_TRANSFORM, shard, tokens=tokens), shard


def token_blocks(
    states: torch.Tensor, weight: torch.Tensor | None, transform: Transform, step: int
) -> Iterator[tuple[slice, torch.Tensor, Transform]]:
    """Yield blocks of up to `step` flat tokens, an empty one of none: their place, logits [n,
    width] and transform.

    states: logits [.., width], or hidden states [.., H] whose logits are made by
    torch.nn.functional.linear.
    """
    temperature, lead = transform.temperature, states.shape[:-1]
    if isinstance(temperature, torch.Tensor):
        sizes = {"..": (tuple(lead), "logits")}
        TensorLine("real numbers").check("temperature", temperature, sizes)
    states = states.detach().reshape(math.prod(lead), states.shape[-1])
    for first in range(0, max(1, len(states)), step):
        here = slice(first, first + step)
        if isinstance(temperature, torch.Tensor):
            transform = replace(transform, temperature=temperature.reshape(-1)[here])
        logits = states[here]
        if weight is not None:
            logits = torch.nn.functional.linear(logits, weight)
        yield here, logits, transform


def _sums_before(x: torch.Tensor) -> torch.Tensor:
    """Sums [n, K] of the columns before each one, by doubling steps: torch has no deterministic
    cumsum of floats."""
    sums = torch.nn.functional.pad(x, (1, 0))[:, :-1]
    step = 1
    while step < x.shape[1]:
        earlier = torch.nn.functional.pad(sums, (step, 0))[:, :-step]
        sums = sums + earlier
        step *= 2
    return sums


def _merge_ranks(request, packets, keys, rest) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merge the ranks' packets [chunks, 2, N], keys [N, k] and rest [N] -> lse [N], the keys [N, P
    k] and the rest [N, P] of all ranks."""
    (n_rows, k), shard = keys.shape, request.shard
    # keys travel as the bits of two fp32 numbers each, beside the others: one all-gather for all
    parts = packets.flatten(), keys.view(torch.float32).flatten(), rest
    received = gather_from_ranks(torch.cat(parts), shard.group)
    packets, keys, rest = received.split([part.numel() for part in parts], 1)
    packets = packets.reshape(request.facts.packets, 2, n_rows)
    keys = keys.reshape(shard.world_size, n_rows, k, 2).contiguous().view(torch.int64)
    keys = keys.transpose(0, 1).reshape(n_rows, shard.world_size * k)
    shift, sums = eager.merged_sums(packets, request.layout)
    _merged, values, *_flags = eager.finish(shift, sums, request, torch.float32)
    return values[0], keys, rest.t()


def _local_top(logits, k, shard, transform, options):
    """Return the request, this rank's packets [chunks, 2, N], its keys [N, k] and rest [N]."""
    given = Given(logits.detach(), shard=shard, transform=transform, options=options)
    request = build_request(given)
    packets = Transport().write(request).float()
    return request, packets, *_local_keys(request, k)


def _local_top_from_hidden(hidden, weight, k, shard, transform, options):
    """Return what `_local_top` returns for hidden states [.., H] and weight [width, H], a block of
    tokens at a time."""
    step = max(1, BLOCK_ELEMENTS // max(1, weight.shape[0]))
    parts = []
    for _, logits, block_transform in token_blocks(hidden, weight, transform, step):
        request, *part = _local_top(logits, k, shard, block_transform, options)
        parts.append(part)
    packets, keys, rest = zip(*parts)
    return request, torch.cat(packets, -1), torch.cat(keys), torch.cat(rest)


def _local_keys(request, k) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [N, k] of this rank's largest logits: numbers that sort like (logit, -id), so that no
    two are equal. And the log sum exp [N] of its other logits, fp32."""
    logits, width = request.tensors.logits, request.facts.valid_width
    n_rows, device = len(logits), logits.device
    keys = torch.full((n_rows, k), NO_KEY, device=device)
    rest = torch.full((n_rows,), -torch.inf, device=device, dtype=torch.float32)
    if width == 0 or n_rows == 0:
        return keys, rest
    start = request.facts.start
    ids = torch.arange(start, start + width, device=device)
    step, local = max(1, BLOCK_ELEMENTS // width), min(k, width)
    for first in range(0, n_rows, step):
        block = slice(first, first + step)
        z = transformed_logits(request, block).float()
        largest = keys_of(z, ids).topk(local)
        keys[block, :local] = largest.values
        rest[block] = z.scatter(1, largest.indices, -torch.inf).logsumexp(1)
    return keys, rest
