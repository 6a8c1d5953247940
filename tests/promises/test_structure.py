"""The folders are the architecture: who imports whom, what a cold import costs, that every kernel
compiles, and what the environments hold."""

import ast
import configparser
import functools
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tp_headloss
from tp_headloss.ranks.compiler import constant_for_compile, disabled_for_compile

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tp_headloss"

# The parts of the package from the ground up: each may import only those before it.
LAYERS = [
    "version", "spec", "statistics", "ranks", "engine", "arguments", "losses", "call", "linear_head", "search",
    "head_loss", "modules", "integrations", "", "command_line", "plan", "meeting", "settings", "__main__",
]  # fmt: skip
# Parts that see even less than what lies below them.
SEES_ONLY = {
    "statistics": {"statistics"},
    "losses": {"statistics", "arguments", "losses"},
    "ranks": {"ranks"},
}


def part_of(module):
    """The part of the package that a module belongs to."""
    return module.split(".")[0]


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports_of(path):
    """Modules of the package that a file imports, and the top-level names of everything else."""
    inside, outside = set(), set()
    package = path.relative_to(PACKAGE).parent.parts
    tree = ast.parse(path.read_text())
    for_types = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    tree.body = [node for node in tree.body if node not in for_types]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            outside.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] + tuple(
                (node.module or "").split(".") if node.module else ()
            )
            # "from . import comm" imports a module, "from .stats import X" a name of one
            for alias in node.names:
                module = (*base, alias.name)
                found = (
                    PACKAGE.joinpath(*module).with_suffix(".py").exists()
                    or PACKAGE.joinpath(*module).is_dir()
                )
                inside.add(".".join(module if found else base))
    return inside, outside


FILES = pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: module_name(p) or "__init__"
)


@FILES
def test_imports_point_one_way(path):
    inside, outside = imports_of(path)
    name = module_name(path)
    inside = {part_of(module) for module in inside} - {"spec"}  # which everybody may
    below = set(LAYERS[: LAYERS.index(part_of(name)) + 1])
    allowed = SEES_ONLY.get(part_of(name), below)
    assert inside <= allowed, f"{name} imports {sorted(inside - allowed)}"
    if name.startswith("losses") or name in ("engine.reductions", "head_loss.token_sums"):
        assert outside <= {"torch", "typing", "collections", "math", "__future__"}
    of_triton = name.endswith("_triton") or name == "engine.kernels"
    if name.startswith("statistics") and of_triton:
        # torch says for whose it was built
        whose_gpus = {"torch"} if name == "statistics.numerics_triton" else set()
        assert outside <= {"triton", "typing"} | whose_gpus
    assert (
        "triton" not in outside
        or of_triton
        or name in ("engine.device_layout", "engine.launch", "engine.triton")
    )


@FILES
def test_files_and_functions_stay_small(path):
    assert len(path.read_text().splitlines()) <= 450
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            assert lines <= 90, f"{node.name}: {lines} lines besides the docstring"
            jit = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            if jit and node.name.endswith("kernel"):
                assert len(node.args.args) <= 15, f"{node.name}: {len(node.args.args)} parameters"


def public_functions():
    """Public functions and methods by name, constructors of classes among them."""
    modules = {"": tp_headloss, "losses.": tp_headloss.losses}
    for name, value in [
        (f"{at}{name}", getattr(module, name))
        for at, module in modules.items()
        for name in module.__all__
    ]:
        members = vars(value) if inspect.isclass(value) else {"": value}
        for key, member in members.items():
            if inspect.isfunction(member) and (key[:1] != "_" or key == "__init__"):
                yield f"{name}.{key}", member


def test_public_signatures_have_types():
    """An editor completes what is passed and what comes back. (Keywords by `**` belong to another
    function.)"""
    functions = dict(public_functions())
    for name, function in functions.items():
        given = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
        annotations = {p.name: str(p.annotation) for p in given if p.kind != p.VAR_KEYWORD}
        untyped = [
            key
            for key, text in annotations.items()
            if "empty" in text or re.search(r"(?<!\[str, )Any", text)
        ]
        assert not untyped, f"{name}: {untyped}"
    assert len(functions) > 60


