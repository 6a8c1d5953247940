"""The kernel's source without a GPU: its arithmetic compiled for the host, its argument in both
languages, and the numbered invariants of its protocol."""

import ctypes
import inspect
import re

import numpy as np
import one_read_model
import pytest
from node_on_host import (
    BESIDE,
    NO_ENTRIES,
    NO_MIXTURE,
    NO_TEACHER,
    NODE,
    SCALES,
    SOURCES,
    TEACHER_SCALE,
    WITHOUT,
    argument,
    bf16,
    compiled,
    expect_same_bits,
    joined,
    library,
    needs_compiler,
    node_of,
    parts_and_whole,
    pointer,
    rows,
    scales_of,
    teacher_of,
    with_teacher,
)

from tp_headloss.engine.one_read import params as one_read_params


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return library(tmp_path_factory.mktemp("node"))


@pytest.fixture(scope="module")
def host_of_fp32(tmp_path_factory):
    return library(tmp_path_factory.mktemp("fp32"), "-DFLOAT32")


@pytest.fixture(scope="module")
def host_of_softcap(tmp_path_factory):
    return library(tmp_path_factory.mktemp("softcap"), "-DSOFTCAP")


@pytest.fixture(scope="module")
def plain_host_of_fp32(tmp_path_factory):
    without = *one_read_params.FLAGS, "entropy_term", "tempered"
    return library(tmp_path_factory.mktemp("plain"), "-DFLOAT32", without=without)


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
@pytest.mark.parametrize("is_fp32", [False, True])
@pytest.mark.parametrize("flags", range(4))
def test_a_packet_carries_a_node_the_labels_logit_and_flags(flags, is_fp32, host, host_of_fp32):
    if is_fp32:
        host = host_of_fp32
    *_, whole = parts_and_whole(rows())
    of_teacher = "teacher_max", "teacher_sum", "cross", "gap", "teacher_logit", "teacher_moment"
    for i, name in enumerate(of_teacher):
        whole[name] = np.arange(len(whole)) + i / 8
    random = np.random.default_rng(2)
    logits = random.standard_normal(len(whole)).astype(np.float32)
    bits = logits.view(np.uint32)
    if not is_fp32:
        logits = bf16(logits).astype(np.float32)
        bits = (logits.view(np.uint32) >> 16).astype(np.uint16)
    found, labels = np.empty_like(whole), np.empty_like(logits)
    owners, ignored = np.empty((2, len(whole)), dtype=np.int32)
    given = pointer(whole), pointer(bits), flags
    results = map(pointer, (found, labels, owners, ignored))
    host.packets(*given, *results, len(whole))
    expect_same_bits(found, whole)
    expect_same_bits(labels, logits)
    assert ((owners > 0) == bool(flags & 1)).all()
    assert ((ignored > 0) == bool(flags & 2)).all()


@needs_compiler
def test_a_packet_has_come_once_all_stores_are_of_this_launch(host, plain_host_of_fp32):
    for launch in (1, 2, 7, 0x3FFFFFFF):
        for one, stores in ((host, (0, 1, 2, 3, 6)), (plain_host_of_fp32, (0, 6))):
            assert one.has_come(launch, -1, 0)
            for store in stores:
                assert not one.has_come(launch, store, launch - 1)


@needs_compiler
def test_no_packet_carries_nothing(host):
    found, nothing = np.empty((2, 1), dtype=NODE)
    host.no_packets(pointer(found), 1)
    host.nothings(pointer(nothing), 1)
    expect_same_bits(found, nothing)


def even_rows(scale=1.0):
    """Rows with an even number of logits whose z are float32, and rows of equal ones."""
    for row in rows():
        z = np.concatenate(row)
        if (scale * z <= np.finfo(np.float32).max).all():
            yield np.append(z, -np.inf) if len(z) % 2 else z
    for top in (0, 1.5, -96, 3e4, 1e30):
        yield np.full(8, bf16(top))


