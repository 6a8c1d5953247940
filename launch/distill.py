"""Distil a language model of launch/train.py into a smaller one, by cross-entropy and KL at once; sharded vocabulary.

torchrun --standalone --nproc-per-node 2 launch/distill.py --teacher runs/train     # 2 shards
torchrun --standalone --nproc-per-node 4 launch/distill.py --tp 2                   # 2 replicas of 2 shards
python launch/distill.py                                                            # one process, unsharded

One student for each of --runs, from equal weights, on equal batches, validated by cross-entropy alone:
  ce        no teacher
  online    the teacher runs beside the student, and its whole distribution counts
  offline   the teacher has written its top K for every training token to a file, and is no longer in memory
"""

import json
import os
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS

import numpy as np
import torch
import torch.distributed as dist

import checkpoint
import parallel
from data import Corpus
from objective import IGNORE, sharded_objective
from options import check_multiple, fraction, parser_of, positive_float, positive_int
from record import refuse_older_run
from tp_headloss import (
    CrossEntropy,
    Distillation,
    TeacherHead,
    Term,
    TopKDistillation,
    TopKTeacher,
    ZLoss,
    topk_log_probs,
)
from train import Trainer

RUNS = ("ce", "online", "offline")
# step, its micro-batches -> the same, each with a teacher of its tokens
AddTeacher = Callable[[int, list], Iterable]


def parse() -> Namespace:
    parser = parser_of(
        __doc__, precision=True, tp=None, layers=2, width=64, heads=2, batch=8, accumulate=2, steps=300, lr=2e-2,
        warmup=40, seed=1, validate_every=25, validation_batches=8,
    )  # fmt: skip
    add = parser.add_argument
    add(
        "--teacher",
        default="runs/train",
        help="folder of a run of launch/train.py; any number of shards wrote it",
    )
    add("--data-cache", default="runs/data", help="that of the teacher's run")
    add("--runs", nargs="+", choices=RUNS, default=RUNS)
    add("--out", default="runs/distill", help="folder of the runs, with one folder for each")
    add("--overwrite", action="store_true", help="replace older runs in --out")
    add(
        "--kd-weight",
        type=fraction,
        default=0.8,
        help="weight of the KL to the teacher; cross-entropy has the rest",
    )
    add(
        "--temperature",
        type=positive_float,
        default=1.0,
        help="T of both sides in the KL, which is multiplied by T^2",
    )
    add("--k", type=positive_int, default=32, help="the teacher's ids per token in the file")
    add(
        "--support",
        choices=("vocabulary", "tail"),
        default="tail",
        help="other ids: ignored, or one more together",
    )
    args = parser.parse_args()
    check_multiple(parser, "--width", args.width, 2 * args.heads, "2 x --heads")
    return args


def load_teacher(args: Namespace, ranks: parallel.Ranks, corpus: Corpus) -> Trainer:
    """The teacher with its vocabulary sharded over the ranks of this run, to be validated on the
    students' batches."""
    folder = Path(args.teacher) / "checkpoints"
    config = checkpoint.progress(folder)["config"]
    sizes = {name: config[name] for name in ("layers", "width", "heads")}
    teacher = Trainer(Namespace(**{**vars(args), **sizes}), ranks, corpus)
    checkpoint.load(folder, teacher.model, None, ranks)
    return teacher


def distil(student: Trainer, term: Term) -> None:
    """Where a batch has a teacher (training does, validation does not), `term` takes its weight of
    cross-entropy's."""
    alone = student.objective
    terms = [CrossEntropy(1 - term.weight), term, ZLoss(student.args.z_weight)]
    taught = sharded_objective(student.model.output, terms)

    def objective(hidden, labels, tokens, teacher=None):
        return (
            alone(hidden, labels, tokens)
            if teacher is None
            else taught(hidden, labels, tokens, teacher=teacher)
        )

    student.objective = objective


@torch.no_grad()
def head_of(teacher: Trainer, inputs: torch.Tensor) -> TeacherHead:
    """inputs [B, T] -> the teacher's hidden states [B, T, H] and head; its logits are never made as
    a whole."""
    with teacher.autocast:
        hidden = teacher.model(inputs.to(teacher.ranks.device))
    if teacher.ranks.dp > 1:  # FSDP has the weight in one piece within its module's forward only
        teacher.model.output.unshard()
    return TeacherHead(hidden, teacher.model.output.weight, temperature=teacher.args.temperature)


def no_teacher(step: int, micro_batches: list) -> Iterable:
    return micro_batches


def online(teacher: Trainer) -> AddTeacher:
    """The teacher's hidden states of one micro-batch at a time, [B, T, H]."""

    def add_teacher(step, micro_batches):
        for inputs, labels in micro_batches:
            yield inputs, labels, head_of(teacher, inputs)

    return add_teacher


