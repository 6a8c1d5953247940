"""`clip_grad_norm_`, as torch's, for models with both sharded and replicated parameters."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Literal

import torch

from ..call.subclasses import is_dtensor
from ..ranks.comm import gather_from_ranks, group_size, job_size
from ..ranks.groups import Group, resolve_process_group
from ..ranks.shard import refuse_group_of_other_ranks
from ..spec import CheckedBy, NotNegative, Positive, checked
from .marks import marked_group
from .row_dtensors import is_over_group

TRAINABLE = "the number of trainable parameters (one is frozen on all ranks or on none)"
MISSING = "the number of trainable parameters without a gradient (all ranks make each backward)"


@checked
@torch.no_grad()
def clip_grad_norm_(
    parameters: Annotated[
        Iterable[torch.Tensor] | torch.Tensor, CheckedBy("parameters, each with its gradient")
    ],
    max_norm: NotNegative,
    norm_type: Positive | Literal["inf"] = 2.0,
    *,
    error_if_nonfinite: bool = False,
    tensor_parallel_group: Group = None,
) -> torch.Tensor:
    """Scale gradients to a norm of at most max_norm, as torch.nn.utils.clip_grad_norm_ does.

    The norm is that of the whole model's gradients: each element counts once, and the norm has the
    same bits on all ranks of the groups.

    Which parameters are sharded is said by themselves: DTensors by their placements, on any mesh
    (Partial gradients are a ValueError); rows of a `VocabParallelHead` or `VocabParallelEmbedding`
    by an attribute that the module keeps; any other by ``parameter.tensor_model_parallel = True``,
    as Megatron-Core marks them. All others are replicated: their gradients are equal on all ranks.
    Ranks pass parts of the same parameters in one order (no other pipeline stages).

    A collective call: all ranks of these groups make it, and not under ``if rank == 0``, or the
    others wait. By small all-gathers they also compare the numbers of the call, how many
    parameters are trainable, and how many of these have no gradient. What differs is a ValueError
    on CPUs; on GPUs, which are not waited for, it makes norm and gradients NaN, and with
    ``error_if_nonfinite=True``, which waits, it is a ValueError, too. Where no parameter is
    sharded, nothing is exchanged or compared.

    Args:
        parameters: of the model; those without a gradient count as 0, and where none has one
            there is a UserWarning. ``main_grad`` comes before
            ``grad``.
        max_norm: equal on all ranks, as the two below.
        norm_type: p of the p-norm, infinity included, also as "inf".
        error_if_nonfinite: RuntimeError if the norm is NaN or infinite; otherwise all gradients
            become NaN or 0.
        tensor_parallel_group: of parameters with ``tensor_model_parallel = True``: the ranks that
            hold their other parts. Not ``dist.group.WORLD`` where that has data-parallel ranks,
            too, nor the data-parallel group, with which the norm is another one: an error where a
            `VocabShard` of other ranks exists, else silent. None will do without a process group,
            and where the job has one rank.

    Returns:
        float64 scalar, the norm before clipping.

    Raises:
        TypeError, ValueError: a sharded parameter whose group is not known, a group of parameters
            that do not say whether they are sharded, a group that is not that of a `VocabShard`
            where there are some, a group that was destroyed, a Partial
            gradient, gradients in the place of parameters, or an iterator that yields nothing, as
            one does that was read before (an empty list has the norm 0). On all ranks of the
            groups that wait, with the gradients as they were: another ``max_norm``, ``norm_type``
            or ``error_if_nonfinite`` on one rank, or fewer gradients, as of a rank that left out
            its backward, or froze a parameter (``requires_grad_(False)``).

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([weight], 1.0), weight.grad
        (tensor(5., dtype=torch.float64), tensor([0.6000, 0.8000]))
    """
    distinct = dict.fromkeys(_as_tensors(parameters))
    if not distinct:
        return torch.zeros((), dtype=torch.float64)
    _expect_no_gradients(distinct)
    _expect_marks(distinct, tensor_parallel_group)
    if tensor_parallel_group is not None and any(map(_is_of_group, distinct)):
        refuse_group_of_other_ranks("tensor_parallel_group", tensor_parallel_group)
    norm_type = float(norm_type)
    missing = 0
    device = None  # that of the first gradient, where norms are
    norms: dict[tuple[str, ...], list[torch.Tensor]] = {}  # by the groups of the parameters
    gradients: dict[torch.device, list[torch.Tensor]] = {}
    for p in distinct:
        found = getattr(p, "main_grad", None)
        gradient = p.grad if found is None else found
        # a shard without rows need not have one
        missing += gradient is None and p.requires_grad and p.numel() > 0
        over = _sharded_over(p, gradient, tensor_parallel_group)
        local = gradient.to_local() if is_dtensor(gradient) else gradient
        device = device or (p if local is None else local).device
        parts = norms.setdefault(over, [torch.zeros((), dtype=torch.float64, device=device)])
        if local is not None and local.numel():
            gradients.setdefault(local.device, []).append(local)
            # in fp32 the norm of a large tensor is good to 1e-6, and depends on how the tensor is
            # cut
            norm = torch.linalg.vector_norm(local, norm_type, dtype=torch.float64)
            parts.append(norm.to(device))
    trainable = sum(p.requires_grad for p in distinct)
    if trainable and not gradients and missing == trainable:
        warnings.warn(
            f"none of {trainable} trainable parameters has a gradient, so that there is nothing to "
            "clip: was the backward left out, or FSDP2's set_requires_gradient_sync(True) before "
            "the last micro-batch?",
            stacklevel=3,
        )
    total = _norm_over_groups(norms, norm_type)
    numbers = {
        "max_norm": max_norm,
        "norm_type": norm_type,
        "error_if_nonfinite": error_if_nonfinite,
        TRAINABLE: trainable,
        MISSING: missing,
    }
    total = _agreed_norm(total, norms, numbers, error_if_nonfinite)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(f"the norm of the gradients must be finite, got {float(total)}")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for where, local in gradients.items():
        torch._foreach_mul_(local, scale.to(where))  # pyright: ignore[reportPrivateImportUsage]
    return total


def _as_tensors(parameters) -> list[torch.Tensor]:
    """Return the parameters as a list.

    Raises TypeError for anything but tensors, and ValueError for an iterator that is used up.
    """
    name = type(parameters).__name__
    if isinstance(parameters, torch.nn.Module):
        raise TypeError(f"parameters must be tensors, got {name}: pass model.parameters()")
    if not isinstance(parameters, Iterable):
        raise TypeError(f"parameters must be tensors, got {name}")
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if not given and isinstance(parameters, Iterator):
        raise ValueError(
            f"parameters must be tensors, got a {name} that yields none: one that was read before "
            "is used up, so call model.parameters() anew, or pass list(model.parameters())"
        )
    for p in given:
        if not isinstance(p, torch.Tensor):
            raise TypeError(
                f"parameters must be tensors, got {type(p).__name__} among them: pass "
                "model.parameters()"
            )
    return given


def _expect_no_gradients(parameters: Collection[torch.Tensor]):
    """Raise TypeError for tensors none of which can have a gradient, as gradients themselves."""
    if not any(map(_may_have_gradient, parameters)):
        raise TypeError(
            f"parameters must be those whose gradients are scaled, got {len(parameters)} tensors "
            "that require no gradient and have none: are they the gradients? Pass "
            "model.parameters()"
        )


def _may_have_gradient(p: torch.Tensor) -> bool:
    if p.requires_grad or isinstance(p, torch.nn.Parameter):
        return True
    return p.grad is not None or getattr(p, "main_grad", None) is not None


def _expect_marks(parameters: Collection[torch.Tensor], group):
    """Raise ValueError if there is a group, and no parameter says whether it is sharded."""
    if group_size(group) > 1 and not any(map(_is_marked, parameters)):
        raise ValueError(
            "tensor_parallel_group= needs sharded parameters that say so, "
            f"parameter.tensor_model_parallel = True, got {len(parameters)} parameters that say "
            "nothing: mark those that are, or leave the group out if none is"
        )


def _is_marked(p: torch.Tensor) -> bool:
    return any(hasattr(p, x) for x in ("tensor_model_parallel", "sharded_over", "placements"))


def _is_of_group(p: torch.Tensor) -> bool:
    """Return True for a parameter whose group the caller says."""
    says_itself = is_dtensor(p) or hasattr(p, "sharded_over")
    return getattr(p, "tensor_model_parallel", False) and not says_itself


def _norm_over_groups(norms: dict[tuple[str, ...], list[torch.Tensor]], norm_type: float):
    """Return the norm of the whole model, a float64 scalar, from norms of this rank's parts.

    The parts are by the names of the groups over which they are sharded.
    """
    totals = []
    for over, parts in norms.items():
        total = torch.linalg.vector_norm(torch.stack(parts), norm_type)
        for name in over:
            of_ranks = gather_from_ranks(total, resolve_process_group(name))
            total = torch.linalg.vector_norm(of_ranks, norm_type)
        totals.append(total)
    return torch.linalg.vector_norm(torch.stack(totals), norm_type)


def _agreed_norm(
    total: torch.Tensor,
    norms: Collection[tuple[str, ...]],
    numbers: dict[str, float],
    may_wait: bool,
) -> torch.Tensor:
    """Return the first rank's norm of the whole model on all ranks of all groups.

    It has the same bits everywhere, though replicated gradients may differ in the last one. Numbers
    that must be equal travel with it: ValueError where they differ, or a norm of NaN where nobody
    may wait for the GPU that knows it.
    """
    names = dict.fromkeys(itertools.chain(*norms))
    if not names:
        return total
    own = torch.stack([total.new_full((), float(number)) for number in numbers.values()])
    sizes = [1, len(own), len(own)]
    packet = torch.cat([total.view(1), own, own])
    for name in names:
        of_ranks = gather_from_ranks(packet, resolve_process_group(name))
        norm, least, most = of_ranks.split(sizes, 1)
        packet = torch.cat([norm[0], least.amin(0), most.amax(0)])
    norm, least, most = packet.split(sizes)
    if packet.is_cuda and not may_wait:
        return torch.where((least == most).all(), norm[0], torch.nan)
    for what, low, high in zip(numbers, least.tolist(), most.tolist()):
        if low != high:
            raise ValueError(
                f"clip_grad_norm_ needs {what} equal on all ranks, got {low:g} on one and {high:g} "
                "on another; nothing was scaled"
            )
    return norm[0]


def _sharded_over(p: torch.Tensor, gradient: torch.Tensor | None, group) -> tuple[str, ...]:
    """Return the names of the groups over which a parameter is sharded, one after the other.

    They are groups that exist: what was destroyed is a ValueError.
    """
    own_rows = marked_group(p)
    if is_dtensor(p):
        spec = p if gradient is None else gradient
        if not is_dtensor(spec) or any(placement.is_partial() for placement in spec.placements):
            raise ValueError(
                f"the gradient of a DTensor {list(p.shape)} must be a DTensor that is reduced, got "
                f"{spec}"
            )
        mesh = spec.device_mesh
        placements = enumerate(spec.placements)
        dims = [dim for dim, placement in placements if not placement.is_replicate()]
        names: list[str] = [mesh.get_group(dim).group_name for dim in dims if mesh.size(dim) > 1]
        # FSDP2 may have cut these over other ranks
        if own_rows and not is_over_group(spec, own_rows):
            names.append(own_rows)
        return tuple(names)
    if own_rows:
        return (own_rows,)
    if not getattr(p, "tensor_model_parallel", False):
        return ()
    if group is None:
        if job_size() == 1:
            return ()  # one rank has the other parts, too
        raise ValueError(
            f"a parameter {list(p.shape)} has tensor_model_parallel=True: pass its group, "
            "tensor_parallel_group=.., got None"
        )
    return (group.group_name,)