@needs_compiler
@SCALES
def test_a_leaf_agrees_with_float64(scale, host):
    scale = float(np.float32(scale))
    for exact in even_rows(scale):
        z, found = exact.astype(np.float32), np.empty(1, dtype=NODE)
        u = teacher_of(exact)
        whole = with_teacher(node_of(exact, scale=scale), exact, u, scale)
        given = pointer(z), pointer(u.astype(np.float32)), len(z)
        host.leaf(*given, pointer(found), scales_of(scale), False)
        assert found["teacher_max"] == whole["teacher_max"]
        np.testing.assert_allclose(found["teacher_sum"], whole["teacher_sum"], rtol=3e-6)
        np.testing.assert_allclose(found["student_sum"], whole["student_sum"], rtol=3e-6)
        sizes = (scale * np.abs(exact), np.abs(u))
        size = 3e-6 * sum(x[np.isfinite(x)].max(initial=1) for x in sizes)
        sums = ("cross", "teacher_sum"), ("gap", "student_sum"), ("teacher_moment", "teacher_sum")
        for name, weights in sums:
            expected = whole[name].astype(np.float64)
            atol = size * (1 + whole[weights])
            np.testing.assert_allclose(found[name], expected, rtol=0, atol=atol, err_msg=name)
        assert found["max"] == whole["max"] and found["count"] == whole["count"]
        np.testing.assert_allclose(found["sum"], whole["sum"], rtol=3e-6)
        np.testing.assert_allclose(found["moment"], whole["moment"], rtol=3e-5, atol=3e-6)
        total_noise = 1e-6 * np.abs(exact[exact > -np.inf]).sum()
        np.testing.assert_allclose(found["total"], whole["total"], rtol=0, atol=total_noise)


@needs_compiler
def test_a_leaf_that_is_taken_for_plain_shows_that_it_is_not(host):
    for exact in even_rows():
        z, found = exact.astype(np.float32), np.empty((2, 1), dtype=NODE)
        for is_plain, node in enumerate(found):
            given = pointer(z), pointer(z), len(z), pointer(node)  # as a teacher of itself
            size = host.leaf(*given, scales_of(1), is_plain)
        if (z > -np.inf).all():
            expect_same_bits(*found)
        else:
            assert not size < np.inf


@needs_compiler
def test_a_leaf_whose_teacher_has_entropy_alone_shows_that_it_is_not_plain(tmp_path):
    without = {*one_read_params.FLAGS, "entropy_term", "tempered"} - {"teacher_entropy"}
    host, z = library(tmp_path, without=without), np.zeros(2, dtype=np.float32)
    for teacher, is_plain in (([1, 2], True), ([1, -np.inf], False)):
        found, u = np.empty(1, dtype=NODE), np.array(teacher, dtype=np.float32)
        size = host.leaf(pointer(z), pointer(u), 2, pointer(found), scales_of(1), True)
        assert (size < np.inf) == is_plain


@needs_compiler
@pytest.mark.parametrize("top", [-3e4, 333.0, 29952.0])
def test_a_teachers_entropy_does_not_depend_on_the_size_of_its_logits(top, host):
    """Of equal ones, whose exponents are 0 but for what rounding makes of them."""
    z, u, found = *np.array([[0.0] * 8, [top] * 8], dtype=np.float32), np.empty(1, dtype=NODE)
    host.leaf(pointer(z), pointer(u), 8, pointer(found), scales_of(1), True)
    assert abs(found["teacher_sum"] - 8) < 1e-5 and abs(found["teacher_moment"]) < 1e-5


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
    """Rows with a label in them, whose logit may be -inf, as logits and label."""
    random = np.random.default_rng(1)
    for row in rows()[:-3]:
        z = np.concatenate(row)
        there = z[z > -np.inf]
        if len(there) and np.ptp(there) < 1e6:
            yield z, int(random.integers(len(z)))


