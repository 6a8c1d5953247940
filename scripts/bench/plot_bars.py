"""Draws the bar chart of the README: time over the floor and peak memory of a cross-entropy step,
two TP sizes.

    python scripts/bench/plot_bars.py docs/bench/tp1.json docs/bench/tp4_tasks.json \\
        docs/bench/tp1_one_read_h200.json docs/bench/tp4_one_read_tasks.json --out docs/bars.png

Times are those of a CUDA graph; of what cannot be captured (hatched), of eager steps.
"""

import argparse

from plot_bench import at, load, over_floor, plt

COLORS = "#4c78a8", "#f58518"
NAMES = {  # as bench.py calls them -> as the chart does
    "quack": "QuACK",
    "quack, one launch": "QuACK, one launch",
    "torch loss_parallel": "torch, loss_parallel",
}
SHOWN = [
    "ours", "ours, in place", "quack, one launch", "Fast-LLM", "quack", "flash-attention", "Liger, CuTe", "Liger",
    "Transformer Engine", "torch.compile", "Liger, vocab-parallel", "Megatron-Core, fused", "Megatron-Core",
    "DeepSpeed", "torch loss_parallel",
]  # fmt: skip


def bars(axis, rows, groups, value, digits, key="tp", shown=SHOWN):
    """A bar per implementation, of those shown, and group, a value of row[key]; what is not in rows
    has none."""
    height = 0.8 / len(groups)
    for i, (group, color) in enumerate(zip(groups, COLORS)):
        for row in at(rows, **{key: group}):
            line = shown.index(row["implementation"]) - 0.4 + (i + 0.5) * height
            hatch = (
                "////" if row.get("eager_over_floor") and not row.get("graph_over_floor") else None
            )
            axis.barh(
                line, value(row), height * 0.9, color=color, hatch=hatch, edgecolor="white", lw=0
            )
            axis.annotate(f"{value(row):.{digits}f}", (value(row), line), (3, 0), textcoords="offset points",
                          va="center", fontsize=7, color="#444444")  # fmt: skip
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.09)


def memory_in_logits(row):
    """Peak memory as a multiple of the logits of this GPU, in bf16."""
    return row["extra_memory_mib"] * 2**20 / (row["tokens"] * row["columns"] * 2)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("json", nargs="+", help="files of bench.py --json")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--out", default="bars.png")
    args = parser.parse_args()
    rows = at(load(args.json), task="ce", tokens=args.tokens, vocab=args.vocab)
    rows = [row for row in rows if row["implementation"] in SHOWN]
    sizes = sorted({row["tp"] for row in rows})
    figure, (time, memory) = plt.subplots(
        1, 2, figsize=(10, 6), sharey=True, layout="constrained", width_ratios=[3, 2]
    )
    bars(time, rows, sizes, over_floor, digits=2)
    bars(
        memory,
        [row for row in rows if row["extra_memory_mib"] is not None],
        sizes,
        memory_in_logits,
        digits=1,
    )
    time.set(
        title="time of forward + backward", xlabel="times the floor (1: reads and writes alone)"
    )
    memory.set(title="peak memory beyond the logits", xlabel="sizes of this GPU's logits")
    time.axvline(1, color="black", lw=0.8, ls="--")
    time.set_yticks(range(len(SHOWN)), [NAMES.get(name, name) for name in SHOWN])
    for label in time.get_yticklabels():
        label.set_fontweight("bold" if label.get_text().startswith("ours") else "normal")
    time.invert_yaxis()
    labels = {1: "whole vocabulary on one GPU"}
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS]
    names = [labels.get(tp, f"sharded over {tp} GPUs") for tp in sizes]
    time.legend(handles, names, loc="upper right", frameon=False)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
