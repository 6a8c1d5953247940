"""The kernel's source without a GPU: its arithmetic compiled for the host, its argument in both
languages, and the numbered invariants of its protocol."""

import ctypes
import functools
import inspect
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import one_read_model
import pytest

from tp_headloss.engine.one_read import params as one_read_params

FOLDER = Path(one_read_params.__file__).parent
HOST = Path(__file__).parents[1] / "helpers/one_read_on_host"
SOURCES = {path.name: path.read_text() for path in (*FOLDER.glob("*.cuh"), *FOLDER.glob("*.cu"))}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

NODE = np.dtype(
    [
        ("max", "f4"),
        ("sum", "f4"),
        ("moment", "f4"),
        ("total", "f4"),
        ("count", "i4"),
        ("index", "i4"),
    ]
)


def compiled(folder, source, *options):
    """Compile for the host, where `ptx.cuh` is that of the helpers. -> what the compiler says, or
    "" if nothing."""
    for name in ("numbers.cuh", "params.cuh", "statistics.cuh", "node.cuh"):
        (folder / name).write_text(SOURCES[name])
    shutil.copy(HOST / "ptx.cuh", folder)
    (folder / "source.cpp").write_text(source)
    command = "g++", "-std=c++20", "-ffp-contract=off", "-w", *options, "source.cpp"
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stderr


def library(folder, *more_flags):
    """The functions of `node.cpp`, compiled with every optional statistic."""
    flags = "-DENTROPY", "-DARGMAX", "-DTOTAL", "-DENTROPY_TERM", *more_flags
    options = "-O1", "-fPIC", "-shared", "-o", "node.so"
    assert compiled(folder, (HOST / "node.cpp").read_text(), *flags, *options) == ""
    found = ctypes.CDLL(str(folder / "node.so"))
    assert found.size_of_node() == NODE.itemsize
    return found


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return library(tmp_path_factory.mktemp("node"))


def pointer(array):
    assert array.flags.c_contiguous
    return array.ctypes.data_as(ctypes.c_void_p)


def joined(host, a, b, scale=1.0):
    found = np.empty_like(a)
    host.joins(pointer(a), pointer(b), pointer(found), len(a), ctypes.c_float(scale))
    return found


def node_of(z, first=0, scale=1.0):
    """The node of logits in float64, whose ids begin at `first`."""
    z = np.asarray(z, dtype=np.float64)
    if (z == -np.inf).all():  # or there is none
        index = first if len(z) else 0x7FFFFFFF
        return np.array((-np.inf, 0, 0, 0, 0, index), dtype=NODE)
    top = -np.inf if np.isnan(z).all() else np.nanmax(z)
    with np.errstate(invalid="ignore"):
        drop = np.where(z == -np.inf, -np.inf, scale * (z - top))
        p = np.exp(drop)
        moment = np.where(z == -np.inf, 0.0, p * np.maximum(drop, -1e30)).sum()
    index = first + int(np.argmax(z == top))
    total = z[z != -np.inf].sum()
    return np.array((top, p.sum(), moment, total, (z != -np.inf).sum(), index), dtype=NODE)


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


@needs_compiler
def test_nothing_is_the_identity_of_a_join(host):
    a, *_ = parts_and_whole(rows())
    nothing = np.empty_like(a)
    host.nothings(pointer(nothing), len(a))
    for found in (joined(host, a, nothing), joined(host, nothing, a)):
        for name in ("max", "sum", "count", "index"):
            expect_same_bits(found[name], a[name])
        # where a sign of 0 may differ
        np.testing.assert_array_equal(found["moment"], a["moment"])
        np.testing.assert_array_equal(found["total"], a["total"])


@needs_compiler
def test_both_orders_of_a_join_have_the_same_bits(host):
    a, b, c, _ = parts_and_whole(rows())
    for x, y in ((a, b), (b, c), (a, c)):
        expect_same_bits(joined(host, x, y), joined(host, y, x))


SCALES = pytest.mark.parametrize("scale", [1.0, 0.3, 1 / 0.7, 25.0])


@needs_compiler
@SCALES
def test_any_tree_of_joins_agrees_with_float64(scale, host):
    scale = float(np.float32(scale))
    a, b, c, whole = parts_and_whole(rows(), scale)
    left = joined(host, joined(host, a, b, scale), c, scale)
    right = joined(host, a, joined(host, b, c, scale), scale)
    for found in (left, right):
        for name in ("max", "count"):
            np.testing.assert_array_equal(found[name], whole[name], err_msg=name)
        has_maximum = whole["max"] > -np.inf
        np.testing.assert_array_equal(found["index"][has_maximum], whole["index"][has_maximum])
        np.testing.assert_allclose(found["sum"], whole["sum"], rtol=3e-6)
        np.testing.assert_allclose(found["moment"], whole["moment"], rtol=3e-5, atol=3e-6)
        magnitude = np.array([np.abs(z[z > -np.inf]).sum() for z in map(np.concatenate, rows())])
        assert (np.abs(found["total"] - whole["total"]) <= 1e-6 * magnitude).all()


