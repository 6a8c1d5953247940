"""With SpecForge and speculators themselves: their losses of draft heads and ours, over two ranks of
the draft's vocabulary (tests/hosts/specforge_cases.py and speculators_cases.py)."""

import cases
import pytest

SPECFORGE = "specforge-0.2.0", "specforge_cases.py"
SPECULATORS = "speculators-0.9.0", "speculators_cases.py"
KINDS = [f"loss-{kind}-{k}" for kind in (None, "alpha", "lambda") for k in (0, 2)]
LOSSES = ["kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid"]
STEPS = [f"step-{k}" for k in range(3)]
MODELS = ["eagle3-logits", "eagle3-heads"]


def test_every_case_is_looked_at():
    teachers = {"teacher-float32", "teacher-bfloat16"}
    others = {"loss-documented", "rate", "signatures", *teachers}
    assert set(cases.results(*SPECFORGE)) == {*KINDS, *others}
    losses = {*(f"loss-{name}" for name in LOSSES), "loss-bfloat16"}
    assert set(cases.results(*SPECULATORS)) == {*losses, *STEPS, *MODELS, "signatures"}


@pytest.mark.parametrize("name", [*KINDS, "loss-documented", "rate"])
def test_loss_rate_and_gradient_are_specforges(name):
    found = cases.result(*SPECFORGE, name)
    assert found["loss"] < 1e-6 and found["grads"] < 2e-6 and found["mutant"] > 5e-3, found
    assert found.get("others", 0) < 1e-6, found


def test_the_target_teaches_as_in_specforge():
    for dtype, most in (("float32", 1e-6), ("bfloat16", 2e-2)):
        found = cases.result(*SPECFORGE, f"teacher-{dtype}")
        assert found["target_p"] < most and found["on_draft"] < most and found["same"], found


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_speculators(name):
    found = cases.result(*SPECULATORS, f"loss-{name}")
    assert found["loss"] < 1e-6 and found["grads"] < 2e-6 and found["mutant"] > 5e-3, found


def test_losses_of_bfloat16_logits_are_speculators():
    found = cases.result(*SPECULATORS, "loss-bfloat16")
    assert found["loss"] < 1e-6 and found["grads"] < 2**-8, found


@pytest.mark.parametrize("name", [*STEPS, *MODELS])
def test_steps_of_eagle_3_are_speculators(name):
    found = cases.result(*SPECULATORS, name)
    assert found["loss"] < 2e-6 and found["grads"] < 5e-6 and found["mutant"] > 5e-3, found
    assert found["others"] < 2e-6, found


@pytest.mark.parametrize("host", [SPECFORGE, SPECULATORS], ids=["specforge", "speculators"])
def test_signatures_are_the_hosts(host):
    assert cases.result(*host, "signatures") == {}
