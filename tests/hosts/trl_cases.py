"""Log-probs, entropies and gradients from a sharded output layer, against TRL's own fused head,
which gathers it.

Cases of transformers_cases.py, which begins by importing transformers."""

import copy
import functools
import os
import subprocess
import sys
import warnings
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from cases import (
    compared,
    fails_cleanly_at_every_step,
    refused,
    refuses_what_its_lines_rule_out,
    relative_errors,
)
from pages import marked_block
from transformers import AutoModelForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers_cases import HEAD, Collectives, batch, config_of, models, saved, whole
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from tp_headloss import Linear, Transform
from tp_headloss.integrations.transformers import causal_lm_loss, fuse_head
from tp_headloss.integrations.transformers.copies import ENTRIES
from tp_headloss.integrations.transformers.forward import FUSED
from tp_headloss.integrations.trl import fuse_log_probs

VALUES = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits")
FIELDS = (*VALUES, "is_top1")
KINDS = {
    "plain": {}, "tied": {"tie_word_embeddings": True}, "uneven": {"vocab_size": 509}, "temperature": {},
    "softcap": {"kind": "Gemma2", "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
}  # fmt: skip


def labelled(exact, vocab=512):
    """A batch in which every third label is the one that the model finds most likely."""
    inputs = batch(vocab)
    labels = inputs["labels"][:, 1:]
    with torch.no_grad():
        best = exact(input_ids=inputs["input_ids"]).logits[:, :-1].argmax(-1)
    labels.copy_(torch.where((torch.arange(15) % 3 == 0) & (labels != -100), best, labels))
    return inputs


def run(model, inputs):
    """-> outputs, and gradients by name of a loss of both differentiable ones, with weights per
    token."""
    model.zero_grad()
    out = model(**inputs, fused_lm_head=True)
    weights = torch.linspace(-1, 2, out.log_probs.numel()).view(out.log_probs.shape)
    (weights * out.log_probs - 0.1 * weights.flip(0) * out.entropy).sum().backward()
    return out, {n: whole(p.grad).clone() for n, p in model.named_parameters()}


def values_of(out):
    return {name: out[name].detach() for name in ("loss", *VALUES) if name in out}


def compared_runs(ours, theirs, head=HEAD):
    """`compared`, the loss standing for all values."""
    (out, grads), (true, true_grads) = ours, theirs
    assert type(out) is type(true) is FusedCausalLMOutput and out.keys() == true.keys()
    assert torch.equal(out.label_mask, true.label_mask)
    assert not any(
        x[~out.label_mask].any() for name, x in out.items() if name not in ("loss", "label_mask")
    )
    found = compared(out.loss.detach(), grads, true.loss.detach(), true_grads, head)
    return {**found, "loss": max(relative_errors(values_of(out), values_of(true)).values())}


def against_trl(group, kind):
    """TRL's on the tensor parallel model of the same weights, with and without shift_labels."""
    config = config_of(**KINDS[kind])
    options = {"temperature": 0.7 if kind == "temperature" else 1.0, "outputs": FIELDS}
    exact, host = models(f"trl-{kind}", config)
    _, model = models(f"trl-{kind}", config)
    inputs = labelled(exact, config.vocab_size)
    shifted = {
        **inputs,
        "shift_labels": inputs["labels"].roll(-1, 1),
        "num_items_in_batch": torch.tensor(9),
    }
    add_fused_lm_head(host, **options)
    fuse_log_probs(model, **options)
    head = next(n for n, p in model.named_parameters() if p is model.get_output_embeddings().weight)
    with Collectives() as ours:
        model(**inputs, fused_lm_head=True).loss.backward()
    with Collectives() as theirs:
        host(**inputs, fused_lm_head=True)
    assert ours.seen and ours.gathered() < 32 * 250, ours.seen  # neither the weight nor logits
    assert theirs.gathered() >= exact.get_output_embeddings().weight.numel(), theirs.seen
    results = []
    for call in (inputs, shifted):
        ours, theirs = run(model, call), run(host, call)
        assert (
            torch.equal(ours[0].is_top1, theirs[0].is_top1)
            and 0 < ours[0].is_top1.sum() < ours[0].label_mask.sum()
        )
        assert ours[0].entropy.requires_grad
        assert not ours[0].mean_logits.requires_grad and not ours[0].log_sum_sq_probs.requires_grad
        results.append(compared_runs(ours, theirs, head))
    return {
        key: (min if key == "mutant" else max)(r[key] for r in results)
        for key in ("loss", "grads", "mutant")
    }


def bf16(group):
    """Errors of ours and of TRL's, both against TRL's of the fp32 model of the same weights; also
    with the output layer in fp32."""
    config, options = config_of(), {"outputs": FIELDS}
    exact, _ = models("trl-plain", config)
    with torch.no_grad():
        for p in exact.parameters():
            p.copy_(p.bfloat16())
    inputs = labelled(exact)
    add_fused_lm_head(exact, **options)
    true, found = run(exact, inputs), {}
    for cast in (False, True):
        for prefix, install in (("", fuse_log_probs), ("host_", add_fused_lm_head)):
            _, model = models("trl-plain", config, torch.bfloat16)
            install(model, cast_lm_head_to_fp32=cast, **options)
            out, grads = run(model, inputs)
            head = compared_runs((out, {HEAD: grads[HEAD]}), (true[0], {HEAD: true[1][HEAD]}))
            errors = {"loss": head["loss"], "head": head["grads"], "mutant": head["mutant"]}
            errors["grads"] = compared_runs((out, grads), true)["grads"]
            for name, error in errors.items():
                found[prefix + name] = (min if name == "mutant" else max)(
                    error, found.get(prefix + name, error)
                )
    return found


def replaced(group):
    """What a trainer installed is replaced, with its settings, and put back."""
    exact, model = models("trl-plain", config_of(), plan=None)
    _, host = models("trl-plain", config_of(), plan=None)
    for m in (model, host):
        add_fused_lm_head(m, temperature=0.7, outputs=("log_probs", "entropy"))
    inputs, before = labelled(exact), model.forward
    with fuse_log_probs(model) as fused:
        refused(lambda: fused.last, "means in the trainer's log", AttributeError)
        assert model.forward != before and fused.calls == 0  # none of the check call
        ours, theirs = run(model, inputs), run(host, inputs)
        assert set(ours[0]) == {"loss", "log_probs", "entropy", "label_mask"}
        ids = inputs["input_ids"]
        # the model's own forward
        assert torch.equal(model(input_ids=ids).logits, host(input_ids=ids).logits)
        options = {"max_new_tokens": 4, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), exact.generate(ids, **options))
    assert model.forward is before
    return compared_runs(ours, theirs)


