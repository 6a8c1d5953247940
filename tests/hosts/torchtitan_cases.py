"""torchtitan's Llama 3, its own losses and ours of identical models on two ranks: by backend
("spmd_types" is its default), with and without sequence parallelism of the body, bare and wrapped
by FSDP as its trainer does always."""

from __future__ import annotations

import functools
import itertools

import torch
import torch.distributed as dist
import torchtitan.tools.utils as utils
from cases import (
    compared,
    main,
    refused,
    refuses_what_its_lines_rule_out,
    relative_errors,
    worst,
)
from pages import marked_block

utils.device_type, utils.device_module = "cpu", torch.cpu  # before others copy them
# ruff: noqa: E402
import spmd_types as spmd
import torchtitan.models.llama3 as llama3
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.trainer import Trainer

from tp_headloss import CrossEntropy, HeadLoss, Linear, Metric, Term, ZLoss
from tp_headloss.integrations.torchtitan import FusedHeadLoss, LogitsLoss

RANKS = 2
VOCAB, COUNT = 211, torch.tensor(50)  # not even; of the global batch, more than is here
# what it offers runs on GPUs only
llama3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
tokens, labels = torch.randint(0, VOCAB, (2, 2, 16), generator=torch.Generator().manual_seed(3))
labels[0, :5] = -100


@functools.cache
def parallel(backend: str, tp: int) -> ParallelDims:
    sizes = {
        "dp_replicate": 1,
        "dp_shard": RANKS // tp,
        "cp": 1,
        "tp": tp,
        "pp": 1,
        "ep": 1,
        "world_size": RANKS,
    }
    dims = ParallelDims(**sizes, spmd_backend=backend)
    dims.build_mesh()
    return dims


def build(
    backend: str,
    tp=RANKS,
    sp=False,
    fsdp=False,
    bias=False,
    dtype=torch.float32,
    precision=torch.float32,
):
    """A model, always with the same numbers; of no backend: unsharded."""
    config = llama3.model_registry("debugmodel", attn_backend="sdpa").model
    config.layers, config.vocab_size = config.layers[:1], VOCAB
    config.tok_embeddings.num_embeddings = config.lm_head.out_features = VOCAB
    config.lm_head.bias = bias
    set_llama3_sharding_config(config, enable_sp=sp)
    config.lm_head.sharding_config.state_shardings["bias"] = dense_param_placement(tp=spmd.S(0))
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    if bias:
        torch.nn.init.normal_(model.lm_head.bias)
    model.to(dtype)
    if not backend:
        return model
    set_spmd_backend(backend)
    dims = parallel(backend, tp)
    if backend == "spmd_types" or tp > 1:
        model.parallelize(dims)
    if fsdp:
        mesh = dims.get_mesh(["fsdp"])
        apply_fsdp_to_decoder(model, mesh, precision, torch.float32, pp_enabled=False)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # the only one that gloo has
        assert isinstance(model.lm_head, FSDPModule)
    return model


def step(
    loss_fn, backend: str, tp=RANKS, typecheck=False, scale=1.0, train=True, inputs=None, **options
):
    """What torchtitan's trainer does in a step -> loss, gradients by name (whole, or this rank's),
    metrics."""
    model = build(backend, tp, **options)
    if isinstance(loss_fn, ChunkedLossWrapper):
        loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    mine = [dist.get_rank()] if tp < RANKS else [0, 1]  # of two sequences
    ids, targets = tokens[mine], labels[mine]
    if typecheck:
        annotate_input_spmd_types(parallel(backend, tp), ids, targets, {})
    context = get_spmd_context(parallel_dims=parallel(backend, tp), spmd_typechecking=typecheck)
    with context(), torch.set_grad_enabled(train):
        loss, metrics = loss_fn(
            model(ids), targets, COUNT if train else None, positions=None, **inputs or {}
        )
        with spmd.no_typecheck():
            if train:
                (scale * loss).backward()
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return whole(loss.detach()), grads, metrics


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


