"""The arithmetic of one read's kernel, compiled for the host, and rows of logits for it."""

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tp_headloss.engine.one_read import params as one_read_params

FOLDER = Path(one_read_params.__file__).parent
HOST = Path(__file__).parent / "one_read_on_host"
SOURCES = {path.name: path.read_text() for path in (*FOLDER.glob("*.cuh"), *FOLDER.glob("*.cu"))}
SCALES = pytest.mark.parametrize("scale", [1.0, 0.3, 1 / 0.7, 25.0])
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

NODE = np.dtype(
    [
        ("max", "f4"),
        ("sum", "f4"),
        ("moment", "f4"),
        ("total", "f4"),
        ("count", "i4"),
        ("index", "i4"),
        ("teacher_max", "f4"),
        ("teacher_sum", "f4"),
        ("cross", "f4"),
        ("student_sum", "f4"),
        ("gap", "f4"),
        ("teacher_logit", "f4"),
        ("teacher_moment", "f4"),
        ("topk_max", "f4"),
        ("topk_sum", "f4"),
        ("topk_mass", "f4"),
        ("topk_cross", "f4"),
        ("tail_max", "f4"),
        ("tail_sum", "f4"),
        ("label_log_tau", "f4"),
        ("mixture", "f4"),
        ("mixture_mean", "f4"),
        ("overlap", "f4"),
    ]
)
NO_TEACHER = -np.inf, 0, 0
NO_ENTRIES = -np.inf, 0, 0, 0, -np.inf, 0, -np.inf
NO_MIXTURE = 0, 0, 0
# flags of calls that have neither a top-K teacher nor a second round
WITHOUT = *one_read_params.OF_ENTRIES, *one_read_params.MIXTURES
TEACHER_SCALE, BESIDE = 0.75, 0.625  # see `Scales` in `params.cuh`


class Scales(ctypes.Structure):
    _fields_ = [("z", ctypes.c_float), ("u", ctypes.c_float), ("beside", ctypes.c_float)]


def scales_of(scale):
    return Scales(scale, TEACHER_SCALE, BESIDE)


def compiled(folder, source, *options):
    """Compile for the host, where `ptx.cuh` is that of the helpers. -> what the compiler says, or
    "" if nothing."""
    for name in ("numbers.cuh", "params.cuh", "statistics.cuh", "node.cuh", "shared.cuh"):
        (folder / name).write_text(SOURCES[name])
    shutil.copy(HOST / "ptx.cuh", folder)
    (folder / "source.cpp").write_text(source)
    command = "g++", "-std=c++20", "-ffp-contract=off", "-w", *options, "source.cpp"
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stderr


def library(folder, *more_flags, without=WITHOUT):
    """The functions of `node.cpp`, compiled with every optional statistic but some."""
    flags = {"entropy_term", "tempered", *one_read_params.FLAGS} - {*without}
    flags = [f"-D{name.upper()}" for name in sorted(flags)]
    options = "-O1", "-fPIC", "-shared", "-o", "node.so"
    assert compiled(folder, (HOST / "node.cpp").read_text(), *flags, *more_flags, *options) == ""
    found = ctypes.CDLL(str(folder / "node.so"))
    assert found.size_of_node() == NODE.itemsize
    for name in ("leaf", "scale"):
        getattr(found, name).restype = ctypes.c_float
    found.label.restype = ctypes.c_longlong
    return found


def pointer(array):
    assert array.flags.c_contiguous
    return array.ctypes.data_as(ctypes.c_void_p)


def argument(**fields):
    """The kernel's argument with these fields, by reference; arrays are pointers."""
    pointers = *one_read_params.CALLS, *one_read_params.OUTPUTS
    found = one_read_params.Params(
        before=1, scale=1, teacher_scale=TEACHER_SCALE, student_scale=BESIDE
    )
    for name, x in fields.items():
        if name in pointers:
            found.addresses[pointers.index(name)] = x.ctypes.data
        else:
            setattr(found, name, x)
    found.fields = fields  # keeps the arrays
    return ctypes.byref(found)


def joined(host, a, b, scale=1.0):
    found = np.empty_like(a)
    host.joins(pointer(a), pointer(b), pointer(found), len(a), scales_of(scale))
    return found


