"""Numbers of labelled tokens: those that a head drops all others for, and those that hosts divide a
loss by."""

from __future__ import annotations

import torch

from ..head_loss import HeadLoss
from ..ranks.comm import gather_parts
from ..ranks.shard import VocabShard

# odd factors, which lose no bit of an int64
OF_LABEL, OF_POSITION, OF_SUM = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB


def agreed_count(labels: torch.Tensor, ignore_index: int, shard: VocabShard) -> int:
    """Return how many labels [..] are not ignored. The host waits for the device.

    It is for `Linear.max_valid_tokens`, with which each rank drops tokens by its own labels. Were
    those of two ranks to differ, ranks would merge statistics of different tokens (numbers, and no
    error), or exchange different numbers of them. So ranks of the shard's group compare their
    labels first, by one all-gather of three numbers. ValueError on every rank, if two differ.
    """
    valid = (labels != ignore_index).sum()
    if shard.world_size == 1:
        return int(valid)
    size = torch.full_like(valid, labels.numel())
    own = torch.stack([size, valid, _checksum(labels)])
    ranks = gather_parts(own[None], shard.world_size, shard.group_name).tolist()
    for rank, found in enumerate(ranks):
        if found != ranks[0]:
            raise ValueError(
                "ranks that share a vocabulary must have the same tokens and labels, got "
                f"{ranks[0][1]} labels of {ranks[0][0]} tokens on rank 0 of the group and "
                f"{_counts(found, ranks[0])} on rank {rank}: give all ranks of a tensor-parallel "
                "model the same batches and, where they sample texts, the same seed"
            )
    return ranks[0][1]


def _counts(found: list[int], first: list[int]) -> str:
    """Return the numbers of a rank in words; equal ones hide other labels."""
    other = "other labels, " if found[:2] == first[:2] else ""
    return f"{other}{found[1]} labels of {found[0]} tokens"


def expect_mean_over_tokens(head_loss: HeadLoss, count: str, remedy: str):
    """Raise ValueError for a HeadLoss that divides by something else than the number of tokens,
    where a host gives that as the denominator.

    Args:
        count: the host's name for the number.
        remedy: what to write.
    """
    divisor = None
    if head_loss.reduction.startswith("seq-"):
        divisor = f"reduction={head_loss.reduction!r} divides by sequences"
    if head_loss.reduction == "sum":
        divisor = "reduction='sum' divides by nothing, as reduction='mean' does by this count"
    weighted = [term.name for term in head_loss.terms if term.token_weight is not None]
    if weighted:
        divisor = f"terms {weighted} divide by the sum of their tokens' weights (class_weight)"
    if divisor is not None:
        raise ValueError(f"{count} counts tokens, and {divisor}: {remedy}")


def _checksum(labels: torch.Tensor) -> torch.Tensor:
    """Return a sum [] of int64 numbers that labels and their positions decide."""
    flat = labels.flatten().long()
    position = torch.arange(flat.numel(), device=flat.device)
    mixed = flat * OF_LABEL + position * OF_POSITION
    return ((mixed ^ (mixed >> 29)) * OF_SUM).sum()
