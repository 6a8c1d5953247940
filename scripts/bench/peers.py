"""The other implementations that `bench.py` measures, each called the way its users call it.

None has to be installed: one is imported when it is built, and reported as absent if that fails. To
add one, write a function under `@peer` that takes a task's name and a shard and returns a function
of a `Batch`: the scalar mean loss.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tp_headloss import VocabShard

# Large enough for a missing term to show in the check; what they are does not change the time.
Z_WEIGHT, ENTROPY_WEIGHT, KL_WEIGHT, CLIP, SMOOTHING = 0.01, 0.1, 0.05, 0.2, 0.1


@dataclass(frozen=True)
class Batch:
    """What a loss is computed from on one rank."""

    logits: torch.Tensor  # [tokens, columns of this rank], requires grad
    labels: torch.Tensor  # [tokens] global ids; -100 is ignored
    mask: torch.Tensor  # [tokens] fp32, 0 where the label is ignored
    # tokens that are not ignored: a data loader knows it, so nothing has to wait for the device
    count: int
    shard: VocabShard
    extras: dict[str, torch.Tensor] = field(default_factory=dict)  # what the task needs besides

    def mean(self, per_token: torch.Tensor) -> torch.Tensor:
        """How users of a loss that returns one number per token average it: by their own mask and
        count."""
        return (per_token.flatten() * self.mask).sum() / self.count


@dataclass(frozen=True)
class Peer:
    name: str
    tasks: tuple[str, ...]  # of `bench.py`
    build: Callable[..., Callable]
    package: str = "torch"  # the distribution whose version is reported
    sharded: bool = True  # knows a vocabulary that is sharded over ranks
    note: str = ""
    gemms: int = 4  # of a linear head: three if the logits are made once


# contexts that a peer needs around forward and backward; they outlive its calls
ENTERED = contextlib.ExitStack()


def registry() -> tuple[list[Peer], Callable]:
    """A list of peers, and the decorator that adds a function to it."""
    peers: list[Peer] = []

    def peer(name: str, *tasks: str, given: dict | None = None, **facts):
        """given: keywords that this peer's `build` gets besides; of several above a function, the
        lowest is first."""

        def register(build):
            peers.append(Peer(name, tasks, functools.partial(build, **given or {}), **facts))
            return build

        return register

    return peers, peer


PEERS, peer = registry()


def some_group(shard: VocabShard):
    """The shard's group, or one of this process alone for libraries that insist on a group."""
    if shard.group is not None:
        return shard.group
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def z_weight(task: str) -> float:
    return Z_WEIGHT if task == "ce+z" else 0.0


@peer("torch", "ce", sharded=False)
def torch_cross_entropy(task, shard):
    return lambda batch: F.cross_entropy(batch.logits, batch.labels)


@peer("torch loss_parallel", "ce")
def torch_loss_parallel(task, shard):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    group = some_group(shard)
    mesh = functools.cache(lambda device_type: DeviceMesh.from_group(group, device_type))
    ENTERED.enter_context(loss_parallel())  # changes nothing but two operators on DTensors

    def loss(batch):
        place = dict(
            device_mesh=mesh(batch.logits.device.type), placements=[Shard(1)], run_check=False
        )
        shape, stride = (len(batch.labels), shard.vocab_size), (shard.vocab_size, 1)
        logits = DTensor.from_local(batch.logits, **place, shape=torch.Size(shape), stride=stride)
        return F.cross_entropy(logits.float(), batch.labels).to_local()

    return loss


def in_sequences(function, *args, **keywords):
    """The mean of per-token losses of logits [sequence, batch, columns]."""
    return lambda batch: batch.mean(
        function(batch.logits.unsqueeze(1), batch.labels.unsqueeze(1), *args, **keywords)
    )


@peer("Megatron-Core", "ce", package="megatron-core")
def megatron(task, shard):
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    return in_sequences(vocab_parallel_cross_entropy, tp_group=some_group(shard))


