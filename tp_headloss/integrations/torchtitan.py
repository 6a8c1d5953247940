"""torchtitan: `HeadLoss` as its loss of vocabulary-sharded logits, and as its chunked loss, without
logits.

torchtitan reduces dH, the gradient of the hidden states, under both of its gradient contracts. In
"spmd_types" the decoder's backward sums the gradient of hidden states that are replicated over
"tp"; in "partial_dtensor" the gradient is a DTensor whose placement is ``Partial``. So
`FusedHeadLoss` returns this rank's part by default, as ``Linear(hidden_grad="none")`` says. Group
and vocabulary are those of the DTensor, or of torchtitan's current mesh.

Both losses return torchtitan's (loss, metrics). The metrics are sums over this rank's tokens
divided by the tokens of the global batch, to be added over the ranks of the loss mesh, named
"accuracy/mean" or, for terms without their weights, "loss/cross_entropy/mean"; and extrema,
"ratio/max". Without global_valid_tokens: a sum, and no metrics.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..call.dtensor import local_logits
from ..call.subclasses import is_dtensor
from ..head_loss import HeadLoss, HeadLossOutput
from ..linear_head import Linear
from ..ranks.shard import VocabShard
from ..spec import Instance, Size, checked
from . import require
from .fsdp import unsharded
from .token_counts import expect_mean_over_tokens

require("torchtitan")  # before it is imported: an error that says which versions are supported

# ruff: noqa: E402
import spmd_types as spmd
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss, ChunkedLossWrapper
from torchtitan.config import CompileConfig
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
from torchtitan.distributed.utils import get_spmd_backend

BACKENDS = ("spmd_types", "partial_dtensor")


class LogitsLoss(BaseLoss):
    """A `HeadLoss` of logits in place of CrossEntropyLoss, alone or as ``loss_fn`` of torchtitan's
    ChunkedLossWrapper.

    Args of Config:
        head_loss: `HeadLoss` of reduction "mean"; default cross-entropy.
        global_vocab_size: rows of the whole output layer; needed in "spmd_types", where logits are
        plain tensors.
    """

    @checked
    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        head_loss: HeadLoss = field(default_factory=HeadLoss)
        global_vocab_size: Size | None = None

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        Instance(type(self).Config).check("config", config, {})
        self.head_loss, self.global_vocab_size = (
            _checked_head_loss(config.head_loss),
            config.global_vocab_size,
        )
        self.fn = self.head_loss
        self._maybe_compile(compile_config)

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **loss_inputs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, a plain scalar, and metrics, replicated over "tp"; forward: one
        collective, backward: none.

        Args:
            pred: logits [B, L, V] sharded on V over "tp", as a DTensor, or this rank's plain [B, L,
                V/P].
            labels: [B, L] replicated.
            global_valid_tokens: scalar, the valid tokens of the global batch.
            loss_inputs: torchtitan's inputs of losses; those are used that terms and metrics name.

        Raises ValueError if nothing says which ids this rank has.
        """
        _checked_backend()
        _assert_types((pred, spmd.S(pred.dim() - 1)), (labels, spmd.I))
        with spmd.no_typecheck():
            if is_dtensor(pred):
                logits, shard = local_logits(pred, None)
            else:
                logits, shard = pred, _mesh_shard(pred.shape[-1], self.global_vocab_size)
            if self.global_vocab_size not in (None, shard.vocab_size):
                raise ValueError(
                    f"global_vocab_size={self.global_vocab_size}, got logits of {shard.vocab_size} "
                    "ids"
                )
            out = self.fn(
                logits,
                labels,
                shard=shard,
                **_head_loss_arguments(self.head_loss, global_valid_tokens, loss_inputs),
            )
        return _loss_and_metrics(out, global_valid_tokens)


