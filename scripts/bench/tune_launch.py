"""Time the kernels for every sensible tile and number of warps, and print the tables that choose between them.

    python scripts/bench/tune_launch.py                      # on the GPU at hand
    python scripts/bench/tune_launch.py --tokens 2048 --vocab 151936 --parts 8

For each kernel one line per case: "block/warps microseconds" for all candidates, fastest first, the one in use marked
with *. The values live in `tp_headloss/backends/triton.py`, where they are chosen without looking at the clock: a
program that measured while it trains would give other bits from run to run.
"""

import argparse
from unittest import mock

import torch
import triton
from triton.testing import do_bench

from tp_headloss import VocabShard
from tp_headloss.backends import triton as launchers
from tp_headloss.reduce import Reduction, SumsPlan
from tp_headloss.stats import LATER, OF_TEACHER, HeadSpec, Inputs, later_rows, packet_rows, wants

STATISTICS = [(128, 1), (256, 1), (512, 1), (1024, 1), (512, 2), (1024, 2), (1024, 4), (2048, 4)]
GRADIENT = [(512, 1), (1024, 2), (2048, 4), (4096, 8), (2048, 8), (1024, 4), (4096, 4), (8192, 8)]
MERGE = [(32, 1), (64, 1), (64, 2), (128, 4), (256, 4)]
SUMS = [(1024, 8), (1024, 16), (2048, 16), (2048, 32), (4096, 32), (8192, 32)]
SUMS_GRADIENT = [(256, 2), (512, 4), (1024, 4), (2048, 8)]


def show(case, candidates, current, run):
    """run(launch) launches the kernel once."""
    timed = []
    for launch in map(launchers.Launch._make, candidates):
        microseconds = 1e3 * do_bench(lambda launch=launch: run(launch), warmup=5, rep=40, return_mode="median")
        timed.append((microseconds, f"{launch.block}/{launch.warps}{'*' if launch == current else ''}"))
    print(f"{case}:", ", ".join(f"{name} {us:.1f}" for us, name in sorted(timed)), flush=True)


def specs(shard, world_size, want):
    """This rank's spec, with the group's size and no group: nothing is exchanged here."""
    chunks = shard.chunks // world_size
    width = chunks * shard.chunk_size
    return HeadSpec(
        start=0, valid_width=width, vocab_size=width, chunk_size=shard.chunk_size, chunks=chunks, world_size=1,
        want=want, scale=1.0, softcap=0.0, temperature=1.0, ignore_index=-100, backend="triton", transport="gather",
        group_name="",
    )  # fmt: skip


def tune(tokens, vocab, parts, dtype):
    shard = VocabShard(0, vocab, vocab)
    for want in ((), ("entropy",), ("entropy", "argmax"), ("forward_kl",), ("reverse_kl",), ("jsd",)):
        spec = specs(shard, parts, want)
        logits = torch.randn(tokens, spec.valid_width, device="cuda").to(dtype)
        labels = torch.randint(0, spec.valid_width, (tokens,), device="cuda")
        divergence, later = wants(want, OF_TEACHER), wants(want, LATER)
        inputs = Inputs(logits, labels, teacher=torch.randn_like(logits) if divergence else None)
        packets = logits.new_empty(spec.chunks, len(packet_rows(True, want)), tokens, dtype=torch.float32)
        case = f"{tokens} x {spec.valid_width} in {spec.chunks} chunks of {spec.chunk_size}, {want or 'lse, log_prob'}"

        def statistics(launch, packets=packets, inputs=inputs, spec=spec):
            with mock.patch.object(launchers, "statistics_launch", lambda *_: launch):
                launchers.local_statistics(packets, inputs, spec)

        show(f"statistics {case}", STATISTICS, launchers.statistics_launch(spec.chunk_size, divergence), statistics)
        launchers.local_statistics(packets, inputs, spec)
        merged = launchers.merge_packets(packets, inputs, spec)[0]
        grads = dict.fromkeys(("log_prob", *(name for name in want if name != "argmax")))
        grads, dx = {name: torch.randn(tokens, device="cuda") for name in grads}, torch.empty_like(logits)
        if later:
            packets = packets.new_empty(spec.chunks, len(later_rows(want)), tokens)

            def second(launch, packets=packets, inputs=inputs, merged=merged, spec=spec):
                with mock.patch.object(launchers, "statistics_launch", lambda *_: launch):
                    launchers.later_statistics(packets, inputs, merged, spec)

            show(f"second exchange {case}", STATISTICS, launchers.statistics_launch(spec.chunk_size, True), second)

        def gradient(launch, dx=dx, inputs=inputs, merged=merged, grads=grads, spec=spec):
            with mock.patch.object(launchers, "gradient_launch", lambda *_: launch):
                launchers.logits_gradient(dx, inputs, merged, grads, spec)

        kinds = *(name in want for name in ("entropy", "forward_kl", "reverse_kl")), later
        show(f"gradient {case}", GRADIENT, launchers.gradient_launch(spec.valid_width, *kinds), gradient)


def tune_merge(tokens):
    """All 8 packets of the canonical chunks."""
    for want in ((), ("entropy", "argmax")):
        spec = specs(VocabShard(0, 1024, 1024), 1, want)
        packets = torch.randn(8, len(packet_rows(True, want)), tokens, device="cuda").abs()
        inputs = Inputs(packets[0, :1].T, torch.zeros(tokens, dtype=torch.long, device="cuda"))

        def merge(launch, packets=packets, inputs=inputs, spec=spec):
            with mock.patch.object(launchers, "MERGE", launch):
                launchers.merge_packets(packets, inputs, spec)

        show(f"merge {tokens} x 8 packets, {want or 'lse, log_prob'}", MERGE, launchers.MERGE, merge)


def tune_sums(tokens):
    valid = torch.ones(tokens, dtype=torch.bool, device="cuda")
    for count in (1, 5):
        values = tuple(torch.randn(count, tokens, device="cuda").unbind(0))
        plan = SumsPlan((1.0,) * min(count, 3), ("",) * count, 2, 1)
        reduction, terms = Reduction(plan, None, None), values[: len(plan.coefficients)]
        loss, _, divisor = launchers.token_sums(values, valid, reduction)

        def total(launch, values=values, reduction=reduction):
            with mock.patch.object(launchers, "SUMS", launch):
                launchers.token_sums(values, valid, reduction)

        def gradient(launch, terms=terms, plan=plan, loss=loss, divisor=divisor):
            with mock.patch.object(launchers, "SUMS_GRADIENT", launch):
                launchers.token_sums_gradient(loss, terms, valid, None, divisor, plan)

        show(f"sums of {count} x {tokens}", SUMS, launchers.SUMS, total)
        show(f"their gradient, {len(terms)} x {tokens}", SUMS_GRADIENT, launchers.SUMS_GRADIENT, gradient)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32064, 128256], help="whole vocabularies")
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 4], help="TP sizes whose local shape is timed")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, {args.dtype}; us")
    for vocab in args.vocab:
        for parts in args.parts:
            tune(args.tokens, vocab, parts, getattr(torch, args.dtype))
    tune_merge(args.tokens)
    tune_sums(args.tokens)


if __name__ == "__main__":
    main()
