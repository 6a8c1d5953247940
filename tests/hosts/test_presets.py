"""`GRPO`, `DAPO` and the other presets are verl's and TRL's own losses, on two shards of the
vocabulary."""

import pytest
from cases import result, results

VERL, TRL = "verl-0.9.1", "transformers-5.24.0"
PRESETS = {
    VERL: {"PPO", "GRPO", "DAPO", "DrGRPO", "GSPO", "CISPO"},
    TRL: {"GRPO", "DAPO", "DrGRPO", "GSPO", "CISPO"},
}


@pytest.mark.parametrize("host", PRESETS)
def test_every_preset_is_looked_at(host):
    assert set(results(host, "preset_cases.py")) == PRESETS[host]


@pytest.mark.parametrize(
    ("host", "preset"), [(host, preset) for host in PRESETS for preset in sorted(PRESETS[host])]
)
def test_a_preset_has_the_hosts_loss_and_gradient(host, preset):
    found = result(host, "preset_cases.py", preset)
    assert max(found["loss"], found["gradient"]) < 1e-6 < 1e-4 < found["mutant"], found
