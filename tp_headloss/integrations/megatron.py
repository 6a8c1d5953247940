"""Megatron-Core: the losses of a GPTModel from its hidden states, or from its logits shard.

    head = MegatronHead(ignore_index=-100)
    with install(model, head):              # or model(..., output_processor=head), Megatron-Core >= 0.18
        losses = model(ids, positions, mask, labels=labels)

`install` replaces two methods of one model object, sees by a call that they are in the path, and takes them back: with
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
from ..terms import Term
from . import require

OUTSIDE = -100  # what labels outside of the vocabulary become if ignore_index is None


class MegatronHead:
    """What is computed: per-token losses [b, s] fp32, not reduced, as `compute_language_model_loss` returns them.

    ignore_index: a label whose tokens have loss 0 and no gradient; any other label outside of the vocabulary has NaN.
    None: as in Megatron, where the caller's loss mask decides what counts: all labels outside of the vocabulary have 0
    and no gradient (Megatron returns lse - max for them, which is no cross-entropy, and the mask must be 0 there).

    terms: of a `HeadLoss`, default cross-entropy. vocab_size: the true vocabulary; padding rows beyond it are then left
    out of the softmax; None: Megatron's padded one, with all rows in it. linear: `Linear` for budget and mode; how
    gradients are reduced, and whether dW goes to ``main_grad`` (gradient_accumulation_fusion), is the output layer's.
    mode: "recompute" (the default, "auto") for any use of the losses; "one_sweep", with a GEMM less, if what is
    differentiated is ``(losses * loss_mask).sum()`` times any number, of the ``loss_mask`` [b, s] that the model's
    forward is called with (None: ones): gradients are NaN otherwise. Not for losses of multi-token prediction.
    options: `Options`, ``inplace=True`` for fused=False, say. observe: called with the `HeadLossOutput` of each call,
    whose sums are of all tokens, in one sweep weighted by the loss mask.

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
        observe: Callable[[HeadLossOutput], None] | None = None,
    ):
        require("megatron-core")
        self.ignore_index, self.vocab_size, self.linear = ignore_index, vocab_size, linear or Linear()
        self.is_megatrons = terms is None and vocab_size is None  # the same losses, for labels in the vocabulary
        index = OUTSIDE if ignore_index is None else ignore_index
        self.head_loss = HeadLoss(terms, metrics=metrics, reduction="none", ignore_index=index, options=options)
        if options is not None and options.inplace:  # which a linear head has no use for
            options = replace(options, inplace=False)
        parts = {"metrics": metrics, "ignore_index": index, "options": options}
        self.linear_loss = HeadLoss(terms, reduction="none", **parts)
        self.summed_loss = HeadLoss(terms, reduction="sum", **parts)
        self.observe, self.calls = observe, 0

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
        shard = self._shard(layer.tp_group, weight.shape[0])
        _refuse_options(config)
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

    def of_logits(self, logits, labels, group) -> torch.Tensor:
        """logits [s, b, v/P], labels [b, s] -> losses [b, s]."""
        shard = self._shard(group, logits.shape[-1])
        return self._losses(self.head_loss(logits, self._labels(labels, shard), shard=shard))

    def _shard(self, group, width) -> VocabShard:
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"the output layer must know its tensor-parallel group, got {group!r}")
        padded = width * group.size()
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

    def _postprocess(self, hidden_states, *args, **kwargs):
        original = super()._postprocess
        bound = inspect.signature(original).bind(hidden_states, *args, **kwargs).arguments
        return _postprocess(self, self.megatron_head, original, **bound)

    def compute_language_model_loss(self, labels, logits):
        if self.megatron_head is None:
            return super().compute_language_model_loss(labels, logits)
        return self.megatron_head.of_logits(logits, labels, _group_of(self))


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


def install(model, head: MegatronHead, *, fused: bool = True) -> Installed:
    """Put `head` into one GPTModel (its wrappers, such as DDP, are seen through); called by all ranks of its group.

    A check call with random hidden states follows: losses of the right shape, from the head, and, where the head
    computes what the model does (no terms of its own, no vocab_size), equal to the model's own. Raises ValueError for a
    model that has no output layer here (a pipeline stage but the last), or whose loss someone else has replaced
    already, and RuntimeError if the check fails; then nothing is changed.
    """
    require("megatron-core")
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.models.gpt.gpt_model import GPTModel

    while not isinstance(model, LanguageModule) and isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    if not isinstance(model, GPTModel if fused else LanguageModule):
        raise ValueError(f"model must be a {'GPTModel' if fused else 'LanguageModule'}, got {type(model).__name__}")
    if getattr(model, "output_layer", None) is None:
        raise ValueError("this model has no output layer: install on the last pipeline stage")
    _refuse_others(model, fused, GPTModel, LanguageModule)
    if fused:
        _refuse_options(model.config)
    stock = type(model)._postprocess if fused else None

    def compute_language_model_loss(self, labels, logits):
        installed.calls += 1
        return head.of_logits(logits, labels, _group_of(self))

    def postprocess(self, hidden_states, *args, **kwargs):
        original = types.MethodType(stock, self)
        bound = inspect.signature(original).bind(hidden_states, *args, **kwargs).arguments
        installed.calls += bound.get("labels") is not None
        return _postprocess(self, head, original, **bound)

    functions = {"compute_language_model_loss": compute_language_model_loss}
    functions |= {"_postprocess": postprocess} if fused else {}
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


def _postprocess(model, head, original, *, hidden_states, labels=None, **rest):
    """`GPTModel._postprocess` with the head in the place of output layer and loss, if there are labels."""
    rest = {"hidden_states": hidden_states, "labels": labels, **rest}
    infers = rest.get("inference_context") is not None and not model.training
    if head is None or labels is None or infers or not model.post_process:
        return original(**rest)
    if "output_processor" in inspect.signature(original).parameters:
        if rest.get("output_processor") is None:
            rest["output_processor"] = head
        return original(**rest)
    # Before 0.18: Megatron's own code runs with hidden states in the place of logits
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


def _refuse_options(config):
    if getattr(config, "defer_embedding_wgrad_compute", False):
        raise ValueError("defer_embedding_wgrad_compute=True is not supported: dW is computed in the backward")


def _group_of(model):
    return model.output_layer.tp_group


def _refuse_others(model, fused, gpt_model, language_module):
    from megatron.core.models.common.language_module import language_module as functions

    methods = [("compute_language_model_loss", language_module)] + ([("_postprocess", gpt_model)] if fused else [])
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
    layer, group, training = model.output_layer, _group_of(model), [m for m in model.modules() if m.training]
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
    names = inspect.signature(type(model)._postprocess).parameters
    nothing = {n: None for n, p in names.items() if n != "self" and p.default is inspect.Parameter.empty}
    model.eval()
    try:
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
