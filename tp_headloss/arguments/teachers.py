"""Arguments that callers write: teachers of whole vocabularies, of some ids, and heads that make
logits."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch

from ..spec import Bias, OpenShare, TeacherTemperature, TensorLine, TokenValues, checked
from ..spec.checks import expect_number
from .made_whole import MadeWhole
from .options import NO_TRANSFORM, Transform

LOGITS = TensorLine("floating point", ("..", "width"), sharded=-1)
ENTRIES = "..", "K"
IDS = TensorLine("int64 or int32", ENTRIES, hint=": the order is TopKTeacher(ids, log_probs)")
MASK = TensorLine(
    "bool",
    ENTRIES,
    hint=": of a mask of 0 and 1 pass mask != 0, a tail as tail_log_prob=, and of what "
    "topk_log_probs returns TopKTeacher(top.ids, top.log_probs)",
)


class _Tempered(MadeWhole):
    """Temperatures of a teacher and its student."""

    called = "teacher."  # in messages
    # in errors about a misplaced one
    remedy = ": a loss takes it as inputs={'teacher': ..} of the call, vocab_statistics as teacher="
    temperature: float | torch.Tensor
    student_temperature: float | torch.Tensor | None
    beta: float | None

    @property
    def student_temperature_or_default(self) -> float | torch.Tensor:
        """The temperature of the student, which is the teacher's where none was given."""
        return self.temperature if self.student_temperature is None else self.student_temperature

    @property
    def beta_or_default(self) -> float:
        """The teacher's share of a Jensen-Shannon mixture, a half where none was given."""
        return 0.5 if self.beta is None else self.beta


@checked
@dataclass(frozen=True, eq=False)  # tensors have no one truth
class Teacher(_Tempered):
    """A teacher for distillation: logits of the same shard, compared at temperatures of their own.

    It holds the tensors that it was given and has no methods of theirs: cut, move or detach these,
    and make it anew, for another temperature, too.

    What is replicated must be equal on all ranks of the group, else results are undefined:
    ``Options(validate="full")`` finds it, and "checksums" hidden states as well.

    Args:
        logits: sharded like the student's, fp32, bf16 or fp16, or float64 where the student's
            are, never differentiated; log-probs of the whole vocabulary are logits, too, and of
            probabilities their log() is. ``Options(check=True)`` finds probabilities, and columns
            that each rank has normalised by itself; nothing finds negated log-probs, per cents (any
            numbers are logits), or columns of another rank, but for equal ones on two ranks, with
            ``Options(validate="full")``. The backward reads them again: leave their memory as it is
            until then. Columns at or beyond the shard's ``vocab_size`` take no part: a teacher of
            more ids is compared on the common ones, if that is the vocab_size and its logits are
            cut alike. Row i is of the position of row i of the student's logits. Logits that are
            divided by a temperature already need none.
        temperature: of the teacher, or one per token [..]. A token whose temperature in a tensor is
            not positive has a divergence of NaN.
        student_temperature: divides the student's logits (with bias, scale and softcap, whatever
            ``Transform.temperature`` is); None: the same as the teacher's.
        beta: the teacher's share of the Jensen-Shannon mixture of
            ``Distillation(divergence="jsd")``, by default 0.5; at its ends use forward_kl
            (0) or reverse_kl (1). A `HeadLoss` in which nothing reads it raises ValueError.

    Examples:
        >>> teacher = Teacher(torch.tensor([[0.0, 1.0]]), temperature=2.0)
        >>> vocab_statistics(
        ...     torch.tensor([[1.0, 0.0]]), want=("forward_kl",), teacher=teacher
        ... ).forward_kl
        tensor([0.1225])
    """

    of_tensor = ": write Teacher(logits)"
    remedy = (
        f"{_Tempered.remedy}, and an export its .logits, with transform=Transform(temperature=..) "
        "if it has a temperature"
    )
    made_anew = "Teacher(logits[..], ..)"
    logits: Annotated[torch.Tensor, LOGITS]
    temperature: TeacherTemperature = 1.0
    student_temperature: TeacherTemperature | None = None
    beta: OpenShare | None = None

    def __post_init__(self):
        temperature, logits = self.temperature, self.logits
        if isinstance(temperature, torch.Tensor) and temperature.dim() >= logits.dim():
            said = "hidden states and a weight are TeacherHead(hidden, weight)"
            if temperature.numel() == math.prod(tokens := tuple(logits.shape[:-1])):
                said = f"pass its .reshape({', '.join(map(str, tokens)) or '()'})"
            raise ValueError(
                f"teacher.temperature must be one per token of logits {list(logits.shape)}, got "
                f"{list(temperature.shape)}: {said}"
            )


