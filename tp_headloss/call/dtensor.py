"""Conversion of DTensor arguments to plain local tensors and a `VocabShard`.

It comes before anything else reads them. Logits placed ``Shard(-1)`` and weights placed
``Shard(0)`` on one dimension of their mesh state which ids a rank owns. On the other dimensions
tokens may be sharded or replicated: every rank computes the results of its own tokens, as plain
tensors. A placement that cannot work is a ValueError on every rank, which says how to change it.
"""

import functools
import math
from typing import Any

import torch

from ..arguments.id_sets import replaced
from ..ranks.shard import VocabShard
from ..spec import BIAS, COLUMNS, HIDDEN, TENSOR, WEIGHT, Sizes
from ..spec.checks import expect_dense, refuse_transforms
from ..spec.words import two_copies
from ..statistics import MaybeNone
from .placements import (
    expect_placements,
    group_ranks,
    layout,
    sharded_dim,
    shared_mesh_dims,
    used_mesh_dims,
)
from .subclasses import is_dtensor, plain

NAMES = "labels, weights and inputs"
UNSHARD = "call this within the forward of the module that FSDP manages, or after its unshard()"


def resolve_shard(logits: torch.Tensor, shard: VocabShard | None) -> VocabShard:
    """Return the shard of plain logits [.., width]; None means the whole vocabulary."""
    if logits.dim() < 1:
        raise ValueError("logits must have a vocabulary dimension, got a scalar")
    if shard is None:
        if torch.compiler.is_compiling():
            return VocabShard(0, logits.shape[-1], logits.shape[-1])
        return _whole_vocabulary(logits.shape[-1])
    if not isinstance(shard, VocabShard):
        raise TypeError(
            f"shard must be a VocabShard or None, got {type(shard).__name__}"
            f"{two_copies(shard, VocabShard) or ': see VocabShard.from_group'}"
        )
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
        COLUMNS.check("logits", logits, {})  # which says what to pass
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
    _expect_shard_of_module(weight, shard)
    refuse_transforms()
    weight = plain("weight", weight)
    bias = plain("bias", bias) if isinstance(bias, torch.Tensor) else bias
    hidden = plain("hidden states", hidden) if isinstance(hidden, torch.Tensor) else hidden
    is_stated = shard is not None
    if any(map(is_dtensor, (hidden, weight, bias))):
        is_stated = True
        hidden, weight, bias, shard = _local_dtensors(hidden, weight, bias, shard, hidden_grad)
    else:
        shard = resolve_shard(weight.t(), shard)
    other_size = weight.shape[1] if weight.dim() == 2 else None
    shard.expect_width("weight", weight.shape[0], "rows", other_size)
    # without a shard the weight says itself how many rows there are
    sizes: Sizes = {"width": (shard.width, "the shard")} if is_stated else {}
    if hidden is not None:
        HIDDEN.check("hidden states", hidden, sizes)
    WEIGHT.check("weight", weight, sizes)
    if bias is not None:
        BIAS.check("bias", bias, sizes)
    return hidden, weight, bias, shard


def _local_dtensors(hidden, weight, bias, shard, hidden_grad: str):
    """Return what `local_head` does, for arguments of which one is a DTensor."""
    if is_dtensor(weight):
        fix = f"distribute it with Shard(0) (ColwiseParallel); if FSDP did, {UNSHARD}"
        dim, stated = _layout_shard("weight", weight, 0, shard, fix)
        has_plain_hidden = isinstance(hidden, torch.Tensor) and not is_dtensor(hidden)
        if dim is not None and shard is None and has_plain_hidden:
            raise ValueError(
                f"the weight is sharded over ranks, {layout(weight)}, and plain hidden states do "
                "not say whether these hold the same tokens. If they do (tensor parallelism), pass "
                f"shard=VocabShard.from_mesh(mesh, {weight.shape[0]}, dim), or hidden states that "
                f"are a DTensor; if they do not (FSDP), {UNSHARD}"
            )
        rows = weight.to_local(grad_placements=_weight_grad_placements(hidden, weight, dim))
        shard = stated
    else:
        rows = weight
        shard = resolve_shard(weight.t(), shard)
    if is_dtensor(bias):
        fix = "distribute it with Shard(0), like the weight"
        dim, _ = _layout_shard("bias", bias, 0, shard, fix)
        bias = bias.to_local(grad_placements=_weight_grad_placements(hidden, bias, dim))
    if is_dtensor(hidden):
        hidden = _local_hidden(hidden, shard, hidden_grad)
    return hidden, rows, bias, shard


