"""Train a small language model whose vocabulary is sharded, on text that is already on this machine.

torchrun --standalone --nproc-per-node 2 launch/train.py --tp 2     # 2 shards; 4 processes: 2 replicas of 2 shards
python launch/train.py --baseline                                   # the same run, unsharded, in plain torch

Ctrl-C or SIGTERM: every rank finishes the step and saves; --resume goes on bit for bit, or with another --tp or number
of replicas. (torchrun ends its own process with a SignalException then, after the ranks have saved.) A rank that dies:
torchrun --max-restarts N starts all of them again, and they go on from the newest checkpoint. Several hosts:
launch/slurm.sbatch.
"""

import argparse
import os
import signal
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS

import torch
import torch.distributed as dist

import checkpoint
import data
import parallel
from clock import Clock
from model import Transformer
from objective import IGNORE, SUMS, plain_objective, sharded_objective
from options import check_multiple, non_negative_float, parser_of, positive_float, positive_int
from record import Record, peak_memory, refuse_older_run
from tp_headloss import CrossEntropy, VocabShard, ZLoss, clip_grad_norm_

# Options that may differ between a run and its continuation.
FREE = {
    "out",
    "data_cache",
    "corpus",
    "corpus_mb",
    "resume",
    "overwrite",
    "stop_after",
    "log_every",
    "validate_every",
}
FREE |= {"validation_batches", "checkpoint_every", "tp"}


def parse() -> argparse.Namespace:
    parser = parser_of(
        __doc__, precision=True, tp=1, vocab=4099, pad_to=128, layers=3, width=128, heads=4, length=256, batch=4,
        accumulate=2, steps=500, lr=3e-3, warmup=40, clip=1.0, seed=0, log_every=10, validate_every=100,
        validation_batches=4,
    )  # fmt: skip
    add = parser.add_argument
    add(
        "--baseline",
        action="store_true",
        help="plain torch cross-entropy on the whole vocabulary, one process",
    )
    add("--out", default="runs/train", help="folder of the run")
    add(
        "--corpus",
        help="folder with text files (default: the sources of Python's standard library)",
    )
    add("--corpus-mb", type=positive_float, default=6.0, help="at most this much text")
    add("--data-cache", default="runs/data")
    add("--weight-decay", type=non_negative_float, default=0.1)
    add("--z-weight", type=non_negative_float, default=1e-4)
    add("--checkpoint-every", type=positive_int, default=100)
    older = parser.add_mutually_exclusive_group()
    older.add_argument(
        "--resume", action="store_true", help="continue the run in --out, maybe with another --tp"
    )
    older.add_argument("--overwrite", action="store_true", help="replace an older run in --out")
    add("--stop-after", type=positive_int, help="save and leave after this step, as if interrupted")
    args = parser.parse_args()
    if args.baseline and args.tp != 1:
        parser.error("--baseline is one process without shards: leave out --tp")
    check_multiple(parser, "--width", args.width, 2 * args.heads, "2 x --heads")
    return args


