"""With the kernels package itself and transformers: a repository as scripts/hub.sh makes it, loaded from
disk (tests/hosts/hub_cases.py)."""

import cases
import pytest

HOST, SCRIPT = "transformers-5.24.0", "hub_cases.py"


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_case_is_looked_at(ranks):
    expected = (
        {"layer", "refusals", "trainer", "adapters", "documented"}
        if ranks == 1
        else {"versions_side_by_side", "sharded_layer", "sharded_refusals", "tensor_parallel"}
    )
    assert set(cases.results(HOST, SCRIPT, ranks)) == expected


def test_two_versions_and_an_installed_package_have_the_same_bits():
    found = cases.result(HOST, SCRIPT, "versions_side_by_side", 2)
    assert found == {"different": 0, "packages": 3}


def test_the_layer_is_the_loss_of_transformers():
    assert cases.result(HOST, SCRIPT, "layer", 1)["worst"] < 1e-5


def test_the_layer_refuses_what_it_does_not_understand():
    assert cases.result(HOST, SCRIPT, "refusals", 1)["wrong"] == 0


def test_a_trainer_has_its_own_losses_with_the_layer():
    found = cases.result(HOST, SCRIPT, "trainer", 1)
    assert found["worst"] < 1e-5 and found["least"] > 1.05, found


def test_adapters_of_a_kernel_are_its_own():
    found = cases.result(HOST, SCRIPT, "adapters", 1)
    assert max(found.values()) < 1e-5, found


def test_the_page_is_right():
    assert cases.result(HOST, SCRIPT, "documented", 1) == {"loss": 0.0}


def test_the_layer_takes_dtensors_that_are_sharded_on_the_vocabulary():
    assert cases.result(HOST, SCRIPT, "sharded_layer", 2)["worst"] < 1e-5


def test_the_layer_refuses_one_ranks_part_of_the_vocabulary():
    assert cases.result(HOST, SCRIPT, "sharded_refusals", 2)["wrong"] == 0


def test_the_layer_has_the_losses_of_a_model_that_is_tensor_parallel():
    found = cases.result(HOST, SCRIPT, "tensor_parallel", 2)
    assert max(found["worst"], found["trained"]) < 1e-4, found
    assert found["cut"] and found["least"] > 1.05, found
