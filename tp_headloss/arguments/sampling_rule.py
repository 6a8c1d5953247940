"""`SamplingRule`: which ids of a token a sampler keeps. They are found in `kept`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import torch

from ..spec import LEAST, PER_ROW, Floating, Ids, IntLine, NumberLine, Sizes, TensorLine, checked
from ..spec.checks import refuse_tokens
from .made_whole import MadeWhole

# of values in tensors: name, lowest, highest, words
RANGES = (
    ("top_k", 1, math.inf, "at least 1"),
    ("top_p", LEAST, 1, "in (0, 1]"),
    ("min_p", 0, 1, "in [0, 1]"),
)
NO_TOP_P = ": None is for all ids, and top_k=1 for the likeliest alone"
MOST_IDS = 1 << 24  # so that a logit and an id fit an int64, and the masses of all ids have 38 bits


@checked
@dataclass(frozen=True)
class SamplingRule(MadeWhole):
    """Which ids of a token a sampler keeps, in vLLM's order: min-p, then top-k of these, then top-p
    of those.

    Each is a number, or a tensor [..] of one per token, or None for no such rule. Without any, all
    ids above -inf stay.

    Args:
        min_p: keep ids of probability at least min_p times the largest one, in [0, 1].
        top_k: keep the k likeliest of what remains, at least 1; of equal logits the lowest ids, so
            k of them exactly.
        top_p: keep the likeliest of what remains, renormalised, until they hold top_p, in (0, 1];
            the first always.

    Values in tensors are looked at with ``Options(check=True)`` alone, which raises for one out of
    range. Without it a top_k below 1, a top_p not above 0, or a min_p not in [0, 1] keeps nothing,
    and a top_p above 1 keeps all. All ranks of a group pass the same rule;
    ``Options(validate="full")`` finds what differs.

    Examples:
        >>> SamplingRule(top_k=50, top_p=0.9)
        SamplingRule(top_k=50, top_p=0.9, min_p=None)
    """

    made_anew = "SamplingRule(top_p=top_p[..])"
    remedy = ": pass kept_ids(logits, rule, ..)"  # in the place of sets
    # in its place
    of_int = ": write SamplingRule(top_k={})"
    of_float = ": write SamplingRule(top_p={0}), or min_p={0}"
    top_k: Annotated[int, IntLine(1, hint=": None is for all ids")] | Ids | None = None
    top_p: (
        Annotated[float, NumberLine(LEAST, 1, "in (0, 1]", NO_TOP_P, of_pair=PER_ROW)]
        | Floating
        | None
    ) = None
    min_p: Annotated[float, NumberLine(0, 1, "in [0, 1]", of_pair=PER_ROW)] | Floating | None = None

    def __post_init__(self):
        if self.top_k is not None and not isinstance(self.top_k, torch.Tensor):
            object.__setattr__(self, "top_k", int(self.top_k))  # numpy's, say

    def expect_tokens(self, sizes: Sizes, vocab_size: int):
        """Raise TypeError or ValueError unless the tensors have a value for each token."""
        if vocab_size > MOST_IDS:
            raise ValueError(
                f"a SamplingRule needs a vocabulary of at most 2^24 ids, got {vocab_size}"
            )
        for name in ("top_k", "top_p", "min_p"):
            if isinstance(value := getattr(self, name), torch.Tensor):
                TensorLine("real numbers").check(name, value, sizes)

    def expect_in_range(self):
        """Raise ValueError with the first token whose value in a tensor no rule can have.

        Waits for a GPU.
        """
        for name, lowest, highest, says in RANGES:
            x = getattr(self, name)
            if isinstance(x, torch.Tensor):
                values = x.double()  # in which the lowest top_p is not 0
                refuse_tokens(
                    ~((values >= lowest) & (values <= highest)),  # NaN is in no range
                    lambda token: (
                        f"{name} of token {token} (flat index) must be {says}, got "  # noqa: B023 (called at once)
                        f"{x.flatten()[token].item():g}"  # noqa: B023
                    ),
                )

    def map_tokens(self, function: Callable[[torch.Tensor], torch.Tensor]) -> SamplingRule:
        """The rule with function(x) in place of each tensor [..] of values per token."""
        given = {name: getattr(self, name) for name in ("top_k", "top_p", "min_p")}
        return replace(
            self, **{k: function(x) for k, x in given.items() if isinstance(x, torch.Tensor)}
        )
