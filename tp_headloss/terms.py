"""What a `HeadLoss` is made of: weighted terms and metrics, functions of the statistics and of named inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import losses
from .losses.policy import CLIP
from .losses.ratio import scaled
from .reduce import Monomial
from .stats import OF_TEACHER, OF_TOPK


@dataclass(frozen=True)
class Term:
    """A weighted per-token loss: ``function(stats, **inputs) -> [..] fp32``, and the optional statistics it needs.

    inputs: names of what the function takes besides the statistics, from ``HeadLoss.forward(inputs={...})``: tensors
    that broadcast to the labels' shape, "sequences" or "teacher".

    A `reduce.Monomial` as the function, such as ``Monomial("lse", square=True)``, needs no kernels of its own.

    ``token_weight(stats, **inputs) -> [..]``, if given, is what this term's mean divides by the sum of (class weights).

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


@dataclass(frozen=True)
class Metric:
    """Per-token values by name: ``function(stats, **inputs) -> {name: [..]}``, without gradient; as in `Term`.

    A name that begins with "max_" or "min_" becomes the extremum over valid tokens, any other their sum.
    """

    function: Callable[..., dict[str, torch.Tensor]]
    want: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()


METRICS: dict[str, tuple[Monomial, str]] = {  # name -> what is summed, and the statistic that it wants
    "accuracy": (Monomial("hits"), "argmax"),
    "entropy": (Monomial("entropy"), "entropy"),
    "log_prob": (Monomial("log_prob"), ""),
    "lse": (Monomial("lse"), ""),
    # with the input "teacher", a `Teacher` for the former and a `TopKTeacher` for the latter
    **{name: (Monomial(name), name) for name in (*OF_TEACHER, *OF_TOPK)},
}


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

    class_weight = None if class_weight is None else class_weight.detach().float()

    def token_weight(stats):
        return losses.label_weight(stats, class_weight)

    def function(stats):
        if label_smoothing:
            return losses.smoothed_cross_entropy(stats, label_smoothing, smoothing_formula, class_weight)
        return token_weight(stats) * losses.cross_entropy(stats)

    if not label_smoothing and class_weight is None:
        return Term("cross_entropy", Monomial("log_prob", negative=True), weight)
    want = ("total",) if label_smoothing else ()
    weighted = class_weight is not None
    own = token_weight if weighted else None
    return Term("cross_entropy", function, weight, want, own, class_weight, tokenwise=True)


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

    def function(stats, teacher):
        values = per_token(stats)
        return losses.temperature_squared(values, teacher.of_student) if temperature_squared else values

    plain = isinstance(per_token, Monomial) and not temperature_squared
    default = "teacher_cross_entropy" if divergence == "cross_entropy" else divergence
    return Term(name or default, per_token if plain else function, weight, want, inputs=("teacher",), tokenwise=True)


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

    def function(stats, teacher):
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

    plain = Monomial(f"topk_{divergence}") if over == "topk" and not temperature_squared else function
    want = TOPK_DISTILLATIONS[divergence, over]
    return Term(name or f"topk_{divergence}", plain, weight, want, inputs=("teacher",), tokenwise=True)


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


def _known_options(function, names, options):
    allowed = set(inspect.signature(function).parameters) - {"log_prob", *names}
    if unknown := set(options) - allowed:
        raise TypeError(f"{function.__name__} takes the options {sorted(allowed)}, got {sorted(unknown)}")


def PolicyGradient(
    objective: str = "clip", weight: float = 1.0, *, rollout_weight: bool = False, name: str | None = None, **options
) -> Term:
    """A policy-gradient objective of `losses.policy` by its name in OBJECTIVES, "clip" being PPO's, GRPO's and DAPO's.

    options: the keywords of that function that are not inputs, such as ``clip=(0.2, 0.28)`` or ``dual_clip=3.0``.
    Inputs of the forward: "advantages", "old_log_prob", for sequence-level objectives "sequences", see OBJECTIVES
    ("mask" is the valid tokens' and need not be passed); none gets a gradient. rollout_weight: multiply the loss by the
    input "rollout_weight", a weight per token from `losses.rollout`. name: of the term, by default the objective's.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective must be one of {sorted(OBJECTIVES)}, got {objective!r}")
    per_token, names = OBJECTIVES[objective]
    _known_options(per_token, names, options)

    def function(stats, **inputs):
        inputs = _constants(stats, inputs)
        factor = inputs.pop("rollout_weight", None)
        if "mask" in names:
            inputs["mask"] = stats.valid
        loss = per_token(stats.log_prob, **inputs, **options)
        return loss if factor is None else scaled(factor, loss)

    def positive(stats, rewards, **_):
        return (rewards > 0).float()

    return Term(
        name or objective.replace("-", "_"),
        function,
        weight,
        token_weight=positive if objective == "positive-nll" else None,
        inputs=tuple(n for n in names if n != "mask") + ("rollout_weight",) * rollout_weight,
        tokenwise=not {"sequences", "mask"} & set(names),
    )


def KLToReference(
    weight: float, estimator: str = "k3", *, importance_weight: str | None = None, name: str = "kl", **options
) -> Term:
    """weight * `losses.kl_estimate` of KL(policy || reference); options are its clamps. Input: "reference_log_prob".

    importance_weight: None; "on-policy" for a weight of value 1 with the score function's gradient; "old" or
    "generator" for the ratio to the input "old_log_prob" or "generator_log_prob". Inputs get no gradient.
    """
    samplers = {"on-policy": None, "old": "old_log_prob", "generator": "generator_log_prob"}
    if importance_weight is not None and importance_weight not in samplers:
        raise ValueError(f"importance_weight must be None or one of {list(samplers)}, got {importance_weight!r}")
    if estimator not in losses.KL_ESTIMATORS:
        raise ValueError(f"estimator must be one of {losses.KL_ESTIMATORS}, got {estimator!r}")
    _known_options(losses.kl_estimate, ("reference_log_prob", "sampler_log_prob", "estimator"), options)
    sampler = samplers.get(importance_weight)

    def function(stats, **inputs):
        inputs = _constants(stats, inputs)
        reference = inputs["reference_log_prob"]
        weigher = stats.log_prob.detach() if importance_weight == "on-policy" else inputs.get(sampler)
        keywords = dict(options, estimator=estimator, sampler_log_prob=weigher)
        return losses.kl_estimate(stats.log_prob, reference_log_prob=reference, **keywords)

    inputs = ("reference_log_prob",) + ((sampler,) if sampler else ())
    return Term(name, function, weight, inputs=inputs, tokenwise=True)


def _of_log_prob(function, names, options):
    def values(stats, **inputs):
        return function(stats.log_prob, **_constants(stats, inputs), **options)

    return Metric(values, inputs=names)


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
    names = ("advantages", "old_log_prob")
    names += ("sequences",) * (level == "sequence") + ("reference_log_prob",) * reference
    return _of_log_prob(losses.policy_metrics, names, {"clip": clip, "dual_clip": dual_clip})


def GeneratorMetrics(bounds: tuple[float, float] = (0.5, 2.0)) -> Metric:
    """`losses.generator_metrics` of the inputs "old_log_prob" and "generator_log_prob"."""
    return _of_log_prob(losses.generator_metrics, ("old_log_prob", "generator_log_prob"), {"bounds": bounds})
