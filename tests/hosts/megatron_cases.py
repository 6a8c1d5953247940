"""Megatron-Core's GPTModel with our head against its own loss, on two tensor-parallel ranks."""
# ruff: noqa: E402, as nothing of Megatron may be imported before it runs on CPUs

import copy
import importlib.util
import inspect
import math
import sys
from types import SimpleNamespace
from unittest import mock

import torch
from cases import (
    ROOT,
    compared,
    fails_cleanly_at_every_step,
    refused,
    refuses_what_its_lines_rule_out,
    relative_errors,
)
from pages import marked_block

sys.path.insert(0, str(ROOT / "launch"))

import megatron_cpu

megatron_cpu.pretend()

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.language_module import language_module
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.multi_token_prediction import (
    MTPLossLoggingHelper,
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_model import Norm
from tp_headloss import CrossEntropy, HeadLoss, Linear, Options, ZLoss
from tp_headloss.integrations.megatron import MegatronHead, MegatronHeadMixin, install

V, B, S, H = 256, 2, 8, 32
HAS_HYBRID = importlib.util.find_spec("megatron.core.models.hybrid") is not None
HAS_PROCESSOR = "output_processor" in inspect.signature(GPTModel.forward).parameters


class Mixed(MegatronHeadMixin, GPTModel):
    pass


def config_of(sp=False, bf16=False, mtp=False, **config):
    dtype = torch.bfloat16 if bf16 else torch.float32
    defaults = dict(
        num_layers=1, hidden_size=H, num_attention_heads=2, use_cpu_initialization=True,
        tensor_model_parallel_size=2, sequence_parallel=sp, hidden_dropout=0.0, attention_dropout=0.0,
        params_dtype=dtype, bf16=bf16, pipeline_dtype=dtype, add_bias_linear=False, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False,
        mtp_num_layers=2 if mtp else None, init_method_std=0.3,
    )  # fmt: skip
    return TransformerConfig(**{**defaults, **config})


def model_of(cls=GPTModel, sp=False, tied=False, bf16=False, mtp=False, ddp=False, **config):
    config = config_of(sp, bf16, mtp, **config)
    spec = get_gpt_layer_local_spec()
    if sp:
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
        spec = TransformerBlockSubmodules(layer_specs=[spec], layer_norm=Norm)
    more = (
        {"mtp_block_spec": get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)}
        if mtp
        else {}
    )
    for depth in more["mtp_block_spec"].layer_specs if mtp and sp else ():
        depth.submodules.enorm = depth.submodules.hnorm = depth.submodules.layer_norm = Norm
    torch.manual_seed(7)
    model = cls(
        config=config, transformer_layer_spec=spec, vocab_size=V, max_sequence_length=S, parallel_output=True,
        share_embeddings_and_output_weights=tied, **more,
    )  # fmt: skip
    if bf16:
        model.bfloat16()
    if ddp:
        model = DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
        )
        model.zero_grad_buffer()
    return model


def hybrid_of(sp=False, tied=False, mtp=False, **config):
    """A HybridModel of the one kind of layer that runs without Transformer Engine, GPTModel's."""
    from megatron.core.models.hybrid import hybrid_block, hybrid_model

    hybrid_block.TENorm = Norm
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    depth = MultiTokenPredictionLayerSubmodules(Norm, Norm, Norm, ColumnParallelLinear)
    depth = ModuleSpec(module=MultiTokenPredictionLayer, submodules=depth)
    depths = MultiTokenPredictionBlockSubmodules(layer_specs=[depth])
    depths = ModuleSpec(module=MultiTokenPredictionBlock, submodules=depths)
    layers = hybrid_block.HybridStackSubmodules(attention_layer=layer, mtp_block_spec=depths)
    torch.manual_seed(7)
    return hybrid_model.HybridModel(
        config=config_of(sp, mtp=mtp, **config), vocab_size=V, max_sequence_length=S,
        hybrid_layer_pattern="*/*/*" if mtp else "*",
        hybrid_stack_spec=ModuleSpec(module=hybrid_block.HybridStack, submodules=layers),
        position_embedding_type="learned_absolute", share_embeddings_and_output_weights=tied,
    )  # fmt: skip


