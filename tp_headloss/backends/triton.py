"""Launchers of the kernels: CUDA, or any device through Triton's interpreter."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

try:
    from triton import knobs
except ImportError:  # before Triton 3.4, where kernels are launched through Triton's own dispatch
    knobs = None

from ..stats import OF_TEACHER, HeadSpec, empty_outputs, flag_names
from . import kernels

INTERPRETED = not isinstance(kernels.gradient_kernel, triton.JITFunction)
# versions whose compiled kernels take the arguments that `_launch` gives them (its fast path was run on the first)
DIRECT = not INTERPRETED and (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 9)


class Launch(NamedTuple):
    block: int
    warps: int


def _cdiv(a: int, b: int) -> int:  # triton's own, also for device code, are slow to call
    return -(-a // b)


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


# Tables of scripts/tune_launch.py: H200, torch 2.11.0, triton 3.6.0, bf16, 8192 tokens, block/warps and microseconds.
# Other GPUs get the same values.


def statistics_launch(chunk_size: int, of_teacher: bool = False) -> Launch:
    """Tile of the forward. Its width decides the order of additions, so it depends on the vocabulary alone.

    One warp needs no barrier for its maxima and sums.
    2 chunks of 16032: 1024/1 137.5, 512/1 138.5, 256/1 142.8, 1024/2 163.2, 2048/4 253.9
    the same, entropy and argmax: 512/1 149.6, 256/1 164.8, 1024/1 166.9, 1024/2 236.0
    8 chunks of 4016: 512/1 141.6, 256/1 153.9, 1024/1 170.8; with entropy and argmax: 512/1 186.9, 256/1 192.6
    8 chunks of 16032: 1024/1 485.9, 512/1 488.7, 256/1 504.7; with entropy and argmax: 512/1 587.0, 256/1 627.7
    forward_kl, 2 chunks of 16032: 256/1 288.7, 512/1 289.2, 1024/1 318.7; 8 of 4016: 256/1 319.1, 512/1 336.1
    reverse_kl, 2 chunks of 16032: 256/1 320.7, 512/1 338.2, 128/1 396.9; 8 of 4016: 256/1 358.3, 128/1 413.7
    """
    return Launch(min(256 if of_teacher else 512, max(128, _next_power_of_2(chunk_size))), 1)


def gradient_launch(width: int, entropy: bool, forward_kl: bool = False, reverse_kl: bool = False) -> Launch:
    """Tile of the backward.

    32064 wide: 4096/4 257.1, 4096/8 257.9, 2048/4 258.4, 1024/2 259.4, 1024/4 289.9, 512/1 319.6
    the same, with entropy: 4096/4 262.9, 8192/8 264.2, 2048/4 272.4, 1024/2 273.1
    128256 wide: 2048/4 988.8, 1024/2 989.0, 4096/4 994.3; with entropy: 4096/4 1004.7, 2048/4 1039.2
    8032 wide: 2048/4 70.0, 4096/4 71.1; with entropy: 4096/4 72.7, 2048/4 73.8
    32064 wide, with forward_kl: 512/1 419.0, 1024/4 424.1, 2048/8 425.7, 4096/4 432.3, 2048/4 441.3
    32064 wide, with reverse_kl: 4096/4 443.5, 1024/4 454.4, 2048/8 462.5, 512/1 466.0, 2048/4 469.3
    """
    if forward_kl and not entropy and not reverse_kl:
        return Launch(min(512, max(256, _next_power_of_2(width))), 1)
    return Launch(min(4096 if entropy or reverse_kl else 2048, max(256, _next_power_of_2(width))), 4)


MERGE = Launch(64, 2)  # 8 packets: 32/1 7.7, 128/4 8.6, 64/2 8.7; with entropy and argmax: 64/2 8.0, 32/1 8.5
# The only program: its time is the latency of its loads, and wider ones spill.
SUMS = Launch(2048, 16)  # 1 value: 8192/32 6.6, 2048/16 8.2; 5 values: 2048/16 10.6, 4096/32 15.1, 8192/32 28.4
SUMS_GRADIENT = Launch(1024, 4)  # 1 value: 512/4 4.1, 1024/4 4.9; 3 values: 1024/4 5.2, 512/4 5.5


_compiled: dict = {}


def _observed() -> bool:
    """A profiler hooked into Triton's dispatch."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


