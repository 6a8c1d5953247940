"""Models that were copied, wrapped, resized or offloaded after an adapter was installed on them."""

import os

import pytest
from cases import results

# the older version with TP_HEADLOSS_FULL=1
HOSTS = ["transformers-5.24.0", *["transformers-5.17.0"] * bool(os.environ.get("TP_HEADLOSS_FULL"))]


@pytest.mark.parametrize("host", HOSTS)
def test_a_model_keeps_its_loss_or_says_why_not(host):
    found = results(host, "wrapping_cases.py", ranks=1)
    failed = {name: result["error"] for name, result in found.items() if "error" in result}
    assert not failed, "\n".join(f"{name}: {error[-1500:]}" for name, error in failed.items())
    assert len(found) >= 2 * 24
