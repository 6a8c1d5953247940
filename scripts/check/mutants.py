"""Plant bugs, one at a time, in a copy of the package, and see whether the tests notice.

.venv/bin/python scripts/check/mutants.py                   # all of them, two at a time, for hours
.venv/bin/python scripts/check/mutants.py --only 0 7 shard  # some: by number, or by part of a module, function or test
.venv/bin/python scripts/check/mutants.py --list            # plants none, but says which ones can no longer be planted

The bugs are in `planted.py`: a module of the package, the qualified name of a function in it, the statement, expression
or keyword argument to find there, and what it becomes. Code is compared as parsed, so that comments, line breaks and
parentheses do not matter; it must be in the function exactly once. Where it is not, the list says what is there that
looks alike, and in which functions of the package the same code is now.

A bug may also be in a CUDA part, such as `engine/one_read/node.cuh`: the function is found by its name, or by
"Struct.function" where structs share one, and its body by the braces. Code is compared as text there, but for white
space and comments; the name and the code must each be there exactly once.

A mutant is killed if the tests of its group fail, and survives if they pass. Survivors, and bugs that cannot be
planted, are listed at the end and make the exit status 1.
"""

import argparse
import ast
import difflib
import functools
import os
import queue
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from planted import GROUPS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tp_headloss"


class Outdated(Exception):
    """The code to find is not there, or more than once."""


class Bug(NamedTuple):
    number: int
    tests: str  # names of test files, without .py
    module: str  # path in the package, of a Python module or a CUDA part
    function: str  # qualified name, "Class.method" or "outer.inner"; "" is the whole module
    find: str
    becomes: str

    def __str__(self):
        find, becomes = (textwrap.shorten(code, 70) for code in (self.find, self.becomes))
        return f"{self.number:3d} {self.module}: {self.function}: {find} -> {becomes}"


def all_bugs() -> list[Bug]:
    planted = [(tests, *bug) for tests, bugs in GROUPS.items() for bug in bugs]
    return [Bug(number, *bug) for number, bug in enumerate(planted)]


@functools.cache
def functions_of(source: str) -> dict[str, list[ast.AST]]:
    """Definitions by qualified name; there are several where an `if` chooses between them."""
    tree = ast.parse(source)
    found: dict[str, list[ast.AST]] = {"": [tree]}

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{prefix}.{child.name}".removeprefix(".")
                found.setdefault(name, []).append(child)
            visit(child, name)

    visit(tree, "")
    return found


def patterns_of(code: str) -> set[str]:
    """Dumps of the nodes that this code can be: a statement, an expression, a keyword argument."""
    (statement,) = ast.parse(code).body
    patterns = {ast.dump(statement)}
    if isinstance(statement, ast.Expr):
        patterns.add(ast.dump(statement.value))
    elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        patterns.add(ast.dump(ast.keyword(statement.targets[0].id, statement.value)))
    return patterns


def matches(definitions: list[ast.AST], code: str) -> list[ast.AST]:
    """Nodes of these functions that are this code."""
    patterns = patterns_of(code)
    kinds = {pattern.split("(")[0] for pattern in patterns}  # a dump takes longer than to look
    nodes = [
        node
        for definition in definitions
        for node in ast.walk(definition)
        if type(node).__name__ in kinds
    ]
    found = [node for node in nodes if ast.dump(node) in patterns]
    # calls, which are expressions, too
    statements = {node.value for node in found if isinstance(node, ast.Expr)}
    return [node for node in found if node not in statements]


def look_alike(definitions: list[ast.AST], code: str) -> list[str]:
    """Code of these functions that resembles this code most."""
    kinds, plain = (
        (ast.Assign, ast.AugAssign, ast.Return, ast.expr, ast.keyword),
        (ast.Name, ast.Constant),
    )
    nodes = [
        node
        for definition in definitions
        for node in ast.walk(definition)
        if isinstance(node, kinds)
    ]
    nodes = [node for node in nodes if not isinstance(node, plain)]
    return difflib.get_close_matches(code, dict.fromkeys(map(ast.unparse, nodes)), n=3, cutoff=0.5)


@functools.cache
def package_functions(package: Path) -> dict[tuple[str, str], list[ast.AST]]:
    """All functions without functions of their own, by module and qualified name."""
    functions = {}
    for path in sorted(package.rglob("*.py")):
        found = functions_of(path.read_text())
        for name, definitions in found.items():
            if name and not any(other.startswith(f"{name}.") for other in found):
                functions[path.relative_to(package).as_posix(), name] = definitions
    return functions


