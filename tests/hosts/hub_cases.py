"""The package as a kernel of Hugging Face's hub, from disk, with `kernels` and transformers: cases for
test_hub.py."""

import copy
import functools
import importlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
import transformers
from cases import ROOT, main
from kernels import (
    LocalLayerRepository,
    Mode,
    get_local_kernel,
    kernelize,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
)
from pages import marked_block
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers.distributed import DistributedConfig
from transformers.loss.loss_utils import ForCausalLMLoss

import tp_headloss as hl

IGNORED, VOCAB = -100, 96


@functools.cache
def repository() -> Path:
    """A repository as scripts/hub.sh makes it."""
    folder = Path(tempfile.mkdtemp()) / "hub"
    subprocess.run(["bash", str(ROOT / "scripts/hub.sh"), str(folder)], check=True)
    return folder


@functools.cache
def another_version() -> Path:
    """A repository of another content."""
    folder = repository().parent / "two"
    shutil.copytree(repository(), folder)
    for path in folder.glob("build/*/metadata.json"):
        facts = json.loads(path.read_text())
        path.write_text(json.dumps(facts | {"id": facts["id"] + "_two"}))
    return folder


def problem(seed=0, tokens=12):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, tokens, VOCAB, generator=generator)
    labels = torch.randint(VOCAB, (2, tokens), generator=generator)
    labels[0, :4] = IGNORED
    return logits, labels


def step(package, logits, labels, **given):
    x = logits.clone().requires_grad_()
    package.HeadLoss([package.CrossEntropy(), package.ZLoss(0.1)])(
        x, labels, **given
    ).loss.backward()
    return x.grad


def versions_side_by_side(group):
    """Two kernels and the installed package give the same bits, compiled, too, on shards, too."""
    logits, labels = problem()
    packages = [hl, *(get_local_kernel(x) for x in (repository(), another_version()))]
    expected = step(hl, logits, labels)
    same = [torch.equal(expected, step(package, logits, labels)) for package in packages]
    rank, half = group.rank(), VOCAB // 2
    part = logits[..., rank * half : (rank + 1) * half].contiguous()
    for package in packages:
        shard = package.VocabShard.from_group(group, VOCAB)
        found = step(package, part, labels, shard=shard)
        same.append(torch.allclose(found, expected[..., rank * half : (rank + 1) * half]))
        if rank == 0:  # alone, as the logits are whole: it takes seconds
            head = package.HeadLoss()
            compiled = torch.compile(lambda x, head=head: head(x, labels).loss, backend="aot_eager")
            same.append(torch.equal(compiled(logits), head(logits, labels).loss))
            torch.compiler.reset()
    names = {package.__name__ for package in packages}
    return {"different": same.count(False), "packages": len(names)}


@use_kernel_forward_from_hub("ForCausalLMLoss")
class StockLoss(nn.Module):
    """The loss of transformers as a layer whose forward `kernels` may replace."""

    def forward(
        self,
        logits=None,
        labels=None,
        vocab_size=None,
        num_items_in_batch=None,
        ignore_index=IGNORED,
        shift_labels=None,
        hidden_states=None,
        lm_head_weight=None,
        lm_head_bias=None,
        **kwargs,
    ):
        if logits is None:
            logits = nn.functional.linear(hidden_states, lm_head_weight, lm_head_bias)
        return ForCausalLMLoss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )


def kernelized(layer):
    found = copy.deepcopy(layer)
    layer_repository = LocalLayerRepository(repository(), layer_name="ForCausalLMLoss")
    for mode in (Mode.TRAINING, Mode.TRAINING | Mode.TORCH_COMPILE):
        with use_kernel_mapping({"ForCausalLMLoss": {"cpu": {mode: layer_repository}}}):
            found = kernelize(found, mode=mode, device="cpu")
    assert type(found).forward is not found.forward.__func__, "nothing was replaced"
    return found


def layer(_group):
    """The kernel's layer is transformers' loss, from logits and from hidden states."""
    logits, labels = problem()
    hidden, weight, bias = (torch.randn(*shape) for shape in ((2, 12, 8), (VOCAB, 8), (VOCAB,)))
    shifted = nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)
    stock, worst = StockLoss(), 0.0
    ours = kernelized(stock)
    operands = (
        {"logits": logits},
        {"hidden_states": hidden, "lm_head_weight": weight},
        {"hidden_states": hidden, "lm_head_weight": weight, "lm_head_bias": bias},
    )
    for operand in operands:
        for given in (
            {"labels": labels},
            {"labels": labels, "num_items_in_batch": 7},
            {"labels": labels, "num_items_in_batch": torch.tensor(9)},
            {"labels": None, "shift_labels": shifted},
            {"labels": labels.where(labels != IGNORED, 2), "ignore_index": 2},
        ):
            results = []
            for one in (stock, ours):
                leaves = {name: x.clone().requires_grad_() for name, x in operand.items()}
                loss = one(**leaves, vocab_size=VOCAB, **given)
                loss.backward()
                results.append((loss.detach(), *(x.grad for x in leaves.values())))
            for a, b in zip(*results):
                worst = max(worst, float((a - b).abs().max() / b.abs().max()))
    return {"worst": worst}


