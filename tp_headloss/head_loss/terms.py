"""Terms and metrics, the parts of a `HeadLoss`, and the terms that need labels alone."""

from __future__ import annotations

import inspect
import math
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, dataclass
from functools import partial
from typing import Annotated, Literal, TypeAlias

import torch

from .. import losses
from ..call.subclasses import refuse_dtensor
from ..engine.reductions import StatisticValue
from ..losses.ratio import scaled
from ..spec import (
    Callables,
    CheckedBy,
    ClassWeight,
    Names,
    PenaltyWeight,
    Share,
    Size,
    Weight,
    checked,
)
from ..statistics import FULL_TEACHER, OVER_SETS, TOPK_TEACHER, UNHEARD, known_statistics

# inputs that statistics are made with
OF_STATISTICS = "teacher", "sets", "ids"
Function: TypeAlias = Annotated[Callable[..., torch.Tensor] | StatisticValue, Callables()]
Want: TypeAlias = Annotated[
    tuple[str, ...],
    Names(known_statistics, unheard=UNHEARD),
    "Optional statistics that the function reads",
]
InputNames: TypeAlias = Annotated[tuple[str, ...], Names()]


@checked
@dataclass(frozen=True)
class Term:
    """Weighted per-token loss, with the optional statistics and the inputs that it needs.

    Args:
        name: key of this term in `HeadLossOutput.terms`, unique among the terms; a metric may have
            it, too.
        function: ``function(stats, **inputs) -> [..] fp32``, a loss per token; `HeadLoss` masks and
            averages. It reads the statistics that it gets: those of another call train that one's
            logits. Values must be equal on all ranks of the shard's group: nothing of the rank's
            own columns, no dropout by its own seed. They are of the whole vocabulary, so need no
            sum over ranks, and are not written to: an error, which of collectives, as
            ``dist.all_reduce(stats.entropy)``, and of what goes through ``.data`` or NumPy
            ``Options(check=True)`` alone finds. A `StatisticValue`, such as
            ``StatisticValue("lse", square=True)``, needs no kernel of its own, and wants its
            statistic by itself. A term is not called itself: ``term.function(stats)`` has the
            values alone. To pickle a HeadLoss, use functions of a module, and `functools.partial`
            for their constants, instead of lambdas, which all have one name where
            ``Options(validate="full")`` compares functions by name.
        weight: a tensor, floating point, is read in each call, so change it in place after the
            backward, ``weight.fill_(0.1)``; between forward and backward, torch's backward raises
            "modified by an inplace operation". A copy by copy.deepcopy has a weight of its own. It
            gets no gradient: a factor that is trained belongs into the function.
        token_weight: ``token_weight(stats, **inputs) -> [..]``, whose sum is the divisor of this
            term's mean, and nothing else: multiply the values in `function` yourself.
        class_weight: replicated, column weights of the statistic "total", read in each call.
        inputs: names of the function's keyword arguments, which ``HeadLoss.forward(inputs={...})``
            passes: tensors that broadcast to the labels' shape, "sequences", "teacher" (a `Teacher`
            or a `TopKTeacher`), "sets" or "ids". Name a teacher or sets only where the function
            itself reads them: the call takes them for the statistics in `want` as well. Where the
            function wants "log_probs_at", "ids" are [.., K], and an input may have a value for
            each; those below 0 are none. Where it wants "tail_log_mass" as well, the `TopKTeacher`
            has the same ids, and as student_temperature that of the `Transform`.
        tokenwise: True promises that a token's value depends on this token alone, so that the
            function may be called with some of the tokens [n] at a time, as a one-sweep
            `HeadLoss.linear` does. A `StatisticValue` always is. ``Options(check=True)`` compares.
        pointwise: True promises that, and besides that the function is arithmetic on fp32 lse,
            log_prob, entropy, total, mass, forward_kl, reverse_kl, teacher_entropy, jsd,
            total_variation, overlap, topk_forward_kl, vocab_forward_kl, tail_log_mass, teacher_mass
            and its inputs, with constants that never change (also of vocab_size). On the GPUs that
            `Options.gradient` names it is then traced once, and evaluated by the launch that reads
            the logits. A term that wants other statistics is evaluated as a `tokenwise` one.

    Examples:
        >>> focal = Term(
        ...     "focal", lambda stats: -(stats.log_prob.expm1() ** 2) * stats.log_prob, weight=0.5
        ... )
        >>> HeadLoss([CrossEntropy(), focal])(torch.zeros(1, 4), torch.tensor([0])).terms
        {'cross_entropy': tensor(1.3863), 'focal': tensor(0.7798)}
    """

    name: str
    function: Function
    weight: Weight = 1.0
    want: Want = ()
    token_weight: Function | None = None
    class_weight: ClassWeight | None = None
    inputs: InputNames = ()
    tokenwise: bool = False
    pointwise: bool = False

    remedy = ": a term stands in the list of a HeadLoss"  # in errors about a misplaced one

    def _is_no_number(self, *_):
        """Raise TypeError: terms are not added up by hand."""
        raise TypeError(
            "terms are not added or multiplied: a HeadLoss has a list of them, each with its "
            "weight, as HeadLoss([CrossEntropy(0.5), ZLoss(1e-4)])"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _is_no_number
    __neg__ = _is_no_number

    def __post_init__(self):
        refuse_dtensor("weight", self.weight)
        refuse_dtensor("class_weight", self.class_weight)
        of_label = getattr(self.token_weight, "func", None) is losses.label_weight
        if self.class_weight is not None and "total" not in self.want and not of_label:
            raise ValueError(
                f"class_weight of term {self.name!r} weighs the statistic 'total', which is not in "
                f"want={self.want}: weigh a token by its label with losses.label_weight"
            )
        owner = f"term {self.name!r}"
        _expect_arguments(owner, self.function, self.inputs)
        if self.token_weight is not None and not isinstance(self.token_weight, StatisticValue):
            _expect_arguments(f"the token_weight of {owner}", self.token_weight, self.inputs)
        self._expect_tokenwise_inputs()

    def _expect_tokenwise_inputs(self):
        """Raise ValueError for inputs of whole sequences or sets beside tokenwise or pointwise."""
        if not (self.tokenwise or self.pointwise) or isinstance(self.function, StatisticValue):
            return
        promise = "tokenwise" if self.tokenwise else "pointwise"
        if whole := [name for name in ("sequences", "sets") if name in self.inputs]:
            raise ValueError(
                f"term {self.name!r} takes {whole[0]!r}, which some of the tokens alone do not "
                f"have, so it is not {promise}: leave out {promise}=True"
            )


def _stay_as_made(self, name, value):
    """Raise FrozenInstanceError, which says how a weight follows a schedule."""
    raise FrozenInstanceError(
        f"a Term is not changed after it was made, got a new {name!r}: a weight that follows a "
        "schedule is a tensor, as in ZLoss(torch.tensor(1e-3)), which weight.fill_(0.0) changes "
        "after a backward; other terms are assigned, head_loss.terms = [..]"
    )


setattr(Term, "__setattr__", _stay_as_made)  # noqa: B010  # dataclass itself refuses one in the class


@checked
@dataclass(frozen=True)
class Metric:
    """Per-token values that a `HeadLoss` sums and reports, without gradient.

    Args:
        function: ``function(stats, **inputs) -> {name: [..]}``, summed over tokens; "max_" and
            "min_" names: extrema. Values must be equal on all ranks of the shard's group. Names are
            unique among the metrics; in `mean_metrics` a term of the same name is "loss/" and the
            name.
        inputs: inputs that the function takes, as in `Term`.

    Examples:
        >>> confident = Metric(lambda stats: {"confident": (stats.log_prob > -0.1).float()})
        >>> HeadLoss(metrics=confident)(torch.tensor([[9.0, 0.0]]), torch.tensor([0])).metrics
        {'confident': tensor(1.)}
    """

    function: Annotated[Callable[..., dict[str, torch.Tensor]], Callables()]
    want: Want = ()
    inputs: InputNames = ()
    remedy = ": a metric is one of metrics= of HeadLoss"  # in errors about a misplaced one

    def __post_init__(self):
        if isinstance(function := self.function, StatisticValue):
            name = function.statistic
            raise TypeError(
                f"a Metric's function must return values by name, got {function}: write "
                f"Metric(lambda stats: {{{name!r}: stats.{name}}}, want=({name!r},)), or of the "
                f"named ones metrics={name!r}"
            )
        _expect_arguments("metric", self.function, self.inputs)


Terms: TypeAlias = Annotated[Sequence[Term] | Term, CheckedBy("`Term`s")]
Metrics: TypeAlias = Annotated[
    Sequence[str | Metric] | str | Metric, CheckedBy("names and `Metric`s")
]
Over: TypeAlias = Annotated[
    Literal["vocabulary", "sets"], "What log-probs and entropy are normalised over"
]

METRICS: dict[str, StatisticValue] = {  # name -> the per-token value that is summed
    "accuracy": StatisticValue("hits"),
    "perplexity": StatisticValue("log_prob"),  # of whose mean `mean_metrics` makes a perplexity
    **{name: StatisticValue(name) for name in ("entropy", "log_prob", "lse", "rank")},
    # these need the input "teacher", a `Teacher` for the first group, a `TopKTeacher` for the
    # second, or "sets"
    **{name: StatisticValue(name) for name in (*FULL_TEACHER, *TOPK_TEACHER, *OVER_SETS)},
}


@checked
def TopKAccuracy(k: Size = 5) -> Metric:
    """Share of tokens whose label is among the k largest logits, as "top5_accuracy" for k = 5.

    A token whose loss is NaN counts as wrong: one whose label is outside of the vocabulary, or whose
    logits hold NaN or +inf, or nothing above -inf, whatever ids `topk_log_probs` has there.

    Args:
        k: at most the vocabulary's size, which the call knows: ValueError there for a larger one.

    Examples:
        >>> out = HeadLoss(metrics=TopKAccuracy(2))(
        ...     torch.tensor([[3.0, 2.0, 1.0]] * 2), torch.tensor([1, 2])
        ... )
        >>> float(out.means()["top2_accuracy"])
        0.5
    """
    return Metric(partial(_topk_accuracy, k), ("rank",))


@checked
def BitsPerByte() -> Metric:
    """Bits of the labels' log-probs per byte of text, as "bits_per_byte".

    Input: "num_bytes", those of each label's text, in the shape of the labels as they are scored;
    with ``Options(check=True)`` negative ones, and nothing but 0, are a ValueError. `CausalLMLoss`,
    which takes labels that are not shifted, takes their num_bytes and moves them, too. ``head_inputs``
    of a model in transformers are not moved: they take
    ``torch.nn.functional.pad(num_bytes[:, 1:], (0, 1))``, silently also others. Bytes of a whole
    document are no such input: divide its sum of log-probs. `mean_metrics` divides the sum of bits
    by that of the bytes, which is the metric "count/bits_per_byte"; where you divide sums by
    yourself (`reduce_metrics`, sequence_metrics), divide by that one, not by the count.

    Examples:
        >>> inputs = {"num_bytes": torch.tensor([4, 2])}
        >>> out = HeadLoss(metrics=BitsPerByte())(
        ...     torch.zeros(2, 8), torch.tensor([1, 2]), inputs=inputs
        ... )
        >>> float(out.means()["bits_per_byte"])  # 2 tokens of log2(8) bits in 6 bytes
        1.0
    """
    return Metric(_bits_per_byte, (), ("num_bytes",))


@checked
def AcceptanceRate() -> Metric:
    """Probability that a token sampled by a draft model is accepted, as "acceptance_rate". Input:
    "teacher", the target.

    Both distributions are at the teacher's temperatures, like all that is compared with a teacher,
    and not at that of the `Transform`: beside a distillation at another temperature than that of
    decoding, the rate needs a call of its own.

    Examples:
        >>> draft, labels = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
        >>> target = Teacher(torch.tensor([[0.0, 1.0]]))
        >>> out = HeadLoss(metrics=AcceptanceRate())(draft, labels, inputs={"teacher": target})
        >>> out.means()["acceptance_rate"].float()
        tensor(0.5379)

    Source: `losses.acceptance_rate`.
    """
    return Metric(_acceptance_rate, ("total_variation",))


def _acceptance_rate(stats):
    return {"acceptance_rate": losses.acceptance_rate(stats)}


def _topk_accuracy(k, stats):
    if k > stats.vocab_size:
        raise ValueError(
            f"k of TopKAccuracy must be at most {stats.vocab_size}, the size of the vocabulary, got {k}"
        )
    return {f"top{k}_accuracy": stats.rank <= k}


def _bits_per_byte(stats, num_bytes):
    return {"bits_per_byte": -stats.log_prob / math.log(2), "count/bits_per_byte": num_bytes}


@checked
def CrossEntropy(
    weight: Weight = 1.0,
    label_smoothing: Share = 0.0,
    smoothing_formula: Literal["torch", "megatron"] = "torch",
    class_weight: ClassWeight | None = None,
) -> Term:
    """Cross-entropy, as torch.nn.functional.cross_entropy computes it.

    Args:
        weight: negative unlearns the labels, and has no least value. A tensor is read in each call:
            ``weight.fill_(..)`` for a schedule.
        smoothing_formula: see `losses.smoothed_cross_entropy`.
        class_weight: replicated, copied; the mean then divides by the sum of the labels' weights,
            as in torch.

    Examples:
        >>> logits, labels = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
        >>> HeadLoss(CrossEntropy(label_smoothing=0.1))(logits, labels).loss
        tensor(0.5076)
        >>> torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
        tensor(0.5076)
    """
    refuse_dtensor("class_weight", class_weight)
    if not label_smoothing and class_weight is None:
        return Term("cross_entropy", StatisticValue("log_prob", negative=True), weight)
    token_weight = None
    function: Callable[..., torch.Tensor] = losses.cross_entropy
    if class_weight is not None:
        class_weight = class_weight.detach().to(torch.float32, copy=True)
        token_weight = partial(losses.label_weight, class_weight=class_weight)
        function = partial(_weighted_cross_entropy, class_weight)
    if label_smoothing:
        smoothed = partial(
            losses.smoothed_cross_entropy, smoothing=label_smoothing, formula=smoothing_formula
        )
        function = partial(smoothed, class_weight=class_weight)
    want = ("total",) if label_smoothing else ()
    alone = class_weight is None
    return Term(
        "cross_entropy",
        function,
        weight,
        want,
        token_weight,
        class_weight,
        tokenwise=True,
        pointwise=alone,
    )


@checked
def ZLoss(weight: PenaltyWeight) -> Term:
    """Squared log-partition function, lse^2, which keeps logits from drifting.

    Examples:
        >>> HeadLoss([CrossEntropy(), ZLoss(1e-4)])(torch.zeros(1, 4), torch.tensor([0])).terms
        {'cross_entropy': tensor(1.3863), 'z_loss': tensor(1.9218)}

    Source: PaLM (arXiv:2204.02311, section 5).
    """
    return Term("z_loss", StatisticValue("lse", square=True), weight)


@checked
def Entropy(weight: Weight, over: Over = "vocabulary") -> Term:
    """Entropy bonus: minimises -entropy, with the entropy's own gradient.

    Args:
        weight: positive rewards entropy, negative penalises it. A tensor is read in each call:
            ``weight.fill_(..)`` for a schedule.

    Examples:
        >>> HeadLoss([CrossEntropy(), Entropy(0.5)])(
        ...     torch.zeros(1, 4), torch.tensor([0])
        ... ).loss  # log 4 - log 4 / 2
        tensor(0.6931)
    """
    statistic = over_sets(over, "entropy")
    return Term("entropy", StatisticValue(statistic, negative=True), weight, (statistic,))


def over_sets(over: str, statistic: str) -> str:
    """Name of a statistic over the vocabulary or over each token's set."""
    return f"set_{statistic}" if over == "sets" else statistic


def _weighted_cross_entropy(class_weight, stats):
    return scaled(losses.label_weight(stats, class_weight), losses.cross_entropy(stats))


def is_weighted_by_label(term: Term) -> bool:
    """Whether a term is the label's -log p times the label's class weight."""
    return getattr(term.function, "func", None) is _weighted_cross_entropy


def _expect_arguments(owner: str, function, inputs: tuple[str, ...]):
    """Raise TypeError if a function cannot be called with the statistics and inputs of these
    names."""
    if torch.compiler.is_compiling():
        return
    if isinstance(function, StatisticValue):
        for name in ("square", "negative"):
            if not isinstance(value := getattr(function, name), bool):
                raise TypeError(f"{owner}: {name} must be True or False, got {value!r}")
        if unread := [name for name in inputs if name not in OF_STATISTICS]:
            raise TypeError(
                f"{owner}: a StatisticValue reads no inputs, got inputs={inputs}: a function of "
                f"(stats, {', '.join(unread)}) does"
            )
        return
    try:
        # a module takes anything
        signature = inspect.signature(getattr(function, "forward", function))
    except (TypeError, ValueError):  # of C
        return
    try:
        signature.bind(None, **dict.fromkeys(inputs))
    except TypeError as error:
        expected = ", ".join(("stats", *inputs))
        said = (
            "; what it takes besides is named in inputs=(..)"
            if len(signature.parameters) > 1 + len(inputs)
            else ""
        )
        raise TypeError(
            f"{owner}: function must take ({expected}), got {signature}: {error}{said}"
        ) from None


def warn_of_defaults(parts: tuple[Term | Metric, ...]):
    """Warn of functions with a default for what the call passes to others as an input."""
    if torch.compiler.is_compiling():
        return
    inputs = {name for part in parts for name in part.inputs}
    for part in parts:
        function = part.function
        if not isinstance(function, types.FunctionType):
            continue
        keywords = inspect.signature(function).parameters.keys()
        if missed := sorted(keywords & (inputs - {*part.inputs})):
            called = f"the function of term {part.name!r}" if isinstance(part, Term) else "a metric"
            warnings.warn(
                f"{called} takes {missed}, which others have as inputs of the call, and gets its "
                f"own default: name them in its inputs={tuple(missed)}",
                stacklevel=3,
            )
