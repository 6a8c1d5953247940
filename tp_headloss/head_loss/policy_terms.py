"""Terms and metrics of policy optimisation: functions of the label's log-prob and of recorded
log-probs."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, NamedTuple, TypeAlias, get_args

import torch

from .. import losses
from ..arguments.sequences import Sequences
from ..losses.kl import KLEstimator
from ..losses.policy import CLIP
from ..losses.ratio import Level, scaled
from ..spec import (
    FP32_MAX,
    TERM_WEIGHT,
    NumberLine,
    OneOf,
    Pair,
    PenaltyWeight,
    Positive,
    WeightBounds,
    checked,
)
from ..spec.aliases import hints
from ..statistics import VocabStatistics
from .terms import Metric, Over, Term, over_sets

Objective: TypeAlias = Literal[
    "reinforce", "clip", "cispo", "sapo", "gspo", "gspo-length-weighted", "gmpo", "vespo",
    "clip-cov", "kl-cov", "positive-nll",
]  # fmt: skip
CLIP_BY_NAME = ": a clip is given by name, clip=(low, high)"
ObjectiveWeight: TypeAlias = (
    Annotated[
        float,
        NumberLine(-FP32_MAX, FP32_MAX, "finite in fp32", of_pair=": write clip={}"),
        "Factor of the term in the loss",
    ]
    | Annotated[torch.Tensor, TERM_WEIGHT]
)
ObjectiveName: TypeAlias = Annotated[
    Literal[Objective, "gpg"], OneOf(get_args(Objective), CLIP_BY_NAME)
]
# name -> function of the log-prob, and its inputs
OBJECTIVES: dict[str, tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {
    "reinforce": (losses.reinforce, ("advantages",)),
    "clip": (losses.ppo_clip, ("advantages", "old_log_prob")),
    "cispo": (losses.cispo, ("advantages", "old_log_prob")),
    "sapo": (losses.sapo, ("advantages", "old_log_prob")),
    "gspo": (losses.gspo, ("advantages", "old_log_prob", "sequences")),
    "gspo-length-weighted": (
        losses.gspo_length_weighted,
        ("advantages", "old_log_prob", "sequences"),
    ),
    "gmpo": (losses.gmpo, ("advantages", "old_log_prob", "sequences")),
    "vespo": (losses.vespo, ("advantages", "old_log_prob", "sequences")),
    "clip-cov": (losses.clip_cov, ("advantages", "old_log_prob", "mask", "noise")),
    "kl-cov": (losses.kl_cov, ("advantages", "old_log_prob", "mask")),
    "positive-nll": (losses.positive_nll, ("rewards",)),
}

# objectives that clip ratios -> whose ratio, a level of `PolicyMetrics`
CLIP_LEVELS = {
    losses.ppo_clip: "token",
    losses.cispo: "token",
    losses.gmpo: "token",
    losses.clip_cov: "token",
    losses.gspo: "sequence",
    losses.gspo_length_weighted: "sequence",
}

RolloutFlag: TypeAlias = Annotated[
    bool, OneOf((True, False), ": the weights are an input of the call, inputs={..}")
]
# importance_weight of `KLToReference` -> the input that holds the sampler's log-probs, "" for the
# policy's own
Sampler: TypeAlias = Literal["on-policy", "old", "generator"]
SAMPLERS: dict[Sampler, str] = {
    "on-policy": "",
    "old": "old_log_prob",
    "generator": "generator_log_prob",
}


@checked
def PolicyGradient(
    objective: ObjectiveName = "clip",
    weight: ObjectiveWeight = 1.0,
    *,
    rollout_weight: RolloutFlag = False,
    rollout_log_weight: RolloutFlag = False,
    over: Over = "vocabulary",
    name: str | None = None,
    **options,
) -> Term:
    """Policy-gradient objective, by its name; "clip" is that of PPO, GRPO and DAPO.

    Log-probs of old policy, reference and loss need the same mask of labels and the same
    `Transform`, temperature included. A log-prob of exactly 0 at a token that counts is a warning
    with ``Options(check=True)``: ignored tokens have it.

    Inputs, without gradient: "advantages" and "old_log_prob", for "reinforce" the first alone;
    besides, "sequences" for "gspo", "gspo-length-weighted", "gmpo" and "vespo", and "noise" for
    "clip-cov"; for "positive-nll" only "rewards".

    Token and sequence are weighted by the reduction of the `HeadLoss`, whose default is the mean over
    tokens: the papers of "gspo" and "gmpo" have reduction="seq-mean-token-mean", as the whole loss
    `GSPO` has. "gspo-length-weighted" needs it: with the mean over tokens sequences count by their
    length twice. The clip is (0.2, 0.2) by default, of "gspo", too, not the (3e-4, 4e-4) of `GSPO`;
    of "gmpo" it is (0.4, 0.4), and bounds log r to [-low, high].

    All log-probs are natural logarithms. Keep recorded ones in fp32: rounded to bf16 or fp16, as
    engines may send them, they look like a policy that has changed, which ``Options(check=True)``
    warns of, as long as they have that dtype. Nothing tells "old_log_prob" from
    "reference_log_prob": see "What nothing can find" in docs/limits.md.

    Args:
        weight: the second argument by position, as in all terms: a clip is ``clip=(low, high)``.
        rollout_weight: multiply the loss by the input "rollout_weight", a weight per token from
            `losses.rollout`.
        rollout_log_weight: add the input "rollout_log_weight", log-weights per token, to the
            log-ratios of "vespo": ``old_log_prob - generator_log_prob``.
        over: "sets": log-probs renormalised over each token's set (input "sets"), inputs too, as
            truncating samplers'. The sets are those of the loss's `Transform`.
        name: the term's name, by default the objective's.
        options: keyword arguments of the objective's function, such as ``clip=(0.2, 0.28)`` or
            ``dual_clip=3.0``.

    Examples:
        >>> logits, labels = torch.zeros(1, 2, 4), torch.tensor([[0, 3]])  # [batch, sequence, V]
        >>> old = log_probs(logits, labels, differentiable=False).log_prob
        >>> inputs = {"advantages": torch.tensor([[2.0, -1.0]]), "old_log_prob": old}
        >>> HeadLoss([PolicyGradient("clip", clip=(0.2, 0.28))])(logits, labels, inputs=inputs).loss
        tensor(-0.5000)

    Source: The functions of `losses` name the paper of each objective: `losses.ppo_clip` for
        "clip", and for any other one the function of its own name with _ for -, such as
        `losses.gspo_length_weighted` for "gspo-length-weighted".
    """
    per_token, names = OBJECTIVES[objective]
    extra = {"rollout_weight": rollout_weight, "rollout_log_weight": rollout_log_weight}
    if rollout_log_weight and objective != "vespo":
        raise ValueError(
            f"rollout_log_weight is an input of the objective 'vespo', got {objective!r}"
        )
    _expect_options(
        f"the objective {objective!r}", per_token, (*names, "rollout_log_weight"), options
    )
    options = {name: as_tuples(x) for name, x in options.items()}
    function = partial(_policy_loss, per_token, options, over_sets(over, "log_prob"))
    inputs = (*(n for n in names if n != "mask"), *(flag for flag, value in extra.items() if value))
    call_with_one_token(function, inputs)
    return Term(
        objective.replace("-", "_") if name is None else name,
        function,
        weight,
        _wanted(over),
        token_weight=_has_positive_reward if objective == "positive-nll" else None,
        inputs=inputs,
        tokenwise=not {"sequences", "mask"} & set(names),
        pointwise=not {"sequences", "mask"} & set(names),
    )


@checked
def KLToReference(
    weight: PenaltyWeight,
    estimator: Literal[KLEstimator, "low_var_kl"] = "k3",
    *,
    importance_weight: Sampler | None = None,
    over: Over = "vocabulary",
    name: str = "kl",
    **options,
) -> Term:
    """Estimate of KL(policy || reference), see `losses.kl_estimate`. Input, without gradient:
    "reference_log_prob".

    Args:
        weight: the value of a tensor is never looked at, one below 0 included.
        estimator: the gradient of "k1" and "abs" is no KL's: that of "k1" has mean 0 over the
            policy's own samples, and trains nothing; write "k1+", "abs+". The value of "k3" is
            clamped to 10 by default, with gradient 0 beyond.
        importance_weight: by default none; "on-policy" for a weight of value 1 with the score function's
            gradient; "old" or "generator" for the ratio to the input "old_log_prob" or
            "generator_log_prob", which gets no gradient.
        options: the clamps of `losses.kl_estimate`; ``input_clamp=None, output_clamp=None``: none.

    Examples:
        >>> logits, labels = torch.zeros(1, 2, 4), torch.tensor([[0, 3]])  # [batch, sequence, V]
        >>> old = log_probs(logits, labels, differentiable=False).log_prob
        >>> head_loss = HeadLoss([CrossEntropy(), KLToReference(0.1)])
        >>> head_loss(logits, labels, inputs={"reference_log_prob": old - 1}).terms[
        ...     "kl"
        ... ] / 2  # e^-1 + 1 - 1
        tensor(0.3679)
    """
    names = "reference_log_prob", "sampler_log_prob", "estimator"
    _expect_options("KLToReference", losses.kl_estimate, names, options)
    sampler = importance_weight and SAMPLERS[importance_weight]
    inputs = ("reference_log_prob",) + ((sampler,) if sampler else ())
    function = partial(
        _kl, losses.kl_estimate, estimator, importance_weight, options, over_sets(over, "log_prob")
    )
    call_with_one_token(function, inputs)
    return Term(
        name, function, weight, _wanted(over), inputs=inputs, tokenwise=True, pointwise=True
    )


@checked
def PolicyMetrics(
    clip: Pair = CLIP,
    dual_clip: Positive | None = None,
    *,
    level: Level = "token",
    reference: bool = False,
    over: Over = "vocabulary",
) -> Metric:
    """Metrics of a policy update, see `losses.policy_metrics`. Inputs: "advantages" and
    "old_log_prob".

    Args:
        dual_clip: that of the objective.
        clip: that of the objective as distances of r from 1, whatever its own convention: beside a
            "cispo" with convention="bound" and clip=(0.0, 5.0) it is (1.0, 4.0), and beside a
            "gmpo", which bounds log r to [-low, high], (1 - exp(-low), exp(high) - 1). A `HeadLoss`
            warns of others than its objective has.
        level: "token" for the token's ratio, "sequence" for its sequence's (input "sequences"), as
            GSPO clips it.
        reference: True adds the KL to the input "reference_log_prob".

    Examples:
        >>> logits, labels = torch.zeros(1, 2, 4), torch.tensor([[0, 3]])  # [batch, sequence, V]
        >>> old = log_probs(logits, labels, differentiable=False).log_prob
        >>> inputs = {"advantages": torch.tensor([[2.0, -1.0]]), "old_log_prob": old - 0.5}
        >>> out = HeadLoss(metrics=PolicyMetrics(clip=(0.2, 0.28)))(logits, labels, inputs=inputs)
        >>> mean_metrics(out)["pg_clip_fraction"], out.metrics["max_ratio"]
        (tensor(0.5000, dtype=torch.float64), tensor(1.6487))
    """
    names: tuple[str, ...] = ("advantages", "old_log_prob")
    names += ("sequences",) * (level == "sequence") + ("reference_log_prob",) * reference
    options = {"clip": as_tuples(clip), "dual_clip": dual_clip}
    function = partial(
        _log_prob_metrics, losses.policy_metrics, options, over_sets(over, "log_prob")
    )
    call_with_one_token(function, names)
    return Metric(function, _wanted(over), names)


@checked
def GeneratorMetrics(bounds: WeightBounds = (0.5, 2.0), *, over: Over = "vocabulary") -> Metric:
    """Metrics of trainer against generator, see `losses.generator_metrics`.

    Inputs: "old_log_prob" and "generator_log_prob".

    Args:
        bounds: "is_oob_ratio" counts importance ratios outside of them.

    Examples:
        >>> logits, labels = torch.zeros(1, 2, 4), torch.tensor([[0, 3]])  # [batch, sequence, V]
        >>> old = log_probs(logits, labels, differentiable=False).log_prob
        >>> inputs = {"old_log_prob": old, "generator_log_prob": old - 0.5}
        >>> HeadLoss(metrics=GeneratorMetrics())(logits, labels, inputs=inputs).metrics[
        ...     "max_logprob_diff"
        ... ]
        tensor(0.5000)
    """
    statistic, options = over_sets(over, "log_prob"), {"bounds": as_tuples(bounds)}
    function = partial(_log_prob_metrics, losses.generator_metrics, options, statistic)
    return Metric(function, _wanted(over), ("old_log_prob", "generator_log_prob"))


def as_tuples(x):
    """Return lists, also in lists, as tuples, which the caller cannot change later."""
    return tuple(map(as_tuples, x)) if isinstance(x, (list, tuple)) else x


class ClipOptions(NamedTuple):
    """Which ratios count as clipped: the arguments of `PolicyMetrics` that an objective has, too."""

    clip: tuple[float, ...]  # low, high
    dual_clip: float | None
    level: str

    def __str__(self):
        dual_clip = f", dual_clip={self.dual_clip}" * (self.dual_clip is not None)
        level = f", level={self.level!r}" * (self.level != "token")
        low, high = (float(f"{distance:.4g}") for distance in self.clip)
        return f"clip=({low:g}, {high:g}){dual_clip}{level}"


def warn_of_another_clip(terms: tuple[Term, ...], metrics: tuple[Metric, ...]) -> None:
    """Warn of metrics that count other ratios as clipped than the objective beside them does."""
    if torch.compiler.is_compiling():
        return
    clips = [_clip_of_objective(term.function) for term in terms]
    objectives = [clip for clip in clips if clip is not None]
    clips = [_clip_of_metrics(metric) for metric in metrics]
    counted = [clip for clip in clips if clip is not None]
    if objectives and counted and not {*map(str, objectives)} & {*map(str, counted)}:
        warnings.warn(
            f"the objective has {objectives[0]}, and PolicyMetrics beside it counts what "
            f"{counted[0]} clips: write PolicyMetrics({objectives[0]})",
            stacklevel=2,
        )


def _clip_of_objective(function) -> ClipOptions | None:
    """Return the options of a term's function, None if it is no objective with a clip."""
    if not isinstance(function, partial) or function.func is not _policy_loss:
        return None
    per_token, options, _ = function.args
    if per_token not in CLIP_LEVELS:
        return None
    default = inspect.signature(per_token).parameters["clip"].default
    low, high = map(float, options.get("clip", default))
    if per_token is losses.gmpo:  # a clip of log r
        low, high = -math.expm1(-low), math.expm1(high)
    if options.get("convention") == "bound":
        low, high = 1.0, high - 1
    return ClipOptions((low, high), options.get("dual_clip"), CLIP_LEVELS[per_token])


