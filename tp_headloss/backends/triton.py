"""Launchers of the kernels: CUDA, or any device through Triton's interpreter."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from . import version_numbers

OLDEST = (3, 6)
if version_numbers(triton.__version__) < OLDEST:
    raise ImportError(
        f"the triton backend needs Triton >= 3.6, which torch >= 2.11 brings, got {triton.__version__}: upgrade "
        "torch, or use Options(backend='torch')"
    )

# ruff: noqa: E402
from triton import knobs

from .. import stats
from ..stats import (
    OF_PAIR,
    OF_TOPK,
    PAIR_LATER,
    TAIL,
    TOPK_FIRST,
    TOPK_LATER,
    HeadSpec,
    Inputs,
    empty_outputs,
    flag_names,
)
from . import kernels, sums_kernels, topk_kernels

INTERPRETED = not isinstance(kernels.gradient_kernel, triton.JITFunction)
# versions whose compiled kernels take the arguments that `_launch` gives them (its fast path was run on the first)
DIRECT = not INTERPRETED and version_numbers(triton.__version__) <= (3, 9)


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
    jsd's second exchange, 8 of 4016: 256/1 262.0, 512/1 280.8, 1024/1 292.1; 8 of 16032: 256/1 1049, 1024/1 1060
    """
    return Launch(min(256 if of_teacher else 512, max(128, _next_power_of_2(chunk_size))), 1)


def gradient_launch(
    width: int, entropy: bool, forward_kl: bool = False, reverse_kl: bool = False, later: bool = False
) -> Launch:
    """Tile of the backward.

    32064 wide: 4096/4 257.1, 4096/8 257.9, 2048/4 258.4, 1024/2 259.4, 1024/4 289.9, 512/1 319.6
    the same, with entropy: 4096/4 262.9, 8192/8 264.2, 2048/4 272.4, 1024/2 273.1
    128256 wide: 2048/4 988.8, 1024/2 989.0, 4096/4 994.3; with entropy: 4096/4 1004.7, 2048/4 1039.2
    8032 wide: 2048/4 70.0, 4096/4 71.1; with entropy: 4096/4 72.7, 2048/4 73.8
    32064 wide, with forward_kl: 512/1 419.0, 1024/4 424.1, 2048/8 425.7, 4096/4 432.3, 2048/4 441.3
    32064 wide, with reverse_kl: 4096/4 443.5, 1024/4 454.4, 2048/8 462.5, 512/1 466.0, 2048/4 469.3
    jsd, 32064 wide: 512/1 411.1, 1024/2 416.0, 2048/4 416.3; 128256 wide: 512/1 1622, 1024/2 1638, 2048/4 1877
    """
    if (forward_kl or later) and not entropy and not reverse_kl:
        return Launch(min(512, max(256, _next_power_of_2(width))), 1)
    return Launch(min(4096 if entropy or reverse_kl else 2048, max(256, _next_power_of_2(width))), 4)


MOST_ENTRIES = 1024  # that one program compares with each other


def entries_launch(n_entries: int) -> Launch:
    """Tile of the kernels over a top-K teacher's entries."""
    return Launch(min(128, max(16, _next_power_of_2(n_entries))), 1)


# What the vocabulary kernels take upstream gradients of, in their order.
GRADS = ("lse", "log_prob", "entropy", "total", "forward_kl", "reverse_kl", "jsd", "total_variation")
MERGE = Launch(64, 2)  # 8 packets: 32/1 7.7, 128/4 8.6, 64/2 8.7; with entropy and argmax: 64/2 8.0, 32/1 8.5
# The only program: its time is the latency of its loads, and wider ones spill.
SUMS = Launch(2048, 16)  # 1 value: 8192/32 6.6, 2048/16 8.2; 5 values: 2048/16 10.6, 4096/32 15.1, 8192/32 28.4
SCALE = Launch(4096, 4)
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


def _vectors(inputs: Inputs):
    """What the vocabulary kernels read per token or column, besides the labels."""
    return inputs.bias, inputs.temperatures, inputs.total_weight, inputs.teacher, inputs.scales


