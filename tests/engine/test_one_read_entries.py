"""A top-K teacher's entries in the kernel's arithmetic, compiled for the host: their sums beside
those of the tail, what is solved from both, and gradients."""

import ctypes

import numpy as np
import pytest
from node_on_host import (
    NODE,
    SCALES,
    argument,
    bf16,
    expect_same_bits,
    joined,
    library,
    needs_compiler,
    node_of,
    pointer,
    scales_of,
)

from tp_headloss.engine.one_read import params as one_read_params

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return library(
        tmp_path_factory.mktemp("node"),
        without=(*one_read_params.OF_TEACHER, "tempered"),
    )


def taught_rows():
    """Rows of logits, a label, and log tau of the entries, -inf at all other columns."""
    random = np.random.default_rng(5)
    for i in range(300):
        size = int(random.integers(4, 24))
        z = bf16(10.0 ** random.uniform(-1, 2) * random.standard_normal(size))
        z += random.choice([0.0, 256.0, -256.0])
        is_entry = random.random(size) < random.choice([0.2, 0.6, 1.0] if i % 9 else [0.0])
        z[is_entry] += random.choice([0.0, 16.0, 128.0])  # likely ones, beside which others vanish
        z[random.random(size) < random.choice([0, 0, 0.2])] = -np.inf
        z = bf16(z)
        log_tau = np.where(is_entry, -random.exponential(3, size), -np.inf)
        log_tau = log_tau.astype(np.float32).astype(np.float64)
        if (z > -np.inf).sum() > 1:
            yield z, int(random.integers(size)), log_tau


def sums_in_float64(z, scale):
    """Maximum, and sum of exponentials relative to it."""
    if not (z > -np.inf).any():
        return -np.inf, 0.0
    return z.max(), np.exp(scale * (z - z.max())).sum()


def with_entries(z, log_tau, scale, first=0):
    """The node of some columns, with the sums of entries and tail."""
    node, is_entry = node_of(z, first, scale).copy(), log_tau > -np.inf
    tau = np.exp(log_tau[is_entry])
    node["topk_max"], node["topk_sum"] = sums_in_float64(z[is_entry], scale)
    node["tail_max"], node["tail_sum"] = sums_in_float64(z[~is_entry], scale)
    node["topk_mass"] = tau.sum()
    shift = float(node["topk_max"]) if node["topk_max"] > -np.inf else 0.0
    drop = scale * (z[is_entry] - shift)
    node["topk_cross"] = (tau * (log_tau[is_entry] - drop)).sum()
    return node


def labelled(host, node, z, label, log_tau, scale):
    """The node with its row's label."""
    value, log_tau = (np.array([x[label]], dtype=np.float32) for x in (z, log_tau))
    found = np.empty(1, dtype=NODE)
    given = pointer(node.reshape(1)), pointer(value), pointer(log_tau), pointer(found)
    host.with_labels(*given, 1, scales_of(scale))
    return found


def parts_of(z, label, log_tau, scale):
    """Nodes of a row's three parts without its label."""
    kept = np.flatnonzero(np.arange(len(z)) != label)
    parts = np.array_split(kept, 3)
    return [with_entries(z[some], log_tau[some], scale).reshape(1) for some in parts]


def row_node(host, z, label, log_tau, scale):
    """The node of a row with its label, joined of three parts."""
    a, b, c = parts_of(z, label, log_tau, scale)
    return labelled(
        host, joined(host, joined(host, a, b, scale), c, scale), z, label, log_tau, scale
    )


def lse(z):
    top, total = sums_in_float64(z, 1.0)
    with np.errstate(divide="ignore"):
        return top + np.log(total)


def values_in_float64(z, log_tau):
    """topk_forward_kl, vocab_forward_kl, tail_log_mass and teacher_mass of scaled logits."""
    is_entry = log_tau > -np.inf
    tau = np.exp(log_tau[is_entry])
    if not is_entry.any():
        return 0.0, 0.0, lse(z) - lse(z), 0.0
    found = []
    for whole in (lse(z[is_entry]), lse(z)):
        if whole == -np.inf or (z[is_entry] == -np.inf).any():
            found.append(np.inf)
        else:
            found.append((tau * (log_tau[is_entry] - (z[is_entry] - whole))).sum())
    return *found, lse(z[~is_entry]) - lse(z), tau.sum()


