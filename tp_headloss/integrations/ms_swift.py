"""ms-swift: a loss for its ``loss_map``, and functions of its Megatron trainers with their names
and arguments. Nothing of ms-swift is imported.

The functions have one more argument, ``tp_group``, which ms-swift looks up in Megatron. Unlike in
ms-swift they never write into the logits; log-probs, entropies and divergences are fp32 (float64 of
float64 logits); a label outside of the vocabulary has NaN. Labels are shifted already, and a
temperature has divided the logits before, where there is no argument for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import torch

from ..arguments.teachers import Teacher, TopKTeacher
from ..call.statistics import vocab_statistics
from ..head_loss import HeadLoss
from ..search.topk import topk_log_probs
from ..spec import CheckedBy, Ids, Logits, Positive, Share, Size, TensorLine, Unused, checked
from . import refuse_other_names
from .rl_tokens import IGNORED_LABEL, TpGroup, VocabSize, even_shard, next_tokens
from .token_counts import expect_mean_over_tokens

__all__ = [
    "LogitsLoss",
    "compute_logps_and_entropy_from_logits",
    "gkd_loss",
    "vocab_parallel_topk",
]
if not TYPE_CHECKING:  # to which a module with it would have every name
    __getattr__ = refuse_other_names(__name__, __all__)


class LogitsLoss:
    """A `HeadLoss` of logits, for ``--loss_type`` of ms-swift's supervised trainer.

        from swift.loss import loss_map  # in a file that --external_plugins names

        head_loss = HeadLoss([CrossEntropy(), ZLoss(1e-4)])
        loss_map["z_loss"] = functools.partial(LogitsLoss, head_loss=head_loss)

    Args:
        args, trainer: given by ms-swift.
        head_loss: with a scalar loss; default cross-entropy.

    Raises:
        ValueError: sequence parallelism, where ms-swift gives parts of sequences; a HeadLoss with
            reduction="none", by sequences, or with class weights, whose mean is none over tokens.
    """

    def __init__(self, args: Any, trainer: Any, head_loss: HeadLoss | None = None):
        self.head_loss = HeadLoss() if head_loss is None else head_loss
        ranks = trainer.template.sequence_parallel_size
        if ranks > 1:
            raise ValueError(
                f"LogitsLoss needs whole sequences, sequence_parallel_size 1, got {ranks}"
            )
        if self.head_loss.reduction == "none":
            raise ValueError("the loss is one number, got a HeadLoss with reduction='none'")
        expect_mean_over_tokens(
            self.head_loss,
            "ms-swift's num_items_in_batch",
            "a Term that multiplies its loss by weights is divided by tokens",
        )

    def __call__(
        self,
        outputs: Any,
        labels: torch.Tensor,
        *,
        num_items_in_batch: torch.Tensor | int | None = None,
        loss_scale: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return the loss, a scalar fp32. Called by ms-swift's trainer.

        Args:
            outputs: of the model, with ``logits`` [B, S, V].
            labels: [B, S], not shifted.
            num_items_in_batch: divides the sum; None: the tokens of this batch that have a label.
            loss_scale: [B S], factors of the tokens' losses in the order of the logits, as the
                trainer gives them.
        """
        logits = outputs.logits
        next_labels = next_tokens(labels, logits.shape[1], logits.device)
        if num_items_in_batch is None:
            num_items_in_batch = (next_labels != IGNORED_LABEL).sum()
        weight = None if loss_scale is None else loss_scale.view_as(next_labels)
        return self.head_loss(
            logits, next_labels, token_weight=weight, denominator=num_items_in_batch
        ).loss