def test_only_comm_calls_collectives():
    """`torch.distributed` is used elsewhere to ask a group for its size and this rank, never to
    communicate."""
    allowed = {"ranks.comm": None}
    allowed["ranks.shard"] = {
        "ProcessGroup", "get_process_group_ranks", "get_rank", "get_world_size",
    }  # fmt: skip
    allowed["ranks.groups"] = {"GroupMember", "ProcessGroup", "get_process_group_ranks"}
    allowed["integrations.megatron.layer"] = {"ProcessGroup"}
    for name in ("vocab_rows", "row_dtensors", "replicas"):
        allowed[f"modules.{name}"] = {"get_process_group_ranks"}
    allowed["modules.saved_rows"] = {"get_rank", "get_world_size", "is_initialized"}
    allowed["call.placements"] = {"get_process_group_ranks", "get_world_size"}
    allowed["head_loss.output"] = allowed["arguments.sequences"] = {"ProcessGroup"}
    allowed["__main__"] = {"ProcessGroup", "group", "init_process_group", "destroy_process_group"}
    allowed["meeting"] = {"Store", "TCPStore"}  # before there is a process group
    for path in PACKAGE.rglob("*.py"):
        used = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "dist"
        }
        name = module_name(path)
        assert allowed.get(name, set()) is None or used <= allowed.get(name, set()), (name, used)


BLOCKING = {  # methods of other objects that communicate -> where they are called
    "rendezvous": "engine.transports.symmetric_memory",
    "barrier": "engine.transports.symmetric_memory",
    "full_tensor": "modules.vocab_rows",
    "redistribute": "integrations.nemo_automodel",  # as this host does
}


def test_what_else_communicates_is_in_its_place():
    # modules of torch.distributed that others may import
    quiet = {"tensor", "fsdp", "device_mesh", "distributed_c10d"}
    found = set()
    for path in PACKAGE.rglob("*.py"):
        name, nodes = module_name(path), list(ast.walk(ast.parse(path.read_text())))
        called = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        assert all(BLOCKING[method] == name for method in called & set(BLOCKING)), (
            name,
            called & set(BLOCKING),
        )
        found |= called & set(BLOCKING)
        modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)} - {None}
        others = {m for m in modules if m.startswith("torch.distributed")} - {
            f"torch.distributed.{q}" for q in quiet
        }
        assert not others or name == BLOCKING["barrier"], (
            name,
            others,
            "write dist.x, which the test above sees",
        )
    assert found == set(BLOCKING)


def test_one_hour_is_the_only_limit_of_a_test():
    """A tighter one measures the machine: on a busy one it fails runs that do no harm."""
    assert "timeout = 3600" in (ROOT / "pyproject.toml").read_text()
    for path in (ROOT / "tests").rglob("*.py"):
        calls = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ]
        limits = [
            key for call in calls for key in call.keywords if key.arg in ("timeout", "within")
        ]
        constant = [key.value.lineno for key in limits if isinstance(key.value, ast.Constant)]
        assert not constant, f"{path.name}, lines {constant}: a limit in seconds"


def pins_of(lines):
    """Name -> version of the packages that are listed for this Python; each line must name one
    version."""
    pins = {}
    for requirement in map(Requirement, lines):
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", str(requirement)
        if requirement.marker is None or requirement.marker.evaluate():
            assert (
                pins.setdefault(canonicalize_name(requirement.name), specifier.version)
                == specifier.version
            )
    return pins


def installed(name):
    try:
        return importlib.metadata.version(name).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def test_setup_installs_no_package_without_a_version():
    """Requirements of tests, training run and documentation, and theirs, as the packages that are
    here state them."""
    lines = (ROOT / "scripts/constraints.txt").read_text().splitlines()
    pins, config, seen = (
        pins_of(line for line in lines if not line.startswith("#")),
        configparser.ConfigParser(),
        set(),
    )
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    waiting = ["torch", *extras["test"].split(), *extras["train"].split(), *extras["docs"].split(),
               *extras["dev"].split()]  # fmt: skip
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in seen and not name.startswith(("cuda-", "nvidia-")):
            seen.add(name)
            # what was there before setup.sh may have other requirements
            if installed(name) == pins.get(name):
                stated = map(Requirement, importlib.metadata.requires(name) or [])
                waiting += [
                    r.name for r in stated if r.marker is None or r.marker.evaluate({"extra": ""})
                ]
    assert len(seen) > 10 and seen <= pins.keys(), (
        f"not in scripts/constraints.txt: {sorted(seen - pins.keys())}"
    )


HOSTS = dict(re.findall(r"^\[(.+)\]\n([^#[]+)", (ROOT / "scripts/hosts.txt").read_text(), re.M))
PINS = re.compile(r"^[^ \n]+==[^ \n]+", re.M)


@pytest.mark.parametrize("name", HOSTS)
def test_an_environment_of_a_host_holds_what_is_listed_and_nothing_else(name):
    sites = list((ROOT / ".hosts" / name).glob("lib/python*/site-packages"))
    if not sites:
        pytest.skip(f"no .hosts/{name}: bash scripts/hosts.sh {name}")
    installed = importlib.metadata.distributions(path=[str(sites[0])])
    assert {canonicalize_name(d.metadata["Name"]): d.version for d in installed} == pins_of(
        PINS.findall(HOSTS[name])
    )


