"""Conversion of DTensor arguments to plain local tensors and a `VocabShard`, before anything else
reads them.

Logits placed ``Shard(-1)`` and weights placed ``Shard(0)`` on one dimension of their mesh state
which ids a rank owns. On the other dimensions tokens may be sharded or replicated: every rank
computes the results of its own tokens, as plain tensors. A placement that cannot work is a
ValueError on every rank, which says how to change it.
"""

import functools
import math
from typing import Any

import torch
import torch.distributed as dist

from ..arguments.id_sets import replaced
from ..ranks.shard import VocabShard
from ..spec import BIAS, HIDDEN, TENSOR, WEIGHT, Sizes
from ..statistics import MaybeNone
from ..validation import expect_dense, refuse_transforms
from .subclasses import is_dtensor, plain

NAMES = "labels, weights and inputs"
UNSHARD = "call this within the forward of the module that FSDP manages, or after its unshard()"


def resolve_shard(logits: torch.Tensor, shard: VocabShard | None) -> VocabShard:
    """Return the shard of plain logits [.., width]; None means that they are of the whole
    vocabulary."""
    if logits.dim() < 1:
        raise ValueError("logits must have a vocabulary dimension, got a scalar")
    if shard is None:
        if torch.compiler.is_compiling():
            return VocabShard(0, logits.shape[-1], logits.shape[-1])
        return _whole_vocabulary(logits.shape[-1])
    if not isinstance(shard, VocabShard):
        raise TypeError(
            f"shard must be a VocabShard or None, got {type(shard).__name__}: see "
            "VocabShard.from_group"
        )
    if not torch.compiler.is_compiling():
        shard.expect_live_group()
    return shard


@functools.lru_cache(maxsize=64)
def _whole_vocabulary(size: int) -> VocabShard:
    return VocabShard(0, size, size)


def local_logits(logits: torch.Tensor, shard: VocabShard | None) -> tuple[torch.Tensor, VocabShard]:
    """Return this rank's plain logits [.., width] and its shard.

    Args:
        logits: DTensor [.., V] sharded on V, or this rank's plain tensor [.., width].
        shard: None takes it from the DTensor, or means the whole vocabulary for a plain tensor.
    """
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"logits must be a tensor, got {type(logits).__name__}")
    expect_dense("logits", logits)
    refuse_transforms()
    logits = plain("logits", logits)
    if not is_dtensor(logits):
        return logits, resolve_shard(logits, shard)
    fix = (
        "give the output layer output_layouts=Shard(-1), use_local_output=False (ColwiseParallel); "
        "or pass logits.to_local(), for the same loss of the whole vocabulary on each rank"
    )
    return logits.to_local(), _layout_shard("logits", logits, logits.dim() - 1, shard, fix)[1]


def local_head(
    hidden, weight, bias, shard, hidden_grad: str
) -> tuple[torch.Tensor | MaybeNone, torch.Tensor, torch.Tensor | None, VocabShard]:
    """Return this rank's plain hidden states, weight and bias, and its shard.

    Gradients of DTensors are DTensors. Where ranks of another mesh dimension hold other tokens, the
    gradient of the weight is ``Partial`` over that dimension, as torch's own matrix product leaves
    it.

    Args:
        hidden: [.., H], DTensor, plain or None.
        weight, bias: [V, H] and [V] or None, DTensors sharded on V, or this rank's plain rows.
        shard: as in `local_logits`.
        hidden_grad: as in `Linear`: how the gradient of the hidden states is reduced.
    """
    WEIGHT.check("weight", weight, {})
    refuse_transforms()
    weight = plain("weight", weight)
    bias = plain("bias", bias) if isinstance(bias, torch.Tensor) else bias
    hidden = plain("hidden states", hidden) if isinstance(hidden, torch.Tensor) else hidden
    if any(map(is_dtensor, (hidden, weight, bias))):
        hidden, weight, bias, shard = _local_dtensors(hidden, weight, bias, shard, hidden_grad)
    else:
        shard = resolve_shard(weight.t(), shard)
    shard.expect_width("weight", weight.shape[0], "rows")
    sizes: Sizes = {"width": (shard.width, "the shard")}
    for name, x, line in (
        ("hidden states", hidden, HIDDEN),
        ("weight", weight, WEIGHT),
        ("bias", bias, BIAS),
    ):
        if x is not None:
            line.check(name, x, sizes)
    return hidden, weight, bias, shard


