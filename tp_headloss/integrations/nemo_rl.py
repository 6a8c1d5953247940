"""NeMo-RL's log-probs of vocabulary-sharded logits, one pass and one collective each, with its
names and contracts.

Nothing of NeMo-RL is imported, and no process group is looked up: the group is an argument, and
None means not sharded.

As in NeMo-RL, the next token is scored: ids [B, S] give log-probs [B, S - 1], whose entry t is the
log-prob of id t + 1 in the logits at position t. No temperature is applied, because NeMo-RL divides
the logits by it before (`apply_temperature_scaling`). Unlike in NeMo-RL, log-probs are fp32 for
logits of any dtype (float64 for float64), without a copy of the logits, so that chunk_size changes
nothing; an id of -100 has log-prob 0 and no gradient, and one outside of the vocabulary has NaN.

With top_k or top_p in sampling_params, log-probs are those over the ids that the rule keeps of
these logits, found without moving any (NeMo-RL sends whole logits by an all-to-all, and needs B S
to be a multiple of the group's size). The rule is exact: of equal logits at top-k's border it keeps
the lowest ids, NeMo-RL all of them. A label that is not kept has a log-prob of -inf and no
gradient. With a sampling_mask, NeMo-RL's SamplingMask of the rollout, they are those over its ids;
a token without ids has log-prob 0, and one whose ids lack it NaN (NeMo-RL raises).

With a context-parallel group of C ranks, rank r has the logits of L positions of sequences of C L,
padding included: the chunks r and 2 C - 1 - r of 2 C equal ones. Ids and results are those of all
positions, on every rank, and log-probs are all that is gathered. As in NeMo-RL, the gradient of the
logits is that of the sum of the C ranks' losses; where every rank computes the same loss from the
same log-probs, divide it by C.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import torch

from ..arguments.id_sets import IdSets
from ..call.dtensor import local_part
from ..call.subclasses import is_dtensor
from ..linear_head import Linear, linear_vocab_statistics
from ..ranks.comm import group_size
from ..ranks.groups import Group
from ..spec import Absent, CheckedBy, Count, Floating, Ids, Logits, Rows, Size, checked
from . import refuse_other_names
from .nemo_rl_distillation import get_distillation_topk_logprobs_from_logits
from .nemo_rl_full_vocabulary import (
    prepare_opd_full_loss_input,
    prepare_opd_full_loss_input_from_hidden_states,
)
from .nemo_rl_sampling import kept_by, log_probs_over, sets_of_next_tokens
from .rl_tokens import (
    CpGroup,
    InferenceOnly,
    PackedTokens,
    RankedTokens,
    TokensNotShifted,
    TpGroup,
    VocabSize,
    bounded_shard,
    even_shard_of_rank,
    expect_tokens_first,
    next_tokens,
    own_size,
    refuse,
)

__all__ = [
    "from_parallel_hidden_states_to_logprobs",
    "from_parallel_logits_to_logprobs",
    "from_parallel_logits_to_logprobs_packed_sequences",
    "get_distillation_topk_logprobs_from_logits",
    "get_next_token_logprobs_from_logits",
    "prepare_opd_full_loss_input",
    "prepare_opd_full_loss_input_from_hidden_states",
]
if not TYPE_CHECKING:  # to which a module with it would have every name
    __getattr__ = refuse_other_names(__name__, __all__)
SEQUENCE_PARALLEL = Linear(hidden_grad="reduce_scatter")
SamplingParams: TypeAlias = Annotated[
    Any,
    CheckedBy("an object with top_k and top_p (TrainingSamplingParams), or a mapping, or None"),
]
SamplingMask: TypeAlias = Annotated[Any, CheckedBy("NeMo-RL's SamplingMask, or None")]


@checked
def get_next_token_logprobs_from_logits(
    input_ids: TokensNotShifted,
    next_token_logits: Logits,
    seq_index: Absent = None,
    vocab_parallel_rank: Count | None = None,
    vocab_parallel_group: TpGroup = None,
    context_parallel_group: CpGroup = None,
    sampling_params: SamplingParams = None,
    chunk_size: int | None = None,
    cp_sharder: Absent = None,
    *,
    sampling_mask: SamplingMask = None,
    vocab_size: VocabSize | None = None,
) -> torch.Tensor:
    """Return the log-probs [B, S - 1] fp32 of the next tokens, replicated.

    Args:
        next_token_logits: [B, S or more, V/P], under context parallelism [B, L, V/P], sharded on V
            in even shards of vocab_parallel_group, a DTensor, or without a group the whole
            vocabulary.
        sampling_params: no temperature is applied.
        sampling_mask: of the tokens, token_ids [B, S, K] and sizes [B, S], or the batch that has
            it, in the place of top_k and top_p, which are not looked at then.

    Raises:
        TypeError: sampling_params of another class.
        ValueError: vocab_parallel_rank is not this rank of the group, or an argument asks for
            something unsupported.
        Both: as `log_probs`.
    """
    refuse(seq_index=seq_index, cp_sharder=cp_sharder)
    kept = kept_by(sampling_params, sampling_mask)
    logits, shard = even_shard_of_rank(
        next_token_logits, vocab_parallel_rank, vocab_parallel_group, vocab_size
    )
    return _next_log_probs(logits, input_ids, shard, kept, context_parallel_group)


@checked
def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Logits,
    target: TokensNotShifted,
    vocab_start_index: Count,
    vocab_end_index: Count,
    tp_group: TpGroup,
    inference_only: InferenceOnly = False,
    cp_group: CpGroup = None,
    chunk_size: int | None = None,
    sampling_params: SamplingParams = None,
    *,
    sampling_mask: SamplingMask = None,
    vocab_size: VocabSize | None = None,
) -> torch.Tensor:
    """Return the log-probs [B, S - 1] fp32 of the next tokens, replicated, from logits of shards of
    any bounds.

    Args:
        vocab_parallel_logits: [B, S or more, width] (context parallel: [B, L, width]) of ids [start
            index, end index).
        sampling_params, sampling_mask: as in `get_next_token_logprobs_from_logits`; errors, too.
    """
    kept = kept_by(sampling_params, sampling_mask)
    # whose sets need one number of ids
    device = None if kept is None else vocab_parallel_logits.device
    size = own_size(vocab_parallel_logits, -1)
    bounds = vocab_start_index, vocab_end_index
    shard = bounded_shard(size, *bounds, tp_group, vocab_size, device=device)
    return _next_log_probs(vocab_parallel_logits, target, shard, kept, cp_group, inference_only)


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
    sampling_params: SamplingParams = None,
    target_is_pre_rolled: bool = False,
    *,
    vocab_size: VocabSize | None = None,
) -> torch.Tensor:
    """Return the log-probs [B, unpacked_seqlen - 1] fp32 of the next tokens of B packed sequences,
    replicated.

    A sequence's log-probs begin its row, those of its padding included, and zeros follow; a longer
    row is cut. With C context-parallel ranks each has T / C of the T packed tokens, of every
    sequence the chunks of an unpacked one.

    Args:
        vocab_parallel_logits: [1, T/C, width] of ids [vocab_start_index, vocab_end_index).
        target: [1, T] replicated, not shifted; with target_is_pre_rolled [1, T/C], this rank's
            labels.
        cu_seqlens_padded: [B + 1] the first token of each sequence, and T.
        sampling_params: as in `from_parallel_logits_to_logprobs`.

    Raises:
        ValueError: as `from_parallel_logits_to_logprobs`, and misfits of shapes or of bounds (on
            GPUs: results of NaN).
    """
    kept, logits = kept_by(sampling_params, None), vocab_parallel_logits
    device = None if kept is None else logits.device
    bounds = vocab_start_index, vocab_end_index
    shard = bounded_shard(own_size(logits, -1), *bounds, group, vocab_size, device=device)
    tokens = PackedTokens(
        logits, cp_group, group, cu_seqlens_padded, unpacked_seqlen, sum_gradients=True
    )
    labels = target if target_is_pre_rolled else None
    return tokens.log_probs(
        lambda labels: log_probs_over(kept, logits, labels, shard), target, inference_only, labels
    )


@checked
def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states: Floating,
    output_weight_layer: Rows,
    runtime_gather_output: bool | None,
    target: TokensNotShifted,
    vocab_start_index: Count,
    vocab_end_index: Count,
    tp_group: TpGroup,
    inference_only: InferenceOnly = False,
    cp_group: Group = None,
    chunk_size: int | None = None,
    *,
    vocab_size: VocabSize | None = None,
    linear: Linear = SEQUENCE_PARALLEL,
) -> torch.Tensor:
    """Return the log-probs [B, S - 1] fp32 of the next tokens, replicated, from hidden states,
    without logits.

    Args:
        tensor_parallel_hidden_states: [S/P, B, H], this rank's part of the sequence (sequence
            parallelism). They are gathered, and their gradient is summed over tp_group and
            scattered, as in NeMo-RL. With another ``linear.hidden_grad`` they are [S, B, H]
            replicated.
        output_weight_layer: [width, H], rows of these ids. Without a vocab_size, the host waits for
            a small all-gather.
        runtime_gather_output: None or False; ValueError for True.
        linear: `Linear`; blocks of logits have ``linear.budget`` bytes, not chunk_size tokens.
        cp_group: None, or a group of one rank, as in NeMo-RL.
    """
    refuse(runtime_gather_output=runtime_gather_output or None)
    if group_size(cp_group) > 1:
        raise ValueError(
            f"cp_group must have one rank here, as in NeMo-RL, got {group_size(cp_group)}"
        )
    expect_tokens_first(tensor_parallel_hidden_states, target)
    device = output_weight_layer.device
    size = own_size(output_weight_layer, 0)
    bounds = vocab_start_index, vocab_end_index
    shard = bounded_shard(size, *bounds, tp_group, vocab_size, device=device)
    scattered = linear.hidden_grad == "reduce_scatter" and not is_dtensor(
        tensor_parallel_hidden_states
    )
    # the shape of a DTensor is that of all ranks
    length = tensor_parallel_hidden_states.shape[0] * (group_size(tp_group) if scattered else 1)
    labels = next_tokens(local_part(target, shard), length, device)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        stats = linear_vocab_statistics(
            tensor_parallel_hidden_states,
            output_weight_layer,
            labels.t(),
            shard=shard,
            linear=linear,
        )
    return stats.log_prob.t()[:, : target.shape[1] - 1]


def _next_log_probs(logits, ids, shard, kept, cp_group, inference_only=False) -> torch.Tensor:
    """Log-probs [B, S - 1] of the ids [B, S] in the logits of the position before each; kept: see
    `kept_by`."""
    ids, tokens = local_part(ids, shard), RankedTokens(logits, cp_group, shard.group)
    if isinstance(kept, IdSets):
        kept = sets_of_next_tokens(kept, ids, tokens)
    return tokens.next_log_probs(
        lambda labels: log_probs_over(kept, logits, labels, shard), ids, inference_only
    )
