"""Compile every kernel variant ahead of time: `python tests/aot.py 80 90 100` (compute capabilities; needs no GPU).

A variant is a combination of flags and optional pointers; those a launcher can produce are covered pairwise or better,
for every dtype. Run without TRITON_INTERPRET, in a process of its own. Prints one line per failure and a total.
"""

import itertools
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tp_headloss.backends import kernels
from tp_headloss.backends.triton import MERGE, SUMS, SUMS_GRADIENT, gradient_launch, statistics_launch

DTYPES = ("bf16", "fp16", "fp32")
WANTS = [("entropy",), ("total",), ("argmax",), ("entropy", "total", "argmax"), ()]
OF_TEACHER = [(), ("forward",), ("reverse",), ("forward", "moment"), ("forward", "reverse", "moment")]


def wants_of_teacher(of_teacher):
    return {f"WANT_{name.upper()}": name in of_teacher for name in ("forward", "reverse", "moment")}


def pairwise(*axes):
    """Few rows of the product that together show every pair of values of every two axes."""
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in itertools.product(*axes)}
    missing, rows = set().union(*pairs.values()), []
    while missing:
        rows.append(max(pairs, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[rows[-1]]
    return rows


def compile_kernel(kernel, aligned: bool, warps: int, arguments: dict, capability: int):
    """arguments: name -> type string ("*bf16", "i32"), or a constant for constexpr and None pointers."""
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if isinstance(value, (str, tuple)):
            signature[name] = value
            if aligned and (value[0][0] == "*" or name in ("width", "chunk_size", "x_row", "dx_row", "t_row")):
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name], constants[(i,)] = "constexpr", value
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


def statistics_variants():
    optional = (True, False)
    for dtype, want, of_teacher, labels, bias, temperature, cap, aligned in pairwise(
        DTYPES, WANTS, OF_TEACHER, ("*i64", "*i32", None), optional, optional, optional, optional
    ):
        launch = statistics_launch(16032, bool(of_teacher))
        yield kernels.statistics_kernel, aligned, launch.warps, {
            "packets_ptr": "*fp32", "x_ptr": f"*{dtype}", "labels_ptr": labels, "bias_ptr": "*fp32" if bias else None,
            "temperature_ptr": "*fp32" if temperature else None, "weight_ptr": "*fp32" if "total" in want else None,
            "teacher_ptr": f"*{dtype}" if of_teacher else None, "t_row": "i32", "t_column": 1,
            "scales_ptr": "*fp32" if of_teacher and temperature else None, "SCALED": bool(of_teacher) and temperature,
            "teacher_scale": "fp32", "student_scale": "fp32", **wants_of_teacher(of_teacher),
            "turns_ptr": "*i32" if bias else None, "slot": "i32",
            "n_rows": "i32", "x_row": "i64" if cap else "i32", "x_column": 1, "start": "i32", "valid_width": "i32",
            "width": "i32", "chunk_size": "i32", "chunks": "i32", "ignore_index": "i32", "pre": "fp32", "post": "fp32",
            "HAS_SCALE": temperature or cap, "HAS_CAP": cap, "WANT_ENTROPY": "entropy" in want,
            "WANT_TOTAL": "total" in want, "WANT_ARGMAX": "argmax" in want, "BLOCK": launch.block,
        }  # fmt: skip


def merge_variants():
    for labels, want, of_teacher, scales, packets in pairwise(
        ("*i64", "*i32", None), WANTS, OF_TEACHER, ("*fp32", None), (8, 3)
    ):
        yield kernels.merge_kernel, True, MERGE.warps, {
            "merged_ptr": "*fp32", "values_ptr": "*fp32", "valid_ptr": "*i1" if labels else None,
            "argmax_ptr": "*i64" if "argmax" in want else None,
            "hits_ptr": "*i1" if "argmax" in want and labels else None, "packets_ptr": "*fp32", "labels_ptr": labels,
            "peers_ptr": "*i64" if packets == 8 else None, "turns_ptr": "*i32" if packets == 8 else None,
            "slot": "i32",
            "scales_ptr": scales if of_teacher else None, "student_scale": "fp32", **wants_of_teacher(of_teacher),
            "n_rows": "i32", "PACKETS": packets, "CHUNKS": 2,
            "WANT_ENTROPY": "entropy" in want, "WANT_TOTAL": "total" in want, "BLOCK": MERGE.block,
        }  # fmt: skip


def gradient_variants():
    optional = (True, False)
    grads = ("g_lse_ptr", "g_log_prob_ptr", "g_entropy_ptr", "g_total_ptr", "g_forward_ptr", "g_reverse_ptr")
    for dtype, labels, bias, temperature, cap, aligned, *has in pairwise(
        DTYPES, ("*i64", "*i32", None), optional, optional, optional, optional, *([optional] * 6)
    ):
        launch = gradient_launch(32064, has[2], has[4], has[5])
        yield kernels.gradient_kernel, aligned, launch.warps, {
            "dx_ptr": f"*{dtype}", "x_ptr": f"*{dtype}", "labels_ptr": labels, "bias_ptr": "*fp32" if bias else None,
            "temperature_ptr": "*fp32" if temperature else None, "weight_ptr": "*fp32" if has[3] and bias else None,
            "merged_ptr": "*fp32", "teacher_ptr": "*bf16" if has[4] or has[5] else None, "t_row": "i32", "t_column": 1,
            "scales_ptr": "*fp32" if temperature else None, "SCALED": temperature, "TEACHER": 4,
            "teacher_scale": "fp32", "student_scale": "fp32",
            **{g: "*fp32" if h and (labels or g != grads[1]) else None for g, h in zip(grads, has)},
            "n_rows": "i32", "dx_row": "i32", "dx_column": 1, "x_row": "i32", "x_column": 1, "start": "i32",
            "valid_width": "i32", "width": "i32", "pre": "fp32", "post": "fp32",
            "HAS_SCALE": temperature or cap, "HAS_CAP": cap, "PADDED": bias, "BLOCK": launch.block,
        }  # fmt: skip


def sums_variants():
    for values, squares, weighted, denominator in pairwise(
        (("*fp32",), ("*fp32", "*fp32", "*i1")), (0, 2), (True, False), (True, False)
    ):
        shared = {
            "divisor_ptr": "*fp32", "value_ptrs": values, "valid_ptr": "*i1",
            "weight_ptr": "*fp32" if weighted else None,
            "coefficients": ("fp32",) * min(2, len(values)), "n_rows": "i32", "SQUARES": squares, "NEGATIVES": 1,
        }  # fmt: skip
        yield kernels.sums_kernel, False, SUMS.warps, shared | {
            "sums_ptr": "*fp32", "loss_ptr": "*fp32", "denominator_ptr": "*fp32" if denominator else None,
            "denominator": "fp32", "BY_COUNT": weighted, "BLOCK": SUMS.block,
        }  # fmt: skip
        yield kernels.sums_gradient_kernel, False, SUMS_GRADIENT.warps, shared | {
            "g_ptr": "*fp32", "upstream_ptr": "*fp32", "value_ptrs": values[:2],
            "BLOCK": SUMS_GRADIENT.block,
        }  # fmt: skip


def main(capabilities):
    compiled, failures = 0, []
    for kernel, aligned, warps, arguments in itertools.chain(
        statistics_variants(), merge_variants(), gradient_variants(), sums_variants()
    ):
        for capability in capabilities:
            try:
                compile_kernel(kernel, aligned, warps, arguments, capability)
                compiled += 1
            except Exception as error:  # every failure is listed before the exit
                failures.append(f"{kernel.__name__} sm_{capability} {arguments}: {type(error).__name__}: {error}")
    print(*failures, f"compiled {compiled}, failed {len(failures)}", sep="\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main([int(a) for a in sys.argv[1:]]))
