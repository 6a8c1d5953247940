"""Draws the JSON files that `bench.py` wrote, a picture per part: tasks, or scaling.

`plot_bars.py` draws the implementations of one task.

    plot_bench.py tp4_tasks.json tp4_kd.json tp4_rl.json tp4_one_read_tasks.json --part tasks \\
        --without 'ours, gather' 'ours, in place' 'ours, symm_mem' --out bench_tasks.png
    plot_bench.py tp1_ce.json tp2_a.json tp2_b.json tp4_ce.json --part scaling \\
        --only ours Fast-LLM Liger flash-attention 'Transformer Engine' --out bench_scaling.png

Panels without data (one TP size only, say) are left out. Times are those of a CUDA graph (filled
markers), or eager ones (hollow) of what cannot be captured. A cross marks what computed something
wrong.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.colors as mcolors
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

FAMILIES = (
    "#d62728", "#1f77b4", "#17becf", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#ff7f0e", "#444444",
)  # fmt: skip
TASKS = {  # as bench.py calls them -> as the pictures do
    "ce": "cross-entropy", "ce+z": "cross-entropy, z-loss",
    "ce+z+entropy+accuracy": "cross-entropy, z-loss, entropy bonus; two metrics",
    "log_prob+entropy": "log-prob and entropy", "grpo": "cross-entropy, z-loss, clipped policy gradient",
    "rl": "clipped policy gradient, KL, entropy; 29 metrics", "user": "cross-entropy, a focal loss in PyTorch",
    "kl": "forward KL to a teacher", "reverse_kl": "reverse KL to a teacher", "ce+kl": "cross-entropy, forward KL",
    "ce+kl, temperature": "cross-entropy, forward KL at a temperature of 2",
    "jsd": "Jensen-Shannon divergence to a teacher", "ce+topk": "cross-entropy, top-K teacher, whole vocabulary",
    "ce+topk, renorm": "cross-entropy, top-K teacher, its entries",
    "ce+topk, tail": "cross-entropy, top-K teacher and its tail",
    "ce+z+smoothing+metrics": "cross-entropy, smoothing, z-loss; two metrics",
    "clip+kl+entropy": "clipped policy gradient, KL; entropy", "sets": "entropy and mass of sets of 64 ids",
    "log_probs_at": "log-probs at 64 ids", "ce+rank": "cross-entropy; the label's rank",
}  # fmt: skip


def load(paths):
    rows = [row for path in paths for row in json.loads(Path(path).read_text())["rows"]]
    identity = ("task", "tokens", "vocab", "tp", "implementation")
    # the last of what is there twice
    rows = list({tuple(row[key] for key in identity): row for row in rows}.values())
    return [row for row in rows if row.get("eager_us")]


def over_floor(row):
    return row.get("graph_over_floor") or row["eager_over_floor"]


def styles(rows):
    """name -> (colour, line style): one colour per family, "ours" first, lighter and dashed for its
    variants."""
    names = sorted(
        {"ours"} | {row["implementation"] for row in rows},
        key=lambda n: (not n.startswith("ours"), n),
    )
    families = list(dict.fromkeys(name.split(",")[0] for name in names))
    seen, out = Counter(), {}
    for name in names:
        family = name.split(",")[0]
        color = mcolors.to_rgb(FAMILIES[families.index(family) % len(FAMILIES)])
        paler = min(0.35 * seen[family], 0.7)
        out[name] = (
            tuple(c + paler * (1 - c) for c in color),
            ["-", "--", ":", "-."][seen[family] % 4],
        )
        seen[family] += 1
    used = {row["implementation"] for row in rows}
    return {name: style for name, style in out.items() if name in used}


def named(coordinate):
    """A number of tokens, ids or GPUs in words."""
    key, number = coordinate
    if key == "tp":
        return "one GPU" if number == 1 else f"{number} GPUs"
    return f"{number} tokens" if key == "tokens" else f"{number} ids"


def at(rows, **values):
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def point(axis, x, y, row, color):
    filled = bool(row.get("graph_over_floor"))
    axis.plot(
        x,
        y,
        "o",
        color=color,
        mfc=color if filled else "white",
        ms=6,
        mew=1.3,
        zorder=3,
        clip_on=False,
    )
    if row["status"] == "wrong":
        axis.plot(x, y, "x", color="black", ms=10, mew=1.5, zorder=4)


def ratio_axis(axis, direction, values):
    """A logarithmic axis of times over the floor, with plain numbers."""
    getattr(axis, f"set_{direction}scale")("log")
    ticks = (
        (1, 1.25, 1.5, 2, 3, 4) if max(values) < 5 else (1, 2, 3, 5, 10, 20, 50, 100, 1000, 10000)
    )
    ticks = [tick for tick in ticks if tick <= 1.15 * max(values)]
    side = getattr(axis, f"{direction}axis")
    side.set_major_locator(FixedLocator(ticks))
    side.set_minor_locator(NullLocator())
    side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    getattr(axis, f"set_{direction}lim")(min(0.95, 0.95 * min(values)), 1.15 * max(values))
    (axis.axvline if direction == "x" else axis.axhline)(1, color="black", lw=1, ls="--", zorder=1)


def by_task(axis, rows, style, shape):
    """Time over the floor of every task at one shape and TP size."""
    rows = at(rows, **shape)
    tasks = list(dict.fromkeys(row["task"] for row in rows))[::-1]
    for row in rows:
        point(axis, over_floor(row), tasks.index(row["task"]), row, style[row["implementation"]][0])
    ratio_axis(axis, "x", [over_floor(row) for row in rows])
    axis.set_yticks(range(len(tasks)), [TASKS.get(task, task) for task in tasks])
    axis.set_ylim(-0.6, len(tasks) - 0.4)
    axis.set(
        title=", ".join(map(named, shape.items())), xlabel="forward + backward, time over the floor"
    )
    axis.grid(lw=0.4, color="#cccccc")


def scaling(axis, rows, style, key, label, shape):
    """Time over the floor along one of tokens, vocab and tp, at the others of the shape."""
    fixed = {name: value for name, value in shape.items() if name != key}
    rows = at(rows, **fixed)
    for name in dict.fromkeys(row["implementation"] for row in rows):
        line = sorted(at(rows, implementation=name), key=lambda row: row[key])
        ours = name.startswith("ours")
        color, dashes = style[name]
        times = [over_floor(row) for row in line]
        axis.plot([row[key] for row in line], times, color=color, ls=dashes, lw=2 if ours else 1.1)
        for row in line:
            point(axis, row[key], over_floor(row), row, style[name][0])
    values = sorted({row[key] for row in rows})
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(values))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{x / 1000:.0f}k" if key == "vocab" else f"{x:g}")
    )
    if len(values) > 3:  # steep enough for 128k beside 152k
        plt.setp(axis.get_xticklabels(), rotation=60, ha="right", rotation_mode="anchor")
    ratio_axis(axis, "y", [over_floor(row) for row in rows])
    axis.set(title=", ".join(map(named, fixed.items())), xlabel=label, ylabel="time over the floor")
    axis.grid(lw=0.4, color="#cccccc")


def legend(figure, style, rows):
    """The lines of all implementations, and the markers of exceptions."""
    handles = [
        Line2D(
            [],
            [],
            color=color,
            ls=line,
            marker="o",
            lw=2 if name.startswith("ours") else 1.1,
            label=name,
        )
        for name, (color, line) in style.items()
    ]
    plain = dict(color="#555555", lw=0)
    if any(not row.get("graph_over_floor") for row in rows):
        handles.append(
            Line2D([], [], marker="o", mfc="white", label="eager: not capturable", **plain)
        )
    if any(row["status"] == "wrong" for row in rows):
        handles.append(Line2D([], [], marker="x", ms=9, label="result wrong", **plain))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def draw(part, rows, task, shape):
    """One figure: "tasks", or "scaling" of one task, at a shape and along its numbers of tokens,
    ids and GPUs."""
    if part == "tasks":
        figure = plt.figure(
            figsize=(10, 2 + 0.4 * len({row["task"] for row in rows})), layout="constrained"
        )
        by_task(figure.subplots(), rows, styles(rows), shape)
    else:
        rows = at(rows, task=task)
        ways = [
            ("tokens", "tokens"),
            ("vocab", "ids of the vocabulary"),
            ("tp", "GPUs that share the vocabulary"),
        ]
        ways = [(key, label) for key, label in ways if len({row[key] for row in rows}) > 1]
        figure = plt.figure(figsize=(10, 5.6), layout="constrained")
        for (key, label), axis in zip(ways, figure.subplots(1, len(ways), squeeze=False)[0]):
            scaling(axis, rows, styles(rows), key, label, shape)
    legend(figure, styles(rows), rows)
    return figure


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("json", nargs="+", help="files of bench.py --json")
    parser.add_argument("--part", choices=("tasks", "scaling"), default="tasks")
    parser.add_argument("--out", default="bench.png")
    parser.add_argument("--task", default="ce", help="of scaling")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--tp", type=int, help="default: the smallest number of GPUs")
    parser.add_argument(
        "--without", nargs="+", default=[], help="implementations that are not drawn"
    )
    parser.add_argument("--only", nargs="+", help="those that are drawn")
    args = parser.parse_args()
    rows = load(args.json)
    rows = [row for row in rows if row["implementation"] not in args.without]
    rows = [row for row in rows if args.only is None or row["implementation"] in args.only]
    shape = {
        "tokens": args.tokens,
        "vocab": args.vocab,
        "tp": args.tp or min(row["tp"] for row in rows),
    }
    if not at(rows, **shape):
        parser.error(f"no measured rows of {shape} in {args.json}")
    figure = draw(args.part, rows, args.task, shape)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
