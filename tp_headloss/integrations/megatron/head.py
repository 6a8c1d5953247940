"""`MegatronHead`: the losses that a Megatron output layer's weight gives, per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ...arguments.linear import Mode
from ...arguments.options import Options
from ...arguments.teachers import TeacherHead
from ...head_loss import CrossEntropy, HeadLoss, HeadLossOutput, Metric
from ...head_loss.output import Observed
from ...head_loss.terms import Metrics, Terms
from ...linear_head import Linear
from ...ranks.shard import VocabShard
from ...spec import LABELS, TOKEN_WEIGHT, AnyOf, Instance, Size, checked, sizes_of
from .. import require
from .layer import (
    computing_instead,
    expect_rows,
    expect_weight,
    layer_shard,
    linear_options,
    logits_transform,
    refuse_options,
    refuse_others,
)

# if ignore_index is None, every label outside of the vocabulary becomes this ignored label
IGNORED_LABEL = -100


@checked
class MegatronHead(Observed):
    """Per-token losses [b, s] fp32 of a model, not reduced, as `compute_language_model_loss`
    returns them.

    An instance is also an ``output_processor`` of GPTModel.forward (Megatron-Core >= 0.18): hidden
    [s, b, h] replicated (under sequence parallelism [s/P, b, h]), labels [b, s] replicated ->
    losses [b, s] replicated; no labels: logits.

    Args:
        ignore_index: label whose tokens have loss 0 and no gradient; any other label outside of the
            vocabulary gives NaN. With None, as in Megatron, the caller's loss mask decides which
            tokens count: labels outside of the vocabulary have loss 0 and no gradient (in Megatron
            lse - max, no cross-entropy: the mask must be 0 there), so that ``Options(check=True)``
            finds no bad label. Losses of depths of multi-token prediction are averaged by Megatron,
            which counts the tokens of the model's loss_mask, without one all of them, also those
            that are ignored here: give the call ``loss_mask=(labels != -100).float()``.
        terms: as in `HeadLoss`; the default term is cross-entropy. Functions of terms and metrics get
            statistics [s, b], so a tensor [b, s] that they close over would be transposed.
        metrics: as in `HeadLoss`. Sums and means are over tokens whose label is not ignored, since
            Megatron applies its loss mask later; in one sweep, which knows the mask, they are
            weighted by it. Those of teachers, sets and other inputs are a ValueError: a
            MegatronHead passes no inputs. Of the depths' teacher, a term in `depth_terms` of weight
            0 is a metric: ``Distillation(0.0, "total_variation")``, whose sum `observe` gets in
            ``terms``.
        compile: as in `HeadLoss`.
        depth_terms: one `Term`, or a list, of the depths of multi-token prediction; None: `terms`.
            The input "teacher" of such a term is the main head itself, detached, where it predicts
            the same token, so that ``Distillation(1.0, "cross_entropy")`` makes its distribution
            the depths' soft targets, and no logits exist. Its temperature is 1. It needs `install`
            or `MegatronHeadMixin`, and fused=True.
        vocab_size: number of ids of the tokenizer, not the padded number that Megatron calls
            vocab_size. Rows beyond it are padding and do not enter the softmax. None, or the padded
            number: all rows do, as in Megatron.
        linear: `Linear` for its budget and mode. The output layer decides how gradients are
            reduced, and whether dW goes to ``main_grad`` (gradient_accumulation_fusion). Mode
            "recompute" (also the meaning of "auto") allows any use of the losses. Mode "one_sweep"
            saves a GEMM, and is right only if a number times ``(losses * loss_mask).sum()`` is
            differentiated, for the ``loss_mask`` [b, s] that the model's forward got (None: ones);
            all gradients are NaN otherwise, and losses are 0 where the mask is. It does not apply
            to losses of multi-token prediction.
        options: `Options`, for example ``inplace=True`` for fused=False. Tokens in errors of
            ``check=True`` are counted in Megatron's order [s, b]: token t is row t % b, place
            t // b of the labels.
        observe: function that is called with the `HeadLossOutput` of each call, without graph and
            statistics. With multi-token prediction a forward makes 1 + D calls in Megatron's order:
            depths 1 to D, then the main head. The last d tokens of depth d, for which Megatron has
            no label, count in its metrics with the label 0. `mean_metrics` of all of them would mix
            depths and main head: for the main head's, take ``seen[D::D + 1]`` of a list `seen`, and
            ``seen[d - 1::D + 1]`` for those of depth d. A forward without labels makes D calls:
            newer versions derive the depths' labels from the input ids. So observe in training and
            evaluation apart, or give both labels.

    Arguments that are set later are an AttributeError: make another head.

    Attributes:
        last: `HeadLossOutput` of the last call (with depths: of the main head, after a forward
            without labels of the last depth), without graph and statistics. Its ``loss`` is the
            losses [b, s] that Megatron gets.
        shard: `VocabShard` of the last call; None before the first. Its group is one that
            `mean_metrics` refuses as long as the head exists.
    """

    shard: VocabShard | None = None
    lines: ClassVar[dict[str, Any]]  # of the arguments, by `checked`

    def __init__(
        self,
        *,
        ignore_index: int | None,
        terms: Terms | None = None,
        depth_terms: Terms | None = None,
        metrics: Metrics = (),
        vocab_size: Size | None = None,
        linear: Linear | None = None,
        options: Options | None = None,
        compile: bool = False,
        observe: Callable[[HeadLossOutput], None] | None = None,
    ):
        require("megatron-core")
        self.ignore_index, self.vocab_size, self.linear = (
            ignore_index,
            vocab_size,
            linear or Linear(),
        )
        index = IGNORED_LABEL if ignore_index is None else ignore_index
        parts: dict[str, Any] = {
            "metrics": metrics,
            "ignore_index": index,
            "options": options,
            "compile": compile,
        }
        self.head_loss = HeadLoss(terms, reduction="none", **parts)
        # equal to Megatron's own losses, for labels in the vocabulary
        self.computes_megatron_loss = vocab_size is None and self.head_loss.terms == (
            CrossEntropy(),
        )
        if options is not None and options.inplace:  # a linear head has no logits to overwrite
            parts["options"] = replace(options, inplace=False)
        self.linear_loss = HeadLoss(terms, reduction="none", **parts)
        self.summed_loss = HeadLoss(terms, reduction="sum", **parts)
        self.depth_terms = depth_terms
        depth_terms = terms if depth_terms is None else depth_terms
        try:
            self.depth_loss = HeadLoss(depth_terms, reduction="none", **parts)
        except (TypeError, ValueError) as error:
            raise type(error)(f"depth_terms: {error}") from None
        self._expect_no_inputs()
        self.learns_from_main_head = "teacher" in self.depth_loss.input_names
        parts["metrics"] = (*self.head_loss.metrics, Metric(_no_metrics, want=("argmax",)))
        self.counted_depth_loss = HeadLoss(depth_terms, reduction="none", **parts)
        self.observe = observe

    def __setattr__(self, name, value):
        # one that is set later would act in part, or not at all
        is_made = "observe" in vars(self)
        if is_made and (name in type(self).lines or not hasattr(self, name)):
            raise AttributeError(
                f"a MegatronHead is not changed after it was made, got a new {name!r}: make another "
                "one with it, and install that"
            )
        super().__setattr__(name, value)

    def _expect_no_inputs(self):
        """Raise ValueError for terms and metrics that need more than Megatron's call hands on."""
        inputs = self.head_loss.input_names or self.depth_loss.input_names - {"teacher"}
        if inputs:
            raise ValueError(
                "terms and metrics of a MegatronHead must need no inputs, because it passes none, "
                f"got some that need {sorted(inputs)}: with inputs, write HeadLoss(..)(logits, "
                "labels, shard=.., inputs=..), of the model's logits without labels; the main head "
                "as the depths' teacher is for depth_terms alone, where a term of weight 0 is a "
                'metric, Distillation(0.0, "total_variation")'
            )

    @classmethod
    @checked
    def from_head_loss(cls, head_loss: HeadLoss) -> MegatronHead:
        """Return a MegatronHead with the terms, metrics, ignore_index, options and compile of a
        HeadLoss.

        TypeError for anything else, ValueError for a reduction other than "mean" and "none"
        (Megatron averages the losses itself, by its loss mask), and for terms and metrics that need
        inputs.
        """
        if head_loss.reduction not in ("mean", "none"):
            raise ValueError(
                "Megatron averages the losses per token itself, with its loss mask: the HeadLoss "
                f"must have reduction='mean' or 'none', got {head_loss.reduction!r}"
            )
        return cls(
            ignore_index=head_loss.ignore_index,
            terms=head_loss.terms,
            metrics=head_loss.metrics,
            options=head_loss.options,
            compile=head_loss.compile_terms,
        )

    def facts(self) -> dict[str, Any]:
        """Return the settings that all ranks of the output layer's group must have alike, by
        name."""
        return {
            "terms": self.head_loss.terms,
            "depth_terms": self.depth_loss.terms,
            "metrics": self.head_loss.metrics,
            "ignore_index": self.ignore_index,
            "linear": self.linear,
            # so that the option that differs has its name
            "options": self.head_loss.options or Options(),
        }

    def refuse_unused(self, config, fused: bool):
        """Raise ValueError for options, or terms for depths, that nothing would use in a model of
        this config."""
        if not fused and self.linear != Linear():
            raise ValueError(
                "linear needs fused=True, where there are hidden states, got fused=False and "
                f"{self.linear}"
            )
        of_layer = Linear(hidden_grad=self.linear.hidden_grad, main_grad=self.linear.main_grad)
        if of_layer != Linear():
            raise ValueError(
                "linear must leave hidden_grad and main_grad to Megatron's output layer, got "
                f"hidden_grad={self.linear.hidden_grad!r} and main_grad={self.linear.main_grad}"
            )
        if self.linear.gradients == "fp8" and self.linear.mode != "one_sweep":
            raise ValueError(
                "gradients='fp8' needs one sweep, which Megatron's losses do not choose by "
                f"themselves, got mode={self.linear.mode!r}: write Linear('one_sweep', "
                "gradients='fp8')"
            )
        options = self.head_loss.options
        if fused and options is not None and options.inplace:
            raise ValueError(
                "Options(inplace=True) is for logits, fused=False: a fused head has none, got "
                "fused=True"
            )
        depths = getattr(config, "mtp_num_layers", None)
        if self.depth_terms is not None and not (fused and depths):
            raise ValueError(
                "depth_terms need fused=True and a model with depths of multi-token prediction, "
                f"got fused={fused} and mtp_num_layers={depths}"
            )

    def __call__(self, *args, **given):
        """Return the losses [b, s], or the logits without labels. Arguments are those of an
        ``output_processor``. TypeError for others: only a model calls it."""
        if args or "output_layer" not in given:
            raise TypeError(
                "a MegatronHead must be called by a model's forward, which hands it the output "
                f"layer, got {len(args)} arguments by position and {sorted(given)}: write "
                "install(model, head), or model(.., labels=labels, output_processor=head); for "
                "hidden states of your own, HeadLoss(..).linear(hidden, weight, labels, shard=..)"
            )
        return self._process(**given)

    def _process(
        self, *, hidden_states, output_layer, output_weight, labels, scale_logits, config, **rest
    ):
        """Return what GPTModel's forward returns: the losses, or the logits without labels."""
        if labels is None:
            gather = rest.get("runtime_gather_output")
            logits, _ = output_layer(
                hidden_states, weight=output_weight, runtime_gather_output=gather
            )
            return scale_logits(logits).transpose(0, 1).contiguous()
        if self.depth_terms is not None:
            raise ValueError(
                "depth_terms do not reach the depths of multi-token prediction through an "
                "output_processor: use install(model, head), or MegatronHeadMixin, with a model "
                "that has mtp_num_layers"
            )
        self.refuse_unused(config, fused=True)
        refuse_others("_scale_logits", scale_logits)
        if (loss := rest.get("compute_language_model_loss")) is not None:  # of newer versions
            refuse_others("compute_language_model_loss", loss)

        def forward(hidden, weight=None, runtime_gather_output=None):
            return self.losses_from_hidden(
                hidden, weight, output_layer, labels, config, rest.get("loss_mask")
            ), None

        with computing_instead(output_layer, forward):
            return output_layer(hidden_states, weight=output_weight)[0]

    def losses_from_hidden(
        self, hidden, weight, layer, labels, config, loss_mask=None
    ) -> torch.Tensor:
        """Return the losses [b, s] of hidden states and the weight of an output layer, without
        logits.

        Args:
            hidden: [s, b, h] replicated, or [s/P, b, h] under sequence parallelism.
            weight: [v/P, h] sharded on V; None: the layer's own.
            layer: Megatron's ColumnParallelLinear. It says the group, the bias and how dH is
                reduced.
            labels, loss_mask: [b, s] replicated. The mask is used with the mode "one_sweep" only.
            config: the model's TransformerConfig.
        """
        refuse_options(config, layer)
        _expect_labels(labels, hidden, layer)
        if loss_mask is not None:
            TOKEN_WEIGHT.check("loss_mask", loss_mask, sizes_of("labels", labels, labels.shape))
        # without gradients it is a recompute, with the mask, too
        one_sweep = self.linear.mode == "one_sweep"
        mode: Mode = "one_sweep" if one_sweep else "recompute"
        weight, labels, given = self._linear_arguments(weight, layer, labels, config, mode)
        if not one_sweep:
            return self._observed_losses(self.linear_loss.linear(hidden, weight, labels, **given))
        token_weight = torch.ones_like(labels) if loss_mask is None else loss_mask.transpose(0, 1)
        token_weight = token_weight.detach().float()
        out = self.summed_loss.linear(hidden, weight, labels, token_weight=token_weight, **given)
        with torch.no_grad():
            losses = sum(term.weight * term.function(out.stats) for term in self.summed_loss.terms)
            losses = torch.where(out.stats.valid, losses, 0.0)
        return self._observed_losses(
            out._replace(loss=_LossesOfSum.apply(out.loss, losses, token_weight))
        )

    def depth_losses_from_hidden(
        self, hidden, weight, layer, labels, config, *, main_hidden=None, counted: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what Megatron takes of a depth of multi-token prediction: its losses [b, s], and
        where [b, s] the likeliest id is the label. Arguments as in `losses_from_hidden`; never in
        one sweep.

        Args:
            main_hidden: like `hidden`, the main head's where it predicts the same tokens, for terms
                with a teacher.
            counted: False: the likeliest ids are not looked for, and None is returned in the second
                place.
        """
        refuse_options(config, layer)
        _expect_labels(labels, hidden, layer)
        weight, labels, given = self._linear_arguments(weight, layer, labels, config, "recompute")
        if main_hidden is not None:
            teacher = TeacherHead(main_hidden, weight, given["bias"], given["transform"])
            given["inputs"] = {"teacher": teacher}
        out = (self.counted_depth_loss if counted else self.depth_loss).linear(
            hidden, weight, labels, **given
        )
        return self._observed_losses(out), out.stats.correct.transpose(0, 1) if counted else None

    def _linear_arguments(self, weight, layer, labels, config, mode: Mode):
        """Weight, labels [s, b] and keyword arguments of `HeadLoss.linear` for an output layer."""
        weight = expect_weight(layer.weight if weight is None else weight)
        expect_rows(layer, weight)
        self.shard = shard = layer_shard(layer.tp_group, weight.shape[0], self.vocab_size)
        bias, linear = (
            None if layer.skip_bias_add else layer.bias,
            linear_options(self.linear, layer, weight, mode),
        )
        given = {
            "shard": shard,
            "bias": bias,
            "transform": logits_transform(config),
            "linear": linear,
        }
        return weight, self._labels(labels, shard), given

    def losses_from_logits(self, logits, labels, layer) -> torch.Tensor:
        """Return the losses [b, s] of logits [s, b, v/P] sharded on V, labels [b, s]; ValueError
        for gathered ones."""
        columns = getattr(layer, "output_size_per_partition", logits.shape[-1])
        if logits.shape[-1] != columns:
            raise ValueError(
                f"logits must be this rank's {columns} columns, got {logits.shape[-1]}: the model "
                "must have parallel_output=True and be called without runtime_gather_output"
            )
        LABELS.check("labels", labels, sizes_of("logits", logits, logits.shape[1::-1]))
        self.shard = shard = layer_shard(layer.tp_group, columns, self.vocab_size)
        return self._observed_losses(
            self.head_loss(logits, self._labels(labels, shard), shard=shard)
        )

    def _labels(self, labels, shard) -> torch.Tensor:
        """Labels [s, b], the order of Megatron's logits, with unknown labels ignored if
        ignore_index is None."""
        labels = labels.transpose(0, 1)
        if self.ignore_index is None:
            labels = labels.masked_fill((labels < 0) | (labels >= shard.vocab_size), IGNORED_LABEL)
        return labels

    def _observed_losses(self, out: HeadLossOutput) -> torch.Tensor:
        """Losses [b, s] of an output, which is observed with them."""
        out = out._replace(loss=out.loss.transpose(0, 1).contiguous())
        return self.observed(out).loss


def _expect_labels(labels, hidden, layer):
    """Raise TypeError or ValueError unless labels are ids [b, s] of the hidden states, of which
    sequence parallelism has [s/P, b, h] on each rank."""
    sequence, batch = hidden.shape[:2]
    if layer.sequence_parallel:
        sequence *= layer.tp_group.size()
    LABELS.check("labels", labels, sizes_of("the hidden states", hidden, (batch, sequence)))


def _no_metrics(stats) -> dict[str, torch.Tensor]:
    """Return no metrics: a `Metric` of this function makes a HeadLoss compute what it wants."""
    return {}


class _LossesOfSum(torch.autograd.Function):
    """Per-token losses [s, b] whose gradient goes into their weighted sum, for which one sweep has
    computed dH and dW.

    Forward: total = sum(losses * weight) [], losses, weight -> losses. Backward: the upstream
    gradient must be some number times the weight; that number is the gradient of the total, and NaN
    otherwise.
    """

    @staticmethod
    def forward(ctx, total, losses, weight):
        ctx.save_for_backward(weight)
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        square = weight.square().sum()
        factor = torch.where(square > 0, (grad * weight).sum() / square, 0.0)
        far = (grad - factor * weight).abs() > 1e-5 * (factor * weight).abs().amax()
        return torch.where(far.any(), torch.nan, factor), None, None


def megatron_head(name: str, head, optional: bool = False) -> MegatronHead | None:
    """Return a `MegatronHead` as it is, one of a `HeadLoss`, and None if it is `optional`.

    TypeError for anything else, ValueError as in `MegatronHead.from_head_loss`.
    """
    AnyOf((Instance(MegatronHead), Instance(HeadLoss)), optional).check(name, head, {})
    return MegatronHead.from_head_loss(head) if isinstance(head, HeadLoss) else head