@needs_compiler
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_no_order_of_joins_loses_a_bad_logit(host, bad):
    for place in range(3):
        some = [[z.copy() for z in row] for row in rows()[:50]]
        for row in some:
            row[place] = np.append(row[place], bad)
        a, b, c, _ = parts_and_whole(some)
        for found in (joined(host, joined(host, a, b), c), joined(host, a, joined(host, b, c))):
            assert np.isnan(found["sum"]).all()


@needs_compiler
def test_a_packet_carries_a_node(host):
    *_, whole = parts_and_whole(rows())
    found = np.empty_like(whole)
    host.packets(pointer(whole), pointer(found), len(whole))
    expect_same_bits(found, whole)


def statistics_in_float64(z, label):
    """lse, log_prob, entropy, total and mass of a row, whose label's logit is above -inf."""
    top = z.max()
    with np.errstate(invalid="ignore"):
        exponents = z - top
        p = np.exp(exponents)
        log_sum = np.log(p.sum())
        moment = np.where(p > 0, p * exponents, 0).sum()
    there = z[z > -np.inf]
    log_prob = z[label] - top - log_sum
    return top + log_sum, log_prob, log_sum - moment / p.sum(), there.sum(), len(there)


def labelled_rows():
    """Rows with a label in them that is above -inf, as logits and label."""
    random = np.random.default_rng(1)
    for row in rows()[:-3]:
        z = np.concatenate(row)
        there = np.flatnonzero(z > -np.inf)
        if len(there) and np.ptp(z[there]) < 1e6:
            yield z, int(random.choice(there))


@needs_compiler
@SCALES
def test_a_solved_row_agrees_with_float64(scale, host):
    cases = list(labelled_rows())
    assert len(cases) > 200
    scale = float(np.float32(scale))
    for logits, label in cases:
        node = node_of(np.delete(logits, label), scale=scale).reshape(1)
        logit = np.array([logits[label]], dtype=np.float32)
        found = np.empty(5)
        host.solves(pointer(node), pointer(logit), pointer(found), 1, ctypes.c_float(scale))
        z = scale * logits
        expected = statistics_in_float64(z, label)
        noise = 1e-6 * (1 + np.abs(z[z > -np.inf]).sum())
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=noise)


@needs_compiler
@SCALES
@pytest.mark.parametrize(
    "by", [(1, 0, 0, 0), (0, -1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 0.25), (0.1, -1, 0.2, -0.01)]
)
def test_gradients_agree_with_float64(scale, by, host):
    by, scale = np.array(by, dtype=np.float32), float(np.float32(scale))
    for exact, label in labelled_rows():
        node = node_of(np.delete(exact, label), scale=scale).reshape(1)
        logits = exact.astype(np.float32)
        found = np.empty(len(exact) + 1, dtype=np.float32)
        host.gradients(
            pointer(node),
            ctypes.c_float(exact[label]),
            pointer(by),
            pointer(logits),
            pointer(found),
            len(exact),
            ctypes.c_float(scale),
        )
        z = scale * exact
        lse, _, entropy, *_ = statistics_in_float64(z, label)
        p = np.exp(z - lse)
        with np.errstate(invalid="ignore"):
            log_p = np.where(p > 0, z - lse, 0)
        expected = (by[0] - by[1]) * p - by[2] * p * (log_p + entropy) + by[3] * (z > -np.inf)
        expected[label] += by[1]
        expected *= scale
        found[label] = found[-1]
        noise = max(1, scale) * (1e-6 * np.abs(z[z > -np.inf]).max() + 3e-6)
        np.testing.assert_allclose(found[:-1], expected, rtol=1e-4, atol=noise)


@needs_compiler
@pytest.mark.parametrize("before", [1 / 30, 1.0, -0.5])
def test_a_softcap_is_a_tanh_and_has_its_slope(before, tmp_path):
    logits = np.concatenate([np.linspace(-60, 60, 9999), [1e-6, -3e38, 3e38, np.inf]])
    logits = logits.astype(np.float32)
    found = np.empty((len(logits), 2), dtype=np.float32)
    number = ctypes.c_float(before)
    host = library(tmp_path, "-DSOFTCAP")
    host.values(pointer(logits), pointer(found), len(logits), number, 0)
    exact = logits.astype(np.float64) * number.value
    with np.errstate(over="ignore"):
        slopes = np.cosh(exact) ** -2.0
    np.testing.assert_allclose(found[:, 0], np.tanh(exact), rtol=3e-7)
    np.testing.assert_allclose(found[:, 1], slopes, rtol=1e-5, atol=1e-37)
    nothing = np.array([-np.inf, np.nan], dtype=np.float32)
    host.values(pointer(nothing), pointer(found), 2, number, 0)
    assert found[0, 0] == -np.inf and np.isnan(found[1, 0])


