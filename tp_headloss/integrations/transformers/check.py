"""A forward with a head in place of a model's own, and the check that nothing else is between its
body and loss."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers.loss.loss_utils import ForCausalLMLoss

from ...arguments.options import Options, Transform
from ...call.agreement import Agreement
from ...call.subclasses import is_dtensor
from ...ranks.shard import VocabShard
from ...spec import Line
from ..hooks import hooks_of, is_from, location, names_of
from ..replacement import Replacement, evaluating, replaced
from . import copies
from .forward import FUSED, stock_forward
from .loss_function import CausalLMShardLoss
from .mixed_precision import AUTOCAST_GOES_TOO, below_mixed_precision, expect_autocast
from .model_facts import config_transform, expect_own_loss, installed_shard, output_layer
from .model_parts import HEAD_ARGUMENTS, body_of, refuse_auxiliary_loss, run_body


class InstalledForward(Replacement):
    """A forward in the place of a model's own, installed on construction; the model is as it was if
    a check fails.

    A subclass has `_forward`, which counts the `calls` of its head, `_checked_arguments`, and
    perhaps `_takes_place_of`. The check's own call is not counted. Where accelerate has prepared the
    model for bf16 or fp16, the forward is installed and removed below accelerate's.

    Args:
        shard: as in `fuse_head`.
        lines: of the installation's arguments by name.
        given: the other arguments of the installation by name; one that its line rules out on one
            rank is an error on all.
        arguments: of the check call, besides ids and labels.
    """

    on_top = f"what was installed on top (TRL: del model.forward; {AUTOCAST_GOES_TOO})"

    def __init__(
        self,
        model,
        shard: VocabShard | None,
        lines: Mapping[str, Line],
        given: Mapping[str, Any],
        **arguments: Any,
    ):
        output_layer(model)
        lines["shard"].check("shard", shard, {})  # whose group ranks compare the others in
        with below_mixed_precision(model):
            self._install_checked(model, shard, lines, given, arguments)

    def _install_checked(self, model, shard, lines, given, arguments):
        """Check the arguments and the model, install the forward, and check that."""
        copies.forget(model)
        super().__init__(vars(model), *copies.ENTRIES)
        self.model, self.shard, self.calls, self.checked = model, shard, 0, False
        self.checked_shard = installed_shard(model, shard)
        try:
            replaces = self._takes_place_of(self._before.get("forward"))
            if replaces:
                del model.forward
            with Agreement(Options(validate="full"), self.checked_shard) as agreement:
                for name, value in given.items():
                    lines[name].check(name, value, {})
                expect_autocast(model, self._before.get("forward"))
                self.stock_forward = stock_forward(model)
                expect_own_loss(model)
                own_transform = config_transform(model.config.get_text_config())
                transform = given["transform"]
                self.transform = own_transform if transform is None else transform
                agreement.record(
                    f"the installation of {type(self).__name__}",
                    self.checked_shard,
                    transform=self.transform,
                    **self._checked_arguments(given),
                )
                if shard is not None:
                    _expect_all_ids(model, shard)
            stock = check_forward(model, self.stock_forward, self.transform, self.checked_shard)
            _expect_no_hooks(output_layer(model))
            self.output_class, self._seen = stock.output_class, _heeded_by_stock(model)
            self.install(self.entries_of(model))
            copies.watch_body(self, model)
            with evaluation(model):
                out = model(input_ids=stock.ids, labels=stock.labels, **arguments)
            if not self.calls:
                raise ValueError("the fused forward was installed, and the model does not call it")
            stock.expect_loss(out.loss)
        except BaseException:
            self.undo()
            raise
        # from here on calls are the user's
        self.calls, self.checked = 0, True

    def _takes_place_of(self, forward) -> bool:
        """Return True for a forward of the model's own that the head replaces, and puts back in the
        end."""
        return False

    def remove(self):
        with below_mixed_precision(self.model):
            super().remove()

    def _checked_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the other arguments that must be equal on all ranks, after a check of what their
        lines do not check, and prepare the check call, which knows plain cross-entropy."""
        raise NotImplementedError

    def undo(self):
        super().undo()
        copies.unwatch_body(self.model, self)

    def entries_of(self, model) -> dict[str, Any]:
        """Return the entries of a model, which is the one that this was installed on, or a copy of
        it."""
        functions = (
            self._function(),
            functools.partial(copies.reduce, self),
            functools.partial(copies.replicate, self),
        )
        return {
            name: types.MethodType(function, model) for name, function in zip(self.names, functions)
        }

    def adopt(self, model):
        """Give a copy of the model its entries. The first copy becomes the model of a head that was
        pickled."""
        entries = self.entries_of(model)
        vars(model).update(entries)
        if "model" not in vars(self):
            self.model, self.place, self.entries, self._before = model, vars(model), entries, {}

    def __deepcopy__(self, memo):
        return self

    def __getstate__(self):
        """Leave out what belongs to the model; a pickled head is a part of it."""
        of_model = "model", "place", "entries", "_before", "last"
        return {name: value for name, value in vars(self).items() if name not in of_model}

    def _function(self):
        """Return a function with the signature of the model's own forward, because generate() and
        Trainer read it."""

        @functools.wraps(self.stock_forward)
        def fused_forward(model, *args, **kwargs):
            if torch.compiler.is_compiling():
                return self._forward(model, args, kwargs)
            with copies.inside():
                return self._forward(model, args, kwargs)

        # accelerate's unwrap_model follows __wrapped__, which leads past this head to the model's
        # own forward
        del fused_forward.__wrapped__
        vars(fused_forward).update(
            {"__signature__": inspect.signature(self.stock_forward), FUSED: type(self).__name__}
        )
        return fused_forward

    def _forward(self, model, args, kwargs):
        """Output of the forward of `model`, which is the model that this was installed on, or a
        copy of it."""
        raise NotImplementedError

    def _run_body(self, model, given):
        """Outputs of the body for a call with labels. ValueError for later changes that the head
        would ignore."""
        expect_own_loss(model)
        (transform, hooks), (own, known) = _heeded_by_stock(model), self._seen
        if type(model).forward is not self.stock_forward:
            raise ValueError(
                f"a head was installed for {location(self.stock_forward)}, and the model's class "
                f"has {location(type(model).forward)} now, which it would ignore: .remove() the "
                "head, and install it after that"
            )
        if transform != own:
            raise ValueError(
                f"a head that was installed for {own} ignores another transform of the config, got "
                f"{transform}: .remove() the head, and install it after that"
            )
        if new := hooks - known:
            raise ValueError(
                "an installed head ignores new hooks or another forward of the output layer, which "
                f"it does not call, got {len(new)} of them: .remove() the head, and install it "
                "after that, or take causal_lm_loss"
            )
        return run_body(model, given)