def elsewhere(package: Path, code: str) -> list[str]:
    """Functions of the package that have this code exactly once."""
    functions = package_functions(package).items()
    return [
        f'("{module}", "{name}", ..)'
        for (module, name), where in functions
        if len(matches(where, code)) == 1
    ]


def find(bug: Bug, source: str, package: Path = PACKAGE) -> ast.AST:
    """The one node that the bug replaces."""
    functions = functions_of(source)
    if bug.function not in functions:
        reason, hints = (
            f"there is no function {bug.function}",
            difflib.get_close_matches(bug.function, functions),
        )
    else:
        found = matches(functions[bug.function], bug.find)
        if len(found) == 1:
            return found[0]
        if found:
            lines = ", ".join(str(node.lineno) for node in found)
            raise Outdated(
                f"{len(found)} times in {bug.function}, lines {lines}: quote more of one of them"
            )
        reason, hints = f"not in {bug.function}", look_alike(functions[bug.function], bug.find)
    lines = [reason, *(f"    alike: {hint}" for hint in hints)]
    raise Outdated(
        "\n".join([*lines, *(f"    it is in {place}" for place in elsewhere(package, bug.find))])
    )


def mutated(bug: Bug, source: str, package: Path = PACKAGE) -> str:
    """The source with the bug in it, everything else unchanged to the character."""
    if is_cuda(bug.module):
        return mutated_cuda(bug, source)
    node = find(bug, source, package)
    lines = source.encode().splitlines(keepends=True)  # columns of the AST are bytes
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    stop = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    becomes = bug.becomes
    if isinstance(node, ast.stmt):
        becomes = becomes.replace("\n", "\n" + " " * node.col_offset)
    elif isinstance(node, ast.expr):
        becomes = f"({becomes})"
    text = b"".join(lines)
    after = (text[:start] + becomes.encode() + text[stop:]).decode()
    try:
        # before Python 3.12, columns within an f-string are not those of the file
        if isinstance(node, ast.expr):
            cut = ast.parse(b"(" + text[start:stop] + b"\n)", mode="eval").body
            if ast.dump(cut) != ast.dump(node):
                raise Outdated("within an f-string: quote all of it")
        ast.parse(after)
    except SyntaxError as error:
        raise Outdated(f"{bug.becomes!r} cannot stand there: {error.msg}") from error
    if ast.dump(ast.parse(bug.becomes)) == ast.dump(ast.parse(bug.find)):
        raise Outdated("changes nothing")
    return after


def is_cuda(module: str) -> bool:
    return module.endswith((".cuh", ".cu"))


def line_of(code: str, place: int) -> int:
    return code.count("\n", 0, place) + 1


