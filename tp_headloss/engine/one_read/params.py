"""The kernel's argument, and the numbers that Python and CUDA must agree on.

`Params` has the fields of the struct in `params.cuh`, in the same order. The source that
`agreement` writes is compiled after the kernel's, and does not compile where the two differ.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

# Statistics that a kernel is compiled with, in capitals.
DIVERGENCES = "forward_kl", "reverse_kl"
# Those that need a second round of packets, of which a call has those of one kind.
SECOND_ROUNDS = ("jsd",), ("total_variation", "overlap")
MIXTURES = *SECOND_ROUNDS[0], *SECOND_ROUNDS[1]
OF_TEACHER = *DIVERGENCES, "teacher_entropy", *MIXTURES  # whose logits are read, too
OF_ENTRIES = "topk_forward_kl", "vocab_forward_kl", "tail_log_mass"  # of a top-K teacher
FLAGS = "entropy", "argmax", "total", *OF_TEACHER, *OF_ENTRIES
# Statistics of a loss that one launch computes.
TERMS = "lse", "log_prob", "entropy", "total", *DIVERGENCES, *OF_ENTRIES, *MIXTURES
# Statistics that a row function is given, in the order of `row_of`.
KNOWN = *TERMS, "mass", "teacher_mass", "teacher_entropy"

RANKS, THREADS = 8, 1024  # ranks, at most, and threads of a program
# slots, values that are summed, inputs of a row function, entries of a token, at most
SLOTS, VALUES, GIVENS, ENTRIES = 10, 6, 8, 128


class Cuts(NamedTuple):
    """How rows are cut into leaves and items; the leaves depend on the vocabulary alone."""

    chunk: int  # vectors of a chunk
    cuts: int  # log2 of its leaves
    leaves: int  # of an item, a power of 2
    pieces: int  # items of a row
    slots: int
    slot_bytes: int


# Addresses of tensors: those of each call, and those of what is allocated for it. After them stand
# `VALUES` values that are summed, a row function's results, and its `GIVENS` inputs.
CALLS = (
    "logits",
    "gradient",
    "labels",
    "weight",
    "temperatures",
    "teacher",
    "scales",
    "entries",
    "entry_log_probs",
    "upstream",
    "forecast",
    "denominator",
)
OUTPUTS = (
    "loss",
    "sums",
    "inverse",
    "lse",
    "log_prob",
    "target_logit",
    "owners",
    "valid",
    "entropy",
    "mean",
    "total",
    "mass",
    "argmax",
    "hits",
    "forward_kl",
    "reverse_kl",
    "teacher_entropy",
    "student_sum",
    "teacher_shift",
    "teacher_sum",
    "gap",
    "topk_forward_kl",
    "vocab_forward_kl",
    "tail_log_mass",
    "teacher_mass",
    "topk_shift",
    "topk_sum",
    "topk_mass",
    "topk_gap",
    "rest_shift",
    "rest_sum",
    "rest_mean",
    "inside",
    "outside",
    "jsd",
    "jsd_mean",
    "total_variation",
    "total_variation_mean",
    "overlap",
    "overlap_mean",
    "shift",
    "sum",
    "others",
    "target",
)
N_ADDRESSES = len(CALLS) + len(OUTPUTS) + VALUES + 1 + GIVENS
ADDRESSES = struct.Struct(f"{N_ADDRESSES}Q")  # a third of the time that ctypes takes for them

# Fields of the struct that are pointers -> how many there are of each.
POINTERS = dict.fromkeys((*CALLS, *OUTPUTS), 1)
POINTERS |= {"values": VALUES, "found": 1, "given": GIVENS, "control": 1, "failed": 1}

# Fields after the addresses -> their types.
NUMBERS: dict[str, Any] = {
    "half": ctypes.c_int64,
    "timeout": ctypes.c_uint64,
    "rank": ctypes.c_int64,
    "start": ctypes.c_int64,
    "ignore_index": ctypes.c_int64,
    "stride": ctypes.c_int64,
    "gradient_stride": ctypes.c_int64,
    "teacher_stride": ctypes.c_int64,
    "number": ctypes.c_double,
    **{f"{name}_{kind}": ctypes.c_float for name in TERMS for kind in ("factor", "square")},
    "coefficients": ctypes.c_float * VALUES,
    "before": ctypes.c_float,
    "scale": ctypes.c_float,
    "teacher_scale": ctypes.c_float,
    "student_scale": ctypes.c_float,
    "beta": ctypes.c_float,
    "n_values": ctypes.c_int,
    "squares": ctypes.c_int,
    "negatives": ctypes.c_int,
    "bools": ctypes.c_int,
    "rows": ctypes.c_int,
    "width": ctypes.c_int,
    "valid_width": ctypes.c_int,
    "padding": ctypes.c_int,
    "wide_labels": ctypes.c_int,
    "n_entries": ctypes.c_int,
    **dict.fromkeys(Cuts._fields, ctypes.c_int),
    "ranks": ctypes.c_int,
}


class Params(ctypes.Structure):
    """The kernel's argument. `memory` holds the addresses of `control` and `failed` and those of
    every rank's packets."""

    _fields_ = [
        ("addresses", ctypes.c_uint64 * N_ADDRESSES),
        ("memory", ctypes.c_uint64 * (2 + RANKS)),
        *NUMBERS.items(),
    ]


