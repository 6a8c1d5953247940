"""Comparison of what terms and metrics make of equal statistics, by `Options(validate="full")`.

Statistics are equal in their bits on all ranks. A function that reads something of its rank besides
gives each rank another loss, and gradients that belong to none: a number that it closes over, the
rank's own columns of logits, dropout by the rank's seed. Ranks compare the sums over tokens, after
the call's last exchange.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from .agreement import outcome

# Of a sum, and of a value for each token: ranks with other numbers of threads add up in another
# order.
TOLERANCE, TOLERANCE_OF_TOKEN = 1e-5, 1e-7


class EqualResults:
    """A block without collectives that makes results of statistics.

    At its end the group's ranks exchange the results that `record` was given, and errors: all go
    on, or raise the same exception. One rank exchanges nothing.

        with EqualResults(shard) as results:
            ...
            results.record(tokens, {"term 'focal'": sum_over_tokens})
    """

    def __init__(self, shard):
        self.group = None if shard is None or shard.world_size == 1 else shard.group
        self.sums: dict[str, float] = {}
        self.tokens = 0

    def record(self, tokens: int, sums: dict[str, torch.Tensor]):
        """Record sums over a number of tokens by what an error calls them; waits for the device."""
        if self.group is not None:
            self.tokens = tokens
            self.sums = {called: float(x.detach()) for called, x in sums.items()}

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if self.group is None or not (error is None or isinstance(error, Exception)):
            return
        compare = partial(_expect_equal, atol=TOLERANCE_OF_TOKEN * self.tokens)
        found = outcome(self.sums, error, self.group, compare)
        if found is not None and found is not error:
            raise found from error


def _expect_equal(every: tuple[dict[str, float], ...], atol: float):
    """Raise ValueError on all ranks if ranks have sums of other names, or two ranks' sums differ by
    more than rounding."""
    for rank, sums in enumerate(every):
        if sums.keys() != every[0].keys():
            raise ValueError(
                f"terms and metrics must be the same on all ranks, got {[*every[0]]} on rank 0 and "
                f"{[*sums]} on rank {rank}: a function returns values of other names there"
            )
        for called, first in every[0].items():
            other = sums[called]
            is_nan = math.isnan(first) and math.isnan(other)
            if is_nan or math.isclose(first, other, rel_tol=TOLERANCE, abs_tol=atol):
                continue
            raise ValueError(
                f"{called} must have equal values on all ranks of the shard's group, got "
                f"{first:.6g} on rank 0 and {other:.6g} on rank {rank} (sums over tokens): its "
                "function reads something of its rank besides statistics and inputs; look for a "
                "number that it closes over, the rank's own columns of logits, and dropout"
            )
