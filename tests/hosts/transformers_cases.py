"""The losses and gradients of tiny transformers models, two ranks tensor parallel, against the same
models unsharded with their own loss."""

import copy
import importlib
import inspect
import itertools
import json
import os
import tempfile
import traceback
import types
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from cases import (
    compared,
    fails_cleanly_at_every_step,
    main,
    refused,
    refuses_what_its_lines_rule_out,
    worst,
)
from pages import marked_block
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from tp_headloss import (
    CrossEntropy,
    Distillation,
    HeadLoss,
    Linear,
    Teacher,
    Transform,
    VocabShard,
    ZLoss,
)
from tp_headloss.integrations import TESTED, installed_version, require
from tp_headloss.integrations import transformers as adapter
from tp_headloss.integrations.llamafactory import HeadLossCallback
from tp_headloss.integrations.transformers import causal_lm_loss, colwise_plan, fuse_head
from tp_headloss.integrations.transformers.model_parts import with_ignore_index

transformers.logging.set_verbosity_error()
LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
SIZES = {"vocab_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 64, **LAYERS}
OPT = {"ffn_dim": 64, "word_embed_proj_dim": 16, "dropout": 0.0}
LLAMA4 = {
    "num_hidden_layers": 2,
    "intermediate_size_mlp": 64,
    "num_local_experts": 2,
    "head_dim": 8,
}
HEAD = "lm_head.weight"


def config_of(kind="Llama", **changes):
    changes = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **SIZES, **changes}
    return getattr(transformers, f"{kind}Config")(**changes)


def folder() -> Path:
    """One of both ranks."""
    return (
        Path(os.environ["CASES_STORE"]).parent
        if "CASES_STORE" in os.environ
        else Path(tempfile.gettempdir())
    )


def saved(name, config) -> Path:
    """Random weights, wide enough that the softmax is far from uniform."""
    path = folder() / name
    if dist.get_rank() == 0 and not path.exists():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(8 if p.dim() == 2 else 1).add_(0.01 * torch.randn_like(p))
        model.save_pretrained(path)
    dist.barrier()
    return path


def models(name, config, dtype=torch.float32, plan="colwise"):
    """The same weights unsharded and tensor parallel."""
    path, cls = saved(name, config), transformers.AutoModelForCausalLM
    if plan == "colwise":
        plan = colwise_plan(cls._model_mapping[type(config)], config)
    sharded = (
        DistributedConfig(tp_size=2) if plan is None else DistributedConfig(tp_size=2, tp_plan=plan)
    )
    return cls.from_pretrained(path, dtype=dtype), cls.from_pretrained(
        path, dtype=dtype, distributed_config=sharded
    )


