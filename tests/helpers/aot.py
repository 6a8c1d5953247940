"""Compile every kernel variant ahead of time: `python tests/aot.py 80 90 100` (compute capabilities; needs no GPU).

A variant is a combination of flags and optional pointers; those a launcher can produce are covered pairwise or better,
for every dtype; sm_90 gets half of each kernel's variants, the others share the rest (`--all`: every capability gets
all of them). Run without TRITON_INTERPRET, in a process of its own. Prints one line per failure, what the kernels take
at most, and a total. A variant that spills registers, or takes more shared memory than every GPU gives without asking,
is a failure.
"""

import collections
import itertools
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tp_headloss.backends import kernels, sums_kernels, topk_kernels
from tp_headloss.backends.triton import (
    MERGE,
    SCALE,
    SUMS,
    SUMS_GRADIENT,
    entries_launch,
    gradient_launch,
    statistics_launch,
)

SHARED_LIMIT = 48 << 10  # bytes
# Bytes of the stack, where spilled registers go. A version of Triton may spill a few where a kernel has every optional
# part; all statistics of a whole teacher at once have more per-token coefficients than registers
SPILL_LIMIT, CROWDED_SPILL_LIMIT = 16, 128
LOOP_LIMIT = 100_000  # for 512 packets; a loop takes 76,000 at most
DTYPES = ("bf16", "fp16", "fp32")
# none, of a teacher's logits, of its entries: the sum of the vocabulary, the tail with and without its entropy
OF_TEACHER = [
    (), ("forward",), ("reverse",), ("forward", "moment"), ("forward", "reverse", "moment"), ("later",),
    ("student",), ("tail",), ("tail", "moment"), ("entries",),
]  # fmt: skip
OF_TOPK = OF_TEACHER[6:]


def wants_of_teacher(of_teacher):
    wants = {f"WANT_{name.upper()}": name in of_teacher for name in ("forward", "reverse", "moment")}
    return wants | {"WANT_STUDENT": "student" in of_teacher, "TOPK_ROWS": 5 * (of_teacher in OF_TOPK)}


def pairwise(*axes):
    """Few rows of the product that together show every pair of values of every two axes."""
    cells = [[(i, value) for value in axis] for i, axis in enumerate(axes)]
    pairs = (frozenset(pair) for two in itertools.combinations(cells, 2) for pair in itertools.product(*two))
    missing, rows = dict.fromkeys(pairs), []
    while missing:
        row = dict(next(iter(missing)))
        for i in set(range(len(axes))) - set(row):
            new = {value: sum(frozenset([(i, value), cell]) in missing for cell in row.items()) for value in axes[i]}
            row[i] = max(new, key=new.get)
        for pair in itertools.combinations(row.items(), 2):
            missing.pop(frozenset(pair), None)
        rows.append([row[i] for i in range(len(axes))])
    return rows


def compile_kernel(kernel, aligned: bool, warps: int, arguments: dict, capability: int):
    """arguments: name -> type string ("*bf16", "i32"), or a constant for constexpr and None pointers."""
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if isinstance(value, tuple):
            signature[name] = tuple("constexpr" if x is None else x for x in value)
            constants |= {(i, j): None for j, x in enumerate(value) if x is None}
        elif isinstance(value, str):
            signature[name] = value
            if aligned and (value[0] == "*" or name in ("width", "chunk_size", "x_row", "dx_row", "t_row")):
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name], constants[(i,)] = "constexpr", value
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


class Resources(NamedTuple):
    registers: int  # per thread
    stack: int  # bytes per thread
    shared: int  # bytes per program
    code: int  # characters of PTX, to which the time of compilation is proportional

    @classmethod
    def of(cls, compiled) -> "Resources":
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = (int(re.search(rf"{name}:(\d+)", report)[1]) for name in ("REG", "STACK"))
        return cls(registers, stack, compiled.metadata.shared, len(compiled.asm["ptx"]))

    def check(self, arguments: dict):
        spills = CROWDED_SPILL_LIMIT if crowded(arguments) else SPILL_LIMIT
        if self.shared > SHARED_LIMIT or self.stack > spills:
            raise ValueError(f"at most {SHARED_LIMIT} bytes shared and {spills} spilled, got {self}")
        if arguments.get("PACKETS", 0) > 8 and self.code > LOOP_LIMIT:
            raise ValueError(f"a merge of many ranks must be a loop of at most {LOOP_LIMIT} characters, got {self}")