@checked
def compute_logps_and_entropy_from_logits(
    logits: Logits,
    labels: Ids,
    compute_entropy: bool = False,
    entropy_chunk_size: Unused = 512,
    *,
    tp_group: TpGroup,
    vocab_size: VocabSize | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probs [B, S] of labels and the entropies [B, S], or None, replicated and
    differentiable.

    One pass over the logits and one collective; backward: no communication. A label of -100 has the
    log-prob 0 without a gradient.

    Args:
        logits: [B, S, V/P] sharded on V in even shards of tp_group.
        labels: [B, S], replicated.
        compute_entropy: True returns the entropies, which are 0 where the label is -100.
        entropy_chunk_size: accepted, and changes nothing, since log-probs of the whole vocabulary
            are never made.

    Examples:
        >>> labels = torch.tensor([2])
        >>> compute_logps_and_entropy_from_logits(torch.zeros(1, 4), labels, True, tp_group=None)
        (tensor([-1.3863]), tensor([1.3863]))
    """
    logits, shard = even_shard(logits, tp_group, vocab_size)
    want = ("entropy",) if compute_entropy else ()
    stats = vocab_statistics(logits, labels, shard=shard, want=want)
    return stats.log_prob, stats.entropy


@checked
def vocab_parallel_topk(
    logits: Logits, k: Size, *, tp_group: TpGroup, vocab_size: VocabSize | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest logits [.., k] of the whole vocabulary in descending order, up to a
    rounding in fp32, and their ids [.., k], replicated and without a gradient.

    Of equal logits the lowest id comes first.

    Args:
        logits: [.., V/P] sharded on V in even shards of tp_group.
        k: at most the size of the vocabulary.

    Examples:
        >>> vocab_parallel_topk(torch.tensor([[0.0, 2.0, 1.0]]), 2, tp_group=None)
        (tensor([[2., 1.]]), tensor([[1, 2]]))
    """
    logits, shard = even_shard(logits, tp_group, vocab_size)
    top = topk_log_probs(logits, k, shard=shard)
    return (top.log_probs + top.lse.unsqueeze(-1)).to(logits.dtype), top.ids


@checked
def gkd_loss(
    student_logits: Annotated[
        torch.Tensor, TensorLine("floating point", ("B", "S", "width"), sharded=-1)
    ],
    teacher_output: Annotated[Any, CheckedBy("ms-swift's TeacherOutput")],
    labels: Ids,
    beta: Share,
    temperature: Positive,
    gather_fn: Unused = None,
    log_softmax_fn: Unused = None,
    kl_div_fn: Unused = None,
    chunk_size: Unused = 512,
    *,
    tp_group: TpGroup,
    vocab_size: VocabSize | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the divergences from a teacher over the tokens that have a label, a scalar
    fp32, replicated and differentiable, and the number of these tokens.

    The logits are read where they are: neither those of labelled tokens nor log-probs of the whole
    vocabulary are copied. One collective, and a second, small one for 0 < beta < 1.

    Args:
        student_logits: [B, S, V/P] sharded on V in even shards of tp_group.
        teacher_output: ms-swift's TeacherOutput, either with ``full_logits`` of the student's shape
            and shards, or with ``topk_logprobs`` and ``topk_indices`` [B, S, K], replicated, over
            whose ids both are renormalised. A token all of whose topk_logprobs are -inf does not
            count.
        labels: [B, S], replicated; -100 for tokens that do not count.
        beta: the teacher's share of the Jensen-Shannon mixture; 0: forward KL; 1: reverse KL.
        temperature: of teacher and student.
        gather_fn, log_softmax_fn, kl_div_fn, chunk_size: accepted, and change nothing.

    Raises:
        ValueError: a teacher that has neither; one that answered another prompt, whose labels are
            at other positions than the student's.
    """
    teacher_labels = teacher_output.labels
    counts = labels != IGNORED_LABEL
    if teacher_labels is not None and not torch.equal(teacher_labels != IGNORED_LABEL, counts):
        raise ValueError(
            "the teacher's labels must be at the student's positions, got others: of a teacher "
            "that answered another prompt, select the tokens with labels of both first"
        )
    divergence, share = _divergence_of(beta)
    top_ids, top_log_probs = teacher_output.topk_indices, teacher_output.topk_logprobs
    teacher: Teacher | TopKTeacher
    if top_ids is not None and top_log_probs is not None:
        divergence = f"topk_{divergence}"
        counts = counts & (top_log_probs != -torch.inf).any(-1)
        teacher = TopKTeacher(top_ids, top_log_probs.detach(), temperature=temperature, beta=share)
    elif teacher_output.full_logits is not None:
        teacher = Teacher(teacher_output.full_logits.detach(), temperature, beta=share)
    else:
        raise ValueError(
            "teacher_output must have full_logits, or topk_logprobs and topk_indices, got neither"
        )
    logits, shard = even_shard(student_logits, tp_group, vocab_size)
    counted = torch.where(counts, 0, IGNORED_LABEL)  # all other labels are alike
    stats = vocab_statistics(logits, counted, shard=shard, want=(divergence,), teacher=teacher)
    return getattr(stats, divergence).sum(), counts.sum()


def _divergence_of(beta: float) -> tuple[str, float | None]:
    """Return the statistic of a share beta, and the share of a teacher, None where the statistic
    has none."""
    if beta in (0, 1):
        return ("reverse_kl" if beta else "forward_kl"), None
    return "jsd", beta
