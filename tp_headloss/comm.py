"""The packed exchange of statistics: the only collective calls of the package, and the only place that can block.

NCCL knows no all-reduce whose operator is the merge of `stats`, so there are two transports:

* ``gather`` (default): one all-gather of the fp32 packets. It copies bits and adds nothing, every rank merges the same
  packets in the same order, and the result has the same bits on every rank.
* ``sum``: literally one ``all_reduce(SUM)`` of float64 lanes, whose volume does not grow with the group size; for
  large groups. Its order of additions is the communication library's; see `stats.to_lanes` for its range.

The group arrives by name, so that operators keep plain arguments and `torch.compile` needs no process group object.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

TRANSPORTS = ("gather", "sum")
# torch 2.13 renamed it
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_packets(packets: torch.Tensor, world_size: int, group_name: str) -> torch.Tensor:
    """Packets [chunks, rows, N] of this rank -> [chunks * P, rows, N] of all, in group-rank order; one all-gather."""
    if world_size == 1 or packets.numel() == 0:
        return packets
    gathered = packets.new_empty(world_size * packets.shape[0], *packets.shape[1:])
    # flat, because gloo takes no other output shape
    _all_gather(gathered.view(-1), packets.view(-1), group=_resolve_process_group(group_name))
    return gathered


def sum_lanes(lanes: torch.Tensor, world_size: int, group_name: str) -> torch.Tensor:
    """Float64 lanes [rows, N] summed over the group, in place; one all-reduce."""
    if world_size > 1 and lanes.numel() > 0:
        dist.all_reduce(lanes, group=_resolve_process_group(group_name))
    return lanes