def batch():
    generator = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(0, V, (B, S), generator=generator) for _ in range(2))
    mask = torch.triu(torch.ones(1, 1, S, S, dtype=torch.bool), 1)
    return ids, torch.arange(S).expand(B, S), mask, labels, torch.rand(B, S, generator=generator)


def run(model, labels=None, factor=1.0, **kwargs):
    """-> losses and gradients of their weighted sum; with multi-token prediction its losses are in
    the gradients."""
    ids, positions, mask, own_labels, weights = batch()
    labels = own_labels if labels is None else labels
    losses = model(ids, positions, mask, labels=labels, **kwargs)
    assert losses.shape == (B, S) and losses.dtype == torch.float32
    (factor * (losses * weights).sum()).backward()
    grads = {
        n: getattr(p, "main_grad", p.grad).float().clone() for n, p in model.named_parameters()
    }
    return losses.detach(), grads


def head_name(model):
    tied = getattr(model, "module", model).share_embeddings_and_output_weights
    end = "word_embeddings.weight" if tied else "output_layer.weight"
    (name,) = [n for n, _ in model.named_parameters() if n.endswith(end)]
    return name


def depths_logged():
    """What Megatron has logged of multi-token prediction since the last time: losses, accepted
    tokens, tokens."""
    tracker = MTPLossLoggingHelper.tracker
    logged = {name: values.clone() for name, values in tracker.items() if name.endswith("values")}
    tracker.clear()
    return logged


