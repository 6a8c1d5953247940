"""torchtitan's Trainer from its configuration to the last step: losses, validation losses and
weights with its own loss and with ours, on two ranks and on four.

Replaced for a CPU: attention, the memory monitor, a barrier that names a GPU, and FSDP's
premultiplied sum, which gloo does not have. Replaced for torch 2.13: FSDP in "spmd_types", which it
refuses for plain parameters, and the step of a pipeline's schedule, to which this torchtitan gives
its micro-batches already cut.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import tempfile

import torch
import torchtitan_cases  # replaces the device before others copy it
from cases import ROOT, main, number_of_ranks, relative_errors

sys.path.append(str(ROOT / "launch"))

VOCAB, STEPS, LENGTH = torchtitan_cases.VOCAB, 2, 16
# ruff: noqa: E402
import torchtitan.models.llama3 as llama3
import torchtitan.models.llama3.parallelize as llama3_parallelize
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.trainer import Trainer

from torchtitan_parts import Batches, Seen, Tokenizer, sums_of_gloo
from tp_headloss import CrossEntropy, HeadLoss
from tp_headloss.integrations.torchtitan import FusedHeadLoss, LogitsLoss


def random_tokens(rows, rank):
    """Other tokens, and another number of labels, for each rank of data parallelism."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        ids = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[0, : 3 + rank] = -100
        yield ids[:, :-1], labels


def parallelize(model, own, parallelism, **options):
    """torchtitan's, with sums of gradients that gloo has, and in "spmd_types" without FSDP, which
    would also be what initializes sharded weights."""
    if parallelism.spmd_backend == "spmd_types":
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights()
        model = own(model, parallelism=parallelism, **options)
        model.to_empty = model.init_weights = lambda **_: model
        return model
    return sums_of_gloo(own(model, parallelism=parallelism, **options))


def pipelining(model, own, **options):
    schedule, *rest = own(model, **options)

    def step(arg_mbs, kwarg_mbs, target_mbs, losses, loss_kwargs, return_outputs):
        schedule._stage.has_backward = schedule._has_backward
        schedule._stage.clear_runtime_states()
        schedule._step_microbatches(
            arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs
        )

    schedule.step = step
    return schedule, *rest


def specification(pp: int, tied: bool):
    """The debug model, a layer for each stage."""
    spec = llama3.model_registry("debugmodel", attn_backend="sdpa")
    config = spec.model
    config.layers, config.vocab_size, config.enable_weight_tying = config.layers[:pp], VOCAB, tied
    config.tok_embeddings.num_embeddings = config.lm_head.out_features = VOCAB
    if tied:
        config.tok_embeddings.param_init = {"weight": skip_param_init}
    return dataclasses.replace(
        spec,
        parallelize_fn=functools.partial(parallelize, own=spec.parallelize_fn),
        pipelining_fn=functools.partial(pipelining, own=spec.pipelining_fn),
    )


