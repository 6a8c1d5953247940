"""The other implementations of a linear head, hidden states and a weight shard to the mean
cross-entropy.

Like those of `peers.py`, none has to be installed: one is imported when it is built. To add one,
write a function under `@peer` that takes a shard and returns `step(hidden, weight, labels)`: hidden
states [tokens, H], the same on all ranks, the weight [columns of this rank, H] and global labels
[tokens], -100 for ignored tokens, to the scalar mean loss. Backward leaves the hidden states'
gradient summed over the group and the weight's of this rank.
"""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers import NEMO_RL_CHUNK, registry, some_group
from torch.utils.checkpoint import checkpoint

from tp_headloss import VocabShard

CHUNKS = 8


PEERS, peer = registry()


def mean(per_token: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    valid = labels >= 0
    return torch.where(valid, per_token, 0.0).sum() / valid.sum()


def require_equal_shards(shard: VocabShard):
    """For those that take a rank's columns to start at its rank times their number; the same answer
    on all ranks."""
    if shard.width * shard.world_size != shard.vocab_size:
        raise ValueError(f"{shard.vocab_size} ids are not {shard.world_size} equal shards")


class SummedGradient(torch.autograd.Function):
    """Replicated hidden states, for a head that gives each rank's part of their gradient, as in
    Megatron."""

    @staticmethod
    def forward(ctx, hidden, group):
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


@peer("torch.compile, chunks", sharded=False, note=f"{CHUNKS} checkpointed chunks of tokens")
def torch_chunks(shard):
    def loss_of_chunk(hidden, weight, labels):
        return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")

    def loss(hidden, weight, labels):
        chunks = zip(hidden.chunk(CHUNKS), labels.chunk(CHUNKS))
        total = sum(checkpoint(loss_of_chunk, h, weight, y, use_reentrant=False) for h, y in chunks)
        return total / (labels >= 0).sum()

    # else the shapes measured before count towards the limit of recompilations
    torch.compiler.reset()
    return torch.compile(loss, dynamic=False, fullgraph=True)


@peer(
    "torch, linear_cross_entropy",
    sharded=False,
    gemms=3,
    note="gradient in forward; torch 2.13 or newer",
)
def torch_linear_cross_entropy(shard):
    from torch.nn import LinearCrossEntropyOptions
    from torch.nn.functional import linear_cross_entropy

    return functools.partial(linear_cross_entropy, options=LinearCrossEntropyOptions())


KAHAN = "skips blocks of small dH; sums in fp32"


@peer(
    "CCE, exact",
    given={"kind": "cce_exact"},
    package="cut-cross-entropy",
    note="skips nothing; sums in fp32",
)
@peer(
    "CCE, Kahan, full C",
    given={"kind": "cce_kahan_full_c"},
    package="cut-cross-entropy",
    note=KAHAN,
)
@peer(
    "CCE",
    given={"kind": "cce"},
    package="cut-cross-entropy",
    note="skips blocks of small gradients; sums in bf16",
)
def cce(shard, kind):
    from cut_cross_entropy import VocabParallelOptions, linear_cross_entropy

    options = (
        None if shard.group is None else VocabParallelOptions(shard.start, shard.stop, shard.group)
    )
    facts = {"impl": kind, "vocab_parallel_options": options}
    return lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels, **facts)


@peer("verl, linear", package="verl", note="the entropy, too; hidden size a multiple of 128")
def verl_linear(shard):
    """Its kernels for a Megatron model. Ignored labels are not among its arguments: its users mask,
    too."""
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    require_equal_shards(shard)

    def step(hidden, weight, labels):
        if shard.group is not None:
            hidden = SummedGradient.apply(hidden, shard.group)
        log_prob, _ = linear_cross_entropy(
            hidden, weight, labels.clamp(min=0), 1.0, "none", shard.group
        )
        return -mean(log_prob, labels)

    return step


@peer(
    "Liger, linear, fp32 dW",
    given={"accum_dtype": torch.float32},
    package="liger-kernel",
    sharded=False,
    gemms=3,
)
@peer("Liger, linear", package="liger-kernel", sharded=False, gemms=3, note="sums dW in bf16")
def liger(shard, accum_dtype=None):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    module = LigerFusedLinearCrossEntropyLoss(accum_dtype=accum_dtype)
    return lambda hidden, weight, labels: module(weight, hidden, labels)


@peer(
    "Liger, linear, CuTe",
    package="liger-kernel",
    sharded=False,
    gemms=3,
    note="on Hopper, keeps all logits",
)
def liger_linear_cute(shard):
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
        liger_fused_linear_cross_entropy_sm90,
    )

    return liger_fused_linear_cross_entropy_sm90


