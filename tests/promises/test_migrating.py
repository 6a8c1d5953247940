"""The tables of docs/migrating.md: a call of another library and ours give the same number.

torch's own calls run as they are. Other libraries are not here; formulas in float64 stand in for
their functions.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from pages import ROOT, blocks, section, tables
from ranks import on_ranks


def smoothed(logits, labels, smoothing=0.0, *_, formula="torch", **__):
    logits, size = logits.double(), logits.shape[-1]
    log_p = logits.log_softmax(-1)
    share = smoothing * size / (size - 1) if formula == "megatron" else smoothing
    return -(1 - share) * log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - share * log_p.mean(
        -1
    )


def of_liger(**options):
    def loss(x, y):
        x = x.double()
        softcap, z_weight = options.get("softcap"), options.get("lse_square_scale", 0.0)
        x = x if softcap is None else softcap * (x / softcap).tanh()
        return (
            smoothed(x, y, options.get("label_smoothing", 0.0)) + z_weight * x.logsumexp(-1) ** 2
        ).mean()

    return loss


def of_cce(hidden, weight, y, softcap=None, reduction="mean", vocab_parallel_options=None):
    logits = hidden.double() @ weight.double().T
    return F.cross_entropy(
        logits if softcap is None else softcap * (logits / softcap).tanh(), y, reduction=reduction
    )


STAND_INS = {
    "vocab_parallel_cross_entropy": lambda logits, labels, *smoothing: smoothed(
        logits, labels, *smoothing, formula="megatron"
    ),
    "fused_vocab_parallel_cross_entropy": lambda logits, labels, group: smoothed(logits, labels),
    "parallel_cross_entropy": smoothed,
    "LigerCrossEntropyLoss": of_liger,
    "LigerFusedLinearCrossEntropyLoss": lambda: lambda weight, hidden, y: of_cce(hidden, weight, y),
    "LigerVocabParallelCrossEntropy": lambda: (
        lambda logits, labels, group: smoothed(logits, labels)
    ),
    "linear_cross_entropy": of_cce,
    "VocabParallelOptions": lambda *given: None,
    "cross_entropy_loss": lambda x, y, lse_square_scale, process_group: (
        smoothed(x, y) + lse_square_scale * x.double().logsumexp(-1) ** 2,
    ),
    "quack": type(
        "quack", (), {"cross_entropy": staticmethod(lambda x, y, reduction: smoothed(x, y))}
    ),
    "vocab_parallel_log_probs_from_logits": lambda logits, labels: -smoothed(logits, labels),
    "vocab_parallel_entropy": lambda logits: torch.distributions.Categorical(
        logits=logits.double()
    ).entropy(),
    "verl_linear_cross_entropy": lambda hidden, weight, y, temperature, *_: (
        -smoothed(hidden.double() @ weight.double().T / temperature, y),
    ),
}  # the names of peers that are not here, as formulas in float64
MIGRATING = ROOT / "docs/migrating.md"


def rows_of_migration(loss_parallel=False):
    """(yours, ours) of each line of the tables of the page on migration."""
    for heading in re.findall(r"^(## .*)$", MIGRATING.read_text(), re.M):
        if ("loss_parallel" in heading) is loss_parallel:
            (table,) = tables(section("migrating.md", heading) + "\n")
            yield from ([re.fullmatch(r"`(.*)`", cell)[1] for cell in row] for row in table)


def scope_of_migration():
    torch.manual_seed(0)
    scope = dict(STAND_INS)
    for block in blocks(MIGRATING):
        exec(compile(block.code, "migrating.md", "exec"), scope)
    return scope


@pytest.mark.parametrize(("yours", "ours"), [*rows_of_migration()])
def test_a_line_of_migration_has_the_same_number_on_both_sides(yours, ours):
    if "F.linear_cross_entropy" in yours and not hasattr(F, "linear_cross_entropy"):
        pytest.skip(f"torch {torch.__version__} has none")
    scope = scope_of_migration()
    expected, found = eval(yours, scope), eval(ours, scope)
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=2e-5, atol=1e-6)


def migrated_from_loss_parallel(group, device):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    scope, pairs = scope_of_migration(), []
    mesh = DeviceMesh.from_group(group, device.type)
    scope["d"], scope["y"] = (
        distribute_tensor(scope["x"].to(device), mesh, [Shard(-1)]),
        scope["y"].to(device),
    )
    for yours, ours in rows_of_migration(loss_parallel=True):
        with loss_parallel():
            expected = eval(yours, scope)
        pairs.append(
            (eval(ours, scope), expected.to_local() if isinstance(expected, DTensor) else expected)
        )
    return pairs


def test_the_lines_of_loss_parallel_have_the_same_number_on_both_sides():
    for pairs in on_ranks(2, migrated_from_loss_parallel):
        assert len(pairs) == 2
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)
