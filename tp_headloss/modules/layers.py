"""The output layer of a sharded vocabulary as a module, and labels for several of its depths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, overload

import torch
import torch.nn.functional as F
from torch import nn

from ..arguments.linear import expect_sequence
from ..arguments.options import Options, Transform
from ..arguments.sequences import Sequences, Starts
from ..call.dtensor import local_head
from ..call.given import Want
from ..engine.autograd import ToShards, grad_anchor, reduction_over
from ..head_loss import HeadLoss, HeadLossOutput
from ..linear_head import Linear, linear_vocab_statistics
from ..ranks.shard import VocabShard
from ..spec import (
    TENSOR,
    CheckedBy,
    Finite,
    Floating,
    Instance,
    Labels,
    Size,
    UnshiftedLabels,
    called_as,
    checked,
    described,
    lines_within,
)
from ..spec.checks import operand_dtype
from ..statistics import VocabStatistics
from .vocab_rows import Init, VocabRows

OWN = {"hidden", "labels", "weight", "bias", "shard"}  # what a call has, and what the module has
OF_LOSSES = "arguments of `HeadLoss.linear`; a transform may set only the temperature of this call"
OF_STATISTICS = "arguments of `linear_vocab_statistics`; of a transform as in `forward`"
LossKeywords: TypeAlias = Annotated[
    Any, CheckedBy(OF_LOSSES, names=frozenset(lines_within(HeadLoss.linear)) - OWN)
]
StatisticsKeywords: TypeAlias = Annotated[
    Any, CheckedBy(OF_STATISTICS, names=frozenset(lines_within(linear_vocab_statistics)) - OWN)
]


def _expect_parameter(name: str, weight):
    """Raise TypeError unless a weight to tie to is one that optimizers train."""
    TENSOR.check(name, weight, {})
    if not isinstance(weight, nn.Parameter):
        raise TypeError(
            f"{name} must be an nn.Parameter, or no optimizer would train it, got "
            f"{type(weight).__name__}"
        )


@checked
class VocabParallelHead(VocabRows):
    """Output layer with a sharded vocabulary: hidden states in; losses, statistics or logits out.

    The weight is [V/P, H]. ``head(hidden, labels)`` is the `HeadLossOutput` of ``head_loss``
    without logits (`HeadLoss.linear`), ``head.statistics(hidden, labels)`` is
    `linear_vocab_statistics`, ``head(hidden)`` are this rank's logits before the transform:
    ``log_probs(head(hidden), labels, transform=head.transform)`` needs it again. Several depths of
    multi-token prediction are one call, see `multi_token_targets`.

    ``state_dict`` describes weight and bias as DTensors (``Shard(0)``), so that
    `torch.distributed.checkpoint` saves them at one group size and loads them at another; before an
    optimiser's state is saved so, call `to_dtensor`. `load_state_dict` also takes whole matrices,
    and this rank's rows; of DTensors that are sharded otherwise it is a collective call of their
    ranks. ``dict(head.named_parameters())`` is no state_dict: its plain tensors say
    nothing of whose rows they are, and a checkpoint has rank 0's for all.

    Args:
        head_loss: by default cross-entropy.
        bias: True adds a parameter ``bias`` [V/P].
        weight: parameter to tie to, for example `VocabParallelEmbedding.weight`.
        transform: what happens to the logits before losses and statistics, in numbers: the bias is
            the module's own.
        linear: its hidden_grad says how the gradient of the hidden states is reduced over
            the group: "all_reduce" for replicated hidden states, "reduce_scatter" for sequence
            parallelism (hidden [S/P, ..], labels and results for all S), "none" to leave each
            rank's part to the caller.
        init: how a weight is drawn that is not tied; ValueError beside ``weight``. A loop over a
            model's parameters with `torch.nn.init` and one seed gives all shards equal rows, see
            `Init`.
        device, dtype: where, and in which dtype, parameters are made; beside ``weight`` as it is,
            or a ValueError. On "meta" they hold nothing: after ``to_empty(device=..)`` call
            `reset_parameters`, or they are whatever was in memory.

    Examples:
        >>> shard = VocabShard.from_group(None, 10)
        >>> head = VocabParallelHead(4, shard, head_loss=HeadLoss([CrossEntropy(), ZLoss(1e-4)]))
        >>> hidden, labels = torch.zeros(2, 4), torch.tensor([0, 9])
        >>> round(head(hidden, labels).stats.log_prob[0].item(), 4), head(hidden).shape  # -log 10
        (-2.3026, torch.Size([2, 10]))
    """

    def __init__(
        self,
        hidden_size: Size,
        shard: VocabShard,
        *,
        head_loss: HeadLoss | None = None,
        bias: bool = False,
        weight: Annotated[nn.Parameter, CheckedBy("an `nn.Parameter`", _expect_parameter)]
        | None = None,
        transform: Transform | None = None,
        linear: Linear | None = None,
        init: Init | None = None,
        device: Annotated[torch.device | str, CheckedBy("a device")] | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(hidden_size, shard, init, device, dtype, bias, weight)
        transform = transform or Transform()
        if transform.bias is not None or isinstance(transform.temperature, torch.Tensor):
            raise ValueError(
                "transform must be numbers here: the bias is the module's, temperatures of tokens "
                "a call's"
            )
        self.head_loss = HeadLoss() if head_loss is None else head_loss
        self.transform = transform
        self.linear = linear or Linear()

    @overload
    def forward(self, hidden: torch.Tensor, labels: None = None) -> torch.Tensor: ...

    @overload
    def forward(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        *,
        head_loss: HeadLoss | None = None,
        token_weight: torch.Tensor | None = None,
        denominator: torch.Tensor | float | None = None,
        transform: Transform | None = None,
        inputs: Mapping[str, Any] | None = None,
        linear: Linear | None = None,
    ) -> HeadLossOutput: ...

    @described
    def forward(
        self,
        hidden: Floating,
        labels: Labels | None = None,
        *,
        head_loss: HeadLoss | None = None,
        **kwargs: LossKeywords,
    ) -> HeadLossOutput | torch.Tensor:
        """Return the `HeadLossOutput` of hidden [.., H] and labels [..].

        A collective call of the shard's group, as `HeadLoss.linear` is. Without labels it is this
        rank's `logits`.

        Args:
            head_loss: this call's, in the place of the module's.
        """
        if labels is None:
            if kwargs or head_loss is not None:
                raise ValueError(
                    f"without labels there are logits only, got {sorted(kwargs) or 'a head_loss'}"
                )
            return self._logits(hidden)
        head_loss = self.head_loss if head_loss is None else head_loss
        Instance(HeadLoss).check("head_loss", head_loss, {})
        transform = self._transform_at(kwargs.get("transform"))
        kwargs = {"linear": self.linear, **kwargs, "transform": transform}
        return head_loss.linear(
            hidden, self.weight, labels, bias=self.bias, shard=self.shard, **kwargs
        )

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self): ...

    @described
    def statistics(
        self,
        hidden: Floating,
        labels: Labels | None = None,
        want: Want = (),
        *,
        options: Options | None = None,
        **kwargs: StatisticsKeywords,
    ) -> VocabStatistics:
        """Return the statistics [..] of hidden [.., H] and labels [..].

        A collective call of the shard's group, forward and backward, as `linear_vocab_statistics`.
        """
        self.expect_no_rows_of_hooks("statistics")
        linear = replace(self.linear, mode="recompute", upstream=None)
        transform = self._transform_at(kwargs.get("transform"))
        kwargs = {"linear": linear, "options": options, **kwargs, "transform": transform}
        return linear_vocab_statistics(
            hidden, self.weight, labels, bias=self.bias, shard=self.shard, want=want, **kwargs
        )

    def _transform_at(self, call_transform: Transform | None) -> Transform:
        """Return the module's transform at the temperature of a call.

        ValueError if the call sets anything else.
        """
        if not torch.compiler.is_compiling():  # every call comes here
            self.begin_eager_call()
        if call_transform is None:
            return self.transform
        Instance(Transform).check("transform", call_transform, {})
        if replace(call_transform, temperature=1.0) != Transform():
            raise ValueError(
                "a call's transform is for its temperature, the rest is the module's, got "
                f"{call_transform}"
            )
        return replace(self.transform, temperature=call_transform.temperature)

    @described
    def logits(self, hidden: Floating) -> torch.Tensor:
        """Return hidden @ weight^T + bias [.., width] sharded on V, for hidden [.., H].

        No communication forward (of sequence parallelism an all-gather), backward one collective of
        the shard's group, which reduces the gradient of the hidden states. Columns of padding are
        0. The logits are not transformed: pass them to a HeadLoss with
        ``shard=head.shard, transform=head.transform``.
        """
        self.expect_no_rows_of_hooks("logits")
        return self._logits(hidden)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        TENSOR.check("hidden states", hidden, {})
        if not torch.compiler.is_compiling():
            self.begin_eager_call()
        how = self.linear.hidden_grad
        hidden, weight, bias, shard = local_head(hidden, self.weight, self.bias, self.shard, how)
        operand_dtype(hidden, weight)
        expect_sequence(hidden, how)
        # rows of padding may hold anything, and 0 times NaN is NaN
        if shard.valid_width < shard.width:
            valid = torch.arange(shard.width, device=weight.device) < shard.valid_width
            weight = torch.where(valid[:, None], weight, 0.0)
            bias = None if bias is None else torch.where(valid, bias, 0.0)
        anchor = grad_anchor(hidden, how, shard.world_size)
        hidden = ToShards.apply(hidden, *reduction_over(shard, how), anchor)
        return F.linear(hidden, weight, bias)


@checked
def multi_token_targets(
    labels: UnshiftedLabels,
    depths: Size,
    weight: Finite = 0.1,
    *,
    ignore_index: int = -100,
    cu_seqlens: Starts | None = None,
    document_ids: UnshiftedLabels | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the labels and token weights [1 + D, .., S] of multi-token prediction.

    Row 0 is for the main head, row d for the depth that predicts the token d positions later. Pass
    hidden states stacked alike, [1 + D, .., S, H].

    With ``denominator=`` the number T of labels that are not ignored (in the global batch), the
    mean of a `HeadLoss` is the loss of DeepSeek-V3 (arXiv:2412.19437, equations 24 and 25): main +
    weight / D * sum over d of 1 / T * (the sum over the tokens of depth d). Its ``means()`` divide
    by the sum of the weights instead. Megatron divides depth d by its own, slightly smaller number
    of tokens. The acceptance rate of depth d is the mean of ``out.stats.correct[d]`` over
    ``out.stats.valid[d]`` (metric "accuracy").

    The depths can also learn from the main head, whose distribution of the same token is better
    than its label: their teacher is the same weight with the main head's hidden states d positions
    later (no gradient goes there).

        rows, _ = multi_token_targets(labels, depths)
        # [D, .., S, H]; its ends are ignored
        later = torch.stack([main.roll(-d, -2) for d in range(1, 1 + depths)])
        distilled = HeadLoss([Distillation(1.0, "cross_entropy")])
        teacher = TeacherHead(later, head.weight)
        out = head(hidden[1:], rows[1:], head_loss=distilled, inputs={"teacher": teacher})

    Packed documents need their bounds, `cu_seqlens` or `document_ids`. Without them each row [S] is
    one document, so that a depth's positions at the end of a document learn tokens of the next one.

    Not for hidden states of sequence parallelism, whose first dimension is the sequence: gather
    them first.

    Args:
        labels: each position's next token; that of a document's last position is usually ignored,
            in all rows.
        weight: weight of all depths together, relative to the main head.
        ignore_index: label of positions that have no token d positions later, or have another
            document there or on the way there.
        cu_seqlens: starts and end of the documents among the flattened labels, as variable-length
            attention takes them. Bounds out of order are a ValueError on CPUs; on GPUs, where
            nothing waits for them, weights are NaN.
        document_ids: each position's document, in the place of cu_seqlens; with position ids that
            begin again at 0 in each document, ``(position_ids == 0).cumsum(-1)``.

    Returns:
        labels [1 + D, .., S] and token weights of the same shape.

    Examples:
        >>> rows, weights = multi_token_targets(torch.tensor([5, 6, 7]), depths=2, weight=0.1)
        >>> rows.tolist(), weights[:, 0]
        ([[5, 6, 7], [6, 7, -100], [7, -100, -100]], tensor([1.0000, 0.0500, 0.0500]))
        >>> packed = torch.tensor([5, 6, -100, 8, -100])  # two documents, of three positions and of two
        >>> multi_token_targets(packed, depths=1, cu_seqlens=torch.tensor([0, 3, 5]))[0].tolist()
        [[5, 6, -100, 8, -100], [6, -100, -100, -100, -100]]
    """
    if cu_seqlens is not None and document_ids is not None:
        raise ValueError("documents must have cu_seqlens or document_ids, got both")
    labels = labels.long()
    share = torch.full((1 + depths,), weight / depths, dtype=torch.float32, device=labels.device)
    share[:1].fill_(1.0)
    if cu_seqlens is not None:
        documents = Sequences.from_cu_seqlens(cu_seqlens, labels != ignore_index)
        share = share + 0 * documents.count  # NaN for bounds out of order
        places = torch.arange(labels.numel(), device=labels.device).view(labels.shape)
        document_ids = torch.searchsorted(cu_seqlens.long(), places, right=True)
    depth_rows = [labels]
    length = labels.shape[-1]
    # the label is one of the position's own document
    within = torch.ones_like(labels, dtype=torch.bool)
    for depth in range(1, depths + 1):
        # torch's pad takes the index through a float, which not all int64 fit
        shift = min(depth, length)
        ignored = labels.new_full((*labels.shape[:-1], shift), ignore_index)
        later = torch.cat([labels[..., shift:], ignored], -1)
        if document_ids is not None:
            within = within & (document_ids == document_ids.roll(-shift, -1))
            later = torch.where(within, later, ignore_index)
        depth_rows.append(later)
    rows = torch.stack(depth_rows)
    return rows, share.view(-1, *[1] * labels.dim()).expand(rows.shape).contiguous()
