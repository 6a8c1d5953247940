"""Time and memory of the fused linear head, beside its GEMMs alone and whoever else does it. On
GPUs:

    python scripts/bench/bench_linear.py --hidden 4096 8192 --vocab 128256
    torchrun --standalone --nproc-per-node 4 scripts/bench/bench_linear.py --trace

One step: mean cross-entropy, forward and backward, of hidden states [tokens, H], replicated, and a
weight shard [V/P, H], random or trained (--states); dH is summed over the ranks, dW stays. us:
medians, of steps in eager mode and of replays of a CUDA graph. memory: the peak above inputs, dH
and dW. errors: of loss, dH and dW against fp32 arithmetic throughout, as norms. GEMMs: over the
bare GEMMs of that mode and nothing else, three, or four with the logits made twice. Ours get a
budget of a quarter of the logits shard for one sweep and an eighth for recompute, unless their
names say otherwise; dW goes into main_grad, or is returned.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from linear_peers import PEERS, SummedGradient
from timing import Machine, is_wanted, parser_of, reason, reported

from tp_headloss import HeadLoss, Linear, Options, VocabShard
from tp_headloss.linear_head import epilogue

IGNORED = -100
# of loss, dH and dW, else a row is marked wrong
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2}


class Operands(NamedTuple):
    """Hidden states and labels, the same ones on every rank, and this rank's rows of the weight."""

    shard: VocabShard
    hidden: torch.Tensor  # [tokens, H]
    weight: torch.Tensor  # [V/P, H]
    labels: torch.Tensor  # [tokens]
    facts: dict  # of a row, besides its sizes

    @classmethod
    def random(cls, tokens: int, hidden: int, vocab: int, std: float, dtype, machine: Machine):
        shard = VocabShard.from_group(machine.group, vocab)
        generator = torch.Generator(machine.device).manual_seed(1)

        def draw(*shape):
            return torch.randn(shape, device=machine.device, generator=generator, dtype=dtype)

        states = draw(tokens, hidden)
        generator.manual_seed(2 + shard.start)
        weight = draw(shard.width, hidden).mul_(std / hidden**0.5)
        generator.manual_seed(3)
        labels = torch.randint(vocab, (tokens,), device=machine.device, generator=generator)
        labels[::17] = IGNORED
        return cls(shard, states, weight, labels, {"std": std})

    @classmethod
    def trained(cls, path: Path, dtype, machine: Machine):
        """Those of a file that trained_states.py has made."""
        found = torch.load(path)
        hidden, weight, labels = (
            found[x].to(machine.device) for x in ("hidden", "weight", "labels")
        )
        shard = VocabShard.from_group(machine.group, len(weight))
        own = F.pad(weight[shard.start : shard.stop], (0, 0, 0, shard.width))[: shard.width]
        facts = {"states": path.name, "entropy": round(found["entropy"], 3)}
        return cls(shard, hidden.to(dtype), own.to(dtype), labels, facts)

    def ignoring(self, share: float) -> Operands:
        """The same with that share of the tokens ignored, as a prompt or what has no advantage is."""
        generator = torch.Generator(self.labels.device).manual_seed(4)
        drawn = torch.rand(self.labels.shape, device=self.labels.device, generator=generator)
        labels = torch.where(drawn < share, IGNORED, self.labels)
        return self._replace(labels=labels, facts={**self.facts, "ignored": share})


