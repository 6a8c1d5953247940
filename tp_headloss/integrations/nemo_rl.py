"""NeMo-RL's log-probs of vocabulary-sharded logits, one pass and one collective each, with its names and contracts.

Nothing of NeMo-RL is imported, and no process group is looked up: the group is an argument, and None means not sharded.

As in NeMo-RL, the next token is scored: ids [B, S] give log-probs [B, S - 1], whose entry t is the log-prob of id t + 1
in the logits at position t. No temperature is applied, because NeMo-RL divides the logits by it before
(`apply_temperature_scaling`). Unlike in NeMo-RL, log-probs are fp32 for logits of any dtype, without a copy of the
logits; an id of -100 has log-prob 0 and no gradient, and an id outside of the vocabulary has NaN.

With top_k or top_p in sampling_params, log-probs are those over the ids that the rule keeps of these logits, found
without moving any (NeMo-RL sends whole logits by an all-to-all, and needs B S to be a multiple of the group's size).
The rule is exact: of equal logits at top-k's border it keeps the lowest ids, NeMo-RL all of them. A label that is not
kept has a log-prob of -inf and no gradient. With a sampling_mask, NeMo-RL's SamplingMask of the rollout, they are those
over its ids; a token without ids has log-prob 0, and one whose ids lack it NaN (NeMo-RL raises).

chunk_size is accepted because NeMo-RL passes it, and changes nothing: the fp32 copies that it bounds are never made.
Context parallelism is refused with a ValueError.
"""

from __future__ import annotations

import torch

from ..api import log_probs, vocab_statistics
from ..comm import sum_over_ranks
from ..dtensor import is_dtensor, local_logits, local_part
from ..linear_head import Linear, linear_vocab_statistics
from ..shard import VocabShard
from .nemo_rl_sampling import kept_by, log_probs_over

IGNORED_LABEL = -100
SEQUENCE_PARALLEL = Linear(hidden_grad="reduce_scatter")


def get_next_token_logprobs_from_logits(
    input_ids: torch.Tensor,
    next_token_logits: torch.Tensor,
    seq_index: torch.Tensor | None = None,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group=None,
    context_parallel_group=None,
    sampling_params=None,
    chunk_size: int | None = None,
    cp_sharder=None,
    *,
    sampling_mask=None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Return the log-probs [B, S - 1] fp32 of the next tokens, replicated.

    Args:
        input_ids: [B, S] replicated.
        next_token_logits: [B, S or more, V/P] sharded on V in even shards of vocab_parallel_group, a DTensor, or
            without a group the whole vocabulary.
        sampling_params: NeMo-RL's TrainingSamplingParams, another object with top_k and top_p, or a mapping of its
            fields. A temperature is not applied.
        sampling_mask: NeMo-RL's SamplingMask of the tokens, token_ids [B, S, K] and sizes [B, S], or the batch that has
            it, in the place of top_k and top_p, which are not looked at then.
        seq_index, cp_sharder: None. context_parallel_group: None, or a group of one rank.
        vocab_size: number of ids of the tokenizer, not the padded number of columns: columns at or beyond it are
            padding, and do not enter the softmax. None, or the padded number: all columns do, as in NeMo-RL.

    Raises:
        TypeError: sampling_params of another class.
        ValueError: vocab_parallel_rank is not this rank of the group, or an argument asks for something unsupported.
        Both: as `log_probs`.
    """
    _refuse(context_parallel_group, seq_index=seq_index, cp_sharder=cp_sharder)
    kept = kept_by(sampling_params, sampling_mask)
    logits, shard = _even_shard(next_token_logits, vocab_parallel_rank, vocab_parallel_group, vocab_size)
    return _next_token_log_probs(logits, input_ids, shard, kept)


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group,
    inference_only: bool = False,
    cp_group=None,
    chunk_size: int | None = None,
    sampling_params=None,
    *,
    sampling_mask=None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Return the log-probs [B, S - 1] fp32 of the next tokens, replicated, from logits of shards of any bounds.

    Args:
        vocab_parallel_logits: [B, S or more, width] of ids [vocab_start_index, vocab_end_index).
        target: [B, S] replicated, not shifted.
        tp_group: group that shares the vocabulary; None: one rank has all of it.
        inference_only: True: nothing is saved for a backward, and the result has no gradient.
        vocab_size, sampling_params, sampling_mask, cp_group: as in `get_next_token_logprobs_from_logits`, errors, too.
    """
    _refuse(cp_group)
    kept = kept_by(sampling_params, sampling_mask)
    # vocab_size only says where padding begins, so without one the end of this shard will do
    vocab_size = max(vocab_end_index, 1) if vocab_size is None else vocab_size
    shard = VocabShard(vocab_start_index, vocab_end_index, vocab_size, tp_group)
    return _next_token_log_probs(vocab_parallel_logits, target, shard, kept, inference_only)


def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states: torch.Tensor,
    output_weight_layer: torch.Tensor,
    runtime_gather_output: bool | None,
    target: torch.Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group,
    inference_only: bool = False,
    cp_group=None,
    chunk_size: int | None = None,
    *,
    vocab_size: int | None = None,
    linear: Linear = SEQUENCE_PARALLEL,
) -> torch.Tensor:
    """Return the log-probs [B, S - 1] fp32 of the next tokens, replicated, from hidden states, without logits.

    Args:
        tensor_parallel_hidden_states: [S/P, B, H], this rank's part of the sequence (sequence parallelism). They are
            gathered, and their gradient is summed over tp_group and scattered, as in NeMo-RL. With another
            ``linear.hidden_grad`` they are [S, B, H] replicated.
        output_weight_layer: [V/P, H] sharded on V in even shards.
        runtime_gather_output: None or False; ValueError for True.
        target: [B, S] replicated, not shifted.
        linear: `Linear`; blocks of logits have ``linear.budget`` bytes, not chunk_size tokens.
        tp_group, inference_only, cp_group, vocab_size: as in `from_parallel_logits_to_logprobs`.
    """
    _refuse(cp_group, runtime_gather_output=runtime_gather_output or None)
    size = 1 if tp_group is None else tp_group.size()
    shard = VocabShard(
        vocab_start_index,
        vocab_end_index,
        (vocab_end_index - vocab_start_index) * size if vocab_size is None else vocab_size,
        tp_group,
    )
    scattered = linear.hidden_grad == "reduce_scatter" and not is_dtensor(tensor_parallel_hidden_states)
    length = tensor_parallel_hidden_states.shape[0] * (
        size if scattered else 1
    )  # the shape of a DTensor is that of all ranks
    labels = _next_tokens(local_part(target, shard), length, output_weight_layer.device)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        stats = linear_vocab_statistics(
            tensor_parallel_hidden_states, output_weight_layer, labels.t(), shard=shard, linear=linear
        )
    return stats.log_prob.t()[:, : target.shape[1] - 1]


