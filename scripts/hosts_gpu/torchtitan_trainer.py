"""torchtitan's Trainer, tensor parallel, with its loss of logits, its chunked loss, and with `FusedHeadLoss`.

torchrun --standalone --nproc-per-node 2 scripts/hosts_gpu/torchtitan_trainer.py --json torchtitan.json

--ways names other ways to train: FSDP (the parameters sharded over all GPUs, each with rows of its own, in the place
of tensor parallelism), FSDP_TP2 (tensor parallel over two ranks, FSDP over the others), compile (the model, and
torchtitan's loss of logits), graphs (CUDA graphs, torchtitan's default; the head has no time of its own), checkpoint
(of whole layers, where torchtitan's default keeps half of the GEMMs).
"""

import dataclasses
import functools
import itertools
import sys
import tempfile

import torch
import torch.distributed.fsdp
from measure import FP8, OURS, Run, Train, main

# torch 2.11; of backends that are not trained here
if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    torch.distributed.fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})
if not hasattr(torch.distributed, "set_timeout"):  # torch 2.11
    torch.distributed.set_timeout = lambda timeout, group=None: None
import torchtitan.tools.utils as utils

TINY = "--tiny" in sys.argv
if TINY:
    utils.device_type, utils.device_module = "cpu", torch.cpu  # before others copy them
# ruff: noqa: E402
import torchtitan.models.llama3 as llama3
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.trainer import Trainer

from torchtitan_parts import Batches, Seen, Tokenizer, sums_of_gloo
from tp_headloss import Linear
from tp_headloss.integrations.torchtitan import FusedHeadLoss


def specification(run: Run):
    shape, spec = (
        run.shape,
        llama3.model_registry("debugmodel" if TINY else "1B", attn_backend="sdpa"),
    )
    config = spec.model
    config.layers, config.vocab_size, config.enable_weight_tying = (
        config.layers[: shape.layers],
        shape.vocab,
        False,
    )
    config.tok_embeddings.num_embeddings = config.lm_head.out_features = shape.vocab
    config.tok_embeddings.param_init = {
        "weight": functools.partial(torch.nn.init.normal_, std=0.02)
    }
    own = spec.parallelize_fn
    return dataclasses.replace(
        spec, parallelize_fn=lambda model, **options: sums_of_gloo(own(model, **options))
    )


def build(run: Run, loss: BaseLoss.Config) -> Train:
    ways, world = run.args.ways, run.ranks.world
    run.dp = world if "FSDP" in ways else world // 2 if "FSDP_TP2" in ways else 1

    def batches(rows, rank):
        for step in itertools.count(rank, run.dp):
            ids = run.rows(rows, step)
            yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def train(rows, steps, meter):
        # as the trainer does where there is no group yet
        torch.autograd.set_multithreading_enabled(False)
        training = TrainingConfig(
            local_batch_size=rows, seq_len=run.shape.length, steps=steps, disable_cuda_graphs="graphs" not in ways,
            mixed_precision_param=str(run.dtype).removeprefix("torch."),
        )  # fmt: skip
        parallelism = {
            "data_parallel_shard_degree": run.dp,
            "tensor_parallel_degree": world // run.dp,
        }
        trainer = Trainer(Trainer.Config(
            loss=loss, model_spec=specification(run), tokenizer=Tokenizer.Config(), training=training,
            dataloader=Batches.Config(make=batches), metrics=Seen.Config(log_freq=1), optimizer=default_adamw(lr=1e-4),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0), debug=DebugConfig(seed=1),
            parallelism=ParallelismConfig(**parallelism, spmd_backend="partial_dtensor"),
            dump_folder=tempfile.gettempdir(), compile=CompileConfig(enable="compile" in ways),
            activation_checkpoint=(FullAC if "checkpoint" in ways else SelectiveAC).Config(),
        ))  # fmt: skip
        if "graphs" not in ways:
            meter.watch(trainer.model_parts[0].norm)
        step = trainer.train_step
        trainer.train_step = lambda data: (meter.begin(), step(data), meter.end())
        try:
            trainer.train()
            meter.losses += trainer.metrics_processor.losses
        finally:
            trainer.close()
            del trainer.train_step  # a cycle

    return train


if __name__ == "__main__":
    logits = CrossEntropyLoss.Config(global_vocab_size=None)
    chunks = ChunkedLossWrapper.Config(num_chunks=8, loss_fn=logits)
    fp8 = FusedHeadLoss.Config(linear=Linear(hidden_grad="none", gradients="fp8"))
    losses = {
        "torchtitan": logits,
        OURS: FusedHeadLoss.Config(),
        FP8: fp8,
        "torchtitan, chunks": chunks,
    }
    heads = {name: functools.partial(build, loss=loss) for name, loss in losses.items()}
    main("torchtitan", heads, ways=["FSDP", "FSDP_TP2", "compile", "graphs", "checkpoint"])
