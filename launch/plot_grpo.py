"""Curves of GRPO runs, over each other:   python launch/plot_grpo.py RUN [RUN ...] [--png FILE]"""

import argparse
from pathlib import Path

from plot import plt, series

PANELS = {  # title -> metrics
    "reward": ("reward", "exact_match"),
    "KL to the reference (k3), nats per token": ("kl_reference",),
    "entropy, nats per token": ("entropy",),
    "share of tokens outside of the clip": ("clip_fraction",),
}


def plot(runs: list[Path], png: Path) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
    for ax, (title, names) in zip(axes.flat, PANELS.items()):
        for i, run in enumerate(runs):
            for j, name in enumerate(names):
                line = {"color": f"C{2 * i + j}", "ls": ("-", "--")[i % 2], "lw": 1.2}
                ax.plot(*series(run, "train", name), label=f"{name}, {run.name}", **line)
        ax.set_title(title)
        ax.grid(alpha=0.3)
    (reward, divergence), bottom = axes
    reward.set_ylim(0, 1)
    reward.legend()
    divergence.set_yscale("log")  # each refresh of the reference takes it down by orders of magnitude
    for ax in bottom:
        ax.set_ylim(bottom=0)
        ax.set_xlabel("step")
    figure.savefig(png, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder with metrics.jsonl")
    parser.add_argument("--png", type=Path, help="default: grpo.png in the first run")
    args = parser.parse_args()
    png = args.png or args.runs[0] / "grpo.png"
    plot(args.runs, png)
    print(f"curves: {png}")


if __name__ == "__main__":
    main()