@functools.cache
def host(kind: str, backend: str, train=True, **options):
    loss = CrossEntropyLoss.Config(global_vocab_size=VOCAB)
    if kind == "fused":
        loss = ChunkedLossWrapper.Config(num_chunks=4, loss_fn=loss)
    return step(loss.build(), backend, train=train, **options)


def ours(kind: str, head_loss=None, **options):
    options |= {"head_loss": head_loss or HeadLoss()}
    if kind == "fused":
        return FusedHeadLoss.Config(**options).build()
    logits = LogitsLoss.Config(global_vocab_size=VOCAB, **options)
    return (
        logits.build()
        if kind == "logits"
        else ChunkedLossWrapper.Config(num_chunks=4, loss_fn=logits).build()
    )


def against_host(result, theirs) -> dict:
    assert len(result[1]) == 10 + ("lm_head.bias" in theirs[1])
    return compared(*result[:2], *theirs[:2], head="lm_head.weight")


def same_as_host(kind, backend, group, **options):
    return against_host(step(ours(kind), backend, **options), host(kind, backend, **options))


def typechecked(kind, backend, group, **options):
    """With torchtitan's debug.spmd_typechecking."""
    return against_host(
        step(ours(kind), backend, typecheck=True, **options), host("fused", backend, **options)
    )


def inside_of_chunks(backend, group):
    return against_host(step(ours("chunked"), backend), host("fused", backend))


def linear_options(backend, group):
    """Each mode, and an all_reduce where this is not the host's."""
    found = [
        Linear(mode="recompute", hidden_grad="none"),
        Linear(mode="one_sweep", hidden_grad="none"),
    ]
    found += [Linear(hidden_grad="all_reduce")] if backend == "partial_dtensor" else []
    results = [
        against_host(
            step(ours("fused", linear=linear), backend, sp=sp), host("fused", backend, sp=sp)
        )
        for linear in found
        for sp in (False, True)
    ]
    return worst(results)


class Twice(FusedHeadLoss):
    """Without the check."""

    def _check_reduced(self, backend, weight):
        pass


def wrong_contract(group):
    """dH that is summed here and by the decoder's backward: refused, and what it would do."""
    linear = Linear(hidden_grad="all_reduce")
    refused(
        lambda: step(ours("fused", linear=linear), "spmd_types"), "use Linear(hidden_grad='none')"
    )
    result = step(Twice(FusedHeadLoss.Config(linear=linear)), "spmd_types")
    theirs = host("fused", "spmd_types")
    assert against_host(result, theirs)["loss"] < 1e-6
    errors = relative_errors(result[1], theirs[1])
    return {
        "head": errors.pop("lm_head.weight"),
        "least": min(errors.values()),
        "most": max(errors.values()),
    }


def upstream(backend, group):
    """A loss that is scaled before its backward; torchtitan's chunked loss would not notice."""
    scaled = step(ours("fused"), backend, scale=3.0)
    theirs = host("fused", backend)
    return against_host((scaled[0], {name: x / 3 for name, x in scaled[1].items()}), theirs)


def terms_and_metrics(backend, group):
    """Of all three ways, against plain torch on the whole logits."""
    advantages = torch.linspace(-1, 1, labels.numel()).view(labels.shape)
    own = Term(
        "policy",
        lambda stats, advantages: -stats.log_prob * advantages,
        0.5,
        inputs=("advantages",),
    )
    lowest = Metric(lambda stats: {"min_log_prob": stats.log_prob, "nll": -stats.log_prob})
    head_loss = HeadLoss([CrossEntropy(), ZLoss(1e-2), own], metrics=("accuracy", lowest))
    logits, valid = build("", dtype=torch.float64)(tokens).detach(), labels != -100
    log_prob = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0][valid]
    square, policy = (
        logits.logsumexp(-1)[valid].square().sum() / COUNT,
        -(log_prob * advantages[valid]).sum() / COUNT,
    )
    nll = -log_prob.sum() / COUNT
    expected = {
        "loss/cross_entropy/mean": nll, "loss/z_loss/mean": square, "loss/policy/mean": policy, "nll/mean": nll,
        "accuracy/mean": (logits.argmax(-1) == labels)[valid].sum() / COUNT, "log_prob/min": log_prob.min(),
        "loss": nll + 1e-2 * square + 0.5 * policy,
    }  # fmt: skip
    found, first = {}, None
    for kind in ("logits", "fused", "chunked"):
        loss, grads, metrics = step(
            ours(kind, head_loss), backend, inputs={"advantages": advantages}
        )
        metrics["loss"] = loss
        found[kind] = max(relative_errors(metrics, expected).values())
        first = first or grads
        found[f"{kind}_grads"] = max(relative_errors(grads, first).values())
    return found