def export(teacher: Trainer, path: Path) -> None:
    """Write the teacher's top k for each token of each training batch: [steps, batch, length] of
    ids and log-probs [k], and the log-prob of all other ids.

    Called by all ranks: replicas compute the same, because each has a part of the weights, and rank
    0 writes. The log-probs are at the KL's temperature and over the whole vocabulary."""
    args, ranks = teacher.args, teacher.ranks
    part = path.with_name(path.name + ".part")
    entries = np.dtype(
        [
            ("ids", np.int32, args.k),
            ("log_probs", np.float16, args.k),
            ("tail_log_prob", np.float32),
        ]
    )
    if ranks.rank == 0:
        file = np.lib.format.open_memmap(part, "w+", entries, (args.steps, args.batch, args.length))
    compact = {"dtype": torch.float16, "ids_dtype": torch.int32}
    for step in range(args.steps):
        inputs, _ = teacher.corpus.batch("train", args.batch, args.seed, step)
        with teacher.autocast:
            tops = [
                topk_log_probs(head_of(teacher, piece), args.k, shard=teacher.shard, **compact)
                for piece in inputs.chunk(args.accumulate)
            ]
        if ranks.rank == 0:
            for name in entries.names:
                file[name][step] = torch.cat([getattr(top, name) for top in tops]).cpu()
    if ranks.rank == 0:
        file.flush()
        os.replace(part, path)
    ranks.meet()


def offline(path: Path, student: Trainer) -> AddTeacher:
    """What `export` wrote, memory-mapped: a step reads the rows of its batch."""
    file = np.load(path, mmap_mode="r")
    has_tail = student.args.support == "tail"

    def add_teacher(step, micro_batches):
        # [batch, length, k]
        entries = [torch.from_numpy(file[step][name].copy()) for name in file.dtype.names]
        for (inputs, labels), top in zip(micro_batches, student.cut(*entries), strict=True):
            ids, log_probs, tail = (x.to(student.ranks.device) for x in top)
            teacher = TopKTeacher(
                ids,
                log_probs,
                tail_log_prob=tail if has_tail else None,
                student_temperature=student.args.temperature,  # the log-probs have it already
                renormalize=not has_tail,
            )
            yield inputs, labels, teacher

    return add_teacher


def train(student: Trainer, add_teacher: AddTeacher, record: Callable[..., None]) -> None:
    args, seconds = student.args, 0.0
    record(step=0, **student.validate(), seconds=seconds)
    for step in range(args.steps):
        micro_batches = student.micro_batches("train", args.seed, step)
        tokens, _ = student.ranks.agree(
            sum(int((labels != IGNORE).sum()) for _, labels in micro_batches), False
        )
        [row] = student.rows([student.step(step, add_teacher(step, micro_batches), tokens)])
        seconds += row["step_seconds"]
        if (step + 1) % args.validate_every == 0 or step + 1 == args.steps:
            record(step=step + 1, **student.validate(), seconds=seconds)


def recorder(folder: Path, ranks: parallel.Ranks) -> Callable[..., None]:
    """A function that writes a row of validation metrics, on rank 0, to a new metrics.jsonl."""
    with ranks.together():
        if ranks.rank > 0:
            return lambda **row: None
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "metrics.jsonl").open("w", buffering=1)

    def record(**row):
        file.write(json.dumps({"split": "validation", **row}) + "\n")
        print(
            f"{folder.name}, step {row['step']}: validation cross-entropy {row['cross_entropy']:.4f}",
            flush=True,
        )

    return record


def main() -> None:
    args = parse()
    torch.use_deterministic_algorithms(True, warn_only=True)
    ranks = parallel.start(args.tp, args.device)
    out = Path(args.out)
    if not args.overwrite:
        ranks.first(lambda: refuse_older_run(out.glob("*/metrics.jsonl")))
    with ranks.together():
        config = checkpoint.progress(Path(args.teacher) / "checkpoints")["config"]
    # What is no option here is as it was for the teacher: vocabulary, text, length, regularisation.
    args = Namespace(**{**config, **vars(args), "baseline": False})
    with ranks.together():
        corpus = Corpus(Path(args.data_cache) / config["data"], args.length)
    if args.k > args.vocab:
        raise SystemExit(
            f"--k must be at most the teacher's vocabulary of {args.vocab}, got {args.k}"
        )
    teacher = load_teacher(args, ranks, corpus).validate()
    recorder(out / "teacher", ranks)(step=0, **teacher)
    for name in args.runs:
        student = Trainer(args, ranks, corpus)
        if name == "ce":
            add_teacher = no_teacher
        elif name == "online":
            distil(student, Distillation(args.kd_weight, temperature_squared=True))
            add_teacher = online(load_teacher(args, ranks, corpus))
        else:
            distil(
                student,
                TopKDistillation(args.kd_weight, support=args.support, temperature_squared=True),
            )
            export(load_teacher(args, ranks, corpus), out / "teacher" / "topk.npy")
            add_teacher = offline(out / "teacher" / "topk.npy", student)
        train(student, add_teacher, recorder(out / name, ranks))
    if ranks.rank == 0:
        from plot import plot_students

        plot_students(out / "teacher", [out / name for name in args.runs], out / "distill.png")
        print(f"curves: {out / 'distill.png'}", flush=True)
    if ranks.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