def node_of(z, first=0, scale=1.0):
    """The node of logits in float64, whose ids begin at `first`."""
    z = np.asarray(z, dtype=np.float64)
    if (z == -np.inf).all():  # or there is none
        index = first if len(z) else 0x7FFFFFFF
        found = (-np.inf, 0, 0, 0, 0, index, *NO_TEACHER, 0, 0, 0, 0, *NO_ENTRIES, *NO_MIXTURE)
        return np.array(found, dtype=NODE)
    top = -np.inf if np.isnan(z).all() else np.nanmax(z)
    with np.errstate(invalid="ignore"):
        drop = np.where(z == -np.inf, -np.inf, scale * (z - top))
        p, beside = np.exp(drop), np.exp(BESIDE * drop)
        moment = np.where(z == -np.inf, 0.0, p * np.maximum(drop, -1e30)).sum()
    index = first + int(np.argmax(z == top))
    total = z[z != -np.inf].sum()
    own = top, p.sum(), moment, total, (z != -np.inf).sum(), index
    found = *own, *NO_TEACHER, beside.sum(), 0, 0, 0, *NO_ENTRIES, *NO_MIXTURE
    return np.array(found, dtype=NODE)


def with_teacher(node, z, u, scale=1.0, label=None):
    """The node with the sums of a teacher's logits u beside the logits z, in float64. label: its
    column, of which `node` has no part."""
    node, there, z = node.copy(), u > -np.inf, z.astype(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        apart = TEACHER_SCALE * u - BESIDE * scale * z
        if there.any():
            q = np.exp(TEACHER_SCALE * (u - u.max()))
            node["teacher_max"], node["teacher_sum"] = u.max(), q.sum()
            node["cross"] = np.where(q > 1e-37, q * apart, 0).sum()
            node["teacher_moment"] = np.where(q > 0, q * np.log(q), 0).sum()
        p = np.exp(BESIDE * scale * (z - float(node["max"])))
        if label is not None:
            p[label] = 0
            node["teacher_logit"] = u[label]
        node["gap"] = np.where(p > 1e-37, -p * apart, 0).sum()
    return node


def teacher_of(z):
    """A teacher's logits beside some logits: far from them, near them, and -inf here and there."""
    random = np.random.default_rng(len(z))
    u = bf16(3 * random.standard_normal(len(z)) + random.choice([0, 50, -300]))
    u[random.random(len(z)) < random.choice([0, 0.3])] = -np.inf
    return u


def bf16(z):
    """Rounded to bf16, as float64."""
    bits = np.asarray(z, dtype=np.float32).view(np.uint32)
    return (((bits + 0x8000) >> 16) << 16).view(np.float32).astype(np.float64)


@functools.cache
def rows():
    """Rows of logits in three parts, of which some are empty, -inf, far apart or huge."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(300):
        scale = 10.0 ** random.uniform(-2, 4)
        parts = []
        for size in random.integers(0, 12, 3):
            z = bf16(scale * random.standard_normal(size) + random.choice([0, 200, -200, 3e4]))
            z[random.random(size) < random.choice([0, 0, 0.3, 1])] = -np.inf
            parts.append(z)
        found.append(parts)
    ties = [np.array([1.0, 2.0]), np.array([2.0, 0.0]), np.array([2.0])]
    huge = [np.array([3e38, -3e38]), np.array([-3e38]), np.array([1e30, 0.0])]
    return [*found, ties, huge, [np.zeros(0)] * 3, [np.full(2, -np.inf)] * 3]


def parts_and_whole(all_rows, scale=1.0):
    """Nodes of the three parts of rows, and of the whole rows."""
    parts = [[], [], []]
    whole = []
    for row in all_rows:
        first = 0
        for nodes, z in zip(parts, row):
            nodes.append(node_of(z, first, scale))
            first += len(z)
        whole.append(node_of(np.concatenate(row), scale=scale))
    return *(np.array(nodes, dtype=NODE) for nodes in parts), np.array(whole, dtype=NODE)


def expect_same_bits(x, y):
    assert x.tobytes() == y.tobytes()
