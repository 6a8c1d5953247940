"""The contract of a transport."""

import torch

from ..backend import load_backend
from ..request import Request, accumulation_dtype


class Transport:
    """Way of the packets of all ranks to their merge, in two steps that all ranks of a group take
    together."""

    def write(self, request: Request, launches=None) -> torch.Tensor:
        """Write this rank's packets [chunks, rows, N] where `merge` finds them: by default in new
        memory.

        launches: see `passes.statistics`.
        """
        logits = request.tensors.logits
        packets = logits.new_empty(request.packets_shape, dtype=accumulation_dtype(logits.dtype))
        launches = launches or load_backend(request.facts.backend)
        launches.local_statistics(packets, request)
        return packets

    def merge(self, packets: torch.Tensor, request: Request, launches=None) -> list[torch.Tensor]:
        """Merge the packets of all ranks: [merged rows [R, N], values [K, N], *flags [N]] in the
        layout's order."""
        raise NotImplementedError