def _clip_of_metrics(metric: Metric) -> ClipOptions | None:
    """Return the options of `PolicyMetrics`, None of other metrics."""
    function = metric.function
    if not isinstance(function, partial) or function.func is not _log_prob_metrics:
        return None
    per_token, options, _ = function.args
    if per_token is not losses.policy_metrics:
        return None
    level = "sequence" if "sequences" in metric.inputs else "token"
    return ClipOptions(tuple(map(float, options["clip"])), options["dual_clip"], level)


def call_with_one_token(function, inputs: tuple[str, ...]):
    """Call a function of a term or a metric with one token, and return its result.

    Options that the function refuses are so refused where they are written.
    """
    zero = torch.zeros(1, 1, dtype=torch.float32, device="cpu")
    stats = VocabStatistics._make([zero] * len(VocabStatistics._fields))._replace(
        valid=torch.ones_like(zero, dtype=torch.bool)
    )
    given = {
        name: Sequences.from_mask(stats.valid) if name == "sequences" else zero for name in inputs
    }
    with torch.no_grad():
        return function(stats, **given)


def _wanted(over: str) -> tuple[str, ...]:
    """The optional statistic that log-probs are."""
    return ("set_log_prob",) if over == "sets" else ()


def _policy_loss(per_token, options, statistic, stats, **inputs):
    inputs = _constants(stats, inputs)
    factor = inputs.pop("rollout_weight", None)
    if "mask" in per_token.lines:
        inputs["mask"] = stats.valid
    loss = per_token.__wrapped__(getattr(stats, statistic), **inputs, **options)
    return loss if factor is None else scaled(factor, loss)