def _local_dtensors(hidden, weight, bias, shard, hidden_grad: str):
    """`local_head` of which one is a DTensor."""
    if is_dtensor(weight):
        fix = f"distribute it with Shard(0) (ColwiseParallel); if FSDP did, {UNSHARD}"
        dim, stated = _layout_shard("weight", weight, 0, shard, fix)
        if (
            dim is not None
            and shard is None
            and isinstance(hidden, torch.Tensor)
            and not is_dtensor(hidden)
        ):
            raise ValueError(
                f"the weight is sharded over ranks, {_layout(weight)}, and plain hidden states do "
                "not say whether these hold the same tokens. If they do (tensor parallelism), pass "
                f"shard=VocabShard.from_mesh(mesh, {weight.shape[0]}, dim), or hidden states that "
                f"are a DTensor; if they do not (FSDP), {UNSHARD}"
            )
        rows = weight.to_local(grad_placements=_weight_grad_placements(hidden, weight, dim))
        shard = stated
    else:
        rows, shard = weight, resolve_shard(weight.t(), shard)
    if is_dtensor(bias):
        dim, _ = _layout_shard(
            "bias", bias, 0, shard, "distribute it with Shard(0), like the weight"
        )
        bias = bias.to_local(grad_placements=_weight_grad_placements(hidden, bias, dim))
    if is_dtensor(hidden):
        hidden = _local_hidden(hidden, shard, hidden_grad)
    return hidden, rows, bias, shard


def local_rows(name: str, rows, shard: VocabShard | None) -> tuple[torch.Tensor, VocabShard]:
    """This rank's rows [width, ..] of a vocabulary matrix or vector without gradient, and their
    resolved shard."""
    TENSOR.check(name, rows, {})
    if rows.dim() < 1:
        raise ValueError(f"{name} must be [width, ..], got a scalar")
    rows = plain(name, rows)
    if not is_dtensor(rows):
        return rows.detach(), resolve_shard(rows.detach().movedim(0, -1), shard)
    fix = "distribute it with Shard(0) (ColwiseParallel)"
    return rows.to_local().detach(), _layout_shard(name, rows, 0, shard, fix)[1]


def local_part(
    x,
    shard: VocabShard,
    hidden_grad: str = "all_reduce",
    name: str = "",
    tokens=None,
    sharded: int | None = None,
) -> Any:
    """Return a tensor, or an object with tensors as fields, with DTensors and quantised tensors
    replaced by plain local ones. ValueError unless ranks that share the vocabulary hold the same
    tokens, and all others those of `tokens`.

    Args:
        hidden_grad: as in `Linear`, which says how a teacher's hidden states are laid out.
        name: of a tensor, for messages.
        tokens: the call's logits or hidden states, as the caller gave them.
        sharded: the dimension of a tensor that is sharded on the vocabulary; None: it has none.
    """
    if x is None:
        return x
    tokens = tokens if is_dtensor(tokens) else None
    if isinstance(x, torch.Tensor):
        return _local_tensor(name or NAMES, x, shard, hidden_grad, tokens, sharded)
    found = {}
    # without a comprehension: torch.compile follows
    for field, dim in getattr(type(x), "tensors", {}).items():
        value = getattr(x, field)
        if isinstance(value, torch.Tensor):
            flat = field == "ids" and getattr(x, "spans", None) is not None  # those of all tokens
            local = _local_tensor(field, value, shard, hidden_grad, None if flat else tokens, dim)
            if local is not value:
                found[field] = local
    transform = getattr(x, "transform", None)
    if transform is not None and (local := local_part(transform, shard)) is not transform:
        found["transform"] = local
    return replaced(x, **found) if found else x


def _local_tensor(name, x, shard, hidden_grad, tokens, sharded):
    """Return this rank's plain tensor of the argument or field `name`."""
    x = plain(name, x)
    if not is_dtensor(x):
        return x
    if sharded == 0:
        _layout_shard(name, x, 0, shard, "distribute it with Shard(0)")
        return x.to_local()
    _expect_tokens(name, x, shard, tokens)
    if sharded is not None:  # a teacher's logits
        return local_logits(x, shard)[0]
    if name == "hidden":
        return _local_hidden(x, shard, hidden_grad)
    _expect_replicated(name, x, shard)
    return x.to_local()


def _used_mesh_dims(x) -> list[int]:
    """Dimensions of the DTensor's mesh that have more than one rank."""
    return [dim for dim in range(x.device_mesh.ndim) if x.device_mesh.size(dim) > 1]


