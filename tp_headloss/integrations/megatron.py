"""Megatron-Core: the losses of a GPTModel from its hidden states, or from its logits shard.

    head = MegatronHead(ignore_index=-100)
    with install(model, head):              # or model(..., output_processor=head), Megatron-Core >= 0.18
        losses = model(ids, positions, mask, labels=labels)

`install` replaces two methods of one model object, checks by a call that they are in the path, and puts them back: with
fused=True the head never makes logits and its gradient of the hidden states is reduced here, over the group and in the
way of the model's own output layer (all-reduce, or reduce-scatter under sequence parallelism); with fused=False only
`compute_language_model_loss` changes, for any LanguageModule. Losses of multi-token prediction go the same way.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ..api import Options, Transform
from ..head_loss import HeadLoss, HeadLossOutput
from ..linear import Linear
from ..shard import VocabShard
from ..terms import CrossEntropy, Term
from . import check_type, require

REFUSED = {  # options of a config that change what the output layer computes -> why the fused head does not honour them
    "defer_embedding_wgrad_compute": "dW is computed in the backward",
    "fp8_output_proj": "logits are computed in the type of the weight; fused=False keeps Megatron's MXFP8 output layer",
}
OUTSIDE = -100  # what labels outside of the vocabulary become if ignore_index is None


class MegatronHead:
    """Per-token losses [b, s] fp32 of a model, not reduced, as `compute_language_model_loss` returns them.

    Args:
        ignore_index: a label whose tokens have loss 0 and no gradient; any other label outside of the vocabulary has
            NaN. None: as in Megatron, where the caller's loss mask decides what counts: all labels outside of the
            vocabulary have 0 and no gradient (Megatron returns lse - max for them, which is no cross-entropy, and the
            mask must be 0 there).
        terms, metrics, compile: as in `HeadLoss`; the default is cross-entropy.
        vocab_size: the number of ids of the tokenizer, not the padded number that Megatron calls vocab_size. Rows
            beyond it are padding and are left out of the softmax. None, or the padded number: all rows are in the
            softmax, as in Megatron.
        linear: `Linear` for budget and mode. How gradients are reduced, and whether dW goes to ``main_grad``
            (gradient_accumulation_fusion), is the output layer's. mode: "recompute" (the default, "auto") for any use
            of the losses; "one_sweep", with a GEMM less, if what is differentiated is ``(losses * loss_mask).sum()``
            times any number, of the ``loss_mask`` [b, s] that the model's forward is called with (None: ones):
            gradients are NaN otherwise. Not for losses of multi-token prediction.
        options: `Options`, ``inplace=True`` for fused=False, say.
        observe: called with the `HeadLossOutput` of each call, whose sums are of all tokens, in one sweep weighted by
            the loss mask.

    An instance is an ``output_processor`` of GPTModel.forward (Megatron-Core >= 0.18): hidden [s, b, h] (sequence
    parallelism: [s/P, b, h]) replicated, labels [b, s] -> [b, s] replicated; without labels the logits, as before.
    """

    def __init__(
        self,
        *,
        ignore_index: int | None,
        terms: Sequence[Term] | None = None,
        metrics: Sequence = (),
        vocab_size: int | None = None,
        linear: Linear | None = None,
        options: Options | None = None,
        compile: bool = False,
        observe: Callable[[HeadLossOutput], None] | None = None,
    ):
        require("megatron-core")
        check_type("ignore_index", ignore_index, int, None)
        check_type("terms", terms, list, tuple, None)
        check_type("vocab_size", vocab_size, int, None)
        check_type("linear", linear, Linear, None)
        check_type("options", options, Options, None)
        self.ignore_index, self.vocab_size, self.linear = ignore_index, vocab_size, linear or Linear()
        index = OUTSIDE if ignore_index is None else ignore_index
        parts = {"metrics": metrics, "ignore_index": index, "options": options, "compile": compile}
        self.head_loss = HeadLoss(terms, reduction="none", **parts)
        # the same losses, for labels in the vocabulary
        self.is_megatrons = vocab_size is None and self.head_loss.terms == (CrossEntropy(),)
        if options is not None and options.inplace:  # which a linear head has no use for
            parts["options"] = replace(options, inplace=False)
        self.linear_loss = HeadLoss(terms, reduction="none", **parts)
        self.summed_loss = HeadLoss(terms, reduction="sum", **parts)
        self.observe, self.calls = observe, 0

    @classmethod
    def from_head_loss(cls, head_loss: HeadLoss) -> MegatronHead:
        """A MegatronHead with the terms, metrics, ignore_index, options and compile of a HeadLoss. ValueError for a
        reduction other than "mean" and "none": Megatron averages the losses per token itself, by its loss mask."""
        if head_loss.reduction not in ("mean", "none"):
            raise ValueError(
                "Megatron averages the losses per token itself, with its loss mask: the HeadLoss must have "
                f"reduction='mean' or 'none', got {head_loss.reduction!r}"
            )
        return cls(
            ignore_index=head_loss.ignore_index,
            terms=head_loss.terms,
            metrics=(*head_loss.metrics, *head_loss.token_metrics),
            options=head_loss.options,
            compile=head_loss.compile_terms,
        )

    def __call__(self, *, hidden_states, output_layer, output_weight, labels, scale_logits, config, **rest):
        if labels is None:
            gather = rest.get("runtime_gather_output")
            logits, _ = output_layer(hidden_states, weight=output_weight, runtime_gather_output=gather)
            return scale_logits(logits).transpose(0, 1).contiguous()

        def forward(hidden, weight=None, runtime_gather_output=None):
            return self.of_hidden(hidden, weight, output_layer, labels, config, rest.get("loss_mask")), None

        # through the module, because hooks on it gather its parameters
        with _replaced(output_layer, forward=forward):
            return output_layer(hidden_states, weight=output_weight)[0]

    def of_hidden(self, hidden, weight, layer, labels, config, loss_mask=None, depths=0) -> torch.Tensor:
        """hidden [s, b, h] or [s/P, b, h], labels and loss_mask [b, s] -> losses [b, s]; depths: of multi-token
        prediction, whose losses come this way, too."""
        weight = layer.weight if weight is None else weight
        _refuse_options(config, layer)
        shard = self._shard(layer.tp_group, weight.shape[0])
        partial = shard.world_size > 1 and not layer.sequence_parallel and not layer.allreduce_dgrad
        how = "reduce_scatter" if layer.sequence_parallel else "none" if partial else "all_reduce"
        main_grad = layer.gradient_accumulation_fusion and _has_main_grad(weight)
        one_sweep = self.linear.mode == "one_sweep" and torch.is_grad_enabled() and not depths
        mode = "one_sweep" if one_sweep else "recompute"
        linear = replace(self.linear, mode=mode, hidden_grad=how, main_grad=main_grad)
        bias = None if layer.skip_bias_add else layer.bias
        given = {"shard": shard, "bias": bias, "transform": _transform(config), "linear": linear}
        labels = self._labels(labels, shard)
        if not one_sweep:
            return self._losses(self.linear_loss.linear(hidden, weight, labels, **given))
        token_weight = torch.ones_like(labels) if loss_mask is None else loss_mask.transpose(0, 1)
        token_weight = token_weight.detach().float()
        out = self.summed_loss.linear(hidden, weight, labels, token_weight=token_weight, **given)
        with torch.no_grad():
            losses = sum(term.weight * term.function(out.stats) for term in self.summed_loss.terms)
            losses = torch.where(out.stats.valid, losses, 0.0)
        return self._losses(out._replace(loss=_PerToken.apply(out.loss, losses, token_weight)))

    def of_logits(self, logits, labels, layer) -> torch.Tensor:
        """logits [s, b, v/P] of the output layer, labels [b, s] -> losses [b, s]. ValueError for gathered logits."""
        columns = getattr(layer, "output_size_per_partition", logits.shape[-1])
        if logits.shape[-1] != columns:
            raise ValueError(
                f"logits must be this rank's {columns} columns, got {logits.shape[-1]}: the model must have "
                "parallel_output=True and be called without runtime_gather_output"
            )
        shard = self._shard(layer.tp_group, columns)
        return self._losses(self.head_loss(logits, self._labels(labels, shard), shard=shard))

    def _shard(self, group, width) -> VocabShard:
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"the output layer must know its tensor-parallel group, got {group!r}")
        padded = width * group.size()
        if self.vocab_size is not None and self.vocab_size > padded:
            raise ValueError(f"vocab_size must be at most the {padded} rows of the output layer, got {self.vocab_size}")
        return VocabShard.from_group(group, padded if self.vocab_size is None else self.vocab_size, padded)

    def _labels(self, labels, shard) -> torch.Tensor:
        labels = labels.transpose(0, 1)
        if self.ignore_index is None:
            labels = labels.masked_fill((labels < 0) | (labels >= shard.vocab_size), OUTSIDE)
        return labels

    def _losses(self, out: HeadLossOutput) -> torch.Tensor:
        self.calls += 1
        if self.observe is not None:
            self.observe(out)
        return out.loss.transpose(0, 1).contiguous()


class _PerToken(torch.autograd.Function):
    """sum(losses * weight) [], whose gradients are known, as the losses [s, b]: their upstream gradient must be some
    number times the weight."""

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


class MegatronHeadMixin:
    """The same for a subclass, ``class Model(MegatronHeadMixin, GPTModel)``: set ``model.megatron_head`` to a
    `MegatronHead`; without one everything is Megatron's."""

    megatron_head: MegatronHead | None = None

    def _postprocess(self, *args, **kwargs):
        original = super()._postprocess
        bound = inspect.signature(original).bind(*args, **kwargs).arguments
        return _postprocess(self, self.megatron_head, original, **bound)

    def compute_language_model_loss(self, labels, logits):
        if self.megatron_head is None:
            return super().compute_language_model_loss(labels, logits)
        return self.megatron_head.of_logits(logits, labels, self.output_layer)