COLD_IMPORT = """
import sys; sys.modules['triton'] = None
import torch
before = set(sys.modules)
import tp_headloss
from tp_headloss.ranks.compiler import constant_for_compile, disabled_for_compile
heavy = {name for name in sys.modules if name.split('.')[0] in ('sympy', 'triton') or name.startswith('torch._')}
assert 'torch._dynamo' not in sys.modules and 'torch._inductor' not in sys.modules, heavy - before
new = {name for name in set(sys.modules) - before if not name.startswith('tp_headloss')}
assert len(new) < 100, sorted(new)
assert not torch.cuda.is_initialized()
x = torch.randn(3, 10, requires_grad=True)
tp_headloss.vocab_statistics(x, torch.tensor([1, 2, 3])).log_prob.sum().backward()
assert x.grad is not None
rule, draw = tp_headloss.SamplingRule(top_p=0.9), {'seed': 0, 'positions': torch.arange(3)}
tp_headloss.kept_ids(x, rule), tp_headloss.sample(x, rule, **draw), tp_headloss.topk_log_probs(x, 2)
assert 'torch._dynamo' not in sys.modules
assert not {'tp_headloss.engine.kernels', 'tp_headloss.engine.triton'} & set(sys.modules)
print('ok')
"""
BOUNDS = f"{tp_headloss.search.kept.NOTHING} {tp_headloss.search.kept.EVERYTHING}"
DEFAULTS = "import torch; torch.{}\nfrom tp_headloss.search import kept; print(kept.NOTHING, kept.EVERYTHING)"
TRITON_ON_CPU = """
import torch, tp_headloss as t
t.vocab_statistics(torch.zeros(1, 4), options=t.Options(backend='triton'))
"""
WORD_FOR_INTERPRETER = """
import os; os.environ["TRITON_INTERPRET"] = "true"
import torch, tp_headloss as t
t.vocab_statistics(torch.zeros(1, 4), options=t.Options(backend='triton'))
"""
LATE_INTERPRETER = """
import os, torch, triton.language, tp_headloss as t
os.environ["TRITON_INTERPRET"] = "1"
t.vocab_statistics(torch.zeros(1, 4), options=t.Options(backend='triton'))
"""
IMPORTED_ANEW = """
import sys, tp_headloss
for name in [x for x in sys.modules if x.partition(".")[0] == "tp_headloss"]:
    del sys.modules[name]
import tp_headloss
"""
NO_TRITON = """
import sys; sys.modules["triton"] = None
from tp_headloss.engine.backend import load_backend
load_backend("triton")
"""
BROKEN_TRITON = """
import importlib.machinery, sys, types
sys.modules["triton"] = triton = types.ModuleType("triton")
triton.__spec__ = importlib.machinery.ModuleSpec("triton", None)
from tp_headloss.engine.backend import load_backend
load_backend("triton")
"""
OLDER = "import {0}; {0}.__version__ = {1!r}; import tp_headloss, tp_headloss.engine.triton"
FRESH = {  # a program -> how the last line ends that it writes
    "a cold import needs neither Triton nor CUDA": (COLD_IMPORT, "ok"),
    "the import asks for no default dtype": (DEFAULTS.format("set_default_dtype(torch.float64)"), BOUNDS),
    "the import asks for no default device": (DEFAULTS.format("set_default_device('meta')"), BOUNDS),
    "Triton on a CPU is refused": (TRITON_ON_CPU, "ValueError: .*needs CUDA tensors.*, got cpu"),
    "another word for an interpreter is refused": (
        WORD_FOR_INTERPRETER, "ValueError: .*, got cpu and TRITON_INTERPRET=true, which is not taken for 1"),
    "an interpreter that comes too late is refused": (
        LATE_INTERPRETER, "ValueError: .*set after that: set it before Python starts"),
    "a second import is refused": (
        IMPORTED_ANEW, "ImportError: tp_headloss must be imported once in a process.*: restart the process"),
    "adapters are imported one by one": (
        "import tp_headloss; tp_headloss.integrations", r"AttributeError: .*: import tp_headloss\.integrations.*"),
    "an older torch is refused": (OLDER.format("torch", "2.10.1+cu128"), r"ImportError: .*>= .*2\.10\.1\+cu128.*"),
    "a missing Triton is refused": (NO_TRITON, r"ImportError: .*Triton >= 3\.6, and there is none: pip install .*"),
    "a Triton that cannot be imported is refused": (
        BROKEN_TRITON, r"ImportError: .*importing it ends in ModuleNotFoundError: .*triton\.language.*: pip inst.*"),
    "an older Triton is refused": (OLDER.format("triton", "3.5.1"), r"ImportError: .*>= .*got 3\.5\.1.*"),
}  # fmt: skip
# Each in a process of its own, forked from one that has imported torch, which takes seconds.
FORKED = """
import json, os, sys, tempfile, traceback
import torch
found = []
for program in json.loads(sys.argv[1]):
    out = tempfile.TemporaryFile("w+")
    if not os.fork():
        os.dup2(out.fileno(), 1), os.dup2(out.fileno(), 2)
        try:
            exec(program, {})
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)
    os.wait()
    out.seek(0)
    found.append(out.read())
print(json.dumps(found))
"""