def _sharded_dim(placement, x) -> int | None:
    """Dimension of the tensor that the placement cuts into contiguous pieces, or None."""
    return placement.dim % x.dim() if type(placement).__name__ == "Shard" else None


def _vocab_mesh_dim(name, x, vocab, fix) -> int | None:
    """Mesh dimension that shards dimension `vocab` of x, None if a rank has all of it; else
    ValueError with `fix`."""
    dims = [dim for dim in _used_mesh_dims(x) if _sharded_dim(x.placements[dim], x) == vocab]
    rest = [x.placements[dim] for dim in _used_mesh_dims(x) if dim not in dims]
    by_token = [vocab != 0 and _sharded_dim(p, x) is not None for p in rest]
    tokens = all(shards or p.is_replicate() for p, shards in zip(rest, by_token))
    # by a mesh dimension of one rank, or not at all: each rank has whole rows of its own tokens, or
    # a whole weight
    whole = not dims and (
        any(_sharded_dim(p, x) == vocab for p in x.placements) or all(by_token) or vocab == 0
    )
    if _used_mesh_dims(x) and not (tokens and (whole or len(dims) == 1)):
        what = "tokens sharded or replicated" if vocab else "replicated"
        raise ValueError(
            f"{name} must be sharded on the vocabulary (dimension {vocab}) over one mesh dimension "
            f"and be {what} over the others, got {_layout(x)}: {fix}"
        )
    return dims[0] if dims else None


def _layout_shard(
    name, x, vocab: int, shard: VocabShard | None, fix: str
) -> tuple[int | None, VocabShard]:
    """`_vocab_mesh_dim`, and the shard that a DTensor's layout states; ValueError if the caller's
    `shard` differs."""
    dim, rows = _vocab_mesh_dim(name, x, vocab, fix), x.shape[vocab]
    group = None if dim is None else x.device_mesh.get_group(dim)
    if shard is None:
        return dim, VocabShard.from_group(group, rows)
    shard = resolve_shard(x, shard)
    if rows < shard.vocab_size:
        raise ValueError(
            f"a DTensor of {rows} vocabulary rows is smaller than the shard's vocab_size "
            f"{shard.vocab_size}"
        )
    # raises on every rank, also where only some ranks' bounds differ
    if shard.padded_size not in (None, rows):
        raise ValueError(
            f"the DTensor has {rows} rows, and the shard {shard.padded_size}: leave the shard out, "
            f"or make it with VocabShard.from_mesh(mesh, {shard.vocab_size}, dim, "
            f"padded_size={rows})"
        )
    stated = VocabShard.from_group(group, shard.vocab_size, rows)
    if (stated.start, stated.stop) != (shard.start, shard.stop) or _group_ranks(
        group
    ) != _group_ranks(shard.group):
        raise ValueError(
            f"the DTensor {_layout(x)} holds ids [{stated.start}, {stated.stop}) in the group "
            f"{_group_ranks(group)}, but the shard says [{shard.start}, {shard.stop}) in "
            f"{_group_ranks(shard.group)}: leave the shard out, or make it with "
            f"VocabShard.from_mesh(mesh, {shard.vocab_size}, dim, padded_size={rows})"
        )
    return dim, shard


def _group_ranks(group) -> list[int] | None:
    """Global ranks of a group, or None if it has one rank or does not exist."""
    return (
        None
        if group is None or dist.get_world_size(group) == 1
        else dist.get_process_group_ranks(group)
    )


def _shared_mesh_dims(x, shard) -> list[int]:
    """Mesh dimensions of a DTensor of tokens whose ranks share the vocabulary; empty if the shard
    is the whole one."""
    if shard.world_size == 1:
        return []
    ranks = _group_ranks(shard.group)
    dims = [
        dim for dim in _used_mesh_dims(x) if _group_ranks(x.device_mesh.get_group(dim)) == ranks
    ]
    if not dims:
        raise ValueError(
            "a DTensor of tokens must be on a mesh one dimension of which is the group that "
            f"shares the vocabulary, {ranks}, got {_layout(x)}"
        )
    return dims


def _expect_replicated(name, x, shard, fix="redistribute it there to Replicate()"):
    """Raise ValueError if x is not replicated over the ranks that share the vocabulary, or is
    Partial over others."""
    for dim in _used_mesh_dims(x):
        placement = x.placements[dim]
        replicated = placement.is_replicate() or (
            dim not in _shared_mesh_dims(x, shard) and _sharded_dim(placement, x) is not None
        )
        if not replicated:
            raise ValueError(
                f"{name} must be replicated over the ranks that share the vocabulary, got "
                f"{_layout(x)}: {fix}"
            )