class Installed:
    """What `install` has done to a model; `remove` undoes it. As a context manager it removes itself, and complains if
    nothing ever came through."""

    def __init__(self, model, functions: dict):
        self.model, self.calls = model, 0
        # bound methods, so that a copy of the model calls them with itself
        self.methods = {name: types.MethodType(function, model) for name, function in functions.items()}
        model.__dict__.update(self.methods)

    def remove(self):
        for name, method in self.methods.items():
            if self.model.__dict__.get(name) is not method:
                raise RuntimeError(f"{type(self.model).__name__}.{name} was replaced after this: remove that one first")
        for name in self.methods:
            del self.model.__dict__[name]
        self.methods = {}

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self.methods:
            self.remove()
        if kind is None and not self.calls:
            raise RuntimeError("no loss came through the installed head: is this the model that is trained?")


def install(model, head: MegatronHead | HeadLoss, *, fused: bool = True) -> Installed:
    """Put `head` into one GPTModel or HybridModel (wrappers such as DDP are seen through), or with fused=False into any
    LanguageModule; called by all ranks of its group. A `HeadLoss` has the reduction "none", or "mean", which is then
    Megatron's own.

    A check call with random hidden states follows: losses of the right shape, from the head, and, where the head
    computes what the model does (no terms of its own, no vocab_size), equal to the model's own. Raises TypeError for
    something that is no model or no head, and for an output layer that is not Megatron's own; ValueError for a model
    that has no output layer here (a pipeline stage but the last), whose loss someone else has replaced already, or
    whose config asks the output layer for what the head does not do; and RuntimeError if the check fails. Whatever is
    raised, the model is as it was before.
    """
    require("megatron-core")
    check_type("head", head, MegatronHead, HeadLoss)
    head = MegatronHead.from_head_loss(head) if isinstance(head, HeadLoss) else head
    model, owner = _checked_model(model, fused)
    entry = "_postprocess" if hasattr(owner, "_postprocess") else "forward"  # sees hidden states and labels
    _refuse_others(model, fused and (entry, owner))
    stock = getattr(owner, entry, None)

    def compute_language_model_loss(self, labels, logits):
        installed.calls += 1
        return head.of_logits(logits, labels, self.output_layer)

    def postprocess(self, *args, **kwargs):
        original = types.MethodType(stock, self)
        bound = inspect.signature(original).bind(*args, **kwargs).arguments
        installed.calls += bound.get("labels") is not None
        return _postprocess(self, head, original, **bound)

    functions = {"compute_language_model_loss": compute_language_model_loss}
    functions |= {entry: postprocess} if fused else {}
    theirs = _check_call(model, head, fused)
    installed, before, observe = Installed(model, functions), head.calls, head.observe
    try:
        head.observe = None
        _compare(_check_call(model, head, fused), theirs, head, before)
    except BaseException:
        installed.remove()
        raise
    finally:
        head.observe = observe
    installed.calls = 0
    return installed


