"""The README and the pages of docs/, and their Python blocks.

A comment before a block says where it runs: <!-- host: NAME --> in tests/hosts, <!-- ranks: 4 -->
on ranks, and <!-- run: NAME --> in a test of its own. All others run in the order of their page, in
one scope.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:<!-- (\w+): ([\w-]+) -->\n)?```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.S
)


class Block(NamedTuple):
    kind: str  # "host", "ranks", "run", or "" for a block of its page's scope
    mark: str
    code: str
    output: str  # of the text block that follows it


def blocks(page: Path) -> list[Block]:
    return [Block(*(part or "" for part in found)) for found in BLOCK.findall(page.read_text())]


def names_of(page: Path) -> dict:
    """What the blocks of a page define that run in one scope."""
    scope: dict = {}
    for block in blocks(page):
        if not block.kind:
            exec(compile(block.code, str(page), "exec"), scope)
    return scope


def marked_block(kind: str, mark: str) -> str:
    """The Python of the one block of all pages under the comment <!-- KIND: MARK -->."""
    (code,) = [
        block.code
        for page in PAGES
        for block in blocks(page)
        if (block.kind, block.mark) == (kind, mark)
    ]
    return code


def section(page: str, heading: str) -> str:
    """What stands below a heading of a page of docs/, down to the next one of any level."""
    return (ROOT / "docs" / page).read_text().split(f"\n{heading}\n")[1].split("\n#")[0]


def tables(text: str) -> list[list[list[str]]]:
    """The cells of the body of each table."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.M)
    return [
        [[c.strip() for c in line.strip("|\n").split("|")] for line in block.splitlines()[2:]]
        for block in found
    ]
