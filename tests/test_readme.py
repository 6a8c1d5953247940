"""The README's Python runs as it stands."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_every_command_of_the_readme_that_writes_a_run_can_be_run_again():
    commands = [c for c in re.findall(r"torchrun (?:(?!\n\n|\n +torchrun)[^`#])*", README) if "launch/" in c]
    writing = [c for c in commands if "megatron_pretrain" not in c or "--out" in c]
    assert len(writing) >= 5
    assert all("--overwrite" in command for command in writing), writing


def test_every_python_block_of_the_readme_runs():
    # those of a host run beside it, in tests/hosts, or on ranks
    blocks = re.findall(r"(?<! -->\n)```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 2
    scope = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
    assert scope["logits"].grad is not None and scope["out"].loss.isfinite()
