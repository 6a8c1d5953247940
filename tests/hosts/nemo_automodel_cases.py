"""NeMo-Automodel's own losses and ours, of one small model, tensor parallel on two ranks as its
plans lay it out, and called as its recipes call them (`calculate_loss`); with FSDP on four."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # for TEParallelCrossEntropy, before Triton is imported
import torch
import torch.distributed as dist
from cases import compared, main, number_of_ranks, refused, relative_errors
from nemo_automodel.components.config.loader import load_yaml_config
from nemo_automodel.components.loss import LOSS_CONFIG_REGISTRY
from nemo_automodel.components.loss.chunked_ce import ChunkedCrossEntropy
from nemo_automodel.components.loss.kd_loss import KDLoss
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.components.loss.mtp import calculate_mtp_loss
from nemo_automodel.components.loss.te_parallel_ce import TEParallelCrossEntropy
from nemo_automodel.components.loss.utils import calculate_loss
from nemo_automodel.recipes._typed_config import RecipeConfig
from pages import marked_block, section
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tp_headloss.integrations import nemo_automodel as ours

VOCAB, HIDDEN, COUNT = 211, 32, 50  # not even; of the global batch, more than is here
g = torch.Generator().manual_seed(3)
ids, labels = torch.randint(0, VOCAB, (2, 2, 16), generator=g)
labels[0, :5] = -100
weights, mask = torch.rand(2, 16, generator=g), torch.randint(0, 2, (2, 16), generator=g)


class Model(nn.Module):
    """An embedding, a layer, a norm and the output layer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.norm, self.lm_head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        for p in self.lm_head.parameters():
            nn.init.normal_(p, std=0.3)

    def forward(self, ids):
        """-> logits, hidden states."""
        hidden = self.norm(self.layer(self.embedding(ids)))
        return self.lm_head(hidden), hidden


def build(tp: str, mesh=None, seed=0, dtype=torch.float32) -> Model:
    """Always with the same numbers; tp "" unsharded, "plain", or "sp" with sequence parallelism
    before the head."""
    torch.manual_seed(seed)
    model = Model().to(dtype)
    if not tp:
        return model
    inputs = {"input_layouts": Shard(1)} if tp == "sp" else {}
    plan = {"lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False, **inputs)}
    if tp == "sp":
        rows = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        )
        plan |= {"layer": rows, "norm": SequenceParallel()}
    return parallelize_module(
        model, mesh or init_device_mesh("cpu", (number_of_ranks(),), mesh_dim_names=("tp",)), plan
    )


def gradients(model) -> dict:
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x) for name, x in grads.items()}


def step(
    loss_fn,
    tp="plain",
    targets=labels,
    dtype=torch.float32,
    change=lambda logits: logits,
    **arguments,
):
    """What a recipe does of a micro-batch -> loss, gradients by name, whole."""
    model = build(tp, dtype=dtype)
    logits, hidden = model(ids)
    found = calculate_loss(
        loss_fn, logits=change(logits), labels=targets.clone(), model=model, hidden_states=hidden,
        **{"num_label_tokens": COUNT, **arguments},
    )  # fmt: skip
    (3 * found.sum()).backward()  # the recipe scales it by the number of data-parallel ranks
    found = found.detach()
    assert not isinstance(found, DTensor)
    return found, gradients(model)


def pair(loss_fn, host_fn, host_options=None, **options):
    return compared(
        *step(loss_fn, **options),
        *step(host_fn, **{**options, **(host_options or {})}),
        "lm_head.weight",
    )


# ---- logits

OTHERS = labels.masked_fill(labels == 7, -100).masked_fill(labels == -100, 7)  # 7 is ignored
LOGITS = {
    "sum": ({}, {}),
    "weights": ({}, {"loss_weights": weights}),
    "mean": ({"reduction": "mean"}, {"num_label_tokens": None}),
    "none": ({"reduction": "none"}, {"num_label_tokens": None}),
    "undivided": ({}, {"num_label_tokens": None}),
    "ignore_index": ({"ignore_index": 7}, {"targets": OTHERS}),
    "datasets_label": ({"ignore_index": 7}, {}),  # both are ignored
}


def logits(group, kind):
    made, called = LOGITS[kind]
    return pair(ours.LogitsLoss(**made), MaskedCrossEntropy(**made), **called)


def masked(group):
    """Called alone: calculate_loss has no mask, and replaces the datasets' label before."""
    found = []
    for loss_fn in (ours.LogitsLoss(ignore_index=7), MaskedCrossEntropy(ignore_index=7)):
        model, targets, keep = build("plain"), labels.clone(), mask.clone()
        loss = loss_fn(model(ids)[0], targets, keep, COUNT)
        loss.backward()
        found += [loss.detach(), gradients(model)]
        assert targets.equal(labels) and keep.equal(mask)
    return compared(*found, "lm_head.weight")


