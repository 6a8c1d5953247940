"""verl's functions of vocabulary-sharded logits, one pass and one collective each, with its names and contracts.

Nothing of verl is imported, and no process group is looked up: it is an argument, and None means not sharded. Against
verl's own: results are fp32 whatever the logits are; logits and temperatures are not written (verl divides the logits
in place and rounds the quotient to their type); a label of -100 has log-prob 0, and one outside of the vocabulary NaN;
nothing waits for the device. As in verl labels are not shifted: its engine has done that.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..api import Options, Transform, vocab_statistics
from ..linear import Linear, linear_vocab_statistics
from ..shard import VocabShard

LOWEST_TEMPERATURE = 1e-8  # verl's, for what is not positive: rows of padding have 0
IGNORED = -100
PARTIAL = Linear(hidden_grad="none")


def logits_processor(
    group,
    vocab_size: int,
    *,
    padded_size: int | None = None,
    boundaries: list[int] | None = None,
    entropy: bool = True,
    sum_pi_squared: bool = False,
    temperature: float = 1.0,
    options: Options | None = None,
) -> Callable[..., dict[str, torch.Tensor]]:
    """A function ``process(logits, label, temperature=..., label_mask=...) -> dict`` that computes what the logits
    processor of verl's Megatron engine computes. In verl 0.9.1 that is the engine's method `_lm_head_logits_processor`,
    which has keywords of its own (calculate_entropy, calculate_sum_pi_squared, distillation): override it, and call
    process there. Older engines define a function inside of forward_step, whose place process takes.

    logits [.., width] sharded on V, label [..] replicated -> "log_probs", "entropy" (differentiable) and
    "sum_pi_squared" (not) [..] fp32 replicated, those that are wanted. One collective (sum_pi_squared: two more).

    group, vocab_size, padded_size: as in `VocabShard.from_group`. vocab_size is the number of ids of the tokenizer, and
    padded_size Megatron's padded number (its config calls that one vocab_size, too): padding takes no part, where verl
    counts it. The padded number given as vocab_size is verl's result. Logits of another width than padded_size / P are
    a ValueError. boundaries instead of padded_size: uneven shards.
    temperature: a number, or one per token [..], as the engine passes it; the factory's where the call has none. What
    is not positive is 1e-8, as in verl.
    label_mask [..]: of verl's older trainer; log_probs are 0 where it is False, and so is the entropy (verl's is not,
    and its loss leaves it out).

    Raises ValueError and TypeError as `vocab_statistics` does.
    """
    if boundaries is not None and padded_size is not None:
        raise ValueError(f"boundaries say the padded size, got padded_size={padded_size}, too")
    if boundaries is None:
        shard = VocabShard.from_group(group, vocab_size, padded_size)
    else:
        shard = VocabShard.from_boundaries(boundaries, vocab_size, group)
    want, default = ("entropy",) if entropy else (), temperature

    def process(logits, label, temperature=None, label_mask=None):
        temperature = default if temperature is None else temperature
        transform = Transform(temperature=_positive(temperature))
        if label_mask is not None:
            label = label.masked_fill(~label_mask.bool(), IGNORED)
        stats = vocab_statistics(logits, label, shard=shard, want=want, transform=transform, options=options)
        out = {"log_probs": stats.log_prob}
        if entropy:
            out["entropy"] = stats.entropy
        if sum_pi_squared:
            out["sum_pi_squared"] = vocab_parallel_sum_pi_squared(logits, shard=shard, temperature=temperature)
        return out

    return process


def vocab_parallel_log_probs_from_logits(
    logits: torch.Tensor, labels: torch.Tensor, *, shard: VocabShard | None
) -> torch.Tensor:
    """Log-probs of labels: logits [.., width] sharded on V, labels [..] replicated -> [..] fp32 replicated.

    shard: None for logits of the whole vocabulary, or a DTensor.
    """
    return vocab_statistics(logits, labels, shard=shard).log_prob


def vocab_parallel_entropy(vocab_parallel_logits: torch.Tensor, *, shard: VocabShard | None) -> torch.Tensor:
    """-sum p log p: logits [.., width] sharded on V -> [..] fp32 replicated, differentiable; shard as above."""
    return vocab_statistics(vocab_parallel_logits, shard=shard, want=("entropy",)).entropy


@torch.no_grad()
def vocab_parallel_sum_pi_squared(
    vocab_parallel_logits: torch.Tensor, *, shard: VocabShard | None, temperature: float | torch.Tensor = 1.0
) -> torch.Tensor:
    """Sum of p^2: logits [.., width] sharded on V -> [..] fp32 replicated, not differentiable; two passes.

    It is exp(lse(2 z) - 2 lse(z)), so its relative error grows with abs(lse): 1e-5 at 50.
    """
    temperature = _positive(temperature)
    lse, of_squares = (
        vocab_statistics(vocab_parallel_logits, shard=shard, transform=Transform(scale=n, temperature=temperature)).lse
        for n in (1.0, 2.0)
    )
    return (of_squares - 2 * lse).exp()


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    reduction: str = "none",
    dist_process_group=None,
    *,
    shard: VocabShard | None = None,
    linear: Linear = PARTIAL,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropy) of hidden states and a weight shard. The gradient of the hidden states is this rank's part
    alone, as in verl, where the gather of sequence parallelism adds it up in its backward. Without such a gather pass
    ``linear=Linear(hidden_grad="all_reduce")``, and it is the sum, replicated.

    hidden [.., H] replicated, weight [width, H] sharded on V, labels [..] replicated -> [N] fp32 each, replicated, N
    tokens in their order. reduction: of the log-probs alone, "none", "sum" or "mean", the last two []; the mean is over
    tokens that are not -100.

    dist_process_group: shares the vocabulary in even shards, every row of which counts; None: not sharded, or DTensors.
    shard: instead of it, for padded vocabularies and uneven shards. temperature: a number, or one per token.

    Raises ValueError for another reduction or a group that is not the shard's, and as `linear_vocab_statistics` does.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f'reduction must be "none", "sum" or "mean", got {reduction!r}')
    if shard is not None and dist_process_group not in (None, shard.group):
        raise ValueError("the shard has a group of its own, which dist_process_group is not: pass one of them")
    if shard is None and dist_process_group is not None:
        rows = weight.shape[0] * dist_process_group.size()
        shard = VocabShard.from_group(dist_process_group, rows)
    temperature = _positive(temperature)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.reshape(-1)
    stats = linear_vocab_statistics(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        shard=shard,
        want=("entropy",),
        transform=Transform(temperature=temperature),
        linear=linear,
    )
    log_probs = stats.log_prob
    if reduction != "none":
        log_probs = log_probs.sum()
    if reduction == "mean":
        log_probs = log_probs / stats.valid.sum().clamp(min=1)
    return log_probs, stats.entropy


def _positive(temperature):
    if isinstance(temperature, torch.Tensor):
        return temperature.clamp(min=LOWEST_TEMPERATURE)
    return max(temperature, LOWEST_TEMPERATURE)
