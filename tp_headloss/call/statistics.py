"""The public functions on logits: validate from metadata, resolve options, call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..arguments.id_sets import IdSets
from ..arguments.options import DEFAULTS, Options, Transform
from ..arguments.teachers import Teacher, TopKTeacher
from ..engine.autograd import Statistics
from ..engine.request import Request
from ..engine.ways import Way, general
from ..ranks.shard import VocabShard
from ..spec import FLAG, Labels, Logits, TokenIds, TotalWeight, described
from ..spec.checks import (
    OTHER_BATCHES,
    hint_of_label,
    refuse_export,
    refuse_tokens,
    refuse_transforms,
)
from ..statistics import MaybeNone, VocabStatistics, documented_fields, without_arithmetic
from .agreement import Agreement
from .compile import uncompiled_where_needed
from .given import Given, Want
from .given_logits import expect_logits
from .not_finite import expect_known
from .request_of import build_request


@uncompiled_where_needed
@described
def vocab_statistics(
    logits: Logits,
    labels: Labels | None = None,
    *,
    shard: VocabShard | None = None,
    want: Want = (),
    transform: Transform | None = None,
    teacher: Teacher | TopKTeacher | None = None,
    sets: IdSets | None = None,
    ids: TokenIds | None = None,
    total_weight: TotalWeight | None = None,
    ignore_index: int = -100,
    options: Options | None = None,
) -> VocabStatistics:
    """Return differentiable per-token statistics of the whole vocabulary, from this rank's logits.

    logits [.., width] sharded on V, labels [..] replicated -> statistics [..] fp32 replicated. One
    collective forward (none at one rank), backward: no communication; gradients meet in one kernel
    and are rounded once.

    Args:
        logits: fp32, bf16 or fp16 (float64 with the torch backend), any leading shape and strides;
            never written unless ``options.inplace``, when the backward overwrites them and a later
            use of the old values by autograd raises. Without a shard nothing tells hidden states
            from logits of H ids.
        labels: global ids. ``ignore_index`` wins over everything, a valid id included. Any other
            label outside ``[0, vocab_size)`` makes its token NaN on every rank (``options.check``
            raises instead). A mask of 0 and 1 is no label: all its tokens would count, as ids 0
            and 1.
        shard: the columns this rank owns; None: ``logits`` hold the whole vocabulary, or are a
            DTensor that says it, ``Shard(-1)`` on one dimension of its mesh (labels and the like
            are then plain or DTensors; results are plain, and of this rank's tokens where another
            dimension shards them). No check can find a forgotten one in a call without labels.
        want: of "entropy", "collision", "total", "argmax" and "rank", with a `Teacher` of
            `statistics.FULL_TEACHER`, with a `TopKTeacher` of `statistics.TOPK_TEACHER`, with
            ``sets`` of `statistics.OVER_SETS`, with ``ids`` "log_probs_at"; lse is always there,
            log_prob and target_logit with labels. The Jensen-Shannon divergences and
            "total_variation" take a second, small collective, "rank" one before, of labels' logits,
            all others one.
        sets: those whose statistics are in ``want``, such as those of `kept_ids`.
        ids: global ids, replicated, whose log-probs are "log_probs_at" [.., K], in any order, also
            several times. A negative id is none, and has 0, and one at or beyond the vocabulary is
            NaN. They are z - lse, rounded, so 0 above -6e-8, as those of an fp32 log_softmax. Near
            0 accurate are log_prob, with the id as label, and log(1 - p), the "tail_log_mass" of a
            ``TopKTeacher(ids, log_probs, renormalize=False)``.
        total_weight: column weights w of ``total`` (class weights), not differentiable.
        ignore_index: label of tokens that are left out.

    Returns:
        `VocabStatistics` of tokens [..]. Those that ``want`` does not name are None, and so are
        those of a label without labels: ``stats.rank == 1`` is False where nothing wanted "rank".

    Raises:
        TypeError, ValueError: arguments that do not fit together, from metadata alone and hence on
            every rank.

    Examples:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)  # [tokens, V]
        >>> stats = vocab_statistics(logits, torch.tensor([0, 2]), want=("entropy",))
        >>> stats.log_prob.detach(), stats.entropy.detach()
        (tensor([-0.4076, -1.0986]), tensor([0.8324, 1.0986]))
        >>> (-stats.log_prob - 0.01 * stats.entropy).mean().backward()  # any PyTorch on statistics
    """
    given = Given.checked(logits, labels, shard, want, transform, options)._replace(
        teacher=teacher, sets=sets, ids=ids, total_weight=total_weight, ignore_index=ignore_index
    )
    with Agreement(given.options, shard) as agreement:
        given = given.local()
        agreement.record("vocab_statistics", given.shard, **given.facts())
        request = build_request(given)
    in_forward = given.options.gradient == "forward"
    if in_forward and torch.is_grad_enabled() and request.tensors.logits.requires_grad:
        raise ValueError(
            "gradient='forward' is for a HeadLoss, whose forward knows the loss, got statistics "
            "alone"
        )
    refuse_transforms()
    return computed_statistics(request, given.labels, given.options)[0]


@without_arithmetic
@documented_fields
class LogProbs(NamedTuple):
    """Log-probs, entropy and lse per token, as a trainer needs them of a policy or reference.

    All are fp32, of the labels' shape, with equal bits on every rank.

    Attributes:
        log_prob: log p of the label, never above 0; 0 where ignored.
        entropy: -sum p log p over the whole vocabulary, nats; None if it was not asked for.
        lse: log sum exp of the transformed logits.

    Examples:
        >>> scored = log_probs(torch.zeros(1, 4), torch.tensor([2]))
        >>> scored.log_prob, scored.entropy, scored.lse
        (tensor([-1.3863]), tensor([1.3863]), tensor([1.3863]))
    """

    log_prob: torch.Tensor
    entropy: torch.Tensor | MaybeNone
    lse: torch.Tensor


@described
def log_probs(
    logits: Logits,
    labels: Labels,
    *,
    shard: VocabShard | None = None,
    entropy: bool = True,
    differentiable: bool = True,
    transform: Transform | None = None,
    ignore_index: int = -100,
    options: Options | None = None,
) -> LogProbs:
    """Return the log-prob of each label, entropy and lse: `LogProbs`, fields in this order.

    logits [.., width] sharded on V, labels [..] -> [..] replicated.

    `vocab_statistics` under the name that RL trainers look for, same arguments and errors; one
    collective forward, none backward. Nothing is shifted: labels[t] is scored by logits[t].
    Sampling temperature: ``transform``.

    Args:
        logits, labels, shard, transform, ignore_index, options: as in `vocab_statistics`.
        entropy: False saves its forward. What takes part in no loss costs nothing backward anyway.
        differentiable: False saves nothing for a backward (old and reference policies; the model
            that makes the logits needs `torch.no_grad` of its own). Otherwise all three have
            gradients.

    Raises:
        TypeError, ValueError: no labels, and the errors of `vocab_statistics`.

    Examples:
        >>> logits, labels = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
        >>> old = log_probs(logits, labels, differentiable=False, transform=Transform(temperature=0.5))
        >>> old.log_prob
        tensor([-0.1429])
    """
    if labels is None:
        raise ValueError("labels are needed, got None: without them, use vocab_statistics")
    FLAG.check("entropy", entropy, {})
    FLAG.check("differentiable", differentiable, {})
    want = ("entropy",) if entropy else ()
    with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
        stats = vocab_statistics(
            logits,
            labels,
            shard=shard,
            want=want,
            transform=transform,
            ignore_index=ignore_index,
            options=options,
        )
    return LogProbs(stats.log_prob, stats.entropy, stats.lse)


def computed_statistics(
    request: Request, labels, options: Options | None, way: Way | MaybeNone = None, reduction=None
):
    """Return the statistics of a checked call, and with a `FusedReduction` its loss and sums.

    Without one these are None.

    Args:
        way: how they are computed; None: the general one.
    """
    options = options or DEFAULTS
    way = way or general(options.inplace)
    if reduction is not None and (reduction.weight is not None or reduction.given):
        reduction = reduction.in_rows(request.order)
    tensors, count = request.tensors, len(request.tensors)
    while count > 2 and tensors[count - 1] is None:
        count -= 1
    tensors = tensors[:count]  # autograd looks at each of its arguments
    if torch.compiler.is_compiling():
        refuse_export(*tensors)
    *outputs, loss, sums = Statistics.apply(*tensors, request, way, reduction)
    stats = assembled(outputs, request, labels, options.check, overwritten=options.inplace)
    return stats, loss, sums


def assembled(
    outputs,
    request: Request,
    labels,
    check: bool = False,
    operands: dict | None = None,
    overwritten: bool = False,
) -> VocabStatistics:
    """Return statistics [..] from those [N] in the order of `layout.outputs`.

    Args:
        operands, overwritten: as in `expect_known`.
    """
    if not request.order.is_plain:
        outputs = request.order.restored(outputs, request.layout.outputs)
    if check:
        found = dict(zip(request.layout.outputs, outputs))
        if labels is None:
            found["valid"] = torch.ones_like(found["lse"], dtype=torch.bool)
        else:
            _check_labels(labels, found["owners"], found["valid"], request)
        with torch.no_grad():
            expect_logits(request, found["valid"], have_own=not (operands or overwritten))
            expect_known(found, request, operands or {}, overwritten)
    known = *outputs, labels, request.facts.vocab_size, None
    stats = VocabStatistics._make(request.layout.fields(known))
    if request.layout.registered:
        found = dict(zip(request.layout.outputs, outputs))
        stats = stats.updated({name: found[name] for name in request.layout.registered})
    return stats


def hint_alone(shard: VocabShard, question: str = "are these logits one rank's columns?") -> str:
    """Return what to do about ids that nobody owns, where one rank owns the vocabulary alone."""
    if shard.group is None:
        return f": {question} Then pass shard=, made with their group"
    return f": {shard.says_alone()}" if shard.world_size == 1 else ""


def _check_labels(labels, owners, valid, request):
    shard, ignore_index = request.shard, request.facts.ignore_index

    def reason(token: int) -> str:
        label = int(labels.flatten()[token])
        if int(owners.flatten()[token]) > 0:
            return "ranks do not agree on"
        is_id = 0 <= label < shard.vocab_size  # of another rank it may be none
        return "ranks do not agree on, or no shard owns" if is_id else "no shard owns"

    def message(token: int) -> str:
        label, why = int(labels.flatten()[token]), reason(token)
        return (
            f"label of token {token} (flat index) must be the ignore_index or in [0, "
            f"{shard.vocab_size}), got {label}, which {why}"
        )

    def what_to_do(token: int) -> str:
        label = int(labels.flatten()[token])
        others = OTHER_BATCHES if "agree" in reason(token) else ""
        return hint_of_label(label, ignore_index) or hint_alone(shard) or others

    refuse_tokens(valid & (owners != 1), message, what_to_do)
