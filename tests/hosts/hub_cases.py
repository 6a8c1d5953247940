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
        try:
            ours(**given)
            wrong += 1
        except ValueError as error:
            wrong += words not in str(error)
    return {"wrong": wrong}


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
OF_RANKS = {versions_side_by_side.__name__: versions_side_by_side}
main({1: OF_ONE_RANK, 2: OF_RANKS})
