"""The transport "sum": the merge as two plain all-reduces, whose volume does not grow with the
group.

The first finds the maxima of all ranks. Relative to them every row of a packet is a sum over
columns, so that the second adds them up in float64. It serves every statistic that adds up
(`Family.adds_up`), which argmax does not.
"""

import torch

from ...ranks.comm import reduce_in_place
from ..eager import finish, merged_sums, student_scale
from ..request import Request
from .transport import Transport


class SumLanes(Transport):
    """A rank's sums as float64 lanes, which the all-reduce adds up."""

    def merge(self, packets: torch.Tensor, request: Request, launches=None) -> list[torch.Tensor]:
        group = request.facts.world_size, request.facts.group_name
        peaks = [i for i, name in enumerate(request.layout.packet) if name.endswith("max")]
        # a packet without columns, whose maxima no rank exceeds: what is merged with it is relative
        # to them
        empty = torch.zeros_like(packets[:1])
        maxima = torch.stack([packets[:, i].amax(0) for i in peaks])
        for i, x in zip(peaks, reduce_in_place(maxima, *group, largest=True)):
            empty[0, i] = x
        shift, sums = merged_sums(
            torch.cat([packets, empty]), request.layout, student_scale(request)
        )
        lanes = {name: x for name, x in sums.items() if not name.endswith("shift")}
        total = reduce_in_place(torch.cat([x.flatten() for x in lanes.values()]), *group)
        parts = total.split([x.numel() for x in lanes.values()])
        sums |= {name: part.view_as(x) for (name, x), part in zip(lanes.items(), parts)}
        return finish(shift, sums, request, packets.dtype)
