"""The benchmark runs without a GPU and without anybody else's package, and its check tells right
from wrong."""

import contextlib
import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launcher import run_script
from torch.testing._internal.distributed.fake_pg import FakeStore

from tp_headloss import Options, VocabShard, vocab_statistics
from tp_headloss.ranks import comm

SCRIPTS = Path(__file__).parents[2] / "scripts/bench"
SMALL = ["--device", "cpu", "--tokens", "24", "--seconds", "0.001"]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench

    return bench


@pytest.fixture
def scale(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import scale

    return scale


def rows_of(path):
    return {
        (row["task"], row["implementation"]): row for row in json.loads(path.read_text())["rows"]
    }


def test_every_task_is_right_and_measured_and_drawn(tmp_path, bench):
    names = ["ours", "ours, in place", "torch", "torch, x.float()"]
    data, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    out = run_script(
        "scripts/bench/bench.py",
        *SMALL,
        "--vocab",
        257,
        "--implementations",
        *names,
        "--json",
        data,
    )
    report, rows = json.loads(data.read_text()), rows_of(data)
    expected = {
        (task.name, name)
        for task in bench.TASKS
        for name in names
        if name != "torch" or task.name == "ce"
    }
    assert set(rows) == expected and all(
        f"\n{task.name}, 24 x 257, TP 1" in out for task in bench.TASKS
    )
    assert {
        "device",
        "gpus",
        "tp",
        "dtype",
        "versions",
        "command",
        "copy_gb_per_s",
        "tolerances",
    } <= set(report)
    # over logits, teacher and gradient
    passes = {task.name: 5 if task.teacher else 3 for task in bench.TASKS}
    for (task, name), row in rows.items():
        assert row["status"] == "ok", row
        assert row["bytes_per_logit"] / row["eager_over_floor"] == pytest.approx(
            2 * passes[task], rel=1e-2
        )
        assert (row["tokens"], row["vocab"], row["tp"], row["columns"]) == (24, 257, 1, 257)
        assert row["overwrites_logits"] == (name == "ours, in place")
        assert row["graph_us"] is None and "no CUDA" in row["graph_failure"]
        assert (
            row["eager_us"]["both"] == sorted(row["eager_us"]["both"])
            and row["eager_us"]["both"][0] > 0
        )
        assert (
            set(row["eager_us"]) == {"forward", "backward", "both"}
            and row["host_us"] > 0
            and row["floor_us"] > 0
        )
    for program in "plot_bench.py", "plot_bars.py":
        run_script(
            f"scripts/bench/{program}", data, "--tokens", 24, "--vocab", 257, "--out", picture
        )
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 300_000


def test_a_sharded_run_is_right_on_every_rank(tmp_path):
    data = tmp_path / "bench.json"
    tasks = ["ce", "grpo", "jsd", "ce+topk"]
    choice = ["--tasks", *tasks, "--implementations", "ours", "torch loss_parallel", "--json", data]
    run_script("scripts/bench/bench.py", *SMALL, "--vocab", 256, *choice, ranks=2)
    rows = rows_of(data)
    assert set(rows) == {("ce", "torch loss_parallel")} | {(task, "ours") for task in tasks}
    assert all(
        (row["status"], row["tp"], row["columns"]) == ("ok", 2, 128) for row in rows.values()
    )


def test_samples_are_measured_beside_plain_torch(tmp_path):
    data = tmp_path / "sampling.json"
    small = [
        "--device",
        "cpu",
        "--tokens",
        "3",
        "--vocab",
        "257",
        "--spread",
        "3",
        "--seconds",
        "0.001",
    ]
    run_script("scripts/bench/sampling.py", *small, "--json", data)
    rows = json.loads(data.read_text())["rows"]
    assert len(rows) == 10 and all(row["status"] == "ok" and row["eager_us"][0] > 0 for row in rows)
    kept = [row["kept"] for row in rows if "kept" in row]
    assert (
        len(kept) == 4 and kept[0] == 50.0 and all(row.get("sizes_differ", 0) <= 1 for row in rows)
    )


def test_every_peer_is_for_tasks_that_exist(bench):
    assert {task for peer in bench.PEERS for task in peer.tasks} <= {
        task.name for task in bench.TASKS
    }


def cross_entropy(batch):
    return F.cross_entropy(batch.logits, batch.labels)


def fails(batch):
    raise RuntimeError("out of something\nand more")


def slow(_):
    with contextlib.suppress(Exception):  # as tuners do, to go on with another configuration
        time.sleep(60)


def missing():
    import a_package_that_is_not_there  # noqa: F401


def test_wrong_failing_and_absent_implementations_are_reported(tmp_path, bench, monkeypatch):
    functions = {
        "right": cross_entropy,
        "wrong loss": lambda batch: (
            1.05 * cross_entropy(batch).detach() + cross_entropy(batch) * 0.0
        ),
        "wrong gradient": lambda batch: (
            cross_entropy(batch) + 10 * (batch.logits - batch.logits.detach()).mean()
        ),
        "not ignoring": lambda batch: (
            cross_entropy(batch) + (batch.logits - batch.logits.detach())[1].sum()
        ),
        "nan": lambda batch: cross_entropy(batch) * torch.nan,
        "fails": fails,
        "slow": slow,
    }
    made = [bench.Implementation(name, lambda f=f: f) for name, f in functions.items()]
    made += [
        bench.Implementation("absent", missing),
        bench.Implementation("sloppy ours", lambda: cross_entropy, ours=True),
    ]
    monkeypatch.setattr(bench, "implementations", lambda task, shard, device: made)
    data = tmp_path / "bench.json"
    bench.main(
        [*SMALL, "--vocab", "257", "263", "--tasks", "ce", "--limit", "3", "--json", str(data)]
    )
    rows = json.loads(data.read_text())["rows"]
    status = {(row["vocab"], row["implementation"]): row["status"] for row in rows}
    for vocab in (257, 263):
        assert status[vocab, "right"] == "ok"
        assert {
            status[vocab, name] for name in functions if name not in ("right", "fails", "slow")
        } == {"wrong"}
        assert status[vocab, "sloppy ours"] == "wrong"  # good enough for bf16, not for us
        assert status[vocab, "fails"] == "failed: RuntimeError: out of something"
        assert status[vocab, "slow"] == "timed out: not set up in 3 s"
    assert (
        status[257, "absent"].startswith("absent: ModuleNotFoundError")
        and (263, "absent") not in status
    )
    # marked, and timed all the same
    assert all("eager_us" in row for row in rows if row["status"] == "wrong")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_linear_benchmark_tells_right_from_wrong(tmp_path, ranks):
    data = tmp_path / "bench.json"
    shape = [
        "--tokens",
        2048,
        "--hidden",
        16,
        "--vocab",
        512 * ranks,
        "--dtype",
        "float32",
        "--device",
        "cpu",
    ]
    wanted = ["--implementations", "*GEMMs", "materialised logits", "ours, *"]
    out = run_script(
        "scripts/bench/bench_linear.py",
        *shape,
        *wanted,
        "--seconds",
        0.001,
        "--json",
        data,
        ranks=ranks,
    )
    rows = {row["implementation"]: row for row in json.loads(data.read_text())["rows"]}
    assert len(rows) == 9 and all(
        (row["status"], row["tp"]) == ("ok", ranks) for row in rows.values()
    )
    checked = [row["errors"] for row in rows.values() if "errors" in row]
    assert len(checked) == 7 and max(max(errors) for errors in checked) < 1e-5
    assert f"2048 x 16 x {512 * ranks}, TP {ranks}: logits shard 4 MiB" in out


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A file of a small model's hidden states and weight."""
    folder = tmp_path_factory.mktemp("learned")
    small = ["--hidden", 32, "--ids", 300, "--tokens", 2048, "--layers", 1, "--megabytes", 1]
    run_script("scripts/bench/trained_states.py", *small, "--entropies", 5, "--out", folder)
    return folder / "5.0.pt"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_linear_benchmark_takes_what_a_small_model_has_learned(ranks, learned, tmp_path):
    """Its errors are those of the same operands, of every token and of ids without labels, too."""
    found, data = torch.load(learned), tmp_path / "bench.json"
    log_p = (found["hidden"].float() @ found["weight"].float().t()).log_softmax(1)
    entropy = float(-(log_p.exp() * log_p).sum(1).mean())
    assert abs(entropy - found["entropy"]) < 0.02 and 4 < entropy < 5.02
    wanted = ["--implementations", "three GEMMs", "materialised logits", "ours, *"]
    run_script(
        "scripts/bench/bench_linear.py",
        *("--states", learned, "--device", "cpu", "--dtype", "float32", *wanted),
        *("--seconds", 0.001, "--json", data),
        ranks=ranks,
    )
    rows = json.loads(data.read_text())["rows"]
    assert len(rows) > 3
    for row in rows:
        assert (row["tokens"], row["hidden"], row["vocab"]) == (2048, 32, 300)
        assert row["status"] == "ok"
        if row["implementation"] == "three GEMMs":
            continue
        assert max(row["errors"]) < 1e-5, row
        assert max(row["row_errors"].values()) < 1e-4, row
    run_script("scripts/bench/plot_linear_errors.py", data, "--out", tmp_path / "errors.png")
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")


def test_the_linear_benchmark_marks_what_is_wrong_and_writes_every_row_at_once(
    monkeypatch, tmp_path, bench, capsys
):
    import bench_linear

    data = tmp_path / "bench.json"

    def wrong(problem):
        return bench_linear.differentiated(
            problem, lambda h, w, y: F.cross_entropy(F.linear(h, 1.01 * w), y)
        )

    def reads(problem):
        assert "reads: " in capsys.readouterr().out.splitlines()[-1]  # what runs is named
        raise RuntimeError(json.loads(data.read_text())["rows"][-1]["status"])

    made = [
        ("right", lambda p: bench_linear.materialised(p, None)),
        ("wrong", wrong),
        ("fails", fails),
    ]
    made += [("slow", slow), ("reads", reads)]
    monkeypatch.setattr(
        bench_linear,
        "implementations",
        lambda p: [
            bench_linear.Implementation(name, 3, lambda b=build: b(p)) for name, build in made
        ],
    )
    shape = [
        "--tokens",
        "40",
        "--hidden",
        "8",
        "--vocab",
        "64",
        "--dtype",
        "float32",
        "--device",
        "cpu",
    ]
    bench_linear.main([*shape, "--seconds", "0.001", "--limit", "3", "--json", str(data)])
    rows = {row["implementation"]: row for row in json.loads(data.read_text())["rows"]}
    expected = {"right": "ok", "wrong": "wrong", "fails": "failed: RuntimeError: out of something"}
    expected |= {
        "slow": "timed out: not set up in 3 s",
        "reads": "failed: RuntimeError: timed out: not set up in 3 s",
    }
    assert {name: row["status"] for name, row in rows.items()} == expected and 3 <= rows["slow"][
        "set_up_s"
    ] < 30


def test_the_host_time_of_a_step_is_printed_beside_that_of_cross_entropy(tmp_path):
    data = tmp_path / "host_time.json"
    shape = ["--device", "cpu", "--tokens", 4, "--vocab", 8, "--batches", 2, "--batch", 3]
    out = run_script("scripts/bench/host_time.py", *shape, "--json", data)
    report = json.loads(data.read_text())
    for threads in ("one thread", "autograd's own threads"):
        ours, theirs = report[threads]["ours"], report[threads]["F.cross_entropy"]
        assert ours == sorted(ours) and theirs == sorted(theirs) and 0 < theirs[1] < ours[1]
        assert report[threads]["ratio"] == pytest.approx(ours[1] / theirs[1])
        assert f"ratio {report[threads]['ratio']:.2f}" in out


def test_the_volumes_of_the_scale_model_are_those_of_simulated_groups(scale, monkeypatch):
    """In one process of a group whose collectives do nothing."""
    sent, tokens = [], 16
    monkeypatch.setattr(comm, "_all_gather", lambda out, x, group: sent.append(out.nbytes))
    monkeypatch.setattr(dist, "all_reduce", lambda x, op=None, group=None: sent.append(x.nbytes))
    for ranks in scale.RANKS:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        try:
            shard = VocabShard.from_group(dist.group.WORLD, 8 * 128 * ranks)
            for transport in ("gather", "sum"):
                x, labels = torch.zeros(tokens, shard.width), torch.zeros(tokens).long()
                vocab_statistics(x, labels, shard=shard, options=Options(transport=transport))
        finally:
            dist.destroy_process_group()
        assert [sent[0], sum(sent[1:])] == [
            scale.gathered_bytes(ranks, tokens),
            scale.lane_bytes(tokens),
        ], ranks
        sent.clear()


def test_the_table_of_the_scale_model_is_the_scripts(scale):
    page = (Path(__file__).parents[2] / "docs/scale.md").read_text()
    assert scale.table(8192, scale.SLOW) in page