def batch(vocab=512):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocab, (2, 16), generator=g)
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def run(model, inputs):
    """-> loss, and gradients by name, whole."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {
        n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None
    }


def against_host(model, host, inputs, head=HEAD):
    if model.config.tie_word_embeddings:
        head = next(
            n for n, p in model.named_parameters() if p is model.get_output_embeddings().weight
        )
    return compared(*run(model, inputs), *run(host, inputs), head)


class Collectives(TorchDispatchMode):
    """The names of collectives, with the most elements of a tensor that each of them has."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace and "wait" not in func.name():
            tensors = [x for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
            self.seen.append((func.name(), max(x.numel() for x in tensors)))
        return out

    def gathered(self) -> int:
        return max((n for name, n in self.seen if "gather" in name), default=0)


# ---- both ways, and the kinds of output layers

CONFIGS = {"plain": {}, "tied": {"tie_word_embeddings": True}, "uneven": {"vocab_size": 509}}
# older ones gather even shards alone
OWN_PLAN = tuple(CONFIGS) if require("transformers") >= (5, 23) else ("plain", "tied")


def loss_function(group, kind):
    host, model = models(kind, config_of(**CONFIGS[kind]))
    model.loss_function = causal_lm_loss(model)
    result = against_host(model, host, batch(model.config.vocab_size))
    assert (
        model.loss_function.shard.stop - model.loss_function.shard.start
        == model(**batch()).logits.shape[-1]
    )
    return result


def fused(group, kind, plan="colwise"):
    if plan is None and kind not in OWN_PLAN:
        refused(lambda: models(kind, config_of(**CONFIGS[kind]), plan=plan), "must be divisible")
        return {}
    host, model = models(kind, config_of(**CONFIGS[kind]), plan=plan)
    with fuse_head(model) as head:
        inputs, layer = batch(model.config.vocab_size), model.get_output_embeddings()
        # it is not called: there are no logits
        with mock.patch.object(layer, "forward", None), Collectives() as seen:
            model(**inputs).loss.backward()
        result = against_host(model, host, inputs)
        # no logits and no weight
        assert 0 < seen.gathered() < 32 * 250 < host.lm_head.weight.numel(), seen.seen
        assert model.get_output_embeddings().weight.grad.placements[0].is_shard(0)
        assert type(model(**inputs)) is type(host(**inputs)) and model(**inputs).logits is None
        assert head.last.count == (inputs["labels"][:, 1:] != -100).sum()
    return result


def bf16(group, install):
    """Errors of ours and of the host's own tensor parallel model, both against the fp32 model of
    the same weights."""
    config = config_of()
    exact, _ = models("plain", config)
    with torch.no_grad():
        for p in exact.parameters():
            p.copy_(p.bfloat16())
    _, model = models("plain", config, torch.bfloat16)
    _, host = models("plain", config, torch.bfloat16, plan=None)
    if install == "fused":
        fuse_head(model)
    else:
        model.loss_function = causal_lm_loss(model)
    (loss, grads), (host_loss, host_grads), true = (run(m, batch()) for m in (model, host, exact))
    ours, theirs = compared(loss, grads, *true, HEAD), compared(host_loss, host_grads, *true, HEAD)
    # where rounding hides 1 % least
    heads = [{HEAD: g[HEAD]} for g in (grads, host_grads, true[1])]
    head, host_head = (compared(loss, g, true[0], heads[2], HEAD) for g in heads[:2])
    return {
        **{
            "loss": ours["loss"],
            "grads": ours["grads"],
            "head": head["grads"],
            "mutant": head["mutant"],
        },
        **{
            "host_loss": theirs["loss"],
            "host_grads": theirs["grads"],
            "host_head": host_head["grads"],
        },
    }


def other_models(group, kind):
    """Softcapping, scales and a bias of the output layer, as configs have them."""
    changes = {
        "Gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
        "Cohere": {"logit_scale": 0.5, "use_qk_norm": False},
        "Granite": {"logits_scaling": 4.0},
        "Phi": {},
        "GPT2": {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64},
    }[kind]
    config = config_of(kind, **changes)
    sharded = kind != "GPT2"  # which has no plan: not distributed
    if sharded:
        host, model = models(kind, config)
    else:
        host = AutoModelForCausalLM.from_pretrained(saved(kind, config))
        model = copy.deepcopy(host)
    fuse_head(model)
    with Collectives() as seen:
        result = against_host(model, host, batch())
    assert sharded == bool(seen.seen)
    return result


# ---- models that see images, and adapters


def vision_models():
    """Name -> a tiny model and a batch with images."""
    tower = {**LAYERS, "num_hidden_layers": 2, "image_size": 28, "patch_size": 14}
    ids = batch()["input_ids"].clamp(min=10)
    ids[:, 2:6] = 5  # of an image
    given = {
        "input_ids": ids,
        "labels": ids.where(ids != 5, -100),
        "pixel_values": torch.randn(2, 3, 28, 28),
    }
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text = {**SIZES, **special}
    clip = {"model_type": "clip_vision_model", "projection_dim": 32, **tower}
    llava = {
        "vision_config": clip,
        "text_config": {"model_type": "llama", **text},
        "vision_feature_layer": -1,
    }
    llava = transformers.LlavaConfig(**llava, image_token_id=5)
    yield "Llava", transformers.LlavaForConditionalGeneration(llava), given
    gemma = {
        "text_config": {**text, "head_dim": 8},
        "vision_config": tower,
        "mm_tokens_per_image": 4,
    }
    gemma = transformers.Gemma3Config(
        **gemma, image_token_index=5, boi_token_index=6, eoi_token_index=7
    )
    images = {"token_type_ids": (ids == 5).long()}
    yield "Gemma3", transformers.Gemma3ForConditionalGeneration(gemma), {**given, **images}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vit = {
        "depth": 1,
        "embed_dim": 32,
        "hidden_size": 32,
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": 14,
    }
    tokens = {
        "image_token_id": 5,
        "video_token_id": 6,
        "vision_start_token_id": 7,
        "vision_end_token_id": 8,
    }
    qwen = {"text_config": {**text, "rope_parameters": rope}, "vision_config": vit}
    qwen = transformers.Qwen2VLConfig(**qwen, **tokens)
    images = {
        "pixel_values": torch.randn(8, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * 2),
    }
    ids = ids.where(ids != 5, 9)
    ids[:, 1], ids[:, 2] = 7, 5
    images |= {
        "mm_token_type_ids": (ids == 5).long(),
        "input_ids": ids,
        "labels": ids.where(ids != 5, -100),
    }
    yield "Qwen2VL", transformers.Qwen2VLForConditionalGeneration(qwen), {**given, **images}


def vision(group):
    """Losses and gradients, of the tower that sees the images, too; and the body gets the same
    inputs as without us."""
    found = []
    for name, model, inputs in vision_models():
        with torch.no_grad():  # Gemma 3 begins with a projection of images that is 0
            for p in model.parameters():
                p.add_(0.05 * torch.randn_like(p))
        host = copy.deepcopy(model.train())
        without, seen = model(**{**inputs, "pixel_values": -inputs["pixel_values"]}).loss, []
        hook = partial(
            lambda seen, module, args, given: seen.append(
                {k for k in given if given[k] is not None}
            ),
            seen,
        )
        model.base_model.register_forward_pre_hook(hook, with_kwargs=True)
        model(**inputs)
        with fuse_head(model):
            own = run(model, inputs)
            assert seen[0] | {"return_dict"} == seen[-1] | {"return_dict"}, name
            assert model(**inputs).logits is None and own[0] != without, name
        # gradients that are 0 up to rounding, of keys' biases, would be compared with themselves
        loss, grads = run(host, inputs)
        large = {n: g for n, g in grads.items() if g.norm() > 1e-6}
        assert any("vis" in n for n in large), name  # a tower
        head = next(
            n for n, p in model.named_parameters() if p is model.get_output_embeddings().weight
        )
        found.append(compared(own[0], {n: own[1][n] for n in large}, loss, large, head))
    forward = transformers.LlavaModel.forward
    with mock.patch.object(
        transformers.LlavaModel, "forward", lambda self, input_ids, **kw: forward(self, input_ids)
    ):
        refused(
            lambda: fuse_head(next(vision_models())[1]),
            "must take all of its inputs, but LlavaModel has no",
        )
    return worst(found)


def vision_parallel(group):
    """Two ranks share the vocabulary of the text model."""
    *_, (_, model, inputs) = vision_models()
    path = folder() / "vision"
    if dist.get_rank() == 0:
        model.save_pretrained(path)
    dist.barrier()
    host = type(model).from_pretrained(path)
    model = type(model).from_pretrained(path, distributed_config=DistributedConfig(tp_size=2))
    with fuse_head(model):
        # whole in older ones, whose plan leaves it out
        weight = model.get_output_embeddings().weight
        assert (
            isinstance(weight, DTensor) == (require("transformers") >= (5, 23))
            and model.tp_size == 2
        )
        return against_host(model, host, inputs)


def adapters(group):
    """LoRA of the output layer, with dropout, switched off and merged; and the layer in
    modules_to_save."""
    from peft import LoraConfig, get_peft_model

    from tp_headloss.integrations.trl import fuse_log_probs

    inputs, found = batch(), []
    for options in (
        {"target_modules": ["q_proj", "lm_head"], "lora_dropout": 0.3},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ):
        model = get_peft_model(
            AutoModelForCausalLM.from_config(config_of()), LoraConfig(lora_alpha=8, r=4, **options)
        )
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for p in trained.values():
                p.add_(0.1 * torch.randn_like(p))

        def step(model=model, trained=trained):
            torch.manual_seed(4)  # of the dropout
            loss = model.train()(**inputs).loss
            return loss.detach(), dict(zip(trained, torch.autograd.grad(loss, trained.values())))

        def states(model=model):
            """Losses with the adapter, without it, and with it merged."""
            on = model.eval()(**inputs).loss
            with model.disable_adapter():
                off = model(**inputs).loss
            model.merge_adapter()
            merged = model(**inputs).loss
            model.unmerge_adapter()
            return torch.stack([on, off, merged]).detach()

        own, own_states = step(), states()
        with fuse_head(model) as fused:
            assert fused.model is model.get_base_model()
            head = next(name for name in trained if "lm_head" in name)
            found.append(compared(*step(), *own, head))
            torch.testing.assert_close(states(), own_states)
            assert own_states[0] != own_states[1]
        with fuse_log_probs(model) as fused:
            assert fused.model is model.get_base_model()
            loss = model(**inputs, fused_lm_head=True).loss.detach()
        torch.testing.assert_close(loss, own_states[0])
    # a loss function of the wrapper would be called by nobody
    refused(lambda: causal_lm_loss(model), "PEFT: base = model.get_base_model()", TypeError)
    for variant in ({"use_dora": True}, {"lora_bias": True}):
        model = AutoModelForCausalLM.from_config(config_of())
        model = get_peft_model(
            model, LoraConfig(target_modules=["lm_head"], **variant)
        ).get_base_model()
        refused(lambda model=model: fuse_head(model), "HeadLoss(..)(logits, labels)", TypeError)
    return worst(found)


# ---- arguments


def call_arguments(group, install):
    """num_items_in_batch as a tensor and as a number, shift_labels, ignore_index: each against the
    host's."""
    host, model = models("plain", config_of())
    if install == "fused":
        fuse_head(model)
    else:
        model.loss_function = causal_lm_loss(model)
    inputs = batch()
    shift_labels = torch.full_like(inputs["labels"], -100)
    shift_labels[:, 3:9] = inputs["labels"][:, 1:7]
    calls = {
        "tensor": {**inputs, "num_items_in_batch": torch.tensor(7)},
        "number": {**inputs, "num_items_in_batch": 100},
        "shift_labels": {**inputs, "shift_labels": shift_labels},
        "ignore_index": {
            **inputs,
            "labels": inputs["labels"].where(inputs["labels"] != -100, 3),
            "ignore_index": 3,
        },
    }
    results = [against_host(model, host, call) for call in calls.values()]
    for index in (2**63 - 1, 2**53 + 1):  # which a float does not hold
        labels = inputs["labels"].where(inputs["labels"] != -100, index)
        assert (
            model(**{**inputs, "labels": labels}, ignore_index=index).loss == model(**inputs).loss
        )
    refused(partial(model, **inputs, num_items_in_batch=torch.tensor([7, 8])), "one count")
    by_sequence, other = HeadLoss(reduction="seq-mean-token-mean"), models("plain", config_of())[1]
    if install == "fused":
        fuse_head(other, by_sequence)
    else:
        other.loss_function = causal_lm_loss(other, by_sequence)
    refused(
        partial(other, **inputs, num_items_in_batch=7), "counts tokens, and reduction='seq-mean"
    )
    head_loss = HeadLoss(compile=True)
    own = with_ignore_index(head_loss, 3)
    # with what it has compiled
    assert own.ignore_index == 3 and with_ignore_index(head_loss, 3) is own
    head_loss.eval().terms = ZLoss(1.0)
    assert (
        with_ignore_index(head_loss, 3).terms == head_loss.terms
        and not with_ignore_index(head_loss, 3).training
    )
    head_loss.compile_terms = False
    assert not with_ignore_index(head_loss, 3).compile_terms
    return worst(results)


def any_head_loss(group, install):
    """Terms and inputs of another HeadLoss, against the same on the unsharded model's logits; and
    its metrics."""
    host, model = models("uneven", config_of(**CONFIGS["uneven"]))
    head_loss = HeadLoss(
        [CrossEntropy(label_smoothing=0.1), ZLoss(1e-2), Distillation(0.5)], metrics=("accuracy",)
    )
    seen = []
    if install == "fused":
        linear = Linear(mode="one_sweep", budget=1 << 20)
        installed = fuse_head(model, head_loss, linear=linear, observe=seen.append)
    else:
        installed = model.loss_function = causal_lm_loss(model, head_loss, observe=seen.append)
    assert (installed.last, installed.calls, seen) == (None, 0, [])  # none of the check call
    inputs, shard = batch(509), VocabShard.from_group(group, 509)
    teacher = torch.randn(2, 16, 509)
    own = {"teacher": Teacher(teacher[..., shard.start : shard.stop])}
    loss, grads = run(model, {**inputs, "head_inputs": own})
    host.loss_function = types.SimpleNamespace  # not called
    labels = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    out = head_loss(
        host(input_ids=inputs["input_ids"]).logits, labels, inputs={"teacher": Teacher(teacher)}
    )
    out.loss.backward()
    last, (observed,) = installed.last, seen
    assert observed is last and last.stats is None and not last.loss.requires_grad
    assert (
        torch.equal(last.metrics["accuracy"], out.metrics["accuracy"]) and out.count == last.count
    )
    return compared(loss, grads, out.loss, {n: p.grad for n, p in host.named_parameters()}, HEAD)


def stock(group):
    """Without labels, and after remove(), the model is its own."""
    host, model = models("plain", config_of(), plan=None)
    ids = batch()["input_ids"]
    before = model(input_ids=ids).logits
    signature = inspect.signature(model.forward)
    fused = fuse_head(model)
    assert inspect.signature(model.forward) == signature
    assert torch.equal(model(input_ids=ids).logits, before)
    assert model(input_ids=ids, logits_to_keep=3).logits.shape[1] == 3
    out = model(**batch(), output_hidden_states=True)
    theirs = host(**batch(), output_hidden_states=True)
    assert len(out.hidden_states) == len(theirs.hidden_states)
    loss, *_ = model(**batch(), return_dict=False)
    assert torch.equal(loss, out.loss)
    fused.remove()
    assert "forward" not in vars(model) and torch.equal(model(input_ids=ids).logits, before)
    with fuse_head(model):
        assert model(**batch()).logits is None
    assert "forward" not in vars(model)
    return {}


def set_loss_function(model):
    model.loss_function = causal_lm_loss(model)


def without_labels(group):
    """generate() and a call without labels: what the unsharded model gives, or an error on every
    rank."""
    ids = batch()["input_ids"]
    for plan, kinds in ((None, OWN_PLAN), ("colwise", CONFIGS)):
        for install, kind in itertools.product((fuse_head, set_loss_function), kinds):
            host, model = models(kind, config_of(**CONFIGS[kind]), plan=plan)
            install(model)
            for call in (
                lambda m: m(ids).logits,
                lambda m: m(input_ids=ids, return_dict=False)[0],
                lambda m: m.generate(ids, max_new_tokens=4, do_sample=False),
            ):
                if plan is None:
                    torch.testing.assert_close(call(model), call(host), rtol=1e-4, atol=1e-4)
                else:
                    refused(lambda call=call, model=model: call(model), "tp_plan='auto'")
            # a Trainer that evaluates, and one that trains
            refused(partial(model, ids, num_items_in_batch=torch.tensor(3)), "must have labels")
            refused(
                lambda model=model: model.train()(ids).logits.sum().backward(), "must have labels"
            )
    return {}


def loops(group):
    """What accelerate, a Trainer and their users do with a model, by one process: it wraps it and
    takes it out again, wants logits of an evaluation, computes the loss outside of the model."""
    from accelerate import Accelerator

    inputs, found = batch(), []
    ids, labels = inputs["input_ids"], inputs["labels"]
    for kind, sizes in (("Llama", {}), ("OPT", OPT), ("Llama4Text", LLAMA4)):
        model = AutoModelForCausalLM.from_config(config_of(kind, **sizes)).eval()
        own = model(input_ids=ids, labels=labels)
        fused = fuse_head(model, HeadLoss([CrossEntropy(), ZLoss(1.0)]))
        assert (
            f"{fused}".startswith(f"FusedHead({type(model).__name__}, ") and "z_loss" in f"{fused}"
        )
        z_loss = own.logits[:, :-1].logsumexp(-1).square()[labels[:, 1:] != -100].mean()
        expected = (own.loss + z_loss).detach()
        with mock.patch.dict(os.environ):
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
                del os.environ[name]
            accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        prepared = accelerator.prepare(model)
        accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        shifted = labels.roll(-1, -1).index_fill(-1, torch.tensor(labels.shape[-1] - 1), -100)
        outputs = [model(input_ids=ids, labels=labels), model(input_ids=ids, shift_labels=shifted)]
        assert all(out.logits is None for out in outputs)
        with torch.no_grad():
            evaluated = model(input_ids=ids, labels=labels)
        torch.testing.assert_close(evaluated.logits, own.logits)
        fused.remove()
        with fuse_head(model, skip_logits=True), torch.no_grad():
            assert model(input_ids=ids, labels=labels).logits is None
        with fuse_head(model, skip_logits=False):
            assert model.train()(input_ids=ids, labels=labels).logits.shape == own.logits.shape
        model.eval().loss_function = causal_lm_loss(model, HeadLoss([CrossEntropy(), ZLoss(1.0)]))
        logits = model.train()(input_ids=ids).logits
        outside = model.loss_function(
            logits=logits, labels=None, shift_labels=shifted, vocab_size=512
        )
        outside.backward()
        both = model(input_ids=ids).logits, model(input_ids=ids).logits  # and one loss
        one = model.loss_function(logits=both[0], labels=None, shift_labels=shifted)
        refused(lambda one=one, both=both: (one + both[1].sum()).backward(), "must have labels")
        refused(
            partial(model, input_ids=ids, labels=labels.float()),
            "labels must be int64 or int32",
            TypeError,
        )
        found += [(out.loss - expected).abs() / expected for out in (*outputs, evaluated)]
        found.append((outside - expected).abs() / expected)
    bart = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    model = transformers.BartForCausalLM(
        config_of("Bart", is_decoder=True, add_cross_attention=False, **bart)
    ).eval()
    set_loss_function(model)
    refused(lambda: model(input_ids=ids, labels=labels), "does not call its loss_function")
    return {"loss": float(max(found)), "grads": 0.0, "mutant": 1.0}


def failures(group):
    """An exception at any step of an installation leaves the model as it was."""
    _, model = models("plain", config_of())
    assert fails_cleanly_at_every_step(lambda: fuse_head(model), model) > 30
    return {}


def dropout_and_modes(group):
    """The check leaves training modes and random numbers as they were."""
    _, model = models("plain", config_of(attention_dropout=0.5))
    model.train()
    model.model.norm.eval()
    torch.manual_seed(3)
    modes = [m.training for m in model.modules()]
    fuse_head(model)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1)) and modes == [m.training for m in model.modules()]
    return {}


