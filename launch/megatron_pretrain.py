"""Train a Megatron-Core GPTModel by Megatron's own schedule, data-parallel wrapper and optimizer, its loss and ours.

torchrun --standalone --nproc-per-node 2 launch/megatron_pretrain.py                    # CPUs or GPUs, small, real text
torchrun --standalone --nproc-per-node 4 launch/megatron_pretrain.py --tp 4 --data synthetic --hidden 4096 --heads 32 \
    --vocab 128256 --length 2048 --batch 4 --steps 20 --lr 3e-5  # of docs/megatron_measured.md

Each of --losses trains a model from the same weights on the same batches (one that is named twice, twice):
  stock          Megatron's vocab-parallel cross-entropy
  stock-fused    the same, cross_entropy_loss_fusion with the native implementation
  stock-te       the same with Transformer Engine's, which must be installed
  logits         ours in the place of the loss; logits-inplace: its gradient overwrites the logits
  head           ours in the place of output layer and loss: no logits, which are made again for the backward
  head-one-sweep the same, gradients in the forward, because the loss mask is known there
  head-fp8       the same, products of gradients in fp8 (bf16 weights, so GPUs alone)
"""

import argparse
import functools
import gc
import importlib.metadata
import itertools
import json
import os
import statistics
import zlib
from pathlib import Path

# Megatron's own advice for tensor parallelism
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what --deterministic needs

import torch
import torch.distributed as dist

import data
import megatron_graphs
import parallel
from clock import Clock
from megatron_model import model_of
from options import check_multiple, parser_of, positive_float, positive_int
from record import refuse_older_run

LOSSES = ("stock", "stock-fused", "logits", "logits-inplace", "head", "head-one-sweep")
OPTIONAL = ("stock-te", "head-fp8")


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(
        __doc__, tp=2, layers=2, heads=4, length=128, accumulate=1, steps=20, lr=1e-3, seed=0
    )
    add = parser.add_argument
    add("--losses", nargs="+", choices=LOSSES + OPTIONAL, default=LOSSES)
    add(
        "--cuda-graph", nargs="+", choices=megatron_graphs.GRAPHS, default=["none"],
        help="graphs of each layer, or of all but the optimizer; each loss is trained once for each (0.19, GPUs)",
    )  # fmt: skip
    add("--sequence-parallel", action="store_true")
    add("--tied", action="store_true", help="embedding and output layer share their weight")
    add(
        "--budget-mib",
        type=positive_float,
        help="memory of the fused head beyond its gradients (default: library's)",
    )
    add("--data", choices=("text", "synthetic"), default="text")
    add("--data-cache", default="runs/data")
    add(
        "--corpus",
        help="folder with text files (default: the sources of Python's standard library)",
    )
    add("--corpus-mb", type=positive_float, default=6.0)
    add("--vocab", type=positive_int, default=4096, help="a multiple of the tensor-parallel ranks")
    add("--hidden", type=positive_int, default=128)
    add("--batch", type=positive_int, default=4, help="rows of a micro-batch")
    add(
        "--deterministic",
        action="store_true",
        help="torch's deterministic algorithms: equal losses from run to run",
    )
    add("--out", help="a JSON file of all results")
    add("--overwrite", action="store_true", help="replace an older file at --out")
    args = parser.parse_args(given)
    check_multiple(parser, "--hidden", args.hidden, args.heads, "--heads")
    for option in ("heads", "vocab", *(["length"] if args.sequence_parallel else [])):
        check_multiple(parser, f"--{option}", getattr(args, option), args.tp, "--tp")
    return args


def batches(args, ranks):
    """-> function(step, number of the micro-batch) -> ids and labels [batch, length] of this
    replica."""
    rows = args.batch * args.accumulate * ranks.dp

    def mine(x, number):
        return x.view(ranks.dp, args.accumulate, args.batch, -1)[ranks.dp_rank, number].to(
            ranks.device
        )

    if args.data == "text":
        text = data.load(
            ranks, args.data_cache, args.corpus, args.corpus_mb, args.vocab, args.length
        )
        return lambda step, number: [
            mine(x, number) for x in text.batch("train", rows, args.seed, step)
        ]

    # Each id has a likely successor; the others are log-uniform, like the ranks of words.
    generator = torch.Generator().manual_seed(args.seed)
    shape = args.steps, rows, args.length + 1
    ids = (args.vocab ** torch.rand(shape, generator=generator)).long().clamp(max=args.vocab - 1)
    follows = torch.rand(shape, generator=generator) < 0.5
    for t in range(1, shape[-1]):
        ids[..., t] = torch.where(
            follows[..., t], (ids[..., t - 1] * 31 + 7) % args.vocab, ids[..., t]
        )
    return lambda step, number: [
        mine(x.contiguous(), number) for x in (ids[step, :, :-1], ids[step, :, 1:])
    ]


