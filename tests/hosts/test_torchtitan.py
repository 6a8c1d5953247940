"""With torchtitan itself: its models on two ranks, with its losses and with ours
(tests/hosts/torchtitan_cases.py)."""

import functools

import cases
import pytest

HOST = "torchtitan-0.3.0"
BACKENDS = ("spmd_types", "partial_dtensor")
SAME = [
    *(
        f"{kind}-{backend}{sp}"
        for kind in ("logits", "fused")
        for backend in BACKENDS
        for sp in ("", "-sp")
    ),
    *(f"fused-partial_dtensor-{wrapped}" for wrapped in ("fsdp", "sp-fsdp", "dp-fsdp")),
    *(f"typechecked-{kind}" for kind in ("logits", "fused", "fused-sp", "chunked-sp")),
    *(f"{case}-{backend}" for case in ("linear_options", "upstream") for backend in BACKENDS),
    *(
        "fused-spmd_types-bias",
        "fused-partial_dtensor-bias",
        "chunked-partial_dtensor",
        "compiled-spmd_types",
    ),
]
CLOSE = [
    f"{case}-{backend}" for case in ("terms_and_metrics", "validation") for backend in BACKENDS
]
OTHERS = ["wrong_contract", "exact", "refusals", "documented"]


result = functools.partial(cases.result, HOST, "torchtitan_cases.py")


def test_every_case_is_looked_at():
    assert set(cases.results(HOST, "torchtitan_cases.py")) == {*SAME, *CLOSE, *OTHERS}


@pytest.mark.parametrize("name", SAME)
def test_loss_and_all_gradients_are_torchtitans(name):
    found = result(name)
    assert found["loss"] < 1e-6 and found["grads"] < 1e-6 and found["mutant"] > 5e-3, found


@pytest.mark.parametrize("name", CLOSE)
def test_terms_metrics_and_validation_sums(name):
    found = result(name)
    assert found and max(found.values()) < 1e-6, found


def test_hidden_gradient_summed_twice_is_refused_and_would_be_seen():
    found = result("wrong_contract")
    assert found["head"] < 1e-6 and 0.9 < found["least"] <= found["most"] < 1.1, found


def test_no_further_from_float64_than_torchtitan():
    found = result("exact")
    for name in ("float32_loss", "float32_grads", "bfloat16_loss", "bfloat16_grads"):
        assert found[f"ours_{name}"] <= 1.5 * found[f"host_{name}"], (name, found)


def test_what_cannot_work_is_refused():
    assert result("refusals") == {}


def test_the_documented_configuration_runs():
    found = result("documented")
    assert (
        found["loss"] < 1e-6
        and found["sum"] < 1e-6
        and found["gradients"] == 10
        and 0 <= found["accuracy"] < 1
    )