def refusals(_group):
    """What the layer does not understand it refuses."""
    logits, labels = problem()
    ours, wrong = kernelized(StockLoss()), 0
    for given, words in (
        ({"labels": labels}, "got []"),
        ({"logits": logits, "hidden_states": logits, "labels": labels}, "got ['logits', 'hidden"),
        ({"hidden_states": logits, "labels": labels}, "got ['hidden_states']"),
        ({"logits": logits, "labels": labels, "vocab_size": 95}, "vocab_size must be 96"),
    ):
        wrong += not refuses(ours, words, **given)
    return {"wrong": wrong}


def refuses(layer, words, **given) -> bool:
    try:
        layer(**given)
    except ValueError as error:
        return words in str(error)
    return False


HEADS = "logits", "DTensor logits", "weight", "with a bias", "DTensor hidden states", "uneven"


def sharded_operands(group, kind):
    """Operands as a model that is tensor parallel over "tp" has them, and where their gradients
    belong: leaves by name, with the whole tensors."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    vocab = VOCAB - 1 if kind == "uneven" else VOCAB
    logits, labels = problem()
    hidden, weight, bias = (torch.randn(*x) for x in ((2, 12, 8), (vocab, 8), (vocab,)))
    whole = {"hidden_states": hidden, "lm_head_weight": weight, "lm_head_bias": bias}
    whole = {"logits": logits} if "logits" in kind else whole
    if kind != "with a bias":
        whole.pop("lm_head_bias", None)
    placements = {
        "logits": Shard(-1) if kind == "DTensor logits" else None,
        "hidden_states": Replicate() if kind == "DTensor hidden states" else None,
        "lm_head_weight": Shard(0),
        "lm_head_bias": Shard(0),
    }
    cut = {
        name: x if placements[name] is None else distribute_tensor(x, mesh, [placements[name]])
        for name, x in whole.items()
    }
    return cut, whole, labels.clamp(max=vocab - 1), vocab


def leaves_of(operands):
    return {name: x.detach().clone().requires_grad_() for name, x in operands.items()}


def sharded_layer(group):
    """The layer's loss and gradients of DTensors, and of whole plain logits, are those of
    transformers' loss from whole tensors."""
    ours, worst = kernelized(StockLoss()), 0.0
    for kind in HEADS:
        cut, whole, labels, vocab = sharded_operands(group, kind)
        results = []
        for one, operands in ((StockLoss(), whole), (ours, cut)):
            for items in (None, 7):
                leaves = leaves_of(operands)
                given = {"labels": labels, "vocab_size": vocab, "num_items_in_batch": items}
                loss = one(**leaves, **given)
                loss.backward()
                grads = [x.grad for x in leaves.values()]
                grads = [x.full_tensor() if isinstance(x, DTensor) else x for x in grads]
                results += [(loss.detach(), *grads)]
        assert not isinstance(results[2][0], DTensor)
        for expected, found in zip(results[:2], results[2:], strict=True):
            for a, b in zip(found, expected, strict=True):
                worst = max(worst, float((a - b).abs().max() / b.abs().max()))
    return {"worst": worst}


