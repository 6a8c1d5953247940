"""Rows of the vocabulary modules through files: every kind of file, saved at one group size and
loaded at another.

Each rank ends with its own rows, or with an error that names the rows of this rank and those of the
file. A file that holds all rows is never refused."""

import itertools
import logging
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize, prune

import tp_headloss as hl
from tp_headloss.modules import saved_rows

H, V, PADDED = 4, 37, 40
SIZES = (1, 2, 4)
WHOLE = ("padding cut off", "with padding", "full_state_dict", "dcp", "dcp of DTensors")
PARTS = ("rank 0 alone", "each rank", "each rank, of DTensors")
COPIED = ("rank 0 alone, copied", "each rank, copied")  # to plain dicts, which have no metadata
# right where every rank has its own file again
OLD = ("each rank, before it said its rows", "rows alone")
BOTH_BOUNDS = r"must be the rows \[(\d+), (\d+)\) of this rank, got a file of another one, which holds \[(\d+), (\d+)\)"


def modules_of(group, device, seed, as_dtensors=False, mesh=None):
    shard = hl.VocabShard.from_group(group, V, padded_size=PADDED)
    embedding = hl.VocabParallelEmbedding(H, shard, init=hl.Init(1.0, seed), device=device)
    head = hl.VocabParallelHead(H, shard, bias=True, init=hl.Init(1.0, seed + 1), device=device)
    with torch.no_grad():
        head.bias.copy_(
            torch.arange(shard.start, shard.stop) * (torch.arange(shard.start, shard.stop) < V)
            + seed
        )
    model = torch.nn.ModuleDict({"embedding": embedding, "head": head})
    if as_dtensors and group is not None:
        mesh = mesh or DeviceMesh.from_group(group, device.type)
        for module in model.values():
            module.to_dtensor(mesh)
    return model


def local_rows(model):
    """The valid rows of this rank by name."""
    shard, found = model["head"].shard, {}
    for name, p in model.named_parameters():
        rows = p.to_local() if hasattr(p, "to_local") else p
        assert len(rows) == shard.width
        found[name] = rows.detach()[: shard.valid_width].clone()
    return found


def whole_matrices(seed, device):
    """Truth: of one rank that has everything."""
    return dict(modules_of(None, device, seed).state_dict())


def options_of(group):
    return {"process_group": group} if group is not None else {"no_dist": True}


def save(group, device, folder):
    rank, model = (0, None) if group is None else (group.rank(), None)
    model, dtensors = modules_of(group, device, 7), modules_of(group, device, 7, as_dtensors=True)
    whole = whole_matrices(7, device)
    full = get_model_state_dict(dtensors, options=StateDictOptions(full_state_dict=True))
    states = {
        "each rank": model.state_dict(),
        "each rank, of DTensors": dtensors.state_dict(),
        "each rank, before it said its rows": dict(model.state_dict()),
        "each rank, copied": dict(model.state_dict()),
        "rows alone": {name: p.detach().clone() for name, p in model.named_parameters()},
    }
    if rank == 0:
        states |= {"rank 0 alone": model.state_dict(), "full_state_dict": full}
        states["rank 0 alone, copied"] = dict(model.state_dict())
        states |= {
            "with padding": whole,
            "padding cut off": {name: x[:V].clone() for name, x in whole.items()},
        }
    for kind, state in states.items():
        torch.save(state, f"{folder}/{kind} {rank}")
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/dcp", **options_of(group))
    dcp.save(
        {"model": dtensors.state_dict()},
        checkpoint_id=f"{folder}/dcp of DTensors",
        **options_of(group),
    )


def load(group, device, folder, before):
    """-> by kind of file and of parameters: "right", "wrong", or the error."""
    rank, outcomes = 0 if group is None else group.rank(), {}
    expected = local_rows(modules_of(group, device, 7))
    for kind, as_dtensors in itertools.product((*WHOLE, *PARTS, *COPIED, *OLD), (False, True)):
        model = modules_of(group, device, 90, as_dtensors)
        if kind.startswith("dcp"):
            state = {"model": model.state_dict()}
            dcp.load(state, checkpoint_id=f"{folder}/{kind}", **options_of(group))
            state = state["model"]
        else:
            if kind in OLD and before != (1 if group is None else group.size()):
                continue
            file = rank % before if kind.startswith("each") or kind in OLD else 0
            state = torch.load(f"{folder}/{kind} {file}", map_location=device)
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            outcomes[kind, as_dtensors] = str(error)
            continue
        found = local_rows(model)
        right = all(torch.equal(found[name], rows) for name, rows in expected.items())
        outcomes[kind, as_dtensors] = "right" if right else "wrong"
    return outcomes