def _size(number: int):
    """What Triton compiles into a kernel about an integer: whether it is 1 or a multiple of 16, and its type."""
    return number if number == 1 else (number % 16 == 0, number >= 2**31)


def _kind(tensor):
    """What it compiles about a pointer."""
    return None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16)


def _type(tensor):
    """The same for vectors that are read one by one or under a mask that was itself loaded, never in wide accesses:
    rows of [K, N] are aligned or not, as N goes, and it makes no difference to them."""
    return tensor if tensor is None else tensor.dtype


def _launch(kernel, programs: int, variant: tuple, launch: Launch, *arguments):
    """kernel[(programs,)](*arguments, launch.block) on the device of the first argument.

    Triton's own dispatch takes longer than most of these kernels, so what was launched before is launched again
    directly: a `variant` with the same kernel, launch parameters and device is what Triton would not compile anew.
    """
    device = arguments[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch(kernel, programs, variant, launch, *arguments)
    if not DIRECT or _observed():
        kernel[(programs,)](*arguments, launch.block, num_warps=launch.warps, enable_fp_fusion=True)
        return
    key = kernel, device.index, launch, variant
    compiled = _compiled.get(key)
    if compiled is None:
        if len(_compiled) >= 4096:  # a temperature that changes with every step, say
            _compiled.clear()
        result = kernel[(programs,)](*arguments, launch.block, num_warps=launch.warps, enable_fp_fusion=True)
        _compiled[key] = result.run, result.function, result.packed_metadata
        return
    run, function, metadata = compiled
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments, launch.block)


def _factors(spec: HeadSpec, has_temperatures: bool) -> tuple[float, float, bool, bool]:
    """pre, post, HAS_SCALE, HAS_CAP: the factors before and after the softcap."""
    if spec.softcap:
        return spec.scale / spec.softcap, spec.softcap / spec.temperature, True, True
    pre = spec.scale / spec.temperature
    return pre, 1.0, has_temperatures or pre != 1.0, False


def _scaled(spec: HeadSpec, scales) -> bool:
    """Whether teacher or student are multiplied by anything at the teacher's side."""
    return scales is not None or spec.teacher_scale != 1.0 or spec.student_scale != 1.0


def _strides(tensor) -> tuple[int, int]:
    return (0, 0) if tensor is None else tensor.stride()


def shares_memory(logits) -> bool:
    """Whether packets may meet in symmetric memory."""
    return logits.is_cuda and logits.shape[0] > 0


def local_statistics(
    packets, logits, labels, bias, temperatures, total_weight, teacher, scales, spec: HeadSpec, memory=None
):
    """Logits [N, width], labels [N] -> packets [chunks, rows, N] fp32 of this rank, in `memory`'s slot if given."""
    n_rows, width = logits.shape
    if n_rows == 0:
        return
    pre, post, has_scale, has_cap = _factors(spec, temperatures is not None)
    strides = *logits.stride(), *_strides(teacher)
    vectors = labels, bias, temperatures, total_weight, teacher, scales
    _launch(
        kernels.statistics_kernel,
        n_rows * spec.chunks,
        (spec, width, memory and memory.slot, _kind(logits), *map(_size, strides), *map(_kind, vectors)),
        statistics_launch(spec.chunk_size, teacher is not None),
        packets, logits, *vectors, memory and memory.turns, memory.slot if memory else 0,
        n_rows, *strides, spec.start, spec.valid_width, width, spec.chunk_size, spec.chunks, spec.ignore_index,
        pre, post, spec.teacher_scale, spec.student_scale, has_scale, has_cap, _scaled(spec, scales),
        "entropy" in spec.want, "total" in spec.want, "argmax" in spec.want, *_wants_of_teacher(spec),
    )  # fmt: skip


def _wants_of_teacher(spec: HeadSpec) -> list[bool]:
    return [name in spec.want for name in OF_TEACHER]


