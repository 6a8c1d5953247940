"""What the package has, read off itself, so that lists of tests miss nothing that is new:
statistics by what a call of them needs, and adapters of hosts."""

import ast
from pathlib import Path

import tp_headloss
from tp_headloss.statistics import (
    AT_IDS,
    FAMILIES,
    FULL_TEACHER,
    OVER_SETS,
    TOPK_TEACHER,
    known_statistics,
    layout_of,
)

STATISTICS = known_statistics()
OF_LABELS = tuple(
    name for family in FAMILIES if family.needs_label_logits for name in family.statistics
)
# those that need no other argument than logits, or labels
PLAIN = tuple(
    name
    for name in STATISTICS
    if name not in (*FULL_TEACHER, *TOPK_TEACHER, *OVER_SETS, *AT_IDS, *OF_LABELS)
)
PLAIN_LAYOUT = layout_of(True, PLAIN)
# the fp32 values of such a call, but for a number that serves checks
PLAIN_VALUES = tuple(name for name in PLAIN_LAYOUT.values if name != "owners")
# those of them that have a gradient: the softmax's own come first
TRAINED = tuple(name for name in PLAIN_VALUES if name in PLAIN_LAYOUT.differentiable)

INTEGRATIONS = Path(tp_headloss.__file__).parent / "integrations"


def modules_of_integrations() -> dict[str, ast.Module]:
    """Every module of `integrations` by its name there, and its syntax tree."""
    found = {}
    for path in sorted(INTEGRATIONS.rglob("*.py")):
        parts = path.relative_to(INTEGRATIONS).with_suffix("").parts
        name = ".".join(parts).removesuffix("__init__").rstrip(".")
        if name:
            found[name] = ast.parse(path.read_text())
    return found


def _names_imported(tree: ast.Module) -> set[str]:
    """The parts of the names of modules that a module imports from this package."""
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    names = {alias.name for node in imports for alias in node.names}
    return names | {part for node in imports for part in (node.module or "").split(".")}


def _is_public(tree: ast.Module) -> bool:
    """True for a module that says what it offers."""
    targets = [
        target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
    ]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def hosts() -> list[str]:
    """The modules and packages of `integrations` that adapt a host: all but those that others there
    import as a part of theirs, which have no `__all__`."""
    modules = modules_of_integrations()
    imported = {}
    for name, tree in modules.items():
        imported.setdefault(name.partition(".")[0], set()).update(_names_imported(tree))
    tops = [name for name in modules if "." not in name]
    return [
        name
        for name in tops
        if _is_public(modules[name])
        or not any(name in names for other, names in imported.items() if other != name)
    ]