def check_depths(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        torch.testing.assert_close(ours[name], values, rtol=1e-6 * ("correct" not in name), atol=0)


def installed(fused=True, options=None, **kwargs):
    def case(group):
        stock, model = model_of(**kwargs), model_of(**kwargs)
        more = {"loss_mask": torch.ones(B, S)} if kwargs.get("mtp") else {}
        depths_logged()  # what other cases left
        theirs, logged = run(stock, **more), depths_logged()
        head = MegatronHead(ignore_index=-100, options=options)
        # a fused head has none
        head.losses_from_logits = None if fused else head.losses_from_logits
        with install(model, head, fused=fused):
            ours = run(model, **more)
        check_depths(depths_logged(), logged)
        depths = 3 if kwargs.get("mtp") else 1
        assert head.calls == depths, head.calls  # none of the check call
        return compared(*ours, *theirs, head_name(model))

    return case


def uncompiled(case):
    """Megatron's fused loss compiles itself otherwise, for seconds on each rank."""

    def run_eagerly(group):
        with torch.compiler.set_stance("force_eager"):
            return case(group)

    return run_eagerly


def hybrid(fused=True, **kwargs):
    """A HybridModel, the class that Megatron-Core 0.19 recommends instead of GPTModel."""

    def case(group):
        stock, model = hybrid_of(**kwargs), hybrid_of(**kwargs)
        logits, depths = stock(*batch()[:3]), 3 if kwargs.get("mtp") else 1
        depths_logged()
        theirs, logged, head = run(stock), depths_logged(), MegatronHead(ignore_index=-100)
        with install(model, head, fused=fused):
            ours = run(model)
            check_depths(depths_logged(), logged)
            assert head.calls == depths
            assert torch.equal(model(*batch()[:3]), logits)
        assert not {"forward", "compute_language_model_loss"} & set(vars(model))
        return compared(*ours, *theirs, head_name(model))

    return case


def hybrid_refusals(group):
    model, head = hybrid_of(), MegatronHead(ignore_index=-100)
    fails_cleanly_at_every_step(lambda: install(model, head), model)
    with install(model, head):
        refused(lambda: install(model, head), "replaced already")
        run(model)
    return {}


def accepted(group):
    """Labels that the first depth finds likeliest are counted as Megatron counts them, before and
    after the backward; depths whose gradient stays out of the output layer."""
    stock, model = (model_of(mtp=True, mtp_detach_heads=True) for _ in range(2))
    found, argmax = [], multi_token_prediction._vocab_parallel_argmax
    more = {"loss_mask": torch.ones(B, S).index_fill(1, torch.tensor(3), 0)}
    with mock.patch.object(
        multi_token_prediction,
        "_vocab_parallel_argmax",
        lambda *args: found.append(argmax(*args)) or found[-1],
    ):
        run(stock, **more)
    stock.zero_grad()
    labels = found[0].transpose(0, 1).roll(1, 1)
    depths_logged()
    theirs, logged = run(stock, labels, **more), depths_logged()
    assert logged["correct_values"][0] > 4 and logged["total_values"][0] < B * S
    with install(model, HeadLoss()):
        ours = run(model, labels, **more)
    check_depths(depths_logged(), logged)
    return compared(*ours, *theirs, head_name(model))


def one_sweep(**kwargs):
    """The mask of the model's forward is what its losses are weighted by; any number times it is
    right."""

    def case(group):
        stock, model = model_of(**kwargs), model_of(**kwargs)
        more = {"loss_mask": batch()[4]} if kwargs.get("mtp") else {}
        theirs, linear = run(stock, factor=0.3, **more), Linear(mode="one_sweep")
        with install(model, MegatronHead(ignore_index=-100, terms=[CrossEntropy()], linear=linear)):
            ours = run(model, factor=0.3, loss_mask=batch()[4])
            found = compared(*ours, *theirs, head_name(model))
            model.zero_grad()
            _, wrong = run(model, loss_mask=torch.ones(B, S))
        return found | {
            "others are nan": all(
                bool(x.isnan().all()) for n, x in wrong.items() if "output_layer" in n
            )
        }

    return case


def one_sweep_everywhere(group):
    """Without a mask, without gradients, with ignored labels, and with more terms."""
    ids, positions, mask, labels, _ = batch()
    labels = labels.clone()
    labels[:, 2] = -100
    terms, found = [CrossEntropy(), ZLoss(1e-3)], []
    for mode in ("recompute", "one_sweep"):
        model = model_of()
        with install(model, MegatronHead(ignore_index=-100, terms=terms, linear=Linear(mode=mode))):
            losses = model(ids, positions, mask, labels=labels)
            losses.sum().backward()
            with torch.no_grad():
                evaluated = model.eval()(ids, positions, mask, labels=labels)
                counted = torch.arange(S).expand(B, S) != 1
                masked = model(ids, positions, mask, labels=labels, loss_mask=counted.float())
        # with a mask that only one sweep knows, in evaluation, too
        expected = torch.where(counted, evaluated, 0.0) if mode == "one_sweep" else evaluated
        assert torch.equal(masked, expected)
        found.append((losses.detach(), {n: p.grad for n, p in model.named_parameters()}))
        assert torch.equal(evaluated, found[0][0]) and not losses[:, 2].any()
    return compared(*found[1], *found[0], head_name(model))


def processor(group):
    """The official hook, without anything installed."""
    stock, model = model_of(), model_of()
    theirs = run(stock)
    ours = run(model, output_processor=MegatronHead(ignore_index=-100))
    return compared(*ours, *theirs, head_name(model))


def mixin(group):
    stock, model = model_of(), model_of(Mixed)
    theirs, before = run(stock), run(model_of(Mixed))
    model.megatron_head = MegatronHead(ignore_index=-100)
    ours = run(model)
    assert (
        model.megatron_head.calls == 1 and max(relative_errors(before[1], theirs[1]).values()) == 0
    )
    return compared(*ours, *theirs, head_name(model))


def main_grad_of_the_layer(group):
    """gradient_accumulation_fusion: dW goes into main_grad, beside what is there, and autograd gets
    none."""
    stock, model = model_of(), model_of()
    losses, grads = run(stock)
    weight = model.output_layer.weight
    # what its own kernels, which are not here, are asked for by
    model.output_layer.gradient_accumulation_fusion = True
    weight.main_grad, weight.grad_added_to_main_grad = torch.full_like(weight, 2.0), False
    with install(model, MegatronHead(ignore_index=-100)):
        ours = run(model)
    grads["output_layer.weight"] += 2.0
    assert weight.grad_added_to_main_grad
    return compared(*ours, losses, grads, "output_layer.weight")


def mup(group):
    """Logits are scaled by mup_output_mult."""
    stock, model = (model_of(use_mup=True, mup_base_hidden_size=H // 2) for _ in range(2))
    assert stock.config.mup_output_mult == 0.5
    theirs = run(stock)
    with install(model, MegatronHead(ignore_index=-100)):
        ours = run(model)
    return compared(*ours, *theirs, head_name(model))


def ignored_labels(group):
    """-100 and 300 are 0 under ignore_index None; -100 is 0 and 300 NaN under -100; Megatron has a
    number for both."""
    model, labels = model_of(), batch()[3].clone()
    labels[0, 0], labels[0, 1] = -100, 300
    stock = run(model, labels)[0]
    found = {"megatron": bool(stock[0, :2].isfinite().all() and (stock[0, :2] > 0).all())}
    checked = int(torch.randint(0, V - 1, (1, 4), generator=torch.Generator().manual_seed(0))[0, 0])
    # though the check call would draw this very label
    install(model, MegatronHead(ignore_index=checked)).remove()
    for name, index in (("none", None), ("index", -100)):
        with install(model, MegatronHead(ignore_index=index)):
            losses = run(model, labels)[0]
        found[name] = [float(x) if x == x else "nan" for x in losses[0, :2]]
        found["others"] = float((losses[:, 2:] - stock[:, 2:]).abs().max())
    return found


def without_labels(group):
    ids, positions, mask, _, _ = batch()
    model, head = model_of(), MegatronHead(ignore_index=-100)
    logits = model(ids, positions, mask)
    with install(model, head):
        installed_logits, calls = model(ids, positions, mask), head.calls
        run(model)
    out = {"equal": bool(torch.equal(logits, installed_logits)), "calls": calls}
    if HAS_PROCESSOR:
        out["equal"] &= bool(
            torch.equal(logits, model(ids, positions, mask, output_processor=head))
        )
    return out


def refusals(group):
    model, head = model_of(), MegatronHead(ignore_index=-100)
    loss, post = model.compute_language_model_loss, model._postprocess

    def installing(match, kind=ValueError, model=model, head=head, **options):
        refused(lambda: install(model, head, **options), match, kind)

    handle = install(model, head)
    installing("replaced already")
    installing("replaced already", fused=False)
    handle.remove()
    assert model.compute_language_model_loss == loss and model._postprocess == post
    installing("MegatronHeadMixin", model=model_of(Mixed))
    installing("got Linear", TypeError, torch.nn.Linear(2, 2))
    installing("got MegatronHead", TypeError, head, model)
    installing("got the class GPTModel", TypeError, GPTModel)
    installing("got a list of 1: pass the chunk that has the output layer", TypeError, [model])
    installing("got Term", TypeError, head=CrossEntropy())
    installing("reduction='mean' or 'none', got 'sum'", head=HeadLoss(reduction="sum"))
    refuses_what_its_lines_rule_out(install, model=model, head=head)
    refuses_what_its_lines_rule_out(MegatronHead, ignore_index=None)
    no_term = "terms must be Terms, got CrossEntropy: call it"
    refused(lambda: MegatronHead(ignore_index=None, terms=CrossEntropy), no_term, TypeError)
    unfused = MegatronHead(ignore_index=-100, linear=Linear("one_sweep"))
    installing(
        "linear needs fused=True, where there are hidden states, got fused=False",
        head=unfused,
        fused=False,
    )
    inplace = MegatronHead(ignore_index=-100, options=Options(inplace=True))
    installing("Options(inplace=True) is for logits, fused=False", head=inplace)
    larger = MegatronHead(ignore_index=-100, vocab_size=V + 1)
    installing("at most the 256 rows of the output layer, got 257", head=larger)

    def unused():
        with install(model, head):
            pass

    refused(unused, "no loss came through", RuntimeError)
    assert "_postprocess" not in model.__dict__
    installing("install on its ._orig_mod", TypeError, torch.compile(model))
    with mock.patch.object(model.output_layer, "weight", None):
        installing("must have share_embeddings_and_output_weights=True")
    with mock.patch.object(model.output_layer, "sequence_parallel", True):
        installing("sequence_parallel of the output layer and of the model's config must be equal")
    with mock.patch.object(
        language_module, "fused_vocab_parallel_cross_entropy", lambda *args: None
    ) as theirs:
        theirs.__module__ = "other_kernels"
        installing("other_kernels has replaced")
    layer, model.output_layer = model.output_layer, None
    installing("last pipeline stage")
    model.output_layer = layer
    layer.tp_group, tp_group = None, layer.tp_group
    refused(
        lambda: head.losses_from_logits(torch.zeros(S, B, V // 2), batch()[3], layer), "got None"
    )
    layer.tp_group = tp_group
    hidden, labels = torch.zeros(S, B, H), batch()[3]
    for option in ("defer_embedding_wgrad_compute", "fp8_output_proj"):
        # it has that name
        assert hasattr(model.config, option) or (option == "fp8_output_proj" and not HAS_HYBRID)
        setattr(model.config, option, True)
        installing(f"{option}=True")
        refused(
            lambda: head.losses_from_hidden(hidden, None, layer, labels, model.config),
            f"{option}=True",
        )
        setattr(model.config, option, False)
    layer.gtp_remat_size, before = 2, getattr(layer, "gtp_remat_size", 1)
    installing("got gtp_remat_size=2")
    layer.gtp_remat_size, layer.output_dtype = before, torch.bfloat16
    installing(
        "output_dtype (--output-logit-dtype) must be the model's torch.float32, got torch.bf"
    )
    layer.output_dtype = torch.float32  # that of the model
    with mock.patch.object(model.config, "sequence_parallel", True):
        refused(
            lambda: head.losses_from_hidden(hidden, None, layer, labels, model.config),
            "sequence_parallel of the output layer and of the model's config must be equal",
        )
    install(model, head).remove()
    model.output_layer = Adapted(layer)
    installing("ColumnParallelLinear without a forward of its own, got Adapted", TypeError)
    model.output_layer = layer
    with install(model, head, fused=False):
        refused(lambda: run(model, runtime_gather_output=True), "this rank's 128 columns, got 256")
        run(model)
    refused(lambda: _one_of_two(model, model_of(), head), "no loss came through", RuntimeError)
    assert "_postprocess" in install(model, head).entries
    return {}


class Adapted(torch.nn.Module):
    """An output layer with something around it."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.tp_group, self.weight = layer, layer.tp_group, layer.weight

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs)


def failures(group):
    """An exception at any step of an installation leaves the model, and the head, as they were."""
    model, seen = model_of(), []
    head, per_token = MegatronHead(ignore_index=-100, observe=seen.append), HeadLoss()
    for given, fused in ((head, True), (head, False), (per_token, True)):
        assert (
            fails_cleanly_at_every_step(
                lambda given=given, fused=fused: install(model, given, fused=fused), model
            )
            > 20
        )
    assert head.last is None
    return {"observed": len(seen), "observes": head.observe == seen.append}


def fp32_logits(group):
    """A bf16 model whose output layer makes fp32 logits (--output-logit-dtype fp32 of newer
    versions)."""
    model, labels = model_of(bf16=True), batch()[3]
    model.output_layer.output_dtype = torch.float32
    words = "must be the model's torch.bfloat16, got torch.float32: use fused=False"
    refused(lambda: install(model, MegatronHead(ignore_index=-100)), words)
    logits = torch.randn(S, B, V // 2, generator=torch.Generator().manual_seed(5)).requires_grad_()
    theirs = model.compute_language_model_loss(labels, logits.clone())
    (their_grad,) = torch.autograd.grad(theirs.sum(), logits)
    with install(model, MegatronHead(ignore_index=-100), fused=False):
        ours = model.compute_language_model_loss(labels, logits.clone())
    (grad,) = torch.autograd.grad(ours.sum(), logits)
    return compared(
        ours.detach(), {"logits": grad}, theirs.detach(), {"logits": their_grad}, "logits"
    )


def head_loss(group):
    """A HeadLoss in the place of a MegatronHead: its terms, metrics and ignore_index."""
    terms, labels = [CrossEntropy(label_smoothing=0.1), ZLoss(1e-3)], batch()[3].clone()
    labels[:, 2] = 7
    stock, model = model_of(), model_of()
    with install(stock, MegatronHead(ignore_index=7, terms=terms)):
        theirs = run(stock, labels)
    with install(
        model, HeadLoss(terms, metrics=("entropy",), reduction="none", ignore_index=7)
    ) as handle:
        assert handle.last is None
        ours = run(model, labels)
        last = handle.last
    assert last.stats is None and torch.equal(last.loss, ours[0]) and not last.loss.requires_grad
    assert last.count == B * (S - 1) - (batch()[3] == 7).sum() + (batch()[3][:, 2] == 7).sum()
    assert 0 < last.metrics["entropy"] / last.count < math.log(V)
    assert not ours[0][:, 2].any() and ours[0][:, 3].all()
    options = Options(check=True)
    parts = MegatronHead.from_head_loss(
        HeadLoss(metrics=("lse",), reduction="none", options=options, compile=True)
    ).head_loss
    assert (parts.metrics, parts.options, parts.compile_terms) == (("lse",), options, True)
    return compared(*ours, *theirs, head_name(model))


def copies(group):
    """A copy of an installed model runs with its own weights, and modules keep their own mode."""
    model, halved, seen = model_of(), model_of(), []
    model.decoder.eval()
    install(model, MegatronHead(ignore_index=-100, observe=seen.append))
    found = {"modes": model.training and not model.decoder.training, "observed": len(seen)}
    objects = [model, *model.modules(), getattr(model, "pg_collection", None)]
    values = [x for owner in objects if owner is not None for x in vars(owner).values()]
    groups = [x for x in values if isinstance(x, torch.distributed.ProcessGroup)]
    copied = copy.deepcopy(model, {id(x): x for x in [model.config, *groups]})
    with torch.no_grad():
        for changed in (copied, halved):
            changed.output_layer.weight.mul_(0.5)
    return found | {"difference": float((run(copied)[0] - run(halved)[0]).abs().max())}


def fusion_without_main_grad(group):
    """gradient_accumulation_fusion before there is a main_grad, and in evaluation: as if it were
    off."""
    stock, model = model_of(), model_of()
    theirs = run(stock)
    model.output_layer.gradient_accumulation_fusion = True
    with install(model, MegatronHead(ignore_index=-100)):
        ours = run(model)
        with torch.no_grad():
            model(*batch()[:3], labels=batch()[3])
    return compared(*ours, *theirs, head_name(model))


class Forwarding(MegatronHeadMixin, GPTModel):
    """A subclass whose forward has no names."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def mixin_without_names(group):
    more = {"use_mup": True, "mup_base_hidden_size": H // 2} if HAS_PROCESSOR else {}
    stock, model = model_of(**more), model_of(Forwarding, **more)
    theirs = run(stock)
    model.megatron_head = MegatronHead(ignore_index=-100)
    return compared(*run(model), *theirs, head_name(model))


def _one_of_two(model, other, head):
    with install(model, head), install(other, head):
        run(other)


def check_call(group):
    model, head = model_of(), MegatronHead(ignore_index=-100)
    losses_from_hidden, head.losses_from_hidden = (
        head.losses_from_hidden,
        lambda *args: 1.5 * losses_from_hidden(*args),
    )
    refused(lambda: install(model, head), "differs", RuntimeError)
    head.losses_from_hidden = lambda *args: torch.zeros(1, 2 * group.size())
    refused(lambda: install(model, head), "did not come through", RuntimeError)
    assert "_postprocess" not in model.__dict__
    return {}


def own_terms(group):
    """More terms, metrics and the true vocabulary; what a call made is observed."""
    model, seen = model_of(), []
    head = MegatronHead(
        ignore_index=-100, terms=[CrossEntropy(), ZLoss(1e-3)], metrics=("entropy",), vocab_size=V - 50,
        observe=seen.append,
    )  # fmt: skip
    labels = batch()[3] % (V - 50)
    ids, positions, mask, _, _ = batch()
    logits = model(ids, positions, mask).detach()
    parts = [torch.empty_like(logits) for _ in range(2)]
    torch.distributed.all_gather(parts, logits, group=group)
    whole = torch.cat(parts, -1)[..., : V - 50].double()
    with install(model, head):
        losses, _ = run(model, labels)
    # what is kept holds no activations
    assert seen[-1].stats is None and not seen[-1].loss.requires_grad
    lse = whole.logsumexp(-1)
    expected = lse - whole.gather(-1, labels.unsqueeze(-1)).squeeze(-1) + 1e-3 * lse.square()
    return {
        "loss": relative_errors({"": losses}, {"": expected})[""],
        "entropy": float(seen[-1].metrics["entropy"]),
    }


def documented(group):
    model = model_of()
    ids, positions, mask, labels, _ = batch()
    scope = {
        "model": model,
        "batch": SimpleNamespace(ids=ids, positions=positions, mask=mask, labels=labels),
    }
    exec(compile(marked_block("host", "megatron"), "docs", "exec"), scope)
    return {"loss": float(scope["losses"].mean()), "removed": "_postprocess" not in model.__dict__}


def documented_on_cpus(group):
    """The script of the guide, in a process that has its groups already."""
    code, scope = compile(marked_block("host", "megatron-cpu"), "docs", "exec"), {}
    with (
        mock.patch.object(torch.distributed, "init_process_group"),
        mock.patch.object(parallel_state, "initialize_model_parallel"),
        mock.patch.object(megatron_cpu, "pretend"),
    ):
        exec(code, scope)
    depths_logged()  # of another number of depths than other cases have
    grads = [x.grad for x in scope["model"].parameters()]
    return {"loss": float(scope["losses"].mean()), "all": all(x is not None for x in grads)}


CASES = {
    "plain": installed(), "sp": installed(sp=True), "tied": installed(tied=True),
    "sp, tied": installed(sp=True, tied=True), "bf16": installed(bf16=True), "ddp main_grad": installed(ddp=True),
    "ddp, sp, tied": installed(ddp=True, sp=True, tied=True), "mtp": installed(mtp=True),
    "mtp, sp, tied": installed(mtp=True, sp=True, tied=True), "mtp, one sweep": one_sweep(mtp=True),
    "loss hook": installed(fused=False), "loss hook, sp": installed(fused=False, sp=True),
    "loss hook, mtp": installed(fused=False, mtp=True),
    "loss hook, fused stock": uncompiled(installed(fused=False, cross_entropy_loss_fusion=True)),
    "loss hook, in place": installed(fused=False, options=Options(inplace=True)),
    "loss hook, bf16": installed(fused=False, bf16=True), "one sweep": one_sweep(), "one sweep, sp": one_sweep(sp=True),
    "one sweep everywhere": one_sweep_everywhere, "mixin": mixin, "main_grad of the layer": main_grad_of_the_layer,
    "ignored labels": ignored_labels, "without labels": without_labels, "refusals": refusals, "check call": check_call,
    "copies": copies, "failures": failures, "fp32 logits": fp32_logits, "HeadLoss": head_loss,
    "fusion without main_grad": fusion_without_main_grad, "mixin without names": mixin_without_names,
    "own terms": own_terms, "documented": documented, "documented on CPUs": documented_on_cpus,
}  # fmt: skip
if HAS_PROCESSOR:
    CASES |= {"processor": processor, "mup": mup}
if HAS_HYBRID:
    CASES |= {"accepted": accepted, "hybrid, mtp": hybrid(mtp=True, sp=True)}
    CASES |= {"hybrid": hybrid(), "hybrid, sp": hybrid(sp=True), "hybrid, tied": hybrid(tied=True)}
    CASES |= {"hybrid, loss hook": hybrid(fused=False), "hybrid, refusals": hybrid_refusals}
    CASES |= {"hybrid, mup": hybrid(use_mup=True, mup_base_hidden_size=H // 2)}


def begin(group):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=group.size())
