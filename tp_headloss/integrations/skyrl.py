"""SkyRL's functions of vocabulary-sharded logits and hidden states, with its names and signatures.

Nothing of SkyRL is imported, and no process group is looked up: the group is an argument, and None
means not sharded. `from_parallel_logits_to_logprobs` is NeMo-RL's, of which SkyRL's is a copy. As
there, ids [B, S] give the log-probs [B, S - 1] of next tokens, and a temperature was applied
before. chunk_size, chunk_memory_mb, fused_backend do nothing.

Unlike in SkyRL, results are fp32 for logits of any dtype (float64 for float64); a label of -100 has
log-prob 0 and no gradient, and an id outside of the vocabulary has NaN; the entropies of hidden
states are differentiable.

With context-parallel ranks, tokens are laid out as NeMo-RL's module says. As in SkyRL, the gradient
of packed log-probs is this rank's own (a schedule multiplies by their number, an average divides);
that of unpacked ones is the sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import torch

from ..call.statistics import vocab_statistics
from ..linear_head import Linear
from ..ranks.comm import group_size, sum_over_ranks
from ..spec import (
    CheckedBy,
    Count,
    Floating,
    Ids,
    Logits,
    PositiveFp32,
    Real,
    Rows,
    Size,
    TensorLine,
    checked,
)
from . import refuse_other_names
from .nemo_rl import from_parallel_logits_to_logprobs
from .rl_tokens import (
    UNREDUCED_HIDDEN_GRAD,
    CpGroup,
    InferenceOnly,
    PackedTokens,
    RankedTokens,
    TokensNotShifted,
    TpGroup,
    VocabSize,
    bounded_shard,
    even_shard,
    head_scorer,
    own_size,
    shard_of_columns,
)
from .skyrl_draft import draft_soft_ce, draft_soft_ce_topk

__all__ = [
    "draft_soft_ce",
    "draft_soft_ce_topk",
    "from_parallel_hidden_to_entropy_packed_sequences",
    "from_parallel_hidden_to_logprobs",
    "from_parallel_hidden_to_logprobs_packed_sequences",
    "from_parallel_logits_to_logprobs",
    "from_parallel_logits_to_logprobs_packed_sequences",
    "vocab_parallel_entropy_packed_sequences",
]
if not TYPE_CHECKING:  # to which a module with it would have every name
    __getattr__ = refuse_other_names(__name__, __all__)
SequenceLengths: TypeAlias = Annotated[Any, CheckedBy("lists of lengths, or None")]
Attended: TypeAlias = Annotated[torch.Tensor, TensorLine("bool or integers", None)]


@checked
def from_parallel_logits_to_logprobs_packed_sequences(
    vocab_parallel_logits: Logits,
    target: Ids,
    cu_seqlens_padded: Ids,
    unpacked_seqlen: Size,
    vocab_start_index: Count,
    vocab_end_index: Count,
    group: TpGroup,
    inference_only: InferenceOnly = False,
    cp_group: CpGroup = None,
    chunk_size: int | None = None,
    attention_mask: Attended | None = None,
    sub_seq_lengths: SequenceLengths = None,
    *,
    vocab_size: VocabSize | None = None,
) -> torch.Tensor:
    """Return the log-probs [B, unpacked_seqlen - 1] fp32 of the next tokens of packed sequences,
    replicated.

    Args:
        vocab_parallel_logits: [1, T/C, width] of ids [start index, end index), with C
            context-parallel ranks.
        target: [1, T] replicated, not shifted.
        cu_seqlens_padded: [sequences + 1] the first token of each sequence, and T.
        attention_mask: [B, unpacked_seqlen] where tokens were before packing, and go back to; None:
            from column 0 on.
        sub_seq_lengths: for each row the lengths of its sequences, without padding; they follow
            each other in the row, with it, and a row that is too long is cut. The attention_mask is
            not looked at then.

    Raises:
        ValueError: shapes that do not fit. Bounds that do not fit are one on CPUs; on GPUs all
            results are NaN.
    """
    logits, bounds = vocab_parallel_logits, (vocab_start_index, vocab_end_index)
    shard = bounded_shard(own_size(logits, -1), *bounds, group, vocab_size)
    packed = _packed(
        logits, cu_seqlens_padded, unpacked_seqlen, cp_group, group, attention_mask, sub_seq_lengths
    )
    return packed.log_probs(
        lambda labels: vocab_statistics(logits, labels, shard=shard).log_prob,
        target,
        inference_only,
    )


@checked
def from_parallel_hidden_to_logprobs(
    hidden: Floating,
    lm_head_weight: Rows,
    target: TokensNotShifted,
    vocab_start_index: Count,
    vocab_end_index: Count,
    tp_group: TpGroup,
    inference_only: InferenceOnly = False,
    cp_group: CpGroup = None,
    chunk_size: int | None = None,
    temperature: PositiveFp32 = 1.0,
    fused_backend: str = "torch",
    *,
    vocab_size: VocabSize | None = None,
    linear: Linear = UNREDUCED_HIDDEN_GRAD,
) -> torch.Tensor:
    """Return the log-probs [B, S - 1] fp32 of the next tokens, replicated, from hidden states,
    without logits.

    Args:
        hidden: [B, S or more, H] (with C context-parallel ranks [B, L, H], C L at least S),
            replicated over tp_group.
        lm_head_weight: [width, H] of ids [vocab_start_index, vocab_end_index).
        linear: `Linear`. By default the gradient of hidden is this rank's part, which SkyRL's
            gather sums backward.
    """
    size, bounds = own_size(lm_head_weight, 0), (vocab_start_index, vocab_end_index)
    shard = bounded_shard(size, *bounds, tp_group, vocab_size, device=lm_head_weight.device)
    score = head_scorer(hidden, lm_head_weight, shard, temperature, linear)
    tokens = RankedTokens(hidden, cp_group, tp_group)
    return tokens.next_log_probs(lambda labels: score(labels).log_prob, target, inference_only)


@checked
def from_parallel_hidden_to_logprobs_packed_sequences(
    hidden: Floating,
    lm_head_weight: Rows,
    target: Ids,
    cu_seqlens_padded: Ids,
    unpacked_seqlen: Size,
    vocab_start_index: Count,
    vocab_end_index: Count,
    group: TpGroup,
    inference_only: InferenceOnly = False,
    cp_group: CpGroup = None,
    chunk_size: int | None = None,
    attention_mask: Attended | None = None,
    sub_seq_lengths: SequenceLengths = None,
    temperature: PositiveFp32 = 1.0,
    fused_backend: str = "torch",
    *,
    vocab_size: VocabSize | None = None,
    linear: Linear = UNREDUCED_HIDDEN_GRAD,
) -> torch.Tensor:
    """Return the log-probs of `from_parallel_logits_to_logprobs_packed_sequences` from hidden
    states [1, T/C, H]; other arguments as there and in `from_parallel_hidden_to_logprobs`."""
    size, bounds = own_size(lm_head_weight, 0), (vocab_start_index, vocab_end_index)
    shard = bounded_shard(size, *bounds, group, vocab_size, device=lm_head_weight.device)
    score = head_scorer(hidden, lm_head_weight, shard, temperature, linear)
    packed = _packed(
        hidden, cu_seqlens_padded, unpacked_seqlen, cp_group, group, attention_mask, sub_seq_lengths
    )
    return packed.log_probs(lambda labels: score(labels).log_prob, target, inference_only)


@checked
def vocab_parallel_entropy_packed_sequences(
    vocab_parallel_logits: Logits,
    cu_seqlens_padded: Ids,
    unpacked_seqlen: Size,
    num_actions: Size,
    attention_mask: Attended,
    loss_mask: Real | None,
    cp_group: CpGroup,
    sub_seq_lengths: SequenceLengths = None,
    chunk_size: int | None = None,
    chunk_memory_mb: int = 512,
    *,
    tp_group: TpGroup,
    vocab_size: VocabSize | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean entropy of packed action tokens over all context-parallel ranks, sum(w e) /
    max(sum(w), 1), without a gradient, and this rank's part of it, differentiable; scalars, fp32. e
    is the entropy of the logits that predict a token, w the token's weight, 0 for tokens that are
    not attended to.

    Args:
        vocab_parallel_logits: [1, T/C, V/P].
        num_actions: how many tokens count at the end of each row of
            `from_parallel_logits_to_logprobs_packed_sequences`.
        loss_mask: [B, num_actions] their weights; None: all 1.
        Others: as in `from_parallel_logits_to_logprobs_packed_sequences`.
    """
    logits, shard = even_shard(vocab_parallel_logits, tp_group, vocab_size)
    packed = _packed(
        logits,
        cu_seqlens_padded,
        unpacked_seqlen,
        cp_group,
        tp_group,
        attention_mask,
        sub_seq_lengths,
    )
    entropy = vocab_statistics(logits, shard=shard, want=("entropy",)).entropy
    return _mean_over_actions(entropy, packed, num_actions, loss_mask)