class FusedHeadLoss(ChunkedLossWrapper):
    """A `HeadLoss` of hidden states and the output layer's weight, without logits. Its gradients
    are this rank's part of dH, which torchtitan reduces, and dW, db of this rank's rows.

    It is a ChunkedLossWrapper so that torchtitan's trainer calls `set_lm_head` and sets
    ``model._skip_lm_head = True``, but has its own chunks (`Linear.budget`), its gradients scale
    with the upstream gradient, and torchtitan does not compile it (for terms of your own:
    ``HeadLoss(compile=True)``).

    Args of Config:
        head_loss: `HeadLoss` of reduction "mean"; default cross-entropy.
        linear: `Linear` with ``hidden_grad="none"``, or in "partial_dtensor" also "all_reduce". The
        latter hides its
            collective behind the last GEMM, with twice the volume if the body is sequence-parallel.
            Others: ValueError.
    """

    @checked
    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        head_loss: HeadLoss = field(default_factory=HeadLoss)
        linear: Linear = field(default_factory=lambda: Linear(hidden_grad="none"))

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        Instance(type(self).Config).check("config", config, {})
        self.head_loss, self.linear, self.lm_head = (
            _checked_head_loss(config.head_loss),
            config.linear,
            None,
        )
        if self.linear.hidden_grad == "reduce_scatter" or self.linear.main_grad:
            raise ValueError(
                "torchtitan gives hidden states of all tokens and takes dW from autograd, got "
                f"hidden_grad={self.linear.hidden_grad!r}, main_grad={self.linear.main_grad}: use "
                "Linear(hidden_grad='none')"
            )

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """Set the output layer. TypeError unless its forward is that of nn.Linear, the only one
        computed here."""
        if getattr(type(lm_head), "forward", None) is not nn.Linear.forward:
            raise TypeError(
                "the output layer must be an nn.Linear without a forward of its own, got "
                f"{type(lm_head).__name__}: use "
                "ChunkedLossWrapper.Config(loss_fn=LogitsLoss.Config(..)), which calls it"
            )
        super().set_lm_head(lm_head)

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **loss_inputs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, a plain scalar, and metrics. Collectives: `HeadLoss.linear`; dH: as
        `linear` says.

        Args:
            pred: hidden states [B, L, H] replicated over "tp", as a DTensor or plain.
            labels: [B, L] replicated.
            global_valid_tokens, loss_inputs: as in `LogitsLoss`.

        Raises ValueError if dH would be summed twice, or not at all.
        """
        backend, lm_head = _checked_backend(), self.lm_head
        if lm_head is None:
            raise ValueError(
                "no output layer: call set_lm_head(model.lm_head) and set model._skip_lm_head = "
                "True"
            )
        with contextlib.ExitStack() as stack:
            with spmd.no_typecheck():
                stack.enter_context(unsharded(lm_head))
            weight, bias = lm_head.weight, lm_head.bias
            if not is_dtensor(pred):
                self._check_reduced(backend, weight)
            rows = [(x, spmd.S(0)) for x in (weight, bias) if x is not None]
            _assert_types((pred, spmd.R), (labels, spmd.I), *rows)
            shard = (
                None if is_dtensor(weight) else _mesh_shard(weight.shape[0], lm_head.out_features)
            )
            with spmd.no_typecheck():
                options = _head_loss_arguments(self.head_loss, global_valid_tokens, loss_inputs)
                out = self.head_loss.linear(
                    pred, weight, labels, bias=bias, shard=shard, linear=self.linear, **options
                )
        return _loss_and_metrics(out, global_valid_tokens)

    def _check_reduced(self, backend: str, weight: torch.Tensor):
        """Raise ValueError unless the gradient of plain hidden states is summed over the ranks
        exactly once."""
        if backend == "spmd_types" and self.linear.hidden_grad == "all_reduce":
            raise ValueError(
                "in 'spmd_types' the decoder's backward sums dH over 'tp', and "
                "hidden_grad='all_reduce' would, too: use Linear(hidden_grad='none')"
            )
        if is_dtensor(weight) and self.linear.hidden_grad == "none":
            raise ValueError(
                "hidden states are a plain tensor beside a DTensor weight, and nobody would sum dH "
                "over 'tp': return a DTensor from the decoder, or use "
                "Linear(hidden_grad='all_reduce')"
            )


def _checked_head_loss(head_loss: HeadLoss) -> HeadLoss:
    """Return the HeadLoss. ValueError unless its reduction, ignore_index and denominator are
    torchtitan's."""
    if head_loss.reduction != "mean" or head_loss.ignore_index != IGNORE_INDEX:
        raise ValueError(
            f"torchtitan divides by the number of all labels that are not {IGNORE_INDEX}: the "
            f"HeadLoss must have reduction='mean' and ignore_index={IGNORE_INDEX}, got "
            f"{head_loss.reduction!r} and {head_loss.ignore_index}"
        )
    expect_mean_over_tokens(
        head_loss,
        "torchtitan's global_valid_tokens",
        "a Term that multiplies its loss by weights is divided by tokens",
    )
    return head_loss