def _checked_model(model, fused):
    """-> the model without its wrappers, and Megatron's class of it; an error for what a head cannot be put into."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    if isinstance(model, (list, tuple)):
        raise TypeError(
            f"model must be one model chunk, got a {type(model).__name__} of {len(model)}: pass the chunk that has the "
            "output layer, model[-1] on the last pipeline stage"
        )
    while not isinstance(model, LanguageModule) and isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    classes = _fused_classes() if fused else (LanguageModule,)
    check_type("model", model, *classes)
    if getattr(model, "output_layer", None) is None:
        raise ValueError("this model has no output layer: install on the last pipeline stage")
    owner = next(cls for cls in classes if isinstance(model, cls))
    if fused:
        _refuse_options(model.config, model.output_layer)
        if not hasattr(owner, "_postprocess") and model.mtp_process:
            raise ValueError(f"multi-token prediction of a {owner.__name__} needs logits: use fused=False")
    return model, owner


def _fused_classes() -> tuple[type, ...]:
    from megatron.core.models.gpt.gpt_model import GPTModel

    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ImportError:  # older
        return (GPTModel,)
    return GPTModel, HybridModel


def _postprocess(model, head, original, *, labels=None, **rest):
    """`GPTModel._postprocess`, or `HybridModel.forward`, with the head in the place of output layer and loss, if there
    are labels."""
    rest = {"labels": labels, **rest}
    infers = rest.get("inference_context") is not None and not model.training
    if head is None or labels is None or infers or not model.post_process:
        return original(**rest)
    if "output_processor" in inspect.signature(original).parameters:
        if rest.get("output_processor") is None:
            rest["output_processor"] = head
        return original(**rest)
    # A HybridModel, or before 0.18: Megatron's own code runs with hidden states in the place of logits
    taken, layer, depths = [], model.output_layer, getattr(model.config, "mtp_num_layers", None) or 0

    def forward(hidden, weight=None, runtime_gather_output=None):
        taken[:] = [weight]
        return hidden, None

    def loss(labels, hidden):
        return head.of_hidden(hidden, taken[0], layer, labels, model.config, rest.get("loss_mask"), depths)

    # and hidden states are not scaled as logits are (in 0.17): the loss does that
    with _replaced(layer, forward=forward), _replaced(model, compute_language_model_loss=loss, _scale_logits=_same):
        return original(**rest)


def _same(x):
    return x


@contextmanager
def _replaced(module, **methods):
    """Methods of one object, for a while."""
    before = {name: module.__dict__[name] for name in methods if name in module.__dict__}
    module.__dict__.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del module.__dict__[name]
        module.__dict__.update(before)


def _has_main_grad(weight) -> bool:
    """An fp32 one, to which dW can be added; otherwise dW is returned, and DDP's hook does that."""
    main_grad = getattr(weight, "main_grad", None)
    fits = main_grad is not None and main_grad.dtype == torch.float32
    return fits and weight.requires_grad and torch.is_grad_enabled()