def local_statistics(packets, inputs: Inputs, spec: HeadSpec, memory=None):
    """Logits [N, width], labels [N] -> packets [chunks, rows, N] fp32 of this rank, in `memory`'s slot if given."""
    n_rows, width = inputs.logits.shape
    if n_rows == 0:
        return
    factors = _factors(spec, inputs.temperatures is not None)
    scaled, n_entries = _scaled(spec, inputs.scales), _width(inputs.entries)
    strides = *inputs.logits.stride(), *_strides(inputs.teacher)
    vectors = inputs.labels, *_vectors(inputs)
    left_out = inputs.entries if stats.wants(spec.want, TAIL) else None
    turns = (memory.turns, memory.slot) if memory else (None, 0)
    _launch(
        kernels.statistics_kernel,
        n_rows * spec.chunks,
        (spec, width, n_entries, memory and memory.slot, _kind(inputs.logits), *map(_size, strides),
         *map(_kind, vectors), _kind(left_out)),
        statistics_launch(spec.chunk_size, inputs.teacher is not None or left_out is not None),
        packets, inputs.logits, *vectors, left_out, *turns,
        n_rows, *strides, spec.start, spec.valid_width, width, spec.chunk_size, spec.chunks, spec.ignore_index,
        n_entries, *factors[:2], spec.teacher_scale, spec.student_scale, *factors[2:], scaled,
        stats.over_vocabulary(spec.want), len(stats.TOPK_ROWS) if n_entries else 0,
        "entropy" in spec.want, "total" in spec.want, "argmax" in spec.want, *_wants_of_pair(spec, left_out),
    )  # fmt: skip
    if n_entries:
        block = entries_launch(n_entries)
        vectors = inputs.labels, inputs.bias, inputs.temperatures, inputs.scales, *_entries_of(inputs)
        _launch(
            topk_kernels.statistics_kernel,
            n_rows * spec.chunks,
            (spec, width, n_entries, memory and memory.slot, _kind(inputs.logits), *map(_size, strides[:2]),
             *map(_kind, vectors)),
            block,
            packets, inputs.logits, *vectors, *turns,
            n_rows, *strides[:2], spec.start, spec.valid_width, width, spec.chunk_size, spec.chunks,
            spec.ignore_index, n_entries, *factors[:2], spec.student_scale, *factors[2:], scaled, packets.shape[1],
        )  # fmt: skip


def _width(tensor) -> int:
    return 0 if tensor is None else tensor.shape[1]


def _entries_of(inputs: Inputs):
    return inputs.entries, inputs.entry_log_probs


def _wants_of_pair(spec: HeadSpec, left_out=None) -> list[bool]:
    """forward_kl, reverse_kl, and the entropy of a teacher or of a tail."""
    return [
        *(name in spec.want for name in OF_PAIR[:2]),
        ("teacher_entropy" if left_out is None else "tail_entropy") in spec.want,
    ]


def merge_packets(packets, inputs: Inputs, spec: HeadSpec, memory=None):
    """Packets of all ranks (this rank's, whose peers' lie in `memory`) -> [merged rows, values, *flags]."""
    n_rows, labels, scales, want = packets.shape[-1], inputs.labels, inputs.scales, spec.want
    has_labels, has_topk = labels is not None, inputs.entries is not None
    outputs = empty_outputs(packets, n_rows, has_labels, want)
    if n_rows == 0:
        return outputs
    flags = dict(zip(flag_names(has_labels, want), outputs[2:]))
    shared = packets, scales, memory and memory.peers, memory and memory.turns, memory.slot if memory else 0
    tail_rows = sum(row.startswith("tail") for row in stats.packet_rows(has_labels, want))
    _launch(
        kernels.merge_kernel,
        _cdiv(n_rows, MERGE.block),
        (spec, memory and memory.slot, _kind(labels), _kind(scales)),
        MERGE,
        *outputs[:2], *(flags.get(name) for name in ("valid", "argmax", "hits")), packets, labels, *shared[1:],
        n_rows, spec.student_scale, spec.packets, spec.chunks,
        inputs.teacher is not None, stats.over_vocabulary(want), tail_rows, len(stats.TOPK_ROWS) if has_topk else 0,
        "entropy" in want, "total" in want, *(name in want for name in OF_PAIR),
    )  # fmt: skip
    if has_topk:
        rows, merged, values = (
            names(has_labels, want) for names in (stats.packet_rows, stats.merged_rows, stats.value_rows)
        )
        _launch(
            topk_kernels.merge_kernel,
            _cdiv(n_rows, MERGE.block),
            (spec, memory and memory.slot, has_labels, _kind(scales)),
            MERGE,
            *outputs[:2], *shared, n_rows, spec.student_scale, spec.packets, spec.chunks,
            len(rows), rows.index("tail_max") if tail_rows else 0,
            merged.index("topk_shift"), values.index("teacher_mass"), stats.over_vocabulary(want), tail_rows > 0,
            *(name in want for name in TOPK_FIRST),
        )  # fmt: skip
    return outputs


