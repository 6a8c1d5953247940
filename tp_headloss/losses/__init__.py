"""Per-token losses: ordinary PyTorch on `VocabStatistics`. They see neither kernels nor ranks."""

from .cross_entropy import cross_entropy, label_weight, smoothed_cross_entropy
from .regularizers import entropy_bonus, z_loss

__all__ = ["cross_entropy", "entropy_bonus", "label_weight", "smoothed_cross_entropy", "z_loss"]