def solved(host, z, label, scale=1.0):
    """The kernel's lse, log_prob, entropy, total, mass and whole of a row without a teacher."""
    node = node_of(np.delete(z, label), scale=scale).reshape(1)
    logit = np.array([z[label]], dtype=np.float32)
    found = np.empty(13)
    host.solves(pointer(node), pointer(logit), pointer(found), 1, scales_of(scale))
    return found[:6]


@needs_compiler
@SCALES
def test_a_solved_row_agrees_with_float64(scale, host):
    cases = list(labelled_rows())
    assert len(cases) > 200
    assert sum(logits[label] == -np.inf for logits, label in cases) > 20
    scale = float(np.float32(scale))
    for logits, label in cases:
        *found, _ = solved(host, logits, label, scale)
        z = scale * logits
        expected = statistics_in_float64(z, label)
        noise = 1e-6 * (1 + np.abs(z[z > -np.inf]).sum())
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=noise)


@needs_compiler
@pytest.mark.parametrize("drop", [10.0, 30.0, 100.0, 600.0])
def test_a_sure_row_keeps_its_small_numbers(drop, host):
    """One of two logits is much larger, so that log_sum, the loss and the entropy are near 0."""
    log_sum = np.log1p(np.exp(-drop))
    entropy = log_sum + drop * np.exp(-drop) / (1 + np.exp(-drop))
    z = np.array([0.0, -drop])
    _, log_prob, found, *_ = solved(host, z, label=0)
    np.testing.assert_allclose([log_prob, found], [-log_sum, entropy], rtol=1e-6)
    _, log_prob, found, *_ = solved(host, z, label=1)
    np.testing.assert_allclose([log_prob, found], [-drop - log_sum, entropy], rtol=1e-6)


@needs_compiler
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_logit_leaves_no_sum_above_0(bad, host):
    """So that `finish` stores NaN; the same where all logits are -inf."""
    for z in ([bad, 1.0, 2.0], [1.0, bad, 2.0], [-np.inf] * 3):
        for label in range(3):
            *_, whole = solved(host, np.array(z), label)
            assert not whole > 0


def gradient(host, logits, label, node, upstream=1.0, owners=1, teacher=None, **fields):
    """The kernel's gradient of a row whose logits without the label's are this node."""
    logits = logits.astype(np.float32)
    u = np.full(len(logits), -np.inf) if teacher is None else teacher
    found = np.empty(len(logits) + 1, dtype=np.float32)
    host.gradients(
        argument(**fields),
        pointer(node.reshape(1)),
        ctypes.c_float(logits[label]),
        ctypes.c_double(upstream),
        owners,
        pointer(logits),
        pointer(u.astype(np.float32)),
        pointer(found),
        len(logits),
    )
    found[label] = found[-1]
    return found[:-1]


TAUGHT = *one_read_params.OF_TEACHER, *WITHOUT
STUDENTS = [name for name in one_read_params.TERMS if name not in TAUGHT]


def gradient_in_float64(z, label, by):
    """The gradient by z of a loss that has these derivatives by lse, log_prob, entropy, total."""
    lse, _, entropy, *_ = statistics_in_float64(z, label)
    p = np.exp(z - lse)
    with np.errstate(invalid="ignore"):
        log_p = np.where(p > 0, z - lse, 0)
    found = (by[0] - by[1]) * p - by[2] * p * (log_p + entropy) + by[3] * (z > -np.inf)
    found[label] += by[1]
    return found


def by_statistic(kind, values):
    """Fields of the argument: factors or squares of the statistics without a teacher."""
    return {f"{name}_{kind}": float(x) for name, x in zip(STUDENTS, values)}


