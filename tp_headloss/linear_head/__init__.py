"""The fused linear head: hidden states and a weight shard in place of logits, which never exist as
a whole."""

from ..arguments.linear import Linear
from .head import linear_vocab_statistics

__all__ = ["Linear", "linear_vocab_statistics"]