def the_only(pattern: str, code: str, start: int, stop: int, where: str) -> re.Match:
    """The one match between two places of the code."""
    found = [*re.compile(pattern).finditer(code, start, stop)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise Outdated(f"not in {where}")
    lines = ", ".join(str(line_of(code, match.start())) for match in found)
    raise Outdated(f"{len(found)} times in {where}, lines {lines}")


def end_of_block(code: str, start: int) -> int:
    """Place of the brace that closes the block whose code begins at `start`."""
    depth = 1
    for brace in re.compile("[{}]").finditer(code, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    raise Outdated(f"the block that begins in line {line_of(code, start)} does not end")


def body_of(code: str, name: str, start: int, stop: int, where: str) -> tuple[int, int]:
    """Where the body of a function or struct begins and ends, without its braces."""
    parameters = r"\((?:[^(){};]|\([^(){};]*\))*\)"  # which may have parentheses, too
    function = rf"\b{name}\s*{parameters}(?:\s*const)?\s*{{"
    struct = rf"\bstruct\s+(?:__align__\(\d+\)\s+)?{name}\b[^;(){{}}]*{{"
    try:
        opening = the_only(f"{function}|{struct}", code, start, stop, where)
    except Outdated as error:
        raise Outdated(f"function or struct {name}: {error}") from error
    return opening.end(), end_of_block(code, opening.end())


def mutated_cuda(bug: Bug, source: str) -> str:
    """The CUDA source with the bug in it."""
    # comments become spaces, so that places stay
    code = re.sub("//.*", lambda comment: " " * len(comment[0]), source)
    where, start, stop = bug.module, 0, len(code)
    for name in filter(None, bug.function.split(".")):
        start, stop = body_of(code, name, start, stop, where)
        where = name
    words = bug.find.split()
    pattern = r"\s+".join(map(re.escape, words))
    found = the_only(pattern, code, start, stop, where)
    if words == bug.becomes.split():
        raise Outdated("changes nothing")
    return source[: found.start()] + bug.becomes + source[found.end() :]


def source_of(bug: Bug, package: Path) -> str:
    path = package / bug.module
    if not path.exists():
        places = [] if is_cuda(bug.module) else elsewhere(package, bug.find)
        hints = "".join(f"\n    it is in {place}" for place in places)
        raise Outdated(f"there is no module {bug.module}{hints}")
    return path.read_text()


def problem(bug: Bug, package: Path = PACKAGE) -> str | None:
    """Reason why the bug cannot be planted, or None."""
    try:
        mutated(bug, source_of(bug, package), package)
    except Outdated as error:
        return f"Outdated: {error}"
    return None


def copy_of_tree(folder: Path) -> Path:
    """Copies what git tracks, as it is now, and links the environments beside it."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in names.strip("\0").split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    for environment in (".venv", ".hosts"):
        if (ROOT / environment).exists():
            (folder / environment).symlink_to((ROOT / environment).resolve())
    return folder


def test_files(tree: Path, tests: str) -> list[str]:
    found = {path.stem: str(path) for path in (tree / "tests").rglob("test_*.py")}
    return [found[name] for name in tests.split()]


def verdict(bug: Bug, tree: Path, timeout: float, environment: dict) -> str:
    """ "killed ...", "SURVIVED" or "Outdated ..."."""
    package = tree / "tp_headloss"
    if reason := problem(bug, package):
        return reason
    path, source = package / bug.module, source_of(bug, package)
    path.write_text(mutated(bug, source, package))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        *test_files(tree, bug.tests),
    ]
    try:
        run = subprocess.run(
            command, cwd=tree, capture_output=True, text=True, timeout=timeout, env=environment
        )
    except subprocess.TimeoutExpired:
        return "killed by the timeout"
    finally:
        path.write_text(source)
    if not run.returncode:
        return "SURVIVED"
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return f"killed by {failed[0].split()[1]}" if failed else "killed"


def chosen(bugs: list[Bug], only: list[str] | None) -> list[Bug]:
    """The bugs with one of these numbers, or with one of these words in their module, function or
    tests."""
    if only is None:
        return bugs

    def wanted(bug):
        return any(
            int(word) == bug.number
            if word.isdigit()
            else word in f"{bug.module} {bug.function} {bug.tests}"
            for word in only
        )

    return [bug for bug in bugs if wanted(bug)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--only", nargs="+", metavar="NUMBER or WORD")
    parser.add_argument(
        "--list", action="store_true", help="plant none, but check that each one can be planted"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--timeout",
        type=float,
        default=600,
        help="seconds; a mutant that makes tests hang is killed",
    )
    args = parser.parse_args()
    bugs = chosen(all_bugs(), args.only)
    if args.list:
        reasons = {bug: problem(bug) for bug in bugs}
        for bug, reason in reasons.items():
            print(bug, *([f"    {reason}"] if reason else []), sep="\n")
        outdated = sum(reason is not None for reason in reasons.values())
        print(f"{len(bugs)} bugs, {outdated} outdated")
        sys.exit(bool(outdated))
    begin, trees = time.monotonic(), queue.SimpleQueue()

    def checked(bug):
        tree = trees.get()  # each is for one bug at a time
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        said = verdict(bug, tree, args.timeout, environment)
        print(bug, "|", said, flush=True)
        trees.put(tree)
        return said

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.workers) as pool:
        for number in range(args.workers):
            trees.put(copy_of_tree(Path(folder, str(number))))
        verdicts = dict(zip(bugs, pool.map(checked, bugs)))
    left = [bug for bug, said in verdicts.items() if not said.startswith("killed")]
    print(f"{len(verdicts) - len(left)} of {len(bugs)} killed in {time.monotonic() - begin:.0f} s")
    for bug in left:
        print(bug, "|", verdicts[bug])
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
