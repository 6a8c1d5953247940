"""With axolotl itself: its losses and ours of one model, from the YAML to the last step, on two
ranks (tests/hosts/axolotl_cases.py)."""

import cases
import pytest

HOST = "axolotl-0.19.0"
SAME = ["plain", "accumulated", "LoRA", "parallel"]


def result(name: str) -> dict:
    return cases.result(HOST, "axolotl_cases.py", name)


def test_every_case_is_looked_at():
    assert set(cases.results(HOST, "axolotl_cases.py")) == {*SAME, "documented", "refusals"}


@pytest.mark.parametrize("name", SAME)
def test_losses_and_gradients_are_axolotls(name):
    found = result(name)
    assert found["loss"] < 1e-6 and found["grads"] < 1e-6 and found["mutant"] > 5e-3, found


@pytest.mark.parametrize("name", ["documented", "refusals"])
def test_configurations_and_refusals(name):
    assert result(name) == {}
