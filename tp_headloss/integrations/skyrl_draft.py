"""SkyRL's losses of a draft head (multi-token prediction) that the policy's own logits teach; see
`skyrl`."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import torch

from ..arguments.teachers import Teacher, TopKTeacher
from ..call.statistics import vocab_statistics
from ..ranks.comm import gather_from_ranks
from ..ranks.shard import VocabShard
from ..search.topk import topk_log_probs
from ..spec import Scalar, Size, TensorLine, checked
from .rl_tokens import TpGroup, VocabSize, bounded_shard

StudentLogits: TypeAlias = Annotated[
    torch.Tensor, TensorLine("floating point", ("B", "S", "width"), sharded=-1)
]
TeacherLogits: TypeAlias = Annotated[
    torch.Tensor, TensorLine("floating point", None, constant=True)
]
Mask: TypeAlias = Annotated[
    torch.Tensor, TensorLine("real numbers", ("B", "S")), "Weights of tokens"
]


@checked
def draft_soft_ce(
    student_logits: StudentLogits,
    teacher_logits: TeacherLogits,
    mask: Mask,
    global_normalization_factor: Scalar | float | None = None,
    vocab_parallel_group: TpGroup = None,
    chunk_size: int | None = None,
    *,
    vocab_size: VocabSize | None = None,
) -> torch.Tensor:
    """Return the soft cross-entropy -sum softmax(teacher) log softmax(student) of a draft head, a
    mean over the mask.

    Args:
        student_logits, teacher_logits: [B, S, width] sharded on V over vocab_parallel_group, or
            without one the whole vocabulary. The teacher's require no gradient. Shards may be cut
            where padding begins, as SkyRL's are.
        global_normalization_factor: scalar instead of the mask's sum; both are at least 1.

    Examples:
        >>> student, teacher = torch.zeros(1, 1, 4), torch.tensor([[[1.0, 0.0, 0.0, 0.0]]])
        >>> draft_soft_ce(student, teacher, torch.ones(1, 1))  # log 4: the student is uniform
        tensor(1.3863)
    """
    width, rank = (
        student_logits.shape[-1],
        0 if vocab_parallel_group is None else vocab_parallel_group.rank(),
    )
    # no label asks for ids
    shard = bounded_shard(width, rank * width, (rank + 1) * width, vocab_parallel_group, vocab_size)
    stats = vocab_statistics(
        student_logits,
        shard=shard,
        want=("forward_kl", "teacher_entropy"),
        teacher=Teacher(teacher_logits),
    )
    return _mean(stats.forward_kl + stats.teacher_entropy, mask, global_normalization_factor)


@checked
def draft_soft_ce_topk(
    student_logits: StudentLogits,
    teacher_logits: TeacherLogits,
    mask: Mask,
    k: Size,
    global_normalization_factor: Scalar | float | None = None,
    vocab_parallel_group: TpGroup = None,
    roll_shift: int = 0,
    *,
    vocab_size: VocabSize | None = None,
) -> torch.Tensor:
    """Return `draft_soft_ce` over the teacher's k likeliest ids, over which both are renormalised.

    These are k ids of the whole vocabulary at any number of ranks; SkyRL takes the k likeliest of
    each shard, so that its loss depends on the number of ranks. The shards' widths are gathered,
    for which the host waits.

    Args:
        k: ids per token, at least 1; all of them if there are fewer.
        roll_shift: teacher_logits are of the tokens as they are, and the teacher of token t is the
            one at t + roll_shift, around the end (SkyRL's mask leaves those out).
        student_logits, teacher_logits, global_normalization_factor: as in `draft_soft_ce`.

    Examples:
        >>> student, teacher = torch.zeros(1, 1, 4), torch.tensor([[[1.0, 2.0, 0.0, 0.0]]])
        >>> draft_soft_ce_topk(student, teacher, torch.ones(1, 1), 2)  # log 2
        tensor(0.6931)
    """
    width = torch.tensor([student_logits.shape[-1]], device=student_logits.device)
    widths = gather_from_ranks(width, vocab_parallel_group).flatten().tolist()
    rank = 0 if vocab_parallel_group is None else vocab_parallel_group.rank()
    start = sum(widths[:rank])
    known = sum(widths) if vocab_size is None else vocab_size
    shard = VocabShard(start, start + widths[rank], known, vocab_parallel_group)
    top = topk_log_probs(teacher_logits, min(k, shard.vocab_size), shard=shard)
    ids, log_probs = (x.roll(-roll_shift, 1) for x in (top.ids, top.log_probs))
    log_tau = log_probs.log_softmax(-1)
    stats = vocab_statistics(
        student_logits,
        shard=shard,
        want=("topk_forward_kl",),
        teacher=TopKTeacher(ids, log_tau, renormalize=False),
    )
    entropy = -torch.where(log_tau == -torch.inf, 0.0, log_tau.exp() * log_tau).sum(-1)
    return _mean(stats.topk_forward_kl + entropy, mask, global_normalization_factor)


def _mean(values, mask, factor):
    """Mean of values [B, S] by SkyRL's weights and divisor."""
    total = mask.sum()
    total = total if factor is None else torch.as_tensor(factor, device=values.device)
    return (values * mask).sum() / total.clamp(min=1.0)