def prompts(group):
    """Hidden states of tokens without a label are not read, so that they cost nothing."""
    _, model = models("trl-plain", config_of())
    inputs = batch()
    unread = inputs["labels"].roll(-1, 1) == -100
    unread[:, -1] = True
    with fuse_log_probs(model):
        model.model.norm.register_forward_hook(
            lambda module, args, x: x.masked_fill(unread[..., None], torch.nan)
        )
        out = model(**inputs, fused_lm_head=True)
        out.loss.backward()
    dw = whole(model.get_output_embeddings().weight.grad)
    assert out.log_probs.isfinite().all() and dw.isfinite().all() and unread.sum() > 2
    return {}


def refusals(group):
    exact, model = models("trl-plain", config_of())
    refused(lambda: fuse_log_probs(model, outputs=(*FIELDS, "probs")), "['probs']")
    add_fused_lm_head(exact)
    before = exact.forward
    refused(lambda: fuse_log_probs(exact, outputs=("probs",)), "['probs']")
    for name, ours in (("logps", "log_probs"), ("accuracy", "is_top1")):
        refused(
            lambda name=name: fuse_log_probs(exact, outputs=(name,)),
            f'got {[name]}: write "{ours}" in outputs= of fuse_log_probs',
        )
    refused(lambda: fuse_log_probs(exact, 0.0), "temperature")
    assert exact.forward is before
    refused(lambda: fuse_log_probs(model, linear=Linear(mode="one_sweep")), "one_sweep")
    assert "forward" not in vars(model)
    with fuse_head(model):
        refused(lambda: fuse_log_probs(model), "replaced already")
    refuses_what_its_lines_rule_out(fuse_log_probs, model=model)
    refused(
        lambda: fuse_log_probs(model, shard=group), "shard must be a VocabShard, got", TypeError
    )
    fused = fuse_log_probs(model)
    alone = {"labels": batch()["labels"]} if group.rank() == 0 else {}
    refused(
        lambda: model(input_ids=batch()["input_ids"], fused_lm_head=True, **alone),
        "0 labels of 0 tokens on rank 1",
    )
    refused(lambda: model(input_ids=batch()["input_ids"]), "tp_plan='auto'")
    refused(lambda: model.generate(batch()["input_ids"]), "tp_plan='auto'")
    refused(lambda: fuse_log_probs(model), "replaced already")
    refused(lambda: fuse_head(model), "replaced already")
    refused(
        lambda: model(**batch(), fused_lm_head=True, output_router_logits=True), "auxiliary loss"
    )
    fused.remove()
    model.loss_function = causal_lm_loss(model)  # which this head would not call
    refused(lambda: fuse_log_probs(model), "the model's loss_function must be transformers'")
    assert model(**batch()).loss.isfinite()
    return {}


