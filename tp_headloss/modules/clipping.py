"""`clip_grad_norm_`: torch's, for models of which some parameters are sharded and others
replicated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Annotated

import torch

from ..call.subclasses import is_dtensor
from ..ranks.comm import gather_from_ranks, group_size
from ..ranks.shard import Group, resolve_process_group
from ..spec import CheckedBy, NotNegative, OneOf, Positive, checked


@checked
@torch.no_grad()
def clip_grad_norm_(
    parameters: Annotated[
        Iterable[torch.Tensor] | torch.Tensor, CheckedBy("parameters, each with its gradient")
    ],
    max_norm: NotNegative,
    norm_type: Positive | Annotated[str, OneOf(("inf",))] = 2.0,
    *,
    error_if_nonfinite: bool = False,
    tensor_parallel_group: Group = None,
) -> torch.Tensor:
    """Scale gradients to a norm of at most max_norm, as torch.nn.utils.clip_grad_norm_ does, and
    return the norm of the whole model's: each element counts once, and the norm has the same bits
    on all ranks of the groups.

    Which parameters are sharded is said by themselves: DTensors by their placements, on any mesh
    (Partial gradients are a ValueError); rows of a `VocabParallelHead` or `VocabParallelEmbedding`
    by an attribute that the module keeps; any other by ``parameter.tensor_model_parallel = True``,
    as Megatron-Core marks them. All others are replicated: their gradients are equal on all ranks.
    Ranks pass parts of the same parameters in one order (no other pipeline stages).

    Args:
        parameters: of the model; those without a gradient count as 0. ``main_grad`` comes before
            ``grad``.
        norm_type: p of the p-norm, infinity included, also as "inf".
        error_if_nonfinite: RuntimeError if the norm is NaN or infinite; otherwise all gradients
            become NaN or 0.
        tensor_parallel_group: of parameters with ``tensor_model_parallel = True``.

    Returns:
        float64 scalar, the norm before clipping.

    Raises:
        TypeError, ValueError: a sharded parameter whose group is not known, a group of parameters
            that do not say whether they are sharded, or a Partial gradient.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([weight], 1.0), weight.grad
        (tensor(5., dtype=torch.float64), tensor([0.6000, 0.8000]))
    """
    # by the groups over which a parameter is sharded
    norms: dict[tuple[str, ...], list[torch.Tensor]] = {}
    gradients: dict[torch.device, list[torch.Tensor]] = {}
    device, norm_type = None, float(norm_type)
    if isinstance(parameters, torch.nn.Module):
        raise TypeError(
            f"parameters must be tensors, got {type(parameters).__name__}: pass model.parameters()"
        )
    if not isinstance(parameters, Iterable):
        raise TypeError(f"parameters must be tensors, got {type(parameters).__name__}")
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if others := [type(p).__name__ for p in given if not isinstance(p, torch.Tensor)]:
        raise TypeError(
            f"parameters must be tensors, got {others[0]} among them: pass model.parameters()"
        )
    distinct = dict.fromkeys(given)
    said = [
        hasattr(p, mark)
        for p in distinct
        for mark in ("tensor_model_parallel", "sharded_over", "placements")
    ]
    if said and not any(said) and group_size(tensor_parallel_group) > 1:
        raise ValueError(
            "tensor_parallel_group= needs sharded parameters that say so, "
            f"parameter.tensor_model_parallel = True, got {len(distinct)} parameters that say "
            "nothing: mark those that are, or leave the group out if none is"
        )
    for p in distinct:
        found = getattr(p, "main_grad", None)
        gradient = p.grad if found is None else found
        over = _sharded_over(p, gradient, tensor_parallel_group)
        local = gradient.to_local() if is_dtensor(gradient) else gradient
        device = device or (p if local is None else local).device
        parts = norms.setdefault(over, [torch.zeros((), dtype=torch.float64, device=device)])
        if local is not None and local.numel():
            gradients.setdefault(local.device, []).append(local)
            # in fp32 the norm of a large tensor is good to 1e-6, and depends on how the tensor is
            # cut
            parts.append(torch.linalg.vector_norm(local, norm_type, dtype=torch.float64).to(device))
    if device is None:
        return torch.zeros((), dtype=torch.float64)
    totals = []
    for over, parts in norms.items():
        total = torch.linalg.vector_norm(torch.stack(parts), norm_type)
        for name in over:
            total = torch.linalg.vector_norm(
                gather_from_ranks(total, resolve_process_group(name)), norm_type
            )
        totals.append(total)
    total = torch.linalg.vector_norm(torch.stack(totals), norm_type)
    # replicated gradients may differ in the last bit
    for name in dict.fromkeys(itertools.chain(*norms)):
        total = gather_from_ranks(total, resolve_process_group(name))[0]
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(f"the norm of the gradients must be finite, got {float(total)}")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for where, local in gradients.items():
        torch._foreach_mul_(local, scale.to(where))  # pyright: ignore[reportPrivateImportUsage]
    return total


def _sharded_over(p: torch.Tensor, gradient: torch.Tensor | None, group) -> tuple[str, ...]:
    """Names of the groups over which a parameter is sharded, one after the other."""
    if is_dtensor(p):
        spec = p if gradient is None else gradient
        if not is_dtensor(spec) or any(placement.is_partial() for placement in spec.placements):
            raise ValueError(
                f"the gradient of a DTensor {list(p.shape)} must be a DTensor that is reduced, got "
                f"{spec}"
            )
        mesh = spec.device_mesh
        dims = [
            dim for dim, placement in enumerate(spec.placements) if not placement.is_replicate()
        ]
        return tuple(mesh.get_group(dim).group_name for dim in dims if mesh.size(dim) > 1)
    if name := getattr(p, "sharded_over", ""):
        return (name,)
    if not getattr(p, "tensor_model_parallel", False):
        return ()
    if group is None:
        raise ValueError(
            f"a parameter {list(p.shape)} has tensor_model_parallel=True: pass its group, "
            "tensor_parallel_group=.., got None"
        )
    return (group.group_name,)