@needs_compiler
@SCALES
@pytest.mark.parametrize(
    "by", [(1, 0, 0, 0), (0, -1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 0.25), (0.1, -1, 0.2, -0.01)]
)
def test_gradients_agree_with_float64(scale, by, host):
    by, scale = np.array(by, dtype=np.float32), float(np.float32(scale))
    for exact, label in labelled_rows():
        node = node_of(np.delete(exact, label), scale=scale)
        found = gradient(host, exact, label, node, scale=scale, **by_statistic("factor", by))
        z = scale * exact
        expected = scale * gradient_in_float64(z, label, by)
        noise = max(1, scale) * (1e-6 * np.abs(z[z > -np.inf]).max() + 3e-6)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=noise)


def small_rows():
    """Rows of a few logits of usual size, with a label, of which some are -inf."""
    random = np.random.default_rng(3)
    for _ in range(100):
        z = bf16(random.choice([0.5, 3]) * random.standard_normal(8) + random.choice([0, -4]))
        label = int(random.integers(len(z)))
        z[random.random(len(z)) < random.choice([0, 0.3])] = -np.inf
        if (np.delete(z, label) > -np.inf).any():
            yield z, label


@needs_compiler
@pytest.mark.parametrize("name", STUDENTS)
def test_gradients_of_squares_agree_with_float64(name, host):
    """Those of weight * (factor * statistic + square / 2 * statistic^2), times upstream."""
    place, scale, upstream = one_read_params.TERMS.index(name), 0.75, 1.5
    weight = np.array([0.5], dtype=np.float32)
    fields = {f"{name}_factor": 0.25, f"{name}_square": -0.5}
    for exact, label in small_rows():
        if name == "log_prob" and exact[label] == -np.inf:
            continue  # whose square is infinite
        node = node_of(np.delete(exact, label), scale=scale)
        given = {"scale": scale, "weight": weight, **fields}
        found = gradient(host, exact, label, node, upstream, **given)
        by = np.zeros(4)
        statistic = statistics_in_float64(scale * exact, label)[place]
        by[place] = weight[0] * upstream * (0.25 - 0.5 * statistic)
        expected = scale * gradient_in_float64(scale * exact, label, by)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@needs_compiler
def test_a_gradient_is_nan_unless_one_rank_has_the_label(host):
    for exact, label in small_rows():
        node = node_of(np.delete(exact, label))
        for owners in (0, 2):
            found = gradient(host, exact, label, node, owners=owners, lse_factor=1)
            assert np.isnan(found).all()


@needs_compiler
@pytest.mark.parametrize("by", np.eye(4))
@pytest.mark.parametrize("top, step, scale", [(3e4, 128, 0.01), (3e4, 0, 25.0), (1e30, 0, 1 / 0.7)])
def test_large_logits_have_the_gradient_of_small_ones(top, step, scale, by, host):
    """Logits of 16 bits that lie far from 0 are equal or far apart, so that z is exact."""
    small = step * np.array([0.0, 0, -1, -2, 0, -3])
    large = np.round(bf16(top) / 256) * 256 + small  # which float32 has, too
    found = []
    for logits in (small, large):
        node = node_of(logits[1:], scale=scale)
        fields = by_statistic("factor", by)
        found.append(gradient(host, logits, 0, node, scale=scale, **fields))
    np.testing.assert_allclose(*found, rtol=3e-6, atol=1e-6 * scale)


@needs_compiler
@pytest.mark.parametrize("by", np.eye(4))
@pytest.mark.parametrize("top, step, scale", [(3e6, 0.25, 1.0), (3e8, 32, 1.0), (3e9, 256, 1.0)])
def test_large_logits_of_32_bits_have_the_gradient_of_small_ones(
    top, step, scale, by, host_of_fp32
):
    """z of which one is a bit above another."""
    test_large_logits_have_the_gradient_of_small_ones(top, step, scale, by, host_of_fp32)


