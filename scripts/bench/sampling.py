"""Time and memory of `sample`, beside plain torch: a sort of the vocabulary, softmax, cumulative
sum and multinomial.

    python scripts/bench/sampling.py --json tp1_sampling.json
    torchrun --standalone --nproc-per-node 4 scripts/bench/sampling.py  # ours alone
    python scripts/bench/sampling.py --device cpu --tokens 4 --vocab 1000  # a smoke test

One row per spread (standard deviation of normal logits), number of tokens, rule and implementation;
as many ranks as processes share the vocabulary. Both give ids and log-probs of the truncated
distribution; ours also those of the whole vocabulary and the kept sets. Times in microseconds of
calls back to back, the slowest rank's, as 10 %, 50 % and 90 % points. extra memory: the peak above
the logits. kept: mean size of a set.

Check: before a rule is timed, the sizes of its sets are compared with those of plain torch, whose
sums are in fp32 and in another order; `sizes_differ` is the largest difference.
"""

from __future__ import annotations

import itertools

import torch
from timing import is_wanted, parser_of, reported

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
    kept = (
        f", kept {row['kept']}, sizes differ by {row.get('sizes_differ')}" if "kept" in row else ""
    )
    return f"{row['eager_us'][1]:.0f} us, {row['extra_memory_mib']} MiB{kept}"


def main(argv=None):
    parser = parser_of(__doc__, tokens=[16, 256, 2048], vocab=128256, seconds=0.2)
    parser.add_argument("--spread", type=float, nargs="+", default=[2.0, 6.0])
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=RULES)
    args = parser.parse_args(argv)
    with reported(args, __file__, argv, cells, lambda rows: None) as report:
        for shape in itertools.product(args.vocab, args.spread, args.tokens):
            run_shape(args, report, *shape)


def run_shape(args, report, vocab, spread, tokens):
    machine, shard = report.machine, VocabShard.from_group(report.machine.group, vocab)
    generator = torch.Generator(machine.device).manual_seed(0)
    logits = torch.empty(tokens, vocab, device=machine.device, dtype=getattr(torch, args.dtype))
    logits.normal_(0, spread, generator=generator)
    logits = logits[:, shard.start : shard.stop].contiguous()
    for rule, name in itertools.product(args.rules, IMPLEMENTATIONS):
        if not is_wanted(name, args.implementations) or (
            name == "torch" and machine.group is not None
        ):
            continue  # plain torch knows no shards
        row = {
            "vocab": vocab,
            "spread": spread,
            "tokens": tokens,
            "rule": rule,
            "implementation": name,
        }
        with report.row(f"spread {spread}, {tokens} tokens, {rule}, {name}", row):
            row |= measure(machine, name, logits, RULES[rule], shard) | {"status": "ok"}
        machine.release()


if __name__ == "__main__":
    main()