def sharded_refusals(group):
    """One rank's part of the vocabulary as a plain tensor, whose loss would be another one, and
    rows that are sharded over ranks of which nobody says that they hold the same tokens."""
    ours, wrong = kernelized(StockLoss()), 0
    cut, whole, labels, _ = sharded_operands(group, "weight")
    hidden, rows = cut["hidden_states"], cut["lm_head_weight"].to_local()
    logits = {"logits": problem()[0][..., : VOCAB // 2], "labels": labels}
    linear = {"hidden_states": hidden, "labels": labels}
    part = {**linear, "lm_head_weight": rows}
    data = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    weight = whole["lm_head_weight"]
    for mesh in (data, init_device_mesh("cpu", (2,))):
        rows_of_data = distribute_tensor(weight, mesh, [Shard(0)])
        given = {**linear, "lm_head_weight": rows_of_data, "vocab_size": VOCAB}
        wrong += not refuses(ours, "must be sharded over the mesh's dimension 'tp'", **given)
    for given in (logits, part):
        wrong += not refuses(ours, "vocab_size must be 48", **given, vocab_size=VOCAB)
        wrong += not refuses(ours, "vocab_size is needed", **given)
    return {"wrong": wrong}


def tensor_parallel(group):
    """A model that transformers loads with its own plan, and the layer from its gathered logits,
    from its weight, and in a training: losses and gradients are those of the model alone."""
    path = Path(os.environ["CASES_STORE"]).parent / "tiny"
    if group.rank() == 0:
        tiny().save_pretrained(path)
    torch.distributed.barrier()
    ours, ids = kernelized(StockLoss()), torch.arange(24).reshape(2, 12)
    alone, parallel = (
        transformers.LlamaForCausalLM.from_pretrained(path, distributed_config=config)
        for config in (None, DistributedConfig(tp_size=2, tp_plan="auto"))
    )

    def from_logits(model):
        return model(input_ids=ids, labels=ids).loss

    def from_hidden(model):
        states = model.model(input_ids=ids).last_hidden_state
        weight, vocab = model.lm_head.weight, model.config.vocab_size
        return ours(hidden_states=states, lm_head_weight=weight, labels=ids, vocab_size=vocab)

    expected = run(alone, from_logits)
    parallel.loss_function = ours
    worst, sharded = 0.0, isinstance(parallel.lm_head.weight, DTensor)
    for loss in (from_logits, from_hidden):
        found = run(parallel, loss)
        errors = [float((found[x] - y).norm() / y.norm()) for x, y in expected.items()]
        worst = max(worst, *errors)
    losses = []
    for model in (alone, parallel):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(20):
            loss = from_logits(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    trained = max(abs(a - b) / a for a, b in zip(losses[:20], losses[20:], strict=True))
    return {"worst": worst, "trained": trained, "least": losses[0] / losses[19], "cut": sharded}


def run(model, loss_of) -> dict:
    """The loss and the gradients by name, whole."""
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    whole = {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in grads.items()}
    return {"loss": loss.detach(), **{name: x.clone() for name, x in whole.items()}}


def tiny():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def losses_of_training(loss):
    """20 steps of the Trainer with this loss function of the model."""
    model, losses = tiny(), []

    def recorded(*args, **kwargs):
        found = loss(*args, **kwargs)
        losses.append(float(found))
        return found

    model.loss_function = recorded
    ids = (torch.arange(40)[:, None] + torch.arange(12)) % VOCAB
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=20, per_device_train_batch_size=2, logging_steps=1, report_to=[],
            save_strategy="no", use_cpu=True, learning_rate=1e-2, disable_tqdm=True,
        )  # fmt: skip
        rows = [{"input_ids": x, "labels": x} for x in ids]
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        trainer.train()
    return losses


def trainer(_group):
    """The Trainer's losses with the kernel's layer are its own, over 20 steps."""
    own, ours = losses_of_training(ForCausalLMLoss), losses_of_training(kernelized(StockLoss()))
    assert len(own) == len(ours) == 20
    return {"worst": max(abs(a - b) / a for a, b in zip(own, ours)), "least": own[0] / own[-1]}


def adapters(_group):
    """The adapters of a kernel are its own, beside an installed package."""
    kernel = get_local_kernel(repository())
    adapter = importlib.import_module(f"{kernel.__name__}.integrations.transformers")
    model, ids = tiny(), torch.arange(24).reshape(2, 12)
    expected = model(input_ids=ids, labels=ids).loss
    expected.backward()
    other = tiny()
    adapter.fuse_head(other)
    found = other(input_ids=ids, labels=ids).loss
    found.backward()
    pairs = zip(model.parameters(), other.parameters())
    return {
        "loss": float((found - expected).abs()),
        "grads": max(float((a.grad - b.grad).abs().max()) for a, b in pairs),
    }


def documented(_group):
    """The block of docs/install.md."""
    logits, labels = problem()
    scope, before = {}, Path.cwd()
    os.chdir(repository().parent)
    exec(marked_block("host", "kernels"), scope)
    os.chdir(before)
    (found,) = {type(scope[name]).__module__.partition(".")[0] for name in ("head_loss", "layer")}
    assert found == scope["headloss"].__name__
    expected = hl.HeadLoss([hl.CrossEntropy(), hl.ZLoss(1e-4)])(logits, labels).loss
    return {"loss": float((scope["head_loss"](logits, labels).loss - expected).abs())}


OF_ONE_RANK = {x.__name__: x for x in (layer, refusals, trainer, adapters, documented)}
OF_RANKS = {
    x.__name__: x for x in (versions_side_by_side, sharded_layer, sharded_refusals, tensor_parallel)
}
main({1: OF_ONE_RANK, 2: OF_RANKS})
