"""`Options(validate="full")`: equal rows of a weight, or equal columns of logits, on two ranks.

Each rank has its own ids, so that equal ones are those of one rank, given to two: a loss that looks
right and is wrong. A few ids tell shards apart. Ranks exchange a checksum of them, see `Agreement`.
"""

import zlib
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch

FIRST_IDS = 8  # of a shard, few of which have fewer
FIRST_TOKENS = 1024  # of logits, and as many numbers of each row of a weight
# argument -> what an error calls it, and what to write
OWN_IDS = {
    "weight": (
        "rows of the weight",
        "were they drawn from one seed? Call reset_parameters(), or pass a generator whose seed "
        "depends on the rank",
    ),
    "logits": (
        "columns of logits",
        "of whole logits pass [..., shard.start:shard.stop]; of a head's, were the rows of its "
        "weight drawn from one seed?",
    ),
    "teacher.weight": (
        "rows of teacher.weight",
        "of a whole one pass its [shard.start:shard.stop]",
    ),
    "teacher.logits": (
        "columns of teacher.logits",
        "of whole ones pass their [..., shard.start:shard.stop]",
    ),
}


def checksums_of_own_ids(facts: dict[str, Any], valid_width: int) -> dict:
    """Return a checksum of the arguments in `OWN_IDS` by name, None where one tells nothing.

    Args:
        facts: arguments of a call by name, as the caller gave them: they may be anything.
        valid_width: number of this rank's ids, without padding.
    """
    return {name: _checksum(columns, valid_width) for name, columns in _columns_of(facts)}


def _columns_of(facts: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield the arguments by name as columns [.., width], None for one that is no plain matrix."""
    inputs = facts.get("inputs") or facts  # of a loss, or of a call for statistics
    teacher = inputs.get("teacher")
    for name in OWN_IDS:
        owner, _, field = name.rpartition(".")
        x = getattr(teacher, field, None) if owner else facts.get(field)
        if not _is_plain(x):
            yield name, None
        elif field == "weight":
            yield name, x.detach().movedim(0, -1)
        else:
            yield name, x.detach()


def _is_plain(x) -> TypeGuard[torch.Tensor]:
    """Return True for a tensor of at least two dimensions whose numbers are in memory."""
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_meta or x.dim() < 2:
        return False
    return x.layout == torch.strided and x.is_floating_point()


def _checksum(columns: torch.Tensor | None, valid_width: int) -> tuple[int, int] | None:
    """Return the number of the first ids, and the checksum of their columns.

    None if they tell nothing: no ids, for each token the same number at all of them (zeros, say, or
    -inf), or NaN.
    """
    if columns is None:
        return None
    first = columns[..., : min(valid_width, FIRST_IDS)].flatten(0, -2)[:FIRST_TOKENS]
    if first.numel() == 0:
        return None
    numbers = first.float()
    differ = numbers.amin(1) < numbers.amax(1)  # False beside a NaN
    if not differ.any():
        return None
    memory = first.cpu().contiguous().reshape(-1).view(torch.uint8)
    return first.shape[1], zlib.crc32(memory.numpy().tobytes())


def expect_own_ids(ranks: list[dict]):
    """Raise ValueError if two ranks have equal rows of a weight, or equal columns of logits.

    ranks: what `checksums_of_own_ids` returned on each, in the order of ranks.
    """
    for name in ranks[0]:
        found = [own[name] for own in ranks]
        for rank, own in enumerate(found):
            first = found.index(own)
            if own is not None and first != rank:
                called, write = OWN_IDS[name]
                raise ValueError(
                    f"each rank must have its own {called}, got equal ones on ranks {first} and "
                    f"{rank} of the group: {write}"
                )
