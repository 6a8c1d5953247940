"""`HeadLoss.linear` over the valid tokens alone, for `Linear.max_valid_tokens`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ..linear_head.options import Linear
from ..linear_head.valid_tokens import ValidTokens
from ..shard import VocabShard
from .call import Call
from .output import HeadLossOutput


def linear_over_valid_tokens(
    linear_loss: Callable, call: Call, hidden, weight, bias, shard: VocabShard, transform, linear: Linear
) -> HeadLossOutput:
    """Call `HeadLoss.linear` with the valid tokens alone, and spread the results over all tokens.

    linear_loss: the bound method. With more valid tokens than the maximum, losses, sums and count are NaN.
    """
    if call.sequences is not None:
        raise ValueError("max_valid_tokens drops tokens of sequences, got the input 'sequences'")
    assert linear.max_valid_tokens is not None
    definition = call.definition
    tokens = ValidTokens(
        call.labels, definition.ignore_index, linear.max_valid_tokens, definition.options, shard.vocab_size
    )
    inputs = {name: tokens(x, name) for name, x in call.inputs.items() if name not in ("teacher", "sets")}
    if "teacher" in call.inputs:
        inputs["teacher"] = tokens.teacher(call.inputs["teacher"])
    if "sets" in call.inputs:
        inputs["sets"] = tokens.sets(call.inputs["sets"])
    out = linear_loss(
        tokens(hidden, "hidden states"), weight, tokens(call.labels, "labels"), bias=bias, shard=shard,
        token_weight=tokens(call.token_weight, "token_weight"),
        denominator=call.denominator, transform=tokens.transform(transform), inputs=inputs,
        linear=replace(linear, max_valid_tokens=None),
    )  # fmt: skip
    known = torch.where(tokens.missing, torch.nan, 1.0)
    loss = tokens.spread_one(out.loss, 0.0, torch.nan) if definition.reduction == "none" else out.loss * known
    known_sums = {
        field: {name: x * known for name, x in getattr(out, field).items()}
        for field in ("terms", "metrics", "term_counts")
    }
    stats = tokens.spread(out.stats, call.labels)
    return out._replace(loss=loss, count=out.count * known, stats=stats, **known_sums)
