"""For the documentation: tables of the measurements in docs/bench, made when the site is built.

The pages stand in the navigation under "Evidence". Links of other pages to a file of docs/bench
lead to its table.
"""

import fnmatch
import json
import re
import statistics
from pathlib import Path

BENCH = Path(__file__).parents[1] / "docs/bench"
GROUPS = {  # page: its title, and the files of docs/bench that no page before it has
    "hosts_gpu": ("Hosts on two GPUs", "hosts_gpu/*"),
    "linear_head": ("Linear head", "*linear*"),
    "one_gpu_losses": ("One GPU: other losses", "tp1_[kort]* tp1_sets*"),
    "one_gpu": ("One GPU: cross-entropy", "tp1 tp1_ce* tp1_do_bench"),
    "several_gpus": ("Several GPUs", "tp2* tp4*"),
    "sampling": ("Sampling", "*sampling"),
    "megatron": ("Steps of Megatron-Core", "megatron*"),
    "accuracy": ("Accuracy and quickstart", "*"),
}
LEFT_OUT = {
    "columns",
    "copy_share",
    "bytes_per_logit",
    "overwrites_logits",
    "set_up_s",
    "first_s",
    "note",
}


def name_of(path: Path) -> str:
    """The name of a file in its link, and in the patterns."""
    return path.relative_to(BENCH).with_suffix("").as_posix()


def groups() -> dict[str, list[Path]]:
    """The files of docs/bench of each page."""
    found, left = {}, sorted(BENCH.rglob("*.json"))
    for page, (_, patterns) in GROUPS.items():
        found[page] = [
            path
            for path in left
            if any(fnmatch.fnmatch(name_of(path), p) for p in patterns.split())
        ]
        left = [path for path in left if path not in found[page]]
    return found


def rows_of(content: dict) -> list[dict]:
    """The measurements of a file, in whichever form its program wrote them."""
    if isinstance(content.get("rows"), list):
        return content["rows"]
    if "shapes" in content:
        return [
            {**shape, **row, "rows": None} for shape in content["shapes"] for row in shape["rows"]
        ]
    by_name = content.get("results") or content.get("heads")
    if by_name:
        return [{"loss of": name, **result} for name, result in by_name.items()]
    found = {
        name: value
        for name, value in content.items()
        if isinstance(value, dict) and name != "versions"
    }
    return [{"dtype": name, **value} for name, value in found.items()] or [content]


def cells(row: dict) -> dict[str, str]:
    """A row as text by column: medians of [10 %, median, 90 %], and of steps behind the first
    three."""
    found = {}
    for key, value in row.items():
        name = key.replace("_", " ")
        if key in LEFT_OUT or value is None:
            continue
        if isinstance(value, dict):
            found |= {
                f"{name} {part}".replace(" both", ""): text for part, text in cells(value).items()
            }
        elif isinstance(value, list) and len(value) > 3:
            known = [number for number in value[3:] if number is not None]
            steps = (
                {"median": statistics.median(known or [0])}
                if key.endswith("seconds")
                else {"last": value[-1]}
            )
            found |= {f"{name}, {which}": text for which, text in cells(steps).items() if known}
        elif isinstance(value, list) and len(value) == 3 and key != "errors":
            found |= cells({key: value[1]})
        elif isinstance(value, list):
            found[name] = (
                " x ".join(map(str, value)) if key == "block" else ", ".join(map(str, value))
            )
        elif isinstance(value, float):
            found[name] = f"{value:.1f}" if abs(value) >= 1000 else f"{value:.4g}"
        else:
            found[name] = str(value).replace("|", "\\|")
    return found


def table(path: Path) -> str:
    """The section of a file: device, versions, command, what all rows share, and the rows."""
    content = json.loads(path.read_text())
    rows = [cells(row) for row in rows_of(content)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    shared = {
        name for name in columns if len(rows) > 1 and len({row.get(name) for row in rows}) == 1
    }
    columns = [name for name in columns if name not in shared]
    lines = [
        f"## {name_of(path)} {{ #{name_of(path).replace('/', '-')} }}",
        "",
        f"[The file](../bench/{name_of(path)}.json)",
    ]
    lines += [
        f"* {key}: {content[key]}" for key in ("device", "gpus", "copy_gb_per_s") if key in content
    ]
    for key in ("versions", "arguments"):
        known = [
            f"{name} {value}" for name, value in content.get(key, {}).items() if value is not None
        ]
        lines += [f"* {key}: {', '.join(known)}"] if known else []
    lines += (
        [f"* in all rows: {', '.join(f'{name} {rows[0][name]}' for name in sorted(shared))}"]
        if shared
        else []
    )
    lines.insert(3, "")
    lines += ["", "```bash", content["command"], "```"] if "command" in content else []
    lines += ["", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(row.get(name, '') for name in columns)} |" for row in rows]
    return "\n".join(lines) + "\n"


def page(name: str) -> str:
    """The Markdown of a page."""
    head = "Medians. `_us` are microseconds, `graph` a CUDA graph, `eager` steps back to back; memory is in MiB."
    return "\n".join([f"# {GROUPS[name][0]}\n", f"{head}\n", *map(table, groups()[name])])


BEHIND_GUIDES = "Reference", "Evidence", "Project"  # sections, in a search


def on_config(config):
    """Add the pages to the navigation."""
    (evidence,) = [entry["Evidence"] for entry in config.nav if "Evidence" in entry]
    evidence.append(
        {"Measurements": [{title: f"evidence/{name}.md"} for name, (title, _) in GROUPS.items()]}
    )


def on_files(files, config):
    """Add the pages to the site."""
    from mkdocs.structure.files import File

    for name in GROUPS:
        files.append(File.generated(config, f"evidence/{name}.md", content=page(name)))


def on_page_markdown(markdown, page, **_):
    """Lead links to a file of docs/bench to its table; let the search show guides first, and no
    page of mere figures."""
    for section in page.ancestors:
        if section.title in BEHIND_GUIDES:
            page.meta["search"] = {"boost": 0.2}
    if page.file.src_uri.startswith(("evidence/", "gpu_check")):
        page.meta["search"] = {"exclude": True}
    if page.file.src_uri.startswith("evidence/"):
        return markdown
    pages = {name_of(path): name for name, paths in groups().items() for path in paths}
    link = r"\(((?:\.\./)*)bench/([\w/]+)\.json\)"
    return re.sub(
        link, lambda m: f"({m[1]}evidence/{pages[m[2]]}.md#{m[2].replace('/', '-')})", markdown
    )