class Problem:
    def __init__(self, operands: Operands, machine: Machine):
        self.machine, self.shard, self.facts = machine, operands.shard, operands.facts
        self.hidden, self.labels = operands.hidden.requires_grad_(), operands.labels
        self.weight = torch.nn.Parameter(operands.weight)
        self.logits_bytes = len(self.labels) * self.shard.width * self.hidden.dtype.itemsize

    @torch.no_grad()
    def truth(self):
        """Loss, dH and dW by products in fp32 (TF32 is off by default), some tokens at a time.
        Probabilities in float64: the gradient of a token whose label has nearly all is what is left
        of 1."""
        weight, group = self.weight.float(), self.machine.group
        loss, of_hidden, of_weight = (
            0.0,
            torch.empty_like(self.hidden, dtype=torch.float32),
            torch.zeros_like(weight),
        )
        count = (self.labels != IGNORED).sum()

        def over_ranks(x, op=dist.ReduceOp.SUM):
            if group is not None:
                dist.all_reduce(x, op=op, group=group)
            return x

        def log_softmax(z):
            top = over_ranks(z.amax(1), dist.ReduceOp.MAX)
            return z.sub_((top + over_ranks((z - top[:, None]).exp().sum(1)).log())[:, None])

        for first in range(0, len(self.labels), 1024):
            here = slice(first, first + 1024)
            hidden, labels = self.hidden[here].float(), self.labels[here]
            log_p = log_softmax((hidden @ weight.t()).double())
            q = torch.zeros_like(log_p)
            own = (labels >= self.shard.start) & (labels < self.shard.stop)
            q.scatter_add_(
                1, torch.where(own, labels - self.shard.start, 0)[:, None], own.double()[:, None]
            )
            loss += torch.where(labels != IGNORED, -over_ranks((q * log_p).sum(1)), 0.0).sum()
            p = log_p.exp_().sub_(q)
            p *= ((labels != IGNORED) / count)[:, None]
            of_hidden[here] = p.float() @ weight
            of_weight += p.float().t() @ hidden
        return loss / count, over_ranks(of_hidden), of_weight

    def row_errors(self, of_hidden, of_weight, truth) -> dict[str, float]:
        """Of dH the worst token's error, relative to its gradient; of dW the error of the rows of
        ids that are no label."""

        def apart(found, expected):
            return (found.double() - expected.double()).norm(dim=1), expected.double().norm(dim=1)

        error, size = apart(of_hidden, truth[1])
        worst = (error / size)[size > 0].max()
        error, size = apart(of_weight, truth[2])
        others = torch.ones(len(size), dtype=torch.bool, device=size.device)
        own = (self.labels >= self.shard.start) & (self.labels < self.shard.stop)
        others[self.labels[own] - self.shard.start] = False
        no_label = error[others].norm() / size[others].norm()
        found = {"dH of the worst token": worst, "dW of ids that are no label": no_label}
        values = self.machine.slowest([float(x) for x in found.values()]).tolist()
        return {name: float(f"{x:.3g}") for name, x in zip(found, values)}

    def errors(self, loss, of_hidden, of_weight, truth) -> list[float]:
        pairs = zip((loss, of_hidden, of_weight), truth)
        out = [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in pairs]
        return self.machine.slowest([math.inf if math.isnan(e) else e for e in out]).tolist()


@dataclass(frozen=True)
class Implementation:
    name: str
    gemms: int  # that it cannot do without
    build: Callable[[], Callable]  # -> step() -> loss, dH, dW; None for the GEMMs alone
    budget: int | None = None
    note: str = ""


def gemms(problem, n):
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    logits = torch.randn(len(hidden), len(weight), device=hidden.device).mul_(0.01).to(hidden.dtype)
    out = [torch.empty_like(x) for x in (logits, hidden, weight)]

    def step():
        for _ in range(max(1, n - 2)):
            torch.mm(hidden, weight.t(), out=out[0])
        if n > 1:
            torch.mm(logits, weight, out=out[1])
            torch.mm(logits.t(), hidden, out=out[2])

    return step