def _transform(config) -> Transform:
    return Transform(scale=config.mup_output_mult if getattr(config, "use_mup", False) else 1.0)


def _refuse_options(config, layer):
    """An error for what makes the output layer compute something that the fused head does not."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    for name, reason in REFUSED.items():
        if getattr(config, name, False):
            raise ValueError(f"{name}=True is not supported: {reason}")
    if type(layer).forward is not ColumnParallelLinear.forward:
        raise TypeError(
            "the output layer must be Megatron's ColumnParallelLinear without a forward of its own, got "
            f"{type(layer).__name__}: use fused=False, which calls it"
        )
    if getattr(layer, "gtp_remat_size", 1) > 1:
        raise ValueError(
            "the output layer's weight must be sharded over its tensor-parallel group alone, got gtp_remat_size="
            f"{layer.gtp_remat_size}: use fused=False"
        )


def _refuse_others(model, entry):
    """ValueError for a loss, or an entry (name, class), that someone else has replaced."""
    from megatron.core.models.common.language_module import language_module as functions

    methods = [("compute_language_model_loss", functions.LanguageModule)] + ([entry] if entry else [])
    for name, owner in methods:
        own = getattr(owner, name)
        if name in model.__dict__ or getattr(type(model), name) is not own or not _is_megatrons(own):
            raise ValueError(
                f"{type(model).__name__}.{name} is replaced already: one at a time; remove that one, or, for a "
                "subclass of yours, use MegatronHeadMixin"
            )
    names = ("fused_vocab_parallel_cross_entropy", "te_parallel_cross_entropy")
    losses = {name: getattr(functions, name, None) for name in names}
    losses["vocab_parallel_cross_entropy"] = functions.tensor_parallel.vocab_parallel_cross_entropy
    for name, function in losses.items():
        if function is not None and not _is_megatrons(function):
            raise ValueError(f"{function.__module__} has replaced Megatron's {name}: remove that first")


def _is_megatrons(function) -> bool:
    return (getattr(function, "__module__", None) or "").split(".")[0] in ("megatron", "transformer_engine", "torch")


@torch.no_grad()
def _check_call(model, head, fused) -> torch.Tensor:
    """Losses [1, s] of random hidden states or logits, the same on all ranks, in the way the model computes them."""
    layer, group = model.output_layer, model.output_layer.tp_group
    training = [m for m in model.modules() if m.training]
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else layer.weight
    generator, count = torch.Generator().manual_seed(0), 2 * group.size()
    depths = 1 + (getattr(model.config, "mtp_num_layers", None) or 0)
    labels = torch.randint(0, weight.shape[0] * group.size() - 1, (1, count), generator=generator).to(weight.device)
    labels = labels + (labels == head.ignore_index)  # which is an id at times, and has no loss
    hidden = torch.randn(depths * count, 1, weight.shape[1], generator=generator).to(weight)
    if not fused:
        return model.compute_language_model_loss(labels, F.linear(hidden[:count], weight))
    if layer.sequence_parallel:
        hidden = hidden.view(depths, group.size(), -1, *hidden.shape[1:])[:, group.rank()].flatten(0, 1)
    try:
        model.eval()
        if not hasattr(model, "_postprocess"):
            with _replaced(model.decoder, forward=lambda *args, **kwargs: hidden):
                return model.forward(None, None, None, decoder_input=hidden, labels=labels)
        names = inspect.signature(type(model)._postprocess).parameters
        nothing = {n: None for n, p in names.items() if n != "self" and p.default is inspect.Parameter.empty}
        return model._postprocess(**{**nothing, "hidden_states": hidden, "labels": labels})
    finally:
        for module in training:
            module.training = True


def _compare(ours, theirs, head, before):
    if head.calls == before:
        raise RuntimeError("the check call did not come through the head: this model computes its loss elsewhere")
    if ours.shape != theirs.shape or ours.dtype != torch.float32:
        raise RuntimeError(f"the check call must give fp32 {list(theirs.shape)}, got {ours.dtype} {list(ours.shape)}")
    if head.is_megatrons and not torch.allclose(ours, theirs.float(), rtol=2e-2, atol=2e-2):
        raise RuntimeError(
            f"the check call differs from the model's own losses by {float((ours - theirs).abs().max()):.3g}"
        )
