"""DTensors in, plain local tensors out, before anything else looks at them.

Logits ``Shard(-1)`` and weights ``Shard(0)`` on one dimension of their mesh say themselves which ids a rank owns. On
the other dimensions tokens may be sharded or replicated: every rank computes what belongs to its own tokens, and
results are plain tensors of these. A placement that cannot work is a ValueError with the fix in it, on every rank.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist

from .shard import VocabShard
from .validation import expect_tensor

# Tensors of a Transform, a Teacher or a TopKTeacher
FIELDS = ("bias", "temperature", "student_temperature", "logits", "ids", "log_probs", "mask", "tail_log_prob")


def is_dtensor(x) -> bool:
    return isinstance(x, torch.Tensor) and hasattr(x, "placements")


def resolve_shard(width_of: torch.Tensor, shard: VocabShard | None) -> VocabShard:
    """Of plain logits [.., width]; None stands for the whole vocabulary, as wide as they are."""
    if width_of.dim() < 1:
        raise ValueError("logits must have a vocabulary dimension, got a scalar")
    if shard is None:
        return VocabShard(0, width_of.shape[-1], width_of.shape[-1])
    if not isinstance(shard, VocabShard):
        raise TypeError(f"shard must be a VocabShard or None, got {type(shard).__name__}: see VocabShard.from_group")
    if not torch.compiler.is_compiling():
        shard.expect_live_group()
    return shard


def local_logits(logits: torch.Tensor, shard: VocabShard | None) -> tuple[torch.Tensor, VocabShard]:
    """Logits [.., V] sharded on V (or plain ones of this rank) -> [.., width] of this rank, and its shard."""
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"logits must be a tensor, got {type(logits).__name__}")
    if not is_dtensor(logits):
        return logits, resolve_shard(logits, shard)
    fix = "give the output layer output_layouts=Shard(-1), use_local_output=False (ColwiseParallel)"
    dim = _vocab_dim("logits", logits, logits.dim() - 1, fix)
    return logits.to_local(), _shard_of(logits, dim, logits.shape[-1], shard)


def local_head(hidden, weight, bias, shard, hidden_grad: str):
    """Hidden states [.., H], weight [V, H] and bias [V] sharded on V, as DTensors or this rank's plain tensors -> the
    plain ones, and the shard. Gradients come back as DTensors: of the weight with the sum over the ranks of other mesh
    dimensions that hold other tokens still to be done (``Partial``), as torch's own matrix product leaves it."""
    if not isinstance(weight, torch.Tensor):
        hint = ": pass its .weight" if hasattr(weight, "weight") else ""
        raise TypeError(f"weight must be a tensor [width, H], got {type(weight).__name__}{hint}")
    if hidden is not None:
        expect_tensor("hidden states", hidden)
    if not any(map(is_dtensor, (hidden, weight, bias))):
        return hidden, weight, bias, resolve_shard(weight.t() if weight.dim() == 2 else weight, shard)
    if is_dtensor(weight):
        dim = _vocab_dim("weight", weight, 0, "distribute it with Shard(0) (ColwiseParallel)")
        shard = _shard_of(weight, dim, weight.shape[0], shard)
        rows = weight.to_local(grad_placements=_weight_grads(hidden, weight, dim))
    else:
        rows, shard = weight, resolve_shard(weight.t() if weight.dim() == 2 else weight, shard)
    if is_dtensor(bias):
        dim = _vocab_dim("bias", bias, 0, "distribute it with Shard(0), like the weight")
        _shard_of(bias, dim, bias.shape[0], shard)
        bias = bias.to_local(grad_placements=_weight_grads(hidden, bias, dim))
    if is_dtensor(hidden):
        hidden = _local_hidden(hidden, shard, hidden_grad)
    return hidden, rows, bias, shard


def local(x, shard: VocabShard):
    """Labels, weights and other tensors of tokens, or what holds some (FIELDS): the same on all ranks of the group."""
    if x is None or isinstance(x, torch.Tensor):
        return _local_of("labels, weights and inputs", x, shard) if is_dtensor(x) else x
    found = {}
    for name in FIELDS:  # by name, and without a comprehension, so that torch.compile follows
        value = getattr(x, name, None)
        if is_dtensor(value):
            found[name] = _local_of(name, value, shard)
    return replace(x, **found) if found else x


def _local_of(name, x, shard):
    if name == "logits":  # a teacher's
        return local_logits(x, shard)[0]
    if name == "bias":
        dim = _vocab_dim(name, x, 0, "distribute it with Shard(0)")
        _shard_of(x, dim, x.shape[0], shard)
        return x.to_local()
    _expect_replicated(name, x, shard)
    return x.to_local()


def _live(x) -> list[int]:
    """Mesh dimensions of more than one rank."""
    return [dim for dim in range(x.device_mesh.ndim) if x.device_mesh.size(dim) > 1]


def _sharded_on(placement, x) -> int | None:
    """The tensor's dimension, only if it is cut into contiguous pieces."""
    return placement.dim % x.dim() if type(placement).__name__ == "Shard" else None


def _vocab_dim(name, x, vocab, fix) -> int | None:
    """The mesh dimension that shards x's dimension `vocab`; None for a mesh of one rank."""
    dims = [dim for dim in _live(x) if _sharded_on(x.placements[dim], x) == vocab]
    rest = [x.placements[dim] for dim in _live(x) if dim not in dims]
    tokens = all(p.is_replicate() or (_sharded_on(p, x) is not None and vocab != 0) for p in rest)
    alone = not dims and any(_sharded_on(p, x) == vocab for p in x.placements)  # by a dimension of one rank
    if _live(x) and not (tokens and (alone or len(dims) == 1)):
        what = "tokens sharded or replicated" if vocab else "replicated"
        raise ValueError(
            f"{name} must be sharded on the vocabulary (dimension {vocab}) over one mesh dimension and be {what} over "
            f"the others, got {_placed(x)}: {fix}"
        )
    return dims[0] if dims else None


