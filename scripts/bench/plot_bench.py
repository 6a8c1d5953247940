"""Draws the JSON files that `bench.py` wrote: time over the floor and memory, tasks, tokens, vocabulary and TP size.

    python scripts/bench/plot_bench.py tp1.json tp2.json tp4.json --out bench.png

Panels without data (one TP size only, say) are left out. Times are those of a CUDA graph (filled markers), or eager
ones (hollow) of what cannot be captured. A cross marks what computed something wrong.
"""

import argparse
import json
import textwrap
from collections import Counter
from math import ceil
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.colors as mcolors
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

FAMILIES = [
    "#d62728",
    "#1f77b4",
    "#17becf",
    "#2ca02c",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#bcbd22",
    "#ff7f0e",
    "#444444",
]
TP_MARKERS = {1: "o", 2: "s", 4: "D", 8: "^"}


def load(paths):
    reports = [json.loads(Path(path).read_text()) for path in paths]
    rows = [row for report in reports for row in report["rows"]]
    identity = ("task", "tokens", "vocab", "tp", "implementation")
    rows = list({tuple(row[key] for key in identity): row for row in rows}.values())  # the last of what is there twice
    return reports, [row for row in rows if row.get("eager_us")], [row for row in rows if not row.get("eager_us")]


def over_floor(row):
    return row.get("graph_over_floor") or row["eager_over_floor"]


def styles(rows):
    """name -> (colour, line style): one colour per family, "ours" first, lighter and dashed for its variants."""
    names = sorted({"ours"} | {row["implementation"] for row in rows}, key=lambda n: (not n.startswith("ours"), n))
    families = list(dict.fromkeys(name.split(",")[0] for name in names))
    seen, out = Counter(), {}
    for name in names:
        family = name.split(",")[0]
        color = mcolors.to_rgb(FAMILIES[families.index(family) % len(FAMILIES)])
        paler = min(0.35 * seen[family], 0.7)
        out[name] = tuple(c + paler * (1 - c) for c in color), ["-", "--", ":", "-."][seen[family] % 4]
        seen[family] += 1
    used = {row["implementation"] for row in rows}
    return {name: style for name, style in out.items() if name in used}


def usual(rows, wanted):
    """The wanted (tokens, vocabulary) if it was measured, else the shape with the most rows, the largest of them."""
    counts = Counter((row["tokens"], row["vocab"]) for row in rows)
    return max(counts, key=lambda shape: (shape == wanted, counts[shape], shape[0] * shape[1]))


def at(rows, **values):
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def point(axis, x, y, row, color, marker):
    filled = bool(row.get("graph_over_floor"))
    axis.plot(x, y, marker, color=color, mfc=color if filled else "white", ms=6, mew=1.3, zorder=3, clip_on=False)
    if row["status"] == "wrong":
        axis.plot(x, y, "x", color="black", ms=10, mew=1.5, zorder=4)


def ratio_axis(axis, direction, values):
    """A logarithmic axis of times over the floor, with plain numbers."""
    getattr(axis, f"set_{direction}scale")("log")
    ticks = (1, 1.25, 1.5, 2, 3, 4) if max(values) < 5 else (1, 2, 3, 5, 10, 20, 50, 100, 1000, 10000)
    ticks = [tick for tick in ticks if tick <= 1.15 * max(values)]
    side = getattr(axis, f"{direction}axis")
    side.set_major_locator(FixedLocator(ticks))
    side.set_minor_locator(NullLocator())
    side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    getattr(axis, f"set_{direction}lim")(min(0.95, 0.95 * min(values)), 1.15 * max(values))
    (axis.axvline if direction == "x" else axis.axhline)(1, color="black", lw=1, ls="--", zorder=1)


