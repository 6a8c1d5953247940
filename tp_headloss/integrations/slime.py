"""slime's function of vocabulary-sharded logits, with its name and signature. Nothing of slime is
imported.

Unlike in slime, a tp_group of None means not sharded (there: all ranks); a label of -100 has
log-prob 0 and no gradient, and one outside of the vocabulary has NaN. Labels are not shifted, as in
slime, and a temperature has divided the logits before. chunk_size is accepted and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch

from ..call.statistics import vocab_statistics
from ..spec import TOKEN_WEIGHT, Ids, Logits, TensorLine, checked, sizes_of
from . import refuse_other_names
from .rl_tokens import TpGroup, VocabSize, even_shard

__all__ = ["calculate_log_probs_and_entropy"]
if not TYPE_CHECKING:  # to which a module with it would have every name
    __getattr__ = refuse_other_names(__name__, __all__)


@checked
def calculate_log_probs_and_entropy(
    logits: Logits,
    tokens: Ids,
    tp_group: TpGroup,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Annotated[torch.Tensor, TensorLine("bool", None)] | None = None,
    with_entropy_grad: bool = True,
    *,
    vocab_size: VocabSize | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probs [T, 1] of tokens and the entropies [T], or None, fp32, replicated and
    differentiable.

    One pass over the logits and one collective; with a keep mask and the entropy two, and the mask
    makes a copy of the logits, as in slime. (`IdSets` of the kept ids, with `vocab_statistics`,
    make none.)

    Args:
        logits: [T, V/P] sharded on V in even shards of tp_group.
        tokens: [T] labels, replicated.
        with_entropy: True returns the entropies, of the whole vocabulary even with a mask.
        log_prob_keep_mask: [T, V/P] bool, columns over which log-probs are normalised; the label is
            one, too.
        with_entropy_grad: False: the entropies have no gradient.

    Raises TypeError and ValueError as `vocab_statistics`, and the same for a mask of another shape
    or type.

    Examples:
        >>> calculate_log_probs_and_entropy(
        ...     torch.zeros(1, 4), torch.tensor([2]), None, with_entropy=True
        ... )
        (tensor([[-1.3863]]), tensor([1.3863]))
    """
    logits, shard = even_shard(logits, tp_group, vocab_size)
    want = ("entropy",) if with_entropy else ()
    if log_prob_keep_mask is None:
        stats = vocab_statistics(logits, tokens, shard=shard, want=want)
        log_prob, entropy = stats.log_prob, stats.entropy
    else:
        TOKEN_WEIGHT.check(
            "log_prob_keep_mask", log_prob_keep_mask, sizes_of("logits", logits, logits.shape)
        )
        ids = shard.start + torch.arange(shard.width, device=logits.device)
        kept = log_prob_keep_mask | (ids == tokens.unsqueeze(-1))
        log_prob = vocab_statistics(
            logits.masked_fill(~kept, -torch.inf), tokens, shard=shard
        ).log_prob
        entropy = (
            vocab_statistics(logits, tokens, shard=shard, want=want).entropy
            if with_entropy
            else None
        )
    if entropy is not None and not with_entropy_grad:
        entropy = entropy.detach()
    return log_prob.unsqueeze(-1), entropy