@peer(
    "Liger, linear, scaled CuTe",
    package="liger-kernel",
    sharded=False,
    note="on Hopper; sums dW in bf16",
)
def liger_linear_scaled_cute(shard):
    """Per-token losses, made for policy gradients. Its check of the labels, which waits for the
    device, is off."""
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import (
        LigerFusedScaledCrossEntropySM90Function,
    )

    os.environ["LIGER_SCALED_CE_SM90_VALIDATE_TARGETS"] = "0"
    per_token = LigerFusedScaledCrossEntropySM90Function.apply
    return lambda hidden, weight, labels: mean(per_token(hidden, weight, labels), labels)


@peer(
    "Liger, linear, TP",
    package="liger-kernel",
    note="in torch, without its NVSHMEM kernels; dW in bf16",
)
def liger_linear_sharded(shard):
    """Chunks of 512 tokens, each with two all-reduces, unless `liger_cute_kernels` is installed."""
    from liger_kernel.transformers.functional import liger_fused_linear_scaled_cross_entropy_tp

    require_equal_shards(shard)
    group = some_group(shard)

    def step(hidden, weight, labels):
        return mean(
            liger_fused_linear_scaled_cross_entropy_tp(hidden, weight, labels, group), labels
        )

    return step


@peer("fla, linear", package="fla-core", gemms=3, note="8 chunks; gradient in forward; dW in fp32")
def fla_linear(shard):
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

    require_equal_shards(shard)

    def step(hidden, weight, labels):
        return fused_linear_cross_entropy_loss(hidden, labels, weight, process_group=shard.group)

    return step


QUACK = {"package": "quack-kernels", "sharded": False, "gemms": 3}
OTHER_GPUS = {"use_scaled_exp": False, "tuned": False}


# Its path for other GPUs: GEMMs of torch and, for dW, its own around its kernel for the
# cross-entropy. Tuning would time 44 configurations, 254 launches each, of either of the two GEMMs
# of dW: minutes at these shapes.
@peer("quack, linear, chunks", given=OTHER_GPUS, **QUACK, note="its GEMMs of dW are not tuned")
# Where the hidden size is 4096 its default, 4096 tokens, fails: "m == n makes row/col inference
# ambiguous".
@peer("quack, linear, 2048 tokens", given={"chunk_size": 2048}, **QUACK)
@peer("quack, linear", **QUACK, note="on Hopper, softmax inside the GEMMs")
def quack(shard, **options):
    """Gradient in forward."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return functools.partial(chunked_linear_cross_entropy, **options)


@peer("DeepSpeed, linear", package="deepspeed", note="sums in fp32")
def deepspeed_linear(shard):
    from deepspeed.sequence.linear_cross_entropy import vocab_parallel_linear_cross_entropy

    facts = dict(tp_group=shard.group, vocab_start_index=shard.start, vocab_end_index=shard.stop)
    return functools.partial(vocab_parallel_linear_cross_entropy, **facts)


@peer("NeMo-RL, linear", package="nemo-rl", sharded=False, note="GEMMs of the backward in fp32")
def nemo_rl_linear(shard):
    """Its head for Megatron models. On several ranks, its hidden states are sharded by tokens."""
    from nemo_rl.distributed.model_utils import ChunkedDistributedHiddenStatesToLogprobs

    group = some_group(shard)

    def step(hidden, weight, labels):
        facts = shard.start, shard.stop, NEMO_RL_CHUNK, group
        sequence = hidden.unsqueeze(1), labels.unsqueeze(0)  # [tokens, 1, H], [1, tokens]
        log_prob = ChunkedDistributedHiddenStatesToLogprobs.apply(*sequence, weight, *facts)
        return -mean(log_prob.squeeze(0), labels)

    return step


@peer(
    "prime-rl, linear", package="prime-rl", sharded=False, note="the entropy, too; sums dW in bf16"
)
def prime_rl_linear(shard):
    """Its head in chunks of 8192 tokens, its default, and of 8192 ids."""
    from prime_rl.trainer.models.layers.lm_head import _SequenceChunkedLogProbEntropyFn

    def step(hidden, weight, labels):
        inverse_temperature = torch.ones_like(labels, dtype=torch.float32)
        log_prob, _ = _SequenceChunkedLogProbEntropyFn.apply(
            hidden, weight, labels, inverse_temperature, 8192
        )
        return -mean(log_prob, labels)

    return step
