"""The contract of a transport."""

from __future__ import annotations

import torch

from ..backend import load_backend
from ..request import Request, accumulation_dtype


class Transport:
    """Way of the packets of all ranks to their merge, in two steps that all ranks of a group take together."""

    adds_up = True  # whether `merge` fills the sums that it is given

    def write(self, request: Request, *sums) -> torch.Tensor:
        """Write this rank's packets [chunks, rows, N] where `merge` finds them: by default in new memory.

        sums: nothing, or for the triton backend what its `sums_for_merge` returned, here and in `merge`.
        """
        logits = request.tensors.logits
        packets = logits.new_empty(request.packets_shape, dtype=accumulation_dtype(logits.dtype))
        load_backend(request.facts.backend).local_statistics(packets, request, None, *sums)
        return packets

    def merge(self, packets: torch.Tensor, request: Request, *sums) -> list[torch.Tensor]:
        """Merge the packets of all ranks: [merged rows [R, N], values [K, N], *flags [N]] in the layout's order."""
        raise NotImplementedError
