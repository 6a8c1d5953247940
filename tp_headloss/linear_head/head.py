"""The fused linear head on statistics: hidden states and a weight shard in place of the logits."""

from __future__ import annotations

from ..arguments.id_sets import IdSets
from ..arguments.linear import Linear
from ..arguments.options import Options, Transform
from ..arguments.teachers import Teacher, TeacherHead, TopKTeacher
from ..call.agreement import Agreement
from ..call.compile import uncompiled_where_needed
from ..call.given import LINES, Given, Want
from ..call.statistics import assembled
from ..ranks.shard import VocabShard
from ..spec import Bias, Floating, Labels, Rows, TokenIds, TotalWeight, described
from ..statistics import VocabStatistics
from .request import LinearRequest


@uncompiled_where_needed
@described
def linear_vocab_statistics(
    hidden: Floating,
    weight: Rows,
    labels: Labels | None = None,
    *,
    bias: Bias | None = None,
    shard: VocabShard | None = None,
    want: Want = (),
    transform: Transform | None = None,
    teacher: Teacher | TopKTeacher | TeacherHead | None = None,
    sets: IdSets | None = None,
    ids: TokenIds | None = None,
    total_weight: TotalWeight | None = None,
    ignore_index: int = -100,
    options: Options | None = None,
    linear: Linear | None = None,
) -> VocabStatistics:
    """`vocab_statistics` of the logits hidden @ weight^T + bias, which never exist as a whole: mode
    "recompute".

    hidden [.., H] replicated (or as `Linear.hidden_grad` says), weight [width, H] and bias [width]
    of this rank sharded on V, labels [..] replicated -> statistics [..] fp32 replicated. Forward:
    one GEMM, by blocks of tokens, and one collective for all of them. Backward, any upstream
    gradients, any number of times: the logits made again by blocks of the vocabulary, two more
    GEMMs, and the collective of dH, which the last block's dW hides.

    Several hidden states with one weight (multi-token prediction) are one call: stacked [D, .., H]
    with labels [D, ..]. Operands have the dtype that torch.nn.functional.linear gives them,
    autocast included; the bias is added in fp32. Logits are rounded to that dtype, unless
    `Linear.exact_logits` is True. fp32 products are IEEE fp32 unless torch's own switch allows
    TF32. dH and dW are summed in fp32 and rounded once, dH before the ranks' parts are added.

    With a group, every rank's backward has the collective of dH, so results require a gradient
    wherever gradients are enabled, whether or not an argument does (`Linear.hidden_grad`). Log-probs
    of an old policy or a reference need no graph: call it under ``torch.no_grad()``.

    Args:
        linear: the reduction of dH, the memory, how logits are made.
        shard: the rows of ``weight``; None: it holds the whole vocabulary, or is a DTensor that is
            ``Shard(0)``.
        labels, want, transform, sets, ids, total_weight, ignore_index, options: as in
            `vocab_statistics`.
        teacher: as in `vocab_statistics`, or a `TeacherHead`.

    Returns:
        `VocabStatistics` of tokens [..], None where ``want`` does not name them, as in
        `vocab_statistics`.

    Raises:
        TypeError, ValueError: the errors of `vocab_statistics`; a budget that is too small.

    Examples:
        >>> hidden, weight = torch.ones(2, 8), torch.nn.Parameter(torch.zeros(4, 8))
        >>> stats = linear_vocab_statistics(hidden, weight, torch.tensor([0, 1]), want=("entropy",))
        >>> (stats.entropy - stats.log_prob).mean().backward()
        >>> weight.grad[:, 0].tolist()
        [-0.25, -0.25, 0.25, 0.25]
    """
    given = Given.checked(None, labels, shard, want, transform, options)._replace(
        teacher=teacher,
        sets=sets,
        ids=ids,
        total_weight=total_weight,
        ignore_index=ignore_index,
        hidden=hidden,
        weight=weight,
        bias=bias,
        linear=_recompute_options(Linear() if linear is None else linear),
    )
    with Agreement(given.options, shard) as agreement:
        given = given.local()
        agreement.record("linear_vocab_statistics", given.shard, **given.facts())
        call = LinearRequest.checked(given)
    return assembled(
        call.recompute_outputs(), call.request, given.labels, given.options.check, call.operands
    )


def _recompute_options(linear: Linear) -> Linear:
    """The options of a head whose statistics are differentiated. ValueError for those of one
    sweep."""
    LINES["linear"].check("linear", linear, {})
    if linear.gradients is not None:
        raise ValueError(
            f"gradients={linear.gradients!r} is for a HeadLoss, which knows the gradient of its "
            "statistics: use HeadLoss.linear, or leave it out"
        )
    if linear.mode == "one_sweep":
        raise ValueError(
            "mode='one_sweep' computes the gradient of a HeadLoss: use HeadLoss.linear, or "
            "'recompute' here"
        )
    if linear.upstream is not None:
        raise ValueError(f"upstream is of a one-sweep HeadLoss.linear, got {linear.upstream}")
    return linear