# ---- what is refused


def misused(model, group):
    """Wrong types and swapped arguments."""
    config, cls, auto = model.config, type(model), AutoModelForCausalLM
    for wrong, got in (
        (auto, "got AutoModelForCausalLM"),
        (model, "got a Llama"),
        (config, "got a Llama"),
    ):
        refused(
            partial(colwise_plan, wrong, config), "type(model), or AutoModelForCausalLM", TypeError
        )
        refused(partial(colwise_plan, wrong, config), got, TypeError)
    refused(
        lambda: colwise_plan(cls, cls), "LlamaConfig, got the class LlamaForCausalLM", TypeError
    )
    refused(
        lambda: colwise_plan(cls, config_of("Phi")),
        "config must be a LlamaConfig, got Phi",
        TypeError,
    )
    refused(lambda: colwise_plan(type(model.model), config), "'lm_head', got the plan None")
    for install in (fuse_head, causal_lm_loss):
        refused(partial(install, HeadLoss()), "PreTrainedModel, got HeadLoss", TypeError)
        refused(partial(install, model, HeadLoss), "got the class HeadLoss", TypeError)
        refused(
            partial(install, model, shard=group),
            "shard must be a VocabShard, got ProcessGroup",
            TypeError,
        )
        refuses_what_its_lines_rule_out(install, model=model)
    assert "forward" not in vars(model)


