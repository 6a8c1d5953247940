"""FSDP2 x tensor parallelism: the vocabulary is sharded over one dimension of a mesh, all parameters over the other.

torchrun --standalone --nproc-per-node 4 launch/fsdp_tp.py              # 2 data-parallel ranks of 2 shards
torchrun --standalone --nproc-per-node 2 launch/fsdp_tp.py --tp 1       # FSDP alone

The task is that of launch/own_loss.py. It needs nothing but torch, on CPUs or GPUs, and ends in seconds.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from options import positive_float, positive_int
from own_loss import VOCAB, WIDTH, batch
from tp_headloss import Init, VocabParallelEmbedding, VocabParallelHead, VocabShard


class Model(nn.Module):
    """Next-token model; embedding and output layer hold this rank's rows of the vocabulary as DTensors."""

    def __init__(self, mesh):
        super().__init__()
        shard = VocabShard.from_mesh(mesh, VOCAB, "tp", padded_size=128)
        options = {"device": mesh.device_type}
        self.embedding = VocabParallelEmbedding(WIDTH, shard, init=Init(1.0, seed=1), **options).to_dtensor(mesh["tp"])
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.body.to(mesh.device_type)
        self.head = VocabParallelHead(WIDTH, shard, init=Init(0.02, seed=3), **options).to_dtensor(mesh["tp"])
        for part in (self.embedding, self.body, self.head, self):
            fully_shard(part, mesh=mesh["dp"])

    def forward(self, ids, labels, denominator):
        return self.head(self.body(self.embedding(ids)), labels, denominator=denominator)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=positive_int, default=2, help="number of vocabulary shards")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=positive_int, default=100)
    parser.add_argument("--batch", type=positive_int, default=32, help="rows per step, over all data-parallel ranks")
    parser.add_argument("--lr", type=positive_float, default=0.3)
    return parser.parse_args()


def main() -> None:
    args = parse()
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world % args.tp or args.batch % (world // args.tp):
        raise SystemExit(f"--tp {args.tp} must divide the {world} processes, and their quotient --batch {args.batch}")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    mesh = init_device_mesh(args.device, (world // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    dp, rank = mesh["dp"].size(), mesh["dp"].get_local_rank()
    model = Model(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for step in range(args.steps):
        ids, labels = (x.chunk(dp)[rank] for x in batch(step, args.batch, args.device))
        tokens = (labels != -100).sum()
        dist.all_reduce(tokens, group=mesh.get_group("dp"))
        loss = model(ids, labels, tokens).loss
        (dp * loss).backward()  # FSDP averages over dp, but the losses of the ranks add up
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0 or step + 1 == args.steps:
            total = loss.detach().clone()
            dist.all_reduce(total, group=mesh.get_group("dp"))
            if dist.get_rank() == 0:
                print(f"step {step + 1} loss {float(total):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