def validation(backend, group):
    """Without gradients and without the count: a sum, and no metrics. FSDP has its weight back."""
    found = {}
    for kind, fsdp in itertools.product(("logits", "fused"), (False, backend == "partial_dtensor")):
        loss_fn = ours(kind, HeadLoss(metrics=("accuracy",)))
        loss, grads, metrics = step(loss_fn, backend, train=False, fsdp=fsdp)
        assert not grads and not metrics
        if kind == "fused" and fsdp:
            assert (
                isinstance(loss_fn.lm_head.weight, DTensor)
                and loss_fn.lm_head.weight.device_mesh.ndim == 2
            )
        found[kind + "-fsdp" * fsdp] = relative_errors(
            {"": loss}, {"": host(kind, backend, train=False)[0]}
        )[""]
    return found


def compiled(backend, group):
    compile_config = CompileConfig(enable=True, components=["loss"], backend="aot_eager")
    loss_fn = LogitsLoss.Config(global_vocab_size=VOCAB).build(compile_config=compile_config)
    return against_host(step(loss_fn, backend), host("logits", backend))


def exact(group):
    """Errors of this and of the host's against an unsharded model in float64; the same in FSDP's
    mixed precision."""
    model = build("", dtype=torch.float64)
    loss = (
        torch.nn.functional.cross_entropy(
            model(tokens).flatten(0, 1), labels.flatten(), reduction="sum"
        )
        / COUNT
    )
    loss.backward()
    truth, found = {name: p.grad for name, p in model.named_parameters()}, {}
    for precision in (torch.float32, torch.bfloat16):
        options = {"fsdp": True, "precision": precision}
        results = {"ours": step(ours("fused"), "partial_dtensor", **options)}
        results["host"] = host("fused", "partial_dtensor", **options)
        for name, (value, grads, _) in results.items():
            errors = relative_errors({"loss": value, **grads}, {"loss": loss, **truth})
            label = f"{name}_{str(precision)[6:]}"
            found |= {f"{label}_loss": errors.pop("loss"), f"{label}_grads": max(errors.values())}
    return found