def refusals(group):
    _, model = models("plain", config_of())
    _, gathered = models("plain", config_of(), plan=None)
    misused(model, group)
    gathered.loss_function = causal_lm_loss(gathered)
    refused(lambda: gathered(**batch()), "colwise")
    refused(lambda: fuse_head(gathered), "loss_function")
    refused(lambda: causal_lm_loss(model, HeadLoss(reduction="none")), "one number")
    refused(lambda: fuse_head(model.model), "LlamaModel has no language-model head", TypeError)
    refused(lambda: fuse_head(torch.nn.Linear(2, 2)), "PreTrainedModel", TypeError)

    fused = fuse_head(model)
    refused(lambda: fuse_head(model), "replaced already")
    refused(lambda: model(**batch(), logits_to_keep=2), "logits_to_keep")
    refused(lambda: model(**batch(), output_router_logits=True), "auxiliary loss")
    set_loss_function(model)
    refused(lambda: model(**batch()), "or .remove() a fused head")
    del model._loss_function
    expected = model(**batch()).loss
    for kind in ("forward", "forward_pre", "full_backward"):
        hook = getattr(model.lm_head, f"register_{kind}_hook")(lambda *args: None)
        refused(
            lambda: model(**batch()),
            "output layer, which it does not call, got 1",
        )
        hook.remove()
    model.config.final_logit_softcapping = 5.0
    refused(lambda: model(**batch()), "softcap=5.0")
    del model.config.final_logit_softcapping
    assert torch.equal(model(**batch()).loss, expected)
    model.forward = types.MethodType(lambda self, **kwargs: None, model)
    refused(fused.remove, "on top", RuntimeError)
    refused(lambda: fuse_head(model), "transformers_cases.py")
    del model.forward

    # somebody patches the class, as liger does
    own, cls = type(model).forward, type(model)
    try:
        cls.forward = lambda self, **kwargs: None
        refused(lambda: fuse_head(model), "replaced already")
    finally:
        cls.forward = own

    # what the check finds: each leaves the model as it was
    refused(
        lambda: fuse_head(model, transform=Transform(scale=1.001)),
        "which transform= says: leave it out for that of the model's config",
    )
    model.config.final_logit_softcapping = 5.0
    refused(lambda: fuse_head(model), "which its config says: give it as transform=")
    del model.config.final_logit_softcapping
    refused(
        lambda: fuse_head(model, transform=Transform(softcap=1000.0)),
        "what the model does to its logits",
    )
    model.model.norm.register_forward_hook(lambda m, args, out: 1.5 * out)  # part of the body: fine
    fuse_head(model).remove()
    hook = model.lm_head.register_forward_hook(lambda m, args, logits: logits[..., :100])
    refused(lambda: fuse_head(model), "cuts its 512 logits to 100")
    hook.remove()
    hook = model.lm_head.register_forward_pre_hook(lambda m, args: (1.5 * args[0],))
    refused(lambda: fuse_head(model), "input is not")
    hook.remove()
    for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        hook = getattr(model.lm_head, f"register_{kind}_hook")(lambda *args: None)
        refused(lambda: fuse_head(model), "without hooks, got ['refusals.<locals>.<lambda>']")
        hook.remove()
    old = torch.nn.utils
    computed = {  # by hooks, from parameters of other names
        "L1Unstructured": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        "WeightNorm": old.weight_norm,
        "SpectralNorm": old.spectral_norm,
    }
    for name, compute in computed.items():
        other = AutoModelForCausalLM.from_config(config_of())
        compute(other.lm_head)
        refused(partial(fuse_head, other), f"without hooks, got ['{name}']")
    hook = model.register_forward_pre_hook(
        lambda m, args, kw: (args, {**kw, "labels": None}), with_kwargs=True
    )
    refused(lambda: fuse_head(model), "does not call it")
    hook.remove()
    refused(lambda: fuse_head(model, linear=Linear(hidden_grad="reduce_scatter")), "replicated")
    fused = fuse_head(model, linear=Linear(hidden_grad="none"))
    refused(lambda: model(**batch()), "hidden_grad='none'")
    fused.remove()
    wrong = VocabShard(0, 256, 512, group) if dist.get_rank() else VocabShard(256, 512, 512, group)
    refused(lambda: fuse_head(model, shard=wrong), "holds ids")
    model._tp_size = None  # as FSDP leaves it
    refused(lambda: fuse_head(model), "not tensor parallel")
    model._tp_size = 2
    assert "forward" not in vars(model)

    moe = config_of("Mixtral", num_local_experts=2, output_router_logits=True)
    refused(lambda: fuse_head(AutoModelForCausalLM.from_config(moe)), "auxiliary loss")
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config_of())
    with fuse_head(model):
        loss = model(**batch()).loss
        fully_shard(model.lm_head)  # whose hooks gather the weight
        fully_shard(model)
        torch.testing.assert_close(model(**batch()).loss, loss)
    model = AutoModelForCausalLM.from_config(config_of())
    model.lm_head = torch.nn.Sequential(model.lm_head)
    refused(lambda: fuse_head(model), "adapter", TypeError)
    return {}


