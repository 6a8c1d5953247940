"""Time and memory of the head loss, against the copy bandwidth measured in the same process.

    python scripts/bench.py --tokens 8192 --vocab 32064
    torchrun --standalone --nproc-per-node 4 scripts/bench.py --tokens 8192 --vocab 128256

Every implementation is first checked against float64 on a few rows. A row of the table is one (task, implementation):
median time of forward + backward of the mean loss, captured in a CUDA graph and eager, with the 10 % and 90 % points,
the ratio to the floor of 6 bytes per logit (2 read forward, 2 read and 2 written backward) at the copy bandwidth, and
the peak memory above the inputs. With --json FILE the same as JSON, with device, versions and command.
"""

import argparse
import json
import os
import shlex
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tp_headloss import CrossEntropy, Entropy, HeadLoss, Options, VocabShard, ZLoss, __version__

TASKS = {
    "ce": lambda: HeadLoss(),
    "ce + z": lambda: HeadLoss([CrossEntropy(), ZLoss(1e-4)]),
    "ce + z + entropy + accuracy": lambda: HeadLoss(
        [CrossEntropy(), ZLoss(1e-4), Entropy(0.01)], metrics=("entropy", "accuracy")
    ),
}


def implementations(task, shard):
    """name -> function(logits, labels) -> scalar loss."""
    loss = TASKS[task]()
    inplace = TASKS[task]()
    inplace.options = Options(inplace=True)
    out = {
        "ours": lambda x, y: loss(x, y, shard=shard).loss,
        "ours, in place": lambda x, y: inplace(x, y, shard=shard).loss,
    }
    if task == "ce" and shard.world_size == 1:
        out["torch, bf16"] = F.cross_entropy
        out["torch.compile"] = torch.compile(lambda x, y: F.cross_entropy(x.float(), y))
    return out


def timed(function, repeats):
    """Seconds of each of `repeats` calls, by CUDA events, after a warm-up; the L2 cache is flushed in between."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for _ in range(5):
        function()
    for start, end in events:
        flush.zero_()
        if dist.is_initialized():
            dist.barrier()
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return torch.tensor([start.elapsed_time(end) / 1e3 for start, end in events])


def captured(step):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def host_time(step, repeats=50):
    """Seconds the host needs to issue a step, without waiting for the device."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


def copy_bandwidth(repeats=20):
    a = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() * 2 / timed(lambda: b.copy_(a), repeats).median().item()


def check(function, shard, vocab):
    """Relative error of the loss against float64 on 16 rows (each rank builds the same whole rows)."""
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(16, vocab, device="cuda", generator=generator).mul_(3).bfloat16()
    labels = torch.randint(0, vocab, (16,), device="cuda", generator=generator)
    truth = F.cross_entropy(x.double(), labels)
    return (function(x[:, shard.start : shard.stop].contiguous(), labels).double() / truth - 1).abs().item()


def measure(task, name, function, args, shard, bandwidth):
    error = check(function, shard, args.vocab) if task == "ce" else None
    logits = torch.randn(args.tokens, shard.width, device="cuda", dtype=torch.bfloat16)
    values = logits.clone()
    logits.requires_grad_()
    labels = torch.randint(
        0, args.vocab, (args.tokens,), device="cuda", generator=torch.Generator("cuda").manual_seed(0)
    )

    def step():
        torch.autograd.grad(function(logits, labels), logits)

    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        memory = torch.cuda.max_memory_allocated() - before
    with torch.no_grad():
        logits.copy_(values)
    eager, host = timed(step, args.repeats), host_time(step)
    graph = timed(captured(step), args.repeats)
    floor = 6 * logits.numel() / bandwidth
    micro = {
        key: [round(t * 1e6, 1) for t in times.quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()]
        for key, times in (("graph_us", graph), ("eager_us", eager))
    }
    ratios = {
        "graph_over_floor": micro["graph_us"][1] / floor / 1e6,
        "eager_over_floor": micro["eager_us"][1] / floor / 1e6,
    }
    return {
        "task": task,
        "implementation": name,
        **micro,
        "host_us": round(host * 1e6, 1),
        "floor_us": round(floor * 1e6, 1),
        **{key: round(value, 3) for key, value in ratios.items()},
        "extra_memory_mib": round(memory / 2**20, 1),
        "loss_error": error,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=32064, help="global vocabulary")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args()
    group = None
    if "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
        group = dist.group.WORLD
    shard = VocabShard.from_group(group, args.vocab)
    bandwidth = copy_bandwidth()
    rows = []
    for task in args.tasks:
        for name, function in implementations(task, shard).items():
            rows.append(measure(task, name, function, args, shard, bandwidth))
            torch.cuda.empty_cache()
    if group is None or dist.get_rank() == 0:
        report = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "tp_headloss": __version__,
            "command": shlex.join(sys.argv),
            "tp": shard.world_size,
            "tokens": args.tokens,
            "vocab": args.vocab,
            "copy_gb_per_s": round(bandwidth / 1e9, 1),
            "rows": rows,
        }
        print(json.dumps({key: value for key, value in report.items() if key != "rows"}))
        for row in rows:
            print(json.dumps(row))
        if args.json:
            with open(args.json, "w") as file:
                json.dump(report, file, indent=1)
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
