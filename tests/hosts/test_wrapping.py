"""Models that were copied, wrapped, resized or offloaded after an adapter was installed on them."""

import pytest
from cases import results


@pytest.mark.parametrize("host", ["transformers-5.17.0", "transformers-5.24.0"])
def test_a_model_keeps_its_loss_or_says_why_not(host):
    found = results(host, "wrapping_cases.py", ranks=1)
    failed = {name: result["error"] for name, result in found.items() if "error" in result}
    assert not failed, "\n".join(f"{name}: {error[-1500:]}" for name, error in failed.items())
    assert len(found) >= 2 * 24