def later_statistics(packets, inputs: Inputs, merged, spec: HeadSpec):
    """Packets [chunks, rows, N] of the second exchange: what needs the merged sums of the first."""
    n_rows, width = inputs.logits.shape
    if n_rows == 0:
        return
    factors, scaled = _factors(spec, inputs.temperatures is not None), _scaled(spec, inputs.scales)
    rows = stats.merged_rows(inputs.labels is not None, spec.want)
    scales = (spec.student_scale, spec.beta, *factors[2:], scaled)
    if inputs.entries is None:
        strides = *inputs.logits.stride(), *_strides(inputs.teacher)
        vectors = inputs.bias, inputs.temperatures, inputs.teacher, inputs.scales
        _launch(
            kernels.divergence_kernel,
            n_rows * spec.chunks,
            (spec, width, inputs.labels is None, _kind(inputs.logits), *map(_size, strides), *map(_kind, vectors)),
            statistics_launch(spec.chunk_size, True),
            packets, inputs.logits, *vectors, merged, n_rows, *strides, spec.valid_width, width, spec.chunk_size,
            spec.chunks, *factors[:2], spec.teacher_scale, *scales,
            *(name in spec.want for name in PAIR_LATER), rows.index("student_sum"),
        )  # fmt: skip
        return
    strides, n_entries = inputs.logits.stride(), _width(inputs.entries)
    vectors = inputs.bias, inputs.temperatures, inputs.scales, *_entries_of(inputs)
    _launch(
        topk_kernels.divergence_kernel,
        n_rows * spec.chunks,
        (spec, width, n_entries, inputs.labels is None, _kind(inputs.logits), *map(_size, strides),
         *map(_kind, vectors)),
        entries_launch(n_entries),
        packets, inputs.logits, *vectors, merged, n_rows, *strides, spec.start, spec.valid_width, width,
        spec.chunk_size, spec.chunks, n_entries, *factors[:2], *scales,
        *(name in spec.want for name in TOPK_LATER), rows.index("topk_shift"),
    )  # fmt: skip


def logits_gradient(out, inputs: Inputs, merged, grads, spec: HeadSpec):
    """Write d loss / d logits into `out` [N, width], which may be `logits` itself; `grads` as in the eager backend."""
    if inputs.logits.numel() == 0:
        return
    if INTERPRETED and out.dtype == torch.bfloat16:  # the interpreter truncates to bf16, hardware rounds
        exact = torch.empty_like(out, dtype=torch.float32)
        logits_gradient(exact, inputs, merged, grads, spec)
        out.copy_(exact)
        return
    rows = stats.merged_rows(inputs.labels is not None, spec.want)
    if not stats.wants(grads, OF_TOPK):
        _gradient(out, inputs, merged, grads, spec, rows)
        return
    # at the entries everything is computed once more, and rounded once
    extra, picked, rest = _gradient_of_entries(inputs, merged, grads, spec, rows)
    if rest is not None and len(rest) == 1:
        _gradient(out, inputs, merged, {**grads, "lse": rest[0]}, spec, rows)
    else:
        _gradient(out, inputs, merged, grads, spec, rows, rest=rest)
    _gradient(out, inputs._replace(logits=picked), merged, grads, spec, rows, extra=extra)


def _gradient(out, inputs: Inputs, merged, grads, spec, rows, rest=None, extra=None):
    """The gradient of everything, or with `extra` of the entries alone, whose logits the inputs hold."""
    n_rows, width = out.shape
    entries, n_entries = (None, 0) if extra is None else (inputs.entries, _width(inputs.entries))
    of_vocabulary = [grads.get(name) for name in GRADS]
    kinds = (name in grads for name in ("entropy", "forward_kl", "reverse_kl"))
    launch = gradient_launch(width, *kinds, stats.wants(grads, PAIR_LATER))
    if n_entries:
        launch = entries_launch(n_entries)
    factors, scaled = _factors(spec, inputs.temperatures is not None), _scaled(spec, inputs.scales)
    strides = *out.stride(), *inputs.logits.stride(), *_strides(inputs.teacher)
    vectors = inputs.labels, *_vectors(inputs)
    first = {
        name: rows.index(name) if name in rows else 0 for name in ("student_sum", "jsd_mean", "total_variation_mean")
    }
    _launch(
        kernels.gradient_kernel,
        n_rows * _cdiv(n_entries or width, launch.block),
        (spec, width, n_entries, inputs.labels is None, _kind(out), _kind(inputs.logits), *map(_size, strides),
         *map(_kind, vectors), *map(_type, of_vocabulary), _kind(rest), _kind(entries)),
        launch,
        out, inputs.logits, *vectors, merged, tuple(of_vocabulary), rest, entries, extra,
        n_rows, *strides, spec.start, spec.valid_width, width, n_entries,
        *factors[:2], spec.teacher_scale, spec.student_scale, spec.beta, *factors[2:], spec.valid_width < width, scaled,
        *first.values(),
    )  # fmt: skip


