"""The two vocabulary matrices of a model as modules: each rank of a group holds its rows, and no rank all of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .api import Options, Transform
from .autograd import FromShards, ToShards
from .dtensor import is_dtensor, local_head
from .head_loss import HeadLoss, HeadLossOutput
from .linear import Linear, linear_vocab_statistics
from .shard import VocabShard
from .stats import VocabStatistics
from .validation import expect_ids

INIT_ROWS = 1024  # rows that are drawn together, whatever the shard: part of what a seed means


@dataclass(frozen=True)
class Init:
    """Weights are normal with this standard deviation, and a function of the seed and the row alone: every group size
    gives the same matrix (on one type of device). Padding rows and biases are 0. seed None: drawn from torch's default
    generator, which must be in the same state on all ranks, as for any module that ranks replicate."""

    std: float = 0.02
    seed: int | None = None


class _VocabRows(nn.Module):
    """A parameter ``weight`` [width, H] of a shard's rows, its initialisation and its state."""

    def __init__(self, hidden_size: int, shard: VocabShard, init: Init | None, device, dtype, bias=False, weight=None):
        super().__init__()
        init = init or Init()
        drawn = int(torch.randint(1 << 31, (), device="cpu")) if init.seed is None else init.seed
        self.hidden_size, self.shard, self.init = hidden_size, shard, replace(init, seed=drawn)
        rows = shard.width
        if weight is None:
            self.weight = nn.Parameter(torch.empty(rows, hidden_size, device=device, dtype=dtype))
        else:
            whole = shard.padded_size if is_dtensor(weight) else rows
            if weight.shape != (whole, hidden_size):
                raise ValueError(f"weight must be [{whole}, {hidden_size}], got {list(weight.shape)}")
            self.weight = weight
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        self._tied = None if weight is None else (weight,)  # not registered a second time
        self.reset_parameters()
        self.register_state_dict_post_hook(_as_dtensors)
        self.register_load_state_dict_pre_hook(_as_held)

    @torch.no_grad()
    def reset_parameters(self):
        """Draw the weight again (a tied one is its owner's); for modules made on the meta device, after `to_empty`.
        ValueError if that untied the weight, or if the rows have been sharded once more (FSDP2) before."""
        if self._tied is not None and self._tied[0] is not self.weight:
            raise ValueError("the weight is no longer tied (to_empty does that): set head.weight = embedding.weight")
        if self.bias is not None:
            self.bias.zero_()
        if self._tied is not None or self.weight.is_meta:
            return
        weight, shard = self.weight.to_local() if is_dtensor(self.weight) else self.weight, self.shard
        if weight.shape[0] != shard.width:
            raise ValueError(f"of {shard.width} rows {weight.shape[0]} are here: draw them before fully_shard")
        weight.zero_()
        end = shard.start + shard.valid_width
        for first in range(shard.start // INIT_ROWS * INIT_ROWS, end, INIT_ROWS):
            # hashed, because nearby seeds of one generator, or nearby blocks of two modules, would be related
            seed = random.Random(f"{self.init.seed} {first}").getrandbits(32)
            generator = torch.Generator(weight.device).manual_seed(seed)
            block = torch.empty(INIT_ROWS, self.hidden_size, device=weight.device)
            block.normal_(0.0, self.init.std, generator=generator)
            low, high = max(first, shard.start), min(first + INIT_ROWS, end)
            weight[low - shard.start : high - shard.start] = block[low - first : high - first]

    def to_dtensor(self, mesh) -> _VocabRows:
        """Make the parameters DTensors, ``Shard(0)`` on the one dimension of the mesh: for whoever shards them again
        over another dimension (FSDP2), or wants an optimiser's state to be saved by `torch.distributed.checkpoint`.
        Before any other module is tied to the weight."""
        for name, p in list(self.named_parameters(recurse=False)):
            if is_dtensor(p):
                continue
            if self._tied is not None and name == "weight":
                raise ValueError("a tied weight is its owner's: call to_dtensor there before the head is made")
            setattr(self, name, nn.Parameter(_dtensor(p.detach(), self.shard, mesh), requires_grad=p.requires_grad))
        return self

    def extra_repr(self) -> str:
        shard = self.shard
        ids = f"ids [{shard.start}, {shard.stop}) of {shard.vocab_size} on {shard.world_size} rank(s)"
        return f"hidden_size={self.hidden_size}, {ids}, bias={self.bias is not None}"


class VocabParallelEmbedding(_VocabRows):
    """Rows of a sharded vocabulary matrix by id: ids [..] replicated -> [.., H] replicated; forward: one all-reduce,
    backward: no communication.

    With sequence_parallel=True ids are [S, ..] and the result is this rank's [S/P, .., H] of the first dimension;
    forward: one reduce-scatter, backward: one all-gather. An id outside [0, vocab_size) has a row of NaN on every rank.
    """

    def __init__(
        self,
        hidden_size: int,
        shard: VocabShard,
        *,
        init: Init | None = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(hidden_size, shard, init or Init(std=1.0), device, dtype)
        self.sequence_parallel = sequence_parallel

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        expect_ids("ids", ids)
        if not torch.compiler.is_compiling():
            self.shard.expect_live_group()
        shard, weight = self.shard, self.weight.to_local() if is_dtensor(self.weight) else self.weight
        if weight.shape[0] != shard.width:
            raise ValueError(f"weight must be sharded, this rank's {shard.width} rows, got {weight.shape[0]}")
        if self.sequence_parallel and (ids.dim() == 0 or ids.shape[0] % shard.world_size):
            raise ValueError(f"ids must be [S, ..] with S a multiple of {shard.world_size}, got {list(ids.shape)}")
        owned = (ids >= shard.start) & (ids < shard.start + shard.valid_width)
        part = weight.new_zeros(*ids.shape, self.hidden_size)
        if shard.width:
            part = F.embedding((ids - shard.start).masked_fill(~owned, 0), weight)
        unknown = (ids < 0) | (ids >= shard.vocab_size)
        # a select, because a row of NaN times 0 is not 0
        part = torch.where(owned.unsqueeze(-1), part, 0.0).masked_fill(unknown.unsqueeze(-1), torch.nan)
        how = "reduce_scatter" if self.sequence_parallel else "all_reduce"
        return FromShards.apply(part, how, shard.world_size, shard.group_name, _everywhere(part, how, shard))


class VocabParallelHead(_VocabRows):
    """The output layer of a model, weight [V/P, H] sharded on V: hidden states in; logits, statistics or losses out.

    ``head(hidden, labels)`` is the `HeadLossOutput` of ``head_loss`` without logits (`HeadLoss.linear`),
    ``head.statistics(hidden, labels)`` is `linear_vocab_statistics`, ``head(hidden)`` are this rank's logits.

    The gradient of the hidden states is added up over the group here, as ``linear.hidden_grad`` says: "all_reduce" for
    replicated ones, "reduce_scatter" for sequence parallelism (hidden [S/P, ..], labels and results of all S), "none"
    to leave it partial. Under `torch.no_grad` everything is as fused.

    weight: a parameter to tie to, `VocabParallelEmbedding.weight` say. transform: what is done to logits before losses
    and statistics; its bias is the module's own. ``state_dict`` describes weight and bias as DTensors (``Shard(0)``),
    so that `torch.distributed.checkpoint` saves them at one group size and loads them at another; `load_state_dict`
    also takes whole matrices, or this rank's rows.

    Several depths of multi-token prediction are one call, see `multi_token_targets`.
    """

    def __init__(
        self,
        hidden_size: int,
        shard: VocabShard,
        *,
        head_loss: HeadLoss | None = None,
        bias: bool = False,
        weight: nn.Parameter | None = None,
        transform: Transform | None = None,
        linear: Linear | None = None,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(hidden_size, shard, init, device, dtype, bias, weight)
        if transform is not None and (transform.bias is not None or isinstance(transform.temperature, torch.Tensor)):
            raise ValueError(
                "transform must be numbers here: the bias is the module's, temperatures of tokens a call's"
            )
        self.head_loss = HeadLoss() if head_loss is None else head_loss
        self.transform, self.linear = transform or Transform(), linear or Linear()

    def forward(
        self, hidden: torch.Tensor, labels: torch.Tensor | None = None, *, head_loss: HeadLoss | None = None, **kwargs
    ) -> HeadLossOutput | torch.Tensor:
        """hidden [.., H], labels [..] -> `HeadLossOutput`; without labels `logits`. head_loss: another one than the
        module's; other keywords as in `HeadLoss.linear`, a transform for a temperature of the call."""
        if labels is None:
            if kwargs or head_loss is not None:
                raise ValueError(f"without labels there are logits only, got {sorted(kwargs) or 'a head_loss'}")
            return self.logits(hidden)
        kwargs = {"linear": self.linear, **kwargs, "transform": self._transform(kwargs.get("transform"))}
        head_loss = head_loss or self.head_loss
        return head_loss.linear(hidden, self.weight, labels, bias=self.bias, shard=self.shard, **kwargs)

    def statistics(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor | None = None,
        want: tuple[str, ...] = (),
        *,
        options: Options | None = None,
        **kwargs,
    ) -> VocabStatistics:
        """hidden [.., H], labels [..] -> statistics [..]; keywords as in `linear_vocab_statistics`."""
        linear = replace(self.linear, mode="recompute", upstream=None)
        kwargs = {"linear": linear, "options": options, **kwargs, "transform": self._transform(kwargs.get("transform"))}
        return linear_vocab_statistics(
            hidden, self.weight, labels, bias=self.bias, shard=self.shard, want=want, **kwargs
        )

    def _transform(self, of_call: Transform | None) -> Transform:
        """The module's, at the temperature of a call."""
        if of_call is None:
            return self.transform
        if replace(of_call, temperature=1.0) != Transform():
            raise ValueError(f"a call's transform is for its temperature, the rest is the module's, got {of_call}")
        return replace(self.transform, temperature=of_call.temperature)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [.., H] -> hidden @ weight^T + bias [.., width], sharded on V, not transformed: for HeadLoss with
        ``shard=head.shard, transform=head.transform``."""
        how = self.linear.hidden_grad
        hidden, weight, bias, shard = local_head(hidden, self.weight, self.bias, self.shard, how)
        hidden = ToShards.apply(hidden, how, shard.world_size, shard.group_name, _everywhere(hidden, how, shard))
        return F.linear(hidden, weight, bias)


def _everywhere(x, how: str, shard: VocabShard) -> torch.Tensor | None:
    """What makes a backward with a collective come on every rank, an empty shard's or a frozen one's, too."""
    if how == "none" or shard.world_size == 1 or torch.compiler.is_compiling():
        return None
    return x.new_empty(0).requires_grad_()


def multi_token_targets(
    labels: torch.Tensor, depths: int, weight: float = 0.1, *, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """labels [.., S], each position's next token -> labels and token weights [1 + D, .., S] of the main head and of D
    more, the d-th of which predicts the token d positions later; hidden states are then stacked, [1 + D, .., S, H].

    With ``denominator=`` the number T of labels that are not ignored (of the global batch), ``HeadLoss(...)``'s mean is
    the loss of DeepSeek-V3 (arXiv:2412.19437, eq. 24 and 25): main + weight / D * sum over d of 1 / T * (the sum over
    depth d's tokens). Megatron divides depth d by its own number of tokens, a few less. Acceptance of depth d: the mean
    of ``out.stats.correct[d]`` over ``out.stats.valid[d]`` (metric "accuracy"). Not for hidden states of sequence
    parallelism, whose first dimension is the sequence: gather them first.
    """
    if depths < 1:
        raise ValueError(f"depths must be at least 1, got {depths}")
    rows, length = [labels], labels.shape[-1]
    for depth in range(1, depths + 1):
        shifted = labels[..., min(depth, length) :]
        rows.append(F.pad(shifted, (0, length - shifted.shape[-1]), value=ignore_index))
    rows = torch.stack(rows)
    share = torch.full((1 + depths,), weight / depths, device=labels.device)
    share[:1].fill_(1.0)
    return rows, share.view(-1, *[1] * labels.dim()).expand(rows.shape)


def _dtensor(local: torch.Tensor, shard: VocabShard, mesh=None):
    """Rows [width, ..] of this rank -> the DTensor that they are a part of, without communication or a copy."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(shard.group, local.device.type) if mesh is None else mesh
    if shard.padded_size is None:
        raise ValueError(
            f"only even cuts, those of VocabShard.from_group, can be a DTensor, got [{shard.start}, {shard.stop}): "
            "save the rows of each rank, module.weight, by themselves"
        )
    shape = torch.Size([shard.padded_size, *local.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local.contiguous(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _as_dtensors(module, state, prefix, metadata):
    """What `state_dict` says: which rows of the whole these are."""
    if module.shard.world_size == 1:
        return
    for name in ("weight", "bias"):
        if (x := state.get(prefix + name)) is None:
            continue
        if not is_dtensor(x) and x is not getattr(module, name):  # keep_vars wants the parameter
            state[prefix + name] = _dtensor(x, module.shard)


def _is_cut_alike(x, shard: VocabShard) -> bool:
    """Whether the rows of this rank in a DTensor are those of the shard."""
    mesh = x.device_mesh
    even = mesh.ndim == 1 and x.placements[0].is_shard(0) and x.shape[0] == shard.padded_size
    return even and dist.get_process_group_ranks(mesh.get_group()) == dist.get_process_group_ranks(shard.group)


def _as_held(module, state, prefix, metadata, strict, missing, unexpected, errors):
    """What `load_state_dict` takes: DTensors of any cut, whole matrices (with or without padding), own rows.

    Anything else stays as it is and is an error of `load_state_dict`, of which torch makes one exception.
    """
    shard = module.shard
    whole = {shard.vocab_size, shard.padded_size or shard.vocab_size}
    for name in ("weight", "bias"):
        given, own = state.get(prefix + name), getattr(module, name)
        if given is None or own is None or (is_dtensor(own) and (is_dtensor(given) or own.device_mesh.ndim > 1)):
            continue
        rows = given.shape[0] if given.dim() else 0
        if rows not in (whole if is_dtensor(given) else {*whole, shard.width}):
            errors.append(
                f"{prefix}{name} must have this rank's {shard.width} rows or the whole vocabulary's {sorted(whole)}, "
                f"got {rows}" + (f": cut another padding off, [:{shard.vocab_size}]" if rows > shard.vocab_size else "")
            )
            continue
        if is_dtensor(given):
            given = given.to_local() if _is_cut_alike(given, shard) else given.full_tensor()
        if given.shape[0] != shard.width:
            part = given[shard.start : min(shard.stop, shard.vocab_size)]
            given = given.new_zeros(shard.width, *given.shape[1:])
            given[: len(part)] = part
        state[prefix + name] = _dtensor(given, shard, own.device_mesh) if is_dtensor(own) else given