@needs_compiler
@pytest.mark.parametrize("by", np.eye(4))
def test_gradients_through_a_softcap_agree_with_float64(by, host_of_softcap):
    host, before, cap = host_of_softcap, float(np.float32(1 / 30)), 30.0
    for small, label in small_rows():
        exact = bf16(8 * small[small > -np.inf])
        label = label % len(exact)
        values = np.tanh(before * exact)
        node = node_of(np.delete(values, label), scale=cap)
        fields = {"before": before, "scale": cap, **by_statistic("factor", by)}
        found = gradient(host, exact, label, node, **fields)
        slopes = cap * before * (1 - values**2)
        expected = slopes * gradient_in_float64(cap * values, label, by)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize(
    "logit, label, expected",
    [(3.0, 9, 9), (2.0, 4, 4), (2.0, 6, 5), (1.0, 4, 5), (-np.inf, 4, 5)],
)
def test_the_argmax_is_the_lowest_id_of_the_largest_logit(logit, label, expected, host):
    rest = *NO_TEACHER, 1.5, 0, 0, 0, *NO_ENTRIES, *NO_MIXTURE
    node = np.array([(2.0, 1.5, 0, 3.0, 2, 5, *rest)], dtype=NODE)
    labels, argmax = np.array([label]), np.empty(1, dtype=np.int64)
    hits = np.empty(1, dtype=np.uint8)
    names = "mean", "entropy", "total", "mass", "forward_kl", "reverse_kl", "teacher_entropy"
    names += "student_sum", "teacher_shift", "teacher_sum", "gap"
    others = {name: np.empty(1, dtype=np.float32) for name in names}
    fields = {"labels": labels, "wide_labels": 1, "argmax": argmax, "hits": hits, **others}
    for ignored, bad in ((0, 0), (1, 0), (0, 1)):
        host.stores(argument(**fields), pointer(node), ctypes.c_float(logit), ignored, bad)
        valid = not (ignored or bad)
        assert argmax[0] == (expected if valid else -1)
        assert hits[0] == (valid and expected == label)


def taught_rows():
    """Rows with a label, and a teacher's logits beside them; the student's are above -inf where
    the teacher's are, and the label's is."""
    for logits, label in labelled_rows():
        u = teacher_of(logits)
        u[logits == -np.inf] = -np.inf
        if (u > -np.inf).any() and logits[label] > -np.inf:
            yield logits, label, u


@needs_compiler
@SCALES
def test_a_teachers_sums_agree_with_float64_in_any_tree(scale, host):
    """Of three parts, and of a label that its part has left out."""
    scale, cases = float(np.float32(scale)), list(taught_rows())
    assert len(cases) > 100
    parts, labels, whole, sizes = [[], [], []], [], [], []
    for z, label, u in cases:
        others = node_of(np.delete(z, label), scale=scale)
        whole.append(with_teacher(others, z, u, scale, label))
        kept = np.flatnonzero(np.arange(len(z)) != label)
        for nodes, some in zip(parts, np.array_split(kept, 3)):
            nodes.append(with_teacher(node_of(z[some], scale=scale), z[some], u[some], scale))
        labels.append((z[label], u[label]))
        there = u > -np.inf
        sizes.append(np.abs(scale * z[z > -np.inf]).max() + np.abs(u[there]).max())
    a, b, c = (np.array(nodes, dtype=NODE) for nodes in parts)
    values, teacher = (np.array(x, dtype=np.float32) for x in zip(*labels))
    label, whole, sizes = np.empty_like(a), np.array(whole, dtype=NODE), np.array(sizes)
    host.labels(pointer(values), pointer(teacher), pointer(label), len(a), scales_of(scale))
    for found in (
        joined(host, joined(host, joined(host, a, b, scale), c, scale), label, scale),
        joined(host, joined(host, a, label, scale), joined(host, b, c, scale), scale),
    ):
        for name in ("teacher_max", "teacher_logit"):
            np.testing.assert_array_equal(found[name], whole[name], err_msg=name)
        for name in ("teacher_sum", "student_sum"):
            np.testing.assert_allclose(found[name], whole[name], rtol=3e-5, err_msg=name)
        sums = ("cross", "teacher_sum"), ("gap", "student_sum"), ("teacher_moment", "teacher_sum")
        for name, weights in sums:
            # an infinite gap is one but where its p underflows in some part
            finite = np.isfinite(found[name]) & np.isfinite(whole[name])
            assert finite.sum() > len(cases) / 3, name
            assert finite.all() or name != "teacher_moment"
            error = np.abs(found[name].astype(np.float64)[finite] - whole[name][finite])
            assert (error <= (3e-5 * sizes * (1 + whole[weights]))[finite]).all(), name
    expect_same_bits(joined(host, a, b, scale), joined(host, b, a, scale))