def by_implementation(axes, rows, style, task, wanted):
    """Two panels that share their lines: time over the floor, and memory over the size of the logits."""
    tokens, vocab = usual(rows, wanted)
    rows = at(rows, tokens=tokens, vocab=vocab)
    names = sorted(
        {r["implementation"] for r in rows}, key=lambda n: -min(over_floor(r) for r in at(rows, implementation=n))
    )
    time, memory = axes
    for row in rows:
        line, marker = names.index(row["implementation"]), TP_MARKERS.get(row["tp"], "*")
        point(time, over_floor(row), line, row, style[row["implementation"]][0], marker)
        if row["extra_memory_mib"] is not None:
            logits = row["tokens"] * row["columns"] * row["itemsize"] / 2**20
            point(memory, row["extra_memory_mib"] / logits, line, row, style[row["implementation"]][0], marker)
    ratio_axis(time, "x", [over_floor(row) for row in rows])
    time.set(title=f"{task}, {tokens} tokens x {vocab} ids", xlabel="forward + backward, time over the floor")
    memory.set(title="peak memory above the inputs", xlabel="in sizes of the logits", xlim=(-0.1, None))
    for axis in axes:
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(-0.6, len(names) - 0.4)
        axis.grid(axis="both", lw=0.4, color="#cccccc")
    memory.tick_params(labelleft=False)


def by_task(axis, rows, style, wanted):
    """Time over the floor of every task at one shape and TP size."""
    tp = Counter(row["tp"] for row in rows).most_common(1)[0][0]
    tokens, vocab = usual(at(rows, tp=tp), wanted)
    rows = at(rows, tp=tp, tokens=tokens, vocab=vocab)
    tasks = list(dict.fromkeys(row["task"] for row in rows))[::-1]
    for row in rows:
        point(axis, over_floor(row), tasks.index(row["task"]), row, style[row["implementation"]][0], "o")
    ratio_axis(axis, "x", [over_floor(row) for row in rows])
    axis.set_yticks(range(len(tasks)), tasks)
    axis.set_ylim(-0.6, len(tasks) - 0.4)
    axis.set(title=f"tasks, {tokens} x {vocab}, TP {tp}", xlabel="forward + backward, time over the floor")
    axis.grid(lw=0.4, color="#cccccc")


def scaling(axis, rows, style, key, label, wanted):
    """Time over the floor along one of tokens, vocab and tp, where the others are what most rows have."""
    others = [name for name in ("tokens", "vocab", "tp") if name != key]
    fixed = best_line(rows, key, others, wanted)
    rows = at(rows, **fixed)
    for name in dict.fromkeys(row["implementation"] for row in rows):
        line = sorted(at(rows, implementation=name), key=lambda row: row[key])
        ours = name.startswith("ours")
        axis.plot(
            [r[key] for r in line],
            [over_floor(r) for r in line],
            color=style[name][0],
            ls=style[name][1],
            lw=2 if ours else 1.1,
        )
        for row in line:
            point(axis, row[key], over_floor(row), row, style[name][0], "o")
    values = sorted({row[key] for row in rows})
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(values))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1000:.0f}k" if key == "vocab" else f"{x:g}"))
    axis.tick_params(axis="x", rotation=0 if len(values) < 4 else 40)
    ratio_axis(axis, "y", [over_floor(row) for row in rows])
    names = {"tokens": "{} tokens", "vocab": "{} ids", "tp": "TP {}"}
    title = f"{rows[0]['task']}, " + ", ".join(names[name].format(fixed[name]) for name in others)
    axis.set(title=title, xlabel=label, ylabel="time over the floor")
    axis.grid(lw=0.4, color="#cccccc")


def best_line(rows, key, others, wanted):
    """Values of the other coordinates along which this one takes the most values (of those, the wanted, or with the
    most rows)."""
    wanted = dict(zip(("tokens", "vocab"), wanted))

    def rank(candidate):
        line = at(rows, **dict(zip(others, candidate)))
        hits = sum(wanted.get(name) == value for name, value in zip(others, candidate))
        return len({row[key] for row in line}), hits, len(line), candidate

    return dict(zip(others, max({tuple(row[name] for name in others) for row in rows}, key=rank)))


