"""axolotl with its own loss and with the plugin, from the YAML to the last step, on two gloo ranks.

Real are axolotl's configuration and its checks, plugin manager, model loader with its order of
hooks, builder, trainer and collator, on the versions of transformers, PEFT and accelerate that it
pins. Not real: packages that it imports and that do nothing on CPUs are empty modules; the data set
is made here, so nothing is tokenized; accelerate counts CPUs as devices of a tensor parallel model,
and the mesh is one of CPUs, where axolotl asks for "cuda".
"""
# ruff: noqa: E402, as nothing of axolotl may be imported before its packages are there

import importlib.machinery
import os
import re
import sys
import tempfile
import types
from functools import cache, partial
from pathlib import Path
from unittest import mock

os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "ACCELERATE_USE_CPU": "true"}
os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
EMPTY = {"bitsandbytes", "evaluate", "fastcore", "numba", "posthog", "wandb"}


class EmptyPackages:
    """Finder of modules all of whose attributes exist, in the place of packages."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EMPTY:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return mock.MagicMock(__spec__=spec, __name__=spec.name, __path__=[], __version__="0")

    def exec_module(self, module):
        pass


sys.meta_path.append(EmptyPackages())

import accelerate
import axolotl.loaders.model
import torch
import yaml
from axolotl.cli.config import load_cfg
from axolotl.integrations.base import PluginManager
from axolotl.loaders import ModelLoader, load_tokenizer
from axolotl.utils.dict import DictDefault
from axolotl.utils.trainer import setup_trainer
from cases import compared, main, refused, relative_errors
from datasets import Dataset
from pages import marked_block, section
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedTokenizerFast, TrainerCallback
from transformers_cases import config_of, folder, saved, whole

from tp_headloss import integrations
from tp_headloss.integrations import axolotl as ours

PLUGIN = "tp_headloss.integrations.axolotl.HeadLossPlugin"
STEPS = 3
OPTIONS = {
    "datasets": [{"path": "json", "type": "completion"}],  # asked for, and not read
    "sequence_len": 32,
    "micro_batch_size": 2,
    "max_steps": STEPS,
    "optimizer": "sgd",
    "learning_rate": 0.02,
    "lr_scheduler": "constant",
    "max_grad_norm": 0.0,
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "seed": 0,
}
LORA = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_modules": ["q_proj", "lm_head"],
    **{f"lora_{part}_kernel": False for part in ("qkv", "o", "mlp")},  # they need a GPU
}


@cache
def base_model() -> str:
    """Folder with a model and its tokenizer."""
    path = saved("axolotl", config_of())
    words = {f"w{n}": n for n in range(3, 512)}
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, **words}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(path)
    return str(path)


def configuration(*plugins, **options):
    """What axolotl makes of a YAML."""
    PluginManager.get_instance().plugins.clear()  # those of an earlier YAML would stay
    output = folder() / f"axolotl-{os.environ['RANK']}"
    given = {"base_model": base_model(), "output_dir": str(output), **OPTIONS, **options}
    with tempfile.TemporaryDirectory() as at:
        path = Path(at) / "config.yml"
        path.write_text(yaml.safe_dump(given | {"plugins": [*plugins]}))
        cfg = load_cfg(str(path))
    cfg.device_map = None  # axolotl has put the device of a GPU there, as of several ranks
    return cfg


def loaded(cfg):
    tokenizer = load_tokenizer(cfg)
    return ModelLoader(cfg, tokenizer).load()[0], tokenizer


def rows():
    g = torch.Generator().manual_seed(1)
    found = [torch.randint(3, 509, (12,), generator=g).tolist() for _ in range(24)]
    return Dataset.from_list(
        [
            {
                "input_ids": ids,
                "attention_mask": [1] * len(ids),
                "labels": [-100] * (n % 8) + ids[n % 8 :],
            }
            for n, ids in enumerate(found)
        ]
    )


class Gradients(TrainerCallback):
    """Gradients by step and name."""

    def __init__(self):
        self.seen = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.seen |= {
            f"{state.global_step}:{name}": whole(p.grad).clone()
            for name, p in model.named_parameters()
            if p.grad is not None
        }


def trained(*plugins, **options):
    """-> losses that axolotl's trainer logged, gradients, and calls of the output layer."""
    torch.manual_seed(0)
    cfg = configuration(*plugins, **options)
    model, tokenizer = loaded(cfg)
    trainer = setup_trainer(cfg, rows(), None, model, tokenizer, None, STEPS)
    assert trainer.accelerator.num_processes == 2
    gradients, head, calls = Gradients(), model.get_output_embeddings(), []
    trainer.add_callback(gradients)
    # of all modules, as a fused head refuses a hook of the output layer that it would not run
    count = register_module_forward_hook(
        lambda module, *_: calls.append(1) if module is head else None
    )
    with count:
        trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == STEPS
    return torch.tensor(logged), gradients.seen, len(calls)


