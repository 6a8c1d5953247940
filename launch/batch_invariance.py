"""Log-probs of a trainer, with all ranks and a large batch, are bit for bit those of a scorer: one
rank, one sequence.

    torchrun --nproc-per-node 4 launch/batch_invariance.py
    TRITON_INTERPRET=1 torchrun --nproc-per-node 2 launch/batch_invariance.py \
        --vocab 250 --hidden 24 --sequences 3 --length 7    # on CPUs, through Triton's interpreter

Both have the same hidden states, the trainer a shard of the head's weight on each rank. The same
comparison for logits of torch.nn.functional.linear, whose GEMM is another one for another batch or
shard, is printed beside it. The exit status is 1 if a bit differs.
"""

import argparse
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

import parallel
from options import positive_int
from tp_headloss import Linear, Options, VocabShard, linear_vocab_statistics


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--vocab", type=positive_int, default=128256)
    parser.add_argument("--hidden", type=positive_int, default=4096)
    parser.add_argument("--sequences", type=positive_int, default=16)
    parser.add_argument("--length", type=positive_int, default=500)
    return parser.parse_args()


def of_epilogues(hidden, weight, labels, shard):
    """log_prob and entropy, [2, ..]"""
    stats = linear_vocab_statistics(
        hidden, weight, labels, shard=shard, want=("entropy",), options=Options(backend="triton"),
        linear=Linear(exact_logits=True),
    )  # fmt: skip
    return torch.stack([stats.log_prob, stats.entropy])


def of_logits(hidden, weights, labels):
    """log_prob in fp32 of rounded logits, made shard by shard as tensor parallelism makes them."""
    logits = torch.cat([F.linear(hidden, weight) for weight in weights], -1).float()
    return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def main() -> int:
    args = arguments()
    ranks = parallel.start(None, "auto")
    shard = VocabShard.from_group(ranks.tp_group, args.vocab, -(-args.vocab // 128) * 128)
    generator = torch.Generator(ranks.device).manual_seed(0)  # the same numbers on every rank

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=ranks.device).bfloat16()

    hidden, weight = (
        normal(args.sequences, args.length, args.hidden),
        normal(shard.padded_size, args.hidden),
    )
    weight *= 2 / args.hidden**0.5
    labels = torch.randint(args.vocab, hidden.shape[:2], generator=generator, device=ranks.device)
    trainer = of_epilogues(hidden, weight[shard.start : shard.stop].contiguous(), labels, shard)
    different = 0
    if ranks.rank == 0:
        alone = VocabShard(0, shard.padded_size, args.vocab)
        scorer = [of_epilogues(h, weight, y, alone) for h, y in zip(hidden, labels)]
        different = int((trainer != torch.stack(scorer, 1)).any(0).sum())
        weights = weight[: args.vocab].chunk(ranks.world)
        batch = of_logits(hidden, weights, labels)
        single = torch.stack(
            [of_logits(h, weight[None, : args.vocab], y) for h, y in zip(hidden, labels)]
        )
        print(
            f"{labels.numel()} tokens, trainer at TP {ranks.world}, scorer at TP 1 with single "
            f"sequences: {different} differ with epilogues, {int((batch != single).sum())} with "
            "logits by torch.nn.functional.linear",
            flush=True,
        )
    ranks.meet()
    if ranks.world > 1:
        dist.destroy_process_group()
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
