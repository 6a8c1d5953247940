"""Checkpoints: a folder per step with one file per tensor-parallel rank, and a `latest` file that names a whole one.

A file is on the disk before another one names it: the ranks' files, then SHA256SUMS, then `latest`; then the previous
checkpoint is deleted. SHA256SUMS is verified whenever a file is read; `sha256sum -c SHA256SUMS` reads it, too.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from model import SHARDED

STEP = re.compile(r"step-\d{8}")
SUMS = "SHA256SUMS"
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


def of_rank(state: dict) -> dict:
    """The model's state with the rows of this rank in place of DTensors."""
    return {name: x.to_local() if hasattr(x, "to_local") else x for name, x in state.items()}


def begin(folder: Path, job: str) -> None:
    """Make the folder of a new run, without what an older run left there."""
    (folder / "latest").unlink(missing_ok=True)
    for old in _steps(folder):
        shutil.rmtree(old)
    folder.mkdir(parents=True, exist_ok=True)
    _sync(folder.parent)
    _replace(folder / JOB, lambda part: part.write_text(job))


def begun_by(folder: Path, job: str) -> bool:
    return (folder / JOB).is_file() and (folder / JOB).read_text(errors="replace") == job


def exists(folder: Path) -> bool:
    return (folder / "latest").exists()


def save(folder: Path, step: int, state: dict, config: dict, ranks) -> None:
    """Called by all ranks; the first data-parallel replica writes. `latest` changes after every file is in place."""
    target, line = folder / f"step-{step:08d}", ""
    with ranks.together():
        if ranks.dp_rank == 0:
            target.mkdir(exist_ok=True)
            _sync(folder)
            random_state = {"cpu": torch.get_rng_state()}
            if ranks.device.type == "cuda":
                random_state["cuda"] = torch.cuda.get_rng_state(ranks.device)
            content = {"step": step, "config": config, "random": random_state, **state}
            file = target / f"tp-{ranks.tp_rank}.pt"
            _replace(file, lambda part: torch.save(content, part))
            line = f"{_sha256(file)}  {file.name}\n"
    lines = ranks.gather(line)
    with ranks.together():
        if ranks.rank == 0:
            _replace(target / SUMS, lambda part: part.write_text("".join(lines)))
            _replace(folder / "latest", lambda part: part.write_text(target.name))
            for old in _steps(folder):
                if old != target:
                    shutil.rmtree(old)


def newest(folder: Path) -> dict[Path, str]:
    """The newest checkpoint's files, of all tensor-parallel ranks in their order, with their checksums."""
    latest = folder / "latest"
    if not latest.is_file():
        raise SystemExit(f"there is no checkpoint in {folder}")
    name, there = latest.read_text(errors="replace").strip(), [path.name for path in _steps(folder)]
    if name not in there:
        raise SystemExit(f"{latest} must name one of {there}, the folders beside it, got {name!r}")
    target, sums = folder / name, {}
    path = target / SUMS
    for rank, line in enumerate(path.read_text(errors="replace").splitlines() if path.is_file() else []):
        if not re.fullmatch(rf"[0-9a-f]{{64}}  tp-{rank}\.pt", line):
            raise SystemExit(f"{path}, line {rank + 1}: expected a SHA-256 checksum and tp-{rank}.pt, got {line!r}")
        sums[target / f"tp-{rank}.pt"] = line[:64]
    listed, there = [file.name for file in sums], sorted(file.name for file in target.glob("tp-*.pt") if file.is_file())
    if sorted(listed) != there or not sums:
        raise SystemExit(f"{path} must list the files beside it, {there}, got {listed}")
    return sums


def _load(path: Path, checksum: str, **options) -> dict:
    found = _sha256(path)
    if found != checksum:
        size = path.stat().st_size
        raise SystemExit(f"{path} is damaged: expected checksum {checksum} of {SUMS}, got {found} of {size} bytes")
    return torch.load(path, map_location="cpu", weights_only=True, **options)


def load_model(folder: Path) -> tuple[dict, dict]:
    """The newest configuration and parameters, the vocabulary's matrices put together from all of their shards."""
    parts = [_load(path, checksum, mmap=True) for path, checksum in newest(folder).items()]
    whole = {name: torch.cat([part["model"][name] for part in parts]) for name in SHARDED}
    return parts[0]["config"], {**parts[0]["model"], **whole}


def load(folder: Path, config: dict, ranks) -> dict:
    """The newest state of this rank; refuses one that another configuration wrote."""
    with ranks.together():
        files = list(newest(folder).items())
        target = files[0][0].parent
        if len(files) != ranks.tp:
            raise SystemExit(f"{target} was written with --tp {len(files)}, this run has --tp {ranks.tp}")
        content = _load(*files[ranks.tp_rank])
        saved = content["config"]
        differing = [k for k in {**saved, **config} if saved.get(k) != config.get(k)]
        if differing:
            changes = "; ".join(f"{k}: {saved.get(k)} -> {config.get(k)}" for k in differing)
            raise SystemExit(f"{target} was written by another configuration ({changes})")
    torch.set_rng_state(content["random"]["cpu"])
    if "cuda" in content["random"]:
        torch.cuda.set_rng_state(content["random"]["cuda"], ranks.device)
    return content