def _expect_tokens(name, x, shard, tokens):
    """Raise ValueError unless a DTensor [.., any] is of the tokens of another on its mesh, on all
    dimensions of the mesh whose ranks hold different tokens. x may have size 1, or no dimension,
    where those are sharded."""
    if tokens is None or tokens.device_mesh != x.device_mesh:
        return
    for dim in set(_used_mesh_dims(x)) - set(_shared_mesh_dims(x, shard)):
        own, cut = (_sharded_dim(z.placements[dim], z) for z in (x, tokens))
        broadcasts = own is None and cut is not None and (x.dim() <= cut or x.shape[cut] == 1)
        if own != cut and not broadcasts:
            raise ValueError(
                f"{name} must be of the same tokens as the logits or hidden states, "
                f"{_layout(tokens)}, got {_layout(x)}: redistribute to {tokens.placements[dim]} on "
                f"dimension {dim} of the mesh"
            )


def _local_hidden(hidden, shard, hidden_grad):
    """Return this rank's hidden states of a DTensor; their gradient gets the placements that
    `hidden_grad` implies."""
    from torch.distributed.tensor import Partial

    grads = list(hidden.placements)
    shared = _shared_mesh_dims(hidden, shard)
    if any(
        _sharded_dim(hidden.placements[dim], hidden) == hidden.dim() - 1
        for dim in _used_mesh_dims(hidden)
    ):
        raise ValueError(
            f"hidden states must be whole rows [.., H], got {_layout(hidden)}: redistribute to "
            "Replicate()"
        )
    if hidden_grad == "reduce_scatter":
        cut = [
            dim
            for dim in _used_mesh_dims(hidden)
            if _sharded_dim(hidden.placements[dim], hidden) == 0
        ]
        if hidden.shape[0] % math.prod(hidden.device_mesh.size(dim) for dim in cut):
            raise ValueError(
                f"hidden states [{hidden.shape[0]}, ..] must be even shards, got {_layout(hidden)}"
            )
        for dim in set(_used_mesh_dims(hidden)) - set(shared):
            if (
                not hidden.placements[dim].is_replicate()
                and _sharded_dim(hidden.placements[dim], hidden) is None
            ):
                raise ValueError(
                    f"hidden states must be whole, got {_layout(hidden)}: redistribute to "
                    "Replicate()"
                )
        if any(_sharded_dim(hidden.placements[dim], hidden) != 0 for dim in shared):
            raise ValueError(
                "hidden_grad='reduce_scatter' needs hidden states that are sharded on their first "
                f"dimension over the ranks that share the vocabulary, got {_layout(hidden)}: use "
                "'all_reduce' for replicated ones"
            )
        if any(dim > min(shared, default=0) for dim in set(cut) - set(shared)):
            raise ValueError(
                "hidden_grad='reduce_scatter' needs the vocabulary's dimension of the mesh after "
                "all others that shard the hidden states' first dimension, whose tokens would be "
                f"interleaved, got {_layout(hidden)}"
            )
        return hidden.to_local()
    fix = "redistribute to Replicate() there, or, if it is Shard(0), use Linear(hidden_grad='reduce_scatter')"
    _expect_replicated("hidden states", hidden, shard, fix)
    if hidden_grad == "none":
        for dim in shared:
            grads[dim] = Partial()
    return hidden.to_local(grad_placements=grads)


def _weight_grad_placements(hidden, weight, vocab_dim):
    """Placements of the gradient of a weight or bias: ``Partial`` over mesh dimensions on which
    tokens differ."""
    from torch.distributed.tensor import Partial

    others = [dim for dim in _used_mesh_dims(weight) if dim != vocab_dim]
    if others and not (is_dtensor(hidden) and hidden.device_mesh == weight.device_mesh):
        raise ValueError(
            "the weight is on a mesh of more than the ranks that share the vocabulary, "
            f"{_layout(weight)}, and hidden states that are not on it do not say whether the "
            "others hold other tokens: make them a DTensor on that mesh, or keep the weight on the "
            "submesh of the vocabulary's dimension (mesh['tp']), or, without one, pass a plain "
            "weight"
        )
    grads = list(weight.placements)
    for dim in others:
        if not hidden.placements[dim].is_replicate():
            grads[dim] = Partial()
    return grads


def _layout(x) -> str:
    """Placements and mesh shape of a DTensor, for messages."""
    return f"{tuple(x.placements)} on a mesh of {tuple(x.device_mesh.shape)}"