def heads_below(group):
    """A head below that of a TRL trainer is an error, not a loss that nobody computes; what the
    errors say to write takes it off."""
    inputs = {**batch(), "fused_lm_head": True}
    for install, name, write in (
        (fuse_head, "FusedHead", "or for the HeadLoss a transformers.Trainer"),
        (fuse_log_probs, "FusedLogProbs", "and fuse_log_probs(trainer.model)"),
    ):
        for wrap in (False, True):
            model = AutoModelForCausalLM.from_config(config_of())
            below, expected = install(model), f"a {name} lies below TRL's head"
            if wrap:  # as accelerate does
                inner = model.forward
                model.forward = functools.wraps(inner)(lambda *args, **given: inner(*args, **given))  # noqa: B023
                del model.forward.__dict__[FUSED]
            add_fused_lm_head(model)
            copied = copy.deepcopy(model)
            for m in (model, copied):
                for again in (fuse_head, fuse_log_probs):
                    refused(lambda m=m, again=again: again(m), expected)
                refused(lambda m=m: m(**inputs), write, RuntimeError)
            refused(below.remove, "(TRL: del model.forward; a model that accelerate", RuntimeError)
            del model.forward
            below.remove()
            assert not {*ENTRIES} & {*vars(model)} and not model.model._forward_pre_hooks
            del copied.forward  # which has no handle
            for m in (model, copied):
                add_fused_lm_head(m)
                m(**inputs).loss.backward()
                with fuse_log_probs(m) as fused:
                    m(**inputs).loss.backward()
                assert fused.calls == 1
                assert not {*ENTRIES[1:]} & {*vars(m)} and not m.model._forward_pre_hooks
    return {}


def of_a_trainer(group):
    """What a TRL trainer's model and its ref_model refuse says what to write."""
    model = AutoModelForCausalLM.from_config(config_of())
    add_fused_lm_head(model)
    refused(
        lambda: fuse_head(model),
        "A HeadLoss needs a transformers.Trainer instead, and del model.forward takes TRL's off",
    )
    model.loss_function = causal_lm_loss(model)
    assert model(**batch()).loss.isfinite()  # TRL's forward hands it on
    refused(lambda: model(**batch(), fused_lm_head=True), "a trainer of TRL put a forward")
    model.loss_function = ForCausalLMLoss
    with fuse_log_probs(model) as fused:
        model(**batch(), fused_lm_head=True)
        assert "temperature=1.0, " in f"{fused}" and "called 1 times" in f"{fused}"
        assert not hasattr(fused, "uses") and not hasattr(fused, "expect_use")
    del model.forward
    fuse_head(model)
    refused(lambda: fuse_log_probs(None), "got None: this trainer has no ref_model", TypeError)
    trainer = SimpleNamespace(model=model)
    refused(lambda: fuse_log_probs(trainer), "a trainer: pass its .model, and of a ref", TypeError)
    model = AutoModelForCausalLM.from_config(config_of())
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    for few in (("log_probs",), ["is_top1"]):
        refused(lambda few=few: fuse_log_probs(model, outputs=few), "'is_top1'), which the trainer")
    refused(
        lambda: fuse_log_probs(model, outputs=("is_top1", "mean_logits")),
        "without ['entropy']: write outputs=('log_probs', 'entropy', 'is_top1', 'mean_logits')",
    )
    # log_probs are there unasked
    fuse_log_probs(model, outputs=("is_top1", "entropy")).remove()
    del model.forward
    assert "so its temperature is 1.0" in warned(lambda: fuse_log_probs(model).remove())
    assert not warned(lambda: fuse_log_probs(model, temperature=1.0).remove())
    add_fused_lm_head(model)
    assert not warned(lambda: fuse_log_probs(model).remove())
    del model.forward
    for wrong in (float("inf"), 1e-50, 1e39):
        refused(lambda x=wrong: fuse_log_probs(model, x), "positive and finite in fp32")
    refused(
        lambda: fuse_log_probs(model, 1e20, transform=Transform(scale=1e-30)),
        "scale / temperature must be other than 0",
    )
    return {}


