"""The folders are the architecture: who imports whom, what a cold import costs, that every kernel compiles, and what
the environments hold."""

import ast
import configparser
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tp_headloss"

MAY_IMPORT = {  # module -> modules of the package that it may import
    "shard": set(),
    "validation": set(),
    "reduce": set(),
    "stats": set(),
    "backends.kernels": set(),
    "backends.sums_kernels": set(),
    "backends.topk_kernels": {"backends.kernels"},
    "comm": {"shard"},
    "dtensor": {"shard"},
    "losses.cross_entropy": {"stats"},
    "losses.regularizers": {"stats"},
    "losses.distillation": {"stats"},
    "losses.ratio": set(),
    "losses.kl": {"losses.ratio"},
    "losses.policy": {"losses.ratio"},
    "losses.rollout": {"losses.ratio"},
    "losses.preference": {"losses.ratio"},
    "losses.metrics": {"losses.kl", "losses.policy", "losses.ratio"},
    "losses": {
        *("losses.cross_entropy", "losses.distillation", "losses.kl", "losses.metrics", "losses.policy"),
        *("losses.preference", "losses.ratio", "losses.regularizers", "losses.rollout"),
    },
    "sequences": {"comm"},
    "terms": {"losses", "losses.policy", "losses.ratio", "reduce", "stats"},
    "backends": set(),
    "backends.eager": {"stats", "shard"},
    "backends.triton": {"stats", "backends", "backends.kernels", "backends.sums_kernels", "backends.topk_kernels"},
    "passes": {"backends", "comm", "stats"},
    "sweeps": {"comm", "passes", "stats"},
    "autograd": {"backends", "comm", "passes", "stats", "sweeps"},
    "linear": {"agreement", "api", "autograd", "comm", "dtensor", "shard", "stats", "sweeps"},
    "agreement": {"comm", "sequences", "shard"},
    "api": {"agreement", "autograd", "backends", "comm", "dtensor", "shard", "stats"},
    "head_loss": {
        *(
            "agreement",
            "api",
            "autograd",
            "backends",
            "dtensor",
            "linear",
            "reduce",
            "sequences",
            "shard",
            "stats",
            "terms",
        ),
    },
    "module": {"api", "autograd", "dtensor", "head_loss", "linear", "shard", "stats"},
    "integrations": set(),
    "integrations.megatron": {"api", "head_loss", "integrations", "linear", "shard", "terms"},
    "integrations.torchtitan": {"dtensor", "head_loss", "integrations", "linear", "shard"},
    "integrations.nemo_rl": {"api", "comm", "dtensor", "linear", "shard"},
    "integrations.verl": {"api", "linear", "shard"},
    "integrations.transformers": {"api", "dtensor", "head_loss", "integrations", "linear", "shard"},
    "integrations.trl": {"api", "integrations", "integrations.transformers", "linear", "shard"},
    "topk": {"agreement", "api", "backends", "backends.eager", "comm", "dtensor", "shard", "stats"},
    "": {"api", "comm", "head_loss", "linear", "losses", "module", "sequences", "shard", "stats", "terms", "topk"},
}


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports_of(path):
    """Modules of the package that a file imports, and the top-level names of everything else."""
    inside, outside = set(), set()
    package = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            outside.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] + tuple(
                (node.module or "").split(".") if node.module else ()
            )
            for alias in node.names:  # "from . import comm" imports a module, "from .stats import X" a name of one
                module = (*base, alias.name)
                found = PACKAGE.joinpath(*module).with_suffix(".py").exists() or PACKAGE.joinpath(*module).is_dir()
                inside.add(".".join(module if found else base))
    return inside, outside


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: module_name(p) or "__init__")
def test_imports_point_one_way(path):
    inside, outside = imports_of(path)
    name = module_name(path)
    inside -= {"validation"}  # which everybody may
    assert inside <= MAY_IMPORT[name], f"{name} imports {sorted(inside - MAY_IMPORT[name])}"
    if name.startswith("losses") or name in ("reduce", "stats"):
        assert outside <= {"torch", "typing", "collections", "math", "__future__"}
    if name.endswith("kernels"):
        assert outside == {"triton"}
    assert "triton" not in outside or name.endswith("kernels") or name == "backends.triton"


def test_only_comm_calls_collectives():
    """`torch.distributed` is used elsewhere to ask a group for its size and this rank, never to communicate."""
    allowed = {"comm": None, "shard": {"ProcessGroup", "get_rank", "get_world_size"}}
    allowed["integrations.megatron"] = {"ProcessGroup"}
    allowed["module"] = {"get_process_group_ranks"}
    allowed["dtensor"] = {"get_process_group_ranks", "get_world_size"}
    for path in PACKAGE.rglob("*.py"):
        used = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dist"
        }
        name = module_name(path)
        assert allowed.get(name, set()) is None or used <= allowed.get(name, set()), (name, used)