def crowded(arguments: dict) -> bool:
    of_teacher = all(arguments.get(f"WANT_{name}") for name in ("FORWARD", "REVERSE", "MOMENT"))
    return of_teacher or sum(g is not None for g in arguments.get("grads", ())) >= 7


def statistics_variants():
    for dtype, of_teacher, labels, entropy, total, argmax, bias, temperature, cap, aligned in pairwise(
        DTYPES, OF_TEACHER, ("*i64", "*i32", None), *([(True, False)] * 7)
    ):
        whole, entries = bool(of_teacher) and of_teacher not in OF_TOPK, of_teacher in OF_TOPK
        launch = statistics_launch(16032, whole or "tail" in of_teacher)
        scaled = bool(of_teacher) and temperature
        shared = {
            "packets_ptr": "*fp32", "x_ptr": f"*{dtype}", "labels_ptr": labels, "bias_ptr": "*fp32" if bias else None,
            "temperature_ptr": "*fp32" if temperature else None, "scales_ptr": "*fp32" if scaled else None,
            "turns_ptr": "*i32" if bias else None, "slot": "i32", "n_entries": "i32",
            "n_rows": "i32", "x_row": "i64" if cap else "i32", "x_column": 1, "start": "i32", "valid_width": "i32",
            "width": "i32", "chunk_size": "i32", "chunks": "i32", "ignore_index": "i32", "pre": "fp32", "post": "fp32",
            "teacher_scale": "fp32", "student_scale": "fp32", "beta": "fp32", "merged_ptr": "*fp32",
            "HAS_SCALE": temperature or cap, "HAS_CAP": cap, "SCALED": scaled,
        }  # fmt: skip
        teacher = {"teacher_ptr": f"*{dtype}" if whole else None, "t_row": "i32", "t_column": 1}
        yield kernels.statistics_kernel, aligned, launch.warps, shared | teacher | wants_of_teacher(of_teacher) | {
            "weight_ptr": "*fp32" if total else None,
            "entries_ptr": "*i32" if "tail" in of_teacher else None, "WANT_ENTROPY": entropy,
            "WANT_TOTAL": total, "WANT_ARGMAX": argmax, "BLOCK": launch.block,
        }  # fmt: skip
        if whole:
            yield kernels.divergence_kernel, aligned, launch.warps, shared | teacher | {
                "WANT_JSD": "moment" not in of_teacher, "WANT_VARIATION": "forward" not in of_teacher or bias,
                "TEACHER": 4, "BLOCK": launch.block,
            }  # fmt: skip
        if entries:
            launch = entries_launch(64)
            shared |= {"entries_ptr": "*i32", "log_tau_ptr": "*fp32", "BLOCK": launch.block}
            yield topk_kernels.statistics_kernel, aligned, launch.warps, shared | {"ROWS": 9}
            yield topk_kernels.divergence_kernel, aligned, launch.warps, shared | {
                "WANT_TOPK": "student" not in of_teacher, "WANT_VOCAB": "entries" not in of_teacher, "MERGED": 4,
            }  # fmt: skip
            ids, log_probs, mask = labels or "*i64", f"*{dtype}", "*i1" if bias else None
            yield topk_kernels.entries_kernel, False, 1, {
                "ids_out_ptr": "*i32", "log_tau_ptr": "*fp32", "ids_ptr": ids, "log_probs_ptr": log_probs,
                "mask_ptr": mask, "scale_ptr": shared["scales_ptr"], "n_entries": "i32", "vocab_size": "i32",
                "scale": "fp32", "RENORMALIZE": cap, "SLICE": 32, "BLOCK": 64,
            }  # fmt: skip


