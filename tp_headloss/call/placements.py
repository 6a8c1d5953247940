"""Which placements a DTensor argument may have.

A dimension of a mesh has a kind: its ranks share the vocabulary, or they hold other tokens. `RULES`
says for each kind of argument which placements it may have on each kind of dimension, and
`expect_placements` holds an argument to them. Dimensions of one rank do not matter. All ranks have
the same placements, so all of them raise the same error.
"""

from typing import NamedTuple

import torch.distributed as dist

# What a dimension of the mesh does to a tensor. Its "own" dimension is the one that is not of
# tokens: the vocabulary of logits and weights, or the features of hidden states.
REPLICATED = "replicated"
CUTS_OWN = "cuts the own dimension"
CUTS_FIRST = "cuts the first dimension, of tokens"
CUTS_LATER = "cuts a later dimension of tokens"
PARTIAL = "partial sums, or strided shards"

CUTS_TOKENS = (CUTS_FIRST, CUTS_LATER)
ANY_TOKENS = (REPLICATED, *CUTS_TOKENS)


class Allowed(NamedTuple):
    """Placements that are allowed on one kind of mesh dimension, and the error for any other."""

    placements: tuple[str, ...]
    error: str  # with {name}, {own}, {layout} and {fix}


def _on_vocabulary(others: str) -> str:
    return (
        "{name} must be sharded on the vocabulary (dimension {own}) over one mesh dimension and be "
        + others
        + " over the others, got {layout}: {fix}"
    )


LOGITS_ERROR = _on_vocabulary("tokens sharded or replicated")
MATRIX_ERROR = _on_vocabulary("replicated")
TOKENS_ERROR = (
    "{name} must be replicated over the ranks that share the vocabulary, got {layout}: {fix}"
)
ROWS_ERROR = "hidden states must be whole rows [.., H], got {layout}: redistribute to Replicate()"
ANY_ROWS = Allowed((*ANY_TOKENS, PARTIAL), ROWS_ERROR)

# kind of argument: over the ranks that share the vocabulary, and over all others
RULES = {
    "logits": (Allowed((CUTS_OWN,), LOGITS_ERROR), Allowed(ANY_TOKENS, LOGITS_ERROR)),
    # whose ranks share no vocabulary: replicated ones may be of ranks that were meant to
    "whole logits": (Allowed((), LOGITS_ERROR), Allowed(CUTS_TOKENS, LOGITS_ERROR)),
    # weight [V, H], bias [V], and others whose first dimension is the vocabulary; or whole
    "matrix": (Allowed((CUTS_OWN,), MATRIX_ERROR), Allowed((REPLICATED,), MATRIX_ERROR)),
    # labels, weights, inputs, and hidden states whose gradient is added up or left partial
    "tokens": (Allowed((REPLICATED,), TOKENS_ERROR), Allowed(ANY_TOKENS, TOKENS_ERROR)),
    # hidden states, before it matters how their gradient is reduced
    "rows": (ANY_ROWS, ANY_ROWS),
    # hidden states of sequence parallelism
    "sequence": (
        Allowed(
            (CUTS_FIRST,),
            "hidden_grad='reduce_scatter' needs hidden states that are sharded on their first "
            "dimension over the ranks that share the vocabulary, got {layout}: use 'all_reduce' "
            "for replicated ones",
        ),
        Allowed(
            ANY_TOKENS,
            "hidden states must be whole, got {layout}: redistribute to Replicate()",
        ),
    ),
}


def expect_placements(
    argument: str, x, vocab_dims: list[int], own: int | None, name: str, fix: str = ""
):
    """Raise ValueError unless a DTensor has placements that `RULES` allow.

    Args:
        argument: key of `RULES`.
        vocab_dims: dimensions of the mesh whose ranks share the vocabulary.
        own: the tensor's dimension that is not of tokens; None: it has none.
        name, fix: for the message, what it is and how to change it.
    """
    sharing, others = RULES[argument]
    other_dims = [dim for dim in used_mesh_dims(x) if dim not in vocab_dims]
    for dims, allowed in ((other_dims, others), (vocab_dims, sharing)):
        for dim in dims:
            if _effect(x, dim, own) not in allowed.placements:
                error = allowed.error.format(name=name, own=own, layout=layout(x), fix=fix)
                raise ValueError(error)


def _effect(x, dim: int, own: int | None) -> str:
    """Return what a dimension of the mesh does to a DTensor, in the words of `RULES`."""
    cut = sharded_dim(x, dim)
    if cut is None:
        return REPLICATED if x.placements[dim].is_replicate() else PARTIAL
    if cut == own:
        return CUTS_OWN
    return CUTS_FIRST if cut == 0 else CUTS_LATER


def used_mesh_dims(x) -> list[int]:
    """Return the dimensions of the DTensor's mesh that have more than one rank."""
    return [dim for dim in range(x.device_mesh.ndim) if x.device_mesh.size(dim) > 1]


def sharded_dim(x, dim: int) -> int | None:
    """Return the tensor's dimension that a mesh dimension cuts into contiguous pieces, or None."""
    placement = x.placements[dim]
    return placement.dim % x.dim() if type(placement).__name__ == "Shard" else None


def shared_mesh_dims(x, shard) -> list[int]:
    """Return the mesh dimensions of a DTensor of tokens whose ranks share the vocabulary.

    There are none if the shard is the whole vocabulary. ValueError if the mesh has none otherwise.
    """
    if shard.world_size == 1:
        return []
    ranks = group_ranks(shard.group)
    groups = {dim: x.device_mesh.get_group(dim) for dim in used_mesh_dims(x)}
    dims = [dim for dim, group in groups.items() if group_ranks(group) == ranks]
    if not dims:
        raise ValueError(
            "a DTensor of tokens must be on a mesh one dimension of which is the group that "
            f"shares the vocabulary, {ranks}, got {layout(x)}"
        )
    return dims


def group_ranks(group) -> list[int] | None:
    """Return the global ranks of a group, or None if it has one rank or does not exist."""
    if group is None or dist.get_world_size(group) == 1:
        return None
    return dist.get_process_group_ranks(group)


def layout(x) -> str:
    """Return placements and mesh shape of a DTensor, for messages."""
    return f"{tuple(x.placements)} on a mesh of {tuple(x.device_mesh.shape)}"
