"""What the README says: its Python runs, and its figures are those of the files beside them."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from tp_headloss import HeadLoss, VocabShard

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


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


def plain_logits(group, device, batch):
    """Gradients of hidden states and of a layer before them, with the two lines of the README."""
    hook, scaled = (re.search(rf"`({start}[^`]*)`", README)[1] for start in (r"hidden\.register_hook", r"\(dp \* "))
    torch.manual_seed(0)
    x, labels = torch.randn(4, 6, device=device), torch.randint(0, 20, (4,), device=device)
    layer, weight = torch.nn.Linear(6, 5).to(device), torch.randn(20, 5, device=device)
    dp, shard = 1, VocabShard.from_group(group, 20)
    if batch and group is not None:  # the ranks are data parallel, and the vocabulary is not sharded
        dp, rank, shard = dist.get_world_size(group), dist.get_rank(group), VocabShard(0, 20, 20)
        x, labels, count = x.chunk(dp)[rank], labels.chunk(dp)[rank], len(labels)
        layer = torch.nn.parallel.DistributedDataParallel(layer, process_group=group)
    else:
        count = len(labels)
    hidden = layer(x)
    scope = {"hidden": hidden, "torch": torch, "group": group, "dp": dp}
    if group is not None and not batch:
        eval(hook, scope)
    logits = hidden @ weight[shard.start : shard.stop].T
    scope["out"] = HeadLoss()(logits, labels, shard=shard, denominator=count)
    eval(scaled, scope)
    return [p.grad.cpu() for p in layer.parameters()]


@pytest.mark.parametrize("batch", [False, True])
def test_plain_logits_and_data_parallel_ranks_give_the_gradient_of_one_process(batch):
    expected = plain_logits(None, torch.device("cuda" if torch.cuda.is_available() else "cpu"), batch)
    for grads in on_ranks(2, plain_logits, batch):
        for ours, whole in zip(grads, expected):
            torch.testing.assert_close(ours, whole, rtol=1e-5, atol=1e-6)


def figures(value) -> set[str]:
    """The numbers of a row of measurements as the README writes them: whole, and with one and two decimals."""
    if isinstance(value, dict):
        return set().union(*map(figures, value.values()))
    if isinstance(value, list):
        return figures(value[1]) if len(value) == 3 else set()  # 10 %, median, 90 %
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return set()
    return {f"{value + nudge:.{digits}f}" for digits in (0, 1, 2) for nudge in (-1e-9, 1e-9)}


def measured() -> list[set[str]]:
    """The figures of every row of docs/bench; a row of the linear head also has its time over its bare GEMMs."""
    rows = []
    for path in sorted((ROOT / "docs/bench").glob("tp*.json")):
        of_file = json.loads(path.read_text())["rows"]
        gemms = {r["gemms"]: r["eager_us"][1] for r in of_file if r["implementation"] in ("three GEMMs", "four GEMMs")}
        for row in of_file:
            found = figures(row)
            if row.get("eager_us") and row.get("gemms") in gemms:
                found |= figures(row["eager_us"][1] / gemms[row["gemms"]])
            rows.append(found)
    return rows


def tables(section: str) -> list[list[list[str]]]:
    """The cells of the body of each table."""
    blocks = re.findall(r"(?:^\|.*\n)+", section, re.M)
    return [[[c.strip() for c in line.strip("|\n").split("|")] for line in block.splitlines()[2:]] for block in blocks]


NUMBER = r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)"
SECTION = README.split("\n## Numbers\n")[1].split("\n### What is checked")[0]


def test_every_figure_of_the_readmes_tables_is_in_docs_bench():
    """A row of one measurement, or each cell of a row of several, is one row of a file there."""
    rows, everything, checked = measured(), set().union(*measured()), 0
    for table in tables(SECTION):
        for name, *cells in table:
            parts = [cells] if any("MiB" in cell for cell in cells) else [[cell] for cell in cells]
            for part in parts:
                wanted = [n for cell in part for n in re.findall(NUMBER, cell)]
                text = " ".join(part)
                several = re.search(r"[A-Za-z]{4}|[;/]", text)  # measurements: a remark about others
                found = set(wanted) <= everything if several else any(set(wanted) <= row for row in rows)
                assert found, f"{name}: {part} is not in docs/bench"
                checked += len(wanted)
    assert checked > 150


def test_the_quickstarts_largest_difference_is_the_one_that_was_measured():
    found = json.loads((ROOT / "docs/bench/quickstart.json").read_text())
    stated = re.search(r"largest difference of the two training losses was ([\d.e-]+)", README.replace("\n", " "))[1]
    assert stated == f"{found['largest_difference']:.1e}".replace("e-0", "e-")
    assert found["steps"] == 500 and found["versions"]["torch"].split("+")[0] in README


FAILURES = {  # first words of a line of "When ranks fail or disagree" -> tests of it, by file
    "is killed, stops": ("test_faults", "test_survivors_of_a_killed_rank_raise_in_time"),
    "is killed between": ("test_faults", "test_a_rank_killed_after_the_forward_is_missed_in_the_next_one"),
    "has labels, ignored tokens": ("test_faults", "test_ranks_that_disagree_on_who_owns_a_label_see_nan"),
    "has a label that": ("test_faults", "test_what_other_ranks_do_not_look_at_is_silent_and_the_same_everywhere"),
    "has another number": ("test_faults", "test_packets_of_other_sizes_end_a_rank_and_the_next_call_of_the_other"),
    "any of these but": ("test_agreement", "test_a_mistake_on_one_rank_is_the_same_exception_on_all"),
}
SAYS = {  # and what the line must say for the test to be about it
    "is killed, stops": "RuntimeError at once",
    "is killed between": "of logits nothing",
    "has labels, ignored tokens": "NaN for that token",
    "has a label that": "the owner's label counts",
    "has another number": "gloo aborts a rank, or times out",
    "any of these but": "the same message",
}


def test_every_line_about_ranks_that_fail_is_bound_to_a_test():
    (table,) = tables(README.split("\n### When ranks fail or disagree\n")[1].split("\n## ")[0])
    assert len(table) == len(FAILURES)
    for start, (file, test) in FAILURES.items():
        (line,) = [row for row in table if row[0].startswith(start)]
        assert SAYS[start] in line[1], line
        assert f"def {test}(" in (ROOT / f"tests/distributed/{file}.py").read_text()
