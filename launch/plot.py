"""Curves of one run, or two runs over each other:   python launch/plot.py RUN [RUN] [--png FILE]"""

import argparse
import contextlib
import importlib.metadata
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def series(run: Path, split: str, name: str) -> tuple[list, list]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["split"] == split]
    return [row["step"] for row in rows], [row[name] for row in rows]


@contextlib.contextmanager
def drawn(png: Path, rows: int, columns: int, size: tuple[float, float], **shared):
    """The figure and its axes, to draw on; then they get grids and legends, and the figure is
    written."""
    figure, axes = plt.subplots(
        rows, columns, figsize=size, layout="constrained", squeeze=False, **shared
    )
    yield figure, axes
    for ax in axes.flat:
        ax.grid(alpha=0.3)
        if ax.get_legend_handles_labels()[0] and not ax.get_legend():
            ax.legend()
    figure.savefig(png, dpi=110)
    plt.close(figure)


def plot_run(run: Path, png: Path) -> None:
    with drawn(png, 2, 2, (11, 7)) as (figure, ((loss, quality), (speed, share))):
        loss.plot(*series(run, "train", "cross_entropy"), label="train")
        loss.plot(*series(run, "validation", "cross_entropy"), "o-", label="validation")
        loss.set(title="cross-entropy", ylabel="nats per token")
        right = quality.twinx()
        both = quality.plot(*series(run, "train", "entropy")) + right.plot(
            *series(run, "train", "accuracy"), "C1"
        )
        right.set_ylim(bottom=0)
        right.legend(both, ["entropy (nats, left)", "accuracy (right)"], loc="upper center")
        quality.set(title="entropy and accuracy, train")
        speed.plot(*series(run, "train", "tokens_per_second"))
        speed.set(title="tokens per second")
        speed.set_ylim(bottom=0)
        share.plot(*series(run, "train", "head_share"))
        share.set(title="share of the step in output layer + loss", ylim=(0, 1), xlabel="step")
        speed.set_xlabel("step")
        figure.suptitle(run.name)


def plot_students(teacher: Path, students: list[Path], png: Path) -> None:
    """Validation curves of distilled students, and the level of their teacher."""
    with drawn(png, 1, 1, (8, 4.5)) as (_, ((ax,),)):
        for run in students:
            steps, values = series(run, "validation", "cross_entropy")
            ax.plot(steps, values, ".-", lw=1.2, label=f"{run.name}, {values[-1]:.3f} at the end")
        level = series(teacher, "validation", "cross_entropy")[1][-1]
        ax.axhline(level, color="grey", ls="--", label=f"teacher, {level:.3f}")
        ax.set(title="validation cross-entropy", xlabel="step", ylabel="nats per token")


def plot_comparison(first: Path, second: Path, png: Path) -> float:
    """Loss curves over each other and their difference; returns the largest one, over train and
    validation."""
    largest = 0.0
    with drawn(png, 2, 1, (9, 7), sharex=True, height_ratios=(2, 1)) as (_, ((top,), (bottom,))):
        for split, color, marker in (("train", "C0", ""), ("validation", "C1", "o")):
            (steps, a), (others, b) = (series(run, split, "loss") for run in (first, second))
            if steps != others:
                raise SystemExit(f"{first} and {second} hold different {split} steps")
            top.plot(
                steps, a, color, marker=marker, lw=4, alpha=0.35, label=f"{split}, {first.name}"
            )
            top.plot(steps, b, color, ls="--", lw=1.2, label=f"{split}, {second.name}")
            difference = [abs(x - y) for x, y in zip(a, b, strict=True)]
            bottom.plot(steps, difference, color, marker=marker or ".", ls="", label=split)
            largest = max(largest, *difference)
        top.set(title="loss", ylabel="nats per token")
        bottom.set(title=f"absolute difference, at most {largest:.1e}", xlabel="step", yscale="log")
        bottom.set_ylim(bottom=1e-8)  # equal losses have no logarithm and no point
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder with metrics.jsonl, one or two"
    )
    parser.add_argument(
        "--png", type=Path, help="default: curves.png or comparison.png in the (first) run"
    )
    args = parser.parse_args()
    if len(args.runs) == 1:
        png = args.png or args.runs[0] / "curves.png"
        plot_run(args.runs[0], png)
    else:
        first, second = args.runs
        png = args.png or first / "comparison.png"
        largest = plot_comparison(first, second, png)
        print(f"largest difference of the losses of {first.name} and {second.name}: {largest:.2e}")
        found = {"largest_difference": largest, "steps": max(series(first, "train", "loss")[0])}
        versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy")}
        png.with_suffix(".json").write_text(json.dumps(found | {"versions": versions}) + "\n")
    print(f"curves: {png}")


if __name__ == "__main__":
    main()
