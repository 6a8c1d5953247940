"""Terms that compare the student with a teacher's distribution, whole or top-K."""

from __future__ import annotations

from functools import partial
from typing import Literal, TypeAlias

from .. import losses
from ..engine.reductions import PerToken, StatisticValue
from ..losses.distillation import TOPK_DISTILLATIONS, Support
from ..spec import LogProb, NotNegative, PenaltyWeight, checked
from .terms import Term

Divergence: TypeAlias = Literal[
    "forward_kl", "reverse_kl", "cross_entropy", "jsd", "total_variation"
]


@checked
def Distillation(
    weight: PenaltyWeight = 1.0,
    divergence: Literal[Divergence, "kl_div", "rkl", "tv"] = "forward_kl",
    *,
    temperature_squared: bool = False,
    name: str | None = None,
) -> Term:
    """Divergence from a teacher's whole distribution. Input: "teacher", a `Teacher` with its
    temperatures.

    Labels of the call say which tokens count: without a term that reads them, any id where a token
    counts, and the ignore_index elsewhere. Take the last one: with 0 a forgotten ``shard=`` is not
    found. A mask of 0 and 1 in their place counts every token.

    Args:
        divergence: "forward_kl" = KL(teacher || student); "reverse_kl" = KL(student || teacher),
            inf where the teacher's logits have -inf and the student's do not, as after top-k;
            "cross_entropy" to the teacher's probabilities, which is the forward KL plus a constant;
            "jsd" = beta KL(teacher || m) + (1 - beta) KL(student || m), with m = beta teacher + (1 -
            beta) student and the beta of the `Teacher`; "total_variation". The last two take a
            second, small collective.
        temperature_squared: multiply value and gradient by T^2, T being the student's temperature.
        name: the term's name, by default the divergence's, or "teacher_cross_entropy".

    Examples:
        >>> logits, labels = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
        >>> teacher = Teacher(torch.tensor([[0.0, 1.0]]), temperature=2.0)
        >>> head_loss = HeadLoss([CrossEntropy(0.5), Distillation(0.5, "reverse_kl")])
        >>> head_loss(logits, labels, inputs={"teacher": teacher}).loss
        tensor(0.2179)

    Source: Hinton et al. (arXiv:1503.02531); reverse KL: MiniLLM (arXiv:2306.08543); jsd: GKD
    (arXiv:2306.13649).
    """
    is_sum = divergence == "cross_entropy"  # of two statistics; every other divergence is one
    want = ("forward_kl", "teacher_entropy") if is_sum else (divergence,)
    function: PerToken = losses.soft_cross_entropy if is_sum else StatisticValue(divergence)
    if is_sum or temperature_squared:
        function = partial(_distillation, function, temperature_squared)
    default = "teacher_cross_entropy" if is_sum else divergence
    return Term(
        default if name is None else name,
        function,
        weight,
        want,
        inputs=("teacher",),
        tokenwise=True,
        pointwise=True,
    )


@checked
def LKLoss(
    weight: PenaltyWeight = 1.0,
    form: Literal["lambda", "alpha", "lk_hybrid", "nla"] = "lambda",
    *,
    eta: NotNegative | None = None,
) -> Term:
    """LK loss of a draft model of speculative decoding. Input: "teacher", a `Teacher` with the
    target's logits, or for `HeadLoss.linear` a `TeacherHead`. Both distributions are at the
    teacher's temperatures.

    Args:
        form: "lambda", a mixture of forward KL and total variation, see `losses.lk_lambda`; "alpha",
            -log of the acceptance rate, see `losses.lk_alpha`. Both take a second, small collective.
            The term's name is "lk"; ``dataclasses.replace(term, name=..)`` has another.
        eta: of "lambda" alone; by default 3.0.

    Examples:
        >>> draft, labels = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
        >>> head_loss = HeadLoss(LKLoss(), metrics=AcceptanceRate())
        >>> target = Teacher(torch.tensor([[0.0, 1.0]]))
        >>> out = head_loss(draft, labels, inputs={"teacher": target})
        >>> out.loss, out.means()["acceptance_rate"].float()
        (tensor(0.4621), tensor(0.5379))

    Source: LK losses (arXiv:2602.23881).
    """
    if form == "alpha":
        if eta is not None:
            raise ValueError(f"eta is of form='lambda', got eta={eta} with form='alpha'")
        function: PerToken = losses.lk_alpha
        want: tuple[str, ...] = ("overlap",)
    else:
        function = partial(losses.lk_lambda, eta=3.0 if eta is None else eta)
        want = "forward_kl", "total_variation"
    return Term("lk", function, weight, want, tokenwise=True, pointwise=True)


