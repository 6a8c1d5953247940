"""With NeMo-Automodel itself: its losses and ours of one model, tensor parallel on two ranks, and
with FSDP on four (tests/hosts/nemo_automodel_cases.py)."""

import cases
import pytest

HOST = "nemo_automodel-0.7.0"
KINDS = {
    "logits": "sum weights mean none undivided ignore_index datasets_label mask group TE",
    "fused": "unsharded plain sp weights mean none ignore_index softcap packed fsdp",
    "kd": "mean count temperature labels_outside ignore_index unsharded teacher_plain group",
    "mtp": "logits fused",
}
SAME = [f"{loss}-{kind}" for loss, kinds in KINDS.items() for kind in kinds.split()]


FSDP = ["fsdp_and_tp-gathered", "fsdp_and_tp-resharded"]


def result(name: str) -> dict:
    return cases.result(HOST, "nemo_automodel_cases.py", name, 4 if name in FSDP else 2)


def test_every_case_is_looked_at():
    others = {"nothing", "exact", "documented", "names", "refusals"}
    assert set(cases.results(HOST, "nemo_automodel_cases.py")) == {*SAME, *others}


@pytest.mark.parametrize("name", SAME + FSDP)
def test_loss_and_all_gradients_are_nemo_automodels(name):
    found = result(name)
    assert found["loss"] < 1e-6 and found["grads"] < 1e-6 and found["mutant"] > 5e-3, found


def test_no_valid_token_is_a_loss_of_zero_with_gradients_of_zero():
    assert set(result("nothing").values()) == {0.0}


def test_no_further_from_float64_than_nemo_automodel():
    found = result("exact")
    for name in ("logits_loss", "logits_grad", "kd_loss", "kd_grad"):
        assert found[f"ours_{name}"] <= 1.2 * found[f"host_{name}"], (name, found)


@pytest.mark.parametrize("name", ["documented", "names", "refusals"])
def test_configurations_and_refusals(name):
    assert result(name) == {}