@cache
def host(options: str):
    """What axolotl's own loss gives with these options, a YAML."""
    return trained(**yaml.safe_load(options) or {})


def same_as_axolotl(head, group, **options):
    own_loss, own_grads, own_calls = host(yaml.safe_dump(options) if options else "")
    loss, grads, calls = trained(PLUGIN, **options)
    assert own_calls == STEPS * options.get("gradient_accumulation_steps", 1) and not calls
    name = next(name for name in grads if name.startswith("0:") and name.endswith(head))
    wrong = {**grads, name: 1.01 * grads[name]}
    return {
        **relative_errors({"loss": loss}, {"loss": own_loss}),
        "grads": max(relative_errors(grads, own_grads).values()),
        "mutant": max(relative_errors(wrong, own_grads).values()),
    }


def parallel(group):
    """A step of a tensor parallel model as axolotl's loader makes it, without its trainer."""
    inputs = {name: torch.tensor(rows()[name][4:8]) for name in ("input_ids", "labels")}

    def step(*plugins):
        cpus = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        made = accelerate.ParallelismConfig(tp_size=2), cpus
        cfg = configuration(*plugins, tensor_parallel_size=2)
        with mock.patch.object(axolotl.loaders.model, "build_parallelism_config", lambda _: made):
            model, _ = loaded(cfg)
        model.train()
        out = model(**inputs, num_items_in_batch=torch.tensor(30))
        out.loss.backward()
        grads = {name: whole(p.grad) for name, p in model.named_parameters()}
        return out.loss.detach(), grads, out.logits, model.lm_head.weight

    own_loss, own_grads, _, _ = step()
    loss, grads, logits, weight = step(PLUGIN)
    assert logits is None and weight.to_local().shape[0] == 256
    return compared(loss, grads, own_loss, own_grads, "lm_head.weight")


def documented(group):
    """The guide's YAML, and the plugin of its Python block."""
    text = section("guides/axolotl.md", "## One line of YAML")
    given = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.S)[1])
    assert given == {"plugins": [PLUGIN]}
    made = types.ModuleType("my_losses")
    exec(compile(marked_block("host", "axolotl"), "docs", "exec"), vars(made))
    with mock.patch.dict(sys.modules, my_losses=made):
        loss, _, _ = trained("my_losses.WithZLoss")
    plugin = PluginManager.get_instance().plugins["my_losses.WithZLoss"]
    means = plugin.fused.last.means()
    assert {"loss/cross_entropy", "loss/z_loss", "accuracy"} <= means.keys(), means
    plain, _, _ = host("")
    assert bool((plain < loss).all() and (loss < 1.1 * plain).all())
    return {}


def refusals(group):
    plugin = ours.HeadLossPlugin()
    for name in ours.OTHER_LOSSES:
        refused(
            lambda: plugin.pre_model_load(DictDefault({name: "dpo"})),  # noqa: B023
            f"got {name}: 'dpo', which is another loss",
        )
        plugin.pre_model_load(DictDefault({name: None}))
    fsdp = {"fsdp_config": {"cpu_ram_efficient_loading": True}}
    refused(
        lambda: plugin.pre_model_load(DictDefault(fsdp)),
        "needs fsdp_config.cpu_ram_efficient_loading: false, got true",
    )
    refused(lambda: loaded(configuration(PLUGIN, use_eaft=True)), "got use_eaft: True")
    for name in ("axolotl", "transformers"):
        with mock.patch.dict(integrations.TESTED, {name: ("99.0", "99.1", name)}):
            refused(lambda: loaded(configuration(PLUGIN)), f"{name} >= 99.0", ImportError)
    return {}


CASES = {
    "plain": partial(same_as_axolotl, "lm_head.weight"),
    "accumulated": partial(same_as_axolotl, "lm_head.weight", gradient_accumulation_steps=2),
    "LoRA": partial(same_as_axolotl, "lm_head.lora_B.default.weight", **LORA),
    "documented": documented,
    "refusals": refusals,
    "parallel": parallel,  # the last: axolotl writes the sizes into the environment
}

if __name__ == "__main__":
    main(CASES)