class Trainer:
    def __init__(self, args, ranks, corpus):
        self.args, self.ranks, self.corpus = args, ranks, corpus
        pieces = ranks.dp * args.accumulate
        if args.batch % pieces:
            raise SystemExit(
                f"--batch {args.batch} is no multiple of replicas x micro-batches = {pieces}"
            )
        padded = -(-args.vocab // args.pad_to) * args.pad_to
        self.shard = VocabShard.from_group(ranks.tp_group, args.vocab, padded_size=padded)
        sizes = args.width, args.layers, args.heads, args.length, args.seed
        self.model = Transformer(self.shard, *sizes, plain=args.baseline).to(ranks.device)
        if ranks.mesh is not None:
            self.model.distribute(ranks.mesh)
        model, terms = self.model, [CrossEntropy(), ZLoss(args.z_weight)]
        if args.baseline:
            self.objective = plain_objective(model.output, args.vocab, args.z_weight)
        else:
            self.objective = sharded_objective(model.output, terms)
        sharded, replicated = model.sharded_parameters(), model.replicated_parameters()
        # In groups of one mesh each, or foreach kernels would meet DTensors of different meshes.
        self.optimizer = torch.optim.AdamW(
            [
                {"params": sharded, "weight_decay": args.weight_decay},
                {
                    "params": [p for p in replicated if p.ndim > 1],
                    "weight_decay": args.weight_decay,
                },
                {"params": [p for p in replicated if p.ndim <= 1], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
        )
        self.clock = Clock(ranks.device)
        bf16 = args.precision == "bf16" or (
            args.precision == "auto" and ranks.device.type == "cuda"
        )
        self.autocast = torch.autocast(ranks.device.type, torch.bfloat16, enabled=bf16)

    def learning_rate(self, step: int) -> float:
        if step < self.args.warmup:
            return self.args.lr * (step + 1) / self.args.warmup
        done = (step - self.args.warmup) / max(1, self.args.steps - self.args.warmup)
        return self.args.lr * (0.55 + 0.45 * torch.cos(torch.tensor(torch.pi * done)).item())

    def micro_batches(self, split: str, seed: int, step: int) -> list:
        """This replica's part of a global batch, which is the same for every number of replicas."""
        return self.cut(*self.corpus.batch(split, self.args.batch, seed, step))

    def cut(self, *batch: torch.Tensor) -> list[tuple]:
        """Tensors [batch, ..] of a global batch -> this replica's micro-batches of them."""
        pieces = [x.chunk(self.ranks.dp * self.args.accumulate) for x in batch]
        return list(zip(*(p[self.ranks.dp_rank :: self.ranks.dp] for p in pieces), strict=True))

    def step(self, step: int, micro_batches: Iterable, tokens: int) -> dict:
        """One optimiser step on `tokens` valid labels in all; tensors and clock readings, nothing
        waits for them.

        A micro-batch: inputs, labels, and what else the objective takes of it, positionally."""
        begin, heads, sums = self.clock.now(), [], torch.zeros(len(SUMS), device=self.ranks.device)
        for inputs, labels, *more in micro_batches:
            inputs, labels = inputs.to(self.ranks.device), labels.to(self.ranks.device)
            with self.autocast:
                hidden = self.model(inputs)
                head_begin = self.clock.now()
                # The head is done when its backward hands over the gradient of hidden.
                hidden.register_hook(
                    lambda _, since=head_begin: heads.append((since, self.clock.now()))
                )
                loss, part = self.objective(hidden, labels, tokens, *more)
            # FSDP averages over dp, but the losses of the ranks add up
            (self.ranks.dp * loss).backward()
            sums += part
        sums = self.ranks.sum_over_data(sums)
        norm = clip_grad_norm_(self.model.parameters(), self.args.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"step": step, "tokens": tokens, "values": torch.cat([sums, norm.view(1)]), "heads": heads,
                "begin": begin, "end": self.clock.now()}  # fmt: skip

    def means(self, sums: list, tokens: int) -> dict:
        row = {name: total / tokens for name, total in zip(SUMS, sums, strict=True)}
        return {"loss": row["cross_entropy"] + self.args.z_weight * row["z_loss"], **row}

    def rows(self, finished: list) -> list[dict]:
        """Rows of metrics of finished steps; the one place that waits for the device."""
        values = torch.stack([x["values"] for x in finished]).tolist() if finished else []
        if self.clock.cuda and finished:
            finished[-1]["end"].synchronize()
        memory_name, memory = peak_memory(self.ranks.device)
        rows = []
        for x, (*sums, norm) in zip(finished, values, strict=True):
            seconds = self.clock.seconds(x["begin"], x["end"])
            rows.append({
                "step": x["step"] + 1,
                **self.means(sums, x["tokens"]),
                "tokens": x["tokens"],
                "lr": self.learning_rate(x["step"]),
                "grad_norm": norm,
                "step_seconds": seconds,
                "tokens_per_second": self.args.batch * self.args.length / seconds,
                "head_share": sum(self.clock.seconds(*span) for span in x["heads"]) / seconds,
                memory_name: memory,
            })  # fmt: skip
        return rows

    @torch.no_grad()
    def validate(self) -> dict:
        sums, tokens = torch.zeros(len(SUMS), device=self.ranks.device), 0
        for i in range(self.args.validation_batches):
            for inputs, labels in self.micro_batches("validation", 0, i):
                tokens += int((labels != IGNORE).sum())
                inputs, labels = inputs.to(self.ranks.device), labels.to(self.ranks.device)
                with self.autocast:
                    sums += self.objective(self.model(inputs), labels, 1)[1]
        tokens, _ = self.ranks.agree(tokens, False)
        return self.means(self.ranks.sum_over_data(sums).tolist(), tokens)


def continues(args, out: Path) -> bool:
    """Whether this run goes on from a checkpoint in its folder; refuses a new run where an older
    one is."""
    # Without --resume only a folder that this job itself has begun counts: it may have died before
    # it replaced an older run.
    if checkpoint.begun_by(out / "checkpoints", parallel.job()):
        return checkpoint.exists(out / "checkpoints")
    if not args.resume and not args.overwrite:
        files = [out / name for name in ("checkpoints", "metrics.jsonl", "tensorboard")]
        refuse_older_run(files, resume="continue it (--resume), ")
    return args.resume


def train(args, ranks) -> None:
    out = Path(args.out)
    resume = ranks.first(lambda: continues(args, out))
    corpus = data.load(ranks, args.data_cache, args.corpus, args.corpus_mb, args.vocab, args.length)
    trainer = Trainer(args, ranks, corpus)
    config = {k: v for k, v in vars(args).items() if k not in FREE}
    config |= {"data": corpus.key, "device": ranks.device.type}
    first, best = 0, float("inf")
    if resume:
        progress = checkpoint.load(
            out / "checkpoints", trainer.model, trainer.optimizer, ranks, config
        )
        first, best = progress["step"], progress["best"]
    else:  # everything is checked: from here on an older run is replaced
        ranks.first(lambda: checkpoint.begin(out / "checkpoints", parallel.job()))
    with ranks.together():
        record = Record(out, first, args.steps, active=ranks.rank == 0)
    if first:
        record.say(f"continues after step {first} of {args.steps}")

    interrupted = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: interrupted.append(number))

    done, finished, saved = first, [], first if resume else None
    while done < args.steps:
        micro_batches = trainer.micro_batches("train", args.seed, done)
        here = sum(int((labels != IGNORE).sum()) for _, labels in micro_batches)
        # All ranks leave at the same step, or those that go on would wait for the others for ever.
        tokens, stop = ranks.agree(here, bool(interrupted) or done == args.stop_after)
        if stop:
            break
        finished.append(trainer.step(done, micro_batches, tokens))
        done += 1
        last, validating = done == args.steps, done % args.validate_every == 0
        saving = last or done % args.checkpoint_every == 0
        if last or validating or saving or done % args.log_every == 0:
            for row in trainer.rows(finished):
                record.write("train", row)
            finished = []
        if last or validating:
            row = trainer.validate()
            best = min(best, row["cross_entropy"])
            record.write("validation", {"step": done, **row, "best_cross_entropy": best})
        if saving:
            save(out, done, trainer, best, config)
            saved = done

    for row in trainer.rows(finished):
        record.write("train", row)
    if done < args.steps:
        if saved != done:
            save(out, done, trainer, best, config)
        record.say(
            f"stopped after step {done} of {args.steps} and saved; the same command with --resume goes on"
        )
    record.close()
    if ranks.rank == 0 and done == args.steps:
        from plot import plot_run

        plot_run(out, out / "curves.png")
        print(f"curves: {out / 'curves.png'}", flush=True)


def save(out, step, trainer, best, config) -> None:
    progress = {"best": best, "config": config}
    checkpoint.save(
        out / "checkpoints", step, trainer.model, trainer.optimizer, progress, trainer.ranks
    )


def main() -> None:
    args = parse()
    # Runs can be repeated and resumed bit for bit, on GPUs too.
    torch.use_deterministic_algorithms(True, warn_only=True)
    ranks = parallel.start(args.tp, args.device)
    if args.baseline and ranks.world > 1:
        raise SystemExit(
            "--baseline is one process: start it with python, not with several by torchrun"
        )
    train(args, ranks)
    if ranks.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