def newer(group):
    """A version above the tested ones: one warning, and then the check of an installation
    decides."""
    host, model = models("plain", config_of())
    oldest, _, extra = TESTED["transformers"]
    with (
        mock.patch.dict(TESTED, transformers=(oldest, oldest, extra)),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            importlib.reload(adapter)
        (warning,) = [str(w.message) for w in seen if "newer" in str(w.message)]
        assert f"transformers {transformers.__version__} is newer" in warning
        with adapter.fuse_head(model):
            result = against_host(model, host, batch())
        hook = model.lm_head.register_forward_pre_hook(lambda m, args: (1.5 * args[0],))
        refused(lambda: adapter.fuse_head(model), "input is not")
        hook.remove()
    return result


# ---- the Trainer, in one process of its own: it would wrap the model for two ranks


def trainer(group):
    results = [None]
    if dist.get_rank() == 0:
        os.waitpid(TRAINING, 0)
        results = [json.loads((folder() / "trainer.json").read_text())]
    dist.broadcast_object_list(results, 0)
    return results[0]


def start_training() -> int:
    """A process that trains alone, forked before there is a group. -> its id"""
    if process := os.fork():
        return process
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    try:
        result = train()
    except Exception:
        result = {"error": traceback.format_exc()}
    (folder() / "trainer.json").write_text(json.dumps(result))
    os._exit(0)


def by_callback(trained, host, start):
    """LLaMA-Factory's way: the guide's callback, and one on a model that PEFT has wrapped."""
    page = {}
    tuner = types.ModuleType("llamafactory.train.tuner")
    tuner.run_exp = lambda callbacks: page.update(callbacks=callbacks)
    with mock.patch.dict("sys.modules", {tuner.__name__: tuner}):
        exec(compile(marked_block("host", "llamafactory"), "docs", "exec"), page)
    (callback,) = page["callbacks"]
    assert callback.fused is None
    found = trained(4, 1, lambda model: None, callback)
    assert "loss/z_loss" in callback.fused.last.means()
    plain = HeadLossCallback()
    same = trained(4, 1, lambda model: None, plain)
    assert bool((same[0] < found[0]).all()) and plain.fused.last is not None
    model = copy.deepcopy(start)
    wrapped = types.SimpleNamespace(get_base_model=lambda: model)
    plain.on_init_end(None, None, None, model=wrapped)
    assert plain.fused.model is model
    return compared(*same, *host, HEAD)


def train():
    """Losses and gradients of two steps of SGD: two micro-batches of unequal numbers of tokens, one
    batch of both."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    g = torch.Generator().manual_seed(1)
    rows = [{"input_ids": torch.randint(0, 512, (12,), generator=g)} for _ in range(8)]
    for n, row in enumerate(rows):
        row["labels"] = row["input_ids"].where(torch.arange(12) > n, -100)
    torch.manual_seed(0)
    start = AutoModelForCausalLM.from_config(config_of())

    class Gradients(TrainerCallback):
        def __init__(self):
            self.seen = {}

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            step = f"{state.global_step}:" if state.global_step else ""
            self.seen |= {step + n: p.grad.clone() for n, p in model.named_parameters()}

    def trained(size, accumulate, install, *callbacks, **more):
        model = copy.deepcopy(start)
        install(model)
        gradients = Gradients()
        with tempfile.TemporaryDirectory() as out:
            options = {
                "max_steps": 2,
                "report_to": "none",
                "save_strategy": "no",
                "disable_tqdm": True,
            }
            options |= {
                "use_cpu": True,
                "optim": "sgd",
                "learning_rate": 1.0,
                "lr_scheduler_type": "constant",
            }
            options |= {
                "per_device_train_batch_size": size,
                "gradient_accumulation_steps": accumulate,
            }
            options |= {"logging_steps": 1, "max_grad_norm": 0, "seed": 0, **more}
            trainer = Trainer(
                model,
                TrainingArguments(out, **options),
                train_dataset=rows,
                callbacks=[gradients, *callbacks],
            )
            trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
            trainer.train()
        losses = torch.tensor(
            [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        )
        return losses, gradients.seen

    def nothing(model):
        pass

    host = trained(4, 1, nothing)
    page = {}
    exec(compile(marked_block("host", "trainer-log"), "docs", "exec"), page)
    with tempfile.TemporaryDirectory() as out:
        model = copy.deepcopy(start)
        options = {
            "max_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "use_cpu": True,
            "logging_steps": 1,
        }
        trainer = page["HeadTrainer"](model, TrainingArguments(out, **options), train_dataset=rows)
        trainer.fused = fuse_head(model, HeadLoss(metrics="accuracy"))
        trainer.train()
        (found,) = [entry for entry in trainer.state.log_history if "head/loss" in entry]
        trainer.log({"eval_loss": 1.0})
        assert "head/loss" not in trainer.state.log_history[-1]
        assert (
            0 <= found["head/accuracy"] <= 1 and abs(found["head/loss"] - found["loss"]) < 1e-4
        ), found
    ways = fuse_head, set_loss_function
    results = [
        compared(*trained(*sizes, way), *host, HEAD) for way in ways for sizes in ((4, 1), (2, 2))
    ]
    results += [by_callback(trained, host, start)]
    for way in ways:  # the Trainer takes the labels away, and the HeadLoss would not be computed
        refused(
            lambda way=way: trained(4, 1, way, label_smoothing_factor=0.1),
            "CrossEntropy(label_smoothing=...)",
        )
    found = {name: max(r[name] for r in results) for name in ("loss", "grads")}
    return {**found, "mutant": min(r["mutant"] for r in results)}


def documented(group):
    names = {"path": saved("plain", config_of()), "tokens": 30, **batch()}
    exec(compile(marked_block("host", "transformers"), "docs", "exec"), names)
    assert names["answer"].shape == (2, 24) and names["out"].loss > 0
    parallel = names["DistributedConfig"](tp_size=2, tp_plan="auto")
    names["model"] = names["LlamaForCausalLM"].from_pretrained(
        names["path"], distributed_config=parallel
    )
    exec(compile(marked_block("host", "transformers-card"), "README.md", "exec"), names)
    assert 0 <= names["accuracy"] <= 1
    return {}


CASES = {
    **{f"loss_function-{kind}": partial(loss_function, kind=kind) for kind in CONFIGS},
    **{f"fused-{kind}": partial(fused, kind=kind) for kind in CONFIGS},
    **{f"fused-{kind}-auto": partial(fused, kind=kind, plan=None) for kind in CONFIGS},
    **{f"{install}-bf16": partial(bf16, install=install) for install in ("loss_function", "fused")},
    **{f"fused-{kind}": partial(other_models, kind=kind) for kind in ("Gemma2", "Cohere", "Granite", "Phi", "GPT2")},
    **{f"{install}-arguments": partial(call_arguments, install=install) for install in ("loss_function", "fused")},
    **{f"{install}-HeadLoss": partial(any_head_loss, install=install) for install in ("loss_function", "fused")},
    "stock": stock, "without labels": without_labels, "loops": loops, "failures": failures, "modes": dropout_and_modes,
    "vision": vision, "vision-parallel": vision_parallel, "refusals": refusals, "newer": newer, "trainer": trainer,
    "documented": documented,
}  # fmt: skip

if __name__ == "__main__":
    TRAINING = start_training()
    if installed_version("trl") is not None:
        from trl_cases import CASES as TRL_CASES

        CASES |= {**TRL_CASES, "adapters": adapters}
    main(CASES)