def group_of_plain_logits(group):
    """Even shards, as TEParallelCrossEntropy has them."""
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1))
    mine, whole = (
        x[..., 32 * dist.get_rank() :][..., :32].clone().requires_grad_(),
        x.clone().requires_grad_(),
    )
    loss, host = (
        ours.LogitsLoss(tp_group=group)(mine, labels % 64),
        MaskedCrossEntropy()(whole, labels % 64),
    )
    (loss + host).backward()
    grad = whole.grad[..., 32 * dist.get_rank() :][..., :32]
    return compared(loss.detach(), {"x": mine.grad}, host.detach(), {"x": grad}, "x")


def transformer_engine(group):
    """Beside Transformer Engine's kernels, which write into the logits."""
    x = torch.randn(2, 16, 2 * 105, generator=torch.Generator().manual_seed(1))
    mesh, found = init_device_mesh("cpu", (number_of_ranks(),), mesh_dim_names=("tp",)), []
    for loss_fn in (ours.LogitsLoss(), TEParallelCrossEntropy()):
        leaf = distribute_tensor(x, mesh, [Shard(2)]).requires_grad_()
        loss = calculate_loss(
            loss_fn, logits=1 * leaf, labels=labels.clamp(max=209), num_label_tokens=COUNT
        )
        loss.backward()
        found += [loss.detach(), {"x": leaf.grad.full_tensor()}]
    return compared(*found, "x")


def nothing(group):
    """No valid token, or a denominator of 0: a loss of 0, and gradients of 0."""
    found = {}
    for name, loss_fn in {"logits": ours.LogitsLoss(), "fused": ours.FusedHeadLoss()}.items():
        for case, options in {
            "labels": {"targets": labels * 0 - 100},
            "tokens": {"num_label_tokens": 0},
        }.items():
            loss, grads = step(loss_fn, **options)
            found[f"{name}-{case}"] = float(loss.abs() + sum(x.abs().sum() for x in grads.values()))
    loss, grads = distilled(ours.DistillationLoss(), targets=labels * 0 - 100)
    return {**found, "kd": float(loss.abs() + sum(x.abs().sum() for x in grads.values()))}


# ---- hidden states


def fused(group, tp, **options):
    """Beside chunks of the unsharded model: NeMo-Automodel refuses a weight that is sharded over
    "tp"."""
    made = {name: options.pop(name) for name in ("reduction", "ignore_index") if name in options}
    return pair(
        ours.FusedHeadLoss(**made),
        ChunkedCrossEntropy(7, compile=False, **made),
        {"tp": ""},
        tp=tp,
        **options,
    )


def softcap(group):
    host = {"tp": "", "change": lambda x: 2 * torch.tanh(x / 2)}
    return pair(ours.FusedHeadLoss(logit_softcapping=2.0), MaskedCrossEntropy(), host)


def packed(group):
    """Sequences [1, T, H] with labels [T]."""
    found = []
    for loss_fn, tp in (
        (ours.FusedHeadLoss(), "plain"),
        (ChunkedCrossEntropy(7, compile=False), ""),
    ):
        model = build(tp)
        loss = loss_fn(model(ids.view(1, -1))[1], labels.view(-1), model.lm_head.weight, COUNT)
        loss.backward()
        found += [loss.detach(), gradients(model)]
    return compared(*found, "lm_head.weight")


def sharded_by_fsdp(group):
    """A weight that data-parallel ranks share, and other tokens on each."""
    mesh, found = init_device_mesh("cpu", (number_of_ranks(),), mesh_dim_names=("dp",)), []
    for loss_fn in (ours.FusedHeadLoss(), ChunkedCrossEntropy(7, compile=False)):
        model = build("")
        model.lm_head.weight = nn.Parameter(
            distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(0)])
        )
        hidden = model.norm(model.layer(model.embedding(ids[dist.get_rank()])))
        loss = calculate_loss(
            loss_fn, labels=labels[dist.get_rank()], model=model, hidden_states=hidden, num_label_tokens=COUNT,
            grad_reduce_group=group,
        )  # fmt: skip
        loss.backward()
        found += [loss.detach(), gradients(model)]
    return compared(*found, "lm_head.weight")


