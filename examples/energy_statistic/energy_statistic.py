"""A family of statistics outside of the package: energy = sum of z_j^2 over columns above -inf,
d/dz_j = 2 z_j."""

from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from tp_headloss.statistics import family_triton as hooks
from tp_headloss.statistics.family import Family, row_sum
from tp_headloss.statistics.numerics_triton import lane_sum


@triton.jit
def add(state, tile, softmax, chunk, inputs, rows):
    return (state[0] + tl.where(tile.z == float("-inf"), 0.0, tile.z * tile.z),)


@triton.jit
def store(out, n, state, core, chunk, inputs, rows):
    tl.store(out + rows.energy * n, lane_sum(state[0]))


@triton.jit
def add_packet(state, packet, softmax, rows):
    return (state[0] + hooks.read(packet, rows.energy, 0.0).to(tl.float64),)


@triton.jit
def fold(state, packet, rows):
    hooks.put(packet, rows.energy, state[0])


@triton.jit
def finish(state, joined, out, inputs, rows):
    hooks.report(out.value, joined, rows.value.energy, state[0], joined.bad)


@triton.jit
def load(grads, token, inputs, rows):
    return (hooks.upstream(grads.energy, token),)


@triton.jit
def direct(dz, state, tile, token, grads, inputs, rows):
    g = tl.where(token.ignored, 0.0, 2.0 * state[0])
    return dz + tl.where(tile.z == float("-inf"), 0.0, g * tile.z)


class Energy(Family):
    statistics = gradients = packet = ("energy",)
    device = SimpleNamespace(
        STATISTICS=hooks.Statistics(hooks.one_lane_sum, hooks.not_rescaled, add, store),
        MERGE=hooks.Merge(hooks.one_sum, hooks.no_peak, add_packet, fold, finish),
        GRADIENT=hooks.Gradient(load, direct=direct),
    )

    def local(self, tile, softmax, rows):
        return {"energy": row_sum(torch.where(tile.z == -torch.inf, 0.0, tile.z**2))}

    def finish(self, sums, joined):
        return {"energy": sums["energy"]}, {}

    def direct(self, dz, tile, merged, grads):
        return (
            dz + torch.where(tile.z == -torch.inf, 0.0, 2 * grads["energy"] * tile.z)
            if "energy" in grads
            else dz
        )