def divergences_in_float64(z, u):
    """KL(q || p), KL(p || q), p, q, and log p - log q, of logits z' and u."""
    log_p, log_q = (x - x.max() - np.log(np.exp(x - x.max()).sum()) for x in (z, u))
    p, q = np.exp(log_p), np.exp(log_q)
    with np.errstate(invalid="ignore"):
        apart = log_p - log_q
        forward = np.where(q > 0, -q * apart, 0).sum()
        reverse = np.where(p > 0, p * apart, 0).sum()
    return forward, reverse, p, q, apart


@needs_compiler
@SCALES
def test_divergences_and_their_gradients_agree_with_float64(scale, host):
    scale = float(np.float32(scale))
    for exact, label, u in taught_rows():
        node = node_of(np.delete(exact, label), scale=scale)
        node = with_teacher(node, exact, u, scale, label)
        logit, values = exact[label : label + 1].astype(np.float32), np.empty(13)
        given = pointer(node.reshape(1)), pointer(logit), pointer(values)
        host.solves(*given, 1, scales_of(scale))
        beside = BESIDE * scale * exact
        forward, reverse, p, q, apart = divergences_in_float64(beside, TEACHER_SCALE * u)
        there = u > -np.inf
        size = np.abs(scale * exact[exact > -np.inf]).max() + np.abs(u[there]).max()
        entropy = -(q[q > 0] * np.log(q[q > 0])).sum()
        for found, expected in ((values[6], forward), (values[7], reverse), (values[12], entropy)):
            assert found == expected or abs(found - expected) <= 2e-6 * size + 1e-5 * expected
        fields = {"scale": scale, "forward_kl_factor": 2.0, "log_prob_factor": -0.5}
        found = gradient(host, exact, label, node, teacher=u, **fields)
        own = np.exp(scale * exact - statistics_in_float64(scale * exact, label)[0])
        expected = scale * (2 * BESIDE * (p - q) + 0.5 * own)
        expected[label] -= scale * 0.5
        noise = scale * (2e-6 * size + 3e-6)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=noise)
        if reverse == np.inf:
            continue  # which has no gradient
        found = gradient(host, exact, label, node, teacher=u, scale=scale, reverse_kl_factor=2.0)
        with np.errstate(invalid="ignore"):
            expected = np.where(p > 0, 2 * scale * BESIDE * p * (apart - reverse), 0)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2 * noise * (1 + reverse))


@needs_compiler
@pytest.mark.parametrize("name", one_read_params.DIVERGENCES)
def test_gradients_of_squared_divergences_agree_with_float64(name, host):
    scale, weight = 0.75, np.array([0.5], dtype=np.float32)
    fields = {f"{name}_factor": 0.25, f"{name}_square": -0.5, "scale": scale, "weight": weight}
    for exact, label in small_rows():
        u = np.where(exact > -np.inf, bf16(np.cos(3 * exact.clip(-9))), -9.0)
        node = node_of(np.delete(exact, label), scale=scale)
        node = with_teacher(node, exact, u, scale, label)
        if exact[label] == -np.inf:
            continue
        found = gradient(host, exact, label, node, 1.5, teacher=u, **fields)
        of_u = divergences_in_float64(BESIDE * scale * exact, TEACHER_SCALE * u)
        forward, reverse, p, q, apart = of_u
        value = forward if name == "forward_kl" else reverse
        with np.errstate(invalid="ignore"):
            by_reverse = np.where(p > 0, p * (apart - reverse), 0)
        by_z = p - q if name == "forward_kl" else by_reverse
        expected = weight[0] * 1.5 * (0.25 - 0.5 * value) * scale * BESIDE * by_z
        if not (name == "forward_kl" and forward == np.inf):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