class HeadClock(Clock):
    """Time from the last hidden states to their gradient, without what lies between loss and its
    gradient, and the most memory that is allocated meanwhile, and in a step."""

    def __init__(self, gpt, device: torch.device, captured: bool):
        """captured: the whole step is a CUDA graph, whose events cannot be read, so that only
        memory is measured."""
        super().__init__(device)
        self.times, self.before, self.peaks = (
            [],
            0,
            {"step": 0} if captured else {"head": 0, "step": 0},
        )
        if captured:
            return
        gpt.decoder.register_forward_hook(self._hidden)
        gpt.register_forward_hook(self._losses)

    def _hidden(self, module, args, hidden):
        self._peak(of_head=False)
        self.times.append([self.now()])
        hidden.register_hook(functools.partial(self._done, self.times[-1]))

    def _done(self, spans, _):
        spans.append(self.now())
        self._peak(of_head=True)

    def _peak(self, of_head: bool):
        """Ends a stretch, of the head or of anything else, whose highest mark is looked at."""
        if not self.cuda:
            return
        most = torch.cuda.max_memory_allocated()
        self.peaks["step"] = max(self.peaks["step"], most)
        if of_head:
            self.peaks["head"] = max(self.peaks["head"], most - self.before)
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()

    def mib(self) -> dict:
        """Of the whole run so far; the head's beyond what there was before it, dH and dW
        included."""
        self._peak(of_head=False)
        return (
            {f"{name}_mib": peak / 2**20 for name, peak in self.peaks.items()} if self.cuda else {}
        )

    def _losses(self, module, args, losses):
        self.times[-1].append(self.now())
        losses.register_hook(lambda _, spans=self.times[-1]: spans.append(self.now()))

    def spent(self) -> float | None:
        """Seconds since the last call; None: not measured."""
        times, self.times = self.times, []
        if not times:
            return None
        return round(sum(self.seconds(t[0], t[1]) + self.seconds(t[2], t[3]) for t in times), 7)


