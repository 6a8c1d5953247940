"""Launchers of the kernels: CUDA, or any device through Triton's interpreter."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
import triton

from ..stats import HeadSpec, merged_rows, output_names, packet_rows
from . import kernels

INTERPRETED = not isinstance(kernels.gradient_kernel, triton.JITFunction)


class Launch(NamedTuple):
    block: int
    warps: int


def statistics_launch(chunk_size: int) -> Launch:
    """Tile of the forward; its width decides the order of additions, so it depends on the vocabulary alone.

    H200, bf16, 8192 x 32064, us: as 2 chunks of 16032 512/1 144, 1024/1 146, 256/1 164, 1024/2 176, 2048/4 274; as 8
    chunks of 4016 512/1 159, 256/1 176, 1024/1 186, 1024/2 298. One warp needs no barrier for its maxima and sums.
    """
    return Launch(min(512, max(128, triton.next_power_of_2(chunk_size))), 1)


def gradient_launch(width: int) -> Launch:
    """H200, bf16, 8192 x 32064, us: 2048/4 267, 1024/2 267, 4096/8 267, 1024/4 315, 2048/8 319, copy rate 248."""
    return Launch(min(2048, max(128, triton.next_power_of_2(width))), 4)


MERGE = Launch(64, 2)  # H200, 8192 tokens x 8 packets, in a graph: 3.7 us, 128/4 3.6, 32/1 3.6, 64/1 4.8


def _factors(spec: HeadSpec, has_temperatures: bool) -> tuple[float, float, bool, bool]:
    """pre, post, HAS_SCALE, HAS_CAP: the factors before and after the softcap."""
    if spec.softcap:
        return spec.scale / spec.softcap, spec.softcap / spec.temperature, True, True
    pre = spec.scale / spec.temperature
    return pre, 1.0, has_temperatures or pre != 1.0, False


def _on(tensor: torch.Tensor):
    """Launch on the tensor's device, which need not be the current one."""
    elsewhere = tensor.is_cuda and tensor.device.index != torch.cuda.current_device()
    return torch.cuda.device(tensor.device) if elsewhere else nullcontext()


def local_statistics(logits, labels, bias, temperatures, total_weight, spec: HeadSpec):
    """Logits [N, width], labels [N] -> packets [chunks, rows, N] fp32 of this rank."""
    n_rows, width = logits.shape
    rows = packet_rows(labels is not None, spec.want)
    packets = logits.new_empty((spec.chunks, len(rows), n_rows), dtype=torch.float32)
    if n_rows == 0:
        return packets
    launch = statistics_launch(spec.chunk_size)
    pre, post, has_scale, has_cap = _factors(spec, temperatures is not None)
    with _on(logits):
        kernels.statistics_kernel[(n_rows * spec.chunks,)](
            packets, logits, labels, bias, temperatures, total_weight,
            n_rows, logits.stride(0), logits.stride(1),
            spec.start, spec.valid_width, width, spec.chunk_size, spec.chunks, spec.ignore_index,
            pre, post,
            HAS_SCALE=has_scale, HAS_CAP=has_cap,
            WANT_ENTROPY="entropy" in spec.want, WANT_TOTAL="total" in spec.want, WANT_ARGMAX="argmax" in spec.want,
            BLOCK=launch.block, num_warps=launch.warps, enable_fp_fusion=True,
        )  # fmt: skip
    return packets


def merge_packets(packets, labels, spec: HeadSpec):
    """Packets of all ranks -> [merged rows, *statistics]."""
    n_rows = packets.shape[-1]
    names = output_names(labels is not None, spec.want)
    merged = packets.new_empty((len(merged_rows(labels is not None, spec.want)), n_rows))
    out = {n: packets.new_empty(n_rows, dtype=torch.int64 if n == "argmax" else torch.float32) for n in names}
    if n_rows:
        order = ("lse", "log_prob", "target_logit", "owners", "entropy", "total", "argmax", "mass")
        with _on(packets):
            kernels.merge_kernel[(triton.cdiv(n_rows, MERGE.block),)](
                merged, *(out.get(name) for name in order), packets, labels, n_rows,
                PACKETS=spec.packets, BLOCK=MERGE.block, num_warps=MERGE.warps, enable_fp_fusion=True,
            )  # fmt: skip
    return [merged, *out.values()]


def logits_gradient(out, logits, labels, bias, temperatures, total_weight, merged, grads, spec: HeadSpec):
    """Write d loss / d logits into `out` [N, width], which may be `logits` itself; `grads` as in the eager backend."""
    n_rows, width = logits.shape
    if logits.numel() == 0:
        return
    if INTERPRETED and out.dtype == torch.bfloat16:  # the interpreter truncates to bf16, hardware rounds
        exact = torch.empty_like(out, dtype=torch.float32)
        logits_gradient(exact, logits, labels, bias, temperatures, total_weight, merged, grads, spec)
        out.copy_(exact)
        return
    launch = gradient_launch(width)
    pre, post, has_scale, has_cap = _factors(spec, temperatures is not None)
    with _on(logits):
        kernels.gradient_kernel[(n_rows * triton.cdiv(width, launch.block),)](
            out, logits, labels, bias, temperatures, total_weight, merged, *grads,
            n_rows, out.stride(0), out.stride(1), logits.stride(0), logits.stride(1),
            spec.start, spec.valid_width, width, pre, post,
            HAS_SCALE=has_scale, HAS_CAP=has_cap, BLOCK=launch.block, num_warps=launch.warps, enable_fp_fusion=True,
        )  # fmt: skip