def fp8_gemms(problem):
    """The logits' product in bf16, and those of dH and dW in fp8, without sums of few bits."""
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    logits = torch.empty(len(hidden), len(weight), device=hidden.device, dtype=hidden.dtype)
    one = torch.ones((), device=hidden.device)

    def random(rows, columns, dtype):
        return torch.randn(rows, columns, device=hidden.device, dtype=hidden.dtype).to(dtype)

    def multiply(a, b):
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=hidden.dtype, use_fast_accum=False)

    (n, depth), width = hidden.shape, len(weight)
    of_rows, of_columns = (random(*shape, torch.float8_e5m2) for shape in ((n, width), (width, n)))
    turned_weight, turned_hidden = (
        random(depth, columns, torch.float8_e4m3fn) for columns in (width, n)
    )

    def step():
        torch.mm(hidden, weight.t(), out=logits)
        multiply(of_rows, turned_weight)
        multiply(of_columns, turned_hidden)

    return step


def differentiated(problem, loss_of):
    def step():
        loss = loss_of(problem.hidden, problem.weight, problem.labels)
        return loss, *torch.autograd.grad(loss, (problem.hidden, problem.weight))

    return step


def materialised(problem, options):
    head_loss, shard = HeadLoss(options=options), problem.shard

    def loss_of(hidden, weight, labels):
        hidden = hidden if shard.group is None else SummedGradient.apply(hidden, shard.group)
        return head_loss(F.linear(hidden, weight), labels, shard=shard).loss

    return differentiated(problem, loss_of)


@contextlib.contextmanager
def with_engine(engine: str):
    """Let recompute have "epilogue" or "blocks", whatever the device is; "auto": its own choice."""
    given = epilogue.is_default
    if engine != "auto":
        epilogue.is_default = lambda device: engine == "epilogue"
    try:
        yield
    finally:
        epilogue.is_default = given


def with_defaults(problem, linear: Linear):
    head_loss = HeadLoss()
    return differentiated(
        problem,
        lambda hidden, weight, labels: (
            head_loss.linear(hidden, weight, labels, shard=problem.shard, linear=linear).loss
        ),
    )


def ours(problem, mode, budget, main_grad, engine="auto"):
    head_loss, weight = HeadLoss(), problem.weight
    declared = 1.0 if main_grad and mode == "one_sweep" else None
    linear = Linear(mode=mode, budget=budget, main_grad=main_grad, upstream=declared)

    def loss_of(hidden, weight, labels):
        with with_engine(engine):
            return head_loss.linear(hidden, weight, labels, shard=problem.shard, linear=linear).loss

    if not main_grad:
        return differentiated(problem, loss_of)
    if not hasattr(weight, "main_grad"):
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)

    def step():  # dW goes where it is summed over micro-batches anyway
        loss = loss_of(problem.hidden, weight, problem.labels)
        return (
            loss,
            torch.autograd.grad(loss, (problem.hidden, weight), allow_unused=True)[0],
            weight.main_grad,
        )

    return step


