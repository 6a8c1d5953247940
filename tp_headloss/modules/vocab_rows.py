"""`VocabRows`: a module that holds one rank's rows of a vocabulary matrix.

It has their initialisation, and their state_dict.
"""

from __future__ import annotations

import importlib
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..call.subclasses import is_dtensor
from ..ranks.shard import VocabShard
from ..spec import Instance, NotNegative, checked
from . import saved_rows
from .marks import mark
from .replicas import expect_no_replicas
from .row_dtensors import (
    as_dtensor,
    expect_mesh_of,
    expect_no_rows_of_other_ids,
    expect_sharded_over,
    ranks_of,
)

# rows that one generator draws, whatever the shard: a seed means other weights if this changes
INIT_ROWS = 1024


@checked
@dataclass(frozen=True)
class Init:
    """Initialisation of a vocabulary matrix.

    Weights are normal, and depend on the seed and the row alone, so that every group size gives the
    same matrix (on one type of device). Padding rows and biases are 0. `torch.nn.init` on a module's
    weight, from a generator in the same state on all ranks, gives all shards the same rows: call
    ``module.reset_parameters()``, or pass a generator whose seed depends on the rank,
    ``torch.nn.init.normal_(weight, generator=torch.Generator(device).manual_seed(1000 * seed +
    rank))``. Nothing notices equal rows but a call with ``Options(validate="full")``.

    Args:
        seed: by default drawn from torch's generator, which must be in the same state on all ranks.

    Examples:
        >>> shard = VocabShard.from_group(None, 5, padded_size=8)
        >>> VocabParallelHead(3, shard, init=Init(std=0.02, seed=1)).weight.shape
        torch.Size([8, 3])
    """

    std: NotNegative = 0.02
    seed: int | None = None