@SCALES
def test_sums_agree_with_float64_in_any_tree(scale, host):
    scale, cases = float(np.float32(scale)), list(taught_rows())
    assert len(cases) > 200
    for z, label, log_tau in cases:
        a, b, c = parts_of(z, label, log_tau, scale)
        whole = with_entries(z, log_tau, scale)
        left = labelled(
            host, joined(host, joined(host, a, b, scale), c, scale), z, label, log_tau, scale
        )
        right = labelled(
            host, joined(host, a, joined(host, b, c, scale), scale), z, label, log_tau, scale
        )
        size = 1 + scale * np.ptp(z[z > -np.inf])
        for found in (left, right):
            for name in ("topk_max", "tail_max"):
                assert found[name] == whole[name]
            for name in ("topk_sum", "tail_sum", "topk_mass"):
                np.testing.assert_allclose(found[name], whole[name], rtol=2e-6 * size, atol=1e-37)
            noise = 1e-6 * size * (1 + whole["topk_mass"])
            np.testing.assert_allclose(found["topk_cross"], whole["topk_cross"], atol=noise)
            assert found["label_log_tau"] == np.float32(log_tau[label])
        expect_same_bits(joined(host, a, b, scale), joined(host, b, a, scale))


@SCALES
def test_divergences_agree_with_float64(scale, host):
    scale = float(np.float32(scale))
    for exact, label, log_tau in taught_rows():
        node = row_node(host, exact, label, log_tau, scale)
        logit, values = exact[label : label + 1].astype(np.float32), np.empty(13)
        host.solves(pointer(node), pointer(logit), pointer(values), 1, scales_of(scale))
        z = scale * exact
        expected = values_in_float64(z, log_tau)
        size = 1 + np.ptp(z[z > -np.inf])
        np.testing.assert_allclose(values[8:12], expected, rtol=2e-6, atol=2e-6 * size)


def gradient_in_float64(z, label, log_tau, by):
    """The gradient by z of a loss with these derivatives by lse, log_prob, entropy, total,
    topk_forward_kl, vocab_forward_kl and tail_log_mass."""
    is_entry, p = log_tau > -np.inf, np.exp(z - lse(z))
    tau = np.exp(log_tau)
    with np.errstate(invalid="ignore", over="ignore"):
        s, r = (np.where(where, np.exp(z - lse(z[where])), 0) for where in (is_entry, ~is_entry))
        log_p = np.where(p > 0, z - lse(z), 0)
    s, r = s if (z[is_entry] > -np.inf).any() else 0 * p, r if p[~is_entry].any() else 0 * p
    entropy = -(p * log_p).sum()
    found = (by[0] - by[1]) * p - by[2] * p * (log_p + entropy) + by[3] * (z > -np.inf)
    found[label] += by[1]
    found += by[4] * (tau.sum() * s - tau) + by[5] * (tau.sum() * p - tau)
    return found + by[6] * (r - p)


def gradient(host, z, label, node, log_tau, upstream=1.0, **fields):
    """The kernel's gradient of a row with entries."""
    z, found = z.astype(np.float32), np.empty(len(z) + 1, dtype=np.float32)
    node, logit, given = pointer(node), ctypes.c_float(z[label]), argument(**fields)
    upstream = ctypes.c_double(upstream)
    host.gradients(given, node, logit, upstream, 1, pointer(z), pointer(z), pointer(found), len(z))
    of_entries, log_tau = np.empty(len(z), dtype=np.float32), log_tau.astype(np.float32)
    lists = pointer(z), pointer(log_tau), pointer(of_entries)
    host.gradients_of_entries(given, node, logit, upstream, *lists, len(z))
    of_label, found = found[-1], np.where(log_tau > -np.inf, of_entries, found[:-1])
    found[label] = of_label
    return found


FACTORS = {
    "topk_forward_kl": 4,
    "vocab_forward_kl": 5,
    "tail_log_mass": 6,
    "log_prob": 1,
    "entropy": 2,
    "total": 3,
}