def implementations(problem):
    quarter, eighth = problem.logits_bytes // 4, problem.logits_bytes // 8
    # fp32 memory that dW is summed in, if it is returned in half precision
    own_sum = 4 * problem.weight.numel()
    rows = [
        Implementation("three GEMMs", 3, lambda: gemms(problem, 3)),
        Implementation("four GEMMs", 4, lambda: gemms(problem, 4)),
        Implementation("materialised logits", 3, lambda: materialised(problem, Options())),
        Implementation(
            "materialised logits, in place", 3, lambda: materialised(problem, Options(inplace=True))
        ),
    ]
    for name, mode, budget, main_grad, engine in (
        ("one sweep", "one_sweep", quarter, True, "auto"),
        ("one sweep, half", "one_sweep", 2 * quarter, True, "auto"),
        ("one sweep, dW returned", "one_sweep", quarter + own_sum, False, "auto"),
        ("recompute, blocks", "recompute", eighth, True, "blocks"),
        ("recompute, epilogues", "recompute", eighth, True, "epilogue"),
        ("recompute, blocks, quarter", "recompute", quarter, True, "blocks"),
        ("recompute, epilogues, quarter", "recompute", quarter, True, "epilogue"),
        ("recompute, blocks, dW returned", "recompute", None, False, "blocks"),
        ("recompute, epilogues, dW returned", "recompute", None, False, "epilogue"),
    ):
        if engine == "epilogue" and not problem.hidden.is_cuda:
            continue
        n = 3 if mode == "one_sweep" else 4
        build = lambda m=mode, b=budget, g=main_grad, e=engine: ours(problem, m, b, g, engine=e)  # noqa: E731
        rows.append(Implementation(f"ours, {name}", n, build, budget))
    if "ignored" in problem.facts:
        valid = Linear("one_sweep", max_valid_tokens=int((problem.labels != IGNORED).sum()))
        build = lambda x=valid: with_defaults(problem, x)  # noqa: E731
        rows.append(Implementation("ours, one sweep, valid tokens", 3, build))
    if problem.hidden.dtype == torch.bfloat16:
        if problem.hidden.is_cuda:
            rows.append(Implementation("one GEMM and two in fp8", 3, lambda: fp8_gemms(problem)))
        for name, linear in (
            ("one sweep, exact logits", Linear("one_sweep", exact_logits=True)),
            ("fp8 gradients", Linear(gradients="fp8")),
            ("fp8 gradients, exact logits", Linear(gradients="fp8", exact_logits=True)),
        ):
            build = lambda x=linear: with_defaults(problem, x)  # noqa: E731
            rows.append(Implementation(f"ours, {name}", 3, build))
    for peer in PEERS:
        if peer.sharded or problem.shard.world_size == 1:
            build = lambda p=peer: differentiated(problem, p.build(problem.shard))  # noqa: E731
            rows.append(Implementation(peer.name, peer.gemms, build, note=peer.note))
    return rows + [Implementation("three GEMMs, again", 3, lambda: gemms(problem, 3))]


def measure(row, implementation, problem, truth, report):
    machine, dtype = report.machine, problem.hidden.dtype
    with report.set_up(row):
        step = implementation.build()
        out = step()
    if out is not None:
        row["errors"] = [float(f"{e:.3g}") for e in problem.errors(*out, truth)]
        row["row_errors"] = problem.row_errors(*out[1:], truth)
        if not max(row["errors"]) <= TOLERANCE[str(dtype).removeprefix("torch.")]:
            row["status"] = "wrong"
    returned = sum(x.nbytes for x in out[1:] if x.dtype == dtype) if out is not None else 0
    del out
    extra = machine.extra_memory(step)
    row["memory_mib"] = None if extra is None else round(extra - returned / 2**20, 1)
    row["eager_us"] = machine.timed(step, [machine.align], 1)
    try:
        row["graph_us"] = machine.timed(machine.captured(step), [machine.align], 1)
    except Exception as error:
        row["graph_failure"] = reason(error)


def overlap(step, machine) -> dict:
    """How much of the collectives' time has a GEMM running beside it, from a profile of one
    step."""
    from torch.profiler import ProfilerActivity, profile

    step()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        machine.align()
        step()
        machine.synchronize()
    spans = [
        (e.name, e.time_range.start, e.time_range.end)
        for e in recorded.events()
        if e.device_type.name == "CUDA"
    ]
    gemm_spans = [
        span[1:] for span in spans if any(word in span[0] for word in ("gemm", "cutlass", "nvjet"))
    ]
    kinds = {}
    for name, start, end in spans:
        kinds[name[:60]] = kinds.get(name[:60], 0.0) + end - start
    out = {
        "us by kernel": {
            name: round(us) for name, us in sorted(kinds.items(), key=lambda x: -x[1])[:14]
        }
    }
    out["us in all"] = round(max(span[2] for span in spans) - spans[0][1])
    for name, start, end in spans:
        if "nccl" in name and end - start > 50:  # the reduction of dH, not an exchange of packets
            beside = sum(max(0.0, min(end, b) - max(start, a)) for a, b in gemm_spans)
            out[f"{name[:40]} at {start - spans[0][1]:.0f} us"] = {
                "us": end - start,
                "beside_gemms_us": beside,
            }
    return out


def shape(row):
    return f"{row['tokens']} x {row['hidden']} x {row['vocab']}, TP {row['tp']}"