@checked
def TopKDistillation(
    weight: PenaltyWeight = 1.0,
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "kl_div", "rkl"] = "forward_kl",
    support: Support = "topk",
    *,
    outside_log_prob: LogProb | None = None,
    temperature_squared: bool = False,
    name: str | None = None,
) -> Term:
    """Divergence from K entries of a teacher's distribution. Input: "teacher", a `TopKTeacher`.

    Args:
        divergence: "forward_kl", "reverse_kl", or "jsd" with the teacher's beta and a second, small
            collective.
        support: the set over which the student is normalised: "topk", the entries alone;
            "vocabulary", all ids; "tail", the entries and one more for all others. "tail" needs a
            teacher with renormalize=False, and its tail_log_prob unless log-probs are fp32 and the
            tail is large. Over the others a teacher with renormalize=False is no distribution, and
            a divergence from it may be negative.
        outside_log_prob: log-prob of the teacher outside of its entries, for the reverse KL over
            the vocabulary alone; by default -100.
        temperature_squared: as in `Distillation`.
        name: the term's name, by default "topk_" and the divergence's.

    Examples:
        >>> logits, labels = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
        >>> teacher = TopKTeacher(torch.tensor([[1, 0]]), torch.tensor([[0.7, 0.3]]).log())
        >>> HeadLoss([TopKDistillation()])(logits, labels, inputs={"teacher": teacher}).loss
        tensor(0.4024)
    """
    if outside_log_prob is None:
        outside_log_prob = -100.0
    elif (divergence, support) != ("reverse_kl", "vocabulary"):
        raise ValueError(
            "outside_log_prob is of divergence='reverse_kl' with support='vocabulary', got "
            f"{divergence!r} with {support!r}"
        )
    want = TOPK_DISTILLATIONS[divergence, support]
    function: PerToken = StatisticValue(want[0])
    if len(want) > 1 or temperature_squared:
        function = partial(
            _topk_distillation, divergence, support, outside_log_prob, temperature_squared
        )
    return Term(
        f"topk_{divergence}" if name is None else name,
        function,
        weight,
        want,
        inputs=("teacher",),
        tokenwise=True,
        pointwise=True,
    )


def is_own_function(function) -> bool:
    """Return True for a function that is not one of these terms', so that it may read anything of a
    teacher."""
    if isinstance(function, StatisticValue):
        return False
    return getattr(function, "func", None) not in (_distillation, _topk_distillation)


def reads_tail(function) -> bool:
    """Return False for functions of this package that read no tail_log_prob; of others True,
    because they may."""
    if is_own_function(function):
        return True
    is_topk = getattr(function, "func", None) is _topk_distillation
    return is_topk and "tail" in function.args


def _distillation(per_token, temperature_squared, stats, teacher):
    return _tempered(per_token(stats), temperature_squared, teacher)


def _topk_distillation(divergence, support, outside_log_prob, temperature_squared, stats, teacher):
    if support == "tail" and teacher.renormalize:
        raise ValueError(
            "support='tail' needs a TopKTeacher with renormalize=False, got True, which leaves no "
            "tail: write TopKTeacher(.., tail_log_prob=.., renormalize=False)"
        )
    min_tail = 1e-6 if divergence == "reverse_kl" else 0.0
    tail = losses.log_tail(stats, teacher.tail_log_prob, min_tail) if support == "tail" else None
    if divergence == "forward_kl":
        values = losses.topk_forward_kl(stats, support, tail)
    elif divergence == "reverse_kl":
        values = losses.topk_reverse_kl(stats, support, tail, outside_log_prob)
    else:
        values = losses.topk_jsd(stats, support, tail, teacher.beta_or_default)
    return _tempered(values, temperature_squared, teacher)


def _tempered(values, temperature_squared, teacher):
    """The values, times the square of the student's temperature if that is wanted."""
    if not temperature_squared:
        return values
    return losses.times_temperature_squared(values, teacher.student_temperature_or_default)
