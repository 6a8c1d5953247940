"""Megatron-RL's log-probs of given ids from vocabulary-sharded logits, under its name. Nothing of Megatron is imported.

In `megatron/rl/rl_utils.py` it takes the place of the function of this name, and `get_logprobs` calls its model with
``runtime_gather_output=False``. Labels are not shifted, as in Megatron-RL, whose other functions take log-probs.
"""

from __future__ import annotations

import torch

from ..call.statistics import vocab_statistics
from ..validation import expect_ids
from .rl_calls import even_shard


def selective_log_softmax(
    logits: torch.Tensor,
    index: torch.Tensor,
    tp_group=None,
    *,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the log-probs [..] of index, replicated and differentiable. One pass over the logits and one collective;
    backward does not communicate.

    A label of -100 has log-prob 0 and no gradient, and one outside of the vocabulary has NaN.

    Args:
        logits: [.., V/P] sharded on V in even shards of tp_group, a DTensor, or without a group the whole vocabulary.
        index: [..] labels, replicated.
        vocab_size: number of ids of the tokenizer; columns at or beyond it are padding, and do not enter the softmax.
            None: all columns do, as in Megatron-RL.
        dtype: type of the log-probs, which are computed in fp32 (float64 for float64 logits). None: that of the logits,
            which Megatron-RL asserts; in its batch-invariant mode it is torch.float32.

    Raises TypeError and ValueError as `vocab_statistics`.

    Examples:
        >>> selective_log_softmax(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]))
        tensor([-0.4076])
    """
    expect_ids("index", index)
    logits, shard = even_shard(logits, tp_group, vocab_size)
    return vocab_statistics(logits, index, shard=shard).log_prob.to(logits.dtype if dtype is None else dtype)
