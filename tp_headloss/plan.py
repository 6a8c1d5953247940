"""Peak memory and floor time of every way to a cross-entropy and its gradients: `python -m
tp_headloss plan`.

Memory is what one rank allocates at the peak of a step beyond its inputs: beyond the logits, or,
from hidden states, beyond these and the weight. The floor is the time in which GEMMs multiply at
the GPU's peak, and all other kernels read what they need and write what they make once.
Communication is not in it.
"""

import argparse
import contextlib
import os
import shlex
import sys
from typing import NamedTuple

import torch

from .arguments.linear import MIN_SWEEP_TOKENS
from .command_line import Parser
from .linear_head import blocks, fp8
from .linear_head.request import free_share

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}  # name -> bytes
# TB/s, and TFLOP/s of dense products of half precision and of fp32 without TF32, as NVIDIA states
# them
CARDS = {
    "A100": (2.04, 312.0, 19.5),
    "H100": (3.35, 989.0, 67.0),
    "H200": (4.8, 989.0, 67.0),
}
# Sizes beyond those of any step of a rank, for which the search of blocks would take long
MOST = 1 << 22  # of each size
MOST_LOGITS = 1 << 37  # 256 GiB in half precision
HIDDEN = 4096  # size of the hidden states where none is given
FROM_HIDDEN = "hidden", "tflops"  # options that mean nothing where logits are given
PER_TOKEN = 128  # bytes of statistics, packets and labels, about
# bytes that `Linear()` may take of a GPU of 80 GB, where there is none here
ASSUMED_SHARE = 4 << 30
OF_LOGITS = "HeadLoss(options=Options({}))({}, labels, shard=shard)"
LINEAR = "HeadLoss().linear(hidden, weight, labels, shard=shard, linear=Linear({}))"


class Way(NamedTuple):
    """One way, on one rank."""

    name: str
    memory: int  # bytes
    moved: int  # bytes that its kernels, but for GEMMs, read and write
    gemms: int
    call: str  # what to write