@checked
def from_parallel_hidden_to_entropy_packed_sequences(
    hidden: Floating,
    lm_head_weight: Rows,
    cu_seqlens_padded: Ids,
    unpacked_seqlen: Size,
    num_actions: Size,
    attention_mask: Attended,
    loss_mask: Real | None,
    cp_group: CpGroup,
    tp_group: TpGroup,
    sub_seq_lengths: SequenceLengths = None,
    chunk_size: int | None = None,
    temperature: PositiveFp32 = 1.0,
    *,
    vocab_size: VocabSize | None = None,
    linear: Linear = UNREDUCED_HIDDEN_GRAD,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entropies of `vocab_parallel_entropy_packed_sequences` from hidden states [1, T/C,
    H] and the weight [V/P, H], sharded on V in even shards; other arguments as there and in
    `from_parallel_hidden_to_logprobs`."""
    shard = shard_of_columns(lm_head_weight.shape[0] * group_size(tp_group), tp_group, vocab_size)
    score = head_scorer(hidden, lm_head_weight, shard, temperature, linear)
    packed = _packed(
        hidden,
        cu_seqlens_padded,
        unpacked_seqlen,
        cp_group,
        tp_group,
        attention_mask,
        sub_seq_lengths,
    )
    return _mean_over_actions(
        score(None, want=("entropy",)).entropy, packed, num_actions, loss_mask
    )


def _packed(x, cu_seqlens, width, cp_group, group, attention_mask, sub_seq_lengths) -> PackedTokens:
    packed = PackedTokens(x, cp_group, group, cu_seqlens, width, sum_gradients=False)
    packed.place(attention_mask, sub_seq_lengths)
    return packed


def _mean_over_actions(entropy, packed: PackedTokens, num_actions, loss_mask):
    """Mean of entropies [1, T/C] over the last num_actions places of each row, of all ranks; and
    this rank's part."""
    weights = packed.weights(num_actions, loss_mask, entropy.dtype)
    own = (entropy.squeeze(0) * weights).sum()
    total, count = sum_over_ranks(torch.stack([own.detach(), weights.sum()]), packed.group)
    count = count.clamp(min=1.0)
    return total / count, own / count