def _shard_of(x, dim, rows: int, shard: VocabShard | None) -> VocabShard:
    """What the layout says, compared with what the caller said."""
    group = None if dim is None else x.device_mesh.get_group(dim)
    if shard is None:
        return VocabShard.from_group(group, rows)
    shard = resolve_shard(x, shard)
    if rows < shard.vocab_size:
        raise ValueError(
            f"a DTensor of {rows} vocabulary rows is smaller than the shard's vocab_size {shard.vocab_size}"
        )
    if shard.padded_size not in (None, rows):  # on every rank, where bounds differ on some
        raise ValueError(
            f"the DTensor has {rows} rows, and the shard {shard.padded_size}: leave the shard out, or make it with "
            f"VocabShard.from_mesh(mesh, {shard.vocab_size}, dim, padded_size={rows})"
        )
    own = VocabShard.from_group(group, shard.vocab_size, rows)
    if (own.start, own.stop) != (shard.start, shard.stop) or _members(group) != _members(shard.group):
        raise ValueError(
            f"the DTensor {_placed(x)} holds ids [{own.start}, {own.stop}) in the group {_members(group)}, but the "
            f"shard says [{shard.start}, {shard.stop}) in {_members(shard.group)}: leave the shard out, or make it "
            f"with VocabShard.from_mesh(mesh, {shard.vocab_size}, dim, padded_size={rows})"
        )
    return shard


def _members(group) -> list[int] | None:
    return None if group is None or dist.get_world_size(group) == 1 else dist.get_process_group_ranks(group)


def _of_group(x, shard) -> list[int]:
    """The mesh dimension whose ranks share the vocabulary, as a list of one; none where nothing is shared."""
    if shard.world_size == 1:
        return []
    dims = [dim for dim in _live(x) if _members(x.device_mesh.get_group(dim)) == _members(shard.group)]
    if not dims:
        raise ValueError(
            f"a DTensor of tokens must be on a mesh one dimension of which is the group that shares the vocabulary, "
            f"{_members(shard.group)}, got {_placed(x)}"
        )
    return dims


def _expect_replicated(name, x, shard, fix="redistribute it there to Replicate()"):
    """Over the ranks that share the vocabulary; over the others it may be sharded, but nothing may be partial."""
    for dim in _live(x):
        placement = x.placements[dim]
        replicated = placement.is_replicate() or (
            dim not in _of_group(x, shard) and _sharded_on(placement, x) is not None
        )
        if not replicated:
            raise ValueError(
                f"{name} must be replicated over the ranks that share the vocabulary, got {_placed(x)}: {fix}"
            )


def _local_hidden(hidden, shard, hidden_grad):
    from torch.distributed.tensor import Partial

    grads = list(hidden.placements)
    shared = _of_group(hidden, shard)
    if any(_sharded_on(hidden.placements[dim], hidden) == hidden.dim() - 1 for dim in _live(hidden)):
        raise ValueError(
            f"hidden states must be whole rows [.., H], got {_placed(hidden)}: redistribute to Replicate()"
        )
    if hidden_grad == "reduce_scatter":
        cut = [dim for dim in _live(hidden) if _sharded_on(hidden.placements[dim], hidden) == 0]
        if hidden.shape[0] % math.prod(hidden.device_mesh.size(dim) for dim in cut):
            raise ValueError(f"hidden states [{hidden.shape[0]}, ..] must be even shards, got {_placed(hidden)}")
        for dim in set(_live(hidden)) - set(shared):
            if not hidden.placements[dim].is_replicate() and _sharded_on(hidden.placements[dim], hidden) is None:
                raise ValueError(f"hidden states must be whole, got {_placed(hidden)}: redistribute to Replicate()")
        if any(_sharded_on(hidden.placements[dim], hidden) != 0 for dim in shared):
            raise ValueError(
                "hidden_grad='reduce_scatter' needs hidden states that are sharded on their first dimension over the "
                f"ranks that share the vocabulary, got {_placed(hidden)}: use 'all_reduce' for replicated ones"
            )
        return hidden.to_local()
    fix = "redistribute to Replicate() there, or, if it is Shard(0), use Linear(hidden_grad='reduce_scatter')"
    _expect_replicated("hidden states", hidden, shard, fix)
    if hidden_grad == "none":
        for dim in shared:
            grads[dim] = Partial()
    return hidden.to_local(grad_placements=grads)


def _weight_grads(hidden, weight, vocab_dim):
    from torch.distributed.tensor import Partial

    others = [dim for dim in _live(weight) if dim != vocab_dim]
    if others and not (is_dtensor(hidden) and hidden.device_mesh == weight.device_mesh):
        raise ValueError(
            f"the weight is on a mesh of more than the ranks that share the vocabulary, {_placed(weight)}, and hidden "
            "states that are not on it do not say whether the others hold other tokens: make them a DTensor on that "
            "mesh, or keep the weight on the submesh of the vocabulary's dimension (mesh['tp'])"
        )
    grads = list(weight.placements)
    for dim in others:
        if not hidden.placements[dim].is_replicate():
            grads[dim] = Partial()
    return grads


def _placed(x) -> str:
    return f"{tuple(x.placements)} on a mesh of {tuple(x.device_mesh.shape)}"
