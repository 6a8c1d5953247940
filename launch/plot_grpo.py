"""Curves of GRPO runs, over each other:

    python launch/plot_grpo.py RUN [RUN ...] [--together N] [--refresh N] [--png FILE]

Runs that belong together, such as a sharded one and an unsharded one of the same seed, share a
colour: name them one after the other, and their number with --together. The first of them is solid,
the second dashed.
"""

import argparse
from pathlib import Path

from options import non_negative_int, positive_int
from plot import drawn, series

PANELS = {  # title -> metric
    "mean reward": "reward",
    "KL to the reference (k3), nats per token": "kl_reference",
    "entropy, nats per token": "entropy",
    "share of tokens outside of the clip": "clip_fraction",
}


def plot(runs: list[Path], png: Path, refresh: int = 0, together: int = 1) -> None:
    """Draw the runs; dotted lines where the policy becomes the reference, every `refresh` steps (0:
    none)."""
    with drawn(png, 2, 2, (11, 7), sharex=True) as (_, axes):
        for ax, (title, name) in zip(axes.flat, PANELS.items()):
            for i, run in enumerate(runs):
                line = {
                    "color": f"C{i // together}",
                    "ls": ("-", "--", ":")[i % together % 3],
                    "lw": 1.2,
                }
                steps, values = series(run, "train", name)
                ax.plot(steps, values, label=run.name if ax is axes[0, 0] else None, **line)
            ax.set_title(title)
        (reward, divergence), bottom = axes
        reward.set_ylim(0, 1)
        for step in range(refresh, max(steps), refresh) if refresh else ():
            label = "the policy becomes the reference" if step == refresh else None
            divergence.axvline(step + 0.5, color="black", ls=":", lw=0.8, label=label)
        # each refresh of the reference takes it down by orders of magnitude
        divergence.set_yscale("log")
        for ax in bottom:
            ax.set_ylim(bottom=0)
            ax.set_xlabel("step")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder with metrics.jsonl"
    )
    parser.add_argument("--together", type=positive_int, default=1, help="runs of one colour")
    parser.add_argument(
        "--refresh",
        type=non_negative_int,
        default=20,
        help="as of launch/grpo.py; 0: draws no lines",
    )
    parser.add_argument("--png", type=Path, help="default: grpo.png in the first run")
    args = parser.parse_args()
    png = args.png or args.runs[0] / "grpo.png"
    plot(args.runs, png, args.refresh, args.together)
    print(f"curves: {png}")


if __name__ == "__main__":
    main()
