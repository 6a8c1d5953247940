"""The README's Python runs as it stands."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_every_python_block_of_the_readme_runs():
    # those of a host run beside it, in tests/hosts, or on ranks
    blocks = re.findall(r"(?<! -->\n)```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 2
    scope = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
    assert scope["logits"].grad is not None and scope["out"].loss.isfinite()
