"""verl's Megatron engine, tensor parallel: steps of its SFT loss, made of its log-probs, with its
own head and with a fused head by `install`.

torchrun --standalone --nproc-per-node 2 scripts/hosts_gpu/verl_engine.py --json verl.json

Real are verl's engine, configuration, micro-batches and loss, and Megatron's model, schedule and
optimizer. Not real: ray, which only starts verl's processes, is an empty module; and
launch/megatron_model.py makes the model, since verl's bridge of a checkpoint needs Transformer
Engine.
"""

import functools
import os
import sys
import tempfile
from types import SimpleNamespace

os.environ |= {"VERL_ENGINE_DEVICE": "cuda", "VERL_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
import torch
from measure import OURS, Run, Train, main

import megatron_pretrain
import without_ray  # noqa: F401
from megatron_model import model_of

if "--tiny" in sys.argv:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import megatron_cpu

    megatron_cpu.pretend()
# whose engines verl would import, too
sys.modules.update(dict.fromkeys(("torchtitan", "nemo_automodel")))
# ruff: noqa: E402
import verl.workers.engine.megatron.transformer_impl as host
from tensordict import TensorDict
from transformers import LlamaConfig
from verl.utils import tensordict_utils
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import sft_loss

from tp_headloss.integrations.verl.engine import install

host.MegatronCheckpointManager = lambda *args, **options: None  # asks for a checkpoint
host.log_gpu_memory_usage = lambda *args, **options: None


def engine_of(run: Run, fused: bool):
    shape, folder = run.shape, tempfile.mkdtemp()
    options = {"tp": run.ranks.world, "lr": 1e-4}
    options |= {
        name: getattr(shape, name) for name in ("vocab", "layers", "hidden", "heads", "length")
    }
    args = megatron_pretrain.parse([f"--{name}={value}" for name, value in options.items()])

    def build_config(engine):
        engine.tf_config, _, engine.made = model_of(args, "head", "none", run.ranks)
        engine.is_value_model = engine.share_embeddings_and_output_weights = False
        engine.param_dtype = engine.dtype = run.dtype
        engine.vanilla_bridge = engine.bridge = engine.provider = engine.peft_cls = None

    host.MegatronEngine._build_tf_config = build_config
    host.MegatronEngine._build_megatron_module = lambda engine: [engine.made]
    LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, num_hidden_layers=shape.layers, tie_word_embeddings=False,
        num_attention_heads=shape.heads, intermediate_size=shape.ffn, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    model = HFModelConfig(
        path=folder, load_tokenizer=False, override_config={"attn_implementation": "eager"}
    )
    model.tokenizer = SimpleNamespace(pad_token_id=0)
    engine = EngineRegistry.new(
        "language_model", "megatron", model_config=model, checkpoint_config=None,
        engine_config=McoreEngineConfig(
            tensor_model_parallel_size=run.ranks.world, sequence_parallel=False, use_distributed_optimizer=False,
            use_fused_kernels=fused, use_remove_padding=False,
        ),
        optimizer_config=McoreOptimizerConfig(
            optimizer="adam", lr=1e-4, lr_decay_style="constant", clip_grad=0.0, weight_decay=0.0,
            total_training_steps=run.shape.steps,
        ),
    )  # fmt: skip
    engine.initialize()
    return engine


def build(run: Run, fused: bool) -> Train:
    installed = install() if fused else None
    engine = engine_of(run, fused)
    if installed:
        installed.remove()  # of engines to come

    def step(ids, labels):
        rows, scored = len(ids), torch.ones_like(ids)
        scored[:, 0] = 0  # no label
        nested = [
            torch.nested.as_nested_tensor(list(x), layout=torch.jagged) for x in (ids, scored)
        ]
        data = TensorDict(
            {"input_ids": nested[0], "loss_mask": nested[1], "temperature": torch.ones(rows)},
            batch_size=[rows],
        )
        sizes = {"micro_batch_size_per_gpu": rows, "global_batch_size": rows}
        tensordict_utils.assign_non_tensor(
            data, use_dynamic_bsz=False, calculate_entropy=False, **sizes
        )
        return torch.tensor(
            engine.train_batch(data, functools.partial(sft_loss, None))["loss"]
        ).sum()

    def train(rows, steps, meter):
        meter.watch(host.unwrap_model(engine.module[0]).decoder.final_layernorm)
        with engine.train_mode():
            run.loop(rows, steps, meter, step)

    return train


if __name__ == "__main__":
    main("verl", {"verl": lambda run: build(run, False), OURS: lambda run: build(run, True)})