@needs_compiler
def test_a_teacher_without_probabilities_has_no_divergence(host):
    node = node_of([1.0, 2.0]).reshape(1)
    logit, values = np.array([0.5], dtype=np.float32), np.empty(13)
    host.solves(pointer(node), pointer(logit), pointer(values), 1, scales_of(1.0))
    assert np.isnan(values[[6, 7, 12]]).all() and np.isfinite(values[:6]).all()
    for name in one_read_params.DIVERGENCES:
        logits = np.array([0.5, 1.0, 2.0])
        assert np.isnan(gradient(host, logits, 0, node, **{f"{name}_factor": 1.0})).all()
        for bad in (-np.inf, np.nan, np.inf):  # where it is a metric alone
            node["teacher_logit"], u = bad, np.full(3, bad)
            weighed = gradient(host, logits, 0, node, teacher=u, lse_factor=1.0)
            assert np.isfinite(weighed).all()
        node["teacher_logit"] = 0


@needs_compiler
@pytest.mark.parametrize("before", [1 / 30, 1.0, -0.5])
def test_a_softcap_is_a_tanh_and_has_its_slope(before, host_of_softcap):
    logits = np.concatenate([np.linspace(-60, 60, 9999), [1e-6, -3e38, 3e38, np.inf]])
    logits = logits.astype(np.float32)
    found = np.empty((len(logits), 2), dtype=np.float32)
    number = ctypes.c_float(before)
    host = host_of_softcap
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
def test_a_logit_near_0_has_the_same_bits_beside_any_others(host_of_softcap):
    """Large temperatures' inverses make 1e-7 of a tanh visible."""
    logits = np.concatenate([np.linspace(-0.499, 0.499, 9999), [0.0, 1e-30, -1e-6]])
    logits = logits.astype(np.float32)
    host, one = host_of_softcap, ctypes.c_float(1.0)
    found = [np.empty((len(logits), 2), dtype=np.float32) for _ in range(2)]
    for all_near, values in enumerate(found):
        host.values(pointer(logits), pointer(values), len(logits), one, all_near)
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0][:, 0], np.tanh(logits.astype(np.float64)), rtol=1.2e-7)


