"""NeMo-RL's log-probs at a teacher's K ids."""

from __future__ import annotations

import torch

from ..call.dtensor import local_part
from ..call.statistics import vocab_statistics
from ..engine.autograd import FromShards, reduction_over
from ..spec import Absent, Count, Floating, Ids, Logits, checked
from .rl_tokens import CpGroup, RankedTokens, TpGroup, VocabSize, even_shard_of_rank, refuse


@checked
def get_distillation_topk_logprobs_from_logits(
    student_logits: Logits,
    teacher_topk_logits: Floating,
    teacher_topk_indices: Ids,
    zero_outside_topk: bool,
    calculate_entropy: bool,
    vocab_parallel_rank: Count | None = None,
    vocab_parallel_group: TpGroup = None,
    context_parallel_group: CpGroup = None,
    cp_sharder: Absent = None,
    *,
    vocab_size: VocabSize | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the log-probs at a teacher's K ids, without the last position: the student's [B, S -
    1, K], the teacher's [B, S - 1, K], and H_all [B, S - 1] = sum p log p (NeMo-RL's sign), or
    None.

    Results are fp32, replicated, and differentiable in the student; nothing is shifted. Forward:
    one all-gather of K numbers per token, and with zero_outside_topk or calculate_entropy one pass
    over the logits and its collective. A backward holds up to three gradients as large as the
    logits, because autograd adds the K entries' to the others; `TopKDistillation`, the whole loss,
    holds one. Gradients of duplicate ids add up in fp32; an unknown id is NaN.

    Args:
        student_logits: [B, S, V/P] sharded on V, under context parallelism [B, L, V/P], as in
            `get_next_token_logprobs_from_logits`.
        teacher_topk_logits, teacher_topk_indices: [B, S, K] replicated; the teacher is normalised
            over the K ids.
        zero_outside_topk: True: the student is normalised over the whole vocabulary, else over the
            K ids.

    Raises ValueError for shapes that do not fit, for K = 0, and as
    `get_next_token_logprobs_from_logits`.
    """
    refuse(cp_sharder=cp_sharder)
    logits, shard = even_shard_of_rank(
        student_logits, vocab_parallel_rank, vocab_parallel_group, vocab_size
    )
    tokens = RankedTokens(logits, context_parallel_group, shard.group)
    shape, positions = teacher_topk_indices.shape, tokens.total
    fits = len(shape) == 3 and shape[0] == len(logits) and shape[-1] > 0
    # under context parallelism sequences may be padded beyond the teacher's
    fits = fits and (shape[1] == positions or (shape[1] < positions and tokens.ranks > 1))
    if not fits or shape != teacher_topk_logits.shape:
        raise ValueError(
            "teacher_topk_logits and teacher_topk_indices must be [B, S, K] with [B, S] = "
            f"{[len(logits), positions]} and K > 0, got {list(teacher_topk_logits.shape)} and "
            f"{list(shape)}"
        )
    ids = local_part(teacher_topk_indices, shard).to(logits.device, torch.int64)
    ids = tokens.take(torch.nn.functional.pad(ids, (0, 0, 0, positions - shape[1])))
    student, entropy = _logits_at(logits, ids, shard), None
    if zero_outside_topk or calculate_entropy:
        stats = vocab_statistics(
            logits, shard=shard, want=("entropy",) if calculate_entropy else ()
        )
        entropy = -tokens.join(stats.entropy)[:, : shape[1] - 1] if calculate_entropy else None
    student = student - stats.lse.unsqueeze(-1) if zero_outside_topk else student.log_softmax(-1)
    teacher = (
        local_part(teacher_topk_logits, shard)
        .detach()
        .to(logits.device, student.dtype)
        .log_softmax(-1)
    )
    return tokens.join(student)[:, : shape[1] - 1], teacher[:, :-1], entropy


def _logits_at(logits, ids, shard) -> torch.Tensor:
    """Logits at ids [B, S, K] of the whole vocabulary, fp32 or float64, replicated and
    differentiable."""
    # only the first of equal ids reads the logits, so that the gradients of equal ids are added in
    # fp32
    ordered, order = ids.sort(dim=-1, stable=True)
    first = order.gather(-1, torch.searchsorted(ordered, ids))
    owned = (ids >= shard.start) & (ids < shard.start + shard.valid_width)
    columns = torch.where(owned, ids - shard.start, 0)
    if shard.width == 0:
        own = logits.sum(-1, keepdim=True).expand(ids.shape)
    else:
        own = logits.gather(-1, columns)
    own = torch.where(
        owned, own.to(torch.promote_types(own.dtype, torch.float32)).gather(-1, first), 0.0
    )
    # all but one rank have 0
    whole = FromShards.apply(own, *reduction_over(shard, "all_reduce"))
    return whole.masked_fill((ids < 0) | (ids >= shard.vocab_size), torch.nan)