def _expect_all_ids(model, shard: VocabShard):
    """Raise ValueError for a shard of other ids than the config's, all of which the model's own
    loss counts."""
    ids = model.config.get_text_config().vocab_size
    if shard.vocab_size != ids:
        raise ValueError(
            f"shard= must have vocab_size={ids}, because the model's own loss and logits have so "
            f"many ids, got {shard.vocab_size}: leave the shard out, or "
            f"model.resize_token_embeddings({shard.vocab_size}) first"
        )


def _heeded_by_stock(model) -> tuple[Transform, set]:
    """Return what the model's own forward heeds and a fused one does not: the config's transform of
    the logits, and ids of the output layer's hooks, except FSDP's, which gather weights, with a
    word if somebody replaced its forward."""
    layer = model.get_output_embeddings()
    # accelerate's hooks replace it as well, and have an error of their own
    is_replaced = vars(layer).get("forward") is not None and not hasattr(layer, "_hf_hook")
    own: set = {"a forward of its own"} if is_replaced else set()
    own |= {i for i, hook in hooks_of(layer).items() if not is_from(hook, "torch.distributed")}
    return config_transform(model.config.get_text_config()), own


def _expect_no_hooks(layer):
    """Raise ValueError for hooks that the model's own call of its output layer runs, and a fused
    head does not, which reads the layer's weight alone. Those of FSDP and of tensor parallelism
    have been compared, those of DeepSpeed have an error of their own."""
    others = [
        hook
        for hook in hooks_of(layer).values()
        if not is_from(hook, "torch.distributed", "transformers", "deepspeed")
    ]
    if others:
        raise ValueError(
            "a fused head reads the weight of the output layer and does not call the layer, so it "
            f"needs one without hooks, got {names_of(others)}: remove them "
            "(torch.nn.utils.prune.remove, remove_weight_norm and remove_spectral_norm keep the "
            "weight), or take causal_lm_loss"
        )


@contextlib.contextmanager
def evaluation(model):
    """`evaluating`, after which what FSDP gathered is freed: an optimizer would be given the
    gathered parameters."""
    try:
        with evaluating(model):
            yield
    finally:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@dataclasses.dataclass
class StockCall:
    """A call of the model's own forward: its output class, inputs, logits and loss."""

    output_class: type
    ids: torch.Tensor  # [1, 8]
    labels: torch.Tensor  # [1, 8]
    logits: torch.Tensor  # [1, 8, V], or this rank's columns
    loss: torch.Tensor

    def expect_loss(self, loss):
        """Raise ValueError unless the fused head's loss of the same inputs is the model's own."""
        tolerance = 1e-4 if self.logits.dtype in (torch.float32, torch.float64) else 2e-2
        if not abs(float(loss) - float(self.loss)) <= tolerance * abs(float(self.loss)):
            raise ValueError(
                f"the fused head's loss is {float(loss)}, and the model's own {float(self.loss)}"
            )


