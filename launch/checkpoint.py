"""Checkpoints: a folder per step with one file per tensor-parallel rank, and a `latest` file that names a whole one."""

import os
import shutil
from pathlib import Path

import torch

from model import SHARDED


def _replace(path: Path, write) -> None:
    part = path.with_name(path.name + ".part")
    write(part)
    os.replace(part, path)


def of_rank(state: dict) -> dict:
    """The model's state with the rows of this rank in place of DTensors."""
    return {name: x.to_local() if hasattr(x, "to_local") else x for name, x in state.items()}


def save(folder: Path, step: int, state: dict, config: dict, ranks) -> None:
    """Called by all ranks; the first data-parallel replica writes. `latest` changes after every file is in place."""
    target = folder / f"step-{step:08d}"
    if ranks.dp_rank == 0:
        target.mkdir(parents=True, exist_ok=True)
        random_state = {"cpu": torch.get_rng_state()}
        if ranks.device.type == "cuda":
            random_state["cuda"] = torch.cuda.get_rng_state(ranks.device)
        content = {"step": step, "config": config, "random": random_state, **state}
        _replace(target / f"tp-{ranks.tp_rank}.pt", lambda part: torch.save(content, part))
    ranks.meet()
    if ranks.rank == 0:
        _replace(folder / "latest", lambda part: part.write_text(target.name))
        for old in folder.glob("step-*"):
            if old != target:
                shutil.rmtree(old)


def exists(folder: Path) -> bool:
    return (folder / "latest").exists()


def newest(folder: Path) -> list[Path]:
    """The newest checkpoint's files, of all tensor-parallel ranks in their order."""
    if not exists(folder):
        raise SystemExit(f"there is no checkpoint in {folder}")
    target = folder / (folder / "latest").read_text().strip()
    return [target / f"tp-{rank}.pt" for rank in range(len(list(target.glob("tp-*.pt"))))]


def load_model(folder: Path) -> tuple[dict, dict]:
    """The newest configuration and parameters, the vocabulary's matrices put together from all of their shards."""
    parts = [torch.load(path, map_location="cpu", weights_only=True, mmap=True) for path in newest(folder)]
    whole = {name: torch.cat([part["model"][name] for part in parts]) for name in SHARDED}
    return parts[0]["config"], {**parts[0]["model"], **whole}


def load(folder: Path, config: dict, ranks) -> dict:
    """The newest state of this rank; refuses one that another configuration wrote."""
    files = newest(folder)
    target = files[0].parent
    if len(files) != ranks.tp:
        raise SystemExit(f"{target} was written with --tp {len(files)}, this run has --tp {ranks.tp}")
    content = torch.load(files[ranks.tp_rank], map_location="cpu", weights_only=True)
    saved = content["config"]
    differing = [k for k in {**saved, **config} if saved.get(k) != config.get(k)]
    if differing:
        changes = "; ".join(f"{k}: {saved.get(k)} -> {config.get(k)}" for k in differing)
        raise SystemExit(f"{target} was written by another configuration ({changes})")
    torch.set_rng_state(content["random"]["cpu"])
    if "cuda" in content["random"]:
        torch.cuda.set_rng_state(content["random"]["cuda"], ranks.device)
    return content
