"""The distillation run, at toy size on CPU: shards and replicas change nothing but rounding, a file
of the teacher's top K holds just that, and one of all ids is as good as the teacher itself."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from launcher import run_script
from test_training import TINY

from tp_headloss import VocabShard

ROOT = Path(__file__).parents[2]
VOCAB, STEPS, BATCH = 307, 12, 4  # the vocabulary of test_training


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Written by two shards, in the folder of its data."""
    folder = tmp_path_factory.mktemp("teacher")
    options = "--tp", 2, *TINY.split(), "--steps", 100, "--validate-every", 50
    run_script(
        "launch/train.py", *options, "--out", folder, "--data-cache", folder / "data", ranks=2
    )
    return folder


def distil(teacher, out, *options, processes=1):
    """-> rows of metrics by run."""
    command = [
        "--device",
        "cpu",
        "--teacher",
        teacher,
        "--data-cache",
        teacher / "data",
        "--out",
        out,
    ]
    command += [
        "--width",
        16,
        "--heads",
        2,
        "--steps",
        STEPS,
        "--batch",
        BATCH,
        "--warmup",
        4,
        "--lr",
        1e-2,
    ]
    command += ["--validate-every", 4, "--temperature", 2, "--support", "vocabulary", *options]
    run_script("launch/distill.py", *command, ranks=processes)
    assert (out / "distill.png").stat().st_size > 10_000
    files = sorted(out.glob("*/metrics.jsonl"))
    return {
        file.parent.name: [json.loads(line) for line in file.read_text().splitlines()]
        for file in files
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--k", VOCAB + 1), "--k must be at most the teacher's vocabulary of 307, got 308"),
        (("--batch", 3), "--batch 3 is no multiple of replicas x micro-batches = 2"),
        (
            ("--data-cache", "nowhere"),
            "train.npy must be an array of tokens: [Errno 2] No such file",
        ),
        (("--teacher", "nowhere"), "there is no checkpoint in nowhere/checkpoints"),
    ],
)
def test_a_mistake_ends_every_rank_before_anything_is_written(teacher, tmp_path, options, message):
    command = (
        "--device",
        "cpu",
        "--teacher",
        teacher,
        "--data-cache",
        teacher / "data",
        "--out",
        tmp_path / "out",
    )
    said = run_script("launch/distill.py", *command, *options, ranks=2, code=1)
    assert sum(message in line for line in said.splitlines()) == 2 and "Traceback" not in said, said
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def alone(teacher, tmp_path_factory):
    """One process, with all of the teacher's ids in the file."""
    out = tmp_path_factory.mktemp("alone")
    return out, distil(teacher, out, "--k", VOCAB)


def test_students_start_equal_and_the_whole_vocabulary_on_disk_is_the_teacher_itself(alone):
    _, runs = alone
    ce, online, offline = (
        [row["cross_entropy"] for row in runs[name]] for name in ("ce", "online", "offline")
    )
    assert len(ce) == 1 + STEPS // 4
    assert ce[0] == online[0] == offline[0]
    better = [a - b for a, b in zip(ce[1:], online[1:])]
    rounding = [abs(a - b) for a, b in zip(offline[1:], online[1:])]  # of log-probs to float16
    assert min(better) > 0.02 and max(rounding) < 5e-5, (better, rounding)


@pytest.mark.parametrize("tp", [2, 1], ids=["shards", "replicas"])
def test_shards_and_replicas_change_nothing_but_rounding(teacher, alone, tmp_path, tp):
    out, expected = alone
    runs = distil(teacher, tmp_path, "--k", VOCAB, "--tp", tp, processes=2)
    assert runs.keys() == expected.keys() == {"teacher", "ce", "online", "offline"}
    for name, rows in runs.items():
        for row, one in zip(rows, expected[name], strict=True):
            close = {key: value for key, value in one.items() if key not in ("split", "seconds")}
            assert {key: row[key] for key in close} == pytest.approx(close, rel=2e-5), (
                name,
                row["step"],
            )
    ours, theirs = (
        np.load(folder / "teacher/topk.npy")["log_probs"].astype(np.float32)
        for folder in (tmp_path, out)
    )
    assert np.abs(ours - theirs).max() < 2e-2  # a step of float16 at -16 or so


def test_the_file_holds_the_teachers_likeliest_ids(teacher, alone, tmp_path, monkeypatch):
    out, _ = alone
    distil(teacher, tmp_path, "--k", 5, "--runs", "offline")
    file, whole = np.load(tmp_path / "teacher/topk.npy"), np.load(out / "teacher/topk.npy")
    assert file.shape == (STEPS, BATCH, 32)
    assert file.dtype == [
        ("ids", "<i4", (5,)),
        ("log_probs", "<f2", (5,)),
        ("tail_log_prob", "<f4"),
    ]
    assert all(np.array_equal(file[name], whole[name][..., :5]) for name in ("ids", "log_probs"))

    monkeypatch.syspath_prepend(str(ROOT / "launch"))
    from data import Corpus
    from model import Transformer

    model = Transformer(VocabShard(0, 308, 308), width=32, layers=1, heads=2, length=32, seed=0)
    state = {"model": model.state_dict()}
    (folder,) = teacher.glob("checkpoints/step-*")
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(state["model"])
    corpus = Corpus(
        teacher / "data" / json.loads((folder / "progress.json").read_text())["config"]["data"], 32
    )
    for step in range(STEPS):
        inputs, _ = corpus.batch("train", BATCH, 1, step)
        with torch.no_grad():
            # at temperature 2
            log_p = (model.output(model(inputs))[..., :VOCAB].double() / 2).log_softmax(-1)
        ids, log_probs = (
            torch.from_numpy(file[step][name].copy()) for name in ("ids", "log_probs")
        )
        for expected in (log_p.gather(-1, ids.long()), log_p.topk(5).values):
            torch.testing.assert_close(log_probs.double(), expected, rtol=2**-11, atol=1e-5)
        others = log_p.scatter(-1, ids.long(), -torch.inf).logsumexp(-1)
        tail = torch.from_numpy(file[step]["tail_log_prob"].copy())
        torch.testing.assert_close(tail.double(), others, rtol=1e-5, atol=1e-5)