def fsdp_and_tp(group, reshard):
    """On 2 x 2 ranks, FSDP's shards of the weight gathered by FSDP, as its strategy leaves them, or
    by the loss."""
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), []
    mine = [mesh["dp"].get_local_rank()]
    for loss_fn in (ours.FusedHeadLoss(), MaskedCrossEntropy()):
        model = build("plain", mesh["tp"])
        fully_shard(model.lm_head, mesh=mesh["dp"], reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh["dp"])
        for module in (model, model.lm_head):
            module.set_force_sum_reduction_for_comms(True)  # the only one that gloo has
        logits, hidden = model(ids[mine])
        assert model.lm_head.weight.device_mesh.ndim == 1 + reshard
        loss = calculate_loss(
            loss_fn, logits=logits, labels=labels[mine], model=model, hidden_states=hidden, num_label_tokens=COUNT,
            grad_reduce_group=mesh["dp"].get_group(),
        )  # fmt: skip
        (2 * loss).backward()
        found += [loss.detach(), gradients(model)]
    return compared(*found, "lm_head.weight")


def multi_token(group, kind):
    """Losses of two more depths, which roll the labels."""
    found = []
    makes = {
        "logits": (ours.LogitsLoss(), MaskedCrossEntropy()),
        "fused": (ours.FusedHeadLoss(), MaskedCrossEntropy()),
    }
    for loss_fn in makes[kind]:
        model = build("plain")
        hidden = model(ids)[1]
        loss = calculate_mtp_loss(
            loss_fn, mtp_per_depth_h=[hidden, 2 * hidden], labels=labels, model=model, scaling_factor=0.3,
            num_label_tokens=COUNT,
        )  # fmt: skip
        loss.backward()
        found += [loss.detach(), gradients(model)]
    return compared(*found, "lm_head.weight")


# ---- distillation


def distilled(
    kd, targets=labels, tp="plain", dtype=torch.float32, teacher=lambda x: x, **arguments
):
    model = build(tp, dtype=dtype)
    with torch.no_grad():
        logits = build(tp, seed=1, dtype=dtype)(ids)[0]
    loss = kd(model(ids)[0], teacher(logits), targets.clone(), **arguments)
    loss.backward()
    return loss.detach(), gradients(model)


OUTSIDE = labels.masked_fill(labels == -100, VOCAB + 5).masked_fill(labels == 7, -100).roll(3)
KD = {
    "mean": ({}, {}),
    "count": ({}, {"num_batch_labels": COUNT}),
    "temperature": ({"temperature": 2.0, "chunk_size": 4}, {"num_batch_labels": COUNT}),
    "labels_outside": ({}, {"targets": OUTSIDE}),
    "ignore_index": ({"ignore_index": 7}, {}),
    "unsharded": ({"temperature": 0.5}, {"tp": ""}),
    # of another mesh, cut by the recipe's bridge
    "teacher_plain": ({}, {"teacher": lambda x: x.to_local()}),
}


def kd(group, kind):
    made, called = KD[kind]
    mine, host = (distilled(cls(**made), **called) for cls in (ours.DistillationLoss, KDLoss))
    return compared(*mine, *host, "lm_head.weight")


def kd_group(group):
    """Plain shards of a group that is given."""
    s, t = (
        torch.randn(2, 2, 16, 64, generator=torch.Generator().manual_seed(1))
        .chunk(2, -1)[dist.get_rank()]
        .unbind()
    )
    found = []
    for loss_fn in (
        ours.DistillationLoss(tp_group=group, temperature=2.0),
        KDLoss(tp_group=group, temperature=2.0),
    ):
        x = s.clone().requires_grad_()
        loss = loss_fn(x, t, labels)
        loss.backward()
        found += [loss.detach(), {"x": x.grad}]
    return compared(*found, "x")


def exact(group):
    """Errors against float64 in half precision, ours and the host's, of the logits' gradient."""
    found = {}
    full = (
        torch.randn(2, 2, 16, VOCAB, generator=torch.Generator().manual_seed(1)).mul(4).bfloat16()
    )
    mesh = init_device_mesh("cpu", (number_of_ranks(),), mesh_dim_names=("tp",))
    student, teacher = full.double()
    student.requires_grad_()
    kl = (teacher.softmax(-1) * (teacher.log_softmax(-1) - student.log_softmax(-1))).sum(-1)
    truth = {
        "logits": nn.functional.cross_entropy(
            student.flatten(0, 1), labels.flatten(), reduction="sum"
        ),
        "kd": kl[labels != -100].mean(),
    }
    pairs = {"logits": (ours.LogitsLoss, MaskedCrossEntropy), "kd": (ours.DistillationLoss, KDLoss)}
    for kind, classes in pairs.items():
        (right,) = torch.autograd.grad(truth[kind], student)
        for name, cls in zip(("ours", "host"), classes):
            x, t = (distribute_tensor(part, mesh, [Shard(2)]) for part in full)
            x.requires_grad_()
            loss = cls()(x, t, labels) if kind == "kd" else cls()(x, labels)
            loss.backward()
            found[f"{name}_{kind}_grad"] = relative_errors({"": x.grad.full_tensor()}, {"": right})[
                ""
            ]
            found[f"{name}_{kind}_loss"] = relative_errors(
                {"": loss.detach()}, {"": truth[kind].detach()}
            )[""]
    return found


