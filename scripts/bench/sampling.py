"""Time and memory of `sample`, beside plain torch: a sort of the vocabulary, softmax, cumulative sum and multinomial.

    python scripts/bench/sampling.py --json tp1_sampling.json
    torchrun --standalone --nproc-per-node 4 scripts/bench/sampling.py --implementations ours
    python scripts/bench/sampling.py --device cpu --tokens 4 --vocab 1000  # a smoke test

One row per spread (standard deviation of normal logits), number of tokens, rule and implementation; as many ranks as
processes share the vocabulary. Both give ids and log-probs of the truncated distribution; ours also those of the whole
vocabulary and the kept sets. Times in microseconds of calls back to back, the slowest rank's, as 10 %, 50 % and 90 %
points. extra memory: the peak above the logits. kept: mean size of a set.

Check: before a rule is timed, the sizes of its sets are compared with those of plain torch, whose sums are in fp32
and in another order; `sizes_differ` is the largest difference.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import sys

import torch
import torch.distributed as dist
from timing import Machine, Report

import tp_headloss
from tp_headloss import SamplingRule, VocabShard, sample

RULES = {
    "no rule": None,
    "top_k=50": SamplingRule(top_k=50),
    "top_p=0.95": SamplingRule(top_p=0.95),
    "min_p=0.05": SamplingRule(min_p=0.05),
    "top_k=50, top_p=0.95": SamplingRule(top_k=50, top_p=0.95),
}


def ours(logits, rule, shard):
    positions = torch.arange(len(logits), device=logits.device)
    return sample(logits, seed=0, positions=positions, rule=rule, shard=shard)


def plain(logits, rule, _shard):
    """ids, their log-probs and the sizes of the sets, by a sort of whole rows."""
    z, ids, sizes = logits.float(), None, None
    if rule is not None:
        z, ids = z.sort(dim=-1, descending=True)
        if rule.min_p is not None:
            z.masked_fill_(z - z[:, :1] < torch.tensor(rule.min_p).log().item(), -torch.inf)
        if rule.top_k is not None:
            z[:, rule.top_k :] = -torch.inf
        if rule.top_p is not None:
            p = z.softmax(-1)
            z.masked_fill_(p.cumsum(-1) - p >= rule.top_p, -torch.inf)
        sizes = (z > -torch.inf).sum(-1)
    log_p = z.log_softmax(-1)
    drawn = log_p.exp().multinomial(1)
    return drawn if ids is None else ids.gather(1, drawn), log_p.gather(1, drawn), sizes


IMPLEMENTATIONS = {"ours": ours, "torch": plain}


def measure(machine, name, logits, rule, shard) -> dict:
    def step():
        IMPLEMENTATIONS[name](logits, rule, shard)

    row = {}
    if rule is not None and name == "ours":
        bounds = ours(logits, rule, shard).sets.spans
        sizes = (bounds[:, 1] - bounds[:, 0]).double()
        row["kept"] = round(sizes.mean().item(), 1)
        if machine.group is None:
            row["sizes_differ"] = int((sizes - plain(logits, rule, None)[2]).abs().max())
    step()
    row["extra_memory_mib"] = machine.extra_memory(step)
    return row | {"eager_us": machine.timed(step, [machine.align], steps=5)}


def cells(row) -> str:
    if row["status"] != "ok":
        return row["status"]
    kept = f", kept {row['kept']}, sizes differ by {row.get('sizes_differ')}" if "kept" in row else ""
    return f"{row['eager_us'][1]:.0f} us, {row['extra_memory_mib']} MiB{kept}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 256, 2048])
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--spread", type=float, nargs="+", default=[2.0, 6.0])
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=RULES)
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS), choices=IMPLEMENTATIONS)
    parser.add_argument("--seconds", type=float, default=0.2, help="for the repeats of one row, at least 5")
    parser.add_argument("--json")
    args = parser.parse_args()
    group = None
    if "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        group = dist.group.WORLD
    device = torch.device(args.device, torch.cuda.current_device() if args.device == "cuda" else None)
    machine = Machine(device, group, args.seconds, repeats=50)
    facts = {
        "device": torch.cuda.get_device_name() if machine.cuda else "cpu", "tp": 1 if group is None else group.size(),
        "vocab": args.vocab, "dtype": "bfloat16", "command": shlex.join(["python", *sys.argv]),
        "versions": {"torch": torch.__version__, "tp_headloss": tp_headloss.__version__},
    }  # fmt: skip
    report = Report(machine, cells, args.json, 0.0, **facts)
    report.print(facts)
    shard = VocabShard.from_group(group, args.vocab)
    for spread, tokens in itertools.product(args.spread, args.tokens):
        generator = torch.Generator(device).manual_seed(0)
        logits = torch.empty(tokens, args.vocab, device=device, dtype=torch.bfloat16)
        logits.normal_(0, spread, generator=generator)
        logits = logits[:, shard.start : shard.stop].contiguous()
        for rule, name in itertools.product(args.rules, args.implementations):
            row = {"spread": spread, "tokens": tokens, "rule": rule, "implementation": name}
            with report.row(f"spread {spread}, {tokens} tokens, {rule}, {name}", row):
                row |= measure(machine, name, logits, RULES[rule], shard) | {"status": "ok"}
            machine.release()
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