def print_table(rows):
    for name, group in itertools.groupby(rows, shape):
        group = list(group)
        measured = [row for row in reversed(group) if "eager_us" in row]
        bare = {
            row["gemms"]: row["eager_us"][1] for row in measured if "GEMMs" in row["implementation"]
        }
        print(f"\n{name}: logits shard {group[0]['logits_mib']:.0f} MiB")
        print(
            f"{'':48}{'eager':>8}{'graph':>8}{'/GEMMs':>8}{'MiB':>8}{'/shard':>8}  errors of loss, dH, dW"
        )
        for row in group:
            print(f"{row['implementation']:48} {cells(row, bare)}")
    for row in rows:
        if "overlap" in row:
            print(row["implementation"], shape(row), row["overlap"])


def cells(row, bare=None):
    """Medians of eager steps and of the graph, the ratio to bare GEMMs, memory and errors. Or why
    there are none."""
    if "eager_us" not in row:
        return row["status"]
    best = row["eager_us"][1]
    graph = f"{row['graph_us'][1]:.0f}" if row.get("graph_us") else "-"
    ratio = best / bare[row["gemms"]] if bare and row["gemms"] in bare else math.nan
    memory = math.nan if row["memory_mib"] is None else row["memory_mib"]
    share = memory / row["logits_mib"]
    status = "" if row["status"] == "ok" else row["status"]
    return f"{best:7.0f}{graph:>8}{ratio:8.3f}{memory:8.0f}{share:8.3f}  {row.get('errors', '')} {status}"


def main(argv=None):
    parser = parser_of(__doc__, tokens=[8192], vocab=128256, seconds=0.5)
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096])
    parser.add_argument(
        "--std", type=float, default=2.0, help="of the logits: CCE skips gradients that are small"
    )
    parser.add_argument(
        "--states",
        type=Path,
        nargs="+",
        help="files of trained_states.py, in the place of random operands of the other sizes",
    )
    parser.add_argument(
        "--ignored", type=float, help="share of the tokens whose labels are ignored"
    )
    parser.add_argument(
        "--trace", action="store_true", help="print what runs beside the reduction of dH"
    )
    args = parser.parse_args(argv)
    packages = {peer.package for peer in PEERS}
    with reported(args, __file__, argv, cells, print_table, packages, repeats=30) as report:
        run_shapes(args, report)


def run_shapes(args, report):
    machine, dtype = report.machine, getattr(torch, args.dtype)
    made = [
        partial(Operands.random, tokens, hidden, vocab, args.std, dtype, machine)
        for vocab, hidden, tokens in itertools.product(args.vocab, args.hidden, args.tokens)
    ]
    if args.states:
        made = [partial(Operands.trained, path, dtype, machine) for path in args.states]
    for make in made:
        operands = make() if args.ignored is None else make().ignoring(args.ignored)
        problem = Problem(operands, machine)
        del operands
        (tokens, hidden), vocab = problem.hidden.shape, problem.shard.vocab_size
        truth = problem.truth()
        for implementation in implementations(problem):
            if not is_wanted(implementation.name, args.implementations):
                continue
            row = {
                "implementation": implementation.name,
                "tokens": tokens,
                "hidden": hidden,
                "vocab": vocab,
            }
            row |= {
                "tp": problem.shard.world_size,
                "gemms": implementation.gemms,
                "budget": implementation.budget,
            }
            row |= {"logits_mib": problem.logits_bytes / 2**20, **problem.facts}
            row |= {"status": "ok", "note": implementation.note}
            with report.row(f"{shape(row)}, {implementation.name}", row):
                measure(row, implementation, problem, truth, report)
                if args.trace and implementation.name.startswith("ours") and machine.cuda:
                    row["overlap"] = overlap(implementation.build(), machine)
            problem.weight.__dict__.pop("main_grad", None)
            machine.release()
        del problem, truth
        machine.release()


if __name__ == "__main__":
    main()
