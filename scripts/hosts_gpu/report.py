"""The Markdown table and the picture of docs/hosts.md, from the files of the scripts of this
folder:

python scripts/hosts_gpu/report.py docs/bench/hosts_gpu/*.json --out docs/hosts_gpu.png
"""

import argparse
import json
import sys
from pathlib import Path

from measure import OURS, ROOT

sys.path.append(str(ROOT / "scripts/bench"))
from plot_bars import COLORS, bars, plt

COLUMNS = {
    "step": lambda found: f"{found['step_ms']:.1f} ms",
    "of it, the head": lambda found: (
        f"{found['head_ms']:.1f} ms, {found['head_ms'] / found['step_ms']:.0%}"
    ),
    "tokens/s": lambda found: f"{found['tokens_per_s']:.0f}",
    "peak memory": lambda found: f"{found['peak_gib']:.1f} GiB",
    "largest micro-batch": lambda found: f"{found['largest']} rows",
    "first and last loss": lambda found: f"{found['loss'][0]:.4f}, {found['loss'][-1]:.4f}",
}
PANELS = {
    "tokens_per_s": ("tokens per second", 0),
    "head_ms": ("the head in a step, ms", 1),
    "peak_gib": ("peak memory, GiB", 1),
}


def load(paths: list[str]) -> dict[str, dict]:
    """Records by host and number of ranks; heads of one, and parts of a head, may lie in several
    files."""
    records: dict = {}
    for record in (json.loads(Path(path).read_text()) for path in paths):
        ways = record.get("ways", [])
        ranks = (
            "one GPU"
            if record["ranks"] == 1
            else f"TP {record['ranks']}"
            if "FSDP" not in ways
            else "2 GPUs"
        )
        label = ", ".join([f"{record['host']} {record['versions'][record['host']]}", ranks, *ways])
        first = records.setdefault(label, record)
        heads = {
            name: first["heads"].get(name, {}) | found for name, found in record["heads"].items()
        }
        first |= {**record, "heads": first["heads"] | heads}
    return records


def difference(found: dict, host: dict) -> float:
    """The largest difference of the losses of a step."""
    return max(abs(a - b) for a, b in zip(found["loss"], host["loss"], strict=True))


def cell(column, *given) -> str:
    try:
        return column(*given)
    except KeyError:  # of a run that ended before
        return "not measured"


def table(records: dict[str, dict]) -> str:
    names = ["host", "head", *COLUMNS, "loss, at most from the host's"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for label, record in records.items():
        own = record["heads"].get(record["own"], {})
        for name, found in record["heads"].items():
            cells = [label, f"**{name}**" if name.startswith(OURS) else name]
            cells += [cell(column, found) for column in COLUMNS.values()]
            cells.append(
                "" if found is own else cell(lambda *pair: f"{difference(*pair):.1e}", found, own)
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def notes(records: dict[str, dict]) -> str:
    """What all runs have in common, and what each has said besides."""
    record = next(iter(records.values()))
    shape, versions = record["shape"], record["versions"]
    devices = ", ".join(dict.fromkeys(r["device"] for r in records.values()))
    lines = [
        f"{devices}, torch {versions['torch']}, triton {versions['triton']}: {shape['layers']} "
        f"layers, hidden {shape['hidden']}, {shape['vocab']} ids, rows of {shape['length']}, "
        f"{shape['batch']} in a step, {shape['steps']} steps; the largest micro-batch is what fits "
        f"in {record['memory']:.0%} of the memory."
    ]
    for label, record in records.items():
        if "equal_bits" in record:
            bits = "equal" if record["equal_bits"] else "different"
            lines.append(
                f"{label}, {OURS} in deterministic mode: {bits} bits of losses and weights over two runs."
            )
        errors = {
            name: found["error"] for name, found in record["heads"].items() if "error" in found
        }
        lines += [f"{label}, {name}: {error}" for name, error in errors.items()]
    return "\n\n".join(lines)


def draw(records: dict[str, dict], out: str) -> None:
    hosts, heads = list(records), ("the host's own head", OURS)
    figure, axes = plt.subplots(
        1, 3, figsize=(10, 1.2 + 0.55 * len(hosts)), sharey=True, layout="constrained"
    )
    for axis, (key, (title, digits)) in zip(axes, PANELS.items()):
        rows = [
            {"implementation": label, "head": group, "value": record["heads"][name][key]}
            for label, record in records.items()
            for group, name in zip(heads, (record["own"], OURS))
            if key in record["heads"].get(name, {})
        ]
        bars(axis, rows, heads, lambda row: row["value"], digits, key="head", shown=hosts)
        axis.set(title=title)
        axis.margins(x=0.2)
    axes[0].set_yticks(range(len(hosts)), hosts)
    axes[0].invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS]
    figure.legend(handles, heads, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("json", nargs="+")
    parser.add_argument("--out", default="hosts_gpu.png")
    args = parser.parse_args()
    records = load(args.json)
    draw(records, args.out)
    print(table(records), notes(records), sep="\n\n")