def _gradient_of_entries(inputs: Inputs, merged, grads, spec, rows):
    """-> what the entries add at their ids [N, E], their logits [N, E], and [4, N] of what they add at all others, or
    [1, N] if that is nothing but an upstream gradient of lse."""
    (n_rows, width), n_entries = inputs.logits.shape, _width(inputs.entries)
    extra = merged.new_empty((n_rows, n_entries))
    picked = inputs.logits.new_empty((n_rows, n_entries))
    everywhere = stats.wants(grads, ("topk_log_mass", *TAIL, "vocab_jsd"))
    factors, scaled = _factors(spec, inputs.temperatures is not None), _scaled(spec, inputs.scales)
    as_lse = not scaled and not stats.wants(spec.want, TAIL)
    rest = merged.new_empty((1 if as_lse else 4, n_rows)) if everywhere else None
    strides = inputs.logits.stride()
    vectors = inputs.bias, inputs.temperatures, inputs.scales, *_entries_of(inputs)
    of_topk = tuple(grads.get(name) for name in OF_TOPK)
    means = (rows.index(f"{name}_mean") if name in spec.want else 0 for name in TOPK_LATER)
    _launch(
        topk_kernels.gradient_kernel,
        n_rows,
        (spec, width, n_entries, inputs.labels is None, everywhere, _kind(inputs.logits), *map(_size, strides),
         *map(_kind, vectors), _type(grads.get("lse")), *map(_type, of_topk)),
        entries_launch(n_entries),
        extra, picked, rest, grads.get("lse"), inputs.logits, *vectors, merged, of_topk,
        n_rows, *strides, spec.start, spec.valid_width, width, n_entries,
        *factors[:2], spec.student_scale, spec.beta, *factors[2:], scaled, stats.wants(spec.want, TAIL), as_lse,
        rows.index("topk_shift"), *means,
    )  # fmt: skip
    return extra, picked, rest


def entries(ids, log_probs, mask, scale, renormalize, vocab_size):
    """`stats.entries` in one kernel."""
    n_rows, n_entries = ids.shape
    launch = Launch(_next_power_of_2(n_entries), 1 if n_entries <= 128 else 4)
    if launch.block > MOST_ENTRIES or log_probs.dtype == torch.float64:
        return stats.entries(ids, log_probs, mask, scale, renormalize, vocab_size)
    out = torch.empty_like(ids, dtype=torch.int32), torch.empty_like(log_probs, dtype=torch.float32)
    scales, scale = (scale, 1.0) if isinstance(scale, torch.Tensor) else (None, scale)
    if n_rows:
        vectors = ids, log_probs, mask, scales
        _launch(
            topk_kernels.entries_kernel,
            n_rows,
            (n_entries, vocab_size, renormalize, scale, *map(_kind, vectors)),
            launch,
            *out, *vectors, n_entries, vocab_size, scale, renormalize, min(32, launch.block),
        )  # fmt: skip
    return out


def token_sums(values, valid, reduction):
    """Values [N] each -> loss [], sums [S + 1] (of each value, the count) and divisor []; see `reduce.SumsPlan`."""
    plan, weight, denominator = reduction
    sums = valid.new_empty(len(values) + 1, dtype=torch.float32)
    loss, divisor = valid.new_empty((), dtype=torch.float32), valid.new_empty((), dtype=torch.float64)
    given = denominator if isinstance(denominator, torch.Tensor) else None
    number = 1.0 if given is not None or denominator is None else float(denominator)
    _launch(
        sums_kernels.sums_kernel,
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
            sums_kernels.sums_gradient_kernel,
            _cdiv(n_rows, SUMS_GRADIENT.block),
            (plan.squares, plan.negatives, _kind(upstream), *map(_type, (valid, weight)), *map(_type, values)),
            SUMS_GRADIENT,
            out, upstream, values, valid, weight, divisor, plan.coefficients, n_rows,
            plan.squares, plan.negatives,
        )  # fmt: skip
    return out


def scale(out, x, factor, add: bool = False):
    """out (+)= x * factor, contiguous, a scalar tensor; torch's own is slow with a factor that is on the device."""
    if INTERPRETED and out.dtype == torch.bfloat16:  # see `logits_gradient`
        exact = torch.empty_like(out, dtype=torch.float32)
        scale(exact, x, factor)
        out.copy_(exact)
    elif out.numel():
        _launch(
            sums_kernels.scale_kernel,
            _cdiv(out.numel(), SCALE.block),
            (_size(out.numel()), add, *map(_kind, (out, x, factor))),
            SCALE,
            out, x, factor, out.numel(), add,
        )  # fmt: skip