@pytest.mark.parametrize("before, after", list(itertools.product(SIZES, SIZES)))
def test_every_file_gives_a_rank_its_rows_or_says_whose_it_has(before, after, tmp_path):
    on_ranks(before, save, str(tmp_path))
    for rank, outcomes in enumerate(on_ranks(after, load, str(tmp_path), before)):
        own = [rank * PADDED // after, (rank + 1) * PADDED // after]
        for (kind, as_dtensors), outcome in outcomes.items():
            at = 0 if kind.startswith("rank 0 alone") else rank % before
            held = [at * PADDED // before, (at + 1) * PADDED // before]
            if kind in WHOLE or kind in OLD or held in (own, [0, PADDED]):
                assert outcome == "right", (kind, as_dtensors, outcome)
            elif kind in COPIED:
                assert "must be the rows [{}, {})".format(*own) in outcome, (
                    kind,
                    as_dtensors,
                    outcome,
                )
            else:
                found = re.search(BOTH_BOUNDS, outcome)
                assert found, (kind, as_dtensors, outcome)
                assert [int(x) for x in found.groups()] == [*own, *held]
                assert (
                    "Parameter" not in outcome
                    and "mixed" not in outcome
                    and "size mismatch" not in outcome
                )


def refused(group, device, folder):
    """A state of another rank leaves the module as it was, and one of another cut in the same
    processes is loaded."""
    model = modules_of(group, device, 7)
    torch.save(model.state_dict(), f"{folder}/{group.rank()}")
    torch.distributed.barrier()
    others, before = modules_of(group, device, 90), local_rows(modules_of(group, device, 90))
    with pytest.raises(RuntimeError, match="got a file of another one"):
        others.load_state_dict(torch.load(f"{folder}/{1 - group.rank()}", map_location=device))
    kept = all(torch.equal(x, before[name]) for name, x in local_rows(others).items())
    even, uneven = (
        hl.VocabShard.from_group(group, V + 1),
        hl.VocabShard.from_boundaries([0, 5, V + 1], V + 1, group),
    )
    source, target = (
        hl.VocabParallelEmbedding(H, shard, device=device) for shard in (even, uneven)
    )
    target.load_state_dict(source.state_dict())
    ids = torch.arange(V + 1, device=device)
    return kept, bool(torch.equal(source(ids), target(ids)))


def test_a_refused_file_changes_nothing_and_a_live_state_of_another_cut_is_loaded(tmp_path):
    assert on_ranks(2, refused, str(tmp_path)) == [(True, True)] * 2


RESUME = """
import sys
import torch
import tp_headloss as hl

rank, store, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
given = {"init_method": f"file://{store}", "rank": rank, "world_size": 2}
torch.distributed.init_process_group("gloo", **given)
shard = hl.VocabShard.from_group(torch.distributed.group.WORLD, 16)
head = hl.VocabParallelHead(4, shard, init=hl.Init(1.0, seed=9))
head.load_state_dict(torch.load(f"{path}/{rank}"))
print(head.weight.sum().item())
"""


def saved_sum(group, device, folder):
    """The sum of this rank's rows, which it saves in a file of its own."""
    shard = hl.VocabShard.from_group(group, 16)
    head = hl.VocabParallelHead(4, shard, init=hl.Init(1.0, seed=1))
    torch.save(head.state_dict(), f"{folder}/{group.rank()}")
    return head.weight.sum().item()


def test_fresh_processes_load_what_each_rank_saved(tmp_path):
    """They import nothing but the package, as a script that resumes does."""
    sums = on_ranks(2, saved_sum, str(tmp_path))
    command = [sys.executable, "-c", RESUME]
    processes = [
        subprocess.Popen(
            [*command, str(rank), f"{tmp_path}/store", str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process, expected in zip(processes, sums):
        found, errors = process.communicate()
        assert process.returncode == 0, errors[-2000:]
        assert float(found) == pytest.approx(expected)


def sharded_again(mesh, device):
    """Modules whose rows FSDP2 shards again."""
    tp = None if mesh["tp"].size() == 1 else mesh["tp"].get_group()
    model = modules_of(tp, device, 90, as_dtensors=True, mesh=mesh["tp"])
    for module in model.values():
        fully_shard(module, mesh=mesh["dp"])
    return model


def after_fully_shard(group, device, shape):
    """Whole matrices into parameters that FSDP2 has sharded, over two dimensions and over one."""
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
    whole = whole_matrices(7, device)
    cut = {name: x[:V].clone() for name, x in whole.items()}
    full = StateDictOptions(full_state_dict=True)
    found = []
    for given in (whole, cut):
        for way in ("set_model_state_dict", "load_state_dict"):
            if given is cut and shape == (2, 2) and way == "set_model_state_dict":
                # torch's own distribute_tensor cuts uneven matrices over one dimension of a mesh
                # alone
                continue
            model = sharded_again(mesh, device)
            if way == "load_state_dict":
                model.load_state_dict(given)
            else:
                set_model_state_dict(model, dict(given), options=full)
            state = get_model_state_dict(model, options=full)
            found.append(
                all(torch.equal(state[name][:V].cpu(), x[:V].cpu()) for name, x in whole.items())
            )
            again = sharded_again(mesh, device)
            again.load_state_dict(model.state_dict())
            state = get_model_state_dict(again, options=full)
            found.append(
                all(torch.equal(state[name][:V].cpu(), x[:V].cpu()) for name, x in whole.items())
            )
    return found


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 2)])
def test_whole_matrices_are_loaded_after_fully_shard(shape):
    assert on_ranks(shape[0] * shape[1], after_fully_shard, shape) == [
        [True] * (6 if shape == (2, 2) else 8)
    ] * (shape[0] * shape[1])


class Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.seen = []

    def emit(self, record):
        self.seen.append(record.getMessage())


def said_at_save(group, device):
    """Messages of two saves: with plain parameters, frozen, and as DTensors."""
    saved_rows.say_what_is_not_covered.cache_clear()
    log, found = logging.getLogger("tp_headloss"), []
    for how in ("frozen", "DTensors", "plain"):
        model = modules_of(group, device, 7, as_dtensors=how == "DTensors").requires_grad_(
            how != "frozen"
        )
        log.addHandler(messages := Messages())
        model.state_dict()
        model.state_dict()
        log.removeHandler(messages)
        found.append(messages.seen)
    return found


def test_a_save_says_once_that_an_optimizers_state_needs_to_dtensor():
    for frozen, dtensors, plain in on_ranks(2, said_at_save):
        assert frozen == dtensors == [] and len(plain) == 1
        assert "to_dtensor(mesh) before the optimizer is made" in plain[0]
    (found,) = on_ranks(1, said_at_save)
    assert found == [[], [], []]


COMPUTED = {  # what makes a weight of other tensors -> what undoes it
    "parametrizations.weight_norm": (
        parametrizations.weight_norm,
        lambda module: parametrize.remove_parametrizations(module, "weight"),
    ),
    "parametrize": (
        lambda module: parametrize.register_parametrization(module, "weight", torch.nn.Tanh()),
        lambda module: parametrize.remove_parametrizations(module, "weight"),
    ),
    "weight_norm": (torch.nn.utils.weight_norm, torch.nn.utils.remove_weight_norm),
    # whose hooks of state dicts torch does not remove
    "spectral_norm": (torch.nn.utils.spectral_norm, None),
    "prune": (
        lambda module: prune.l1_unstructured(module, "weight", 0.5),
        lambda module: prune.remove(module, "weight"),
    ),
    "prune of the bias": (
        lambda module: prune.l1_unstructured(module, "bias", 0.5),
        lambda module: prune.remove(module, "bias"),
    ),
}


def computed_rows(group, device, how):
    """Whether a state_dict was refused while rows were computed, and rows come back after."""
    compute, undo = COMPUTED[how]
    models = [modules_of(group, device, seed) for seed in (1, 2)]
    one, two = models
    for model in models:
        compute(model["head"])
        model["head"](torch.ones(2, H, device=device), torch.tensor([1, V - 1], device=device))
    try:
        one.state_dict()
        words = ""
    except ValueError as error:
        words = str(error)
    if undo is None:
        return words, True
    for model in models:
        undo(model["head"])
    two.load_state_dict(one.state_dict())
    pairs = zip(local_rows(one).values(), local_rows(two).values())
    return words, all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("how", COMPUTED)
def test_rows_that_are_computed_of_other_tensors_are_no_entries_of_a_file(how):
    name = "bias" if "bias" in how else "weight"
    for words, are_equal in on_ranks(2, computed_rows, how):
        assert f"the rows of ['{name}'] of a " in words and are_equal
    ((words, are_equal),) = on_ranks(1, computed_rows, how)
    assert not words and are_equal  # all rows are here


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("method", ["statistics", "logits"])
@pytest.mark.parametrize("how", COMPUTED)
def test_methods_beside_forward_read_no_rows_of_the_last_forward(how, method):
    """After a step, they are those of now, or refused where hooks compute them."""
    head = modules_of(None, "cpu", 1)["head"]
    hidden, labels = torch.randn(3, H), torch.tensor([0, 1, V - 1])
    COMPUTED[how][0](head)
    head(hidden, labels).loss.backward()
    with torch.no_grad():
        for p in head.parameters():
            p += 1.0
    if how.startswith("parametri"):
        found = getattr(head, method)(hidden)
        want = head(hidden)
        if method == "statistics":
            found, want = found.lse, head(hidden, labels).stats.lse
        assert torch.equal(found, want)
    else:
        with pytest.raises(ValueError, match=f"{method} runs no hooks, and hooks compute"):
            getattr(head, method)(hidden)
