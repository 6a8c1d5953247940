"""The rows of `alias_table` about arguments of terms, given to a call or to a module that has a
`HeadLoss`."""

from .alias_table import LOSSES, Z_WEIGHTS, Alias

HOLDERS = "VocabParallelHead, CausalLMLoss"  # of a HeadLoss

OF_TERMS = (
    Alias(
        "label_smoothing, class_weight, smoothing_formula",
        "torch, ours",
        HOLDERS,
        "head_loss=HeadLoss(CrossEntropy({}=..))",
    ),
    Alias(
        "divergence, temperature_squared",
        "ours",
        HOLDERS,
        "head_loss=HeadLoss(Distillation({}=..))",
    ),
    Alias(
        "clip, dual_clip, objective",
        "ours",
        HOLDERS,
        "head_loss=HeadLoss(PolicyGradient({}=..), ..)",
    ),
    Alias("estimator", "ours", HOLDERS, "head_loss=HeadLoss([.., KLToReference({}=..)])"),
    Alias(
        f"z_loss, {Z_WEIGHTS}",
        "Megatron, flash-attention, many",
        HOLDERS,
        "head_loss=HeadLoss([CrossEntropy(), ZLoss(1e-4)])",
    ),
    Alias("z_loss", "Megatron", LOSSES, "HeadLoss([CrossEntropy(), ZLoss(1e-4)])"),
    Alias(Z_WEIGHTS, "flash-attention, many", LOSSES, "HeadLoss([CrossEntropy(), ZLoss({})])"),
)
