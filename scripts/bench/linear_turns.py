"""A linear head and its GEMMs in turns, on one GPU: what `bench_linear.py` measures one after the other.

    python scripts/bench/linear_turns.py --ranks 1 4 8 --json linear_turns.json
    python scripts/bench/linear_turns.py --ways 'one sweep*' --peers '*CuTe' 'quack*' --vocab 128256 32000

A GPU slows down when it draws too much power, so the same GEMMs take 10 % more or less within a run. Here each way of
computing the loss, dH and dW runs for a while in each of several rounds, of which every other one has the reverse
order. Times are medians over the rounds, ratios are medians of the ratios to the bare GEMMs of the same round, as
graphs. One rank of P is a shard of V/P ids alone on the GPU, which sends one packet of statistics: the exchange, and
the reduction of dH over the ranks, are missing.

block: the budget for a block of logits, as a share of all logits; `+ sums` adds fp32 sums of dH, of all tokens.
forward: log-probs of the labels alone, without gradients.
host: microseconds until all kernels of an eager step are launched, on a device with nothing else to do.
memory: MiB at the peak of a step, without dH and dW.
first: seconds of the first step, in which kernels are compiled that no way before it has.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import NamedTuple

import torch
from bench_linear import Implementation, Problem, differentiated, gemms, ours, with_engine
from linear_peers import PEERS
from timing import Machine, is_wanted, reason, reported

from tp_headloss import linear_vocab_statistics
from tp_headloss.linear_head import blocks

BARE = {1: "one GEMM", 3: "three GEMMs", 4: "four GEMMs"}
GEMMS = {"forward": 1, "one_sweep": 3, "recompute": 4}


class Way(NamedTuple):
    """A way of computing loss, dH and dW, or the log-probs alone."""

    mode: str
    # a block has at most this part of the logits; None: the default budget
    share: int | None = None
    sums: bool = False  # whether the budget also has room for fp32 sums of dH
    main_grad: bool = False  # else dW is returned
    engine: str = "auto"

    @property
    def name(self) -> str:
        kind = {"auto": "", "epilogue": ", epilogues", "blocks": ", blocks"}[self.engine]
        if self.mode == "forward":
            return f"forward{kind}"
        budget = (
            "default budget"
            if self.share is None
            else f"1/{self.share}{' + sums' if self.sums else ''}"
        )
        weight = "into main_grad" if self.main_grad else "returned"
        return f"{self.mode.replace('_', ' ')}{kind}, {budget}, dW {weight}"

    def budget(self, problem: Problem) -> int | None:
        """Bytes: of one sweep that returns dW, with fp32 memory for it."""
        if self.share is None:
            return None
        sums = 4 * problem.hidden.numel() if self.sums else 0
        own = 4 * problem.weight.numel() if self.mode == "one_sweep" and not self.main_grad else 0
        return problem.logits_bytes // self.share + sums + own

    def step(self, problem: Problem):
        if self.mode == "forward":
            return log_probs(problem, self.engine)
        return ours(problem, self.mode, self.budget(problem), self.main_grad, engine=self.engine)


ENGINES = ("epilogue", "blocks")
WAYS = (
    *(Way("forward", engine=engine) for engine in ENGINES),
    *(Way("recompute", main_grad=main_grad, engine=engine) for main_grad in (True, False) for engine in ENGINES),
    Way("recompute", 8, False, True, "epilogue"), Way("recompute", 8, True, True, "epilogue"),
    Way("recompute", 8, True, False, "epilogue"), Way("recompute", 8, True, True, "blocks"),
    Way("recompute", 4, False, True, "epilogue"), Way("recompute", 4, True, True, "epilogue"),
    Way("recompute", 4, True, False, "epilogue"),
    Way("one_sweep", 4, False, True), Way("one_sweep", 2, False, True), Way("one_sweep", 4, False, False),
)  # fmt: skip


def log_probs(problem: Problem, engine: str):
    @torch.no_grad()
    def step():
        with with_engine(engine):
            found = linear_vocab_statistics(
                problem.hidden, problem.weight, problem.labels, shard=problem.shard
            )
        return found.log_prob, None

    return step


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
    for turn in range(rounds):
        order = list(runs.items())
        for name, run in order[::-1] if turn % 2 else order:  # what ran before leaves its heat
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
    found = blocks.planned(blocks.recompute_blocks, sizes, way.budget(problem))
    return found and [found.tokens, found.columns]


def wanted_implementations(problem: Problem, args) -> list[Implementation]:
    """Ways and peers, after the bare GEMMs that they are compared with."""
    found = []
    for way in WAYS:
        if is_wanted(way.name, args.ways):
            budget = way.budget(problem)
            found.append(
                Implementation(way.name, GEMMS[way.mode], lambda w=way: w.step(problem), budget)
            )
    for peer in PEERS:
        if is_wanted(peer.name, args.peers):
            build = lambda p=peer: differentiated(problem, p.build(problem.shard))  # noqa: E731
            found.append(Implementation(peer.name, peer.gemms, build, note=peer.note))
    used = {implementation.gemms for implementation in found}
    return [Implementation(BARE[n], n, lambda n=n: gemms(problem, n)) for n in sorted(used)] + found


def prepared(implementations: list[Implementation], problem: Problem) -> tuple[dict, list[dict]]:
    """Run each step once, as a graph, too, if that is possible -> the runs by name, and rows."""
    machine, runs, rows = problem.machine, {}, []
    for implementation in implementations:
        name = implementation.name
        rows.append(row := {"name": name})
        try:
            begin = time.perf_counter()
            step = implementation.build()
            out = step()
            machine.synchronize()
            row["first_s"] = round(time.perf_counter() - begin, 1)
            gradients = (
                []
                if out is None
                else [x for x in out[1:] if x is not None and x.dtype == torch.bfloat16]
            )
            returned = sum(x.nbytes for x in gradients)
            del gradients
            del out
            row["memory_mib"] = round(machine.extra_memory(step) - returned / 2**20, 1)
            runs[f"{name}, eager"] = step
            runs[f"{name}, graph"] = machine.captured(step)
        except Exception as error:
            row["failure"] = reason(error)
        print(row, flush=True)
    return runs, rows


def measured(problem: Problem, args) -> list[dict]:
    """A row for each way, the bare GEMMs among them."""
    implementations, plans = (
        wanted_implementations(problem, args),
        {way.name: plan(way, problem) for way in WAYS},
    )
    runs, rows = prepared(implementations, problem)
    times = in_turns(runs, problem.machine, args.rounds, args.seconds)
    for row, way in zip(rows, implementations):
        name, n = way.name, way.gemms
        if name != BARE[n]:
            row |= {
                "budget_mib": way.budget and round(way.budget / 2**20, 1),
                "block": plans.get(name),
                "note": way.note,
            }
            if f"{name}, eager" in runs:
                row["host_us"] = problem.machine.host_time(runs[f"{name}, eager"])
        for kind in ("graph", "eager"):
            if (found := times.get(f"{name}, {kind}")) is not None:
                row[f"{kind}_us"] = round(statistics.median(found))
                ratios = [a / b for a, b in zip(found, times[f"{BARE[n]}, graph"])]
                row[f"{kind}_over_gemms"] = round(statistics.median(ratios), 3)
        print(row, flush=True)
    return rows


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096])
    parser.add_argument("--vocab", type=int, nargs="+", default=[128256], help="global vocabulary")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1], help="of the groups one rank of which is timed"
    )
    parser.add_argument(
        "--ways", nargs="+", default=["*"], help="names or patterns such as '*default*'"
    )
    parser.add_argument(
        "--peers", nargs="+", default=[], help="names or patterns of others, at one rank"
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=0.06, help="of one way in one round")
    parser.add_argument("--json", help="file for the results")
    parser.set_defaults(device="cuda", dtype="bfloat16", limit=0.0)
    args = parser.parse_args(argv)
    packages = {peer.package for peer in PEERS} if args.peers else ()
    with reported(args, __file__, argv, str, lambda rows: None, packages, repeats=30) as report:
        for vocab, hidden, tokens, ranks in itertools.product(
            args.vocab, args.hidden, args.tokens, args.ranks
        ):
            width = -(-vocab // ranks)
            problem = Problem(tokens, hidden, width, 2.0, torch.bfloat16, report.machine)
            problem.shard._set_chunks(whole=ranks == 1)
            shape = {"ranks": ranks, "tokens": tokens, "hidden": hidden, "width": width}
            print(shape, flush=True)
            report.rows += [shape | row for row in measured(problem, args)]
            report.write()
            del problem
            report.machine.release()


if __name__ == "__main__":
    main()