@needs_compiler
def test_a_logit_near_0_has_the_same_bits_beside_any_others(tmp_path):
    """Large temperatures' inverses make 1e-7 of a tanh visible."""
    logits = np.concatenate([np.linspace(-0.499, 0.499, 9999), [0.0, 1e-30, -1e-6]])
    logits = logits.astype(np.float32)
    host, one = library(tmp_path, "-DSOFTCAP"), ctypes.c_float(1.0)
    found = [np.empty((len(logits), 2), dtype=np.float32) for _ in range(2)]
    for all_near, values in enumerate(found):
        host.values(pointer(logits), pointer(values), len(logits), one, all_near)
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0][:, 0], np.tanh(logits.astype(np.float64)), rtol=1.2e-7)


@needs_compiler
@pytest.mark.parametrize("flag, dtype", [("-DHALF", np.float16), ("-DBF16", None)])
def test_logits_are_the_numbers_of_their_bits(flag, dtype, tmp_path):
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    found = np.empty(1 << 16, dtype=np.float32)
    library(tmp_path, flag).highs(pointer(bits), pointer(found), len(bits))
    halves = (bits >> 16).astype(np.uint16)
    expected = bits.view(np.float32) if dtype is None else halves.view(dtype).astype(np.float32)
    np.testing.assert_array_equal(found, expected)


ARGUMENT = '#include "ptx.cuh"\n#include "params.cuh"\n'
# A field of the struct, and a wrong one in its place.
WRONG = [
    ("float lse_factor, lse_square;", "float lse_square, lse_factor;"),
    ("int rows, width, valid_width;", "int rows, valid_width, width;"),
    ("i64 rank, start;", "i64 rank; double start;"),
    ("float total_factor, total_square;", "int total_factor, total_square;"),
    ("const void* values[VALUES];", "const void* values[VALUES + 1];"),
    ("int ranks;", "int ranks; double more;"),
]


@needs_compiler
def test_the_argument_has_the_same_fields_in_both_languages(tmp_path):
    assert compiled(tmp_path, ARGUMENT + one_read_params.agreement(), "-fsyntax-only") == ""


@needs_compiler
@pytest.mark.parametrize("right, wrong", WRONG)
def test_another_struct_does_not_compile(right, wrong, tmp_path, monkeypatch):
    assert right in SOURCES["params.cuh"]
    monkeypatch.setitem(SOURCES, "params.cuh", SOURCES["params.cuh"].replace(right, wrong))
    said = compiled(tmp_path, ARGUMENT + one_read_params.agreement(), "-fsyntax-only")
    assert "error: " in said


BARRIERS = re.compile(
    r"\b(wait|arrive|meet|counted_wait|counted_arrive|mbarrier_arrive_expect_tx|fence_\w+"
    r"|cp_async_bulk_wait_read|__syncwarp|__syncthreads|__threadfence\w*)\([^;]*;(.*)"
)


def test_every_barrier_names_the_invariant_that_it_keeps():
    listed = re.findall(r"^//   (I\d+) ", SOURCES["roles.cuh"], re.M)
    assert listed == [f"I{i}" for i in range(1, len(listed) + 1)] and len(listed) > 10
    named = set()
    for name in ("roles.cuh", "one_read.cu"):
        for line in SOURCES[name].splitlines():
            code, _, comment = line.partition("//")
            if BARRIERS.search(code) and not code.startswith("DEVICE"):
                assert re.match(r" (I\d+|none:)", comment), f"{name}: {line}"
            if code.strip():
                named |= set(re.findall(r"\bI\d+\b", comment))
    assert named == set(listed)
    in_model = set(re.findall(r"\bI\d+\b", inspect.getsource(one_read_model)))
    assert in_model and in_model <= set(listed)


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_lines_of_the_kernel_have_100_columns(name):
    assert max(map(len, SOURCES[name].splitlines())) <= 100


def test_inline_assembly_stands_in_one_file_and_names_its_section():
    assert [name for name, text in SOURCES.items() if re.search(r"\basm\b", text)] == ["ptx.cuh"]
    functions = re.split(r"\n\n", SOURCES["ptx.cuh"])
    for function in functions:
        assert (
            "asm" not in re.sub("//.*", "", function) or '// "' in function or "Chapter" in function
        )