@peer("Megatron-Core, fused", "ce", package="megatron-core")
def megatron_fused(task, shard):
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    return in_sequences(fused_vocab_parallel_cross_entropy, some_group(shard))


@peer(
    "Transformer Engine, in place",
    "ce",
    package="transformer-engine",
    given={"overwrite_input": True},
)
@peer("Transformer Engine", "ce", package="transformer-engine")
def transformer_engine(task, shard, **options):
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    return in_sequences(parallel_cross_entropy, 0.0, False, shard.group, **options)


def verl_loss(batch, log_prob, entropy):
    """Its policy loss, k3, entropy and metrics; without its dual clip and clamps, which the task
    does not have."""
    extras = batch.extras
    log_ratio, gap = log_prob - extras["old_log_prob"], extras["reference_log_prob"] - log_prob
    ratio, advantage = log_ratio.exp(), extras["advantages"]
    free, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)
    policy, k3, bonus = map(
        batch.mean, (torch.maximum(free, clipped), gap.exp() - gap - 1, entropy)
    )
    for metric in (-log_ratio, (clipped > free).float()):
        batch.mean(metric.detach())
    return policy + KL_WEIGHT * k3 - ENTROPY_WEIGHT * bonus


@peer("verl", "rl", "log_prob+entropy", package="verl")
def verl(task, shard):
    """Its Megatron engine, from the logits on. Megatron's model wrapper makes them fp32 before verl
    sees them."""
    from megatron.core import parallel_state
    from verl.utils.megatron.tensor_parallel import (
        vocab_parallel_entropy,
        vocab_parallel_log_probs_from_logits,
    )

    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = some_group(shard)

    def loss(batch):
        logits = batch.logits.to(torch.float32, copy=True).unsqueeze(0)  # [1, tokens, columns]
        logits.div_(logits.new_ones(*logits.shape[:2], 1))  # the temperature
        kept = logits.clone()  # to be overwritten by the log-probs
        entropy = vocab_parallel_entropy(logits).squeeze(0)
        log_prob = vocab_parallel_log_probs_from_logits(kept, batch.labels.unsqueeze(0)).squeeze(0)
        if task == "rl":
            return verl_loss(batch, log_prob, entropy)
        return -batch.mean(batch.extras["log_prob"] * log_prob + batch.extras["entropy"] * entropy)

    return loss


@peer(
    "Liger",
    "ce",
    "ce+z",
    package="liger-kernel",
    sharded=False,
    note="gradient in forward, over the logits",
)
def liger(task, shard):
    from liger_kernel.transformers import LigerCrossEntropyLoss

    module = LigerCrossEntropyLoss(lse_square_scale=z_weight(task))
    return lambda batch: module(batch.logits, batch.labels)


@peer(
    "Liger, CuTe",
    "ce",
    "ce+z",
    package="liger-kernel",
    sharded=False,
    note="gradient in forward, over the logits",
)
def liger_cute(task, shard):
    """Its kernel in the CuTe DSL, which it uses for this loss only on request."""
    import cutlass.cute  # noqa: F401
    from liger_kernel.backends import dispatch

    options = dict(lse_square_scale=z_weight(task), impl="nvidia-cutedsl")
    return lambda batch: dispatch("cross_entropy", batch.logits, batch.labels, **options)[0]


FP32 = {
    "package": "liger-kernel",
    "sharded": False,
    "note": "log-probs in fp32",
    "given": {"dtype": torch.float32},
}


@peer("Liger, x.float()", "kl", "reverse_kl", "jsd", **FP32)
@peer(
    "Liger",
    "kl",
    "reverse_kl",
    "jsd",
    package="liger-kernel",
    sharded=False,
    note="log-probs like logits",
)
def liger_divergence(task, shard, dtype=None):
    """Of log-probs, which its users make in torch. In Triton, unless the CuTe DSL that it prefers
    is installed."""
    from liger_kernel.transformers import LigerJSD, LigerKLDIVLoss

    jsd = LigerJSD(beta=1.0 if task == "reverse_kl" else 0.5)
    kl = LigerKLDIVLoss(reduction="batchmean", log_target=True)

    def loss(batch):
        both, labels = (batch.logits, batch.extras["teacher"]), batch.labels
        if task == "kl" and batch.count < len(labels):  # which it cannot ignore
            both = [logits[labels >= 0] for logits in both]
        log_p, log_q = (logits.log_softmax(-1, dtype=dtype) for logits in both)
        return kl(log_p, log_q) if task == "kl" else jsd(log_p, log_q, labels)

    return loss


