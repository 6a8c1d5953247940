"""A linear head and its GEMMs in turns, on one GPU: what `bench_linear.py` measures one after the other.

    python scripts/bench/linear_turns.py --ranks 1 4 8 --json linear_turns.json

A GPU slows down when it draws too much power, so the same GEMMs take 10 % more or less within a run. Here each way of
computing the loss, dH and dW runs for a while in each of several rounds. Times are medians over the rounds, ratios are
medians of the ratios to the bare GEMMs of the same round, as graphs. One rank of P is a shard of V/P ids alone on the
GPU, which sends one packet of statistics: the exchange, and the reduction of dH over the ranks, are missing.

block: the budget for a block of logits, as a share of all logits; `+ sums` adds fp32 sums of dH, of all tokens.
host: microseconds until all kernels of an eager step are launched, on a device with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import NamedTuple

import torch
from bench import command, join, versions
from bench_linear import Problem, gemms, ours
from timing import Machine

from tp_headloss.linear_head import blocks


class Way(NamedTuple):
    """A way of computing loss, dH and dW."""

    mode: str
    share: int  # a block has at most this part of the logits
    sums: bool  # whether the budget also has room for fp32 sums of dH
    main_grad: bool  # else dW is returned
    engine: str = "auto"

    @property
    def name(self) -> str:
        added = " + sums" if self.sums else ""
        kind = "" if self.mode == "one_sweep" else {"epilogue": ", epilogues", "blocks": ", blocks"}[self.engine]
        weight = "into main_grad" if self.main_grad else "returned"
        return f"{self.mode.replace('_', ' ')}{kind}, 1/{self.share}{added}, dW {weight}"

    def budget(self, problem: Problem) -> int:
        """Bytes: of one sweep that returns dW, with fp32 memory for it."""
        sums = 4 * problem.hidden.numel() if self.sums else 0
        own = 4 * problem.weight.numel() if self.mode == "one_sweep" and not self.main_grad else 0
        return problem.logits_bytes // self.share + sums + own


WAYS = (
    Way("recompute", 8, False, True, "epilogue"), Way("recompute", 8, True, True, "epilogue"),
    Way("recompute", 8, True, False, "epilogue"), Way("recompute", 8, True, True, "blocks"),
    Way("recompute", 4, False, True, "epilogue"), Way("recompute", 4, True, True, "epilogue"),
    Way("recompute", 4, True, False, "epilogue"),
    Way("one_sweep", 4, False, True), Way("one_sweep", 2, False, True), Way("one_sweep", 4, False, False),
)  # fmt: skip


def in_turns(runs: dict, machine: Machine, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Name -> microseconds of a run in each round."""
    counts, times = {}, {name: [] for name in runs}
    for name, run in runs.items():
        run()
        machine.synchronize()
        begin = time.perf_counter()
        run()
        machine.synchronize()
        counts[name] = max(2, round(seconds / (time.perf_counter() - begin)))
    for _ in range(rounds):
        for name, run in runs.items():
            run()
            start = machine.mark()
            for _ in range(counts[name]):
                run()
            end = machine.mark()
            machine.synchronize()
            times[name].append(machine.microseconds(start, end) / counts[name])
    return times


def plan(way: Way, problem: Problem) -> list[int] | None:
    """Tokens and ids of a block of recompute's backward."""
    if way.mode != "recompute":
        return None
    tokens, hidden = problem.hidden.shape
    sizes = blocks.Sizes(tokens, problem.shard.width, hidden, 2, True, not way.main_grad)
    found = blocks.recompute_blocks(sizes, way.budget(problem))
    return found and [found.tokens, found.columns]


def measured(problem: Problem, args) -> list[dict]:
    """A row for each way, the bare GEMMs among them."""
    machine = problem.machine
    steps = {"three GEMMs": gemms(problem, 3), "four GEMMs": gemms(problem, 4)}
    ways = {way.name: way for way in WAYS}
    for name, way in ways.items():
        steps[name] = ours(problem, way.mode, way.budget(problem), way.main_grad, engine=way.engine)
    runs = {f"{name}, graph": machine.captured(step) for name, step in steps.items()}
    runs |= {f"{name}, eager": steps[name] for name in ways}
    times, rows = in_turns(runs, machine, args.rounds, args.seconds), []
    for name, step in steps.items():
        row = {"name": name, "graph_us": round(statistics.median(times[f"{name}, graph"]))}
        if name in ways:
            way = ways[name]
            bare = times["three GEMMs, graph" if way.mode == "one_sweep" else "four GEMMs, graph"]
            row |= {"budget_mib": round(way.budget(problem) / 2**20, 1), "block": plan(way, problem)}
            for kind in ("graph", "eager"):
                ratios = [a / b for a, b in zip(times[f"{name}, {kind}"], bare)]
                row[f"{kind}_over_gemms"] = round(statistics.median(ratios), 3)
            row["eager_us"] = round(statistics.median(times[f"{name}, eager"]))
            row["host_us"] = machine.host_time(step)
        print(row, flush=True)
        rows.append(row)
    return rows


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256, help="global vocabulary")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 4, 8], help="of the groups one rank of which is timed"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.06, help="of one way in one round")
    parser.add_argument("--json", help="file for the results")
    return parser.parse_args(argv)


def main(argv=None):
    args = arguments(argv)
    device, _ = join("cuda")
    machine, shapes = Machine(device, None, 0.3, 30), []
    facts = {"device": torch.cuda.get_device_name(), "dtype": "bfloat16", "versions": versions([])}
    facts["command"] = command(sys.argv[1:] if argv is None else argv, __file__)
    for ranks in args.ranks:
        width = -(-args.vocab // ranks)
        problem = Problem(args.tokens, args.hidden, width, 2.0, torch.bfloat16, machine)
        problem.shard._set_chunks(whole=ranks == 1)
        print(f"rank of {ranks}: {args.tokens} x {args.hidden} x {width}", flush=True)
        shapes.append({"ranks": ranks, "tokens": args.tokens, "hidden": args.hidden, "width": width})
        shapes[-1]["rows"] = measured(problem, args)
        del problem
        machine.release()
        if args.json:
            with open(args.json, "w") as file:
                json.dump(facts | {"shapes": shapes}, file, indent=1)


if __name__ == "__main__":
    main()
