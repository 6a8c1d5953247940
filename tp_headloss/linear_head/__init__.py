"""The fused linear head: hidden states and a weight shard in place of logits, which never exist as a whole."""

from .head import linear_vocab_statistics
from .options import Linear

__all__ = ["Linear", "linear_vocab_statistics"]
