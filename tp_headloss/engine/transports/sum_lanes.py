"""The transport "sum": the merge as one plain all-reduce of float64 lanes, whose volume does not grow with the group.

exp(max) must stay within float64: a token with a shard's maximum beyond +-600 becomes NaN on every rank. Only families
whose rows are sums relative to the softmax's maximum have lanes (`Family.has_lanes`): no argmax, no teacher, say.
"""

from __future__ import annotations

import torch

from ...ranks.comm import sum_in_place
from ...statistics import SOFTMAX
from ..eager import finish, merged_sums
from ..request import Request
from .transport import Transport


class SumLanes(Transport):
    """Packets as float64 lanes, which the all-reduce adds up."""

    def merge(self, packets: torch.Tensor, request: Request) -> list[torch.Tensor]:
        lanes = sum_in_place(to_lanes(packets, request), request.facts.world_size, request.facts.group_name)
        return finish(*from_lanes(lanes, request), request, packets.dtype)


def _names(request: Request) -> list[str]:
    """Names of the lanes: the packet's rows without the maximum."""
    names = {"owner": "owners"}
    return [names.get(name, name) for name in request.layout.packet if name != "max"]


def to_lanes(packets: torch.Tensor, request: Request) -> torch.Tensor:
    """Convert this rank's packets to float64 lanes [rows, N] relative to 0, whose plain sum over ranks is the merge."""
    shift, sums = merged_sums(packets, request.layout)
    shift = torch.where(shift == -torch.inf, 0.0, shift)
    weight = torch.where(shift.abs() > 600, torch.nan, shift.exp())
    lanes = {"sum": weight * sums["sum"]} | {name: sums[name] for name in ("target", "owners") if name in sums}
    for family in request.layout.families:
        lanes |= family.rescale(sums, shift, weight)
    return torch.stack([lanes[name] for name in _names(request)])


def from_lanes(lanes: torch.Tensor, request: Request) -> tuple[torch.Tensor, dict]:
    """Convert the summed lanes to the log of the first lane, and sums relative to it."""
    sums = dict(zip(_names(request), lanes.unbind(0)))
    shift = sums["sum"].log().float().double()  # any reference will do; one that fp32 holds keeps the backward exact
    empty = sums["sum"] == 0
    factor = torch.where(empty, 0.0, torch.exp(-shift))
    rescaled = {"sum": factor * sums["sum"]}
    for family in request.layout.families:
        if family is not SOFTMAX:
            for name, x in family.rescale(sums, -shift, factor).items():
                rescaled[name] = torch.where(empty, 0.0, x) if x is not sums[name] else x
    return shift, sums | rescaled