@SCALES
@pytest.mark.parametrize("names", [*([name] for name in one_read_params.OF_ENTRIES), [*FACTORS]])
def test_gradients_agree_with_float64(names, scale, host):
    scale, factors = float(np.float32(scale)), np.zeros(7)
    for i, name in enumerate(names):
        factors[FACTORS[name]] = (-1) ** i * (i + 1) / 4
    fields = {f"{name}_factor": factors[FACTORS[name]] for name in names}
    count = 0
    for exact, label, log_tau in taught_rows():
        node, z = row_node(host, exact, label, log_tau, scale), scale * exact
        is_entry = log_tau > -np.inf
        if "total" in names and (z == -np.inf).any():
            continue  # whose -inf the kernel's caller knows
        outside = np.exp(lse(z[~is_entry]) - lse(z))
        if outside == 0 and "tail_log_mass" in names:
            continue  # infinite
        found = gradient(host, exact, label, node, log_tau, scale=scale, **fields)
        expected = scale * gradient_in_float64(z, label, log_tau, factors)
        noise = scale * 4e-6 * (1 + np.ptp(z[z > -np.inf]))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=noise)
        count += 1
    assert count > 100


@pytest.mark.parametrize("name", one_read_params.OF_ENTRIES)
def test_gradients_of_squares_agree_with_float64(name, host):
    scale, weight = 0.75, np.array([0.5], dtype=np.float32)
    fields = {f"{name}_factor": 0.25, f"{name}_square": -0.5, "scale": scale, "weight": weight}
    count = 0
    for exact, label, log_tau in taught_rows():
        z = scale * exact
        value = values_in_float64(z, log_tau)[one_read_params.OF_ENTRIES.index(name)]
        if not np.isfinite(value) or (z == -np.inf).any() or np.ptp(z) > 30:
            continue
        factors = np.zeros(7)
        factors[FACTORS[name]] = weight[0] * 1.5 * (0.25 - 0.5 * value)
        node = row_node(host, exact, label, log_tau, scale)
        found = gradient(host, exact, label, node, log_tau, 1.5, **fields)
        expected = scale * gradient_in_float64(z, label, log_tau, factors)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        count += 1
    assert count > 50


def test_a_tail_far_below_the_entries_has_its_gradient(host):
    """Where its power relative to the largest logit is no float."""
    z = np.array([300.0, 299.0, 0.0, -1.0, -2.0, -3.0])
    log_tau = np.array([-0.5, -1.5, *[-np.inf] * 4])
    node = row_node(host, z, 3, log_tau, 1.0)
    found = gradient(host, z, 3, node, log_tau, tail_log_mass_factor=1.0)
    expected = gradient_in_float64(z, 3, log_tau, np.array([0, 0, 0, 0, 0, 0, 1.0]))
    assert (found[2:] > 0.01).all()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_an_unknown_mass_makes_its_own_statistics_nan_alone(host):
    z, log_tau = np.array([1.0, 2.0, 0.5]), np.array([np.nan, -np.inf, -np.inf])
    node = with_entries(z[1:], log_tau[1:], 1.0).reshape(1)
    node = labelled(host, node, z, 0, log_tau, 1.0)
    rows = {name: np.zeros(1, dtype=np.float32) for name in one_read_params.OUTPUTS[8:]}
    fields = {"labels": np.zeros(1, dtype=np.int64), "wide_labels": 1, **rows}
    fields |= {"argmax": np.zeros(1, dtype=np.int64), "hits": np.zeros(1, dtype=np.uint8)}
    host.stores(argument(**fields), pointer(node), ctypes.c_float(1.0), 0, 0)
    for name in ("topk_forward_kl", "vocab_forward_kl", "tail_log_mass", "teacher_mass"):
        assert np.isnan(rows[name]), name
    for name in ("mean", "entropy", "total", "mass"):
        assert np.isfinite(rows[name]), name


def test_a_packet_carries_the_sums(host):
    whole = np.array([with_entries(z, log_tau, 1.0) for z, _, log_tau in taught_rows()], dtype=NODE)
    found, logits = np.empty_like(whole), np.zeros(len(whole), dtype=np.uint16)
    labels = np.empty(len(whole), dtype=np.float32)
    owners, ignored = np.empty((2, len(whole)), dtype=np.int32)
    results = map(pointer, (found, labels, owners, ignored))
    host.packets(pointer(whole), pointer(logits), 1, *results, len(whole))
    for name in ("topk_max", "topk_sum", "topk_mass", "topk_cross", "tail_max", "tail_sum"):
        expect_same_bits(found[name], whole[name])
    for launch in (1, 7):
        assert host.has_come(launch, -1, 0)
        for store in (0, 1, 4, 5):
            assert not host.has_come(launch, store, launch - 1)