def _has_positive_reward(stats, rewards, **_):
    """Token weights of "positive-nll": 1.0 where the reward is positive, else 0.0."""
    return (rewards > 0).float()


def _kl(kl_estimate, estimator, importance_weight, options, statistic, stats, **inputs):
    log_prob = getattr(stats, statistic)
    inputs = _constants(stats, inputs)
    sampler = inputs.get(SAMPLERS.get(importance_weight, ""))
    if importance_weight == "on-policy":
        sampler = log_prob.detach()
    keywords = {"estimator": estimator, "sampler_log_prob": sampler, **options}
    return kl_estimate(log_prob, reference_log_prob=inputs["reference_log_prob"], **keywords)


def _log_prob_metrics(function, options, statistic, stats, **inputs):
    return function(getattr(stats, statistic), **_constants(stats, inputs), **options)


def _constants(stats, inputs):
    """Detach the tensors among the inputs and convert them to the statistics' precision."""
    dtype = stats.log_prob.dtype
    tensors = {
        k: x.detach() if x.requires_grad else x
        for k, x in inputs.items()
        if isinstance(x, torch.Tensor)
    }
    return inputs | {k: x.to(dtype) for k, x in tensors.items()}


def _expect_options(owner: str, function, names, options):
    """Raise TypeError or ValueError for keywords that are inputs, unknown to the function, or
    refused by their line."""
    allowed = sorted(set(function.lines) - {"log_prob", *names})
    if unknown := sorted(set(options) - set(allowed)):
        raise TypeError(
            f"{owner} takes the options {allowed}, got "
            f"{unknown}{hints(unknown, allowed, 'keyword')}"
        )
    for name, value in options.items():
        function.lines[name].check(f"{owner}: {name}", value, {})
