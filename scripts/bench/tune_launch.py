"""Time the kernels for every sensible tile and number of warps, and print the tables that choose between them.

    python scripts/bench/tune_launch.py                      # on the GPU at hand
    python scripts/bench/tune_launch.py --tokens 2048 --vocab 151936 --parts 8

For each kernel one line per case: "block/warps microseconds" for all candidates, fastest first, the one in use marked
with *. The values live in `tp_headloss/engine/launch.py`, where they are chosen without looking at the clock: a
program that measured while it trains would give other bits from run to run.
"""

import argparse
import itertools
from unittest import mock

import torch
import triton
from triton.testing import do_bench

from tp_headloss import VocabShard
from tp_headloss.engine import sums_triton
from tp_headloss.engine import triton as backend
from tp_headloss.engine.launch import Launch
from tp_headloss.engine.request import Facts, Request, Tensors
from tp_headloss.head_loss.statistic_value import FusedReduction, SumsPlan
from tp_headloss.statistics import FULL_TEACHER

STATISTICS = [(128, 1), (256, 1), (512, 1), (1024, 1), (512, 2), (1024, 2), (1024, 4), (2048, 4)]
GRADIENT = [(512, 1), (1024, 2), (2048, 4), (4096, 8), (2048, 8), (1024, 4), (4096, 4), (8192, 8)]
MERGE = [(32, 1), (64, 1), (64, 2), (128, 4), (256, 4)]
SUMS = [(1024, 8), (1024, 16), (2048, 16), (2048, 32), (4096, 32), (8192, 32)]
SUMS_GRADIENT = [(256, 2), (512, 4), (1024, 4), (2048, 8)]


def show(case, candidates, current, run):
    """run(launch) launches the kernel once."""
    timed = []
    for launch in itertools.starmap(Launch, candidates):
        microseconds = 1e3 * do_bench(lambda launch=launch: run(launch), warmup=5, rep=40, return_mode="median")
        timed.append((microseconds, f"{launch.block}/{launch.warps}{'*' if launch == current else ''}"))
    print(f"{case}:", ", ".join(f"{name} {us:.1f}" for us, name in sorted(timed)), flush=True)


def facts_of(shard, world_size, want):
    """This rank's facts, with the group's size and no group: nothing is exchanged here."""
    chunks = shard.chunks // world_size
    width = chunks * shard.chunk_size
    return Facts(
        start=0, valid_width=width, vocab_size=width, chunk_size=shard.chunk_size, chunks=chunks, world_size=1,
        want=want, scale=1.0, softcap=0.0, temperature=1.0, ignore_index=-100, backend="triton", transport="gather",
        group_name="",
    )  # fmt: skip


def tune(tokens, vocab, parts, dtype):
    shard = VocabShard(0, vocab, vocab)
    for want in ((), ("entropy",), ("entropy", "argmax"), ("forward_kl",), ("reverse_kl",), ("jsd",)):
        facts = facts_of(shard, parts, want)
        logits = torch.randn(tokens, facts.valid_width, device="cuda").to(dtype)
        labels = torch.randint(0, facts.valid_width, (tokens,), device="cuda")
        has_teacher = any(name in want for name in FULL_TEACHER)
        teacher = torch.randn_like(logits) if has_teacher else None
        request = Request.of(Tensors(logits, labels, teacher=teacher), facts)
        layout = request.layout
        packets = logits.new_empty(facts.chunks, len(layout.packet), tokens, dtype=torch.float32)
        shape = f"{tokens} x {facts.valid_width} in {facts.chunks} chunks of {facts.chunk_size}"
        case = f"{shape}, {want or 'lse, log_prob'}"

        def statistics(launch, packets=packets, request=request):
            with mock.patch.object(backend, "statistics_launch", lambda *_: launch):
                backend.local_statistics(packets, request)

        show(f"statistics {case}", STATISTICS, backend.statistics_launch(facts.chunk_size, has_teacher), statistics)
        backend.local_statistics(packets, request)
        merged = backend.merge_packets(packets, request)[0]
        grads = dict.fromkeys(("log_prob", *(name for name in want if name != "argmax")))
        grads, dx = {name: torch.randn(tokens, device="cuda") for name in grads}, torch.empty_like(logits)
        if layout.second:
            packets = packets.new_empty(facts.chunks, len(layout.second), tokens)

            def second(launch, packets=packets, request=request, merged=merged):
                with mock.patch.object(backend, "statistics_launch", lambda *_: launch):
                    backend.second_statistics(packets, request, merged)

            show(f"second exchange {case}", STATISTICS, backend.statistics_launch(facts.chunk_size, True), second)

        def gradient(launch, dx=dx, request=request, merged=merged, grads=grads):
            with mock.patch.object(backend, "gradient_launch", lambda *_: launch):
                backend.logits_gradient(dx, request, merged, grads)

        show(f"gradient {case}", GRADIENT, backend.gradient_launch(facts.valid_width, tuple(grads)), gradient)


def tune_merge(tokens):
    """All 8 packets of the canonical chunks."""
    for want in ((), ("entropy", "argmax")):
        labels = torch.zeros(tokens, dtype=torch.long, device="cuda")
        logits = torch.empty(tokens, 1, device="cuda")  # not read
        request = Request.of(Tensors(logits, labels), facts_of(VocabShard(0, 1024, 1024), 1, want))
        packets = torch.randn(8, len(request.layout.packet), tokens, device="cuda").abs()

        def merge(launch, packets=packets, request=request):
            with mock.patch.object(backend, "MERGE", launch):
                backend.merge_packets(packets, request)

        show(f"merge {tokens} x 8 packets, {want or 'lse, log_prob'}", MERGE, backend.MERGE, merge)


def tune_sums(tokens):
    valid = torch.ones(tokens, dtype=torch.bool, device="cuda")
    for count in (1, 5):
        values = tuple(torch.randn(count, tokens, device="cuda").unbind(0))
        plan = SumsPlan((1.0,) * min(count, 3), ("",) * count, 2, 1, None)
        reduction, terms = FusedReduction(plan, None, None), values[: len(plan.coefficients)]
        loss, _, inverse = sums_triton.token_sums(values, valid, reduction)

        def total(launch, values=values, reduction=reduction):
            with mock.patch.object(sums_triton, "SUMS", launch):
                sums_triton.token_sums(values, valid, reduction)

        def gradient(launch, terms=terms, plan=plan, loss=loss, inverse=inverse):
            with mock.patch.object(sums_triton, "SUMS_GRADIENT", launch):
                sums_triton.token_sums_gradient(loss, terms, valid, None, inverse, plan)

        show(f"sums of {count} x {tokens}", SUMS, sums_triton.SUMS, total)
        show(f"their gradient, {len(terms)} x {tokens}", SUMS_GRADIENT, sums_triton.SUMS_GRADIENT, gradient)


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
