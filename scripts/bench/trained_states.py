"""Hidden states and a head that have learned something, in the place of random ones: for
`bench_linear.py --states`.

    python scripts/bench/trained_states.py --hidden 4096 --ids 32064 --out runs/states
    python scripts/bench/trained_states.py --hidden 16 --ids 300 --tokens 512 --megabytes 1 --out states  # CPU

A small decoder learns a text, the Python sources that are installed here, until the entropy of its
distributions over that text has fallen to each of --entropies, in nats. OUT gets a file for each:
hidden states [tokens, H], the weight of the head [ids, H], labels [tokens] and the entropy.
"""

import argparse
from pathlib import Path

import torch
from small_decoder import Decoder, batches, numbered, words_of_sources
from torch import nn

from tp_headloss import HeadLoss, Linear

EVERY = 10  # steps between looks at the entropy


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, default in (
        ("hidden", 2048), ("ids", 32064), ("tokens", 8192), ("layers", 4), ("megabytes", 1),
        ("steps", 5000),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--entropies", type=float, nargs="+", default=[4.0, 1.0, 0.3])
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    text = numbered(words_of_sources(args.megabytes), args.ids)
    model = Decoder(args.ids, args.hidden, args.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    head, left = HeadLoss(metrics=("entropy",)), sorted(args.entropies, reverse=True)
    for step, batch in enumerate(batches(text, args.tokens, args.steps, 0)):
        inputs, labels = batch[:, :-1].to(device), batch[:, 1:].to(device)
        with torch.autocast(device.type, torch.bfloat16):
            hidden = model(inputs).bfloat16()
        out = head.linear(hidden, model.head.bfloat16(), labels, linear=Linear("one_sweep"))
        if step % EVERY == 0:
            entropy = float(out.metrics["entropy"] / out.count)
            while left and entropy <= left[0]:
                save(args.out / f"{left.pop(0)}.pt", hidden, model.head, labels, entropy)
            if not left:
                return
        out.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    raise SystemExit(f"the entropy is {entropy:.2f} nats after {args.steps} steps, above {left[0]}")


def save(path: Path, hidden, weight, labels, entropy: float):
    tensors = {"hidden": hidden, "weight": weight.bfloat16(), "labels": labels}
    tensors = {
        name: x.detach().flatten(0, -2 if x.is_floating_point() else -1)
        for name, x in tensors.items()
    }
    torch.save({**{k: x.cpu() for k, x in tensors.items()}, "entropy": entropy}, path)
    print(f"{path}: {entropy:.2f} nats", flush=True)


if __name__ == "__main__":
    main()
