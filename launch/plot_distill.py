"""Validation curves of distilled students:   python launch/plot_distill.py TEACHER RUN [RUN ...] [--png FILE]"""

import argparse
from pathlib import Path

from plot import plt, series


def plot(teacher: Path, students: list[Path], png: Path) -> None:
    figure, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for run in students:
        steps, values = series(run, "validation", "cross_entropy")
        ax.plot(steps, values, ".-", lw=1.2, label=f"{run.name}, {values[-1]:.3f} at the end")
    level = series(teacher, "validation", "cross_entropy")[1][-1]
    ax.axhline(level, color="grey", ls="--", label=f"teacher, {level:.3f}")
    ax.set(title="validation cross-entropy", xlabel="step", ylabel="nats per token")
    ax.grid(alpha=0.3)
    ax.legend()
    figure.savefig(png, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("teacher", type=Path, help="folder with metrics.jsonl")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the same of a student")
    parser.add_argument("--png", type=Path, help="default: distill.png beside the teacher's folder")
    args = parser.parse_args()
    png = args.png or args.teacher.parent / "distill.png"
    plot(args.teacher, args.runs, png)
    print(f"curves: {png}")


if __name__ == "__main__":
    main()
