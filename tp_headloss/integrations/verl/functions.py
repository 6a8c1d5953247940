"""verl's functions of vocabulary-sharded logits, one pass and one collective each: see the
docstring of the package."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import torch

from ...arguments.id_sets import IdSets
from ...arguments.options import Options, Transform
from ...call.statistics import vocab_statistics
from ...call.subclasses import is_dtensor
from ...linear_head import Linear, linear_vocab_statistics
from ...ranks.groups import Group
from ...ranks.shard import VocabShard
from ...spec import (
    IDS,
    LABELS,
    TOKEN_WEIGHT,
    CheckedBy,
    Floating,
    Ids,
    Logits,
    NumberLine,
    Rows,
    Size,
    Temperature,
    TensorLine,
    TokenWeight,
    checked,
    described,
    sizes_of,
)
from ..rl_tokens import IGNORED_LABEL, UNREDUCED_HIDDEN_GRAD

PER_TOKEN, NUMBER = TensorLine("real numbers", None), NumberLine()
# verl's value for temperatures that are not positive, such as the 0 of padding rows
LOWEST_TEMPERATURE = 1e-8
Boundaries: TypeAlias = Annotated[Any, CheckedBy("ids, or None")]


@checked
def logits_processor(
    group: Group,
    vocab_size: Size,
    *,
    padded_size: Size | None = None,
    boundaries: Boundaries = None,
    entropy: bool = True,
    sum_pi_squared: bool = False,
    temperature: float = 1.0,
    options: Options | None = None,
) -> Callable[..., dict[str, torch.Tensor]]:
    """Return a function process(logits, label, temperature=None, label_mask=None) -> dict that
    computes the results of the logits processor of verl's Megatron engine.

    Engines before verl 0.9 define that function inside of forward_step, which process replaces; in
    verl 0.9.1 it is a method, which `engine.install` overrides.

    process takes logits [.., width] sharded on V, label [..] replicated, a temperature (a number,
    or one per token [..]), the label_mask [..] of verl's older trainer, and sets, `IdSets` [..] of
    what the rollout's sampler kept (verl 0.9.1 carries none; `sampling_masks.from_vllm` reads its
    engine's). It returns "log_probs", "entropy" and "sum_pi_squared", [..] fp32 replicated and
    differentiable; with sets the first two are over each token's set. All are 0 where label_mask is
    False. One collective for all of them.

    Args:
        group, vocab_size, padded_size: as in `VocabShard.from_group`. padded_size is Megatron's
            padded number of ids, which its config calls vocab_size. Padding does not enter the
            softmax; in verl it does, which the padded number as vocab_size reproduces.
        boundaries: as in `VocabShard.from_boundaries`, for uneven shards, instead of padded_size.
        entropy, sum_pi_squared: True: in the results.
        temperature: for calls without one. Temperatures that are not positive become 1e-8, as in
            verl.

    Raises ValueError and TypeError as `vocab_statistics` does.
    """
    if boundaries is not None and padded_size is not None:
        raise ValueError(f"boundaries say the padded size, got padded_size={padded_size}, too")
    if boundaries is None:
        shard = VocabShard.from_group(group, vocab_size, padded_size)
    else:
        shard = VocabShard.from_boundaries(boundaries, vocab_size, group)
    return LogitsProcessor(shard, entropy, sum_pi_squared, temperature, options).process


class LogitsProcessor(NamedTuple):
    """Arguments of `logits_processor`, and the function that it returns."""

    shard: VocabShard
    entropy: bool
    sum_pi_squared: bool
    temperature: float
    options: Options | None

    @described
    def process(
        self,
        logits: Logits,
        label: Ids,
        temperature: Temperature | None = None,
        label_mask: TokenWeight | None = None,
        sets: IdSets | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the results by name, see `logits_processor`."""
        temperature = self.temperature if temperature is None else temperature
        transform = Transform(temperature=_positive(temperature))
        IDS.check("label", label, {})
        if label_mask is not None:
            TOKEN_WEIGHT.check("label_mask", label_mask, sizes_of("label", label, label.shape))
            label = label.masked_fill(~label_mask.bool(), IGNORED_LABEL)
        self._expect_padding(logits)
        names = {"log_probs": "log_prob"}
        if self.entropy:
            names["entropy"] = "entropy"
        if sets is not None:
            names = {name: f"set_{statistic}" for name, statistic in names.items()}
        if self.sum_pi_squared:
            names["sum_pi_squared"] = "collision"
        want = tuple(statistic for statistic in names.values() if statistic != "log_prob")
        stats = vocab_statistics(
            logits,
            label,
            shard=self.shard,
            want=want,
            transform=transform,
            sets=sets,
            options=self.options,
        )
        return {name: getattr(stats, statistic) for name, statistic in names.items()}

    def _expect_padding(self, logits):
        """Raise ValueError for more columns than the shard has."""
        if not isinstance(logits, torch.Tensor) or is_dtensor(logits):
            return
        columns, shard = logits.shape[-1], self.shard
        if columns > shard.width:
            total = columns * shard.world_size
            raise ValueError(
                f"logits must have the {shard.width} columns of this rank, got {columns}: with "
                f"padding, logits_processor(group, {shard.vocab_size}, padded_size={total}), or "
                "boundaries= of uneven shards"
            )