def merge_variants():
    for labels, of_teacher, scales, packets, entropy, total, argmax in pairwise(
        ("*i64", "*i32", None), OF_TEACHER, ("*fp32", None), (8, 3, 512), *([(True, False)] * 3)
    ):
        shared = {
            "merged_ptr": "*fp32", "values_ptr": "*fp32", "packets_ptr": "*fp32",
            "peers_ptr": "*i64" if packets != 3 else None, "turns_ptr": "*i32" if packets != 3 else None,
            "slot": "i32", "scales_ptr": scales if of_teacher else None, "student_scale": "fp32",
            **wants_of_teacher(of_teacher), "n_rows": "i32", "PACKETS": packets, "CHUNKS": 2, "BLOCK": MERGE.block,
        }  # fmt: skip
        yield kernels.merge_kernel, True, MERGE.warps, shared | {
            "valid_ptr": "*i1" if labels else None, "argmax_ptr": "*i64" if argmax else None,
            "hits_ptr": "*i1" if argmax and labels else None, "labels_ptr": labels,
            "HAS_TEACHER": bool(of_teacher) and of_teacher not in OF_TOPK,
            "TAIL_ROWS": len(of_teacher) + 1 if "tail" in of_teacher else 0,
            "WANT_ENTROPY": entropy, "WANT_TOTAL": total,
        }  # fmt: skip
        if of_teacher in OF_TOPK:
            tail, inside = "tail" in of_teacher, "entries" not in of_teacher
            yield topk_kernels.merge_kernel, True, MERGE.warps, shared | {
                "ROWS": 11, "TAIL": 4, "MERGED": 5, "VALUES": 4, "HAS_TAIL": tail, "WANT_FORWARD": labels is not None,
                "WANT_REVERSE": scales is None, "WANT_INSIDE": inside, "WANT_OUTSIDE": tail,
            }  # fmt: skip


def gradient_variants():
    optional = (True, False)
    for dtype, labels, bias, temperature, cap, aligned, sparse, *has in pairwise(
        DTYPES, ("*i64", "*i32", None), optional, optional, optional, optional, (None, True, False), *([optional] * 8)
    ):
        launch = gradient_launch(32064, has[2], has[4], has[5], has[6] or has[7])
        launch = entries_launch(64) if sparse else launch
        whole = any(has[4:]) and sparse is None
        grads = tuple("*fp32" if h and (labels or i != 1) and (i < 4 or whole) else None for i, h in enumerate(has))
        shared = {
            "x_ptr": f"*{dtype}", "bias_ptr": "*fp32" if bias else None,
            "temperature_ptr": "*fp32" if temperature else None, "merged_ptr": "*fp32", "grads": grads,
            "scales_ptr": "*fp32" if temperature else None, "SCALED": temperature, "n_entries": "i32",
            "n_rows": "i32", "x_row": "i32", "x_column": 1, "start": "i32", "valid_width": "i32", "width": "i32",
            "pre": "fp32", "post": "fp32", "teacher_scale": "fp32", "student_scale": "fp32", "beta": "fp32",
            "HAS_SCALE": temperature or cap, "HAS_CAP": cap,
        }  # fmt: skip
        yield kernels.gradient_kernel, aligned, launch.warps, shared | {
            "dx_ptr": f"*{dtype}", "labels_ptr": labels, "weight_ptr": "*fp32" if has[3] and bias else None,
            "teacher_ptr": "*bf16" if whole else None, "t_row": "i32", "t_column": 1,
            "rest_ptr": "*fp32" if sparse is False else None,
            "entries_ptr": "*i32" if sparse else None, "extra_ptr": "*fp32" if sparse else None,
            "dx_row": "i32", "dx_column": 1, "TEACHER": 4, "JSD": 8, "VARIATION": 9,
            "PADDED": bias, "BLOCK": launch.block,
        }  # fmt: skip
        if sparse is False:
            launch = entries_launch(64)
            yield topk_kernels.gradient_kernel, aligned, launch.warps, shared | {
                "extra_ptr": "*fp32", "picked_ptr": f"*{dtype}", "rest_ptr": "*fp32" if bias else None,
                "entries_ptr": "*i32", "log_tau_ptr": "*fp32", "HAS_TAIL": cap,
                "g_lse_ptr": grads[0], "AS_LSE": not cap and not temperature, "MERGED": 5, "TOPK_JSD": 14,
                "VOCAB_JSD": 15, "grads": tuple("*fp32" if h else None for h in has[:7]), "BLOCK": launch.block,
            }  # fmt: skip


