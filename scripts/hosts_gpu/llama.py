"""Transformers' Llama of random weights, and a run of its Trainer or of one of TRL's, for other
scripts here."""

import os
import shutil
import tempfile
import zlib
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
import torch
from measure import Meter, Run
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback
from transformers.distributed import DistributedConfig
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()


def unsharded(run: Run) -> LlamaForCausalLM:
    """The same on all ranks and in all scripts."""
    shape = run.shape
    config = LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers, vocab_size=shape.vocab,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, max_position_embeddings=shape.length,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False, dtype=run.dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(run.device):
        return LlamaForCausalLM(config).to(run.dtype).train()


def saved(run: Run) -> Path:
    """A folder with the model's weights, which rank 0 writes once."""
    key = zlib.crc32(repr((run.shape, run.dtype, torch.__version__)).encode())
    path = Path(tempfile.gettempdir()) / f"hosts_gpu-{key}"

    def write():
        if not path.exists():
            part = path.with_name(f"{path.name}.{os.getpid()}")
            unsharded(run).save_pretrained(part)
            try:
                part.rename(path)
            except OSError:  # another run was faster
                shutil.rmtree(part)

    run.ranks.first(write)
    return path


def tensor_parallel(run: Run) -> LlamaForCausalLM:
    """The saved model over all ranks, by its own plan."""
    if run.ranks.world == 1:
        return LlamaForCausalLM.from_pretrained(saved(run), dtype=run.dtype).to(run.device)
    if not run.cuda:  # accelerate does not count CPUs as devices of a tensor parallel model
        import accelerate

        accelerate.Accelerator.multi_device = property(lambda self: self.use_distributed)
    parallel = DistributedConfig(tp_size=run.ranks.world, tp_plan="auto")
    return LlamaForCausalLM.from_pretrained(
        saved(run), dtype=run.dtype, distributed_config=parallel
    )


def arguments(run: Run, rows: int, steps: int) -> dict:
    """Of TrainingArguments and TRL's configurations."""
    return {
        "output_dir": tempfile.gettempdir(), "max_steps": steps, "per_device_train_batch_size": rows, "seed": 0,
        "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": not run.cuda,
        "learning_rate": 1e-4, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "bf16": False,
        "gradient_checkpointing": False, "optim": "adamw_torch_fused",
    }  # fmt: skip


class Steps(TrainerCallback):
    """Reports a Trainer's steps, and the losses that it logs, to a meter."""

    def __init__(self, meter: Meter, logged: str):
        self.meter, self.logged = meter, logged

    def on_step_begin(self, args, state, control, **_):
        # of what GRPO samples, for which it seeds each rank differently
        torch.manual_seed(state.global_step)
        self.meter.begin()

    def on_step_end(self, args, state, control, **_):
        self.meter.end()

    def on_log(self, args, state, control, logs=None, **_):
        if self.logged in logs:
            self.meter.losses.append(float(logs[self.logged]))


def train(trainer, meter: Meter, logged: str = "loss") -> None:
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Steps(meter, logged))
    meter.watch(trainer.model.model.norm)
    try:
        trainer.train()
    finally:
        trainer.model.zero_grad(set_to_none=True)
        # hooks of a tensor parallel model hold the trainer, and that the model
        for p in trainer.model.parameters():
            if p._post_accumulate_grad_hooks:
                p._post_accumulate_grad_hooks.clear()
            p._replicated_grad_hook_registered = False  # so that the next trainer adds its own
