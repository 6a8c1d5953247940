"""Do gradients in fp8 harm a training? Pairs of runs with equal weights and batches, whose heads
alone differ. On a machine with GPUs, all of which it uses:

    python scripts/bench/fp8_training.py --seeds 6 --repeats 2 --json fp8_training.json
    python scripts/bench/fp8_training.py --seeds 1 --steps 2 --hidden 32 --ids 500 --megabytes 1  # CPU

A decoder learns the Python sources that are installed here, cut into words. After the last step:
the loss on text that it has not seen, in nats, and how much of the probability there is on ids that
are rare in the training text (under 20 times) or never in it, whose rows of the weight get most of
their gradients as numbers of 3 bits. "again" are runs in bf16 with the weights of others: how far
equal runs are apart.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from small_decoder import LENGTH, Decoder, batches, numbered, words_of_sources
from torch import nn

from tp_headloss import HeadLoss, Linear

HEADS = {"bf16": Linear("one_sweep"), "fp8": Linear(gradients="fp8"), "again": Linear("one_sweep")}
RARE, HELD_OUT = 20, 0.02


def train(arguments, text: torch.Tensor, seed: int, mode: str) -> dict:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    model = Decoder(arguments.ids, arguments.hidden, arguments.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95))
    head, split = HeadLoss(), int(len(text) * (1 - HELD_OUT))
    losses, start = [], time.time()
    for step, batch in enumerate(batches(text[:split], arguments.tokens, arguments.steps, seed)):
        warm = min(1.0, (step + 1) / 50)
        optimizer.param_groups[0]["lr"] = arguments.lr * warm * (1 - step / arguments.steps)
        batch = batch.to(device)
        with torch.autocast(device.type, torch.bfloat16):
            hidden = model(batch[:, :-1]).bfloat16()
            loss = head.linear(hidden, model.head, batch[:, 1:], linear=HEADS[mode]).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    found = {"seed": seed, "head": mode, "seconds": round(time.time() - start, 1)}
    found["losses"] = [
        round(x, 4) for x in torch.stack(losses)[:: max(1, len(losses) // 20)].tolist()
    ]
    return found | evaluate(model, text[:split], text[split:], arguments.ids, device)


@torch.no_grad()
def evaluate(model, seen: torch.Tensor, unseen: torch.Tensor, ids: int, device) -> dict:
    """Loss and probabilities on text that was not seen."""
    counts = torch.bincount(seen, minlength=ids).to(device)
    kinds = {"rare": (counts > 0) & (counts < RARE), "never": counts == 0}
    length = min(LENGTH, len(unseen) - 1)
    n = min(64, (len(unseen) - 1) // length)
    total, mass = 0.0, dict.fromkeys(kinds, 0.0)
    for i in range(n):
        piece = unseen[i * length : (i + 1) * length + 1].long().to(device)
        with torch.autocast(device.type, torch.bfloat16):
            hidden = model(piece[None, :-1])[0]
        log_p = (hidden.float() @ model.head.float().t()).log_softmax(1)
        total -= log_p.gather(1, piece[1:, None]).mean().item() / n
        for name, of_kind in kinds.items():
            mass[name] += log_p.exp()[:, of_kind].sum(1).mean().item() / n
    sizes = {f"{name} ids": int(of_kind.sum()) for name, of_kind in kinds.items()}
    return {"loss": total, **{f"on {name} ids": x for name, x in mass.items()}, **sizes}


def run_all(arguments) -> list[dict]:
    """All runs, one at a time on each GPU, each in a process of its own."""
    jobs = [(seed, mode) for seed in range(arguments.seeds) for mode in ("bf16", "fp8")]
    jobs += [(seed, "again") for seed in range(arguments.repeats)]
    free: queue.Queue = queue.Queue()
    for gpu in range(torch.cuda.device_count()) or [""]:
        free.put(str(gpu))

    def run(job):
        seed, mode = job
        gpu = free.get()
        try:
            command = [sys.executable, *sys.argv, "--run", str(seed), mode, str(path)]
            env = dict(os.environ, CUDA_VISIBLE_DEVICES=gpu)
            done = subprocess.run(command, env=env, capture_output=True, text=True)
        finally:
            free.put(gpu)
        if done.returncode:
            raise SystemExit(f"the run {job} failed:\n{done.stderr[-2000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        print({k: v for k, v in found.items() if k != "losses"}, flush=True)
        return found

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(free.qsize()) as pool:
        path = Path(folder) / "text.pt"
        torch.save(numbered(words_of_sources(arguments.megabytes), arguments.ids), path)
        return list(pool.map(run, jobs))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, default in (
        ("seeds", 6), ("repeats", 2), ("steps", 1000), ("layers", 6), ("hidden", 768),
        ("tokens", 16384), ("ids", 32000), ("megabytes", 60),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--json")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        seed, mode, path = arguments.run
        print(json.dumps(train(arguments, torch.load(path), int(seed), mode)))
        return
    runs = run_all(arguments)
    if arguments.json:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
        command = " ".join(["python", *sys.argv]).replace(arguments.json, Path(arguments.json).name)
        about = {"device": device, "versions": versions, "command": command, "runs": runs}
        Path(arguments.json).write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