def warned(function) -> str:
    """Words of the warnings of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function()
    return " ".join(str(x.message) for x in found)


def prepare(model):
    """As a trainer in bf16 does, on one rank."""
    with mock.patch.dict(os.environ):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        accelerator.prepare_model(model, device_placement=False)
    return accelerator


def prepared(group):
    """Below accelerate's forward of mixed precision a head takes the place of TRL's, with its
    temperature and under the same autocast, and is removed, whichever of both came first."""
    inputs = {**batch(), "fused_lm_head": True}
    for first in (fuse_log_probs, prepare):
        model = AutoModelForCausalLM.from_config(config_of())
        add_fused_lm_head(model, temperature=0.5, outputs=("log_probs", "entropy"))
        exact = model(**inputs)
        twin = copy.deepcopy(model)
        prepare(twin)
        rounded = twin(**inputs)
        if first is prepare:
            prepare(model)
            before = dict(vars(model))
            refused(lambda: fuse_log_probs(model, outputs=("log_probs",)), "without ['entropy']")  # noqa: B023
            assert vars(model) == before
        fused = fuse_log_probs(model)
        if first is fuse_log_probs:
            prepare(model)
        assert "temperature=0.5, " in f"{fused}" and fused.calls == 0
        seen = []
        hook = model.model.layers[0].mlp.register_forward_hook(lambda m, x, out: seen.append(out))  # noqa: B023
        out = model(**inputs)
        hook.remove()
        assert fused.calls == 1 and seen[0].dtype == torch.bfloat16
        assert out.log_probs.dtype == torch.float32
        error = relative_errors(values_of(rounded), values_of(exact))
        for name, found in relative_errors(values_of(out), values_of(exact)).items():
            assert 1e-6 < found <= 1.5 * error[name], (name, found, error)
        fused.remove()
        assert not {*ENTRIES[1:]} & {*vars(model)} and not model.model._forward_pre_hooks
        for name, value in values_of(model(**inputs)).items():
            assert torch.equal(value, values_of(rounded)[name]), name
        assert fused.calls == 1
        with fuse_log_probs(model) as again:
            model(**inputs)
        assert again.calls == 1
        # autocast, TRL's head and its temperature go together
        del model.forward
        for install in (fuse_log_probs, fuse_head):
            refused(lambda f=install: f(model), "del model.forward took its autocast off")  # noqa: B023
        # and a later trainer's head does not bring it back
        add_fused_lm_head(model, temperature=2.0)
        refused(lambda: fuse_log_probs(model), "del model.forward took its autocast off")  # noqa: B023
        del model.forward, model._original_forward
        fuse_log_probs(model, temperature=0.5).remove()
    # the head of a second trainer on a model that a first one has prepared
    for bf16 in (True, False):
        model = AutoModelForCausalLM.from_config(config_of())
        add_fused_lm_head(model, temperature=0.5)
        prepare(model)
        add_fused_lm_head(model, temperature=2.0, outputs=("log_probs", "entropy"))
        twin = copy.deepcopy(model)
        if bf16:
            prepare(twin)
        expected = twin(**inputs)
        fused = fuse_log_probs(model)
        if bf16:
            prepare(model)
        out = model(**inputs)
        assert "temperature=2.0, " in f"{fused}" and fused.calls == 1
        for name, found in relative_errors(values_of(out), values_of(expected)).items():
            assert found <= (2e-2 if bf16 else 1e-5), (bf16, name, found)
        fused.remove()
        for name, value in values_of(model(**inputs)).items():
            assert torch.equal(value, values_of(expected)[name]), (bf16, name)
    # without TRL's head
    model = AutoModelForCausalLM.from_config(config_of())
    expected = model(**batch()).loss
    with fuse_head(model) as below:
        accelerator = prepare(model)
        model(**batch())
    with fuse_head(model) as later:
        model(**batch()).loss.backward()
    assert below.calls == later.calls == 1
    assert model(**batch()).logits.dtype == torch.float32 and model(**batch()).loss != expected
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert torch.equal(model(**batch()).loss, expected)
    return {}


def failures(group):
    """An exception at any step of an installation leaves the model as it was, TRL's own head in it
    or not."""
    _, model = models("trl-plain", config_of())
    assert fails_cleanly_at_every_step(lambda: fuse_log_probs(model), model) > 30
    add_fused_lm_head(model)
    assert fails_cleanly_at_every_step(lambda: fuse_log_probs(model), model) > 30
    return {}


def documented(group):
    names = {"path": saved("plain", config_of()), **batch()}
    exec(compile(marked_block("host", "trl"), "docs", "exec"), names)
    assert names["loss"].isfinite()
    return {}


def documented_trainer(group):
    """The guide's trainer, one process, whose two steps go through the head."""
    if group.rank() > 0:
        return {}
    of_ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    alone = {name: value for name, value in os.environ.items() if name not in of_ranks}
    command = [sys.executable, "-W", "ignore", "-c", marked_block("host", "trl-trainer")]
    done = subprocess.run(command, env=alone, capture_output=True, text=True)
    assert done.stdout.split()[-1:] == ["2"], done.stderr[-2000:]
    return {}


CASES = {
    **{f"trl-{kind}": partial(against_trl, kind=kind) for kind in KINDS},
    "trl-bf16": bf16, "trl-replaced": replaced, "trl-prompts": prompts, "trl-refusals": refusals,
    "trl-heads_below": heads_below, "trl-of_a_trainer": of_a_trainer, "trl-failures": failures,
    "trl-documented": documented, "trl-documented_trainer": documented_trainer,
    "trl-prepared": prepared,
}  # fmt: skip
