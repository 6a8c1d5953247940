"""The trainer of the documentation: any mesh is the same training, and so is one that stops and
goes on."""

import re

import pytest
from launcher import ROOT, run_script
from pages import marked_block


def rows(said: str) -> list[dict[str, float]]:
    """The numbers that a run printed, a dict per logged step."""
    lines = [line for line in said.splitlines() if line.startswith("step ")]
    return [
        {name: float(value) for name, value in re.findall(r"'?(\w+)'?:? ([\d.]+)", line)}
        for line in lines
    ]


def test_a_trainer_in_60_lines_trains_alike_on_any_mesh_and_goes_on_from_its_checkpoint(tmp_path):
    assert marked_block("run", "trainer") == '--8<-- "launch/trainer.py"\n'
    code = [line for line in (ROOT / "launch/trainer.py").read_text().splitlines() if line.strip()]
    assert len(code) <= 60 and max(map(len, code)) <= 80
    whole = rows(run_script("launch/trainer.py", 1, 41, tmp_path / "whole", ranks=2))
    assert [row["step"] for row in whole] == [
        20,
        40,
        41,
    ]  # what was trained last is logged and saved
    assert (tmp_path / "whole" / "000041" / ".metadata").exists()
    whole.pop()
    assert [sorted(row) for row in whole] == 2 * [["loss", "norm", "perplexity", "step"]]
    assert whole[1]["loss"] < 0.3 < whole[0]["loss"] < 4.5 and whole[1]["perplexity"] < 1.5
    parts = rows(run_script("launch/trainer.py", 2, 20, tmp_path / "parts", ranks=4))
    parts += rows(run_script("launch/trainer.py", 2, 40, tmp_path / "parts", ranks=2))
    assert "launch/trainer.py 2 100" in run_script("launch/trainer.py", "--help")
    for ours, one in zip(parts, whole, strict=True):
        assert ours == pytest.approx(one, rel=3e-2, abs=3e-3)