def train(args, loss: str, graph: str, ranks, batch) -> dict:
    """batch: as `batches` returns it."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from tp_headloss import Linear, Options
    from tp_headloss.integrations.megatron import MegatronHead, install

    cuda = ranks.device.type == "cuda"
    if cuda:
        megatron_graphs.seed(args.seed, graph)
    config, gpt, model = model_of(args, loss, graph, ranks)
    if not loss.startswith("stock"):
        budget = None if args.budget_mib is None else int(args.budget_mib * 2**20)
        options = Options(inplace=loss == "logits-inplace")
        fused, linear = loss.startswith("head"), Linear()
        if fused:
            mode = "recompute" if loss == "head" else "one_sweep"
            gradients = "fp8" if loss == "head-fp8" else None
            linear = Linear(mode, budget, gradients=gradients)
        install(model, MegatronHead(ignore_index=-100, linear=linear, options=options), fused=fused)
    # Clipping by norm needs CUDA's kernels there.
    settings = {
        "clip_grad": 1.0 if cuda else 0.0,
        "bf16": config.bf16,
        "params_dtype": config.params_dtype,
    }
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=args.lr, **settings), [model]
    )
    config.grad_scale_func = optimizer.scale_loss
    clock = HeadClock(gpt, ranks.device, captured=graph == "full_iteration")
    forward_backward = megatron_graphs.schedule(graph)
    positions = torch.arange(args.length, device=ranks.device).expand(args.batch, -1)

    def forward_step(micro_batches, model):
        given = next(micro_batches)
        mask = given["labels"] != -100
        losses = model(given["ids"], positions, None, labels=given["labels"], loss_mask=mask)
        return losses, functools.partial(reduced, mask)

    def reduced(mask, losses):
        mean = (losses.float() * mask).sum() / mask.sum()
        # the schedule divides the mean in place, by micro-batches
        return mean, {"loss": mean.detach().clone()}

    result = {"loss": [], "grad_norm": [], "step_seconds": [], "head_seconds": []}
    for step in range(args.steps):
        begin = clock.now()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        micro_batches = (
            dict(zip(("ids", "labels"), batch(step, number))) for number in range(args.accumulate)
        )
        parts = forward_backward(
            forward_step_func=forward_step, data_iterator=micro_batches, model=[model],
            num_microbatches=args.accumulate, seq_length=args.length, micro_batch_size=args.batch, forward_only=False,
        )  # fmt: skip
        _, norm, _ = optimizer.step()
        end = clock.now()
        if cuda:
            torch.cuda.synchronize()
        result["loss"].append(float(sum(part["loss"] for part in parts) / len(parts)))
        result["grad_norm"].append(None if norm is None else float(norm))
        result["step_seconds"].append(round(clock.seconds(begin, end), 7))
        result["head_seconds"].append(clock.spent())
    if args.deterministic:  # a checksum of the weights' bits
        bits = (p.detach().cpu().view(torch.uint8).numpy() for p in gpt.parameters())
        result["weights"] = functools.reduce(lambda checksum, x: zlib.crc32(x, checksum), bits, 0)
    megatron_graphs.forget(graph, model, forward_backward)
    return result | clock.mib()


def table(results: dict) -> str:
    """Medians of all steps but the first few, which compile and allocate."""
    lines = [
        "| loss | step | of it, the head | peak memory | the head's | loss of first and last step | differs by |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    first = next(iter(results.values()))
    for name, r in results.items():
        loss, _, variant = name.partition(", ")
        # a graph's: the eager steps of the same loss
        reference = results.get(loss, first) if variant else first
        rest = slice(min(3, len(r["loss"]) - 1), None)
        step = 1e3 * statistics.median(r["step_seconds"][rest])
        head = "not measured"
        if None not in r["head_seconds"]:
            of_head = 1e3 * statistics.median(r["head_seconds"][rest])
            head = f"{of_head:.1f} ms, {of_head / step:.0%}"
        memory = [
            f"{r[key]:.0f} MiB" if key in r else "not measured" for key in ("step_mib", "head_mib")
        ]
        difference = max(abs(a - b) for a, b in zip(r["loss"], reference["loss"]))
        lines.append(
            f"| {name} | {step:.1f} ms | {head} | {' | '.join(memory)} "
            f"| {r['loss'][0]:.4f}, {r['loss'][-1]:.4f} | {difference:.1e} |"
        )
    return "\n".join(lines)


def save(args, device: torch.device, results: dict) -> None:
    packages = [
        "megatron-core",
        "triton",
        *(["transformer-engine"] if "stock-te" in args.losses else []),
    ]
    versions = {"torch": torch.__version__} | {
        name: importlib.metadata.version(name) for name in packages
    }
    record = {
        "arguments": vars(args),
        "versions": versions,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "results": results,
    }
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(json.dumps(record) + "\n")


def main() -> None:
    args = parse()
    if args.deterministic:
        os.environ.setdefault("NCCL_ALGO", "Ring")  # as Megatron's own trainer sets it
    ranks = parallel.start(args.tp, args.device, alone=False)
    if ranks.device.type == "cpu" and args.cuda_graph != ["none"]:
        raise SystemExit("--cuda-graph needs GPUs")
    if args.out and not args.overwrite:
        ranks.first(lambda: refuse_older_run([Path(args.out)]))
    from megatron.core import parallel_state

    if ranks.device.type == "cpu":
        import megatron_cpu

        megatron_cpu.pretend()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tp)
    torch.use_deterministic_algorithms(args.deterministic, warn_only=True)
    results, batch = {}, batches(args, ranks)
    for loss, graph in itertools.product(args.losses, args.cuda_graph):
        name = loss if graph == "none" else f"{loss}, {graph}"
        results[f"{name}, again" if name in results else name] = train(
            args, loss, graph, ranks, batch
        )
        gc.collect()  # a model and its hooks hold each other
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        if ranks.rank == 0 and args.out:
            save(args, ranks.device, results)
    if ranks.rank == 0:
        print(table(results), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