@checked
@dataclass(frozen=True, eq=False)  # tensors have no one truth
class TopKTeacher(_Tempered):
    """A teacher of which only some ids per token are known, as `topk_log_probs` exports them.

    All of it must be equal on all ranks of the group, else results are undefined:
    ``Options(validate="full")`` finds it. Log-probs are natural logarithms of probabilities, at
    most 0. Logits (but where entries are renormalised, which makes them right), probabilities or a
    wrong sign in their place give wrong numbers without an error, unless ``Options(check=True)``
    looks at the values: probabilities that add up to more than 1 are an error, and with
    renormalize=False a warning where they add up to less than the K likeliest ids have (a tenth of
    K / V, in all tokens). Between these nothing shows, and logarithms to another base do only
    beside a tail, with which probabilities add up to 1.

    An entry with a negative id, a log-prob of -inf, or False in ``mask`` does not count; entries of
    the same id add up; an id at or beyond the vocabulary makes its token's distillation NaN (mask
    the ids that a student does not have).

    Args:
        ids: global, replicated, in any order; of the student's tokenizer, each row of the position
            of the same row of the student's logits. Nothing finds others.
        log_probs: fp32, bf16 or fp16 (float64 if the student's logits are), never differentiated.
        mask: by default all entries.
        tail_log_prob: log-prob of everything else, for losses that know a tail, such as the
            ``tail_log_prob`` of `topk_log_probs`. None: of 1 - the entries' probability, which is
            rounding if they are nearly everything, and in half precision long before that: without
            it, losses of a confident teacher are wrong by some per cent with float16 log-probs, and
            by half with bfloat16, and a reverse KL by some per cent with fp32. In
            `TopKDistillation` a computed tail of at most 1e-6 is 0, and in its reverse KL 1e-6.
        temperature: of the teacher: log_probs / temperature, renormalised; 1 if they were exported
            at a temperature.
        student_temperature: as in `Teacher`. The statistics of the entries and of everything else,
            such as "tail_log_mass", are the student's at this temperature; "log_probs_at" is at
            that of the `Transform`.
        renormalize: divide the entries' probabilities by their sum, so that no tail is left; a
            temperature needs it. False is for losses that read the tail: without it entries are no
            distribution, and a divergence from them may be negative.

    Examples:
        >>> teacher = TopKTeacher(torch.tensor([[2, 0]]), torch.tensor([[0.7, 0.2]]).log())
        >>> vocab_statistics(
        ...     torch.zeros(1, 9), want=("topk_forward_kl",), teacher=teacher
        ... ).topk_forward_kl
        tensor([0.1634])
    """

    made_anew = "TopKTeacher(ids[..], log_probs[..], ..)"
    ids: Annotated[torch.Tensor, IDS]
    log_probs: Annotated[torch.Tensor, TensorLine("floating point", ENTRIES)]
    mask: Annotated[torch.Tensor, MASK] | None = None
    tail_log_prob: TokenValues | None = None
    temperature: TeacherTemperature = 1.0
    student_temperature: TeacherTemperature | None = None
    renormalize: bool = True
    beta: OpenShare | None = None


@checked
@dataclass(frozen=True, eq=False)  # tensors have no one truth
class TeacherHead(_Tempered):
    """A `Teacher` for linear heads: its logits hidden @ weight^T + bias are made by blocks and
    never exist as a whole.

    For `HeadLoss.linear` and `linear_vocab_statistics`, which take it where they take a `Teacher`,
    and for `topk_log_probs`, which takes it in the place of logits and exports at its temperature.
    What is replicated must be equal on all ranks of the group, as for a `Teacher`, and the backward
    reads hidden states and weight again: leave their memory as it is until then. Neither the hidden
    states nor the weight nor the bias get a gradient, whether they require one or not.

    Logits have the operands' dtype, as torch.nn.functional.linear has it; with a bias, a softcap or
    ``Linear(exact_logits=True)`` they are fp32, not rounded in between. A teacher that shares the
    student's head is ``TeacherHead(hidden, weight)`` with the student's own weight; see
    `multi_token_targets`. The teacher of a draft model over a subset of the vocabulary (EAGLE-3)
    has the rows of its ids, see `select_rows`, and is normalised over these ids.

    Args:
        hidden: of the student's tokens, with a hidden size of its own, laid out over ranks like the
            student's: replicated, or this rank's [S/P, ..] with
            ``Linear.hidden_grad="reduce_scatter"``, gathered then.
        weight: at the student's bounds, of the dtype of ``hidden`` (but for autocast), which need
            not be the student's. ``select_rows(rows, torch.arange(V), shard=its_shard, to=shard)``
            lays out rows of other bounds or padding, or of another group.
        transform: bias, scale (positive) and softcap of the teacher's logits; its temperature must
            be 1.
        temperature, student_temperature, beta: as in `Teacher`.

    Examples:
        >>> hidden, weight, labels = torch.ones(1, 2), torch.eye(2), torch.tensor([0])
        >>> teacher = TeacherHead(torch.ones(1, 1), torch.tensor([[2.0], [0.0]]))
        >>> HeadLoss([Distillation()]).linear(hidden, weight, labels, inputs={"teacher": teacher}).loss
        tensor(0.3278)
    """

    made_anew = "TeacherHead(hidden[..], ..)"
    hidden: Annotated[torch.Tensor, TensorLine("floating point", ("..", "H_t"))]
    weight: Annotated[torch.Tensor, TensorLine("floating point", ("width", "H_t"), sharded=0)]
    bias: Bias | None = None
    transform: Transform | None = None
    temperature: TeacherTemperature = 1.0
    student_temperature: TeacherTemperature | None = None
    beta: OpenShare | None = None

    @property
    def whole_transform(self) -> Transform:
        """The transform of the teacher's logits with its bias and its temperature."""
        transform = self.transform or NO_TRANSFORM
        bias = transform.bias if self.bias is None else self.bias
        return replace(
            transform, bias=None if bias is None else bias.detach(), temperature=self.temperature
        )

    def __post_init__(self):
        if (transform := self.transform) is None:
            return
        if isinstance(transform.temperature, torch.Tensor) or transform.temperature != 1:
            raise ValueError(
                "the temperature of a TeacherHead is its own, got one in its transform: write "
                "TeacherHead(.., temperature=..)"
            )
        if self.bias is not None and transform.bias is not None:
            raise ValueError("the bias of a TeacherHead was given twice, and in its transform")
        expect_number("teacher.transform.scale", transform.scale)


def with_fields(teacher: Any, **fields: Any) -> Any:
    """Return a teacher with other fields, unchecked: terms see one without logits or hidden
    states."""
    found = copy.copy(teacher)
    for name, value in fields.items():
        object.__setattr__(found, name, value)
    return found