@needs_compiler
@pytest.mark.parametrize(
    "flag, dtype", [("-DHALF", np.float16), ("-DBF16", None), ("-DFLOAT32", np.float32)]
)
def test_logits_are_the_numbers_of_their_bits(flag, dtype, tmp_path):
    halves = np.arange(1 << 16, dtype=np.uint16)
    bits = np.concatenate([halves, halves[::-1], halves])  # whole vectors of any dtype
    as_bf16 = (bits.astype(np.uint32) << 16).view(np.float32)
    expected = as_bf16 if dtype is None else bits.view(dtype).astype(np.float32)
    found = np.empty_like(expected)
    library(tmp_path, flag).logits(pointer(bits), pointer(found), bits.nbytes // 16)
    np.testing.assert_array_equal(found, expected)


@needs_compiler
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_labels_are_of_either_type(dtype, host):
    labels = np.array([7, -100, 262143], dtype=dtype)
    given = argument(labels=labels, wide_labels=labels.itemsize == 8)
    assert [host.label(given, row) for row in range(3)] == labels.tolist()


@needs_compiler
def test_a_scale_is_divided_by_the_tokens_temperature_and_stays_above_0(host):
    assert host.scale(argument(scale=0.5), 2) == 0.5
    temperatures = np.array([2.0, 0.25, np.inf], dtype=np.float32)
    given = argument(scale=0.5, temperatures=temperatures)
    assert [host.scale(given, row) for row in range(2)] == [0.25, 2.0]
    assert 0 < host.scale(given, 2) < 1e-37


@needs_compiler
@pytest.mark.parametrize("chunk, cuts", [(10, 2), (501, 3), (64, 0)])
def test_leaves_of_a_chunk_differ_by_one_vector_at_most(chunk, cuts, host):
    given, leaves = argument(chunk=chunk, cuts=cuts), 1 << cuts
    begins = np.array([host.leaf_begin(given, leaf) for leaf in range(3 * leaves + 1)])
    assert begins[::leaves].tolist() == [0, chunk, 2 * chunk, 3 * chunk]
    assert set(np.diff(begins)) <= {chunk // leaves, -(-chunk // leaves)}


@needs_compiler
def test_a_gradient_is_written_for_the_upstream_gradient_that_is_given_or_foreseen(host):
    def upstream(**fields):
        value = np.empty(1, dtype=np.float32)
        is_written = host.upstream(argument(**fields), pointer(value))
        return value[0], bool(is_written)

    def forecast(value, streak, patience):
        bits = np.float32(value).view(np.int32) ^ np.int32(0x3F800000)
        return upstream(forecast=np.array([bits, streak, patience], dtype=np.int32))

    assert upstream() == (1, True)
    assert upstream(upstream=np.array([2.5], dtype=np.float32)) == (2.5, True)
    assert forecast(2.5, streak=3, patience=3) == (2.5, True)
    assert forecast(2.5, streak=2, patience=3) == (2.5, False)
    for bad in (np.inf, -np.inf, np.nan):
        assert not forecast(bad, streak=3, patience=3)[1]


SHARED = '#include "ptx.cuh"\n#include "shared.cuh"\n'
# of calls that have the most in shared memory
LARGEST = [
    (),
    ("FORWARD_KL", "REVERSE_KL", "TEMPERED"),
    ("REVERSE_KL", "TEACHER_ENTROPY", "TEMPERED", "TEACHER_FLOAT32"),
    ("TOPK_FORWARD_KL", "VOCAB_FORWARD_KL", "TAIL_LOG_MASS"),
    ("JSD", "FORWARD_KL", "REVERSE_KL", "TEACHER_ENTROPY", "TEMPERED"),
    ("JSD", "REVERSE_KL", "TEACHER_ENTROPY", "TEMPERED", "TEACHER_FLOAT32"),
    ("TOTAL_VARIATION", "REVERSE_KL", "TEMPERED"),
]


@needs_compiler
@pytest.mark.parametrize("flags", LARGEST)
@pytest.mark.parametrize("is_fp32", [False, True])
def test_what_the_roles_share_fits_beside_the_slots(is_fp32, flags, tmp_path):
    flags = [f"-D{flag}" for flag in flags if not (is_fp32 and flag == "TEACHER_FLOAT32")]
    flags += ["-DFLOAT32"] if is_fp32 else []
    assert compiled(tmp_path, SHARED, "-fsyntax-only", *flags) == ""


@needs_compiler
def test_what_does_not_fit_does_not_compile(tmp_path, monkeypatch):
    larger = SOURCES["node.cuh"].replace("float by, at, each,", "float more[9], by, at, each,", 1)
    monkeypatch.setitem(SOURCES, "node.cuh", larger)
    assert "sizeof(Shared)" in compiled(tmp_path, SHARED, "-fsyntax-only")


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
@pytest.mark.parametrize(
    "flags", [(), *((flag.upper(),) for flag in one_read_params.FLAGS), ("FLOAT32", "TOTAL")]
)
def test_the_argument_and_the_numbers_are_the_same_in_both_languages(flags, tmp_path):
    source = ARGUMENT + one_read_params.agreement(*flags)
    assert compiled(tmp_path, source, "-fsyntax-only", *(f"-D{flag}" for flag in flags)) == ""


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