C_NAMES: dict[Any, str] = {
    ctypes.c_int: "int",
    ctypes.c_int64: "i64",
    ctypes.c_uint64: "u64",
    ctypes.c_float: "float",
    ctypes.c_double: "double",
    ctypes.c_float * VALUES: f"float[{VALUES}]",
}


TYPES = """
template <class A, class B> constexpr bool SAME = false;
template <class A> constexpr bool SAME<A, A> = true;
template <class A> constexpr int POINTERS = 0;
template <class A> constexpr int POINTERS<A*> = 1;
template <class A, decltype(sizeof(0)) N> constexpr int POINTERS<A* [N]> = N;
"""


def words_of(want: Iterable[str], is_tempered: bool, is_float32: bool) -> int:
    """16-byte stores of a packet in calls that want these optional statistics. is_tempered: the
    student has another temperature beside a teacher. is_float32: the logits are fp32."""
    wanted = {*want}
    of_teacher, of_entries = wanted & {*OF_TEACHER}, wanted & {*OF_ENTRIES}
    has_others = of_teacher | of_entries < wanted
    is_beside = is_tempered or "reverse_kl" in wanted
    has_more = is_float32 or "teacher_entropy" in wanted
    stores = 1 + has_others + (1 + is_beside if of_teacher else 0) + (2 if of_entries else 0)
    return stores + has_more + (not wanted.isdisjoint(MIXTURES))


def agreement(*flags: str) -> str:
    """C++20 that compiles only where the struct and the numbers in CUDA are those of this module.
    flags: what the kernel is compiled with.

    NVRTC 13.0 has no offsetof. But fields of the same types in the same order lie at the same
    offsets, and initializers that name fields in another order do not compile.
    """
    want = {flag.lower() for flag in flags} & {*FLAGS}
    numbers = {
        "SLOTS": SLOTS,
        "RANKS": RANKS,
        "VALUES": VALUES,
        "GIVENS": GIVENS,
        "ENTRIES": ENTRIES,
        "SLOPES": len(TERMS),
        "KNOWN": len(KNOWN),
        "WORDS": words_of(want, "TEMPERED" in flags, "FLOAT32" in flags),
        "WARPS * 32": THREADS,
        "sizeof(Params)": ctypes.sizeof(Params),
    }
    lines = [f'static_assert({name} == {value}, "{name}");' for name, value in numbers.items()]
    for name, count in POINTERS.items():
        lines.append(f'static_assert(POINTERS<decltype(Params::{name})> == {count}, "{name}");')
    types = {"packets": f"u64[{RANKS}]"} | {name: C_NAMES[kind] for name, kind in NUMBERS.items()}
    for name, expected in types.items():
        lines.append(f'static_assert(SAME<decltype(Params::{name}), {expected}>, "{name}");')
    initializers = ", ".join(f".{name} = {{}}" for name in (*POINTERS, *types))
    lines.append(f"constexpr Params ORDER{{{initializers}}};")
    return TYPES + "\n".join(lines) + "\n"