@peer("Liger, vocab-parallel", "ce", package="liger-kernel")
def liger_vocab_parallel(task, shard):
    from liger_kernel.transformers import LigerVocabParallelCrossEntropy

    return in_sequences(LigerVocabParallelCrossEntropy(), shard.group)


@peer("flash-attention, in place", "ce", package="flash-attn", given={"inplace": True})
@peer("flash-attention", "ce", "ce+z", package="flash-attn")
def flash_attention(task, shard, inplace=False):
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    options = dict(
        lse_square_scale=z_weight(task), inplace_backward=inplace, process_group=shard.group
    )
    return lambda batch: batch.mean(cross_entropy_loss(batch.logits, batch.labels, **options)[0])


@peer("quack, in place", "ce", package="quack-kernels", sharded=False, given={"inplace": True})
@peer("quack", "ce", package="quack-kernels", sharded=False)
def quack(task, shard, inplace=False):
    from quack import cross_entropy

    return lambda batch: cross_entropy(batch.logits, batch.labels, inplace_backward=inplace)


@peer("quack, one launch", "ce", package="quack-kernels", sharded=False, note="gradient in forward")
def quack_one_launch(task, shard):
    """Its forward that writes the gradient, too; of a mean by a class weight of 1 / count."""
    from quack.cross_entropy import cross_entropy_fwd

    weights = functools.cache(
        lambda *key: torch.full((shard.vocab_size,), 1 / key[0], device=key[1])
    )

    def loss(batch):
        logits, weight = batch.logits.detach(), weights(batch.count, batch.logits.device)
        losses, gradient = cross_entropy_fwd(logits, batch.labels, weight=weight, return_dx=True)
        return _GradientAtHand.apply(batch.logits, losses.sum(), gradient)

    return loss


@peer("DeepSpeed", "ce", package="deepspeed")
def deepspeed(task, shard):
    """Its loss in torch; the one for sequence parallelism gathers the same per-token losses."""
    from deepspeed.sequence.cross_entropy import vocab_parallel_cross_entropy

    facts = dict(
        tp_group=shard.group,
        vocab_start_index=shard.start,
        vocab_end_index=shard.stop,
        reduction="mean",
    )
    return lambda batch: vocab_parallel_cross_entropy(batch.logits, batch.labels, **facts)


NEMO_RL_CHUNK = 1024  # tokens, as in its distillation


@peer("NeMo-RL", "log_prob+entropy", package="nemo-rl")
def nemo_rl_log_prob_and_entropy(task, shard):
    """Its chunked functions, one for log-probs and one for the entropy."""
    from nemo_rl.distributed.model_utils import ChunkedDistributedEntropy, ChunkedDistributedLogprob

    group = some_group(shard)

    def loss(batch):
        logits, labels = batch.logits.unsqueeze(0), batch.labels.unsqueeze(0)
        log_prob = ChunkedDistributedLogprob.apply(
            logits, labels, shard.start, shard.stop, NEMO_RL_CHUNK, group
        )
        negative_entropy = ChunkedDistributedEntropy.apply(logits, NEMO_RL_CHUNK, group)
        a, b = batch.extras["log_prob"], batch.extras["entropy"]
        return batch.mean(b * negative_entropy.squeeze(0) - a * log_prob.squeeze(0))

    return loss


class _GradientAtHand(torch.autograd.Function):
    """A loss that came with its gradient, for an upstream gradient of 1: how Fast-LLM itself enters
    autograd."""

    @staticmethod
    def forward(ctx, logits, loss, gradient):
        ctx.gradient = gradient
        return loss.clone()

    @staticmethod
    def backward(ctx, upstream):
        return ctx.gradient, None, None


