"""The transports: how the packets of all ranks come to their merge. A new one is a file, and a line
of `TRANSPORTS`.

NCCL knows no all-reduce whose operator is the merge of families, so there are three:

* ``gather``: one all-gather of the fp32 packets. It copies bits and adds nothing, every rank merges
  the same packets in the same order, and the result has the same bits on every rank.
* ``symm_mem``: the same packets, but written straight into memory that all GPUs of the group
  address; after one barrier the merge kernel reads its peers over NVLink. Same bits. For the GPUs
  of one host.
* ``sum``: an all-reduce of maxima and one of float64 sums relative to them, whose volume does not
  grow with the group size; for large groups. The order of additions is the communication library's.

``auto`` is ``symm_mem`` where it can be had and was measured to be faster, else ``gather``.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from ..request import Request
from .gather import Gather
from .sum_lanes import SumLanes
from .symmetric_memory import find_symmetric_memory
from .transport import Transport


class Choice(NamedTuple):
    """Transports that a value of `Options.transport` stands for."""

    default: Transport  # also merges packets that were written block by block
    # takes precedence, for requests that it has one for
    shared: Callable[[Request], Transport | None] | None = None


TransportName: TypeAlias = Literal["auto", "gather", "sum", "symm_mem"]
TRANSPORTS: dict[str, Choice] = {
    "auto": Choice(Gather(), find_symmetric_memory),
    "gather": Choice(Gather()),
    "sum": Choice(SumLanes()),
    "symm_mem": Choice(Gather(), find_symmetric_memory),
}


def resolve_transport(request: Request) -> Transport:
    """Return the transport of a request with logits."""
    choice = TRANSPORTS[request.facts.transport]
    return (choice.shared and choice.shared(request)) or choice.default
