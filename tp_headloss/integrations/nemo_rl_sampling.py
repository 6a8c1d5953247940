"""NeMo-RL's sampling parameters: the ids over which a token's log-prob is normalised."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..arguments.id_sets import IdSets, masked_ids
from ..arguments.sampling_rule import SamplingRule
from ..call.statistics import vocab_statistics
from ..ranks.shard import VocabShard
from ..search.sampling import kept_ids
from ..spec.checks import is_number
from ..spec.words import shown
from .rl_tokens import RankedTokens
from .sampling_masks import from_nemo_rl

# those of NeMo-RL's TrainingSamplingParams
FIELDS = ("top_k", "top_p", "temperature", "replay_sampling_mask")


def kept_by(params, sampling_mask) -> SamplingRule | IdSets | None:
    """Return what NeMo-RL normalises over: the rule of sampling parameters, sets [B, S] of a mask,
    or None: all ids.

    Raises:
        TypeError: params of an unknown class. ValueError: an unknown key of a mapping, or a mask
            that is missing.
    """
    fields = _fields(params)
    if sampling_mask is not None:
        return from_nemo_rl(sampling_mask)
    if fields.get("replay_sampling_mask"):
        raise ValueError(
            "sampling_params: replay_sampling_mask=True needs a sampling_mask, got none"
        )
    top_k, top_p = fields.get("top_k"), fields.get("top_p")
    for name, value in (("top_k", top_k), ("top_p", top_p)):
        if value is not None and not is_number(value):
            raise TypeError(
                f"sampling_params: {name} must be one number for all tokens, got {shown(value)}"
            )
    top_k = top_k if top_k is not None and top_k > 0 else None
    top_p = top_p if top_p is not None and top_p != 1.0 else None
    return None if top_k is None and top_p is None else SamplingRule(top_k=top_k, top_p=top_p)


def log_probs_over(
    kept: SamplingRule | IdSets | None, logits, labels, shard: VocabShard
) -> torch.Tensor:
    """Log-probs of labels [B, L] over the kept ids; logits [B, L, width] sharded on V, sets [B, L]
    of the labels.

    A label that a rule does not keep has -inf, and one whose token has no ids in a mask has 0, both
    without a gradient.
    """
    if kept is None:
        return vocab_statistics(logits, labels, shard=shard).log_prob
    if isinstance(kept, SamplingRule):
        sets = kept_ids(logits.detach(), kept, shard=shard)
        assert sets.spans is not None
        known = (labels >= 0) & (labels < shard.vocab_size) & (sets.spans.diff(dim=-1)[..., 0] > 0)
        outside = known & ~sets.contains(labels)
    else:
        sets = kept
        outside = (sets.ids < 0).all(-1)
    log_prob = vocab_statistics(
        logits, labels.masked_fill(outside, -100), shard=shard, want=("set_log_prob",), sets=sets
    ).set_log_prob
    return log_prob.masked_fill(outside, -torch.inf) if isinstance(kept, SamplingRule) else log_prob


def sets_of_next_tokens(sets: IdSets, ids: torch.Tensor, tokens: RankedTokens) -> IdSets:
    """Return the sets [B, L] of this rank's next tokens, from those of the ids [B, S]
    themselves."""
    if sets.ids.dim() != 3 or sets.ids.shape[:2] != ids.shape:
        raise ValueError(
            f"sampling_mask must be of the tokens, {[*ids.shape, 'K']}, got {list(sets.ids.shape)}"
        )
    of_next = masked_ids(sets)[:, 1:].to(tokens.device)
    padding = tokens.total - of_next.shape[1]
    return IdSets(tokens.take(torch.nn.functional.pad(of_next, (0, 0, 0, padding), value=-1)))


def _fields(params) -> Mapping:
    """Sampling parameters by name."""
    if params is None:
        return {}
    if hasattr(params, "top_k") and hasattr(params, "top_p"):
        if min_p := getattr(params, "min_p", None):
            raise ValueError(f"sampling_params must have {FIELDS} alone, got min_p={min_p}")
        return {name: getattr(params, name, None) for name in FIELDS}
    if not isinstance(params, Mapping):
        raise TypeError(
            "sampling_params must be None, a mapping, or an object with top_k and top_p, got "
            f"{type(params).__name__}"
        )
    if unknown := set(params) - set(FIELDS):
        raise ValueError(
            f"sampling_params must have no keys but {FIELDS}, got {sorted(map(str, unknown))}"
        )
    return params