class SoftCapped(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()


def refusals(group):
    for loss in (LogitsLoss, FusedHeadLoss):
        refused(
            lambda loss=loss: loss(HeadLoss()), "config must be a Config, got HeadLoss", TypeError
        )
        words = "head_loss must be a HeadLoss, got Term: write HeadLoss([..])"
        refused(lambda loss=loss: loss.Config(head_loss=CrossEntropy()), words, TypeError)
        refuses_what_its_lines_rule_out(loss.Config)
    refused(lambda: ours("fused", linear="none"), "linear must be a Linear, got str", TypeError)
    refused(lambda: ours("logits", HeadLoss(reduction="sum")), "reduction='mean'")
    refused(lambda: ours("fused", HeadLoss(ignore_index=0)), "ignore_index=-100")
    weighted = HeadLoss(CrossEntropy(class_weight=torch.ones(509)))
    for kind in ("fused", "logits"):
        refused(
            lambda kind=kind: ours(kind, weighted), "global_valid_tokens counts tokens, and terms"
        )
    for linear in (
        Linear(hidden_grad="reduce_scatter"),
        Linear(hidden_grad="none", main_grad=True),
    ):
        refused(
            lambda linear=linear: ours("fused", linear=linear), "use Linear(hidden_grad='none')"
        )
    refused(
        lambda: ours("fused").set_lm_head(SoftCapped(4, VOCAB)),
        "loss_fn=LogitsLoss.Config",
        TypeError,
    )
    refused(
        lambda: ours("fused")(torch.zeros(1, 1, 4), labels[:1, :1]), "set_lm_head(model.lm_head)"
    )
    needy = HeadLoss([Term("t", lambda stats, advantages: advantages, inputs=("advantages",))])
    refused(lambda: step(ours("fused", needy), "spmd_types"), "inputs must be ['advantages']")
    model, fused = build("spmd_types"), ours("fused")
    refused(lambda: ours("logits")(model(tokens), labels), "inside of torchtitan's train_context")
    fused.set_lm_head(model.lm_head)
    refused(lambda: fused(torch.zeros(2, 16, 256), labels), "inside of torchtitan's train_context")
    # outside of the context, where torchtitan sees no "tp"
    refused(
        lambda: LogitsLoss.Config().build()(model(tokens), labels), "give Config(global_vocab_size"
    )
    short = LogitsLoss.Config(global_vocab_size=VOCAB - 1).build()
    refused(lambda: step(short, "partial_dtensor"), "got logits of 211 ids")
    fused.set_lm_head(build("partial_dtensor").lm_head)
    refused(lambda: fused(torch.zeros(2, 16, 256), labels), "nobody would sum dH")
    set_spmd_backend("full_dtensor")
    refused(
        lambda: ours("logits")(torch.zeros(2, 16, VOCAB), labels), "spmd_backend must be one of"
    )
    return {}


def documented(group):
    """The loss of the documented configuration, in a step."""
    names = {}
    exec(marked_block("host", "torchtitan"), names)
    config = names["llama3_with_z_loss"]()
    assert (
        isinstance(config, Trainer.Config)
        and config.to_dict()["loss"]["linear"]["hidden_grad"] == "none"
    )
    loss, grads, metrics = step(config.loss.build(compile_config=config.compile), "spmd_types")
    theirs = host("fused", "spmd_types")
    cross_entropy, square = metrics["loss/cross_entropy/mean"], metrics["loss/z_loss/mean"]
    found = relative_errors(
        {"loss": cross_entropy, "sum": loss},
        {"loss": theirs[0], "sum": cross_entropy + 1e-4 * square},
    )
    return {**found, "accuracy": float(metrics["accuracy/mean"]), "gradients": len(grads)}


CASES = {}
for backend in ("spmd_types", "partial_dtensor"):
    for kind, sp in itertools.product(("logits", "fused"), (False, True)):
        CASES[f"{kind}-{backend}{'-sp' * sp}"] = functools.partial(
            same_as_host, kind, backend, sp=sp
        )
    CASES[f"fused-{backend}-bias"] = functools.partial(same_as_host, "fused", backend, bias=True)
    for case in (linear_options, upstream, terms_and_metrics, validation):
        CASES[f"{case.__name__}-{backend}"] = functools.partial(case, backend)
# FSDP of "spmd_types" needs a newer torch than 2.13.
for name, options in {"fsdp": {}, "sp-fsdp": {"sp": True}, "dp-fsdp": {"tp": 1}}.items():
    CASES[f"fused-partial_dtensor-{name}"] = functools.partial(
        same_as_host, "fused", "partial_dtensor", fsdp=True, **options
    )
for kind, sp in (("logits", False), ("fused", False), ("fused", True), ("chunked", True)):
    CASES[f"typechecked-{kind}{'-sp' * sp}"] = functools.partial(
        typechecked, kind, "spmd_types", sp=sp
    )
CASES["chunked-partial_dtensor"] = functools.partial(inside_of_chunks, "partial_dtensor")
CASES["compiled-spmd_types"] = functools.partial(compiled, "spmd_types")
CASES |= {case.__name__: case for case in (wrong_contract, exact, refusals, documented)}

if __name__ == "__main__":
    main(CASES)
