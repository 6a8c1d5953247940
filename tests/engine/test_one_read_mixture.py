"""The second round of one read in the kernel's arithmetic, compiled for the host: Jensen-Shannon
divergence, total variation and overlap of a teacher's probabilities and the student's, and
gradients."""

import ctypes

import numpy as np
import pytest
from node_on_host import (
    BESIDE,
    SCALES,
    TEACHER_SCALE,
    argument,
    bf16,
    library,
    needs_compiler,
    node_of,
    pointer,
    scales_of,
    with_teacher,
)

from tp_headloss.engine.one_read import params as one_read_params

pytestmark = needs_compiler
MIXED = np.dtype([("value", "f4"), ("mean", "f4"), ("overlap", "f4")])
BETA = 0.3
SIGNED = "total_variation", "overlap"  # whose slopes are made of signs of p - q


@pytest.fixture(scope="module", params=one_read_params.MIXTURES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def host(name, tmp_path_factory):
    others = {*one_read_params.MIXTURES} - {name}
    without = *one_read_params.OF_ENTRIES, *others
    return library(tmp_path_factory.mktemp(name), without=without)


@pytest.fixture(scope="module")
def host_of_one_temperature(name, tmp_path_factory):
    others = {*one_read_params.MIXTURES} - {name}
    without = *one_read_params.OF_ENTRIES, *one_read_params.DIVERGENCES, *others, "tempered"
    return library(tmp_path_factory.mktemp(name), without=without)


def taught_rows():
    """Logits of a student, whose first is the label's, and of a teacher: near each other and far,
    with -inf in either."""
    random = np.random.default_rng(7)
    for _ in range(300):
        size = int(random.integers(2, 24))
        z = bf16(10.0 ** random.uniform(-1, 2) * random.standard_normal(size))
        z += random.choice([0.0, 256.0, -256.0])
        u = z + random.choice([0.0, 0.1, 3.0]) * random.standard_normal(size)
        z[random.random(size) < random.choice([0, 0, 0.2])] = -np.inf
        u[random.random(size) < random.choice([0, 0, 0.2])] = -np.inf
        z, u = bf16(z), bf16(u)
        if (z[1:] > -np.inf).any() and (u > -np.inf).any():
            yield z, u


def probabilities(z):
    p = np.exp(z - z.max())
    return p / p.sum()


def row_of(z, u, scale, beside=BESIDE):
    """The row's node without its label, whose teacher's sums have it; p and q in float64."""
    node = with_teacher(node_of(z[1:], scale=scale), z, u, scale, 0)
    return node.reshape(1), probabilities(beside * scale * z), probabilities(TEACHER_SCALE * u)


def slopes_of(name, p, q):
    """What p times that is summed to the mean, for each column."""
    if name in SIGNED:
        half_sign = np.sign(p - q) / 2
        return 0.5 - half_sign if name == "overlap" else half_sign
    m = BETA * q + (1 - BETA) * p
    with np.errstate(divide="ignore", invalid="ignore"):
        return (1 - BETA) * np.where(p > 0, np.log(p / m), 0)


def value_of(name, p, q):
    if name == "total_variation":
        return np.abs(p - q).sum() / 2
    if name == "overlap":
        return np.minimum(p, q).sum()
    m = BETA * q + (1 - BETA) * p
    with np.errstate(divide="ignore", invalid="ignore"):
        student, teacher = (np.where(x > 0, x * np.log(x / m), 0).sum() for x in (p, q))
    return (1 - BETA) * student + BETA * teacher


def place_of(name):
    """Where its value is: in the sums, and in the row's node."""
    return ("overlap", "overlap") if name == "overlap" else ("value", "mixture")


def noise_of(z, u, scale):
    """Of a probability beside itself, whose exponent is rounded."""
    size = sum(np.abs(x[x > -np.inf]).max() for x in (scale * z, u))
    return 3e-6 + 2e-7 * size


def mixed(host, node, z, u, scale):
    found = np.empty(1, dtype=MIXED)
    given = pointer(node), pointer(z.astype(np.float32)), pointer(u.astype(np.float32))
    host.mixtures(*given, pointer(found), len(z), scales_of(scale), ctypes.c_float(BETA))
    return found[0]


def gradient(host, z, u, node, upstream=1.0, **fields):
    z, u = (x.astype(np.float32) for x in (z, u))
    found = np.empty(len(z) + 1, dtype=np.float32)
    given = argument(**{"beta": BETA, **fields}), pointer(node), ctypes.c_float(z[0])
    host.gradients(
        *(*given, ctypes.c_double(upstream), 1, pointer(z), pointer(u), pointer(found), len(z))
    )
    found[0] = found[-1]
    return found[:-1]


@SCALES
@pytest.mark.parametrize("is_tempered", [True, False])
def test_values_and_means_agree_with_float64(
    is_tempered, scale, name, host, host_of_one_temperature
):
    one, scale = host if is_tempered else host_of_one_temperature, float(np.float32(scale))
    for z, u in taught_rows():
        node, p, q = row_of(z, u, scale, BESIDE if is_tempered else 1.0)
        found, noise = mixed(one, node, z, u, scale), noise_of(z, u, scale)
        mean = (p * slopes_of(name, p, q)).sum()
        if name in SIGNED:  # the sign may be another where both are nearly equal
            near = np.abs(p - q) < noise * (p + q)
            assert abs(found["mean"] - mean) <= noise + p[near].sum()
        else:
            assert abs(found["mean"] - mean) <= noise
        assert abs(found[place_of(name)[0]] - value_of(name, p, q)) <= noise


@SCALES
@pytest.mark.parametrize("is_tempered", [True, False])
def test_gradients_agree_with_float64(is_tempered, scale, name, host, host_of_one_temperature):
    one, scale = host if is_tempered else host_of_one_temperature, float(np.float32(scale))
    beside, weight = BESIDE if is_tempered else 1.0, np.array([0.5], dtype=np.float32)
    for z, u in taught_rows():
        node, p, q = row_of(z, u, scale, beside)
        slopes = slopes_of(name, p, q)
        mean, value = (p * slopes).sum(), value_of(name, p, q)
        node[place_of(name)[1]], node["mixture_mean"] = value, mean
        fields = {f"{name}_factor": 0.25, f"{name}_square": -0.5, "log_prob_factor": -0.5}
        fields |= {"scale": scale, "student_scale": beside, "weight": weight}
        found = gradient(one, z, u, node, 1.5, **fields)
        own = probabilities(scale * z)
        own[0] -= 1  # exactly: of log_prob
        by = 0.25 - 0.5 * value
        expected = weight[0] * 1.5 * scale * (by * beside * p * (slopes - mean) + 0.5 * own)
        atol = scale * noise_of(z, u, scale)
        if name in SIGNED:
            near = np.abs(p - q) < noise_of(z, u, scale) * (p + q)
            atol = atol + np.where(near, scale * p, 0)
        if z[0] > -np.inf:
            assert (np.abs(found - expected) <= atol + 1e-4 * np.abs(expected)).all()


def test_equal_probabilities_are_no_divergence_and_have_no_slope(name, host):
    """Of equal logits, whose probabilities are exact."""
    z = np.zeros(8)
    node, *_ = row_of(z, z, 1.0)
    found = mixed(host, node, z, z, 1.0)
    if name == "overlap":
        assert found["overlap"] == 1 and found["mean"] == 0.5
    else:
        assert found["value"] == found["mean"] == 0
    node["mixture"], node["mixture_mean"], node["overlap"] = found
    assert not gradient(host, z, z, node, student_scale=BESIDE, **{f"{name}_factor": 1.0}).any()


def test_a_metric_leaves_the_gradient_alone_whatever_the_teacher_is(host):
    z, u = np.array([0.5, 1.0, 2.0]), np.full(3, np.nan)
    node = node_of(z[1:]).reshape(1)
    node["mixture"] = node["mixture_mean"] = node["overlap"] = np.nan
    assert np.isfinite(gradient(host, z, u, node, lse_factor=1.0)).all()


def test_a_teacher_without_probabilities_has_no_divergence(name, host):
    z, u = np.array([0.5, 1.0, 2.0]), np.full(3, -np.inf)
    node = node_of(z[1:]).reshape(1)
    assert np.isnan(gradient(host, z, u, node, **{f"{name}_factor": 1.0})).all()
    rows = {x: np.zeros(1, dtype=np.float32) for x in one_read_params.OUTPUTS[8:]}
    fields = {"labels": np.zeros(1, dtype=np.int64), "wide_labels": 1, **rows}
    fields |= {"argmax": np.zeros(1, dtype=np.int64), "hits": np.zeros(1, dtype=np.uint8)}
    host.stores(argument(**fields), pointer(node), ctypes.c_float(1.0), 0, 0)
    assert np.isnan(rows[name]) and np.isnan(rows[f"{name}_mean"])


def test_results_are_stored_under_the_statistics_name(name, host):
    z, u = np.array([0.5, 1.0, 2.0]), np.array([1.0, 0.0, -1.0])
    node, *_ = row_of(z, u, 1.0)
    node[place_of(name)[1]], node["mixture_mean"] = 0.25, 0.125
    rows = {x: np.zeros(1, dtype=np.float32) for x in one_read_params.OUTPUTS[8:]}
    fields = {"labels": np.zeros(1, dtype=np.int64), "wide_labels": 1, **rows}
    fields |= {"argmax": np.zeros(1, dtype=np.int64), "hits": np.zeros(1, dtype=np.uint8)}
    host.stores(argument(**fields), pointer(node), ctypes.c_float(1.0), 0, 0)
    assert rows[name] == 0.25 and rows[f"{name}_mean"] == 0.125
    for other in {*one_read_params.MIXTURES} - {name}:
        assert rows[other] == 0 and rows[f"{other}_mean"] == 0


@pytest.fixture(scope="module")
def host_of_both(tmp_path_factory):
    without = *one_read_params.OF_ENTRIES, "jsd"
    return library(tmp_path_factory.mktemp("both"), without=without)


def test_a_small_overlap_keeps_its_digits(host_of_both):
    """As 1 - total_variation it would have two, and its gradient's mean as 1/2 less that one's."""
    z, u = np.zeros(8), np.zeros(8)
    z[0], u[1] = 12.0, 16.0
    node, p, q = row_of(z, u, 1.0)
    found = mixed(host_of_both, node, z, u, 1.0)
    overlap, mean = value_of("overlap", p, q), (p * slopes_of("overlap", p, q)).sum()
    assert overlap < 1e-2 and mean < 1e-2
    assert found["overlap"] == pytest.approx(overlap, rel=2e-6)
    assert found["mean"] == pytest.approx(mean, rel=2e-6)


def test_an_overlap_and_a_total_variation_have_one_second_round(host_of_both):
    for z, u in taught_rows():
        node, p, q = row_of(z, u, 1.0)
        found, noise = mixed(host_of_both, node, z, u, 1.0), noise_of(z, u, 1.0)
        assert abs(found["value"] - value_of("total_variation", p, q)) <= noise
        assert abs(found["overlap"] - value_of("overlap", p, q)) <= noise
        mean = (p * slopes_of("overlap", p, q)).sum()
        near = np.abs(p - q) < noise * (p + q)
        assert abs(found["mean"] - mean) <= noise + p[near].sum()
        node["mixture"], node["mixture_mean"], node["overlap"] = found
        factors = {"overlap_factor": 0.75, "total_variation_factor": 0.25, "student_scale": BESIDE}
        expected = 0.5 * BESIDE * p * (slopes_of("overlap", p, q) - mean)
        atol = noise + np.where(near, p, 0) + p * p[near].sum()
        if z[0] > -np.inf:
            both = gradient(host_of_both, z, u, node, **factors)
            assert (np.abs(both - expected) <= atol + 1e-4 * np.abs(expected)).all()


def test_both_are_stored_and_each_has_its_mean(host_of_both):
    z, u = np.array([0.5, 1.0, 2.0]), np.array([1.0, 0.0, -1.0])
    node, *_ = row_of(z, u, 1.0)
    node["mixture"], node["mixture_mean"], node["overlap"] = 0.25, 0.125, 0.75
    rows = {x: np.zeros(1, dtype=np.float32) for x in one_read_params.OUTPUTS[8:]}
    fields = {"labels": np.zeros(1, dtype=np.int64), "wide_labels": 1, **rows}
    fields |= {"argmax": np.zeros(1, dtype=np.int64), "hits": np.zeros(1, dtype=np.uint8)}
    host_of_both.stores(argument(**fields), pointer(node), ctypes.c_float(1.0), 0, 0)
    assert rows["total_variation"] == 0.25 and rows["total_variation_mean"] == 0.375
    assert rows["overlap"] == 0.75 and rows["overlap_mean"] == 0.125