class Head(NamedTuple):
    """Sizes of a head whose vocabulary is shared by `tp` ranks."""

    tokens: int
    vocab: int  # ids, without padding
    tp: int
    dtype: str  # of `DTYPES`
    hidden: int
    padded_size: int | None = None  # columns of all ranks, padding included; None: vocab

    @property
    def columns(self) -> int:
        """Columns of all ranks, padding included."""
        return self.vocab if self.padded_size is None else self.padded_size

    @property
    def width(self) -> int:
        """Columns of a rank."""
        return -(-self.columns // self.tp)

    @property
    def logits(self) -> int:
        """Bytes of a rank's logits."""
        return self.tokens * self.width * DTYPES[self.dtype]

    @property
    def columns_of_one_read(self) -> int:
        """Number that divides the columns, so that each rank's rows have whole vectors of 16 bytes."""
        return 16 // DTYPES[self.dtype] * self.tp

    @property
    def has_one_read(self) -> bool:
        """Whether one launch can serve these shards on a GPU for which it is."""
        return self.tp <= 8 and self.columns % self.columns_of_one_read == 0

    @property
    def has_one_sweep(self) -> bool:
        """Whether one sweep needs no declared scale: gradients in fp16 underflow without one."""
        return self.dtype != "fp16"

    @property
    def has_fp8(self) -> bool:
        return self.dtype == "bf16" and self.hidden % fp8.ALIGNED == 0

    @property
    def sizes(self) -> blocks.Sizes:
        """Sizes from which a linear head plans its blocks."""
        bytes_each = DTYPES[self.dtype]
        return blocks.Sizes(
            self.tokens, self.width, self.hidden, bytes_each, bytes_each == 2, bytes_each == 2
        )

    @property
    def fp32_sums(self) -> int:
        """Bytes of dW in fp32, where the dtype is of half precision; else 0."""
        return 4 * self.width * self.hidden if DTYPES[self.dtype] == 2 else 0

    @property
    def gradients(self) -> tuple[int, int]:
        """Bytes of dH and dW, the gradients of the hidden states and of this rank's rows of the
        weight."""
        each = self.hidden * DTYPES[self.dtype]
        return self.tokens * each, self.width * each


def ways(head: Head, from_hidden: bool) -> list[Way]:
    """Return the ways of a host in plain torch, and then ours."""
    logits = head.logits
    made, gemms, given = (
        (logits, 3, "F.linear(hidden, weight)") if from_hidden else (0, 0, "logits")
    )
    given = "head(hidden)" if from_hidden and head.tp > 1 else given
    # dH and dW beside the gradient of the logits
    after = made + sum(head.gradients) if from_hidden else 0

    def way(name: str, peak: int, moved: int, call: str) -> Way:
        return Way(name, max(peak, after) + PER_TOKEN * head.tokens, moved, gemms, call)

    whole = head.tokens * head.columns  # logits of all ranks, which a host gathers
    gathered = given if head.tp == 1 else f"gather({given})"
    if head.columns > head.vocab:  # padding is no id
        gathered += f"[:, :{head.vocab}]"
    each = DTYPES[head.dtype]  # log_softmax, its output's gradient and its input's exist at once
    found = [
        way(
            "host: F.cross_entropy",
            3 * each * whole,
            6 * each * whole,
            f"F.cross_entropy({gathered}, labels)",
        )
    ]
    if each == 2:
        call_in_fp32 = f"F.cross_entropy({gathered}.float(), labels)"
        found.append(
            way("host: the same in fp32", 12 * whole, (2 * each + 28) * whole, call_in_fp32)
        )
    for name, extra, passes, options in (
        ("logits", logits, 3, 'gradient="backward"'),
        ("in place", 0, 3, "inplace=True"),
        ("one read", logits, 2, 'gradient="forward"'),
        ("one read, in place", 0, 2, 'gradient="forward", inplace=True'),
    ):
        if passes == 3 or head.has_one_read:
            found.append(way(name, made + extra, passes * logits, OF_LOGITS.format(options, given)))
    return found + (_without_logits(head) if from_hidden else [])


def _without_logits(head: Head) -> list[Way]:
    """Return the ways of `HeadLoss.linear`: its default, and modes with default budgets and with a
    quarter of the logits."""
    quarter, sums = -(-head.logits // 4 >> 20), head.fp32_sums  # MiB, bytes
    rows: list[tuple] = [
        ("default", "", *_default(head)),
        ("recompute", '"recompute"', _recompute(head, None), 4),
        (
            "recompute, a quarter",
            f'"recompute", budget={quarter} << 20',
            _recompute(head, quarter << 20),
            4,
        ),
    ]
    if head.has_one_sweep:
        rows.append(("one sweep", '"one_sweep"', _one_sweep(head, None), 3))
    budget = quarter + (sums >> 20) + 1
    if head.has_one_sweep and budget << 20 < head.logits:
        rows.append(
            (
                "one sweep, a quarter",
                f'"one_sweep", budget={budget} << 20',
                _one_sweep(head, budget << 20),
                3,
            )
        )
    if head.has_fp8:
        rows.append(("gradients in fp8", 'gradients="fp8"', _fp8(head), 2))  # two at half the time
    added = f'"one_sweep", budget={quarter} << 20, main_grad=True, upstream=1.0'
    rows.append(("one sweep, main_grad", added, _one_sweep(head, quarter << 20, main_grad=True), 3))
    return [
        Way(
            name,
            memory + PER_TOKEN * head.tokens,
            0 if gemms == 4 else 3 * head.logits,
            gemms,
            LINEAR.format(linear),
        )
        for name, linear, memory, gemms in rows
        if memory is not None
    ]


def left_out(head: Head, from_hidden: bool) -> list[str]:
    """Return the ways that the table lacks, and what they need."""
    needs = []
    if not head.has_one_read:
        needs.append(
            "one read: at most 8 ranks, and ids, or a --padded-size, that are a multiple of "
            f"{head.columns_of_one_read}"
        )
    if from_hidden and not head.has_one_sweep:
        needs.append("one sweep, without main_grad: the loss scale, as Linear(upstream=..)")
    if from_hidden and not head.has_fp8:
        needs.append(f"gradients in fp8: bf16, and a hidden size of a multiple of {fp8.ALIGNED}")
    return needs


def _share() -> int:
    """Bytes that a call may take without asking."""
    here = torch.cuda.is_available()
    return free_share(torch.device("cuda", 0)) if here else ASSUMED_SHARE


def _fp8(head: Head) -> int:
    """Return the peak of a sweep with gradients in fp8."""
    tokens = fp8.planned_tokens(head.sizes, None, _share())
    assert tokens is not None  # without a budget there is always room
    return fp8.peak(head.sizes, tokens) + sum(head.gradients)


def _default(head: Head) -> tuple[int | None, int]:
    """Return the peak in bytes of `Linear()`, and how many GEMMs it takes."""
    share = _share()
    sizes = head.sizes._replace(weight_sums=bool(head.fp32_sums))
    tokens = blocks.one_sweep_tokens(sizes, share) or 0
    if not head.has_one_sweep or tokens < min(MIN_SWEEP_TOKENS, head.tokens):
        return _recompute(head, None), 4
    return _one_sweep(head, share), 3


def _recompute(head: Head, budget: int | None) -> int | None:
    """Return the peak of recompute in bytes, or None for a budget that is too small."""
    sizes, (hidden_grad, weight_grad) = head.sizes, head.gradients
    found = blocks.planned(blocks.recompute_blocks, sizes, budget)
    if found is None:
        return None
    sums = head.fp32_sums if found.tokens < head.tokens else 0
    rows = 4 * found.tokens * head.hidden if sizes.sums and found.columns < head.width else 0
    backward = found.tokens * sizes.row(found.columns) + rows + (sums or weight_grad)
    return max(
        found.forward * sizes.row(head.width), hidden_grad + max(backward, sums + weight_grad)
    )


def _one_sweep(head: Head, budget: int | None, main_grad: bool = False) -> int | None:
    """Return the peak of one sweep in bytes, or None for a budget that is too small. Once no block
    is left, a dW that was summed in fp32 is there twice, because it is rounded."""
    sums, (hidden_grad, weight_grad) = 0 if main_grad else head.fp32_sums, head.gradients
    sizes = head.sizes._replace(weight_sums=bool(sums))
    tokens = blocks.planned(blocks.one_sweep_tokens, sizes, budget, sums)
    if tokens is None:
        return None
    weight_grad = 0 if main_grad else weight_grad
    is_summed = sums > 0 and tokens < head.tokens
    found = hidden_grad + (sums if is_summed else weight_grad)
    return found + max(tokens * sizes.row(head.width), weight_grad * is_summed)


def floor_ms(way: Way, head: Head, bandwidth: float, tflops: float) -> float:
    """Return the milliseconds below which a way cannot be, on a GPU of so many TB/s and TFLOP/s."""
    flops = way.gemms * 2 * head.tokens * head.width * head.hidden
    return 1e3 * (way.moved / (bandwidth * 1e12) + flops / (tflops * 1e12))


def report(head: Head, from_hidden: bool, bandwidth: float | None, tflops: float | None) -> str:
    """Return the table that the command prints, for a GPU of so many TB/s and TFLOP/s; None assumes
    those of a card."""
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    card = next((name for name in CARDS if name in here), "H100")
    known = CARDS[card][0], CARDS[card][1 if DTYPES[head.dtype] == 2 else 2]
    speeds = bandwidth or known[0], tflops or known[1]
    origin = ["given" if x else f"an {card}'s, assumed" for x in (bandwidth, tflops)]
    found, beyond = (
        ways(head, from_hidden),
        "hidden states and weight, with dH and dW" if from_hidden else "the logits",
    )
    times = [floor_ms(way, head, *speeds) for way in found]
    assumed = f"{speeds[0]:g} TB/s ({origin[0]}; --bandwidth)"
    if from_hidden:
        assumed += f", {speeds[1]:g} TFLOP/s ({origin[1]}; --tflops)"
    padded = "" if head.padded_size is None else f", padded_size={head.padded_size}"
    lines = [
        f"{head.tokens} tokens x {head.vocab} ids{padded} in {head.dtype}, "
        f"{head.logits / 2**20:.0f} MiB of logits a rank",
        f"memory: the peak beyond {beyond}, and beyond a main_grad",
        f"floor: at {assumed},",
        "  without communication; one read, and recompute's floor, are of an H100",
        "",
        f"{'way':24}{'MiB':>8}{'floor ms':>10}  what to write",
        *(
            f"{w.name:24} {w.memory / 2**20:7.0f} {time:9.2f}  {w.call}"
            for w, time in zip(found, times)
        ),
        "",
        *(f"left out is {text}" for text in left_out(head, from_hidden)),
        f"least memory: {min(found, key=lambda way: way.memory).name}",
        f"shard = VocabShard.from_group({'None' if head.tp == 1 else 'group'}, "
        f"vocab_size={head.vocab}{padded})",
    ]
    if head.tp > 1:
        made = f"head = VocabParallelHead({head.hidden}, shard, weight=weight)  # sums dH over the ranks"
        lines += [made] * from_hidden
        lines.append(
            "gather: the host's, of all columns, whose backward gives each rank the gradient of "
            "its own"
        )
    return "\n".join(lines)


def add_command(commands) -> argparse.ArgumentParser:
    """Add `plan` to the commands of an argparse parser; return the parser of its options."""
    parser = commands.add_parser(
        "plan",
        help="memory and time of every way to a loss",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument("--tokens", type=positive, required=True, help="of a step, on a rank")
    parser.add_argument(
        "--vocab",
        type=positive,
        required=True,
        help="ids of the true vocabulary, such as len(tokenizer), without padding",
    )
    parser.add_argument(
        "--padded-size",
        type=positive,
        help="columns of all ranks, where logits have padding, too (default --vocab)",
    )
    parser.add_argument(
        "--hidden",
        type=positive,
        help=f"size of the hidden states, for --from hidden (default {HIDDEN})",
    )
    parser.add_argument(
        "--tp", type=positive, default=1, help="ranks that share the vocabulary (default 1)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bf16", help="of logits and weights (default bf16)"
    )
    parser.add_argument(
        "--from", choices=("logits", "hidden"), default="logits", dest="start", help="what is given"
    )
    parser.add_argument(
        "--bandwidth",
        type=terabytes,
        metavar="TB/S",
        help="of the GPU's memory (default: NVIDIA's number for this GPU, or an H100)",
    )
    parser.add_argument(
        "--tflops",
        type=teraflops,
        help="of the GPU's products of this dtype, for --from hidden (default as --bandwidth)",
    )
    return parser


def run(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Print the report that parsed arguments ask for; under torchrun, on rank 0 alone."""
    from_hidden = given.start == "hidden"
    for name in FROM_HIDDEN:
        if getattr(given, name) is not None and not from_hidden:
            parser.error(f"argument --{name}: needs --from hidden, got --from {given.start}")
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK") != "0":
        return
    hidden = given.hidden or HIDDEN
    head = Head(given.tokens, given.vocab, given.tp, given.dtype, hidden, given.padded_size)
    if head.columns < head.vocab:
        parser.error(
            f"argument --padded-size: expected --vocab {head.vocab} or more, got {head.columns}"
        )
    if head.tp > head.vocab:
        parser.error(f"argument --tp: expected at most --vocab {head.vocab} ranks, got {head.tp}")
    logits = head.tokens * head.width
    if logits > MOST_LOGITS:
        parser.error(
            "arguments --tokens and --vocab: expected the logits of one step on a rank, at most "
            f"{MOST_LOGITS}, got {head.tokens} tokens x {head.width} columns = {logits}"
        )
    print(report(head, from_hidden, given.bandwidth, given.tflops))


def terabytes(text: str) -> float:
    """TB/s that a GPU's memory can have, for argparse: neither GB/s nor PB/s."""
    return number_between(0.01, 100, text, "TB/s")


def teraflops(text: str) -> float:
    """TFLOP/s that a GPU can have, for argparse: neither GFLOP/s nor PFLOP/s."""
    return number_between(1, 10_000, text, "TFLOP/s")


def number_between(least: float, most: int, text: str, unit: str) -> float:
    """The number in a text; ArgumentTypeError unless it is between two others."""
    with contextlib.suppress(ValueError):
        if least <= (number := float(text)) <= most:
            return number
    raise argparse.ArgumentTypeError(f"expected {unit}, from {least:g} to {most}, got {text!r}")


def positive(text: str) -> int:
    """A positive whole number that a size of one step on a rank can be, for argparse."""
    if text.isdecimal() and 1 <= int(text) <= MOST:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number from 1 to {MOST}, got {text!r}")


if __name__ == "__main__":
    options = shlex.join(sys.argv[1:])
    Parser("tp_headloss.plan").error(f"expected python -m tp_headloss plan {options}")