def get_distillation_topk_logprobs_from_logits(
    student_logits: torch.Tensor,
    teacher_topk_logits: torch.Tensor,
    teacher_topk_indices: torch.Tensor,
    zero_outside_topk: bool,
    calculate_entropy: bool,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group=None,
    context_parallel_group=None,
    cp_sharder=None,
    *,
    vocab_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the log-probs at a teacher's K ids, without the last position: the student's [B, S - 1, K], the teacher's
    [B, S - 1, K], and H_all [B, S - 1] = sum p log p (NeMo-RL's sign), or None.

    Results are fp32, replicated, and differentiable in the student; nothing is shifted. Forward: one all-gather of K
    numbers per token, and with zero_outside_topk or calculate_entropy one pass over the logits and its collective. A
    backward holds up to three gradients as large as the logits, because autograd adds the K entries' to the others;
    `TopKDistillation`, which computes the loss itself, holds one. Gradients of duplicate ids add up in fp32. An id
    outside of the vocabulary makes its entry NaN.

    Args:
        student_logits: [B, S, V/P] sharded on V, as in `get_next_token_logprobs_from_logits`.
        teacher_topk_logits, teacher_topk_indices: [B, S, K] replicated; the teacher is normalised over the K ids.
        zero_outside_topk: True: the student is normalised over the whole vocabulary, else over the K ids.
        calculate_entropy: True returns H_all.

    Raises ValueError for shapes that do not fit, for K = 0, and as `get_next_token_logprobs_from_logits`.
    """
    _refuse(context_parallel_group, cp_sharder=cp_sharder)
    logits, shard = _even_shard(student_logits, vocab_parallel_rank, vocab_parallel_group, vocab_size)
    shape = teacher_topk_indices.shape
    if shape != teacher_topk_logits.shape or shape[:-1] != logits.shape[:-1] or shape[-1] == 0:
        raise ValueError(
            f"teacher_topk_logits and teacher_topk_indices must be [B, S, K] with [B, S] = {list(logits.shape[:-1])} "
            f"and K > 0, got {list(teacher_topk_logits.shape)} and {list(shape)}"
        )
    ids = local_part(teacher_topk_indices, shard).to(logits.device, torch.int64)
    student, entropy = _logits_at(logits, ids, shard), None
    if zero_outside_topk or calculate_entropy:
        stats = vocab_statistics(logits, shard=shard, want=("entropy",) if calculate_entropy else ())
        entropy = -stats.entropy[:, :-1] if calculate_entropy else None
    student = student - stats.lse.unsqueeze(-1) if zero_outside_topk else student.log_softmax(-1)
    teacher = local_part(teacher_topk_logits, shard).to(logits.device, student.dtype).log_softmax(-1)
    return student[:, :-1], teacher[:, :-1], entropy


class _SumOverRanks(torch.autograd.Function):
    """Sum [..] over the ranks of a group. Ranks have equal upstream gradients, each the gradient of its own part."""

    @staticmethod
    def forward(ctx, x, group):
        return sum_over_ranks(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _logits_at(logits, ids, shard) -> torch.Tensor:
    """Logits at ids [B, S, K] of the whole vocabulary, fp32 or float64, replicated and differentiable."""
    # only the first of equal ids reads the logits, so that the gradients of equal ids are added in fp32
    ordered, order = ids.sort(dim=-1, stable=True)
    first = order.gather(-1, torch.searchsorted(ordered, ids))
    owned = (ids >= shard.start) & (ids < shard.start + shard.valid_width)
    columns = torch.where(owned, ids - shard.start, 0)
    if shard.width == 0:
        own = logits.sum(-1, keepdim=True).expand(ids.shape)
    else:
        own = logits.gather(-1, columns)
    own = torch.where(owned, own.to(torch.promote_types(own.dtype, torch.float32)).gather(-1, first), 0.0)
    whole = _SumOverRanks.apply(own, shard.group)
    return whole.masked_fill((ids < 0) | (ids >= shard.vocab_size), torch.nan)


def _next_token_log_probs(logits, ids, shard, kept, inference_only=False) -> torch.Tensor:
    """Log-probs [B, S - 1] of the ids [B, S] in the logits of the position before each; kept: see `kept_by`."""
    ids = local_part(ids, shard)
    labels = _next_tokens(ids, logits.shape[1], logits.device)
    if kept is None:
        result = log_probs(logits, labels, shard=shard, entropy=False, differentiable=not inference_only).log_prob
    else:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            result = log_probs_over(kept, logits, labels, shard)
    return result[:, : ids.shape[1] - 1]


def _next_tokens(ids, length: int, device) -> torch.Tensor:
    """Labels [B, length] for all positions of the logits, so that no logits need to be cut: the ids [B, S] shifted by
    one to the left, then -100."""
    if ids.dim() != 2 or not 1 <= ids.shape[1] <= length:
        raise ValueError(f"ids must be [B, S] with S of at most the logits' {length} positions, got {list(ids.shape)}")
    labels = torch.full((ids.shape[0], length), IGNORED_LABEL, dtype=torch.int64, device=device)
    labels[:, : ids.shape[1] - 1] = ids[:, 1:]
    return labels


def _even_shard(logits, rank, group, vocab_size) -> tuple[torch.Tensor, VocabShard]:
    """Return this rank's plain logits and its shard: an even one of the group, a DTensor's, or the whole vocabulary."""
    if (rank is None) != (group is None):
        raise ValueError(f"vocab_parallel_rank and vocab_parallel_group belong together, got {rank} and {group!r}")
    if group is not None:
        columns = logits.shape[-1] * group.size()
        shard = VocabShard.from_group(group, columns if vocab_size is None else vocab_size, columns)
        if shard.start != rank * logits.shape[-1]:
            raise ValueError(f"vocab_parallel_rank must be this rank of vocab_parallel_group, got {rank}")
        return local_logits(logits, shard)
    columns = logits.shape[-1]
    logits, shard = local_logits(logits, None)
    return logits, VocabShard.from_group(shard.group, columns if vocab_size is None else vocab_size, columns)


def _refuse(context_parallel_group, **others):
    """Raise ValueError for arguments that would otherwise be ignored."""
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name} is not supported here: pass None, got {type(value).__name__}")
    if context_parallel_group is not None and context_parallel_group.size() > 1:
        raise ValueError(
            f"a context-parallel group of {context_parallel_group.size()} ranks is not supported: score each rank's "
            "tokens with tp_headloss.log_probs, and labels that were shifted before the sequence was split"
        )