@checked
def linear_cross_entropy(
    hidden: Floating,
    weight: Rows,
    labels: Ids,
    temperature: Temperature = 1.0,
    reduction: Literal["none", "sum", "mean"] = "none",
    dist_process_group: Group = None,
    *,
    shard: VocabShard | None = None,
    linear: Linear = UNREDUCED_HIDDEN_GRAD,
    sets: IdSets | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs and the entropy, [N] fp32 each and replicated, of N tokens' hidden
    states, without logits.

    Args:
        hidden: [.., H] replicated, N tokens.
        weight: [width, H] sharded on V.
        labels: [..] replicated.
        temperature: a number, or one per token [..].
        reduction: for the log-probs alone: "none", or "sum" and "mean" for a scalar. The mean is
            over tokens whose label is not -100.
        dist_process_group: group that shares the vocabulary in even shards without padding; None:
            not sharded, or DTensors.
        shard: `VocabShard` instead of dist_process_group, for padded vocabularies and uneven
            shards.
        linear: `Linear`. By default the gradient of hidden is this rank's part alone, as in verl,
            where the gather of sequence parallelism sums it in its backward. Without such a gather
            pass Linear(hidden_grad="all_reduce").
        sets: as in `logits_processor`: log-probs and entropy are over each token's set.

    Raises ValueError for another reduction or a group that is not the shard's, and as
    `linear_vocab_statistics` does.
    """
    if shard is not None and dist_process_group not in (None, shard.group):
        raise ValueError(
            "the shard has a group of its own, which dist_process_group is not: pass one of them"
        )
    if shard is None and dist_process_group is not None:
        rows = weight.shape[0] * dist_process_group.size()
        shard = VocabShard.from_group(dist_process_group, rows)
    temperature = _positive(temperature)
    if isinstance(temperature, torch.Tensor):
        temperature = _flat("temperature", temperature, labels.shape)
    stats = linear_vocab_statistics(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        _flat("labels", labels, hidden.shape[:-1]),
        shard=shard,
        want=("entropy",) if sets is None else ("set_log_prob", "set_entropy"),
        transform=Transform(temperature=temperature),
        linear=linear,
        sets=None if sets is None else sets.map_tokens(labels.shape, lambda x: x.flatten(0, -2)),
    )
    log_probs, token_entropy = stats.log_prob, stats.entropy
    if sets is not None:
        log_probs, token_entropy = stats.set_log_prob, stats.set_entropy
    if reduction != "none":
        log_probs = log_probs.sum()
    if reduction == "mean":
        log_probs = log_probs / stats.valid.sum().clamp(min=1)
    return log_probs, token_entropy


def _flat(name: str, x: torch.Tensor, lead) -> torch.Tensor:
    """x of tokens [..] as [N]; ValueError unless `lead` has the same tokens, or one of both is
    flat."""
    own, other = ([n for n in shape if n != 1] for shape in (x.shape, lead))
    if own != other and (math.prod(own) != math.prod(other) or min(len(own), len(other)) > 1):
        line = PER_TOKEN if x.is_floating_point() else LABELS
        said = line.hint_of_other_tokens(x, lead)
        raise ValueError(
            f"{name} must be of tokens {list(lead)}, or these flat, got {list(x.shape)}{said}"
        )
    return x.reshape(-1)


def _positive(temperature):
    """The temperature, but at least `LOWEST_TEMPERATURE`. Raises TypeError for no number and no
    tensor of numbers."""
    (PER_TOKEN if isinstance(temperature, torch.Tensor) else NUMBER).check(
        "temperature", temperature, {}
    )
    if isinstance(temperature, torch.Tensor):
        return temperature.clamp(min=LOWEST_TEMPERATURE)
    return max(temperature, LOWEST_TEMPERATURE)
