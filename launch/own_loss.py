"""The smallest loop: a loss of your own, gradient accumulation, data parallelism and logged metrics.

torchrun --standalone --nproc-per-node 2 launch/own_loss.py             # 2 data-parallel ranks, whole vocabulary
torchrun --standalone --nproc-per-node 4 launch/own_loss.py --tp 2      # 2 data-parallel ranks of 2 shards
python launch/own_loss.py                                               # one process

A model learns to continue random sequences that count upwards; ranks have different numbers of valid tokens. It needs
nothing but torch, on CPUs or GPUs, and ends in seconds.
"""

import argparse
import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import parallel
from options import positive_float, positive_int
from tp_headloss import (
    CrossEntropy,
    HeadLoss,
    HeadLossOutput,
    Init,
    Term,
    VocabParallelEmbedding,
    VocabParallelHead,
    VocabShard,
    clip_grad_norm_,
    mean_metrics,
)

VOCAB, WIDTH = 97, 32


def focal_loss(stats):
    """Cross-entropy that counts tokens less the better they are predicted (arXiv:1708.02002, gamma = 2)."""
    return -((1 - stats.log_prob.exp()) ** 2) * stats.log_prob


class Model(nn.Module):
    """Next-token model whose embedding and output layer hold this rank's shard of the vocabulary."""

    def __init__(self, shard: VocabShard, head_loss: HeadLoss, device):
        super().__init__()
        self.embedding = VocabParallelEmbedding(WIDTH, shard, init=Init(1.0, seed=1), device=device)
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).to(device)
        self.head = VocabParallelHead(WIDTH, shard, head_loss=head_loss, init=Init(0.02, seed=3), device=device)

    def forward(self, ids, labels, denominator):
        return self.head(self.body(self.embedding(ids)), labels, denominator=denominator)


def batch(step: int, rows: int, device):
    """Ids [rows, 16] that count upwards from random starts, and labels, of which each row ignores a random number."""
    generator = torch.Generator().manual_seed(step)
    ids = (torch.randint(0, VOCAB, (rows, 1), generator=generator) + torch.arange(17)) % VOCAB
    known = torch.arange(16) < torch.randint(4, 17, (rows, 1), generator=generator)
    return ids[:, :-1].to(device), ids[:, 1:].where(known, -100).to(device)


def train_step(model, optimizer, micro_batches, tokens: int, dp: int) -> list[HeadLossOutput]:
    """One optimiser step of micro-batches (ids, labels) -> the head's output of each."""
    outputs = []
    for i, (ids, labels) in enumerate(micro_batches, 1):
        wait = dp > 1 and i < len(micro_batches)
        with model.no_sync() if wait else contextlib.nullcontext():  # DDP reduces in the last backward
            out = model(ids, labels, tokens)
            (dp * out.loss).backward()  # DDP divides by dp
        outputs.append(out)
    clip_grad_norm_(model.parameters(), 1.0)  # one norm on all ranks
    optimizer.step()
    optimizer.zero_grad()
    return outputs


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tp", type=positive_int, default=1, help="number of vocabulary shards; processes / tp data-parallel ranks")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if each process has a GPU")
    add("--steps", type=positive_int, default=100)
    add("--batch", type=positive_int, default=32, help="rows per step, over all ranks and micro-batches")
    add("--accumulate", type=positive_int, default=2, help="micro-batches per step and rank")
    add("--lr", type=positive_float, default=0.3)
    add("--log-every", type=positive_int, default=20)
    return parser.parse_args()


def main() -> None:
    args = parse()
    ranks = parallel.start(args.tp, args.device)
    pieces = ranks.dp * args.accumulate
    if args.batch % pieces:
        raise SystemExit(f"--batch {args.batch} is no multiple of replicas x micro-batches = {pieces}")
    shard = VocabShard.from_group(ranks.tp_group, VOCAB, padded_size=128)
    head_loss = HeadLoss([CrossEntropy(), Term("focal", focal_loss, 0.5, tokenwise=True)], metrics=("accuracy",))
    model = Model(shard, head_loss, ranks.device)
    if ranks.dp > 1:
        model = DistributedDataParallel(model, process_group=ranks.dp_group)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for step in range(args.steps):
        ids, labels = batch(step, args.batch, ranks.device)
        tokens = int((labels != -100).sum())  # of the whole batch, which all ranks draw here; elsewhere an all-reduce
        mine = slice(ranks.dp_rank, None, ranks.dp)
        micro_batches = list(zip(ids.chunk(pieces)[mine], labels.chunk(pieces)[mine]))
        outputs = train_step(model, optimizer, micro_batches, tokens, ranks.dp)
        if (step + 1) % args.log_every == 0 or step + 1 == args.steps:
            means = mean_metrics(outputs, ranks.dp_group)  # the ranks of one vocabulary have equal sums already
            if ranks.rank == 0:
                print(f"step {step + 1} " + " ".join(f"{k} {v:.4f}" for k, v in means.items()), flush=True)
    if ranks.world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
