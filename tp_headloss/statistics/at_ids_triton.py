"""Device functions of the log-probs of given ids: their gradient, because kernels of their own make
the values."""

import triton
import triton.language as tl

from .family_triton import Gradient, nothing_loaded


@triton.jit
def direct(dz, state, tile, token, grads, inputs, rows):
    """Add the upstream gradients of the token's ids that are this column, which
    `at_ids_sums_kernel` added up."""
    if len(token.places.ids.shape) == 1:
        dz += tl.load(grads.log_probs_at + token.places.ids, mask=token.written, other=0.0)
    # some of its ids are given ones, too
    elif len(token.places.sets.shape) + len(token.places.entries.shape) == 1:
        own = tl.zeros_like(dz)
        at = token.row * inputs.n_ids
        for k in range(0, inputs.n_ids):
            is_here = tile.columns == tl.load(inputs.ids + at + k) - token.start
            # equal ids have equal sums
            own = tl.where(is_here, tl.load(grads.log_probs_at + at + k), own)
        dz += own
    return dz


STATISTICS = MERGE = None  # the engine's kernels read the ids alone
GRADIENT = Gradient(nothing_loaded, direct=direct)
