"""Checkpoints: a folder per step, written by torch.distributed.checkpoint, and a `latest` file that
names a whole one.

Any number of shards and replicas can read what any other wrote. A file is on the disk before
another one names it: the ranks' files, then SHA256SUMS, then `latest`; then the previous checkpoint
is deleted. SHA256SUMS, because torch has no checksums, is verified before anything is read;
`sha256sum -c SHA256SUMS` reads it, too. torch's .metadata is a pickle: load only checkpoints whose
writer you trust.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

# a single process saves what there is
warnings.filterwarnings("ignore", "torch.distributed is disabled")
STEP = re.compile(r"step-\d{8}")
SUMS, PROGRESS = "SHA256SUMS", "progress.json"
JOB = "job"  # name of the job that began the run


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    part = path.with_name(path.name + ".part")
    write(part)
    _sync(part)
    os.replace(part, path)
    _sync(path.parent)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _steps(folder: Path) -> list[Path]:
    """The folders that `save` has made."""
    return sorted(path for path in folder.glob("step-*") if STEP.fullmatch(path.name))


def _remove(path: Path) -> None:
    """Remove a checkpoint: its folder, or a link or a file in its place, and not what a link
    names."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def begin(folder: Path, job: str | None) -> None:
    """Make the folder of a new run, without what an older run left there."""
    (folder / "latest").unlink(missing_ok=True)
    for old in _steps(folder):
        _remove(old)
    folder.mkdir(parents=True, exist_ok=True)
    _sync(folder.parent)
    _replace(folder / JOB, lambda part: part.write_text(str(job)))


def begun_by(folder: Path, job: str | None) -> bool:
    return (
        job is not None
        and (folder / JOB).is_file()
        and (folder / JOB).read_text(errors="replace") == job
    )


def exists(folder: Path) -> bool:
    return (folder / "latest").exists()


def save(folder: Path, step: int, model, optimizer, progress: dict, ranks) -> None:
    """Called by all ranks, each of which writes its part of the state; `latest` changes after every
    file is in place.

    progress: what JSON can hold, "config" among it; `load` returns it with the step."""
    target = folder / f"step-{step:08d}"
    with ranks.together():
        if ranks.rank == 0:
            # of a run that died while it wrote, perhaps with more ranks
            if target.is_symlink() or target.exists():
                _remove(target)
            target.mkdir()
            _sync(folder)
    with ranks.together():
        dcp.save(_state(model, optimizer), storage_writer=dcp.FileSystemWriter(target))
        if ranks.rank == 0:
            _replace(
                target / PROGRESS,
                lambda part: part.write_text(json.dumps({"step": step, **progress})),
            )
    with ranks.together():
        if ranks.rank == 0:
            _sync(target)
            lines = [f"{_sha256(path)}  {path.name}\n" for path in sorted(target.iterdir())]
            _replace(target / SUMS, lambda part: part.write_text("".join(lines)))
            _replace(folder / "latest", lambda part: part.write_text(target.name))
            for old in _steps(folder):
                if old != target:
                    _remove(old)


def _state(model, optimizer=None) -> dict:
    """Tensors and DTensors by name, which `dcp.save` reads and `dcp.load` writes into.

    Without the optimiser's options: they are in the configuration, and here they would be
    pickles."""
    if optimizer is None:
        return {"model": get_model_state_dict(model)}
    parameters, state = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": state["state"]}


def newest(folder: Path) -> dict[Path, str]:
    """The newest checkpoint's files, with their checksums."""
    latest = folder / "latest"
    if not latest.is_file():
        raise SystemExit(f"there is no checkpoint in {folder}")
    name, there = latest.read_text(errors="replace").strip(), [path.name for path in _steps(folder)]
    if name not in there:
        raise SystemExit(f"{latest} must name one of {there}, the folders beside it, got {name!r}")
    target, sums = folder / name, {}
    path = target / SUMS
    for number, line in enumerate(
        path.read_text(errors="replace").splitlines() if path.is_file() else [], 1
    ):
        if not re.fullmatch(r"[0-9a-f]{64}  [\w.]+", line):
            raise SystemExit(
                f"{path}, line {number}: expected a SHA-256 checksum and a file, got {line!r}"
            )
        sums[target / line[66:]] = line[:64]
    listed, there = (
        sorted(file.name for file in sums),
        sorted(x.name for x in target.iterdir() if x.is_file()),
    )
    if sorted([*listed, SUMS]) != there:
        raise SystemExit(
            f"{path} must list the files beside it, {[x for x in there if x != SUMS]}, got {listed}"
        )
    return sums


def _verify(path: Path, checksum: str) -> None:
    found = _sha256(path)
    if found != checksum:
        size = path.stat().st_size
        raise SystemExit(
            f"{path} is damaged: expected checksum {checksum} of {SUMS}, got {found} of {size} bytes"
        )


def progress(folder: Path) -> dict:
    """The newest checkpoint's step, configuration, and what else `save` was given."""
    [(path, checksum)] = [
        (path, checksum) for path, checksum in newest(folder).items() if path.name == PROGRESS
    ]
    _verify(path, checksum)
    return json.loads(path.read_text())


def load(folder: Path, model, optimizer, ranks, config: dict | None = None) -> dict:
    """Called by all ranks: the newest state goes into the model and the optimiser (or None),
    whatever their sharding.

    config: refuses a checkpoint that another configuration wrote. -> `progress`."""
    with ranks.together():
        files = list(newest(folder).items())
        for path, checksum in files[ranks.rank :: ranks.world]:
            _verify(path, checksum)
        found, target = progress(folder), files[0][0].parent
        saved = found["config"]
        differing = [
            k for k in {**saved, **(config or saved)} if saved.get(k) != (config or saved).get(k)
        ]
        if differing:
            changes = "; ".join(f"{k}: {saved.get(k)} -> {config.get(k)}" for k in differing)
            raise SystemExit(f"{target} was written by another configuration ({changes})")
    with ranks.together():
        state = _state(model, optimizer)
        dcp.load(state, storage_reader=dcp.FileSystemReader(target))
        if optimizer is None:
            set_model_state_dict(model, state["model"])
        else:
            options = get_optimizer_state_dict(model, optimizer)["param_groups"]
            optimizer_state = {"state": state["optimizer"], "param_groups": options}
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=optimizer_state
            )
    return found