def test_one_hour_is_the_only_limit_of_a_test():
    """A tighter one measures the machine: on a busy one it fails runs that do no harm."""
    assert "timeout = 3600" in (ROOT / "pyproject.toml").read_text()
    for path in (ROOT / "tests").rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        limits = [key for call in calls for key in call.keywords if key.arg in ("timeout", "within")]
        constant = [key.value.lineno for key in limits if isinstance(key.value, ast.Constant)]
        assert not constant, f"{path.name}, lines {constant}: a limit in seconds"


def pins_of(lines):
    """Name -> version of the packages that are listed for this Python; each line must name one version."""
    pins = {}
    for requirement in map(Requirement, lines):
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", str(requirement)
        if requirement.marker is None or requirement.marker.evaluate():
            assert pins.setdefault(canonicalize_name(requirement.name), specifier.version) == specifier.version
    return pins


def installed(name):
    try:
        return importlib.metadata.version(name).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def test_setup_installs_no_package_without_a_version():
    """All requirements of the tests and the training run, and theirs, as the packages that are here state them."""
    lines = (ROOT / "scripts/constraints.txt").read_text().splitlines()
    pins, config, seen = pins_of(line for line in lines if not line.startswith("#")), configparser.ConfigParser(), set()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    waiting = ["torch", *extras["test"].split(), *extras["train"].split()]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in seen and not name.startswith(("cuda-", "nvidia-")):
            seen.add(name)
            if installed(name) == pins.get(name):  # what was there before setup.sh may have other requirements
                stated = map(Requirement, importlib.metadata.requires(name) or [])
                waiting += [r.name for r in stated if r.marker is None or r.marker.evaluate({"extra": ""})]
    assert len(seen) > 10 and seen <= pins.keys(), f"not in scripts/constraints.txt: {sorted(seen - pins.keys())}"


HOSTS = dict(re.findall(r"^\[(.+)\]\n([^#[]+)", (ROOT / "scripts/hosts.txt").read_text(), re.M))
PINS = re.compile(r"^[^ \n]+==[^ \n]+", re.M)


@pytest.mark.parametrize("name", HOSTS)
def test_an_environment_of_a_host_holds_what_is_listed_and_nothing_else(name):
    sites = list((ROOT / ".hosts" / name).glob("lib/python*/site-packages"))
    if not sites:
        pytest.skip(f"no .hosts/{name}: bash scripts/hosts.sh {name}")
    installed = importlib.metadata.distributions(path=[str(sites[0])])
    assert {canonicalize_name(d.metadata["Name"]): d.version for d in installed} == pins_of(PINS.findall(HOSTS[name]))


def run_python(code, **env):
    env = {**{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


def test_cold_import_needs_neither_triton_nor_cuda():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; before = set(sys.modules)\n"
        "import tp_headloss\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "assert not torch.cuda.is_initialized()\n"
        "x = torch.randn(3, 10, requires_grad=True)\n"
        "tp_headloss.vocab_statistics(x, torch.tensor([1, 2, 3])).log_prob.sum().backward()\n"
        "assert x.grad is not None\n"
        "assert not {'tp_headloss.backends.kernels', 'tp_headloss.backends.triton'} & set(sys.modules)\n"
        "print('ok')"
    )
    result = run_python(code)
    assert result.stdout.strip() == "ok", result.stderr


def test_the_triton_backend_on_cpu_tensors_is_refused_without_the_interpreter():
    code = (
        "import torch, tp_headloss as t\n"
        "try: t.vocab_statistics(torch.zeros(1, 4), options=t.Options(backend='triton'))\n"
        "except ValueError as e: print(e)"
    )
    assert "needs CUDA tensors" in run_python(code).stdout


@pytest.mark.parametrize("module, version", [("torch", "2.10.1+cu128"), ("triton", "3.5.1")])
def test_versions_below_the_declared_ones_are_refused(module, version):
    code = f"import {module}; {module}.__version__ = {version!r}\nimport tp_headloss, tp_headloss.backends.triton"
    last = run_python(code).stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError") and f"got {version}" in last and ">= " in last


def test_every_kernel_variant_compiles_ahead_of_time(tmp_path):
    """For GPUs that are not here: an interpreter-only kernel, or one that spills, cannot land."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(ROOT / "tests/helpers/aot.py"), "80", "90", "100"]
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    assert result.returncode == 0 and "failed 0" in result.stdout, result.stdout[-4000:] + result.stderr[-4000:]
    assert int(result.stdout.split("compiled ")[1].split(",")[0]) > 130
    assert all(f"gradient_kernel sm_{capability}: " in result.stdout for capability in (80, 90, 100))