class VocabRows(nn.Module):
    """Module with the rows of a shard: ``weight`` [width, H], and optionally ``bias`` [width]."""

    def __init__(
        self,
        hidden_size: int,
        shard: VocabShard,
        init: Init | None,
        device,
        dtype,
        bias=False,
        weight=None,
    ):
        super().__init__()
        if shard.world_size > 1:
            # without it torch.load refuses the DTensors of a state_dict; its import takes seconds
            importlib.import_module("torch.distributed.tensor")
        self.hidden_size = hidden_size
        self.shard = shard
        rows = shard.width
        if weight is None:
            self.weight = nn.Parameter(torch.empty(rows, hidden_size, device=device, dtype=dtype))
        else:
            expected = shard.padded_size if is_dtensor(weight) else rows
            if weight.shape != (expected, hidden_size):
                whose = "the DTensor of all rows" if is_dtensor(weight) else "this rank's rows"
                has_other_rows = weight.shape[1:] == (hidden_size,)
                raise ValueError(
                    f"weight must be [{expected}, {hidden_size}], {whose} with padding "
                    f"(padded_size={shard.padded_size}), got {list(weight.shape)}"
                    + ": make the module that owns it with the same shard"
                    * has_other_rows
                )
            _expect_nothing_of_its_own(weight, init, device, dtype)
            device, dtype = weight.device, weight.dtype  # of the bias
            self.weight = weight
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        # in a tuple, so that it is registered only once
        self._tied_weight = None if weight is None else (weight,)
        init = init or Init()
        seed = int(torch.randint(1 << 31, (), device="cpu")) if init.seed is None else init.seed
        self.init = replace(init, seed=seed)
        self.reset_parameters()
        self.register_state_dict_post_hook(_describe_rows)
        self.register_load_state_dict_pre_hook(_select_rows)

    def __setattr__(self, name: str, value: Any):
        """FSDP2 replaces the parameters of a class with a method of this name by setattr, which
        comes to `register_parameter`, and those of all others behind the module's back."""
        if name == "shard":
            Instance(VocabShard).check("shard", value, {})
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None):
        if name in ("weight", "bias"):
            expect_no_rows_of_other_ids(self.shard, param, name)
        super().register_parameter(name, param)
        self.mark_sharded()

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.mark_sharded()  # what `to_empty`, say, made anew
        return self

    def __setstate__(self, state):
        super().__setstate__(state)
        self.mark_sharded()

    def mark_sharded(self):
        """Say on the parameters themselves that they are sharded, and over which group.

        `clip_grad_norm_` reads it. Each forward says it again, because torch replaces parameters in
        ways that no module sees. Parameters that a subclass adds are its own.
        """
        for name in ("weight", "bias"):
            p = self._parameters.get(name)
            if p is not None and self.shard.world_size > 1:
                mark(p, self.shard)

    def begin_eager_call(self):
        """Mark the parameters, and raise ValueError if DDP took their rows for replicas."""
        self.mark_sharded()
        expect_no_replicas(self, self.shard)

    def expect_no_rows_of_hooks(self, method: str):
        """Raise ValueError in a method beside forward, before which no hook runs, if hooks compute
        the rows: they would be those of the last forward."""
        computed = [
            name for name in ("weight", "bias") if isinstance(vars(self).get(name), torch.Tensor)
        ]
        if computed:
            raise ValueError(
                f"{method} runs no hooks, and hooks compute {computed} of this "
                f"{type(self).__name__} before each forward, so that it would read the last "
                "forward's: call the module itself, or use torch.nn.utils.parametrizations, which "
                "compute at each read"
            )

    @torch.no_grad()
    def reset_parameters(self):
        """Draw the weight again, and set the bias to 0.

        A tied weight stays as it is: its owner draws it. For modules made on the meta device, after
        `to_empty`. ValueError if it untied the weight, or FSDP2 sharded it.
        """
        if self._tied_weight is not None and self._tied_weight[0] is not self.weight:
            raise ValueError(
                "the weight is no longer tied (to_empty does that): set head.weight = "
                "embedding.weight"
            )
        if self.bias is not None:
            self.bias.zero_()
        if self._tied_weight is not None or self.weight.is_meta:
            return
        shard = self.shard
        weight = self.weight.to_local() if is_dtensor(self.weight) else self.weight
        if weight.shape[0] != shard.width:
            raise ValueError(
                f"of {shard.width} rows {weight.shape[0]} are here: draw them before fully_shard"
            )
        weight.zero_()
        end = shard.start + shard.valid_width
        for first in range(shard.start // INIT_ROWS * INIT_ROWS, end, INIT_ROWS):
            # hashed, because nearby seeds of one generator, or nearby blocks of two modules, would
            # be correlated
            seed = random.Random(f"{self.init.seed} {first}").getrandbits(32)
            generator = torch.Generator(weight.device).manual_seed(seed)
            block = weight.new_empty(INIT_ROWS, self.hidden_size, dtype=torch.float32)
            block.normal_(0.0, self.init.std, generator=generator)
            low = max(first, shard.start)
            high = min(first + INIT_ROWS, end)
            weight[low - shard.start : high - shard.start] = block[low - first : high - first]

    def to_dtensor(self, mesh) -> VocabRows:
        """Make the parameters DTensors, and return the module.

        They are ``Shard(0)`` on the one dimension of the mesh, which has the ranks of the shard's
        group. Needed before the parameters are sharded again over another mesh dimension (FSDP2):
        without it, ``fully_shard`` takes them for replicated, so that it raises over a mesh with
        these ranks, as `state_dict` does over any mesh. Needed as well to save an optimiser's state
        with `torch.distributed.checkpoint`, which would save one rank's for all. Call it before
        anything else holds the parameters: they are replaced, and what they were is empty from then
        on, so that a module that was tied before raises. An optimiser that was made before trains
        nothing.

        Raises:
            TypeError, ValueError: a mesh that is not of the group's ranks alone, or parameters that
                ``fully_shard`` has sharded before.
        """
        expect_mesh_of(self.shard, mesh)
        for name, p in list(self.named_parameters(recurse=False)):
            if is_dtensor(p):
                expect_sharded_over(self.shard, p, f"to_dtensor of {name}")
                continue
            if self._tied_weight is not None and name == "weight":
                raise ValueError(
                    "a tied weight is its owner's: call to_dtensor there before the head is made"
                )
            rows = as_dtensor(p.detach(), self.shard, mesh)
            setattr(self, name, nn.Parameter(rows, requires_grad=p.requires_grad))
            p.data = p.data.new_empty(0, *p.shape[1:])  # who holds it has no rows, not other ones
        return self

    def extra_repr(self) -> str:
        shard = self.shard
        ids = (
            f"ids [{shard.start}, {shard.stop}) of {shard.vocab_size} on {shard.world_size} rank(s)"
        )
        return f"hidden_size={self.hidden_size}, {ids}, bias={self.bias is not None}"


def _expect_nothing_of_its_own(weight: torch.Tensor, init: Init | None, device, dtype):
    """Raise ValueError for what a weight that is tied to cannot follow: its owner made it."""
    if init is not None:
        raise ValueError(
            f"init is of a weight that the module draws, got {init} beside weight=: leave it out, "
            "and give it to the owner of the weight"
        )
    device = weight.device if device is None else torch.device(device)
    is_there = device.type == weight.device.type and device.index in (None, weight.device.index)
    if not is_there or dtype not in (None, weight.dtype):
        raise ValueError(
            f"device and dtype must be those of weight=, {weight.device} and {weight.dtype}, got "
            f"{device} and {dtype or weight.dtype}: leave them out"
        )


def _describe_rows(module, state, prefix, metadata):
    """Make the entries of a state_dict DTensors: a hook of `state_dict`.

    DTensors say which rows of the whole matrix they are.
    """
    if module.shard.world_size == 1:
        return
    module.shard.expect_live_group()
    _expect_own_parameters(module, state, prefix)
    for name in ("weight", "bias"):
        x = state.get(prefix + name)
        own = getattr(module, name)
        if is_dtensor(x):
            expect_sharded_over(module.shard, x, f"state_dict of {prefix}{name}")
        if x is not None and not is_dtensor(x) and x is not own:  # keep_vars wants the parameter
            state[prefix + name] = as_dtensor(x, module.shard)
            if own.requires_grad:
                saved_rows.say_what_is_not_covered()
    saved_rows.describe(metadata, module.shard, state.get(prefix + "weight"))


def _expect_own_parameters(module, state, prefix):
    """Raise ValueError for rows that are computed of other tensors.

    As plain tensors of a state_dict they would say nothing, and be one rank's for all.
    """
    computed = [
        name
        for name in ("weight", "bias")
        if getattr(module, name) is not None and name not in module._parameters
    ]
    if not computed:
        return
    rows = [
        key
        for key, x in state.items()
        if key.startswith(prefix)
        and isinstance(x, torch.Tensor)
        and not is_dtensor(x)
        and x.shape[:1] == (module.shard.width,)
    ]
    if rows:
        raise ValueError(
            f"a state_dict describes the rows of {computed} of a {type(module).__name__} as "
            f"parameters, got rows that are computed of {sorted(rows)}: before it is saved, make "
            "them a parameter again (parametrize.remove_parametrizations, prune.remove, "
            "remove_weight_norm, remove_spectral_norm)"
        )


def _holds_rows(x, shard: VocabShard) -> bool:
    """True if this rank's part of a DTensor is the rows of the shard."""
    mesh = x.device_mesh
    even = mesh.ndim == 1 and x.placements[0].is_shard(0) and x.shape[0] == shard.padded_size
    if not even:
        return False
    return dist.get_process_group_ranks(mesh.get_group()) == ranks_of(shard)


def _select_rows(module, state, prefix, metadata, strict, missing, unexpected, errors):
    """Replace entries of a state_dict by this rank's rows: a hook of `load_state_dict`.

    It replaces DTensors of any sharding, and whole matrices with or without padding. For entries of
    another size it appends to `errors`, from which torch makes one exception.
    """
    for name in ("weight", "bias"):
        key = prefix + name
        given = state.get(key)
        own = getattr(module, name)
        if given is None or own is None:
            continue
        error, state[key] = _own_rows(given, own, module.shard, metadata)
        if error:
            errors.append(f"{key} {error}")


def _own_rows(given: Any, own, shard: VocabShard, metadata: dict) -> tuple[str, Any]:
    """Return why an entry of a state_dict cannot be loaded, or "", and what torch then loads.

    That is this rank's rows, as a DTensor if the parameter is one; or the entry itself, which torch
    compares with the parameter.
    """
    entry = given
    if saved_rows.are_own(metadata, shard, given):
        given = given.to_local()
    elif (why := saved_rows.why_not_own(metadata, shard, given)) is not None:
        return why, own  # so that torch finds nothing else to say
    whole = {shard.vocab_size, shard.padded_size or shard.vocab_size}
    rows = given.shape[0] if given.dim() else 0
    if is_dtensor(own):
        if rows in whole:
            return "", _like(own, given, shard)
        if is_dtensor(given) or own.device_mesh.ndim > 1:
            return "", entry
    if rows not in whole and (is_dtensor(given) or rows != shard.width):
        return _why_not_rows(given, own, whole, shard), entry
    given = _cut(given, shard)
    return "", as_dtensor(given, shard, own.device_mesh) if is_dtensor(own) else given


def _cut(given: Any, shard: VocabShard) -> torch.Tensor:
    """Return this rank's rows, with padding, of a whole matrix, or of rows that are its own."""
    if is_dtensor(given):
        given = given.to_local() if _holds_rows(given, shard) else given.full_tensor()
    if given.shape[0] == shard.width:
        return given
    part = given[shard.start : min(shard.stop, shard.vocab_size)]
    rows = given.new_zeros(shard.width, *given.shape[1:])
    rows[: len(part)] = part
    return rows


def _why_not_rows(given: torch.Tensor, own, whole: set[int], shard: VocabShard) -> str:
    """Return why an entry's rows are neither this rank's nor the whole vocabulary's."""
    rows = given.shape[0] if given.dim() else 0
    said = ""
    if given.dim() == own.dim() == 2 and rows == own.shape[1]:
        said = ": a matrix [H, V] has to be transposed, .t()"
    elif rows > shard.vocab_size:
        said = f": cut another padding off, [:{shard.vocab_size}]"
    numbers = " or ".join(map(str, sorted(whole)))
    return (
        f"must have this rank's {shard.width} rows or the whole vocabulary's {numbers}, got "
        f"{rows}{said}"
    )


def _like(own, whole: torch.Tensor, shard: VocabShard):
    """Return a whole matrix, with or without padding, as a DTensor that is cut as a parameter is.

    A DTensor of the parameter's size stays as it is: torch cuts it.
    """
    from torch.distributed.tensor import distribute_tensor

    if is_dtensor(whole) and whole.shape == own.shape:
        return whole
    given = whole.full_tensor() if is_dtensor(whole) else whole
    rows = saved_rows.with_padding(given, shard).to(own.device)
    return distribute_tensor(rows, own.device_mesh, own.placements, src_data_rank=None)