def train(
    loss,
    tp=2,
    pp=1,
    backend="partial_dtensor",
    tied=False,
    precision="float32",
    accumulate=1,
    typecheck=False,
):
    """-> what the trainer logged in all steps, and the weights after them by name."""
    data_parallel = number_of_ranks() // (tp * pp)
    validate = pp == 1 and not typecheck  # its batches have no types
    config = Trainer.Config(
        loss=loss,
        model_spec=specification(pp, tied),
        tokenizer=Tokenizer.Config(),
        dataloader=Batches.Config(make=random_tokens),
        metrics=Seen.Config(log_freq=1),
        # a small eps would enlarge rounding
        optimizer=default_adamw(lr=1.0, eps=1.0, weight_decay=0.0),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
        training=TrainingConfig(
            local_batch_size=4,
            global_batch_size=4 * data_parallel * accumulate,
            seq_len=LENGTH,
            steps=STEPS,
            disable_cuda_graphs=True,
            mixed_precision_param=precision,
            max_norm=1e9,
        ),
        parallelism=ParallelismConfig(
            data_parallel_shard_degree=data_parallel,
            tensor_parallel_degree=tp,
            pipeline_parallel_degree=pp,
            spmd_backend=backend,
        ),
        validator=Validator.Config(
            enable=validate, steps=2, freq=2, dataloader=Batches.Config(make=random_tokens)
        ),
        debug=DebugConfig(seed=1, spmd_typechecking=typecheck),
        dump_folder=tempfile.gettempdir(),
    )
    # the trainer does it where there is no group yet
    torch.autograd.set_multithreading_enabled(False)
    llama3_parallelize.apply_fsdp_to_decoder = no_fsdp if backend == "spmd_types" else own_fsdp
    torch.manual_seed(1)
    trainer = Trainer(config)
    trainer.train()
    trainer.close()
    weights = {
        n: torchtitan_cases.whole(p.detach())
        for m in trainer.model_parts
        for n, p in m.named_parameters()
    }
    return torch.tensor(trainer.metrics_processor.seen), weights


own_fsdp = llama3_parallelize.apply_fsdp_to_decoder


def no_fsdp(model, *args, **options):
    pass


@functools.cache
def host(kind, **options):
    loss = CrossEntropyLoss.Config(global_vocab_size=VOCAB)
    return train(
        ChunkedLossWrapper.Config(num_chunks=4, loss_fn=loss) if kind == "fused" else loss,
        **options,
    )


def ours(kind, weight=1.0, **options):
    head_loss = HeadLoss([CrossEntropy(weight=weight)], metrics=("accuracy",))
    if kind == "fused":
        return train(FusedHeadLoss.Config(head_loss=head_loss), **options)
    return train(LogitsLoss.Config(global_vocab_size=VOCAB, head_loss=head_loss), **options)


def errors(result, truth) -> dict:
    """Errors of all that was logged, and the worst of the weights."""
    assert len(result[0]) == len(truth[0]) >= 3 * STEPS and len(result[1]) == len(truth[1]) > 0
    return {
        "logged": float(((result[0] - truth[0]) / truth[0]).abs().max()),
        "weights": max(relative_errors(result[1], truth[1]).values()),
    }


def same_as_host(group, kind, mutant=False, **options):
    """mutant: and what a loss that is 1 % too large would do to the weights."""
    theirs = host(kind, **options)
    found = errors(ours(kind, **options), theirs)
    return found | (
        {"mutant": errors(ours(kind, 1.01, **options), theirs)["weights"]} if mutant else {}
    )


def bf16(group):
    """In FSDP's mixed precision, ours and the host's against the host's in fp32."""
    truth, low = host("fused"), {"precision": "bfloat16"}
    found = {"ours": ours("fused", **low), "host": host("fused", **low)}
    return {
        f"{name}_{key}": x for name, run in found.items() for key, x in errors(run, truth).items()
    }


CASES = {
    2: {
        "logits": {"kind": "logits", "mutant": True},
        "fused": {"kind": "fused", "mutant": True},
        "fused-tied": {"kind": "fused", "tied": True},
        "fused-pp": {"kind": "fused", "tp": 1, "pp": 2},
        "logits-spmd_types": {"kind": "logits", "backend": "spmd_types"},
        "fused-spmd_types": {"kind": "fused", "backend": "spmd_types"},
        "fused-typechecked": {"kind": "fused", "backend": "spmd_types", "typecheck": True},
    },
    4: {
        "fused-fsdp": {"kind": "fused", "accumulate": 2, "mutant": True},
        "fused-fsdp-tied": {"kind": "fused", "tied": True},
        "fused-tp-pp": {"kind": "fused", "pp": 2},
    },
}

if __name__ == "__main__":
    cases = {
        ranks: {name: functools.partial(same_as_host, **options) for name, options in named.items()}
        for ranks, named in CASES.items()
    }
    cases[2]["bf16"] = bf16
    main(cases)
