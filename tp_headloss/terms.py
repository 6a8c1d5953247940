"""What a `HeadLoss` is made of: weighted terms and metrics, functions of the statistics and of named inputs."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from . import losses
from .losses.policy import CLIP
from .losses.ratio import scaled
from .reduce import Monomial
from .stats import OF_TEACHER, OF_TOPK, OPTIONAL
from .validation import expect_pair


def _expect_names(owner, name, values, known=None):
    """A TypeError for what is no tuple of strings, a ValueError for strings that are not among the known ones."""
    if not isinstance(values, (tuple, list)) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"{owner}: {name} must be a tuple of names, got {values!r}")
    if known is not None and (unknown := set(values) - set(known)):
        raise ValueError(f"{owner}: {name} must be of {known}, got {sorted(unknown)}")


def _expect_function(owner, function):
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"{owner}: function must be a function of the statistics, got {function!r}")


@dataclass(frozen=True)
class Term:
    """A weighted per-token loss: ``function(stats, **inputs) -> [..] fp32``, and the optional statistics it needs.

    inputs: names of what the function takes besides the statistics, from ``HeadLoss.forward(inputs={...})``: tensors
    that broadcast to the labels' shape, "sequences" or "teacher".

    A `reduce.Monomial` as the function, such as ``Monomial("lse", square=True)``, needs no kernels of its own.

    ``token_weight(stats, **inputs) -> [..]``, if given, is what this term's mean divides by the sum of (class weights).

    The function returns a value per token; `HeadLoss` masks and averages. Give functions of a module (and
    `functools.partial` for their constants), not lambdas, if the HeadLoss is to be pickled.

    Raises TypeError or ValueError for what does not fit, a weight that fp32 does not hold included.

    tokenwise: the function computes a token's value from this token alone, so that it may be called with some tokens
    [n] at a time, as a one-sweep `HeadLoss.linear` does. A Monomial is.
    """

    name: str
    function: Callable[..., torch.Tensor]
    weight: float = 1.0
    want: tuple[str, ...] = ()
    token_weight: Callable[..., torch.Tensor] | None = None
    class_weight: torch.Tensor | None = None  # [V] replicated: the weights of the statistic "total"
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
        _expect_names(owner, "want", self.want, OPTIONAL)
        _expect_names(owner, "inputs", self.inputs)


@dataclass(frozen=True)
class Metric:
    """Per-token values by name: ``function(stats, **inputs) -> {name: [..]}``, without gradient; as in `Term`.

    A name that begins with "max_" or "min_" becomes the extremum over valid tokens, any other their sum.
    """

    function: Callable[..., dict[str, torch.Tensor]]
    want: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()

    def __post_init__(self):
        _expect_function("metric", self.function)
        _expect_names("metric", "want", self.want, OPTIONAL)
        _expect_names("metric", "inputs", self.inputs)


METRICS: dict[str, tuple[Monomial, str]] = {  # name -> what is summed, and the statistic that it wants
    "accuracy": (Monomial("hits"), "argmax"),
    "entropy": (Monomial("entropy"), "entropy"),
    "log_prob": (Monomial("log_prob"), ""),
    "lse": (Monomial("lse"), ""),
    # with the input "teacher", a `Teacher` for the former and a `TopKTeacher` for the latter
    **{name: (Monomial(name), name) for name in (*OF_TEACHER, *OF_TOPK)},
}


def _weighted_cross_entropy(class_weight, stats):
    return scaled(losses.label_weight(stats, class_weight), losses.cross_entropy(stats))


def CrossEntropy(
    weight: float = 1.0,
    label_smoothing: float = 0.0,
    smoothing_formula: str = "torch",
    class_weight: torch.Tensor | None = None,
) -> Term:
    """Cross-entropy as torch.nn.functional.cross_entropy computes it; formulas in `losses.smoothed_cross_entropy`.

    class_weight: [V] fp32, replicated; the mean then divides by the sum of the labels' weights, as in torch.
    """
    if smoothing_formula not in ("torch", "megatron"):
        raise ValueError(f"smoothing_formula must be 'torch' or 'megatron', got {smoothing_formula!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if class_weight is not None and not isinstance(class_weight, torch.Tensor):
        raise TypeError(f"class_weight must be a tensor [V] or None, got {type(class_weight).__name__}")
    if not label_smoothing and class_weight is None:
        return Term("cross_entropy", Monomial("log_prob", negative=True), weight)
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
    """weight * lse^2."""
    return Term("z_loss", Monomial("lse", square=True), weight)


def Entropy(weight: float) -> Term:
    """An entropy bonus: weight * -entropy, with its gradient."""
    return Term("entropy", Monomial("entropy", negative=True), weight, ("entropy",))


DISTILLATIONS = {  # name -> what is minimised, and the statistics that it needs
    "forward_kl": (Monomial("forward_kl"), ("forward_kl",)),
    "reverse_kl": (Monomial("reverse_kl"), ("reverse_kl",)),
    "cross_entropy": (losses.soft_cross_entropy, ("forward_kl", "teacher_entropy")),
    "jsd": (Monomial("jsd"), ("jsd",)),
    "total_variation": (Monomial("total_variation"), ("total_variation",)),
}


def _distilled(per_token, temperature_squared, stats, teacher):
    values = per_token(stats)
    return losses.temperature_squared(values, teacher.of_student) if temperature_squared else values


def Distillation(
    weight: float = 1.0, divergence: str = "forward_kl", *, temperature_squared: bool = False, name: str | None = None
) -> Term:
    """A divergence from a teacher's whole distribution. Input: "teacher", an `api.Teacher` with its temperatures.

    divergence: "forward_kl" = KL(teacher || student), "reverse_kl", "cross_entropy" to the teacher's probabilities,
    which differs from the forward KL by a constant, "jsd" with the teacher's beta, or "total_variation"; the last two
    take a second, small collective. temperature_squared: times T^2 of the student's temperature, value and gradient
    alike. name: of the term, by default the divergence's (with "teacher_" before "cross_entropy").
    """
    if divergence not in DISTILLATIONS:
        raise ValueError(f"divergence must be one of {sorted(DISTILLATIONS)}, got {divergence!r}")
    per_token, want = DISTILLATIONS[divergence]
    plain = isinstance(per_token, Monomial) and not temperature_squared
    function = per_token if plain else partial(_distilled, per_token, temperature_squared)
    default = "teacher_cross_entropy" if divergence == "cross_entropy" else divergence
    return Term(name or default, function, weight, want, inputs=("teacher",), tokenwise=True)


TOPK_DISTILLATIONS = {  # (divergence, over) -> the statistics that it needs
    ("forward_kl", "topk"): ("topk_forward_kl",),
    ("forward_kl", "vocabulary"): ("topk_forward_kl", "topk_log_mass"),
    ("forward_kl", "tail"): ("topk_forward_kl", "topk_log_mass", "tail_log_mass"),
    ("reverse_kl", "topk"): ("topk_reverse_kl",),
    ("reverse_kl", "vocabulary"): ("topk_reverse_kl", "topk_log_mass", "tail_log_mass", "tail_entropy"),
    ("reverse_kl", "tail"): ("topk_reverse_kl", "topk_log_mass", "tail_log_mass"),
    ("jsd", "topk"): ("topk_jsd",),
    ("jsd", "vocabulary"): ("vocab_jsd", "topk_log_mass"),
    ("jsd", "tail"): ("vocab_jsd", "tail_log_mass"),
}


def _topk_distilled(divergence, over, outside, temperature_squared, stats, teacher):
    if over == "tail" and teacher.renormalize:
        raise ValueError("over='tail' needs a TopKTeacher with renormalize=False, got True, which leaves no tail")
    least = 1e-6 if divergence == "reverse_kl" else 0.0
    tail = losses.log_tail(stats, teacher.tail_log_prob, least) if over == "tail" else None
    if divergence == "forward_kl":
        values = losses.topk_forward_kl(stats, over, tail)
    elif divergence == "reverse_kl":
        values = losses.topk_reverse_kl(stats, over, tail, outside)
    else:
        values = losses.topk_jsd(stats, over, tail, teacher.beta)
    return losses.temperature_squared(values, teacher.of_student) if temperature_squared else values


def TopKDistillation(
    weight: float = 1.0,
    divergence: str = "forward_kl",
    over: str = "topk",
    *,
    outside: float = -100.0,
    temperature_squared: bool = False,
    name: str | None = None,
) -> Term:
    """A divergence from K entries of a teacher's distribution. Input: "teacher", an `api.TopKTeacher`.

    divergence: "forward_kl", "reverse_kl" or "jsd" (with the teacher's beta; a second, small collective); a mix of them
    is several terms. over: what the student is normalised over, see `losses.topk_forward_kl`; "tail" needs a teacher
    with renormalize=False. outside: the log-prob of a teacher outside of its entries, for the reverse KL over the
    vocabulary. temperature_squared, name: as in `Distillation`, the name with "topk_" before it.
    """
    if (divergence, over) not in TOPK_DISTILLATIONS:
        known = sorted({d for d, _ in TOPK_DISTILLATIONS})
        raise ValueError(
            f"divergence must be one of {known} over one of {list(losses.OVER)}, got {divergence!r} over {over!r}"
        )

    function = partial(_topk_distilled, divergence, over, outside, temperature_squared)
    if over == "topk" and not temperature_squared:
        function = Monomial(f"topk_{divergence}")
    want = TOPK_DISTILLATIONS[divergence, over]
    return Term(name or f"topk_{divergence}", function, weight, want, inputs=("teacher",), tokenwise=True)


OBJECTIVES = {  # name -> function of the log-prob, and the inputs it takes
    "reinforce": (losses.reinforce, ("advantages",)),
    "clip": (losses.clipped, ("advantages", "old_log_prob")),
    "cispo": (losses.cispo, ("advantages", "old_log_prob")),
    "sapo": (losses.sapo, ("advantages", "old_log_prob")),
    "gspo": (losses.gspo, ("advantages", "old_log_prob", "sequences")),
    "gspo-length-weighted": (losses.gspo_length_weighted, ("advantages", "old_log_prob", "sequences")),
    "gmpo": (losses.gmpo, ("advantages", "old_log_prob", "sequences")),
    "vespo": (losses.vespo, ("advantages", "old_log_prob", "sequences")),
    "clip-cov": (losses.clip_cov, ("advantages", "old_log_prob", "mask", "noise")),
    "kl-cov": (losses.kl_cov, ("advantages", "old_log_prob", "mask")),
    "positive-nll": (losses.positive_nll, ("rewards",)),
}


def _constants(stats, inputs):
    """Tensors as what they are here, numbers without a gradient in the statistics' precision."""
    dtype = stats.log_prob.dtype
    return {k: x.detach().to(dtype) if isinstance(x, torch.Tensor) else x for k, x in inputs.items()}


def _expect_options(owner, function, names, options):
    """Raise TypeError for keywords that `function` does not take or that are inputs, and for a clip that is no pair."""
    allowed = sorted(set(inspect.signature(function).parameters) - {"log_prob", *names})
    if unknown := sorted(set(options) - set(allowed)):
        raise TypeError(f"{owner} takes the options {allowed}, got {unknown}")
    if "clip" in options:
        expect_pair(f"{owner}: clip", options["clip"])


def _policy_loss(objective, options, stats, **inputs):
    per_token, names = OBJECTIVES[objective]
    inputs = _constants(stats, inputs)
    factor = inputs.pop("rollout_weight", None)
    if "mask" in names:
        inputs["mask"] = stats.valid
    loss = per_token(stats.log_prob, **inputs, **options)
    return loss if factor is None else scaled(factor, loss)


def _positive(stats, rewards, **_):
    return (rewards > 0).float()


def PolicyGradient(
    objective: str = "clip",
    weight: float = 1.0,
    *,
    rollout_weight: bool = False,
    rollout_log_weight: bool = False,
    name: str | None = None,
    **options,
) -> Term:
    """A policy-gradient objective of `losses.policy` by its name in OBJECTIVES, "clip" being PPO's, GRPO's and DAPO's.

    options: the keywords of that function that are not inputs, such as ``clip=(0.2, 0.28)`` or ``dual_clip=3.0``.
    Inputs of the forward: "advantages", "old_log_prob", for sequence-level objectives "sequences", see OBJECTIVES
    ("mask" is the valid tokens' and need not be passed); none gets a gradient. rollout_weight: multiply the loss by the
    input "rollout_weight", a weight per token from `losses.rollout`. rollout_log_weight: of "vespo" alone, add the
    input "rollout_log_weight", log-weights per token, to its log-ratios. name: of the term, by default the objective's.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective must be one of {sorted(OBJECTIVES)}, got {objective!r}")
    per_token, names = OBJECTIVES[objective]
    extra = {"rollout_weight": rollout_weight, "rollout_log_weight": rollout_log_weight}
    for flag, value in extra.items():
        if not isinstance(value, bool):
            raise TypeError(f"{flag} must be True or False, whether there is such an input, got {type(value).__name__}")
    if rollout_log_weight and objective != "vespo":
        raise ValueError(f"rollout_log_weight is an input of the objective 'vespo', got {objective!r}")
    _expect_options(f"the objective {objective!r}", per_token, (*names, "rollout_log_weight"), options)
    return Term(
        name or objective.replace("-", "_"),
        partial(_policy_loss, objective, options),
        weight,
        token_weight=_positive if objective == "positive-nll" else None,
        inputs=(*(n for n in names if n != "mask"), *(flag for flag, value in extra.items() if value)),
        tokenwise=not {"sequences", "mask"} & set(names),
    )


SAMPLERS = {"on-policy": None, "old": "old_log_prob", "generator": "generator_log_prob"}


def _kl(estimator, importance_weight, options, stats, **inputs):
    inputs = _constants(stats, inputs)
    sampler = inputs.get(SAMPLERS.get(importance_weight))
    if importance_weight == "on-policy":
        sampler = stats.log_prob.detach()
    keywords = {"estimator": estimator, "sampler_log_prob": sampler, **options}
    return losses.kl_estimate(stats.log_prob, reference_log_prob=inputs["reference_log_prob"], **keywords)


def KLToReference(
    weight: float, estimator: str = "k3", *, importance_weight: str | None = None, name: str = "kl", **options
) -> Term:
    """weight * `losses.kl_estimate` of KL(policy || reference); options are its clamps. Input: "reference_log_prob".

    importance_weight: None; "on-policy" for a weight of value 1 with the score function's gradient; "old" or
    "generator" for the ratio to the input "old_log_prob" or "generator_log_prob". Inputs get no gradient.
    """
    if importance_weight is not None and importance_weight not in SAMPLERS:
        raise ValueError(f"importance_weight must be None or one of {list(SAMPLERS)}, got {importance_weight!r}")
    if estimator not in losses.KL_ESTIMATORS:
        raise ValueError(f"estimator must be one of {losses.KL_ESTIMATORS}, got {estimator!r}")
    names = "reference_log_prob", "sampler_log_prob", "estimator"
    _expect_options("KLToReference", losses.kl_estimate, names, options)
    sampler = SAMPLERS.get(importance_weight)
    inputs = ("reference_log_prob",) + ((sampler,) if sampler else ())
    return Term(name, partial(_kl, estimator, importance_weight, options), weight, inputs=inputs, tokenwise=True)


def _metrics_of_log_prob(function, options, stats, **inputs):
    return function(stats.log_prob, **_constants(stats, inputs), **options)


def PolicyMetrics(
    clip: tuple[float, float] = CLIP,
    dual_clip: float | None = None,
    *,
    level: str = "token",
    reference: bool = False,
) -> Metric:
    """`losses.policy_metrics` of the inputs "advantages" and "old_log_prob", of the sequence's ratio with
    level="sequence" (input "sequences"), with the KL to "reference_log_prob" if ``reference``. Give it the clip of the
    objective: it does not know which one it accompanies."""
    if level not in ("token", "sequence"):
        raise ValueError(f"level must be 'token' or 'sequence', got {level!r}")
    expect_pair("PolicyMetrics: clip", clip)
    names = ("advantages", "old_log_prob")
    names += ("sequences",) * (level == "sequence") + ("reference_log_prob",) * reference
    options = {"clip": clip, "dual_clip": dual_clip}
    return Metric(partial(_metrics_of_log_prob, losses.policy_metrics, options), inputs=names)


def GeneratorMetrics(bounds: tuple[float, float] = (0.5, 2.0)) -> Metric:
    """`losses.generator_metrics` of the inputs "old_log_prob" and "generator_log_prob"."""
    expect_pair("GeneratorMetrics: bounds", bounds)
    function = partial(_metrics_of_log_prob, losses.generator_metrics, {"bounds": bounds})
    return Metric(function, inputs=("old_log_prob", "generator_log_prob"))