def sums_variants():
    for values, squares, weighted, denominator in pairwise(
        (("*fp32",), ("*fp32", "*fp32", "*i1")), (0, 2), (True, False), (True, False)
    ):
        shared = {
            "divisor_ptr": "*fp64", "value_ptrs": values, "valid_ptr": "*i1",
            "weight_ptr": "*fp32" if weighted else None,
            "coefficients": ("fp32",) * min(2, len(values)), "n_rows": "i32", "SQUARES": squares, "NEGATIVES": 1,
        }  # fmt: skip
        yield sums_kernels.sums_kernel, False, SUMS.warps, shared | {
            "sums_ptr": "*fp32", "loss_ptr": "*fp32", "denominator_ptr": "*fp64" if denominator else None,
            "denominator": "fp32", "BY_COUNT": weighted, "BLOCK": SUMS.block,
        }  # fmt: skip
        yield sums_kernels.sums_gradient_kernel, False, SUMS_GRADIENT.warps, shared | {
            "g_ptr": "*fp32", "upstream_ptr": "*fp32", "value_ptrs": values[:2],
            "BLOCK": SUMS_GRADIENT.block,
        }  # fmt: skip


def scale_variants():
    for out, x, aligned in pairwise(DTYPES, DTYPES, (True, False)):
        pointers = {"out_ptr": f"*{out}", "x_ptr": f"*{x}", "factor_ptr": "*fp32"}
        yield sums_kernels.scale_kernel, aligned, SCALE.warps, pointers | {
            "n": "i32" if aligned else "i64", "ADD": out == "fp32" and aligned, "BLOCK": SCALE.block,
        }  # fmt: skip


def main(capabilities, everything: bool):
    compiled, failures, seen, taken = 0, [], collections.defaultdict(set), collections.defaultdict(list)
    for kernel, aligned, warps, arguments in itertools.chain(
        statistics_variants(), merge_variants(), gradient_variants(), sums_variants(), scale_variants()
    ):
        variant = aligned, tuple(arguments[name] for name in kernel.arg_names)
        if variant in seen[kernel.fn]:
            continue
        seen[kernel.fn].add(variant)
        # architectures differ little for what is Triton's own, so that each variant is compiled for one of them
        shown = capabilities if everything else {(90, 80, 90, 100)[len(seen[kernel.fn]) % 4]} & set(capabilities)
        for capability in shown:
            try:
                resources = Resources.of(compile_kernel(kernel, aligned, warps, arguments, capability))
                taken[f"{kernel.fn.__module__.rsplit('.', 1)[-1]}.{kernel.__name__} sm_{capability}"].append(resources)
                resources.check(arguments)
                compiled += 1
            except Exception as error:  # every failure is listed before the exit
                failures.append(f"{kernel.__name__} sm_{capability} {arguments}: {type(error).__name__}: {error}")
    for name, each in sorted(taken.items()):
        registers, stack, shared, code = map(max, zip(*each))
        spilling = sum(r.stack > 0 for r in each)
        print(f"{name}: {len(each)} variants, at most {registers} registers, {shared} bytes shared, ", end="")
        print(f"{stack} spilled ({spilling} variants), {code >> 10} KiB of PTX")
    print(*failures, f"compiled {compiled}, failed {len(failures)}", sep="\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main([int(a) for a in sys.argv[1:] if a.isdigit()], "--all" in sys.argv))