def fast_llm_metrics(batch, label_counts, softmax, weighted):
    """Its policy metrics, the tokens taken for one document: means, sums for the ratio's variance,
    extremes."""
    highest, total, target = softmax
    advantage, old, valid = batch.extras["advantage"], batch.extras["old"], batch.labels >= 0
    log_total, share = total.log(), batch.mask / label_counts.clamp(min=1)
    log_ratio = target - highest - log_total - old
    ratio, entropy = log_ratio.exp(), log_total - weighted / total
    clipped = ((ratio < 1 - CLIP) | (ratio > 1 + CLIP)).float()
    means = [
        (x * share).sum() for x in (old, ratio, ratio - log_ratio - 1, clipped, advantage, entropy)
    ]
    sums = [(x * batch.mask).sum() for x in (ratio, ratio * ratio)]
    extremes = [
        torch.where(valid, advantage, -torch.inf).max(),
        torch.where(valid, advantage, torch.inf).min(),
    ]
    return [*means, *sums, *extremes, batch.mask.sum()]


@peer("Fast-LLM", "ce", "ce+z", "grpo", package="fast-llm", note="gradient in forward")
def fast_llm(task, shard):
    """Its monolithic kernel. The entropy's gradient and the accuracy are not among its losses and
    metrics."""
    from fast_llm.functional.triton.monolithic_loss import triton_monolithic_loss_forward_backward

    def loss(batch):
        terms = {"ce": (1.0,)}
        if task != "ce":
            terms["z"] = (batch.mask, Z_WEIGHT)
        if task == "grpo":
            # with them, the mean log-prob is a metric, too
            label_counts = torch.full_like(batch.mask, batch.count)
            terms["grpo"] = (
                batch.extras["advantage"],
                batch.extras["old"],
                1.0,
                CLIP,
                CLIP,
                label_counts,
            )
        cross_entropy, z_loss, policy, _, gradient, softmax, weighted = triton_monolithic_loss_forward_backward(
            batch.logits.detach(), batch.labels, None, 1.0, shard.group, batch.count, **terms,
            compute_metrics=task == "grpo",
        )  # fmt: skip
        total = cross_entropy
        if z_loss is not None:
            total = total + Z_WEIGHT * z_loss
        if policy is not None:
            total = total + policy
            fast_llm_metrics(batch, label_counts, softmax, weighted)
        return _GradientAtHand.apply(batch.logits, total, gradient)

    return loss


@peer("Fast-LLM", "kl", "reverse_kl", "ce+kl", package="fast-llm", note="gradient in forward")
def fast_llm_distillation(task, shard):
    """Its kernel for a teacher's distribution adds to the gradient that the one for labels left, if
    there is one."""
    from fast_llm.functional.config import EntropyLossType, TargetFormat
    from fast_llm.functional.triton.entropy_loss import triton_entropy_loss_forward_backward
    from fast_llm.functional.triton.monolithic_loss import triton_monolithic_loss_forward_backward

    kind = EntropyLossType.reverse_kl if task == "reverse_kl" else EntropyLossType.forward_kl
    weight = KL_WEIGHT if task == "ce+kl" else 1.0

    def loss(batch):
        logits, cross_entropy, gradient = batch.logits.detach(), 0.0, None
        if task == "ce+kl":
            cross_entropy, _, _, _, gradient, _, _ = triton_monolithic_loss_forward_backward(
                logits, batch.labels, None, 1.0, shard.group, batch.count, ce=(1.0,)
            )
        divergence, _, gradient = triton_entropy_loss_forward_backward(
            logits, batch.extras["teacher"], batch.mask, grad_logits=gradient, grad_output=weight, group=shard.group,
            target_format=TargetFormat.logits, entropy_loss_type=kind, divisor=batch.count,
        )  # fmt: skip
        return _GradientAtHand.apply(batch.logits, cross_entropy + weight * divergence, gradient)

    return loss
