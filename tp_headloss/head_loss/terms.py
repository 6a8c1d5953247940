"""Terms and metrics, the parts of a `HeadLoss`, and the terms that need labels alone."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from .. import losses
from ..losses.ratio import scaled
from ..statistics import FULL_TEACHER, TOPK_TEACHER, known_statistics
from .statistic_value import StatisticValue


@dataclass(frozen=True)
class Term:
    """Weighted per-token loss, with the optional statistics and the inputs that it needs.

    name: key of this term in `HeadLossOutput.terms`, unique in a `HeadLoss`.

    function: ``function(stats, **inputs) -> [..] fp32``, a loss per token; `HeadLoss` masks and averages. A
    `StatisticValue`, such as ``StatisticValue("lse", square=True)``, needs no kernel of its own. To pickle a HeadLoss,
    use functions of a module, and `functools.partial` for their constants, instead of lambdas.

    weight: factor of this term in the loss; a number that is finite in fp32, or a scalar tensor.

    want: names of the optional statistics that the function reads.

    token_weight: ``token_weight(stats, **inputs) -> [..]``, such as class weights; this term's mean divides by their
    sum instead of by the number of valid tokens.

    class_weight: [V] replicated, column weights of the statistic "total".

    inputs: names of the function's keyword arguments, which ``HeadLoss.forward(inputs={...})`` passes: tensors that
    broadcast to the labels' shape, "sequences" or "teacher".

    tokenwise: True promises that a token's value depends on this token alone, so that the function may be called with
    some of the tokens [n] at a time, as a one-sweep `HeadLoss.linear` does. Statistic values are tokenwise anyway.

    Raises TypeError or ValueError for arguments of another kind.
    """

    name: str
    function: Callable[..., torch.Tensor]
    weight: float = 1.0
    want: tuple[str, ...] = ()
    token_weight: Callable[..., torch.Tensor] | None = None
    class_weight: torch.Tensor | None = None
    inputs: tuple[str, ...] = ()
    tokenwise: bool = False

    def __post_init__(self):
        if not isinstance(self.name, str):
            raise TypeError(f"a term's name must be a string, got {self.name!r}")
        owner = f"term {self.name!r}"
        _expect_function(owner, self.function)
        if isinstance(self.weight, torch.Tensor):
            if self.weight.dim():
                raise ValueError(f"{owner}: weight must be a number or a scalar tensor, got {list(self.weight.shape)}")
        elif not isinstance(self.weight, numbers.Real):
            raise TypeError(f"{owner}: weight must be a number or a scalar tensor, got {self.weight!r}")
        elif not math.isfinite(self.weight) or abs(self.weight) > torch.finfo(torch.float32).max:
            raise ValueError(f"{owner}: weight must be finite in fp32, got {self.weight}")
        _expect_names(owner, "want", self.want, known_statistics())
        _expect_names(owner, "inputs", self.inputs)


@dataclass(frozen=True)
class Metric:
    """Per-token values that a `HeadLoss` sums and reports, without gradient.

    function: ``function(stats, **inputs) -> {name: [..]}``. A name that begins with "max_" or "min_" becomes the
    extremum over valid tokens, any other name the sum over them.

    want, inputs: optional statistics and inputs that the function reads, as in `Term`.

    Raises TypeError or ValueError for arguments of another kind.
    """

    function: Callable[..., dict[str, torch.Tensor]]
    want: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()

    def __post_init__(self):
        _expect_function("metric", self.function)
        _expect_names("metric", "want", self.want, known_statistics())
        _expect_names("metric", "inputs", self.inputs)


METRICS: dict[str, StatisticValue] = {  # name -> the per-token value that is summed
    "accuracy": StatisticValue("hits"),
    "entropy": StatisticValue("entropy"),
    "log_prob": StatisticValue("log_prob"),
    "lse": StatisticValue("lse"),
    # these need the input "teacher": a `Teacher` for the first group, a `TopKTeacher` for the second
    **{name: StatisticValue(name) for name in (*FULL_TEACHER, *TOPK_TEACHER)},
}


def CrossEntropy(
    weight: float = 1.0,
    label_smoothing: float = 0.0,
    smoothing_formula: str = "torch",
    class_weight: torch.Tensor | None = None,
) -> Term:
    """Cross-entropy, as torch.nn.functional.cross_entropy computes it.

    label_smoothing: in [0, 1]. smoothing_formula: "torch" or "megatron"; see `losses.smoothed_cross_entropy`.
    class_weight: [V] replicated; the mean then divides by the sum of the labels' weights, as in torch.
    """
    if smoothing_formula not in ("torch", "megatron"):
        raise ValueError(f"smoothing_formula must be 'torch' or 'megatron', got {smoothing_formula!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if class_weight is not None and not isinstance(class_weight, torch.Tensor):
        raise TypeError(f"class_weight must be a tensor [V] or None, got {type(class_weight).__name__}")
    if not label_smoothing and class_weight is None:
        return Term("cross_entropy", StatisticValue("log_prob", negative=True), weight)
    token_weight, function = None, None
    if class_weight is not None:
        class_weight = class_weight.detach().float()
        token_weight = partial(losses.label_weight, class_weight=class_weight)
        function = partial(_weighted_cross_entropy, class_weight)
    if label_smoothing:
        options = {"smoothing": label_smoothing, "formula": smoothing_formula, "class_weight": class_weight}
        function = partial(losses.smoothed_cross_entropy, **options)
    want = ("total",) if label_smoothing else ()
    return Term("cross_entropy", function, weight, want, token_weight, class_weight, tokenwise=True)


def ZLoss(weight: float) -> Term:
    """Squared log-partition function, lse^2, which keeps logits from drifting."""
    return Term("z_loss", StatisticValue("lse", square=True), weight)


def Entropy(weight: float) -> Term:
    """Entropy bonus: minimises -entropy, with the entropy's own gradient."""
    return Term("entropy", StatisticValue("entropy", negative=True), weight, ("entropy",))


def _weighted_cross_entropy(class_weight, stats):
    return scaled(losses.label_weight(stats, class_weight), losses.cross_entropy(stats))


def _expect_function(owner: str, function):
    """Raise TypeError unless the function is callable and not a class."""
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"{owner}: function must be a function of the statistics, got {function!r}")


def _expect_names(owner: str, name: str, values, known=None):
    """Raise TypeError for anything but a tuple of strings, ValueError for strings that are not among the known ones."""
    if not isinstance(values, (tuple, list)) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"{owner}: {name} must be a tuple of names, got {values!r}")
    if known is not None and (unknown := set(values) - set(known)):
        raise ValueError(f"{owner}: {name} must be of {known}, got {sorted(unknown)}")