def _checked_backend() -> str:
    """Return torchtitan's current backend. ValueError for one that is not supported."""
    if get_spmd_backend() not in BACKENDS:
        raise ValueError(
            f"parallelism.spmd_backend must be one of {BACKENDS}, got {get_spmd_backend()!r}"
        )
    return get_spmd_backend()


def _mesh_shard(width: int, vocab_size: int | None) -> VocabShard:
    """Shard of a rank that has `width` plain columns of logits, or rows of a weight, in
    torchtitan's current mesh."""
    if vocab_size is None:
        if get_spmd_backend() == "spmd_types" or spmd_mesh_size("tp") > 1:
            raise ValueError(
                "plain logits do not say the size of the vocabulary: give "
                "Config(global_vocab_size=..)"
            )
        return VocabShard(0, width, width)
    if spmd_mesh_size("tp") > 1:
        return VocabShard.from_group(current_spmd_mesh().get_group("tp"), vocab_size)
    if vocab_size != width:
        raise ValueError(
            f"this rank has {width} of {vocab_size} ids, and nothing says who has the others: in "
            "'spmd_types' call the loss inside of torchtitan's train_context "
            "(set_current_spmd_mesh), in 'partial_dtensor' with DTensors"
        )
    return VocabShard(0, width, width)


def _head_loss_arguments(head_loss: HeadLoss, global_valid_tokens, loss_inputs) -> dict[str, Any]:
    """Denominator and inputs for the HeadLoss, by name: torchtitan passes those of the model,
    "positions", say, too."""
    named = head_loss.input_names | {"teacher"}
    inputs = {name: x for name, x in loss_inputs.items() if name in named}
    return {
        "denominator": 1 if global_valid_tokens is None else global_valid_tokens,
        "inputs": inputs,
    }


def _loss_and_metrics(
    out: HeadLossOutput, global_valid_tokens
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and metrics of an output as torchtitan expects them; their names are in the docstring of
    this module. Their types are asserted: loss and means are sums over this rank's tokens, so
    partial."""
    metrics = {}
    if global_valid_tokens is not None:
        sums = {f"loss/{name}": x for name, x in out.terms.items()} | out.metrics
        for name, x in sums.items():
            if name.startswith(("max_", "min_")):
                metrics[f"{name[4:]}/{name[:3]}"] = x
            else:
                with spmd.no_typecheck():
                    metrics[f"{name}/mean"] = x / global_valid_tokens.clamp(min=1)
    if spmd.is_type_checking():
        for name, x in {"/mean": out.loss, **metrics}.items():
            tokens_type = spmd.P if name.endswith("/mean") else spmd.V
            spmd.assert_type(x, {"dp": tokens_type, "cp": tokens_type, "tp": spmd.I})
    return out.loss, metrics


def _assert_types(*typed):
    """Assert the types of tensors over "tp", given as (tensor, type), if torchtitan's
    debug.spmd_typechecking is on."""
    if spmd.is_type_checking():
        for x, tp_type in typed:
            spmd.assert_type(x, {"tp": tp_type})