@functools.cache
def fresh_processes() -> dict[str, str]:
    """What each of `FRESH` writes."""
    env = {
        **{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", FORKED, json.dumps([program for program, _ in FRESH.values()])]
    return dict(
        zip(
            FRESH,
            json.loads(subprocess.run(command, capture_output=True, text=True, env=env).stdout),
        )
    )


@pytest.mark.parametrize("name", FRESH)
def test_fresh_processes(name):
    said = fresh_processes()[name].strip()
    assert re.fullmatch(FRESH[name][1], said.splitlines()[-1]), said


def kernels():
    """Names of all Triton kernels of the package."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            jit = isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.unparse(d) for d in node.decorator_list
            )
            if jit and node.name.endswith("kernel"):
                yield node.name


OLDEST_TRITON = "triton-3.6.0"
AMD = ("gfx942", "gfx950")  # MI300, MI350
FULL = bool(os.environ.get("TP_HEADLOSS_FULL"))
TRITONS = [(None, (80, 90, 100) if FULL else (100,)), (None, AMD if FULL else AMD[:1])]
if FULL:  # GPU runs have it
    TRITONS.append((OLDEST_TRITON, (90,)))


@pytest.mark.parametrize(("name", "capabilities"), TRITONS)
def test_every_kernel_variant_compiles_ahead_of_time(name, capabilities, tmp_path):
    """For GPUs that are not here, with the installed Triton and with the oldest that setup.cfg
    allows: a kernel that only the interpreter understands, or one that spills, cannot land."""
    python = ROOT / ".hosts" / name / "bin/python" if name else Path(sys.executable)
    if not python.exists():
        pytest.skip(f"no .hosts/{name}: bash scripts/hosts.sh {name}")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [str(python), str(ROOT / "tests/helpers/aot.py"), *map(str, capabilities)]
    command += ["--whole"] * FULL
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    assert result.returncode == 0 and "failed 0" in result.stdout, (
        result.stdout[-4000:] + result.stderr[-4000:]
    )
    compiled, translated = map(
        int, re.search(r"compiled (\d+), translated (\d+), ", result.stdout).groups()
    )
    assert compiled >= 20 * len(capabilities)
    assert translated > 20 or FULL or capabilities == AMD[:1]
    from_90 = "linear_statistics_kernel", "linear_gradient_kernel"
    from_89 = ("turn_to_fp8_kernel",)
    served = {
        kernel: {90, 100} if kernel in from_90 + from_89 else {80, 90, 100} for kernel in kernels()
    }
    expected = {
        f"{kernel} sm_{c}: "
        for kernel, served_by in served.items()
        for c in served_by & set(capabilities)
    }
    # need tensor memory accelerators, or are for products in fp8
    of_nvidia = *from_90, "fold_kernel", *from_89
    of_nvidia += "units_kernel", "split_gradient_kernel", "list_large_kernel", "order_large_kernel"
    of_nvidia += "finish_hidden_kernel", "add_to_weight_kernel"
    expected |= {
        f"{k} {c}: " for k in kernels() if k not in of_nvidia for c in capabilities if c in AMD
    }
    assert len(expected) >= 11 and all(line in result.stdout for line in expected), result.stdout


def test_the_oldest_triton_that_compiles_the_kernels_is_the_one_that_is_declared():
    (declared,) = re.findall(r"triton>=([\d.]+)", (ROOT / "setup.cfg").read_text())
    assert f"triton-{declared}.0" == OLDEST_TRITON and OLDEST_TRITON in HOSTS


def test_compile_is_told_what_torch_itself_would_tell_it():
    import torch

    def marks(decorated):
        return {
            name: value
            for name, value in vars(decorated).items()
            if name.startswith(("_dynamo", "_torchdynamo"))
        }

    constants = constant_for_compile(lambda: 0), torch.compiler.assume_constant_result(lambda: 0)
    assert marks(constants[0]) == marks(constants[1]) != {}
    ours, theirs = (
        marks(f(lambda: 0, reason="so")) for f in (disabled_for_compile, torch.compiler.disable)
    )
    assert ours.items() <= theirs.items() and set(theirs) - set(ours) <= {
        "_torchdynamo_orig_callable", "_torchdynamo_disable_recursive", "_torchdynamo_wrapper_id",
    }  # fmt: skip
