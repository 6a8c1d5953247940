"""Every odd input of docs/limits.md in fp32, bf16 and fp16 at one, two and four ranks: right, or the same exception
on every rank. Nothing silent, no hang. The inputs are in `odd_inputs`; Triton's turn is `test_bad_inputs_triton.py`.
"""

import re

import pytest
import torch
import torch.distributed as dist
from odd_case import DTYPES, N, V
from odd_inputs import CASES, lines
from odd_outcome import MATRIX, holds
from pages import section
from ranks import on_ranks

from tp_headloss import HeadLoss, Options, VocabShard, vocab_statistics

X, LABELS = torch.randn(N, V, generator=torch.Generator().manual_seed(3)) * 2, torch.tensor([1, 40, 31, 32])


@pytest.mark.parametrize("name, world_size", MATRIX)
def test_odd_inputs_are_right_or_refused_on_every_rank(name, world_size):
    holds(name, world_size, "torch")


def test_every_line_of_the_table_has_cases_and_every_case_a_line():
    text = section("limits.md", "## Semantics of every odd input")
    table = dict(re.findall(r"^\| (.*?) \| (.*) \|$", text, re.M)[1:])  # without its head
    assert table.keys() == lines(DTYPES[0]).keys()
    for line, cases in lines(DTYPES[0]).items():
        for name, case in cases.items():
            promised = case.raises.split(":")[0] or ("NaN" if case.nan else "0" if case.zero else "")
            assert promised in table[line], f"{name} is {promised}: {table[line]}"
        raised = {case.raises.split(":")[0] for case in cases.values()} - {""}
        assert raised == set(re.findall(r"\w+Error", table[line])), line
    assert sum(len(cases) for cases in lines(DTYPES[0]).values()) == len(CASES) >= 200  # no name twice


def disagreeing_run(group, device, what, check):
    """Ranks that were given different labels, or shards that overlap or leave a gap."""
    rank = dist.get_rank(group)
    start, stop = (0, 32) if rank == 0 else (32, 64)
    labels = LABELS.clone()
    if what == "labels":
        labels[2] = 31 if rank == 0 else 50
    elif what == "ignored on one rank":
        labels[2] = 31 if rank == 0 else -100
    elif what == "overlap":
        start, stop = (0, 40) if rank == 0 else (30, 64)
    elif what == "gap":
        stop = 31 if rank == 0 else stop
    shard = VocabShard(start, stop, V, group)
    x = X[:, start:stop].clone().to(device).requires_grad_()
    stats = vocab_statistics(x, labels.to(device), shard=shard, options=Options(check=check))
    out = HeadLoss()(x.detach(), labels.to(device), shard=shard)
    stats.log_prob.sum().backward()
    return stats.log_prob.detach().cpu(), x.grad.cpu(), out.loss.cpu(), out.count.cpu()


@pytest.mark.parametrize("what", ["labels", "ignored on one rank", "overlap", "gap"])
def test_ranks_that_disagree_see_nan_on_every_rank(what):
    for log_prob, grad, loss, count in on_ranks(2, disagreeing_run, what, False):
        assert loss.isnan() and count == N
        assert log_prob[2].isnan() and not log_prob[[0, 1]].isnan().any()
        assert grad[2].isnan().all() and not grad[[0, 1]].isnan().any()
    failures = on_ranks(2, disagreeing_run, what, True, failures=True)
    assert [f.kind for f in failures] == ["ValueError"] * 2 and all("token 2" in f.message for f in failures)
