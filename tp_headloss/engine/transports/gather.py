"""The transport "gather": one all-gather, after which every rank merges all packets in the same
order."""

import torch

from ...ranks.comm import gather_parts
from ..backend import load_backend
from ..request import Request
from .transport import Transport


class Gather(Transport):
    """Packets of all ranks, copied to every rank."""

    def merge(self, packets: torch.Tensor, request: Request, launches=None) -> list[torch.Tensor]:
        facts, launches = request.facts, launches or load_backend(request.facts.backend)
        packets = gather_parts(packets, facts.world_size, facts.group_name)
        return launches.merge_packets(packets, request)