def check_forward(model, stock, transform: Transform, shard: VocabShard) -> StockCall:
    """Call the model's own forward twice, and return the second call. ValueError if the model does
    anything between its body and its loss but the output layer and the transform, which shows as
    the first call has widely spread logits."""
    # FSDP gathers weights in calls of the model itself
    call: Any = model if isinstance(model, FSDPModule) else functools.partial(stock, model)
    _expect_decoder(model, stock)
    if output_layer(model).weight.is_meta:
        raise ValueError(
            f"{type(model).__name__} must have its weights when a head is installed, got an output "
            "layer on the meta device: load the weights first"
        )
    spread = torch.arange(8, device=model.get_input_embeddings().weight.device) * max(
        shard.vocab_size // 8, 1
    )
    ids, seen = spread[None] % shard.vocab_size, {}
    labels = ids.clone()
    labels[0, 3] = -100

    def keep_hidden(module, args, outputs):
        seen["hidden"] = outputs[0]

    def spread_first_logits(module, args, logits):
        seen["input"], first = args[0], "spread" not in seen
        if first:
            wide = torch.linspace(
                -60, 60, logits.shape[-1], device=logits.device, dtype=logits.dtype
            )
            seen["spread"] = wide.expand(logits.shape)
        return seen["spread"] if first else None

    def loss(logits, labels, vocab_size=None, **kwargs):
        seen["logits"] = logits = logits.to_local() if is_dtensor(logits) else logits
        if logits.shape[-1] == shard.width:
            return CausalLMShardLoss(None, shard)(logits, labels)
        if logits.shape[-1] != shard.vocab_size:
            raise ValueError(
                f"the model cuts its {shard.vocab_size} logits to {logits.shape[-1]}: not for "
                "fused heads"
            )
        return ForCausalLMLoss(logits, labels, shard.vocab_size)

    hooks = []
    try:
        # OPT calls the decoder within its body
        for body in {body_of(model), model.get_decoder()} - {model}:
            hooks.append(body.register_forward_hook(keep_hidden))
        hooks.append(output_layer(model).register_forward_hook(spread_first_logits))
        with replaced(model, _loss_function=loss), evaluation(model):
            call(input_ids=ids, labels=labels)
            transformed = seen.pop("logits", None)
            own = call(input_ids=ids, labels=labels)
    except RuntimeError as error:
        hidden, weight = seen.get("hidden"), output_layer(model).weight
        if hidden is None or hidden.dtype == weight.dtype:
            raise
        raise ValueError(
            f"the output layer must have the dtype of the hidden states, {hidden.dtype}, got "
            f"{weight.dtype}, with which the model's own forward fails: convert one of them, "
            f"model.get_output_embeddings().to({hidden.dtype})"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if transformed is None or "logits" not in seen:
        raise ValueError(
            "the model's forward does not call its loss_function: a fused head does not know its "
            "loss"
        )
    if not bool(own.loss.isfinite()):
        raise ValueError(
            f"the model's own loss of a few tokens must be finite, got {float(own.loss)}: its "
            "weights hold NaN or inf, or were never loaded"
        )
    if "hidden" not in seen:
        raise ValueError(
            f"the model's forward does not call its body, {type(body_of(model)).__name__}"
        )
    if not torch.equal(seen["input"], seen["hidden"].to(seen["input"].dtype)):
        raise ValueError(
            "the output layer's input is not the last_hidden_state of the model's body"
        )
    is_own = transform == config_transform(model.config.get_text_config())
    _expect_transform(transform, is_own, seen["spread"], transformed)
    return StockCall(type(own), ids, labels, seen["logits"], own.loss)


def _expect_decoder(model, stock):
    """Raise ValueError unless the model is a decoder with a language-model head and no router's
    loss, whose body takes all inputs: images, too, though the check calls it with text alone."""
    config, body = model.config, body_of(model)
    if config.is_encoder_decoder or body is model:
        raise ValueError(
            "the model must be a decoder with a language-model head beside its body, got "
            f"{type(model)}: compute the loss of its logits, HeadLoss(..)(logits, labels)"
        )
    refuse_auxiliary_loss(model, {})
    if config.get_text_config() is config:
        return
    own, taken = (inspect.signature(function).parameters for function in (stock, body.forward))
    others = [
        name
        for name in own
        if name not in (*taken, *HEAD_ARGUMENTS, "self", "kwargs", "output_router_logits")
    ]
    if others:
        raise ValueError(
            f"the model's body must take all of its inputs, but {type(body).__name__} has no "
            f"{others}"
        )


def _expect_transform(
    transform: Transform, is_own: bool, logits: torch.Tensor, transformed: torch.Tensor
):
    """Raise ValueError unless `transformed` is the transform (scale and softcap) of the logits, up
    to rounding.

    is_own: the model's config says this transform.
    """
    expected = logits.double() * transform.scale
    if transform.softcap is not None:
        expected = transform.softcap * torch.tanh(expected / transform.softcap)
    eps = torch.finfo(logits.dtype).eps
    if not torch.allclose(transformed.double(), expected, rtol=8 * eps, atol=8 * eps):
        said, remedy = "transform= says", "leave it out for that of the model's config"
        if is_own:
            said, remedy = "its config says", "give it as transform="
        raise ValueError(
            f"what the model does to its logits is not {transform}, which {said}: {remedy}"
        )
