"""The tables that compare us with others are those of docs/comparison.json."""

import json
import re

from pages import ROOT

README = (ROOT / "README.md").read_text()


def rows_of_table(page: str, columns: list[str]) -> list[list[str]]:
    """The cells of a page's table with these columns."""
    start = page.index(f"| | {' | '.join(columns)} |")
    lines = page[start : page.index("\n\n", start)].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def gpus_of_implementations() -> dict[str, set[str]]:
    """Names of the GPUs on which an implementation was timed, by the first word of its name."""
    found: dict[str, set[str]] = {}

    def timed(part):
        """Names of what has a time in a part of a file."""
        if isinstance(part, list):
            return [name for x in part for name in timed(x)]
        if not isinstance(part, dict):
            return []
        own = [part["implementation"]] if "implementation" in part and "eager_us" in part else []
        return own + [name for x in part.values() for name in timed(x)]

    for path in (ROOT / "docs/bench").rglob("*.json"):
        record = json.loads(path.read_text())
        gpu = re.search(r"NVIDIA (\w+)", str(record.get("device")))
        heads = [*record["heads"]] if "host" in record else []
        for name in heads + timed(record) if gpu else ():
            word = name.removeprefix("Megatron-").replace(",", " ").split()[0].lower()
            found.setdefault(word, set()).add(gpu.group(1))
    return found


def test_the_tables_of_others_are_those_of_their_sources():
    """Each cell has a source, a file of ours one that exists, and each row a version in
    docs/comparison.json; what was timed here is what files of docs/bench have, of all of them the
    same GPUs."""
    comparison = json.loads((ROOT / "docs/comparison.json").read_text())
    page = (ROOT / "docs/comparison.md").read_text()
    columns, rows = comparison["columns"], comparison["rows"]
    cells = {row["name"]: [row["cells"][column]["text"] for column in columns] for row in rows}
    cells["**tp_headloss**"][columns.index("hosts")] = "[guides](index.md)"
    assert rows_of_table(page, columns) == [[name, *texts] for name, texts in cells.items()]
    few = comparison["in_readme"]
    expected = [
        [row["name"], *(row["cells"][column]["text"] for column in few)]
        for row in rows
        if row["in_readme"]
    ]
    assert rows_of_table(README, few) == expected and len(expected) > 8
    for row in rows:
        sources = [cell["source"] for cell in row["cells"].values()]
        assert all(sources), row["name"]
        ours = [p for source in sources for p in source.split(", ") if p.startswith("docs/")]
        assert all((ROOT / path).exists() for path in ours), (row["name"], ours)
    timed_on = gpus_of_implementations()
    for row in rows[1:]:
        assert f"* {row['name']} {row['version']}\n" in page, row["name"]
        timed = row["cells"]["timed here on"]
        files = [name for name in timed["source"].split(", ") if name.endswith(".json")]
        assert bool(files) == timed["text"].startswith("H"), row["name"]
        measured = "".join((ROOT / name).read_text() for name in files)
        word = row["name"].removeprefix("Megatron-").split()[0].removesuffix("'s").lower()
        gpus = set(timed["text"].split(", ")) if files else set()
        assert all(found in measured for found in gpus), row["name"]
        assert not files or f"{word}" in measured.lower(), row["name"]
        assert gpus == timed_on.get(word, set()), row["name"]
