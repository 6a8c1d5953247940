"""torchrun --standalone --nproc-per-node 4 launch/trainer.py 2 100 runs/small
trains 100 steps on 2 shards x 2 data-parallel ranks, from where it stopped."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states

import parallel
import tp_headloss as hl
from model import Transformer
from options import positional, positive_int

args = positional(__doc__, tp=positive_int, steps=positive_int, folder=Path)
dp, tp = parallel.sizes(args.tp, alone=False)
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group()
mesh = dist.init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp"))
group, mine = mesh.get_group("dp"), slice(mesh.get_local_rank("dp"), None, dp)
shard = hl.VocabShard.from_mesh(mesh, 96, "tp")
model = Transformer(shard, 64, layers=2, heads=4, length=16, seed=0).to(device)
model.distribute(mesh)  # vocabulary over "tp", then FSDP2 over "dp"
loss = hl.HeadLoss([hl.CrossEntropy(), hl.ZLoss(1e-4)], metrics="perplexity")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)


def forward(ids, labels, tokens=None):
    call = {"head_loss": loss, "denominator": tokens}
    with torch.autocast(device, torch.bfloat16):
        return model.output(model(ids), labels, **call)


def batches(seed, pieces):  # of this rank, of 32 rows that count upwards
    torch.manual_seed(seed)
    ids = (torch.randint(96, (32, 1)) + torch.arange(17)) % 96
    labels = ids.where(torch.rand(32, 17) > 0.2, -100)
    both = torch.stack([ids[:, :-1], labels[:, 1:]], 1)[mine].to(device)
    return [part.unbind(1) for part in both.chunk(pieces)]


def state():
    names = "model_state_dict", "optim_state_dict"
    return dict(zip(names, states.get_state_dict(model, optimizer)))


saved = sorted(args.folder.glob("*/.metadata"))
first = int(saved[-1].parent.name) if saved else 0
if saved:
    dcp.load(found := state(), checkpoint_id=saved[-1].parent)
    states.set_state_dict(model, optimizer, **found)
for step in range(first + 1, args.steps + 1):
    parts, outputs = batches(step, pieces=2), []
    tokens = sum((labels != -100).sum() for _, labels in parts)
    dist.all_reduce(tokens, group=group)  # of the global batch
    for part in parts:
        outputs.append(forward(*part, tokens))
        (dp * outputs[-1].loss).backward()  # FSDP divides by dp
    norm = hl.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 or step == args.steps:
        with torch.no_grad():
            unseen = [forward(*part) for part in batches(10**6, pieces=1)]
        seen, unseen = (hl.mean_metrics(x, group) for x in (outputs, unseen))
        log = {"loss": seen["loss"], "norm": norm}
        log["perplexity"] = unseen["perplexity"]
        if dist.get_rank() == 0:
            print("step", step, {k: round(float(x), 4) for k, x in log.items()})
        dcp.save(state(), checkpoint_id=args.folder / f"{step:06}")
dist.destroy_process_group()
