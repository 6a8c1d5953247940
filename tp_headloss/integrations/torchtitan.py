"""torchtitan: `HeadLoss` as its loss of vocabulary-sharded logits, and as its chunked loss, without logits.

Who reduces dH: torchtitan does, under both of its gradient contracts. In "spmd_types" the decoder's backward sums the
gradient of hidden states that are replicated over "tp"; in "partial_dtensor" the gradient is a DTensor that says that
it is ``Partial``. So `FusedHeadLoss` returns this rank's part, ``Linear(hidden_grad="none")``, unless told otherwise.
Group and vocabulary come from the DTensor, or from the mesh that torchtitan has current, never from a default group.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..dtensor import is_dtensor, local_logits
from ..head_loss import HeadLoss, HeadLossOutput
from ..linear import Linear
from ..shard import VocabShard
from . import check_type, require

require("torchtitan")  # before it is imported: an error that says which versions are supported

# ruff: noqa: E402
import spmd_types as spmd
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss, ChunkedLossWrapper
from torchtitan.config import CompileConfig
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
from torchtitan.distributed.utils import get_spmd_backend

BACKENDS = ("spmd_types", "partial_dtensor")


class LogitsLoss(BaseLoss):
    """A `HeadLoss` in the place of torchtitan's CrossEntropyLoss; dH is none of its business, and the backward of the
    logits communicates nothing. Alone, or as the ``loss_fn`` of torchtitan's own ChunkedLossWrapper.

    head_loss: any of reduction "mean" (default: cross-entropy). global_vocab_size: the rows of the output layer; needed
    in "spmd_types", where logits are plain tensors that do not say it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        head_loss: HeadLoss = field(default_factory=HeadLoss)
        global_vocab_size: int | None = None

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        check_type("config", config, type(self).Config)
        self.head_loss, self.global_vocab_size = _accepted(config.head_loss), config.global_vocab_size
        self.fn = self.head_loss
        self._maybe_compile(compile_config)

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **loss_inputs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """pred [B, L, V] sharded on V over "tp" (a DTensor, or this rank's [B, L, V/P]), labels [B, L] replicated
        -> loss, a plain tensor, and metrics, as `_returned` has them; all replicated over "tp".

        loss_inputs: of these, what terms and metrics name as inputs. One collective forward; backward: none.
        ValueError if nothing says which ids this rank has.
        """
        _check_backend()
        _check_types((pred, spmd.S(pred.dim() - 1)), (labels, spmd.I))
        with spmd.no_typecheck():
            if is_dtensor(pred):
                logits, shard = local_logits(pred, None)
            else:
                logits, shard = pred, _shard_of(pred.shape[-1], self.global_vocab_size)
            if self.global_vocab_size not in (None, shard.vocab_size):
                raise ValueError(f"global_vocab_size={self.global_vocab_size}, got logits of {shard.vocab_size} ids")
            out = self.fn(logits, labels, shard=shard, **_arguments(self.head_loss, global_valid_tokens, loss_inputs))
            result = _returned(out, global_valid_tokens)
        return _typed(result)


class FusedHeadLoss(ChunkedLossWrapper):
    """A `HeadLoss` from hidden states and the output layer's weight, without logits. By default torchtitan reduces dH:
    this returns a rank's own part of it (see above), and dW, db of the rank's own rows.

    It is a ChunkedLossWrapper for torchtitan's trainer to know what to do: `set_lm_head`, ``model._skip_lm_head =
    True``. Nothing else is taken from there: chunks are those of `Linear.budget`, gradients scale with the upstream
    one, and there is nothing for torchtitan to compile (own terms: ``HeadLoss(compile=True)``).

    linear: with ``hidden_grad="none"``; in "partial_dtensor" "all_reduce" is as right, its collective hidden behind the
    last GEMM, at twice the volume if the body is sequence-parallel. Anything else is a ValueError.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        head_loss: HeadLoss = field(default_factory=HeadLoss)
        linear: Linear = field(default_factory=lambda: Linear(hidden_grad="none"))

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        check_type("config", config, type(self).Config)
        check_type("linear", config.linear, Linear)
        self.head_loss, self.linear, self.lm_head = _accepted(config.head_loss), config.linear, None
        if self.linear.hidden_grad == "reduce_scatter" or self.linear.main_grad:
            raise ValueError(
                "torchtitan gives hidden states of all tokens and takes dW from autograd, got hidden_grad="
                f"{self.linear.hidden_grad!r}, main_grad={self.linear.main_grad}: use Linear(hidden_grad='none')"
            )

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """TypeError unless its forward is that of nn.Linear, which is what is computed here."""
        if getattr(type(lm_head), "forward", None) is not nn.Linear.forward:
            raise TypeError(
                f"the output layer must be an nn.Linear without a forward of its own, got {type(lm_head).__name__}: "
                "use ChunkedLossWrapper.Config(loss_fn=LogitsLoss.Config(..)), which calls it"
            )
        super().set_lm_head(lm_head)

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **loss_inputs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """pred [B, L, H] hidden states replicated over "tp" (a DTensor or plain), labels [B, L] replicated, the output
        layer's weight [V, H] and bias [V] sharded on V -> loss, a plain tensor, and metrics, as `_returned` has them.

        loss_inputs: of these, what terms and metrics name as inputs. Collectives: those of `HeadLoss.linear`, of dH
        if `linear` says so. ValueError if nobody would sum dH, or two would.
        """
        backend, lm_head = _check_backend(), self.lm_head
        if lm_head is None:
            raise ValueError("no output layer: call set_lm_head(model.lm_head) and set model._skip_lm_head = True")
        with _unsharded(lm_head):
            weight, bias = lm_head.weight, lm_head.bias
            if not is_dtensor(pred):
                self._check_reduced(backend, weight)
            rows = [(x, spmd.S(0)) for x in (weight, bias) if x is not None]
            _check_types((pred, spmd.R), (labels, spmd.I), *rows)
            shard = None if is_dtensor(weight) else _shard_of(weight.shape[0], lm_head.out_features)
            with spmd.no_typecheck():
                options = _arguments(self.head_loss, global_valid_tokens, loss_inputs)
                out = self.head_loss.linear(pred, weight, labels, bias=bias, shard=shard, linear=self.linear, **options)
                result = _returned(out, global_valid_tokens)
        return _typed(result)

    def _check_reduced(self, backend: str, weight: torch.Tensor):
        """That plain hidden states' gradient is summed over the ranks, once."""
        if backend == "spmd_types" and self.linear.hidden_grad == "all_reduce":
            raise ValueError(
                "in 'spmd_types' the decoder's backward sums dH over 'tp', and hidden_grad='all_reduce' would, too: "
                "use Linear(hidden_grad='none')"
            )
        if is_dtensor(weight) and self.linear.hidden_grad == "none":
            raise ValueError(
                "hidden states are a plain tensor beside a DTensor weight, and nobody would sum dH over 'tp': return a "
                "DTensor from the decoder, or use Linear(hidden_grad='all_reduce')"
            )


