"""What becomes of a model and its layers beside a head: attributes that are set later, hooks, losses
that replace ours, weights of no loss, and failures of one rank. `megatron_soft_target_cases` runs them."""

import re
from unittest import mock

import megatron_cases as m
import torch
from cases import refused
from megatron_cases import B, S, V, batch, model_of, run
from megatron_misuse_cases import SMOOTHED, gathering, head_of, watching
from torch.nn.modules import module as of_torch

# isort: split
# what is above makes Megatron run on CPUs, before it is imported
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from tp_headloss import HeadLoss, Metric
from tp_headloss.integrations.megatron import MegatronHead, MegatronHeadMixin, install

KINDS = ("forward", "forward_pre", "full_backward", "full_backward_pre")


def halved(module, args, out):
    return out[0] * 0.5, out[1]


def with_a_head():
    """Calls of models that have a fused head in each of the ways: {way: (model, call)}."""
    given = {"terms": SMOOTHED}
    ways = {"install": model_of(), "depths": model_of(mtp=True), "mixin": model_of(m.Mixed)}
    install(ways["install"], head_of(**given))
    install(ways["depths"], head_of(**given))
    ways["mixin"].megatron_head = head_of(**given)
    calls = {name: (model, lambda model=model: run(model)) for name, model in ways.items()}
    if m.HAS_PROCESSOR:
        model, head = model_of(), head_of(**given)
        calls["processor"] = model, lambda: run(model, output_processor=head)
    return calls


def hooks_of_the_output_layer(group):
    """A fused head has no logits for them: they are an error before and after an installation, and
    with fused=False they see the logits."""
    for model, call in with_a_head().values():
        layer = model.output_layer
        places = [getattr(layer, f"register_{kind}_hook") for kind in KINDS]
        places += [getattr(of_torch, f"register_module_{kind}_hook") for kind in KINDS[:2]]
        for place in places:
            with place(watching):
                refused(call, "an output layer without hooks, of its own or of all modules, and")
                refused(call, "got ['watching']: remove them, or use install(model, head, fused=F")
        layer.forward = layer.forward
        refused(call, "got ['a forward of its own']")
        del layer.forward
        for kind in KINDS:
            getattr(layer, f"register_{kind}_hook")(gathering)
        call()
    model = model_of()
    model.output_layer.register_forward_hook(halved)
    refused(lambda: install(model, head_of(terms=SMOOTHED)), "got ['halved']: remove them, or")
    losses = model(*batch()[:3], labels=batch()[3])
    with install(model, head_of(), fused=False):
        torch.testing.assert_close(run(model)[0], losses.detach())
    return {}


def losses_that_replace_ours(group):
    """Another loss of a model that has a fused head, or of its class, would never be called."""
    for name in ["compute_language_model_loss"] + ["_scale_logits"] * m.HAS_PROCESSOR:
        for model, call in with_a_head().values():
            for place in (model, type(model)):
                with mock.patch.object(place, name, lambda *args: torch.zeros(B, S)):
                    refused(call, f"place of {name} and would ignore another one, got ['losses_t")
                    says = "fused=False" if name == "_scale_logits" else "as terms= of the head"
                    refused(call, says)
            call()
        other = {name: lambda self, *args: args[-1].sum()}
        below = type("Below", (GPTModel,), other)
        for own in (
            type("Own", (m.Mixed,), other),
            type("Above", (MegatronHeadMixin, below), {}),
        ):
            model = model_of(own)
            model.megatron_head = head_of()
            refused(lambda: run(model), "would ignore another one, got")  # noqa: B023
        for given in (head_of(), head_of(terms=SMOOTHED)):
            loss_of_a_subclass = "and write what a subclass of yours computes as terms="
            scale = "place of _scale_logits and would ignore another one, got"
            words = scale if name == "_scale_logits" else loss_of_a_subclass
            refused(lambda: install(model_of(below), given), words)  # noqa: B023
    for head in (None, head_of()):
        model = model_of(m.Mixed)
        model.megatron_head = head
        refused(lambda: install(model, head_of()), "set model.megatron_head = head")  # noqa: B023
    return {}


def attributes_that_are_set_later(group):
    """Each argument of a head, and the head of an installation."""
    model = model_of()
    installed = install(model, HeadLoss())
    for name in MegatronHead.lines:
        said = f"a MegatronHead is not changed after it was made, got a new '{name}'"
        refused(lambda: setattr(installed.head, name, None), said, AttributeError)  # noqa: B023
    for name in ("ignor_index", "label_smoothing", "weight"):
        refused(lambda: setattr(installed.head, name, 1), f"new '{name}'", AttributeError)  # noqa: B023
    refused(lambda: setattr(installed, "head", head_of()), "call remove()", AttributeError)
    run(model)
    return {}


