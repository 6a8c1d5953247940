"""AReaL's functions of vocabulary-sharded logits, one pass and one collective each, with its names and signatures.

Nothing of AReaL is imported, and a tp_group of None means not sharded. Labels are not shifted, as in AReaL. Results are
fp32 for logits of any dtype (float64 for float64), without a copy, and backward may run twice; a label of -100 has
log-prob 0 and no gradient, and one outside of the vocabulary has NaN. chunk_size is accepted and changes nothing.
"""

from __future__ import annotations

import torch

from ..arguments.options import Transform
from ..call.statistics import vocab_statistics
from ..validation import expect_ids
from .rl_calls import even_shard


def gather_logprobs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float = 1.0,
    tp_group=None,
    chunk_size: int = 1024,
    *,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Return the log-probs [..] fp32 of labels, replicated and differentiable.

    Args:
        logits: [.., V/P] sharded on V in even shards of tp_group, a DTensor, or without a group the whole vocabulary.
        labels: [..] replicated.
        temperature: divides the logits.
        vocab_size: number of ids of the tokenizer; columns at or beyond it are padding, and do not enter the softmax.
            None: all columns do, as in AReaL.

    Raises TypeError and ValueError as `vocab_statistics`.
    """
    return _statistics(logits, labels, temperature, tp_group, vocab_size, ()).log_prob


def gather_logprobs_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float = 1.0,
    tp_group=None,
    chunk_size: int = 1024,
    *,
    vocab_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs of labels and the entropies, [..] fp32 each, replicated and differentiable; arguments and
    errors as of `gather_logprobs`. The entropy of a label of -100 is 0.

    Examples:
        >>> gather_logprobs_entropy(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), temperature=0.5)
        (tensor([-0.1429]), tensor([0.4411]))
    """
    stats = _statistics(logits, labels, temperature, tp_group, vocab_size, ("entropy",))
    return stats.log_prob, stats.entropy


def _statistics(logits, labels, temperature, group, vocab_size, want):
    expect_ids("labels", labels)
    logits, shard = even_shard(logits, group, vocab_size)
    return vocab_statistics(logits, labels, shard=shard, want=want, transform=Transform(temperature=temperature))