def _accepted(head_loss: HeadLoss) -> HeadLoss:
    check_type("head_loss", head_loss, HeadLoss)
    if head_loss.reduction != "mean" or head_loss.ignore_index != IGNORE_INDEX:
        raise ValueError(
            f"torchtitan divides by the number of all labels that are not {IGNORE_INDEX}: the HeadLoss must have "
            f"reduction='mean' and ignore_index={IGNORE_INDEX}, got {head_loss.reduction!r} and "
            f"{head_loss.ignore_index}"
        )
    return head_loss


def _check_backend() -> str:
    if get_spmd_backend() not in BACKENDS:
        raise ValueError(f"parallelism.spmd_backend must be one of {BACKENDS}, got {get_spmd_backend()!r}")
    return get_spmd_backend()


def _shard_of(width: int, vocab_size: int | None) -> VocabShard:
    """Of this rank's `width` plain columns of logits, or rows of a weight."""
    if vocab_size is None and get_spmd_backend() == "spmd_types":
        raise ValueError("plain logits do not say the size of the vocabulary: give Config(global_vocab_size=..)")
    if spmd_mesh_size("tp") > 1:
        return VocabShard.from_group(current_spmd_mesh().get_group("tp"), vocab_size)
    if vocab_size not in (None, width):
        raise ValueError(
            f"this rank has {width} of {vocab_size} ids, and nothing says who has the others: in 'spmd_types' call the "
            "loss inside of torchtitan's train_context (set_current_spmd_mesh), in 'partial_dtensor' with DTensors"
        )
    return VocabShard(0, width, width)


@contextlib.contextmanager
def _unsharded(lm_head: nn.Module):
    """Its weight gathered by FSDP, which lets go of it after the backward; without one, here."""
    if not isinstance(lm_head, FSDPModule):
        yield
        return
    with spmd.no_typecheck():
        lm_head.unshard()
    try:
        yield
    finally:
        if not torch.is_grad_enabled():
            lm_head.reshard()


def _arguments(head_loss: HeadLoss, global_valid_tokens, loss_inputs) -> dict[str, Any]:
    """Of HeadLoss. torchtitan passes what the model takes ("positions") to every loss, hence the choice by name."""
    named = {name for part in (*head_loss.terms, *head_loss.token_metrics) for name in part.inputs} | {"teacher"}
    inputs = {name: x for name, x in loss_inputs.items() if name in named}
    return {"denominator": 1 if global_valid_tokens is None else global_valid_tokens, "inputs": inputs}


def _returned(out: HeadLossOutput, global_valid_tokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """torchtitan's (loss, metrics): this rank's tokens' sums over the tokens of the global batch, to be added over the
    ranks of the loss mesh, named "accuracy/mean" or, terms without their weights, "loss/cross_entropy/mean"; extrema,
    "ratio/max" and "ratio/min". Without global_valid_tokens the loss is a sum, and there are no metrics."""
    metrics = {}
    if global_valid_tokens is not None:
        sums = {f"loss/{name}": x for name, x in out.terms.items()} | out.metrics
        for name, x in sums.items():
            kind, bare = name[:3], name[4:]
            if kind in ("max", "min") and name[3:4] == "_":
                metrics[f"{bare}/{kind}"] = x
            else:
                metrics[f"{name}/mean"] = x / global_valid_tokens.clamp(min=1)
    return out.loss, metrics


def _check_types(*typed):
    """What torchtitan's debug.spmd_typechecking knows of tensors, over "tp"."""
    if spmd.is_type_checking():
        for x, of_tp in typed:
            spmd.assert_type(x, {"tp": of_tp})


def _typed(result: tuple[torch.Tensor, dict[str, torch.Tensor]]):
    """The same for what is returned: sums are over this rank's own tokens."""
    if spmd.is_type_checking():
        loss, metrics = result
        for name, x in {"/mean": loss, **metrics}.items():
            of_tokens = spmd.P if name.endswith("/mean") else spmd.V
            spmd.assert_type(x, {"dp": of_tokens, "cp": of_tokens, "tp": spmd.I})
    return result