# ---- configurations


def documented(group):
    """The guide's YAML, read and built as the recipes do."""
    text = section("guides/nemo_automodel.md", "## The losses of a recipe")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(re.search(r"```yaml\n(.*?)```", text, re.S)[1])
        config = load_yaml_config(path)
        loss_fn, kd_loss_fn = RecipeConfig(config).loss_fn.build(), config.kd_loss_fn.instantiate()
    scope = {}
    exec(compile(marked_block("host", "nemo_automodel"), "docs", "exec"), scope)
    made = scope["with_z_loss"]()
    plain, z_loss = step(ours.LogitsLoss())[0], step(made)[0]
    assert plain < z_loss < 1.1 * plain and type(made) is ours.LogitsLoss
    assert type(loss_fn) is ours.FusedHeadLoss and loss_fn.transform.softcap == 30.0
    assert type(kd_loss_fn) is ours.DistillationLoss and kd_loss_fn.temperature == 2.0
    return {}


def names(group):
    """NeMo-Automodel would build its own class in the place of one of its names."""
    assert not LOSS_CONFIG_REGISTRY.keys() & vars(ours).keys() - {"MaskedCrossEntropy"}
    for cls in (ours.LogitsLoss, ours.FusedHeadLoss, ours.DistillationLoss):
        assert type(RecipeConfig({"loss_fn": {"_target_": cls}}).loss_fn.build()) is cls
    return {}


def refusals(group):
    mesh = init_device_mesh("cpu", (number_of_ranks(), 1), mesh_dim_names=("dp", "tp"))
    both = distribute_tensor(torch.zeros(8, 4, requires_grad=True), mesh, [Shard(0), Shard(0)])
    x, y = torch.zeros(1, 2, 8), torch.zeros(1, 2, dtype=torch.int64)
    for call, message in {
        (
            lambda: ours.LogitsLoss(reduction="max")
        ): "reduction must be 'sum', 'mean' or 'none', got 'max'",
        (
            lambda: ours.LogitsLoss(reduction="mean")(x, y, num_label_tokens=3)
        ): "need reduction='sum', got 'mean'",
        (
            lambda: ours.FusedHeadLoss(reduction="none")(x, y, x[0], loss_weights=y)
        ): "need reduction='sum', got 'none'",
        (lambda: ours.FusedHeadLoss.materialize_lm_weight(both)): "must have the 2 ranks",
        (
            lambda: ours.LogitsLoss()(x, y[:, :1])
        ): "must have shape [1, 2] to fit logits, got [1, 1]",
        (lambda: ours.LogitsLoss()(x, y.t())): "must have shape [1, 2] to fit logits, got [2, 1]",
    }.items():
        refused(call, message)
    return {}


def case(function, *args, **options):
    return lambda group: function(group, *args, **options)


CASES = {
    **{f"logits-{kind}": case(logits, kind) for kind in LOGITS},
    **{f"fused-{tp or 'unsharded'}": case(fused, tp) for tp in ("", "plain", "sp")},
    "fused-weights": case(fused, "plain", loss_weights=weights),
    "fused-mean": case(fused, "plain", reduction="mean", num_label_tokens=None),
    "fused-none": case(fused, "plain", reduction="none", num_label_tokens=None),
    "fused-ignore_index": case(fused, "plain", ignore_index=7, targets=OTHERS),
    **{f"kd-{kind}": case(kd, kind) for kind in KD},
    **{f"mtp-{kind}": case(multi_token, kind) for kind in ("logits", "fused")}, "logits-mask": masked,
    "logits-group": group_of_plain_logits, "logits-TE": transformer_engine, "fused-softcap": softcap,
    "fused-packed": packed, "fused-fsdp": sharded_by_fsdp, "kd-group": kd_group, "nothing": nothing, "exact": exact,
    "documented": documented, "names": names, "refusals": refusals,
}  # fmt: skip

FSDP = {
    "fsdp_and_tp-gathered": case(fsdp_and_tp, False),
    "fsdp_and_tp-resharded": case(fsdp_and_tp, True),
}

if __name__ == "__main__":
    main({2: CASES, 4: FSDP})