def merge_packets(packets, labels, scales, spec: HeadSpec, memory=None):
    """Packets of all ranks (this rank's, whose peers' lie in `memory`) -> [merged rows, values, *flags]."""
    n_rows, has_labels = packets.shape[-1], labels is not None
    outputs = empty_outputs(packets, n_rows, has_labels, spec.want)
    flags = dict(zip(flag_names(has_labels, spec.want), outputs[2:]))
    if n_rows:
        _launch(
            kernels.merge_kernel,
            _cdiv(n_rows, MERGE.block),
            (spec, memory and memory.slot, _kind(labels), _kind(scales)),
            MERGE,
            *outputs[:2], *(flags.get(name) for name in ("valid", "argmax", "hits")), packets, labels, scales,
            memory and memory.peers, memory and memory.turns, memory.slot if memory else 0,
            n_rows, spec.student_scale, spec.packets, spec.chunks, "entropy" in spec.want, "total" in spec.want,
            *_wants_of_teacher(spec),
        )  # fmt: skip
    return outputs


def logits_gradient(
    out, logits, labels, bias, temperatures, total_weight, teacher, scales, merged, grads, spec: HeadSpec
):
    """Write d loss / d logits into `out` [N, width], which may be `logits` itself; `grads` as in the eager backend."""
    n_rows, width = logits.shape
    if logits.numel() == 0:
        return
    if INTERPRETED and out.dtype == torch.bfloat16:  # the interpreter truncates to bf16, hardware rounds
        exact = torch.empty_like(out, dtype=torch.float32)
        logits_gradient(exact, logits, labels, bias, temperatures, total_weight, teacher, scales, merged, grads, spec)
        out.copy_(exact)
        return
    launch = gradient_launch(width, *(grads[i] is not None for i in (2, 4, 5)))
    pre, post, has_scale, has_cap = _factors(spec, temperatures is not None)
    strides = *out.stride(), *logits.stride(), *_strides(teacher)
    vectors = labels, bias, temperatures, total_weight, teacher, scales
    of_teacher = len(merged) - 4 if teacher is not None else 0
    _launch(
        kernels.gradient_kernel,
        n_rows * _cdiv(width, launch.block),
        (spec, width, _kind(out), _kind(logits), *map(_size, strides), *map(_kind, vectors), *map(_type, grads)),
        launch,
        out, logits, *vectors, merged, *grads,
        n_rows, *strides, spec.start, spec.valid_width, width,
        pre, post, spec.teacher_scale, spec.student_scale, has_scale, has_cap, spec.valid_width < width,
        _scaled(spec, scales), of_teacher,
    )  # fmt: skip


def token_sums(values, valid, reduction):
    """Values [N] each -> loss [], sums [S + 1] (of each value, the count) and divisor []; see `reduce.SumsPlan`."""
    plan, weight, denominator = reduction
    sums = valid.new_empty(len(values) + 1, dtype=torch.float32)
    loss, divisor = valid.new_empty((), dtype=torch.float32), valid.new_empty((), dtype=torch.float32)
    given = denominator if isinstance(denominator, torch.Tensor) else None
    number = 1.0 if given is not None or denominator is None else float(denominator)
    _launch(
        kernels.sums_kernel,
        1,
        (plan.squares, plan.negatives, len(plan.coefficients), denominator is None,
         *map(_type, (valid, weight)), _kind(given), *map(_type, values)),
        SUMS,
        sums, divisor, loss, values, valid, weight, given, plan.coefficients, number, valid.numel(),
        plan.squares, plan.negatives, denominator is None,
    )  # fmt: skip
    return loss, sums, divisor


def token_sums_gradient(upstream, values, valid, weight, divisor, plan):
    """Gradient of the loss -> of the terms' values, [terms, N] fp32."""
    n_rows = valid.numel()
    out = valid.new_empty((len(values), n_rows), dtype=torch.float32)
    if n_rows:
        _launch(
            kernels.sums_gradient_kernel,
            _cdiv(n_rows, SUMS_GRADIENT.block),
            (plan.squares, plan.negatives, _kind(upstream), *map(_type, (valid, weight)), *map(_type, values)),
            SUMS_GRADIENT,
            out, upstream, values, valid, weight, divisor, plan.coefficients, n_rows,
            plan.squares, plan.negatives,
        )  # fmt: skip
    return out
