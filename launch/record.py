"""What a run leaves behind: metrics.jsonl (a row per step), TensorBoard scalars, progress on the
terminal."""

import json
import resource
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from tqdm import tqdm


def refuse_older_run(files: Iterable[Path], resume: str = "") -> None:
    """End this program if one of the files that it would replace exists; resume: one more way out,
    if there is one."""
    for file in files:
        if file.exists():
            raise SystemExit(
                f"{file} is from an older run: {resume}replace it (--overwrite) or choose another --out"
            )


def rows_until(path: Path, step: int) -> list[dict]:
    """The rows of a metrics.jsonl up to a step, without a last line that has no end: a full disk or
    a killed program cut it, and its step will be repeated."""
    rows = []
    *lines, _cut = path.read_text(errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows += [row] if row["step"] <= step else []
        except (ValueError, TypeError, KeyError):
            raise SystemExit(
                f"{path}, line {number}: expected a JSON object with a step, got {line[:80]!r}"
            ) from None
    return rows


def peak_memory(device: torch.device) -> tuple[str, float]:
    """GiB so far of this process: allocated on its GPU, or resident on the host."""
    if device.type == "cuda":
        return "peak_gpu_allocated_gib", torch.cuda.max_memory_allocated(device) / 2**30
    kilobyte = 1 if sys.platform == "darwin" else 1024
    return "peak_host_resident_gib", resource.getrusage(
        resource.RUSAGE_SELF
    ).ru_maxrss * kilobyte / 2**30


class Record:
    """Rank 0 writes; on other ranks everything here does nothing."""

    def __init__(self, out: Path, first: int, steps: int, active: bool):
        self.active = active
        if not active:
            return
        from torch.utils.tensorboard import SummaryWriter

        path = out / "metrics.jsonl"
        # A resumed run repeats the steps after its checkpoint: their rows go. In another file, or a
        # run that is killed here would lose the others, too.
        rows = rows_until(path, first) if first else []
        part = path.with_name(path.name + ".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in rows))
        part.replace(path)
        self.file = path.open("a", buffering=1)
        if not first:
            shutil.rmtree(out / "tensorboard", ignore_errors=True)
        self.board = SummaryWriter(out / "tensorboard", purge_step=first + 1)
        self.bar = tqdm(
            total=steps, initial=first, disable=not sys.stderr.isatty(), unit="step", leave=False
        )
        self.steps, self.said = steps, first

    def write(self, split: str, row: dict) -> None:
        if not self.active:
            return
        self.file.write(json.dumps({"split": split, **row}) + "\n")
        for name, value in row.items():
            if name != "step":
                self.board.add_scalar(f"{split}/{name}", value, row["step"])
        if split == "validation":
            self.say(f"step {row['step']}: validation cross-entropy {row['cross_entropy']:.4f}")
        else:
            self.progress(row)

    def progress(self, row: dict) -> None:
        step = row["step"]
        self.bar.set_postfix(
            loss=f"{row['loss']:.4f}", tokens_s=f"{row['tokens_per_second']:.0f}", refresh=False
        )
        self.bar.update(step - self.bar.n)
        if self.bar.disable and (step - self.said >= 20 or step == self.steps):
            self.said = step
            self.say(
                f"step {step}/{self.steps}: loss {row['loss']:.4f}, accuracy "
                f"{row['accuracy']:.3f}, {row['tokens_per_second']:.0f} tokens/s, head "
                f"{row['head_share']:.0%} of the step"
            )

    def say(self, text: str) -> None:
        if self.active:
            self.bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        if self.active:
            self.bar.close()
            self.board.close()
            self.file.close()
