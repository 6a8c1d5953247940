"""Draws time against the error of dH, of the heads in a file of bench_linear.py --states:

    python scripts/bench/plot_linear_errors.py docs/bench/tp1_linear_trained_h200.json \\
        --out docs/linear_errors.png

Below is more exact, left is faster. Times are of eager steps.
"""

import argparse
import json
from pathlib import Path

from plot_bench import plt

LOOKS = {  # as bench_linear.py calls them -> colour, marker
    "ours, fp8 gradients, exact logits": ("#e45756", "*"),
    "ours, fp8 gradients": ("#f58518", "o"),
    "ours, one sweep, dW returned": ("#4c78a8", "o"),
    "ours, one sweep, exact logits": ("#4c78a8", "*"),
    "materialised logits": ("#72b7b2", "o"),
}
OTHERS = "s^Dvph<>8Pd"
FLOOR = "three GEMMs"


def look(name, names):
    """Colour and marker: grey where it is not ours."""
    others = [other for other in names if other not in LOOKS]
    return LOOKS.get(name) or ("#888888", OTHERS[others.index(name) % len(OTHERS)])


def panels(rows):
    """Rows with errors, by the entropy of their states, from unsure to sure."""
    found = {}
    for row in rows:
        if row.get("errors") and row["status"] == "ok":
            found.setdefault(row["entropy"], []).append(row)
    return dict(sorted(found.items(), reverse=True))


def draw(axis, entropy, rows, floor):
    """One panel."""
    names = [row["implementation"] for row in rows]
    axis.axvline(floor, color="#bbbbbb", ls="--", lw=1, label="its three products in bf16")
    for row, name in zip(rows, names):
        color, marker = look(name, names)
        time, error = row["eager_us"][1] / 1000, row["errors"][1]
        axis.plot(
            time, error, marker, color=color, ms=8, ls="", label=name.replace(", dW returned", "")
        )
    axis.set(xscale="log", yscale="log", title=f"{entropy:.1f} nats", xlabel="ms of a step")
    axis.set_xticks([4, 6, 10, 20, 60], ["4", "6", "10", "20", "60"])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("json", type=Path, help="file of bench_linear.py --states --json")
    parser.add_argument("--out", default="linear_errors.png")
    args = parser.parse_args(argv)
    data = json.loads(args.json.read_text())
    found = panels(data["rows"])
    row = data["rows"][0]
    figure, axes = plt.subplots(
        1,
        len(found),
        figsize=(3.4 * len(found), 4.2),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (entropy, rows) in zip(axes[0], found.items()):
        floors = [row["eager_us"][1] / 1000 for row in data["rows"]
                  if row["implementation"] == FLOOR and row["entropy"] == entropy]  # fmt: skip
        draw(axis, entropy, rows, floors[0])
    axes[0][0].set_ylabel("error of dH, relative")
    axes[0][0].set_yticks(
        [1e-3, 2e-3, 5e-3, 1e-2, 2e-2], ["0.001", "0.002", "0.005", "0.01", "0.02"]
    )
    axes[0][0].minorticks_off()
    title = f"Linear head, {row['tokens']} tokens, H {row['hidden']}, {row['vocab']} ids, {data['device']}"
    figure.suptitle(title, fontsize=10)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(args.out, dpi=130)


if __name__ == "__main__":
    main()
