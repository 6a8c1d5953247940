"""The launch programs refuse wrong numbers, older runs, broken checkpoints and odd files before
they touch anything."""

import argparse
import importlib
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launcher import ROOT, run_script
from ranks import on_ranks

from tp_headloss import VocabParallelHead, VocabShard

PROGRAMS = "train", "distill", "grpo", "megatron_pretrain"
MAY_BE_ZERO = [
    "warmup",
    "seed",
    "weight_decay",
    "z_weight",
    "kl_weight",
    "entropy_weight",
    "kd_weight",
]


@pytest.fixture
def launch(monkeypatch):
    """The modules of launch/ by name."""
    monkeypatch.syspath_prepend(str(ROOT / "launch"))
    for name in (
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "TOKENIZERS_PARALLELISM",
    ):
        # or an import would set it for all tests
        monkeypatch.setenv(name, os.environ.get(name, ""))
    return importlib.import_module


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_number_on_the_command_line_is_checked(launch, program, monkeypatch, capsys):
    module, actions = launch(program), []
    parse_args = argparse.ArgumentParser.parse_args

    def keep_and_parse(parser, *given):
        actions[:] = parser._actions
        return parse_args(parser, *given)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", keep_and_parse)
    monkeypatch.setattr("sys.argv", [program])
    module.parse()
    numbers = [
        a
        for a in actions
        if a.type is not None or (isinstance(a.default, (int, float)) and a.nargs != 0)
    ]
    assert len(numbers) >= 10
    for action in numbers:
        for value in (
            "nan",
            "inf",
            "1e400",
            "-1",
            "9" * 30,
            "x",
            "",
            *([] if action.dest in MAY_BE_ZERO else "0"),
        ):
            monkeypatch.setattr("sys.argv", [program, f"{action.option_strings[0]}={value}"])
            with pytest.raises(SystemExit) as error:
                module.parse()
            said = capsys.readouterr().err.splitlines()[-1]
            expected = f"{program}: error: argument {action.option_strings[0]}: must be a "
            assert (
                error.value.code == 2
                and said.startswith(expected)
                and said.endswith(f"got {value!r}")
            ), said


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        ("train", "--width 12 --heads 4", "--width: must be a multiple of 2 x --heads = 8, got 12"),
        ("distill", "--width 63", "--width: must be a multiple of 2 x --heads = 4, got 63"),
        ("grpo", "--width 2", "--width: must be a multiple of 2 x --heads = 8, got 2"),
        ("grpo", "--shortest 4", "--shortest: must be at most --longest = 3, got 4"),
        ("grpo", "--vocab 12", "--vocab: must be at least --symbols + 3 = 13, got 12"),
        ("grpo", "--group 1", "--group: must be a whole number from 2 to 2147483647, got '1'"),
        ("megatron_pretrain", "--hidden 30", "--hidden: must be a multiple of --heads = 4, got 30"),
        ("megatron_pretrain", "--vocab 101", "--vocab: must be a multiple of --tp = 2, got 101"),
        ("train", "--resume --overwrite", "--overwrite: not allowed with argument --resume"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(
    launch, program, options, message, monkeypatch, capsys
):
    monkeypatch.setattr("sys.argv", [program, *options.split()])
    with pytest.raises(SystemExit):
        launch(program).parse()
    assert capsys.readouterr().err.splitlines()[-1] == f"{program}: error: argument {message}"


def test_a_job_with_fewer_gpus_than_processes_ends_on_every_rank(launch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    of_all = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "-", "MASTER_PORT": "1"}
    for rank in "01":
        for name, value in {**of_all, "RANK": rank, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit, match=r"one GPU per process: 2 process\(es\), 1 GPU\(s\)"):
            launch("parallel").start(2, "cuda")


def test_a_program_of_several_ranks_says_how_to_start_it():
    said = run_script("launch/megatron_pretrain.py", code=1)
    assert "got no WORLD_SIZE, RANK, LOCAL_RANK" in said
    program = ROOT / "launch" / "megatron_pretrain.py"
    assert f"torchrun --standalone --nproc-per-node 2 {program} .." in said


def test_a_job_that_torchrun_did_not_start_says_how_to_start_it(launch, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match=r"got no RANK, LOCAL_RANK, .* torchrun --standalone"):
        launch("parallel").start(1, "cpu")


def test_a_corpus_is_read_from_regular_files_and_no_further_than_needed(launch, tmp_path):
    order = list(range(40))
    random.Random(0).shuffle(order)  # as `documents` does it
    for position, place in enumerate(order):
        path = tmp_path / f"{place:02d}.txt"
        if position == 0:
            os.mkfifo(path)
        else:
            path.write_text(f"text {place}\n" * 20)
    with path.open("ab") as file:  # the last one that is read
        file.truncate(1 << 40)
    os.symlink("/dev/zero", tmp_path / "zz")
    texts = launch("data").documents(str(tmp_path), 0.01)
    assert len(texts) == 39 - ("/dev/zero" in texts) and sum(map(len, texts)) == 10_000


CONFIG = {"vocab": 5}


def save_run(group, device, folder, step):
    """Save a checkpoint whose weights are equal to its step."""
    checkpoint, ranks, model, optimizer = in_launch(group)
    if step == 1:
        ranks.first(lambda: checkpoint.begin(folder, "job"))
    torch.nn.init.constant_(model.weight, float(step))
    checkpoint.save(folder, step, model, optimizer, {"config": CONFIG}, ranks)


def load_run(group, device, folder):
    """The step of the newest checkpoint and a weight of it, or the message of the SystemExit."""
    checkpoint, ranks, model, optimizer = in_launch(group)
    try:
        step = checkpoint.load(folder, model, optimizer, ranks, CONFIG)["step"]
        return step, model.weight[0, 0].item()
    except SystemExit as error:
        return str(error)


def in_launch(group):
    """The module, the ranks, and a model with rows of a vocabulary of 5 on each of them, with its
    optimiser."""
    sys.path.insert(0, str(ROOT / "launch"))
    checkpoint, parallel = (
        importlib.import_module("checkpoint"),
        importlib.import_module("parallel"),
    )
    rank, size = (group.rank(), group.size()) if group else (0, 1)
    model = VocabParallelHead(2, VocabShard.from_group(group, 5, padded_size=6))
    ranks = parallel.Ranks(torch.device("cpu"), rank=rank, world=size, tp_rank=rank, tp=size)
    return checkpoint, ranks, model, torch.optim.SGD(model.parameters(), lr=1.0)


@pytest.fixture
def folder(launch, tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        on_ranks(2, save_run, folder, step)
    assert on_ranks(2, load_run, folder) == [(2, 2.0)] * 2 and load_run(None, None, folder) == (
        2,
        2.0,
    )
    return folder


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {  # name -> what is done to which file, and the file that the message names
    "latest is empty": ("latest", lambda path: path.write_text(""), "latest"),
    "latest names nothing": ("latest", lambda path: path.write_text("step-00000001"), "latest"),
    "latest names itself": ("latest", lambda path: path.write_text("."), "latest"),
    "latest is not text": ("latest", lambda path: path.write_bytes(bytes(range(256))), "latest"),
    "a file is empty": ("*/__1_0.distcp", lambda path: path.write_bytes(b""), "__1_0.distcp"),
    "a file is cut": (
        "*/__1_0.distcp",
        lambda path: os.truncate(path, path.stat().st_size // 2),
        "__1_0.distcp",
    ),
    "a bit of a file": ("*/__1_0.distcp", flip, "__1_0.distcp"),
    "a bit of the checksums": ("*/SHA256SUMS", flip, "SHA256SUMS"),
    "no checksums": ("*/SHA256SUMS", Path.unlink, "SHA256SUMS"),
    "empty checksums": ("*/SHA256SUMS", lambda path: path.write_text(""), "SHA256SUMS"),
    "a checksum is missing": (
        "*/SHA256SUMS",
        lambda path: os.truncate(path, path.stat().st_size // 2),
        "SHA256SUMS",
    ),
    "a file is missing": ("*/__1_0.distcp", Path.unlink, "SHA256SUMS"),
    "a pipe": ("*/__1_0.distcp", lambda path: (path.unlink(), os.mkfifo(path)), "SHA256SUMS"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_broken_checkpoint_is_one_line_on_every_rank(launch, folder, name):
    pattern, damage, named = DAMAGES[name]
    (path,) = folder.glob(pattern)
    damage(path)
    messages = on_ranks(2, load_run, folder)
    assert messages[0] == messages[1] and "got" in messages[0] and "\n" not in messages[0], messages
    assert named in messages[0], messages
    assert load_run(None, None, folder) == messages[0]


def test_what_a_checkpoint_replaces_goes_when_the_new_one_is_on_the_disk(
    launch, tmp_path, monkeypatch
):
    folder, events = tmp_path / "run/checkpoints", []

    def fsync(descriptor):
        files = (tmp_path, *tmp_path.rglob("*"))
        events.extend(
            f"sync {p.name}" for p in files if os.path.samestat(p.stat(), os.fstat(descriptor))
        )

    replace, rmtree = os.replace, shutil.rmtree
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(
        os, "replace", lambda a, b: (events.append(f"replace {b.name}"), replace(a, b))
    )
    monkeypatch.setattr(
        shutil, "rmtree", lambda path: (events.append(f"delete {path.name}"), rmtree(path))
    )
    save_run(None, None, folder, 1)
    assert events[:4] == ["sync run", "sync job.part", "replace job", "sync checkpoints"]

    (folder / "step-00000001-kept").mkdir()  # by a user
    events.clear()
    save_run(None, None, folder, 2)
    state, written = events[1:-7], events[-7:-1]
    assert {"sync __0_0.distcp", "sync .metadata.tmp", "replace progress.json"} <= {*state}
    files = ("SHA256SUMS", "step-00000002"), ("latest", "checkpoints")
    assert written == [
        e
        for name, inside in files
        for e in (f"sync {name}.part", f"replace {name}", f"sync {inside}")
    ]
    assert (events[0], state[-1], events[-1]) == (
        "sync checkpoints",
        "sync step-00000002",
        "delete step-00000001",
    )
    assert sorted(p.name for p in folder.iterdir()) == [
        "job",
        "latest",
        "step-00000001-kept",
        "step-00000002",
    ]


def test_a_restart_continues_its_own_run_and_no_older_one(launch, tmp_path, monkeypatch):
    train, folder = launch("train"), tmp_path / "checkpoints"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "older")
    launch("checkpoint").begin(folder, launch("parallel").job())

    def continues(run_id, hosts=1, resume=False, overwrite=False):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        monkeypatch.setenv("GROUP_WORLD_SIZE", str(hosts))
        return train.continues(SimpleNamespace(resume=resume, overwrite=overwrite), tmp_path)

    assert not continues("older")  # no checkpoint yet
    save_run(None, None, folder, 2)
    for hosts in (1, 2):  # a job may lose a host
        assert continues("older", hosts) and continues("older", hosts, overwrite=True)
    assert continues("newer", resume=True)
    for run_id, hosts in (("newer", 1), ("none", 1), ("none", 2)):
        assert not continues(run_id, hosts, overwrite=True)
        with pytest.raises(
            SystemExit, match=r"is from an older run: .*--resume.*--overwrite.*--out"
        ):
            continues(run_id, hosts)


def test_a_broken_line_of_the_metrics_is_named(launch, tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    assert launch("record").rows_until(file, 2) == [{"step": 1}, {"step": 2}]
    for line in ('{"step": 4', "4", '{"loss": 4}'):
        file.write_text(f'{{"step": 1}}\n{line}\n')
        with pytest.raises(
            SystemExit, match=re.escape(f"line 2: expected a JSON object with a step, got {line!r}")
        ):
            launch("record").rows_until(file, 2)


def test_metrics_that_were_cut_anywhere_are_read_to_their_last_whole_row(launch, tmp_path):
    file, text = tmp_path / "metrics.jsonl", '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    for length in range(len(text) + 1):
        file.write_text(text[:length])
        steps = [row["step"] for row in launch("record").rows_until(file, 3)]
        assert steps == [1, 2, 3][: text[:length].count("\n")]


def link(path, elsewhere):
    """Move a folder away and leave a link to it, as for another disk."""
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


IN_THE_PLACE_OF_A_CHECKPOINT = {
    "a link": lambda path: link(path, path.with_name("elsewhere")),
    "a file": lambda path: (
        path.with_name("latest").unlink(),
        shutil.rmtree(path),
        path.write_text(""),
    ),
    "a folder inside": lambda path: (path / "inner").mkdir(),
}


@pytest.mark.parametrize("case", IN_THE_PLACE_OF_A_CHECKPOINT)
@pytest.mark.parametrize("next_step", [2, 3])
def test_what_stands_in_the_place_of_a_checkpoint_ends_no_run(tmp_path, case, next_step):
    save_run(None, None, tmp_path, 1)
    save_run(None, None, tmp_path, 2)
    path = tmp_path / "step-00000002"
    IN_THE_PLACE_OF_A_CHECKPOINT[case](path)
    inside = sorted(x.name for x in path.iterdir()) if case == "a link" else None
    save_run(None, None, tmp_path, next_step)
    assert load_run(None, None, tmp_path) == (next_step, float(next_step))
    if inside is not None:  # what a link names is nobody's to delete
        assert sorted(x.name for x in (tmp_path / "elsewhere").iterdir()) == inside
    save_run(None, None, tmp_path, 1)  # which begins anew
    assert load_run(None, None, tmp_path) == (1, 1.0)


def test_too_little_of_a_corpus_is_told_from_too_few_files(launch, tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text("text " * 200)
    with pytest.raises(
        SystemExit, match=r"the first 10 text files of .* have 0\.01 MB already; .*--corpus-mb"
    ):
        launch("data").documents(str(tmp_path), 0.01)
    for i in range(30):
        (tmp_path / f"{i}.txt").unlink()
    with pytest.raises(
        SystemExit, match=r"holds 10 text files; at least 20 are needed \(--corpus DIR\)"
    ):
        launch("data").documents(str(tmp_path), 0.1)


@pytest.mark.parametrize(
    ("program", "existing"),
    [
        ("distill", "out/ce/metrics.jsonl"),
        ("grpo", "out/metrics.jsonl"),
        ("megatron_pretrain", "out"),
    ],
)
def test_an_older_run_is_refused_on_every_rank(tmp_path, program, existing):
    file = tmp_path / existing
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("older")
    said = run_script(
        f"launch/{program}.py", "--device", "cpu", "--out", tmp_path / "out", ranks=2, code=1
    )
    message = f"{file} is from an older run: replace it (--overwrite) or choose another --out"
    assert said.splitlines().count(message) == 2 and file.read_text() == "older", said


def test_the_quickstart_can_be_run_again_and_resumed(tmp_path):
    """Its commands, with programs that only record how they are called."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "scripts").mkdir()
    for name in ("launch/quickstart.sh", "scripts/arguments.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("scripts/setup.sh", ".venv/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('#!/usr/bin/env bash\necho "$*" >>calls\necho 0\n')
        (tmp_path / name).chmod(0o755)
    for options in ([], ["--steps", "5", "--resume"]):
        (tmp_path / "calls").unlink(missing_ok=True)
        subprocess.run(
            ["bash", "launch/quickstart.sh", *options],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
        calls = [
            c.split()
            for c in (tmp_path / "calls").read_text().splitlines()
            if "launch/train.py" in c
        ]
        assert len(calls) == 2
        for call in calls:
            assert call[-len(options) :] == options if options else "--overwrite" in call
            assert ("--overwrite" in call) != ("--resume" in call)
