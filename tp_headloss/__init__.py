"""The head loss of language models whose vocabulary is sharded over GPUs: one pass, one collective, one backward."""

from .api import Options, Transform, vocab_statistics
from .head_loss import CausalLMLoss, CrossEntropy, Entropy, HeadLoss, HeadLossOutput, Term, ZLoss
from .shard import VocabShard
from .stats import VocabStatistics

__version__ = "0.1.0"

__all__ = [
    "CausalLMLoss",
    "CrossEntropy",
    "Entropy",
    "HeadLoss",
    "HeadLossOutput",
    "Options",
    "Term",
    "Transform",
    "VocabShard",
    "VocabStatistics",
    "ZLoss",
    "vocab_statistics",
]
