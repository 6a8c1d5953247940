"""With DeepSpeed itself: AutoTP's models on two ranks, with its losses and with ours
(tests/hosts/deepspeed_cases.py).

fp32 errors are against the same model unsharded. After a few steps the weights differ by roundings,
so the gradients of a step may differ by 4e-6; 1 % of the output layer's gradient is 1e-2.
"""

import functools

import cases
import pytest

HOST = "deepspeed-0.19.8"
STEPS = [*(f"{kind}-stage{stage}" for kind in ("plain", "tied", "uneven") for stage in (0, 1))]
STEPS += ["plain-stage2", "gathered"]
OTHERS = ["linear", "other models", "micro-batches", "data parallel", "zero3"]


result = functools.partial(cases.result, HOST, "deepspeed_cases.py")


def test_every_case_is_looked_at():
    assert set(cases.results(HOST, "deepspeed_cases.py")) == {*STEPS, *OTHERS, "refusals", "README"}


@pytest.mark.parametrize("name", STEPS)
def test_losses_gradients_and_steps_are_those_of_the_unsharded_model(name):
    found = result(name)
    assert found["loss"] < 1e-6 and found["weights"] < 1e-6, found
    assert found["grads"] < 4e-6 < 5e-3 < found["mutant"], found


@pytest.mark.parametrize("name", OTHERS)
def test_loss_and_gradients(name):
    found = result(name)
    assert found["loss"] < 1e-6 and found["grads"] < 2e-6 < 5e-3 < found["mutant"], found


@pytest.mark.parametrize("name", ["refusals", "README"])
def test_what_cannot_work_is_refused_and_the_readme_runs(name):
    assert result(name) == {}


@pytest.mark.parametrize("stage", range(4))
def test_zero_trains_a_model_with_a_sharded_head_as_the_whole_model_is_trained(stage):
    """The first step of two replicas with two micro-batches each; a difference of weights rounds to
    1e-6 of it."""
    found = result(f"stage{stage}", ranks=4)
    assert found["updates"] < 3e-6 < 5e-3 < found["mutant"], found