def _expect_shard_of_module(weight: torch.Tensor, shard: VocabShard | None):
    """Raise ValueError for plain rows that a module has marked as sharded, without their shard."""
    if shard is not None or is_dtensor(weight) or torch.compiler.is_compiling():
        return
    if getattr(weight, "sharded_over", ""):
        raise ValueError(
            f"the weight {list(weight.shape)} is one rank's rows of a VocabParallelHead or "
            "VocabParallelEmbedding, got no shard: pass shard=head.shard, or call the head"
        )


def local_rows(name: str, rows, shard: VocabShard | None) -> tuple[torch.Tensor, VocabShard]:
    """Return this rank's rows [width, ..] of a vocabulary matrix or vector, and their shard.

    The rows have no gradient; the shard is resolved as in `local_logits`.
    """
    TENSOR.check(name, rows, {})
    if rows.dim() < 1:
        raise ValueError(f"{name} must be [width, ..], got a scalar")
    _expect_shard_of_module(rows, shard)
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
    """Return a tensor, or an object with tensors as fields, with plain local tensors.

    DTensors and quantised tensors are replaced. ValueError unless ranks that share the vocabulary
    hold the same tokens, and all others those of `tokens`.

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
    is_flat = getattr(x, "spans", None) is not None  # ids of all tokens, one after the other
    found = {}
    # without a comprehension: torch.compile follows
    for field, dim in getattr(type(x), "tensors", {}).items():
        value = getattr(x, field)
        if isinstance(value, torch.Tensor):
            same_tokens = None if is_flat and field == "ids" else tokens
            local = _local_tensor(field, value, shard, hidden_grad, same_tokens, dim)
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
        _layout_shard(name, x, 0, shard, "distribute it with Shard(0)", is_student=False)
        return x.to_local()
    _expect_tokens(name, x, shard, tokens)
    if sharded is not None:  # a teacher's logits
        fix = (
            "redistribute them to the placements of the student's logits, to [Shard(-1)] on a mesh "
            "of its group beside plain ones"
        )
        _layout_shard(f"teacher.{name}", x, x.dim() - 1, shard, fix, is_student=False)
        return x.to_local()
    if name == "hidden":
        return _local_hidden(x, shard, hidden_grad)
    is_whole = all(x.placements[dim].is_replicate() for dim in used_mesh_dims(x))
    if not is_whole:  # else on any mesh
        fix = "redistribute it there to Replicate()"
        expect_placements("tokens", x, shared_mesh_dims(x, shard), None, name, fix)
    return x.to_local()


def _vocab_mesh_dim(name, x, vocab: int, fix: str) -> int | None:
    """Return the mesh dimension that shards dimension `vocab` of x, None if a rank has all of it.

    ValueError with `fix` for any other placements.
    """
    is_stated = any(sharded_dim(x, dim) == vocab for dim in range(x.device_mesh.ndim))
    argument = "matrix" if vocab == 0 else "logits" if is_stated else "whole logits"
    dims = [dim for dim in used_mesh_dims(x) if sharded_dim(x, dim) == vocab]
    expect_placements(argument, x, dims[:1], vocab, name, fix)
    return dims[0] if dims else None


def _layout_shard(
    name, x, vocab: int, shard: VocabShard | None, fix: str, is_student: bool = True
) -> tuple[int | None, VocabShard]:
    """Return `_vocab_mesh_dim`, and the shard that a DTensor's layout states.

    ValueError if `shard` differs, which is the caller's, or, of anything else than the student's
    logits and weight (is_student=False), that of the student.
    """
    dim = _vocab_mesh_dim(name, x, vocab, fix)
    rows = x.shape[vocab]
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
    same_ids = (stated.start, stated.stop) == (shard.start, shard.stop)
    same_ranks = group_ranks(group) == group_ranks(shard.group)
    if not (same_ids and same_ranks):
        if not is_student:
            raise ValueError(
                f"{name} must be laid out as the student's columns, ids [{shard.start}, "
                f"{shard.stop}) in the group {group_ranks(shard.group)}, got a DTensor "
                f"{layout(x)}, with ids [{stated.start}, {stated.stop}) in {group_ranks(group)}: "
                f"{fix}"
            )
        raise ValueError(
            f"the DTensor {layout(x)} holds ids [{stated.start}, {stated.stop}) in the group "
            f"{group_ranks(group)}, but the shard says [{shard.start}, {shard.stop}) in "
            f"{group_ranks(shard.group)}: leave the shard out, or make it with "
            f"VocabShard.from_mesh(mesh, {shard.vocab_size}, dim, padded_size={rows})"
        )
    return dim, shard


def _expect_tokens(name, x, shard, tokens):
    """Raise ValueError unless a DTensor [.., any] is of the tokens of another on its mesh.

    Dimensions of the mesh whose ranks hold different tokens must cut both alike. x may have size 1,
    or no dimension, where the tokens are cut.
    """
    if tokens is None or tokens.device_mesh != x.device_mesh:
        return
    for dim in set(used_mesh_dims(x)) - set(shared_mesh_dims(x, shard)):
        own = sharded_dim(x, dim)
        cut = sharded_dim(tokens, dim)
        broadcasts = own is None and cut is not None and (x.dim() <= cut or x.shape[cut] == 1)
        if own != cut and not broadcasts:
            raise ValueError(
                f"{name} must be of the same tokens as the logits or hidden states, "
                f"{layout(tokens)}, got {layout(x)}: redistribute to {tokens.placements[dim]} on "
                f"dimension {dim} of the mesh"
            )


def _local_hidden(hidden, shard, hidden_grad: str):
    """Return this rank's hidden states of a DTensor.

    Their gradient gets the placements that `hidden_grad` implies.
    """
    from torch.distributed.tensor import Partial

    shared = shared_mesh_dims(hidden, shard)
    features = hidden.dim() - 1
    expect_placements("rows", hidden, shared, features, "hidden states")
    if hidden_grad == "reduce_scatter":
        _expect_sequence(hidden, shared)
        return hidden.to_local()
    fix = "redistribute to Replicate() there, or, if it is Shard(0), use Linear(hidden_grad='reduce_scatter')"
    expect_placements("tokens", hidden, shared, features, "hidden states", fix)
    grads = list(hidden.placements)
    if hidden_grad == "none":
        for dim in shared:
            grads[dim] = Partial()
    return hidden.to_local(grad_placements=grads)


def _expect_sequence(hidden, shared: list[int]):
    """Raise ValueError unless hidden states [S, .., H] are as sequence parallelism has them.

    Each rank that shares the vocabulary holds an equal part of S, and these parts, in the order of
    the ranks, are consecutive.
    """
    cut = [dim for dim in used_mesh_dims(hidden) if sharded_dim(hidden, dim) == 0]
    if hidden.shape[0] % math.prod(hidden.device_mesh.size(dim) for dim in cut):
        raise ValueError(
            f"hidden states [{hidden.shape[0]}, ..] must be even shards, got {layout(hidden)}"
        )
    expect_placements("sequence", hidden, shared, hidden.dim() - 1, "hidden states")
    first_shared = min(shared, default=0)
    if any(dim > first_shared for dim in set(cut) - set(shared)):
        raise ValueError(
            "hidden_grad='reduce_scatter' needs the vocabulary's dimension of the mesh after "
            "all others that shard the hidden states' first dimension, whose tokens would be "
            f"interleaved, got {layout(hidden)}"
        )


def _weight_grad_placements(hidden, weight, vocab_dim: int | None):
    """Return the placements of the gradient of a weight or bias.

    It is ``Partial`` over mesh dimensions on which tokens differ.
    """
    from torch.distributed.tensor import Partial

    others = [dim for dim in used_mesh_dims(weight) if dim != vocab_dim]
    on_one_mesh = is_dtensor(hidden) and hidden.device_mesh == weight.device_mesh
    if others and not on_one_mesh:
        raise ValueError(
            "the weight is on a mesh of more than the ranks that share the vocabulary, "
            f"{layout(weight)}, and hidden states that are not on it do not say whether the "
            "others hold other tokens: make them a DTensor on that mesh, or keep the weight on the "
            "submesh of the vocabulary's dimension (mesh['tp']), or, without one, pass a plain "
            "weight"
        )
    grads = list(weight.placements)
    for dim in others:
        if not hidden.placements[dim].is_replicate():
            grads[dim] = Partial()
    return grads