def failures_of_one_rank(group):
    """What fails on one rank alone is an error on all, and nobody waits for it."""
    other = group.rank() == 1

    def failing(stats):
        return {"x": stats.log_prob * (1 / (not other))}

    def without_a_layer():
        model = model_of()
        if other:
            model.output_layer = None
        install(model, head_of())

    def of_another_group():
        model = model_of()
        if other:
            model.output_layer.weight = torch.nn.Parameter(model.output_layer.weight[:64])
        install(model, head_of())

    model = model_of()
    calls = {
        "division by zero": lambda: install(model, head_of(metrics=Metric(failing))),
        "has no output layer": without_a_layer,
        "got a list of 1": lambda: install([model] if other else model, head_of()),
        "share its 256 rows, of which this one has 64, got a group of 2": of_another_group,
    }
    for words, call in calls.items():
        said = words if other else f"on rank 1 of the group: .*{words}"
        try:
            call()
        except Exception as error:
            assert re.search(said, str(error)), (said, str(error))
        else:
            raise AssertionError(f"not refused: {words}")
    assert not {"_postprocess", "compute_language_model_loss"} & vars(model).keys()
    run(model)
    return {}


def layers_that_are_replaced_later(group):
    """Another output layer after the installation is an error that says what it must be."""
    for model, call in with_a_head().values():
        layer = model.output_layer
        for other in (torch.nn.Linear(m.H, V // 2, bias=False), torch.nn.Identity()):
            model.output_layer = other
            refused(call, f"a forward of its own, got {type(other).__name__}", TypeError)
        model.output_layer = layer
        call()
        alone = parallel_state.get_data_parallel_group()  # of this rank by itself
        with mock.patch.object(layer, "tp_group", alone):
            refused(call, "its 256 rows, of which this one has 128, got a group of 1")
        weight = layer.weight
        layer.weight = torch.nn.Parameter(weight[:64])
        refused(call, "its 256 rows, of which this one has 64, got a group of 2")
        layer.weight = None
        refused(call, "must have share_embeddings_and_output_weights=True of its model")
        layer.weight = weight
        call()
    return {}


def layers_that_reduce_otherwise(group):
    """How dH is added up is what the layer's own forward does, in each combination of its
    attributes."""
    for reduces in ({}, {"allreduce_dgrad": False}, {"disable_grad_reduce": True}):
        for both in (reduces, {**reduces, "disable_grad_reduce": True, "allreduce_dgrad": False}):
            models = model_of(), model_of()
            for model in models:
                vars(model.output_layer).update(both)
            with install(models[1], head_of()):
                losses, grads = run(models[1])
            expected, expected_grads = run(models[0])
            torch.testing.assert_close(losses, expected)
            for name, grad in grads.items():
                torch.testing.assert_close(grad, expected_grads[name], msg=f"{both}: {name}")
    return {}


def weights_of_no_loss(group):
    """Whatever an output layer's weight is that has no loss, on all ranks or on one, all say so."""
    changes = {
        "on the device 'meta': install after": lambda model: model.to("meta"),
        "fp32, bf16 or fp16, got torch.float64": lambda model: model.double(),
        "look for NaN or infinity in the weights": lambda model: _first_value(model, torch.nan),
        "must be finite as the host's own head": lambda model: _first_value(model, torch.inf),
    }
    kinds = (ValueError, TypeError, RuntimeError)
    for words, change in changes.items():
        for fused in (True, False):
            for ranks in ((0, 1), (1,)):
                model = model_of()
                if group.rank() in ranks:
                    change(model)
                refused(lambda: install(model, head_of(), fused=fused), words, kinds)  # noqa: B023
    model = model_of()
    if group.rank() == 1:
        model.bfloat16()
    refused(lambda: install(model, head_of()), "ranks must agree on weight_dtype: rank 0 of the")
    return {}


def _first_value(model, value):
    model.output_layer.weight.data[0, 0] = value


CASES = {
    "attributes that are set later": attributes_that_are_set_later,
    "failures of one rank": failures_of_one_rank,
    "layers that are replaced later": layers_that_are_replaced_later,
    "layers that reduce otherwise": layers_that_reduce_otherwise,
    "weights of no loss": weights_of_no_loss,
    "hooks of the output layer": hooks_of_the_output_layer,
    "losses that replace ours": losses_that_replace_ours,
}
