"""Arguments that callers write: teachers of whole vocabularies, of some ids, and heads that make logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..spec import Temperature, check_as
from ..validation import expect_bool, expect_floating, expect_ids, expect_instance, expect_number, expect_real
from .options import NO_TRANSFORM, Transform


class _Tempered:
    """Temperatures of a teacher and its student, and the teacher's share of a Jensen-Shannon mixture."""

    temperature: float | torch.Tensor
    student_temperature: float | torch.Tensor | None
    beta: float

    def __post_init__(self):
        check_as(Temperature, "teacher.temperature", self.temperature)
        check_as(Temperature, "teacher.student_temperature", self.student_temperature_or_default)
        expect_real("beta", self.beta)
        if not 0 < self.beta < 1:
            raise ValueError(f"beta must be in (0, 1), got {self.beta}; at its ends use forward_kl or reverse_kl")

    @property
    def student_temperature_or_default(self) -> float | torch.Tensor:
        """The temperature of the student, which is the teacher's where none was given."""
        return self.temperature if self.student_temperature is None else self.student_temperature


@dataclass(frozen=True)
class Teacher(_Tempered):
    """A teacher for distillation: logits of the same shard, compared at temperatures of their own.

    Args:
        logits: [.., width] sharded on V like the student's, fp32, bf16 or fp16 (float64 if the student's are), never
            differentiated; log-probs are logits, too. Columns at or beyond the shard's ``vocab_size`` take no part, so
            a teacher with more ids than the student is compared on the common ones if that is the vocab_size (and its
            logits are cut at the same bounds).
        temperature: of the teacher, a number or one per token [..].
        student_temperature: divides the student's logits (with bias, scale and softcap, whatever
            ``Transform.temperature`` is); None: the same as the teacher's.
        beta: of the Jensen-Shannon divergence, the teacher's share of the mixture, in (0, 1).

    Examples:
        >>> teacher = Teacher(torch.tensor([[0.0, 1.0]]), temperature=2.0)
        >>> vocab_statistics(torch.tensor([[1.0, 0.0]]), want=("forward_kl",), teacher=teacher).forward_kl
        tensor([0.1225])
    """

    logits: torch.Tensor
    temperature: float | torch.Tensor = 1.0
    student_temperature: float | torch.Tensor | None = None
    beta: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        if self.logits is not None:  # as terms see it
            expect_floating("teacher.logits", self.logits)


@dataclass(frozen=True)
class TopKTeacher(_Tempered):
    """A teacher of which only some ids per token are known, as `topk_log_probs` exports them.

    An entry with a negative id, a log-prob of -inf, or False in ``mask`` does not count; entries of the same id add up;
    an id at or beyond the vocabulary makes its token's distillation NaN (mask the ids that a student does not have).

    Args:
        ids: [.., K] int64 or int32, global, replicated, in any order.
        log_probs: [.., K] fp32, bf16 or fp16 (float64 if the student's logits are).
        mask: [.., K] bool, or None for all entries.
        tail_log_prob: [..] log-prob of everything else, for losses that know a tail; None: of 1 - the entries'
            probability, which is as exact as their log-probs are (give it, if they are of half precision and nearly
            everything). A computed tail of at most 1e-6 counts as 0 in `TopKDistillation`, and as 1e-6 in its reverse
            KL.
        temperature: of the teacher, a number or one per token [..]: log_probs / temperature, renormalised; 1 for
            log-probs that were exported at a temperature.
        student_temperature, beta: as in `Teacher`.
        renormalize: the entries' probabilities are divided by their sum, so that there is no tail; needed with a
            temperature.

    Examples:
        >>> teacher = TopKTeacher(torch.tensor([[2, 0]]), torch.tensor([[0.7, 0.2]]).log())
        >>> vocab_statistics(torch.zeros(1, 9), want=("topk_forward_kl",), teacher=teacher).topk_forward_kl
        tensor([0.1634])
    """

    ids: torch.Tensor
    log_probs: torch.Tensor
    mask: torch.Tensor | None = None
    tail_log_prob: torch.Tensor | None = None
    temperature: float | torch.Tensor = 1.0
    student_temperature: float | torch.Tensor | None = None
    renormalize: bool = True
    beta: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        expect_bool("renormalize", self.renormalize)
        expect_ids("teacher.ids", self.ids)
        expect_floating("teacher.log_probs", self.log_probs)


@dataclass(frozen=True)
class TeacherHead(_Tempered):
    """A `Teacher` for linear heads: its logits hidden @ weight^T + bias are made by blocks and never exist as a whole.

    For `HeadLoss.linear`, `linear_vocab_statistics` and `topk_log_probs`, which take it where they take a `Teacher` or
    logits. Neither the hidden states nor the weight nor the bias get a gradient, whether they require one or not.

    Logits have the operands' dtype, as torch.nn.functional.linear has it; with a bias or a softcap they are fp32, not
    rounded in between. A teacher that shares the student's head is ``TeacherHead(hidden, weight)`` with the
    student's own weight; see `multi_token_targets`. The teacher of a draft model over a
    subset of the vocabulary (EAGLE-3) has the rows of its ids, see `select_rows`, and is normalised over these ids.

    Args:
        hidden: [.., H_t] of the student's tokens, with a hidden size of its own, laid out over ranks like the student's
            hidden states: replicated, or this rank's [S/P, ..] with ``Linear.hidden_grad="reduce_scatter"``, gathered
            then.
        weight: [width, H_t] sharded on V at the same bounds as the student's. One dtype with ``hidden`` (but for
            autocast), which may differ from the student's.
        bias: [width].
        transform: bias, scale (positive) and softcap of the teacher's logits; its temperature must be 1.
        temperature, student_temperature, beta: as in `Teacher`.

    Examples:
        >>> hidden, weight, labels = torch.ones(1, 2), torch.eye(2), torch.tensor([0])
        >>> teacher = TeacherHead(torch.ones(1, 1), torch.tensor([[2.0], [0.0]]))
        >>> HeadLoss([Distillation()]).linear(hidden, weight, labels, inputs={"teacher": teacher}).loss
        tensor(0.3278)
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    transform: Transform | None = None
    temperature: float | torch.Tensor = 1.0
    student_temperature: float | torch.Tensor | None = None
    beta: float = 0.5

    @property
    def whole_transform(self) -> Transform:
        """The transform of the teacher's logits with its bias and its temperature."""
        transform = self.transform or NO_TRANSFORM
        bias = transform.bias if self.bias is None else self.bias
        return replace(transform, bias=None if bias is None else bias.detach(), temperature=self.temperature)

    def __post_init__(self):
        super().__post_init__()
        if self.hidden is not None:  # as terms see it
            expect_floating("teacher.hidden", self.hidden)
        expect_floating("teacher.weight", self.weight)
        if self.bias is not None:
            expect_floating("teacher.bias", self.bias)
        expect_instance("teacher.transform", transform := self.transform, Transform)
        if transform is None:
            return
        if isinstance(transform.temperature, torch.Tensor) or transform.temperature != 1:
            raise ValueError("the temperature of a TeacherHead is its own, got one in its transform")
        if self.bias is not None and transform.bias is not None:
            raise ValueError("the bias of a TeacherHead was given twice, and in its transform")
        expect_number("teacher.transform.scale", transform.scale)