def legend(figure, style, rows):
    handles = [
        Line2D([], [], color=color, ls=line, marker="o", lw=2 if name.startswith("ours") else 1.1, label=name)
        for name, (color, line) in style.items()
    ]
    plain = dict(color="#555555", lw=0)
    sizes = sorted({row["tp"] for row in rows})
    handles += [Line2D([], [], marker=TP_MARKERS.get(tp, "*"), label=f"TP {tp} (top row)", **plain) for tp in sizes]
    if any(not row.get("graph_over_floor") for row in rows):
        handles.append(Line2D([], [], marker="o", mfc="white", label="eager: not capturable", **plain))
    if any(row["status"] == "wrong" for row in rows):
        handles.append(Line2D([], [], marker="x", ms=9, label="result wrong", **plain))
    figure.legend(handles=handles, loc="upper center", ncols=5, frameon=False, fontsize=8.5)


def footer(reports, missing, characters):
    first = reports[0]
    speeds = [report["copy_gb_per_s"] for report in reports]
    speed = f"{min(speeds):.0f}" + (f" to {max(speeds):.0f}" if max(speeds) > min(speeds) else "")
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    text = f"{first['device']}, {first['dtype']}. {versions}. Floor: "
    text += f"logits and a teacher's read twice, gradient written once at the copy bandwidth ({speed} GB/s). Medians."
    notes = dict.fromkeys(f"{row['implementation']} {row['status'].split(':')[0]}" for row in missing)
    if notes:
        text += f" Without numbers: {'; '.join(notes)}."
    return "\n".join(textwrap.wrap(text, characters))


def draw(reports, rows, missing, task, wanted):
    main = at(rows, task=task)
    ways = [("tokens", "tokens"), ("vocab", "vocabulary"), ("tp", "TP size: GPUs that share the vocabulary")]
    ways = [(key, label) for key, label in ways if len({row[key] for row in main}) > 1]
    tasks = len({row["task"] for row in rows}) > 1
    lower = ["tasks"] * tasks + [key for key, _ in ways]
    lines = len({row["implementation"] for row in main})
    style = styles(rows)
    heights = [1.2 + 0.24 * lines] + [3.2] * bool(lower) + [0.7 + 0.2 * ceil((len(style) + 4) / 5)]
    width = max(10, 4.4 * len(lower))
    figure = plt.figure(figsize=(width, sum(heights)), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08)
    top, *middle, bottom = figure.subfigures(len(heights), 1, height_ratios=heights)
    by_implementation(top.subplots(1, 2, sharey=True, width_ratios=[1.6, 1]), main, style, task, wanted)
    if lower:
        for kind, axis in zip(lower, middle[0].subplots(1, len(lower), squeeze=False)[0]):
            if kind == "tasks":
                by_task(axis, rows, style, wanted)
            else:
                scaling(axis, main, style, kind, dict(ways)[kind], wanted)
    legend(bottom, style, rows)
    bottom.text(0.01, 0.02, footer(reports, missing, int(15.5 * width)), fontsize=7.5, color="#555555")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", nargs="+", help="files of bench.py --json")
    parser.add_argument("--out", default="bench.png")
    parser.add_argument("--task", default="ce", help="of the panels that show one task")
    parser.add_argument("--tokens", type=int, default=8192, help="of those panels, if measured")
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--without", nargs="+", default=[], help="implementations that are not drawn")
    args = parser.parse_args()
    reports, rows, missing = load(args.json)
    rows = [row for row in rows if row["implementation"] not in args.without]
    if not at(rows, task=args.task):
        parser.error(f"no measured rows of task {args.task!r} in {args.json}")
    for row in rows:
        row["itemsize"] = {"float32": 4}.get(reports[0]["dtype"], 2)
    draw(reports, rows, missing, args.task, (args.tokens, args.vocab)).savefig(args.out, dpi=100)


if __name__ == "__main__":
    main()
