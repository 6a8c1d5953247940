"""Loss curves, time and memory of one run of launch/megatron_pretrain.py:

python launch/plot_megatron.py RESULTS.json [--png FILE]
"""

import argparse
import json
import statistics
from pathlib import Path

from plot import drawn

LABELS = {
    "stock": "Megatron's", "stock, again": "Megatron's, again", "stock-fused": "Megatron's, fused (native)",
    "stock-te": "Transformer Engine's", "logits": "ours, from logits", "logits-inplace": "ours, from logits, in place",
    "head": "ours, the fused head", "head-one-sweep": "ours, the fused head, one sweep",
}  # fmt: skip
WINDOW = 20  # steps of a running mean of differences


def running_mean(values: list[float]) -> list[float]:
    return [statistics.fmean(values[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(values))]


def stacked(ax, names, parts: dict[str, list[float]], totals: list[float], unit: str) -> None:
    """Horizontal bars, one a loss, the first at the top; the total at their end."""
    left = [0.0] * len(names)
    for (label, values), color in zip(parts.items(), ("C1", "lightgrey")):
        ax.barh(range(len(names)), values, left=left, color=color, label=label)
        left = [a + b for a, b in zip(left, values)]
    for i, total in enumerate(totals):
        ax.text(total, i, f" {total:.{1 if total < 100 else 0}f} {unit}", va="center", fontsize=8)
    ax.set_yticks(range(len(names)), [LABELS.get(name, name) for name in names], fontsize=8)
    ax.invert_yaxis()
    ax.set_xlim(right=1.2 * max(totals))
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, fontsize=8)


def plot(results: dict, png: Path, title: str) -> None:
    first = next(iter(results))
    names = [name for name in results if not name.endswith(", again")]
    with drawn(png, 2, 2, (13, 8)) as (figure, ((losses, time), (gap, memory))):
        for i, (name, r) in enumerate(results.items()):
            label, color = LABELS.get(name, name), f"C{i}"
            steps = range(1, len(r["loss"]) + 1)
            line = {"lw": 4, "alpha": 0.35} if name == first else {"lw": 0.9}
            losses.plot(steps, r["loss"], color, label=label, **line)
            if name != first:
                differences = [
                    abs(a - b) for a, b in zip(r["loss"], results[first]["loss"], strict=True)
                ]
                gap.plot(steps, running_mean(differences), color, lw=1.2, label=label)
        losses.set(title="loss of each step", xlabel="step", ylabel="nats per token")
        title_of_gap = f"difference from {LABELS.get(first, first)}, mean of {WINDOW} steps"
        gap.set(title=title_of_gap, xlabel="step", yscale="log")
        for ax in (losses, gap):
            ax.legend(fontsize=8)
        keys = "step_seconds", "head_seconds"
        step, head = (
            [1e3 * statistics.median(results[name][key][3:]) for name in names] for key in keys
        )
        parts = {"output layer and loss": head, "the rest": [a - b for a, b in zip(step, head)]}
        stacked(time, names, parts, step, "ms")
        time.set(title="median time of a step")
        if "step_mib" in results[first]:  # on GPUs
            step, head = (
                [results[name][key] for name in names] for key in ("step_mib", "head_mib")
            )
            parts = {
                "added by output layer and loss": head,
                "the rest": [a - b for a, b in zip(step, head)],
            }
            stacked(memory, names, parts, step, "MiB")
        memory.set(title="peak memory of a rank")
        figure.suptitle(title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("results", type=Path, help="what --out has written, without graphs")
    parser.add_argument("--png", type=Path, help="default: beside the results")
    args = parser.parse_args()
    record = json.loads(args.results.read_text())
    shape = "GPTModel, hidden {hidden}, {layers} layers, {vocab} ids, TP {tp}".format(
        **record["arguments"]
    )
    png = args.png or args.results.with_suffix(".png")
    plot(record["results"], png, f"{shape}, {record['device']}")
    print(f"curves: {png}")


if __name__ == "__main__":
    main()
