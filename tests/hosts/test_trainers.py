"""Trainers of hosts end to end, on two ranks and on four, with their own loss and with ours: what
they log, and their gradients or weights. transformers and TRL are in trainer_cases.py, torchtitan
is in torchtitan_trainer_cases.py. TRL's losses that are presets are in preset_cases.py, and what
users of transformers and TRL get wrong is in transformers_mistakes_cases.py."""

import pytest
from cases import FULL, result, results

OLDER, TRANSFORMERS, TORCHTITAN = "transformers-5.17.0", "transformers-5.24.0", "torchtitan-0.3.0"
# (host, ranks) -> cases
GRADIENTS = {
    (TRANSFORMERS, 2): {
        *("fused", "fused-tied", "loss_function", "PEFT"),
        *("SFT", "SFT, PEFT", "DPO, PEFT", "KTO", "RLOO"),
    },
    (TRANSFORMERS, 4): {"fused", "fused-tied", "loss_function", "evaluated", "DPO", "GRPO"},
}
if FULL:
    # whose Trainer refuses FSDP beside tensor parallelism
    GRADIENTS[OLDER, 2] = {"fused", "fused-tied", "loss_function"}
    GRADIENTS[TRANSFORMERS, 2] |= {"DPO", "GRPO"}
    GRADIENTS[TRANSFORMERS, 4] |= {"SFT"}
PRESETS = [f"preset {name}" for name in ("GRPO", "DAPO", "DrGRPO", "GSPO", "CISPO")]
MISTAKES = (
    "evaluated",
    "metrics",
    "labels differ",
    "settings differ",
    "one rank refuses",
    "words",
    "aliases",
    "assigned",
    "unfit",
    "counts",
    "counts differ",
    "weighted",
    "other vocabularies",
    "sharded and wrapped",
    "plan alone",
)
WEIGHTS = {
    2: {
        *("logits", "fused", "fused-tied", "fused-pp"),
        *("logits-spmd_types", "fused-spmd_types", "fused-typechecked"),
    },
    4: {"fused-fsdp", "fused-fsdp-tied", "fused-tp-pp"},
}


@pytest.mark.parametrize(("host", "ranks"), GRADIENTS)
def test_every_case_of_transformers_is_looked_at(host, ranks):
    expected = {*GRADIENTS[host, ranks]}
    if (host, ranks) == (TRANSFORMERS, 2):
        expected |= {*PRESETS, *(f"mistake: {case}" for case in MISTAKES)}
    assert set(results(host, "trainer_cases.py", ranks)) == expected


@pytest.mark.parametrize("ranks", WEIGHTS)
def test_every_case_of_torchtitan_is_looked_at(ranks):
    others = {"bf16"} if ranks == 2 else set()
    assert set(results(TORCHTITAN, "torchtitan_trainer_cases.py", ranks)) == WEIGHTS[ranks] | others


@pytest.mark.parametrize(
    ("host", "ranks", "case"), [(*of, case) for of in GRADIENTS for case in sorted(GRADIENTS[of])]
)
def test_the_trainers_of_transformers_and_trl_log_and_learn_the_same(host, ranks, case):
    found = result(host, "trainer_cases.py", case, ranks)
    if case != "evaluated":  # which compares itself
        assert max(found["loss"], found["grads"]) < 1e-6 < 5e-3 < found["mutant"], found


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_the_loss_and_gradient_of_trls_trainer(preset):
    found = result(TRANSFORMERS, "trainer_cases.py", preset)
    assert max(found["loss"], found["gradient"]) < 1e-6 < 1e-4 < found["mutant"], found


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_errors_on_every_rank_or_mean_what_was_expected(case):
    assert result(TRANSFORMERS, "trainer_cases.py", f"mistake: {case}") == {}


@pytest.mark.parametrize(
    ("ranks", "case"), [(ranks, case) for ranks in WEIGHTS for case in sorted(WEIGHTS[ranks])]
)
def test_torchtitans_trainer_logs_the_same_and_ends_with_the_same_weights(ranks, case):
    found = result(TORCHTITAN, "torchtitan_trainer_cases.py", case, ranks)
    assert max(found["logged"], found["weights"]) < 1e-6 and found.get("mutant", 1.0) > 5e-4, found


def test_torchtitans_trainer_in_bf16_is_as_exact():
    found = result(TORCHTITAN, "torchtitan_trainer_cases.py", "bf16")
    assert found["ours_logged"] <= 1.5 * found["host_logged"], found
    assert found["ours_weights"] <= 1.5 * found["host_weights"], found
